# SPDX-License-Identifier: Apache-2.0
"""``kv4.glm_flash``: 4-bit rows of 288 bytes in the cache of GLM-5.3-Flash (rope-free, hybrid) and of its NextN draft.

*Pool*    see `rows`. The hybrid pool wraps the engine's DSA pool for the full-attention layers; the state of linear layers is stock's.
*Attention* see `scratch`; tables of `index_topk` slots and a tail, padded as `flashmla` says. Decode and prefill: the engine's sparse
          prefill kernels are out of reach, because it sends tables with tails of `flashmla_sparse` to FlashAttention 3, which reads bf16
          rows, and refuses them for `flashmla_sparse_q8`.
*Prefix*  of short prompts (multi-head attention): dequantised exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from numinous_kv_cache_4bit.engine import flashmla
from numinous_kv_cache_4bit.engine.scratch import ScratchRows
from numinous_kv_cache_4bit.options import FLASH_ARCHITECTURES, GLM_FLASH
from numinous_tooling.formats import KV4_NO_ROPE

ROWS = ScratchRows(GLM_FLASH, KV4_NO_ROPE, FLASH_ARCHITECTURES)


def after_backend(result: None, backend: Any, *args: Any, **kwargs: Any) -> None:
    """`DeepseekSparseAttnBackend.__init__`, also of a draft: refuse what is not covered; say once what the user gains."""
    ROWS.check_backend(backend, ("flashmla_kv",))


def around_prefix(
    original: Callable[..., Any], attention: Any, forward_batch: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_get_mla_kv_buffer_from_fp8_for_dsa`: latent [tokens, 512] and rope part [tokens, 1, 0] of a batch, prefix included."""
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    slots = flashmla.prefix_slots(forward_batch, GLM_FLASH)
    cache = get_token_to_kv_pool().get_key_buffer(attention.attn_mha.layer_id)
    ROWS.count.engaged()
    latent = ROWS.dequantize(cache, slots)
    return latent, latent.new_empty((len(latent), 1, 0))
