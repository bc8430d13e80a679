# SPDX-License-Identifier: Apache-2.0
"""`attention.per_layer_backend` in the engine's own classes: both backends, pools, layers and the hook are real, on the CPU.

Kernels are stand-ins: FlashAttention-3's refuses what the kernel refuses and reads no more than its page table names, Triton's read no
more than the indices. With ``--full`` the engine's Triton kernels run in the interpreter; on a GPU all kernels are the engine's. A schedule of batches (prefill, a chunk with decoding requests mixed in, eager decodes, a decode captured and
replayed with a padded request) is compared with attention in fp64 over all keys that a request ever had.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_serving import (
    FULL_DIM,
    OF_FLASH,
    QUERY_HEADS,
    ROUNDING,
    WINDOW,
    WINDOW_DIM,
    Serving,
    launched,
    layers_of,
    modules_of_engine,
    ours,
    runner_of,
    stub,
)

from numinous_attention.hooks.per_layer_backend import FEATURE, GEMMA4, UNCOVERED, judge
from numinous_attention.options import PER_LAYER_BACKEND
from numinous_tooling.patching.counters import table
from numinous_tooling.patching.serve_command import ServeCommand


def schedule(serving: Serving, monkeypatch: Any) -> float:
    """Prefill, a chunk with decodes mixed in, decodes, captured decodes, and a prefill between them; the worst difference."""
    if serving.device == "cpu":
        monkeypatch.setattr(serving.engine.flash, "flash_attn_with_kvcache", serving.kernels.flash)
    off = [serving.step("EXTEND", {1: 20, 2: 5})]
    off.append(serving.step("MIXED", {1: 11, 3: 3, 2: 1}))
    serving.slide()
    off += [serving.step("DECODE", {1: 1, 2: 1, 3: 1}) for _ in range(5)]
    serving.slide()
    serving.capture(4)
    off += [serving.replay({3: 1, 1: 1, 2: 1}) for _ in range(4)]
    serving.slide()
    off.append(serving.step("EXTEND", {2: 9}))
    serving.slide()
    off += [serving.replay({1: 1, 2: 1}) for _ in range(2)]
    return max(off)


@pytest.mark.tier("device", archs=("sm90",))
@pytest.mark.parametrize("page", [1, 16])
def test_answers_on_a_gpu(page: int, monkeypatch: Any) -> None:
    """The schedule below with both backends' own kernels; first in this file, before their package has a stand-in."""
    pytest.importorskip("sgl_kernel", reason="FlashAttention-3 comes with sglang-kernel")
    pytest.importorskip("sglang", reason="the backends are the engine's")
    modules = modules_of_engine()
    with launched("cuda"):
        serving = Serving(modules, page, ours(modules), "cuda", stand_ins=False)
        before = counted()
        assert schedule(serving, monkeypatch) < 3 * ROUNDING
    assert since(before)["flash layers"] == 3 * since(before)["triton layers"]


@pytest.mark.skipif("not config.getoption('full')", reason="30 s of interpreter: with --full")
@pytest.mark.tier("interpret")
@pytest.mark.parametrize("page", [1, 4])
def test_answers_of_the_engines_triton_kernels(page: int, monkeypatch: Any) -> None:
    """Those of attention and of both backends' metadata, in the interpreter; in fp16, as it takes bf16 operands of a product for integers."""
    pytest.importorskip("sglang", reason="the backends are the engine's")
    for name, module in stub().items():
        monkeypatch.setitem(sys.modules, name, module)
    modules = modules_of_engine()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(modules.flash, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(modules.triton, "get_device_core_count", lambda *device: 8)
    with launched("cpu"):
        serving = Serving(modules, page, ours(modules), dtype=torch.float16, stand_ins=False)
        assert schedule(serving, monkeypatch) < ROUNDING / 4
    assert set(serving.kernels.calls) == {("flash", WINDOW_DIM)}


@pytest.mark.parametrize("page", [1, 4])
def test_answers_of_a_schedule(page: int, engine: Any, monkeypatch: Any) -> None:
    serving = Serving(engine, page, ours(engine))
    assert schedule(serving, monkeypatch) < ROUNDING
    kinds = set(serving.kernels.calls)
    assert kinds == {("flash", WINDOW_DIM), ("extend", FULL_DIM), ("decode", FULL_DIM)}


FAULTS: dict[str, str | None] = {
    "layers swapped": "FlashAttention-3 has no such heads",
    "windows with Triton": None,
    "flash has no metadata": "swa_out_cache_loc",
    "triton has no metadata": "custom_mask",
    "flash keeps the metadata of its first batch": "must match",
    "triton keeps the metadata of its first batch": "must match",
    "flash is not refilled before a replay": None,
    "triton is not refilled before a replay": None,
    "flash has no buffers for graphs": "cuda_graph_swa_out_cache_loc",
    "window one longer": None,
    "window one short": None,
    "read from slots of the full pool": None,
    "written to slots of the full pool": None,
    "a plan for heads of the config": "not for these layers",
}
"""Fault -> what the error says; None where answers are wrong instead."""


def plant(fault: str, engine: Any, serving: Serving, monkeypatch: Any) -> None:
    flash, triton = engine.two.FlashAttentionBackend, engine.two.TritonAttnBackend
    cls = flash if fault.startswith("flash") else triton
    takes, init, fill = (
        engine.ours.flash_takes,
        cls.init_forward_metadata,
        cls.init_forward_metadata_out_graph,
    )

    def once(backend: Any, batch: Any) -> None:
        if backend.forward_metadata is None:
            init(backend, batch)

    def capture_only(backend: Any, batch: Any, in_capture: bool = False) -> None:
        if in_capture:
            fill(backend, batch, True)

    def full_table(backend: Any, batch: Any) -> None:
        plain(backend, batch)
        backend.forward_metadata.swa_page_table = backend.forward_metadata.page_table

    if fault == "layers swapped":
        monkeypatch.setattr(engine.ours, "flash_takes", lambda layer: not takes(layer))
    elif fault == "windows with Triton":
        monkeypatch.setattr(engine.ours, "flash_takes", lambda layer: False)
    elif fault.endswith("has no metadata"):
        monkeypatch.setattr(cls, "init_forward_metadata", lambda backend, batch: None)
    elif fault.endswith("first batch"):
        monkeypatch.setattr(cls, "init_forward_metadata", once)
    elif fault.endswith("before a replay"):
        monkeypatch.setattr(cls, "init_forward_metadata_out_graph", capture_only)
    elif fault == "flash has no buffers for graphs":
        monkeypatch.setattr(flash, "init_cuda_graph_state", lambda backend, *sizes: None)
    elif fault.startswith("window one"):
        for layer in serving.runner.model:
            if layer.head_dim == WINDOW_DIM:
                layer.sliding_window_size += 1 if fault.endswith("longer") else -1
    elif fault == "read from slots of the full pool":
        plain = flash.init_forward_metadata
        monkeypatch.setattr(flash, "init_forward_metadata", full_table)
    elif fault == "written to slots of the full pool":
        pool = type(serving.runner.token_to_kv_pool)
        write = pool.set_kv_buffer
        monkeypatch.setattr(pool, "set_kv_buffer", lambda pool, layer, loc, *rest: write(pool, layer, dataclasses.replace(loc, swa_loc=loc.loc), *rest))  # fmt: skip
    else:
        serving.backend.flash._disable_scheduler_metadata_precompute = False


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str, engine: Any, monkeypatch: Any) -> None:
    """The schedule above fails where layers go astray, metadata is missing or stale, or a window or a slot is wrong."""
    serving = Serving(engine, 1, ours(engine))
    plant(fault, engine, serving, monkeypatch)
    if (says := FAULTS[fault]) is None:
        assert schedule(serving, monkeypatch) > 20 * ROUNDING
    else:
        with pytest.raises((AssertionError, AttributeError, RuntimeError), match=says):
            schedule(serving, monkeypatch)


def test_windows_of_stock(engine: Any) -> None:
    """Why answers are not stock's bit for bit: its Triton decode sees one key less than its prefill, once a sequence outgrows the window."""
    serving = Serving(engine, 1, engine.triton.TritonAttnBackend)
    assert serving.step("EXTEND", {1: WINDOW - 1, 2: 3 * WINDOW}) < ROUNDING
    assert serving.step("DECODE", {1: 1}) < ROUNDING
    assert serving.step("DECODE", {1: 1}) > 5 * ROUNDING, "W + 1 tokens, all within the window"
    assert serving.step("DECODE", {2: 1}) > 5 * ROUNDING
    serving.backend.sliding_window_size += 1  # the key that it leaves out, given back
    assert serving.step("DECODE", {2: 1}) < ROUNDING


# --- Dispatch -------------------------------------------------------------------------------------------------------


def counted() -> dict[str, int]:
    return dict(table().totals().get(PER_LAYER_BACKEND, {}))


def since(before: dict[str, int]) -> dict[str, int]:
    return {k: n - before.get(k, 0) for k, n in counted().items() if n != before.get(k, 0)}


def test_counters(engine: Any, monkeypatch: Any) -> None:
    """Batches prepared for both, a replay among them; calls of layers by kind."""
    monkeypatch.setattr(engine.flash, "flash_attn_with_kvcache", (serving := Serving(engine, 1, ours(engine))).kernels.flash)  # fmt: skip
    before = counted()
    serving.step("EXTEND", {1: 3})
    assert since(before) == {"engaged": 1, "flash layers": 3, "triton layers": 1}
    serving.capture(2)
    serving.replay({1: 1})
    assert since(before)["engaged"] == 3


def test_a_mask_of_image_spans_stays_with_triton(engine: Any, monkeypatch: Any) -> None:
    """Models set it on the Triton backend's metadata, once those are prepared."""
    serving = Serving(engine, 1, ours(engine))
    assert isinstance(serving.backend, engine.triton.TritonAttnBackend)
    batch = serving.batch("EXTEND", {1: 6})
    tensors = serving.tensors(batch)
    serving.backend.init_forward_metadata(batch)
    serving.backend.forward_metadata.custom_mask = torch.ones(36, dtype=torch.uint8)
    before = counted()
    answers = serving.forward(batch, tensors)
    assert serving._off(answers, serving.expected(batch, tensors)) < ROUNDING
    assert {kernel for kernel, _ in serving.kernels.calls} == {"extend"}
    reason = "refused:the batch has a mask of its own (image spans)"
    assert since(before) == {reason: 3, "triton layers": 4}
    monkeypatch.setattr(engine.flash, "flash_attn_with_kvcache", serving.kernels.flash)
    assert serving.step("DECODE", {1: 1}) < ROUNDING, "what Triton wrote, FlashAttention-3 reads"


def test_sinks_stay_with_triton(engine: Any) -> None:
    serving = Serving(engine, 1, ours(engine))
    batch = serving.batch("EXTEND", {1: 6})
    serving.backend.init_forward_metadata(batch)
    q, k, v = serving.tensors(batch)[0]
    before = counted()
    serving.backend.forward(q, k, v, serving.runner.model[0], batch, sinks=torch.ones(4))
    assert serving.kernels.calls == [("extend", WINDOW_DIM)]
    assert since(before)["refused:the layer has sinks or a score function"] == 1


def test_an_idle_batch_reaches_no_kernel(engine: Any) -> None:
    """The engine drops the metadata of an idle rank."""
    serving = Serving(engine, 1, ours(engine))
    serving.backend.forward_metadata = None
    batch = SimpleNamespace(forward_mode=engine.Mode.IDLE)
    q = torch.zeros(0, QUERY_HEADS, WINDOW_DIM)
    assert serving.backend.forward(q, q, q, serving.runner.model[0], batch).shape == (0, 1024)
    assert not serving.kernels.calls


@pytest.mark.parametrize(
    ("change", "takes"),
    [
        ({}, True),
        ({"qk_head_dim": 256, "v_head_dim": 256}, True),
        ({"qk_head_dim": 264, "v_head_dim": 264}, False),
        ({"qk_head_dim": 192}, False),
        ({"qk_head_dim": 36, "v_head_dim": 36}, False),
        ({"is_cross_attention": True}, False),
        ({"attn_type": "ENCODER_ONLY"}, False),
        ({"attn_type": "DECODER_BIDIRECTIONAL"}, False),
        ({"logit_capping_method": "other"}, False),
        ({"xai_temperature_len": 64}, False),
        ({"logit_cap": 50.0}, True),
    ],
)
def test_layers_that_flash_takes(change: dict[str, Any], takes: bool, engine: Any) -> None:
    layer = layers_of(engine)[0]
    for name, value in change.items():
        setattr(layer, name, getattr(engine.Type, value) if name == "attn_type" else value)
    assert engine.ours.flash_takes(layer) is takes


# --- Boot -----------------------------------------------------------------------------------------------------------


def test_hook_builds_for_triton_alone(engine: Any) -> None:
    """Installed as at boot; proven by the installer."""
    from numinous_tooling.patching.engine import installed_engine
    from numinous_tooling.patching.hooks import install

    installation = install([FEATURE], "scheduler", installed_engine())
    try:
        build = engine.setup._build_full_attention_backend_from_str
        runner = runner_of(engine, 1)
        named = {"model_runner": runner, "init_new_workspace": True}
        assert type(build(backend_str="triton", **named)) is engine.two.TwoBackends
        assert runner.init_new_workspace is True
        with pytest.raises(SystemExit, match="would be fa3; add --attention-backend triton"):
            build(backend_str="fa3", **named)
    finally:
        installation.undo()


def _poke(**changes: Any) -> Callable[[Any], None]:
    def poke(target: Any) -> None:
        for name, value in changes.items():
            setattr(target, name, value)

    return poke


BOOT: dict[str, tuple[Callable[[Any], Any], Callable[[Any], None]]] = {
    "drafts are not covered": (lambda r: r, _poke(is_draft_worker=True)),
    "has MLA": (lambda r: r, _poke(use_mla_backend=True)),
    "cross attention": (lambda r: r.model_config, _poke(is_encoder_decoder=True)),
    "chunked or prefill-aware": (lambda r: r.model_config, _poke(is_local_attention_model=True)),
    "needs the engine's pools": (lambda r: r, _poke(token_to_kv_pool=object())),
    "no table of slots": (lambda r: r.token_to_kv_pool, _poke(full_to_swa_index_mapping=None)),
    "would be torch.float8_e4m3fn": (lambda r: r, _poke(kv_cache_dtype=torch.float8_e4m3fn)),
    "power of two": (lambda r: r, _poke(page_size=3)),
    "share a cache": (lambda r: r.model[3], _poke(layer_id=1)),
    "a layer's window and its pool": (lambda r: r.model[1], _poke(sliding_window_size=5)),
    "scales its KV cache": (lambda r: r.model[2], _poke(k_scale_float=0.5)),
    "no layer for FlashAttention-3": (lambda r: r, lambda r: [_poke(qk_head_dim=320, v_head_dim=320)(x) for x in r.model]),
    "takes every layer": (lambda r: r.model[1], _poke(qk_head_dim=256, v_head_dim=256)),
}  # fmt: skip


@pytest.mark.parametrize("says", BOOT)
def test_refusals_at_boot(says: str, engine: Any) -> None:
    runner = runner_of(engine, 1)
    where, poke = BOOT[says]
    poke(where(runner))
    with pytest.raises(SystemExit) as raised:
        ours(engine)(runner)
    line = str(raised.value)
    assert line.startswith(f"{PER_LAYER_BACKEND}: ")
    assert says in line
    assert "\n" not in line


def test_other_machines_are_refused(engine: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (10, 0))
    with pytest.raises(SystemExit, match=r"made for Hopper \(sm90\), this is sm100"):
        ours(engine)(runner_of(engine, 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="this is no GPU"):
        ours(engine)(runner_of(engine, 1))


def test_flash_that_cannot_be_imported_is_refused(engine: Any, monkeypatch: Any) -> None:
    for name in OF_FLASH:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    with pytest.raises(SystemExit, match="FlashAttention-3 cannot be imported"):
        ours(engine)(runner_of(engine, 1))


# --- Launch ---------------------------------------------------------------------------------------------------------

PLAIN = {
    "attention_backend": None, "prefill_attention_backend": None, "decode_attention_backend": None,
    "kv_cache_dtype": "auto", "speculative_algorithm": None, "page_size": None, "dcp_size": 1, "attn_cp_size": 1,
    "pp_size": 1, "disaggregation_mode": "null", "dllm_algorithm": None, "cuda_graph_config": None,
    "cuda_graph_backend_prefill": None, "cuda_graph_backend_decode": None, **dict.fromkeys(UNCOVERED, False),
}  # fmt: skip
MODEL = {
    "architectures": [GEMMA4[1]],
    "text_config": {"head_dim": 256, "global_head_dim": 512, "sliding_window": 1024},
}


def lines(model: dict[str, Any] | None = MODEL, **given: Any) -> list[str]:
    return list(judge(ServeCommand(given=given, defaults=PLAIN, model_config=model)))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"attention_backend": "triton", "page_size": 64, "kv_cache_dtype": "bfloat16"},
        {"cuda_graph_backend_prefill": "disabled", "cuda_graph_backend_decode": "full"},
        {"cuda_graph_config": {"decode": {"backend": "full"}, "prefill": {"backend": "breakable"}}},
        {"enable_mixed_chunk": True, "disable_radix_cache": True, "tp_size": 4},
    ],
)
def test_launches_that_are_covered(given: dict[str, Any]) -> None:
    assert lines(**given) == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"attention_backend": "fa3"}, "--attention-backend fa3"),
        ({"decode_attention_backend": "flashinfer"}, "--decode-attention-backend flashinfer"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3"),
        ({"speculative_algorithm": "NGRAM"}, "speculative decoding"),
        ({"page_size": 48}, "--page-size 48"),
        ({"dcp_size": 2}, "--dcp-size > 1"),
        ({"attn_cp_size": 2}, "--attn-cp-size > 1"),
        ({"pp_size": 2}, "--pp-size > 1"),
        ({"disaggregation_mode": "prefill"}, "disaggregation"),
        ({"dllm_algorithm": "LowConfidence"}, "--dllm-algorithm"),
        ({"cuda_graph_backend_prefill": "full"}, "kind full in prefill"),
        ({"cuda_graph_config": '{"prefill": {"backend": "full"}}'}, "kind full in prefill"),
        ({"cuda_graph_backend_decode": "breakable"}, "kind breakable in decode"),
        *(({name: True}, f"--{name.replace('_', '-')}") for name in UNCOVERED),
    ],
)
def test_launches_that_are_refused(given: dict[str, Any], says: str) -> None:
    (line,) = lines(**given)
    assert says in line


def test_models_that_are_refused() -> None:
    (line,) = lines({"architectures": ["LlamaForCausalLM"]})
    assert "add --attention-backend triton" in line
    assert lines({"architectures": ["LlamaForCausalLM"]}, attention_backend="triton") == []
    text = {
        "architectures": [GEMMA4[0]],
        "head_dim": 512,
        "swa_head_dim": 256,
        "global_head_dim": 512,
    }
    assert lines(text) == [], "as the engine names them, and the dummy of the benchmarks"
    small = {"architectures": [GEMMA4[0]], "head_dim": 128, "global_head_dim": 256}
    assert "use --attention-backend fa3" in lines(small)[0]
    assert "windows of this model have 320" in lines({**small, "head_dim": 320, "global_head_dim": 512})[0]  # fmt: skip


def test_names_are_those_of_the_engine() -> None:
    """Every argument that `judge` asks for."""
    from numinous_tooling.patching.engine import find_engine
    from numinous_tooling.patching.errors import PatchError
    from numinous_tooling.patching.serve_command import read_arguments

    try:
        tree = find_engine()
    except PatchError as error:
        pytest.skip(str(error))
    assert set(PLAIN) <= set(read_arguments(tree))
