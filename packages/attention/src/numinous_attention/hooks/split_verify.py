# SPDX-License-Identifier: Apache-2.0
"""Declaration of ``attention.split_verify``: verification of drafts, and prefills as short, by `verify_attention`.

*Seam*      the constructor of `TritonAttnBackend`, as for ``attention.gqa_extend``, whose pins say what both rely on.
*Why*       Stock 0.5.20 verifies drafts with its prefill kernel: a program walks the whole prefix of a request for one query head. Its split kernel is for gfx950, and for chains without
            windows, sinks and caps; no tree is split.
*Flag*      ``NUMINOUS_ATTENTION_SPLIT_VERIFY=1``, with ``--attention-backend triton``.
*Beside*    ``attention.gqa_extend``: this one is asked first and takes chunks of up to 16 tokens, that one the rest. Where stock has its own split kernel on (gfx950,
            chains), it is asked before both.
*Neighbour* stock's split kernel (``SGLANG_ENABLE_SPLITKV_VERIFY``), stock's prefill kernel.
*Undo*      leave the flag unset.
"""

from __future__ import annotations

from collections.abc import Iterator

from numinous_attention.hooks import gqa_extend
from numinous_attention.options import SPLIT_VERIFY
from numinous_tooling.patching import Feature, Hook, stock_pin
from numinous_tooling.patching.serve_command import ServeCommand

OURS = "numinous_attention.engine.split_verify"

FEATURE = Feature(
    id=SPLIT_VERIFY,
    sentence="Verification of drafts on the Triton backend, chains and trees: prefixes are split over programs, a KV tile is read once for all rows of its group.",
    arch={"cpu": "emulated"}
    | dict.fromkeys(("sm90", "sm100", "sm103", "sm120", "gfx950"), "compiled"),
    patches=(
        Hook(
            id=f"{SPLIT_VERIFY}.01",
            target=f"{gqa_extend.TRITON}.__init__",
            kind="after",
            call=f"{OURS}:after_backend",
            pins=(
                *gqa_extend.FEATURE.patches[0].pins,
                # Tables of a captured verification.
                stock_pin(f"{gqa_extend.TRITON}._update_target_verify_buffers", "b0760704e745a898"),
            ),
        ),
    ),
    order=gqa_extend.FEATURE.order + 1,  # hooks run in this order: the last stands in front
    conflicts=gqa_extend.FEATURE.conflicts,
    judge="numinous_attention.hooks.split_verify:judge",
    upstream="none",
)  # fmt: skip


def judge(command: ServeCommand) -> Iterator[str]:
    """Why this launch cannot use the feature, one line each."""
    yield from gqa_extend.judge(command)
    backend = command.get("decode_attention_backend")
    if command.get("speculative_attention_mode") == "decode" and backend not in (None, "triton"):
        yield f"drafts are verified by attention backend {backend}; triton is covered"
