# SPDX-License-Identifier: Apache-2.0
"""Declaration of ``kv4.glm_flash``: 4-bit KV for GLM-5.3-Flash (rope-free MLA in a hybrid model), rows of 288 bytes.

*Seam*      the width of a pool's row, its writer and readers, FlashMLA over the pool, and the functions between it and the k-pool
            indexer's tables, as ``kv4.glm_flash_fp8`` has them.
*Why*       Stock 0.5.20 serves this model on Hopper with a bf16 cache alone, 1024 bytes a row. A 288-byte row holds 512 latent values as
            E2M1 with an E4M3 scale for 16.
*Flag*      ``NUMINOUS_KV4_GLM_FLASH=1`` with ``--kv-cache-dtype fp8_e4m3``.
*Neighbour* stock's bf16 cache of the same model, and ``kv4.glm_flash_fp8``; benchmarks run both as the other arms.
*Undo*      leave the flag unset.
"""

from __future__ import annotations

from collections.abc import Iterator

from numinous_kv_cache_4bit.hooks.glm_flash_fp8 import prefix_hook, table_hooks
from numinous_kv_cache_4bit.hooks.kept_rows import kept_rows_hooks
from numinous_kv_cache_4bit.hooks.launch import judge_rows
from numinous_kv_cache_4bit.options import DECODE, FLASH_ARCHITECTURES, GLM_FLASH, GLM_FLASH_FP8
from numinous_tooling.formats import KV4_NO_ROPE
from numinous_tooling.patching import Feature
from numinous_tooling.patching.serve_command import ServeCommand

OURS = "numinous_kv_cache_4bit.engine.glm_flash"

FEATURE = Feature(
    id=GLM_FLASH,
    sentence="4-bit KV cache for GLM-5.3-Flash on Hopper: 2.75 times the tokens of bf16 in the same memory.",
    arch={"sm90": "emulated"},
    patches=(
        *kept_rows_hooks(GLM_FLASH, OURS),
        *table_hooks(GLM_FLASH, 8),
        prefix_hook(GLM_FLASH, 10, OURS),
    ),
    conflicts=(GLM_FLASH_FP8,),
    options=(DECODE[GLM_FLASH],),
    judge="numinous_kv_cache_4bit.hooks.glm_flash:judge",
    upstream="none",
)


def judge(command: ServeCommand) -> Iterator[str]:
    """Why this launch cannot use the feature, one line each."""
    return judge_rows(command, KV4_NO_ROPE, FLASH_ARCHITECTURES)
