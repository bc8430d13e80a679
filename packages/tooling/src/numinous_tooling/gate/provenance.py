# SPDX-License-Identifier: Apache-2.0
"""What a report must say about where it came from: versions of each arm, machine, commit."""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numinous_tooling.gate.errors import GateError

QUERY_TIMEOUT_S = 120.0
COMMIT = "NUMINOUS_COMMIT"
_COMMIT = re.compile(r"(?P<commit>[0-9a-f]{40})(?P<dirty>-dirty)?")

# Nothing is imported: torch would take seconds. Which CUDA or HIP it was built for stands in a file of its own.
_VERSIONS = r"""
import json, platform, re
from importlib.metadata import distributions
wanted = ("sglang", "sglang-kernel", "torch", "triton", "transformers", "flashinfer-python")
found = {"python": platform.python_version()}
for dist in distributions():
    name = (dist.name or "").lower().replace("_", "-")
    if name in wanted or name.startswith("numinous-"):
        if name == "torch" and name not in found:
            try:
                text = open(dist.locate_file("torch/version.py")).read()
            except OSError:
                text = ""
            for kind, built in re.findall(r"^(cuda|hip)\b[^=\n]*= *['\"]([^'\"]+)", text, re.M):
                found["cuda"] = built if kind == "cuda" else "hip " + built
        found.setdefault(name, dist.version)  # the first on the path is the one that is imported
print(json.dumps(found))
"""
_TORCH_DEVICE = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"


def _output(command: list[str]) -> str | None:
    """Return the stdout of a command, or None where it does not exist or fails."""
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=QUERY_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


@functools.cache
def versions_of(python: str) -> dict[str, str] | None:
    """Return the versions that an interpreter would serve with, `cuda` among them; None where it cannot be asked."""
    text = _output([python, "-c", _VERSIONS])
    try:
        versions: dict[str, str] = json.loads(text or "")
    except ValueError:
        return None
    return versions


def gpu_names() -> list[str]:
    """Return the names of the GPUs that the driver tools list (NVIDIA, AMD); empty where there is none."""
    if shutil.which("nvidia-smi"):
        text = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
        if text:
            return text.splitlines()
    if Path("/dev/kfd").exists() and shutil.which("rocm-smi"):
        text = _output(["rocm-smi", "--showproductname", "--json"])
        try:
            cards: dict[str, dict[str, str]] = json.loads(text or "{}")
        except ValueError:
            return []
        return [
            card.get("Card Series") or card.get("Card series") or name
            for name, card in sorted(cards.items())
        ]
    return []


def torch_sees_gpu(python: str) -> bool:
    """Return whether torch of that interpreter can use a GPU (a CPU build on a GPU host cannot)."""
    return _output([python, "-c", _TORCH_DEVICE]) not in (None, "", "0")


def machine() -> dict[str, Any]:
    """Return the host's CPU, core count, GPUs with their driver, and system."""
    cpu = platform.processor()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpu_names(),
        "driver": driver_version(),
        "system": platform.platform(),
    }


class Started:
    """The beginning of a run; says what its verdict must about where, when and by what command it was made.

    Raises:
        GateError: ``NUMINOUS_COMMIT`` names no commit; better said before the run than after it.
    """

    def __init__(self) -> None:
        try:
            self._git = source_state(Path(__file__).parent, os.environ)
        except ValueError as error:
            raise GateError(str(error)) from error
        self.utc = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._at_s = time.monotonic()

    def facts(self, command: str) -> dict[str, Any]:
        """Return the fields that end every verdict; the seconds are those up to now."""
        return {
            "machine": machine(),
            "git": self._git,
            "command": command,
            "started_utc": self.utc,
            "elapsed_s": round(time.monotonic() - self._at_s, 1),
        }


def driver_version() -> str | None:
    """Return the version of the GPU driver (NVIDIA, AMD); None where there is none or it does not say."""
    if shutil.which("nvidia-smi"):
        text = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
        if text:
            return text.splitlines()[0].strip()
    try:
        return Path("/sys/module/amdgpu/version").read_text(encoding="ascii").strip()
    except OSError:
        return None


def git_state(folder: Path, *pathspec: str) -> dict[str, Any] | None:
    """Return commit and cleanness of the checkout that holds `folder`; None outside one or before a first commit.

    Args:
        folder: anywhere inside it.
        pathspec: what may be unclean, as git writes it; none: everything.
    """
    commit = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if not commit:
        return None
    changes = _output(["git", "-C", str(folder), "status", "--porcelain", "--", *pathspec])
    return {"commit": commit, "dirty": bool(changes)}


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
        if ours and (state := git_state(root, ":(top)", ":(top,exclude)evidence")):
            return state
    return {"commit": None, "dirty": None}
