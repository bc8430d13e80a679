# SPDX-License-Identifier: Apache-2.0
"""`attention.mixed_tail` in the engine's own backends on the CPU: Triton alone, FlashAttention-3 alone, and `attention.per_layer_backend`, which has both.

A schedule of mixed batches is compared with attention in fp64. Kernels are the stand-ins of `serving`; with ``--full`` the engine's Triton kernels in the
interpreter, on a GPU all kernels are the engine's.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from attention_serving import (
    FULL_DIM,
    ROUNDING,
    WINDOW,
    WINDOW_DIM,
    Serving,
    launched,
    modules_of_engine,
    ours,
    runner_of,
    stub,
)
from torch.utils._python_dispatch import TorchDispatchMode

from numinous_attention.engine import mixed_tail
from numinous_attention.hooks import gqa_extend, per_layer_backend
from numinous_attention.hooks.gqa_extend import TRITON_BY_DEFAULT
from numinous_attention.hooks.mixed_tail import FEATURE, UNCOVERED, judge
from numinous_attention.options import GQA_EXTEND, MIXED_TAIL, PER_LAYER_BACKEND
from numinous_tooling.patching.boot import fits
from numinous_tooling.patching.counters import table
from numinous_tooling.patching.engine import find_engine, installed_engine
from numinous_tooling.patching.hooks import install
from numinous_tooling.patching.serve_command import FIELDS, ServeCommand

EXTEND = "sglang.kernels.ops.attention.extend_attention"
KINDS = ("triton", "fa3", "both")


def make_of(engine: Any, kind: str) -> Callable[[Any], Any]:
    """Builds a backend."""
    return {
        "triton": engine.triton.TritonAttnBackend,
        "fa3": engine.registry.create_flashattention_v3_backend,
        "both": ours(engine),
    }[kind]


def serving_of(engine: Any, kind: str, page: int = 1, **how: Any) -> Serving:
    """A backend with requests; FlashAttention-3 alone has no layer of 512."""
    dim = WINDOW_DIM if kind == "fa3" else FULL_DIM
    serving = Serving(engine, page, make_of(engine, kind), full_dim=dim, **how)
    if kind == "fa3" and serving.device == "cpu":
        serving.backend._get_scheduler_metadata = lambda **named: serving.plans.append(named)
    return serving


def hook(engine: Any, monkeypatch: Any, module: Any = mixed_tail) -> None:
    """Puts the functions of a module where the declaration puts them, as the installer would."""

    def around(call: Any, inner: Any) -> Any:
        return lambda *given, **named: call(inner, *given, **named)

    def after(call: Any, inner: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            result = inner(*given, **named)
            changed = call(result, *given, **named)
            return result if changed is None else changed

        return run

    for patch in FEATURE.patches:
        path, _, qualified = patch.target.partition(":")
        owner: Any = sys.modules[path]
        *classes, name = qualified.split(".")
        for each in classes:
            owner = getattr(owner, each)
        call = getattr(module, patch.call.partition(":")[2])
        wrap = {"around": around, "after": after}[patch.kind]
        monkeypatch.setattr(owner, name, wrap(call, getattr(owner, name)))


@pytest.fixture
def mixing(engine: Any, monkeypatch: Any) -> Any:
    """The engine of a launch with `--enable-mixed-chunk`."""
    from sglang.srt.runtime_context import get_schedule

    with get_schedule().override(enable_mixed_chunk=True):
        yield engine


def schedule(serving: Serving, monkeypatch: Any) -> float:
    """Mixed batches, up to and beyond the window and the page; the worst difference."""
    if serving.device == "cpu":
        monkeypatch.setattr(serving.engine.flash, "flash_attn_with_kvcache", serving.kernels.flash)
    off = [
        serving.step("EXTEND", {1: 20, 2: 5}),
        serving.step("MIXED", {3: 11, 2: 1, 1: 1}),
        serving.step("MIXED", {3: 4, 2: 1, 1: 1}),
    ]
    serving.slide()
    off += [serving.step("EXTEND", {3: 2, 1: 1, 2: 1}) for _ in range(WINDOW)]
    serving.slide()
    off.append(serving.step("EXTEND", {1: 1, 2: 1, 3: 1}))  # all tail, as runs of full hits
    off.append(serving.step("MIXED", {2: 1, 3: 5, 1: 1}))  # one of one token in the head
    off.append(serving.step("EXTEND", {1: 2}))
    off.append(serving.step("EXTEND", {1: 3, 0: 1}))  # a prompt of one token
    return max(off)


def counted(feature: str = MIXED_TAIL) -> dict[str, int]:
    return dict(table().totals().get(feature, {}))


def since(before: dict[str, int], feature: str = MIXED_TAIL) -> dict[str, int]:
    now = counted(feature)
    return {k: n - before.get(k, 0) for k, n in now.items() if n != before.get(k, 0)}


# --- Answers --------------------------------------------------------------------------------------------------------


@pytest.mark.tier("device", archs=("sm90",))
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_on_a_gpu(kind: str, page: int, monkeypatch: Any) -> None:
    """The schedule below with the engine's own kernels; first in this file, before their package has a stand-in."""
    pytest.importorskip("sgl_kernel", reason="FlashAttention-3 comes with sglang-kernel")
    pytest.importorskip("sglang", reason="the backends are the engine's")
    from sglang.srt.runtime_context import get_schedule

    modules = modules_of_engine()
    with launched("cuda"), get_schedule().override(enable_mixed_chunk=True):
        hook(modules, monkeypatch)
        serving = serving_of(modules, kind, page, device="cuda", stand_ins=False)
        before = counted()
        assert schedule(serving, monkeypatch) < 3 * ROUNDING
    assert since(before) == {"engaged": 4 * TAILS}


TAILS = 2 + WINDOW + 3
"""Batches of the schedule that have one."""


@pytest.mark.skipif(
    "not config.getoption('full')", reason="two minutes of interpreter: with --full"
)
@pytest.mark.tier("interpret")
@pytest.mark.parametrize(("kind", "page"), [("triton", 1), ("both", 4)])
def test_answers_of_the_engines_triton_kernels(kind: str, page: int, monkeypatch: Any) -> None:
    """In the interpreter; in fp16, as it takes bf16 operands of a product for integers."""
    pytest.importorskip("sglang", reason="the backends are the engine's")
    from sglang.srt.runtime_context import get_schedule

    for name, module in stub().items():
        monkeypatch.setitem(sys.modules, name, module)
    modules = modules_of_engine()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(modules.flash, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(modules.triton, "get_device_core_count", lambda *device: 8)
    with launched("cpu"), get_schedule().override(enable_mixed_chunk=True):
        hook(modules, monkeypatch)
        serving = serving_of(modules, kind, page, dtype=torch.float16, stand_ins=False)
        assert schedule(serving, monkeypatch) < ROUNDING / 4


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_a_schedule(kind: str, page: int, mixing: Any, monkeypatch: Any) -> None:
    hook(mixing, monkeypatch)
    serving = serving_of(mixing, kind, page)
    before = counted()
    assert schedule(serving, monkeypatch) < ROUNDING
    assert since(before) == {"engaged": 4 * TAILS}
    if kind == "fa3":  # planned as stock plans a decode
        plans = [(x["batch_size"], x["max_seqlen_k"], x["cache_seqlens"].tolist()) for x in serving.plans]  # fmt: skip
        assert len(plans) == TAILS
        assert plans[0] == (2, 21, [6, 21])


@pytest.mark.parametrize("kind", KINDS)
def test_who_gets_which_requests(kind: str, mixing: Any, monkeypatch: Any) -> None:
    """A prefill kernel sees no trailing row, a decode kernel nothing else."""
    hook(mixing, monkeypatch)
    serving = serving_of(mixing, kind)
    monkeypatch.setattr(mixing.flash, "flash_attn_with_kvcache", serving.kernels.flash)
    serving.step("EXTEND", {1: 4, 2: 5, 0: 2})
    serving.kernels.calls.clear()
    serving.kernels.requests.clear()
    serving.step("MIXED", {0: 1, 3: 9, 1: 1, 2: 1})
    seen = zip(serving.kernels.calls, serving.kernels.requests, strict=True)
    head, tail = (2, 9), (2, 1)
    full = {"triton": ("extend", "decode"), "fa3": ("flash", "flash"), "both": ("extend", "decode")}[kind]  # fmt: skip
    wide = ("extend", "decode") if kind == "triton" else ("flash", "flash")
    expected = []
    for layer in serving.runner.model:
        names = wide if layer.sliding_window_size == WINDOW else full
        expected += [((name, layer.head_dim), size) for name, size in zip(names, (head, tail), strict=True)]  # fmt: skip
    assert list(seen) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_answers_lie_in_the_output_of_a_graph(kind: str, mixing: Any, monkeypatch: Any) -> None:
    """`_attn_output`, which the engine hands on around a breakable graph."""
    hook(mixing, monkeypatch)
    serving = serving_of(mixing, kind)
    monkeypatch.setattr(mixing.flash, "flash_attn_with_kvcache", serving.kernels.flash)
    serving.step("EXTEND", {1: 12})
    batch = serving.batch("EXTEND", {2: 3, 1: 1})
    tensors = serving.tensors(batch)
    serving.backend.init_forward_metadata(batch)
    expected = serving.expected(batch, tensors)
    for number, (layer, (q, k, v)) in enumerate(zip(serving.runner.model, tensors, strict=True)):
        batch._attn_output = torch.full((4, q[0].numel()), torch.nan, dtype=q.dtype)
        given = (None, None) if number == 3 else (k, v)
        made = serving.backend.forward(q, *given, layer, batch, number != 3)
        assert made.data_ptr() == batch._attn_output.data_ptr()
        assert float((batch._attn_output.double() - expected[number]).abs().max()) < ROUNDING


@pytest.mark.parametrize("kind", KINDS)
def test_batches_without_a_tail_are_stocks(kind: str, mixing: Any, monkeypatch: Any) -> None:
    """And so is a decode, whose metadata is not kept apart."""
    hook(mixing, monkeypatch)
    serving = serving_of(mixing, kind)
    monkeypatch.setattr(mixing.flash, "flash_attn_with_kvcache", serving.kernels.flash)
    before = counted()
    serving.step("EXTEND", {1: 3, 2: 1, 3: 2})
    serving.step("MIXED", {1: 1, 2: 2})
    serving.step("DECODE", {1: 1, 2: 1})
    assert since(before) == {}
    assert serving.backend.numinous_tail is None


class Reads(TorchDispatchMode):
    """Counts reads of a value of a tensor by the host, each a wait on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, call: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        self.count += call is torch.ops.aten._local_scalar_dense.default
        return call(*given, **(named or {}))


@pytest.mark.parametrize("kind", ["triton", "fa3"])
def test_no_reads_of_the_gpu_beyond_stocks(kind: str, mixing: Any, monkeypatch: Any) -> None:
    class Zeros(dict[Any, Any]):
        def __missing__(self, grid: Any) -> Callable[..., Any]:
            return lambda *given, **named: given[5].zero_()

    monkeypatch.setattr(mixing.index, "create_flashinfer_kv_indices_triton", Zeros())
    counts = []
    for hooked in (False, True):
        if hooked:
            hook(mixing, monkeypatch)
        serving = serving_of(mixing, kind)
        serving.batch("EXTEND", {1: 9, 2: 5})
        batch = serving.batch("MIXED", {3: 9, 1: 1, 2: 1})
        with Reads() as reads:
            serving.backend.init_forward_metadata(batch)
        counts.append(reads.count)
    assert serving.backend.numinous_tail is not None
    assert counts[0] == counts[1]
    with Reads() as reads:
        torch.empty(torch.tensor(3))
    assert reads.count == 1, "the count sees what stock does"


FAULTS = {
    "a window as stock's decode": ("triton", "clamp(max=window + 1)", "clamp(max=window)"),
    "the first keys in place of the last": ("triton", "kv_start_idx=tail.seq_lens - keys", "kv_start_idx=0 * keys"),
    "windows of the full pool": ("triton", "ids = backend.token_to_kv_pool.translate_loc_from_full_to_swa(ids)", "pass"),
    "one buffer of offsets for both": ("triton", "backend.kv_indptr = kept[1].new_zeros(tail.batch_size + 1)", "pass"),
    "slots of the head's keys": ("triton", "part.out_cache_loc = batch.out_cache_loc[rows:]", "part.out_cache_loc = batch.out_cache_loc[:part.batch_size]"),
    "answers left where decode put them": ("triton", "there.copy_(made.view(there.shape))", "pass"),
    "lengths of the head": ("fa3", "lengths = whole.cache_seqlens_int32[first:]", "lengths = whole.cache_seqlens_int32[:tokens]"),
    "pages of the head": ("fa3", "table = (slice(first, None)", "table = (slice(0, tokens)"),
    "a table without the new key": ("fa3", "longest = 1 + max", "longest = max"),
    "windows written to slots of the head": ("fa3", "swa_out_cache_loc=cut(whole.swa_out_cache_loc, slice(rows, None))", "swa_out_cache_loc=cut(whole.swa_out_cache_loc, slice(0, tokens))"),
    "metadata of the whole batch": ("both", "backend.forward_metadata = metadata", "pass"),
    "the head taken for the tail": ("both", "zip(split.of(forward_batch), (split.head, split.tail), (original, decode), strict=True)", "zip(split.of(forward_batch), (split.head, split.tail), (decode, original), strict=True)"),
}  # fmt: skip


def faulty(fault: str, path: Path) -> ModuleType:
    """Our module with a fault planted."""
    _, old, new = FAULTS[fault]
    text = Path(mixed_tail.__file__).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times"
    path = path / "faulty.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("numinous_attention.engine.faulty", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkey = pytest.MonkeyPatch()
    monkey.setitem(sys.modules, spec.name, module)  # dataclasses ask for it
    spec.loader.exec_module(module)
    monkey.undo()
    return module


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str, mixing: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """The schedule above fails, by its answers or before it has any."""
    hook(mixing, monkeypatch, faulty(fault, tmp_path))
    serving = serving_of(mixing, FAULTS[fault][0])
    try:
        off = schedule(serving, monkeypatch)
    except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError):
        return
    assert not off < 5 * ROUNDING


# --- Beside the room's other features -------------------------------------------------------------------------------

TOGETHER = {
    "gqa_extend, mixed_tail": (gqa_extend.FEATURE, FEATURE),
    "gqa_extend, per_layer_backend": (gqa_extend.FEATURE, per_layer_backend.FEATURE),
    "all": (gqa_extend.FEATURE, FEATURE, per_layer_backend.FEATURE),
}


@pytest.mark.tier("interpret")
@pytest.mark.parametrize("names", TOGETHER)
def test_features_together(names: str, mixing: Any, monkeypatch: Any) -> None:
    """Installed and proven by the installer: chunks go to `extend_attention` or FlashAttention-3, tails to a decode kernel, and answers are those of attention."""
    on = TOGETHER[names]
    two, split = per_layer_backend.FEATURE in on, FEATURE in on
    # The interpreter's kernels have no code to prove; what is not loaded needs no proof.
    monkeypatch.delitem(sys.modules, EXTEND, raising=False)
    installation = install(on, "scheduler", installed_engine())
    try:

        def build(runner: Any) -> Any:
            return mixing.setup._build_full_attention_backend_from_str(
                model_runner=runner, backend_str="triton", init_new_workspace=False
            )

        serving = Serving(mixing, 1, build, stand_ins=False)
        serving.backend.decode_attention_fwd = serving.kernels.decode
        before = {name: counted(name) for name in (GQA_EXTEND, MIXED_TAIL, PER_LAYER_BACKEND)}
        assert schedule(serving, monkeypatch) < ROUNDING
    finally:
        installation.undo()
    batches, all_tail, layers = 2 + 1 + WINDOW + 4, 1, 1 if two else 4
    gained = {name: since(was, name) for name, was in before.items()}
    assert gained[GQA_EXTEND] == {"engaged": layers * (batches - all_tail * split)}
    assert gained[MIXED_TAIL] == ({"engaged": 4 * TAILS} if split else {})
    assert gained[PER_LAYER_BACKEND] == ({"engaged": batches, "flash layers": 3 * batches, "triton layers": batches} if two else {})  # fmt: skip
    assert ("decode", FULL_DIM) in serving.kernels.calls or not split


# --- What is stock's ------------------------------------------------------------------------------------------------


def _set(**changes: Any) -> Callable[[Any], None]:
    def change(target: Any) -> None:
        for name, value in changes.items():
            setattr(target, name, value)

    return change


LEFT: dict[str, Callable[[Any, Any], Any]] = {
    "mask": lambda backend, layer: _set(custom_mask=torch.ones(99))(backend.forward_metadata),
    "arguments": lambda backend, layer: {"score_mod": object()},
    "attention_type": lambda backend, layer: _set(is_cross_attention=True)(layer),
    "xai_temperature": lambda backend, layer: _set(xai_temperature_len=8)(layer),
    "window": lambda backend, layer: _set(sliding_window_size=WINDOW - 1)(layer),
}


@pytest.mark.parametrize("reason", LEFT)
@pytest.mark.parametrize("kind", ["triton", "fa3"])
def test_what_is_left_to_stock(kind: str, reason: str, mixing: Any, monkeypatch: Any) -> None:
    """The very call, counted; the whole batch in one."""
    if (kind, reason) == ("fa3", "mask"):
        pytest.skip("FlashAttention-3 takes no mask")
    calls: list[Any] = []
    for cls in (mixing.triton.TritonAttnBackend, mixing.flash.FlashAttentionBackend):
        monkeypatch.setattr(cls, "forward_extend", lambda *given, **named: calls.append((given, named)) or given[1])  # fmt: skip
    hook(mixing, monkeypatch)
    serving = serving_of(mixing, kind)
    serving.batch("EXTEND", {1: 9})
    batch = serving.batch("MIXED", {2: 3, 1: 1})
    q, k, v = serving.tensors(batch)[0]
    serving.backend.init_forward_metadata(batch)
    layer, before = serving.runner.model[0], counted()
    named = LEFT[reason](serving.backend, layer) or {}
    serving.backend.forward(q, k, v, layer, batch, **named)
    assert since(before) == {f"refused:{reason}": 1}
    (((_, *given), more),) = calls
    assert [given[0] is q, given[1] is k, given[2] is v, given[4] is batch] == [True] * 4
    assert more == named
    if kind == "triton":
        monkeypatch.setattr(serving.backend, "forward_metadata", object())
        serving.backend.forward(q, k, v, layer, batch)
        assert len(calls) == 2, "another batch's metadata, or a graph's"
        assert since(before) == {f"refused:{reason}": 1}


def test_batches_that_are_left_to_stock(mixing: Any, monkeypatch: Any) -> None:
    hook(mixing, monkeypatch)
    serving = serving_of(mixing, "triton")
    serving.batch("EXTEND", {1: 9})
    batch = serving.batch("MIXED", {2: 3, 1: 1})
    changes = {
        "no_host_lengths": {"extend_prefix_lens_cpu": None},
        "padded": {"batch_size": 3},
        "speculative": {"spec_info": object()},
    }
    for reason, change in changes.items():
        before = counted()
        assert mixed_tail.first_of_tail(SimpleNamespace(**{**vars(batch), **change})) is None
        assert since(before) == {f"refused:{reason}": 1}
    assert mixed_tail.first_of_tail(batch) == 1
    q = torch.cat([serving.tensors(batch)[0][0]] * 2)  # rows that pad
    serving.backend.init_forward_metadata(batch)
    reason = mixed_tail.uncovered(serving.backend, serving.backend.numinous_tail, q, serving.runner.model[0], {})  # fmt: skip
    assert reason == "padded"


# --- Boot -----------------------------------------------------------------------------------------------------------


def judge_of(kind: str) -> Callable[[Any, Any], None]:
    """What judges a backend when it is built."""
    return (
        mixed_tail.after_flash
        if kind == "fa3"
        else functools.partial(mixed_tail.after_triton, None)
    )


BOOT: dict[str, tuple[str, Callable[[Any], None]]] = {
    "speculative decoding": ("triton", lambda runner: setattr(runner, "is_draft_worker", True)),
    "cross attention": ("triton", lambda runner: setattr(runner.model_config, "is_encoder_decoder", True)),
    "linear attention": ("fa3", lambda runner: setattr(runner.model_config, "linear_attn_registry_result", (None, object()))),
    "cache is torch.float8_e5m2": ("triton", lambda runner: setattr(runner, "kv_cache_dtype", torch.float8_e5m2)),
}  # fmt: skip


@pytest.mark.parametrize("says", BOOT)
def test_runners_that_are_refused(says: str, mixing: Any) -> None:
    kind, change = BOOT[says]
    runner = runner_of(mixing, 1)
    backend = make_of(mixing, kind)(runner)
    judge_of(kind)(backend, runner)
    change(runner)  # its backend is built: the engine itself would not get so far
    with pytest.raises(SystemExit, match=says) as stop:
        judge_of(kind)(backend, runner)
    assert "\n" not in str(stop.value)
    assert str(stop.value).endswith("unset NUMINOUS_ATTENTION_MIXED_TAIL")


BACKENDS = {
    "has MLA": ("fa3", {"use_mla": True}),
    "decode context parallelism": ("triton", {"dcp_size": 2}),
    "one kernel": ("triton", {"enable_deterministic": True}),
    "FlashAttention-4": ("fa3", {"fa_impl_ver": 4}),
    "must not split": ("fa3", {"num_splits": 1}),
    "prefill-aware": ("fa3", {"has_local_attention": True}),
    "embedding models": ("fa3", {"fa_skip_kv_cache": True}),
    "context parallelism is": ("fa3", {"attn_cp_size": 2}),
    "unified memory": ("triton", {"kv_index_translator": SimpleNamespace(is_translating=True)}),
}


@pytest.mark.parametrize("says", BACKENDS)
def test_backends_that_are_refused(says: str, mixing: Any, monkeypatch: Any) -> None:
    kind, changes = BACKENDS[says]
    runner = runner_of(mixing, 1)
    backend = make_of(mixing, kind)(runner)
    for name, value in changes.items():
        monkeypatch.setattr(backend, name, value)
    with pytest.raises(SystemExit, match=says):
        judge_of(kind)(backend, runner)


def test_launches_without_mixed_batches_are_refused(engine: Any) -> None:
    """As the engine resolved it, which may switch mixing off by itself."""
    from sglang.srt.runtime_context import get_schedule

    runner = runner_of(engine, 1)
    backend = engine.triton.TritonAttnBackend(runner)
    for mixed, size in ((False, 64), (True, -1), (True, None)):
        with (
            get_schedule().override(enable_mixed_chunk=mixed, chunked_prefill_size=size),
            pytest.raises(SystemExit, match="add --enable-mixed-chunk"),
        ):
            mixed_tail.after_triton(None, backend, runner)


# --- Launch ---------------------------------------------------------------------------------------------------------

PLAIN = {
    "attention_backend": None, "prefill_attention_backend": None, "decode_attention_backend": None, "kv_cache_dtype": "auto",
    "enable_mixed_chunk": False, "chunked_prefill_size": None, "speculative_algorithm": None, "dcp_size": 1, "attn_cp_size": 1,
    "pp_size": 1, "disaggregation_mode": "null", "dllm_algorithm": None, **dict.fromkeys(UNCOVERED, False),
}  # fmt: skip


def lines(model: dict[str, Any] | None = None, **given: Any) -> list[str]:
    covered = {"enable_mixed_chunk": True, "attention_backend": "triton"}
    return list(judge(ServeCommand({**covered, **given}, PLAIN, model_config=model)))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, None),
        ({"attention_backend": "fa3", "kv_cache_dtype": "fp8_e4m3", "chunked_prefill_size": 8192}, None),
        ({"attention_backend": None, "prefill_attention_backend": "fa3", "decode_attention_backend": "fa3"}, None),
        ({"enable_mixed_chunk": False}, "add --enable-mixed-chunk"),
        ({"chunked_prefill_size": -1}, "--chunked-prefill-size -1"),
        ({"attention_backend": None}, "add --attention-backend triton or fa3"),
        ({"attention_backend": "flashinfer"}, "--attention-backend flashinfer"),
        ({"decode_attention_backend": "fa3"}, "triton of prefill and fa3 of decode"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2"),
        ({"speculative_algorithm": "NGRAM"}, "speculative decoding"),
        ({"dcp_size": 2}, "--dcp-size > 1"),
        ({"attn_cp_size": 2}, "--attn-cp-size > 1"),
        ({"pp_size": 2}, "--pp-size > 1"),
        ({"disaggregation_mode": "decode"}, "disaggregation"),
        ({"dllm_algorithm": "LowConfidence"}, "--dllm-algorithm"),
        *(({name: True}, "--" + name.replace("_", "-")) for name in UNCOVERED),
    ],
)  # fmt: skip
def test_launches(given: dict[str, Any], says: str | None) -> None:
    found = lines(**given)
    assert len(found) == (says is not None), found
    assert says is None or says in found[0]
    assert not any("\n" in line for line in found)


def test_models() -> None:
    for name in TRITON_BY_DEFAULT:
        assert lines({"architectures": [name]}, attention_backend=None) == []
    (line,) = lines({"text_config": {"kv_lora_rank": 512}})
    assert "has MLA" in line


def test_engine_that_is_installed() -> None:
    """Every pin fits, and the engine has the arguments that the judge reads."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("reads the installed engine, there is none")
    tree = find_engine()
    assert fits(FEATURE, tree) == []
    fields = b"".join(tree.read(path) for path in tree.files(FIELDS) if path.endswith(".py"))
    assert [name for name in PLAIN if f"    {name}: A[".encode() not in fields] == []
