# SPDX-License-Identifier: Apache-2.0
"""The report of a gate run: the table for the terminal, and one self-contained HTML page with plots."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numinous_tooling.gate import page
from numinous_tooling.gate.measures import METRICS, ArmRun, tpot_s, units
from numinous_tooling.gate.page import percent, text_table
from numinous_tooling.gate.run import GateResult
from numinous_tooling.gate.verdict import Comparison

# Share of the cores from which the load of other programs is worth a note.
OTHER_LOAD_SHARE = 0.1


def scale_text(scale: float) -> str:
    """Return a length scale the way people write it: 1/16, or 0.3."""
    fraction = Fraction(scale).limit_denominator(1024)
    return str(fraction) if abs(float(fraction) - scale) < 1e-9 else f"{scale:g}"


def _number(value: float | None, scale: float = 1.0, digits: int = 1) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def figure_rows(document: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the rows of the arm table: a label, and one text per arm; spread over repeats in brackets."""
    figures = [arm["figures"] for arm in document["arms"].values()]

    def row(label: str, *path: str, scale: float = 1.0, digits: int = 1) -> tuple[str, list[str]]:
        cells = []
        for figure in figures:
            values = []
            for part in (figure["pooled"], *figure["repeats"]):
                value: Any = part
                for key in path:
                    value = None if value is None else value.get(key)
                values.append(value)
            spread = [value for value in values[1:] if value is not None]
            text = _number(values[0], scale, digits)
            if len(spread) > 1:
                text += f" [{_number(min(spread), scale, digits)} to {_number(max(spread), scale, digits)}]"
            cells.append(text)
        return label, cells

    def counts(figure: dict[str, Any], refused: bool, when: str = "counters") -> str:
        parts = []
        for feature, counter in sorted(figure[when].items()):
            for key, count in sorted(counter.items()):
                if (key != "engaged") == refused:
                    parts.append(
                        f"{feature} {key.removeprefix('refused:') + ' ' if refused else ''}{count}"
                    )
        return ", ".join(parts) or "-"

    optional = []
    if document["slo"] is not None:
        optional += [
            row(f"within {document['slo']}, %", "goodput", "request_share", scale=100),
            row("goodput, tok/s", "goodput", "output_tok_s"),
        ]
    if document["price_usd_h"] is not None:
        optional.append(row("USD per million output tokens", "usd_per_m_output", digits=3))
    valid = [arm["valid_answers"] for arm in document["arms"].values()]
    if any(valid):
        cells = ["-" if v is None else f"{v['valid']} of {v['expected']}" for v in valid]
        optional.append(("readable JSON / tool calls", cells))
    return [
        row("output tok/s", "output_tok_s"),
        row("total tok/s", "total_tok_s"),
        row("tok/s per user p10", "tok_s_user", "p10"),
        row("tok/s per user p50", "tok_s_user", "p50"),
        row("tok/s per user p90", "tok_s_user", "p90"),
        row("TTFT p50, ms", "ttft_s", "p50", scale=1e3, digits=0),
        row("TTFT p90, ms", "ttft_s", "p90", scale=1e3, digits=0),
        row("TPOT p50, ms", "tpot_s", "p50", scale=1e3),
        row("TPOT p90, ms", "tpot_s", "p90", scale=1e3),
        row("e2e p50, ms", "e2e_s", "p50", scale=1e3, digits=0),
        row("e2e p90, ms", "e2e_s", "p90", scale=1e3, digits=0),
        row("e2e p99, ms", "e2e_s", "p99", scale=1e3, digits=0),
        row("steady output tok/s", "steady", "output_tok_s"),
        *optional,
        row("stalls", "stalls", "count", digits=0),
        row("longest stall, s", "stalls", "longest_s", digits=2),
        row("cache-hit rate, %", "cache_hit_rate", scale=100),
        ("requests", [str(figure["pooled"]["requests"]) for figure in figures]),
        ("errors", [str(figure["pooled"]["errors"]) for figure in figures]),
        ("short answers", [str(figure["pooled"]["short_answers"]) for figure in figures]),
        ("engaged", [counts(figure, False) for figure in figures]),
        (
            "engaged before, CUDA graphs",
            [counts(figure, False, "counters_at_start") for figure in figures],
        ),
        ("refused", [counts(figure, True) for figure in figures]),
    ]


def comparison_rows(comparison: Comparison) -> list[list[str]]:
    """Return one row per metric: label, change, interval, noise, allowed worsening, verdict."""
    rows = []
    for judged in comparison.metrics:
        allowed = f"{'-' if judged.higher_is_better else '+'}{judged.tolerance * 100:g} %"
        interval = "-" if judged.low is None else f"{percent(judged.low)} … {percent(judged.high)}"
        noise = "-" if judged.noise is None else f"±{percent(judged.noise, sign=False)}"
        rows.append([judged.label, percent(judged.change), interval, noise, allowed, judged.word])
    return rows


COMPARISON_HEAD = ["metric", "change", "95 % interval", "noise seen", "allowed", "verdict"]


def headline(document: dict[str, Any]) -> str:
    """Return what was compared, in one line."""
    load = document["workload"]
    features = ", ".join(document["features"]) or "no feature"
    return (
        f"{features}; order {document['order']}, {load['sessions']} sessions x {load['turns']} turns, "
        f"length scale {scale_text(document['length_scale'])}, seed {load['seed']}"
    )


def load_note(document: dict[str, Any]) -> str | None:
    """Return a line that names the runs during which other programs used much of the machine; None for none."""
    cores = document["machine"]["cores"]
    loaded = [
        f"{run['run']} {run['other_cores']:.1f}"
        for run in document["runs"]
        if run["other_cores"] > OTHER_LOAD_SHARE * cores
    ]
    if not loaded:
        return None
    return f"note: other programs kept cores busy during {', '.join(loaded)} (of {cores}); a quiet machine decides sooner"


def trade_note(document: dict[str, Any]) -> str | None:
    """Return a line that says which worsening the features accept by design; None for none."""
    trades = document["declared_trades"]
    if not trades:
        return None
    listed = ", ".join(f"{name} {limit * 100:g} %" for name, limit in sorted(trades.items()))
    return f"note: by their own declaration the features may worsen {listed}; the other limits are the gate's"


def run_notes(document: dict[str, Any]) -> list[str]:
    """Return what a reader should know before the figures: accepted trades, other load, notes of the run."""
    notes = [note for note in (trade_note(document), load_note(document)) if note]
    return [*notes, *(f"note: {note}" for note in document["notes"])]


def terminal_text(result: GateResult, out: Path) -> str:
    """Return the summary for the terminal, verdict last."""
    document = result.document
    arms = document["arms"]
    rows = [["", *(f"{letter} {arm['label']}" for letter, arm in arms.items())]]
    rows += [[label, *cells] for label, cells in figure_rows(document)]
    lines = [headline(document), "", *text_table(rows)]
    for comparison in result.comparisons:
        lines += ["", f"{comparison.test} against {comparison.base}"]
        lines += text_table([COMPARISON_HEAD, *comparison_rows(comparison)])
        if comparison is not result.comparisons[0]:
            lines.append(f"{comparison.word}: {'; '.join(comparison.reasons)}")
    notes = run_notes(document)
    lines += ["", *notes] if notes else []
    lines += [
        "",
        f"{result.word} at length scale {scale_text(document['length_scale'])}: {'; '.join(result.reasons)}",
        f"report: {out / 'report.html'}",
    ]
    return "\n".join(lines)


def write_html(result: GateResult, out: Path) -> None:
    """Write ``report.html``: verdict first, then figures, plots, how to repeat the run, and the raw records."""
    document = result.document
    arms = document["arms"]
    arm_head = ["", *(f"{letter} {arm['label']}" for letter, arm in arms.items())]
    parts = [page.paragraphs([headline(document)]), page.bullets(result.reasons)]
    for comparison in result.comparisons:
        parts.append(f"<h2>{comparison.test} against {comparison.base}: {comparison.word}</h2>")
        parts.append(page.table(COMPARISON_HEAD, comparison_rows(comparison)))
    parts += [
        page.paragraphs(run_notes(document)),
        page.paragraphs(
            [
                "Interval: Student's, of the mean over repeats; noise: the scatter of one server run, which repeats of "
                "one arm show. How both are made: numinous_tooling.gate.verdict."
            ]
        ),
        "<h2>Arms</h2>",
        page.table(arm_head, [[label, *cells] for label, cells in figure_rows(document)]),
        page.paragraphs(["Pooled over repeats; lowest and highest repeat in brackets."]),
        "<h2>Plots</h2>",
        page.image(distribution_plot(result.runs), "distributions per arm"),
        page.image(timeline_plot(result.runs), "requests over time"),
        "<h2>Runs</h2>",
        page.table(RUN_HEAD, [run_cells(run) for run in document["runs"]]),
        page.repeat(document["command"], _environment(document)),
        page.downloads([out / "verdict.json", out / "records.jsonl"]),
    ]
    page.write(out / "report.html", "A/B serving gate", result.word, parts)


RUN_HEAD = [
    "run",
    "ready, s",
    "replay, s",
    "client lag p99, ms",
    "max, ms",
    "client CPU, %",
    "other cores",
    "bad answers",
    "queue max",
    "retractions",
    "pool max, %",
    "GPU memory, GiB",
    "workload",
    "log",
]


def run_cells(run: dict[str, Any]) -> list[str]:
    """Return the cells of a server run under `RUN_HEAD`; `-` where the server does not say."""
    gauges = run["gauges"]

    def greatest(name: str, scale: float = 1.0, digits: int = 0) -> str:
        return _number(gauges.get(name, {}).get("max"), scale, digits)

    return [
        run["run"],
        f"{run['ready_s']:.1f}",
        f"{run['wall_s']:.1f}",
        f"{run['client_lag_p99_s'] * 1e3:.1f}",
        f"{run['client_lag_max_s'] * 1e3:.1f}",
        f"{run['client_cpu_share'] * 100:.0f}",
        f"{run['other_cores']:.2f}",
        str(run["bad_answers"]),
        greatest("queue"),
        _number(gauges.get("retractions"), 1, 0),
        greatest("token_usage", 100, 1),
        greatest("gpu_memory_mib", 1 / 1024, 1),
        run["workload_sha256"][:12],
        run["log"],
    ]


def _environment(document: dict[str, Any]) -> dict[str, Any]:
    keys = ("model", "started_utc", "elapsed_s", "machine", "git", "workload")
    arms = {
        letter: {key: value for key, value in arm.items() if key != "figures"}
        for letter, arm in document["arms"].items()
    }
    commands = {run["run"]: " ".join(run["command"]) for run in document["runs"]}
    return {**{key: document[key] for key in keys}, "arms": arms, "commands": commands}


def _arms(runs: Sequence[ArmRun]) -> list[str]:
    return sorted({run.arm for run in runs})


def distribution_plot(runs: Sequence[ArmRun]) -> Figure:
    """Draw cumulative distributions of TTFT and TPOT per request, and of tok/s per user, one line per arm."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    ttft, tpot, user = figure.subplots(1, 3)
    for arm in _arms(runs):
        own = [run for run in runs if run.arm == arm]
        records = [record for run in own for record in run.records]
        _ecdf(ttft, [r.ttft_s * 1e3 for r in records if r.ttft_s is not None], arm)
        _ecdf(tpot, [v * 1e3 for r in records if (v := tpot_s([r])) is not None], arm)
        _ecdf(user, list(units(own, METRICS[0]).values()), arm)
    for axes, label in (
        (ttft, "time to first token, ms"),
        (tpot, "time per output token, ms"),
        (user, "output tok/s per user"),
    ):
        axes.set_xlabel(label)
        axes.set_ylabel("share at or below")
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    return figure


def _ecdf(axes: Axes, values: Sequence[float], arm: str) -> None:
    if values:
        axes.ecdf(values, label=arm, color=page.COLOURS[arm])


def timeline_plot(runs: Sequence[ArmRun]) -> Figure:
    """Draw every request of every run: pale until the first token, full after it, black where it failed."""
    figure = Figure(figsize=(11, 1.2 + 1.6 * len(runs)), layout="constrained")
    panels: list[Axes] = []
    for index, run in enumerate(runs):
        axes = figure.add_subplot(len(runs), 1, index + 1, sharex=panels[0] if panels else None)
        panels.append(axes)
        sessions = sorted({record.session for record in run.records})
        for record in run.records:
            row = sessions.index(record.session)
            first = record.ttft_s if record.ttft_s is not None else record.e2e_s
            colour = "black" if record.error else page.COLOURS[run.arm]
            axes.barh(row, first, left=record.sent_s, height=0.8, color=colour, alpha=0.35)
            axes.barh(
                row, record.e2e_s - first, left=record.sent_s + first, height=0.8, color=colour
            )
        axes.set_yticks([])
        axes.set_ylabel(f"{run.name}\nsessions", rotation=0, ha="right", va="center")
    panels[-1].set_xlabel("seconds since the start of the replay (pale: before the first token)")
    return figure
