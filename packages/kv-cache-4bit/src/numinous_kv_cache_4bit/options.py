# SPDX-License-Identifier: Apache-2.0
"""Names and options of the features of this package, which declarations and adapters share."""

from __future__ import annotations

from numinous_tooling.patching import Option
from numinous_tooling.patching.feature import flag_of

GLM_FLASH_FP8 = "kv4.glm_flash_fp8"
GLM_FLASH = "kv4.glm_flash"
FLASH_ARCHITECTURES = (
    "Glm5NextForConditionalGeneration",
    "Glm5NextForConditionalGenerationNextN",  # its draft
)

GLM_DSA = "kv4.glm_dsa"
DSA_ARCHITECTURES = ("GlmMoeDsaForCausalLM", "GlmMoeDsaForCausalLMNextN")
DSA_PREFILLS = ("flashmla_kv", "flashmla_sparse", "flashmla_sparse_q8")
"""What `--dsa-prefill-backend` may be with 352-byte rows."""

MLA_DENSE = "kv4.mla_dense"
DENSE_ARCHITECTURES = (
    "DeepseekV3ForCausalLM",
    "DeepseekV3ForCausalLMNextN",
    "DeepseekV2ForCausalLM",
    "KimiK25ForConditionalGeneration",  # K2.5, K2.6, K2.7
)
DENSE_BACKENDS = ("fa3", "flashmla", "flashinfer", "triton")
"""Attention backends that read a bf16 cache of these models on Hopper; stock's choice is the first."""
NATIVE_DENSE_BACKENDS = ("fa3", "flashmla")
"""Of these, the ones whose page tables of 64-token pages native decode reads."""

MLA_DECODE_FP8 = "kv4.mla_decode_fp8"
FP8_ARCHITECTURES = (
    *DSA_ARCHITECTURES,
    "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLMNextN",  # its draft
    *FLASH_ARCHITECTURES,  # with `kv4.glm_flash_fp8`
)

SCRATCH, NATIVE = "scratch", "native"
DECODE = {
    feature: Option(
        name=f"{flag_of(feature)}_DECODE",
        kind="str",
        default=SCRATCH,
        doc="How decode reads 4-bit rows: converted for stock's kernel (scratch), or by sparse_mla_decode where they lie (native).",
        choices=(SCRATCH, NATIVE),
    )
    for feature in (GLM_DSA, GLM_FLASH, MLA_DENSE)
}
"""The option of each feature with 4-bit rows."""

NVFP4_TRITON = "kv4.nvfp4_triton"
SLIDING_ARCHITECTURES = (
    "GptOssForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
)
"""Of the models that have a pool for sliding windows, the ones whose attention was read."""
HYBRID_ARCHITECTURES = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",  # Qwen 3.5, 3.6 and 3.8, text only
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
"""Of the models with linear attention (Gated DeltaNet), likewise."""
FP8, NVFP4 = "fp8", "nvfp4"
NVFP4_KEYS = Option(
    name=f"{flag_of(NVFP4_TRITON)}_KEYS",
    kind="str",
    default=NVFP4,
    doc="What keys are kept in: NVFP4 like values (4.5 bits a value), or FP8 for models that lose too much by it (6.25 bits a value of both).",
    choices=(NVFP4, FP8),
)
NVFP4_SCALES = Option(
    name=f"{flag_of(NVFP4_TRITON)}_SCALES",
    kind="str",
    default="amax",
    doc="How NVFP4's block scales are chosen: by the largest value (amax), or by a search for the least squared error, paid at the write (mse).",
    choices=("amax", "mse"),
)
NVFP4_FLASHINFER = "kv4.nvfp4_flashinfer"
FLASHINFER_VERSION = "0.6.18"
"""Whose NVFP4 reads were read; what a caller has to do for them is not its documentation's."""
FLASHINFER_DIMS = (64, 128, 256)
"""Head dims: its kernels copy block scales by four, and count them in powers of two."""
CPU_PLATFORM = "numinous-cpu"
"""Value of `SGLANG_PLATFORM` with which the engine serves on a CPU."""
