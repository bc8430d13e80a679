# SPDX-License-Identifier: Apache-2.0
"""Tuned kernel configurations that the engine ships for a GPU, and those it ships for other GPUs only.

Two folders of JSON files, whose names say for which shape, GPU and data type they were tuned:

- ``kernels/ops/quantization/configs``: block-scaled and channelwise GEMMs in FP8 and INT8, keyed by N and K;
- ``srt/layers/moe/moe_runner/triton_utils/configs/triton_X_Y_Z``: fused MoE, keyed by experts E and width N.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numinous_tooling.patching.engine import EngineTree

from .findings import Finding, finding
from .machine import Gpu

GEMM_FOLDER = "kernels/ops/quantization/configs"
MOE_FOLDER = "srt/layers/moe/moe_runner/triton_utils/configs"

# Backends behind `auto`, read in 0.5.20: srt/layers/quantization/fp8_utils.py, `_dispatch_auto_backend` and
# `initialize_fp8_gemm_config`, and the probe in srt/layers/deep_gemm_wrapper/configurer.py. Only the Triton GEMM
# opens the FP8 files; the other backends fall back to it for shapes they do not support.
_DEEP_GEMM = (
    "`auto` serves FP8 GEMMs with DeepGEMM if it is installed; "
    "only shapes whose N is no multiple of 64, or K none of 128, read them"
)
_AITER = (
    "`auto` with SGLANG_USE_AITER=1 serves FP8 GEMMs with AITER and reads none; else Triton does"
)
_AUTO_FP8_GEMM = {
    "sm90": _DEEP_GEMM,
    "sm100": _DEEP_GEMM,
    "sm103": _DEEP_GEMM,
    "sm120": "`auto` serves FP8 GEMMs with CUTLASS; only shapes whose N or K is no multiple of 128 read them",
    "gfx942": _AITER,
    "gfx950": _AITER,
}


@dataclass(frozen=True)
class TunedFile:
    """What the name of one file says.

    Args:
        device: GPU name with ``_`` for blanks, as in the file name.
        shape: ``("N", 512), ("K", 7168)`` or ``("E", 64), ("N", 1280)``.
        dtype: ``fp8_w8a8``, ``int8_w8a8``, …; empty for the model's own 16-bit type.
        block: ``128x128``, empty if not block-scaled.
        per_channel: scales per channel (MoE).
        down: for the second GEMM of an expert (MoE).
        triton: ``3.6.0`` for a MoE file, None for a GEMM file.
    """

    device: str
    shape: tuple[tuple[str, int], ...]
    dtype: str
    block: str
    per_channel: bool = False
    down: bool = False
    triton: str | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Everything but the GPU and the Triton version: what a lookup asks for."""
        return (self.shape, self.dtype, self.block, self.per_channel, self.down)


def parse_tuned(name: str, triton: str | None = None) -> TunedFile | None:
    """Read a file name; None for another kind of file."""
    stem, extension = os.path.splitext(name)
    down = stem.endswith("_down")
    # Commas inside block_shape=[128, 128] separate nothing.
    pairs = [
        field.partition("=") for field in re.split(r",(?![^\[]*\])", stem.removesuffix("_down"))
    ]
    fields = {key: value for key, sign, value in pairs if sign}
    if extension != ".json" or "device_name" not in fields or len(fields) != len(pairs):
        return None
    shape = tuple(
        (axis, int(fields[axis])) for axis in ("E", "N", "K") if fields.get(axis, "").isdecimal()
    )
    if len(shape) != 2:
        return None
    return TunedFile(
        fields["device_name"],
        shape,
        fields.get("dtype", ""),
        "x".join(re.findall(r"\d+", fields.get("block_shape", ""))),
        fields.get("per_channel_quant") == "True",
        down,
        triton,
    )


def gemm_files(tree: EngineTree) -> list[TunedFile]:
    """The GEMM files of an engine."""
    names = (path.rpartition("/")[2] for path in tree.files(GEMM_FOLDER + "/"))
    return [file for name in names if (file := parse_tuned(name))]


def moe_files(paths: Iterable[str]) -> list[TunedFile]:
    """The MoE files among paths ``triton_X_Y_Z/name.json``."""
    found = []
    for path in paths:
        folder, _, name = path.rpartition("/")
        if folder.startswith("triton_"):
            version = folder.removeprefix("triton_").replace("_", ".")
            if file := parse_tuned(name, version):
                found.append(file)
    return found


def lookup_order(installed: str | None, available: Iterable[str]) -> list[str]:
    """Triton versions in the order in which the engine looks for a MoE file.

    The rule of 0.5.20 (fused_moe_triton_config.py, `get_moe_configs`): the folder of the installed Triton's exact
    version string first, whether older or newer ones exist or not; then every other folder, newest version first,
    each hit with a warning; for a ``_down`` file that no folder has, the file of the first GEMM.
    """
    newest_first = sorted(set(available), key=_numbers, reverse=True)
    return sorted(newest_first, key=lambda version: version != installed)


def tuned_section(
    tree: EngineTree, gpus: Sequence[Gpu], triton: str | None, environ: Mapping[str, str]
) -> tuple[list[Finding], dict[str, Any]]:
    """Findings and numbers for each GPU."""
    gemm = gemm_files(tree)
    findings: list[Finding] = []
    override = environ.get("SGLANG_MOE_CONFIG_DIR")
    if override:
        folder = Path(override) / "configs"
        if not folder.is_dir():
            detail = f"{folder} does not exist: the engine fails at the first MoE layer"
            findings.append(
                finding(
                    "problem", "SGLANG_MOE_CONFIG_DIR", detail, "create it or unset the variable"
                )
            )
        moe = moe_files(
            path.relative_to(folder).as_posix() for path in sorted(folder.glob("triton_*/*.json"))
        )
    else:
        moe = moe_files(
            path.removeprefix(MOE_FOLDER + "/") for path in tree.files(MOE_FOLDER + "/")
        )
    versions = {file.triton for file in moe if file.triton}
    order = lookup_order(triton, versions)
    data: dict[str, Any] = {
        "gemm_folder": GEMM_FOLDER,
        "moe_folder": override or MOE_FOLDER,
        "triton": triton,
        "moe_lookup_order": order,
        "gemm_files_by_device": _by_device(gemm),
        "moe_files_by_device": _by_device(moe),
        "gpus": [],
    }
    if not gpus:
        devices = {file.device for file in [*gemm, *moe] if file.device}
        detail = f"{len(gemm)} GEMM files, {len(moe)} MoE files for {len(devices)} GPUs"
        findings.append(
            finding("note", "no GPU to judge for", detail, 'name one with --gpu "NVIDIA H200"')
        )
        return findings, data
    for gpu in gpus:
        findings += [_gemm_finding(gemm, gpu), _moe_finding(moe, gpu, order, triton)]
        if caveat := _AUTO_FP8_GEMM.get(gpu.arch or ""):
            findings.append(finding("note", f"who reads the FP8 GEMM files on {gpu.arch}", caveat))
        data["gpus"].append(
            {
                "device": device_key(gpu),
                "gemm": _numbers_of(gemm, gpu),
                "moe": _moe_numbers(moe, gpu, order),
            }
        )
    return findings, data


def device_key(gpu: Gpu) -> str:
    """The name as the engine writes it into file names."""
    return gpu.name.replace(" ", "_")


def devices_of(tree: EngineTree) -> set[str]:
    """Every device name that an engine ships files for."""
    moe = moe_files(path.removeprefix(MOE_FOLDER + "/") for path in tree.files(MOE_FOLDER + "/"))
    return {file.device for file in [*gemm_files(tree), *moe] if file.device}


def _gemm_finding(files: list[TunedFile], gpu: Gpu) -> Finding:
    numbers = _numbers_of(files, gpu)
    what = f"FP8 / INT8 GEMM files for {gpu.name}"
    lacking = _lacking(numbers)
    if numbers["files"]:
        return finding(
            "ok", what, f"{numbers['files']} ({_counts(numbers['by_dtype'])}); {lacking}"
        )
    return finding(
        "note",
        what,
        f"none; {lacking}{_near(files, gpu)}",
        "tune with the Triton backend where it serves",
    )


def _moe_finding(files: list[TunedFile], gpu: Gpu, order: list[str], triton: str | None) -> Finding:
    numbers = _moe_numbers(files, gpu, order)
    what = f"fused-MoE files for {gpu.name}"
    lacking = _lacking(numbers)
    if not numbers["files"]:
        return finding(
            "note",
            what,
            f"none; {lacking}{_near(files, gpu)}",
            "tune the Triton MoE kernel for your model",
        )
    served = numbers["served_from"]
    if triton is None:
        lookup = "Triton is not installed, so which folder comes first is open"
    elif triton in order:
        other = sum(count for version, count in served.items() if version != triton)
        lookup = f"Triton {triton}: {served.get(triton, 0)} shapes from its own folder, {other} from other versions with a warning"
    else:
        lookup = f"Triton {triton} has no folder: every hit comes from another version, {order[0]} first, with a warning"
    detail = f"{numbers['files']} files, {numbers['shapes']} shapes ({_counts(numbers['by_dtype'])}); {lookup}; {lacking}"
    return finding("ok" if served.get(triton or "") else "note", what, detail)


def _numbers_of(files: list[TunedFile], gpu: Gpu) -> dict[str, Any]:
    """Files of this GPU, and shapes that only other GPUs have."""
    device = device_key(gpu)
    mine = [file for file in files if file.device == device]
    have = {file.key for file in mine}
    elsewhere: dict[tuple[object, ...], tuple[TunedFile, set[str]]] = {}
    for file in files:
        if (
            file.key not in have and file.device
        ):  # two files of 0.5.20 name no device and serve nobody
            elsewhere.setdefault(file.key, (file, set()))[1].add(file.device)
    missing = [
        {
            **{axis.lower(): size for axis, size in file.shape},
            "dtype": file.dtype,
            "block": file.block,
            "per_channel": file.per_channel,
            "down": file.down,
            "devices": sorted(devices),
        }
        for file, devices in elsewhere.values()
    ]
    return {
        "files": len(mine),
        "shapes": len(have),
        "by_dtype": dict(sorted(Counter(file.dtype or "16-bit" for file in mine).items())),
        "missing_shapes": len(missing),
        "missing": sorted(missing, key=lambda row: [str(row["dtype"]), *map(str, row.values())]),
    }


def _moe_numbers(files: list[TunedFile], gpu: Gpu, order: list[str]) -> dict[str, Any]:
    mine = [file for file in files if file.device == device_key(gpu)]
    by_triton = {
        version: dict(
            sorted(
                Counter(file.dtype or "16-bit" for file in mine if file.triton == version).items()
            )
        )
        for version in order
    }
    first = {}
    for version in reversed(order):
        first.update({file.key: version for file in mine if file.triton == version})
    return {
        **_numbers_of(files, gpu),
        "by_triton": {version: counts for version, counts in by_triton.items() if counts},
        "served_from": dict(Counter(first.values())),
    }


def _lacking(numbers: Mapping[str, Any]) -> str:
    count = numbers["missing_shapes"]
    return (
        f"{count} shapes are tuned for other GPUs only"
        if count
        else "no shape is tuned for other GPUs only"
    )


def _near(files: list[TunedFile], gpu: Gpu) -> str:
    """Other devices that begin alike, which the user may have meant."""
    words = device_key(gpu).split("_")
    stem = "_".join(words[: max(2, len(words) - 2)])
    near = sorted({file.device for file in files if file.device.startswith(stem)})
    return f"; there are files for {', '.join(near)}" if near else ""


def _by_device(files: list[TunedFile]) -> dict[str, int]:
    return dict(sorted(Counter(file.device for file in files).items()))


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
