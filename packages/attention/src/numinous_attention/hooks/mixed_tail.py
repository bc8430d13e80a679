# SPDX-License-Identifier: Apache-2.0
"""Declaration of ``attention.mixed_tail``: decoding requests that ride in a prefill batch attend as a decode does.

*Seam*      `init_forward_metadata` and `forward_extend`: of the Triton backend's class, and of the FlashAttention-3 backend that the engine's registry builds.
*Why*       ``--enable-mixed-chunk`` appends the running requests to each chunk of prefill, one token each. Stock 0.5.20 gives them to its prefill kernel: a tile of
            32 to 128 rows for the one row, keys of a long context walked by one program with no split, and in Triton read once for every query head.
            Its own decode kernel, which splits keys and reads them once for a group, gets no such batch.
*Flag*      ``NUMINOUS_ATTENTION_MIXED_TAIL=1``, with ``--enable-mixed-chunk``.
*Neighbour* none in stock; the idea is sglang#43238's, for another backend.
*Undo*      leave the flag unset.
"""

from __future__ import annotations

from collections.abc import Iterator

from numinous_attention.hooks.gqa_extend import TRITON_BY_DEFAULT
from numinous_attention.hooks.launch import CACHES, text_of, uncovered
from numinous_attention.options import MIXED_TAIL
from numinous_tooling.patching import Feature, Hook, Pin, stock_pin
from numinous_tooling.patching.feature import STOCK
from numinous_tooling.patching.serve_command import ServeCommand

ENGINE = "sglang.srt"
OURS = "numinous_attention.engine.mixed_tail"
REGISTRY = f"{ENGINE}.layers.attention.attention_registry"
TRITON = f"{ENGINE}.layers.attention.triton_backend:TritonAttnBackend"
FLASH = f"{ENGINE}.layers.attention.flashattention_backend:FlashAttentionBackend"

FEATURE = Feature(
    id=MIXED_TAIL,
    sentence="Decoding requests in a mixed prefill batch go through the decode kernel of their backend (Triton or FlashAttention-3).",
    arch={"cpu": "emulated", "sm90": "emulated"},
    patches=(
        Hook(
            id=f"{MIXED_TAIL}.01",
            target=f"{TRITON}.__init__",
            kind="after",
            call=f"{OURS}:after_triton",
            pins=(stock_pin(f"{TRITON}.__init__", "6cc08abb69138bad"),),
        ),
        Hook(
            id=f"{MIXED_TAIL}.02",
            target=f"{TRITON}.init_forward_metadata",
            kind="around",
            call=f"{OURS}:around_triton_metadata",
            pins=(
                Pin(
                    f"{TRITON}.init_forward_metadata",
                    # The fix changes windows of decode, which are made here.
                    {STOCK: "78f4c6b8116823b9", f"{STOCK} + upstream.triton_decode_window": "ec1a1b3bae1593b6"},
                ),
                stock_pin(f"{TRITON}._fill_kv_indptr_and_indices", "84a1bec2748b744c"),
                stock_pin(f"{TRITON}.get_num_kv_splits", "598dcff34ebbaf5c"),
                # Which keys a window holds, and how slots are named.
                stock_pin(f"{ENGINE}.layers.attention.triton_backend:update_sliding_window_buffer", "7d1e644d298088b8"),
                stock_pin(f"{ENGINE}.mem_cache.kv_index_translator:KVIndexTranslator.fill_packed_read_stream", "62054b71bcd3fe75"),
                stock_pin(f"{ENGINE}.mem_cache.swa_memory_pool:SWAKVPool.translate_loc_from_full_to_swa", "ccdfd098f87aab23"),
                # Who makes such batches and runs them as plain prefill.
                stock_pin(f"{ENGINE}.managers.schedule_batch:ScheduleBatch.mix_with_running", "c8665358e70378cb"),
                stock_pin(f"{ENGINE}.model_executor.runner.eager_runner:EagerRunner.execute", "50297f15e5618edf"),
            ),
        ),
        Hook(
            id=f"{MIXED_TAIL}.03",
            target=f"{TRITON}.forward_extend",
            kind="around",
            call=f"{OURS}:around_triton_extend",
            pins=(
                stock_pin(f"{TRITON}.forward_extend", "200453b6528d8834"),
                stock_pin(f"{TRITON}.forward_decode", "f4d2bb84d1cb385e"),
                stock_pin(f"{TRITON}._set_kv_buffer", "b7201d9d7c3e1ccf"),
                # Who calls it, with which output; and who leaves a mask behind the metadata.
                stock_pin(f"{ENGINE}.layers.radix_attention:_unified_attention_with_output_impl", "5538c0122f1299d7"),
                stock_pin(f"{ENGINE}.models.gemma4_mm:Gemma4ForConditionalGeneration.prepare_attn_masks", "af0c2ac0e9ba3516"),
            ),
        ),
        Hook(
            id=f"{MIXED_TAIL}.04",
            target=f"{REGISTRY}:create_flashattention_v3_backend",
            kind="after",
            call=f"{OURS}:after_flash",
            pins=(
                stock_pin(f"{REGISTRY}:create_flashattention_v3_backend", "8d231b7bc1d44d91"),
                *(
                    stock_pin(f"{FLASH}.{name}", digest)
                    for name, digest in (
                        ("__init__", "626212838b44cd0a"),
                        ("init_forward_metadata", "f8fdf08059ec9a26"),
                        ("_compute_scheduler_metadata", "72cd21cf6d44197b"),
                        ("prepare_paged_mha_query", "2a8833fe1bb7454c"),
                        ("forward_extend", "f2306ab53b367d45"),
                        ("forward_decode", "04fdb55d484c0d78"),
                    )
                ),
            ),
        ),
    ),
    conflicts=("kv4.nvfp4_triton",),  # whose rows the backends' own decode does not read
    judge="numinous_attention.hooks.mixed_tail:judge",
    upstream="none",
)  # fmt: skip

BACKENDS = ("triton", "fa3")
UNCOVERED = {
    "enable_deterministic_inference": "prefill and decode would have to add in one order",
    "enable_dp_attention": "untested",
    "enable_hisparse": "untested",
    "enable_pdmux": "untested",
    "enable_prefill_cp": "untested",
    "enable_torch_compile": "untested",
    "enable_two_batch_overlap": "untested",
    "enable_unified_memory": "its slots have other names",
    "is_embedding": "there is no decode",
}
"""Boolean arguments of the engine that exclude the feature, and why."""


def judge(command: ServeCommand) -> Iterator[str]:
    """Why this launch cannot use the feature, one line each."""
    model = command.model_config or {}
    config = text_of(model)
    if not command.get("enable_mixed_chunk"):
        yield "nothing is mixed without it: add --enable-mixed-chunk"
    if (size := command.get("chunked_prefill_size")) is not None and size <= 0:
        yield f"--chunked-prefill-size {size} switches mixed batches off: leave it out"
    prefill, decode = (
        command.get(f"{phase}_attention_backend") or command.get("attention_backend")
        for phase in ("prefill", "decode")
    )
    if prefill != decode:
        yield f"attention backends {prefill} of prefill and {decode} of decode: one for both is covered"
    elif prefill is None:
        if (config.get("architectures") or [None])[0] not in TRITON_BY_DEFAULT:
            yield "the engine would choose the attention backend: add --attention-backend triton or fa3"
    elif prefill not in BACKENDS:
        yield f"--attention-backend {prefill} is not covered; triton and fa3 are"
    if (dtype := command.get("kv_cache_dtype")) not in CACHES:
        yield f"--kv-cache-dtype {dtype} is not covered; auto, bf16 and fp8_e4m3 are"
    if command.get("speculative_algorithm") is not None:
        yield "speculative decoding is not covered"
    for name in ("dcp_size", "attn_cp_size", "pp_size"):
        if command.get(name) > 1:
            yield f"--{name.replace('_', '-')} > 1 is not covered (untested)"
    if command.get("disaggregation_mode") not in (None, "null"):
        yield "prefill/decode disaggregation is not covered: its prefill has no decodes"
    if command.get("dllm_algorithm") is not None:
        yield "--dllm-algorithm is not covered"
    yield from uncovered(command, UNCOVERED)
    if config.get("kv_lora_rank"):
        yield "made for MHA and GQA models, this one has MLA"
