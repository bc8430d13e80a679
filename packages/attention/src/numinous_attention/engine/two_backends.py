# SPDX-License-Identifier: Apache-2.0
"""The engine's Triton backend with a FlashAttention-3 backend inside: layers go to the one that takes them.

*Pools*    Both backends were built from one model runner: they share the pools and the table of requests. A layer's keys and values are
           written by the backend that attends, to the slots that the engine chose; windowed layers to the slots of their own pool, which
           each backend translates for itself.
*Metadata* Prepared by both, once a batch. Neither writes to what the other reads: FlashAttention-3 has page tables, Triton has indices.
*Graphs*   A captured decode holds the kernels of both. Before each replay both refill the buffers that their kernels read.
*Subclass* and not a wrapper: models look for the Triton backend by its class and leave a mask of image spans in its metadata. A batch with
           such a mask stays with Triton in all layers; FlashAttention-3 takes none.
*Windows*  FlashAttention-3 gives a decoding query the same window as prefill, W keys with its own. Stock's Triton decode cuts one key
           earlier (`update_sliding_window_buffer` counts the query's own key within W - 1), so answers are not stock's bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from numinous_attention.engine import mixed_tail
from numinous_attention.engine import per_layer_backend as ours


class TwoBackends(TritonAttnBackend):
    """See the module."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.flash = FlashAttentionBackend(model_runner)
        # It would plan for the heads of the model's config, which are those of layers that it does not take. Without a plan the
        # kernel makes one per layer, as for every layer with a window.
        self.flash._disable_scheduler_metadata_precompute = True
        self.attn_backend_list = [self.flash]
        if hasattr(self, "numinous_tail"):  # `attention.mixed_tail` has joined the Triton half
            mixed_tail.after_flash(self.flash, model_runner)
        fill = self.get_cuda_graph_seq_len_fill_value()
        if self.flash.get_cuda_graph_seq_len_fill_value() != fill:
            ours.refuse("the backends fill padded requests differently")

    # --- Metadata ---------------------------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Of an eager batch, for both."""
        super().init_forward_metadata(forward_batch)
        self.flash.init_forward_metadata(forward_batch)
        ours.count.engaged()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Buffers of captured decodes, of both."""
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.flash.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a capture or a replay, for both."""
        super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        self.flash.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        ours.count.engaged()

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Within a capture, for both."""
        super().init_forward_metadata_in_graph(forward_batch)
        self.flash.init_forward_metadata_in_graph(forward_batch)

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """The later of both."""
        return SharedReadEnds.max_of(
            (super().shared_read_ends(fm), self.flash.shared_read_ends(fm))
        )

    def on_after_cuda_graph_warmup(self) -> None:
        """Both."""
        super().on_after_cuda_graph_warmup()
        self.flash.on_after_cuda_graph_warmup()

    # --- Layers -----------------------------------------------------------------------------------------------------

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> Any:
        """Prefill of a layer, mixed with decoding requests or not."""
        forward = self.flash.forward_extend if self._goes_to_flash(layer, more) else super().forward_extend  # fmt: skip
        return forward(q, k, v, layer, forward_batch, save_kv_cache, **more)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> Any:
        """One token of every request in a layer."""
        forward = self.flash.forward_decode if self._goes_to_flash(layer, more) else super().forward_decode  # fmt: skip
        return forward(q, k, v, layer, forward_batch, save_kv_cache, **more)

    def _goes_to_flash(self, layer: Any, more: dict[str, Any]) -> bool:
        flash = ours.flash_takes(layer)
        if flash and self.forward_metadata.custom_mask is not None:
            ours.count.refused("the batch has a mask of its own (image spans)")
            flash = False
        elif flash and any(value is not None for value in more.values()):
            ours.count.refused("the layer has sinks or a score function")
            flash = False
        ours.count_layer(flash)
        return flash
