# SPDX-License-Identifier: Apache-2.0
"""Packed KV rows: offsets as plain numbers, bytes as the stock writer lays them out, pack and unpack inverse, faults seen."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from numinous_tooling import formats
from numinous_tooling.formats import FORMATS, Field, RowFormat, row_format

torch = pytest.importorskip("torch")

from numinous_tooling import numerics  # noqa: E402 - imports torch

# width: (field, first byte, byte behind it)
LAYOUT = {
    352: [("latent", 0, 256), ("scales", 256, 288), ("rope", 288, 352)],
    416: [("latent", 0, 256), ("scales", 256, 288), ("rope", 288, 416)],
    288: [("latent", 0, 256), ("scales", 256, 288)],
    656: [("latent", 0, 512), ("scales", 512, 528), ("rope", 528, 656)],
    528: [("latent", 0, 512), ("scales", 512, 528)],
    576: [("latent", 0, 512), ("rope", 512, 576)],
}
WIDTHS = sorted(LAYOUT)
KV4_WIDTHS = (288, 352, 416)


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors here are small: handing them to threads costs ten times the work on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_inputs(width, *shape, seed=0):
    """bf16 latent and rope as a model makes them; one block of zeros, one rope value beyond the range of E4M3FN, one of INT8."""
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(*shape, 512, generator=generator).bfloat16()
    rope = (torch.randn(*shape, 64, generator=generator) * 20).bfloat16()
    latent[..., 128:256] = 0.0
    rope[..., 5], rope[..., 20] = -600.0, 9000.0
    return latent, rope if row_format(width).rope_dim else None


@pytest.mark.parametrize("width", WIDTHS)
def test_layout(width):
    row = row_format(width)
    assert [(field.name, field.offset, field.end) for field in row.fields] == LAYOUT[width]
    assert row is FORMATS[width]
    assert row.width == width
    assert row.stock == (width not in KV4_WIDTHS)
    assert row.bytes_per_token() == width
    assert row.bytes_per_token(layers=78) == 78 * width
    assert row.rope_dim == (0 if width in (288, 528) else 64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.width = 1


def test_unknown_width_and_field():
    with pytest.raises(
        ValueError,
        match=r"no row format is 640 bytes wide; known: 288 \(kv4_no_rope\), 352 \(kv4\)",
    ):
        row_format(640)
    with pytest.raises(
        ValueError, match="row stock_fp8_raw has no field scales; it has latent, rope"
    ):
        row_format(576).field("scales")
    with pytest.raises(TypeError, match="does not support item assignment"):
        FORMATS[640] = formats.KV4


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"width": 368}, "fields end at byte 352, not at 368"),
        ({"fields": formats.KV4.fields[::2]}, "field rope at byte 288, expected 256"),
        (
            {"fields": (Field("latent", 0, 24, "e4m3fn"), Field("rope", 24, 8, "e4m3fn"))},
            "multiple of 16",
        ),
        ({"group": 32}, "scales do not cover 512"),
        ({"fields": formats.STOCK_FP8_RAW.fields, "width": 576}, "group 16 and its scales"),
    ],
)
def test_a_wrong_layout_is_refused(change, text):
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(formats.KV4, **change)


def test_two_formats_of_one_width_are_refused():
    twin = dataclasses.replace(formats.KV4, name="twin")
    with pytest.raises(ValueError, match="rows twin and kv4 are both 352 wide"):
        formats._by_width((formats.KV4, twin))


def test_loads_without_torch():
    code = "import sys; import numinous_tooling.formats as f; f.row_format(352); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def check_rows(row, latent, rope, rows):
    """Bytes of packed rows, taken apart with plain slices and torch's own types."""
    assert rows.dtype == torch.uint8
    assert rows.shape == (*latent.shape[:-1], row.width)
    for name, start, end in LAYOUT[row.width]:
        part = rows[..., start:end].contiguous()
        if name == "rope" and end - start == 128:
            assert torch.equal(part.view(torch.bfloat16), rope), "rope"
        elif name == "rope" and row.width == 352:
            check_rope(rows, part, rope)
        elif name == "rope":
            want = rope.float().clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(part, want.view(torch.uint8)), "rope"
        elif name == "latent" and row.width in KV4_WIDTHS:
            table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
            table = torch.cat([table, -table])
            scales = (rows[..., 256:288] & 0x7F).view(torch.float8_e4m3fn).float()
            assert row.width == 352 or (rows[..., 256:288] < 128).all(), "scales"
            values = torch.empty(latent.shape)
            values[..., 0::2], values[..., 1::2] = (
                table[(part & 15).long()],
                table[(part >> 4).long()],
            )
            values *= scales.repeat_interleave(16, -1)
            amax = latent.float().unflatten(-1, (32, 16)).abs().amax(-1)
            assert (scales == (amax / 6).to(torch.float8_e4m3fn).float()).all(), "scales"
            # Half the widest step, 2; what the scale's own rounding clips, 6 / 16, is less.
            limit = scales.repeat_interleave(16, -1)
            assert ((values - latent.float()).abs() <= limit).all(), "latent"
        elif name == "latent":
            scales = torch.ones(*latent.shape[:-1], 4)
            if row.group:
                scales = rows[..., 512:528].contiguous().view(torch.float32)
                amax = latent.float().unflatten(-1, (4, 128)).abs().amax(-1)
                assert torch.equal(scales, amax / 448), "scales"
            values = part.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, -1)
            limit = latent.float().abs() * 2.0**-4 + scales.repeat_interleave(128, -1) * 2.0**-10
            assert ((values - latent.float()).abs() <= limit * 1.00001).all(), "latent"


def check_rope(rows, codes, rope):
    """INT8 codes as torch's own signed bytes, under steps read bit by bit from the scales' signs."""
    signs = (rows[..., 256:288] >> 7).int()
    assert not signs[..., 7::8].any(), "scales"
    step = sum(signs[..., bit::8] * 2**bit for bit in range(7)) - 120.0
    step = torch.exp2(step).repeat_interleave(16, -1)
    magnitude = (codes & 0x7F).float()
    assert torch.equal((codes >= 128), torch.signbit(rope)), "rope"
    limit = torch.maximum(step / 2, (rope.float().abs() - 127 * step) * (step == 64))
    assert ((magnitude * step - rope.float().abs()).abs() <= limit).all(), "rope"
    largest = magnitude.unflatten(-1, (4, 16)).amax(-1)
    assert (largest >= 64).all(), "rope"  # no smaller step would do


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (0,), (2, 0)], ids=str)
def test_pack_and_unpack(width, shape):
    row = row_format(width)
    latent, rope = make_inputs(width, *shape)
    rows = row.pack(latent, rope)
    check_rows(row, latent, rope, rows)
    got_latent, got_rope = row.unpack(rows)
    assert got_latent.dtype == got_rope.dtype == torch.bfloat16
    assert got_latent.shape == latent.shape
    assert got_rope.shape == (*shape, row.rope_dim)
    wide = row.unpack(rows, dtype=torch.float32)
    if row.group != 128:  # E4M3FN × fp32 does not fit bf16
        assert torch.equal(wide[0], got_latent.float())
        again = row.pack(got_latent, got_rope if row.rope_dim else None)
        assert torch.equal(again, rows)
    assert torch.equal(wide[1], got_rope.float())


@pytest.mark.parametrize("width", KV4_WIDTHS)
def test_numerics_are_the_specification(width):
    row = row_format(width)
    latent, rope = make_inputs(width, 6, seed=4)
    for options in ({}, {"scale_choice": "mse"}, {"global_scale": 0.03}):
        rows = row.pack(latent, rope, **options)
        packed, scales = numerics.quantize_nvfp4(latent, **options)
        assert torch.equal(rows[:, :256], packed)
        if width == 352:
            codes, steps = numerics.quantize_int8(rope)
            assert torch.equal(rows[:, 288:], codes)
            assert torch.equal(rows[:, 256:288], formats.join_steps(scales, steps))
        else:
            assert torch.equal(rows[:, 256:288], scales)
        above = options.get("global_scale")
        values = row.unpack(rows, global_scale=above, dtype=torch.float32)[0]
        want = numerics.dequantize_nvfp4(packed, scales, global_scale=above)
        assert torch.equal(values, want)


def test_steps_lie_in_the_signs_of_scales():
    """Bit b of the code of group g is the sign of scale 8 g + b; the eighth is free; the scales keep what is theirs."""
    steps = torch.arange(128, dtype=torch.uint8).view(32, 4)
    scales = torch.arange(1024).remainder(128).view(32, 32).to(torch.uint8)
    for before in (scales, scales | 0x80):
        joined = formats.join_steps(before, steps)
        assert torch.equal(joined & 0x7F, scales)
        assert torch.equal(formats.steps_of(joined), steps)
        assert not (joined[:, 7::8] >> 7).any()
    one = formats.join_steps(scales[:1], torch.tensor([[0, 1 << 2, 0, 1 << 6]], dtype=torch.uint8))
    assert (one[0] >> 7).nonzero().flatten().tolist() == [8 + 2, 24 + 6]
    joined[:, 7::8] |= 0x80  # what nobody writes, nobody reads
    assert torch.equal(formats.steps_of(joined), steps)


@pytest.mark.parametrize("width", KV4_WIDTHS)
def test_signs_of_scales_are_not_the_latents(width):
    """Whatever they hold, the latent is the same; and the rope part follows them, in rows of 352 bytes alone."""
    row = row_format(width)
    latent, rope = make_inputs(width, 8)
    rows = row.pack(latent, rope)
    want, want_rope = row.unpack(rows)
    rows[:, 256:288] ^= 0x80
    found, found_rope = row.unpack(rows)
    assert torch.equal(found, want)
    assert torch.equal(torch.signbit(found), torch.signbit(want))
    assert torch.equal(found_rope, want_rope) == (width != 352)


def test_rope_does_not_touch_the_latent():
    """NaN and inf in it neither; a NaN makes its sixteen values NaN."""
    latent, rope = make_inputs(352, 4)
    want = formats.KV4.unpack(formats.KV4.pack(latent, rope))
    rope[1, 3], rope[2, 63], rope[3] = float("nan"), float("inf"), 0.0
    rows = formats.KV4.pack(latent, rope)
    found = formats.KV4.unpack(rows)
    assert torch.equal(found[0], want[0])
    assert found[1][1, :16].isnan().all()
    assert torch.equal(found[1][1, 16:], want[1][1, 16:])
    assert found[1][2, 63] == 8128
    assert found[1][2].isfinite().all()
    assert not rows[3, 288:].any()
    assert not (rows[3, 256:288] >> 7).any()
    assert not formats.KV4.pack(torch.zeros_like(latent), rope[3:].expand(4, 64)).any()
    assert not any(part.any() for part in formats.KV4.unpack(rows * 0))


@pytest.mark.parametrize("width", WIDTHS)
def test_split_gives_views(width):
    row = row_format(width)
    pool = torch.full((8, 3, width), 0xA5, dtype=torch.uint8)  # [pages, tokens, bytes]
    fields = row.split(pool[2:6, 1])
    for name, view in fields.items():
        field = row.field(name)
        assert view.shape == (4, field.nbytes if field.encoding == "e2m1" else field.count)
        assert view.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}.get(
            field.encoding, torch.uint8
        )
        view.zero_()
    assert (pool[2:6, 1] == 0).all()
    pool[2:6, 1] = 0xA5
    assert (pool == 0xA5).all()  # nothing beside the rows was touched


def test_non_contiguous_inputs():
    latent, rope = make_inputs(352, 5)
    want = formats.KV4.pack(latent, rope)
    wide = torch.empty(5, 1024, dtype=torch.bfloat16)
    wide[:, ::2] = latent
    assert torch.equal(formats.KV4.pack(wide[:, ::2], rope.T.contiguous().T), want)
    pool = torch.zeros(10, 352, dtype=torch.uint8)
    pool[::2] = want
    assert torch.equal(formats.KV4.unpack(pool[::2])[0], formats.KV4.unpack(want)[0])


def test_refusals():
    latent, rope = make_inputs(352, 2)
    refused = [
        (
            lambda: formats.KV4.pack(latent[:, :500], rope),
            r"takes latent \[..., 512\], got \[2, 500\]",
        ),
        (lambda: formats.KV4.pack(latent), r"takes rope \[2, 64\], got \[2, 0\]"),
        (lambda: formats.KV4_NO_ROPE.pack(latent, rope), r"takes rope \[2, 0\], got \[2, 64\]"),
        (lambda: formats.KV4.pack(latent, rope[:1]), r"takes rope \[2, 64\], got \[1, 64\]"),
        (
            lambda: formats.STOCK_FP8.pack(latent, rope, scale_choice="mse"),
            "no block scales to choose",
        ),
        (lambda: formats.STOCK_FP8.pack(latent, rope, global_scale=1.0), "no global scale"),
    ]
    rows = formats.STOCK_FP8.pack(latent, rope)
    refused += [
        (lambda: formats.STOCK_FP8.unpack(rows, global_scale=1.0), "has no global scale"),
        (
            lambda: formats.KV4.unpack(rows),
            r"row kv4 is uint8 \[..., 352\], got torch.uint8 \[2, 656\]",
        ),
        (lambda: formats.STOCK_FP8.split(rows.view(torch.int8)), "got torch.int8"),
        (lambda: formats.STOCK_FP8.split(rows.T.contiguous().T), "contiguous bytes"),
        (lambda: formats.STOCK_FP8.split(rows.flatten()[1:657]), "multiples of 4"),
        (
            lambda: formats.STOCK_FP8.split(torch.zeros(2, 657, dtype=torch.uint8)[:, :656]),
            "multiples of 4",
        ),
    ]
    for call, text in refused:
        with pytest.raises(ValueError, match=text):
            call()
    assert formats.KV4_NO_ROPE.pack(latent, rope[:, :0]).shape == (2, 288)


def test_stock_rows_are_written_in_the_order_of_the_engine():
    latent = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes = formats.STOCK_FP8_NO_ROPE.split(formats.STOCK_FP8_NO_ROPE.pack(latent))["latent"]
    groups = latent.float().unflatten(-1, (4, 128))
    scales = groups.abs().amax(-1, keepdim=True) / 448
    want = (groups * (1 / scales)).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(codes, want.flatten(-2))
    divided = (groups / scales).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert not torch.equal(want, divided)  # the order can be told from the bytes


def test_stock_zero_group_and_nan():
    latent = torch.zeros(1, 512)
    latent[0, 128:], latent[0, 300] = 1.0, float("nan")
    rows = formats.STOCK_FP8_NO_ROPE.pack(latent)
    values = formats.STOCK_FP8_NO_ROPE.unpack(rows)[0]
    assert (values[0, :128] == 0).all()
    assert (values[0, 128:256] == 1).all()
    assert values[0, 256:384].isnan().all()
    raw = formats.STOCK_FP8_RAW.pack(latent, torch.full((1, 64), 1e6))
    assert formats.STOCK_FP8_RAW.unpack(raw)[1].unique().item() == 448


FAULTS = {
    "nibbles": lambda rows: rows[:, :256].copy_(rows[:, :256] >> 4 | rows[:, :256] << 4),
    "scale byte": lambda rows: rows[1, 270:271].bitwise_xor_(1),
    "latent byte": lambda rows: rows[1, 9:10].bitwise_xor_(0x77),
    "rope byte": lambda rows: rows[0, 300:301].bitwise_xor_(2),
    "scales shifted": lambda rows: rows[:, 256:288].copy_(rows[:, 256:288].roll(1, -1)),
    "swizzled scales": lambda rows: rows[:, 256:288].copy_(
        rows[:, 256:288].reshape(-1, 8, 4).transpose(1, 2).reshape(-1, 32)
    ),
    "step of another group": lambda rows: rows[:, 256:288].copy_(
        rows[:, 256:288] & 0x7F | rows[:, 256:288].roll(8, -1) & 0x80
    ),
    "steps not written": lambda rows: rows[:, 256:288].bitwise_and_(0x7F),
    "the free sign": lambda rows: rows[0, 263:264].bitwise_xor_(0x80),
    "rope first": lambda rows: rows.copy_(rows.roll(64, -1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_row_is_seen(fault):
    latent, rope = make_inputs(352, 4)
    rows = formats.KV4.pack(latent, rope)
    check_rows(formats.KV4, latent, rope, rows)
    FAULTS[fault](rows)
    with pytest.raises(AssertionError, match=r"rope|scales|latent"):
        check_rows(formats.KV4, latent, rope, rows)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_field_at_the_wrong_offset_is_seen(monkeypatch, width):
    row = row_format(width)
    latent, rope = make_inputs(width, 4)
    check_rows(row, latent, rope, row.pack(latent, rope))
    original = RowFormat.split

    def shifted(self, rows):
        views = original(self, rows)
        return views | {"latent": rows[..., 2 : 2 + views["latent"].shape[-1]]}

    monkeypatch.setattr(RowFormat, "split", shifted)
    with pytest.raises(AssertionError, match="latent"):
        check_rows(row, latent, rope, row.pack(latent, rope))
