# SPDX-License-Identifier: Apache-2.0
"""The accuracy script of NVFP4 caches, on a random Llama whose attention matters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the formats are torch")
for needed in ("transformers", "scipy", "tokenizers", "safetensors"):
    pytest.importorskip(needed, reason="the model and the gate's statistics need it")

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import bench_nvfp4_accuracy as bench  # noqa: E402
import transformers  # noqa: E402

from numinous_tooling.gate.accuracy import distance  # noqa: E402
from numinous_tooling.numerics import dequantize_nvfp4, quantize_nvfp4  # noqa: E402


@pytest.fixture(scope="module")
def model() -> transformers.LlamaForCausalLM:
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.15,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def test_arms(model: transformers.LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every arm is measured, bf16 is itself, 4 bits lose more than 8, and a record per arm says what ran."""
    monkeypatch.setattr(distance, "RESAMPLES", 99)
    rows = torch.randint(0, 256, (6, 25), generator=torch.Generator().manual_seed(1))
    found = {one.name: one for one in bench.evaluate(model, list(bench.ARMS), rows[:5], rows[5])}
    assert list(found) == list(bench.ARMS)
    kl = {name: one.summary.kl_low.value for name, one in found.items()}
    assert kl["bf16"] == 0 < kl["fp8"] < kl["nvfp4-k8"] < kl["nvfp4"]
    assert kl["nvfp4-v8"] < kl["nvfp4"] > kl["nvfp4-ends"]
    assert len(set(kl.values())) == len(kl), "two arms that do the same"
    assert found["nvfp4"].kl_times_fp8.value == pytest.approx(kl["nvfp4"] / kl["fp8"])
    assert [found[name].verdict for name in ("bf16", "fp8")] == ["", ""]
    assert found["nvfp4"].verdict in ("PASS", "FAIL", "INCONCLUSIVE")
    assert bench.bits(bench.ARMS["nvfp4-ends"], 4) == 6.25


def test_what_an_arm_keeps() -> None:
    x = torch.randn(1, 2, 9, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).float()  # fmt: skip
    calibrated: tuple[dict, dict] = ({}, {})
    bench.Cache(bench.Arm(), 3, *calibrated, calibrates=True).update(x, x, 1)

    def kept(name: str) -> torch.Tensor:
        k, _ = bench.Cache(bench.ARMS[name], 3, *calibrated).update(x, x, 1)
        return k

    plain = kept("nvfp4")
    assert torch.equal(plain, dequantize_nvfp4(*quantize_nvfp4(x)))
    assert torch.equal(kept("nvfp4-sinks")[..., :4, :], x[..., :4, :])
    assert torch.equal(kept("nvfp4-sinks")[..., 4:, :], plain[..., 4:, :])
    assert torch.equal(kept("nvfp4-ends"), plain), "a layer between the ends"
    square = bench.hadamard(64) @ bench.hadamard(64)
    assert torch.allclose(square, torch.eye(64), atol=1e-6)
    for name in ("nvfp4-mse", "nvfp4-centred", "nvfp4-turned", "nvfp4-global"):
        assert not torch.equal(kept(name), plain)
        assert float((kept(name) - x).norm() / x.norm()) < 0.15
    with pytest.raises(ValueError, match="no power of two"):
        bench.hadamard(96)


def test_errors_are_one_line(
    model: transformers.LlamaForCausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(tmp_path), "--text", str(tmp_path / "none")]
    assert bench.main([*arguments, "--arms", "fp9"]) == 2
    assert "no arm fp9; there are bf16" in capsys.readouterr().err
