# SPDX-License-Identifier: Apache-2.0
"""One weight of a model: its size in a precision, its share on a tensor-parallel rank, its arithmetic per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from . import RooflineError

COMPONENTS = (
    "embedding",
    "attention",
    "indexer",
    "dense MLP",
    "routed experts",
    "shared experts",
    "router",
    "hyper-connections",
    "norms",
    "LM head",
)
"""What weights are reported by."""

# Per 128 x 128 weights, scales included: FP8 has one fp32 scale per block, NVFP4 an E4M3 per 16, MXFP4 a UE8M0 per 32.
BLOCK = 128 * 128
BYTES_PER_BLOCK: Mapping[str, int] = MappingProxyType(
    {
        "fp32": 4 * BLOCK,
        "bf16": 2 * BLOCK,
        "fp8": BLOCK + 4,
        "nvfp4": BLOCK // 2 + BLOCK // 16,
        "mxfp4": BLOCK // 2 + BLOCK // 32,
    }
)

UNITS: Mapping[str, str] = MappingProxyType(
    {"fp32": "bf16", "bf16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4", "mxfp4": "mxfp4"}
)
"""Format of a weight -> the rate its product is held against; activations are taken as narrow as the weights.

fp32 weights are mixing matrices of a few columns: their rate hardly matters.
"""

Stored = Literal["linear", "expert", "bf16", "fp32"]


@dataclass(frozen=True)
class Precision:
    """How the weights of a model are stored.

    Args:
        linear: projections and dense or shared MLPs.
        expert: routed experts.

    Embedding, LM head, norms, routers and compressor gates are bf16, mixing matrices and convolutions fp32, in every
    precision.
    """

    linear: str = "bf16"
    expert: str = "bf16"

    def of(self, stored: Stored) -> str:
        """Format of a weight of that kind."""
        if stored == "linear":
            return self.linear
        return self.expert if stored == "expert" else stored

    def __str__(self) -> str:
        return (
            self.linear
            if self.linear == self.expert
            else f"{self.linear} with {self.expert} experts"
        )


# As checkpoints of this kind are made: 4 bits for routed experts, FP8 for every other projection.
PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "bf16": Precision("bf16", "bf16"),
        "fp8": Precision("fp8", "fp8"),
        "nvfp4": Precision("fp8", "nvfp4"),
        "mxfp4": Precision("fp8", "mxfp4"),
    }
)


@dataclass(frozen=True)
class Weight:
    """A matrix [inputs, outputs], `copies` times; a vector has one input.

    Args:
        component: one of `COMPONENTS`.
        name: within its block.
        inputs, outputs: of one copy.
        copies: equal matrices, for example one per routed expert.
        used: copies that one token multiplies, None for all.
        stored: which part of a `Precision` it follows.
        split: ranks that it can be divided over; None for any number, 1 for a copy on each rank.
        product: a token is multiplied with it; False for tables, norms and biases.
    """

    component: str
    name: str
    inputs: int
    outputs: int
    copies: int = 1
    used: int | None = None
    stored: Stored = "linear"
    split: int | None = None
    product: bool = True

    @property
    def parameters(self) -> int:
        """Numbers in all copies."""
        return self.inputs * self.outputs * self.copies

    @property
    def active(self) -> int:
        """Numbers that one token meets."""
        return self.inputs * self.outputs * (self.copies if self.used is None else self.used)

    def ranks(self, tp: int) -> int:
        """Parts it is cut into among `tp` ranks."""
        return tp if self.split is None else min(self.split, tp)

    def bytes(self, precision: Precision, tp: int = 1) -> int:
        """Bytes on one rank, scales included."""
        stored = self.parameters * BYTES_PER_BLOCK[precision.of(self.stored)]
        return -(-stored // (BLOCK * self.ranks(tp)))

    def flops(self, precision: Precision, tokens: int, tp: int = 1) -> tuple[str, int]:
        """Unit and operations on one rank for that many tokens: a multiplication and an addition per number."""
        unit = UNITS[precision.of(self.stored)]
        return unit, -(-2 * self.active * tokens // self.ranks(tp)) if self.product else 0


def norm(name: str, size: int, stored: Stored = "bf16") -> Weight:
    """A weight of one number per channel, on every rank."""
    return Weight("norms", name, 1, size, stored=stored, split=1, product=False)


def distinct_experts(experts: int, used: int, tokens: int) -> float:
    """Expected number of experts that at least one of `tokens` tokens chooses.

    Each token draws `used` of `experts` without replacement, uniformly and independently: E (1 - (1 - k/E)^T). Real
    routing is skewed and reads fewer.
    """
    if not 0 < used <= experts:
        raise RooflineError(f"a token cannot choose {used} of {experts} experts")
    return float(experts * (1 - (1 - used / experts) ** tokens))
