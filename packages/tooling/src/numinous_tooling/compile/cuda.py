# SPDX-License-Identifier: Apache-2.0
"""CUDA C++ to cubins by nvcc."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from numinous_tooling.compile import CompileError, NotAvailable, cache, sources
from numinous_tooling.workbench import SourceBinary

TARGETS: dict[str, tuple[str, ...]] = {
    "sm90": ("sm_90a",),
    # The family target runs on sm_100 and sm_103; a source that needs one chip's instructions falls back to it.
    "sm100": ("sm_100f", "sm_100a"),
    "sm103": ("sm_100f", "sm_103a"),
    "sm120": ("sm_120a",),
}
"""Architecture -> nvcc targets in the order in which they are tried."""

SERIALIZED = "wgmma.mma_async instructions are serialized"
"""What ptxas remarks, and goes on, where code touches accumulators under way: each product then waits for the one before."""

FLAGS = ("-O3", "-std=c++17", "--expt-relaxed-constexpr", "-Xptxas=-v")


@functools.cache
def find_nvcc() -> Path:
    """nvcc of $CUDA_HOME, of PATH or of /usr/local/cuda; raises NotAvailable."""
    home = os.environ.get("CUDA_HOME")
    for found in (
        home and shutil.which("nvcc", path=str(Path(home) / "bin")),
        shutil.which("nvcc"),
        shutil.which("nvcc", path="/usr/local/cuda/bin"),
    ):
        if found:
            return Path(found)
    raise NotAvailable(
        "nvcc is neither in $CUDA_HOME/bin, PATH nor /usr/local/cuda/bin; install the CUDA toolkit, 13.0 or newer"
    )


@functools.cache
def nvcc_version() -> str:
    """``nvcc 13.0.88``; raises NotAvailable."""
    done = subprocess.run([find_nvcc(), "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"\bV(\d+\.\d+\.\d+)", done.stdout)
    if not found:
        raise NotAvailable(f"{find_nvcc()} --version does not say its version; mend the toolkit")
    return f"nvcc {found[1]}"


def compile_target(module: Path, binary: SourceBinary, target: str) -> Path:
    """One cubin for one nvcc target such as ``sm_90a``; kept by the hash of its inputs.

    Returns:
        A folder with ``<name>.cubin`` and ``log`` (what ptxas reported). Raises CompileError, also for what `SERIALIZED` names, and
        NotAvailable.
    """
    nvcc = find_nvcc()
    inputs = {
        "source": sources.digest(module, binary.source, binary.defines),
        "compiler": nvcc_version(),
        "flags": FLAGS,
        "target": target,
        "name": binary.name,
    }

    def make(out: Path) -> None:
        symbols = [f"-D{name}={value}" for name, value in sorted(binary.defines.items())]
        command = [str(nvcc), *FLAGS, f"-arch={target}", "-cubin", f"-I{module / sources.CSRC}"]
        cubin = out / f"{binary.name}.cubin"
        done = run([*command, *symbols, "-o", str(cubin), str(module / binary.source)])
        if done.returncode != 0:
            raise CompileError(f"{binary.name} for {target}: {first_error(done.stderr)}")
        for line in done.stderr.splitlines():
            if SERIALIZED in line:
                raise CompileError(f"{binary.name} for {target}: {line.split(': ', 1)[-1]}")
        (out / "log").write_text(done.stderr, encoding="utf-8")

    return cache.kept(cache.key(inputs), make)


def compile_arch(module: Path, binary: SourceBinary, arch: str) -> tuple[str, Path]:
    """The first target of an architecture that takes the source.

    Returns:
        The target and the folder of `compile_target`. Raises the CompileError of the last target.
    """
    *family, last = TARGETS[arch]
    for target in family:
        try:
            return target, compile_target(module, binary, target)
        except CompileError:
            continue
    return last, compile_target(module, binary, last)


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A compiler's run with its output as text, in English."""
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def first_error(text: str) -> str:
    """The first line of a compiler's output that speaks of an error, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((x for x in lines if "error" in x.lower()), lines[-1] if lines else "no message")
