# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA decode with 4-bit rows that are decoded into operands in registers: kernel_packed.cu on the model of its block; its addresses."""

from __future__ import annotations

import ctypes
import itertools
import runpy
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv4_block_model import (
    CLUSTERED,
    JOIN_FAULTS,
    PARTS,
    builder,
    case_of_fault,
    check_debug_script,
    check_no_rows,
    run_call,
    run_model,
)

from numinous_kv_cache_4bit.kernels import sparse_mla_decode as kernels
from numinous_kv_cache_4bit.workbench.sparse_mla_decode import OP, SM_SCALE, Case
from numinous_tooling.bench.clocks import CpuClock
from numinous_tooling.testing.tiers import selection
from numinous_tooling.workbench import case_id

HARNESS = """
extern "C" void be_eager(int eager) { model::eager = eager != 0; }
extern "C" void be_slow(int group) { model::slow = group; }
template <int kHeads> static unsigned plan(int what) {
  using S = PackedPlan<R, kHeads>;
  return what == 0 ? S::kBytes : S::kCount;
}
extern "C" unsigned plan_of(int heads, int what) {
  return heads == 64 ? plan<64>(what) : heads == 32 ? plan<32>(what) : heads == 16 ? plan<16>(what) : plan<8>(what);
}
extern "C" unsigned pair(unsigned word, int i, int product) { return product ? e2m1_pair_by_product(word, i) : e2m1_pair(word, i); }
extern "C" int line(int block) { return scale_line(block); }
extern "C" int word_of(int pair) { return scale_word(pair); }
"""
ENTRIES = ("packed_64", "packed_32", "packed_16", "packed_8", "combine")
RAISED = ("kMostWeight = 4096.0f", "kMostWeight = 0.0f")
"""Every tile raises the largest scores where it can: what few real lists do behind their first tile."""


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`compiled(width, *changes)`: library of kernel_packed.cu with `run_model`, some of its text replaced."""
    folder = tmp_path_factory.mktemp("model")
    return builder(folder, "kernel_packed.cu", "sm90_model.h", ENTRIES, HARNESS)


MODELLED = [
    *(
        case
        for case in OP.cases
        if 0 < case.requests * case.queries * case.heads * case.topk <= 20_000
        and case.width in (352, 288)
    ),
    # The ring of stages in its second turn, and in its third.
    Case(1, 50, 700, 288, splits=1),
    Case(1, 9, 1000, pattern="edges", splits=1),
    Case(1, 30, 500, pattern="sparse", splits=1),
]


@pytest.mark.parametrize("case", MODELLED, ids=case_id)
@pytest.mark.parametrize("raised", [False, True], ids=["", "raised"])
def test_source_on_the_model(
    compiled: Any, case: Case, raised: bool, request: pytest.FixtureRequest
) -> None:
    """All but what only hardware decides. Products and copies are done as late as they may be; under --full as early as they may be, too,
    and each warpgroup in turn is slower than the others."""
    full = selection(request.config).full
    if case.width != 352 and not full:
        pytest.skip("not in the quick selection: --full compiles and runs rows without rope")
    library = compiled(case.width, *((RAISED,) if raised else ()))
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    want = OP.reference(case, inputs)
    check_orders(library, case, inputs, want, full)


def check_orders(library: Any, case: Case, inputs: Any, want: Any, full: bool) -> None:
    """Right as late as it may be; with `full` as early, too, and with each warpgroup slower than the others."""
    try:
        for slow, eager in ((-1, 0), (-1, 1), (0, 0), (1, 0), (2, 0), (0, 1), (1, 1))[: None if full else 1]:  # fmt: skip
            library.be_slow(slow)
            library.be_eager(eager)
            OP.compare(case, run_model(library, case, inputs, "packed"), want)
    finally:
        library.be_slow(-1)
        library.be_eager(0)


@pytest.mark.parametrize("heads", [5, 20, 40])
@pytest.mark.parametrize(("splits", "cluster"), [(1, 1), (3, 1), (4, 4)])
def test_no_rows_under_any_q_on_the_model(
    compiled: Any, heads: int, splits: int, cluster: int
) -> None:
    """Rows that a batch is padded with hold anything in q, NaN and infinity too."""
    check_no_rows(compiled(352), heads, splits, "packed", cluster)


@pytest.mark.parametrize(("heads", "whole"), [(5, 1), (20, 2), (70, 1)])
def test_whole_and_split_lists_on_the_model(compiled: Any, heads: int, whole: int) -> None:
    """The first tokens' blocks write the output, the others' parts; 70 heads are two blocks of a list."""
    case = Case(3, heads, 140, splits=2, sink=True, pattern="edges")
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    got = run_model(compiled(352), case, inputs, "packed", whole=whole)
    OP.compare(case, got, OP.reference(case, inputs))
    # Clusters of whole lists in front of those that join, all of a list or two parts.
    for splits in (2, 4):
        case = Case(4, heads, 140, splits=splits, sink=True, pattern="edges")
        inputs = OP.make_inputs(case, 0, torch.device("cpu"))
        got = run_model(compiled(352), case, inputs, "packed", whole=2, cluster=2)
        OP.compare(case, got, OP.reference(case, inputs))


# --- Clusters -------------------------------------------------------------------------------------------------------


def check_cluster(
    library: Any, case: Case, inputs: Any, want: Any, slow: Iterable[int], cluster: int
) -> None:
    """Right with each of these warpgroups slower than the others, of all blocks of a cluster, three each; -1: none."""
    try:
        for group in slow:
            library.be_slow(group)
            OP.compare(case, run_model(library, case, inputs, "packed", cluster=cluster), want)
    finally:
        library.be_slow(-1)


@pytest.mark.parametrize("case", PARTS, ids=case_id)
def test_clusters_leave_parts_on_the_model(compiled: Any, case: Case) -> None:
    """More splits than the cluster has blocks: each cluster leaves a part."""
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    want = OP.reference(case, inputs)
    check_cluster(compiled(case.width), case, inputs, want, (-1, 0, 4), PARTS[case])


@pytest.mark.parametrize("raised", [False, True], ids=["", "raised"])
@pytest.mark.parametrize("case", [c for c in CLUSTERED if c.width in (352, 288)], ids=case_id)
def test_clusters_on_the_model(
    compiled: Any, case: Case, raised: bool, request: pytest.FixtureRequest
) -> None:
    """Splits of a list that are a cluster. Under --full each warpgroup of each block is slower than the others, too."""
    full = selection(request.config).full
    if (raised or case.width != 352) and not full:
        pytest.skip("not in the quick selection: --full compiles and runs it")
    library = compiled(case.width, *((RAISED,) if raised else ()))
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    groups = range(-1, 3 * case.splits) if full and case.splits <= 4 else (-1, 0, 4)
    check_cluster(library, case, inputs, OP.reference(case, inputs), groups, case.splits)


def test_clusters_write_the_same_bits_on_the_model(compiled: Any) -> None:
    """Whoever is slower; and what parts in memory are joined to within a rounding."""
    library, case = compiled(352), Case(1, 40, 330, splits=4, sink=True, pattern="edges")
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    parts = run_model(library, case, inputs, "packed")
    made = run_model(library, case, inputs, "packed", cluster=4)
    library.be_slow(7)
    try:
        again = run_model(library, case, inputs, "packed", cluster=4)
    finally:
        library.be_slow(-1)
    for name in ("out", "lse"):
        assert torch.equal(made[name], again[name])
        torch.testing.assert_close(made[name], parts[name], rtol=2**-7, atol=1e-6)


CLUSTER_FAULTS = {
    **JOIN_FAULTS,
    "the stage's upper values first": ("float* first = stage + head_of(thread, 0) * kStageStride + dim + (odd ? 4 : 0);",
        "float* first = stage + head_of(thread, 0) * kStageStride + dim;"),
    "the sums are a factor already": ("w.blocks == 1 ? finish(p, w, thread, most[thread], total, true) : total", "finish(p, w, thread, most[thread], total, true)"),
    "sums and what weights are under mixed up": ("stage, most, exponents, kHeads", "stage, exponents, exponents, kHeads"),
}  # fmt: skip


@pytest.mark.parametrize("fault", CLUSTER_FAULTS)
def test_faults_of_clusters_on_the_model(
    compiled: Any, fault: str, request: pytest.FixtureRequest
) -> None:
    if fault != "the stage's upper values first" and not selection(request.config).full:
        pytest.skip("not in the quick selection: --full compiles and runs it")
    case = case_of_fault(fault)
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    want = OP.reference(case, inputs)
    library = compiled(case.width, CLUSTER_FAULTS[fault])
    cluster = 2 if "leaves" in fault or "of its own" in fault else case.splits
    with pytest.raises(AssertionError, match=r"out|lse|threads wait|has ended"):
        check_cluster(library, case, inputs, want, (-1, 0, 3, 4), cluster)


@pytest.mark.parametrize("fault", [None, "weights of another block"])
def test_splits_script_on_the_model(
    compiled: Any, fault: str | None, monkeypatch: Any, capsys: Any, request: pytest.FixtureRequest
) -> None:
    """It times this source, too, and says which output is wrong."""
    if not selection(request.config).full:
        pytest.skip("not in the quick selection: --full compiles and runs it")
    path = Path(__file__).parents[1] / "benchmarks/splits_sparse_mla_decode.py"
    script = runpy.run_path(str(path))
    library = compiled(352, CLUSTER_FAULTS[fault]) if fault else compiled(352)

    def launch(call: Any, split: Any, products: Any) -> None:
        params, _parts_kept = kernels.cuda_params(call, split)
        run_call(library, call, params, products)

    monkeypatch.setattr(kernels, "_launch_cuda", launch)
    monkeypatch.setattr(kernels, "_places", lambda *_: {1: 12, 2: 12, 4: 8})
    right = script["measure"](CpuClock(), Case(2, 5, 200), torch.device("cpu"), 2, "packed")
    said = capsys.readouterr().out.splitlines()
    assert right == (fault is None)
    assert said[0].startswith("packed: ")
    assert len([line for line in said if "blocks" in line]) == (7 if fault is None else 4)


@pytest.mark.parametrize("heads", [4, 40])
@pytest.mark.parametrize("order", ["rising", "falling"])
def test_scores_apart_on_the_model(compiled: Any, heads: int, order: str) -> None:
    """Scores that grow from tile to tile by more than a weight may have, or that nothing of is left of behind the first tile; and one head
    with infinity in q, which no other head sees."""
    case = Case(1, heads, 300, splits=1)
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    inputs["q"] *= 40
    row = kernels.row_format_of(352)
    latent, rope = kernels._decoded(row, inputs["pool"][:, 0][inputs["index"][0, 0].long()])
    scores = inputs["q"][0, 0].double() @ torch.cat([latent, rope], dim=1).T
    sorted_ = scores[0].argsort(descending=order == "falling")
    assert SM_SCALE * (scores[0].amax() - scores[0].amin()) > 60
    inputs["index"] = inputs["index"][:, :, sorted_]
    got = run_model(compiled(352), case, inputs, "packed")
    want = OP.reference(case, inputs)
    OP.compare(case, got, want)
    split = Case(1, heads, 300, splits=4)  # over blocks that are as far apart
    OP.compare(split, run_model(compiled(352), split, inputs, "packed", cluster=4), want)
    inputs["q"][0, 0, 1, 7] = torch.inf
    got = run_model(compiled(352), case, inputs, "packed")
    others = [head for head in range(heads) if head != 1]
    OP.compare(
        case,
        {name: value[:, :, others] for name, value in got.items()},
        {name: value[:, :, others] for name, value in want.items()},
    )


QUICK_FAULTS = ("fragments of V are written under way", "P is overwritten while it is read", "rows of V in another order")  # fmt: skip
FAULTS = {
    "scales of the row eight above": ("bf16_pair(fabsf(scale.x) * kScaleUnit, fabsf(scale.y)", "bf16_pair(fabsf(scale.x) * kScaleUnit, fabsf(scale.x)"),
    "signs of scales are taken for theirs": ("bf16_pair(fabsf(scale.x)", "bf16_pair((scale.x)"),
    "scales of another eight blocks": ("scale_line(8 * eight) + 8 * warp", "scale_line(8 * (eight ^ 1)) + 8 * warp"),
    "codes without sign": ("& 0x81c081c0u", "& 0x01c001c0u"),
    "codes of another byte": ("i < 2 ? word : word >> 8", "word"),
    "step of another rope group": ("R::kScaleAt + 8 * t)", "R::kScaleAt)"),
    "rows of K like those eight above": ("words_at(row + 8 * R::kBytes + 32 * run + 8 * t)", "words_at(row + 32 * run + 8 * t)"),
    "scales of K's next dimensions": ("scale_line(4 * run) - scale_line(0)", "scale_line(4 * (run ^ 1)) - scale_line(0)"),
    "rows of V in another order": ("(16 * step + 4 * i) * R::kBytes", "(16 * step + i) * R::kBytes"),
    "scales of V in another order": ("e2m1_pair_by_product(second[half], tile), by.y", "e2m1_pair_by_product(second[half], tile), by.x"),
    "P's rows in another order": ("me % 32 / 4 * 2;  // likewise", "14 - me % 32 / 4 * 2;"),
    "q in another order": ("((2 * i + half) ^ warp)", "((2 * i + 1 - half) ^ warp)"),
    "q's rope part in another order": ("((4 * half + i) ^ warp)", "((4 * half + 3 - i) ^ warp)"),
    "the other half of the latent values": ("4 * (32 * group + 8 * warp + g)", "4 * (32 - 32 * group + 8 * warp + g)"),
    "invalid rows count": ("if (mask != 0xffff)", "if (false)"),
    "masks of another warp": ("S::kMasks + 16 * at.stage + 4 * warp)", "S::kMasks + 16 * at.stage)"),
    "rows that are none hold what is in the pool": ("source + 16 * chunk, one != 0)", "source + 16 * chunk, true)"),
    "the output is not multiplied": ("o[tile][c / 2 * 4 + c % 2 + 2] *= alpha;", ""),
    "own sums are not multiplied": ("sum[c] *= alphas[buffer * kHeads + head_of(me, c)];\n      weigh();", ";\n      weigh();"),
    "sums are not multiplied for the other's tile": ("      rise(buffer ^ 1);\n", ""),
    "sums are not multiplied for the other's last tile": ("    if (turn == turns && turn > 0) rise(turn - 1 & 1);\n", ""),
    "maxima are never raised": ("!(weigh() <= kMostWeight)", "(weigh(), false)"),
    "maxima of one warp": ("now = fmaxf(now, stat[i * kHeads + me]);", "now = fmaxf(now, stat[me]);"),
    "P is overwritten while it is read": ("      barrier_wait(empty + 8 * before.stage, before.parity);\n", ""),
    "maxima not awaited": ("      barrier_wait(weighed + 8 * (buffer ^ 1), turn - 1 >> 1 & 1);  // maxima", "      // maxima"),
    "P not awaited": ("    barrier_wait(weighed + 8 * buffer, turn >> 1 & 1);\n", ""),
    "a stage is filled too early": ("if (turn >= S::kCount) barrier_wait(", "if (false) barrier_wait("),
    "a stage is never given back": ("    if (lane == 0) barrier_arrive(empty + 8 * at.stage);", "    //"),
    "a tile of rows not awaited": ("    barrier_wait(full + 8 * at.stage, at.parity);\n\n    float s", "    float s"),
    "products are not awaited": ("    wgmma_wait();\n#pragma unroll\n    for (int tile = 0; tile < 4; ++tile) hold(o[tile]);\n    if (lane", "    if (lane"),
    "scores are read while they are under way": ("      wgmma_wait();\n      hold(s);", ""),
    "fragments of V are written under way": ("      if (step >= 2) wgmma_wait<1>();\n", ""),
    "fragments of K are written under way": ("if (run >= 2) wgmma_wait<1>();", "if (run >= 2) wgmma_wait<2>();"),
    "fragments of the rope part are written under way": ("          wgmma_wait<1>();\n#pragma unroll\n          for (int half", "#pragma unroll\n          for (int half"),
    "copies are not awaited": ("await_copies<S::kFlight - 1>", "await_copies<S::kFlight>"),
    "rows of another tile": ("turn + S::kFlight + 2, row)", "turn + S::kFlight + 1, row)"),
    "parity of two turns": ("turn / S::kCount & 1}", "turn / S::kCount / 2 & 1}"),
    "the other warpgroup's last tile is left out": ("turn <= turns; turn += 2", "turn < turns; turn += 2"),
    "sums of one warpgroup": ("for (int i = 0; i < 8; ++i) total +=", "for (int i = 0; i < 4; ++i) total +="),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_on_the_model(compiled: Any, fault: str, request: pytest.FixtureRequest) -> None:
    """What the model has to see: wrong orders, masks, maxima, barriers, operands that change under way."""
    if fault not in QUICK_FAULTS and not selection(request.config).full:
        pytest.skip("not in the quick selection: --full compiles and runs it")
    case = Case(1, 33, 700, pattern="edges", splits=1)
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    if fault.startswith("maxima of"):
        inputs["q"] *= 200  # else any rows' maximum will do
    want = OP.reference(case, inputs)
    library = compiled(case.width, RAISED, FAULTS[fault])
    with pytest.raises(AssertionError, match=r"out|lse|threads wait|under way|nobody waits"):
        check_orders(library, case, inputs, want, full=True)


def test_debug_dump_on_the_model(
    compiled: Any, monkeypatch: Any, capsys: Any, request: pytest.FixtureRequest
) -> None:
    """What the debug script prints of this source."""
    if not selection(request.config).full:
        pytest.skip("not in the quick selection: --full compiles and runs it")
    fault = FAULTS["scales of the row eight above"]
    check_debug_script(compiled, "packed", fault, monkeypatch, capsys)


def test_places_of_clusters(monkeypatch: Any) -> None:
    """The GPU is asked for this source's blocks."""
    asked = []

    def load(package: str, binary: Any, *, entry: str) -> Any:
        assert entry in binary.entries
        asked.append(binary.source)
        return SimpleNamespace(clusters_at_once=lambda n, threads, shared: threads // n)

    monkeypatch.setattr(kernels.launch, "load", load)
    row = kernels.row_format_of(288)
    for plan, source in ((kernels.PACKED[3], "packed"), (kernels.WIDE, "kernel")):
        kernels._places.cache_clear()
        places = kernels._places(plan, row, torch.device("cpu"))
        assert places == {1: 132, 2: plan.threads, 4: plan.threads, 8: plan.threads, 16: plan.threads}  # fmt: skip
        assert asked.pop().endswith(f"{source}.cu")
    kernels._places.cache_clear()


# --- Addresses and numbers ------------------------------------------------------------------------------------------


def test_plan(compiled: Any) -> None:
    """Shared memory as the launcher asks for it; stages enough for tiles at work and under way; scales apart."""
    for width in (352, 288):
        library, row = compiled(width), kernels.row_format_of(width)
        for plan in kernels.PACKED:
            assert plan.shared(row) == library.plan_of(plan.heads, 0) <= 232448
            assert library.plan_of(plan.heads, 1) >= 5
        words = {library.line(b) + 8 * w + library.word_of(p) for b, w, p in itertools.product(range(32), range(4), range(8))}  # fmt: skip
        assert len(words) == 32 * 32
        assert max(words) < 32 * 40 + 24
    taken = {heads: kernels.schedule(heads, "packed").heads for heads in (1, 8, 9, 17, 33, 128)}
    assert taken == {1: 8, 8: 8, 9: 16, 17: 32, 33: 64, 128: 64}


def test_banks(compiled: Any) -> None:
    """Lanes that load or store together do so from 32 banks: words alone, pairs of words by half warps."""
    for width in (352, 288):
        library = compiled(width)
        lanes = [(lane // 4, lane % 4) for lane in range(32)]

        def apart(words: list[int], size: int = 1) -> bool:
            banks = [(word + i) % 32 for word in words for i in range(size)]
            return len(set(banks)) == len(banks)

        for half in (lanes[:16], lanes[16:]):
            assert apart([g * width // 4 + 2 * t for g, t in half], 2)  # K
            for warp in range(4):
                words = {library.line(4 * warp + g // 2) + 2 * t for g, t in half}
                assert apart(sorted(words), 2)  # V's scales
        assert apart([t * width // 4 + g for g, t in lanes])  # V
        for run in range(8):
            assert apart([library.line(4 * run + t) + library.word_of(g) for g, t in lanes])
        for quarter in range(
            0, 32, 8
        ):  # 16 bytes of the output's stage, from dimension 8g on, odd g their upper half first
            stored = [(2 * t * 516 + 8 * g + g % 2 * 4) for g, t in lanes[quarter : quarter + 8]]
            assert apart(stored, 4)
        for block in range(8):  # producers
            assert apart(
                [
                    library.line(8 * (lane // 8) + block) + library.word_of(lane % 8)
                    for lane in range(32)
                ]
            )


def test_every_code(compiled: Any) -> None:
    """E2M1 pairs by a product: every word of two bytes in each half gives what mask and shift give."""
    library = compiled(352)
    library.pair.restype = ctypes.c_uint32
    for low in range(0, 1 << 16, 7):
        word = ctypes.c_uint32(low | (low * 40503 & 0xFFFF) << 16)
        for i in range(4):
            assert library.pair(word, i, 1) == library.pair(word, i, 0)
