# SPDX-License-Identifier: Apache-2.0
"""Adapter of ``kv4.nvfp4_triton``: what its hooks do in the engine.

*Cache*    The engine believes in a cache of the model's own dtype, so no backend asks for descales. Of K and of V a token has in each layer and
           head D / 2 bytes of E2M1 and D / 16 bytes of E4M3, without a scale above them: what they stand for is exact in bf16.
           With ``…_KEYS=fp8`` it has D bytes of E4M3 of K, under a scale of 1.
*Triton*   Two kernels read the cache: decode, and extend's prefix. Decode is `decode_attention_nvfp4`, which reads packed rows. Extend stays
           stock's, over the rows of the prefix decoded side by side into a scratch that the call allocates, with ids that count. It takes
           requests in turns of `SCRATCH_ROWS` rows (one longer request alone), and waits once a layer to know how many there are, so it
           cannot be captured. Keys and values of the chunk itself are read as they were computed, as with stock's FP8 cache. On a CPU,
           in the interpreter, decode goes the way of extend.
*CPU*      `torch_native` reads whole buffers by slot: it gets a *shadow*, one layer in the model's dtype, in which the live rows are decoded. It
           reads a chunk's own keys and values from there as well, so a prefill sees somewhat more of the quantisation than on the Triton backend.
*Windows*  Models with sliding windows have two pools, each packed (`Nvfp4SwaPool`). The engine hands over lists that are cut to the window and
           hold ids of the sliding layers' pool, so neither kernel knows of it. On a GPU only: the CPU platform builds one pool for all layers.
*Hybrids*  Models with linear attention (Gated DeltaNet) keep their states in a pool of their own, which stays stock's. The engine's `HybridLinearKVPool` holds an `Nvfp4Pool`
           of the full-attention layers alone, and gives it their numbers among themselves.
*Ranks*    Every rank has its own heads of the same tokens; nothing here decides what runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from numinous_kv_cache_4bit.kernels.decode_attention_nvfp4 import DIMS, decode_attention_nvfp4
from numinous_kv_cache_4bit.options import (
    FP8,
    HYBRID_ARCHITECTURES,
    NVFP4_KEYS,
    NVFP4_SCALES,
    NVFP4_TRITON,
    SLIDING_ARCHITECTURES,
)
from numinous_tooling.numerics import NVFP4_BLOCK
from numinous_tooling.patching.counters import counters
from numinous_tooling.patching.feature import flag_of
from numinous_tooling.patching.flags import option_value

SCRATCH_ROWS = 32768
"""Rows of a prefix that are decoded at once: 134 MB for 8 heads of 128 in bf16, and while torch decodes them about three times that (*derived*)."""

logger = logging.getLogger(__name__)
count = counters(NVFP4_TRITON)


def refuse(reason: str) -> None:
    """End the process with one line."""
    raise SystemExit(f"{NVFP4_TRITON}: {reason}")


# --- Boot -----------------------------------------------------------------------------------------------------------


def fp8_keys() -> bool:
    """What the option says of this process."""
    return bool(option_value(NVFP4_KEYS) == FP8)


def cell_size(
    heads: int, head_dim: int, layers: int, shadow: int = 0, *, fp8_keys: bool = False
) -> int:
    """KV bytes of a token.

    Args:
        heads: KV heads of a rank.
        fp8_keys: whether keys are FP8.
        shadow: bytes of an element of the shadow, which is kept once for all layers; 0 where there is none.
    """
    packed = head_dim // 2 + head_dim // NVFP4_BLOCK
    keys = head_dim if fp8_keys else packed
    return heads * ((keys + packed) * layers + 2 * shadow * head_dim)


def before_pool_sizing(configurator: Any) -> None:
    """`create_memory_pool_configurator`, which every model passes: end the process unless this launch is covered."""
    model = configurator.model_config
    if on_gpu := _on_gpu(configurator):
        major, minor = torch.cuda.get_device_capability()
        if (major, minor) != (9, 0):
            refuse(
                f"made for Hopper (sm90) and CPUs, this is sm{major}{minor}; unset {flag_of(NVFP4_TRITON)}"
            )
        if model.head_dim not in DIMS:
            refuse(
                f"its decode kernel takes heads of {', '.join(map(str, DIMS))}, this model has {model.head_dim}"
            )
    if configurator.use_mla_backend:
        refuse("made for MHA and GQA models, this one has MLA; see kv4.mla_dense")
    if configurator.is_hybrid_swa:
        _check_sliding(configurator)
    if configurator.mambaish_config:
        _check_hybrid(configurator)
    if model.is_encoder_decoder:
        refuse("models with cross attention are not covered")
    if model.head_dim != model.v_head_dim or model.head_dim % NVFP4_BLOCK:
        refuse(
            f"takes keys and values of one width in multiples of {NVFP4_BLOCK}, this model has "
            f"{model.head_dim} and {model.v_head_dim}"
        )
    if configurator.kv_cache_dtype not in (torch.bfloat16, torch.bfloat16 if on_gpu else torch.float32):  # fmt: skip
        refuse(
            f"the KV cache would be {configurator.kv_cache_dtype}; leave --kv-cache-dtype out, "
            f"the model in {'bf16' if on_gpu else 'fp32 or bf16'}"
        )
    scales = {
        getattr(module, name, None)
        for module in configurator.model.modules()
        for name in ("k_scale_float", "v_scale_float")
    }
    if scales - {None, 1.0}:
        refuse("the checkpoint scales its KV cache, which is not covered yet")
    if configurator.is_draft_worker:
        refuse("drafts are not covered")


def _check_sliding(configurator: Any) -> None:
    """End the process unless this model with sliding windows is covered."""
    model = configurator.model_config
    if not _on_gpu(configurator):
        refuse("models with a pool for sliding windows are covered on a GPU only")
    (architecture, *_) = model.hf_config.architectures
    if architecture not in SLIDING_ARCHITECTURES:
        refuse(
            f"of models with a pool for sliding windows {', '.join(SLIDING_ARCHITECTURES)} are covered, "
            f"this one is a {architecture}"
        )
    if shared := getattr(model.hf_text_config, "num_kv_shared_layers", 0):
        refuse(f"{shared} layers of this model use another layer's cache, which is not covered")
    dim = model.swa_head_dim
    if dim != model.swa_v_head_dim or dim not in DIMS:
        refuse(
            f"takes keys and values of sliding layers of one width among {', '.join(map(str, DIMS))}, "
            f"this model has {dim} and {model.swa_v_head_dim}"
        )


def _check_hybrid(configurator: Any) -> None:
    """End the process unless this model with linear attention is covered."""
    (architecture, *_) = configurator.model_config.hf_config.architectures
    if architecture not in HYBRID_ARCHITECTURES:
        refuse(
            f"of models with linear attention or Mamba layers {', '.join(HYBRID_ARCHITECTURES)} are covered, "
            f"this one is a {architecture}"
        )


def _on_gpu(configurator: Any) -> bool:
    """Whether the engine serves there; the CPU platform may do its work on a machine with one."""
    return torch.device(configurator.device).type != "cpu"


def shape_of(configurator: Any) -> tuple[int, int, int]:
    """KV heads of a rank, values of a head, layers that keep keys and values."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    model = configurator.model_config
    heads = model.get_num_kv_heads(parallel.attn_tp_size, parallel.attn_dcp_size)
    layers = configurator.layer_info.num_effective_layers
    if configurator.mambaish_config:
        layers = len(_full_layers(configurator))
    return heads, model.head_dim, layers


def _full_layers(configurator: Any) -> list[int]:
    """Of a model with linear attention, the layers of this rank that keep keys and values."""
    info = configurator.layer_info
    return [
        number
        for number in configurator.mambaish_config.full_attention_layer_ids
        if info.start_layer <= number < info.end_layer
    ]


def _sliding_shape(configurator: Any) -> tuple[int, int, int]:
    """Of sliding layers, likewise; as the engine's builder has them, which takes those of full layers for most models."""
    from sglang.srt.runtime_context import get_parallel

    model = configurator.model_config
    heads, head_dim, _ = shape_of(configurator)
    if configurator.is_hybrid_swa_compress:
        heads = max(1, model.hf_text_config.swa_num_key_value_heads // get_parallel().attn_tp_size)
        head_dim = model.swa_head_dim
    return heads, head_dim, len(model.swa_attention_layer_ids)


def _shadow_dtype(configurator: Any) -> torch.dtype | None:
    """That of the shadow; None for the Triton backend, which needs none."""
    from sglang.srt.runtime_context import attention_backends

    backends = set(attention_backends())
    if backends == {"triton"}:
        return None
    if backends != {"torch_native"} or _on_gpu(configurator):
        refuse(
            f"attention backends {', '.join(sorted(map(str, backends)))} are not covered; triton is, and torch_native on a CPU"
        )
    return configurator.kv_cache_dtype


def after_sizing(result: None, sizing: Any, configurator: Any) -> None:
    """`DefaultPoolConfigurator.__init__`: the bytes of a token that it divides the memory by."""
    shadow = _shadow_dtype(configurator)
    width = shadow.itemsize if shadow else 0
    sizing._cell_size = cell_size(*shape_of(configurator), width, fp8_keys=fp8_keys())


def after_sliding_sizing(result: None, sizing: Any, configurator: Any) -> None:
    """`HybridSWAPoolConfigurator.__init__`: the bytes of a token in a full and in a sliding layer."""
    _shadow_dtype(configurator)
    heads, head_dim, _ = shape_of(configurator)
    sizing._full_per_token = cell_size(heads, head_dim, 1, fp8_keys=fp8_keys())
    heads, head_dim, _ = _sliding_shape(configurator)
    sizing._swa_per_token = cell_size(heads, head_dim, 1, fp8_keys=fp8_keys())
    sizing._recompute_cell_size()


def around_pool(
    original: Callable[..., Any], configurator: Any, *, max_total_num_tokens: int, **of_stock: Any
) -> Any:
    """`KVCacheConfigurator._build_mha_kv_pool` and `_build_oot_mha_kv_pool`: the pool of packed buffers."""
    if of_stock.get("quant_method") is not None or configurator.post_capture_kv_active:
        refuse("the engine would build a pool of another kind for this launch")
    info = configurator.layer_info
    return _packed(
        configurator,
        max_total_num_tokens,
        start_layer=info.start_layer,
        end_layer=info.end_layer,
    )


def _packed(configurator: Any, max_total_num_tokens: int, **layers_of_rank: int) -> Any:
    """An `Nvfp4Pool` for all layers of this rank that keep keys and values."""
    from numinous_kv_cache_4bit.engine.nvfp4_pool import Nvfp4Pool

    heads, head_dim, layers = shape_of(configurator)
    return Nvfp4Pool(
        max_total_num_tokens,
        page_size=configurator.pool_page_size,
        dtype=configurator.kv_cache_dtype,
        head_num=heads,
        head_dim=head_dim,
        layer_num=layers,
        device=configurator.device,
        enable_memory_saver=False,
        enable_alt_stream=False,
        **layers_of_rank,
        shadowed=_shadow_dtype(configurator) is not None,
        fp8_keys=fp8_keys(),
        scale_choice=option_value(NVFP4_SCALES),
    )


def around_hybrid_pool(
    original: Callable[..., Any],
    configurator: Any,
    *,
    max_total_num_tokens: int,
    req_to_token_pool: Any,
    **of_stock: Any,
) -> Any:
    """`KVCacheConfigurator._build_hybrid_linear_kv_pool`: packed buffers for full attention; the states' pool is the one that stock made."""
    from numinous_kv_cache_4bit.engine.nvfp4_pool import Nvfp4HybridPool

    if configurator.post_capture_kv_active:
        refuse("the engine would build a pool of another kind for this launch")
    heads, head_dim, _ = shape_of(configurator)
    return Nvfp4HybridPool(
        size=max_total_num_tokens,
        page_size=configurator.pool_page_size,
        dtype=configurator.kv_cache_dtype,
        head_num=heads,
        head_dim=head_dim,
        full_attention_layer_ids=_full_layers(configurator),
        device=configurator.device,
        mamba_pool=req_to_token_pool.mamba_pool,
        start_layer=configurator.layer_info.start_layer,
        full_kv_pool=_packed(configurator, max_total_num_tokens),
    )


def around_sliding_pool(
    original: Callable[..., Any],
    configurator: Any,
    *,
    full_max_total_num_tokens: int,
    swa_max_total_num_tokens: int,
    **of_stock: Any,
) -> Any:
    """`KVCacheConfigurator._build_hybrid_swa_kv_pool`: two pools of packed buffers."""
    from numinous_kv_cache_4bit.engine.nvfp4_pool import Nvfp4SwaPool

    if configurator.post_capture_kv_active or configurator.is_hybrid_swa_mtp_draft:
        refuse("the engine would build a pool of another kind for this launch")
    model = configurator.model_config
    heads, head_dim, _ = shape_of(configurator)
    sliding_heads, sliding_dim, _ = _sliding_shape(configurator)
    return Nvfp4SwaPool(
        size=full_max_total_num_tokens,
        size_swa=swa_max_total_num_tokens,
        page_size=configurator.pool_page_size,
        dtype=configurator.kv_cache_dtype,
        head_num=heads,
        head_dim=head_dim,
        swa_head_num=sliding_heads,
        swa_head_dim=sliding_dim,
        swa_v_head_dim=sliding_dim,
        swa_attention_layer_ids=model.swa_attention_layer_ids,
        full_attention_layer_ids=model.full_attention_layer_ids,
        device=configurator.device,
        fp8_keys=fp8_keys(),
        scale_choice=option_value(NVFP4_SCALES),
    )


def after_pools(result: Any, configurator: Any, **sizes: Any) -> None:
    """`KVCacheConfigurator._build_token_to_kv_pool`: no other pool may stand where memory was counted for ours."""
    from sglang.srt.utils import log_info_on_rank0

    from numinous_kv_cache_4bit.engine.nvfp4_pool import Nvfp4HybridPool, Nvfp4Pool, Nvfp4SwaPool

    if isinstance(result, Nvfp4SwaPool):
        log_info_on_rank0(logger, f"{NVFP4_TRITON}: {_of_two(result)}")
        return
    if isinstance(result, Nvfp4HybridPool):
        result = result.full_kv_pool
    if not isinstance(result, Nvfp4Pool):
        refuse(f"the engine builds a {type(result).__name__} for this launch, not covered")
    heads, head_dim, layers = shape_of(configurator)
    ours = cell_size(heads, head_dim, layers, fp8_keys=result.fp8_keys)
    others = [
        (name, 2 * heads * head_dim * layers * width) for name, width in (("FP8", 1), ("bf16", 2))
    ]
    told = " and ".join(
        f"{result.size * ours // each} {name} tokens ({each} bytes, {each / ours:.3f} x)"
        for name, each in others
    )
    log_info_on_rank0(
        logger,
        f"{NVFP4_TRITON}: {result.size} tokens of {ours} bytes in {layers} layers, keys in {'FP8' if result.fp8_keys else 'NVFP4'}, "
        f"values in NVFP4, scales by {result.scale_choice}; these bytes would hold {told}",
    )


def _of_two(pool: Any) -> str:
    """One line on the two pools of a model with sliding windows."""
    told = [
        f"{each.size} tokens of {cell_size(each.head_num, each.head_dim, each.layer_num, fp8_keys=pool.fp8_keys)} bytes "
        f"in {each.layer_num} {name} layers"
        for each, name in ((pool.full_kv_pool, "full"), (pool.swa_kv_pool, "sliding"))
    ]
    return f"{' and '.join(told)}, keys in {'FP8' if pool.fp8_keys else 'NVFP4'}, values in NVFP4, scales by {pool.scale_choice}"


# --- Attention ------------------------------------------------------------------------------------------------------


def around_attention(
    original: Callable[..., Any],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    **more: Any,
) -> Any:
    """`AttentionBackend.forward`, of every backend and phase: within it, the pool knows layer and batch."""
    if k is None or v is None or layer.is_cross_attention:
        raise RuntimeError(
            f"{NVFP4_TRITON}: layers that use another layer's cache or cross attention are not covered"
        )
    pool = backend.token_to_kv_pool
    with pool.attending(layer.layer_id, backend.req_to_token_pool.req_to_token, forward_batch):
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache, **more)


def around_hybrid_attention(
    original: Callable[..., Any],
    backend: Any,
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    layer: Any = None,
    forward_batch: Any = None,
    save_kv_cache: bool = True,
    **more: Any,
) -> Any:
    """`HybridLinearAttnBackend.forward`, of both kinds of layers: those of full attention as above, the others are stock's."""
    if not backend._is_full_attn(layer, more.get("layer_id")):
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache, **more)
    return around_attention(original, backend, q, k, v, layer, forward_batch, save_kv_cache, **more)


def around_fused_write(original: Callable[..., bool], forward_batch: Any) -> bool:
    """`enable_fused_set_kv_buffer`: models (Qwen3-MoE, Ling, SDAR, ...) may not write to the pool on their own.

    The engine takes the pool for a bf16 one and would have rope's kernel write new keys and values to `get_key_buffer`. With a tensor
    of device ``meta`` among its arguments torch calls the operator's fake: nothing is rotated, nothing written, nothing said.
    """
    return False


def after_triton_backend(result: None, backend: Any, *args: Any, **named: Any) -> None:
    """`TritonAttnBackend.__init__`: its two kernels read packed rows from here on."""
    pool = backend.token_to_kv_pool
    backend.extend_attention_fwd = PackedPrefix(pool, backend.extend_attention_fwd)
    backend.decode_attention_fwd = PackedDecode(pool, backend.decode_attention_fwd)
    backend.verify_splitkv_fwd = backend.verify_shared_kv_fwd = None
    backend.use_verify_splitkv = backend.use_verify_shared_kv = False


class PackedPrefix:
    """In place of `extend_attention_fwd`: the same kernel over a scratch that holds the decoded prefixes.

    Args:
        pool: an `Nvfp4Pool`.
        kernel: the engine's.
        rows: how many are decoded at once, at most; a longer request stands alone.
    """

    def __init__(self, pool: Any, kernel: Callable[..., None], rows: int = SCRATCH_ROWS) -> None:
        self.pool, self.kernel, self.rows = pool, kernel, rows

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        custom_mask: torch.Tensor | None,
        is_causal: bool,
        mask_indptr: torch.Tensor | None,
        max_len_extend: int,
        k_scale: float,
        v_scale: float,
        sm_scale: float | None = None,
        *,
        window_kv_offsets: torch.Tensor | None = None,
        page_size: int = 1,
        **named: Any,
    ) -> None:
        """Arguments as the backend gives them; `k_buffer` and `v_buffer` have no memory and are not looked at."""
        starts = kv_indptr.tolist()
        for first, last in turns(starts, self.rows):
            keys, values = self.pool.decoded(kv_indices[starts[first] : starts[last]])
            self.kernel(
                q, k, v, o, keys, values,
                qo_indptr[first : last + 1],
                kv_indptr[first : last + 1] - starts[first],
                torch.arange(len(keys), device=keys.device),
                custom_mask,
                is_causal,
                None if mask_indptr is None else mask_indptr[first : last + 1],
                max_len_extend, k_scale, v_scale, sm_scale,
                window_kv_offsets=None if window_kv_offsets is None else window_kv_offsets[first:last],
                page_size=1,
                **named,
            )  # fmt: skip


class PackedDecode:
    """In place of `decode_attention_fwd`: `decode_attention_nvfp4`; on a CPU the engine's kernel over a scratch of decoded rows."""

    def __init__(self, pool: Any, kernel: Callable[..., None]) -> None:
        self.pool, self.kernel = pool, kernel

    def __call__(
        self,
        q: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        o: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        attn_logits: torch.Tensor,
        attn_lse: torch.Tensor,
        num_kv_splits: torch.Tensor,
        max_kv_splits: int,
        sm_scale: float,
        *others: Any,
        logit_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        page_size: int = 1,
        **named: Any,
    ) -> None:
        """Arguments as the backend gives them; `k_buffer` and `v_buffer` have no memory and are not looked at."""
        if q.is_cuda:
            if named.get("score_mod") is not None or named.get("xai_temperature_len", -1) > 0:
                raise RuntimeError(f"{NVFP4_TRITON}: scores that a model changes are not covered")
            k, v, k_scales, v_scales = self.pool.attended
            decode_attention_nvfp4(
                q, k, v, k_scales, v_scales, kv_indptr, kv_indices,
                sm_scale=sm_scale, logit_cap=logit_cap, sinks=sinks, out=o,
            )  # fmt: skip
            return
        live = int(kv_indptr[len(q)])
        keys, values = self.pool.decoded(kv_indices[:live])
        ids = torch.arange(len(keys), device=keys.device)
        self.kernel(
            q, keys, values, o, kv_indptr, ids, attn_logits, attn_lse, num_kv_splits, max_kv_splits,
            sm_scale, *others, logit_cap=logit_cap, sinks=sinks, page_size=1, **named,
        )  # fmt: skip


def turns(starts: list[int], rows: int) -> Iterator[tuple[int, int]]:
    """Runs of requests, as (first, one past the last), of at most `rows` rows together, or of one request.

    Args:
        starts: where the rows of each request begin, and where the last one's end.
    """
    first = 0
    for last in range(1, len(starts)):
        if last + 1 == len(starts) or starts[last + 1] - starts[first] > rows:
            yield first, last
            first = last
