# SPDX-License-Identifier: Apache-2.0
"""Which features are installed: tooling's own, and those of the entry-point group ``numinous.features``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

from .errors import PatchError
from .feature import Feature

GROUP = "numinous.features"


def installed_features() -> list[Feature]:
    """Every declared feature, sorted by word, place (`Feature.order`) and id.

    Raises:
        PatchError: a topic package is broken or two packages claim one id. A broken package is never skipped: its
            user would serve stock without knowing.
    """
    # Imported here: the declarations are made of this package's classes.
    from numinous_tooling.diag.features import FEATURES

    found: dict[str, tuple[Feature, str]] = {f.id: (f, "numinous-tooling") for f in FEATURES}
    for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name):
        origin = f"entry point {entry.name} = {entry.value}"
        try:
            declared: Sequence[Feature] = tuple(entry.load()())
        except Exception as error:
            raise PatchError(
                f"{origin} cannot be loaded ({type(error).__name__}: {error}); reinstall it"
            ) from error
        for feature in declared:
            if feature.id in found:
                raise PatchError(
                    f"feature {feature.id} is declared twice: {found[feature.id][1]} and {origin}"
                )
            found[feature.id] = (feature, origin)
    features = (feature for feature, _ in found.values())
    return sorted(features, key=lambda feature: (feature.word, feature.order, feature.id))


def load_callable(name: str) -> Callable[..., Any]:
    """The object behind ``"module:function"``; raises PatchError with the reason it cannot be had."""
    module, _, attribute = name.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except Exception as error:
        raise PatchError(f"{name} cannot be imported ({type(error).__name__}: {error})") from error
    if not callable(value):
        raise PatchError(f"{name} is not callable")
    return value  # type: ignore[no-any-return]
