# SPDX-License-Identifier: Apache-2.0
"""Cases, peers and binaries of `kernels.kv4_compact`: what its tests, gates and benches are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from numinous_kv_cache_4bit.kernels.kv4_compact import (
    COUNTS,
    IDS,
    WORDS,
    kv4_compact,
    reference,
    traffic,
)
from numinous_tooling.testing.tensors import assert_outputs_bitwise
from numinous_tooling.workbench import Implementation, Op, Tensors, TritonBinary

KERNELS = "numinous_kv_cache_4bit.kernels.kv4_compact"


@dataclass(frozen=True)
class Case:
    """One batch.

    Args:
        requests, drafts, topk: the table is [requests × drafts, topk].
        slots: of the pool.
        shared: of a hundred ids of a draft row, those that it has in common with its request's first row.
        edges: -1 in front, in the middle and behind, ids beyond the pool, the first and the last slot.
        strided: the table is a slice.
        none: all ids are -1.
    """

    requests: int
    drafts: int
    topk: int
    slots: int
    shared: int = 0
    ids: str = "int32"
    edges: bool = False
    strided: bool = False
    none: bool = False


def make_inputs(case: Case, seed: int, device: Any) -> Tensors:
    """The table; a request's ids are distinct within a row, as a top-k's are."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (case.requests, case.drafts, case.topk)

    def integers(high: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, device=device)

    table = integers(case.slots)
    table = torch.where(integers(100) < case.shared, table[:, :1], table)
    table = table.view(-1, case.topk)
    if case.none:
        table = torch.full_like(table, -1)
    if case.edges and table.numel() >= 12:
        flat, half = table.view(-1), table.numel() // 2
        flat[0] = flat[half] = flat[-1] = -1
        flat[1], flat[half + 1], flat[-2] = case.slots, -9, 2**31 - 1
        flat[2], flat[3] = 0, case.slots - 1
    table = table.to(getattr(torch, case.ids))
    if case.strided:
        table = torch.stack([table, -table], dim=-1)[..., 0]
    return {"table": table}


def _run(case: Case, inputs: Tensors) -> Tensors:
    return dict(kv4_compact(inputs["table"], case.slots)._asdict())


def _sorted(case: Case, inputs: Tensors) -> Tensors:
    """The same by torch without synchronising: sort, number the changes, put the numbers back."""
    flat = inputs["table"].reshape(-1)
    valid = (flat >= 0) & (flat < case.slots)
    keys, order = torch.sort(torch.where(valid, flat, case.slots))
    live = keys < case.slots
    first = live & (keys != torch.roll(keys, 1))
    first[:1] = live[:1]
    number = torch.cumsum(first, 0).sub(1).int()
    positions = torch.empty_like(number)
    positions[order] = torch.where(live, number, -1)
    bound = min(len(flat), case.slots)
    rows = torch.full((bound + 1,), -1, dtype=torch.int32, device=flat.device)
    rows[torch.where(first, number, bound).long()] = torch.where(first, keys, -1).int()
    count = first.sum(dtype=torch.int32).view(1)
    return {
        "rows": rows[:bound],
        "positions": positions.view(inputs["table"].shape),
        "count": count,
    }


def _torch_version() -> str:
    return f"torch {torch.__version__}"


def _oracle(case: Case, inputs: Tensors) -> Tensors:
    """By Python's sets."""
    table = inputs["table"]
    ids = table.reshape(-1).tolist()
    distinct = sorted({i for i in ids if 0 <= i < case.slots})
    place = {slot: at for at, slot in enumerate(distinct)}
    rows = distinct + [-1] * (min(len(ids), case.slots) - len(distinct))
    return {
        "rows": torch.tensor(rows, dtype=torch.int32),
        "positions": torch.tensor([place.get(i, -1) for i in ids], dtype=torch.int32).view(
            table.shape
        ),
        "count": torch.tensor([len(distinct)], dtype=torch.int32),
    }


def _cases() -> tuple[Case, ...]:
    return (
        Case(0, 4, 64, 100),
        Case(1, 1, 1, 1),
        Case(1, 1, 64, 33, edges=True),  # fewer slots than ids
        Case(2, 3, 100, 40_000, shared=90, edges=True),
        Case(1, 2, 300, 70_000, ids="int64", edges=True, strided=True),
        Case(1, 2, 37, 64, none=True),
        Case(1, 4, 600, 1200, shared=70, edges=True),  # several programs, most words full
    )


def _bench_cases() -> tuple[Case, ...]:
    return (
        *(Case(requests, 1, 2048, 5_000_000) for requests in (1, 64)),
        *(Case(requests, 4, 2048, 5_000_000, shared=90) for requests in (16, 64)),
        Case(64, 4, 2048, 40_000_000, shared=90),
    )


def _binary(name: str, signature: dict[str, str], **constants: int) -> TritonBinary:
    unaligned = ("total", "slots", "bound")
    return TritonBinary(
        name=name,
        kernel=f"{KERNELS}:_{name}_kernel",
        signature=signature,
        constants=constants,
        aligned=[k for k in signature if k not in unaligned],
        options={"num_warps": 4},
        quick=name == "scan",
    )


INTEGERS = dict.fromkeys(("total", "slots"), "i32")
TABLE, BITMAP, COUNTS_OF = {"table_ptr": "*i32"}, {"bitmap_ptr": "*i32"}, {"counts_ptr": "*i32"}

OP = Op(
    name="kv4_compact",
    package="kv-cache-4bit",
    cases=_cases(),
    make_inputs=make_inputs,
    reference=lambda case, inputs: reference(inputs["table"], case.slots),
    oracle=_oracle,
    compare=lambda case, got, want: assert_outputs_bitwise(got, want),
    traffic=lambda case: traffic(
        case.requests * case.drafts * case.topk, case.slots, 8 if case.ids == "int64" else 4
    ),
    implementations={"triton": Implementation(run=_run, interpret=True, exact=True)},
    peers={"torch-sort": Implementation(run=_sorted, version=_torch_version)},
    binaries=(
        _binary("mark", TABLE | BITMAP | COUNTS_OF | INTEGERS, IDS=IDS, WORDS=WORDS),
        _binary(
            "scan",
            BITMAP | COUNTS_OF | dict.fromkeys(("ranks_ptr", "rows_ptr", "count_ptr"), "*i32"),
            WORDS=WORDS,
            COUNTS=COUNTS,
        ),
        _binary(
            "remap",
            TABLE
            | BITMAP
            | dict.fromkeys(("ranks_ptr", "count_ptr", "rows_ptr", "positions_ptr"), "*i32")
            | INTEGERS
            | {"bound": "i32"},
            IDS=IDS,
        ),
    ),
    bench_cases=_bench_cases(),
    bench_options={"l2": "rotate"},
)
