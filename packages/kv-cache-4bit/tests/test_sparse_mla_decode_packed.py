# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA decode with 4-bit rows that are decoded into operands in registers: kernel_packed.cu on the model of its block; its addresses."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest
import torch
from kv4_block_model import builder, check_debug_script, check_no_rows, run_model

from numinous_kv_cache_4bit.kernels import sparse_mla_decode as kernels
from numinous_kv_cache_4bit.workbench.sparse_mla_decode import OP, SM_SCALE, Case
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
@pytest.mark.parametrize("splits", [1, 3])
def test_no_rows_under_any_q_on_the_model(compiled: Any, heads: int, splits: int) -> None:
    """Rows that a batch is padded with hold anything in q, NaN and infinity too."""
    check_no_rows(compiled(352), heads, splits, "packed")


@pytest.mark.parametrize(("heads", "whole"), [(5, 1), (20, 2), (70, 1)])
def test_whole_and_split_lists_on_the_model(compiled: Any, heads: int, whole: int) -> None:
    """The first tokens' blocks write the output, the others' parts; 70 heads are two blocks of a list."""
    case = Case(3, heads, 140, splits=2, sink=True, pattern="edges")
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    got = run_model(compiled(352), case, inputs, "packed", whole=whole)
    OP.compare(case, got, OP.reference(case, inputs))


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
