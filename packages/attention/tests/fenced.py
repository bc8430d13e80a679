# SPDX-License-Identifier: Apache-2.0
"""Run one provider of an op in the interpreter, every tensor between pages that nobody may touch: an access out of bounds ends this process with a signal.

``python fenced.py OP PROVIDER CASES``, CASES an expression of cases over `Case`. Prints each case before it is run, so that the last one names what was at fault.
``Far(case)`` puts its pools behind element 2^31 and its slot ids with them.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

from numinous_tooling.testing.interpreter import patch_language_once
from numinous_tooling.workbench import Tensors, case_id

PAGE = mmap.PAGESIZE
NORESERVE = 0x4000  # Linux; the mmap module names it from Python 3.13 on
LIBC = ctypes.CDLL(None, use_errno=True)
BEYOND = 5 << 30  # more than an int32 count of two-byte elements reaches, either way
_empty = torch.empty


def fenced(size: int, at_end: bool, fence: int = PAGE) -> torch.Tensor:
    """Bytes that read as zero until they are written and end right before a forbidden page, or begin right behind one."""
    room = -(-size // PAGE) * PAGE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    memory = mmap.mmap(-1, fence + room + fence, flags=flags)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for at in (start, start + fence + room):
        if LIBC.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(fence), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    if not size:
        return _empty(0, dtype=torch.uint8)
    offset = fence + (room - size if at_end else 0)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)


def moved(tensor: torch.Tensor, at_end: bool) -> torch.Tensor:
    """The tensor in a fenced storage that ends with its last element."""
    if not tensor.numel():
        return tensor
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((last + 1,), (1,)).view(torch.uint8)
    made = fenced(flat.numel(), at_end)
    made.copy_(flat)
    return made.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), 0)


@contextmanager
def fenced_scratch(at_end: bool) -> Iterator[None]:
    """`torch.empty` makes fenced tensors, of NaN."""

    def empty(*shape: Any, **options: Any) -> torch.Tensor:
        kind = options.get("dtype") or torch.get_default_dtype()
        size = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        return fenced(size.numel() * kind.itemsize, at_end).fill_(0xFF).view(kind).view(size)

    torch.empty = empty
    try:
        yield
    finally:
        torch.empty = _empty


@dataclass(frozen=True)
class Far:
    """A case whose pools reach behind element 2^31."""

    case: Any


def far(inputs: Tensors) -> None:
    """Move pools and ids, in place."""
    rows = {name: inputs[name] for name in ("k_pool", "v_pool")}
    move = max(2**31 // near[0].numel() + 1 for near in rows.values())
    for name, near in rows.items():
        size = (move + len(near)) * near[0].numel() * near.dtype.itemsize
        whole = fenced(size, False, BEYOND).view(near.dtype).view(-1, *near.shape[1:])
        whole[move:] = near
        inputs[name] = whole
    inputs["kv_indices"] = inputs["kv_indices"] + move


def main(name: str, provider: str, cases: str) -> None:
    """See the module."""
    patch_language_once()
    bench = importlib.import_module(f"numinous_attention.workbench.{name}")
    implementation = {**bench.OP.implementations, **bench.OP.peers}[provider]
    for case in eval(cases, {"Case": bench.Case, "Far": Far, "bench": bench}):
        is_far, case = isinstance(case, Far), getattr(case, "case", case)
        for at_end in (True, False):
            inputs = bench.OP.make_inputs(case, 0, torch.device("cpu"))
            want = bench.OP.reference(case, inputs)
            print(provider, case_id(case), "far" if is_far else "", flush=True)
            if is_far:
                far(inputs)
            inputs = {
                key: value if is_far and key.endswith("pool") else moved(value, at_end)
                for key, value in inputs.items()
            }
            with fenced_scratch(at_end):
                got = implementation.run(case, inputs)
            bench.OP.compare(case, got, want)
    print("right")


if __name__ == "__main__":
    main(*sys.argv[1:])
