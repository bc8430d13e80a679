# SPDX-License-Identifier: Apache-2.0
"""The engine's attention modules of Gemma 3 and 4 over its own backends and pools, served batch by batch; imported as ``attention_gemma``.

Norms are the engine's; on a CPU its rotation is its own arithmetic in fp32, as its CUDA kernel has it (there the engine rotates in bf16).
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_serving import (
    FULL_DIM,
    QUERY_HEADS,
    SLOTS,
    WINDOW,
    WINDOW_DIM,
    WINDOW_HEADS,
    Serving,
    ours,
    pool_buffers,
)

WIDTH, POSITIONS = 64, 64
BF16 = torch.bfloat16


# --- Modules --------------------------------------------------------------------------------------------------------


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neox: bool) -> torch.Tensor:
    """The engine's rotation, as its CUDA kernel rounds: once."""
    assert neox
    one, two = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1).to(x.dtype)


def unreduced(linear: Any, x: torch.Tensor) -> tuple[torch.Tensor, None]:
    """A rank's part of a projection, not summed over ranks: here are no others."""
    return linear.quant_method.apply(linear, x, None), None


@contextlib.contextmanager
def building(device: str) -> Iterator[None]:
    """Modules as a GPU has them: bf16, tables of the rotation in fp32."""
    from sglang.srt.layers.rotary_embedding import base, factory

    patch, dtype = pytest.MonkeyPatch(), torch.get_default_dtype()
    patch.setattr(base, "_is_cuda", True)
    patch.setattr(factory, "_ROPE_DICT", {})
    torch.set_default_dtype(BF16)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(dtype)
        patch.undo()


def config4(full_dim: int, ranks: int) -> SimpleNamespace:
    """Gemma 4 of four layers, the last of which reads the third one's cache; with more ranks its wide heads of keys are replicated."""
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    }  # fmt: skip
    return SimpleNamespace(
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"], sliding_window=WINDOW + 1,
        num_attention_heads=QUERY_HEADS * ranks, num_key_value_heads=1, swa_num_key_value_heads=WINDOW_HEADS * ranks, hidden_size=WIDTH,
        attention_bias=False, rms_norm_eps=1e-6, rope_parameters=rope, num_kv_shared_layers=1, num_hidden_layers=4, head_dim=full_dim,
    )  # fmt: skip


def config3() -> Any:
    """Gemma 3 of three layers; its rotation without a window is scaled, which its unused table is not."""
    from transformers import Gemma3TextConfig

    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    return Gemma3TextConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=3, num_attention_heads=QUERY_HEADS,
        num_key_value_heads=WINDOW_HEADS, head_dim=WINDOW_DIM, query_pre_attn_scalar=WINDOW_DIM, sliding_window=WINDOW + 1,
        max_position_embeddings=POSITIONS, layer_types=["sliding_attention", "full_attention", "sliding_attention"], rope_parameters=rope,
    )  # fmt: skip


class Model:
    """The attention modules of a model, with random weights, and what its forward gives them."""

    def __init__(self, name: str, device: str, full_dim: int = FULL_DIM, ranks: int = 1) -> None:
        from sglang.srt.models import gemma3_causal, gemma4_causal

        self.name, self.rotations = name, []
        with building(device):
            if name == "gemma4":
                config = config4(full_dim, ranks)
                dims = [full_dim if kind == "full_attention" else WINDOW_DIM for kind in config.layer_types]  # fmt: skip
                layers = [gemma4_causal.Gemma4Attention(n, config, dim, POSITIONS) for n, dim in enumerate(dims)]  # fmt: skip
            else:
                config = config3()
                layers = [gemma3_causal.Gemma3Attention(n, config, POSITIONS) for n in range(3)]
                for kind in ("full_attention", "sliding_attention"):
                    own = copy.deepcopy(config)
                    own.rope_parameters = dict(config.rope_parameters[kind])
                    self.rotations.append(gemma3_causal.Gemma3RotaryEmbedding(own))
        self.layers = torch.nn.ModuleList(layers).requires_grad_(False).eval()
        random = torch.Generator().manual_seed(11)
        for key, weight in self.layers.named_parameters():
            drawn = torch.randn(weight.shape, generator=random)
            norm = weight.dim() == 1
            weight.copy_(drawn * 0.2 + (name == "gemma4") if norm else drawn * 0.2)
            assert norm == ("norm" in key)
        for layer in self.layers:
            layer.o_proj.forward = functools.partial(unreduced, layer.o_proj)
            if device == "cpu" and name == "gemma4":
                layer.rotary_emb._apply_rotary_emb_wrapped = rotated

    def forward(self, positions: torch.Tensor, hidden: list[torch.Tensor], batch: Any) -> list[torch.Tensor]:  # fmt: skip
        """Each module's answer to hidden states of its own, [tokens, width]."""
        named: dict[str, Any] = {"forward_batch": batch}
        if self.name == "gemma4":
            return [layer(positions=positions, hidden_states=x, **named) for layer, x in zip(self.layers, hidden, strict=True)]  # fmt: skip
        ids = positions[None]
        both = [rotation(hidden[0], ids) for rotation in self.rotations]
        return [layer(positions=ids, hidden_states=x, position_embeddings=both[layer.is_sliding], **named) for layer, x in zip(self.layers, hidden, strict=True)]  # fmt: skip


class Served(Serving):
    """Requests whose layers are a model's attention modules; `outputs` has every answer of every batch.

    Args:
        model: "gemma4", over a pool for windows and one for the rest; "gemma3", over one pool, as the engine gives it.
        kind: of the backend.
        cache: type of the pools.
    """

    def __init__(self, engine: Any, model: str, kind: str, *, device: str = "cpu", page: int = 1, cache: torch.dtype = BF16, ranks: int = 1, stand_ins: bool = True) -> None:  # fmt: skip
        dim = WINDOW_DIM if kind == "fa3" or model == "gemma3" else FULL_DIM
        build = {
            "triton": engine.triton.TritonAttnBackend,
            "fa3": engine.registry.create_flashattention_v3_backend,
            "both": ours(engine),
        }[kind]

        def make(runner: Any) -> Any:
            if model == "gemma3" or cache != BF16:
                with_pool(engine, runner, page, cache, one=model == "gemma3")
            runner.kv_cache_dtype, runner.kv_cache_dtype_str = (
                cache,
                "auto" if cache == BF16 else "fp8_e4m3",
            )
            return build(runner)

        super().__init__(engine, page, make, device=device, stand_ins=stand_ins, full_dim=dim)
        if kind == "fa3" and device == "cpu":
            self.backend._get_scheduler_metadata = lambda **named: None
        self.model = Model(model, device, dim, ranks)
        self.runner.model = self.model.layers
        self.one_pool = model == "gemma3"
        self.outputs: list[torch.Tensor] = []
        self.static: Any = None  # a captured graph and its buffers, on a GPU
        self.drawn = torch.Generator().manual_seed(5)

    def buffers(self) -> list[torch.Tensor]:
        """Keys and values of all pools, as bf16 or bytes."""
        return list(pool_buffers(self.runner.token_to_kv_pool))

    def slide(self) -> None:
        """As the engine does where windows have a pool."""
        if not self.one_pool:
            super().slide()

    def batch(self, mode: str, new: dict[int, int], padded: int | None = None) -> Any:
        """With the positions of its tokens."""
        before = list(self.lengths)
        batch = super().batch(mode, new, padded)
        at = [before[r] + n for r, count in new.items() for n in range(count)]
        at += [0] * (len(batch.out_cache_loc) - len(at))
        batch.positions = torch.tensor(at, device=self.device)
        batch.mha_return_lse = False
        return batch

    def hidden(self, tokens: int) -> list[torch.Tensor]:
        """Inputs of every module."""
        return [torch.randn(tokens, WIDTH, generator=self.drawn).to(self.device, BF16) for _ in self.model.layers]  # fmt: skip

    def run(self, batch: Any, hidden: list[torch.Tensor]) -> list[torch.Tensor]:
        """All modules, as the engine runs a model."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        with torch.no_grad(), forward_context(ForwardContext(attn_backend=self.backend)):
            return self.model.forward(batch.positions, hidden, batch)

    def step(self, mode: str, new: dict[int, int]) -> float:
        """An eager batch."""
        batch = self.batch(mode, new)
        self.backend.init_forward_metadata(batch)
        self.outputs += self.run(batch, self.hidden(len(batch.positions)))
        return 0.0

    def replay(self, new: dict[int, int]) -> float:
        """A captured decode, padded: in a graph where there is one, else over the metadata that the capture bound."""
        batch = self.batch("DECODE", new, padded=self.size)
        hidden = self.hidden(self.size)
        if self.static is not None:
            graph, static, inputs, answers = self.static
            for name in ("req_pool_indices", "seq_lens", "out_cache_loc", "positions"):
                getattr(static, name).copy_(getattr(batch, name))
                setattr(batch, name, getattr(static, name))
            for mine, given in zip(inputs, hidden, strict=True):
                mine.copy_(given)
            self.backend.init_forward_metadata_out_graph(batch)
            graph.replay()
            self.outputs += [x[: len(new)].clone() for x in answers]
            return 0.0
        self.backend.init_forward_metadata_out_graph(batch)
        for backend, metadata in self.captured:
            backend.forward_metadata = metadata
        self.outputs += [x[: len(new)] for x in self.run(batch, hidden)]
        return 0.0

    def capture_graph(self, size: int) -> None:
        """A decode of `size` requests in a CUDA graph."""
        self.capture(size)
        zeros = torch.zeros(size, dtype=torch.int64, device=self.device)
        static = SimpleNamespace(
            forward_mode=self.engine.Mode.DECODE, batch_size=size, req_pool_indices=zeros.clone(), seq_lens=zeros + 1,
            seq_lens_cpu=torch.ones(size, dtype=torch.int64), seq_lens_sum=size, out_cache_loc=zeros.clone(), positions=zeros.clone(),
            spec_info=None, encoder_lens=None, mha_one_shot=False, _attn_output=None, mha_return_lse=False,
        )  # fmt: skip
        inputs = [torch.zeros(size, WIDTH, dtype=BF16, device=self.device) for _ in self.model.layers]  # fmt: skip
        self.backend.init_forward_metadata_out_graph(static, in_capture=True)
        for _ in range(2):
            self.run(static, inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.backend.init_forward_metadata_in_graph(static)
            answers = self.run(static, inputs)
        self.static = graph, static, inputs, answers


def with_pool(engine: Any, runner: Any, page: int, cache: torch.dtype, *, one: bool) -> None:
    """Other pools for a runner: one for all layers of Gemma 3, or the two of Gemma 4 in another type."""
    common = {"page_size": page, "enable_memory_saver": False, "device": runner.device}
    old = runner.token_to_kv_pool
    if one:
        pool = engine.pools.MHATokenToKVPool(size=SLOTS, dtype=cache, head_num=WINDOW_HEADS, head_dim=WINDOW_DIM, layer_num=3, **common)  # fmt: skip
        # What the requests of `Serving` ask of it.
        pool.full_to_swa_index_mapping = old.full_to_swa_index_mapping
        pool.full_kv_pool = pool.swa_kv_pool = pool
    else:
        kinds = [{**common, "head_num": x.head_num, "head_dim": x.head_dim} for x in (old.full_kv_pool, old.swa_kv_pool)]  # fmt: skip
        pool = engine.swa.SWAKVPool(
            size=SLOTS, size_swa=SLOTS, page_size=page, dtype=cache, head_num=1, head_dim=FULL_DIM, swa_attention_layer_ids=[0, 2],
            full_attention_layer_ids=[1], device=runner.device, full_kv_pool_kwargs=kinds[0], swa_kv_pool_kwargs=kinds[1],
        )  # fmt: skip
        pool.register_mapping(old.full_to_swa_index_mapping)
    runner.token_to_kv_pool = pool
    runner.kv_index_translator = engine.index.KVIndexTranslator(
        req_to_token=runner.req_to_token_pool.req_to_token, token_to_kv_pool_allocator=None, token_to_kv_pool=pool,
        page_size=page, device=runner.device,
    )  # fmt: skip
