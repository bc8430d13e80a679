# SPDX-License-Identifier: Apache-2.0
"""Binaries that a wheel ships: ``binaries/<arch>/<name>.cubin`` or ``.hsaco`` with a ``manifest.json`` per architecture.

A manifest maps the name of a binary to `Shipped`, written as JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER, MANIFEST = "binaries", "manifest.json"


@dataclass(frozen=True)
class Shipped:
    """One row of a manifest.

    Args:
        file: name beside the manifest.
        target: compiler target, for example ``sm_100f`` or ``gfx950``.
        source: path below the import package.
        defines: preprocessor symbols.
        digest: `sources.digest` of the two.
        sha256: of the file.
        entries: kernels in it.
        compiler: name and version.
        resources: entry -> what `resources` read.
    """

    file: str
    target: str
    source: str
    defines: dict[str, str]
    digest: str
    sha256: str
    entries: list[str]
    compiler: str
    resources: dict[str, dict[str, Any]]


def manifest(module: Path, arch: str) -> dict[str, Shipped]:
    """Name -> row of what the package of folder `module` ships for an architecture; empty where it ships nothing."""
    path = module / FOLDER / arch / MANIFEST
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))
    return {name: Shipped(**row) for name, row in rows.items()}
