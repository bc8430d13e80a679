# SPDX-License-Identifier: Apache-2.0
"""The engine as it is installed: kind, edits in place, the way in for numinous, Python and glibc."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PathDistribution

from numinous_tooling.patching import flags
from numinous_tooling.patching.check import PLUGIN_GROUP, PLUGIN_NAME
from numinous_tooling.patching.engine import DISTRIBUTION, DirectoryTree, EngineTree, WheelTree
from numinous_tooling.patching.errors import PatchError
from numinous_tooling.patching.journal import DiskState

from .findings import Finding, finding, shortened
from .requirements import normalised


@dataclass(frozen=True)
class Packages:
    """The distributions that the engine would import.

    Args:
        found: normalised name -> distribution; the first on the path wins, as in an import.
        where: what the folder is called in the report.
        own: True if they are those of the running interpreter.
    """

    found: Mapping[str, Distribution]
    where: str
    own: bool

    def version(self, name: str) -> str | None:
        """Version of a distribution, None if it is absent."""
        distribution = self.found.get(normalised(name))
        return distribution.version if distribution else None


def packages_of(tree: EngineTree | None) -> Packages:
    """Those beside the engine if it lies in a site-packages folder, else those of the running interpreter.

    A folder that holds nothing but the engine is an unpacked wheel and says nothing of an environment.
    """
    if isinstance(tree, DirectoryTree) and not tree.installed:
        beside = _by_name([str(tree.root.parent)])
        if set(beside) - {DISTRIBUTION}:
            return Packages(beside, str(tree.root.parent), own=False)
    return Packages(_by_name(sys.path), f"Python at {sys.executable}", own=True)


def _by_name(path: list[str]) -> dict[str, Distribution]:
    found: dict[str, Distribution] = {}
    for distribution in importlib.metadata.distributions(path=path):
        metadata = distribution.metadata
        if "Name" in metadata and "Version" in metadata:  # a half-removed distribution has none
            found.setdefault(normalised(metadata["Name"]), distribution)
    return found


def engine_distribution(tree: EngineTree) -> Distribution | None:
    """Metadata of an engine tree; None if it has none."""
    if isinstance(tree, WheelTree):
        with zipfile.ZipFile(tree.path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        if not names:
            return None
        # Reads lazily: the archive stays open as long as the distribution is used.
        root = zipfile.Path(str(tree.path), names[0].removesuffix("METADATA"))
        return PathDistribution(root)
    if isinstance(tree, DirectoryTree) and not tree.installed:
        beside = sorted(tree.root.parent.glob(f"{DISTRIBUTION}-*.dist-info"))
        return Distribution.at(beside[0]) if beside else None
    return importlib.metadata.distribution(DISTRIBUTION)


def engine_section(
    tree: EngineTree, packages: Packages, environ: Mapping[str, str]
) -> list[Finding]:
    """Findings on one engine."""
    kind = "wheel file"
    if isinstance(tree, DirectoryTree):
        kind = (
            "editable installation"
            if tree.editable
            else "installed"
            if tree.installed
            else "directory"
        )
    findings = [finding("ok", f"sglang {tree.version}", f"{kind}, {tree.where}")]
    findings += _on_disk(tree)
    numinous = sorted(name for name in packages.found if name.startswith("numinous-"))
    findings.append(
        finding(
            "ok" if numinous else "note",
            "numinous packages",
            ", ".join(f"{name} {packages.version(name)}" for name in numinous)
            or f"none in {packages.where}",
        )
    )
    findings += _way_in(tree, packages, environ)
    findings += _interpreter(tree, packages)
    return findings


def _on_disk(tree: EngineTree) -> list[Finding]:
    if not isinstance(tree, DirectoryTree):
        return []
    try:
        status = DiskState(tree).status()
    except PatchError as error:
        return [finding("problem", "edits on disk", str(error), "run: numinous status")]
    if not status.items and not status.files and not status.pending:
        return [finding("ok", "edits on disk", "none")]
    names = ", ".join(f"{item.patch_id} ({item.kind})" for item in status.items) or "none"
    if status.in_place:
        return [finding("note", "edits on disk", names, "numinous revert takes them out")]
    wrong = shortened(
        [f"{path} is {state}" for path, state in status.files.items() if state != "committed"]
    )
    detail = "; ".join(
        filter(None, [names, "a command died in the middle" if status.pending else "", wrong])
    )
    return [finding("problem", "edits on disk", detail, "run: numinous revert")]


def _way_in(tree: EngineTree, packages: Packages, environ: Mapping[str, str]) -> list[Finding]:
    """Does the engine's plugin loader find numinous, and may it load it?"""
    wanted = flags.any_set(environ)
    findings = []
    if packages.own and not (isinstance(tree, DirectoryTree) and tree.installed):
        findings.append(
            finding("note", "plugin entry point", "not judged: this engine is not installed")
        )
    else:
        seen = any(
            entry.group == PLUGIN_GROUP and entry.name == PLUGIN_NAME
            for distribution in packages.found.values()
            for entry in distribution.entry_points
        )
        what = f"plugin entry point {PLUGIN_NAME}"
        if seen:
            findings.append(finding("ok", what, f"seen in {packages.where}"))
        else:
            fix = "pip install numinous-tooling into the engine's environment"
            findings.append(
                finding("problem", what, f"not in {packages.where}: features cannot load", fix)
            )
    allowed = [
        name.strip() for name in environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()
    ]
    if allowed and PLUGIN_NAME not in allowed:
        findings.append(
            finding(
                "problem" if wanted else "note",
                f"SGLANG_PLUGINS={environ['SGLANG_PLUGINS']}",
                f"leaves out {PLUGIN_NAME}: the engine ignores every feature",
                f"add {PLUGIN_NAME} to SGLANG_PLUGINS or unset it",
            )
        )
    return findings


def _interpreter(tree: EngineTree, packages: Packages) -> list[Finding]:
    """Python and glibc against the tag of the engine's wheel."""
    distribution = engine_distribution(tree)
    wheel = (distribution.read_text("WHEEL") if distribution else None) or ""
    tag = re.search(r"^Tag: *(\S+)", wheel, re.MULTILINE)
    built = re.match(r"cp(\d)(\d+)-", tag[1]) if tag else None
    needs = re.search(r"manylinux_(\d+)_(\d+)", tag[1]) if tag else None

    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    python = f"Python {platform.python_version()}"
    if not packages.own:
        findings = [
            finding(
                "note", "Python", f"not judged: {packages.where} belongs to another interpreter"
            )
        ]
    elif built and (wants := f"{built[1]}.{built[2]}") != here:
        fix = f"use Python {wants}, or the engine's wheel for {here}"
        findings = [finding("problem", python, f"this engine is built for Python {wants}", fix)]
    else:
        findings = [
            finding("ok", python, f"as the engine's wheel ({tag[1]})" if built and tag else "")
        ]

    name, version = platform.libc_ver()
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if name != "glibc" or not numbers:
        fix = "use a Linux with glibc"
        findings.append(
            finding(
                "problem" if needs else "note",
                "glibc",
                f"none found ({name or 'unknown'} C library)",
                fix,
            )
        )
    elif needs and (int(numbers[1]), int(numbers[2])) < (int(needs[1]), int(needs[2])):
        detail = f"the engine's wheel needs {needs[1]}.{needs[2]}"
        findings.append(
            finding("problem", f"glibc {version}", detail, "use a newer Linux or a container")
        )
    else:
        wants = f"the engine's wheel needs {needs[1]}.{needs[2]}" if needs else ""
        findings.append(finding("ok", f"glibc {version}", wants))
    return findings
