# SPDX-License-Identifier: Apache-2.0
"""Quantised write of 4-bit rows: all tiers of the op, then what is particular to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from numinous_kv_cache_4bit.kernels.codec import ScaleChoice
from numinous_kv_cache_4bit.kernels.kv4_write import kv4_write, reference
from numinous_kv_cache_4bit.workbench.kv4_write import OP
from numinous_tooling.formats import KV4, KV4_NO_ROPE, steps_of
from numinous_tooling.testing.kernels import KernelTests
from numinous_tooling.testing.tensors import assert_bitwise_equal, big_pool, guarded_pool


class TestKv4Write(KernelTests):
    op = OP


def _tokens(count: int, device: Any = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(7)
    both = torch.randn(count, 576, generator=generator, device=device).to(torch.bfloat16)
    return both[:, :512], both[:, 512:]


# --- Addresses ------------------------------------------------------------------------------------------------------


def _beyond_2_31(device: torch.device) -> None:
    pool = big_pool((KV4.width,), torch.uint8, device)
    last = len(pool) - 1
    assert last * KV4.width > 2**31
    loc = torch.tensor([last, last + 1, 2**32 + 5, 3], device=device)
    latent, rope = _tokens(4, device)
    pool[3].fill_(0x55)
    kv4_write(pool, loc, latent, rope)
    want = KV4.pack(latent, rope)
    assert_bitwise_equal("last row", pool[last], want[0])
    assert_bitwise_equal("row 3", pool[3], want[3])


@pytest.mark.tier("interpret")
def test_pool_beyond_2_31_interpreted() -> None:
    _beyond_2_31(torch.device("cpu"))


@pytest.mark.tier("device")
def test_pool_beyond_2_31(gpu: torch.device) -> None:
    _beyond_2_31(gpu)


def _stays_inside(device: torch.device) -> None:
    latent, rope = _tokens(8, device)
    loc = torch.tensor([-1, 0, 4, 5, -4, 1, 2**31 - 1, -(2**31)], device=device, dtype=torch.int32)
    with guarded_pool(torch.full((5, KV4.width), 0x33, dtype=torch.uint8, device=device)) as pool:
        kv4_write(pool, loc, latent, rope)
        want = torch.full_like(pool, 0x33)
        want[4], want[1] = KV4.pack(latent, rope)[[2, 5]]
        assert_bitwise_equal("pool", pool, want)


@pytest.mark.tier("interpret")
def test_nothing_outside_the_pool_interpreted() -> None:
    _stays_inside(torch.device("cpu"))


@pytest.mark.tier("device")
def test_nothing_outside_the_pool(gpu: torch.device) -> None:
    _stays_inside(gpu)


# --- Every middle between two codes ----------------------------------------------------------------------------------


TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _neighbours(values: torch.Tensor) -> torch.Tensor:
    """bf16 [..., 3]: the number below, the number, the number above."""
    bits = values.to(torch.bfloat16).view(torch.int16).unsqueeze(-1)
    return torch.cat([bits - 1, bits, bits + 1], dim=-1).view(torch.bfloat16)


def _every_middle(device: torch.device) -> torch.Tensor:
    """bf16 [T, 512]: around each middle between two E2M1 codes under each scale, and around each between two scales."""
    scales = (
        torch.arange(1, 127, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
    )
    elements = _neighbours(scales[:, None] * torch.tensor(TIES, device=device)).flatten(1)  # 21
    elements = torch.nn.functional.pad(elements, (0, 9)).view(-1, 2, 15)
    largest = (6 * scales).to(torch.bfloat16)[:, None, None].expand(-1, 2, 1)
    blocks = torch.cat([largest, elements], dim=-1).view(-1, 16)
    between = _neighbours(3 * (scales[1:] + scales[:-1])).flatten()
    blocks = torch.cat([blocks, between[:, None].expand(-1, 16)])
    blocks[:, 1::2] *= -1
    return torch.nn.functional.pad(blocks, (0, 0, 0, -len(blocks) % 32)).view(-1, 512)


def _rounds_as_the_reference(latent: torch.Tensor, choice: ScaleChoice = "amax") -> None:
    tokens = len(latent)
    loc = torch.arange(1, tokens + 1, device=latent.device)
    pool, want = torch.zeros(2, tokens + 1, 288, dtype=torch.uint8, device=latent.device)
    kv4_write(pool, loc, latent, scale_choice=choice)
    reference(want, loc, latent, scale_choice=choice)
    assert_bitwise_equal("pool", pool, want)


@pytest.mark.tier("interpret")
def test_every_middle_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    # One program: the arithmetic is what is tested.
    monkeypatch.setattr("numinous_kv_cache_4bit.kernels.kv4_write.FEW_TOKENS", 0)
    monkeypatch.setattr("numinous_kv_cache_4bit.kernels.kv4_write.MANY_ROWS", 32)
    _rounds_as_the_reference(_every_middle(torch.device("cpu")))


@pytest.mark.tier("device")
def test_every_middle(gpu: torch.device) -> None:
    _rounds_as_the_reference(_every_middle(gpu))


def _few_values(device: torch.device) -> torch.Tensor:
    """bf16 [8, 512]: blocks of three magnitudes each, for which scales far from that of amax are the best."""
    generator = torch.Generator(device).manual_seed(1)
    three = 0.2 + 0.8 * torch.rand(256, 3, generator=generator, device=device)
    which = torch.randint(0, 3, (256, 16), generator=generator, device=device)
    return three.gather(1, which).to(torch.bfloat16).view(8, 512)


def test_the_search_goes_all_the_way() -> None:
    latent = _few_values(torch.device("cpu"))
    plain, best = (
        KV4_NO_ROPE.split(KV4_NO_ROPE.pack(latent, scale_choice=choice))["scales"].int()
        for choice in ("amax", "mse")
    )
    assert {-1, 0, 5, 6} <= set((best - plain).flatten().tolist())


@pytest.mark.tier("interpret")
def test_search_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numinous_kv_cache_4bit.kernels.kv4_write.FEW_TOKENS", 0)
    _rounds_as_the_reference(_few_values(torch.device("cpu")), "mse")


@pytest.mark.tier("device")
def test_search(gpu: torch.device) -> None:
    _rounds_as_the_reference(_few_values(gpu), "mse")


@pytest.mark.tier("device")
def test_random_bits(gpu: torch.device) -> None:
    """Every bf16 bit pattern is equally likely: NaN, inf and subnormals among them."""
    bits = torch.randint(-(2**15), 2**15, (20000, 512), dtype=torch.int16, device=gpu)
    _rounds_as_the_reference(bits.view(torch.bfloat16))
    # Blocks without NaN and inf, with amax in and around the range of the block scales.
    exponents = torch.randint(-14, 13, (20000, 32, 1), device=gpu) - torch.randint(
        0, 6, (20000, 32, 16), device=gpu
    )
    values = (2 * torch.rand(20000, 32, 16, device=gpu) - 1) * torch.exp2(exponents.float())
    _rounds_as_the_reference(values.to(torch.bfloat16).view(-1, 512))


# --- Rope -----------------------------------------------------------------------------------------------------------


def _every_step(device: torch.device) -> torch.Tensor:
    """bf16 [T, 64]: groups whose largest number is around each end of each step, others around ties of that step; NaN and inf."""
    exponents = torch.arange(-133, 15, device=device)
    largest = torch.tensor([63.5, 64.0, 126.0, 127.0, 127.5, 128.0], device=device)
    counts = torch.tensor([0.0, 0.5, 1.5, 2.5, 62.5, 63.5, 1.0, 0.25, 0.75, 31.5, 15.75, 7.25, 40.0, 55.5, 3.0], device=device)  # fmt: skip
    counts = counts.expand(len(largest), -1).clone()
    counts[:, 1::2] *= -1
    groups = torch.cat([largest[:, None], counts], dim=1)
    groups = torch.ldexp(groups.double(), exponents[:, None, None].double()).float().flatten(0, 1)
    groups = _neighbours(groups.to(torch.bfloat16)).transpose(1, 2).flatten(0, 1)
    special = groups[:4].clone()
    special[0], special[1, 3], special[2, 5], special[3, :2] = -0.0, float("nan"), float("-inf"), float("inf")  # fmt: skip
    special[3, 2] = float("nan")
    groups = torch.cat([special, groups])
    return torch.nn.functional.pad(groups, (0, 0, 0, -len(groups) % 4)).view(-1, 64)


def _rope_rounds_as_the_reference(rope: torch.Tensor) -> None:
    tokens, device = len(rope), rope.device
    latent = _tokens(tokens, device)[0]
    loc = torch.arange(1, tokens + 1, device=device)
    pool, want = torch.zeros(2, tokens + 1, KV4.width, dtype=torch.uint8, device=device)
    kv4_write(pool, loc, latent, rope)
    reference(want, loc, latent, rope)
    assert_bitwise_equal("pool", pool, want)


@pytest.mark.tier("interpret")
def test_every_step_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numinous_kv_cache_4bit.kernels.kv4_write.FEW_TOKENS", 0)
    monkeypatch.setattr("numinous_kv_cache_4bit.kernels.kv4_write.MANY_ROWS", 1024)
    rope = _every_step(torch.device("cpu"))
    steps = steps_of(KV4.split(KV4.pack(_tokens(len(rope))[0], rope))["scales"])
    assert set(steps.flatten().tolist()) == set(range(128))
    _rope_rounds_as_the_reference(rope)


@pytest.mark.tier("device")
def test_every_step(gpu: torch.device) -> None:
    _rope_rounds_as_the_reference(_every_step(gpu))
    _rope_rounds_as_the_reference(_every_step(gpu)[:100])  # a row a program
    bits = torch.randint(-(2**15), 2**15, (20000, 64), dtype=torch.int16, device=gpu)
    _rope_rounds_as_the_reference(bits.view(torch.bfloat16))


# --- Refusals -------------------------------------------------------------------------------------------------------

POOL = torch.zeros(4, 352, dtype=torch.uint8)
LOC = torch.tensor([1, 2])
LATENT, ROPE = _tokens(2)


@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (TypeError, "pool: expected uint8, got torch.int8", {"pool": POOL.view(torch.int8)}),
        (ValueError, "rows of 656 bytes are not 4-bit; known: 352", {"pool": POOL.new_zeros(4, 656)}),
        (ValueError, "pool: expected .slots, width.", {"pool": POOL[None, None]}),
        (ValueError, "pool: rows must be contiguous and start", {"pool": POOL.new_zeros(4, 360)[:, :352]}),
        (ValueError, "pool: rows must be contiguous and start", {"pool": POOL.new_zeros(4, 353)[:, 1:]}),
        (ValueError, "pool: rows must be contiguous and start", {"pool": POOL.new_zeros(352, 4).T}),
        (ValueError, "pool: rows may not overlap", {"pool": POOL[0].expand(4, 352)}),
        (TypeError, "loc: expected int32 or int64, got torch.int16", {"loc": LOC.short()}),
        (ValueError, "loc: expected .T. on cpu, got .1, 2.", {"loc": LOC[None]}),
        (TypeError, "latent: expected bfloat16, got torch.float16", {"latent": LATENT.half()}),
        (ValueError, "latent: expected .2, 512. on cpu, got .3, 512.", {"latent": _tokens(3)[0]}),
        (TypeError, "rope: expected bfloat16", {"rope": ROPE.float()}),
        (ValueError, "rope: expected .2, 64. on cpu, got .2, 32.", {"rope": ROPE[:, :32]}),
        (ValueError, "rope: expected .2, 64. for rows of 352 bytes, got None", {"rope": None}),
        (ValueError, "rope: rows of 288 bytes have none", {"pool": POOL.new_zeros(4, 288)}),
        (ValueError, "global_scale is a power of two in .*, got 0.3", {"global_scale": 0.3}),
        (ValueError, "scale_choice is 'amax' or 'mse', got 'max'", {"scale_choice": "max"}),
        (ValueError, "global_scale is a power of two in .*, got -1.0", {"global_scale": -1.0}),
        (ValueError, "global_scale is a power of two in .*, got nan", {"global_scale": float("nan")}),
    ],
)  # fmt: skip
def test_refusals(error: type[Exception], text: str, changes: dict[str, Any]) -> None:
    call: dict[str, Any] = {"pool": POOL, "loc": LOC, "latent": LATENT, "rope": ROPE, **changes}
    with pytest.raises(error, match=text):
        kv4_write(**call)


def test_every_middle_is_there() -> None:
    """`_every_middle` holds each E2M1 tie under each scale code, and gives each scale code."""
    latent = _every_middle(torch.device("cpu")).view(-1, 16)
    codes = KV4_NO_ROPE.split(KV4_NO_ROPE.pack(latent.view(-1, 512)))["scales"].flatten()
    quotients = latent.abs().double() / codes.view(torch.float8_e4m3fn).double()[:, None]
    assert set(codes.tolist()) >= set(range(1, 127))
    for tie in TIES:
        assert set(codes[(quotients == tie).any(-1)].tolist()) >= set(range(1, 127)), tie
