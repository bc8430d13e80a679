# SPDX-License-Identifier: Apache-2.0
"""Released packages as folders: unpacked from a wheel, copied cheaply, patched."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path

from numinous_tooling.patching.errors import PatchError
from numinous_tooling.patching.series import git_apply

from .headers import PROJECTS, Fix


def released(project: str, given: Path | None, scratch: Path) -> tuple[Path, str]:
    """Folder that holds the package of a project and its ``.dist-info``, and the version.

    Args:
        project: key of `PROJECTS`.
        given: a wheel, which is unpacked into `scratch`, or such a folder; None: what this interpreter has installed.
        scratch: an existing folder.

    Raises:
        PatchError: nothing of that project there.
    """
    wanted = PROJECTS[project]
    if given is None:
        return _installed(project)
    folder = given
    if given.is_file():
        folder = scratch / f"released-{project}-{given.stem}"
        try:
            with zipfile.ZipFile(given) as archive:
                archive.extractall(folder)
        except zipfile.BadZipFile:
            raise PatchError(f"{given} is not a readable wheel; download it again") from None
    if not (folder / wanted.package).is_dir():
        raise PatchError(f"{given} holds no package {wanted.package} of {project}")
    found = _dist_infos(project, folder)
    if len(found) != 1:
        raise PatchError(
            f"{given} holds {len(found)} *.dist-info of {wanted.distribution}; want one"
        )
    return folder, found[0].name.removesuffix(".dist-info").rpartition("-")[2]


def copy_of(project: str, source: Path, target: Path) -> Path:
    """A tree of its own with the package and its metadata; files are hard links where the disk allows it.

    Whoever changes a file in it must replace the file, as ``git apply`` and Python's bytecode cache do, and never
    write into it. Bytecode comes along: it stays valid for every file that is not replaced.
    """
    package = PROJECTS[project].package
    for folder in (source / package, *_dist_infos(project, source)):
        shutil.copytree(
            folder,
            target / folder.name,
            copy_function=_link,
            ignore=shutil.ignore_patterns("*.pyc.*"),  # being written by a process that runs there
        )
    return target


def patched(fixes: Iterable[Fix], source: Path, target: Path) -> Path:
    """A tree with the patches of `fixes`, all of one project, applied in this order.

    Raises:
        PatchError: one does not apply exactly; the line begins with its name.
    """
    chosen = list(fixes)
    copy_of(chosen[0].project, source, target)
    for fix in chosen:
        apply(fix, fix.patch, target)
    return target


def apply(fix: Fix, patch: Path, target: Path) -> None:
    """Apply one patch of a fix in a tree, exactly; raises PatchError with the fix's name in front."""
    try:
        git_apply(patch, target)
    except PatchError as error:
        raise PatchError(f"{fix.name}: {error}") from None


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        if "__pycache__" not in source:  # there one may be replaced at any time
            raise
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def _installed(project: str) -> tuple[Path, str]:
    wanted = PROJECTS[project]
    try:
        distribution = importlib.metadata.distribution(wanted.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise PatchError(
            f"{wanted.distribution} is not installed; name a wheel with --tree {project}=<wheel>"
        ) from None
    folder = Path(str(distribution.locate_file(""))).resolve()
    if not (folder / wanted.package).is_dir():
        raise PatchError(
            f"{wanted.distribution} is installed without a folder {wanted.package}; "
            f"name a wheel with --tree {project}=<wheel>"
        )
    return folder, distribution.version


def _dist_infos(project: str, folder: Path) -> list[Path]:
    name = re.sub(r"[-_.]+", "_", PROJECTS[project].distribution).lower()
    return [
        path
        for path in sorted(folder.glob("*.dist-info"))
        if path.name.removesuffix(".dist-info").rpartition("-")[0].lower().replace(".", "_") == name
    ]
