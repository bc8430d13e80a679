# SPDX-License-Identifier: Apache-2.0
"""A stand-in for torchvision where no build fits the installed torch: importable, and honest when called.

SGLang 0.5.20 imports torchvision at start, also for text-only models. Every function here raises `ImportError`
with one line that says what to install; nothing pretends to decode or resize an image.
"""

from __future__ import annotations

from torchvision import io, transforms
from torchvision._refuse import refused

__all__ = ["io", "transforms"]

__version__ = "0.28.0+numinous.standin"


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return refused(f"torchvision.{name}")
