# SPDX-License-Identifier: Apache-2.0
"""Fused RMSNorm and FP8 quantisation of its output, with or without the residual addition before it.

*What*      h = x (+ residual);  y = bf16(h · rstd · (w + b)),  rstd = 1 / sqrt(mean(h²) + eps),  b = 1 for Gemma, else 0;
            q = e4m3(y · 448 / amax),  scale = amax / 448,  amax = max |y| over a group of 128, at least 1e-10.
*Shapes*    x, residual, y: [M, H] bf16; w: [H] bf16; q: [M, H] e4m3fn; scale: see `scales` below. H a multiple of 128.
*Layout*    scales "row": [M, H/128] fp32; "column": the same with strides (1, M rounded up to 4), as TMA wants it;
            "ue8m0": int32 [M, ceil(H/512)], four exponents each, as DeepGEMM reads it on Blackwell; "tensor": one given
            scale, q = e4m3(clamp(y / scale)). Padding rows and bytes are written as 0 (`numinous_tooling.scale_layouts`).
*Bytes*     read 2 a value (4 with residual), write 1 + 4/128 (+ 2 residual, + 2 where y is asked for), weights once:
            bound by memory at every shape; the chain of two kernels moves 2 + 2 more.
*Numerics*  sum of squares and all products in fp32, one rounding to bf16 before the quantisation, as the chain has it.
            "cuda" gives the bits of SGLang 0.5.20's chain on NVIDIA GPUs (its norm is FlashInfer's CuTe DSL kernel): same
            order of summation, same approximate reciprocal square root and division. "triton" gives the bits of
            `reference` once rstd is given; its own rstd may be a unit in the last place off, which moves a value of y
            or q to its neighbour now and then.
            NaN: amax passes over it and q is 448, as in the engine's kernel; a row that holds one is NaN in y.
            amax above 2^126 gives q = 0 with fp32 scales, because the engine's approximate division does.
*Arch*      see catalog.py. *Evidence* evidence/moe-gemm/rmsnorm_quant.jsonl.

Sources: FlashInfer 0.6.18 ``norm/kernels/rmsnorm.py`` and ``fused_add_rmsnorm.py`` (order of summation, read from the machine
code), SGLang 0.5.20 ``kernels/jit/csrc/gemm/per_token_group_quant.cuh`` (quantisation).
"""

from __future__ import annotations

import ctypes
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from numinous_tooling import launch
from numinous_tooling.device.convert import decode_bf16, encode_bf16, encode_e4m3fn
from numinous_tooling.numerics import encode_e4m3fn as reference_encode
from numinous_tooling.scale_layouts import (
    column_major_scales,
    empty_column_major,
    pack_ue8m0,
    padded_rows,
)
from numinous_tooling.workbench import SourceBinary, Tensors, Traffic

__all__ = ["NormQuant", "add_rmsnorm_quant_fp8", "reference", "rmsnorm_quant_fp8", "traffic"]

PACKAGE = "numinous_moe_gemm"
GROUP = 128
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-10
DIVISION_LIMIT = 2.0**126  # above it div.approx.ftz.f32 gives 0

Scales = Literal["row", "column", "ue8m0", "tensor"]
SCALES: tuple[Scales, ...] = ("row", "column", "ue8m0", "tensor")


class NormQuant(NamedTuple):
    """Result: `q` [M, H] e4m3fn, `scale` as its layout says (None with "tensor"), `y` the bf16 buffer given, or None."""

    q: torch.Tensor
    scale: torch.Tensor | None
    y: torch.Tensor | None


# --- Reference ------------------------------------------------------------------------------------------------------


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    scales: Scales,
    residual: torch.Tensor | None = None,
    gemma: bool = False,
    static_scale: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
    exact: bool = False,
) -> Tensors:
    """Specification in torch.

    Args:
        rstd: [M] fp32 to use instead of the one computed.
        exact: take every step up to y in fp64.

    Returns:
        ``q`` (codes in uint8), ``scale``, ``y`` and, with a residual, ``residual`` (its new value).
    """
    real = torch.float64 if exact else torch.float32
    h = x.to(real)
    out: Tensors = {}
    if residual is not None:
        h = h + residual.to(real)
        out["residual"] = h.to(torch.bfloat16)
    if rstd is None:
        # The sum leaves fp32 where the kernels' does, whatever it is summed in.
        total = h.to(torch.float64).square().sum(-1).to(torch.float32)
        mean = total.to(torch.float64) / h.shape[-1]
        rstd = (mean + eps).rsqrt().to(torch.float32)
    y = (h * rstd.to(real)[:, None] * (weight.to(real) + float(gemma))).to(torch.bfloat16)
    out["y"] = y

    if scales == "tensor":
        assert static_scale is not None
        scaled = (y.float() * (1.0 / static_scale.float())).nan_to_num(
            nan=-E4M3_MAX, posinf=E4M3_MAX, neginf=-E4M3_MAX
        )
        return {**out, "q": reference_encode(scaled), "scale": None}

    groups = y.float().unflatten(-1, (-1, GROUP))
    amax = torch.where(groups.isnan(), 0.0, groups.abs()).amax(-1).clamp_min(AMAX_FLOOR)
    scale = amax * torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32)
    if scales == "ue8m0":
        bits = scale.view(torch.int32)
        exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0)
        factor = ((254 - exponent) << 23).to(torch.int32).view(torch.float32)
        # The engine multiplies in bf16: exact, because the factor is a power of two.
        scaled = (groups * factor[..., None]).to(torch.bfloat16).float()
        packed = pack_ue8m0(exponent.to(torch.uint8))
    else:
        # Not `448 / amax`, which torch takes as a reciprocal and a product: two roundings.
        factor = torch.full_like(amax, E4M3_MAX).div(amax).where(amax <= DIVISION_LIMIT, 0.0)
        scaled = groups * factor[..., None]
        packed = column_major_scales(scale) if scales == "column" else scale
    # min(NaN, 448) is 448 on the GPU.
    scaled = torch.where(scaled.isnan(), E4M3_MAX, scaled).clamp_max(E4M3_MAX)
    return {**out, "q": reference_encode(scaled.flatten(-2)), "scale": packed}


def traffic(rows: int, hidden: int, *, scales: Scales, residual: bool, with_y: bool) -> Traffic:
    """Compulsory bytes, see *Bytes* above; about nine FLOPs a value."""
    values = rows * hidden
    each = 2 + 1 + (4 if residual else 0) + (2 if with_y else 0)
    scale = {
        "row": 4 * values // GROUP,
        "column": 4 * padded_rows(rows) * hidden // GROUP,
        "ue8m0": 4 * padded_rows(rows) * -(-hidden // (4 * GROUP)),
        "tensor": 4,
    }[scales]
    return Traffic(bytes=values * each + scale + 2 * hidden, flops=9 * values, unit="fp32")


# --- Triton ---------------------------------------------------------------------------------------------------------


@triton.jit
def _load_bf16(at, mask):
    return decode_bf16(tl.load(at, mask=mask, other=0.0).to(tl.uint16, bitcast=True))


@triton.jit
def _rmsnorm_quant_kernel(
    x_ptr,  # [M, H] bf16
    residual_ptr,  # [M, H] bf16, read and written
    weight_ptr,  # [H] bf16
    q_ptr,  # [M, H] uint8
    scale_ptr,  # fp32, or int32 where packed
    static_scale_ptr,  # [1] fp32
    y_ptr,  # [M, H] bf16
    rstd_ptr,  # [M] fp32, given
    x_stride,
    residual_stride,
    q_stride,
    y_stride,
    scale_token_stride,
    scale_group_stride,
    rows,
    hidden,
    eps,
    weight_bias,
    BLOCK: tl.constexpr,  # power of two, at least hidden and 512
    MODE: tl.constexpr,  # 0 fp32 scales, 1 packed UE8M0, 2 one given scale
    ADD: tl.constexpr,
    WITH_Y: tl.constexpr,
    GIVEN_RSTD: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = row < rows
    mask = (column < hidden) & live
    h = _load_bf16(x_ptr + row * x_stride + column, mask)  # [BLOCK]
    if ADD:
        residual_at = residual_ptr + row * residual_stride + column
        h += _load_bf16(residual_at, mask)
        tl.store(residual_at, encode_bf16(h, NATIVE).to(tl.bfloat16, bitcast=True), mask=mask)
    if GIVEN_RSTD:
        rstd = tl.load(rstd_ptr + row, mask=live, other=0.0)
    else:
        mean = tl.div_rn(tl.sum(h * h, axis=0), hidden.to(tl.float32))
        rstd = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    weight = _load_bf16(weight_ptr + column, column < hidden)
    y_bits = encode_bf16(h * rstd * (weight + weight_bias), NATIVE)  # [BLOCK]
    if WITH_Y:
        tl.store(y_ptr + row * y_stride + column, y_bits.to(tl.bfloat16, bitcast=True), mask=mask)
    y = decode_bf16(y_bits)

    q_at = q_ptr + row * q_stride + column
    if MODE == 2:
        scaled = y * tl.div_rn(1.0, tl.load(static_scale_ptr))
        scaled = tl.where(scaled != scaled, -448.0, tl.minimum(tl.maximum(scaled, -448.0), 448.0))
        tl.store(q_at, encode_e4m3fn(scaled, NATIVE), mask=mask)
    else:
        groups = tl.reshape(y, [BLOCK // 128, 128])
        amax = tl.max(tl.where(groups == groups, tl.abs(groups), 0.0), axis=1)  # [BLOCK / 128]
        amax = tl.maximum(amax, 1e-10)
        scale = amax * (1.0 / 448.0)
        group = tl.arange(0, BLOCK // 128)
        if MODE == 1:
            bits = scale.to(tl.uint32, bitcast=True)
            exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).to(tl.uint32)
            factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
            exponent = tl.where(live & (group * 128 < hidden), exponent & 0xFF, 0)
            four = tl.reshape(exponent << ((group % 4) * 8).to(tl.uint32), [BLOCK // 512, 4])
            word = tl.arange(0, BLOCK // 512)
            tl.store(
                scale_ptr + row * scale_token_stride + word * scale_group_stride,
                tl.sum(four, axis=1).to(tl.int32, bitcast=True),
                mask=word * 512 < hidden,
            )
        else:
            factor = tl.where(amax > 8.507059173023462e37, 0.0, tl.div_rn(448.0, amax))
            tl.store(
                scale_ptr + row * scale_token_stride + group * scale_group_stride,
                tl.where(live, scale, 0.0),
                mask=group * 128 < hidden,
            )
        scaled = groups * factor[:, None]
        if MODE == 1:  # the engine multiplies in bf16
            scaled = decode_bf16(encode_bf16(scaled, NATIVE))
        scaled = tl.where(scaled != scaled, 448.0, tl.minimum(scaled, 448.0))
        tl.store(q_at, tl.reshape(encode_e4m3fn(scaled, NATIVE), [BLOCK]), mask=mask)


def _launch_triton(call: _Call, rstd: torch.Tensor | None = None) -> None:
    block = max(512, triton.next_power_of_2(call.hidden))
    interpreted = call.x.device.type == "cpu"
    if interpreted and isinstance(_rmsnorm_quant_kernel, triton.JITFunction):
        raise ValueError(
            "impl='triton' needs tensors on a GPU, or TRITON_INTERPRET=1 when its module is imported; got cpu"
        )
    _rmsnorm_quant_kernel[(call.padded,)](
        call.x,
        call.residual,
        call.weight,
        call.q.view(torch.uint8),
        call.scale,
        call.static_scale,
        call.y,
        rstd,
        *call.strides,
        call.rows,
        call.hidden,
        call.eps,
        call.weight_bias,
        BLOCK=block,
        MODE=call.mode,
        ADD=call.residual is not None,
        WITH_Y=call.y is not None,
        GIVEN_RSTD=rstd is not None,
        NATIVE=not interpreted and torch.version.hip is None,
        num_warps=4 if block <= 4096 else 8,
    )


# --- CUDA -----------------------------------------------------------------------------------------------------------

SMALLEST_HIDDEN, LARGEST_HIDDEN = 256, 16384
STREAM_THREADS, SINGLE_THREADS = 128, 1024
# Up to here "single" was the faster while tuning on an H200 (no record), without and with a residual.
SINGLE_ROWS_PER_PROCESSOR = {False: 2, True: 8}
# Threads of a row -> 16-byte vectors that a thread of a "stream" kernel can hold; the largest covers every hidden size.
STREAM_VECTORS = {32: (4, 8, 12), 64: (8, 12), 128: (7, 8, 12, 16)}

_VARIANTS = ("", "_ue8m0", "_add", "_add_ue8m0")
_USUAL = ("single_1", "stream_64_8", "stream_128_7", "stream_128_8")
_MORE = (
    "single_2",
    *(
        name
        for width, counts in STREAM_VECTORS.items()
        for count in counts
        if (name := f"stream_{width}_{count}") not in _USUAL
    ),
)
_HOPPER = tuple(
    f"{schedule}_{shape}" for schedule in ("split", "ring") for shape in ("64_8", "128_7")
)

Schedule = Literal["single", "stream", "split", "ring"]
SCHEDULES: tuple[Schedule, ...] = ("single", "stream", "split", "ring")

BINARIES = (
    SourceBinary(
        name="rmsnorm_quant",
        source="csrc/rmsnorm_quant/kernel.cu",
        entries=[kernel + variant for kernel in _USUAL for variant in _VARIANTS],
    ),
    SourceBinary(
        name="rmsnorm_quant_more",
        source="csrc/rmsnorm_quant/kernel.cu",
        entries=[kernel + variant for kernel in _MORE for variant in _VARIANTS],
        defines={"NUMINOUS_MORE": "1"},
        quick=False,
    ),
    # csrc/rmsnorm_quant/hopper.cuh: timed on sm90 only.
    SourceBinary(
        name="rmsnorm_quant_hopper",
        source="csrc/rmsnorm_quant/kernel.cu",
        entries=[kernel + variant for kernel in _HOPPER for variant in _VARIANTS],
        archs=("sm90",),
        defines={"NUMINOUS_HOPPER": "1"},
        quick=False,
    ),
)


class _Params(ctypes.Structure):
    """`Params` of kernel.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "residual", "weight", "q", "scale", "static_scale", "y")),
        *((name, ctypes.c_int64) for name in ("x_stride", "residual_stride", "q_stride", "y_stride")),
        *((name, ctypes.c_int64) for name in ("scale_token_stride", "scale_group_stride")),
        *((name, ctypes.c_int) for name in ("rows", "padded_rows", "hidden", "threads_per_row")),
        *((name, ctypes.c_float) for name in ("eps", "weight_bias")),
    )  # fmt: skip


def threads_per_row(hidden: int) -> int:
    """Threads that sum a row: FlashInfer's choice, on which the order of summation depends."""
    return 32 if hidden <= 3072 else 64 if hidden <= 6144 else 128


def stream_shared(hidden: int, held: int, add: bool) -> int:
    """Bytes of dynamic shared memory of a "stream" kernel: weights in fp32, vectors of x (and residual) under way."""
    return 4 * hidden + 16 * STREAM_THREADS * held * (2 if add else 1)


# Of "split" and "ring". They have no code for a row that does not fill the last vector of every thread, and these two are
# the sizes that were timed.
HOPPER_HIDDEN = (4096, 7168)
SPLIT_PARTS = 4  # `kParts` of hopper.cuh
RING_SHARED, RING_THREADS = 232448 - 1024, 512  # `kRingShared`, `kRingThreads`
# Values (rows times hidden) up to which each is taken, without and with a residual. Each limit is a size that was timed and at which the schedule was
# no slower than any other, while one of the others was faster at the next size of that hidden size: evidence/moe-gemm/rmsnorm_quant_sweep.jsonl, for 4096
# rows with a residual rmsnorm_quant_trial.jsonl. In the sweep the choice is the fastest everywhere but at 48 rows of 4096, where "split" is 7 %, with a
# residual 2 % faster. Timed on an H200, inputs rotated and not cold; not scaled to a GPU of other multiprocessors, because none was timed.
SPLIT_VALUES = {False: 24 * 7168, True: 16 * 7168}
RING_VALUES = {False: 1024 * 4096, True: 4096 * 7168}


def refuses(schedule: Schedule, hidden: int) -> str | None:
    """Why a schedule does not take a hidden size; None where it does."""
    if schedule in ("single", "stream") or hidden in HOPPER_HIDDEN:
        return None
    return f"hidden sizes {' and '.join(map(str, HOPPER_HIDDEN))} only"


def _chosen(call: _Call, stream_bytes: int, gpu: Any) -> Schedule:
    """The schedule for a call; `stream_bytes` of shared memory are what "stream" asks for, `gpu` has torch's properties."""
    add, processors = call.residual is not None, gpu.multi_processor_count
    if gpu.major == 9 and call.hidden in HOPPER_HIDDEN:
        values = call.rows * call.hidden
        if values <= SPLIT_VALUES[add]:
            return "split"
        if values <= RING_VALUES[add]:
            return "ring"
    few = call.rows <= SINGLE_ROWS_PER_PROCESSOR[add] * processors
    # Consumer GPUs have 99 KiB: too little for the widest rows with a residual.
    fits = stream_bytes <= gpu.shared_memory_per_block_optin
    return "single" if few or not fits else "stream"


def _launch_cuda(call: _Call, schedule: Schedule | None = None) -> None:
    width = threads_per_row(call.hidden)
    vectors = -(-call.hidden // (8 * width))
    add = call.residual is not None
    variant = ("_add" if add else "") + ("_ue8m0" if call.mode == 1 else "")
    params = _Params(
        *(None if t is None else t.data_ptr() for t in (call.x, call.residual, call.weight, call.q)),
        *(None if t is None else t.data_ptr() for t in (call.scale, call.static_scale, call.y)),
        *call.strides,
        call.rows,
        call.padded,
        call.hidden,
        width,
        call.eps,
        call.weight_bias,
    )  # fmt: skip
    with torch.cuda.device(call.x.device):
        stream = torch.cuda.current_stream().cuda_stream
        gpu = torch.cuda.get_device_properties(call.x.device)
        processors = gpu.multi_processor_count
        held = next(count for count in STREAM_VECTORS[width] if vectors <= count)
        stream_bytes = stream_shared(call.hidden, held, add)
        schedule = schedule or _chosen(call, stream_bytes, gpu)
        if reason := refuses(schedule, call.hidden):
            raise NotImplementedError(f"{schedule}: {reason}")
        cluster = None
        if schedule == "single":
            items = 1 if width * vectors <= SINGLE_THREADS else 2
            kernel = _load(f"single_{items}", variant)
            grid, threads = call.rows, width * -(-vectors // items)
            shared = 4 * call.hidden  # the row in fp32
        elif schedule == "stream":
            kernel = _load(f"stream_{width}_{held}", variant)
            shared = stream_bytes
            tiles = -(-call.rows * width // STREAM_THREADS)
            at_once = processors * kernel.blocks_per_processor(STREAM_THREADS, shared)
            # Without a residual the arithmetic counts: as many blocks as run at once, or fewer that then have the same
            # number of turns. With one, device memory does, and blocks that start together would read together and
            # write together: a block for each tile was faster while tuning on an H200 (no record).
            grid = tiles if add else -(-tiles // -(-tiles // at_once))
            threads = STREAM_THREADS
        elif schedule == "split":
            kernel = _load(f"split_{width}_{vectors}", variant)
            # Padding rows of the scales have blocks of their own.
            grid, threads, shared = call.padded * SPLIT_PARTS, width, 0
            # The blocks of a row wait for each other where they write what the others read.
            in_place = add or (call.y is not None and call.y.data_ptr() == call.x.data_ptr())
            cluster = (SPLIT_PARTS,) if in_place else None
        else:
            kernel = _load(f"ring_{width}_{vectors}", variant)
            grid, threads, shared = min(processors, call.rows), RING_THREADS, RING_SHARED
        kernel((grid,), threads, (params,), shared=shared, stream=stream, pdl=True, cluster=cluster)


def _load(kernel: str, variant: str) -> launch.Kernel:
    binary = 0 if kernel in _USUAL else 1 if kernel in _MORE else 2
    return launch.load(PACKAGE, BINARIES[binary], entry=kernel + variant)


# --- Public functions -----------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """A checked call: inputs, outputs to fill, and what the launchers derive from them."""

    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor
    q: torch.Tensor
    scale: torch.Tensor | None
    static_scale: torch.Tensor | None
    y: torch.Tensor | None
    rows: int
    padded: int
    hidden: int
    mode: int
    eps: float
    weight_bias: float
    impl: str

    @property
    def strides(self) -> tuple[int, ...]:
        """Row strides of x, residual, q and y, then both of scale; 0 of a tensor that is absent. Both kernels' order."""
        rows = (0 if t is None else t.stride(0) for t in (self.x, self.residual, self.q, self.y))
        return (*rows, *((0, 0) if self.scale is None else self.scale.stride()))


def rmsnorm_quant_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    scales: Scales = "column",
    gemma: bool = False,
    static_scale: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    impl: Literal["cuda", "triton"] | None = None,
) -> NormQuant:
    """RMSNorm of each row and FP8 quantisation of the result, in one kernel.

    Args:
        x: [M, H] bf16, rows of any stride, H contiguous and a multiple of 128.
        weight: [H] bf16. "cuda" may read it while the kernel ahead in the stream still runs, so that one may not write it.
        eps: added to the mean square.
        scales: "row", "column", "ue8m0" or "tensor", see the module.
        gemma: multiply by 1 + weight.
        static_scale: [1] fp32 on the device; with "tensor" only.
        y: [M, H] bf16 to receive the normed rows too; may be `x` itself. Any other overlap of what is written with what is
            read is the caller's to avoid.
        impl: None takes "cuda" on an NVIDIA GPU and "triton" on an AMD one. "triton" also runs under the interpreter.

    Raises:
        TypeError: a dtype is not the one named.
        ValueError: shapes, strides or devices do not fit.
        NotImplementedError: "cuda" for H outside 256 … 16384, or rows that do not start at multiples of 16 bytes.
    """
    return _run(x, None, weight, eps, scales, gemma, static_scale, y, impl)


def add_rmsnorm_quant_fp8(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    scales: Scales = "column",
    gemma: bool = False,
    static_scale: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    impl: Literal["cuda", "triton"] | None = None,
) -> NormQuant:
    """As `rmsnorm_quant_fp8` of x + residual; `residual` [M, H] bf16 is replaced by the sum, rounded once.

    The norm takes the sum before it is rounded.
    """
    return _run(x, residual, weight, eps, scales, gemma, static_scale, y, impl)


def _run(*arguments: Any) -> NormQuant:
    call = _checked(*arguments)
    if call.rows:
        _launch_cuda(call) if call.impl == "cuda" else _launch_triton(call)
    return NormQuant(call.q, call.scale, call.y)


def _checked(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    scales: str,
    gemma: bool,
    static_scale: torch.Tensor | None,
    y: torch.Tensor | None,
    impl: str | None,
) -> _Call:
    for name, tensor in (("x", x), ("residual", residual), ("y", y)):
        _check_rows(name, tensor, x)
    rows, hidden = x.shape
    if weight.dtype != torch.bfloat16:
        raise TypeError(f"weight: expected bfloat16, got {weight.dtype}")
    if weight.shape != (hidden,) or weight.stride(0) != 1 or weight.device != x.device:
        raise ValueError(
            f"weight: expected [{hidden}] contiguous on {x.device}, got {list(weight.shape)} on {weight.device}"
        )
    if hidden == 0 or hidden % GROUP:
        raise ValueError(f"the hidden size must be a multiple of {GROUP}, got {hidden}")
    if scales not in SCALES:
        raise ValueError(f"scales is one of {', '.join(SCALES)}, got {scales!r}")
    if (scales == "tensor") != (static_scale is not None):
        raise ValueError("static_scale goes with scales='tensor', and only with it")
    if static_scale is not None and (
        static_scale.dtype != torch.float32
        or static_scale.numel() != 1
        or static_scale.device != x.device
    ):
        raise ValueError(
            f"static_scale: expected one float32 on {x.device}, got {static_scale.dtype} "
            f"{list(static_scale.shape)} on {static_scale.device}"
        )
    if impl is None:
        impl = "triton" if torch.version.hip else "cuda"
    if impl not in ("cuda", "triton"):
        raise ValueError(f"impl is 'cuda', 'triton' or None, got {impl!r}")
    if residual is not None and residual.data_ptr() == x.data_ptr() and rows:
        raise ValueError("x and residual are the same memory")
    if y is not None and residual is not None and residual.data_ptr() == y.data_ptr() and rows:
        raise ValueError("y and residual are the same memory")
    if impl == "cuda":
        _check_cuda(x, residual, y, weight, hidden)

    q = torch.empty((rows, hidden), dtype=torch.float8_e4m3fn, device=x.device)
    groups = hidden // GROUP
    scale, padded = None, rows
    if scales == "row":
        scale = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    elif scales == "column":
        scale = empty_column_major(rows, groups, dtype=torch.float32, device=x.device)
        padded = padded_rows(rows)
    elif scales == "ue8m0":
        scale = empty_column_major(rows, -(-groups // 4), dtype=torch.int32, device=x.device)
        padded = padded_rows(rows)
    mode = {"ue8m0": 1, "tensor": 2}.get(scales, 0)
    return _Call(
        x, residual, weight, q, scale, static_scale, y, rows, padded, hidden, mode, eps, float(gemma), impl
    )  # fmt: skip


def _check_rows(name: str, tensor: torch.Tensor | None, like: torch.Tensor) -> None:
    if tensor is None:
        return
    if tensor.dtype != torch.bfloat16:
        raise TypeError(f"{name}: expected bfloat16, got {tensor.dtype}")
    if tensor.dim() != 2 or tensor.shape != like.shape or tensor.device != like.device:
        raise ValueError(
            f"{name}: expected {list(like.shape)} with two dimensions on {like.device}, "
            f"got {list(tensor.shape)} on {tensor.device}"
        )
    if tensor.stride(1) != 1:
        raise ValueError(
            f"{name}: elements of a row must lie side by side, got strides {tensor.stride()}"
        )
    if name != "x" and tensor.shape[0] > 1 and tensor.stride(0) < tensor.shape[1]:
        raise ValueError(
            f"{name}: rows that are written may not overlap, got strides {tensor.stride()}"
        )


def _check_cuda(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    y: torch.Tensor | None,
    weight: torch.Tensor,
    hidden: int,
) -> None:
    if x.device.type != "cuda":
        raise ValueError(f"impl='cuda' needs tensors on an NVIDIA GPU, got {x.device}")
    if not SMALLEST_HIDDEN <= hidden <= LARGEST_HIDDEN:
        raise NotImplementedError(
            f"impl='cuda' takes hidden sizes {SMALLEST_HIDDEN} … {LARGEST_HIDDEN}, got {hidden}; use impl='triton'"
        )
    for name, tensor in (("x", x), ("residual", residual), ("y", y), ("weight", weight)):
        if tensor is not None and (
            tensor.data_ptr() % 16 or (tensor.stride(0) * 2 % 16 and tensor.dim() > 1)
        ):
            raise NotImplementedError(
                f"impl='cuda' needs rows of {name} that start at multiples of 16 bytes; use impl='triton'"
            )
