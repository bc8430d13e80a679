# SPDX-License-Identifier: Apache-2.0
"""What this machine and this engine lack. Standard library only; imports neither torch nor the engine; needs no GPU.

The report is a dictionary: one list of findings per section (`SECTIONS`), then ``data`` with the numbers and lists behind
them, for machines.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from numinous_tooling import __version__
from numinous_tooling.patching import flags
from numinous_tooling.patching.check import features_report
from numinous_tooling.patching.discover import installed_features
from numinous_tooling.patching.engine import EngineTree, find_engine
from numinous_tooling.patching.errors import PatchError
from numinous_tooling.upstream.headers import PROJECTS

from .bugs import bugs_section
from .caches import caches_section
from .findings import Finding, finding
from .installation import engine_distribution, engine_section, packages_of
from .machine import Gpu, as_data, machine_section
from .tuned import devices_of, tuned_section
from .versions import versions_section

__all__ = ["SECTIONS", "doctor_report", "exit_code"]

SECTIONS = ("engine", "machine", "versions", "tuned_configs", "features", "upstream", "caches")


def doctor_report(
    engine: str | None = None,
    gpu: str | None = None,
    environ: Mapping[str, str] | None = None,
    command: Sequence[str] = (),
    config: str | None = None,
) -> dict[str, Any]:
    """Everything that can be said without starting anything.

    Args:
        engine: wheel, or directory that holds ``sglang/``, instead of the installed engine.
        gpu: judge for the GPU of this name, here or not, instead of those that are here.
        environ: variables to read, default the process's own.
        command: the user's serve command, judged for known bugs of the engine and of its kernel libraries.
        config: config.json of its model, where the model is not on this machine.

    Returns:
        `SECTIONS`, each a list of findings ``{level, what, detail, fix}`` with level ``ok``, ``note``, ``problem`` or
        ``unknown``; ``numinous``, the version that wrote the report; ``data``.
    """
    environ = os.environ if environ is None else environ
    engine = engine or environ.get("NUMINOUS_ENGINE") or None
    tree, missing = _find(engine)
    packages = packages_of(tree)
    distribution = engine_distribution(tree) if tree else None
    machine, gpus = machine_section(gpu, devices_of(tree) if tree else (), environ)
    versions, versions_data = versions_section(distribution, packages, gpus)
    features, features_data = _features(engine, gpus, environ)
    caches, caches_data = caches_section(packages, environ)
    bugs: list[Finding] = []
    bugs_data: list[dict[str, Any]] = []
    if tree:
        known = {
            found.distribution: packages.version(found.distribution) for found in PROJECTS.values()
        }
        bugs, bugs_data = bugs_section(tree, known, command, config, environ)
    tuned: list[Finding] = []
    tuned_data: dict[str, Any] | None = None
    if tree:
        tuned, tuned_data = tuned_section(tree, gpus, packages.version("triton"), environ)
    return {
        "numinous": __version__,
        "engine": engine_section(tree, packages, environ) if tree else missing,
        "machine": machine,
        "versions": versions,
        "tuned_configs": tuned,
        "features": features,
        "upstream": bugs,
        "caches": caches,
        "data": {
            "engine": {"version": tree.version, "where": tree.where} if tree else None,
            "gpus": as_data(gpus),
            "versions": versions_data,
            "tuned_configs": tuned_data,
            "features": features_data,
            "upstream": bugs_data,
            "caches": caches_data,
        },
    }


def exit_code(report: Mapping[str, Any]) -> int:
    """0 nothing wrong, 1 at least one problem, 2 undecided: no engine, or nothing wrong as far as could be seen."""
    if report["data"]["engine"] is None:
        return 2
    levels = {found["level"] for section in SECTIONS for found in report[section]}
    return 1 if "problem" in levels else 2 if "unknown" in levels else 0


def _find(engine: str | None) -> tuple[EngineTree | None, list[Finding]]:
    try:
        return find_engine(engine), []
    except PatchError as error:
        fix = "pip install sglang==0.5.20, or name an engine with --engine"
        return None, [finding("problem", "no engine", str(error), fix)]


def _is_idle_fix(row: Mapping[str, Any]) -> bool:
    """Whether a feature is one of the many fixes, off, and nothing is to be said of it alone."""
    return str(row["id"]).startswith("upstream.") and not row["on"] and bool(row["fits"])


def _features(
    engine: str | None, gpus: list[Gpu], environ: Mapping[str, str]
) -> tuple[list[Finding], dict[str, Any]]:
    """Installed features: on or off, fit or not, and where they are proven."""
    try:
        installed = installed_features()
        rows = features_report(engine, environ)[0]["features"]
    except PatchError as error:
        return [finding("problem", "features", str(error), "reinstall the package")], {
            "would_fit": [],
            "rows": [],
        }
    findings = []
    try:
        flags.enabled(installed, environ)
    except PatchError as error:
        findings.append(
            finding("problem", "NUMINOUS_ variables", str(error), "run: numinous check")
        )
    if not rows:
        findings.append(
            finding(
                "note",
                "no features installed",
                "",
                "pip install a numinous package, for example numinous-scheduler",
            )
        )
    arches = sorted({gpu.arch or "unknown" for gpu in gpus}) or ["cpu"]
    fixes = [row for row in rows if _is_idle_fix(row)]
    if fixes:
        findings.append(
            finding(
                "ok", "upstream fixes (off)", f"{len(fixes)} fit this engine; see numinous features"
            )
        )
    for row in rows:
        if row in fixes:
            continue
        where = ", ".join(f"{row['arch'].get(arch, 'not claimed')} on {arch}" for arch in arches)
        state = "on" if row["on"] else "off"
        what = f"{row['id']} ({state})"
        if row["fits"] is None:
            findings.append(finding("unknown", what, f"no engine to fit; {where}"))
        elif row["fits"]:
            claimed = all(arch in row["arch"] for arch in arches)
            findings.append(
                finding("ok" if claimed else "note", what, f"fits this engine; {where}")
            )
        else:
            fix = f"unset {row['flag']}, or use the engine that it fits" if row["on"] else ""
            findings.append(
                finding(
                    "problem" if row["on"] else "note",
                    what,
                    f"does not fit: {row['reasons'][0]}",
                    fix,
                )
            )
    return findings, {
        "would_fit": [row["id"] for row in rows if row["fits"]],
        "arches": arches,
        "rows": rows,
    }
