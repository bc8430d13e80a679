# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of query and key heads, rotary embedding, and the write to the KV cache, in one kernel: what lies between Gemma's QKV projection and its attention.

*What*      y = bf16(x · rstd · (w + b)) per head of q and k, rstd = 1 / sqrt(mean(x²) + eps), b = 1 for Gemma 3, 0 for Gemma 4; of v the same without w (Gemma 4), or v itself;
            with c, s = the two halves of a row of the table: (y1, y2) → (bf16(y1 c - y2 s), bf16(y2 c + y1 s)) for the halves of a head of q and k;
            k and v go to their rows of the pools: as they are, or as E4M3 of bf16(x / scale).
*Shapes*    q: [T, H, D] bf16; k, v: [T, K, D] bf16, changed in place; w: [D] bf16; table: [P, D] fp32, cosines then sines; positions, slots: [T] int32 or int64;
            pools: [S, K, D] bf16, E4M3 or its bytes. D even. Without k: q alone, as in layers that read another layer's cache.
*Layout*    a token's heads lie side by side; tokens and rows of a pool have any stride (q, k, v may be parts of one QKV row).
*Slots*     with a map, row map[slot] is written: the engine names a window's slots by those of the full pool, and translates. A slot or a mapped row outside is not written: a map of no slot writes nothing.
            Two tokens of one slot: each element is one of theirs. A position outside the table: NaN in q and k, nothing in the cache.
*Bytes*     2 each way a value of q, 2 + 2 (FP8: 1) of k and v, + 2 of each that is also left in place; 4 D of the table and 8 to 24 of ids a token. Bound by memory.
            The engine's three kernels (norm, rotation, store) move 8 a value of q, 12 of k, 8 of v, and twice the ids.
*Numerics*  squares, products and the rotation in fp32, rounded to bf16 behind the norm, behind the rotation and behind the division, as the chain rounds. E4M3 saturates, NaN stays NaN.
            Not the chain's bits: sums run in another order and products may be fused, which moves a value to its neighbour now and then.
*Arch*      see catalog.py. *Evidence* none yet.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from numinous_tooling.device.convert import decode_bf16, encode_bf16, encode_e4m3fn
from numinous_tooling.numerics import encode_e4m3fn as reference_encode
from numinous_tooling.workbench import Tensors, Traffic

__all__ = ["Tile", "qk_norm_rope_store", "reference", "tile_of", "traffic"]

FP8 = torch.float8_e4m3fn


class Tile(NamedTuple):
    """Heads that a program takes, and its warps."""

    heads: int
    warps: int


# --- Reference ------------------------------------------------------------------------------------------------------


def reference(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor | None,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor | None,
    k_pool: torch.Tensor | None,
    v_pool: torch.Tensor | None,
    *,
    eps: float,
    gemma: bool,
    norm_v: bool,
    slot_map: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    write_back: bool = True,
    exact: bool = False,
) -> Tensors:
    """Specification in torch; returns the new values of all that is written, leaves its arguments alone.

    Args:
        exact: every step in fp64, nothing rounded but codes of FP8 pools, whose values are given.

    Returns:
        ``q``, and with k: ``k``, ``v`` and the pools, FP8 ones as uint8 codes (`exact`: as values).
    """
    real = torch.float64 if exact else torch.float32

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x if exact else x.to(torch.bfloat16).to(real)

    def norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        x = x.to(real)
        mean = x.double().square().sum(-1, keepdim=True).to(real) / x.shape[-1]
        y = x * (1 / (mean + eps).sqrt())
        return rounded(y if weight is None else y * (weight.to(real) + float(gemma)))

    inside = (positions >= 0) & (positions < len(table))
    row = table[torch.where(inside, positions, 0).long()].to(real)
    row = torch.where(inside[:, None], row, torch.nan)
    cos, sin = row[:, None].chunk(2, dim=-1)

    def rotate(y: torch.Tensor) -> torch.Tensor:
        one, two = y.chunk(2, dim=-1)
        return rounded(torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1))

    given = (lambda x: x) if exact else (lambda x: x.to(torch.bfloat16))
    out: Tensors = {"q": given(rotate(norm(q, q_weight)))}
    if k is None:
        return out
    assert v is not None
    assert slots is not None
    assert k_pool is not None
    assert v_pool is not None
    new = {"k": rotate(norm(k, k_weight)), "v": norm(v, None) if norm_v else v.to(real)}
    for name, old in (("k", k), ("v", v)):
        out[name] = given(new[name]) if write_back else old.to(real) if exact else old.clone()
    at = slots.long()
    if slot_map is not None:
        there = (at >= 0) & (at < len(slot_map))
        at = torch.full_like(at, -1).masked_scatter(there, slot_map[at[there]].long())
    live = inside & (at >= 0) & (at < len(k_pool))
    at = at[live]
    for name, pool, scale in (("k", k_pool, k_scale), ("v", v_pool, v_scale)):
        rows = new[name][live]
        if pool.dtype == torch.bfloat16:
            made = pool.to(real) if exact else pool.clone()
            made[at] = rows if exact else rows.to(torch.bfloat16)
        else:
            made = pool.view(FP8).to(real) if exact else pool.view(torch.uint8).clone()
            made[at] = rows / scale if exact else reference_encode(rounded(rows / scale))
        out[f"{name}_pool"] = made
    return out


def traffic(
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    fp8: bool,
    norm_v: bool,
    write_back: bool,
    mapped: bool,
    id_bytes: int = 8,
) -> Traffic:
    """Compulsory bytes, see *Bytes*, the table read once a token; about twelve FLOPs a value. `kv_heads` 0: q alone."""
    values, kept = tokens * dim, 1 if fp8 else 2
    each = 4 * heads + kv_heads * (2 * (2 + kept) + (2 * (1 + norm_v) if write_back else 0))
    ids = id_bytes * (1 + bool(kv_heads)) + 8 * (mapped and bool(kv_heads))
    return Traffic(
        bytes=values * each + tokens * (4 * dim + ids) + 2 * dim * (2 if kv_heads else 1),
        flops=12 * values * (heads + 2 * kv_heads),
        unit="fp32",
    )


# --- Device ---------------------------------------------------------------------------------------------------------


@triton.jit
def _load_half(at, mask):
    return decode_bf16(tl.load(at, mask=mask, other=0.0).to(tl.uint16, bitcast=True))


@triton.jit
def _store_half(at, bits, mask):
    tl.store(at, bits.to(tl.bfloat16, bitcast=True), mask=mask)


@triton.jit
def _rstd(one, two, eps, D: tl.constexpr):
    """Of rows whose halves are given, [HEADS, 1]."""
    mean = tl.div_rn(tl.sum(one * one, axis=1) + tl.sum(two * two, axis=1), D * 1.0)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]


@triton.jit
def _rotated(one, two, weight_ptr, cos, sin, column, half, eps, bias, D: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """bf16 bits of both halves, [HEADS, HALF] each."""
    rstd = _rstd(one, two, eps, D)
    weight_one = _load_half(weight_ptr + column, half)[None, :] + bias
    weight_two = _load_half(weight_ptr + D // 2 + column, half)[None, :] + bias
    one = decode_bf16(encode_bf16(one * rstd * weight_one, NATIVE))
    two = decode_bf16(encode_bf16(two * rstd * weight_two, NATIVE))
    return (
        encode_bf16(one * cos - two * sin, NATIVE),
        encode_bf16(two * cos + one * sin, NATIVE),
    )


@triton.jit
def _to_pool(at, bits, scale, mask, FP8: tl.constexpr, NATIVE: tl.constexpr):
    if FP8:
        value = decode_bf16(encode_bf16(tl.div_rn(decode_bf16(bits), scale), NATIVE))
        tl.store(at, encode_e4m3fn(value, NATIVE), mask=mask)
    else:
        _store_half(at, bits, mask)


@triton.jit(do_not_specialize=["last_position", "mapped", "pool_rows"])
def _qk_norm_rope_store_kernel(
    q_ptr,  # [T, Q_HEADS, D] bf16, read and written
    k_ptr,  # [T, KV_HEADS, D] bf16, the same
    v_ptr,  # [T, KV_HEADS, D] bf16, the same
    q_weight_ptr,  # [D] bf16
    k_weight_ptr,  # [D] bf16
    table_ptr,  # [P, D] fp32
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    map_ptr,  # [mapped] int32 or int64
    k_pool_ptr,  # [S, KV_HEADS, D] bf16 or uint8
    v_pool_ptr,
    q_stride,
    k_stride,
    v_stride,
    k_pool_stride,
    v_pool_stride,
    last_position,
    mapped,
    pool_rows,
    eps,
    bias,
    k_scale,
    v_scale,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,  # 0: q alone
    D: tl.constexpr,
    HALF: tl.constexpr,  # power of two, at least D / 2
    HEADS: tl.constexpr,  # of a program
    NORM_V: tl.constexpr,
    WRITE_BACK: tl.constexpr,
    MAPPED: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)  # tiles of q's heads, then of k's, then of v's
    Q_PARTS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    head = tl.arange(0, HEADS)
    column = tl.arange(0, HALF)
    half = column < D // 2

    position = tl.load(positions_ptr + token).to(tl.int64)
    placed = (position >= 0) & (position <= last_position)
    row = table_ptr + position * D
    nan = float("nan")
    cos = tl.load(row + column, mask=half & placed, other=nan)[None, :]
    sin = tl.load(row + D // 2 + column, mask=half & placed, other=nan)[None, :]

    if part < Q_PARTS:
        head += part * HEADS
        mask = (head < Q_HEADS)[:, None] & half[None, :]
        at = q_ptr + token * q_stride + head[:, None] * D + column[None, :]
        one, two = _load_half(at, mask), _load_half(at + D // 2, mask)
        one_bits, two_bits = _rotated(
            one, two, q_weight_ptr, cos, sin, column, half, eps, bias, D, NATIVE
        )
        _store_half(at, one_bits, mask)
        _store_half(at + D // 2, two_bits, mask)
    elif KV_HEADS > 0:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        live = placed & (slot >= 0)
        if MAPPED:
            live = live & (slot < mapped)
            slot = tl.load(map_ptr + slot, mask=live, other=-1).to(tl.int64)
        live = live & (slot >= 0) & (slot < pool_rows)
        if part < Q_PARTS + KV_PARTS:
            head += (part - Q_PARTS) * HEADS
            mask = (head < KV_HEADS)[:, None] & half[None, :]
            inner = head[:, None] * D + column[None, :]
            at = k_ptr + token * k_stride + inner
            one, two = _load_half(at, mask), _load_half(at + D // 2, mask)
            one_bits, two_bits = _rotated(
                one, two, k_weight_ptr, cos, sin, column, half, eps, bias, D, NATIVE
            )
            if WRITE_BACK:
                _store_half(at, one_bits, mask)
                _store_half(at + D // 2, two_bits, mask)
            there = k_pool_ptr + slot * k_pool_stride + inner
            _to_pool(there, one_bits, k_scale, mask & live, FP8, NATIVE)
            _to_pool(there + D // 2, two_bits, k_scale, mask & live, FP8, NATIVE)
        else:
            head += (part - Q_PARTS - KV_PARTS) * HEADS
            mask = (head < KV_HEADS)[:, None] & half[None, :]
            inner = head[:, None] * D + column[None, :]
            at = v_ptr + token * v_stride + inner
            one, two = _load_half(at, mask), _load_half(at + D // 2, mask)
            rstd = 1.0
            if NORM_V:
                rstd = _rstd(one, two, eps, D)
            one_bits = encode_bf16(one * rstd, NATIVE)
            two_bits = encode_bf16(two * rstd, NATIVE)
            if WRITE_BACK and NORM_V:
                _store_half(at, one_bits, mask)
                _store_half(at + D // 2, two_bits, mask)
            there = v_pool_ptr + slot * v_pool_stride + inner
            _to_pool(there, one_bits, v_scale, mask & live, FP8, NATIVE)
            _to_pool(there + D // 2, two_bits, v_scale, mask & live, FP8, NATIVE)


# --- Public function ------------------------------------------------------------------------------------------------


def tile_of(tokens: int, dim: int) -> Tile:
    """Heads and warps: one head a program where tokens are few, four where programs are many; 16 values a thread and up."""
    heads = 1 if tokens <= 64 else 4
    return Tile(heads, max(1, min(4, heads * triton.next_power_of_2(dim) // 512)))


def qk_norm_rope_store(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor | None,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor | None,
    k_pool: torch.Tensor | None,
    v_pool: torch.Tensor | None,
    *,
    eps: float = 1e-6,
    gemma: bool = False,
    norm_v: bool = False,
    slot_map: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    write_back: bool = True,
    tile: Tile | None = None,
) -> None:
    """Norm and rotate q and k in place, and write k and v to their cache; see the module.

    Neither synchronises nor reads a value back, so it may be captured; slots, map and positions are read at each replay.

    Args:
        q: [T, H, D] bf16. A token's heads lie side by side, tokens at any stride; as k and v.
        k, v: [T, K, D] bf16; both None: q alone, with `k_weight`, `slots` and the pools None too.
        q_weight, k_weight: [D] bf16, contiguous.
        table: [P, D] fp32, contiguous: D / 2 cosines, then D / 2 sines of each position. A rotation of part of a head has 1 and 0 in the rest.
        positions, slots: [T] int32 or int64, contiguous.
        k_pool, v_pool: [S, K, D], both bf16 or both E4M3 (or uint8 that holds it); rows at any stride.
        eps: added to the mean square.
        gemma: multiply by 1 + weight (Gemma 3).
        norm_v: v is normed too, without a weight (Gemma 4).
        slot_map: int32 or int64 of one dimension, contiguous: the row of the pools that each slot names.
        k_scale, v_scale: of FP8 pools, the value of a code of 1; 1 otherwise.
        write_back: leave the new k and v in k and v. A decode needs them in the cache only.
        tile: None is `tile_of`; others are for the workbench.

    Raises:
        TypeError: a dtype is not the one named.
        ValueError: shapes, strides, devices or scales do not fit.
    """
    tokens, heads, dim = _check(q, k, v, q_weight, k_weight, table, positions, slots, k_pool, v_pool, slot_map)  # fmt: skip
    fp8 = k_pool is not None and k_pool.dtype != torch.bfloat16
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not (0 < scale < math.inf) or (scale != 1 and not fp8):
            raise ValueError(
                f"{name}: expected a positive number for FP8 pools, 1 for others, got {scale}"
            )
    interpreted = q.device.type == "cpu"
    if interpreted and isinstance(_qk_norm_rope_store_kernel, triton.JITFunction):
        raise ValueError(
            "tensors on a GPU are needed, or TRITON_INTERPRET=1 when this module is imported; got cpu"
        )
    if not tokens:
        return
    tile = tile or tile_of(tokens, dim)
    kv_heads = 0 if k is None else k.shape[1]
    parts = triton.cdiv(heads, tile.heads) + 2 * triton.cdiv(kv_heads, tile.heads)
    pools = (k_pool, v_pool) if not fp8 else (k_pool.view(torch.uint8), v_pool.view(torch.uint8))  # type: ignore[union-attr]
    _qk_norm_rope_store_kernel[(tokens, parts)](
        q,
        k,
        v,
        q_weight,
        k_weight,
        table,
        positions,
        slots,
        slot_map,
        *pools,
        *(0 if x is None else x.stride(0) for x in (q, k, v, *pools)),
        len(table) - 1,
        0 if slot_map is None else len(slot_map),
        0 if k_pool is None else len(k_pool),
        eps,
        float(gemma),
        float(k_scale),
        float(v_scale),
        Q_HEADS=heads,
        KV_HEADS=kv_heads,
        D=dim,
        HALF=triton.next_power_of_2(dim // 2),
        HEADS=tile.heads,
        NORM_V=norm_v,
        WRITE_BACK=write_back,
        MAPPED=slot_map is not None,
        FP8=fp8,
        NATIVE=not interpreted and torch.version.hip is None,
        num_warps=tile.warps,
    )


def _check(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor | None,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor | None,
    k_pool: torch.Tensor | None,
    v_pool: torch.Tensor | None,
    slot_map: torch.Tensor | None,
) -> tuple[int, int, int]:
    """Tokens, query heads and the width of a head."""
    if q.dim() != 3:
        raise ValueError(f"q: expected [tokens, heads, dim], got {list(q.shape)}")
    tokens, heads, dim = q.shape
    if heads == 0 or dim == 0 or dim % 2:
        raise ValueError(f"q: expected heads of an even width, got {list(q.shape)}")
    of_keys = {"k": k, "v": v, "k_weight": k_weight, "slots": slots, "k_pool": k_pool, "v_pool": v_pool}  # fmt: skip
    absent = [name for name, tensor in of_keys.items() if tensor is None]
    if len(absent) not in (0, len(of_keys)) or (absent and slot_map is not None):
        raise ValueError(
            f"k comes with v, k_weight, slots and both pools; there is no {', '.join(absent)}"
        )
    ids, bf16 = (torch.int32, torch.int64), (torch.bfloat16,)
    pool = (torch.bfloat16, FP8, torch.uint8)
    kv_heads = 0 if k is None else k.shape[1] if k.dim() == 3 else -1
    slots_of_pool = None if k_pool is None else len(k_pool)
    wanted = {
        "q": (q, bf16, (tokens, heads, dim)),
        "k": (k, bf16, (tokens, kv_heads, dim)),
        "v": (v, bf16, (tokens, kv_heads, dim)),
        "q_weight": (q_weight, bf16, (dim,)),
        "k_weight": (k_weight, bf16, (dim,)),
        "table": (table, (torch.float32,), (len(table), dim)),
        "positions": (positions, ids, (tokens,)),
        "slots": (slots, ids, (tokens,)),
        "slot_map": (slot_map, ids, (0 if slot_map is None else slot_map.numel(),)),
        "k_pool": (k_pool, pool, (slots_of_pool, kv_heads, dim)),
        "v_pool": (v_pool, pool, (slots_of_pool, kv_heads, dim)),
    }
    for name, (tensor, types, shape) in wanted.items():
        if tensor is None:
            continue
        if tensor.dtype not in types:
            raise TypeError(f"{name}: expected {' or '.join(map(str, types))}, got {tensor.dtype}")
        if tuple(tensor.shape) != shape or tensor.device != q.device:
            raise ValueError(
                f"{name}: expected {list(shape)} on {q.device}, got {list(tensor.shape)} on {tensor.device}"
            )
        if tensor.dim() == 3:
            if tensor.numel() and (
                tensor.stride(2) != 1 or (shape[1] != 1 and tensor.stride(1) != dim)
            ):
                raise ValueError(
                    f"{name}: heads must lie side by side, got strides {tensor.stride()}"
                )
            if len(tensor) > 1 and tensor.stride(0) < tensor.shape[1] * dim:
                raise ValueError(
                    f"{name}: rows that are written may not overlap, got strides {tensor.stride()}"
                )
        elif not tensor.is_contiguous():
            raise ValueError(f"{name}: expected contiguous memory, got strides {tensor.stride()}")
    if k_pool is not None and v_pool is not None and k_pool.dtype != v_pool.dtype:
        raise TypeError(f"both pools are of one type, got {k_pool.dtype} and {v_pool.dtype}")
    return tokens, heads, dim
