# SPDX-License-Identifier: Apache-2.0
"""The two enumerations that callers name without calling anything."""

from __future__ import annotations

import enum


class InterpolationMode(enum.Enum):
    """Resampling filters, as in torchvision."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class ImageReadMode(enum.Enum):
    """Channel layouts of decoded images, as in torchvision."""

    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4
