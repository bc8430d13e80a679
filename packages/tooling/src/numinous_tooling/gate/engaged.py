# SPDX-License-Identifier: Apache-2.0
"""What features counted in a server's processes while it was measured: the proof that the code under test ran."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Counters = dict[str, dict[str, int]]
"""Feature -> `engaged` and `refused:<reason>` -> count."""
CountersReader = Callable[[Path], Counters]
GraphBatches = dict[str, dict[str, int]]
"""`prefill` and `decode` -> `graph` and `eager` -> batches."""

_BATCH = re.compile(r"\b(Prefill|Decode) batch.*?\b\w+ graph: (True|False)\b")


def read_counters(state_dir: Path) -> Counters:
    """Read the feature counters that the processes of a server left in `state_dir`."""
    from numinous_tooling.patching import counters

    totals: Counters = counters.read_totals(state_dir)
    return totals


def counted_between(
    before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]
) -> Counters:
    """Return what was counted between two readings; features with nothing are left out."""
    result: Counters = {}
    for feature, counts in after.items():
        known = before.get(feature, {})
        rest = {key: count - known.get(key, 0) for key, count in counts.items()}
        rest = {key: count for key, count in rest.items() if count}
        if rest:
            result[feature] = rest
    return result


def log_size(log: Path | None) -> int:
    """Return the bytes of a server's log so far; 0 where there is none."""
    return log.stat().st_size if log is not None and log.exists() else 0


def graph_batches(log: Path | None, since: int) -> GraphBatches:
    """Count the batches that the engine's log says came from a graph, and those that did not, from byte `since` on.

    The engine logs every prefill batch and one decode batch in `--decode-log-interval`.
    """
    counts = {phase: {"graph": 0, "eager": 0} for phase in ("prefill", "decode")}
    if log is not None and log.exists():
        with log.open("rb") as file:
            file.seek(since)
            text = file.read().decode(errors="replace")
        for phase, in_graph in _BATCH.findall(text):
            counts[phase.lower()]["graph" if in_graph == "True" else "eager"] += 1
    return counts


@dataclass(frozen=True)
class Proof:
    """Whether features ran, one line each: what shows that one did not, what leaves it open, what the reader must know."""

    failures: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: Proof) -> Proof:
        return Proof(
            self.failures + other.failures, self.doubts + other.doubts, self.notes + other.notes
        )


def proof_of(
    name: str,
    features: Sequence[str],
    measured: Mapping[str, Mapping[str, int]],
    at_start: Mapping[str, Mapping[str, int]],
    batches: GraphBatches,
) -> Proof:
    """Return what is known of each feature that was to run in `name` (a run or an arm).

    A replayed CUDA graph runs no Python, so nothing is counted in it: what the graph holds was counted when it was
    captured, while the server started. So a feature ran if it engaged during the measurement; or if it engaged at the
    start *and* batches of the measurement came from graphs. Without such batches the code that counted at the start was
    left out of the measurement; where the log shows no decode batch at all, nobody knows.

    Args:
        name: for the lines.
        features: that were to run.
        measured: what was counted during the measurement.
        at_start: what was counted until the server was ready.
        batches: of the measurement (`graph_batches`).
    """
    proof = Proof()
    in_graphs = sum(counts["graph"] for counts in batches.values())
    for feature in features:
        counts = measured.get(feature, {})
        captured = at_start.get(feature, {}).get("engaged", 0)
        if counts.get("engaged", 0) > 0:
            continue
        if captured > 0 and in_graphs:
            line = (
                f"{name}: {feature} ran in CUDA graphs alone: it engaged {captured} times while they were captured, "
                f"and {in_graphs} logged batches came from them"
            )
            proof += Proof(notes=(line,))
        elif captured > 0 and not batches["decode"]["eager"]:
            line = (
                f"{name}: {feature} engaged {captured} times before the measurement alone, and no log shows whether "
                "batches came from CUDA graphs"
            )
            proof += Proof(doubts=(line,))
        else:
            known = [f"{key} {count}" for key, count in sorted(counts.items()) if key != "engaged"]
            if captured:
                known.append(f"engaged {captured} at the start, no batch came from a CUDA graph")
            line = f"{name}: {feature} never ran ({', '.join(known) or 'no counters'})"
            proof += Proof(failures=(line,))
    return proof
