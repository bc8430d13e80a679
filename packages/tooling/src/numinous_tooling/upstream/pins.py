# SPDX-License-Identifier: Apache-2.0
"""Digests: of what each fix was written against, and of what our own hooks meet once fixes are in place.

A fix is rendered from pristine files, so its pins hold one digest. A hook meets the file as it is on disk: where a fix
changes a function that a hook pins, the hook's pin has to accept ``stock + <fix>`` as well, for each set of the fixes
that touch it.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from numinous_tooling.patching.core import CORE
from numinous_tooling.patching.engine import PACKAGE, EngineTree
from numinous_tooling.patching.errors import PatchError
from numinous_tooling.patching.feature import Edit, Feature, Pin, Series
from numinous_tooling.patching.pins import (
    changed_functions,
    digest_in,
    forget_parsed,
    resolve,
)
from numinous_tooling.patching.series import render_series

from .headers import Fix, read_fixes
from .series import PINS, feature_of, read_pins

MOST_TOGETHER = 4
"""Fixes of one pinned function of which every set is judged; of more, each alone, all, and all but one."""


@dataclass(frozen=True)
class Changed:
    """An engine tree with some files replaced; None: deleted. Fits `EngineTree`."""

    under: EngineTree
    contents: dict[str, bytes | None]
    label: str

    @property
    def version(self) -> str:
        """Version of the tree below."""
        return self.under.version

    @property
    def where(self) -> str:
        """Path shown to the user."""
        return f"{self.under.where} + {self.label}"

    def read(self, path: str) -> bytes:
        """Bytes of a file; raises FileNotFoundError."""
        if path not in self.contents:
            return self.under.read(path)
        content = self.contents[path]
        if content is None:
            raise FileNotFoundError(path)
        return content

    def files(self, prefix: str = "") -> Iterator[str]:
        """Every file path below `prefix`, sorted."""
        names = {path for path in self.under.files(prefix) if path not in self.contents}
        new = {
            path for path, content in self.contents.items() if content and path.startswith(prefix)
        }
        yield from sorted(names | new)


def pins_of(fix: Fix, tree: EngineTree) -> tuple[dict[str, str], list[str]]:
    """Digests of what the header names, and lines on what it names wrongly or leaves out.

    A constant has no digest (an empty text): that the patch applies exactly is all that guards it.

    Args:
        fix: a fix of the engine.
        tree: the pristine engine of the fix's version.
    """
    found: dict[str, str] = {}
    lines: list[str] = []
    for name in fix.header["functions"]:
        target, hash_, occurrence = name.partition("#")
        try:
            constant = not hash_ and _is_constant(tree, target)
            found[name] = (
                "" if constant else digest_in(tree, target, int(occurrence) if hash_ else None)
            )
        except (PatchError, ValueError) as error:
            lines.append(f"{fix.name}: functions: {error}")
    try:
        after = render_series(tree.read, _series(fix))
    except PatchError as error:
        return found, [*lines, f"{fix.name}: {error}"]
    named: dict[str, set[str]] = {}
    for name in found:
        path, qualname = resolve(tree, name.partition("#")[0])
        named.setdefault(path, set()).add(qualname)
    for path, content in after.items():
        if not path.endswith(".py"):
            continue
        try:
            before = tree.read(path)
        except FileNotFoundError:
            continue
        for function in changed_functions(before, content or b""):
            parts = function.split(".")
            outer = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
            if not outer & named.get(path, set()):
                module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                lines.append(
                    f"{fix.name}: functions lacks {PACKAGE}.{module}:{function}, which the patch changes"
                )
        if path not in named:
            lines.append(f"{fix.name}: functions names nothing in {path}, which the patch changes")
    return found, lines


def record(root: Path, tree: EngineTree) -> list[str]:
    """Write `PINS` for every fix of the engine; lines on what does not hold, in which case nothing is written."""
    found: dict[str, dict[str, str]] = {}
    lines: list[str] = []
    for fix in _ours(root):
        if fix.header["version"] != tree.version:
            lines.append(
                f"{fix.name} is against {fix.header['version']} and this is {tree.version}"
            )
            continue
        found[fix.id], wrong = pins_of(fix, tree)
        lines += wrong
    forget_parsed()
    if not lines:
        text = json.dumps(found, indent=1, sort_keys=True) + "\n"
        (root / PINS).write_text(text, encoding="utf-8")
    return lines


def stale(root: Path) -> list[str]:
    """Lines on fixes whose recorded digests are not those of the functions that the header names; reads no engine."""
    recorded = read_pins(root)
    fixes = {fix.id: fix for fix in _ours(root)}
    lines = [
        f"{fix.name}: {PINS} has no digests of {', '.join(missing)}"
        for fix in fixes.values()
        if (missing := sorted(set(fix.header["functions"]) - recorded.get(fix.id, {}).keys()))
    ]
    lines += [
        f"{name}: {PINS} holds digests that no header asks for"
        for name, pins in recorded.items()
        if name not in fixes or pins.keys() - set(fixes[name].header["functions"])
    ]
    return lines


def conflicts(features: Iterable[Feature], root: Path, tree: EngineTree) -> list[str]:
    """Pins of hooks and registrations that refuse the engine with some of the fixes in place, as lines.

    Args:
        features: of any room; those that live on disk are left out, they are rendered from pristine files.
        root: folder of the fixes.
        tree: the pristine engine.

    Returns:
        One line for each pin and set of fixes: the label and the digest that the pin has to accept.
    """
    fixes = {fix.id: fix for fix in _ours(root) if fix.header["version"] == tree.version}
    touched = {name: set(render_series(tree.read, _series(fix))) for name, fix in fixes.items()}
    lines: list[str] = []
    pinned: dict[str, list[tuple[str, Pin]]] = {}
    for feature, pin in _memory_pins([*features, CORE]):
        try:
            pinned.setdefault(resolve(tree, pin.target)[0], []).append((feature, pin))
        except PatchError as error:
            lines.append(f"{feature}: {error}")

    @functools.cache
    def with_fixes(*chosen: str) -> EngineTree:
        contents: dict[str, bytes | None] = {}
        changed = Changed(tree, contents, " + ".join(chosen))
        for name in chosen:
            contents.update(render_series(changed.read, _series(fixes[name])))
        return changed if chosen else tree

    @functools.cache
    def digests(path: str, *chosen: str) -> list[tuple[str, str]]:
        # Of all pins of a text: to parse it takes longer than everything else here.
        return [_digest(with_fixes(*chosen), pin) for _, pin in pinned[path]]

    for path, pins in pinned.items():
        near = [name for name in fixes if path in touched[name]]
        for number, (feature, pin) in enumerate(pins):
            stock, problem = digests(path)[number]
            if problem:
                lines.append(f"{feature}: {problem}")
                continue
            here = [name for name in near if digests(path, name)[number] != (stock, "")]
            for chosen in _sets(here):
                digest, problem = digests(path, *chosen)[number]
                if problem:
                    lines.append(f"{feature}: {problem}")
                elif digest not in pin.accepts.values():
                    label = " + ".join([f"stock {tree.version}", *chosen])
                    lines.append(f"{feature}: {pin.target} has to accept {label!r}: {digest!r}")
    forget_parsed()
    return lines


def _is_constant(tree: EngineTree, target: str) -> bool:
    """Whether a target names a variable that its module assigns at top level."""
    path, name = resolve(tree, target)
    for node in ast.parse(tree.read(path)).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(one, ast.Name) and one.id == name for one in targets):
            return True
    return False


def _sets(fixes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for size in range(1, len(fixes) + 1):
        if len(fixes) <= MOST_TOGETHER or size in (1, len(fixes) - 1, len(fixes)):
            yield from itertools.combinations(fixes, size)


def _digest(tree: EngineTree, pin: Pin) -> tuple[str, str]:
    """The digest of what a tree holds, or why there is none."""
    try:
        return digest_in(tree, pin.target, pin.occurrence), ""
    except PatchError as error:
        return "", f"{tree.where}: {error}"


def _memory_pins(features: Iterable[Feature]) -> Iterator[tuple[str, Pin]]:
    for feature in features:
        if feature.on_disk:
            continue
        seen = set()
        for patch in feature.patches:
            for pin in patch.pins:
                if (
                    not isinstance(patch, Edit | Series)
                    and (pin.target, pin.occurrence) not in seen
                ):
                    seen.add((pin.target, pin.occurrence))
                    yield feature.id, pin


def _ours(root: Path) -> list[Fix]:
    return [fix for fix in read_fixes(root) if fix.applied]


def _series(fix: Fix) -> Series:
    (patch,) = feature_of(fix, {}).patches
    assert isinstance(patch, Series)
    return patch
