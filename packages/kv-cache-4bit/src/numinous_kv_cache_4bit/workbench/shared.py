# SPDX-License-Identifier: Apache-2.0
"""What the ops of this room have in common: the version of their peers, sweeps of their launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import metadata
from typing import Any

from numinous_tooling.workbench import Implementation, Op, Tensors


def engine_version() -> str:
    """`sglang 0.5.20`; ImportError where it is not installed."""
    try:
        return f"sglang {metadata.version('sglang')}"
    except metadata.PackageNotFoundError:
        raise ImportError("sglang is not installed") from None


def launch_name(tile: Any) -> str:
    """`rows4-warps4-ahead`: a provider's name in a sweep, from the fields of the tile."""
    fields: dict[str, int] = tile._asdict()
    ahead = "-ahead" if fields.pop("ahead", False) else ""
    return "-".join(f"{name}{value}" for name, value in fields.items()) + ahead


def sweep(
    op: Op, run: Callable[[Any, Tensors, Any], Tensors], tiles: Iterable[Any], cases: Iterable[Any]
) -> Op:
    """Other launches of `op` beside the launcher's choice: `run` with each tile, a provider each, timed on `cases`."""

    def by(tile: Any) -> Implementation:
        return Implementation(run=lambda case, inputs: run(case, inputs, tile), interpret=True)

    return replace(
        op,
        name=f"{op.name}_sweep",
        cases=(),
        bench_cases=tuple(cases),
        implementations={
            "triton": op.implementations["triton"],
            **{launch_name(tile): by(tile) for tile in tiles},
        },
        peers={},
        binaries=(),
    )
