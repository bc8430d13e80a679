# SPDX-License-Identifier: Apache-2.0
"""Fixtures of this package's tests: the real engine on the CPU, and its backends alone. Makes `serving` importable as ``attention_serving`` and
`gemma_modules` as ``attention_gemma`` (pytest's import mode leaves the folder off the path)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from numinous_tooling.testing.engine import serve, tiny_model

__all__ = ["engine", "hopper", "serve", "tiny_model"]


def _load(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(file))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_serving = _load("attention_serving", "serving.py")
_load("attention_gemma", "gemma_modules.py")

engine, hopper = _serving.engine, _serving.hopper
