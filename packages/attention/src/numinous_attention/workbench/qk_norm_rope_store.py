# SPDX-License-Identifier: Apache-2.0
"""Cases, peers and binaries of `kernels.qk_norm_rope_store`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from numinous_attention.kernels.qk_norm_rope_store import (
    FP8,
    qk_norm_rope_store,
    reference,
    tile_of,
    traffic,
)
from numinous_attention.workbench.extend_attention import _engine_version
from numinous_tooling.testing.tensors import assert_within
from numinous_tooling.workbench import Implementation, Op, Tensors, TritonBinary

KERNEL = "numinous_attention.kernels.qk_norm_rope_store:_qk_norm_rope_store_kernel"
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        tokens, heads, kv_heads, dim: kv_heads 0 is q alone.
        model: "gemma4" (weights as they are, v normed) or "gemma3" (1 + weight, v as it is).
        pool: "bf16", "fp8" with scales, or "bytes": fp8 as uint8.
        window: slots go through a map to a smaller pool.
        ids: of positions and slots.
        layout: "qkv": parts of one row, as the engine splits it; "plain": contiguous.
        edges: slots, mapped rows and positions outside, and a NaN in a token; three tokens or more.
        fresh: new k and v stay in place; off, they go to the cache only.
        rotary: the rest of a head is turned by nothing: of D / 2 pairs this many turn; 0: all.
    """

    tokens: int
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    model: Literal["gemma4", "gemma3"] = "gemma4"
    pool: Literal["bf16", "fp8", "bytes"] = "bf16"
    window: bool = False
    ids: Literal["int32", "int64"] = "int64"
    layout: Literal["qkv", "plain"] = "qkv"
    edges: bool = False
    fresh: bool = True
    rotary: int = 0

    @property
    def how(self) -> dict[str, Any]:
        """Options of the call."""
        fp8 = self.pool != "bf16"
        return {
            "eps": EPS,
            "gemma": self.model == "gemma3",
            "norm_v": self.model == "gemma4",
            "k_scale": 0.37 if fp8 else 1.0,
            "v_scale": 0.015 if fp8 else 1.0,
            "write_back": self.fresh,
        }


NAMES = ("q", "k", "v", "q_weight", "k_weight", "table", "positions", "slots", "k_pool", "v_pool")


def make_inputs(case: Case, seed: int, device: Any) -> Tensors:
    """Tensors of a call; pools and what a layout leaves out are filled with noise that must stay."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    tokens, dim, ids = case.tokens, case.dim, getattr(torch, case.ids)
    counts = (case.heads, case.kv_heads, case.kv_heads)
    wide = (noise(tokens, sum(counts) * dim) * 3).to(torch.bfloat16)
    q, k, v = (x.unflatten(-1, (-1, dim)) if x.shape[1] else None for x in wide.split([n * dim for n in counts], dim=-1))  # fmt: skip
    if case.layout == "plain":
        q, k, v = (None if x is None else x.contiguous() for x in (q, k, v))
    offset = 0.0 if case.model == "gemma3" else 1.0
    q_weight, k_weight = ((noise(dim) * 0.2 + offset).to(torch.bfloat16) for _ in "qk")
    length = 4 * tokens + 40
    rates = 10000.0 ** -(torch.arange(dim // 2, device=device) / (dim // 2))
    rates[case.rotary or dim // 2 :] = 0
    angles = torch.arange(length, device=device)[:, None] * rates
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.randint(0, length, (tokens,), generator=generator, device=device)
    rows = 3 * tokens + 5
    total = 2 * rows if case.window else rows
    slots = torch.randperm(total, generator=generator, device=device)[:tokens]
    slot_map = None
    if case.window:
        slot_map = torch.full((total,), -1, dtype=torch.int64, device=device)
        slot_map[slots] = torch.randperm(rows, generator=generator, device=device)[:tokens]
    if case.edges:
        assert tokens >= 3
        slots[0], slots[1] = -1, total
        positions[2] = length if seed % 2 else -1
        q[tokens - 1, 0, 0] = torch.nan  # type: ignore[index]
        if slot_map is not None and tokens > 4:
            slot_map[slots[3]], slot_map[slots[4]] = rows, -7
    inputs: Tensors = {
        "q": q, "k": k, "v": v, "q_weight": q_weight, "k_weight": k_weight, "table": table,
        "positions": positions.to(ids), "slots": slots.to(ids), "slot_map": slot_map,
    }  # fmt: skip
    for name in ("k_pool", "v_pool"):
        pool = noise(rows, case.kv_heads + 1, dim).to(torch.bfloat16)
        if case.pool != "bf16":
            pool = pool.to(torch.float8_e4m3fn)
            pool = pool.view(torch.uint8) if case.pool == "bytes" else pool
        inputs[name] = pool[:, : case.kv_heads]
    if not case.kv_heads:
        inputs |= dict.fromkeys(("k", "v", "k_weight", "slots", "slot_map", "k_pool", "v_pool"))
    return inputs


def _arguments(inputs: Tensors) -> list[Any]:
    return [inputs[name] for name in NAMES]


def _outputs(inputs: Tensors) -> Tensors:
    out = {name: inputs[name] for name in ("q", "k", "v", "k_pool", "v_pool")}
    return {
        name: x.view(torch.uint8) if x.dtype == FP8 else x
        for name, x in out.items()
        if x is not None
    }


def _reference(case: Case, inputs: Tensors) -> Tensors:
    return reference(*_arguments(inputs), slot_map=inputs["slot_map"], **case.how)


def _oracle(case: Case, inputs: Tensors) -> Tensors:
    return reference(*_arguments(inputs), slot_map=inputs["slot_map"], **case.how, exact=True)


def _run(case: Case, inputs: Tensors) -> Tensors:
    qk_norm_rope_store(*_arguments(inputs), slot_map=inputs["slot_map"], **case.how)
    return _outputs(inputs)


def _values(x: torch.Tensor) -> torch.Tensor:
    """fp64; of bytes, those of E4M3 codes."""
    return (x.view(FP8) if x.dtype == torch.uint8 else x).double()


def _pairs(x: torch.Tensor) -> torch.Tensor:
    """The length of each pair that is turned together, for both of it: no rounding before the turn is larger."""
    one, two = x.chunk(2, dim=-1)
    return torch.hypot(one, two).repeat(*[1] * (x.dim() - 1), 2)


def _bound(name: str, want: torch.Tensor, codes: bool, roundings: float) -> torch.Tensor:
    """How far a value may be off: `roundings` of bf16 of its pair (v: of itself), and one step of E4M3."""
    size = want.abs() if name.startswith("v") else _pairs(want)
    bound = roundings * 2.0**-8 * size
    if codes:
        bound = bound * 1.2 + want.abs() * 2.0**-3 + 2.0**-9
    return bound.nan_to_num(0.0, 0.0) + 1e-30


def compare(case: Case, got: Tensors, want: Tensors) -> None:
    """Nearly all elements bit for bit, the others a neighbour of bf16 off: sums in another order, fused products."""
    assert got.keys() == want.keys(), f"outputs are {sorted(got)}, want {sorted(want)}"
    for name, expected in want.items():
        made = got[name]
        codes = expected.dtype == torch.uint8
        exact, value = _values(expected), _values(made)
        assert_within(name, value, exact, _bound(name, exact, codes, 2.0), any_nan=True)
        same = (value == exact) | (value.isnan() & exact.isnan())
        off, most = int((~same).sum()), 2 + expected.numel() // 200
        assert off <= most, (
            f"{name}: {off} of {expected.numel()} elements differ, at most {most} may"
        )


def _compare_oracle(case: Case, got: Tensors, exact: Tensors) -> None:
    for name, expected in exact.items():
        made = _values(got[name])
        limit = 448.0 if got[name].dtype == torch.uint8 else torch.inf
        bound = _bound(name, expected, got[name].dtype == torch.uint8, 2.0)
        assert_within(name, made, expected.clamp(-limit, limit), bound, any_nan=True)


# --- Peers ----------------------------------------------------------------------------------------------------------


def _engine(case: Case, inputs: Tensors) -> Tensors:
    """SGLang 0.5.20, as Gemma 4 calls it: norm of q, k, v; rotation in place; translation of slots; the pool's write."""
    from sglang.kernels.ops.attention.rope import apply_rope_with_cos_sin_cache_inplace
    from sglang.kernels.ops.layernorm.gemma4_fused_ops import gemma_qkv_rmsnorm
    from sglang.srt.mem_cache.memory_pool import _set_kv_buffer_impl

    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    gemma_qkv_rmsnorm(
        q.flatten(1), k.flatten(1), v.flatten(1), inputs["q_weight"], inputs["k_weight"],
        case.heads, case.kv_heads, case.dim, EPS,
    )  # fmt: skip
    apply_rope_with_cos_sin_cache_inplace(
        q=q, k=k, cos_sin_cache=inputs["table"], positions=inputs["positions"], is_neox=True
    )
    slots = inputs["slots"]
    if inputs["slot_map"] is not None:
        slots = inputs["slot_map"][slots]
    k_pool, v_pool = inputs["k_pool"], inputs["v_pool"]
    if case.pool == "fp8":
        k, v = (x.clone().div_(case.how[f"{n}_scale"]).to(FP8).view(torch.uint8) for n, x in (("k", k), ("v", v)))  # fmt: skip
        k_pool, v_pool = k_pool.view(torch.uint8), v_pool.view(torch.uint8)
    _set_kv_buffer_impl(
        k, v, k_pool, v_pool, slots, case.kv_heads * case.dim, k_pool.dtype, torch.cuda, len(k_pool)
    )
    return _outputs(inputs)


def _engine_refuses(case: Case) -> str | None:
    if case.model != "gemma4" or not case.kv_heads:
        return "is timed as Gemma 4 calls it"
    if case.edges or case.layout == "plain" or case.pool == "bytes" or not case.fresh:
        return "takes no ids outside, and leaves k and v in place"
    return None if case in BENCH else "wants pools of whole rows"


# --- Binaries -------------------------------------------------------------------------------------------------------


def _binary(name: str, case: Case, quick: bool = False) -> TritonBinary:
    of_keys = ("k_ptr", "v_ptr", "k_weight_ptr")
    id_type = "*i64" if case.ids == "int64" else "*i32"
    pool = "*bf16" if case.pool == "bf16" else "*u8"
    pointers = {
        "q_ptr": "*bf16", "q_weight_ptr": "*bf16", "table_ptr": "*fp32", "positions_ptr": id_type,
        **dict.fromkeys(of_keys, "*bf16"), "slots_ptr": id_type, "k_pool_ptr": pool, "v_pool_ptr": pool,
        **({"map_ptr": "*i64"} if case.window else {}),
    }  # fmt: skip
    strides = ("q_stride", "k_stride", "v_stride", "k_pool_stride", "v_pool_stride")
    tile = tile_of(case.tokens, case.dim)
    return TritonBinary(
        name=name,
        kernel=KERNEL,
        signature={
            **pointers,
            **dict.fromkeys((*strides, "last_position", "mapped", "pool_rows"), "i32"),
            **dict.fromkeys(("eps", "bias", "k_scale", "v_scale"), "fp32"),
        },
        constants={
            **({} if case.window else {"map_ptr": None}),
            "Q_HEADS": case.heads,
            "KV_HEADS": case.kv_heads,
            "D": case.dim,
            "HALF": case.dim // 2,
            "HEADS": tile.heads,
            "NORM_V": case.model == "gemma4",
            "WRITE_BACK": case.fresh,
            "MAPPED": case.window,
            "FP8": case.pool != "bf16",
            "NATIVE": True,
            "gfx950": {"NATIVE": False},
        },
        aligned=(*pointers, *strides),
        options={"num_warps": tile.warps},
        quick=quick,
    )


# --- Cases ----------------------------------------------------------------------------------------------------------

SMALL = (
    Case(0),
    Case(1, 1, 1, 2),
    Case(5, 3, 1, 64, edges=True),
    Case(7, 6, 2, 96, "gemma3", "fp8", edges=True, ids="int32"),
    Case(6, 5, 3, 34, window=True, edges=True, layout="plain"),
    Case(5, 4, 2, 256, window=True, pool="bytes", fresh=False),
    Case(4, 4, 1, 512, rotary=64, fresh=False),
    Case(3, 4, 0, 256),
    Case(3, 4, 0, 64, "gemma3", edges=True, layout="plain"),
    Case(65, 5, 2, 16, pool="fp8", window=True, edges=True, ids="int32"),  # tiles of four heads
    Case(66, 1, 1, 32, "gemma3"),
)

LARGE = (
    Case(300, 32, 16, 256, window=True, edges=True),
    Case(300, 32, 4, 512, rotary=64, edges=True),
    Case(300, 32, 16, 256, pool="fp8", window=True, edges=True),
    Case(130, 8, 1, 512, pool="fp8", rotary=64, fresh=False),
    Case(64, 4, 1, 256, "gemma3", edges=True),
)

BENCH = (
    *(Case(tokens, 32, 16, 256, window=True) for tokens in (1, 64, 8192)),
    *(Case(tokens, 32, 4, 512, rotary=64) for tokens in (1, 64, 8192)),
    *(Case(tokens, 32, 16, 256, window=True, pool="fp8") for tokens in (64, 8192)),
)
"""Gemma 4 31B: layers with a window, and without."""


def _not_run(tier: str, case: Case) -> str | None:
    return "a case for the GPU" if tier != "device" and case in LARGE else None


OP = Op(
    name="qk_norm_rope_store",
    package="attention",
    cases=(*SMALL, *LARGE),
    make_inputs=make_inputs,
    reference=_reference,
    oracle=_oracle,
    compare=compare,
    compare_oracle=_compare_oracle,
    traffic=lambda case: traffic(
        case.tokens, case.heads, case.kv_heads, case.dim,
        fp8=case.pool != "bf16",
        norm_v=case.model == "gemma4",
        write_back=case.fresh,
        mapped=case.window,
        id_bytes=8 if case.ids == "int64" else 4,
    ),
    implementations={"triton": Implementation(run=_run, interpret=True)},
    peers={"sglang": Implementation(run=_engine, version=_engine_version, archs=("sm90",), refuses=_engine_refuses)},
    binaries=(
        _binary("window", BENCH[2], quick=True),
        _binary("wide", BENCH[5], quick=True),
        _binary("window_fp8", BENCH[7]),
        _binary("window_decode", BENCH[1]),
        _binary("wide_decode", BENCH[4]),
    ),
    not_run=_not_run,
    bench_cases=BENCH,
    bench_options={"l2": "rotate"},
)  # fmt: skip
