# SPDX-License-Identifier: Apache-2.0
"""Rows that a feature keeps in the engine's MLA pools: their width, how they are written and read, what is said of them at boot.

*Width*   The row's width is its type tag (`numinous_tooling.formats`). The engine asks one function for it, when it sizes the pool and when
          it allocates it, and keeps rows of another width than the plain one as bytes.
*Write*   Every writer of an MLA pool of the engine ends in `MLATokenToKVPool._write_mla_kv_buffer` but `set_kv_buffer`, which refuses
          such pools itself.
*Moves*   What copies whole rows does not know what is in them and stays stock's: `move_kv_cache`, `get_cpu_copy`, `load_cpu_copy`,
          `get_contiguous_buf_infos`, `get_kv_size_bytes`. Scales lie in the row, so none of these can forget them.
*Ranks*   Every rank of tensor parallelism keeps the same rows; nothing here decides what runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from numinous_kv_cache_4bit.engine import flashmla
from numinous_kv_cache_4bit.kernels.kv4_gather import kv4_gather
from numinous_kv_cache_4bit.kernels.kv4_write import kv4_write
from numinous_tooling.formats import LATENT_DIM, RowFormat
from numinous_tooling.patching.counters import counters
from numinous_tooling.patching.feature import flag_of

INDEX_ROW = 132  # bytes: 128 E4M3 values and an fp32 scale

logger = logging.getLogger(__name__)


def bytes_per_token(row: int, layers: int, index_layers: int = 0) -> int:
    """KV bytes of a token: a row in every full-attention layer, an index key in those that have an indexer of their own."""
    return row * layers + INDEX_ROW * index_layers


def bf16_width(row: RowFormat) -> int:
    """Bytes of a row of the same model in stock's bf16 cache."""
    return 2 * (LATENT_DIM + row.rope_dim)


class KeptRows:
    """One feature's rows. Its methods are what the feature's hooks call.

    Args:
        feature: id of the feature.
        row: format of its rows.
        architectures: that it is made for, the first one to be named; drafts among them.
        stock: rows of stock's FP8 cache of these models on this GPU, for the boot line; None where stock has none.
    """

    def __init__(
        self,
        feature: str,
        row: RowFormat,
        architectures: tuple[str, ...],
        stock: RowFormat | None = None,
    ) -> None:
        self.feature, self.row = feature, row
        self.architectures, self.stock = architectures, stock
        self.count = counters(feature)
        self._described = False

    def refuse(self, reason: str) -> None:
        """End the process with one line."""
        raise SystemExit(f"{self.feature}: {reason}")

    # --- Boot ---

    def before_pool_sizing(self, configurator: Any) -> None:
        """`create_memory_pool_configurator`, which every model passes: end the process if this launch is not covered."""
        self.check_launch(
            configurator.model_config.hf_config.architectures[0], configurator.kv_cache_dtype
        )
        # Other FlashMLA versions may read rows of a width as another format, without a word.
        version = flashmla.kernel_version()
        if version != flashmla.KERNEL_VERSION:
            self.refuse(
                f"reads rows with the FlashMLA of {flashmla.KERNEL_DISTRIBUTION} {flashmla.KERNEL_VERSION}, "
                f"and {version or 'none'} is installed"
            )

    def check_launch(self, architecture: str, cache: torch.dtype, asked: str = "fp8_e4m3") -> None:
        """End the process unless this model, this cache dtype (`asked`: the flag's) and this GPU are what the feature is made for."""
        if architecture not in self.architectures:
            self.refuse(
                f"made for {self.architectures[0]}, this model is {architecture}; unset {flag_of(self.feature)}"
            )
        if asked != "fp8_e4m3" or cache != torch.float8_e4m3fn:
            self.refuse(f"the KV cache is {cache}: add --kv-cache-dtype fp8_e4m3")
        if (arch := _arch()) != "sm90":
            self.refuse(f"made for Hopper (sm90), this is {arch}; unset {flag_of(self.feature)}")

    def describe(self, pool: Any, once: int = 0) -> None:
        """Say once how many tokens fit, and how many rows of stock's would fit into the same memory.

        Args:
            once: bytes of a token that the feature keeps once, for all layers together.
        """
        if self._described:
            return
        self._described = True
        from sglang.srt.utils import log_info_on_rank0

        layers = pool.layer_num
        index_layers = layers - sum(pool.skip_topk_layers) if pool.use_dsa else 0
        ours = bytes_per_token(self.row.width, layers, index_layers) + once
        others = [("bf16", bf16_width(self.row))]
        if self.stock is not None:
            others.insert(0, ("stock's FP8", self.stock.width))
        told = []
        for name, width in others:
            each = bytes_per_token(width, layers, index_layers)
            told.append(
                f"{pool.size * ours // each} {name} rows ({each} bytes, {each / ours:.3f} x)"
            )
        log_info_on_rank0(
            logger,
            f"{self.feature}: {pool.size} tokens in {self.row.width}-byte rows, {ours} bytes per token; "
            f"this memory would hold {' or '.join(told)}",
        )

    # --- The pool ---

    def around_write(
        self,
        original: Callable[..., None],
        pool: Any,
        dst_buffer: torch.Tensor,
        loc: torch.Tensor,
        cache_k_nope: torch.Tensor,
        cache_k_rope: torch.Tensor | None,
    ) -> None:
        """`MLATokenToKVPool._write_mla_kv_buffer`: quantise and write; slot 0, which takes padding, stays as it was allocated.

        Args:
            dst_buffer: uint8 [slots, 1, width], the pool of one layer.
            loc: int32 or int64 [T].
            cache_k_nope: bf16 [≥ T, 1, 512]; rows behind the T-th are padding, as stock's writer takes them.
            cache_k_rope: bf16 [≥ T, 1, 64], or None or [.., 0].
        """
        self._check_pool(pool)
        tokens = len(loc)
        rope = None if cache_k_rope is None else cache_k_rope[:tokens]
        kv4_write(dst_buffer, loc, cache_k_nope[:tokens], rope)

    def around_read(
        self,
        original: Callable[..., Any],
        pool: Any,
        layer: Any,
        loc: torch.Tensor,
        dst_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`MLATokenToKVPool.get_mla_kv_buffer`: latent [n, 1, 512] and rope [n, 1, 64] (None without) of slots, bf16 unless named."""
        self._check_pool(pool)
        return self.read(pool.get_key_buffer(layer.layer_id), loc, dst_dtype)

    def read(
        self, cache: torch.Tensor, loc: torch.Tensor, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Latent [n, 1, 512] and rope [n, 1, 64] (None without) of slots of a layer, contiguous, bf16 unless named."""
        both = self.dequantize(cache, loc)[:, None].to(dtype or torch.bfloat16)
        latent = both[..., :LATENT_DIM].contiguous()
        return latent, both[..., LATENT_DIM:].contiguous() if self.row.rope_dim else None

    def around_values(self, original: Callable[..., Any], pool: Any, layer_id: int) -> Any:
        """`MLATokenToKVPool.get_value_buffer`: a part of packed rows is no values, and a reader could not know."""
        raise RuntimeError(
            f"{self.feature}: {self.row.width}-byte rows have no view of their values; get_mla_kv_buffer dequantises"
        )

    def dequantize(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Rows of slots, bf16 [n, 512 + rope], exactly; zeros for ids that are none of the pool's.

        Args:
            cache: 1-byte type [slots, 1, width].
            slots: int32 or int64 [n].
        """
        return kv4_gather(cache.view(torch.uint8), slots, to="bf16")

    def _check_pool(self, pool: Any) -> None:
        if pool.kv_cache_dim != self.row.width:
            raise RuntimeError(
                f"{self.feature}: a pool with rows of {pool.kv_cache_dim} bytes, made for {self.row.width}"
            )


def _arch() -> str:
    if not torch.cuda.is_available():
        return "a machine without a GPU"
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"
