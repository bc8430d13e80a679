# SPDX-License-Identifier: Apache-2.0
"""Say in one line each what of a CPU-served engine is there and what is missing. Imports neither torch nor the engine."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from importlib import metadata

from numinous_cpu_platform import PLATFORM, install, model, standin


@dataclass(frozen=True)
class Finding:
    """One line of the report. `required` findings decide the exit code."""

    name: str
    ok: bool
    text: str
    required: bool = True


def examine() -> list[Finding]:
    """Every finding about the running interpreter's environment, in the order of a start."""
    return [_python(), _torch(), _engine(), _torchvision(), _plugin(), _model()]


def _python() -> Finding:
    version, machine = platform.python_version(), platform.machine()
    ok = (
        sys.platform == "linux"
        and machine == "x86_64"
        and sys.version_info[:2] in {(3, 11), (3, 12)}
    )
    served = "" if ok else "; served are Python 3.11 and 3.12 on Linux x86-64"
    return Finding("python", ok, f"{version} on {sys.platform} {machine}{served}")


def _torch() -> Finding:
    have = install.installed_version("torch")
    if have is None:
        return Finding(
            "torch", False, "not installed: run `python -m numinous_cpu_platform install`"
        )
    ok = install.public_part(have) == install.TORCH_VERSION
    return Finding("torch", ok, have if ok else f"{have}, the engine needs {install.TORCH_VERSION}")


def _engine() -> Finding:
    pins = install.engine_pins(install.installed_version("torch"))
    wrong = [
        f"{name} {have or 'missing'} (pin {version})"
        for name, version in pins.items()
        if (have := install.installed_version(name)) != version
    ]
    if not wrong:
        return Finding(
            "engine", True, f"sglang {pins['sglang']}, {len(pins)} packages at their pins"
        )
    shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
    return Finding(
        "engine",
        False,
        f"{len(wrong)} of {len(pins)} packages are not at their pins: {shown}; "
        "run `python -m numinous_cpu_platform install`",
    )


def _torchvision() -> Finding:
    have = install.installed_version("torchvision")
    torch = install.installed_version("torch")
    if have is None:
        text = "not installed: run `python -m numinous_cpu_platform install`"
        return Finding("torchvision", False, text)
    if standin.is_standin(have):
        return Finding("torchvision", True, f"{have} (text-only stand-in)")
    if torch and install.local_label(have) != install.local_label(torch):
        ok = install.torchvision_imports()
        verdict = "" if ok else ": does not load; run `python -m numinous_cpu_platform install`"
        return Finding("torchvision", ok, f"{have} next to torch {torch}{verdict}")
    return Finding("torchvision", True, have)


def _plugin() -> Finding:
    found = [
        point.value for point in metadata.entry_points(group="sglang.srt.platforms", name=PLATFORM)
    ]
    if found:
        return Finding(
            "platform", True, f"{PLATFORM} = {found[0]} (chosen by SGLANG_PLATFORM={PLATFORM})"
        )
    return Finding(
        "platform", False, f"entry point {PLATFORM} not found: reinstall numinous-cpu-platform"
    )


def _model() -> Finding:
    folder = model.default_path()
    problem = model.problem_with(folder)
    text = str(folder) if problem is None else f"{problem}; fetched at first use (93 MB)"
    return Finding("model", problem is None, text, required=False)
