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
from .engine import DirectoryTree, installed_engine
from .errors import PatchError
from .feature import Feature, Registration
from .hooks import Installation, foreign_replacements, install
from .pins import forget_parsed, judge_pin
from .serve_command import ServeCommand

DROPPED = "NUMINOUS_DROPPED"
ALL = "*"  # in DROPPED: every feature
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
    if not flags.any_set():
        return
    try:
        boot_process(_role())
    except SystemExit:
        # The loader believes that it is done; a corrected second attempt in this process must boot again.
        loader = sys.modules.get("sglang.srt.plugins")
        if loader is not None:
            loader._plugins_loaded = False  # type: ignore[attr-defined]
        raise


def boot_process(role: str) -> None:
    """Install the enabled features of an engine process and prove them; idempotent.

    Raises:
        SystemExit: something enabled cannot be proven in place. Under ``NUMINOUS_STRICT=0`` the main process warns and
            serves stock instead; any other process still ends, since one rank of stock among patched ones would hang.
    """
    global _boot
    if _boot is not None or not flags.any_set():
        return
    if role == "main":
        os.environ.pop(DROPPED, None)
        os.environ[RUN] = f"{os.getpid()}-{int(time.time())}"
    dropped = _dropped()
    if ALL in dropped:
        return
    boot: Boot | None = None
    try:
        features = [f for f in flags.enabled(installed_features()) if f.id not in dropped]
        if not features:
            return
        boot = Boot(role, installed_engine(), features)
        if role == "main":
            _judge_statically(boot)
        _install(boot)
        _prove_again_after_other_plugins(boot)
        _publish(boot)
    except Exception as error:  # the engine's loader would log it and go on with stock
        if boot is not None:
            boot.installation.undo()
        _fail(_line(error), role)
        _drop([ALL])
        return
    _boot = boot


def run_id() -> str:
    """Id shared by the processes of this server; empty before boot."""
    return os.environ.get(RUN, "")


def judge_launch(command: ServeCommand) -> None:
    """Let every enabled feature judge the resolved launch; the main process calls it before it spawns anything."""
    boot = _boot
    if boot is None or not boot.features:
        return
    refusals = refusals_of(boot.features, command)
    if not refusals:
        return
    _fail(
        "; ".join(f"{name}: {line}" for name, lines in refusals.items() for line in lines),
        boot.role,
    )
    _drop(list(refusals))
    boot.installation.undo()
    boot.features = [feature for feature in boot.features if feature.id not in refusals]
    _install(boot)
    _publish(boot)


def prove_children(pids: Sequence[int]) -> None:
    """In the main process, once its schedulers are ready: each must have published the features that it needs.

    Raises:
        SystemExit: one serves without a feature that is on, for instance because it never loaded plugins.
    """
    if _boot is None:
        return
    published = {
        process.pid: process for process in counters.read_processes() if process.run == run_id()
    }
    for pid in pids:
        process = published.get(pid)
        if process is None:
            raise SystemExit(f"numinous: engine process {pid} never booted numinous")
        needed = {feature.id for feature in _boot.features if process.role in feature.roles}
        if missing := needed - set(process.record["features"]):
            absent = ", ".join(sorted(missing))
            raise SystemExit(f"numinous: {process.role} {pid} serves without {absent}")


def refusals_of(features: Sequence[Feature], command: ServeCommand) -> dict[str, list[str]]:
    """feature id -> why it cannot serve `command`; features without objection are absent."""
    found: dict[str, list[str]] = {}
    for feature in features:
        lines: list[str] = []
        if command.given.get("use_ray"):
            lines.append("--use-ray starts schedulers that load no plugins; not covered")
        if feature.judge is not None:
            try:
                lines.extend(load_callable(feature.judge)(command))
            except Exception as error:
                lines.append(f"its judge failed ({_line(error)})")
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


def _judge_statically(boot: Boot) -> None:
    """Judge every patch of every role before a child is spawned; under ``NUMINOUS_STRICT=0`` drop what does not fit."""
    bad: dict[str, str] = {}
    for feature in (*boot.features, CORE):
        reasons = [] if feature.on_disk else fits(feature, boot.tree)
        if reasons:
            more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
            bad[feature.id] = reasons[0] + more
    if any(feature.on_disk for feature in boot.features):
        from .journal import DiskState  # only processes with such a feature pay for the import

        bad |= DiskState(boot.tree).unproven(boot.features)
    if not bad:
        return
    _fail("; ".join(f"{name}: {reason}" for name, reason in bad.items()), boot.role)
    if CORE.id in bad:
        bad |= dict.fromkeys((feature.id for feature in boot.features), "")
    _drop(list(bad))
    boot.features = [feature for feature in boot.features if feature.id not in bad]


def _install(boot: Boot) -> None:
    everything = [*boot.features, CORE] if boot.features else []
    boot.installation = install(everything, boot.role, boot.tree)
    for feature in everything:
        for patch in feature.patches:
            if isinstance(patch, Registration) and boot.role in patch.roles:
                _register(feature, patch)
    forget_parsed()


def _register(feature: Feature, patch: Registration) -> None:
    try:
        load_callable(patch.run)()
        reason = load_callable(patch.verify)()
    except Exception as error:
        raise PatchError(f"{feature.id}: {patch.id}: {_line(error)}") from error
    if reason:
        raise PatchError(f"{feature.id}: {patch.id}: {reason}")


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
        except Exception as error:
            boot.installation.undo()
            _fail(_line(error), boot.role)
            _drop([ALL])
            boot.features = []
            _publish(boot)

    registry.apply_hooks = classmethod(numinous_apply_hooks)


def _publish(boot: Boot) -> None:
    ids = [feature.id for feature in boot.features if boot.role in feature.roles]
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
    on_disk = [feature.id for feature in boot.features if feature.on_disk and boot.role == "main"]
    places = [f"{', '.join(ids)} in place"] if ids else []
    places += [f"{', '.join(on_disk)} on disk, verified"] if on_disk else []
    if boot.role == "main":
        counters.forget_dead()
        waiting = [f.id for f in boot.features if f.roles - {"main"}]
        places += [f"to be proven in other processes: {', '.join(waiting)}"] if waiting else []
    _say(f"{boot.role}: {'; '.join(places) or 'nothing to change here'}")


def _dropped() -> list[str]:
    return [name for name in os.environ.get(DROPPED, "").split(",") if name]


def _drop(ids: Sequence[str]) -> None:
    """Tell the children of this process that it serves stock instead of these features."""
    os.environ[DROPPED] = ",".join(dict.fromkeys([*_dropped(), *ids]))


def _line(error: Exception) -> str:
    """One line for the user: our own errors speak for themselves, others are named."""
    text = str(error) if isinstance(error, PatchError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def _fail(reason: str, role: str) -> None:
    """End the process; in the main process under ``NUMINOUS_STRICT=0``, warn instead."""
    try:
        strict = flags.strict()
    except PatchError as error:
        strict, reason = True, f"{reason}; {error}"
    if strict or role != "main":
        hint = " (NUMINOUS_STRICT=0 serves stock instead)" if role == "main" else ""
        raise SystemExit(f"numinous: {reason}{hint}")
    _say(f"WARNING: serving stock instead: {reason}")


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
