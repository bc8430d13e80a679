# SPDX-License-Identifier: Apache-2.0
"""Block scales of the fp4_mx_block16 codec: non-finite values, and the same bytes for bf16 and fp32 input."""

import math

import pytest
import repro
import torch

CODEC = "srt/layers/quantization/kvfp4_tensor.py"


@pytest.fixture(scope="module")
def codec():
    """Shipped encoder and decoder without torch.compile: what runs where dynamo is off or past its recompile limit."""
    scope = repro.load_constants(
        CODEC, ["E2M1_MAX", "E2M1_BOUNDS", "E2M1_VALUES"], {"torch": torch}
    )
    return tuple(
        repro.load_function(CODEC, f"FP4MXBlock16KVQuantizeUtil.{name}", scope)
        for name in ("batched_quantize", "batched_dequantize")
    )


def values():
    """[1, 1, 32] bf16, two blocks."""
    made = torch.Generator().manual_seed(0)
    return torch.randn(1, 1, 32, generator=made).bfloat16()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_non_finite_value_does_not_become_zeros(codec, bad):
    quantize, dequantize = codec
    x = values()
    clean = dequantize(*quantize(x))
    x[0, 0, 3] = bad
    found = dequantize(*quantize(x))
    assert not torch.isfinite(found[0, 0, 3])
    assert not (found[0, 0, :16] == 0).any()
    assert torch.equal(found[0, 0, 16:], clean[0, 0, 16:])


def test_every_bf16_maximum_gets_the_smallest_scale_that_holds_it(codec):
    """All positive finite bf16 numbers whose scale is above the floor of 1e-10, as the maximum of a block."""
    quantize, dequantize = codec
    maxima = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    maxima = maxima[maxima.float() / 6 > 1e-9]
    blocks = torch.zeros(len(maxima), 1, 16, dtype=torch.bfloat16)
    blocks[:, 0, 5] = maxima
    packed, scales = quantize(blocks)
    mantissa, exponent = torch.frexp(maxima.double() / 6)
    smallest = exponent - (mantissa == 0.5).int() + 127
    wrong = int((scales[:, 0] != smallest).sum())
    assert wrong == 0, f"{wrong} of {len(maxima)} scales differ"
    kept = dequantize(packed, scales, dtype=torch.float32)[:, 0, 5] / maxima.float()
    # Spacing of E2M1 below its largest number: a maximum between 3 and 6 times the scale moves by at most a fifth.
    # Above 1e38 rounding up to 6 times the scale exceeds fp32.
    assert kept[maxima < 1e38].sub(1).abs().max() <= 0.2 + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bytes_do_not_depend_on_the_input_type(codec, dtype):
    quantize, _ = codec
    made = torch.Generator().manual_seed(1)
    x = (torch.randn(4096, 2, 64, generator=made) * 8).to(dtype)
    for one, two in zip(quantize(x), quantize(x.float()), strict=True):
        assert torch.equal(one, two)
