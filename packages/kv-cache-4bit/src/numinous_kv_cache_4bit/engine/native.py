# SPDX-License-Identifier: Apache-2.0
"""Decode that reads a cache's packed rows where they lie: `sparse_mla_decode` behind the engine's backends, what the features share.

*Which*   Batches of a few new tokens a request: decode, a draft's steps, verification, a draft's catching up. Metadata says so when it is
          built, and shapes do: `max_seq_len_q` is 1 there (every query row has a table of its own), and no request brings more than
          `MOST_QUERIES` rows. A prefill chunk of one token a request is such a batch, too. Everything else takes the path that it took.
*Graphs*  Host integers decide, so a capture and its replays decide alike; splits follow from shapes; nothing synchronises, and the kernel's
          partial outputs come from the allocator, a graph's own from its pool.
*Tables*  as the indexer gives them: any width (2048; 2051 with a k-pool's tail), -1 anywhere, int32 or int64; rows that a batch is padded
          with are all -1 and come out as zeros. Heads: as many as the rank has; nothing is padded.
*Queries* latent and rope part side by side. `DeepseekSparseAttnBackend` joins them for FlashMLA already, with or without this module, and that
          tensor is the one read here: no copy of ours. (Stock's costs 2 x 1152 bytes a head: 64 heads and 64 rows 9.4 MB, 2.2 us at
          4.25 TB/s, *derived*.) What stock does after it is left out: zeros and a copy up to 64 heads where a rank has fewer.
*Scale*   the layer's. Rows are written without a global scale, so `latent_scale` is 1; these models have no sinks.
*Memory*  partial outputs in fp32 where rows are few, 2052 bytes a head, row and split: at a top-k of 2048 at most 52 MB (*derived*), beside
          `--mem-fraction-static`, like the scratch. A pool's bytes are the same either way.
*Boot*    `prove` runs the kernel once before the first graph is captured, on rows whose answer the specification computes.
*Ranks*   Nothing that ranks exchange depends on the choice.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from numinous_kv_cache_4bit.engine.rows import KeptRows
from numinous_kv_cache_4bit.kernels.sparse_mla_decode import (
    Impl,
    other_impl,
    reference,
    sparse_mla_decode,
)
from numinous_kv_cache_4bit.options import DECODE, NATIVE, SCRATCH
from numinous_tooling.formats import LATENT_DIM, row_format
from numinous_tooling.patching.flags import option_value

MOST_QUERIES = 8  # rows of a request: what the kernel is made for
PROBE = 2048  # names in the table of `prove`
PROBE_SPLITS = (1, 3, 2, 16)
"""Of them: the output written at once, as in large batches; parts to join; on Hopper a small and a large cluster that joins."""
PROBED = 8  # rows among them

logger = logging.getLogger(__name__)

_proven: set[tuple[str, int, int]] = set()


def chosen(feature: str) -> bool:
    """Whether the option of a feature with 4-bit rows says `native`."""
    return bool(option_value(DECODE[feature]) == NATIVE)


def takes(metadata: Any, rows: int) -> bool:
    """Whether a batch of `DeepseekSparseAttnBackend` is one of few new tokens a request; host integers alone.

    Args:
        metadata: `DSAMetadata`.
        rows: of queries; with padding more than the metadata's requests times their tokens.
    """
    requests = len(metadata.cache_seqlens_int32)
    return metadata.max_seq_len_q == 1 and rows <= MOST_QUERIES * requests


def attend(
    q_all: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    sm_scale: float,
    splits: int | None = None,
    impl: Impl | None = None,
) -> torch.Tensor:
    """What `_forward_flashmla_kv` returns, of rows that have a table each.

    Args:
        q_all: bf16 [rows, heads, 512 + rope].
        cache: 1-byte type [slots, 1, width], the pool.
        table: int32 or int64 [rows, n], slots; -1 where there is none.
        splits: of each table; None lets the kernel choose.
        impl: None lets it choose, too.

    Returns:
        bf16 [rows, 1, heads, 512], contiguous; zeros in rows without a slot.
    """
    # Every row is a request of one query: rows of a request name slots of their own.
    return sparse_mla_decode(
        q_all[:, None],
        cache.view(torch.uint8),
        sm_scale=sm_scale,
        index=table[:, None],
        splits=splits,
        impl=impl,
    ).out


def attend_pages(
    q: torch.Tensor,
    cache: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    sm_scale: float,
    splits: int | None,
) -> torch.Tensor:
    """Attention of the last tokens of each request to all of its tokens up to themselves.

    Args:
        q: bf16 [requests, queries, heads, 512 + rope].
        cache: uint8 [slots, 1, width], the pool.
        pages: int32 [requests, n], of 64 slots.
        lengths: int32 [requests].

    Returns:
        bf16 [requests, queries, heads, 512], contiguous.
    """
    return sparse_mla_decode(
        q, cache, sm_scale=sm_scale, page_table=pages, lengths=lengths, splits=splits
    ).out


def prove(rows: KeptRows, heads: int, width: int, device: torch.device) -> None:
    """Run the kernel once for these heads, or end the process with one line where it cannot be had or answers wrongly.

    Args:
        heads: of this rank.
        width: bytes of a row.
    """
    if (rows.feature, heads, width) in _proven:
        return
    row = row_format(width)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    # Different rows far apart, among NaN and named in another order than theirs: weights come from scores, and those from every part.
    at = torch.linspace(3, PROBE - 3, PROBED, device=device).long()
    cache = torch.full((PROBE, width), 0x7F, dtype=torch.uint8, device=device)  # NaN
    cache[at] = row.pack(normal(PROBED, LATENT_DIM), normal(PROBED, row.rope_dim))
    q = normal(1, heads, LATENT_DIM + row.rope_dim)
    table = torch.full((1, PROBE), -1, dtype=torch.int32, device=device)
    table[0, at] = at.flip(0).to(torch.int32)
    scale = q.shape[-1] ** -0.5
    want = reference(q[:, None], cache, sm_scale=scale, index=table[:, None])["out"]
    option = DECODE.get(rows.feature)
    instead = f"set {option.name}={SCRATCH}" if option else "switch the feature off"
    try:
        ways = [(n, impl) for n in PROBE_SPLITS for impl in (None, other_impl(row, heads, device))]
        outs = [attend(q, cache[:, None], table, scale, n, impl) for n, impl in dict.fromkeys(ways)]
        wrong = float((torch.stack(outs).double() - want).abs().max())
    except Exception as error:  # whatever it is, the user has to be told what to do
        line = (str(error).splitlines() or [type(error).__name__])[0]
        rows.refuse(f"sparse_mla_decode does not run here ({line}); {instead}")
    # Values are up to 4, roundings to bf16 make less than 0.02 of them; other weights of such rows move them by 0.3 and more.
    if not wrong < 0.05:
        rows.refuse(
            f"sparse_mla_decode answers wrongly on this GPU (off by {wrong:.3g}); {instead}"
        )
    _proven.add((rows.feature, heads, width))
    from sglang.srt.utils import log_info_on_rank0

    log_info_on_rank0(
        logger,
        f"{rows.feature}: decode reads {width}-byte rows where they lie, {heads} heads a rank",
    )
