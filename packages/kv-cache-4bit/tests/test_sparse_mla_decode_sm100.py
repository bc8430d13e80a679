# SPDX-License-Identifier: Apache-2.0
"""kernel_tcgen05.cu, the version for sm100 and sm103, on a model of tcgen05 and tensor memory: no GPU has run it."""

from __future__ import annotations

import ctypes
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv4_block_model import builder, run_call, run_model

from numinous_kv_cache_4bit.kernels import sparse_mla_decode as kernels
from numinous_kv_cache_4bit.workbench.sparse_mla_decode import OP, Case
from numinous_tooling.testing.tiers import selection
from numinous_tooling.workbench import case_id

HARNESS = """
extern "C" void be_eager(int eager) { model::eager = eager; }
extern "C" unsigned plan_bytes(int heads) {
  return heads == 64 ? TensorBlockPlan<R, 64>::kBytes : heads == 32 ? TensorBlockPlan<R, 32>::kBytes : TensorBlockPlan<R, 16>::kBytes;
}
extern "C" int plan_threads() { return kThreads; }
extern "C" unsigned instruction(int m, int n, int mn_major_a) { return instruction_of(m, n, mn_major_a); }
extern "C" unsigned long long operand_at(unsigned address, unsigned leading, unsigned stride) {
  return tcgen05_descriptor(address, leading, stride);
}
"""


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`compiled(width)`: library of kernel_tcgen05.cu with `run_model`."""
    entries = ("heads_64", "heads_32", "heads_16", "combine")
    folder = tmp_path_factory.mktemp("model")
    return builder(folder, "kernel_tcgen05.cu", "sm100_model.h", entries, HARNESS)


@pytest.fixture(scope="session")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`changed(old, new)`: the same with some text replaced; of the kernels only that of 16 heads, which compiles faster."""
    entries, folder = ("heads_16", "combine"), tmp_path_factory.mktemp("model")
    build = builder(folder, "kernel_tcgen05.cu", "sm100_model.h", entries, HARNESS)
    only_16 = ("NUMINOUS_KERNEL(64)\nNUMINOUS_KERNEL(32)\n", "")
    return lambda old, new: build(352, only_16, (old, new))


# --- The source on the model ----------------------------------------------------------------------------------------

MODELLED = [
    case for case in OP.cases if 0 < case.requests * case.queries * case.heads * case.topk <= 20_000
]


@pytest.mark.parametrize("case", MODELLED, ids=case_id)
def test_source_on_the_model(compiled: Any, case: Case, request: pytest.FixtureRequest) -> None:
    """Rows, masks, softmax, splits, every address. Products run as late as they may; under --full as early as they may, too."""
    full = selection(request.config).full
    if case.width != 352 and not full:
        pytest.skip("not in the quick selection: --full compiles and runs rows of other widths")
    library, inputs = compiled(case.width), OP.make_inputs(case, 0, torch.device("cpu"))
    want = OP.reference(case, inputs)
    for eager in (1, 0) if full else (0,):
        library.be_eager(eager)
        OP.compare(case, run_model(library, case, inputs, "tcgen05"), want)


QUICK_FAULTS = ("P is overwritten while O is under way",)
FAULTS = {
    "descriptors of Hopper": ("| uint64_t(1) << 46", "", "bits 46"),
    "V is not transposed": ("uint32_t(mn_major_a) << 15", "0u", "out"),
    "half of the latent values": ("kOutRows = 128;", "kOutRows = 64;", "out|lanes|allocated"),
    "one N for all": ("uint32_t(n / 8) << 17", "uint32_t(8) << 17", "out|allocated|exponent|lse"),
    "wrong distance of panels": ("tcgen05_descriptor(base + S::kTiles, kTilePanelBytes, kGroupBytes)", "tcgen05_descriptor(base + S::kTiles, 16, kGroupBytes)", "out"),
    "rows of S where M 128 has them": ("scores = quarter_at(tensor + T::kScores + group * kMine, warp)", "scores = quarter_at(tensor + T::kScores + group * kMine, 0) + (uint32_t(16 * warp) << 16)", "does not reach"),
    "the address of tensor memory is taken for 0": ("uniform(*reinterpret_cast<const int*>(shared + S::kAddress))", "0", "not allocated|other tensor"),
    "S of two tiles in one place": ("load_fragment(s, scores + buffer * kHeads)", "load_fragment(s, scores)", "out|lse"),
    "O is added to what was there": ("kWeigh, turn > 1 || step > 0", "kWeigh, true", "out"),
    "O is not rescaled": ("o[head] *= by[head];", "o[head] *= 1.0f;", "out"),
    "a wait for loads is missing": ("          wait_for_loads(o);\n#pragma unroll\n            for (int head = 0; head < kAtOnce; ++head) o", "#pragma unroll\n            for (int head = 0; head < kAtOnce; ++head) o", "under way|out"),
    "a wait for stores is missing": ("        wait_for_stores();\n", "", "under way"),
    "P is overwritten while O is under way": ("      barrier_wait(barriers.empty + 8 * (buffer ^ 1), (turn - 1) >> 1 & 1);\n", "", "out"),
    "P is not awaited": ("      barrier_wait(barriers.weighed, (turn - 1) & 1);\n      fence_after_sync();\n      if", "      fence_after_sync();\n      if", "out|no proxy fence"),
    "a tile is given back too early": ("    barrier_wait(barriers.empty + 8 * buffer, (turn >> 1 & 1) ^ 1);\n", "", "out|no proxy fence|wait for one another"),
    "a tile is never given back": ("mma_commit(barriers.empty + 8 * buffer);", "", "wait for one another"),
    "stores are not shown to the tensor cores": ("    fence_for_mma();\n    fence_before_sync();", "    fence_before_sync();", "no proxy fence"),
    "no fence behind a wait": ("    barrier_wait(barriers.scored + 8 * buffer, turn >> 1 & 1);\n    fence_after_sync();", "    barrier_wait(barriers.scored + 8 * buffer, turn >> 1 & 1);", "after_thread_sync"),
    "no fence before an arrival": ("    fence_for_mma();\n    fence_before_sync();", "    fence_for_mma();", "before_thread_sync"),
    "tensor memory is kept": ("    tensor_memory_give_back(tensor, TensorPlan<kHeads>::kColumns);\n", "", "not given back"),
    "columns that nobody can have": ("kUsed <= 128 ? 128", "kUsed <= 128 ? 96", "cannot be allocated"),
    "invalid rows count": ("raw.valid ? 0.0f : -kInf", "0.0f", "out|lse"),
    "values in the order of positions": ("dim_of_position(R::kFourBit, part * kOutRows + thread)", "part * kOutRows + thread", "out"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_on_the_model(changed: Any, fault: str, request: pytest.FixtureRequest) -> None:
    """What the model has to see: descriptors, lanes and columns, products under way, fences, allocation."""
    if fault not in QUICK_FAULTS and not selection(request.config).full:
        pytest.skip("not in the quick selection: --full compiles and runs it")
    case = Case(1, 9, 330, pattern="edges", splits=1)
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    want = OP.reference(case, inputs)
    old, new, seen = FAULTS[fault]
    library = changed(old, new)
    with pytest.raises(AssertionError, match=seen):
        OP.compare(case, run_model(library, case, inputs, "tcgen05"), want)


def test_faults_are_the_faults(compiled: Any) -> None:
    """Without one, their case agrees."""
    case = Case(1, 9, 330, pattern="edges", splits=1)
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    OP.compare(case, run_model(compiled(352), case, inputs, "tcgen05"), OP.reference(case, inputs))


def test_debug_dump_on_the_model(
    changed: Any, monkeypatch: Any, capsys: Any, request: pytest.FixtureRequest
) -> None:
    """The debug script on a B200: K, S, P, out and lse of a tile agree."""
    if not selection(request.config).full:
        pytest.skip("not in the quick selection: --full compiles and runs it")
    path = Path(__file__).parents[1] / "benchmarks/debug_sparse_mla_decode.py"
    script = runpy.run_path(str(path))
    define = '#pragma once\n\n#include "layout.cuh"\n\nnamespace'
    library = changed(define, define.replace("#include", "#define NUMINOUS_DEBUG 1\n#include"))

    def launch(call: Any, dump: torch.Tensor) -> None:
        run_call(
            library,
            call,
            kernels.cuda_params(call, kernels.Split(call.tokens, 1), dump)[0],
            "tcgen05",
        )

    monkeypatch.setattr(kernels, "_launch_cuda", launch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert not script["check"](352, 16, 64, torch.device("cpu"), "tcgen05")
    printed = capsys.readouterr().out
    assert "heads_16" in printed
    assert printed.count("agrees") == 5, printed


# --- Addresses ------------------------------------------------------------------------------------------------------


def test_layout(compiled: Any) -> None:
    """Shared memory and threads as the launcher asks for them; tensor memory of the largest block."""
    library, row = compiled(352), kernels.row_format_of(352)
    for plan in (kernels.HEADS_16, kernels.HEADS_32, kernels.HEADS_64):
        assert plan.shared(row) == library.plan_bytes(plan.heads) <= 232448
        assert plan.threads == library.plan_threads()
    for heads in range(1, 129):
        assert kernels.schedule(heads, "tcgen05").heads >= min(heads, 64)


def test_descriptors(compiled: Any) -> None:
    """Bit for bit, from the tables of the PTX manual, written out."""
    library = compiled(352)
    library.operand_at.restype = ctypes.c_uint64
    #           31 … 24   23 … 17   16 15 14 … 10  9 … 0
    assert library.instruction(64, 16, 0) == 0b00000100_00000100_00000100_10010000
    assert library.instruction(64, 64, 0) == 0b00000100_00010000_00000100_10010000
    assert library.instruction(128, 32, 1) == 0b00001000_00001000_10000100_10010000
    got = library.operand_at(0x1A400, 8192, 1024)
    fields = [(0, 14), (14, 2), (16, 14), (30, 2), (32, 14), (46, 3), (49, 3), (52, 1), (53, 8), (61, 3)]  # fmt: skip
    values = [got >> at & ((1 << size) - 1) for at, size in fields]
    assert values == [0x1A400 // 16, 0, 8192 // 16, 0, 1024 // 16, 0b001, 0, 0, 0, 2]


# --- Who takes it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0)])
def test_only_on_request(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has run it: the default stays Triton there, on Hopper it is CUDA."""
    cuda = SimpleNamespace(type="cuda")
    q = SimpleNamespace(device=cuda, data_ptr=lambda: 0, stride=lambda *_: (8, 8, 8, 1))
    pool = SimpleNamespace(data_ptr=lambda: 0, stride=lambda *_: 352)
    call: Any = SimpleNamespace(q=q, pool=pool)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert "waits to be asked for" in kernels._not_cuda(call, None, None)
    assert kernels._not_cuda(call, "cuda", None) == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert kernels._not_cuda(call, None, None) == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert "10.0, 10.3, 12.0, this is 8.0" in kernels._not_cuda(call, "cuda", None)
