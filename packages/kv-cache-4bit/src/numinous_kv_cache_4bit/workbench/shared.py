# SPDX-License-Identifier: Apache-2.0
"""What the ops of this room have in common: the version of their peers."""

from __future__ import annotations

from importlib import metadata


def engine_version() -> str:
    """`sglang 0.5.20`; ImportError where it is not installed."""
    try:
        return f"sglang {metadata.version('sglang')}"
    except metadata.PackageNotFoundError:
        raise ImportError("sglang is not installed") from None
