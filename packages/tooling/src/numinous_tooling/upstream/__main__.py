# SPDX-License-Identifier: Apache-2.0
"""``python -m numinous_tooling.upstream run | table | pins``, in a checkout.

Exit codes: 0 it holds, 1 it does not, 2 no checkout, no engine or bad usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numinous_tooling.patching.discover import installed_features
from numinous_tooling.patching.engine import find_engine
from numinous_tooling.patching.errors import PatchError
from numinous_tooling.repo.checkout import RepoError, find_checkout

from . import pins, records, run, table
from .headers import FOLDER, PROJECTS, fix_problems, read_fixes
from .series import PINS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        root = find_checkout().root / FOLDER
        code: int = options.work(root, options)
    except (RepoError, PatchError) as error:
        print(f"upstream: {error}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m numinous_tooling.upstream",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    command = commands.add_parser(
        "run", help="every reproduction on the released and on the patched package"
    )
    command.add_argument(
        "names", nargs="*", help="ids, folders, numbers or slugs, with * and ?; left out: all"
    )
    for flag, what in (
        ("--tree", "released package (default: the installed one)"),
        ("--newest", "newest release, for information"),
    ):
        command.add_argument(
            flag,
            action="append",
            default=[],
            metavar="[PROJECT=]PATH",
            help=f"wheel or folder of the {what}; PROJECT is sglang where left out",
        )
    command.add_argument("--jobs", type=int, default=2, help="processes at a time (default 2)")
    command.add_argument("--timeout", type=float, default=run.TIMEOUT_S, help="seconds a process")
    command.add_argument(
        "--together", action="store_true", help="also run each test with all fixes in place"
    )
    command.add_argument(
        "--device",
        choices=(run.CPU, "cuda"),
        default=run.CPU,
        help="cuda: only the tests with Triton kernels, compiled and on the GPU",
    )
    command.add_argument("--out", type=Path, help="write the report there, as JSON")
    command.add_argument(
        "--evidence",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FILE",
        help=f"with --device cuda: append a record of every fix reproduced to FILE ({records.FILE})",
    )
    command.set_defaults(work=_run)

    command = commands.add_parser("table", help="judge headers and page")
    command.add_argument("--write", action="store_true", help=f"write {FOLDER}/{table.PAGE}")
    command.set_defaults(work=_table)

    command = commands.add_parser(
        "pins", help="record the digests of what the fixes change; list pins of hooks that conflict"
    )
    command.add_argument("--engine", help="pristine engine, wheel or folder")
    command.add_argument(
        "--conflicts",
        action="store_true",
        help="record nothing; list what pins of the installed features have to accept",
    )
    command.set_defaults(work=_pins)
    return parser


def _run(root: Path, options: argparse.Namespace) -> int:
    fixes = read_fixes(
        root, [name.rstrip("/").removeprefix(f"{FOLDER}/") for name in options.names]
    )
    if not fixes:
        raise PatchError(f"no fix of that name in {FOLDER}/")
    gpus: list[str] = []
    if options.evidence is not None and options.device == run.CPU:
        raise PatchError(
            "--evidence is for runs with --device cuda; tests on the CPU repeat everywhere"
        )
    if options.evidence not in (None, Path()) and options.evidence.suffix != ".jsonl":
        raise PatchError(
            f"--evidence {options.evidence} is no .jsonl file; names of fixes go before it"
        )
    if options.device != run.CPU:
        from numinous_tooling.gate.provenance import gpu_names

        gpus = gpu_names()
        if not gpus:
            raise PatchError(f"--device {options.device}: this machine has no GPU")
        fixes = [fix for fix in fixes if fix.on_device]
        if not fixes:
            raise PatchError(f"--device {options.device}: no test of these has a kernel to run")
    report = run.run(
        fixes,
        _paths(options.tree),
        _paths(options.newest),
        jobs=options.jobs,
        timeout_s=options.timeout,
        together=options.together,
        device=options.device,
        say=_say,
    )
    report["gpus"] = gpus
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for line in report["problems"]:
        print(f"upstream: {line}")
    counts = ", ".join(f"{number} {word}" for word, number in sorted(report["counts"].items()))
    print(f"upstream: {len(report['fixes'])} fixes: {counts}")
    for project, version in report["newest"].items():
        states = [row["newest"] for row in report["fixes"] if row["name"].startswith(project + "/")]
        for word in ("still", "fixed", "undecided"):
            number = sum(state["state"] == word for state in states)
            print(f"upstream: {project} {version}: {number} {word}")
    if options.evidence is not None:
        _record(root, options, report)
    return 0 if report["holds"] else 1


def _record(root: Path, options: argparse.Namespace, report: dict[str, Any]) -> None:
    from numinous_tooling import evidence
    from numinous_tooling.bench.clocks import CudaClock  # imports torch
    from numinous_tooling.bench.facts import run_facts

    path = root.parent / records.FILE if options.evidence == Path() else options.evidence
    words = ["python -m numinous_tooling.upstream run", *options.names, "--device", options.device]
    evidence.append(
        path, records.records_of(report, run_facts(CudaClock(), os.environ), " ".join(words))
    )


def _say(row: dict[str, Any]) -> None:
    print(f"{row['verdict']:<15} {row['name']} ({row['seconds']} s): {row['reason']}", flush=True)
    if newest := row.get("newest"):
        said = [f"{newest['state']} in the newest"]
        said += [f"{key}: {newest[key]}" for key in ("reason", "patch", "port") if newest.get(key)]
        said += [newest["header"]] if "header" in newest else []
        print(f"{'':<15} " + "; ".join(said), flush=True)


def _paths(words: Sequence[str]) -> dict[str, Path]:
    found = {}
    for word in words:
        project, equals, path = word.partition("=")
        if not equals:
            project, path = "sglang", word
        if project not in PROJECTS:
            raise PatchError(f"{project} is no project; there are {', '.join(PROJECTS)}")
        found[project] = Path(path).resolve()
        if not found[project].exists():
            raise PatchError(f"{path} does not exist")
    return found


def _table(root: Path, options: argparse.Namespace) -> int:
    lines = [f"{FOLDER}/{name}: {line}" for name, line in fix_problems(root)]
    if not lines and options.write:
        table.write(root)
    if not lines:
        lines = [f"{FOLDER}/{table.PAGE}: {line}" for line in table.problems(root)]
        lines += [f"{FOLDER}/{PINS}: {line}" for line in pins.stale(root)]
    for line in lines:
        print(line)
    print(f"upstream: {len(lines)} findings", file=sys.stderr)
    return 1 if lines else 0


def _pins(root: Path, options: argparse.Namespace) -> int:
    engine = find_engine(options.engine)
    if options.conflicts:
        lines = pins.conflicts(installed_features(), root, engine)
    else:
        lines = pins.record(root, engine)
    for line in lines:
        print(line)
    what = "pins to widen" if options.conflicts else "findings"
    print(f"upstream: {len(lines)} {what}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
