# SPDX-License-Identifier: Apache-2.0
"""What runs inside every engine process: decide, install, prove, publish; or end the process in one line.

Entry point ``numinous`` of group ``sglang.srt.plugins``. With no ``NUMINOUS_*`` feature flag set it returns at once
and the process is stock. Failures leave as `SystemExit`, because the engine's plugin loader logs and forgets
ordinary exceptions and would go on to serve stock under the user's belief that a feature is on.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from numinous_tooling import __version__

from . import counters, flags
from .core import CORE
from .discover import installed_features, load_callable
from .engine import DirectoryTree, find_engine
from .errors import PatchError
from .feature import Feature, Registration
from .hooks import Installation, foreign_replacements, install
from .pins import forget_parsed, judge_pin
from .serve_command import ServeCommand

DROPPED = "NUMINOUS_DROPPED"
RUN = "NUMINOUS_RUN"

_ROLE_OF_FUNCTION = {
    "run_scheduler_process": "scheduler",
    "run_detokenizer_process": "detokenizer",
    "run_data_parallel_controller_process": "dp_controller",
}


@dataclass
class Boot:
    """State of numinous in this process."""

    role: str
    tree: DirectoryTree
    features: list[Feature]
    installation: Installation = field(default_factory=lambda: Installation([]))


_boot: Boot | None = None


def plugin() -> None:
    """Entry point of the engine's plugin loader."""
    if flags.any_set():
        boot_process(_role())


def boot_process(role: str) -> None:
    """Install the enabled features of an engine process and prove them; idempotent.

    Raises:
        SystemExit: something enabled cannot be proven in place (``NUMINOUS_STRICT=0``: a warning instead, and stock).
    """
    global _boot
    if _boot is not None or not flags.any_set():
        return
    try:
        features = flags.enabled(installed_features())
    except PatchError as error:
        _fail(str(error), flags_readable=False)
        return
    if not features:
        return
    os.environ.setdefault(RUN, f"{os.getpid()}-{int(time.time())}")
    try:
        tree = find_engine()
        if not isinstance(tree, DirectoryTree):
            raise PatchError(f"{tree.where} is not an installation")
        features = _fitting(features, tree, role)
        _boot = Boot(role, tree, features)
        _install(_boot)
        _prove_again_after_other_plugins(_boot)
    except PatchError as error:
        if _boot is not None:
            _boot.installation.undo()
        _boot = None
        _drop([feature.id for feature in features])
        _fail(str(error))
        return
    _publish(_boot)


def run_id() -> str:
    """Id shared by the processes of this server; empty before boot."""
    return os.environ.get(RUN, "")


def judge_launch(command: ServeCommand) -> None:
    """Let every enabled feature judge the resolved launch; the main process calls it before it spawns anything."""
    if _boot is None:
        return
    refusals = refusals_of(_boot.features, command)
    if not refusals:
        return
    _drop(list(refusals))
    _fail("; ".join(f"{name}: {line}" for name, lines in refusals.items() for line in lines))
    _boot.installation.undo()
    _boot.features = [feature for feature in _boot.features if feature.id not in refusals]
    if _boot.features:
        _install(_boot)
    _publish(_boot)


def refusals_of(features: Sequence[Feature], command: ServeCommand) -> dict[str, list[str]]:
    """feature id -> why it cannot serve `command`; features without objection are absent."""
    found: dict[str, list[str]] = {}
    for feature in features:
        if feature.judge is not None:
            lines = list(load_callable(feature.judge)(command))
            if lines:
                found[feature.id] = lines
    return found


def fits(feature: Feature, tree: Any) -> list[str]:
    """Why a feature does not fit this engine tree (version and every pin), as lines; empty if it fits."""
    name, versions = feature.engine
    if tree.version not in versions:
        return [f"needs {name} {' or '.join(versions)}, found {tree.version} in {tree.where}"]
    reasons: list[str] = []
    for patch in feature.patches:
        for pin in patch.pins:
            try:
                reason = judge_pin(tree, pin)
            except PatchError as error:
                reason = str(error)
            if reason:
                reasons.append(f"{patch.id}: {reason}")
    return reasons


def _fitting(features: list[Feature], tree: DirectoryTree, role: str) -> list[Feature]:
    """Judge everything statically, for all roles, so that the main process fails before it spawns a child."""
    dropped = {name for name in os.environ.get(DROPPED, "").split(",") if name}
    features = [feature for feature in features if feature.id not in dropped]
    if role != "main":
        return features
    applied = _applied(tree) if any(feature.on_disk for feature in features) else set()
    bad: dict[str, str] = {}
    for feature in (*features, CORE):
        reasons = [] if feature.on_disk else fits(feature, tree)
        missing = [p.id for p in feature.patches if not hasattr(p, "roles") and p.id not in applied]
        if missing:
            reasons.append(
                f"its edits are not in place ({', '.join(missing)}); run: numinous apply {feature.id}"
            )
        if reasons:
            bad[feature.id] = reasons[0] + (
                f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
            )
    if not bad:
        return features
    _drop(list(bad) if CORE.id not in bad else [feature.id for feature in features])
    _fail("; ".join(f"{name}: {reason}" for name, reason in bad.items()))
    return [] if CORE.id in bad else [feature for feature in features if feature.id not in bad]


def _applied(tree: DirectoryTree) -> set[str]:
    """Ids of the edits and series that are on disk."""
    from .journal import DiskState  # only processes with such a feature pay for the import

    return {item.patch_id for item in DiskState(tree).applied()}


def _install(boot: Boot) -> None:
    everything = [*boot.features, CORE] if boot.features else []
    boot.installation = install(everything, boot.role, boot.tree)
    for feature in everything:
        for patch in feature.patches:
            if isinstance(patch, Registration) and boot.role in patch.roles:
                load_callable(patch.run)()
                if reason := load_callable(patch.verify)():
                    raise PatchError(f"{feature.id}: {patch.id}: {reason}")
    forget_parsed()


def _prove_again_after_other_plugins(boot: Boot) -> None:
    """The engine applies other plugins' hooks after ours: look once more when it has."""
    registry_module = sys.modules.get("sglang.srt.plugins.hook_registry")
    if registry_module is None:
        return
    registry = registry_module.HookRegistry
    stock = vars(registry)["apply_hooks"]

    def numinous_apply_hooks(cls: Any) -> None:
        registry.apply_hooks = stock
        stock.__func__(cls)
        try:
            boot.installation.verify()
            if replaced := foreign_replacements(boot.installation):
                raise PatchError(
                    f"another plugin replaces {', '.join(replaced)}, which numinous hooks; switch it off"
                )
        except PatchError as error:
            boot.installation.undo()
            _drop([feature.id for feature in boot.features])
            _fail(str(error))
            boot.features = []
            _publish(boot)

    registry.apply_hooks = classmethod(numinous_apply_hooks)


def _publish(boot: Boot) -> None:
    ids = [feature.id for feature in boot.features if boot.role in feature.roles]
    waiting = [feature.id for feature in boot.features if boot.role not in feature.roles]
    counters.publish(
        {
            "role": boot.role,
            "run": run_id(),
            "numinous": __version__,
            "engine": f"sglang {boot.tree.version}",
            "features": ids,
            "targets": [target.name for target in boot.installation.targets],
            "argv": sys.argv,
        }
    )
    text = ", ".join(ids) + " in place" if ids else "nothing to change here"
    if boot.role == "main":
        counters.forget_dead()
        text += f"; to be proven in other processes: {', '.join(waiting)}" if waiting else ""
    _say(f"{boot.role}: {text}")


def _drop(ids: Sequence[str]) -> None:
    """Tell the children of this process that it serves stock instead of these features."""
    known = [name for name in os.environ.get(DROPPED, "").split(",") if name]
    os.environ[DROPPED] = ",".join(dict.fromkeys([*known, *ids]))


def _fail(reason: str, flags_readable: bool = True) -> None:
    """End the process, or warn under ``NUMINOUS_STRICT=0``."""
    try:
        strict = flags.strict()
    except PatchError as error:
        strict, reason = True, f"{reason}; {error}"
    if strict:
        raise SystemExit(f"numinous: {reason} (NUMINOUS_STRICT=0 serves stock instead)")
    names = os.environ.get(DROPPED, "") if flags_readable else "every feature"
    _say(f"WARNING: serving stock instead of {names or 'the enabled features'}: {reason}")


def _say(text: str) -> None:
    # Not through logging: at plugin time the engine has not configured it yet and drops INFO lines.
    stamp = time.strftime("[%Y-%m-%d %H:%M:%S]")
    print(f"{stamp} numinous {__version__}: pid {os.getpid()} {text}", file=sys.stderr, flush=True)


def _role() -> str:
    """Which engine process this is, from the functions on the stack; anything unknown is the main process."""
    frame = sys._getframe()
    while frame is not None:
        role = _ROLE_OF_FUNCTION.get(frame.f_code.co_name)
        if role is not None:
            return role
        frame = frame.f_back  # type: ignore[assignment]
    return "main"


def _reset_for_tests() -> None:
    """Undo this process's installation and forget it."""
    global _boot
    if _boot is not None:
        _boot.installation.undo()
    _boot = None
    for name in (DROPPED, RUN):
        os.environ.pop(name, None)
