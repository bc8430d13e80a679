# SPDX-License-Identifier: Apache-2.0
"""Which launches `kv4.glm_dsa` and `kv4.glm_flash` take: their judges, the check in front of the pools, their pins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from numinous_kv_cache_4bit.engine import flashmla, glm_dsa, glm_flash
from numinous_kv_cache_4bit.hooks import glm_dsa as dsa_hooks
from numinous_kv_cache_4bit.hooks import glm_flash as flash_hooks
from numinous_kv_cache_4bit.hooks import glm_flash_fp8 as fp8_hooks
from numinous_kv_cache_4bit.hooks.launch import UNCOVERED
from numinous_tooling.patching.boot import fits
from numinous_tooling.patching.engine import find_engine
from numinous_tooling.patching.serve_command import FIELDS, ServeCommand

DSA = {"architectures": ["GlmMoeDsaForCausalLM"], "num_attention_heads": 64}
FLASH = {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "text_config": {"num_attention_heads": 64},
}
FEATURES = [(dsa_hooks, glm_dsa, DSA), (flash_hooks, glm_flash, FLASH)]
DEFAULTS = {
    "kv_cache_dtype": "auto",
    "dsa_prefill_backend": None,
    "dsa_decode_backend": None,
    "dtype": "auto",
    "enable_mixed_chunk": False,
    "speculative_algorithm": None,
    "speculative_draft_kv_cache_dtype": None,
    "speculative_eagle_topk": None,
    "dcp_size": 1,
    "pp_size": 1,
    "tp_size": 1,
    "disaggregation_mode": "null",
} | dict.fromkeys(UNCOVERED, False)
FP8 = {"kv_cache_dtype": "fp8_e4m3"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (FP8, None),
        (FP8 | {"tp_size": 2, "speculative_algorithm": "EAGLE"}, None),
        (FP8 | {"speculative_algorithm": "NEXTN", "speculative_eagle_topk": 1}, None),
        (FP8 | {"dsa_prefill_backend": "flashmla_kv", "enable_mixed_chunk": True}, None),
        ({}, "would be auto: add --kv-cache-dtype fp8_e4m3"),
        ({"kv_cache_dtype": "bfloat16"}, "would be bfloat16: add --kv-cache-dtype fp8_e4m3"),
        (FP8 | {"dsa_prefill_backend": "flashmla_auto"}, "--dsa-prefill-backend flashmla_auto"),
        (FP8 | {"dsa_prefill_backend": "trtllm"}, "--dsa-prefill-backend trtllm"),
        (FP8 | {"dsa_decode_backend": "fa3"}, "--dsa-decode-backend fa3"),
        (FP8 | {"dtype": "float16"}, "--dtype float16"),
        (FP8 | {"speculative_algorithm": "DSPARK"}, "--speculative-algorithm DSPARK"),
        (FP8 | {"speculative_eagle_topk": 4}, "--speculative-eagle-topk 4"),
        (FP8 | {"speculative_draft_kv_cache_dtype": "bfloat16"}, "the draft's KV cache"),
        (FP8 | {"dcp_size": 2}, "--dcp-size > 1"),
        (FP8 | {"pp_size": 2}, "--pp-size > 1"),
        (FP8 | {"disaggregation_mode": "prefill"}, "disaggregation"),
        *((FP8 | {name: True}, "--" + name.replace("_", "-")) for name in UNCOVERED),
    ],
)
def test_judge(given: dict[str, Any], said: str | None) -> None:
    for hooks, _, config in FEATURES:
        for known in (None, config):
            lines = list(hooks.judge(ServeCommand(given, DEFAULTS, model_config=known)))
            assert len(lines) == (said is not None), lines
            assert said is None or said in lines[0]
            assert not any("\n" in line for line in lines)


@pytest.mark.parametrize("prefill", ["flashmla_sparse", "flashmla_sparse_q8"])
def test_sparse_prefill_kernels_are_for_one_model(prefill: str) -> None:
    given = FP8 | {"dsa_prefill_backend": prefill}
    assert list(dsa_hooks.judge(ServeCommand(given, DEFAULTS))) == []
    (line,) = flash_hooks.judge(ServeCommand(given, DEFAULTS))
    assert f"{prefill} does not read 288-byte rows" in line
    (line,) = dsa_hooks.judge(ServeCommand(given | {"enable_mixed_chunk": True}, DEFAULTS))
    assert "leave --enable-mixed-chunk out" in line


@pytest.mark.parametrize(
    ("hooks", "config", "said"),
    [
        (dsa_hooks, FLASH, "made for GlmMoeDsaForCausalLM, this model is Glm5NextFor"),
        (flash_hooks, DSA, "made for Glm5NextForConditionalGeneration, this model is GlmMoe"),
        (dsa_hooks, {"architectures": ["DeepseekV32ForCausalLM"]}, "this model is DeepseekV32"),
        (dsa_hooks, DSA | {"num_attention_heads": 256}, "256 query heads per rank"),
    ],
)
def test_judge_reads_the_model(hooks: Any, config: dict[str, Any], said: str) -> None:
    (line,) = hooks.judge(ServeCommand(FP8, DEFAULTS, model_config=config))
    assert said in line


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"draft": True}, None),
        ({"architecture": "DeepseekV32ForCausalLM"}, "this model is DeepseekV32ForCausalLM; unset"),
        ({"dtype": torch.bfloat16}, "add --kv-cache-dtype fp8_e4m3"),
        ({"capability": (10, 0)}, "made for Hopper .sm90., this is sm100"),
        ({"available": False}, "this is a machine without a GPU"),
        ({"version": "0.4.8"}, "sglang-kernel 0.4.7, and 0.4.8 is installed"),
    ],
)
def test_pool_sizing_refuses(monkeypatch: Any, changes: dict[str, Any], said: str | None) -> None:
    for _, ours, config in FEATURES:
        made = {
            "architecture": config["architectures"][0] + "NextN" * changes.get("draft", False),
            "dtype": torch.float8_e4m3fn,
            "capability": (9, 0),
            "available": True,
            "version": flashmla.KERNEL_VERSION,
        } | changes
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda m=made: m["capability"])
        monkeypatch.setattr(torch.cuda, "is_available", lambda m=made: m["available"])
        monkeypatch.setattr(flashmla, "kernel_version", lambda m=made: m["version"])
        hf = SimpleNamespace(architectures=[made["architecture"]])
        model = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=hf), kv_cache_dtype=made["dtype"]
        )
        if said is None:
            ours.ROWS.before_pool_sizing(model)
            continue
        with pytest.raises(SystemExit, match=said) as error:
            ours.ROWS.before_pool_sizing(model)
        assert "\n" not in str(error.value)


def test_one_cache_of_flash_at_a_time() -> None:
    assert fp8_hooks.FEATURE.id in flash_hooks.FEATURE.conflicts


def test_engine_that_is_installed() -> None:
    """Every pin fits (with the upstream fixes in place: ``python -m numinous_tooling.upstream pins --conflicts``), and the engine has
    the arguments that the judges read."""
    pytest.importorskip("sglang", reason="reads the installed engine")
    tree = find_engine()
    assert [fits(hooks.FEATURE, tree) for hooks, *_ in FEATURES] == [[], []]
    fields = b"".join(tree.read(path) for path in tree.files(FIELDS) if path.endswith(".py"))
    assert [name for name in DEFAULTS if f"    {name}: A[".encode() not in fields] == []
