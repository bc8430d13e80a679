# SPDX-License-Identifier: Apache-2.0
"""``header.toml`` of one fix: what it holds, and whether it holds all of it.

Every key of `REQUIRED` is there and not empty. ``[doctor]`` says when a serve command meets the bug::

    [doctor]
    says = "one line for the user"
    when = [
        { flag = "kv_cache_dtype", is = ["nvfp4", "fp4_mx_block16"] },
        { config = "architectures", any = ["Gemma3ForCausalLM"] },
    ]

All items of ``when`` must hold; `hit` evaluates them. ``flag`` is a field of the engine's server arguments, ``env`` a
variable, ``config`` a key of the model's config.json (dots nest; a key that is missing at the top is looked for in
``text_config``). The tests are ``is`` and ``not`` (lists of values), ``any`` (a list in the config shares a member;
for a single value the same as ``is``), ``ends`` (a text ends with one of a list), ``above`` and ``below`` (a number), ``set`` (true or false: a value is there).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from numinous_tooling.patching.errors import PatchError

FOLDER = "upstream-fixes"
ROOT_GROUP = "numinous.upstream"
"""Entry point of the one distribution that carries the fixes: a function that returns their folder."""


@dataclass(frozen=True)
class Project:
    """What a project is called on the index, what its package is called, and whether `numinous apply` reaches it."""

    distribution: str
    package: str
    applied: bool = False


PROJECTS = {
    "sglang": Project("sglang", "sglang", applied=True),
    "flashinfer": Project("flashinfer-python", "flashinfer"),
    "deepgemm": Project("sgl-deep-gemm", "deep_gemm"),
    "fla": Project("fla-core", "fla"),
    "aiter": Project("amd-aiter", "aiter"),
    "pytorch": Project("torch", "torch"),
}
EVIDENCE = ("run", "emulated", "derived")
STATES = ("still", "fixed", "changed", "unknown")
BY_READING = "by reading"

REQUIRED: dict[str, type] = {
    "project": str,
    "version": str,
    "title": str,
    "first_seen": str,
    "where": list,
    "functions": list,
    "symptom": str,
    "cause": str,
    "trigger": str,
    "hit": str,
    "origin": str,
    "forwarded": str,
    "last_update": str,
    "evidence": str,
    "newest": dict,
}
OPTIONAL: dict[str, type] = {
    "reproduction": str,
    "fails_with": list,
    "device": bool,
    "doctor": dict,
}
FILES = {"header.toml", "fix.patch", "test_repro.py"}
PORTS = "ports"
"""Folder of a fix with the same patch against newer releases, ``<version>.patch``: to be sent, never applied here."""

SOURCES = ("flag", "env", "config")
TESTS = ("is", "not", "any", "ends", "above", "below", "set")
MAX_TITLE = 100

_NAME = re.compile(r"(\d{4})-([a-z0-9]+(?:-[a-z0-9]+)*)")
_PLACE = re.compile(r"[\w./-]+\.\w+:\d+(?:-\d+)?")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


class HeaderError(PatchError):
    """A folder of fixes cannot be read: what, where, what to do."""


@dataclass(frozen=True)
class Fix:
    """One folder of a fix; `header` as written."""

    path: Path
    header: Mapping[str, Any]

    @property
    def project(self) -> str:
        """Name of the folder above it, a key of `PROJECTS`."""
        return self.path.parent.name

    @property
    def number(self) -> str:
        """Four digits: the place in the order of its project."""
        return self.path.name.partition("-")[0]

    @property
    def slug(self) -> str:
        """Name behind the number."""
        return self.path.name.partition("-")[2]

    @property
    def id(self) -> str:
        """Feature id, and the name in every report; of another project than the engine with the project in front."""
        first = "" if self.applied else f"{self.project}_"
        return f"upstream.{first}{self.slug}".replace("-", "_")

    @property
    def name(self) -> str:
        """``<project>/<nnnn>-<slug>``."""
        return f"{self.project}/{self.path.name}"

    @property
    def package(self) -> str:
        """Top-level package that the patch changes."""
        return PROJECTS[self.project].package

    @property
    def applied(self) -> bool:
        """Whether `numinous apply` can put it in place; otherwise it is a patch to send."""
        return PROJECTS[self.project].applied

    @property
    def patch(self) -> Path:
        """The patch against the released layout."""
        return self.path / "fix.patch"

    @property
    def test(self) -> Path | None:
        """The reproduction, or None for a bug that was found by reading only."""
        file = self.path / "test_repro.py"
        return file if file.is_file() else None

    @property
    def on_device(self) -> bool:
        """Whether the reproduction also runs with the compiled kernels on a GPU."""
        return bool(self.header.get("device"))

    @cached_property
    def patch_text(self) -> str:
        """Text of the patch, empty where there is none."""
        return (
            self.patch.read_text(encoding="utf-8", errors="replace") if self.patch.is_file() else ""
        )

    @property
    def subject(self) -> str:
        """Subject of the patch's mail header without ``[PATCH]``, folded lines joined."""
        found = re.search(r"^Subject: (.*(?:\n[ \t].*)*)", self.patch_text, re.MULTILINE)
        text = re.sub(r"\s+", " ", found[1]) if found else ""
        return re.sub(r"^\[PATCH[^\]]*\] ", "", text)


def fixes_root() -> Path | None:
    """Folder of the fixes of the installed distribution that carries them; None where none is installed.

    Raises:
        HeaderError: two distributions say they carry them, or the one cannot be loaded.
    """
    found = sorted(entry_points(group=ROOT_GROUP), key=lambda entry: entry.name)
    if not found:
        return None
    if len(found) > 1:
        raise HeaderError(
            f"{len(found)} installed packages carry upstream fixes; uninstall all but one"
        )
    try:
        return Path(found[0].load()())
    except Exception as error:
        raise HeaderError(
            f"entry point {found[0].value} cannot be loaded ({type(error).__name__}: {error}); reinstall it"
        ) from error


def read_fixes(root: Path, patterns: Sequence[str] = ()) -> list[Fix]:
    """Fixes below a folder, by project (in the order of `PROJECTS`) and number.

    Args:
        root: the folder.
        patterns: ids, ``<project>/<nnnn>-<slug>`` or parts of it, with ``*`` and ``?``; none: all of them.

    Raises:
        HeaderError: a header is missing or is no TOML.
    """

    def wanted(path: Path) -> bool:
        fix = Fix(path, {})
        names = (fix.id, fix.name, path.name, fix.number, fix.slug)
        return any(fnmatch(name, pattern) for name in names for pattern in patterns)

    return [_read(path) for path in fix_folders(root) if not patterns or wanted(path)]


def fix_folders(root: Path) -> list[Path]:
    """The folders ``<project>/<nnnn>-<slug>`` in order, whatever they hold."""
    return [
        path
        for project in PROJECTS
        for path in sorted((root / project).glob("[0-9]*-*"))
        if path.is_dir() and any(path.iterdir())
    ]


def _read(path: Path) -> Fix:
    file = path / "header.toml"
    try:
        return Fix(path, tomllib.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise HeaderError(f"{file} does not exist; write it") from None
    except tomllib.TOMLDecodeError as error:
        raise HeaderError(f"{file}: {error}; mend it") from None


def fix_problems(root: Path) -> Iterator[tuple[str, str]]:
    """What does not hold in the folders below `root`: (path relative to it, one line)."""
    fixes = []
    for path in fix_folders(root):
        try:
            fixes.append(_read(path))
        except HeaderError as error:
            name = f"{path.parent.name}/{path.name}/header.toml"
            yield name, str(error).removeprefix(f"{path / 'header.toml'}").lstrip(": ")
    seen: dict[tuple[str, str], str] = {}
    for fix in fixes:
        for line in _header_problems(fix):
            yield f"{fix.name}/header.toml", line
        for file, line in _file_problems(fix):
            yield f"{fix.name}/{file}", line
        # Unique: ids among all projects, numbers, which are the order, inside of one.
        for key, what in (
            (("id", fix.id), "name"),
            ((fix.project, fix.number), "number"),
        ):
            first = seen.setdefault(key, fix.name)
            if first != fix.name:
                yield f"{fix.name}/header.toml", f"has the {what} of {first}"


def _header_problems(fix: Fix) -> Iterator[str]:
    header = fix.header
    if not _NAME.fullmatch(fix.path.name):
        yield f"{fix.path.name} is not of the form nnnn-word-word"
    for key, kind in {**REQUIRED, **OPTIONAL}.items():
        if key not in header:
            if key in REQUIRED:
                yield f"{key} is missing"
        elif not isinstance(header[key], kind):
            yield f"{key} is no {kind.__name__}"
        elif not header[key]:
            yield f"{key} is empty"
        elif kind is list and not all(isinstance(item, str) and item for item in header[key]):
            yield f"{key} holds something else than texts"
    if unknown := sorted(header.keys() - REQUIRED.keys() - OPTIONAL.keys()):
        yield f"unknown keys {', '.join(unknown)}"
    if header.get("project") != fix.project:
        yield f"project is {header.get('project')!r}, the folder says {fix.project}"
    title = str(header.get("title", ""))
    if "\n" in title or title.endswith(".") or len(title) > MAX_TITLE:
        yield f"title is one line of at most {MAX_TITLE} characters without a full stop"
    for key, words in (("evidence", EVIDENCE), ("forwarded", None), ("last_update", None)):
        value = header.get(key)
        if words and isinstance(value, str) and value not in words:
            yield f"{key} {value!r} is not among {', '.join(words)}"
    if not _DATE.fullmatch(str(header.get("last_update", ""))):
        yield "last_update is not of the form YYYY-MM-DD"
    yield from _place_problems(fix)
    yield from _newest_problems(header.get("newest"))
    by_reading = header.get("evidence") == "derived"
    if by_reading != (header.get("reproduction") == BY_READING) or by_reading != (fix.test is None):
        yield (
            f'evidence "derived", reproduction = "{BY_READING}" and no test_repro.py go together; '
            "everything else has a test"
        )
    if "doctor" in header:
        yield from _doctor_problems(header["doctor"])


def _place_problems(fix: Fix) -> Iterator[str]:
    for place in _texts(fix.header.get("where")):
        if not _PLACE.fullmatch(place):
            yield f"where: {place!r} is not of the form <file below {fix.package}/>:<line>"
    for name in _texts(fix.header.get("functions")):
        module, colon, qualname = name.partition(":")
        parts = [*module.split("."), *qualname.partition("#")[0].split(".")]
        if module.partition(".")[0] != fix.package or not colon:
            yield f"functions: {name!r} is not of the form {fix.package}.module:Qualified.name"
        elif not all(part.isidentifier() for part in parts):
            yield f"functions: {name!r} is no name of Python"


def _newest_problems(newest: object) -> Iterator[str]:
    if not isinstance(newest, Mapping):
        return
    if set(newest) != {"version", "state", "note"} or not all(
        isinstance(value, str) for value in newest.values()
    ):
        yield "newest holds version, state and note, each a text"
    elif newest["state"] not in STATES:
        yield f"newest.state {newest['state']!r} is not among {', '.join(STATES)}"


def _doctor_problems(doctor: object) -> Iterator[str]:
    if not isinstance(doctor, Mapping):
        return
    if set(doctor) != {"says", "when"} or not isinstance(doctor.get("says"), str):
        yield 'doctor holds says = "one line" and when = [ conditions ], which must all hold; nothing else'
        return
    when = doctor["when"]
    if not isinstance(when, list) or not when:
        yield "doctor.when is no list of conditions"
        return
    for item in when:
        if line := condition_problem(item):
            yield f"doctor.when: {line}"


def condition_problem(item: object) -> str | None:
    """What is wrong with one condition of ``[doctor] when``, or None."""
    if not isinstance(item, Mapping):
        return f"{item!r} is no table"
    sources = [key for key in SOURCES if key in item]
    tests = [key for key in TESTS if key in item]
    if len(sources) != 1 or len(tests) != 1 or len(item) != 2:
        return (
            f"{dict(item)} does not hold one of {', '.join(SOURCES)} and one of {', '.join(TESTS)}"
        )
    if not isinstance(item[sources[0]], str):
        return f"{dict(item)}: {sources[0]} names no text"
    value = item[tests[0]]
    wanted: tuple[type, ...] = {"above": (int, float), "below": (int, float), "set": (bool,)}.get(
        tests[0], (list,)
    )
    if not isinstance(value, wanted) or value == []:
        return f"{dict(item)}: {tests[0]} takes {' or '.join(one.__name__ for one in wanted)}"
    return None


def _file_problems(fix: Fix) -> Iterator[tuple[str, str]]:
    for path in sorted(fix.path.rglob("*")):
        name = path.relative_to(fix.path).as_posix()
        if path.is_dir() or "__pycache__" in name:
            continue
        port = re.fullmatch(rf"{PORTS}/\d+(\.\w+)+\.patch", name)
        if name not in FILES and not port:
            yield name, f"a fix holds {', '.join(sorted(FILES))} and {PORTS}/<version>.patch"
        if name.endswith(".patch"):
            text = path.read_text(encoding="utf-8", errors="replace")
            yield from ((name, line) for line in _patch_problems(text, fix.package))
    if not fix.patch.is_file():
        yield "fix.patch", "does not exist"
    elif fix.subject != fix.header.get("title"):
        yield "fix.patch", f"its subject is {fix.subject!r} and not the title of header.toml"


def _patch_problems(text: str, package: str) -> Iterator[str]:
    if not re.match(r"From [0-9a-f]{7,40} ", text):
        yield "is no output of git format-patch: the first line is no `From <commit> <date>`"
    for field in ("From: ", "Date: ", "Subject: [PATCH"):
        if not re.search("^" + re.escape(field), text, re.MULTILINE):
            yield f"has no line {field.strip()!r}"
    named = re.findall(r"^diff --git a/(\S+) b/(\S+)$", text, re.MULTILINE)
    if not named:
        yield "holds no diff"
    for path in {path for pair in named for path in pair}:
        if not path.startswith(f"{package}/"):
            yield f"touches {path}, which does not lie below {package}/"


def _texts(value: object) -> Iterable[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
