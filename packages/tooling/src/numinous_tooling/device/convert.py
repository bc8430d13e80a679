# SPDX-License-Identifier: Apache-2.0
"""Narrow number formats in Triton, bit for bit what `numinous_tooling.numerics` specifies under the same names.

Why not `x.to(tl.bfloat16)`: the interpreter of Triton 3.6 truncates that cast, and its FP8 casts lose carries, saturation and
subnormals. The functions here use integer arithmetic, and fp32 additions that are exact or rounded once, so the interpreter
and every GPU give the same bits.

All are elementwise on blocks of any shape. Encoders take fp32, round to nearest with ties to the even code, saturate, and keep
-0 and subnormals; codes come in uint8, bf16 bits in uint16, decoded values in fp32. A NaN encodes to the format's positive NaN
(E2M1, which has none: +6), except that bf16 keeps sign and payload.

`NATIVE=True` takes Triton's own cast in place of the arithmetic, where NVIDIA GPUs from sm90 have an instruction for it
(`cvt.rn.satfinite.e4m3x2.f32` and its like); the interpreter must not. By the PTX manual the bits are the same but for the
payload of a bf16 NaN; `test_every_fp32` compares all 2^32 values on the GPU it runs on. Not for gfx950, where nothing here
promises that the cast saturates.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "decode_bf16",
    "decode_e2m1",
    "decode_e4m3fn",
    "decode_e5m2",
    "decode_ue8m0",
    "encode_bf16",
    "encode_e2m1",
    "encode_e4m3fn",
    "encode_e4m3fn_pairs",
    "encode_e5m2",
    "encode_ue8m0",
    "pack_nibbles",
    "ue8m0_scale_ceil",
    "ue8m0_scale_floor",
    "unpack_nibbles",
]

_INF = tl.constexpr(0x7F800000)  # fp32 bits; larger magnitudes are NaN
_QUIET_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def _encode(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr, NAN: tl.constexpr):
    """Code of fp32 `x` in a format of `MANTISSA` bits and exponent bias `BIAS`, `LAST` being the largest finite code.

    The sign bit is the one above the bits of `LAST`.
    """
    DROPPED: tl.constexpr = 23 - MANTISSA
    SMALLEST_NORMAL: tl.constexpr = (128 - BIAS) << 23
    # A power of two whose ulp is the format's subnormal step: adding it rounds |x| to that step.
    MAGIC: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    MAGIC_BITS: tl.constexpr = (151 - BIAS - MANTISSA) << 23
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = magnitude + ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)
    normal = (rounded >> DROPPED) - ((127 - BIAS) << MANTISSA)
    size = magnitude.to(tl.float32, bitcast=True)
    subnormal = (size + MAGIC).to(tl.uint32, bitcast=True) - MAGIC_BITS
    code = tl.minimum(tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal), LAST)
    SIGN: tl.constexpr = 8 if LAST == 7 else 0x80
    code = code | tl.where(bits > 0x7FFFFFFF, SIGN, 0).to(tl.uint32)
    return tl.where(magnitude > _INF, NAN, code).to(tl.uint8)


@triton.jit
def _decode(magnitude, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """fp32 bits in uint32 of a code without sign bit, special codes read as if they were numbers."""
    MAGIC: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    MAGIC_BITS: tl.constexpr = (151 - BIAS - MANTISSA) << 23
    normal = (magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23)
    subnormal = (magnitude + MAGIC_BITS).to(tl.float32, bitcast=True) - MAGIC
    return tl.where(magnitude < (1 << MANTISSA), subnormal.to(tl.uint32, bitcast=True), normal)


@triton.jit
def encode_bf16(x, NATIVE: tl.constexpr = False):
    """bf16 bits in uint16 of fp32 `x`; beyond the largest bf16 it rounds to inf, a NaN stays one and becomes quiet."""
    if NATIVE:
        return x.to(tl.bfloat16).to(tl.uint16, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return tl.where((bits & 0x7FFFFFFF) > _INF, quiet, rounded).to(tl.uint16)


@triton.jit
def decode_bf16(bits):
    """fp32 of bf16 bits in uint16."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def encode_e4m3fn(x, NATIVE: tl.constexpr = False):
    """E4M3FN codes of fp32 `x`; beyond 448 and ±inf give ±448, NaN gives 0x7f."""
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return _encode(x, 3, 7, 0x7E, 0x7F)


@triton.jit
def encode_e4m3fn_pairs(low, high, NATIVE: tl.constexpr = False):
    """uint16 of two E4M3FN codes side by side, that of fp32 `low` in the low byte; values as `encode_e4m3fn`.

    NATIVE is one instruction a pair. Two conversions joined by a shift are not only slower: for sm_90a the ptxas in Triton 3.6 makes
    of `{x, x >> 8}` one conversion that merges itself with a register which does not hold x, and bytes are lost (seen on an H200; the PTX is right).
    """
    if NATIVE:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;",
            "=h,f,f",
            [low, high],
            dtype=tl.uint16,
            is_pure=True,
            pack=1,
        )
    return encode_e4m3fn(low).to(tl.uint16) | (encode_e4m3fn(high).to(tl.uint16) << 8)


@triton.jit
def decode_e4m3fn(codes):
    """fp32 of E4M3FN codes; 0x7f and 0xff are NaN."""
    wide = codes.to(tl.uint32)
    magnitude = wide & 0x7F
    bits = tl.where(magnitude == 0x7F, _QUIET_NAN, _decode(magnitude, 3, 7))
    return (bits | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def encode_e5m2(x, NATIVE: tl.constexpr = False):
    """E5M2 codes of fp32 `x`; beyond 57344 and ±inf give ±57344, NaN gives 0x7f."""
    if NATIVE:
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return _encode(x, 2, 15, 0x7B, 0x7F)


@triton.jit
def decode_e5m2(codes):
    """fp32 of E5M2 codes; magnitude 0x7c is inf, 0x7d … 0x7f are NaN."""
    wide = codes.to(tl.uint32)
    magnitude = wide & 0x7F
    special = tl.where(magnitude == 0x7C, _INF, _QUIET_NAN).to(tl.uint32)
    bits = tl.where(magnitude < 0x7C, _decode(magnitude, 2, 15), special)
    return (bits | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def encode_e2m1(x):
    """E2M1 codes 0 … 15 of fp32 `x`, one per uint8; beyond 6 and ±inf give ±6, NaN gives 0x7."""
    return _encode(x, 1, 1, 0x7, 0x7)


@triton.jit
def decode_e2m1(codes):
    """fp32 of E2M1 codes; the upper four bits are ignored."""
    wide = codes.to(tl.uint32)
    return (_decode(wide & 0x7, 1, 1) | ((wide & 0x8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def pack_nibbles(even, odd):
    """Bytes of two blocks of 4-bit codes in uint8: those of even columns in the low nibble. Upper bits of a code must be 0."""
    return even | (odd << 4)


@triton.jit
def unpack_nibbles(packed):
    """Two blocks of 4-bit codes, of the even and of the odd columns, from uint8."""
    return packed & 0xF, packed >> 4


@triton.jit
def encode_ue8m0(x, ROUND_UP: tl.constexpr):
    """UE8M0 codes of |x|, fp32: the power of two not below (`ROUND_UP`) or not above. 0 gives 0, inf 0xfe, NaN 0xff."""
    bits = x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    code = bits >> 23
    if ROUND_UP:
        # Among fp32's subnormals those up to 2^-127 (fraction 0x400000) still have code 0.
        exact = tl.where(code == 0, 0x400000, 0).to(tl.uint32)
        code += ((bits & 0x7FFFFF) > exact).to(tl.uint32)
    return tl.where(bits > _INF, 0xFF, tl.minimum(code, 0xFE)).to(tl.uint8)


@triton.jit
def decode_ue8m0(codes):
    """fp32 of UE8M0 codes; 0xff is NaN. The inverse scale 1 / value of a code up to 0xfe is the value of 0xfe - code."""
    wide = codes.to(tl.uint32)
    bits = tl.where(wide == 0xFF, _QUIET_NAN, wide << 23)
    return tl.where(wide == 0, 0x00400000, bits).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def ue8m0_scale_ceil(amax, ELEMENT_MAX: tl.constexpr):
    """UE8M0 codes of the smallest power of two not below the fp32 quotient amax / ELEMENT_MAX."""
    # `/` is an approximation of two ulps on NVIDIA GPUs, and one ulp decides at a power of two.
    return encode_ue8m0(tl.div_rn(amax, ELEMENT_MAX), True)


@triton.jit
def ue8m0_scale_floor(amax, ELEMENT_EMAX: tl.constexpr):
    """UE8M0 codes of 2^(floor(log2 amax) - ELEMENT_EMAX), the rule of OCP MX, of fp32."""
    bits = amax.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    exponent = (tl.minimum(bits, _INF - 1) >> 23).to(tl.int32)
    code = tl.maximum(exponent - ELEMENT_EMAX, 0)
    return tl.where(bits > _INF, 0xFF, code).to(tl.uint8)
