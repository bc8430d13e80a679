# SPDX-License-Identifier: Apache-2.0
"""Merging two states without keys must give a state without keys, not NaN."""

import importlib.util

import pytest
import repro

repro.use_kernels()

import torch  # noqa: E402

ROWS, HEADS, HEAD_DIM = 2, 2, 16
EMPTY = float("-inf")


def kernels():
    file = repro.tree("flashinfer") / "triton/kernels/cascade.py"
    spec = importlib.util.spec_from_file_location("cascade_under_test", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def merge(v_a, s_a, v_b, s_b):
    v, s = torch.full_like(v_a, 7.0), torch.full_like(s_a, 7.0)
    kernels().merge_state_kernel[(ROWS,)](
        v_a, s_a, v_b, s_b, v, s, HEADS, HEAD_DIM, bdx=HEAD_DIM, bdy=HEADS
    )
    return v, s


def merge_in_place(v_a, s_a, v_b, s_b):
    v, s = v_a.clone(), s_a.clone()
    mask = torch.ones(ROWS, dtype=torch.uint8)
    kernels().merge_state_in_place_kernel[(ROWS,)](
        v, s, v_b, s_b, HEADS, HEAD_DIM, mask, bdx=HEAD_DIM, bdy=HEADS
    )
    return v, s


def state(lse, seed):
    value = torch.randn(ROWS, HEADS, HEAD_DIM, generator=repro.generator(seed))
    lse = torch.full((ROWS, HEADS), lse)
    return torch.where(lse.isinf()[..., None], 0.0, value), lse


@pytest.mark.parametrize("operation", [merge, merge_in_place])
def test_two_empty_states_give_an_empty_state(operation):
    value, lse = operation(*state(EMPTY, 0), *state(EMPTY, 1))
    assert torch.equal(value, torch.zeros_like(value)), value.flatten()[:4]
    assert torch.equal(lse, torch.full_like(lse, EMPTY)), lse


@pytest.mark.parametrize("operation", [merge, merge_in_place])
@pytest.mark.parametrize(("a", "b"), [(1.5, -2.0), (EMPTY, 3.0), (3.0, EMPTY)])
def test_other_states_are_weighted_by_their_sums(operation, a, b):
    (value_a, lse_a), (value_b, lse_b) = state(a, 0), state(b, 1)
    value, lse = operation(value_a, lse_a, value_b, lse_b)
    total = torch.logaddexp2(lse_a, lse_b)
    expected = torch.exp2(lse_a - total)[..., None] * value_a
    expected = expected + torch.exp2(lse_b - total)[..., None] * value_b
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(lse, total)


def test_many_states_as_before():
    """merge_states shares state_merge: with an empty one among three the result is that of the other two."""
    (v_a, s_a), (v_b, s_b), (v_c, s_c) = state(1.0, 0), state(EMPTY, 1), state(-1.0, 2)
    v, s = torch.empty_like(v_a), torch.empty_like(s_a)
    kernels().merge_states_kernel[(ROWS,)](
        torch.stack([v_a, v_b, v_c], 1).contiguous(),
        torch.stack([s_a, s_b, s_c], 1).contiguous(),
        v,
        s,
        3,
        HEADS,
        HEAD_DIM,
        bdx=HEAD_DIM,
        bdy=HEADS,
    )
    total = torch.logaddexp2(s_a, s_c)
    expected = torch.exp2(s_a - total)[..., None] * v_a + torch.exp2(s_c - total)[..., None] * v_c
    torch.testing.assert_close(v, expected)
    torch.testing.assert_close(s, total)
