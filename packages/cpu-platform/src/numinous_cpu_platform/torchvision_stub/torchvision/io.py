# SPDX-License-Identifier: Apache-2.0
"""`torchvision.io` as far as the engine and transformers name it."""

from __future__ import annotations

from torchvision._enums import ImageReadMode
from torchvision._refuse import refused

__all__ = ["ImageReadMode"]


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return refused(f"torchvision.io.{name}")
