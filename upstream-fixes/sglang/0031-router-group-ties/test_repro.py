# SPDX-License-Identifier: Apache-2.0
"""Grouped Triton router against the routing rule of DeepSeek-V3, written in torch."""

import math

import pytest
import repro
import routers
import torch


@pytest.fixture(scope="module")
def route():
    """The shipped launcher and kernel."""
    return routers.moe_fused_gate().moe_fused_gate


def rule(logits, groups, keep, topk):
    """Expert ids by the rule: a group scores the sum of its best two, `keep` groups stay, best `topk` of those."""
    scores = logits.float().sigmoid()
    per_group = scores.view(len(scores), groups, -1)
    best = per_group.topk(min(2, per_group.shape[-1]), dim=-1).values.sum(-1)
    kept = torch.zeros_like(best).scatter(1, best.topk(keep, dim=-1).indices, 1.0).bool()
    open_ = per_group.masked_fill(~kept.unsqueeze(-1), -math.inf).view_as(scores)
    return [set(row.tolist()) for row in open_.topk(topk, dim=-1).indices]


def ids_of(route, logits, groups, keep, topk, **more):
    weights, ids = route(
        logits,
        torch.zeros(logits.shape[1]),
        topk,
        scoring_func="sigmoid",
        num_expert_group=groups,
        topk_group=keep,
        **more,
    )
    return weights, ids.tolist()


def row(dtype=torch.float32, **logits):
    """16 logits, -9 where not named (``e3=2.0``)."""
    out = torch.full((1, 16), -9.0, dtype=dtype)
    for name, value in logits.items():
        out[0, int(name[1:])] = value
    return out


def test_distinct_scores_follow_the_rule(route):
    """Holds on the released kernel as well: the comparison itself is sound."""
    logits = torch.randn(8, 16, generator=repro.generator(0))
    _, ids = ids_of(route, logits, 4, 2, 4)
    assert [set(one) for one in ids] == rule(logits, 4, 2, 4)


def test_two_equal_experts_on_top_of_a_group_both_count(route):
    logits = row(e0=2.0, e1=2.0, e4=2.5, e5=1.0, e8=2.2, e9=1.5)
    _, ids = ids_of(route, logits, 4, 2, 4)
    assert [set(one) for one in ids] == rule(logits, 4, 2, 4) == [{0, 1, 8, 9}]


def test_saturated_sigmoid_is_such_a_tie(route):
    logits = row(torch.bfloat16, e0=20.0, e1=25.0, e4=3.0, e5=3.5, e8=2.0, e9=2.5)
    assert logits.float().sigmoid()[0, 0] == logits.float().sigmoid()[0, 1] == 1.0
    _, ids = ids_of(route, logits, 4, 2, 4)
    assert [set(one) for one in ids] == rule(logits, 4, 2, 4) == [{0, 1, 4, 5}]


def test_groups_of_one_expert_choose_the_best_experts(route):
    logits = torch.randn(4, 16, generator=repro.generator(1))
    _, ids = ids_of(route, logits, 16, 4, 4)
    assert [set(one) for one in ids] == rule(logits, 16, 4, 4)


def test_no_expert_is_chosen_twice_when_the_kept_groups_run_out(route):
    logits = torch.randn(4, 16, generator=repro.generator(2))
    _, ids = ids_of(route, logits, 4, 1, 6)
    for one, first in zip(ids, rule(logits, 4, 1, 4), strict=True):
        assert len(set(one)) == 6
        assert set(one[:4]) == first


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_fused_shared_expert_counts_once(route, renormalize, scaled):
    """The runner multiplies by the factor unless the router has done so: the shared expert must end at weight 1."""
    logits = torch.randn(4, 16, generator=repro.generator(3))
    weights, ids = ids_of(
        route,
        logits,
        4,
        2,
        5,
        num_fused_shared_experts=1,
        renormalize=renormalize,
        routed_scaling_factor=2.5,
        apply_routed_scaling_factor_on_output=scaled,
    )
    assert [one[-1] for one in ids] == [16] * 4
    torch.testing.assert_close(weights[:, -1] * (1.0 if scaled else 2.5), torch.ones(4))
