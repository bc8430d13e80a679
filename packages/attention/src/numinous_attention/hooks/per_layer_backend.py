# SPDX-License-Identifier: Apache-2.0
"""Declaration of ``attention.per_layer_backend``: FlashAttention-3 for the layers that it takes, Triton for the others.

*Seam*      the one function that builds an attention backend from its name. For ``triton`` it returns our subclass of the engine's Triton
            backend, which holds a FlashAttention-3 backend over the same pools.
*Why*       An engine has one attention backend for all layers. Gemma 4 has heads of 512 in every sixth layer, which FlashAttention-3
            does not take, so stock serves the other five, windows with heads of 256, with the Triton kernels as well.
*Flag*      ``NUMINOUS_ATTENTION_PER_LAYER_BACKEND=1``, with ``--attention-backend triton`` (or none, for Gemma 4).
*Neighbour* ``--prefill-attention-backend`` and ``--decode-attention-backend`` of stock choose by phase, never by layer.
*Undo*      leave the flag unset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from numinous_attention.hooks.launch import graph_kind, text_of, uncovered
from numinous_attention.options import FLASH_DIM, PER_LAYER_BACKEND
from numinous_tooling.patching import Feature, Hook, Pin, stock_pin
from numinous_tooling.patching.feature import STOCK
from numinous_tooling.patching.serve_command import ServeCommand

ENGINE = "sglang.srt"
FLASH = f"{ENGINE}.layers.attention.flashattention_backend:FlashAttentionBackend"
TRITON = f"{ENGINE}.layers.attention.triton_backend:TritonAttnBackend"
BASE = f"{ENGINE}.layers.attention.base_attn_backend:AttentionBackend"
SETUP = f"{ENGINE}.model_executor.model_runner_components.attention_backend_setup"
POOL = f"{ENGINE}.mem_cache.swa_memory_pool:SWAKVPool"

FEATURE = Feature(
    id=PER_LAYER_BACKEND,
    sentence="FlashAttention-3 serves the layers that it takes (Gemma 4: windows, heads of 256), Triton the others (heads of 512).",
    arch={"sm90": "run"},
    patches=(
        Hook(
            id="attention.per_layer_backend.01",
            target=f"{SETUP}:_build_full_attention_backend_from_str",
            kind="around",
            call="numinous_attention.engine.per_layer_backend:around_build",
            pins=(
                stock_pin(f"{SETUP}:_build_full_attention_backend_from_str", "34559a94d1b67f1c"),
                stock_pin(f"{SETUP}:_build_backend_from_str", "60cb05abadffc1e9"),
                stock_pin(f"{SETUP}:_build_resolved_backend", "b55f057a69fa9d3c"),
                stock_pin(f"{SETUP}:build_attention_backends", "29bd66f6758dfed5"),
                # The contract of a backend, and who calls it with which layer.
                stock_pin(f"{BASE}.forward", "a511d153756514ca"),
                stock_pin(f"{BASE}.init_forward_metadata_in_graph", "0b1ac48bc9d36c7e"),
                stock_pin(f"{BASE}.shared_read_ends", "61782b86d751a033"),
                stock_pin(f"{ENGINE}.layers.radix_attention:RadixAttention.__init__", "54000c8a316232bf"),
                stock_pin(f"{ENGINE}.layers.radix_attention:RadixAttention.forward", "07761f6c3dfd151e"),
                stock_pin(f"{ENGINE}.model_executor.runner.eager_runner:EagerRunner._execute_idle", "c8718196d7468c4c"),
                stock_pin(f"{ENGINE}.model_executor.runner.metadata_glue_graph:MetadataGlueGraph._leaves", "ec2054bab9f3493c"),
                # Spans of an image reach the Triton backend as a mask, set after its metadata.
                stock_pin(f"{ENGINE}.models.gemma4_mm:Gemma4ForConditionalGeneration.prepare_attn_masks", "af0c2ac0e9ba3516"),
                # Both keep what they prepare for themselves, and write new keys to the same slots of the same pools. The fix changes
                # Triton's windows in decode, which no layer reads here.
                *(
                    Pin(
                        f"{TRITON}.{name}",
                        {STOCK: stock, f"{STOCK} + upstream.triton_decode_window": fixed},
                    )
                    for name, stock, fixed in (
                        ("init_forward_metadata", "78f4c6b8116823b9", "ec1a1b3bae1593b6"),
                        ("init_cuda_graph_state", "606f8b02fb9d3647", "67950d0d49aa4087"),
                    )
                ),
                *(
                    stock_pin(f"{TRITON}.{name}", digest)
                    for name, digest in (
                        ("__init__", "6cc08abb69138bad"),
                        ("init_forward_metadata_out_graph", "58e3aec09a448834"),
                        ("get_cuda_graph_seq_len_fill_value", "59198159de9f13bc"),
                        ("forward_extend", "200453b6528d8834"),
                        ("forward_decode", "f4d2bb84d1cb385e"),
                    )
                ),
                *(
                    stock_pin(f"{FLASH}.{name}", digest)
                    for name, digest in (
                        ("__init__", "626212838b44cd0a"),
                        # For heads of the first kind of layer; ours switches it off.
                        ("_compute_scheduler_metadata", "72cd21cf6d44197b"),
                        ("init_forward_metadata", "f8fdf08059ec9a26"),
                        ("init_forward_metadata_out_graph", "9165c1cc9df7c4dc"),
                        ("init_forward_metadata_in_graph", "5365f529d3b80b55"),
                        ("_init_full_cg_decode_metadata", "584b408e61294c9e"),
                        ("_bind_metadata_buffers", "40e7d243015f659b"),
                        ("_apply_cuda_graph_metadata", "ddd63a4bf99c54fa"),
                        ("_set_decode_page_metadata", "b5c0b80f9927979e"),
                        ("init_cuda_graph_state", "29229da26a6d2985"),
                        ("get_cuda_graph_seq_len_fill_value", "fca232129ec53bdd"),
                        ("prepare_paged_mha_query", "2a8833fe1bb7454c"),
                        ("get_paged_mha_kv_cache", "a24a8be66b1736f9"),
                        ("forward_extend", "f2306ab53b367d45"),
                        ("forward_decode", "04fdb55d484c0d78"),
                    )
                ),
                *(
                    stock_pin(f"{POOL}.{name}", digest)
                    for name, digest in (
                        ("__init__", "3a557fb958541482"),
                        ("get_kv_buffer", "a7d3d80ef542eb60"),
                        ("set_kv_buffer", "489020200a1d2253"),
                        ("translate_loc_from_full_to_swa", "ccdfd098f87aab23"),
                    )
                ),
            ),
        ),
    ),
    judge="numinous_attention.hooks.per_layer_backend:judge",
    upstream="none",
)  # fmt: skip

GEMMA4 = (
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
)
"""Models for which the engine chooses Triton by itself on Hopper."""

UNCOVERED = {
    "disable_hybrid_swa_memory": "windows need a pool of their own",
    "enable_deterministic_inference": "untested",
    "enable_dp_attention": "untested",
    "enable_flexkv": "untested",
    "enable_hierarchical_cache": "untested",
    "enable_hisparse": "untested",
    "enable_lmcache": "untested",
    "enable_page_major_kv_layout": "untested",
    "enable_pdmux": "untested",
    "enable_prefill_cp": "untested",
    "enable_torch_compile": "untested",
    "enable_two_batch_overlap": "untested",
    "enable_unified_cache_external_linker": "untested",
    "enable_unified_memory": "its slots have other names",
    "is_embedding": "FlashAttention-3 would skip the cache",
    "prefill_only_disable_kv_cache": "there would be no cache",
}
"""Boolean arguments of the engine that exclude the feature, and why."""

GRAPHS = {"prefill": (None, "breakable", "tc_piecewise", "disabled"), "decode": (None, "full", "disabled")}  # fmt: skip
"""Kinds of CUDA graph by phase; the Triton backend has none of whole prefills."""


def judge(command: ServeCommand) -> Iterator[str]:
    """Why this launch cannot use the feature, one line each."""
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        if (value := command.get(name)) not in (None, "triton"):
            flag = "--" + name.replace("_", "-")
            yield f"{flag} {value}: it stands in for the Triton backend; give --attention-backend triton"
    if (dtype := command.get("kv_cache_dtype")) not in ("auto", "bf16", "bfloat16"):
        yield f"--kv-cache-dtype {dtype} is not covered: FlashAttention-3 would round queries too, Triton does not; leave the flag out"
    if command.get("speculative_algorithm") is not None:
        yield "speculative decoding is not covered (untested)"
    if (page := command.get("page_size")) is not None and (page < 1 or page & (page - 1)):
        yield f"--page-size {page} is not covered: FlashAttention-3's page tables need a power of two"
    for name in ("dcp_size", "attn_cp_size", "pp_size"):
        if command.get(name) > 1:
            yield f"--{name.replace('_', '-')} > 1 is not covered (untested)"
    if command.get("disaggregation_mode") not in (None, "null"):
        yield "prefill/decode disaggregation is not covered (untested)"
    if command.get("dllm_algorithm") is not None:
        yield "--dllm-algorithm is not covered (untested)"
    for phase, covered in GRAPHS.items():
        if (kind := graph_kind(command, phase)) not in covered:
            yield f"CUDA graphs of kind {kind} in {phase} are not covered; leave --cuda-graph-backend-{phase} out"
    yield from uncovered(command, UNCOVERED)
    if command.model_config is not None:
        yield from _judge_model(command.model_config, command.get("attention_backend") is None)


def _judge_model(config: Mapping[str, Any], unnamed: bool) -> Iterator[str]:
    config = text_of(config)
    name = (config.get("architectures") or [None])[0]
    if unnamed and name not in GEMMA4:
        yield f"the engine would choose the attention backend of a {name}: add --attention-backend triton"
    if name in GEMMA4:
        widest, windows = (
            config.get("global_head_dim"),
            config.get("swa_head_dim", config.get("head_dim")),
        )
        if isinstance(widest, int) and widest <= FLASH_DIM:
            yield f"FlashAttention-3 takes every layer of this model (heads up to {widest}): use --attention-backend fa3"
        if isinstance(windows, int) and windows > FLASH_DIM:
            yield f"FlashAttention-3 takes heads up to {FLASH_DIM}, the windows of this model have {windows}"
