# SPDX-License-Identifier: Apache-2.0
"""What a kernel's machine code uses, read from compiler reports, ELF files and assembly; standard library only.

Sources: `ptxas -v` for registers, stack, spills and static shared memory (cuobjdump counts another 1 KiB that the
system reserves); the symbol table for code size; ``.nv.info`` for the launch bounds; the metadata notes of AMDGPU
assembly for the same on AMD.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import struct
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numinous_tooling.compile import CompileError, NotAvailable

VERSION = 1
"""Raised when the readers change, so that kept results are read anew."""

_MAX_THREADS = 0x05  # EIATTR_MAX_THREADS of .nv.info
_SIZED = 4  # format of its records that carry a length
_REPORT = re.compile(
    r"Compiling entry function '(?P<name>[^']+)'(?P<properties>.*?)Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_SASS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)")
_OPERANDS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)\s+([^;]*);")
_AMDGCN = re.compile(r"^\t([a-z]\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """Of one kernel; None where the machine code does not say.

    Args:
        registers: per thread; on AMD vector registers, the accumulation registers among them.
        stack: bytes per thread, spills and local arrays together (AMD: private segment).
        spills: bytes per thread that are stored and loaded again (AMD: spilled registers times 4).
        static_shared: bytes per block that the code declares.
        dynamic_shared: bytes per block that the launch adds; None where the caller chooses.
        threads: of a block: Triton's warps, or the launch bounds.
        tensor_memory: columns; None where the code allocates at run time.
        code_bytes: size of the machine code.
        mnemonics: how often each required or forbidden mnemonic occurs; None where they cannot be read here.
    """

    registers: int
    stack: int
    spills: int
    static_shared: int
    code_bytes: int
    dynamic_shared: int | None = None
    threads: int | None = None
    tensor_memory: int | None = None
    mnemonics: Mapping[str, int] | None = field(default_factory=dict)


def from_ptxas(log: str) -> dict[str, dict[str, int]]:
    """Entry -> registers, stack, spills and static shared memory, as ``ptxas -v`` reports them."""
    found = {}
    for match in _REPORT.finditer(log):
        # A function that is not inlined has a frame of its own, below the entry's.
        frames = [[int(n) for n in frame] for frame in _FRAME.findall(match["properties"])]
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        found[match["name"]] = {
            "registers": int(match["registers"]),
            "stack": sum(frame[0] for frame in frames),
            "spills": sum(frame[1] + frame[2] for frame in frames),
            "static_shared": int(shared[1]) if shared else 0,
        }
    return found


def from_amdgcn(text: str) -> dict[str, dict[str, int]]:
    """Entry -> registers, stack, spills, static shared memory and threads of AMDGPU assembly."""
    _, _, notes = text.partition("amdhsa.kernels:")
    found = {}
    for kernel in re.split(r"^  - ", notes, flags=re.MULTILINE)[1:]:
        # Keys of the kernel; its arguments stand deeper.
        keys = dict(re.findall(r"^(?: {4})?(\.\w+): +(\S+)", kernel, re.MULTILINE))
        if ".vgpr_count" not in keys:
            continue
        found[keys[".name"]] = {
            "registers": int(keys[".vgpr_count"]),
            "stack": int(keys[".private_segment_fixed_size"]),
            "spills": 4 * (int(keys[".vgpr_spill_count"]) + int(keys[".sgpr_spill_count"])),
            "static_shared": int(keys[".group_segment_fixed_size"]),
            "threads": int(keys[".max_flat_workgroup_size"]),
        }
    return found


class Elf:
    """Sections and symbols of a 64-bit little-endian ELF file: a cubin or an AMDGPU code object."""

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise CompileError("the machine code is no 64-bit ELF file")
        self._data = data
        (start,) = struct.unpack_from("<Q", data, 40)
        size, count, names = struct.unpack_from("<HHH", data, 58)
        headers = [struct.unpack_from("<IIQQQQIIQQ", data, start + size * i) for i in range(count)]
        self._headers = headers
        self.sections = {self._string(headers[names][4] + header[0]): header for header in headers}

    def content(self, section: str) -> bytes:
        """Bytes of a section; empty where there is none."""
        header = self.sections.get(section)
        return self._data[header[4] : header[4] + header[5]] if header else b""

    def functions(self) -> dict[str, int]:
        """Function -> bytes of code."""
        table = self.sections.get(".symtab") or self.sections.get(".dynsym")
        if table is None:
            return {}
        strings = self._headers[table[6]][4]
        found = {}
        for offset in range(table[4], table[4] + table[5], 24):
            name, info, _, _, _, size = struct.unpack_from("<IBBHQQ", self._data, offset)
            if info & 15 == 2:
                found[self._string(strings + name)] = size
        return found

    def max_threads(self, entry: str) -> int | None:
        """Threads of a block by the launch bounds of a cubin's kernel; None without bounds."""
        data, at = self.content(f".nv.info.{entry}"), 0
        while at + 4 <= len(data):
            kind, attribute, size = struct.unpack_from("<BBH", data, at)
            if kind == _SIZED and attribute == _MAX_THREADS:
                x, y, z = struct.unpack_from("<III", data, at + 4)
                return int(x * y * z)
            at += 4 + (size if kind == _SIZED else 0)
        return None

    def _string(self, offset: int) -> str:
        return self._data[offset : self._data.index(b"\0", offset)].decode()


@functools.cache
def disassemblers() -> tuple[Path, ...]:
    """Every nvdisasm at hand, the newest kind first: of PyPI, of the CUDA toolkit, of the Triton wheel."""
    found = []
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia.submodule_search_locations or ()) if nvidia else ():
        found += sorted(Path(folder).glob("*/bin/nvdisasm"), reverse=True)
    found += [Path(x) for x in (shutil.which("nvdisasm"), "/usr/local/cuda/bin/nvdisasm") if x]
    triton = importlib.util.find_spec("triton")
    for folder in (triton.submodule_search_locations or ()) if triton else ():
        found.append(Path(folder) / "backends" / "nvidia" / "bin" / "nvdisasm")
    return tuple(path for path in found if path.is_file())


def sass(cubin: Path) -> dict[str, str]:
    """Entry -> its SASS; raises NotAvailable where no nvdisasm at hand knows the architecture."""
    said = "there is no nvdisasm"
    for tool in disassemblers():
        done = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            parts = re.split(r"^\.text\.(\S+):$", done.stdout, flags=re.MULTILINE)
            return dict(zip(parts[1::2], parts[2::2], strict=True))
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
    raise NotAvailable(f"{said}; pip install nvidia-cuda-nvdisasm, 13.2 or newer")


def amdgcn(text: str) -> dict[str, str]:
    """Function -> its instructions in AMDGPU assembly."""
    parts = re.findall(r"^([\w.$]+):[^\n]*\n(.*?)^\.Lfunc_end\d+:", text, re.MULTILINE | re.DOTALL)
    return dict(parts)


def count(code: str, mnemonics: Iterable[str]) -> dict[str, int]:
    """How often each mnemonic occurs in SASS or in AMDGPU assembly.

    A mnemonic stands for every instruction that begins with its whole parts: ``LDG.E`` for ``LDG.E.128`` and not for
    ``LDGSTS``, ``v_mfma`` for ``v_mfma_f32_16x16x32_bf16``.
    """
    instructions = _SASS.findall(code) or _AMDGCN.findall(code)
    return {
        wanted: sum(
            x.startswith(wanted) and x[len(wanted) : len(wanted) + 1] in ("", ".", "_")
            for x in instructions
        )
        for wanted in sorted(set(mnemonics))
    }


def torn_merges(code: str) -> list[str]:
    """Conversions to FP8 in SASS whose other half is a register that no conversion wrote.

    ``F2FP.…MERGE_C`` puts two codes beside the lower half of its last operand. ptxas 12.8 for sm_90a makes one of two joined
    conversions with an operand of no meaning there and lets those bytes through. A kernel that packs FP8 beside bytes of another
    kind would be named here too; registers are followed in the order of the text.
    """
    wrote: dict[str, str] = {}
    found = []
    for name, operands in _OPERANDS.findall(code):
        first, *_, last = (x.strip().partition(".")[0] for x in f"{operands},{operands}".split(","))
        merges = name.startswith("F2FP") and "MERGE_C" in name and last != "RZ"
        if merges and not wrote.get(last, "").startswith("F2FP"):
            found.append(f"{name} {operands.strip()}, {last} from {wrote.get(last, 'nowhere')}")
        wrote[first] = name
    return found


def read(
    code: Path,
    report: str,
    mnemonics: Sequence[str],
    extra: Mapping[str, int | None] | None = None,
) -> tuple[dict[str, Resources], str]:
    """Resources of every kernel of a cubin or code object.

    Args:
        code: the file.
        report: what ``ptxas -v`` said, or the assembly of the code object.
        mnemonics: to be counted.
        extra: what only the compiler knows, for each kernel.

    Returns:
        Entry -> resources, and the reason why mnemonics could not be read, else "".
    """
    elf, reason = Elf(code.read_bytes()), ""
    known = from_ptxas(report)
    texts: dict[str, str] | None = None
    if not known:
        known, texts = from_amdgcn(report), amdgcn(report)
    elif mnemonics:
        try:
            texts = sass(code)
        except NotAvailable as error:
            reason = str(error)
    sizes = elf.functions()
    found = {}
    for entry, values in sorted(known.items()):
        counts = None if reason else count((texts or {}).get(entry, ""), mnemonics)
        all_values: dict[str, Any] = {
            **values,
            "threads": values.get("threads") or elf.max_threads(entry),
            "code_bytes": sizes[entry],
            "mnemonics": counts,
            **(extra or {}),
        }
        found[entry] = Resources(**all_values)
    return found, reason
