# SPDX-License-Identifier: Apache-2.0
"""The value buffer of the FP4 MLA pool must be the decoded latent."""

import kv_pools
import torch


def test_value_is_the_latent_of_the_key():
    torch.manual_seed(0)
    pool = kv_pools.mla_fp4()
    pool.set_kv_buffer(kv_pools.layer(), torch.arange(1, 9), torch.randn(8, 1, 576), None)
    key, value = pool.get_kv_buffer(0)
    assert key.shape == (16, 1, 576)
    assert key.abs().sum() > 0
    assert value.dtype == key.dtype
    assert value.shape == (16, 1, 512)
    assert torch.equal(value, key[..., :512])
