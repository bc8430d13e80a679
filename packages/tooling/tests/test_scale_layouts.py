# SPDX-License-Identifier: Apache-2.0
"""Scale layouts byte by byte in memory, padding included, for random shapes; and against planted faults."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from numinous_tooling import numerics, scale_layouts  # noqa: E402 - imports torch

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
shapes = st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9))  # experts, M, G


def random_codes(*shape):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(3)).to(torch.uint8)


def memory_of(tensor):
    return bytes(tensor.untyped_storage())


def check_packed(codes):
    """`pack_ue8m0` of codes [E, M, G] against the definition: every byte of the memory, padding zero."""
    experts, rows, groups = codes.shape
    packed = scale_layouts.pack_ue8m0(codes)
    aligned, columns = (rows + 3) // 4 * 4, (groups + 3) // 4
    want = bytearray(4 * experts * columns * aligned)
    for expert in range(experts):
        for row in range(rows):
            for group in range(groups):
                at = 4 * ((expert * columns + group // 4) * aligned + row) + group % 4
                want[at] = int(codes[expert, row, group])
    assert memory_of(packed) == bytes(want), "packed bytes"
    assert packed.shape == (experts, rows, columns)
    if packed.numel():
        assert packed.stride() == (columns * aligned, 1, aligned)
    assert torch.equal(scale_layouts.unpack_ue8m0(packed, groups), codes), "unpacked codes"


def check_column_major(scales):
    """`column_major_scales` of scales [E, M, G] against the definition."""
    experts, rows, groups = scales.shape
    result = scale_layouts.column_major_scales(scales)
    aligned = (rows + 3) // 4 * 4
    want = [0.0] * (experts * groups * aligned)
    for expert in range(experts):
        for row in range(rows):
            for group in range(groups):
                want[(expert * groups + group) * aligned + row] = float(scales[expert, row, group])
    assert memory_of(result) == struct.pack(f"={len(want)}f", *want), "column bytes"
    if result.numel():
        assert result.stride() == (groups * aligned, 1, aligned)
    assert torch.equal(result, scales)
    assert torch.equal(result.contiguous(), scales)


@quick
@given(shapes)
def test_packed_ue8m0(shape):
    check_packed(random_codes(*shape))


@quick
@given(shapes)
def test_column_major(shape):
    check_column_major(torch.randn(*shape))


def test_inputs_of_any_strides():
    codes = random_codes(2, 12, 10)
    for view in (codes.transpose(1, 2), codes[:, ::2, 1::3], codes.flip(1)):
        check_packed(view)
        check_column_major(view.float())
    # Unpacking reads a row-major copy as well.
    packed = scale_layouts.pack_ue8m0(codes)
    assert torch.equal(scale_layouts.unpack_ue8m0(packed.contiguous(), 10), codes)


def test_two_dimensions_as_the_gemm_takes_them():
    """7168 columns in groups of 128, five tokens."""
    packed = scale_layouts.pack_ue8m0(random_codes(5, 56))
    assert (packed.shape, packed.stride(), packed.dtype) == ((5, 14), (1, 8), torch.int32)
    columns = scale_layouts.column_major_scales(torch.rand(5, 56))
    assert (columns.shape, columns.stride(), columns.dtype) == ((5, 56), (1, 8), torch.float32)


def test_from_a_quantised_tensor():
    x = torch.randn(6, 1280, generator=torch.Generator().manual_seed(0))
    _, codes = numerics.quantize_fp8_group(x, scale_format="ue8m0")
    packed = scale_layouts.pack_ue8m0(codes)
    # Little-endian: four neighbouring groups of a token are the bytes of its int32, which a row-major view shows too.
    assert torch.equal(packed.contiguous().view(torch.uint8)[:, :10], codes)
    assert (packed.contiguous().view(torch.uint8)[:, 10:] == 0).all()
    # The exponent field of the scale itself.
    powers = numerics.decode_ue8m0(codes).view(torch.int32) >> 23
    assert torch.equal(scale_layouts.unpack_ue8m0(packed, 10).int(), powers)


def test_padding_rows_are_shown_and_written():
    columns = scale_layouts.column_major_scales(torch.rand(2, 5, 3))
    whole = scale_layouts.with_padding(columns)
    assert whole.shape == (2, 8, 3)
    assert (whole[:, 5:] == 0).all()
    whole[:, 5:] = 7.0
    assert columns.max() < 7
    assert memory_of(columns).count(struct.pack("=f", 7.0)) == 2 * 3 * 3
    one = scale_layouts.with_padding(scale_layouts.column_major_scales(torch.ones(1, 1)))
    assert one.tolist() == [[1.0], [0.0], [0.0], [0.0]]


def test_refusals():
    codes = random_codes(5, 6)
    with pytest.raises(TypeError, match=r"codes in uint8, got torch\.float32"):
        scale_layouts.pack_ue8m0(codes.float())
    with pytest.raises(TypeError, match=r"scales in float32, got torch\.bfloat16"):
        scale_layouts.column_major_scales(codes.bfloat16())
    with pytest.raises(TypeError, match=r"in int32, got torch\.uint8"):
        scale_layouts.unpack_ue8m0(codes, 6)
    with pytest.raises(TypeError, match="float32 or int32, got"):
        scale_layouts.empty_column_major(5, 6, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"rows and columns, got shape \[5\]"):
        scale_layouts.empty_column_major(5, dtype=torch.int32)
    packed = scale_layouts.pack_ue8m0(codes)
    for groups in (4, 9):
        with pytest.raises(ValueError, match=f"{groups} groups do not fill 2 columns"):
            scale_layouts.unpack_ue8m0(packed, groups)
    with pytest.raises(ValueError, match=r"expected column-major strides \(1, 8\), got \(2, 1\)"):
        scale_layouts.with_padding(packed.contiguous())


# --- Peers on the GPU -------------------------------------------------------------------------------------------------


def same_layout(got, want):
    """Shape, strides where they matter, and values of the M rows; a peer may leave the padding rows as they were."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    steps = zip(got.stride(), want.stride(), got.shape, strict=True)
    assert all(have == stride or size == 1 for have, stride, size in steps), got.stride()
    assert torch.equal(got, want)


@pytest.mark.tier("device", archs=("sm90", "sm100", "sm103"))
@pytest.mark.filterwarnings("ignore")  # a peer's
@pytest.mark.parametrize("groups", [1, 4, 6, 56])
@pytest.mark.parametrize("rows", [1, 4, 5, 1023])
def test_equals_deep_gemm(gpu, rows, groups):
    deep_gemm = pytest.importorskip(
        "deep_gemm.utils.layout", reason="DeepGEMM cannot be imported", exc_type=ImportError
    )
    codes = (random_codes(rows, groups).clamp(1, 254)).to(gpu)  # it takes no subnormal and no NaN
    scales = numerics.decode_ue8m0(codes)
    packed = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(scales)
    same_layout(packed, scale_layouts.pack_ue8m0(codes))
    columns = deep_gemm.get_mn_major_tma_aligned_tensor(scales)
    same_layout(columns, scale_layouts.column_major_scales(scales))


@pytest.mark.tier("device", archs=("sm90", "sm100", "sm103", "sm120"))
@pytest.mark.filterwarnings("ignore")  # a peer's
@pytest.mark.parametrize("groups", [1, 4, 6, 56])
@pytest.mark.parametrize("rows", [1, 4, 5, 1023])
def test_equals_the_engine(gpu, rows, groups):
    """Scales of `per_token_group_quant`: the engine multiplies amax by fp32(1 / 448), and floors it at 1e-10."""
    engine = pytest.importorskip(
        "sglang.kernels.ops.quantization.fp8_kernel",
        reason="the engine cannot be imported",
        exc_type=ImportError,
    )
    x = torch.randn(rows, groups * 128, generator=torch.Generator().manual_seed(rows)).to(gpu)
    x = x.bfloat16()
    amax = x.float().unflatten(-1, (groups, 128)).abs().amax(-1).clamp(min=1e-10)
    scales = amax * torch.tensor(1 / 448, dtype=torch.float32, device=gpu)
    codes = numerics.encode_ue8m0(scales, rounding="up")
    _, packed = engine.sglang_per_token_group_quant_fp8_ue8m0(x, 128)
    same_layout(packed, scale_layouts.pack_ue8m0(codes))
    _, columns = engine.sglang_per_token_group_quant_fp8(
        x, 128, column_major_scales=True, scale_tma_aligned=True
    )
    same_layout(columns, scale_layouts.column_major_scales(scales))


# --- Tests of the tests -----------------------------------------------------------------------------------------------


def unwritten_padding(monkeypatch):
    monkeypatch.setattr(scale_layouts, "with_padding", lambda scales: torch.empty(0))
    original = torch.empty

    def dirty(*args, **kwargs):
        tensor = original(*args, **kwargs)
        return tensor if tensor.is_meta else tensor.fill_(9)

    monkeypatch.setattr(torch, "empty", dirty)


FAULTS = {
    "padding not written": unwritten_padding,
    "rows aligned to 8": lambda patch: patch.setattr(scale_layouts, "ROW_ALIGNMENT", 8),
    "rows not aligned": lambda patch: patch.setattr(scale_layouts, "ROW_ALIGNMENT", 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_layout_is_seen(monkeypatch, fault):
    codes = random_codes(2, 3, 6)
    check_packed(codes)
    check_column_major(codes.float())
    FAULTS[fault](monkeypatch)
    with pytest.raises(AssertionError, match="packed bytes"):
        check_packed(codes)
    with pytest.raises(AssertionError, match="column bytes"):
        check_column_major(codes.float())


@pytest.mark.parametrize("fault", ["bytes reversed", "groups apart", "two per int32"])
def test_a_faulty_packing_is_seen(monkeypatch, fault):
    original = scale_layouts.pack_ue8m0
    faulty = {
        "bytes reversed": lambda codes: original(codes.unflatten(-1, (-1, 4)).flip(-1).flatten(-2)),
        # Byte b of column c holds group c + 2b in place of 4c + b.
        "groups apart": lambda codes: original(codes.unflatten(-1, (4, -1)).mT.flatten(-2)),
        "two per int32": lambda codes: original(
            torch.nn.functional.pad(codes.unflatten(-1, (-1, 2)), (0, 2)).flatten(-2)
        ),
    }
    monkeypatch.setattr(scale_layouts, "pack_ue8m0", faulty[fault])
    with pytest.raises(AssertionError, match="packed bytes"):
        check_packed(random_codes(1, 4, 8))


def test_a_faulty_unpacking_is_seen(monkeypatch):
    original = scale_layouts.unpack_ue8m0
    monkeypatch.setattr(
        scale_layouts, "unpack_ue8m0", lambda packed, groups: original(packed, groups) & 0x7F
    )
    with pytest.raises(AssertionError, match="unpacked codes"):
        check_packed(random_codes(1, 4, 8))
