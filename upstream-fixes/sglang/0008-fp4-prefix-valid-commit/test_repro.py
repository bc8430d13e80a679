# SPDX-License-Identifier: Apache-2.0
"""Committing the accepted prefix of draft blocks must work on a quantised KV pool."""

import kv_pools
import pytest
import torch

SLOTS = torch.tensor([[3, 4, 5], [6, 7, 8], [9, 10, 11]])
LENGTHS = torch.tensor([2, 0, 3], dtype=torch.int32)
KEPT = torch.tensor([3, 4, 9, 10, 11])
REJECTED = torch.tensor([5, 6, 7, 8])


def pools():
    method = kv_pools.recipes().FP4MXBlock16KVCacheMethod()
    return kv_pools.mha_fp4(method), kv_pools.mha_fp4(method)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["other", "cuda"])
def test_committed_slots_decode_like_regular_writes(on_gpu, monkeypatch):
    torch.manual_seed(0)
    pool, twin = pools()
    monkeypatch.setitem(
        kv_pools.memory_pool(), "_is_cuda", on_gpu
    )  # chooses the branch of the commit
    key, value = torch.randn(9, 2, 32), 50 * torch.randn(9, 2, 32)
    old = torch.full((4, 2, 32), 3.0)
    for one in (pool, twin):
        one.set_kv_buffer(kv_pools.layer(), REJECTED, old.clone(), old.clone())
    try:
        pool.set_kv_buffer_prefix_valid(
            kv_pools.layer(), SLOTS, LENGTHS, key.clone(), value.clone(), 1.0, 1.0
        )
    except NotImplementedError as error:
        raise AssertionError(f"the first accepted block fails: {error}") from error
    rows = torch.tensor([0, 1, 6, 7, 8])
    twin.set_kv_buffer(kv_pools.layer(), KEPT, key[rows], value[rows])
    for one, two in zip(pool.get_kv_buffer(0), twin.get_kv_buffer(0), strict=True):
        assert torch.equal(
            one[1:], two[1:]
        )  # slot 0 takes the rejected rows, as it does for padding
