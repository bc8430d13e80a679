# SPDX-License-Identifier: Apache-2.0
"""``kv4.glm_dsa``: 4-bit rows of 352 bytes in the cache of GLM-5.3 (`GlmMoeDsaForCausalLM`) and of its NextN draft.

*Pool*    see `rows`: width, write, reads.
*Decode*  verification, draft, and prefill with ``flashmla_kv``: see `scratch`.
*Prefill* with ``flashmla_sparse`` or ``flashmla_sparse_q8``: stock attends over the batch's own latents as they come where nothing is
          cached, else over all tokens of the batch dequantised; that function is ours.
*Prefix*  of short prompts (multi-head attention): stock's code, which calls the same function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from numinous_kv_cache_4bit.engine.scratch import ScratchRows
from numinous_kv_cache_4bit.options import DSA_ARCHITECTURES, DSA_PREFILLS, GLM_DSA
from numinous_tooling.formats import KV4, LATENT_DIM
from numinous_tooling.numerics import E4M3FN_MAX

ROWS = ScratchRows(GLM_DSA, KV4, DSA_ARCHITECTURES)
TURN = 2**17  # rows in bf16 on their way to E4M3: 151 MB


def after_backend(result: None, backend: Any, *args: Any, **kwargs: Any) -> None:
    """`DeepseekSparseAttnBackend.__init__`, also of a draft: refuse what is not covered; say once what the user gains."""
    ROWS.check_backend(backend, DSA_PREFILLS)


def around_dequantize(
    original: Callable[..., torch.Tensor],
    quant_k_cache: torch.Tensor,
    page_table_1_flattened: torch.Tensor,
    group_size: int = 128,
) -> torch.Tensor:
    """`dequantize_k_cache_paged`: rows of some slots, bf16 [n, 1, 576].

    Args:
        quant_k_cache: 1-byte type [slots, 1, width].
        page_table_1_flattened: int32 or int64 [n].
    """
    if quant_k_cache.shape[-1] != KV4.width:
        return original(quant_k_cache, page_table_1_flattened, group_size)
    ROWS.count.engaged()
    return ROWS.dequantize(quant_k_cache, page_table_1_flattened)[:, None]


def around_requantize(
    original: Callable[..., torch.Tensor],
    quant_k_cache: torch.Tensor,
    page_table_1_flattened: torch.Tensor,
    group_size: int = 128,
    extra_rows: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gather_dequant_requant_fp8_paged`: rows of some slots as E4M3FN without scales, [n + extra_rows, 1, 576], the extra ones zero.

    Values are rounded from the exact ones and saturate at ±448, as stock's kernel has it.

    Args:
        out: E4M3FN, contiguous, as many elements.
    """
    if quant_k_cache.shape[-1] != KV4.width:
        return original(quant_k_cache, page_table_1_flattened, group_size, extra_rows, out)
    ROWS.count.engaged()
    tokens, columns = len(page_table_1_flattened), LATENT_DIM + KV4.rope_dim
    shape = (tokens + extra_rows, 1, columns)
    if out is None:
        out = torch.empty(shape, dtype=torch.float8_e4m3fn, device=quant_k_cache.device)
    out = out.view(shape)
    for begin in range(0, tokens, TURN):
        slots = page_table_1_flattened[begin : begin + TURN]
        values = ROWS.dequantize(quant_k_cache, slots).clamp_(-E4M3FN_MAX, E4M3FN_MAX)
        out[begin : begin + len(slots), 0].copy_(values)
    out[tokens:].zero_()
    return out
