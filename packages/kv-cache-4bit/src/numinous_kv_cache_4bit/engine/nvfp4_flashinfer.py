# SPDX-License-Identifier: Apache-2.0
"""Adapter of ``kv4.nvfp4_flashinfer``: what its hooks do in the engine. Never run on a GPU: Blackwell is not ours.

*Cache*    stock's own: `MHATokenToKVPool` with the recipe ``nvfp4``, whose bytes in a layer are E2M1, an E4M3 scale for 16 and the layer's global scale above
           them, which stock loads from the checkpoint. What is not there any more is the FP8 workspace of one layer.
*Write*    `nvfp4_write`, one launch; it leaves slot 0 alone, where the engine sends padding.
*Prefill*  FlashInfer's paged wrapper (fa2) reads packed rows of the prefix by slot, with ``kv_cache_sf``. The chunk itself is read as it was computed.
*Decode*   of ``trtllm_mha`` on sm120 (XQA) stays stock's. That of ``flashinfer`` is fa2 over packed rows as well.
*Scales*   a read gets the pair that the write divided by (`get_bmm_scales`), once. Stock gives what the layer has, over values that had been multiplied already.
*Splits*   FlashInfer 0.6.18 reads NVFP4 wrongly where keys are split over blocks (``_nvfp4_kv_requires_disabled_split_kv``); its prefill wrappers know, its decode
           wrapper has to be told. Without splits a captured plan leaves spare blocks without a mask (``scheduler.cuh``, step 4 and
           ``block_valid_mask``): they read request and tile from a page-locked buffer behind what the plan wrote, memory that nobody set. It is set to zero here
           once, so they do the first request's tile over and store the same bytes.
*Boot*     the write and each reader run once on this GPU, at the model's shapes, with scales other than 1, against attention in fp32; the process ends with
           one line if they differ.
*Ranks*    Every rank has its own heads of the same tokens; nothing here decides what runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from numinous_kv_cache_4bit.engine.nvfp4_triton import cell_size, shape_of
from numinous_kv_cache_4bit.kernels import nvfp4_write
from numinous_kv_cache_4bit.options import (
    FLASHINFER_DIMS,
    FLASHINFER_VERSION,
    HYBRID_ARCHITECTURES,
    NVFP4_FLASHINFER,
    NVFP4_TRITON,
)
from numinous_tooling.numerics import NVFP4_BLOCK, dequantize_nvfp4
from numinous_tooling.patching.counters import counters
from numinous_tooling.patching.feature import flag_of

RECIPE = "nvfp4"
"""Stock's word for this cache."""
PROOF_LENGTHS = (1, 37, 700)
"""Keys of the requests that prove a reader: less than a tile of any kernel, a part of one, and what is split where splits are on."""
PROOF_SCALES = (0.37, 2.6)
"""Global scales of keys and values there; no powers of two, and neither is 1."""
PROOF_ERROR = 0.05
"""Largest difference to attention in fp32, of the largest output; bf16 weights and outputs stay within a tenth of it."""

Buffers = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Keys, values [slots, heads, D / 2], their block scales [slots, heads, D / 16]; uint8, scales also as E4M3."""

logger = logging.getLogger(__name__)
count = counters(NVFP4_FLASHINFER)


def refuse(reason: str) -> None:
    """End the process with one line."""
    raise SystemExit(f"{NVFP4_FLASHINFER}: {reason}")


# --- Boot -----------------------------------------------------------------------------------------------------------


def around_compatibility(original: Callable[[Any], None], server_args: Any) -> None:
    """`handle_kv4_compatibility`, in the main process: which GPU and which attention backends; stock's own check does not know ``flashinfer`` for decode."""
    from sglang.srt.arg_groups.overrides import (
        attention_backends_of,
        resolved_view,
        resolving_view,
    )
    from sglang.srt.runtime_context import get_platform

    if (dtype := resolving_view(server_args).kv_cache_dtype) != RECIPE:
        refuse(f"the KV cache would be {dtype}: add --kv-cache-dtype {RECIPE}")
    platform = get_platform()
    if not (platform.is_sm100 or platform.is_sm120):
        refuse(
            f"made for Blackwell (sm100, sm103, sm120); unset {flag_of(NVFP4_FLASHINFER)}, on Hopper {NVFP4_TRITON} keeps an NVFP4 cache"
        )
    prefill, decode = attention_backends_of(resolved_view(server_args))
    if prefill != "flashinfer" or decode not in ("flashinfer", "trtllm_mha"):
        refuse(
            f"attention backends {prefill} and {decode} are not covered; --prefill-attention-backend flashinfer with "
            "--decode-attention-backend flashinfer or, on sm120, trtllm_mha is"
        )
    if decode == "trtllm_mha" and platform.is_sm100:
        refuse(
            "--decode-attention-backend trtllm_mha is trtllm-gen on this GPU, which reads another layout of block scales than the engine writes; "
            "use --decode-attention-backend flashinfer"
        )
    if decode == "trtllm_mha":
        original(server_args)


def register_native_reads() -> None:
    """The recipe's table of readers: packed rows for FlashInfer in both phases, and no workspace."""
    from sglang.srt.layers.quantization import fp4_kv_cache_quant_method as recipes

    recipes.KV_CACHE_ATTENTION_ACCESS_REGISTRY[RECIPE] = tuple(
        recipes._native_fp4(phase, frozenset(backends), RECIPE, torch.uint8)
        for phase, backends in (
            (recipes.KVCacheAttentionPhase.PREFILL, ("flashinfer",)),
            (recipes.KVCacheAttentionPhase.DECODE, ("flashinfer", "trtllm_mha")),
        )
    )


def native_reads_registered() -> str | None:
    """None, or what the engine makes of the recipe instead."""
    from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import NVFP4KVCacheMethod

    method = NVFP4KVCacheMethod(num_layers=1, device="cpu")
    if method.needs_dequant_workspace() or method.kv_storage_dtype() != torch.uint8:
        return f"the recipe still says {method.describe_attention_accesses()}"
    return None


def before_pool_sizing(configurator: Any) -> None:
    """`create_memory_pool_configurator`, which every model passes: end the process unless this model is covered."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.radix_attention import AttentionType

    model = configurator.model_config
    if configurator.kv_cache_dtype != torch.float4_e2m1fn_x2:
        refuse(
            f"the KV cache would be {configurator.kv_cache_dtype}: add --kv-cache-dtype {RECIPE}"
        )
    if configurator.use_mla_backend:
        refuse("made for MHA and GQA models, this one has MLA")
    if configurator.is_hybrid_swa:
        refuse(
            "models with a pool for sliding windows are not covered: stock's builder gives them no NVFP4 recipe"
        )
    if configurator.mambaish_config:
        (architecture, *_) = model.hf_config.architectures
        if architecture not in HYBRID_ARCHITECTURES:
            refuse(
                f"of models with linear attention or Mamba layers {', '.join(HYBRID_ARCHITECTURES)} are covered, "
                f"this one is a {architecture}"
            )
    if model.is_encoder_decoder:
        refuse("models with cross attention are not covered")
    if model.head_dim != model.v_head_dim or model.head_dim not in FLASHINFER_DIMS:
        refuse(
            f"takes keys and values of one width among {', '.join(map(str, FLASHINFER_DIMS))}, "
            f"this model has {model.head_dim} and {model.v_head_dim}"
        )
    if configurator.model_dtype != torch.bfloat16:
        refuse(
            f"the write takes bf16, this model is served in {configurator.model_dtype}: add --dtype bfloat16"
        )
    if configurator.is_draft_worker:
        refuse("drafts are not covered")
    if envs.SGLANG_USE_HND_KVCACHE.get():
        refuse("SGLANG_USE_HND_KVCACHE is not covered: packed rows have no such layout")
    for module in configurator.model.modules():
        if getattr(module, "logit_cap", 0.0):
            refuse(
                "models that cap their logits are not covered: the engine plans FlashInfer's kernels without the cap"
            )
        if getattr(module, "sliding_window_size", None) not in (None, -1):
            refuse("models with sliding windows are not covered")
        if getattr(module, "attn_type", AttentionType.DECODER) != AttentionType.DECODER:
            refuse("layers without a causal mask are not covered")


def after_sizing(result: None, sizing: Any, configurator: Any) -> None:
    """`DefaultPoolConfigurator.__init__`: the bytes of a token, which stock counts with a workspace."""
    sizing._cell_size = cell_size(*shape_of(configurator))


# --- Write ----------------------------------------------------------------------------------------------------------


def around_store(
    original: Callable[..., None],
    method: Any,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale_buffer: torch.Tensor,
    v_scale_buffer: torch.Tensor,
    loc: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
) -> None:
    """`NVFP4KVCacheMethod.quantize_and_store`: one launch in place of two quantisations and four scatters; slot 0 stays as it is."""
    scales = [1.0 if scale is None else scale for scale in (k_scale, v_scale)]
    store((k_buffer, v_buffer, k_scale_buffer, v_scale_buffer), loc, cache_k, cache_v, *scales)


def store(
    buffers: Buffers,
    loc: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | float,
    v_scale: torch.Tensor | float,
) -> None:
    """Quantise new tokens and write them at their slots.

    Args:
        loc: int32 or int64 [T]; ids from 1 are written.
        k, v: bf16 [T, heads, D].
        k_scale, v_scale: global scales, numbers or one fp32 on the device.
    """
    write = nvfp4_write.nvfp4_write if loc.is_cuda else nvfp4_write.reference
    write(k, v, loc, *buffers, k_global_scale=k_scale, v_global_scale=v_scale)


# --- Read -----------------------------------------------------------------------------------------------------------


def read(
    wrapper: Any,
    q: torch.Tensor,
    buffers: Buffers,
    scales: tuple[float, float],
    sm_scale: float,
    *,
    causal: bool | None = None,
    with_lse: bool = False,
) -> Any:
    """Attention by a planned paged wrapper over packed rows.

    Args:
        wrapper: of FlashInfer, prefill or decode.
        q: bf16 [rows, query heads, D].
        scales: global scales of keys and values.
        causal: of a prefill wrapper: whether the last keys are the queries' own.
        with_lse: return (output, log-sum-exp in base 2) and not the output alone.
    """
    # `forward`, which the engine calls and which sets these, has no argument for block scales.
    wrapper._sm_scale = sm_scale
    if causal is not None:
        wrapper._causal = causal
    k, v, k_blocks, v_blocks = buffers
    k_scale, v_scale = scales
    return wrapper.run(
        q, (k, v), k_scale=k_scale, v_scale=v_scale, return_lse=with_lse,
        kv_cache_sf=tuple(blocks.view(torch.float8_e4m3fn) for blocks in (k_blocks, v_blocks)),
    )  # fmt: skip


def around_extend(
    original: Callable[..., torch.Tensor],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
) -> torch.Tensor:
    """`FlashInferAttnBackend.forward_extend`: stock's two forms, all through the cache or the chunk merged with its prefix."""
    from sglang.srt.layers.attention import flashinfer_backend as stock

    _check(layer, k, v)
    seen = backend.forward_metadata
    paged = seen.prefill_wrappers[backend._get_wrapper_idx(layer)]
    if paged.is_cuda_graph_enabled:
        raise RuntimeError(
            f"{NVFP4_FLASHINFER}: captured prefill is not covered: add --cuda-graph-backend-prefill disabled"
        )
    q = q.contiguous().view(-1, layer.tp_q_head_num, layer.head_dim)
    new = [x.view(-1, layer.tp_k_head_num, layer.head_dim) for x in (k, v)]
    if not seen.use_ragged:
        if save_kv_cache:
            _save(backend, layer, forward_batch, k, v)
        out = _read_layer(backend, paged, q, layer, causal=True)
    else:
        if seen.extend_no_prefix:
            out = backend.prefill_wrapper_ragged.forward(
                q, *new, causal=True, sm_scale=layer.scaling
            )
        else:
            chunk = backend.prefill_wrapper_ragged.forward_return_lse(
                q, *new, causal=True, sm_scale=layer.scaling
            )
            prefix = _read_layer(backend, paged, q, layer, causal=False, with_lse=True)
            out, _ = stock._safe_merge_state(*chunk, *prefix)
        if save_kv_cache:
            _save(backend, layer, forward_batch, k, v)
    return out.view(-1, layer.tp_q_head_num * layer.head_dim)


def around_decode(
    original: Callable[..., torch.Tensor],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
) -> torch.Tensor:
    """`FlashInferAttnBackend.forward_decode`."""
    _check(layer, k, v)
    wrapper = backend.forward_metadata.decode_wrappers[backend._get_wrapper_idx(layer)]
    if save_kv_cache:
        _save(backend, layer, forward_batch, k, v)
    q = q.contiguous().view(-1, layer.tp_q_head_num, layer.head_dim)
    return _read_layer(backend, wrapper, q, layer).view(-1, layer.tp_q_head_num * layer.head_dim)


def _check(layer: Any, k: torch.Tensor | None, v: torch.Tensor | None) -> None:
    if k is None or v is None or layer.is_cross_attention:
        raise RuntimeError(
            f"{NVFP4_FLASHINFER}: layers that use another layer's cache or cross attention are not covered"
        )


def _save(backend: Any, layer: Any, batch: Any, k: torch.Tensor, v: torch.Tensor) -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    # No scales: the pool takes the recipe's own.
    backend.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc), k, v, None, None)


def _read_layer(backend: Any, wrapper: Any, q: torch.Tensor, layer: Any, **named: Any) -> Any:
    count.engaged()
    buffers = backend.token_to_kv_pool.get_raw_kv_buffer(layer.layer_id)
    scales = backend.kv_cache_quant_method.get_bmm_scales(layer.layer_id)
    return read(wrapper, q, buffers, scales, layer.scaling, **named)


# --- FlashInfer's wrappers --------------------------------------------------------------------------------------------


def around_tensor_cores(
    original: Callable[..., bool], kv_cache_dtype: torch.dtype, *args: Any, **named: Any
) -> bool:
    """`should_use_tensor_core`: FlashInfer's other decode kernels know no FP4, whatever the heads and the environment say."""
    if kv_cache_dtype == torch.float4_e2m1fn_x2:
        return True
    return original(kv_cache_dtype, *args, **named)


def around_decode_plan(
    original: Callable[..., None], updater: Any, *args: Any, **named: Any
) -> None:
    """`FlashInferIndicesUpdaterDecode.call_begin_forward`: one block for all keys of a request and KV head."""
    named["disable_split_kv"], named["fixed_split_size"] = True, None
    original(updater, *args, **named)


def after_decode_wrappers(result: list[Any], backend: Any, *args: Any, **named: Any) -> None:
    """`FlashInferAttnBackend._create_decode_wrappers`, for a captured graph: what spare blocks find behind the plan."""
    for wrapper in result:
        clear_spare_blocks(wrapper)


def clear_spare_blocks(wrapper: Any) -> None:
    """Zeros in the page-locked buffer of plans; a graph's batch and rows are fixed, so every later plan writes the same part of it."""
    wrapper._pin_memory_int_workspace_buffer.zero_()


def after_backend(result: None, backend: Any, model_runner: Any, *args: Any, **named: Any) -> None:
    """`FlashInferAttnBackend.__init__`: plans for packed rows from here on, and the proof that they are read."""
    import flashinfer
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

    if flashinfer.__version__.partition("+")[0] != FLASHINFER_VERSION:
        refuse(f"made for FlashInfer {FLASHINFER_VERSION}, this is {flashinfer.__version__}")
    if backend.skip_prefill:
        refuse("drafts are not covered")
    for updater in (backend.indices_updater_prefill, backend.indices_updater_decode):
        updater.data_type = torch.uint8
    if type(backend) is FlashInferAttnBackend:
        prove_prefill(backend)
        if model_runner.decode_attention_backend_str == "flashinfer":
            prove_decode(backend)


# --- Proof at boot ----------------------------------------------------------------------------------------------------


class Proof:
    """Requests of `PROOF_LENGTHS` keys in slots that lie apart, written by the write, and what attention over them is.

    Args:
        query_heads, heads, dim: of the model on this rank.
        device: where the engine serves.
        page: slots that lie side by side and begin at a multiple of it; a request has whole pages.
    """

    def __init__(self, query_heads: int, heads: int, dim: int, device: Any, page: int = 1) -> None:
        # Named, since the engine may have made the GPU the default device.
        generator = torch.Generator("cpu").manual_seed(7)

        def normal(*shape: int) -> torch.Tensor:
            made = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            return made.bfloat16().to(device)

        counts = [-(-length // page) for length in PROOF_LENGTHS]
        order = (
            torch.randperm(sum(counts), generator=generator, device="cpu") + 1
        )  # page 0 is the engine's
        self.pages = list(order.split(counts))
        self.slots = [
            (pages[:, None] * page + torch.arange(page, device="cpu")).flatten()[:length].to(device)
            for pages, length in zip(self.pages, PROOF_LENGTHS, strict=True)
        ]
        slots = (sum(counts) + 1) * page
        widths = (dim // 2, dim // 2, dim // NVFP4_BLOCK, dim // NVFP4_BLOCK)
        self.buffers: Any = [
            torch.zeros(slots, heads, width, dtype=torch.uint8, device=device) for width in widths
        ]
        self.device, self.dim = device, dim
        self.q = normal(len(PROOF_LENGTHS), query_heads, dim) * 4
        k, v = (normal(sum(PROOF_LENGTHS), heads, dim) for _ in range(2))
        loc = torch.cat(self.slots)
        k_scale, v_scale = (
            torch.tensor([scale], dtype=torch.float32, device=device) for scale in PROOF_SCALES
        )
        kept = [torch.zeros_like(buffer, device="cpu") for buffer in self.buffers]
        nvfp4_write.reference(
            k.cpu(), v.cpu(), loc.cpu(), *kept,
            k_global_scale=PROOF_SCALES[0], v_global_scale=PROOF_SCALES[1],
        )  # fmt: skip
        wrong = 0
        try:
            store(tuple(self.buffers), loc, k, v, k_scale, v_scale)
            wrong = sum(int((a != b.cpu()).sum()) for a, b in zip(kept, self.buffers, strict=True))
        except Exception as error:
            refuse(_failed("the write kernel", error))
        if wrong:
            refuse(
                f"the write kernel gives {wrong} wrong bytes on this GPU with this Triton (a test at boot)"
            )
        keys, values = (
            dequantize_nvfp4(*pair) * scale
            for pair, scale in zip((kept[0::2], kept[1::2]), PROOF_SCALES, strict=True)
        )
        self.want = torch.stack(
            [
                _attention(q, keys[own.cpu()], values[own.cpu()])
                for q, own in zip(self.q.float().cpu(), self.slots, strict=True)
            ]
        )

    @property
    def sm_scale(self) -> float:
        """What logits are multiplied by, keys having been multiplied by their global scale."""
        return float(self.dim**-0.5)

    @property
    def indptr(self) -> torch.Tensor:
        """Where the keys of each request begin, int32 on the device."""
        ends = torch.tensor([0, *PROOF_LENGTHS], dtype=torch.int32).cumsum(0)
        return ends.to(self.device, torch.int32)

    @property
    def indices(self) -> torch.Tensor:
        """Slots of all requests, int32 on the device."""
        return torch.cat(self.slots).to(torch.int32)

    def compare(self, what: str, run: Callable[[], torch.Tensor]) -> None:
        """End the process with one line unless `run` gives the outputs [requests, query heads, D]."""
        try:
            # A fault of the kernel shows in this copy at the latest.
            got = run().float().cpu()
        except Exception as error:
            refuse(_failed(what, error))
        off = float((got - self.want).abs().max() / self.want.abs().max())
        if not off <= PROOF_ERROR:
            refuse(
                f"{what} reads an NVFP4 cache wrongly on this GPU: off by {off:.2g} of the largest output (a test at boot)"
            )
        logger.info(
            "%s: %s reads an NVFP4 cache, off by %.1e of the largest output",
            NVFP4_FLASHINFER,
            what,
            off,
        )


def _failed(what: str, error: Exception) -> str:
    said = str(error).strip().splitlines() or [""]
    return f"{what} does not run on this GPU: {type(error).__name__}: {said[0]} (a test at boot)"


def _attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One query [query heads, D] over keys and values [n, heads, D], fp32."""
    group = q.shape[0] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    weights = torch.einsum("hd,nhd->hn", q, keys).mul(q.shape[1] ** -0.5).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, values)


def _proof(backend: Any, page: int = 1) -> Proof:
    updater = backend.indices_updater_decode
    return Proof(
        updater.num_qo_heads,
        updater.num_kv_heads,
        updater.head_dim,
        backend.workspace_buffer.device,
        page,
    )


def prove_prefill(backend: Any) -> None:
    """A query a request behind all of its keys, through the wrapper that reads prefixes."""
    proof, updater = _proof(backend), backend.indices_updater_prefill
    (wrapper, *_) = backend.prefill_wrappers_paged
    rows = torch.arange(len(PROOF_LENGTHS) + 1, dtype=torch.int32, device=proof.device)

    def run() -> torch.Tensor:
        wrapper.begin_forward(
            rows, proof.indptr, proof.indices, torch.ones_like(rows[1:]),
            updater.num_qo_heads, updater.num_kv_heads, updater.head_dim, 1,
            q_data_type=updater.q_data_type, kv_data_type=updater.data_type, non_blocking=True,
        )  # fmt: skip
        out, _ = read(
            wrapper,
            proof.q,
            proof.buffers,
            PROOF_SCALES,
            proof.sm_scale,
            causal=False,
            with_lse=True,
        )
        return out

    proof.compare("FlashInfer's prefill", run)


def prove_decode(backend: Any) -> None:
    """The same by a decode wrapper as a CUDA graph has it, spare blocks included."""
    from sglang.srt.layers.attention.flashinfer_backend import BatchDecodeWithPagedKVCacheWrapper

    proof, updater = _proof(backend), backend.indices_updater_decode
    pages = torch.ones(len(PROOF_LENGTHS), dtype=torch.int32, device=proof.device)

    def run() -> torch.Tensor:
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            backend.workspace_buffer, "NHD", backend=backend.decode_backend, use_cuda_graph=True, use_tensor_cores=True,
            paged_kv_indptr_buffer=proof.indptr, paged_kv_indices_buffer=proof.indices, paged_kv_last_page_len_buffer=pages,
        )  # fmt: skip
        clear_spare_blocks(wrapper)
        wrapper.begin_forward(
            proof.indptr, proof.indices, pages,
            updater.num_qo_heads, updater.num_kv_heads, updater.head_dim, 1,
            data_type=updater.data_type, q_data_type=updater.q_data_type, non_blocking=True, disable_split_kv=True,
        )  # fmt: skip
        return read(wrapper, proof.q, proof.buffers, PROOF_SCALES, proof.sm_scale)

    proof.compare("FlashInfer's decode", run)


def after_trtllm_backend(
    result: None, backend: Any, model_runner: Any, *args: Any, **named: Any
) -> None:
    """`TRTLLMHAAttnBackend.__init__`: the proof that XQA reads what the write writes, through stock's own views and call."""
    from types import SimpleNamespace

    if model_runner.decode_attention_backend_str != "trtllm_mha":
        return
    proof = _proof(backend, backend.page_size)
    heads, dim = backend.indices_updater_decode.num_kv_heads, proof.dim
    layer = SimpleNamespace(tp_k_head_num=heads, tp_v_head_num=heads)
    table = torch.zeros(len(PROOF_LENGTHS), max(map(len, proof.pages)), dtype=torch.int32)
    for row, pages in zip(table, proof.pages, strict=True):
        row[: len(pages)] = pages
    k, v, *blocks = proof.buffers
    scales = [each.view(torch.float8_e4m3fn) for each in blocks]
    k_scale, v_scale = PROOF_SCALES

    def run() -> torch.Tensor:
        return backend._run_fixed_q_len_decode(
            proof.q,
            backend._reshape_paged_kv_cache(k, v, layer, dim // 2),
            table.to(proof.device),
            torch.tensor(PROOF_LENGTHS, dtype=torch.int32, device=proof.device),
            bmm1_scale=k_scale * proof.sm_scale,
            bmm2_scale=v_scale,
            window_left=-1,
            sinks=None,
            kv_cache_sf=backend._reshape_paged_kv_cache(*scales, layer, dim // NVFP4_BLOCK),
        )

    proof.compare("XQA", run)
