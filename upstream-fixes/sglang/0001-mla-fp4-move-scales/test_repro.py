# SPDX-License-Identifier: Apache-2.0
"""A relocated slot of the FP4 MLA pool must decode to what the source slot held."""

import kv_pools
import torch


def written_pool():
    """Slots 3 and 9 hold tokens whose magnitudes differ by 2**10, so that their block scales differ."""
    torch.manual_seed(0)
    pool = kv_pools.mla_fp4(layers=2)
    row = torch.randn(1, 1, 576)
    for layer_id in range(2):
        pool.set_kv_buffer(kv_pools.layer(layer_id), torch.tensor([3]), row, None)
        pool.set_kv_buffer(kv_pools.layer(layer_id), torch.tensor([9]), row * 1024, None)
    return pool


def test_moved_slot_decodes_like_its_source():
    pool = written_pool()
    before = [pool.get_key_buffer(layer_id)[9].clone() for layer_id in range(2)]
    pool.move_kv_cache(torch.tensor([3]), torch.tensor([9]))
    for layer_id in range(2):
        assert torch.equal(pool.get_key_buffer(layer_id)[3], before[layer_id])


def test_swap_and_empty_move():
    pool = written_pool()
    before = pool.get_key_buffer(0).clone()
    pool.move_kv_cache(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    assert torch.equal(pool.get_key_buffer(0), before)
    pool.move_kv_cache(torch.tensor([3, 9]), torch.tensor([9, 3]))
    assert torch.equal(pool.get_key_buffer(0)[[3, 9]], before[[9, 3]])
