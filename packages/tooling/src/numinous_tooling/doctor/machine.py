# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine, or the one the user asks about, and the architecture word of each."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .findings import Finding, Level, finding

_NVIDIA_QUERY = (
    "--query-gpu=name,compute_cap,driver_version,memory.total",
    "--format=csv,noheader",
)
_SECONDS = 20.0

_ARCH_OF_NAME = (
    (r"\b(GH200|H100|H200|H20|H800)\b", "sm90"),
    (r"\b(GB200|B200|B100)\b", "sm100"),
    (r"\b(GB300|B300)\b", "sm103"),
    (r"\bGB10\b", "sm121"),
    (r"\bRTX PRO \d+|\bRTX 50[5-9]0\b", "sm120"),
    (r"\b(L4|L20|L40|L40S|RTX 40[5-9]0)\b|\bAda\b", "sm89"),
    (r"\b(A10|A10G|A16|A40|RTX 30[5-9]0|RTX A\d+)\b", "sm86"),
    (r"\b(A100|A800|A30)\b", "sm80"),
    (r"\bMI(350|355)X\b", "gfx950"),
    (r"\bMI(300[XA]|308X|325X)\b", "gfx942"),
    (r"\bMI(210|250X?)\b", "gfx90a"),
)
"""Marketing name -> architecture, for a GPU that is only named; a GPU that is here reports its own."""


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Args:
        name: as torch reports it; the engine forms the names of tuned files from it.
        vendor: ``nvidia`` or ``amd``.
        arch: ``sm90``, ``sm100``, ``gfx950``, …; None if not known.
        driver: driver version, None if not known.
        memory_mib: total memory, None if not known.
        present: False for a GPU that the user only named.
    """

    name: str
    vendor: str
    arch: str | None
    driver: str | None = None
    memory_mib: int | None = None
    present: bool = True


def parse_nvidia_smi(text: str) -> list[Gpu]:
    """GPUs of ``nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total --format=csv,noheader``.

    Raises:
        ValueError: a line of another form; it is the message that nvidia-smi printed instead.
    """
    gpus = []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        fields = [field.strip() for field in line.rsplit(",", 3)]
        if len(fields) != 4:
            raise ValueError(line)
        name, capability, driver, memory = fields
        arch = f"sm{capability.replace('.', '')}" if re.fullmatch(r"\d+\.\d", capability) else None
        mib = re.fullmatch(r"(\d+) MiB", memory)
        gpus.append(
            Gpu(
                name,
                "nvidia",
                arch or _arch_of(name),
                driver if re.match(r"\d+\.\d+", driver) else None,
                int(mib[1]) if mib else None,
            )
        )
    return gpus


def parse_rocm_smi(text: str) -> list[Gpu]:
    """GPUs of ``rocm-smi --showproductname --json``; warnings may precede the JSON.

    Raises:
        ValueError: no JSON object of cards.
    """
    cards = _json_in(text)
    if not isinstance(cards, dict):
        raise ValueError("no JSON object")
    gpus = []
    for key, card in cards.items():
        if key.startswith("card") and isinstance(card, dict):
            fields = {name.lower(): str(value) for name, value in card.items()}
            gpus.append(_amd(fields.get("card series", ""), fields.get("gfx version", "")))
    return gpus


def parse_amd_smi(text: str) -> list[Gpu]:
    """GPUs of ``amd-smi static --asic --json``: a list, in newer versions below ``gpu_data``.

    Raises:
        ValueError: no JSON of GPUs.
    """
    data = _json_in(text)
    rows = data.get("gpu_data") if isinstance(data, dict) else data
    if not isinstance(rows, list):
        raise ValueError("no JSON list")
    parts = [row.get("asic") or {} for row in rows if isinstance(row, dict)]
    return [
        _amd(str(part.get("market_name", "")), str(part.get("target_graphics_version", "")))
        for part in parts
    ]


def named_gpu(text: str, known_devices: Iterable[str] = ()) -> Gpu:
    """The GPU that a user means by a name, long (``NVIDIA H200``) or short (``MI355X``, ``B200``).

    Args:
        text: what the user wrote.
        known_devices: device names of the engine's tuned files. If exactly one begins with the name as written
            (``NVIDIA H100`` -> ``NVIDIA H100 80GB HBM3``), it is meant.
    """
    name = " ".join(text.replace("_", " ").split())
    amd = re.search(r"\bMI\d{3}|\bAMD\b|\bInstinct\b|\bRadeon\b", name, re.IGNORECASE) is not None
    name = re.sub(r"^(nvidia|amd)\s+", "", name, flags=re.IGNORECASE)
    if amd:
        name = re.sub(r"^instinct\s+", "", name, flags=re.IGNORECASE)
        name = f"AMD Instinct {name}" if re.match(r"MI\d", name, re.IGNORECASE) else f"AMD {name}"
    else:
        name = f"NVIDIA {name}"
    spaced = sorted({device.replace("_", " ") for device in known_devices})
    same = [device for device in spaced if device.lower() == name.lower()]
    longer = [device for device in spaced if device.lower().startswith(name.lower() + " ")]
    if same:
        name = same[0]
    elif len(longer) == 1:
        name = longer[0]
    return Gpu(name, "amd" if amd else "nvidia", _arch_of(name), present=False)


def present_gpus(environ: Mapping[str, str]) -> tuple[list[Gpu], list[Finding]]:
    """GPUs that the vendors' tools list, and a finding for each tool that is here and gave no answer."""
    gpus: list[Gpu] = []
    failures: list[Finding] = []
    if answer := _ask("nvidia-smi", _NVIDIA_QUERY, parse_nvidia_smi, environ, failures):
        gpus += answer
    for tool, arguments, parse in (
        ("rocm-smi", ("--showproductname", "--json"), parse_rocm_smi),
        ("amd-smi", ("static", "--asic", "--json"), parse_amd_smi),
    ):
        if answer := _ask(tool, arguments, parse, environ, failures):
            gpus += answer
            break
    return gpus, failures


def machine_section(
    gpu: str | None, known_devices: Iterable[str], environ: Mapping[str, str]
) -> tuple[list[Finding], list[Gpu]]:
    """Findings on the GPUs, and the GPUs that the rest of the report judges for."""
    present, findings = present_gpus(environ)
    for one, count in Counter(present).items():
        detail = f"{count} x, {one.arch or 'architecture not known'}"
        detail += f", driver {one.driver}" if one.driver else ""
        detail += f", {one.memory_mib} MiB" if one.memory_mib else ""
        findings.append(finding("ok" if one.arch else "unknown", one.name, detail))
    if not present and not findings:
        findings.append(
            finding(
                "note",
                "no GPU found",
                "neither nvidia-smi nor rocm-smi nor amd-smi is here",
                "" if gpu else 'ask about one with --gpu "NVIDIA H200"',
            )
        )
    if not gpu:
        return findings, list(dict.fromkeys(present))
    wanted = named_gpu(gpu, known_devices)
    here = next((one for one in present if one.name == wanted.name), None)
    if here is None:
        level: Level = "note" if wanted.arch else "unknown"
        detail = f"{wanted.arch or 'architecture not known'}; not in this machine"
        findings.append(finding(level, f"judged for {wanted.name}", detail))
    return findings, [here or wanted]


def as_data(gpus: Iterable[Gpu]) -> list[dict[str, Any]]:
    """GPUs for the JSON report."""
    return [asdict(gpu) for gpu in gpus]


def _arch_of(name: str) -> str | None:
    return next((arch for p, arch in _ARCH_OF_NAME if re.search(p, name, re.IGNORECASE)), None)


def _amd(series: str, graphics: str) -> Gpu:
    # Older tools print a hexadecimal model instead of the name.
    name = series if series and not series.startswith(("0x", "N/A")) else "AMD GPU"
    arch = graphics if re.fullmatch(r"gfx[0-9a-f]+", graphics) else _arch_of(name)
    return Gpu(name, "amd", arch)


def _json_in(text: str) -> Any:
    start = re.search(r"[\[{]\s*[\"{\]}]", text)
    return json.loads(text[start.start() :] if start else text)


def _ask(
    tool: str,
    arguments: tuple[str, ...],
    parse: Callable[[str], list[Gpu]],
    environ: Mapping[str, str],
    failures: list[Finding],
) -> list[Gpu]:
    path = shutil.which(tool, path=environ.get("PATH", ""))
    if path is None:
        return []
    try:
        done = subprocess.run(
            [path, *arguments],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
        )
        if done.returncode == 0:
            return parse(done.stdout)
        reason = (
            done.stdout.strip() or done.stderr.strip() or f"exit {done.returncode}"
        ).splitlines()[0]
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        reason = str(error).splitlines()[0]
    failures.append(
        finding(
            "unknown",
            f"{tool} gave no answer",
            reason,
            f"run {tool} by hand; the GPU driver may be missing",
        )
    )
    return []
