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
            "rmsnorm_quant-13997a46a5ae",
            "rmsnorm_quant-21eac11b4959",
            "rmsnorm_quant-ba8171029667",
            "rmsnorm_quant-26a281610d77",
            "rmsnorm_quant-60e0f6c49015",
            "rmsnorm_quant-2d64f5240eb8",
            "rmsnorm_quant-bc83f4890fa6",
            "rmsnorm_quant-af7c3b2a240c",
            "rmsnorm_quant-253cb365f424",
        ),
        feature="moe.norm_quant",
        peers=("sglang", "flashinfer-per-tensor"),
    ),
)
