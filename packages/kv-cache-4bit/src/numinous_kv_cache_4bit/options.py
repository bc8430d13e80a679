# SPDX-License-Identifier: Apache-2.0
"""Names of the features of this package, which declarations and adapters share."""

from __future__ import annotations

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

NVFP4_TRITON = "kv4.nvfp4_triton"
CPU_PLATFORM = "numinous-cpu"
"""Value of `SGLANG_PLATFORM` with which the engine serves on a CPU."""
