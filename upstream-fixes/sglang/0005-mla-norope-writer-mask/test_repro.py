# SPDX-License-Identifier: Apache-2.0
"""Rope-free MLA writes must skip and shard as writes with a rope part do (shipped Triton kernels, interpreted)."""

import kv_pools
import pytest
import torch


def written(rope, sharded, **options):
    kernels = kv_pools.mla_buffer()
    write = (
        kernels.set_mla_kv_buffer_dcp_sharded_triton
        if sharded
        else kernels.set_mla_kv_buffer_triton
    )
    buffer = torch.zeros(16, 1, 16 + rope)
    nope = torch.arange(1.0, 4.0).view(3, 1, 1).expand(3, 1, 16).contiguous()
    part = torch.full((3, 1, rope), 9.0) if rope else None
    write(buffer, torch.tensor([0, 5, 6]), nope, part, **options)
    return {i: buffer[i, 0, 0].item() for i in range(16) if buffer[i].any()}


@pytest.mark.parametrize("rope", [8, 0])
def test_reserved_slot_is_kept(rope):
    assert written(rope, sharded=False) == {5: 2.0, 6: 3.0}


@pytest.mark.parametrize("rope", [8, 0])
def test_skipping_can_be_disabled(rope):
    assert written(rope, sharded=False, reserved_skip_index=-1) == {0: 1.0, 5: 2.0, 6: 3.0}


@pytest.mark.parametrize("rope", [8, 0])
@pytest.mark.parametrize(("rank", "expected"), [(0, {3: 3.0}), (1, {2: 2.0})])
def test_owner_rule(rope, rank, expected, monkeypatch):
    monkeypatch.setattr(kv_pools.PARALLEL, "attn_dcp_size", 2)
    monkeypatch.setattr(kv_pools.PARALLEL, "attn_dcp_rank", rank)
    assert written(rope, sharded=True) == expected
