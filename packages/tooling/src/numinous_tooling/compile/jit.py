# SPDX-License-Identifier: Apache-2.0
"""Triton and Gluon kernels to machine code, specialised as their launch would be; needs triton, no GPU."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numinous_tooling.compile import CompileError, NotAvailable, cache
from numinous_tooling.compile.cuda import first_error
from numinous_tooling.workbench import ARCHS, TritonBinary

TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32),
    "sm103": ("cuda", 103, 32),
    "sm120": ("cuda", 120, 32),
    "gfx950": ("hip", "gfx950", 64),
}
"""Architecture -> Triton's backend, its name for the architecture, threads of a warp."""


def compiler_version() -> str:
    """``triton 3.6.0``; raises NotAvailable."""
    try:
        import triton
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise NotAvailable("triton is not installed; pip install triton==3.6.0") from None
    return f"triton {triton.__version__}"


def options_for(binary: TritonBinary, arch: str) -> dict[str, Any]:
    """Launch options on one architecture: those of `options`, replaced by those under the architecture's name."""
    return _on(arch, binary.options)


def _on(arch: str, given: Mapping[str, Any]) -> dict[str, Any]:
    common = {name: value for name, value in given.items() if name not in ARCHS}
    return {**common, **given.get(arch, {})}


def compile_arch(binary: TritonBinary, arch: str) -> Path:
    """Machine code of one specialisation; kept by the hash of its inputs.

    Returns:
        A folder with ``<name>.cubin`` or ``.hsaco``, ``log`` (what ptxas reported, or the assembly) and
        ``metadata.json`` (entry, threads, dynamic_shared, tensor_memory). Raises CompileError, NotAvailable.
    """
    version = compiler_version()
    source = source_of(binary, arch)
    options = options_for(binary, arch)
    inputs = {
        "source": source.hash(),
        "compiler": version,
        "options": repr(sorted(options.items())),
        "arch": arch,
        "gluon": binary.gluon,
        "name": binary.name,
    }
    return cache.kept(
        cache.key(inputs), lambda out: _compile(source, binary.name, arch, options, out)
    )


def function_of(binary: TritonBinary) -> Any:
    """The jitted function of a binary, without what wraps it; raises CompileError."""
    module, _, name = binary.kernel.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise CompileError(f"{binary.name}: {binary.kernel} cannot be loaded: {error}") from error
    # Autotuners and heuristics wrap the jitted function.
    while not hasattr(function, "arg_names") or not hasattr(function, "cache_key"):
        if not hasattr(function, "fn"):
            raise CompileError(
                f"{binary.name}: {binary.kernel} is no jitted function; "
                "was triton imported with TRITON_INTERPRET set?"
            )
        function = function.fn
    return function


def source_of(binary: TritonBinary, arch: str) -> Any:
    """What `triton.compile` takes for a binary on one architecture; raises CompileError."""
    function = function_of(binary)
    given_constants = _on(arch, binary.constants)
    names = function.arg_names
    given = {*binary.signature, *given_constants}
    if given != set(names) or set(binary.signature) & set(given_constants):
        raise CompileError(
            f"{binary.name}: signature and constants must name each of {', '.join(names)} once; "
            f"missing {sorted(set(names) - given)}, unknown {sorted(given - set(names))}, "
            f"twice {sorted(set(binary.signature) & set(given_constants))}"
        )
    if unknown := set(binary.aligned) - set(binary.signature):
        raise CompileError(f"{binary.name}: aligned names no argument of it: {sorted(unknown)}")
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(names):
        found = [["tt.divisibility", 16]] if name in binary.aligned else []
        # Of tensors below 2 GiB; buffer instructions depend on it.
        if TARGETS[arch][0] == "hip" and binary.signature.get(name, "").startswith("*"):
            found.append(["tt.pointer_range", 32])
        if found:
            attributes[(index,)] = found
    signature = {name: binary.signature.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in given_constants.items()}
    if binary.gluon:
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(function, signature, constants, attributes)
    from triton.compiler import ASTSource

    return ASTSource(function, signature, constants, attributes)


def _compile(source: Any, name: str, arch: str, options: Mapping[str, Any], out: Path) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    backend, chip, warp = TARGETS[arch]
    said = io.StringIO()
    with (
        tempfile.TemporaryDirectory(prefix="numinous-triton-") as scratch,
        triton.knobs.cache.scope(),
        triton.knobs.nvidia.scope(),
        contextlib.redirect_stdout(said),
    ):
        # A kept result of Triton would come without the report of ptxas.
        triton.knobs.cache.dir = scratch
        triton.knobs.nvidia.dump_ptxas_log = True
        try:
            kernel = triton.compile(
                source, target=GPUTarget(backend, chip, warp), options=dict(options)
            )
        # Every pass has exceptions of its own.
        except Exception as error:
            first = first_error(said.getvalue()) if said.getvalue() else first_error(str(error))
            raise CompileError(f"{name} for {arch}: {type(error).__name__}: {first}") from error
        metadata = kernel.metadata
        kind = "hsaco" if backend == "hip" else "cubin"
        (out / f"{name}.{kind}").write_bytes(kernel.asm[kind])
        report = kernel.asm["amdgcn"] if backend == "hip" else said.getvalue()
        (out / "log").write_text(report, encoding="utf-8")
        known = {
            "entry": metadata.name,
            "threads": metadata.num_warps * warp,
            "dynamic_shared": metadata.shared,
            "tensor_memory": getattr(metadata, "tmem_size", None) or 0,
        }
        (out / "metadata.json").write_text(json.dumps(known), encoding="utf-8")
