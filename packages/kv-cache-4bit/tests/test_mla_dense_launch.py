# SPDX-License-Identifier: Apache-2.0
"""Which launches `kv4.mla_dense` takes: its judge, its pins, its bytes."""

from __future__ import annotations

from typing import Any

import pytest

from numinous_kv_cache_4bit.engine import mla_dense as ours
from numinous_kv_cache_4bit.hooks.launch import UNCOVERED
from numinous_kv_cache_4bit.hooks.mla_dense import BACKEND_ARGUMENTS, FEATURE, judge
from numinous_kv_cache_4bit.options import (
    DECODE,
    DENSE_ARCHITECTURES,
    DENSE_BACKENDS,
    MLA_DENSE,
)
from numinous_tooling.patching.boot import fits
from numinous_tooling.patching.engine import find_engine
from numinous_tooling.patching.serve_command import FIELDS, ServeCommand

V3 = {"architectures": ["DeepseekV3ForCausalLM"], "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}  # fmt: skip
KIMI = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": V3 | {"num_attention_heads": 64}}  # fmt: skip
DEFAULTS = {
    "kv_cache_dtype": "auto",
    "page_size": None,
    "speculative_attention_mode": "prefill",
    "dsa_prefill_backend": None,
    "dsa_decode_backend": None,
    "dtype": "auto",
    "cuda_graph_backend_prefill": None,
    "cuda_graph_config": None,
    "enable_memory_saver": False,
    "enable_torch_compile": False,
    "quantization_param_path": None,
    "speculative_algorithm": None,
    "speculative_draft_kv_cache_dtype": None,
    "speculative_eagle_topk": None,
    "dcp_size": 1,
    "pp_size": 1,
    "tp_size": 1,
    "disaggregation_mode": "null",
}
DEFAULTS |= dict.fromkeys(BACKEND_ARGUMENTS) | dict.fromkeys(UNCOVERED, False)
FP8 = {"kv_cache_dtype": "fp8_e4m3"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (FP8, None),
        (FP8 | {"tp_size": 2, "speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}, None),
        *((FP8 | {"attention_backend": name}, None) for name in DENSE_BACKENDS),
        (FP8 | {"prefill_attention_backend": "fa3", "decode_attention_backend": "flashmla"}, None),
        (FP8 | {"cuda_graph_backend_prefill": "breakable"}, None),
        ({}, "would be auto: add --kv-cache-dtype fp8_e4m3"),
        ({"kv_cache_dtype": "bfloat16"}, "would be bfloat16: add --kv-cache-dtype fp8_e4m3"),
        *((FP8 | {name: "fa4"}, "fa4 is not covered") for name in BACKEND_ARGUMENTS),
        (FP8 | {"attention_backend": "trtllm_mla"}, "--attention-backend trtllm_mla is not covered; fa3, flashmla"),
        (FP8 | {"cuda_graph_backend_prefill": "full"}, "--cuda-graph-backend-prefill full"),
        *(
            (FP8 | {"cuda_graph_config": config}, said)
            for config, said in (
                ('{"prefill": {"backend": "full"}}', "also as --cuda-graph-config"),
                ({"prefill": {"backend": "full", "bs": None}, "decode": {}}, "also as --cuda-graph-config"),
                ('{"prefill": {"backend": "breakable"}}', None),
                ('{"decode": {"backend": "full"}}', None),
                ("{", None),  # the engine refuses it
            )
        ),
        (FP8 | {"cuda_graph_backend_prefill": "full", "cuda_graph_config": {"prefill": {"backend": "full"}}}, "also as"),
        (FP8 | {"enable_memory_saver": True}, "--enable-memory-saver"),
        (FP8 | {"enable_torch_compile": True}, "--enable-torch-compile"),
        (FP8 | {"quantization_param_path": "scales.json"}, "--quantization-param-path"),
        (FP8 | {"dtype": "float16"}, "--dtype float16"),
        (FP8 | {"speculative_algorithm": "DFLASH"}, "--speculative-algorithm DFLASH"),  # U11
        (FP8 | {"speculative_eagle_topk": 2}, "--speculative-eagle-topk 2"),
        (FP8 | {"speculative_draft_kv_cache_dtype": "bfloat16"}, "the draft's KV cache"),
        (FP8 | {"dcp_size": 2}, "--dcp-size > 1"),  # U08
        (FP8 | {"pp_size": 2}, "--pp-size > 1"),
        (FP8 | {"disaggregation_mode": "decode"}, "disaggregation"),
        *((FP8 | {name: True}, "--" + name.replace("_", "-")) for name in UNCOVERED),
    ],
)  # fmt: skip
def test_judge(given: dict[str, Any], said: str | None) -> None:
    for config in (None, V3, KIMI):
        lines = list(judge(ServeCommand(given, DEFAULTS, model_config=config)))
        assert len(lines) == (said is not None), lines
        assert said is None or said in lines[0]
        assert not any("\n" in line for line in lines)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"page_size": 64}, None),
        ({"page_size": 64, "attention_backend": "fa3", "speculative_algorithm": "EAGLE"}, None),
        ({"attention_backend": "flashmla"}, None),
        ({"decode_attention_backend": "flashmla", "prefill_attention_backend": "fa3"}, None),
        ({}, "native decode reads pages of 64 tokens: add --page-size 64, or set NUMINOUS_KV4_MLA_DENSE_DECODE=scratch"),
        ({"page_size": 1, "attention_backend": "fa3"}, "add --page-size 64"),
        ({"page_size": 64, "attention_backend": "triton"}, "not of triton: choose one of them"),
        ({"page_size": 64, "decode_attention_backend": "flashinfer"}, "not of flashinfer"),
        ({"page_size": 64, "speculative_draft_attention_backend": "triton"}, "not of triton"),
        ({"page_size": 64, "prefill_attention_backend": "triton"}, "not of triton"),
    ],
)  # fmt: skip
def test_judge_of_native_decode(given: dict[str, Any], said: str | None) -> None:
    def lines(word: str) -> list[str]:
        environ = {DECODE[MLA_DENSE].name: word}
        return list(judge(ServeCommand(FP8 | given, DEFAULTS, environ=environ, model_config=V3)))

    assert lines("scratch") == lines("") == []
    found = lines("native")
    assert len(found) == (said is not None), found
    assert said is None or said in found[0]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "this model is LlamaForCausalLM"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "this model is DeepseekV32ForCausalLM"),
        (V3 | {"qk_rope_head_dim": 0}, "this model has 512 and 0"),
        (KIMI | {"text_config": {"kv_lora_rank": 256}}, "this model has 256 and 64"),
    ],
)
def test_judge_reads_the_model(config: dict[str, Any], said: str) -> None:
    (line,) = judge(ServeCommand(FP8, DEFAULTS, model_config=config))
    assert said in line


def test_bytes_of_the_models() -> None:
    """61 layers, Kimi K2.7 and DeepSeek V3; and where the shadow costs more than the rows save."""
    assert ours.cell_size(61, 0) == 22_624
    assert f"{61 * 576 / ours.cell_size(61, 0):.3f}" == "1.553"
    assert f"{61 * 1152 / ours.cell_size(61, 0):.3f}" == "3.106"
    assert ours.cell_size(61, 1) == 22_624 + 352
    assert ours.cell_size(5, 0) > 5 * 576
    assert ours.cell_size(6, 0) < 6 * 576


def test_engine_that_is_installed() -> None:
    """Every pin fits, the engine has the arguments that the judge reads, and the architectures."""
    pytest.importorskip("sglang", reason="reads the installed engine")
    tree = find_engine()
    assert fits(FEATURE, tree) == []
    fields = b"".join(tree.read(path) for path in tree.files(FIELDS) if path.endswith(".py"))
    assert [name for name in DEFAULTS if f"    {name}: A[".encode() not in fields] == []
    models = "deepseek_v2", "deepseek_nextn", "kimi_k25"
    source = b"".join(tree.read(f"srt/models/{name}.py") for name in models)
    assert [name for name in DENSE_ARCHITECTURES if f"class {name}(".encode() not in source] == []
