# SPDX-License-Identifier: Apache-2.0
"""A KV cache dtype that differs from what the checkpoint or the flag asks for must be mentioned in the log."""

import logging
import types

import pytest
import repro
import torch

DTYPE = torch.bfloat16


def configure(flag, algorithm, hip=False):
    namespace = {
        "torch": torch,
        "logger": logging.getLogger("kv_cache_dtype_under_test"),
        "_is_hip": hip,
        "fp8_dtype": torch.float8_e4m3fnuz if hip else torch.float8_e4m3fn,
        "current_platform": types.SimpleNamespace(is_cpu=lambda: False),
        "draft_uses_compute_dtype_kv": lambda **kwargs: False,
    }
    path = "srt/mem_cache/kv_cache_dtype.py"
    repro.load_constants(path, ["TORCH_DTYPE_TO_KV_CACHE_STR"], namespace)
    run = repro.load_function(path, "configure_kv_cache_dtype", namespace)
    quantization = types.SimpleNamespace(kv_cache_quant_algo=algorithm)
    return run(
        server_args_kv_cache_dtype=flag,
        model=types.SimpleNamespace(quant_config=quantization),
        model_dtype=DTYPE,
        is_draft_worker=False,
        is_dflash=False,
        speculative_draft_attention_backend="",
    )[1]


@pytest.mark.parametrize("algorithm", ["NVFP4", "INT8"])
def test_an_algorithm_that_auto_does_not_set_up_is_mentioned(caplog, algorithm):
    assert configure("auto", algorithm) is DTYPE
    assert algorithm in caplog.text
    assert "bfloat16" in caplog.text


def test_e5m2_on_rocm_is_mentioned(caplog):
    assert configure("fp8_e5m2", None, hip=True) is torch.float8_e4m3fnuz
    assert "fp8_e5m2" in caplog.text


@pytest.mark.parametrize(
    ("flag", "algorithm", "dtype"),
    [
        ("auto", None, DTYPE),
        ("auto", "auto", DTYPE),
        ("auto", "FP8", torch.float8_e4m3fn),
        ("fp8_e5m2", None, torch.float8_e5m2),
    ],
)
def test_nothing_is_said_where_the_wish_is_met(caplog, flag, algorithm, dtype):
    assert configure(flag, algorithm) is dtype
    assert not caplog.text
