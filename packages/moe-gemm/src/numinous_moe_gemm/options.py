# SPDX-License-Identifier: Apache-2.0
"""Names and defaults of the features of this package, which declarations and adapters share."""

from __future__ import annotations

from numinous_tooling.patching import Option

NORM_QUANT = "moe.norm_quant"

VERIFY = Option(
    name="NUMINOUS_MOE_NORM_QUANT_VERIFY",
    kind="bool",
    default=False,
    doc="Quantise again as stock does before every GEMM and end the process where a bit differs; slow, synchronises.",
)
