# SPDX-License-Identifier: Apache-2.0
"""HIP C++ to code objects for gfx950: by ROCm's hipcc where it is installed, else by clang of PyPI's ziglang.

ziglang brings no HIP headers: sources include ``<hip/hip_runtime.h>`` only under ``__has_include`` and spell ``__global__``
and the like themselves otherwise. Launch bounds that both obey are ``amdgpu_flat_work_group_size(1, threads)``.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import tempfile
from pathlib import Path

from numinous_tooling.compile import CompileError, NotAvailable, cache, sources
from numinous_tooling.compile.cuda import first_error, run
from numinous_tooling.workbench import SourceBinary

FLAGS = ("-O3", "-std=c++17", "--cuda-device-only", "-fuse-cuid=none")
ZIG_FLAGS = ("-nogpuinc", "-nogpulib")


@functools.cache
def find_compiler() -> tuple[str, ...]:
    """Command of the compiler: hipcc of $ROCM_PATH, PATH or /opt/rocm, else ``zig clang``; raises NotAvailable."""
    rocm = os.environ.get("ROCM_PATH")
    for found in (
        rocm and shutil.which("hipcc", path=str(Path(rocm) / "bin")),
        shutil.which("hipcc"),
        shutil.which("hipcc", path="/opt/rocm/bin"),
    ):
        if found:
            return (found,)
    spec = importlib.util.find_spec("ziglang")
    if spec and spec.submodule_search_locations:
        return (str(Path(spec.submodule_search_locations[0]) / "zig"), "clang")
    raise NotAvailable("neither hipcc nor ziglang is installed; pip install ziglang==0.17.1")


@functools.cache
def compiler_version() -> str:
    """``zig clang 22.1.8``; raises NotAvailable."""
    command = find_compiler()
    done = run([*command, "--version"])
    found = re.search(r"clang version (\S+)", done.stdout)
    if not found:
        raise NotAvailable(f"{' '.join(command)} --version does not name its clang; mend it")
    return f"{'zig clang' if len(command) > 1 else 'hipcc clang'} {found[1]}"


def compile_target(module: Path, binary: SourceBinary, target: str) -> Path:
    """One code object for one target such as ``gfx950``; kept by the hash of its inputs.

    Returns:
        A folder with ``<name>.hsaco`` and ``log`` (its assembly). Raises CompileError, NotAvailable.
    """
    command = find_compiler()
    zig = len(command) > 1
    flags = (*FLAGS, *ZIG_FLAGS) if zig else FLAGS
    inputs = {
        "source": sources.digest(module, binary.source, binary.defines),
        "compiler": compiler_version(),
        "flags": flags,
        "target": target,
        "name": binary.name,
    }

    def make(out: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="numinous-hip-") as scratch:
            symbols = [f"-D{name}={value}" for name, value in sorted(binary.defines.items())]
            base = [*command, "-x", "hip", f"--offload-arch={target}", *flags, *symbols]
            base += [f"-I{module / sources.CSRC}", str(module / binary.source)]
            link = ["--no-gpu-bundle-output"]
            if zig:
                # clang asks for a linker named lld, which zig has under another name.
                linker = Path(scratch) / "lld"
                linker.write_text(f'#!/bin/sh\nshift 2\nexec "{command[0]}" ld.lld "$@"\n')
                linker.chmod(0o700)
                link.append(f"-B{scratch}")
            code = out / f"{binary.name}.hsaco"
            for step in (["-S", "-o", str(out / "log")], [*link, "-o", str(code)]):
                done = run([*base, *step])
                if done.returncode != 0:
                    said = first_error(done.stderr)
                    raise CompileError(f"{binary.name} for {target}: {said}")

    return cache.kept(cache.key(inputs), make)
