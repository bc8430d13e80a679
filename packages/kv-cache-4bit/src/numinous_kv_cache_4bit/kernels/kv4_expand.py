# SPDX-License-Identifier: Apache-2.0
"""Decodes the live rows of a batch in place: 4-bit rows of a pool to bf16 rows at the same slots of a shadow.

*What*      out[id] = decode(pool[id]) for each id of table[requests[b], : lengths[b] + extra]; no other row of `out` is touched. An
            attention kernel that knows bf16 pools then reads `out` with the page tables it has.
*Shapes*    pool [slots, 352, 416 or 288] uint8, table [R, W] int32 or int64 (the engine's `req_to_token`), requests and lengths [B] int32 or
            int64 on the device; out [slots, 576 or 512] bf16, latent then rope. A 1 in the middle of pool and out is taken.
*Ids*       negative ones and ones beyond the pool are skipped; an id may stand any number of times (requests share prefixes): each time
            the same bytes are written. A request that is no row of the table has no rows. lengths[b] + extra is clamped to 0 … W.
*Grid*      static: 1024 programs whatever the lengths, which only the device knows. Each program sums the requests' units
            of 32 rows (one scan of B lengths), then takes every G-th unit of the batch; which request a unit belongs to are two reductions
            over B. So one long request among short ones is spread like any other, and a captured graph serves every length.
*Bytes*     a live row: 352 + id (4) read, 1152 written: 1508. 131,072 rows: 198 MB, 47 µs at 4.25 TB/s (*reported* best copy of an H200). What is
            left of a read that stock's kernel does anyway (1152 a row) makes a layer 2660 bytes a row instead of 1152 of a bf16 pool.
*Tiles*     8 rows at a time on 128 threads, as `kv4_gather` does to bf16, whose device functions convert.
*Numerics*  bit for bit `reference`: decoding is exact in bf16, INT8 rope too.
*Arch*      see catalog.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from numinous_kv_cache_4bit.kernels.codec import four_bit_format
from numinous_kv_cache_4bit.kernels.kv4_gather import latent_to_bf16, load_rope, store_rope
from numinous_kv_cache_4bit.kernels.kv4_write import ROPE_MODES, checked_pool
from numinous_tooling.formats import LATENT_DIM
from numinous_tooling.workbench import Tensors, Traffic

__all__ = ["TILE", "Tile", "kv4_expand", "reference", "traffic"]


class Tile(NamedTuple):
    """A launch.

    Args:
        programs: of it.
        unit: rows of a request that a program takes at a time.
        group: of these, rows whose rope part is converted together.
        rows: of these, rows whose latent is converted together.
        warps: of a program, of 32 threads.
        ahead: whether a group's rope parts are loaded before anything is stored.
    """

    programs: int
    unit: int
    group: int
    rows: int
    warps: int
    ahead: bool = False


TILE = Tile(programs=1024, unit=32, group=8, rows=2, warps=4)
"""What the launcher takes: eight programs for each SM of an H200, all resident at once."""
LEAST_BATCH = 32
"""Width of the scan in the smallest launch; powers of two from here on are compiled apart."""
MOST_REQUESTS = 2**14


# --- Reference ------------------------------------------------------------------------------------------------------


def reference(
    pool: torch.Tensor,
    table: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    *,
    extra: int = 0,
) -> Tensors:
    """Specification in torch, on `pool` [slots, width] and `out` [slots, columns]; writes `out` and returns it."""
    row, slots = four_bit_format(pool.shape[-1]), len(pool)
    known = (requests >= 0) & (requests < len(table))
    ids = table[torch.where(known, requests, 0).long()].long()  # [B, W]
    here = torch.arange(ids.shape[1], device=ids.device) < (lengths.long() + extra)[:, None]
    live = here & known[:, None] & (ids >= 0) & (ids < slots)
    touched = torch.zeros(slots + 1, dtype=torch.bool, device=pool.device)
    touched[torch.where(live, ids, slots).flatten()] = True
    rows = torch.cat(row.unpack(pool), dim=-1)
    out.copy_(torch.where(touched[:slots, None], rows, out))
    return {"out": out}


def traffic(rows: int, width: int, id_bytes: int) -> Traffic:
    """Compulsory bytes of that many distinct live rows, see *Bytes*; about three operations a value."""
    columns = LATENT_DIM + four_bit_format(width).rope_dim
    return Traffic(
        bytes=rows * (width + id_bytes + 2 * columns), flops=3 * rows * columns, unit="fp32"
    )


# --- Triton ---------------------------------------------------------------------------------------------------------


@triton.jit
def _length(
    requests_ptr, lengths_ptr, at, live, extra, table_rows, columns
):  # rows of requests `at`
    request = tl.load(requests_ptr + at, mask=live, other=-1).to(tl.int64)
    length = tl.load(lengths_ptr + at, mask=live, other=0).to(tl.int64) + extra
    length = tl.minimum(tl.maximum(length, 0), columns)
    return request, tl.where((request >= 0) & (request < table_rows), length, 0).to(tl.int32)


@triton.jit
def _addresses(table, at, length, pool_ptr, out_ptr, pool_stride, out_stride, slots):
    ids = tl.load(table + at, mask=at < length, other=-1).to(tl.int64)
    valid = (ids >= 0) & (ids < slots)
    ids = tl.where(valid, ids, 0)
    return pool_ptr + ids * pool_stride, out_ptr + ids * out_stride, valid


@triton.jit(do_not_specialize=["batch", "extra", "table_rows", "columns", "slots"])
def _kv4_expand_kernel(
    pool_ptr,  # [slots, width] uint8
    table_ptr,  # [table_rows, columns] int32 or int64
    requests_ptr,  # [batch] int32 or int64
    lengths_ptr,  # [batch] int32 or int64
    out_ptr,  # [slots, bytes] uint8
    pool_stride,  # in bytes
    table_stride,
    out_stride,  # in bytes
    batch,
    extra,
    table_rows,
    columns,
    slots,
    BATCH: tl.constexpr,  # at least `batch`
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ROPE: tl.constexpr,  # 0 none, 1 INT8, 2 bf16
    AHEAD: tl.constexpr,
):
    lane = tl.arange(0, BATCH)
    _, rows = _length(requests_ptr, lengths_ptr, lane, lane < batch, extra, table_rows, columns)
    ends = tl.cumsum((rows + UNIT - 1) // UNIT, axis=0)  # of the requests' units
    total = tl.max(ends, axis=0)
    for unit in range(tl.program_id(0), total, tl.num_programs(0)):
        before = ends <= unit
        which = tl.sum(before.to(tl.int32), axis=0)
        first = (unit - tl.max(tl.where(before, ends, 0), axis=0)) * UNIT
        request, length = _length(
            requests_ptr, lengths_ptr, which, which < batch, extra, table_rows, columns
        )
        table = table_ptr + request * table_stride
        end = tl.minimum(first + UNIT, length)
        for start in range(first, end, GROUP):
            # Ahead of the first store: behind it the loads wait, since the store could write what they read.
            if AHEAD:
                group_row, _group_to, group_valid = _addresses(
                    table,
                    start + tl.arange(0, GROUP),
                    length,
                    pool_ptr,
                    out_ptr,
                    pool_stride,
                    out_stride,
                    slots,
                )
                four, scales = load_rope(group_row + 288, group_valid, ROPE)
            for turn in tl.static_range(GROUP // ROWS):
                at = start + turn * ROWS + tl.arange(0, ROWS)
                row, to, valid = _addresses(
                    table, at, length, pool_ptr, out_ptr, pool_stride, out_stride, slots
                )
                latent_to_bf16(row, to, valid, valid, ROWS)
            if ROPE > 0:
                row, to, valid = _addresses(
                    table,
                    start + tl.arange(0, GROUP),
                    length,
                    pool_ptr,
                    out_ptr,
                    pool_stride,
                    out_stride,
                    slots,
                )
                if not AHEAD:
                    four, scales = load_rope(row + 288, valid, ROPE)
                store_rope(four, scales, to + 1024, valid, ROPE)


# --- Public function ------------------------------------------------------------------------------------------------


def kv4_expand(
    pool: torch.Tensor,
    table: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    *,
    extra: int = 0,
    tile: Tile = TILE,
) -> None:
    """Decode the live rows of a batch to bf16 rows at their own slots of `out`.

    Args:
        pool: uint8 [slots, width] or [slots, 1, width], as `kv4_write` fills it.
        table: int32 or int64 [R, W], slots of each request; rows of any stride.
        requests: int32 or int64 [B], rows of the table.
        lengths: int32 or int64 [B], live entries of each.
        out: bf16 [slots, 576 or 512], a 1 in the middle is taken; contiguous, at a multiple of 16 bytes.
        extra: added to each length: slots that follow it in the table and may be live.
        tile: other ones are for the sweep of the workbench.

    Raises:
        TypeError: a dtype is not the one named.
        ValueError: shapes, strides or devices do not fit, or there are more than 16,384 requests.
    """
    row, pool = checked_pool(pool)
    for name, tensor, dim in (("table", table, 2), ("requests", requests, 1), ("lengths", lengths, 1)):  # fmt: skip
        if tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: expected int32 or int64, got {tensor.dtype}")
        if tensor.dim() != dim or tensor.device != pool.device:
            raise ValueError(
                f"{name}: expected {dim} dimensions on {pool.device}, got {list(tensor.shape)} on {tensor.device}"
            )
    if table.shape[1] > 1 and table.stride(1) != 1:
        raise ValueError(f"table: rows must be contiguous, got strides {table.stride()}")
    batch = len(requests)
    if len(lengths) != batch or batch > MOST_REQUESTS:
        raise ValueError(
            f"requests and lengths: expected equally many, up to {MOST_REQUESTS}, got {batch} and {len(lengths)}"
        )
    _check_out(out, pool, LATENT_DIM + row.rope_dim)
    if not batch or not table.numel() or not len(pool):
        return
    programs = (
        3 if pool.device.type == "cpu" else tile.programs
    )  # the interpreter shares units out, too
    _kv4_expand_kernel[(programs,)](
        pool,
        table,
        requests.contiguous(),
        lengths.contiguous(),
        out.view(torch.uint8),
        pool.stride(0),
        table.stride(0),
        2 * (LATENT_DIM + row.rope_dim),
        batch,
        extra,
        table.shape[0],
        table.shape[1],
        pool.shape[0],
        BATCH=max(LEAST_BATCH, triton.next_power_of_2(batch)),
        UNIT=tile.unit,
        GROUP=tile.group,
        ROWS=tile.rows,
        ROPE=ROPE_MODES[row.width],
        AHEAD=tile.ahead and row.rope_dim > 0,
        num_warps=tile.warps // 2 if torch.version.hip else tile.warps,
    )


def _check_out(out: torch.Tensor, pool: torch.Tensor, columns: int) -> None:
    if out.dtype != torch.bfloat16:
        raise TypeError(f"out: expected torch.bfloat16, got {out.dtype}")
    shapes = ((len(pool), columns), (len(pool), 1, columns))
    if tuple(out.shape) not in shapes or out.device != pool.device:
        raise ValueError(
            f"out: expected {list(shapes[0])} on {pool.device}, got {list(out.shape)} on {out.device}"
        )
    if not out.is_contiguous() or out.data_ptr() % 16:
        raise ValueError(
            f"out: expected contiguous memory at a multiple of 16 bytes, got strides {out.stride()}"
        )
