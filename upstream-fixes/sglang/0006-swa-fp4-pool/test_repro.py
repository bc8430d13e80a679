# SPDX-License-Identifier: Apache-2.0
"""A hybrid sliding-window model with a 4-bit KV cache must get packed, scaled pools of the planned size."""

import types

import kv_pools
import pytest
import repro
import torch

HEADS, DIM = 2, 32


def swa_pool_class():
    scope = kv_pools.memory_pool()
    repro.load_function("srt/mem_cache/base_swa_memory_pool.py", "BaseSWAKVPool", scope)
    scope["DSATokenToKVPool"] = type("DSATokenToKVPool", (), {})
    return repro.load_function("srt/mem_cache/swa_memory_pool.py", "SWAKVPool", scope)


def configurator(recipe):
    """The shipped configurator of the pools, with a model of two full and two sliding layers."""
    model = types.SimpleNamespace(
        attention_arch="MHA",
        full_attention_layer_ids=[1, 3],
        swa_attention_layer_ids=[0, 2],
        get_num_kv_heads=lambda *_: HEADS,
        get_swa_num_kv_heads=lambda *_: HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        swa_head_dim=DIM,
        swa_v_head_dim=DIM,
    )
    return types.SimpleNamespace(
        model_config=model,
        kv_cache_dtype=torch.float4_e2m1fn_x2,
        kv_cache_dtype_str=recipe,
        sliding_window_size=8,
        page_size=1,
        pool_page_size=1,
        is_hybrid_swa_compress=False,
        is_hybrid_swa_mtp_draft=False,
        draft_swa_full_capacity=False,
        is_draft_worker=False,
        post_capture_kv_active=False,
        device="cpu",
        model=types.SimpleNamespace(layers=[]),
        layer_info=types.SimpleNamespace(num_effective_layers=4),
        spec_algorithm=types.SimpleNamespace(is_eagle=lambda: False, is_standalone=lambda: False),
    )


def build(recipe="fp4_mx_block16"):
    scope = kv_pools.memory_pool()
    methods = kv_pools.recipes()
    names = {
        "SWAKVPool": swa_pool_class(),
        "MHATokenToKVPool": scope["MHATokenToKVPool"],
        "MHATokenToKVPoolMXFP8": None,
        "get_parallel": lambda: kv_pools.PARALLEL,
        "get_spec": lambda: types.SimpleNamespace(speculative_algorithm=None),
        "get_kv_cache_quant_method": methods.get_kv_cache_quant_method,
        "resolve_kv_cache_quant": methods.resolve_kv_cache_quant,
        "is_float4_e2m1fn_x2": scope["is_float4_e2m1fn_x2"],
        "current_platform": types.SimpleNamespace(is_cpu=lambda: False),
        "torch": torch,
    }
    path, kvc = "srt/mem_cache/kv_cache_configurator.py", configurator(recipe)
    for method in ("_build_fp4_quant_method", "_build_mha_quant_method"):
        function = repro.load_function(path, f"KVCacheConfigurator.{method}", dict(names))
        setattr(kvc, method, types.MethodType(function, kvc))
    function = repro.load_function(path, "KVCacheConfigurator._build_hybrid_swa_kv_pool", names)
    return function(
        kvc,
        full_max_total_num_tokens=31,
        swa_max_total_num_tokens=15,
        mha_pool_class=names["MHATokenToKVPool"],
    )


def planned():
    scope = {
        "torch": torch,
        "AttentionArch": types.SimpleNamespace(MLA="MLA"),
        "MemoryPoolConfigurator": object,
        "get_parallel": lambda: kv_pools.PARALLEL,
        "get_schedule": lambda: types.SimpleNamespace(swa_full_tokens_ratio=0.5),
        "get_memory": lambda: types.SimpleNamespace(enable_unified_memory=False),
        "is_float4_e2m1fn_x2": lambda dtype: dtype == torch.float4_e2m1fn_x2,
        "_dflash_draft_cell_size": lambda _: 0,
    }
    path = "srt/model_executor/pool_configurator.py"
    return repro.load_function(path, "HybridSWAPoolConfigurator", scope)(
        configurator("fp4_mx_block16")
    )


@pytest.mark.parametrize("layer_id", [1, 0])
def test_written_values_are_read_back(layer_id):
    torch.manual_seed(0)
    pool, scope = build(), kv_pools.memory_pool()
    method = kv_pools.recipes().FP4MXBlock16KVCacheMethod()
    twin = kv_pools.mha_fp4(method, heads=HEADS, dim=DIM)
    loc = torch.tensor([4, 7])
    key, value = torch.randn(2, HEADS, DIM), 50 * torch.randn(2, HEADS, DIM)
    where = scope["KVWriteLoc"](loc, loc)
    try:
        pool.set_kv_buffer(kv_pools.layer(layer_id), where, key.clone(), value.clone())
    except NotImplementedError as error:
        raise AssertionError(f"the first KV write fails: {error}") from error
    twin.set_kv_buffer(kv_pools.layer(0), loc, key, value)
    for one, two in zip(pool.get_kv_buffer(layer_id), twin.get_kv_buffer(0), strict=True):
        assert torch.equal(one[loc], two[loc])


def test_plan_is_what_the_pools_take():
    pool, plan = build(), planned()
    for sub, per_token, layers in (
        (pool.full_kv_pool, plan._full_per_token, plan._full_layers_num),
        (pool.swa_kv_pool, plan._swa_per_token, plan._swa_layers_num),
    ):
        slots = sub.size + sub.page_size
        assert sum(sub.get_kv_size_bytes()) == slots * per_token * layers


def test_bytes_per_token_are_those_of_four_bits():
    assert planned()._full_per_token == 2 * HEADS * (DIM // 2 + DIM // 16)


def test_recipe_with_global_scales_is_refused_at_boot():
    kv_pools.recipes()
    repro.stub("sglang.srt.model_loader.utils", resolve_language_model=None)
    with pytest.raises(ValueError, match="fp4_mx_block16"):
        build("nvfp4")
