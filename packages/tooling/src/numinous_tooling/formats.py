# SPDX-License-Identifier: Apache-2.0
"""Packed rows of MLA KV caches: 512 latent values of a token and layer, then 64 rope values where the model has them.

| width | latent | scales | rope | who | saved against bf16 |
|---|---|---|---|---|---|
| 352 | E2M1, 256 bytes | 32 E4M3FN, one per 16 | 64 INT8, a step per 16 in signs of scales | numinous | 3.27 × |
| 416 | E2M1, 256 bytes | 32 E4M3FN, one per 16 | 64 bf16, 128 bytes | numinous, measured alternative | 2.77 × |
| 288 | E2M1, 256 bytes | 32 E4M3FN, one per 16 | none | numinous | 3.56 × |
| 656 | 512 E4M3FN | 4 fp32, one per 128 | 64 bf16, 128 bytes | stock FP8 with FlashMLA | 1.76 × |
| 528 | 512 E4M3FN | 4 fp32, one per 128 | none | stock FP8 with FlashMLA, rope-free | 1.94 × |
| 576 | 512 E4M3FN | none | 64 E4M3FN | stock FP8 with TRT-LLM (Blackwell) and on AMD | 2 × |

The width is the type tag: no two formats share one, and readers choose by it. Two E2M1 codes share a byte, the even column in
the low nibble; scales follow the columns they scale and are never swizzled; every field starts at a multiple of 16 bytes;
fp32 and bf16 are little-endian. Block scales of the 4-bit rows are magnitudes: whoever decodes one ignores its sign bit.
In rows of 352 bytes seven of eight such bits hold the rope part's steps (`join_steps`); all others are written as 0.
Conversions are those of `numinous_tooling.numerics`, which is where rounding is specified.

Loads without torch, so that declarations may import it; `split`, `pack` and `unpack` need it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

__all__ = [
    "FORMATS",
    "KV4",
    "KV4_BF16_ROPE",
    "KV4_NO_ROPE",
    "STOCK_FP8",
    "STOCK_FP8_NO_ROPE",
    "STOCK_FP8_RAW",
    "Field",
    "RowFormat",
    "join_steps",
    "row_format",
    "steps_of",
]

LATENT_DIM = 512
ROPE_DIM = 64
ALIGNMENT = 16  # bytes: one vector load

Encoding = Literal["e2m1", "e4m3fn", "int8", "fp32", "bf16"]
ENCODING_BITS = MappingProxyType({"e2m1": 4, "e4m3fn": 8, "int8": 8, "bf16": 16, "fp32": 32})
STEP_BITS = 7  # of a rope group's step, one in each of so many scales


@dataclass(frozen=True)
class Field:
    """A run of equal values in a row.

    Args:
        name: `latent`, `scales` or `rope`.
        offset: first byte within the row.
        count: values, not bytes.
        encoding: of each value.
    """

    name: str
    offset: int
    count: int
    encoding: Encoding

    @property
    def nbytes(self) -> int:
        """Bytes of the field; two E2M1 values share one."""
        return self.count * ENCODING_BITS[self.encoding] // 8

    @property
    def end(self) -> int:
        """First byte behind the field."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class RowFormat:
    """Layout of one row; raises ValueError when built with gaps, overlaps or a width that is not the sum of its fields.

    Args:
        name: `<latent>[_<what differs>]`.
        width: bytes of a row, the type tag.
        fields: in the order of their bytes.
        group: latent values per scale, 0 where there are no scales.
        stock: whether the engine writes and reads this row itself.
        source: where the layout was read, or where it is defined.
    """

    name: str
    width: int
    fields: tuple[Field, ...]
    group: int
    stock: bool
    source: str

    def __post_init__(self) -> None:
        at = 0
        for field in self.fields:
            if field.offset != at or field.offset % ALIGNMENT:
                raise ValueError(
                    f"row {self.name}: field {field.name} at byte {field.offset}, expected {at} and a multiple of {ALIGNMENT}"
                )
            at = field.end
        if at != self.width:
            raise ValueError(f"row {self.name}: fields end at byte {at}, not at {self.width}")
        latent, scales = self.field("latent"), self._find("scales")
        if (scales.count * self.group if scales else latent.count) != latent.count:
            raise ValueError(f"row {self.name}: scales do not cover {latent.count} latent values")
        if bool(scales) != bool(self.group):
            raise ValueError(f"row {self.name}: group {self.group} and its scales do not agree")

    def _find(self, name: str) -> Field | None:
        return next((field for field in self.fields if field.name == name), None)

    def field(self, name: str) -> Field:
        """The field of that name; ValueError naming those there are."""
        if found := self._find(name):
            return found
        raise ValueError(
            f"row {self.name} has no field {name}; it has {', '.join(f.name for f in self.fields)}"
        )

    @property
    def rope_dim(self) -> int:
        """Rope values of a row, 0 in a rope-free one."""
        rope = self._find("rope")
        return rope.count if rope else 0

    def bytes_per_token(self, layers: int = 1) -> int:
        """KV bytes of one token over the layers that keep such rows; index keys and padding not counted."""
        return self.width * layers

    def split(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of the fields; writing to one writes to the rows.

        Args:
            rows: uint8 [..., width], the last dimension contiguous (rows may lie apart, as in a page or a slice).

        Returns:
            by field name, [..., count]: E4M3FN and INT8 as codes in uint8, fp32 and bf16 in their dtypes; E2M1 packed [..., count / 2] uint8.
        """
        import torch

        _check_rows(rows, self)
        views = {}
        for field in self.fields:
            view = rows[..., field.offset : field.end]
            if field.encoding in ("fp32", "bf16"):
                view = view.view(torch.float32 if field.encoding == "fp32" else torch.bfloat16)
            views[field.name] = view
        return views

    def pack(
        self,
        latent: torch.Tensor,
        rope: torch.Tensor | None = None,
        *,
        global_scale: torch.Tensor | float | None = None,
        scale_choice: Literal["amax", "mse"] = "amax",
    ) -> torch.Tensor:
        """Rows uint8 [..., width] of a latent [..., 512] and, where the format has it, a rope part [..., 64].

        The 4-bit formats are `numerics.quantize_nvfp4`, their INT8 rope is `numerics.quantize_int8`. Stock rows with scales are written in the engine's order, x × (1 / scale) with scale = amax / 448, but for one thing: of a group of
        zeros, or so small that the reciprocal overflows, the engine computes 0 × inf, and this makes zeros under scale 0.

        Args:
            latent: fp32, bf16 or fp16.
            rope: the same, in a rope-free format None or [..., 0]; stored as bf16 it is rounded to nearest.
            global_scale: multiplies on dequantisation; not stored in the row. 4-bit formats only.
            scale_choice: how block scales are chosen. 4-bit formats only.
        """
        import torch

        from numinous_tooling import numerics

        self._check_shapes(latent, rope)
        if self.field("latent").encoding != "e2m1" and (global_scale, scale_choice) != (
            None,
            "amax",
        ):
            raise ValueError(f"row {self.name} has no block scales to choose and no global scale")
        rows = torch.empty(
            (*latent.shape[:-1], self.width), dtype=torch.uint8, device=latent.device
        )
        fields = self.split(rows)
        if self.field("latent").encoding == "e2m1":
            packed, scales = numerics.quantize_nvfp4(
                latent, global_scale=global_scale, scale_choice=scale_choice
            )
            fields["latent"].copy_(packed)
            fields["scales"].copy_(scales)
        elif self.group:
            codes, scales = numerics.quantize_fp8_group(latent, group=self.group, reciprocal=True)
            fields["latent"].copy_(codes)
            fields["scales"].copy_(scales)
        else:
            fields["latent"].copy_(numerics.encode_e4m3fn(latent))
        if self.rope_dim:
            encoding = self.field("rope").encoding
            if encoding == "int8":
                codes, steps = numerics.quantize_int8(rope)
                fields["rope"].copy_(codes)
                fields["scales"].copy_(join_steps(fields["scales"], steps))
            else:
                fields["rope"].copy_(numerics.encode_e4m3fn(rope) if encoding == "e4m3fn" else rope)
        return rows

    def unpack(
        self,
        rows: torch.Tensor,
        *,
        global_scale: torch.Tensor | float | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latent [..., 512] and rope [..., 64 or 0] of rows uint8 [..., width].

        Args:
            rows: as `split` takes them.
            global_scale: what `pack` was given.
            dtype: of both results, bf16 by default: exact for the 4-bit formats without global scale and for the raw one.
        """
        import torch

        from numinous_tooling import numerics

        dtype = torch.bfloat16 if dtype is None else dtype
        fields = self.split(rows)
        if self.field("latent").encoding == "e2m1":
            latent = numerics.dequantize_nvfp4(
                fields["latent"], fields["scales"] & 0x7F, global_scale=global_scale, dtype=dtype
            )
        elif global_scale is not None:
            raise ValueError(f"row {self.name} has no global scale")
        elif self.group:
            latent = numerics.dequantize_fp8(fields["latent"], fields["scales"], dtype=dtype)
        else:
            latent = numerics.decode_e4m3fn(fields["latent"]).to(dtype)
        if not self.rope_dim:
            return latent, latent.new_empty((*latent.shape[:-1], 0))
        rope, encoding = fields["rope"], self.field("rope").encoding
        if encoding == "int8":
            rope = numerics.dequantize_int8(rope, steps_of(fields["scales"]))
        elif encoding == "e4m3fn":
            rope = numerics.decode_e4m3fn(rope)
        return latent, rope.to(dtype)

    def _check_shapes(self, latent: torch.Tensor, rope: torch.Tensor | None) -> None:
        if latent.ndim == 0 or latent.shape[-1] != LATENT_DIM:
            raise ValueError(
                f"row {self.name} takes latent [..., {LATENT_DIM}], got {list(latent.shape)}"
            )
        want = [*latent.shape[:-1], self.rope_dim]
        got = [*latent.shape[:-1], 0] if rope is None else list(rope.shape)
        if got != want:
            raise ValueError(f"row {self.name} takes rope {want}, got {got}")


def _check_rows(rows: torch.Tensor, row: RowFormat) -> None:
    import torch

    if rows.dtype != torch.uint8 or rows.ndim == 0 or rows.shape[-1] != row.width:
        raise ValueError(
            f"row {row.name} is uint8 [..., {row.width}], got {rows.dtype} {list(rows.shape)}"
        )
    # fp32 and bf16 fields are read through a view, which needs whole elements at every row.
    aligned = all(
        step % 4 == 0
        for step, size in zip(rows.stride()[:-1], rows.shape, strict=False)
        if size > 1
    )
    if rows.stride(-1) != 1 or rows.storage_offset() % 4 or not aligned:
        raise ValueError(
            f"row {row.name} needs contiguous bytes and rows at multiples of 4, got strides {rows.stride()} from {rows.storage_offset()}"
        )


def join_steps(scales: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Scales uint8 [..., 32] whose sign bits hold step codes uint8 [..., 4]: bit b of that of group g in scale 8 g + b.

    The sign of scale 8 g + 7 is 0.
    """
    import torch

    place = torch.arange(scales.shape[-1] // steps.shape[-1], device=scales.device)
    bits = (steps.unsqueeze(-1).int() >> place) & (place < STEP_BITS).int()
    return (scales & 0x7F) | (bits.flatten(-2) << 7).to(torch.uint8)


def steps_of(scales: torch.Tensor) -> torch.Tensor:
    """Step codes uint8 [..., 4] in the sign bits of scales uint8 [..., 32], backwards from `join_steps`."""
    import torch

    bits = (scales >> 7).unflatten(-1, (ROPE_DIM // 16, -1))[..., :STEP_BITS].int()
    return (bits << torch.arange(STEP_BITS, device=scales.device)).sum(-1).to(torch.uint8)


def _kv4(name: str, width: int, *rope: Field) -> RowFormat:
    return RowFormat(
        name=name,
        width=width,
        fields=(
            Field("latent", 0, LATENT_DIM, "e2m1"),
            Field("scales", 256, LATENT_DIM // 16, "e4m3fn"),
            *rope,
        ),
        group=16,
        stock=False,
        source="numinous_tooling.formats",
    )


KV4 = _kv4("kv4", 352, Field("rope", 288, ROPE_DIM, "int8"))
KV4_BF16_ROPE = _kv4("kv4_bf16_rope", 416, Field("rope", 288, ROPE_DIM, "bf16"))
KV4_NO_ROPE = _kv4("kv4_no_rope", 288)

# The engine's files are those of SGLang 0.5.20.
STOCK_FP8 = RowFormat(
    name="stock_fp8",
    width=656,
    fields=(
        Field("latent", 0, LATENT_DIM, "e4m3fn"),
        Field("scales", 512, LATENT_DIM // 128, "fp32"),
        Field("rope", 528, ROPE_DIM, "bf16"),
    ),
    group=128,
    stock=True,
    source="kernels/ops/attention/dsa/quant_k_cache.py quantize_k_cache_separate; "
    "srt/mem_cache/kv_cache_configurator.py calculate_mla_kv_cache_dim",
)
STOCK_FP8_NO_ROPE = RowFormat(
    name="stock_fp8_no_rope",
    width=528,
    fields=STOCK_FP8.fields[:2],
    group=128,
    stock=True,
    source=STOCK_FP8.source,
)
# e4m3fn on gfx950; gfx942 stores the fnuz variant in the same bytes: `split` them and use numerics.decode_e4m3fnuz.
STOCK_FP8_RAW = RowFormat(
    name="stock_fp8_raw",
    width=576,
    fields=(
        Field("latent", 0, LATENT_DIM, "e4m3fn"),
        Field("rope", 512, ROPE_DIM, "e4m3fn"),
    ),
    group=0,
    stock=True,
    source="kernels/ops/kvcache/mla_buffer.py set_mla_kv_buffer_triton_fp8_quant; "
    "srt/mem_cache/kv_cache_configurator.py calculate_mla_kv_cache_dim",
)


def _by_width(formats: Iterable[RowFormat]) -> MappingProxyType[int, RowFormat]:
    table: dict[int, RowFormat] = {}
    for row in formats:
        if row.width in table:
            raise ValueError(
                f"rows {row.name} and {table[row.width].name} are both {row.width} wide"
            )
        table[row.width] = row
    return MappingProxyType(table)


FORMATS = _by_width((KV4, KV4_BF16_ROPE, KV4_NO_ROPE, STOCK_FP8, STOCK_FP8_NO_ROPE, STOCK_FP8_RAW))
"""Every format by its width in bytes."""

# Once more as plain numbers: these are in files, in caches on disk and in compiled kernels.
assert sorted(FORMATS) == [288, 352, 416, 528, 576, 656]
assert [field.offset for field in KV4.fields] == [0, 256, 288]
assert [field.offset for field in KV4_BF16_ROPE.fields] == [0, 256, 288]
assert [field.offset for field in KV4_NO_ROPE.fields] == [0, 256]
assert [field.offset for field in STOCK_FP8.fields] == [0, 512, 528]
assert [field.offset for field in STOCK_FP8_NO_ROPE.fields] == [0, 512]
assert [field.offset for field in STOCK_FP8_RAW.fields] == [0, 512]


def row_format(width: int) -> RowFormat:
    """The format whose rows are `width` bytes; ValueError naming the known widths."""
    if width in FORMATS:
        return FORMATS[width]
    known = ", ".join(f"{row.width} ({row.name})" for _, row in sorted(FORMATS.items()))
    raise ValueError(f"no row format is {width} bytes wide; known: {known}")
