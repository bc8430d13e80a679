# SPDX-License-Identifier: Apache-2.0
"""What a cliff search shows: a table for the terminal, and a figure with the frontier and with all probes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from numinous_tooling.gate import page
from numinous_tooling.gate.page import COLOURS, text_table


def bracket_text(cliff: Mapping[str, Any]) -> str:
    """Return a cliff the way people write it: `12 (fails at 13)`."""
    holds = cliff["holds"] or 0
    text = f"{holds} (fails at {cliff['fails']})" if cliff["fails"] else f"{holds} or more"
    marks = [name for name in ("disputed", "inversions") if cliff[name]]
    return text + "".join(f", {mark} {', '.join(map(str, cliff[mark]))}" for mark in marks)


def frontier_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """Return the head, and a row per context with the cliff of each arm."""
    arms = document["arms"]
    head = ["context", *(f"{letter} {arm['label']}" for letter, arm in arms.items())]
    return [head] + [
        [str(context), *(bracket_text(arm["frontier"][str(context)]) for arm in arms.values())]
        for context in document["contexts"]
    ]


def pool_lines(document: Mapping[str, Any]) -> list[str]:
    """Return what each server said of its pool, where it said something."""
    return [
        f"{found['run']}: the server reports a pool of {found['pool_tokens']} tokens"
        for found in document["searches"]
        if found["pool_tokens"] is not None
    ]


def headline(document: Mapping[str, Any]) -> str:
    """Return what the table shows."""
    limit = document["limit_tok_s_user"]
    return f"users that hold {limit:g} tok/s each (nine of ten), by tokens of context"


def terminal_text(document: Mapping[str, Any], out: Path) -> str:
    """Return the summary for the terminal, verdict last."""
    return "\n".join(
        [
            headline(document),
            *text_table(frontier_rows(document)),
            *pool_lines(document),
            f"{document['verdict']}: {'; '.join(document['reasons'])}",
            f"report: {out / 'report.html'}",
        ]
    )


def write_html(document: Mapping[str, Any], out: Path) -> None:
    """Write ``report.html``: verdict first, then the frontier, all probes, how to repeat the run, and the raw records."""
    head, *rows = frontier_rows(document)
    shown = ("model", "contexts", "order", "features", "machine", "git", "started_utc", "elapsed_s")
    environment = {key: document[key] for key in shown if key in document}
    parts = [
        page.paragraphs([headline(document)]),
        page.bullets(document["reasons"]),
        page.table(head, rows),
        page.bullets(pool_lines(document)),
        page.image(cliff_figure(document), "frontier, and probes per context"),
        page.repeat(document["command"], environment),
        page.downloads([out / "cliff.json"]),
    ]
    page.write(out / "report.html", "Capacity cliff", document["verdict"], parts)


def cliff_figure(document: Mapping[str, Any]) -> Figure:
    """Draw the frontier of both arms, and the probes of each context against the limit."""
    contexts = document["contexts"]
    figure = Figure(figsize=(4.2 * (len(contexts) + 1), 3.8), layout="constrained")
    frontier, *panels = figure.subplots(1, len(contexts) + 1)
    for letter, arm in document["arms"].items():
        cliffs = [arm["frontier"].get(str(context)) for context in contexts]
        known = [(c, cliff) for c, cliff in zip(contexts, cliffs, strict=True) if cliff]
        where = [context for context, _ in known]
        holds = [cliff["holds"] or 0 for _, cliff in known]
        fails = [cliff["fails"] or cliff["holds"] for _, cliff in known]
        label = f"{letter} {arm['label']}"
        frontier.plot(where, holds, marker="o", color=COLOURS[letter], label=label)
        frontier.fill_between(where, holds, fails, color=COLOURS[letter], alpha=0.25)
    frontier.set_xscale("log", base=2)
    frontier.set_xticks(contexts, [str(context) for context in contexts])
    frontier.set_xlabel("tokens of context per user")
    frontier.set_ylabel(f"users that hold {document['limit_tok_s_user']:g} tok/s")
    frontier.yaxis.set_major_locator(MaxNLocator(integer=True))
    frontier.set_ylim(bottom=0)
    frontier.legend()
    for axes, context in zip(panels, contexts, strict=True):
        for found in document["searches"]:
            probes = [p for p in found["probes"] if p["context"] == context]
            colour = COLOURS[found["arm"]]
            for probe in probes:
                cut = probe["rate_p10"] is None
                # A cut probe has no rate; it lies below half of the limit.
                rate = document["limit_tok_s_user"] / 2 if cut else probe["rate_p10"]
                marker = "v" if cut else "o" if probe["holds"] else "x"
                axes.plot(probe["concurrency"], rate, marker=marker, color=colour)
        axes.axhline(document["limit_tok_s_user"], color="black", linewidth=0.8, linestyle="--")
        axes.set_title(f"context {context}")
        axes.set_xlabel("users")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("tok/s per user, p10 (v: cut, below)")
        axes.set_ylim(bottom=0)
    return figure
