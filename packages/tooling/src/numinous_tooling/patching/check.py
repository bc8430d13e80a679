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
from .edits import MARKER
from .engine import DirectoryTree, EngineTree, find_engine, installed_engine
from .errors import PatchError
from .feature import Edit, Feature, Series
from .journal import DiskState
from .proof import file_problem, rendered
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
    rows: list[dict[str, Any]] = []
    try:
        installed = installed_features()
    except PatchError as error:
        report = {"engine": _engine(tree), "problem": str(error), "features": rows}
        return report, UNDECIDED
    for feature in installed:
        reasons = [] if tree is None else _fits_on_disk(feature, tree, installed)
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
        names: feature ids, or a word (``upstream``) for its features on disk; none means the enabled ones, and where none is enabled, every installed one.
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
        installed = installed_features()
    except PatchError as error:
        problems.append(str(error))
        return report, UNDECIDED
    serve = None
    undecided: list[str] = []
    try:
        serve = parse_command(command, tree, environ) if command else None
    except PatchError as error:
        undecided.append(str(error))  # whether the features fit can still be said
    if serve is not None:
        environ = dict(serve.environ)
    known = {feature.id: feature for feature in installed}
    # A word stands for all of its features on disk, as in `numinous apply`.
    words = {
        name: [feature.id for feature in installed if feature.word == name and feature.on_disk]
        for name in names
        if name not in known
    }
    names = [one for name in names for one in words.get(name) or [name]]
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
    applied, disk_problems, unknown_disk = _disk(tree)
    problems.extend(disk_problems)
    undecided.extend(unknown_disk)
    report["on_disk"] = applied
    wanted = {feature.id for feature in [*on, *(known[name] for name in names)]}
    problems.extend(
        f"{item['patch']} is in place and nobody asked for {item['feature']}; run: numinous revert"
        for item in applied
        # Applying a fix of the engine's own bug is the whole wish; its flag only makes the boot insist on it.
        if item["feature"] not in wanted and not item["feature"].startswith("upstream.")
    )
    in_place = {item["patch"] for item in applied}
    for feature in chosen:
        if feature.on_disk and unknown_disk:  # a damaged journal: what was pristine is not known
            row = {"id": feature.id, "on": feature in on, "fits": None, "reasons": []}
            report["features"].append(row)
            continue
        reasons = _fits_on_disk(feature, tree, installed)
        reasons.extend(_out_of_date(feature, tree))
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
    holds = not problems and all(row["fits"] is not False for row in report["features"])
    if report["command"] is not None:
        holds = holds and not report["command"]["problems"] and not report["command"]["refusals"]
    problems.extend(undecided)
    if not holds:
        return report, FAILS
    return report, UNDECIDED if undecided else HOLDS


def status_report(engine: str | None = None) -> tuple[dict[str, Any], int]:
    """What is in place now: edits on disk, and the engine processes that published themselves, counters summed."""
    report: dict[str, Any] = {"engine": None, "problems": [], "on_disk": [], "servers": []}
    try:
        # As apply and revert: NUMINOUS_ENGINE names an engine to judge, and nothing is put in place there.
        tree = find_engine(engine) if engine else installed_engine()
        report["engine"] = _engine(tree)
        report["on_disk"], problems, undecided = _disk(tree)
        report["problems"] = [*problems, *undecided]
    except PatchError as error:
        report["problems"].append(str(error))
    servers: dict[str, list[counters.ProcessState]] = {}
    for process in counters.read_processes():
        servers.setdefault(process.run, []).append(process)
    report["servers"] = [
        {
            "run": run,
            "alive": True,
            "processes": [
                {
                    "pid": process.pid,
                    "alive": process.alive,
                    "role": process.role,
                    "features": _names(process.record["features"]),
                }
                for process in processes
            ],
            "totals": counters.summed(processes),
        }
        for run, processes in servers.items()
        if any(process.alive for process in processes)
    ]
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


def _fits_on_disk(feature: Feature, tree: EngineTree, installed: Sequence[Feature]) -> list[str]:
    # Hooks meet the functions as they are on disk; edits and series are rendered from the pristine ones.
    if not feature.on_disk:
        return fits(feature, tree)
    try:
        pristine = _pristine(tree)
        reasons = fits(feature, pristine)
        if not reasons:
            rendered(pristine.read, _patches(feature, installed), pristine.where)
    except PatchError as error:
        return [str(error)]
    except OSError as error:
        return [f"{error.filename or tree.where}: {error.strerror}"]
    return reasons


def _patches(feature: Feature, installed: Sequence[Feature]) -> list[Edit | Series]:
    """What would be rendered for a feature alone: its patches behind those of the features that it requires."""
    known = {one.id: one for one in installed}
    wanted = {feature.id}
    left = [feature]
    while left:
        for name in left.pop().requires:
            if name in known and name not in wanted:
                wanted.add(name)
                left.append(known[name])
    features = [one for one in installed if one.id in wanted] or [feature]
    return [p for one in features for p in one.patches if isinstance(p, Edit | Series)]


def _out_of_date(feature: Feature, tree: EngineTree) -> list[str]:
    if not feature.on_disk or not isinstance(tree, DirectoryTree) or not tree.installed:
        return []
    try:
        return DiskState(tree).out_of_date([feature])
    except PatchError as error:
        return [str(error)]


def _disk(tree: EngineTree) -> tuple[list[dict[str, str]], list[str], list[str]]:
    """What is applied, what is wrong with it, and what could not be judged."""
    if not isinstance(tree, DirectoryTree) or not tree.installed:
        return [], [], []
    try:
        status = DiskState(tree).status()
        lost = _unknown_edits(tree) if status.version is None else []
    except PatchError as error:
        return [], [], [str(error)]
    except OSError as error:
        return [], [], [f"{error.filename or tree.where}: {error.strerror}; mend that"]
    applied = [{"feature": i.feature_id, "patch": i.patch_id, "kind": i.kind} for i in status.items]
    problems = (
        ["a command died in the middle of a change; run: numinous revert"] if status.pending else []
    )
    problems.extend(
        file_problem(path, state)
        for path, state in status.files.items()
        if state in ("pristine", "foreign")
    )
    return applied, [*problems, *lost], []


def _unknown_edits(tree: DirectoryTree) -> list[str]:
    """Without a journal nothing of ours may lie in the engine; a lost journal is found by the edits' markers."""
    marker = MARKER.encode()
    found = [
        path for path in tree.files("srt") if path.endswith(".py") and marker in tree.read(path)
    ]
    return [
        f"{tree.where}/{path} holds an edit that no journal knows; reinstall the engine"
        for path in found
    ]


def _names(value: object) -> list[str]:
    """Names in a record of another process, which may be damaged."""
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


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
    problems.extend(_size_problems(serve))
    problems.extend(_model_problems(serve, tree))
    refusals: dict[str, list[str]] = {}
    for feature in features:
        try:
            refusals.update(refusals_of([feature], serve))
        except Exception as error:  # its judge is the topic package's code
            problems.append(
                f"{feature.id} could not judge the command ({type(error).__name__}: {error})"
            )
    return {
        "given": dict(serve.given),
        "problems": problems,
        "refusals": refusals,
        "features": [feature.id for feature in features],
        "model": None if serve.model_config is None else serve.model_config.get("architectures"),
    }


def _size_problems(serve: ServeCommand) -> list[str]:
    return [
        f"--{name.replace('_', '-')} {serve.given[name]} must be at least 1"
        for name in ("tp_size", "dp_size", "pp_size")
        if isinstance(serve.given.get(name), int) and serve.given[name] < 1
    ]


def _size(serve: ServeCommand, name: str) -> int:
    try:
        value = serve.get(name)
    except KeyError:
        return 1
    return value if isinstance(value, int) and value > 0 else 1


def _model_problems(serve: ServeCommand, tree: EngineTree) -> list[str]:
    config = serve.model_config
    if config is None:
        return []  # a hub id: its config is not on this machine, and nothing is claimed of it
    problems = []
    known = _architectures(tree)
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        problems.append("config.json: architectures is not a list of names")
    elif not names:
        problems.append("config.json names no architectures")
    elif known and not any(name in known for name in names):
        problems.append(f"this engine has no model class {' or '.join(names)}")
    text = config.get("text_config") or {}
    if not isinstance(text, dict):
        problems.append("config.json: text_config is not an object")
        text = {}
    text = {**config, **text}
    tp = _size(serve, "tp_size")
    heads = text.get("num_attention_heads")
    if heads is not None and (not isinstance(heads, int) or isinstance(heads, bool)):
        problems.append("config.json: num_attention_heads is not a whole number")
        heads = None
    # Attention data parallelism divides the tensor-parallel group before heads are split.
    split = tp // _size(serve, "dp_size") if serve.given.get("enable_dp_attention") else tp
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
