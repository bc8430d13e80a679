# SPDX-License-Identifier: Apache-2.0
"""How FP8 GEMMs want their activation scales in memory: column-major, with rows padded for TMA.

Scales of M tokens and G groups, in two forms, as DeepGEMM and the engine's `per_token_group_quant` kernels define them:

| form | dtype | logical shape | strides | element (m, c) |
|---|---|---|---|---|
| column-major fp32 | float32 | [M, G] | (1, A) | scale of group c |
| packed UE8M0 | int32 | [M, ceil(G / 4)] | (1, A) | byte b, least significant first, is the code of group 4c + b |

A = M rounded up to a multiple of 4, so that a column starts at a multiple of 16 bytes, as TMA asks. Leading dimensions
(experts) come before the columns: an expert's scales are one piece of A × columns elements.

*Padding.* Rows M … A - 1 of a column belong to no token, and bytes of the last packed column from G on to no group. Here
all of them are 0: 2^-127 as a UE8M0 code, so never NaN. The engine and DeepGEMM write 0 into the bytes beyond G as well. The
rows beyond M the engine leaves as allocated, unless it pads the activations too, and then it writes 0. So a kernel that promises
more than its M rows is compared through `with_padding`, stock by the M rows alone.

Sources: DeepGEMM 0.2 `deep_gemm/utils/layout.py` and `impls/smxx_layout.cuh`; SGLang 0.5.20
`kernels/jit/csrc/gemm/per_token_group_quant.cuh` and `kernels/ops/quantization/fp8_kernel.py`.
"""

from __future__ import annotations

import torch

__all__ = [
    "ROW_ALIGNMENT",
    "UE8M0_PER_INT32",
    "column_major_scales",
    "empty_column_major",
    "pack_ue8m0",
    "padded_rows",
    "unpack_ue8m0",
    "with_padding",
]

ROW_ALIGNMENT = 4
"""Elements of 4 bytes in the 16 bytes to which TMA aligns a column."""
UE8M0_PER_INT32 = 4


def padded_rows(rows: int) -> int:
    """Rows of a column in memory: `rows` rounded up to a multiple of `ROW_ALIGNMENT`."""
    return -(-rows // ROW_ALIGNMENT) * ROW_ALIGNMENT


def empty_column_major(
    *shape: int, dtype: torch.dtype, device: torch.device | str | None = None
) -> torch.Tensor:
    """Uninitialised column-major tensor of logical shape [..., M, C] and strides (…, 1, A), padding rows included in memory.

    Raises TypeError for a dtype that has not 4 bytes, ValueError for fewer than two dimensions.
    """
    if dtype.itemsize != 4:
        raise TypeError(f"scales in columns are float32 or int32, got {dtype}")
    if len(shape) < 2:
        raise ValueError(f"scales in columns have rows and columns, got shape {list(shape)}")
    *lead, rows, columns = shape
    memory = torch.empty((*lead, columns, padded_rows(rows)), dtype=dtype, device=device)
    return memory.transpose(-1, -2)[..., :rows, :]


def with_padding(scales: torch.Tensor) -> torch.Tensor:
    """View [..., A, C] of a column-major tensor [..., M, C] that shows its padding rows too.

    Raises ValueError where the strides are not those of `empty_column_major`.
    """
    *lead, rows, columns = scales.shape
    padded = padded_rows(rows)
    want = empty_column_major(*lead, rows, columns, dtype=scales.dtype, device="meta").stride()
    # A dimension of one element has no stride that matters, but the padding behind it does.
    if scales.numel() and any(
        have != stride and size > 1
        for have, stride, size in zip(scales.stride(), want, scales.shape, strict=True)
    ):
        raise ValueError(f"expected column-major strides {want}, got {scales.stride()}")
    return scales.as_strided((*lead, padded, columns), want)


def column_major_scales(scales: torch.Tensor) -> torch.Tensor:
    """fp32 [..., M, G] of any strides → the same values with strides (1, A); padding rows hold 0.

    The logical shape stays, so `.contiguous()` is the inverse.
    """
    if scales.dtype != torch.float32:
        raise TypeError(f"expected scales in float32, got {scales.dtype}")
    result = empty_column_major(*scales.shape, dtype=torch.float32, device=scales.device)
    with_padding(result).zero_()
    return result.copy_(scales)


def pack_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """UE8M0 codes uint8 [..., M, G] → int32 [..., M, ceil(G / 4)] with strides (1, A); all padding holds 0."""
    if codes.dtype != torch.uint8:
        raise TypeError(f"expected UE8M0 codes in uint8, got {codes.dtype}")
    *lead, rows, groups = codes.shape
    columns = -(-groups // UE8M0_PER_INT32)
    result = empty_column_major(*lead, rows, columns, dtype=torch.int32, device=codes.device)
    with_padding(result).zero_()
    for group in range(groups):
        # An int32 wraps at byte 3, which is what its bits are to hold.
        shifted = codes[..., group].to(torch.int32) << 8 * (group % UE8M0_PER_INT32)
        result[..., group // UE8M0_PER_INT32] |= shifted
    return result


def unpack_ue8m0(packed: torch.Tensor, groups: int) -> torch.Tensor:
    """Inverse of `pack_ue8m0`: int32 [..., M, ceil(G / 4)] of any strides → codes uint8 [..., M, G], contiguous.

    Raises ValueError where `groups` does not belong to that many columns.
    """
    if packed.dtype != torch.int32:
        raise TypeError(f"expected packed scales in int32, got {packed.dtype}")
    if -(-groups // UE8M0_PER_INT32) != packed.shape[-1]:
        raise ValueError(f"{groups} groups do not fill {packed.shape[-1]} columns of four")
    group = torch.arange(groups, device=packed.device)
    column = packed[..., group // UE8M0_PER_INT32]
    return (column >> 8 * (group % UE8M0_PER_INT32) & 0xFF).to(torch.uint8).contiguous()
