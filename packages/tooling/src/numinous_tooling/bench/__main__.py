# SPDX-License-Identifier: Apache-2.0
"""``numinous bench``: time ops against their peers, after a correctness gate, and record the figures.

Exit codes: 0 holds; 1 the gate is red, or ours is slower than --against beyond the noise; 2 undecided, bad usage, or the device is lost.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numinous_tooling import evidence
from numinous_tooling.bench import against
from numinous_tooling.bench.errors import BadUsage, DeviceLost
from numinous_tooling.workbench import Op
from numinous_tooling.workbench.discover import NoSuchOp, declared_ops, load_op

SAMPLES = 30
EXTRA = "run: pip install 'numinous-tooling[bench,kernels]'"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = _parser().parse_intermixed_args(argv)
    try:
        return _run(options)
    except (BadUsage, DeviceLost, NoSuchOp, FileNotFoundError, ValueError) as error:
        print(f"numinous bench: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="numinous bench",
        description=(__doc__ or "").partition(": ")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("ops", nargs="*", metavar="OP", help="name in a catalogue, or module:OP (default: all)")
    add("--case", action="append", default=[], metavar="GLOB", help="cases by id; repeatable")
    add("--provider", action="append", default=[], metavar="GLOB", help="providers; repeatable")
    add("--samples", type=int, default=SAMPLES, metavar="N", help="counted rounds (%(default)s)")
    add("--l2", choices=("cold", "rotate"), help="state of the cache (default: the op's own)")
    add("--device", choices=("gpu", "cpu"), default="gpu", help="cpu tests the path, no more")
    add("--arch", metavar="ARCH", help="refuse (exit 2) a device that is not this one, e.g. sm90")
    add("--evidence", action="store_true", help="append records to evidence/<package>/<op>.jsonl")
    add(
        "--against", metavar="WHAT", help="provider of this run, or id of a record: alarm if slower"
    )
    add("--show", metavar="ID", help="show the recorded run that holds this record; time nothing")
    add("--plot", type=Path, metavar="DIR", help="write SVG figures")
    add("--json", action="store_true", help="print the report as JSON")
    return parser


def _run(options: argparse.Namespace) -> int:
    _demand(options)
    if options.show:
        if options.ops or options.evidence or options.against:
            raise BadUsage("--show times nothing: leave out OP, --evidence and --against")
        records = against.recorded_run(evidence.find_evidence(Path.cwd()), options.show)
        return _finish(options, {"records": records, "red": [], "not_run": [], "against": []})
    ops = {name: load_op(name) for name in options.ops or declared_ops()}
    if not ops:
        raise BadUsage("no catalogue lists an op; name one as module:OP")
    if options.l2:
        ops = {
            name: dataclasses.replace(op, bench_options={**op.bench_options, "l2": options.l2})
            for name, op in ops.items()
        }
    report = _measure(options, ops)
    records = report["records"]
    report["against"] = _compare(options.against, records) if options.against and records else []
    if options.evidence:
        folder = evidence.find_evidence(Path.cwd())
        for op in ops.values():
            if own := [record for record in records if record["op"] == op.name]:
                evidence.append(folder / op.package / f"{op.name}.jsonl", own)
    return _finish(options, report)


def _demand(options: argparse.Namespace) -> None:
    """What is missing is said before anything is measured."""
    wanted = {
        "torch": (not options.show, ""),
        "rich": (not options.json, ", or print --json"),
        "matplotlib": (options.plot is not None, ", or leave --plot out"),
    }
    for name, (needed, instead) in wanted.items():
        if needed and importlib.util.find_spec(name) is None:
            raise BadUsage(f"{name} is not installed; {EXTRA}{instead}")
    if options.evidence:
        evidence.find_evidence(Path.cwd())


def _measure(options: argparse.Namespace, ops: Mapping[str, Op]) -> dict[str, Any]:
    """The report of a run: `records`, which are none where anything is `red`, and what was `not_run`."""
    from numinous_tooling.bench.clocks import CpuClock, CudaClock
    from numinous_tooling.bench.facts import package_version, run_facts
    from numinous_tooling.bench.protocol import bench_op, select_cases
    from numinous_tooling.bench.roofs import measure_roofs
    from numinous_tooling.gate.provenance import COMMIT

    cases = {op.name: select_cases(op, options.case) for op in ops.values()}
    try:
        clock = CpuClock() if options.device == "cpu" else CudaClock()
    except RuntimeError as error:
        raise BadUsage(f"{error}; --device cpu times what names cpu among its archs") from error
    if options.arch and options.arch != clock.arch:
        raise BadUsage(f"this device is {clock.arch}, not {options.arch}")
    facts = run_facts(clock, os.environ)
    if options.evidence and facts["commit"] is None:
        raise BadUsage(f"--evidence wants a commit: run in the repository, or set {COMMIT}")
    records: list[dict[str, Any]] = []
    red: list[str] = []
    not_run: list[dict[str, str]] = []
    with _progress(sum(map(len, cases.values()))) as progress:
        units = {op.traffic(case).unit for op in ops.values() for case in cases[op.name]}
        roof = measure_roofs(clock, units)
        clock.release()
        for name, op in ops.items():
            version = package_version(op)
            result = bench_op(
                op,
                clock,
                version=version,
                roof=roof,
                cases=cases[op.name],
                providers=options.provider,
                samples=options.samples,
                progress=progress,
            )
            red += result.red
            not_run += result.not_run
            own = {"package": op.package, "version": version, "command": _command(options, name)}
            records += [{**row, **own, **facts} for row in result.measured]
    # One gate over the run: where an op is wrong, its neighbours' figures are not the news.
    shown = [] if red else records
    shown = [{"id": evidence.record_id(record), **record} for record in shown]
    return {"records": shown, "red": red, "not_run": not_run}


def _command(options: argparse.Namespace, op: str) -> str:
    """What measures the same again."""
    words = ["numinous", "bench", op]
    for flag in ("case", "provider"):
        words += [word for glob in getattr(options, flag) for word in (f"--{flag}", glob)]
    if options.samples != SAMPLES:
        words += ["--samples", str(options.samples)]
    if options.device == "cpu":
        words += ["--device", "cpu"]
    return shlex.join(words)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda case: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("roofs", total=total)
        yield lambda case: bar.update(task, advance=1, description=case)


def _compare(wanted: str, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if any(record["provider"] == wanted for record in records):
        return against.against_provider(records, wanted)
    run = against.recorded_run(evidence.find_evidence(Path.cwd()), wanted)
    return against.against_run(records, run)


def _finish(options: argparse.Namespace, report: dict[str, Any]) -> int:
    code = 1 if report["red"] else 0
    if not report["red"]:
        if options.against:
            code = against.exit_code(report["against"])
        elif not report["records"]:
            print("numinous bench: nothing was timed", file=sys.stderr)
            code = 2
    report["figures"] = []
    if options.plot and report["records"]:
        from numinous_tooling.bench.plots import draw

        report["figures"] = [str(path) for path in draw(report["records"], options.plot)]
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return code


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console

    from numinous_tooling.bench.report import roof_line, table

    records = report["records"]
    out = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 200)
    for name in dict.fromkeys(record["op"] for record in records):
        out.print(table([record for record in records if record["op"] == name]))
    lines = [roof_line(records[0]["roof"])] if records else []
    if not all(record["settled"] for record in records):
        lines.append("~ the medians had not come to rest after the warm-up")
    said = [
        (row["provider"], f"not run: {row['reason']}", row["case"]) for row in report["not_run"]
    ]
    said += [(r["provider"], f"*: {r['gate']}", r["case"]) for r in records if not r["agrees"]]
    grouped: dict[tuple[str, str], list[str]] = {}
    for provider, reason, case in said:
        # The digest at the end of a gate differs from case to case.
        grouped.setdefault((provider, reason.partition("; outputs")[0]), []).append(case)
    for (provider, reason), cases in grouped.items():
        lines.append(f"{provider} {reason} ({len(cases)} cases: {', '.join(cases)})")
    lines += [f"gate red, nothing is shown or recorded: {wrong}" for wrong in report["red"]]
    for row in report["against"]:
        base = f" against {row['base']} {row['base_us']:.2f} µs" if "base" in row else ""
        lines.append(
            f"{row['word']}: {row['case']} {row['provider']} {row['median_us']:.2f} µs{base}: {row['reason']}"
        )
    lines += [f"figure: {path}" for path in report["figures"]]
    for line in lines:
        out.print(line, markup=False, highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
