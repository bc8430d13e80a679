# SPDX-License-Identifier: Apache-2.0
"""The kernels of this package; loads without torch."""

from __future__ import annotations

from numinous_tooling.catalog import Kernel

COMPILED = dict.fromkeys(("sm90", "sm100", "sm103", "sm120", "gfx950"), "compiled")
RUN = {**COMPILED, "sm90": "run"}

KERNELS = (
    Kernel(
        op="kv4_write",
        package="kv-cache-4bit",
        declared="numinous_kv_cache_4bit.workbench.kv4_write:OP",
        sentence="Quantises MLA latent and rope of new tokens to packed 4-bit rows and writes them at their slots.",
        arch=RUN,
        evidence=(
            "kv4_write-fd25a61bebcb",
            "kv4_write-3bc589d5763b",
            "kv4_write-cef0fc5796e8",
            "kv4_write-d874633ddf58",
            "kv4_write-f50a643bf09b",
            "kv4_write-2b3eeb736b1d",
            "kv4_write-de8782d27945",
            "kv4_write-9207d82405ea",
            "kv4_write-565f86fe4acd",
            "kv4_write-b4349391a27f",
            "kv4_write-6db64d36ac8f",
            "kv4_write-daa25823f24f",
        ),
        peers=("sglang-fp8", "sglang-bf16"),
    ),
    Kernel(
        op="kv4_gather",
        package="kv-cache-4bit",
        declared="numinous_kv_cache_4bit.workbench.kv4_gather:OP",
        sentence="Gathers 4-bit MLA rows by index into FlashMLA's FP8 rows or into bf16 rows.",
        arch=RUN,
        evidence=(
            "kv4_gather-a74483feeff6",
            "kv4_gather-9390ea68146b",
            "kv4_gather-cff577b1aba1",
            "kv4_gather-410b97204b8b",
            "kv4_gather-49e76fc674b9",
            "kv4_gather-3cbb98a65242",
            "kv4_gather-83a01aad2557",
            "kv4_gather-c7beb7315ae9",
        ),
        peers=("sglang-dequantize", "sglang-requantize"),
    ),
    Kernel(
        op="kv4_compact",
        package="kv-cache-4bit",
        declared="numinous_kv_cache_4bit.workbench.kv4_compact:OP",
        sentence="Lists the distinct rows of a batch of top-k tables once and renumbers the tables, without a synchronisation.",
        arch=RUN,
        evidence=(
            "kv4_compact-925581862ba6",
            "kv4_compact-f48a1e32d749",
            "kv4_compact-defdd64c801b",
            "kv4_compact-c84182393e39",
            "kv4_compact-ece631e9c884",
        ),
        peers=("torch-sort",),
    ),
    Kernel(
        op="kv4_expand",
        package="kv-cache-4bit",
        declared="numinous_kv_cache_4bit.workbench.kv4_expand:OP",
        sentence="Decodes the live 4-bit MLA rows of a batch in place to bf16 rows that stock attention reads.",
        arch=RUN,
        evidence=(
            "kv4_expand-0b3ccbdde80c",
            "kv4_expand-514eaaa5920e",
            "kv4_expand-6c6360dd83ba",
            "kv4_expand-014173af841b",
            "kv4_expand-2ff57a55afc5",
        ),
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
