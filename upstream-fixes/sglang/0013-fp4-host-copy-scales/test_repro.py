# SPDX-License-Identifier: Apache-2.0
"""KV that went to host memory and back must decode to what it was, in whatever slots it lands."""

import kv_pools
import pytest
import torch

TAKEN = torch.tensor([3, 5, 9])
GIVEN = torch.tensor([4, 6, 7])


def mla():
    pool = kv_pools.mla_fp4(layers=2)
    return pool, lambda layer_id, loc, scale: pool.set_kv_buffer(
        kv_pools.layer(layer_id), loc, scale * torch.randn(len(loc), 1, 576), None
    )


def mha():
    pool = kv_pools.mha_fp4(kv_pools.recipes().FP4MXBlock16KVCacheMethod(), layers=2)
    return pool, lambda layer_id, loc, scale: pool.set_kv_buffer(
        kv_pools.layer(layer_id),
        loc,
        scale * torch.randn(len(loc), 2, 32),
        scale * torch.randn(len(loc), 2, 32),
    )


def decoded(pool, loc):
    read = [pool.get_key_buffer] + ([pool.get_value_buffer] if hasattr(pool, "v_buffer") else [])
    return [one(layer_id)[loc].clone() for one in read for layer_id in range(2)]


@pytest.mark.parametrize("build", [mla, mha])
@pytest.mark.parametrize("chunk", [8192, 2])
def test_round_trip_through_the_host(build, chunk):
    torch.manual_seed(0)
    pool, write = build()
    pool.cpu_offloading_chunk_size = chunk
    for layer_id in range(2):
        write(layer_id, TAKEN, 1.0)
    before = decoded(pool, TAKEN)
    backup = pool.get_cpu_copy(TAKEN)
    for layer_id in range(2):
        write(layer_id, torch.arange(1, 16), 1024.0)
    pool.load_cpu_copy(backup, GIVEN)
    for one, two in zip(decoded(pool, GIVEN), before, strict=True):
        assert torch.equal(one, two)


def test_unquantised_pool_is_unchanged():
    pool = kv_pools.memory_pool()["MHATokenToKVPool"](
        size=15,
        page_size=1,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=32,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    pool.k_buffer[0].normal_()
    pool.v_buffer[0].normal_()
    pool.load_cpu_copy(pool.get_cpu_copy(TAKEN), GIVEN)
    assert torch.equal(pool.k_buffer[0][GIVEN], pool.k_buffer[0][TAKEN])
    assert torch.equal(pool.v_buffer[0][GIVEN], pool.v_buffer[0][TAKEN])
