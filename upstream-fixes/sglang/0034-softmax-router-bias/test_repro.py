# SPDX-License-Identifier: Apache-2.0
"""Softmax routing with a correction bias, as ERNIE 4.5 MoE asks for it."""

import pytest
import repro
import routers
import torch

TOPK = "srt/layers/moe/topk.py"
EXPERTS, TOP = 16, 4


@pytest.fixture(scope="module", params=["cuda", "other"])
def fused_topk(request):
    """Shipped dispatch as on an NVIDIA GPU (Triton router under the interpreter), and as on any other GPU."""
    routers.moe_fused_gate()
    scope = {
        "torch": torch,
        "F": torch.nn.functional,
        "_is_cuda": request.param == "cuda",
        "_use_aiter": False,
        "_use_rocm_triton_softmax_topk": lambda *_, **__: False,
        "topk_softmax": topk_softmax,
    }
    repro.load_constants(TOPK, ["_RENORMALIZE_SUM_EPSILON"], scope)
    repro.load_function(TOPK, "fused_topk_torch_native", scope)
    return repro.load_function(TOPK, "fused_topk", scope)


def topk_softmax(weights, ids, logits, renormalize):
    """The compiled operator of other GPUs: it has no parameter for a bias."""
    values, chosen = logits.float().softmax(-1).topk(weights.shape[1], -1)
    weights.copy_(values / values.sum(-1, keepdim=True) if renormalize else values)
    ids.copy_(chosen)


def inputs():
    made = repro.generator(0)
    logits = torch.randn(6, EXPERTS, generator=made)
    return logits, 0.2 * torch.randn(EXPERTS, generator=made)


@pytest.mark.parametrize("shape", [(EXPERTS,), (1, EXPERTS)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_the_bias_ranks_and_the_probabilities_weigh(fused_topk, renormalize, shape):
    logits, bias = inputs()
    weights, ids = fused_topk(
        torch.empty(6, 8), logits, TOP, renormalize, correction_bias=bias.view(shape)
    )
    scores = logits.softmax(-1)
    chosen = (scores + bias).topk(TOP, -1).indices
    expected = scores.gather(1, chosen)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    torch.testing.assert_close(
        routers.by_expert(weights, ids, EXPERTS), routers.by_expert(expected, chosen, EXPERTS)
    )


def test_without_a_bias_nothing_changes(fused_topk):
    """Holds on the released code as well: the comparison itself is sound."""
    logits, _ = inputs()
    weights, ids = fused_topk(torch.empty(6, 8), logits, TOP, True)
    values, chosen = logits.softmax(-1).topk(TOP, -1)
    torch.testing.assert_close(
        routers.by_expert(weights, ids, EXPERTS),
        routers.by_expert(values / values.sum(-1, keepdim=True), chosen, EXPERTS),
    )
