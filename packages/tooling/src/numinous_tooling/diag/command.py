# SPDX-License-Identifier: Apache-2.0
"""``numinous diag``: stalls, accesses, bytes. Exit codes: 0 nothing found, 1 found, 2 nothing to judge or bad usage."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from numinous_tooling.diag import DiagError, access_locator, memory, records, stall_tracer
from numinous_tooling.diag.features import ACCESS_LOCATOR, STALL_TRACER
from numinous_tooling.patching import Feature
from numinous_tooling.patching.counters import state_dir
from numinous_tooling.roofline import RooflineError


def diag(arguments: Sequence[str]) -> int:
    """``numinous diag …``; every error that a user can mend is one line and exit code 2."""
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 2
    try:
        given = parser.parse_args(list(arguments))
    except SystemExit as stop:  # argparse printed its message
        return int(stop.code or 0)
    try:
        code: int = given.run(given)
        return code
    except (DiagError, RooflineError) as error:
        sys.stderr.write(f"numinous diag: {error}\n")
        return 2


class OneLine(argparse.ArgumentParser):
    """Says what is wrong without the usage above it."""

    def error(self, message: str) -> NoReturn:
        """Exit code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = OneLine(
        prog="numinous diag",
        description="Why a server stalls, which index left its array, where its memory went.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, feature, text in (
        ("stalls", _stalls, STALL_TRACER, "iterations of the scheduler beyond the limit"),
        ("access", _access, ACCESS_LOCATOR, "the first index that was out of range"),
    ):
        command = commands.add_parser(
            name, help=text, description=f"{text}; a server records them with {feature.flag}=1"
        )
        command.add_argument(
            "--state-dir", type=Path, metavar="DIR", help="NUMINOUS_STATE_DIR of the server"
        )
        command.add_argument("--json", action="store_true", help="print the report as JSON")
        command.set_defaults(run=run)
    memory.add_parser(commands)
    return parser


def _report(given: argparse.Namespace, feature: Feature, kind: str) -> dict[str, Any]:
    folder = state_dir() if given.state_dir is None else given.state_dir
    if not folder.is_dir():
        raise DiagError(f"no state folder {folder}; start the server with {feature.flag}=1")
    try:
        processes = [
            {"pid": pid, "alive": alive, "engaged": engaged}
            for pid, alive, engaged in records.observed(folder, feature.id)
        ]
        found = records.read(folder, kind)
    except OSError as error:
        raise DiagError(f"state folder {folder}: {error.strerror}; who owns it?") from error
    if not processes and not found:
        raise DiagError(
            f"no process in {folder} ran with {feature.id}; start the server with {feature.flag}=1"
        )
    return {"state_dir": str(folder), "processes": processes, kind: found}


def _finish(
    given: argparse.Namespace, report: dict[str, Any], kind: str, show: Callable[[Any], None]
) -> int:
    if given.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        for process in report["processes"]:
            alive = "" if process["alive"] else " (ended)"
            _line(f"scheduler {process['pid']}{alive}: {process['engaged']} {WHAT[kind]}")
        show(report[kind])
    return 1 if report[kind] else 0


WHAT = {stall_tracer.KIND: "iterations with a batch", access_locator.KIND: "forward passes checked"}


def _stalls(given: argparse.Namespace) -> int:
    kind = stall_tracer.KIND
    return _finish(given, _report(given, STALL_TRACER, kind), kind, _show_stalls)


def _show_stalls(found: list[dict[str, Any]]) -> None:
    if not found:
        _line("no stalls")
        return
    rows = [
        [
            _clock(record["utc"]),
            str(record["pid"]),
            f"{record['ms']:.0f}" + ("" if record["ended"] else "+"),
            record["phase"],
            record["mode"] or "-",
            str(record["requests"]),
            str(record["tokens"]),
            stall_tracer.cause_of(record),
        ]
        for record in found
    ]
    table(["utc", "pid", "ms", "phase", "batch", "requests", "tokens", "why"], rows)
    if any(not record["ended"] for record in found):
        _line("+: still ran when it was written")


def _access(given: argparse.Namespace) -> int:
    kind = access_locator.KIND
    return _finish(given, _report(given, ACCESS_LOCATOR, kind), kind, _show_accesses)


def _show_accesses(found: list[dict[str, Any]]) -> None:
    if not found:
        _line("every checked index was in range")
    for record in found:
        _line(
            f"{_clock(record['utc'])} scheduler {record['pid']}: {access_locator.line_of(record)}"
        )


def _clock(utc: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(utc))


def table(head: list[str], rows: list[list[str]]) -> None:
    """Columns of plain text to the left, the last one as long as it is."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        _line("  ".join(cells).rstrip())


def _line(text: str) -> None:
    sys.stdout.write(text + "\n")
