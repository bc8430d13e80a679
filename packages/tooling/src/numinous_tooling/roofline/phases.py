# SPDX-License-Identifier: Apache-2.0
"""One forward pass of a model: bytes and operations of every layer on one rank, and the time they need at least."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .blocks import Experts, Layer, Step, Work
from .gpus import Gpu
from .models import Model
from .pools import KvRows
from .weights import Precision, Weight, distinct_experts

EMBEDDING_BYTES = 2  # bf16


@dataclass(frozen=True)
class Setup:
    """How a model is served.

    Args:
        precision: of the weights.
        kv: of the cache.
        tp: tensor-parallel ranks; everything below is of one of them. Expert parallelism over the same ranks moves the
            same bytes when experts are balanced. Latent rows and indexers are on every rank, as in the engine.
    """

    precision: Precision
    kv: KvRows
    tp: int = 1


def layer_work(layer: Layer, hidden: int, step: Step, setup: Setup) -> Work:
    """Work of one layer on one rank."""
    total = _weights_work(layer.weights(hidden), layer, step.tokens, setup)
    if layer.attention is not None:
        total += layer.attention.work(step, setup.kv, setup.tp)
    return total


def _weights_work(weights: list[Weight], layer: Layer, tokens: int, setup: Setup) -> Work:
    work = Work()
    experts = next((mlp for mlp in layer.mlps if isinstance(mlp, Experts)), None)
    reached = distinct_experts(experts.count, experts.used, tokens) if experts else 0.0
    for weight in weights:
        size = weight.bytes(setup.precision, setup.tp)
        if weight.stored == "expert":
            size = int(size * reached / weight.copies)
        work.bytes["weights"] += size
        unit, flops = weight.flops(setup.precision, tokens, setup.tp)
        work.flops[unit] += flops
    return work


def ends_work(model: Model, step: Step, setup: Setup) -> Work:
    """Embedding rows, last norm and LM head; logits are computed for the last token of each request."""
    rows = -(-step.tokens * model.hidden * EMBEDDING_BYTES // setup.tp)
    work = Work(Counter({"weights": rows}))
    for weight in (
        model.head,
        *(w for w in model.ends if w.component not in ("embedding", "LM head")),
    ):
        work.bytes["weights"] += weight.bytes(setup.precision, setup.tp)
        tokens = step.requests if weight.component == "LM head" else step.tokens
        unit, flops = weight.flops(setup.precision, tokens, setup.tp)
        work.flops[unit] += flops
    return work


def seconds(work: Work, gpu: Gpu) -> tuple[float, float]:
    """Time for the bytes and time for the operations, each at the GPU's full rate."""
    bytes_ = sum(work.bytes.values()) / gpu.bytes_per_second
    return bytes_, sum(flops / gpu.rate(unit) for unit, flops in work.flops.items())


@dataclass(frozen=True)
class Pass:
    """A forward pass on one rank.

    Args:
        step: what is computed.
        layers: each layer with its work, in order.
        ends: embedding, last norm and LM head.
    """

    step: Step
    layers: tuple[tuple[Layer, Work], ...]
    ends: Work

    @property
    def work(self) -> Work:
        """All of it."""
        return sum((work for _, work in self.layers), self.ends)

    def floor_seconds(self, gpu: Gpu) -> float:
        """Sum over layers of the larger of byte time and operation time: what overlaps inside a layer, at best."""
        return sum(max(seconds(work, gpu)) for work in (*(w for _, w in self.layers), self.ends))

    def bound(self, gpu: Gpu) -> str:
        """Whether bytes or operations take longer over the whole pass."""
        bytes_, flops = seconds(self.work, gpu)
        return "bytes" if bytes_ >= flops else "FLOPs"


def forward(model: Model, step: Step, setup: Setup) -> Pass:
    """Work of a step; equal layers are computed once."""
    known: dict[Layer, Work] = {}
    layers = []
    for layer in model.layers:
        if layer not in known:
            known[layer] = layer_work(layer, model.hidden, step, setup)
        layers.append((layer, known[layer]))
    return Pass(step, tuple(layers), ends_work(model, step, setup))
