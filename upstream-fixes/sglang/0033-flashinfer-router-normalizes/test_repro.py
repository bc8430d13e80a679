# SPDX-License-Identifier: Apache-2.0
"""Grouped sigmoid routing on CUDA with norm_topk_prob = false: which weights come out."""

import math
import os

os.environ["TRITON_INTERPRET"] = "1"

import importlib
import types

import pytest
import repro
import torch

TOPK = "srt/layers/moe/topk.py"
EXPERTS, GROUPS, KEEP, TOP = 16, 4, 2, 4
OFF = types.SimpleNamespace(get=lambda: False)


def flashinfer_op(scores, bias, groups, keep, topk, factor, values, indices, *_, **__):
    """What FlashInfer documents for fused_topk_deepseek (step 5 normalises the selected weights, always)."""
    weights = scores.sigmoid()
    biased = (weights + bias).view(len(scores), groups, -1)
    kept = biased.topk(2, -1).values.sum(-1).topk(keep, -1).indices
    open_ = torch.zeros(len(scores), groups).scatter(1, kept, 1.0).bool().unsqueeze(-1)
    ids = biased.masked_fill(~open_, -math.inf).view_as(scores).topk(topk, -1).indices
    chosen = weights.gather(1, ids)
    values.copy_(chosen / chosen.sum(-1, keepdim=True) * factor)
    indices.copy_(ids)


@pytest.fixture(scope="module")
def gpu_route():
    """Shipped dispatch as on an NVIDIA GPU; the Triton router runs under the interpreter."""
    repro.bare_packages("sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.moe")
    repro.stub(
        "sglang.kernels.jit.utils",
        cache_once=lambda f: f,
        is_arch_support_pdl=lambda: False,
        load_jit=None,
        get_jit_cuda_arch=None,
    )
    repro.stub("sglang.kernels.kernel_api_logging", debug_kernel_api=lambda f: f)
    repro.stub("sglang.kernels.ops.moe.moe_route_radix", covered=lambda *_, **__: False)
    envs = types.SimpleNamespace(
        SGLANG_OPT_USE_JIT_KERNEL_GROUPED_TOPK=OFF, SGLANG_OPT_SM120_MTP_ROUTER_TOP22=OFF
    )
    repro.stub("sglang.srt.environ", envs=envs)
    importlib.import_module("sglang.kernels.ops.moe.moe_fused_gate")
    scope = {
        "torch": torch,
        "F": torch.nn.functional,
        "math": math,
        "envs": envs,
        "_is_cuda": True,
        "_is_hip": False,
        "_is_xpu": False,
        "_use_aiter": False,
        "fused_topk_deepseek": flashinfer_op,
    }
    repro.load_constants(TOPK, ["_RENORMALIZE_SUM_EPSILON"], scope)
    for name in ("is_power_of_two", "biased_grouped_topk_impl", "biased_grouped_topk_gpu"):
        repro.load_function(TOPK, name, scope)
    return scope


@pytest.mark.parametrize("renormalize", [True, False])
def test_gpu_dispatch_agrees_with_the_torch_path(gpu_route, renormalize):
    logits = torch.randn(5, EXPERTS, generator=torch.Generator().manual_seed(0))
    arguments = {
        "hidden_states": torch.empty(5, 8),
        "gating_output": logits,
        "correction_bias": torch.zeros(EXPERTS),
        "topk": TOP,
        "renormalize": renormalize,
        "num_expert_group": GROUPS,
        "topk_group": KEEP,
    }
    expected = by_expert(*gpu_route["biased_grouped_topk_impl"](**arguments))
    found = by_expert(*gpu_route["biased_grouped_topk_gpu"](**arguments))
    torch.testing.assert_close(found, expected)
    assert renormalize or not torch.allclose(found.sum(-1), torch.ones(5), atol=0.05)


def by_expert(weights, ids):
    """Dense weights [tokens, experts]: the order of the chosen experts is free."""
    return torch.zeros(len(weights), EXPERTS).scatter(1, ids.long(), weights)
