# SPDX-License-Identifier: Apache-2.0
"""The regression alarm: is ours slower than a base, beyond the noise?

*slower*: the medians differ by more than `TOLERANCE` and the bands from p20 to p80 do not touch. *undecided*: the
medians differ by more and the bands touch, a band is wider than `NOISE` of its median and not below that of the base,
or there is nothing to compare with on the same GPU in the same cache state. *holds*: otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numinous_tooling import evidence
from numinous_tooling.bench.errors import BadUsage

TOLERANCE = 0.03
NOISE = 0.10
EXIT = {"holds": 0, "slower": 1, "undecided": 2}

Record = Mapping[str, Any]


def compare(new: Record, base: Record | None) -> dict[str, Any]:
    """One comparison: case, provider, `word`, `reason`, both medians in microseconds."""
    row: dict[str, Any] = {name: new[name] for name in ("op", "case", "provider")}
    row["median_us"] = new["median_us"]
    if base is None:
        return row | {"word": "undecided", "reason": "the base has no figure of this case"}
    row |= {"base": base["provider"], "base_version": base["provider_version"]}
    row |= {"base_us": base["median_us"], "gpu": new["gpu"]}
    for name in ("gpu", "l2"):
        if new[name] != base[name]:
            reason = f"{name} is {new[name]}, that of the base {base[name]}"
            return row | {"word": "undecided", "reason": reason}
    change = new["median_us"] / base["median_us"] - 1
    said = f"{change:+.1%}, p20-p80 {_band(new)} against {_band(base)} µs"
    wide = max(
        (record["p80_us"] - record["p20_us"]) / record["median_us"] for record in (new, base)
    )
    if change > TOLERANCE:
        apart = new["p20_us"] > base["p80_us"]
        return row | {"word": "slower" if apart else "undecided", "reason": said}
    if wide > NOISE and new["p80_us"] >= base["p20_us"]:
        reason = f"{said}: a band of {wide:.0%} hides a change of {TOLERANCE:.0%}"
        return row | {"word": "undecided", "reason": reason}
    return row | {"word": "holds", "reason": said}


def against_provider(records: Sequence[Record], name: str) -> list[dict[str, Any]]:
    """Each own implementation against one provider of the same run, case by case."""
    bases = {(r["op"], r["case"]): r for r in records if r["provider"] == name}
    own = [r for r in records if r["role"] == "ours" and r["provider"] != name]
    return [compare(record, bases.get((record["op"], record["case"]))) for record in own]


def against_run(records: Sequence[Record], run: Sequence[Record]) -> list[dict[str, Any]]:
    """Each own implementation against itself in a recorded run; what only one of the two has is undecided."""
    bases = {(r["op"], r["case"], r["provider"]): r for r in run if r["role"] == "ours"}
    own = {(r["op"], r["case"], r["provider"]): r for r in records if r["role"] == "ours"}
    return [compare(record, bases.get(key)) for key, record in own.items()]


def recorded_run(folder: Path, wanted: str) -> list[dict[str, Any]]:
    """All records of the run (op, commit, time) that holds the record with the id `wanted`.

    Raises:
        BadUsage: there is no such record, or it is not one of a kernel.
    """
    for path in sorted(folder.glob("*/*.jsonl")):
        if f'"{wanted}"' not in path.read_text(encoding="utf-8"):
            continue
        records = evidence.load(path)
        for found in records:
            if found["id"] != wanted:
                continue
            if "median_us" not in found:
                raise BadUsage(f"{wanted} in {path.name} is no kernel record")
            key = [found[name] for name in ("op", "commit", "utc", "gpu")]
            return [
                record
                for record in records
                if [record.get(name) for name in ("op", "commit", "utc", "gpu")] == key
            ]
    raise BadUsage(f"{wanted} is neither a provider of this run nor the id of a record")


def exit_code(rows: Sequence[Mapping[str, Any]]) -> int:
    """1 if something is slower, else 2 if something is undecided or nothing was compared, else 0."""
    words = {row["word"] for row in rows} or {"undecided"}
    return next(EXIT[word] for word in ("slower", "undecided", "holds") if word in words)


def _band(record: Record) -> str:
    return f"{record['p20_us']:.3g}–{record['p80_us']:.3g}"
