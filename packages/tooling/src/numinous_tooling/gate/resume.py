# SPDX-License-Identifier: Apache-2.0
"""What an aborted gate run leaves so that it can go on: `state.json` beside `records.jsonl`.

The state holds the settings that decide requests, servers and verdict, and every finished slot. A run resumes only
under the same settings, and only whole slots are kept: a replay that broke off is done again.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from numinous_tooling.gate.conversation import record_of
from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.measures import ArmRun

STATE_FILE = "state.json"
RECORDS_FILE = "records.jsonl"
SCHEMA = 1


@dataclass
class RunState:
    """The state of one run folder; `repeat_base` is added to the repeat in all token seeds."""

    settings: dict[str, Any]
    command: str
    repeat_base: int
    slots: list[dict[str, Any]]
    runs: list[ArmRun]

    def save(self, out: Path, *, complete: bool = False) -> None:
        """Write the state so that a crash at any moment leaves the old or the new one."""
        document = {
            "schema": SCHEMA,
            "complete": complete,
            "command": self.command,
            "settings": self.settings,
            "repeat_base": self.repeat_base,
            "slots": self.slots,
            "runs": [
                {key: value for key, value in _fields(run).items() if key != "records"}
                for run in self.runs
            ],
        }
        draft = out / (STATE_FILE + ".new")
        draft.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(draft, out / STATE_FILE)

    def save_records(self, out: Path) -> None:
        """Write the records of the finished slots alone; as with the state, a crash leaves the old or the new ones."""
        draft = out / (RECORDS_FILE + ".new")
        with draft.open("w") as file:
            for run in self.runs:
                write_records(file, run)
        os.replace(draft, out / RECORDS_FILE)


def _fields(run: ArmRun) -> dict[str, Any]:
    return {field.name: getattr(run, field.name) for field in fields(run)}


def write_records(file: Any, run: ArmRun) -> None:
    """Append the records of a run to `records.jsonl`."""
    for record in run.records:
        line = {"run": run.index, "arm": run.arm, "repeat": run.repeat, **asdict(record)}
        file.write(json.dumps(line, separators=(",", ":")) + "\n")
    file.flush()


def normal(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as JSON gives them back."""
    normalised: dict[str, Any] = json.loads(json.dumps(settings))
    return normalised


def load_state(out: Path) -> RunState:
    """Read the state of an aborted run with the records of its finished slots; those of the broken slot are left out."""
    try:
        document = json.loads((out / STATE_FILE).read_text())
        if document["schema"] != SCHEMA:
            raise GateError(
                f"--resume {out}: {STATE_FILE} has schema {document['schema']}, this version reads {SCHEMA}"
            )
        if document["complete"]:
            raise GateError(f"--resume {out}: the run is complete, its verdict is in verdict.json")
        lines = (out / RECORDS_FILE).read_text().splitlines()
        finished = {run["index"] for run in document["runs"]}
        by_run: dict[int, list[str]] = {index: [] for index in finished}
        for number, line in enumerate(lines, 1):
            try:
                index = json.loads(line)["run"]
            except ValueError:
                # The line that was being written when the run was killed belongs to an unfinished slot.
                if number < len(lines):
                    raise
                break
            if index in by_run:
                by_run[index].append(line)
        runs = [
            ArmRun(**run, records=[record_of(json.loads(line)) for line in by_run[run["index"]]])
            for run in document["runs"]
        ]
        settings = {**document["settings"]}
        rest = document["command"], document["repeat_base"], document["slots"]
    except OSError as error:
        raise GateError(
            f"--resume {out}: {error.filename} cannot be read ({error.strerror}); "
            "only a run that has begun can be resumed"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GateError(
            f"--resume {out}: {STATE_FILE} or {RECORDS_FILE} is damaged ({error!r}); start anew"
        ) from error
    return RunState(settings, *rest, runs)


def check_same(state: RunState, settings: dict[str, Any], out: Path) -> None:
    """Refuse to go on under other settings than those of the aborted run; name the first that differs."""
    now = normal(settings)
    for key in sorted(now.keys() | state.settings.keys()):
        if now.get(key) != state.settings.get(key):
            raise GateError(
                f"--resume {out}: {key} was {json.dumps(state.settings.get(key))[:120]} and is now "
                f"{json.dumps(now.get(key))[:120]}; resume with the options of: {state.command}"
            )


def check_whole(state: RunState, requests: int, out: Path) -> None:
    """Refuse a state whose finished slots have not all of their records."""
    for run in state.runs:
        if len(run.records) != requests:
            raise GateError(
                f"--resume {out}: {RECORDS_FILE} has {len(run.records)} of {requests} records of {run.name}; start anew"
            )
