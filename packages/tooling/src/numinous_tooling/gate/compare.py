# SPDX-License-Identifier: Apache-2.0
"""``numinous gate compare RUN1 RUN2``: does a second run say what the first one said?

Reads the ``verdict.json`` of two finished runs of the same gate (serving or accuracy). For every figure that both
judged it shows both with their 95 % intervals, and whether they *agree*: the difference of the two is within
``sqrt(half1^2 + half2^2)``, the 95 % interval of a difference of independent runs. Changes of the serving gate are
compared as logarithms, as they were judged; shares and accuracy figures as they are. Every setting in which the runs
differ is listed first, because a difference between settings is no disagreement between measurements.

Two figures that agree are not shown to be equal: wide intervals agree with much. The verdicts are compared as words.

Exit codes: 0 the verdicts are the same and every figure agrees, 1 something differs, 2 a run cannot be read
or no figure has an interval in both runs.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.page import percent, text_table

SCHEMAS = {"serving": 2, "accuracy": 1}
# Differ in every pair of runs, or hold what is compared below.
_NOT_SETTINGS = {
    "schema",
    "verdict",
    "reasons",
    "comparisons",
    "rows",
    "runs",
    "started_utc",
    "elapsed_s",
    "command",
    "notes",
    "noise_floor",
    "engaged",
    "not_measured",
    "server_log_tail",
}
_NOT_SETTINGS_OF_ARM = {
    "figures",
    "valid_answers",
    "counters",
    "counters_at_start",
    "graph_batches",
    "ready_s",
    "command",
    "url",
}


@dataclass(frozen=True)
class Figure:
    """One judged figure of a run; `value` and the interval in the unit in which runs are compared (`transform`)."""

    word: str
    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Row:
    """One figure of both runs; `agrees` is None where one of them has no interval."""

    label: str
    unit: str
    first: Figure | None
    second: Figure | None
    agrees: bool | None


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the gate."""
    parser = commands.add_parser(
        "compare",
        help="two finished runs of one gate: other settings, other figures, other verdict?",
        description=(__doc__ or "").split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("first", type=Path, metavar="RUN1", help="folder of a run, or verdict.json")
    parser.add_argument("second", type=Path, metavar="RUN2", help="another one of the same gate")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")


def run(
    options: argparse.Namespace, arguments: Sequence[str], interrupts: object, reader: object
) -> int:
    """Compare two runs and print it; returns the exit code."""
    kinds, documents = zip(
        *(read_run(path) for path in (options.first, options.second)), strict=True
    )
    if kinds[0] != kinds[1]:
        raise GateError(
            f"{options.first} is a run of the {kinds[0]} gate, {options.second} of the {kinds[1]} gate"
        )
    try:
        settings = different_settings(*documents)
        rows = compared_rows(kinds[0], *documents)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise GateError(
            f"{options.first} or {options.second} lacks what a verdict holds ({error!r}); run the gate again"
        ) from error
    words = [document["verdict"] for document in documents]
    compared = [row.agrees for row in rows if row.agrees is not None]
    same = (words[0] == words[1] and all(compared)) if compared else None
    if options.json:
        content = {
            "gate": kinds[0],
            "verdicts": words,
            "agree": same,
            "settings": {name: list(values) for name, values in settings.items()},
            "figures": [asdict(row) for row in rows],
        }
        print(json.dumps(content, indent=1))
    else:
        print(comparison_text(words, settings, rows, same))
    if same is None:
        raise GateError(
            "nothing was compared: no figure has an interval in both runs; run the gate with more repeats"
        )
    return 0 if same else 1


def read_run(path: Path) -> tuple[str, dict[str, Any]]:
    """Return gate and content of a run's verdict.json.

    Raises:
        GateError: no such file, no JSON of a gate, of another schema, or a run that ended without a measurement.
    """
    file = path / "verdict.json" if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise GateError(
            f"{file} cannot be read ({error.strerror}); name the folder of a finished run"
        ) from error
    except (ValueError, RecursionError) as error:
        raise GateError(f"{file} is no JSON ({error})") from error
    if not isinstance(document, dict) or "verdict" not in document:
        raise GateError(f"{file} is no verdict of a gate")
    kind = document.get("gate", "serving")
    if not isinstance(kind, str) or kind not in SCHEMAS:
        raise GateError(f"{file}: runs of the {kind} gate are not compared")
    if document.get("schema") != SCHEMAS[kind]:
        raise GateError(
            f"{file} has schema {document.get('schema')}, this version reads {SCHEMAS[kind]}; run the gate again"
        )
    if not document.get("comparisons" if kind == "serving" else "rows"):
        raise GateError(
            f"{file}: the run ended without a measurement ({'; '.join(map(str, document.get('reasons') or ()))})"
        )
    return kind, document


def different_settings(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
    """Return every setting in which two runs differ, by its path; lists and missing values as text."""
    flat = [dict(_flat(_settings(document))) for document in (first, second)]
    names = dict.fromkeys((*flat[0], *flat[1]))
    return {
        name: (flat[0].get(name, "-"), flat[1].get(name, "-"))
        for name in names
        if flat[0].get(name, "-") != flat[1].get(name, "-")
    }


def _settings(document: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in document.items() if key not in _NOT_SETTINGS}
    kept["arms"] = {
        letter: {key: value for key, value in arm.items() if key not in _NOT_SETTINGS_OF_ARM}
        for letter, arm in document["arms"].items()
    }
    return kept


def _flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [
            item
            for key, inner in value.items()
            for item in _flat(inner, f"{path}.{key}" if path else str(key))
        ]
    return [(path, value if isinstance(value, str) else json.dumps(value))]


def compared_rows(kind: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Row]:
    """Return the judged figures of both runs, in the order of the first."""
    figures = _serving_figures if kind == "serving" else _accuracy_figures
    ours, theirs = figures(first), figures(second)
    rows = []
    for label, unit in dict.fromkeys((*ours, *theirs)):
        pair = ours.get((label, unit)), theirs.get((label, unit))
        rows.append(Row(label, unit, *pair, _agree(*pair, _transform(unit))))
    return rows


def _transform(unit: str) -> Callable[[float], float]:
    # A change of -100 % is what an interval without a lower end is rounded to.
    return (
        (lambda value: math.log1p(value) if value > -1 else -math.inf)
        if unit == "relative"
        else float
    )


def _agree(
    first: Figure | None, second: Figure | None, transform: Callable[[float], float]
) -> bool | None:
    halves, values = [], []
    for figure in (first, second):
        if figure is None or figure.value is None or figure.low is None or figure.high is None:
            return None
        low, high = transform(figure.low), transform(figure.high)
        halves.append((high - low) / 2)
        values.append(transform(figure.value))
    return abs(values[1] - values[0]) <= math.hypot(*halves)


def _serving_figures(document: Mapping[str, Any]) -> dict[tuple[str, str], Figure]:
    found = {}
    for comparison in document["comparisons"]:
        for metric in comparison["metrics"]:
            label = f"{comparison['test']} against {comparison['base']}: {metric['label']}"
            unit = "relative" if metric["scale"] == "ratio" else "share"
            found[label, unit] = _figure(metric, "change")
    return found


def _accuracy_figures(document: Mapping[str, Any]) -> dict[tuple[str, str], Figure]:
    return {(row["label"], row["unit"]): _figure(row, "figure") for row in document["rows"]}


def _figure(measured: Mapping[str, Any], value: str) -> Figure:
    return Figure(measured["word"], measured[value], measured["low"], measured["high"])


def comparison_text(
    words: Sequence[str],
    settings: Mapping[str, tuple[str, str]],
    rows: Sequence[Row],
    same: bool | None,
) -> str:
    """Return the comparison for the terminal, the outcome last; `same` None: nothing could be compared."""
    lines = []
    if settings:
        lines += [
            "settings that differ",
            *text_table([["", "RUN1", "RUN2"], *([n, *v] for n, v in settings.items())]),
            "",
        ]
    head = ["figure", "RUN1", "95 % interval", "", "RUN2", "95 % interval", "", "agree"]
    lines += text_table([head, *(_cells(row) for row in rows)])
    lines += ["", f"RUN1 {words[0]}, RUN2 {words[1]}"]
    if same is not None:
        lines[-1] += f"; the runs agree: {'yes' if same else 'no'}"
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    cells = [row.label]
    for figure in (row.first, row.second):
        if figure is None:
            cells += ["not judged", "-", "-"]
        else:
            low, high = (_text(value, row.unit) for value in (figure.low, figure.high))
            interval = "-" if figure.low is None else f"{low} … {high}"
            cells += [_text(figure.value, row.unit), interval, figure.word]
    return [*cells, {True: "yes", False: "NO", None: "-"}[row.agrees]]


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit in ("relative", "share"):
        return percent(value)
    return f"{value:.3g} {unit}"
