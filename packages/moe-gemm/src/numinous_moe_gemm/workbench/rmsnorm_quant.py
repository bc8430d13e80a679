# SPDX-License-Identifier: Apache-2.0
"""Cases, comparison, peers and binaries of `kernels.rmsnorm_quant`: what its tests, gates and benches are made from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest import mock

import torch
import triton

from numinous_moe_gemm.kernels import rmsnorm_quant as kernels
from numinous_moe_gemm.kernels.rmsnorm_quant import (
    BINARIES,
    GROUP,
    LARGEST_HIDDEN,
    SCALES,
    SCHEDULES,
    SMALLEST_HIDDEN,
    NormQuant,
    Scales,
    Schedule,
    add_rmsnorm_quant_fp8,
    reference,
    rmsnorm_quant_fp8,
    traffic,
)
from numinous_tooling.scale_layouts import unpack_ue8m0
from numinous_tooling.workbench import Implementation, Op, Tensors, TritonBinary

KERNEL = "numinous_moe_gemm.kernels.rmsnorm_quant:_rmsnorm_quant_kernel"
EPS = 1e-6
ENGINE = ("sglang", "flashinfer-python")


@dataclass(frozen=True)
class Case:
    """One shape and variant; `values` "edges" holds rows of NaN, inf, zeros, subnormals and the largest numbers."""

    rows: int
    hidden: int
    residual: bool = False
    scales: Scales = "column"
    gemma: bool = False
    bf16: bool = False
    values: str = "normal"


def make_inputs(case: Case, seed: int, device: Any) -> Tensors:
    """x, weight and what the variant needs; activations with a spread of magnitudes over the columns."""
    # Large inputs are drawn where they are needed; the values of a case differ between devices, not between calls.
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    spread = torch.exp2(2 * normal(case.hidden))
    x = (normal(case.rows, case.hidden) * spread).to(torch.bfloat16)
    residual = (normal(case.rows, case.hidden) * 4).to(torch.bfloat16) if case.residual else None
    weight = (1 + 0.2 * normal(case.hidden)).to(torch.bfloat16)
    if case.values == "edges":
        _set_edges(x)
        weight[-2:] = 3e38  # y leaves bf16 in the last group
        weight[:2] = 0.0
    if case.gemma:
        weight = (weight.float() - 1).to(torch.bfloat16)
    static_scale = torch.full((1,), 0.037, device=device) if case.scales == "tensor" else None
    return {"x": x, "residual": residual, "weight": weight, "static_scale": static_scale}


def _set_edges(x: torch.Tensor) -> None:
    edges = (
        lambda row: row.zero_(),
        lambda row: row[1].fill_(float("nan")),
        lambda row: row[3].fill_(float("inf")),
        lambda row: row[2].fill_(float("-inf")),
        lambda row: row.fill_(1e-40),  # bf16 subnormal
        lambda row: row.mul_(1e-38),
        lambda row: row[:2].fill_(3e38),  # its square leaves fp32
        lambda row: row[: GROUP + 1].fill_(-0.0),
        lambda row: row.fill_(1e-3),
    )
    for index, row in enumerate(x):
        edges[index % len(edges)](row)


def _reference(case: Case, inputs: Tensors, **options: Any) -> Tensors:
    residual = inputs["residual"]
    out = reference(
        inputs["x"],
        inputs["weight"],
        EPS,
        scales=case.scales,
        residual=residual,
        gemma=case.gemma,
        static_scale=inputs["static_scale"],
        **options,
    )
    return out if case.bf16 or options else {k: v for k, v in out.items() if k != "y"}


def _outputs(case: Case, inputs: Tensors, result: NormQuant) -> Tensors:
    out: Tensors = {"q": result.q.view(torch.uint8), "scale": result.scale}
    if case.bf16:
        out["y"] = result.y
    if case.residual:
        out["residual"] = inputs["residual"]
    return out


def _ours(impl: Literal["cuda", "triton"]) -> Any:
    def run(case: Case, inputs: Tensors) -> Tensors:
        x, weight, residual = inputs["x"], inputs["weight"], inputs["residual"]
        options: dict[str, Any] = {
            "scales": case.scales,
            "gemma": case.gemma,
            "static_scale": inputs["static_scale"],
            "y": torch.empty_like(x) if case.bf16 else None,
            "impl": impl,
        }
        if residual is None:
            result = rmsnorm_quant_fp8(x, weight, EPS, **options)
        else:
            result = add_rmsnorm_quant_fp8(x, residual, weight, EPS, **options)
        return _outputs(case, inputs, result)

    return run


def scales_as_rows(case: Case, scale: torch.Tensor | None, inputs: Tensors) -> torch.Tensor:
    """Scales of any layout as [M, H/128] fp32 (one value with "tensor")."""
    if scale is None:
        return inputs["static_scale"].reshape(1, 1)
    if case.scales == "ue8m0":
        exponents = unpack_ue8m0(scale, case.hidden // GROUP).to(torch.int32)
        return (exponents << 23).view(torch.float32)
    return scale


NEIGHBOURS = 1e-2
"""Share of values that may be the neighbour of the reference's. Ties are common where 8-bit y meets 8-bit amax, and the engine's
approximate division decides them otherwise than a rounded one. rstd a unit off moves fewer of y."""
FEW = 8  # whatever the share


def compare(case: Case, got: Tensors, want: Tensors) -> None:
    """Residual bit for bit; y, scale and q equal or neighbours, and neighbours at most in `NEIGHBOURS` of all places."""
    if case.residual and "residual" in got:
        _assert_close("residual", _ordered(got["residual"]), _ordered(want["residual"]), steps=0)
    if "y" in got and "y" in want:
        _assert_close("y", _ordered(got["y"]), _ordered(want["y"]), steps=1)
    if want.get("scale") is not None and "scale" in got:
        scale, expected = got["scale"], want["scale"]
        if scale.shape != expected.shape or scale.dtype != expected.dtype:
            raise AssertionError(
                f"scale: {scale.dtype} {list(scale.shape)}, want {expected.dtype} {list(expected.shape)}"
            )
        if case.scales == "ue8m0":
            # All four bytes of every element: those beyond the last group are 0.
            codes = [unpack_ue8m0(s, 4 * s.shape[1]).to(torch.int32) for s in (scale, expected)]
            # One step of y is at most one step of the exponent, and rarely that.
            _assert_close("scale", *codes, steps=1)
        else:
            # One step of y in bf16: 2^-7 of it at most.
            near = (scale - expected).abs() <= expected.abs() * 2.0**-7
            off = (scale != expected) & ~(near & scale.isfinite() & expected.isfinite())
            if bool(off.any()):
                at = tuple(int(i) for i in off.nonzero()[0])
                raise AssertionError(f"scale{list(at)}: {scale[at]}, want {expected[at]}")
    if "q" in got:
        same = True
        if want.get("scale") is not None:
            same = _same_groups(case, got["scale"], want["scale"])
        _assert_close("q", _code_order(got["q"]), _code_order(want["q"]), steps=1, where=same)


def _same_groups(case: Case, scale: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """[M, H] where both have the same scale: elsewhere the codes may be a whole exponent apart."""
    if case.scales == "ue8m0":
        scale, expected = (unpack_ue8m0(s, case.hidden // GROUP) for s in (scale, expected))
    return (scale == expected).repeat_interleave(GROUP, -1)


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """bf16 as integers in the order of the numbers, so that neighbours differ by one; every NaN is the same."""
    bits = x.contiguous().view(torch.int16).to(torch.int32)
    bits = torch.where(bits < 0, -(bits & 0x7FFF), bits)
    return torch.where(x.isnan(), 1 << 20, bits)


def _code_order(codes: torch.Tensor) -> torch.Tensor:
    """E4M3 codes as integers in the order of the numbers; NaN is no number's neighbour."""
    codes = codes.to(torch.int32)
    ordered = torch.where(codes >= 0x80, -(codes & 0x7F), codes)
    return torch.where(codes & 0x7F == 0x7F, 1 << 20, ordered)


def _assert_close(
    name: str,
    got: torch.Tensor,
    want: torch.Tensor,
    *,
    steps: int,
    where: torch.Tensor | bool = True,
) -> None:
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {list(got.shape)}, want {list(want.shape)}")
    distance = (got - want).abs()
    if where is not True:
        distance = torch.where(where, distance, 0)
    far = distance > steps
    if bool(far.any()):
        at = tuple(int(i) for i in far.nonzero()[0])
        raise AssertionError(
            f"{name}{list(at)}: {int(got[at])}, want {int(want[at])} (in steps of the format); "
            f"{int(far.sum())} of {far.numel()} are further than {steps} off"
        )
    count = int((distance > 0).sum())
    if count > max(FEW, NEIGHBOURS * distance.numel()):
        raise AssertionError(f"{name}: {count} of {distance.numel()} are neighbours, too many")


def _engine(case: Case, inputs: Tensors) -> Tensors:
    """What SGLang 0.5.20 runs: its norm, then its quantisation."""
    from sgl_kernel import fused_add_rmsnorm, gemma_fused_add_rmsnorm, gemma_rmsnorm, rmsnorm
    from sglang.kernels.ops.quantization import fp8_kernel

    x, weight, residual = inputs["x"], inputs["weight"], inputs["residual"]
    if residual is None:
        y = (gemma_rmsnorm if case.gemma else rmsnorm)(x, weight, EPS)
    else:
        (gemma_fused_add_rmsnorm if case.gemma else fused_add_rmsnorm)(x, residual, weight, EPS)
        y = x  # in place
    if case.scales == "tensor":
        q, scale = fp8_kernel.static_quant_fp8(y, inputs["static_scale"])
        scale = None
    else:
        q, scale = fp8_kernel.sglang_per_token_group_quant_fp8(
            y,
            GROUP,
            column_major_scales=case.scales != "row",
            scale_tma_aligned=case.scales != "row",
            scale_ue8m0=case.scales == "ue8m0",
        )
    return _outputs(case, inputs, NormQuant(q, scale, y))


def _norm_alone(case: Case, inputs: Tensors) -> Tensors:
    """The engine's norm without the quantisation: less work, the floor that a small batch is compared with."""
    from sgl_kernel import fused_add_rmsnorm, rmsnorm

    if inputs["residual"] is None:
        return {"y": rmsnorm(inputs["x"], inputs["weight"], EPS)}
    fused_add_rmsnorm(inputs["x"], inputs["residual"], inputs["weight"], EPS)
    return {"y": inputs["x"], "residual": inputs["residual"]}


def _flashinfer(case: Case, inputs: Tensors) -> Tensors:
    """FlashInfer's norm fused with a per-tensor scale: the only fused FP8 norm in a released wheel."""
    from flashinfer.norm import fused_add_rmsnorm_quant, rmsnorm_quant

    q = torch.empty_like(inputs["x"], dtype=torch.float8_e4m3fn)
    scale = inputs["static_scale"]
    if inputs["residual"] is None:
        rmsnorm_quant(q, inputs["x"], inputs["weight"], scale, EPS)
    else:
        fused_add_rmsnorm_quant(q, inputs["x"], inputs["residual"], inputs["weight"], scale, EPS)
    return _outputs(case, inputs, NormQuant(q, None, None))


def _version_of(*distributions: str) -> Any:
    def version() -> str:
        from importlib import metadata

        try:
            return " + ".join(f"{name} {metadata.version(name)}" for name in distributions)
        except metadata.PackageNotFoundError as missing:
            raise ImportError(f"{missing.name} is not installed") from None

    return version


def _cases() -> tuple[Case, ...]:
    small = (
        Case(0, 256),
        Case(1, 128, scales="row"),
        Case(1, 256),
        Case(3, 256, scales="ue8m0"),
        Case(2, 384, residual=True, scales="ue8m0"),
        Case(5, 640, residual=True, bf16=True),
        Case(4, 512, scales="row", gemma=True),
        Case(3, 1024, scales="tensor"),
        Case(3, 1024, residual=True, scales="tensor", bf16=True),
    )
    edges = tuple(
        Case(9, 512, residual=residual, scales=scales, bf16=True, values="edges")
        for scales in SCALES
        for residual in (False, True)
    )
    # Every count of vectors and of threads: the last of a width, the first of the next.
    widths = tuple(
        Case(2, hidden, residual=residual)
        for hidden in (2880 // GROUP * GROUP, 3072, 3200, 4096, 5376, 6144, 6272, 7168, 8192, 12288, 16384)
        for residual in (False, True)
    )  # fmt: skip
    # Sizes that are multiples of 16, for which Triton compiles other code.
    aligned = (
        Case(16, 7168, residual=True),
        Case(16, 4096, residual=True, scales="ue8m0"),
    )
    return small + edges + widths + aligned


def _bench_cases() -> tuple[Case, ...]:
    rows = (1, 16, 64, 512, 4096, 16384)
    main = [
        Case(count, hidden, residual=residual)
        for hidden in (4096, 7168)
        for residual in (False, True)
        for count in rows
    ]
    variants = [
        Case(4096, 7168, residual=True, bf16=True),
        Case(64, 7168, residual=True, bf16=True),
        Case(4096, 7168, residual=True, scales="ue8m0"),
        Case(4096, 7168, residual=True, scales="row"),
        Case(4096, 7168, residual=True, scales="tensor"),
    ]
    return (*main, *variants)


def _signature(*, packed: bool) -> dict[str, str]:
    pointers = {
        "x_ptr": "*bf16",
        "residual_ptr": "*bf16",
        "weight_ptr": "*bf16",
        "q_ptr": "*u8",
        "scale_ptr": "*i32" if packed else "*fp32",
    }
    strides = ("x_stride", "residual_stride", "q_stride", "y_stride", "scale_group_stride")
    return {
        **pointers,
        **dict.fromkeys((*strides, "rows", "hidden"), "i32"),
        "eps": "fp32",
        "weight_bias": "fp32",
    }


def _triton_binary(name: str, hidden: int, *, packed: bool, quick: bool = True) -> TritonBinary:
    """The residual variant as launched with strides and sizes that are multiples of 16."""
    block = max(512, triton.next_power_of_2(hidden))
    signature = _signature(packed=packed)
    absent = ("static_scale_ptr", "y_ptr", "rstd_ptr")
    return TritonBinary(
        name=name,
        kernel=KERNEL,
        signature=signature,
        constants={
            **dict.fromkeys(absent),
            "scale_token_stride": 1,
            "BLOCK": block,
            "MODE": int(packed),
            "ADD": True,
            "WITH_Y": False,
            "GIVEN_RSTD": False,
            "NATIVE": True,
            "gfx950": {"NATIVE": False},
        },
        aligned=[k for k in signature if k not in ("eps", "weight_bias")],
        options={"num_warps": 4 if block <= 4096 else 8},
        quick=quick,
    )


OP = Op(
    name="rmsnorm_quant",
    package="moe-gemm",
    cases=_cases(),
    make_inputs=make_inputs,
    reference=_reference,
    oracle=lambda case, inputs: _reference(case, inputs, exact=True),
    compare=compare,
    compare_oracle=compare,
    traffic=lambda case: traffic(
        case.rows, case.hidden, scales=case.scales, residual=case.residual, with_y=case.bf16
    ),
    implementations={
        "cuda": Implementation(
            run=_ours("cuda"),
            archs=("sm90", "sm100", "sm103", "sm120"),
            refuses=lambda case: (
                None
                if SMALLEST_HIDDEN <= case.hidden <= LARGEST_HIDDEN
                else f"hidden {case.hidden} is outside {SMALLEST_HIDDEN} … {LARGEST_HIDDEN}"
            ),
        ),
        "triton": Implementation(run=_ours("triton"), interpret=True),
    },
    peers={
        "sglang": Implementation(run=_engine, version=_version_of(*ENGINE), archs=("sm90",)),
        "sglang-norm-alone": Implementation(
            run=_norm_alone,
            version=_version_of(*ENGINE),
            archs=("sm90",),
            refuses=lambda case: "Gemma weights" if case.gemma else None,
        ),
        "flashinfer-per-tensor": Implementation(
            run=_flashinfer,
            version=_version_of("flashinfer-python"),
            archs=("sm90",),
            refuses=lambda case: (
                None
                if case.scales == "tensor" and not case.bf16
                else "one scale for the tensor only"
            ),
        ),
    },
    binaries=(
        *BINARIES,
        _triton_binary("triton_add_column_7168", 7168, packed=False),
        _triton_binary("triton_add_ue8m0_4096", 4096, packed=True, quick=False),
    ),
    bench_cases=_bench_cases(),
    bench_options={"l2": "cold"},
)


# --- Schedules beside each other ------------------------------------------------------------------------------------


def _by(schedule: Schedule) -> Implementation:
    """The CUDA path with a schedule of our choice instead of the launcher's."""
    run = _ours("cuda")

    def scheduled(case: Case, inputs: Tensors) -> Tensors:
        launch = kernels._launch_cuda
        with mock.patch.object(kernels, "_launch_cuda", lambda call: launch(call, schedule)):
            return dict(run(case, inputs))

    return Implementation(
        run=scheduled,
        archs=("sm90",),
        refuses=lambda case: kernels.refuses(schedule, case.hidden),
    )


SWEPT_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096)

SWEEP = replace(
    OP,
    name="rmsnorm_quant_sweep",
    cases=(),
    bench_cases=tuple(
        Case(rows, hidden, residual=residual, bf16=bf16)
        for bf16 in (False, True)
        for hidden in kernels.HOPPER_HIDDEN
        for residual in (False, True)
        for rows in SWEPT_ROWS
    ),
    bench_options={"l2": "rotate"},
    implementations={
        "cuda": OP.implementations["cuda"],
        **{schedule: _by(schedule) for schedule in SCHEDULES},
    },
    peers={name: OP.peers[name] for name in ("sglang", "sglang-norm-alone")},
    binaries=(),
)
"""Every schedule beside the launcher's choice: where the limits of the launcher come from, and how they are checked::

    numinous bench numinous_moe_gemm.workbench.rmsnorm_quant:SWEEP --arch sm90
"""
