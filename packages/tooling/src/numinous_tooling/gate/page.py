# SPDX-License-Identifier: Apache-2.0
"""What the reports of all gates are made of: plain tables for the terminal, and one self-contained HTML page.

A page loads nothing: figures are embedded, and so are the raw records, as downloads. Records above `LARGEST_DOWNLOAD`
(compressed) stay beside the page and are named in it.
"""

from __future__ import annotations

import base64
import gzip
import html
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # tables alone do not need the second that importing it takes
    from matplotlib.figure import Figure

COLOURS = {"A": "#4477aa", "B": "#cc6677", "C": "#ddaa33"}
WORDS = ("PASS", "FAIL", "INCONCLUSIVE")
LARGEST_DOWNLOAD = 20 << 20
# Of a change: to the hundredfold.
LARGEST_SHOWN = 100.0

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: .6rem 0 1.4rem } td, th { border: 1px solid #ccc; padding: .25rem .6rem }
th { background: #f3f3f3; text-align: left } td.n { text-align: right; font-variant-numeric: tabular-nums }
.PASS { color: #1a7f37 } .FAIL { color: #b42318 } .INCONCLUSIVE { color: #9a6700 }
img { max-width: 100% } pre { background: #f6f6f6; padding: .6rem; overflow-x: auto; white-space: pre-wrap }
"""


def percent(value: float | None, *, sign: bool = True) -> str:
    """Return a share as per cent; what is beyond `LARGEST_SHOWN` is said to be so.

    The interval of a ratio of two times of nearly nothing ends at millions of per cent, which would read like a figure.
    """
    if value is None:
        return "-"
    plus = "+" if sign else ""
    if value > LARGEST_SHOWN:
        return f"over {plus}{LARGEST_SHOWN * 100:.0f} %"
    return f"{value * 100:{plus}.1f} %"


def text_table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns; the first row is the head."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; verdict words in colour, every column but the first to the right."""

    def cell(index: int, text: str) -> str:
        classes = " ".join([*(["n"] if index else []), *([text] if text in WORDS else [])])
        kind = f' class="{classes}"' if classes else ""
        return f"<td{kind}>{html.escape(text)}</td>"

    header = "".join(f"<th>{html.escape(text)}</th>" for text in head)
    body = "".join(
        "<tr>" + "".join(cell(i, text) for i, text in enumerate(row)) + "</tr>" for row in rows
    )
    return f"<table><tr>{header}</tr>{body}</table>"


def paragraphs(texts: Iterable[str]) -> str:
    """Return one paragraph per text."""
    return "".join(f"<p>{html.escape(text)}</p>" for text in texts)


def bullets(texts: Iterable[str]) -> str:
    """Return a list; nothing for no texts."""
    items = "".join(f"<li>{html.escape(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def image(figure: Figure, alt: str) -> str:
    """Return a figure as an embedded PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    return f'<img alt="{html.escape(alt)}" src="{_embedded("image/png", buffer.getvalue())}">'


def repeat(command: str, environment: Mapping[str, Any]) -> str:
    """Return the section that says how to make the run again, and where it was made."""
    return (
        "<h2>Environment and command</h2>"
        f"<pre>{html.escape(command)}</pre>"
        f"<pre>{html.escape(json.dumps(environment, indent=1))}</pre>"
    )


def downloads(files: Iterable[Path]) -> str:
    """Return the section with the raw records: embedded and compressed, or named where they are too large."""
    items = []
    for file in files:
        if not file.is_file():
            continue
        packed, name = gzip.compress(file.read_bytes(), mtime=0), html.escape(f"{file.name}.gz")
        if len(packed) > LARGEST_DOWNLOAD:
            items.append(
                f"<li>{html.escape(file.name)}: too large for this page, it lies beside it</li>"
            )
        else:
            link = _embedded("application/gzip", packed)
            items.append(f'<li><a download="{name}" href="{link}">{name}</a></li>')
    return f"<h2>Raw records</h2><ul>{''.join(items)}</ul>" if items else ""


def write(path: Path, gate: str, word: str, parts: Iterable[str]) -> None:
    """Write a page, its verdict first."""
    head = f'<h1>{html.escape(gate)}: <span class="{word}">{word}</span></h1>'
    path.write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(gate)}: {word}</title><style>{_STYLE}</style></head>"
        f"<body>{head}{''.join(parts)}</body></html>\n",
        encoding="utf-8",
        # Paths and what servers say may hold what is no character.
        errors="backslashreplace",
    )


def _embedded(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
