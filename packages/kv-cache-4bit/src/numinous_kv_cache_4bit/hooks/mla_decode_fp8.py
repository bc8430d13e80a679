# SPDX-License-Identifier: Apache-2.0
"""Declaration of ``kv4.mla_decode_fp8``: decode of stock's FP8 rows of sparse MLA by `sparse_mla_decode`, on Hopper.

*Seam*      `_forward_flashmla_kv`, and two functions in which a launch is refused.
*Why*       Stock 0.5.20 decodes DSA models with an FP8 cache through FlashMLA, which has kernels for 64 and 128 query heads: a rank of
            TP8 has 8 of GLM-5.3's 64 and computes for 64. The kernel of this room takes 1 to 128.
*Flag*      ``NUMINOUS_KV4_MLA_DECODE_FP8=1`` with ``--kv-cache-dtype fp8_e4m3``; for GLM-5.3-Flash ``NUMINOUS_KV4_GLM_FLASH_FP8=1`` beside it.
*Neighbour* stock itself.
*Undo*      leave the flag unset.
"""

from __future__ import annotations

from collections.abc import Iterator

from numinous_kv_cache_4bit.hooks.kept_rows import (
    ATTENTION_CALLS,
    BACKEND,
    CONFIGURATOR,
    HYBRID_POOL,
    SCHEDULES,
    SIZING,
    STOCK_ROWS,
)
from numinous_kv_cache_4bit.hooks.launch import judge_rows
from numinous_kv_cache_4bit.options import (
    DSA_PREFILLS,
    FLASH_ARCHITECTURES,
    FP8_ARCHITECTURES,
    GLM_DSA,
    GLM_FLASH,
    GLM_FLASH_FP8,
    MLA_DECODE_FP8,
    MLA_DENSE,
)
from numinous_tooling.formats import STOCK_FP8, STOCK_FP8_NO_ROPE
from numinous_tooling.patching import Feature, Hook, stock_pin
from numinous_tooling.patching.feature import flag_of
from numinous_tooling.patching.flags import parse_bool
from numinous_tooling.patching.serve_command import ServeCommand

CONFIGURE = f"{SIZING}:create_memory_pool_configurator"
OURS = "numinous_kv_cache_4bit.engine.mla_decode_fp8"

FEATURE = Feature(
    id=MLA_DECODE_FP8,
    sentence="Decode of the engine's FP8 cache of sparse MLA (GLM-5.3, DeepSeek V3.2) on Hopper by a kernel that pads no heads.",
    arch={"sm90": "emulated"},
    patches=(
        Hook(
            id="kv4.mla_decode_fp8.01",
            target=CONFIGURE,
            kind="before",
            call=f"{OURS}:before_pool_sizing",
            pins=(
                stock_pin(CONFIGURE, "3fa65491f3cd9416"),
                # The row width: which layout the pool has.
                stock_pin(f"{CONFIGURATOR}:calculate_mla_kv_cache_dim", "24d289146cfc6db0"),
            ),
        ),
        Hook(
            id="kv4.mla_decode_fp8.02",
            target=f"{BACKEND}.__init__",
            kind="after",
            call=f"{OURS}:after_backend",
            pins=(
                stock_pin(f"{BACKEND}.__init__", "3a45fa68f9968b19"),
                HYBRID_POOL,
                *STOCK_ROWS,
            ),
        ),
        Hook(
            id="kv4.mla_decode_fp8.03",
            target=f"{BACKEND}._forward_flashmla_kv",
            kind="around",
            call=f"{OURS}:around_attention",
            pins=(*ATTENTION_CALLS, *SCHEDULES),
        ),
    ),
    conflicts=(GLM_DSA, GLM_FLASH, MLA_DENSE),
    judge="numinous_kv_cache_4bit.hooks.mla_decode_fp8:judge",
    upstream="none",
)


def judge(command: ServeCommand) -> Iterator[str]:
    """Why this launch cannot use the feature, one line each."""
    names = (command.model_config or {}).get("architectures") or [None]
    flash = names[0] in FLASH_ARCHITECTURES
    row = STOCK_FP8_NO_ROPE if flash else STOCK_FP8
    yield from judge_rows(command, row, FP8_ARCHITECTURES, DSA_PREFILLS)
    flag = flag_of(GLM_FLASH_FP8)
    if flash and not parse_bool(flag, command.environ.get(flag, "")):
        yield f"{names[0]} keeps FP8 rows with {GLM_FLASH_FP8} only: set {flag}=1, too"
