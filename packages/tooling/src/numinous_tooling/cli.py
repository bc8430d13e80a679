# SPDX-License-Identifier: Apache-2.0
"""The command ``numinous``. Exit codes: 0 holds, 1 does not hold, 2 could not be decided or bad usage."""

from __future__ import annotations

import io
import json
import sys
from typing import Annotated, Any

from . import __version__
from .patching.errors import PatchError

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as missing:
    if missing.name not in ("typer", "rich"):
        raise
    sys.stderr.write(
        f"numinous: {missing.name} is not installed; run: pip install 'numinous-tooling[cli]'\n"
    )
    sys.exit(2)

app = typer.Typer(
    help="Make an installed SGLang faster and roomier: features, checks, edits, gates.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 200)
err = Console(stderr=True, soft_wrap=True)

JSON = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
ENGINE = Annotated[
    str | None,
    typer.Option(
        help="A wheel or a directory that holds sglang/, instead of the installed engine."
    ),
]
NAMES = Annotated[
    list[str] | None, typer.Argument(help="Feature ids, for example scheduler.decode_burst.")
]


def _print_version(asked: bool) -> None:
    if asked:
        out.print(f"numinous-tooling {__version__}", markup=False, highlight=False)
        raise typer.Exit(0)


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Make an installed SGLang faster and roomier: features, checks, edits, gates."""


@app.command()
def features(engine: ENGINE = None, as_json: JSON = False) -> None:
    """List the installed features: flag, on or off, fits this engine, where it has run."""
    from .patching.check import features_report

    report, code = features_report(engine)
    if as_json:
        _print_json(report)
        raise typer.Exit(code)
    table = Table("feature", "flag", "on", "fits", "where", "what you get")
    for column in table.columns[:4]:
        column.no_wrap = True
    for row in report["features"]:
        where = ", ".join(f"{arch} {word}" for arch, word in row["arch"].items())
        table.add_row(
            row["id"], row["flag"], _yes(row["on"]), _yes(row["fits"]), where, row["sentence"]
        )
    out.print(table)
    if report["problem"]:
        err.print(report["problem"], style="yellow", markup=False)
    for row in report["features"]:
        for reason in row["reasons"]:
            err.print(f"{row['id']}: {reason}", style="red", markup=False)
    raise typer.Exit(code)


_serve_command: list[
    str
] = []  # what stood behind `--`; `main` takes it off before the options are parsed


@app.command()
def check(
    names: NAMES = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Judge every installed feature, enabled or not.")
    ] = False,
    engine: ENGINE = None,
    as_json: JSON = False,
) -> None:
    """Judge features against the engine: numinous check [FEATURE ...] [-- YOUR SERVE COMMAND].

    Exit 0 only if everything that is enabled fits. After `--`, put your own serve command line.
    """
    from .patching.check import check_report

    report, code = check_report(
        names or [], engine=engine, everything=everything, command=_serve_command
    )
    if as_json:
        _print_json(report)
        raise typer.Exit(code)
    if report["engine"]:
        out.print(
            f"engine: sglang {report['engine']['version']} at {report['engine']['where']}",
            markup=False,
        )
    for row in report["features"]:
        state = {True: "fits", False: "does not fit", None: "undecided"}[row["fits"]]
        out.print(
            f"{row['id']}: {'on' if row['on'] else 'off'}, {state}",
            style=None if row["fits"] else "red",
            markup=False,
        )
        for reason in row["reasons"]:
            out.print(f"  {reason}", markup=False)
    for item in report["on_disk"]:
        out.print(f"on disk: {item['patch']} ({item['kind']})", markup=False)
    if report["command"]:
        for line in report["command"]["problems"]:
            out.print(f"command: {line}", style="red", markup=False)
        for name, lines in report["command"]["refusals"].items():
            for line in lines:
                out.print(f"{name} cannot serve this command: {line}", style="red", markup=False)
        if not report["command"]["problems"] and not report["command"]["refusals"]:
            out.print(
                f"command: accepted by {', '.join(report['command']['features']) or 'stock (no feature is on)'}",
                markup=False,
            )
    for line in report["problems"]:
        out.print(line, style="red", markup=False)
    out.print({0: "holds", 1: "does not hold", 2: "undecided"}[code])
    raise typer.Exit(code)


@app.command()
def apply(names: NAMES = None, engine: ENGINE = None, as_json: JSON = False) -> None:
    """Put the edits and series of features into the installed engine, all or nothing."""
    from .patching.disk import apply_report

    _finish(apply_report(names or [], engine), as_json)


@app.command()
def revert(
    names: NAMES = None,
    engine: ENGINE = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Give up files that somebody else changed since.")
    ] = False,
    as_json: JSON = False,
) -> None:
    """Take edits and series out again, byte for byte; without names, all of them."""
    from .patching.disk import revert_report

    _finish(revert_report(names or [], engine, forget), as_json)


@app.command()
def status(engine: ENGINE = None, as_json: JSON = False) -> None:
    """Show what is in place: edits on disk, running servers and their engaged / refused counters."""
    from .patching.check import status_report

    report, code = status_report(engine)
    if as_json:
        _print_json(report)
        raise typer.Exit(code)
    for item in report["on_disk"]:
        out.print(f"on disk: {item['patch']} ({item['kind']}) of {item['feature']}", markup=False)
    if not report["on_disk"]:
        out.print("on disk: nothing")
    for server in report["servers"]:
        roles = ", ".join(
            f"{p['role']} {p['pid']}{'' if p['alive'] else ' (ended)'}" for p in server["processes"]
        )
        out.print(f"server {server['run']}: {roles}", markup=False)
        for name in sorted({f for p in server["processes"] for f in p["features"]}):
            counts = ", ".join(
                f"{k} {v}" for k, v in sorted(server["totals"].get(name, {}).items())
            )
            out.print(f"  {name}: {counts or 'in place, not called yet'}", markup=False)
    if not report["servers"]:
        out.print("servers: none with features on")
    for line in report["problems"]:
        out.print(line, style="red", markup=False)
    raise typer.Exit(code)


@app.command()
def doctor(
    engine: ENGINE = None,
    gpu: Annotated[
        str | None, typer.Option(help="Judge for this GPU instead of the ones here.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="config.json of the model that the command names.")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Say what this machine and this engine lack: numinous doctor [-- YOUR SERVE COMMAND].

    Versions, tuned configs, caches, edits, features that would fit; after `--`, which known bugs of the engine and of
    its kernel libraries that command would meet.
    """
    from .doctor import doctor_report, exit_code

    report = doctor_report(engine=engine, gpu=gpu, command=_serve_command, config=config)
    if as_json:
        _print_json(report)
        raise typer.Exit(exit_code(report))
    styles = {"ok": "green", "note": None, "problem": "red", "unknown": "yellow"}
    for section, findings in report.items():
        if not isinstance(findings, list):
            continue
        out.print(section, style="bold")
        for finding in findings:
            detail = f": {finding['detail']}" if finding["detail"] else ""
            fix = f" -> {finding['fix']}" if finding["fix"] else ""
            out.print(
                f"  {finding['level']:<7} {finding['what']}{detail}{fix}",
                style=styles[finding["level"]],
                markup=False,
            )
    raise typer.Exit(exit_code(report))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def gate(context: typer.Context) -> None:
    """Decide by measurement: `numinous gate serving ...`, `numinous gate accuracy ...` (see `--help` of each)."""
    try:
        from .gate.__main__ import main as gate_main
    except ModuleNotFoundError as missing:
        raise PatchError(
            f"{missing.name} is not installed; run: pip install 'numinous-tooling[gate]'"
        ) from missing
    raise typer.Exit(gate_main(context.args))


@app.command()
def catalog(
    arch: Annotated[
        str | None, typer.Option(help="Show this architecture only, for example sm120.")
    ] = None,
    op: Annotated[str | None, typer.Option(help="A name, or a pattern with * and ?.")] = None,
    as_json: JSON = False,
) -> None:
    """List the kernels of the installed packages: where each is proven and how, its flag, peers and records."""
    from .catalog import catalog_report

    report, code = catalog_report(arch, op)
    if as_json:
        _print_json(report)
        raise typer.Exit(code)
    table = Table("op", "package", *report["archs"], "flag", "peers", "records")
    for column in table.columns[:-2]:
        column.no_wrap = True
    for row in report["kernels"]:
        words = [word or "-" for word in row["arch"].values()]
        peers, records = (", ".join(row[name]) or "-" for name in ("peers", "evidence"))
        table.add_row(row["op"], row["package"], *words, row["flag"] or "-", peers, records)
    out.print(table)
    if not report["kernels"]:
        err.print("no installed package has kernels", style="yellow")
    raise typer.Exit(code)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def bench(context: typer.Context) -> None:
    """Time ops against their peers, after a correctness gate (see `numinous bench --help`)."""
    from .bench.__main__ import main as bench_main

    raise typer.Exit(bench_main(context.args))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def roofline(context: typer.Context) -> None:
    """Floor of an op, or ceiling of a model, on each GPU (see `numinous roofline --help`)."""
    from .roofline.command import roofline as run

    raise typer.Exit(run(context.args))


@app.command(
    name="bytes",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def bytes_(context: typer.Context) -> None:
    """Memory and byte model of a model's config.json (see `numinous bytes --help`)."""
    from .roofline.command import bytes_ as run

    raise typer.Exit(run(context.args))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def diag(context: typer.Context) -> None:
    """Stalls of a server, its first index out of range, its memory against the model (see `numinous diag`)."""
    from .diag.command import diag as run

    raise typer.Exit(run(context.args))


def _finish(result: tuple[dict[str, Any], int], as_json: bool) -> None:
    report, code = result
    if as_json:
        _print_json(report)
    else:
        for line in report["done"]:
            out.print(line, markup=False)
        for line in report["problems"]:
            err.print(line, style="red", markup=False)
    raise typer.Exit(code)


def _print_json(report: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(report, indent=2, default=str) + "\n")


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "?"}[value]


def main() -> None:
    """Console script."""
    for stream in (sys.stdout, sys.stderr):
        # An ASCII terminal gets "?" for a character that it lacks, and not a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    words = sys.argv[1:]
    if words[:1] in (["check"], ["doctor"]) and "--" in words:
        _serve_command.extend(words[words.index("--") + 1 :])
        words = words[: words.index("--")]
    try:
        app(args=words, prog_name="numinous")
    except PatchError as error:
        err.print(f"numinous: {error}", style="red", markup=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
