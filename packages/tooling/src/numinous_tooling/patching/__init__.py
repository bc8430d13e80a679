# SPDX-License-Identifier: Apache-2.0
"""Patch an installed engine safely: features as data, pins per function, hooks in memory, edits on disk.

Standard library only. Declarations are in `feature`; `boot` runs in every engine process, `check` judges from outside.
"""

from .errors import PatchError
from .feature import Edit, Feature, Hook, Option, Pin, Registration, Series, stock_pin

__all__ = [
    "Edit",
    "Feature",
    "Hook",
    "Option",
    "PatchError",
    "Pin",
    "Registration",
    "Series",
    "stock_pin",
]
