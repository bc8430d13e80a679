# SPDX-License-Identifier: Apache-2.0
"""Makes `harness`, `block_model` and `ptx_model` importable for the tests of this folder (pytest's import mode leaves the folder off the path), and
fixtures known."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from numinous_tooling.testing.engine import serve, tiny_model

__all__ = ["engine", "hopper", "native_kernel", "reference_kernels", "serve", "tiny_model"]


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"kv4_{name}", Path(__file__).with_name(f"{name}.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"kv4_{name}"] = module
    spec.loader.exec_module(module)
    return module


_harness = _load("harness")
_load("block_model")
_load("nvfp4_harness")
_load("flashinfer_double")
_load("ptx_model")

engine, hopper = _harness.engine, _harness.hopper
native_kernel, reference_kernels = _harness.native_kernel, _harness.reference_kernels
