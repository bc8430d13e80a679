# SPDX-License-Identifier: Apache-2.0
"""Dedup compaction of top-k tables: the distinct rows of a batch once each, and the tables over them.

*What*      rows = the distinct ids in 0 … slots - 1 of a table, ascending, then -1; positions = the table with each id replaced by its
            place in rows, -1 where the id is none of the pool; count = how many there are. `kv4_gather(pool, rows, count=count)`
            then converts each row once, however many queries share it: MTP verify rows of one request select mostly the same.
*Shapes*    table int32 or int64 of any shape, N ids; rows int32 [min(N, slots)], which no batch exceeds; positions int32 as the table;
            count int32 [1]. Nothing depends on values, so the call can be captured and needs no synchronisation.
*Order*     by slot, the same every time: a bitmap knows no order of arrival.
*Bytes*     compulsory: 4 N read, 4 N + 4 min(N, slots) + 4 written. The bitmap adds slots / 8 cleared, read by the scan, and as much
            again of ranks written, so slots × 3/8 in all: 2 MB for 5 million slots, half a µs. A radix sort of the ids moves keys
            and places, 8 bytes read and written in each of 4 passes, 64 N: 8 MB at N = 131,072, 34 MB at 524,288, in a dozen
            launches. The bitmap is the cheaper one up to slots ≈ 170 N.
            It pays where rows repeat: each row not converted twice saves 1012 bytes (656-byte rows) of `kv4_gather`.
*Launches*  clear, mark (an atomic OR for each id; whoever sets a bit first counts for its tile of 32,768 slots), scan (a program for a
            tile: ranks of its words, list of its ids; it sums the counts of the tiles before it), remap.
*Time*      measured: docs/kernels/kv4_compact.md. *Derived* before, one H200, 524,288 ids over 5 million slots: 4 launches of 1.3 µs, and for each id three
            scattered accesses of 32 bytes in L2, 50 MB at 5 TB/s: 15 µs, against 89 µs that 374,000 repeated rows cost in a gather.
*Arch*      see catalog.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from numinous_tooling.workbench import Tensors, Traffic

__all__ = ["Compacted", "kv4_compact", "reference", "traffic"]

IDS = 512
"""Ids of a program of mark and remap."""
WORDS = 1024
"""Words of a tile of the bitmap."""
COUNTS = 1024
"""Counts of tiles that the scan sums at a time."""


class Compacted(NamedTuple):
    """`rows` int32 [bound], `positions` int32 in the shape of the table, `count` int32 [1]; see the module."""

    rows: torch.Tensor
    positions: torch.Tensor
    count: torch.Tensor


# --- Reference ------------------------------------------------------------------------------------------------------


def reference(table: torch.Tensor, slots: int) -> Tensors:
    """Specification in torch; synchronises."""
    ids = table.reshape(-1).long().contiguous()
    valid = (ids >= 0) & (ids < slots)
    distinct = torch.unique(ids[valid])
    rows = torch.full((min(len(ids), slots),), -1, dtype=torch.int32, device=table.device)
    rows[: len(distinct)] = distinct.int()
    positions = torch.where(valid, torch.searchsorted(distinct, ids), -1).int()
    count = torch.tensor([len(distinct)], dtype=torch.int32, device=table.device)
    return {"rows": rows, "positions": positions.view(table.shape), "count": count}


def traffic(ids: int, slots: int, id_bytes: int) -> Traffic:
    """Compulsory bytes, see *Bytes*: the bitmap is not among them."""
    return Traffic(bytes=ids * (id_bytes + 4) + 4 * min(ids, slots) + 4)


# --- Triton ---------------------------------------------------------------------------------------------------------


@triton.jit
def _bits_set(x):
    """How many bits of uint32 words are set, as int32: libdevice's popc is not in the interpreter."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _ids(table_ptr, at, total, slots):
    ids = tl.load(table_ptr + at, mask=at < total, other=-1).to(tl.int64)
    valid = (ids >= 0) & (ids < slots)
    return tl.where(valid, ids, 0).to(tl.int32), valid


@triton.jit(do_not_specialize=["total", "slots"])
def _mark_kernel(
    table_ptr, bitmap_ptr, counts_ptr, total, slots, IDS: tl.constexpr, WORDS: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * IDS + tl.arange(0, IDS)
    ids, valid = _ids(table_ptr, at, total, slots)
    bit = tl.full([IDS], 1, tl.int32) << (ids & 31)
    before = tl.atomic_or(bitmap_ptr + (ids >> 5), bit, mask=valid, sem="relaxed")
    first = valid & ((before & bit) == 0)
    tl.atomic_add(counts_ptr + (ids >> 5) // WORDS, 1, mask=first, sem="relaxed")


@triton.jit
def _scan_kernel(
    bitmap_ptr,  # [tiles × WORDS] int32
    counts_ptr,  # [tiles] int32
    ranks_ptr,  # [tiles × WORDS] int32
    rows_ptr,  # [bound] int32
    count_ptr,  # [1] int32
    WORDS: tl.constexpr,
    COUNTS: tl.constexpr,
):
    tile = tl.program_id(0)
    before = tl.zeros([COUNTS], tl.int32)
    for start in range(0, tile, COUNTS):
        at = start + tl.arange(0, COUNTS)
        before += tl.load(counts_ptr + at, mask=at < tile, other=0)
    base = tl.sum(before, axis=0)
    own = tl.load(counts_ptr + tile)
    tl.store(count_ptr, base + own, mask=tile == tl.num_programs(0) - 1)
    if own > 0:  # nobody asks for ranks of a tile without ids
        word = tile * WORDS + tl.arange(0, WORDS)
        bits = tl.load(bitmap_ptr + word).to(tl.uint32, bitcast=True)
        number = _bits_set(bits)
        rank = base + tl.cumsum(number, axis=0) - number
        tl.store(ranks_ptr + word, rank)
        for bit in range(32):
            set_ = ((bits >> bit) & 1).to(tl.int32)
            tl.store(rows_ptr + rank, word * 32 + bit, mask=set_ == 1)
            rank += set_


@triton.jit(do_not_specialize=["total", "slots", "bound"])
def _remap_kernel(
    table_ptr, bitmap_ptr, ranks_ptr, count_ptr, rows_ptr, positions_ptr, total, slots, bound, IDS: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * IDS + tl.arange(0, IDS)
    ids, valid = _ids(table_ptr, at, total, slots)
    bits = tl.load(bitmap_ptr + (ids >> 5), mask=valid, other=0).to(tl.uint32, bitcast=True)
    below = (tl.full([IDS], 1, tl.uint32) << (ids & 31).to(tl.uint32)) - 1
    rank = tl.load(ranks_ptr + (ids >> 5), mask=valid, other=0) + _bits_set(bits & below)
    tl.store(positions_ptr + at, tl.where(valid, rank, -1), mask=at < total)
    tl.store(rows_ptr + at, -1, mask=(at >= tl.load(count_ptr)) & (at < bound))


# --- Public function ------------------------------------------------------------------------------------------------


def kv4_compact(table: torch.Tensor, slots: int) -> Compacted:
    """The distinct rows of a batch of top-k tables, and the tables over them.

    Args:
        table: int32 or int64 of any shape and strides; ids outside 0 … slots - 1, -1 among them, are left out.
        slots: of the pool, below 2^31.

    Raises:
        TypeError: the table's dtype is another.
        ValueError: too many slots or ids.
    """
    if table.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"table: expected int32 or int64, got {table.dtype}")
    total = table.numel()
    if not 0 < slots < 2**31 - 32 * WORDS or total >= 2**31:
        raise ValueError(
            f"expected 1 … 2^31 - 32769 slots and below 2^31 ids, got {slots} and {total}"
        )
    bound = min(total, slots)
    rows = torch.empty(bound, dtype=torch.int32, device=table.device)
    positions = torch.empty(table.shape, dtype=torch.int32, device=table.device)
    if not total:
        return Compacted(rows, positions, torch.zeros(1, dtype=torch.int32, device=table.device))
    count = torch.empty(1, dtype=torch.int32, device=table.device)
    tiles = triton.cdiv(slots, 32 * WORDS)
    cleared = torch.zeros(tiles * WORDS + tiles, dtype=torch.int32, device=table.device)
    bitmap, counts = cleared[: tiles * WORDS], cleared[tiles * WORDS :]
    ranks = torch.empty_like(bitmap)
    table = table.contiguous()
    grid = (triton.cdiv(total, IDS),)
    _mark_kernel[grid](table, bitmap, counts, total, slots, IDS=IDS, WORDS=WORDS)
    _scan_kernel[(tiles,)](bitmap, counts, ranks, rows, count, WORDS=WORDS, COUNTS=COUNTS)
    _remap_kernel[grid](
        table, bitmap, ranks, count, rows, positions, total, slots, bound, IDS=IDS
    )  # fmt: skip
    return Compacted(rows, positions, count)
