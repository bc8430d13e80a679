# SPDX-License-Identifier: Apache-2.0
"""The compatibility check must refuse what cannot read packed KV rows or carries them without their scales."""

import contextlib
import types

import kv_pools
import pytest
import repro
import torch
from triton._utils import canonicalize_dtype


def check(recipe, prefill, decode, disaggregation="null", hierarchical=False):
    kv_pools.recipes()
    view = types.SimpleNamespace(
        kv_cache_dtype=recipe,
        attention_backend=decode,
        enable_unified_memory=False,
        speculative_algorithm=None,
        disaggregation_mode=disaggregation,
        enable_hierarchical_cache=hierarchical,
        enable_lmcache=False,
    )
    scope = {
        "resolving_view": lambda _: view,
        "resolved_view": lambda _: view,
        "use_mla_backend": lambda _: False,
        "attention_backends_of": lambda _: (prefill, decode),
        "get_platform": lambda: types.SimpleNamespace(is_cuda=True, is_sm100=True, is_sm120=False),
        "logger": types.SimpleNamespace(warning=lambda *_: None),
    }
    path = "srt/arg_groups/kv_cache_hook.py"
    with contextlib.suppress(LookupError):  # the released file has none
        repro.load_function(path, "_check_packed_kv_readers", scope)
    repro.load_function(path, "handle_kv4_compatibility", scope)(None)


@pytest.mark.parametrize(
    ("prefill", "decode"), [("triton", "triton"), ("fa3", "triton"), ("flashinfer", "triton")]
)
def test_backends_without_a_rule_are_refused(prefill, decode):
    with pytest.raises(ValueError, match=r"triton|fa3"):
        check("nvfp4", prefill, decode)


def test_what_the_refused_backend_would_meet():
    with pytest.raises(KeyError, match="float4_e2m1fn_x2"):
        canonicalize_dtype(torch.float4_e2m1fn_x2)


@pytest.mark.parametrize(
    ("recipe", "prefill", "decode"),
    [
        ("nvfp4", "flashinfer", "trtllm_mha"),
        ("nvfp4", "trtllm_mha", "trtllm_mha"),
        ("fp4_mx_block16", "triton", "triton"),
        ("fp4_mx_block16", "fa3", "triton"),
    ],
)
def test_readable_combinations_pass(recipe, prefill, decode):
    check(recipe, prefill, decode)


@pytest.mark.parametrize("recipe", ["nvfp4", "fp4_mx_block16"])
@pytest.mark.parametrize("feature", [{"disaggregation": "decode"}, {"hierarchical": True}])
def test_features_that_leave_scales_behind_are_refused(recipe, feature):
    pair = ("flashinfer", "trtllm_mha") if recipe == "nvfp4" else ("triton", "triton")
    with pytest.raises(ValueError, match="block scales"):
        check(recipe, *pair, **feature)


def test_what_the_refused_transfer_would_leave_behind():
    mha = kv_pools.mha_fp4(kv_pools.recipes().FP4MXBlock16KVCacheMethod())
    for pool, scales in (
        (mha, [*mha.k_scale_buffer, *mha.v_scale_buffer]),
        ((mla := kv_pools.mla_fp4()), mla.kv_scale_buffer),
    ):
        registered = set(pool.get_contiguous_buf_infos()[0])
        assert not registered & {one.data_ptr() for one in scales}
