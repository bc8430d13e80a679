# SPDX-License-Identifier: Apache-2.0
"""Names of the features of this package, which declarations and adapters share."""

from __future__ import annotations

GLM_FLASH_FP8 = "kv4.glm_flash_fp8"
FLASH_ARCHITECTURES = (
    "Glm5NextForConditionalGeneration",
    "Glm5NextForConditionalGenerationNextN",  # its draft
)
