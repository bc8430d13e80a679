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
            "sm90": "run",
            "sm100": "compiled",
            "sm103": "compiled",
            "sm120": "compiled",
            "gfx950": "compiled",
        },
        evidence=(
            "rmsnorm_quant-034a897142f5",
            "rmsnorm_quant-b543f8efde93",
            "rmsnorm_quant-3a8213cce784",
            "rmsnorm_quant-f757092e20d8",
            "rmsnorm_quant-4d0598d529c2",
            "rmsnorm_quant-67d02dfc8ff3",
            "rmsnorm_quant-5ae5cde396b6",
            "rmsnorm_quant-74126252aed8",
            "rmsnorm_quant-6f258707cb75",
        ),
        feature="moe.norm_quant",
        peers=("sglang", "flashinfer-per-tensor"),
    ),
)
