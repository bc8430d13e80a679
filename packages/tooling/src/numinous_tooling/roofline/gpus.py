# SPDX-License-Identifier: Apache-2.0
"""GPUs a roof is drawn for: memory, bandwidth and dense matrix rates, each with where the number is from."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from . import RooflineError

TERA = 10**12
UNITS = ("bf16", "fp8", "nvfp4", "mxfp4")
"""What a matrix rate is asked for."""


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Args:
        name: as given on the command line.
        title: as the vendor writes it.
        arch: compile target, see `numinous_tooling.workbench.ARCHS`.
        memory_bytes: the vendor's gigabytes taken as 2^30 bytes, which is within 1 % of what drivers show.
        bytes_per_second: device memory, reads and writes together.
        bf16, fp8, fp4: dense FLOP/s of matrix products; None where the GPU has no such unit.
        fp4_formats: what the 4-bit unit takes: scales per 16 in E4M3 (nvfp4), per 32 in UE8M0 (mxfp4).
        raw_fp8_rows: SGLang 0.5.20 keeps FP8 rows of sparse MLA without scales here (576 bytes, not 656).
        word: one of the five words of the evidence rules.
        source: of all numbers in the row.
    """

    name: str
    title: str
    arch: str
    memory_bytes: int
    bytes_per_second: float
    bf16: float
    fp8: float
    fp4: float | None
    fp4_formats: tuple[str, ...]
    raw_fp8_rows: bool
    word: str
    source: str

    def rate(self, unit: str) -> float:
        """FLOP/s for operands of that unit; a 4-bit format that the GPU has no unit for is computed in FP8."""
        if unit not in UNITS:
            raise RooflineError(
                f"no matrix rate is recorded for {unit}; there are {', '.join(UNITS)}"
            )
        if unit == "bf16":
            return self.bf16
        return self.fp4 if self.fp4 and unit in self.fp4_formats else self.fp8


def _datasheet(
    name: str,
    title: str,
    arch: str,
    gigabytes: int,
    terabytes_per_second: float,
    bf16: float,
    fp8: float,
    fp4: float | None,
    source: str,
    fp4_formats: tuple[str, ...] = ("nvfp4", "mxfp4"),
    raw_fp8_rows: bool = False,
) -> Gpu:
    return Gpu(
        name=name,
        title=title,
        arch=arch,
        memory_bytes=gigabytes << 30,
        bytes_per_second=terabytes_per_second * TERA,
        bf16=bf16 * TERA,
        fp8=fp8 * TERA,
        fp4=None if fp4 is None else fp4 * TERA,
        fp4_formats=fp4_formats,
        raw_fp8_rows=raw_fp8_rows,
        word="reported",
        source=source,
    )


_ROWS = (
    # The datasheet says 4.8 TB/s, 989 and 1979 TFLOP/s; copies and 8192-cubed products on one H200 reached these.
    _datasheet(
        "h200",
        "NVIDIA H200 SXM",
        "sm90",
        141,
        4.25,
        795,
        1440,
        None,
        "memory: vendor datasheet as quoted publicly; rates: best copy and 8192^3 products on one H200, SGLang 0.5.20's "
        "torch 2.13, 29 Nov 2026, no record in evidence/",
    ),
    _datasheet(
        "h100",
        "NVIDIA H100 SXM",
        "sm90",
        80,
        3.35,
        989,
        1979,
        None,
        "vendor datasheet as quoted publicly, rates without sparsity",
    ),
    _datasheet(
        "b200",
        "NVIDIA B200 (HGX)",
        "sm100",
        180,
        8.0,
        2250,
        4500,
        9000,
        "vendor datasheet of HGX B200 as quoted publicly, an eighth of the system, rates without sparsity",
        raw_fp8_rows=True,
    ),
    _datasheet(
        "b300",
        "NVIDIA B300 (HGX)",
        "sm103",
        268,
        8.0,
        2250,
        4500,
        13125,
        "vendor datasheet of HGX B300 as quoted publicly (2.1 TB, 105 PFLOP/s dense FP4), an eighth of it",
        raw_fp8_rows=True,
    ),
    _datasheet(
        "rtx-pro-6000",
        "NVIDIA RTX PRO 6000 Blackwell Workstation",
        "sm120",
        96,
        1.792,
        503.8,
        1007.6,
        2015.2,
        "vendor architecture paper as quoted publicly, rates without sparsity, fp32 accumulation",
        raw_fp8_rows=True,
    ),
    _datasheet(
        "mi355x",
        "AMD Instinct MI355X",
        "gfx950",
        288,
        8.0,
        2516.6,
        5033.2,
        10066.3,
        "vendor datasheet as quoted publicly, rates without sparsity",
        fp4_formats=("mxfp4",),
        raw_fp8_rows=True,
    ),
)

GPUS = MappingProxyType({gpu.name: gpu for gpu in _ROWS})
"""Every GPU by name."""


def gpu(name: str) -> Gpu:
    """The GPU of that name; RooflineError naming those there are."""
    if name in GPUS:
        return GPUS[name]
    raise RooflineError(f"no GPU {name} in the table; there are {', '.join(GPUS)}")
