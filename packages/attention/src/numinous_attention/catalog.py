# SPDX-License-Identifier: Apache-2.0
"""The kernels of this package; loads without torch."""

from __future__ import annotations

from numinous_tooling.catalog import Kernel

RUN = {**dict.fromkeys(("sm90", "sm100", "sm103", "sm120", "gfx950"), "compiled"), "sm90": "run"}

KERNELS = (
    Kernel(
        op="extend_attention",
        package="attention",
        declared="numinous_attention.workbench.extend_attention:OP",
        sentence="Attends from chunks of new tokens over cached prefixes and themselves, head dims to 512; a KV tile is read once for its group of query heads, windows are skipped.",
        arch=RUN,
        evidence=(
            "extend_attention-2dd02f9fe38e",
            "extend_attention-a4b379ded8f7",
            "extend_attention-2b7738535553",
            "extend_attention-c5e58d5d3a7f",
            "extend_attention-09cd191e59ab",
            "extend_attention-a44591212593",
            "extend_attention-3bbe8920436f",
            "extend_attention-32296d9c3d23",
        ),
        peers=("sglang", "flashinfer-fa2", "fa3"),
    ),
    Kernel(
        op="verify_attention",
        package="attention",
        declared="numinous_attention.workbench.verify_attention:OP",
        sentence="Attends from a few draft tokens a request, chains or trees, over long cached prefixes that are split over programs and joined by lse; head dims to 512.",
        arch=RUN,
        evidence=(
            "verify_attention-931621fc4875",
            "verify_attention-d334a23c31e4",
            "verify_attention-8d31adfb2775",
            "verify_attention-e916f3b30ae7",
            "verify_attention-b6012e87ff1b",
            "verify_attention-d46881721c36",
            "verify_attention-c7006a611a23",
            "verify_attention-d8d99dc13819",
        ),
        peers=("sglang", "sglang-splitkv", "sglang-decode", "flashinfer-fa2", "fa3"),
    ),
    Kernel(
        op="qk_norm_rope_store",
        package="attention",
        declared="numinous_attention.workbench.qk_norm_rope_store:OP",
        sentence="RMSNorm of query and key heads, rotary embedding and the write to the KV cache (bf16, FP8, slots of window pools translated) in one kernel, for Gemma 3 and 4.",
        arch=RUN,
        evidence=(
            "qk_norm_rope_store-e8ebc7393009",
            "qk_norm_rope_store-374043a990fe",
            "qk_norm_rope_store-9bf34c307338",
            "qk_norm_rope_store-f1c1ef6799df",
            "qk_norm_rope_store-d4467817fcbc",
            "qk_norm_rope_store-13ce5e5edfce",
            "qk_norm_rope_store-6bc146090386",
            "qk_norm_rope_store-cda93eff03a3",
        ),
        peers=("sglang",),
    ),
)
