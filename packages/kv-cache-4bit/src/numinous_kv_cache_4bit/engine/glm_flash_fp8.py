# SPDX-License-Identifier: Apache-2.0
"""``kv4.glm_flash_fp8``: 528-byte FP8 rows of GLM-5.3-Flash, attended by the FlashMLA that the engine ships.

*Rule*    The k-pool indexer names `index_topk` slots and up to `index_kpool` - 1 tail tokens. FlashMLA takes whole blocks of 64,
          so the table is padded with -1, which its kernel masks (scale and codes become zeros, NaN in slot 0 included), and
          stock's own code runs with that width in place of `index_topk`: the call, its schedule, the padding of heads.
*Graphs*  Stock computes a schedule per captured batch size and refreshes it before each replay, with the width of this module.
          A schedule depends on the number of rows and the width alone, so a captured one cannot go stale.
*Prefill* runs through the same kernel, every token a row. More than `ROWS` at once would take gigabytes of scratch (fp32
          partial outputs, 131 kB a row); they go in turns.
*Prefix*  Up to 2048 tokens (`SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD`) prefill as plain multi-head attention; a cached
          prefix is then dequantised by stock's kernel, of which the rope part is not launched.
*Ranks*   Nothing here decides what runs; every rank sees the same shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import metadata as distributions
from types import SimpleNamespace
from typing import Any

import torch

from numinous_kv_cache_4bit.options import FLASH_ARCHITECTURES, GLM_FLASH_FP8
from numinous_tooling.formats import LATENT_DIM, STOCK_FP8_NO_ROPE
from numinous_tooling.patching.counters import counters
from numinous_tooling.patching.feature import flag_of

KERNEL_DISTRIBUTION, KERNEL_VERSION = "sglang-kernel", "0.4.7"
BLOCK = 64  # slots that FlashMLA takes at a time
ROWS = 4096  # of one call: 0.54 GB of partial outputs
INDEX_ROW = 132  # bytes: 128 E4M3 values and an fp32 scale
BF16_ROW = 2 * LATENT_DIM
SCALES = STOCK_FP8_NO_ROPE.field("scales")

logger = logging.getLogger(__name__)
_count = counters(GLM_FLASH_FP8)
_described = False


def padded_width(index_topk: int, index_kpool: int) -> int:
    """Slots per query row: the top-k and the longest tail, in whole blocks."""
    return -(-(index_topk + index_kpool - 1) // BLOCK) * BLOCK


def bytes_per_token(row: int, layers: int, index_layers: int) -> int:
    """KV bytes of a token: a row in every full-attention layer, an index key in those that have an indexer of their own."""
    return row * layers + INDEX_ROW * index_layers


def _refuse(reason: str) -> None:
    raise SystemExit(f"{GLM_FLASH_FP8}: {reason}")


# --- Boot -----------------------------------------------------------------------------------------------------------


def before_pool_sizing(configurator: Any) -> None:
    """`create_memory_pool_configurator`, which every model passes: end the process if this launch is not covered."""
    architecture = configurator.model_config.hf_config.architectures[0]
    if architecture not in FLASH_ARCHITECTURES:
        _refuse(
            f"made for {FLASH_ARCHITECTURES[0]}, this model is {architecture}; unset {flag_of(GLM_FLASH_FP8)}"
        )
    if configurator.kv_cache_dtype != torch.float8_e4m3fn:
        _refuse(f"the KV cache is {configurator.kv_cache_dtype}: add --kv-cache-dtype fp8_e4m3")
    arch = _arch()
    if arch != "sm90":
        _refuse(
            f"made for Hopper (sm90), this is {arch}; unset {flag_of(GLM_FLASH_FP8)}, stock has another FP8 path on sm100"
        )
    # Other FlashMLA versions read 528-byte rows as another format, without a word.
    version = _kernel_version()
    if version != KERNEL_VERSION:
        _refuse(
            f"reads rows with the FlashMLA of {KERNEL_DISTRIBUTION} {KERNEL_VERSION}, and {version or 'none'} is installed"
        )


def _arch() -> str:
    if not torch.cuda.is_available():
        return "a machine without a GPU"
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


def _kernel_version() -> str | None:
    try:
        return distributions.version(KERNEL_DISTRIBUTION)
    except distributions.PackageNotFoundError:
        return None


def after_backend(result: None, backend: Any, *args: Any, **kwargs: Any) -> None:
    """`DeepseekSparseAttnBackend.__init__`, also of a draft: refuse what FlashMLA does not read; say once what the user gains."""
    if backend.kv_cache_dim != STOCK_FP8_NO_ROPE.width or not backend.dsa_kv_cache_store_fp8:
        _refuse(f"the pool's rows are {backend.kv_cache_dim} wide, not {STOCK_FP8_NO_ROPE.width}")
    for phase in ("prefill", "decode"):
        chosen = getattr(backend, f"dsa_{phase}_impl")
        if chosen != "flashmla_kv":
            _refuse(
                f"--dsa-{phase}-backend {chosen} does not read 528-byte rows; leave the flag out"
            )
    if backend.flashmla_kv_num_q_heads not in (64, 128):
        _refuse(
            f"{backend.num_q_heads} query heads per rank; FlashMLA takes up to 128: raise --tp-size"
        )
    if backend.real_page_size != BLOCK:
        _refuse(f"pages of {backend.real_page_size} tokens; FlashMLA takes pages of {BLOCK}")
    pool = backend.token_to_kv_pool
    if pool.size + pool.page_size > torch.iinfo(torch.int32).max:
        _refuse(f"{pool.size} slots; FlashMLA's ids are 32 bits: lower --mem-fraction-static")
    _describe(getattr(pool, "full_kv_pool", pool))


def _describe(pool: Any) -> None:
    global _described
    if _described:
        return
    _described = True
    from sglang.srt.utils import log_info_on_rank0

    layers = pool.layer_num
    index_layers = layers - sum(pool.skip_topk_layers)
    ours = bytes_per_token(STOCK_FP8_NO_ROPE.width, layers, index_layers)
    bf16 = bytes_per_token(BF16_ROW, layers, index_layers)
    log_info_on_rank0(
        logger,
        f"{GLM_FLASH_FP8}: {pool.size} tokens in 528-byte rows; bf16 rows would hold {pool.size * ours // bf16} "
        f"in this memory ({ours} against {bf16} bytes per token, {bf16 / ours:.2f} x)",
    )


# --- Attention ------------------------------------------------------------------------------------------------------


class Widened:
    """A backend as stock's FlashMLA code sees it: its top-k is the padded width. Reads only; nothing is set through it."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.dsa_index_topk = padded_width(backend.dsa_index_topk, backend.dsa_index_kpool)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def around_tail_check(
    original: Callable[..., None], backend: Any, topk_indices: Any, dsa_impl: str, phase: str
) -> None:
    """`_check_kpool_tail_backend`: FlashMLA takes tails, too."""
    if dsa_impl != "flashmla_kv":
        original(backend, topk_indices, dsa_impl, phase)


def around_schedule(
    original: Callable[..., Any], backend: Any, cache_seqlens: torch.Tensor, seq_len_q: int
) -> Any:
    """`_compute_flashmla_metadata`: the schedule of `len(cache_seqlens)` rows of the padded width."""
    if not len(
        cache_seqlens
    ):  # an idle rank; FlashMLA's scheduler refuses it, and nobody reads the result
        cache_seqlens = cache_seqlens.new_ones(1)
    return original(Widened(backend), cache_seqlens, seq_len_q)


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
    rows = len(q_all)
    if rows == 0:
        return q_all.new_empty((0, 1, layer.tp_q_head_num, v_head_dim))
    view = Widened(backend)
    missing = view.dsa_index_topk - page_table_1.shape[-1]
    if missing < 0:  # padding by a negative number would cut slots off
        raise RuntimeError(
            f"{GLM_FLASH_FP8}: the indexer names {page_table_1.shape[-1]} slots, more than {view.dsa_index_topk}"
        )
    slots = torch.nn.functional.pad(page_table_1.to(torch.int32), (0, missing), value=-1)
    _count.engaged()

    def attend(begin: int, end: int, plan: Any) -> torch.Tensor:
        return original(
            view,
            q_all[begin:end],
            kv_cache,
            v_head_dim,
            sm_scale,
            layer,
            plan,
            slots[begin:end],
        )

    # Ragged or padded batches bring more rows than their metadata counts.
    if rows <= ROWS and len(metadata.dsa_cache_seqlens_int32) == rows:
        return attend(0, rows, metadata)
    parts = [
        attend(begin, end, _plan(backend, end - begin, q_all.device))
        for begin in range(0, rows, ROWS)
        for end in (min(begin + ROWS, rows),)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _plan(backend: Any, rows: int, device: torch.device) -> Any:
    """What `_forward_flashmla_kv` reads of the metadata of a batch; the lengths are not looked at, only their number is."""
    lengths = torch.ones(rows, dtype=torch.int32, device=device)
    return SimpleNamespace(
        dsa_cache_seqlens_int32=lengths,
        flashmla_metadata=backend._compute_flashmla_metadata(cache_seqlens=lengths, seq_len_q=1),
    )


# --- A cached prefix in front of multi-head attention -----------------------------------------------------------------


def around_prefix(
    original: Callable[..., Any], attention: Any, forward_batch: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_get_mla_kv_buffer_from_fp8_for_dsa`: latent [tokens, 512] and rope part [tokens, 1, 0] of a batch, prefix included.

    Stock asks the outermost backend for its metadata, which the wrapper of hybrid models does not have, and dequantises
    656-byte rows only.
    """
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha import (
        resolve_attn_backend,
    )

    slots = resolve_attn_backend(forward_batch).forward_metadata.page_table_1_flattened
    if slots is None:
        raise RuntimeError(f"{GLM_FLASH_FP8}: no page table for the cached prefix of this batch")
    cache = get_token_to_kv_pool().get_key_buffer(attention.attn_mha.layer_id)
    latent = dequantize_rows(cache, slots)
    _count.engaged()
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
