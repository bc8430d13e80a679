# SPDX-License-Identifier: Apache-2.0
"""Gather of 4-bit rows by index, to the engine's FP8 rows or to bf16 rows: what stock attention kernels read.

*What*      out[i] = convert(pool[index[i]]), convert one of `codec.requantize_fp8` ("fp8") and the exact decoding ("bf16").
*Shapes*    pool [slots, 352, 416 or 288] uint8, a 1 in the middle is taken; index int32 or int64 of any shape, N ids in all; out [N, w].
*Layout*    out "fp8": uint8 [N, 656], rope-free [N, 528], as FlashMLA's `flash_mla_with_kvcache(is_fp8_kvcache=True)` reads pages of
            64 such rows (`formats.STOCK_FP8`, `STOCK_FP8_NO_ROPE`); "bf16": bf16 [N, 576 or 512], latent then rope.
*Ids*       -1, which pads top-k tables, any other negative id and ids beyond the pool read as a row of zero bytes: its values are 0
            and finite, whatever the pool's unused slots hold. An id may stand any number of times. With `count`, one int32 on the
            device, rows from count on are not written: a list whose length only the device knows (`kv4_compact`).
*Positions* optional int32, as `index`: i where index[i] is in the pool, else -1: the index table into `out`.
*Bytes*     a row: 352 + id (4) read, 656 written: 1012; to bf16 352 + 4 + 1152 = 1508. A decode batch of 64 with top-k 2048 is 131,072
            rows: 133 MB and 198 MB, 31 and 47 µs at 4.25 TB/s. That the read may hit L2 (rows that batches share) only helps.
*Tiles*     a thread writes 16 bytes at a time: to FP8 it has a block of 16 values (8 bytes of codes), 4 rows on 128 threads, twice; to
            bf16 half a block, 2 rows, four times. So codes, scales and output lie in one layout, and nothing is exchanged but the
            maximum of 8 scale codes, by shuffles. For FP8 the eight products of a block's scale are converted once and looked up by
            nibbles (`codec.requantize_block`); bf16 goes through fp16 (`codec.unpack_e2m1`). Machine code for sm90: 294 and 421
            instructions a program of 8 rows, 8.2 and 11.7 a value, of 12 and 18 that fit into the time of the bytes.
*Time*      measured: docs/kernels/kv4_gather.md. *Derived* before, one H200: 131,072 rows 37 µs to FP8, 52 µs to bf16 (85, 90 % of the roof); 2048 rows 3 µs.
*Numerics*  bit for bit `reference`: "bf16" is exact, "fp8" rounds once as `codec` says; INT8 rope is exact in bf16.
*Arch*      see catalog.py.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

from numinous_kv_cache_4bit.kernels.codec import (
    bf16_pair,
    four_bit_format,
    int8_value,
    native,
    quad,
    quads,
    requantize_block,
    requantize_fp8,
    scale_value,
    step_of_scales,
    step_value,
    stock_fp8_of,
    unpack_e2m1,
    words,
)
from numinous_kv_cache_4bit.kernels.kv4_write import ROPE_MODES, checked_pool
from numinous_tooling.formats import LATENT_DIM, RowFormat
from numinous_tooling.workbench import Tensors, Traffic

__all__ = ["TILES", "Tile", "To", "kv4_gather", "out_bytes", "reference", "traffic"]

To = Literal["fp8", "bf16"]


class Tile(NamedTuple):
    """Rows that a program takes at a time, how many times, its warps of 32 threads, and whether it loads rope parts first."""

    rows: int
    turns: int
    warps: int
    ahead: bool = False


TILES: dict[To, Tile] = {"fp8": Tile(4, 2, 4), "bf16": Tile(2, 4, 4)}
"""What the launcher takes: so many rows at a time that 128 threads write 16 bytes each, see *Tiles*."""


def out_bytes(row: RowFormat, to: To) -> int:
    """Bytes of an output row of 4-bit rows of this format."""
    return stock_fp8_of(row).width if to == "fp8" else 2 * (LATENT_DIM + row.rope_dim)


# --- Reference ------------------------------------------------------------------------------------------------------


def reference(
    pool: torch.Tensor, index: torch.Tensor, *, to: To, count: torch.Tensor | None = None
) -> Tensors:
    """Specification in torch: ``out`` uint8 [N, bytes] and ``positions``; rows from `count` on are absent."""
    row = four_bit_format(pool.shape[-1])
    flat = index.reshape(-1).long()
    valid = (flat >= 0) & (flat < pool.shape[0])
    rows = torch.where(valid[:, None], pool[torch.where(valid, flat, 0)], 0).to(torch.uint8)
    if to == "fp8":
        out = requantize_fp8(rows)
    else:
        out = torch.cat(row.unpack(rows), dim=-1).view(torch.uint8)
    here = torch.arange(len(flat), dtype=torch.int32, device=flat.device)
    positions = torch.where(valid, here, -1).view(index.shape)
    return {"out": out if count is None else out[: int(count)], "positions": positions}


def traffic(rows: int, width: int, to: To, id_bytes: int) -> Traffic:
    """Compulsory bytes with distinct ids, see *Bytes*; about three operations a value."""
    row = four_bit_format(width)
    values = rows * (LATENT_DIM + row.rope_dim)
    return Traffic(
        bytes=rows * (width + id_bytes + out_bytes(row, to)), flops=3 * values, unit="fp32"
    )


# --- Triton ---------------------------------------------------------------------------------------------------------


# Rows are the last dimension of every tile: where addresses repeat, Triton takes the first dimension for the fastest, and
# tiles of one order need no exchange through shared memory.


@triton.jit
def _to_fp8(row, to, valid, live, ROWS: tl.constexpr, NATIVE: tl.constexpr):
    """Latent and scales of rows at addresses `row` [ROWS] as FP8 at addresses `to`, one block of 16 a thread."""
    block = tl.arange(0, 32)[:, None]
    mask, keep = valid[None, :], live[None, :]
    codes = tl.load(quads(row)[None, :] + block, mask=mask, other=0)  # [32, ROWS]
    scale_codes = tl.load(row[None, :] + 256 + block, mask=mask, other=0).to(tl.uint32)
    # The largest scale of a group of 128, NaN aside: ordered as its code.
    size = (scale_codes & 0x7F).to(tl.int32)
    size = tl.reshape(tl.where(size == 0x7F, 0, size), [4, 8, ROWS])
    largest = tl.maximum(tl.max(size, axis=1, keep_dims=True), 8)  # from 2^-6
    # 6 × 2^e × m/8 ≤ 448 × 2^(e-6) for m = 8 and 9, else ≤ 448 × 2^(e-5); e + 7 is the code's exponent field.
    exponent = (((largest + 6) >> 3) + 114).to(tl.uint32)
    exponent = tl.reshape(tl.broadcast_to(exponent, [4, 8, ROWS]), [32, ROWS])
    shared = (exponent << 23).to(tl.float32, bitcast=True)
    scales_at = (to + 512).to(tl.pointer_type(tl.float32))[None, :] + block // 8
    tl.store(scales_at, shared, mask=keep & (block % 8 == 0))
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    low, high = requantize_block(codes, scale_value(scale_codes) * inverse, NATIVE)
    both = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [64, ROWS])
    tl.store(quads(to)[None, :] + tl.arange(0, 64)[:, None], both, mask=keep)


@triton.jit
def latent_to_bf16(row, to, valid, live, ROWS: tl.constexpr):
    """Latent of rows at addresses `row` [ROWS] as bf16 at addresses `to`, half a block a thread."""
    word = tl.arange(0, 64)[:, None]
    mask, keep = valid[None, :], live[None, :]
    codes = tl.load(words(row)[None, :] + word, mask=mask, other=0)  # [64, ROWS]
    scale = tl.load(row[None, :] + 256 + word // 2, mask=mask, other=0).to(tl.uint32)
    scale = scale_value(scale) * 16384.0  # 2^14, the unit of `unpack_e2m1`
    v0, v4 = unpack_e2m1(codes, 0)
    v1, v5 = unpack_e2m1(codes, 1)
    v2, v6 = unpack_e2m1(codes, 2)
    v3, v7 = unpack_e2m1(codes, 3)
    low = quad(bf16_pair(v0 * scale, v1 * scale), bf16_pair(v2 * scale, v3 * scale))
    high = quad(bf16_pair(v4 * scale, v5 * scale), bf16_pair(v6 * scale, v7 * scale))
    both = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [128, ROWS])
    tl.store(quads(to)[None, :] + tl.arange(0, 128)[:, None], both, mask=keep)


@triton.jit
def load_rope(row, valid, ROPE: tl.constexpr):
    """Rope part of rows, from where it begins, and what its steps are made from: the 32 bytes before."""
    column = tl.arange(0, 16)[:, None]
    mask = valid[None, :]
    if ROPE == 1:
        four = tl.load(words(row)[None, :] + column, mask=mask, other=0)
        return four, tl.load(quads(row - 32)[None, :] + column // 4, mask=mask, other=0)
    else:
        four = tl.load(quads(row)[None, :] + column, mask=mask, other=0)
        return four, four


@triton.jit
def store_rope(four, scales, to, live, ROPE: tl.constexpr):
    """What `load_rope` gave, as bf16 at addresses `to`."""
    column = tl.arange(0, 16)[:, None]
    keep = live[None, :]
    if ROPE == 1:
        step = step_value(step_of_scales(scales.to(tl.uint32), (scales >> 32).to(tl.uint32)))
        low = bf16_pair(int8_value(four, step), int8_value(four >> 8, step))
        high = bf16_pair(int8_value(four >> 16, step), int8_value(four >> 24, step))
        tl.store(quads(to)[None, :] + column, quad(low, high), mask=keep)
    else:
        tl.store(quads(to)[None, :] + column, four, mask=keep)


@triton.jit
def _addresses(index_ptr, pool_ptr, out_ptr, at, pool_stride, out_stride, total, end, slots):
    ids = tl.load(index_ptr + at, mask=at < total, other=-1).to(tl.int64)
    found = (ids >= 0) & (ids < slots)
    live = at < end
    valid = found & live
    row = pool_ptr + tl.where(valid, ids, 0) * pool_stride
    return row, out_ptr + at.to(tl.int64) * out_stride, found, valid, live


@triton.jit(do_not_specialize=["total", "slots"])
def _kv4_gather_kernel(
    pool_ptr,  # [slots, width] uint8
    index_ptr,  # [N] int32 or int64
    out_ptr,  # [N, bytes] uint8
    positions_ptr,  # [N] int32
    count_ptr,  # [1] int32
    pool_stride,  # in bytes
    out_stride,  # in bytes
    total,  # below 2^31
    slots,
    ROWS: tl.constexpr,  # at a time
    TURNS: tl.constexpr,
    ROPE: tl.constexpr,  # 0 none, 1 INT8, 2 bf16
    AHEAD: tl.constexpr,
    FP8: tl.constexpr,
    POSITIONS: tl.constexpr,
    COUNTED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    first = tl.program_id(0) * (ROWS * TURNS)
    end = total
    if COUNTED:
        end = tl.minimum(end, tl.load(count_ptr))
    # Ahead of the first store: behind it the loads wait, since the store could write what they read.
    if AHEAD:
        at = first + tl.arange(0, ROWS * TURNS)
        row, _, _, valid, _ = _addresses(
            index_ptr, pool_ptr, out_ptr, at, pool_stride, out_stride, total, end, slots
        )
        four, scales = load_rope(row + 288, valid, ROPE)
    for turn in tl.static_range(TURNS):
        at = first + turn * ROWS + tl.arange(0, ROWS)
        row, to, _, valid, live = _addresses(
            index_ptr, pool_ptr, out_ptr, at, pool_stride, out_stride, total, end, slots
        )
        if FP8:
            _to_fp8(row, to, valid, live, ROWS, NATIVE)
        else:
            latent_to_bf16(row, to, valid, live, ROWS)
    at = first + tl.arange(0, ROWS * TURNS)
    row, to, found, valid, live = _addresses(
        index_ptr, pool_ptr, out_ptr, at, pool_stride, out_stride, total, end, slots
    )
    if ROPE > 0:
        if not AHEAD:
            four, scales = load_rope(row + 288, valid, ROPE)
        store_rope(four, scales, to + (528 if FP8 else 1024), live, ROPE)
    if POSITIONS:
        tl.store(positions_ptr + at, tl.where(found, at, -1), mask=at < total)


# --- Public function ------------------------------------------------------------------------------------------------


def kv4_gather(
    pool: torch.Tensor,
    index: torch.Tensor,
    *,
    to: To,
    out: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Rows of a 4-bit pool by index, as rows that stock attention reads.

    Args:
        pool: uint8 [slots, width] or [slots, 1, width], as `kv4_write` fills it.
        index: int32 or int64 of any shape and strides, ids of rows; others read as zero rows. Copied where not contiguous.
        to: "fp8" or "bf16".
        out: rows to fill, uint8 [N, 656 or 528] or bf16 [N, 576 or 512], contiguous and at a multiple of 16 bytes; None allocates.
            N is the number of ids.
        positions: int32, contiguous, in the shape of `index`, to receive each id's row of `out`, or -1.
        count: int32 [1] on the device: rows from it on are left as they are; positions are written for all.
        tile: None is that of `TILES`; others are for the sweep of the workbench.

    Returns:
        `out`.

    Raises:
        TypeError: a dtype is not the one named.
        ValueError: shapes, strides or devices do not fit.
    """
    row, pool = checked_pool(pool)
    if to not in ("fp8", "bf16"):
        raise ValueError(f"to is 'fp8' or 'bf16', got {to!r}")
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"index: expected int32 or int64, got {index.dtype}")
    if index.device != pool.device:
        raise ValueError(f"index: expected on {pool.device}, got {index.device}")
    total = index.numel()
    dtype = torch.uint8 if to == "fp8" else torch.bfloat16
    shape = (total, out_bytes(row, to) // dtype.itemsize)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=pool.device)
    _check_buffer("out", out, shape, dtype, pool.device)
    if positions is not None:
        _check_buffer("positions", positions, tuple(index.shape), torch.int32, pool.device)
    if count is not None:
        _check_buffer("count", count, (1,), torch.int32, pool.device)
    if total > 2**31 - 64:
        raise ValueError(f"index: at most 2^31 - 64 ids in a call, got {total}")
    if not total:
        return out
    rows = out.view(torch.uint8)
    tile = tile or TILES[to]
    _kv4_gather_kernel[(triton.cdiv(total, tile.rows * tile.turns),)](
        pool,
        index.contiguous(),
        rows,
        positions,
        count,
        pool.stride(0),
        rows.shape[1],
        total,
        pool.shape[0],
        ROWS=tile.rows,
        TURNS=tile.turns,
        ROPE=ROPE_MODES[row.width],
        AHEAD=tile.ahead and row.rope_dim > 0,
        FP8=to == "fp8",
        POSITIONS=positions is not None,
        COUNTED=count is not None,
        NATIVE=native(pool.device),
        num_warps=tile.warps // 2 if torch.version.hip else tile.warps,
    )
    return out


def _check_buffer(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
    if tuple(tensor.shape) != shape or tensor.device != device:
        raise ValueError(
            f"{name}: expected {list(shape)} on {device}, got {list(tensor.shape)} on {tensor.device}"
        )
    if not tensor.is_contiguous() or (name == "out" and tensor.data_ptr() % 16):
        raise ValueError(
            f"{name}: expected contiguous memory at a multiple of 16 bytes, got strides {tensor.stride()}"
        )
