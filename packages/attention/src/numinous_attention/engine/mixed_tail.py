# SPDX-License-Identifier: Apache-2.0
"""Adapter of ``attention.mixed_tail``: the trailing one-token requests of a prefill batch attend as a decode does.

*Batch*   With `--enable-mixed-chunk` the scheduler appends every decoding request to a chunk of prefill, one token each. Stock runs them all as prefill. Here the
          batch has a head, which stays prefill, and a tail: the requests of one token behind the last longer one, new prompts among them.
*Split*   Beside the metadata that stock prepares for the batch there are two more, made of its tensors: of the head (the same tables, cut short) and of the tail, as
          stock's own decode would have prepared it. Rows of the head keep their kernel, rows of the tail go through `forward_decode` of the same backend, each
          with its own slots, into one output.
*Syncs*   None beyond stock's: all sizes come from the lengths that the batch has on the host.
*Windows* A query of the tail sees the keys that prefill shows it: `sliding_window_size` before its own. Stock's Triton decode takes one fewer (fix 0080), so the tail's
          windows are made here, the same with the fix applied and without.
*Bits*    Not stock's: another kernel, whose sums run in another order.
*Ranks*   The split depends on the lengths of the batch alone, which all ranks share; nothing is communicated in between.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from numinous_attention.options import MIXED_TAIL
from numinous_tooling.patching.counters import counters
from numinous_tooling.patching.feature import flag_of

count = counters(MIXED_TAIL)


def refuse(reason: str) -> None:
    """End the process with one line."""
    raise SystemExit(f"{MIXED_TAIL}: {reason}; unset {flag_of(MIXED_TAIL)}")


# --- Boot -----------------------------------------------------------------------------------------------------------


def after_triton(result: None, backend: Any, model_runner: Any, *args: Any, **named: Any) -> None:
    """`TritonAttnBackend.__init__`."""
    judge_backend(backend, model_runner)
    if backend.dcp_size > 1:
        refuse("decode context parallelism is not covered")
    if backend.enable_deterministic:
        refuse(
            "deterministic inference is not covered: it runs prefill and decode through one kernel"
        )


def after_flash(backend: Any, model_runner: Any) -> None:
    """A FlashAttention-3 backend, as the engine's registry builds it.

    Its module cannot be imported everywhere that the Triton backend serves, so the hooks are on the object and not on the class.
    """
    judge_backend(backend, model_runner)
    if backend.fa_impl_ver != 3:
        refuse(
            f"FlashAttention-{backend.fa_impl_ver} is not covered; FlashAttention-3 and Triton are"
        )
    if backend.num_splits == 1:
        refuse("deterministic inference is not covered: its decode must not split keys")
    if backend.has_local_attention or backend.is_prefill_aware_swa:
        refuse("models with chunked or prefill-aware local attention are not covered")
    if backend.fa_skip_kv_cache:
        refuse("embedding models skip the cache that a decode reads")
    if backend.attn_cp_size > 1:
        refuse("context parallelism is not covered")
    prepare, stock = backend.init_forward_metadata, backend.forward_extend

    def init_forward_metadata(forward_batch: Any) -> None:
        prepare(forward_batch)
        split_flash(backend, forward_batch)

    def forward_extend(*given: Any, **named: Any) -> Any:
        made = extend(stock, backend.forward_decode, backend, *given, **named)
        return made.flatten(1)  # as its own, whatever the shape of q

    backend.init_forward_metadata, backend.forward_extend = init_forward_metadata, forward_extend


def judge_backend(backend: Any, runner: Any) -> None:
    """End the process where no batch is ever mixed, or a tail would not be what a decode is."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.runtime_context import get_schedule, get_spec

    backend.numinous_tail = None
    schedule, model = get_schedule(), runner.model_config
    if not schedule.enable_mixed_chunk or (schedule.chunked_prefill_size or 0) <= 0:
        refuse(
            "this launch mixes no decodes into prefill: add --enable-mixed-chunk, and leave chunked prefill on"
        )
    if get_spec().speculative_algorithm is not None or runner.is_draft_worker:
        refuse("speculative decoding is not covered")
    if backend.use_mla:
        refuse("made for MHA and GQA models, this one has MLA")
    if model.is_encoder_decoder:
        refuse("models with cross attention are not covered")
    if mambaish_config(model) is not None:
        refuse("models with linear attention are not covered (untested)")
    if backend.kv_index_translator.is_translating:
        refuse("unified memory is not covered: its slots have other names")
    if runner.kv_cache_dtype not in (
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float8_e4m3fn,
    ):
        refuse(
            f"the KV cache is {runner.kv_cache_dtype}; the model's own type and FP8 E4M3 are covered"
        )


# --- Metadata -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Split:
    """A batch in two.

    Args:
        whole: stock's metadata of the batch; the split holds while the backend has this very object.
        head: of the first `requests` requests, which have `rows` tokens.
        tail: of the others, which have `tokens` tokens.
    """

    whole: Any
    head: Any
    tail: Any
    requests: int
    rows: int
    tokens: int
    batch: Any = None
    halves: tuple[Any, Any] = (None, None)

    def of(self, batch: Any) -> tuple[Any, Any]:
        """The batch that layers are called with, as its head and its tail; one copy of each for all layers."""
        if self.batch is not batch:
            self.batch = batch
            self.halves = (
                part_of(batch, slice(0, self.requests), batch.forward_mode),
                part_of(batch, slice(self.requests, None), _decode_mode()),
            )
        return self.halves


def first_of_tail(batch: Any) -> int | None:
    """How many requests stand before the trailing ones of one token; None where the batch has no tail or is not plain prefill."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    if batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
        return None
    lengths = batch.extend_seq_lens_cpu
    if lengths is None or batch.extend_prefix_lens_cpu is None:
        count.refused("no_host_lengths")
        return None
    first = len(lengths)
    while first and lengths[first - 1] == 1:
        first -= 1
    if first == len(lengths):
        return None
    if len(lengths) != batch.batch_size or batch.spec_info is not None:
        count.refused("padded" if batch.spec_info is None else "speculative")
        return None
    return first


def part_of(batch: Any, requests: slice, mode: Any) -> Any:
    """A copy of a batch that holds some of its requests; slots of tokens and the output are set layer by layer."""
    part = copy.copy(batch)
    part.forward_mode = mode
    for name in ("req_pool_indices", "seq_lens", "extend_seq_lens", "extend_prefix_lens"):
        setattr(part, name, getattr(batch, name)[requests])
    part.extend_seq_lens_cpu = list(batch.extend_seq_lens_cpu[requests])
    part.extend_prefix_lens_cpu = list(batch.extend_prefix_lens_cpu[requests])
    part.seq_lens_sum = sum(part.extend_seq_lens_cpu) + sum(part.extend_prefix_lens_cpu)
    part.batch_size = len(part.extend_seq_lens_cpu)
    return part


def _decode_mode() -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return ForwardMode.DECODE


def cut(tensor: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    """Some rows of what the metadata may not have."""
    return None if tensor is None else tensor[part]


def around_triton_metadata(original: Callable[..., None], backend: Any, batch: Any) -> None:
    """`TritonAttnBackend.init_forward_metadata`: stock's, then the two parts of it."""
    original(backend, batch)
    backend.numinous_tail = None
    if (first := first_of_tail(batch)) is None:
        return
    whole, rows = backend.forward_metadata, sum(batch.extend_seq_lens_cpu[:first])
    upto = slice(0, first + 1)
    head = dataclasses.replace(
        whole,
        kv_indptr=whole.kv_indptr[upto],
        qo_indptr=whole.qo_indptr[upto],
        window_kv_indptr=cut(whole.window_kv_indptr, upto),
        window_kv_offsets=cut(whole.window_kv_offsets, slice(0, first)),
        swa_out_cache_loc=cut(whole.swa_out_cache_loc, slice(0, rows)),
    )
    part = part_of(batch, slice(first, None), _decode_mode())
    part.out_cache_loc = batch.out_cache_loc[rows:]
    tail = _triton_tail(original, backend, part)
    backend.numinous_tail = Split(whole, head, tail, first, rows, part.batch_size)


def _triton_tail(original: Callable[..., None], backend: Any, tail: Any) -> Any:
    """Metadata of a decode of the tail.

    Stock's, but for the buffer of offsets, which the batch's own metadata still holds, and for the windows, which stock sizes by reading the GPU.
    """
    kept = backend.forward_metadata, backend.kv_indptr, backend.sliding_window_size
    backend.kv_indptr = kept[1].new_zeros(tail.batch_size + 1)
    backend.sliding_window_size = None
    try:
        original(backend, tail)
        made = backend.forward_metadata
    finally:
        backend.forward_metadata, backend.kv_indptr, backend.sliding_window_size = kept
    window = backend.sliding_window_size
    if window is None or window <= 0:
        return made
    keys = tail.seq_lens.clamp(max=window + 1)  # with the query's own
    total = sum(min(prefix, window) + 1 for prefix in tail.extend_prefix_lens_cpu)
    indptr = made.kv_indptr.new_zeros(tail.batch_size + 1)
    indptr[1:] = torch.cumsum(keys, dim=0)
    ids = torch.empty(total, dtype=torch.int64, device=backend.device)
    backend.kv_index_translator.fill_packed_read_stream(
        req_pool_indices=tail.req_pool_indices,
        seq_lens=keys,
        indptr=indptr,
        total_tokens=total,
        out=ids,
        kv_start_idx=tail.seq_lens - keys,
    )
    if backend.use_sliding_window_kv_pool:
        ids = backend.token_to_kv_pool.translate_loc_from_full_to_swa(ids)
    return dataclasses.replace(made, window_kv_indptr=indptr, window_kv_indices=ids)


def split_flash(backend: Any, batch: Any) -> None:
    """FlashAttention-3: page tables have a row per request, so both parts are rows of stock's."""
    backend.numinous_tail = None
    if (first := first_of_tail(batch)) is None:
        return
    whole, rows = backend.forward_metadata, sum(batch.extend_seq_lens_cpu[:first])
    upto = slice(0, first + 1)
    head = dataclasses.replace(
        whole,
        cache_seqlens_int32=whole.cache_seqlens_int32[:first],
        cu_seqlens_q=whole.cu_seqlens_q[upto],
        cu_seqlens_k=whole.cu_seqlens_k[upto],
        page_table=whole.page_table[:first],
        swa_page_table=cut(whole.swa_page_table, slice(0, first)),
        swa_out_cache_loc=cut(whole.swa_out_cache_loc, slice(0, rows)),
    )
    tokens = batch.batch_size - first
    longest = 1 + max(batch.extend_prefix_lens_cpu[first:])
    lengths = whole.cache_seqlens_int32[first:]
    each = torch.arange(tokens + 1, dtype=torch.int32, device=lengths.device)
    # The kernel plans its splits by the width of the table.
    table = (slice(first, None), slice(0, -(-longest // backend.page_size)))
    tail = type(whole)(
        cache_seqlens_int32=lengths,
        max_seq_len_q=1,
        max_seq_len_k=longest,
        cu_seqlens_q=each,
        page_table=whole.page_table[table],
        swa_page_table=None if whole.swa_page_table is None else whole.swa_page_table[table],
        swa_out_cache_loc=cut(whole.swa_out_cache_loc, slice(rows, None)),
        scheduler_metadata=backend._compute_scheduler_metadata(tokens, longest, lengths, each),
    )
    backend.numinous_tail = Split(whole, head, tail, first, rows, tokens)


# --- Layers ---------------------------------------------------------------------------------------------------------


def around_triton_extend(
    original: Callable[..., Any], backend: Any, *given: Any, **named: Any
) -> Any:
    """`TritonAttnBackend.forward_extend`."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    # Of the class: a subclass may choose between backends there, which is done for this call.
    decode = functools.partial(TritonAttnBackend.forward_decode, backend)
    return extend(functools.partial(original, backend), decode, backend, *given, **named)


def extend(
    original: Callable[..., Any],
    decode: Callable[..., Any],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    **more: Any,
) -> Any:
    """A layer of a batch: its head by `original`, its tail by `decode`, into one output."""
    split = backend.numinous_tail
    if (
        split is None or backend.forward_metadata is not split.whole
    ):  # no tail, or a graph's metadata
        return original(q, k, v, layer, forward_batch, save_kv_cache, **more)
    if reason := uncovered(backend, split, q, layer, more):
        count.refused(reason)
        return original(q, k, v, layer, forward_batch, save_kv_cache, **more)
    out = forward_batch._attn_output
    if out is None:
        wide = (len(q), layer.tp_q_head_num * layer.v_head_dim)
        out = q.new_empty(q.shape if layer.qk_head_dim == layer.v_head_dim else wide)
    parts = zip(split.of(forward_batch), (split.head, split.tail), (original, decode), strict=True)
    for number, (batch, metadata, forward) in enumerate(parts):
        rows = slice(split.rows, None) if number else slice(0, split.rows)
        if not batch.batch_size:
            continue  # every request has one token
        batch.out_cache_loc = forward_batch.out_cache_loc[rows]
        batch._attn_output = there = out[rows]
        backend.forward_metadata = metadata
        try:
            made = forward(q[rows], cut(k, rows), cut(v, rows), layer, batch, save_kv_cache, **more)
        finally:
            backend.forward_metadata = split.whole
        if made.data_ptr() != there.data_ptr():
            there.copy_(made.view(there.shape))
    count.engaged()
    return out


def uncovered(
    backend: Any, split: Split, q: torch.Tensor, layer: Any, more: dict[str, Any]
) -> str | None:
    """Why a layer of a batch with a tail stays in stock, as a counter's reason; None where it does not."""
    from sglang.srt.layers.radix_attention import AttentionType

    if getattr(split.whole, "custom_mask", None) is not None:
        return "mask"  # spans of images, set behind the metadata
    if any(value is not None for name, value in more.items() if name != "sinks"):
        return "arguments"  # a score function, for one, may ask for the row of a query
    if layer.attn_type is not AttentionType.DECODER or layer.is_cross_attention:
        return "attention_type"
    if layer.xai_temperature_len > 0:
        return "xai_temperature"  # a decode with a window does not know its position
    if len(q) != split.rows + split.tokens:
        return "padded"
    window = layer.sliding_window_size
    if window is not None and window > -1 and window != backend.sliding_window_size:
        return "window"  # indices are made for one window
    return None
