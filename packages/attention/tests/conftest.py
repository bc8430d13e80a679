# SPDX-License-Identifier: Apache-2.0
"""Fixtures of this package's tests: the real engine on the CPU, and its backends alone. Makes `serving` importable as ``attention_serving``
(pytest's import mode leaves the folder off the path)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from numinous_tooling.testing.engine import serve, tiny_model

__all__ = ["engine", "hopper", "serve", "tiny_model"]

_spec = importlib.util.spec_from_file_location(
    "attention_serving", Path(__file__).with_name("serving.py")
)
assert _spec is not None
assert _spec.loader is not None
_serving = importlib.util.module_from_spec(_spec)
sys.modules["attention_serving"] = _serving
_spec.loader.exec_module(_serving)

engine, hopper = _serving.engine, _serving.hopper
