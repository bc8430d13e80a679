# SPDX-License-Identifier: Apache-2.0
"""Prefix chunk and new tokens of an MLA prefill must be merged to attention over both."""

import importlib.util
import math
import types

import pytest
import repro

repro.use_kernels()

import torch  # noqa: E402

HEADS, HEAD_DIM, PREFIX, NEW = 2, 32, 300, 4
SCALE = HEAD_DIM**-0.5


def attend(q, k, v, causal):
    """Attention per head, and its logsumexp with base 2, as FlashInfer's prefill kernels return it."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    if causal:
        scores = scores.masked_fill(~torch.ones(NEW, len(k)).tril(len(k) - NEW).bool(), -math.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out.contiguous(), (scores.logsumexp(-1) / math.log(2.0)).T.contiguous()


LAYER = types.SimpleNamespace(
    logit_cap=0.0,
    scaling=SCALE,
    tp_q_head_num=HEADS,
    tp_k_head_num=HEADS,
    tp_v_head_num=HEADS,
    head_dim=HEAD_DIM,
    v_head_dim=HEAD_DIM,
)


def flashinfer_mla(q, k, v, causal, with_lse=True):
    wrapper = types.SimpleNamespace(
        forward_return_lse=lambda q, k, v, causal, **rest: attend(q, k, v, causal),
        forward=lambda q, k, v, causal, **rest: attend(q, k, v, causal)[0],
    )
    runner = types.SimpleNamespace(chunk_ragged_wrappers=[wrapper], ragged_wrapper=wrapper)
    batch = types.SimpleNamespace(
        attn_attend_prefix_cache=not causal, prefix_chunk_idx=0, mha_return_lse=with_lse
    )
    forward = repro.load_function(
        "srt/layers/attention/flashinfer_mla_backend.py",
        "FlashInferMhaChunkKVRunner.forward",
        {"math": math, "torch": torch},
    )
    return forward(runner, q, k, v, LAYER, batch)


def trtllm_mla(q, k, v, causal, with_lse=True):
    def kernel(*, query, key, value, is_causal, return_lse, **rest):
        result = attend(query, key, value, is_causal)
        return result if return_lse else result[0]

    environment = types.SimpleNamespace(
        SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR=types.SimpleNamespace(get=lambda: None)
    )
    prefill = types.SimpleNamespace(trtllm_ragged_attention_deepseek=kernel)
    run = repro.load_function(
        "srt/layers/attention/trtllm_mla_backend.py",
        "TRTLLMMLABackend._run_prefill_kernel",
        {
            "math": math,
            "torch": torch,
            "envs": environment,
            "flashinfer": types.SimpleNamespace(prefill=prefill),
        },
    )
    backend = types.SimpleNamespace(data_type=torch.bfloat16, workspace_buffer=None)
    lengths = dict.fromkeys(
        ("cum_seq_lens_q", "max_q_len", "seq_lens_kv", "cum_seq_lens_kv", "max_kv_len")
    )
    return run(
        backend,
        q,
        k,
        v,
        LAYER,
        1,
        **lengths,
        is_causal=causal,
        return_lse=with_lse,
        out_buffer=None,
    )


def merge(*states):
    file = repro.tree() / "kernels/ops/attention/merge_state.py"
    spec = importlib.util.spec_from_file_location("merge_state_under_test", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.merge_state_triton(*states)


@pytest.fixture
def tensors():
    generator = repro.generator(0)
    q = torch.randn(NEW, HEADS, HEAD_DIM, generator=generator)
    k, v = torch.randn(2, PREFIX + NEW, HEADS, HEAD_DIM, generator=generator)
    return q, k, v


@pytest.mark.parametrize("run", [flashinfer_mla, trtllm_mla])
def test_merge_of_chunk_and_new_tokens_is_attention_over_both(run, tensors):
    q, k, v = tensors
    new = run(q, k[PREFIX:], v[PREFIX:], causal=True)
    chunk = run(q, k[:PREFIX], v[:PREFIX], causal=False)
    out, _ = merge(*chunk, *new)
    torch.testing.assert_close(out, attend(q, k, v, causal=True)[0])


@pytest.mark.parametrize("run", [flashinfer_mla, trtllm_mla])
def test_output_alone_is_passed_on(run, tensors):
    q, k, v = tensors
    out = run(q, k[PREFIX:], v[PREFIX:], causal=True, with_lse=False)
    assert torch.equal(out, attend(q, k[PREFIX:], v[PREFIX:], causal=True)[0])
