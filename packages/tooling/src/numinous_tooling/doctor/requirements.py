# SPDX-License-Identifier: Apache-2.0
"""Requirement lines of a distribution: does a version satisfy one, and does its marker hold here?

The forms of ``Requires-Dist`` that occur in the engine, torch and their like: name, extras, comma-separated
specifiers (``== != >= <= < > ~=``, ``== X.*``) and markers of ``and``, ``or``, comparisons and parentheses. Every other form
(URLs, ``===``, versions that are not of PEP 440) yields None: undecided, and reported as such.
"""

from __future__ import annotations

import ast
import operator
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_REQUIREMENT = re.compile(
    r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^\]]*)\])?\s*\(?([^;()]*)\)?\s*(?:;(.*))?", re.DOTALL
)
_SPECIFIER = re.compile(r"\s*(~=|==|!=|<=|>=|<|>)\s*([A-Za-z0-9.!+_-]+?)(\.\*)?\s*")
_VERSION = re.compile(
    r"v?(?:(\d+)!)?(\d+(?:\.\d+)*)"
    r"(?:[-_.]?(a|alpha|b|beta|c|rc|pre|preview)[-_.]?(\d*))?"
    r"(?:-(\d+)|[-_.]?(post|rev|r)[-_.]?(\d*))?"
    r"(?:[-_.]?(dev)[-_.]?(\d*))?"
    r"(?:\+([a-z0-9]+(?:[-_.][a-z0-9]+)*))?",
    re.IGNORECASE,
)
_PHASE = {"alpha": "a", "beta": "b", "c": "rc", "pre": "rc", "preview": "rc"}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True)
class Version:
    """A version of PEP 440 in comparable form; `local` is kept apart because pins without one ignore it."""

    epoch: int
    release: tuple[int, ...]
    pre: tuple[str, int] | None
    post: int | None
    dev: int | None
    local: str | None

    @property
    def key(self) -> tuple[object, ...]:
        """Sort key without the local part; begins with epoch and release."""
        release = self.release
        while len(release) > 1 and release[-1] == 0:
            release = release[:-1]
        if self.pre is not None:
            pre: tuple[int, str, int] = (1, *self.pre)
        else:
            pre = (0, "", 0) if self.dev is not None and self.post is None else (2, "", 0)
        post = -1 if self.post is None else self.post
        dev = sys.maxsize if self.dev is None else self.dev
        return (self.epoch, release, pre, post, dev)


@dataclass(frozen=True)
class Requirement:
    """One line of ``Requires-Dist``. `specifiers` is the text after the name, ``==2.13.0`` for example."""

    name: str
    extras: tuple[str, ...]
    specifiers: str
    marker: str


def normalised(name: str) -> str:
    """Name of a distribution in the one spelling of PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_requirement(line: str) -> Requirement | None:
    """A requirement, or None for a line of another form."""
    match = _REQUIREMENT.fullmatch(line)
    if match is None:
        return None
    name, extras, specifiers, marker = match.groups(default="")
    parts = tuple(filter(None, (extra.strip() for extra in extras.split(","))))
    return Requirement(normalised(name), parts, specifiers.strip(), marker.strip())


def parse_version(text: str) -> Version | None:
    """A version, or None if it is not of PEP 440."""
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        return None
    epoch, release, phase, phase_number, dash, post, post_number, dev, dev_number, local = (
        match.groups()
    )
    phase = phase and _PHASE.get(phase.lower(), phase.lower())
    return Version(
        int(epoch or 0),
        tuple(int(part) for part in release.split(".")),
        (phase, int(phase_number or 0)) if phase else None,
        int(dash) if dash else int(post_number or 0) if post else None,
        int(dev_number or 0) if dev else None,
        re.sub(r"[-_]", ".", local.lower()) if local else None,
    )


def satisfies(version: str, specifiers: str) -> bool | None:
    """Whether a version meets all of ``">=1.0,<2"``; None if a part of it is not decided.

    A pre-release that somebody installed counts as wanted.
    """
    have = parse_version(version)
    verdicts = [_meets(have, part) for part in specifiers.split(",") if part.strip()]
    return _all(verdicts)


def marker_holds(
    marker: str, extra: str = "", environment: Mapping[str, str] | None = None
) -> bool | None:
    """Whether a marker holds for this Python and platform; None if it is of an unknown form.

    Args:
        marker: the text after ``;``; empty holds.
        extra: the extra that is asked for.
        environment: values of the marker variables, for tests.
    """
    if not marker:
        return True
    values = {**_marker_environment(), "extra": extra, **(environment or {})}
    try:
        # The grammar of markers is a subset of Python's expressions; nothing is executed.
        tree = ast.parse(marker.strip(), mode="eval").body
    except SyntaxError:
        return None
    return _evaluate(tree, values)


def _meets(have: Version | None, part: str) -> bool | None:
    match = _SPECIFIER.fullmatch(part)
    want = parse_version(match[2]) if match else None
    if match is None or want is None or have is None:
        return None
    sign, prefix = match[1], bool(match[3])
    if prefix or sign == "~=":
        release = want.release if prefix else want.release[:-1]
        padded = have.release + (0,) * len(release)
        same = have.epoch == want.epoch and padded[: len(release)] == release
        if sign == "~=":
            return same and have.key >= want.key
        return same if sign == "==" else not same if sign == "!=" else None
    if sign in ("==", "!=") and want.local is not None:
        return _COMPARE[sign]((have.key, have.local), (want.key, want.local))
    same_release = have.key[:2] == want.key[:2]
    # PEP 440: "<2" does not admit 2rc1, and ">1" not 1.post1.
    early = have.pre is not None or have.dev is not None
    if sign == "<" and same_release and early and want.pre is None and want.dev is None:
        return False
    if sign == ">" and same_release and have.post is not None and want.post is None:
        return False
    return _COMPARE[sign](have.key, want.key)


def _evaluate(node: ast.expr, values: Mapping[str, str]) -> bool | None:
    if isinstance(node, ast.BoolOp):
        verdicts = [_evaluate(value, values) for value in node.values]
        if isinstance(node.op, ast.And):
            return _all(verdicts)
        return _negated(_all([_negated(verdict) for verdict in verdicts]))
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return None
    left, right = (_text(side, values) for side in (node.left, node.comparators[0]))
    if left is None or right is None:
        return None
    sign = node.ops[0]
    if isinstance(sign, ast.In | ast.NotIn):
        return (left in right) == isinstance(sign, ast.In)
    signs = {ast.Eq: "==", ast.NotEq: "!=", ast.LtE: "<=", ast.GtE: ">=", ast.Lt: "<", ast.Gt: ">"}
    text = signs.get(type(sign))
    if text is None:
        return None
    variables = [side.id for side in (node.left, node.comparators[0]) if isinstance(side, ast.Name)]
    if any(name in ("python_version", "python_full_version") for name in variables):
        if isinstance(node.left, ast.Name):
            return satisfies(left, f"{text}{right}")
        return satisfies(right, f"{text.translate(str.maketrans('<>', '><'))}{left}")
    return _COMPARE[text](left, right) if text in ("==", "!=") else None


def _text(node: ast.expr, values: Mapping[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return values.get(node.id)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _all(verdicts: list[bool | None]) -> bool | None:
    if False in verdicts:
        return False
    return None if None in verdicts else True


def _negated(verdict: bool | None) -> bool | None:
    return None if verdict is None else not verdict


def _marker_environment() -> dict[str, str]:
    return {
        "python_version": ".".join(platform.python_version_tuple()[:2]),
        "python_full_version": platform.python_version(),
        "sys_platform": sys.platform,
        "platform_system": platform.system(),
        "platform_machine": platform.machine(),
        "platform_release": platform.release(),
        "platform_python_implementation": platform.python_implementation(),
        "implementation_name": sys.implementation.name,
        "os_name": os.name,
    }
