# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for FlashInfer 0.6.18, in torch, with what its sources say of NVFP4 caches; and the engine's FlashInfer backend over them, on a CPU.

They refuse what the library refuses, and are wrong where it is: keys that are split, spare blocks of a captured plan (`Decode`), block scales that
trtllm-gen reads by a descriptor (`trtllm_gen`). Backend, pool, recipe and index updaters are the engine's own.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv4_harness import Count, hooks_of

from numinous_kv_cache_4bit.engine import nvfp4_flashinfer as ours
from numinous_kv_cache_4bit.hooks.nvfp4_flashinfer import FEATURE
from numinous_kv_cache_4bit.kernels import nvfp4_write
from numinous_tooling.numerics import dequantize_nvfp4

HEADS, QUERY_HEADS, DIM, LAYERS = 2, 8, 64, 3
SCALE = DIM**-0.5
GRID = 96
"""Blocks of a captured plan: 2 x processors / KV heads, at least."""
LOG2E = 1.4426950408889634
SCALES = ((0.37, 2.6), (1.9, 0.23), (0.05, 0.6))
"""Global scales of keys and values by layer."""
PAGE, SLOTS, TOKENS = 16, 512, 400


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> Any:
    """Output [rows, query heads, D] in fp32 and log-sum-exp in base 2; k, v [n, heads, D]; the last keys are the queries' own if causal."""
    rows, n = q.shape[0], k.shape[0]
    if not n:
        return torch.zeros(q.shape), torch.full(q.shape[:2], -torch.inf)
    k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    logits = torch.einsum("rhd,nhd->rhn", q.float(), k) * scale
    if causal:
        later = torch.arange(n)[None] > torch.arange(rows)[:, None] + n - rows
        logits = logits.masked_fill(later[:, None], -torch.inf)
    return torch.einsum("rhn,nhd->rhd", logits.softmax(-1), v), logits.logsumexp(-1) * LOG2E


def merge_state(a: torch.Tensor, s_a: torch.Tensor, b: torch.Tensor, s_b: torch.Tensor) -> Any:
    weights = torch.stack([s_a, s_b]).div(LOG2E).softmax(0).unsqueeze(-1)
    return (weights[0] * a + weights[1] * b).to(a.dtype), None


class Paged:
    """What the two paged wrappers have in common; pages of one slot."""

    def __init__(
        self, workspace: Any, layout: str, *, backend: str = "auto", use_cuda_graph: bool = False, use_tensor_cores: bool = True, **buffers: Any
    ) -> None:  # fmt: skip
        assert (layout, backend) == ("NHD", "fa2")
        self.is_cuda_graph_enabled, self.use_tensor_cores = use_cuda_graph, use_tensor_cores
        # `torch.empty` there: whatever was in that memory before.
        self._pin_memory_int_workspace_buffer = torch.full((4096,), 0x3B, dtype=torch.uint8)
        self._paged_kv_indices_buf = buffers.get("paged_kv_indices_buffer")
        self._causal, self._sm_scale = False, None
        self.splits = False

    def plan(self, qo: Any, kv: torch.Tensor, ids: torch.Tensor, last: torch.Tensor, heads: tuple[int, int, int, int], dtypes: Any) -> None:  # fmt: skip
        assert heads == (QUERY_HEADS, HEADS, DIM, 1)
        assert last.tolist() == [1] * (len(kv) - 1)
        assert ids.dtype == kv.dtype == torch.int32
        self.qo, self.kv, self.ids = qo.tolist(), kv.tolist(), ids.clone()
        (self.q_dtype, self.kv_dtype) = dtypes

    def run(self, q: Any, cache: Any, *, k_scale: Any = None, v_scale: Any = None, kv_cache_sf: Any = None, return_lse: bool = False) -> Any:  # fmt: skip
        assert (q.dtype, cache[0].dtype, cache[1].dtype) == (
            self.q_dtype,
            self.kv_dtype,
            self.kv_dtype,
        ), "the dtype of the plan"
        assert q.shape == (self.qo[-1], QUERY_HEADS, DIM)
        if self.kv_dtype == torch.uint8:
            assert kv_cache_sf is not None, "kv_cache_sf must be provided for NVFP4 KV cache."
            assert [x.dtype for x in kv_cache_sf] == [torch.float8_e4m3fn] * 2
            if not self.use_tensor_cores:
                raise RuntimeError("the kernels without tensor cores know no FP4")
        out, lse = [], []
        for request in range(len(self.kv) - 1):
            own = self.ids[self.kv[request] : self.kv[request + 1]].long()
            both = [x[own] for x in cache]
            if self.kv_dtype == torch.uint8:
                both = [dequantize_nvfp4(x, s[own].view(torch.uint8)) for x, s in zip(both, kv_cache_sf, strict=True)]  # fmt: skip
            rows = q[self.qo[request] : self.qo[request + 1]]
            o, s = attention(rows, *both, self._sm_scale * (1.0 if k_scale is None else k_scale), self._causal)  # fmt: skip
            if self.splits and self.kv_dtype == torch.uint8 and len(own) > 128:
                o = o.flip(-1)  # "corrupted outputs"
            out.append(o * (1.0 if v_scale is None else v_scale))
            lse.append(s)
        joined = torch.cat(out).to(q.dtype)
        return (joined, torch.cat(lse)) if return_lse else joined


class Prefill(Paged):
    """`BatchPrefillWithPagedKVCacheWrapper`: switches splits off for NVFP4 by itself."""

    def begin_forward(
        self, qo: Any, kv: Any, ids: Any, last: Any, *heads: int, q_data_type: Any, kv_data_type: Any, non_blocking: bool, custom_mask: Any = None,
        fixed_split_size: Any = None, prefix_len_ptr: Any = None, token_pos_in_items_ptr: Any = None, token_pos_in_items_len: int = 0, max_item_len_ptr: Any = None,
    ) -> None:  # fmt: skip
        assert custom_mask is None
        self.plan(qo, kv, ids, last, heads, (q_data_type, kv_data_type))

    def forward(self, q: Any, cache: Any, causal: bool = False, sm_scale: Any = None, k_scale: Any = None, v_scale: Any = None, window_left: int = -1, logits_soft_cap: Any = None, lse: bool = False) -> Any:  # fmt: skip
        assert (window_left, logits_soft_cap or None) == (-1, None)
        self._causal, self._sm_scale = causal, sm_scale
        return self.run(q, cache, k_scale=k_scale, v_scale=v_scale, return_lse=lse)

    def forward_return_lse(self, *of: Any, **named: Any) -> Any:
        return self.forward(*of, **named, lse=True)


class Decode(Paged):
    """`BatchDecodeWithPagedKVCacheWrapper`."""

    def begin_forward(
        self, kv: Any, ids: Any, last: Any, *heads: int, data_type: Any, q_data_type: Any, non_blocking: bool, disable_split_kv: bool = False, fixed_split_size: Any = None
    ) -> None:  # fmt: skip
        self.splits = not disable_split_kv
        self.plan(torch.arange(len(kv)), kv, ids, last, heads, (q_data_type, data_type))
        self.requests = self._pin_memory_int_workspace_buffer.view(torch.int32)[:GRID]
        self.requests[: len(kv) - 1] = torch.arange(len(kv) - 1, dtype=torch.int32)

    def run(self, q: Any, cache: Any, **named: Any) -> Any:
        if self.is_cuda_graph_enabled and not self.splits:  # no mask, so all blocks of the grid run
            assert bool((self.requests < len(self.kv) - 1).all()), (
                "an illegal memory access was encountered"
            )
        return super().run(q, cache, **named)

    def forward(self, q: Any, cache: Any, *, sm_scale: Any = None, k_scale: Any = None, v_scale: Any = None, logits_soft_cap: Any = None) -> Any:  # fmt: skip
        self._sm_scale = sm_scale
        return self.run(q, cache, k_scale=k_scale, v_scale=v_scale)


def fast_decode_plan(self: Decode, *of: Any, global_override_indptr_cpu: Any, **named: Any) -> None:
    """`Decode.begin_forward` without copies."""
    assert self.is_cuda_graph_enabled
    assert global_override_indptr_cpu.tolist() == of[0].tolist()
    Decode.begin_forward(self, *of, **named)


class Ragged:
    """`BatchPrefillWithRaggedKVCacheWrapper`, over the chunk as it was computed."""

    def __init__(self, workspace: Any, layout: str, *, backend: str) -> None:
        self.splits = False

    def begin_forward(self, qo: Any, kv: Any, *heads: int, q_data_type: Any) -> None:
        assert qo.tolist() == kv.tolist()
        self.qo = qo.tolist()

    def forward_return_lse(self, q: Any, k: Any, v: Any, *, causal: bool, sm_scale: float, window_left: int = -1, logits_soft_cap: Any = None) -> Any:  # fmt: skip
        parts = [
            attention(q[a:b], k[a:b], v[a:b], sm_scale, causal)
            for a, b in zip(self.qo, self.qo[1:], strict=False)
        ]
        out, lse = (torch.cat(x) for x in zip(*parts, strict=True))
        return out.to(q.dtype), lse

    def forward(self, *of: Any, **named: Any) -> Any:
        return self.forward_return_lse(*of, **named)[0]


def kv_quantize(x: torch.Tensor, scale: torch.Tensor) -> Any:
    """`nvfp4_kv_quantize`: [rows, D] by a global scale."""
    return nvfp4_write.encode(x, scale)


def kv_dequantize(packed: Any, blocks: Any, scale: torch.Tensor, output_dtype: torch.dtype) -> Any:
    """`nvfp4_kv_dequantize`."""
    return (dequantize_nvfp4(packed, blocks) * scale).to(output_dtype)


def xqa(query: Any, kv_cache: Any, kv_cache_sf: Any, block_tables: Any, seq_lens: Any, *, bmm1_scale: float, bmm2_scale: float, **named: Any) -> Any:  # fmt: skip
    """`trtllm_batch_decode_with_kv_cache` on sm120: scales by strides of their own (`xqa_wrapper.cu` 77-83)."""
    assert named["window_left"] == -1
    assert query.dtype == torch.bfloat16
    assert all(x.dtype == torch.uint8 for x in kv_cache)
    out = []
    for q, pages, length in zip(query, block_tables.long(), seq_lens.tolist(), strict=True):
        k, v = (
            dequantize_nvfp4(
                *(
                    x[pages].transpose(1, 2).flatten(0, 1)[:length].contiguous().view(torch.uint8)
                    for x in pair
                )
            )
            for pair in zip(kv_cache, kv_cache_sf, strict=True)
        )
        out.append(attention(q[None], k, v, bmm1_scale, False)[0] * bmm2_scale)
    return torch.cat(out).to(query.dtype)


def trtllm_gen(query: Any, kv_cache: Any, kv_cache_sf: Any, **named: Any) -> Any:
    """The same function on sm100: block scales through a descriptor (`kernelParams.h` 477-521), and those of values four tokens interleaved."""
    blocks = []
    for kind, scales in zip("kv", kv_cache_sf, strict=True):
        page, width = scales.shape[2:]
        if scales.stride(1) % 16 or scales.stride(0) % 16:
            raise RuntimeError("Failed to initialize the TMA descriptor due to invalid argument")
        # The last two dimensions are taken to lie side by side, whatever their strides.
        seen = scales.as_strided(scales.shape, (*scales.stride()[:2], width, 1))
        if kind == "v":
            at = torch.arange(page * width)
            token, column = at // width, at % width
            seen = seen.flatten(2)[..., token // 4 * 4 * width + column * 4 + token % 4]
            seen = seen.unflatten(2, (page, width))
        blocks.append(seen)
    return xqa(query, kv_cache, blocks, **named)


def package() -> types.ModuleType:
    """``flashinfer``."""
    made = types.ModuleType("flashinfer")
    made.__version__ = "0.6.18"
    made.nvfp4_kv_quantize, made.nvfp4_kv_dequantize = kv_quantize, kv_dequantize
    made.decode = SimpleNamespace(trtllm_batch_decode_with_kv_cache=xqa)
    return made


class OnCpu:
    """``torch`` as the backend sees it, which asks for memory of a GPU in one place."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *of: Any, device: Any = "cpu", **named: Any) -> torch.Tensor:
        return torch.empty(*of, device="cpu" if device == "cuda" else device, **named)


class Translator:
    """`KVIndexTranslator` of a plain pool."""

    reads_are_translated = False

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def fill_packed_read_stream(self, *, req_pool_indices: Any, seq_lens: Any, indptr: Any, total_tokens: int, out: Any, kv_start_idx: Any, sliding_window: bool) -> None:  # fmt: skip
        assert (kv_start_idx, sliding_window) == (None, False)
        for row, length, start in zip(req_pool_indices.tolist(), seq_lens.tolist(), indptr.tolist(), strict=False):  # fmt: skip
            out[start : start + length] = self.table[row, :length]


def layer(number: int, scales: tuple[float, float]) -> Any:
    """What is read of a `RadixAttention` whose checkpoint has scales."""
    from sglang.srt.layers.radix_attention import AttentionType

    k_scale, v_scale = scales
    return SimpleNamespace(
        layer_id=number, tp_q_head_num=QUERY_HEADS, tp_k_head_num=HEADS, tp_v_head_num=HEADS, qk_head_dim=DIM, head_dim=DIM, v_head_dim=DIM,
        scaling=SCALE, is_cross_attention=False, logit_cap=0.0, attn_type=AttentionType.DECODER, sliding_window_size=-1,
        k_scale=torch.tensor(k_scale), v_scale=torch.tensor(v_scale), k_scale_float=k_scale, v_scale_float=v_scale,
    )  # fmt: skip


def runner(pool: Any, table: torch.Tensor, decode: str, page: int) -> Any:
    """What a backend reads of a `ModelRunner`."""
    model = SimpleNamespace(
        num_attention_heads=QUERY_HEADS, get_num_kv_heads=lambda *_: HEADS, get_max_num_attention_heads=lambda: QUERY_HEADS, head_dim=DIM, v_head_dim=DIM,
        hidden_size=QUERY_HEADS * DIM, context_len=table.shape[1], is_multimodal=False, is_encoder_decoder=False,
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
    )  # fmt: skip
    return SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table, size=len(table)), token_to_kv_pool=pool, kv_index_translator=Translator(table),
        server_args=SimpleNamespace(dllm_algorithm=None), prefill_attention_backend_str="flashinfer", decode_attention_backend_str=decode,
        kv_cache_dtype=torch.float4_e2m1fn_x2, model_config=model, page_size=page, sliding_window_size=None, device="cpu", dtype=torch.bfloat16,
        is_draft_worker=True, spec_algorithm=SimpleNamespace(is_frozen_kv_mtp=lambda: False), model=torch.nn.Module(), max_running_requests=8,
    )  # fmt: skip


@contextmanager
def feature() -> Iterator[None]:
    """The feature in place, its table of readers included."""
    from sglang.srt.layers.attention import trtllm_mha_backend  # noqa: F401
    from sglang.srt.layers.quantization import fp4_kv_cache_quant_method as recipes

    before = dict(recipes.KV_CACHE_ATTENTION_ACCESS_REGISTRY)
    ours.register_native_reads()
    try:
        yield from hooks_of(FEATURE)
    finally:
        recipes.KV_CACHE_ATTENTION_ACCESS_REGISTRY.update(before)


@pytest.fixture
def platform(engine: Any, monkeypatch: Any) -> Any:
    """An RTX PRO 6000 as far as the engine looks, with FlashInfer; what the counter saw."""
    from sglang.srt.layers.attention import flashinfer_backend, trtllm_mha_backend
    from sglang.srt.runtime_context import get_parallel, override_platform

    monkeypatch.setitem(sys.modules, "flashinfer", made := package())
    for name, value in (
        ("BatchDecodeWithPagedKVCacheWrapper", Decode),
        ("BatchPrefillWithPagedKVCacheWrapper", Prefill),
        ("BatchPrefillWithRaggedKVCacheWrapper", Ragged),
        ("fast_decode_plan", fast_decode_plan),
        ("_safe_merge_state", merge_state),
        ("torch", OnCpu()),
    ):
        monkeypatch.setattr(flashinfer_backend, name, value, raising=False)
    monkeypatch.setattr(trtllm_mha_backend, "flashinfer", made, raising=False)
    count = Count()
    monkeypatch.setattr(ours, "count", count)
    with (
        get_parallel().override(attn_tp_size=1, attn_dcp_size=1),
        override_platform(is_cuda=True, is_sm90=False, is_sm100=False, is_sm120=True),
    ):
        yield SimpleNamespace(count=count, flashinfer=made)


def pool_of(engine: Any, size: int = SLOTS, scales: Any = SCALES) -> Any:
    """Stock's pool with stock's recipe, and a checkpoint's scales."""
    from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import NVFP4KVCacheMethod

    method = NVFP4KVCacheMethod(num_layers=LAYERS, device="cpu")
    for number, (k_scale, v_scale) in enumerate(scales):
        method.k_scales_float[number], method.v_scales_float[number] = k_scale, v_scale
        method.k_scales_gpu[number], method.v_scales_gpu[number] = k_scale, v_scale
    return engine.pools.MHATokenToKVPool(
        size=size, page_size=PAGE, dtype=torch.float4_e2m1fn_x2, head_num=HEADS, head_dim=DIM, layer_num=LAYERS, device="cpu",
        enable_memory_saver=False, enable_alt_stream=False, quant_method=method,
    )  # fmt: skip


class Server:
    """One backend over one pool, and what its requests computed.

    Request i has the slots `table[i]`; `shared` tokens at the front are those of request 0.
    """

    def __init__(self, engine: Any, *, decode: str = "flashinfer", shared: int = 0, requests: int = 3, scales: Any = SCALES, size: int = SLOTS) -> None:  # fmt: skip
        from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

        self.pool = pool_of(engine, size, scales)
        self.scales, self.Mode = scales, engine.Mode
        table = torch.zeros(requests, TOKENS, dtype=torch.int32)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(5)) + PAGE - 1
        own = TOKENS - shared
        for row in range(requests):
            begin = (shared + row * own) % max(1, size - own)
            table[row] = torch.cat([order[:shared], order[begin : begin + own]])
        self.table = table
        made = runner(self.pool, table, decode, PAGE)
        self.backend = FlashInferAttnBackend(made)

    def tensors(self, tokens: int, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [
            torch.randn(tokens, heads, DIM, generator=generator).bfloat16() * factor
            for heads, factor in ((QUERY_HEADS, 3), (HEADS, 1), (HEADS, 1))
        ]

    def batch(self, mode: Any, rows: list[int], before: list[int], new: list[int]) -> Any:
        lengths = torch.tensor([b + n for b, n in zip(before, new, strict=True)])
        loc = torch.cat(
            [self.table[r, b : b + n] for r, b, n in zip(rows, before, new, strict=True)]
        )
        return SimpleNamespace(
            forward_mode=mode, batch_size=len(rows), req_pool_indices=torch.tensor(rows), seq_lens=lengths, seq_lens_cpu=lengths, seq_lens_sum=int(lengths.sum()),
            encoder_lens=None, spec_info=None, out_cache_loc=loc.long(), extend_prefix_lens=torch.tensor(before), extend_prefix_lens_cpu=before,
            extend_seq_lens_cpu=new, cross_attention_custom_mask=None, multi_item_delimiter_indices=None, positions=loc,
        )  # fmt: skip

    def extend(self, rows: list[int], before: list[int], new: list[int], number: int = 0, seed: int = 1) -> Any:  # fmt: skip
        """What the backend gives for a chunk of each request, and what it should."""
        batch = self.batch(self.Mode.EXTEND, rows, before, new)
        self.backend.init_forward_metadata(batch)
        q, k, v = self.tensors(sum(new), seed)
        at = layer(number, self.scales[number])
        prefix = [self.kept(number, self.table[r, :b].long()) for r, b in zip(rows, before, strict=True)]  # fmt: skip
        got = self.backend.forward_extend(q.flatten(1), k, v, at, batch)
        want, start = [], 0
        for (keys, values), n in zip(prefix, new, strict=True):
            chunk = slice(start, start + n)
            k_all, v_all = torch.cat([keys, k[chunk].float()]), torch.cat([values, v[chunk].float()])  # fmt: skip
            want.append(attention(q[chunk], k_all, v_all, SCALE, True)[0])
            start += n
        return got.view(-1, QUERY_HEADS, DIM).float(), torch.cat(want)

    def decode(self, rows: list[int], lengths: list[int], number: int = 0, seed: int = 2) -> Any:
        """One step over `lengths` tokens each, the new one included."""
        batch = self.batch(self.Mode.DECODE, rows, [n - 1 for n in lengths], [1] * len(rows))
        self.backend.init_forward_metadata(batch)
        q, k, v = self.tensors(len(rows), seed)
        at = layer(number, self.scales[number])
        got = self.backend.forward_decode(q.flatten(1), k, v, at, batch)
        want = [
            attention(q[i : i + 1], *self.kept(number, self.table[row, :n].long()), SCALE, False)[0]
            for i, (row, n) in enumerate(zip(rows, lengths, strict=True))
        ]  # fmt: skip
        return got.view(-1, QUERY_HEADS, DIM).float(), torch.cat(want)

    def kept(self, number: int, slots: torch.Tensor) -> list[torch.Tensor]:
        """What the pool's bytes stand for."""
        k, v, k_blocks, v_blocks = self.pool.get_raw_kv_buffer(number)
        return [
            dequantize_nvfp4(x[slots], blocks[slots].view(torch.uint8)) * scale
            for x, blocks, scale in zip((k, v), (k_blocks, v_blocks), self.scales[number], strict=True)
        ]  # fmt: skip


def off(pair: tuple[torch.Tensor, torch.Tensor]) -> float:
    got, want = pair
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max())


EXACT = 0.01
"""bf16 outputs; chunk and prefix are rounded once each."""
FP8_WORKSPACE = 0.1
"""Stock rounds the prefix to E4M3 once more."""


def prefills(server: Server, number: int) -> list[float]:
    """Errors of a cold chunk, of one behind prefixes (none for a request among them), and of another behind longer ones."""
    return [
        off(server.extend([0, 1], [0, 0], [40, 7], number, 1)),
        off(server.extend([0, 2, 1], [40, 0, 7], [9, 5, 1], number, 2)),
        off(server.extend([1, 0, 2], [8, 49, 5], [200, 1, 30], number, 3)),
    ]


def padded(engine: Any) -> list[torch.Tensor]:
    """All bytes of slot 0 after a write whose last two tokens are padding."""
    pool = pool_of(engine)
    new = torch.full((4, HEADS, DIM), 3.0).bfloat16()
    new[2:] = torch.nan
    loc = torch.tensor([PAGE, PAGE + 1, 0, 0])
    pool.set_kv_buffer(layer(1, SCALES[1]), loc, new, new, None, None)
    assert all(int(x[PAGE].count_nonzero()) for x in pool.get_raw_kv_buffer(1)[:2])
    return [x[0].view(torch.uint8) for x in pool.get_raw_kv_buffer(1)]


def captured(server: Server) -> Any:
    """A decode step as a replayed graph has it: its own wrappers, at a batch of two."""
    backend = server.backend
    server.extend([0, 1], [0, 0], [299, 7])
    backend.cuda_graph_kv_indices = [torch.zeros(2 * TOKENS, dtype=torch.int32)]
    backend.cuda_graph_swa_out_cache_loc = None
    for _ in range(2):
        batch = server.batch(server.Mode.DECODE, [0, 1], [299, 7], [1, 1])
        backend.init_forward_metadata_out_graph(batch, in_capture=not backend.decode_cuda_graph_metadata)  # fmt: skip
    backend.forward_metadata.decode_wrappers = backend.decode_cuda_graph_metadata[2]
    q, k, v = server.tensors(2, 2)
    got = backend.forward_decode(q.flatten(1), k, v, layer(0, SCALES[0]), batch)
    want = [attention(q[i : i + 1], *server.kept(0, server.table[i, :n].long()), SCALE, False)[0] for i, n in enumerate((300, 8))]  # fmt: skip
    return got.view(-1, QUERY_HEADS, DIM).float(), torch.cat(want)


def trtllm(server: Server, dim: int = DIM) -> Any:
    """A decode step of `TRTLLMHAAttnBackend` over 40 and 7 tokens in whole pages, and what it should give."""
    from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend

    backend = TRTLLMHAAttnBackend.__new__(TRTLLMHAAttnBackend)
    lengths = [40, 7]
    pages = torch.tensor([[3, 9, 5], [7, 0, 0]])
    slots = [(own[:, None] * PAGE + torch.arange(PAGE)).flatten()[:n] for own, n in zip(pages, lengths, strict=True)]  # fmt: skip
    vars(backend).update(
        page_size=PAGE, token_to_kv_pool=server.pool, kv_cache_quant_method=server.pool.quant_method, is_nvfp4_kvcache=True, is_xqa_impl=True,
        data_type=torch.float4_e2m1fn_x2, q_data_type=torch.bfloat16, decode_seq_len_splits=1, max_context_len=TOKENS, workspace_buffer=None,
        _multi_ctas_kv_counter_buffer=None, _should_use_fused_fp8_path=lambda *_: False, _get_layer_page_table=lambda *_: pages,
        forward_metadata=SimpleNamespace(swa_out_cache_loc=None, cache_seqlens_int32=torch.tensor(lengths)),
    )  # fmt: skip
    at = layer(0, SCALES[0])
    _, k, v = server.tensors(sum(lengths), 6)
    server.pool.set_kv_buffer(at, torch.cat(slots), k, v, None, None)
    q, k, v = server.tensors(2, 7)
    batch = SimpleNamespace(out_cache_loc=torch.tensor([own[-1] for own in slots]))
    got = backend.forward_decode(q.flatten(1), k, v, at, batch)
    want = [attention(q[i : i + 1], *server.kept(0, own), SCALE, False)[0] for i, own in enumerate(slots)]  # fmt: skip
    return got.view(-1, QUERY_HEADS, DIM).float(), torch.cat(want)
