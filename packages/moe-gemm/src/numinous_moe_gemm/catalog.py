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
            "rmsnorm_quant-bf39ac51a0be",
            "rmsnorm_quant-b102796e5909",
            "rmsnorm_quant-3a57e8a0d221",
            "rmsnorm_quant-b55690be7cd3",
            "rmsnorm_quant-f882eefd6bf0",
            "rmsnorm_quant-8aa1d36ae224",
            "rmsnorm_quant-e608621aa67d",
            "rmsnorm_quant-7e2b6b990eaa",
            "rmsnorm_quant-b91fb1e18d92",
            "rmsnorm_quant-89c6746fc964",
            "rmsnorm_quant-c658b576c837",
        ),
        feature="moe.norm_quant",
        peers=("sglang", "flashinfer-per-tensor"),
    ),
)
