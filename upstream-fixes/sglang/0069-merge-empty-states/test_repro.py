# SPDX-License-Identifier: Apache-2.0
"""Merging two states without keys must give a state without keys, not NaN."""

import importlib.util

import pytest
import repro

repro.use_kernels()

import torch  # noqa: E402

HEAD_DIM = 48  # not a power of two, so that the mask works too


def merge(*states):
    file = repro.tree() / "kernels/ops/attention/merge_state.py"
    spec = importlib.util.spec_from_file_location("merge_state_under_test", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.merge_state_triton(*states)


def state(lse, seed):
    value = torch.randn(1, 1, HEAD_DIM, generator=repro.generator(seed))
    lse = torch.tensor([[lse]])
    return torch.where(lse.abs().isinf()[..., None], 0.0, value), lse


@pytest.mark.parametrize("empty", [float("-inf"), float("inf")])
def test_two_empty_states_give_an_empty_state(empty):
    value, lse = merge(*state(empty, 0), *state(empty, 1))
    assert torch.equal(value, torch.zeros_like(value)), value.flatten()[:4]
    assert lse.item() == float("-inf")


@pytest.mark.parametrize(("a", "b"), [(1.5, -2.0), (float("-inf"), 3.0), (3.0, float("-inf"))])
def test_other_states_are_weighted_by_their_sums(a, b):
    (value_a, lse_a), (value_b, lse_b) = state(a, 0), state(b, 1)
    value, lse = merge(value_a, lse_a, value_b, lse_b)
    total = torch.logaddexp(lse_a, lse_b)
    expected = (lse_a - total).exp() * value_a + (lse_b - total).exp() * value_b
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(lse, total)
