# SPDX-License-Identifier: Apache-2.0
"""Quantised write of MHA and GQA caches: K and V of new tokens to NVFP4 (E2M1, an E4M3 scale for 16 values), or K to FP8, in one launch.

*What*      buffer[loc[t], h], scales[loc[t], h] = encode(x[t, h], global_scale) for x = k and x = v, each with buffers and a scale of its own.
            Without a scale buffer for K, k_buffer[loc[t], h] = E4M3(k[t, h] × fl(1 / global_scale)): a byte a value, no block scales.
*Shapes*    k [T, heads, Dk] and v [T, heads, Dv] bf16; loc [T] int32 or int64; buffers [slots, heads, D / 2] uint8, low nibble = even
            column; scale buffers [slots, heads, D / 16] uint8, E4M3 codes, not swizzled; k_buffer of FP8 keys [slots, heads, Dk]. D is a multiple
            of 16 up to 512; Dk ≠ Dv is fine.
*Slots*     Written are ids 1 … slots - 1. Slot 0 is where the engine sends padding tokens; its own writer for MHA skips it (`store_cache`,
            `reserved_skip_index=0`) and so does this one, so that padded batches stay deterministic (the engine's own NVFP4 writer is an
            `index_put` that does write it). Ids that are negative or beyond the pool are skipped. An id that stands twice gets, for each
            block of 16, either token's bytes; which, is not defined, and tokens of equal content are safe.
*Numerics*  bit for bit `encode`, every product and quotient rounded to fp32 on its own:

            - inverse = 1 / g, g the global scale in fp32, which multiplies on decoding: value = E2M1 × E4M3 × g;
            - ratio = amax × inverse; scale = E4M3(ratio × fl(1/6)) saturated at 448, at least 2^-9; ratio ≤ 2^-11 gives scale 0 and ±0;
            - factor = (inverse × 2^-14) / scale; element = E2M1(x × factor), x × factor being rounded to fp16 first. In units of 2^-14
              fp16 ends at 2^-10, so a value within 2^-11 of the middle between two codes, relative to 1 or to itself above 2, counts as the middle.

            With a power of two for g (1 among them) these are the bytes of `numerics.quantize_nvfp4` (`codec`: why a quotient needs no
            division). With another g they differ from it only there: an element may be off by half a step and 2^-11 where that has half a step.
            A NaN makes its block of 16 NaN (scale 0x7f, elements 0x7), inf saturates and leaves its neighbours finite, -0 keeps its sign.
*Search*    `scale_choice="mse"` takes of 11 scales for a block that of least squared error: the bytes of `numerics.quantize_nvfp4(…,
            scale_choice="mse")`, which tries 13 (`codec.search_scale` says why fewer do). The global scale is then a number, a power of two.
            A scale takes 10.4 instructions a value on sm90 (166 for a block), no fp64; all of them 114, on top of 14. *Derived*, one H200: 4096 tokens
            of 8 heads of 128 and 128 take 35 µs more, of FP8 keys 18; that is 1 % of such a prefill's time in a layer of an 8B model.
*FP8 keys*  bit for bit `numerics.quantize_fp8_tensor(k, global_scale, reciprocal=True)`: values beyond 448 and inf saturate, a NaN is one NaN.
*Global*    a float is checked: 2^-64 … 2^64. A tensor is not read back; outside that range, and for NaN, it makes every block NaN.
*Bytes*     a token: 2 (Dk + Dv) heads + id read, 9/16 (Dk + Dv) heads written. 8 heads of 128 and 128: 5256 with int64 ids; at 4.25 TB/s
            (*reported* best copy of an H200) 4096 tokens take 5.1 µs, 16,384 20.3 µs. FP8 keys: Dk heads written; 5704, 5.5 µs and 22.0 µs.
*Tiles*     a thread has one block of 16: two 16-byte loads that do not wait for the id, no exchange between threads, 8 bytes and one byte stored.
            222 instructions a block on sm90, 82 of them in the logic unit, in 32 registers: 64 warps a multiprocessor, which hide each other's latency.
*Arch*      see catalog.py. NVIDIA GPUs round E2M1 in packed fp16 arithmetic; gfx950 and the interpreter one number at a time.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl

from numinous_kv_cache_4bit.kernels.codec import (
    ARITHMETIC,
    FP8_CONVERSIONS,
    ScaleChoice,
    block_amax,
    block_factor,
    block_scale,
    check_global_scale,
    check_scale_choice,
    native,
    pack_e2m1,
    search_scale,
)
from numinous_tooling.device.convert import encode_e4m3fn_pairs
from numinous_tooling.numerics import decode_e4m3fn as decode_codes
from numinous_tooling.numerics import encode_e2m1, pack_nibbles, quantize_fp8_tensor, quantize_nvfp4
from numinous_tooling.numerics import encode_e4m3fn as encode_values
from numinous_tooling.workbench import Tensors, Traffic

__all__ = [
    "BLOCK",
    "MAX_DIM",
    "Tile",
    "check_global",
    "encode",
    "nvfp4_write",
    "reference",
    "traffic",
]

BLOCK = 16
"""Values that share a scale."""
MAX_DIM = 512
"""Largest head dimension."""
SMALLEST, LARGEST = 2.0**-64, 2.0**64
"""Global scales under which no intermediate leaves fp32's normal numbers."""


class Tile(NamedTuple):
    """Blocks of 16 and warps of a program."""

    blocks: int
    warps: int


TILE = Tile(128, 4)
"""What the launcher takes: a block a thread."""

Scale: TypeAlias = torch.Tensor | float


# --- Reference ------------------------------------------------------------------------------------------------------


def encode(
    x: torch.Tensor, global_scale: Scale = 1.0, scale_choice: ScaleChoice = "amax"
) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4 of bf16 [..., D]: bytes [..., D / 2] and E4M3 codes [..., D / 16], both uint8; *Numerics* and *Search* of the module.

    `global_scale` is a number in 2^-64 … 2^64, or one in a tensor, and for "mse" a power of two; ValueError else.
    """
    if scale_choice == "mse":
        above = check_global_scale(float(global_scale))
        return quantize_nvfp4(x, global_scale=above, scale_choice="mse")
    above = torch.as_tensor(global_scale, dtype=torch.float32).reshape(())
    check_global("global_scale", float(above))
    blocks = x.float().unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))
    inverse = 1.0 / above.to(x.device)
    amax = blocks.abs().amax(-1)
    ratio = amax * inverse
    codes = encode_values((ratio * (1.0 / 6.0)).clamp(min=2.0**-9))
    codes = torch.where(ratio <= 2.0**-11, 0, codes.int()).to(torch.uint8)
    factor = (inverse * 2.0**-14) / decode_codes(codes)
    factor = torch.where(codes == 0, 0.0, factor).unsqueeze(-1)
    elements = encode_e2m1((blocks * factor).half().float() * 2.0**14)
    elements = torch.where(amax.isnan().unsqueeze(-1), 7, elements.int()).to(torch.uint8)
    return pack_nibbles(elements.flatten(-2)), codes


def reference(
    k: torch.Tensor,
    v: torch.Tensor,
    loc: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale_buffer: torch.Tensor | None,
    v_scale_buffer: torch.Tensor,
    *,
    k_global_scale: Scale = 1.0,
    v_global_scale: Scale = 1.0,
    scale_choice: ScaleChoice = "amax",
) -> Tensors:
    """Specification in torch; writes into the buffers and returns them under their names.

    Of an id that stands twice, one token is written.
    """
    keep = (loc > 0) & (loc < k_buffer.shape[0])
    slots = loc[keep].long()
    for x, scale, buffer, scales in (
        (k, k_global_scale, k_buffer, k_scale_buffer),
        (v, v_global_scale, v_buffer, v_scale_buffer),
    ):
        if scales is None:
            buffer[slots] = quantize_fp8_tensor(x[keep], scale, reciprocal=True)
        else:
            buffer[slots], scales[slots] = encode(x[keep], scale, scale_choice)
    return {
        "k_buffer": k_buffer,
        "v_buffer": v_buffer,
        "k_scale_buffer": k_scale_buffer,
        "v_scale_buffer": v_scale_buffer,
    }


def traffic(
    tokens: int, heads: int, k_dim: int, v_dim: int, id_bytes: int, *, fp8_keys: bool = False
) -> Traffic:
    """Compulsory bytes, see *Bytes* above; about ten operations a value."""
    values = heads * (k_dim + v_dim)
    k_row = k_dim if fp8_keys else k_dim // 2 + k_dim // BLOCK
    each = 2 * values + heads * (k_row + v_dim // 2 + v_dim // BLOCK) + id_bytes
    return Traffic(bytes=tokens * each, flops=10 * tokens * values, unit="fp32")


# --- Triton ---------------------------------------------------------------------------------------------------------


@triton.jit
def _inverse(scale_ptr, inverse):
    """1 / global scale: the number given, or that of a scale in memory; NaN where it is out of range."""
    if scale_ptr is None:
        return inverse
    else:
        scale = tl.load(scale_ptr).to(tl.float32)
        valid = (scale >= 5.421010862427522e-20) & (scale <= 18446744073709551616.0)
        return tl.where(valid, tl.div_rn(1.0, scale), float("nan"))


@triton.jit
def _write(
    x_ptr,
    x_token_stride,
    x_head_stride,
    loc_ptr,
    loc_stride,
    buffer_ptr,
    buffer_slot_stride,
    buffer_head_stride,
    scales_ptr,
    scales_slot_stride,
    scales_head_stride,
    tokens,
    slots,
    inverse,
    HEADS: tl.constexpr,
    PER_ROW: tl.constexpr,
    TILE: tl.constexpr,
    SEARCH: tl.constexpr,
    NATIVE: tl.constexpr,
):
    # Without sign: a quotient by a power of two is a shift.
    block = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.uint32)
    token, column = block // PER_ROW, (block % PER_ROW).to(tl.int32)
    token, head = (token // HEADS).to(tl.int32), (token % HEADS).to(tl.int64)
    live = token < tokens
    loc = tl.load(loc_ptr + token.to(tl.int64) * loc_stride, mask=live, other=0).to(tl.int64)
    word = tl.arange(0, 8)[None, :]
    start = token.to(tl.int64) * x_token_stride + head * x_head_stride + column * 8
    # Not masked by the ids: the load need not wait for them.
    pair = tl.load(x_ptr + start[:, None] + word, mask=live[:, None], other=0)
    pair = pair.to(tl.uint32, bitcast=True)

    keep = (loc > 0) & (loc < slots)
    row = buffer_ptr + loc * buffer_slot_stride + head * buffer_head_stride
    even = (pair << 16).to(tl.float32, bitcast=True)
    odd = (pair & 0xFFFF0000).to(tl.float32, bitcast=True)
    if scales_ptr is None:
        two = encode_e4m3fn_pairs(even * inverse, odd * inverse, NATIVE > 0)
        to = (row + column * 16).to(tl.pointer_type(tl.uint16))
        tl.store(to[:, None] + word, two, mask=keep[:, None])
    else:
        codes = block_scale(block_amax(pair, NATIVE), inverse, NATIVE)
        if SEARCH:
            codes = search_scale(codes, even, odd, inverse)
        factor = block_factor(codes, inverse, NATIVE)
        packed = pack_e2m1(even, odd, tl.broadcast_to(factor[:, None], [TILE, 8]), NATIVE)
        tl.store((row + column * 8)[:, None] + word, packed, mask=keep[:, None])
        to = loc * scales_slot_stride + head * scales_head_stride + column
        tl.store(scales_ptr + to, codes, mask=keep)


@triton.jit(do_not_specialize=["tokens", "slots"])
def _nvfp4_write_kernel(
    k_ptr,  # [T, heads, Dk / 2] words: two bf16 each
    v_ptr,
    loc_ptr,  # [T] int32 or int64
    k_buffer_ptr,  # [slots, heads, Dk / 2] uint8, or [slots, heads, Dk] of FP8 keys
    v_buffer_ptr,
    k_scales_ptr,  # [slots, heads, Dk / 16] uint8; None for FP8 keys
    v_scales_ptr,
    k_global_ptr,  # fp32, or None
    v_global_ptr,
    k_token_stride,  # in words
    k_head_stride,
    v_token_stride,
    v_head_stride,
    loc_stride,
    k_buffer_slot_stride,
    k_buffer_head_stride,
    v_buffer_slot_stride,
    v_buffer_head_stride,
    k_scales_slot_stride,
    k_scales_head_stride,
    v_scales_slot_stride,
    v_scales_head_stride,
    tokens,
    slots,
    k_inverse,
    v_inverse,
    HEADS: tl.constexpr,  # 1 where the heads of a token lie side by side everywhere
    K_PER_ROW: tl.constexpr,  # blocks of a head, or of all
    V_PER_ROW: tl.constexpr,
    TILE: tl.constexpr,
    SEARCH: tl.constexpr,
    NATIVE: tl.constexpr,
):
    if tl.program_id(1) == 0:
        _write(
            k_ptr, k_token_stride, k_head_stride, loc_ptr, loc_stride,
            k_buffer_ptr, k_buffer_slot_stride, k_buffer_head_stride,
            k_scales_ptr, k_scales_slot_stride, k_scales_head_stride,
            tokens, slots, _inverse(k_global_ptr, k_inverse), HEADS, K_PER_ROW, TILE, SEARCH, NATIVE,
        )  # fmt: skip
    else:
        _write(
            v_ptr, v_token_stride, v_head_stride, loc_ptr, loc_stride,
            v_buffer_ptr, v_buffer_slot_stride, v_buffer_head_stride,
            v_scales_ptr, v_scales_slot_stride, v_scales_head_stride,
            tokens, slots, _inverse(v_global_ptr, v_inverse), HEADS, V_PER_ROW, TILE, SEARCH, NATIVE,
        )  # fmt: skip


# --- Public function ------------------------------------------------------------------------------------------------


class _Side(NamedTuple):
    """K or V, checked."""

    words: torch.Tensor
    buffer: torch.Tensor
    scales: torch.Tensor | None  # none: FP8
    scale: torch.Tensor | None  # on the device
    inverse: float

    @property
    def per_row(self) -> int:
        return 2 * int(self.words.shape[2]) // BLOCK

    @property
    def joined(self) -> bool:
        """Whether the heads of a token lie side by side in all that there is."""
        there = [self.words, self.buffer, *([] if self.scales is None else [self.scales])]
        return all(t.shape[1] == 1 or t.stride(1) == t.shape[2] for t in there)

    @property
    def scale_strides(self) -> tuple[int, int]:
        return (0, 0) if self.scales is None else (self.scales.stride(0), self.scales.stride(1))


def nvfp4_write(
    k: torch.Tensor,
    v: torch.Tensor,
    loc: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale_buffer: torch.Tensor | None,
    v_scale_buffer: torch.Tensor,
    *,
    k_global_scale: Scale = 1.0,
    v_global_scale: Scale = 1.0,
    scale_choice: ScaleChoice = "amax",
    tile: Tile = TILE,
) -> None:
    """Quantise K and V of new tokens and write them at their slots; neither synchronises nor allocates for contiguous heads.

    Args:
        k, v: bf16 [T, heads, D], any strides; a head whose values do not lie side by side at whole words is copied.
        loc: [T] int32 or int64, any stride; ids 1 … slots - 1 are written, all others skipped.
        k_buffer, v_buffer: uint8 [slots, heads, D / 2], the bytes of a head side by side; k_buffer of FP8 keys [slots, heads, Dk], heads at even addresses.
        k_scale_buffer, v_scale_buffer: uint8 [slots, heads, D / 16], likewise. None for k_scale_buffer: keys are FP8.
        k_global_scale, v_global_scale: a number in 2^-64 … 2^64, or an fp32 tensor of one element on the device, which is not read back.
        scale_choice: "amax", or "mse": of 11 scales for a block the one of least squared error, with global scales of what is NVFP4 that are numbers and powers of two.
        tile: others are for the sweep of the workbench.

    Raises:
        TypeError: a dtype is not the one named.
        ValueError: shapes, strides, devices or a scale do not fit, or `scale_choice` is another word.
    """
    if loc.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"loc: expected int32 or int64, got {loc.dtype}")
    if loc.dim() != 1 or loc.device != k_buffer.device:
        raise ValueError(
            f"loc: expected [T] on {k_buffer.device}, got {list(loc.shape)} on {loc.device}"
        )
    check_scale_choice(scale_choice)
    tokens = loc.shape[0]
    one = _checked("k", k, tokens, k_buffer, k_scale_buffer, k_global_scale, scale_choice)
    other = _checked("v", v, tokens, v_buffer, v_scale_buffer, v_global_scale, scale_choice)
    slots, heads = k_buffer.shape[:2]
    if v_buffer.shape[:2] != (slots, heads) or v_buffer.device != k_buffer.device:
        raise ValueError(
            f"v_buffer: expected [{slots}, {heads}, D / 2] on {k_buffer.device}, got {list(v_buffer.shape)} on {v_buffer.device}"
        )
    blocks = tokens * heads * max(one.per_row, other.per_row)
    rows, each = (1, heads) if one.joined and other.joined else (heads, 1)  # a token's
    if not blocks:
        return
    if blocks >= 2**31 - tile.blocks:
        raise ValueError(f"k: {tokens} tokens are too many for one call")
    _nvfp4_write_kernel[(triton.cdiv(blocks, tile.blocks), 2)](
        one.words,
        other.words,
        loc,
        one.buffer,
        other.buffer,
        one.scales,
        other.scales,
        one.scale,
        other.scale,
        *one.words.stride()[:2],
        *other.words.stride()[:2],
        loc.stride(0),
        *one.buffer.stride()[:2],
        *other.buffer.stride()[:2],
        *one.scale_strides,
        *other.scale_strides,
        tokens,
        slots,
        one.inverse,
        other.inverse,
        HEADS=rows,
        K_PER_ROW=each * one.per_row,
        V_PER_ROW=each * other.per_row,
        TILE=tile.blocks,
        SEARCH=scale_choice == "mse",
        NATIVE=rounding(k_buffer.device),
        num_warps=tile.warps,
    )


def rounding(device: torch.device) -> int:
    """NATIVE of `codec.pack_e2m1`: sm100's own conversion rounds without fp16's limit, so Blackwell does as Hopper."""
    return ARITHMETIC if native(device) == ARITHMETIC else FP8_CONVERSIONS


def check_global(name: str, scale: float) -> float:
    """The scale; ValueError unless it lies in 2^-64 … 2^64."""
    if not SMALLEST <= scale <= LARGEST:
        raise ValueError(f"{name} is a number in 2^-64 … 2^64, got {scale!r}")
    return scale


def check_global_tensor(name: str, scale: torch.Tensor, device: torch.device) -> None:
    """Raises TypeError, ValueError unless it is one fp32 number on the device."""
    if scale.dtype != torch.float32:
        raise TypeError(f"{name}: expected float32, got {scale.dtype}")
    if scale.numel() != 1 or scale.device != device:
        raise ValueError(
            f"{name}: expected one element on {device}, got {list(scale.shape)} on {scale.device}"
        )


def _checked(
    name: str,
    x: torch.Tensor,
    tokens: int,
    buffer: torch.Tensor,
    scales: torch.Tensor | None,
    scale: Scale,
    scale_choice: ScaleChoice,
) -> _Side:
    if x.dtype != torch.bfloat16:
        raise TypeError(f"{name}: expected bfloat16, got {x.dtype}")
    if x.dim() != 3 or x.shape[0] != tokens or x.device != buffer.device:
        raise ValueError(
            f"{name}: expected [{tokens}, heads, D] on {buffer.device}, got {list(x.shape)} on {x.device}"
        )
    heads, dim = x.shape[1:]
    if dim % BLOCK or not BLOCK <= dim <= MAX_DIM:
        raise ValueError(f"{name}: D is a multiple of {BLOCK} up to {MAX_DIM}, got {dim}")
    slots = buffer.shape[0] if buffer.dim() else 0
    if scales is None:
        check_bytes(f"{name}_buffer", buffer, (slots, heads, dim), buffer.device)
        check_even(f"{name}_buffer", buffer)
    else:
        check_bytes(f"{name}_buffer", buffer, (slots, heads, dim // 2), buffer.device)
        check_bytes(f"{name}_scale_buffer", scales, (slots, heads, dim // BLOCK), buffer.device)
    inverse, on_device = 1.0, None
    if scales is not None and scale_choice == "mse":
        if isinstance(scale, torch.Tensor):
            raise ValueError(
                f"{name}_global_scale: scale_choice 'mse' takes a number, got a tensor"
            )
        check_global_scale(scale)
    if isinstance(scale, torch.Tensor):
        check_global_tensor(f"{name}_global_scale", scale, buffer.device)
        on_device = scale
    else:
        check_global(f"{name}_global_scale", scale)
        inverse = float(1.0 / torch.tensor(scale, dtype=torch.float32))
    return _Side(_words_of(x), buffer, scales, on_device, inverse)


def check_bytes(
    name: str, buffer: torch.Tensor, shape: tuple[int, int, int], device: torch.device
) -> None:
    """Raises TypeError, ValueError unless it is uint8 of that shape, the bytes of a head side by side, no two heads overlapping."""
    if buffer.dtype != torch.uint8:
        raise TypeError(f"{name}: expected uint8, got {buffer.dtype}")
    if tuple(buffer.shape) != shape or buffer.device != device:
        raise ValueError(
            f"{name}: expected {list(shape)} on {device}, got {list(buffer.shape)} on {buffer.device}"
        )
    strides = [s for s, size in zip(buffer.stride(), shape, strict=True) if size > 1]
    if buffer.stride(2) != 1 or any(s < shape[2] for s in strides[:-1]):
        raise ValueError(
            f"{name}: the bytes of a head must lie side by side and heads may not overlap, got strides {buffer.stride()}"
        )


def check_even(name: str, buffer: torch.Tensor) -> None:
    """ValueError unless heads start at multiples of 2 bytes."""
    if buffer.data_ptr() % 2 or any(stride % 2 for stride in buffer.stride()[:2]):
        raise ValueError(
            f"{name}: heads must start at multiples of 2 bytes, got strides {buffer.stride()}"
        )


def _words_of(x: torch.Tensor) -> torch.Tensor:
    """bf16 [T, heads, D] as int32 [T, heads, D / 2]; copied where its heads do not lie at whole words."""
    odd = [stride % 2 for stride, size in zip(x.stride()[:2], x.shape[:2], strict=True) if size > 1]
    if x.stride(2) != 1 or any(odd) or x.data_ptr() % 4:
        x = x.clone(memory_format=torch.contiguous_format)
    elif x.numel():
        # The stride of a dimension of one says nothing.
        tokens, heads, dim = x.shape
        x = x.as_strided(
            x.shape,
            (
                x.stride(0) if tokens > 1 else heads * dim,
                x.stride(1) if heads > 1 else dim,
                1,
            ),
        )
    return x.view(torch.int32)
