# SPDX-License-Identifier: Apache-2.0
"""A KV cache that is allocated before graph capture must not be planned as one that is sized after it."""

import sys
import types

import pytest
import repro


def planned(dtype):
    decode = types.SimpleNamespace(backend="full")
    prefill = types.SimpleNamespace(backend="piecewise", bs=(4096,))
    view = types.SimpleNamespace(
        device="cuda",
        dcp_size=1,
        kv_cache_dtype=dtype,
        prefill_only_disable_kv_cache=False,
        enable_memory_saver=False,
        enable_kv_cache_sharding=False,
        enable_unified_memory=False,
        disaggregation_mode="null",
        chunked_prefill_size=4096,
        cuda_graph_config=types.SimpleNamespace(decode=decode, prefill=prefill),
    )
    setting = types.SimpleNamespace
    scope = {
        "resolving_view": lambda _: view,
        "use_mla_backend": lambda _: False,
        "envs": setting(
            SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=setting(get=lambda: True),
            SGLANG_MOONCAKE_CUSTOM_MEM_POOL=setting(get=lambda: None),
        ),
        "Backend": setting(DISABLED="disabled"),
        "max_prefill_buffer_tokens": lambda _: 4096,
        "model_config_of": lambda _: setting(hf_config=None),
    }
    if "sglang.srt" not in sys.modules:
        repro.bare_packages("sglang", "sglang.srt")
    repro.stub(
        "sglang.srt.configs.model_config",
        is_deepseek_v4=lambda _: False,
        is_minimax_sparse=lambda _: False,
    )
    path = "srt/arg_groups/overrides.py"
    return repro.load_function(path, "post_capture_kv_sizing_planned", scope)(None)


@pytest.mark.parametrize("dtype", ["nvfp4", "fp4_mx_block16"])
def test_quantised_caches_are_not_planned(dtype):
    assert planned(dtype) is False


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_others_stay_eligible(dtype):
    assert planned(dtype) is True
