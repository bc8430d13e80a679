# SPDX-License-Identifier: Apache-2.0
"""Adapter of ``attention.gqa_extend``: `extend_attention` in front of the engine's `extend_attention_fwd`.

*Rule*     Each call is taken or left to stock by its own arguments: types, head dims, what is asked for. What is left counts with its reason. No value on
           the GPU is looked at, so a captured graph decides once, at its capture, and counts there.
*Meaning*  As stock's kernel, in the engine's terms: a window of 0 or less is none; offsets into masks count behind a window only; a mask stands in place of
           causality, beyond the tile of its queries too (fix 0078; stock cuts it there where `is_causal` is set, as for Gemma's images).
*Bits*     Not stock's: sums run in another order. With an FP8 cache stock rounds queries and probabilities to FP8 as well, this kernel neither.
*Ids*      Slot ids that name no slot are no keys here; stock reads whatever lies there.
*Ranks*    Every rank has its own heads of the same tokens, and nothing here decides what runs beside.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from numinous_attention.kernels.extend_attention import extend_attention, parts
from numinous_attention.options import GQA_EXTEND, LAYERS, MIN_CHUNK
from numinous_tooling.patching.counters import counters
from numinous_tooling.patching.feature import flag_of
from numinous_tooling.patching.flags import option_value

CAPABILITIES = ((9, 0), (10, 0), (10, 3), (12, 0))
"""Of NVIDIA GPUs that the kernel is compiled for."""
TYPES = (torch.bfloat16, torch.float32)
FP8 = torch.float8_e4m3fn

count = counters(GQA_EXTEND)


def _refuse(reason: str, feature: str) -> None:
    """End the process with one line."""
    raise SystemExit(f"{feature}: {reason}; unset {flag_of(feature)}")


def after_backend(result: None, backend: Any, model_runner: Any, *args: Any, **named: Any) -> None:
    """`TritonAttnBackend.__init__`: its calls of `extend_attention_fwd` come here first."""
    judge_backend(backend, model_runner)
    backend.extend_attention_fwd = torch.compiler.disable(
        GqaExtend(
            backend.extend_attention_fwd,
            layers=option_value(LAYERS),
            min_chunk=option_value(MIN_CHUNK),
        )
    )


def judge_backend(backend: Any, model_runner: Any, feature: str = GQA_EXTEND) -> None:
    """End the process where the backend would never reach the kernel, or the GPU has none."""
    refuse = functools.partial(_refuse, feature=feature)
    judge_device(torch.device(backend.device), refuse)
    if backend.enable_deterministic:
        refuse("deterministic inference runs another kernel of stock")
    if backend.dcp_size > 1:
        refuse("decode context parallelism is not covered")
    if model_runner.is_draft_worker:
        return  # its calls are judged one by one
    model = model_runner.model_config
    if backend.use_mla:
        refuse("made for MHA and GQA models, this one has MLA")
    if model.is_encoder_decoder:
        refuse("models with cross attention are not covered")
    if model_runner.dtype not in TYPES:
        refuse(f"the model runs in {model_runner.dtype}; bfloat16 and float32 are covered")
    if model_runner.kv_cache_dtype not in (model_runner.dtype, FP8):
        refuse(
            f"the KV cache is {model_runner.kv_cache_dtype}; the model's own type and FP8 E4M3 are covered"
        )
    for name in ("head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim"):
        dim = getattr(model, name)
        if dim and not _covers(dim):
            refuse(
                f"the kernel has no tile for heads of {dim}; powers of two from 16 to 512 and sums of two up to 256 are covered"
            )


def judge_device(device: torch.device, refuse: Callable[[str], None]) -> None:
    """Call `refuse` where the kernels of this room are not compiled for the GPU."""
    if device.type == "cpu":
        return  # the CPU platform, Triton in the interpreter
    if device.type != "cuda":
        refuse(f"there is no kernel for a device of type {device.type}")
    if torch.version.hip is not None:
        name = str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
        if name != "gfx950":
            refuse(f"the kernel is compiled for gfx950, this is {name}")
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) not in CAPABILITIES:
        refuse(f"the kernel is compiled for sm90, sm100, sm103 and sm120, this is sm{major}{minor}")


@functools.cache
def _covers(dim: int) -> bool:
    """Whether the kernel has a tile for heads of `dim` values."""
    try:
        parts(dim)
    except ValueError:
        return False
    return True


class GqaExtend:
    """In place of `extend_attention_fwd`: the same arguments, ours where it covers them, else stock's.

    Args:
        stock: the engine's function, or what stands in its place.
        layers: "all", "windowed" or "full", see `LAYERS`.
        min_chunk: see `MIN_CHUNK`.
    """

    def __init__(self, stock: Callable[..., None], *, layers: str, min_chunk: int) -> None:
        self.stock, self.layers, self.min_chunk = stock, layers, min_chunk

    def __call__(self, *given: Any, **named: Any) -> None:
        """Arguments as the backend gives them; the result is in `o_extend`."""
        reason = self.attend(*given, **named)
        if reason is None:
            self.count().engaged()
        else:
            self.count().refused(reason)
            self.stock(*given, **named)

    def count(self) -> Any:
        """Counters of the feature."""
        return count

    def kernel(self, *given: Any, **named: Any) -> None:
        """What attends."""
        extend_attention(*given, **named)

    def choice(self, window: int | None, longest: int) -> str | None:
        """Why a call of a layer, whose longest chunk has so many tokens, is left to stock by choice; None if it is not."""
        if self.layers != "all" and (window is not None) != (self.layers == "windowed"):
            return "layer_choice"
        return "short_chunk" if longest < self.min_chunk else None

    def attend(
        self,
        q_extend: torch.Tensor,
        k_extend: torch.Tensor,
        v_extend: torch.Tensor,
        o_extend: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor | None,
        custom_mask: torch.Tensor | None,
        is_causal: bool,
        mask_indptr: torch.Tensor | None,
        max_len_extend: int,
        k_scale: float,
        v_scale: float,
        sm_scale: float | None = None,
        logit_cap: float = 0.0,
        skip_prefix_custom_mask: bool = True,
        sliding_window_size: int = -1,
        sinks: torch.Tensor | None = None,
        window_kv_offsets: torch.Tensor | None = None,
        xai_temperature_len: int = -1,
        lse_extend: torch.Tensor | None = None,
        skip_prefix: bool = False,
        skip_extend: bool = False,
        page_size: int = 1,  # ids name slots whatever it is
        score_mod: Any = None,
        aux_tensors: Any = None,
        extend_seq_lens_cpu: Any = None,
        identity_kv_indices: bool = False,
    ) -> str | None:
        """Attend and return None; or do nothing and return why the call is stock's, as a counter's reason."""
        window = sliding_window_size if sliding_window_size > 0 else None
        if reason := self.choice(window, max_len_extend):
            return reason
        if score_mod is not None or aux_tensors is not None:
            return "score_mod"
        if xai_temperature_len > 0:
            return "xai_temperature"
        if lse_extend is not None or skip_prefix or skip_extend or identity_kv_indices:
            return "part_of_an_attention"
        if reason := uncovered(q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer):
            return reason
        if kv_indices is None or not (_is_scale(k_scale) and _is_scale(v_scale)):
            return "no_ids" if kv_indices is None else "scale"
        if sinks is not None and sinks.dtype not in (torch.float32, torch.bfloat16):
            return "sinks_dtype"
        offsets = None
        if custom_mask is not None:
            if custom_mask.dtype not in (torch.uint8, torch.bool):
                return "mask_dtype"
            if window is not None:
                offsets = window_kv_offsets
                if offsets is None:
                    return "no_mask_offsets"
        self.kernel(
            q_extend,
            k_extend,
            v_extend,
            k_buffer,
            v_buffer,
            qo_indptr,
            kv_indptr,
            kv_indices,
            sm_scale=sm_scale or q_extend.shape[-1] ** -0.5,
            causal=is_causal and custom_mask is None,
            window=window,
            mask=custom_mask,
            mask_indptr=None if custom_mask is None else mask_indptr,
            mask_offsets=offsets,
            mask_prefix=custom_mask is not None and not skip_prefix_custom_mask,
            logit_cap=max(logit_cap, 0.0),
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            out=o_extend,
        )
        return None


def uncovered(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
) -> str | None:
    """Why tensors like these stay in stock, as a counter's reason; None if the kernel takes them."""
    if q.dtype not in TYPES or {k.dtype, v.dtype, o.dtype} != {q.dtype}:
        return "dtype"  # keys of another layer's FP8 cache, for one
    if k_buffer.dtype not in (q.dtype, FP8) or v_buffer.dtype != k_buffer.dtype:
        return "cache_dtype"
    if not (_covers(q.shape[-1]) and _covers(v.shape[-1])):
        return "head_dim"
    tokens, heads, dim = q.shape
    _, kv_heads, dim_v = v.shape
    if (
        k.shape != (tokens, kv_heads, dim)
        or len(v) != tokens  # cross attention, or keys of a prefix in front
        or o.shape != (tokens, heads, dim_v)
        or k_buffer.shape[1:] != (kv_heads, dim)
        or v_buffer.shape[1:] != (kv_heads, dim_v)
        or len(k_buffer) != len(v_buffer)
        or heads % kv_heads
    ):
        return "shape"
    if any(x.stride(-1) != 1 for x in (q, k, v, o, k_buffer, v_buffer)):
        return "strides"
    return None


def _is_scale(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf
