# SPDX-License-Identifier: Apache-2.0
"""Chunk states of GDN and KDA prefill with more than 2^31 elements: where they are written and read.

64 heads of 128 x 128: chunk 2048 of a batch (its token 131,072) is the first whose offset needs 64 bits.
"""

import importlib

import pytest
import repro

repro.use_kernels()

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

FLA = "sglang.kernels.ops.attention.fla"
H, K, V, BT = 64, 128, 128, 64
STATE = H * V * K
LIMIT = 2**31 // STATE
"""First chunk whose element offset does not fit in a signed 32-bit number: 2048."""


@pytest.fixture(scope="module", autouse=True)
def packages():
    repro.bare_packages(FLA)
    # The module binds tl.exp when it is imported, before the interpreter replaces it; bind it when it is called.
    op = importlib.import_module(f"{FLA}.op")
    op.exp, op.exp2 = _exp, _exp2


@triton.jit
def _exp(x):
    return tl.exp(x)


@triton.jit
def _exp2(x):
    return tl.exp2(x)


def launch(h, k, w, v, g, initial, chunk):
    """Write the states of head 0 of one sequence whose first chunk is number `chunk` of the batch."""
    kernel = importlib.import_module(
        f"{FLA}.chunk_delta_h"
    ).chunk_gated_delta_rule_fwd_kernel_h_blockdim64
    tokens = len(k)
    kernel.fn[(V // 32, 1)](
        k=k,
        v=v,
        w=w,
        v_new=torch.empty_like(v),
        g=g,
        gk=None,
        h=h,
        initial_state=initial,
        initial_state_indices=torch.zeros(1, dtype=torch.int32),
        stride_init_state=STATE,
        cu_seqlens=torch.tensor([0, tokens]),
        chunk_offsets=torch.tensor([chunk, chunk + tokens // BT]),
        track_state=None,
        track_chunk_idx=None,
        stride_track_state=0,
        T=tokens,
        H=H,
        Hg=H,
        K=K,
        V=V,
        BT=BT,
        BV=32,
        USE_G=True,
        USE_GK=False,
        USE_INITIAL_STATE=True,
        INPLACE_UPDATE=False,
        SAVE_NEW_VALUE=True,
        IS_VARLEN=True,
        NT_BUCKET=2,
        USE_EXP2=False,
        TRACK_STATE=False,
    )
    return h.view(-1, H, V, K)[chunk : chunk + tokens // BT, 0]


def states(h, chunk):
    """States of a sequence of two chunks."""
    made = repro.generator(0)
    tokens = 2 * BT
    k, w, v = (0.1 * torch.randn(tokens, H, K, generator=made).half() for _ in range(3))
    g = -torch.rand(tokens, H, generator=made).cumsum(0) / tokens
    return launch(h, k, w, v, g, torch.randn(1, H, V, K, generator=made), chunk).float()


@pytest.mark.parametrize("chunk", [LIMIT - 2, LIMIT - 1, LIMIT, LIMIT + 30])
def test_states_are_written_at_their_chunk(chunk):
    """Offset of the sequence."""
    expected = states(torch.zeros(2 * STATE, dtype=torch.float16), 0)
    assert expected[0].abs().max() > 1
    assert (expected[0] - expected[1]).abs().max() > 0.1
    found = states(repro.lazy_zeros((LIMIT + 32) * STATE, torch.float16, guard=2**31), chunk)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


# The interpreter counts loops with Python's unbounded integers, so it cannot show this one.
if repro.DEVICE != "cpu":

    def test_the_last_state_of_a_long_sequence():
        """The same product of a loop counter: without keys and decay every chunk keeps the initial state."""
        tokens = (LIMIT + 1) * BT
        k = torch.zeros(tokens, H, K, dtype=torch.float16)
        h = repro.lazy_zeros((LIMIT + 1) * STATE, torch.float16, guard=2**31)
        initial = torch.randn(1, H, V, K, generator=repro.generator(2))
        found = launch(h, k, k, k, torch.zeros(tokens, H), initial, 0)
        for chunk in (0, 1, LIMIT - 1, LIMIT):
            assert torch.equal(found[chunk], initial[0, 0].half()), chunk


@pytest.mark.parametrize("chunks", [1, LIMIT])
def test_kda_output_reads_the_state_of_its_chunk(chunks):
    """Second of two sequences of `chunks` chunks, its first chunk, head 0; the gate is 0 (a factor of 1)."""
    kernel = _kda_kernel()
    made = repro.generator(1)
    tokens = chunks * BT
    zeros, q, out = (repro.lazy_zeros(2 * tokens * H * K, torch.float16) for _ in range(3))
    h = repro.lazy_zeros((chunks + 1) * STATE, torch.float16, guard=2**31 if chunks == LIMIT else 0)
    query = torch.randn(BT, K, generator=made).half()
    state = torch.randn(V, K, generator=made).half()
    q.view(2, tokens, H, K)[1, :BT, 0] = query
    h.view(-1, H, V, K)[chunks, 0] = state
    kernel[(1, 1, H + 1)](
        q=q,
        v=zeros,
        g=repro.lazy_zeros(2 * tokens * H * K, torch.float32),
        h=h,
        o=out,
        A=zeros,
        cu_seqlens=None,
        chunk_indices=None,
        scale=K**-0.5,
        T=tokens,
        H=H,
        K=K,
        V=V,
        BT=BT,
        BK=64,
        BV=128,
        IS_VARLEN=False,
    )
    found = out.view(2, tokens, H, V)[1, :BT, 0].float()
    expected = (query.float() * K**-0.5) @ state.float().T
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def _kda_kernel():
    return repro.load_function(
        "kernels/ops/attention/fla/kda.py",
        "chunk_gla_fwd_kernel_o",
        {"triton": triton, "tl": tl, "exp2": _exp2},
        decorators=["jit"],
    )
