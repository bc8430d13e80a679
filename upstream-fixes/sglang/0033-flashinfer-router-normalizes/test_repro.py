# SPDX-License-Identifier: Apache-2.0
"""Grouped sigmoid routing on CUDA with norm_topk_prob = false: which weights come out."""

import math

import pytest
import repro
import routers
import torch

TOPK = "srt/layers/moe/topk.py"
EXPERTS, GROUPS, KEEP, TOP = 16, 4, 2, 4


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
    routers.moe_fused_gate()
    scope = {
        "torch": torch,
        "F": torch.nn.functional,
        "math": math,
        "envs": routers.ENVS,
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
    expected = routers.by_expert(*gpu_route["biased_grouped_topk_impl"](**arguments), EXPERTS)
    found = routers.by_expert(*gpu_route["biased_grouped_topk_gpu"](**arguments), EXPERTS)
    torch.testing.assert_close(found, expected)
    assert renormalize or not torch.allclose(found.sum(-1), torch.ones(5), atol=0.05)
