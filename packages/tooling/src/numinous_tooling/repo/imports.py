# SPDX-License-Identifier: Apache-2.0
"""Rules about who imports whom, read from the syntax tree; nothing is imported.

- *arrow*: inside a package hooks → engine → kernels → formats, never back;
- *engine-import*: `sglang` is imported in `engine/` only, under TYPE_CHECKING too; in `workbench/` inside functions, as a peer;
- *torch-free*: hooks, `features.py` and `catalog.py` load without torch, triton, `engine/` and `kernels/`;
- *stdlib-only*: the core of numinous-tooling loads with the standard library alone (everything but the rooms in `WITH_EXTRAS`);
- *siblings*: a package imports itself and numinous-tooling, and the latter only if its pyproject.toml says so.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from numinous_tooling.repo.checkout import Package

TOOLING = "numinous_tooling"
ENGINE = "sglang"
LAYERS = ("formats", "kernels", "engine", "hooks")  # each may import those before it
DECLARATIONS = ("hooks", "features", "catalog")
HEAVY = ("torch", "triton")
# Rooms of numinous-tooling that may import third parties.
WITH_EXTRAS = (
    "bench",
    "cli",
    "compile",
    "device",
    "gate",
    "launch",
    "numerics",
    "scale_layouts",
    "testing",
)
# `python -m numinous_tooling` is the command line.
COMMAND = "__main__"


@dataclass(frozen=True)
class Import:
    """One imported name.

    Args:
        name: absolute dotted name; of `from a import b` it is `a.b`, whether `b` is a module or not.
        line: where.
        eager: whether it happens when the module is loaded: not inside a function, not under TYPE_CHECKING.
    """

    name: str
    line: int
    eager: bool

    @property
    def top(self) -> str:
        """First part of the name."""
        return self.name.partition(".")[0]


def module_name(file: str) -> str:
    """`numinous_x.a.b` for `packages/x/src/numinous_x/a/b.py`, the package for its `__init__.py`."""
    parts = PurePosixPath(file).with_suffix("").parts
    parts = parts[parts.index("src") + 1 :]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.Module, file: str) -> Iterator[Import]:
    """Every import statement of a module, wherever it stands."""
    package = module_name(file).split(".")
    if PurePosixPath(file).name != "__init__.py":
        package.pop()
    return _visit(tree.body, package, eager=True)


def _visit(nodes: Iterable[ast.AST], package: list[str], eager: bool) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, eager)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = [*base, *(node.module or "").split(".")]
            for alias in node.names:
                yield Import(".".join(p for p in (*prefix, alias.name) if p), node.lineno, eager)
        elif isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING":
            yield from _visit(node.body, package, eager=False)
            yield from _visit(node.orelse, package, eager)
        else:
            later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _visit(ast.iter_child_nodes(node), package, eager and not later)


def check_imports(package: Package, file: str, tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Findings of one module below `packages/<x>/src/<import name>/`, as line, rule, text."""
    own = module_name(file).split(".")
    room = own[1] if len(own) > 1 else ""
    for item in imports_of(tree, file):
        for rule, text in _judge(package, room, item):
            yield item.line, rule, text


def _judge(package: Package, room: str, item: Import) -> Iterator[tuple[str, str]]:
    parts = item.name.split(".")
    target = parts[1] if item.top == package.module and len(parts) > 1 else ""
    if room in LAYERS and target in LAYERS and LAYERS.index(target) > LAYERS.index(room):
        yield "arrow", f"{room} imports {target}; the arrow is hooks → engine → kernels → formats"
    if item.top == ENGINE and room != "engine" and (room != "workbench" or item.eager):
        yield "engine-import", f"{item.name} is imported outside engine/; move the code there"
    if (
        room in DECLARATIONS
        and item.eager
        and (item.top in HEAVY or target in ("engine", "kernels"))
    ):
        yield (
            "torch-free",
            f"{item.name} is imported when {room} loads; import it inside the function",
        )
    if package.module == TOOLING and room not in (*WITH_EXTRAS, COMMAND) and item.eager:
        if target in WITH_EXTRAS:
            yield (
                "stdlib-only",
                f"the core imports {item.name}, which needs an extra; import it inside the function",
            )
        elif item.top not in (TOOLING, ENGINE) and item.top not in sys.stdlib_module_names:
            yield (
                "stdlib-only",
                f"the core imports {item.top}; import it inside the function, or move the code to {' or '.join(WITH_EXTRAS)}",
            )
    if item.top.startswith("numinous_") and item.top != package.module:
        if item.top != TOOLING:
            yield (
                "siblings",
                f"{item.top} is another package; what both need moves to numinous-tooling",
            )
        elif "numinous-tooling" not in package.siblings:
            yield (
                "siblings",
                "numinous-tooling is imported and pyproject.toml does not depend on it",
            )
