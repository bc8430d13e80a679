# SPDX-License-Identifier: Apache-2.0
"""What the declarations and adapters of this room share."""

from __future__ import annotations

PER_LAYER_BACKEND = "attention.per_layer_backend"

FLASH_DIM = 256
"""Widest head that FlashAttention-3 has kernels for."""
