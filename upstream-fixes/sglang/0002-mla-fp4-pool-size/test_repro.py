# SPDX-License-Identifier: Apache-2.0
"""The reported size of the FP4 MLA pool must be the bytes of the tensors that it holds."""

import kv_pools


def test_size_counts_every_tensor():
    pool = kv_pools.mla_fp4(layers=3)
    held = sum(one.nbytes for one in [*pool.kv_buffer, *pool.kv_scale_buffer])
    assert held == 3 * 16 * (288 + 36)
    assert pool.get_kv_size_bytes() == held


def test_memory_usage_follows():
    pool = kv_pools.mla_fp4(layers=3)
    assert pool.mem_usage * (1 << 30) == 3 * 16 * (288 + 36)
