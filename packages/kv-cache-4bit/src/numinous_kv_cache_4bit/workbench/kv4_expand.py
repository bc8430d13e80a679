# SPDX-License-Identifier: Apache-2.0
"""Cases, peer and binaries of `kernels.kv4_expand`: what its tests, gates and benches are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from numinous_kv_cache_4bit.kernels.codec import four_bit_format
from numinous_kv_cache_4bit.kernels.kv4_expand import TILE, Tile, kv4_expand, reference, traffic
from numinous_kv_cache_4bit.kernels.kv4_write import ROPE_MODES
from numinous_kv_cache_4bit.workbench.shared import engine_version, sweep
from numinous_tooling.testing.tensors import assert_bitwise_equal
from numinous_tooling.workbench import Implementation, Op, Tensors, TritonBinary

KERNEL = "numinous_kv_cache_4bit.kernels.kv4_expand:_kv4_expand_kernel"


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        requests: of the batch.
        longest: length of the longest request; the others are spread below it, the second has none.
        ids: int32 or int64: the table.
        numbers: int32 or int64: requests and lengths.
        pattern: "all" ids are distinct; "edges" holds -1, slot 0, ids beyond the pool, ids that two requests share, a request that is no row of the table,
            a length beyond the table and a negative one.
        rows: "written" by the encoder; "bytes" is anything: NaN scales, negative ones, NaN in rope.
        sliced: pool and table are parts of wider ones.
        equal: all requests are as long as the longest.
    """

    requests: int
    longest: int
    width: int = 352
    ids: str = "int32"
    numbers: str = "int64"
    pattern: str = "all"
    rows: str = "written"
    extra: int = 0
    sliced: bool = False
    equal: bool = False


def live_rows(case: Case) -> int:
    """Rows that a case without edges decodes."""
    return sum(length + case.extra for length in _lengths(case) if length + case.extra > 0)


def _lengths(case: Case) -> list[int]:
    if case.equal:
        return [case.longest] * case.requests
    return [
        case.longest * (case.requests - n) // case.requests if n != 1 else 0
        for n in range(case.requests)
    ]


def make_inputs(case: Case, seed: int, device: Any) -> Tensors:
    """Pool, table, requests, lengths, and a shadow with bytes that must stay where no live row is."""
    generator = torch.Generator(device).manual_seed(seed)
    row = four_bit_format(case.width)
    columns = case.longest + case.extra + 5
    slots = case.requests * columns + 9

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    memory = torch.randint(
        0, 256, (slots, 1, case.width + 64), generator=generator, device=device, dtype=torch.uint8
    )
    pool = memory[..., 32 : 32 + case.width]
    if case.rows == "written":
        distinct = min(slots, 60)
        latent = (normal(distinct, 512) * torch.exp2(2 * normal(512))).to(torch.bfloat16)
        rows = row.pack(latent, normal(distinct, row.rope_dim).to(torch.bfloat16))
        pool[:, 0] = rows[torch.arange(slots, device=device) % distinct]
    table = 1 + torch.randperm(slots - 1, generator=generator, device=device)
    table = table[: case.requests * columns].view(case.requests, columns)
    # Rows of the table in another order, and one that nobody asks for.
    table = torch.cat([table, table[:1].flip(1)])
    requests = torch.randperm(case.requests, generator=generator, device=device)
    lengths = torch.tensor(_lengths(case), device=device, dtype=torch.int64)
    if seed and case.requests > 1:  # the graph is replayed with other lengths
        lengths = lengths.roll(1)
    if case.pattern == "edges" and case.requests >= 5:
        first, second = requests[0], requests[2]
        table[first, :4] = torch.tensor([-1, 0, slots, -(2**31)], device=device)
        table[second, :3] = table[first, 4:7]
        requests[3] = len(table)
        requests[4] = -1
        lengths[0], lengths[2] = columns + 7, 3
        lengths[1] = -2 - case.extra
    table = table.to(getattr(torch, case.ids))
    if case.sliced:
        table = torch.cat([table, table], dim=1)[:, :columns]
    else:
        pool = pool.contiguous()
    kind = getattr(torch, case.numbers)
    out = normal(slots, 1, 512 + row.rope_dim).to(torch.bfloat16)
    return {"pool": pool, "table": table, "requests": requests.to(kind), "lengths": lengths.to(kind), "out": out}  # fmt: skip


def _reference(case: Case, inputs: Tensors) -> Tensors:
    pool, out = inputs["pool"][:, 0], inputs["out"][:, 0]
    table, requests, lengths = inputs["table"], inputs["requests"], inputs["lengths"]
    reference(pool, table, requests, lengths, out, extra=case.extra)
    return {"out": inputs["out"]}


def _oracle(case: Case, inputs: Tensors) -> Tensors:
    """Row by row, in fp64."""
    row, pool = four_bit_format(case.width), inputs["pool"][:, 0]
    values = torch.cat(row.unpack(pool, dtype=torch.float32), dim=-1).double()
    out = inputs["out"].double()
    for request, length in zip(inputs["requests"].tolist(), inputs["lengths"].tolist(), strict=True):  # fmt: skip
        if 0 <= request < len(inputs["table"]):
            for slot in inputs["table"][request, : max(0, length + case.extra)].tolist():
                if 0 <= slot < len(out):
                    out[slot, 0] = values[slot]
    return {"out": out}


def _run(case: Case, inputs: Tensors, tile: Tile = TILE) -> Tensors:
    kv4_expand(**inputs, extra=case.extra, tile=tile)
    return {"out": inputs["out"]}


def compare(case: Case, got: Tensors, want: Tensors) -> None:
    """Bit for bit; a NaN is a NaN."""
    assert got.keys() == want.keys(), f"outputs are {sorted(got)}, want {sorted(want)}"
    assert_bitwise_equal("out", got["out"], want["out"], any_nan=True)


def _compare_oracle(case: Case, got: Tensors, exact: Tensors) -> None:
    assert_bitwise_equal("out", got["out"].double(), exact["out"], any_nan=True)


def _stock_cast(case: Case, inputs: Tensors) -> Tensors:
    """SGLang 0.5.20's FlashAttention backend in front of absorbed MLA on an FP8 pool: the whole pool of the layer as bf16."""
    slots, one, columns = inputs["out"].shape
    pool = torch.empty(
        (slots, one, columns), dtype=torch.float8_e4m3fn, device=inputs["pool"].device
    )
    return {"stock": pool.to(torch.bfloat16)}


# --- Binaries -------------------------------------------------------------------------------------------------------


def _binary(name: str, width: int, batch: int, *, quick: bool = True) -> TritonBinary:
    pointers = {"pool_ptr": "*u8", "table_ptr": "*i32", "requests_ptr": "*i64", "lengths_ptr": "*i64", "out_ptr": "*u8"}  # fmt: skip
    strides = ("pool_stride", "table_stride", "out_stride")
    others = ("batch", "extra", "table_rows", "columns", "slots")
    return TritonBinary(
        name=name,
        kernel=KERNEL,
        signature={**pointers, **dict.fromkeys((*strides, *others), "i32")},
        constants={
            "BATCH": batch,
            "UNIT": TILE.unit,
            "GROUP": TILE.group,
            "ROWS": TILE.rows,
            "ROPE": ROPE_MODES[width],
            "AHEAD": False,
        },
        aligned=(*pointers, "pool_stride", "out_stride"),
        options={"num_warps": 4, "gfx950": {"num_warps": 2}},
        quick=quick,
    )


def _cases() -> tuple[Case, ...]:
    return (
        Case(0, 8),
        Case(1, 1),
        Case(3, 35),
        Case(5, 13, 288, "int64", "int32", "edges", sliced=True),
        Case(6, 40, pattern="edges", rows="bytes", extra=3),
        Case(2, 9, 416, rows="bytes", extra=-2),
        Case(33, 1, 288),  # other widths of the scan
        Case(129, 1),
    )


def _bench_cases() -> tuple[Case, ...]:
    return (
        Case(1, 4096, equal=True),
        Case(64, 2048, equal=True),
        Case(64, 2048, 288, equal=True),
        Case(64, 4096),  # lengths from 64 to 4096
        Case(256, 512, equal=True),
    )


OP = Op(
    name="kv4_expand",
    package="kv-cache-4bit",
    cases=_cases(),
    make_inputs=make_inputs,
    reference=_reference,
    oracle=_oracle,
    compare=compare,
    compare_oracle=_compare_oracle,
    traffic=lambda case: traffic(live_rows(case), case.width, 8 if case.ids == "int64" else 4),
    implementations={"triton": Implementation(run=_run, interpret=True)},
    peers={"sglang-cast": Implementation(run=_stock_cast, version=engine_version, archs=("sm90",))},
    binaries=(
        _binary("352_32", 352, 32),
        _binary("288_64", 288, 64, quick=False),
        _binary("352_256", 352, 256, quick=False),
        _binary("416_32", 416, 32, quick=False),
    ),
    bench_cases=_bench_cases(),
    bench_options={"l2": "rotate"},
)


SWEPT = (
    Tile(2112, 32, 8, 2, 4),  # 16 programs for an SM: all that 32 registers allow
    Tile(1024, 8, 8, 2, 4),  # a request's rows on four times as many programs
    Tile(2112, 8, 8, 2, 4),  # both; rope parts ahead would spill
    Tile(4224, 8, 8, 2, 4),
    Tile(2112, 4, 4, 2, 4, True),
    *(Tile(1584, 8, 8, 8, 4, ahead) for ahead in (False, True)),  # eight rows under way
    Tile(1056, 8, 8, 4, 8, True),
)

SWEEP = sweep(
    OP,
    _run,
    SWEPT,
    (Case(1, 512, equal=True), Case(8, 4096, equal=True), *_bench_cases()),
)
"""Other launches beside the launcher's::

    numinous bench numinous_kv_cache_4bit.workbench.kv4_expand:SWEEP --arch sm90
"""
