# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA decode with the matrix products of a warp: kernel_mma.cu on the model of its block, and on Hopper in place of WGMMA."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv4_block_model import builder, check_debug_script, check_no_rows, run_model

from numinous_kv_cache_4bit.kernels import sparse_mla_decode as kernels
from numinous_kv_cache_4bit.kernels.sparse_mla_binaries import BINARIES
from numinous_kv_cache_4bit.workbench.sparse_mla_decode import OP, Case
from numinous_tooling.testing.kernels import check_graph, check_implementation
from numinous_tooling.testing.tiers import selection
from numinous_tooling.workbench import case_id

HARNESS = """
extern "C" unsigned plan_bytes(int heads) { return heads == 32 ? MmaPlan<R, 32>::kBytes : MmaPlan<R, 16>::kBytes; }
"""


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`compiled(width, *changes)`: library of kernel_mma.cu with `run_model`, some of its text replaced."""
    folder = tmp_path_factory.mktemp("model")
    return builder(folder, "kernel_mma.cu", "mma_model.h", ("mma_32", "mma_16", "combine"), HARNESS)


MODELLED = [
    case for case in OP.cases if 0 < case.requests * case.queries * case.heads * case.topk <= 20_000
]


@pytest.mark.parametrize("case", MODELLED, ids=case_id)
def test_source_on_the_model(compiled: Any, case: Case, request: pytest.FixtureRequest) -> None:
    """All but what only hardware decides: that reads and writes of shared memory keep their order, and registers' handover."""
    if case.width != 352 and not selection(request.config).full:
        pytest.skip("not in the quick selection: --full compiles and runs the other rows")
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    got = run_model(compiled(case.width), case, inputs, "mma")
    OP.compare(case, got, OP.reference(case, inputs))


@pytest.mark.parametrize("heads", [5, 20])
def test_no_rows_under_any_q_on_the_model(compiled: Any, heads: int) -> None:
    check_no_rows(compiled(352), heads, 1, "mma")


QUICK_FAULTS = ("V is not transposed", "a half is given back too early")
FAULTS = {
    "K's values of another step": ("16 * inner + lane / 8 % 2 * 8", "lane / 8 % 2 * 8"),
    "K's halves of a fragment exchanged": ("mma(s[m][n], q[m][panel], k[2 * n], k[2 * n + 1])", "mma(s[m][n], q[m][panel], k[2 * n + 1], k[2 * n])"),
    "V is not transposed": ("load_matrices<true>", "load_matrices<false>"),
    "V of the first half only": ("(half * kHalf + 16 * k) * 128", "16 * k * 128"),
    "heads of Q reversed": ("swizzled(kHeads, 16 * m + lane % 16,", "swizzled(kHeads, 16 * m + 16 - lane % 16 - 1,"),
    "invalid rows count": ("raw[pass].valid ? 0.0f : -kInf", "0.0f"),
    "the output is not rescaled": ("*= by_head[m][i / 2]", "*= 1.0f"),
    "the maximum of half of the lanes": ("lanes < kLanes; lanes *= 2) top", "lanes < kLanes / 2; lanes *= 2) top"),
    "the sum of own rows only": ("lanes *= 2) sum +=", "lanes *= 2) float other ="),
    "parts of S not awaited": ("    named_barrier(kAllConsumers, kConsumers);  // also: P", "    // also: P"),
    "P not awaited": ("factors[own_head] = alpha;\n    named_barrier(kAllConsumers, kConsumers);", "factors[own_head] = alpha;"),
    "a half is given back too early": ("barrier_wait(empty + 8 * half, tile - w.begin & 1);", ""),
    "a half is never given back": ("    if (lane == 0) barrier_arrive(empty + 8 * half);\n", ""),
    "the output over what is still read": ("named_barrier(kAllConsumers, kConsumers);  // the tile and all factors are read", ""),
    "the last split ends early": ("return int(uint32_t(tiles) * uint32_t(split) / uint32_t(splits));", "return tiles / splits * split;"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_on_the_model(compiled: Any, fault: str, request: pytest.FixtureRequest) -> None:
    """What the model has to see: wrong fragments, masks, maxima, barriers."""
    if fault not in QUICK_FAULTS and not selection(request.config).full:
        pytest.skip("not in the quick selection: --full compiles and runs it")
    case = Case(1, 20, 330, pattern="edges", splits=1)
    if fault.startswith("the last"):
        case = Case(1, 20, 190, splits=2)
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    want = OP.reference(case, inputs)
    with pytest.raises(AssertionError, match=r"out|lse|threads wait"):
        OP.compare(case, run_model(compiled(352, FAULTS[fault]), case, inputs, "mma"), want)


def test_debug_dump_on_the_model(
    compiled: Any, monkeypatch: Any, capsys: Any, request: pytest.FixtureRequest
) -> None:
    """What the debug script prints of this source."""
    if not selection(request.config).full:
        pytest.skip("not in the quick selection: --full compiles and runs it")
    fault = ("bf16_pair(size[1], size[1])", "bf16_pair(size[0], size[0])")  # fmt: skip
    check_debug_script(compiled, "mma", fault, monkeypatch, capsys)


def test_plan(compiled: Any) -> None:
    """Shared memory as the launcher asks for it, within a block's of sm120; blocks of 16 and 32 heads."""
    row = kernels.row_format_of(352)
    for plan in (kernels.MMA_16, kernels.MMA_32):
        assert plan.shared(row) == compiled(352).plan_bytes(plan.heads) <= 101376
    taken = {heads: kernels.schedule(heads, "mma").heads for heads in (1, 16, 17, 128)}
    assert taken == {1: 16, 16: 16, 17: 32, 128: 32}


@pytest.mark.parametrize(
    ("capability", "plan", "archs"),
    [
        ((9, 0), kernels.WIDE, ("sm90",)),
        ((9, 0), kernels.PACKED[-1], ("sm90",)),
        ((10, 0), kernels.HEADS_64, ("sm100", "sm103")),
        ((10, 3), kernels.HEADS_64, ("sm100", "sm103")),
        ((12, 0), kernels.MMA_32, ("sm120",)),
    ],
    ids=lambda value: getattr(value, "entry", None),
)
@pytest.mark.parametrize("splits", [1, 3, 8, None])
def test_source_by_gpu(
    capability: tuple[int, int],
    plan: kernels.Schedule,
    archs: tuple[str, ...],
    splits: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which source the launcher loads for which GPU, and how it starts it."""
    launched: list[tuple[Any, ...]] = []

    def load(package: str, binary: Any, *, entry: str) -> Any:
        assert entry in binary.entries
        assert binary in BINARIES
        return lambda *given, **options: launched.append((binary.archs, entry, *given, options))

    monkeypatch.setattr(kernels.launch, "load", load)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernels, "processors_of", lambda device: 188)
    hopper = capability == (9, 0)
    places = {1: 188, 2: 188, 4: 184, 8: 160} if hopper else {1: 188}
    monkeypatch.setattr(kernels, "_places", lambda *_: places)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    inputs = OP.make_inputs(Case(3, 64, 1280), 0, torch.device("cpu"))
    call = kernels._checked(
        inputs["q"], inputs["pool"], 1.0, inputs["index"], None, None, None, 1.0, splits
    )
    kernels._launch_cuda(call, products="packed" if plan in kernels.PACKED else None)
    built, name, grid, threads, _, options = launched[0]
    assert built == archs
    if splits is None:  # of the list's 20 tiles, for all multiprocessors
        _, splits, of_cluster = kernels.split_last_turn(3, 64 // plan.heads, 20, places)
        assert splits > 1
    else:
        of_cluster = splits if splits in places else 1
    cluster = (of_cluster,) if of_cluster > 1 else None
    assert (name, grid, threads) == (plan.entry, (3 * splits * 64 // plan.heads,), plan.threads)
    assert options == {
        "shared": plan.shared(call.row),
        "stream": 7,
        "pdl": False,
        "cluster": cluster,
    }
    joins = [(one[1], one[2], one[5]) for one in launched[1:]]
    pdl = {"shared": 0, "stream": 7, "pdl": True, "cluster": None}
    assert joins == [("combine", (3 * 64,), pdl)] * (splits > of_cluster)


# --- On the GPU -----------------------------------------------------------------------------------------------------


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher takes kernel_mma.cu on Hopper, too."""
    monkeypatch.setitem(kernels.MADE_FOR, (9, 0), "mma")


@pytest.mark.tier("device", archs=("sm90",))
@pytest.mark.parametrize("case", OP.cases, ids=case_id)
def test_on_hopper(case: Case, gpu: torch.device, on_hopper: None) -> None:
    """What is made for sm120, where there is none: each case twice for the same bits, then in a CUDA graph on changed inputs."""
    check_implementation(OP, "cuda", case, gpu, repeat=True)
    check_graph(OP, "cuda", case, gpu)
