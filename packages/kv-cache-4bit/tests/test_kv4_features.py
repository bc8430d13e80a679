# SPDX-License-Identifier: Apache-2.0
"""`kv4.glm_dsa` and `kv4.glm_flash` in the engine's own classes (`harness`): pools, backend, sizing and hooks are real, FlashMLA is a
stand-in, and the kernels of 4-bit rows are their references. ``--tier device`` runs kernels and FlashMLA themselves (`test_kv4_device`)."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import kv4_harness as harness
import pytest
import torch
from kv4_harness import (
    DRAFT,
    HEADS,
    PAGE,
    PAGES,
    SCALE,
    TOPK,
    Count,
    attention,
    batch,
    close,
    expected,
    layer,
    make_pool,
    random_rows,
    run,
    seen,
    select,
)

from numinous_kv_cache_4bit.engine import flashmla, glm_dsa, glm_flash, rows, scratch
from numinous_kv_cache_4bit.hooks import glm_dsa as glm_dsa_hooks
from numinous_kv_cache_4bit.hooks import glm_flash as glm_flash_hooks
from numinous_tooling.formats import KV4, KV4_NO_ROPE, STOCK_FP8, STOCK_FP8_NO_ROPE

NOISE = 0.15  # of attention over E2M1 values with an E4M3 scale for 16, against that over the values before

CASES = {
    "glm_dsa": SimpleNamespace(
        feature=glm_dsa_hooks.FEATURE,
        ours=glm_dsa,
        row=KV4,
        stock=STOCK_FP8,
        architecture="GlmMoeDsaForCausalLM",
        kpool=1,
        width=TOPK,
    ),
    "glm_flash": SimpleNamespace(
        feature=glm_flash_hooks.FEATURE,
        ours=glm_flash,
        row=KV4_NO_ROPE,
        stock=STOCK_FP8_NO_ROPE,
        architecture="Glm5NextForConditionalGeneration",
        kpool=4,
        width=192,
    ),
}


@pytest.fixture(scope="module", params=list(CASES))
def kv4(engine: Any, request: Any) -> Iterator[Any]:
    """One of the features with its hooks in place."""
    case = CASES[request.param]
    for installation in harness.hooks_of(case.feature):
        yield SimpleNamespace(**vars(case), installation=installation)


@pytest.fixture
def dsa(kv4: Any) -> Any:
    """For tests of one feature only."""
    if kv4.ours is not glm_dsa:
        pytest.skip("of kv4.glm_dsa alone")
    return kv4


@pytest.fixture
def count(kv4: Any, hopper: Any, reference_kernels: None, monkeypatch: Any) -> Count:
    """Counters of the feature; everything that its paths need on a CPU is in place."""
    counter = Count()
    monkeypatch.setattr(kv4.ours.ROWS, "count", counter)
    monkeypatch.setattr(kv4.ours.ROWS, "_described", False)
    return counter


def make_backend(engine: Any, monkeypatch: Any, kv4: Any, **of: Any) -> Any:
    return harness.make_backend(
        engine,
        monkeypatch,
        **{"row": kv4.row, "architecture": kv4.architecture, "kpool": kv4.kpool} | of,
    )


def decoded(backend: Any, q: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Attention over what the pool's rows stand for."""
    return attention(q, backend.token_to_kv_pool.kv_buffer[0], slots, SCALE)


def right(backend: Any, q: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> bool:
    """Over the decoded rows up to E4M3's rounding in the scratch, over the exact ones up to the format's."""
    return close(out, decoded(backend, q, slots)) and close(out, expected(backend, q, slots), NOISE)


LENGTHS = [3, 64, 1, 200]  # below and above top-k


# --- Attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [64, 96])
def test_decode(
    engine: Any, hopper: Any, kv4: Any, count: Count, monkeypatch: Any, heads: int
) -> None:
    backend = make_backend(engine, monkeypatch, kv4, heads=heads)
    forward = batch(engine, backend, "DECODE", LENGTHS)
    slots = select(backend, seen(forward, "DECODE"))
    q, out = run(backend, forward, "DECODE", slots, heads)
    assert hopper().calls == [(4, 64 if heads <= 64 else 128, kv4.width)]
    assert hopper().caches[0].shape == (4 * kv4.width // PAGE, PAGE, 1, kv4.stock.width)
    assert right(backend, q, slots, out)
    assert count.seen == 1


def test_a_rank_of_two_computes_its_heads(
    engine: Any, hopper: Any, kv4: Any, count: Count, monkeypatch: Any
) -> None:
    """Tensor parallelism: every rank has the same rows, and half of the heads."""
    backend = make_backend(engine, monkeypatch, kv4, heads=32)
    forward = batch(engine, backend, "DECODE", LENGTHS)
    slots = select(backend, seen(forward, "DECODE"))
    q, out = run(backend, forward, "DECODE", slots, 32)
    whole = make_backend(engine, monkeypatch, kv4, heads=64)
    batch(engine, whole, "DECODE", LENGTHS)
    both = whole._forward_flashmla_kv(
        torch.cat([q, q.flip(1)], dim=1),
        whole.token_to_kv_pool.get_key_buffer(0),
        512,
        SCALE,
        layer(64, kv4.row.rope_dim),
        whole.forward_metadata,
        slots,
    )
    assert torch.equal(both[:, 0, :32], out)
    assert right(backend, q, slots, out)


@pytest.mark.parametrize(
    ("mode", "lengths", "prefixes"),
    [
        ("EXTEND", [1, 9], [0, 0]),
        (
            "EXTEND",
            [3, 5, 64, 130, 200],
            [0, 4, 60, 129, 190],
        ),  # a chunk behind others, a cached prefix
        ("TARGET_VERIFY", [3, 64, 130], []),
        ("DRAFT_EXTEND_V2", [10, 133], [10 - DRAFT, 133 - DRAFT]),
    ],
)
def test_several_rows_of_a_request(
    engine: Any,
    hopper: Any,
    kv4: Any,
    count: Count,
    monkeypatch: Any,
    mode: str,
    lengths: list[int],
    prefixes: list[int],
) -> None:
    """Prefill, verification, a draft's catching up: rows that they share are converted once."""
    backend = make_backend(engine, monkeypatch, kv4)
    forward = batch(engine, backend, mode, lengths, prefixes)
    named = seen(forward, "EXTEND" if mode == "DRAFT_EXTEND_V2" else mode)
    slots = select(backend, named)
    q, out = run(backend, forward, mode, slots)
    assert hopper().calls == [(len(named), 64, kv4.width)]
    cache = hopper().caches[0].view(-1, kv4.stock.width)
    converted = int((cache != 0x7F).any(dim=1).sum())
    assert converted == len(slots[slots >= 0].unique())
    if mode == "EXTEND":
        assert len(cache) - PAGE < sum(lengths) <= len(cache), "whole pages for the batch's tokens"
    assert right(backend, q, slots, out)


@pytest.mark.parametrize(("mode", "turns"), [("DECODE", [2, 2]), ("EXTEND", [2, 2, 2, 1])])
def test_a_scratch_holds_so_many_rows_and_no_more(
    engine: Any, hopper: Any, kv4: Any, count: Count, monkeypatch: Any, mode: str, turns: list[int]
) -> None:
    monkeypatch.setattr(scratch, "SCRATCH_ROWS", 2 * kv4.width + 1)
    backend = make_backend(engine, monkeypatch, kv4)
    if mode == "DECODE":
        forward = batch(engine, backend, mode, LENGTHS)
    else:
        forward = batch(engine, backend, mode, [9, 200, 200], [7, 197, 198])
    slots = select(backend, seen(forward, mode))
    q, out = run(backend, forward, mode, slots)
    assert [call[0] for call in hopper().calls] == turns
    assert max(cache.shape[0] * PAGE for cache in hopper().caches) <= 2 * kv4.width
    assert right(backend, q, slots, out)


def test_rows_in_turns(engine: Any, hopper: Any, kv4: Any, count: Count, monkeypatch: Any) -> None:
    """One scratch, from which the kernel reads in turns."""
    monkeypatch.setattr(flashmla, "ROWS", 5)
    backend = make_backend(engine, monkeypatch, kv4)
    forward = batch(engine, backend, "EXTEND", [9, 130], [0, 126])
    slots = select(backend, seen(forward, "EXTEND"))
    q, out = run(backend, forward, "EXTEND", slots)
    assert [call[0] for call in hopper().calls] == [5, 5, 3]
    assert len({cache.data_ptr() for cache in hopper().caches}) == 1
    assert right(backend, q, slots, out)


def test_padded_rows_duplicates_and_wide_ids(
    engine: Any, hopper: Any, kv4: Any, count: Count, monkeypatch: Any
) -> None:
    """More rows than the metadata counts; the last three have no slot and come out as zeros."""
    backend = make_backend(engine, monkeypatch, kv4)
    forward = batch(engine, backend, "DECODE", [70, 7])
    slots = torch.nn.functional.pad(
        select(backend, seen(forward, "DECODE")), (0, 0, 0, 3), value=-1
    )
    slots = slots.long()
    slots[0, 70:100] = slots[0, 0]  # a slot named often weighs as often
    slots[1, 3] = PAGE * PAGES + 5  # beyond the pool: left out
    q, out = run(backend, forward, "DECODE", slots)
    slots[1, 3] = -1
    assert right(backend, q, slots, out)
    assert not out[2:].any()
    empty = backend._forward_flashmla_kv(
        q[:0],
        backend.token_to_kv_pool.get_key_buffer(0),
        512,
        SCALE,
        layer(HEADS, kv4.row.rope_dim),
        None,
        slots[:0],
    )
    assert empty.shape == (0, 1, HEADS, 512)
    assert count.seen == 1


def test_a_batch_that_names_more_than_it_has_ends(
    engine: Any, hopper: Any, kv4: Any, count: Count, monkeypatch: Any
) -> None:
    backend = make_backend(engine, monkeypatch, kv4)
    forward = batch(engine, backend, "EXTEND", [60], [0])
    slots = select(backend, seen(forward, "EXTEND"))
    slots[:, 62] = torch.arange(400, 460)
    with pytest.raises(RuntimeError, match="names more slots than it has tokens"):
        run(backend, forward, "EXTEND", slots)


@pytest.mark.parametrize(("name", "each"), [("DECODE", 1), ("TARGET_VERIFY", DRAFT)])
def test_graphs(
    engine: Any, hopper: Any, kv4: Any, count: Count, monkeypatch: Any, name: str, each: int
) -> None:
    """Captured sizes keep their schedules; what is launched and allocated depends on shapes alone."""
    backend = make_backend(engine, monkeypatch, kv4)
    backend.init_cuda_graph_state(4, 4 * DRAFT)
    mode = getattr(engine.Mode, name)
    shapes: dict[int, set[Any]] = {}
    for replay in (False, True):
        for size in (4, 1, 2):
            lengths = torch.tensor([5, 70, 130, 64][:size])
            backend._apply_cuda_graph_metadata(
                size, torch.arange(size), lengths, lengths, mode, spec_info=None
            )
            forward = SimpleNamespace(forward_mode=mode, out_cache_loc=None)
            slots = torch.full((size * each, TOPK + kv4.kpool - 1), -1, dtype=torch.int32)
            if replay:  # captured with an empty table
                slots[:, :60] = torch.arange(PAGE, PAGE + 60)
            q, out = run(backend, forward, name, slots)
            assert close(out, decoded(backend, q, slots)) or not replay
            assert hopper().calls[-1] == (size * each, 64, kv4.width)
            shapes.setdefault(size, set()).add(hopper().caches[-1].shape)
    assert {size: len(found) for size, found in shapes.items()} == {4: 1, 1: 1, 2: 1}


# --- Planted faults: each is seen ---------------------------------------------------------------------------------------


def faulty(fault: str, monkeypatch: Any) -> None:
    gather = scratch.kv4_gather

    def wrong(pool: torch.Tensor, index: torch.Tensor, **of: Any) -> torch.Tensor:
        if fault == "swapped nibbles":
            pool = pool.clone()
            pool[..., :256] = (pool[..., :256] << 4) | (pool[..., :256] >> 4)
        if fault == "neighbour's scale":
            pool = pool.clone()
            pool[..., 256:288] = pool[..., 256:288].roll(1, 0)
        out = gather(pool, index, **of)
        if fault == "missing -1":
            of["positions"].clamp_(min=0)
        if fault == "dropped rope":
            out[:, 528:] = 0
        return out

    monkeypatch.setattr(scratch, "kv4_gather", wrong)


@pytest.mark.parametrize(
    "fault", ["swapped nibbles", "neighbour's scale", "missing -1", "dropped rope"]
)
def test_a_fault_is_seen(
    engine: Any, hopper: Any, kv4: Any, count: Count, monkeypatch: Any, fault: str
) -> None:
    faulty(fault, monkeypatch)
    backend = make_backend(engine, monkeypatch, kv4)
    forward = batch(engine, backend, "DECODE", LENGTHS)
    slots = select(backend, seen(forward, "DECODE"))
    q, out = run(backend, forward, "DECODE", slots)
    harmless = fault == "dropped rope" and not kv4.row.rope_dim
    assert right(backend, q, slots, out) == harmless


def test_another_width_is_seen(
    engine: Any, hopper: Any, kv4: Any, count: Count, monkeypatch: Any
) -> None:
    backend = make_backend(engine, monkeypatch, kv4)
    forward = batch(engine, backend, "DECODE", [70])
    slots = select(backend, seen(forward, "DECODE"))
    monkeypatch.setattr(kv4.ours.ROWS, "scratch", KV4)
    with pytest.raises((AssertionError, RuntimeError)):
        run(backend, forward, "DECODE", slots)
    with pytest.raises(RuntimeError, match="names 257 slots, more than"):
        backend._forward_flashmla_kv(
            torch.zeros(1, HEADS, 512 + kv4.row.rope_dim, dtype=torch.bfloat16),
            backend.token_to_kv_pool.get_key_buffer(0),
            512,
            SCALE,
            layer(HEADS, kv4.row.rope_dim),
            backend.forward_metadata,
            torch.zeros(1, 257, dtype=torch.int32),
        )


# --- Writes -------------------------------------------------------------------------------------------------------------


def test_a_token_is_written_before_it_is_read(
    engine: Any, hopper: Any, kv4: Any, count: Count, monkeypatch: Any
) -> None:
    """Through the engine's forward: quantised bit for bit as the format says, padding to slot 0 leaves no trace."""
    backend = make_backend(engine, monkeypatch, kv4)
    pool = backend.token_to_kv_pool
    forward = batch(engine, backend, "DECODE", [70, 130])
    last = backend.req_to_token[[0, 1], [69, 129]].long()
    kept = pool.kv_buffer[0].clone()
    pool.kv_buffer[0][last] = 0x7F
    forward.out_cache_loc = torch.cat([last, torch.zeros(1, dtype=torch.int64)])
    exact = torch.cat([backend.exact[last], torch.full_like(backend.exact[:1], 9.0)])
    slots = torch.nn.functional.pad(
        select(backend, seen(forward, "DECODE")), (0, 0, 0, 1), value=-1
    )
    q, out = run(backend, forward, "DECODE", slots, written=(exact[..., :512], exact[..., 512:]))
    assert torch.equal(pool.kv_buffer[0], kept)
    assert right(backend, q, slots, out)


def test_only_rows_of_the_feature_are_written(
    engine: Any, kv4: Any, count: Count, monkeypatch: Any
) -> None:
    pool = make_pool(engine, kv4.stock, kpool=kv4.kpool)
    exact, _ = random_rows(4, kv4.row.width)
    with pytest.raises(RuntimeError, match=f"a pool with rows of {kv4.stock.width} bytes"):
        pool.set_mla_kv_buffer(layer(), torch.arange(1, 5), exact[..., :512], exact[..., 512:])
    assert not pool.kv_buffer[0].any()
    with pytest.raises(AssertionError):
        pool.set_kv_buffer(layer(), torch.arange(1, 5), exact, exact)


# --- A cached prefix in front of multi-head attention, and the sparse prefill kernels -------------------------------------


def test_prefix(engine: Any, hopper: Any, kv4: Any, count: Count, monkeypatch: Any) -> None:
    """A short prompt behind a cached prefix: latent and rope of all tokens, exactly what the rows stand for."""
    backend = make_backend(engine, monkeypatch, kv4)
    used = backend
    if kv4.kpool > 1:
        used = engine.hybrid.HybridLinearAttnBackend.__new__(engine.hybrid.HybridLinearAttnBackend)
        used.full_attn_backend = backend
    forward = batch(engine, backend, "EXTEND", [70, 5], [64, 0])
    table = backend.req_to_token
    slots = torch.cat([table[0, :70], table[1, :5]])
    object.__setattr__(backend.forward_metadata, "page_table_1_flattened", slots)
    pool = backend.token_to_kv_pool
    for module in (engine.mha, engine.context):
        monkeypatch.setattr(module, "get_token_to_kv_pool", lambda: pool)
        monkeypatch.setattr(module, "get_attn_backend", lambda: used)
    model = engine.mha.DeepseekMHAForwardMixin()
    model.attn_mha, model.kv_lora_rank = SimpleNamespace(layer_id=0), 512
    latent, rope = model._get_mla_kv_buffer_from_fp8_for_dsa(forward)
    want = kv4.row.unpack(pool.kv_buffer[0][slots.long(), 0])
    assert torch.equal(latent, want[0])
    assert torch.equal(rope[:, 0], want[1])
    assert latent.is_contiguous()
    assert count.seen == 1
    object.__setattr__(backend.forward_metadata, "page_table_1_flattened", None)
    with pytest.raises(
        (RuntimeError, AssertionError), match=r"no page table|page_table_1_flattened"
    ):
        model._get_mla_kv_buffer_from_fp8_for_dsa(forward)


def ragged(backend: Any, forward: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A table as the indexer gives it in front of the sparse prefill kernels, over the batch's tokens; and the same in slots."""
    offsets = [0, *torch.tensor(forward.seq_lens.tolist()).cumsum(0).tolist()]
    flat = torch.cat([backend.req_to_token[r, :n] for r, n in enumerate(forward.seq_lens.tolist())])
    named = seen(forward, "EXTEND")
    table = torch.full((len(named), TOPK), -1, dtype=torch.int32)
    for at, (request, length) in enumerate(named):
        first = max(0, length - TOPK)
        table[at, : length - first] = torch.arange(first, length) + offsets[request]
    return table, torch.where(table >= 0, flat[table.clamp(min=0).long()], -1)


@pytest.mark.parametrize("prefixes", [[0, 0], [64, 3]])
@pytest.mark.parametrize("prefill", ["flashmla_sparse", "flashmla_sparse_q8"])
def test_sparse_prefill(
    engine: Any,
    hopper: Any,
    dsa: Any,
    count: Count,
    monkeypatch: Any,
    prefill: str,
    prefixes: list[int],
) -> None:
    """Stock's own routes: without a prefix over the latents as they come, with one over all rows of the batch dequantised."""
    backend = make_backend(engine, monkeypatch, dsa)
    backend.dsa_prefill_impl = prefill
    monkeypatch.setattr(engine.dsa, "q8kv8_topk_length_from_indices", lambda table: None)
    monkeypatch.setattr(
        engine.dsa,
        "concat_and_cast_q_fp8_pad",
        lambda out, nope, rope, heads: out[:, :heads].copy_(torch.cat([nope, rope], dim=-1)),
    )
    q8 = types.ModuleType("q8")

    def sparse(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, **of: Any) -> Any:
        assert q.dtype == kv.dtype == torch.float8_e4m3fn
        landing = kv.float()[len(kv) - TOPK :]
        assert not landing.any(), "where -1 is sent"
        made, _, _ = hopper().flash_mla_sparse_fwd(
            q.bfloat16(), kv.bfloat16(), indices, SCALE, of["d_v"]
        )
        return made, None, None

    q8.sparse_mla_q8kv8_prefill_fwd = sparse  # type: ignore[attr-defined]
    name = "sglang.kernels.ops.attention.sparse_mla_q8kv8_prefill_sm90"
    monkeypatch.setitem(sys.modules, name, q8)
    backend._q8kv8_kv_cat_fusion = False
    monkeypatch.setattr(engine.dsa, "_cat", lambda parts, dim: torch.cat(list(parts), dim=dim))
    forward = batch(engine, backend, "EXTEND", [70, 9], prefixes)
    table, slots = ragged(backend, forward)
    new = torch.cat(
        [
            backend.req_to_token[r, p:n].long()
            for r, (p, n) in enumerate(zip(prefixes, [70, 9], strict=True))
        ]
    )
    forward.out_cache_loc = new
    exact = backend.exact[new]
    q, out = run(backend, forward, "EXTEND", table, written=(exact[..., :512], exact[..., 512:]))
    within = 0.05 if prefill == "flashmla_sparse" else 0.1  # E4M3 queries, too
    if any(prefixes):
        assert close(out, decoded(backend, q, slots), within)
        assert close(out, expected(backend, q, slots), NOISE + within)
        assert count.seen == 1
    else:
        assert close(out, expected(backend, q, slots), within)
        assert count.seen == 0, "nothing is read from the cache"


def test_requantised_rows(engine: Any, dsa: Any, count: Count, monkeypatch: Any) -> None:
    """In turns, into a buffer or without; large values saturate, the landing rows are zeros."""
    from sglang.kernels.ops.attention.dsa.dequant_k_cache import gather_dequant_requant_fp8_paged

    monkeypatch.setattr(glm_dsa, "TURN", 3)
    latent = torch.randn(20, 512, generator=torch.Generator().manual_seed(5)) * 200
    rope = torch.randn(20, 64, generator=torch.Generator().manual_seed(6))
    pool = KV4.pack(latent, rope)[:, None].view(torch.float8_e4m3fn)
    slots = torch.tensor([3, 19, 0, 3, 7, 11, 12], dtype=torch.int32)
    exact = torch.cat(KV4.unpack(pool.view(torch.uint8)[slots.long(), 0]), dim=-1).float()
    assert exact.abs().max() > 448
    want = exact.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    for out in (None, torch.full((12, 576), 5.0).to(torch.float8_e4m3fn)):
        got = gather_dequant_requant_fp8_paged(pool, slots, extra_rows=5, out=out)
        assert got.shape == (12, 1, 576)
        assert torch.equal(got[:7, 0].float(), want)
        assert not got[7:].float().any()
        assert out is None or got.data_ptr() == out.data_ptr()


# --- Bugs of stock's FP4 pools, by their numbers in the list of candidates ------------------------------------------------


@pytest.fixture
def filled(engine: Any, kv4: Any, count: Count) -> Any:
    """A pool whose rows are all different, in the hybrid wrapper where the model has one."""
    pool = make_pool(engine, kv4.row, kpool=kv4.kpool, layers=2)
    for number, buffer in enumerate(pool.kv_buffer):
        buffer.copy_(random_rows(PAGES * PAGE, kv4.row.width)[1].roll(number, 0))
    return pool


def test_u04_moved_rows_take_their_scales_along(engine: Any, kv4: Any, filled: Any) -> None:
    before = [buffer.clone() for buffer in filled.kv_buffer]
    engine.pools.MLATokenToKVPool.move_kv_cache(
        filled, torch.tensor([70, 71]), torch.tensor([300, 5])
    )
    for old, new in zip(before, filled.kv_buffer, strict=True):
        assert torch.equal(new[[70, 71]], old[[300, 5]])
        old[[70, 71]] = old[[300, 5]]
        assert torch.equal(new, old)


def test_u05_size_counts_every_byte(kv4: Any, filled: Any) -> None:
    assert filled.get_kv_size_bytes() == PAGES * PAGE * rows.bytes_per_token(kv4.row.width, 2, 2)
    assert filled.get_kv_size_bytes() == sum(
        x.nbytes for x in (*filled.kv_buffer, *filled.index_k_with_scale_buffer)
    )


def test_u06_packed_rows_are_not_handed_out_as_values(kv4: Any, filled: Any) -> None:
    for read in (filled.get_value_buffer, filled.get_kv_buffer):
        with pytest.raises(RuntimeError, match="no view of their values"):
            read(0)
    slots = torch.tensor([5, 639, 5])
    for dtype in (None, torch.float32):
        latent, rope = filled.get_mla_kv_buffer(layer(), slots, dtype)
        want = kv4.row.unpack(filled.kv_buffer[0][slots, 0], dtype=dtype)
        assert torch.equal(latent[:, 0], want[0])
        assert (rope is None) if not kv4.row.rope_dim else torch.equal(rope[:, 0], want[1])


@pytest.mark.parametrize("absent", [True, False])
def test_u07_rope_free_rows_are_written(kv4: Any, filled: Any, absent: bool) -> None:
    if kv4.row.rope_dim:
        pytest.skip("of rows without rope")
    latent = torch.randn(3, 1, 512).to(torch.bfloat16)
    loc = torch.tensor([9, 8, 400])
    filled.set_mla_kv_buffer(layer(), loc, latent, None if absent else latent[..., :0])
    assert torch.equal(filled.kv_buffer[0][loc, 0], kv4.row.pack(latent[:, 0]))


def test_u08_no_rank_writes_rows_of_others(engine: Any, kv4: Any, filled: Any) -> None:
    """Decode context parallelism is refused (`judge`); ids beyond the pool, as a widened one would be, are not written."""
    before = filled.kv_buffer[0].clone()
    exact, _ = random_rows(2, kv4.row.width)
    filled._write_mla_kv_buffer(
        filled.kv_buffer[0],
        torch.tensor([PAGES * PAGE, 2 * PAGES * PAGE]),
        exact[..., :512],
        exact[..., 512:],
    )
    assert torch.equal(filled.kv_buffer[0], before)
    command = SimpleNamespace(model_config=None)
    command.get = {"dcp_size": 2, "pp_size": 1}.get
    judge = glm_dsa_hooks.judge if kv4.ours is glm_dsa else glm_flash_hooks.judge
    assert [line for line in judge(command) if "--dcp-size" in line]


def test_u09_padding_leaves_slot_0_alone(kv4: Any, filled: Any) -> None:
    before = filled.kv_buffer[0].clone()
    exact, packed = random_rows(3, kv4.row.width)
    nan = exact.clone()
    nan[[0, 2]] = float("nan")
    for ids in (torch.int32, torch.int64):
        loc = torch.tensor([0, 77, 0], dtype=ids)
        filled.set_mla_kv_buffer(layer(), loc, nan[..., :512], nan[..., 512:])
        assert torch.equal(filled.kv_buffer[0][77], packed[1])
        filled.kv_buffer[0][77] = before[77]
        assert torch.equal(filled.kv_buffer[0], before)


def test_u10_host_copies_and_registration_hold_whole_rows(
    engine: Any, kv4: Any, filled: Any, monkeypatch: Any
) -> None:
    """Retraction: a request's rows and index keys go to the host and come back to other pages."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(filled, "cpu_offloading_chunk_size", 50)
    for buffer in filled.index_k_with_scale_buffer:
        buffer.copy_(torch.randint(0, 255, buffer.shape))
    pool = filled
    if kv4.kpool > 1:
        pool = engine.pools.HybridLinearKVPool.__new__(engine.pools.HybridLinearKVPool)
        pool.full_kv_pool = filled
    first, second = torch.arange(PAGE, 3 * PAGE), torch.arange(5 * PAGE, 7 * PAGE)
    before = [buffer[first].clone() for buffer in filled.kv_buffer]
    keys = [buffer[1:3].clone() for buffer in filled.index_k_with_scale_buffer]
    copy = pool.get_cpu_copy(first)
    for buffer in (*filled.kv_buffer, *filled.index_k_with_scale_buffer):
        buffer.fill_(0x55)
    pool.load_cpu_copy(copy, second)
    for buffer, want in zip(filled.kv_buffer, before, strict=True):
        assert torch.equal(buffer[second], want)
    for buffer, want in zip(filled.index_k_with_scale_buffer, keys, strict=True):
        assert torch.equal(buffer[5:7], want)
    pointers, lengths, items = filled.get_contiguous_buf_infos()
    assert pointers == [buffer.data_ptr() for buffer in filled.kv_buffer]
    assert lengths == [PAGES * PAGE * kv4.row.width] * 2
    assert items == [PAGE * kv4.row.width] * 2


def test_u11_no_writer_of_accepted_blocks_goes_around(engine: Any, kv4: Any, filled: Any) -> None:
    """DFLASH and DSPARK commit through a method that these pools do not have; both are refused at boot."""
    assert not hasattr(filled, "set_kv_buffer_prefix_valid")
    for algorithm in ("DFLASH", "DSPARK"):
        command = SimpleNamespace(model_config=None)
        command.get = {"speculative_algorithm": algorithm, "dcp_size": 1, "pp_size": 1}.get
        judge = glm_dsa_hooks.judge if kv4.ours is glm_dsa else glm_flash_hooks.judge
        assert [line for line in judge(command) if f"--speculative-algorithm {algorithm}" in line]


# --- Sizing ---------------------------------------------------------------------------------------------------------------


def configurator(kv4: Any, layers: int = 9, *, draft: bool = False, **of: Any) -> Any:
    """What the engine's sizing and builders read of a `KVCacheConfigurator`; GLM-5.3's layers index by fours."""
    config = SimpleNamespace(
        architectures=[kv4.architecture + ("NextN" if draft else "")],
        index_topk=2048,
        index_head_dim=128,
        index_kpool=kv4.kpool,
        index_kpool_compress=kv4.kpool > 1,
        index_topk_freq=4 if kv4.kpool == 1 else 1,
    )
    full = list(range(3, 4 * layers, 4))  # of a hybrid model's
    return SimpleNamespace(
        **{
            "device": "cpu",
            "server_args": SimpleNamespace(enable_hisparse=False),
            "model_config": SimpleNamespace(
                hf_config=config, kv_lora_rank=512, qk_rope_head_dim=kv4.row.rope_dim, head_dim=256,
                get_num_kv_heads=lambda *_: 1,
            ),
            "kv_cache_dtype": torch.float8_e4m3fn,
            "kv_cache_dtype_str": "fp8_e4m3",
            "use_mla_backend": True,
            "is_draft_worker": draft,
            "pool_page_size": PAGE,
            "layer_info": SimpleNamespace(
                start_layer=0,
                end_layer=layers if kv4.kpool == 1 else 4 * layers,
                num_effective_layers=layers,
            ),
            "mambaish_config": (
                SimpleNamespace(full_attention_layer_ids=full) if kv4.kpool > 1 else None
            ),
            "_build_mha_quant_method": lambda num_layers: None,
            "post_capture_kv_active": False,
        }
        | of
    )  # fmt: skip


def cell(engine: Any, made: Any, layers: int) -> int:
    """Bytes of a token by the engine's sizing."""
    sizing = engine.sizing.DefaultPoolConfigurator.__new__(engine.sizing.DefaultPoolConfigurator)
    return sizing._compute_cell_size(made, layers)


def build(engine: Any, kv4: Any, made: Any, tokens: int) -> Any:
    """The pool by the engine's builder of this model."""
    cls = engine.configurator.KVCacheConfigurator
    if kv4.kpool == 1:
        return cls._build_dsa_kv_pool(made, max_total_num_tokens=tokens, max_running_requests=4)
    requests = SimpleNamespace(req_to_token=torch.zeros(4, 8), mamba_pool=None)
    hybrid = cls._build_hybrid_linear_kv_pool(
        made, max_total_num_tokens=tokens, req_to_token_pool=requests, mha_pool_class=None
    )
    return hybrid.full_kv_pool


@pytest.mark.parametrize("draft", [False, True])
def test_u45_what_is_planned_is_allocated(engine: Any, kv4: Any, count: Count, draft: bool) -> None:
    """Target and draft have the same rows; a draft's layer always indexes."""
    layers = 1 if draft else 9
    made = configurator(kv4, layers, draft=draft)
    indexing = layers if draft or kv4.kpool > 1 else 3
    planned = cell(engine, made, layers)
    assert planned == rows.bytes_per_token(kv4.row.width, layers, indexing)
    pool = build(engine, kv4, made, 5 * PAGE)
    assert {buffer.shape for buffer in pool.kv_buffer} == {(6 * PAGE, 1, kv4.row.width)}
    assert {buffer.dtype for buffer in pool.kv_buffer} == {torch.uint8}
    assert pool.get_kv_size_bytes() == 6 * PAGE * planned
    assert pool.dsa_kv_cache_store_fp8


@pytest.mark.parametrize("layers", [1, 9])
def test_tokens_at_equal_memory(
    engine: Any, kv4: Any, count: Count, monkeypatch: Any, caplog: Any, layers: int
) -> None:
    """The line at boot equals the byte formula and what the engine allocates."""
    import sglang.srt.utils as utils

    monkeypatch.setattr(utils, "log_info_on_rank0", lambda logger, text: logger.warning(text))
    pool = build(engine, kv4, configurator(kv4, layers), (PAGES - 1) * PAGE)
    make = {"heads": 64, "pool": pool}
    for _ in ("target", "draft"):
        make_backend(engine, monkeypatch, kv4, **make)
    indexing = {1: 1, 9: 3 if kv4.kpool == 1 else 9}[layers]
    ours, stock, bf16 = (
        rows.bytes_per_token(width, layers, indexing)
        for width in (kv4.row.width, kv4.stock.width, 2 * (512 + kv4.row.rope_dim))
    )
    assert ours * PAGES * PAGE == pool.get_kv_size_bytes()
    lines = [record.message for record in caplog.records if "-byte rows" in record.message]
    assert lines == [
        f"{kv4.feature.id}: 576 tokens in {kv4.row.width}-byte rows, {ours} bytes per token; this memory would hold "
        f"{576 * ours // stock} stock's FP8 rows ({stock} bytes, {stock / ours:.3f} x) or "
        f"{576 * ours // bf16} bf16 rows ({bf16} bytes, {bf16 / ours:.3f} x)"
    ]


def test_ratios_of_the_models() -> None:
    """GLM-5.3: 78 layers, 21 of which index; its dummy: 9 and 3. GLM-5.3-Flash: 11 full-attention layers, an indexer in each."""

    def ratio(big: int, small: int, *layers: int) -> str:
        return f"{rows.bytes_per_token(big, *layers) / rows.bytes_per_token(small, *layers):.3f}"

    assert ratio(656, 352, 78, 21) == "1.784"
    assert ratio(656, 352, 9, 3) == "1.768"
    assert ratio(528, 288, 11, 11) == "1.571"
    assert ratio(1024, 288, 11, 11) == "2.752"


# --- Boot -----------------------------------------------------------------------------------------------------------------


def test_sizing_hook_is_in_front_of_every_model(engine: Any, kv4: Any, count: Count) -> None:
    config = SimpleNamespace(architectures=["LlamaForCausalLM"])
    model = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config), kv_cache_dtype=torch.float8_e4m3fn
    )
    with pytest.raises(SystemExit, match="this model is LlamaForCausalLM"):
        engine.sizing.create_memory_pool_configurator(model)


def test_rows_in_place_of_no_others(engine: Any, kv4: Any, count: Count, monkeypatch: Any) -> None:
    """TRT-LLM's raw rows and a bf16 draft are not what the row is made in place of."""
    made = configurator(kv4, kv_cache_dtype=torch.bfloat16)
    with pytest.raises(SystemExit, match=r"rows would be \d+ wide \(torch.bfloat16\)"):
        cell(engine, made, 1)
    kernel = SimpleNamespace(dsa_prefill_backend="trtllm", dsa_decode_backend="trtllm")
    monkeypatch.setattr(engine.configurator, "get_exec", lambda: SimpleNamespace(kernel=kernel))
    with pytest.raises(SystemExit, match=r"rows would be \d+ wide \(torch.float8_e4m3fn\)"):
        cell(engine, configurator(kv4), 1)


def test_backend_refuses(engine: Any, kv4: Any, count: Count, monkeypatch: Any) -> None:
    with pytest.raises(SystemExit, match="192 query heads per rank"):
        make_backend(engine, monkeypatch, kv4, heads=192)
    with pytest.raises(SystemExit, match=f"rows are {kv4.stock.width} wide, not {kv4.row.width}"):
        make_backend(engine, monkeypatch, kv4, pool=make_pool(engine, kv4.stock, kpool=kv4.kpool))
    other = make_pool(engine, kv4.row, kpool=kv4.kpool)
    # As HiSparse's and layer-split pools are: subclasses with rows elsewhere.
    other.__class__ = type("LayerSplitDSATokenToKVPool", (type(other),), {})
    with pytest.raises(SystemExit, match="the pool is a LayerSplitDSATokenToKVPool"):
        make_backend(engine, monkeypatch, kv4, pool=other)
    if kv4.kpool == 1:
        with pytest.raises(SystemExit, match="index_topk 100; FlashMLA takes multiples of 64"):
            make_backend(engine, monkeypatch, kv4, topk=100)
    backend = make_backend(engine, monkeypatch, kv4)
    for name, value, said in (
        ("dsa_prefill_impl", "fa3", "--dsa-prefill-backend fa3 does not"),
        ("dsa_decode_impl", "flashmla_sparse", "--dsa-decode-backend flashmla_sparse does not"),
        ("real_page_size", 128, "pages of 128 tokens"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(backend, name, value)
            with pytest.raises(SystemExit, match=said) as error:
                kv4.ours.after_backend(None, backend)
            assert "\n" not in str(error.value)
    for prefill in ("flashmla_sparse", "flashmla_sparse_q8"):
        backend.dsa_prefill_impl = prefill
        if kv4.kpool == 1:
            kv4.ours.after_backend(None, backend)
        else:
            with pytest.raises(SystemExit, match=f"--dsa-prefill-backend {prefill} does not"):
                kv4.ours.after_backend(None, backend)
