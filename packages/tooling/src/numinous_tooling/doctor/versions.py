# SPDX-License-Identifier: Apache-2.0
"""Installed packages against the pins of the engine and of torch; torch's CUDA against the driver."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from numinous_tooling.patching.engine import DISTRIBUTION as ENGINE

from .findings import Finding, finding, shortened
from .installation import Packages
from .machine import Gpu
from .requirements import marker_holds, normalised, parse_requirement, satisfies

ALWAYS_DECISIVE = ("torch", "transformers")
"""Off their pin they are a problem with and without a GPU."""

DECISIVE_ON_NVIDIA = (
    "apache-tvm-ffi",
    "cuda-python",
    "cuda-tile",
    "flash-attn-4",
    "flashinfer-python",
    "humming-kernels",
    "nvidia-cutlass-dsl",
    "nvidia-mathdx",
    "nvshmem4py-cu13",
    "quack-kernels",
    "sgl-deep-ep",
    "sgl-deep-gemm",
    "sglang-kernel",
    "tilelang",
    "tokenspeed-mla",
    "torch-memory-saver",
)
"""They carry or compile the kernels of NVIDIA GPUs; elsewhere the engine serves without them."""

_NAMED = (
    *ALWAYS_DECISIVE,
    "triton",
    "flashinfer-python",
    "sglang-kernel",
    "sgl-deep-gemm",
    "cuda-toolkit",
)
"""They get a line of their own when they are right, too."""

_CUDA_LIBRARY = re.compile(r"nvidia-|cuda-|triton$")

# Oldest Linux driver under which any toolkit of a CUDA major version runs ("minor version compatibility", CUDA release notes).
_OLDEST_DRIVER = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}


@dataclass(frozen=True)
class Pin:
    """One requirement and what is installed; `holds` is None where it was not decided."""

    package: str
    wanted: str
    installed: str | None
    holds: bool | None
    by: str


def pins_of(distribution: Distribution, packages: Packages) -> tuple[list[Pin], list[str]]:
    """Requirements of a distribution that apply here, and the lines whose marker or form was not decided.

    Extras are followed: ``a[x]==1`` adds what an installed ``a`` requires for its extra ``x``.
    """
    pins: list[Pin] = []
    undecided: list[str] = []
    pending = [(distribution, "")]
    for one, extra in pending:  # grows while it runs
        by = normalised(one.metadata["Name"])
        for line in one.requires or []:
            requirement = parse_requirement(line)
            applies = None if requirement is None else marker_holds(requirement.marker, extra)
            if requirement is None or applies is None:
                undecided.append(line)
            elif applies and not (extra and marker_holds(requirement.marker)):
                there = packages.found.get(requirement.name)
                holds = satisfies(there.version, requirement.specifiers) if there else False
                version = there.version if there else None
                pins.append(Pin(requirement.name, requirement.specifiers, version, holds, by))
                if holds is None:
                    undecided.append(line)
                more = [(there, name) for name in requirement.extras] if there else []
                pending += [pair for pair in more if pair not in pending]
    return pins, undecided


def versions_section(
    engine: Distribution | None, packages: Packages, gpus: Sequence[Gpu]
) -> tuple[list[Finding], dict[str, Any]]:
    """Findings on versions, and every judged pin."""
    findings: list[Finding] = []
    pins: list[Pin] = []
    undecided: list[str] = []
    torch = packages.found.get("torch")
    for distribution in filter(None, (engine, torch)):
        more, lines = pins_of(distribution, packages)
        if distribution is torch:  # its other requirements have nothing to do with the GPU
            more = [pin for pin in more if _CUDA_LIBRARY.match(pin.package)]
            lines = [line for line in lines if _CUDA_LIBRARY.match(normalised(line))]
        pins += more
        undecided += lines
    if engine is not None:
        findings += _judged(pins, packages, {gpu.vendor for gpu in gpus})
    if torch is None and engine is None:
        findings.append(finding("note", "torch", f"not in {packages.where}"))
    triton = packages.version("triton")
    if triton and not any(pin.package == "triton" for pin in pins):
        findings.append(
            finding("note", f"triton {triton}", "neither the engine nor this torch pins a version")
        )
    if undecided:
        lines = [f'"{line}"' for line in dict.fromkeys(undecided)]
        findings.append(
            finding("unknown", "requirements not decided", shortened(lines), "compare them by hand")
        )
    build = torch_build(torch) if torch else None
    if torch and build:
        findings += _torch_findings(torch.version, build, gpus)
    elif torch:
        findings.append(
            finding(
                "unknown",
                "torch's CUDA version",
                "torch/version.py cannot be read",
                "reinstall torch",
            )
        )
    data = {"packages": packages.where, "torch_build": build, "pins": [asdict(pin) for pin in pins]}
    return findings, data


def torch_build(torch: Distribution) -> str | None:
    """``cuda 13.0``, ``hip 7.2`` or ``cpu``, from the text of ``torch/version.py``; None if it cannot be read."""
    try:
        text = Path(str(torch.locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except OSError:
        return None
    for name in ("cuda", "hip"):
        if match := re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE):
            return f"{name} {match[1]}"
    return "cpu" if re.search(r"^cuda\b[^=\n]*=\s*None", text, re.MULTILINE) else None


def _judged(pins: list[Pin], packages: Packages, vendors: set[str]) -> list[Finding]:
    findings = []
    gpu_missing: list[str] = []
    gpu_wrong: list[str] = []
    missing: list[str] = []
    wrong: list[str] = []
    nvidia = "nvidia" in vendors
    # The wheel's pins are those of its CUDA build: an AMD machine has another torch.
    always = () if vendors == {"amd"} else ALWAYS_DECISIVE
    for pin in pins:
        for_gpu = pin.package in DECISIVE_ON_NVIDIA or (
            pin.by != ENGINE and _CUDA_LIBRARY.match(pin.package)
        )
        decisive = pin.package in always or pin.package == "triton" or (for_gpu and nvidia)
        if decisive and pin.holds is False and (pin.installed or not for_gpu):
            state = pin.installed or "is not installed"
            fix = f"pip install '{pin.package}{pin.wanted}'"
            wanted = f"{pin.by} wants {pin.wanted or 'any version'}"
            findings.append(finding("problem", f"{pin.package} {state}", wanted, fix))
        elif pin.package in _NAMED and pin.holds:
            findings.append(
                finding(
                    "ok",
                    f"{pin.package} {pin.installed}",
                    f"{pin.by} wants {pin.wanted or 'any version'}",
                )
            )
        elif pin.holds is False:
            shown = (
                f"{pin.package} {pin.installed} ({pin.wanted})" if pin.installed else pin.package
            )
            if for_gpu:
                (gpu_wrong if pin.installed else gpu_missing).append(shown)
            else:
                (wrong if pin.installed else missing).append(shown)
    holding = sum(pin.holds is True for pin in pins)
    findings.append(finding("ok", "pins that hold", f"{holding} of {len(pins)}, {packages.where}"))
    whole = "pip install sglang without --no-deps brings them"
    if gpu_missing:
        what = "packages of the NVIDIA path, not installed"
        findings.append(
            finding("problem" if nvidia else "note", what, shortened(gpu_missing, 30), whole)
        )
    if gpu_wrong:
        what = "packages of the NVIDIA path, off their pin"
        findings.append(
            finding("note", what, shortened(gpu_wrong, 30), "only an NVIDIA GPU needs them")
        )
    if wrong:
        fix = "install the pinned versions if the server fails in them"
        findings.append(finding("note", "other packages, off their pin", shortened(wrong, 30), fix))
    if missing:
        findings.append(
            finding("note", "other packages, not installed", shortened(missing, 40), whole)
        )
    return findings


def _torch_findings(version: str, build: str, gpus: Sequence[Gpu]) -> list[Finding]:
    kind, _, number = build.partition(" ")
    detail = f"{version} is built for {build}"
    wants = {"nvidia": "cuda", "amd": "hip"}
    unserved = [gpu for gpu in gpus if wants[gpu.vendor] != kind]
    findings = [
        finding(
            "problem",
            "torch build",
            f"{detail}; {gpu.name} needs a {wants[gpu.vendor].upper()} build",
            f"install the {wants[gpu.vendor].upper()} build of torch",
        )
        for gpu in unserved
    ] or [finding("ok", "torch build", detail)]
    if kind == "cuda":
        drivers = dict.fromkeys(gpu.driver for gpu in gpus if gpu.vendor == "nvidia" and gpu.driver)
        findings += [driver_finding(driver, number) for driver in drivers]
    return findings


def driver_finding(driver: str, cuda: str, local: Path = Path("/usr/local")) -> Finding:
    """Whether a driver is new enough for torch's CUDA version.

    Args:
        driver: for example ``570.133.20``.
        cuda: for example ``13.0``.
        local: where toolkits are; a ``cuda*/compat/libcuda.so.*`` there lets an older data-centre driver serve.
    """
    what = f"driver {driver} for CUDA {cuda}"
    oldest = _OLDEST_DRIVER.get(int(cuda.partition(".")[0]))
    have = tuple(int(part) for part in re.findall(r"\d+", driver))
    if oldest is None:
        return finding(
            "unknown",
            what,
            "no oldest driver on record for this CUDA version",
            "see its release notes",
        )
    needs = ".".join(f"{part:02}" for part in oldest)
    if have >= oldest:
        return finding("ok", what, f"needs {needs} or newer")
    compat = sorted(local.glob("cuda*/compat/libcuda.so.*"))
    if compat:
        return finding("note", what, f"older than {needs}; works only through {compat[0].parent}")
    fix = "update the driver (data-centre GPUs: or install the cuda-compat package)"
    return finding("problem", what, f"older than {needs}: torch will find no GPU", fix)
