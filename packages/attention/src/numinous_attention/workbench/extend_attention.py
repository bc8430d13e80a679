# SPDX-License-Identifier: Apache-2.0
"""Cases, peers and binaries of `kernels.extend_attention`: what its tests, gates and benches are made from."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from numinous_attention.kernels import extend_attention_cuda as cuda
from numinous_attention.kernels.extend_attention import (
    Tile,
    extend_attention,
    options_of,
    parts,
    reference,
    tile_of,
    traffic,
)
from numinous_tooling.testing.tensors import assert_bitwise_equal, assert_within
from numinous_tooling.workbench import ARCHS, Implementation, Op, Tensors, TritonBinary

KERNEL = "numinous_attention.kernels.extend_attention:_extend_attention_kernel"
OUTPUTS = ("out", "lse")


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        chunks, prefixes: lengths of each request, joined by "_".
        heads, kv_heads, dim, dim_v: dim_v 0 is dim.
        causal, window, mask_prefix: as the kernel's; window -1 is none.
        mask: "", "tree" (a token sees its ancestors), "span" (causal, and the middle third of a chunk sees all of itself) or "nothing".
        lost: columns in front of a mask that a truncated prefix has lost.
        cap, sink: logit cap; attention sinks.
        pool: "own" (q's type) or "fp8".
        kind: of q, "bfloat16" or "float32".
        ids: int32 or int64, of slot ids and of the pointers.
        layout: "plain"; "sliced": tensors are parts of wider ones; "padded": q has rows behind the last request, and out is given.
        holes: slot ids of -1 and beyond the pool among the prefix.
        peers: prefix and chunk also lie in the pool in order, as the engine has them.
    """

    chunks: str
    prefixes: str
    heads: int = 2
    kv_heads: int = 1
    dim: int = 64
    dim_v: int = 0
    causal: bool = True
    window: int = -1
    mask: str = ""
    mask_prefix: bool = False
    lost: int = 0
    cap: float = 0.0
    sink: bool = False
    pool: str = "own"
    kind: str = "bfloat16"
    ids: str = "int32"
    layout: str = "plain"
    holes: bool = False
    peers: bool = False

    @property
    def lengths(self) -> tuple[list[int], list[int]]:
        """Of chunks and of prefixes."""
        chunks, prefixes = (
            [int(x) for x in text.split("_") if x] for text in (self.chunks, self.prefixes)
        )
        assert len(chunks) == len(prefixes)
        return chunks, prefixes

    @property
    def value_dim(self) -> int:
        """D_v."""
        return self.dim_v or self.dim


K_SCALE, V_SCALE = 0.5, 1.5  # of FP8 pools


def _slots(case: Case, device: Any) -> torch.Tensor:
    """Slot of every (prefix, then chunk) token of each request in turn; the same for every seed, so that a peer's plan holds."""
    total = sum(map(sum, case.lengths))
    generator = torch.Generator(device).manual_seed(1)
    return torch.randperm(total, generator=generator, device=device) + 1


def make_inputs(case: Case, seed: int, device: Any) -> Tensors:
    """Arguments of `extend_attention`. Slots that nobody names hold NaN."""
    generator = torch.Generator(device).manual_seed(seed)
    chunks, prefixes = case.lengths
    kind, integer = getattr(torch, case.kind), getattr(torch, case.ids)
    tokens, padding = sum(chunks), 5 if case.layout == "padded" else 0
    sliced = case.layout == "sliced"

    def values(rows: int, heads: int, dim: int) -> torch.Tensor:
        made = torch.randn(
            rows, heads * (2 if sliced else 1), dim + (16 if sliced else 0), generator=generator, device=device
        ).to(kind)  # fmt: skip
        return made[:, ::2, 16:] if sliced else made

    q = values(tokens + padding, case.heads, case.dim)
    k = values(tokens + padding, case.kv_heads, case.dim)
    v = values(tokens + padding, case.kv_heads, case.value_dim)
    for x in (q, k, v):
        x[tokens:] = torch.nan
    slots = _slots(case, device)
    held = len(slots) + 3
    k_pool = values(held, case.kv_heads, case.dim)
    v_pool = values(held, case.kv_heads, case.value_dim)
    prefix_ids, at, row = [], 0, 0
    for chunk, prefix in zip(chunks, prefixes, strict=True):
        prefix_ids.append(slots[at : at + prefix])
        own = slots[at + prefix : at + prefix + chunk]
        if case.peers:
            k_pool[own], v_pool[own] = k[row : row + chunk], v[row : row + chunk]
        else:
            k_pool[own] = v_pool[own] = torch.nan
        at, row = at + prefix + chunk, row + chunk
    ids = torch.cat(prefix_ids) if prefix_ids else slots[:0]
    for x in (k_pool, v_pool):
        x[0] = x[held - 2 :] = torch.nan
    if case.holes and len(ids) > 4:
        ids[1], ids[len(ids) // 2], ids[-1] = -1, held, 2**31 - 1
        ids[2] = ids[3]
    if case.pool == "fp8":
        k_pool, v_pool = (x.to(torch.float8_e4m3fn) for x in (k_pool, v_pool))
    if seed and not case.peers and not case.mask:
        # A captured graph is replayed with other lengths.
        chunks, prefixes = chunks[::-1], prefixes[::-1]
    inputs: Tensors = {
        "q": q,
        "k": k,
        "v": v,
        "k_pool": k_pool,
        "v_pool": v_pool,
        "qo_indptr": _indptr(chunks, integer, device),
        "kv_indptr": _indptr(prefixes, integer, device),
        "kv_indices": ids.to(integer),
    }
    if case.mask:
        inputs |= _mask(case, generator, device)
    if case.sink:
        inputs["sinks"] = 2 + 2 * torch.randn(case.heads, generator=generator, device=device)
    if padding:
        shape = (tokens + padding, case.heads, case.value_dim)
        inputs["out"] = torch.full(shape, 7.0, dtype=kind, device=device)
    return inputs


def _indptr(lengths: list[int], integer: torch.dtype, device: Any) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(integer)


def _mask(case: Case, generator: torch.Generator, device: Any) -> Tensors:
    """As the engine lays masks out: [chunk, lost + prefix + chunk] of each request, one behind the other."""
    blocks = []
    chunks, prefixes = case.lengths
    for chunk, prefix in zip(chunks, prefixes, strict=True):
        own = torch.zeros(chunk, chunk, dtype=torch.uint8)
        if case.mask == "tree":
            for token in range(chunk):  # a heap: the parent of i is (i - 1) // 2
                at = token
                while at >= 0:
                    own[token, at] = 1
                    at = (at - 1) // 2 if at else -1
        elif case.mask == "span":
            own = torch.ones(chunk, chunk, dtype=torch.uint8).tril()
            own[chunk // 3 : 2 * chunk // 3, chunk // 3 : 2 * chunk // 3] = 1
        front = torch.randint(0, 2, (chunk, case.lost + prefix), generator=generator, device=device)
        if case.mask == "nothing":
            front = torch.zeros_like(front)
        blocks.append(torch.cat([front.to(torch.uint8), own.to(device)], dim=1).flatten())
    sizes = [len(block) for block in blocks]
    made: Tensors = {
        "mask": torch.cat(blocks),
        "mask_indptr": _indptr(sizes, torch.int64, device),
    }
    if case.lost:
        made["mask_offsets"] = torch.full(
            (len(chunks),), case.lost, dtype=torch.int32, device=device
        )
    return made


def _options(case: Case) -> dict[str, Any]:
    return {
        "sm_scale": 1 / math.sqrt(case.dim),
        "causal": case.causal,
        "window": None if case.window < 0 else case.window,
        "mask_prefix": case.mask_prefix,
        "logit_cap": case.cap,
        "k_scale": K_SCALE if case.pool == "fp8" else 1.0,
        "v_scale": V_SCALE if case.pool == "fp8" else 1.0,
    }


def _reference(case: Case, inputs: Tensors) -> Tensors:
    return _used(case, reference(**inputs, **_options(case)))


def _used(case: Case, made: Tensors) -> Tensors:
    """Without the lse of rows behind the last request, which nobody writes; those of out must stay as they were."""
    return {**made, "lse": made["lse"][: sum(case.lengths[0])]}


def _oracle(case: Case, inputs: Tensors) -> Tensors:
    """Another way to the same: one query and head after the other, keys gathered into a list, weights from the largest score."""
    options, pools = _options(case), [inputs[x].double() for x in ("k_pool", "v_pool")]
    q, k, v = (inputs[x].double() for x in ("q", "k", "v"))
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    if "out" in inputs:
        out[:] = inputs["out"].double()
    lse = q.new_full(q.shape[:2], -torch.inf)
    ids, mask, row, listed, column = inputs["kv_indices"].tolist(), inputs.get("mask"), 0, 0, 0
    for chunk, prefix in zip(*case.lengths, strict=True):
        named = ids[listed : listed + prefix]
        for token in range(chunk):
            bits = [1] * (case.lost + prefix + chunk)
            if mask is not None:
                own = mask[column : column + len(bits)].tolist()
                bits = (
                    own
                    if case.mask_prefix
                    else bits[: case.lost + prefix] + own[case.lost + prefix :]
                )
                column += len(bits)
            seen = []
            for at in range(prefix + chunk):
                distance = prefix + token - at
                if at < prefix and not 0 <= named[at] < len(pools[0]):
                    continue
                if case.causal and distance < 0:
                    continue
                if 0 <= case.window < distance:
                    continue
                if bits[case.lost + at]:
                    seen.append(at)
            if seen:
                _attend_one(
                    case,
                    options,
                    q,
                    k,
                    v,
                    pools,
                    inputs.get("sinks"),
                    named,
                    seen,
                    row,
                    token,
                    out,
                    lse,
                )
            else:
                out[row + token] = 0
        row, listed = row + chunk, listed + prefix
    return _used(case, {"out": out, "lse": lse})


def _attend_one(
    case: Case, options: dict[str, Any], q: Any, k: Any, v: Any, pools: Any, sinks: Any,
    named: list[int], seen: list[int], row: int, token: int, out: Any, lse: Any,
) -> None:  # fmt: skip
    prefix, group = len(named), case.heads // case.kv_heads
    for head in range(case.heads):
        own = head // group
        keys = [pools[0][named[at], own] * options["k_scale"] if at < prefix else k[row + at - prefix, own] for at in seen]  # fmt: skip
        values = [pools[1][named[at], own] * options["v_scale"] if at < prefix else v[row + at - prefix, own] for at in seen]  # fmt: skip
        scores = torch.stack(keys) @ q[row + token, head] * options["sm_scale"]
        if case.cap:
            scores = case.cap * (scores / case.cap).tanh()
        top = scores.max()
        weights = (scores - top).exp()
        total = weights.sum()
        lse[row + token, head] = top + total.log()
        if sinks is not None:
            total = total + (sinks[head].double() - top).exp()
        out[row + token, head] = weights / total @ torch.stack(values)


def _compare_oracle(case: Case, got: Tensors, exact: Tensors) -> None:
    for name in OUTPUTS:
        torch.testing.assert_close(got[name], exact[name], rtol=1e-9, atol=1e-9)


ROUNDINGS = 3
"""Of 2^-9 each, relative to Σ p · |v|: p to bf16, and p by the error of scores. The output's own comes on top."""


def compare(case: Case, got: Tensors, want: Tensors) -> None:
    """Within what roundings make (bf16's; of an fp32 call fp32's); names the first coordinate that is not."""
    assert {*OUTPUTS} <= got.keys(), f"outputs are {sorted(got)}"
    if "magnitude" in got:  # of the reference itself
        assert_bitwise_equal("magnitude", got["magnitude"], want["magnitude"])
    exact = case.kind == "float32"
    # A capped score is off by ulps of the cap, not of itself: GPUs divide and raise to powers to two ulps.
    unit, loose = (2.0**-20 * (1 + case.cap / 8), 1e-5) if exact else (2.0**-9, 1e-3)
    bound = unit * (ROUNDINGS * want["magnitude"] + want["out"].abs()) + 1e-30
    for name, limit in (("out", bound), ("lse", torch.full_like(want["lse"], loose))):
        assert_within(name, got[name], want[name], limit)


def _run(case: Case, inputs: Tensors) -> Tensors:
    made = extend_attention(**inputs, **_options(case), with_lse=True, impl="triton")
    return _used(case, made._asdict())


def _run_cuda(case: Case, inputs: Tensors) -> Tensors:
    made = extend_attention(**inputs, **_options(case), with_lse=True, impl="cuda")
    return _used(case, made._asdict())


def _cuda_refuses(case: Case) -> str | None:
    if case.kind != "bfloat16" or case.pool != "own" or case.mask:
        return "it takes bf16 without a mask"
    if case.dim != cuda.DIM or case.value_dim != cuda.DIM:
        return f"it is made for head dim {cuda.DIM}"
    return None


# --- Peers ----------------------------------------------------------------------------------------------------------


def _engine_version() -> str:
    try:
        return f"sglang {metadata.version('sglang')}"
    except metadata.PackageNotFoundError:
        raise ImportError("sglang is not installed") from None


def _engine(case: Case, inputs: Tensors) -> Tensors:
    """The engine's Triton backend: a program for every query head, loops from the first key."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    q, options = inputs["q"], _options(case)
    out = torch.empty((*q.shape[:2], case.value_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    extend_attention_fwd(
        q, inputs["k"], inputs["v"], out, inputs["k_pool"], inputs["v_pool"],
        inputs["qo_indptr"], inputs["kv_indptr"], inputs["kv_indices"],
        inputs.get("mask"), case.causal, inputs.get("mask_indptr"), max(case.lengths[0]),
        options["k_scale"], options["v_scale"], options["sm_scale"],
        logit_cap=case.cap,
        skip_prefix_custom_mask=not case.mask_prefix,
        sliding_window_size=case.window,
        sinks=inputs.get("sinks"),
        window_kv_offsets=inputs.get("mask_offsets"),
        lse_extend=lse,
    )  # fmt: skip
    return {"out": out, "lse": lse}


def _needs_peers(case: Case) -> str | None:
    return None if case.peers else "the case has no inputs for it"


def _engine_refuses(case: Case) -> str | None:
    """Why stock's Triton kernels do not take a case: they multiply ids by strides in the ids' type. The engine's own are int64."""
    wide = 2 * (case.dim + 16) if case.layout == "sliced" else case.dim
    elements = (sum(map(sum, case.lengths)) + 3) * case.kv_heads * wide
    if case.ids == "int32" and elements > 2**31:
        return "its products of int32 ids wrap in a pool past 2^31 elements"
    return _needs_peers(case)


def _flashinfer_version() -> str:
    try:
        return f"flashinfer-python {metadata.version('flashinfer-python')}"
    except metadata.PackageNotFoundError:
        raise ImportError("flashinfer-python is not installed") from None


@functools.cache
def _flashinfer_plan(case: Case, device: Any) -> Any:
    """FlashInfer's FA2 wrapper, planned: by pages of one token where there is a prefix, over the chunks' own rows where there is none."""
    import flashinfer

    chunks, prefixes = case.lengths
    memory = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    common = {
        "causal": case.causal,
        "sm_scale": _options(case)["sm_scale"],
        "window_left": case.window,
        "logits_soft_cap": case.cap,
        "q_data_type": torch.bfloat16,
    }
    rows = _indptr(chunks, torch.int32, device)
    if not any(prefixes):
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(memory, "NHD", backend="fa2")
        ragged.plan(
            rows, rows, case.heads, case.kv_heads, case.dim, head_dim_vo=case.value_dim, **common
        )
        return ragged
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(memory, "NHD", backend="fa2")
    both = [c + p for c, p in zip(chunks, prefixes, strict=True)]
    paged.plan(
        rows, _indptr(both, torch.int32, device), _slots(case, device).to(torch.int32),
        torch.ones(len(chunks), dtype=torch.int32, device=device), case.heads, case.kv_heads, case.dim, 1,
        head_dim_vo=case.value_dim, kv_data_type=torch.bfloat16, **common,
    )  # fmt: skip
    return paged


def _flashinfer(case: Case, inputs: Tensors) -> Tensors:
    wrapper = _flashinfer_plan(case, inputs["q"].device)
    if any(case.lengths[1]):
        keys = (inputs["k_pool"][:, None], inputs["v_pool"][:, None])  # pages of one token
        out, lse = wrapper.run(inputs["q"], keys, return_lse=True)
    else:
        out, lse = wrapper.run(inputs["q"], inputs["k"], inputs["v"], return_lse=True)
    return {"out": out, "lse": lse * math.log(2)}  # its lse is to base 2


def _flashinfer_refuses(case: Case) -> str | None:
    if case.mask or case.sink or case.pool != "own":
        return "masks, sinks and FP8 are not wired for it"
    return _needs_peers(case)


def _fa3_version() -> str:
    from sglang.kernels.ops.attention import flash_attention  # noqa: F401

    return f"sglang-kernel {metadata.version('sglang-kernel')}"


@functools.cache
def _fa3_table(case: Case, device: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Page table [requests, longest] of pages of one token, lengths, and first rows of chunks."""
    both = [c + p for c, p in zip(*case.lengths, strict=True)]
    table = torch.zeros(len(both), max(both), dtype=torch.int32, device=device)
    for row, ids in zip(table, _slots(case, device).split(both), strict=True):
        row[: len(ids)] = ids
    lengths = torch.tensor(both, dtype=torch.int32, device=device)
    return table, lengths, _indptr(case.lengths[0], torch.int32, device)


def _fa3(case: Case, inputs: Tensors) -> Tensors:
    """FlashAttention 3 as the engine's backend `fa3` calls it: everything in pages, here of one token."""
    from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache

    q = inputs["q"]
    table, lengths, rows = _fa3_table(case, q.device)
    out, lse, *_ = flash_attn_with_kvcache(
        q=q,
        k_cache=inputs["k_pool"][:, None],
        v_cache=inputs["v_pool"][:, None],
        page_table=table,
        cache_seqlens=lengths,
        cu_seqlens_q=rows,
        max_seqlen_q=max(case.lengths[0]),
        softmax_scale=_options(case)["sm_scale"],
        causal=case.causal,
        window_size=(case.window, 0 if case.causal else -1),
        softcap=case.cap,
        return_softmax_lse=True,
    )
    return {"out": out, "lse": lse.transpose(0, 1)}


def _fa3_refuses(case: Case) -> str | None:
    if max(case.dim, case.value_dim) > 256:
        return "FA3 ends at head dim 256"
    if case.mask or case.sink or case.pool != "own":
        return "masks, sinks and FP8 are not wired for it"
    return _needs_peers(case)


# --- Binaries -------------------------------------------------------------------------------------------------------


def _binary(name: str, case: Case, archs: Sequence[str], *, quick: bool = False) -> TritonBinary:
    own = {"bfloat16": "*bf16", "float32": "*fp32"}[case.kind]
    pool = "*u8" if case.pool == "fp8" else own
    tables = ("qo_indptr_ptr", "kv_indptr_ptr", "kv_indices_ptr")
    pointers = {
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), own),
        **dict.fromkeys(("k_pool_ptr", "v_pool_ptr"), pool),
        **dict.fromkeys(tables, {"int32": "*i32", "int64": "*i64"}[case.ids]),
        "out_ptr": own,
        "lse_ptr": "*fp32",
    }
    strides = (
        *(f"{x}_{y}_stride" for x in ("q", "k", "v", "out") for y in ("token", "head")),
        *(f"{x}_{y}_stride" for x in ("k", "v") for y in ("slot", "pool_head")),
    )
    absent = {"mask_offsets_ptr": None, "sinks_ptr": None}
    if case.mask:
        pointers |= {"mask_ptr": "*u8", "mask_indptr_ptr": "*i64"}
    else:
        absent |= {"mask_ptr": None, "mask_indptr_ptr": None}
    d0, d1 = parts(case.dim)
    v0, v1 = parts(case.value_dim)

    def tile_on(arch: str) -> Tile:
        return tile_of(
            "sm100" if arch == "sm103" else arch, case.dim, case.value_dim, bool(case.mask)
        )

    def layout(arch: str) -> dict[str, Any]:
        tile = tile_on(arch)
        return {
            "ROWS": tile.rows,
            "KEYS": tile.keys,
            "V1": 0 if tile.halves and v1 == v0 else v1,
        }

    return TritonBinary(
        name=name,
        kernel=KERNEL,
        signature={
            **pointers,
            **dict.fromkeys((*strides, "heads", "batch", "tokens", "listed", "slots", "window", "splits"), "i32"),
            **dict.fromkeys(("prefix_factor", "chunk_factor", "cap", "v_scale"), "fp32"),
        },
        constants={
            **absent,
            "GROUP": case.heads // case.kv_heads,
            "D0": d0,
            "D1": d1,
            "V0": v0,
            "CAUSAL": case.causal,
            "WINDOW": case.window >= 0,
            "CAP": case.cap > 0,
            "MASK_PREFIX": case.mask_prefix,
            "SPLIT": False,
            "SKIP": True,
            "NATIVE": True,
            **{arch: layout(arch) for arch in archs},
        },
        aligned=(*pointers, *strides),
        options={arch: options_of(arch, tile_on(arch)) for arch in archs},
        archs=archs,
        # Products of a warpgroup, of tensor memory, of AMD's matrix units: a tile that falls back to others is noticed.
        required={"sm90": ("HGMMA", "LDGSTS"), "sm100": ("UTCHMMA",), "gfx950": ("v_mfma",)},
        quick=quick,
    )  # fmt: skip


# --- Cases ----------------------------------------------------------------------------------------------------------

# Tiles of the interpreter are 16 rows and 16 keys.
SMALL = (
    Case("", ""),
    Case("0_0", "0_5"),
    Case("1", "0"),
    Case("9_0_17", "0_5_33", heads=6, kv_heads=2),  # 3 heads a group: rows of tokens go over tiles
    Case("20_3", "18_0", dim=96, dim_v=64, ids="int64", layout="sliced"),
    Case("5", "35", heads=8, dim=512),
    Case("5", "20", heads=3, dim=192, dim_v=128, pool="fp8"),
    Case("6", "20", dim=64, dim_v=96, holes=True, layout="padded"),
    Case("4", "7", heads=4, dim=128, causal=False, cap=3.0, sink=True),
    Case(
        "3", "6", holes=True, window=1, dim=16, heads=1
    ),  # ids that are none are all that a token sees
    *(Case("40", "0", window=w, dim=16) for w in (0, 15, 16, 17)),
    *(Case("2", "40", window=w, dim=16) for w in (31, 32, 33)),
    Case("19", "20", window=18, causal=False, dim=16, pool="fp8"),
    Case("7_4", "19_0", mask="tree", causal=False, dim=32),
    Case("18", "5", mask="span", causal=False, dim=32, lost=3, mask_prefix=True, window=12),
    Case("18", "5", mask="span", dim=32, heads=1),
    Case("5", "9", mask="nothing", causal=False, mask_prefix=True, sink=True, dim=16),
    Case("9", "20", dim=256, kind="float32", cap=30.0),
)

LARGE = (
    Case("300_17_0_1", "700_0_90_1500", 8, 2, 512, sink=True),
    Case("511_64", "65_1024", 8, 4, 256, window=200, ids="int64"),
    Case("130", "1500", 16, 2, 512, pool="fp8", holes=True),
    Case("700", "129", 12, 4, 192, 128, cap=30.0, layout="sliced"),
    Case("257", "300", 6, 2, 96, 96, causal=False, window=64),
    Case("63_64_65", "127_128_129", 16, 2, 128, mask="tree", causal=False),
    Case("300", "50", 16, 8, 256, mask="span", causal=False, window=100, lost=7, mask_prefix=True),
    Case("150_90", "200_30", 8, 1, 512, mask="span", causal=False, mask_prefix=True),
    Case("100", "100", 8, 1, 64, kind="float32"),
    Case("17_40_333_700_90_256_64_128_500_600_33_18_77_410_222_300", "250_" * 16, 8, 4, 128),
    Case("511_64", "65_1024", 8, 4, 512, window=200, ids="int64", sink=True),
    Case("257_700", "2500_129", 12, 4, 512, cap=30.0, layout="padded", holes=True),
    Case("200_65", "300_64", 16, 1, 512, causal=False, layout="sliced"),
)  # fmt: skip


# Of D 512 with little else: what the CUDA version is shown, too, on a model of a cluster of blocks. Its tiles are 128 rows and 64 keys.
D512 = (
    Case("", "", dim=512),
    Case("0_3", "5_0", dim=512),
    Case("1", "0", heads=1, dim=512),
    Case("9_0_17", "0_5_130", heads=6, kv_heads=2, dim=512, sink=True),  # 3 heads a group
    Case("40", "70", heads=8, dim=512, ids="int64", layout="sliced"),
    Case("20", "130", heads=3, dim=512, holes=True, layout="padded", cap=3.0),
    Case("70", "10", heads=2, dim=512, causal=False),
    Case("3", "6", heads=1, dim=512, window=1, holes=True),
    *(Case("131", "0", heads=1, dim=512, window=w) for w in (0, 63, 64, 65)),
    *(Case("2", "200", heads=1, dim=512, window=w) for w in (127, 128, 129)),
    Case("60", "90", heads=2, dim=512, window=80, causal=False),
    Case("5", "700", heads=2, dim=512),  # twelve tiles: every buffer is used again
)


def _bench_cases() -> tuple[Case, ...]:
    short = "17_700_64_128_333_40_90_256_500_600_33_18_77_410_222_300"
    long = "_".join(str(4096 + 512 * i) for i in range(16))
    return (
        Case("8192", "0", 32, 4, 512, peers=True),
        Case("2048", "16384", 32, 4, 512, peers=True),
        Case("8192", "0", 32, 8, 256, peers=True),
        Case("8192", "0", 32, 16, 256, window=1023, peers=True),
        Case(short, long, 32, 4, 512, peers=True),
        Case(short, long, 32, 8, 256, peers=True),
        Case("2048", "16384", 32, 4, 512, pool="fp8", peers=True),
        Case("8192", "0", 32, 8, 128, peers=True),
        Case("2048", "16384", 32, 8, 128, peers=True),
    )


def _not_run(tier: str, case: Case) -> str | None:
    if tier == "device" or case not in (*LARGE, *D512):
        return None
    return "a case for the GPU" + (" and the model of a cluster" if case in D512 else "")


def _traffic(case: Case) -> Any:
    chunks, prefixes = case.lengths
    own = 4 if case.kind == "float32" else 2
    return traffic(
        chunks, prefixes, case.heads, case.kv_heads, case.dim, case.value_dim,
        causal=case.causal,
        window=None if case.window < 0 else case.window,
        bytes_of=(own, 1 if case.pool == "fp8" else own),
        id_bytes=8 if case.ids == "int64" else 4,
    )  # fmt: skip


OP = Op(
    name="extend_attention",
    package="attention",
    cases=(*SMALL, *LARGE, *D512),
    make_inputs=make_inputs,
    reference=_reference,
    oracle=_oracle,
    compare=compare,
    compare_oracle=_compare_oracle,
    traffic=_traffic,
    implementations={
        "triton": Implementation(run=_run, interpret=True),
        "cuda": Implementation(run=_run_cuda, archs=("sm90",), refuses=_cuda_refuses),
    },
    peers={
        "sglang": Implementation(run=_engine, version=_engine_version, refuses=_engine_refuses),
        "flashinfer-fa2": Implementation(
            run=_flashinfer,
            version=_flashinfer_version,
            archs=("sm90", "sm100", "sm120"),
            refuses=_flashinfer_refuses,
        ),
        "fa3": Implementation(
            run=_fa3, version=_fa3_version, archs=("sm90",), refuses=_fa3_refuses
        ),
    },
    binaries=(
        cuda.source_binary(),
        # Of D 512 the programs of a B200 have half of V.
        _binary("d512", Case("5", "35", 8, 1, 512), ("sm90", "sm120", "gfx950"), quick=True),
        _binary("d512_half", Case("5", "35", 8, 1, 512), ("sm100", "sm103")),
        _binary("d512_mask", LARGE[7], ("sm90", "sm100", "sm103")),
        _binary("d512_fp8", LARGE[2], ARCHS),
        _binary("d256_window", LARGE[1], ARCHS),
        _binary("d192_128_cap", LARGE[3], ARCHS),
        _binary("d128", LARGE[9], ARCHS),
    ),
    not_run=_not_run,
    bench_cases=_bench_cases(),
    bench_options={"l2": "cold"},
)
