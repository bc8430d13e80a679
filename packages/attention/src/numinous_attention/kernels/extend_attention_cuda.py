# SPDX-License-Identifier: Apache-2.0
"""Launcher of csrc/extend_attention: `extend_attention` at D = D_v = 512 on Hopper in CUDA C++; see docs/deep-dives/extend-512.md."""

from __future__ import annotations

import ctypes
import functools
import logging
import math
from typing import TYPE_CHECKING

import torch

from numinous_tooling import launch
from numinous_tooling.workbench import SourceBinary

if TYPE_CHECKING:
    from numinous_attention.kernels.extend_attention import _Call

PACKAGE = "numinous_attention"

DIM = 512  # of q, K and V
ROWS, THREADS = 128, 384  # of a cluster of two blocks; of a block
SHARED = 232192  # bytes of a block: `Plan::kBytes` of layout.cuh


def source_binary(*, debug: bool = False) -> SourceBinary:
    """csrc/extend_attention/kernel.cu for D 512; `debug` has the first cluster write its first tile."""
    return SourceBinary(
        name=f"extend_attention_{DIM}" + ("_debug" if debug else ""),
        source="csrc/extend_attention/kernel.cu",
        entries=["extend"],
        archs=("sm90",),
        defines={"NUMINOUS_DIM": str(DIM), **({"NUMINOUS_DEBUG": "1"} if debug else {})},
        # Products of a warpgroup, gathered copies, barriers, messages to the other block, registers handed over.
        required={"sm90": ("HGMMA", "LDGSTS", "SYNCS", "STAS", "USETMAXREG")},
    )


class Params(ctypes.Structure):
    """`Params` of kernel.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "k_pool", "v_pool")),
        *((name, ctypes.c_void_p) for name in ("qo_indptr", "kv_indptr", "kv_indices", "sinks")),
        *((name, ctypes.c_void_p) for name in ("out", "lse", "debug")),
        *((f"{x}_{y}", ctypes.c_int64) for x in ("q", "k", "v") for y in ("token", "head")),
        *((f"{x}_{y}", ctypes.c_int64) for x in ("k", "v") for y in ("slot", "pool_head")),
        *((name, ctypes.c_int64) for name in ("out_token", "out_head", "listed")),
        *((name, ctypes.c_int) for name in ("heads", "group", "batch", "tokens", "slots")),
        *((name, ctypes.c_int) for name in ("window", "causal", "wide_rows", "wide_lists")),
        *((name, ctypes.c_int) for name in ("wide_ids", "wide_sinks")),
        *((name, ctypes.c_float) for name in ("factor", "cap")),
    )


def params_of(call: _Call, debug: torch.Tensor | None = None) -> Params:
    """Arguments of the kernel of csrc/extend_attention."""
    tensors = (
        call.q, call.k, call.v, call.k_pool, call.v_pool, call.qo_indptr, call.kv_indptr, call.kv_indices, call.sinks,
        call.out, call.lse, debug,
    )  # fmt: skip
    strided = (call.q, call.k, call.v, call.k_pool, call.v_pool, call.out)
    heads, kv_heads = call.q.shape[1], call.k.shape[1]
    tables = (call.qo_indptr, call.kv_indptr, call.kv_indices)
    return Params(
        *(None if t is None else t.data_ptr() for t in tensors),
        *(stride for x in strided for stride in x.stride()[:2]),
        len(call.kv_indices),
        heads,
        heads // kv_heads,
        len(call.qo_indptr) - 1,
        call.q.shape[0],
        len(call.k_pool),
        -1 if call.window is None else min(call.window, 2**31 - 1),
        call.causal,
        *(t.dtype == torch.int64 for t in tables),
        call.sinks is not None and call.sinks.dtype == torch.float32,
        call.sm_scale * (2 / call.logit_cap if call.logit_cap else 1.0) * math.log2(math.e),
        call.logit_cap * math.log2(math.e),
    )


def grid_of(call: _Call) -> tuple[int, int]:
    """Blocks: two for each tile of rows, of each KV head."""
    tokens, heads, _ = call.q.shape
    kv_heads = call.k.shape[1]
    tiles = tokens * (heads // kv_heads) // ROWS + len(call.qo_indptr) - 1
    return 2 * tiles, kv_heads


def launch_call(call: _Call, debug: torch.Tensor | None = None) -> None:
    with torch.cuda.device(call.q.device):
        kernel = launch.load(PACKAGE, source_binary(debug=debug is not None), entry="extend")
        kernel(
            grid_of(call),
            THREADS,
            (params_of(call, debug),),
            shared=SHARED,
            stream=torch.cuda.current_stream().cuda_stream,
        )


def not_taken(call: _Call) -> str:
    """Why the CUDA version does not take a call; empty where it does."""
    if call.q.device.type != "cuda" or torch.version.hip is not None:
        return f"needs tensors on an NVIDIA GPU, got {call.q.device}"
    capability = torch.cuda.get_device_capability(call.q.device)
    if capability != (9, 0):
        return f"is made for compute capability 9.0, this is {capability[0]}.{capability[1]}"
    return unfit(call) or _missing(call.q.device)


@functools.cache
def _missing(device: torch.device) -> str:
    """Why a GPU has no machine code of it, said once; empty where it has. Loads it, inside a capture too."""
    try:
        with torch.cuda.device(device):
            launch.load(PACKAGE, source_binary(), entry="extend")
    except RuntimeError as error:
        logging.getLogger(__name__).warning(
            "extend_attention: Triton in place of CUDA C++: %s", error
        )
        return str(error)
    return ""


def unfit(call: _Call) -> str:
    """Why no GPU's CUDA version takes a call; empty where that of sm90 does."""
    if call.q.dtype != torch.bfloat16 or call.k_pool.dtype != torch.bfloat16:
        return f"takes q and pools in bfloat16, got {call.q.dtype} and {call.k_pool.dtype}"
    if call.q.shape[2] != DIM or call.v.shape[2] != DIM:
        return f"takes head dim {DIM}, got {call.q.shape[2]} and {call.v.shape[2]}"
    if call.mask is not None:
        return "takes no mask"
    if call.k_scale != 1.0 or call.v_scale != 1.0:
        return f"takes no scales of pools, got {call.k_scale} and {call.v_scale}"
    if len(call.k_pool) >= 2**31 or call.k.shape[1] >= 2**16:
        return "takes fewer than 2^31 slots and 2^16 KV heads"
    for name in ("q", "k", "v", "k_pool", "v_pool", "out"):
        x = getattr(call, name)
        if x.data_ptr() % 16 or any(stride % 8 for stride in x.stride()[:2]):
            return f"needs heads of {name} at multiples of 16 bytes, got strides {x.stride()}"
    return ""
