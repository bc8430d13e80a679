# SPDX-License-Identifier: Apache-2.0
"""Section ``upstream``: known bugs of the installed releases that a serve command would meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numinous_tooling.patching.engine import DirectoryTree, EngineTree
from numinous_tooling.patching.errors import PatchError
from numinous_tooling.patching.journal import DiskState
from numinous_tooling.patching.serve_command import ServeCommand, parse_command
from numinous_tooling.upstream import hit
from numinous_tooling.upstream.headers import PROJECTS, Fix, fixes_root, read_fixes

from .findings import Finding, finding


def bugs_section(
    tree: EngineTree,
    versions: Mapping[str, str | None],
    command: Sequence[str],
    config: str | None,
    environ: Mapping[str, str],
) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Findings, and a row for each fix that the command was judged for.

    Args:
        tree: the engine.
        versions: distribution -> installed version, for projects other than the engine.
        command: the user's serve command; empty: only how many fixes there are is said.
        config: a model's config.json, instead of that of the model folder.
        environ: variables of the command.
    """
    try:
        root = fixes_root()
        fixes = read_fixes(root) if root else []
    except PatchError as error:
        return [finding("problem", "upstream fixes", str(error), "reinstall the package")], []
    if not fixes:
        fix = "pip install numinous-upstream-fixes"
        return [finding("note", "no upstream fixes installed", "", fix)], []
    if not command:
        said = f"{len(fixes)} known; put your serve command behind `--` to see which it would meet"
        return [finding("note", "upstream bugs", said)], []
    try:
        words, inline = hit.split_config(command)
        serve = parse_command(words, tree, environ)
        if config or inline:
            serve = hit.with_config(serve, config or inline or "")
    except PatchError as error:
        return [finding("unknown", "serve command", str(error), "see numinous check")], []
    findings = [finding("unknown", "serve command", line) for line in serve.problems]
    if serve.model_config is None:
        said = (
            "the model's config.json is not on this machine; bugs that depend on it are undecided"
        )
        findings.append(
            finding("note", "model configuration", said, "numinous doctor --config config.json")
        )
    applied = _applied(tree)
    rows = [_judged(fix, serve, tree, versions, applied) for fix in fixes]
    findings += [_finding(fix, row) for fix, row in zip(fixes, rows, strict=True) if row["shown"]]
    if not any(row["state"] == hit.HIT for row in rows):
        said = f"none of the {len(fixes)} known ones for certain"
        findings.append(finding("ok", "upstream bugs", said))
    return findings, rows


def _judged(
    fix: Fix,
    serve: ServeCommand,
    tree: EngineTree,
    versions: Mapping[str, str | None],
    applied: frozenset[str],
) -> dict[str, Any]:
    state, why = hit.judge(fix, serve)
    version = tree.version if fix.applied else versions.get(PROJECTS[fix.project].distribution)
    newest = fix.header["newest"]
    if fix.id in applied:
        state, why = hit.MISSED, "its fix is in place"
    elif version == newest["version"] and newest["state"] == "fixed":
        state, why = hit.MISSED, f"fixed in {version}"
    elif state == hit.HIT and version not in (fix.header["version"], newest["version"]):
        state = hit.UNDECIDED
        why = f"known of {fix.header['version']}, and {version or 'none'} is installed; {why}"
    # Without a condition it says nothing about this command.
    shown = state == hit.HIT or (state == hit.UNDECIDED and "doctor" in fix.header)
    return {"id": fix.id, "state": state, "why": why, "shown": shown}


def _finding(fix: Fix, row: Mapping[str, Any]) -> Finding:
    says = str(fix.header["doctor"]["says"])
    if row["state"] == hit.HIT:
        do = f"numinous apply {fix.id}" if fix.applied else f"patch: {fix.name}/fix.patch"
        return finding("problem", fix.id, f"{says} ({row['why']})", do)
    return finding("note", f"{fix.id} (perhaps)", f"{says} ({row['why']})")


def _applied(tree: EngineTree) -> frozenset[str]:
    if not isinstance(tree, DirectoryTree):
        return frozenset()
    try:
        return frozenset(item.feature_id for item in DiskState(tree).applied())
    except PatchError:
        return frozenset()  # a damaged journal is told by another section
