# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA decode: all tiers of the op; the CUDA source on a model of its block; its addresses; what is refused."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from numinous_kv_cache_4bit.kernels import sparse_mla_decode as kernels
from numinous_kv_cache_4bit.kernels.sparse_mla_decode import choose_splits, sparse_mla_decode
from numinous_kv_cache_4bit.workbench import sparse_mla_decode as workbench
from numinous_kv_cache_4bit.workbench.sparse_mla_decode import OP, SM_SCALE, Case
from numinous_tooling.testing.kernels import KernelTests
from numinous_tooling.workbench import Tensors, case_id

SOURCE = Path(kernels.__file__).parents[1] / "csrc/sparse_mla_decode"
MODEL = Path(__file__).with_name("sm90_model.h")
HARNESS = """
#include <string>
#include "kernel.cu"
static numinous::Params params;
static void (*kernel)(const numinous::Params);
static void once() { kernel(params); }
extern "C" const char* run_model(const char* entry, const numinous::Params* p, unsigned x, unsigned y, unsigned threads,
                                 unsigned shared) {
  const std::string name = entry;
  kernel = name == "wide" ? wide : name == "narrow_32" ? narrow_32 : name == "narrow_16" ? narrow_16 : combine;
  params = *p;
  for (unsigned j = 0; j < y; ++j)
    for (unsigned i = 0; i < x; ++i) {
      model::block_index = {i, j, 0};
      if (const char* fault = model::run_block(once, threads, shared)) return fault;
    }
  return nullptr;
}
"""


class TestSparseMlaDecode(KernelTests):
    op = OP


# --- The CUDA source on a model of its block ------------------------------------------------------------------------


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`compiled(width, *changes)`: run_model of kernel.cu, some of its text replaced."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile kernel.cu with")
    folder = tmp_path_factory.mktemp("model")

    @functools.cache
    def build(width: int, *changes: tuple[str, str]) -> Any:
        here = folder / f"{width}-{len(list(folder.iterdir()))}"
        shutil.copytree(SOURCE, here)
        for old, new in changes:
            found = [path for path in here.iterdir() if old in path.read_text()]
            assert len(found) == 1, f"{old!r} is in {len(found)} files"
            found[0].write_text(found[0].read_text().replace(old, new))
        (here / "harness.cpp").write_text(HARNESS)
        library = here / "model.so"
        command = [compiler, "-O1", "-std=c++17", "-shared", "-fPIC", "-w", f"-DNUMINOUS_WIDTH={width}"]
        command += [f'-DNUMINOUS_MODEL="{MODEL}"', "-o", str(library), str(here / "harness.cpp")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:2000]
        run = ctypes.CDLL(str(library)).run_model
        run.restype = ctypes.c_char_p
        return run

    return build


def run_model(run: Any, case: Case, inputs: Tensors) -> Tensors:
    """What `_launch_cuda` does, on the model. Outputs and parts start as NaN."""
    table = [inputs.get(name) for name in ("index", "page_table", "lengths")]
    call = kernels._checked(
        inputs["q"], inputs["pool"], SM_SCALE, *table, inputs["sink"], case.scale, case.splits or 1
    )
    assert call.splits
    plan = kernels.schedule(call.heads)
    groups = -(-call.heads // plan.heads)
    parts = kernels._parts(call, call.splits) if call.splits > 1 else (None, None)
    for tensor in (call.out, call.lse, *parts):
        if tensor is not None:
            tensor.fill_(torch.nan)
    params = kernels.cuda_params(call, call.splits, parts)
    launches = [(plan.entry, call.tokens * call.splits, groups, plan.threads, plan.shared(call.row))]
    if call.splits > 1:
        launches.append(("combine", call.tokens * call.heads, 1, 128, 0))
    for entry, x, y, threads, shared in launches:
        fault = run(entry.encode(), ctypes.byref(params), x, y, threads, shared)
        assert fault is None, f"{entry}: {fault.decode()}"
    return {"out": call.out, "lse": call.lse}


MODELLED = [case for case in OP.cases if case.requests and not workbench._not_run("interpret", case)]


@pytest.mark.parametrize("case", MODELLED, ids=case_id)
def test_source_on_the_model(compiled: Any, case: Case) -> None:
    """All but what only hardware decides: proxies, the registers' handover, the meaning of instructions."""
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    got = run_model(compiled(case.width), case, inputs)
    OP.compare(case, got, OP.reference(case, inputs))
