# SPDX-License-Identifier: Apache-2.0
"""Build what a wheel ships: the CUDA C++ and HIP C++ of a package, for every architecture that it declares."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from numinous_tooling.compile import CompileError, shipped, sources
from numinous_tooling.compile.report import Report, module_folder, report
from numinous_tooling.workbench import Op, SourceBinary


def build(package: str, ops: Sequence[Op]) -> list[Path]:
    """Replace ``binaries/`` of a package by machine code of every `SourceBinary` of its ops.

    An sm103 binary that is the family's is shipped once, under sm100.

    Returns:
        The files that were written.

    Raises:
        CompileError: a compiler refuses a source, or two ops declare different binaries of one name.
        NotAvailable: a compiler is missing.
    """
    declared: dict[str, tuple[Op, SourceBinary]] = {}
    for op in ops:
        for binary in op.binaries:
            if isinstance(binary, SourceBinary):
                _, before = declared.setdefault(binary.name, (op, binary))
                if before != binary:
                    raise CompileError(f"{package}: two different binaries are named {binary.name}")
    module = module_folder(package)
    made: dict[str, dict[str, tuple[SourceBinary, Report]]] = {}
    for op, binary in declared.values():
        for arch in binary.archs:
            result = report(op, binary, arch)
            if arch != "sm103" or result.target != "sm_100f" or "sm100" not in binary.archs:
                made.setdefault(arch, {})[binary.name] = binary, result
    # Only now, so that a failure leaves what was there.
    shutil.rmtree(module / shipped.FOLDER, ignore_errors=True)
    return [path for arch, rows in sorted(made.items()) for path in _write(module, arch, rows)]


def _write(module: Path, arch: str, made: dict[str, tuple[SourceBinary, Report]]) -> list[Path]:
    folder = module / shipped.FOLDER / arch
    folder.mkdir(parents=True)
    rows, written = {}, []
    for name, (binary, result) in sorted(made.items()):
        code = result.code.read_bytes()
        (folder / result.code.name).write_bytes(code)
        written.append(folder / result.code.name)
        row = shipped.Shipped(
            file=result.code.name,
            target=result.target,
            source=binary.source,
            defines=dict(binary.defines),
            digest=sources.digest(module, binary.source, binary.defines),
            sha256=hashlib.sha256(code).hexdigest(),
            entries=list(binary.entries),
            compiler=result.compiler,
            resources={x: dataclasses.asdict(values) for x, values in result.entries.items()},
        )
        rows[name] = dataclasses.asdict(row)
    path = folder / shipped.MANIFEST
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return [*written, path]
