# SPDX-License-Identifier: Apache-2.0
"""Decoding of a batch's live rows in place: all tiers of the op, then what is particular to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from numinous_kv_cache_4bit.kernels.kv4_expand import MOST_REQUESTS, kv4_expand
from numinous_kv_cache_4bit.workbench.kv4_expand import OP, Case, live_rows
from numinous_tooling.formats import KV4
from numinous_tooling.testing.kernels import KernelTests
from numinous_tooling.testing.tensors import assert_bitwise_equal, big_pool, guarded_pool


class TestKv4Expand(KernelTests):
    op = OP


def _row(device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A row uint8 [352], and what it stands for, bf16 [576]."""
    generator = torch.Generator(device).manual_seed(3)
    both = torch.randn(1, 576, generator=generator, device=device).to(torch.bfloat16)
    row = KV4.pack(both[:, :512], both[:, 512:])
    return row[0], torch.cat(KV4.unpack(row), dim=-1)[0]


def _beyond_2_31(device: torch.device) -> None:
    pool = big_pool((KV4.width,), torch.uint8, device)
    out = torch.empty(len(pool), 576, dtype=torch.bfloat16, device=device)
    last = len(pool) - 1
    assert last * KV4.width > 2**31
    pool[last], want = _row(device)
    out[last - 1] = 7.0
    table = torch.tensor([[last, last + 1, 2**32 + last]], device=device)
    numbers = torch.tensor([0, 3], device=device)
    kv4_expand(pool, table, numbers[:1], numbers[1:], out)
    assert_bitwise_equal("last row", out[last], want)
    assert bool((out[last - 1] == 7.0).all())


@pytest.mark.tier("interpret")
def test_pool_beyond_2_31_interpreted() -> None:
    _beyond_2_31(torch.device("cpu"))


@pytest.mark.tier("device")
def test_pool_beyond_2_31(gpu: torch.device) -> None:
    _beyond_2_31(gpu)


def _stays_inside(device: torch.device) -> None:
    """Lengths reach past the table, ids past the pool, requests past both."""
    row, want = _row(device)
    pool = row.expand(5, -1).contiguous()
    table = torch.tensor([[1, -1, 5, 3], [2, 4, 2, 2]], device=device, dtype=torch.int32)
    requests = torch.tensor([0, 2, -1, 2**31 - 1], device=device, dtype=torch.int32)
    lengths = torch.tensor([2**31 - 1, 4, 4, 4], device=device, dtype=torch.int32)
    with guarded_pool(torch.zeros(5, 576, dtype=torch.bfloat16, device=device)) as out:
        kv4_expand(pool, table, requests, lengths, out, extra=100)
        expected = torch.zeros_like(out)
        expected[1] = expected[3] = want
        assert_bitwise_equal("out", out, expected)


@pytest.mark.tier("interpret")
def test_nothing_outside_interpreted() -> None:
    _stays_inside(torch.device("cpu"))


@pytest.mark.tier("device")
def test_nothing_outside(gpu: torch.device) -> None:
    _stays_inside(gpu)


@pytest.mark.tier("device")
@pytest.mark.parametrize("width", [352, 288, 416])
@pytest.mark.parametrize("requests", [1, 64, 700])
def test_many_lengths(width: int, requests: int, gpu: torch.device) -> None:
    case = Case(requests, 301, width, rows="bytes", pattern="edges", sliced=True)
    got = OP.implementations["triton"].run(case, OP.make_inputs(case, 5, gpu))
    OP.compare(case, got, OP.reference(case, OP.make_inputs(case, 5, gpu)))


def test_bytes() -> None:
    """The figures of the docstring."""
    case = Case(64, 2048, equal=True)
    assert live_rows(case) == 131_072
    assert OP.traffic(case).bytes == 131_072 * 1508


# --- Refusals -------------------------------------------------------------------------------------------------------

CALL: dict[str, Any] = {
    "pool": torch.zeros(4, 352, dtype=torch.uint8),
    "table": torch.tensor([[1, 2], [3, -1]], dtype=torch.int32),
    "requests": torch.tensor([0, 1]),
    "lengths": torch.tensor([1, 2]),
    "out": torch.zeros(4, 576, dtype=torch.bfloat16),
}
MANY = torch.zeros(MOST_REQUESTS + 1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (TypeError, "pool: expected uint8", {"pool": CALL["pool"].view(torch.int8)}),
        (ValueError, "rows of 576 bytes are not 4-bit", {"pool": CALL["pool"].new_zeros(4, 576)}),
        (TypeError, "table: expected int32 or int64, got torch.float32", {"table": CALL["table"].float()}),
        (ValueError, r"table: expected 2 dimensions on cpu, got \[4\]", {"table": CALL["table"].view(4)}),
        (ValueError, "table: rows must be contiguous", {"table": CALL["table"].T}),
        (TypeError, "requests: expected int32 or int64", {"requests": torch.tensor([0.0, 1.0])}),
        (ValueError, "lengths: expected 1 dimensions on cpu, got .* on meta", {"lengths": CALL["lengths"].to("meta")}),
        (ValueError, "expected equally many, up to 16384, got 2 and 1", {"lengths": torch.tensor([1])}),
        (ValueError, "got 16385 and 16385", {"requests": MANY, "lengths": MANY}),
        (TypeError, "out: expected torch.bfloat16", {"out": CALL["out"].half()}),
        (ValueError, r"out: expected \[4, 576\] on cpu, got \[3, 576\]", {"out": CALL["out"][:3]}),
        (ValueError, "out: expected contiguous memory", {"out": CALL["out"].new_zeros(4, 580)[:, :576]}),
    ],
)  # fmt: skip
def test_refusals(error: type[Exception], text: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=text):
        kv4_expand(**{**CALL, **changes})
