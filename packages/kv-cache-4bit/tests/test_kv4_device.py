# SPDX-License-Identifier: Apache-2.0
"""The scratch path of `kv4.glm_dsa` and `kv4.glm_flash` on a Hopper GPU: kernels of 4-bit rows and FlashMLA themselves (``--tier device``).

What comes out is compared with attention in fp64 over the rows that the scratch holds, and over what the 4-bit rows stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv4_harness import PAGE, SCALE, Count, attention, flashmla_alone, layer

from numinous_kv_cache_4bit.engine import flashmla, glm_dsa, glm_flash, scratch
from numinous_kv_cache_4bit.kernels import kv4_gather
from numinous_tooling.formats import KV4, LATENT_DIM

FEATURES = {"glm_dsa": (glm_dsa, 1), "glm_flash": (glm_flash, 4)}
TOPK = 256
LIVE = 10 * PAGE
Attend = Callable[..., torch.Tensor]


@pytest.fixture(params=list(FEATURES))
def ours(request: Any, monkeypatch: Any) -> Any:
    module, kpool = FEATURES[request.param]
    monkeypatch.setattr(module.ROWS, "count", Count())
    return SimpleNamespace(rows=module.ROWS, row=module.ROWS.row, kpool=kpool)


def path(ours: Any, heads: int) -> Attend:
    """The hooked `_forward_flashmla_kv`, see `flashmla_alone`."""
    forward, backend = flashmla_alone(ours.row.width, TOPK, ours.kpool, heads)

    def attend(
        q: torch.Tensor, pool: torch.Tensor, table: torch.Tensor, metadata: Any
    ) -> torch.Tensor:
        args = (q, pool.view(torch.float8_e4m3fn), 512, SCALE, layer(heads, ours.row.rope_dim))
        return ours.rows.around_attention(forward, backend, *args, metadata, table)[:, 0]

    attend.backend = backend  # type: ignore[attr-defined]
    return attend


def metadata(attend: Any, rows: int, requests: int, device: Any, tokens: int | None = None) -> Any:
    """What the engine's metadata of a batch says: of decode, of verification, or of prefill with so many tokens."""
    made = flashmla.plan(attend.backend, rows, device)
    made.cache_seqlens_int32 = torch.ones(requests, dtype=torch.int32, device=device)
    made.max_seq_len_q, made.seq_lens_sum = (1, None) if tokens is None else (rows, tokens)
    return made


def case(ours: Any, rows: int, heads: int, device: Any, slots: int = 40 * PAGE) -> Any:
    """Queries, a pool written through the hook, NaN in its first page and unnamed rows, a table with -1, short and empty rows,
    duplicates; neighbouring rows name mostly the same."""
    generator = torch.Generator().manual_seed(rows)
    live = torch.randperm(LIVE, generator=generator) + slots - LIVE
    both = torch.randn(LIVE, 1, LATENT_DIM + ours.row.rope_dim, generator=generator)
    both = both.to(device, torch.bfloat16)
    pool = torch.full((slots, 1, ours.row.width), 0x7F, dtype=torch.uint8, device=device)
    owner = SimpleNamespace(kv_cache_dim=ours.row.width)
    ours.rows.around_write(
        None, owner, pool, live.to(device), both[..., :LATENT_DIM], both[..., LATENT_DIM:]
    )
    want = ours.row.pack(both[:, 0, :LATENT_DIM], both[:, 0, LATENT_DIM:])
    assert torch.equal(pool[live.to(device), 0], want), "rows as the format has them"
    table = torch.full((rows, TOPK + ours.kpool - 1), -1, dtype=torch.int32)
    for row in range(rows):
        named = live[: row * 37 % (TOPK + ours.kpool)].roll(row)
        table[row, : len(named)] = named.to(torch.int32)
        table[row, 3::7] = -1  # holes as well as an end
        table[row, 5:6] = table[row, 4:5]
    q = torch.randn(rows, heads, both.shape[-1], generator=generator).to(torch.bfloat16)
    return q.to(device), pool, table.to(device)


def check(
    ours: Any, out: torch.Tensor, q: torch.Tensor, pool: torch.Tensor, table: torch.Tensor
) -> None:
    assert out.shape == (*q.shape[:2], LATENT_DIM)
    assert not out[(table == -1).all(dim=1)].any()
    made = kv4_gather.reference(pool[:, 0], table, to="fp8")
    exact = attention(q.double(), made["out"], made["positions"], SCALE)
    decoded = attention(q.double(), pool, table, SCALE)
    for want, within in ((exact, 0.01), (decoded, 0.05)):
        error = (out.float() - want).norm() / want.norm().clamp(min=1e-6)
        assert error < within, f"relative error {error:.4f}"


def check_modes(ours: Any, rows: int, heads: int, device: Any, slots: int = 40 * PAGE) -> None:
    """Decode, verification of three tokens, prefill of one request."""
    q, pool, table = case(ours, rows, heads, device, slots)
    attend: Any = path(ours, heads)
    for requests, tokens in ((rows, None), (-(-rows // 3), None), (1, LIVE)):
        made = metadata(attend, rows, requests, device, tokens)
        check(ours, attend(q, pool, table, made), q, pool, table)


def test_device_path_on_the_stand_in(ours: Any, hopper: Any, reference_kernels: None) -> None:
    """The device tests below, on the CPU: what they compute and how they compare is right."""
    check_modes(ours, 4, 8, torch.device("cpu"))
    width = flashmla.padded_width(TOPK, ours.kpool)
    assert hopper().calls == [(4, 64, width)] * 3
    assert [len(cache) * PAGE for cache in hopper().caches] == [4 * width, 4 * width, LIVE]


@pytest.mark.tier("interpret")
def test_adapters_call_the_kernels_as_they_are(ours: Any) -> None:
    """Write, both kinds of scratch and the exact read through the kernels themselves."""
    row = ours.row
    both = torch.randn(4, 1, LATENT_DIM + row.rope_dim, generator=torch.Generator().manual_seed(1))
    both = both.to(torch.bfloat16)
    pool = torch.full((70, 1, row.width), 0x7F, dtype=torch.uint8)
    owner = SimpleNamespace(kv_cache_dim=row.width, get_key_buffer=lambda number: pool)
    loc = torch.tensor([69, 0, 7], dtype=torch.int32)  # the fourth row is padding without a slot
    ours.rows.around_write(None, owner, pool, loc, both[..., :LATENT_DIM], both[..., LATENT_DIM:])
    want = row.pack(both[[0, 2], 0, :LATENT_DIM], both[[0, 2], 0, LATENT_DIM:])
    assert torch.equal(pool[[69, 7], 0], want)
    assert bool((pool[0] == 0x7F).all())
    latent, rope = ours.rows.around_read(None, owner, layer(), torch.tensor([7, 69]))
    assert torch.equal(latent[:, 0], row.unpack(want)[0].flip(0))
    assert (rope is None) == (row.rope_dim == 0)
    table = torch.full((1, 64), -1, dtype=torch.int32)
    table[0, 3:6] = torch.tensor([69, 7, 7])
    made = kv4_gather.reference(pool[:, 0], table, to="fp8")["out"]
    for cache, positions in (ours.rows._each(pool, table), ours.rows._distinct(pool, table, 2)):
        assert torch.equal(positions < 0, table < 0)
        named = positions[table >= 0].long()
        assert torch.equal(cache[named, 0], made[(table >= 0).view(-1)])
        assert len(cache) % PAGE == 0


@pytest.mark.tier("device", archs=("sm90",))
@pytest.mark.parametrize("heads", [64, 128, 32])
@pytest.mark.parametrize("rows", [1, 7, 133])
def test_scratch(ours: Any, rows: int, heads: int, gpu: torch.device) -> None:
    check_modes(ours, rows, heads, gpu)


@pytest.mark.tier("device", archs=("sm90",))
def test_scratch_in_turns(ours: Any, gpu: torch.device, monkeypatch: Any) -> None:
    monkeypatch.setattr(scratch, "SCRATCH_ROWS", 20 * TOPK)
    monkeypatch.setattr(flashmla, "ROWS", 7)
    check_modes(ours, 50, 64, gpu)


@pytest.mark.tier("device", archs=("sm90",))
def test_scratch_of_a_pool_past_2_31_bytes(ours: Any, gpu: torch.device) -> None:
    slots = (2**31 // ours.row.width // PAGE + 30) * PAGE
    check_modes(ours, 20, 64, gpu, slots)


@pytest.mark.tier("device", archs=("sm90",))
@pytest.mark.parametrize("requests", [33, 11])
@pytest.mark.parametrize("turns", [False, True])
def test_scratch_in_a_graph(
    ours: Any, gpu: torch.device, monkeypatch: Any, requests: int, turns: bool
) -> None:
    """Decode and verification; the schedule is made outside, as the engine makes it, or inside for turns of a large batch."""
    if turns:
        monkeypatch.setattr(scratch, "SCRATCH_ROWS", 12 * (TOPK + PAGE))
    attend: Any = path(ours, 64)
    q, pool, table = case(ours, 33, 64, gpu)
    made = metadata(attend, 33, requests, gpu)
    attend(q, pool, table, made)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, pool, table, made)
    for shift in (1, 5):
        q.copy_(q.roll(shift, 0))
        table.copy_(table.roll(shift + 1, 0))
        graph.replay()
        check(ours, out, q, pool, table)


@pytest.mark.tier("device", archs=("sm90",))
def test_dequantised_rows_in_front_of_the_sparse_prefill(gpu: torch.device) -> None:
    """`flashmla_sparse`: FlashMLA's bf16 prefill over rows dequantised exactly."""
    flash = pytest.importorskip("sgl_kernel.flash_mla", reason="part of sglang-kernel")
    ours = SimpleNamespace(rows=glm_dsa.ROWS, row=KV4, kpool=1)
    q, pool, table = case(ours, 133, 64, gpu)
    used = torch.arange(len(pool) - LIVE, len(pool), device=gpu)
    over = torch.where(table >= 0, table - (len(pool) - LIVE), -1)
    kv = glm_dsa.around_dequantize(lambda *_: None, pool.view(torch.float8_e4m3fn), used)  # type: ignore[arg-type, return-value]
    assert torch.equal(kv[:, 0], torch.cat(KV4.unpack(pool[used, 0]), dim=-1))
    out, _, _ = flash.flash_mla_sparse_fwd(
        q=q, kv=kv, indices=over[:, None], sm_scale=SCALE, d_v=512
    )
    named = (table != -1).any(dim=1)
    want = attention(q.double(), pool, table, SCALE)
    assert (out.float() - want)[named].norm() < 0.01 * want.norm()
