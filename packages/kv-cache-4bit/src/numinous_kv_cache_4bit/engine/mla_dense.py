# SPDX-License-Identifier: Apache-2.0
"""``kv4.mla_dense``: 4-bit rows of 352 bytes in the cache of dense MLA models (DeepSeek V2 / V3, Kimi K2.7).

*View*     The engine asks one function which dtype the cache has. Under ``--kv-cache-dtype fp8_e4m3`` it is answered "bf16, not quantised":
           so backends keep bf16 queries, pass no descales, plan bf16 kernels, and the model's multi-head path casts no keys to E4M3.
*Shadow*   The pool (`mla_dense_pool`) keeps 352 bytes per token and layer, and once, for all layers in turn, a bf16 row of 1152 bytes per slot. In
           front of a layer's attention the rows that the batch sees are decoded into it at their own slots (`kv4_expand`), so stock's page tables,
           kernels, schedules and graphs run as on a bf16 cache. Which rows: `req_to_token` up to `seq_lens`, read on the device, so that a
           captured graph sees the lengths of its replay. Rows decoded without need are right, too: slot and content belong together.
*Bytes*    61 layers: 61 × 352 + 1152 = 22,624 a token, FP8 35,136 (1.553 ×), bf16 70,272 (3.106 ×). Up to 5 layers FP8 is the smaller one.
           A decode step reads 352 bytes and an id of 4 and writes 1152 a live row, then stock's kernel reads 1152: 2660, where a bf16
           cache has 1152 and an FP8 cache 576. But FlashAttention 3, stock's choice on Hopper, has no FP8 path for absorbed MLA: it casts the *whole* pool of
           each layer to bf16 first, 1728 bytes a slot, live or not (*derived*).
*Why not compact*  A scratch for the live rows alone would need page tables of its own in four backends, their graphs included, and saves
           nothing where it counts: a full pool is a batch of that many live rows, and prefixes that requests share would stand in it once
           for each.
*Native*   With ``NUMINOUS_KV4_MLA_DENSE_DECODE=native`` batches of few new tokens a request read `DensePool.kv_buffer` itself, 352 bytes a live row
           (`mla_dense_native`), in place of shadow and backend. The shadow stays, and is counted: prefill in a captured graph, or behind a
           short cached prefix, reads it at any slot.
*Ranks*    Every rank of tensor parallelism has the same rows, lengths and slots; nothing here decides what runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from numinous_kv_cache_4bit.engine import mla_dense_native, native
from numinous_kv_cache_4bit.engine.rows import KeptRows, bf16_width
from numinous_kv_cache_4bit.kernels.sparse_mla_decode import PAGE
from numinous_kv_cache_4bit.options import DECODE, DENSE_ARCHITECTURES, MLA_DENSE, SCRATCH
from numinous_tooling.formats import KV4, LATENT_DIM, STOCK_FP8_RAW

ROWS = KeptRows(MLA_DENSE, KV4, DENSE_ARCHITECTURES, STOCK_FP8_RAW)
SHADOW = bf16_width(KV4)  # bytes of a slot


# --- Boot -----------------------------------------------------------------------------------------------------------


def around_dtype(
    original: Callable[..., tuple[str | None, torch.dtype]], *, model: Any, **asked: Any
) -> tuple[str | None, torch.dtype]:
    """`configure_kv_cache_dtype`, of a target and of a draft: end the process if the launch is not covered, else say bf16.

    Returns:
        "auto", the engine's tag of a cache that is not quantised, and torch.bfloat16.
    """
    _, dtype = original(model=model, **asked)
    ROWS.check_launch(type(model).__name__, dtype, asked["server_args_kv_cache_dtype"])
    if asked["model_dtype"] != torch.bfloat16:
        ROWS.refuse(f"the model runs in {asked['model_dtype']}, rows are written from bf16")
    scales = {getattr(module, "k_scale_float", None) for module in model.modules()}
    if scales - {None, 1.0}:
        ROWS.refuse("the checkpoint scales its FP8 cache; rows with scales of their own take none")
    return "auto", torch.bfloat16


def cell_size(layers: int, drafts: int) -> int:
    """KV bytes of a token: a row in each layer of the target and of its draft, and one row of the shadow that they share."""
    return KV4.width * (layers + drafts) + SHADOW


def after_sizing(result: None, sizing: Any, configurator: Any) -> None:
    """`DefaultPoolConfigurator.__init__`: the bytes of a token that it divides the memory by."""
    drafts = 0
    if configurator.spec_algorithm.is_eagle() and not configurator.is_draft_worker:
        drafts = int(configurator.spec_aux_config.eagle_draft_num_layers or 0)
    sizing._cell_size = cell_size(configurator.layer_info.num_effective_layers, drafts)


def around_pool(
    original: Callable[..., Any], configurator: Any, *, max_total_num_tokens: int
) -> Any:
    """`KVCacheConfigurator._build_mla_kv_pool`: the pool with 352-byte rows."""
    from numinous_kv_cache_4bit.engine.mla_dense_pool import DensePool

    model = configurator.model_config
    if (model.kv_lora_rank, model.qk_rope_head_dim) != (LATENT_DIM, KV4.rope_dim):
        ROWS.refuse(
            f"rows hold {LATENT_DIM} latent and {KV4.rope_dim} rope values, this model has "
            f"{model.kv_lora_rank} and {model.qk_rope_head_dim}"
        )
    DensePool.rows = ROWS
    DensePool.native = native.chosen(MLA_DENSE)
    if DensePool.native:
        _check_native(configurator)
    _wait_for_whole_forward()
    layers = configurator.layer_info
    return DensePool(
        max_total_num_tokens,
        page_size=configurator.pool_page_size,
        dtype=configurator.kv_cache_dtype,
        kv_lora_rank=model.kv_lora_rank,
        qk_rope_head_dim=model.qk_rope_head_dim,
        layer_num=layers.num_effective_layers,
        device=configurator.device,
        enable_memory_saver=False,
        start_layer=layers.start_layer,
        end_layer=layers.end_layer,
        draft=configurator.is_draft_worker,
    )


def _check_native(configurator: Any) -> None:
    from sglang.srt.runtime_context import get_parallel

    if configurator.pool_page_size != PAGE:
        ROWS.refuse(
            f"native decode reads pages of {PAGE} tokens, these have {configurator.pool_page_size}: "
            f"add --page-size {PAGE}, or set {DECODE[MLA_DENSE].name}={SCRATCH}"
        )
    heads = configurator.model_config.num_attention_heads // get_parallel().attn_tp_size
    native.prove(ROWS, heads, KV4.width, torch.device(configurator.device))


def _wait_for_whole_forward() -> None:
    """The scheduler's next writes to `req_to_token` come after the forward, as where no backend says that it has a copy of its own.

    Stock's backends copy their part of the table before a graph is replayed, whereupon the scheduler may give the rows to other requests.
    Rows are decoded in each layer, so the table is read until the last.
    """
    from sglang.srt.environ import envs

    envs.SGLANG_FORCE_COARSE_WAR_BARRIER.set(True)


def after_pools(result: Any, configurator: Any, **sizes: Any) -> None:
    """`KVCacheConfigurator._build_token_to_kv_pool`: no other pool may stand where memory was counted for ours."""
    from numinous_kv_cache_4bit.engine.mla_dense_pool import DensePool

    if not isinstance(result, DensePool):
        ROWS.refuse(f"the engine builds a {type(result).__name__} for this launch, not covered")
    if not configurator.is_draft_worker:
        ROWS.describe(result, once=SHADOW)


# --- Attention ------------------------------------------------------------------------------------------------------


def around_attention(
    original: Callable[..., Any],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    **more: Any,
) -> Any:
    """`AttentionBackend.forward`, of every backend and phase: native, or with a pool that knows whose rows are live."""
    pool = backend.token_to_kv_pool
    # What else a backend may be asked for (sinks, score functions) is not native's.
    if pool.native and more.keys() <= {"q_rope", "k_rope"}:
        out = mla_dense_native.attend(
            ROWS, backend, pool, q, k, v, layer, forward_batch, save_kv_cache, **more
        )
        if out is not None:
            return out
    table = backend.req_to_token_pool.req_to_token
    with pool.attending(table, forward_batch, _extra(forward_batch)):
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache, **more)


def _extra(forward_batch: Any) -> int:
    """Slots behind `seq_lens` that a batch may see: those of the tokens that a draft or a verification adds."""
    if forward_batch.spec_info is None:
        return 0
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    return max(spec.speculative_num_draft_tokens or 0, spec.speculative_num_steps or 0)
