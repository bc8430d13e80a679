# SPDX-License-Identifier: Apache-2.0
"""Fused Triton router of the SGLang tree under test, on the CPU without the rest of the engine.

Kernel and launcher are the shipped text; only the JIT loader, the logger, the radix fast path and the environment are
stand-ins. Import this before triton: it decides where kernels run.
"""

from __future__ import annotations

import functools
import importlib
import types

import repro

repro.use_kernels()

import torch  # noqa: E402

OFF = types.SimpleNamespace(get=lambda: False)
ENVS = types.SimpleNamespace(
    SGLANG_OPT_SM120_MTP_ROUTER_TOP22=OFF, SGLANG_OPT_USE_JIT_KERNEL_GROUPED_TOPK=OFF
)
"""Environment variables that router and dispatch read, all at their defaults."""


@functools.cache
def moe_fused_gate() -> types.ModuleType:
    """Shipped module of the router; code that imports it from its place gets the same one."""
    repro.bare_packages("sglang.kernels.ops.moe")
    repro.stub(
        "sglang.kernels.jit.utils",
        cache_once=lambda f: f,
        is_arch_support_pdl=lambda: False,
        load_jit=None,
        get_jit_cuda_arch=None,
    )
    repro.stub("sglang.kernels.kernel_api_logging", debug_kernel_api=lambda f: f)
    repro.stub("sglang.kernels.ops.moe.moe_route_radix", covered=lambda *_, **__: False)
    repro.stub("sglang.srt.environ", envs=ENVS)
    return importlib.import_module("sglang.kernels.ops.moe.moe_fused_gate")


def by_expert(weights: torch.Tensor, ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Dense weights [tokens, experts]: the order of the chosen experts is free."""
    return torch.zeros(len(weights), experts).scatter(1, ids.long(), weights)
