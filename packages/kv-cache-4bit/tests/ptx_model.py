# SPDX-License-Identifier: Apache-2.0
"""The PTX in the kernels' sources on a CPU, instruction by instruction, by the PTX manual; registers of 32 bits are held in int64."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch

from numinous_tooling.numerics import decode_e4m3fn

Registers = dict[str, torch.Tensor]
FULL = 0xFFFFFFFF


def ptx_of(function: Any, index: int = 0) -> str:
    """The `index`-th text in a jitted function's source that is PTX."""
    found = re.findall(
        r'"""(\{.*?)"""|"([a-z]\S* \$0.*?;)"', inspect.getsource(function.fn), re.DOTALL
    )
    block, line = found[index]
    return str(block or line)


def run_ptx(text: str, registers: Registers) -> None:
    """Run it; an instruction that is not here is a KeyError."""
    for part in text.replace("\n", " ").strip("{} ").split(";"):
        name, _, rest = part.strip().partition(" ")
        if not name or name == ".reg":
            continue
        to, *args = [part.strip() for part in re.split(r",(?![^{]*})", rest)]
        if to.startswith("{"):
            low, high = to.strip("{}").split(",")
            registers[low.strip()] = registers[args[0]] & 0xFFFF
            registers[high.strip()] = registers[args[0]] >> 16
        else:
            registers[to] = KNOWN[name](*(_operand(registers, arg) for arg in args))


def halves(register: torch.Tensor, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """The two numbers of 16 bits in a register, [..., 2]."""
    parts = torch.stack([register & 0xFFFF, register >> 16], dim=-1)
    return parts.to(torch.int32).to(torch.uint16).view(dtype)


def from_halves(pair: torch.Tensor) -> torch.Tensor:
    """The register of two numbers of 16 bits, [..., 2]; a NaN is 0x7fff."""
    bits = torch.where(pair.isnan(), 0x7FFF, pair.contiguous().view(torch.uint16).long())
    return bits[..., 0] | (bits[..., 1] << 16)


def singles(register: torch.Tensor) -> torch.Tensor:
    """The fp32 number in a register."""
    return register.to(torch.uint32).view(torch.float32)


def from_singles(number: torch.Tensor) -> torch.Tensor:
    """The register of an fp32 number; a NaN is 0x7fffffff."""
    return torch.where(number.isnan(), 0x7FFFFFFF, number.contiguous().view(torch.uint32).long())


def _operand(registers: Registers, text: str) -> torch.Tensor:
    if text.startswith("0f"):
        return torch.tensor(int(text[2:], 16))
    return registers[text] if text in registers else torch.tensor(int(text, 0))


def _lop3(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Any function of three bits: bit 4 a + 2 b + c of `table` says what it gives."""
    made = torch.zeros_like(a)
    for index in range(8):
        if int(table) >> index & 1:
            made = made | (
                (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
            )
    return made & FULL


def _prmt(a: torch.Tensor, b: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(a)
    for index in range(4):
        nibble = selector >> (4 * index) & 15
        for choice in nibble.unique().tolist():
            assert choice < 8, "sign replication"
            byte = (a if choice < 4 else b) >> (8 * (choice % 4)) & 0xFF
            made |= torch.where(nibble == choice, byte << (8 * index), 0)
    return made


def _to_halves(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    return from_halves(torch.stack([singles(lower), singles(upper)], dim=-1).half())


def _of_codes(codes: torch.Tensor) -> torch.Tensor:
    pair = torch.stack([codes & 0xFF, codes >> 8 & 0xFF], dim=-1)
    return from_halves(decode_e4m3fn(pair.to(torch.uint8)).half())


def _fma_halves(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    x, y, z = (halves(register).double() for register in (a, b, c))
    return from_halves((x * y + z).half())  # fp64 holds the sum of a product and a number exactly


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    x, y, z = (singles(register).double() for register in (a, b, c))
    return from_singles((x * y + z).float())


def _min_halves(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return from_halves(torch.fmin(halves(a).float(), halves(b).float()).half())


def _larger_magnitude(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    x, y = (halves(register, torch.bfloat16).float() for register in (a, b))
    size = torch.maximum(x.abs(), y.abs())
    signed = torch.where(x.signbit() ^ y.signbit(), -size, size)
    return from_halves(signed.to(torch.bfloat16))


def _least(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.minimum(a & 0xFFFF, b & 0xFFFF) | (torch.minimum(a >> 16, b >> 16) << 16)


KNOWN: dict[str, Callable[..., torch.Tensor]] = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b & FULL,
    "and.b32": lambda a, b: a & b,
    "sub.u32": lambda a, b: (a - b) & FULL,
    "mad.lo.u32": lambda a, b, c: (a * b + c) & FULL,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "min.u16x2": _least,
    "cvt.u16.u32": lambda a: a & 0xFFFF,
    "cvt.rn.f16x2.f32": _to_halves,
    "cvt.rn.f16x2.e4m3x2": _of_codes,
    "cvt.f32.f16": lambda a: from_singles(halves(a)[..., 0].float()),
    "abs.f16x2": lambda a: from_halves(halves(a).abs()),
    "min.f16x2": _min_halves,
    "mul.rn.f16x2": lambda a, b: from_halves(halves(a) * halves(b)),
    "sub.rn.f16x2": lambda a, b: from_halves(halves(a) - halves(b)),
    "fma.rn.f16x2": _fma_halves,
    "max.NaN.xorsign.abs.bf16x2": _larger_magnitude,
    "neg.f32": lambda a: from_singles(-singles(a)),
    "mul.rn.f32": lambda a, b: from_singles(singles(a) * singles(b)),
    "fma.rn.f32": _fma,
    "rcp.approx.ftz.f32": lambda a: from_singles(1.0 / singles(a)),
}
