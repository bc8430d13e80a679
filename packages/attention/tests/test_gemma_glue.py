# SPDX-License-Identifier: Apache-2.0
"""`attention.gemma_glue` in the engine's own classes on the CPU: attention modules of Gemma 3 and 4, backends, pools and layers are real.

A schedule of batches goes through the modules twice, by stock's forward and with the hooks, over pools of their own; answers and pools are compared. What attends is a stand-in of
`serving`. The kernel is its reference, in some tests the kernel itself in the interpreter; on a GPU all kernels are the engine's and ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from attention_gemma import BF16, WIDTH, Served
from attention_serving import QUERY_HEADS, launched, modules_of_engine

from numinous_attention.engine import gemma_glue
from numinous_attention.hooks import gqa_extend, mixed_tail, per_layer_backend, split_verify
from numinous_attention.hooks.gemma_glue import FEATURE, MODELS, UNCOVERED, judge
from numinous_attention.hooks.gqa_extend import TRITON_BY_DEFAULT
from numinous_attention.kernels.qk_norm_rope_store import FP8, reference
from numinous_attention.options import GEMMA_GLUE
from numinous_tooling.patching.boot import fits
from numinous_tooling.patching.counters import table
from numinous_tooling.patching.engine import find_engine, installed_engine
from numinous_tooling.patching.hooks import install
from numinous_tooling.patching.serve_command import FIELDS, ServeCommand

KINDS = ("triton", "fa3", "both")


# --- Hooks ----------------------------------------------------------------------------------------------------------


def by_reference(q: torch.Tensor, k: Any, v: Any, *given: Any, norm_v: bool = False, **how: Any) -> None:  # fmt: skip
    """The kernel, by its reference."""
    made = reference(q, k, v, *given, norm_v=norm_v, **how)
    names = ("q", "k", "v", "k_pool", "v_pool")
    for name, into in zip(names, (q, k, v, *given[-2:]), strict=True):
        if into is not None:
            (into.view(torch.uint8) if into.dtype == FP8 else into).copy_(made[name])


def hook(monkeypatch: Any, module: Any = gemma_glue) -> None:
    """Puts the functions of a module around the models', as the installer would."""
    for patch in FEATURE.patches[:2]:
        path, _, qualified = patch.target.partition(":")
        owner, name = qualified.split(".")
        cls, call = (
            getattr(sys.modules[path], owner),
            getattr(module, patch.call.partition(":")[2]),
        )
        stock = getattr(cls, name)
        monkeypatch.setattr(cls, name, lambda *given, _call=call, _stock=stock, **named: _call(_stock, *given, **named))  # fmt: skip


@pytest.fixture
def gemma(engine: Any, monkeypatch: Any) -> Iterator[Any]:
    """The engine, its kernels that a CPU lacks, and the kernel's reference in its place."""
    from sglang.srt.layers.rotary_embedding.utils import apply_rotary_pos_emb_native_eager
    from sglang.srt.models import gemma3_causal, gemma4_causal  # noqa: F401
    from sglang.srt.runtime_context import get_parallel

    # Not compiled, the same function.
    monkeypatch.setattr(gemma3_causal, "apply_rotary_pos_emb", apply_rotary_pos_emb_native_eager)
    monkeypatch.setattr(gemma_glue, "qk_norm_rope_store", by_reference)
    with get_parallel().override(tp_rank=0):
        yield engine


# --- Stock against ours ---------------------------------------------------------------------------------------------


def schedule(served: Served, monkeypatch: Any) -> None:
    """Prefill, a prefix, decodes mixed in, decodes, captured decodes with a padded request, one token of one request."""
    if served.device == "cpu":
        monkeypatch.setattr(served.engine.flash, "flash_attn_with_kvcache", served.kernels.flash)
    served.step("EXTEND", {1: 20, 2: 5})
    served.step("MIXED", {1: 3, 3: 2, 2: 1})
    served.slide()
    for _ in range(3):
        served.step("DECODE", {1: 1, 2: 1, 3: 1})
    served.slide()
    (served.capture if served.device == "cpu" else served.capture_graph)(4)
    for _ in range(2):
        served.replay({3: 1, 1: 1, 2: 1})
    served.slide()
    served.step("EXTEND", {2: 1})


BATCHES = 8
"""Of the schedule; a replay calls the modules in the stand-in of a graph, not in a graph."""


def codes(x: torch.Tensor) -> torch.Tensor:
    """Values of a pool, in fp32."""
    return (x.view(FP8) if x.dtype == torch.uint8 else x).float()


def assert_alike(stock: Served, made: Served) -> None:
    """Pools: the same rows, but few elements the very same, those a step or two of bf16 (FP8: of E4M3) off; answers within a hundredth of their size."""
    for ours_, theirs in zip(made.buffers(), stock.buffers(), strict=True):
        step = 2.0**-6 if theirs.dtype == BF16 else 2.0**-3
        ours_, theirs = codes(ours_), codes(theirs)
        size = theirs.abs().amax(-1, keepdim=True)
        assert bool(((ours_ - theirs).abs() <= step * size).all()), "a row of a pool"
        written = (theirs != theirs[-1, 0, 0]).any(-1)  # the last slot is nobody's
        assert int(written.sum()) > len(stock.outputs) // len(stock.model.layers)
        assert float((ours_ != theirs)[written].float().mean()) < 1 / 50, "elements differ"
    assert len(made.outputs) == len(stock.outputs) > 0
    for mine, its in zip(made.outputs, stock.outputs, strict=True):
        assert mine.shape == its.shape
        mine, its = mine.float(), its.float()
        assert bool(mine.isfinite().all())
        assert float((mine - its).norm()) <= 0.01 * float(its.norm())


def counted() -> dict[str, int]:
    return dict(table().totals().get(GEMMA_GLUE, {}))


def since(before: dict[str, int]) -> dict[str, int]:
    return {k: n - before.get(k, 0) for k, n in counted().items() if n != before.get(k, 0)}


CASES = [*(("gemma4", kind, page) for kind in KINDS for page in (1, 4)), ("gemma3", "triton", 1), ("gemma3", "fa3", 4)]  # fmt: skip


@contextlib.contextmanager
def on_a_gpu() -> Iterator[Any]:
    """The engine with its own kernels; before a stand-in of their package is there."""
    pytest.importorskip("sgl_kernel", reason="the engine's kernels come with sglang-kernel")
    pytest.importorskip("sglang", reason="the modules are the engine's")
    modules = modules_of_engine()
    from sglang.srt.models import gemma3_causal, gemma4_causal  # noqa: F401
    from sglang.srt.runtime_context import get_parallel

    with launched("cuda"), get_parallel().override(tp_rank=0):
        yield modules


@pytest.mark.tier("device", archs=("sm90",))
@pytest.mark.parametrize(("model", "kind", "page"), [("gemma4", "triton", 1), ("gemma4", "fa3", 16), ("gemma4", "both", 16), ("gemma3", "triton", 1), ("gemma3", "fa3", 16)])  # fmt: skip
def test_models_on_a_gpu(model: str, kind: str, page: int, monkeypatch: Any) -> None:
    """The schedule below with all kernels real, decodes captured in a CUDA graph; first in this file."""
    with on_a_gpu() as modules:
        before = counted()
        stock, made = pair(modules, monkeypatch, model, kind, device="cuda", page=page, stand_ins=False)  # fmt: skip
    assert_alike(stock, made)
    # Eager batches, and a capture with two runs before it; replays call nobody.
    gained = since(before)
    assert gained.pop("engaged") == len(made.model.layers) * (6 + 3)
    assert set(gained) == ({"q alone"} if model == "gemma4" else set())


@pytest.mark.tier("device", archs=("sm90",))
def test_fp8_on_a_gpu(monkeypatch: Any) -> None:
    """Pools of E4M3 with scales, Triton."""
    with on_a_gpu() as modules:
        stock, made = pair(modules, monkeypatch, "gemma4", "triton", device="cuda", cache=FP8, stand_ins=False, change=scales)  # fmt: skip
    assert_alike(stock, made)


@pytest.mark.tier("device", archs=("sm90",))
@pytest.mark.parametrize(("model", "kind"), [("gemma4", "both"), ("gemma3", "fa3")])
def test_graphs_of_prefills_on_a_gpu(model: str, kind: str, monkeypatch: Any) -> None:
    """A padded prefill through the operator that graphs are cut at."""
    with on_a_gpu() as modules:
        _graphs_of_prefills(modules, model, kind, monkeypatch, device="cuda", page=16, stand_ins=False)  # fmt: skip


@pytest.mark.parametrize(("model", "kind", "page"), CASES)
def test_models(model: str, kind: str, page: int, gemma: Any, monkeypatch: Any) -> None:
    stock = Served(gemma, model, kind, page=page)
    schedule(stock, monkeypatch)
    hook(monkeypatch)
    before, made = counted(), Served(gemma, model, kind, page=page)
    schedule(made, monkeypatch)
    assert_alike(stock, made)
    layers = len(made.model.layers)
    alone = {"q alone": BATCHES} if model == "gemma4" else {}
    assert since(before) == {"engaged": layers * BATCHES, **alone}


@pytest.mark.tier("interpret")
@pytest.mark.parametrize(("model", "kind"), [("gemma4", "both"), ("gemma3", "triton")])
def test_models_with_the_kernel(model: str, kind: str, gemma: Any, monkeypatch: Any) -> None:
    """The kernel itself: a prefill behind a prefix, and a decode."""
    from numinous_attention.kernels.qk_norm_rope_store import qk_norm_rope_store

    served = []
    for hooked in (False, True):
        if hooked:
            hook(monkeypatch)
            monkeypatch.setattr(gemma_glue, "qk_norm_rope_store", qk_norm_rope_store)
        served.append(each := Served(gemma, model, kind))
        monkeypatch.setattr(gemma.flash, "flash_attn_with_kvcache", each.kernels.flash)
        for mode, new in (("EXTEND", {1: 9}), ("MIXED", {1: 1, 2: 2}), ("DECODE", {1: 1, 2: 1})):
            each.step(mode, new)
    assert_alike(*served)


def pair(engine: Any, monkeypatch: Any, *given: Any, change: Callable[[Served], None] | None = None, **named: Any) -> tuple[Served, Served]:  # fmt: skip
    """Two equal servers behind the schedule, the second one with the hooks."""
    served = []
    for hooked in (False, True):
        if hooked:
            hook(monkeypatch)
        served.append(each := Served(engine, *given, **named))
        if change is not None:
            change(each)
        schedule(each, monkeypatch)
    return served[0], served[1]


def scales(served: Served) -> None:
    """A checkpoint's, of the layers that have keys; numbers of bf16, to which torch rounds stock's divisor on a GPU (not on a CPU)."""
    for number, module in enumerate(served.model.layers):
        if number != 3:
            for name, value in (("k", (number + 1) / 64), ("v", 3 / 64)):
                setattr(module.attn, f"{name}_scale", torch.tensor(value, device=served.device))
                setattr(module.attn, f"{name}_scale_float", value)


@pytest.mark.parametrize("scaled", [False, True])
def test_fp8(scaled: bool, gemma: Any, monkeypatch: Any) -> None:
    """Pools of E4M3, with scales of a checkpoint and without; a scale that the host does not know leaves the layer to stock."""

    before = counted()
    change = scales if scaled else None
    stock, made = pair(gemma, monkeypatch, "gemma4", "triton", cache=FP8, change=change)
    assert_alike(stock, made)
    assert stock.buffers()[0].dtype == torch.uint8
    assert since(before)["engaged"] == 4 * BATCHES
    if scaled:
        made.model.layers[1].attn.k_scale_float = None
        before = counted()
        made.step("DECODE", {1: 1})
        assert since(before) == {"engaged": 3, "q alone": 1, "refused:scale": 1}


def test_replicated_heads(gemma: Any, monkeypatch: Any) -> None:
    """The second of two ranks: half of the heads, but the one head of keys of a wide layer is on both."""
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(tp_size=2, tp_rank=1):
        stock, made = pair(gemma, monkeypatch, "gemma4", "triton", ranks=2)
    wide = made.model.layers[1]
    assert (wide.total_num_kv_heads, wide.num_kv_heads, wide.num_heads) == (1, 1, QUERY_HEADS)
    assert_alike(stock, made)


def of_fp8(flash: Callable[..., torch.Tensor], seen: list[bool]) -> Callable[..., torch.Tensor]:
    """FlashAttention-3 over an FP8 cache: queries in FP8, keys and values times their scales."""

    def attend(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        k_descale: Any = None,
        v_descale: Any = None,
        **named: Any,
    ) -> torch.Tensor:
        assert q.dtype == k_cache.dtype == v_cache.dtype == FP8
        seen.append(k_descale is not None)
        scaled = (
            x.float() * (1 if scale is None else scale[0, 0])
            for x, scale in ((k_cache, k_descale), (v_cache, v_descale))
        )
        return flash(q.to(BF16), *scaled, **named)

    return attend


@pytest.mark.parametrize("model", ["gemma4", "gemma3"])
@pytest.mark.parametrize("scaled", [False, True])
def test_fp8_of_flash_attention(scaled: bool, model: str, gemma: Any, monkeypatch: Any) -> None:
    """The other backend reads no new keys beside its cache, and is given the scales."""
    seen: list[bool] = []

    def change(served: Served) -> None:
        served.kernels.flash = of_fp8(served.kernels.flash, seen)  # type: ignore[method-assign]
        if scaled:
            scales(served)
            if model == "gemma4":  # the engine loads none for a layer without keys, and asks for it
                last, owner = served.model.layers[3].attn, served.model.layers[2].attn
                _set(last, k_scale=owner.k_scale, v_scale=owner.v_scale)

    before = counted()
    stock, made = pair(gemma, monkeypatch, model, "fa3", page=4, cache=FP8, change=change)
    assert_alike(stock, made)
    assert set(seen) == {scaled}
    assert since(before)["engaged"] == len(made.model.layers) * BATCHES
    assert set(since(before)) <= {"engaged", "q alone"}


class Lora(torch.nn.Module):
    """Around a projection, as the engine puts an adapter."""

    def __init__(self, base: torch.nn.Module, seed: int) -> None:
        super().__init__()
        self.base, random = base, torch.Generator().manual_seed(seed)
        wide, narrow = base.weight.shape
        self.a = torch.randn(narrow, 4, generator=random).to(BF16)
        self.b = torch.randn(4, wide, generator=random).to(BF16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        made: torch.Tensor = self.base(x)[0] + x @ self.a @ self.b
        return made, None


def test_adapters_of_the_projection(gemma: Any, monkeypatch: Any) -> None:
    def adapt(served: Served) -> None:
        for number, module in enumerate(served.model.layers):
            module.qkv_proj = Lora(module.qkv_proj, number)
            module.o_proj = Lora(module.o_proj, number)

    before = counted()
    stock, made = pair(gemma, monkeypatch, "gemma4", "triton", change=adapt)
    assert_alike(stock, made)
    plain = Served(gemma, "gemma4", "triton")
    schedule(plain, monkeypatch)
    assert float((plain.outputs[0] - made.outputs[0]).float().norm()) > 1, "adapters change it"
    assert set(since(before)) == {"engaged", "q alone"}


class Padded(torch.nn.Module):
    """A projection into a wider buffer, as kernels of quantised weights have it; in the columns behind, what must stay."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base
        self.buffers_made: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        made = self.base(x)[0]
        wide = torch.nn.functional.pad(made, (0, 24), value=7.0)
        self.buffers_made.append(wide[:, made.shape[1] :])
        return wide[:, : made.shape[1]], None


@pytest.mark.parametrize("model", ["gemma4", "gemma3"])
def test_padded_projections(model: str, gemma: Any, monkeypatch: Any) -> None:
    def widen(served: Served) -> None:
        for module in served.model.layers:
            module.qkv_proj = Padded(module.qkv_proj)

    stock, made = pair(gemma, monkeypatch, model, "triton", change=widen)
    assert_alike(stock, made)
    behind = [x for module in made.model.layers for x in module.qkv_proj.buffers_made]
    assert behind
    assert all(bool((x == 7).all()) for x in behind)


def test_assistant_of_gemma4(gemma: Any, monkeypatch: Any) -> None:
    """Drafts of the model's own assistant: layers with projections of keys that are bound to another model's cache read it and write nothing."""
    from sglang.srt.models.gemma4_mtp import Gemma4AssistantForCausalLM
    from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPContext

    stock, made = Served(gemma, "gemma4", "triton"), Served(gemma, "gemma4", "triton")
    for served in (stock, made):
        if served is made:
            hook(monkeypatch)
        served.step("EXTEND", {1: 12, 2: 5})
        context = FrozenKVMTPContext(served.runner.token_to_kv_pool, {0: 2, 1: 1, 2: 0, 3: 2})
        assistant = SimpleNamespace(model=SimpleNamespace(layers=[SimpleNamespace(self_attn=x) for x in served.model.layers]))  # fmt: skip
        Gemma4AssistantForCausalLM.bind_frozen_kv_context(assistant, context)
        pools, before = [x.clone() for x in served.buffers()], counted()
        for _ in range(2):
            served.step("DECODE", {1: 1, 2: 1})
        assert all(torch.equal(x, y) for x, y in zip(served.buffers(), pools, strict=True))
    assert_alike(stock, made)
    assert since(before) == {"engaged": 8, "q alone": 8}


@pytest.mark.parametrize("model", ["gemma4", "gemma3"])
def test_captured_verification(model: str, gemma: Any, monkeypatch: Any) -> None:
    """A graph of a verification: one request is padding, and the second replay has other slots in the buffers that the first one had."""
    draft = 3

    def verify(served: Served) -> None:
        backend, spec = served.backend, SimpleNamespace(custom_mask=None, draft_token_num=draft)
        served.step("EXTEND", {1: 12, 2: 5})
        backend.num_draft_tokens = draft
        backend.init_cuda_graph_state(3, 3 * draft)

        def of(requests: list[int], lengths: list[int], slots: list[int]) -> Any:
            return SimpleNamespace(
                forward_mode=gemma.Mode.TARGET_VERIFY, batch_size=3, req_pool_indices=torch.tensor(requests), seq_lens=torch.tensor(lengths),
                seq_lens_cpu=torch.tensor(lengths), seq_lens_sum=sum(lengths), out_cache_loc=torch.tensor(slots), extend_seq_lens_cpu=None,
                positions=torch.tensor([n + i for n in lengths for i in range(draft)]), spec_info=spec, encoder_lens=None, mha_one_shot=False,
                _attn_output=None, mha_return_lse=False,
            )  # fmt: skip

        backend.init_forward_metadata_out_graph(of([0] * 3, [1] * 3, [0] * 9), in_capture=True)
        captured = backend.forward_metadata
        for requests in ([1, 2], [2, 1]):
            lengths = [served.lengths[r] for r in requests]
            slots = served.batch("EXTEND", dict.fromkeys(requests, draft)).out_cache_loc.tolist()
            batch = of([*requests, 0], [*lengths, 1], [*slots, 0, 0, 0])
            backend.init_forward_metadata_out_graph(batch)
            backend.forward_metadata = captured
            served.outputs += [x[: 2 * draft] for x in served.run(batch, served.hidden(3 * draft))]

    stock, made = Served(gemma, model, "triton"), Served(gemma, model, "triton")
    verify(stock)
    hook(monkeypatch)
    before = counted()
    verify(made)
    assert_alike(stock, made)
    gained = since(before)
    assert gained.pop("engaged") == 3 * len(made.model.layers)
    assert set(gained) == ({"q alone"} if model == "gemma4" else set())


@pytest.mark.parametrize("model", ["gemma4", "gemma3"])
def test_verification(model: str, gemma: Any, monkeypatch: Any) -> None:
    """Drafts: keys are read beside the cache, so they are left in place."""

    def verify(served: Served) -> None:
        served.step("EXTEND", {1: 12, 2: 5})
        prefixes = torch.tensor(served.lengths)[[1, 2]]
        batch = served.batch("EXTEND", {1: 3, 2: 3})
        masks = [torch.ones(3 * (n + 3), dtype=torch.bool) for n in prefixes.tolist()]
        for name, value in {
            "forward_mode": gemma.Mode.TARGET_VERIFY, "seq_lens": prefixes, "seq_lens_cpu": prefixes, "extend_seq_lens_cpu": None,
            "spec_info": SimpleNamespace(custom_mask=torch.cat(masks), draft_token_num=3),
        }.items():  # fmt: skip
            setattr(batch, name, value)
        served.backend.num_draft_tokens = 3
        served.backend.init_forward_metadata(batch)
        served.outputs += served.run(batch, served.hidden(6))

    stock, made = Served(gemma, model, "triton"), Served(gemma, model, "triton")
    verify(stock)
    hook(monkeypatch)
    before = counted()
    verify(made)
    assert_alike(stock, made)
    assert since(before)["engaged"] == 2 * len(made.model.layers)


@pytest.mark.parametrize("model", ["gemma4", "gemma3"])
def test_spans_of_images(model: str, gemma: Any, monkeypatch: Any) -> None:
    """A mask that the model sets behind the metadata is the backend's affair: it gets it, with the same keys."""
    seen: list[Any] = []
    stock, made = Served(gemma, model, "triton"), Served(gemma, model, "triton")
    for served in (stock, made):
        if served is made:
            hook(monkeypatch)
        attend = served.backend.extend_attention_fwd
        served.backend.extend_attention_fwd = lambda *given, _attend=attend, **named: (seen.append(given[9]), _attend(*given, **named))  # fmt: skip
        batch = served.batch("EXTEND", {1: 6})
        served.backend.init_forward_metadata(batch)
        served.backend.forward_metadata.custom_mask = mask = torch.ones(36, dtype=torch.uint8)
        served.backend.forward_metadata.mask_indptr = torch.tensor([0, 36])
        served.outputs += served.run(batch, served.hidden(6))
        assert all(each is mask for each in seen)
        assert len(seen) == len(served.model.layers)
        seen.clear()
    assert_alike(stock, made)


@pytest.mark.parametrize("model", ["gemma4", "gemma3"])
def test_no_tokens(model: str, gemma: Any, monkeypatch: Any) -> None:
    """A batch without a token, and one that is idle, which is stock's."""
    hook(monkeypatch)
    served = Served(gemma, model, "triton")
    served.step("DECODE", {1: 1})
    pools = [x.clone() for x in served.buffers()]
    batch = served.batch("DECODE", {1: 1})
    served.backend.init_forward_metadata(batch)
    batch.out_cache_loc, batch.positions = batch.out_cache_loc[:0], batch.positions[:0]
    before = counted()
    assert all(x.shape == (0, WIDTH) for x in served.run(batch, served.hidden(0)))
    assert since(before)["engaged"] == len(served.model.layers)
    before, batch.forward_mode = counted(), gemma.Mode.IDLE
    batch.out_cache_loc = batch.positions = torch.ones(
        1, dtype=torch.int64
    )  # stock cannot rotate none
    served.run(batch, served.hidden(1))
    assert since(before) == {"refused:idle": len(served.model.layers)}
    assert all(torch.equal(x, y) for x, y in zip(served.buffers(), pools, strict=True))


# --- Graphs of prefills ---------------------------------------------------------------------------------------------


def in_graph(engine: Any, served: Served, new: dict[int, int], more: int, monkeypatch: Any) -> None:
    """A prefill as the engine replays it: `more` rows behind the tokens, whose slots are another batch's, and attention cut out of the graph."""
    from sglang.srt.layers import radix_attention
    from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
        set_tc_piecewise_forward_context,
    )

    def cut_out(q: Any, k: Any, v: Any, out: Any, save: bool, layer: int, **named: Any) -> None:
        radix_attention._unified_attention_with_output_impl(q, k, v, out, save, layer, False, False)

    if served.device == "cpu":  # where the operator is not registered
        monkeypatch.setattr(radix_attention, "unified_attention_with_output", cut_out)
    batch = served.batch("EXTEND", new)
    served.backend.init_forward_metadata(batch)
    live, tokens = served.runner.req_to_token_pool.req_to_token[1, :more].long(), sum(new.values())
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, live])
    batch.positions = torch.cat([batch.positions, batch.positions.new_zeros(more)])
    batch.global_num_token_non_padded_cpu = tokens
    hidden = [torch.cat([x, x.new_full((more, WIDTH), 9.0)]) for x in served.hidden(tokens)]  # fmt: skip
    layers = [each.attn for each in served.model.layers]
    with set_tc_piecewise_forward_context(
        batch, layers, None, [], [], num_tokens=tokens + more, raw_num_tokens=tokens
    ):
        served.outputs += [x[:tokens] for x in served.run(batch, hidden)]


def _graphs_of_prefills(engine: Any, model: str, kind: str, monkeypatch: Any, **how: Any) -> None:
    served = []
    for hooked in (False, True):
        if hooked:
            hook(monkeypatch)
        served.append(each := Served(engine, model, kind, **how))
        if each.device == "cpu":
            monkeypatch.setattr(engine.flash, "flash_attn_with_kvcache", each.kernels.flash)
        each.step("EXTEND", {1: 8})
        before = counted()
        if hooked:
            in_graph(engine, each, {2: 5}, 3, monkeypatch)
        else:  # stock, without a graph
            each.step("EXTEND", {2: 5})
    assert_alike(*served)
    layers = len(served[1].model.layers)
    alone = {"q alone": 1} if model == "gemma4" else {}
    assert since(before) == {"engaged": layers, "written by the backend": 3, **alone}


@pytest.mark.parametrize(("model", "kind"), [("gemma4", "triton"), ("gemma4", "both"), ("gemma3", "fa3")])  # fmt: skip
def test_graphs_of_prefills(model: str, kind: str, gemma: Any, monkeypatch: Any) -> None:
    """The write is the backend's, of the tokens that are real: padding with live slots overwrites nothing."""
    _graphs_of_prefills(gemma, model, kind, monkeypatch)


# --- Why stock's own fusion is off ----------------------------------------------------------------------------------


def test_slots_of_the_full_pool_are_not_ours(gemma: Any, monkeypatch: Any) -> None:
    """What the engine hands to its own fusion names slots of the full pool for a window too; written there, keys of other tokens are lost. Ours go where stock's write goes."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.models.utils import create_fused_set_kv_buffer_arg

    stock, made = Served(gemma, "gemma4", "triton"), Served(gemma, "gemma4", "triton")
    for served in (stock, made):
        if served is made:
            hook(monkeypatch)
        served.step("EXTEND", {1: 20, 2: 5})
        served.step("EXTEND", {1: 3, 3: 9})
    assert_alike(stock, made)
    batch = made.batch("EXTEND", {2: 8})
    made.backend.init_forward_metadata(batch)
    window = made.model.layers[0]
    with forward_context(ForwardContext(attn_backend=made.backend)):
        fused = create_fused_set_kv_buffer_arg(torch.zeros(8, 1), window.attn, batch)
        write = gemma_glue.write_of(window, batch.positions, batch)
    assert isinstance(write, gemma_glue.Write)
    assert fused.k_buffer.data_ptr() == write.k_pool.data_ptr(), "the window's pool"
    assert torch.equal(fused.cache_loc, batch.out_cache_loc)
    mapping = made.runner.token_to_kv_pool.full_to_swa_index_mapping
    assert torch.equal(write.slots, mapping[batch.out_cache_loc])
    table_of = made.runner.req_to_token_pool.req_to_token
    alive = {int(mapping[slot]) for request in (1, 3) for slot in table_of[request, : made.lengths[request]]}  # fmt: skip
    assert alive & set(fused.cache_loc.tolist()), "rows of other tokens"
    assert not alive & set(write.slots.tolist())


# --- What is stock's ------------------------------------------------------------------------------------------------


def _set(target: Any, **changes: Any) -> None:
    for name, value in changes.items():
        setattr(target, name, value)


def _half(served: Served, layer: Any, batch: Any) -> None:
    layer.q_norm.weight.data = layer.q_norm.weight.data.float()


LEFT: dict[str, tuple[str, str, Callable[[Served, Any, Any], Any]]] = {
    "an image encoder's attention": ("gemma3", "attention_type", lambda served, layer, batch: _set(layer.attn, attn_type=served.engine.Type.DECODER_BIDIRECTIONAL)),
    "cross attention": ("gemma4", "attention_type", lambda served, layer, batch: _set(layer.attn, is_cross_attention=True)),
    "eps of two kinds": ("gemma3", "norms", lambda served, layer, batch: _set(layer.k_norm, eps=1e-5)),
    "1 + weight": ("gemma4", "norms", lambda served, layer, batch: _set(layer.q_norm, scale_shift=1.0)),
    "weights of v": ("gemma4", "norms", lambda served, layer, batch: _set(layer.v_norm, with_scale=True)),
    "another rotation": ("gemma4", "rotation", lambda served, layer, batch: _set(layer.rotary_emb, is_neox_style=False)),
    "a table in bf16": ("gemma4", "rotation", lambda served, layer, batch: _set(layer.rotary_emb, cos_sin_cache=layer.rotary_emb.cos_sin_cache.to(BF16))),
    "a rotation of a part": ("gemma4", "rotation", lambda served, layer, batch: _set(layer.rotary_emb, rotary_dim=64)),
    "a rotation by the other kernel": ("gemma4", "rotation", lambda served, layer, batch: _set(layer.rotary_emb, use_fallback_kernel=True)),
    "a shared cache of nobody": ("gemma4", "kv_sharing", lambda served, layer, batch: _set(layer, is_kv_shared_layer=True)),
    "weights in fp32": ("gemma4", "dtype", _half),
    "positions of other tokens": ("gemma4", "positions", lambda served, layer, batch: _set(batch, positions=batch.positions[None])),
    "another backend": ("gemma4", "backend", lambda served, layer, batch: _set(served, backend=SimpleNamespace())),
    "another pool": ("gemma4", "pool", lambda served, layer, batch: _set(served.runner.token_to_kv_pool.full_kv_pool, kv_cache_layout="hnd")),
    "another cache": ("gemma4", "cache_dtype", lambda served, layer, batch: _set(served.runner.token_to_kv_pool.swa_kv_pool, dtype=torch.float8_e5m2)),
    "another shape": ("gemma3", "shape", lambda served, layer, batch: _set(layer, num_kv_heads=1)),
    "a backend without slots of windows": ("gemma4", "slots", lambda served, layer, batch: _set(served.backend.forward_metadata, swa_out_cache_loc=None)),
    "fewer slots than tokens": ("gemma3", "slots", lambda served, layer, batch: _set(batch, out_cache_loc=batch.out_cache_loc[1:])),
}  # fmt: skip


@pytest.mark.parametrize("what", LEFT)
def test_what_is_left_to_stock(what: str, gemma: Any, monkeypatch: Any) -> None:
    """The very call, counted, before anything was computed."""
    model, reason, change = LEFT[what]
    calls: list[Any] = []
    for module in (
        sys.modules[f"sglang.srt.models.{name}_causal"] for name in ("gemma3", "gemma4")
    ):
        cls = getattr(module, "Gemma3Attention" if module.__name__.endswith("gemma3_causal") else "Gemma4Attention")  # fmt: skip
        monkeypatch.setattr(cls, "forward", lambda *given, **named: calls.append((given, named)) or given[2])  # fmt: skip
    hook(monkeypatch)
    served = Served(gemma, model, "triton")
    batch = served.batch("EXTEND", {1: 4})
    served.backend.init_forward_metadata(batch)
    layer = served.model.layers[0]
    monkeypatch.setattr(layer.qkv_proj, "forward", None)
    change(served, layer, batch)
    served.model.layers = served.model.layers[:1]
    before, (hidden,) = counted(), served.hidden(4)
    (answer,) = served.run(batch, [hidden])
    assert since(before) == {f"refused:{reason}": 1}
    ((given, named),) = calls
    assert answer is given[2] is hidden
    assert given[0] is layer
    assert given[-1] is batch
    assert named == {}
    assert len(given) == (5 if model == "gemma3" else 4)


def test_rows_of_gemma3(gemma: Any) -> None:
    """Made once for all layers of a kind; what is not of these tokens is refused."""
    cos, sin = (torch.rand(1, 3, 8).to(BF16) for _ in range(2))
    made, at = gemma_glue.rows_of((cos, sin), 3, 8)
    assert torch.equal(made, torch.cat([cos[0, :, :4], sin[0, :, :4]], -1).float())
    assert at.tolist() == [0, 1, 2]
    assert gemma_glue.rows_of((cos, sin), 3, 8)[0] is made
    for other in (None, (cos, sin[:, :2]), (cos[0], sin[0]), (cos[..., :4], sin[..., :4])):
        assert gemma_glue.rows_of(other, 3, 8) is None


# --- Planted faults -------------------------------------------------------------------------------------------------

FAULTS = {
    "a window's keys to slots of the full pool": ('getattr(backend.forward_metadata, "swa_out_cache_loc", None)', "batch.out_cache_loc"),
    "keys of a prefill not left in place": ("write_back=later or not batch.forward_mode.is_decode()", "write_back=False"),
    "the backend writes once more": ("save_kv_cache=later)", "save_kv_cache=True)"),
    "a layer that reads another's cache writes": ("if reason is None and not shared:", "if reason is None:"),
    "the rotation of Gemma 3's unused table": ("rows = rows_of(position_embeddings, len(hidden_states), attention.head_dim)", "rows = attention.rotary_emb.cos_sin_cache, positions[0]"),
    "the weight alone in Gemma 3": ("shared=False, gemma=True)", "shared=False)"),
    "v as it is in Gemma 4": ("shared=shared, norm_v=True)", "shared=shared)"),
    "weights of q for k": ('attention.q_norm.weight.data, attention.k_norm.weight.data', 'attention.q_norm.weight.data, attention.q_norm.weight.data'),
    "keys and values in each other's pool": ("return Write(slots[:tokens], None, *pools, *scales)", "return Write(slots[:tokens], None, *pools[::-1], *scales)"),
    "one token less is written": ("return Write(slots[:tokens], None, *pools, *scales)", "return Write(torch.cat([slots[: tokens - 1], slots[:1] * 0]), None, *pools, *scales)"),
    "written in graphs of prefills": ("if in_prefill_graph(batch):", "if False:"),
    "scales left out": ("scales = (layer.k_scale_float, layer.v_scale_float)", "pass"),
}  # fmt: skip


def faulty(fault: str, path: Path) -> ModuleType:
    """Our module with a fault planted."""
    old, new = FAULTS[fault]
    text = Path(gemma_glue.__file__).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times"
    path = path / "faulty_glue.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("faulty_glue", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str, gemma: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """The comparison above fails, or the run before it."""
    model = "gemma3" if "Gemma 3" in fault else "gemma4"
    graph, scaled = "graphs" in fault, "scales" in fault
    module = faulty(fault, tmp_path)
    module.qk_norm_rope_store = by_reference  # type: ignore[attr-defined]
    served = []
    for hooked in (False, True):
        if hooked:
            hook(monkeypatch, module)
        each = Served(gemma, model, "triton", cache=FP8 if scaled else BF16)
        served.append(each)
        if scaled:
            for layer in each.model.layers:
                _set(layer.attn, k_scale=torch.tensor(0.02), k_scale_float=0.02, v_scale=torch.tensor(0.05), v_scale_float=0.05)  # fmt: skip
        try:
            each.step("EXTEND", {1: 20, 2: 5})
            if graph and hooked:
                in_graph(gemma, each, {2: 5}, 3, monkeypatch)
            else:
                each.step("EXTEND", {2: 5})
            each.step("DECODE", {1: 1, 2: 1})
        except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            assert hooked, "stock's"
            return
    with pytest.raises(AssertionError):
        assert_alike(*served)


# --- Beside the room's other features -------------------------------------------------------------------------------

EXTEND = "sglang.kernels.ops.attention.extend_attention"
ALL = (gqa_extend.FEATURE, split_verify.FEATURE, mixed_tail.FEATURE, per_layer_backend.FEATURE, FEATURE)  # fmt: skip


@pytest.mark.tier("interpret")
def test_features_together(gemma: Any, monkeypatch: Any) -> None:
    """All of the room, installed and proven by the installer, put in place a second time; kernels of this room in the interpreter, decode and FlashAttention-3 stand-ins."""
    from sglang.srt.runtime_context import get_schedule

    def build(mixed: bool) -> Served:
        with get_schedule().override(enable_mixed_chunk=mixed):
            served = Served(gemma, "gemma4", "both", stand_ins=not mixed)
        served.backend.decode_attention_fwd = served.kernels.decode
        monkeypatch.setattr(gemma.flash, "flash_attn_with_kvcache", served.kernels.flash)
        for mode, new in (("EXTEND", {1: 17}), ("MIXED", {3: 2, 1: 1}), ("DECODE", {1: 1, 3: 1})):  # fmt: skip
            served.step(mode, new)
        return served

    stock = build(mixed=False)
    for _ in range(2):
        # The interpreter's kernels have no code to prove; what is not loaded needs no proof.
        monkeypatch.delitem(sys.modules, EXTEND, raising=False)
        installation = install(ALL, "scheduler", installed_engine())
        try:
            names = [feature.id for feature in ALL]
            before = {name: dict(table().totals().get(name, {})) for name in names}
            made = build(mixed=True)
        finally:
            installation.undo()
        assert_alike(stock, made)
        gained = {
            name: {k: n - before[name].get(k, 0) for k, n in table().totals().get(name, {}).items() if n != before[name].get(k, 0)}
            for name in names
        }  # fmt: skip
        assert gained[GEMMA_GLUE] == {"engaged": 4 * 3, "q alone": 3}
        assert gained[mixed_tail.FEATURE.id] == {"engaged": 4}
        assert gained[per_layer_backend.FEATURE.id] == {"engaged": 3, "flash layers": 9, "triton layers": 3}  # fmt: skip
        assert gained[gqa_extend.FEATURE.id] == {"engaged": 1}
        assert gained[split_verify.FEATURE.id] == {"engaged": 1, "refused:long_chunk": 1}


# --- Boot -----------------------------------------------------------------------------------------------------------


def boot_of(engine: Any, model: str = "gemma4") -> tuple[Any, Any]:
    """What the engine's function made, and its runner."""
    served = Served(engine, model, "triton")
    return SimpleNamespace(attn_backend=served.backend), served.runner


BOOT: dict[str, Callable[[Any, Any], Any]] = {
    "backend is TboAttnBackend": lambda result, runner: _set(result, attn_backend=type("TboAttnBackend", (), {})()),
    "unified memory": lambda result, runner: _set(result.attn_backend, kv_index_translator=SimpleNamespace(is_translating=True)),
    "runs in torch.float16": lambda result, runner: _set(runner, dtype=torch.float16),
    r"cache is not covered \(pool\)": lambda result, runner: _set(runner.token_to_kv_pool, swa_kv_pool=SimpleNamespace()),
    r"cache is not covered \(cache_dtype\)": lambda result, runner: _set(runner.token_to_kv_pool.full_kv_pool, dtype=torch.float8_e5m2),
    "Linear has no such attention": lambda result, runner: _set(runner, model=torch.nn.Linear(1, 1)),
    r"every layer would be left to stock \(rotation\)": lambda result, runner: [_set(x.rotary_emb, rotary_dim=2) for x in runner.model],
    "device of type xpu": lambda result, runner: _set(runner, device="xpu"),
}  # fmt: skip


@pytest.mark.parametrize("says", BOOT)
def test_runners_that_are_refused(says: str, gemma: Any) -> None:
    result, runner = boot_of(gemma)
    assert gemma_glue.after_build(result, model_runner=runner) is None
    BOOT[says](result, runner)
    with pytest.raises(SystemExit, match=says) as stop:
        gemma_glue.after_build(result, model_runner=runner)
    assert "\n" not in str(stop.value)
    assert str(stop.value).endswith("unset NUMINOUS_ATTENTION_GEMMA_GLUE")
    runner.is_draft_worker = True
    assert gemma_glue.after_build(result, model_runner=runner) is None


def test_amd_is_refused(gemma: Any, monkeypatch: Any) -> None:
    result, runner = boot_of(gemma)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(SystemExit, match="AMD GPUs are not covered"):
        gemma_glue.after_build(result, model_runner=runner)


def test_runners_that_are_served(gemma: Any) -> None:
    """One pool for all layers; and a layer that is stock's among others."""
    result, runner = boot_of(gemma, "gemma3")
    runner.model[0].k_norm.eps = 1e-5
    assert gemma_glue.after_build(result, model_runner=runner) is None


# --- Launch ---------------------------------------------------------------------------------------------------------

PLAIN = {
    "attention_backend": None, "prefill_attention_backend": None, "decode_attention_backend": None, "kv_cache_dtype": "auto", "dtype": "auto",
    "dcp_size": 1, "attn_cp_size": 1, "pp_size": 1, "disaggregation_mode": "null", "dllm_algorithm": None, "cuda_graph_config": None,
    "cuda_graph_backend_prefill": None, "cuda_graph_backend_decode": None, **dict.fromkeys(UNCOVERED, False),
}  # fmt: skip


def lines(model: dict[str, Any] | None = None, **given: Any) -> list[str]:
    return list(judge(ServeCommand({"attention_backend": "triton", **given}, PLAIN, model_config=model)))  # fmt: skip


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, None),
        ({"attention_backend": "fa3", "kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16", "cuda_graph_backend_prefill": "breakable"}, None),
        ({"cuda_graph_config": {"prefill": {"backend": "full"}, "decode": {"backend": "full"}}}, None),
        ({"attention_backend": None, "prefill_attention_backend": "fa3", "decode_attention_backend": "fa3"}, None),
        ({"attention_backend": None}, "add --attention-backend triton or fa3"),
        ({"attention_backend": "flashinfer"}, "--attention-backend flashinfer"),
        ({"decode_attention_backend": "fa3"}, "triton of prefill and fa3 of decode"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2"),
        ({"dtype": "float16"}, "--dtype float16"),
        ({"dcp_size": 2}, "--dcp-size > 1"),
        ({"attn_cp_size": 2}, "--attn-cp-size > 1"),
        ({"pp_size": 2}, "--pp-size > 1"),
        ({"disaggregation_mode": "decode"}, "disaggregation"),
        ({"dllm_algorithm": "LowConfidence"}, "--dllm-algorithm"),
        ({"cuda_graph_backend_prefill": "tc_piecewise"}, "kind tc_piecewise in prefill"),
        ({"cuda_graph_config": {"prefill": {"backend": "tc_piecewise"}}}, "kind tc_piecewise in prefill"),
        ({"cuda_graph_backend_decode": "breakable"}, "kind breakable in decode"),
        *(({name: True}, "--" + name.replace("_", "-")) for name in UNCOVERED),
    ],
)  # fmt: skip
def test_launches(given: dict[str, Any], says: str | None) -> None:
    found = lines(**given)
    assert len(found) == (says is not None), found
    assert says is None or says in found[0]
    assert not any("\n" in line for line in found)


def test_launched_models() -> None:
    for name in TRITON_BY_DEFAULT:
        assert lines({"architectures": [name]}, attention_backend=None) == []
    for name in MODELS:
        assert lines({"architectures": [name]}) == []
    for name in ("Gemma3nForConditionalGeneration", "Gemma2ForCausalLM", "LlamaForCausalLM"):
        (line,) = lines({"architectures": [name]})
        assert f"this is a {name}" in line


def test_engine_that_is_installed() -> None:
    """Every pin fits, and the engine has the arguments that the judge reads."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("reads the installed engine, there is none")
    tree = find_engine()
    assert fits(FEATURE, tree) == []
    fields = b"".join(tree.read(path) for path in tree.files(FIELDS) if path.endswith(".py"))
    assert [name for name in PLAIN if f"    {name}: A[".encode() not in fields] == []


def test_engine_that_has_changed(tmp_path: Path) -> None:
    """One word in either model's forward, and the feature does not fit."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("reads the installed engine, there is none")
    tree = find_engine()
    for hooked in FEATURE.patches[:2]:
        pin = next(each for each in hooked.pins if each.target == hooked.target)
        changed = {label: digest[:-1] + "x" for label, digest in pin.accepts.items()}
        other = dataclasses.replace(hooked, pins=(dataclasses.replace(pin, accepts=changed),))
        assert fits(dataclasses.replace(FEATURE, patches=(other,)), tree) != []
