# SPDX-License-Identifier: Apache-2.0
"""Patch series: from the engine's files and a folder of ``git format-patch`` files to the patched bytes.

The touched files are copied to a temporary folder and ``git apply`` works there, away from the user's git
configuration and from any repository that may lie around the engine (inside one, it silently skips paths).
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from .edits import check_compiles
from .engine import PACKAGE
from .errors import PatchError
from .feature import Series

_HUNK = re.compile(rb"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_MODE = re.compile(r"(old|new|new file|deleted file) mode (\d{6})")
_FIELD = re.compile(r"([A-Za-z][A-Za-z-]*):\s*(.*)")
_DEP3 = (
    "description",
    "subject",
    "origin",
    "author",
    "from",
    "forwarded",
    "applied_upstream",
    "last_update",
)
_GIT_TIMEOUT_S = 120


def render_series(read: Callable[[str], bytes], series: Series) -> dict[str, bytes | None]:
    """Contents after the whole series, for each path that it changes (None: deleted).

    Args:
        read: bytes of a file by its path relative to the engine package; raises FileNotFoundError.
        series: the series; its patches name ``a/sglang/<path>``.

    Raises:
        PatchError: a patch does not apply exactly, touches something outside of the package, or needs what files
            of an installed package do not have (modes, links); git is missing; the folder is not there.
    """
    try:
        return _rendered(read, series)
    except PatchError as error:
        raise PatchError(f"{series.id}: {error}") from None


def patch_files(series: Series) -> list[Path]:
    """The patches in order: the lines of the file ``series``, or else ``*.patch`` sorted by name.

    Raises:
        PatchError: no such folder, no patches in it, or one that is listed is missing.
    """
    folder = _folder(series.directory)
    order = folder / "series"
    if order.is_file():
        names = [line.strip() for line in order.read_text(encoding="utf-8").splitlines()]
        files = [folder / name for name in names if name and not name.startswith("#")]
    else:
        files = sorted(folder.glob("*.patch"))
    if not files:
        raise PatchError(
            f"{folder} holds no *.patch and no series file; reinstall the package that owns it"
        )
    for file in files:
        if not file.is_file():
            raise PatchError(
                f"{file} is listed in {order} and missing; reinstall the package that owns it"
            )
    return files


def patch_header(patch: bytes) -> dict[str, str]:
    """DEP-3 fields of one patch, keys as in `Series.header` (``applied_upstream``, ``bug_debian`` …)."""
    fields: dict[str, str] = {}
    key = ""
    for line in patch.decode("utf-8", "replace").splitlines():
        if line == "---" or line.startswith(("diff ", "--- ", "Index: ")):
            break
        match = _FIELD.fullmatch(line)
        name = match[1].lower().replace("-", "_") if match else ""
        if match and (name in _DEP3 or name == "bug" or name.startswith("bug_")):
            key = name
            fields[key] = match[2].strip()
        elif key and line[:1].isspace() and line.strip():
            fields[key] += " " + line.strip()
        else:
            key = ""
    return fields


def _folder(directory: str) -> Path:
    if os.path.isabs(directory):
        folder = Path(directory)
    else:
        module, colon, below = directory.partition(":")
        if not colon:
            raise PatchError(
                f"directory {directory!r} is neither absolute nor package.module:folder"
            )
        try:
            spec = importlib.util.find_spec(module)
        except ImportError:
            spec = None
        if spec is None or spec.origin is None:
            raise PatchError(
                f"no module {module} to find {directory} in; install the package that owns it"
            )
        folder = Path(spec.origin).parent / below
    if not folder.is_dir():
        raise PatchError(f"no folder {folder}; reinstall the package that owns it")
    return folder


def _rendered(read: Callable[[str], bytes], series: Series) -> dict[str, bytes | None]:
    files = patch_files(series)
    touched = sorted({path for file in files for path in _touched(file)})
    with tempfile.TemporaryDirectory(prefix="numinous-series-") as temporary:
        home = Path(temporary).resolve()
        work = home / "work"
        before: dict[str, bytes] = {}
        for path in touched:
            try:
                before[path] = read(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            (work / PACKAGE / path).parent.mkdir(parents=True, exist_ok=True)
            (work / PACKAGE / path).write_bytes(before[path])
        work.mkdir(exist_ok=True)
        for file in files:
            git_apply(file, work, "--check")
            git_apply(file, work)
        after = _contents(work)
    result: dict[str, bytes | None] = {path: None for path in before if path not in after}
    result.update({path: content for path, content in after.items() if before.get(path) != content})
    if not result:
        raise PatchError(f"the series in {files[0].parent} changes nothing")
    for path, content in result.items():
        if content is not None:
            try:
                check_compiles(content, path)
            except PatchError as error:
                raise PatchError(f"{path}: {error}") from None
    return result


def _contents(work: Path) -> dict[str, bytes]:
    """What git left behind; the paths were judged before, this is the second look at what really happened."""
    found: dict[str, bytes] = {}
    for path in work.rglob("*"):
        name = PurePosixPath(path.relative_to(work))
        if path.is_symlink() or (path.is_file() and name.parts[0] != PACKAGE):
            raise PatchError(f"a patch made {name}, which is no plain file below {PACKAGE}/")
        if path.is_file():
            found[str(name.relative_to(PACKAGE))] = path.read_bytes()
    return found


def git_apply(patch: Path, work: Path, *options: str) -> None:
    """Apply one patch (``-p1``) in a folder, away from the user's git configuration and from repositories around it.

    Raises:
        PatchError: it does not apply exactly, or git is missing.
    """
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("GIT_", "XDG_"))
    }
    environment |= {
        "HOME": str(work.parent),
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(work.parent),
    }
    command = ["git", "-c", "core.autocrlf=false", "-c", "core.whitespace=cr-at-eol"]
    command += ["apply", "-p1", "--whitespace=nowarn", *options, str(patch.resolve())]
    try:
        done = subprocess.run(
            command,
            cwd=work,
            env=environment,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise PatchError("git is not on PATH; install git, which applies patch series") from None
    except subprocess.TimeoutExpired:
        raise PatchError(f"{patch.name}: git apply took more than {_GIT_TIMEOUT_S} s") from None
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").splitlines()
        errors = [
            line.removeprefix("error: ")
            for line in lines
            if line.startswith(("error: ", "fatal: "))
        ]
        raise PatchError(f"{patch.name} does not apply: {'; '.join((errors or lines)[:2])}")


def _touched(patch: Path) -> set[str]:
    """Paths that a patch names, relative to the engine package."""
    found: set[str] = set()
    for line in _header_lines(patch.read_bytes()):
        try:
            _judge_mode(line)
            found.update(_inside(path) for path in _named(line))
        except PatchError as error:
            raise PatchError(f"{patch.name}: {error}") from None
    if not found:
        raise PatchError(f"{patch.name} holds no diff")
    return found


def _header_lines(patch: bytes) -> Iterator[str]:
    """Lines that are not the text of a hunk: a removed line ``-- x`` reads ``--- x`` there."""
    old = new = 0
    for line in patch.split(b"\n"):
        if old > 0 or new > 0:
            old -= line[:1] in (b" ", b"-", b"", b"\r")
            new -= line[:1] in (b" ", b"+", b"", b"\r")
        elif hunk := _HUNK.match(line):
            old, new = (int(size) if size is not None else 1 for size in hunk.groups())
        else:
            yield line.decode("utf-8", "surrogateescape").rstrip("\r")


def _judge_mode(line: str) -> None:
    match = _MODE.fullmatch(line)
    if match is None:
        return
    what, mode = match.groups()
    if what in ("old", "new"):
        raise PatchError("it changes a file's mode, which an installed package does not carry")
    if not mode.startswith("100"):
        raise PatchError(
            "it makes or deletes a link or a submodule; only plain files can be patched"
        )
    if what == "new file" and mode != "100644":
        raise PatchError("it makes an executable file, which an installed package does not carry")


def _named(line: str) -> Iterator[str]:
    if line.startswith("diff --git "):
        names = line.removeprefix("diff --git ").split(" ")
        if len(names) != 2 or '"' in line:
            raise PatchError(
                f"cannot read the paths of {line!r}; names with blanks or quotes cannot be patched"
            )
        yield from names
    elif line.startswith(("--- ", "+++ ")):
        name = line[4:].partition("\t")[0]
        # Only diffs count: a commit message may hold a rule of dashes.
        if name.startswith(("a/", "b/", "/", '"', "..")) and name != "/dev/null":
            yield name
    elif line.startswith(("rename from ", "rename to ", "copy from ", "copy to ")):
        yield "a/" + line.split(" ", 2)[2]


def _inside(name: str) -> str:
    parts = PurePosixPath(name).parts
    if (
        name.startswith("/")
        or ".." in parts
        or len(parts) < 3
        or parts[0] not in ("a", "b")
        or parts[1] != PACKAGE
    ):
        raise PatchError(f"it touches {name!r}, which is not of the form a/{PACKAGE}/<path>")
    return "/".join(parts[2:])
