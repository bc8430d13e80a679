# SPDX-License-Identifier: Apache-2.0
"""Figures of one run as SVG, from its records; the same records give the same bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

Record = dict[str, Any]

STYLE = {
    "svg.hashsalt": "numinous",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
MARKERS = "osD^vP*X"


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write ``<op>-scaling.svg``, and ``<op>-roofline.svg`` where the op counts FLOPs, for every op.

    Args:
        records: kernel records of one run.
        folder: made if need be.

    Returns:
        The files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for op in dict.fromkeys(record["op"] for record in records):
        own = [record for record in records if record["op"] == op]
        with mpl.rc_context(STYLE):
            written.append(_save(_scaling(own), folder / f"{op}-scaling.svg"))
            if any(record["flops"] for record in own):
                written.append(_save(_roofline(own), folder / f"{op}-roofline.svg"))
    return written


def _scaling(records: Sequence[Record]) -> Figure:
    """Time over bytes of the byte model; the copy roof and the launch floor as lines, p20 to p80 as bars."""
    figure, axes = _axes(
        records, "bytes through device memory (byte model)", "time of a launch, µs"
    )
    for number, (provider, own) in enumerate(_by_provider(records)):
        times = [record["median_us"] for record in own]
        below = [record["median_us"] - record["p20_us"] for record in own]
        above = [record["p80_us"] - record["median_us"] for record in own]
        axes.errorbar(
            [record["bytes"] for record in own],
            times,
            yerr=[below, above],
            label=provider,
            marker=MARKERS[number % len(MARKERS)],
            markersize=4,
            linewidth=0.8,
            capsize=2,
        )
    roof, sizes = records[0]["roof"], sorted({record["bytes"] for record in records})
    ends = [sizes[0], sizes[-1] if sizes[-1] > sizes[0] else 2 * sizes[0]]
    axes.plot(
        ends,
        [1e6 * size / roof["copy_bytes_s"] for size in ends],
        "k--",
        linewidth=0.8,
        label=f"copy roof {roof['copy_bytes_s'] / 1e9:.4g} GB/s",
    )
    floor = roof["launch_floor_us"]
    axes.axhline(
        floor, color="k", linestyle=":", linewidth=0.8, label=f"launch floor {floor:.1f} µs"
    )
    axes.set_ylim(bottom=min(floor, *(record["p20_us"] for record in records)) / 2)
    axes.legend(frameon=False)
    return figure


def _roofline(records: Sequence[Record]) -> Figure:
    """FLOP rate over arithmetic intensity, under the roofs measured in the run."""
    counted = [record for record in records if record["flops"]]
    figure, axes = _axes(counted, "arithmetic intensity, FLOP per byte", "FLOP/s")
    intensities = [record["flops"] / record["bytes"] for record in counted]
    for number, (provider, own) in enumerate(_by_provider(counted)):
        axes.plot(
            [record["flops"] / record["bytes"] for record in own],
            [1e6 * record["flops"] / record["median_us"] for record in own],
            linestyle="none",
            marker=MARKERS[number % len(MARKERS)],
            markersize=4,
            label=provider,
        )
    roof = counted[0]["roof"]
    units = dict.fromkeys(record["flop_unit"] for record in counted)
    rates = {unit: roof[f"{unit}_flop_s"] for unit in units if f"{unit}_flop_s" in roof}
    ridges = [rate / roof["copy_bytes_s"] for rate in rates.values()]
    ends = [*intensities, *ridges]
    low, high = min(ends) / 2, 2 * max(ends)
    for unit, rate in rates.items():
        ridge = rate / roof["copy_bytes_s"]
        axes.plot(
            [low, ridge, high],
            [low * roof["copy_bytes_s"], rate, rate],
            "k--",
            linewidth=0.8,
            label=f"copy {roof['copy_bytes_s'] / 1e9:.4g} GB/s, {unit} {rate / 1e12:.4g} TFLOP/s",
        )
    axes.legend(frameon=False)
    return figure


def _axes(records: Sequence[Record], x: str, y: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    first = records[0]
    commit = (first["commit"] or "no commit")[:12]
    axes.set_title(f"{first['op']}, {first['gpu']}, {commit}, {first['utc'][:10]}", fontsize=9)
    return figure, axes


def _by_provider(records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """Name with version -> records in order of bytes."""
    names = dict.fromkeys(f"{r['provider']} {r['provider_version']}" for r in records)
    rows = sorted(records, key=lambda record: (record["bytes"], record["case"]))
    return [
        (name, [r for r in rows if f"{r['provider']} {r['provider_version']}" == name])
        for name in names
    ]


def _save(figure: Figure, path: Path) -> Path:
    FigureCanvasSVG(figure).print_svg(str(path), metadata={"Date": None})
    # matplotlib leaves blanks at the ends of lines.
    path.write_text(re.sub(r"[ \t]+$", "", path.read_text("utf-8"), flags=re.MULTILINE), "utf-8")
    return path
