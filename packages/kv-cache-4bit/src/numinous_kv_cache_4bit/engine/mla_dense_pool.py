# SPDX-License-Identifier: Apache-2.0
"""The pool of ``kv4.mla_dense``: the engine's MLA pool with 352-byte rows, read through a bf16 shadow of one layer.

Imported where the engine builds its pool, not before: its class derives from the engine's.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, unwrap_write_loc

from numinous_kv_cache_4bit.engine.rows import KeptRows
from numinous_kv_cache_4bit.kernels.kv4_expand import kv4_expand
from numinous_tooling.formats import KV4, LATENT_DIM

COLUMNS = LATENT_DIM + KV4.rope_dim

_shadows: weakref.WeakValueDictionary[tuple[str, int], torch.Tensor] = weakref.WeakValueDictionary()


class DensePool(MLATokenToKVPool):
    """What the engine takes for a bf16 pool: `dtype` is bf16, and readers get bf16 rows.

    Within `attending` the rows that the batch sees are decoded into the shadow when the first of them is asked for. Outside of it nobody
    knows which rows are live, so what is returned has a shape and a dtype and no memory (device ``meta``): reading it fails.

    A draft's pool has as many slots, and its layers run in turn with the target's on one stream: it uses the target's shadow.

    Args:
        draft: whether it is a draft's.
        args, named: of `MLATokenToKVPool`.
    """

    rows: KeptRows
    """Set by the feature: encoder and decoder, refusals, counters."""

    native = False
    """Set by the feature: whether batches of few new tokens are attended without the shadow."""

    def __init__(self, *args: Any, draft: bool, **named: Any) -> None:
        self.draft = draft
        super().__init__(*args, **named)

    def _create_buffers(self) -> None:
        # What the base allocates: rows of bytes.
        self.kv_cache_dim, self.store_dtype = KV4.width, torch.uint8
        super()._create_buffers()
        slots = self.size + self.page_size
        key = (str(self.device), slots)
        if not self.draft:
            shape = (slots, 1, COLUMNS)
            self.shadow = torch.zeros(shape, dtype=self.dtype, device=self.device)
            _shadows[key] = self.shadow
        elif key in _shadows:
            self.shadow = _shadows[key]
        else:
            self.rows.refuse(f"no target's pool has the {self.size} slots of the draft's")
        self._unread = torch.empty_like(self.shadow, device="meta")
        self._batch: tuple[torch.Tensor, Any, int] | None = None
        self._decoded = False

    def _clear_buffers(self) -> None:
        super()._clear_buffers()
        del self.shadow

    def get_kv_size_bytes(self) -> int:
        return int(super().get_kv_size_bytes()) + (0 if self.draft else self.shadow.nbytes)

    # --- Write ---

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor | None,
        layer_id_override: int | None = None,
    ) -> None:
        """Latent and rope in one tensor, [T, 1, 576]; values are its first 512 columns and not looked at."""
        loc, _, _ = unwrap_write_loc(loc_info)
        both = cache_k.view(-1, 1, COLUMNS)
        self.set_mla_kv_buffer(
            layer, loc, both[..., :LATENT_DIM], both[..., LATENT_DIM:], layer_id_override
        )

    def _write_mla_kv_buffer(
        self,
        dst_buffer: torch.Tensor,
        loc: torch.Tensor,
        cache_k_nope: torch.Tensor,
        cache_k_rope: torch.Tensor,
    ) -> None:
        self._decoded = False
        parts = (part.to(torch.bfloat16) for part in (cache_k_nope, cache_k_rope))
        self.rows.around_write(super()._write_mla_kv_buffer, self, dst_buffer, loc, *parts)

    # --- Read ---

    @contextmanager
    def attending(self, table: torch.Tensor, batch: Any, extra: int) -> Iterator[None]:
        """One layer's attention over a batch.

        Args:
            table: the engine's `req_to_token`, int32 [requests, tokens].
            batch: `ForwardBatch`; its `req_pool_indices` and `seq_lens` are read on the device.
            extra: slots behind `seq_lens` that the batch may see.
        """
        self._batch, self._decoded = (table, batch, extra), False
        try:
            yield
        finally:
            self._batch = None

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        if self._batch is None:
            return self._unread
        if not self._decoded:
            table, batch, extra = self._batch
            self._expand(self.kv_buffer[layer_id - self.start_layer], table, batch, extra)
            self._decoded = True
            self.rows.count.engaged()
        return self.shadow

    def _expand(self, packed: torch.Tensor, table: torch.Tensor, batch: Any, extra: int) -> None:
        kv4_expand(packed, table, batch.req_pool_indices, batch.seq_lens, self.shadow, extra=extra)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.get_key_buffer(layer_id)[..., :LATENT_DIM]

    def get_mla_kv_buffer(
        self, layer: Any, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A cached prefix, in front of multi-head attention: rows of slots, without the shadow."""
        self.rows.count.engaged()
        return self.rows.read(self.kv_buffer[layer.layer_id - self.start_layer], loc, dst_dtype)
