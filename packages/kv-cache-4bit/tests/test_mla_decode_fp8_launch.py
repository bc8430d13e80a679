# SPDX-License-Identifier: Apache-2.0
"""Which launches `kv4.mla_decode_fp8` takes, and what the option of the features with 4-bit rows may say: judges, boot checks, pins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from numinous_kv_cache_4bit.engine import mla_decode_fp8 as ours
from numinous_kv_cache_4bit.features import features
from numinous_kv_cache_4bit.hooks.launch import UNCOVERED
from numinous_kv_cache_4bit.hooks.mla_decode_fp8 import FEATURE, judge
from numinous_kv_cache_4bit.options import DECODE, FP8_ARCHITECTURES, GLM_DSA, GLM_FLASH, MLA_DENSE
from numinous_tooling.patching import PatchError
from numinous_tooling.patching.boot import fits
from numinous_tooling.patching.engine import find_engine
from numinous_tooling.patching.flags import enabled
from numinous_tooling.patching.serve_command import FIELDS, ServeCommand

FLASH_FP8 = {"NUMINOUS_KV4_GLM_FLASH_FP8": "1"}
GLM = {"architectures": ["GlmMoeDsaForCausalLM"], "num_attention_heads": 64}
V32 = {"architectures": ["DeepseekV32ForCausalLM"], "num_attention_heads": 128}
FLASH = {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "text_config": {"num_attention_heads": 64},
}
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


def lines_of(given: dict[str, Any], config: Any, **environ: str) -> list[str]:
    return list(judge(ServeCommand(given, DEFAULTS, environ=environ, model_config=config)))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (FP8, None),
        (FP8 | {"tp_size": 8, "speculative_algorithm": "EAGLE"}, None),
        (FP8 | {"dsa_prefill_backend": "flashmla_kv", "dsa_decode_backend": "flashmla_kv"}, None),
        ({}, "would be auto: add --kv-cache-dtype fp8_e4m3"),
        ({"kv_cache_dtype": "bfloat16"}, "would be bfloat16: add --kv-cache-dtype fp8_e4m3"),
        (FP8 | {"dsa_prefill_backend": "trtllm"}, "--dsa-prefill-backend trtllm does not read"),
        (FP8 | {"dsa_decode_backend": "trtllm"}, "--dsa-decode-backend trtllm does not read"),
        (FP8 | {"dtype": "float16"}, "--dtype float16"),
        (FP8 | {"speculative_algorithm": "DFLASH"}, "--speculative-algorithm DFLASH"),
        (FP8 | {"speculative_eagle_topk": 2}, "--speculative-eagle-topk 2"),
        (FP8 | {"dcp_size": 2}, "--dcp-size > 1"),
        (FP8 | {"pp_size": 2}, "--pp-size > 1"),
        (FP8 | {"disaggregation_mode": "decode"}, "disaggregation"),
        *((FP8 | {name: True}, "--" + name.replace("_", "-")) for name in UNCOVERED),
    ],
)
def test_judge(given: dict[str, Any], said: str | None) -> None:
    for config, environ in ((None, {}), (GLM, {}), (V32, {}), (FLASH, FLASH_FP8)):
        lines = lines_of(given, config, **environ)
        assert len(lines) == (said is not None), lines
        assert said is None or said in lines[0]
        assert not any("\n" in line for line in lines)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (FLASH, "keeps FP8 rows with kv4.glm_flash_fp8 only: set NUMINOUS_KV4_GLM_FLASH_FP8=1"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "this model is DeepseekV3ForCausalLM"),
        ({"architectures": ["LlamaForCausalLM"]}, "this model is LlamaForCausalLM"),
        (GLM | {"num_attention_heads": 256}, "256 query heads per rank"),
    ],
)
def test_judge_reads_the_model(config: dict[str, Any], said: str) -> None:
    (line,) = lines_of(FP8, config)
    assert said in line


def configurator(architecture: str, dtype: torch.dtype) -> Any:
    config = SimpleNamespace(architectures=[architecture])
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=config), kv_cache_dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({"architecture": name, **FLASH_FP8}, None) for name in FP8_ARCHITECTURES),
        ({"architecture": "Glm5NextForConditionalGeneration"}, "set NUMINOUS_KV4_GLM_FLASH_FP8=1"),
        ({"architecture": "DeepseekV3ForCausalLM"}, "this model is DeepseekV3ForCausalLM; unset"),
        ({"dtype": torch.bfloat16}, "add --kv-cache-dtype fp8_e4m3"),
        ({"capability": (10, 0)}, "made for Hopper .sm90., this is sm100"),
        ({"capability": (12, 0)}, "this is sm120"),
        ({"available": False}, "this is a machine without a GPU"),
    ],
)
def test_pool_sizing_refuses(monkeypatch: Any, changes: dict[str, Any], said: str | None) -> None:
    made = {
        "architecture": "GlmMoeDsaForCausalLM",
        "dtype": torch.float8_e4m3fn,
        "capability": (9, 0),
        "available": True,
    } | changes
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: made["capability"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: made["available"])
    for name in FLASH_FP8:
        monkeypatch.setenv(name, made.get(name, ""))
    model = configurator(made["architecture"], made["dtype"])
    if said is None:
        ours.before_pool_sizing(model)
        return
    with pytest.raises(SystemExit, match=said) as error:
        ours.before_pool_sizing(model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_cache_dim": 576}, "rows are 576 wide, not 656"),
        ({"qk_rope_head_dim": 0}, "rows are 656 wide, not 528"),
        ({"dsa_kv_cache_store_fp8": False}, "rows are 656 wide"),
        ({"dsa_decode_impl": "flashmla_sparse"}, "--dsa-decode-backend flashmla_sparse does not"),
        ({"dsa_prefill_impl": "trtllm"}, "--dsa-prefill-backend trtllm does not"),
        ({"flashmla_kv_num_q_heads": 192, "num_q_heads": 192}, "192 query heads per rank"),
        ({"real_page_size": 128}, "pages of 128 tokens"),
    ],
)
def test_backend_refuses(changes: dict[str, Any], said: str) -> None:
    made = {
        "kv_cache_dim": 656,
        "qk_rope_head_dim": 64,
        "dsa_kv_cache_store_fp8": True,
        "dsa_prefill_impl": "flashmla_kv",
        "dsa_decode_impl": "flashmla_kv",
        "num_q_heads": 8,
        "flashmla_kv_num_q_heads": 64,
        "real_page_size": 64,
        "token_to_kv_pool": SimpleNamespace(size=640, page_size=64),
    }
    with pytest.raises(SystemExit, match=said) as error:
        ours.after_backend(None, SimpleNamespace(**made | changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("feature", [GLM_DSA, GLM_FLASH, MLA_DENSE])
def test_the_option_is_one_of_two_words(feature: str) -> None:
    option = DECODE[feature]
    flag = option.name.removesuffix("_DECODE")
    for word in ("", "scratch", "native"):
        (on,) = enabled(features(), {flag: "1", option.name: word})
        assert on.id == feature
    with pytest.raises(PatchError, match="_DECODE='nativ' is none of scratch, native"):
        enabled(features(), {flag: "1", option.name: "nativ"})


@pytest.mark.parametrize("other", ["GLM_DSA", "GLM_FLASH", "MLA_DENSE"])
def test_rows_of_4_bit_are_other_features(other: str) -> None:
    with pytest.raises(PatchError, match="exclude each other"):
        enabled(features(), {f"NUMINOUS_KV4_{other}": "1", FEATURE.flag: "1"})


def test_engine_that_is_installed() -> None:
    """Every pin fits (with the upstream fixes in place: ``python -m numinous_tooling.upstream pins --conflicts``), the engine has the
    arguments that the judge reads, and the architectures."""
    pytest.importorskip("sglang", reason="reads the installed engine")
    tree = find_engine()
    assert fits(FEATURE, tree) == []
    fields = b"".join(tree.read(path) for path in tree.files(FIELDS) if path.endswith(".py"))
    assert [name for name in DEFAULTS if f"    {name}: A[".encode() not in fields] == []
    known = tree.read("srt/configs/model_config.py")
    assert [name for name in FP8_ARCHITECTURES if f'"{name}"'.encode() not in known] == []
