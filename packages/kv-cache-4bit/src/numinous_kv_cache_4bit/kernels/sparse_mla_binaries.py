# SPDX-License-Identifier: Apache-2.0
"""What of csrc/sparse_mla_decode is compiled: a binary for each width of a row and each architecture."""

from __future__ import annotations

from numinous_tooling.formats import KV4, KV4_NO_ROPE, STOCK_FP8, STOCK_FP8_NO_ROPE
from numinous_tooling.workbench import SourceBinary

FORMATS = (KV4, KV4_NO_ROPE, STOCK_FP8, STOCK_FP8_NO_ROPE)


def source_binary(width: int, *, debug: bool = False) -> SourceBinary:
    """kernel.cu compiled for rows of that many bytes; with `debug` it writes the first tile of block 0."""
    return SourceBinary(
        name=f"sparse_mla_decode_{width}" + ("_debug" if debug else ""),
        source="csrc/sparse_mla_decode/kernel.cu",
        entries=["wide", "narrow_32", "narrow_16", "combine"],
        archs=("sm90",),
        defines={"NUMINOUS_WIDTH": str(width), **({"NUMINOUS_DEBUG": "1"} if debug else {})},
        # Loads past L1, asynchronous products, registers handed over, barriers of a cluster.
        required={"sm90": ("HGMMA", "LDG.E.NA.128", "USETMAXREG", "HMUL2.BF16_V2", "UCGABAR_ARV")},
        quick=width == KV4.width,
    )


def packed_binary(width: int, *, debug: bool = False) -> SourceBinary:
    """kernel_packed.cu compiled for 4-bit rows of that many bytes; `debug` as in `source_binary`."""
    return SourceBinary(
        name=f"sparse_mla_decode_{width}_packed" + ("_debug" if debug else ""),
        source="csrc/sparse_mla_decode/kernel_packed.cu",
        entries=["packed_64", "packed_32", "packed_16", "packed_8", "combine"],
        archs=("sm90",),
        defines={"NUMINOUS_WIDTH": str(width), **({"NUMINOUS_DEBUG": "1"} if debug else {})},
        # Asynchronous products and copies, registers handed over, barriers of a cluster.
        required={
            "sm90": ("HGMMA", "LDGSTS.E.BYPASS.128", "USETMAXREG", "HMUL2.BF16_V2", "UCGABAR_ARV")
        },
        quick=width == KV4.width,
    )


def mma_binary(width: int, arch: str = "sm120", *, debug: bool = False) -> SourceBinary:
    """kernel_mma.cu likewise; for sm90 it serves the tests only."""
    products = ("HMMA.16816.F32.BF16", "LDSM.16.M88.4", "LDSM.16.MT88.4")
    return SourceBinary(
        name=f"sparse_mla_decode_{width}_mma"
        + ("" if arch == "sm120" else f"_{arch}")
        + ("_debug" if debug else ""),
        source="csrc/sparse_mla_decode/kernel_mma.cu",
        entries=["mma_32", "mma_16", "combine"],
        archs=(arch,),
        defines={"NUMINOUS_WIDTH": str(width), **({"NUMINOUS_DEBUG": "1"} if debug else {})},
        required={arch: (*products, "LDG.E.NA.128", "USETMAXREG", "HMUL2.BF16_V2")},
        quick=width == KV4.width and arch == "sm120",
    )


def tcgen05_binary(width: int, *, debug: bool = False) -> SourceBinary:
    """kernel_tcgen05.cu compiled for rows of that many bytes; `debug` as in `source_binary`."""
    # Products and their commits, tensor memory loaded and stored, and what the Hopper version has.
    required = ("UTCHMMA", "UTCBAR", "LDTM", "STTM", "SYNCS", "LDG.E.NA.128", "HMUL2.BF16_V2")
    return SourceBinary(
        name=f"sparse_mla_decode_{width}_tcgen05" + ("_debug" if debug else ""),
        source="csrc/sparse_mla_decode/kernel_tcgen05.cu",
        entries=["heads_64", "heads_32", "heads_16", "combine"],
        archs=("sm100", "sm103"),
        defines={"NUMINOUS_WIDTH": str(width), **({"NUMINOUS_DEBUG": "1"} if debug else {})},
        required={"sm100": required, "sm103": required},
        quick=width == KV4.width,
    )


BINARIES = (
    *(source_binary(row.width) for row in FORMATS),
    *(packed_binary(row.width) for row in (KV4, KV4_NO_ROPE)),
    *(mma_binary(row.width, arch) for arch in ("sm120", "sm90") for row in FORMATS),
    *(tcgen05_binary(row.width) for row in FORMATS),
)
