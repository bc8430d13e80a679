# SPDX-License-Identifier: Apache-2.0
"""Gather of 4-bit rows to the engine's rows: all tiers of the op, then what is particular to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from numinous_kv_cache_4bit.kernels import kv4_gather as kernels
from numinous_kv_cache_4bit.kernels.codec import e4m3_value
from numinous_kv_cache_4bit.kernels.kv4_gather import kv4_gather, reference
from numinous_kv_cache_4bit.kernels.kv4_write import kv4_write
from numinous_kv_cache_4bit.workbench import kv4_gather as workbench
from numinous_kv_cache_4bit.workbench.kv4_gather import OP, Case
from numinous_tooling.formats import KV4, KV4_NO_ROPE, join_steps
from numinous_tooling.testing.kernels import KernelTests
from numinous_tooling.testing.tensors import assert_bitwise_equal, big_pool


class TestKv4Gather(KernelTests):
    op = OP


# --- Addresses ------------------------------------------------------------------------------------------------------


def _beyond_2_31(device: torch.device) -> None:
    """What `kv4_write` put into the last row of a large pool comes back."""
    pool = big_pool((KV4.width,), torch.uint8, device)
    last = len(pool) - 1
    generator = torch.Generator(device).manual_seed(3)
    both = torch.randn(1, 576, generator=generator, device=device).to(torch.bfloat16)
    kv4_write(pool, torch.tensor([last], device=device), both[:, :512], both[:, 512:])
    index = torch.tensor([[last, last + 1], [-(2**40), 2**32 + last]], device=device)
    out = kv4_gather(pool, index, to="bf16")
    want = torch.cat(KV4.unpack(KV4.pack(both[:, :512], both[:, 512:])), dim=-1)
    assert_bitwise_equal("last row", out[0], want[0])
    assert not out[1:].view(torch.int16).any()


@pytest.mark.tier("interpret")
def test_pool_beyond_2_31_interpreted() -> None:
    _beyond_2_31(torch.device("cpu"))


@pytest.mark.tier("device")
def test_pool_beyond_2_31(gpu: torch.device) -> None:
    _beyond_2_31(gpu)


# --- Every code under every scale -----------------------------------------------------------------------------------


def _every_product(device: torch.device, to: Any) -> None:
    """Each block scale, NaN and negative ones too, beside each of eight others that may be the largest of its group."""
    codes = torch.arange(256, device=device, dtype=torch.uint8)
    others = torch.tensor([0x00, 0x07, 0x0F, 0x38, 0x3A, 0x79, 0x7E, 0x7F], device=device)
    rows = torch.zeros(256, KV4_NO_ROPE.width, dtype=torch.uint8, device=device)
    fields = KV4_NO_ROPE.split(rows)
    fields["scales"].copy_(torch.stack([codes[:, None].expand(256, 8), others.expand(256, 8)], -1).view(256, 16).repeat(1, 2))  # fmt: skip
    elements = torch.arange(0x10, 0x100, 0x22, dtype=torch.uint8, device=device)
    fields["latent"].copy_(elements.repeat(32)[None, :].expand(256, 256))
    index = torch.arange(256, device=device, dtype=torch.int32)
    case = Case(1, 256, 288, to)
    got = workbench.fields_of(case, kv4_gather(rows, index, to=to).view(torch.uint8), index)
    want = workbench.fields_of(case, reference(rows, index, to=to)["out"], index)
    workbench.compare(case, got, want)


@pytest.mark.tier("interpret")
@pytest.mark.parametrize("to", ["fp8", "bf16"])
def test_every_product_interpreted(to: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # One program: the arithmetic is what is tested.
    monkeypatch.setitem(kernels.TILES, to, kernels.Tile(256, 1, 4))
    _every_product(torch.device("cpu"), to)


@pytest.mark.tier("device")
@pytest.mark.parametrize("to", ["fp8", "bf16"])
def test_every_product(to: Any, gpu: torch.device) -> None:
    _every_product(gpu, to)


def _every_rope_code(device: torch.device, to: Any) -> None:
    """Each INT8 code under each step, the free signs set in every other row; NaN and inf too."""
    rows = torch.zeros(512, KV4.width, dtype=torch.uint8, device=device)
    fields = KV4.split(rows)
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(4, 64)
    fields["rope"].copy_(codes.repeat(128, 1))
    steps = torch.arange(128, dtype=torch.uint8, device=device).repeat_interleave(4)
    # A group's own step, and others beside it.
    mixed = torch.stack([steps, steps ^ 0x55, steps, steps ^ 0x2A], dim=-1)
    scales = torch.arange(512 * 32, device=device).remainder(127).to(torch.uint8).view(512, 32)
    fields["scales"].copy_(join_steps(scales, mixed))
    fields["scales"][::2, 7::8] |= 0x80
    index = torch.arange(512, device=device, dtype=torch.int32)
    case = Case(1, 512, 352, to)
    got = workbench.fields_of(case, kv4_gather(rows, index, to=to).view(torch.uint8), index)
    want = workbench.fields_of(case, reference(rows, index, to=to)["out"], index)
    workbench.compare(case, got, want)


@pytest.mark.tier("interpret")
@pytest.mark.parametrize("to", ["fp8", "bf16"])
def test_every_rope_code_interpreted(to: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.TILES, to, kernels.Tile(512, 1, 4))
    _every_rope_code(torch.device("cpu"), to)


@pytest.mark.tier("interpret")
@pytest.mark.parametrize("to", ["fp8", "bf16"])
def test_signs_of_scales_that_leak_are_seen(to: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that takes the signs for the scales' fails where rows have such, and not where none has."""
    case = Case(1, 9, 352, to)
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    monkeypatch.setattr("numinous_kv_cache_4bit.kernels.kv4_gather.scale_value", e4m3_value)
    with pytest.raises(AssertionError, match="latent" if to == "fp8" else "out"):
        workbench.compare(case, workbench._run(case, inputs), OP.reference(case, inputs))
    case = Case(1, 9, 288, to)
    inputs = OP.make_inputs(case, 0, torch.device("cpu"))
    workbench.compare(case, workbench._run(case, inputs), OP.reference(case, inputs))


@pytest.mark.tier("device")
@pytest.mark.parametrize("to", ["fp8", "bf16"])
def test_every_rope_code(to: Any, gpu: torch.device) -> None:
    _every_rope_code(gpu, to)


@pytest.mark.tier("device")
@pytest.mark.parametrize("width", [352, 288, 416])
@pytest.mark.parametrize("to", ["fp8", "bf16"])
def test_random_bytes(width: int, to: Any, gpu: torch.device) -> None:
    case = Case(33, 301, width, to, pattern="edges", rows="bytes", sliced=True)
    got = workbench._run(case, OP.make_inputs(case, 11, gpu))
    workbench.compare(case, got, workbench._reference(case, OP.make_inputs(case, 11, gpu)))


def test_rows_are_those_of_flash_mla() -> None:
    """656 and 528 bytes: 512 E4M3, four fp32 scales of 128 each, then rope in bf16; bf16 rows are latent, then rope."""
    latent = torch.arange(512).remainder(7).sub(3).to(torch.bfloat16)[None]
    rope = torch.arange(64).remainder(9).to(torch.bfloat16)[None]
    index = torch.zeros(1, dtype=torch.int64)
    out = reference(KV4.pack(latent, rope), index, to="fp8")["out"]
    assert out.shape == (1, 656)
    scales = out[:, 512:528].view(torch.float32)
    values = out[:, :512].view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, -1)
    assert torch.equal(values, latent.float())
    assert torch.equal(out[:, 528:].view(torch.bfloat16), rope)
    assert reference(KV4_NO_ROPE.pack(latent), index, to="fp8")["out"].shape == (1, 528)
    out = reference(KV4.pack(latent, rope), index, to="bf16")["out"].view(torch.bfloat16)
    assert torch.equal(out, torch.cat([latent, rope], dim=-1))


# --- Refusals -------------------------------------------------------------------------------------------------------

POOL = torch.zeros(4, 352, dtype=torch.uint8)
INDEX = torch.tensor([[1, 2], [3, -1]], dtype=torch.int32)
OUT = torch.zeros(4, 656, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (TypeError, "pool: expected uint8", {"pool": POOL.view(torch.int8)}),
        (ValueError, "rows of 528 bytes are not 4-bit", {"pool": POOL.new_zeros(4, 528)}),
        (ValueError, "to is 'fp8' or 'bf16', got 'fp16'", {"to": "fp16"}),
        (TypeError, "index: expected int32 or int64, got torch.float32", {"index": INDEX.float()}),
        (ValueError, "index: expected on cpu, got meta", {"index": INDEX.to("meta")}),
        (TypeError, "out: expected torch.uint8, got torch.int8", {"out": OUT.view(torch.int8)}),
        (TypeError, "out: expected torch.bfloat16, got torch.uint8", {"out": OUT, "to": "bf16"}),
        (ValueError, r"out: expected \[4, 656\] on cpu, got \[3, 656\]", {"out": OUT[:3]}),
        (ValueError, "out: expected contiguous memory", {"out": OUT.new_zeros(4, 672)[:, :656]}),
        (ValueError, "out: expected contiguous memory at a multiple of 16", {"out": OUT.new_zeros(4 * 656 + 4)[4:].view(4, 656)}),
        (TypeError, "positions: expected torch.int32", {"positions": INDEX.long()}),
        (ValueError, r"positions: expected \[2, 2\] on cpu, got \[4\]", {"positions": INDEX.view(4)}),
        (TypeError, "count: expected torch.int32", {"count": torch.tensor([1])}),
        (ValueError, r"count: expected \[1\] on cpu, got \[\]", {"count": torch.tensor(1, dtype=torch.int32)}),
    ],
)  # fmt: skip
def test_refusals(error: type[Exception], text: str, changes: dict[str, Any]) -> None:
    call: dict[str, Any] = {"pool": POOL, "index": INDEX, "to": "fp8", **changes}
    with pytest.raises(error, match=text):
        kv4_gather(**call)
