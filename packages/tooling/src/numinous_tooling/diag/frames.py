# SPDX-License-Identifier: Apache-2.0
"""What a thread is doing, read from its frames by another thread: where in the engine, and whether it compiles.

A compiler is known by the Python modules that are on the stack only while it works (not by those that also launch
what it made), or by a process that it started. Names of kernels come from the local variables of its frames.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ENGINE = "sglang."
HOOKS = "numinous_"  # our wrappers are never the reason
MAX_DEPTH = 400


@dataclass(frozen=True)
class Compiler:
    """A just-in-time compiler.

    Args:
        title: as printed.
        module: a frame of this module, or of one below it, means that it compiles.
        name: what it compiles, from such a frame's local variables; None where the frame does not know.
    """

    title: str
    module: str
    name: Callable[[dict[str, Any]], str | None] = lambda local: None


def _named(*path: str) -> Callable[[dict[str, Any]], str | None]:
    """Reads ``local[path[0]].path[1]…``, None where any step is missing or the end is no text."""

    def read(local: dict[str, Any]) -> str | None:
        value = local.get(path[0])
        for part in path[1:]:
            value = getattr(value, part, None)
        return value if isinstance(value, str) and value else None

    return read


COMPILERS = (
    Compiler("Triton", "triton.compiler", _named("src", "name")),
    Compiler(
        "Triton autotuning", "triton.runtime.autotuner", _named("self", "base_fn", "__name__")
    ),
    Compiler("torch.compile", "torch._dynamo.convert_frame", _named("code", "co_name")),
    Compiler("TorchInductor", "torch._inductor.graph"),
    Compiler("TorchInductor", "torch._inductor.codecache"),
    Compiler("TorchInductor", "torch._inductor.async_compile", _named("kernel_name")),
    Compiler("C++ extension", "torch.utils.cpp_extension", _named("name")),
    Compiler("tvm-ffi", "tvm_ffi.cpp.extension", _named("name")),
    Compiler("FlashInfer", "flashinfer.jit", _named("self", "name")),
    Compiler("DeepGEMM", "sglang.srt.layers.deep_gemm_wrapper.compile_utils"),
    Compiler("CuTe DSL", "cutlass.base_dsl.compiler"),
    Compiler("CuTe DSL", "cutlass.base_dsl.ast_preprocessor"),
    Compiler("TileLang", "tilelang.engine.lower"),
)
"""Compilers by the modules that work only while they compile."""

COMPILER_PROCESSES = frozenset(
    (
        "nvcc",
        "cicc",
        "ptxas",
        "fatbinary",
        "hipcc",
        "ninja",
        "cc1plus",
        "c++",
        "g++",
        "gcc",
        "clang",
        "clang++",
        "ld",
    )
)


@dataclass(frozen=True)
class Sight:
    """A thread at one moment.

    Args:
        engine: innermost frame of the engine as ``module:function:line``, None if there is none.
        innermost: innermost Python frame, our hooks left out.
        jit: ``compiler: name`` of everything that compiles, outermost first; empty if nothing does.
    """

    engine: str | None
    innermost: str
    jit: tuple[str, ...]


def look(frame: FrameType, skip: str = "") -> Sight:
    """Describe a thread by its innermost frame; frames of the module `skip` are not the thread's own work."""
    engine: str | None = None
    innermost = ""
    jit: list[str] = []
    for each in _outwards(frame):
        module = each.f_globals.get("__name__") or "?"
        if module == skip:
            continue
        if not innermost and not module.startswith(HOOKS):
            innermost = _place(module, each)
        if engine is None and module.startswith(ENGINE):
            engine = _place(module, each)
        compiler = _compiler_of(module)
        if compiler is not None:
            name = compiler.name(each.f_locals)
            if name or not any(_title(text) == compiler.title for text in jit):
                jit.append(f"{compiler.title}: {name}" if name else compiler.title)
    return Sight(engine, innermost or "?", tuple(_without_repeats(reversed(jit))))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(MAX_DEPTH):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _place(module: str, frame: FrameType) -> str:
    return f"{module}:{frame.f_code.co_qualname}:{frame.f_lineno}"


def _compiler_of(module: str) -> Compiler | None:
    for compiler in COMPILERS:
        if module == compiler.module or module.startswith(compiler.module + "."):
            return compiler
    return None


def _title(text: str) -> str:
    return text.partition(":")[0]


def _without_repeats(texts: Iterator[str]) -> list[str]:
    """Each once; a compiler without a name only where it never has one."""
    found = list(dict.fromkeys(texts))
    named = {_title(text) for text in found if ":" in text}
    return [text for text in found if ":" in text or text not in named]


def compiler_processes(pid: int | None = None, proc: Path = Path("/proc")) -> tuple[str, ...]:
    """Names of compilers among the descendants of a process (default: this one), sorted; for compilers in C++."""
    found: set[str] = set()
    pending, seen = [os.getpid() if pid is None else pid], set()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        for path in proc.glob(f"{current}/task/*/children"):
            try:
                pending.extend(int(word) for word in path.read_text().split())
            except (OSError, ValueError):
                continue  # ended meanwhile
        try:
            name = (proc / str(current) / "comm").read_text().strip()
        except OSError:
            continue
        if name in COMPILER_PROCESSES:
            found.add(name)
    return tuple(sorted(found))
