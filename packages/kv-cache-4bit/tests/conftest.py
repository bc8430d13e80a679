# SPDX-License-Identifier: Apache-2.0
"""Makes `harness` importable for the tests of this folder (pytest's import mode leaves the folder off the path), and its fixtures known."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from numinous_tooling.testing.engine import serve, tiny_model

__all__ = ["engine", "hopper", "reference_kernels", "serve", "tiny_model"]

_spec = importlib.util.spec_from_file_location(
    "kv4_harness", Path(__file__).with_name("harness.py")
)
assert _spec is not None
assert _spec.loader is not None
_harness = importlib.util.module_from_spec(_spec)
sys.modules["kv4_harness"] = _harness
_spec.loader.exec_module(_harness)

engine, hopper = _harness.engine, _harness.hopper
reference_kernels = _harness.reference_kernels
