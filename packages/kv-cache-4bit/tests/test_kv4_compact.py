# SPDX-License-Identifier: Apache-2.0
"""Dedup compaction of top-k tables: all tiers of the op, then what is particular to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from numinous_kv_cache_4bit.kernels.kv4_compact import kv4_compact
from numinous_kv_cache_4bit.kernels.kv4_gather import kv4_gather
from numinous_kv_cache_4bit.workbench import kv4_compact as workbench
from numinous_kv_cache_4bit.workbench.kv4_compact import OP, Case
from numinous_tooling.formats import KV4_NO_ROPE
from numinous_tooling.testing.kernels import KernelTests
from numinous_tooling.testing.tensors import assert_bitwise_equal, assert_outputs_bitwise
from numinous_tooling.workbench import case_id


class TestKv4Compact(KernelTests):
    op = OP


@pytest.mark.parametrize("case", OP.cases, ids=case_id)
def test_the_peer_gives_the_same(case: Case) -> None:
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    assert_outputs_bitwise(workbench._sorted(case, inputs), OP.reference(case, inputs))


def _gathers_the_same(device: torch.device) -> None:
    """Rows of the compact list at the positions of the table are the rows of the table."""
    generator = torch.Generator(device).manual_seed(5)
    latent = torch.randn(9, 512, generator=generator, device=device).to(torch.bfloat16)
    pool = KV4_NO_ROPE.pack(latent)
    table = torch.randint(-1, 9, (2, 8), generator=generator, device=device)
    rows, positions, count = kv4_compact(table, len(pool))
    out = torch.zeros(len(rows), 512, dtype=torch.bfloat16, device=device)
    kv4_gather(pool, rows, to="bf16", out=out, count=count)
    valid = positions >= 0
    assert torch.equal(valid, table >= 0)
    want = kv4_gather(pool, table, to="bf16").view(2, 8, 512)
    assert_bitwise_equal("rows", out[positions[valid].long()], want[valid])


@pytest.mark.tier("interpret")
def test_gathers_the_same_interpreted() -> None:
    _gathers_the_same(torch.device("cpu"))


@pytest.mark.tier("device")
def test_gathers_the_same(gpu: torch.device) -> None:
    _gathers_the_same(gpu)


@pytest.mark.tier("interpret")
def test_many_tiles_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over the tiles before takes several turns."""
    monkeypatch.setattr("numinous_kv_cache_4bit.kernels.kv4_compact.WORDS", 32)
    monkeypatch.setattr("numinous_kv_cache_4bit.kernels.kv4_compact.COUNTS", 2)
    case = Case(1, 3, 100, 9 * 1024 + 5, shared=50, edges=True)
    inputs = OP.make_inputs(case, 2, torch.device("cpu"))
    assert_outputs_bitwise(workbench._run(case, inputs), OP.reference(case, inputs))


@pytest.mark.tier("device")
@pytest.mark.parametrize("slots", [1 << 20, 40_000_000, 1_200_000_000])
def test_large_pools(slots: int, gpu: torch.device) -> None:
    """Many tiles, so that the sum over those before takes several turns; slots whose rows lie beyond element 2^31."""
    case = Case(64, 4, 2048, slots, shared=90, edges=True)
    inputs = OP.make_inputs(case, 2, gpu)
    assert_outputs_bitwise(workbench._run(case, inputs), OP.reference(case, inputs))


TABLE = torch.zeros(2, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (TypeError, "table: expected int32 or int64, got torch.int16", {"table": TABLE.short()}),
        (ValueError, "slots and below 2.31 ids, got 0 and 6", {"slots": 0}),
        (ValueError, "slots and below 2.31 ids, got 2147483647 and 6", {"slots": 2**31 - 1}),
    ],
)
def test_refusals(error: type[Exception], text: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=text):
        kv4_compact(**{"table": TABLE, "slots": 9, **changes})
