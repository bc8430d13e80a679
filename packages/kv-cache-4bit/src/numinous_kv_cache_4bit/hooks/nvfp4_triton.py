# SPDX-License-Identifier: Apache-2.0
"""Declaration of ``kv4.nvfp4_triton``: NVFP4 in the cache of MHA and GQA models, on the Triton attention backend and on the CPU platform.

*Seam*      the two sizings, the builders of a uniform MHA pool (two), of that of models with sliding windows and of that of models with linear attention, the two methods through
            which attention backends are called, the constructor of the Triton backend, which names the two kernels it calls, and what lets models write to a bf16 pool themselves.
*Why*       Stock 0.5.20 takes ``--kv-cache-dtype nvfp4`` on Blackwell only, not on its Triton backend (which ends with a KeyError there), and
            nowhere without CUDA. Nobody can ask what it costs a model without the GPU.
*Flag*      ``NUMINOUS_KV4_NVFP4_TRITON=1``, without ``--kv-cache-dtype``. ``…_KEYS=fp8`` keeps keys in FP8, ``…_SCALES=mse`` searches block scales.
*Neighbour* stock's FP8 cache of the same model: ``numinous gate kv4`` runs it as the yardstick.
*Undo*      leave the flag unset.
"""

from __future__ import annotations

from collections.abc import Iterator

from numinous_kv_cache_4bit.hooks.launch import UNCOVERED, text_of
from numinous_kv_cache_4bit.options import CPU_PLATFORM, NVFP4_KEYS, NVFP4_SCALES, NVFP4_TRITON
from numinous_tooling.patching import Feature, Hook, Pin, stock_pin
from numinous_tooling.patching.feature import STOCK
from numinous_tooling.patching.serve_command import ServeCommand

ATTENTION = "sglang.srt.layers.attention"
CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator"
FORWARD = f"{ATTENTION}.base_attn_backend:AttentionBackend.forward"
HYBRID = f"{ATTENTION}.hybrid_linear_attn_backend:HybridLinearAttnBackend"
HYBRID_POOL = "sglang.srt.mem_cache.memory_pool:HybridLinearKVPool"
FUSED_WRITE = "sglang.srt.models.utils:enable_fused_set_kv_buffer"
NATIVE = f"{ATTENTION}.torch_native_backend:TorchNativeAttnBackend"
OURS = "numinous_kv_cache_4bit.engine.nvfp4_triton"
POOL = "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool"
SIZING = "sglang.srt.model_executor.pool_configurator"
SLIDING_POOL = "sglang.srt.mem_cache.swa_memory_pool:SWAKVPool"
TRITON = f"{ATTENTION}.triton_backend:TritonAttnBackend"

POOL_PINS = tuple(
    Pin(
        f"{POOL}.{name}",
        {STOCK: digest} | ({f"{STOCK} + upstream.{fix[0]}": fix[1]} if fix else {}),
    )
    for name, digest, *fix in (
        ("__init__", "aa41d0b184210685"),
        ("_clear_buffers", "330b1e62da320dd9"),
        ("_build_kv_buffer_descs", "e3278f840b48f4b5"),
        ("_init_data_ptrs_and_strides", "84a26b981aee8dfb"),
        ("_slot_move_pointer_buffers", "28835cf2b35591c4"),
        ("_move_kv_cache_impl", "883b896b19b20d00"),
        ("move_kv_cache", "116fd741b44a31d6"),
        ("get_kv_size_bytes", "df3dbd4229568fdc"),
        ("get_cpu_copy", "936f02d89bc6506c", "fp4_host_copy_scales", "30564a585ae85f3d"),
        ("load_cpu_copy", "a31c3c103cd6170e", "fp4_host_copy_scales", "08d70a0ed14eb05b"),
        ("get_contiguous_buf_infos", "395d1f2b1c9d9b64"),
        ("get_key_buffer", "09db77fd022b10ff"),
        ("get_value_buffer", "770de8c48605dc0b"),
        ("get_kv_buffer", "90ec8e1bb3066fdc"),
        ("set_kv_buffer", "41361be959e33d6f", "fp8_kv_store", "da0d20febc1334bc"),
        (
            "set_kv_buffer_prefix_valid",
            "4eb19dc9dadee855",
            "fp4_prefix_valid_commit",
            "5fee24683016cb19",
        ),
    )
)
"""What the pool inherits, and what it answers in place of stock's."""

FEATURE = Feature(
    id=NVFP4_TRITON,
    sentence="NVFP4 KV cache for MHA and GQA models: 1.78 times the tokens of FP8; on any CPU it tells what that costs a model.",
    arch={"cpu": "run", "sm90": "emulated"},
    patches=(
        Hook(
            id="kv4.nvfp4_triton.01",
            target=f"{SIZING}:create_memory_pool_configurator",
            kind="before",
            call=f"{OURS}:before_pool_sizing",
            pins=(stock_pin(f"{SIZING}:create_memory_pool_configurator", "3fa65491f3cd9416"),),
        ),
        Hook(
            id="kv4.nvfp4_triton.02",
            target=f"{SIZING}:DefaultPoolConfigurator.__init__",
            kind="after",
            call=f"{OURS}:after_sizing",
            pins=(
                stock_pin(f"{SIZING}:DefaultPoolConfigurator.__init__", "35ccf4b3bf39d749"),
                stock_pin(f"{SIZING}:DefaultPoolConfigurator.calculate_pool_sizes", "b3786d5e706bd353"),
            ),
        ),
        *(
            Hook(
                id=f"kv4.nvfp4_triton.0{number}",
                target=f"{CONFIGURATOR}.{builder}",
                kind="around",
                call=f"{OURS}:around_pool",
                pins=(
                    stock_pin(f"{CONFIGURATOR}.{builder}", digest),
                    *POOL_PINS,
                ),
            )
            for number, builder, digest in (
                (3, "_build_mha_kv_pool", "a1af75ac25f24d19"),
                (4, "_build_oot_mha_kv_pool", "a26b5d90bbfcdd68"),
            )
        ),
        Hook(
            id="kv4.nvfp4_triton.05",
            target=f"{CONFIGURATOR}._build_token_to_kv_pool",
            kind="after",
            call=f"{OURS}:after_pools",
            pins=(stock_pin(f"{CONFIGURATOR}._build_token_to_kv_pool", "d7ebafc068dd9aa5"),),
        ),
        Hook(
            id="kv4.nvfp4_triton.06",
            target=FORWARD,
            kind="around",
            call=f"{OURS}:around_attention",
            pins=(
                stock_pin(FORWARD, "a511d153756514ca"),
                # Who write first, then ask the pool for the layer, and read no more than `req_to_token` up to the lengths.
                stock_pin(f"{NATIVE}.forward_extend", "7fd81f65f115b8aa"),
                stock_pin(f"{NATIVE}.forward_decode", "830f8765d69aca20"),
                stock_pin(f"{NATIVE}._run_sdpa_forward_extend", "b92a93d8052d4f7c"),
                stock_pin(f"{NATIVE}._run_sdpa_forward_decode", "24a194613adc287c"),
            ),
        ),
        Hook(
            id="kv4.nvfp4_triton.07",
            target=f"{TRITON}.__init__",
            kind="after",
            call=f"{OURS}:after_triton_backend",
            pins=(
                stock_pin(f"{TRITON}.__init__", "6cc08abb69138bad"),
                # How the two kernels are called, and with which ids.
                stock_pin(f"{TRITON}.forward_extend", "200453b6528d8834"),
                stock_pin(f"{TRITON}.forward_decode", "f4d2bb84d1cb385e"),
                Pin(
                    f"{TRITON}.init_forward_metadata",
                    {
                        STOCK: "78f4c6b8116823b9",
                        # One key more for sliding windows; ids are handed over as before.
                        f"{STOCK} + upstream.triton_decode_window": "ec1a1b3bae1593b6",
                    },
                ),
                stock_pin("sglang.kernels.ops.attention.extend_attention:extend_attention_fwd", "940b192da876f515"),
                stock_pin("sglang.kernels.ops.attention.decode_attention:decode_attention_fwd", "3bd6c9569ebad34c"),
            ),
        ),
        Hook(
            id="kv4.nvfp4_triton.08",
            target=FUSED_WRITE,
            kind="around",
            call=f"{OURS}:around_fused_write",
            pins=(stock_pin(FUSED_WRITE, "b3fc310b61cd4265"),),
        ),
        Hook(
            id="kv4.nvfp4_triton.09",
            target=f"{SIZING}:HybridSWAPoolConfigurator.__init__",
            kind="after",
            call=f"{OURS}:after_sliding_sizing",
            pins=(
                Pin(
                    f"{SIZING}:HybridSWAPoolConfigurator.__init__",
                    {STOCK: "5ba13320eae10b50", f"{STOCK} + upstream.swa_fp4_pool": "7528e453917227ca"},
                ),
                stock_pin(f"{SIZING}:HybridSWAPoolConfigurator._recompute_cell_size", "679e6d88b0974eac"),
                stock_pin(f"{SIZING}:HybridSWAPoolConfigurator.calculate_pool_sizes", "49308862c3d890b0"),
                stock_pin(f"{SIZING}:HybridSWAPoolConfigurator._solve_pool_sizes", "b327aed47e8c1125"),
                # The subclass, which asks for the bytes of a token afterwards.
                stock_pin(f"{SIZING}:SWAChunkCapPoolConfigurator.__init__", "70c1f75d4e5a6cb0"),
                stock_pin(f"{SIZING}:SWAChunkCapPoolConfigurator.calculate_pool_sizes", "583c42678126c603"),
            ),
        ),
        Hook(
            id="kv4.nvfp4_triton.10",
            target=f"{CONFIGURATOR}._build_hybrid_swa_kv_pool",
            kind="around",
            call=f"{OURS}:around_sliding_pool",
            pins=(
                Pin(
                    f"{CONFIGURATOR}._build_hybrid_swa_kv_pool",
                    {STOCK: "ad16f866961fa35c", f"{STOCK} + upstream.swa_fp4_pool": "76bad034529d2d9e"},
                ),
                *(
                    stock_pin(f"{SLIDING_POOL}.{name}", digest)
                    for name, digest in (
                        ("__init__", "3a557fb958541482"),
                        ("get_kv_size_bytes", "3eae0f5cc44f6b3e"),
                        ("get_key_buffer", "40a41e8fd3e08ce5"),
                        ("get_value_buffer", "887f3c6cf6b25104"),
                        ("translate_loc_from_full_to_swa", "ccdfd098f87aab23"),
                        ("set_kv_buffer", "489020200a1d2253"),
                        ("move_kv_cache", "a4e048992d4b9057"),
                        ("_filter_swa_cpu_copy", "ee3396498c995567"),
                        ("get_cpu_copy", "27651832996ca972"),
                        ("load_cpu_copy", "0ab530523a585b31"),
                    )
                ),
                # Lists of sliding layers hold ids of their own pool.
                stock_pin(f"{ATTENTION}.triton_backend:update_sliding_window_buffer", "7d1e644d298088b8"),
            ),
        ),
        Hook(
            id="kv4.nvfp4_triton.11",
            target=f"{CONFIGURATOR}._build_hybrid_linear_kv_pool",
            kind="around",
            call=f"{OURS}:around_hybrid_pool",
            pins=(
                stock_pin(f"{CONFIGURATOR}._build_hybrid_linear_kv_pool", "10332d90b89100ed"),
                # The states' share of the memory, taken before the cache's; it does not ask for the bytes of a token.
                stock_pin(f"{CONFIGURATOR}._handle_max_mamba_cache", "226c892d78fc52a8"),
                Pin(
                    f"{HYBRID_POOL}.__init__",
                    {STOCK: "533247d513bf8d45", f"{STOCK} + upstream.hybrid_mla_fp4_pool": "d46255a1221ab14f"},
                ),
                *(
                    stock_pin(f"{HYBRID_POOL}.{name}", digest)
                    for name, digest in (
                        ("get_kv_size_bytes", "eb07a6a0f29d998e"),
                        ("get_contiguous_buf_infos", "011fefcbb1ee8a45"),
                        ("_transfer_full_attention_id", "db31194c128ef0c9"),
                        ("get_key_buffer", "e627738a7f32b618"),
                        ("get_value_buffer", "81c73b0757a996a5"),
                        ("get_v_head_dim", "f2319fe45e8738f4"),
                        ("set_kv_buffer", "82bf3a2394f41a66"),
                        ("move_kv_cache", "f3df55b41417fef3"),
                        ("get_cpu_copy", "af9a1cb17272e086"),
                        ("load_cpu_copy", "c53dfbc7498b45a4"),
                    )
                ),
            ),
        ),
        Hook(
            id="kv4.nvfp4_triton.12",
            target=f"{HYBRID}.forward",
            kind="around",
            call=f"{OURS}:around_hybrid_attention",
            pins=tuple(
                stock_pin(f"{HYBRID}.{name}", digest)
                for name, digest in (
                    ("forward", "a309e459e2379bac"),
                    # It passes by the method that the other hook is around.
                    ("forward_extend", "320c71f9616e54a2"),
                    ("forward_decode", "6df70381e6489bb7"),
                    ("_is_full_attn", "768309f2facdfd33"),
                    ("__init__", "6833310e27e51e5c"),
                )
            ),
        ),
    ),
    options=(NVFP4_KEYS, NVFP4_SCALES),
    judge="numinous_kv_cache_4bit.hooks.nvfp4_triton:judge",
    upstream="none",
)  # fmt: skip

BACKENDS = ("triton", "torch_native")
BACKEND_ARGUMENTS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
)
MORE_UNCOVERED = {
    "enable_memory_saver": "untested",
    "enable_mixed_chunk": "untested",
    "enable_page_major_kv_layout": "it is a layout of the plain pool",
    "enable_torch_compile": "untested",
    "prefill_only_disable_kv_cache": "there would be no cache",
}


def judge(command: ServeCommand) -> Iterator[str]:
    """Why this launch cannot use the feature, one line each."""
    on_cpu = command.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM
    if (dtype := command.get("kv_cache_dtype")) not in ("auto", "bf16", "bfloat16"):
        yield f"--kv-cache-dtype {dtype} is another cache; leave the flag out, {NVFP4_TRITON} is chosen by its own"
    covered = BACKENDS if on_cpu else BACKENDS[:1]
    for name in BACKEND_ARGUMENTS:
        if (value := command.get(name)) not in (None, *covered):
            flag = "--" + name.replace("_", "-")
            yield f"{flag} {value} is not covered; {' and '.join(covered)} {'are' if on_cpu else 'is'}"
    if not on_cpu:
        if command.get("attention_backend") is None:
            yield "the engine would choose another attention backend: add --attention-backend triton"
        graphs = command.get("cuda_graph_backend_prefill") != "disabled"
        if graphs and not any(
            map(command.get, ("disable_cuda_graph", "disable_prefill_cuda_graph"))
        ):
            yield "a captured prefill cannot read a prefix of any length: add --cuda-graph-backend-prefill disabled"
        if (page := command.get("page_size")) not in (None, 1):
            yield f"--page-size {page} is not covered (untested); leave the flag out"
    if command.get("speculative_algorithm") is not None:
        yield "speculative decoding is not covered: its verification would need a prefix in bf16 within a captured graph"
    for name, what in (UNCOVERED | MORE_UNCOVERED).items():
        if command.get(name):
            yield f"--{name.replace('_', '-')} is not covered: {what}"
    for name in ("dcp_size", "pp_size"):
        if command.get(name) > 1:
            yield f"--{name.replace('_', '-')} > 1 is not covered (untested)"
    if command.get("disaggregation_mode") not in (None, "null"):
        yield "prefill/decode disaggregation is not covered: stock registers data without block scales"
    if command.get("quantization_param_path") is not None:
        yield "--quantization-param-path: blocks have scales of their own; leave the flag out"
    if command.model_config is not None:
        yield from _judge_model(text_of(command.model_config))


def _judge_model(model: dict[str, object]) -> Iterator[str]:
    if model.get("kv_lora_rank"):
        yield "made for MHA and GQA models, this one has MLA; see kv4.mla_dense"
    heads, hidden = model.get("num_attention_heads"), model.get("hidden_size")
    dim = model.get("head_dim")
    if dim is None and isinstance(heads, int) and isinstance(hidden, int):
        dim = hidden // heads
    if isinstance(dim, int) and dim % 16:
        yield f"NVFP4 has a scale per 16 values, this model's heads have {dim}"
