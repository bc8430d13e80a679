# SPDX-License-Identifier: Apache-2.0
"""Decode attention on NVFP4 caches: all tiers of the op, then what is particular to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kv4_ptx_model import Registers, halves, ptx_of, run_ptx

from numinous_kv_cache_4bit.kernels import decode_attention_nvfp4 as kernels
from numinous_kv_cache_4bit.kernels.decode_attention_nvfp4 import (
    MAX_SPLITS,
    choose_splits,
    decode_attention_nvfp4,
    plan,
    reference,
)
from numinous_kv_cache_4bit.kernels.nvfp4_write import encode
from numinous_kv_cache_4bit.workbench.decode_attention_nvfp4 import OP, Case, make_inputs
from numinous_tooling.numerics import decode_e2m1, decode_e4m3fn, dequantize_nvfp4
from numinous_tooling.testing.kernels import KernelTests
from numinous_tooling.testing.tensors import assert_bitwise_equal, big_pool


class TestDecodeAttentionNvfp4(KernelTests):
    op = OP


# --- Decoding ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_all(words_ptr, scales_ptr, out_ptr, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """[512, 64] values, times `HELD`, of [512, 32] bytes and [512, 4] scales."""
    row = tl.arange(0, 512)
    second = kernels._second(scales_ptr, row.shape[0] < 1, 16)
    parts = kernels._tile(
        words_ptr, scales_ptr, row.to(tl.int64), row >= 0, 16, 2, second, 1, 1, 512, 64, 16, NATIVE
    )
    to = out_ptr + row[:, None] * 64 + tl.arange(0, 16)[None, :] * 4
    for i in tl.static_range(4):
        tl.store(to + i, parts[i])


def _decodes_everything(device: torch.device) -> None:
    """Every byte of codes under every scale code, bit for bit."""
    block = torch.arange(256, dtype=torch.uint8).view(32, 8)
    packed = (
        block.repeat(256 // 4, 1).view(-1, 32).to(device)
    )  # [512, 32]: each byte in each column of a block
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(8).view(-1, 4).to(device)
    out = torch.empty(512, 64, dtype=torch.float16, device=device)
    _decode_all[(1,)](
        packed.view(torch.uint16), scales.view(torch.uint16), out, NATIVE=device.type != "cpu", num_warps=4
    )  # fmt: skip
    want = dequantize_nvfp4(packed, scales) * 2.0**-14
    assert_bitwise_equal("values", out.float(), want, any_nan=True)


@triton.jit
def _decode_pairs(words_ptr, out_ptr, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """[512, 256] values of [512, 256] E4M3 codes."""
    row = tl.arange(0, 512)
    even, odd = kernels._tile_of_pairs(
        words_ptr, row.to(tl.int64), row >= 0, 128, 1, 256, 128, NATIVE
    )
    to = out_ptr + row[:, None] * 256 + tl.arange(0, 128)[None, :] * 2
    tl.store(to, even)
    tl.store(to + 1, odd)


def _decodes_every_pair(device: torch.device) -> None:
    """Every code beside every other, bit for bit."""
    code = torch.arange(256, dtype=torch.uint8)
    codes = torch.stack([code.expand(256, 256), code[:, None].expand(256, 256)], dim=-1)
    codes = codes.reshape(512, 256).to(device)
    out = torch.empty(512, 256, dtype=torch.float16, device=device)
    _decode_pairs[(1,)](codes.view(torch.uint16), out, NATIVE=device.type != "cpu", num_warps=4)
    assert_bitwise_equal("values", out.float(), decode_e4m3fn(codes), any_nan=True)


@pytest.mark.tier("interpret")
def test_decodes_everything_interpreted() -> None:
    _decodes_everything(torch.device("cpu"))
    _decodes_every_pair(torch.device("cpu"))


@pytest.mark.tier("device")
def test_decodes_everything(gpu: torch.device) -> None:
    _decodes_everything(gpu)
    _decodes_every_pair(gpu)


@pytest.mark.parametrize("selector", [kernels.FIRST.value, kernels.SECOND.value])
def test_the_ptx_of_the_decoding(selector: int) -> None:
    """The text itself, instruction by instruction: every word beside another word, under several scales."""
    word = torch.arange(2**16)
    scales = torch.randint(0, 256, (4, 2**16), generator=torch.Generator().manual_seed(0))
    words = (word, word * 40503 % 2**16)
    registers: Registers = {
        "$4": words[0] | (words[1] << 16),
        "$5": scales[0] | (scales[1] << 8) | (scales[2] << 16) | (scales[3] << 24),
        "$6": torch.tensor(selector | (selector << 16)),
    }
    run_ptx(ptx_of(kernels._planes), registers)
    for column in range(4):
        made = halves(registers[f"${column}"]).float()
        for half in (0, 1):
            scale = scales[2 * half + (selector == kernels.SECOND.value)].to(torch.uint8)
            code = (words[half] >> (4 * column)).to(torch.uint8)
            want = decode_e2m1(code) * decode_e4m3fn(scale) * kernels.HELD.value
            assert_bitwise_equal(f"column {column}, half {half}", made[:, half], want, any_nan=True)


def test_the_ptx_of_the_decoding_of_fp8() -> None:
    word = torch.arange(2**16)
    words = (word, word * 40503 % 2**16)
    registers: Registers = {"$2": words[0] | (words[1] << 16)}
    run_ptx(ptx_of(kernels._pairs), registers)
    for column in range(2):
        made = halves(registers[f"${column}"]).float()
        for half in (0, 1):
            want = decode_e4m3fn((words[half] >> (8 * column) & 0xFF).to(torch.uint8))
            assert_bitwise_equal(f"column {column}, half {half}", made[:, half], want, any_nan=True)


# --- Splits -----------------------------------------------------------------------------------------------------------


def test_wide_fp8_keys_fit() -> None:
    """Two tiles of 256-wide FP8 keys lie in Hopper's shared memory and one in that of sm120."""
    assert plan(6, 256, 256, fp8_keys=True).stages == plan(6, 256, 256).stages == 3
    assert plan(6, 256, 256, fp8_keys=True, shared=101_376).stages == 2
    assert plan(4, 128, 128, fp8_keys=True, shared=101_376).stages == 3


def test_splits() -> None:
    """As many as fill the GPU's places in whole turns: 3 programs of D 128 a multiprocessor, 13 of D 64."""
    wide, narrow = (132 * plan(4, dim, dim).resident for dim in (128, 64))
    assert (wide, narrow) == (3 * 132, 13 * 132)
    assert (
        choose_splits(64, 8, 64 * 8192, 128, wide) == 3
    )  # 1536 of 4 · 396; 2 would fill 1024 of 3 · 396
    assert choose_splits(1, 8, 131072, 128, wide) == 49  # 392 of 396; 64 would take a second turn
    assert choose_splits(16, 8, 16 * 8192, 128, wide) == 3
    assert choose_splits(16, 8, 16 * 8192, 64, narrow) == 13
    assert choose_splits(1, 8, 300, 128, wide) == 1
    assert choose_splits(1, 8, 0, 128, wide) == 1
    assert choose_splits(4000, 8, 10**7, 128, wide) == 1
    assert choose_splits(1, 1, 10**9, 128, wide) == MAX_SPLITS


@pytest.mark.tier("interpret")
def test_splits_agree() -> None:
    """More splits than tiles leave parts without tokens, which are not written."""
    case = Case(1, 2, 1, 150, 64, 64, sink="float32")
    inputs = make_inputs(case, 3, torch.device("cpu"))
    inputs = {name: value for name, value in inputs.items() if name != "out"}
    one = decode_attention_nvfp4(**inputs, sm_scale=0.125, return_lse=True, splits=1)
    other = decode_attention_nvfp4(**inputs, sm_scale=0.125, return_lse=True, splits=9)
    torch.testing.assert_close(one.out.float(), other.out.float(), rtol=2.0**-7, atol=1e-4)
    torch.testing.assert_close(one.lse, other.lse, rtol=1e-6, atol=1e-6)


# --- Addresses --------------------------------------------------------------------------------------------------------


def _beyond_2_31(device: torch.device) -> None:
    k = big_pool((1, 32), torch.uint8, device)
    scales = big_pool((1, 4), torch.uint8, device)[: len(k)]
    last = len(k) - 1
    assert last * 32 > 2**31
    ids = torch.tensor([last, last - 3, 7], device=device)
    packed, codes = encode(torch.randn(3, 1, 64, device=device).to(torch.bfloat16))
    k[ids], scales[ids] = packed, codes
    q = torch.randn(1, 2, 64, device=device).to(torch.bfloat16)
    ids = torch.cat([ids, ids.new_tensor([last + 1, 2**32 + 7])])
    call = (q, k, k, scales, scales, torch.tensor([0, 5], device=device), ids)
    got = decode_attention_nvfp4(*call, sm_scale=0.125, splits=1).out
    want = reference(*call, sm_scale=0.125)["out"]
    torch.testing.assert_close(got.double(), want, rtol=2.0**-7, atol=2e-3)


@pytest.mark.tier("interpret")
def test_pool_beyond_2_31_interpreted() -> None:
    _beyond_2_31(torch.device("cpu"))


@pytest.mark.tier("device")
def test_pool_beyond_2_31(gpu: torch.device) -> None:
    _beyond_2_31(gpu)


# --- Refusals ---------------------------------------------------------------------------------------------------------

INPUTS = make_inputs(Case(2, 4, 2, 9, 64, 96), 0, torch.device("cpu"))
CALL: dict[str, Any] = {**INPUTS, "sm_scale": 0.125}
Q, K, KS = (INPUTS[name] for name in ("q", "k_buffer", "k_scale_buffer"))


@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (TypeError, "q: expected bfloat16, got torch.float16", {"q": Q.half()}),
        (ValueError, "q: expected .B, Hq, D., D one of .64, 96", {"q": Q[..., :48]}),
        (ValueError, "q: values of a head must lie side by side", {"q": Q.repeat(1, 1, 2)[..., ::2]}),
        (ValueError, "q: the 3 query heads must be a multiple of the 2 KV heads", {"q": Q[:, :3]}),
        (TypeError, "k_buffer: expected uint8, got torch.int8", {"k_buffer": K.view(torch.int8)}),
        (ValueError, "k_buffer: expected .27, 2, 32. on cpu, got .27, 2, 48.", {"k_buffer": K.new_zeros(27, 2, 48)}),
        (ValueError, "k_buffer: heads must start at multiples of 2 bytes", {"k_buffer": K.new_zeros(27, 2, 33)[..., 1:]}),
        (ValueError, "k_buffer: expected .27, 2, 64. on cpu, got .27, 2, 32.", {"k_scale_buffer": None}),
        (ValueError, "v_scale_buffer: expected .27, 2, 6. on cpu", {"v_scale_buffer": KS}),
        (ValueError, "v_buffer: expected .slots, Hkv, bytes of a head., D one of", {"v_buffer": K[..., :4]}),
        (TypeError, "kv_indptr: expected int32 or int64", {"kv_indptr": INPUTS["kv_indptr"].short()}),
        (ValueError, "kv_indptr: expected 3 entries for 2 requests, got 2", {"kv_indptr": INPUTS["kv_indptr"][:2]}),
        (ValueError, "kv_indices: expected one dimension", {"kv_indices": INPUTS["kv_indices"][None]}),
        (ValueError, "sm_scale is positive, got 0.0", {"sm_scale": 0.0}),
        (ValueError, "k_global_scale is a number in 2.-64 … 2.64, got -1.0", {"k_global_scale": -1.0}),
        (TypeError, "v_global_scale: expected float32", {"v_global_scale": torch.ones(1).half()}),
        (ValueError, "window is at least 1 or None, got 0", {"window": 0}),
        (ValueError, "logit_cap is 0 or positive, got -1.0", {"logit_cap": -1.0}),
        (ValueError, "splits is 1 … 64, got 65", {"splits": 65}),
        (TypeError, "sinks: expected float32 or bfloat16, got torch.float16", {"sinks": torch.zeros(4).half()}),
        (ValueError, "sinks: expected .4. on cpu, got .5.", {"sinks": torch.zeros(5)}),
        (TypeError, "out: expected bfloat16", {"out": torch.zeros(2, 4, 96)}),
        (ValueError, "out: expected .2, 4, 96. on cpu", {"out": torch.zeros(2, 4, 64, dtype=torch.bfloat16)}),
    ],
)  # fmt: skip
def test_refusals(error: type[Exception], text: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=text):
        decode_attention_nvfp4(**{**CALL, **changes})
