# SPDX-License-Identifier: Apache-2.0
"""Which launches `kv4.glm_flash_fp8` takes: its judge, its check in front of the pools, its bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from numinous_kv_cache_4bit.engine import flashmla
from numinous_kv_cache_4bit.engine.glm_flash_fp8 import ROWS
from numinous_kv_cache_4bit.engine.rows import bf16_width, bytes_per_token
from numinous_kv_cache_4bit.hooks.glm_flash_fp8 import FEATURE, judge
from numinous_kv_cache_4bit.hooks.launch import UNCOVERED
from numinous_tooling.patching.boot import fits
from numinous_tooling.patching.engine import find_engine
from numinous_tooling.patching.serve_command import FIELDS, ServeCommand


def configurator(**changes: Any) -> Any:
    made = {
        "architecture": "Glm5NextForConditionalGeneration",
        "dtype": torch.float8_e4m3fn,
    } | changes
    config = SimpleNamespace(architectures=[made["architecture"]])
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config), kv_cache_dtype=made["dtype"]
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"architecture": "Glm5NextForConditionalGenerationNextN"}, None),
        (
            {"architecture": "LlamaForCausalLM"},
            "this model is LlamaForCausalLM; unset NUMINOUS_KV4",
        ),
        ({"architecture": "GlmMoeDsaForCausalLM"}, "this model is GlmMoeDsaForCausalLM"),
        ({"dtype": torch.bfloat16}, "add --kv-cache-dtype fp8_e4m3"),
        ({"capability": (10, 0)}, "this is sm100"),
        ({"capability": (8, 9)}, "this is sm89"),
        ({"available": False}, "this is a machine without a GPU"),
        ({"version": "0.4.8"}, "sglang-kernel 0.4.7, and 0.4.8 is installed"),
        ({"version": None}, "and none is installed"),
    ],
)
def test_pool_sizing_refuses(monkeypatch: Any, changes: dict[str, Any], said: str | None) -> None:
    seen = {"capability": (9, 0), "available": True, "version": flashmla.KERNEL_VERSION} | changes
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: seen["capability"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen["available"])
    monkeypatch.setattr(flashmla, "kernel_version", lambda: seen["version"])
    if said is None:
        ROWS.before_pool_sizing(configurator(**changes))
        return
    with pytest.raises(SystemExit, match=said) as error:
        ROWS.before_pool_sizing(configurator(**changes))
    assert "\n" not in str(error.value)


def test_bytes_of_the_model() -> None:
    """GLM-5.3-Flash: 11 full-attention layers, an index key in each."""
    fp8, bf16 = (bytes_per_token(row, 11, 11) for row in (528, bf16_width(ROWS.row)))
    assert (fp8, bf16) == (7260, 12716)
    assert f"{bf16 / fp8:.3f}" == "1.752"


DEFAULTS = {
    "kv_cache_dtype": "auto",
    "dsa_prefill_backend": None,
    "dsa_decode_backend": None,
    "dtype": "auto",
    "speculative_algorithm": None,
    "speculative_draft_kv_cache_dtype": None,
    "speculative_eagle_topk": None,
    "dcp_size": 1,
    "pp_size": 1,
    "tp_size": 1,
    "disaggregation_mode": "null",
} | dict.fromkeys(UNCOVERED, False)
FP8 = {"kv_cache_dtype": "fp8_e4m3"}
FLASH = {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "text_config": {"num_attention_heads": 64},
}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (FP8, None),
        (FP8 | {"tp_size": 8, "speculative_algorithm": "EAGLE"}, None),
        (FP8 | {"dsa_prefill_backend": "flashmla_kv"}, None),
        ({}, "would be auto: add --kv-cache-dtype fp8_e4m3"),
        ({"kv_cache_dtype": "bfloat16"}, "would be bfloat16: add --kv-cache-dtype fp8_e4m3"),
        (FP8 | {"dsa_prefill_backend": "flashmla_sparse"}, "--dsa-prefill-backend flashmla_sparse"),
        (FP8 | {"dsa_decode_backend": "trtllm"}, "--dsa-decode-backend trtllm"),
        (FP8 | {"dtype": "float16"}, "--dtype float16"),
        (FP8 | {"speculative_algorithm": "DFLASH"}, "--speculative-algorithm DFLASH"),
        (FP8 | {"speculative_draft_kv_cache_dtype": "bfloat16"}, "the draft's KV cache"),
        (FP8 | {"speculative_eagle_topk": 2}, "--speculative-eagle-topk 2"),
        (FP8 | {"dcp_size": 2}, "--dcp-size > 1"),
        (FP8 | {"pp_size": 2}, "--pp-size > 1"),
        (FP8 | {"disaggregation_mode": "decode"}, "disaggregation"),
        *((FP8 | {name: True}, "--" + name.replace("_", "-")) for name in UNCOVERED),
    ],
)
def test_judge(given: dict[str, Any], said: str | None) -> None:
    for config in (None, FLASH):
        lines = list(judge(ServeCommand(given, DEFAULTS, model_config=config)))
        assert len(lines) == (said is not None), lines
        assert said is None or said in lines[0]


@pytest.mark.parametrize(
    ("config", "tp_size", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, 1, "this model is LlamaForCausalLM"),
        ({}, 1, "this model is None"),
        (FLASH | {"text_config": {"num_attention_heads": 512}}, 2, "256 query heads per rank"),
        (FLASH | {"text_config": {"num_attention_heads": 512}}, 4, None),
        (FLASH | {"text_config": {}}, 1, None),
    ],
)
def test_judge_reads_the_model(config: dict[str, Any], tp_size: int, said: str | None) -> None:
    lines = list(judge(ServeCommand(FP8 | {"tp_size": tp_size}, DEFAULTS, model_config=config)))
    assert len(lines) == (said is not None), lines
    assert said is None or said in lines[0]


def test_engine_that_is_installed() -> None:
    """Every pin fits (with the upstream fixes in place: ``python -m numinous_tooling.upstream pins --conflicts``), and the
    engine has the arguments that the judge reads."""
    pytest.importorskip("sglang", reason="reads the installed engine")
    tree = find_engine()
    assert fits(FEATURE, tree) == []
    fields = b"".join(tree.read(path) for path in tree.files(FIELDS) if path.endswith(".py"))
    assert [name for name in DEFAULTS if f"    {name}: A[".encode() not in fields] == []
