# SPDX-License-Identifier: Apache-2.0
"""Fixes of verified bugs in released engines and kernel libraries, as data; `numinous_tooling.upstream` reads them."""

from __future__ import annotations

from pathlib import Path

from numinous_tooling.patching import Feature
from numinous_tooling.upstream import features as features_in

__version__ = "0.1.0"


def root() -> Path:
    """Folder of the fixes: inside of the package in a wheel, beside ``src/`` in a checkout."""
    here = Path(__file__).resolve().parent
    inside = here / "fixes"
    return inside if inside.is_dir() else here.parents[1]


def features() -> tuple[Feature, ...]:
    """The fixes of the engine, in the order in which they are applied."""
    return features_in(root())
