# SPDX-License-Identifier: Apache-2.0
"""The epsilon of the gated norm behind KDA, as the decoder layers of Kimi-Linear and Kimi K3 build it."""

import types
from unittest import mock

import pytest
import repro
import torch

STAND_INS = """
    ColumnParallelBatchedLinear ColumnParallelLinear MergedColumnParallelLinear MergedColumnParallelRepeatedLinear
    ReplicatedLinear _fuses_attn_all_reduce _is_moe_layer _shards_moe_rows _uses_modelopt_fp8_pb_wo
    get_moe_a2a_backend get_platform is_dp_attention_enabled k3_ar_fusion require_mlp_sync set_weight_attrs
    sharded_weight_loader
"""


class Built(Exception):
    """The norm was built; the rest of the layer is not of interest."""


def epsilon(file, layer, attention, of_config):
    """What the shipped layer hands to the norm of its KDA attention."""

    def norm(width, eps, activation):
        raise Built(eps)

    ranks = types.SimpleNamespace(tp_size=1, tp_rank=0, attn_tp_size=1, attn_tp_rank=0)
    ranks.attn_tp_group = types.SimpleNamespace(world_size=1)
    namespace = {
        **{name: mock.MagicMock() for name in STAND_INS.split()},
        "torch": torch,
        "nn": torch.nn,
        "divide": lambda a, b: a // b,
        "get_parallel": lambda: ranks,
        "_get_kda_local_num_heads": lambda heads, size: heads // size,
        "_is_hip": False,
        "FusedRMSNormGated": norm,
    }
    config = types.SimpleNamespace(
        hidden_size=8,
        is_moe=False,
        is_kda_layer=lambda index: True,
        linear_attn_config={"head_dim": 4, "num_heads": 2, "short_conv_kernel_size": 4},
        v_head_dim=4,
        dtype=torch.bfloat16,
        attn_res_block_size=None,
        rms_norm_eps=of_config,
    )
    repro.load_function(file, attention, namespace)
    with pytest.raises(Built) as built:
        repro.load_function(file, layer, namespace)(config=config, layer_idx=0)
    return built.value.args[0]


@pytest.mark.parametrize("of_config", [1e-5, 1e-6])
@pytest.mark.parametrize(
    "names",
    [
        ("srt/models/kimi_linear.py", "KimiDecoderLayer", "KimiDeltaAttention"),
        ("srt/models/kimi_k3.py", "KimiK3DecoderLayer", "KimiK3DeltaAttention"),
    ],
    ids=["kimi-linear", "kimi-k3"],
)
def test_the_norm_behind_kda_has_the_epsilon_of_the_config(names, of_config):
    assert epsilon(*names, of_config) == of_config
