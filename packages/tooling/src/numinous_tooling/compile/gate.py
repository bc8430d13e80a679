# SPDX-License-Identifier: Apache-2.0
"""Budgets: what each binary was recorded to use, and the check that it uses no more.

``configs/<arch>/<op>.json`` of the package holds ``{"binaries": {name: {"target", "compiler", "entries"}}}``. Registers,
stack, spills, shared memory and tensor memory may fall and not rise; code size and counts of mnemonics are for reading.
Some rules have no record: limits of the architecture, launch bounds, required and forbidden mnemonics.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from numinous_tooling.compile import CompileError, NotAvailable
from numinous_tooling.compile.report import Report, module_folder, report
from numinous_tooling.compile.resources import Resources
from numinous_tooling.workbench import Op, SourceBinary, TritonBinary

__all__ = ["NotAvailable", "check", "diff", "record", "selected", "violations"]

Binary = TritonBinary | SourceBinary

SHARED_LIMIT = {
    "sm90": 232448,
    "sm100": 232448,
    "sm103": 232448,
    "sm120": 101376,
    "gfx950": 160 * 1024,
}
"""Bytes of shared memory that a block can have; CUDA programming guide, CDNA4 ISA guide."""

REGISTERS_OF_BLOCK = {
    "sm90": 65536,
    "sm100": 65536,
    "sm103": 65536,
    "sm120": 65536,
    "gfx950": 4 * 512 * 64,
}
"""Registers per thread × threads: of a multiprocessor; of the four SIMDs of a compute unit."""  # fmt: skip

TENSOR_MEMORY_COLUMNS = 512
QUICK = 2
"""Binaries per op and architecture that are compiled without ``--full``."""

_BUDGETED = ("registers", "stack", "spills", "static_shared", "dynamic_shared", "tensor_memory")


def selected(op: Op, arch: str, full: bool = False) -> list[Binary]:
    """What is compiled of an op for an architecture; raises ValueError where more than two are quick."""
    found = [x for x in op.binaries if arch in x.archs and (full or x.quick)]
    if not full and len(found) > QUICK:
        raise ValueError(
            f"{op.name} has {len(found)} quick binaries for {arch}, at most {QUICK} are allowed; "
            "set quick=False on the others"
        )
    return found


def budget_file(op: Op, arch: str) -> Path:
    """Where the budgets of an op lie."""
    return module_folder(op.package) / "configs" / arch / f"{op.name}.json"


def budgets(op: Op, arch: str) -> dict[str, Any]:
    """Name of a binary -> what was recorded; empty where nothing was."""
    path = budget_file(op, arch)
    if not path.is_file():
        return {}
    return dict(json.loads(path.read_text(encoding="utf-8")).get("binaries", {}))


def check(op: Op, binary: Binary, arch: str) -> Report:
    """Compile a binary and compare it with its budget.

    Returns:
        What was compiled.

    Raises:
        AssertionError: it does not compile or breaks a rule; the text lists every violation.
        NotAvailable: a compiler is missing, or mnemonics cannot be read and everything else holds.
    """
    try:
        made = report(op, binary, arch)
    except CompileError as error:
        raise AssertionError(f"{arch}: {error}") from error
    found = list(violations(op, binary, arch, made))
    if found:
        raise AssertionError(
            f"{op.name}, {binary.name} for {arch} ({made.target}, {made.compiler}):\n  "
            + "\n  ".join(found)
        )
    if made.unread:
        raise NotAvailable(
            f"mnemonics of {binary.name} for {arch} were not read ({made.unread}); "
            "its resources are within the budget"
        )
    return made


def violations(op: Op, binary: Binary, arch: str, made: Report) -> Iterator[str]:
    """Every rule that a compiled binary breaks."""
    for entry, values in made.entries.items():
        for text in _limits(values, arch):
            yield f"{entry}: {text}"
    if not made.unread:
        yield from _mnemonics(binary, arch, made)
    recorded = budgets(op, arch).get(binary.name)
    command = f"python -m numinous_tooling.compile record {op.name} --arch {arch}"
    command += "" if binary.quick else " --full"
    if recorded is None:
        yield f"no budget in configs/{arch}/{op.name}.json; record it: {command}"
        return
    over = list(_over(made.entries, recorded["entries"]))
    yield from over
    if over:
        if recorded["compiler"] != made.compiler:
            yield f"the budget was recorded with {recorded['compiler']}, this is {made.compiler}"
        yield f"if that is meant, record it: {command}"


def _limits(values: Resources, arch: str) -> Iterator[str]:
    if values.threads is None:
        yield "no launch bounds, so that registers × threads cannot be judged; add __launch_bounds__"
    else:
        # Registers are handed out to a warp eight per thread at a time.
        total = -(-values.registers // 8) * 8 * values.threads
        if total > REGISTERS_OF_BLOCK[arch]:
            yield (
                f"{values.registers} registers × {values.threads} threads are {total}, "
                f"limit {REGISTERS_OF_BLOCK[arch]}"
            )
    shared = values.static_shared + (values.dynamic_shared or 0)
    if shared > SHARED_LIMIT[arch]:
        yield f"{shared} bytes of shared memory, limit {SHARED_LIMIT[arch]}"
    if (values.tensor_memory or 0) > TENSOR_MEMORY_COLUMNS:
        yield f"{values.tensor_memory} columns of tensor memory, limit {TENSOR_MEMORY_COLUMNS}"


def _mnemonics(binary: Binary, arch: str, made: Report) -> Iterator[str]:
    for wanted in binary.required.get(arch, ()):
        if not any((x.mnemonics or {}).get(wanted) for x in made.entries.values()):
            yield f"required {wanted} is not in the machine code"
    for unwanted in binary.forbidden.get(arch, ()):
        for entry, values in made.entries.items():
            if times := (values.mnemonics or {}).get(unwanted):
                yield f"{entry}: forbidden {unwanted} occurs {times} times"


def _over(entries: Mapping[str, Resources], recorded: Mapping[str, Any]) -> Iterator[str]:
    for entry, values in entries.items():
        if entry not in recorded:
            yield f"{entry}: not in the budget"
            continue
        for name in _BUDGETED:
            now, was = getattr(values, name), recorded[entry].get(name)
            if now is not None and now > (was or 0):
                yield f"{entry}: {name} {now}, budget {was}"


def record(op: Op, reports: Mapping[tuple[str, str], Report]) -> list[Path]:
    """Write what was compiled into the budgets; other binaries of the op keep theirs, those no longer declared go.

    Args:
        op: whose budgets.
        reports: (binary, architecture) -> what was compiled.

    Returns:
        The files that were written.
    """
    written = []
    for arch in sorted({arch for _, arch in reports}):
        rows = budgets(op, arch)
        for (name, of), made in reports.items():
            if of == arch:
                rows[name] = _row(made)
        declared = {x.name for x in op.binaries if arch in x.archs}
        kept = {name: row for name, row in sorted(rows.items()) if name in declared}
        path = budget_file(op, arch)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"binaries": kept}, indent=1) + "\n", encoding="utf-8")
        written.append(path)
    return written


def _row(made: Report) -> dict[str, Any]:
    entries = {entry: dataclasses.asdict(values) for entry, values in made.entries.items()}
    return {"target": made.target, "compiler": made.compiler, "entries": entries}


def diff(op: Op, binary: Binary, arch: str, made: Report) -> Iterator[str]:
    """What differs between a compiled binary and its budget, better or worse; nothing where they are equal."""
    now, was = _row(made), budgets(op, arch).get(binary.name)
    if was is None:
        yield "not recorded"
        return
    yield from _changed({x: was[x] for x in ("target", "compiler")}, now)
    for entry in sorted({*now["entries"], *was["entries"]}):
        old, new = was["entries"].get(entry), now["entries"].get(entry)
        if old is None or new is None:
            yield f"{entry}: {'new' if old is None else 'gone'}"
        else:
            for text in _changed(old, new):
                yield f"{entry}: {text}"


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterable[str]:
    return [f"{x}: {old[x]} → {new.get(x)}" for x in old if old[x] != new.get(x)]


def time_of(reports: Sequence[Report]) -> str:
    """The arithmetic of compiling: measured seconds × count, and what sixty kernels would take."""
    total = sum(x.seconds for x in reports)
    kept = sum(x.kept for x in reports)
    each = total / max(len(reports), 1)
    sixty = 60 * QUICK * len(SHARED_LIMIT) * each
    return (
        f"{len(reports)} compilations × {each:.2f} s = {total:.1f} s"
        + (f" when they were made; {kept} of them were kept" if kept else "")
        + f"; 60 kernels × {QUICK} binaries × {len(SHARED_LIMIT)} architectures × {each:.2f} s = "
        f"{sixty / 60:.0f} min in one process"
    )
