# SPDX-License-Identifier: Apache-2.0
"""`attention.split_verify` in the engine's Triton backend: drafts are verified over its own metadata, pools and layers, eager and from buffers of a captured graph.

Backend, pool, layers and translation of slots are the engine's, its Triton kernels and ours run in the interpreter. Trees and their masks are what a speculative worker hands over. Stock,
the feature, and the feature with `attention.gqa_extend` behind it must give what attention in fp64 over all keys gives. The served engine cannot verify on the CPU: what builds trees is a CUDA kernel.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from numinous_attention.options import GQA_EXTEND, SPLIT_VERIFY
from numinous_tooling.patching.counters import table

DRAFTS, WINDOW, CONTEXT, SLOTS, REQUESTS = 4, 9, 64, 256, 3
HEADS, KV_HEADS, DIM = 4, 2, 16
CLOSE = 1e-4
TREES = {
    # ancestors-or-self of each draft
    "chain": [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]],
    "tree": [[0], [0, 1], [0, 2], [0, 1, 3]],
}


class Verifying:
    """Requests with cached prefixes under a real backend; a full layer and one with a window."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the engine's own, at import
            from sglang.srt.configs.model_config import AttentionArch
            from sglang.srt.layers.attention import triton_backend
            from sglang.srt.layers.radix_attention import RadixAttention
            from sglang.srt.mem_cache import kv_index_translator, memory_pool
            from sglang.srt.model_executor.forward_batch_info import ForwardMode
        self.mode = ForwardMode.TARGET_VERIFY
        monkeypatch.setattr(triton_backend, "get_device_core_count", lambda *device: 8)
        common = {"page_size": 1, "device": "cpu", "enable_memory_saver": False}
        self.pool = memory_pool.MHATokenToKVPool(
            size=SLOTS, dtype=torch.float32, head_num=KV_HEADS, head_dim=DIM, layer_num=2, **common
        )
        requests = memory_pool.ReqToTokenPool(
            size=REQUESTS, max_context_len=CONTEXT, device="cpu", enable_memory_saver=False
        )
        self.layers = torch.nn.ModuleList([
            RadixAttention(HEADS, DIM, 0.3, KV_HEADS, layer_id=0, sliding_window_size=-1),
            RadixAttention(HEADS, DIM, 0.3, KV_HEADS, layer_id=1, sliding_window_size=WINDOW),
        ])  # fmt: skip
        config = SimpleNamespace(num_attention_heads=HEADS, architectures=["Gemma3ForCausalLM"])
        config.get_text_config = lambda: config
        model = SimpleNamespace(
            context_len=CONTEXT, is_encoder_decoder=False, attention_arch=AttentionArch.MHA, head_dim=DIM, v_head_dim=DIM,
            swa_head_dim=DIM, swa_v_head_dim=DIM, hf_text_config=config, hf_config=config, is_local_attention_model=False,
            get_num_kv_heads=lambda *sizes: KV_HEADS, get_max_num_attention_heads=lambda: HEADS,
            linear_attn_registry_result=None, qk_nope_head_dim=0, qk_rope_head_dim=0, kv_lora_rank=0,
        )  # fmt: skip
        self.runner = SimpleNamespace(
            model=self.layers, model_config=model, sliding_window_size=WINDOW, req_to_token_pool=requests,
            token_to_kv_pool=self.pool, token_to_kv_pool_allocator=None, kv_cache_dtype=torch.float32, dtype=torch.float32,
            page_size=1, is_draft_worker=False, device="cpu", gpu_id=0, ps=SimpleNamespace(attn_cp_size=1, tp_size=1), use_mla_backend=False,
            kv_cache_dtype_str="auto", init_new_workspace=None,
            kv_index_translator=kv_index_translator.KVIndexTranslator(
                req_to_token=requests.req_to_token, token_to_kv_pool_allocator=None, token_to_kv_pool=self.pool,
                page_size=1, device="cpu",
            ),
        )  # fmt: skip
        self.triton = triton_backend
        self.random = torch.Generator().manual_seed(5)

    def backend(self, *features: Any) -> Any:
        """A new backend of stock, with the hooks of features behind it."""
        made = self.triton.TritonAttnBackend(self.runner)
        for feature in features:
            feature.after_backend(None, made, self.runner)
        return made

    def fill(self, prefixes: list[int]) -> None:
        """Cached prefixes of the requests, in slots of no order; slots that nobody names hold NaN."""
        self.prefixes = prefixes
        slots = torch.randperm(SLOTS - 1, generator=self.random) + 1
        self.own, at = [], 0
        for each in (*self.pool.k_buffer, *self.pool.v_buffer):
            each.fill_(torch.nan)
        for request, prefix in enumerate(prefixes):
            ids = slots[at : at + prefix + DRAFTS]
            self.runner.req_to_token_pool.req_to_token[request, : len(ids)] = ids
            for each in (*self.pool.k_buffer, *self.pool.v_buffer):
                each[ids[:prefix]] = torch.randn(prefix, KV_HEADS, DIM, generator=self.random)
            self.own.append(ids)
            at += len(ids)
        self.qkv = [[torch.randn(len(prefixes) * DRAFTS, n, DIM, generator=self.random) for n in (HEADS, KV_HEADS, KV_HEADS)] for _ in self.layers]  # fmt: skip

    def batch(self, tree: str) -> Any:
        """As a speculative worker makes it: the mask of a request is [drafts, prefix + drafts], ones in front of its tree."""
        masks = []
        for prefix in self.prefixes:
            mask = torch.ones(DRAFTS, prefix + DRAFTS, dtype=torch.bool)
            mask[:, prefix:] = self.seen(tree)
            masks.append(mask.flatten())
        lengths = torch.tensor(self.prefixes)
        ids = torch.cat([own[-DRAFTS:] for own in self.own])
        return SimpleNamespace(
            forward_mode=self.mode, batch_size=len(lengths), req_pool_indices=torch.arange(len(lengths)), seq_lens=lengths,
            seq_lens_cpu=lengths, seq_lens_sum=int(lengths.sum()), out_cache_loc=ids, extend_seq_lens_cpu=None,
            positions=torch.zeros(len(ids)), encoder_lens=None, mha_one_shot=False, attn_attend_prefix_cache=None,
            spec_info=SimpleNamespace(custom_mask=torch.cat(masks), draft_token_num=DRAFTS),
        )  # fmt: skip

    def seen(self, tree: str) -> torch.Tensor:
        own = torch.zeros(DRAFTS, DRAFTS, dtype=torch.bool)
        for draft, ancestors in enumerate(TREES[tree]):
            own[draft, ancestors] = True
        return own

    def forward(self, backend: Any, batch: Any) -> list[torch.Tensor]:
        return [backend.forward(q.flatten(1), k, v, layer, batch).view(-1, HEADS, DIM) for layer, (q, k, v) in zip(self.layers, self.qkv, strict=True)]  # fmt: skip

    def expected(self, tree: str) -> list[torch.Tensor]:
        answers = []
        for number, (q, k, v) in enumerate(self.qkv):
            rows = []
            for request, prefix in enumerate(self.prefixes):
                mine = slice(request * DRAFTS, (request + 1) * DRAFTS)
                before = self.own[request][:prefix]
                keys, values = (torch.cat([pool[number][before], x[mine]]).double().repeat_interleave(HEADS // KV_HEADS, 1) for pool, x in ((self.pool.k_buffer, k), (self.pool.v_buffer, v)))  # fmt: skip
                scores = torch.einsum("qhd,khd->hqk", q[mine].double(), keys) * 0.3
                distance = prefix + torch.arange(DRAFTS)[:, None] - torch.arange(prefix + DRAFTS)
                seen = torch.ones(DRAFTS, prefix + DRAFTS, dtype=torch.bool)
                seen[:, prefix:] = self.seen(tree)
                if number:
                    seen &= distance <= WINDOW
                rows.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values))  # fmt: skip
            answers.append(torch.cat(rows))
        return answers


def counted(feature: str) -> dict[str, int]:
    return dict(table().totals().get(feature, {}))


@pytest.fixture
def verifying(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("sglang", reason="the backend is the engine's")
    from sglang.srt.runtime_context import get_context, get_parallel

    override = get_context().override_server_args(
        attention_backend="triton", device="cpu", dp_size=1, enable_deterministic_inference=False, enable_lean_attention=False,
        kv_cache_dtype="auto", pp_size=1, speculative_algorithm="EAGLE", speculative_num_draft_tokens=DRAFTS,
        speculative_num_steps=3, speculative_eagle_topk=2, tp_size=1,
    )  # fmt: skip
    override.install()
    try:
        with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0, attn_tp_size=1, tp_size=1):
            yield Verifying(monkeypatch)
    finally:
        override.restore()


def judge(answers: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for answer, exact in zip(answers, want, strict=True):
        torch.testing.assert_close(answer.double(), exact, rtol=CLOSE, atol=CLOSE)


@pytest.mark.tier("interpret")
@pytest.mark.filterwarnings("ignore")  # of the engine's kernels in the interpreter
@pytest.mark.parametrize("tree", TREES)
def test_verification_in_the_backend(tree: str, verifying: Any) -> None:
    """Eager: stock, the feature, both features; prefixes shorter than the window, longer, and none."""
    from numinous_attention.engine import gqa_extend, split_verify

    verifying.fill([37, 0, 5])
    batch, want = verifying.batch(tree), verifying.expected(tree)
    judge_other = verifying.expected("tree" if tree == "chain" else "chain")
    assert max(float((x - y).abs().max()) for x, y in zip(want, judge_other, strict=True)) > 0.05
    for features in ((), (split_verify,), (gqa_extend, split_verify)):
        before = counted(SPLIT_VERIFY), counted(GQA_EXTEND)
        backend = verifying.backend(*features)
        backend.init_forward_metadata(batch)
        judge(verifying.forward(backend, batch), want)
        if features:
            assert counted(SPLIT_VERIFY)["engaged"] - before[0].get("engaged", 0) == 2
        assert counted(GQA_EXTEND) == before[1]


@pytest.mark.tier("interpret")
@pytest.mark.filterwarnings("ignore")
def test_verification_from_buffers_of_a_graph(verifying: Any) -> None:
    """Metadata is that of a capture, refilled before each replay: ids and masks have room for the longest context, lengths change."""
    from numinous_attention.engine import split_verify

    backend = verifying.backend(split_verify)
    backend.init_cuda_graph_state(REQUESTS, REQUESTS * DRAFTS)
    verifying.fill([1, 1, 1])
    batch = verifying.batch("tree")
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    captured = backend.forward_metadata
    assert len(captured.kv_indices) == REQUESTS * DRAFTS * CONTEXT
    for prefixes, tree in (([37, 0, 5], "tree"), ([3, 50, 20], "chain"), ([9, 10, 8], "tree")):
        verifying.fill(prefixes)
        batch = verifying.batch(tree)
        backend.init_forward_metadata_out_graph(batch)
        backend.forward_metadata = captured
        judge(verifying.forward(backend, batch), verifying.expected(tree))
