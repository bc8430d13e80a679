# SPDX-License-Identifier: Apache-2.0
"""Narrow number formats in torch: the specification that kernels are tested against, bit for bit.

*Elements* (fp32 → one code per uint8, and back). Rounding is to nearest, ties to the even code; a code is the sign bit
followed by the magnitude's bits, so -0 is a code of its own and survives (but in E4M3FNUZ); fp32 subnormals are not flushed.

| format | largest | smallest | overflow and ±inf | NaN | source |
|---|---|---|---|---|---|
| E2M1 | 6 | 0.5 (subnormal) | ±6 | 0x7 (+6): it has no NaN | OCP MX v1.0; NaN as cuda_fp4.h, `cvt.rn.satfinite` |
| E4M3FN | 448 | 2^-9 (subnormal) | ±448, or NaN with `saturate=False` | 0x7f | OCP FP8 1.0 |
| E5M2 | 57344 | 2^-16 (subnormal) | ±57344, or ±inf with `saturate=False` | 0x7f | OCP FP8 1.0 |
| E4M3FNUZ | 240 | 2^-10 (subnormal) | ±240, or NaN with `saturate=False` | 0x80, the only one: no -0 | gfx942; arXiv 2206.02915 |
| UE8M0 | 2^127 | 2^-127, no zero | 2^127 | 0xff | OCP MX v1.0; sign ignored as `cvt.*.satfinite.ue8m0x2` |

The sign of a NaN is dropped, as NVIDIA's conversions do (torch keeps it): compare kernels' NaN as NaN, not as bits.

*Blocks* lie along the last dimension. A `scale` multiplies on dequantisation. The rules, the same for every format:

- *zero block*: the scale is the format's smallest (+0; 2^-127 for UE8M0), the element codes are ±0 with the sign of the input;
- *tiny amax*: an E4M3FN or UE8M0 scale never rounds to nothing while an element can still be told from zero; an fp32 scale
  does so where the quotient leaves fp32; the limits stand at each function;
- *inf* counts as the largest fp32 when the scale is chosen and saturates as an element: its neighbours stay finite, and so does
  the element, except under a scale that was rounded up to 2^120 or more (UE8M0), where its product is beyond fp32;
- *NaN* anywhere makes the scale NaN and every element code that of NaN: the whole block decodes to NaN.

Inputs are fp32, bf16 or fp16 of any strides and may have 0 rows; a last dimension that is not whole blocks is a ValueError,
another dtype a TypeError. Arithmetic is fp32 with IEEE division: device code that multiplies by a reciprocal may differ
where a quotient falls within an ulp of a tie.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch

__all__ = [
    "E2M1_VALUES",
    "E4M3FNUZ_MAX",
    "E4M3FN_MAX",
    "E5M2_MAX",
    "FP8_GROUP",
    "INT8_GROUP",
    "MXFP4_BLOCK",
    "NVFP4_BLOCK",
    "decode_e2m1",
    "decode_e4m3fn",
    "decode_e4m3fnuz",
    "decode_e5m2",
    "decode_ue8m0",
    "dequantize_fp8",
    "dequantize_int8",
    "dequantize_mxfp4",
    "dequantize_nvfp4",
    "encode_e2m1",
    "encode_e4m3fn",
    "encode_e4m3fnuz",
    "encode_e5m2",
    "encode_ue8m0",
    "matmul_fp8_rows",
    "nvfp4_global_scale",
    "pack_nibbles",
    "quantize_fp8_group",
    "quantize_fp8_rows",
    "quantize_fp8_tensor",
    "quantize_int8",
    "quantize_mxfp4",
    "quantize_nvfp4",
    "ue8m0_scale_ceil",
    "ue8m0_scale_floor",
    "unpack_nibbles",
]

NVFP4_BLOCK = 16
MXFP4_BLOCK = 32
FP8_GROUP = 128
INT8_GROUP = 16
INT8_MAX = 127
INT8_BIAS = 120  # of step codes
INT8_INFINITE = 127  # the step code of a group with a NaN

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by code."""
E2M1_MAX, E2M1_EMAX = 6.0, 2
E4M3FN_MAX = 448.0
E4M3FNUZ_MAX = 240.0
E5M2_MAX = 57344.0
FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127

# 2^-9 × the smallest allowed global scale is still a normal fp32, so that both roundings of a block agree (see below).
GLOBAL_SCALE_MIN, GLOBAL_SCALE_MAX = 2.0**-117, FLOAT32_MAX / (E4M3FN_MAX * E2M1_MAX)
E4M3FN_TINY = 2.0**-9
NVFP4_ZERO_RATIO = E4M3FN_TINY / 4  # at the smallest scale, 0.25 is a tie that goes to zero


def _magnitudes(
    exponent_bits: int, mantissa_bits: int, bias: int | None = None
) -> tuple[float, ...]:
    """Values of all codes without sign bit, special ones read as if they were numbers; IEEE's bias where none is given."""
    steps = 2**mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1 if bias is None else bias
    subnormal = [m / steps * 2.0 ** (1 - bias) for m in range(steps)]
    normal = [
        (1 + m / steps) * 2.0 ** (e - bias)
        for e in range(1, 2**exponent_bits)
        for m in range(steps)
    ]
    return tuple(subnormal + normal)


_E4M3FN_GRID = _magnitudes(4, 3)  # code 0x7f, here 480, is NaN
_E4M3FNUZ_GRID = _magnitudes(4, 3, bias=8)  # all are numbers
_E5M2_GRID = _magnitudes(5, 2)[:0x7D]  # code 0x7c, here 65536, is inf

assert _magnitudes(2, 1) == E2M1_VALUES
assert (_E4M3FN_GRID[0x7E], _E4M3FN_GRID[1], _E4M3FN_GRID[0x7F]) == (E4M3FN_MAX, E4M3FN_TINY, 480)
assert (_E4M3FNUZ_GRID[0x7F], _E4M3FNUZ_GRID[1]) == (E4M3FNUZ_MAX, 2.0**-10)
assert (_E5M2_GRID[0x7B], _E5M2_GRID[0x7C]) == (E5M2_MAX, 65536)


# --- Elements -------------------------------------------------------------------------------------------------------


def _as_float32(x: torch.Tensor) -> torch.Tensor:
    """fp32 of a narrower type, exactly; float64 would round twice."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"expected float32, bfloat16 or float16, got {x.dtype}")
    return x.to(torch.float32)


def _check_codes(codes: torch.Tensor) -> torch.Tensor:
    if codes.dtype != torch.uint8:
        raise TypeError(f"expected codes in uint8, got {codes.dtype}")
    return codes


def _nearest(x: torch.Tensor, grid: tuple[float, ...], sign_bit: int, nan: int) -> torch.Tensor:
    """Codes of the nearest grid values, ties to the even code, beyond the grid its last code.

    Written as the definition of rounding (a count of midpoints), not with the bit arithmetic that kernels use.
    """
    x = _as_float32(x).contiguous()
    # Midpoints need one bit more than the grid's values: exact in fp32.
    middles = torch.tensor([(low + high) / 2 for low, high in pairwise(grid)], device=x.device)
    below = torch.searchsorted(middles, x.abs())
    not_above = torch.searchsorted(middles, x.abs(), right=True)
    magnitude = torch.where(below % 2 == 0, below, not_above)  # they differ on a tie only
    code = magnitude + sign_bit * torch.signbit(x)
    return torch.where(x.isnan(), nan, code).to(torch.uint8)


def _lookup(codes: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table[_check_codes(codes).long()]


def _signed(magnitudes: tuple[float, ...]) -> tuple[float, ...]:
    return (*magnitudes, *(-value for value in magnitudes))


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """E2M1 codes 0 … 15 in uint8, unpacked, in the shape of `x`; saturates at ±6, NaN gives 0x7."""
    return _nearest(x, E2M1_VALUES, 0x8, nan=0x7)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of E2M1 codes; the upper four bits are ignored."""
    return _lookup(_check_codes(codes) & 0xF, _signed(E2M1_VALUES))


def encode_e4m3fn(x: torch.Tensor, *, saturate: bool = True) -> torch.Tensor:
    """E4M3FN codes in uint8, in the shape of `x`.

    Args:
        x: fp32, bf16 or fp16.
        saturate: beyond 448 and ±inf give ±448 (`cvt.rn.satfinite`, what every KV and GEMM path of the engine does);
            without it what rounds beyond 448, that is above 464, gives NaN of that sign.
    """
    return _nearest(x, _E4M3FN_GRID[:0x7F] if saturate else _E4M3FN_GRID, 0x80, nan=0x7F)


def decode_e4m3fn(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of E4M3FN codes; 0x7f and 0xff are NaN."""
    return _lookup(codes, _signed((*_E4M3FN_GRID[:0x7F], float("nan"))))


def encode_e4m3fnuz(x: torch.Tensor, *, saturate: bool = True) -> torch.Tensor:
    """E4M3FNUZ codes in uint8, in the shape of `x`: E4M3 with bias 8, no -0, and 0x80 for NaN.

    Args:
        x: fp32, bf16 or fp16; what rounds to zero gives 0 whatever its sign.
        saturate: beyond 240 and ±inf give ±240; without it 248 (a tie) and more give NaN, as torch does.

    The engine scales by 224 in place of 240 on gfx942.
    """
    grid = _E4M3FNUZ_GRID if saturate else (*_E4M3FNUZ_GRID, 256.0)
    magnitude = _nearest(x, grid, 0, nan=0x80)
    signed = torch.signbit(x) & (magnitude > 0) & (magnitude < 0x80)
    return magnitude + 0x80 * signed.to(torch.uint8)


def decode_e4m3fnuz(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of E4M3FNUZ codes; 0x80 is NaN."""
    return _lookup(
        codes, (*_E4M3FNUZ_GRID, float("nan"), *(-value for value in _E4M3FNUZ_GRID[1:]))
    )


def encode_e5m2(x: torch.Tensor, *, saturate: bool = True) -> torch.Tensor:
    """E5M2 codes in uint8, in the shape of `x`.

    Args:
        x: fp32, bf16 or fp16.
        saturate: beyond 57344 and ±inf give ±57344; without it 61440 (a tie, to the even code) and more give ±inf.
    """
    return _nearest(x, _E5M2_GRID[:0x7C] if saturate else _E5M2_GRID, 0x80, nan=0x7F)


def decode_e5m2(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of E5M2 codes; magnitude 0x7c is inf, 0x7d … 0x7f are NaN."""
    special = (float("inf"), float("nan"), float("nan"), float("nan"))
    return _lookup(codes, _signed((*_E5M2_GRID[:0x7C], *special)))


def encode_ue8m0(x: torch.Tensor, *, rounding: Literal["up", "down"]) -> torch.Tensor:
    """UE8M0 codes in uint8 (value 2^(code - 127)) of |x|, in the shape of `x`.

    Args:
        x: fp32, bf16 or fp16; the sign is ignored.
        rounding: to the next power of two not below (`cvt.rp`) or not above (`cvt.rz`). Nearest, as torch's own cast to
            `float8_e8m0fnu`, is no rule of any scale and not offered.

    Out of range gives the nearest code: 0 gives 2^-127, inf 2^127. NaN gives 0xff.
    """
    if rounding not in ("up", "down"):
        raise ValueError(f"rounding is 'up' or 'down', got {rounding!r}")
    x = _as_float32(x)
    bits = x.abs().contiguous().view(torch.int32)
    code, fraction = bits >> 23, bits & 0x7FFFFF
    if rounding == "up":
        # Among fp32's subnormals those up to 2^-127 (fraction 0x400000) still have code 0.
        code = code + (fraction > torch.where(code == 0, 0x400000, 0)).int()
    return torch.where(x.isnan(), 0xFF, code.clamp(max=0xFE)).to(torch.uint8)


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """fp32 powers of two of UE8M0 codes; code 0 is 2^-127, a subnormal of fp32; 0xff is NaN."""
    wide = _check_codes(codes).int()
    bits = torch.where(wide == 0, 0x00400000, torch.where(wide == 0xFF, 0x7FC00000, wide << 23))
    return bits.int().view(torch.float32)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Two 4-bit codes per byte, the even column in the low nibble: uint8 [..., K] → uint8 [..., K / 2].

    Raises ValueError for an odd K or a code above 15.
    """
    if _check_codes(codes).shape[-1] % 2:
        raise ValueError(
            f"4-bit codes are packed in pairs; last dimension {codes.shape[-1]} is odd"
        )
    if bool((codes > 0xF).any()):
        raise ValueError("a 4-bit code is above 15")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_nibbles`: uint8 [..., K / 2] → uint8 [..., K]."""
    return torch.stack((_check_codes(packed) & 0xF, packed >> 4), dim=-1).flatten(-2)


# --- Scales ---------------------------------------------------------------------------------------------------------


def ue8m0_scale_ceil(amax: torch.Tensor, *, element_max: float) -> torch.Tensor:
    """UE8M0 codes of the smallest power of two that is not below amax / element_max.

    DeepGEMM's rule and that of the engine's UE8M0 kernels: no element is clipped, up to one bit of range is unused. The
    quotient is rounded to fp32 first; an amax within that rounding of a power of two may still be clipped, by half an ulp.
    """
    return encode_ue8m0(_as_float32(amax) / element_max, rounding="up")


def ue8m0_scale_floor(amax: torch.Tensor, *, element_emax: int) -> torch.Tensor:
    """UE8M0 codes of 2^(floor(log2 amax) - element_emax), the conversion of OCP MX v1.0.

    Elements between the format's largest and the next power of two are clipped (E2M1: an amax of 6 … 8 scales).

    Args:
        amax: largest magnitudes, ≥ 0.
        element_emax: exponent of the element format's largest normal: E2M1 2, E4M3FN 8, E5M2 15.
    """
    amax = _as_float32(amax)
    exponent = torch.frexp(amax).exponent - 1  # frexp's mantissa lies in [0.5, 1)
    code = (exponent - element_emax + 127).clamp(0, 0xFE)
    code = torch.where(amax == 0, 0, torch.where(amax.isinf(), 0xFE - element_emax, code))
    return torch.where(amax.isnan(), 0xFF, code).to(torch.uint8)


def _blocks(x: torch.Tensor, size: int, what: str) -> torch.Tensor:
    """[..., K] → fp32 [..., K / size, size]."""
    x = _as_float32(x)
    if x.ndim == 0 or x.shape[-1] % size:
        raise ValueError(
            f"{what} needs a last dimension in multiples of {size}, got {list(x.shape)}"
        )
    return x.unflatten(-1, (x.shape[-1] // size, size))


def _amax(blocks: torch.Tensor) -> torch.Tensor:
    """[..., n, size] → [..., n]; NaN propagates, inf counts as the largest fp32."""
    return blocks.abs().amax(-1).clamp(max=FLOAT32_MAX)


def _divide(blocks: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """blocks / scale; under a scale of 0 every element is a zero of its sign."""
    scale = scale.unsqueeze(-1)
    return torch.where(scale == 0, blocks * 0.0, blocks / scale)


def _scaled(values: torch.Tensor, scale: torch.Tensor, what: str) -> torch.Tensor:
    """fp32 [..., K] × fp32 [..., n], each scale for K / n neighbours."""
    blocks, columns = scale.shape[-1], values.shape[-1]
    if values.shape[:-1] != scale.shape[:-1] or (columns % blocks if blocks else columns):
        raise ValueError(f"{what}: scales {list(scale.shape)} do not fit {list(values.shape)}")
    if not blocks:
        return values
    return (values.unflatten(-1, (blocks, columns // blocks)) * scale.unsqueeze(-1)).flatten(-2)


# --- NVFP4 ----------------------------------------------------------------------------------------------------------


def nvfp4_global_scale(x: torch.Tensor) -> torch.Tensor:
    """fp32 scalar amax / (448 × 6): the block with the largest element then gets the largest scale.

    A tensor of zeros gives 1; the result is kept in [2^-117, largest fp32 / 2688]. NaN is refused by `quantize_nvfp4`.
    """
    if x.numel() == 0:
        return torch.ones((), device=x.device)
    amax = _as_float32(x).abs().amax().clamp(max=FLOAT32_MAX)
    scale = (amax / (E4M3FN_MAX * E2M1_MAX)).clamp(GLOBAL_SCALE_MIN, GLOBAL_SCALE_MAX)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def _check_global(scale: torch.Tensor | float | None, device: torch.device) -> torch.Tensor | None:
    if scale is None:
        return None
    number: torch.Tensor = torch.as_tensor(scale, dtype=torch.float32, device=device)
    if number.numel() != 1 or not GLOBAL_SCALE_MIN <= float(number) <= GLOBAL_SCALE_MAX:
        raise ValueError(
            f"global_scale is one number in [2^-117, {GLOBAL_SCALE_MAX:.3g}], got {number.tolist()}"
        )
    return number.reshape(())


def quantize_nvfp4(
    x: torch.Tensor,
    *,
    global_scale: torch.Tensor | float | None = None,
    scale_choice: Literal["amax", "mse"] = "amax",
    search: tuple[int, int] = (6, 6),
) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4: E2M1 in blocks of 16, one E4M3FN scale per block, optionally one fp32 scale above all.

    With ratio = amax / global_scale (a global scale of None is left out, not multiplied):

    - *zero*: ratio ≤ 2^-11 gives scale code 0 and ±0 elements: even under the smallest scale they would round to zero;
    - *amax*: the scale is E4M3FN(ratio / 6), rounded to nearest and saturated, but at least 2^-9. So elements may be clipped
      by the scale's own rounding (up to 1/16, more among the subnormal scales), and a ratio above 2688 is clipped;
    - *mse*: of the scale codes from `search[0]` below to `search[1]` above that one, within 1 … 126, the one with the least
      squared error, summed in fp64; among equals the nearest to it, the lower first. Never worse than *amax*.

    An element is E2M1(x / (scale × global_scale)), the product rounded to fp32 first.

    Quantising again what was dequantised gives the same bytes for *amax* without global scale, except where the scale is
    2^-8 and the largest element 4 (amax / scale between 4.5 and 5 does not exist under any normal scale).

    Args:
        x: [..., K], K a multiple of 16.
        global_scale: one positive number that multiplies on dequantisation; `nvfp4_global_scale` is the usual one.
        scale_choice: how block scales are chosen.
        search: how many scale codes below and above are tried.

    Returns:
        bytes [..., K / 2] uint8, low nibble = even column, and scales [..., K / 16] as E4M3FN codes in uint8, not swizzled.
    """
    blocks = _blocks(x, NVFP4_BLOCK, "NVFP4")
    above = _check_global(global_scale, x.device)
    if scale_choice not in ("amax", "mse"):
        raise ValueError(f"scale_choice is 'amax' or 'mse', got {scale_choice!r}")
    if min(search) < 0:
        raise ValueError(f"search counts codes below and above, got {search}")
    amax = _amax(blocks)
    ratio = amax if above is None else amax / above
    scales = encode_e4m3fn((ratio / E2M1_MAX).clamp(min=E4M3FN_TINY))
    scales = torch.where(ratio <= NVFP4_ZERO_RATIO, 0, scales.int()).to(torch.uint8)
    codes = _nvfp4_elements(blocks, scales, above)
    if scale_choice == "mse":
        scales, codes = _search_scales(blocks, scales, codes, above, search)
    return pack_nibbles(codes.flatten(-2)), scales


def _nvfp4_elements(
    blocks: torch.Tensor, scales: torch.Tensor, above: torch.Tensor | None
) -> torch.Tensor:
    scale = decode_e4m3fn(scales)
    return encode_e2m1(_divide(blocks, scale if above is None else scale * above))


def _nvfp4_values(
    codes: torch.Tensor, scales: torch.Tensor, above: torch.Tensor | None
) -> torch.Tensor:
    values = _scaled(decode_e2m1(codes), decode_e4m3fn(scales), "NVFP4")
    return values if above is None else values * above


def _search_scales(
    blocks: torch.Tensor,
    first: torch.Tensor,
    codes: torch.Tensor,
    above: torch.Tensor | None,
    search: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and codes of least squared error; blocks of zeros, with NaN or inf keep the first choice."""

    exact = blocks.double()

    def error(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        values = _nvfp4_values(codes.flatten(-2), scales, above).view_as(blocks).double()
        # Less Σ x², which all have in common: values that become zero, however small, then round nothing away.
        return (values * (values - 2.0 * exact)).sum(-1)

    scales, least = first, error(codes, first)
    offsets = sorted(range(-search[0], search[1] + 1), key=lambda offset: (abs(offset), offset))
    for offset in offsets[1:]:
        tried = (first.int() + offset).clamp(1, 0x7E).to(torch.uint8)
        elements = _nvfp4_elements(blocks, tried, above)
        squares = error(elements, tried)
        # Never true with NaN, between infinities, or for a zero block, which is zero under every scale.
        better = squares < least
        scales, least = torch.where(better, tried, scales), torch.where(better, squares, least)
        codes = torch.where(better.unsqueeze(-1), elements, codes)
    return scales, codes


def dequantize_nvfp4(
    packed: torch.Tensor,
    scales: torch.Tensor,
    *,
    global_scale: torch.Tensor | float | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """[..., K / 2] bytes and [..., K / 16] scale codes → [..., K] in `dtype`.

    E2M1 × E4M3FN has at most six significant bits and lies in 2^-10 … 2688: without a global scale the result is exact in
    fp32, bf16 and fp16. With one it is rounded to fp32, then to `dtype`; kernels fold it into what follows instead.
    """
    codes = unpack_nibbles(packed)
    if scales.shape[-1] * NVFP4_BLOCK != codes.shape[-1]:
        raise ValueError(
            f"NVFP4: scales {list(scales.shape)} do not fit bytes {list(packed.shape)}"
        )
    return _nvfp4_values(codes, scales, _check_global(global_scale, packed.device)).to(dtype)


# --- INT8 under a power of two --------------------------------------------------------------------------------------


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 as sign and magnitude in groups of 16, under a step that is a power of two and takes seven bits.

    The idea is that of MXINT8 (OCP MX v1.0: groups of 32, two's complement, UE8M0).

    The step 2^(code - 120) is the smallest of code 0 … 126 under which 127 steps reach the group's largest value. A product has
    seven significant bits, so bf16 and fp32 hold it exactly. An element is off by half a step, 1/127 of the group's largest
    value; beyond 127 × 2^6 = 8128, inf included, it saturates and its neighbours stay finite. -0 keeps its sign.

    Step code 127 is infinite: a group with a NaN gets it and zeros as elements, so that 0 × inf makes all of it NaN.

    Quantising again what was dequantised gives the same bytes.

    Args:
        x: [..., K], K a multiple of 16.

    Returns:
        codes [..., K] uint8, bit 7 the sign, and step codes [..., K / 16] uint8 below 128.
    """
    groups = _blocks(x, INT8_GROUP, "INT8")
    amax = _amax(groups)
    # amax = mantissa × 2^exponent, mantissa in [1/2, 1): up to 127/128 it takes 127 steps of 2^(exponent - 7).
    mantissa, exponent = torch.frexp(amax)
    above = torch.where(mantissa <= INT8_MAX / 128, -7, -6)
    steps = (exponent + above + INT8_BIAS).clamp(0, INT8_INFINITE - 1)
    steps = torch.where(amax == 0, 0, steps)
    count = _divide(groups.abs(), torch.ldexp(torch.ones_like(amax), steps - INT8_BIAS))
    codes = count.round().clamp(max=INT8_MAX).nan_to_num(0.0).int() + 0x80 * torch.signbit(groups)
    nan = amax.isnan()
    codes = torch.where(nan.unsqueeze(-1), 0, codes)
    steps = torch.where(nan, INT8_INFINITE, steps)
    return codes.flatten(-2).to(torch.uint8), steps.to(torch.uint8)


def dequantize_int8(
    codes: torch.Tensor, steps: torch.Tensor, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Codes [..., K] and step codes [..., K / 16] of `quantize_int8` → [..., K] in `dtype`, exact in fp32 and bf16."""
    magnitude = (_check_codes(codes) & 0x7F).float()
    values = torch.where(codes >= 0x80, -magnitude, magnitude)
    exponent = _check_codes(steps).int() - INT8_BIAS
    scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    scale = torch.where(steps == INT8_INFINITE, torch.inf, scale)
    return _scaled(values, scale, "INT8").to(dtype)


# --- MXFP4 ----------------------------------------------------------------------------------------------------------


def quantize_mxfp4(
    x: torch.Tensor, *, scale_rule: Literal["floor", "ceil"] = "floor"
) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4: E2M1 in blocks of 32, one UE8M0 scale per block.

    Zeros give scale code 0 (2^-127) and ±0. An amax so small that the scale would be below 2^-127 uses 2^-127; up to
    2^-129 all elements round to zero. Quantising again what was dequantised gives the same bytes with `floor`; with `ceil`
    the same values (a block whose largest element became 3 comes back under half the scale).

    Args:
        x: [..., K], K a multiple of 32.
        scale_rule: `floor` is OCP MX v1.0, see `ue8m0_scale_floor`; `ceil` never clips, see `ue8m0_scale_ceil`.

    Returns:
        bytes [..., K / 2] uint8, low nibble = even column, and scales [..., K / 32] as UE8M0 codes in uint8, not swizzled.
    """
    blocks = _blocks(x, MXFP4_BLOCK, "MXFP4")
    amax = _amax(blocks)
    if scale_rule == "floor":
        scales = ue8m0_scale_floor(amax, element_emax=E2M1_EMAX)
    elif scale_rule == "ceil":
        scales = ue8m0_scale_ceil(amax, element_max=E2M1_MAX)
    else:
        raise ValueError(f"scale_rule is 'floor' or 'ceil', got {scale_rule!r}")
    codes = encode_e2m1(_divide(blocks, decode_ue8m0(scales)))
    return pack_nibbles(codes.flatten(-2)), scales


def dequantize_mxfp4(
    packed: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[..., K / 2] bytes and [..., K / 32] scale codes → [..., K] in `dtype`.

    Exact in fp32 and bf16, but for elements from 2^128 (scale codes 253 and 254 only), which are inf.
    """
    codes = unpack_nibbles(packed)
    if scales.shape[-1] * MXFP4_BLOCK != codes.shape[-1]:
        raise ValueError(
            f"MXFP4: scales {list(scales.shape)} do not fit bytes {list(packed.shape)}"
        )
    return _scaled(decode_e2m1(codes), decode_ue8m0(scales), "MXFP4").to(dtype)


# --- FP8 ------------------------------------------------------------------------------------------------------------


def quantize_fp8_group(
    x: torch.Tensor,
    *,
    group: int = FP8_GROUP,
    scale_format: Literal["fp32", "ue8m0"] = "fp32",
    amax_floor: float = 0.0,
    reciprocal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3FN in groups along the last dimension, with one fp32 or one UE8M0 scale per group.

    The fp32 scale is amax / 448; among fp32's subnormals it is coarse, and 0 for an amax up to 2^-150 × 448, whose group
    counts as zero. The UE8M0 scale is `ue8m0_scale_ceil(amax, element_max=448)`. Elements saturate at ±448.

    Args:
        x: [..., K], K a multiple of `group`.
        group: neighbours that share a scale.
        scale_format: what the second result holds.
        amax_floor: amax is at least this: 1e-10 in the engine's per-token-group kernels, 1e-4 in DeepGEMM, 0 in the engine's
            KV writer. With a floor the scale of a zero group is floor / 448, not 0.
        reciprocal: x × (1 / scale), both rounded, in place of x / scale: the order of the engine's Triton kernels. A scale
            whose reciprocal overflows (below 2^-128) then counts as 0; the engine's KV writer has no such guard.

    Returns:
        codes [..., K] uint8, and scales [..., K / group]: fp32, or UE8M0 codes in uint8.
    """
    blocks = _blocks(x, group, "FP8 group quantisation")
    amax = _amax(blocks).clamp(min=amax_floor)
    if scale_format == "ue8m0":
        stored = ue8m0_scale_ceil(amax, element_max=E4M3FN_MAX)
        scale = decode_ue8m0(stored)
    elif scale_format == "fp32":
        stored = amax / E4M3FN_MAX
        if reciprocal:
            stored = torch.where((1.0 / stored).isinf(), 0.0, stored)
        scale = stored
    else:
        raise ValueError(f"scale_format is 'fp32' or 'ue8m0', got {scale_format!r}")
    if reciprocal:
        inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
        scaled = blocks * inverse.unsqueeze(-1)
    else:
        scaled = _divide(blocks, scale)
    return encode_e4m3fn(scaled).flatten(-2), stored


def quantize_fp8_rows(
    x: torch.Tensor, *, amax_floor: float = 0.0, reciprocal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3FN with one fp32 scale per row: per token for activations [M, K], per channel for weights [N, K].

    Returns:
        codes [..., K] uint8 and scales [..., 1] fp32; rules and arguments as `quantize_fp8_group` with one group per row.
    """
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"FP8 row quantisation needs at least one column, got {list(x.shape)}")
    return quantize_fp8_group(x, group=x.shape[-1], amax_floor=amax_floor, reciprocal=reciprocal)


def quantize_fp8_tensor(
    x: torch.Tensor, scale: torch.Tensor | float, *, reciprocal: bool = False
) -> torch.Tensor:
    """E4M3FN under one scale known beforehand (static, from a checkpoint's `input_scale`): codes in uint8, in the shape of `x`.

    Elements saturate at ±448. Nothing is shared between elements, so a NaN makes its own code 0x7f and no other.

    Args:
        x: any shape.
        scale: one positive fp32 number, not subnormal; ValueError else.
        reciprocal: x × (1 / scale), both rounded, as the engine's per-tensor kernels, in place of x / scale.
    """
    number: torch.Tensor = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    if number.numel() != 1 or not 2.0**-126 <= float(number) <= FLOAT32_MAX:
        raise ValueError(f"scale is one number in [2^-126, 2^128), got {number.tolist()}")
    number = number.reshape(())
    scaled = _as_float32(x) * (1.0 / number) if reciprocal else _as_float32(x) / number
    return encode_e4m3fn(scaled)


def dequantize_fp8(
    codes: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """E4M3FN codes [..., K] and scales [..., n] of K / n neighbours each → [..., K] in `dtype`.

    Scales are fp32, or UE8M0 codes where their dtype is uint8; a scale without dimensions is that of the whole tensor. The product is rounded to fp32, then to `dtype`; with UE8M0 it
    is exact in both fp32 and bf16 as far as it is in range.
    """
    scale = decode_ue8m0(scales) if scales.dtype == torch.uint8 else _as_float32(scales)
    if scale.ndim == 0:
        return (decode_e4m3fn(codes) * scale).to(dtype)
    return _scaled(decode_e4m3fn(codes), scale, "FP8").to(dtype)


def matmul_fp8_rows(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor
) -> torch.Tensor:
    """fp64 [M, N] of the per-token-per-channel product A × Bᵀ.

    The sum over K is of unscaled E4M3FN products, exact in fp64 for K up to 2^17; the two scales multiply it afterwards,
    which is what a kernel does in its epilogue.

    Args:
        a: codes [M, K]. a_scales: fp32 [M, 1].
        b: codes [N, K]. b_scales: fp32 [N, 1].
    """
    product = decode_e4m3fn(a).double() @ decode_e4m3fn(b).double().T
    return product * a_scales.double() * b_scales.double().T
