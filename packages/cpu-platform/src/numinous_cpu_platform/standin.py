# SPDX-License-Identifier: Apache-2.0
"""Build the wheel of the text-only torchvision stand-in from the sources that this package ships.

The engine imports torchvision at start, and PyPI's build does not load next to a CPU-only torch. The stand-in's version
carries the local label `numinous.standin`, so that `pip list` tells it from the real one. The wheel is a function of
the sources alone (fixed order, times and modes, no compression): built twice, it is byte-identical.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from importlib import metadata
from pathlib import Path

TORCHVISION_VERSION = "0.28.0"
LABEL = "numinous.standin"
VERSION = f"{TORCHVISION_VERSION}+{LABEL}"
SOURCES = Path(__file__).with_name("torchvision_stub")
METADATA = f"""\
Metadata-Version: 2.1
Name: torchvision
Version: {VERSION}
Summary: Text-only stand-in for torchvision, installed by numinous-cpu-platform where no build fits the torch
License: Apache-2.0
"""
WHEEL = "Wheel-Version: 1.0\nGenerator: numinous-cpu-platform\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def build_wheel(folder: Path) -> Path:
    """Write the stand-in's wheel into `folder` and return its path."""
    info = f"torchvision-{VERSION}.dist-info"
    files = {
        path.relative_to(SOURCES).as_posix(): path.read_bytes()
        for path in sorted(SOURCES.rglob("*.py"))
    }
    files[f"{info}/METADATA"] = METADATA.encode()
    files[f"{info}/WHEEL"] = WHEEL.encode()
    record = f"{info}/RECORD"
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()

    wheel = folder / f"torchvision-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return wheel


def is_standin(version: str) -> bool:
    """Whether a torchvision version string is the stand-in's."""
    return version.partition("+")[2] == LABEL


def installed() -> bool:
    """Whether the torchvision of this environment is the stand-in."""
    try:
        return is_standin(metadata.version("torchvision"))
    except metadata.PackageNotFoundError:
        return False


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
