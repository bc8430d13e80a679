# SPDX-License-Identifier: Apache-2.0
"""Adapter of ``attention.per_layer_backend``: which layers FlashAttention-3 takes, and the backend that holds both.

*Backend*  `two_backends.TwoBackends`, built in place of the engine's Triton backend. What it was built for is checked here, before any
           request: each refusal ends the process with one line.
*Layers*   `flash_takes` looks at a layer alone, so every rank decides alike, and so do layers that share a cache.
*Counters* ``engaged``: batches prepared for both backends, replays of a CUDA graph included, which call no layer; ``flash layers`` and
           ``triton layers``: calls of a layer by kind, eager or captured; ``refused:…``: calls of a layer that FlashAttention-3 takes and
           that went to Triton nevertheless.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from numinous_attention.options import FLASH_DIM, PER_LAYER_BACKEND
from numinous_tooling.patching.counters import counters, table
from numinous_tooling.patching.feature import flag_of

logger = logging.getLogger(__name__)
count = counters(PER_LAYER_BACKEND)


def refuse(reason: str) -> None:
    """End the process with one line."""
    raise SystemExit(f"{PER_LAYER_BACKEND}: {reason}; unset {flag_of(PER_LAYER_BACKEND)}")


def count_layer(flash: bool) -> None:
    """Count a call of a layer by its kind; not a refusal, whichever it is."""
    table().add(PER_LAYER_BACKEND, "flash layers" if flash else "triton layers")


# --- Layers ---------------------------------------------------------------------------------------------------------


def flash_takes(layer: Any) -> bool:
    """Whether FlashAttention-3 computes what this `RadixAttention` asks for.

    Triton's scores depend on the position of a query where a layer has a temperature length; FlashAttention-3's do not.
    """
    from sglang.srt.layers.radix_attention import AttentionType

    return (
        layer.qk_head_dim == layer.v_head_dim <= FLASH_DIM
        and layer.qk_head_dim % 8 == 0
        and layer.attn_type is AttentionType.DECODER
        and not layer.is_cross_attention
        and layer.logit_capping_method == "tanh"
        and layer.xai_temperature_len <= 0
    )


def is_window(layer: Any) -> bool:
    """Whether a layer has a sliding window, as both backends ask."""
    return layer.sliding_window_size is not None and layer.sliding_window_size > -1


# --- Boot -----------------------------------------------------------------------------------------------------------


def around_build(
    original: Callable[..., Any], *, model_runner: Any, backend_str: str, init_new_workspace: bool
) -> Any:
    """`_build_full_attention_backend_from_str`: ours for ``triton``; any other name ends the process."""
    if backend_str != "triton":
        refuse(f"the attention backend would be {backend_str}; add --attention-backend triton")
    if model_runner.is_draft_worker:
        refuse("drafts are not covered")
    layers = attention_layers(model_runner.model)
    check_machine()
    check_launch(model_runner)
    check_layers(layers, model_runner.token_to_kv_pool)
    model_runner.init_new_workspace = init_new_workspace
    built = _two_backends()(model_runner)
    flash = sum(map(flash_takes, layers))
    from sglang.srt.utils import log_info_on_rank0

    log_info_on_rank0(
        logger,
        f"{PER_LAYER_BACKEND}: {flash} layers with FlashAttention-3, {len(layers) - flash} with Triton",
    )
    return built


def attention_layers(model: torch.nn.Module) -> list[Any]:
    """Every `RadixAttention` of a model."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return [module for module in model.modules() if isinstance(module, RadixAttention)]


def check_machine() -> None:
    """End the process unless this is Hopper."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability != (9, 0):
        found = "no GPU" if capability is None else "sm{}{}".format(*capability)
        refuse(f"made for Hopper (sm90), this is {found}")


def _two_backends() -> Any:
    """The class of the backend; its module cannot be imported without FlashAttention-3."""
    try:
        from numinous_attention.engine.two_backends import TwoBackends
    except ImportError as error:
        refuse(f"FlashAttention-3 cannot be imported ({error}); install sglang-kernel")
    return TwoBackends


def check_launch(runner: Any) -> None:
    """End the process unless both backends compute the same over this cache."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.runtime_context import get_spec

    model, pool = runner.model_config, runner.token_to_kv_pool
    if get_spec().speculative_algorithm is not None:
        refuse("speculative decoding is not covered (untested)")
    if runner.use_mla_backend:
        refuse("made for MHA and GQA models, this one has MLA")
    if model.is_encoder_decoder:
        refuse("models with cross attention are not covered")
    if model.is_local_attention_model or getattr(runner, "prefill_aware_swa", False):
        refuse("models with chunked or prefill-aware local attention are not covered")
    if type(pool) is not SWAKVPool or runner.kv_index_translator.is_translating:
        refuse(
            f"needs the engine's pools for full and windowed layers, this launch has a {type(pool).__name__}"
        )
    if pool.full_to_swa_index_mapping is None:
        refuse("the pool of windowed layers has no table of slots")
    if runner.kv_cache_dtype not in (torch.bfloat16, torch.float16):
        refuse(
            f"the KV cache would be {runner.kv_cache_dtype}; leave --kv-cache-dtype out, the model in bf16 or fp16"
        )
    page = runner.page_size
    if page < 1 or page & (page - 1):
        refuse(
            f"pages of {page} tokens are not covered: FlashAttention-3's page tables need a power of two"
        )


def check_layers(layers: Iterable[Any], pool: Any) -> None:
    """End the process unless there are layers of both kinds, each with a cache that its backend reads."""
    kinds: dict[int, bool] = {}
    for layer in layers:
        flash = flash_takes(layer)
        if kinds.setdefault(layer.layer_id, flash) != flash:
            refuse("layers of both kinds share a cache")
        if is_window(layer) != pool.layers_mapping[layer.layer_id][1]:
            refuse("a layer's window and its pool do not agree")
        if flash and {layer.k_scale_float, layer.v_scale_float} - {None, 1.0}:
            refuse("the checkpoint scales its KV cache, which is not covered")
    if True not in kinds.values():
        refuse(f"no layer for FlashAttention-3, which takes heads up to {FLASH_DIM}")
    if False not in kinds.values():
        refuse("FlashAttention-3 takes every layer of this model: use --attention-backend fa3")
