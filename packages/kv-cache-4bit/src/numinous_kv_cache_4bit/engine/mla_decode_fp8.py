# SPDX-License-Identifier: Apache-2.0
"""``kv4.mla_decode_fp8``: decode of the engine's own FP8 rows of sparse MLA (656 bytes, rope-free 528) by `sparse_mla_decode`.

*Rows*    stock's, untouched: pool, sizing, writers, prefill, host copies. Only who reads them changes, in batches of few new tokens a
          request (`native`).
*Why*     FlashMLA has kernels for 64 and 128 heads; stock pads the queries of a rank with fewer and computes for the padding.
*Flash*   needs ``kv4.glm_flash_fp8``, without which stock refuses these rows for GLM-5.3-Flash; this hook lies around that one, so tables
          arrive here unpadded, and what is not decode goes on to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from numinous_kv_cache_4bit.engine import flashmla, native
from numinous_kv_cache_4bit.engine.rows import KeptRows
from numinous_kv_cache_4bit.options import (
    DSA_PREFILLS,
    FLASH_ARCHITECTURES,
    FP8_ARCHITECTURES,
    GLM_FLASH_FP8,
    MLA_DECODE_FP8,
)
from numinous_tooling.formats import STOCK_FP8, STOCK_FP8_NO_ROPE
from numinous_tooling.patching.feature import flag_of
from numinous_tooling.patching.flags import parse_bool

ROWS = KeptRows(MLA_DECODE_FP8, STOCK_FP8, FP8_ARCHITECTURES)


def before_pool_sizing(configurator: Any) -> None:
    """`create_memory_pool_configurator`, which every model passes: end the process if this launch is not covered."""
    architecture = configurator.model_config.hf_config.architectures[0]
    ROWS.check_launch(architecture, configurator.kv_cache_dtype)
    flag = flag_of(GLM_FLASH_FP8)
    if architecture in FLASH_ARCHITECTURES and not parse_bool(flag, os.environ.get(flag, "")):
        ROWS.refuse(f"{architecture} keeps FP8 rows with {GLM_FLASH_FP8} only: set {flag}=1, too")


def after_backend(result: None, backend: Any, *args: Any, **kwargs: Any) -> None:
    """`DeepseekSparseAttnBackend.__init__`, also of a draft: refuse other rows than these; prove the kernel once."""
    row = STOCK_FP8 if backend.qk_rope_head_dim else STOCK_FP8_NO_ROPE
    if problem := flashmla.backend_problem(backend, row.width, DSA_PREFILLS):
        ROWS.refuse(problem)
    pool = getattr(backend.token_to_kv_pool, "full_kv_pool", backend.token_to_kv_pool)
    native.prove(ROWS, backend.num_q_heads, row.width, pool.kv_buffer[0].device)


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
    """`_forward_flashmla_kv`: native where few tokens a request are new, else as before.

    Args:
        q_all: bf16 [rows, heads, 512 + rope].
        kv_cache: E4M3FN [slots, 1, width], the pool.
        page_table_1: int32 or int64 [rows, index_topk + index_kpool - 1], slots; -1 where there is none.

    Returns:
        bf16 [rows, 1, heads, 512]; zeros in rows without a slot.
    """
    if not len(q_all) or not native.takes(metadata, len(q_all)):
        return original(
            backend, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1
        )
    ROWS.count.engaged()
    return native.attend(q_all, kv_cache, page_table_1, sm_scale)
