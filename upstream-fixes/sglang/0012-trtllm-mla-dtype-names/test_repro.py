# SPDX-License-Identifier: Apache-2.0
"""The check of the TRT-LLM MLA backend must know the names of KV dtypes that the command line has today."""

import types

import pytest
import repro


def check(dtype):
    scope = {"get_platform": lambda: types.SimpleNamespace(is_blackwell=True)}
    view = types.SimpleNamespace(
        attention_backend="trtllm_mla",
        decode_attention_backend=None,
        prefill_attention_backend=None,
        kv_cache_dtype=dtype,
    )
    path = "srt/arg_groups/overrides.py"
    return repro.load_function(path, "_mla_kv_cache_dtype_checks", scope)(view)


def test_both_spellings_of_bfloat16_pass():
    try:
        assert check("bf16") == check("bfloat16")
    except ValueError as error:
        raise AssertionError(f"an accepted spelling is refused: {error}") from error


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_supported_dtypes_pass(dtype):
    check(dtype)


@pytest.mark.parametrize("dtype", ["fp4_e2m1", "nvfp4", "fp4_mx_block16", "fp8_e5m2"])
def test_others_are_refused_without_naming_a_retired_one(dtype):
    with pytest.raises(ValueError, match="kv-cache-dtype") as caught:
        check(dtype)
    assert "fp4_e2m1" not in str(caught.value)
