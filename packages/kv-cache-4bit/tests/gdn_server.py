# SPDX-License-Identifier: Apache-2.0
"""The engine's server for models with Gated DeltaNet on a CPU: ``python -m gdn_server <flags>``, in the Triton interpreter and fp32.

The engine runs these models in bf16 on a GPU. Of its kernels for linear attention three places do not run here, and get stand-ins; they are
not what is tested. Everything else is stock, pools and scheduler above all. What is served then equals transformers to 1e-5 of a log-probability.

- Chunked prefill refuses fp32: here it is the recurrence itself, token by token.
- Decode holds ``exp`` from before the interpreter put its own in place.
- The gated norm asks CUDA how many processors there are, and for a device context.

This module is also what each process of the engine imports as its main one, so all of them have the stand-ins.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.attention.fla import fused_recurrent, layernorm_gated
from sglang.srt.layers.attention.linear.kernels import gdn_triton


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **named: Any,
) -> tuple[torch.Tensor, None, None]:
    """What `chunk_gated_delta_rule` computes: the output, and the last states in place of the first.

    Args:
        q, k: [1, tokens, key heads, K]; normalised here.
        v: [1, tokens, value heads, V].
        g, beta: [1, tokens, value heads], logarithm of the decay, and weight of the correction.
        initial_state: [slots, value heads, V, K].
        initial_state_indices: slot of each sequence.
        cu_seqlens: where sequences begin, and where the last one ends.
    """
    group = v.shape[2] // q.shape[2]
    q, k = (
        torch.nn.functional.normalize(x[0], dim=-1, eps=1e-6).repeat_interleave(group, 1)
        for x in (q, k)
    )
    out, scale, starts = torch.empty_like(v[0]), q.shape[-1] ** -0.5, cu_seqlens.tolist()
    for number, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot]
        for at in range(starts[number], starts[number + 1]):
            state = state * g[0, at].exp()[:, None, None]
            error = (v[0, at] - (state * k[at][:, None]).sum(-1)) * beta[0, at][:, None]
            state = state + error[..., None] * k[at][:, None]
            out[at] = (state * q[at][:, None]).sum(-1) * scale
        initial_state[slot] = state
    return out[None], None, None


@triton.jit
def exp(x):  # type: ignore[no-untyped-def]
    """The interpreter's."""
    return tl.exp(x)


gdn_triton.chunk_gated_delta_rule = delta_rule
fused_recurrent.exp = exp
layernorm_gated._get_sm_count = lambda device: 1
layernorm_gated.device_context = lambda device: contextlib.nullcontext()

if __name__ == "__main__":
    from sglang.launch_server import load_plugins, prepare_server_args, run_server

    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))
