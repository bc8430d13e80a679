# SPDX-License-Identifier: Apache-2.0
"""Scales that DeepGEMM packs to UE8M0 must be packable in padded rows too, whatever the memory held before."""

import types

import pytest
import repro
import torch

EXPERTS, ROWS, WIDTH, GROUP = 2, 8, 256, 64
MASKED = torch.tensor([3, 0], dtype=torch.int32)


class Poisoned:
    """torch, but fresh memory has all bits set, as another tensor may have left it."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *args, **kwargs):
        out = torch.empty(*args, **kwargs)
        out.view(torch.uint8).fill_(0xFF)
        return out


def quantize(gateup, out, scale, group, masked, *args, **kwargs):
    """Writes what the kernel writes: powers of two in the first masked_m rows of each expert."""
    rows_last = scale.dtype == torch.int32
    for expert, rows in enumerate(masked.tolist()):
        target = scale[expert].transpose(0, 1) if rows_last else scale[expert]
        target[:rows] = 0 if rows_last else 0.25


def scales(num_real_tokens):
    repro.stub("sglang.kernels.ops.moe.ep_moe_kernels", silu_and_mul_masked_post_quant_fwd=quantize)
    run = repro.load_function(
        "srt/layers/moe/moe_runner/deep_gemm.py",
        "_varlen_deep_gemm_silu_mul_quant",
        {
            "torch": Poisoned(),
            "deep_gemm_wrapper": types.SimpleNamespace(DEEPGEMM_SCALE_UE8M0=True),
        },
    )
    gateup = torch.zeros(EXPERTS, ROWS, 2 * WIDTH, dtype=torch.bfloat16)
    return run(gateup, MASKED, GROUP, 2, gemm1_alpha=1.7, num_real_tokens=num_real_tokens)[1]


def test_no_scale_of_a_padded_row_traps():
    scale = scales(num_real_tokens=None)
    assert scale.dtype == torch.float32
    assert scale.shape == (EXPERTS, ROWS, WIDTH // GROUP)
    # deep_gemm/include/deep_gemm/impls/smxx_layout.cuh: sign and mantissa must be zero, in every row.
    bits = scale.contiguous().view(torch.int32)
    assert not (bits & -0x7F800001).any(), scale
    assert (scale[0, :3] == 0.25).all()


@pytest.mark.parametrize("tokens", [4])
def test_packed_scales_keep_their_layout(tokens):
    scale = scales(num_real_tokens=tokens)
    assert scale.dtype == torch.int32
    assert scale.shape == (EXPERTS, ROWS, WIDTH // GROUP // 4)
    assert not scale[0, :3].any()
