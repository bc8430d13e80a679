# SPDX-License-Identifier: Apache-2.0
"""`torchvision.transforms` as far as the engine and transformers name it."""

from __future__ import annotations

from torchvision._enums import InterpolationMode
from torchvision._refuse import refused
from torchvision.transforms import functional, v2

__all__ = ["InterpolationMode", "functional", "v2"]


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return refused(f"torchvision.transforms.{name}")
