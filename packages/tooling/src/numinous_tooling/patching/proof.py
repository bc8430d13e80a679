# SPDX-License-Identifier: Apache-2.0
"""What edits and series ask for, and whether a feature is on disk exactly as it is declared now."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from .edits import render_edit
from .errors import PatchError
from .feature import Edit, Feature, Series
from .series import patch_files, render_series

if TYPE_CHECKING:
    from .journal import AppliedItem, DiskState, Status

STATES = {
    "pristine": "holds no edit any more (engine reinstalled?)",
    "foreign": "was changed by somebody else after numinous edited it",
    "pending": "was left by a command that died in the middle of a change",
}
"""What is wrong with a file, by its state in `Status.files`."""

REMEDIES = {
    "pristine": "numinous revert",
    "foreign": "numinous revert --forget",
    "pending": "numinous revert",
}


def declaration_digest(patch: Edit | Series) -> str:
    """Digest of everything in a declaration that decides what is written; pins only decide whether.

    Raises:
        PatchError: the patch files of a series are not there.
    """
    if isinstance(patch, Edit):
        text = repr((patch.file, patch.anchor, patch.insert, patch.where))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    whole = hashlib.sha256()
    for file in patch_files(patch):
        whole.update(hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()


def rendered(
    read: Callable[[str], bytes], patches: Iterable[Edit | Series], where: str
) -> dict[str, bytes | None]:
    """Contents that patches, in this order, ask for; None: the file is deleted.

    Args:
        read: bytes of a pristine file; raises FileNotFoundError.
        patches: what to render.
        where: name of the engine in messages.

    Raises:
        PatchError: one does not fit; the line begins with its id.
    """
    contents: dict[str, bytes | None] = {}

    def look(path: str) -> bytes:
        if not path or path.startswith("/") or ".." in PurePosixPath(path).parts:
            raise PatchError(f"{path!r} is no path inside of the engine package")
        content = contents[path] if path in contents else read(path)
        if content is None:
            raise FileNotFoundError(path)
        return content

    for patch in patches:
        if isinstance(patch, Series):
            contents.update(render_series(look, patch))
            continue
        try:
            original = look(patch.file)
        except (FileNotFoundError, NotADirectoryError):
            raise PatchError(f"{patch.id}: {where} has no {patch.file}") from None
        except PatchError as error:
            raise PatchError(f"{patch.id}: {error}") from None
        contents[patch.file] = render_edit(original, patch)
    return contents


def file_problem(path: str, state: str) -> str:
    """One line on a file that does not hold what was committed."""
    return f"{path} {STATES[state]}; run: {REMEDIES[state]}"


def out_of_date(items: Sequence[AppliedItem], features: Sequence[Feature]) -> dict[str, list[str]]:
    """feature id -> lines on its patches that are on disk in another form than `features` declare."""
    found: dict[str, list[str]] = {}
    for feature in features:
        declared = {p.id: p for p in feature.patches if isinstance(p, Edit | Series)}
        lines = []
        for item in items:
            if item.feature_id != feature.id:
                continue
            patch = declared.get(item.patch_id)
            if patch is None:
                lines.append(f"{item.patch_id} is on disk and no longer declared")
            elif not item.digest:
                lines.append(f"{item.patch_id} was applied by an older numinous-tooling")
            elif item.digest != declaration_digest(patch):
                lines.append(f"{item.patch_id} on disk is an older text")
        if lines:
            found[feature.id] = [f"{line}; run: numinous apply {feature.id}" for line in lines]
    return found


def unproven(state: DiskState, version: str, features: Sequence[Feature]) -> dict[str, str]:
    """See `DiskState.unproven`."""
    on_disk = [feature for feature in features if feature.on_disk]
    if not on_disk:
        return {}
    try:
        status = state.status()
    except (PatchError, OSError) as error:
        return {feature.id: str(error) for feature in on_disk}
    reasons = {feature.id: _reason(feature, status, version) for feature in on_disk}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _reason(feature: Feature, status: Status, version: str) -> str | None:
    patches = [patch for patch in feature.patches if isinstance(patch, Edit | Series)]
    applied = {item.patch_id for item in status.items if item.feature_id == feature.id}
    if absent := [patch.id for patch in patches if patch.id not in applied]:
        return f"its edits are not in place ({', '.join(absent)}); run: numinous apply {feature.id}"
    if status.pending:
        return "a command died in the middle of a change; run: numinous revert"
    if status.version != version:
        return f"its edits were made to sglang {status.version} and this is {version}; run: numinous revert"
    # Which files a series touched is not recorded: every file that numinous changed has to be right then.
    paths = [patch.file for patch in patches if isinstance(patch, Edit)]
    if len(paths) < len(patches):
        paths.extend(status.files)
    for path in dict.fromkeys(paths):
        found = status.files.get(path)
        if found is None:
            return f"{path} is no longer ours; run: numinous apply {feature.id}"
        if found != "committed":
            return file_problem(path, found)
    try:
        lines = out_of_date(status.items, [feature]).get(feature.id)
    except (PatchError, OSError) as error:
        return str(error)
    return lines[0] if lines else None
