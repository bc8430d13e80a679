# SPDX-License-Identifier: Apache-2.0
"""KDA prefill against its recurrence, in sub-chunks of 16 tokens: gates that forget slowly, and at once.

The blocks between sub-chunks are products of bf16, which the interpreter gets wrong. So it sees a single sub-chunk, or
two with a token between them that forgets all: those blocks are zero. The second has a code of its own in the kernel.
"""

import contextlib
import importlib

import pytest
import repro

repro.use_kernels()

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

FLA = "sglang.kernels.ops.attention.fla"
HEADS, WIDTH = 1, 128


@triton.jit
def _exp(x):
    return tl.exp(x)


@triton.jit
def _exp2(x):
    return tl.exp2(x)


@pytest.fixture(scope="module")
def kda():
    """The shipped module. Where kernels are interpreted: bound late, one configuration, no device to choose."""
    repro.bare_packages(FLA)
    if repro.DEVICE != "cpu":
        yield importlib.import_module(f"{FLA}.kda")
        return
    with pytest.MonkeyPatch.context() as patch:
        tune = triton.autotune
        patch.setattr(triton, "autotune", lambda configs, **keys: tune(configs[:1], **keys))
        patch.setattr(torch.cpu, "device", lambda index: contextlib.nullcontext(), raising=False)
        op = importlib.import_module(f"{FLA}.op")
        op.exp, op.exp2 = _exp, _exp2
        yield importlib.import_module(f"{FLA}.kda")


def inputs(tokens, strength):
    """q, k, v, log decays and write strengths of one sequence; decays down to about exp(-4 * strength) a step.

    Where kernels are interpreted, the first token of every later sub-chunk forgets all.
    """
    made = repro.generator(0)
    shape = {"generator": made, "device": repro.DEVICE}
    q, k, v, g = (torch.randn(1, tokens, HEADS, WIDTH, **shape) for _ in range(4))
    beta = torch.rand(1, tokens, HEADS, **shape)
    g = -torch.nn.functional.softplus(strength * g - 2)
    if repro.DEVICE == "cpu":
        g[:, 16::16], k = -1000, k.abs()  # and no zero is -0, another of its faults
    return q, k, v, g, beta


def recurrence(q, k, v, g, beta):
    """S <- exp(g) S, S <- S + k (beta (v - k^T S))^T, o = q^T S / sqrt(width), step by step in fp64."""
    q, k = (x.double() * (x.double().square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    v, g, beta = v.double(), g.double(), beta.double()
    state = torch.zeros(1, HEADS, WIDTH, WIDTH, dtype=torch.float64, device=q.device)
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, :, None].exp()
        write = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, :, :, None] * write[:, :, None, :]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(out, 1) * WIDTH**-0.5


@pytest.mark.parametrize("strength", [4, 16])
@pytest.mark.parametrize("tokens", [16, 13, 30] if repro.DEVICE == "cpu" else [16, 13, 64, 200])
def test_prefill_follows_the_recurrence(kda, tokens, strength):
    q, k, v, g, beta = inputs(tokens, strength)
    wide = torch.float32 if repro.DEVICE == "cpu" else torch.bfloat16
    q, k, v = (x.to(wide) for x in (q, k, v))
    expected = recurrence(q, k, v, g, beta)
    found = kda.chunk_kda(
        q,
        k,
        v.clone(),  # the kernel writes its output there
        g,
        beta,
        initial_state=torch.zeros(1, HEADS, WIDTH, WIDTH, device=repro.DEVICE),
        initial_state_indices=torch.zeros(1, dtype=torch.int32, device=repro.DEVICE),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.tensor([0, tokens], device=repro.DEVICE),
    )
    error = (found.double() - expected).norm() / expected.norm()
    assert error < (1e-4 if repro.DEVICE == "cpu" else 2e-2), float(error)
