# SPDX-License-Identifier: Apache-2.0
"""One binary on one architecture: compile it, or take what was kept, and read its resources."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numinous_tooling.compile import CompileError, cache, cuda, hip, jit, resources
from numinous_tooling.compile.resources import Resources
from numinous_tooling.workbench import Op, SourceBinary, TritonBinary


@dataclass(frozen=True)
class Report:
    """What came of one compilation.

    Args:
        target: the compiler's name of what it compiled for.
        compiler: name and version.
        code: the cubin or code object.
        entries: kernel -> resources.
        seconds: of the compilation and the reading, also where both were kept.
        kept: nothing was compiled or read this time.
        unread: why mnemonics could not be read; "" where they were.
    """

    target: str
    compiler: str
    code: Path
    entries: dict[str, Resources]
    seconds: float
    kept: bool
    unread: str


def module_folder(package: str) -> Path:
    """Folder of the import package of ``packages/<package>``; raises CompileError where it is not installed."""
    name = "numinous_" + package.replace("-", "_")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise CompileError(f"{name} is not installed; pip install -e packages/{package}")
    return Path(spec.submodule_search_locations[0])


def report(op: Op, binary: TritonBinary | SourceBinary, arch: str) -> Report:
    """Compile one binary for one architecture and read its resources.

    Raises:
        NotAvailable: its compiler is not on this machine.
        CompileError: the compiler refuses it, or a declared entry is not in it.
    """
    if arch not in binary.archs:
        raise CompileError(f"{op.name}: {binary.name} is not declared for {arch}")
    target, compiler, folder = _compile(op, binary, arch)
    suffix = "hsaco" if arch.startswith("gfx") else "cubin"
    code = folder / f"{binary.name}.{suffix}"
    mnemonics = sorted({*binary.required.get(arch, ()), *binary.forbidden.get(arch, ())})
    readers = [str(path) for path in resources.disassemblers()] if mnemonics else []
    inputs = {"of": folder.name, "mnemonics": mnemonics, "with": readers, "v": resources.VERSION}

    made = False

    def read(out: Path) -> None:
        nonlocal made
        made = True
        log = (folder / "log").read_text(encoding="utf-8")
        extra: dict[str, Any] = {}
        if isinstance(binary, TritonBinary):
            extra = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
            del extra["entry"]
        found, unread = resources.read(code, log, mnemonics, extra)
        row = {
            "entries": {entry: dataclasses.asdict(values) for entry, values in found.items()},
            "unread": unread,
        }
        (out / "report.json").write_text(json.dumps(row), encoding="utf-8")

    kept = cache.kept(cache.key(inputs), read)
    row = json.loads((kept / "report.json").read_text(encoding="utf-8"))
    entries = {entry: Resources(**values) for entry, values in row["entries"].items()}
    if isinstance(binary, SourceBinary) and (absent := set(binary.entries) - set(entries)):
        raise CompileError(
            f"{binary.name} for {arch}: no kernel {_named(absent)} in it; there are {_named(entries)}"
        )
    seconds = cache.seconds(folder, kept)
    return Report(target, compiler, code, entries, seconds, not made, row["unread"])


def _named(names: Iterable[str], most: int = 8) -> str:
    found = sorted(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more or "none"


def _compile(op: Op, binary: TritonBinary | SourceBinary, arch: str) -> tuple[str, str, Path]:
    if isinstance(binary, TritonBinary):
        return arch, jit.compiler_version(), jit.compile_arch(binary, arch)
    module = module_folder(op.package)
    if arch.startswith("gfx"):
        return arch, hip.compiler_version(), hip.compile_target(module, binary, arch)
    target, folder = cuda.compile_arch(module, binary, arch)
    return target, cuda.nvcc_version(), folder
