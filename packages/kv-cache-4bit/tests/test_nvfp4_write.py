# SPDX-License-Identifier: Apache-2.0
"""Quantised write of MHA caches: all tiers of the op, then what is particular to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from numinous_kv_cache_4bit.kernels.nvfp4_write import TILE, Tile, encode, nvfp4_write, reference
from numinous_kv_cache_4bit.workbench.nvfp4_write import OP
from numinous_tooling.compile import NotAvailable, gate, jit, resources
from numinous_tooling.numerics import quantize_nvfp4
from numinous_tooling.testing.kernels import KernelTests
from numinous_tooling.testing.tensors import assert_bitwise_equal, big_pool, guarded_pool


class TestNvfp4Write(KernelTests):
    op = OP


@pytest.mark.tier("compile")
def test_no_pair_of_fp8_keys_is_torn(arch: str) -> None:
    """The machine code that lost every second pair's low byte on an H200 is named by this, see `encode_e4m3fn_pairs`."""
    if arch.startswith("gfx"):
        pytest.skip("no F2FP there")
    binaries = [binary for binary in gate.selected(OP, arch, full=True) if "k8" in binary.name]
    assert binaries
    for binary in binaries:
        (cubin,) = jit.compile_arch(binary, arch).glob("*.cubin")
        try:
            texts = resources.sass(cubin)
        except NotAvailable as missing:
            pytest.skip(str(missing))
        for text in texts.values():
            assert sum(resources.count(text, ["F2FP"]).values()) >= 8
            assert not resources.torn_merges(text), binary.name


def _tokens(count: int, heads: int = 1, device: Any = "cpu") -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(7)
    return torch.randn(count, heads, 64, generator=generator, device=device).to(torch.bfloat16)


def _buffers(slots: int, heads: int = 1, device: Any = "cpu") -> tuple[torch.Tensor, ...]:
    shapes = ((slots, heads, 32), (slots, heads, 32), (slots, heads, 4), (slots, heads, 4))
    return tuple(torch.full(shape, 0x33, dtype=torch.uint8, device=device) for shape in shapes)


# --- What the numbers are -------------------------------------------------------------------------------------------

TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _every_middle() -> torch.Tensor:
    """bf16 [n, 16]: around each middle between two E2M1 codes under each scale, and around each between two scales."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()

    def neighbours(values: torch.Tensor) -> torch.Tensor:
        bits = values.to(torch.bfloat16).view(torch.int16).unsqueeze(-1)
        return torch.cat([bits - 1, bits, bits + 1], dim=-1).view(torch.bfloat16)

    elements = neighbours(scales[:, None] * torch.tensor(TIES)).flatten(1)  # 21 of each scale
    elements = torch.nn.functional.pad(elements, (0, 9)).view(-1, 2, 15)
    largest = (6 * scales).to(torch.bfloat16)[:, None, None].expand(-1, 2, 1)
    between = neighbours(3 * (scales[1:] + scales[:-1])).flatten()
    blocks = torch.cat([largest, elements], dim=-1).view(-1, 16)
    return torch.cat([blocks, between[:, None].expand(-1, 16)])


@pytest.mark.parametrize("scale", [1.0, 2.0**-7, 2.0**20])
def test_powers_of_two_give_the_bytes_of_numerics(scale: float) -> None:
    for x in (_every_middle() * scale, 3 * _tokens(500, 4), _tokens(64) * float("nan")):
        for got, want in zip(encode(x, scale), quantize_nvfp4(x, global_scale=scale), strict=True):
            assert_bitwise_equal(f"global scale {scale}", got, want)


@pytest.mark.parametrize("scale", [0.013, 3.7e-3, 1.7])
def test_other_scales_round_within_the_stated_distance(scale: float) -> None:
    x = (_tokens(2000, 4).float() * scale * 8).to(torch.bfloat16)
    got, want = encode(x, scale), quantize_nvfp4(x, global_scale=scale)
    assert_bitwise_equal("scales", got[1], want[1])
    differ = torch.stack([got[0] ^ want[0], (got[0] ^ want[0]) >> 4], dim=-1).flatten(-2) & 15 != 0
    assert 0 < int(differ.sum()) < x.numel() // 500
    unit = want[1].view(torch.float8_e4m3fn).double().repeat_interleave(16, dim=-1) * scale
    quotient = (x.double() / unit).abs()[differ]
    distance = (quotient[:, None] - torch.tensor(TIES)).abs().amin(dim=-1)
    assert bool((distance <= 2.0**-11 * quotient.clamp(min=1.0) * 1.01).all())


def _middles_as_the_reference(device: torch.device) -> None:
    x = torch.nn.functional.pad(_every_middle(), (0, 0, 0, -len(_every_middle()) % 4))
    x = x.to(device).view(-1, 1, 64)
    # Global scales move the middles to other places, so V's are other roundings than K's.
    values, scales = x * 0.0137, {"k_global_scale": 1.0, "v_global_scale": 0.013}
    loc = torch.arange(1, len(x) + 1, device=device)
    got, want = _buffers(len(x) + 1, device=device), _buffers(len(x) + 1, device=device)
    nvfp4_write(x, values, loc, *got, **scales)
    reference(x, values, loc, *want, **scales)
    for index, pair in enumerate(zip(got, want, strict=True)):
        assert_bitwise_equal(f"buffer {index}", *pair)


@pytest.mark.tier("interpret")
def test_every_middle_interpreted() -> None:
    _middles_as_the_reference(torch.device("cpu"))


@pytest.mark.tier("device")
def test_every_middle(gpu: torch.device) -> None:
    _middles_as_the_reference(gpu)


def _random_bits(device: torch.device, count: int) -> None:
    """Every bf16 bit pattern is equally likely: NaN, inf and subnormals among them."""
    bits = torch.randint(-(2**15), 2**15, (count, 8, 64), dtype=torch.int16, device=device)
    x, loc = bits.view(torch.bfloat16), torch.arange(1, count + 1, device=device)
    for scale in (1.0, 0.013, 3.3e9):
        scales = {"k_global_scale": scale, "v_global_scale": torch.full((1,), scale, device=device)}
        got, want = _buffers(count + 1, 8, device), _buffers(count + 1, 8, device)
        nvfp4_write(x, x, loc, *got, **scales)
        reference(x, x, loc, *want, **scales)
        for index, pair in enumerate(zip(got, want, strict=True)):
            assert_bitwise_equal(f"buffer {index}", *pair)
        fp8 = torch.zeros(2, count + 1, 8, 64, dtype=torch.uint8, device=device)
        for function, keys, (_, v, _, v_scales) in (
            (nvfp4_write, fp8[0], got),
            (reference, fp8[1], want),
        ):
            function(x, x, loc, keys, v, None, v_scales, **scales)
        assert_bitwise_equal("keys in FP8", *fp8)


@pytest.mark.tier("interpret")
def test_random_bits_interpreted() -> None:
    _random_bits(torch.device("cpu"), 13)


@pytest.mark.tier("device")
def test_random_bits(gpu: torch.device) -> None:
    _random_bits(gpu, 20000)


def _blocks_to_search(device: torch.device, count: int) -> torch.Tensor:
    """bf16 [n, 1, 64]: blocks of few magnitudes, whose scales tie; flat, heavy-tailed, tiny and saturated ones; such that want far scales."""
    generator = torch.Generator(device).manual_seed(5)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    normal = torch.randn(count, 16, generator=generator, device=device)
    three = (0.2 + 0.8 * uniform(count, 3)).to(torch.bfloat16).float()
    which = torch.randint(0, 3, (count, 16), generator=generator, device=device)
    few = three.gather(1, which) * torch.where(uniform(count, 16) < 0.2, 2.0**-30, 1.0)
    whole = torch.randint(0, 13, (count, 16), generator=generator, device=device) / 2
    tiny = uniform(count, 16) * 2.0 ** -torch.randint(
        3, 13, (count, 1), generator=generator, device=device
    )
    large = torch.where(
        uniform(count, 16) < 0.2, 2600 + 3e4 * uniform(count, 1) ** 3, 2500 * uniform(count, 16)
    )
    low = torch.tensor(
        [5.84375, *[0.375] * 5, *[0.40625] * 3, 3.125, 4.375, 4.8125, 4.8125, 4.875, 5, 5]
    )
    last = torch.tensor([2608.0, *[1920.0] * 7, 2080, *[2112.0] * 3, *[2240.0] * 4])
    far = torch.stack([low, last]).to(device).repeat(2, 1)
    x = torch.cat([normal, normal.abs() ** 3 * normal.sign(), few, whole, tiny, large, far])
    return x.to(torch.bfloat16).view(-1, 1, 64)


def _searches_as_numerics(device: torch.device, count: int, tile: Tile = TILE) -> None:
    x = _blocks_to_search(device, count)
    loc = torch.arange(1, len(x) + 1, device=device)
    got = _buffers(len(x) + 1, device=device)
    nvfp4_write(x, x * 2.0**9, loc, *got, v_global_scale=2.0**9, scale_choice="mse", tile=tile)
    packed, codes = quantize_nvfp4(x, scale_choice="mse")
    for index, want in enumerate((packed, packed, codes, codes)):
        assert_bitwise_equal(f"buffer {index}", got[index][1:], want)
    moved = codes.int() - quantize_nvfp4(x)[1].int()
    assert set(range(-3, 7)) <= set(moved.flatten().tolist())


@pytest.mark.tier("interpret")
def test_search_interpreted() -> None:
    # The interpreter takes as long for a program of 4096 blocks as for one of 128.
    _searches_as_numerics(torch.device("cpu"), 4000, Tile(4096, 4))


@pytest.mark.tier("device")
def test_search(gpu: torch.device) -> None:
    _searches_as_numerics(gpu, 100_000)


@pytest.mark.tier("interpret")
def test_a_scale_on_the_device_out_of_range_makes_nan() -> None:
    for scale in (0.0, -1.0, float("nan"), float("inf"), 2.0**-65):
        buffers = _buffers(4)
        nvfp4_write(
            _tokens(1), _tokens(1), torch.tensor([2]), *buffers, v_global_scale=torch.tensor(scale)
        )
        assert buffers[3][2].unique().tolist() == [0x7F], scale
        assert buffers[1][2].unique().tolist() == [0x77], scale
        assert 0x7F not in buffers[2][2].tolist()


# --- Addresses ------------------------------------------------------------------------------------------------------


def _beyond_2_31(device: torch.device) -> None:
    pool = big_pool((1, 32), torch.uint8, device)
    last = len(pool) - 1
    assert last * 32 > 2**31
    scales = pool.new_zeros(1, 1, 4)
    scales, one = scales.as_strided((len(pool), 1, 4), (0, 4, 1)), _tokens(1, device=device)
    with pytest.raises(ValueError, match="k_scale_buffer: the bytes of a head must lie side by"):
        nvfp4_write(one, one, torch.tensor([1], device=device), pool, pool, scales, scales)
    wide = big_pool((1, 4), torch.uint8, device)[: len(pool)]
    x, loc = _tokens(3, device=device), torch.tensor([last, last + 1, 2**32 + 5], device=device)
    nvfp4_write(x, x, loc, pool, pool, wide, wide)
    packed, codes = encode(x)
    assert_bitwise_equal("last row", pool[last], packed[0])
    assert_bitwise_equal("last scales", wide[last], codes[0])


@pytest.mark.tier("interpret")
def test_pool_beyond_2_31_interpreted() -> None:
    _beyond_2_31(torch.device("cpu"))


@pytest.mark.tier("device")
def test_pool_beyond_2_31(gpu: torch.device) -> None:
    _beyond_2_31(gpu)


def _stays_inside(device: torch.device) -> None:
    x = _tokens(8, 2, device)
    loc = torch.tensor([-1, 0, 4, 5, -4, 1, 2**31 - 1, -(2**31)], device=device, dtype=torch.int32)
    first = _buffers(5, 2, device)
    with (
        guarded_pool(first[0]) as k,
        guarded_pool(first[1]) as v,
        guarded_pool(first[2]) as k_scales,
        guarded_pool(first[3]) as v_scales,
    ):
        nvfp4_write(x, x, loc, k, v, k_scales, v_scales)
        packed, codes = encode(x)
        for got, made in ((k, packed), (v, packed), (k_scales, codes), (v_scales, codes)):
            want = torch.full_like(got, 0x33)
            want[4], want[1] = made[2], made[5]
            assert_bitwise_equal("buffer", got, want)


@pytest.mark.tier("interpret")
def test_nothing_outside_the_pool_interpreted() -> None:
    _stays_inside(torch.device("cpu"))


@pytest.mark.tier("device")
def test_nothing_outside_the_pool(gpu: torch.device) -> None:
    _stays_inside(gpu)


# --- Refusals -------------------------------------------------------------------------------------------------------

K, LOC = _tokens(2, 2), torch.tensor([1, 2])
BYTES, SCALES = _buffers(4, 2)[0], _buffers(4, 2)[2]


@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (TypeError, "loc: expected int32 or int64, got torch.int16", {"loc": LOC.short()}),
        (ValueError, "loc: expected .T. on cpu, got .1, 2.", {"loc": LOC[None]}),
        (TypeError, "k: expected bfloat16, got torch.float16", {"k": K.half()}),
        (ValueError, "v: expected .2, heads, D. on cpu, got .3, 2, 64.", {"v": _tokens(3, 2)}),
        (ValueError, "k: D is a multiple of 16 up to 512, got 40", {"k": K[..., :40]}),
        (ValueError, "k: D is a multiple of 16 up to 512, got 528", {"k": K.new_zeros(2, 2, 528)}),
        (TypeError, "k_buffer: expected uint8, got torch.int8", {"k_buffer": BYTES.view(torch.int8)}),
        (ValueError, "k_buffer: expected .4, 2, 32. on cpu, got .4, 2, 16.", {"k_buffer": BYTES[..., :16]}),
        (ValueError, "v_buffer: the bytes of a head must lie side by side", {"v_buffer": BYTES.new_zeros(4, 2, 64)[..., ::2]}),
        (ValueError, "v_buffer: .*heads may not overlap", {"v_buffer": BYTES[:, :1].expand(4, 2, 32)}),
        (ValueError, "v_scale_buffer: expected .4, 2, 4.", {"v_scale_buffer": SCALES[:3]}),
        (ValueError, "v_buffer: expected .4, 2, D / 2.", {"v_buffer": BYTES[:3], "v_scale_buffer": SCALES[:3]}),
        (ValueError, "k_global_scale is a number in 2.-64 … 2.64, got 0.0", {"k_global_scale": 0.0}),
        (ValueError, "v_global_scale is a number in 2.-64 … 2.64, got nan", {"v_global_scale": float("nan")}),
        (TypeError, "v_global_scale: expected float32", {"v_global_scale": torch.ones(1).double()}),
        (ValueError, "scale_choice is 'amax' or 'mse', got 'max'", {"scale_choice": "max"}),
        (ValueError, "global_scale is a power of two in .*, got 1.5", {"scale_choice": "mse", "v_global_scale": 1.5}),
        (ValueError, "k_global_scale: scale_choice 'mse' takes a number", {"scale_choice": "mse", "k_global_scale": torch.ones(1)}),
        (ValueError, "k_buffer: expected .4, 2, 64. on cpu, got .4, 2, 32.", {"k_scale_buffer": None}),
        (ValueError, "k_buffer: heads must start at multiples of 2", {"k_scale_buffer": None, "k_buffer": BYTES.new_zeros(4, 2, 65)[..., 1:]}),
        (ValueError, "k_global_scale: expected one element on cpu", {"k_global_scale": torch.ones(2)}),
    ],
)  # fmt: skip
def test_refusals(error: type[Exception], text: str, changes: dict[str, Any]) -> None:
    call: dict[str, Any] = {
        "k": K, "v": K, "loc": LOC, "k_buffer": BYTES, "v_buffer": BYTES,
        "k_scale_buffer": SCALES, "v_scale_buffer": SCALES, **changes,
    }  # fmt: skip
    with pytest.raises(error, match=text):
        nvfp4_write(**call)
