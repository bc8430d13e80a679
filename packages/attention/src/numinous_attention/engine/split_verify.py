# SPDX-License-Identifier: Apache-2.0
"""Adapter of ``attention.split_verify``: `verify_attention` in front of whatever serves `extend_attention_fwd`.

*Rule*     Calls whose longest chunk has at most 16 tokens, which the backend knows on the host: verification of drafts, their re-computation by the draft model, and
           prefills that are as short. The rest goes on: to `attention.gqa_extend` where that is on, for it is declared first and so stands behind, else to stock.
*Meaning, ids, ranks*  as in `engine.gqa_extend`, whose dispatcher this is with another kernel and another choice.
*Bits*     Not stock's; and the number of splits, so the last bits, depend on how many requests are in the batch.
*Graphs*   Splits come from shapes. A captured graph has room for the longest context, so it splits as for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from numinous_attention.engine.gqa_extend import GqaExtend, judge_backend
from numinous_attention.kernels.verify_attention import verify_attention
from numinous_attention.options import MAX_DRAFTS, SPLIT_VERIFY
from numinous_tooling.patching.counters import counters

count = counters(SPLIT_VERIFY)


def after_backend(result: None, backend: Any, model_runner: Any, *args: Any, **named: Any) -> None:
    """`TritonAttnBackend.__init__`: its calls of `extend_attention_fwd` come here first."""
    judge_backend(backend, model_runner, SPLIT_VERIFY)
    backend.extend_attention_fwd = torch.compiler.disable(SplitVerify(backend.extend_attention_fwd))


class SplitVerify(GqaExtend):
    """The dispatcher of `attention.gqa_extend` for calls of short chunks.

    Args:
        stock: the engine's function, or the dispatcher of `attention.gqa_extend`.
    """

    def __init__(self, stock: Callable[..., None]) -> None:
        super().__init__(stock, layers="all", min_chunk=1)

    def count(self) -> Any:
        """Counters of the feature."""
        return count

    def kernel(self, *given: Any, **named: Any) -> None:
        """What attends."""
        verify_attention(*given, **named)

    def choice(self, window: int | None, longest: int) -> str | None:
        """Why a call is handed on; None if it is not."""
        return "long_chunk" if longest > MAX_DRAFTS else None
