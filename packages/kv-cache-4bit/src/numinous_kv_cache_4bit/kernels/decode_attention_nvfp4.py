# SPDX-License-Identifier: Apache-2.0
"""Decode attention on caches of MHA and GQA models in NVFP4, or with keys in FP8 and values in NVFP4, for the metadata of the engine's Triton backend: no workspace.

*What*      out = softmax(sm_scale · q · Kᵀ) · V over the slots that a request lists, one query each; K = E2M1 × E4M3 × k_global_scale, V alike.
            Without a scale buffer for K, K = E4M3 × k_global_scale.
            `logit_cap` c > 0 makes a score c · tanh(score / c). With a sink s of a head, out is multiplied by exp(lse) / (exp(lse) + exp(s));
            lse = log Σ exp(score) is without it.
*Shapes*    q [B, Hq, Dk] bf16; buffers [slots, Hkv, Dk / 2] and [slots, Hkv, Dv / 2] uint8, low nibble = even column; scale buffers
            [slots, Hkv, D / 16] uint8, E4M3; k_buffer of FP8 keys [slots, Hkv, Dk]; out [B, Hq, Dv] bf16, lse [B, Hq] fp32. Hq is a multiple of Hkv: query head h reads KV head
            h // (Hq / Hkv). D: 64, 96, 128, 192, 256, 512, Dk ≠ Dv among them.
*Lists*     request b lists kv_indices[kv_indptr[b] : kv_indptr[b + 1]], slot ids of any page size in the order of the tokens. -1 and ids outside
            the pool are no tokens, an id counts as often as it stands, slot 0 is a slot like others. `window` w > 0 keeps the last w entries
            of each list (the engine's lists for sliding windows are cut already). A request without tokens gives zeros and lse -inf. Slots
            that nobody lists are not read, so NaN in them spreads nowhere; NaN in a listed row makes NaN.
*Bytes*     a token of a layer: Hkv (Dk + Dv) 9/16 and its id; 8 heads of 128 and 4 of 256 alike 1160 with int64 ids, where an FP8 cache has
            2056. 64 requests of 8192 tokens: 608 MB, 143 µs at 4.25 TB/s (*reported* best copy of an H200); predictions for each cell are
            in docs/deep-dives/nvfp4-kv.md. With FP8 keys Hkv (Dk + 9/16 Dv): 1608, 843 MB and 198 µs.
*Tiles*     a program takes a KV head of a request with up to 32 of its query heads (16 are one row of a product) and a run of tiles of 64 or
            128 tokens. Tiles reach shared memory packed; a thread reads the words that its part of the product needs and decodes them
            in registers (`_planes`). A word is four codes of neighbouring columns, so K and V come out as four tiles of every fourth
            column; q is loaded in that order, and the output's columns are put back where they belong. Of FP8 keys a word is two codes, so
            there are two tiles of every second column (`_pairs`). Splits follow from shapes and
            the number of multiprocessors; each leaves a part in fp32, joined in order by a second kernel.
*Numerics*  q is brought to fp16's range by a power of two of each head, K and V are exact in fp16, scores are summed in fp32, probabilities
            are rounded to fp16 (2^-11), their sum is not. Global scales and the powers of two go into sm_scale and the output. The same
            bits every time for the same number of splits.
*Arch*      see catalog.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from numinous_kv_cache_4bit.kernels.nvfp4_write import (
    BLOCK,
    Scale,
    check_bytes,
    check_even,
    check_global,
    check_global_tensor,
)
from numinous_tooling.device.convert import decode_bf16, encode_bf16
from numinous_tooling.numerics import decode_e4m3fn, dequantize_nvfp4
from numinous_tooling.workbench import Tensors, Traffic

__all__ = ["DIMS", "Attended", "decode_attention_nvfp4", "reference", "traffic"]

DIMS = (64, 96, 128, 192, 256, 512)
"""Head dimensions."""
MAX_SPLITS = 64
JOINED = 16
"""Parts that are read at a time where they are joined."""
START_TILES = 3
"""What a program takes before and after its tiles, in tiles: derived, to be measured."""
PART_TILES = 2
"""What writing and joining a part takes, likewise."""


class Attended(NamedTuple):
    """Result: `out` [B, Hq, Dv] bf16, and `lse` [B, Hq] fp32, natural logarithm, where it was asked for."""

    out: torch.Tensor
    lse: torch.Tensor | None


# --- Reference ------------------------------------------------------------------------------------------------------


def reference(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale_buffer: torch.Tensor | None,
    v_scale_buffer: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    *,
    sm_scale: float,
    k_global_scale: Scale = 1.0,
    v_global_scale: Scale = 1.0,
    window: int | None = None,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> Tensors:
    """Specification in torch, fp64 from exactly decoded rows.

    Returns:
        ``out`` and ``lse``, and ``magnitude``: Σ p · |v| like out, which the rounding of p is proportional to.
    """
    requests, heads, _ = q.shape
    slots, kv_heads = k_buffer.shape[:2]
    group = heads // kv_heads
    v_dim = 2 * v_buffer.shape[2]
    out = q.new_zeros((requests, heads, v_dim), dtype=torch.float64)
    magnitude = torch.zeros_like(out)
    lse = q.new_full((requests, heads), -torch.inf, dtype=torch.float64)
    starts = kv_indptr.tolist()
    for request in range(requests):
        ids = kv_indices[starts[request] : starts[request + 1]].long()
        if window is not None:
            ids = ids[max(0, len(ids) - window) :]
        ids = ids[(ids >= 0) & (ids < slots)]
        if not len(ids):
            continue
        if k_scale_buffer is None:
            k = decode_e4m3fn(k_buffer[ids])
        else:
            k = dequantize_nvfp4(k_buffer[ids], k_scale_buffer[ids])
        k = k.double() * float(k_global_scale)
        v = dequantize_nvfp4(v_buffer[ids], v_scale_buffer[ids]).double() * float(v_global_scale)
        query = q[request].double().view(kv_heads, group, -1)
        scores = sm_scale * torch.einsum("hgd,nhd->hgn", query, k).flatten(0, 1)
        if logit_cap > 0:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        lse[request] = torch.logsumexp(scores, dim=-1)
        total = lse[request]
        if sinks is not None:
            total = torch.logaddexp(total, sinks.double())
        weights = (scores - total[:, None]).exp().view(kv_heads, group, -1)
        out[request] = torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1)
        magnitude[request] = torch.einsum("hgn,nhd->hgd", weights, v.abs()).flatten(0, 1)
    return {"out": out, "lse": lse, "magnitude": magnitude}


def traffic(
    requests: int,
    heads: int,
    kv_heads: int,
    k_dim: int,
    v_dim: int,
    tokens: int,
    id_bytes: int,
    *,
    fp8_keys: bool = False,
) -> Traffic:
    """Compulsory bytes and FLOPs of `tokens` listed tokens, all requests together: ids, rows and scales once, q, out and lse."""
    row = kv_heads * ((16 if fp8_keys else 9) * k_dim + 9 * v_dim) // 16
    ends = requests * heads * 2 * (k_dim + v_dim) + 4 * (requests + 1)
    return Traffic(
        bytes=tokens * (row + id_bytes) + ends,
        flops=2 * tokens * heads * (k_dim + v_dim),
        unit="bf16",
    )


# --- Triton ---------------------------------------------------------------------------------------------------------

P_SCALE = tl.constexpr(32768.0)
"""Probabilities relative to the largest are held in fp16 times this, so that what is flushed is below 2^-40."""
HELD = tl.constexpr(6.103515625e-05)
"""Tiles hold values times this, 2^-14, the unit in which an E2M1 code is an fp16 number: the smallest product is fp16's smallest."""
LOG2E = tl.constexpr(1.4426950408889634)
FIRST, SECOND = tl.constexpr(0x20), tl.constexpr(0x31)
"""Bytes of two words of two E4M3 codes each: the first of both, the second of both."""


@triton.jit
def _plane(words, factor, COLUMN: tl.constexpr):
    code = words >> (4 * COLUMN)
    bits = ((code & 7) << 9) | ((code & 8) << 12)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True) * factor


@triton.jit
def _planes(words, scales, second, NATIVE: tl.constexpr):
    """Values 4w, 4w + 1, 4w + 2, 4w + 3 in fp16 times `HELD`.

    `words` [rows, w] uint16 hold four codes each, `scales` the E4M3 codes of two blocks, `second` [1, w] is 1 where the word
    belongs to the second of them. An E2M1 code is fp16 in units of 2^14 once its three low bits are bits 9 … 11 and its high
    bit is bit 15, subnormals included. PTX has two words in a register: three and four instructions bring the codes of odd
    and of even columns to the bytes they belong in, one more for each pair of codes leaves nothing else in a 16-bit number:
    11 for 8 codes. Two make fp16 of two block scales, four multiply.
    """
    if NATIVE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, s, t; .reg .b16 l, h;
            shr.u32 t, $4, 3; and.b32 s, $4, 0x80808080; lop3.b32 a, t, 0x0E0E0E0E, s, 0xEA;
            shl.b32 t, $4, 1; shl.b32 s, $4, 4; and.b32 s, s, 0x80808080;
            lop3.b32 b, t, 0x0E0E0E0E, s, 0xEA;
            prmt.b32 s, $5, 0, $6; mov.b32 {l, h}, s; cvt.rn.f16x2.e4m3x2 s, l;
            prmt.b32 t, b, 0, 0x2404; mul.rn.f16x2 $0, t, s;
            prmt.b32 t, a, 0, 0x2404; mul.rn.f16x2 $1, t, s;
            and.b32 b, b, 0xFF00FF00; mul.rn.f16x2 $2, b, s;
            and.b32 a, a, 0xFF00FF00; mul.rn.f16x2 $3, a, s;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r",
            [words, scales, second],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        factor = _half_of_e4m3(tl.where(second == SECOND, scales >> 8, scales & 0xFF))
        return (
            _plane(words, factor, 0),
            _plane(words, factor, 1),
            _plane(words, factor, 2),
            _plane(words, factor, 3),
        )


@triton.jit
def _tile(
    rows_ptr,  # uint16, at the head
    scales_ptr,  # uint16, at the head
    slot,  # [ROWS] int64
    valid,
    slot_stride,
    scales_stride,
    second,
    UNIT: tl.constexpr,
    SCALES_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WORDS: tl.constexpr,  # DIM / 4 up to a power of two
    NATIVE: tl.constexpr,
):
    word, pair = tl.arange(0, WORDS)[None, :], tl.arange(0, WORDS // 8)[None, :]
    mask, pair_mask = valid[:, None], valid[:, None]
    if 4 * WORDS > DIM:
        mask, pair_mask = mask & (word < DIM // 4), pair_mask & (pair < DIM // 32)
    words = tl.load(rows_ptr + (slot * slot_stride * UNIT)[:, None] + word, mask=mask, other=0)
    # 16-bit loads on both sides: an 8-bit one would make Triton order the products' operands for 8-bit values.
    scales = tl.load(
        scales_ptr + (slot * scales_stride * SCALES_UNIT)[:, None] + pair, mask=pair_mask, other=0
    )
    scales = tl.broadcast_to(scales[:, :, None], [ROWS, WORDS // 8, 8])
    scales = tl.reshape(scales, [ROWS, WORDS])
    return _planes(words, scales, second, NATIVE)


@triton.jit
def _pairs(words, NATIVE: tl.constexpr):
    """Values 2w and 2w + 1 in fp16, exactly, of words of two E4M3 codes each: one `prmt` and two conversions for two words."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t; .reg .b16 l, h;
            prmt.b32 t, $2, 0, 0x3120; mov.b32 {l, h}, t;
            cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h;
            }""",
            "=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return _half_of_e4m3(words & 0xFF), _half_of_e4m3(words >> 8)


@triton.jit
def _half_of_e4m3(code):
    """fp16 of E4M3 codes in uint16."""
    bits = (((code & 0x7F) << 7) | ((code & 0x80) << 8)).to(tl.uint16)
    value = bits.to(tl.float16, bitcast=True) * 256.0  # E4M3's exponents in fp16 begin 2^8 lower
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def _tile_of_pairs(
    rows_ptr,  # uint16, at the head
    slot,  # [ROWS] int64
    valid,
    slot_stride,
    UNIT: tl.constexpr,
    DIM: tl.constexpr,
    WORDS: tl.constexpr,  # DIM / 2 up to a power of two
    NATIVE: tl.constexpr,
):
    word = tl.arange(0, WORDS)[None, :]
    mask = valid[:, None]
    if 2 * WORDS > DIM:
        mask = mask & (word < DIM // 2)
    words = tl.load(rows_ptr + (slot * slot_stride * UNIT)[:, None] + word, mask=mask, other=0)
    return _pairs(words, NATIVE)


@triton.jit
def _second(some_ptr, never, WORDS: tl.constexpr):
    """[1, WORDS] uint16: which of the two scales that are loaded together a word takes, as a selector of `prmt`.

    A load that is masked out, for its default: Triton decodes tiles in the registers of the product, without a way through
    shared memory, only if all that it decodes from are loads.
    """
    word = tl.arange(0, WORDS)[None, :]
    selector = tl.where((word >> 2) % 2 == 1, SECOND, FIRST).to(tl.uint16)
    return tl.load(some_ptr + word, mask=(word < WORDS) & never, other=selector)


@triton.jit
def _q_plane(q_row, mask, word, COLUMN: tl.constexpr, OF: tl.constexpr):
    """fp32 of column `COLUMN` of every `OF`."""
    bits = tl.load(q_row + OF * word[None, :] + COLUMN, mask=mask, other=0.0)
    return decode_bf16(bits.to(tl.uint16, bitcast=True))


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)


@triton.jit
def _store_out(at, value, mask, PARTS: tl.constexpr, NATIVE: tl.constexpr):
    if PARTS:
        tl.store(at, value, mask=mask)
    else:
        tl.store(at, encode_bf16(value, NATIVE).to(tl.bfloat16, bitcast=True), mask=mask)


@triton.jit(do_not_specialize=["slots", "entries", "splits", "window", "heads"])
def _decode_kernel(
    q_ptr,  # bf16 [B, heads, K_DIM]
    k_ptr,  # uint16 [slots, kv heads, K_DIM / 4], or K_DIM / 2 of FP8 keys
    v_ptr,
    k_scales_ptr,  # uint16 [slots, kv heads, K_DIM / 32]; None for FP8 keys
    v_scales_ptr,
    indptr_ptr,
    indices_ptr,
    sink_ptr,  # [heads] fp32 or bf16
    k_global_ptr,  # fp32; None where sm_scale has it
    v_global_ptr,  # fp32; None where v_global is it
    out_ptr,  # bf16 [B, heads, V_DIM], or parts [B, splits, heads, V_DIM] fp32
    lse_ptr,  # fp32 [B, heads], or [B, splits, heads] to base 2
    q_request_stride,
    q_head_stride,
    k_slot_stride,  # of buffers in the units below, so that the compiler knows how rows are aligned
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    k_scales_slot_stride,
    k_scales_head_stride,
    v_scales_slot_stride,
    v_scales_head_stride,
    out_request_stride,
    out_head_stride,
    slots,
    entries,  # of indices
    splits,
    window,  # 0 for none
    heads,
    sm_scale,
    logit_cap,
    v_global,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_UNIT: tl.constexpr,  # 16-bit words
    V_UNIT: tl.constexpr,
    K_SCALES_UNIT: tl.constexpr,
    V_SCALES_UNIT: tl.constexpr,
    K_WORDS: tl.constexpr,
    V_WORDS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEADS: tl.constexpr,  # of a program
    ROWS: tl.constexpr,  # of a tile
    CAP: tl.constexpr,
    SPLIT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    request = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    PROGRAMS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = (tl.program_id(1) // PROGRAMS).to(tl.int64)
    member = (tl.program_id(1) % PROGRAMS) * HEADS + tl.arange(0, HEADS)
    live = member < GROUP
    head = kv_head * GROUP + member

    first = tl.load(indptr_ptr + request).to(tl.int64)
    last = tl.minimum(tl.load(indptr_ptr + request + 1).to(tl.int64), entries)
    length = (last - first).to(tl.int32)
    if window > 0:
        first += tl.maximum(length - window, 0)
        length = tl.minimum(length, window)
    tiles = tl.cdiv(length, ROWS)
    begin = (tiles.to(tl.int64) * split // splits).to(tl.int32) * ROWS
    end = (tiles.to(tl.int64) * (split + 1) // splits).to(tl.int32) * ROWS

    # q in fp16, the largest value of a head brought to 2^14 … 2^15: bf16's eight bits are kept down to 2^-30 of it.
    k_word = tl.arange(0, K_WORDS)
    q_row = q_ptr + request * q_request_stride + head[:, None] * q_head_stride
    OF: tl.constexpr = 2 if k_scales_ptr is None else 4
    mask = live[:, None] & (k_word < K_DIM // OF)[None, :]
    q0, q1 = _q_plane(q_row, mask, k_word, 0, OF), _q_plane(q_row, mask, k_word, 1, OF)
    both = tl.maximum(tl.abs(q0), tl.abs(q1))
    if OF == 4:
        q2, q3 = _q_plane(q_row, mask, k_word, 2, OF), _q_plane(q_row, mask, k_word, 3, OF)
        both = tl.maximum(both, tl.maximum(tl.abs(q2), tl.abs(q3)))
    exponent = tl.max(both, axis=1).to(tl.uint32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 15), 254)
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    q0, q1 = (q0 * up).to(tl.float16), (q1 * up).to(tl.float16)
    if OF == 4:
        q2, q3 = (q2 * up).to(tl.float16), (q3 * up).to(tl.float16)
    back = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    scale = sm_scale * (1.0 if CAP else LOG2E) / (1.0 if OF == 2 else HELD)
    if k_global_ptr is not None:
        scale *= tl.load(k_global_ptr)
    scale = (back * scale)[:, None]

    k_ptr += kv_head * k_head_stride * K_UNIT
    v_ptr += kv_head * v_head_stride * V_UNIT
    v_scales_ptr += kv_head * v_scales_head_stride * V_SCALES_UNIT
    v_second = _second(v_scales_ptr, splits < 1, V_WORDS)
    if OF == 4:
        k_scales_ptr += kv_head * k_scales_head_stride * K_SCALES_UNIT
        k_second = _second(k_scales_ptr, splits < 1, K_WORDS)
    most = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    o0, o1 = tl.zeros([HEADS, V_WORDS], tl.float32), tl.zeros([HEADS, V_WORDS], tl.float32)
    o2, o3 = tl.zeros([HEADS, V_WORDS], tl.float32), tl.zeros([HEADS, V_WORDS], tl.float32)
    for start in tl.range(begin, end, ROWS):
        at = start + tl.arange(0, ROWS)
        ids = tl.load(indices_ptr + first + at, mask=at < length, other=-1).to(tl.int64)
        valid = (ids >= 0) & (ids < slots)
        slot = tl.where(valid, ids, 0)
        if OF == 2:
            k0, k1 = _tile_of_pairs(k_ptr, slot, valid, k_slot_stride, K_UNIT, K_DIM, K_WORDS, NATIVE)  # fmt: skip
            scores = tl.dot(q0, tl.trans(k0))
            scores = tl.dot(q1, tl.trans(k1), scores) * scale
        else:
            k0, k1, k2, k3 = _tile(
                k_ptr, k_scales_ptr, slot, valid, k_slot_stride, k_scales_slot_stride, k_second,
                K_UNIT, K_SCALES_UNIT, ROWS, K_DIM, K_WORDS, NATIVE,
            )  # fmt: skip
            scores = tl.dot(q0, tl.trans(k0))
            scores = tl.dot(q1, tl.trans(k1), scores)
            scores = tl.dot(q2, tl.trans(k2), scores)
            scores = tl.dot(q3, tl.trans(k3), scores) * scale
        if CAP:
            scores = (logit_cap * LOG2E) * _tanh(scores / logit_cap)
        scores = tl.where(valid[None, :], scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, axis=1))
        base = tl.where(now == float("-inf"), 0.0, now)
        shrink = tl.exp2(most - base)
        weights = tl.exp2(scores - base[:, None])
        most = now
        total = total * shrink + tl.sum(weights, axis=1)
        weights = (weights * P_SCALE).to(tl.float16)
        v0, v1, v2, v3 = _tile(
            v_ptr, v_scales_ptr, slot, valid, v_slot_stride, v_scales_slot_stride, v_second,
            V_UNIT, V_SCALES_UNIT, ROWS, V_DIM, V_WORDS, NATIVE,
        )  # fmt: skip
        o0 = tl.dot(weights, v0, o0 * shrink[:, None])
        o1 = tl.dot(weights, v1, o1 * shrink[:, None])
        o2 = tl.dot(weights, v2, o2 * shrink[:, None])
        o3 = tl.dot(weights, v3, o3 * shrink[:, None])

    base = tl.where(most == float("-inf"), 0.0, most)
    none = total == 0.0
    lse = tl.where(none, float("-inf"), base + tl.log2(tl.where(none, 1.0, total)))
    if SPLIT:
        line = (request * splits + split) * heads + head
        tl.store(lse_ptr + line, lse, mask=live)
        to = out_ptr + line[:, None] * V_DIM
    else:
        if lse_ptr is not None:
            tl.store(lse_ptr + request * heads + head, lse / LOG2E, mask=live)
        if sink_ptr is not None:
            sink = tl.load(sink_ptr + head, mask=live, other=0.0).to(tl.float32)
            total += tl.exp2(sink * LOG2E - base)
        to = out_ptr + request * out_request_stride + head[:, None] * out_head_stride
    factor = v_global / (HELD * P_SCALE)
    if v_global_ptr is not None:
        factor *= tl.load(v_global_ptr)
    factor = tl.where(none, 0.0, factor / tl.where(none, 1.0, total))[:, None]
    word = tl.arange(0, V_WORDS)[None, :]
    to += 4 * word
    # Of a split without tokens nothing is written but its lse.
    mask = live[:, None] & (word < V_DIM // 4)
    if SPLIT:
        mask = mask & (begin < end)
    _store_out(to, o0 * factor, mask, SPLIT, NATIVE)
    _store_out(to + 1, o1 * factor, mask, SPLIT, NATIVE)
    _store_out(to + 2, o2 * factor, mask, SPLIT, NATIVE)
    _store_out(to + 3, o3 * factor, mask, SPLIT, NATIVE)


@triton.jit(do_not_specialize=["heads", "splits"])
def _join_kernel(
    part_ptr,  # [B, splits, heads, DIM] fp32
    part_lse_ptr,  # [B, splits, heads], base 2
    sink_ptr,
    out_ptr,
    lse_ptr,
    out_request_stride,
    out_head_stride,
    heads,
    splits,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # DIM up to a power of two
    PARTS: tl.constexpr,  # of a turn
    NATIVE: tl.constexpr,
):
    request = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    column = tl.arange(0, COLUMNS)
    most = float("-inf")
    total = 0.0
    out = tl.zeros([COLUMNS], tl.float32)
    # Several parts at a time, and none waits for its lse: one after the other would be 64 times the latency of L2.
    for first in range(0, splits, PARTS):
        split = first + tl.arange(0, PARTS)
        made = split < splits
        line = (request * splits + split) * heads + head
        own = tl.load(part_lse_ptr + line, mask=made, other=float("-inf"))
        mask = made[:, None] & (column < DIM)[None, :]
        part = tl.load(part_ptr + line[:, None] * DIM + column[None, :], mask=mask, other=0.0)
        now = tl.maximum(most, tl.max(own, axis=0))
        base = tl.where(now == float("-inf"), 0.0, now)
        shrink, weight = tl.exp2(most - base), tl.exp2(own - base)
        # Nothing was written for a split without tokens: what lies there may be NaN.
        part = tl.where((own == float("-inf"))[:, None], 0.0, part * weight[:, None])
        total = total * shrink + tl.sum(weight, axis=0)
        out = out * shrink + tl.sum(part, axis=0)
        most = now
    base = tl.where(most == float("-inf"), 0.0, most)
    none = total == 0.0
    if lse_ptr is not None:
        lse = tl.where(none, float("-inf"), base + tl.log2(tl.where(none, 1.0, total)))
        tl.store(lse_ptr + request * heads + head, lse / LOG2E)
    if sink_ptr is not None:
        total += tl.exp2(tl.load(sink_ptr + head).to(tl.float32) * LOG2E - base)
    out = tl.where(none, 0.0, out / tl.where(none, 1.0, total))
    to = out_ptr + request * out_request_stride + head * out_head_stride + column
    _store_out(to, out, column < DIM, False, NATIVE)


# --- Launch ---------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """Constants of `_decode_kernel` that follow from shapes."""

    heads: int
    rows: int
    warps: int
    stages: int
    resident: int
    """Programs that a multiprocessor holds, by the registers of the sm90 machine code; to be measured."""


WIDE_SHARED = 114_688
"""Bytes that a program of FP8 keys of 256 takes."""
SMALL_SHARED = 101_376
"""Bytes of shared memory that a program may have on sm120; other GPUs have more than any plan takes."""


def plan(
    group: int, k_dim: int, v_dim: int, *, fp8_keys: bool = False, shared: int = 232_448
) -> Plan:
    """For that many query heads of a KV head, those dimensions and that many bytes of shared memory for a program."""
    # With several warps and a V no wider than 64 Triton gives every warp all of a tile.
    warps, rows, stages = (
        (1, 64, 3) if v_dim <= 64 else (4, 128, 3) if max(k_dim, v_dim) <= 256 else (8, 64, 2)
    )
    if fp8_keys and warps == 4 and k_dim > 128 and shared < WIDE_SHARED:
        stages = 2
    few = group <= 16
    if warps == 1:
        resident = 13 if few else 8
    elif warps == 4:
        resident = 3 if few and max(k_dim, v_dim) <= 128 else 2
    else:
        resident = 1
    return Plan(16 if few else 32, rows, warps, stages, resident)


def choose_splits(requests: int, blocks: int, entries: int, rows: int, places: int) -> int:
    """Programs of each list that take the fewest turns of all `places` of the GPU, the fewest of equals; lists taken for equally long."""
    tiles = -(-entries // (rows * max(1, requests)))

    def turns(splits: int) -> int:
        waves = -(-requests * blocks * splits // places)
        return waves * (-(-tiles // splits) + START_TILES + (PART_TILES if splits > 1 else 0))

    return min(range(1, max(1, min(tiles, MAX_SPLITS)) + 1), key=turns)


def _processors(device: torch.device) -> int:
    if device.type != "cuda" or not torch.cuda.is_available():
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _limits(device: torch.device) -> dict[str, int]:
    if device.type != "cuda" or torch.version.hip is not None:
        return {}
    return {"shared": SMALL_SHARED} if torch.cuda.get_device_capability(device)[0] == 12 else {}


def words_of(dim: int, codes: int = 4) -> int:
    """Words of so many codes of a head, up to a power of two."""
    return int(triton.next_power_of_2(dim // codes))


def unit_of(words: torch.Tensor) -> int:
    """The largest power of two up to 8, 16 bytes, that divides the strides of slots and heads."""
    return math.gcd(8, *words.stride()[:2])


def _launch(call: _Call) -> None:
    requests, heads, k_dim = call.q.shape
    kv_heads, v_dim = call.k_buffer.shape[1], call.out.shape[2]
    group = heads // kv_heads
    fp8_keys = call.k_scales is None
    made = plan(group, k_dim, v_dim, fp8_keys=fp8_keys, **_limits(call.q.device))
    blocks = kv_heads * -(-group // made.heads)
    places = made.resident * _processors(call.q.device)
    splits = call.splits or choose_splits(requests, blocks, len(call.indices), made.rows, places)
    native = call.q.device.type != "cpu" and torch.version.hip is None
    out, lse = call.out, call.lse
    if splits > 1:
        shape = (requests, splits, heads)
        out = torch.empty((*shape, v_dim), dtype=torch.float32, device=call.q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=call.q.device)
    buffers = [
        None if buffer is None else buffer.view(torch.uint16)
        for buffer in (call.k_buffer, call.v_buffer, call.k_scales, call.v_scales)
    ]
    units = [1 if buffer is None else unit_of(buffer) for buffer in buffers]
    _decode_kernel[(requests * splits, blocks)](
        call.q,
        *buffers,
        call.indptr,
        call.indices,
        call.sinks if splits == 1 else None,
        call.k_global,
        call.v_global,
        out,
        lse,
        *call.q.stride()[:2],
        *(
            stride // unit
            for buffer, unit in zip(buffers, units, strict=True)
            for stride in ((0, 0) if buffer is None else buffer.stride()[:2])
        ),
        *call.out.stride()[:2],
        call.k_buffer.shape[0],
        len(call.indices),
        splits,
        call.window,
        heads,
        call.sm_scale,
        call.logit_cap,
        call.v_factor,
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_UNIT=units[0],
        V_UNIT=units[1],
        K_SCALES_UNIT=units[2],
        V_SCALES_UNIT=units[3],
        K_WORDS=words_of(k_dim, 2 if fp8_keys else 4),
        V_WORDS=words_of(v_dim),
        GROUP=group,
        HEADS=made.heads,
        ROWS=made.rows,
        CAP=call.logit_cap > 0,
        SPLIT=splits > 1,
        NATIVE=native,
        num_warps=made.warps,
        num_stages=made.stages,
    )
    if splits > 1:
        _join_kernel[(requests * heads,)](
            out,
            lse,
            call.sinks,
            call.out,
            call.lse,
            *call.out.stride()[:2],
            heads,
            splits,
            DIM=v_dim,
            COLUMNS=triton.next_power_of_2(v_dim),
            PARTS=JOINED,
            NATIVE=native,
            num_warps=4,
        )


# --- Public function ------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """A checked call."""

    q: torch.Tensor
    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None
    sm_scale: float
    v_factor: float
    k_global: torch.Tensor | None
    v_global: torch.Tensor | None
    window: int
    logit_cap: float
    splits: int | None


def decode_attention_nvfp4(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale_buffer: torch.Tensor | None,
    v_scale_buffer: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    *,
    sm_scale: float,
    k_global_scale: Scale = 1.0,
    v_global_scale: Scale = 1.0,
    window: int | None = None,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    splits: int | None = None,
) -> Attended:
    """Attention of one query a request over listed slots of a cache; does not synchronise, may be captured in a CUDA graph.

    Args:
        q: bf16 [B, Hq, Dk], values of a head side by side.
        k_buffer, v_buffer: uint8 [slots, Hkv, D / 2]; k_buffer of FP8 keys [slots, Hkv, Dk].
        k_scale_buffer, v_scale_buffer: uint8 [slots, Hkv, D / 16]; None for k_scale_buffer: keys are FP8.
        kv_indptr: int32 or int64 [B + 1 or more], ascending; what follows B + 1 entries is not read.
        kv_indices: int32 or int64 [n]; lists end at n. Both tables are copied where they are strided.
        sm_scale: positive; multiplies scores.
        k_global_scale, v_global_scale: a number in 2^-64 … 2^64, or an fp32 tensor of one element on the device, which is not read back.
        window: the last so many entries of each list are seen, the query's own among them; None sees all.
        logit_cap: 0 for none.
        sinks: fp32 or bf16 [Hq].
        out: bf16 [B, Hq, Dv] that is written, values of a head side by side; None makes one.
        return_lse: also gives lse.
        splits: of each list over programs, 1 … 64; None chooses by shapes and the GPU's multiprocessors.

    Raises:
        TypeError: a dtype is not the one named.
        ValueError: shapes, strides, devices or values do not fit.
    """
    call = _checked(
        q, k_buffer, v_buffer, k_scale_buffer, v_scale_buffer, kv_indptr, kv_indices, sm_scale,
        k_global_scale, v_global_scale, window, logit_cap, sinks, out, return_lse, splits,
    )  # fmt: skip
    if call.q.shape[0]:
        _launch(call)
    return Attended(call.out, call.lse)


def _checked(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    k_global: Scale,
    v_global: Scale,
    window: int | None,
    logit_cap: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    return_lse: bool,
    splits: int | None,
) -> _Call:
    if q.dtype != torch.bfloat16:
        raise TypeError(f"q: expected bfloat16, got {q.dtype}")
    if q.dim() != 3 or q.shape[2] not in DIMS:
        raise ValueError(f"q: expected [B, Hq, D], D one of {DIMS}, got {list(q.shape)}")
    if q.stride(2) != 1:
        raise ValueError(f"q: values of a head must lie side by side, got strides {q.stride()}")
    requests, heads, k_dim = q.shape
    if k_buffer.dim() != 3 or v_buffer.dim() != 3 or 2 * v_buffer.shape[2] not in DIMS:
        raise ValueError(
            f"k_buffer, v_buffer: expected [slots, Hkv, bytes of a head], D one of {DIMS}, got {list(k_buffer.shape)}, {list(v_buffer.shape)}"
        )
    slots, kv_heads, v_dim = k_buffer.shape[0], k_buffer.shape[1], 2 * v_buffer.shape[2]
    for name, buffer, width in (
        ("k_buffer", k_buffer, k_dim if k_scales is None else k_dim // 2), ("v_buffer", v_buffer, v_dim // 2),
        ("k_scale_buffer", k_scales, k_dim // BLOCK), ("v_scale_buffer", v_scales, v_dim // BLOCK),
    ):  # fmt: skip
        if buffer is not None:
            check_bytes(name, buffer, (slots, kv_heads, width), q.device)
            check_even(name, buffer)
    if not kv_heads or heads % kv_heads or not heads:
        raise ValueError(
            f"q: the {heads} query heads must be a multiple of the {kv_heads} KV heads"
        )
    for name, table in (("kv_indptr", indptr), ("kv_indices", indices)):
        if table.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: expected int32 or int64, got {table.dtype}")
        if table.dim() != 1 or table.device != q.device:
            raise ValueError(
                f"{name}: expected one dimension on {q.device}, got {list(table.shape)} on {table.device}"
            )
    if len(indptr) < requests + 1:
        raise ValueError(
            f"kv_indptr: expected {requests + 1} entries for {requests} requests, got {len(indptr)}"
        )
    if not (sm_scale > 0 and math.isfinite(sm_scale)):
        raise ValueError(f"sm_scale is positive, got {sm_scale}")
    k_number, k_tensor = _split_scale("k_global_scale", k_global, q.device)
    v_number, v_tensor = _split_scale("v_global_scale", v_global, q.device)
    if window is not None and window < 1:
        raise ValueError(f"window is at least 1 or None, got {window}")
    if not (logit_cap >= 0 and math.isfinite(logit_cap)):
        raise ValueError(f"logit_cap is 0 or positive, got {logit_cap}")
    if splits is not None and not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"splits is 1 … {MAX_SPLITS}, got {splits}")
    if sinks is not None:
        if sinks.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"sinks: expected float32 or bfloat16, got {sinks.dtype}")
        if tuple(sinks.shape) != (heads,) or sinks.device != q.device:
            raise ValueError(
                f"sinks: expected [{heads}] on {q.device}, got {list(sinks.shape)} on {sinks.device}"
            )
        sinks = sinks.contiguous()
    if requests * heads * MAX_SPLITS >= 2**31:
        raise ValueError(f"q: {requests} requests of {heads} heads are too many for one call")
    if out is None:
        out = torch.empty((requests, heads, v_dim), dtype=torch.bfloat16, device=q.device)
    elif out.dtype != torch.bfloat16:
        raise TypeError(f"out: expected bfloat16, got {out.dtype}")
    elif (
        tuple(out.shape) != (requests, heads, v_dim) or out.device != q.device or out.stride(2) != 1
    ):
        raise ValueError(
            f"out: expected [{requests}, {heads}, {v_dim}] on {q.device}, values of a head side by side, "
            f"got {list(out.shape)} on {out.device}, strides {out.stride()}"
        )
    lse = (
        torch.empty((requests, heads), dtype=torch.float32, device=q.device) if return_lse else None
    )
    return _Call(
        q, k_buffer, v_buffer, k_scales, v_scales, indptr.contiguous(), indices.contiguous(), sinks, out, lse,
        sm_scale * k_number, v_number,
        k_tensor, v_tensor, 0 if window is None else window, logit_cap, splits,
    )  # fmt: skip


def _split_scale(
    name: str, scale: Scale, device: torch.device
) -> tuple[float, torch.Tensor | None]:
    """A global scale as a number, which is 1 beside a tensor, and as a tensor on the device."""
    if isinstance(scale, torch.Tensor):
        check_global_tensor(name, scale, device)
        return 1.0, scale
    return check_global(name, scale), None
