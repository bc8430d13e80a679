# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA decode that reads packed rows: 4-bit rows of 352 or 288 bytes, the engine's FP8 rows of 656 or 528.

*What*      out = softmax(sm_scale · q · Kᵀ) · V over the rows that a query names, K = [latent, rope], V = latent; lse = log Σ exp of the
            scaled scores. With a sink s of a head, out is multiplied by exp(lse) / (exp(lse) + exp(s)); lse is without it.
*Shapes*    q [requests, queries, heads, 512 + rope] bf16, queries 1 … 8 (drafts under verification), heads 1 … 128; pool [slots, width]
            uint8, the width is the format (rope 64 in 352 and 656, none in 288 and 528); out [requests, queries, heads, 512] bf16;
            lse [requests, queries, heads] fp32.
*Rows*      either `index` [requests, queries, k], any k ≥ 1, int32 or int64: -1 anywhere and ids outside the pool are no rows, an id
            counts as often as it stands; or `page_table` [requests, pages] of pages of 64 slots with `lengths` [requests] int32: query j of
            s sees the first length - (s - 1 - j) tokens. A query without rows gives zeros and lse -inf. Slots that nobody names are not
            read, so NaN in them spreads nowhere; NaN in a named row makes NaN.
*Scale*     `latent_scale`, a power of two, is what `kv4_write` was given as global scale: it multiplies the latent part of q and the output.
*Layout*    `numinous_tooling.formats`. Splits leave partial outputs in fp32 [tokens, splits, heads, 512] and lse to base 2; on Hopper 2, 4, 8
            or 16 of them are a cluster of blocks and join them in shared memory.
*Bytes*     a query reads k × width, and its q and out; FLOPs 2 · heads · k · (512 + rope + 512). At k 2048 and 4.25 TB/s a query's rows take
            0.17 µs (352) or 0.32 µs (656); its FLOPs at 790 TFLOP/s take 0.36 µs with 64 heads, 0.09 with 16.
*Numerics*  scores in fp32 of bf16 products. 4-bit rows are exact in bf16, FP8 rows are rounded to bf16 once; probabilities are rounded to
            bf16, their sum is not. Splits are joined in order: the same bits every time for the same number of splits.
*Versions*  "cuda" for sm90a (WGMMA), sm120a (mma.sync, ≤ 99 KB of shared memory) and, where it is asked for, sm100 and sm103 (tcgen05),
            all in csrc/sparse_mla_decode; on sm90a two kernels for 4-bit rows, "packed" and, for few rows of many heads, "decoded"; "triton"
            everywhere; docs/deep-dives/sparse-mla-decode.md.
*Arch*      see catalog.py.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
import triton
import triton.language as tl

from numinous_kv_cache_4bit.kernels.codec import (
    check_global_scale,
    e4m3_value,
    int8_value,
    scale_value,
    step_value,
)
from numinous_kv_cache_4bit.kernels.sparse_mla_binaries import (
    FORMATS,
    mma_binary,
    packed_binary,
    source_binary,
    tcgen05_binary,
)
from numinous_tooling import launch
from numinous_tooling.device.convert import decode_bf16, encode_bf16
from numinous_tooling.formats import LATENT_DIM, RowFormat
from numinous_tooling.workbench import Tensors, Traffic

__all__ = ["Decoded", "reference", "row_format_of", "sparse_mla_decode", "traffic"]

PACKAGE = "numinous_kv_cache_4bit"
PAGE = 64
MAX_QUERIES, MAX_HEADS = 8, 128

Impl = Literal["cuda", "decoded", "packed", "triton"]


class Decoded(NamedTuple):
    """Result: `out` [requests, queries, heads, 512] bf16 and `lse` [requests, queries, heads] fp32, natural logarithm."""

    out: torch.Tensor
    lse: torch.Tensor


def row_format_of(width: int) -> RowFormat:
    """The format of rows of that many bytes; ValueError naming those that this kernel reads."""
    for row in FORMATS:
        if row.width == width:
            return row
    known = ", ".join(f"{row.width} ({row.name})" for row in FORMATS)
    raise ValueError(f"rows of {width} bytes are not read by this kernel; known: {known}")


# --- Reference ------------------------------------------------------------------------------------------------------


def reference(
    q: torch.Tensor,
    pool: torch.Tensor,
    *,
    sm_scale: float,
    index: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    latent_scale: float = 1.0,
) -> Tensors:
    """Specification in torch, fp64 from exactly decoded rows.

    Returns:
        ``out`` and ``lse``, and ``magnitude``: Σ p · |v| like out, which the rounding of p and v is proportional to.
    """
    requests, queries, heads, _ = q.shape
    row, slots = row_format_of(pool.shape[-1]), pool.shape[0]
    if index is None:
        assert page_table is not None
        assert lengths is not None
        index = _dense_ids(page_table.long(), lengths.long(), queries)
    ids = index.reshape(requests * queries, index.shape[-1]).long()
    outs, lses, sizes = [], [], []
    for one, query in zip(ids, q.flatten(0, 1).double(), strict=True):
        valid = (one >= 0) & (one < slots)
        rows = torch.where(valid[:, None], pool[torch.where(valid, one, 0)], 0).to(torch.uint8)
        latent, rope = _decoded(row, rows)
        scores = (query[:, :LATENT_DIM] * latent_scale) @ latent.T + query[:, LATENT_DIM:] @ rope.T
        scores = torch.where(valid, sm_scale * scores, -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        total = lse if sink is None else torch.logaddexp(lse, sink.double())
        # exp(-inf - -inf) of a query without rows.
        weights = torch.where(valid, (scores - total[:, None]).exp(), 0.0)
        outs.append(latent_scale * (weights @ latent))
        sizes.append(latent_scale * (weights @ latent.abs()))
        lses.append(lse)
    shape = (requests, queries, heads, LATENT_DIM)

    def stacked(parts: list[torch.Tensor], *size: int) -> torch.Tensor:
        return torch.stack(parts).view(size) if parts else q.new_zeros(size, dtype=torch.float64)

    return {
        "out": stacked(outs, *shape),
        "lse": stacked(lses, *shape[:3]),
        "magnitude": stacked(sizes, *shape),
    }


def _dense_ids(pages: torch.Tensor, lengths: torch.Tensor, queries: int) -> torch.Tensor:
    width = pages.shape[1] * PAGE
    here = torch.arange(width, device=pages.device)
    slots = pages.repeat_interleave(PAGE, dim=1) * PAGE + here % PAGE
    slots = torch.where(pages.repeat_interleave(PAGE, dim=1) < 0, -1, slots)
    seen = lengths[:, None] - torch.arange(queries - 1, -1, -1, device=pages.device)
    return torch.where(here < seen[..., None], slots[:, None, :], -1)


def _decoded(row: RowFormat, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent and rope in fp64 without any rounding."""
    if row.field("latent").encoding == "e2m1":
        latent, rope = row.unpack(rows, dtype=torch.float32)
        return latent.double(), rope.double()
    fields = row.split(rows)
    codes = fields["latent"].view(torch.float8_e4m3fn).double()
    latent = codes * fields["scales"].double().repeat_interleave(row.group, dim=-1)
    rope = fields["rope"].double() if row.rope_dim else latent.new_empty((len(rows), 0))
    return latent, rope


def traffic(
    requests: int, queries: int, heads: int, width: int, rows: int, id_bytes: int, *, dense: bool = False
) -> Traffic:  # fmt: skip
    """Compulsory bytes and FLOPs with `rows` distinct rows for a query (dense: for a request's queries together)."""
    row, tokens = row_format_of(width), requests * queries
    values = LATENT_DIM + row.rope_dim
    read = (requests if dense else tokens) * rows * width
    ids = (
        requests * -(-rows // PAGE) * id_bytes + 4 * requests if dense else tokens * rows * id_bytes
    )
    return Traffic(
        bytes=read + ids + tokens * heads * (2 * values + 2 * LATENT_DIM + 4),
        flops=2 * tokens * heads * rows * (values + LATENT_DIM),
        unit="bf16",
    )


# --- Splits ---------------------------------------------------------------------------------------------------------

MAX_SPLITS = 64
START_TILES = 6  # what a block takes before and after its tiles: 11 µs of version 2 on an H200, in tiles of 1.8 µs (derived)
PART_TILES = 3  # what writing and joining a part takes: 5 µs
JOIN_TILES = (
    1  # what a cluster's join takes, times the binary logarithm of its blocks: 2 to 7 µs (derived)
)
CLUSTERS = (2, 4, 8, 16)  # splits that are a cluster; 16 where a GPC has so many multiprocessors


@functools.lru_cache(maxsize=4096)  # every layer of a step asks the same
def choose_splits(blocks: int, tiles: int, processors: int) -> int:
    """Splits of each of `blocks` lists of `tiles` tiles that take the fewest turns of all processors; the fewest of equals."""

    def turns(splits: int) -> int:
        waves = -(-blocks * splits // processors)
        return waves * (-(-tiles // splits) + START_TILES + (PART_TILES if splits > 1 else 0))

    return min(range(1, max(1, min(tiles, MAX_SPLITS)) + 1), key=turns)


class Split(NamedTuple):
    """The first `whole` lists have a block for each group of heads, the others `splits`, of which every `cluster` are joined in shared memory;
    where these are not all, they leave parts to a second kernel."""

    whole: int
    splits: int
    cluster: int = 1


def split_last_turn(tokens: int, groups: int, tiles: int, places: Mapping[int, int]) -> Split:
    """Of `tokens` lists with `groups` blocks each: how many of the first stay whole, so that they fill turns of the GPU and need no join, and
    the splits of each of the others that take the fewest turns; the fewest of equals. `places`: blocks that the GPU runs at once, by
    the size of their clusters; of size 1 as many as it has multiprocessors."""
    blocks = tokens * groups

    def made(splits: int, cluster: int) -> tuple[float, Split]:
        join = JOIN_TILES * math.log2(cluster)
        if splits > cluster:
            join += PART_TILES / cluster  # a part a cluster
        whole = blocks // places[cluster] * places[cluster] // groups
        turns = -(-(tokens - whole) * groups * splits // places[cluster])
        full = -(-whole * groups // places[cluster])
        took = full * (tiles + START_TILES) + turns * (-(-tiles // splits) + START_TILES + join)
        return took, Split(whole, splits, cluster) if splits > 1 else Split(tokens, 1)

    most = max(1, min(tiles, MAX_SPLITS))
    choices = [made(n, c) for n in range(1, most + 1) for c in places if n % c == 0]
    return min(choices, key=lambda one: one[0])[1]


@functools.lru_cache(maxsize=4096)  # 0.2 ms, and every layer of a step asks the same
def _kept_split(tokens: int, groups: int, tiles: int, *places: tuple[int, int]) -> Split:
    return split_last_turn(tokens, groups, tiles, dict(places))


def join_threads(splits: int) -> int:
    """Threads of a block of `combine`: 64 of each of `groups_of_join` of layout.cuh."""
    return 64 if splits <= 4 else 256


def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; an H200's where there is none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _places(plan: Schedule, row: RowFormat, device: torch.device) -> dict[int, int]:
    """`places` of `split_last_turn` for a Hopper kernel: a block has a multiprocessor, a cluster lies in one GPC, whose size is the chip's."""
    binary = packed_binary(row.width) if plan in PACKED else source_binary(row.width)
    kernel = launch.load(PACKAGE, binary, entry=plan.entry)
    shared = plan.shared(row)
    at_once = {n: n * kernel.clusters_at_once(n, plan.threads, shared) for n in CLUSTERS}
    return {1: processors_of(device), **{n: blocks for n, blocks in at_once.items() if blocks}}


# --- Triton ---------------------------------------------------------------------------------------------------------

BLOCK_N = 32


@triton.jit
def _half(row, valid, WIDTH: tl.constexpr, SECOND: tl.constexpr):
    """256 latent values [rows, 256] in fp32: of 4-bit rows the even or the odd ones, of FP8 rows the first or the second half."""
    column = tl.arange(0, 256)[None, :]
    mask = valid[:, None]
    if WIDTH < 512:
        codes = tl.load(row[:, None] + column, mask=mask, other=0).to(tl.uint32)
        codes = codes >> 4 if SECOND else codes
        bits = ((codes & 7) << 9) | ((codes & 8) << 12)
        value = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        scale = tl.load(row[:, None] + 256 + tl.arange(0, 32)[None, :], mask=mask, other=0)
        scale = scale_value(scale.to(tl.uint32)) * 16384.0  # 2^14: codes are fp16 in that unit
        wide = tl.broadcast_to(scale[:, :, None], [scale.shape[0], 32, 8])
    else:
        start = 256 if SECOND else 0
        codes = tl.load(row[:, None] + start + column, mask=mask, other=0).to(tl.uint32)
        value = e4m3_value(codes)
        scales = (row + 512).to(tl.pointer_type(tl.float32))[:, None] + start // 128
        scale = tl.load(scales + tl.arange(0, 2)[None, :], mask=mask, other=0.0)
        wide = tl.broadcast_to(scale[:, :, None], [scale.shape[0], 2, 128])
    return value * tl.reshape(wide, [scale.shape[0], 256])


@triton.jit
def _rope(row, valid, WIDTH: tl.constexpr):
    """Rope [rows, 64] in fp32."""
    column = tl.arange(0, 64)[None, :]
    mask = valid[:, None]
    if WIDTH == 352:
        ROWS: tl.constexpr = row.shape[0]
        # Byte loads: rows lie anywhere.
        place = tl.arange(0, 32)[None, :]
        scales = tl.load(row[:, None] + 256 + place, mask=mask, other=0).to(tl.uint32)
        bits = tl.where(place % 8 < 7, (scales >> 7) << (place % 8), 0)
        step = step_value(tl.sum(tl.reshape(bits, [ROWS, 4, 8]), axis=2))
        codes = tl.load(row[:, None] + 288 + column, mask=mask, other=0).to(tl.uint32)
        step = tl.broadcast_to(step[:, :, None], [ROWS, 4, 16])
        return int8_value(codes, tl.reshape(step, [ROWS, 64]))
    else:
        bits = (row + 528).to(tl.pointer_type(tl.uint16))
        return decode_bf16(tl.load(bits[:, None] + column, mask=mask, other=0))


@triton.jit
def _narrowed(x, NATIVE: tl.constexpr):
    """bf16 for the tensor cores; the interpreter's bf16 product is wrong, so there fp32."""
    if NATIVE:
        return x.to(tl.bfloat16)
    else:
        return x


@triton.jit
def _load_q(at, mask, factor, NATIVE: tl.constexpr):
    bits = tl.load(at, mask=mask, other=0.0).to(tl.uint16, bitcast=True)
    return _narrowed(decode_bf16(bits) * factor, NATIVE)


@triton.jit
def _dim(SECOND: tl.constexpr, WIDTH: tl.constexpr):
    """Latent dimensions of `_half`."""
    if WIDTH < 512:
        return tl.arange(0, 256) * 2 + (1 if SECOND else 0)
    else:
        return tl.arange(0, 256) + (256 if SECOND else 0)


@triton.jit(do_not_specialize=["queries", "heads", "width", "splits", "slots", "index_stride"])
def _sparse_mla_decode_kernel(
    q_ptr,  # bf16
    pool_ptr,  # uint8
    index_ptr,  # ids [tokens, width], or pages [requests, width / 64]
    lengths_ptr,  # [requests] int32
    sink_ptr,  # [heads] fp32
    out_ptr,  # [tokens, heads, 512] bf16, or parts [tokens, splits, heads, 512] fp32
    lse_ptr,  # [tokens, heads], or [tokens, splits, heads] to base 2
    q_request_stride,
    q_query_stride,
    q_head_stride,
    pool_stride,
    index_stride,
    slots,
    queries,
    heads,
    width,
    splits,
    scale_log2,
    latent_scale,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
    ROWS: tl.constexpr,  # of a tile: a divisor of 64
    DENSE: tl.constexpr,
    SPLIT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    token = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    request, query = token // queries, token % queries
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    live = head < heads
    length = width
    if DENSE:
        seen = tl.load(lengths_ptr + request) - (queries - 1 - query.to(tl.int32))
        length = tl.minimum(tl.maximum(seen, 0), width)
    tiles = tl.cdiv(length, ROWS)
    begin = (tiles.to(tl.int64) * split // splits).to(tl.int32)
    end = (tiles.to(tl.int64) * (split + 1) // splits).to(tl.int32)

    q_row = (
        q_ptr + request * q_request_stride + query * q_query_stride + head[:, None] * q_head_stride
    )
    mask = live[:, None]
    q_first = _load_q(q_row + _dim(False, WIDTH)[None, :], mask, latent_scale, NATIVE)
    q_second = _load_q(q_row + _dim(True, WIDTH)[None, :], mask, latent_scale, NATIVE)
    if ROPE:
        q_rope = _load_q(q_row + 512 + tl.arange(0, 64)[None, :], mask, 1.0, NATIVE)

    most = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    first = tl.zeros([HEADS, 256], tl.float32)
    second = tl.zeros([HEADS, 256], tl.float32)
    for tile in range(begin, end):
        at = tile * ROWS + tl.arange(0, ROWS)
        inside = at < length
        if DENSE:
            page = tl.load(index_ptr + request * index_stride + tile * ROWS // 64).to(tl.int64)
            ids = tl.where((page < 0) | (page > slots // 64), -1, page * 64 + at % 64)
        else:
            ids = tl.load(index_ptr + token * index_stride + at, mask=inside, other=-1).to(tl.int64)
        valid = inside & (ids >= 0) & (ids < slots)
        row = pool_ptr + tl.where(valid, ids, 0) * pool_stride
        k_first = _narrowed(_half(row, valid, WIDTH, False), NATIVE)  # [ROWS, 256]
        k_second = _narrowed(_half(row, valid, WIDTH, True), NATIVE)
        scores = tl.dot(q_first, tl.trans(k_first), input_precision="ieee")
        scores += tl.dot(q_second, tl.trans(k_second), input_precision="ieee")
        if ROPE:
            k_rope = _narrowed(_rope(row, valid, WIDTH), NATIVE)
            scores += tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
        scores = tl.where(valid[None, :], scores * scale_log2, float("-inf"))
        now = tl.maximum(most, tl.max(scores, axis=1))
        base = tl.where(now == float("-inf"), 0.0, now)
        shrink = tl.exp2(most - base)
        weights = tl.exp2(scores - base[:, None])
        most = now
        total = total * shrink + tl.sum(weights, axis=1)
        weights = _narrowed(weights, NATIVE)
        first = first * shrink[:, None] + tl.dot(weights, k_first, input_precision="ieee")
        second = second * shrink[:, None] + tl.dot(weights, k_second, input_precision="ieee")

    base = tl.where(most == float("-inf"), 0.0, most)
    none = total == 0.0
    lse = tl.where(none, float("-inf"), base + tl.log2(tl.where(none, 1.0, total)))
    if SPLIT:
        line = (token * splits + split) * heads + head
        tl.store(lse_ptr + line, lse, mask=live)
    else:
        line = token * heads + head
        tl.store(lse_ptr + line, lse * 0.6931471805599453, mask=live)
        if sink_ptr is not None:
            sink = tl.load(sink_ptr + head, mask=live, other=float("-inf"))
            total += tl.exp2(sink * 1.4426950408889634 - base)
    factor = tl.where(none, 0.0, latent_scale / tl.where(none, 1.0, total))[:, None]
    to = out_ptr + line[:, None] * 512
    if SPLIT:
        tl.store(to + _dim(False, WIDTH)[None, :], first * factor, mask=mask)
        tl.store(to + _dim(True, WIDTH)[None, :], second * factor, mask=mask)
    else:
        one = encode_bf16(first * factor, NATIVE).to(tl.bfloat16, bitcast=True)
        tl.store(to + _dim(False, WIDTH)[None, :], one, mask=mask)
        two = encode_bf16(second * factor, NATIVE).to(tl.bfloat16, bitcast=True)
        tl.store(to + _dim(True, WIDTH)[None, :], two, mask=mask)


@triton.jit(do_not_specialize=["heads", "splits"])
def _combine_kernel(
    part_ptr,  # [tokens, splits, heads, 512] fp32
    part_lse_ptr,  # [tokens, splits, heads], base 2
    sink_ptr,
    out_ptr,
    lse_ptr,
    heads,
    splits,
    NATIVE: tl.constexpr,
):
    token = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    column = tl.arange(0, 512)
    most = float("-inf")
    total = 0.0
    out = tl.zeros([512], tl.float32)
    for split in range(splits):
        line = (token * splits + split) * heads + head
        own = tl.load(part_lse_ptr + line)
        now = tl.maximum(most, own)
        base = tl.where(now == float("-inf"), 0.0, now)
        shrink, weight = tl.exp2(most - base), tl.exp2(own - base)
        part = tl.load(part_ptr + line * 512 + column)
        total = total * shrink + weight
        out = out * shrink + part * weight
        most = now
    base = tl.where(most == float("-inf"), 0.0, most)
    none = total == 0.0
    lse = tl.where(none, float("-inf"), base + tl.log2(tl.where(none, 1.0, total)))
    line = token * heads + head
    tl.store(lse_ptr + line, lse * 0.6931471805599453)
    if sink_ptr is not None:
        total += tl.exp2(tl.load(sink_ptr + head) * 1.4426950408889634 - base)
    out = tl.where(none, 0.0, out / tl.where(none, 1.0, total))
    tl.store(out_ptr + line * 512 + column, encode_bf16(out, NATIVE).to(tl.bfloat16, bitcast=True))


def triton_heads(heads: int) -> int:
    """Heads of a Triton program."""
    return 16 if heads <= 16 else 32


def _launch_triton(call: _Call) -> None:
    block = triton_heads(call.heads)
    groups = -(-call.heads // block)
    tiles = -(-call.width // BLOCK_N)
    splits = call.splits or choose_splits(call.tokens * groups, tiles, processors_of(call.q.device))
    out, lse = call.out, call.lse
    if splits > 1:
        out, lse = _parts(call, call.tokens, splits)
    native = call.q.device.type != "cpu"
    _sparse_mla_decode_kernel[(call.tokens * splits, groups)](
        call.q,
        call.pool,
        call.index,
        call.lengths,
        call.sink if splits == 1 else None,
        out,
        lse,
        *call.q.stride()[:3],
        call.pool.stride(0),
        call.index.stride(0),
        call.pool.shape[0],
        call.queries,
        call.heads,
        call.width,
        splits,
        call.sm_scale * math.log2(math.e),
        call.latent_scale,
        WIDTH=call.row.width,
        ROPE=call.row.rope_dim > 0,
        HEADS=block,
        ROWS=BLOCK_N,
        DENSE=call.lengths is not None,
        SPLIT=splits > 1,
        NATIVE=native,
        num_warps=8,
        num_stages=1,
    )
    if splits > 1:
        _combine_kernel[(call.tokens * call.heads,)](
            out,
            lse,
            call.sink,
            call.out,
            call.lse,
            call.heads,
            splits,
            NATIVE=native,
            num_warps=2,
        )


def _parts(call: _Call, tokens: int, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (tokens, splits, call.heads)
    out = torch.empty((*shape, LATENT_DIM), dtype=torch.float32, device=call.q.device)
    return out, torch.empty(shape, dtype=torch.float32, device=call.q.device)


# --- CUDA -----------------------------------------------------------------------------------------------------------

TILE = 64
HELD = 2.0**-12  # tiles hold 4-bit rows times this, see layout.cuh


Products = Literal["wgmma", "packed", "mma", "tcgen05"]
"""By which instructions; "packed" are WGMMA's with operands that consumers decode into registers."""

MADE_FOR: dict[tuple[int, int], Products] = {
    (9, 0): "wgmma",
    (10, 0): "tcgen05",
    (10, 3): "tcgen05",
    (12, 0): "mma",
}
"""Compute capability -> products that the CUDA version takes there. "mma" runs on 9.0, too, where tests put it in."""

BY_NAME: dict[Impl, Products] = {"decoded": "wgmma", "packed": "packed"}
"""Hopper's two kernels of 4-bit rows; `products_of` takes one of them."""

MANY_TILES = 4  # of each multiprocessor, from which on a block of "packed", whose start is longer and whose tiles are shorter, ends sooner (run: 2 lose 4 %, 8 gain 8 %)

ON_REQUEST: tuple[Products, ...] = ("mma", "tcgen05")
"""Taken where impl="cuda" asks for them, and nowhere else: no GPU has run them, and no feature proves them at boot as it does WGMMA."""


class Schedule(NamedTuple):
    """How heads are laid out: kernel, its threads, heads of a block."""

    entry: str
    threads: int
    heads: int

    def shared(self, row: RowFormat) -> int:
        """Bytes of dynamic shared memory: `Plan::kBytes` of layout.cuh, `PackedPlan::kBytes` beside it, `TensorBlockPlan::kBytes` of layout_sm100.cuh,
        `MmaPlan::kBytes` of kernel_mma.cu."""
        panels = (LATENT_DIM + row.rope_dim) // 64
        if self.entry.startswith("packed"):
            stage = TILE * row.width + 4 * (32 * 40 + 24)  # rows and their scales
            fixed = (panels + 2) * self.heads * 128  # q and twice P
            rest = 4 * self.heads * 4 + 16 + 7 * 4 * 4 + 16 * 8 + 1024
            stages = min(7, (232448 - rest - fixed) // stage)
            return fixed + stages * (stage + 32) + 4 * self.heads * 4 + 16 + 2 * 8 + 1024
        tile, bias, rest = panels * TILE * 128, TILE * 4, 32 + 1024
        if self.entry.startswith("mma"):
            half = TILE // 2
            parts, p = 4 * self.heads * (half + 8) * 4, self.heads * (2 * half + 16)
            return tile + parts + p + bias + self.heads * 4 + rest
        p = (2 if self.entry.startswith("narrow") else 1) * self.heads * 128
        # Hopper's fifth to tenth barrier; four barriers and the address of tensor memory.
        more = 40 if self.entry.startswith("heads") else 48
        return panels * self.heads * 128 + 2 * tile + p + 2 * bias + 1024 + rest + more


NARROW_16, NARROW_32 = Schedule("narrow_16", 512, 16), Schedule("narrow_32", 512, 32)
WIDE = Schedule("wide", 512, 64)
PACKED = tuple(Schedule(f"packed_{heads}", 384, heads) for heads in (8, 16, 32, 64))
MMA_16, MMA_32 = Schedule("mma_16", 512, 16), Schedule("mma_32", 384, 32)
HEADS_16, HEADS_32, HEADS_64 = (Schedule(f"heads_{heads}", 544, heads) for heads in (16, 32, 64))


def schedule(heads: int, products: Products = "wgmma") -> Schedule:
    """For that many heads."""
    if products == "packed":
        return next((plan for plan in PACKED if heads <= plan.heads), PACKED[-1])
    if products == "mma":
        return MMA_16 if heads <= 16 else MMA_32
    if products == "tcgen05":
        return HEADS_16 if heads <= 16 else HEADS_32 if heads <= 32 else HEADS_64
    return NARROW_16 if heads <= 16 else NARROW_32 if heads <= 32 else WIDE


def products_of(
    made_for: Products, row: RowFormat, heads: int, tokens: int, width: int, processors: int
) -> Products:
    """Which kernel serves `tokens` lists of at most `width` rows. On Hopper 4-bit rows are "packed"'s, but for few rows of many heads."""
    if made_for != "wgmma" or row.stock:
        return made_for
    groups, tiles = -(-heads // 64), -(-width // TILE)
    few = heads > 32 and tokens * groups * tiles < MANY_TILES * processors
    return "wgmma" if few else "packed"


def other_impl(row: RowFormat, heads: int, device: torch.device) -> Impl | None:
    """The kernel that more tokens would take there than one does; None where there is one only."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return "packed" if capability == (9, 0) and not row.stock and heads > 32 else None


class _Params(ctypes.Structure):
    """`Params` of common.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "pool", "index", "lengths", "sink")),
        *((name, ctypes.c_void_p) for name in ("out", "lse", "part_out", "part_lse", "debug")),
        *((name, ctypes.c_int64) for name in ("q_request_stride", "q_query_stride", "q_head_stride")),
        *((name, ctypes.c_int64) for name in ("pool_stride", "index_stride", "slots")),
        *((name, ctypes.c_int) for name in ("tokens", "queries", "heads", "width", "whole", "splits")),
        *((name, ctypes.c_int) for name in ("cluster_log2", "wide_ids")),
        *((name, ctypes.c_float) for name in ("scale_log2", "out_scale")),
        ("q_factor", ctypes.c_uint32),
    )  # fmt: skip


def cuda_params(call: _Call, split: Split, debug: Any = None) -> tuple[_Params, Any]:
    """Arguments of the kernels of csrc/sparse_mla_decode, and the parts that they name."""
    left, number = call.tokens - split.whole, split.splits // split.cluster
    parts = _parts(call, left, number) if left and number > 1 else (None, None)
    held = HELD if call.row.field("latent").encoding == "e2m1" else 1.0
    factor = (
        torch.tensor(call.latent_scale, dtype=torch.bfloat16, device="cpu").view(torch.int16).item()
    )
    tensors = (
        call.q, call.pool, call.index, call.lengths, call.sink, call.out, call.lse, *parts, debug
    )  # fmt: skip
    params = _Params(
        *(None if t is None else t.data_ptr() for t in tensors),
        *call.q.stride()[:3],
        call.pool.stride(0),
        call.index.stride(0),
        call.pool.shape[0],
        call.tokens,
        call.queries,
        call.heads,
        call.width,
        split.whole,
        number,
        split.cluster.bit_length() - 1,
        int(call.index.dtype == torch.int64),
        call.sm_scale * math.log2(math.e) / held,
        call.latent_scale / held,
        int(factor) * 0x10001,
    )  # fmt: skip
    return params, parts


def cuda_launches(call: _Call, params: _Params, plan: Schedule) -> list[tuple[str, int, int, int]]:
    """Kernels of a call in order: name, blocks, threads of a block, bytes of its dynamic shared memory."""
    rest = call.tokens - params.whole
    lists = params.whole + rest * (params.splits << params.cluster_log2)
    blocks = lists * -(-call.heads // plan.heads)
    launches = [(plan.entry, blocks, plan.threads, plan.shared(call.row))]
    if rest and params.splits > 1:
        launches.append(("combine", rest * call.heads, join_threads(params.splits), 0))
    return launches


def _split_of(call: _Call, plan: Schedule, clusters: bool) -> Split:
    if call.splits == 1:
        return Split(call.tokens, 1)
    places = {1: processors_of(call.q.device)}
    if clusters:
        places = _places(plan, call.row, call.q.device)
    if call.splits is not None:
        return Split(0, call.splits, call.splits if call.splits in places else 1)
    groups, tiles = -(-call.heads // plan.heads), -(-call.width // TILE)
    return _kept_split(call.tokens, groups, tiles, *places.items())


def _launch_cuda(
    call: _Call, debug: Any = None, split: Split | None = None, products: Products | None = None
) -> None:
    """`split` is for who compares them; left out, the call's or the best."""
    capability = torch.cuda.get_device_capability(call.q.device)
    products = products or products_of(
        MADE_FOR[capability],
        call.row,
        call.heads,
        call.tokens,
        call.width,
        processors_of(call.q.device),
    )
    plan = schedule(call.heads, products)
    with torch.cuda.device(call.q.device):
        stream = torch.cuda.current_stream().cuda_stream
        split = split or _split_of(call, plan, products in ("wgmma", "packed"))
        params, _parts_kept = cuda_params(call, split, debug)
        if products == "mma":
            arch = launch.architectures(capability)[0]
            binary = mma_binary(call.row.width, arch, debug=debug is not None)
        else:
            compiled = {"wgmma": source_binary, "packed": packed_binary, "tcgen05": tcgen05_binary}
            binary = compiled[products](call.row.width, debug=debug is not None)
        for entry, blocks, threads, shared in cuda_launches(call, params, plan):
            kernel = launch.load(PACKAGE, binary, entry=entry)
            kernel(
                (blocks,), threads, (params,), shared=shared, stream=stream, pdl=entry == "combine",
                cluster=(split.cluster,) if split.cluster > 1 and entry == plan.entry else None,
            )  # fmt: skip


# --- Public function ------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """A checked call."""

    q: torch.Tensor
    pool: torch.Tensor
    index: torch.Tensor  # ids [tokens, width] or pages [requests, pages]
    lengths: torch.Tensor | None
    sink: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    row: RowFormat
    tokens: int
    queries: int
    heads: int
    width: int  # entries of a list at most
    sm_scale: float
    latent_scale: float
    splits: int | None


def sparse_mla_decode(
    q: torch.Tensor,
    pool: torch.Tensor,
    *,
    sm_scale: float,
    index: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    latent_scale: float = 1.0,
    splits: int | None = None,
    impl: Impl | None = None,
) -> Decoded:
    """Attention of a few queries of each request over named rows of a packed MLA cache.

    Args:
        q: bf16 [requests, queries, heads, 512 + rope], values of a head contiguous; after the absorbed up-projection.
        pool: uint8 [slots, width] or [slots, 1, width], the bytes of a row contiguous.
        sm_scale: positive; multiplies scores.
        index: int32 or int64 [requests, queries, k]; or
        page_table, lengths: int32 or int64 [requests, pages] and int32 [requests].
        sink: fp32 [heads].
        latent_scale: the rows' global scale, a power of two.
        splits: of a list of rows over blocks, 1 … 64; None chooses by the GPU's multiprocessors.
        impl: None takes "cuda" on sm90 where it takes the call, else "triton"; "cuda" takes sm100, sm103 and sm120, too. It has two kernels
            for 4-bit rows on sm90 and takes the faster one; "decoded" and "packed" name them.

    Raises:
        TypeError: a dtype is not the one named.
        ValueError: shapes, strides, devices or values do not fit.
        NotImplementedError: "cuda" for another GPU, or for rows that do not start at multiples of 16 bytes.
    """
    call = _checked(q, pool, sm_scale, index, page_table, lengths, sink, latent_scale, splits)
    if impl is not None and impl not in get_args(Impl):
        raise ValueError(f"impl is {', '.join(map(repr, get_args(Impl)))} or None, got {impl!r}")
    products = BY_NAME.get(impl) if impl else None
    reason = "" if impl == "triton" else _not_cuda(call, impl, products)
    if impl not in (None, "triton") and reason:
        raise NotImplementedError(f"impl={impl!r} {reason}; use impl='triton'")
    if call.tokens and call.heads:
        if reason or impl == "triton":
            _launch_triton(call)
        else:
            _launch_cuda(call, products=products)
    return Decoded(call.out, call.lse)


def _not_cuda(call: _Call, impl: Impl | None, products: Products | None) -> str:
    """Why a CUDA version does not take a call; empty where it does. Without `impl`, products of `ON_REQUEST` are not taken."""
    if call.q.device.type != "cuda" or torch.version.hip is not None:
        return f"needs tensors on an NVIDIA GPU, got {call.q.device}"
    capability = torch.cuda.get_device_capability(call.q.device)
    if capability not in MADE_FOR:
        known = ", ".join(f"{major}.{minor}" for major, minor in MADE_FOR)
        return f"is made for compute capability {known}, this is {capability[0]}.{capability[1]}"
    if products and (MADE_FOR[capability] != "wgmma" or call.row.stock):
        return f"is made for 4-bit rows and compute capability 9.0, this is {capability[0]}.{capability[1]}, {call.row.name}"
    if MADE_FOR[capability] in ON_REQUEST and impl is None:
        return "has not run on such a GPU and waits to be asked for"
    if call.q.data_ptr() % 16 or any(stride % 8 for stride in call.q.stride()[:3]):
        return f"needs heads of q at multiples of 16 bytes, got strides {call.q.stride()}"
    if call.pool.data_ptr() % 16 or call.pool.stride(0) % 16:
        return f"needs rows of pool at multiples of 16 bytes, got strides {call.pool.stride()}"
    return ""


def _checked(
    q: torch.Tensor,
    pool: torch.Tensor,
    sm_scale: float,
    index: torch.Tensor | None,
    page_table: torch.Tensor | None,
    lengths: torch.Tensor | None,
    sink: torch.Tensor | None,
    latent_scale: float,
    splits: int | None,
) -> _Call:
    if q.dtype != torch.bfloat16:
        raise TypeError(f"q: expected bfloat16, got {q.dtype}")
    if pool.dtype != torch.uint8:
        raise TypeError(f"pool: expected uint8, got {pool.dtype}")
    if pool.dim() == 3 and pool.shape[1] == 1:
        pool = pool[:, 0]
    if pool.dim() != 2 or pool.device != q.device:
        raise ValueError(
            f"pool: expected [slots, width] on {q.device}, got {list(pool.shape)} on {pool.device}"
        )
    row = row_format_of(pool.shape[1])
    if pool.stride(1) != 1 or (row.stock and (pool.data_ptr() % 4 or pool.stride(0) % 4)):
        raise ValueError(
            f"pool: bytes of a row must lie side by side, FP8 rows at multiples of 4, got strides {pool.stride()}"
        )
    dim = LATENT_DIM + row.rope_dim
    if q.dim() != 4 or q.shape[3] != dim:
        raise ValueError(
            f"q: expected [requests, queries, heads, {dim}] for rows of {row.width} bytes, got {list(q.shape)}"
        )
    if q.stride(3) != 1:
        raise ValueError(f"q: values of a head must lie side by side, got strides {q.stride()}")
    requests, queries, heads = q.shape[:3]
    if not 1 <= queries <= MAX_QUERIES or not 1 <= heads <= MAX_HEADS:
        raise ValueError(
            f"q: 1 … {MAX_QUERIES} queries and 1 … {MAX_HEADS} heads, got {queries} and {heads}"
        )
    if not (sm_scale > 0 and math.isfinite(sm_scale)):
        raise ValueError(f"sm_scale is positive, got {sm_scale}")
    check_global_scale(latent_scale)
    if latent_scale != 1.0 and row.stock:
        raise ValueError(f"rows of {row.width} bytes have no global scale")
    if splits is not None and not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"splits is 1 … {MAX_SPLITS}, got {splits}")
    if (index is None) != (page_table is not None) or (page_table is None) != (lengths is None):
        raise ValueError("give index, or page_table and lengths")
    table, name = (page_table, "page_table") if index is None else (index, "index")
    assert table is not None
    leading = (requests,) if index is None else (requests, queries)
    if table.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {table.dtype}")
    if (
        table.dim() != len(leading) + 1
        or tuple(table.shape[:-1]) != leading
        or table.device != q.device
    ):
        raise ValueError(
            f"{name}: expected [{', '.join(map(str, leading))}, n] on {q.device}, got {list(table.shape)} on {table.device}"
        )
    if not 1 <= table.shape[-1] < 2**31 // PAGE:
        raise ValueError(f"{name}: expected 1 … 2^25 - 1 entries, got {table.shape[-1]}")
    width = table.shape[-1] * (PAGE if index is None else 1)
    if lengths is not None:
        if lengths.dtype != torch.int32:
            raise TypeError(f"lengths: expected int32, got {lengths.dtype}")
        if tuple(lengths.shape) != (requests,) or lengths.device != q.device:
            raise ValueError(
                f"lengths: expected [{requests}] on {q.device}, got {list(lengths.shape)} on {lengths.device}"
            )
        lengths = lengths.contiguous()
    if sink is not None:
        if sink.dtype != torch.float32:
            raise TypeError(f"sink: expected float32, got {sink.dtype}")
        if tuple(sink.shape) != (heads,) or sink.device != q.device:
            raise ValueError(
                f"sink: expected [{heads}] on {q.device}, got {list(sink.shape)} on {sink.device}"
            )
        sink = sink.contiguous()
    if requests * queries * MAX_SPLITS * MAX_HEADS >= 2**31:
        raise ValueError(f"q: {requests * queries} queries are too many for one call")
    shape = (requests, queries, heads)
    out = torch.empty((*shape, LATENT_DIM), dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    # A copy only where the table is a slice.
    table = table.contiguous().view(-1, table.shape[-1])
    return _Call(
        q, pool, table, lengths, sink, out, lse, row, requests * queries, queries, heads, width,
        sm_scale, latent_scale, splits,
    )  # fmt: skip
