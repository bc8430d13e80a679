# SPDX-License-Identifier: Apache-2.0
"""The fixes as features of the patch layer: one `Feature` with one `Series` for each that `numinous apply` reaches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from numinous_tooling.patching.feature import Feature, Pin, Series

from .headers import Fix, HeaderError, read_fixes

PINS = "sglang/pins.json"
"""Beside the fixes of the engine: id -> target -> digest in the released version; written by
``python -m numinous_tooling.upstream pins``."""


def features(root: Path) -> tuple[Feature, ...]:
    """Every fix of the engine below `root`, in the order in which they are applied.

    Raises:
        HeaderError: a header or the digests cannot be read.
    """
    recorded = read_pins(root)
    return tuple(
        feature_of(fix, recorded.get(fix.id, {}), order)
        for order, fix in enumerate((one for one in read_fixes(root) if one.applied), 1)
    )


def feature_of(fix: Fix, pins: Mapping[str, str], order: int = 0) -> Feature:
    """The feature of one fix; raises HeaderError when its header lacks what a feature needs."""
    header = fix.header
    try:
        newest = header["newest"]
        fields = {
            "description": header["title"],
            "origin": header["origin"],
            "forwarded": header["forwarded"],
            "last_update": str(header["last_update"]),
        }
        stock = f"stock {header['version']}"
        return Feature(
            id=fix.id,
            sentence=f"{header['title']}.",
            patches=(
                Series(
                    id=f"{fix.id}.{fix.number}",
                    directory=str(fix.path),
                    header=fields,
                    pins=tuple(
                        pin_of(name, {stock: digest}) for name, digest in pins.items() if digest
                    ),
                ),
            ),
            arch={"cpu": header["evidence"]},
            engine=("sglang", (header["version"],)),
            upstream=f"merged in {newest['version']} or before"
            if newest["state"] == "fixed"
            else "none",
            order=order,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise HeaderError(f"{fix.path / 'header.toml'}: {error!r}; run the lint of it") from None


def pin_of(name: str, accepts: Mapping[str, str]) -> Pin:
    """The pin of an entry of ``functions``; ``#1`` behind the name means its second definition in the file."""
    target, hash_, occurrence = name.partition("#")
    return Pin(target, accepts, int(occurrence) if hash_ else None)


def read_pins(root: Path) -> dict[str, dict[str, str]]:
    """Recorded digests, empty where none were recorded yet; raises HeaderError when the file is damaged."""
    file = root / PINS
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise HeaderError(f"{file}: {error}; write it again") from None
    return {str(key): dict(value) for key, value in found.items()}
