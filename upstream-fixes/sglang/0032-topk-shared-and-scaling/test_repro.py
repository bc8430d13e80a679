# SPDX-License-Identifier: Apache-2.0
"""Torch paths of the top-k router: output scaling, ids and weights of fused shared experts."""

import types

import pytest
import repro
import torch

TOPK = "srt/layers/moe/topk.py"
EXPERTS, ROUTED, FACTOR = 16, 4, 2.5
GROUPED = {"num_expert_group": 4, "topk_group": 2}
BIASED = {"correction_bias": torch.zeros(EXPERTS)}
PATHS = {
    "grouped_topk_gpu": GROUPED,
    "kimi_k2_biased_topk_impl": BIASED,
    "biased_topk_impl": BIASED,
    "biased_grouped_topk_impl": GROUPED | BIASED,
}
WITH_SHARED = sorted(set(PATHS) - {"kimi_k2_biased_topk_impl"})


def route(name, topk=ROUTED, **more):
    """Weights and ids of one path; torch.compile is taken off, the body is the shipped one."""
    scope = {"torch": torch}
    repro.load_constants(TOPK, ["_RENORMALIZE_SUM_EPSILON"], scope)
    if "fused_shared_expert_weight" in repro.tree().joinpath(TOPK).read_text():
        repro.load_function(TOPK, "fused_shared_expert_weight", scope)
    path = repro.load_function(TOPK, name, scope)
    logits = torch.randn(5, EXPERTS, generator=torch.Generator().manual_seed(0))
    return path(
        hidden_states=torch.empty(5, 8),
        gating_output=logits,
        topk=topk,
        routed_scaling_factor=FACTOR,
        **PATHS[name],
        **more,
    )


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("name", sorted(PATHS))
def test_factor_is_applied_when_asked_for(name, renormalize):
    plain, _ = route(name, renormalize=renormalize)
    scaled, _ = route(name, renormalize=renormalize, apply_routed_scaling_factor_on_output=True)
    torch.testing.assert_close(scaled, FACTOR * plain)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("name", WITH_SHARED)
def test_fused_shared_expert_counts_once(name, renormalize, scaled):
    """The runner multiplies by the factor unless the router has done so: the shared expert must end at weight 1."""
    weights, _ = route(
        name,
        topk=ROUTED + 1,
        num_fused_shared_experts=1,
        renormalize=renormalize,
        apply_routed_scaling_factor_on_output=scaled,
    )
    torch.testing.assert_close(weights[:, -1] * (1.0 if scaled else FACTOR), torch.ones(5))


@pytest.mark.parametrize("name", WITH_SHARED)
def test_two_fused_shared_experts_are_both_routed_to(name):
    weights, ids = route(name, topk=ROUTED + 2, num_fused_shared_experts=2, renormalize=True)
    routed_weights, routed_ids = route(name, renormalize=True)
    assert ids[:, -2:].tolist() == [[EXPERTS, EXPERTS + 1]] * 5
    torch.testing.assert_close(weights[:, -2:] * FACTOR, torch.ones(5, 2))
    assert [set(one) for one in ids[:, :-2].tolist()] == [set(one) for one in routed_ids.tolist()]
    torch.testing.assert_close(weights[:, :-2].sum(-1), routed_weights.sum(-1))


@pytest.mark.parametrize("name", WITH_SHARED)
def test_routing_draws_no_random_numbers(name):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    route(name, topk=ROUTED + 1, num_fused_shared_experts=1, renormalize=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_hash_routing_draws_no_random_numbers():
    scope = {"torch": torch}
    repro.load_constants(TOPK, ["_RENORMALIZE_SUM_EPSILON"], scope)
    forward = repro.load_function("srt/layers/moe/hash_topk.py", "HashTopK._forward_torch", scope)
    layer = types.SimpleNamespace(
        score_func="sigmoid",
        topk=ROUTED + 1,
        num_experts=EXPERTS,
        num_fused_shared_experts=1,
        num_shared_topk_slots=1,
        routed_scaling_factor=FACTOR,
        tid2eid=torch.arange(ROUTED, dtype=torch.int32).expand(10, ROUTED).long(),
    )
    torch.manual_seed(0)
    before = torch.get_rng_state()
    _, ids = forward(layer, torch.zeros(5, EXPERTS), torch.arange(5))
    assert ids.tolist() == [[0, 1, 2, 3, EXPERTS]] * 5
    assert torch.equal(torch.get_rng_state(), before)
