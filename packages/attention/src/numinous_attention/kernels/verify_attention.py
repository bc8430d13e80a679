# SPDX-License-Identifier: Apache-2.0
"""Attention of a few draft tokens a request over a long cached prefix and themselves: the prefix is split over programs, parts are joined by lse.

*What*      `extend_attention`, word for word: equation, shapes, requests, masks (trees of drafts), windows, numerics and refusals are in its module, as is the
            specification. Made for chunks of 1 … 16 tokens, right for any.
*Tiles*     Device code is `extend_attention`'s too, one more dimension of its grid apart. A program has the rows (token, head of the group) of a request, all in one tile where they
            are at most `rows_of`: 4 drafts × 8 heads fill 32. Split j of n walks tiles ⌊t · j / n⌋ … ⌊t · (j + 1) / n⌋ of the t that the window of the first token
            reaches; the chunk counts as the last tile and so is the last split's.
*Parts*     out of each split in fp32 [tokens, splits, heads, D_v], normalised by its own sum, and lse to base 2 [tokens, splits, heads]. A split without keys has lse -inf, and its
            part is neither written nor read. Joined: top = max lse_j, w_j = 2^(lse_j - top), out = Σ w_j · out_j / (Σ w_j + 2^(sink - top)), in the order of splits: the same
            bits every time for the same number of splits. That number depends on the batch, so a sequence's bits do, too.
*Splits*    `choose_splits`: of shapes alone, nothing on the GPU is looked at. In a captured graph ids have room for the longest context; prefixes that turn out short leave splits empty.
*Bytes*     Every key once, 2 · (D + D_v) bytes of a KV head in bf16, and 8 · splits · heads · D_v bytes a token for parts. 32 requests × 4 drafts on 16,384 keys, 32 / 4 heads, D 512:
            4.31 GB, 1.01 ms at 4.25 TB/s; 6 splits: 101 MB, 0.02 ms. FLOPs: 0.14 T, 0.17 ms at 790 TFLOP/s.

D = D_v = 512, sm90, 32 rows × 32 keys, 4 warps: Q 32 KB, K and V 32 KB each, output 128 registers a thread, 255 in all: two programs a multiprocessor (200 of 227 KB, 65,280 of 65,536
registers), of which one computes while the other waits for memory. 64 rows would leave room for one program; they are two tiles, which read K and V from L2 together.
What bounds a tile: docs/deep-dives/extend-512.md.
*Arch*      see catalog.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from numinous_attention.kernels.extend_attention import (
    Extended,
    Tile,
    _arch,
    _Call,
    _checked,
    _launch,
    _store,
    reference,
    traffic,
)

__all__ = ["MAX_SPLITS", "choose_splits", "reference", "rows_of", "traffic", "verify_attention"]

# --- Triton ---------------------------------------------------------------------------------------------------------

MAX_SPLITS = 128


@triton.jit(do_not_specialize=["heads", "batch", "splits"])
def _join_parts_kernel(
    part_ptr,  # [tokens, splits, heads, D_v] fp32
    part_lse_ptr,  # [tokens, splits, heads] fp32, to base 2
    qo_indptr_ptr,
    sinks_ptr,  # [heads] fp32 or bf16, or None
    out_ptr,
    lse_ptr,  # [tokens, heads] fp32, or None
    out_token_stride,
    out_head_stride,
    heads,
    batch,
    splits,
    DIM: tl.constexpr,  # D_v
    WIDE: tl.constexpr,  # its power of two
    MOST: tl.constexpr,  # MAX_SPLITS
    LINES: tl.constexpr,  # parts at once
    NATIVE: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # Rows of no request have no parts.
    if (token < tl.load(qo_indptr_ptr)) | (token >= tl.load(qo_indptr_ptr + batch)):
        return
    split = tl.arange(0, MOST)
    lines = part_lse_ptr + token * splits * heads + head
    sums = tl.load(lines + split * heads, mask=split < splits, other=float("-inf"))
    top = tl.max(sums, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(sums - base), axis=0)
    none = total == 0.0
    column = tl.arange(0, WIDE)
    out = tl.zeros([WIDE], tl.float32)
    for first in range(0, splits, LINES):
        some = first + tl.arange(0, LINES)
        own = tl.load(lines + some * heads, mask=some < splits, other=float("-inf"))
        # Not > -inf: a NaN is handed on.
        written = (own != float("-inf"))[:, None] & (column < DIM)[None, :]
        line = (token * splits + some) * heads + head
        part = tl.load(part_ptr + line[:, None] * DIM + column[None, :], mask=written, other=0.0)
        out += tl.sum(part * tl.exp2(own - base)[:, None], axis=0)
    if lse_ptr is not None:
        lse = tl.where(none, float("-inf"), base + tl.log2(tl.where(none, 1.0, total)))
        tl.store(lse_ptr + token * heads + head, lse * 0.6931471805599453)
    if sinks_ptr is not None:
        total += tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634 - base)
    share = tl.where(none, 0.0, 1.0 / tl.where(none, 1.0, total))
    to = out_ptr + token * out_token_stride + head * out_head_stride + column
    _store(to, out * share, column < DIM, NATIVE)


# --- Launcher -------------------------------------------------------------------------------------------------------

HOPPER = {
    128: (Tile(16, 64, 4, 5), Tile(32, 64, 4, 5), Tile(64, 64, 4, 3)),
    256: (Tile(16, 64, 4, 3), Tile(32, 64, 4, 3), Tile(64, 32, 4, 3)),
    512: (Tile(16, 32, 4, 3), Tile(32, 32, 4, 3)),
}
TILES: dict[str, dict[int, tuple[Tile, ...]]] = {
    # architecture -> the largest head dim that they are for -> tiles, by rows
    "sm90": HOPPER,
    "sm100": HOPPER,
    "sm120": {
        128: (Tile(16, 64, 4, 3), Tile(32, 64, 4, 3), Tile(64, 64, 4, 5)),
        256: (Tile(16, 32, 4, 5), Tile(32, 32, 4, 5)),
        512: (Tile(16, 16, 4, 5), Tile(32, 16, 4, 5)),
    },
    "gfx950": {
        128: (Tile(16, 64, 4, 2), Tile(32, 64, 4, 2), Tile(64, 64, 4, 1)),
        256: (Tile(16, 32, 4, 2), Tile(32, 32, 4, 2), Tile(64, 32, 4, 1)),
        512: (Tile(16, 32, 4, 2), Tile(32, 32, 4, 2)),
    },
    # The interpreter: small, so that tests have several tiles.
    "cpu": {512: (Tile(16, 16, 4, 1),)},
}
RESIDENT = 2  # programs of a multiprocessor
START_TILES = (
    4  # what a program takes before and after its tiles, in tiles: derived, to be measured
)
ROUNDS = 4  # of programs on the multiprocessors, at most
LINES = 8


def tiles_of(arch: str, dim: int, dim_v: int) -> tuple[Tile, ...]:
    """Tiles for head dims on an architecture (``"sm90"``, …, ``"cpu"``), by rows."""
    return next(tiles for limit, tiles in TILES[arch].items() if max(dim, dim_v) <= limit)


def rows_of(arch: str, dim: int, dim_v: int, rows: int) -> Tile:
    """The smallest tile that holds `rows` rows of a request, else the largest."""
    tiles = tiles_of(arch, dim, dim_v)
    return next((tile for tile in tiles if rows <= tile.rows), tiles[-1])


def choose_splits(blocks: int, tiles: int, processors: int) -> int:
    """Splits of each of `blocks` walks over `tiles` tiles of keys.

    The most splits that take at most a twentieth more than the fewest turns of all processors: where prefixes are of unlike lengths, which nobody on this side knows,
    shorter parts end sooner. No more than fill the processors `ROUNDS` times, nor than `MAX_SPLITS`.
    """
    room = RESIDENT * processors

    def turns(splits: int) -> int:
        return -(-blocks * splits // room) * (-(-tiles // splits) + START_TILES)

    most = max(1, min(tiles, MAX_SPLITS, ROUNDS * room // max(blocks, 1)))
    cost = {splits: turns(splits) for splits in range(1, most + 1)}
    return max(splits for splits in cost if 20 * cost[splits] <= 21 * min(cost.values()))


def _processors(device: torch.device) -> int:
    if device.type != "cuda" or not torch.cuda.is_available():
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _plan(call: _Call, splits: int | None) -> tuple[Tile, int]:
    """Tile and number of splits, by shapes."""
    tokens, heads, dim = call.q.shape
    kv_heads, dim_v = call.v.shape[1:]
    batch = len(call.qo_indptr) - 1
    # Operands of fp32 products lie in registers and take twice the shared memory.
    arch = "cpu" if call.q.dtype == torch.float32 else _arch(call.q.device)
    chunk = -(-tokens // batch)
    rows = chunk * (heads // kv_heads)
    tile = rows_of(arch, dim, dim_v, rows)
    if splits is None:
        keys = -(-len(call.kv_indices) // batch)
        if call.window is not None:
            keys = min(keys, call.window + chunk)
        blocks = batch * kv_heads * -(-rows // tile.rows)
        splits = choose_splits(blocks, -(-keys // tile.keys) + 1, _processors(call.q.device))
    return tile, splits


def _launch_splits(call: _Call, splits: int | None) -> None:
    tile, splits = _plan(call, splits)
    if splits == 1:
        _launch(call, tile=tile)
        return
    tokens, heads, dim_v = call.out.shape
    room = {"dtype": torch.float32, "device": call.q.device}
    part = torch.empty((tokens, splits * heads, dim_v), **room)
    part_lse = torch.empty((tokens, splits, heads), **room)
    _launch(call._replace(out=part, lse=part_lse, sinks=None), tile=tile, splits=splits)
    _join_parts_kernel[(tokens, heads)](
        part,
        part_lse,
        call.qo_indptr,
        call.sinks,
        call.out,
        call.lse,
        *call.out.stride()[:2],
        heads,
        len(call.qo_indptr) - 1,
        splits,
        DIM=dim_v,
        WIDE=triton.next_power_of_2(dim_v),
        MOST=MAX_SPLITS,
        LINES=LINES,
        NATIVE=call.q.device.type != "cpu",
        num_warps=4,
    )


# --- Public function ------------------------------------------------------------------------------------------------


def verify_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    *,
    sm_scale: float,
    causal: bool = True,
    window: int | None = None,
    mask: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
    mask_offsets: torch.Tensor | None = None,
    mask_prefix: bool = False,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    with_lse: bool = False,
    splits: int | None = None,
) -> Extended:
    """Attention of a few draft tokens a request over their cached prefixes and themselves; see the module.

    Args:
        q, k, v, …, with_lse: as `extend_attention` takes them. A tree of drafts is a `mask` with ``causal=False``.
        splits: of every prefix, 1 … `MAX_SPLITS`; None chooses by the GPU's multiprocessors. More than one take tokens · splits · heads · (D_v + 1) fp32 of memory.

    Raises:
        TypeError: a dtype is not the one named.
        ValueError: shapes, strides, devices or values do not fit.
    """
    call = _checked(
        q, k, v, k_pool, v_pool, qo_indptr, kv_indptr, kv_indices, sm_scale, causal, window, mask, mask_indptr,
        mask_offsets, mask_prefix, logit_cap, sinks, k_scale, v_scale, out, with_lse,
    )  # fmt: skip
    if splits is not None and not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"splits is 1 … {MAX_SPLITS}, got {splits}")
    if len(call.qo_indptr) > 1 and call.q.shape[0]:
        _launch_splits(call, splits)
    return Extended(call.out, call.lse)
