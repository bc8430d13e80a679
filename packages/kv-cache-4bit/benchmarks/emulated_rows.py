# SPDX-License-Identifier: Apache-2.0
"""The `glm-dsa` judge model with KV rows that pass through a row format, in torch: what accuracy scripts of this room share.

A served engine writes a token's row once and reads it ever after. `logits` does that for a whole sequence at once: latent
and rope part are rounded to bf16, packed by an `Arm`, unpacked, and attention sees only what came back. Two paths:

- `pool`: every query reads every row from the pool, its own included. So do stock's decode steps, its prefill with
  `flashmla_kv` (the default with FP8 rows on Hopper), and any stock prefill that has a cached prefix.
- `chunks`: a query reads the rows of its own prefill chunk as they were before packing, and earlier ones from the pool.
  Stock does so for a prompt's first chunk alone (multi-head attention of short prompts, `flashmla_sparse`).

Index keys and queries are FP8 in every arm, as in stock: turned by a Hadamard matrix, E4M3, one power-of-two scale per row. All
else is fp32 on the training module's weights, so that rows are the only difference between arms. What the rounding of an
engine's kernels adds is not in it: `judge_models/check_engine.py` measures that.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from numinous_kv_cache_4bit.kernels.codec import requantize_fp8, stock_fp8_of
from numinous_tooling.formats import KV4, KV4_BF16_ROPE, LATENT_DIM, STOCK_FP8, RowFormat
from numinous_tooling.numerics import (
    E4M3FN_MAX,
    decode_ue8m0,
    nvfp4_global_scale,
    ue8m0_scale_ceil,
)

# The judge models are scripts of the tooling, not a package.
sys.path.insert(0, str(Path(__file__).parents[2] / "tooling" / "benchmarks" / "judge_models"))

from judge_mla import LatentAttention, attend, rotary_tables, rotate

BF16_WIDTH = 2 * (LATENT_DIM + STOCK_FP8.rope_dim)
QUERIES = 512  # computed at a time

Path_ = Literal["pool", "chunks"]
Fault = Literal["nibbles", "scales"]
FAULTS = ("nibbles", "scales")


@dataclass(frozen=True)
class Arm:
    """How rows are kept.

    Args:
        name: as reports call it.
        row: the format, or None for bf16.
        scales: how block scales are chosen.
        above: a scale per layer over the block scales: none, the usual fp32 one, or the power of two from it upwards.
        turned: latents are multiplied by Hadamard matrices of this size, folded into the weights; 0 for none.
        sorted: latent columns are put in the order of their size, folded into the weights.
        sinks: first tokens of a sequence whose rows stay bf16.
        fp8_layers: layers that keep stock's FP8 rows.
        scratch: what is read is stock's FP8 row made of the 4-bit row, as by `kv4_gather`.
    """

    name: str
    row: RowFormat | None = None
    scales: Literal["amax", "mse"] = "amax"
    above: Literal["none", "fp32", "power"] = "none"
    turned: int = 0
    sorted: bool = False
    sinks: int = 0
    fp8_layers: tuple[int, ...] = ()
    scratch: bool = False
    fault: Fault | None = None

    def bytes_per_row(self, layers: int, tokens: int) -> float:
        """Mean bytes of a token and layer over a sequence of `tokens`."""
        width = BF16_WIDTH if self.row is None else self.row.width
        fp8 = len(self.fp8_layers)
        mean = (fp8 * STOCK_FP8.width + (layers - fp8) * width) / layers
        sinks = min(self.sinks, tokens)
        return (sinks * BF16_WIDTH + (tokens - sinks) * mean) / tokens


BASE = Arm("bf16")
FP8 = Arm("fp8", STOCK_FP8)
ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        BASE,
        FP8,
        Arm("kv4", KV4),
        Arm("kv4-mse", KV4, "mse"),
        Arm("kv4-bf16-rope", KV4_BF16_ROPE),
        Arm("kv4-scratch", KV4, scratch=True),
        Arm("kv4-global-fp32", KV4, above="fp32"),
        Arm("kv4-global-power", KV4, above="power"),
        Arm("kv4-hadamard-512", KV4, turned=512),
        Arm("kv4-hadamard-128", KV4, turned=128),
        Arm("kv4-sorted", KV4, sorted=True),
        Arm("kv4-sinks-4", KV4, sinks=4),
        Arm("kv4-first-fp8", KV4, fp8_layers=(0,)),
        Arm("kv4-mse-hadamard", KV4, "mse", turned=512),
        Arm("kv4-mse-bf16-rope", KV4_BF16_ROPE, "mse"),
        Arm("kv4-mse-sinks-first-fp8", KV4, "mse", sinks=4, fp8_layers=(0,)),
    )
}


@dataclass
class Trace:
    """What one forward pass shows besides logits; one entry per layer.

    Args:
        latents: root mean square of (decoded - bf16 latent) / root mean square of the latent.
        outputs: attention outputs [time, heads × value], before the output projection.
        picked: Boolean [time, time], the keys that each query reads.
        largest: amax of the latents, for `above`.
        columns: mean square of each latent column [512], for `sorted`.
    """

    latents: list[float] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    picked: list[Tensor] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
    columns: list[Tensor] = field(default_factory=list)


class Rows:
    """The model and the row codec of an arm.

    Args:
        model: the training module (`judge_saved.load`); not changed.
        arm: how rows are kept.
        seen: a trace of the base arm on other text; needed by `above` and `sorted`.
    """

    def __init__(self, model: Any, arm: Arm, seen: Trace | None = None) -> None:
        if seen is None and (arm.above != "none" or arm.sorted):
            raise ValueError(f"{arm.name} needs a trace of the base arm to choose its scales or order from")  # fmt: skip
        self.arm = arm
        self.model = model
        self._above: list[float | None] = [None] * len(model.model.layers)
        if arm.turned or arm.sorted:
            self.model = copy.deepcopy(model)
            for layer, block in enumerate(self.model.model.layers):
                if arm.sorted:
                    assert seen is not None
                    permute(block.self_attn, seen.columns[layer].argsort())
                if arm.turned:
                    turn(block.self_attn, hadamard(arm.turned))
        if arm.above != "none":
            assert seen is not None
            scales = [float(nvfp4_global_scale(torch.tensor([x]))) for x in seen.largest]
            if arm.above == "power":
                scales = [
                    2.0 ** math.ceil(math.log2(scale)) for scale in scales
                ]  # a smaller one would clip
            self._above = list(scales)

    def read(self, latent: Tensor, rope: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """What attention gets of bf16 latents [..., 512] and rope parts [..., 64] of a sequence: fp32."""
        arm = self.arm
        row = STOCK_FP8 if layer in arm.fp8_layers else arm.row
        if row is None:
            return latent.float(), rope.float()
        if row is STOCK_FP8:
            found = row.unpack(row.pack(latent, rope))  # FlashMLA multiplies in bf16
        else:
            above = self._above[layer]
            rows = row.pack(latent, rope, global_scale=above, scale_choice=arm.scales)
            plant(rows, row, arm.fault)
            if arm.scratch:
                found = stock_fp8_of(row).unpack(requantize_fp8(rows))
            else:
                # With a scale above, kernels multiply scores and outputs by it: nothing is rounded to bf16.
                dtype = torch.bfloat16 if above is None else torch.float32
                found = row.unpack(rows, global_scale=above, dtype=dtype)
        latents, ropes = (part.float() for part in found)
        latents[..., : arm.sinks, :] = latent[..., : arm.sinks, :].float()
        ropes[..., : arm.sinks, :] = rope[..., : arm.sinks, :].float()
        return latents, ropes

    @torch.no_grad()
    def logits(
        self,
        tokens: Tensor,
        path: Path_ = "pool",
        chunk: int = QUERIES,
        trace: Trace | None = None,
        exact: bool = False,
    ) -> Tensor:
        """Logits [time, vocabulary] of tokens [time], fp32.

        Args:
            path: which rows a query reads packed, see the module.
            chunk: tokens of a prefill chunk on the path `chunks`.
            trace: is filled.
            exact: rounds nothing, neither rows to bf16 nor index keys to FP8: the training module itself, if the arm is `bf16`.
        """
        decoder = self.model.model
        x = decoder.embed_tokens(tokens[None])
        tables = rotary_tables(self.model.config, len(tokens), tokens.device)
        for layer, block in enumerate(decoder.layers):
            step = chunk if path == "chunks" else QUERIES
            normed = block.input_layernorm(x)
            x = x + self._attention(
                block.self_attn, normed, tables, layer, path, step, trace, exact
            )
            x = x + block.mlp(block.post_attention_layernorm(x))
        out: Tensor = self.model.lm_head(decoder.norm(x))[0]
        return out

    def _attention(
        self,
        own: LatentAttention,
        x: Tensor,
        tables: tuple[Tensor, Tensor],
        layer: int,
        path: Path_,
        step: int,
        trace: Trace | None,
        exact: bool,
    ) -> Tensor:
        time = x.shape[1]
        query_latent = own.q_a_layernorm(own.q_a_proj(x))
        queries = own.q_b_proj(query_latent).view(1, time, own.heads, -1)
        turned = rotate(queries[..., own.nope :], tables, True)
        queries = torch.cat([queries[..., : own.nope], turned], dim=-1).transpose(1, 2)
        latent, rope = own.kv_a_proj_with_mqa(x).split([own.latent, own.rope], dim=-1)
        latent = own.kv_a_layernorm(latent)
        rope = rotate(rope.unsqueeze(2), tables, True).squeeze(2)
        if not exact:
            latent, rope = latent.bfloat16(), rope.bfloat16()
        stored = self.read(latent, rope, layer)
        packed = expand(own, *stored)
        fresh = expand(own, latent.float(), rope.float()) if path == "chunks" else packed
        index = IndexScores(own.indexer, x, query_latent, tables, not exact)
        outputs = []
        for start in range(0, time, step):
            end = min(start + step, time)
            keys, values = (
                torch.cat([old[:, :, :start], new[:, :, start:end]], dim=2)
                for old, new in zip(packed, fresh, strict=True)
            )
            picked = index.picked(start, end)
            outputs.append(attend(queries[:, :, start:end], keys, values, picked))
            if trace is not None:
                if start == 0:
                    trace.picked.append(torch.zeros(time, time, dtype=torch.bool))
                trace.picked[layer][start:end, :end] = picked[0]
        mixed = torch.cat(outputs, dim=2).transpose(1, 2).reshape(1, time, -1)
        if trace is not None:
            wide = latent.float()
            off = (stored[0] - wide).square().mean().sqrt() / wide.square().mean().sqrt()
            trace.latents.append(float(off))
            trace.largest.append(float(wide.abs().max()))
            trace.columns.append(wide.square().mean((0, 1)))
            trace.outputs.append(mixed[0])
        out: Tensor = own.o_proj(mixed)
        return out


def expand(own: LatentAttention, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [1, heads, time, width] of rows [1, time, 512] and [1, time, 64]; the absorbed form is the same sum."""
    batch, time, _ = latent.shape
    both = own.kv_b_proj(latent).view(batch, time, own.heads, -1)
    nope, values = both.split([own.nope, own.value], dim=-1)
    keys = torch.cat([nope, rope.unsqueeze(2).expand(-1, -1, own.heads, -1)], dim=-1)
    return keys.transpose(1, 2), values.transpose(1, 2)


class IndexScores:
    """Which keys the queries of one layer read: the training module's indexer on FP8 keys and queries."""

    def __init__(
        self,
        own: Any,
        x: Tensor,
        latent: Tensor,
        tables: tuple[Tensor, Tensor],
        fp8: bool,
    ) -> None:
        self._topk, self._scale = own.topk, own.width**-0.5
        if x.shape[1] <= own.topk:
            return
        queries = own._rotated(own.wq_b(latent).view(1, x.shape[1], own.heads, own.width), tables)
        keys = own._rotated(own.k_norm(own.wk(x)).unsqueeze(2), tables)
        if fp8:
            queries, keys = (through_fp8(part) for part in (queries, keys))
        self._queries, self._keys = queries[0], keys[0, :, 0]
        self._weights = own.weights_proj(x)[0] * own.heads**-0.5

    def picked(self, start: int, end: int) -> Tensor:
        """Boolean [1, end - start, end]."""
        visible = torch.ones(end - start, end, dtype=torch.bool).tril(start)
        if end <= self._topk:
            return visible[None]
        products = self._queries[start:end] @ self._keys[:end].T
        scores = torch.matmul(
            self._weights[start:end].unsqueeze(1), (products * self._scale).relu_()
        ).squeeze(1)
        best = scores.masked_fill(~visible, float("-inf")).topk(self._topk, dim=-1).indices
        chosen = torch.zeros_like(visible).scatter_(-1, best, True)
        return (chosen & visible)[None]


def through_fp8(x: Tensor) -> Tensor:
    """x [..., width], turned by a Hadamard matrix and rounded to E4M3 with one power-of-two scale per row; not turned back."""
    turned = x @ hadamard(x.shape[-1])
    largest = turned.abs().amax(-1, keepdim=True)
    scale = decode_ue8m0(ue8m0_scale_ceil(largest, element_max=E4M3FN_MAX))
    # No value is beyond 448 then, where torch's conversion and `numerics.encode_e4m3fn` part; torch's is 20 times faster.
    return (turned / scale).to(torch.float8_e4m3fn).float() * scale


def hadamard(size: int) -> Tensor:
    """The symmetric orthonormal Hadamard matrix of a power of two, fp32."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Hadamard matrix is a power of two wide, got {size}")
    out = torch.ones(1, 1)
    for _ in range(size.bit_length() - 1):
        out = torch.cat([torch.cat([out, out], 1), torch.cat([out, -out], 1)])
    return out * size**-0.5


@torch.no_grad()
def turn(own: LatentAttention, matrix: Tensor) -> None:
    """Multiply the latents of a layer by an orthonormal matrix, one for each run of its width, without changing the layer.

    A rotation keeps the root mean square, so it passes the norm once the norm's weight is folded into what reads the latent:
    W_a' = R W_a (latent rows), weight' = 1, W_b' = W_b diag(weight) Rᵀ. The indexer does not read latents.
    """
    rotation = torch.block_diag(*[matrix] * (own.latent // len(matrix)))
    rows = own.kv_a_proj_with_mqa.weight
    rows[: own.latent] = rotation @ rows[: own.latent]
    own.kv_b_proj.weight.copy_(own.kv_b_proj.weight * own.kv_a_layernorm.weight @ rotation.T)
    own.kv_a_layernorm.weight.fill_(1.0)


@torch.no_grad()
def permute(own: LatentAttention, order: Tensor) -> None:
    """Put the latent columns of a layer in another order, without changing the layer: exact in every arithmetic."""
    rows = own.kv_a_proj_with_mqa.weight
    rows[: own.latent] = rows[: own.latent][order]
    own.kv_a_layernorm.weight.copy_(own.kv_a_layernorm.weight[order])
    own.kv_b_proj.weight.copy_(own.kv_b_proj.weight[:, order])


def plant(rows: Tensor, row: RowFormat, fault: Fault | None) -> None:
    """Damage 4-bit rows uint8 [..., width] as a wrong kernel would: nibbles swapped, or scales of the next block."""
    fields: dict[str, Tensor] = row.split(rows)
    if fault == "nibbles":
        latent = fields["latent"]
        latent.copy_((latent >> 4) | (latent << 4))
    elif fault == "scales":
        fields["scales"].copy_(fields["scales"].roll(1, dims=-1))


def named(names: Sequence[str]) -> list[Arm]:
    """Arms by name; ValueError naming those there are."""
    if unknown := [name for name in names if name not in ARMS]:
        raise ValueError(f"no arm {', '.join(unknown)}; there are {', '.join(ARMS)}")
    return [ARMS[name] for name in names]
