# SPDX-License-Identifier: Apache-2.0
"""The CUDA sources of `sparse_mla_decode` on a model of a block of threads: compiled by a C++ compiler, launched as `_launch_cuda` does."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from numinous_kv_cache_4bit.kernels import sparse_mla_decode as kernels
from numinous_kv_cache_4bit.workbench.sparse_mla_decode import OP, SM_SCALE, Case
from numinous_tooling.workbench import Tensors

SOURCES = Path(kernels.__file__).parents[1] / "csrc/sparse_mla_decode"
RUNNER = """
#include <string>
#include "{source}"
static numinous::Params params;
static void (*kernel)(const numinous::Params);
static void once() {{ kernel(params); }}
extern "C" const char* run_model(const char* entry, const numinous::Params* p, unsigned blocks, unsigned threads, unsigned shared, unsigned cluster) {{
  static const struct {{ std::string name; void (*run)(const numinous::Params); }} entries[] = {{ {entries} }};
  kernel = nullptr;
  for (const auto& one : entries) if (one.name == entry) kernel = one.run;
  if (kernel == nullptr) return "no such kernel";
  params = *p;
  if (blocks % cluster != 0) return "a part of a cluster";
  for (unsigned i = 0; i < blocks; i += cluster) {{
    model::block_index = {{i, 0, 0}};
    if (const char* fault = model::run_block(once, threads, shared, cluster)) return fault;
  }}
  return nullptr;
}}
using namespace numinous;
using R = Row<NUMINOUS_WIDTH>;
"""


def builder(
    folder: Path, source: str, model: str, entries: Sequence[str], harness: str
) -> Callable[..., Any]:
    """`build(width, *changes)`: a library of a source with `run_model` and what `harness` has, some of its text replaced.

    Args:
        folder: to work in, empty.
        source: its file, alone among the folder's .cu files.
        model: header of the model, in this folder.
        entries: kernels.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip(f"no g++ to compile {source} with")
    table = ", ".join(f'{{"{name}", {name}}}' for name in entries)
    text = RUNNER.format(source=source, entries=table) + harness

    @functools.cache
    def build(width: int, *changes: tuple[str, str]) -> Any:
        here = folder / f"{width}-{len(list(folder.iterdir()))}"
        shutil.copytree(SOURCES, here)
        for other in here.glob("*.cu"):
            if other.name != source:
                other.unlink()
        for old, new in changes:
            found = [path for path in here.iterdir() if old in path.read_text()]
            assert len(found) == 1, f"{old!r} is in {len(found)} files"
            found[0].write_text(found[0].read_text().replace(old, new))
        (here / "harness.cpp").write_text(text)
        library = here / "model.so"
        command = [compiler, "-O1", "-std=c++17", "-shared", "-fPIC", "-w"]
        command += [
            f"-DNUMINOUS_WIDTH={width}",
            f'-DNUMINOUS_MODEL="{Path(__file__).with_name(model)}"',
        ]
        done = subprocess.run(
            [*command, "-o", str(library), str(here / "harness.cpp")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[:2000]
        made = ctypes.CDLL(str(library))
        made.run_model.restype = ctypes.c_char_p
        return made

    return build


def run_model(
    library: Any,
    case: Case,
    inputs: Tensors,
    products: kernels.Products = "wgmma",
    whole: int | None = None,
    cluster: int = 1,
) -> Tensors:
    """What `_launch_cuda` does, on the model, with that many lists whole, in clusters of that many. Outputs and parts start as NaN."""
    table = [inputs.get(name) for name in ("index", "page_table", "lengths")]
    call = kernels._checked(
        inputs["q"], inputs["pool"], SM_SCALE, *table, inputs["sink"], case.scale, case.splits or 1
    )
    assert call.splits
    if whole is None:
        whole = call.tokens if call.splits == 1 else 0
    params, parts = kernels.cuda_params(call, kernels.Split(whole, call.splits, cluster))
    for tensor in (call.out, call.lse, *parts):
        if tensor is not None:
            tensor.fill_(torch.nan)
    run_call(library, call, params, products)
    return {"out": call.out, "lse": call.lse}


def run_call(library: Any, call: Any, params: Any, products: kernels.Products = "wgmma") -> None:
    """The launches of a checked call."""
    plan = kernels.schedule(call.heads, products)
    for entry, *sizes in kernels.cuda_launches(call, params, plan):
        cluster = 1 << params.cluster_log2 if entry == plan.entry else 1
        fault = library.run_model(entry.encode(), ctypes.byref(params), *sizes, cluster)
        assert fault is None, f"{entry}: {fault.decode()}"


def check_no_rows(
    library: Any, heads: int, splits: int, products: kernels.Products, cluster: int = 1
) -> None:
    """A query that names nothing gives zeros and -inf though its q is NaN or infinite; the other one is as ever."""
    case = Case(2, heads, 130, splits=splits)
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    inputs["index"][1] = -1
    inputs["q"][1] = torch.nan
    inputs["q"][1, 0, 0] = torch.inf
    got = run_model(library, case, inputs, products, cluster=cluster)
    OP.compare(case, got, OP.reference(case, inputs))


def check_debug_script(
    build: Callable[..., Any],
    products: kernels.Products,
    fault: tuple[str, str],
    monkeypatch: Any,
    capsys: Any,
) -> None:
    """Every stage that the debug script prints agrees; with a fault in the decoding K is the first that does not."""
    path = Path(__file__).parents[1] / "benchmarks/debug_sparse_mla_decode.py"
    spec = importlib.util.spec_from_file_location("debug_sparse_mla_decode", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    define = (
        "#pragma once\n\n#include <cstdint>\n\n#ifdef",
        "#pragma once\n#define NUMINOUS_DEBUG 1\n#include <cstdint>\n#ifdef",
    )
    for faults in ((), (fault,)):
        library = build(352, define, *faults)

        def launch(call: Any, dump: torch.Tensor, library: Any = library) -> None:
            run_call(
                library,
                call,
                kernels.cuda_params(call, kernels.Split(call.tokens, 1), dump)[0],
                products,
            )

        monkeypatch.setattr(kernels, "_launch_cuda", launch)
        for heads in (64, 16):
            assert script.check(352, heads, 64, torch.device("cpu"), products) == bool(faults)
            printed = capsys.readouterr().out
            assert ("K [row, dimension]: agrees" in printed) != bool(faults), printed
            assert printed.count("agrees") == (0 if faults else 5), printed


# --- Clusters of Hopper's versions ----------------------------------------------------------------------------------

# Every width with every number of splits, of tiles full, short and none; a head alone, units of a head, a half and a quarter, two blocks.
CLUSTERED = [
    Case(1, 5, 400, splits=2, sink=True, pattern="edges"),
    Case(1, 1, 70, splits=4),
    Case(
        2, 16, 70, splits=8, sink=True, pattern="edges"
    ),  # more splits than tiles, a list that names nothing
    Case(1, 20, 200, splits=2, pattern="sparse"),
    Case(1, 32, 330, splits=4),
    Case(1, 33, 330, splits=2, sink=True, pattern="edges"),
    Case(1, 40, 600, splits=8, scale=4.0),
    Case(1, 64, 40, splits=2),  # one tile
    Case(1, 12, 97, splits=2, pattern="nan"),
    Case(2, 70, 140, splits=4, pattern="edges", ids="int64", layout="sliced"),
    Case(2, 16, 260, splits=2, queries=2, dense=True, sink=True),
    Case(1, 9, 500, splits=16, pattern="edges"),
    Case(1, 40, 200, splits=16, sink=True),
    *(
        Case(1, heads, 330, width, splits=splits, sink=True, pattern="edges")
        for width in (288, 656, 528)
        for heads in (7, 30, 64)
        for splits in (2, 4, 8)
    ),
    Case(3, 40, 200, 656, splits=4, queries=3, dense=True, layout="sliced"),
    Case(2, 128, 130, 528, splits=2, pattern="nan"),
]


PARTS = {
    Case(1, 5, 400, splits=6, sink=True, pattern="edges"): 2,
    Case(2, 40, 330, splits=8, sink=True, pattern="edges"): 4,  # more splits than tiles
    Case(1, 16, 700, splits=32): 8,
    Case(2, 70, 260, splits=6, queries=2, dense=True): 2,
    Case(1, 33, 97, splits=4, pattern="nan"): 2,
}

JOIN_FAULTS = {
    "nobody waits for the other blocks": ("  cluster_barrier();\n", "  named_barrier(1, kConsumers);\n"),
    "a block ends before all have read": ("  cluster_leave();\n", ""),
    "every block is read from the first": ("in_block(own, (rank + i + a) & (blocks - 1))", "in_block(own, 0)"),
    "weights of another block": ("turn * blocks + (rank + i + a & (blocks - 1))", "turn * blocks + i + a"),
    "weights of another head": ("__shfl_sync(~0u, weight, turn * blocks", "__shfl_sync(~0u, weight, 0 * blocks"),
    "blocks are not weighed": ("float weight = exp2_fast(top * p.scale_log2 - exponent_of(p, most))", "float weight = 1.0f"),
    "sums are not added": ("total += __shfl_xor_sync(~0u, total, lanes)", "total += 0.0f"),
    "the last head is left out": ("const bool live = head < heads;", "const bool live = head < heads - 1;"),
    "a cluster's end of a list": ("split_up(tiles * (split + 1))", "split_up(tiles * split + 1)"),
    "a block without rows leaves its cluster": ("if (w.blocks == 1 && no_part", "if (no_part"),
    "every block has a part of its own": ("* parts + (split >> log2)", "* parts + split % parts"),
    "halves of a head overlap": ("unit % kParts * kPieces * 128", "unit % kParts * 128"),
}  # fmt: skip


def case_of_fault(fault: str) -> Case:
    """In which a fault of a cluster shows."""
    cases = {
        "a block without rows leaves its cluster": Case(1, 40, 70, splits=4),
        "every block has a part of its own": Case(1, 5, 200, splits=4),
        "halves of a head overlap": Case(1, 9, 140, splits=4),
        "a part without rows keeps its maximum": Case(1, 40, 70, splits=4),
    }
    return cases.get(fault, Case(1, 40, 200, splits=2, sink=True))
