# SPDX-License-Identifier: Apache-2.0
"""The report of an accuracy run: the table for the terminal, and one self-contained HTML page with histograms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numinous_tooling.gate import page
from numinous_tooling.gate.accuracy.command import AccuracyResult
from numinous_tooling.gate.accuracy.distance import Positions
from numinous_tooling.gate.accuracy.measure import ROWS
from numinous_tooling.gate.accuracy.records import record_files
from numinous_tooling.gate.accuracy.verdict import YARDSTICK_LOSS, RowVerdict
from numinous_tooling.gate.page import COLOURS, text_table

ROW_HEAD = ["row", "B against A", "95 % interval", "floor", "limit", "unit", "verdict"]
DETAIL_HEAD = [
    "row",
    "positions",
    "sequences",
    "KL mean, at least",
    "KL mean, at most",
    "p99",
    "max",
    "flips, %",
    "loss, nats/token",
    "floor's mean",
    "floor's max",
    "floor's flips, %",
]
# Divergences below it are drawn as if they were it.
PLOT_FLOOR = 1e-12


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}" if 0 < abs(value) < 0.01 else f"{value:.4g}"


def row_cells(row: RowVerdict) -> list[str]:
    """Return the cells of a row under `ROW_HEAD`."""
    interval = "-" if row.low is None else f"{_short(row.low)} … {_short(row.high)}"
    return [
        row.label,
        _short(row.figure),
        interval,
        _short(row.floor),
        _short(row.limit),
        row.unit,
        row.word,
    ]


def detail_cells(row: RowVerdict) -> list[str]:
    """Return the cells of a row of distributions under `DETAIL_HEAD`."""
    assert row.distance is not None
    assert row.floor_distance is not None
    own = row.distance
    return [
        row.label,
        str(own.positions),
        str(own.sequences),
        _short(own.kl_low.value),
        _short(own.kl_high.value),
        _short(own.kl_p99.value),
        _short(own.kl_max),
        f"{own.flips.value * 100:.2f}",
        _short(own.nll_delta.value),
        _short(row.floor_distance.kl_high.value),
        _short(row.floor_distance.kl_max),
        f"{row.floor_distance.flips.value * 100:.2f}",
    ]


def head(names: Sequence[str], document: Mapping[str, Any]) -> list[str]:
    """Return the names of columns: a yardstick is no floor."""
    if document["method"]["yardstick"] is None:
        return list(names)
    return [name.replace("floor", "yardstick") for name in names]


def meaning(document: Mapping[str, Any]) -> str:
    """Return what the floor of this run is, in one sentence."""
    yardstick = document["method"]["yardstick"]
    if yardstick is None:
        return "Floor: stock measured again with other batches."
    return (
        f"Yardstick: stock with {yardstick} against A. PASS says that B moves the distributions at most "
        f"{document['method']['margin']:g} times as far, "
        "by the lower bounds of both, and raises the loss on the text by at most "
        f"{100 * YARDSTICK_LOSS:g} %."
    )


def headline(document: Mapping[str, Any]) -> str:
    """Return what was compared and how, in one line."""
    method, load = document["method"], document["workload"]
    what = ", ".join(document["features"]) or "no feature"
    fault = f", planted fault {document['plant']}" if document["plant"] else ""
    how = (
        "full vocabulary"
        if method["distribution"] == "full vocabulary"
        else f"{method['listed_tokens']} most likely tokens and the rest as one"
    )
    return (
        f"{what}{fault}; {load['sequences']} sequences of {load['tokens']} tokens, {load['concurrency']} at a time; "
        f"distributions: {how}"
    )


def notes(document: Mapping[str, Any], rows: Sequence[RowVerdict]) -> list[str]:
    """Return what the table does not say: rows left out, and what undecided rows mean."""
    lines = [f"not measured: {row}: {why}" for row, why in document["not_measured"].items()]
    lines += [f"note: {note}" for note in document["notes"]]
    lines += [f"{row.label}: {row.reason}" for row in rows if not row.decides]
    return lines


def terminal_text(result: AccuracyResult, out: Path) -> str:
    """Return the summary for the terminal, verdict last."""
    verdict, document = result.verdict, result.document
    lines = [headline(document), ""]
    lines += text_table([head(ROW_HEAD, document), *map(row_cells, verdict.rows)])
    details = [row for row in verdict.rows if row.distance is not None]
    if details:
        lines += ["", *text_table([head(DETAIL_HEAD, document), *map(detail_cells, details)])]
    if document["method"]["yardstick"] is not None:
        lines += ["", meaning(document)]
    lines += ["", *notes(document, verdict.rows)]
    lines += [
        "",
        f"{verdict.word}: {'; '.join(verdict.reasons)}",
        f"report: {out / 'report.html'}",
    ]
    return "\n".join(lines)


def write_html(result: AccuracyResult, out: Path) -> None:
    """Write ``report.html``: verdict first, then figures, histograms, how to repeat the run, and the raw records."""
    verdict, document = result.verdict, result.document
    details = [row for row in verdict.rows if row.distance is not None]
    parts = [
        page.paragraphs([headline(document)]),
        page.bullets(verdict.reasons),
        page.table(head(ROW_HEAD, document), map(row_cells, verdict.rows)),
        page.bullets(notes(document, verdict.rows)),
    ]
    if details:
        parts += [
            "<h2>Distances</h2>",
            page.table(head(DETAIL_HEAD, document), map(detail_cells, details)),
            page.paragraphs(
                [
                    f"KL(A || B) per position in nats. {meaning(document)} Intervals: "
                    "bootstrap over sequences. At least / at most: lower bound from the listed tokens, upper estimate "
                    "if no unlisted token changed by more than the listed ones; they agree where the whole "
                    "vocabulary is listed."
                ]
            ),
            "<h2>KL histogram</h2>",
            page.image(
                histograms(verdict.positions, document["method"]["yardstick"]),
                "histograms of the KL divergence per row",
            ),
        ]
    shown = ("model", "method", "workload", "arms", "engaged", "machine", "git", "started_utc")
    environment = {key: document[key] for key in (*shown, "elapsed_s")}
    parts += [
        page.repeat(document["command"], environment),
        page.downloads([out / "verdict.json", *record_files(out)]),
    ]
    page.write(out / "report.html", "Accuracy gate", verdict.word, parts)


def histograms(
    positions: Mapping[str, tuple[Positions, Positions]], yardstick: str | None
) -> Figure:
    """Draw how the divergence is distributed over positions, one panel per row, arm B over the floor."""
    figure = Figure(figsize=(11, 1 + 1.7 * len(positions)), layout="constrained")
    panels: list[Axes] = list(figure.subplots(len(positions), 1, sharex=True, squeeze=False)[:, 0])
    logs = {
        row: [np.log10(np.maximum(p.kl_high, PLOT_FLOOR)) for p in pair]
        for row, pair in positions.items()
    }
    top = max(float(values.max()) for pair in logs.values() for values in pair)
    edges = np.linspace(np.log10(PLOT_FLOOR), max(top, -3.0) + 0.1, 60)
    for axes, (row, (own, floor)) in zip(panels, logs.items(), strict=True):
        axes.hist(
            floor,
            edges,
            color="#999999",
            alpha=0.6,
            histtype="stepfilled",
            label=f"stock {yardstick} against A" if yardstick else "A against A (floor)",
        )
        axes.hist(
            own, edges, color=COLOURS["B"], alpha=0.6, histtype="stepfilled", label="B against A"
        )
        axes.set_ylabel(f"{ROWS[row]}\npositions", rotation=0, ha="right", va="center")
        axes.set_yscale("symlog")
    panels[0].legend()
    panels[-1].set_xlabel(f"log10 of KL(A || B) in nats; {PLOT_FLOOR:g} stands for anything below")
    return figure
