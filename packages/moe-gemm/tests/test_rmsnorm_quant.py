# SPDX-License-Identifier: Apache-2.0
"""Fused RMSNorm and FP8 quantisation: all tiers of the op, then what is particular to it.

Cases cover every launch shape (threads of a row, vectors of a thread), every scale layout, and rows of NaN, inf, zeros,
subnormals and the largest numbers; shapes in between differ from these in trip counts only.
"""

from __future__ import annotations

import contextlib
import re
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from numinous_moe_gemm.kernels import rmsnorm_quant as kernels
from numinous_moe_gemm.kernels.rmsnorm_quant import add_rmsnorm_quant_fp8, rmsnorm_quant_fp8
from numinous_moe_gemm.workbench import rmsnorm_quant as workbench
from numinous_moe_gemm.workbench.rmsnorm_quant import EPS, OP, Case
from numinous_tooling.compile.gate import SHARED_LIMIT
from numinous_tooling.scale_layouts import with_padding
from numinous_tooling.testing.kernels import KernelTests
from numinous_tooling.testing.tensors import assert_bitwise_equal
from numinous_tooling.testing.tiers import selection
from numinous_tooling.workbench import case_id


class TestRmsnormQuant(KernelTests):
    op = OP


WIDTHS = [case for case in OP.cases if case.hidden >= 512]


def _with(case: Case, **changes: Any) -> Case:
    return Case(**{**case.__dict__, **changes})


# --- The Triton path given rstd -------------------------------------------------------------------------------------


def _given_rstd(case: Case, device: torch.device) -> None:
    """Both with the same rstd: then every output is the reference's, bit for bit."""
    inputs, other = (OP.make_inputs(case, 3, device) for _ in range(2))
    x, residual = inputs["x"], inputs["residual"]
    h = x.float() if residual is None else x.float() + residual.float()
    rstd = (h.square().mean(-1) + EPS).rsqrt()
    want = workbench._reference(_with(case, bf16=True), other, rstd=rstd)

    call = kernels._checked(
        x,
        residual,
        inputs["weight"],
        EPS,
        case.scales,
        case.gemma,
        inputs["static_scale"],
        torch.empty_like(x),
        "triton",
    )
    kernels._launch_triton(call, rstd=rstd)
    assert_bitwise_equal("q", call.q.view(torch.uint8), want["q"])
    assert call.y is not None
    assert_bitwise_equal("y", workbench._ordered(call.y), workbench._ordered(want["y"]))
    if call.scale is not None:
        assert_bitwise_equal("scale", call.scale, want["scale"])


@pytest.mark.tier("interpret")
@pytest.mark.parametrize("case", WIDTHS, ids=case_id)
def test_triton_given_rstd_interpreted(case: Case) -> None:
    _given_rstd(case, torch.device("cpu"))


@pytest.mark.tier("device")
@pytest.mark.parametrize("case", WIDTHS, ids=case_id)
def test_triton_given_rstd(case: Case, gpu: torch.device) -> None:
    _given_rstd(case, gpu)


# --- The CUDA path against the engine -------------------------------------------------------------------------------


def _engine_or_skip() -> None:
    pytest.importorskip("sgl_kernel", reason="the engine is not installed")
    pytest.importorskip("sglang", reason="the engine is not installed")
    norm = pytest.importorskip("flashinfer.norm", reason="FlashInfer is not installed")
    if norm._use_cuda_norm(torch.device("cuda")):
        pytest.skip("FlashInfer runs its CUDA norm here (no CuTe DSL), which sums in another order")


ENGINE_CASES = [
    *(_with(case, bf16=True) for case in OP.cases if case.rows and case.hidden >= 256),
    *(Case(rows, 7168, residual=True, bf16=True) for rows in (64, 263, 266, 1000)),
    *(Case(rows, 4096, scales="ue8m0", bf16=True) for rows in (265, 4097)),
    *(Case(rows, 2048, scales="row", residual=True, bf16=True) for rows in (300, 1001)),
    Case(777, 5120, residual=True, bf16=True, gemma=True),
    Case(533, 16384, residual=True, bf16=True, scales="tensor"),
]


@pytest.mark.tier("device", archs=("sm90",))
@pytest.mark.parametrize("schedule", ["single", "stream"])
@pytest.mark.parametrize("case", ENGINE_CASES, ids=case_id)
def test_bits_of_the_engine(case: Case, schedule: str, gpu: torch.device, monkeypatch: Any) -> None:
    """Both schedules give every bit of the engine's norm followed by its quantisation."""
    _engine_or_skip()
    launch = kernels._launch_cuda
    monkeypatch.setattr(kernels, "_launch_cuda", lambda call: launch(call, schedule))
    got = OP.implementations["cuda"].run(case, OP.make_inputs(case, 5, gpu))
    want = workbench._engine(case, OP.make_inputs(case, 5, gpu))
    for name in got:
        if got[name] is None:
            continue
        mine, theirs = got[name].contiguous(), want[name].contiguous()
        if mine.dtype == torch.bfloat16:  # every NaN is the same
            mine, theirs = workbench._ordered(mine), workbench._ordered(theirs)
        kind = {1: torch.uint8, 4: torch.int32}[mine.element_size()]
        assert_bitwise_equal(name, mine.view(kind), theirs.view(kind))


@pytest.mark.tier("device", archs=("sm90",))
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("hidden", [512, 640, 7168])
def test_layout_of_deep_gemm(rows: int, hidden: int, gpu: torch.device) -> None:
    """Packed exponents are what DeepGEMM's own transform makes of the rounded fp32 scales."""
    deep_gemm = pytest.importorskip("deep_gemm", reason="DeepGEMM is not installed")
    case = Case(rows, hidden, scales="ue8m0")
    inputs = OP.make_inputs(case, 1, gpu)
    out = rmsnorm_quant_fp8(inputs["x"], inputs["weight"], EPS, scales="ue8m0")
    plain = workbench.scales_as_rows(case, out.scale, inputs)
    packed = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(plain.contiguous())
    assert packed.stride() == out.scale.stride()
    assert_bitwise_equal("scale", out.scale, packed)


CANDIDATE_CASES = [
    *(
        Case(rows, hidden, residual=residual, scales=scales, bf16=True, values=values)
        for rows, scales, values in (
            (1, "column", "normal"),
            (9, "ue8m0", "edges"),
            (9, "column", "edges"),
            (34, "row", "normal"),
            (66, "tensor", "normal"),
        )
        for hidden in (4096, 7168)
        for residual in (False, True)
    ),
    # Every place of every ring is used again, in both phases, and not all groups have the last row.
    *(
        Case(rows, hidden, residual=residual)
        for rows, hidden in ((4096, 7168), (7001, 4096))
        for residual in (False, True)
    ),
    Case(266, 7168, residual=True, gemma=True, bf16=True),
]
CANDIDATES = [schedule for schedule in kernels.SCHEDULES if schedule not in ("single", "stream")]


@pytest.mark.tier("device", archs=("sm90",))
@pytest.mark.parametrize("schedule", CANDIDATES, ids=lambda schedule: f"by_{schedule}")
@pytest.mark.parametrize("case", CANDIDATE_CASES, ids=case_id)
def test_bits_of_candidates(case: Case, schedule: Any, gpu: torch.device) -> None:
    """A candidate gives every bit that the launcher's own schedule gives, three times, and once with y in the place of x."""
    if reason := kernels.refuses(schedule, case.rows, case.hidden, case.residual):
        pytest.skip(reason)
    launch = kernels._launch_cuda

    def run(chosen: Any, y_is_x: bool = False) -> dict[str, torch.Tensor]:
        inputs = OP.make_inputs(case, 5, gpu)
        x, residual = inputs["x"], inputs["residual"]
        y = x if y_is_x else torch.empty_like(x) if case.bf16 else None
        call = kernels._checked(
            x, residual, inputs["weight"], EPS, case.scales, case.gemma, inputs["static_scale"], y, "cuda"
        )  # fmt: skip
        scale = call.scale if case.scales in ("row", "tensor") else with_padding(call.scale)
        # What earlier calls left in this memory may be right.
        call.q.view(torch.uint8).fill_(0x7F)
        if scale is not None:
            scale.view(torch.int32).fill_(0x7F7F7F7F)
        if y is not None and not y_is_x:
            y.fill_(float("nan"))
        launch(call, chosen)
        out = {"q": call.q.view(torch.uint8), "scale": scale, "residual": residual}
        out = {k: v.contiguous() for k, v in out.items() if v is not None}
        return {**out, "y": workbench._ordered(y)} if y is not None else out

    want = run(None)
    for y_is_x in (False, False, False, *([True] if case.bf16 else [])):
        got = run(schedule, y_is_x)
        for name, value in want.items():
            kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[value.element_size()]
            assert_bitwise_equal(name, got[name].view(kind), value.view(kind))


# --- Launches and machine code -----------------------------------------------------------------------------------------


@pytest.mark.tier("ref")
def test_every_hidden_size_has_its_kernels() -> None:
    """No thread holds more vectors than its kernel has places; no block more threads or memory than there are."""
    entries = {entry for binary in kernels.BINARIES for entry in binary.entries}
    for hidden in range(kernels.SMALLEST_HIDDEN, kernels.LARGEST_HIDDEN + 1, kernels.GROUP):
        width = kernels.threads_per_row(hidden)
        vectors = -(-hidden // (8 * width))
        held = next(count for count in kernels.STREAM_VECTORS[width] if vectors <= count)
        assert held * width * 8 >= hidden
        assert f"stream_{width}_{held}_add_ue8m0" in entries
        assert -(-vectors // 2) * width <= kernels.SINGLE_THREADS
        for add in (False, True):
            shared = kernels.stream_shared(hidden, held, add) + 32  # static
            assert shared <= SHARED_LIMIT["sm90"]
            # The launcher takes "single" where this does not hold.
            assert (shared <= SHARED_LIMIT["sm120"]) == (hidden <= 12288 or not add), hidden


class _Recorded:
    """Stands in for a kernel: notes what it is launched with."""

    def __init__(self, name: str, launches: list[Any]) -> None:
        self.name, self.launches = name, launches

    def blocks_per_processor(self, threads: int, shared: int) -> int:
        return 4

    def __call__(self, grid: Any, threads: int, args: Any, *, shared: int, **more: Any) -> None:
        launched = (self.name, grid, threads, shared)
        self.launches.append((*launched, more["cluster"]) if "cluster" in more else launched)


@pytest.mark.tier("ref")
@pytest.mark.parametrize(
    ("rows", "hidden", "add", "optin", "want"),
    [
        (1, 7168, False, 232448, ("single_1", (1,), 896, 28672)),
        (264, 7168, False, 232448, ("single_1", (264,), 896, 28672)),
        (265, 7168, False, 232448, ("stream_128_7", (265,), 128, 43008)),
        (1056, 16384, True, 232448, ("single_2_add", (1056,), 1024, 65536)),
        (1057, 16384, True, 232448, ("stream_128_16_add", (1057,), 128, 131072)),
        (1057, 16384, True, 101376, ("single_2_add", (1057,), 1024, 65536)),
        (1057, 12288, True, 101376, ("stream_128_12_add", (1057,), 128, 98304)),
        (1057, 2048, False, 232448, ("stream_32_8", (265,), 128, 24576)),
        (10000, 4096, False, 232448, ("stream_64_8", (500,), 128, 32768)),
    ],
)  # fmt: skip
def test_launches(
    rows: int, hidden: int, add: bool, optin: int, want: Any, monkeypatch: Any
) -> None:
    """Schedule, grid and shared memory on a GPU of 132 multiprocessors."""
    launches: list[Any] = []
    properties = types.SimpleNamespace(
        multi_processor_count=132, shared_memory_per_block_optin=optin
    )
    stream = types.SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(kernels, "_load", lambda name, variant: _Recorded(name + variant, launches))
    x = torch.empty(1, dtype=torch.bfloat16).expand(rows, hidden)  # nobody reads it
    residual = x if add else None
    kernels._launch_cuda(
        kernels._Call(x, residual, x[0], x, None, None, None, rows, rows, hidden, 0, EPS, 0.0, "")
    )
    assert launches == [want]


@pytest.mark.tier("ref")
@pytest.mark.parametrize(
    ("schedule", "rows", "hidden", "add", "want"),
    [
        ("prompt", 1, 7168, False, ("prompt_1", (4,), 896, 28672, None)),
        ("split", 1, 4096, False, ("split_64_8_4", (16,), 64, 0, None)),
        ("split", 33, 7168, True, ("split_128_7_4_add", (144,), 128, 0, (4,))),
        ("split", 34, 7168, True, ("split_128_7_2_add", (72,), 128, 0, (2,))),
        ("ring", 100, 4096, True, ("ring_64_8_add", (100,), 512, 231424, None)),
        ("ring", 4096, 7168, False, ("ring_128_7", (132,), 512, 231424, None)),
        ("ring_wide", 4096, 4096, False, ("ring_wide_64_8", (132,), 768, 231424, None)),
    ],
)  # fmt: skip
def test_launches_of_candidates(
    schedule: Any, rows: int, hidden: int, add: bool, want: Any, monkeypatch: Any
) -> None:
    launches: list[Any] = []
    monkeypatch.setattr(kernels, "_load", lambda name, variant: _Recorded(name + variant, launches))
    x = torch.empty(1, dtype=torch.bfloat16).expand(rows, hidden)
    padded = -(-rows // 4) * 4
    call = kernels._Call(
        x, x if add else None, x[0], x, None, None, None, rows, padded, hidden, 0, EPS, 0.0, ""
    )
    kernels._launch_trial(call, schedule, "_add" if add else "", kernels._Params(), 132, 0)
    assert launches == [want]


@pytest.mark.tier("ref")
def test_trial_judges_and_times_every_candidate(capsys: pytest.CaptureFixture[str]) -> None:
    """The command of the GPU run: its names are the schedules', and what fails or hangs is not among those it times."""
    path = Path(__file__).parents[1] / "benchmarks" / "try_rmsnorm_quant.py"
    trial = runpy.run_path(str(path))
    assert list(trial["CANDIDATES"]) == CANDIDATES
    everyone = {*workbench.TRIAL.implementations, *workbench.TRIAL.peers}
    assert {*trial["OTHERS"], *CANDIDATES} == everyone
    for case in workbench.TRIAL.bench_cases:
        takers = [name for name in CANDIDATES if workbench.TRIAL.peers[name].refuses(case) is None]
        assert takers, case_id(case)
    python = [sys.executable, "-c"]
    commands = {
        "right": [*python, "print('1 passed')"],
        "wrong": [*python, "raise SystemExit('a bit differs')"],
    }
    assert trial["judged"](commands, 300) == ["right"]
    assert "a bit differs" in capsys.readouterr().out
    assert trial["judged"]({"hangs": [*python, "import time; time.sleep(600)"]}, 1) == []
    assert "no end after 1 s" in capsys.readouterr().out


@pytest.mark.tier("ref")
def test_candidates_refuse() -> None:
    x = torch.empty(1, dtype=torch.bfloat16).expand(67, 4096)
    call = kernels._Call(x, x, x[0], x, None, None, None, 67, 68, 4096, 0, EPS, 0.0, "")
    for schedule, reason in (("split", "to 66 rows"), ("ring_wide", "without residual")):
        with pytest.raises(NotImplementedError, match=reason):
            kernels._launch_trial(call, schedule, "_add", kernels._Params(), 132, 0)  # type: ignore[arg-type]


def _stored_before_wait(sass: str) -> list[str]:
    """Stores to global memory ahead of the first griddepcontrol.wait (ACQBULK) of a kernel."""
    before, wait, _ = sass.partition("ACQBULK")
    assert wait, "the kernel waits for nobody"
    return re.findall(r"\b(?:STG|ST|RED|ATOMG?)\.[\w.]*", before)


@pytest.mark.tier("ref")
def test_a_store_before_the_wait_is_seen() -> None:
    store = "/*0010*/ @!P0 STG.E.64 desc[UR8][R4.64], RZ ;\n"
    code = "/*0000*/ LDG.E R0, [R2] ;\n{}/*0020*/ STS [R1], R0 ;\n/*0030*/ ACQBULK ;\n" + store
    assert _stored_before_wait(code.format("")) == []
    assert _stored_before_wait(code.format(store)) == ["STG.E.64"]


@pytest.mark.tier("compile")
@pytest.mark.parametrize("binary", kernels.BINARIES, ids=lambda binary: binary.name)
def test_nothing_is_stored_before_the_wait(
    arch: str, binary: Any, request: pytest.FixtureRequest
) -> None:
    """The kernel ahead may still read the memory that the allocator gave to our outputs."""
    from numinous_tooling.compile import cuda, gate, resources

    if arch not in binary.archs:
        pytest.skip(f"{binary.name} is not made for {arch}")
    if not binary.quick and not selection(request.config).full:
        pytest.skip("not in the quick selection: --full compiles it")
    try:
        _, folder = cuda.compile_arch(Path(kernels.__file__).parents[1], binary, arch)
        code = resources.sass(folder / f"{binary.name}.cubin")
    except gate.NotAvailable as missing:
        pytest.skip(str(missing))
    assert set(code) == set(binary.entries)
    assert {name: found for name in code if (found := _stored_before_wait(code[name]))} == {}


# --- Both schedules, edges ------------------------------------------------------------------------------------------


@pytest.mark.tier("device", archs=("sm90",))
@pytest.mark.parametrize("scales", ["column", "ue8m0"])
@pytest.mark.parametrize("schedule", ["single", "stream"])
@pytest.mark.parametrize("rows", [1, 3, 266])
def test_padding_rows_are_zero(
    rows: int, schedule: str, scales: str, gpu: torch.device, monkeypatch: Any
) -> None:
    launch = kernels._launch_cuda
    monkeypatch.setattr(kernels, "_launch_cuda", lambda call: launch(call, schedule))
    _poison(monkeypatch)
    inputs = OP.make_inputs(Case(rows, 640, scales=scales), 1, gpu)
    out = rmsnorm_quant_fp8(inputs["x"], inputs["weight"], scales=scales)
    padding = with_padding(out.scale)[rows:]
    assert len(padding) == -rows % 4
    assert not padding.view(torch.int32).any()


def _poison(monkeypatch: Any) -> None:
    """Scale buffers come filled with 0x7f bytes."""
    empty = kernels.empty_column_major

    def poisoned(*shape: int, **options: Any) -> torch.Tensor:
        scale = empty(*shape, **options)
        with_padding(scale).view(torch.int32).fill_(0x7F7F7F7F)
        return scale

    monkeypatch.setattr(kernels, "empty_column_major", poisoned)


@pytest.mark.tier("interpret")
@pytest.mark.parametrize("scales", ["column", "ue8m0"])
@pytest.mark.parametrize("rows", [1, 3])
def test_padding_rows_are_zero_interpreted(rows: int, scales: str, monkeypatch: Any) -> None:
    _poison(monkeypatch)
    inputs = OP.make_inputs(Case(rows, 640, scales=scales), 1, "cpu")
    out = rmsnorm_quant_fp8(inputs["x"], inputs["weight"], scales=scales, impl="triton")
    assert not with_padding(out.scale)[rows:].view(torch.int32).any()


@pytest.mark.tier("device")
@pytest.mark.parametrize("impl", ["cuda", "triton"])
def test_rows_of_another_stride(impl: str, gpu: torch.device) -> None:
    """Rows cut from wider ones give what contiguous rows give; what lies between them stays."""
    inputs = OP.make_inputs(Case(70, 1024, residual=True), 2, gpu)
    x, residual, weight = inputs["x"], inputs["residual"], inputs["weight"]
    plain, sums = residual.clone(), residual.clone()
    want = add_rmsnorm_quant_fp8(x, plain, weight, impl=impl)
    wide = torch.full((3, 70, 1280), float("nan"), dtype=torch.bfloat16, device=gpu)
    wide[0, :, :1024], wide[1, :, :1024] = x, sums
    y = wide[2, :, :1024]
    got = add_rmsnorm_quant_fp8(wide[0, :, :1024], wide[1, :, :1024], weight, y=y, impl=impl)
    assert_bitwise_equal("q", got.q.view(torch.uint8), want.q.view(torch.uint8))
    assert_bitwise_equal("residual", wide[1, :, :1024].contiguous(), plain)
    assert wide[:, :, 1024:].isnan().all()


@pytest.mark.tier("device")
@pytest.mark.parametrize("impl", ["cuda", "triton"])
def test_y_may_be_x(impl: str, gpu: torch.device) -> None:
    inputs = OP.make_inputs(Case(300, 4096, residual=True), 2, gpu)
    x, residual, weight = inputs["x"], inputs["residual"], inputs["weight"]
    y, other = torch.empty_like(x), residual.clone()
    want = add_rmsnorm_quant_fp8(x, residual, weight, y=y, impl=impl)
    got = add_rmsnorm_quant_fp8(x, other, weight, y=x, impl=impl)
    assert_bitwise_equal("y", x, y)
    assert_bitwise_equal("q", got.q.view(torch.uint8), want.q.view(torch.uint8))


@pytest.mark.tier("device", archs=("sm90",))
@pytest.mark.parametrize("impl", ["cuda", "triton"])
def test_more_than_2_31_elements(impl: str, gpu: torch.device) -> None:
    """The last rows of 2^31 + elements are right: 4.3 GB of input."""
    hidden = 16384
    rows = 2**31 // hidden + 3
    x = torch.zeros(rows, hidden, dtype=torch.bfloat16, device=gpu)
    inputs = OP.make_inputs(Case(3, hidden), 4, gpu)
    x[-3:] = inputs["x"]
    got = rmsnorm_quant_fp8(x, inputs["weight"], EPS, scales="row", impl=impl)
    want = rmsnorm_quant_fp8(inputs["x"], inputs["weight"], EPS, scales="row", impl=impl)
    assert_bitwise_equal("q", got.q[-3:].view(torch.uint8), want.q.view(torch.uint8))
    assert_bitwise_equal("scale", got.scale[-3:], want.scale)


# --- Refusals -------------------------------------------------------------------------------------------------------

X = torch.ones(2, 256, dtype=torch.bfloat16)
W = torch.ones(256, dtype=torch.bfloat16)
S = torch.ones(1)


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (TypeError, "x: expected bfloat16, got torch.float16", {"x": X.half()}),
        (TypeError, "weight: expected bfloat16", {"weight": W.float()}),
        (TypeError, "residual: expected bfloat16", {"residual": X.float()}),
        (ValueError, "x: expected .* with two dimensions", {"x": X[None]}),
        (ValueError, "residual: expected", {"residual": X[:1]}),
        (ValueError, "y: expected", {"y": X[:1]}),
        (ValueError, "weight: expected .256.", {"weight": W[:128]}),
        (ValueError, "multiple of 128, got 200", {"x": X[:, :200], "weight": W[:200]}),
        (ValueError, "multiple of 128, got 0", {"x": X[:, :0], "weight": W[:0]}),
        (ValueError, "lie side by side", {"x": torch.ones(256, 2, dtype=torch.bfloat16).T}),
        (ValueError, "may not overlap", {"y": torch.ones(256, dtype=torch.bfloat16).expand(2, 256)}),
        (ValueError, "scales is one of", {"scales": "columns"}),
        (ValueError, "static_scale goes with", {"scales": "tensor"}),
        (ValueError, "static_scale goes with", {"static_scale": S}),
        (ValueError, "one float32", {"scales": "tensor", "static_scale": S.double()}),
        (ValueError, "one float32", {"scales": "tensor", "static_scale": torch.ones(2)}),
        (ValueError, "impl is", {"impl": "cutlass"}),
        (ValueError, "x and residual are the same memory", {"residual": X}),
        (ValueError, "needs tensors on an NVIDIA GPU", {"impl": "cuda"}),
    ],
)  # fmt: skip
def test_refusals(error: type[Exception], text: str, arguments: dict[str, Any]) -> None:
    call: dict[str, Any] = {"x": X, "weight": W, "impl": "triton", **arguments}
    function = add_rmsnorm_quant_fp8 if "residual" in call else rmsnorm_quant_fp8
    with pytest.raises(error, match=text):
        function(**call)


@pytest.mark.tier("device", archs=("sm90",))
@pytest.mark.parametrize(
    ("text", "hidden", "offset"),
    [("256 … 16384, got 128", 128, 0), ("got 16512", 16512, 0), ("multiples of 16 bytes", 256, 1)],
)
def test_cuda_refusals(text: str, hidden: int, offset: int, gpu: torch.device) -> None:
    x = torch.ones(2, hidden + offset, dtype=torch.bfloat16, device=gpu)[:, offset:]
    with pytest.raises(NotImplementedError, match=text):
        rmsnorm_quant_fp8(x, torch.ones(hidden, dtype=torch.bfloat16, device=gpu), impl="cuda")
