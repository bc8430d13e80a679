# SPDX-License-Identifier: Apache-2.0
"""Declaration of ``attention.gqa_extend``: prefill and verification of the Triton backend by `extend_attention`.

*Seam*      the constructor of `TritonAttnBackend` in ``srt/layers/attention/triton_backend.py``, which names the kernel that its `forward_extend` calls.
*Why*       Stock 0.5.20 reads every KV tile once per query head, in tiles of 32 rows at head dim 512 on Hopper, and walks a chunk from its first key
            whatever the window. Gemma 4 has no other backend there.
*Flag*      ``NUMINOUS_ATTENTION_GQA_EXTEND=1``, with ``--attention-backend triton``.
*Windows*   Loops start at the first tile that a window reaches, with the same bits as without: a property of the kernel, so no feature of its own.
            ``NUMINOUS_ATTENTION_GQA_EXTEND_LAYERS=windowed`` takes the layers that gain from it and no other.
*Neighbour* stock's kernel; FA3 where a model may choose it.
*Undo*      leave the flag unset.
"""

from __future__ import annotations

from collections.abc import Iterator

from numinous_attention.hooks.launch import CACHES, text_of, uncovered
from numinous_attention.options import GQA_EXTEND, LAYERS, MIN_CHUNK
from numinous_tooling.patching import Feature, Hook, Pin, stock_pin
from numinous_tooling.patching.feature import STOCK
from numinous_tooling.patching.serve_command import ServeCommand

BACKEND = "sglang.srt.layers.attention.triton_backend"
KERNELS = "sglang.kernels.ops.attention"
OURS = "numinous_attention.engine.gqa_extend"
TRITON = f"{BACKEND}:TritonAttnBackend"

FEATURE = Feature(
    id=GQA_EXTEND,
    sentence="Prefill and verification of the Triton backend: a KV tile is read once for all query heads of its group, windows are skipped.",
    arch={"cpu": "emulated", "sm90": "run"}
    | dict.fromkeys(("sm100", "sm103", "sm120", "gfx950"), "compiled"),
    patches=(
        Hook(
            id=f"{GQA_EXTEND}.01",
            target=f"{TRITON}.__init__",
            kind="after",
            call=f"{OURS}:after_backend",
            pins=(
                stock_pin(f"{TRITON}.__init__", "6cc08abb69138bad"),
                # Who call the kernel, and with which tables.
                stock_pin(f"{TRITON}.forward_extend", "200453b6528d8834"),
                Pin(
                    f"{TRITON}.init_forward_metadata",
                    {
                        STOCK: "78f4c6b8116823b9",
                        # Another window in decode; what prefill and verification are given is the same.
                        f"{STOCK} + upstream.triton_decode_window": "ec1a1b3bae1593b6",
                    },
                ),
                stock_pin(f"{TRITON}._build_cuda_graph_forward_metadata", "bdff8c77084edee5"),
                stock_pin(f"{BACKEND}:update_sliding_window_buffer", "7d1e644d298088b8"),
                # What it stands in for.
                stock_pin(f"{KERNELS}.extend_attention:extend_attention_fwd", "940b192da876f515"),
                Pin(
                    f"{KERNELS}.extend_attention:_fwd_kernel",
                    {STOCK: "2bd5529fbeffbc78", f"{STOCK} + upstream.extend_mask_cut": "1de9403bc659d1e9"},
                ),
                stock_pin(f"{KERNELS}.decode_attention:_extract_kv_strides", "35a757e4d4b92619"),
            ),
        ),
    ),
    options=(LAYERS, MIN_CHUNK),
    conflicts=("kv4.nvfp4_triton",),  # which puts its own call in the same place
    judge="numinous_attention.hooks.gqa_extend:judge",
    upstream="none",
)  # fmt: skip

TRITON_BY_DEFAULT = (
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
)
"""For these the engine itself chooses the Triton backend, but on sm100 and sm103."""
UNCOVERED = {
    "enable_deterministic_inference": "it runs stock's unified kernel, which this one is not in front of",
    "enable_dp_attention": "untested",
    "enable_pdmux": "untested",
    "enable_prefill_cp": "untested",
    "enable_two_batch_overlap": "untested",
}
"""Boolean arguments of the engine that exclude the feature, and why."""


def judge(command: ServeCommand) -> Iterator[str]:
    """Why this launch cannot use the feature, one line each."""
    model = command.model_config or {}
    config = text_of(model)
    backend = command.get("prefill_attention_backend") or command.get("attention_backend")
    if backend is None:
        names = model.get("architectures") or [None]
        if names[0] not in TRITON_BY_DEFAULT:
            yield "the engine would choose another attention backend: add --attention-backend triton"
    elif backend != "triton":
        yield f"attention backend {backend} of prefill is not covered; triton is"
    yield from uncovered(command, UNCOVERED)
    if command.get("dcp_size") > 1:
        yield "--dcp-size > 1 is not covered: its ranks merge parts of an attention by an lse"
    if (dtype := command.get("kv_cache_dtype")) not in CACHES:
        yield f"--kv-cache-dtype {dtype} is not covered; auto, bf16 and fp8_e4m3 are"
    if (dtype := command.get("dtype")) in ("half", "float16"):
        yield f"--dtype {dtype} is not covered; bfloat16 and float32 are"
    if config.get("kv_lora_rank"):
        yield "made for MHA and GQA models, this one has MLA"
