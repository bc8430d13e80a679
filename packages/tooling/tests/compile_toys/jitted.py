# SPDX-License-Identifier: Apache-2.0
"""Triton and Gluon kernels for the tests of the compile gate. Compiled, never run."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LAYOUT = {
    warp: gl.BlockedLayout([4], [warp], [4], [0])
    for warp in (32, 64)  # threads of a warp
}


@triton.jit
def multiply(a, b, c, K, D: tl.constexpr):
    """c [D, D] = a [D, K] b [K, D]."""
    at = tl.arange(0, D)
    total = tl.zeros((D, D), tl.float32)
    for k in range(0, K, D):
        left = tl.load(a + at[:, None] * K + k + at[None, :])  # [D, D]
        right = tl.load(b + (k + at)[:, None] * D + at[None, :])  # [D, D]
        total = tl.dot(left, right, total)
    tl.store(c + at[:, None] * D + at[None, :], total)


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    """y [n] = 2 x [n]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


@triton.jit
def normalise(x, weight, y, stride, row, n, eps, BLOCK: tl.constexpr):
    """y [M, n] = x / rms(x) · weight, rows `row` apart; no weight is all ones."""
    at = tl.program_id(0) * row + tl.arange(0, BLOCK) * stride
    inside = tl.arange(0, BLOCK) < n
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    out = values * tl.rsqrt(tl.sum(values * values) / n + eps)
    if weight is not None:
        out *= tl.load(weight + tl.arange(0, BLOCK) * stride, mask=inside, other=0.0)
    tl.store(y + at, out, mask=inside)


@gluon.jit
def double_gluon(x, y, N: gl.constexpr, L: gl.constexpr):
    """y [N] = 2 x [N]."""
    at = gl.arange(0, N, L)
    gl.store(y + at, gl.load(x + at) * 2)
