# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for the index inputs that kernels get wrong."""

from __future__ import annotations

from hypothesis import strategies as st

PAD = -1
"""No token: what a top-k row holds where fewer than k tokens exist."""


@st.composite
def topk_rows(
    draw: st.DrawFn, k: int, tokens: int, *, duplicates: bool = True, out_of_range: bool = False
) -> list[int]:
    """One row of `k` token indices below `tokens`, padded with -1 at the front, in the middle, at the end or all over.

    Args:
        k: length of the row.
        tokens: indices are below it.
        duplicates: also rows in which one token stands several times.
        out_of_range: also rows with an index of `tokens` or more, or below -1; only for kernels that define what
            happens then.
    """
    shapes = ["full", "front", "middle", "end", "scattered", "all"]
    shape = draw(st.sampled_from(shapes if tokens else ["all"]))
    if shape == "all":
        return [PAD] * k
    row = draw(st.lists(st.integers(0, tokens - 1), min_size=k, max_size=k, unique=tokens >= k))
    first = draw(st.integers(0, max(0, k - 1)))
    last = draw(st.integers(first, max(0, k - 1)))
    padded = {
        "full": range(0),
        "front": range(first + 1),
        "middle": range(first, last + 1),
        "end": range(first, k),
        "scattered": draw(st.sets(st.integers(0, max(0, k - 1)))),
    }[shape]
    row = [PAD if position in padded else token for position, token in enumerate(row)]
    if duplicates and k > 1 and draw(st.booleans()):
        row[draw(st.integers(0, k - 1))] = row[draw(st.integers(0, k - 1))]
    if out_of_range and k and draw(st.booleans()):
        wild = st.sampled_from([tokens, tokens + 1, 2**31 - 1, -2, -(2**31)])
        row[draw(st.integers(0, k - 1))] = draw(wild)
    return row


def ragged_lengths(
    page_size: int, *, max_pages: int = 4, min_batch: int = 1, max_batch: int = 8
) -> st.SearchStrategy[list[int]]:
    """Lengths of the sequences of a batch, mostly at the edges: 0, 1, page - 1, page, page + 1, and at the maximum."""
    limit = page_size * max_pages
    edges = {0, 1, page_size - 1, page_size, page_size + 1, limit - 1, limit}
    inside = sorted(edge for edge in edges if 0 <= edge <= limit)
    length = st.sampled_from(inside) | st.integers(0, limit)
    return st.lists(length, min_size=min_batch, max_size=max_batch)
