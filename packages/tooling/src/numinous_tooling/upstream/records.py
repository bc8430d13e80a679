# SPDX-License-Identifier: Apache-2.0
"""Evidence of reproductions on a GPU: one record a fix and run, in ``evidence/upstream-fixes/fixes.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numinous_tooling import evidence

from .run import REPRODUCED

VERSION = "0.1.0"
"""Of numinous-upstream-fixes, which need not be installed where its tests run; a test compares."""
FILE = Path("evidence", "upstream-fixes", "fixes.jsonl")
"""Below the checkout, beside the folder of the fixes."""


def records_of(
    report: Mapping[str, Any], facts: Mapping[str, Any], command: str
) -> list[dict[str, Any]]:
    """Evidence records, still without ids, of the fixes that a run reproduced.

    Args:
        report: of `run.run`.
        facts: commit, device, versions and time of the run (`bench.facts.run_facts`).
        command: that repeats it.
    """
    return [
        {
            "package": "upstream-fixes",
            "version": VERSION,
            **facts,
            "op": "upstream_fix",
            "case": row["name"],
            "provider": row["name"].partition("/")[0],
            "provider_version": report["released"][row["name"].partition("/")[0]],
            "n": row["tests"],
            "verdict": row["verdict"],
            "released": row["reason"],
            "gate": "no test fails with the patch applied",
            "command": command,
        }
        for row in report["fixes"]
        if row["verdict"] == REPRODUCED
    ]


def gpus_of(root: Path) -> dict[str, list[str]]:
    """Name of a fix -> the GPUs on which it was reproduced, after the records beside the folder of fixes."""
    file = root.resolve().parent / FILE
    found: dict[str, set[str]] = {}
    if file.is_file():
        for record in evidence.load(file):
            found.setdefault(record["case"], set()).add(record["gpu"])
    return {name: sorted(gpus) for name, gpus in found.items()}
