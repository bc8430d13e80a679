# SPDX-License-Identifier: Apache-2.0
"""Properties of the 4-bit row and of its way to the engine's FP8 rows; the codes themselves are tested in the tooling."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch
from kv4_ptx_model import FULL, KNOWN, Registers, from_singles, ptx_of, run_ptx, singles

from numinous_kv_cache_4bit.kernels import codec
from numinous_kv_cache_4bit.kernels.codec import (
    ROWS,
    check_global_scale,
    four_bit_format,
    requantize_fp8,
    stock_fp8_of,
)
from numinous_tooling.formats import KV4, KV4_BF16_ROPE, KV4_NO_ROPE, RowFormat
from numinous_tooling.numerics import decode_e4m3fn, encode_e2m1, quantize_nvfp4
from numinous_tooling.testing.tensors import assert_bitwise_equal

E2M1_STEPS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _latent(rows: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    """bf16 [rows, 512] whose columns have magnitudes of their own, as latents do."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.exp2(spread * torch.randn(512, generator=generator))
    return (torch.randn(rows, 512, generator=generator) * columns).to(torch.bfloat16)


def _rope(row: RowFormat, rows: int) -> torch.Tensor | None:
    if not row.rope_dim:
        return None
    generator = torch.Generator().manual_seed(9)
    return torch.randn(rows, row.rope_dim, generator=generator).to(torch.bfloat16)


def _every_product() -> torch.Tensor:
    """Rows that hold each E2M1 code under each finite scale code."""
    rows = torch.zeros(8, KV4_NO_ROPE.width, dtype=torch.uint8)
    fields = KV4_NO_ROPE.split(rows)
    fields["scales"].copy_(torch.arange(256).clamp(max=126).view(8, 32))
    fields["latent"].view(8, 32, 8).copy_(
        torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    )
    return rows


def test_decoding_to_bf16_is_exact() -> None:
    rows = _every_product()
    exact, _ = KV4_NO_ROPE.unpack(rows, dtype=torch.float32)
    rounded, _ = KV4_NO_ROPE.unpack(rows)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded.float(), exact)
    assert exact.abs().max() == 2688.0
    assert exact[exact > 0].min() == 2.0**-10


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.width))
@pytest.mark.parametrize("choice", ["amax", "mse"])
def test_error_of_a_block(row: RowFormat, choice: str) -> None:
    """Each value lands on the nearest of its block's fifteen; about 9 % of the latent is lost, and mse loses less."""
    latent = _latent(16, spread=0.5)
    rows = row.pack(latent, _rope(row, 16), scale_choice=choice)
    decoded, _ = row.unpack(rows, dtype=torch.float32)
    scale = (row.split(rows)["scales"] & 0x7F).view(torch.float8_e4m3fn).float()
    grid = scale.repeat_interleave(16, -1)[..., None] * torch.cat([-E2M1_STEPS, E2M1_STEPS])
    nearest = (grid - latent.float()[..., None]).abs().amin(-1)
    assert torch.equal((decoded - latent.float()).abs(), nearest)
    noise = (decoded - latent.float()).norm() / latent.float().norm()
    plain, _ = row.unpack(row.pack(latent, _rope(row, 16)), dtype=torch.float32)
    assert 0.07 < noise < 0.11
    assert noise <= (plain - latent.float()).norm() / latent.float().norm()


def test_rope_saturates_or_is_exact() -> None:
    rope = torch.zeros(64)
    rope[:6] = torch.tensor([9000.0, -1e9, float("inf"), 8128.0, 96.5, -31.0])  # steps of 64
    rope[16:22] = torch.tensor([127.0, 1.5, 2.5, -0.0, 0.25, -0.75])  # of 1
    rope[32:36] = torch.tensor([1e-30, 2e-32, -1e-39, 1e-41])
    rope = rope.to(torch.bfloat16)[None]
    latent = _latent(1)
    narrow = KV4.unpack(KV4.pack(latent, rope))[1][0]
    assert narrow[:6].tolist() == [8128.0, -8128.0, 8128.0, 8128.0, 128.0, 0.0]
    assert narrow[16:22].tolist() == [127.0, 2.0, 2.0, 0.0, 0.0, -1.0]
    assert torch.equal(torch.signbit(narrow), torch.signbit(rope[0]))
    assert ((narrow - rope[0]).abs()[32:48] <= rope[0, 32] / 127).all()
    assert not narrow[48:].any()
    assert torch.equal(KV4_BF16_ROPE.unpack(KV4_BF16_ROPE.pack(latent, rope))[1], rope)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.width))
def test_rows_do_not_know_each_other(row: RowFormat) -> None:
    latent, rope = _latent(12), _rope(row, 12)
    together = row.pack(latent, rope)
    for index in (0, 5, 11):
        alone = row.pack(latent[index], None if rope is None else rope[index])
        assert torch.equal(alone, together[index])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.width))
def test_nan_and_inf_stay_in_their_block(row: RowFormat) -> None:
    latent, rope = _latent(3), _rope(row, 3)
    clean, _ = row.unpack(row.pack(latent, rope))
    latent[0, 20], latent[1, 40] = float("nan"), float("-inf")
    decoded, _ = row.unpack(row.pack(latent, rope))
    assert decoded[0, 16:32].isnan().all()
    assert decoded[1, 40] == -2688.0
    assert decoded[1].isfinite().all()
    other = torch.ones(3, 512, dtype=torch.bool)
    other[0, 16:32] = other[1, 32:48] = False
    assert torch.equal(decoded[other], clean[other])


@pytest.mark.parametrize("scale", [2.0**-6, 0.5, 2.0, 2.0**10])
def test_a_global_scale_moves_the_range_and_no_rounding(scale: float) -> None:
    """Rows of latent × g under the global scale g are the rows of latent: all work can be left to the softmax scale."""
    latent = _latent(16)
    scaled = (latent.float() * scale).to(torch.bfloat16)
    rows = KV4_NO_ROPE.pack(scaled, global_scale=check_global_scale(scale))
    assert torch.equal(rows, KV4_NO_ROPE.pack(latent))


def test_global_scale_opens_the_range() -> None:
    latent = (_latent(4).float() * 2.0**-14).to(torch.bfloat16)
    assert (KV4_NO_ROPE.unpack(KV4_NO_ROPE.pack(latent))[0] == 0).float().mean() > 0.5
    decoded, _ = KV4_NO_ROPE.unpack(KV4_NO_ROPE.pack(latent, global_scale=2.0**-14))
    decoded = decoded.float() * 2.0**-14
    assert (decoded - latent.float()).norm() < 0.11 * latent.float().norm()


@pytest.mark.parametrize("scale", [0.0, -2.0, 3.0, 2.0**65, 2.0**-65, float("inf"), float("nan")])
def test_global_scale_refusals(scale: float) -> None:
    with pytest.raises(ValueError, match="global_scale is a power of two in"):
        check_global_scale(scale)


# --- Requantisation -------------------------------------------------------------------------------------------------


def _both(row: RowFormat, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values of 4-bit rows and of their FP8 rows, and the FP8 scales [rows, 4]."""
    stock = stock_fp8_of(row)
    out = requantize_fp8(rows)
    assert out.shape[-1] == stock.width
    exact, _ = row.unpack(rows, dtype=torch.float32)
    decoded, _ = stock.unpack(out, dtype=torch.float32)
    return exact, decoded, stock.split(out)["scales"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.width))
@pytest.mark.parametrize(("spread", "share"), [(0.5, 0.3), (2.0, 0.7), (4.0, 0.7)])
def test_requantised_error_is_below_that_of_four_bits(
    row: RowFormat, spread: float, share: float
) -> None:
    latent = _latent(32, spread=spread)
    rows = row.pack(latent, _rope(row, 32))
    exact, decoded, scales = _both(row, rows)
    shared = scales.repeat_interleave(128, -1)
    error = (decoded - exact).abs()
    normal = exact.abs() >= shared * 2.0**-6
    assert (error <= torch.where(normal, exact.abs() / 17, shared * 2.0**-10)).all()
    assert (error == 0).float().mean() > 0.5
    # Where a few columns hold most of the norm, 4 bits happen to meet them well.
    assert error.norm() < share * (exact - latent.float()).norm()
    # The scale is a power of two, which bf16 holds, and no smaller one would do.
    assert (torch.frexp(scales).mantissa == 0.5).all()
    largest = 6 * (row.split(rows)["scales"] & 0x7F).view(torch.float8_e4m3fn).float()
    largest = largest.unflatten(-1, (4, 8)).amax(-1)
    assert (largest <= 448 * scales).all()
    assert ((largest > 224 * scales) | (scales == 2.0**-12)).all()


def test_requantised_products() -> None:
    """Under one scale for a group, all of ±0.5, 1, 2, 4 and three mantissas of ±1.5, 3, 6 survive unrounded."""
    rows = torch.zeros(126, KV4_NO_ROPE.width, dtype=torch.uint8)
    fields = KV4_NO_ROPE.split(rows)
    codes = torch.arange(1, 127, dtype=torch.uint8)
    fields["scales"].copy_(codes[:, None])
    fields["latent"].copy_(_every_product()[0, :8].repeat(32))
    exact, decoded, _ = _both(KV4_NO_ROPE, rows)
    elements = exact[:, :8] / exact[:, 2:3]
    survives = (decoded == exact)[:, :8]
    even = torch.isin(elements, torch.tensor([0.0, 0.5, 1.0, 2.0, 4.0]))
    # Mantissas 8 … 15 of 4 bits; those below 8 are the subnormal scales, shorter still.
    mantissa = torch.where(codes < 8, codes, 8 + codes % 8)
    while bool((even_mantissa := (mantissa % 2 == 0) & (mantissa > 0)).any()):
        mantissa = torch.where(even_mantissa, mantissa // 2, mantissa)
    short = torch.isin(mantissa, torch.tensor([1, 3, 5], dtype=torch.uint8))
    assert torch.equal(survives, even | short[:, None])


def test_requantised_zeros_and_nan() -> None:
    latent = _latent(2)
    latent[0] = 0.0
    latent[1, 130] = float("nan")
    exact, decoded, scales = _both(KV4_NO_ROPE, KV4_NO_ROPE.pack(latent))
    assert torch.equal(decoded[0], exact[0])
    assert scales[0].tolist() == [2.0**-12] * 4
    assert decoded[1, 128:144].isnan().all()
    assert decoded[1].isnan().sum() == 16
    assert scales.isfinite().all()


def test_signs_of_scales_do_not_reach_the_fp8_row() -> None:
    """Neither values nor shared scales know them."""
    rows = KV4_NO_ROPE.pack(_latent(8))
    want = requantize_fp8(rows)
    rows[:, 256:288] |= 0x80
    assert torch.equal(requantize_fp8(rows), want)


def test_widths() -> None:
    assert [row.width for row in ROWS] == [352, 288, 416]
    assert [stock_fp8_of(row).width for row in ROWS] == [656, 528, 656]
    with pytest.raises(ValueError, match=r"rows of 656 bytes are not 4-bit; known: 352 \(kv4\)"):
        four_bit_format(656)


# --- Which scales a search must try -----------------------------------------------------------------------------------

MIDDLES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
VALUES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
"""Of scale codes."""


def _error(x: torch.Tensor, code: int) -> torch.Tensor:
    element = E2M1_STEPS.double()[torch.searchsorted(MIDDLES, x / VALUES[code])]
    return (x - element * VALUES[code]).square()


def _least_loss(code: int, offset: int, tried: Iterable[int]) -> float:
    """By how much, in squares of the scale, the best of the `tried` codes is at most worse than that `offset` from `code`.

    Over all blocks of 16 real numbers whose amax gives `code`. By duality: with weights w of the tried codes (they sum to 1) the least of
    their errors is at most the weighted sum, which is a sum over elements. Between two middles the difference of two errors is
    linear in x, so its largest value over all x is found at the middles. The weights come from a linear programme, for each stretch of amax.
    """
    from scipy.optimize import linprog

    aim = min(max(code + offset, 1), 126)
    others = sorted({min(max(code + one, 1), 126) for one in tried})
    if aim in others:
        return -torch.inf
    low = float(3 * (VALUES[code - 1] + VALUES[code])) if code > 1 else 2.0**-11
    # Of an amax beyond this, under the largest scale, no gain of 15 others makes up for the loss.
    high = float(3 * (VALUES[code] + VALUES[code + 1])) if code < 126 else 11_000.0
    middles = sorted({float(VALUES[one] * at) for one in (*others, aim) for at in MIDDLES})
    stops = [low, *(at for at in middles if low < at < high), high]
    worst = -torch.inf
    for start, end in itertools.pairwise(stops):
        inner = torch.linspace(start, end, 3, dtype=torch.float64)
        for first, last in itertools.pairwise(inner.tolist()):
            x = torch.tensor([0.0, *(at for at in middles if at < last), last], dtype=torch.float64)
            largest = torch.tensor([first * (1 + 1e-12), last * (1 - 1e-12)], dtype=torch.float64)
            each, one = (
                torch.stack([_error(at, other) - _error(at, aim) for other in others], dim=1)
                for at in (x, largest)
            )
            # Of weights, z and y: z is at least the loss of every x, y at least that of amax and 15 others.
            rows = torch.cat(
                [
                    torch.cat([each, each.new_tensor([-1.0, 0.0]).expand(len(x), 2)], dim=1),
                    torch.cat([one, one.new_tensor([15.0, -1.0]).expand(2, 2)], dim=1),
                ]
            )
            count = len(others)
            found = linprog(
                [0.0] * (count + 1) + [1.0], A_ub=rows.numpy(), b_ub=[0.0] * len(rows),
                A_eq=[[1.0] * count + [0.0, 0.0]], b_eq=[1.0],
                bounds=[(0, None)] * count + [(None, None)] * 2,
            )  # fmt: skip
            worst = max(worst, found.fun / float(VALUES[code]) ** 2)
    return worst


@pytest.mark.parametrize("offset", [-6, -5])
def test_scales_that_are_never_the_best(offset: int) -> None:
    """From code 8 on scales repeat every 8 codes, up to the last six."""
    pytest.importorskip("scipy", reason="solves linear programmes")
    for code in (*range(1, 24), *range(120, 127)):
        assert _least_loss(code, offset, range(-4, 7)) < -0.5, code


def test_scales_that_may_be_the_best() -> None:
    """The programme says so of three below, and here is a block; four below under the largest scale only."""
    pytest.importorskip("scipy", reason="solves linear programmes")
    nine = range(-2, 7)
    assert _least_loss(56, -3, nine) > 0.5
    assert _least_loss(56, -4, range(-3, 7)) < -0.2
    assert _least_loss(126, -4, range(-3, 7)) > 0


@pytest.mark.parametrize(
    ("block", "codes"),
    [
        ({5.84375: 1, 0.375: 5, 0.40625: 3, 3.125: 1, 4.375: 1, 4.8125: 2, 4.875: 1, 5.0: 2}, (56, 53)),
        ({2608.0: 1, 1920.0: 7, 2080.0: 1, 2112.0: 3, 2240.0: 4}, (126, 123)),
    ],
)  # fmt: skip
def test_blocks_of_far_scales(block: dict[float, int], codes: tuple[int, int]) -> None:
    x = torch.tensor([value for value, count in block.items() for _ in range(count)])[None]
    found = tuple(
        int(quantize_nvfp4(x.to(torch.bfloat16), scale_choice=choice)[1])
        for choice in ("amax", "mse")
    )
    assert found == codes


# --- The PTX of sm90, on a model of its instructions ----------------------------------------------------------------------


def test_the_ptx_of_the_elements() -> None:
    """Every fp16 number in every place: NaN, inf, zeros of both signs, each tie and its neighbours."""
    every = torch.arange(2**16).to(torch.int32).to(torch.uint16).view(torch.float16).float()
    places = [every.roll(shift) for shift in (0, 1, 77, 4096, 12345, 30000, 40000, 65000)]
    registers: Registers = {f"${1 + at}": from_singles(x) for at, x in enumerate(places)}
    run_ptx(ptx_of(codec.pack_e2m1, 1), registers)
    for byte in range(4):
        even, odd = (encode_e2m1(places[at] * 2.0**14) for at in (byte, byte + 4))
        got = (registers["$0"] >> (8 * byte) & 0xFF).to(torch.uint8)
        assert_bitwise_equal(f"byte {byte}", got, even | (odd << 4))


def test_the_ptx_of_the_largest() -> None:
    """Every bf16 number beside others, in both halves."""
    every = torch.arange(2**16)
    a, b = every | (every.roll(1234) << 16), every * 40503 % 2**16 | (every.roll(-99) << 16)
    registers: Registers = {"$1": a, "$2": b}
    run_ptx(ptx_of(codec._larger_pair), registers)
    for shift in (0, 16):
        x, y = ((number >> shift & 0xFFFF) << 16 for number in (a, b))
        want = torch.maximum(x & 0x7FFFFFFF, y & 0x7FFFFFFF)
        got = (registers["$0"] >> shift & 0x7FFF) << 16
        assert torch.equal(got > 0x7F800000, want > 0x7F800000)
        assert torch.equal(got[want <= 0x7F800000], want[want <= 0x7F800000])


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_the_ptx_of_the_quotient(off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every scale under many numerators is rounded to nearest, though the reciprocal is off by an ulp; a NaN stays one."""
    exact = KNOWN["rcp.approx.ftz.f32"]
    monkeypatch.setitem(KNOWN, "rcp.approx.ftz.f32", lambda a: (exact(a) + off) & FULL)
    generator = torch.Generator().manual_seed(3)
    above = 1.0 + torch.rand(2**14, generator=generator)
    above[:4] = torch.tensor([1.0, 1 + 2.0**-23, 2 - 2.0**-23, 1.5])
    exponents = torch.randint(-78, 64, (2**14,), generator=generator)
    exponents[:8:2], exponents[1:8:2] = -78, 63
    above = torch.ldexp(above, exponents)[:, None].expand(-1, 126)
    codes = torch.arange(1, 127).expand(2**14, 126)
    registers: Registers = {"$1": from_singles(above), "$2": codes}
    run_ptx(ptx_of(codec._quotient), registers)
    want = above / decode_e4m3fn(codes.to(torch.uint8))
    assert_bitwise_equal("quotient", singles(registers["$0"]), want)
    special: Registers = {
        "$1": from_singles(torch.tensor([1.0, float("nan")])),
        "$2": torch.tensor([0x7F, 0x38]),
    }
    run_ptx(ptx_of(codec._quotient), special)
    assert bool(singles(special["$0"]).isnan().all())
