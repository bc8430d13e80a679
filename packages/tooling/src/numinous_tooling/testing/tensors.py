# SPDX-License-Identifier: Apache-2.0
"""What tests do with tensors: poison, guard, compare bit by bit or within a bound, repeat, capture and replay.

Needs torch. Nothing here synchronises inside a captured region.
"""

from __future__ import annotations

import mmap
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = [
    "assert_bitwise_equal",
    "assert_deterministic",
    "assert_outputs_bitwise",
    "assert_within",
    "big_pool",
    "capture_and_replay",
    "coordinate",
    "error_bound",
    "guarded_pool",
    "poison_",
    "poisoned_allocations",
]

PACKAGES = "numinous_"
"""Import names of the project's packages start so."""

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Every bit set is NaN in each floating type but these; an index of -1 could be meant, one of 0x7f7f7f7f hardly.
_POISON = {
    torch.bool: 0x01,
    torch.float8_e4m3fnuz: 0x80,
    torch.float8_e5m2fnuz: 0x80,
    torch.float4_e2m1fn_x2: 0x7F,
}
_ALLOCATORS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)
_empty = torch.empty
_MAP_NORESERVE = 0x4000  # Linux; the mmap module names it from Python 3.13 on


# --- Poison and guards ------------------------------------------------------------------------------------------------


def poison_byte(dtype: torch.dtype) -> int:
    """The byte that fills unwritten memory: NaN in a floating type that has one, else 0x7f (bool: True)."""
    return _POISON.get(dtype, 0xFF if dtype.is_floating_point or dtype.is_complex else 0x7F)


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill the whole storage of a tensor, gaps between its rows included, with `poison_byte`; returns the tensor."""
    if tensor.device.type != "meta":
        _bytes_of(tensor).fill_(poison_byte(tensor.dtype))
    return tensor


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return _empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@contextmanager
def poisoned_allocations(*packages: str) -> Iterator[None]:
    """Poison what numinous packages, and those named, get from `torch.empty` and its relatives in the block.

    An element that a kernel does not write is then NaN (0x7f in bytes) instead of what happened to lie there. Callers
    elsewhere, torch among them, get the stock functions. A function imported by name (``from torch import empty``)
    escapes.

    Args:
        packages: further top-level import names.
    """

    def poisoned(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = stock(*args, **kwargs)
            top = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
            return poison_(tensor) if top.startswith(PACKAGES) or top in packages else tensor

        return allocate

    before = [(owner, name, vars(owner).get(name)) for owner, name in _ALLOCATORS]
    for owner, name in _ALLOCATORS:
        setattr(owner, name, poisoned(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, own in before:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


@contextmanager
def guarded_pool(initial: torch.Tensor, *, guard_rows: int = 1) -> Iterator[torch.Tensor]:
    """A contiguous copy of a pool between two guards; a write outside the pool fails when the block ends.

    The guards hold `poison_byte`, so that a read outside the pool shows as NaN in a floating format. The copy starts
    on a multiple of 256 bytes.

    Args:
        initial: ``[rows, …]``, content of the pool.
        guard_rows: rows before and after it, rounded up to whole 256 bytes.

    Raises:
        AssertionError: a guard was written; names the side, and the distance in bytes of the nearest written byte.
    """
    size = initial.numel() * initial.element_size()
    row = size // max(1, len(initial))
    guard = -(-max(1, guard_rows * row) // 256) * 256
    poison = poison_byte(initial.dtype)
    memory = torch.full((guard + size + guard,), poison, dtype=torch.uint8, device=initial.device)
    pool = memory[guard : guard + size].view(initial.dtype).view(initial.shape)
    pool.copy_(initial)
    yield pool
    written = (memory != poison).nonzero().flatten()
    before, after = written[written < guard], written[written >= guard + size]
    if len(before):
        raise AssertionError(
            f"guard before the pool: {len(before)} bytes written, nearest {guard - int(before[-1])} bytes before row 0"
        )
    if len(after):
        distance = int(after[0]) - guard - size
        raise AssertionError(
            f"guard after the pool: {len(after)} bytes written, nearest {distance} bytes past its end (row = {row} bytes)"
        )


def big_pool(
    row_shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    elements: int = 2**31,
) -> torch.Tensor:
    """A pool whose last row starts beyond element 2^31, for tests of 64-bit addressing.

    On the CPU it is reserved address space that reads as zero and costs memory only where it is touched. On a GPU it
    is allocated (2.1 GB in a one-byte type) and not initialised.

    Returns:
        ``[rows, *row_shape]`` with ``(rows - 1) × row > elements``.
    """
    row = int(torch.Size(row_shape).numel())
    shape = (elements // row + 2, *row_shape)
    if torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, shape[0] * row * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


# --- Comparison -------------------------------------------------------------------------------------------------------


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.detach().contiguous().view(_INTEGER[tensor.element_size()])


def _shown(tensor: torch.Tensor, where: tuple[int, ...]) -> str:
    width = 2 * tensor.element_size()
    bits = int(_bits(tensor)[where]) & ((1 << 4 * width) - 1)
    value = tensor[where]
    if tensor.dtype != torch.float4_e2m1fn_x2:
        return f"{value.item()!r} (0x{bits:0{width}x})"
    return f"0x{bits:0{width}x}"


def _is_nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().isnan() if tensor.element_size() == 1 else tensor.isnan()


def assert_bitwise_equal(name: str, got: Any, want: Any, *, any_nan: bool = False) -> None:
    """Compare two tensors bit by bit, or two other values with ``==``; -0 is not +0.

    Args:
        name: of the value, for the message.
        any_nan: a NaN equals every other NaN (conversions differ in its sign and payload).

    Raises:
        AssertionError: names the first differing coordinate, both values with their bits, and how many differ; or the
            differing dtype or shape.
    """
    if not isinstance(got, torch.Tensor) or not isinstance(want, torch.Tensor):
        if type(got) is not type(want) or got != want:
            raise AssertionError(f"{name}: got {got!r}, want {want!r}")
        return
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        raise AssertionError(
            f"{name}: got {got.dtype} {tuple(got.shape)}, want {want.dtype} {tuple(want.shape)}"
        )
    differs = differing_elements(got, want, any_nan=any_nan)
    if not bool(differs.any()):
        return
    count = int(differs.sum())
    where = coordinate(int(differs.flatten().to(torch.uint8).argmax()), differs.shape)
    if got.is_complex():
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    raise AssertionError(
        f"{name}: {count} of {differs.numel()} elements differ, first at {where}: "
        f"got {_shown(got, where)}, want {_shown(want, where)}"
    )


def differing_elements(
    got: torch.Tensor, want: torch.Tensor, *, any_nan: bool = False
) -> torch.Tensor:
    """Where two tensors of one dtype and shape differ in their bits, as bool on the device of `got`."""
    want = want.to(got.device)
    differs = _bits(got) != _bits(want)
    if any_nan and got.dtype.is_floating_point and got.dtype != torch.float4_e2m1fn_x2:
        differs &= ~(_is_nan(got) & _is_nan(want))
    return differs


def coordinate(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Indices of the element at a row-major position."""
    where: list[int] = []
    for size in reversed(shape):
        flat, index = divmod(flat, size)
        where.append(index)
    return tuple(where[::-1])


def assert_outputs_bitwise(
    got: Mapping[str, Any], want: Mapping[str, Any], *, any_nan: bool = False
) -> None:
    """`assert_bitwise_equal` on each of the named outputs, which must be the same names."""
    if got.keys() != want.keys():
        raise AssertionError(f"outputs are {sorted(got)}, want {sorted(want)}")
    for name in want:
        assert_bitwise_equal(name, got[name], want[name], any_nan=any_nan)


def error_bound(
    low_precision: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """How far a result may be from `exact`: 2 × (error of a low-precision reference + rounding band).

    The band is half a unit in the last place of `dtype` at each element. The factor 2 leaves room for another order of
    summation; a kernel that stays below it is as good as the low-precision reference.

    Args:
        low_precision: a plain implementation in the arithmetic of the kernel, any floating dtype.
        exact: the same in fp64, finite.
        dtype: in which the kernel stores the result.

    Returns:
        fp64, shape of `exact`: the largest allowed absolute error of each element.
    """
    if exact.dtype != torch.float64 or not bool(exact.isfinite().all()):
        raise ValueError("the exact result must be finite fp64")
    error = (low_precision.double() - exact).abs()
    if bool(error.isnan().any()):
        raise ValueError("the low-precision reference holds NaN: it bounds nothing")
    info = torch.finfo(dtype)
    band = exact.abs() * (info.eps / 2) + info.smallest_normal * info.eps / 2
    worst = error.max() if error.numel() else error.new_zeros(())
    return 2 * (worst + band)


def assert_within(
    name: str,
    got: torch.Tensor,
    exact: torch.Tensor,
    bound: torch.Tensor | float,
    *,
    any_nan: bool = False,
) -> None:
    """Compare in fp64: ``|got - exact| ≤ bound``, element by element; equal infinities pass, another shape never does.

    Args:
        any_nan: whether NaN passes where `exact` is NaN; without it no NaN does.

    Raises:
        AssertionError: names the first and the worst element, its error and its bound, and how many are out of bounds.
    """
    if got.shape != exact.shape:
        raise AssertionError(f"{name}: got shape {tuple(got.shape)}, want {tuple(exact.shape)}")
    error = (got.double() - exact.double()).abs()
    limits = torch.as_tensor(bound, dtype=torch.float64, device=error.device).expand(error.shape)
    inside = (error <= limits) | (got.isinf() & (got.double() == exact.double()))
    if any_nan:
        inside |= got.isnan() & exact.isnan()
    outside = ~inside
    if not bool(outside.any()):
        return
    excess = torch.where(outside, error / limits, 0.0).nan_to_num(nan=float("inf"))
    first = coordinate(int(outside.flatten().int().argmax()), outside.shape)
    where = coordinate(int(excess.flatten().argmax()), excess.shape)
    raise AssertionError(
        f"{name}: {int(outside.sum())} of {outside.numel()} elements out of bounds, first at {first}, worst at {where}: "
        f"got {got[where].item()!r}, want {exact[where].item()!r}, "
        f"error {error[where].item():.3g} > {limits[where].item():.3g}"
    )


# --- Repetition -------------------------------------------------------------------------------------------------------


def assert_deterministic(run: Callable[[], Mapping[str, Any]], *, runs: int = 2) -> dict[str, Any]:
    """Run several times and compare every output with the first run's, bit by bit.

    Args:
        run: gives named outputs; makes fresh inputs each time, and outputs that the next call leaves alone.

    Returns:
        The outputs of the first run.
    """
    first = dict(run())
    for again in range(1, runs):
        try:
            assert_outputs_bitwise(run(), first)
        except AssertionError as difference:
            raise AssertionError(f"run {again + 1} differs from run 1: {difference}") from None
    return first


def _copy_into(target: Mapping[str, Any], source: Mapping[str, Any]) -> None:
    for name, value in target.items():
        other = source[name]
        if not isinstance(value, torch.Tensor):
            if value != other:
                raise AssertionError(
                    f"input {name} is {value!r} in the captured call and {other!r} in the changed one: "
                    "what is no tensor is frozen in the graph"
                )
        elif (value.shape, value.dtype) != (other.shape, other.dtype):
            raise AssertionError(
                f"input {name} is {tuple(value.shape)} in the captured call and {tuple(other.shape)} in the changed "
                "one: shapes must not depend on the seed"
            )
        else:
            value.copy_(other)


def capture_and_replay(
    run: Callable[[dict[str, Any]], Mapping[str, Any]],
    captured: Mapping[str, Any],
    changed: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Capture one call in a CUDA graph, then replay it on other inputs copied into the captured ones.

    Args:
        run: the call; runs twice before the capture, to compile and to load.
        captured: named inputs of the captured call; overwritten.
        changed: named inputs of each replay, with the shapes of the captured.

    Returns:
        A copy of the outputs of each replay.

    Raises:
        AssertionError: the inputs of a replay do not fit.
        RuntimeError: the call cannot be captured, for example because it synchronises.
    """
    inputs = dict(captured)
    original = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run(inputs)
            _copy_into(inputs, original)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        # A call of no rows launches nothing, which is right.
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        with torch.cuda.graph(graph):
            outputs = run(inputs)
    results = []
    for replacement in changed:
        _copy_into(inputs, replacement)
        graph.replay()
        torch.cuda.synchronize()
        results.append(
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in outputs.items()}
        )
    return results
