# SPDX-License-Identifier: Apache-2.0
"""The two writes beside what they were, in one run; gone with the verdict, as `before` is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numinous_kv_cache_4bit.kernels import nvfp4_write as nvfp4
from numinous_kv_cache_4bit.kernels.before import kv4_write as kv4_before
from numinous_kv_cache_4bit.kernels.before import nvfp4_write as nvfp4_before
from numinous_kv_cache_4bit.kernels.kv4_write import Tile as Rows
from numinous_kv_cache_4bit.kernels.nvfp4_write import Tile as Blocks
from numinous_kv_cache_4bit.workbench import kv4_write, nvfp4_write
from numinous_kv_cache_4bit.workbench.shared import sweep
from numinous_tooling.workbench import Implementation, Op, Tensors


def _with_before(op: Op, run: Any) -> Op:
    before = {"before": Implementation(run=run, interpret=True)}
    return replace(
        op,
        name=op.name.replace("sweep", "trial"),
        implementations={**op.implementations, **before},
    )


def _kv4_before(case: Any, inputs: Tensors) -> Tensors:
    kv4_before.kv4_write(
        kv4_write.pool_of(case, inputs),
        inputs["loc"],
        inputs["latent"],
        inputs["rope"],
        global_scale=case.scale,
        scale_choice=case.choice,
    )
    return {"memory": inputs["memory"]}


KV4 = _with_before(
    sweep(
        kv4_write.OP,
        kv4_write._run,
        (Rows(8, 4), Rows(4, 4), Rows(4, 4, 792), Rows(8, 4, 792)),
        (
            *(kv4_write.Case(tokens) for tokens in (64, 4096, 65536)),
            *(kv4_write.Case(tokens, 288) for tokens in (4096, 65536)),
        ),
    ),
    _kv4_before,
)
NVFP4 = _with_before(
    sweep(
        nvfp4_write.OP,
        lambda case, inputs, tile: nvfp4_write._call(nvfp4.nvfp4_write, case, inputs, tile=tile),
        (Blocks(128, 4), Blocks(128, 4, 528), Blocks(256, 8, 396)),
        (
            *(nvfp4_write.Case(tokens) for tokens in (64, 4096, 16384)),
            nvfp4_write.Case(16384, keys="fp8"),
        ),
    ),
    lambda case, inputs: nvfp4_write._call(nvfp4_before.nvfp4_write, case, inputs),
)
