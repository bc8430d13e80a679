# SPDX-License-Identifier: Apache-2.0
"""`torchvision.transforms.v2.functional`: every function refuses."""

from __future__ import annotations

from torchvision._enums import InterpolationMode
from torchvision._refuse import refused

__all__ = ["InterpolationMode"]


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return refused(f"torchvision.transforms.v2.functional.{name}")
