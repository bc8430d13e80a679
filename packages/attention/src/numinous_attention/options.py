# SPDX-License-Identifier: Apache-2.0
"""Names that the declarations and adapters of this room share."""

from __future__ import annotations

PER_LAYER_BACKEND = "attention.per_layer_backend"
