# SPDX-License-Identifier: Apache-2.0
"""Declaration of ``kv4.glm_flash_fp8``: FP8 KV for GLM-5.3-Flash (rope-free MLA, 528-byte rows) on Hopper.

*Seam*      four functions between the DSA backend and FlashMLA, and two in which a launch is refused or described.
*Why*       Stock 0.5.20 accepts ``--kv-cache-dtype fp8_e4m3`` for this model, writes 528-byte rows, and ends at the first
            sparse forward with NotImplementedError: the indexer appends up to `index_kpool` - 1 tail tokens to its
            `index_topk`, and Python lets only bf16 backends take that width. The FlashMLA of its own wheel reads the rows.
            Short prompts behind a cached prefix fail in two more places (a wrapper without `forward_metadata`, an assert of 656).
*Flag*      ``NUMINOUS_KV4_GLM_FLASH_FP8=1`` with ``--kv-cache-dtype fp8_e4m3``.
*Neighbour* stock's bf16 cache of the same model, read by FlashAttention 3; benchmarks run it as the other arm.
*Undo*      leave the flag unset.
"""

from __future__ import annotations

from collections.abc import Iterator

from numinous_kv_cache_4bit.hooks.kept_rows import (
    ATTENTION,
    ATTENTION_CALLS,
    BACKEND,
    CONFIGURATOR,
    HYBRID_POOL,
    KERNELS,
    MHA,
    SCHEDULES,
    STOCK_ROWS,
)
from numinous_kv_cache_4bit.hooks.launch import judge_rows
from numinous_kv_cache_4bit.options import FLASH_ARCHITECTURES, GLM_FLASH_FP8
from numinous_tooling.formats import STOCK_FP8_NO_ROPE
from numinous_tooling.patching import Feature, Hook, stock_pin
from numinous_tooling.patching.serve_command import ServeCommand

KPOOL = f"{ATTENTION}.dsa.dsa_backend_kpool:DeepseekSparseAttnBackendKPoolMixin"
INDEXER = f"{ATTENTION}.dsa.dsa_indexer_kpool:IndexerKPool"
SIZING = "sglang.srt.model_executor.pool_configurator:create_memory_pool_configurator"
OURS = "numinous_kv_cache_4bit.engine.glm_flash_fp8"
SHARED = "numinous_kv_cache_4bit.engine.flashmla"


def table_hooks(feature: str, first: int) -> tuple[Hook, Hook]:
    """Tables of the k-pool indexer in front of FlashMLA: the check that refuses them, and the schedule; numbered from `first`."""
    check, schedule = f"{KPOOL}._check_kpool_tail_backend", f"{BACKEND}._compute_flashmla_metadata"
    return (
        Hook(
            id=f"{feature}.{first:02}",
            target=check,
            kind="around",
            call=f"{SHARED}:around_tail_check",
            pins=(
                stock_pin(check, "f4dc74acf3538b2d"),
                stock_pin(f"{KPOOL}._resolve_kpool_tail_backend", "264412136039638b"),
                # Slots that they name beyond a token's history and tail are -1.
                stock_pin(
                    f"{ATTENTION}.dsa.kpool_fp8_index:topk_from_pooled_history_logits",
                    "b1325c29dd167913",
                ),
                stock_pin(f"{INDEXER}._full_topk_for_short_sequence", "6a2dfe0a0aa4f7d6"),
            ),
        ),
        Hook(
            id=f"{feature}.{first + 1:02}",
            target=schedule,
            kind="around",
            call=f"{SHARED}:around_schedule",
            pins=SCHEDULES,
        ),
    )


def prefix_hook(feature: str, number: int, ours: str) -> Hook:
    """A cached prefix in front of multi-head attention, read by `around_prefix` of the adapter `ours`."""
    target = f"{MHA}:DeepseekMHAForwardMixin._get_mla_kv_buffer_from_fp8_for_dsa"
    return Hook(
        id=f"{feature}.{number:02}",
        target=target,
        kind="around",
        call=f"{ours}:around_prefix",
        pins=(
            stock_pin(target, "a5c55119eacf81a8"),
            stock_pin(f"{MHA}:DeepseekMHAForwardMixin.forward_normal_prepare", "ef4bc197819320a9"),
            stock_pin(f"{MHA}:resolve_attn_backend", "88aad03e4aa599bd"),
            stock_pin(f"{BACKEND}.set_dsa_prefill_impl", "830f5141289eb559"),
            # Launches the kernel that the adapter of 528-byte rows launches, with the same arguments but for the rope part.
            stock_pin(f"{KERNELS}.dequant_k_cache:dequantize_k_cache_paged", "0dd5e8ae4d98cfb8"),
        ),
    )


FEATURE = Feature(
    id=GLM_FLASH_FP8,
    sentence="FP8 KV cache for GLM-5.3-Flash on Hopper: 1.75 times the tokens of bf16 in the same memory.",
    arch={"sm90": "emulated"},
    patches=(
        Hook(
            id="kv4.glm_flash_fp8.01",
            target=SIZING,
            kind="before",
            call=f"{OURS}:ROWS.before_pool_sizing",
            pins=(
                stock_pin(SIZING, "3fa65491f3cd9416"),
                # The row width, of which allocation and sizing make use.
                stock_pin(f"{CONFIGURATOR}:calculate_mla_kv_cache_dim", "24d289146cfc6db0"),
            ),
        ),
        Hook(
            id="kv4.glm_flash_fp8.02",
            target=f"{BACKEND}.__init__",
            kind="after",
            call=f"{OURS}:after_backend",
            pins=(
                stock_pin(f"{BACKEND}.__init__", "3a45fa68f9968b19"),
                HYBRID_POOL,
                *STOCK_ROWS,
            ),
        ),
        *table_hooks(GLM_FLASH_FP8, 3),
        Hook(
            id="kv4.glm_flash_fp8.05",
            target=f"{BACKEND}._forward_flashmla_kv",
            kind="around",
            call=f"{OURS}:around_attention",
            pins=ATTENTION_CALLS,
        ),
        prefix_hook(GLM_FLASH_FP8, 6, OURS),
    ),
    judge="numinous_kv_cache_4bit.hooks.glm_flash_fp8:judge",
    upstream="none",
)


def judge(command: ServeCommand) -> Iterator[str]:
    """Why this launch cannot use the feature, one line each."""
    return judge_rows(command, STOCK_FP8_NO_ROPE, FLASH_ARCHITECTURES)
