# SPDX-License-Identifier: Apache-2.0
"""The raw records of a run, so that every figure can be computed again without a server.

- ``positions.npz``: per row and for B (``<row>.B.*``) and the floor (``<row>.floor.*``) the arrays of `Positions`;
- ``sequences.jsonl``: the token ids that were sent, with kind and protocol mark;
- ``gsm8k.jsonl``: the answers of all three measurements, and whether they are right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from numinous_tooling.gate.accuracy.distance import Positions
from numinous_tooling.gate.accuracy.measure import Measurement, Plan
from numinous_tooling.gate.accuracy.verdict import Verdict

FILES = ("positions.npz", "sequences.jsonl", "gsm8k.jsonl")


def record_files(out: Path) -> list[Path]:
    """Return the files of a run's records that are there."""
    return [out / name for name in FILES if (out / name).is_file()]


def write_records(
    out: Path,
    verdict: Verdict,
    plan: Plan,
    base: Measurement,
    again: Measurement,
    test: Measurement,
) -> None:
    """Write the files that the module docstring names; those without content are left out."""
    arrays: dict[str, Any] = {}
    for row, pair in verdict.positions.items():
        for name, positions in zip(("B", "floor"), pair, strict=True):
            arrays |= _arrays(f"{row}.{name}", positions)
    if arrays:
        np.savez_compressed(out / "positions.npz", **arrays)
    lines: list[dict[str, Any]] = [
        {"name": s.name, "kind": s.kind, "ids": s.ids, "protocol": [int(p) for p in s.protocol]}
        for s in (*plan.sequences, *plan.long_sequences)
    ]
    _write_lines(out / "sequences.jsonl", lines)
    if base.texts:
        _write_lines(
            out / "gsm8k.jsonl",
            [
                {
                    "problem": index,
                    "answer": answer,
                    "texts": [m.texts[index] for m in (base, again, test) if m.texts],
                    "right": [m.right[index] for m in (base, again, test) if m.right],
                }
                for index, answer in enumerate(plan.answers)
            ],
        )


def _arrays(prefix: str, positions: Positions) -> dict[str, Any]:
    return {
        f"{prefix}.{name}": getattr(positions, name)
        for name in ("kl_low", "kl_high", "flips", "nll_delta", "sequence")
    }


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    with path.open("w") as file:
        for line in lines:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
