# SPDX-License-Identifier: Apache-2.0
"""Declaration of ``attention.gemma_glue``: norms, rotation and cache write of Gemma's attention by one kernel.

*Seam*      `Gemma4Attention.forward` and `Gemma3Attention.forward`: the kernel stands between their projection and their attention.
*Why*       Stock 0.5.20 launches three kernels there for Gemma 4 (with a scaled FP8 cache nine), for Gemma 3 the norms in torch; each reads what the one before has written.
            Its own fusion of rotation and write is switched off: it writes a window's keys to slots of the full pool (docs/kernels/qk_norm_rope_store.md).
*Flag*      ``NUMINOUS_ATTENTION_GEMMA_GLUE=1``, with the Triton or the FlashAttention-3 backend.
*Beside*    the other features of the room, which change what attends; this one what comes before.
*Neighbour* none that is switched on in stock.
*Undo*      leave the flag unset.
"""

from __future__ import annotations

from collections.abc import Iterator

from numinous_attention.hooks.gqa_extend import TRITON_BY_DEFAULT
from numinous_attention.hooks.launch import CACHES, graph_kind, uncovered
from numinous_attention.options import GEMMA_GLUE
from numinous_tooling.patching import Feature, Hook, Pin, stock_pin
from numinous_tooling.patching.feature import STOCK
from numinous_tooling.patching.serve_command import ServeCommand

ENGINE = "sglang.srt"
OURS = "numinous_attention.engine.gemma_glue"
GEMMA3 = f"{ENGINE}.models.gemma3_causal"
GEMMA4 = f"{ENGINE}.models.gemma4_causal"
LAYERS = f"{ENGINE}.layers"
ROTARY = f"{LAYERS}.rotary_embedding"
TRITON = f"{LAYERS}.attention.triton_backend:TritonAttnBackend"
FLASH = f"{LAYERS}.attention.flashattention_backend:FlashAttentionBackend"
POOLS = f"{ENGINE}.mem_cache.memory_pool"
SWA = f"{ENGINE}.mem_cache.swa_memory_pool:SWAKVPool"
BUILD = f"{ENGINE}.model_executor.model_runner_components.attention_backend_setup:build_attention_backends"

FEATURE = Feature(
    id=GEMMA_GLUE,
    sentence="Gemma 3 and 4: norms, rotary embedding and cache write of a layer in one kernel, on the Triton and FlashAttention-3 backends.",
    arch={"cpu": "emulated"} | dict.fromkeys(("sm90", "sm100", "sm103", "sm120"), "compiled"),
    patches=(
        Hook(
            id=f"{GEMMA_GLUE}.01",
            target=f"{GEMMA4}:Gemma4Attention.forward",
            kind="around",
            call=f"{OURS}:around_gemma4",
            pins=(
                stock_pin(f"{GEMMA4}:Gemma4Attention.forward", "cabc7d84954a8793"),
                stock_pin(f"{GEMMA4}:Gemma4Attention.__init__", "bd8167e833346825"),
                # Who makes a layer read another model's cache.
                stock_pin(f"{ENGINE}.models.gemma4_mtp:Gemma4AssistantForCausalLM.bind_frozen_kv_context", "ec5d66844f947eb6"),
                # What the kernel stands in for.
                stock_pin("sglang.kernels.ops.layernorm.gemma4_fused_ops:gemma_qkv_rmsnorm", "a322d2556f13c2c4"),
                stock_pin(f"{LAYERS}.layernorm:Gemma4RMSNorm.__init__", "114195b6559a65b3"),
                stock_pin(f"{LAYERS}.layernorm:Gemma4RMSNorm.forward_native", "d0640bd08ee110ed"),
                stock_pin(f"{ROTARY}.base:RotaryEmbedding.__init__", "de2d1a9af2782656"),
                stock_pin(f"{ROTARY}.base:RotaryEmbedding.forward_cuda", "aff7487a469865b0"),
                stock_pin("sglang.kernels.ops.attention.rope:apply_rope_with_cos_sin_cache_inplace", "9c78bd05dfdc4e02"),
                stock_pin(f"{ROTARY}.rope_variant:Gemma4RotaryEmbedding.__init__", "71d09f80d405e1b1"),
                stock_pin(f"{ROTARY}.rope_variant:Gemma4RotaryEmbedding._compute_inv_freq", "ce9d94dee2dd8360"),
            ),
        ),
        Hook(
            id=f"{GEMMA_GLUE}.02",
            target=f"{GEMMA3}:Gemma3Attention.forward",
            kind="around",
            call=f"{OURS}:around_gemma3",
            pins=(
                stock_pin(f"{GEMMA3}:Gemma3Attention.forward", "2175df39af835f0c"),
                stock_pin(f"{GEMMA3}:Gemma3Attention.forward_native", "9e017323fb1584ed"),
                stock_pin(f"{GEMMA3}:Gemma3Attention.__init__", "f47e684af64dd10c"),
                # Who computes cosines and sines, and which layer gets which.
                stock_pin(f"{GEMMA3}:Gemma3RotaryEmbedding.forward", "3c5f0494d8156435"),
                stock_pin(f"{GEMMA3}:Gemma3DecoderLayer.forward", "38d33383daa6be30"),
                stock_pin(f"{LAYERS}.layernorm:Gemma3RMSNorm.__init__", "8f12a5634c44df4b"),
                stock_pin(f"{LAYERS}.layernorm:Gemma3RMSNorm.forward_native", "f8c82e73c01b8ded"),
                stock_pin(f"{ROTARY}.utils:apply_rotary_pos_emb_native_eager", "79550fc2ee282097"),
            ),
        ),
        Hook(
            id=f"{GEMMA_GLUE}.03",
            target=BUILD,
            kind="after",
            call=f"{OURS}:after_build",
            pins=(
                stock_pin(BUILD, "29bd66f6758dfed5"),
                # Who would write, where to, and who reads k and v beside the cache.
                stock_pin(f"{LAYERS}.radix_attention:RadixAttention.__init__", "54000c8a316232bf"),
                stock_pin(f"{LAYERS}.radix_attention:RadixAttention.forward", "07761f6c3dfd151e"),
                stock_pin(f"{LAYERS}.radix_attention:_unified_attention_with_output_impl", "5538c0122f1299d7"),
                stock_pin(f"{LAYERS}.attention.base_attn_backend:AttentionBackend.forward", "a511d153756514ca"),
                Pin(
                    f"{TRITON}.init_forward_metadata",
                    # The fix changes windows of decode; slots of new keys are the same.
                    {STOCK: "78f4c6b8116823b9", f"{STOCK} + upstream.triton_decode_window": "ec1a1b3bae1593b6"},
                ),
                *(
                    stock_pin(f"{TRITON}.{name}", digest)
                    for name, digest in (
                        ("init_forward_metadata_out_graph", "58e3aec09a448834"),
                        ("_fill_cuda_graph_swa_out_cache_loc", "44713c24ba1f70ec"),
                        ("_build_cuda_graph_forward_metadata", "bdff8c77084edee5"),
                        ("_set_kv_buffer", "b7201d9d7c3e1ccf"),
                        ("forward_extend", "200453b6528d8834"),
                        ("forward_decode", "f4d2bb84d1cb385e"),
                    )
                ),
                *(
                    stock_pin(f"{FLASH}.{name}", digest)
                    for name, digest in (
                        ("init_forward_metadata", "f8fdf08059ec9a26"),
                        ("init_forward_metadata_out_graph", "9165c1cc9df7c4dc"),
                        ("_init_full_cg_decode_metadata", "584b408e61294c9e"),
                        ("_bind_metadata_buffers", "40e7d243015f659b"),
                        ("forward_extend", "f2306ab53b367d45"),
                        ("forward_decode", "04fdb55d484c0d78"),
                    )
                ),
                stock_pin(f"{ENGINE}.mem_cache.kv_index_translator:KVIndexTranslator.sliding_window_write_loc_for", "a1a51f210301cc15"),
                stock_pin(f"{POOLS}:KVWriteLoc.__post_init__", "520bc76c01fdfa27"),
                Pin(
                    f"{POOLS}:MHATokenToKVPool.set_kv_buffer",
                    # The fix saturates FP8 and divides out of place, as the kernel does.
                    {STOCK: "41361be959e33d6f", f"{STOCK} + upstream.fp8_kv_store": "da0d20febc1334bc"},
                ),
                stock_pin(f"{POOLS}:MHATokenToKVPool.__init__", "aa41d0b184210685"),
                stock_pin(f"{POOLS}:MHATokenToKVPool._store_kv_layer", "b0c667c3082a0787"),
                stock_pin(f"{POOLS}:MHATokenToKVPool._get_key_buffer", "a5b1bc7fd2088c8a"),
                stock_pin(f"{SWA}.__init__", "3a557fb958541482"),
                stock_pin(f"{SWA}.set_kv_buffer", "489020200a1d2253"),
                stock_pin(f"{SWA}.get_key_buffer", "40a41e8fd3e08ce5"),
                stock_pin(f"{SWA}.get_value_buffer", "887f3c6cf6b25104"),
            ),
        ),
    ),
    conflicts=("kv4.nvfp4_triton",),  # whose rows another kernel writes
    judge="numinous_attention.hooks.gemma_glue:judge",
    upstream="none",
)  # fmt: skip

MODELS = (*TRITON_BY_DEFAULT, "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
"""Models whose attention the hooks stand around."""

BACKENDS = ("triton", "fa3")
UNCOVERED = {
    "debug_cuda_graph": "untested",
    "enable_deterministic_inference": "the order of a sum may depend on how many tokens a batch has",
    "enable_dp_attention": "untested",
    "enable_flexkv": "untested",
    "enable_hierarchical_cache": "untested",
    "enable_hisparse": "untested",
    "enable_lmcache": "untested",
    "enable_page_major_kv_layout": "its rows lie elsewhere",
    "enable_pdmux": "untested",
    "enable_prefill_cp": "untested",
    "enable_torch_compile": "the compiler would have to look through the kernel's adapter",
    "enable_two_batch_overlap": "untested",
    "enable_unified_cache_external_linker": "untested",
    "enable_unified_memory": "its slots have other names",
    "is_embedding": "the cache may be skipped",
    "prefill_only_disable_kv_cache": "there would be no cache",
}
"""Boolean arguments of the engine that exclude the feature, and why."""

GRAPHS = {"prefill": (None, "breakable", "full", "disabled"), "decode": (None, "full", "disabled")}
"""Kinds of CUDA graph by phase; `tc_piecewise` compiles the model with torch.compile."""


def judge(command: ServeCommand) -> Iterator[str]:
    """Why this launch cannot use the feature, one line each."""
    model = command.model_config or {}
    name = (model.get("architectures") or [None])[0]
    if model and name not in MODELS:
        yield f"made for Gemma 3 and Gemma 4, this is a {name}"
    prefill, decode = (
        command.get(f"{phase}_attention_backend") or command.get("attention_backend")
        for phase in ("prefill", "decode")
    )
    if prefill != decode:
        yield f"attention backends {prefill} of prefill and {decode} of decode: one for both is covered"
    elif prefill is None:
        if name not in TRITON_BY_DEFAULT:
            yield "the engine would choose the attention backend: add --attention-backend triton or fa3"
    elif prefill not in BACKENDS:
        yield f"--attention-backend {prefill} is not covered; triton and fa3 are"
    if (dtype := command.get("kv_cache_dtype")) not in CACHES:
        yield f"--kv-cache-dtype {dtype} is not covered; auto, bf16 and fp8_e4m3 are"
    if (dtype := command.get("dtype")) not in ("auto", "bfloat16"):
        yield f"--dtype {dtype} is not covered; bfloat16 is"
    for each in ("dcp_size", "attn_cp_size", "pp_size"):
        if command.get(each) > 1:
            yield f"--{each.replace('_', '-')} > 1 is not covered (untested)"
    if command.get("disaggregation_mode") not in (None, "null"):
        yield "prefill/decode disaggregation is not covered (untested)"
    if command.get("dllm_algorithm") is not None:
        yield "--dllm-algorithm is not covered (untested)"
    for phase, covered in GRAPHS.items():
        if (kind := graph_kind(command, phase)) not in covered:
            yield f"CUDA graphs of kind {kind} in {phase} are not covered; give --cuda-graph-backend-{phase} disabled"
    yield from uncovered(command, UNCOVERED)
