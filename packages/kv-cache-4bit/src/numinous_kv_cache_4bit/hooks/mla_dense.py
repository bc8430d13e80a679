# SPDX-License-Identifier: Apache-2.0
"""Declaration of ``kv4.mla_dense``: 4-bit rows (352 bytes) in the cache of dense MLA models, DeepSeek V2 / V3 and Kimi K2.7, on Hopper.

*Seam*      the function that says which dtype the cache has, the sizing, the builder of the pool, and the one method through which
            every attention backend is called.
*Why*       Stock 0.5.20 has a 4-bit pool for dense MLA that Hopper's backends do not take (``nvfp4`` needs Blackwell, ``fp4_mx_block16``
            wants flashinfer and dequantises a whole layer of the pool at each read), and FP8 rows of 576 bytes.
*Flag*      ``NUMINOUS_KV4_MLA_DENSE=1`` with ``--kv-cache-dtype fp8_e4m3``.
*Neighbour* stock's FP8 and bf16 caches of the same model; benchmarks run both as arms.
*Undo*      leave the flag unset.
"""

from __future__ import annotations

from collections.abc import Iterator

from numinous_kv_cache_4bit.hooks.kept_rows import (
    ATTENTION,
    MLA_POOL,
    POOL,
    READERS,
    ROW_COPIES,
    WRITERS,
)
from numinous_kv_cache_4bit.hooks.launch import judge_rows, prefill_graphs, text_of
from numinous_kv_cache_4bit.options import (
    DECODE,
    DENSE_ARCHITECTURES,
    DENSE_BACKENDS,
    MLA_DENSE,
    NATIVE,
    NATIVE_DENSE_BACKENDS,
    SCRATCH,
)
from numinous_tooling.formats import KV4, LATENT_DIM
from numinous_tooling.patching import Feature, Hook, Pin, stock_pin
from numinous_tooling.patching.feature import STOCK
from numinous_tooling.patching.flags import option_value
from numinous_tooling.patching.serve_command import ServeCommand

CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator"
DTYPE = "sglang.srt.mem_cache.kv_cache_dtype:configure_kv_cache_dtype"
FA = f"{ATTENTION}.flashattention_backend:FlashAttentionBackend"
FLASHINFER = f"{ATTENTION}.flashinfer_mla_backend:FlashInferMLAAttnBackend"
FLASHMLA = f"{ATTENTION}.flashmla_backend:FlashMLABackend"
HYBRID = f"{ATTENTION}.hybrid_attn_backend:HybridAttnBackend"
JOIN = "sglang.kernels.ops.attention.utils:concat_mla_absorb_q_general"
FORWARD = f"{ATTENTION}.base_attn_backend:AttentionBackend.forward"
MHA = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha:DeepseekMHAForwardMixin"
OURS = "numinous_kv_cache_4bit.engine.mla_dense"
SIZING = "sglang.srt.model_executor.pool_configurator:DefaultPoolConfigurator"
TRITON = f"{ATTENTION}.triton_backend:TritonAttnBackend"

FEATURE = Feature(
    id=MLA_DENSE,
    sentence="4-bit KV cache for dense MLA (DeepSeek V3, Kimi K2.7) on Hopper: with 61 layers 1.55 times the tokens of FP8.",
    arch={"sm90": "emulated"},
    patches=(
        Hook(
            id="kv4.mla_dense.01",
            target=DTYPE,
            kind="around",
            call=f"{OURS}:around_dtype",
            pins=(
                Pin(
                    DTYPE,
                    {
                        STOCK: "32eda4c198e8f603",
                        f"{STOCK} + upstream.kv_cache_dtype_silent": "dccf4881a164e119",
                    },
                ),
                stock_pin(
                    "sglang.srt.model_executor.model_runner:ModelRunner.configure_kv_cache_dtype",
                    "7f4b70e415cd9a45",
                ),
                # Who reads the dtype that it gives: of queries and descales, and of keys in multi-head attention.
                stock_pin(f"{FA}.__init__", "626212838b44cd0a"),
                stock_pin(f"{FA}.prepare_paged_mha_query", "2a8833fe1bb7454c"),
                stock_pin(f"{FLASHMLA}.__init__", "aea5c2858135e37f"),
                stock_pin(f"{FLASHINFER}.__init__", "5c0620fd1e5a2602"),
                stock_pin(f"{TRITON}.__init__", "6cc08abb69138bad"),
                stock_pin(f"{MHA}._concat_and_cast_mha_k", "6f8a322f7b03a3a8"),
            ),
        ),
        Hook(
            id="kv4.mla_dense.02",
            target=f"{SIZING}.__init__",
            kind="after",
            call=f"{OURS}:after_sizing",
            pins=(
                stock_pin(f"{SIZING}.__init__", "35ccf4b3bf39d749"),
                stock_pin(f"{SIZING}.calculate_pool_sizes", "b3786d5e706bd353"),
            ),
        ),
        Hook(
            id="kv4.mla_dense.03",
            target=f"{CONFIGURATOR}._build_mla_kv_pool",
            kind="around",
            call=f"{OURS}:around_pool",
            pins=(
                stock_pin(f"{CONFIGURATOR}._build_mla_kv_pool", "48254ab9d8e704ad"),
                # What the pool inherits, and what it answers in place of stock's.
                MLA_POOL,
                *ROW_COPIES,
                stock_pin(f"{POOL}._clear_buffers", "ffdfbf6694a1d697"),
                *READERS,
                stock_pin(f"{POOL}.get_kv_buffer", "90ec8e1bb3066fdc"),
                *WRITERS,
                # When the scheduler may write to the table that is read in each layer.
                stock_pin(
                    "sglang.srt.managers.scheduler:Scheduler._apply_war_barrier", "cb3bed8682e85891"
                ),
            ),
        ),
        Hook(
            id="kv4.mla_dense.04",
            target=f"{CONFIGURATOR}._build_token_to_kv_pool",
            kind="after",
            call=f"{OURS}:after_pools",
            pins=(stock_pin(f"{CONFIGURATOR}._build_token_to_kv_pool", "d7ebafc068dd9aa5"),),
        ),
        Hook(
            id="kv4.mla_dense.05",
            target=FORWARD,
            kind="around",
            call=f"{OURS}:around_attention",
            pins=(
                stock_pin(FORWARD, "a511d153756514ca"),
                # Who write first, then ask the pool for the layer, and read no more than `req_to_token` up to the lengths.
                stock_pin(f"{FA}.init_forward_metadata", "f8fdf08059ec9a26"),
                stock_pin(f"{FA}.forward_extend", "f2306ab53b367d45"),
                stock_pin(f"{FA}.forward_decode", "04fdb55d484c0d78"),
                stock_pin(f"{FLASHMLA}.forward_extend", "210ce53a8e5c6c40"),
                stock_pin(f"{FLASHMLA}.forward_decode", "229e9e9cbddcb557"),
                stock_pin(f"{FLASHINFER}.forward_extend", "af4c4abc0f2f964c"),
                stock_pin(f"{FLASHINFER}.forward_decode", "f83bee15629c25ac"),
                stock_pin(f"{TRITON}.forward_extend", "200453b6528d8834"),
                stock_pin(f"{TRITON}.forward_decode", "f4d2bb84d1cb385e"),
                # Whose page tables native decode reads: made, kept for graphs and refilled there.
                stock_pin(f"{FA}._bind_metadata_buffers", "40e7d243015f659b"),
                stock_pin(f"{FA}._apply_cuda_graph_metadata", "ddd63a4bf99c54fa"),
                stock_pin(f"{FA}._set_decode_page_metadata", "b5c0b80f9927979e"),
                stock_pin(f"{FLASHMLA}.init_forward_metadata", "a12b76e7ae5422df"),
                stock_pin(f"{FLASHMLA}._eager_block_kv_indices", "75de81487a2aa16f"),
                stock_pin(f"{FLASHMLA}._apply_decode_target_verify_metadata", "1b960a8cbc81ad36"),
                stock_pin(f"{HYBRID}._select_backend", "7c5b1785fa16561c"),
                stock_pin(JOIN, "993086be2c20099a"),
                # Who read a cached prefix past the backends.
                stock_pin(f"{MHA}.forward_normal_prepare", "ef4bc197819320a9"),
                stock_pin(f"{MHA}._chunked_prefix_attn_mha", "5ce4e9fa4b3e1955"),
                stock_pin(f"{MHA}._set_mla_kv_buffer", "d84a8e6982fe31a5"),
                stock_pin(f"{MHA}._get_mla_kv_buffer", "62d2f8ca633fa50c"),
            ),
        ),
    ),
    options=(DECODE[MLA_DENSE],),
    judge="numinous_kv_cache_4bit.hooks.mla_dense:judge",
    upstream="none",
)

BACKEND_ARGUMENTS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_draft_attention_backend",
)


def judge(command: ServeCommand) -> Iterator[str]:
    """Why this launch cannot use the feature, one line each."""
    yield from judge_rows(command, KV4, DENSE_ARCHITECTURES, prefill=())
    for name in BACKEND_ARGUMENTS:
        if (value := command.get(name)) not in (None, *DENSE_BACKENDS):
            flag = "--" + name.replace("_", "-")
            yield f"{flag} {value} is not covered; {', '.join(DENSE_BACKENDS)} are"
    if option_value(DECODE[MLA_DENSE], command.environ) == NATIVE:
        yield from _judge_native(command)
    if "full" in (command.get("cuda_graph_backend_prefill"), prefill_graphs(command)):
        yield "--cuda-graph-backend-prefill full (also as --cuda-graph-config) is not covered: it captures lengths of its own"
    if command.get("enable_memory_saver"):
        yield "--enable-memory-saver is not covered: the shadow is not released with the pool"
    if command.get("enable_torch_compile"):
        yield "--enable-torch-compile is not covered (untested)"
    if command.get("quantization_param_path") is not None:
        yield "--quantization-param-path: rows have scales of their own; leave the flag out"
    model = text_of(command.model_config or {})
    have = (model.get("kv_lora_rank", LATENT_DIM), model.get("qk_rope_head_dim", KV4.rope_dim))
    if have != (LATENT_DIM, KV4.rope_dim):
        yield f"rows hold {LATENT_DIM} latent and {KV4.rope_dim} rope values, this model has {have[0]} and {have[1]}"


def _judge_native(command: ServeCommand) -> Iterator[str]:
    """Native decode reads the page tables of some backends, with pages of 64 tokens."""
    mend = f"or set {DECODE[MLA_DENSE].name}={SCRATCH}"
    both = command.get("attention_backend")
    decode = command.get("decode_attention_backend") or both
    used = {decode, command.get("speculative_draft_attention_backend")}
    if command.get("speculative_attention_mode") == "prefill":
        used.add(command.get("prefill_attention_backend") or both)
    for name in sorted(used - {None, *NATIVE_DENSE_BACKENDS}):
        yield f"native decode reads the page tables of {' and '.join(NATIVE_DENSE_BACKENDS)}, not of {name}: choose one of them, {mend}"
    # FlashMLA's pages have that size whatever is asked for.
    if decode != "flashmla" and command.get("page_size") != 64:
        yield f"native decode reads pages of 64 tokens: add --page-size 64, {mend}"
