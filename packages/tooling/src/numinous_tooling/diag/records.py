# SPDX-License-Identifier: Apache-2.0
"""JSON lines that a diagnostic leaves in the state folder: ``<pid>-<start ticks>.<kind>.jsonl``, one file a process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numinous_tooling.patching.counters import make_state_dir, process_stem, read_processes

MAX_RECORDS = 10_000  # per process: a limit below every iteration must not fill the disk


class RecordFile:
    """The records of one kind of this process; created with the first one."""

    def __init__(self, kind: str) -> None:
        self.path = make_state_dir() / f"{process_stem()}.{kind}.jsonl"
        self.written = 0

    def append(self, record: dict[str, Any]) -> bool:
        """Write one line; False once `MAX_RECORDS` are there."""
        if self.written >= MAX_RECORDS:
            return False
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.written += 1
        return True


def read(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Every record of a kind in a state folder, in order of time; a line that is being written is left out."""
    found: list[dict[str, Any]] = []
    for path in folder.glob(f"*.{kind}.jsonl"):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("utc"), float):
                found.append(record)
    return sorted(found, key=lambda record: record["utc"])


def observed(folder: Path, feature: str) -> Iterator[tuple[int, bool, int]]:
    """Scheduler processes in which a feature was in place: pid, whether alive, calls it served."""
    for process in read_processes(folder):
        if feature in process.record["features"]:
            yield process.pid, process.alive, process.totals.get(feature, {}).get("engaged", 0)
