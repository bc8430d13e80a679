# SPDX-License-Identifier: Apache-2.0
"""Adapter of ``attention.gemma_glue``: norms, rotation and cache write of Gemma 3's and Gemma 4's attention by `qk_norm_rope_store`.

*Rule*     Stands around the two models' attention: projection, one kernel, attention that saves nothing, projection. A layer that the kernel cannot serve is stock's, counted with
           its reason; looked at are types, shapes and classes, no value on the GPU, so a captured graph decides once, at its capture, and counts there.
*Slots*    A window's are those that the backend has translated for its own write (`swa_out_cache_loc`: in a captured decode a buffer that is refilled before each replay), never the
           full pool's. Stock's fusion, switched off in 0.5.20, takes the full pool's for every layer.
*Prefill*  Graphs of prefills hold this code and not the next batch's metadata, and they run over padded rows: there the kernel norms and rotates, and the backend writes, as in stock.
*Decode*   Both backends read keys from the cache only, so new keys and values are not left in place. Elsewhere they are: prefill and verification read them.
*Shared*   Layers that read another layer's cache (Gemma 4's KV sharing, its assistant): q alone, nothing is written.
*Rotation* Gemma 4: the engine's fp32 table. Gemma 3: of each token, from the cosines and sines that its model computes once a forward, so that its scaled rotation is its own.
*Bits*     Stock's but for one element in some hundred that is the neighbouring bf16 (see the kernel). E4M3 saturates where stock's cast gives NaN, beyond 464.
           On a GPU stock divides by its scale rounded to bf16, this by the scale that readers multiply by.
*Ranks*    Every rank has its own heads of the same tokens; nothing is communicated in between.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from numinous_attention.engine.gqa_extend import judge_device
from numinous_attention.kernels.qk_norm_rope_store import FP8, qk_norm_rope_store
from numinous_attention.options import GEMMA_GLUE
from numinous_tooling.patching.counters import counters, table
from numinous_tooling.patching.feature import flag_of

count = counters(GEMMA_GLUE)

BACKENDS = (
    ("sglang.srt.layers.attention.triton_backend", "TritonAttnBackend"),
    ("sglang.srt.layers.attention.flashattention_backend", "FlashAttentionBackend"),
)
"""Modules and classes of the backends whose writes the kernel makes; a module that is not loaded has made no backend."""


def refuse(reason: str) -> None:
    """End the process with one line."""
    raise SystemExit(f"{GEMMA_GLUE}: {reason}; unset {flag_of(GEMMA_GLUE)}")


# --- Boot -----------------------------------------------------------------------------------------------------------


def after_build(result: Any, *, model_runner: Any) -> None:
    """`build_attention_backends`: end the process where no layer would ever reach the kernel."""
    if model_runner.is_draft_worker:
        return  # its layers are judged one by one
    if torch.version.hip is not None:
        refuse("AMD GPUs are not covered (untested)")
    judge_device(torch.device(model_runner.device), refuse)
    backend = result.attn_backend
    if not covers(backend):
        refuse(f"the attention backend is {type(backend).__name__}; triton and fa3 are covered")
    if backend.kv_index_translator.is_translating:
        refuse("unified memory is not covered: its slots have other names")
    if model_runner.dtype != torch.bfloat16:
        refuse(f"the model runs in {model_runner.dtype}; bfloat16 is covered")
    if reason := of_pool(backend.token_to_kv_pool):
        refuse(f"the KV cache is not covered ({reason})")
    found = {of_layer(each) for each in model_runner.model.modules() if is_ours(each)}
    if not found:
        refuse(
            f"made for Gemma 3 and Gemma 4, {type(model_runner.model).__name__} has no such attention"
        )
    if None not in found:
        refuse(f"every layer would be left to stock ({', '.join(sorted(map(str, found)))})")


def covers(backend: Any) -> bool:
    """Whether the kernel can make this backend's writes."""
    return any(
        (module := sys.modules.get(path)) is not None and isinstance(backend, getattr(module, name))
        for path, name in BACKENDS
    )


def is_ours(module: Any) -> bool:
    """Whether a module is an attention that the hooks stand around."""
    return (type(module).__module__, type(module).__name__) in (
        ("sglang.srt.models.gemma3_causal", "Gemma3Attention"),
        ("sglang.srt.models.gemma4_causal", "Gemma4Attention"),
    )


# --- What is covered ------------------------------------------------------------------------------------------------


def of_pool(pool: Any) -> str | None:
    """Why the kernel cannot write to a pool, as a counter's reason; None if it can."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    parts = (pool.full_kv_pool, pool.swa_kv_pool) if type(pool) is SWAKVPool else (pool,)
    for part in parts:
        if type(part) is not MHATokenToKVPool or part.kv_cache_layout != "nhd":
            return "pool"
        if part.is_quantized_kv_cache or part.dtype not in (torch.bfloat16, FP8):
            return "cache_dtype"
    return None


def of_layer(attention: Any) -> str | None:
    """Why an attention's own parts are not what the kernel computes, as a counter's reason; None if they are."""
    from sglang.srt.layers.radix_attention import AttentionType

    layer = attention.attn
    if layer.attn_type is not AttentionType.DECODER or layer.is_cross_attention:
        return "attention_type"
    q_norm, k_norm = attention.q_norm, attention.k_norm
    if q_norm.eps != k_norm.eps:
        return "norms"
    if type(attention).__name__ == "Gemma4Attention" and (reason := _of_gemma4(attention)):
        return reason
    if {q_norm.weight.dtype, k_norm.weight.dtype} != {torch.bfloat16}:
        return "dtype"
    return None


def _of_gemma4(attention: Any) -> str | None:
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.rope_variant import Gemma4RotaryEmbedding

    q_norm, k_norm, v_norm = attention.q_norm, attention.k_norm, attention.v_norm
    if (
        not (q_norm.with_scale and k_norm.with_scale)
        or v_norm.with_scale
        or q_norm.scale_shift
        or k_norm.scale_shift
        or v_norm.eps != q_norm.eps
    ):
        return "norms"
    rotation = attention.rotary_emb
    if (
        type(rotation) not in (RotaryEmbedding, Gemma4RotaryEmbedding)
        or not rotation.is_neox_style
        or rotation.rotary_dim != attention.head_dim
        or rotation.cos_sin_cache.dtype != torch.float32
        or rotation.use_fallback_kernel  # its first call rounds the table to bf16
    ):
        return "rotation"
    if attention.is_kv_shared_layer and attention.kv_shared_layer_index is None:
        return "kv_sharing"
    return None


class Write(NamedTuple):
    """Where k and v of a batch go; fields as the kernel's arguments."""

    slots: torch.Tensor
    slot_map: torch.Tensor | None
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    k_scale: float
    v_scale: float


def write_of(attention: Any, positions: torch.Tensor, batch: Any) -> Write | str:
    """Where k and v of a batch go, or why the layer is left to stock, as a counter's reason.

    Args:
        attention: the model's module.
        positions: [tokens] ids of the table's rows.
        batch: the engine's.
    """
    from sglang.srt.model_executor.forward_context import get_attn_backend

    layer, backend = attention.attn, get_attn_backend()
    if not covers(backend):
        return "backend"
    pool = backend.token_to_kv_pool
    if reason := of_pool(pool):
        return reason
    scales = (1.0, 1.0)
    if pool.dtype == FP8 and (layer.k_scale is not None or layer.v_scale is not None):
        scales = (layer.k_scale_float, layer.v_scale_float)
        if layer.k_scale is None or layer.v_scale is None or not all(map(_is_scale, scales)):
            return "scale"
    pools = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    if any(x.shape[1:] != (attention.num_kv_heads, attention.head_dim) for x in pools):
        return "shape"
    if in_prefill_graph(batch):
        return Write(positions, positions[:0], *pools, *scales)  # a map of no slot: no row is named
    slots, tokens = slots_of(layer, pool, backend, batch), len(positions)
    if slots is None or len(batch.out_cache_loc) != tokens or len(slots) < tokens:
        return "slots"
    return Write(slots[:tokens], None, *pools, *scales)


def _is_scale(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def slots_of(layer: Any, pool: Any, backend: Any, batch: Any) -> torch.Tensor | None:
    """[tokens or more] rows of the layer's own pool, as the backend's write would have them; None if it has none."""
    mapping = getattr(pool, "layers_mapping", None)
    if mapping is not None and mapping[layer.layer_id][1]:
        slots: torch.Tensor | None = getattr(backend.forward_metadata, "swa_out_cache_loc", None)
        return slots
    loc: torch.Tensor | None = batch.out_cache_loc
    return loc


def in_prefill_graph(batch: Any) -> bool:
    """Whether `RadixAttention` hands this call to the operator that a graph of a prefill is cut at."""
    from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
        get_tc_piecewise_forward_context,
    )

    return get_tc_piecewise_forward_context() is not None and batch.forward_mode.is_extend()


# --- Forward --------------------------------------------------------------------------------------------------------


def around_gemma4(
    original: Callable[..., Any],
    attention: Any,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    forward_batch: Any,
    **more: Any,
) -> Any:
    """`Gemma4Attention.forward`."""
    stock = functools.partial(original, attention, positions, hidden_states, forward_batch, **more)
    rows = attention.rotary_emb.cos_sin_cache, positions
    shared = attention.is_kv_shared_layer
    return forward(stock, attention, hidden_states, forward_batch, rows, shared=shared, norm_v=True)


def around_gemma3(
    original: Callable[..., Any],
    attention: Any,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    position_embeddings: Any,
    forward_batch: Any,
    **more: Any,
) -> Any:
    """`Gemma3Attention.forward`."""
    stock = functools.partial(
        original, attention, positions, hidden_states, position_embeddings, forward_batch, **more
    )
    rows = rows_of(position_embeddings, len(hidden_states), attention.head_dim)
    return forward(stock, attention, hidden_states, forward_batch, rows, shared=False, gemma=True)


def rows_of(embeddings: Any, tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A table of each token's own row, and its number; None if `embeddings` are not cosines and sines of both halves of these tokens.

    Made once a forward and kind of layer: it stays with the cosines, which all layers of a kind are given.
    """
    if embeddings is None or any(x.shape != (1, tokens, dim) for x in embeddings):
        return None
    cos, sin = embeddings
    rows: tuple[torch.Tensor, torch.Tensor] | None = getattr(cos, "numinous_rows", None)
    if rows is None:
        halves = [x[0, :, : dim // 2] for x in (cos, sin)]
        rows = torch.cat(halves, dim=-1).float(), torch.arange(tokens, device=cos.device)
        cos.numinous_rows = rows
    return rows


def forward(
    stock: Callable[[], Any],
    attention: Any,
    hidden_states: torch.Tensor,
    batch: Any,
    rows: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    shared: bool,
    gemma: bool = False,
    norm_v: bool = False,
) -> Any:
    """A layer's attention, from hidden states [tokens, width] to the same; `stock` where it is left to the engine.

    Args:
        rows: a table of the rotation, [P, D] fp32, and the row of each token.
        shared: the layer reads another layer's cache.
        gemma, norm_v: as of the kernel.
    """
    write: Write | str | None = None
    reason = uncovered(attention, hidden_states, batch, rows)
    if reason is None and not shared:
        assert rows is not None
        write = write_of(attention, rows[1], batch)
        reason = write if isinstance(write, str) else None
    if reason is not None:
        count.refused(reason)
        return stock()
    assert rows is not None
    assert not isinstance(write, str)
    qkv, _ = attention.qkv_proj(hidden_states)
    heads = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
    parts = qkv.split([n * attention.head_dim for n in heads], dim=-1)
    q, k, v = (x.unflatten(-1, (n, attention.head_dim)) for n, x in zip(heads, parts, strict=True))
    later = write is not None and write.slot_map is not None  # the backend writes
    weights = attention.q_norm.weight.data, attention.k_norm.weight.data
    how = {"eps": attention.q_norm.eps, "gemma": gemma}
    if write is None:
        qk_norm_rope_store(q, None, None, weights[0], None, *rows, None, None, None, **how)
        k = v = None
    else:
        qk_norm_rope_store(
            q, k, v, *weights, *rows, write.slots, write.k_pool, write.v_pool, slot_map=write.slot_map,
            k_scale=write.k_scale, v_scale=write.v_scale, norm_v=norm_v, **how,
            write_back=later or not batch.forward_mode.is_decode(),
        )  # fmt: skip
    answers = attention.attn(q, k, v, forward_batch=batch, save_kv_cache=later)
    count.engaged()
    if write is None or later:
        table().add(GEMMA_GLUE, "q alone" if write is None else "written by the backend")
    output, _ = attention.o_proj(answers.reshape(len(q), attention.q_size))
    return output


def uncovered(attention: Any, hidden_states: torch.Tensor, batch: Any, rows: Any) -> str | None:
    """Why a call is left to stock whatever becomes of its keys, as a counter's reason; None if it is not."""
    if batch.forward_mode.is_idle():
        return "idle"
    if reason := of_layer(attention):
        return reason
    if rows is None or rows[1].shape != hidden_states.shape[:1]:
        return "positions"
    if hidden_states.dtype != torch.bfloat16:
        return "dtype"
    return None
