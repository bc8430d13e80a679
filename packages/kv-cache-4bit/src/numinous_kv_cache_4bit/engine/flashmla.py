# SPDX-License-Identifier: Apache-2.0
"""The engine's FlashMLA behind `DeepseekSparseAttnBackend`, called with other widths than the backend's own: what the features share.

*Width*   FlashMLA takes whole blocks of 64 slots. A k-pool indexer names `index_topk` of them and up to `index_kpool` - 1 tail
          tokens, so tables are padded with -1, which the kernel masks (scale and codes become zeros, NaN in slot 0 included).
*View*    Stock's own code runs, with a view of the backend in place of `self` in which the widths are ours.
*Turns*   Partial outputs are fp32, 131 kB a row: more than `ROWS` rows go in turns. A schedule depends on the number of rows and
          the width alone, so it is made for a turn without looking at lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata as distributions
from types import SimpleNamespace
from typing import Any

import torch

KERNEL_DISTRIBUTION, KERNEL_VERSION = "sglang-kernel", "0.4.7"
BLOCK = 64  # slots that FlashMLA takes at a time, and rows of a page
ROWS = 4096  # of one call: 0.54 GB of partial outputs


def padded_width(index_topk: int, index_kpool: int) -> int:
    """Slots per query row: the top-k and the longest tail, in whole blocks."""
    return -(-(index_topk + index_kpool - 1) // BLOCK) * BLOCK


class View:
    """A backend as stock's FlashMLA code sees it. Reads only; nothing is set through it.

    Args:
        backend: `DeepseekSparseAttnBackend`.
        row: bytes of a row of the cache that the kernel is given.
    """

    def __init__(self, backend: Any, row: int) -> None:
        self._backend = backend
        self.dsa_index_topk = padded_width(backend.dsa_index_topk, backend.dsa_index_kpool)
        self.kv_cache_dim = row

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def kernel_version() -> str | None:
    """Version of the installed sglang-kernel, which FlashMLA is part of."""
    try:
        return distributions.version(KERNEL_DISTRIBUTION)
    except distributions.PackageNotFoundError:
        return None


def backend_problem(
    backend: Any, row: int, prefill: tuple[str, ...] = ("flashmla_kv",)
) -> str | None:
    """Why FlashMLA cannot serve this backend, in one line; None if it can.

    Args:
        row: bytes of a row of the pool.
        prefill: what `--dsa-prefill-backend` may be; decode is `flashmla_kv`.
    """
    if backend.kv_cache_dim != row or not backend.dsa_kv_cache_store_fp8:
        return f"the pool's rows are {backend.kv_cache_dim} wide, not {row}"
    for phase, may_be in (("prefill", prefill), ("decode", ("flashmla_kv",))):
        chosen = getattr(backend, f"dsa_{phase}_impl")
        if chosen not in may_be:
            return (
                f"--dsa-{phase}-backend {chosen} does not read {row}-byte rows; leave the flag out"
            )
    if backend.flashmla_kv_num_q_heads not in (64, 128):
        return (
            f"{backend.num_q_heads} query heads per rank; FlashMLA takes up to 128: raise --tp-size"
        )
    if backend.real_page_size != BLOCK:
        return f"pages of {backend.real_page_size} tokens; FlashMLA takes pages of {BLOCK}"
    pool = backend.token_to_kv_pool
    if pool.size + pool.page_size > torch.iinfo(torch.int32).max:
        return f"{pool.size} slots; FlashMLA's ids are 32 bits: lower --mem-fraction-static"
    return None


def around_tail_check(
    original: Callable[..., None], backend: Any, topk_indices: Any, dsa_impl: str, phase: str
) -> None:
    """`_check_kpool_tail_backend`: FlashMLA takes tails, too."""
    if dsa_impl != "flashmla_kv":
        original(backend, topk_indices, dsa_impl, phase)


def around_schedule(
    original: Callable[..., Any], backend: Any, cache_seqlens: torch.Tensor, seq_len_q: int
) -> Any:
    """`_compute_flashmla_metadata`: the schedule of `len(cache_seqlens)` rows of the padded width."""
    # Of an idle rank there are none: FlashMLA's scheduler refuses that, and nobody reads the result.
    if not len(cache_seqlens):
        cache_seqlens = cache_seqlens.new_ones(1)
    return original(View(backend, backend.kv_cache_dim), cache_seqlens, seq_len_q)


def padded_table(view: View, table: torch.Tensor, feature: str) -> torch.Tensor:
    """A top-k table, int32 [rows, padded width], -1 where there is no slot."""
    missing = view.dsa_index_topk - table.shape[-1]
    if missing < 0:  # padding by a negative number would cut slots off
        raise RuntimeError(
            f"{feature}: the indexer names {table.shape[-1]} slots, more than {view.dsa_index_topk}"
        )
    table = table.to(torch.int32)
    return torch.nn.functional.pad(table, (0, missing), value=-1) if missing else table


def attend(
    original: Callable[..., torch.Tensor],
    view: View,
    q_all: torch.Tensor,
    cache: torch.Tensor,
    v_head_dim: int,
    sm_scale: float,
    layer: Any,
    metadata: Any,
    table: torch.Tensor,
) -> torch.Tensor:
    """Stock's `_forward_flashmla_kv` on at least one row, in turns where there are many.

    Args:
        q_all: bf16 [rows, heads, 512 or 576].
        cache: [slots, 1, bytes], 1-byte type, whole pages.
        metadata: of the batch; its schedule is used where it is one of as many rows.
        table: int32 [rows, padded width], rows of `cache`; -1 where there is none.

    Returns:
        bf16 [rows, 1, heads, 512]; zeros in rows without a slot.
    """
    rows = len(q_all)

    def turn(begin: int, end: int, plan: Any) -> torch.Tensor:
        return original(
            view,
            q_all[begin:end],
            cache,
            v_head_dim,
            sm_scale,
            layer,
            plan,
            table[begin:end],
        )

    # Ragged or padded batches bring more rows than their metadata counts.
    if rows <= ROWS and len(metadata.dsa_cache_seqlens_int32) == rows:
        return turn(0, rows, metadata)
    parts = [
        turn(begin, end, plan(view, end - begin, q_all.device))
        for begin in range(0, rows, ROWS)
        for end in (min(begin + ROWS, rows),)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def plan(backend: Any, rows: int, device: torch.device) -> Any:
    """What `_forward_flashmla_kv` reads of the metadata of a batch; the lengths are not looked at, only their number is."""
    lengths = torch.ones(rows, dtype=torch.int32, device=device)
    return SimpleNamespace(
        dsa_cache_seqlens_int32=lengths,
        flashmla_metadata=backend._compute_flashmla_metadata(cache_seqlens=lengths, seq_len_q=1),
    )


def prefix_slots(forward_batch: Any, feature: str) -> torch.Tensor:
    """Slots of all tokens of a batch that prefills as multi-head attention behind a cached prefix, request by request.

    Stock asks the outermost backend for its metadata, which the wrapper of hybrid models does not have.
    """
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha import (
        resolve_attn_backend,
    )

    slots: torch.Tensor | None = resolve_attn_backend(
        forward_batch
    ).forward_metadata.page_table_1_flattened
    if slots is None:
        raise RuntimeError(f"{feature}: no page table for the cached prefix of this batch")
    return slots
