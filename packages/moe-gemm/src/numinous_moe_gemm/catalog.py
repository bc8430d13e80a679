# SPDX-License-Identifier: Apache-2.0
"""The kernels of this package; loads without torch."""

from __future__ import annotations

from numinous_tooling.catalog import Kernel

KERNELS = (
    Kernel(
        op="rmsnorm_quant",
        package="moe-gemm",
        declared="numinous_moe_gemm.workbench.rmsnorm_quant:OP",
        sentence="RMSNorm, with or without a residual added in place, fused with FP8 quantisation of its output.",
        arch={
            "sm90": "emulated",
            "sm100": "emulated",
            "sm103": "emulated",
            "sm120": "emulated",
            "gfx950": "emulated",
        },
        peers=("sglang", "flashinfer-per-tensor"),
    ),
)
