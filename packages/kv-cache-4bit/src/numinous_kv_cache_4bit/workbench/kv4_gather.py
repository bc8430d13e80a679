# SPDX-License-Identifier: Apache-2.0
"""Cases, peers and binaries of `kernels.kv4_gather`: what its tests, gates and benches are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from numinous_kv_cache_4bit.kernels.codec import four_bit_format, stock_fp8_of
from numinous_kv_cache_4bit.kernels.kv4_gather import (
    TILES,
    Tile,
    To,
    kv4_gather,
    out_bytes,
    reference,
    traffic,
)
from numinous_kv_cache_4bit.kernels.kv4_write import ROPE_MODES
from numinous_kv_cache_4bit.workbench.shared import engine_version, sweep
from numinous_tooling.testing.tensors import assert_bitwise_equal
from numinous_tooling.workbench import Implementation, Op, Tensors, TritonBinary

UNWRITTEN = 0x11  # a byte of rows that the count leaves out
KERNEL = "numinous_kv_cache_4bit.kernels.kv4_gather:_kv4_gather_kernel"


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        queries, topk: shape of the index table.
        ids: int32 or int64.
        pattern: "all" are distinct, as far as the pool has rows; "edges" hold -1 in front, in the middle and behind, ids beyond the
            pool, and ids that stand twice; "none" is all -1.
        rows: "written" by the encoder; "bytes" is anything: NaN scales, negative ones, NaN in rope.
        sliced: the pool's rows are parts of wider ones, the index is a slice.
        count: whether a count leaves out the last third.
    """

    queries: int
    topk: int
    width: int = 352
    to: To = "fp8"
    ids: str = "int32"
    pattern: str = "all"
    rows: str = "written"
    sliced: bool = False
    count: bool = False


def make_inputs(case: Case, seed: int, device: Any) -> Tensors:
    """Pool, index and, where the case counts, the count."""
    generator = torch.Generator(device).manual_seed(seed)
    row, total = four_bit_format(case.width), case.queries * case.topk
    slots = total + 70

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    memory = torch.randint(
        0, 256, (slots, 1, case.width + 64), generator=generator, device=device, dtype=torch.uint8
    )
    pool = memory[..., 32 : 32 + case.width]
    if case.rows == "written":
        distinct = min(slots, 1000)
        latent = (normal(distinct, 512) * torch.exp2(2 * normal(512))).to(torch.bfloat16)
        latent[: distinct // 8] = 0
        rows = row.pack(latent, normal(distinct, row.rope_dim).to(torch.bfloat16))
        pool[:, 0] = rows[torch.arange(slots, device=device) % distinct]
        # Slots that nobody asks for hold NaN in every field.
        pool[total + 1 :] = 0xFF
    index = torch.randperm(total, generator=generator, device=device) + 1
    if case.pattern == "none":
        index.fill_(-1)
    elif case.pattern == "edges" and total >= 12:
        half = total // 2
        index[0] = index[half] = index[-1] = index[-2] = -1
        index[1], index[half + 1], index[2] = slots, -7, 0
        index[half + 2 : half + 4] = index[3]
        index[4] = 2**31 - 1
    index = index.to(getattr(torch, case.ids)).view(case.queries, case.topk)
    if case.sliced:
        index = torch.stack([index, -index], dim=-1)[..., 0]
    else:
        pool = pool.contiguous()
    kept = 2 * total // 3 + seed  # the graph is replayed with another
    count = torch.tensor([kept], dtype=torch.int32, device=device) if case.count else None
    return {"pool": pool, "index": index, "count": count}


def _reference(case: Case, inputs: Tensors) -> Tensors:
    pool, index = inputs["pool"][:, 0], inputs["index"]
    made, count = reference(pool, index, to=case.to), inputs["count"]
    out = made["out"]
    if count is not None:  # without asking the device how many
        here = torch.arange(len(out), device=out.device)
        out = torch.where((here < count)[:, None], out, UNWRITTEN).to(torch.uint8)
    return fields_of(case, out, made["positions"])


def _run(case: Case, inputs: Tensors, tile: Tile | None = None) -> Tensors:
    index = inputs["index"]
    positions = torch.empty(index.shape, dtype=torch.int32, device=index.device)
    out = None
    if case.count:
        width = out_bytes(four_bit_format(case.width), case.to)
        out = torch.full((index.numel(), width), UNWRITTEN, dtype=torch.uint8, device=index.device)
        out = out.view(torch.bfloat16) if case.to == "bf16" else out
    out = kv4_gather(
        inputs["pool"],
        index,
        to=case.to,
        out=out,
        positions=positions,
        count=inputs["count"],
        tile=tile,
    )
    return fields_of(case, out.view(torch.uint8), positions)


def fields_of(case: Case, out: torch.Tensor, positions: torch.Tensor) -> Tensors:
    """Output rows by field, so that NaN are seen as such."""
    row = four_bit_format(case.width)
    if case.to == "bf16":
        return {"out": out.view(torch.bfloat16), "positions": positions}
    return {**stock_fp8_of(row).split(out), "positions": positions}


def _oracle(case: Case, inputs: Tensors) -> Tensors:
    """The values of the rows in fp64."""
    pool, index = inputs["pool"][:, 0], inputs["index"].reshape(-1).long()
    row = four_bit_format(case.width)
    latent, rope = row.unpack(pool, dtype=torch.float32)
    values = torch.cat([latent, rope], dim=-1).double()
    valid = (index >= 0) & (index < len(pool))
    values = torch.where(valid[:, None], values[torch.where(valid, index, 0)], 0.0)
    if inputs["count"] is not None:
        values = values[: int(inputs["count"])]
    if case.to == "bf16":
        return {"out": values}
    latent, rope = values[:, :512], values[:, 512:]
    return {"latent": latent, **({"rope": rope} if row.rope_dim else {}), "scales": latent}


def _compare_oracle(case: Case, got: Tensors, exact: Tensors) -> None:
    """bf16 and rope exactly, FP8 within its rounding; of the rows that are written."""
    rows = len(next(iter(exact.values())))
    got = {name: value[:rows] for name, value in got.items()}
    if case.to == "bf16":
        assert_bitwise_equal("out", got["out"].double(), exact["out"], any_nan=True)
        return
    if "rope" in exact:
        assert_bitwise_equal("rope", got["rope"].double(), exact["rope"], any_nan=True)
    codes = got["latent"].view(torch.float8_e4m3fn).double()
    shared = got["scales"].double().repeat_interleave(128, dim=-1)
    error = (codes * shared - exact["latent"]).abs()
    bound = torch.maximum(exact["latent"].abs() / 17, shared * 2.0**-10)
    same_nan = codes.isnan() == exact["latent"].isnan()
    assert bool((same_nan & ((error <= bound) | codes.isnan())).all())


def compare(case: Case, got: Tensors, want: Tensors) -> None:
    """Bit for bit; a NaN is a NaN. E4M3 codes of NaN are compared as such too."""
    assert got.keys() == want.keys(), f"outputs are {sorted(got)}, want {sorted(want)}"
    for name in want:
        both = [
            x.view(torch.float8_e4m3fn) if x.dtype == torch.uint8 else x
            for x in (got[name], want[name])
        ]
        assert_bitwise_equal(name, *both, any_nan=True)


# --- Peers ----------------------------------------------------------------------------------------------------------


def _stock_rows(case: Case, inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """An FP8 pool of as many slots, and the flat ids with padding replaced: the engine's functions take none."""
    pool, index = inputs["pool"], inputs["index"].reshape(-1)
    stock = torch.empty(
        (len(pool), 1, stock_fp8_of(four_bit_format(case.width)).width),
        dtype=torch.float8_e4m3fn,
        device=pool.device,
    )
    return stock, index


def _stock_dequantize(case: Case, inputs: Tensors) -> Tensors:
    """SGLang 0.5.20: rows of 656 bytes by index to bf16, as in front of its bf16 sparse prefill."""
    from sglang.kernels.ops.attention.dsa.dequant_k_cache import dequantize_k_cache_paged

    return {"stock": dequantize_k_cache_paged(*_stock_rows(case, inputs))}


def _stock_requantize(case: Case, inputs: Tensors) -> Tensors:
    """SGLang 0.5.20: rows of 656 bytes by index to rows of 576, as in front of its FP8 sparse prefill."""
    from sglang.kernels.ops.attention.dsa.dequant_k_cache import gather_dequant_requant_fp8_paged

    return {"stock": gather_dequant_requant_fp8_paged(*_stock_rows(case, inputs))}


def _stock_refuses(to: To) -> Any:
    def refuses(case: Case) -> str | None:
        if case.to != to:
            return f"gives other rows than {case.to}"
        if case.width == 288:
            return "takes rows of 656 bytes only"
        return None if case.pattern == "all" else "takes no padding"

    return refuses


# --- Binaries -------------------------------------------------------------------------------------------------------


def _binary(name: str, width: int, to: To, *, quick: bool = True) -> TritonBinary:
    pointers = {"pool_ptr": "*u8", "index_ptr": "*i32", "out_ptr": "*u8", "positions_ptr": "*i32"}
    integers = ("pool_stride", "out_stride", "total", "slots")
    return TritonBinary(
        name=name,
        kernel=KERNEL,
        signature={**pointers, **dict.fromkeys(integers, "i32")},
        constants={
            "count_ptr": None,
            "ROWS": TILES[to].rows,
            "TURNS": TILES[to].turns,
            "ROPE": ROPE_MODES[width],
            "AHEAD": False,
            "FP8": to == "fp8",
            "POSITIONS": True,
            "COUNTED": False,
            "NATIVE": 2,
            "sm90": {"NATIVE": 1},
            "gfx950": {"NATIVE": 0},
        },
        aligned=(*pointers, "pool_stride", "out_stride"),
        options={"num_warps": 4, "gfx950": {"num_warps": 2}},
        # No exchange between threads but by shuffles.
        forbidden=dict.fromkeys(("sm90", "sm100", "sm120"), ("BAR",)),
        quick=quick,
    )


def _cases() -> tuple[Case, ...]:
    return (
        Case(0, 64),
        Case(1, 1),
        Case(3, 7, pattern="edges"),
        Case(1, 19, 288, "bf16", "int64", "edges", sliced=True),
        Case(2, 12, 416, "bf16", pattern="edges", rows="bytes"),
        Case(2, 12, 288, "fp8", "int64", "edges", rows="bytes"),
        Case(1, 15, 352, "bf16", rows="bytes", count=True),
        Case(3, 6, 416, "fp8", pattern="edges", sliced=True, count=True),
        Case(1, 3, 288, "fp8", pattern="none"),
    )


def _bench_cases() -> tuple[Case, ...]:
    targets: tuple[To, ...] = ("fp8", "bf16")
    return tuple(
        Case(queries, 2048, width, to)
        for width in (352, 288)
        for to in targets
        for queries in (1, 64)
    )


OP = Op(
    name="kv4_gather",
    package="kv-cache-4bit",
    cases=_cases(),
    make_inputs=make_inputs,
    reference=_reference,
    oracle=_oracle,
    compare=compare,
    compare_oracle=_compare_oracle,
    traffic=lambda case: traffic(
        case.queries * case.topk, case.width, case.to, 8 if case.ids == "int64" else 4
    ),
    implementations={"triton": Implementation(run=_run, interpret=True)},
    peers={
        "sglang-dequantize": Implementation(
            run=_stock_dequantize,
            version=engine_version,
            archs=("sm90",),
            refuses=_stock_refuses("bf16"),
        ),
        "sglang-requantize": Implementation(
            run=_stock_requantize,
            version=engine_version,
            archs=("sm90",),
            refuses=_stock_refuses("fp8"),
        ),
    },
    binaries=(
        _binary("fp8_352", 352, "fp8"),
        _binary("bf16_352", 352, "bf16"),
        _binary("fp8_288", 288, "fp8", quick=False),
        _binary("bf16_288", 288, "bf16", quick=False),
    ),
    bench_cases=_bench_cases(),
    bench_options={"l2": "rotate"},
)


SWEPT = (
    *(Tile(4, 2, 4, ahead) for ahead in (False, True)),
    *(Tile(4, 1, 4, ahead) for ahead in (False, True)),  # to FP8 one turn in place of two
    Tile(2, 1, 2, True),
    Tile(2, 1, 4, True),  # to bf16 one turn in place of four
    Tile(1, 1, 2, True),
    Tile(4, 4, 4),  # longer: fewer programs look up ids
    *(Tile(8, 1, 4, ahead) for ahead in (False, True)),  # more under way
    Tile(8, 1, 8, True),
    Tile(16, 1, 4, True),
)

SWEEP = sweep(
    OP,
    _run,
    SWEPT,
    (
        *(Case(queries, 2048, to=to) for to in TILES for queries in (1, 4, 16, 64)),
        *(Case(64, 2048, 288, to) for to in TILES),
    ),
)
"""Other launches beside the launcher's::

    numinous bench numinous_kv_cache_4bit.workbench.kv4_gather:SWEEP --arch sm90
"""
