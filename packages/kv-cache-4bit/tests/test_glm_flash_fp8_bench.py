# SPDX-License-Identifier: Apache-2.0
"""The dummy checkpoints and the gate of the engine benchmark, without a GPU."""

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


@pytest.mark.parametrize(("arch", "without"), [("deepseek-v3", {0, 1, 2}), ("glm-dsa", {2})])
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


@pytest.fixture(scope="module")
def bench() -> types.ModuleType:
    pytest.importorskip("httpx", reason="the benchmark needs httpx")
    load("cache_arms")
    return load("bench_glm_flash_fp8")


def arm(
    tokens: int, *, likeliest: int = 0, logprob: float = -1.0, cases: int = 40
) -> dict[str, Any]:
    scores = {"long, cold": [(logprob, n + likeliest) for n in range(cases)]}
    return {"tokens": tokens, "scores": scores, "again": scores, "cached": {}}


def test_gate_of_the_benchmark(bench: Any) -> None:
    stock = arm(1_000_000)
    ratio, floor, found = bench.check(stock, arm(1_751_000, logprob=-1.1), 0.8)
    assert (ratio, floor["long, cold"]["agree"], found["long, cold"]["agree"]) == (1.751, 1, 1)
    assert found["long, cold"]["difference"] == pytest.approx(0.1)
    for ours, said in (
        (arm(1_500_000), "pools do not differ as their bytes do"),
        (arm(1_751_000, likeliest=1), "agree less than asked"),
        (arm(1_751_000, logprob=float("nan")), "not finite"),
    ):
        with pytest.raises(SystemExit, match=said):
            bench.check(stock, ours, 0.8)
    flat = arm(1_000_000, cases=5)
    with pytest.raises(SystemExit, match="hardly depend on the prompt"):
        bench.check(flat, arm(1_751_000, cases=5), 0.8)


def layers_of(dummy: Any, arch: str) -> tuple[int, int]:
    """Full-attention layers of a dummy, and those with an indexer."""
    config = dummy.text_config(arch, tiny=False, draft=False)
    layers = [n for n in range(config["num_hidden_layers"]) if not dummy.is_linear(config, n)]
    return len(layers), sum(dummy.has_indexer(config, n) for n in layers)


def test_bytes_of_the_dummy(bench: Any, dummy: Any) -> None:
    assert layers_of(dummy, "glm-flash") == (bench.LAYERS, bench.INDEX_LAYERS)


@pytest.fixture(scope="module")
def kv4(bench: Any) -> types.ModuleType:
    return load("bench_kv4_dsa")


@pytest.mark.parametrize("arch", ["glm-dsa", "glm-flash"])
def test_gate_of_the_4_bit_benchmark(kv4: Any, dummy: Any, arch: str) -> None:
    _, *layers = kv4.MODELS[arch]
    assert layers_of(dummy, arch) == tuple(layers)
    arms = kv4.arms_of(arch, prefills=True)
    sizes = [kv4.bytes_per_token(arm.row, *layers) for arm in arms]
    fits = {arm.name: sizes[0] * 1_000_000 // size for arm, size in zip(arms, sizes, strict=True)}
    assert f"{fits['kv4'] / fits['fp8']:.3f}" == {"glm-dsa": "1.768", "glm-flash": "1.571"}[arch]

    def flipped(cases: int) -> dict[str, list[tuple[float, int]]]:
        return {"long, cold": [(-1.0, n + 1000 * (n < cases)) for n in range(200)]}

    def results(**flips: int) -> dict[str, dict[str, Any]]:
        return {
            name: {"tokens": tokens, "scores": flipped(flips.get(name[:3], 0)), "again": flipped(0)}
            for name, tokens in fits.items()
        }

    found = kv4.check(arch, arms, results(fp8=5, kv4=20), 4.0)
    assert found["kv4"]["agreement"]["long, cold"]["agree"] == 0.9
    assert found["kv4"]["pool_ratio"] == pytest.approx(sizes[0] / sizes[2], rel=1e-4)
    with pytest.raises(SystemExit, match=r"kv4, long, cold: 0\.115 of the likeliest tokens differ"):
        kv4.check(arch, arms, results(fp8=5, kv4=23), 4.0)
    wrong = results()
    wrong["kv4"]["tokens"] = wrong["fp8"]["tokens"]
    with pytest.raises(SystemExit, match="pools do not differ as their bytes do"):
        kv4.check(arch, arms, wrong, 4.0)


def test_arms_of_the_4_bit_benchmark(kv4: Any) -> None:
    names = [arm.name for arm in kv4.arms_of("glm-dsa", prefills=True)]
    assert names[:3] == ["bf16", "fp8", "kv4"]
    assert [kv4.fp8_of(name) in names for name in names if name.startswith("kv4")] == [True] * 3
    options = kv4.parse(["--arch", "glm-dsa", "--memory", "0.2"])
    for arm in kv4.arms_of("glm-dsa", prefills=False):
        server = kv4.cache_arms.server_of(arm, options, Path("model"), Path("folder"))
        assert server.command[-2:] == ["--kv-cache-dtype", arm.dtype]
        flag = "NUMINOUS_KV4_GLM_DSA"
        assert (flag in server.env) == (arm.name == "kv4")
