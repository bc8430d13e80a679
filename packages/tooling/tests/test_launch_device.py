# SPDX-License-Identifier: Apache-2.0
"""The launcher on a GPU: every kernel of compile_toys/launched.cu, compiled here with nvcc."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
import time
from ctypes import c_float, c_int32
from pathlib import Path
from typing import Any

import pytest

from numinous_tooling import launch
from numinous_tooling.compile import NotAvailable, aot, cuda
from numinous_tooling.workbench import Op, SourceBinary

torch = pytest.importorskip("torch")

SOURCE = Path(__file__).with_name("compile_toys") / "launched.cu"
MODULE = "numinous_launch_toys"
ENTRIES = ("scale", "scale_of", "reverse", "increment", "place")
ARCHS = ("sm90", "sm100", "sm103", "sm120")
pytestmark = pytest.mark.tier("device", archs=ARCHS)
TOYS = SourceBinary("toys", "csrc/launched.cu", ENTRIES, ARCHS)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Any:
    try:
        cuda.find_nvcc()
    except NotAvailable as reason:
        pytest.skip(str(reason))
    root = tmp_path_factory.mktemp("package")
    module = root / MODULE
    (module / "csrc").mkdir(parents=True)
    (module / "__init__.py").write_text("")
    shutil.copy(SOURCE, module / "csrc")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        yield module


def toy(entry: str) -> launch.Kernel:
    return launch.load(MODULE, TOYS, entry=entry)


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def numbers(count: int, seed: int = 0) -> Any:
    return torch.randn(count, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def scale(kernel: launch.Kernel, x: Any, y: Any, factor: float) -> None:
    kernel((7,), 256, (x, y, c_float(factor), c_int32(y.numel())), stream=stream())


def test_every_value_arrives(package: Path) -> None:
    kernel = toy("scale")
    assert kernel.parameters == (8, 8, 4, 4)
    x, y = numbers(100_003), torch.full((100_003,), float("nan"), device="cuda")
    scale(kernel, x, y, 0.37)
    assert torch.equal(y, x * torch.tensor(0.37, device="cuda"))
    scale(kernel, None, y, 3.0)
    assert torch.equal(y, torch.full_like(y, 3.0))


def test_a_struct_arrives(package: Path) -> None:
    class Pair(ctypes.Structure):
        _fields_ = (("factor", c_float), ("n", c_int32), ("offset", ctypes.c_double))

    kernel = toy("scale_of")
    assert kernel.parameters == (8, 8, 16)
    x, y = torch.arange(1000.0, device="cuda"), torch.zeros(1000, device="cuda")
    kernel((4,), 256, (x, y, Pair(2.0, 900, 5.0)), stream=stream())
    assert torch.equal(y[:900], 2 * x[:900] + 5)
    assert not y[900:].any()


def test_shared_memory_above_48_kib(package: Path) -> None:
    kernel = toy("reverse")
    # sm120 has 99 KiB, the others 227 KiB.
    for count in (1000, 12_000, 20_000, 25_000):
        x, y = numbers(count), torch.zeros(count, device="cuda")
        kernel((1,), 256, (x, y, c_int32(count)), shared=4 * count, stream=stream())
        assert torch.equal(y, x.flip(0))
    with pytest.raises(RuntimeError, match=r"reverse asks for 400000 bytes .*CUDA_ERROR_INVALID"):
        kernel((1,), 256, (x, y, c_int32(1)), shared=400_000, stream=stream())


def test_occupancy(package: Path) -> None:
    kernel = toy("reverse")
    assert kernel.blocks_per_processor(256) >= 4
    assert kernel.blocks_per_processor(256, 90_000) in (1, 2)


def test_clusters_at_once(package: Path) -> None:
    """A cluster lies in one GPC, and a block with as much shared memory as there is has a multiprocessor."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("clusters of Hopper")
    kernel = toy("reverse")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    counts = {n: kernel.clusters_at_once(n, 512, 232_000) for n in (1, 2, 4, 8, 16)}
    print(counts)
    assert counts[1] == processors
    assert all(n * count <= processors for n, count in counts.items())
    assert all(counts[n] >= 2 * counts[2 * n] for n in (1, 2, 4, 8))
    assert counts[8] >= 1


def test_grids_and_clusters(package: Path) -> None:
    kernel = toy("place")
    for grid, cluster in (((4, 3, 2), None), ((4, 3, 2), (2,)), ((4, 4), (2, 4, 1))):
        gx, gy, gz = (*grid, 1, 1)[:3]
        cx, cy, _ = (*(cluster or ()), 1, 1, 1)[:3]
        y = torch.full((gx * gy * gz, 4), -1, dtype=torch.int32, device="cuda")
        kernel(grid, 32, (y,), stream=stream(), cluster=cluster)
        want = [
            [a, b, c, a % cx + cx * (b % cy)]
            for c in range(gz)
            for b in range(gy)
            for a in range(gx)
        ]
        assert y.tolist() == want, cluster


@pytest.mark.parametrize("captured", [False, True])
def test_programmatic_launches_keep_their_order(package: Path, captured: bool) -> None:
    kernel = toy("increment")
    x = torch.zeros(1 << 20, device="cuda")

    def chain() -> None:
        for _ in range(50):
            kernel((4096,), 256, (x, c_int32(x.numel())), stream=stream(), pdl=True)

    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        graph.replay()
    else:
        chain()
    assert torch.equal(x, torch.full_like(x, 50.0))


def test_a_graph_replays_with_changed_inputs(package: Path) -> None:
    kernel = toy("scale")
    x, y = numbers(5000), torch.zeros(5000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale(kernel, x, y, 2.0)
    assert not y.any()
    for seed in (1, 2):
        x.copy_(numbers(5000, seed))
        graph.replay()
        assert torch.equal(y, 2 * x)


def test_a_binary_may_be_loaded_inside_a_capture(package: Path) -> None:
    x, y, z = (
        numbers(20_000),
        torch.zeros(20_000, device="cuda"),
        torch.zeros(20_000, device="cuda"),
    )
    later = SourceBinary("later", "csrc/launched.cu", ENTRIES, ARCHS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale(launch.load(MODULE, later, entry="scale"), x, y, 2.0)
        # Asks for more shared memory than a kernel has from the start.
        kernel = launch.load(MODULE, later, entry="reverse")
        kernel((1,), 256, (y, z, c_int32(20_000)), shared=80_000, stream=stream())
    graph.replay()
    assert torch.equal(y, 2 * x)
    assert torch.equal(z, y.flip(0))


def test_a_thread_without_a_context(package: Path) -> None:
    kernel = toy("scale")
    x, y = numbers(5000), torch.zeros(5000, device="cuda")
    torch.cuda.synchronize()
    raised: list[BaseException] = []

    def work() -> None:
        try:
            # A plain stream number: nothing of torch is called in this thread.
            kernel((7,), 256, (x, y, c_float(2.0), c_int32(5000)), stream=0)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not raised, raised
    torch.cuda.synchronize()
    assert torch.equal(y, 2 * x)


def test_a_refused_launch_has_a_name_and_breaks_nothing(package: Path) -> None:
    kernel = toy("scale")
    x, y = numbers(5000), torch.zeros(5000, device="cuda")
    args = (x, y, c_float(2.0), c_int32(5000))
    with pytest.raises(
        RuntimeError, match=r"^scale, grid \(0,\), block 256, .* CUDA_ERROR_INVALID"
    ):
        kernel((0,), 256, args, stream=stream())
    with pytest.raises(RuntimeError, match=r"block 2048, .* CUDA_ERROR_INVALID"):
        kernel((1,), 2048, args, stream=stream())
    scale(kernel, x, y, 2.0)
    assert torch.equal(y, 2 * x)


def test_shipped_machine_code_needs_neither_sources_nor_nvcc(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = Op("toys", "launch-toys", (), None, None, None, None, {}, binaries=(TOYS,))  # type: ignore[arg-type]
    aot.build("launch-toys", [op])
    source = package / "csrc" / "launched.cu"
    text = source.read_text()
    monkeypatch.setattr(launch, "_state", launch._State())

    def none() -> None:
        raise NotAvailable("no nvcc in this test")

    monkeypatch.setattr(cuda, "find_nvcc", none)
    source.unlink()
    try:
        x, y = numbers(5000), torch.zeros(5000, device="cuda")
        scale(toy("scale"), x, y, 2.0)
        assert torch.equal(y, 2 * x)
        source.write_text(text + "// changed\n")
        monkeypatch.setattr(launch, "_state", launch._State())
        with pytest.raises(RuntimeError, match="from other sources, and no nvcc in this test"):
            toy("scale")
    finally:
        source.write_text(text)
        shutil.rmtree(package / "binaries")


FORK = f"""
import os, sys, torch
sys.path.insert(0, sys.argv[1])
from ctypes import c_float, c_int32
from numinous_tooling import launch
from numinous_tooling.workbench import SourceBinary
toys = SourceBinary("toys", "csrc/launched.cu", {ENTRIES!r}, {ARCHS!r})
x = torch.zeros(8, device="cuda")
kernel = launch.load({MODULE!r}, toys, entry="scale")
args = (x, x, c_float(2.0), c_int32(8))
kernel((1,), 32, args, stream=0)
torch.cuda.synchronize()
if os.fork() == 0:
    for use in (
        lambda: kernel((1,), 32, args, stream=0),
        lambda: launch.load({MODULE!r}, toys, entry="scale"),
    ):
        try:
            use()
        except RuntimeError as error:
            print("child:", error, flush=True)
    os._exit(0)
os.wait()
kernel((1,), 32, args, stream=0)
torch.cuda.synchronize()
print("parent goes on")
"""


def test_a_forked_child_is_refused_and_the_parent_goes_on(package: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, str(package.parent)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "parent goes on"
    assert [line.startswith("child: ") for line in lines[:-1]] == [True, True], done.stdout
    assert all("initialised before this process was forked" in line for line in lines[:-1])


def test_the_launch_costs_microseconds(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = toy("scale")
    x, y = numbers(8), torch.zeros(8, device="cuda")
    args, at = (x, y, c_float(2.0), c_int32(8)), stream()
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            kernel((1,), 32, args, stream=at)
        best = min(best, (time.perf_counter() - start) / 200)
    with capsys.disabled():
        print(f"\nlaunch: {best * 1e6:.2f} µs per call on the host")
    # Triton's own launcher takes about ten; a synchronisation in the path would take more.
    assert best < 20e-6
