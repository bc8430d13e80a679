# SPDX-License-Identifier: Apache-2.0
"""A KDA prefill on the FlashKDA or the CuTe DSL kernel must give the layer a tensor."""

import sys
import types

import pytest
import repro
import torch

HEADS, DIM, TOKENS = 2, 128, 80
BACKEND = "srt/layers/attention/linear/kda_backend.py"
KERNELS = "srt/layers/attention/linear/kernels"

backend = {"torch": torch}
# Output of the convolution: the values as they are, in its [channels, tokens] layout.
backend["causal_conv1d_fn"] = lambda x, *args, **kwargs: x
for method in ("extend", "effective_extend_kernel"):
    backend[method] = repro.load_function(BACKEND, f"KDAKernelDispatcher.{method}", backend)
forward_extend = repro.load_function(BACKEND, "KDAAttnBackend.forward_extend", backend)


def flashkda():
    """The shipped wrapper; the external module writes v, doubled, as its output."""

    def fwd(q, k, v, g, beta, scale, out, *args, initial_state, final_state, cu_seqlens):
        out.copy_(2 * v)
        final_state.copy_(initial_state)

    sys.modules["flash_kda"] = types.SimpleNamespace(fwd=fwd)
    namespace = {"torch": torch, "LinearAttnKernelBase": object}
    repro.load_constants(
        f"{KERNELS}/kda_flashkda.py", ["_FLASHKDA_CHUNK_SIZE", "_FLASHKDA_MAX_SEQ_LEN"], namespace
    )
    repro.load_function(f"{KERNELS}/kda_flashkda.py", "_load_flash_kda", namespace)
    return repro.load_function(f"{KERNELS}/kda_flashkda.py", "FlashKDAKernel", namespace)(), -5.0


def cutedsl():
    """The shipped wrapper, its device code replaced by one that returns v, doubled, and no states."""
    namespace = {"torch": torch, "LinearAttnKernelBase": object}
    cls = repro.load_function(f"{KERNELS}/kda_cutedsl.py", "CuteDSLKDAKernel", namespace)
    kernel = cls.__new__(cls)  # its __init__ asks for the GPU
    kernel._extend_fn = lambda q, k, v, *args, **kwargs: (2 * v, None)
    kernel._l2norm_fn = lambda x: x
    return kernel, None


@pytest.mark.parametrize("make", [flashkda, cutedsl])
@pytest.mark.parametrize("padding", [0, 16])
def test_prefill_returns_a_tensor(make, padding):
    kernel, lower_bound = make()
    dispatcher = types.SimpleNamespace(extend_kernel=kernel)
    dispatcher.effective_extend_kernel = lambda bound: kernel
    dispatcher.extend = lambda **kwargs: backend["extend"](dispatcher, **kwargs)
    width = HEADS * DIM
    cache = types.SimpleNamespace(
        conv=[torch.zeros(4, 3, 3 * width)], temporal=torch.zeros(4, HEADS, DIM, DIM)
    )
    attention = types.SimpleNamespace(
        forward_metadata=types.SimpleNamespace(
            query_start_loc=torch.tensor([0, TOKENS]),
            mamba_cache_indices=torch.tensor([1]),
            has_mamba_track_mask=False,
            track_chunk_idx=None,
        ),
        req_to_token_pool=types.SimpleNamespace(mamba2_layer_cache=lambda layer: cache),
        kernel_dispatcher=dispatcher,
        accept_lens_pool=None,
    )
    layer = types.SimpleNamespace(
        layer_id=0,
        conv_weights=None,
        bias=None,
        q_dim=width,
        k_dim=width,
        v_dim=width,
        head_q_dim=DIM,
        head_k_dim=DIM,
        head_v_dim=DIM,
        A_log=torch.zeros(1, 1, HEADS, 1),
        dt_bias=torch.zeros(width),
        lower_bound=lower_bound,
    )
    mode = types.SimpleNamespace(is_target_verify=lambda: False, is_draft_extend_v2=lambda: False)
    batch = types.SimpleNamespace(
        forward_mode=mode, extend_prefix_lens=torch.tensor([0]), extend_seq_lens_cpu=[TOKENS]
    )
    rows = TOKENS + padding
    qkv = torch.arange(rows * 3 * width, dtype=torch.float32).remainder(7).view(rows, -1)
    out = forward_extend(
        attention,
        layer,
        batch,
        qkv.bfloat16(),
        torch.zeros(1, rows, HEADS, DIM).bfloat16(),
        torch.zeros(1, rows, HEADS).bfloat16(),
    )
    assert isinstance(out, torch.Tensor), f"forward_extend returned {type(out).__name__}"
    assert out.shape == (1, rows, HEADS, DIM)
    assert torch.equal(out[0, :TOKENS].flatten(1), 2 * qkv.bfloat16()[:TOKENS, 2 * width :])
    assert not out[:, TOKENS:].any()
