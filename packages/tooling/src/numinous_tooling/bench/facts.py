# SPDX-License-Identifier: Apache-2.0
"""Where and from what a run was made: the fields that all its evidence records share."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from numinous_tooling.bench.clocks import Clock
from numinous_tooling.gate import provenance
from numinous_tooling.workbench import Op

COMMIT = "NUMINOUS_COMMIT"
_COMMIT = re.compile(r"(?P<commit>[0-9a-f]{40})(?P<dirty>-dirty)?")


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


def source_state(folder: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """Commit of the checkout around `folder` and whether it is dirty; records that were just written do not count.

    ``NUMINOUS_COMMIT`` says it where set: on a host whose copy has no repository, or one that was left behind. 40 hex digits,
    with ``-dirty`` at the end where that holds (``git describe --always --abbrev=40 --exclude='*' --dirty`` prints it so).

    Raises:
        ValueError: the variable says something else.
    """
    if said := environ.get(COMMIT):
        found = _COMMIT.fullmatch(said)
        if found is None:
            raise ValueError(
                f"{COMMIT} is {said!r}; want 40 hex digits, then -dirty where that holds"
            )
        return {"commit": found["commit"], "dirty": bool(found["dirty"])}
    for root in folder.resolve().parents:
        # A repository that merely holds an environment in which we are installed says nothing about us.
        ours = (root / ".git").exists() and (root / "packages" / "tooling").is_dir()
        if ours and (state := provenance.git_state(root, ":(top)", ":(top,exclude)evidence")):
            return state
    return {"commit": None, "dirty": None}


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
