# SPDX-License-Identifier: Apache-2.0
"""Merging prefix and chunk in the FlashInfer backend must give attention over both, for many heads too."""

import importlib.util
import math

import pytest
import repro

repro.use_kernels()

import torch  # noqa: E402

BACKEND = "srt/layers/attention/flashinfer_backend.py"


def merge_state_triton():
    file = repro.tree() / "kernels/ops/attention/merge_state.py"
    spec = importlib.util.spec_from_file_location("merge_state_under_test", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.merge_state_triton


def flashinfer_merge_state(v_a, s_a, v_b, s_b):
    """What FlashInfer's kernel computes: both logsumexps have base 2."""
    total = torch.logaddexp2(s_a, s_b)
    weights = torch.exp2(s_a - total)[..., None], torch.exp2(s_b - total)[..., None]
    return weights[0] * v_a + weights[1] * v_b, total


def attend(query, keys, values):
    """Attention of one query per head, and its logsumexp with base 2, as FlashInfer returns it."""
    scores = torch.einsum("hd,khd->hk", query, keys) / math.sqrt(query.shape[-1])
    out = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
    return out[None], (scores.logsumexp(-1) / math.log(2.0))[None]


@pytest.mark.parametrize("heads", [4, 72])
def test_merge_equals_attention_over_all_keys(heads):
    namespace = {
        "math": math,
        "torch": torch,
        "merge_state": flashinfer_merge_state,
        "merge_state_triton": merge_state_triton(),
        "_MERGE_STATE_CUDA_MAX_THREADS_PER_BLOCK": 1024,
    }
    repro.load_function(BACKEND, "_merge_state_max_safe_num_heads", namespace)
    merge = repro.load_function(BACKEND, "_safe_merge_state", namespace)
    generator = repro.generator(0)
    query = torch.randn(heads, 128, generator=generator)
    keys, values = torch.randn(2, 200, heads, 128, generator=generator)
    expected, lse = attend(query, keys, values)
    chunk, prefix = attend(query, keys[:8], values[:8]), attend(query, keys[8:], values[8:])
    # bfloat16 sets how many heads FlashInfer's kernel takes: 64 at head_dim 128.
    assert namespace["_merge_state_max_safe_num_heads"](128, 2) == 64
    out, merged = merge(
        chunk[0].bfloat16(), chunk[1].float(), prefix[0].bfloat16(), prefix[1].float()
    )
    torch.testing.assert_close(out.float(), expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(merged.float(), lse, atol=1e-4, rtol=1e-5)
