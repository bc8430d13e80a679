# SPDX-License-Identifier: Apache-2.0
"""`kv4.glm_flash_fp8` in the engine's own classes (`harness`); on a Hopper GPU ``--tier device`` compares FlashMLA itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
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
    TOPK,
    Count,
    attention,
    batch,
    close,
    expected,
    flashmla_alone,
    layer,
    make_pool,
    random_rows,
    run,
    seen,
    select,
)

from numinous_kv_cache_4bit.engine import flashmla
from numinous_kv_cache_4bit.engine import glm_flash_fp8 as ours
from numinous_kv_cache_4bit.hooks.glm_flash_fp8 import FEATURE
from numinous_tooling.formats import STOCK_FP8_NO_ROPE

WIDTH, KPOOL = 528, 4


@pytest.fixture(scope="module")
def installed(engine: Any) -> Iterator[Any]:
    """The hooks of the feature in place."""
    yield from harness.hooks_of(FEATURE)


@pytest.fixture
def hooks(installed: Any) -> None:
    """For tests of the feature."""


@pytest.fixture
def stock(installed: Any, monkeypatch: Any) -> None:
    """For tests of what the feature is there for."""
    for target in installed.targets:
        monkeypatch.setattr(target.owner, target.attribute, target.raw)


@pytest.fixture
def count(monkeypatch: Any) -> Count:
    counter = Count()
    monkeypatch.setattr(ours.ROWS, "count", counter)
    monkeypatch.setattr(ours.ROWS, "_described", False)
    return counter


def make_backend(engine: Any, monkeypatch: Any, *, kpool: int = KPOOL, **of: Any) -> Any:
    """The engine's backend over a pool of 528-byte rows."""
    changes = {name: of.pop(name) for name in ("dtype", "kv_cache_dim") if name in of}
    pool = make_pool(engine, STOCK_FP8_NO_ROPE, kpool=kpool, **changes)
    return harness.make_backend(
        engine,
        monkeypatch,
        row=STOCK_FP8_NO_ROPE,
        architecture="Glm5NextForConditionalGeneration",
        kpool=kpool,
        pool=pool,
        **of,
    )


LENGTHS = [3, 5, 63, 64, 1, 130, 200]  # below and above top-k, with tails of 0 to 3 tokens


@pytest.mark.parametrize("heads", [64, 32, 8, 128, 96])
def test_decode(
    engine: Any, hopper: Any, hooks: None, count: Count, monkeypatch: Any, heads: int
) -> None:
    backend = make_backend(engine, monkeypatch, heads=heads)
    forward = batch(engine, backend, "DECODE", LENGTHS)
    slots = select(backend, seen(forward, "DECODE"))
    assert slots.shape == (7, TOPK + KPOOL - 1), "what the indexer gives"
    q, out = run(backend, forward, "DECODE", slots, heads)
    assert hopper().calls == [(7, 64 if heads <= 64 else 128, 192)]
    assert close(out, expected(backend, q, slots, 0.04))
    assert count.seen == 1


@pytest.mark.parametrize(
    ("mode", "lengths", "prefixes"),
    [
        ("EXTEND", [1, 9, 20], [0, 0, 0]),
        ("EXTEND", [3, 5, 64, 130, 200], [0, 4, 60, 129, 190]),
        ("TARGET_VERIFY", [3, 64, 130], []),
    ],
)
def test_prefill_and_verification(
    engine: Any,
    hopper: Any,
    hooks: None,
    count: Count,
    monkeypatch: Any,
    mode: str,
    lengths: list[int],
    prefixes: list[int],
) -> None:
    backend = make_backend(engine, monkeypatch)
    forward = batch(engine, backend, mode, lengths, prefixes)
    assert not backend.use_mha
    rows = seen(forward, mode)
    slots = select(backend, rows)
    q, out = run(backend, forward, mode, slots)
    assert hopper().calls == [(len(rows), 64, 192)]
    assert close(out, expected(backend, q, slots, 0.04))


def test_draft_extend(
    engine: Any, hopper: Any, hooks: None, count: Count, monkeypatch: Any
) -> None:
    """The draft's model prefills what was accepted; every request brings the same number of tokens."""
    backend = make_backend(engine, monkeypatch)
    forward = batch(engine, backend, "DRAFT_EXTEND_V2", [10, 133], [10 - DRAFT, 133 - DRAFT])
    rows = seen(forward, "EXTEND")
    slots = select(backend, rows)
    q, out = run(backend, forward, "DRAFT_EXTEND_V2", slots)
    assert hopper().calls == [(2 * DRAFT, 64, 192)]
    assert close(out, expected(backend, q, slots, 0.04))


@pytest.mark.parametrize(
    ("topk", "kpool", "width"), [(128, 2, 192), (64, 64, 128), (192, 1, 192), (2048, 4, 2112)]
)
def test_widths(
    engine: Any,
    hopper: Any,
    hooks: None,
    count: Count,
    monkeypatch: Any,
    topk: int,
    kpool: int,
    width: int,
) -> None:
    backend = make_backend(engine, monkeypatch, topk=topk, kpool=kpool)
    forward = batch(engine, backend, "DECODE", [66, 131])
    slots = select(backend, seen(forward, "DECODE"))
    q, out = run(backend, forward, "DECODE", slots)
    assert hopper().calls == [(2, 64, width)]
    assert close(out, expected(backend, q, slots, 0.04))


def test_rows_in_turns(
    engine: Any, hopper: Any, hooks: None, count: Count, monkeypatch: Any
) -> None:
    monkeypatch.setattr(flashmla, "ROWS", 5)
    backend = make_backend(engine, monkeypatch)
    forward = batch(engine, backend, "EXTEND", [9, 130], [0, 126])
    slots = select(backend, seen(forward, "EXTEND"))
    q, out = run(backend, forward, "EXTEND", slots)
    assert [rows for rows, *_ in hopper().calls] == [5, 5, 3]
    assert close(out, expected(backend, q, slots, 0.04))


def test_more_rows_than_metadata(
    engine: Any, hopper: Any, hooks: None, count: Count, monkeypatch: Any
) -> None:
    """A padded batch: rows without a slot come out as zeros."""
    backend = make_backend(engine, monkeypatch)
    forward = batch(engine, backend, "DECODE", [7, 70])
    slots = torch.nn.functional.pad(
        select(backend, seen(forward, "DECODE")), (0, 0, 0, 3), value=-1
    )
    q, out = run(backend, forward, "DECODE", slots)
    assert hopper().calls == [(5, 64, 192)]
    assert close(out, expected(backend, q, slots, 0.04))
    assert not out[2:].any()


def test_no_rows_and_duplicates_and_wide_ids(
    engine: Any, hopper: Any, hooks: None, count: Count, monkeypatch: Any
) -> None:
    backend = make_backend(engine, monkeypatch)
    empty = backend._forward_flashmla_kv(
        torch.empty(0, HEADS, 512, dtype=torch.bfloat16),
        backend.token_to_kv_pool.get_key_buffer(0),
        512,
        0.04,
        layer(),
        None,
        torch.empty(0, 131, dtype=torch.int32),
    )
    assert empty.shape == (0, 1, HEADS, 512)
    assert (hopper().calls, count.seen) == ([], 0)
    schedule = backend._compute_flashmla_metadata(torch.empty(0, dtype=torch.int32), 1)
    assert schedule.num_splits.shape == (2,), "an idle rank has no rows to schedule"
    forward = batch(engine, backend, "DECODE", [70])
    slots = select(backend, seen(forward, "DECODE")).long()
    slots[0, 70:100] = slots[0, 0]  # a slot named often weighs as often
    q, out = run(backend, forward, "DECODE", slots)
    assert close(out, expected(backend, q, slots, 0.04))


def test_a_table_wider_than_the_plan_is_refused(
    engine: Any, hopper: Any, hooks: None, count: Count, monkeypatch: Any
) -> None:
    backend = make_backend(engine, monkeypatch)
    forward = batch(engine, backend, "DECODE", [70])
    with pytest.raises(RuntimeError, match="names 193 slots, more than 192"):
        run(backend, forward, "DECODE", torch.zeros(1, 193, dtype=torch.int32))
    assert (hopper().calls, count.seen) == ([], 0)


def test_a_wrong_padding_is_seen(
    engine: Any, hopper: Any, hooks: None, count: Count, monkeypatch: Any
) -> None:
    """Planted: padding with slot 0, as FlashAttention's backend clamps, attends to whatever lies there."""
    pad = torch.nn.functional.pad
    monkeypatch.setattr(
        torch.nn.functional, "pad", lambda table, width, value=0: pad(table, width, value=0)
    )
    backend = make_backend(engine, monkeypatch)
    forward = batch(engine, backend, "DECODE", LENGTHS)
    slots = select(backend, seen(forward, "DECODE"))
    q, out = run(backend, forward, "DECODE", slots)
    assert not close(out, expected(backend, q, slots, 0.04))


def test_graphs(engine: Any, hopper: Any, hooks: None, count: Count, monkeypatch: Any) -> None:
    """Captured sizes keep a schedule each, in memory that a graph may read again, refreshed for every replay."""
    backend = make_backend(engine, monkeypatch)
    backend.init_cuda_graph_state(4, 4 * DRAFT)
    mode = engine.Mode.DECODE
    kept = {}
    for _ in ("capture", "replay", "replay of another size in between"):
        for size in (4, 1, 2):
            lengths = torch.tensor([5, 70, 130, 64][:size])
            backend._apply_cuda_graph_metadata(
                size, torch.arange(size), lengths, lengths, mode, spec_info=None
            )
            metadata = backend.forward_metadata
            flash = metadata.flashmla_metadata
            places = (flash.flashmla_metadata.data_ptr(), flash.num_splits.data_ptr())
            assert kept.setdefault(size, places) == places
            assert flash.num_splits.tolist() == list(range(size + 1))
            assert int(flash.flashmla_metadata[0, 0]) == 192
            forward = SimpleNamespace(forward_mode=mode, out_cache_loc=None)
            slots = torch.full((size, 131), -1, dtype=torch.int32)
            slots[:, :70] = torch.arange(PAGE, PAGE + 70)
            q, out = run(backend, forward, "DECODE", slots)
            assert close(out, expected(backend, q, slots, 0.04))
    assert {call[0] for call in hopper().calls} == {1, 2, 4}


def test_stock_refuses_these_rows(engine: Any, hopper: Any, stock: None, monkeypatch: Any) -> None:
    """Why the feature is there; without the hooks the first sparse forward ends the server."""
    backend = make_backend(engine, monkeypatch)
    forward = batch(engine, backend, "DECODE", LENGTHS)
    slots = select(backend, seen(forward, "DECODE"))
    with pytest.raises(NotImplementedError, match="index_kpool > 1 appends tail tokens"):
        run(backend, forward, "DECODE", slots)
    monkeypatch.setattr(type(backend), "_check_kpool_tail_backend", lambda *args: None)
    with pytest.raises(AssertionError):
        run(backend, forward, "DECODE", slots)


def test_other_backends_are_still_judged_by_stock(
    engine: Any, hopper: Any, hooks: None, monkeypatch: Any
) -> None:
    backend = make_backend(engine, monkeypatch)
    table = torch.zeros(1, 131, dtype=torch.int32)
    backend._check_kpool_tail_backend(table, "flashmla_kv", "decode")
    backend._check_kpool_tail_backend(table, "fa3", "decode")
    with pytest.raises(NotImplementedError):
        backend._check_kpool_tail_backend(table, "flashmla_sparse_q8", "prefill")


# --- A cached prefix --------------------------------------------------------------------------------------------------


@pytest.fixture
def prefix(engine: Any, hopper: Any, monkeypatch: Any) -> Any:
    """A short prompt behind a cached prefix, in the wrapper that hybrid models have; call it for the function of the model."""
    backend = make_backend(engine, monkeypatch)
    hybrid = engine.hybrid.HybridLinearAttnBackend.__new__(engine.hybrid.HybridLinearAttnBackend)
    hybrid.full_attn_backend = backend
    forward = batch(engine, backend, "EXTEND", [70, 5], [64, 0])
    table = backend.req_to_token
    slots = torch.cat([table[0, :70], table[1, :5]])
    object.__setattr__(backend.forward_metadata, "page_table_1_flattened", slots)
    pool = backend.token_to_kv_pool
    for module in (engine.mha, engine.context):
        monkeypatch.setattr(module, "get_token_to_kv_pool", lambda: pool)
        monkeypatch.setattr(module, "get_attn_backend", lambda: hybrid)
    model = engine.mha.DeepseekMHAForwardMixin()
    model.attn_mha, model.kv_lora_rank = SimpleNamespace(layer_id=0), 512
    made = SimpleNamespace(backend=backend, slots=slots)
    made.get = lambda: model._get_mla_kv_buffer_from_fp8_for_dsa(forward)
    return made


def test_stock_cannot_read_a_prefix(prefix: Any, stock: None) -> None:
    with pytest.raises(AttributeError, match="page_table_1_flattened"):
        prefix.get()


def test_prefix(prefix: Any, hooks: None, count: Count, monkeypatch: Any) -> None:
    def by_torch(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return STOCK_FP8_NO_ROPE.unpack(cache.view(torch.uint8)[:, 0])[0][slots.long()]

    monkeypatch.setattr(ours, "dequantize_rows", by_torch)
    latent, rope = prefix.get()
    assert (latent.shape, latent.dtype, latent.is_contiguous()) == ((75, 512), torch.bfloat16, True)
    assert rope.shape == (75, 1, 0)
    assert close(latent, prefix.backend.exact[prefix.slots.long(), 0].float())
    assert count.seen == 1
    object.__setattr__(prefix.backend.forward_metadata, "page_table_1_flattened", None)
    with pytest.raises(RuntimeError, match="no page table"):
        prefix.get()


@pytest.mark.tier("interpret")
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_dequantize_rows_interpreted(ids: torch.dtype) -> None:
    pytest.importorskip("sglang", reason="engine tests need SGLang")
    latent = torch.randn(70, 512, generator=torch.Generator().manual_seed(3))
    rows = STOCK_FP8_NO_ROPE.pack(latent)
    rows[:8] = 0x7F
    cache = rows.view(torch.float8_e4m3fn)[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for slots in ([], [69], [8, 69, 8, 33, 12]):
            got = ours.dequantize_rows(cache, torch.tensor(slots, dtype=ids))
            want = STOCK_FP8_NO_ROPE.unpack(rows)[0][slots]
            # The interpreter cuts off what a GPU rounds into bf16.
            torch.testing.assert_close(got, want, rtol=2**-7, atol=0)


# --- Boot -------------------------------------------------------------------------------------------------------------


def test_sizing_hook_is_in_front_of_every_model(engine: Any, hopper: Any, hooks: None) -> None:
    config = SimpleNamespace(architectures=["LlamaForCausalLM"])
    model = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config), kv_cache_dtype=torch.float8_e4m3fn
    )
    with pytest.raises(SystemExit, match="this model is LlamaForCausalLM"):
        engine.sizing.create_memory_pool_configurator(model)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"heads": 192}, "192 query heads per rank; FlashMLA takes up to 128: raise --tp-size"),
        ({"kv_cache_dim": 512}, "rows are 512 wide, not 528"),
        ({"kv_cache_dim": 288}, "rows are 288 wide, not 528"),
        ({"dtype": torch.bfloat16, "kv_cache_dim": 512}, "rows are 512 wide"),
    ],
)
def test_backend_refuses(
    engine: Any,
    hopper: Any,
    hooks: None,
    count: Count,
    monkeypatch: Any,
    changes: dict[str, Any],
    said: str,
) -> None:
    with pytest.raises(SystemExit, match=said):
        make_backend(engine, monkeypatch, **changes)


def test_backend_refuses_what_it_was_told(
    engine: Any, hopper: Any, count: Count, monkeypatch: Any
) -> None:
    backend = make_backend(engine, monkeypatch)
    for name, value, said in (
        ("dsa_prefill_impl", "flashmla_sparse", "--dsa-prefill-backend flashmla_sparse does not"),
        ("dsa_decode_impl", "fa3", "--dsa-decode-backend fa3 does not"),
        ("real_page_size", 128, "pages of 128 tokens"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(backend, name, value)
            with pytest.raises(SystemExit, match=said):
                ours.after_backend(None, backend)
    monkeypatch.setattr(backend.token_to_kv_pool, "size", 2**31 - PAGE)
    with pytest.raises(SystemExit, match="lower --mem-fraction-static"):
        ours.after_backend(None, backend)


def test_one_line_says_what_is_gained(
    engine: Any, hopper: Any, hooks: None, count: Count, monkeypatch: Any, caplog: Any
) -> None:
    import sglang.srt.utils as utils

    monkeypatch.setattr(utils, "log_info_on_rank0", lambda logger, text: logger.warning(text))
    for _ in ("target", "draft"):
        make_backend(engine, monkeypatch)
    lines = [record.message for record in caplog.records if "528-byte" in record.message]
    # One layer with an index key: 528 + 132 against 1024 + 132 bytes; 576 slots.
    assert lines == [
        "kv4.glm_flash_fp8: 576 tokens in 528-byte rows, 660 bytes per token; "
        "this memory would hold 328 bf16 rows (1156 bytes, 1.752 x)"
    ]


# --- FlashMLA itself, through the same functions of the engine and of ours -------------------------------------------


def flash_path(heads: int) -> Callable[..., torch.Tensor]:
    """The hooked `_forward_flashmla_kv`, see `flashmla_alone`."""
    forward, backend = flashmla_alone(WIDTH, TOPK, KPOOL, heads)

    def attend(
        q: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, plan: Any
    ) -> torch.Tensor:
        args = (q, cache, 512, 0.04, layer(heads), plan, slots)
        return ours.around_attention(forward, backend, *args)[:, 0]

    attend.plan = lambda rows, device: flashmla.plan(backend, rows, device)  # type: ignore[attr-defined]
    return attend


def device_case(
    rows: int, heads: int, device: Any, slots: int = 40 * PAGE
) -> tuple[torch.Tensor, ...]:
    """Queries, a pool whose first page and unnamed rows are NaN, and a table with -1, short rows, an empty row, duplicates."""
    generator = torch.Generator().manual_seed(rows)
    live = torch.randperm(PAGES * PAGE, generator=generator) + slots - PAGES * PAGE
    cache = torch.full((slots, 1, WIDTH), 0x7F, dtype=torch.uint8, device=device)
    cache[live.to(device)] = random_rows(len(live), WIDTH)[1].to(device)
    table = torch.full((rows, TOPK + KPOOL - 1), -1, dtype=torch.int32)
    for row in range(rows):
        named = live[torch.randint(len(live), (row * 37 % (TOPK + KPOOL),), generator=generator)]
        table[row, : len(named)] = named.to(torch.int32)
        table[row, 3::7] = -1  # holes as well as an end
    q = torch.randn(rows, heads, 512, generator=generator).to(torch.bfloat16)
    return q.to(device), cache.view(torch.float8_e4m3fn), table.to(device)


def check_flash(rows: int, heads: int, device: Any, slots: int = 40 * PAGE) -> None:
    q, cache, table = device_case(rows, heads, device, slots)
    attend = flash_path(heads)
    out = attend(q, cache, table, attend.plan(rows, device))  # type: ignore[attr-defined]
    assert out.shape == (rows, heads, 512)
    want = attention(q, cache, table, 0.04)
    empty = (table == -1).all(dim=1)
    assert not out[empty].any()
    error = (out.float() - want).norm() / want.norm().clamp(min=1e-6)
    assert error < 0.01, f"relative error {error:.4f}"


def test_device_path_on_the_stand_in(hopper: Any, count: Count) -> None:
    """The device tests below, on the CPU: what they compute and how they compare is right."""
    check_flash(12, 32, torch.device("cpu"))
    assert hopper().calls == [(12, 64, 192)]


@pytest.mark.tier("device", archs=("sm90",))
@pytest.mark.parametrize("heads", [64, 128, 32])
@pytest.mark.parametrize("rows", [1, 7, 133, 1000])
def test_flashmla(rows: int, heads: int, gpu: torch.device) -> None:
    check_flash(rows, heads, gpu)


@pytest.mark.tier("device", archs=("sm90",))
def test_flashmla_in_turns(gpu: torch.device, monkeypatch: Any) -> None:
    monkeypatch.setattr(flashmla, "ROWS", 64)
    check_flash(150, 64, gpu)


@pytest.mark.tier("device", archs=("sm90",))
def test_flashmla_past_2_31_bytes(gpu: torch.device) -> None:
    slots = (2**31 // WIDTH // PAGE + 30) * PAGE
    assert (slots - PAGES * PAGE) * WIDTH > 2**31
    check_flash(20, 64, gpu, slots)


@pytest.mark.tier("device", archs=("sm90",))
def test_flashmla_in_a_graph(gpu: torch.device) -> None:
    """The plan is made outside, as the engine makes it, and stays right when the inputs change."""
    attend = flash_path(64)
    q, cache, table = device_case(33, 64, gpu)
    plan = attend.plan(33, gpu)  # type: ignore[attr-defined]
    attend(q, cache, table, plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, cache, table, plan)
    for shift in (1, 5):
        q.copy_(q.roll(shift, 0))
        table.copy_(table.roll(shift + 1, 0))
        graph.replay()
        want = attention(q, cache, table, 0.04)
        assert (out.float() - want).norm() < 0.01 * want.norm()


@pytest.mark.tier("device", archs=("sm90",))
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_rows_of_the_engine(ids: torch.dtype, gpu: torch.device) -> None:
    """What stock writes is the row format, and dequantising it gives the format's bits; also past 2^31 bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("sglang", reason="the kernels are SGLang's")
        from sglang.kernels.ops.attention.dsa.quant_k_cache import quantize_k_cache_separate
    latent = torch.randn(1000, 512, device=gpu, generator=torch.Generator(gpu).manual_seed(4))
    latent = latent.to(torch.bfloat16)
    rows, rope = quantize_k_cache_separate(latent[:, None], latent.new_empty(1000, 1, 0))
    assert rope.shape == (1000, 1, 0)
    assert close(STOCK_FP8_NO_ROPE.unpack(rows[:, 0])[0], latent.float())
    scales = STOCK_FP8_NO_ROPE.split(rows[:, 0])["scales"]
    want = STOCK_FP8_NO_ROPE.split(STOCK_FP8_NO_ROPE.pack(latent))["scales"]
    torch.testing.assert_close(scales, want, rtol=1e-6, atol=0)  # its division is not IEEE's
    slots = 2**31 // WIDTH + 2000
    cache = torch.full((slots, 1, WIDTH), 0x7F, dtype=torch.uint8, device=gpu)
    cache[-1000:] = rows
    named = torch.randperm(1000, device=gpu) + slots - 1000
    got = ours.dequantize_rows(cache.view(torch.float8_e4m3fn), named.to(ids))
    assert torch.equal(got, STOCK_FP8_NO_ROPE.unpack(cache[named, 0])[0])
