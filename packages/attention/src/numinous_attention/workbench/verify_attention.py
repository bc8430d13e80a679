# SPDX-License-Identifier: Apache-2.0
"""Cases, peers and binaries of `kernels.verify_attention`; inputs, specification and comparison are `extend_attention`'s."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from numinous_attention.kernels.extend_attention import Tile, options_of, parts
from numinous_attention.kernels.verify_attention import (
    LINES,
    MAX_SPLITS,
    rows_of,
    verify_attention,
)
from numinous_attention.workbench import extend_attention as extend
from numinous_tooling.workbench import ARCHS, Implementation, Op, Tensors, TritonBinary

JOIN = "numinous_attention.kernels.verify_attention:_join_parts_kernel"


@dataclass(frozen=True)
class Case(extend.Case):
    """One call.

    Args:
        splits: 0 leaves the choice to the launcher.
    """

    splits: int = 0


def _run(case: Case, inputs: Tensors) -> Tensors:
    made = verify_attention(
        **inputs, **extend._options(case), with_lse=True, splits=case.splits or None
    )
    return extend._used(case, made._asdict())


# --- Peers ----------------------------------------------------------------------------------------------------------


def _splitkv(case: Case, inputs: Tensors) -> Tensors:
    """The engine's kernel for chains of drafts, which it uses on gfx950 alone; a program for every query head."""
    from sglang.kernels.ops.attention.verify_splitkv import verify_splitkv_fwd

    q, options = inputs["q"], extend._options(case)
    out = torch.empty((*q.shape[:2], case.value_dim), dtype=q.dtype, device=q.device)
    taken = verify_splitkv_fwd(
        q, inputs["k"], inputs["v"], out, inputs["k_pool"], inputs["v_pool"],
        inputs["qo_indptr"], inputs["kv_indptr"], inputs["kv_indices"],
        None, True, None, max(case.lengths[0]), options["k_scale"], options["v_scale"], options["sm_scale"],
    )  # fmt: skip
    assert taken
    return {"out": out}


def _splitkv_refuses(case: Case) -> str | None:
    if len(set(case.lengths[0])) != 1 or 0 in case.lengths[0]:
        return "it takes chunks of one length"
    if case.mask or case.window >= 0 or case.sink or case.cap or not case.causal:
        return "it has no masks, windows, sinks and caps"
    if case.value_dim != case.dim:
        return "it has one head dim"
    prefixes = case.lengths[1]
    average = sum(prefixes) / len(prefixes)
    splits = 4 if average < 4096 else 8 if average < 8192 else 16  # its choose_n_splits
    for prefix in prefixes:
        part = (-(-prefix // splits) + 31) // 32 * 32
        if part * (splits - 1) >= prefix:
            return "a prefix leaves splits empty, whose unwritten parts it multiplies by 0: NaN where memory held NaN"
    return extend._engine_refuses(case)


DECODE_SPLITS = 8  # the engine's default, --triton-attention-num-kv-splits


@functools.cache
def _decode_plan(case: Case, device: Any) -> Tensors:
    """What the Triton backend prepares for a decode: ids of prefixes and tokens, splits of each request by its own function."""
    both = [c + p for c, p in zip(*case.lengths, strict=True)]
    lengths = torch.tensor(both, dtype=torch.int32, device=device)
    splits = torch.full((len(both),), DECODE_SPLITS, dtype=torch.int32, device=device)
    if device.type == "cuda":
        from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

        cores = torch.cuda.get_device_properties(device).multi_processor_count
        get_num_kv_splits_triton[(1,)](
            splits, lengths, len(both), 1, case.heads, case.kv_heads, DECODE_SPLITS, cores,
            MAX_NUM_SEQ=max(256, 1 << (len(both) - 1).bit_length()),
        )  # fmt: skip
    room = (len(both), case.heads, DECODE_SPLITS)
    return {
        "indptr": extend._indptr(both, torch.int32, device),
        "ids": extend._slots(case, device),
        "splits": splits,
        "logits": torch.empty((*room, case.value_dim), device=device),
        "lse": torch.empty(room, device=device),
    }


def _decode(case: Case, inputs: Tensors) -> Tensors:
    """The engine's decode, one token a request: what verification of drafts is measured by."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    q, options = inputs["q"], extend._options(case)
    plan = _decode_plan(case, q.device)
    out = torch.empty((*q.shape[:2], case.value_dim), dtype=q.dtype, device=q.device)
    decode_attention_fwd(
        q, inputs["k_pool"], inputs["v_pool"], out, plan["indptr"], plan["ids"], plan["logits"], plan["lse"],
        plan["splits"], DECODE_SPLITS, options["sm_scale"], options["k_scale"], options["v_scale"],
        logit_cap=case.cap, sinks=inputs.get("sinks"),
    )  # fmt: skip
    return {"out": out}


def _decode_refuses(case: Case) -> str | None:
    if {*case.lengths[0]} != {1}:
        return "it takes one token a request"
    if case.mask or case.window >= 0 or not case.causal:
        return "masks and windows are not wired for it"
    return extend._needs_peers(case)


def compare(case: Case, got: Tensors, want: Tensors) -> None:
    """As `extend_attention`'s; peers of this op give no lse."""
    extend.compare(case, {"lse": want["lse"], **got}, want)


# --- Binaries -------------------------------------------------------------------------------------------------------


def _binary(name: str, case: Case, *, quick: bool = False) -> TritonBinary:
    """`extend_attention`'s kernel as this launcher starts it: with the tile of the case's rows, in splits."""
    base = extend._binary(name, case, ARCHS)
    chunks = case.lengths[0]
    rows = -(-sum(chunks) // len(chunks)) * (case.heads // case.kv_heads)

    def tile_on(arch: str) -> Tile:
        kind = "sm100" if arch == "sm103" else arch
        return rows_of(kind, case.dim, case.value_dim, rows)

    def layout(arch: str) -> dict[str, Any]:
        tile = tile_on(arch)
        return {"ROWS": tile.rows, "KEYS": tile.keys}

    constants = {key: value for key, value in base.constants.items() if key not in ARCHS}
    constants |= {"SPLIT": True, "V1": parts(case.value_dim)[1], "sinks_ptr": None}
    # Copies that nobody waits for, products of the matrix units.
    needed = {
        **dict.fromkeys(("sm90", "sm100", "sm103", "sm120"), ("LDGSTS",)),
        "gfx950": ("v_mfma",),
    }
    return dataclasses.replace(
        base,
        signature={**base.signature, "out_ptr": "*fp32"},
        constants={**constants, **{arch: layout(arch) for arch in ARCHS}},
        options={arch: options_of(arch, tile_on(arch)) for arch in ARCHS},
        required=needed,
        quick=quick,
    )


def _join(name: str, dim: int, sink: bool, archs: Sequence[str] = ARCHS) -> TritonBinary:
    pointers = {
        **dict.fromkeys(("part_ptr", "part_lse_ptr", "lse_ptr"), "*fp32"),
        "qo_indptr_ptr": "*i32",
        "out_ptr": "*bf16",
    }
    absent = {} if sink else {"sinks_ptr": None}
    if sink:
        pointers["sinks_ptr"] = "*fp32"
    strides = ("out_token_stride", "out_head_stride")
    return TritonBinary(
        name=name,
        kernel=JOIN,
        signature={**pointers, **dict.fromkeys((*strides, "heads", "batch", "splits"), "i32")},
        constants={**absent, "DIM": dim, "WIDE": 1 << (dim - 1).bit_length(), "MOST": MAX_SPLITS, "LINES": LINES, "NATIVE": True},
        aligned=(*pointers, *strides),
        options={"num_warps": 4},
        archs=archs,
        quick=False,
    )  # fmt: skip


# --- Cases ----------------------------------------------------------------------------------------------------------

# Tiles of the interpreter are 16 rows and 16 keys.
SMALL = (
    Case("", ""),
    Case("0_0", "0_5", splits=3),
    Case("1", "0", splits=2),  # the chunk alone
    Case("4_4_4", "0_5_70", heads=8, kv_heads=2, splits=3),  # splits without keys
    Case("4", "40", dim=16, splits=MAX_SPLITS),
    Case("1_4_16_2", "33_0_90_17", heads=3, splits=4, ids="int64", layout="sliced"),
    Case("4", "64", heads=8, dim=512, splits=2),
    Case("4", "64", heads=8, dim=32, splits=1),
    Case("16", "20", heads=8, dim=32, splits=2),  # eight tiles a request
    Case("5", "40", heads=3, dim=192, dim_v=128, pool="fp8", splits=3),
    Case("6", "50", dim=64, dim_v=96, holes=True, layout="padded", splits=4),
    Case("3", "6", holes=True, window=1, dim=16, heads=1, splits=2),
    Case("4_2", "37_20", heads=4, dim=128, causal=False, cap=3.0, sink=True, splits=3),
    *(Case("4", "70", window=w, dim=16, splits=3) for w in (0, 15, 16, 17, 31, 32, 33)),
    Case("7_4", "39_0", mask="tree", causal=False, dim=32, splits=3),
    Case("8_8_8", "5_70_33", 8, 2, mask="tree", causal=False, dim=32, splits=4, ids="int64"),
    Case(
        "9", "45", mask="tree", causal=False, dim=32, lost=3, mask_prefix=True, window=20, splits=3
    ),
    Case("16", "45", mask="span", dim=32, heads=1, window=16, splits=2),
    Case("5", "39", mask="nothing", causal=False, mask_prefix=True, sink=True, dim=16, splits=3),
    Case("9", "40", dim=256, kind="float32", cap=30.0, splits=2),
    Case("40", "37", dim=16, splits=3),  # not what it is made for
    Case("4_4", "300_20", dim=16),  # the launcher's choice
)

LARGE = (
    Case("4_4_4_4", "1600_0_90_700", 32, 4, 512, sink=True),
    Case("4_4_4_4", "1600_0_90_700", 32, 4, 512, pool="fp8", holes=True, splits=5),
    Case("8_8_8", "127_128_1290", 16, 2, 512, mask="tree", causal=False),
    Case("1_1_1", "1600_90_700", 32, 4, 512),
    Case("16_16", "1000_30", 8, 1, 512, mask="tree", causal=False, mask_prefix=True),
    Case("3_1_4_2", "1500_900_40_1", 32, 16, 256, window=100, ids="int64", splits=3),
    Case("6_6_6", "511_512_513", 16, 4, 256, mask="tree", causal=False, window=200, lost=7),
    Case("16_7", "2000_129", 32, 4, 256, cap=30.0, layout="sliced"),
    Case("4_4", "3000_500", 32, 8, 128, splits=MAX_SPLITS),
    Case("16_16", "300_1025", 32, 8, 128, pool="fp8"),
    Case("2_2", "70_1000", 16, 8, 192, 128),
    Case("5_5", "200_600", 8, 2, 64, layout="padded"),
    Case("4", "100", 8, 1, 64, kind="float32"),
)  # fmt: skip


def _bench_cases() -> tuple[Case, ...]:
    def lengths(requests: int, chunk: int, prefix: int) -> tuple[str, str]:
        return "_".join([str(chunk)] * requests), "_".join([str(prefix)] * requests)

    many, tokens = lengths(32, 4, 16384)
    ragged = "_".join(str(1024 * (i + 1)) for i in range(32))
    return (
        Case(many, tokens, 32, 4, 512, peers=True),
        Case(*lengths(32, 1, 16384), 32, 4, 512, peers=True),
        Case(*lengths(32, 8, 16384), 32, 4, 512, peers=True),
        Case(many, tokens, 32, 4, 512, mask="tree", causal=False, peers=True),
        Case(many, tokens, 32, 4, 512, pool="fp8", peers=True),
        Case(many, ragged, 32, 4, 512, peers=True),
        Case(*lengths(1, 4, 131072), 32, 4, 512, peers=True),
        # 2^31 elements and more a pool: ids as wide as the engine's, or stock's products wrap.
        Case(many, tokens, 32, 16, 256, window=1023, ids="int64", peers=True),
        Case(many, tokens, 32, 8, 256, peers=True),
        Case(*lengths(64, 4, 8192), 32, 8, 128, peers=True),
    )


def _not_run(tier: str, case: Case) -> str | None:
    if tier == "device" or case not in LARGE:
        return None
    return "a case for the GPU"


OP = Op(
    name="verify_attention",
    package="attention",
    cases=(*SMALL, *LARGE),
    make_inputs=extend.make_inputs,
    reference=extend._reference,
    oracle=extend._oracle,
    compare=compare,
    compare_oracle=extend._compare_oracle,
    traffic=extend._traffic,
    implementations={"triton": Implementation(run=_run, interpret=True)},
    peers={
        "sglang": extend.OP.peers["sglang"],
        "sglang-splitkv": Implementation(
            run=_splitkv, version=extend._engine_version, refuses=_splitkv_refuses
        ),
        "sglang-decode": Implementation(
            run=_decode, version=extend._engine_version, refuses=_decode_refuses
        ),
        "flashinfer-fa2": extend.OP.peers["flashinfer-fa2"],
        "fa3": extend.OP.peers["fa3"],
    },
    binaries=(
        _binary("d512", LARGE[0], quick=True),
        _binary("d512_tree", LARGE[2]),
        _binary("d512_fp8", LARGE[1]),
        _binary("d512_one", LARGE[3]),
        _binary("d256_window", LARGE[5]),
        _binary("d256_cap", LARGE[7]),
        _binary("d128", LARGE[8]),
        _binary("d128_fp8", LARGE[9]),
        _join("join_d512", 512, sink=True),
        _join("join_d128", 128, sink=False),
    ),
    not_run=_not_run,
    bench_cases=_bench_cases(),
    bench_options={"l2": "cold"},
)  # fmt: skip
