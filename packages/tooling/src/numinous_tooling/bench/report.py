# SPDX-License-Identifier: Apache-2.0
"""Records as a table for people; a ratio stands only beside the times that it is of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from numinous_tooling import evidence

Record = dict[str, Any]


def table(records: Sequence[Record]) -> Table:
    """One line per case and provider of one run."""
    made = Table("case", "provider", title=_title(records[0]), title_justify="left")
    for head in ("median µs", "p20–p80", "GB/s", "% copy roof", "% roof", "best peer / this"):
        made.add_column(head, justify="right")
    for row in by_case(records):
        peer = evidence.best(row, "peer")
        for record in row.values():
            made.add_row(*_cells(record, peer))
        made.add_section()
    return made


def by_case(records: Sequence[Record]) -> Iterator[dict[str, Record]]:
    """Provider -> record, for each op and case in order."""
    rows: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        rows.setdefault((record["op"], record["case"]), {})[record["provider"]] = record
    yield from rows.values()


def roof_line(roof: Mapping[str, Any]) -> str:
    """What was measured of the device, in one line."""
    parts = [f"copy {roof['copy_bytes_s'] / 1e9:.4g} GB/s"]
    parts += [
        f"{name.removesuffix('_flop_s')} {rate / 1e12:.4g} TFLOP/s"
        for name, rate in roof.items()
        if name.endswith("_flop_s")
    ]
    parts += [f"{unit} not measured ({why})" for unit, why in roof["not_measured"].items()]
    return "roofs of this run: " + ", ".join(parts)


def _title(record: Record) -> str:
    floor = record["roof"]["launch_floor_us"]
    return (
        f"{record['op']} on {record['gpu']}, L2 {record['l2'].partition(',')[0]}, "
        f"n {record['n']}, launch floor {floor:.2f} µs (not subtracted)"
    )


def _cells(record: Record, peer: Record | None) -> list[str]:
    median = record["median_us"]
    name = f"{record['provider']} {record['provider_version']}"
    bounds = (evidence.bound_us(record, flops=False), evidence.bound_us(record))
    ratio = ""
    if peer is not None and record["role"] == "ours":
        ratio = f"{peer['median_us'] / median:.2f} {peer['provider']}{_mark(peer)}"
    return [
        record["case"],
        name + ("" if record["role"] == "ours" else " (peer)") + _mark(record),
        f"{median:.2f}",
        f"{record['p20_us']:.2f}–{record['p80_us']:.2f}" + ("" if record["settled"] else " ~"),
        f"{record['bytes'] / median / 1e3:.0f}",
        *(("" if bound is None else f"{100 * bound / median:.0f}") for bound in bounds),
        ratio,
    ]


def _mark(record: Record) -> str:
    return "" if record["agrees"] else " *"
