# SPDX-License-Identifier: Apache-2.0
"""Number formats against torch where it has the type, against exact fractions where not, and against planted faults.

Elements: every bf16 value, and every fp32 value within two ulps of a code or of a midpoint between two codes: in between the
result is constant. Blocks: a scalar oracle in fractions for random and degenerate blocks; properties by hypothesis.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from fractions import Fraction
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from numinous_tooling import numerics  # noqa: E402 - imports torch

INF, NAN = float("inf"), float("nan")
# exponent bits, mantissa bits, largest finite code
SHAPES = {"e2m1": (2, 1, 0x7), "e4m3fn": (4, 3, 0x7E), "e5m2": (5, 2, 0x7B)}
ENCODE = {
    "e2m1": lambda x: numerics.encode_e2m1(x),  # looked up late, so that a planted fault is seen
    "e4m3fn": lambda x: numerics.encode_e4m3fn(x),
    "e5m2": lambda x: numerics.encode_e5m2(x),
}
DECODE = {
    "e2m1": numerics.decode_e2m1,
    "e4m3fn": numerics.decode_e4m3fn,
    "e5m2": numerics.decode_e5m2,
}
POWERS = [Fraction(2) ** (code - 127) for code in range(255)]  # of UE8M0, by code
TORCH = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

quick = settings(max_examples=100, deadline=None, derandomize=True, database=None)


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors here are small: handing them to threads costs ten times the work on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- Oracle: exact fractions, one value at a time ---------------------------------------------------------------------


def exact_value(code, name):
    """Fraction of a finite code, read from its bit fields."""
    exponent_bits, mantissa_bits, _ = SHAPES[name]
    bias = 2 ** (exponent_bits - 1) - 1
    sign = -1 if code >> (exponent_bits + mantissa_bits) else 1
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = Fraction(code & (2**mantissa_bits - 1), 2**mantissa_bits)
    if exponent == 0:
        return sign * mantissa * Fraction(2) ** (1 - bias)
    return sign * (1 + mantissa) * Fraction(2) ** (exponent - bias)


@cache
def exact_magnitudes(name):
    """Fractions of the finite codes without sign, which rise with the code."""
    return [exact_value(code, name) for code in range(SHAPES[name][2] + 1)]


def exact_encode(value, name):
    """Code of a float or Fraction: nearest, ties to even, saturating; only the sign of a zero float is kept."""
    exponent_bits, mantissa_bits, last = SHAPES[name]
    sign_bit = 1 << (exponent_bits + mantissa_bits)
    if value != value:
        return 0x7 if name == "e2m1" else 0x7F
    negative = str(value).startswith("-")
    if abs(value) == INF:
        return last | (sign_bit if negative else 0)
    size, magnitudes = abs(Fraction(value)), exact_magnitudes(name)
    above = min(bisect_left(magnitudes, size), last)
    near = (max(above - 1, 0), above)
    best = min(near, key=lambda code: (abs(magnitudes[code] - size), code % 2))
    return best | (sign_bit if negative else 0)


def f32(value):
    """A float rounded to fp32; of a quotient or product of two fp32 in fp64 that is the fp32 result."""
    return struct.unpack("f", struct.pack("f", value))[0]


def exact_nvfp4(block):
    """Scale code and element codes of 16 finite floats by the amax rule, without global scale."""
    amax = max(abs(x) for x in block)
    scale_code = 0
    if amax > 2.0**-11:
        scale_code = exact_encode(max(f32(amax / 6), 2.0**-9), "e4m3fn")
    scale = float(exact_value(scale_code, "e4m3fn"))
    return scale_code, [exact_encode(f32(x / scale) if scale else x * 0.0, "e2m1") for x in block]


def exact_mxfp4(block, rule):
    """Scale code and element codes of 32 finite floats."""
    amax = Fraction(max(abs(x) for x in block))
    if rule == "floor":
        code = max(bisect_right(POWERS, amax / 4) - 1, 0)
    else:
        code = bisect_left(POWERS, Fraction(f32(float(amax) / 6)))
    return code, [
        exact_encode(Fraction(x) / Fraction(2) ** (code - 127) if x else x, "e2m1") for x in block
    ]


# --- Inputs -----------------------------------------------------------------------------------------------------------


def every_bf16():
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16).float()


def boundaries(name):
    """fp32 values within two ulps of every code and midpoint, of both signs, and the special ones."""
    last = SHAPES[name][2]
    values = [float(exact_value(code, name)) for code in range(last + 1)]
    values += [(a + b) / 2 for a, b in pairwise(values)]
    values += [
        2 * values[last] - values[last - 1],
        1.5 * values[last] - values[last - 1] / 2,
        3.4e38,
        1e-45,
    ]
    points = torch.tensor(values)
    low, high = torch.tensor(-INF), torch.tensor(INF)
    up, down = torch.nextafter(points, high), torch.nextafter(points, low)
    near = [points, up, down, torch.nextafter(up, high), torch.nextafter(down, low)]
    near = torch.cat([*near, torch.tensor([0.0, INF])])
    return torch.cat([near, -near, torch.tensor([NAN])])


def same(a, b):
    """Equal bit for bit, or both NaN."""
    assert a.shape == b.shape
    wrong = (a.isnan() != b.isnan()) | (~a.isnan() & (a.view(torch.int32) != b.view(torch.int32)))
    assert not wrong.any(), (
        f"first at {wrong.nonzero()[0].tolist()}: {a[wrong][0]} is not {b[wrong][0]}"
    )


def gaussian(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


# --- Elements ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_every_code_decodes(name):
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = DECODE[name](codes)
    if name in TORCH:
        same(decoded, codes.view(TORCH[name]).float())
    last, bits = SHAPES[name][2], sum(SHAPES[name][:2])
    for code in range(last + 1):
        assert decoded[code].item() == exact_value(code, name)
        assert decoded[code | 1 << bits].item() == -exact_value(code, name)
    assert torch.signbit(decoded[1 << bits])
    finite = codes[~decoded.isnan() & ~decoded.isinf()]
    if name == "e2m1":
        same(decoded[:16].repeat(16), decoded)  # the upper nibble does not matter
        finite = finite[:16]
    assert torch.equal(ENCODE[name](DECODE[name](finite)), finite)


def check_encode(name, x):
    """`encode_<name>` of x against the oracle of fractions."""
    got = ENCODE[name](x).tolist()
    for value, code in zip(x.tolist(), got, strict=True):
        assert code == exact_encode(value, name), f"{name} of {value!r}"


@pytest.mark.parametrize("name", SHAPES)
def test_encode_at_every_boundary(name):
    check_encode(name, boundaries(name))


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("inputs", ["bf16", "boundaries"])
def test_encode_equals_torch(name, inputs):
    x = every_bf16() if inputs == "bf16" else boundaries(name)
    limit = torch.finfo(TORCH[name]).max
    want = x.clamp(-limit, limit).to(TORCH[name]).view(torch.uint8)
    want = torch.where(x.isnan(), 0x7F, want)  # torch keeps the sign of a NaN
    assert torch.equal(ENCODE[name](x), want)


def test_encode_e2m1_of_every_bf16():
    x = every_bf16()
    table = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    a = x.abs().unsqueeze(-1)
    # Ties go to the even code: at every second midpoint upwards.
    above = torch.where(torch.arange(7) % 2 == 0, a > table, a >= table).sum(-1)
    want = torch.where(x.isnan(), 7, above + 8 * torch.signbit(x))
    assert torch.equal(numerics.encode_e2m1(x), want.to(torch.uint8))


def test_without_saturation():
    x = torch.tensor([448.0, 464.0, 464.00003, 480.0, INF, -INF, NAN, -500.0])
    codes = numerics.encode_e4m3fn(x, saturate=False)
    assert codes.tolist() == [0x7E, 0x7E, 0x7F, 0x7F, 0x7F, 0xFF, 0x7F, 0xFF]
    x = every_bf16()
    x = x[~x.isnan()]
    want = x.to(torch.float8_e5m2).view(torch.uint8)
    assert torch.equal(numerics.encode_e5m2(x, saturate=False), want)


def check_e4m3fnuz():
    """E4M3FNUZ against torch: every code, every bf16 value, and fp32 within two ulps of a code or midpoint."""
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = numerics.decode_e4m3fnuz(codes)
    same(decoded, codes.view(torch.float8_e4m3fnuz).float())
    assert torch.equal(numerics.encode_e4m3fnuz(decoded), codes)
    values = codes[:128].view(torch.float8_e4m3fnuz).float()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([248.0, 256.0])])
    near = [points]
    for towards in (INF, -INF):
        first = torch.nextafter(points, torch.tensor(towards))
        near += [first, torch.nextafter(first, torch.tensor(towards))]
    x = torch.cat([every_bf16(), *near, *(-tensor for tensor in near)])
    unsaturated = x.to(torch.float8_e4m3fnuz).view(torch.uint8)
    got = numerics.encode_e4m3fnuz(x, saturate=False)
    assert torch.equal(got, unsaturated), "without saturation"
    saturated = x.clamp(-240, 240).to(torch.float8_e4m3fnuz).view(torch.uint8)
    assert torch.equal(numerics.encode_e4m3fnuz(x), saturated), "with saturation"


def test_e4m3fnuz():
    check_e4m3fnuz()
    x = torch.tensor([-0.0, -(2.0**-11), -(2.0**-10), 240.0, 248.0, INF, -INF, NAN, -NAN])
    want = [0x00, 0x00, 0x81, 0x7F, 0x7F, 0x7F, 0xFF, 0x80, 0x80]
    assert numerics.encode_e4m3fnuz(x).tolist() == want
    want[4:7] = [0x80] * 3
    assert numerics.encode_e4m3fnuz(x, saturate=False).tolist() == want


def ue8m0_inputs():
    powers = torch.tensor([2.0**e for e in range(-149, 128)], dtype=torch.float64).float()
    up, down = (
        torch.nextafter(powers, torch.tensor(INF)),
        torch.nextafter(powers, torch.tensor(0.0)),
    )
    return torch.cat([powers, up, down, torch.tensor([0.0, 3.4028234663852886e38])])


def test_ue8m0():
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = numerics.decode_ue8m0(codes)
    same(decoded, codes.view(torch.float8_e8m0fnu).float())
    for rounding in ("up", "down"):
        assert torch.equal(numerics.encode_ue8m0(decoded, rounding=rounding), codes)
    x = ue8m0_inputs()
    up = numerics.encode_ue8m0(x, rounding="up").tolist()
    down = numerics.encode_ue8m0(-x, rounding="down").tolist()  # the sign is ignored
    for value, above, below in zip(map(Fraction, x.tolist()), up, down, strict=True):
        assert above == min(bisect_left(POWERS, value), 254)
        assert below == max(bisect_right(POWERS, value) - 1, 0)
    special = torch.tensor([INF, NAN])
    assert numerics.encode_ue8m0(special, rounding="up").tolist() == [254, 255]
    assert numerics.encode_ue8m0(special, rounding="down").tolist() == [254, 255]


def test_ue8m0_scale_rules():
    amax = torch.tensor([0.0, 1.0, 3.0, 6.0, 6.0000005, 7.99, 8.0, 1e-45, INF, NAN])
    floor = numerics.ue8m0_scale_floor(amax, element_emax=2).tolist()
    assert floor == [0, 125, 126, 127, 127, 127, 128, 0, 252, 255]
    ceil = numerics.ue8m0_scale_ceil(amax, element_max=6.0).tolist()
    assert ceil == [0, 125, 126, 127, 128, 128, 128, 0, 254, 255]
    x = ue8m0_inputs()
    codes = numerics.ue8m0_scale_floor(x, element_emax=8).tolist()
    for value, code in zip(map(Fraction, x.tolist()), codes, strict=True):
        assert code == max(bisect_right(POWERS, value / 2**8) - 1, 0)


@quick
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=40))
def test_encoding_is_monotone(values):
    x = torch.tensor(sorted(values))
    for name, encode in ENCODE.items():
        decoded = DECODE[name](encode(x))
        assert (decoded[1:] >= decoded[:-1]).all()
    for rounding in ("up", "down"):
        codes = numerics.encode_ue8m0(x.abs().sort().values, rounding=rounding).int()
        assert (codes[1:] >= codes[:-1]).all()


@quick
@given(st.lists(st.integers(0, 15), max_size=24).filter(lambda codes: len(codes) % 2 == 0))
def test_nibbles_invert(codes):
    codes = torch.tensor(codes, dtype=torch.uint8)
    packed = numerics.pack_nibbles(codes)
    assert torch.equal(numerics.unpack_nibbles(packed), codes)
    assert packed.tolist() == [a + 16 * b for a, b in codes.view(-1, 2).tolist()]
    bytes_ = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(numerics.pack_nibbles(numerics.unpack_nibbles(bytes_)), bytes_)


def test_e2m1_times_e4m3_fits_six_bits():
    scales = torch.arange(256, dtype=torch.uint8)
    scales = scales[~numerics.decode_e4m3fn(scales).isnan()]
    for code in range(16):
        value = exact_value(code, "e2m1")
        packed = torch.full((len(scales), 8), code * 0x11, dtype=torch.uint8)
        exact = [value * exact_value(scale, "e4m3fn") for scale in scales.tolist()]
        for product in exact:
            odd = abs(product.numerator)
            while odd and odd % 2 == 0:
                odd //= 2
            assert odd < 2**6
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            rows = numerics.dequantize_nvfp4(packed, scales.unsqueeze(-1), dtype=dtype)
            assert rows.dtype == dtype
            assert [Fraction(row[0]) for row in rows.tolist()] == exact


# --- Blocks -----------------------------------------------------------------------------------------------------------

DEGENERATE = {
    "zeros": [0.0] * 16,
    "signed zeros": [0.0, -0.0] * 8,
    "smallest subnormal": [1e-45, *[0.0] * 14, -1e-45],
    "zero limit": [2.0**-11, -(2.0**-11), *[0.0] * 14],
    "above it": [2.0**-11 * (1 + 2**-23), -(2.0**-11), *[1e-5] * 14],
    "smallest scale": [2.0**-9, -(2.0**-10), 2.0**-11, *[0.0] * 13],
    "largest": [2688.0, -2688.0, 1.0, *[100.0] * 13],
    "saturates": [1e30, -1e30, 2688.0, *[1.0] * 13],
    "ties": [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 2,
    "minus ties": [-6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0] * 2,
}


def check_nvfp4(x, **kwargs):
    """Bytes of `quantize_nvfp4` against the oracle, its values within half a step, each block for itself."""
    packed, scales = numerics.quantize_nvfp4(x, **kwargs)
    values = numerics.dequantize_nvfp4(packed, scales)
    check_nvfp4_bytes(x, packed, scales, values)


def check_nvfp4_bytes(x, packed, scales, values):
    for row, block in enumerate(x.view(-1, 16).tolist()):
        scale_code, codes = exact_nvfp4(block)
        assert scales.view(-1)[row].item() == scale_code, f"scale of block {row}"
        got = packed.view(-1, 8)[row].tolist()
        assert got == [a | b << 4 for a, b in zip(codes[::2], codes[1::2], strict=True)], (
            f"block {row}"
        )
        scale = exact_value(scale_code, "e4m3fn")
        for column, (element, value) in enumerate(
            zip(block, values.view(-1, 16)[row].tolist(), strict=True)
        ):
            size = abs(Fraction(element))
            if size > 6 * scale and scale:  # clipped by the scale's rounding
                assert abs(value) == 6 * scale
                continue
            step = 2 if size >= 4 * scale else 1 if size >= 2 * scale else Fraction(1, 2)
            slack = size / 2**24  # of x / scale, rounded to fp32
            limit = step * scale / 2 + slack if scale else Fraction(1, 2**11)
            assert abs(Fraction(value) - Fraction(element)) <= limit, f"block {row} column {column}"


@pytest.mark.parametrize("case", DEGENERATE)
def test_nvfp4_degenerate_block(case):
    check_nvfp4(torch.tensor(DEGENERATE[case]))


@pytest.mark.parametrize("exponent", [-14, -10, -8, -5, 0, 6, 10])
def test_nvfp4_equals_the_oracle(exponent):
    check_nvfp4(gaussian(8, 32, seed=exponent, scale=2.0**exponent))


def test_nvfp4_of_inf_and_nan():
    x = torch.ones(3, 16)
    x[0, 3], x[1, 4], x[2] = INF, -INF, 1.0
    x[2, 5] = -NAN
    for choice in ("amax", "mse"):
        packed, scales = numerics.quantize_nvfp4(x, scale_choice=choice)
        assert scales.flatten().tolist() == [0x7E, 0x7E, 0x7F]
        values = numerics.dequantize_nvfp4(packed, scales)
        assert (values[0, 3], values[1, 4]) == (2688, -2688)
        assert values[:2].isfinite().all()
        assert values[2].isnan().all()
        assert packed[2].tolist() == [0x77] * 8


blocks16 = st.lists(
    st.floats(-3000, 3000, width=32) | st.sampled_from([0.0, -0.0, 6.0, 2688.0, 2.0**-9, 2.0**-11]),
    min_size=16,
    max_size=16,
)


@quick
@given(blocks16)
def test_nvfp4_properties(block):
    x = torch.tensor(block)
    check_nvfp4(x)
    packed, scales = numerics.quantize_nvfp4(x)
    values = numerics.dequantize_nvfp4(packed, scales)
    largest = (numerics.unpack_nibbles(packed) & 7).max()
    if scales.item() != 2 or largest != 6:  # the stated exception
        again, scales_again = numerics.quantize_nvfp4(values)
        assert torch.equal(again, packed)
        assert torch.equal(scales_again, scales)


def test_nvfp4_is_idempotent_at_every_scale():
    largest = torch.cat([2.0 ** torch.linspace(-12, 12, 4001), torch.arange(1, 200) * 2.0**-12])
    x = largest.unsqueeze(-1) * torch.tensor([1.0, -0.9, 0.6, 0.4, 0.3, 0.2, 0.1, -0.0] * 2)
    packed, scales = numerics.quantize_nvfp4(x)
    again, scales_again = numerics.quantize_nvfp4(numerics.dequantize_nvfp4(packed, scales))
    top = (numerics.unpack_nibbles(packed) & 7).amax(-1)
    exception = (scales.squeeze(-1) == 2) & (top == 6)
    equal = (packed == again).all(-1) & (scales == scales_again).squeeze(-1)
    assert exception.any()
    assert torch.equal(equal, ~exception)
    assert len(scales.unique()) == 127


def check_mse(x, above):
    """Squared error per block: the search is never worse than amax, a wider one never worse than a narrower one."""

    def error(choice, search=(6, 6)):
        packed, scales = numerics.quantize_nvfp4(
            x, global_scale=above, scale_choice=choice, search=search
        )
        values = numerics.dequantize_nvfp4(packed, scales, global_scale=above)
        return (values.double() - x.double()).square().unflatten(-1, (-1, 16)).sum(-1)

    amax, found = error("amax"), error("mse")
    assert (found <= amax).all(), "worse than amax"
    assert (found <= error("mse", search=(2, 1))).all()
    assert torch.equal(error("mse", search=(0, 0)), amax)


@settings(quick, max_examples=40)
@given(
    st.integers(0, 2**31),
    st.sampled_from([2.0**-11, 2.0**-8, 1.0, 700.0]),
    st.sampled_from([None, 0.37, 2.0**-20]),
)
def test_mse_is_never_worse(seed, scale, above):
    x = gaussian(4, 64, seed=seed, scale=scale)
    x[0, :16] = 0.0
    check_mse(x, above)


def test_mse_search_finds_what_brute_force_finds():
    x = gaussian(16, 16, seed=3)
    packed, scales = numerics.quantize_nvfp4(x, scale_choice="mse", search=(20, 20))
    got = (numerics.dequantize_nvfp4(packed, scales).double() - x.double()).square().sum(-1)
    tables = [
        numerics.decode_e2m1(torch.arange(16, dtype=torch.uint8)).double() * s
        for s in numerics.decode_e4m3fn(torch.arange(1, 127, dtype=torch.uint8)).tolist()
    ]
    distance = [
        (x.double().unsqueeze(-1) - table).abs().amin(-1).square().sum(-1) for table in tables
    ]
    # Rounding x / scale to fp32 may pick the other side of a tie: equal but for rounding.
    torch.testing.assert_close(got, torch.stack(distance).amin(0), rtol=1e-12, atol=0)
    amax = numerics.quantize_nvfp4(x)[1]
    assert (scales != amax).any()


def test_mse_ties_go_to_the_nearest_code_and_the_lower_first():
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-12, 13, (512, 16), generator=generator) * (
        torch.rand(512, 16, generator=generator) < 0.15
    )
    x = x.float()  # small integers, mostly zeros: many scales are equally good
    first = numerics.quantize_nvfp4(x)[1].squeeze(-1).int()
    offsets = sorted(range(-6, 7), key=lambda offset: (abs(offset), offset))
    errors = []
    for offset in offsets:
        scale = numerics.decode_e4m3fn((first + offset).clamp(1, 126).to(torch.uint8)).unsqueeze(-1)
        values = numerics.decode_e2m1(numerics.encode_e2m1(x / scale)) * scale
        errors.append((values.double() - x.double()).square().sum(-1))
    errors = torch.stack(errors)
    at = [column.index(min(column)) for column in errors.T.tolist()]  # the first of equals
    want = (first + torch.tensor(offsets)[at]).where(first != 0, 0)
    got = numerics.quantize_nvfp4(x, scale_choice="mse")[1].squeeze(-1)
    assert torch.equal(got.int(), want)
    tied = (errors == errors.amin(0)).sum(0) > 1
    assert (tied & (got.int() != first)).any()
    assert (first == 0).any()


def test_global_scale():
    x = gaussian(4, 64, seed=5, scale=1e-6)
    above = numerics.nvfp4_global_scale(x)
    assert above == x.abs().amax() / 2688
    packed, scales = numerics.quantize_nvfp4(x, global_scale=above)
    assert scales.max() == 0x7E
    values = numerics.dequantize_nvfp4(packed, scales, global_scale=above)
    assert (values - x).abs().max() <= x.abs().max() / 6
    # A power of two only shifts: the same bytes as without it.
    plain = numerics.quantize_nvfp4(x * 2.0**20)
    shifted = numerics.quantize_nvfp4(x, global_scale=2.0**-20)
    assert torch.equal(plain[0], shifted[0])
    assert torch.equal(plain[1], shifted[1])
    assert numerics.nvfp4_global_scale(torch.zeros(3)) == 1
    assert numerics.nvfp4_global_scale(torch.zeros(0, 16)) == 1
    tiny = numerics.nvfp4_global_scale(torch.tensor([1e-45]))
    assert tiny == 2.0**-117
    huge = torch.full((16,), INF)
    assert numerics.quantize_nvfp4(huge, global_scale=numerics.nvfp4_global_scale(huge))[1] == 0x7E
    for bad in (0.0, -1.0, INF, NAN, 1e-40, torch.ones(2)):
        with pytest.raises(ValueError, match="global_scale is one number"):
            numerics.quantize_nvfp4(x, global_scale=bad)


@pytest.mark.parametrize("rule", ["floor", "ceil"])
def test_mxfp4_equals_the_oracle(rule):
    rows = [
        gaussian(1, 32, seed=e % 97, scale=2.0**e)[0] for e in (-140, -129, -126, -60, 0, 1, 7, 100)
    ]
    rows += [torch.zeros(32), torch.tensor([1e-45, -0.0] * 16), torch.tensor([7.0, -6.5] * 16)]
    rows += [torch.tensor([2.0**e, -(2.0**e) * 0.3] * 16) for e in (-129, -128, -127, 127)]
    x = torch.stack(rows)
    packed, scales = numerics.quantize_mxfp4(x, scale_rule=rule)
    for row, block in enumerate(x.tolist()):
        code, codes = exact_mxfp4(block, rule)
        assert scales[row].item() == code, row
        assert numerics.unpack_nibbles(packed)[row].tolist() == codes, row
    values = numerics.dequantize_mxfp4(packed, scales)
    same(values, numerics.dequantize_mxfp4(packed, scales, dtype=torch.bfloat16).float())
    again, scales_again = numerics.quantize_mxfp4(values, scale_rule=rule)
    same(numerics.dequantize_mxfp4(again, scales_again), values)
    if rule == "floor":
        assert torch.equal(again, packed)
        assert torch.equal(scales_again, scales)
    else:
        assert (x.abs() <= 6 * numerics.decode_ue8m0(scales)).all()  # nothing is clipped


def test_mxfp4_of_inf_and_nan():
    x = torch.ones(2, 32)
    x[0, 1], x[1, 2] = -INF, NAN
    for rule, scale in (("floor", 252), ("ceil", 253)):
        packed, scales = numerics.quantize_mxfp4(x, scale_rule=rule)
        assert scales.flatten().tolist() == [scale, 255]
        values = numerics.dequantize_mxfp4(packed, scales)
        assert values[1].isnan().all()
        assert values[0, 1] <= -(2.0**127)
        assert (values[0, 2:] == 0).all()


@pytest.mark.parametrize("reciprocal", [False, True])
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_fp8_group(scale_format, reciprocal):
    x = torch.cat([gaussian(2, 256, seed=e, scale=2.0**e) for e in range(-20, 20, 3)])
    codes, scales = numerics.quantize_fp8_group(x, scale_format=scale_format, reciprocal=reciprocal)
    assert codes.shape == x.shape
    assert scales.shape == (len(x), 2)
    assert scales.dtype == (torch.float32 if scale_format == "fp32" else torch.uint8)
    values = numerics.dequantize_fp8(codes, scales)
    factor = scales if scale_format == "fp32" else numerics.decode_ue8m0(scales)
    wide = factor.repeat_interleave(128, -1)
    # Half a step of E4M3: 2^-4 of the value, 2^-10 of the scale among subnormals.
    assert (
        (values - x).abs() <= torch.maximum(x.abs() * 2.0**-4, wide * 2.0**-10) * (1 + 1e-6)
    ).all()
    again, scales_again = numerics.quantize_fp8_group(values, scale_format=scale_format)
    values_again = numerics.dequantize_fp8(again, scales_again)
    if scale_format == "ue8m0":
        same(values_again, values)
        bits = numerics.dequantize_fp8(codes, scales, dtype=torch.bfloat16).float()
        same(bits, values)
    else:
        assert torch.equal(again, codes)
        torch.testing.assert_close(scales_again, scales, rtol=2.0**-23, atol=0)
    if not reciprocal:
        want = (x / wide).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(codes, want)


def test_fp8_group_edges():
    for kwargs in ({}, {"reciprocal": True}, {"scale_format": "ue8m0"}):
        x = torch.zeros(4, 128)
        x[0, 1] = -0.0
        x[1, 0], x[1, 1] = INF, 1.0
        x[2, 0] = NAN
        x[3, 0] = -1e-45
        codes, scales = numerics.quantize_fp8_group(x, **kwargs)
        values = numerics.dequantize_fp8(codes, scales)
        assert (values[0] == 0).all()
        assert torch.signbit(values[0, 1])
        assert values[1, 0] > 1e38  # under UE8M0 it is 448 × 2^120, beyond fp32
        assert (values[1, 1:] == 0).all()
        assert values[2].isnan().all()
        assert codes[2].tolist() == [0x7F] * 128
        assert (values[3] == 0).all()
        assert codes[3, 0] == 0x80
    zero = torch.zeros(1, 128)
    assert numerics.quantize_fp8_group(zero)[1] == 0
    floor = numerics.quantize_fp8_group(zero, amax_floor=1e-10)[1]
    assert floor == torch.tensor(1e-10) / 448
    assert numerics.quantize_fp8_group(zero, scale_format="ue8m0")[1] == 0
    # 1 / scale overflows: with `reciprocal` the group counts as zero.
    tiny = torch.zeros(1, 128)
    tiny[0, 0] = 448 * 2.0**-130
    assert numerics.decode_e4m3fn(numerics.quantize_fp8_group(tiny)[0])[0, 0] == 448
    codes, scales = numerics.quantize_fp8_group(tiny, reciprocal=True)
    assert scales == 0
    assert codes.unique().tolist() == [0]
    small = torch.full((1, 128), 449 * 2.0**-149)  # the smallest scale that is not zero, 2^-149
    codes, scales = numerics.quantize_fp8_group(small)
    assert scales == 2.0**-149
    assert numerics.decode_e4m3fn(codes).unique() == 448


def test_fp8_rows_product():
    a, b = gaussian(5, 192, seed=1), gaussian(7, 192, seed=2, scale=0.02)
    qa, sa = numerics.quantize_fp8_rows(a)
    qb, sb = numerics.quantize_fp8_rows(b)
    assert sa.shape == (5, 1)
    assert sb.shape == (7, 1)
    torch.testing.assert_close(sb, b.abs().amax(-1, keepdim=True) / 448, rtol=0, atol=0)
    product = numerics.matmul_fp8_rows(qa, sa, qb, sb)
    exact = numerics.dequantize_fp8(qa, sa).double() @ numerics.dequantize_fp8(qb, sb).double().T
    torch.testing.assert_close(product, exact, rtol=1e-5, atol=1e-6)
    assert (product - a.double() @ b.double().T).abs().max() < 0.05


@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-126, 3.0e38])
def test_fp8_tensor(scale):
    x = torch.cat([gaussian(2, 40, seed=e, scale=2.0**e) for e in range(-12, 13, 4)]) * scale
    scale = f32(scale)
    for reciprocal in (False, True):
        codes = numerics.quantize_fp8_tensor(x, scale, reciprocal=reciprocal)
        assert codes.shape == x.shape
        for value, code in zip(x.flatten().tolist(), codes.flatten().tolist(), strict=True):
            scaled = f32(value * f32(1 / scale)) if reciprocal else f32(value / scale)
            assert code == exact_encode(scaled, "e4m3fn"), f"{value!r}"
        number = torch.tensor(scale)
        want = numerics.decode_e4m3fn(codes) * number
        same(numerics.dequantize_fp8(codes, number), want)
        same(numerics.dequantize_fp8(codes, number.expand(len(x), 1)), want)


def test_fp8_tensor_edges():
    x = torch.tensor([[0.0, -0.0, INF], [-INF, NAN, 1e-45]])
    want = [[0x00, 0x80, 0x7E], [0xFE, 0x7F, 0x00]]
    for reciprocal in (False, True):
        codes = numerics.quantize_fp8_tensor(x, torch.tensor([0.5]), reciprocal=reciprocal)
        assert codes.tolist() == want  # a NaN is alone
    assert numerics.quantize_fp8_tensor(x[:0], 1.0).shape == (0, 3)
    # The two orders of arithmetic differ: the quotient is the tie 1.3125, to the even code, the product is above it.
    close = torch.tensor(1.3125 * 15)
    assert numerics.quantize_fp8_tensor(close, 15.0) == 0x3A
    assert numerics.quantize_fp8_tensor(close, 15.0, reciprocal=True) == 0x3B
    for bad in (0.0, -1.0, 1e-39, INF, NAN, torch.ones(2)):
        with pytest.raises(ValueError, match=r"one number in \[2\^-126, 2\^128\), got"):
            numerics.quantize_fp8_tensor(x, bad)


# --- Shapes and refusals ----------------------------------------------------------------------------------------------

QUANTIZE = {
    "nvfp4": lambda x: numerics.quantize_nvfp4(x),
    "nvfp4-mse": lambda x: numerics.quantize_nvfp4(x, scale_choice="mse"),
    "mxfp4": lambda x: numerics.quantize_mxfp4(x),
    "fp8-group": lambda x: numerics.quantize_fp8_group(x),
    "fp8-rows": lambda x: numerics.quantize_fp8_rows(x),
}


@pytest.mark.parametrize("name", QUANTIZE)
def test_strides_dtypes_and_empty(name):
    quantize = QUANTIZE[name]
    x = gaussian(256, 6, seed=9).T  # columns apart
    assert not x.is_contiguous()
    want = quantize(x.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(quantize(x), want, strict=True))
    wide = quantize(x.bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(wide, quantize(x.bfloat16().float()), strict=True))
    folded = quantize(x.reshape(2, 3, 256))
    assert all(torch.equal(a.flatten(0, 1), b) for a, b in zip(folded, want, strict=True))
    empty = quantize(torch.empty(0, 256))
    assert [len(part) for part in empty] == [0, 0]
    assert [part.shape[-1] for part in empty] == [part.shape[-1] for part in want]
    with pytest.raises(TypeError, match="expected float32, bfloat16 or float16, got"):
        quantize(x.double())
    if name != "fp8-rows":
        with pytest.raises(
            ValueError, match=r"last dimension in multiples of \d+, got \[2, 250\]$"
        ):
            quantize(torch.zeros(2, 250))
        assert all(part.shape == (3, 0) for part in quantize(torch.empty(3, 0)))


def test_empty_dequantizes():
    for rows, columns in ((0, 64), (3, 0)):
        x = torch.empty(rows, columns)
        assert numerics.dequantize_nvfp4(*numerics.quantize_nvfp4(x)).shape == x.shape
        assert numerics.dequantize_mxfp4(*numerics.quantize_mxfp4(x)).shape == x.shape
        fp8 = numerics.quantize_fp8_group(x, group=32)
        assert numerics.dequantize_fp8(*fp8).shape == x.shape


def test_refusals():
    codes = torch.zeros(2, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="last dimension 3 is odd"):
        numerics.pack_nibbles(codes[:, :3])
    with pytest.raises(ValueError, match="above 15"):
        numerics.pack_nibbles(codes + 16)
    with pytest.raises(TypeError, match="codes in uint8, got"):
        numerics.decode_e4m3fn(codes.long())
    with pytest.raises(ValueError, match=r"scales \[2, 3\] do not fit bytes \[2, 16\]"):
        numerics.dequantize_nvfp4(codes, codes[:, :3])
    with pytest.raises(ValueError, match=r"scales \[2, 3\] do not fit bytes \[2, 16\]"):
        numerics.dequantize_mxfp4(codes, codes[:, :3])
    with pytest.raises(ValueError, match=r"scales \[2, 3\] do not fit \[2, 16\]"):
        numerics.dequantize_fp8(codes, torch.ones(2, 3))
    with pytest.raises(ValueError, match="at least one column"):
        numerics.quantize_fp8_rows(torch.empty(2, 0))
    x = torch.zeros(1, 128)
    for call, text in (
        (lambda: numerics.quantize_nvfp4(x, scale_choice="best"), "'amax' or 'mse'"),
        (lambda: numerics.quantize_nvfp4(x, search=(-1, 2)), "below and above"),
        (lambda: numerics.quantize_mxfp4(x, scale_rule="round"), "'floor' or 'ceil'"),
        (lambda: numerics.quantize_fp8_group(x, scale_format="bf16"), "'fp32' or 'ue8m0'"),
        (lambda: numerics.encode_ue8m0(x, rounding="nearest"), "'up' or 'down'"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


# --- Tests of the tests -----------------------------------------------------------------------------------------------


def half_up(original):
    """Rounds ties away from zero."""
    return lambda x, **kwargs: original(torch.nextafter(x, x.sign() * INF), **kwargs)


def no_negative_zero(original):
    return lambda x, **kwargs: original(x + 0.0, **kwargs)


def flushed(original):
    """Subnormal results become zero."""
    return lambda x, **kwargs: original(torch.where(x.abs() < 2.0**-6, x * 0.0, x), **kwargs)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("fault", [half_up, no_negative_zero, flushed])
def test_a_faulty_encoder_is_seen(monkeypatch, name, fault):
    original = getattr(numerics, f"encode_{name}")
    monkeypatch.setattr(numerics, f"encode_{name}", fault(original))
    if (name, fault) == ("e2m1", flushed):
        # E2M1 has nothing below 2^-6 to flush: the fault is none.
        check_encode(name, boundaries(name))
        return
    with pytest.raises(AssertionError, match=name):
        check_encode(name, boundaries(name))


def test_a_faulty_e4m3fnuz_is_seen(monkeypatch):
    original, grid = numerics.encode_e4m3fnuz, numerics._E4M3FNUZ_GRID
    for target, fault in (
        ("encode_e4m3fnuz", half_up(original)),
        ("encode_e4m3fnuz", flushed(original)),
        ("encode_e4m3fnuz", lambda x, **kwargs: original(x.clamp(max=224), **kwargs)),
        ("encode_e4m3fnuz", lambda x, **kwargs: numerics.encode_e4m3fn(2 * x, **kwargs)),
        ("_E4M3FNUZ_GRID", numerics._magnitudes(4, 3)),
        ("_E4M3FNUZ_GRID", (*grid[:-1], 239.0)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(numerics, target, fault)
            with pytest.raises(AssertionError):
                check_e4m3fnuz()


NVFP4_FAULTS = {
    "scale rounds ties away": ("encode_e4m3fn", half_up),
    "element rounds ties away": ("encode_e2m1", half_up),
    "nibbles swapped": (
        "pack_nibbles",
        lambda original: lambda c: original(c.view(-1, 2).flip(-1).view_as(c)),
    ),
    "bytes swapped": ("pack_nibbles", lambda original: lambda c: original(c).flip(-1)),
    "scale one code too low": ("encode_e4m3fn", lambda original: lambda x: original(x) - 1),
    "no zero rule": ("NVFP4_ZERO_RATIO", lambda original: -1.0),
    "no smallest scale": ("E4M3FN_TINY", lambda original: 0.0),
    "values read with swapped nibbles": (
        "unpack_nibbles",
        lambda original: lambda p: original(p).unflatten(-1, (-1, 2)).flip(-1).flatten(-2),
    ),
}


@pytest.mark.parametrize("fault", NVFP4_FAULTS)
def test_a_faulty_nvfp4_is_seen(monkeypatch, fault):
    x = torch.tensor([*DEGENERATE.values(), [1.0625 * 6 * (-1) ** i / (1 + i) for i in range(16)]])
    check_nvfp4(x)
    target, plant = NVFP4_FAULTS[fault]
    monkeypatch.setattr(numerics, target, plant(getattr(numerics, target)))
    with pytest.raises(AssertionError, match="block"):
        check_nvfp4(x)


def test_a_flipped_bit_is_seen():
    x = gaussian(2, 32, seed=11)
    packed, scales = numerics.quantize_nvfp4(x)
    check_nvfp4_bytes(x, packed, scales, numerics.dequantize_nvfp4(packed, scales))
    for part, where in ((packed, (1, 7)), (scales, (0, 1))):
        for bit in range(8):
            part[where] ^= 1 << bit
            with pytest.raises(AssertionError, match="block"):
                check_nvfp4_bytes(x, packed, scales, numerics.dequantize_nvfp4(packed, scales))
            part[where] ^= 1 << bit


def test_a_search_that_prefers_the_worse_is_seen(monkeypatch):
    def worst(blocks, first, codes, above, search):
        tried = (first.int() + 6).clamp(max=0x7E).to(torch.uint8)
        return tried, numerics._nvfp4_elements(blocks, tried, above)

    monkeypatch.setattr(numerics, "_search_scales", worst)
    with pytest.raises(AssertionError, match="worse than amax"):
        check_mse(gaussian(4, 64), None)
