# SPDX-License-Identifier: Apache-2.0
"""The launcher against a driver that writes down what it was asked, built with the real cuda.h."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import subprocess
import sys
import threading
from ctypes import c_float, c_int32, c_int64
from pathlib import Path

import pytest

from numinous_tooling import launch
from numinous_tooling.compile import CompileError, NotAvailable, cuda, sources
from numinous_tooling.workbench import SourceBinary

FAKE = Path(__file__).with_name("fake_libcuda.c")
SOURCE = 'extern "C" __global__ void scale(const float*, float*, float, int4) {}\n'


def build_fake(folder: Path) -> Path:
    try:
        nvcc = cuda.find_nvcc()
    except NotAvailable as reason:
        pytest.skip(f"{reason}: no cuda.h to build a driver with")
    library = folder / "libcuda.so.1"
    command = [nvcc, "-shared", "-Xcompiler", "-fPIC,-w", "-cudart", "none", "-o", library, FAKE]
    subprocess.run(command, check=True)
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake(tmp_path_factory.mktemp("driver"))


class Driver:
    """The fake, as the test sees it."""

    def __init__(self, library: Path) -> None:
        self._lib = ctypes.CDLL(str(library))
        self._lib.fake_text.restype = ctypes.c_char_p
        self.reset()

    def reset(self, major: int = 9, minor: int = 0, fail: int = 0, quiet: bool = False) -> None:
        self._lib.fake_reset(major, minor, fail, quiet)
        # Each thread and test starts without a context.
        self._lib.cuCtxSetCurrent(None)

    @property
    def lines(self) -> list[str]:
        return self._lib.fake_text().decode().splitlines()


@pytest.fixture
def driver(library: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(launch, "LIBCUDA", str(library))
    monkeypatch.setattr(launch, "_state", launch._State())
    return Driver(library)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with a source and binaries for sm90 and, of the family, sm100."""
    module = tmp_path / "numinous_toy"
    source = module / "csrc" / "toy" / "kernel.cu"
    source.parent.mkdir(parents=True)
    (module / "__init__.py").write_text("")
    source.write_text(SOURCE)
    for arch, target in (("sm90", "sm_90a"), ("sm100", "sm_100f"), ("sm120", "sm_120a")):
        ship(module, arch, target)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return module


def ship(module: Path, arch: str, target: str) -> None:
    folder = module / "binaries" / arch
    folder.mkdir(parents=True)
    code = f"{target}-code".encode()
    (folder / "toy.cubin").write_bytes(code)
    row = {
        "file": "toy.cubin",
        "target": target,
        "source": "csrc/toy/kernel.cu",
        "defines": {},
        "digest": sources.digest(module, "csrc/toy/kernel.cu", {}),
        "sha256": hashlib.sha256(code).hexdigest(),
        "entries": ["scale"],
        "compiler": "none",
        "resources": {},
    }
    (folder / "manifest.json").write_text(json.dumps({"toy": row}))


class Tensor:
    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


ARGS = (Tensor(0x7F0000001000), None, c_float(1.0), (c_int32 * 4)(1, 2, 3, -4))


def test_a_launch_reaches_the_driver_with_every_value(driver: Driver, package: Path) -> None:
    kernel = launch.load("numinous_toy", "toy", entry="scale")
    assert kernel.parameters == (8, 8, 4, 16)
    kernel((5, 6), 128, ARGS, stream=0xABC)
    assert driver.lines == [
        "cuInit 0",
        "retain 0",
        "load sm_90a-code relaxed=1",
        "function relaxed=1",
        "launch 5,6,1 128,1,1 shared 0 stream 0xabc 00007f0000001000 0000000000000000 3f800000 "
        "fffffffc000000030000000200000001",
    ]


def test_attributes_are_of_one_launch_only(driver: Driver, package: Path) -> None:
    kernel = launch.load("numinous_toy", "toy", entry="scale")
    kernel((2,), 32, ARGS, stream=0, pdl=True, cluster=(2,))
    kernel((2,), 32, ARGS, stream=0, cluster=(1, 2, 1))
    kernel((2,), 32, ARGS, stream=0, pdl=True)
    kernel((2,), 32, ARGS, stream=0)
    said = [line.partition("(nil)")[2].split(" 00007f")[0] for line in driver.lines[-4:]]
    assert said == [" pdl 1 cluster 2,1,1", " cluster 1,2,1", " pdl 1", ""]


def test_a_frame_that_held_a_value_takes_a_tensor_again(driver: Driver, package: Path) -> None:
    kernel = launch.load("numinous_toy", "toy", entry="scale")
    kernel((1,), 32, (c_int64(-1), *ARGS[1:]), stream=0)
    kernel((1,), 32, (Tensor(0x1234), *ARGS[1:]), stream=0)
    first, second = (line.split("(nil) ")[1].split()[0] for line in driver.lines[-2:])
    assert (first, second) == ("f" * 16, "0000000000001234")


def test_shared_memory_above_48_kib_is_asked_for_once(driver: Driver, package: Path) -> None:
    kernel = launch.load("numinous_toy", "toy", entry="scale")
    # The kernel has 1024 bytes of static shared memory.
    for shared in (47 * 1024, 100_000, 100_000, 90_000, 200_000):
        kernel((1,), 32, ARGS, stream=0, shared=shared)
    asked = [line for line in driver.lines if line.startswith("attribute")]
    assert asked == ["attribute 8=100000 device 0", "attribute 8=200000 device 0"]
    with pytest.raises(RuntimeError, match=r"scale asks for 232000 bytes .* CUDA_ERROR_INVALID"):
        kernel((1,), 32, ARGS, stream=0, shared=232_000)


def test_occupancy_is_asked_for_once(driver: Driver, package: Path) -> None:
    kernel = launch.load("numinous_toy", "toy", entry="scale")
    asked = [kernel.blocks_per_processor(*use) for use in ((128,), (128,), (256, 100_000))]
    assert asked == [16, 16, 8]
    assert driver.lines[-3:] == [
        "occupancy 128 0",
        "attribute 8=100000 device 0",
        "occupancy 256 100000",
    ]


def test_clusters_are_counted_once(driver: Driver, package: Path) -> None:
    """More than 8 blocks are allowed first, for a count as for a launch; a cluster that no GPU has counts as none."""
    kernel = launch.load("numinous_toy", "toy", entry="scale")
    uses = ((2, 128), (2, 128), (16, 256, 100_000), (32, 256))
    assert [kernel.clusters_at_once(*use) for use in uses] == [66, 66, 8, 0]
    assert driver.lines[-5:] == [
        "clusters of 2, 2 128 shared 0",
        "attribute 8=100000 device 0",
        "attribute 14=1 device 0",
        "clusters of 16, 16 256 shared 100000",
        "clusters of 32, 32 256 shared 0",
    ]
    other = launch.Kernel(kernel._driver, 0x22, "scale")
    for cluster in ((8,), (2, 4), (4, 4), (16,)):
        other((16, 16), 32, ARGS, stream=0, cluster=cluster)
    said = [line.split()[0] for line in driver.lines[-5:]]
    assert said == ["launch", "launch", "attribute", "launch", "launch"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (ARGS[:3], "takes 4 arguments, got 3"),
        ((*ARGS, None), "takes 4 arguments, got 5"),
        ((5, *ARGS[1:]), "argument 0 of scale has 8 bytes, got int"),
        ((c_int32(5), *ARGS[1:]), "argument 0 of scale has 8 bytes, got 4 bytes"),
        ((*ARGS[:2], Tensor(8), ARGS[3]), "argument 2 of scale has 4 bytes, got a pointer"),
        ((*ARGS[:2], None, ARGS[3]), "argument 2 of scale has 4 bytes, got a pointer"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_the_launch(
    driver: Driver, package: Path, args: tuple[object, ...], message: str
) -> None:
    kernel = launch.load("numinous_toy", "toy", entry="scale")
    with pytest.raises(TypeError, match=message):
        kernel((1,), 32, args, stream=0)
    assert not any(line.startswith("launch") for line in driver.lines)


def test_errors_have_the_name_of_the_driver(driver: Driver, package: Path) -> None:
    kernel = launch.load("numinous_toy", "toy", entry="scale")
    driver.reset(fail=1)
    with pytest.raises(
        RuntimeError,
        match=r"scale, grid \(0,\), block 64, shared 0, stream 0x0: CUDA_ERROR_INVALID_VALUE \(as",
    ):
        kernel((0,), 64, ARGS, stream=0)
    driver.reset(fail=719)
    with pytest.raises(RuntimeError, match="CUresult 719"):
        kernel((1,), 64, ARGS, stream=0)
    driver.reset()
    with pytest.raises(RuntimeError, match="no kernel missing in its binary: CUDA_ERROR_NOT_FOUND"):
        launch.load("numinous_toy", "toy", entry="missing")


def test_a_thread_without_a_context_gets_one(driver: Driver, package: Path) -> None:
    kernel = launch.load("numinous_toy", "toy", entry="scale")
    threads = [
        threading.Thread(
            target=lambda value=value: [
                kernel((1,), 32, (c_int64(value), *ARGS[1:]), stream=0) for _ in range(50)
            ]
        )
        for value in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert driver.lines.count("retain 0") == 5


def test_threads_do_not_mix_their_arguments(driver: Driver, package: Path) -> None:
    """Each of 400 launches is found once, though the fake lets the others run while it writes."""
    kernel = launch.load("numinous_toy", "toy", entry="scale")

    def work(start: int) -> None:
        for value in range(start, start + 100):
            kernel((1,), 32, (c_int64(value), *ARGS[1:]), stream=0)

    threads = [threading.Thread(target=work, args=(100 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [line for line in driver.lines if line.startswith("launch")]
    assert sorted(int(line.split("(nil) ")[1].split()[0], 16) for line in lines) == [*range(400)]


def test_a_binary_is_loaded_once(
    driver: Driver, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = launch.load("numinous_toy", "toy", entry="scale")
    declared = SourceBinary("toy", "csrc/toy/kernel.cu", ["scale"])
    assert launch.load("numinous_toy", declared, entry="scale") is first
    assert launch.load("numinous_toy", declared).name == "scale"
    assert sum(line.startswith("load") for line in driver.lines) == 1
    several = SourceBinary("toy", "csrc/toy/kernel.cu", ["scale", "other"])
    monkeypatch.setattr(launch, "_state", launch._State())
    with pytest.raises(TypeError, match="say which entry to load: scale, other"):
        launch.load("numinous_toy", several)
    with pytest.raises(TypeError, match="say which entry of toy to load"):
        launch.load("numinous_toy", "toy")


@pytest.mark.parametrize(
    ("capability", "target"),
    [((9, 0), "sm_90a"), ((10, 0), "sm_100f"), ((10, 3), "sm_100f"), ((12, 0), "sm_120a")],
)
def test_the_device_chooses_the_binary(
    driver: Driver, package: Path, capability: tuple[int, int], target: str
) -> None:
    driver.reset(*capability)
    launch.load("numinous_toy", "toy", entry="scale")
    assert f"load {target}-code relaxed=1" in driver.lines


def test_the_binary_of_one_chip_does_not_serve_its_family() -> None:
    assert launch.runs_on("sm_100f", (10, 3))
    assert not launch.runs_on("sm_100a", (10, 3))
    assert not launch.runs_on("sm_90a", (10, 0))
    assert launch.runs_on("sm_120a", (12, 0))
    assert not launch.runs_on("sm_103f", (10, 0))


def test_damaged_machine_code_is_not_loaded(driver: Driver, package: Path) -> None:
    cubin = package / "binaries" / "sm90" / "toy.cubin"
    cubin.write_bytes(b"sm_90a-cod")
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"toy.cubin is damaged; install numinous_toy again$"
        ):
            launch.load("numinous_toy", "toy", entry="scale")
        cubin.unlink(missing_ok=True)


def test_without_machine_code_one_line_lists_what_there_is(driver: Driver, package: Path) -> None:
    driver.reset(8, 9)
    with pytest.raises(
        RuntimeError,
        match=r"numinous_toy: no machine code of toy for this GPU: it ships none for sm_89; it ships sm100, sm120, sm90$",
    ):
        launch.load("numinous_toy", "toy", entry="scale")


def test_sources_decide_whether_the_shipped_binary_is_used(
    driver: Driver, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = package / "csrc" / "toy" / "kernel.cu"
    source.write_text(SOURCE + "// changed\n")

    def compiled(module: Path, binary: SourceBinary, arch: str) -> tuple[str, Path]:
        (module / "toy.cubin").write_bytes(f"compiled for {arch}".encode())
        return "sm_90a", module

    monkeypatch.setattr(cuda, "compile_arch", compiled)
    launch.load("numinous_toy", "toy", entry="scale")
    assert "load compiled for sm90 relaxed=1" in driver.lines

    monkeypatch.setattr(launch, "_state", launch._State())
    source.unlink()
    driver.reset()
    launch.load("numinous_toy", "toy", entry="scale")
    assert "load sm_90a-code relaxed=1" in driver.lines


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (NotAvailable("there is no nvcc"), "made from other sources, and there is no nvcc; it sh"),
        (CompileError("toy for sm_90a: error: x"), "^numinous_toy: toy for sm_90a: error: x$"),
        (
            OSError(30, "Read-only file system", "/x"),
            r"^numinous_toy: \[Errno 30\] Read-only file system: '/x'$",
        ),
    ],
)
def test_a_compilation_that_fails_is_one_line(
    driver: Driver,
    package: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    message: str,
) -> None:
    (package / "csrc" / "toy" / "kernel.cu").write_text(SOURCE + "// changed\n")

    def fails(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(cuda, "compile_arch", fails)
    with pytest.raises(RuntimeError, match=message):
        launch.load("numinous_toy", "toy", entry="scale")


def test_without_a_driver_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LIBCUDA", "libcuda-absent.so.1")
    monkeypatch.setattr(launch, "_state", launch._State())
    with pytest.raises(RuntimeError, match="CUDA kernels need NVIDIA's driver on this machine"):
        launch.load("numinous_toy", "toy", entry="scale")


FORK = """
import os, sys
from numinous_tooling import launch
launch.LIBCUDA = sys.argv[1]
sys.path.insert(0, sys.argv[2])
kernel = launch.load("numinous_toy", "toy", entry="scale")
child = os.fork()
if child == 0:
    kernel._driver._lib.fake_reset(9, 0, 3, 1)  # what the real driver answers in a forked child
    args = (None, None, launch.ctypes.c_float(0), (launch.c_int * 4)())
    for use in (
        lambda: kernel((1,), 32, args, stream=0),
        lambda: launch.load("numinous_toy", "toy", entry="scale"),
    ):
        try:
            use()
        except RuntimeError as error:
            print(error, flush=True)
    os._exit(0 if launch._state.driver is None else 1)
assert os.waitpid(child, 0)[1] == 0 and launch._state.driver is not None
"""


def test_a_forked_child_is_told_to_spawn(library: Path, package: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, str(library), str(package.parent)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    launched, loaded = done.stdout.splitlines()
    assert "CUDA_ERROR_NOT_INITIALIZED" in launched
    assert launched.endswith(loaded)
    assert loaded == "CUDA was initialised before this process was forked; start it by spawn"
