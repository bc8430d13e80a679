# SPDX-License-Identifier: Apache-2.0
"""The kernels of this package; loads without torch."""

from __future__ import annotations

from numinous_tooling.catalog import Kernel

COMPILED = dict.fromkeys(("sm90", "sm100", "sm103", "sm120", "gfx950"), "compiled")

KERNELS = (
    Kernel(
        op="kv4_write",
        package="kv-cache-4bit",
        declared="numinous_kv_cache_4bit.workbench.kv4_write:OP",
        sentence="Quantises MLA latent and rope of new tokens to packed 4-bit rows and writes them at their slots.",
        arch=COMPILED,
        peers=("sglang-fp8", "sglang-bf16"),
    ),
    Kernel(
        op="kv4_gather",
        package="kv-cache-4bit",
        declared="numinous_kv_cache_4bit.workbench.kv4_gather:OP",
        sentence="Gathers 4-bit MLA rows by index into FlashMLA's FP8 rows or into bf16 rows.",
        arch=COMPILED,
        peers=("sglang-dequantize", "sglang-requantize"),
    ),
    Kernel(
        op="kv4_compact",
        package="kv-cache-4bit",
        declared="numinous_kv_cache_4bit.workbench.kv4_compact:OP",
        sentence="Lists the distinct rows of a batch of top-k tables once and renumbers the tables, without a synchronisation.",
        arch=COMPILED,
        peers=("torch-sort",),
    ),
    Kernel(
        op="kv4_expand",
        package="kv-cache-4bit",
        declared="numinous_kv_cache_4bit.workbench.kv4_expand:OP",
        sentence="Decodes the live 4-bit MLA rows of a batch in place to bf16 rows that stock attention reads.",
        arch=COMPILED,
        peers=("sglang-cast",),
    ),
    Kernel(
        op="sparse_mla_decode",
        package="kv-cache-4bit",
        declared="numinous_kv_cache_4bit.workbench.sparse_mla_decode:OP",
        sentence="Attends from a few queries to named rows of a 4-bit or FP8 MLA cache, decoded in shared memory on Hopper and Blackwell.",
        arch=COMPILED,
        peers=("flashmla-fp8", "gather-flashmla"),
        feature="kv4.mla_decode_fp8",
    ),
    Kernel(
        op="nvfp4_write",
        package="kv-cache-4bit",
        declared="numinous_kv_cache_4bit.workbench.nvfp4_write:OP",
        sentence="Quantises K and V of new tokens to NVFP4 with per-layer global scales and writes them at their slots, in one launch.",
        arch=COMPILED,
        peers=("sglang-fp8", "sglang-bf16", "sglang-nvfp4"),
    ),
    Kernel(
        op="decode_attention_nvfp4",
        package="kv-cache-4bit",
        declared="numinous_kv_cache_4bit.workbench.decode_attention_nvfp4:OP",
        sentence="Decode attention of MHA and GQA models on NVFP4 slots, decoded in the registers of the matrix product.",
        arch=COMPILED,
        peers=("sglang-fp8", "flashinfer-nvfp4", "fa3-fp8"),
    ),
)
