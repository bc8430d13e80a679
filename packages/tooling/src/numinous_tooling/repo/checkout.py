# SPDX-License-Identifier: Apache-2.0
"""A checkout: its root, its files and its packages."""

from __future__ import annotations

import re
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

# Walked over where the tree is no git checkout and .gitignore cannot be asked.
LEFT_OUT = {"__pycache__", "binaries", "dist", "reports"}

OUTSIDE = "upstream-fixes"
"""The one package that does not lie in packages/: its folders are read by people who send them elsewhere."""

_CHANGELOG_ENTRY = re.compile(r"## \[?v?(?P<version>\d+\.\d+\.\d+[^\s\]]*)\]?(?P<rest>.*)")


class RepoError(Exception):
    """One line for the user: what, where, what to do."""


@dataclass(frozen=True)
class Package:
    """A folder of packages/, or `OUTSIDE`, as its pyproject.toml describes it."""

    path: Path
    pyproject: dict[str, Any]

    @property
    def folder(self) -> str:
        """Name of the folder, as in tags and session ids."""
        return self.path.name

    @property
    def place(self) -> str:
        """Path of the folder, relative to the root."""
        return self.folder if self.folder == OUTSIDE else f"packages/{self.folder}"

    @property
    def name(self) -> str:
        """Name of the distribution."""
        return str(self.pyproject["project"]["name"])

    @property
    def version(self) -> str:
        """Static version of pyproject.toml."""
        return str(self.pyproject["project"]["version"])

    @property
    def module(self) -> str:
        """Import name."""
        return import_name(self.folder)

    @property
    def source(self) -> Path:
        """Folder of the import package."""
        return self.path / "src" / self.module

    @property
    def siblings(self) -> tuple[str, ...]:
        """Distributions of this repository that it depends on, extras included."""
        project = self.pyproject["project"]
        extras = project.get("optional-dependencies", {}).values()
        lines = [line for group in (project.get("dependencies", []), *extras) for line in group]
        names = [re.split(r"[^\w.-]", line.strip(), maxsplit=1)[0] for line in lines]
        return tuple(sorted({name for name in names if name.startswith("numinous-")} - {self.name}))

    def init_version(self) -> str | None:
        """`__version__` as written in the import package, or None."""
        init = self.source / "__init__.py"
        text = init.read_text(encoding="utf-8") if init.exists() else ""
        found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
        return found[1] if found else None

    def changelog_entry(self) -> tuple[str, str, int] | None:
        """Version, rest of the heading and line number of the top CHANGELOG entry; None where there is none."""
        path = self.path / "CHANGELOG.md"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            if found := _CHANGELOG_ENTRY.fullmatch(line):
                return found["version"], found["rest"].strip(), number
        return None


def import_name(folder: str) -> str:
    """The import name that goes with a folder of packages/."""
    return "numinous_" + folder.replace("-", "_")


@dataclass(frozen=True)
class Checkout:
    """The tree below `root`."""

    root: Path

    @cached_property
    def packages(self) -> dict[str, Package]:
        """Folder -> package, for every packages/*/pyproject.toml and the one of `OUTSIDE`."""
        found = {}
        paths = sorted(self.root.glob("packages/*/pyproject.toml"))
        for path in [*paths, *self.root.glob(f"{OUTSIDE}/pyproject.toml")]:
            try:
                pyproject = tomllib.loads(path.read_text(encoding="utf-8"))
                package = Package(path.parent, pyproject)
                _ = package.name, package.version
            except (tomllib.TOMLDecodeError, KeyError) as error:
                raise RepoError(f"{path.relative_to(self.root)}: {error!r}; mend it") from error
            found[package.folder] = package
        return found

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Every file that is or would be committed, as a path relative to the root, sorted."""
        if (self.root / ".git").exists():
            names = self.git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split(
                "\0"
            )
            # A file that was deleted and not yet staged is still listed.
            return tuple(sorted({name for name in names if name and (self.root / name).is_file()}))
        paths = (path.relative_to(self.root) for path in self.root.rglob("*") if path.is_file())
        return tuple(sorted(path.as_posix() for path in paths if not _left_out(path)))

    def text(self, file: str) -> str:
        """Content of a text file; bytes that are no UTF-8 are replaced."""
        return (self.root / file).read_text(encoding="utf-8", errors="replace")

    def package(self, folder: str) -> Package:
        """The package of a folder; raises RepoError where there is none."""
        if folder not in self.packages:
            raise RepoError(f"there is no packages/{folder}; there are {', '.join(self.packages)}")
        return self.packages[folder]

    def package_of(self, file: str) -> Package | None:
        """The package that a file lies in, by its path relative to the root."""
        parts = file.split("/")
        name = parts[1] if parts[0] == "packages" and len(parts) > 2 else parts[0]
        found = self.packages.get(name)
        return found if found and file.startswith(f"{found.place}/") else None

    def git(self, *arguments: str) -> str:
        """Output of a git command; raises RepoError when it fails."""
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=self.root, capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            raise RepoError("git is not installed; install it") from None
        if done.returncode != 0:
            raise RepoError(f"git {arguments[0]}: {done.stderr.strip()}")
        return done.stdout


def _left_out(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts) and path.parts[0] != ".ci"
    return hidden or not LEFT_OUT.isdisjoint(path.parts)


def find_checkout(start: Path | None = None) -> Checkout:
    """The checkout around a folder, by default around the current one."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "noxfile.py").is_file() and (folder / "packages").is_dir():
            return Checkout(folder)
    raise RepoError(f"{here} is not inside a checkout of numinous; change into one")
