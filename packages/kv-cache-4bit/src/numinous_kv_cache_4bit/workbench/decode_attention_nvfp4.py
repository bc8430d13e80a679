# SPDX-License-Identifier: Apache-2.0
"""Cases, peers and binaries of `kernels.decode_attention_nvfp4`: what its tests, gates and benches are made from."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from numinous_kv_cache_4bit.kernels.decode_attention_nvfp4 import (
    SMALL_SHARED,
    decode_attention_nvfp4,
    plan,
    reference,
    traffic,
    words_of,
)
from numinous_kv_cache_4bit.kernels.nvfp4_write import BLOCK, encode
from numinous_kv_cache_4bit.workbench.shared import engine_version
from numinous_tooling.numerics import dequantize_nvfp4, quantize_fp8_tensor
from numinous_tooling.testing.tensors import assert_bitwise_equal, assert_within
from numinous_tooling.workbench import Implementation, Op, Tensors, TritonBinary

KERNELS = "numinous_kv_cache_4bit.kernels.decode_attention_nvfp4"
DISTINCT = 64  # tokens that are packed; a pool repeats them
GAP = 16
"""Bytes between two heads of a sliced buffer."""
UNNAMED = 1
"""A slot that no list names: it holds NaN, so a token read behind the lists shows."""


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        requests, heads, kv_heads, tokens: tokens are those of the longest list.
        k_dim, v_dim: of a head.
        ids: int32 or int64, of both tables.
        lists: "all" are of the longest length and name distinct slots; "edges": lists of 0, 1 and odd lengths, with -1 and ids beyond the
            pool in them, ids that stand twice, slot 0, and one of nothing but -1; "nan" names one token of NaN.
        window: 0 for none.
        cap: of logits.
        sink: "", "float32" or "bfloat16".
        layout: "plain"; "sliced": q, buffers and lists are parts of wider ones, out too; "heads_first": heads are the buffers' outer dimension.
        splits: 0 lets the kernel choose.
        scale: the global scale of K; V's is its fifth.
        on_device: they lie in tensors.
        spread: of q, as a power of two.
        peers: inputs for the peers too.
        keys: "nvfp4" or "fp8".
    """

    requests: int
    heads: int
    kv_heads: int
    tokens: int
    k_dim: int = 128
    v_dim: int = 128
    ids: str = "int64"
    lists: str = "all"
    window: int = 0
    cap: float = 0.0
    sink: str = ""
    layout: str = "plain"
    splits: int = 0
    scale: float = 1.0
    on_device: bool = False
    spread: int = 0
    peers: bool = False
    keys: str = "nvfp4"


def make_inputs(case: Case, seed: int, device: Any) -> Tensors:
    """q, buffers, lists, and what the case has beside them. Slots that nobody names hold NaN."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    named = case.requests * case.tokens
    slots = named + 9
    ids = 5 + torch.randperm(named, generator=generator, device=device)
    ids = ids.view(case.requests, case.tokens)
    lengths = torch.full((case.requests,), case.tokens, device=device)
    if case.lists == "edges" and case.requests > 2:
        lengths = torch.randint(
            1, case.tokens + 1, (case.requests,), generator=generator, device=device
        )
        lengths[0], lengths[1], lengths[-1] = case.tokens, 0, 1 + seed % 2
        ids[0, 0] = ids[0, case.tokens // 2] = ids[0, -1] = -1
        if case.tokens > 6:
            ids[0, 1], ids[0, 2], ids[0, 3] = slots, -7, 2**31 - 1
            ids[0, 5], ids[0, 6] = ids[0, 4], 0
        ids[2] = -1
    listed = torch.cat([one[: int(length)] for one, length in zip(ids, lengths, strict=True)]) if case.requests else ids.flatten()  # fmt: skip
    starts = torch.zeros(case.requests + 1, dtype=torch.int64, device=device)
    starts[1:] = lengths.cumsum(0)
    # As the engine's buffer it is as long as the longest lists need, whatever the seed makes of their lengths.
    indices = listed.new_full((named,), UNNAMED)
    indices[: len(listed)] = listed
    integer = getattr(torch, case.ids)
    inputs: Tensors = {"kv_indptr": starts.to(integer), "kv_indices": indices.to(integer)}
    if case.layout == "sliced":
        inputs = {
            name: torch.stack([torch.cat([table, table.new_full((7,), -3)])] * 2, dim=1)[:, 0]
            for name, table in inputs.items()
        }
    distinct = min(DISTINCT, slots)
    repeat = torch.arange(slots, device=device) % distinct
    used = torch.zeros(slots, dtype=torch.bool, device=device)
    used[listed[(listed >= 0) & (listed < slots)]] = True
    for name, dim in (("k", case.k_dim), ("v", case.v_dim)):
        x = normal(distinct, case.kv_heads, dim) * torch.exp2(normal(dim))
        x = x.to(torch.bfloat16)
        fp8 = name == "k" and case.keys == "fp8"
        packed = (quantize_fp8_tensor(x, 1.0), None) if fp8 else encode(x)
        for part, rows in zip(("buffer", "scale_buffer"), packed, strict=True):
            if rows is None:
                inputs[f"{name}_{part}"] = None
                continue
            memory = torch.full(
                (slots, case.kv_heads, rows.shape[2] + (GAP if case.layout == "sliced" else 0)),
                0xFF, dtype=torch.uint8, device=device,
            )  # fmt: skip
            if case.layout == "heads_first":
                memory = memory.transpose(0, 1).contiguous().transpose(0, 1)
            buffer = memory[..., GAP // 2 : -GAP // 2] if case.layout == "sliced" else memory
            buffer[used] = rows[repeat[used]]
            inputs[f"{name}_{part}"] = buffer
    if case.lists == "nan":
        if case.keys == "fp8":
            inputs["k_buffer"][listed[case.tokens // 2], 0, 20] = 0x7F
        else:
            inputs["k_scale_buffer"][listed[case.tokens // 2], 0, 1] = 0x7F
        inputs["v_scale_buffer"][listed[case.tokens // 3], -1, 0] = 0x7F
    q = normal(case.requests, 2 * case.heads, case.k_dim) * 2.0**case.spread
    q = q.to(torch.bfloat16)
    sliced = case.layout == "sliced"
    inputs["q"] = q[:, ::2] if sliced else q[:, : case.heads].contiguous()
    inputs["sinks"] = (
        (1 + 2 * normal(case.heads)).to(getattr(torch, case.sink)) if case.sink else None
    )
    inputs["out"] = (
        torch.full((case.requests, 2 * case.heads, case.v_dim), torch.nan, dtype=torch.bfloat16, device=device)[:, 1::2]
        if sliced else None
    )  # fmt: skip
    for name, scale in scales_of(case).items():
        inputs[name] = torch.tensor([scale], device=device) if case.on_device else scale
    if case.peers:
        for name in ("k", "v"):
            rows, scales = (inputs[f"{name}_{part}"] for part in ("buffer", "scale_buffer"))
            if scales is None:
                inputs[f"{name}_fp8"] = rows
                continue
            rows = dequantize_nvfp4(rows[listed[:distinct]], scales[listed[:distinct]])
            inputs[f"{name}_fp8"] = rows.to(torch.float8_e4m3fn).view(torch.uint8)[repeat]
        inputs["page_table"] = ids.to(torch.int32)
        inputs["lengths"] = lengths.to(torch.int32)
    return inputs


def scales_of(case: Case) -> dict[str, float]:
    """The global scales."""
    return {
        "k_global_scale": case.scale,
        "v_global_scale": case.scale if case.scale == 1.0 else case.scale / 5,
    }


ARGUMENTS = (
    "q", "k_buffer", "v_buffer", "k_scale_buffer", "v_scale_buffer", "kv_indptr", "kv_indices",
    "k_global_scale", "v_global_scale", "sinks",
)  # fmt: skip


def _arguments(case: Case, inputs: Tensors) -> Tensors:
    return {
        **{name: inputs[name] for name in ARGUMENTS},
        "sm_scale": case.k_dim**-0.5,
        "window": case.window or None,
        "logit_cap": case.cap,
    }


def _oracle(case: Case, inputs: Tensors) -> Tensors:
    """Another way to the same: one head of one request after the other, elements by a table, weights from the largest score."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    table = torch.cat([table, -table])

    def rows(name: str, ids: list[int], head: int) -> torch.Tensor:
        packed = inputs[f"{name}_buffer"][ids, head]
        above = scales_of(case)[f"{name}_global_scale"]
        if inputs[f"{name}_scale_buffer"] is None:
            return packed.contiguous().view(torch.float8_e4m3fn).double() * above
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
        scale = inputs[f"{name}_scale_buffer"][ids, head].contiguous().view(torch.float8_e4m3fn)
        return table[codes.long()] * scale.double().repeat_interleave(BLOCK, dim=-1) * above

    q, starts = inputs["q"].double(), inputs["kv_indptr"].tolist()
    out = torch.zeros(case.requests, case.heads, case.v_dim, dtype=torch.float64)
    lse = torch.full((case.requests, case.heads), -torch.inf, dtype=torch.float64)
    slots = len(inputs["k_buffer"])
    for request in range(case.requests):
        ids = inputs["kv_indices"][starts[request] : starts[request + 1]].tolist()
        ids = [one for one in ids[-case.window :] if 0 <= one < slots]
        for head in range(case.heads if ids else 0):
            kv_head = head * case.kv_heads // case.heads
            scores = rows("k", ids, kv_head) @ q[request, head] / math.sqrt(case.k_dim)
            if case.cap:
                scores = case.cap * torch.tanh(scores / case.cap)
            top = scores.max()
            weights = (scores - top).exp()
            total = weights.sum()
            lse[request, head] = top + total.log()
            if case.sink:
                total = total + (inputs["sinks"][head].double() - top).exp()
            out[request, head] = weights / total @ rows("v", ids, kv_head)
    return {"out": out, "lse": lse}


def _compare_oracle(case: Case, got: Tensors, exact: Tensors) -> None:
    # Global scales are fp32 in a tensor, and Python's numbers otherwise.
    loose = 1e-6 if case.on_device else 1e-9
    torch.testing.assert_close(got["out"], exact["out"], rtol=loose, atol=loose, equal_nan=True)
    torch.testing.assert_close(got["lse"], exact["lse"], rtol=loose, atol=loose, equal_nan=True)


def compare(case: Case, got: Tensors, want: Tensors) -> None:
    """Within what the roundings make: p to fp16 (2^-11), out to bf16 (2^-8), p by the error of scores in fp32; NaN where the reference has it."""
    assert {"out", "lse"} <= got.keys(), f"outputs are {sorted(got)}"
    if "magnitude" in got:  # of the reference itself
        assert_bitwise_equal("magnitude", got["magnitude"], want["magnitude"], any_nan=True)
    largest = want["lse"].nan_to_num(0.0, 0.0, 0.0).abs().unsqueeze(-1)
    p_error = 2.0**-11 * 1.25 + 2.0**-20 * largest
    bounds = {
        "out": 2.0**-8 * want["out"].abs() + p_error * want["magnitude"] + 1e-30,
        "lse": 2.0**-19 * (1.0 + largest[..., 0]),
    }
    for name, limit in bounds.items():
        assert_within(name, got[name], want[name], limit, any_nan=True)


def _run(case: Case, inputs: Tensors) -> Tensors:
    made = decode_attention_nvfp4(
        **_arguments(case, inputs),
        out=inputs["out"],
        return_lse=True,
        splits=case.splits or None,
    )
    return made._asdict()


# --- Peers ----------------------------------------------------------------------------------------------------------

_planned: dict[Any, Any] = {}
"""What a peer prepares once a step and not once a layer, by case and list."""


def _once(name: str, case: Case, inputs: Tensors, make: Any) -> Any:
    key = (name, case, inputs["kv_indices"].data_ptr())
    if key not in _planned:
        _planned[key] = make()
    return _planned[key]


def _engine_fp8(case: Case, inputs: Tensors) -> Tensors:
    """The engine's Triton backend on an FP8 cache, with its own choice of splits (8 at most by default)."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

    q, most = inputs["q"], 8

    def prepare() -> tuple[torch.Tensor, ...]:
        splits = torch.empty(case.requests, dtype=torch.int32, device=q.device)
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
        get_num_kv_splits_triton[(1,)](
            splits, inputs["lengths"], case.requests, 1, case.heads, case.kv_heads, most, processors, MAX_NUM_SEQ=256,
        )  # fmt: skip
        parts = q.new_empty((case.requests, case.heads, most, case.v_dim), dtype=torch.float32)
        return splits, parts, torch.empty_like(parts[..., 0])

    splits, parts, part_lse = _once("engine", case, inputs, prepare)
    out = q.new_empty((case.requests, case.heads, case.v_dim))
    decode_attention_fwd(
        q, inputs["k_fp8"].view(torch.float8_e4m3fn), inputs["v_fp8"].view(torch.float8_e4m3fn), out,
        inputs["kv_indptr"], inputs["kv_indices"], parts, part_lse, splits, most, case.k_dim**-0.5, 1.0, 1.0,
        logit_cap=case.cap, sinks=inputs["sinks"],
    )  # fmt: skip
    return {"out": out}


def _flashinfer_nvfp4(case: Case, inputs: Tensors) -> Tensors:
    """FlashInfer's fa2 decode on the same NVFP4 buffers."""

    def prepare() -> Any:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=inputs["q"].device)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True, backend="fa2"
        )
        wrapper.plan(
            inputs["kv_indptr"].int(),
            inputs["kv_indices"].int(),
            torch.ones_like(inputs["lengths"]),
            case.heads,
            case.kv_heads,
            case.k_dim,
            1,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.uint8,
        )
        return wrapper

    wrapper = _once("flashinfer", case, inputs, prepare)
    rows = tuple(inputs[f"{name}_buffer"].unsqueeze(1) for name in ("k", "v"))
    scales = tuple(
        inputs[f"{name}_scale_buffer"].unsqueeze(1).view(torch.float8_e4m3fn) for name in ("k", "v")
    )
    out = wrapper.run(inputs["q"], rows, kv_cache_sf=scales, k_scale=case.scale, v_scale=scales_of(case)["v_global_scale"])  # fmt: skip
    return {"out": out}


def _fa3_fp8(case: Case, inputs: Tensors) -> Tensors:
    """FlashAttention 3 on an FP8 cache, as the engine calls it: q in FP8 too."""
    from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache

    one = torch.ones((case.requests, case.kv_heads), device=inputs["q"].device)
    out = flash_attn_with_kvcache(
        q=inputs["q"].to(torch.float8_e4m3fn).unsqueeze(1),
        k_cache=inputs["k_fp8"].view(torch.float8_e4m3fn).unsqueeze(1),
        v_cache=inputs["v_fp8"].view(torch.float8_e4m3fn).unsqueeze(1),
        page_table=inputs["page_table"],
        cache_seqlens=inputs["lengths"],
        q_descale=one,
        k_descale=one,
        v_descale=one,
        softmax_scale=case.k_dim**-0.5,
        causal=True,
    )
    return {"out": out[:, 0]}


def _version(module: str, distribution: str) -> Any:
    def version() -> str:
        importlib.import_module(module)
        return f"{engine_version()}, {distribution} {metadata.version(distribution)}"

    return version


def _refuses(largest: int, *, fp8_keys: bool = True) -> Any:
    def refuses(case: Case) -> str | None:
        if not case.peers:
            return "the case has no inputs for it"
        if case.keys == "fp8" and not fp8_keys:
            return "it has no FP8 keys beside NVFP4 values"
        return f"head dimensions up to {largest}" if case.k_dim > largest else None

    return refuses


# --- Binaries -------------------------------------------------------------------------------------------------------


def _binary(name: str, case: Case, *, split: bool, quick: bool = True) -> TritonBinary:
    fp8 = case.keys == "fp8"
    codes = 2 if fp8 else 4  # of a word
    words = {"q_ptr": "*bf16", **dict.fromkeys(("k_ptr", "v_ptr", "k_scales_ptr", "v_scales_ptr"), "*u16")}  # fmt: skip
    if fp8:
        del words["k_scales_ptr"]
    pointers = {
        **words,
        "indptr_ptr": "*i64",
        "indices_ptr": "*i64",
        "out_ptr": "*fp32" if split else "*bf16",
        "lse_ptr": "*fp32",
    }
    strides = {
        "q_request_stride": case.heads * case.k_dim,
        "q_head_stride": case.k_dim,
        "out_request_stride": case.heads * case.v_dim,
        "out_head_stride": case.v_dim,
    }
    units = {}
    for part, dim, divisor in (
        ("k", case.k_dim, codes), ("v", case.v_dim, 4), ("k_scales", case.k_dim, 32), ("v_scales", case.v_dim, 32),
    ):  # fmt: skip
        units[f"{part.upper()}_UNIT"] = unit = math.gcd(8, dim // divisor)
        if part not in {name.removesuffix("_ptr") for name in words}:
            units[f"{part.upper()}_UNIT"] = 1
            strides[f"{part}_slot_stride"] = strides[f"{part}_head_stride"] = 0
            continue
        strides[f"{part}_slot_stride"] = case.kv_heads * dim // divisor // unit
        strides[f"{part}_head_stride"] = dim // divisor // unit
    ones = {name: 1 for name, stride in strides.items() if stride == 1}
    group = case.heads // case.kv_heads
    made, small = (
        plan(group, case.k_dim, case.v_dim, fp8_keys=fp8, shared=shared)
        for shared in (232_448, SMALL_SHARED)
    )
    return TritonBinary(
        name=name,
        kernel=f"{KERNELS}:_decode_kernel",
        signature={
            **pointers,
            **dict.fromkeys((*(strides.keys() - ones), "slots", "entries", "splits", "window", "heads"), "i32"),
            **dict.fromkeys(("sm_scale", "logit_cap", "v_global"), "fp32"),
        },
        constants={
            **ones,
            **units,
            **({"k_scales_ptr": None} if fp8 else {}),
            "sink_ptr": None,
            "k_global_ptr": None,
            "v_global_ptr": None,
            "K_DIM": case.k_dim,
            "V_DIM": case.v_dim,
            "K_WORDS": words_of(case.k_dim, codes),
            "V_WORDS": words_of(case.v_dim),
            "GROUP": group,
            "HEADS": made.heads,
            "ROWS": made.rows,
            "CAP": case.cap > 0,
            "SPLIT": split,
            "NATIVE": True,
            "gfx950": {"NATIVE": False},
        },
        aligned=[*pointers, *(name for name, stride in strides.items() if stride % 16 == 0)],
        options={
            "num_warps": made.warps,
            "num_stages": made.stages,
            "sm120": {"num_stages": small.stages},
        },
        # Packed halves multiply; a decoded tile in shared memory would show in the budget's bytes of it.
        required=dict.fromkeys(("sm90", "sm100", "sm103", "sm120"), ("HMUL2", "HMMA.16816.F32", "LDGSTS")),
        forbidden=dict.fromkeys(("sm90", "sm100", "sm103", "sm120"), ("LDL",)),
        quick=quick,
    )  # fmt: skip


D128, D256 = Case(2, 32, 8, 130, splits=1), Case(1, 24, 4, 200, 256, 256, splits=2)
D64, D512 = Case(1, 16, 2, 70, 64, 64, sink="bfloat16", splits=1), Case(1, 4, 2, 40, 512, 512, splits=1)  # fmt: skip

K8_D128, K8_D256 = Case(2, 32, 8, 130, splits=1, keys="fp8"), Case(1, 24, 4, 200, 256, 256, splits=2, keys="fp8")  # fmt: skip

ONE = Case(1, 32, 8, 1, splits=1)


def _cases() -> tuple[Case, ...]:
    return (
        Case(0, 8, 2, 8),
        Case(1, 2, 2, 1, 64, 64, splits=1),
        D64,
        D512,
        Case(4, 8, 2, 30, 64, 64, lists="edges", splits=1, sink="float32"),
        Case(3, 6, 1, 133, lists="edges", ids="int32", layout="sliced", splits=3, sink="float32"),
        Case(3, 20, 1, 70, 96, 64, lists="edges", scale=0.013, window=40, splits=2),
        Case(1, 3, 3, 40, 192, 128, scale=3.7, on_device=True, cap=5.0, splits=1, layout="heads_first"),
        Case(1, 33, 1, 20, 64, 64, cap=30.0, splits=1),
        Case(1, 4, 2, 140, 64, 64, lists="nan", splits=2),
        Case(1, 2, 1, 20, 64, 64, spread=-100, splits=1),
        Case(1, 2, 1, 20, 64, 64, spread=20, scale=2.0**-18, splits=1),
        Case(1, 2, 2, 1, 64, 64, splits=1, keys="fp8"),
        Case(4, 8, 2, 30, 64, 64, lists="edges", splits=1, sink="float32", keys="fp8"),
        Case(3, 6, 1, 133, lists="edges", ids="int32", layout="sliced", splits=3, keys="fp8"),
        Case(3, 20, 1, 70, 96, 64, lists="edges", scale=0.013, window=40, splits=2, keys="fp8"),
        Case(1, 3, 3, 40, 192, 128, scale=3.7, on_device=True, cap=5.0, splits=1, layout="heads_first", keys="fp8"),
        Case(1, 4, 2, 140, 64, 64, lists="nan", splits=2, keys="fp8"),
        Case(1, 4, 2, 40, 512, 512, splits=1, keys="fp8"),
        # More heads and longer lists, for the GPU.
        K8_D128,
        K8_D256,
        Case(9, 32, 8, 1000, lists="edges", sink="bfloat16", keys="fp8"),
        Case(5, 24, 4, 2051, 256, 256, lists="edges", ids="int32", layout="sliced", keys="fp8"),
        Case(3, 16, 8, 3000, 512, 512, lists="edges", scale=0.02, on_device=True, keys="fp8"),
        Case(4, 64, 8, 700, 64, 64, lists="edges", window=128, sink="float32", keys="fp8"),
        Case(2, 40, 2, 5000, 192, 128, cap=50.0, keys="fp8"),
        D128,
        D256,
        ONE,
        Case(9, 32, 8, 1000, lists="edges", sink="bfloat16"),
        Case(5, 24, 4, 2051, 256, 256, lists="edges", ids="int32", layout="sliced"),
        Case(3, 16, 8, 3000, 512, 512, lists="edges", scale=0.02, on_device=True),
        Case(4, 64, 8, 700, 64, 64, lists="edges", window=128, sink="float32"),
        Case(130, 8, 8, 200, lists="edges", splits=1),
        Case(2, 40, 2, 5000, 192, 128, cap=50.0),
        Case(3, 32, 8, 900, lists="nan", layout="heads_first"),
        Case(2, 12, 4, 900, 96, 96, scale=7e-4),
    )  # fmt: skip


LARGE = 10_000
"""Products of heads, tokens and requests above which a case is left to the GPU."""


def _not_run(tier: str, case: Case) -> str | None:
    scores = case.requests * case.heads * case.tokens
    if tier == "device" or (scores <= LARGE and case not in (D128, D256, K8_D128, K8_D256, ONE)):
        return None
    return "a case for the GPU"


def _bench_cases() -> tuple[Case, ...]:
    def bench(
        requests: int, heads: int, kv_heads: int, tokens: int, dim: int, keys: str = "nvfp4"
    ) -> Case:
        return Case(requests, heads, kv_heads, tokens, dim, dim, peers=True, keys=keys)

    return (
        *(bench(b, 32, 8, n, 128) for b, n in ((1, 8192), (1, 131072), (16, 8192), (64, 8192), (16, 32768), (128, 4096))),
        *(bench(b, 24, 4, n, 256) for b, n in ((1, 8192), (1, 131072), (16, 8192), (64, 8192), (16, 32768), (128, 4096))),
        *(bench(b, 64, 8, n, 64) for b, n in ((16, 8192), (64, 8192))),
        *(bench(b, 32, 4, n, 512) for b, n in ((16, 8192), (64, 8192))),
        *(bench(b, 32, 8, n, 128, "fp8") for b, n in ((1, 8192), (1, 131072), (16, 8192), (64, 8192), (16, 32768), (128, 4096))),
        *(bench(b, 24, 4, n, 256, "fp8") for b, n in ((1, 131072), (64, 8192))),
        *(bench(64, heads, kv_heads, 8192, dim, "fp8") for heads, kv_heads, dim in ((64, 8, 64), (32, 4, 512))),
    )  # fmt: skip


OP = Op(
    name="decode_attention_nvfp4",
    package="kv-cache-4bit",
    cases=_cases(),
    make_inputs=make_inputs,
    reference=lambda case, inputs: reference(**_arguments(case, inputs)),
    oracle=_oracle,
    compare=compare,
    compare_oracle=_compare_oracle,
    traffic=lambda case: traffic(
        case.requests,
        case.heads,
        case.kv_heads,
        case.k_dim,
        case.v_dim,
        case.requests * min(case.tokens, case.window or case.tokens),
        8 if case.ids == "int64" else 4,
        fp8_keys=case.keys == "fp8",
    ),
    implementations={"triton": Implementation(run=_run, interpret=True)},
    peers={
        "sglang-fp8": Implementation(
            run=_engine_fp8, version=engine_version, refuses=_refuses(512)
        ),
        "flashinfer-nvfp4": Implementation(
            run=_flashinfer_nvfp4,
            version=_version("flashinfer", "flashinfer-python"),
            archs=("sm90", "sm100", "sm103", "sm120"),
            refuses=_refuses(512, fp8_keys=False),
        ),
        "fa3-fp8": Implementation(
            run=_fa3_fp8,
            version=_version("sgl_kernel", "sglang-kernel"),
            archs=("sm90",),
            refuses=_refuses(256),
        ),
    },
    binaries=(
        _binary("d128", D128, split=False),
        _binary("d256_split", D256, split=True, quick=False),
        _binary("d64", Case(1, 2, 2, 1, 64, 64, splits=1), split=False, quick=False),
        _binary("d512", D512, split=False, quick=False),
        _binary("d128_k8", K8_D128, split=False, quick=False),
        _binary("d256_k8_split", K8_D256, split=True, quick=False),
        _binary("d64_k8", Case(1, 2, 2, 1, 64, 64, splits=1, keys="fp8"), split=False, quick=False),
        _binary(
            "d512_k8", Case(1, 4, 2, 40, 512, 512, splits=1, keys="fp8"), split=False, quick=False
        ),
    ),
    not_run=_not_run,
    bench_cases=_bench_cases(),
    bench_options={"l2": "cold"},
)
