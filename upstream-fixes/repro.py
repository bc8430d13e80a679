# SPDX-License-Identifier: Apache-2.0
"""Helpers of the reproductions: the tree under test, one shipped function out of it, stand-ins for what needs a GPU.

A reproduction runs in its own process with ``PYTHONPATH=<tree under test>:upstream-fixes``::

    import repro

    quantize = repro.load_function("srt/layers/x.py", "KVFP4.quantize", {"torch": torch})

The text that runs is always the file in the tree, never a copy of it in the test.
"""

from __future__ import annotations

import ast
import copy
import functools
import mmap
import os
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TREE = "UPSTREAM_TREE"
"""Environment variable: the folder that holds the package under test, instead of a search of sys.path."""

DEVICE = os.environ.get("UPSTREAM_DEVICE", "cpu")
"""Where the tensors of a test with kernels lie: ``cpu``, or a GPU that ``upstream run --device`` names."""


def tree(package: str = "sglang") -> Path:
    """Folder of the package under test: below ``$UPSTREAM_TREE``, or else of the first sys.path entry that holds it.

    Raises:
        LookupError: nowhere; the reproduction then has nothing to say.
    """
    named = os.environ.get(TREE)
    for entry in [named] if named else sys.path:
        folder = Path(entry or ".") / package
        if folder.is_dir():
            return folder.resolve()
    raise LookupError(f"no folder {package} in {named or 'sys.path'}")


def load_function(
    path: str,
    qualname: str,
    namespace: dict[str, Any] | None = None,
    *,
    package: str = "sglang",
    decorators: Iterable[str] = ("staticmethod", "classmethod", "property", "contextmanager"),
    occurrence: int | None = None,
) -> Any:
    """A function, method or class of a shipped file, executed alone.

    Args:
        path: file below the package, for example ``"srt/mem_cache/memory_pool.py"``.
        qualname: dots nest in classes, ``"Pool.move_kv_cache"``; of a method the plain function is returned, which
            takes ``self`` as its first argument (any object with the attributes that the method reads).
        namespace: globals that its body reads; the object is also put there, so that later ones can call it.
        package: top-level package of the project.
        decorators: last name of those that a *module-level* object keeps; ``triton.jit`` is kept with ``"jit"``.
            Methods are taken without any, members of an extracted class with all.
        occurrence: which definition, counted from 0, where the file has several of that name (else the only one).

    Raises:
        LookupError: the file has no such definition, or more than one and `occurrence` does not choose.
    """
    file = tree(package) / path
    found = [node for name, node in _definitions(_parse(file).body, "") if name == qualname]
    if not found or (occurrence is None and len(found) > 1):
        raise LookupError(f"{file} has {len(found)} definitions of {qualname}")
    node = copy.copy(found[occurrence or 0])  # the parsed file is shared
    kept = set(decorators) if "." not in qualname else set()
    node.decorator_list = [one for one in node.decorator_list if _last_name(one) in kept]
    scope = {"__name__": f"{package}.under_test"} if namespace is None else namespace
    scope.setdefault("__name__", f"{package}.under_test")
    # Annotations name types of modules that are not imported here; they are text, as under this __future__ import.
    module = ast.Module(
        [
            ast.ImportFrom("__future__", [ast.alias("annotations")], 0, lineno=1, col_offset=0),
            node,
        ],
        [],
    )
    ast.fix_missing_locations(module)
    exec(compile(module, str(file), "exec", dont_inherit=True), scope)
    return scope[node.name]


def load_constants(
    path: str,
    names: Iterable[str],
    namespace: dict[str, Any] | None = None,
    *,
    package: str = "sglang",
) -> dict[str, Any]:
    """Module-level assignments of a shipped file, executed in the order of the file into `namespace`.

    Raises:
        LookupError: the file assigns one of the names nowhere at module level.
    """
    file = tree(package) / path
    left = set(names)
    scope: dict[str, Any] = {} if namespace is None else namespace
    for node in _parse(file).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        here = {one.id for one in targets if isinstance(one, ast.Name)} & set(names)
        if here:
            exec(compile(ast.Module([node], []), str(file), "exec", dont_inherit=True), scope)
            left -= here
    if left:
        raise LookupError(f"{file} does not assign {', '.join(sorted(left))}")
    return scope


def stub(name: str, **attributes: Any) -> types.ModuleType:
    """Put a stand-in module (and empty parents, where missing) into sys.modules and return it."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        part = ".".join(parts[:end])
        if part not in sys.modules:
            module = types.ModuleType(part)
            module.__path__ = []
            sys.modules[part] = module
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
    for key, value in attributes.items():
        setattr(sys.modules[name], key, value)
    return sys.modules[name]


def bare_packages(*names: str) -> None:
    """Packages of the tree whose ``__init__`` is not run: ``bare_packages("sglang.srt")``; missing parents alike.

    Modules below them are then the shipped ones, and imported by themselves.
    """
    for name in names:
        first, *rest = name.split(".")
        parent = name.rpartition(".")[0]
        if rest and parent not in sys.modules:
            bare_packages(parent)
        module = types.ModuleType(name)
        module.__path__ = [str(tree(first).joinpath(*rest))]
        sys.modules[name] = module
        if rest:
            setattr(sys.modules[parent], rest[-1], module)


def lazy_zeros(elements: int, dtype: Any, guard: int = 0) -> Any:
    """A tensor [elements] of zeros that only takes the pages which are touched, `guard` more elements in front of it.

    For pools past 2^31 elements: a 32-bit offset that wraps points 2^32 elements back, into a guard of 2^31,
    so that the wrong access gives wrong values and not a crash. (On a GPU all of it is taken.)
    """
    import torch

    if DEVICE != "cpu":
        return torch.zeros(guard + elements, dtype=dtype, device=DEVICE)[guard:]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    space = mmap.mmap(-1, dtype.itemsize * (guard + elements), flags=flags)
    return torch.frombuffer(space, dtype=dtype)[guard:]


def use_kernels() -> None:
    """Make the test's Triton kernels run: on the CPU in the interpreter, on a GPU compiled; before triton is imported.

    On a GPU new tensors lie there unless the test says otherwise.

    Raises:
        RuntimeError: triton has been imported already and would compile for a CPU.
    """
    if DEVICE != "cpu":
        import torch

        torch.set_default_device(DEVICE)
    elif "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton is imported already; call use_kernels() first")
    else:
        os.environ["TRITON_INTERPRET"] = "1"


def generator(seed: int) -> Any:
    """A seeded random generator of `DEVICE`."""
    import torch

    return torch.Generator(DEVICE).manual_seed(seed)


@functools.cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes(), str(file))


def _definitions(body: Iterable[ast.AST], prefix: str) -> Iterator[tuple[str, Any]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.stmt | ast.ExceptHandler):
            yield from _definitions(ast.iter_child_nodes(node), prefix)


def _last_name(decorator: ast.expr) -> str:
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
