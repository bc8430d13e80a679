# SPDX-License-Identifier: Apache-2.0
"""Hooks on pool and backend that every feature with 4-bit rows in DSA models has: width, write, reads, FlashMLA over a scratch.

What copies whole rows (moves, host copies of retracted requests, registration, sizes) is pinned and stays stock's.
"""

from __future__ import annotations

from numinous_tooling.patching import Hook, Pin, stock_pin
from numinous_tooling.patching.feature import STOCK

ATTENTION = "sglang.srt.layers.attention"
BACKEND = f"{ATTENTION}.dsa_backend:DeepseekSparseAttnBackend"
CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator"
SIZING = "sglang.srt.model_executor.pool_configurator"
POOLS = "sglang.srt.mem_cache.memory_pool"
KERNELS = "sglang.kernels.ops.attention.dsa"
FORWARDS = "sglang.srt.models.deepseek_common.attention_forward_methods"
MHA = f"{FORWARDS}.forward_mha"

HYBRID_POOL = Pin(
    f"{POOLS}:HybridLinearKVPool.__init__",
    {
        STOCK: "533247d513bf8d45",
        f"{STOCK} + upstream.hybrid_mla_fp4_pool": "d46255a1221ab14f",
    },
)

POOL = f"{POOLS}:MLATokenToKVPool"
MLA_POOL = Pin(
    f"{POOL}.__init__",
    {
        STOCK: "649781c2d9074992",
        f"{STOCK} + upstream.hybrid_mla_fp4_pool": "27ba1664a1099ec2",
    },
)
WRITERS = (
    stock_pin(f"{POOL}._write_mla_kv_buffer", "8321b73993618b9d"),
    # The other writers: one comes there, one refuses rows of another width.
    stock_pin(f"{POOL}.set_mla_kv_buffer", "764ef270ba66b00c"),
    stock_pin(f"{POOL}.set_kv_buffer", "2befb62d015f52c2"),
)
STOCK_ROWS = (
    stock_pin(f"{POOLS}:DSATokenToKVPool.__init__", "9ba3b02ce9f6a477"),
    stock_pin(f"{POOL}._write_mla_kv_buffer", "8321b73993618b9d"),
    stock_pin(f"{KERNELS}.quant_k_cache:quantize_k_cache_separate", "4442f66065fc60fd"),
    stock_pin(f"{KERNELS}.quant_k_cache:_quantize_k_cache_fast_separate", "5e052347c4195e71"),
)
"""How stock writes its FP8 rows of sparse MLA."""
READERS = (
    stock_pin(f"{POOL}.get_mla_kv_buffer", "26a7673d09319999"),
    stock_pin(f"{POOL}.get_key_buffer", "b38801294ac3d7c7"),
    stock_pin(f"{POOL}.get_value_buffer", "3ff38febb16be978"),
)
ROW_COPIES = (
    stock_pin(f"{POOL}._create_buffers", "79d30d270d450586"),
    stock_pin(f"{POOL}.move_kv_cache", "b1de102d111c0ee9"),
    stock_pin(f"{POOL}.get_cpu_copy", "9a1c441d0c922239"),
    stock_pin(f"{POOL}.load_cpu_copy", "15828d522382bb5c"),
    stock_pin(f"{POOL}.get_kv_size_bytes", "97e3d9dfc7066870"),
)
"""What allocates and copies whole rows of an MLA pool, whatever is in them."""
ATTENTION_CALLS = (
    stock_pin(f"{BACKEND}._forward_flashmla_kv", "296ce7763b6accbd"),
    stock_pin(f"{BACKEND}.forward_extend", "9f3e30691c9cc85b"),
    stock_pin(f"{BACKEND}.forward_decode", "6e99dc0ce6a2901e"),
    stock_pin(f"{BACKEND}.get_topk_transform_method", "d7fb2e8e5a091eba"),
)
SCHEDULES = (
    stock_pin(f"{BACKEND}._compute_flashmla_metadata", "9c56dcf17e8f4b05"),
    # Who keeps the schedules of captured graphs, and refreshes them before a replay; what metadata counts, by mode.
    stock_pin(f"{BACKEND}.init_cuda_graph_state", "79b272c30e0f91ac"),
    stock_pin(f"{BACKEND}._build_forward_metadata_cuda_graph", "08034b361c41729a"),
    stock_pin(f"{BACKEND}._apply_cuda_graph_metadata", "e5c8eb86db863719"),
    stock_pin(f"{BACKEND}.init_forward_metadata", "057d939546018541"),
)


def kept_rows_hooks(feature: str, ours: str) -> tuple[Hook, ...]:
    """The hooks, numbered from 01.

    Args:
        feature: id of the feature.
        ours: module of its adapter, with `after_backend` and a `ScratchRows` named ``ROWS``.
    """
    sizing = f"{SIZING}:create_memory_pool_configurator"
    width = f"{CONFIGURATOR}:calculate_mla_kv_cache_dim"
    return (
        Hook(
            id=f"{feature}.01",
            target=sizing,
            kind="before",
            call=f"{ours}:ROWS.before_pool_sizing",
            pins=(stock_pin(sizing, "3fa65491f3cd9416"),),
        ),
        Hook(
            id=f"{feature}.02",
            target=width,
            kind="around",
            call=f"{ours}:ROWS.around_width",
            pins=(
                stock_pin(width, "24d289146cfc6db0"),
                # Who asks for the width: sizing, and the builders of the pools.
                Pin(
                    f"{SIZING}:DefaultPoolConfigurator._compute_cell_size",
                    {
                        STOCK: "2d634316c894ebf2",
                        f"{STOCK} + upstream.fp4_workspace_sizing": "dcd8f9b5a4ac90b7",
                    },
                ),
                stock_pin(
                    f"{SIZING}:DefaultPoolConfigurator._compute_dsa_indexer_cell_size",
                    "e4cbe5027706a98b",
                ),
                stock_pin(
                    f"{CONFIGURATOR}:KVCacheConfigurator._build_dsa_kv_pool", "13d6f0b2ba6122aa"
                ),
                stock_pin(
                    f"{CONFIGURATOR}:KVCacheConfigurator._build_hybrid_linear_kv_pool",
                    "10332d90b89100ed",
                ),
                stock_pin(f"{CONFIGURATOR}:_should_elide_dsa_index_k", "50a5b5636ac9eae3"),
            ),
        ),
        Hook(
            id=f"{feature}.03",
            target=f"{BACKEND}.__init__",
            kind="after",
            call=f"{ours}:after_backend",
            pins=(
                stock_pin(f"{BACKEND}.__init__", "3a45fa68f9968b19"),
                HYBRID_POOL,
                stock_pin(f"{POOLS}:DSATokenToKVPool.__init__", "9ba3b02ce9f6a477"),
                MLA_POOL,
                *ROW_COPIES,
                stock_pin(f"{POOL}.get_contiguous_buf_infos", "8afe3df8739d03fe"),
                stock_pin(f"{POOLS}:DSATokenToKVPool.move_kv_cache", "fb9aaf75ad562736"),
                stock_pin(f"{POOLS}:DSATokenToKVPool.get_cpu_copy", "a04011c4df47d33d"),
                stock_pin(f"{POOLS}:DSATokenToKVPool.load_cpu_copy", "84418e5e441a3808"),
            ),
        ),
        Hook(
            id=f"{feature}.04",
            target=f"{POOL}._write_mla_kv_buffer",
            kind="around",
            call=f"{ours}:ROWS.around_write",
            pins=(
                *WRITERS,
                # Of hybrid models, and one that writes for TRT-LLM alone.
                stock_pin(f"{POOLS}:HybridLinearKVPool.set_mla_kv_buffer", "60ce8386a6a5ff3d"),
                stock_pin(
                    f"{FORWARDS}.forward_mla:DeepseekMLAForwardMixin._fuse_rope_for_trtllm_mla",
                    "ff7ed25064fd13a9",
                ),
            ),
        ),
        Hook(
            id=f"{feature}.05",
            target=f"{POOL}.get_mla_kv_buffer",
            kind="around",
            call=f"{ours}:ROWS.around_read",
            pins=READERS,
        ),
        Hook(
            id=f"{feature}.06",
            target=f"{POOL}.get_value_buffer",
            kind="around",
            call=f"{ours}:ROWS.around_values",
            pins=READERS,
        ),
        Hook(
            id=f"{feature}.07",
            target=f"{BACKEND}._forward_flashmla_kv",
            kind="around",
            call=f"{ours}:ROWS.around_attention",
            pins=(*ATTENTION_CALLS, *SCHEDULES),
        ),
    )
