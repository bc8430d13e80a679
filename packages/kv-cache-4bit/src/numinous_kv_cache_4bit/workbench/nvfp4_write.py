# SPDX-License-Identifier: Apache-2.0
"""Cases, peers and binaries of `kernels.nvfp4_write`: what its tests, gates and benches are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from numinous_kv_cache_4bit.kernels.codec import ScaleChoice
from numinous_kv_cache_4bit.kernels.nvfp4_write import (
    BLOCK,
    TILE,
    Tile,
    nvfp4_write,
    reference,
    traffic,
)
from numinous_kv_cache_4bit.workbench.kv4_write import EDGES
from numinous_kv_cache_4bit.workbench.shared import engine_version, sweep
from numinous_tooling.testing.tensors import assert_outputs_bitwise
from numinous_tooling.workbench import Implementation, Op, Tensors, TritonBinary

KERNEL = "numinous_kv_cache_4bit.kernels.nvfp4_write:_nvfp4_write_kernel"
GAP = 16
"""Bytes between two heads of a sliced buffer."""


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        heads: of K and V.
        k_dim, v_dim: of a head.
        ids: int32 or int64.
        slots: "all" are distinct and written; "edges" hold slot 0, negative ids, ids beyond the pool, and ids that stand twice.
        values: "edges" holds zeros, NaN, inf, subnormals, the largest numbers and ties, and every middle of the module's E2M1 rounding.
        layout: "plain"; "slices" of a fused projection, of wider ids and of wider buffers; "odd" starts at odd elements, which are copied;
            "heads_first": buffers whose heads are the outer dimension.
        k_scale, v_scale: global scales.
        on_device: they lie in tensors.
        keys: "nvfp4" or "fp8".
        choice: of block scales.
    """

    tokens: int
    heads: int = 8
    k_dim: int = 128
    v_dim: int = 128
    ids: str = "int64"
    slots: str = "all"
    values: str = "normal"
    layout: str = "plain"
    k_scale: float = 1.0
    v_scale: float = 1.0
    on_device: bool = False
    keys: str = "nvfp4"
    choice: ScaleChoice = "amax"

    @property
    def widths(self) -> dict[str, int]:
        """Bytes of a head in each buffer there is."""
        widths = {name: dim // 2 for name, dim in (("k", self.k_dim), ("v", self.v_dim))}
        widths |= {"k_scale": self.k_dim // BLOCK, "v_scale": self.v_dim // BLOCK}
        if self.keys == "fp8":
            widths["k"] = self.k_dim
            del widths["k_scale"]
        return widths


def make_inputs(case: Case, seed: int, device: Any) -> Tensors:
    """Buffers of random bytes with what lies between their heads, ids, K and V."""
    generator = torch.Generator(device).manual_seed(seed)
    size = 2 * case.tokens + 70
    dims = {"k": case.k_dim, "v": case.v_dim}
    inputs: Tensors = {}
    for name, width in case.widths.items():
        first, second = size, case.heads
        if case.layout == "heads_first":
            first, second = second, first
        inputs[f"{name}_memory"] = torch.randint(
            0, 256, (first, second, width + (GAP if case.layout == "slices" else 0)),
            generator=generator, device=device, dtype=torch.uint8,
        )  # fmt: skip
    loc = 1 + torch.randperm(size - 1, generator=generator, device=device)[: case.tokens]
    values = [
        _values(case, dim, scale, generator, device)
        for dim, scale in ((case.k_dim, case.k_scale), (case.v_dim, case.v_scale))
    ]
    if case.slots == "edges" and case.tokens >= 8:
        outside = torch.tensor([0, -1, size, 0, -(2**31), 2**31 - 1], device=device)
        loc[: len(outside)] = outside
        loc[-1] = loc[-2]
        for x in values:
            x[-1] = x[-2]  # which of two is written is not defined
    loc = loc.to(getattr(torch, case.ids))
    if case.layout == "slices":
        fused = torch.cat([x.flatten(1) for x in (*values, values[0])], dim=1)
        widths = [case.heads * dim for dim in (*dims.values(), case.k_dim)]
        parts = fused.split(widths, dim=1)
        values = [
            part.view(-1, case.heads, dim)
            for part, dim in zip(parts[:2], dims.values(), strict=True)
        ]
        loc = torch.stack([loc, -loc], dim=1)[:, 0]
    elif case.layout == "odd":
        values = [_at_odd_elements(x) for x in values]
    for name, scale in (("k_global", case.k_scale), ("v_global", case.v_scale)):
        inputs[name] = torch.tensor([scale], device=device) if case.on_device else scale
    return {**inputs, "loc": loc, "k": values[0], "v": values[1]}


def _values(
    case: Case, dim: int, scale: float, generator: torch.Generator, device: Any
) -> torch.Tensor:
    shape = (case.tokens, case.heads, dim)
    spread = torch.exp2(2 * torch.randn(dim, generator=generator, device=device))
    x = torch.randn(*shape, generator=generator, device=device) * spread * scale
    x = x.to(torch.bfloat16)
    if case.values == "edges" and case.tokens:
        blocks = x.flatten().view(-1, BLOCK)
        for number in range(min(len(blocks) // 2, 3 * len(EDGES))):
            edge = EDGES[number % len(EDGES)]
            made = torch.tensor(edge * BLOCK if len(edge) == 1 else edge) * scale
            blocks[-1 - number, : len(made)] = made.to(torch.bfloat16).to(device)
    return x


def _at_odd_elements(x: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return flat[1:].view(x.shape).copy_(x)


def buffers_of(case: Case, inputs: Tensors) -> Tensors:
    """The buffers in their memories, under the names of `nvfp4_write`'s arguments."""
    found = {"k_scale_buffer": None}
    for name in case.widths:
        memory = inputs[f"{name}_memory"]
        if case.layout == "heads_first":
            memory = memory.transpose(0, 1)
        elif case.layout == "slices":
            memory = memory[..., GAP // 2 : -GAP // 2]
        found[f"{name}_buffer"] = memory
    return found


def _call(function: Any, case: Case, inputs: Tensors, **launch: Any) -> Tensors:
    function(
        inputs["k"],
        inputs["v"],
        inputs["loc"],
        **buffers_of(case, inputs),
        k_global_scale=inputs["k_global"],
        v_global_scale=inputs["v_global"],
        scale_choice=case.choice,
        **launch,
    )
    return {name: value for name, value in inputs.items() if name.endswith("_memory")}


def _oracle(case: Case, inputs: Tensors) -> Tensors:
    """What the written blocks stand for, in fp64; the scales are judged with the codes."""
    blocks = {name: inputs[name].double().unflatten(-1, (-1, BLOCK)) for name in ("k", "v")}
    return {
        **{f"{name}_memory": None for name in case.widths},
        "k_memory": (inputs["loc"], blocks["k"]),
        "v_memory": (inputs["loc"], blocks["v"]),
    }


def _compare_oracle(case: Case, got: Tensors, exact: Tensors) -> None:
    """Half a step of E2M1, or what its largest code does not reach; of E4M3 likewise."""
    buffers = buffers_of(case, got)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    for name, scale in (("k", case.k_scale), ("v", case.v_scale)):
        loc, want = exact[f"{name}_memory"]
        keep = (loc > 0) & (loc < len(buffers[f"{name}_buffer"]))
        slots, want = loc[keep].long(), want[keep]
        if name == "k" and case.keys == "fp8":
            _compare_fp8(case, buffers["k_buffer"][slots], want.flatten(-2))
            continue
        rows, codes = buffers[f"{name}_buffer"][slots], buffers[f"{name}_scale_buffer"][slots]
        above = float(torch.tensor(scale))
        unit = codes.contiguous().view(torch.float8_e4m3fn).double().unsqueeze(-1) * above
        elements = (
            torch.stack([rows & 15, rows >> 4], dim=-1).flatten(-2).unflatten(-1, (-1, BLOCK))
        )
        value = table[(elements & 7).long()] * torch.where(elements >= 8, -1, 1) * unit
        error, size = (value - want).abs(), want.abs()
        step = torch.where(size <= 2 * unit, 0.25, torch.where(size <= 4 * unit, 0.5, 1.0)) * unit
        limit = torch.maximum(step * (1 + 2.0**-8), (size - 6 * unit) * (1 + 2.0**-20))
        limit = limit.clamp(min=2.0**-11 * above * (1 + 2.0**-20))
        wrong = want.isfinite().all(-1, keepdim=True) & ~(error <= limit)
        if bool(wrong.any()):
            at = tuple(int(i) for i in wrong.nonzero()[0])
            raise AssertionError(
                f"{name}{list(at)}: off by {float(error[at])}, bound {float(limit[at])}"
            )


def _compare_fp8(case: Case, rows: torch.Tensor, want: torch.Tensor) -> None:
    scale = float(torch.tensor(case.k_scale))
    value = rows.view(torch.float8_e4m3fn).double() * scale
    size = want.abs() / scale
    limit = (size * 2.0**-4).clamp(min=2.0**-10) * (1 + 2.0**-20)
    limit = torch.where(size > 448, size - 448, limit) * scale
    wrong = want.isfinite() & ~((value - want).abs() <= limit)
    assert not bool(wrong.any()), (
        f"k in FP8: {int(wrong.sum())} values are further off than half a step"
    )


# --- Peers ----------------------------------------------------------------------------------------------------------


def _stock(case: Case, inputs: Tensors, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    slots = len(inputs["k_memory"])
    made = [
        torch.empty((slots, case.heads * dim), dtype=dtype, device=inputs["k"].device)
        for dim in (case.k_dim, case.v_dim)
    ]
    return made[0], made[1]


def _store(case: Case, inputs: Tensors, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    from sglang.kernels.ops.kvcache.kvcache import store_cache

    k_pool, v_pool = _stock(case, inputs, k.dtype)
    store_cache(k.flatten(1), v.flatten(1), k_pool, v_pool, inputs["loc"])
    return {"k": k_pool, "v": v_pool}


def _engine_bf16(case: Case, inputs: Tensors) -> Tensors:
    """SGLang 0.5.20 with a bf16 pool: the store alone."""
    return _store(case, inputs, inputs["k"], inputs["v"])


def _engine_fp8(case: Case, inputs: Tensors) -> Tensors:
    """SGLang 0.5.20 with --kv-cache-dtype fp8_e4m3: two casts, then the store."""
    k, v = (inputs[name].to(torch.float8_e4m3fn).view(torch.uint8) for name in ("k", "v"))
    return _store(case, inputs, k, v)


def _engine_nvfp4(case: Case, inputs: Tensors) -> Tensors:
    """SGLang 0.5.20 with --kv-cache-dtype nvfp4: two FlashInfer calls and four `index_put`."""
    from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import NVFP4KVCacheMethod

    method = NVFP4KVCacheMethod(1, str(inputs["k"].device))
    buffers = buffers_of(case, inputs)
    method.quantize_and_store(
        *(buffers[f"{name}_buffer"] for name in ("k", "v", "k_scale", "v_scale")),
        inputs["loc"],
        inputs["k"],
        inputs["v"],
        method.k_scales_gpu,
        method.v_scales_gpu,
    )
    return {"k": buffers["k_buffer"], "v": buffers["v_buffer"]}


def _flashinfer_version() -> str:
    import importlib
    from importlib import metadata

    importlib.import_module("flashinfer")
    return f"{engine_version()}, flashinfer {metadata.version('flashinfer-python')}"


# --- Binaries -------------------------------------------------------------------------------------------------------


def _binary(name: str, case: Case, *, quick: bool = True) -> TritonBinary:
    pointers = {
        "k_ptr": "*i32", "v_ptr": "*i32", "loc_ptr": "*i64",
        "k_buffer_ptr": "*u8", "v_buffer_ptr": "*u8", "v_scales_ptr": "*u8",
    }  # fmt: skip
    fp8 = case.keys == "fp8"
    if not fp8:
        pointers["k_scales_ptr"] = "*u8"
    if case.on_device:
        pointers |= {"k_global_ptr": "*fp32", "v_global_ptr": "*fp32"}
    strides = {
        "k_token_stride": case.heads * case.k_dim // 2,
        "k_head_stride": case.k_dim // 2,
        "v_token_stride": case.heads * case.v_dim // 2,
        "v_head_stride": case.v_dim // 2,
        "k_buffer_slot_stride": case.heads * case.widths["k"],
        "k_buffer_head_stride": case.widths["k"],
        "v_buffer_slot_stride": case.heads * case.v_dim // 2,
        "v_buffer_head_stride": case.v_dim // 2,
        "k_scales_slot_stride": 0 if fp8 else case.heads * case.k_dim // BLOCK,
        "k_scales_head_stride": 0 if fp8 else case.k_dim // BLOCK,
        "v_scales_slot_stride": case.heads * case.v_dim // BLOCK,
        "v_scales_head_stride": case.v_dim // BLOCK,
    }
    return TritonBinary(
        name=name,
        kernel=KERNEL,
        signature={
            **pointers,
            **dict.fromkeys((*strides, "tokens", "slots"), "i32"),
            "k_inverse": "fp32",
            "v_inverse": "fp32",
        },
        constants={
            **({} if case.on_device else {"k_global_ptr": None, "v_global_ptr": None}),
            **({"k_scales_ptr": None} if fp8 else {}),
            "loc_stride": 1,
            # Heads side by side: one row a token.
            "HEADS": 1,
            "K_PER_ROW": case.heads * case.k_dim // BLOCK,
            "V_PER_ROW": case.heads * case.v_dim // BLOCK,
            "TILE": TILE.blocks,
            "SEARCH": case.choice == "mse",
            "NATIVE": 1,
            "gfx950": {"NATIVE": 0},
        },
        aligned=[*pointers, *(name for name, stride in strides.items() if stride % 16 == 0)],
        options={"num_warps": TILE.warps},
        # A block lies in one thread: no exchange. Two codes in one minimum of three.
        required={"sm90": ("VIMNMX3.U16x2", "LDG.E.128")},
        forbidden=dict.fromkeys(("sm90", "sm100", "sm103", "sm120"), ("BAR", "SHFL", "LDS")),
        quick=quick,
    )


def _cases() -> tuple[Case, ...]:
    return (
        Case(0),
        Case(1, heads=1, k_dim=64, v_dim=64),
        Case(3),
        Case(3, on_device=True, k_scale=0.013, v_scale=3.7e-3),
        Case(2, heads=2, k_dim=192, v_dim=128, layout="slices", ids="int32", k_scale=0.25),
        Case(5, heads=3, k_dim=96, v_dim=96, layout="odd", v_scale=1.7),
        Case(2, heads=1, k_dim=256, v_dim=512, layout="heads_first"),
        Case(8, heads=2, k_dim=64, v_dim=256, slots="edges", values="edges", layout="slices", k_scale=1024.0),
        Case(9, heads=4, slots="edges", values="edges", ids="int32", k_scale=0.013, v_scale=7e-4),
        Case(20, heads=4, k_dim=16, v_dim=32, slots="edges", values="edges"),
        Case(13, slots="edges", values="edges", layout="slices"),  # seven programs, the last half full
        Case(3, choice="mse"),
        Case(9, heads=4, slots="edges", values="edges", layout="slices", choice="mse", k_scale=2.0**-7, v_scale=64.0),
        Case(3, keys="fp8"),
        Case(3, keys="fp8", choice="mse"),
        Case(0, keys="fp8"),
        Case(9, heads=3, k_dim=192, v_dim=128, slots="edges", values="edges", layout="slices", keys="fp8", choice="mse", k_scale=0.013),
        Case(8, heads=2, k_dim=16, v_dim=512, slots="edges", values="edges", layout="heads_first", keys="fp8", k_scale=3.7, v_scale=0.02, on_device=True),
        Case(5, heads=3, k_dim=96, v_dim=96, layout="odd", keys="fp8", ids="int32"),
    )  # fmt: skip


def _bench_cases() -> tuple[Case, ...]:
    return (
        *(Case(tokens) for tokens in (1, 16, 64, 512, 4096, 16384)),
        *(Case(tokens, heads=4, k_dim=256, v_dim=256) for tokens in (64, 4096, 16384)),
        Case(4096, k_scale=0.013, v_scale=0.021, on_device=True),
        *(Case(tokens, choice="mse") for tokens in (64, 4096, 16384)),
        *(
            Case(tokens, keys="fp8", choice=choice)
            for choice in ("amax", "mse")
            for tokens in (64, 4096, 16384)
        ),
    )


OP = Op(
    name="nvfp4_write",
    package="kv-cache-4bit",
    cases=_cases(),
    make_inputs=make_inputs,
    reference=lambda case, inputs: _call(reference, case, inputs),
    compare=lambda case, got, want: assert_outputs_bitwise(got, want),
    traffic=lambda case: traffic(
        case.tokens,
        case.heads,
        case.k_dim,
        case.v_dim,
        8 if case.ids == "int64" else 4,
        fp8_keys=case.keys == "fp8",
    ),
    implementations={
        "triton": Implementation(
            run=lambda case, inputs: _call(nvfp4_write, case, inputs), interpret=True, exact=True
        )
    },
    peers={
        "sglang-fp8": Implementation(run=_engine_fp8, version=engine_version),
        "sglang-bf16": Implementation(run=_engine_bf16, version=engine_version),
        "sglang-nvfp4": Implementation(
            run=_engine_nvfp4,
            version=_flashinfer_version,
            archs=("sm90", "sm100", "sm120"),
            refuses=lambda case: "it has no FP8 keys" if case.keys == "fp8" else None,
        ),
    },
    binaries=(
        _binary("d128", Case(3)),
        _binary("d128_scales", Case(3, on_device=True), quick=False),
        _binary("d256", Case(64, heads=4, k_dim=256, v_dim=256), quick=False),
        _binary("d128_mse", Case(3, choice="mse"), quick=False),
        _binary("d128_k8", Case(3, keys="fp8"), quick=False),
        _binary("d128_k8_mse", Case(3, keys="fp8", choice="mse"), quick=False),
    ),
    oracle=_oracle,
    compare_oracle=_compare_oracle,
    bench_cases=_bench_cases(),
    bench_options={"l2": "rotate"},
)

SWEPT = (
    *(Tile(32 * warps, warps) for warps in (1, 2, 4, 8)),  # a block a thread
    Tile(256, 4),  # two
)

SWEEP = sweep(
    OP,
    lambda case, inputs, tile: _call(nvfp4_write, case, inputs, tile=tile),
    SWEPT,
    (
        *(Case(tokens) for tokens in (64, 1024, 4096, 16384, 65536)),
        *(Case(tokens, keys="fp8") for tokens in (4096, 16384)),
        *(Case(tokens, choice="mse") for tokens in (64, 4096)),
    ),
)
"""Other tiles beside the launcher's::

    numinous bench numinous_kv_cache_4bit.workbench.nvfp4_write:SWEEP --arch sm90
"""
