# SPDX-License-Identifier: Apache-2.0
"""The engine's own backends, pools and layers on the CPU, served batch by batch; imported as ``attention_serving``, `engine` and `hopper` are fixtures.

Kernels are stand-ins: FlashAttention-3's refuses what the kernel refuses and reads no more than its page table names, Triton's read no
more than the indices. Answers are compared with attention in fp64 over all keys that a request ever had.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from numinous_attention.hooks.per_layer_backend import GEMMA4

ROUNDING = 0.02
"""Of an answer to bf16; the values are about 1."""

WINDOW = 7  # of a query: so many keys before its own
CONTEXT, SLOTS, REQUESTS = 64, 256, 4
FULL_DIM, WINDOW_DIM = 512, 256
QUERY_HEADS, FULL_HEADS, WINDOW_HEADS = 4, 1, 2
POISON = 1e4


# --- Stand-ins for kernels ------------------------------------------------------------------------------------------


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, seen: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """Attention in fp64 of queries [rows, heads, D] over keys [keys, KV heads, D] where `seen` [rows, keys] is true."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    weights = scores.masked_fill(~seen.to(q.device), -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def causal(rows: int, keys: int, window: int) -> torch.Tensor:
    """Which of `keys` the last `rows` positions see."""
    distance = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
    return (distance >= 0) & (distance <= window if window >= 0 else distance >= 0)


class Kernels:
    """The stand-ins; `calls` lists (kernel, width of a head) in order, `requests` how many each had and the most rows of one."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.requests: list[tuple[int, int]] = []

    def _called(self, kernel: str, dim: int, requests: int, rows: int) -> None:
        self.calls.append((kernel, dim))
        self.requests.append((requests, rows))

    def flash(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, page_table: torch.Tensor, cache_seqlens: torch.Tensor, cu_seqlens_q: torch.Tensor, max_seqlen_q: int, softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float, num_splits: int, ver: int, out: Any = None, cu_seqlens_k_new: Any = None, return_softmax_lse: bool = False, scheduler_metadata: Any = None) -> torch.Tensor:  # fmt: skip
        """`flash_attn_with_kvcache`, version 3."""
        assert q.shape[-1] == k_cache.shape[-1] <= 256, "FlashAttention-3 has no such heads"
        assert page_table.dtype == cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32
        assert (causal, softcap, ver, return_softmax_lse) == (True, 0.0, 3, False)
        assert scheduler_metadata is None, "made for other heads"
        assert window_size[1] in (0, -1)
        assert len(page_table) == len(cache_seqlens) == len(cu_seqlens_q) - 1
        self._called("flash", q.shape[-1], len(page_table), max_seqlen_q)
        result, page = torch.empty_like(q) if out is None else out, k_cache.shape[1]
        for request, (start, end) in enumerate(itertools.pairwise(cu_seqlens_q)):
            keys, rows = int(cache_seqlens[request]), int(end - start)
            assert rows <= max_seqlen_q
            first = max(0, keys - rows - window_size[0]) if window_size[0] >= 0 else 0
            at = torch.arange(first, keys)
            slots = page_table[request, at // page].long() * page + at % page
            k, v = (x.flatten(0, 1)[slots] for x in (k_cache, v_cache))
            seen = globals()["causal"](rows, keys, window_size[0])[:, first:]
            result[start:end] = attend(q[start:end], k, v, softmax_scale, seen)
        return result

    def extend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, qo: torch.Tensor, kv: torch.Tensor, ids: torch.Tensor, mask: Any, is_causal: bool, mask_indptr: Any, longest: int, k_scale: float, v_scale: float, scale: float, *, sliding_window_size: int, **named: Any) -> None:  # fmt: skip
        """`extend_attention_fwd`."""
        self._called("extend", q.shape[-1], len(qo) - 1, longest)
        for request, (start, end) in enumerate(itertools.pairwise(qo)):
            before = ids[kv[request] : kv[request + 1]]
            both = [
                torch.cat([x[before].to(y.dtype), y[start:end]])
                for x, y in ((keys, k), (values, v))
            ]
            seen = causal(int(end - start), len(both[0]), sliding_window_size)
            o[start:end] = attend(q[start:end], *both, scale, seen)

    def decode(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, o: torch.Tensor, kv: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor, lse: Any, splits: Any, most: int, scale: float, *scales: float, **named: Any) -> None:  # fmt: skip
        """`decode_attention_fwd`."""
        assert logits.shape[-1] == values.shape[-1], "a buffer for other heads"
        self._called("decode", q.shape[-1], len(q), 1)
        for request in range(len(q)):
            own = ids[kv[request] : kv[request + 1]]
            seen = torch.ones(1, len(own), dtype=torch.bool)
            o[request] = attend(q[request, None], keys[own], values[own], scale, seen)[0]


class FillIndices:
    """`create_flashinfer_kv_indices_triton`."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.run

    def run(self, table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, indptr: torch.Tensor, starts: Any, out: torch.Tensor, stride: int, **named: Any) -> None:  # fmt: skip
        for request, length in enumerate(lengths.tolist()):
            start = 0 if starts is None else int(starts[request])
            out[indptr[request] :][:length] = table[rows[request], start : start + length].long()


def decode_pages(lengths: torch.Tensor, cumulative: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, rows: torch.Tensor, most: int, seq_lens: torch.Tensor, delta: int, page: int, swa_pages: Any, pool: Any, skip_page_table: bool) -> None:  # fmt: skip
    """`normal_decode_set_metadata`: the live part of each row, the rest keeps what it had."""
    assert not skip_page_table
    lengths.copy_(seq_lens + delta)
    cumulative[1:].copy_(torch.cumsum(lengths, 0))
    for request, length in enumerate(lengths.tolist()):
        own = table[rows[request], torch.arange(0, length, page)].long()
        pages[request, : len(own)] = own // page
        if swa_pages is not None:
            swa_pages[request, : len(own)] = pool.full_to_swa_index_mapping[own] // page


# --- Engine ---------------------------------------------------------------------------------------------------------


def stub() -> dict[str, types.ModuleType]:
    """`sgl_kernel`, as far as the engine's backend imports it."""
    package, flash = types.ModuleType("sgl_kernel"), types.ModuleType("sgl_kernel.flash_attn")
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata"):
        setattr(flash, name, never)
    package.flash_attn, package.merge_state_v2 = flash, never  # type: ignore[attr-defined]
    return {"sgl_kernel": package, "sgl_kernel.flash_attn": flash}


def never(*args: Any, **named: Any) -> None:
    raise AssertionError("not for these layers")


OF_FLASH = (
    "sglang.srt.layers.attention.flashattention_backend",
    "numinous_attention.engine.two_backends",
)


def modules_of_engine() -> Any:
    """What the tests use of the engine, imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine's own, at import
        from sglang.srt.layers.attention import (
            attention_registry,
            flashattention_backend,
            triton_backend,
        )
        from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
        from sglang.srt.mem_cache import kv_index_translator, memory_pool, swa_memory_pool
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.model_executor.model_runner_components import attention_backend_setup

        from numinous_attention.engine import per_layer_backend, two_backends

    return SimpleNamespace(
        registry=attention_registry, flash=flashattention_backend, triton=triton_backend, setup=attention_backend_setup, ours=per_layer_backend,
        two=two_backends, pools=memory_pool, swa=swa_memory_pool, index=kv_index_translator, Mode=ForwardMode,
        Layer=RadixAttention, Type=AttentionType,
    )  # fmt: skip


@contextlib.contextmanager
def launched(device: str) -> Iterator[None]:
    """The engine's arguments and ranks, as a launch leaves them."""
    from sglang.srt.runtime_context import get_context, get_parallel

    override = get_context().override_server_args(
        attention_backend="triton",
        chunked_prefill_size=64,
        device=device,
        dp_size=1,
        enable_deterministic_inference=False,
        enable_lean_attention=False,
        kv_cache_dtype="auto",
        pp_size=1,
        speculative_algorithm=None,
        tp_size=1,
    )
    override.install()
    try:
        with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0, attn_tp_size=1, tp_size=1):
            yield
    finally:
        override.restore()


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """Modules of the engine, with FlashAttention-3 importable."""
    pytest.importorskip(
        "sglang", reason="engine tests need SGLang: python -m numinous_cpu_platform install"
    )
    patch, threads = pytest.MonkeyPatch(), torch.get_num_threads()
    torch.set_num_threads(1)  # its tensors are small
    for name, module in stub().items():
        patch.setitem(sys.modules, name, module)
    modules = modules_of_engine()
    patch.setattr(modules.index, "create_flashinfer_kv_indices_triton", FillIndices())
    patch.setattr(modules.flash, "normal_decode_set_metadata", decode_pages)
    patch.setattr(modules.flash, "get_device_capability", lambda *device: (9, 0))
    patch.setattr(modules.registry, "get_device_capability", lambda *device: (9, 0))
    patch.setattr(modules.triton, "get_device_core_count", lambda *device: 0)
    with launched("cpu"):
        yield modules
    torch.set_num_threads(threads)
    patch.undo()
    for name in OF_FLASH:
        sys.modules.pop(name, None)
        package, _, child = name.rpartition(".")
        # `from package import child` would find the old one there.
        vars(sys.modules[package]).pop(child, None)


def layers_of(engine: Any, full_dim: int = FULL_DIM) -> torch.nn.ModuleList:
    """A window, a full layer, a window, and one that reads the cache of the first."""
    window = (QUERY_HEADS, WINDOW_DIM, 0.35, WINDOW_HEADS)
    full = (QUERY_HEADS, full_dim, 0.05, FULL_HEADS)
    return torch.nn.ModuleList(
        [
            engine.Layer(*window, layer_id=0, sliding_window_size=WINDOW),
            engine.Layer(*full, layer_id=1, sliding_window_size=-1),
            engine.Layer(*window, layer_id=2, sliding_window_size=WINDOW),
            engine.Layer(*window, layer_id=0, sliding_window_size=WINDOW),
        ]
    )


def runner_of(
    engine: Any,
    page: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    full_dim: int = FULL_DIM,
) -> Any:
    """What is read of the engine's `ModelRunner`: a model of two kinds of layers, empty pools and a table of slots."""
    from sglang.srt.configs.model_config import AttentionArch

    common = {"page_size": page, "enable_memory_saver": False, "device": device}
    pool = engine.swa.SWAKVPool(
        size=SLOTS, size_swa=SLOTS, page_size=page, dtype=dtype, head_num=FULL_HEADS, head_dim=full_dim,
        swa_attention_layer_ids=[0, 2], full_attention_layer_ids=[1], device=device,
        full_kv_pool_kwargs={**common, "head_num": FULL_HEADS, "head_dim": full_dim},
        swa_kv_pool_kwargs={**common, "head_num": WINDOW_HEADS, "head_dim": WINDOW_DIM},
    )  # fmt: skip
    pool.register_mapping(torch.zeros(SLOTS + page + 1, dtype=torch.int64, device=device))
    requests = engine.pools.ReqToTokenPool(
        size=REQUESTS, max_context_len=CONTEXT, device=device, enable_memory_saver=False
    )
    config = SimpleNamespace(num_attention_heads=QUERY_HEADS, architectures=[GEMMA4[0]])
    config.get_text_config = lambda: config
    model = SimpleNamespace(
        context_len=CONTEXT, is_encoder_decoder=False, attention_arch=AttentionArch.MHA, is_local_attention_model=False,
        head_dim=full_dim, v_head_dim=full_dim, swa_v_head_dim=WINDOW_DIM, swa_head_dim=WINDOW_DIM, hf_text_config=config, hf_config=config,
        get_num_kv_heads=lambda *sizes: FULL_HEADS, get_max_num_attention_heads=lambda: QUERY_HEADS,
        linear_attn_registry_result=None, qk_nope_head_dim=0, qk_rope_head_dim=0, kv_lora_rank=0,
    )  # fmt: skip
    return SimpleNamespace(
        model=layers_of(engine, full_dim), model_config=model, sliding_window_size=WINDOW, req_to_token_pool=requests,
        token_to_kv_pool=pool, token_to_kv_pool_allocator=None, dtype=dtype, kv_cache_dtype=dtype, kv_cache_dtype_str="auto",
        page_size=page, ps=SimpleNamespace(attn_cp_size=1, tp_size=1), is_draft_worker=False, device=device, gpu_id=0,
        use_mla_backend=False, init_new_workspace=None,
        kv_index_translator=engine.index.KVIndexTranslator(
            req_to_token=requests.req_to_token, token_to_kv_pool_allocator=None, token_to_kv_pool=pool,
            page_size=page, device=device,
        ),
    )  # fmt: skip


class Serving:
    """Requests over a backend: slots, batches, what each layer answers, and what it should.

    Args:
        make: builds the backend of a runner.
        device: with FlashAttention-3's own kernel unless it is the CPU.
        dtype: of the model.
        stand_ins: for the Triton kernels.
        full_dim: width of a head without a window.
    """

    def __init__(
        self,
        engine: Any,
        page: int,
        make: Callable[[Any], Any],
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        stand_ins: bool = True,
        full_dim: int = FULL_DIM,
    ) -> None:
        self.engine, self.page, self.device, self.dtype = engine, page, device, dtype
        self.runner = runner_of(engine, page, device, dtype, full_dim)
        self.kernels = Kernels()
        self.plans: list[dict[str, Any]] = []  # of FlashAttention-3, where a test asks for them
        self.backend = make(self.runner)
        if stand_ins:
            self.backend.extend_attention_fwd = self.kernels.extend
            self.backend.decode_attention_fwd = self.kernels.decode
        self.random = torch.Generator().manual_seed(3)
        self.lengths = [0] * REQUESTS
        self.keys: dict[tuple[int, int], list[list[torch.Tensor]]] = {}
        # Pages of both pools in an order of their own; page 0 takes what nobody reads.
        self.free, self.free_swa = (
            (torch.randperm(SLOTS // page - 1, generator=self.random) + 1).tolist()
            for pool in ("full", "windows")
        )
        for each in (*pool_buffers(self.runner.token_to_kv_pool),):
            each.fill_(poison(each))

    def batch(self, mode: str, new: dict[int, int], padded: int | None = None) -> Any:
        """The next batch: request -> its new tokens. With `padded`, as many requests as a captured graph has."""
        rows, before, loc = list(new), [self.lengths[r] for r in new], []
        for request, count in new.items():
            start = self.lengths[request]
            loc += [self._slot(request, position) for position in range(start, start + count)]
            self.lengths[request] += count
        after, added = [self.lengths[r] for r in rows], list(new.values())
        while padded and len(rows) < padded:  # as the engine pads
            rows, after, loc = [*rows, 0], [*after, 1], [*loc, 0]
        there = functools.partial(torch.tensor, device=self.device)
        return SimpleNamespace(
            forward_mode=getattr(self.engine.Mode, mode), batch_size=len(rows), req_pool_indices=there(rows),
            seq_lens=there(after), seq_lens_cpu=torch.tensor(after), seq_lens_sum=sum(after), out_cache_loc=there(loc),
            extend_seq_lens=there(added), extend_seq_lens_cpu=added, extend_prefix_lens=there(before),
            extend_prefix_lens_cpu=before, positions=there([0] * len(loc)), spec_info=None,
            encoder_lens=None, mha_one_shot=False, attn_attend_prefix_cache=None, new=new,
            _attn_output=None,
        )  # fmt: skip

    def _slot(self, request: int, position: int) -> int:
        """A new slot in both pools; the windowed one of what slid out of every window is freed and poisoned."""
        table = self.runner.req_to_token_pool.req_to_token[request]
        pool = self.runner.token_to_kv_pool
        mapping = pool.full_to_swa_index_mapping
        if position % self.page:
            table[position] = slot = int(table[position - 1]) + 1
            mapping[slot] = mapping[slot - 1] + 1
        else:
            table[position] = slot = self.free.pop() * self.page
            mapping[slot] = self.free_swa.pop() * self.page
        return slot

    def slide(self) -> None:
        """Free and poison the windowed slots that no query of any request will see again, page by page."""
        pool = self.runner.token_to_kv_pool
        for request, length in enumerate(self.lengths):
            dead = (max(0, length - WINDOW) // self.page) * self.page
            slots = self.runner.req_to_token_pool.req_to_token[request, :dead].long()
            freed = pool.full_to_swa_index_mapping[slots]
            for each in (*pool.swa_kv_pool.k_buffer, *pool.swa_kv_pool.v_buffer):
                each[freed] = poison(each)
            pool.full_to_swa_index_mapping[slots] = 0

    def tensors(self, batch: Any) -> list[tuple[torch.Tensor, ...]]:
        """Queries, keys and values of every layer, the same for the same batch of a schedule."""
        tokens, made = len(batch.out_cache_loc), []
        for layer in self.runner.model:
            shapes = [(layer.tp_q_head_num, layer.head_dim)] + [(layer.tp_k_head_num, layer.head_dim)] * 2  # fmt: skip
            made.append(tuple(torch.randn(tokens, *s, generator=self.random).to(self.device, self.dtype) for s in shapes))  # fmt: skip
        return made

    def forward(self, batch: Any, tensors: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        """Every layer's answer, [tokens, heads * D]; the last layer has no keys of its own."""
        answers = []
        for number, (layer, (q, k, v)) in enumerate(zip(self.runner.model, tensors, strict=True)):
            shared = number == 3
            given = (None, None) if shared else (k.clone(), v.clone())
            answers.append(self.backend.forward(q, *given, layer, batch, not shared).flatten(1))
        return answers

    def expected(self, batch: Any, tensors: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        """What the layers should answer for the requests of the schedule, from all keys that they ever had."""
        answers = []
        for number, (layer, (q, k, v)) in enumerate(zip(self.runner.model, tensors, strict=True)):
            rows, at = [], 0
            for request, count in batch.new.items():
                known = self.keys.setdefault((layer.layer_id, request), [[], []])
                if number != 3:
                    known[0].append(k[at : at + count])
                    known[1].append(v[at : at + count])
                both = [torch.cat(x) for x in known]
                seen = causal(count, len(both[0]), WINDOW if layer.sliding_window_size > 0 else -1)
                rows.append(attend(q[at : at + count], *both, layer.scaling, seen).flatten(1))
                at += count
            answers.append(torch.cat(rows))
        return answers

    def step(self, mode: str, new: dict[int, int]) -> float:
        """An eager batch; how far the worst answer is off."""
        batch = self.batch(mode, new)
        tensors = self.tensors(batch)
        self.backend.init_forward_metadata(batch)
        return self._off(self.forward(batch, tensors), self.expected(batch, tensors))

    def capture(self, size: int) -> None:
        """Capture a decode of `size` requests: buffers, metadata, and what Python leaves behind."""
        self.backend.init_cuda_graph_state(size, size)
        ones = torch.ones(size, dtype=torch.int64, device=self.device)
        batch = SimpleNamespace(
            forward_mode=self.engine.Mode.DECODE, batch_size=size, req_pool_indices=0 * ones, seq_lens=ones,
            seq_lens_cpu=ones.cpu(), seq_lens_sum=size, out_cache_loc=0 * ones, positions=0 * ones, spec_info=None,
            encoder_lens=None, mha_one_shot=False, _attn_output=None,
        )  # fmt: skip
        self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        self.backend.init_forward_metadata_in_graph(batch)
        leaves = (self.backend, *(self.backend.attn_backend_list or ()))
        self.captured = [(each, each.forward_metadata) for each in leaves]
        self.size = size

    def replay(self, new: dict[int, int]) -> float:
        """A captured decode: metadata is refilled, and the kernels read what the capture bound."""
        batch = self.batch("DECODE", new, padded=self.size)
        tensors = self.tensors(batch)
        self.backend.init_forward_metadata_out_graph(batch)
        for backend, metadata in self.captured:
            backend.forward_metadata = metadata
        answers = [x[: len(new)] for x in self.forward(batch, tensors)]
        live = [tuple(x[: len(new)] for x in each) for each in tensors]
        return self._off(answers, self.expected(batch, live))

    @staticmethod
    def _off(answers: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
        assert all(float(each.norm()) > 1 for each in expected)
        return max(
            float((a.double() - e).abs().max()) for a, e in zip(answers, expected, strict=True)
        )


def poison(pool: torch.Tensor) -> float:
    """What a free slot holds; of bytes, the code of E4M3's largest."""
    return POISON if pool.is_floating_point() else 0x7E


def pool_buffers(pool: Any) -> Iterator[torch.Tensor]:
    for each in (pool.full_kv_pool, pool.swa_kv_pool):
        yield from (*each.k_buffer, *each.v_buffer)


def ours(engine: Any) -> Callable[[Any], Any]:
    """Builds the backend as the hook does."""
    return lambda runner: engine.ours.around_build(
        None, model_runner=runner, backend_str="triton", init_new_workspace=False
    )


@pytest.fixture(autouse=True)
def hopper(request: Any, monkeypatch: Any) -> None:
    """A Hopper GPU, as far as anybody looks; answers of FlashAttention-3 by the stand-in of the test."""
    if "engine" not in request.fixturenames:
        return
    engine = request.getfixturevalue("engine")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(engine.triton, "get_num_kv_splits_triton", None)


# --- Served ---------------------------------------------------------------------------------------------------------


def save_gemma(path: Path, window: int, layers: int) -> Path:
    """A random Gemma 3 in fp32 for the engine on the CPU; every second layer from the first has a window of so many tokens."""
    transformers = pytest.importorskip("transformers", reason="engine tests need transformers")
    torch.manual_seed(7)
    config = transformers.Gemma3TextConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, query_pre_attn_scalar=32, sliding_window=window, max_position_embeddings=4096,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
    )  # fmt: skip
    transformers.Gemma3ForCausalLM(config).to(torch.float32).save_pretrained(path)
    return path
