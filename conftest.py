# SPDX-License-Identifier: Apache-2.0
"""Makes a bare checkout testable: the packages are found, and the kernel tiers are there, installed or not."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent
sys.path[:0] = [
    str(path) for path in [*sorted(ROOT.glob("packages/*/src")), ROOT / "upstream-fixes/src"]
]

pytest_plugins = ["numinous_tooling.testing.plugin"]
