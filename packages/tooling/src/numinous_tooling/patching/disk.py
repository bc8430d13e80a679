# SPDX-License-Identifier: Apache-2.0
"""The commands ``numinous apply`` and ``numinous revert``: reports on top of `DiskState`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .discover import installed_features
from .engine import find_engine, installed_engine
from .errors import PatchError
from .feature import Feature
from .flags import check_together
from .journal import DiskState, Report


def apply_report(names: Sequence[str], engine: str | None = None) -> tuple[dict[str, Any], int]:
    """Put features on disk. ``names`` are feature ids, or a word (``upstream``) for all of its on-disk features.

    Returns:
        ({"done": lines, "problems": lines}, exit code): 0 in place, 1 does not fit (nothing written), 2 bad usage.
    """
    chosen, known, problem = _chosen(names)
    if problem:
        return {"done": [], "problems": [problem]}, 2

    def work(state: DiskState) -> Report:
        already = {item.feature_id for item in state.applied()}
        check_together([f for f in known if f.id in already or f in chosen])
        return state.apply(chosen, known)

    return _report(engine, work, "applied")


def revert_report(
    names: Sequence[str], engine: str | None = None, forget: bool = False
) -> tuple[dict[str, Any], int]:
    """Take features off disk; no names: all of them, byte for byte. Needs no installed declaration for that.

    ``forget`` gives up files that somebody else changed after us; it applies to a revert of everything.
    """
    if not names:
        return _report(engine, lambda state: state.revert(forget=forget), "reverted")
    if forget:
        return {"done": [], "problems": ["--forget goes with a revert of everything"]}, 2
    chosen, known, problem = _chosen(names)
    if problem:
        return {"done": [], "problems": [problem]}, 2
    return _report(
        engine, lambda state: state.revert([feature.id for feature in chosen], known), "reverted"
    )


def _chosen(names: Sequence[str]) -> tuple[list[Feature], list[Feature], str | None]:
    """(features that the names mean, every feature with something on disk, what is wrong with the names)."""
    try:
        installed = installed_features()
    except PatchError as error:
        return [], [], str(error)
    known = [feature for feature in installed if feature.on_disk]
    if not names:
        return [], known, "name the features to apply; numinous features lists them"
    chosen: list[Feature] = []
    for name in names:
        found = [feature for feature in known if name in (feature.id, feature.word)]
        if not found:
            in_memory = [feature for feature in installed if feature.id == name]
            if in_memory:
                return [], known, f"{name} changes no file; switch it on with {in_memory[0].flag}=1"
            return [], known, f"no installed feature {name}; numinous features lists them"
        chosen.extend(feature for feature in found if feature not in chosen)
    return chosen, known, None


def _report(
    engine: str | None, work: Callable[[DiskState], Report], verb: str
) -> tuple[dict[str, Any], int]:
    try:
        # NUMINOUS_ENGINE names an engine to judge: only --engine may name one to change.
        report = work(DiskState(find_engine(engine) if engine else installed_engine()))
    except PatchError as error:
        return {"done": [], "problems": [str(error)]}, 1
    done = []
    if report.recovered:
        done.append("an earlier command had died in the middle; its changes were undone first")
    done.extend(f"no longer ours, left as it is: {path}" for path in report.forgotten)
    done.extend(f"{verb}: {path}" for path in report.written)
    if not report.written:
        done.append("nothing to do: everything is as asked")
    done.append("in place now: " + (", ".join(item.patch_id for item in report.items) or "nothing"))
    return {"done": done, "problems": []}, 0
