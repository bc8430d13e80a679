# SPDX-License-Identifier: Apache-2.0
"""KV pools for a memory budget, sized as SGLang 0.5.20 sizes them.

The engine turns a budget into tokens in srt/model_executor/pool_configurator.py and, where layers keep a state per
request, in KVCacheConfigurator._handle_max_mamba_cache (srt/mem_cache/kv_cache_configurator.py). The same arithmetic,
in the same order where floats round, is here; tests compare both. Speculative decoding, pipeline stages, hierarchical
caches and decode context parallelism add terms that are not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from numinous_tooling import formats

from . import RooflineError
from .blocks import Compressed, DeltaRule, GroupedQuery, Latent, StateSpace
from .models import Model


class DoesNotFit(RooflineError):
    """A budget that holds no page or no state: the engine would not start."""


SCALE_GROUP = 16  # values per scale of the engine's 4-bit pools


@dataclass(frozen=True)
class KvRows:
    """Row widths of one KV dtype.

    Args:
        name: as given on the command line.
        unit: see `blocks.KvDtype`.
        itemsize: bytes of a value in pools of plain values; None where the engine has no such pool.
        latent: MLA row by (sparse, with rope) where it is no plain row of values; 512-wide latents only.
        note: what it is.
    """

    name: str
    unit: str
    itemsize: int | None
    latent: Mapping[tuple[bool, bool], formats.RowFormat]
    note: str

    def heads_row(self, kv_heads: int, head_dim: int, v_head_dim: int) -> int:
        """Bytes of one token's keys and values; RooflineError where there is no such pool."""
        values = kv_heads * (head_dim + v_head_dim)
        if self.name == "nvfp4":
            return values // 2 + kv_heads * head_dim * 2 // SCALE_GROUP
        return values * self._plain("attention with heads")

    def latent_row(self, kv_rank: int, rope: int, *, sparse: bool) -> int:
        """Bytes of one token's MLA row; RooflineError where there is no such row."""
        row = self.latent.get((sparse, bool(rope)))
        if row is not None:
            if (kv_rank, rope or 0) != (formats.LATENT_DIM, row.rope_dim):
                raise RooflineError(
                    f"KV rows {self.name} hold {formats.LATENT_DIM} + {row.rope_dim} values, not {kv_rank} + {rope}"
                )
            return row.width
        if self.name == "nvfp4" and not sparse:
            return (kv_rank + rope) // 2 + (kv_rank + rope) // SCALE_GROUP
        return (kv_rank + rope) * self._plain("sparse MLA" if sparse else "MLA")

    def compressed_row(self, head_dim: int, rope: int) -> int:
        """Bytes of one row of DeepSeek V4: FP8 latent, bf16 rope, seven UE8M0 scales and a pad."""
        if self.name != "fp8":
            raise RooflineError(f"no {self.name} row of DeepSeek V4 is defined; say --kv-dtype fp8")
        return head_dim - rope + 2 * rope + 8

    def _plain(self, what: str) -> int:
        if self.itemsize is None:
            raise RooflineError(f"no {self.name} row is defined for {what}")
        return self.itemsize


KV_DTYPES: Mapping[str, KvRows] = MappingProxyType(
    {
        rows.name: rows
        for rows in (
            KvRows("bf16", "bf16", 2, {}, "stock"),
            KvRows(
                "fp8",
                "fp8",
                1,
                {(True, True): formats.STOCK_FP8, (True, False): formats.STOCK_FP8_NO_ROPE},
                "stock; of sparse MLA the rows with scales (FlashMLA on Hopper)",
            ),
            KvRows(
                "fp8-raw",
                "fp8",
                1,
                {},
                "stock; of sparse MLA the rows without scales (TRT-LLM kernels, AMD)",
            ),
            KvRows(
                "nvfp4",
                "fp8",
                None,
                {},
                "stock; not for sparse MLA, MLA beside linear attention, sliding windows and DeepSeek V4",
            ),
            KvRows(
                "kv4",
                "fp8",
                None,
                {(sparse, True): formats.KV4 for sparse in (True, False)}
                | {(sparse, False): formats.KV4_NO_ROPE for sparse in (True, False)},
                "numinous rows of 352 bytes, rope-free 288",
            ),
            KvRows(
                "kv4-bf16-rope",
                "fp8",
                None,
                {(sparse, True): formats.KV4_BF16_ROPE for sparse in (True, False)}
                | {(sparse, False): formats.KV4_NO_ROPE for sparse in (True, False)},
                "numinous rows of 416 bytes, rope-free 288",
            ),
        )
    }
)
"""Every KV dtype by name."""


def kv_dtype(name: str) -> KvRows:
    """The KV dtype of that name; RooflineError naming those there are."""
    if name in KV_DTYPES:
        return KV_DTYPES[name]
    raise RooflineError(f"no KV dtype {name}; there are {', '.join(KV_DTYPES)}")


@dataclass(frozen=True)
class PoolOptions:
    """Engine options that change a pool's size; None is the engine's default for the model.

    Args:
        page_size: tokens.
        sliding_ratio: ``--swa-full-tokens-ratio``, default 0.8, DeepSeek V4 0.1.
        state_ratio: ``--mamba-full-memory-ratio``.
        state_slots: ``--max-mamba-cache-size``.
        max_running_requests: as the option; sizes DeepSeek V4's request states.
        context_length: as the option; used where the former is None.
    """

    page_size: int | None = None
    sliding_ratio: float | None = None
    state_ratio: float = 0.9
    state_slots: int | None = None
    max_running_requests: int | None = None
    context_length: int | None = None


@dataclass(frozen=True)
class Pool:
    """A sized pool on one rank.

    Args:
        kind: "uniform", "sliding", "states" or "compressed".
        page_size: tokens.
        bytes_per_token: of `tokens`, the shares of sliding and compressed pools included, states not.
        tokens: that fit, whole pages.
        sliding_tokens: of the window layers, None where there are none.
        compressed_rows: ratio -> rows of each such layer.
        state_slots: requests' states that fit, None where there are none.
        state_bytes: of one slot over all layers.
        fixed_bytes: taken from the budget before tokens are counted.
    """

    kind: str
    page_size: int
    bytes_per_token: float
    tokens: int
    sliding_tokens: int | None = None
    compressed_rows: Mapping[int, int] | None = None
    state_slots: int | None = None
    state_bytes: int = 0
    fixed_bytes: int = 0


def size(model: Model, kv: KvRows, budget: int, tp: int, options: PoolOptions) -> Pool:
    """The pools that `budget` bytes of one rank hold.

    Raises:
        RooflineError: no row of that dtype is defined for a layer, heads do not divide, or the page size is not one
            that the model's pools take.
        DoesNotFit: the budget holds no page or no state.
    """
    check_pooled(model, kv)
    if is_compressed(model):
        return _compressed(model, kv, budget, options)
    if is_sliding(model):
        return _sliding(model, kv, budget, tp, options)
    page = _page(options, 64 if is_sparse(model) else 1)
    states = state_bytes(model, tp)
    if not states:
        return _uniform(model, kv, max(budget, 0), tp, page)
    slots, taken = _state_slots(states, budget, options)
    pool = _uniform(model, kv, max(budget - taken, 0), tp, page)
    return Pool(
        kind="states",
        page_size=page,
        bytes_per_token=pool.bytes_per_token,
        tokens=pool.tokens,
        state_slots=slots,
        state_bytes=states,
        fixed_bytes=taken,
    )


def check_pooled(model: Model, kv: KvRows) -> None:
    """RooflineError where the engine, or this project, has no pool of such rows for the model."""
    latent = any(isinstance(layer.attention, Latent) for layer in model.layers)
    if is_sliding(model) and kv.itemsize is None:
        what = "models with sliding windows"
    elif kv.name == "nvfp4" and latent and state_bytes(model, 1):
        what = "MLA beside linear attention"
    else:
        return
    raise RooflineError(f"there is no {kv.name} pool for {what}; say --kv-dtype bf16 or fp8")


def token_bytes(model: Model, kv: KvRows, tp: int) -> int:
    """Bytes of one token over all layers whose pool has a row per token, indexer keys included.

    This is what the engine calls cell size. A pool of KV heads in 4 bits also has one layer's FP8 workspace. The
    engine allocates an indexer key per token even where keys are pooled (index_kpool).
    """
    total, heads = 0, None
    for layer in model.layers:
        block = layer.attention
        if isinstance(block, Latent):
            total += block.row(kv) + (
                block.index.row if block.index and block.index.computes else 0
            )
        elif isinstance(block, GroupedQuery) and block.window is None:
            total, heads = total + block.row(kv, tp), block
    if kv.name == "nvfp4" and heads is not None:
        total += heads.rank_kv_heads(tp) * heads.head_dim * 2
    return total


def state_bytes(model: Model, tp: int) -> int:
    """Bytes of one request's states over all linear-attention and Mamba layers."""
    return sum(
        layer.attention.state_bytes(tp)
        for layer in model.layers
        if isinstance(layer.attention, DeltaRule | StateSpace)
    )


def is_sparse(model: Model) -> bool:
    """Whether it has sparse MLA, whose FP8 rows depend on the GPU."""
    return any(
        isinstance(layer.attention, Latent) and layer.attention.index for layer in model.layers
    )


def is_compressed(model: Model) -> bool:
    """Whether it has the compressed attention of DeepSeek V4."""
    return any(isinstance(layer.attention, Compressed) for layer in model.layers)


def is_sliding(model: Model) -> bool:
    """Whether some of its KV heads have a window, and a pool of their own."""
    return any(
        isinstance(layer.attention, GroupedQuery) and layer.attention.window is not None
        for layer in model.layers
    )


def _page(options: PoolOptions, default: int) -> int:
    page = default if options.page_size is None else options.page_size
    if page < 1:
        raise RooflineError(f"a page holds at least one token, got {page}")
    return page


def _some(tokens: int, budget: int) -> int:
    """The engine does not start with a pool of no tokens."""
    if not tokens:
        raise DoesNotFit(f"{max(budget, 0)} bytes hold no page of tokens; give more memory")
    return tokens


def _uniform(model: Model, kv: KvRows, budget: int, tp: int, page: int) -> Pool:
    """DefaultPoolConfigurator.calculate_pool_sizes."""
    cell = token_bytes(model, kv, tp)
    if not cell:
        raise RooflineError(f"{model.name} keeps no tokens, so that its pool has no size in tokens")
    return Pool("uniform", page, cell, _some(budget // cell // page * page, budget))


def _state_slots(per_slot: int, budget: int, options: PoolOptions) -> tuple[int, int]:
    """Slots and their bytes, the padding slot included: _handle_max_mamba_cache without speculation."""
    slots = options.state_slots
    if slots is None:
        share = (budget / (1 << 30)) * options.state_ratio / (1 + options.state_ratio)
        slots = int((share * (1 << 30) - per_slot) // per_slot)
    if slots < 1:
        raise DoesNotFit(
            f"{budget} bytes hold no state of {per_slot} bytes; give more memory or more tensor parallelism"
        )
    return slots, (slots + 1) * per_slot


def _sliding(model: Model, kv: KvRows, budget: int, tp: int, options: PoolOptions) -> Pool:
    """HybridSWAPoolConfigurator: one pool for full layers, one for window layers of `ratio` times its tokens."""
    page = _page(options, 1)
    ratio = 0.8 if options.sliding_ratio is None else options.sliding_ratio
    full = sliding = 0
    for layer in model.layers:
        if isinstance(layer.attention, GroupedQuery):
            row = layer.attention.row(kv, tp)
            full, sliding = (
                (full, sliding + row) if layer.attention.window else (full + row, sliding)
            )
    if not full:
        tokens = _some(max(budget, 0) // sliding // page * page, budget)
        return Pool("sliding", page, sliding, tokens, sliding_tokens=tokens)
    cell = full + ratio * sliding
    tokens = _some(int(max(budget, 0) // cell) // page * page, budget)
    return Pool("sliding", page, cell, tokens, sliding_tokens=int(tokens * ratio) // page * page)


def _compressed(model: Model, kv: KvRows, budget: int, options: PoolOptions) -> Pool:
    """DSV4PoolConfigurator on CUDA, without speculation: fp32 states, rings of 8 and 128."""
    page = _page(options, 256)
    if page % 128:
        raise RooflineError(
            f"pages of compressed attention are multiples of 128 tokens, got {page}"
        )
    ratio = 0.1 if options.sliding_ratio is None else options.sliding_ratio
    blocks = [layer.attention for layer in model.layers]
    made = [block for block in blocks if isinstance(block, Compressed)]
    fours = [block for block in made if block.ratio == 4]
    wides = [block for block in made if block.ratio == 128]
    row = kv.compressed_row(made[0].head_dim, made[0].rope)
    ring = 8 / made[0].window
    cell = (
        ratio * row * len(made)
        + 1 / 4 * row * len(fours)
        + 1 / 128 * row * len(wides)
        + sum(1 / 4 * block.index.row for block in fours if block.index)
        + sum(ratio * ring * block.state_row(block.head_dim) for block in fours)
        + sum(ratio * ring * block.state_row(block.index.dim) for block in fours if block.index)
    )
    requests = options.max_running_requests
    if requests is None:
        context = options.context_length or model.context_length
        if not context:
            raise RooflineError(f"{model.name} names no context length; give max_running_requests")
        tokens = int(max(budget, 0) / cell)
        requests = min(max(min(int(tokens / context * 512), 4096), 2048), tokens // 2)
    rows = -(-((requests + 1) * 128 + 128 + 1) // 128) * 128
    fixed = sum(rows * block.state_row(block.head_dim) for block in wides)
    tokens = int(max(budget - fixed, 0) / cell) // page * page
    if not tokens:
        raise DoesNotFit(
            f"states of {requests} requests take {fixed / 1e9:.1f} GB and leave no page of {budget / 1e9:.1f} GB; "
            "give --max-running"
        )
    return Pool(
        kind="compressed",
        page_size=page,
        bytes_per_token=cell,
        tokens=tokens,
        sliding_tokens=int(tokens * ratio) // page * page,
        compressed_rows={4: tokens // 4, 128: tokens // 128},
        fixed_bytes=fixed,
    )
