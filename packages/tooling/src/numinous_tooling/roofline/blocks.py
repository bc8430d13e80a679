# SPDX-License-Identifier: Apache-2.0
"""Attention and MLP blocks: their weights, what they cache, and the arithmetic of a step.

A step is `new` tokens of each of `requests` sequences that have `cached` tokens in the pool: decode is (B, 1, L),
prefill (1, T, prefix). The j-th new token attends to cached + j tokens. All sizes are those of one rank of `tp`.
Shapes were read from the model classes of SGLang 0.5.20; the file is named at each block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from . import RooflineError
from .weights import Stored, Weight, norm

INDEX_SCALE_GROUP = 128  # indexer keys: e4m3 values, one fp32 scale per 128


@dataclass(frozen=True)
class Step:
    """What is computed in one forward pass; see the module's text.

    Args:
        requests: sequences.
        new: tokens of each that enter.
        cached: tokens of each that are in the pool already.
    """

    requests: int
    new: int
    cached: int

    def __post_init__(self) -> None:
        if self.requests < 1 or self.new < 1 or self.cached < 0:
            raise RooflineError(
                f"a step needs at least one request and one new token, got {self.requests} requests, "
                f"{self.new} new and {self.cached} cached tokens"
            )

    @property
    def tokens(self) -> int:
        """Rows of the hidden state."""
        return self.requests * self.new

    def pairs(self, stride: int = 1, limit: int | None = None) -> int:
        """Query-key pairs of all requests.

        Args:
            stride: one key per that many tokens (compressed or pooled keys; only whole groups).
            limit: keys that a query attends to at most (window, top-k).
        """

        def up_to(n: int) -> int:
            """Sum over i = 1 … n of min(i // stride, limit)."""
            whole = n if limit is None else min(n, stride * limit)
            groups = whole // stride
            rising = stride * groups * (groups - 1) // 2 + groups * (whole - stride * groups + 1)
            return rising + (0 if limit is None else max(0, n - stride * limit) * limit)

        return self.requests * (up_to(self.cached + self.new) - up_to(self.cached))


@dataclass
class Work:
    """Bytes through device memory, by kind, and operations, by unit; adds up.

    Args:
        bytes: kind ("weights", "KV read", "KV write", "state") -> bytes.
        flops: unit -> operations.
    """

    bytes: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Work) -> Work:
        total = Work(Counter(self.bytes), Counter(self.flops))
        total.bytes.update(other.bytes)
        total.flops.update(other.flops)
        return total


def _work(bytes_: Mapping[str, int], flops: Mapping[str, int]) -> Work:
    return Work(Counter(bytes_), Counter(flops))


class Block(Protocol):
    """What every attention block answers; each is a frozen dataclass of its dimensions."""

    @property
    def title(self) -> str:
        """How a report names the type."""

    def weights(self, hidden: int) -> list[Weight]:
        """Weights without the layer's norms."""

    def work(self, step: Step, kv: KvDtype, tp: int) -> Work:
        """Attention itself, without its projections."""


class KvDtype(Protocol):
    """Row widths of a KV dtype; `pools.KV_DTYPES` has them."""

    @property
    def unit(self) -> str:
        """Unit in which attention over such rows can be computed: bf16, or fp8 for rows of one byte and less."""

    def heads_row(self, kv_heads: int, head_dim: int, v_head_dim: int) -> int:
        """Bytes of one token's keys and values."""

    def latent_row(self, kv_rank: int, rope: int, *, sparse: bool) -> int:
        """Bytes of one token's MLA row."""

    def compressed_row(self, head_dim: int, rope: int) -> int:
        """Bytes of one row of DeepSeek V4's pools."""


def divide(heads: int, tp: int, what: str) -> int:
    """Heads of one rank; RooflineError where they do not divide."""
    if heads % tp:
        raise RooflineError(f"{heads} {what} do not divide over tp {tp}")
    return heads // tp


@dataclass(frozen=True)
class GroupedQuery:
    """Multi-head and grouped-query attention, with or without a sliding window (llama.py, qwen3.py, gemma4_causal.py).

    Args:
        window: tokens that a query sees, itself included; None for all.
        separate_v: False where the value projection is the key projection; both are cached all the same.
        qk_norm: norms over a head's queries and keys.
        bias: on q, k and v.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    separate_v: bool = True
    qk_norm: bool = False
    bias: bool = False

    @property
    def title(self) -> str:
        return "attention" if self.window is None else f"window {self.window}"

    def rank_kv_heads(self, tp: int) -> int:
        """KV heads of a rank: replicated where there are fewer than ranks."""
        return max(1, self.kv_heads // tp)

    def weights(self, hidden: int) -> list[Weight]:
        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        v, o = self.kv_heads * self.v_head_dim, self.heads * self.v_head_dim
        made = [
            Weight("attention", "q_proj", hidden, q),
            Weight("attention", "k_proj", hidden, k, split=self.kv_heads),
            Weight("attention", "o_proj", o, hidden),
        ]
        if self.separate_v:
            made.append(Weight("attention", "v_proj", hidden, v, split=self.kv_heads))
        if self.bias:
            made.append(Weight("attention", "qkv bias", 1, q + k + v, stored="bf16", product=False))
        if self.qk_norm:
            made.append(norm("q and k norm", 2 * self.head_dim))
        return made

    def row(self, kv: KvDtype, tp: int) -> int:
        """Bytes that a token takes in this layer."""
        return kv.heads_row(self.rank_kv_heads(tp), self.head_dim, self.v_head_dim)

    def work(self, step: Step, kv: KvDtype, tp: int) -> Work:
        heads = divide(self.heads, tp, "query heads")
        row = self.row(kv, tp)
        visible = step.cached if self.window is None else min(step.cached, self.window - 1)
        return _work(
            {"KV read": step.requests * visible * row, "KV write": step.tokens * row},
            {
                kv.unit: 2
                * heads
                * (self.head_dim + self.v_head_dim)
                * step.pairs(limit=self.window)
            },
        )


@dataclass(frozen=True)
class Index:
    """The indexer of a sparse layer (dsa/dsa_indexer.py, dsa/dsa_indexer_kpool.py, dsv4/indexer.py).

    Args:
        heads, dim: of its queries; keys have one head.
        topk: tokens that the attention then sees (entries, for compressed keys).
        pool: tokens per key.
        computes: False where the layer reuses the choice of a layer before it, and has neither weights nor keys.
        query_rank: width of the latent that its queries are made of.
        pool_gate: the keys of a pool are mixed by a learned gate.
    """

    heads: int
    dim: int
    topk: int
    query_rank: int
    pool: int = 1
    computes: bool = True
    pool_gate: bool = False

    @property
    def row(self) -> int:
        """Bytes of one key: e4m3 values and their fp32 scales."""
        return self.dim + self.dim // INDEX_SCALE_GROUP * 4

    def weights(self, hidden: int) -> list[Weight]:
        """Replicated on every rank, as the engine has them; none where nothing is computed."""
        if not self.computes:
            return []
        made = [
            Weight("indexer", "wq_b", self.query_rank, self.heads * self.dim, split=1),
            Weight("indexer", "wk", hidden, self.dim, split=1),
            Weight("indexer", "weights_proj", hidden, self.heads, stored="bf16", split=1),
            norm("indexer k norm", 2 * self.dim, "fp32"),
        ]
        if self.pool_gate:
            made += [
                Weight("indexer", "pool gate", hidden, self.dim, stored="bf16", split=1),
                Weight(
                    "indexer",
                    "pool position",
                    self.pool,
                    self.dim,
                    stored="fp32",
                    split=1,
                    product=False,
                ),
            ]
        return made

    def work(self, step: Step) -> Work:
        """Reads every key once per request and scores them; FP8 products on every rank."""
        if not self.computes:
            return Work()
        rows = step.requests * (step.cached // self.pool)
        written = step.requests * ((step.cached + step.new) // self.pool - step.cached // self.pool)
        return _work(
            {"KV read": rows * self.row, "KV write": written * self.row},
            {"fp8": 2 * self.heads * self.dim * step.pairs(stride=self.pool)},
        )


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention, dense or sparse (deepseek_v2.py, glm5_next.py, kimi_k3.py).

    Args:
        q_rank: latent width of the queries; None for a full q_proj.
        kv_rank, rope: what a token's row holds; shared by all heads, so that no rank has less.
        nope, v: per head.
        gated: an output gate of the width of the values.
        index: sparse attention over its top-k.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    rope: int
    nope: int
    v: int
    gated: bool = False
    index: Index | None = None

    @property
    def title(self) -> str:
        if self.index is None:
            return "MLA"
        return f"sparse MLA {self.index.topk}" + ("" if self.index.computes else " (shared index)")

    def weights(self, hidden: int) -> list[Weight]:
        q = self.heads * (self.nope + self.rope)
        made = (
            [Weight("attention", "q_proj", hidden, q)]
            if self.q_rank is None
            else [
                Weight("attention", "q_a_proj", hidden, self.q_rank, split=1),
                Weight("attention", "q_b_proj", self.q_rank, q),
                norm("q_a norm", self.q_rank),
            ]
        )
        made += [
            Weight("attention", "kv_a_proj", hidden, self.kv_rank + self.rope, split=1),
            Weight("attention", "kv_b_proj", self.kv_rank, self.heads * (self.nope + self.v)),
            Weight("attention", "o_proj", self.heads * self.v, hidden),
            norm("kv_a norm", self.kv_rank),
        ]
        if self.gated:
            made.append(Weight("attention", "gate", hidden, self.heads * self.v))
        return made + (self.index.weights(hidden) if self.index else [])

    def row(self, kv: KvDtype) -> int:
        """Bytes that a token takes in this layer, index key not counted."""
        return kv.latent_row(self.kv_rank, self.rope, sparse=self.index is not None)

    def work(self, step: Step, kv: KvDtype, tp: int) -> Work:
        """The cheaper of the absorbed form over the latent and, where every token is seen, the form per head.

        The latter applies kv_b_proj to the cached tokens too; to the new ones either form does, as a projection.
        """
        heads = divide(self.heads, tp, "query heads")
        limit = self.index.topk if self.index else None
        row = self.row(kv)
        visible = step.cached if limit is None else min(step.cached, limit)
        absorbed = 2 * heads * (2 * self.kv_rank + self.rope) * step.pairs(limit=limit)
        flops = absorbed
        if limit is None or step.cached + step.new <= limit:
            per_head = 2 * heads * (self.nope + self.rope + self.v) * step.pairs()
            expand = 2 * self.kv_rank * heads * (self.nope + self.v) * step.requests * step.cached
            flops = min(absorbed, per_head + expand)
        work = _work(
            {"KV read": step.requests * visible * row, "KV write": step.tokens * row},
            {kv.unit: flops},
        )
        return work + self.index.work(step) if self.index else work


@dataclass(frozen=True)
class Compressed:
    """DeepSeek V4: one shared latent head, a window, and beside it keys compressed `ratio` to one (deepseek_v4.py).

    Args:
        ratio: 0 (window only), 4 (overlapping groups, chosen by `index`) or 128 (all of them).
        q_rank, o_rank, o_groups: low-rank projections of queries and outputs.
        index: at ratio 4; `topk` counts compressed entries, `pool` is the ratio.
    """

    heads: int
    head_dim: int
    rope: int
    q_rank: int
    o_rank: int
    o_groups: int
    window: int
    ratio: int
    index: Index | None = None

    @property
    def title(self) -> str:
        if not self.ratio:
            return f"window {self.window}"
        return f"compressed {self.ratio}" + (f", top {self.index.topk}" if self.index else "")

    @property
    def overlap(self) -> int:
        """Groups that a token enters."""
        return 2 if self.ratio == 4 else 1

    def _compressor(self, name: str, component: str, hidden: int, dim: int) -> list[Weight]:
        width = self.overlap * dim
        return [
            Weight(component, f"{name} wkv_gate", hidden, 2 * width, stored="bf16", split=1),
            Weight(
                component,
                f"{name} position",
                self.ratio,
                width,
                stored="fp32",
                split=1,
                product=False,
            ),
            norm(f"{name} norm", dim, "fp32"),
        ]

    def weights(self, hidden: int) -> list[Weight]:
        width = self.heads * self.head_dim
        made = [
            Weight("attention", "wq_a", hidden, self.q_rank, split=1),
            Weight("attention", "wkv", hidden, self.head_dim, split=1),
            Weight("attention", "wq_b", self.q_rank, width),
            Weight("attention", "wo_a", width // self.o_groups, self.o_groups * self.o_rank),
            Weight("attention", "wo_b", self.o_groups * self.o_rank, hidden),
            Weight("attention", "sink", 1, self.heads, stored="fp32", split=1, product=False),
            norm("q and kv norm", self.q_rank + self.head_dim),
        ]
        if self.ratio:
            made += self._compressor("compressor", "attention", hidden, self.head_dim)
        if self.index:
            made += [
                Weight("indexer", "wq_b", self.q_rank, self.index.heads * self.index.dim, split=1),
                Weight("indexer", "weights_proj", hidden, self.index.heads, stored="bf16", split=1),
                *self._compressor("indexer compressor", "indexer", hidden, self.index.dim),
            ]
        return made

    def state_row(self, dim: int, itemsize: int = 4) -> int:
        """Bytes of one token in the compressor's state: key and score of each group that it enters."""
        return 2 * self.overlap * dim * itemsize

    def work(self, step: Step, kv: KvDtype, tp: int) -> Work:
        heads = divide(self.heads, tp, "query heads")
        row = kv.compressed_row(self.head_dim, self.rope)
        pairs = step.pairs(limit=self.window)
        read = min(step.cached, self.window - 1)
        written, state = step.new, 0
        if self.ratio:
            limit = self.index.topk if self.index else None
            entries = step.cached // self.ratio
            read += entries if limit is None else min(entries, limit)
            written += (step.cached + step.new) // self.ratio - entries
            pairs += step.pairs(stride=self.ratio, limit=limit)
            # Written once and read once, in the step that completes the group.
            state = 2 * step.tokens * self.state_row(self.head_dim)
            if self.index:
                state += 2 * step.tokens * self.state_row(self.index.dim)
        work = _work(
            {
                "KV read": step.requests * read * row,
                "KV write": step.requests * written * row,
                "state": state,
            },
            {kv.unit: 4 * heads * self.head_dim * pairs},
        )
        return work + self.index.work(step) if self.index else work


@dataclass(frozen=True)
class DeltaRule:
    """Kimi delta attention: a matrix per head that decays per channel (kimi_k3.py, glm5_next.py, mamba_utils.py).

    Args:
        dim: of keys and values.
        conv: taps of the short convolution over q, k and v.
        full_gate: the output gate is one matrix instead of two through `dim`.
    """

    heads: int
    dim: int
    conv: int
    full_gate: bool = False

    @property
    def title(self) -> str:
        return "KDA"

    def weights(self, hidden: int) -> list[Weight]:
        width = self.heads * self.dim
        gate = (
            [Weight("attention", "g_proj", hidden, width)]
            if self.full_gate
            else [
                Weight("attention", "g_a_proj", hidden, self.dim, split=1),
                Weight("attention", "g_b_proj", self.dim, width),
            ]
        )
        return [
            Weight("attention", "qkv_proj", hidden, 3 * width),
            Weight("attention", "f_a_proj", hidden, self.dim, split=1),
            Weight("attention", "f_b_proj", self.dim, width),
            Weight("attention", "b_proj", hidden, self.heads),
            *gate,
            Weight("attention", "o_proj", width, hidden),
            Weight("attention", "conv", self.conv, 3 * width, stored="fp32", product=False),
            Weight(
                "attention",
                "dt_bias and A_log",
                1,
                width + self.heads,
                stored="fp32",
                product=False,
            ),
            norm("o norm", self.dim),
        ]

    def state_bytes(self, tp: int) -> int:
        """Bytes of one request's slot: the fp32 matrices, and conv - 1 rows of q, k and v in bf16."""
        heads = divide(self.heads, tp, "linear-attention heads")
        return heads * self.dim * self.dim * 4 + (self.conv - 1) * 3 * heads * self.dim * 2

    def work(self, step: Step, kv: KvDtype, tp: int) -> Work:
        """The recurrence: 7 operations per element and token (decay; prediction, update and read, two each)."""
        heads = divide(self.heads, tp, "linear-attention heads")
        return _work(
            {"state": 2 * step.requests * self.state_bytes(tp)},
            {"bf16": 7 * heads * self.dim * self.dim * step.tokens},
        )


@dataclass(frozen=True)
class StateSpace:
    """Mamba 2 (nemotron_h.py, mamba2.py, mamba_utils.py).

    Args:
        heads, head_dim: inner width is their product.
        state: per channel.
        groups: that B and C are shared in.
        conv: taps of the short convolution.
        conv_bias: it has one.
    """

    heads: int
    head_dim: int
    state: int
    groups: int
    conv: int
    conv_bias: bool = True

    @property
    def title(self) -> str:
        return "Mamba 2"

    def _channels(self, tp: int) -> tuple[int, int]:
        """Heads of a rank and channels of its convolution; groups that do not divide are on every rank."""
        heads = divide(self.heads, tp, "Mamba heads")
        groups = self.groups // tp if self.groups % tp == 0 else 1
        return heads, heads * self.head_dim + 2 * groups * self.state

    def weights(self, hidden: int) -> list[Weight]:
        inner = self.heads * self.head_dim
        shared = 2 * self.groups * self.state
        return [
            Weight("attention", "in_proj", hidden, 2 * inner + self.heads),
            Weight("attention", "in_proj of B and C", hidden, shared, split=self.groups),
            Weight("attention", "out_proj", inner, hidden),
            Weight(
                "attention",
                "conv",
                self.conv + self.conv_bias,
                inner + shared,
                stored="bf16",
                product=False,
            ),
            Weight("attention", "A, D, dt_bias", 1, 3 * self.heads, stored="fp32", product=False),
            norm("gated norm", inner),
        ]

    def state_bytes(self, tp: int) -> int:
        """Bytes of one request's slot: fp32 state, conv - 1 rows in bf16."""
        heads, channels = self._channels(tp)
        return heads * self.head_dim * self.state * 4 + (self.conv - 1) * channels * 2

    def work(self, step: Step, kv: KvDtype, tp: int) -> Work:
        """The recurrence: 5 operations per element and token (decay; input and read, two each)."""
        heads, _ = self._channels(tp)
        return _work(
            {"state": 2 * step.requests * self.state_bytes(tp)},
            {"bf16": 5 * heads * self.head_dim * self.state * step.tokens},
        )


@dataclass(frozen=True)
class Experts:
    """Routed and shared experts.

    Args:
        count, used: of the routed.
        inner: width of one.
        shared: shared experts, always used.
        shared_inner: width of one of these, None for that of the routed.
        latent: width in which the routed experts work, with a projection down and up; None for the hidden width.
        gated: three matrices each, else two.
        router_bias: a correction per expert.
    """

    count: int
    used: int
    inner: int
    shared: int = 0
    shared_inner: int | None = None
    latent: int | None = None
    gated: bool = True
    router_bias: bool = True

    @property
    def title(self) -> str:
        return f"{self.used} of {self.count} experts"

    def weights(self, hidden: int) -> list[Weight]:
        width, matrices = self.latent or hidden, 3 if self.gated else 2
        made = [
            Weight("router", "router", hidden, self.count, stored="bf16", split=1),
            Weight(
                "routed experts",
                "experts",
                width,
                matrices * self.inner,
                copies=self.count,
                used=self.used,
                stored="expert",
            ),
        ]
        if self.router_bias:
            made.append(
                Weight("router", "bias", 1, self.count, stored="fp32", split=1, product=False)
            )
        if self.latent:
            made += [
                Weight("routed experts", "down", hidden, width, stored="bf16", split=1),
                Weight("routed experts", "up", width, hidden, stored="bf16", split=1),
                norm("latent norm", width),
            ]
        if self.shared:
            inner = self.shared * (self.shared_inner or self.inner)
            made.append(Weight("shared experts", "shared experts", hidden, matrices * inner))
        return made


@dataclass(frozen=True)
class Mlp:
    """A dense MLP.

    Args:
        inner: width.
        gated: three matrices, else two.
    """

    inner: int
    gated: bool = True

    @property
    def title(self) -> str:
        return "MLP"

    def weights(self, hidden: int) -> list[Weight]:
        return [Weight("dense MLP", "mlp", hidden, (3 if self.gated else 2) * self.inner)]


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    Args:
        attention: None in layers that are an MLP only.
        mlps: dense, routed, or both.
        norms: of the hidden width, how many.
        extra: weights that belong to no block.
    """

    attention: GroupedQuery | Latent | Compressed | DeltaRule | StateSpace | None
    mlps: tuple[Mlp | Experts, ...]
    norms: int = 2
    extra: tuple[Weight, ...] = ()

    @property
    def title(self) -> str:
        """How a report names the kind of layer."""
        return " + ".join(part.title for part in (self.attention, *self.mlps) if part)

    def weights(self, hidden: int) -> list[Weight]:
        """All of the layer's weights."""
        made = list(self.attention.weights(hidden)) if self.attention else []
        for mlp in self.mlps:
            made += mlp.weights(hidden)
        return [*made, norm("layer norms", self.norms * hidden), *self.extra]


def hyper_connections(hidden: int, streams: int) -> tuple[Weight, ...]:
    """Mixing of residual streams before attention and before the MLP (deepseek_v4.py make_hc_mixing_params)."""
    mixes = (2 + streams) * streams
    stored: Stored = "fp32"
    return (
        Weight(
            "hyper-connections", "mix", streams * hidden, mixes, copies=2, stored=stored, split=1
        ),
        Weight(
            "hyper-connections",
            "base and scale",
            1,
            mixes + 3,
            copies=2,
            stored=stored,
            split=1,
            product=False,
        ),
    )
