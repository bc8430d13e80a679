# SPDX-License-Identifier: Apache-2.0
"""Decode attention on NVFP4 caches of MHA and GQA models, for the metadata of the engine's Triton backend: no workspace.

*What*      out = softmax(sm_scale · q · Kᵀ) · V over the slots that a request lists, one query each; K = E2M1 × E4M3 × k_global_scale, V alike.
            `logit_cap` c > 0 makes a score c · tanh(score / c). With a sink s of a head, out is multiplied by exp(lse) / (exp(lse) + exp(s));
            lse = log Σ exp(score) is without it.
*Shapes*    q [B, Hq, Dk] bf16; buffers [slots, Hkv, Dk / 2] and [slots, Hkv, Dv / 2] uint8, low nibble = even column; scale buffers
            [slots, Hkv, D / 16] uint8, E4M3; out [B, Hq, Dv] bf16, lse [B, Hq] fp32. Hq is a multiple of Hkv: query head h reads KV head
            h // (Hq / Hkv). D: 64, 96, 128, 192, 256, 512, Dk ≠ Dv among them.
*Lists*     request b lists kv_indices[kv_indptr[b] : kv_indptr[b + 1]], slot ids of any page size in the order of the tokens. -1 and ids outside
            the pool are no tokens, an id counts as often as it stands, slot 0 is a slot like others. `window` w > 0 keeps the last w entries
            of each list (the engine's lists for sliding windows are cut already). A request without tokens gives zeros and lse -inf. Slots
            that nobody lists are not read, so NaN in them spreads nowhere; NaN in a listed row makes NaN.
*Arch*      see catalog.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from numinous_kv_cache_4bit.kernels.nvfp4_write import (
    BLOCK,
    Scale,
    check_bytes,
    check_global,
    check_global_tensor,
)
from numinous_tooling.numerics import dequantize_nvfp4
from numinous_tooling.workbench import Tensors, Traffic

__all__ = ["DIMS", "Attended", "decode_attention_nvfp4", "reference", "traffic"]

DIMS = (64, 96, 128, 192, 256, 512)
"""Head dimensions."""
MAX_SPLITS = 64


class Attended(NamedTuple):
    """Result: `out` [B, Hq, Dv] bf16, and `lse` [B, Hq] fp32, natural logarithm, where it was asked for."""

    out: torch.Tensor
    lse: torch.Tensor | None


# --- Reference ------------------------------------------------------------------------------------------------------


def reference(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale_buffer: torch.Tensor,
    v_scale_buffer: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    *,
    sm_scale: float,
    k_global_scale: Scale = 1.0,
    v_global_scale: Scale = 1.0,
    window: int | None = None,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> Tensors:
    """Specification in torch, fp64 from exactly decoded rows.

    Returns:
        ``out`` and ``lse``, and ``magnitude``: Σ p · |v| like out, which the rounding of p is proportional to.
    """
    requests, heads, _ = q.shape
    slots, kv_heads = k_buffer.shape[:2]
    group = heads // kv_heads
    v_dim = 2 * v_buffer.shape[2]
    out = q.new_zeros((requests, heads, v_dim), dtype=torch.float64)
    magnitude = torch.zeros_like(out)
    lse = q.new_full((requests, heads), -torch.inf, dtype=torch.float64)
    starts = kv_indptr.tolist()
    for request in range(requests):
        ids = kv_indices[starts[request] : starts[request + 1]].long()
        if window is not None:
            ids = ids[max(0, len(ids) - window) :]
        ids = ids[(ids >= 0) & (ids < slots)]
        if not len(ids):
            continue
        k = dequantize_nvfp4(k_buffer[ids], k_scale_buffer[ids]).double() * float(k_global_scale)
        v = dequantize_nvfp4(v_buffer[ids], v_scale_buffer[ids]).double() * float(v_global_scale)
        query = q[request].double().view(kv_heads, group, -1)
        scores = sm_scale * torch.einsum("hgd,nhd->hgn", query, k).flatten(0, 1)
        if logit_cap > 0:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        lse[request] = torch.logsumexp(scores, dim=-1)
        total = lse[request]
        if sinks is not None:
            total = torch.logaddexp(total, sinks.double())
        weights = (scores - total[:, None]).exp().view(kv_heads, group, -1)
        out[request] = torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1)
        magnitude[request] = torch.einsum("hgn,nhd->hgd", weights, v.abs()).flatten(0, 1)
    return {"out": out, "lse": lse, "magnitude": magnitude}


def traffic(
    requests: int, heads: int, kv_heads: int, k_dim: int, v_dim: int, tokens: int, id_bytes: int
) -> Traffic:
    """Compulsory bytes and FLOPs of `tokens` listed tokens, all requests together: ids, rows and scales once, q, out and lse."""
    row = kv_heads * (k_dim + v_dim) * 9 // 16
    ends = requests * heads * 2 * (k_dim + v_dim) + 4 * (requests + 1)
    return Traffic(
        bytes=tokens * (row + id_bytes) + ends,
        flops=2 * tokens * heads * (k_dim + v_dim),
        unit="bf16",
    )


# --- Public function ------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """A checked call."""

    q: torch.Tensor
    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    k_scales: torch.Tensor
    v_scales: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None
    sm_scale: float
    k_global: Scale
    v_global: Scale
    window: int
    logit_cap: float
    splits: int | None


def decode_attention_nvfp4(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale_buffer: torch.Tensor,
    v_scale_buffer: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    *,
    sm_scale: float,
    k_global_scale: Scale = 1.0,
    v_global_scale: Scale = 1.0,
    window: int | None = None,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    splits: int | None = None,
) -> Attended:
    """Attention of one query a request over listed slots of an NVFP4 cache; does not synchronise, may be captured in a CUDA graph.

    Args:
        q: bf16 [B, Hq, Dk], values of a head side by side.
        k_buffer, v_buffer: uint8 [slots, Hkv, D / 2].
        k_scale_buffer, v_scale_buffer: uint8 [slots, Hkv, D / 16].
        kv_indptr: int32 or int64 [B + 1 or more], ascending; what follows B + 1 entries is not read.
        kv_indices: int32 or int64 [n], n at least kv_indptr[B].
        sm_scale: positive; multiplies scores.
        k_global_scale, v_global_scale: a number in 2^-64 … 2^64, or an fp32 tensor of one element on the device, which is not read back.
        window: the last so many entries of each list are seen, the query's own among them; None sees all.
        logit_cap: 0 for none.
        sinks: fp32 or bf16 [Hq].
        out: bf16 [B, Hq, Dv] that is written, values of a head side by side; None makes one.
        return_lse: also gives lse.
        splits: of each list over programs, 1 … 64; None chooses by shapes and the GPU's multiprocessors.

    Raises:
        TypeError: a dtype is not the one named.
        ValueError: shapes, strides, devices or values do not fit.
    """
    call = _checked(
        q, k_buffer, v_buffer, k_scale_buffer, v_scale_buffer, kv_indptr, kv_indices, sm_scale,
        k_global_scale, v_global_scale, window, logit_cap, sinks, out, return_lse, splits,
    )  # fmt: skip
    if call.q.shape[0]:
        _launch(call)
    return Attended(call.out, call.lse)


def _checked(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scales: torch.Tensor,
    v_scales: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    k_global: Scale,
    v_global: Scale,
    window: int | None,
    logit_cap: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    return_lse: bool,
    splits: int | None,
) -> _Call:
    if q.dtype != torch.bfloat16:
        raise TypeError(f"q: expected bfloat16, got {q.dtype}")
    if q.dim() != 3 or q.shape[2] not in DIMS:
        raise ValueError(f"q: expected [B, Hq, D], D one of {DIMS}, got {list(q.shape)}")
    if q.stride(2) != 1:
        raise ValueError(f"q: values of a head must lie side by side, got strides {q.stride()}")
    requests, heads, k_dim = q.shape
    if k_buffer.dim() != 3 or v_buffer.dim() != 3 or 2 * v_buffer.shape[2] not in DIMS:
        raise ValueError(
            f"k_buffer, v_buffer: expected [slots, Hkv, D / 2], D one of {DIMS}, got {list(k_buffer.shape)}, {list(v_buffer.shape)}"
        )
    slots, kv_heads, v_dim = k_buffer.shape[0], k_buffer.shape[1], 2 * v_buffer.shape[2]
    check_bytes("k_buffer", k_buffer, (slots, kv_heads, k_dim // 2), q.device)
    check_bytes("v_buffer", v_buffer, (slots, kv_heads, v_dim // 2), q.device)
    check_bytes("k_scale_buffer", k_scales, (slots, kv_heads, k_dim // BLOCK), q.device)
    check_bytes("v_scale_buffer", v_scales, (slots, kv_heads, v_dim // BLOCK), q.device)
    for name, buffer in (("k_buffer", k_buffer), ("v_buffer", v_buffer)):
        if buffer.data_ptr() % 2 or any(stride % 2 for stride in buffer.stride()[:2]):
            raise ValueError(
                f"{name}: heads must start at multiples of 2 bytes, got strides {buffer.stride()}"
            )
    if not 1 <= kv_heads or heads % kv_heads or not heads:
        raise ValueError(
            f"q: the {heads} query heads must be a multiple of the {kv_heads} KV heads"
        )
    for name, table in (("kv_indptr", indptr), ("kv_indices", indices)):
        if table.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: expected int32 or int64, got {table.dtype}")
        if table.dim() != 1 or table.device != q.device:
            raise ValueError(
                f"{name}: expected one dimension on {q.device}, got {list(table.shape)} on {table.device}"
            )
    if len(indptr) < requests + 1:
        raise ValueError(
            f"kv_indptr: expected {requests + 1} entries for {requests} requests, got {len(indptr)}"
        )
    if not (sm_scale > 0 and math.isfinite(sm_scale)):
        raise ValueError(f"sm_scale is positive, got {sm_scale}")
    for name, scale in (("k_global_scale", k_global), ("v_global_scale", v_global)):
        if isinstance(scale, torch.Tensor):
            check_global_tensor(name, scale, q.device)
        else:
            check_global(name, scale)
    if window is not None and window < 1:
        raise ValueError(f"window is at least 1 or None, got {window}")
    if not (logit_cap >= 0 and math.isfinite(logit_cap)):
        raise ValueError(f"logit_cap is 0 or positive, got {logit_cap}")
    if splits is not None and not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"splits is 1 … {MAX_SPLITS}, got {splits}")
    if sinks is not None:
        if sinks.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"sinks: expected float32 or bfloat16, got {sinks.dtype}")
        if tuple(sinks.shape) != (heads,) or sinks.device != q.device:
            raise ValueError(
                f"sinks: expected [{heads}] on {q.device}, got {list(sinks.shape)} on {sinks.device}"
            )
        sinks = sinks.contiguous()
    if requests * heads * MAX_SPLITS >= 2**31:
        raise ValueError(f"q: {requests} requests of {heads} heads are too many for one call")
    if out is None:
        out = torch.empty((requests, heads, v_dim), dtype=torch.bfloat16, device=q.device)
    elif out.dtype != torch.bfloat16:
        raise TypeError(f"out: expected bfloat16, got {out.dtype}")
    elif (
        tuple(out.shape) != (requests, heads, v_dim) or out.device != q.device or out.stride(2) != 1
    ):
        raise ValueError(
            f"out: expected [{requests}, {heads}, {v_dim}] on {q.device}, values of a head side by side, "
            f"got {list(out.shape)} on {out.device}, strides {out.stride()}"
        )
    lse = (
        torch.empty((requests, heads), dtype=torch.float32, device=q.device) if return_lse else None
    )
    return _Call(
        q, k_buffer, v_buffer, k_scales, v_scales, indptr, indices, sinks, out, lse, sm_scale,
        k_global, v_global, 0 if window is None else window, logit_cap, splits,
    )  # fmt: skip


def _launch(call: _Call) -> None:
    raise NotImplementedError("the kernel follows")
