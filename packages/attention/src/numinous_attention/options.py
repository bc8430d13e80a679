# SPDX-License-Identifier: Apache-2.0
"""Names and options of the features of this package, which declarations and adapters share."""

from __future__ import annotations

from numinous_tooling.patching import Option
from numinous_tooling.patching.feature import flag_of

GQA_EXTEND = "attention.gqa_extend"

LAYERS = Option(
    name=f"{flag_of(GQA_EXTEND)}_LAYERS",
    kind="str",
    default="all",
    doc="Which layers it takes: all, those with a sliding window, or those without (full).",
    choices=("all", "windowed", "full"),
)
MIN_CHUNK = Option(
    name=f"{flag_of(GQA_EXTEND)}_MIN_CHUNK",
    kind="int",
    default=1,
    doc="Batches whose longest chunk has fewer tokens stay in stock: 17 leaves verification of up to 16 drafts there.",
    minimum=1,
)

SPLIT_VERIFY = "attention.split_verify"

MAX_DRAFTS = 16
"""Tokens of the longest chunk that is split over its prefix."""

PER_LAYER_BACKEND = "attention.per_layer_backend"

FLASH_DIM = 256
"""Widest head that FlashAttention-3 has kernels for."""

MIXED_TAIL = "attention.mixed_tail"

GEMMA_GLUE = "attention.gemma_glue"
