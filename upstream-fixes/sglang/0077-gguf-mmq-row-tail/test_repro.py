# SPDX-License-Identifier: Apache-2.0
"""Packed GGUF matrices whose rows are no whole steps of the MMQ kernels, with NaN patterns in the memory behind them.

On a CPU the kernel's place is taken by a model of what it multiplies; on a GPU the same test runs the kernel.
"""

import contextlib

import gguf
import numpy as np
import pytest
import repro
import torch

TYPES = gguf.GGMLQuantizationType
KINDS = [TYPES.Q4_0, TYPES.Q4_1, TYPES.Q5_0, TYPES.Q5_1, TYPES.Q8_0]
"""Those whose blocks are smaller than a step."""
ROWS, TOKENS, STEP = 64, 32, 128


def mul_mat(qweight, x, kind, rows):
    """What the kernel computes: rows in steps of 128 values, whatever lies there, times x continued by zeros."""
    kind = TYPES(kind)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    row = qweight.shape[1]
    past = -(row // size * values) % STEP
    there = torch.as_strided(
        qweight, (rows, row + past // values * size), (row, 1), qweight.storage_offset()
    )
    weight = torch.from_numpy(gguf.dequantize(there.numpy(), kind))
    return (torch.nn.functional.pad(x.float(), (0, past)) @ weight.T).to(x.dtype)


def dequantize(qweight, kind, rows, columns, dtype):
    return torch.from_numpy(gguf.dequantize(qweight.numpy(), TYPES(kind))).to(dtype)


@pytest.fixture
def taken():
    """Columns of the products that the MMQ kernel was asked for."""
    return []


@pytest.fixture
def fused_mul_mat(taken):
    if repro.DEVICE == "cpu":
        kernels = mul_mat, dequantize
    else:
        from sgl_kernel.quantization import ggml_dequantize, ggml_mul_mat_a8

        kernels = ggml_mul_mat_a8, ggml_dequantize

    def counted(qweight, x, *rest):
        taken.append(x.shape[1])
        return kernels[0](qweight, x, *rest)

    file = "srt/layers/quantization/gguf.py"
    space = {"torch": torch, "gguf": gguf, "WeightType": TYPES}
    space |= {"ggml_mul_mat_a8": counted, "ggml_dequantize": kernels[1]}
    names = ("UNQUANTIZED_TYPES", "STANDARD_QUANT_TYPES", "KQUANT_TYPES", "IMATRIX_QUANT_TYPES")
    names += ("DEQUANT_TYPES", "MMVQ_QUANT_TYPES", "MMQ_QUANT_TYPES")
    repro.load_constants(file, names, space)
    with contextlib.suppress(LookupError):  # the patch adds it
        repro.load_function(file, "mmq_rows_are_whole", space)
    repro.load_function(file, "dequantize_gguf_weight", space)
    return repro.load_function(file, "fused_mul_mat_gguf", space)


@pytest.mark.parametrize("columns", [512, 576, 640])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_product_does_not_depend_on_what_lies_behind_the_matrix(
    fused_mul_mat, taken, kind, columns
):
    rng = np.random.default_rng(0)
    packed = gguf.quantize(rng.standard_normal((ROWS, columns), dtype=np.float32), kind)
    memory = torch.full((packed.size + 4096,), 0xFF, dtype=torch.uint8)
    memory[: packed.size] = torch.from_numpy(packed.reshape(-1))
    weight = memory.to(repro.DEVICE)[: packed.size].view(ROWS, -1)
    x = torch.randn(TOKENS, columns, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    want = x.float() @ torch.from_numpy(gguf.dequantize(packed, kind)).T
    got = fused_mul_mat(x.to(repro.DEVICE), weight, int(kind)).float().cpu()
    lost = (~torch.isfinite(got)).any(0).nonzero().flatten().tolist()
    assert not lost, f"NaN in output columns {lost}"
    assert (got - want).abs().max() < 0.03 * want.abs().max()
    if columns % STEP == 0:
        assert taken == [columns], "whole rows stay with the MMQ kernel"
