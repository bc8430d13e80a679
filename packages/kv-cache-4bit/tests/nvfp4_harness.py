# SPDX-License-Identifier: Apache-2.0
"""What the tests of `kv4.nvfp4_triton` share: the engine with its hooks, options, plain pools, layers, and stand-ins for attention kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv4_harness import Count, hooks_of

from numinous_kv_cache_4bit.engine import nvfp4_triton as ours
from numinous_kv_cache_4bit.hooks.nvfp4_triton import FEATURE
from numinous_kv_cache_4bit.options import NVFP4_KEYS, NVFP4_SCALES
from numinous_tooling.numerics import (
    decode_e4m3fn,
    dequantize_nvfp4,
    encode_e4m3fn,
    quantize_nvfp4,
)

HEADS, QUERY_HEADS, DIM = 2, 6, 32
SLOTS, LAYERS = 120, 3
SCALE = DIM**-0.5
FORMATS = [("nvfp4", "amax"), ("nvfp4", "mse"), ("fp8", "amax"), ("fp8", "mse")]
"""Words of the two options."""


@pytest.fixture(scope="module")
def installed(engine: Any) -> Iterator[Any]:
    from sglang.srt.layers.attention import torch_native_backend, triton_backend  # noqa: F401

    yield from hooks_of(FEATURE)


@pytest.fixture(autouse=True)
def counted(request: Any, monkeypatch: Any) -> Count | None:
    """The CPU platform as far as the feature looks; the counter."""
    if "installed" not in request.fixturenames:
        return None
    from sglang.srt import runtime_context

    monkeypatch.setattr(runtime_context, "attention_backends", lambda: ("torch_native",) * 2)
    count = Count()
    monkeypatch.setattr(ours, "count", count)
    return count


@pytest.fixture(params=FORMATS, ids="-".join)
def formats(request: Any, monkeypatch: Any) -> tuple[str, str]:
    """The two options, set."""
    for option, word in zip((NVFP4_KEYS, NVFP4_SCALES), request.param, strict=True):
        monkeypatch.setenv(option.name, word)
    return request.param


def configurator(**changes: Any) -> Any:
    """What sizing and builders read of the engine's `KVCacheConfigurator`."""
    config = SimpleNamespace(architectures=["Gemma4ForCausalLM"])
    config.get_text_config = lambda: config
    model = SimpleNamespace(
        head_dim=DIM, v_head_dim=DIM, swa_head_dim=DIM, swa_v_head_dim=DIM, context_len=64, is_encoder_decoder=False, hf_config=config,
        get_num_kv_heads=lambda tp, dcp=1: HEADS, linear_attn_registry_result=None,
        hf_text_config=SimpleNamespace(), swa_attention_layer_ids=[], full_attention_layer_ids=[],
    )  # fmt: skip
    made = SimpleNamespace(
        model_config=model, model=torch.nn.Module(),
        layer_info=SimpleNamespace(num_effective_layers=LAYERS, start_layer=0, end_layer=LAYERS),
        spec_algorithm=SimpleNamespace(
            is_eagle=lambda: False, is_standalone=lambda: False, is_dflash_family=lambda: False
        ),
        kv_cache_dtype=torch.float32, kv_cache_dtype_str="auto", pool_page_size=1, device="cpu",
        server_args=SimpleNamespace(enable_hisparse=False), use_mla_backend=False,
        is_draft_worker=False, is_hybrid_swa=False, mambaish_config=None, post_capture_kv_active=False,
        is_hybrid_swa_compress=False, is_hybrid_swa_mtp_draft=False,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(model if hasattr(model, name) else made, name, value)
    return made


def build(engine: Any, **changes: Any) -> Any:
    """The pool, as the engine's hooked builder makes it on the CPU platform."""
    cls = engine.configurator.KVCacheConfigurator
    return cls._build_oot_mha_kv_pool(configurator(**changes), max_total_num_tokens=SLOTS)


def stock_pool(engine: Any, **named: Any) -> Any:
    return engine.pools.MHATokenToKVPool(
        size=SLOTS, page_size=1, dtype=torch.float32, head_num=HEADS, head_dim=DIM,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False, **named,
    )  # fmt: skip


def stands_for(x: torch.Tensor, scales: str = "amax") -> torch.Tensor:
    """What NVFP4 keeps of values that are rounded to bf16 first."""
    return dequantize_nvfp4(*quantize_nvfp4(x.to(torch.bfloat16), scale_choice=scales))


def keys_for(k: torch.Tensor, keys: str, scales: str) -> torch.Tensor:
    """What is kept of keys, likewise."""
    if keys == "fp8":
        return decode_e4m3fn(encode_e4m3fn(k.to(torch.bfloat16)))
    return stands_for(k, scales)


@functools.cache
def values(seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [tokens, heads, D]; not to be written to."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, tokens, HEADS, DIM)
    k, v = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).exp()
    return k, v


def layer(number: int) -> Any:
    """What is read of a `RadixAttention`."""
    return SimpleNamespace(
        layer_id=number, tp_q_head_num=QUERY_HEADS, tp_k_head_num=HEADS, tp_v_head_num=HEADS,
        qk_head_dim=DIM, head_dim=DIM, v_head_dim=DIM, scaling=SCALE, is_cross_attention=False,
        logit_cap=0.0, attn_type=None, sliding_window_size=-1, k_scale=None, v_scale=None,
    )  # fmt: skip


def extend_kernel(q, k, v, o, keys, values, qo, kv, ids, mask, causal, mask_indptr, longest, k_scale, v_scale, scale, *, window_kv_offsets, page_size):  # fmt: skip
    """What `extend_attention_fwd` computes, without a mask of its own; nothing outside of the ids is looked at."""
    assert (page_size, k_scale, v_scale, mask) == (1, 1.0, 1.0, None)
    group = q.shape[1] // k.shape[1]
    for request in range(len(qo) - 1):
        begin, end = qo[request : request + 2].tolist()
        own = ids[kv[request] : kv[request + 1]].long()
        at = [torch.cat([buffer[own], new[begin:end]]) for buffer, new in ((keys, k), (values, v))]
        for head in range(q.shape[1]):
            scores = q[begin:end, head] @ at[0][:, head // group].T * scale
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(len(own) + 1)
            o[begin:end, head] = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ at[1][:, head // group]  # fmt: skip


def decode_kernel(q, keys, values, o, kv, ids, logits, lse, splits, most, scale, k_scale, v_scale, *, page_size, logit_cap, sinks):  # fmt: skip
    """What `decode_attention_fwd` computes: each query behind all of its ids."""
    assert (logits, lse, splits, most) == ("logits", "lse", "splits", 8)
    assert (page_size, k_scale, v_scale, logit_cap, sinks) == (1, 1.0, 1.0, 0.0, None)
    group = q.shape[1] // keys.shape[1]
    for request in range(len(q)):
        own = ids[kv[request] : kv[request + 1]].long()
        for head in range(q.shape[1]):
            weights = (q[request, head] @ keys[own, head // group].T * scale).softmax(-1)
            o[request, head] = weights @ values[own, head // group]


class OnGpu:
    """A tensor as far as `PackedDecode` looks for its device."""

    is_cuda = True
