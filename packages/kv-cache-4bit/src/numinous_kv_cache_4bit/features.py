# SPDX-License-Identifier: Apache-2.0
"""Entry point `numinous.features` of this package."""

from __future__ import annotations

from numinous_tooling.patching import Feature

from .hooks import (
    glm_dsa,
    glm_flash,
    glm_flash_fp8,
    mla_decode_fp8,
    mla_dense,
    nvfp4_flashinfer,
    nvfp4_triton,
)


def features() -> tuple[Feature, ...]:
    """Every feature of the room; importable without torch and without the engine."""
    return (
        glm_dsa.FEATURE,
        glm_flash.FEATURE,
        glm_flash_fp8.FEATURE,
        mla_decode_fp8.FEATURE,
        mla_dense.FEATURE,
        nvfp4_flashinfer.FEATURE,
        nvfp4_triton.FEATURE,
    )
