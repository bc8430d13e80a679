# SPDX-License-Identifier: Apache-2.0
"""Declaration of ``moe.norm_quant``: norm and FP8 group quantisation in one kernel in front of block-FP8 linears.

*Seam*      `RMSNorm.forward_cuda` in ``srt/layers/layernorm.py`` and `deepgemm_w8a8_block_fp8_linear_with_fallback` in
            ``srt/layers/quantization/fp8_utils.py``.
*Why*       Stock 0.5.20 writes the normed activation, reads it back in a second kernel and writes it quantised; fused kernels
            exist for AMD only.
*Flag*      ``NUMINOUS_MOE_NORM_QUANT=1``.
*Undo*      leave the flag unset.
"""

from __future__ import annotations

from collections.abc import Iterator

from numinous_moe_gemm.options import NORM_QUANT, VERIFY
from numinous_tooling.patching import Feature, Hook, stock_pin
from numinous_tooling.patching.serve_command import ServeCommand

NORM = "sglang.srt.layers.layernorm:RMSNorm"
UTILS = "sglang.srt.layers.quantization.fp8_utils"
KERNELS = "sglang.kernels.ops.quantization.fp8_kernel"
OURS = "numinous_moe_gemm.engine.norm_quant"

FEATURE = Feature(
    id=NORM_QUANT,
    sentence="RMSNorm and the FP8 quantisation of its output in one kernel in front of block-FP8 linears, same bits.",
    arch={"sm90": "run"},
    patches=(
        Hook(
            id="moe.norm_quant.01",
            target=f"{NORM}.forward_cuda",
            kind="around",
            call=f"{OURS}:around_norm",
            pins=(stock_pin(f"{NORM}.forward_cuda", "eddbd6ba862e4c4d"),),
        ),
        Hook(
            id="moe.norm_quant.02",
            target=f"{UTILS}:deepgemm_w8a8_block_fp8_linear_with_fallback",
            kind="around",
            call=f"{OURS}:around_linear",
            pins=(
                stock_pin(
                    f"{UTILS}:deepgemm_w8a8_block_fp8_linear_with_fallback", "4de30b2133fb4431"
                ),
                # What the pair replaces, and who takes it.
                stock_pin(f"{KERNELS}:sglang_per_token_group_quant_fp8", "8c5f7c6b7491c0cc"),
                stock_pin(f"{KERNELS}:_run_per_token_group_quant_8bit_kernel", "ffd1f4dacd862ec7"),
                stock_pin(f"{KERNELS}:w8a8_block_fp8_matmul_deepgemm", "659c5820f7024e4a"),
            ),
        ),
    ),
    options=(VERIFY,),
    judge="numinous_moe_gemm.hooks.norm_quant:judge",
    upstream="none",
    evidence=(
        "moe-gemm/rmsnorm_quant.jsonl",
        "moe-gemm/norm_quant.jsonl",
        "gate/serving.jsonl",
        "gate/accuracy.jsonl",
    ),
)


def judge(command: ServeCommand) -> Iterator[str]:
    """Why this launch cannot use the feature, one line each."""
    backend = command.get("fp8_gemm_runner_backend")
    if backend not in (None, "auto", "deep_gemm"):
        yield f"--fp8-gemm-backend {backend} takes block-FP8 linears away from DeepGEMM; the feature hooks DeepGEMM's"
    if command.get("enable_deterministic_inference"):
        yield "--enable-deterministic-inference runs another norm, whose bits this kernel does not give"
    if command.get("rl_on_policy_target"):
        yield "--rl-on-policy-target runs another norm, whose bits this kernel does not give"
    if command.environ.get("SGLANG_ENABLE_JIT_DEEPGEMM", "").lower() in ("0", "false", "no", "n"):
        yield "SGLANG_ENABLE_JIT_DEEPGEMM switches DeepGEMM off; the feature hooks DeepGEMM's block-FP8 linears"
    if command.environ.get("FLASHINFER_USE_CUDA_NORM") == "1":
        yield "FLASHINFER_USE_CUDA_NORM runs another norm, whose bits this kernel does not give"
