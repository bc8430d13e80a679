# SPDX-License-Identifier: Apache-2.0
"""A span of tokens that see one another, as Gemma's images do, across the end of a tile of queries."""

import pytest
import repro

repro.use_kernels()

import torch  # noqa: E402

TOKENS, DIM = 260, 16
IMAGE = slice(40, 200)
"""Crosses the end of a tile of queries of any size that the kernel has: 16 to 128."""


def attend(mask=None):
    """The engine's kernel over one fresh chunk, and q, k, v."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    made = repro.generator(0)
    q, k, v = (torch.randn(TOKENS, 1, DIM, generator=made) for _ in range(3))
    out = torch.full_like(q, torch.nan)
    pool = torch.zeros(1, 1, DIM)
    rows = torch.tensor([0, TOKENS], dtype=torch.int32)
    none = torch.zeros(2, dtype=torch.int32)
    flat = None if mask is None else mask.to(torch.uint8).flatten()
    starts = None if mask is None else torch.tensor([0, mask.numel()])
    extend_attention_fwd(
        q, k, v, out, pool, pool, rows, none, none[:0].long(),
        flat, True, starts, TOKENS, 1.0, 1.0, DIM**-0.5,
    )  # fmt: skip
    return out, (q, k, v)


def expected(mask, q, k, v):
    """In fp64."""
    q, k, v = (x[:, 0].double() for x in (q, k, v))
    scores = torch.where(mask, q @ k.T * DIM**-0.5, -torch.inf)
    return (scores.softmax(-1) @ v)[:, None]


def causal():
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def test_image_tokens_see_all_of_their_image():
    mask = causal()
    mask[IMAGE, IMAGE] = True
    out, inputs = attend(mask)
    torch.testing.assert_close(out.double(), expected(mask, *inputs), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("masked", [True, False])
def test_causal_attention_is_as_it_was(masked):
    out, inputs = attend(causal() if masked else None)
    torch.testing.assert_close(out.double(), expected(causal(), *inputs), rtol=1e-2, atol=1e-2)
