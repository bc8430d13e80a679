# SPDX-License-Identifier: Apache-2.0
"""A Llama GGUF file must give q and k in the row order of the checkpoint that it was made from."""

import gguf
import numpy as np
import pytest
import repro
import torch

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 16, 64
NAMES = {
    "blk.0.attn_q.weight": ("model.layers.0.self_attn.q_proj.weight", HEADS),
    "blk.0.attn_k.weight": ("model.layers.0.self_attn.k_proj.weight", KV_HEADS),
    "blk.0.attn_v.weight": ("model.layers.0.self_attn.v_proj.weight", KV_HEADS),
}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row order of the GGUF converter of Llama: within a head 0, d/2, 1, d/2 + 1, ..."""
    half = HEAD_DIM // 2
    order = [
        h * HEAD_DIM + side * half + i for h in range(heads) for i in range(half) for side in (0, 1)
    ]
    return rows[order]


def write(path, architecture, permute, quantization):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    expected = {}
    rng = np.random.default_rng(0)
    for gguf_name, (name, heads) in NAMES.items():
        rows = rng.standard_normal((heads * HEAD_DIM, HIDDEN), dtype=np.float32)
        stored = interleave(rows, heads) if permute and "attn_v" not in gguf_name else rows
        raw = gguf.quantize(stored, quantization)
        plain = gguf.quantize(rows, quantization)
        writer.add_tensor(gguf_name, raw, raw_dtype=quantization)
        suffix = "weight" if quantization == gguf.GGMLQuantizationType.F32 else "qweight"
        expected[name.replace("weight", suffix)] = torch.from_numpy(plain.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def read(path):
    iterate = repro.load_function(
        "srt/model_loader/weight_utils.py",
        "gguf_quant_weights_iterator",
        {"torch": torch},
    )
    loaded = dict(iterate(str(path), {key: name for key, (name, _) in NAMES.items()}))
    return {name: value for name, value in loaded.items() if not name.endswith("_type")}


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_llama_rows_are_those_of_the_checkpoint(tmp_path, kind):
    path = tmp_path / "llama.gguf"
    expected = write(path, "llama", True, gguf.GGMLQuantizationType[kind])
    loaded = read(path)
    assert loaded.keys() == expected.keys()
    for name, rows in expected.items():
        assert torch.equal(loaded[name], rows), name


def test_other_architectures_stay_as_they_are(tmp_path):
    path = tmp_path / "qwen2.gguf"
    expected = write(path, "qwen2", False, gguf.GGMLQuantizationType.F32)
    loaded = read(path)
    for name, rows in expected.items():
        assert torch.equal(loaded[name], rows), name
