# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA decode: all tiers of the op; the CUDA source on a model of its block; its addresses; what is refused."""

from __future__ import annotations

import ctypes
import itertools
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import kv4_block_model as block_model
import pytest
import torch
import triton
import triton.language as tl
from kv4_block_model import CLUSTERED, JOIN_FAULTS, PARTS, case_of_fault, check_no_rows, run_model

from numinous_kv_cache_4bit.kernels import sparse_mla_decode as kernels
from numinous_kv_cache_4bit.kernels.sparse_mla_decode import (
    choose_splits,
    sparse_mla_decode,
    split_last_turn,
)
from numinous_kv_cache_4bit.workbench.sparse_mla_decode import OP, SM_SCALE, Case
from numinous_tooling.bench.clocks import CpuClock
from numinous_tooling.formats import KV4, STOCK_FP8, join_steps, steps_of
from numinous_tooling.numerics import dequantize_int8
from numinous_tooling.testing.kernels import KernelTests
from numinous_tooling.testing.tensors import assert_bitwise_equal, big_pool
from numinous_tooling.testing.tiers import selection
from numinous_tooling.workbench import case_id

HARNESS = """
extern "C" unsigned plan_bytes(int heads) {
  return heads == 64 ? Plan<R, 64, true>::kBytes : heads == 32 ? Plan<R, 32, false>::kBytes : Plan<R, 16, false>::kBytes;
}
extern "C" unsigned pair(unsigned word, int i) { return e2m1_pair(word, i); }
extern "C" unsigned rope_pair(unsigned word, int half, unsigned low, unsigned high) {
  return multiply_bf16_pairs(int8_pair(permute_bytes(word, half ? 0xb3a2 : 0x9180)), step_pair(low, high));
}
extern "C" int tile(int tiles, int splits, int split) { return first_tile(tiles, splits, split); }
extern "C" int join(int splits) { return 64 * groups_of_join(splits); }
extern "C" int row_of(unsigned thread, int group, int groups, int pass) { return producer_row(thread, group, groups, pass); }
extern "C" unsigned chunk_at(unsigned thread, int row, int k, int j) {  // where a producer stores it
  return stored<R>(swizzled(64, row, (R::kFourBit ? 32 : 16) * producer_quarter(thread)), k, j);
}
extern "C" void be_eager(int eager) { model::eager = eager != 0; }
extern "C" void be_slow(int group) { model::slow = group; }
extern "C" long rows_asked() { return model::rows_asked; }
extern "C" unsigned long list_asked(int last) { return (unsigned long)(last ? model::last_asked : model::first_asked); }
extern "C" unsigned element_at(int rows, int row, int position) { return swizzled(rows, row, position); }
"""


class TestSparseMlaDecode(KernelTests):
    op = OP


# --- The CUDA source on a model of its block ------------------------------------------------------------------------


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`compiled(width, *changes)`: library of kernel.cu with `run_model`, some of its text replaced."""
    entries = ("wide", "narrow_32", "narrow_16", "combine")
    folder = tmp_path_factory.mktemp("model")
    return block_model.builder(folder, "kernel.cu", "sm90_model.h", entries, HARNESS)


MODELLED = [
    case for case in OP.cases if 0 < case.requests * case.queries * case.heads * case.topk <= 20_000
]


def check_orders(
    library: Any, case: Case, inputs: Any, want: Any, slow: Iterable[int], cluster: int = 1
) -> None:
    """Right with each of these warpgroups slower than the others, of all blocks of a cluster; -1: none."""
    try:
        for group in slow:
            library.be_slow(group)
            OP.compare(case, run_model(library, case, inputs, cluster=cluster), want)
    finally:
        library.be_slow(-1)


@pytest.mark.parametrize("case", MODELLED, ids=case_id)
def test_source_on_the_model(compiled: Any, case: Case, request: pytest.FixtureRequest) -> None:
    """All but what only hardware decides: proxies, the registers' handover, the meaning of instructions. Products are done as late as they
    may be; under --full as early as they may be, too, and each warpgroup in turn is slower than the others."""
    full = selection(request.config).full
    if case.width in (288, 528) and not full:
        pytest.skip("not in the quick selection: --full compiles and runs rows without rope")
    library, inputs = compiled(case.width), OP.make_inputs(case, 0, torch.device("cpu"))
    want = OP.reference(case, inputs)
    if full:
        library.be_eager(1)
        OP.compare(case, run_model(library, case, inputs), want)
        library.be_eager(0)
    check_orders(library, case, inputs, want, (-1, 0, 1, 2, 3) if full else (-1,))


@pytest.mark.parametrize("heads", [5, 20, 40])
@pytest.mark.parametrize(("splits", "cluster"), [(1, 1), (3, 1), (4, 4)])
def test_no_rows_under_any_q_on_the_model(
    compiled: Any, heads: int, splits: int, cluster: int
) -> None:
    """Rows that a batch is padded with hold anything in q, NaN and infinity too."""
    check_no_rows(compiled(352), heads, splits, "wgmma", cluster)


@pytest.mark.parametrize("case", PARTS, ids=case_id)
def test_clusters_leave_parts_on_the_model(compiled: Any, case: Case) -> None:
    """More splits than the cluster has blocks: each cluster leaves a part."""
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    want = OP.reference(case, inputs)
    check_orders(compiled(case.width), case, inputs, want, (-1, 0, 5), PARTS[case])


@pytest.mark.parametrize("case", CLUSTERED, ids=case_id)
def test_clusters_on_the_model(compiled: Any, case: Case, request: pytest.FixtureRequest) -> None:
    """Splits of a list that are a cluster. Under --full each block is slower than the others, too."""
    full = selection(request.config).full
    if case.width != 352 and not full:
        pytest.skip("not in the quick selection: --full compiles and runs other rows")
    library, inputs = compiled(case.width), OP.make_inputs(case, 0, torch.device("cpu"))
    groups = range(-1, 4 * case.splits) if full and case.splits <= 4 else (-1, 0, 5)
    check_orders(library, case, inputs, OP.reference(case, inputs), groups, case.splits)


def test_clusters_write_the_same_bits_on_the_model(compiled: Any) -> None:
    """Whoever is slower; and what parts in memory are joined to within a rounding."""
    library, case = compiled(352), Case(1, 40, 330, splits=4, sink=True, pattern="edges")
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    parts = run_model(library, case, inputs)
    made = run_model(library, case, inputs, cluster=4)
    library.be_slow(9)
    try:
        again = run_model(library, case, inputs, cluster=4)
    finally:
        library.be_slow(-1)
    for name in ("out", "lse"):
        assert torch.equal(made[name], again[name])
        torch.testing.assert_close(made[name], parts[name], rtol=2**-7, atol=1e-6)


CLUSTER_FAULTS = {
    **JOIN_FAULTS,
    "the stage is divided already": ("      factor[r] = 1.0f;", "      factor[r] = p.out_scale / total;"),
    "a part without rows keeps its maximum": ("        maxima[head] = most[r];\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", CLUSTER_FAULTS)
def test_faults_of_clusters_on_the_model(
    compiled: Any, fault: str, request: pytest.FixtureRequest
) -> None:
    if fault != "nobody waits for the other blocks" and not selection(request.config).full:
        pytest.skip("not in the quick selection: --full compiles and runs it")
    case = case_of_fault(fault)
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    want = OP.reference(case, inputs)
    library = compiled(case.width, CLUSTER_FAULTS[fault])
    cluster = 2 if "leaves" in fault or "of its own" in fault else case.splits
    with pytest.raises(AssertionError, match=r"out|lse|threads wait|has ended"):
        check_orders(library, case, inputs, want, (-1, 0, 4, 5), cluster)


def test_rows_asked_for_on_the_model(compiled: Any) -> None:
    """Every row is asked for in L2 once and before it is read, but those of a block's first tile, which are read at once."""
    library = compiled(352)
    for case, tiles in ((Case(1, 12, 330, splits=1), 1), (Case(2, 40, 140, splits=2), 4)):
        before = library.rows_asked()
        run_model(library, case, OP.make_inputs(case, 0, torch.device("cpu")))
        assert library.rows_asked() - before == case.requests * case.topk - 64 * tiles


@pytest.mark.parametrize("ids", ["int32", "int64"])
def test_list_asked_for_on_the_model(compiled: Any, ids: str) -> None:
    """A block asks for its part of the list, in whole units of 16 bytes and no further."""
    library = compiled(352)
    library.list_asked.restype = ctypes.c_ulong
    inputs = OP.make_inputs(case := Case(1, 6, 203, ids=ids, splits=2), 0, torch.device("cpu"))
    # Not at a multiple of 16; the last block has tiles 2 and 3.
    inputs["index"] = torch.cat([inputs["index"][0, 0, :1], inputs["index"][0, 0]])[1:].view(
        1, 1, -1
    )
    run_model(library, case, inputs)
    size = inputs["index"].element_size()
    first = inputs["index"].data_ptr()
    assert library.list_asked(0) == (first + 128 * size) // 16 * 16
    assert library.list_asked(1) == -(-(first + 203 * size) // 16) * 16
    dense = OP.make_inputs(
        case := Case(1, 6, 203, ids=ids, dense=True, splits=2), 0, torch.device("cpu")
    )
    run_model(library, case, dense)
    first = dense["page_table"].data_ptr()
    assert library.list_asked(0) == (first + 2 * size) // 16 * 16
    assert library.list_asked(1) == -(-(first + 4 * size) // 16) * 16


@pytest.mark.parametrize(("heads", "whole"), [(5, 1), (20, 2), (70, 1)])
def test_whole_and_split_lists_on_the_model(compiled: Any, heads: int, whole: int) -> None:
    """The first tokens' blocks write the output, the others' parts; 70 heads are two blocks of a list."""
    case = Case(3, heads, 140, splits=2, sink=True, pattern="edges")
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    want = OP.reference(case, inputs)
    OP.compare(case, run_model(compiled(352), case, inputs, whole=whole), want)
    # Clusters of whole lists in front of those that join, all of a list or two parts.
    for splits in (2, 4):
        case = Case(4, heads, 140, splits=splits, sink=True, pattern="edges")
        inputs = OP.make_inputs(case, 0, torch.device("cpu"))
        got = run_model(compiled(352), case, inputs, whole=2, cluster=2)
        OP.compare(case, got, OP.reference(case, inputs))


QUICK_FAULTS = (
    "panels of V mixed up",
    "P not awaited",
    "a tile is given back too early",
    "signs of scales are taken for theirs",
)
FAULTS = {
    "a row of scales too far": ("bf16_pair(size[1], size[1])", "bf16_pair(size[0], size[0])"),
    "signs of scales are taken for theirs": ("fabsf(scale.x) * kScaleUnit", "scale.x * kScaleUnit"),
    "step of another rope group": ("quarter & 1 ? step_pair(four.z, four.w)", "quarter & 1 ? step_pair(four.x, four.y)"),
    "rope codes without sign": ("spread & 0x807f807fu", "spread & 0x007f007fu"),
    "rows swizzled by another row": ("((chunk ^ (row % 8)) * 16)", "((chunk ^ ((row + 1) % 8)) * 16)"),
    "panels of V mixed up": ("return uint32_t(panel * kTilePanelBytes + k * 2048)", "return uint32_t(panel * kTilePanelBytes + k * 1024)"),
    "wrong distance of panels": ("mn_major_step(4 * half, 0), kTilePanelBytes", "mn_major_step(4 * half, 0), 8"),
    "the second half of the values like the first": ("mn_major_step(2 * part, step)", "mn_major_step(0, step)"),
    "invalid rows count": ("raw.valid ? 0.0f : -kInf", "0.0f"),
    "the output is not rescaled": ("o[1][i] *= alpha[i % 4 / 2]", "o[1][i] *= 1.0f"),
    "sums are not rescaled": ("sum[r] *= alpha[r];", ""),
    "the other warpgroup's maximum is not taken": ("{maxima[fragment_row(thread, 0)], maxima[fragment_row(thread, 2)]}", "{most[0], most[1]}"),
    "P is overwritten while it is read": ("    if (turn > 0) barrier_wait(of_half(empty, turn - 1, 1), parity_of(turn - 1));  // by", "    // by"),
    "P is overwritten when a half is read": ("of_half(empty, turn - 1, 1), parity_of(turn - 1)", "of_half(empty, turn - 1, 0), parity_of(turn - 1)"),
    "the first tile of the other warpgroup is left out": ("if (half == 1 && turns > 0) attend_theirs(0);", ""),
    "the last tile of the other warpgroup is left out": ("if (turn + 1 < turns) attend_theirs", "if (turn + 2 < turns) attend_theirs"),
    "a tile is given back with products under way": ("    wgmma_wait();\n    hold(o[0]);\n    hold(o[1]);\n    if", "    if"),
    "a half is given back with products under way": ("    wgmma_wait<1>();\n    if (threadIdx.x % 32 == 0) barrier_arrive(of_half(empty, turn, 0));\n    wgmma_wait();\n    hold(o[0]);",
        "    if (threadIdx.x % 32 == 0) barrier_arrive(of_half(empty, turn, 0));\n    wgmma_wait();\n    hold(o[0]);"),
    "the second half is given back with the first": ("barrier_arrive(of_half(empty, turn, 0));\n    wgmma_wait();\n    hold(o[0])",
        "barrier_arrive(of_half(empty, turn, 0)), barrier_arrive(of_half(empty, turn, 1));\n    wgmma_wait();\n    hold(o[0])"),
    "scores are read while they are under way": ("    wgmma_wait();\n    hold(s);\n\n    float now", "    float now"),
    "maxima not awaited": ("    barrier_wait(peaked, turn & 1);\n", ""),
    "P not awaited": ("    barrier_wait(weighed, turn & 1);\n    multiply(turn);\n    give_back(turn);\n  };", "    multiply(turn);\n    give_back(turn);\n  };"),
    "a tile is given back too early": ("    barrier_wait(of_half(empty, turn, group), parity_of(turn) ^ 1);", ""),
    "a half waits for the other one's buffer": ("of_half(empty, turn, group), parity_of(turn) ^ 1", "of_half(empty, turn, 1 - group), parity_of(turn) ^ 1"),
    "only the first half is awaited": ("    barrier_wait(of_half(full, turn, 1), parity_of(turn));\n  };", "  };"),
    "only the second half is awaited": ("    barrier_wait(of_half(full, turn, 0), parity_of(turn));\n    barrier_wait(of_half(full, turn, 1), parity_of(turn));\n  };",
        "    barrier_wait(of_half(full, turn, 1), parity_of(turn));\n  };"),
    "the second half's rows count like the first one's": ("bias[buffer * kTile + row] = raw", "bias[buffer * kTile + row % kHalf] = raw"),
    "a short list fills one half only": ("  __syncthreads();  // barriers are made", "  __syncthreads();\n  if (w.length <= kHalf && group == 1) return;"),
    "parity of a single buffer": ("return turn >> 1 & 1;", "return turn & 1;"),
    "parity of eight buffers": ("return turn >> 1 & 1;", "return turn >> 2 & 1;"),
    "a half is never given back": ("if (threadIdx.x % 32 == 0) barrier_arrive(of_half(empty, turn, 1));", ""),
    "values in the order of positions": ("(position & ~7) | (position & 1) << 2 | (position & 7) >> 1", "position"),
    "rows of another tile are asked for": ("prefetch(later);", "prefetch(first);"),
    "groups do not meet": ("joined.rise(fmaxf(joined.most, other.most));", "break;"),
    "parts that nobody wrote are joined": ("if (own[i] != -kInf) joined.add", "joined.add"),
    "the last split ends early": ("w.end = int(split_up(tiles * (split + 1)))", "w.end = int(split_up(tiles) * (split + 1))"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_on_the_model(compiled: Any, fault: str, request: pytest.FixtureRequest) -> None:
    """What the model has to see: wrong addresses, masks, maxima, barriers."""
    if fault not in QUICK_FAULTS and not selection(request.config).full:
        pytest.skip("not in the quick selection: --full compiles and runs it")
    case = Case(1, 33, 70 if fault.startswith("the last") else 330, pattern="edges", splits=1)
    if fault.startswith("the last"):
        case = Case(1, 33, 190, splits=2)
    if fault.startswith("a short list"):
        case = Case(1, 33, 20, splits=1)
    if fault.startswith(("groups", "parts")):
        case = Case(1, 5, 400, splits=19)
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    want = OP.reference(case, inputs)
    library = compiled(case.width, FAULTS[fault])
    with pytest.raises(AssertionError, match=r"out|lse|threads wait|asked for|nobody waits"):
        check_orders(library, case, inputs, want, (-1, 2, 3, 0, 1))


def test_debug_dump_on_the_model(
    compiled: Any, monkeypatch: Any, capsys: Any, request: pytest.FixtureRequest
) -> None:
    """What the debug script prints: every stage agrees, and with a fault in the decoding K is the first that does not."""
    if not selection(request.config).full:
        pytest.skip("not in the quick selection: --full compiles and runs it")
    fault = FAULTS["a row of scales too far"]
    block_model.check_debug_script(compiled, "wgmma", fault, monkeypatch, capsys)


SCRIPT = Path(__file__).parents[1] / "benchmarks/splits_sparse_mla_decode.py"


@pytest.mark.parametrize("fault", [None, "weights of another block"])
def test_splits_script_on_the_model(
    compiled: Any, fault: str | None, monkeypatch: Any, capsys: Any
) -> None:
    """It launches each split with each cluster, says which is the kernel's choice, and which output is wrong."""
    script = runpy.run_path(str(SCRIPT))
    library = compiled(352, CLUSTER_FAULTS[fault]) if fault else compiled(352)

    def launch(call: Any, split: Any, products: Any) -> None:
        params, _parts_kept = kernels.cuda_params(call, split)
        block_model.run_call(library, call, params)

    monkeypatch.setattr(kernels, "_launch_cuda", launch)
    monkeypatch.setattr(kernels, "_places", lambda *_: {1: 12, 2: 12, 4: 8})
    right = script["measure"](CpuClock(), Case(2, 5, 200), torch.device("cpu"), 2, "wgmma")
    said = capsys.readouterr().out.splitlines()
    assert right == (fault is None)
    lines = [line for line in said if "blocks" in line]
    # 1, 2, 3 and 4 splits by parts, 2 and 4 in clusters of two, 4 in one of four.
    assert len(lines) == (7 if fault is None else 4)
    assert len(said) == 8
    assert fault or [line[0] for line in lines].count("*") == 1


def test_places_of_clusters(monkeypatch: Any) -> None:
    """As many blocks as the GPU says that it runs, and no cluster of which it runs none."""
    counts = {2: 66, 4: 31, 8: 15, 16: 0}
    kernel = SimpleNamespace(clusters_at_once=lambda n, threads, shared: counts[n])
    monkeypatch.setattr(kernels.launch, "load", lambda *_, **__: kernel)
    row, device = kernels.row_format_of(352), torch.device("cpu")
    kernels._places.cache_clear()
    assert kernels._places(kernels.WIDE, row, device) == {1: 132, 2: 132, 4: 124, 8: 120}
    kernels._places.cache_clear()


# --- Addresses and numbers ------------------------------------------------------------------------------------------


def test_layout(compiled: Any) -> None:
    """Shared memory as the launcher asks for it; every chunk of a tile stored once, without bank conflicts; splits."""
    for width in (352, 656):
        library, row = compiled(width), kernels.row_format_of(width)
        for plan in (kernels.NARROW_16, kernels.NARROW_32, kernels.WIDE):
            assert plan.shared(row) == library.plan_bytes(plan.heads) <= 232448
        chunks, eights = (4, 4) if width == 352 else (8, 2)
        for groups in (1, 2):
            seen = set()
            for group, pass_ in [(g, p) for g in range(groups) for p in range(2 // groups)]:
                rows = [library.row_of(t, group, groups, pass_) for t in range(128)]
                for k, j in [(k, j) for k in range(chunks) for j in range(eights)]:
                    at = [library.chunk_at(t, rows[t], k, j) for t in range(128)]
                    assert all(
                        len({a // 16 % 8 for a in at[i : i + 8]}) == 8 for i in range(0, 128, 8)
                    )
                    for t in range(128):
                        position = 8 * eights * (t % 32 // 8 + 4 * k) + 8 * j
                        assert at[t] == library.element_at(64, rows[t], position)
                    seen.update(at)
            assert len(seen) == 64 * 512 // 8
    for rows in (16, 32, 64):
        for row_ in range(rows):
            for position in range(576):
                plain = position // 64 * rows * 128 + row_ * 128 + position % 64 * 2
                assert library.element_at(rows, row_, position) == plain ^ ((plain >> 7 & 7) << 4)
    for tiles in range(70):
        for splits in range(1, 65):
            assert library.join(splits) == kernels.join_threads(splits)
            bounds = [library.tile(tiles, splits, split) for split in range(splits + 1)]
            assert bounds[0] == 0
            assert bounds[-1] == tiles
            steps = {b - a for a, b in itertools.pairwise(bounds)}
            assert max(steps) - min(steps) <= 1


def test_every_code(compiled: Any) -> None:
    """E2M1 pairs by mask and shift, every code in every nibble between others, under every scale: exact in bf16."""
    library = compiled(352)
    library.pair.restype = ctypes.c_uint32
    values = torch.tensor(
        [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64
    )
    codes = torch.arange(256, dtype=torch.uint8)
    scales = codes.view(torch.float8_e4m3fn).double()
    held = scales[~scales.isnan()] * 2.0**114
    assert torch.equal(held.to(torch.bfloat16).double(), held)
    for word in (0x76543210, 0xFEDCBA98, 0x0F1E2D3C, 0xA5A55A5A, 0x88888888, 0x13579BDF):
        for i in range(4):
            pair = library.pair(ctypes.c_uint32(word), i)
            halves = torch.tensor([pair & 0xFFFF, pair >> 16], dtype=torch.int32).to(torch.uint16)
            got = halves.view(torch.bfloat16).double() * 2.0**126
            assert got.tolist() == [values[word >> 4 * n & 15] for n in (i, i + 4)]
    products = values[:, None] * 2.0**-126 * held
    assert torch.equal(products.to(torch.bfloat16).double(), products)


def test_every_rope_code(compiled: Any) -> None:
    """INT8 pairs, every code in every byte under every step: the format's value times 2^-12 to the bit, NaN and inf too."""
    library = compiled(352)
    library.rope_pair.restype = ctypes.c_uint32
    codes = torch.arange(256, dtype=torch.uint8).view(64, 4)
    generator = torch.Generator().manual_seed(0)
    for step in range(128):
        scales = torch.randint(0, 256, (32,), generator=generator, dtype=torch.uint8)
        scales = join_steps(scales, torch.tensor([step] * 4, dtype=torch.uint8))
        scales[7::8] |= 0x80 * (step % 2)  # the sign that nobody reads
        low, high = scales.view(torch.int32)[:2].tolist()
        words = codes.view(torch.int32).flatten().tolist()
        pairs = [library.rope_pair(w, half, low, high) for w in words for half in (0, 1)]
        got = torch.tensor(pairs).view(-1, 1) >> torch.tensor([0, 16]) & 0xFFFF
        got = got.flatten().to(torch.uint16).view(torch.bfloat16)
        want = dequantize_int8(codes.flatten(), steps_of(scales)[:1].expand(16)) * kernels.HELD
        assert_bitwise_equal(f"step {step}", got, want.to(torch.bfloat16), any_nan=True)
        assert torch.equal(got.float(), want) or step == 127


@triton.jit
def _rope_kernel(rows_ptr, out_ptr, stride, ROWS: tl.constexpr):
    at = tl.arange(0, ROWS)
    values = kernels._rope(rows_ptr + at * stride, at < ROWS - 1, 352)
    tl.store(out_ptr + at[:, None] * 64 + tl.arange(0, 64)[None, :], values)


@pytest.mark.tier("interpret")
def test_every_rope_code_interpreted() -> None:
    """The Triton version's: every code under every step, rows at odd addresses, one that is none."""
    _every_rope_code(torch.device("cpu"))


@pytest.mark.tier("device")
def test_every_rope_code_triton(gpu: torch.device) -> None:
    _every_rope_code(gpu)


def _every_rope_code(device: torch.device) -> None:
    memory = torch.zeros(512, 353, dtype=torch.uint8, device=device)
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(4, 64).repeat(128, 1)
    steps = torch.arange(128, dtype=torch.uint8, device=device).repeat_interleave(4)
    steps = torch.stack([steps, steps ^ 0x55, steps, steps ^ 0x2A], dim=-1)
    scales = torch.arange(512 * 32, device=device).view(512, 32).to(torch.uint8)
    memory[:, 257:289] = join_steps(scales, steps)
    memory[::2, 264:289:8] |= 0x80  # the signs that nobody reads
    memory[:, 289:] = codes
    out = torch.full((512, 64), 7.0, device=device)
    _rope_kernel[(1,)](memory[:, 1:], out, 353, ROWS=512)
    want = dequantize_int8(codes, steps)
    want[-1] = 0.0
    assert_bitwise_equal("rope", out, want, any_nan=True)


def test_choose_splits() -> None:
    assert choose_splits(128, 32, 132) == 1
    assert choose_splits(64, 32, 132) == 2
    assert choose_splits(1, 1, 132) == 1
    assert 8 <= choose_splits(8, 32, 132) <= 16
    assert choose_splits(1, 0, 132) == 1
    assert choose_splits(1, 10**6, 132) <= kernels.MAX_SPLITS


def test_split_last_turn() -> None:
    """What fills turns of 132 is whole; of the rest a split where it ends sooner."""
    parts = {1: 132}
    assert split_last_turn(128, 1, 32, parts) == (128, 1, 1)
    assert split_last_turn(132, 1, 32, parts) == (132, 1, 1)
    assert split_last_turn(140, 1, 32, parts) == (132, choose_splits(8, 32, 132), 1)
    assert split_last_turn(64, 1, 32, parts) == (0, 2, 1)
    assert split_last_turn(128, 2, 32, parts) == (128, 1, 1)
    assert split_last_turn(67, 2, 32, parts) == (66, choose_splits(2, 32, 132), 1)
    for tokens in range(1, 300):
        for groups in (1, 2, 4):
            whole, splits, cluster = split_last_turn(tokens, groups, 32, parts)
            assert 0 <= whole <= tokens
            assert cluster == 1
            assert (whole == tokens) == (splits == 1)
            assert whole == tokens or whole * groups > (tokens * groups // 132 - 1) * 132
            if whole < tokens:
                assert splits == choose_splits((tokens - whole) * groups, 32, 132)


def test_products_of() -> None:
    """On Hopper few rows of many heads are decoded into shared memory, other 4-bit rows in registers; FP8 rows and other GPUs have one kernel."""
    for heads, tokens, few in ((64, 1, True), (64, 16, True), (64, 17, False), (128, 8, True), (128, 9, False), (33, 1, True), (32, 1, False), (8, 1, False)):  # fmt: skip
        taken = kernels.products_of("wgmma", KV4, heads, tokens, 2048, 132)
        assert taken == ("wgmma" if few else "packed"), (heads, tokens)
        assert kernels.products_of("wgmma", STOCK_FP8, heads, tokens, 2048, 132) == "wgmma"
        for made_for in ("mma", "tcgen05"):
            assert kernels.products_of(made_for, KV4, heads, tokens, 2048, 132) == made_for
    assert kernels.products_of("wgmma", KV4, 64, 1, 64 * 528 + 1, 132) == "packed"
    assert kernels.other_impl(KV4, 64, torch.device("cpu")) is None


def test_params_under_another_default_device() -> None:
    """The engine captures under its GPU as torch's default device, where reading a value back would end the capture."""
    q, pool = (
        torch.zeros(1, 1, 8, 576, dtype=torch.bfloat16),
        torch.zeros(64, 352, dtype=torch.uint8),
    )
    index = torch.zeros(1, 1, 3, dtype=torch.int32)
    call = kernels._checked(q, pool, 1.0, index, None, None, None, 0.5, None)
    with torch.device("meta"):
        params, _ = kernels.cuda_params(call, kernels.Split(1, 1))
    assert params.q_factor == 0x3F003F00


def test_split_over_clusters() -> None:
    """With 132 multiprocessors in GPCs of 16 and 18: as many blocks as clusters have room for, whole lists in whole clusters."""
    h200 = {1: 132, 2: 132, 4: 128, 8: 128, 16: 128}
    assert split_last_turn(128, 1, 32, h200) == (128, 1, 1)
    assert split_last_turn(64, 1, 32, h200) == (0, 2, 2)
    assert split_last_turn(32, 1, 32, h200) == (0, 4, 4)
    # GPCs of other sizes: 32 clusters of four would not all run at once.
    assert split_last_turn(32, 1, 32, {1: 132, 2: 132, 4: 124, 8: 120})[2] < 4
    # A list of millions: more parts than a cluster has.
    assert split_last_turn(1, 1, 3000, h200) == (0, 64, 2)
    for tokens in range(1, 300):
        for groups in (1, 2):
            for tiles in (1, 3, 32, 200):
                whole, splits, cluster = split_last_turn(tokens, groups, tiles, h200)
                assert (whole == tokens) == (splits == 1)
                assert splits % cluster == 0
                assert whole * groups % cluster == 0


# --- Peers ----------------------------------------------------------------------------------------------------------


@pytest.mark.tier("interpret")
@pytest.mark.parametrize("width", [352, 528])
def test_peers(width: int, monkeypatch: Any) -> None:
    """What the peers are given is the same attention: FlashMLA replaced by the reference on the rows that it would read."""

    def flash_mla_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, **given: Any) -> Any:
        assert q.shape[2] in (64, 128)
        assert k_cache.shape[1:3] == (64, 1)
        assert given["indices"].dtype == torch.int32
        assert given["indices"].shape[-1] % 64 == 0
        assert given["tile_scheduler_metadata"] == "schedule"
        rows = k_cache.view(torch.uint8).view(-1, k_cache.shape[-1])
        scale = given["softmax_scale"]
        made = kernels.reference(q, rows, sm_scale=scale, index=given["indices"])
        return made["out"], made["lse"].transpose(1, 2)

    flash = ModuleType("sgl_kernel.flash_mla")
    flash.flash_mla_with_kvcache = flash_mla_with_kvcache  # type: ignore[attr-defined]
    flash.get_mla_metadata = lambda **_: ("schedule", "splits")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_mla", flash)
    case = Case(2, 3, 64, width, peers=True)
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    want = OP.reference(case, inputs)
    for name, peer in OP.peers.items():
        if peer.refuses(case):
            assert (name, width) == ("gather-flashmla", 528)
            continue
        got = peer.run(case, inputs)
        # Values of 4-bit rows that FP8 rounds are off by 1/17 at most; a wrong row by all of it.
        limit = want["magnitude"] / 17 + 1e-6 if width == 352 else 1e-9
        assert bool(((got["out"] - want["out"]).abs() <= limit).all()), name
        assert OP.peers[name].refuses(Case(2, 3, 64, width))


# --- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"q": torch.zeros(1, 1, 16, 576)}, TypeError, "q: expected bfloat16"),
        ({"q": torch.zeros(1, 1, 16, 512).bfloat16()}, ValueError, "576"),
        ({"q": torch.zeros(1, 9, 16, 576).bfloat16()}, ValueError, "8 queries"),
        ({"q": torch.zeros(1, 1, 129, 576).bfloat16()}, ValueError, "128 heads"),
        ({"q": torch.zeros(1, 1, 16, 1152).bfloat16()[..., ::2]}, ValueError, "side by side"),
        ({"pool": torch.zeros(9, 416, dtype=torch.uint8)}, ValueError, "416 bytes are not read"),
        ({"pool": torch.zeros(9, 352)}, TypeError, "pool: expected uint8"),
        ({"pool": torch.zeros(9, 704, dtype=torch.uint8)[:, ::2]}, ValueError, "side by side"),
        ({"index": torch.zeros(1, 1, 0, dtype=torch.int32)}, ValueError, "entries, got 0"),
        ({"index": torch.zeros(1, 4, dtype=torch.int32)}, ValueError, "index: expected"),
        ({"index": torch.zeros(1, 1, 4)}, TypeError, "int32 or int64"),
        ({"index": None}, ValueError, "give index, or page_table and lengths"),
        ({"lengths": torch.zeros(1, dtype=torch.int32)}, ValueError, "give index, or"),
        ({"sink": torch.zeros(15)}, ValueError, "sink: expected"),
        ({"sink": torch.zeros(16).double()}, TypeError, "sink: expected float32"),
        ({"sm_scale": 0.0}, ValueError, "sm_scale is positive"),
        ({"latent_scale": 3.0}, ValueError, "power of two"),
        ({"splits": 65}, ValueError, "splits is 1"),
        ({"impl": "hip"}, ValueError, "impl is"),
        ({"impl": "cuda"}, NotImplementedError, "needs tensors on an NVIDIA GPU"),
        ({"impl": "packed"}, NotImplementedError, "impl='packed' needs tensors on an NVIDIA GPU"),
    ],
)  # fmt: skip
def test_refusals(change: dict[str, Any], error: type[Exception], text: str) -> None:
    call: dict[str, Any] = {
        "q": torch.zeros(1, 1, 16, 576).bfloat16(),
        "pool": torch.zeros(9, 352, dtype=torch.uint8),
        "sm_scale": SM_SCALE,
        "index": torch.zeros(1, 1, 4, dtype=torch.int32),
    }
    with pytest.raises(error, match=text) as raised:
        sparse_mla_decode(**{**call, **change})
    assert "\n" not in str(raised.value)


# --- On the GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.tier("device")
@pytest.mark.parametrize("impl", ["cuda", "decoded", "packed", "triton"])
def test_past_2_31_bytes(impl: kernels.Impl, gpu: torch.device) -> None:
    """Rows behind byte 2^31 of a pool."""
    capability = torch.cuda.get_device_capability(gpu)
    if impl == "cuda" and capability not in kernels.MADE_FOR:
        pytest.skip("cuda is not made for this compute capability")
    if impl in kernels.BY_NAME and kernels.MADE_FOR.get(capability) != "wgmma":
        pytest.skip(f"{impl} is made for Hopper")
    pool = big_pool((352,), torch.uint8, gpu)
    case = Case(1, 64, 100)
    inputs = OP.make_inputs(case, 0, gpu)
    pool[-len(inputs["pool"]) :] = inputs["pool"][:, 0]
    index = inputs["index"] + len(pool) - len(inputs["pool"])
    got = sparse_mla_decode(inputs["q"], pool, sm_scale=SM_SCALE, index=index, impl=impl)
    OP.compare(case, got._asdict(), OP.reference(case, inputs))


@pytest.mark.tier("device", archs=("sm90", "sm100", "sm103", "sm120"))
@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("impl", ["cuda", "decoded", "packed"])
def test_splits_agree(impl: kernels.Impl, heads: int, gpu: torch.device) -> None:
    """Every number of splits gives the same within rounding, each the same bits every time."""
    case = Case(2, heads, 2048)
    inputs = OP.make_inputs(case, 0, gpu)
    want = OP.reference(case, inputs)
    if (
        impl in kernels.BY_NAME
        and kernels.MADE_FOR[torch.cuda.get_device_capability(gpu)] != "wgmma"
    ):
        pytest.skip(f"{impl} is made for Hopper")
    for splits in (1, 2, 3, 4, 8, 16, 31, 32, 33, 64):
        first, again = (
            sparse_mla_decode(
                inputs["q"],
                inputs["pool"],
                sm_scale=SM_SCALE,
                index=inputs["index"],
                splits=splits,
                impl=impl,
            )
            for _ in range(2)
        )
        assert torch.equal(first.out, again.out)
        OP.compare(case, first._asdict(), want)
