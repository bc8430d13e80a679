# SPDX-License-Identifier: Apache-2.0
"""The dummy checkpoints of the engine benchmarks."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def dummy() -> types.ModuleType:
    pytest.importorskip("safetensors", reason="dummies are written as safetensors")
    return load("make_dummy")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(found)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


# Layer 0 and 3 of the tiny dummy, as the engine's loader took them (loaded into Glm5NextForConditionalGeneration of 0.5.20, every
# parameter of which was written): outputs × inputs.
KDA = {
    "A_log": (4,),
    "b_proj.weight": (4, 128),
    "dt_bias": (512,),
    "f_a_proj.weight": (128, 128),
    "f_b_proj.weight": (512, 128),
    "g_a_proj.weight": (128, 128),
    "g_b_proj.weight": (512, 128),
    "k_conv1d.weight": (512, 1, 4),
    "k_proj.weight": (512, 128),
    "o_norm.weight": (128,),
    "o_proj.weight": (128, 512),
    "q_conv1d.weight": (512, 1, 4),
    "q_proj.weight": (512, 128),
    "v_conv1d.weight": (512, 1, 4),
    "v_proj.weight": (512, 128),
}
LATENT = {
    "indexer.index_kpool_compress_ape": (4, 128),
    "indexer.index_kpool_compress_gate": (128, 128),
    "indexer.k_norm.bias": (128,),
    "indexer.k_norm.weight": (128,),
    "indexer.weights_proj.weight": (32, 128),
    "indexer.wk.weight": (128, 128),
    "indexer.wq_b.weight": (4096, 64),
    "kv_a_layernorm.weight": (512,),
    "kv_a_proj_with_mqa.weight": (512, 128),
    "kv_b_proj.weight": (2048, 512),
    "o_proj.weight": (128, 1024),
    "q_a_layernorm.weight": (64,),
    "q_a_proj.weight": (64, 128),
    "q_b_proj.weight": (1024, 64),
}


def test_flash_dummy(dummy: Any, tmp_path: Path) -> None:
    dummy.write("glm-flash", tmp_path / "a", tiny=True)
    dummy.write("glm-flash", tmp_path / "b", tiny=True, draft=True, seed=1)
    found, other = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    for layer, want in ((0, KDA), (1, KDA), (2, KDA), (3, LATENT)):
        at = f"model.layers.{layer}.self_attn."
        got = {name.removeprefix(at): tuple(t.shape) for name, t in found.items() if at in name}
        assert got == want, layer
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    draft = {name.removeprefix("model.layers.4.") for name in set(other) - set(found)}
    assert {"eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"} < draft
    assert {f"self_attn.{name}" for name in LATENT} < draft
    name = "model.layers.3.self_attn.q_b_proj.weight"
    assert not torch.equal(found[name], other[name]), "another seed"
    with pytest.raises(SystemExit, match="not empty"):
        dummy.write("glm-flash", tmp_path / "a", tiny=True)


def test_tokens_are_bytes(dummy: Any, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the engine's tokenizers")
    whole, _ = dummy.tokenizer()
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(whole))
    text = "".join(map(chr, range(1, 700))) + " 🙂<eos>"
    ids = tokenizer.encode(text).ids
    assert ids == [*text.removesuffix("<eos>").encode(), dummy.EOS]
    assert tokenizer.decode(ids) == text.removesuffix("<eos>")


@pytest.mark.parametrize(
    ("arch", "without"), [("deepseek-v3", {0, 1, 2}), ("glm-dsa", {2}), ("qwen35", {0, 1, 2})]
)
def test_dummies_of_transformers_models(
    dummy: Any, tmp_path: Path, arch: str, without: set[int]
) -> None:
    """Every weight has its place, logits have spread, answers depend on the prompt."""
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    dummy.write(arch, tmp_path, tiny=True)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    names = tensors(tmp_path)
    indexers = {n for n in range(3) if f"model.layers.{n}.self_attn.indexer.wk.weight" in names}
    assert indexers == {0, 1, 2} - without
    ids = torch.randint(256, (6, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids).logits
    assert 2 < logits.std() < 4
    assert len(set(logits[:, -1].argmax(-1).tolist())) > 3


def test_layers(dummy: Any, tmp_path: Path) -> None:
    dummy.write("deepseek-v3", tmp_path, tiny=True, layers=3)
    config = json.loads((tmp_path / "config.json").read_text())
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert config["num_hidden_layers"] == 3
    assert {name.split(".")[2] for name in names if ".layers." in name} == {"0", "1", "2"}
