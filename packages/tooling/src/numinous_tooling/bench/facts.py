# SPDX-License-Identifier: Apache-2.0
"""Where and from what a run was made: the fields that all its evidence records share."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from numinous_tooling.bench.clocks import Clock
from numinous_tooling.gate import provenance
from numinous_tooling.gate.provenance import source_state
from numinous_tooling.workbench import Op


def run_facts(clock: Clock, environ: Mapping[str, str]) -> dict[str, Any]:
    """Commit, device, versions and time of a run; `commit` and `dirty` are None where nothing says them."""
    machine = provenance.machine()
    gpu = clock.device.type == "cuda"
    properties = torch.cuda.get_device_properties(clock.device) if gpu else None
    engine = installed("sglang")
    return {
        **source_state(Path(__file__).parent, environ),
        "gpu": properties.name
        if properties
        else f"cpu: {machine['cpu']}, {machine['cores']} cores",
        "sm_count": properties.multi_processor_count if properties else None,
        "driver": provenance.driver_version() if gpu else "none",
        "cuda": torch.version.cuda or (f"hip {torch.version.hip}" if torch.version.hip else None),
        "torch": torch.__version__,
        "triton": installed("triton"),
        "engine": f"sglang {engine}" if engine else None,
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def package_version(op: Op) -> str:
    """``__version__`` of the op's import package."""
    module = importlib.import_module("numinous_" + op.package.replace("-", "_"))
    return str(module.__version__)


def installed(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
