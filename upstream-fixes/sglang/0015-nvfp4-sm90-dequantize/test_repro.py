# SPDX-License-Identifier: Apache-2.0
"""The SM90 fallback of NVFP4 dequantisation must work on its documented shapes."""

import importlib

import kv_pools
import pytest
import torch

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_known_codes_and_scales(tokens, heads, monkeypatch):
    kv_pools.recipes()
    monkeypatch.setattr(kv_pools.PLATFORM, "is_sm90", True, raising=False)
    module = importlib.import_module("sglang.srt.layers.quantization.kvfp4_tensor")
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (tokens, heads, 64))
    scales = torch.tensor([0.25, 1.0, 4.0])[torch.randint(0, 3, (tokens, heads, 4))]
    packed = (codes[..., 1::2] << 4 | codes[..., 0::2]).to(torch.uint8)
    expected = VALUES[codes] * scales.repeat_interleave(16, -1) * 0.5
    try:
        found = module.NVFP4KVQuantizeUtil.dequantize(packed, scales.to(torch.float8_e4m3fn), 0.5)
    except RuntimeError as error:
        raise AssertionError(f"documented shapes are refused: {error}") from error
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.float(), expected)
