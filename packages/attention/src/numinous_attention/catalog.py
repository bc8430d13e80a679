# SPDX-License-Identifier: Apache-2.0
"""The kernels of this package; loads without torch."""

from __future__ import annotations

from numinous_tooling.catalog import Kernel

KERNELS = (
    Kernel(
        op="extend_attention",
        package="attention",
        declared="numinous_attention.workbench.extend_attention:OP",
        sentence="Attends from chunks of new tokens over cached prefixes and themselves, head dims to 512; a KV tile is read once for its group of query heads, windows are skipped.",
        arch=dict.fromkeys(("sm90", "sm100", "sm103", "sm120", "gfx950"), "compiled"),
        peers=("sglang", "flashinfer-fa2", "fa3"),
    ),
    Kernel(
        op="verify_attention",
        package="attention",
        declared="numinous_attention.workbench.verify_attention:OP",
        sentence="Attends from a few draft tokens a request, chains or trees, over long cached prefixes that are split over programs and joined by lse; head dims to 512.",
        arch=dict.fromkeys(("sm90", "sm100", "sm103", "sm120", "gfx950"), "compiled"),
        peers=("sglang", "sglang-splitkv", "sglang-decode", "flashinfer-fa2", "fa3"),
    ),
    Kernel(
        op="qk_norm_rope_store",
        package="attention",
        declared="numinous_attention.workbench.qk_norm_rope_store:OP",
        sentence="RMSNorm of query and key heads, rotary embedding and the write to the KV cache (bf16, FP8, slots of window pools translated) in one kernel, for Gemma 3 and 4.",
        arch=dict.fromkeys(("sm90", "sm100", "sm103", "sm120", "gfx950"), "compiled"),
        peers=("sglang",),
    ),
)
