# SPDX-License-Identifier: Apache-2.0
"""Judge from outside, without a GPU and without importing the engine: will the enabled features be in place?

Results are plain dictionaries (``--json`` prints them) and an exit code: 0 holds, 1 does not hold, 2 undecided.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from . import counters, flags
from .boot import fits, refusals_of
from .core import CORE
from .discover import installed_features
from .engine import DirectoryTree, EngineTree, find_engine
from .errors import PatchError
from .feature import Feature
from .journal import DiskState
from .serve_command import ServeCommand, parse_command

PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN_NAME = "numinous"

HOLDS, FAILS, UNDECIDED = 0, 1, 2


def features_report(
    engine: str | None = None, environ: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], int]:
    """Every installed feature: flag, whether it is on, whether it fits the engine, evidence words, options."""
    environ = os.environ if environ is None else environ
    tree: EngineTree | None = None
    problem = None
    try:
        tree = find_engine(engine)
    except PatchError as error:
        problem = str(error)
    rows = []
    for feature in installed_features():
        reasons = [] if tree is None else _fits_on_disk(feature, tree)
        rows.append(
            {
                "id": feature.id,
                "sentence": feature.sentence,
                "flag": feature.flag,
                "on": _on(feature, environ),
                "fits": None if tree is None else not reasons,
                "reasons": reasons,
                "arch": dict(feature.arch),
                "on_disk": feature.on_disk,
                "options": [
                    {"name": o.name, "default": o.default, "doc": o.doc} for o in feature.options
                ],
                "upstream": feature.upstream,
                "evidence": list(feature.evidence),
            }
        )
    report = {"engine": _engine(tree), "problem": problem, "features": rows}
    return report, HOLDS


def check_report(
    names: Sequence[str] = (),
    *,
    engine: str | None = None,
    everything: bool = False,
    command: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], int]:
    """Do the chosen features fit, and can they serve this command?

    Args:
        names: feature ids; none means the enabled ones, and where none is enabled, every installed one.
        engine: wheel or directory instead of the installation.
        everything: judge every installed feature.
        command: the user's own serve command line, with leading ``NAME=value`` words if any.

    Returns:
        (report, exit code).
    """
    environ = dict(os.environ if environ is None else environ)
    report: dict[str, Any] = {
        "engine": None,
        "problems": [],
        "features": [],
        "command": None,
        "on_disk": [],
    }
    problems: list[str] = report["problems"]
    try:
        tree = find_engine(engine)
        report["engine"] = _engine(tree)
        serve = parse_command(command, tree, environ) if command else None
        if serve is not None:
            environ = dict(serve.environ)
        installed = installed_features()
    except PatchError as error:
        problems.append(str(error))
        return report, UNDECIDED
    known = {feature.id: feature for feature in installed}
    if unknown := [name for name in names if name not in known]:
        problems.append(
            f"no installed feature {', '.join(unknown)}; installed: {', '.join(known) or 'none'}"
        )
        return report, UNDECIDED
    try:
        on = flags.enabled(installed, environ)
    except PatchError as error:
        problems.append(str(error))
        on = [feature for feature in installed if _on(feature, environ)]
    chosen = installed if everything else [known[name] for name in names] or on or installed
    problems.extend(_environment_problems(on, environ, installed_engine=engine is None))
    applied, disk_problems = _disk(tree)
    problems.extend(disk_problems)
    report["on_disk"] = applied
    wanted = {feature.id for feature in [*on, *(known[name] for name in names)]}
    problems.extend(
        f"{item['patch']} is in place and nobody asked for {item['feature']}; run: numinous revert"
        for item in applied
        if item["feature"] not in wanted
    )
    in_place = {item["patch"] for item in applied}
    for feature in chosen:
        reasons = _fits_on_disk(feature, tree)
        if feature in on:
            absent = [
                patch.id
                for patch in feature.patches
                if not hasattr(patch, "roles") and patch.id not in in_place
            ]
            if absent:
                reasons.append(
                    f"not in place: {', '.join(absent)}; run: numinous apply {feature.id}"
                )
        report["features"].append(
            {"id": feature.id, "on": feature in on, "fits": not reasons, "reasons": reasons}
        )
    core = fits(CORE, tree) if chosen else []
    problems.extend(f"{CORE.id}: {reason}" for reason in core)
    if serve is not None:
        report["command"] = _judge_command(serve, on if on or not names else chosen, tree)
    holds = not problems and all(row["fits"] for row in report["features"])
    if report["command"] is not None:
        holds = holds and not report["command"]["problems"] and not report["command"]["refusals"]
    return report, HOLDS if holds else FAILS


def status_report(engine: str | None = None) -> tuple[dict[str, Any], int]:
    """What is in place now: edits on disk, and the engine processes that published themselves, counters summed."""
    report: dict[str, Any] = {"engine": None, "problems": [], "on_disk": [], "servers": []}
    try:
        tree = find_engine(engine)
        report["engine"] = _engine(tree)
        report["on_disk"], report["problems"] = _disk(tree)
    except PatchError as error:
        report["problems"].append(str(error))
    servers: dict[str, dict[str, Any]] = {}
    for process in counters.read_processes():
        server = servers.setdefault(
            process.run, {"run": process.run, "alive": False, "processes": [], "totals": {}}
        )
        server["alive"] = server["alive"] or process.alive
        server["processes"].append(
            {
                "pid": process.pid,
                "alive": process.alive,
                "role": process.role,
                "features": process.record["features"],
            }
        )
        for feature, values in process.totals.items():
            mine = server["totals"].setdefault(feature, {})
            for name, value in values.items():
                mine[name] = mine.get(name, 0) + value
    report["servers"] = [server for server in servers.values() if server["alive"]]
    return report, FAILS if report["problems"] else HOLDS


def _engine(tree: EngineTree | None) -> dict[str, Any] | None:
    return None if tree is None else {"version": tree.version, "where": tree.where}


def _on(feature: Feature, environ: Mapping[str, str]) -> bool:
    try:
        return flags.parse_bool(feature.flag, environ.get(feature.flag, ""))
    except PatchError:
        return False


def _pristine(tree: EngineTree) -> EngineTree:
    """The tree as it was before edits: pins speak of pristine functions."""
    if isinstance(tree, DirectoryTree) and tree.installed:
        return DiskState(tree).pristine()
    return tree


def _fits_on_disk(feature: Feature, tree: EngineTree) -> list[str]:
    # Hooks meet the functions as they are on disk; edits and series are rendered from the pristine ones.
    return fits(feature, _pristine(tree) if feature.on_disk else tree)


def _disk(tree: EngineTree) -> tuple[list[dict[str, str]], list[str]]:
    if not isinstance(tree, DirectoryTree) or not tree.installed:
        return [], []
    status = DiskState(tree).status()
    applied = [{"feature": i.feature_id, "patch": i.patch_id, "kind": i.kind} for i in status.items]
    problems = (
        ["a command died in the middle of a change; run: numinous revert"] if status.pending else []
    )
    explained = {
        "pristine": "holds no edit any more (engine reinstalled?)",
        "foreign": "was changed by somebody else after numinous edited it (numinous revert --forget gives it up)",
    }
    problems.extend(
        f"{path} {explained[state]}; run: numinous revert"
        for path, state in status.files.items()
        if state in explained
    )
    return applied, problems


def _environment_problems(
    on: Sequence[Feature], environ: Mapping[str, str], installed_engine: bool
) -> list[str]:
    problems = []
    allowed = {
        name.strip() for name in environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()
    }
    if on and allowed and PLUGIN_NAME not in allowed:
        problems.append(
            f"SGLANG_PLUGINS={environ['SGLANG_PLUGINS']} leaves out {PLUGIN_NAME!r}: features would be ignored"
        )
    if (
        on
        and installed_engine
        and not [e for e in entry_points(group=PLUGIN_GROUP) if e.name == PLUGIN_NAME]
    ):
        problems.append(
            "the engine would not find numinous (no entry point): pip install numinous-tooling beside sglang"
        )
    return problems


# The user's command -----------------------------------------------------------------------------------------------


def _judge_command(
    serve: ServeCommand, features: Sequence[Feature], tree: EngineTree
) -> dict[str, Any]:
    problems = list(serve.problems)
    if "model_path" not in serve.given:
        problems.append("no --model-path")
    problems.extend(_model_problems(serve, tree))
    return {
        "given": dict(serve.given),
        "problems": problems,
        "refusals": refusals_of(features, serve),
        "features": [feature.id for feature in features],
        "model": None if serve.model_config is None else serve.model_config.get("architectures"),
    }


def _model_problems(serve: ServeCommand, tree: EngineTree) -> list[str]:
    config = serve.model_config
    if config is None:
        return []  # a hub id: its config is not on this machine, and nothing is claimed of it
    problems = []
    known = _architectures(tree)
    names = config.get("architectures") or []
    if not names:
        problems.append("config.json names no architectures")
    elif known and not any(name in known for name in names):
        problems.append(f"this engine has no model class {' or '.join(names)}")
    text = {**config, **(config.get("text_config") or {})}
    tp = int(serve.get("tp_size"))
    heads = text.get("num_attention_heads")
    # Attention data parallelism divides the tensor-parallel group before heads are split.
    split = tp // int(serve.get("dp_size")) if serve.get("enable_dp_attention") else tp
    if isinstance(heads, int) and split > 1 and heads % split:
        problems.append(f"--tp-size {tp} does not divide the model's {heads} attention heads")
    limit, asked = text.get("max_position_embeddings"), serve.given.get("context_length")
    if isinstance(limit, int) and isinstance(asked, int) and asked > limit:
        problems.append(f"--context-length {asked} is longer than the model's {limit} positions")
    return problems


def _architectures(tree: EngineTree) -> set[str]:
    """Class names that the engine's model files export by ``EntryClass``."""
    found: set[str] = set()
    for path in tree.files("srt/models/"):
        if path.endswith(".py"):
            for match in re.finditer(
                rb"^EntryClass\s*=\s*(\[[^\]]*\]|\([^)]*\)|\w+)", tree.read(path), re.MULTILINE
            ):
                found.update(re.findall(r"\w+", match.group(1).decode()))
    return found
