# SPDX-License-Identifier: Apache-2.0
"""Quantised write of MLA KV rows: latent and rope of new tokens to packed 4-bit rows of the pool, at the slots given.

*What*      pool[loc[t]] = encode(latent[t], rope[t]), see `codec`: E2M1 latent, an E4M3 scale for 16 values, rope as INT8 or bf16.
*Shapes*    latent [T, 512] bf16, rope [T, 64] bf16 or none, loc [T] int32 or int64, pool [slots, 352, 416 or 288] uint8; a
            dimension of 1 in the middle is taken too.
*Layout*    `numinous_tooling.formats`: the pool's width chooses it.
*Slots*     Written are ids 1 … slots - 1. Slot 0 is where the engine sends padding tokens, and its own writer leaves it as it was
            allocated (`reserved_skip_index=0`): so does this one, for rows without rope too, so that padded batches stay
            deterministic. Ids that are negative or beyond the pool are skipped. An id that stands twice gets bytes of either
            token; which, is not defined, and rows of equal content are safe.
*Bytes*     a token: 1024 latent + 128 rope + 4 or 8 id read, 352 written: 1512 with int64 ids (288-byte rows: 1320). At T = 64
            97 kB, 4096 6.2 MB, 65,536 99 MB. At 4.25 TB/s (*reported* best copy of an H200) 65,536 tokens take 23.3 µs, in which
            132 × 128 lanes at 1.75 GHz issue 18 instructions for each of 576 values, but only 9 of those of the logic unit, which has half the lanes.
*Tiles*     up to 128 tokens a program is one row on 2 warps, 8 values a thread: the loads of id, latent and rope part do not wait for each
            other, one latency. Above, 4 rows on 4 warps: a thread has a whole block of 16: no exchange between threads but by shuffles, for the
            rope's steps. The machine code for sm90 has 264 instructions, 14.7 a value (sm100: 218), for one row 253, 28 a value: there the two
            warps exchange the steps through shared memory.
*Time*      measured: docs/kernels/kv4_write.md, which also derives it.
*Numerics*  bit for bit `reference`: the formats' encoder; for "mse" see `codec.search_scale`. A NaN makes its block of 16 NaN, inf
            saturates and leaves its neighbours finite, an amax up to 2^-11 × global_scale gives scale 0 and zeros of the sign; -0
            keeps its sign. Rope: a NaN makes its 16 values NaN, beyond 8128 and inf saturate, `numerics.quantize_int8` has the rest.
*Arch*      see catalog.py. On sm90 E2M1 is rounded in packed fp16 arithmetic, on sm100 and later by `cvt.rn.satfinite.e2m1x2.f32`;
            gfx950 and the interpreter do the former one number at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from numinous_kv_cache_4bit.kernels.codec import (
    ScaleChoice,
    block_amax,
    block_factor,
    block_scale,
    check_global_scale,
    check_scale_choice,
    four_bit_format,
    int8_codes,
    native,
    pack_e2m1,
    search_scale,
    step_codes,
    words,
)
from numinous_tooling.formats import LATENT_DIM, RowFormat
from numinous_tooling.workbench import Tensors, Traffic

__all__ = ["Tile", "kv4_write", "reference", "tile_for", "traffic"]

ROPE_NONE, ROPE_INT8, ROPE_BF16 = 0, 1, 2
ROPE_MODES = {288: ROPE_NONE, 352: ROPE_INT8, 416: ROPE_BF16}
FEW_TOKENS = 128
"""Up to here a program writes one row."""
MANY_ROWS = 4
"""Rows of a program above that."""


class Tile(NamedTuple):
    """Rows and warps of a program."""

    rows: int
    warps: int


def tile_for(tokens: int) -> Tile:
    """What the launcher takes."""
    return Tile(1, 2) if tokens <= FEW_TOKENS else Tile(MANY_ROWS, 4)


# --- Reference ------------------------------------------------------------------------------------------------------


def reference(
    pool: torch.Tensor,
    loc: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor | None = None,
    *,
    global_scale: float = 1.0,
    scale_choice: ScaleChoice = "amax",
) -> Tensors:
    """Specification in torch; writes into `pool` [slots, width] and returns it as ``pool``.

    Of an id that stands twice, one token is written.
    """
    row = four_bit_format(pool.shape[-1])
    above = None if global_scale == 1.0 else check_global_scale(global_scale)
    rows = row.pack(latent, rope, global_scale=above, scale_choice=scale_choice)
    keep = (loc > 0) & (loc < pool.shape[0])
    pool[loc[keep].long()] = rows[keep]
    return {"pool": pool}


def traffic(tokens: int, width: int, id_bytes: int) -> Traffic:
    """Compulsory bytes, see *Bytes* above; about ten operations a value."""
    rope = four_bit_format(width).rope_dim
    each = 2 * (LATENT_DIM + rope) + width + id_bytes
    return Traffic(bytes=tokens * each, flops=10 * tokens * (LATENT_DIM + rope), unit="fp32")


# --- Triton ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tokens", "slots"])
def _kv4_write_kernel(
    latent_ptr,  # [T, 256] words: two bf16 each
    rope_ptr,  # [T, 32] words
    loc_ptr,  # [T] int32 or int64
    pool_ptr,  # [slots, width] uint8
    latent_stride,  # in words
    rope_stride,  # in words
    loc_stride,
    pool_stride,  # in bytes
    tokens,
    slots,
    inverse_global,
    ROWS: tl.constexpr,
    ROPE: tl.constexpr,  # 0 none, 1 INT8, 2 bf16
    SEARCH: tl.constexpr,
    NATIVE: tl.constexpr,
):
    # All loads ahead of the first store, behind which a load waits, since the store could write what it reads. Not masked by the slots either.
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = token < tokens
    loc = tl.load(loc_ptr + token * loc_stride, mask=live, other=0).to(tl.int64)
    at = latent_ptr + (token * latent_stride)[:, None] + tl.arange(0, 256)[None, :]
    latent = tl.load(at, mask=live[:, None], other=0).to(tl.uint32, bitcast=True)
    column = tl.arange(0, 32)[None, :]
    if ROPE > 0:
        at = rope_ptr + (token * rope_stride)[:, None] + column
        rope = tl.load(at, mask=live[:, None], other=0).to(tl.uint32, bitcast=True)

    keep = (loc > 0) & (loc < slots)
    row = pool_ptr + loc * pool_stride  # [ROWS]
    pair = tl.reshape(latent, [ROWS, 32, 8])  # blocks of 16 values
    codes = block_scale(block_amax(pair, NATIVE), inverse_global, NATIVE)  # [ROWS, 32]
    even = (pair << 16).to(tl.float32, bitcast=True)
    odd = (pair & 0xFFFF0000).to(tl.float32, bitcast=True)
    if SEARCH:
        codes = search_scale(codes, even, odd, inverse_global)
    factor = block_factor(codes, inverse_global, NATIVE)
    packed = pack_e2m1(
        even,
        odd,
        tl.broadcast_to(factor[:, :, None], [ROWS, 32, 8]),
        NATIVE,
    )
    to = row[:, None] + tl.arange(0, 256)[None, :]
    tl.store(to, tl.reshape(packed, [ROWS, 256]), mask=keep[:, None])

    if ROPE > 0:
        to = row + 288
        if ROPE == 1:
            pair = tl.reshape(rope, [ROWS, 4, 8])  # groups of 16 values
            low, high = pair << 16, pair & 0xFFFF0000
            steps = step_codes(block_amax(pair, NATIVE))[:, :, None]  # [ROWS, 4, 1]
            two = int8_codes(low, steps) | (int8_codes(high, steps) << 8)
            to = to.to(tl.pointer_type(tl.uint16))
            two = tl.reshape(two, [ROWS, 32]).to(tl.uint16)
            tl.store(to[:, None] + column, two, mask=keep[:, None])
            signs = ((steps >> tl.arange(0, 8)[None, None, :]) << 7).to(tl.uint8) & 0x80
            codes |= tl.reshape(signs, [ROWS, 32])
        else:
            tl.store(words(to)[:, None] + column, rope, mask=keep[:, None])
    tl.store(row[:, None] + 256 + column, codes, mask=keep[:, None])


# --- Public function ------------------------------------------------------------------------------------------------


def kv4_write(
    pool: torch.Tensor,
    loc: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor | None = None,
    *,
    global_scale: float = 1.0,
    scale_choice: ScaleChoice = "amax",
    tile: Tile | None = None,
) -> None:
    """Quantise tokens and write them as rows of the pool; allocates nothing for inputs whose rows are contiguous.

    Args:
        pool: uint8 [slots, width] or [slots, 1, width], width 352, 416 or 288; rows of any stride that start at multiples of 16 bytes.
        loc: [T] int32 or int64, any stride; ids 1 … slots - 1 are written, all others skipped.
        latent: bf16 [T, 512] or [T, 1, 512], any strides.
        rope: bf16 [T, 64] or [T, 1, 64], any strides; None or with no columns for 288-byte rows.
        global_scale: a power of two that multiplies on decoding; the row does not hold it.
        scale_choice: "amax", or "mse": of 11 scales for a block the one of least squared error. About 140 instructions a value more (*derived*: 1124 for 8 values of the sm90 machine code).
        tile: None is `tile_for`; others are for the sweep of the workbench.

    Raises:
        TypeError: a dtype is not the one named.
        ValueError: shapes, strides or devices do not fit, `global_scale` is no power of two, or `scale_choice` is another word.
    """
    row, pool = checked_pool(pool)
    if loc.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"loc: expected int32 or int64, got {loc.dtype}")
    if loc.dim() != 1 or loc.device != pool.device:
        raise ValueError(
            f"loc: expected [T] on {pool.device}, got {list(loc.shape)} on {loc.device}"
        )
    tokens = loc.shape[0]
    latent_words = _words_of("latent", latent, tokens, LATENT_DIM, pool)
    rope_words = None
    if row.rope_dim:
        if rope is None:
            raise ValueError(
                f"rope: expected [{tokens}, 64] for rows of {row.width} bytes, got None"
            )
        rope_words = _words_of("rope", rope, tokens, row.rope_dim, pool)
    elif rope is not None and rope.numel():
        raise ValueError(f"rope: rows of {row.width} bytes have none, got {list(rope.shape)}")
    check_scale_choice(scale_choice)
    inverse_global = 1.0 / check_global_scale(global_scale)
    if not tokens:
        return
    rows, warps = tile or tile_for(tokens)
    _kv4_write_kernel[(triton.cdiv(tokens, rows),)](
        latent_words,
        rope_words,
        loc,
        pool,
        latent_words.stride(0),
        0 if rope_words is None else rope_words.stride(0),
        loc.stride(0),
        pool.stride(0),
        tokens,
        pool.shape[0],
        inverse_global,
        ROWS=rows,
        ROPE=ROPE_MODES[row.width],
        SEARCH=scale_choice == "mse",
        NATIVE=native(pool.device),
        num_warps=warps,
    )


def checked_pool(pool: torch.Tensor) -> tuple[RowFormat, torch.Tensor]:
    """The format of a pool of 4-bit rows, and the pool as [slots, width]; raises TypeError, ValueError."""
    if pool.dtype != torch.uint8:
        raise TypeError(f"pool: expected uint8, got {pool.dtype}")
    if pool.dim() == 3 and pool.shape[1] == 1:
        pool = pool[:, 0]
    if pool.dim() != 2:
        raise ValueError(
            f"pool: expected [slots, width] or [slots, 1, width], got {list(pool.shape)}"
        )
    row = four_bit_format(pool.shape[1])
    if pool.stride(1) != 1 or pool.data_ptr() % 16 or pool.stride(0) % 16:
        raise ValueError(
            f"pool: rows must be contiguous and start at multiples of 16 bytes, got strides {pool.stride()}"
        )
    if pool.shape[0] > 1 and pool.stride(0) < row.width:
        raise ValueError(f"pool: rows may not overlap, got strides {pool.stride()}")
    return row, pool


def _words_of(
    name: str, tensor: torch.Tensor, tokens: int, columns: int, pool: torch.Tensor
) -> torch.Tensor:
    """bf16 [T, columns] as int32 [T, columns / 2]; copied where its elements or rows do not lie at whole words."""
    if tensor.dtype != torch.bfloat16:
        raise TypeError(f"{name}: expected bfloat16, got {tensor.dtype}")
    if tensor.dim() == 3 and tensor.shape[1] == 1:
        tensor = tensor[:, 0]
    if tensor.shape != (tokens, columns) or tensor.device != pool.device:
        raise ValueError(
            f"{name}: expected [{tokens}, {columns}] on {pool.device}, got {list(tensor.shape)} on {tensor.device}"
        )
    odd_rows = tokens > 1 and tensor.stride(0) % 2
    if tensor.stride(1) != 1 or odd_rows or tensor.data_ptr() % 4:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    elif tokens <= 1:
        tensor = tensor.as_strided(
            tensor.shape, (columns, 1)
        )  # the stride of a single row says nothing
    return tensor.view(torch.int32)
