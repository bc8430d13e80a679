# SPDX-License-Identifier: Apache-2.0
"""Which launches, GPUs and models `kv4.nvfp4_flashinfer` takes: its judge, its pins, the engine's check of 4-bit caches, and the check of a model at boot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv4_nvfp4_harness import configurator

from numinous_kv_cache_4bit.engine import nvfp4_flashinfer as ours
from numinous_kv_cache_4bit.hooks.launch import UNCOVERED
from numinous_kv_cache_4bit.hooks.nvfp4_flashinfer import FEATURE, MORE_UNCOVERED, judge
from numinous_kv_cache_4bit.options import CPU_PLATFORM
from numinous_tooling.patching.boot import fits
from numinous_tooling.patching.engine import find_engine
from numinous_tooling.patching.serve_command import ServeCommand, read_arguments

DEFAULTS = {
    "attention_backend": None,
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "cuda_graph_backend_prefill": None,
    "cuda_graph_config": None,
    "disaggregation_mode": "null",
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "quantization_param_path": None,
    "speculative_algorithm": None,
    "dcp_size": 1,
    "pp_size": 1,
}
DEFAULTS |= dict.fromkeys(UNCOVERED | MORE_UNCOVERED, False)
GIVEN = {"kv_cache_dtype": "nvfp4", "attention_backend": "flashinfer"}
XQA = {"kv_cache_dtype": "nvfp4", "prefill_attention_backend": "flashinfer", "decode_attention_backend": "trtllm_mha"}  # fmt: skip
QWEN = {"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 32, "hidden_size": 4096, "head_dim": 128}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (GIVEN, None),
        (XQA, None),
        (XQA | {"attention_backend": "triton"}, None),
        (GIVEN | {"cuda_graph_backend_prefill": "breakable"}, None),
        (GIVEN | {"kv_cache_dtype": "auto"}, "would be auto: add --kv-cache-dtype nvfp4"),
        (GIVEN | {"kv_cache_dtype": "fp4_mx_block16"}, "would be fp4_mx_block16"),
        ({"kv_cache_dtype": "nvfp4", "decode_attention_backend": "flashinfer"}, "add --prefill-attention-backend flashinfer"),
        (GIVEN | {"prefill_attention_backend": "triton"}, "prefill would be by triton"),
        (GIVEN | {"decode_attention_backend": "triton"}, "decode would be by triton"),
        (GIVEN | {"cuda_graph_backend_prefill": "full"}, "--cuda-graph-backend-prefill full is not covered"),
        (GIVEN | {"cuda_graph_config": '{"prefill": {"backend": "full"}}'}, "full is not covered"),
        (GIVEN | {"dtype": "float16"}, "--dtype float16: the write takes bf16"),
        (GIVEN | {"speculative_algorithm": "EAGLE"}, "speculative decoding is not covered"),
        (GIVEN | {"speculative_algorithm": "DFLASH"}, "speculative decoding is not covered"),  # U11
        (GIVEN | {"disaggregation_mode": "decode"}, "data without block scales"),  # U10
        (GIVEN | {"enable_hierarchical_cache": True}, "leave the block scales out"),
        (GIVEN | {"enable_deterministic_inference": True}, "splits the keys"),
        (GIVEN | {"dllm_algorithm": "x"}, "--dllm-algorithm is not covered"),
        (GIVEN | {"pp_size": 2}, "--pp-size > 1"),
        (GIVEN | {"quantization_param_path": "x"}, "--quantization-param-path is not covered"),
    ],
)  # fmt: skip
def test_judge(given: dict[str, Any], said: str | None) -> None:
    lines = list(judge(ServeCommand(given, DEFAULTS, {}, QWEN)))
    assert (len(lines), bool(said)) in ((0, False), (1, True))
    assert all(said in line and "\n" not in line for line in lines if said)


@pytest.mark.parametrize(
    ("environ", "model", "said"),
    [
        ({"SGLANG_PLATFORM": CPU_PLATFORM}, QWEN, "no kernels for a CPU"),
        ({"SGLANG_USE_HND_KVCACHE": "1"}, QWEN, "SGLANG_USE_HND_KVCACHE"),
        ({}, QWEN | {"head_dim": 96}, "64, 128, 256 values, this model's have 96"),
        ({}, {"num_attention_heads": 32, "hidden_size": 2560}, "this model's have 80"),
        ({}, QWEN | {"kv_lora_rank": 512}, "this one has MLA"),
        ({}, {"text_config": QWEN | {"head_dim": 512}}, "have 512"),
    ],
)
def test_judge_of_environment_and_model(environ: Any, model: Any, said: str) -> None:
    (line,) = judge(ServeCommand(GIVEN, DEFAULTS, environ, model))
    assert said in line


def test_the_engine_has_the_arguments_and_functions() -> None:
    tree = find_engine()
    if tree is None:
        pytest.skip("no engine")
    assert set(DEFAULTS) <= set(read_arguments(tree))
    assert not fits(FEATURE, tree)


@pytest.mark.parametrize(
    ("gpu", "backends", "said"),
    [
        ("is_sm120", ("flashinfer", "flashinfer"), None),
        ("is_sm120", ("flashinfer", "trtllm_mha"), None),
        ("is_sm100", ("flashinfer", "flashinfer"), None),
        ("is_sm100", ("flashinfer", "trtllm_mha"), "trtllm-gen on this GPU, which reads another layout"),
        ("is_sm90", ("flashinfer", "flashinfer"), "on Hopper kv4.nvfp4_triton"),
        ("is_sm120", ("triton", "triton"), "attention backends triton and triton are not covered"),
        ("is_sm120", ("flashinfer", "triton"), "flashinfer and triton are not covered"),
    ],
)  # fmt: skip
def test_gpus_and_backends(gpu: str, backends: tuple[str, str], said: str | None, engine: Any, monkeypatch: Any) -> None:  # fmt: skip
    from sglang.srt.arg_groups import kv_cache_hook, overrides
    from sglang.srt.runtime_context import override_platform

    from numinous_tooling.patching.engine import installed_engine
    from numinous_tooling.patching.hooks import install

    view = SimpleNamespace(kv_cache_dtype="nvfp4", attention_backend=backends[0])
    for module in (kv_cache_hook, overrides):
        monkeypatch.setattr(module, "resolving_view", lambda args: view)
        monkeypatch.setattr(module, "resolved_view", lambda args: view)
        monkeypatch.setattr(module, "attention_backends_of", lambda args: backends)
        monkeypatch.setattr(module, "use_mla_backend", lambda args: False)
    facts = dict.fromkeys(("is_sm90", "is_sm100", "is_sm120"), False) | {gpu: True}
    with override_platform(is_cuda=True, **facts):
        if backends == ("flashinfer", "flashinfer"):
            with pytest.raises((AssertionError, RuntimeError), match=r"KV4 MHA expects|requires Blackwell"):  # fmt: skip
                kv_cache_hook.handle_kv4_compatibility(None)  # stock
        elif said and "trtllm-gen" in said:
            kv_cache_hook.handle_kv4_compatibility(None)  # stock lets it pass
        installation = install([FEATURE], "main", installed_engine())
        try:
            if said is None:
                kv_cache_hook.handle_kv4_compatibility(None)
            else:
                with pytest.raises(SystemExit, match=said):
                    kv_cache_hook.handle_kv4_compatibility(None)
            view.kv_cache_dtype = "fp8_e4m3"
            with pytest.raises(SystemExit, match="would be fp8_e4m3"):
                kv_cache_hook.handle_kv4_compatibility(None)
        finally:
            installation.undo()


def covered(**changes: Any) -> Any:
    """Of a Llama in bf16 with this cache."""
    given = {"kv_cache_dtype": torch.float4_e2m1fn_x2, "head_dim": 128, "v_head_dim": 128}
    made = configurator(**given | {k: v for k, v in changes.items() if k != "model_dtype"})
    made.model_dtype = changes.get("model_dtype", torch.bfloat16)
    return made


def with_layer(**fields: Any) -> torch.nn.Module:
    model = torch.nn.Module()
    model.attn = torch.nn.Module()
    for name, value in fields.items():
        setattr(model.attn, name, value)
    return model


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"model": with_layer(logit_cap=0.0, sliding_window_size=-1)}, None),
        ({"mambaish_config": object(), "hf_config": SimpleNamespace(architectures=["Qwen3NextForCausalLM"])}, None),
        ({"kv_cache_dtype": torch.bfloat16}, "would be torch.bfloat16: add --kv-cache-dtype nvfp4"),
        ({"use_mla_backend": True}, "this one has MLA"),
        ({"is_hybrid_swa": True}, "stock's builder gives them no NVFP4 recipe"),  # U13
        ({"mambaish_config": object(), "hf_config": SimpleNamespace(architectures=["KimiLinearForCausalLM"])}, "this one is a KimiLinear"),  # U45
        ({"is_encoder_decoder": True}, "cross attention"),
        ({"head_dim": 96, "v_head_dim": 96}, "64, 128, 256, this model has 96 and 96"),
        ({"v_head_dim": 64}, "this model has 128 and 64"),
        ({"model_dtype": torch.float16}, "served in torch.float16"),
        ({"is_draft_worker": True}, "drafts"),
        ({"model": with_layer(logit_cap=30.0)}, "cap their logits"),
        ({"model": with_layer(sliding_window_size=1024)}, "sliding windows"),
        ({"model": with_layer(attn_type="encoder_only")}, "without a causal mask"),
    ],
)  # fmt: skip
def test_models(changes: dict[str, Any], said: str | None, engine: Any) -> None:
    if said is None:
        ours.before_pool_sizing(covered(**changes))
        return
    with pytest.raises(SystemExit, match=said) as ended:
        ours.before_pool_sizing(covered(**changes))
    assert "\n" not in str(ended.value)


def test_the_table_of_readers(engine: Any) -> None:
    from sglang.srt.layers.quantization import fp4_kv_cache_quant_method as recipes

    before = dict(recipes.KV_CACHE_ATTENTION_ACCESS_REGISTRY)
    assert "dequant_workspace" in str(ours.native_reads_registered())
    try:
        ours.register_native_reads()
        assert ours.native_reads_registered() is None
        method = recipes.NVFP4KVCacheMethod(num_layers=1, device="cpu")
        assert method.compute_cell_size(2, 64, 3, 1) == 2 * 2 * 64 * 3 * 9 // 16
        for phase, backend in (("prefill", "flashinfer"), ("decode", "flashinfer"), ("decode", "trtllm_mha")):  # fmt: skip
            assert method.resolve_attention_access(phase, backend).kind.value == "native_fp4"
        assert method.resolve_attention_access("prefill", "trtllm_mha") is None
    finally:
        recipes.KV_CACHE_ATTENTION_ACCESS_REGISTRY.update(before)
