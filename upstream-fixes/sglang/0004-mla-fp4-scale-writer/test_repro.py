# SPDX-License-Identifier: Apache-2.0
"""Block scales of the FP4 MLA pool must land on the rows of their data (shipped Triton kernels, interpreted)."""

import kv_pools
import pytest
import torch


def rows(tensor):
    return {i for i in range(tensor.shape[0]) if tensor[i].any()}


@pytest.mark.parametrize(
    ("size", "rank", "expected"), [(1, 0, {5, 6, 8}), (2, 0, {3, 4}), (2, 1, {2})]
)
def test_scales_follow_data(size, rank, expected, monkeypatch):
    monkeypatch.setattr(kv_pools.PARALLEL, "attn_dcp_size", size)
    monkeypatch.setattr(kv_pools.PARALLEL, "attn_dcp_rank", rank)
    torch.manual_seed(0)
    pool = kv_pools.mla_fp4()
    nope, rope = torch.randn(4, 1, 512), torch.randn(4, 1, 64)
    pool.set_mla_kv_buffer(kv_pools.layer(), torch.tensor([0, 5, 6, 8]), nope, rope)
    assert rows(pool.kv_buffer[0]) == expected
    assert rows(pool.kv_scale_buffer[0]) == expected


def test_resolved_locs_are_not_collapsed_again(monkeypatch):
    monkeypatch.setattr(kv_pools.PARALLEL, "attn_dcp_size", 2)
    monkeypatch.setattr(kv_pools.PARALLEL, "attn_dcp_rank", 1)
    pool = kv_pools.mla_fp4()
    pool.write_loc_is_dcp_resolved = True
    nope, rope = torch.ones(2, 1, 512), torch.ones(2, 1, 64)
    pool.set_mla_kv_buffer(kv_pools.layer(), torch.tensor([5, 6]), nope, rope)
    assert rows(pool.kv_buffer[0]) == rows(pool.kv_scale_buffer[0]) == {5, 6}


def test_values_with_rope_survive():
    torch.manual_seed(0)
    pool = kv_pools.mla_fp4()
    nope, rope = torch.randn(2, 1, 512), 64 * torch.randn(2, 1, 64)
    pool.set_mla_kv_buffer(kv_pools.layer(), torch.tensor([5, 6]), nope, rope)
    twin = kv_pools.mla_fp4()
    twin.set_kv_buffer(kv_pools.layer(), torch.tensor([5, 6]), torch.cat([nope, rope], -1), None)
    assert torch.equal(pool.get_key_buffer(0), twin.get_key_buffer(0))


def test_rope_free_write():
    torch.manual_seed(0)
    pool, twin = kv_pools.mla_fp4(rope=0), kv_pools.mla_fp4(rope=0)
    nope = torch.randn(2, 1, 512)
    try:
        pool.set_mla_kv_buffer(kv_pools.layer(), torch.tensor([5, 6]), nope, None)
    except AttributeError as error:
        raise AssertionError(f"the first KV write fails: {error}") from error
    twin.set_kv_buffer(kv_pools.layer(), torch.tensor([5, 6]), nope, None)
    assert torch.equal(pool.get_key_buffer(0), twin.get_key_buffer(0))
