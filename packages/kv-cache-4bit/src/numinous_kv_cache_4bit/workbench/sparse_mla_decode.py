# SPDX-License-Identifier: Apache-2.0
"""Cases, peers and binaries of `kernels.sparse_mla_decode`: what its tests, gates and benches are made from."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from numinous_kv_cache_4bit.kernels.codec import requantize_fp8
from numinous_kv_cache_4bit.kernels.kv4_gather import kv4_gather
from numinous_kv_cache_4bit.kernels.sparse_mla_binaries import BINARIES
from numinous_kv_cache_4bit.kernels.sparse_mla_decode import (
    BLOCK_N,
    PAGE,
    Impl,
    reference,
    row_format_of,
    sparse_mla_decode,
    traffic,
    triton_heads,
)
from numinous_tooling.testing.tensors import assert_bitwise_equal, assert_within
from numinous_tooling.workbench import Implementation, Op, Tensors, TritonBinary

KERNELS = "numinous_kv_cache_4bit.kernels.sparse_mla_decode"
SM_SCALE = 0.0416666  # of GLM-5.3: 1 / sqrt(576)
DISTINCT = 1000  # rows that are packed; a pool repeats them


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        requests, heads, topk: dense: topk is the longest length.
        width: of a row in bytes.
        queries: of a request.
        ids: int32 or int64.
        pattern: "all" are distinct; "edges" hold -1 in front, in the middle and behind, ids beyond the pool, ids that stand twice, and a
            query that names nothing; "sparse" are mostly -1, in whole tiles too; "nan" names one row of NaN.
        dense: page table and lengths, one of them 0 or 1.
        sink: with attention sink.
        layout: "plain", or "sliced": q, pool and table are parts of wider ones.
        splits: 0 lets the kernel choose.
        scale: the rows' global scale.
        peers: inputs for the peers too.
    """

    requests: int
    heads: int
    topk: int
    width: int = 352
    queries: int = 1
    ids: str = "int32"
    pattern: str = "all"
    dense: bool = False
    sink: bool = False
    layout: str = "plain"
    splits: int = 0
    scale: float = 1.0
    peers: bool = False


def make_inputs(case: Case, seed: int, device: Any) -> Tensors:
    """q, pool, table, and what the case has beside them. Slots that nobody names hold NaN in every field."""
    generator = torch.Generator(device).manual_seed(seed)
    row, tokens = row_format_of(case.width), case.requests * case.queries

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    per_request = -(-case.topk // PAGE) * PAGE
    named = case.requests * per_request if case.dense else max(1, tokens * case.topk)
    slots = (named + 2 * PAGE - 1) // PAGE * PAGE + PAGE
    distinct = min(DISTINCT, slots)
    latent = (0.5 * normal(distinct, 512) * torch.exp2(normal(512))).to(torch.bfloat16)
    rope = normal(distinct, row.rope_dim).to(torch.bfloat16)
    packed = row.pack(latent, rope)
    repeat = torch.arange(slots, device=device) % distinct
    sliced = case.layout == "sliced"
    memory = torch.full(
        (slots, 1, case.width + (48 if sliced else 0)), 0xFF, dtype=torch.uint8, device=device
    )
    pool = memory[..., 16 : 16 + case.width] if sliced else memory
    pool[PAGE:, 0] = packed[repeat[PAGE:]]
    q = normal(case.requests, case.queries, 2 * case.heads, 512 + row.rope_dim).to(torch.bfloat16)
    q = q[:, :, ::2] if sliced else q[:, :, : case.heads].contiguous()
    inputs: Tensors = {"q": q, "pool": pool}
    integer = getattr(torch, case.ids)
    if case.dense:
        pages = torch.randperm(
            case.requests * per_request // PAGE, generator=generator, device=device
        )
        table = (pages + 1).view(case.requests, -1)
        lengths = torch.randint(
            1, case.topk + 1, (case.requests,), generator=generator, device=device
        )
        lengths[-1:] = seed % 2
        lengths[:1] = case.topk
        beyond = torch.arange(table.shape[1], device=device) * PAGE >= lengths[:, None]
        table = torch.where(beyond, -1, table)  # pages that nobody needs
        inputs |= {"page_table": table.to(integer), "lengths": lengths.to(torch.int32)}
    else:
        index = (
            torch.randperm(named, generator=generator, device=device)[: tokens * case.topk] + PAGE
        )
        index = index.view(tokens, case.topk)
        _set_pattern(case, index, slots)
        if case.pattern == "nan" and tokens:
            pool[index[0, case.topk // 2], 0] = 0xFF
        index = index.to(integer).view(case.requests, case.queries, case.topk)
        inputs["index"] = torch.stack([index, -index], dim=-1)[..., 0] if sliced else index
    inputs["sink"] = 2 + 2 * normal(case.heads) if case.sink else None
    if case.peers:
        inputs["stock"] = memory[:, 0] if row.stock else requantize_fp8(packed)[repeat]
    return inputs


def _set_pattern(case: Case, index: torch.Tensor, slots: int) -> None:
    if case.pattern == "edges":
        index[:, 0] = index[:, -1] = index[:, case.topk // 2] = -1
        if case.topk > 6:
            index[:, 1], index[:, 2], index[:, 3] = slots, -7, 2**31 - 1
            index[:, 5] = index[:, 4]
        index[1:2] = -1
    elif case.pattern == "sparse":
        keep = torch.arange(case.topk, device=index.device) % 97 == 70
        index[:] = torch.where(keep, index, -1)


def _arguments(inputs: Tensors) -> Tensors:
    return {name: value for name, value in inputs.items() if name not in ("q", "pool", "stock")}


def _reference(case: Case, inputs: Tensors) -> Tensors:
    return reference(
        inputs["q"],
        inputs["pool"][:, 0],
        sm_scale=SM_SCALE,
        latent_scale=case.scale,
        **_arguments(inputs),
    )


def _oracle(case: Case, inputs: Tensors) -> Tensors:
    """Another way to the same: one query after the other, one row after the other, weights from the largest score."""
    from numinous_tooling.numerics import dequantize_fp8

    row, pool, q = row_format_of(case.width), inputs["pool"][:, 0], inputs["q"].double()
    out = q.new_zeros(*q.shape[:3], 512)
    lse = q.new_full(q.shape[:3], -torch.inf)
    for request in range(case.requests):
        for query in range(case.queries):
            named: list[int]
            if case.dense:
                seen = int(inputs["lengths"][request]) - (case.queries - 1 - query)
                pages = inputs["page_table"][request].tolist()
                named = [pages[at // PAGE] * PAGE + at % PAGE for at in range(max(0, seen))]
            else:
                ids = inputs["index"][request, query].tolist()
                named = [one for one in ids if 0 <= one < len(pool)]
            if not named:
                continue
            rows = pool[torch.tensor(named)].contiguous()
            if row.stock:
                fields = row.split(rows)
                latent = dequantize_fp8(fields["latent"], fields["scales"], dtype=torch.float32)
                rope = fields["rope"] if row.rope_dim else latent[:, :0]
            else:
                latent, rope = row.unpack(rows, dtype=torch.float32)
            latent = latent.double() * case.scale
            scores = q[request, query] @ torch.cat([latent, rope.double()], dim=1).T * SM_SCALE
            top = scores.amax(dim=1, keepdim=True)
            weights = (scores - top).exp()
            total = weights.sum(dim=1, keepdim=True)
            lse[request, query] = (top + total.log())[:, 0]
            if inputs["sink"] is not None:
                total = total + (inputs["sink"].double()[:, None] - top).exp()
            out[request, query] = weights / total @ latent
    return {"out": out, "lse": lse}


def _compare_oracle(case: Case, got: Tensors, exact: Tensors) -> None:
    # fp32 products of codes and scales on one side.
    torch.testing.assert_close(got["out"], exact["out"], rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(got["lse"], exact["lse"], rtol=1e-6, atol=1e-5, equal_nan=True)


ROUNDINGS = 3
"""Of 2^-9 each, relative to Σ p · |v|: p to bf16, v of FP8 rows to bf16, p by the error of scores. The output's own comes on top."""


def compare(case: Case, got: Tensors, want: Tensors) -> None:
    """Within what bf16's roundings make; NaN where the reference has it; names the first coordinate that is not."""
    assert {"out", "lse"} <= got.keys(), f"outputs are {sorted(got)}"
    if "magnitude" in got:  # of the reference itself
        assert_bitwise_equal("magnitude", got["magnitude"], want["magnitude"], any_nan=True)
    bound = 2.0**-9 * (ROUNDINGS * want["magnitude"] + want["out"].abs()) + 1e-30
    loose = 4e-3 if row_format_of(case.width).stock else 1e-3
    for name, limit in (("out", bound), ("lse", torch.full_like(want["lse"], loose))):
        assert_within(name, got[name], want[name], limit, any_nan=True)


def _ours(impl: Impl) -> Any:
    def run(case: Case, inputs: Tensors) -> Tensors:
        made = sparse_mla_decode(
            inputs["q"],
            inputs["pool"],
            sm_scale=SM_SCALE,
            latent_scale=case.scale,
            splits=case.splits or None,
            impl=impl,
            **_arguments(inputs),
        )
        return made._asdict()

    return run


def _not_four_bit(case: Case) -> str | None:
    return "made for 4-bit rows" if row_format_of(case.width).stock else None


# --- Peers ----------------------------------------------------------------------------------------------------------


def _flash_version() -> str:
    importlib.import_module("sgl_kernel.flash_mla")
    return f"sglang-kernel {metadata.version('sglang-kernel')}"


@functools.cache
def _plan(requests: int, queries: int, heads: int, topk: int, device: Any) -> tuple[Any, Any]:
    """FlashMLA's schedule, which the engine makes once a step and not once a layer."""
    from sgl_kernel.flash_mla import get_mla_metadata

    lengths = torch.full((requests,), topk, dtype=torch.int32, device=device)
    schedule = get_mla_metadata(
        cache_seqlens=lengths,
        num_q_tokens_per_head_k=queries * heads,
        num_heads_k=1,
        num_heads_q=heads,
        is_fp8_kvcache=True,
        topk=topk,
    )
    return lengths, schedule


def _flash(case: Case, q: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> Tensors:
    """As the engine calls it: heads padded to 64 or 128."""
    from sgl_kernel.flash_mla import flash_mla_with_kvcache

    padded = 64 if case.heads <= 64 else 128
    if padded != case.heads:
        wide = q.new_zeros(*q.shape[:2], padded, q.shape[3])
        wide[:, :, : case.heads] = q
        q = wide
    lengths, schedule = _plan(case.requests, case.queries, padded, case.topk, q.device)
    out, lse = flash_mla_with_kvcache(
        q=q,
        k_cache=rows.view(torch.float8_e4m3fn).view(-1, PAGE, 1, rows.shape[-1]),
        block_table=torch.empty((case.requests, 0), dtype=torch.int32, device=q.device),
        cache_seqlens=lengths,
        head_dim_v=512,
        tile_scheduler_metadata=schedule[0],
        num_splits=schedule[1],
        softmax_scale=SM_SCALE,
        indices=index,
        is_fp8_kvcache=True,
    )
    return {"out": out[:, :, : case.heads], "lse": lse.transpose(1, 2)[:, :, : case.heads]}


def _flash_fp8(case: Case, inputs: Tensors) -> Tensors:
    """The engine with an FP8 cache: the same rows, 656 or 528 bytes each."""
    return _flash(case, inputs["q"], inputs["stock"], inputs["index"])


def _gather_flash(case: Case, inputs: Tensors) -> Tensors:
    """This room's scratch path: 4-bit rows to FP8 rows, then FlashMLA on these."""
    index = inputs["index"]
    positions = torch.empty_like(index)
    rows = kv4_gather(inputs["pool"], index, to="fp8", positions=positions)
    return _flash(case, inputs["q"], rows, positions)


def _flash_refuses(four_bit: bool) -> Any:
    def refuses(case: Case) -> str | None:
        if not case.peers:
            return "the case has no inputs for it"
        if four_bit and row_format_of(case.width).stock:
            return "the rows are FP8 already"
        return None

    return refuses


# --- Binaries -------------------------------------------------------------------------------------------------------


def _binary(name: str, case: Case, *, split: bool, quick: bool = True) -> TritonBinary:
    row = row_format_of(case.width)
    pointers = {
        "q_ptr": "*bf16",
        "pool_ptr": "*u8",
        "index_ptr": "*i32",
        "out_ptr": "*fp32" if split else "*bf16",
        "lse_ptr": "*fp32",
    }
    strides = ("q_request_stride", "q_query_stride", "q_head_stride", "pool_stride")
    plain = ("index_stride", "slots", "queries", "heads", "width", "splits")
    heads = triton_heads(case.heads)
    return TritonBinary(
        name=name,
        kernel=f"{KERNELS}:_sparse_mla_decode_kernel",
        signature={
            **pointers,
            **dict.fromkeys((*strides, *plain), "i32"),
            "scale_log2": "fp32",
            "latent_scale": "fp32",
        },
        constants={
            "lengths_ptr": None,
            "sink_ptr": None,
            "WIDTH": row.width,
            "ROPE": row.rope_dim > 0,
            "HEADS": heads,
            "ROWS": BLOCK_N,
            "DENSE": False,
            "SPLIT": split,
            "NATIVE": True,
        },
        aligned=(*pointers, *strides),
        options={"num_warps": 8, "num_stages": 1},
        quick=quick,
    )


def _cases() -> tuple[Case, ...]:
    return (
        Case(0, 64, 8),
        Case(1, 16, 1),
        Case(1, 64, 64),  # one tile of one block: what the debug switch dumps
        Case(1, 64, 64, 656),
        Case(1, 16, 64),
        Case(1, 32, 64, 656),
        Case(2, 8, 35, pattern="edges", splits=1),
        Case(2, 33, 70, 288, pattern="edges", ids="int64", layout="sliced", sink=True),
        Case(3, 16, 70, 656, pattern="edges", splits=2, sink=True),
        Case(2, 20, 67, 528, 2, layout="sliced", splits=1, sink=True),
        Case(2, 16, 200, pattern="sparse", splits=3),
        Case(
            1, 5, 400, splits=19, sink=True
        ),  # more splits than tiles; joined by four groups of threads
        Case(1, 12, 97, pattern="nan", splits=2),
        Case(3, 10, 130, 288, 3, "int64", dense=True, splits=2),
        Case(2, 16, 70, 656, 2, dense=True, splits=1, sink=True),
        Case(1, 16, 40, scale=4.0, splits=1),
        # Less than half a tile, an odd number of halves.
        Case(1, 40, 20, splits=1),
        Case(1, 34, 90, 656, pattern="edges", splits=1),
        Case(1, 7, 155, 656, splits=1),
        # Buffers in their second and third turn.
        Case(1, 9, 330, splits=1),
        Case(1, 40, 330, 528, splits=1),
        Case(1, 18, 330, pattern="sparse", splits=1),
        # Longer lists and more heads, for the GPU.
        Case(2, 128, 515, splits=5, pattern="edges", sink=True),
        Case(3, 64, 2051, 288, 4, pattern="edges", ids="int64"),
        Case(2, 64, 2048, 656, 8, pattern="sparse"),
        Case(5, 64, 700, dense=True, queries=4, sink=True),
        Case(5, 8, 1000, 528, dense=True, ids="int64", layout="sliced"),
        Case(130, 64, 200, splits=1),
        Case(9, 24, 2048, pattern="edges"),
        Case(140, 16, 130, 656, splits=1),
        Case(2, 96, 130, 528, pattern="nan"),
        # A turn of whole lists and some that are split, one and two blocks a list.
        Case(140, 64, 700, 288, sink=True),
        Case(70, 128, 600, queries=2, pattern="edges"),
        Case(1, 128, 2048, scale=0.25),
    )


LARGE = 12_000
"""Elements of scores above which a case is left to the GPU."""


def _not_run(tier: str, case: Case) -> str | None:
    if tier == "device" or case.requests * case.queries * case.heads * case.topk <= LARGE:
        return None
    return "a case for the GPU"


def _bench_cases() -> tuple[Case, ...]:
    def bench(requests: int, heads: int, width: int = 352, queries: int = 1) -> Case:
        return Case(requests, heads, 2048, width, queries, peers=True)

    return (
        *(bench(b, 64) for b in (1, 8, 32, 64, 128)),
        *(bench(b, 128) for b in (64, 128)),
        *(bench(b, heads) for heads in (8, 16) for b in (8, 64, 128)),
        *(bench(b, heads, 656) for heads in (8, 16) for b in (8, 128)),
        *(bench(b, 64, 656) for b in (1, 8, 32, 64)),
        bench(32, 64, queries=4),
        *(bench(b, 64, 288) for b in (8, 64)),
    )


OP = Op(
    name="sparse_mla_decode",
    package="kv-cache-4bit",
    cases=_cases(),
    make_inputs=make_inputs,
    reference=_reference,
    oracle=_oracle,
    compare=compare,
    compare_oracle=_compare_oracle,
    traffic=lambda case: traffic(
        case.requests,
        case.queries,
        case.heads,
        case.width,
        case.topk,
        8 if case.ids == "int64" else 4,
        dense=case.dense,
    ),
    implementations={
        "cuda": Implementation(run=_ours("cuda"), archs=("sm90", "sm100", "sm103", "sm120")),
        "decoded": Implementation(run=_ours("decoded"), archs=("sm90",), refuses=_not_four_bit),
        "packed": Implementation(run=_ours("packed"), archs=("sm90",), refuses=_not_four_bit),
        "triton": Implementation(
            run=_ours("triton"),
            interpret=True,
            refuses=lambda case: (
                "timed with few requests only" if case.peers and case.requests > 8 else None
            ),
        ),
    },
    peers={
        "flashmla-fp8": Implementation(
            run=_flash_fp8, version=_flash_version, archs=("sm90",), refuses=_flash_refuses(False)
        ),
        "gather-flashmla": Implementation(
            run=_gather_flash, version=_flash_version, archs=("sm90",), refuses=_flash_refuses(True)
        ),
    },
    binaries=(
        *BINARIES,
        _binary("triton_352_16_split", Case(2, 16, 200, splits=3), split=True),
        _binary("triton_352_32", Case(1, 32, 64), split=False, quick=False),
        _binary("triton_656_16_split", Case(3, 16, 70, 656), split=True, quick=False),
    ),
    not_run=_not_run,
    bench_cases=_bench_cases(),
    bench_options={"l2": "cold"},
)
