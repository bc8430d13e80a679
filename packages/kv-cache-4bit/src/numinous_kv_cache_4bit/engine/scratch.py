# SPDX-License-Identifier: Apache-2.0
"""Sparse attention over 4-bit rows through a scratch: the named rows become stock's FP8 rows, which the engine's FlashMLA reads.

*Gather*  One query row per request (decode, steps of a draft): every named slot is converted once into a row of its own, and the table
          becomes the identity with -1 kept (`kv4_gather`). Several (verification, prefill): rows of a request share most slots, so
          the distinct ones are converted once each and the table is renumbered (`kv4_compact`); a rule of shapes alone, so that a
          captured graph and every rank decide alike.
*Native*  With ``NUMINOUS_KV4_…_DECODE=native`` batches of few tokens a request read the rows themselves (`native`), and a scratch is left to
          prefill: none in a captured graph of decode or verification, none at all where prefill is ``flashmla_sparse``.
*Memory*  A scratch holds at most `SCRATCH_ROWS` rows: 344 MB of 656 bytes. Its size follows from shapes, in prefill also from the
          tokens of the batch, which the host knows: nothing synchronises. Batches that name more go in turns. It is a plain
          allocation: layers share it through the allocator, and a captured graph owns its own.
*Bytes*   a slot in decode: 352 read, 656 written, 656 read by the kernel: 1664 against 656 in stock's FP8 cache (288-byte rows: 288 +
          2 × 528 = 1344 against 528). The scratch path buys capacity with decode time; a kernel that reads the rows itself gives it
          back.
*Prefill* of 8192 rows behind 24,576 cached tokens, top-k 2048, 64 heads, derived per layer: 8192 × 2048 × 64 × 2 × (576 + 512) = 2.3 TFLOP,
          which is 5.7 ms at the 410 TFLOP/s that FlashMLA reports for this kernel and 3.6 ms at the 640 it reports for its bf16
          prefill (`flashmla_sparse`). Beside that: 16.8 million ids compacted, 0.5 ms, and 32,768 rows converted, 33 MB, 8 µs;
          `flashmla_sparse` converts them to bf16, 49 MB, 12 µs, and compacts nothing. So by bytes and operations `flashmla_sparse`
          is the better prefill where it can be had. `flashmla_sparse_q8` multiplies E4M3 without scales: at most twice as fast again,
          with the values rounded once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from numinous_kv_cache_4bit.engine import flashmla, native
from numinous_kv_cache_4bit.engine.rows import KeptRows
from numinous_kv_cache_4bit.kernels.codec import stock_fp8_of
from numinous_kv_cache_4bit.kernels.kv4_compact import kv4_compact
from numinous_kv_cache_4bit.kernels.kv4_gather import kv4_gather
from numinous_tooling.formats import RowFormat

SCRATCH_ROWS = 2**19
"""Rows that are converted at a time."""


class ScratchRows(KeptRows):
    """4-bit rows of a DSA model. The scratch holds the rows of stock's FP8 cache of the same model."""

    def __init__(self, feature: str, row: RowFormat, architectures: tuple[str, ...]) -> None:
        self.scratch = stock_fp8_of(row)
        self.native = False  # decode without a scratch; said at boot
        super().__init__(feature, row, architectures, self.scratch)

    def around_width(
        self, original: Callable[..., int], *, model_config: Any, kv_cache_dtype: torch.dtype
    ) -> int:
        """`calculate_mla_kv_cache_dim`: bytes of a row, for sizing and for allocation."""
        width = original(model_config=model_config, kv_cache_dtype=kv_cache_dtype)
        if (width, kv_cache_dtype) != (self.scratch.width, torch.float8_e4m3fn):
            self.refuse(
                f"stock's rows would be {width} wide ({kv_cache_dtype}), made in place of "
                f"{self.scratch.width}-byte FP8 rows; leave the DSA backend flags out"
            )
        return self.row.width

    def check_backend(self, backend: Any, prefill: tuple[str, ...]) -> None:
        """`DeepseekSparseAttnBackend.__init__`, also of a draft: end the process where the path below cannot serve it; `describe`."""
        from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

        if problem := flashmla.backend_problem(backend, self.row.width, prefill):
            self.refuse(problem)
        pool = getattr(backend.token_to_kv_pool, "full_kv_pool", backend.token_to_kv_pool)
        if type(pool) is not DSATokenToKVPool:
            self.refuse(f"the pool is a {type(pool).__name__}, made for DSATokenToKVPool")
        if backend.dsa_index_kpool == 1 and backend.dsa_index_topk % flashmla.BLOCK:
            self.refuse(
                f"index_topk {backend.dsa_index_topk}; FlashMLA takes multiples of {flashmla.BLOCK}"
            )
        self.describe(pool)
        self.native = native.chosen(self.feature)
        if self.native:
            native.prove(self, backend.num_q_heads, self.row.width, pool.kv_buffer[0].device)

    def around_attention(
        self,
        original: Callable[..., torch.Tensor],
        backend: Any,
        q_all: torch.Tensor,
        kv_cache: torch.Tensor,
        v_head_dim: int,
        sm_scale: float,
        layer: Any,
        metadata: Any,
        page_table_1: torch.Tensor,
    ) -> torch.Tensor:
        """`_forward_flashmla_kv`, of decode, verification, draft and prefill.

        Args:
            q_all: bf16 [rows, heads, 512 + rope].
            kv_cache: 1-byte type [slots, 1, width], the pool.
            page_table_1: int32 or int64 [rows, index_topk + index_kpool - 1], slots; -1 where there is none.

        Returns:
            bf16 [rows, 1, heads, 512]; zeros in rows without a slot.
        """
        rows = len(q_all)
        if not rows:
            return q_all.new_empty((0, 1, layer.tp_q_head_num, v_head_dim))
        self.count.engaged()
        if self.native and native.takes(metadata, rows):
            return native.attend(q_all, kv_cache, page_table_1, sm_scale)
        view = flashmla.View(backend, self.scratch.width)
        table = flashmla.padded_table(view, page_table_1, self.feature)
        pool = kv_cache.view(torch.uint8)
        shared = rows > len(metadata.cache_seqlens_int32)
        tokens = _tokens(metadata, q_all.device)
        most = min(table.numel(), len(pool), tokens)
        turn = rows if most <= SCRATCH_ROWS else max(1, SCRATCH_ROWS // table.shape[1])
        parts = []
        for begin in range(0, rows, turn):
            named = table[begin : begin + turn]
            cache, positions = (
                self._distinct(pool, named, tokens) if shared else self._each(pool, named)
            )
            parts.append(
                flashmla.attend(
                    original,
                    view,
                    q_all[begin : begin + turn],
                    cache,
                    v_head_dim,
                    sm_scale,
                    layer,
                    metadata,
                    positions,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _each(self, pool: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A scratch with a row for every entry of the table, and the table over it."""
        scratch = self._scratch(table.numel(), pool.device)
        positions = torch.empty_like(table)
        kv4_gather(pool, table, to="fp8", out=scratch, positions=positions)
        return scratch[:, None], positions

    def _distinct(
        self, pool: torch.Tensor, table: torch.Tensor, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A scratch with a row for every distinct slot of the table, of which there are at most `tokens`, and the table over it."""
        compacted = kv4_compact(table, len(pool))
        bound = min(len(compacted.rows), tokens)
        if bound < len(compacted.rows):
            torch._assert_async(
                compacted.count <= bound,
                f"{self.feature}: a batch names more slots than it has tokens",
            )
        scratch = self._scratch(bound, pool.device)
        kv4_gather(
            pool, compacted.rows[:bound], to="fp8", out=scratch[:bound], count=compacted.count
        )
        return scratch[:, None], compacted.positions

    def _scratch(self, rows: int, device: torch.device) -> torch.Tensor:
        """Whole pages; rows that nobody names stay unwritten."""
        pages = -(-rows // flashmla.BLOCK)
        shape = (pages * flashmla.BLOCK, self.scratch.width)
        return torch.empty(shape, dtype=torch.uint8, device=device)


def _tokens(metadata: Any, device: torch.device) -> int:
    """How many slots a batch can name at most, where the host knows; otherwise more than there are.

    Only prefill's metadata says so: those of decode and verification have `max_seq_len_q` 1 and count without the draft's tokens. A
    graph that is being captured serves other batches, too.
    """
    total = metadata.seq_lens_sum if metadata.max_seq_len_q > 1 else None
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return 2**31 if total is None or capturing else max(int(total), 1)
