# SPDX-License-Identifier: Apache-2.0
"""`torchvision.transforms.v2`: every function refuses."""

from __future__ import annotations

from torchvision._enums import InterpolationMode
from torchvision._refuse import refused
from torchvision.transforms.v2 import functional

__all__ = ["InterpolationMode", "functional"]


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return refused(f"torchvision.transforms.v2.{name}")
