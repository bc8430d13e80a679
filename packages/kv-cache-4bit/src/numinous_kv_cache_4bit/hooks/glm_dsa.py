# SPDX-License-Identifier: Apache-2.0
"""Declaration of ``kv4.glm_dsa``: 4-bit KV for GLM-5.3 (DSA over MLA), rows of 352 bytes.

*Seam*      the width of a pool's row, its writer and readers, FlashMLA over the pool, and the two functions that dequantise in front of
            the sparse prefill kernels.
*Why*       Stock 0.5.20 refuses any cache of DSA models but bf16 and FP8. A 352-byte row holds 512 latent values as E2M1 with an E4M3
            scale for 16 and 64 rope values as INT8, where stock's FP8 row on Hopper takes 656 bytes and bf16 1152.
*Flag*      ``NUMINOUS_KV4_GLM_DSA=1`` with ``--kv-cache-dtype fp8_e4m3``.
*Neighbour* stock's FP8 cache of the same model, read by the same FlashMLA; benchmarks run it and bf16 as the other arms.
*Undo*      leave the flag unset.
"""

from __future__ import annotations

from collections.abc import Iterator

from numinous_kv_cache_4bit.hooks.kept_rows import BACKEND, KERNELS, MHA, kept_rows_hooks
from numinous_kv_cache_4bit.hooks.launch import judge_rows
from numinous_kv_cache_4bit.options import DECODE, DSA_ARCHITECTURES, DSA_PREFILLS, GLM_DSA
from numinous_tooling.formats import KV4
from numinous_tooling.patching import Feature, Hook, stock_pin
from numinous_tooling.patching.serve_command import ServeCommand

OURS = "numinous_kv_cache_4bit.engine.glm_dsa"
DEQUANTIZE = f"{KERNELS}.dequant_k_cache:dequantize_k_cache_paged"
REQUANTIZE = f"{KERNELS}.dequant_k_cache:gather_dequant_requant_fp8_paged"

FEATURE = Feature(
    id=GLM_DSA,
    sentence="4-bit KV cache for GLM-5.3 on Hopper: 1.78 times the tokens of FP8 in the same memory.",
    arch={"sm90": "run"},
    patches=(
        *kept_rows_hooks(GLM_DSA, OURS),
        Hook(
            id="kv4.glm_dsa.08",
            target=DEQUANTIZE,
            kind="around",
            call=f"{OURS}:around_dequantize",
            pins=(
                stock_pin(DEQUANTIZE, "0dd5e8ae4d98cfb8"),
                stock_pin(f"{BACKEND}._forward_flashmla_sparse", "a73fab5b29bead9f"),
                # A cached prefix in front of multi-head attention.
                stock_pin(
                    f"{MHA}:DeepseekMHAForwardMixin._get_mla_kv_buffer_from_fp8_for_dsa",
                    "a5c55119eacf81a8",
                ),
                stock_pin(
                    f"{MHA}:DeepseekMHAForwardMixin.forward_normal_prepare", "ef4bc197819320a9"
                ),
                stock_pin(f"{BACKEND}.set_dsa_prefill_impl", "830f5141289eb559"),
            ),
        ),
        Hook(
            id="kv4.glm_dsa.09",
            target=REQUANTIZE,
            kind="around",
            call=f"{OURS}:around_requantize",
            pins=(
                stock_pin(REQUANTIZE, "237703a16f0b57e8"),
                stock_pin(f"{BACKEND}._forward_flashmla_sparse_q8kv8", "0dee9e97db028b74"),
            ),
        ),
    ),
    options=(DECODE[GLM_DSA],),
    judge="numinous_kv_cache_4bit.hooks.glm_dsa:judge",
    upstream="none",
)


def judge(command: ServeCommand) -> Iterator[str]:
    """Why this launch cannot use the feature, one line each."""
    yield from judge_rows(command, KV4, DSA_ARCHITECTURES, DSA_PREFILLS)
    prefill = command.get("dsa_prefill_backend")
    if command.get("enable_mixed_chunk") and prefill not in (None, "flashmla_kv"):
        yield f"--dsa-prefill-backend {prefill} reads no FP8 cache in batches that decode too; leave --enable-mixed-chunk out"
