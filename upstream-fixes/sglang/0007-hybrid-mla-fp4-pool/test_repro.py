# SPDX-License-Identifier: Apache-2.0
"""MLA layers of a hybrid linear model with a 4-bit KV cache must get the packed, scaled pool."""

import kv_pools
import pytest
import torch

PLANNED = 288 + 36
"""Bytes per token and layer that the engine's sizing assumes for a 576-wide latent in 4 bits."""


def hybrid():
    return kv_pools.memory_pool()["HybridLinearKVPool"](
        size=15,
        dtype=torch.float4_e2m1fn_x2,
        page_size=1,
        head_num=1,
        head_dim=576,
        full_attention_layer_ids=[3, 7],
        device="cpu",
        mamba_pool=None,
        use_mla=True,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
    )


def test_pool_takes_what_was_planned():
    pool = hybrid().full_kv_pool
    tensors = [*pool.kv_buffer, *getattr(pool, "kv_scale_buffer", [])]
    assert sum(one.nbytes for one in tensors) == 2 * 16 * PLANNED


def test_first_write_is_stored():
    torch.manual_seed(0)
    pool, twin = hybrid(), kv_pools.mla_fp4()
    loc, row = torch.tensor([4, 9]), torch.randn(2, 1, 576)
    try:
        pool.set_kv_buffer(kv_pools.layer(7), loc, row, None)
    except NotImplementedError as error:
        raise AssertionError(f"the first KV write fails: {error}") from error
    twin.set_kv_buffer(kv_pools.layer(0), loc, row, None)
    assert torch.equal(pool.get_key_buffer(7), twin.get_key_buffer(0))
    assert not pool.get_key_buffer(3)[loc].any()
    pool.set_mla_kv_buffer(kv_pools.layer(3), loc, row[..., :512], row[..., 512:])
    assert torch.equal(pool.get_key_buffer(3), pool.get_key_buffer(7))


def test_pool_without_a_packed_layout_refuses_the_dtype():
    with pytest.raises(ValueError, match="4-bit"):
        kv_pools.memory_pool()["MLATokenToKVPool"](
            size=15,
            page_size=1,
            dtype=torch.float4_e2m1fn_x2,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
