# SPDX-License-Identifier: Apache-2.0
"""Cases, peers and binaries of `kernels.kv4_write`: what its tests, gates and benches are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from numinous_kv_cache_4bit.kernels.codec import ScaleChoice, four_bit_format
from numinous_kv_cache_4bit.kernels.kv4_write import (
    FEW_TOKENS,
    MANY_ROWS,
    ROPE_MODES,
    Tile,
    kv4_write,
    reference,
    tile_for,
    traffic,
)
from numinous_kv_cache_4bit.workbench.shared import engine_version, sweep
from numinous_tooling.testing.tensors import assert_outputs_bitwise
from numinous_tooling.workbench import Implementation, Op, Tensors, TritonBinary

KERNEL = "numinous_kv_cache_4bit.kernels.kv4_write:_kv4_write_kernel"


EDGES: tuple[list[float], ...] = (
    [0.0], [-0.0], [float("nan"), 1.0, -2.0], [float("inf"), 1.0], [1.0, float("-inf"), 5.0],
    [float("nan"), float("inf")], [1e-40], [3.3e38, -3e38, 1.0],
    [4.8828125e-4], [4.9e-4, -1e-4], [2.0**-10], [1.5 * 2.0**-7, 2.0**-8],  # around the smallest scales
    [6.0, 5.0, -3.5, 2.5, -1.75, 1.25, 0.75, -0.25],  # every tie, scale 1
    [6.75, 5.625, -3.9375, 2.8125, -1.96875, 1.40625, 0.84375, -0.28125],  # every tie, scale 1.125
    [2688.0, 2700.0, -1e4], [448.0, 464.0, -480.0, 0.0009765625, 17.0, 19.0],
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        ids: int32 or int64.
        slots: "all" are distinct and written; "edges" hold slot 0, negative ids, ids beyond the pool, and ids that stand twice.
        values: "edges" holds zeros, NaN, inf, subnormals, the largest numbers and ties.
        layout: "plain"; "slices" of wider rows, ids and pool; "odd" starts at odd elements, which the kernel copies.
        scale: the global scale.
        choice: of block scales.
    """

    tokens: int
    width: int = 352
    ids: str = "int64"
    slots: str = "all"
    values: str = "normal"
    layout: str = "plain"
    scale: float = 1.0
    choice: ScaleChoice = "amax"


def make_inputs(case: Case, seed: int, device: Any) -> Tensors:
    """A pool of random bytes (`memory`, with what lies between its rows), ids, latent and rope."""
    generator = torch.Generator(device).manual_seed(seed)
    tokens, row = case.tokens, four_bit_format(case.width)
    size = 2 * tokens + 70

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    sliced = case.layout == "slices"
    memory = torch.randint(
        0, 256, (size, 1, case.width + (48 if sliced else 0)),
        generator=generator, device=device, dtype=torch.uint8,
    )  # fmt: skip
    loc = 1 + torch.randperm(size - 1, generator=generator, device=device)[:tokens]
    both = (normal(tokens, 1, 512 + 64) * torch.exp2(2 * normal(512 + 64))).to(torch.bfloat16)
    if case.values != "normal":
        _set_edges(both[:, 0, :512])
        _set_edges(both[:, 0, 512:])
    if case.slots == "edges" and tokens >= 8:
        outside = torch.tensor([0, -1, size, 0, -(2**31), 2**31 - 1], device=device)
        loc[: len(outside)] = outside
        loc[-1] = loc[-2]
        both[-1] = both[-2]  # which of two is written is not defined
    loc = loc.to(getattr(torch, case.ids))
    if sliced:
        loc = torch.stack([loc, -loc], dim=1)[:, 0]
        latent, rope = both[..., :512], both[..., 512:]
    else:
        latent, rope = both[:, 0, :512].contiguous(), both[:, 0, 512:].contiguous()
    if case.layout == "odd":
        latent, rope = _at_odd_elements(latent), _at_odd_elements(rope)
    return {"memory": memory, "loc": loc, "latent": latent, "rope": rope if row.rope_dim else None}


def _set_edges(rows: torch.Tensor) -> None:
    # The last rows are those that are written whatever the slots: each block of theirs begins with an edge, and is one
    # where the edge is a single number.
    blocks = rows.shape[1] // 16
    for number in range(max(0, len(rows) - 16), len(rows)):
        for block in range(blocks):
            edge = EDGES[(number * blocks + block) % len(EDGES)]
            values = torch.tensor(edge * 16 if len(edge) == 1 else edge, dtype=rows.dtype)
            target = rows[number, 16 * block : 16 * block + 16].mul_(1e-4)
            target[: len(values)] = values.to(rows.device)


def _at_odd_elements(rows: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(rows.numel() + 1, dtype=rows.dtype, device=rows.device)
    return flat[1:].view(rows.shape).copy_(rows)


def pool_of(case: Case, inputs: Tensors) -> torch.Tensor:
    """The pool in its memory."""
    memory: torch.Tensor = inputs["memory"]
    return memory[..., 16 : 16 + case.width] if case.layout == "slices" else memory


def _reference(case: Case, inputs: Tensors) -> Tensors:
    latent, rope = (
        None if x is None else x.reshape(case.tokens, x.shape[-1])
        for x in (inputs["latent"], inputs["rope"])
    )
    pool = pool_of(case, inputs)[:, 0]
    reference(
        pool,
        inputs["loc"],
        latent,
        rope,
        global_scale=case.scale,
        scale_choice=case.choice,
    )
    return {"memory": inputs["memory"]}


def _oracle(case: Case, inputs: Tensors) -> Tensors:
    """What the written rows stand for, in fp64."""
    latent = inputs["latent"].reshape(case.tokens, 512).double()
    return {"memory": (inputs["loc"], latent)}


def _compare_oracle(case: Case, got: Tensors, exact: Tensors) -> None:
    """Half a step of E2M1, or what its largest code does not reach."""
    loc, latent = exact["memory"]
    pool = pool_of(case, got)[:, 0]
    keep = (loc > 0) & (loc < len(pool))
    rows, latent = pool[loc[keep].long()], latent[keep].unflatten(-1, (-1, 16))
    row = four_bit_format(case.width)
    fields = row.split(rows)
    scale = (fields["scales"] & 0x7F).view(torch.float8_e4m3fn).double().unsqueeze(-1) * case.scale
    decoded = row.unpack(rows, dtype=torch.float32)[0].double().unflatten(-1, (-1, 16))
    error = (decoded * case.scale - latent).abs()
    size = latent.abs()
    # Below the smallest scale a block is zero; NaN and inf are judged by the kernels' comparison.
    step = torch.where(size <= 2 * scale, 0.25, torch.where(size <= 4 * scale, 0.5, 1.0)) * scale
    bound = torch.maximum(step, size - 6 * scale).clamp(min=2.0**-11 * case.scale)
    judged = latent.isfinite().all(-1, keepdim=True)
    wrong = judged & ~(error <= bound)
    if bool(wrong.any()):
        at = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"latent{list(at)}: off by {float(error[at])}, bound {float(bound[at])}"
        )


def _run(case: Case, inputs: Tensors, tile: Tile | None = None) -> Tensors:
    pool = pool_of(case, inputs)
    kv4_write(
        pool,
        inputs["loc"],
        inputs["latent"],
        inputs["rope"],
        global_scale=case.scale,
        scale_choice=case.choice,
        tile=tile,
    )
    return {"memory": inputs["memory"]}


# --- Peers ----------------------------------------------------------------------------------------------------------


def _stock_pool(case: Case, inputs: Tensors, with_rope: int, without: int, dtype: Any) -> Any:
    width = with_rope if four_bit_format(case.width).rope_dim else without
    return torch.empty(
        (len(inputs["memory"]), 1, width), dtype=dtype, device=inputs["memory"].device
    )


def _engine_fp8(case: Case, inputs: Tensors) -> Tensors:
    """SGLang 0.5.20 on Hopper with --kv-cache-dtype fp8_e4m3: quantise, then store rows of 656 or 528 bytes."""
    from sglang.kernels.ops.attention.dsa.quant_k_cache import quantize_k_cache_separate
    from sglang.kernels.ops.kvcache.mla_buffer import set_mla_kv_buffer_triton

    pool = _stock_pool(case, inputs, 656, 528, torch.uint8)
    parts = quantize_k_cache_separate(inputs["latent"], inputs["rope"])
    set_mla_kv_buffer_triton(pool, inputs["loc"], *parts)
    return {"stock": pool}


def _engine_bf16(case: Case, inputs: Tensors) -> Tensors:
    """SGLang 0.5.20 with a bf16 pool: the store alone."""
    from sglang.kernels.ops.kvcache.mla_buffer import set_mla_kv_buffer_triton

    pool = _stock_pool(case, inputs, 576, 512, torch.bfloat16)
    set_mla_kv_buffer_triton(pool, inputs["loc"], inputs["latent"], inputs["rope"])
    return {"stock": pool}


# --- Binaries -------------------------------------------------------------------------------------------------------


def _binary(
    name: str,
    width: int,
    rows: int,
    *,
    search: bool = False,
    quick: bool = True,
) -> TritonBinary:
    rope = ROPE_MODES[width]
    pointers = {"latent_ptr": "*i32", "loc_ptr": "*i64", "pool_ptr": "*u8"}
    strides = ("latent_stride", "pool_stride") + (("rope_stride",) if rope else ())
    signature = {
        **pointers,
        **({"rope_ptr": "*i32"} if rope else {}),
        **dict.fromkeys((*strides, "tokens", "slots"), "i32"),
        "inverse_global": "fp32",
    }
    if not rope:
        signature["rope_stride"] = "i32"
    return TritonBinary(
        name=name,
        kernel=KERNEL,
        signature=signature,
        constants={
            **({} if rope else {"rope_ptr": None}),
            "loc_stride": 1,
            "ROWS": rows,
            "ROPE": rope,
            "SEARCH": search,
            "NATIVE": 2,
            "sm90": {"NATIVE": 1},
            "gfx950": {"NATIVE": 0},
        },
        aligned=[k for k in signature if k not in ("inverse_global", "tokens", "slots")],
        options={"num_warps": tile_for(1 if rows == 1 else FEW_TOKENS + 1).warps},
        required={
            "sm90": ("VIMNMX3.U16x2",),
            **dict.fromkeys(("sm100", "sm120"), ("F2FP.SATFINITE.E2M1",)),
        },
        # With many rows no exchange between threads but by shuffles.
        forbidden={} if rows == 1 else dict.fromkeys(("sm90", "sm100", "sm120"), ("BAR", "LDS")),
        quick=quick,
    )


def _cases() -> tuple[Case, ...]:
    return (
        Case(0),
        Case(1),
        Case(1, 288, layout="slices", ids="int32"),
        Case(2, layout="odd"),
        Case(4, 416, values="edges", layout="slices", scale=0.125),
        Case(8, slots="edges", values="edges", layout="slices", scale=1024.0),
        Case(9, 288, slots="edges", values="edges", ids="int32"),
        Case(2, values="edges", choice="mse", scale=2.0),
        Case(129, slots="edges", values="edges"),  # four rows in a program, the last with one
    )


def _bench_cases() -> tuple[Case, ...]:
    return (
        *(Case(tokens) for tokens in (1, 16, 64, 512, 4096, 16384, 65536)),
        *(Case(tokens, 288) for tokens in (64, 4096, 16384, 65536)),
        Case(65536, 416),
        *(Case(tokens, choice="mse") for tokens in (64, 4096)),
    )


OP = Op(
    name="kv4_write",
    package="kv-cache-4bit",
    cases=_cases(),
    make_inputs=make_inputs,
    reference=_reference,
    oracle=_oracle,
    compare=lambda case, got, want: assert_outputs_bitwise(got, want),
    compare_oracle=_compare_oracle,
    traffic=lambda case: traffic(case.tokens, case.width, 8 if case.ids == "int64" else 4),
    implementations={"triton": Implementation(run=_run, interpret=True, exact=True)},
    peers={
        "sglang-fp8": Implementation(run=_engine_fp8, version=engine_version, archs=("sm90",)),
        "sglang-bf16": Implementation(run=_engine_bf16, version=engine_version, archs=("sm90",)),
    },
    binaries=(
        _binary("few_352", 352, 1),
        _binary("many_352", 352, MANY_ROWS),
        _binary("many_288", 288, MANY_ROWS, quick=False),
        _binary("few_352_mse", 352, 1, search=True, quick=False),
    ),
    bench_cases=_bench_cases(),
    bench_options={"l2": "rotate"},
)


SWEPT = (
    *(Tile(rows, rows) for rows in (1, 2, 4, 8)),  # 16 values a thread: whole blocks
    Tile(1, 2),  # 8 values a thread
    Tile(8, 4),  # 32 values a thread
)

SWEEP = sweep(
    OP,
    _run,
    SWEPT,
    (
        *(Case(tokens) for tokens in (1, 64, 128, 256, 512, 1024, 4096, 16384, 65536)),
        *(Case(tokens, 288) for tokens in (64, 4096, 65536)),
        *(Case(tokens, choice="mse") for tokens in (64, 4096)),
    ),
)
"""Other tiles beside the launcher's::

    numinous bench numinous_kv_cache_4bit.workbench.kv4_write:SWEEP --arch sm90
"""
