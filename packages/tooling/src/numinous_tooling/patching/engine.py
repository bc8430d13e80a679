# SPDX-License-Identifier: Apache-2.0
"""Find the engine without importing it: the installed distribution, an unpacked wheel, or a wheel file."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import json
import os
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Protocol

from .errors import PatchError

DISTRIBUTION = "sglang"
PACKAGE = "sglang"


class EngineTree(Protocol):
    """Read access to one version of the engine's files. Paths are relative to the package root (``srt/…``)."""

    @property
    def version(self) -> str:
        """Version of the distribution."""

    @property
    def where(self) -> str:
        """Path shown to the user."""

    def read(self, path: str) -> bytes:
        """Bytes of a file; raises FileNotFoundError."""

    def files(self, prefix: str = "") -> Iterator[str]:
        """Every file path below `prefix`."""


@dataclass(frozen=True)
class DirectoryTree:
    """The engine as a directory: an installation or an unpacked wheel."""

    root: Path
    version: str
    installed: bool = False
    editable: bool = False

    @property
    def where(self) -> str:
        """Path shown to the user."""
        return str(self.root)

    def read(self, path: str) -> bytes:
        """Bytes of a file; raises FileNotFoundError."""
        return (self.root / path).read_bytes()

    def files(self, prefix: str = "") -> Iterator[str]:
        """Every file path below `prefix`, sorted."""
        base = self.root / prefix if prefix else self.root
        for path in sorted(base.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(self.root).as_posix()


@dataclass(frozen=True)
class WheelTree:
    """The engine as a wheel file; read only by nature."""

    path: Path
    version: str

    @property
    def where(self) -> str:
        """Path shown to the user."""
        return str(self.path)

    def read(self, path: str) -> bytes:
        """Bytes of a file; raises FileNotFoundError."""
        with zipfile.ZipFile(self.path) as archive:
            try:
                return archive.read(f"{PACKAGE}/{path}")
            except KeyError:
                raise FileNotFoundError(f"{self.path}: {path}") from None

    def files(self, prefix: str = "") -> Iterator[str]:
        """Every file path below `prefix`, sorted."""
        start = f"{PACKAGE}/{prefix}"
        with zipfile.ZipFile(self.path) as archive:
            for name in sorted(archive.namelist()):
                if name.startswith(start) and not name.endswith("/"):
                    yield name[len(PACKAGE) + 1 :]


def find_engine(where: str | os.PathLike[str] | None = None) -> EngineTree:
    """The engine that a command speaks of.

    Args:
        where: a wheel file, a directory that holds ``sglang/`` (an unpacked wheel or a site-packages folder), or
            None for the installation that this interpreter would import (``NUMINOUS_ENGINE`` overrides it).

    Raises:
        PatchError: no engine there, or a kind that cannot be read.
    """
    chosen = where or os.environ.get("NUMINOUS_ENGINE") or None
    return _tree_at(Path(chosen)) if chosen else installed_engine()


def _tree_at(path: Path) -> EngineTree:
    if path.is_file() and path.suffix == ".whl":
        try:
            with zipfile.ZipFile(path) as archive:
                names = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
                metadata = archive.read(names[0]).decode() if names else ""
        except zipfile.BadZipFile:
            raise PatchError(f"{path} is not a readable wheel; download it again") from None
        return WheelTree(path, _version_of(metadata, path))
    root = path if path.name == PACKAGE and (path / "srt").is_dir() else path / PACKAGE
    if not (root / "srt").is_dir():
        raise PatchError(
            f"no SGLang at {path}: want a wheel, or a directory that holds {PACKAGE}/srt"
        )
    found = sorted(root.parent.glob(f"{DISTRIBUTION}-*.dist-info/METADATA"))
    if len(found) != 1:
        raise PatchError(
            f"{root.parent} holds {len(found)} {DISTRIBUTION}-*.dist-info; want exactly one"
        )
    return DirectoryTree(root, _version_of(found[0].read_text(encoding="utf-8"), path))


def _version_of(metadata: str, path: Path) -> str:
    fields = HeaderParser().parsestr(metadata)
    if fields.get("Name", "").lower() != DISTRIBUTION or not fields.get("Version"):
        raise PatchError(f"{path} is not a distribution of {DISTRIBUTION}")
    return str(fields["Version"])


def installed_engine() -> DirectoryTree:
    """The engine that this interpreter would import, whatever ``NUMINOUS_ENGINE`` says.

    Raises:
        PatchError: none is installed, or what would be imported is not what the metadata speaks of.
    """
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise PatchError(
            f"{DISTRIBUTION} is not installed for {sys.executable}; install sglang==0.5.20 or name one with --engine"
        ) from None
    # PathFinder instead of find_spec: neither runs the package's __init__, but find_spec would trust sys.modules.
    spec = importlib.machinery.PathFinder.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise PatchError(
            f"{DISTRIBUTION} {distribution.version} has metadata but no importable package; reinstall it"
        )
    root = Path(spec.origin).parent
    if not root.is_dir():
        raise PatchError(
            f"{DISTRIBUTION} is imported from a zip archive ({root.parent}); install it unpacked"
        )
    direct = distribution.read_text("direct_url.json")
    editable = bool(direct and json.loads(direct).get("dir_info", {}).get("editable"))
    owned = Path(str(distribution.locate_file(PACKAGE)))
    # The version would be that of another copy; a finder of an editable installation leads elsewhere by design.
    if not editable and root.resolve() != owned.resolve():
        raise PatchError(
            f"{PACKAGE} is imported from {root} but the installed distribution lies at {owned}; fix PYTHONPATH"
        )
    return DirectoryTree(root, distribution.version, installed=True, editable=editable)
