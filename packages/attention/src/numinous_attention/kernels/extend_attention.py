# SPDX-License-Identifier: Apache-2.0
"""Attention of a chunk of new tokens over a cached prefix and the chunk itself; every KV tile is read once for all query heads of its group.

*What*      out = softmax(sm_scale · q · Kᵀ) · V, K and V of a request being its prefix (rows of a pool, by slot id) and then its chunk. With a logit
            cap c, scores are c · tanh(score / c). With a sink s of a head, out is multiplied by exp(lse) / (exp(lse) + exp(s)); lse = log Σ exp
            of the scores, without the sink.
*Shapes*    q [tokens, heads, D], k [tokens, kv_heads, D], v [tokens, kv_heads, D_v] bf16 (or all fp32); pools [slots, kv_heads, D] and [slots, kv_heads, D_v]
            in the same type or FP8 E4M3; out [tokens, heads, D_v] in q's type; lse [tokens, heads] fp32. D and D_v: a power of two from 16 to 512, or the sum of two.
*Requests*  Request r has chunk rows qo_indptr[r] … qo_indptr[r + 1] and prefix ids kv_indices[kv_indptr[r]] …; either may be empty. An id that is negative or not
            below `slots` is no key. Rows of q behind the last request are neither read nor written. Slots that nobody names are not read.
*Visible*   Token i of a chunk behind a prefix of n keys stands at n + i, prefix key j at j. It sees keys that pass all that is given: `causal`: not behind it;
            `window` w: at most w before it; `mask`: a byte that is not 0. The mask of a request is [chunk, offset + n + chunk] bytes from mask_indptr[r] on, as the
            engine lays it out, offset = mask_offsets[r] columns that a truncated prefix has lost; its prefix columns count only with `mask_prefix`.
            A token that sees nothing has out 0 and lse -inf.
*Numerics*  Scores in fp32 of bf16 products; probabilities rounded to bf16, their sum is not; FP8 is exact in bf16. k_scale and v_scale multiply the prefix only. A NaN in
            V of a key that is named spreads to queries of its tile that do not see it (0 · NaN); one in K does not.
            CUDA C++ only (derived, emulated): scores from about 10^9 on may make their row NaN, and so does an infinity in q beside an id that is no key, which a cap would make finite in Triton.

*Tiles*     A program has M rows, (token, head of the group) pairs in the order of q, so that 8 tokens × 8 heads fill 64 rows and no group size wastes one, and walks
            tiles of N keys: first the prefix, then the chunk. It starts at the first tile that the window of its first token reaches and ends with the tile of its last token.
            Skipped tiles would have left maxima, sums and output as they were: the result has the same bits.
*Bytes*     Each key costs a program 2 · (D + D_v) bytes and 2 · M · (D + D_v) FLOPs: M FLOPs a byte, asked of L2, where the K and V of one head lie (8192 keys of D 512: 16 MB; heads
            are walked one after the other). M counts, not how it is made up: M tokens of one head read as many. But M / group tokens walk fewer keys beyond a diagonal or a window, and
            fill their rows with chunks that many times shorter.

D = D_v = 512, bf16: what a program holds. 64 rows or keys of 512 values are 64 KB ("KB" = 1024), the output is rows · 512 fp32 values in registers.

    architecture, limit       rows × keys, warps   Q       K and V            together        output, registers a thread
    sm90, 227 KB              128 × 32, 8, half V  128 KB  2 · (32 + 16) KB   224 KB          128 · 256 / 256 = 128 of 255
                              64 × 32, 8           64 KB   2 · (32 + 32) KB   192 KB          128
                              64 × 64, 8           64 KB   2 · (64 + 64) KB   320 KB: over    128
    sm100, 227 KB, 512        128 × 32, 8, half V  128 KB  2 · (32 + 16) KB   224 KB          256 columns of 512, and S and P beside them;
    columns of tensor memory                                                                  whole: 512 + 16 of 512: over
    sm120, 99 KB              32 × 16, 8           32 KB   2 · (16 + 16) KB   96 KB at most   64
    gfx950, 160 KB            64 × 32, 8 of 64     0       1 · (32 + 32) KB   64 KB at most   64 of 512

128 rows fit only with half of V each ("half V"), so that S of 512 is made twice: 3/2 of the FLOPs, 527 TFLOP/s at best of 790 on Hopper. 64 rows with all of V do not avoid that: Triton lays all
warps of a product that another follows along its rows, so that both warpgroups of 64 rows make the same S. A mask's tiles (2 · 4 KB) do not fit beside 128 rows: `LESS`. What bounds which: docs/deep-dives/extend-512.md.
*Arch*      see catalog.py.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

from numinous_attention.kernels import extend_attention_cuda as cuda
from numinous_tooling.device.convert import decode_bf16, decode_e4m3fn, encode_bf16
from numinous_tooling.workbench import Tensors, Traffic

__all__ = ["Extended", "extend_attention", "reference", "traffic", "visible_pairs"]

LOG2E = math.log2(math.e)

Impl = Literal["cuda", "triton"]


class Extended(NamedTuple):
    """Result: `out` [tokens, heads, D_v] in q's type; `lse` [tokens, heads] fp32, natural logarithm, or None where it was not asked for."""

    out: torch.Tensor
    lse: torch.Tensor | None


# --- Reference ------------------------------------------------------------------------------------------------------

ROWS_AT_ONCE = 512  # queries of a request that the reference takes at once: bounds its scores


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    *,
    sm_scale: float,
    causal: bool = True,
    window: int | None = None,
    mask: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
    mask_offsets: torch.Tensor | None = None,
    mask_prefix: bool = False,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> Tensors:
    """Specification in torch, fp64.

    Returns:
        ``out`` and ``lse``, and ``magnitude``: Σ p · |v| like out, which the rounding of p is proportional to. Rows behind the last request
        are those of the argument `out`, else 0; their lse is -inf.
    """
    tokens, heads, _ = q.shape
    kv_heads, slots = k.shape[1], k_pool.shape[0]
    group = heads // kv_heads
    wide = torch.float64
    made = q.new_zeros((tokens, heads, v.shape[2]), dtype=wide) if out is None else out.to(wide)
    magnitude = made.abs()
    lse = q.new_full((tokens, heads), -torch.inf, dtype=wide)
    begins, prefixes = qo_indptr.tolist(), kv_indptr.tolist()
    for request in range(len(begins) - 1):
        begin, end = begins[request], begins[request + 1]
        ids = kv_indices[prefixes[request] : prefixes[request + 1]].long()
        named = (ids >= 0) & (ids < slots)
        ids, prefix, chunk = torch.where(named, ids, 0), len(ids), end - begin
        exists = torch.cat([named, named.new_ones(chunk)])
        at = torch.arange(prefix + chunk, device=q.device)
        for first in range(0, chunk, ROWS_AT_ONCE):
            last = min(chunk, first + ROWS_AT_ONCE)
            here = prefix + torch.arange(first, last, device=q.device)[:, None]
            seen = exists.expand(last - first, -1).clone()
            if causal:
                seen &= at <= here
            if window is not None:
                seen &= at >= here - window
            if mask is not None:
                assert mask_indptr is not None
                lost = int(mask_offsets[request]) if mask_offsets is not None else 0
                width = lost + prefix + chunk
                start = int(mask_indptr[request]) + first * width
                rows = mask[start : start + (last - first) * width].view(-1, width)[:, lost:] != 0
                if not mask_prefix:
                    rows = torch.where(at < prefix, True, rows)
                seen &= rows
            rows_of = slice(begin + first, begin + last)
            for kv_head in range(kv_heads):
                keys = torch.cat([
                    k_scale * k_pool[:, kv_head][ids].to(wide), k[begin:end, kv_head].to(wide)
                ])  # fmt: skip
                values = torch.cat([
                    v_scale * v_pool[:, kv_head][ids].to(wide), v[begin:end, kv_head].to(wide)
                ])  # fmt: skip
                # Rows of slots that are no keys must not make 0 · NaN.
                keys, values = (torch.where(exists[:, None], x, 0.0) for x in (keys, values))
                own = slice(kv_head * group, (kv_head + 1) * group)
                scores = sm_scale * torch.einsum("thd,nd->htn", q[rows_of, own].to(wide), keys)
                if logit_cap:
                    scores = logit_cap * torch.tanh(scores / logit_cap)
                scores = torch.where(seen, scores, -torch.inf)
                sums = torch.logsumexp(scores, dim=-1)
                total = sums
                if sinks is not None:
                    total = torch.logaddexp(sums, sinks[own].to(wide)[:, None])
                # exp(-inf - -inf) of a query that sees nothing.
                weights = torch.where(seen, (scores - total[..., None]).exp(), 0.0)
                made[rows_of, own] = (weights @ values).transpose(0, 1)
                magnitude[rows_of, own] = (weights @ values.abs()).transpose(0, 1)
                lse[rows_of, own] = sums.transpose(0, 1)
    return {"out": made, "lse": lse, "magnitude": magnitude}


def visible_pairs(chunk: int, prefix: int, causal: bool, window: int | None) -> tuple[int, int]:
    """(query, key) pairs that a request's mask-free attention has, and prefix keys that some query sees."""
    keys = prefix if window is None else min(prefix, window)
    if not chunk:
        return 0, 0
    if not causal and window is None:
        return chunk * (prefix + chunk), keys
    pairs = 0
    for token in range(chunk):
        first = 0 if window is None else max(0, prefix + token - window)
        pairs += (prefix + token + 1 if causal else prefix + chunk) - first
    return pairs, keys


def traffic(
    chunks: list[int],
    prefixes: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    dim_v: int,
    *,
    causal: bool = True,
    window: int | None = None,
    bytes_of: tuple[int, int] = (2, 2),
    id_bytes: int = 4,
) -> Traffic:
    """Compulsory bytes and FLOPs of requests without a custom mask.

    Args:
        chunks, prefixes: lengths of each request.
        bytes_of: a value of q, k, v and out; a value of the pools.
    """
    counted = [visible_pairs(c, n, causal, window) for c, n in zip(chunks, prefixes, strict=True)]
    pairs, keys = sum(x for x, _ in counted), sum(x for _, x in counted)
    own, pool = bytes_of
    tokens = sum(chunks)
    return Traffic(
        bytes=own * tokens * (heads + kv_heads) * (dim + dim_v)
        + keys * (pool * kv_heads * (dim + dim_v) + id_bytes),
        flops=2 * heads * pairs * (dim + dim_v),
        unit="bf16",
    )


# --- Triton ---------------------------------------------------------------------------------------------------------


@triton.jit
def _operand(x, NATIVE: tl.constexpr, TYPE: tl.constexpr):
    """What the matrix units multiply: values in q's type; under the interpreter, whose bf16 products are wrong, in fp32."""
    if NATIVE:
        return x.to(TYPE)
    elif x.dtype == tl.bfloat16:
        return decode_bf16(x.to(tl.uint16, bitcast=True))
    elif x.dtype == tl.uint8:
        return decode_e4m3fn(x)
    else:
        return x


@triton.jit
def _values(row, valid, FIRST: tl.constexpr, COUNT: tl.constexpr, NATIVE: tl.constexpr, TYPE: tl.constexpr):  # fmt: skip
    """Values FIRST … FIRST + COUNT of rows of keys, [N, COUNT] in `_operand`'s type; 0 where a key is not valid.

    The one place that knows how a pool holds its values, by the pointer's type: uint8 is FP8 E4M3, another type is the values themselves.
    """
    at = FIRST + tl.arange(0, COUNT)
    raw = tl.load(row[:, None] + at[None, :], mask=valid[:, None], other=0)
    if NATIVE and raw.dtype == tl.uint8:
        raw = raw.to(tl.float8e4nv, bitcast=True)
    return _operand(raw, NATIVE, TYPE)


@triton.jit
def _attend(
    q0, q1, k_row, v_row, valid, seen, factor, cap, most, total, acc0, acc1,
    CAP: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    NATIVE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """One tile of N keys for M rows: new maximum, sum and output (in two parts of V0 and V1 values)."""
    k0 = _values(k_row, valid, 0, D0, NATIVE, TYPE)
    scores = tl.dot(q0, tl.trans(k0), input_precision="ieee")
    if D1:
        k1 = _values(k_row, valid, D0, D1, NATIVE, TYPE)
        scores = tl.dot(q1, tl.trans(k1), scores, input_precision="ieee")
    scores = scores * factor
    if CAP:
        # cap · tanh(x), x = score / cap: `factor` holds 2 · log2(e) / cap.
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    scores = tl.where(seen, scores, float("-inf"))
    now = tl.maximum(most, tl.max(scores, axis=1))
    base = tl.where(now == float("-inf"), 0.0, now)
    shrink = tl.exp2(most - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    if NATIVE:
        weights = weights.to(TYPE)
    v0 = _values(v_row, valid, 0, V0, NATIVE, TYPE)
    acc0 = tl.dot(weights, v0, acc0 * shrink[:, None], input_precision="ieee")
    if V1:
        v1 = _values(v_row, valid, V0, V1, NATIVE, TYPE)
        acc1 = tl.dot(weights, v1, acc1 * shrink[:, None], input_precision="ieee")
    return now, total, acc0, acc1


@triton.jit
def _store(at, values, mask, NATIVE: tl.constexpr):
    if NATIVE:
        tl.store(at, values.to(at.dtype.element_ty), mask=mask)
    elif at.dtype.element_ty == tl.bfloat16:
        tl.store(at, encode_bf16(values).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(at, values, mask=mask)


@triton.jit(do_not_specialize=["heads", "batch", "tokens", "listed", "slots", "window", "splits"])
def _extend_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_pool_ptr,
    v_pool_ptr,
    qo_indptr_ptr,
    kv_indptr_ptr,
    kv_indices_ptr,
    mask_ptr,  # uint8, or None
    mask_indptr_ptr,
    mask_offsets_ptr,
    sinks_ptr,  # [heads] fp32 or bf16, or None
    out_ptr,  # with SPLIT [tokens, splits · heads, D_v] fp32
    lse_ptr,  # [tokens, heads] fp32, or None; with SPLIT [tokens, splits, heads] to base 2
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_slot_stride,
    k_pool_head_stride,
    v_slot_stride,
    v_pool_head_stride,
    out_token_stride,
    out_head_stride,
    heads,
    batch,
    tokens,
    listed,  # ids
    slots,
    window,
    splits,
    prefix_factor,  # of scores, for the exponent to base 2
    chunk_factor,
    cap,  # logit cap · log2(e)
    v_scale,
    GROUP: tl.constexpr,  # query heads of a KV head
    D0: tl.constexpr,
    D1: tl.constexpr,
    V0: tl.constexpr,  # values of V of a program; without SPLIT program_id(2) · V0 is its first
    V1: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    MASK_PREFIX: tl.constexpr,
    SPLIT: tl.constexpr,  # program_id(2) is a split of the prefix; the chunk is the last one's
    SKIP: tl.constexpr,  # False only in a test
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    TYPE: tl.constexpr = q_ptr.dtype.element_ty
    # Tiles of request r start at floor(its first row / ROWS) + r: distinct and ascending whatever the lengths, known without a sum over
    # requests. The last tiles come first: they are the longest of a causal chunk.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    v_first = tl.program_id(2) * V0
    split = tl.program_id(2)
    if SPLIT:
        v_first = 0
    low = tl.program_id(0) * 0
    high = low + batch
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(qo_indptr_ptr + middle).to(tl.int64) * GROUP // ROWS + middle
        low = tl.where(start <= tile, middle, low)
        high = tl.where(start <= tile, high, middle)
    request = low
    begin = tl.load(qo_indptr_ptr + request).to(tl.int64)
    end = tl.minimum(tl.load(qo_indptr_ptr + request + 1).to(tl.int64), tokens)
    chunk = (end - begin).to(tl.int32)
    first_row = ((tile - begin * GROUP // ROWS - request) * ROWS).to(tl.int32)
    if (first_row < 0) | (first_row >= chunk * GROUP):
        return
    listed_begin = tl.load(kv_indptr_ptr + request).to(tl.int64)
    listed_end = tl.minimum(tl.load(kv_indptr_ptr + request + 1).to(tl.int64), listed)
    prefix = tl.maximum(listed_end - listed_begin, 0).to(tl.int32)

    row = first_row + tl.arange(0, ROWS)
    live = row < chunk * GROUP
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    first = first_row // GROUP
    last = tl.minimum((first_row + ROWS - 1) // GROUP, chunk - 1)
    q_row = q_ptr + (begin + token) * q_token_stride + head * q_head_stride
    q0 = _values(q_row, live, 0, D0, NATIVE, TYPE)
    q1 = q0
    if D1:
        q1 = _values(q_row, live, D0, D1, NATIVE, TYPE)
    if mask_ptr is not None:
        lost = 0
        if mask_offsets_ptr is not None:
            lost = tl.load(mask_offsets_ptr + request).to(tl.int32)
        mask_row = mask_ptr + tl.load(mask_indptr_ptr + request).to(tl.int64)
        mask_row += token.to(tl.int64) * (lost + prefix + chunk) + lost

    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc0 = tl.zeros([ROWS, V0], tl.float32)
    acc1 = acc0
    if V1:
        acc1 = tl.zeros([ROWS, V1], tl.float32)

    # Prefix.
    lowest = 0
    if WINDOW and SKIP:
        lowest = tl.maximum(prefix + first - window, 0) // KEYS * KEYS
    highest = prefix
    if SPLIT:
        # Of equal tiles, of which the chunk is one.
        tiles = tl.cdiv(tl.maximum(prefix - lowest, 0), KEYS).to(tl.int64) + 1
        highest = tl.minimum(prefix, lowest + (tiles * (split + 1) // splits).to(tl.int32) * KEYS)
        lowest += (tiles * split // splits).to(tl.int32) * KEYS
    for start in range(lowest, highest, KEYS):
        at = start + tl.arange(0, KEYS)
        inside = at < prefix
        ids = tl.load(kv_indices_ptr + listed_begin + at, mask=inside, other=-1).to(tl.int64)
        valid = (ids >= 0) & (ids < slots)
        ids = tl.where(valid, ids, 0)
        seen = valid[None, :]
        if WINDOW:
            seen = seen & (prefix + token[:, None] - at[None, :] <= window)
        if MASK_PREFIX:
            bits = tl.load(mask_row[:, None] + at[None, :], mask=live[:, None] & inside[None, :], other=0)  # fmt: skip
            seen = seen & (bits != 0)
        most, total, acc0, acc1 = _attend(
            q0, q1,
            k_pool_ptr + ids * k_slot_stride + kv_head * k_pool_head_stride,
            v_pool_ptr + ids * v_slot_stride + kv_head * v_pool_head_stride + v_first,
            valid, seen, prefix_factor, cap, most, total, acc0, acc1,
            CAP, D0, D1, V0, V1, NATIVE, TYPE,
        )  # fmt: skip
    acc0 *= v_scale
    acc1 *= v_scale

    # Chunk.
    lowest = 0
    if WINDOW and SKIP:
        lowest = tl.maximum(first - window, 0) // KEYS * KEYS
    highest = chunk
    if CAUSAL and SKIP:
        highest = last + 1
    if SPLIT:
        highest = tl.where(split == splits - 1, highest, 0)
    # A split's chunk is a tile: buffers for more would take shared memory from the prefix.
    for start in tl.range(lowest, highest, KEYS, num_stages=1 if SPLIT else None):
        at = start + tl.arange(0, KEYS)
        valid = at < chunk
        seen = valid[None, :]
        if CAUSAL:
            seen = seen & (at[None, :] <= token[:, None])
        if WINDOW:
            seen = seen & (token[:, None] - at[None, :] <= window)
        if mask_ptr is not None:
            bits = tl.load(mask_row[:, None] + prefix + at[None, :], mask=live[:, None] & valid[None, :], other=0)  # fmt: skip
            seen = seen & (bits != 0)
        place = begin + at
        most, total, acc0, acc1 = _attend(
            q0, q1,
            k_ptr + place * k_token_stride + kv_head * k_head_stride,
            v_ptr + place * v_token_stride + kv_head * v_head_stride + v_first,
            valid, seen, chunk_factor, cap, most, total, acc0, acc1,
            CAP, D0, D1, V0, V1, NATIVE, TYPE,
        )  # fmt: skip

    base = tl.where(most == float("-inf"), 0.0, most)
    none = total == 0.0
    if lse_ptr is not None:
        lse = tl.where(none, float("-inf"), base + tl.log2(tl.where(none, 1.0, total)))
        if SPLIT:
            tl.store(lse_ptr + ((begin + token) * splits + split) * heads + head, lse, mask=live)
        else:
            tl.store(lse_ptr + (begin + token) * heads + head, lse * 0.6931471805599453, mask=live)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=live, other=float("-inf"))
        total += tl.exp2(sink.to(tl.float32) * 1.4426950408889634 - base)
    share = tl.where(none, 0.0, 1.0 / tl.where(none, 1.0, total))[:, None]
    to = (
        out_ptr
        + v_first
        + (begin + token)[:, None] * out_token_stride
        + head[:, None] * out_head_stride
    )
    if SPLIT:
        to += split * heads * out_head_stride
        live = live & (total != 0.0)  # what an empty split leaves is not read
    _store(to + tl.arange(0, V0)[None, :], acc0 * share, live[:, None], NATIVE)
    if V1:
        _store(to + V0 + tl.arange(0, V1)[None, :], acc1 * share, live[:, None], NATIVE)


# --- Launcher -------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """How a program is laid out: rows (token, head) and keys of a tile, warps, pipeline stages; whether two programs share V of 512 values."""

    rows: int
    keys: int
    warps: int
    stages: int
    halves: bool = False


TILES: dict[str, dict[int, Tile]] = {
    # architecture -> the largest head dim that it is for -> tile
    "sm90": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 3), 512: Tile(128, 32, 8, 2, True)},
    "sm100": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 2), 512: Tile(128, 32, 8, 2, True)},
    "sm120": {64: Tile(128, 64, 8, 2), 128: Tile(128, 32, 8, 2), 256: Tile(64, 32, 8, 2), 512: Tile(32, 16, 8, 2)},
    "gfx950": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 4, 1), 512: Tile(64, 32, 8, 1)},
    # The interpreter: small, so that tests have several tiles.
    "cpu": {512: Tile(16, 16, 4, 1)},
}  # fmt: skip


LESS = {"sm90": Tile(64, 32, 8, 2), "sm100": Tile(64, 32, 8, 2, True)}
"""Where 128 rows with half of V do not fit: beside them shared memory holds neither a mask's tiles nor more of V."""


def tile_of(arch: str, dim: int, dim_v: int, masked: bool = False) -> Tile:
    """The tile for head dims on an architecture (``"sm90"``, …, ``"cpu"``), beside a mask or without one."""
    tile = next(tile for limit, tile in TILES[arch].items() if max(dim, dim_v) <= limit)
    if tile.halves and (masked or 256 < dim_v < 512):
        return LESS[arch]
    return tile


def parts(dim: int) -> tuple[int, int]:
    """A head dim as one or two powers of two of at most 256 values, the larger first; ValueError where it is no such sum."""
    first = min(256, 1 << (dim.bit_length() - 1)) if dim > 0 else 0
    rest = dim - first
    if first < 16 or rest & (rest - 1) or 0 < rest < 16 or rest > 256:
        raise ValueError(
            f"head dim {dim} is neither a power of two from 16 to 512 nor a sum of two of 16 … 256"
        )
    return first, rest


def _arch(device: torch.device) -> str:
    """Key of `TILES`; of a GPU that is not named the one with the least shared memory."""
    if device.type == "cpu":
        return "cpu"
    if torch.version.hip is not None:
        return "gfx950"
    major = torch.cuda.get_device_capability(device)[0]
    return {9: "sm90", 10: "sm100"}.get(major, "sm120")


def options_of(arch: str, tile: Tile) -> dict[str, int]:
    """Launch options. On gfx950 one wave a SIMD has all 512 registers, and products of 16 × 16 keep the output of D 512 in them."""
    amd = {"matrix_instr_nonkdim": 16, "waves_per_eu": 1} if arch == "gfx950" else {}
    return {"num_warps": tile.warps, "num_stages": tile.stages, **amd}


def _launch(call: _Call, *, tile: Tile | None = None, splits: int = 1, skip: bool = True) -> None:
    """Start the kernel. With more than one split, `call` has room for parts in `out` and `lse`, no sinks, and the tile has no halves."""
    q, k, v, k_pool, v_pool = call.q, call.k, call.v, call.k_pool, call.v_pool
    tokens, heads, dim = q.shape
    kv_heads, dim_v = v.shape[1], v.shape[2]
    batch, group = len(call.qo_indptr) - 1, heads // kv_heads
    arch = _arch(q.device)
    # Operands of fp32 products lie in registers and take twice the shared memory: every GPU has room for the smallest tile.
    exact = q.dtype == torch.float32
    tile = tile or tile_of("cpu" if exact else arch, dim, dim_v, call.mask is not None)
    d0, d1 = parts(dim)
    v0, v1 = parts(dim_v)
    halves = 2 if tile.halves and v1 == v0 else 1
    factor = call.sm_scale * (2 / call.logit_cap if call.logit_cap else 1.0) * LOG2E
    _extend_attention_kernel[(tokens * group // tile.rows + batch, kv_heads, halves * splits)](
        q,
        k,
        v,
        k_pool,
        v_pool,
        call.qo_indptr,
        call.kv_indptr,
        call.kv_indices,
        call.mask,
        call.mask_indptr,
        call.mask_offsets,
        call.sinks,
        call.out,
        call.lse,
        *(stride for x in (q, k, v, k_pool, v_pool, call.out) for stride in x.stride()[:2]),
        heads,
        batch,
        tokens,
        len(call.kv_indices),
        len(k_pool),
        0 if call.window is None else min(call.window, 2**31 - 1),
        splits,
        factor * call.k_scale,
        factor,
        call.logit_cap * LOG2E,
        call.v_scale,
        GROUP=group,
        D0=d0,
        D1=d1,
        V0=v0,
        V1=v1 if halves == 1 else 0,
        CAUSAL=call.causal,
        WINDOW=call.window is not None,
        CAP=call.logit_cap > 0,
        MASK_PREFIX=call.mask is not None and call.mask_prefix,
        SPLIT=splits > 1,
        SKIP=skip,
        ROWS=tile.rows,
        KEYS=tile.keys,
        NATIVE=q.device.type != "cpu",
        **options_of(arch, tile),
    )


# --- Public function ------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """A checked call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_pool: torch.Tensor  # uint8 where it holds FP8
    v_pool: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    mask: torch.Tensor | None  # uint8
    mask_indptr: torch.Tensor | None
    mask_offsets: torch.Tensor | None
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None
    sm_scale: float
    causal: bool
    window: int | None
    mask_prefix: bool
    logit_cap: float
    k_scale: float
    v_scale: float


def extend_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    *,
    sm_scale: float,
    causal: bool = True,
    window: int | None = None,
    mask: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
    mask_offsets: torch.Tensor | None = None,
    mask_prefix: bool = False,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    with_lse: bool = False,
    impl: Impl | None = None,
) -> Extended:
    """Attention of ragged chunks of new tokens over their cached prefixes and themselves; see the module.

    Args:
        q: bf16 or fp32 [tokens, heads, D], heads a multiple of kv_heads. In every tensor the values of a head are contiguous, other strides are free.
        k, v: in q's type, [tokens, kv_heads, D] and [tokens, kv_heads, D_v]: the chunks' own keys and values.
        k_pool, v_pool: [slots, kv_heads, D] and [slots, kv_heads, D_v], both in q's type or both float8_e4m3fn.
        qo_indptr, kv_indptr: int32 or int64 [requests + 1], ascending.
        kv_indices: int32 or int64 [n], slot ids of the prefixes.
        sm_scale: positive; multiplies scores.
        causal, window, mask, mask_prefix: what a token sees. `mask` is uint8 or bool, flat; `mask_indptr` int32 or int64 [≥ requests],
            `mask_offsets` likewise or None. A mask that shows later tokens of the chunk wants ``causal=False``.
        logit_cap: 0 is none.
        sinks: fp32 or bf16 [heads].
        k_scale, v_scale: of the pools.
        out: written where given, [tokens, heads, D_v] in q's type.
        with_lse: also return lse.
        impl: "cuda" is for Hopper, bf16 and D = D_v = 512, without mask and scales; None is "cuda" where that takes the call, else "triton".

    Raises:
        TypeError: a dtype is not the one named.
        ValueError: shapes, strides, devices or values do not fit.
        NotImplementedError: "cuda" does not take the call.
    """
    call = _checked(
        q, k, v, k_pool, v_pool, qo_indptr, kv_indptr, kv_indices, sm_scale, causal, window, mask, mask_indptr,
        mask_offsets, mask_prefix, logit_cap, sinks, k_scale, v_scale, out, with_lse,
    )  # fmt: skip
    if impl not in (None, "cuda", "triton"):
        raise ValueError(f"impl is 'cuda', 'triton' or None, got {impl!r}")
    reason = cuda.not_taken(call) if impl != "triton" else ""
    if impl == "cuda" and reason:
        raise NotImplementedError(f"impl='cuda' {reason}; use impl='triton'")
    if len(call.qo_indptr) > 1 and call.q.shape[0]:
        _launch(call) if reason or impl == "triton" else cuda.launch_call(call)
    return Extended(call.out, call.lse)


def _checked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
    causal: bool,
    window: int | None,
    mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    mask_offsets: torch.Tensor | None,
    mask_prefix: bool,
    logit_cap: float,
    sinks: torch.Tensor | None,
    k_scale: float,
    v_scale: float,
    out: torch.Tensor | None,
    with_lse: bool,
) -> _Call:
    if q.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"q: expected bfloat16 or float32, got {q.dtype}")
    if q.dim() != 3 or v.dim() != 3:
        raise ValueError(
            f"q and v: expected [tokens, heads, dim], got {list(q.shape)} and {list(v.shape)}"
        )
    tokens, heads, dim = q.shape
    kv_heads, dim_v = v.shape[1:]
    parts(dim), parts(dim_v)
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"q: {heads} heads are no multiple of {kv_heads} KV heads")
    if tokens * heads + 128 * len(qo_indptr) >= 2**31:
        raise ValueError(f"q: {tokens} tokens of {heads} heads are too many for one call")
    own, pools = (q.dtype,), (q.dtype, torch.float8_e4m3fn)
    slots = k_pool.shape[0]
    if out is None:
        out = torch.empty((tokens, heads, dim_v), dtype=q.dtype, device=q.device)
    for name, x, types, shape in (
        ("q", q, own, (tokens, heads, dim)),
        ("k", k, own, (tokens, kv_heads, dim)),
        ("v", v, own, (tokens, kv_heads, dim_v)),
        ("k_pool", k_pool, pools, (slots, kv_heads, dim)),
        ("v_pool", v_pool, (k_pool.dtype,), (slots, kv_heads, dim_v)),
        ("out", out, own, (tokens, heads, dim_v)),
    ):
        if x.dtype not in types:
            raise TypeError(f"{name}: expected {' or '.join(map(str, types))}, got {x.dtype}")
        if tuple(x.shape) != shape or x.device != q.device:
            raise ValueError(
                f"{name}: expected {list(shape)} on {q.device}, got {list(x.shape)} on {x.device}"
            )
        if x.stride(2) != 1:
            raise ValueError(
                f"{name}: values of a head must lie side by side, got strides {x.stride()}"
            )
    if (mask is None) != (mask_indptr is None) or (mask is None and mask_offsets is not None):
        raise ValueError("give mask and mask_indptr together, mask_offsets only with them")
    if mask is not None and mask.dtype not in (torch.uint8, torch.bool):
        raise TypeError(f"mask: expected uint8 or bool, got {mask.dtype}")
    if qo_indptr.dim() != 1 or not len(qo_indptr):
        raise ValueError(f"qo_indptr: expected [requests + 1], got {list(qo_indptr.shape)}")
    requests = len(qo_indptr) - 1
    for name, table, least in (
        ("qo_indptr", qo_indptr, requests + 1),
        ("kv_indptr", kv_indptr, requests + 1),
        ("kv_indices", kv_indices, 0),
        ("mask_indptr", mask_indptr, requests),
        ("mask_offsets", mask_offsets, requests),
    ):
        if table is None:
            continue
        if table.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: expected int32 or int64, got {table.dtype}")
        if table.dim() != 1 or len(table) < least or table.device != q.device:
            raise ValueError(
                f"{name}: expected at least {least} entries on {q.device}, got {list(table.shape)} on {table.device}"
            )
    if sinks is not None:
        if sinks.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"sinks: expected float32 or bfloat16, got {sinks.dtype}")
        if tuple(sinks.shape) != (heads,) or sinks.device != q.device:
            raise ValueError(
                f"sinks: expected [{heads}] on {q.device}, got {list(sinks.shape)} on {sinks.device}"
            )
    for name, value in (("sm_scale", sm_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is positive, got {value}")
    if not (logit_cap >= 0 and math.isfinite(logit_cap)):
        raise ValueError(f"logit_cap is positive, or 0 for none, got {logit_cap}")
    if window is not None and window < 0:
        raise ValueError(f"window is at least 0, or None for none, got {window}")
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device) if with_lse else None
    if k_pool.dtype == torch.float8_e4m3fn:
        k_pool, v_pool = k_pool.view(torch.uint8), v_pool.view(torch.uint8)
    if mask is not None:
        mask = mask.contiguous().view(torch.uint8).flatten()

    def flat(table: torch.Tensor | None) -> torch.Tensor | None:
        return None if table is None else table.contiguous()  # a copy only where it is a slice

    return _Call(
        q, k, v, k_pool, v_pool, qo_indptr.contiguous(), kv_indptr.contiguous(), kv_indices.contiguous(),
        mask, flat(mask_indptr), flat(mask_offsets), flat(sinks), out, lse, sm_scale, causal, window, mask_prefix,
        logit_cap, k_scale, v_scale,
    )  # fmt: skip
