# SPDX-License-Identifier: Apache-2.0
"""Bytes per token that sizing plans must be the bytes of the buffers that a 4-bit recipe creates."""

import types

import kv_pools
import pytest
import repro
import torch

HEADS, DIM, SLOTS = 8, 128, 4


def planned(recipe, layers):
    methods = kv_pools.recipes()
    repro.stub(
        "sglang.srt.layers.cp.utils",
        get_glm_dsa_layer_split_effective_num_layers=lambda _, count: count,
    )
    # The newest release asks the recipe for its backends first; the rules stay those of the registry.
    methods.KVCacheQuantMethodBase.configure_attention_backends_from_server_args = lambda *_: None
    scope = {
        "torch": torch,
        "get_parallel": lambda: kv_pools.PARALLEL,
        "is_float4_e2m1fn_x2": lambda dtype: dtype == torch.float4_e2m1fn_x2,
        "is_minimax_sparse": lambda _: False,
    }
    compute = repro.load_function(
        "srt/model_executor/pool_configurator.py",
        "DefaultPoolConfigurator._compute_cell_size",
        scope,
    )
    this = types.SimpleNamespace(kv_cache_dtype_str=recipe, _compute_qsa_cell_size=lambda **_: 0)
    kvc = types.SimpleNamespace(
        model_config=types.SimpleNamespace(
            hf_config=None, head_dim=DIM, v_head_dim=DIM, get_num_kv_heads=lambda *_: HEADS
        ),
        kv_cache_dtype=torch.float4_e2m1fn_x2,
        kv_cache_dtype_str=recipe,
        use_mla_backend=False,
        server_args=types.SimpleNamespace(enable_hisparse=False),
        device="cpu",
        page_size=1,
    )
    return compute(this, kvc, layers)


def created(recipe, layers):
    method = kv_pools.recipes().KV_CACHE_QUANT_REGISTRY[recipe](num_layers=layers, device="cpu")
    found = method.create_buffers(SLOTS, HEADS, DIM, layers, "cpu").values()
    flat = [one for item in found for one in (item if isinstance(item, list) else [item])]
    return sum(one.nbytes for one in flat if isinstance(one, torch.Tensor)) / SLOTS


@pytest.mark.parametrize("recipe", ["fp4_mx_block16", "nvfp4"])
@pytest.mark.parametrize("layers", [1, 36])
def test_plan_is_what_the_recipe_takes(recipe, layers):
    assert planned(recipe, layers) == created(recipe, layers)
