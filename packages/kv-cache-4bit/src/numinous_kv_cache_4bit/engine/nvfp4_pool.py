# SPDX-License-Identifier: Apache-2.0
"""The pools of ``kv4.nvfp4_triton``: the engine's MHA pool with packed E2M1 and E4M3 block scales in buffers of their own, keys in FP8 if so wanted.

Imported where the engine builds its pool, not before: the classes derive from the engine's.

Whatever copies slots carries data and scales: moves, host copies of retracted requests. Registration for another server is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    MHATokenToKVPool,
    unwrap_write_loc,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from numinous_kv_cache_4bit.engine import nvfp4_triton as feature
from numinous_kv_cache_4bit.kernels import nvfp4_write
from numinous_kv_cache_4bit.kernels.codec import ScaleChoice
from numinous_kv_cache_4bit.options import NVFP4_TRITON
from numinous_tooling.numerics import NVFP4_BLOCK, dequantize_nvfp4

HostCopy = list[list[list[torch.Tensor]]]
Buffers = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]
"""Of a layer: keys, values, scales of keys, which FP8 has none of, and scales of values."""


class Nvfp4Pool(MHATokenToKVPool):
    """What the engine takes for a pool of `dtype`.

    Per layer `k_buffer` and `v_buffer` are uint8 [slots, heads, D / 2], low nibble = even column, `k_scale_buffer` and `v_scale_buffer` uint8
    [slots, heads, D / 16], E4M3 codes; with FP8 keys `k_buffer` is [slots, heads, D], E4M3 codes, and `k_scale_buffer` has no columns. What readers of `get_key_buffer` get has the shape and dtype of a plain pool and no memory
    (device ``meta``): reading it fails. Only with a shadow, and within `attending`, it is the shadow.

    Args:
        shadowed: whether the backend reads whole buffers by slot.
        fp8_keys: whether keys are FP8.
        scale_choice: of NVFP4's block scales, "amax" or "mse".
        args, named: of `MHATokenToKVPool`.
    """

    def __init__(
        self, *args: Any, shadowed: bool, fp8_keys: bool, scale_choice: ScaleChoice, **named: Any
    ) -> None:
        self.shadowed, self.fp8_keys, self.scale_choice = shadowed, fp8_keys, scale_choice
        super().__init__(*args, **named)
        # The other way needs a warm-up launch; this one carries scales too.
        self.use_native_move_kv_cache = True

    def _create_buffers(self) -> None:
        if self.kv_cache_layout != "nhd" or self.use_hnd:
            feature.refuse("SGLANG_USE_HND_KVCACHE and other layouts are not covered")
        if torch.device(self.device).type == "cuda":  # elsewhere the specification itself writes
            prove_write(self.head_num, self.head_dim, self.fp8_keys, self.scale_choice, self.device)
        slots = self.size + self.page_size
        shape = (slots, self.head_num, self.head_dim)
        packed, scales = self.head_dim // 2, self.head_dim // NVFP4_BLOCK
        widths = (packed, packed, scales, scales)
        if self.fp8_keys:
            widths = (self.head_dim, packed, 0, scales)
        self.k_buffer, self.v_buffer, self.k_scale_buffer, self.v_scale_buffer = (
            [
                torch.zeros((*shape[:2], width), dtype=torch.uint8, device=self.device)
                for _ in range(self.layer_num)
            ]
            for width in widths
        )
        self.dq_k_buffer = self.dq_v_buffer = None
        self.store_dtype = torch.uint8
        self.shadow: list[torch.Tensor] = []
        if self.shadowed:
            self.shadow = [
                torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2)
            ]
        self._unread = torch.empty(shape, dtype=self.dtype, device="meta")
        self._batch: tuple[int, torch.Tensor, Any] | None = None
        self._in_shadow = False
        self._kv_buffer_descs = self._build_kv_buffer_descs()
        self._init_data_ptrs_and_strides()

    def _clear_buffers(self) -> None:
        super()._clear_buffers()
        del self.shadow

    def get_kv_size_bytes(self) -> tuple[int, int]:
        k, v = super().get_kv_size_bytes()
        shadow = self.shadow[0].nbytes if self.shadow else 0
        return k + shadow, v + shadow

    @property
    def attended(self) -> Buffers:
        """Those of the layer that is attended to."""
        if self._batch is None:
            raise RuntimeError(f"{NVFP4_TRITON}: a read outside of attention")
        feature.count.engaged()
        return self._of(self._batch[0])

    def _of(self, layer_id: int) -> Buffers:
        at = layer_id - self.start_layer
        return (
            self.k_buffer[at],
            self.v_buffer[at],
            None if self.fp8_keys else self.k_scale_buffer[at],
            self.v_scale_buffer[at],
        )

    def _kept(self, layer_id: int) -> list[torch.Tensor]:
        return [buffer for buffer in self._of(layer_id) if buffer is not None]

    # --- Write ---

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
        layer_id_override: int | None = None,
        dcp_kv_mask: torch.Tensor | None = None,
    ) -> None:
        """Quantise from bf16 and write; slot 0, which takes padding, and ids that are none of the pool's are skipped.

        Args:
            loc_info: int32 or int64 [T], alone or with what the engine wraps it in.
            cache_k, cache_v: [T, heads, D], rounded to bf16 first; left as they are.
            k_scale, v_scale: None, or 1 as the engine gives layers of any FP8 checkpoint; others do not come here. Tensors, so what
                the layer has them as on the host is looked at.
        """
        given = k_scale is not None or v_scale is not None
        scales = {getattr(layer, name, None) for name in ("k_scale_float", "v_scale_float")}
        if dcp_kv_mask is not None or (given and scales != {1.0}):
            raise RuntimeError(f"{NVFP4_TRITON}: scales of a checkpoint and dcp are not covered")
        loc, _, _ = unwrap_write_loc(loc_info)
        self._in_shadow = False
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        write(self._of(layer_id), loc, cache_k, cache_v, self.scale_choice)

    def set_kv_buffer_prefix_valid(self, *args: Any, **named: Any) -> None:
        raise RuntimeError(
            f"{NVFP4_TRITON}: commits of a draft's block are not covered (DFLASH, DSpark)"
        )

    # --- Read ---

    @contextmanager
    def attending(self, layer_id: int, table: torch.Tensor, batch: Any) -> Iterator[None]:
        """One layer's attention over a batch.

        Args:
            table: the engine's `req_to_token`, int32 [requests, tokens].
            batch: `ForwardBatch`.
        """
        self._batch, self._in_shadow = (layer_id, table, batch), False
        try:
            yield
        finally:
            self._batch = None

    def decoded(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of slots of the layer that is attended to, [n, heads, D] in `dtype`; at least one row.

        Args:
            slots: int32 or int64 [n], all within the pool.
        """
        if not len(slots):
            slots = torch.zeros(1, dtype=torch.int64, device=self.device)
        return read(self.attended, slots, self.dtype)

    def _shadow_of(self, layer_id: int) -> list[torch.Tensor]:
        if self._batch is None or not self.shadow:
            return [self._unread] * 2
        attended, table, batch = self._batch
        if attended != layer_id:
            raise RuntimeError(
                f"{NVFP4_TRITON}: layer {attended} reads the cache of layer {layer_id}"
            )
        if not self._in_shadow:
            lengths = batch.seq_lens.tolist()
            rows = table[batch.req_pool_indices]
            slots = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
            for shadow, values in zip(self.shadow, self.decoded(slots.long()), strict=True):
                shadow[slots.long()] = values[: len(slots)]
            self._in_shadow = True
        return self.shadow

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self._shadow_of(layer_id)[0]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self._shadow_of(layer_id)[1]

    # --- Copies ---

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> HostCopy:
        """Data and scales of slots: by layer, by chunk of slots, keys, values and the scales there are."""
        chunks = indices.split(self.cpu_offloading_chunk_size)
        return [
            [[each[chunk].cpu() for each in self._kept(self.start_layer + at)] for chunk in chunks]
            for at in range(self.layer_num)
        ]

    def load_cpu_copy(
        self,
        kv_cache_cpu: HostCopy,
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: Any = None,
    ) -> None:
        """Write what `get_cpu_copy` gave, at other slots."""
        chunks = indices.split(self.cpu_offloading_chunk_size)
        for at, layer in enumerate(kv_cache_cpu):
            for chunk, copies in zip(chunks, layer, strict=True):
                for buffer, copy in zip(self._kept(self.start_layer + at), copies, strict=True):
                    buffer[chunk] = copy.to(buffer.device)

    def get_contiguous_buf_infos(self) -> Any:
        raise RuntimeError(f"{NVFP4_TRITON}: disaggregation is not covered")


class Nvfp4SwaPool(SWAKVPool):
    """That of models with sliding windows: one `Nvfp4Pool` for full and one for sliding layers, each with slot ids of its own.

    The engine translates ids for sliding layers before it writes or attends, and its own code moves and copies whole slots of both pools.

    Args:
        fp8_keys, scale_choice: of `Nvfp4Pool`.
        named: of `SWAKVPool`, the geometry of sliding layers (`swa_head_num`, `swa_head_dim`) among them.
    """

    def __init__(self, *, fp8_keys: bool, scale_choice: ScaleChoice, **named: Any) -> None:
        self.fp8_keys, self.scale_choice = fp8_keys, scale_choice
        self._pool: Nvfp4Pool | None = None
        super().__init__(
            **named,
            token_to_kv_pool_class=Nvfp4Pool,
            shadowed=False,
            fp8_keys=fp8_keys,
            scale_choice=scale_choice,
            enable_alt_stream=False,
        )

    def _of(self, layer_id: int) -> tuple[Nvfp4Pool, int, bool]:
        at, sliding = self.layers_mapping[layer_id]
        return self.swa_kv_pool if sliding else self.full_kv_pool, at, sliding

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> None:
        """`Nvfp4Pool.set_kv_buffer` of the layer's pool; `loc_info` has the ids of both."""
        pool, at, sliding = self._of(layer.layer_id)
        loc, swa_loc, _ = unwrap_write_loc(loc_info)
        if sliding:
            if swa_loc is None:
                raise RuntimeError(f"{NVFP4_TRITON}: a write to a sliding layer without its ids")
            loc = swa_loc
        pool.set_kv_buffer(layer, loc, cache_k, cache_v, k_scale, v_scale, layer_id_override=at)

    @contextmanager
    def attending(self, layer_id: int, table: torch.Tensor, batch: Any) -> Iterator[None]:
        """One layer's attention over a batch; see `Nvfp4Pool.attending`."""
        self._pool, at, _ = self._of(layer_id)
        try:
            with self._pool.attending(at, table, batch):
                yield
        finally:
            self._pool = None

    def _attending_pool(self) -> Nvfp4Pool:
        if self._pool is None:
            raise RuntimeError(f"{NVFP4_TRITON}: a read outside of attention")
        return self._pool

    @property
    def attended(self) -> Buffers:
        """Those of the layer that is attended to."""
        return self._attending_pool().attended

    def decoded(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`Nvfp4Pool.decoded`, of slots of the layer's pool."""
        return self._attending_pool().decoded(slots)


class Nvfp4HybridPool(HybridLinearKVPool):
    """That of models with linear attention: an `Nvfp4Pool` for the layers of full attention, stock's pool for the states of the others.

    The engine's own code gives the inner pool its layers' numbers, moves slots, and copies them to the host together with states.

    Args:
        full_kv_pool: an `Nvfp4Pool` whose layers count from 0.
        named: of `HybridLinearKVPool`.
    """

    full_kv_pool: Nvfp4Pool

    def set_kv_buffer(
        self,
        layer: Any,
        loc: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Any = None,
        v_scale: Any = None,
        dcp_kv_mask: torch.Tensor | None = None,
    ) -> None:
        """`Nvfp4Pool.set_kv_buffer` of the layer; stock's own makes 1.0 of scales that are not given."""
        super().set_kv_buffer(layer, loc, cache_k, cache_v, k_scale, v_scale, dcp_kv_mask)

    @contextmanager
    def attending(self, layer_id: int, table: torch.Tensor, batch: Any) -> Iterator[None]:
        """One layer's attention over a batch; see `Nvfp4Pool.attending`."""
        with self.full_kv_pool.attending(self._transfer_full_attention_id(layer_id), table, batch):
            yield

    @property
    def attended(self) -> Buffers:
        """Those of the layer that is attended to."""
        return self.full_kv_pool.attended

    def decoded(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`Nvfp4Pool.decoded`."""
        return self.full_kv_pool.decoded(slots)


def write(
    buffers: Buffers, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor, choice: ScaleChoice
) -> None:
    """Quantise new tokens and write them at their slots; see `Nvfp4Pool.set_kv_buffer`."""
    heads = buffers[0].shape[1]
    new_k, new_v = (x[: len(loc)].view(len(loc), heads, -1).to(torch.bfloat16) for x in (k, v))
    if loc.is_cuda:
        nvfp4_write.nvfp4_write(new_k, new_v, loc, *buffers, scale_choice=choice)
    else:
        nvfp4_write.reference(new_k, new_v, loc, *buffers, scale_choice=choice)


_proven: set[tuple[Any, ...]] = set()


def prove_write(
    heads: int, dim: int, fp8_keys: bool, choice: ScaleChoice, device: str | torch.device
) -> None:
    """Run the write once on this device and refuse to serve if a byte is not the specification's.

    A compiler has broken this kernel before (FP8 keys on sm90), and no engine would notice a cache that is wrong.
    """
    key = (heads, dim, fp8_keys, choice, torch.device(device).type)
    if key in _proven:
        return
    generator = torch.Generator().manual_seed(7)
    # Named, since the engine may have made the GPU the default device.
    k, v = (
        torch.randn(
            33, heads, dim, generator=generator, dtype=torch.float32, device="cpu"
        ).bfloat16()
        for _ in range(2)
    )
    loc = torch.arange(1, 34, device="cpu")
    widths = (dim if fp8_keys else dim // 2, dim // 2, dim // NVFP4_BLOCK, dim // NVFP4_BLOCK)
    want, got = (
        [torch.zeros(34, heads, width, dtype=torch.uint8, device=at) for width in widths]
        for at in ("cpu", device)
    )
    named = [want, got]
    if fp8_keys:
        named = [[*buffers[:2], None, buffers[3]] for buffers in named]
    nvfp4_write.reference(k, v, loc, *named[0], scale_choice=choice)
    wrong = 0
    try:
        write(tuple(named[1]), loc.to(device), k.to(device), v.to(device), choice)
        # A fault of the kernel shows in these copies at the latest.
        wrong = sum(int((a != b.cpu()).sum()) for a, b in zip(want, got, strict=True))
    except Exception as error:
        what = str(error).strip().splitlines() or [""]
        feature.refuse(
            f"the write kernel does not run on this GPU with this Triton: {type(error).__name__}: {what[0]}"
        )
    if wrong:
        feature.refuse(
            f"the write kernel gives {wrong} wrong bytes on this GPU with this Triton (a test at boot)"
        )
    _proven.add(key)


def read(
    buffers: Buffers, slots: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of slots, [n, heads, D], exactly."""
    k, v, k_scales, v_scales = buffers
    if k_scales is None:
        keys = k[slots].view(torch.float8_e4m3fn).to(dtype)
    else:
        keys = dequantize_nvfp4(k[slots], k_scales[slots], dtype=dtype)
    return keys, dequantize_nvfp4(v[slots], v_scales[slots], dtype=dtype)
