# SPDX-License-Identifier: Apache-2.0
"""The adapter of `moe.norm_quant` without a GPU: who gets which pair, what stays in stock, what ends the process.

The kernels are replaced by their reference, the engine's functions by stand-ins that record their calls. On a GPU the served engine is
compared with stock by ``benchmarks/bench_norm_quant.py``.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from numinous_moe_gemm.engine import norm_quant
from numinous_moe_gemm.engine.norm_quant import NormQuant, around_linear, around_norm
from numinous_moe_gemm.hooks.norm_quant import judge
from numinous_moe_gemm.kernels import rmsnorm_quant as kernels
from numinous_moe_gemm.kernels.rmsnorm_quant import NormQuant as Result
from numinous_tooling.patching.serve_command import ServeCommand

HIDDEN = 256


class Count:
    """Counters that can be read back."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def engaged(self, n: int = 1) -> None:
        self.seen += ["engaged"] * n

    def refused(self, reason: str, n: int = 1) -> None:
        self.seen += [reason] * n


class Norm(torch.nn.Module):
    """What the adapter reads of an `RMSNorm`."""

    cast_x_before_out_mul = False
    variance_size_override = None
    variance_epsilon = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.linspace(0.5, 1.5, HIDDEN, dtype=torch.bfloat16), requires_grad=False
        )


@pytest.fixture
def state(monkeypatch: Any) -> Any:
    """A state whose place can be set, reference kernels, a recording GEMM; attribute `calls` lists what ran."""
    made = NormQuant(scales="column", verify=False, count=Count(), place=lambda: made.place_now)
    made.place_now, made.calls = (1, False), []
    monkeypatch.setattr(norm_quant, "_state", made)

    def fused(x: Any, weight: Any, eps: float, *, scales: Any, y: Any) -> Result:
        return add_fused(x, None, weight, eps, scales=scales, y=y)

    def add_fused(x: Any, residual: Any, weight: Any, eps: float, *, scales: Any, y: Any) -> Result:
        made.calls.append("fused")
        out = kernels.reference(x, weight, eps, scales=scales, residual=residual)
        y.copy_(out["y"])
        if residual is not None:
            residual.copy_(out["residual"])
        return Result(out["q"].view(torch.float8_e4m3fn), out["scale"], y)

    def gemm(
        q: Any, weight: Any, scale: Any, weight_scale: Any, block: Any, output_dtype: Any
    ) -> Any:
        made.calls.append(("gemm", q, scale))
        return torch.zeros(q.shape[0], weight.shape[0], dtype=output_dtype)

    def quant(x: Any, group: int, **_: Any) -> Any:
        out = kernels.reference(
            x,
            torch.ones(HIDDEN, dtype=torch.bfloat16),
            0.0,
            scales="column",
            rstd=torch.ones(len(x)),
        )
        return out["q"].view(torch.float8_e4m3fn), out["scale"]

    utils = types.ModuleType("fp8_utils")
    utils.w8a8_block_fp8_matmul_deepgemm = gemm
    utils.sglang_per_token_group_quant_fp8 = quant
    invariant = types.ModuleType("batch_invariant_ops")
    invariant.is_batch_invariant_mode_enabled = lambda: False
    made.invariant = invariant
    package = types.ModuleType("sglang.srt.layers.quantization")
    package.fp8_utils = utils
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.quantization", package)
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.quantization.fp8_utils", utils)
    layernorm = types.ModuleType("sglang.srt.layers.layernorm")
    layernorm._fp8_static_input_scale = lambda linear: getattr(linear, "input_scale", None)
    monkeypatch.setitem(sys.modules, "sglang.srt.batch_invariant_ops", invariant)
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.layernorm", layernorm)
    monkeypatch.setattr(norm_quant, "rmsnorm_quant_fp8", fused)
    monkeypatch.setattr(norm_quant, "add_rmsnorm_quant_fp8", add_fused)
    return made


WEIGHT = torch.zeros(64, HIDDEN, dtype=torch.float8_e4m3fn)
WEIGHT_SCALE = torch.ones(1, 2)


def stock_norm(
    norm: Any, x: Any, residual: Any = None, post: Any = None, linear: Any = None
) -> Any:
    norm_quant._state.calls.append("stock norm")
    out = kernels.reference(
        x, norm.weight, norm.variance_epsilon, scales="column", residual=residual
    )
    if residual is None:
        return out["y"]
    residual.copy_(out["residual"])
    return x.copy_(out["y"]), residual


def stock_linear(input: Any, weight: Any, *_: Any) -> Any:
    norm_quant._state.calls.append("stock linear")
    return torch.zeros(*input.shape[:-1], weight.shape[0], dtype=torch.bfloat16)


def run_norm(norm: Any, x: Any, residual: Any = None, post: Any = None, linear: Any = None) -> Any:
    return around_norm(stock_norm, norm, x, residual, post, linear)


def run_linear(x: Any, weight: Any = WEIGHT, **more: Any) -> Any:
    return around_linear(stock_linear, x, weight, [128, 128], WEIGHT_SCALE, **more)


def rows(seed: int = 0, count: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, HIDDEN, generator=generator).to(torch.bfloat16)


def known(state: Any) -> Norm:
    """A norm that has been seen in front of a linear."""
    norm = Norm()
    run_linear(run_norm(norm, rows()))
    assert state.calls == ["stock norm", "stock linear"]
    assert state.count.seen == ["first_calls"]
    state.calls.clear()
    state.count.seen.clear()
    return norm


def test_second_call_is_fused(state: Any) -> None:
    norm = known(state)
    x = rows(1)
    y = run_norm(norm, x)
    want = kernels.reference(x, norm.weight, 1e-6, scales="column")
    assert torch.equal(y, want["y"])
    out = run_linear(y)
    assert out.shape == (5, 64)
    (fused, (gemm, codes, scales)) = state.calls
    assert (fused, gemm) == ("fused", "gemm")
    assert torch.equal(codes.view(torch.uint8), want["q"])
    assert torch.equal(scales, want["scale"])
    assert state.count.seen == ["engaged"]


def test_residual_and_in_place(state: Any) -> None:
    norm = known(state)
    x, residual, more = rows(1), rows(2), rows(3)
    want = kernels.reference(x, norm.weight, 1e-6, scales="column", residual=residual + more)
    given = residual.clone()
    y, summed = run_norm(norm, x, given, more)
    assert y is x, "stock overwrites its input"
    assert torch.equal(y, want["y"])
    assert torch.equal(summed, want["residual"])
    assert torch.equal(given, residual), "stock adds into a copy there"
    run_linear(y)
    assert state.count.seen == ["engaged"]


def test_bias_shape_and_second_linear(state: Any) -> None:
    y = run_norm(known(state), rows(1))
    out = run_linear(y, bias=torch.ones(64, dtype=torch.bfloat16))
    assert torch.equal(out, torch.ones_like(out))
    assert run_linear(y.view(5, 1, HIDDEN)).shape == (5, 1, 64), "a view of all of it is it"
    assert state.count.seen == ["engaged", "engaged"]


@pytest.mark.parametrize("case", ["clone", "rows", "later", "gone"])
def test_only_the_very_tensor(state: Any, case: str) -> None:
    norm = known(state)
    y = run_norm(norm, rows(1))
    if case == "clone":
        run_linear(y.clone())
    elif case == "rows":
        run_linear(y[:4])
    elif case == "later":
        # Their pairs take the places.
        keep = [run_norm(norm, rows(2)) for _ in range(norm_quant.KEPT)]
        assert len(keep) == len(state.pairs)
        run_linear(y)
    else:
        shape, address = y.shape, y.data_ptr()
        del y
        gc.collect()
        # Whatever lies there now is another tensor.
        keep = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(200)]
        for tensor in keep:
            run_linear(tensor)
        assert address
    assert "engaged" not in state.count.seen
    assert "stock linear" in state.calls


@pytest.mark.parametrize("place", [(2, False), (1, True)])
def test_another_place(state: Any, place: tuple[int, bool]) -> None:
    """Another stream; or a piece of a graph, which would read the codes of its capture at every replay."""
    y = run_norm(known(state), rows(1))
    state.place_now = place
    run_linear(y)
    assert state.count.seen == ["another_stream"]
    assert state.calls[-1] == "stock linear"


def test_the_same_address_is_not_the_same_tensor(state: Any) -> None:
    """Prefill graphs hold tensors over memory that they do not own; later other values lie there."""
    y = run_norm(known(state), rows(1))
    alias = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(y))
    assert alias.data_ptr() == y.data_ptr()
    assert alias.untyped_storage()._cdata != y.untyped_storage()._cdata
    run_linear(alias)
    assert state.calls == ["fused", "stock linear"]
    run_linear(y.view(5, HIDDEN))
    assert state.count.seen == ["engaged"]


def test_two_norms_then_their_linears(state: Any) -> None:
    """MLA: q and the latent are normed one after the other, then both are multiplied."""
    first, second = known(state), known(state)
    q, latent = run_norm(first, rows(1)), run_norm(second, rows(2))
    run_linear(q)
    run_linear(latent)
    assert state.count.seen == ["engaged", "engaged"]
    for tensor, call in zip((q, latent), state.calls[2:], strict=True):
        want = kernels.reference(
            tensor,
            torch.ones(HIDDEN, dtype=torch.bfloat16),
            0.0,
            scales="column",
            rstd=torch.ones(5),
        )
        assert torch.equal(call[1].view(torch.uint8), want["q"])


def test_codes_go_with_the_output(state: Any) -> None:
    y = run_norm(known(state), rows(1))
    assert len(state.pairs) == 1
    del y
    gc.collect()
    assert not state.pairs


@pytest.mark.parametrize("written", ["x", "part of x", "residual"])
@pytest.mark.parametrize("feeding", [False, True])
def test_a_norm_that_writes_over_the_output(state: Any, written: str, feeding: bool) -> None:
    norm, other = known(state), known(state) if feeding else Norm()
    y = run_norm(norm, rows(1))
    if written == "x":
        out, _ = run_norm(other, y, rows(2))
    elif written == "part of x":
        out, _ = run_norm(other, y[:3], rows(2, 3))
    else:
        out, _ = run_norm(other, rows(2), y)
    state.count.seen.clear()
    run_linear(y)
    # The second norm's own output, where it is y.
    assert ("engaged" in state.count.seen) == (feeding and out is y)
    if feeding and out is y:
        (_, codes, _) = state.calls[-1]
        want = kernels.reference(
            y, torch.ones(HIDDEN, dtype=torch.bfloat16), 0.0, scales="column", rstd=torch.ones(5)
        )
        assert torch.equal(codes.view(torch.uint8), want["q"])


def test_an_idle_rank_learns_later(state: Any) -> None:
    norm = Norm()
    for _ in range(norm_quant.UNDECIDED_CALLS + 5):
        run_norm(norm, rows(count=0))
    run_linear(run_norm(norm, rows(1)))
    assert state.feeds(norm)


def test_static_quantisation_stays_in_stock(state: Any) -> None:
    norm = known(state)
    run_norm(norm, rows(1), linear=types.SimpleNamespace(input_scale=torch.ones(1)))
    assert state.calls == ["stock norm"]
    assert state.count.seen == ["static_quant"]
    run_norm(norm, rows(1), linear=types.SimpleNamespace())
    assert state.calls[1:] == ["fused"]


def test_residuals_that_do_not_fit(state: Any) -> None:
    norm, x, residual = Norm(), rows(1), rows(2)
    assert norm_quant.uncovered(norm, x, residual, rows(3)) is None
    for reason, second, more in (
        ("strides", x, None),
        ("strides", rows(2, 1).expand(5, HIDDEN), None),
        ("dtype_or_shape", residual[:4], None),
        ("dtype_or_shape", residual, rows(3).float()),
        ("dtype_or_shape", residual, rows(3)[:1]),
    ):
        assert norm_quant.uncovered(norm, x, second, more) == reason
    norm.weight = torch.nn.Parameter(norm.weight.float(), requires_grad=False)
    assert norm_quant.uncovered(norm, x, residual) == "dtype_or_shape"


def test_verify_sees_a_changed_output(state: Any) -> None:
    state.verify = True
    norm = known(state)
    norm.weight.fill_(1.0)
    y = run_norm(norm, rows(1))
    y.mul_(2.0)
    monkey = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: False
    try:
        with pytest.raises(SystemExit, match=r"codes or scales of \[5, 256\] differ from stock's"):
            run_linear(y)
    finally:
        torch.cuda.is_current_stream_capturing = monkey


def test_a_norm_without_a_linear_is_left_alone(state: Any) -> None:
    norm = Norm()
    for _ in range(norm_quant.UNDECIDED_CALLS + 5):
        run_norm(norm, rows(1))
    y = run_norm(norm, rows(1))
    run_linear(y)
    assert not state.feeds(norm), "it had its time"
    assert len(state._recent) <= norm_quant.REMEMBERED


@pytest.mark.parametrize(
    ("reason", "norm", "x"),
    [
        ("norm_variant", {"cast_x_before_out_mul": True}, rows()),
        ("norm_variant", {"variance_size_override": 128}, rows()),
        ("dtype_or_shape", {}, rows().float()),
        ("dtype_or_shape", {}, rows()[None]),
        ("dtype_or_shape", {}, rows(count=0)),
        ("strides", {}, rows().T.contiguous().T),
        ("strides", {}, torch.zeros(5, 260, dtype=torch.bfloat16)[:, 1:257]),
        ("strides", {}, torch.zeros(5, 257, dtype=torch.bfloat16)[:, :256]),
        ("hidden_size", {}, torch.zeros(2, 128, dtype=torch.bfloat16)),
        ("hidden_size", {}, torch.zeros(2, 16512, dtype=torch.bfloat16)),
        ("hidden_size", {}, torch.zeros(2, 1000, dtype=torch.bfloat16)),
        (None, {}, torch.zeros(5, 512, dtype=torch.bfloat16)[:, :256]),
        (None, {}, rows()),
    ],
)  # fmt: skip
def test_uncovered(state: Any, reason: str | None, norm: dict[str, Any], x: torch.Tensor) -> None:
    made = Norm()
    for name, value in norm.items():
        setattr(made, name, value)
    assert norm_quant.uncovered(made, x, None) == reason
    if reason in ("dtype_or_shape", "strides"):
        good = torch.zeros(x.shape, dtype=torch.bfloat16)
        if good.dim() == 2 and good.numel():
            assert norm_quant.uncovered(made, good, x) == reason, "the residual too"


def test_batch_invariant_mode(state: Any) -> None:
    state.invariant.is_batch_invariant_mode_enabled = lambda: True
    norm = known(state)
    run_norm(norm, rows(1))
    assert state.calls == ["stock norm"]
    assert state.count.seen == ["batch_invariant"]


@pytest.mark.parametrize("shape", [(63, HIDDEN), (64, HIDDEN + 64)])
def test_linears_that_stock_gives_to_triton(state: Any, shape: tuple[int, int]) -> None:
    y = run_norm(known(state), rows(1))
    run_linear(y, torch.zeros(shape, dtype=torch.float8_e4m3fn))
    assert state.calls == ["fused", "stock linear"]


def test_given_scales_stay_in_stock(state: Any) -> None:
    y = run_norm(known(state), rows(1))
    run_linear(y, input_scale=torch.ones(5, 2))
    assert state.calls[-1] == "stock linear"


@pytest.mark.parametrize(
    ("version", "cuda_norm", "said"),
    [
        ("0.6.19", False, "follow the norm of FlashInfer 0.6.18"),
        ("0.6.18", True, "runs its CUDA norm here"),
    ],
)
def test_another_norm_ends_the_process(
    monkeypatch: Any, version: str, cuda_norm: bool, said: str
) -> None:
    norm = types.ModuleType("flashinfer.norm")
    norm._use_cuda_norm = lambda device: cuda_norm
    package = types.ModuleType("flashinfer")
    package.norm = norm
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.norm", norm)
    monkeypatch.setattr(norm_quant.metadata, "version", lambda name: version)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(SystemExit, match=said):
        norm_quant._check_norm()


DEFAULTS = {
    "fp8_gemm_runner_backend": "auto",
    "enable_deterministic_inference": False,
    "rl_on_policy_target": None,
}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, None),
        ({"fp8_gemm_runner_backend": "deep_gemm"}, None),
        ({"fp8_gemm_runner_backend": "triton"}, "--fp8-gemm-backend triton takes"),
        ({"enable_deterministic_inference": True}, "another norm"),
        ({"rl_on_policy_target": "fsdp"}, "another norm"),
    ],
)
def test_judge(given: dict[str, Any], said: str | None) -> None:
    lines = list(judge(ServeCommand(given, DEFAULTS)))
    assert len(lines) == (said is not None)
    assert said is None or said in lines[0]


@pytest.mark.parametrize(
    ("name", "off", "fine"),
    [("SGLANG_ENABLE_JIT_DEEPGEMM", "False", "1"), ("FLASHINFER_USE_CUDA_NORM", "1", "0")],
)
def test_judge_reads_the_environment(name: str, off: str, fine: str) -> None:
    (line,) = judge(ServeCommand({}, DEFAULTS, {name: off}))
    assert line.startswith(name)
    assert not list(judge(ServeCommand({}, DEFAULTS, {name: fine})))


# --- The gate of the engine benchmark -------------------------------------------------------------------------------


def _answers(spoilt: str = "", prompt: int = 3) -> list[dict[str, list[Any]]]:
    answers = [{"tokens": [n, n + 1], "logprobs": [-0.5 * n, -1.0]} for n in range(6)]
    if spoilt == "tokens":
        answers[prompt]["tokens"][1] = 99
    elif spoilt:
        answers[prompt]["logprobs"][1] = float(spoilt)
    return answers


def _benchmark() -> Any:
    path = Path(__file__).parents[1] / "benchmarks" / "bench_norm_quant.py"
    spec = importlib.util.spec_from_file_location("bench_norm_quant", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("again", "ours", "said"),
    [
        (_answers(), _answers("tokens"), "prompt of 200: .*, stock"),
        (_answers("tokens"), _answers(), "does not repeat its own tokens"),
        (_answers(), _answers("-1.1"), "prompt of 200: logprobs differ"),
    ],
)
def test_gate_of_the_benchmark(again: Any, ours: Any, said: str) -> None:
    pytest.importorskip("httpx", reason="the benchmark needs httpx")
    check = _benchmark().check_answers
    with pytest.raises(SystemExit, match=said):
        check(_answers(), again, ours)
    assert check(_answers(), _answers(), _answers()) == [True] * 6
    # Where stock does not repeat its own logprobs, another's say nothing.
    repeated = check(_answers(), _answers("-1.2"), _answers("-1.1"))
    assert repeated == [True, True, True, False, True, True]


def test_answers_that_prove_nothing() -> None:
    pytest.importorskip("httpx", reason="the benchmark needs httpx")
    check = _benchmark().check_answers
    nan, alike = _answers("nan"), _answers()[:1] * 6
    for answers, said in ((nan, "not finite"), (alike, "answers every prompt alike")):
        with pytest.raises(SystemExit, match=said):
            check(answers, answers, answers)
