# SPDX-License-Identifier: Apache-2.0
"""What the ops of this room have in common: the version of their peers, names in sweeps."""

from __future__ import annotations

from importlib import metadata
from typing import Any


def engine_version() -> str:
    """`sglang 0.5.20`; ImportError where it is not installed."""
    try:
        return f"sglang {metadata.version('sglang')}"
    except metadata.PackageNotFoundError:
        raise ImportError("sglang is not installed") from None


def launch_name(tile: Any) -> str:
    """`rows4-warps4-ahead`: a provider's name in a sweep, from the fields of the tile."""
    fields: dict[str, int] = tile._asdict()
    ahead = "-ahead" if fields.pop("ahead") else ""
    return "-".join(f"{name}{value}" for name, value in fields.items()) + ahead
