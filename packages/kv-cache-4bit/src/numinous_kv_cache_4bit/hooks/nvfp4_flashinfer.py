# SPDX-License-Identifier: Apache-2.0
"""Declaration of ``kv4.nvfp4_flashinfer``: stock's NVFP4 cache on Blackwell, read by FlashInfer where it lies, in prefill and, if so wanted, in decode.

*Seam*      the recipe's table of readers and its write, the two phases of the FlashInfer backend, and the two places where it plans decode.
*Why*       Stock 0.5.20 decodes every cached prefix to FP8 in front of each layer, one request after the other, into a workspace of one layer that costs
            capacity, that prefixes shared by many requests overrun, and whose values get the checkpoint's scales twice. On sm100 its decode hands
            trtllm-gen block scales in a layout that this does not read. FlashInfer 0.6.18 reads packed rows itself, and stock does not ask it to.
*Flag*      ``NUMINOUS_KV4_NVFP4_FLASHINFER=1`` with ``--kv-cache-dtype nvfp4 --prefill-attention-backend flashinfer`` and ``--decode-attention-backend``
            ``trtllm_mha`` on sm120 or ``flashinfer`` on both.
*Neighbour* stock with the same words on sm120.
*Undo*      leave the flag unset.
"""

from __future__ import annotations

from collections.abc import Iterator

from numinous_kv_cache_4bit.hooks.launch import UNCOVERED, prefill_graphs, text_of
from numinous_kv_cache_4bit.options import CPU_PLATFORM, FLASHINFER_DIMS, NVFP4_FLASHINFER
from numinous_tooling.patching import Feature, Hook, Pin, Registration, stock_pin
from numinous_tooling.patching.feature import STOCK
from numinous_tooling.patching.serve_command import ServeCommand

ATTENTION = "sglang.srt.layers.attention"
BACKEND = f"{ATTENTION}.flashinfer_backend:FlashInferAttnBackend"
DECODE_PLANS = f"{ATTENTION}.flashinfer_backend:FlashInferIndicesUpdaterDecode"
GATE = "sglang.srt.arg_groups.kv_cache_hook:handle_kv4_compatibility"
HYBRID = f"{ATTENTION}.hybrid_attn_backend:HybridAttnBackend"
OURS = "numinous_kv_cache_4bit.engine.nvfp4_flashinfer"
POOLS = "sglang.srt.mem_cache.memory_pool"
PREFILL_PLANS = f"{ATTENTION}.flashinfer_backend:FlashInferIndicesUpdaterPrefill"
RECIPES = "sglang.srt.layers.quantization.fp4_kv_cache_quant_method"
SIZING = "sglang.srt.model_executor.pool_configurator"
TENSOR_CORES = f"{ATTENTION}.flashinfer_backend:should_use_tensor_core"
TRTLLM = f"{ATTENTION}.trtllm_mha_backend:TRTLLMHAAttnBackend"


def _pins(where: str, **digests: str) -> tuple[Pin, ...]:
    return tuple(stock_pin(f"{where}{name}", digest) for name, digest in digests.items())


FEATURE = Feature(
    id=NVFP4_FLASHINFER,
    sentence="Stock's NVFP4 KV cache on Blackwell, read by FlashInfer where it lies: scales once, no FP8 workspace, a decode of its own.",
    arch={"sm100": "emulated", "sm103": "emulated", "sm120": "emulated"},
    patches=(
        Hook(
            id="kv4.nvfp4_flashinfer.01",
            target=GATE,
            kind="around",
            call=f"{OURS}:around_compatibility",
            pins=(
                Pin(GATE, {STOCK: "7c1b5a26a86f207b", f"{STOCK} + upstream.fp4_boot_checks": "1ff20a8eaa21472e"}),
            ),
            roles=("main",),
        ),
        Registration(
            id="kv4.nvfp4_flashinfer.02",
            run=f"{OURS}:register_native_reads",
            verify=f"{OURS}:native_reads_registered",
            pins=(
                *_pins(
                    f"{RECIPES}:KVCacheQuantMethodBase.",
                    attention_accesses="c40e3efa3fda4250",
                    resolve_attention_access="3c3bffb7dff3471c",
                    needs_dequant_workspace="08e5d2e22de40e90",
                    dequant_workspace_dtype="18530437eee24542",
                ),
                *_pins(f"{RECIPES}:", _native_fp4="306b4b4916ec4b10"),
            ),
        ),
        Hook(
            id="kv4.nvfp4_flashinfer.03",
            target=f"{SIZING}:create_memory_pool_configurator",
            kind="before",
            call=f"{OURS}:before_pool_sizing",
            pins=(stock_pin(f"{SIZING}:create_memory_pool_configurator", "3fa65491f3cd9416"),),
        ),
        Hook(
            id="kv4.nvfp4_flashinfer.04",
            target=f"{SIZING}:DefaultPoolConfigurator.__init__",
            kind="after",
            call=f"{OURS}:after_sizing",
            pins=_pins(
                f"{SIZING}:DefaultPoolConfigurator.",
                __init__="35ccf4b3bf39d749",
                calculate_pool_sizes="b3786d5e706bd353",
            ),
        ),
        Hook(
            id="kv4.nvfp4_flashinfer.05",
            target=f"{RECIPES}:NVFP4KVCacheMethod.quantize_and_store",
            kind="around",
            call=f"{OURS}:around_store",
            pins=(
                *_pins(
                    f"{RECIPES}:NVFP4KVCacheMethod.",
                    quantize_and_store="5ae5bd629bd43d7e",
                    create_buffers="72604356e1dd4461",
                    # Which scales a layer is written with and read with.
                    load_scales_from_model="eec602426e11d3bc",
                    get_bmm_scales="175b99b1c8654a43",
                ),
                *_pins(
                    f"{POOLS}:MHATokenToKVPool.",
                    _create_quantized_buffers="60d301935272ca1e",
                    _set_quantized_kv_buffer="fc2253ad21625b9e",
                    _quantized_scales="0f18d086cd974d8b",
                    get_raw_kv_buffer="f3254b2a2596aab5",
                    _slot_move_pointer_buffers="28835cf2b35591c4",
                    _move_kv_cache_impl="883b896b19b20d00",
                ),
                *_pins(
                    f"{POOLS}:HybridLinearKVPool.",
                    get_raw_kv_buffer="ba4b614e8fcfd76e",
                    set_kv_buffer="82bf3a2394f41a66",
                ),
            ),
        ),
        Hook(
            id="kv4.nvfp4_flashinfer.06",
            target=TENSOR_CORES,
            kind="around",
            call=f"{OURS}:around_tensor_cores",
            pins=(stock_pin(TENSOR_CORES, "d7e15b5fc9c68673"),),
        ),
        Hook(
            id="kv4.nvfp4_flashinfer.07",
            target=f"{BACKEND}.__init__",
            kind="after",
            call=f"{OURS}:after_backend",
            pins=(
                *_pins(
                    f"{BACKEND}.",
                    __init__="59ca0d75bf3259c0",
                    init_forward_metadata="bd8c5d1a4a649c2b",
                    _prepare_dequant_workspace_metadata_for_extend="1dc2ec331f160628",
                ),
                *_pins(
                    f"{PREFILL_PLANS}.",
                    __init__="a2256ba42010c680",
                    call_begin_forward="7733c422cb2e7274",
                ),
                stock_pin(f"{DECODE_PLANS}.__init__", "209acfe1d487e225"),
            ),
        ),
        Hook(
            id="kv4.nvfp4_flashinfer.08",
            target=f"{BACKEND}._create_decode_wrappers",
            kind="after",
            call=f"{OURS}:after_decode_wrappers",
            pins=_pins(
                f"{BACKEND}.",
                _create_decode_wrappers="4df8903a685d0c5c",
                init_forward_metadata_out_graph="0151e6819f20e24f",
            ),
        ),
        Hook(
            id="kv4.nvfp4_flashinfer.09",
            target=f"{DECODE_PLANS}.call_begin_forward",
            kind="around",
            call=f"{OURS}:around_decode_plan",
            pins=(stock_pin(f"{DECODE_PLANS}.call_begin_forward", "5fa6fb0dffa04dd1"),),
        ),
        *(
            Hook(
                id=f"kv4.nvfp4_flashinfer.{number}",
                target=f"{BACKEND}.{phase}",
                kind="around",
                call=f"{OURS}:{call}",
                pins=(
                    Pin(
                        f"{BACKEND}.{phase}",
                        # Replaced as a whole: the fix is of what stands in its place here.
                        {STOCK: digest, f"{STOCK} + upstream.nvfp4_double_scale": fixed},
                    ),
                    stock_pin(f"{BACKEND}._get_wrapper_idx", "3755370746c281ea"),
                    stock_pin(f"{HYBRID}.{phase}", caller),
                ),
            )
            for number, phase, call, digest, fixed, caller in (
                (10, "forward_extend", "around_extend", "ae8c4903cefaa733", "261d31e7f90b6797", "bb58e6958d6e8f81"),
                (11, "forward_decode", "around_decode", "8ea817b3eb4f373c", "29641d699d19bf06", "6a4cf86286ce2edd"),
            )
        ),
        Hook(
            id="kv4.nvfp4_flashinfer.12",
            target=f"{TRTLLM}.__init__",
            kind="after",
            call=f"{OURS}:after_trtllm_backend",
            pins=(
                *_pins(
                    f"{TRTLLM}.",
                    __init__="5a58447a22c49276",
                    forward_decode="c560e1ee9a89565a",
                    _run_fixed_q_len_decode="2be5d91ed110efeb",
                    _reshape_paged_kv_cache="a4e31f3d56bfcd74",
                    _get_nvfp4_bmm_scales="558bf9f214ab6c65",
                ),
                Pin(
                    f"{TRTLLM}._get_nvfp4_decode_kv_cache",
                    {
                        STOCK: "22a04e9fc020e832",
                        # Refuses sm100, as the check in the main process does.
                        f"{STOCK} + upstream.nvfp4_trtllm_gen_scales": "b4a7fdf80b8a905c",
                    },
                ),
            ),
        ),
    ),
    judge="numinous_kv_cache_4bit.hooks.nvfp4_flashinfer:judge",
    upstream="none",
)  # fmt: skip

DECODERS = ("flashinfer", "trtllm_mha")
"""What `--decode-attention-backend` may be."""
MORE_UNCOVERED = {
    "dllm_algorithm": "untested",
    "enable_deterministic_inference": "it splits the keys of a request, which FlashInfer reads wrongly in NVFP4",
    "enable_hierarchical_cache": "stock's host copies leave the block scales out",
    "enable_memory_saver": "untested",
    "enable_mis": "untested",
    "enable_mixed_chunk": "untested",
    "enable_page_major_kv_layout": "it is a layout of the plain pool",
    "enable_torch_compile": "untested",
    "prefill_only_disable_kv_cache": "there would be no cache",
}


def judge(command: ServeCommand) -> Iterator[str]:
    """Why this launch cannot use the feature, one line each."""
    if command.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM:
        yield "FlashInfer has no kernels for a CPU; kv4.nvfp4_triton serves there"
    if (dtype := command.get("kv_cache_dtype")) != "nvfp4":
        yield f"the KV cache would be {dtype}: add --kv-cache-dtype nvfp4"
    prefill, decode = (
        command.get(f"{phase}_attention_backend") or command.get("attention_backend")
        for phase in ("prefill", "decode")
    )
    if prefill != "flashinfer":
        yield f"prefill would be by {prefill or 'what the engine chooses'}: add --prefill-attention-backend flashinfer"
    if decode not in DECODERS:
        yield f"decode would be by {decode or 'what the engine chooses'}: add --decode-attention-backend trtllm_mha (sm120) or flashinfer"
    if "full" in (command.get("cuda_graph_backend_prefill"), prefill_graphs(command)):
        yield "--cuda-graph-backend-prefill full is not covered: a captured prefill needs the keys split, which FlashInfer reads wrongly in NVFP4"
    if command.get("dtype") not in ("auto", "bfloat16"):
        yield f"--dtype {command.get('dtype')}: the write takes bf16; leave the flag out"
    if command.get("speculative_algorithm") is not None:
        yield "speculative decoding is not covered: its verification is captured with the keys split"
    for name, what in (UNCOVERED | MORE_UNCOVERED).items():
        if command.get(name):
            yield f"--{name.replace('_', '-')} is not covered: {what}"
    for name in ("dcp_size", "pp_size"):
        if command.get(name) > 1:
            yield f"--{name.replace('_', '-')} > 1 is not covered (untested)"
    if command.get("disaggregation_mode") not in (None, "null"):
        yield "prefill/decode disaggregation is not covered: stock registers and copies data without block scales"
    if command.get("quantization_param_path") is not None:
        yield "--quantization-param-path is not covered: its scales are of an FP8 cache; leave the flag out"
    if command.environ.get("SGLANG_USE_HND_KVCACHE", "0").lower() in ("1", "true"):
        yield "SGLANG_USE_HND_KVCACHE is not covered: packed rows have no such layout"
    if command.model_config is not None:
        yield from _judge_model(text_of(command.model_config))


def _judge_model(model: dict[str, object]) -> Iterator[str]:
    if model.get("kv_lora_rank"):
        yield "made for MHA and GQA models, this one has MLA"
    heads, hidden = model.get("num_attention_heads"), model.get("hidden_size")
    dim = model.get("head_dim")
    if dim is None and isinstance(heads, int) and isinstance(hidden, int):
        dim = hidden // heads
    if isinstance(dim, int) and dim not in FLASHINFER_DIMS:
        yield f"FlashInfer reads NVFP4 heads of {', '.join(map(str, FLASHINFER_DIMS))} values, this model's have {dim}"
