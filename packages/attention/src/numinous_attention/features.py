# SPDX-License-Identifier: Apache-2.0
"""Entry point `numinous.features` of this package."""

from __future__ import annotations

from numinous_tooling.patching import Feature

from .hooks import gemma_glue, gqa_extend, mixed_tail, per_layer_backend, split_verify


def features() -> tuple[Feature, ...]:
    """Every feature of the room; importable without torch and without the engine."""
    return (
        gqa_extend.FEATURE,
        split_verify.FEATURE,
        mixed_tail.FEATURE,
        per_layer_backend.FEATURE,
        gemma_glue.FEATURE,
    )
