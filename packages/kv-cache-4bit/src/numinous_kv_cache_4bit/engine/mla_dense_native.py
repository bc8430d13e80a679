# SPDX-License-Identifier: Apache-2.0
"""Native decode of ``kv4.mla_dense``: `sparse_mla_decode` with the page tables that stock's backends made, in place of shadow and backend.

*Which*    decode, a draft's steps, verification, a draft's catching up, of up to `MOST_QUERIES` tokens a request, the same number of each:
           the batch's mode and shapes decide, on the host. Prefill keeps the shadow.
*Tables*   FlashAttention 3's and FlashMLA's backends keep a page table and lengths, of captured graphs in buffers that are refilled before
           each replay; with pages of 64 tokens they are what the kernel takes: query j of s sees the first length - (s - 1 - j) tokens.
           FlashMLA's is handed out as a slice as wide as the batch at hand needs; a captured call has to see as much as any replay's, so
           the rows of the buffer behind it are taken whole. Nobody reads beyond a length. Pages of another size are refused at boot.
*Queries*  FlashMLA's backend gets latent and rope joined; FlashAttention 3 takes them apart, so there they are joined here, with stock's
           kernel: 2 x 1152 bytes a head and row, for 128 heads and 64 rows 18.9 MB, 4.4 us at 4.25 TB/s (*derived*), each layer.
*Splits*   A table is as wide as the longest context, so the kernel's own choice of splits may leave gigabytes of partial outputs; they are
           bounded here, from shapes.
"""

from __future__ import annotations

from typing import Any

import torch

from numinous_kv_cache_4bit.engine import native
from numinous_kv_cache_4bit.engine.rows import KeptRows
from numinous_kv_cache_4bit.kernels.sparse_mla_decode import (
    MAX_SPLITS,
    choose_splits,
    processors_of,
)
from numinous_tooling.formats import LATENT_DIM

PART = 4 * (LATENT_DIM + 1)  # bytes of a head's partial output
PARTS = 2**28  # bytes of all of a call


def attend(
    rows: KeptRows,
    backend: Any,
    pool: Any,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    layer: Any,
    batch: Any,
    save_kv_cache: bool,
    *,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Write the batch's tokens and attend, as `AttentionBackend.forward` does; None, with nothing done, where the batch is not for this path.

    Args:
        q: bf16, latent parts with `q_rope`, else both side by side; likewise `k` and `k_rope`.
        batch: `ForwardBatch`.

    Returns:
        bf16 [rows, heads x 512].
    """
    heads, dim = layer.tp_q_head_num, layer.head_dim
    tokens = q.numel() // (heads * (dim if q_rope is None else layer.v_head_dim))
    found = _tables(rows, backend, batch, tokens)
    if found is None:
        return None
    table, lengths, queries = found
    if k is not None and save_kv_cache:
        if k_rope is None:
            pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        else:
            pool.set_mla_kv_buffer(layer, batch.out_cache_loc, k, k_rope)
    if q_rope is not None:
        from sglang.kernels.ops.attention.utils import concat_mla_absorb_q_general

        q = concat_mla_absorb_q_general(
            q.view(-1, heads, layer.v_head_dim), q_rope.view(-1, heads, dim - layer.v_head_dim)
        )
    out = native.attend_pages(
        q.view(-1, queries, heads, dim),
        pool.kv_buffer[layer.layer_id - pool.start_layer],
        table,
        lengths,
        layer.scaling,
        most_splits(tokens, heads, table.shape[1], q.device),
    )
    rows.count.engaged()
    return out.view(-1, heads * layer.v_head_dim)


def most_splits(tokens: int, heads: int, pages: int, device: torch.device) -> int | None:
    """Splits that leave at most `PARTS` bytes of partial outputs; None, the kernel's choice, where any number of its own does.

    Args:
        pages: of a table.
    """
    most = PARTS // (PART * tokens * heads)
    if most >= MAX_SPLITS:
        return None
    # A bound and no wish: lists that fill the GPU are slower for every split.
    wanted = choose_splits(tokens * -(-heads // 64), pages, processors_of(device))
    return max(1, min(most, wanted))


def _tables(
    rows: KeptRows, backend: Any, batch: Any, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, int] | None:
    """Page table [requests, pages] and lengths [requests] of a batch, int32, and its queries a request; None where it is not for this path."""
    mode = batch.forward_mode
    if not (mode.is_decode() or mode.is_target_verify() or mode.is_draft_extend_v2()):
        return None
    queries, rest = divmod(tokens, batch.batch_size)
    if rest or not 1 <= queries <= native.MOST_QUERIES:
        rows.count.refused("queries")
        return None
    # Where prefill and decode have backends of their own, one object stands for both.
    select = getattr(backend, "_select_backend", None)
    backend = backend if select is None else select(mode)
    kind, metadata = type(backend).__name__, backend.forward_metadata
    if kind == "FlashAttentionBackend":
        if metadata.max_seq_len_q != queries:  # requests with different numbers
            rows.count.refused("queries")
            return None
        return metadata.page_table, metadata.cache_seqlens_int32, queries
    if kind == "FlashMLABackend":
        table = metadata.block_kv_indices[: batch.batch_size]
        if mode.is_draft_extend_v2():
            lengths = metadata.seq_lens_k
        else:
            lengths = batch.seq_lens + (queries if mode.is_target_verify() else 0)
        width = table.stride(0)
        return table.as_strided((len(table), width), (width, 1)), lengths.to(torch.int32), queries
    rows.refuse(f"native decode reads the page tables of fa3 and flashmla, this is a {kind}")
    return None
