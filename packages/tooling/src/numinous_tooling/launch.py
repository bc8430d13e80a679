# SPDX-License-Identifier: Apache-2.0
"""Load machine code and launch its kernels through the CUDA driver: no torch header, no torch version, no compiler.

    kernel = launch.load("numinous_moe_gemm", "rmsnorm_quant", entry="add_rmsnorm_quant")
    kernel((rows,), 256, (x, weight, None, c_int32(rows)), stream=stream, pdl=True)

The first `load` has to come before a latency counts: it reads a file, and in a checkout it may compile. Later ones cost
a microsecond. A launch neither synchronises nor allocates on the device, so CUDA graphs capture it; loading is put in
the relaxed capture mode, because the driver refuses it in a thread that captures otherwise.

Needs a driver of CUDA 12.4 or newer for its calls, and for machine code one as new as the compiler: nvcc 13.0 made what our wheels ship,
which goes with drivers from 580 on (*reported*). HIP code objects are built by `numinous_tooling.compile` and not launched here.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import math
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, addressof, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p, sizeof
from pathlib import Path
from typing import Any

from numinous_tooling.compile import CompileError, NotAvailable, shipped, sources
from numinous_tooling.workbench import SourceBinary

LIBCUDA = "libcuda.so.1"

_INVALID_VALUE, _INVALID_CONTEXT, _INVALID_CLUSTER = 1, 201, 912
_SHARED_SIZE, _MAX_DYNAMIC_SHARED, _ANY_CLUSTER = 1, 8, 14  # CUfunction_attribute
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute
_CAPTURE_RELAXED = 2
_CLUSTER, _PDL = 4, 6  # CUlaunchAttributeID; 0 is an entry that the driver ignores
_SHARED_WITHOUT_OPT_IN = 48 * 1024
_CLUSTER_WITHOUT_OPT_IN = 8
_FORKED = "CUDA was initialised before this process was forked; start it by spawn"
_VALUES = (ctypes._SimpleCData, ctypes.Structure, ctypes.Array)


class _Attribute(ctypes.Structure):
    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((f"{what}_{axis}", c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("attribute_count", c_uint),
    )


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxGetDevice": (POINTER(c_int),),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuLibraryLoadData": (POINTER(c_void_p), c_char_p, *[c_void_p] * 2, c_uint, *[c_void_p] * 2, c_uint),
    "cuLibraryGetKernel": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuKernelGetFunction": (POINTER(c_void_p), c_void_p),
    "cuFuncLoad": (c_void_p,),
    "cuKernelGetParamInfo": (c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t)),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (POINTER(c_int), c_void_p, c_int, c_size_t),
    "cuOccupancyMaxActiveClusters": (POINTER(c_int), c_void_p, c_void_p),
    "cuKernelGetAttribute": (POINTER(c_int), c_int, c_void_p, c_int),
    "cuKernelSetAttribute": (c_int, c_int, c_void_p, c_int),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}  # fmt: skip


class _Driver:
    """libcuda of this process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        try:
            self._lib = ctypes.CDLL(LIBCUDA)
        except OSError as error:
            raise RuntimeError(
                f"{error}; CUDA kernels need NVIDIA's driver on this machine"
            ) from None
        try:
            for name, signature in _SIGNATURES.items():
                getattr(self._lib, name).argtypes = signature
            self.launch = self._lib.cuLaunchKernelEx
        except AttributeError as error:
            raise RuntimeError(f"{error}; launching needs a driver of CUDA 12.4 or newer") from None
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any, doing: str = "") -> None:
        """Call a function; raises RuntimeError unless it answers CUDA_SUCCESS."""
        code = self.code(name, *arguments)
        if code != 0:
            raise RuntimeError(f"{doing or name}: {self.error(code)}")

    def code(self, name: str, *arguments: Any) -> int:
        """Call a function for its CUresult."""
        return int(getattr(self._lib, name)(*arguments))

    def error(self, code: int) -> str:
        """Name and text of a CUresult."""
        words = []
        for function in (self._lib.cuGetErrorName, self._lib.cuGetErrorString):
            text = c_char_p()
            function(code, byref(text))
            words.append(text.value.decode() if text.value else f"CUresult {code}")
        line = f"{words[0]} ({words[1]})"
        if os.getpid() != self.pid:
            line += f"; {_FORKED}"
        return line

    def number(self, name: str, *arguments: Any) -> int:
        """The int that a query writes to its first argument."""
        value = c_int()
        self.call(name, byref(value), *arguments)
        return value.value

    def handle(self, name: str, *arguments: Any, doing: str = "") -> int:
        """The handle that a call writes to its first argument."""
        value = c_void_p()
        self.call(name, byref(value), *arguments, doing=doing)
        return value.value or 0

    def parameters(self, kernel: int) -> tuple[int, ...]:
        """Sizes in bytes of a kernel's parameters."""
        sizes: list[int] = []
        offset, size = c_size_t(), c_size_t()
        while True:
            code = self._lib.cuKernelGetParamInfo(kernel, len(sizes), byref(offset), byref(size))
            if code == _INVALID_VALUE:
                return tuple(sizes)
            if code != 0:
                raise RuntimeError(f"cuKernelGetParamInfo: {self.error(code)}")
            sizes.append(size.value)

    def device(self) -> int:
        """The current device; a thread without a context gets that of torch's current device, else of device 0."""
        device = c_int()
        code = self._lib.cuCtxGetDevice(byref(device))
        if code == _INVALID_CONTEXT:
            self.bind()
            return self.number("cuCtxGetDevice")
        if code != 0:
            raise RuntimeError(f"cuCtxGetDevice: {self.error(code)}")
        return device.value

    def bind(self) -> None:
        """Give the calling thread the primary context that torch works in."""
        torch = sys.modules.get("torch")
        index = torch.cuda.current_device() if torch and torch.cuda.is_initialized() else 0
        # Kept for the life of the process, as the CUDA runtime keeps its own.
        self.call("cuCtxSetCurrent", self.handle("cuDevicePrimaryCtxRetain", index))

    def capability(self) -> tuple[int, int]:
        """Compute capability of the current device."""
        device = self.device()
        major = self.number("cuDeviceGetAttribute", _CAPABILITY_MAJOR, device)
        return major, self.number("cuDeviceGetAttribute", _CAPABILITY_MINOR, device)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Let the calling thread load code while it captures a graph."""
        mode = c_int(_CAPTURE_RELAXED)
        self.call("cuThreadExchangeStreamCaptureMode", byref(mode))
        try:
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", byref(mode))


class _Frame:
    """Arguments of one launch in the form that the driver takes; used by one thread at a time."""

    __slots__ = ("attributes", "config", "pointers", "reference", "shape", "slots", "values")

    def __init__(self, parameters: int) -> None:
        self.values = (ctypes.c_uint64 * parameters)()
        first = addressof(self.values)
        self.slots = tuple(first + 8 * index for index in range(parameters))
        self.pointers = (c_void_p * parameters)(*self.slots)
        self.attributes = (_Attribute * 2)()
        self.attributes[0].value[0] = 1
        self.config = _Config(attributes=addressof(self.attributes))
        self.reference = byref(self.config)
        self.shape: tuple[Any, ...] = ()

    def configure(
        self,
        grid: Sequence[int],
        block: int,
        shared: int,
        stream: int,
        pdl: bool,
        cluster: Sequence[int] | None,
    ) -> None:
        """Write all but the arguments."""
        config = self.config
        config.grid_x, config.grid_y, config.grid_z = (*grid, 1, 1)[:3]
        config.block_x, config.block_y, config.block_z = block, 1, 1
        config.shared, config.stream = shared, stream
        config.attribute_count = 2 if pdl or cluster else 0
        self.attributes[0].id = _PDL if pdl else 0
        self.attributes[1].id = _CLUSTER if cluster else 0
        self.attributes[1].value[:3] = (*(cluster or ()), 1, 1, 1)[:3]


class Kernel:
    """One ``extern "C"`` kernel in device code; `load` makes it.

    Attributes:
        name: of the entry.
        parameters: sizes in bytes of what it takes.
    """

    def __init__(self, driver: _Driver, library: int, name: str) -> None:
        self.name = name
        self._driver = driver
        with driver.loading():
            doing = f"no kernel {name} in its binary"
            handle = driver.handle("cuLibraryGetKernel", library, name.encode(), doing=doing)
            # Lazy loading would load at the first launch, which may be inside a capture.
            driver.call("cuFuncLoad", driver.handle("cuKernelGetFunction", handle))
        self._handle = c_void_p(handle)
        self._blocks: dict[tuple[int, int, int], int] = {}
        self._clusters: dict[tuple[int, int, int, int], int] = {}
        self.parameters = driver.parameters(handle)
        static = driver.number("cuKernelGetAttribute", _SHARED_SIZE, handle, driver.device())
        self._shared_free = _SHARED_WITHOUT_OPT_IN - static
        self._shared_allowed: dict[int, int] = {}
        self._any_cluster: set[int] = set()  # devices
        self._frames: list[_Frame] = []
        self._lock = threading.Lock()

    def __call__(
        self,
        grid: Sequence[int],
        block: int,
        args: Sequence[Any],
        *,
        shared: int = 0,
        stream: int,
        pdl: bool = False,
        cluster: Sequence[int] | None = None,
    ) -> None:
        """Launch; returns once the launch is queued.

        Args:
            grid: blocks along x, y, z; left-out axes are 1.
            block: threads of a block.
            args: in the kernel's order: a tensor (its address), None (null pointer), or a ctypes value of the
                parameter's size. Python numbers are refused, because they have no size.
            shared: bytes of dynamic shared memory, also above 48 KiB.
            stream: handle, for example ``torch.cuda.current_stream().cuda_stream``.
            pdl: programmatic stream serialisation: may start before the kernel ahead of it has ended, and has to wait
                with ``griddepcontrol.wait`` before it touches memory.
            cluster: blocks of a cluster along x, y, z; None where the kernel fixes it or has none. More than 8 in all where
                `clusters_at_once` is not 0.

        Raises:
            TypeError: the arguments do not fit the kernel.
            RuntimeError: the driver refuses; one line with the name of its error.
        """
        if len(args) != len(self.parameters):
            raise TypeError(f"{self.name} takes {len(self.parameters)} arguments, got {len(args)}")
        if shared > self._shared_free:
            self._allow_shared(shared)
        if cluster:
            self._allow_cluster(math.prod(cluster))
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = _Frame(len(self.parameters))
        values, pointers, slots = frame.values, frame.pointers, frame.slots
        for index, size in enumerate(self.parameters):
            arg = args[index]
            # isinstance would ask a tensor for its __class__, which costs as much as the launch.
            if issubclass(type(arg), _VALUES):
                pointers[index] = addressof(arg)
                if sizeof(arg) != size:
                    raise TypeError(self._misfit(index, f"{sizeof(arg)} bytes"))
                continue
            try:
                values[index] = 0 if arg is None else arg.data_ptr()
            except AttributeError:
                raise TypeError(self._misfit(index, type(arg).__name__)) from None
            pointers[index] = slots[index]
            if size != 8:
                raise TypeError(self._misfit(index, "a pointer"))
        # Most launches differ from the one before in nothing but their arguments.
        shape = (grid, block, shared, stream, pdl, cluster)
        if frame.shape != shape:
            frame.configure(*shape)
            # Of tuples: a list could change under the comparison.
            frame.shape = (tuple(grid), block, shared, stream, pdl, cluster and tuple(cluster))
        code = self._driver.launch(frame.reference, self._handle, pointers, None)
        if code == _INVALID_CONTEXT:
            self._driver.bind()
            code = self._driver.launch(frame.reference, self._handle, pointers, None)
        if code != 0:
            raise RuntimeError(
                f"{self.name}, grid {tuple(grid)}, block {block}, shared {shared}, stream {stream:#x}: "
                + self._driver.error(code)
            )
        self._frames.append(frame)

    def blocks_per_processor(self, block: int, shared: int = 0) -> int:
        """Blocks of `block` threads with `shared` bytes of dynamic memory that one multiprocessor runs at once."""
        key = (self._driver.device(), block, shared)
        if key not in self._blocks:
            if shared > self._shared_free:
                self._allow_shared(shared)
            function = self._driver.handle("cuKernelGetFunction", self._handle)
            name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
            self._blocks[key] = self._driver.number(name, function, block, shared)
        return self._blocks[key]

    def clusters_at_once(self, cluster: int, block: int, shared: int = 0) -> int:
        """Clusters of `cluster` blocks along x that the device runs at once, each within a group of its multiprocessors (GPC); 0 where
        none fits. `block` and `shared` as in `blocks_per_processor`."""
        key = (self._driver.device(), cluster, block, shared)
        if key not in self._clusters:
            if shared > self._shared_free:
                self._allow_shared(shared)
            self._allow_cluster(cluster)
            frame = _Frame(0)
            frame.configure((cluster,), block, shared, 0, False, (cluster,))
            # The cluster alone: no document says that the query ignores what a launch ignores.
            frame.config.attributes = addressof(frame.attributes) + sizeof(_Attribute)
            frame.config.attribute_count = 1
            function = self._driver.handle("cuKernelGetFunction", self._handle)
            name, count = "cuOccupancyMaxActiveClusters", c_int()
            code = self._driver.code(name, byref(count), function, frame.reference)
            if code not in (0, _INVALID_CLUSTER):
                raise RuntimeError(f"{name}: {self._driver.error(code)}")
            self._clusters[key] = count.value if code == 0 else 0
        return self._clusters[key]

    def _misfit(self, index: int, got: str) -> str:
        return (
            f"argument {index} of {self.name} has {self.parameters[index]} bytes, got {got}; "
            "give a tensor, None or a ctypes value"
        )

    def _allow_cluster(self, blocks: int) -> None:
        if blocks <= _CLUSTER_WITHOUT_OPT_IN:
            return
        device = self._driver.device()
        if device not in self._any_cluster:
            doing = f"{self.name} asks for clusters of {blocks} blocks on device {device}"
            self._driver.call(
                "cuKernelSetAttribute", _ANY_CLUSTER, 1, self._handle, device, doing=doing
            )
            self._any_cluster.add(device)

    def _allow_shared(self, shared: int) -> None:
        device = self._driver.device()
        if shared <= self._shared_allowed.get(device, 0):
            return
        with self._lock:
            if shared > self._shared_allowed.get(device, 0):
                doing = f"{self.name} asks for {shared} bytes of shared memory on device {device}"
                self._driver.call(
                    "cuKernelSetAttribute",
                    _MAX_DYNAMIC_SHARED,
                    shared,
                    self._handle,
                    device,
                    doing=doing,
                )
                self._shared_allowed[device] = shared


class _State:
    """What this process has loaded; `forked` where its parent had loaded something too."""

    def __init__(self, forked: bool = False) -> None:
        self.forked = forked
        self.lock = threading.RLock()
        self.driver: _Driver | None = None
        self.libraries: dict[tuple[object, ...], int] = {}
        self.kernels: dict[tuple[object, ...], Kernel] = {}


_state = _State()


def _forget() -> None:
    global _state
    _state = _State(forked=_state.forked or _state.driver is not None)


# A child has no use for the handles of its parent, and the lock may be held by a thread that it does not have.
os.register_at_fork(after_in_child=_forget)


def load(package: str, binary: str | SourceBinary, *, entry: str | None = None) -> Kernel:
    """The kernel `entry` of a binary, for the current device; the same object every time.

    The machine code is the shipped one where the sources beside it are those it was made from or are absent;
    otherwise it is compiled with nvcc into the cache.

    Args:
        package: import name, for example ``numinous_moe_gemm``.
        binary: its declaration; a name alone stands for ``SourceBinary(name, "csrc/<name>/kernel.cu", [entry])``.
        entry: may be left out where the declaration names one.

    Raises:
        RuntimeError: no machine code for this GPU, or the driver refuses it; one line.
    """
    name = binary if isinstance(binary, str) else binary.name
    driver = _state.driver
    if driver:
        kernel = _state.kernels.get((driver.device(), package, name, entry))
        if kernel:
            return kernel
    with _state.lock:
        return _load(package, binary, entry)


def _load(package: str, binary: str | SourceBinary, entry: str | None) -> Kernel:
    if isinstance(binary, str):
        if entry is None:
            raise TypeError(f"say which entry of {binary} to load")
        binary = SourceBinary(binary, f"{sources.CSRC}/{binary}/kernel.cu", [entry])
    if entry is None and len(binary.entries) != 1:
        raise TypeError(f"say which entry to load: {', '.join(binary.entries)}")
    if _state.forked:
        raise RuntimeError(_FORKED)
    driver = _state.driver = _state.driver or _Driver()
    capability = driver.capability()
    library = (package, binary.name, capability)
    if library not in _state.libraries:
        code = _machine_code(package, binary, capability)
        with driver.loading():
            doing = f"{package}: {binary.name} does not load"
            arguments = (code, None, None, 0, None, None, 0)
            handle = driver.handle("cuLibraryLoadData", *arguments, doing=doing)
        _state.libraries[library] = handle
    kernel = Kernel(driver, _state.libraries[library], entry or binary.entries[0])
    return _state.kernels.setdefault((driver.device(), package, binary.name, entry), kernel)


def architectures(capability: tuple[int, int]) -> tuple[str, ...]:
    """Our names for a compute capability, the most specific first; empty where we compile nothing for it."""
    return {
        (9, 0): ("sm90",),
        (10, 0): ("sm100",),
        (10, 3): ("sm103", "sm100"),
        (12, 0): ("sm120",),
    }.get(capability, ())


def runs_on(target: str, capability: tuple[int, int]) -> bool:
    """Whether a cubin of an nvcc target such as ``sm_90a`` or ``sm_100f`` runs on a compute capability."""
    number, kind = target.removeprefix("sm_"), ""
    if number[-1] in "af":
        number, kind = number[:-1], number[-1]
    major, minor = int(number[:-1]), int(number[-1])
    if kind == "a":
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor


def _machine_code(package: str, binary: SourceBinary, capability: tuple[int, int]) -> bytes:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"{package} is not installed")
    module = Path(spec.submodule_search_locations[0])
    source = module / binary.source
    digest = sources.digest(module, binary.source, binary.defines) if source.is_file() else None
    gpu = f"sm_{capability[0]}{capability[1]}"
    names = architectures(capability)
    reason = f"it ships none for {gpu}"
    for arch in names:
        row = shipped.manifest(module, arch).get(binary.name)
        if row is None or not runs_on(row.target, capability):
            continue
        if digest in (None, row.digest):
            path = module / shipped.FOLDER / arch / row.file
            code = path.read_bytes() if path.is_file() else b""
            if hashlib.sha256(code).hexdigest() != row.sha256:
                raise RuntimeError(f"{path} is damaged; install {package} again")
            return code
        reason = f"what it ships for {arch} was made from other sources"
    if digest is not None and names:
        from numinous_tooling.compile import cuda

        try:
            _, folder = cuda.compile_arch(module, binary, names[0])
            return (folder / f"{binary.name}.cubin").read_bytes()
        except NotAvailable as error:
            reason += f", and {error}"
        except (CompileError, OSError) as error:  # of files: no room for what nvcc makes
            raise RuntimeError(f"{package}: {error}") from None
    shipping = sorted(
        path.parent.name
        for path in (module / shipped.FOLDER).glob(f"*/{shipped.MANIFEST}")
        if binary.name in shipped.manifest(module, path.parent.name)
    )
    raise RuntimeError(
        f"{package}: no machine code of {binary.name} for this GPU: {reason}; "
        f"it ships {', '.join(shipping) or 'nothing'}"
    )
