# SPDX-License-Identifier: Apache-2.0
"""Fused RMSNorm and FP8 quantisation: all tiers of the op, then what is particular to it.

Cases cover every launch shape (threads of a row, vectors of a thread), every scale layout, and rows of NaN, inf, zeros,
subnormals and the largest numbers; shapes in between differ from these in trip counts only.
"""

from __future__ import annotations

import contextlib
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

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
@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        pytest.param(case, schedule, id=f"{case_id(case)}-{schedule}")
        for case in ENGINE_CASES
        for schedule in kernels.SCHEDULES
        if kernels.refuses(schedule, case.hidden) is None
    ],
)
def test_bits_of_the_engine(case: Case, schedule: str, gpu: torch.device, monkeypatch: Any) -> None:
    """Every schedule gives every bit of the engine's norm followed by its quantisation."""
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


HOPPER_CASES = [
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


@pytest.mark.tier("device", archs=("sm90",))
@pytest.mark.parametrize("schedule", ["split", "ring"])
@pytest.mark.parametrize("case", HOPPER_CASES, ids=case_id)
def test_bits_of_hopper_schedules(case: Case, schedule: Any, gpu: torch.device) -> None:
    """Each gives every bit that "stream" gives, three times, and once with y in the place of x; so does the launcher's choice."""
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

    want = run("stream")
    calls = [(schedule, False)] * 3 + [(None, False)]
    for chosen, y_is_x in calls + [(schedule, True), (None, True)] * case.bf16:
        got = run(chosen, y_is_x)
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
        cluster = more["cluster"]
        self.launches.append((self.name, grid, threads, shared, *([cluster] if cluster else [])))


HOPPER = types.SimpleNamespace(
    multi_processor_count=132, shared_memory_per_block_optin=232448, major=9
)
BLACKWELL = types.SimpleNamespace(
    multi_processor_count=132, shared_memory_per_block_optin=232448, major=10
)
CONSUMER = types.SimpleNamespace(
    multi_processor_count=132, shared_memory_per_block_optin=101376, major=12
)


def _launch(
    rows: int, hidden: int, add: bool, gpu: Any, schedule: Any, monkeypatch: Any
) -> list[Any]:
    launches: list[Any] = []
    stream = types.SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(kernels, "_load", lambda name, variant: _Recorded(name + variant, launches))
    x = torch.empty(1, dtype=torch.bfloat16).expand(rows, hidden)  # nobody reads it
    padded = -(-rows // 4) * 4
    call = kernels._Call(
        x, x if add else None, x[0], x, None, None, None, rows, padded, hidden, 0, EPS, 0.0, ""
    )
    kernels._launch_cuda(call, schedule)
    return launches


@pytest.mark.tier("ref")
@pytest.mark.parametrize(
    ("rows", "hidden", "add", "gpu", "want"),
    [
        (1, 7168, False, BLACKWELL, ("single_1", (1,), 896, 28672)),
        (1, 7168, False, CONSUMER, ("single_1", (1,), 896, 28672)),
        (1, 8192, False, HOPPER, ("single_1", (1,), 1024, 32768)),
        (1, 7168, False, HOPPER, ("split_128_7", (16,), 128, 0)),
        (24, 7168, False, HOPPER, ("split_128_7", (96,), 128, 0)),
        (25, 7168, False, HOPPER, ("ring_128_7", (25,), 512, 231424)),
        (42, 4096, False, HOPPER, ("split_64_8", (176,), 64, 0)),
        (43, 4096, False, HOPPER, ("ring_64_8", (43,), 512, 231424)),
        (16, 7168, True, HOPPER, ("split_128_7_add", (64,), 128, 0, (4,))),
        (17, 7168, True, HOPPER, ("ring_128_7_add", (17,), 512, 231424)),
        (28, 4096, True, HOPPER, ("split_64_8_add", (112,), 64, 0, (4,))),
        (29, 4096, True, HOPPER, ("ring_64_8_add", (29,), 512, 231424)),
        (585, 7168, False, HOPPER, ("ring_128_7", (132,), 512, 231424)),
        (586, 7168, False, HOPPER, ("stream_128_7", (293,), 128, 43008)),
        (1024, 4096, False, HOPPER, ("ring_64_8", (132,), 512, 231424)),
        (1025, 4096, False, HOPPER, ("stream_64_8", (513,), 128, 32768)),
        (4096, 7168, True, HOPPER, ("ring_128_7_add", (132,), 512, 231424)),
        (4097, 7168, True, HOPPER, ("stream_128_7_add", (4097,), 128, 57344)),
        (7168, 4096, True, HOPPER, ("ring_64_8_add", (132,), 512, 231424)),
        (7169, 4096, True, HOPPER, ("stream_64_8_add", (3585,), 128, 49152)),
        (264, 7168, False, BLACKWELL, ("single_1", (264,), 896, 28672)),
        (265, 7168, False, BLACKWELL, ("stream_128_7", (265,), 128, 43008)),
        (1056, 16384, True, HOPPER, ("single_2_add", (1056,), 1024, 65536)),
        (1057, 16384, True, HOPPER, ("stream_128_16_add", (1057,), 128, 131072)),
        (1057, 16384, True, CONSUMER, ("single_2_add", (1057,), 1024, 65536)),
        (1057, 12288, True, CONSUMER, ("stream_128_12_add", (1057,), 128, 98304)),
        (1057, 2048, False, HOPPER, ("stream_32_8", (265,), 128, 24576)),
        (10000, 4096, False, HOPPER, ("stream_64_8", (500,), 128, 32768)),
    ],
)  # fmt: skip
def test_launches(rows: int, hidden: int, add: bool, gpu: Any, want: Any, monkeypatch: Any) -> None:
    """Schedule, grid and shared memory on a GPU of 132 multiprocessors."""
    assert _launch(rows, hidden, add, gpu, None, monkeypatch) == [want]


@pytest.mark.tier("ref")
def test_the_launcher_takes_what_has_kernels(monkeypatch: Any) -> None:
    """Whatever the size, what is chosen is in a binary of that architecture."""
    made = {
        major: {e for b in kernels.BINARIES if arch in b.archs for e in b.entries}
        for major, arch in ((9, "sm90"), (10, "sm100"), (12, "sm120"))
    }
    for gpu in (HOPPER, BLACKWELL, CONSUMER):
        for hidden in (512, 4096, 5120, 7168, 8192, 16384):
            for rows, add in ((r, a) for r in (1, 33, 100, 600, 5000) for a in (False, True)):
                [(name, *_)] = _launch(rows, hidden, add, gpu, None, monkeypatch)
                assert name in made[gpu.major], (name, rows, hidden)


@pytest.mark.tier("ref")
def test_launcher_and_source_have_the_same_numbers() -> None:
    """A grid made for other blocks of a row than the kernel's would write beyond the outputs."""
    source = (
        Path(kernels.__file__).parents[1] / "csrc" / "rmsnorm_quant" / "hopper.cuh"
    ).read_text()
    found = dict(re.findall(r"^constexpr int (k\w+) = ([\d -]+);", source, re.MULTILINE))
    wanted = {
        "kParts": kernels.SPLIT_PARTS,
        "kRingShared": kernels.RING_SHARED,
        "kRingThreads": kernels.RING_THREADS,
    }
    values = {name: int(n) - int(minus or 0) for name, text in found.items() for n, _, minus in [text.partition(" - ")]}  # fmt: skip
    assert values == wanted


@pytest.mark.tier("ref")
@pytest.mark.parametrize("schedule", ["split", "ring"])
def test_other_hidden_sizes_are_refused(schedule: Any, monkeypatch: Any) -> None:
    with pytest.raises(NotImplementedError, match=f"{schedule}: hidden sizes 4096 and 7168 only"):
        _launch(1, 8192, False, HOPPER, schedule, monkeypatch)


@pytest.mark.tier("ref")
@pytest.mark.parametrize("schedule", [None, *kernels.SCHEDULES])
def test_a_sweep_times_what_it_names(schedule: Any, monkeypatch: Any) -> None:
    """Each provider of the sweep asks the launcher for its schedule, and takes every case."""
    asked: list[Any] = []
    monkeypatch.setattr(kernels, "_check_cuda", lambda *arguments: None)
    monkeypatch.setattr(kernels, "_launch_cuda", lambda call, by=None: asked.append(by))
    provider = workbench.SWEEP.implementations[schedule or "cuda"]
    for case in (Case(1, 4096), Case(2, 7168, residual=True)):
        provider.run(case, OP.make_inputs(case, 1, "cpu"))
    assert asked == [schedule, schedule]
    assert [case for case in workbench.SWEEP.bench_cases if provider.refuses(case)] == []


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


# --- Schedules for every hidden size, edges ------------------------------------------------------------------------------------------


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
        pytest.param(
            ValueError, "needs tensors on a GPU, or TRITON_INTERPRET=1", {},
            marks=pytest.mark.skipif(not isinstance(kernels._rmsnorm_quant_kernel, triton.JITFunction), reason="interpreted"),
        ),
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
