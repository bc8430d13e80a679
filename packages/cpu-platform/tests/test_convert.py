# SPDX-License-Identifier: Apache-2.0
"""GGUF -> Hugging Face directory: row order, rounding, names, files, refusals. The real model's sum is in test_model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from numinous_cpu_platform import convert


def test_half_split_rows_undoes_the_interleaving_of_rotary_pairs() -> None:
    heads, head_dim, columns = 3, 8, 5
    weight = np.arange(heads * head_dim * columns, dtype=np.float32).reshape(-1, columns)
    # Row 2i of a GGUF head is row i of the original head, row 2i+1 is row i + head_dim/2.
    order = [
        head * head_dim + half * head_dim // 2 + pair
        for head in range(heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    interleaved = weight[order]
    assert not np.array_equal(interleaved, weight)
    np.testing.assert_array_equal(convert.half_split_rows(interleaved, heads), weight)


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.0, 0x3F80),
        (-2.5, 0xC020),
        (1.0 + 2**-8, 0x3F80),  # tie, even below
        (1.0 + 3 * 2**-8, 0x3F82),  # tie, even above
        (1.0 + 2**-8 + 2**-20, 0x3F81),  # just over the tie
        (0.0, 0x0000),
    ],
)
def test_bfloat16_rounds_to_nearest_even(value: float, bits: int) -> None:
    assert convert.to_bfloat16(np.array([value], np.float32)).tolist() == [bits]


@pytest.mark.parametrize(
    ("gguf_name", "name"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ],
)
def test_tensor_names(gguf_name: str, name: str) -> None:
    assert convert.hugging_face_name(gguf_name) == name


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "blk.x.attn_q.weight", "rope_freqs"])
def test_a_tensor_without_a_place_is_refused(name: str) -> None:
    with pytest.raises(convert.ConvertError, match="has no place in a Llama model"):
        convert.hugging_face_name(name)


def test_the_directory_is_complete_and_the_same_every_time(tiny_gguf: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    convert.convert(tiny_gguf, tmp_path / "a", lambda done, total: seen.append((done, total)))
    convert.convert(tiny_gguf, tmp_path / "b")
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)

    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["rms_norm_eps"], config["head_dim"], config["tie_word_embeddings"]) == (
        1e-5,
        16,
        True,
    )
    weights = (tmp_path / "a" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", weights[:8])
    header = json.loads(weights[8 : 8 + length])
    assert header["model.layers.0.mlp.down_proj.weight"]["shape"] == [64, 96]
    assert max(entry["data_offsets"][1] for name, entry in header.items() if name[0] != "_") == (
        len(weights) - 8 - length
    )


def test_the_tokenizer_splits_digits_and_survives_a_round_trip(
    tiny_gguf: Path, tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip(
        "tokenizers", reason="the engine's tokenizers is not installed"
    )
    convert.convert(tiny_gguf, tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "<|im_start|>at 12 times\n<|im_end|>"
    encoding = tokenizer.encode(text)
    assert encoding.tokens[:6] == ["<|im_start|>", "a", "t", "Ġ", "1", "2"]
    assert "Ġt" in encoding.tokens
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text


def test_other_architectures_tokenizers_and_files_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(convert.ConvertError, match="architecture 'gemma3' is not supported"):
        convert.model_config({"general.architecture": "gemma3"}, tied=True)
    with pytest.raises(convert.ConvertError, match="tokenizer 'llama'"):
        convert.tokenizer_files({"tokenizer.ggml.model": "llama"})
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"this is not a model" * 10)
    with pytest.raises(convert.ConvertError, match="not a readable GGUF file"):
        convert.convert(garbage, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rows_are_converted_in_pieces_without_changing_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf

    data = np.random.default_rng(1).standard_normal((7, 32), dtype=np.float32)
    tensor = SimpleNamespace(
        name="token_embd.weight",
        shape=(32, 7),
        n_elements=data.size,
        data=data,
        tensor_type=gguf.GGMLQuantizationType.F32,
    )
    convert.write_weights([tensor], {}, tmp_path / "whole")
    monkeypatch.setattr(convert, "ROWS_AT_A_TIME", 2)
    convert.write_weights([tensor], {}, tmp_path / "pieces")
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "pieces").read_bytes()
