# SPDX-License-Identifier: Apache-2.0
"""Block scales of an NVFP4 KV cache, as they are handed to trtllm-gen (SM100) and XQA (SM120).

The method, the pool and the recipe are the shipped code. What trtllm-gen needs is what FlashInfer documents for `kv_cache_sf`
of `trtllm_batch_decode_with_kv_cache` and `nvfp4_quantize_paged_kv_cache`; neither kernel runs here.
"""

import types

import kv_pools
import pytest
import repro
import torch

FILE = "srt/layers/attention/trtllm_mha_backend.py"
HEADS, PAGE = 2, 16


def handed(dim, is_xqa_impl):
    """Views of data and scales of a pool whose scales are a running number of the token, at (page, head, token, block)."""
    method = kv_pools.recipes().NVFP4KVCacheMethod(num_layers=1, device="cpu")
    pool = kv_pools.mha_fp4(method, size=3 * PAGE - 1, heads=HEADS, dim=dim)
    tokens = torch.arange(3 * PAGE, dtype=torch.uint8).view(-1, 1, 1)
    for scales in (pool.k_scale_buffer[0], pool.v_scale_buffer[0]):
        scales.copy_(tokens.expand_as(scales))
    scope = {"torch": torch, "canonicalize_stride": lambda tensor: tensor}
    backend = types.SimpleNamespace(
        page_size=PAGE, is_nvfp4_kvcache=True, is_xqa_impl=is_xqa_impl, token_to_kv_pool=pool
    )
    for name in ("_reshape_paged_kv_cache", "_get_nvfp4_decode_kv_cache"):
        method = repro.load_function(FILE, f"TRTLLMHAAttnBackend.{name}", scope)
        setattr(backend, name, types.MethodType(method, backend))
    layer = kv_pools.layer(tp_k_head_num=HEADS, tp_v_head_num=HEADS, head_dim=dim)
    return backend._get_nvfp4_decode_kv_cache(layer)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_trtllm_gen_is_handed_what_it_reads_or_nothing(dim):
    try:
        _, scales = handed(dim, is_xqa_impl=False)
    except NotImplementedError:
        return
    for name, view in zip("kv", scales, strict=True):
        assert view.stride()[2:] == (dim // 16, 1), (
            f"{name}: tokens of a page do not lie side by side"
        )
        assert all(step % 16 == 0 for step in view.stride()[:2]), (
            f"{name}: no descriptor has such strides"
        )
        seen = view.view(torch.uint8).flatten(2)[1, 1, :8].tolist()
        wanted = [PAGE + at % 4 for at in range(8)] if name == "v" else [PAGE + at // (dim // 16) for at in range(8)]  # fmt: skip
        assert seen == wanted, f"{name}: another order of tokens"


def test_xqa_is_handed_linear_views():
    data, scales = handed(128, is_xqa_impl=True)
    assert [tuple(view.shape) for view in (*data, *scales)] == [(3, HEADS, PAGE, 64)] * 2 + [(3, HEADS, PAGE, 8)] * 2  # fmt: skip
    assert scales[0].view(torch.uint8)[2, 1, 3].tolist() == [2 * PAGE + 3] * 8
