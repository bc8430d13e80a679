# SPDX-License-Identifier: Apache-2.0
"""What a kernel author declares: one `Op` per kernel module.

From it come, with no further code: tests in four tiers (`numinous_tooling.testing.kernels`), machine code for every
architecture within a budget (`numinous_tooling.compile`), a benchmark against named peers (`numinous_tooling.bench`),
evidence records, and the check of the catalogue row (`numinous_tooling.catalog`).

This module imports the standard library only; tensors are whatever the op's own functions take and give.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ARCHS = ("sm90", "sm100", "sm103", "sm120", "gfx950")
"""Architectures that every kernel is compiled for."""

TIERS = ("ref", "interpret", "compile", "device")

Tensors = dict[str, Any]
"""Named inputs or outputs of one call: tensors, numbers, None."""


@dataclass(frozen=True)
class Traffic:
    """Compulsory work of one call: each input byte read once, each output byte written once.

    Args:
        bytes: through device memory.
        flops: additions and multiplications, counted one each.
        unit: which measured roof the flops are compared with: ``"bf16"``, ``"fp8"`` or ``"fp32"``.
    """

    bytes: int
    flops: int = 0
    unit: str = "bf16"


@dataclass(frozen=True)
class Implementation:
    """A way to compute the op: ours, or a peer's.

    Args:
        run: ``run(case, inputs) -> outputs``. May write into its inputs where the op is in place; the caller gives
            it fresh ones. Imports what it needs inside; must not synchronise, so that it can be captured.
        version: None for our own; for a peer a function that returns its version, raising ImportError if absent.
        interpret: runs under the Triton interpreter on the CPU.
        archs: where it may run on a device. On another it is reported as not run. ``"cpu"`` among them lets
            `numinous bench --device cpu` time it, which tests the path and says nothing about a GPU.
        refuses: ``refuses(case) -> reason`` where this implementation does not take a case, else None.
        exact: outputs equal the reference's bit for bit; else `Op.compare` judges them.
    """

    run: Callable[[Any, Tensors], Tensors]
    version: Callable[[], str] | None = None
    interpret: bool = False
    archs: Sequence[str] = ARCHS
    refuses: Callable[[Any], str | None] = lambda case: None
    exact: bool = False


@dataclass(frozen=True)
class TritonBinary:
    """One specialisation of a Triton or Gluon kernel, as the launcher would make it.

    Args:
        name: unique within the op; names the budget entry.
        kernel: ``"module:function"`` of the jitted function.
        signature: argument -> type as Triton writes it (``*bf16``, ``i32``, ``fp32``), without the constants.
        constants: argument -> compile-time value (also what the JIT would fold: None, and integers equal to 1); a
            mapping under an architecture's name replaces them there.
        aligned: arguments divisible by 16: pointers of whole allocations, and integers that the launcher passes so.
        options: ``num_warps``, ``num_stages`` and so on; a mapping under an architecture's name replaces them there.
        gluon: compiled through the Gluon front end.
        archs: compiled for these.
        required: architecture -> mnemonics that the machine code must hold.
        forbidden: architecture -> mnemonics that it must not hold.
        quick: part of the selection that CI compiles (at most two per op).
    """

    name: str
    kernel: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    aligned: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    gluon: bool = False
    archs: Sequence[str] = ARCHS
    required: Mapping[str, Sequence[str]] = field(default_factory=dict)
    forbidden: Mapping[str, Sequence[str]] = field(default_factory=dict)
    quick: bool = True


@dataclass(frozen=True)
class SourceBinary:
    """One CUDA C++ or HIP C++ translation unit, compiled ahead of time and shipped in the wheel.

    Args:
        name: stem of the file made: ``binaries/<arch>/<name>.cubin`` or ``.hsaco``.
        source: path below the import package, for example ``csrc/rmsnorm_quant/kernel.cu`` or ``….hip``.
        entries: ``extern "C"`` kernels that must be in it.
        archs: compiled for these; sm103 uses the sm100 family cubin where it has one.
        defines: preprocessor symbols.
        required, forbidden, quick: as in `TritonBinary`.
    """

    name: str
    source: str
    entries: Sequence[str]
    archs: Sequence[str] = ("sm90", "sm100", "sm103", "sm120")
    defines: Mapping[str, str] = field(default_factory=dict)
    required: Mapping[str, Sequence[str]] = field(default_factory=dict)
    forbidden: Mapping[str, Sequence[str]] = field(default_factory=dict)
    quick: bool = True


@dataclass(frozen=True)
class Op:
    """A kernel with everything that is done to it.

    Args:
        name: of the op, also the stem of its evidence and budget files.
        package: folder below ``packages/``.
        cases: frozen dataclass instances; ids come from their fields, see `case_id`.
        make_inputs: ``make_inputs(case, seed, device) -> inputs``; deterministic in (case, seed).
        reference: ``reference(case, inputs) -> outputs`` in torch; the specification.
        compare: ``compare(case, got, want)``; raises AssertionError that names the first difference.
        traffic: the byte and FLOP model of a case.
        implementations: ours, by name.
        peers: what a user would run instead, by name.
        binaries: what is compiled for every architecture.
        oracle: the same in fp64, against which the reference itself is tested in tier ``ref``.
        compare_oracle: ``compare_oracle(case, got, exact)``: how the reference is judged against the oracle; `got` has
            those of its outputs that the oracle gives too. Default: `torch.testing.assert_close` at the tolerances of
            the reference's dtypes, where the oracle's outputs are a subset of the reference's.
        not_run: ``not_run(tier, case) -> reason`` where a case is left out of a tier (too large for the interpreter,
            say), else None.
        bench_cases: what `numinous bench` times, each of them with bytes to move; default: all cases.
        bench_options: protocol choices of `numinous_tooling.bench` (for example ``{"l2": "cold"}``).
    """

    name: str
    package: str
    cases: Sequence[Any]
    make_inputs: Callable[[Any, int, Any], Tensors]
    reference: Callable[[Any, Tensors], Tensors]
    compare: Callable[[Any, Tensors, Tensors], None]
    traffic: Callable[[Any], Traffic]
    implementations: Mapping[str, Implementation]
    peers: Mapping[str, Implementation] = field(default_factory=dict)
    binaries: Sequence[TritonBinary | SourceBinary] = ()
    oracle: Callable[[Any, Tensors], Tensors] | None = None
    compare_oracle: Callable[[Any, Tensors, Tensors], None] | None = None
    not_run: Callable[[str, Any], str | None] = lambda tier, case: None
    bench_cases: Sequence[Any] | None = None
    bench_options: Mapping[str, Any] = field(default_factory=dict)


def case_id(case: Any) -> str:
    """``M4096-H7168-residual`` from the fields of a frozen dataclass, in order.

    A field that equals its default is left out; True gives the field's name, a string its own text, anything else
    name and value. An underscore at the end of a name is dropped. A case of only defaults is called ``default``.
    """
    parts = []
    for item in dataclasses.fields(case):
        value, name = getattr(case, item.name), item.name.rstrip("_")
        if item.default is not dataclasses.MISSING and value == item.default:
            continue
        if isinstance(value, bool):
            parts.append(name if value else f"no_{name}")
        elif isinstance(value, str):
            parts.append(value)
        elif isinstance(value, tuple):
            parts.append(name + "x".join(map(str, value)))
        else:
            parts.append(f"{name}{value}")
    return "-".join(parts) or "default"
