# SPDX-License-Identifier: Apache-2.0
"""The CUDA schedules of rmsnorm_quant on the CPU: kernel.cu compiled by the host's compiler, started by the real launcher.

What that shows and what it does not is said in ``emulated/rmsnorm_quant.cpp``. The kernels run in a process of their own, because
one that breaks a rule of the emulation ends its process.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import shutil
import subprocess
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from numinous_moe_gemm.kernels import rmsnorm_quant as kernels
from numinous_moe_gemm.workbench import rmsnorm_quant as workbench
from numinous_moe_gemm.workbench.rmsnorm_quant import EPS, OP, Case
from numinous_tooling.scale_layouts import with_padding
from numinous_tooling.workbench import case_id

SOURCE = Path(__file__).parent / "emulated" / "rmsnorm_quant.cpp"
FOLDER = Path(kernels.__file__).parents[1] / "csrc" / "rmsnorm_quant"
FLAGS = ("-std=c++20", "-O1", "-ffp-contract=off", "-Wno-unknown-pragmas", "-fPIC", "-shared", "-pthread")  # fmt: skip
LIBRARIES = {"usual": (), "hopper": ("-DNUMINOUS_HOPPER=1",)}

AT_ONCE, LATE, NOT_AWAITED = range(3)  # `Copies`

pytestmark = pytest.mark.tier("ref")


def build(to: Path, sources: Path = FOLDER) -> dict[str, Path]:
    """The kernels in `sources` as libraries of the host, built side by side."""
    compiler = shutil.which("g++") or pytest.skip("there is no g++")
    paths = {name: to / f"{name}.so" for name in LIBRARIES}
    made = [
        subprocess.Popen([compiler, *FLAGS, *LIBRARIES[name], f"-I{sources}", SOURCE, "-o", path])
        for name, path in paths.items()
    ]
    assert [process.wait() for process in made] == [0] * len(made)
    return paths


class _Kernel:
    """Stands in for `launch.Kernel`."""

    def __init__(self, libraries: dict[str, Path], name: str, seed: int, copies: int) -> None:
        hopper = name.startswith(("ring", "split"))
        self.library = ctypes.CDLL(str(libraries["hopper" if hopper else "usual"]))
        self.entry = ctypes.cast(getattr(self.library, name), ctypes.c_void_p)
        self.seed, self.copies = seed, copies

    def blocks_per_processor(self, threads: int, shared: int) -> int:
        return 2

    def __call__(self, grid: Any, threads: int, args: Any, *, shared: int, cluster: Any = None, **_: Any) -> None:  # fmt: skip
        width = cluster[0] if cluster else 1
        assert grid[0] % width == 0
        self.library.emulate(self.entry, ctypes.byref(args[0]), grid[0], threads, shared, width, self.seed, self.copies)  # fmt: skip


def answers(
    libraries: dict[str, Path],
    case: Case,
    schedule: kernels.Schedule,
    processors: int,
    seed: int,
    copies: int,
    y_is_x: bool = False,
) -> dict[str, torch.Tensor]:
    """Every output of a schedule on a GPU of so few multiprocessors, scales with their padding."""
    properties = types.SimpleNamespace(
        multi_processor_count=processors, shared_memory_per_block_optin=232448
    )
    fakes = {
        "device": lambda device: contextlib.nullcontext(),
        "current_stream": lambda: types.SimpleNamespace(cuda_stream=0),
        "get_device_properties": lambda device: properties,
    }
    with contextlib.ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake))
        load: Callable[..., Any] = lambda name, variant: _Kernel(
            libraries, name + variant, seed, copies
        )
        stack.enter_context(mock.patch.object(kernels, "_load", load))
        inputs = OP.make_inputs(case, 7, "cpu")
        x, residual = inputs["x"], inputs["residual"]
        y = x if y_is_x else torch.empty_like(x) if case.bf16 else None
        call = kernels._checked(
            x, residual, inputs["weight"], EPS, case.scales, case.gemma, inputs["static_scale"], y, "triton"
        )  # fmt: skip
        call.q.view(torch.uint8).fill_(0x7F)
        scale = call.scale if case.scales in ("row", "tensor") else with_padding(call.scale)
        if scale is not None:
            scale.view(torch.int32).fill_(0x7F7F7F7F)
        kernels._launch_cuda(call, schedule)
    out = {"q": call.q.view(torch.uint8)}
    if call.scale is not None:
        out["scale"] = call.scale
        assert scale is not None
        out["padded"] = scale.contiguous().view(torch.int32)
    if y is not None:
        out["y"] = y
    if residual is not None:
        out["residual"] = residual
    return out


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(scope="module")
def own_process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


def _same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in got:
        if got[name].dtype == torch.bfloat16:
            assert torch.equal(workbench._ordered(got[name]), workbench._ordered(want[name])), name
        else:
            kind = {1: torch.uint8, 4: torch.int32}[got[name].element_size()]
            assert torch.equal(got[name].view(kind), want[name].view(kind)), name


# The last three on one multiprocessor: rows enough for places of a ring to be used again, with residual in both phases.
CASES = [
    (Case(1, 4096), 4),
    (Case(3, 7168, residual=True, bf16=True), 132),
    (Case(5, 7168, scales="ue8m0", gemma=True), 10),
    (Case(9, 4096, residual=True, scales="ue8m0", bf16=True, values="edges"), 40),
    (Case(9, 4096, bf16=True, values="edges"), 5),
    (Case(2, 7168, scales="tensor", bf16=True, values="edges"), 3),
    (Case(2, 4096, residual=True, scales="row"), 132),
    (Case(17, 7168), 1),
    (Case(29, 4096), 1),
    (Case(15, 7168, residual=True), 1),
]
FEW = 9  # rows: with more the emulation of a block for each row takes seconds


def _schedules(case: Case) -> list[kernels.Schedule]:
    few = case.rows <= FEW
    return [
        schedule for schedule in kernels.SCHEDULES if few or schedule not in ("single", "split")
    ]


@pytest.mark.parametrize(
    ("case", "processors"), CASES, ids=[f"{case_id(case)}-{count}" for case, count in CASES]
)
def test_bits_of_every_schedule(
    case: Case, processors: int, libraries: dict[str, Path], own_process: ProcessPoolExecutor
) -> None:
    """All schedules give the bits of "stream", whatever the order of threads and copies; and "stream" is near the reference."""

    def run(schedule: kernels.Schedule, seed: int, copies: int) -> dict[str, torch.Tensor]:
        return own_process.submit(
            answers, libraries, case, schedule, processors, seed, copies
        ).result()

    want = run("stream", 0, AT_ONCE)
    reference = OP.reference(case, OP.make_inputs(case, 7, "cpu"))
    OP.compare(case, {k: v for k, v in want.items() if k != "padded"}, reference)
    if "padded" in want:
        assert not want["padded"][case.rows :].any()
    for schedule in _schedules(case):
        _same(run(schedule, 1, LATE), want)
        if schedule.startswith("ring"):
            _same(run(schedule, 2, AT_ONCE), want)


@pytest.mark.parametrize("schedule", ["split", "ring"])
def test_y_may_be_x(
    schedule: kernels.Schedule, libraries: dict[str, Path], own_process: ProcessPoolExecutor
) -> None:
    """Blocks that share a row read all of it before one of them writes."""
    case = Case(3, 4096, bf16=True)
    want, got = (
        own_process.submit(answers, libraries, case, schedule, 12, 3, AT_ONCE, y_is_x).result()
        for y_is_x in (False, True)
    )
    _same(got, want)


def test_a_fault_is_seen(libraries: dict[str, Path], own_process: ProcessPoolExecutor) -> None:
    """Rows that nobody waits for give other bits."""
    right, wrong = (
        own_process.submit(answers, libraries, Case(2, 4096), "ring", 1, 4, copies).result()
        for copies in (LATE, NOT_AWAITED)
    )
    with pytest.raises(AssertionError, match="q"):
        _same(wrong, right)
