# SPDX-License-Identifier: Apache-2.0
"""``kv4.glm_flash_fp8``: 528-byte FP8 rows of GLM-5.3-Flash, attended by the FlashMLA that the engine ships.

*Rule*    The k-pool indexer names `index_topk` slots and up to `index_kpool` - 1 tail tokens. The table is padded to whole blocks of
          64 with -1, and stock's own code runs with that width in place of `index_topk`: the call, its schedule, the padding of
          heads. See `flashmla`.
*Graphs*  Stock computes a schedule per captured batch size and refreshes it before each replay, with the width of this module.
          A schedule depends on the number of rows and the width alone, so a captured one cannot go stale.
*Prefill* runs through the same kernel, every token a row. More than `ROWS` at once would take gigabytes of scratch (fp32
          partial outputs, 131 kB a row); they go in turns.
*Prefix*  Up to 2048 tokens (`SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD`) prefill as plain multi-head attention; a cached
          prefix is then dequantised by stock's kernel, of which the rope part is not launched.
*Ranks*   Nothing here decides what runs; every rank sees the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from numinous_kv_cache_4bit.engine import flashmla
from numinous_kv_cache_4bit.engine.rows import KeptRows
from numinous_kv_cache_4bit.options import FLASH_ARCHITECTURES, GLM_FLASH_FP8
from numinous_tooling.formats import LATENT_DIM, STOCK_FP8_NO_ROPE

SCALES = STOCK_FP8_NO_ROPE.field("scales")
ROWS = KeptRows(GLM_FLASH_FP8, STOCK_FP8_NO_ROPE, FLASH_ARCHITECTURES)


def after_backend(result: None, backend: Any, *args: Any, **kwargs: Any) -> None:
    """`DeepseekSparseAttnBackend.__init__`, also of a draft: refuse what FlashMLA does not read; say once what the user gains."""
    if problem := flashmla.backend_problem(backend, STOCK_FP8_NO_ROPE.width):
        ROWS.refuse(problem)
    pool = backend.token_to_kv_pool
    ROWS.describe(getattr(pool, "full_kv_pool", pool))


def around_attention(
    original: Callable[..., torch.Tensor],
    backend: Any,
    q_all: torch.Tensor,
    kv_cache: torch.Tensor,
    v_head_dim: int,
    sm_scale: float,
    layer: Any,
    metadata: Any,
    page_table_1: torch.Tensor,
) -> torch.Tensor:
    """`_forward_flashmla_kv`, of decode, verification, draft and prefill.

    Args:
        q_all: bf16 [rows, heads, 512].
        kv_cache: E4M3FN [slots, 1, 528], the pool.
        page_table_1: int32 [rows, index_topk + index_kpool - 1], slots; -1 where there is none.

    Returns:
        bf16 [rows, 1, heads, 512]; zeros in rows without a slot.
    """
    if not len(q_all):
        return q_all.new_empty((0, 1, layer.tp_q_head_num, v_head_dim))
    view = flashmla.View(backend, STOCK_FP8_NO_ROPE.width)
    table = flashmla.padded_table(view, page_table_1, GLM_FLASH_FP8)
    ROWS.count.engaged()
    return flashmla.attend(
        original, view, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, table
    )


def around_prefix(
    original: Callable[..., Any], attention: Any, forward_batch: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_get_mla_kv_buffer_from_fp8_for_dsa`: latent [tokens, 512] and rope part [tokens, 1, 0] of a batch, prefix included.

    Stock's dequantises 656-byte rows only.
    """
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    slots = flashmla.prefix_slots(forward_batch, GLM_FLASH_FP8)
    cache = get_token_to_kv_pool().get_key_buffer(attention.attn_mha.layer_id)
    latent = dequantize_rows(cache, slots)
    ROWS.count.engaged()
    return latent, latent.new_empty((len(latent), 1, 0))


def dequantize_rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Latents of some slots, bf16 [n, 512], by stock's kernel.

    Args:
        cache: E4M3FN [slots, 1, 528], contiguous.
        slots: int32 or int64 [n], within the cache.
    """
    from sglang.kernels.ops.attention.dsa.dequant_k_cache import _dequantize_k_cache_paged_kernel

    rows = cache.view(-1, STOCK_FP8_NO_ROPE.width)
    codes, scales = (
        rows[:, :LATENT_DIM],
        rows[:, SCALES.offset : SCALES.end].view(torch.float32),
    )
    latent = torch.empty((len(slots), LATENT_DIM), dtype=torch.bfloat16, device=cache.device)
    if len(slots):
        # One program for each scale of a row; the one after them would copy the rope part, of which there is none.
        _dequantize_k_cache_paged_kernel[(len(slots), SCALES.count)](
            latent,
            codes,
            scales,
            latent,
            slots,
            latent.stride(0),
            codes.stride(0),
            scales.stride(0),
            latent.stride(0),
            NUM_NOPE_BLOCKS=SCALES.count,
            GROUP_SIZE=STOCK_FP8_NO_ROPE.group,
            DIM_NOPE=LATENT_DIM,
            DIM_ROPE=0,
        )
    return latent
