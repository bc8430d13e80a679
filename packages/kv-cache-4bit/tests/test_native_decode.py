# SPDX-License-Identifier: Apache-2.0
"""Decode by `sparse_mla_decode` in the engine's own classes (`harness`): `kv4.glm_dsa`, `kv4.glm_flash` with their option, and
`kv4.mla_decode_fp8`, for GLM-5.3-Flash over `kv4.glm_flash_fp8`. The kernel is its reference; ``--tier device`` runs it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import kv4_harness as harness
import pytest
import torch
from kv4_harness import (
    PAGE,
    PAGES,
    SCALE,
    TOPK,
    Count,
    NativeKernel,
    attention,
    batch,
    close,
    layer,
    make_pool,
    random_rows,
    run,
    seen,
    select,
)

from numinous_kv_cache_4bit.engine import (
    glm_dsa,
    glm_flash,
    glm_flash_fp8,
    mla_decode_fp8,
    mla_dense_native,
    native,
    rows,
    scratch,
)
from numinous_kv_cache_4bit.features import features
from numinous_kv_cache_4bit.hooks import glm_dsa as glm_dsa_hooks
from numinous_kv_cache_4bit.hooks import glm_flash as glm_flash_hooks
from numinous_kv_cache_4bit.hooks import glm_flash_fp8 as glm_flash_fp8_hooks
from numinous_kv_cache_4bit.hooks import mla_decode_fp8 as mla_decode_fp8_hooks
from numinous_kv_cache_4bit.kernels import sparse_mla_decode
from numinous_kv_cache_4bit.options import DECODE
from numinous_tooling.formats import KV4, KV4_NO_ROPE, STOCK_FP8, STOCK_FP8_NO_ROPE
from numinous_tooling.patching.flags import enabled

GLM, FLASH = "GlmMoeDsaForCausalLM", "Glm5NextForConditionalGeneration"
CASES: dict[str, Any] = {
    "glm_dsa": ((glm_dsa_hooks.FEATURE,), glm_dsa, KV4, GLM, 1),
    "glm_flash": ((glm_flash_hooks.FEATURE,), glm_flash, KV4_NO_ROPE, FLASH, 4),
    "fp8": ((mla_decode_fp8_hooks.FEATURE,), mla_decode_fp8, STOCK_FP8, GLM, 1),
    "fp8_flash": (
        (glm_flash_fp8_hooks.FEATURE, mla_decode_fp8_hooks.FEATURE),
        mla_decode_fp8,
        STOCK_FP8_NO_ROPE,
        FLASH,
        4,
    ),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are small: threads wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=list(CASES))
def case(engine: Any, request: Any) -> Iterator[Any]:
    """A cache that native decode reads, with the hooks of its features in place."""
    from numinous_tooling.patching.engine import installed_engine
    from numinous_tooling.patching.hooks import install

    declared, ours, row, architecture, kpool = CASES[request.param]
    installation = install(declared, "scheduler", installed_engine())
    try:
        yield SimpleNamespace(
            ours=ours,
            row=row,
            architecture=architecture,
            kpool=kpool,
            packed=row in (KV4, KV4_NO_ROPE),
        )
    finally:
        installation.undo()


@pytest.fixture
def count(
    case: Any, hopper: Any, reference_kernels: None, native_kernel: NativeKernel, monkeypatch: Any
) -> Count:
    """The feature's counter; option, kernel and stand-ins are in place."""
    counter = Count()
    monkeypatch.setattr(case.ours.ROWS, "count", counter)
    monkeypatch.setattr(glm_flash_fp8.ROWS, "count", Count())
    monkeypatch.setattr(native, "_proven", set())
    monkeypatch.setattr(native, "PROBE", 64)
    if case.packed:
        monkeypatch.setattr(case.ours.ROWS, "native", False)
        monkeypatch.setenv(DECODE[case.ours.ROWS.feature].name, "native")
    return counter


def make_backend(engine: Any, monkeypatch: Any, case: Any, **of: Any) -> Any:
    backend = harness.make_backend(
        engine,
        monkeypatch,
        **{"row": case.row, "architecture": case.architecture, "kpool": case.kpool} | of,
    )
    return backend


def exactly(backend: Any, q: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The specification over the pool's own rows, bf16 [rows, heads, 512]."""
    pool = backend.token_to_kv_pool.kv_buffer[0].view(torch.uint8)[:, 0]
    made = sparse_mla_decode.reference(q[:, None], pool, sm_scale=SCALE, index=slots[:, None])
    return made["out"][:, 0].to(torch.bfloat16)


def by_scratch(
    case: Any, backend: Any, forward: Any, mode: str, slots: torch.Tensor, heads: int, monkeypatch: Any
) -> torch.Tensor:  # fmt: skip
    """The same forward by the path that native decode replaces."""
    with monkeypatch.context() as off:
        off.setattr(native, "takes", lambda *of: False)
        return run(backend, forward, mode, slots, heads)[1]


LENGTHS = [3, 64, 1, 200]  # below and above top-k


# --- Attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [8, 16, 64, 128])
def test_decode(
    engine: Any, hopper: Any, case: Any, count: Count, native_kernel: NativeKernel, monkeypatch: Any, heads: int
) -> None:  # fmt: skip
    """Heads of every rank as they are, tables as wide as the indexer's; FlashMLA and its scratch stay out of it."""
    backend = make_backend(engine, monkeypatch, case, heads=heads)
    native_kernel.calls.clear()
    forward = batch(engine, backend, "DECODE", LENGTHS)
    slots = select(backend, seen(forward, "DECODE"))
    q, out = run(backend, forward, "DECODE", slots, heads)
    assert native_kernel.calls == [(4, 1, heads, TOPK + case.kpool - 1)]
    assert hopper().calls == []
    assert count.seen == 1
    assert torch.equal(out, exactly(backend, q, slots))
    other = by_scratch(case, backend, forward, "DECODE", slots, heads, monkeypatch)
    assert [call[0] for call in hopper().calls] == [4]
    # FlashMLA reads FP8 rows as they are; 4-bit ones are rounded to E4M3 on their way there.
    assert close(out, other.float(), 0.04 if case.packed else 0.005)
    assert close(out, other.float(), 0.005) is not case.packed


@pytest.mark.parametrize("draft", [4, 8])
def test_verification(
    engine: Any, hopper: Any, case: Any, count: Count, native_kernel: NativeKernel, monkeypatch: Any, draft: int
) -> None:  # fmt: skip
    """q_len 4, and the most that go native; every row has a table of its own."""
    monkeypatch.setattr(harness, "DRAFT", draft)
    backend = make_backend(engine, monkeypatch, case)
    backend.speculative_num_draft_tokens = draft
    forward = batch(engine, backend, "TARGET_VERIFY", [3, 64, 130])
    slots = select(backend, seen(forward, "TARGET_VERIFY"))
    q, out = run(backend, forward, "TARGET_VERIFY", slots)
    assert native_kernel.calls[-1] == (3 * draft, 1, harness.HEADS, TOPK + case.kpool - 1)
    assert hopper().calls == []
    assert torch.equal(out, exactly(backend, q, slots))
    # A row sees one token more than the one before it.
    assert (slots >= 0).sum(dim=1)[: draft // 2].tolist() == list(range(4, 4 + draft // 2))


def test_a_draft_catches_up(
    engine: Any, hopper: Any, case: Any, count: Count, monkeypatch: Any
) -> None:
    draft = harness.DRAFT
    backend = make_backend(engine, monkeypatch, case)
    forward = batch(engine, backend, "DRAFT_EXTEND_V2", [10, 133], [10 - draft, 133 - draft])
    slots = select(backend, seen(forward, "EXTEND"))
    q, out = run(backend, forward, "DRAFT_EXTEND_V2", slots)
    assert (hopper().calls, count.seen) == ([], 1)
    assert torch.equal(out, exactly(backend, q, slots))


@pytest.mark.parametrize(
    ("mode", "lengths", "prefixes", "goes_native"),
    [
        ("EXTEND", [1, 9], [0, 0], False),
        ("EXTEND", [5, 130], [4, 128], False),  # one token of a request, two of another
        ("EXTEND", [5, 130], [4, 129], True),  # a decode in all but name
        ("TARGET_VERIFY", [3, 64], [], False),  # nine tokens a request
    ],
)
def test_which_batches_go_native(
    engine: Any,
    hopper: Any,
    case: Any,
    count: Count,
    native_kernel: NativeKernel,
    monkeypatch: Any,
    mode: str,
    lengths: list[int],
    prefixes: list[int],
    goes_native: bool,
) -> None:
    """Prefill goes where it went."""
    monkeypatch.setattr(harness, "DRAFT", 9)
    backend = make_backend(engine, monkeypatch, case)
    backend.speculative_num_draft_tokens = 9
    native_kernel.calls.clear()
    forward = batch(engine, backend, mode, lengths, prefixes)
    slots = select(backend, seen(forward, mode))
    q, out = run(backend, forward, mode, slots)
    assert (len(native_kernel.calls), len(hopper().calls)) == (goes_native, not goes_native)
    assert close(out, attention(q, backend.token_to_kv_pool.kv_buffer[0], slots, SCALE))


def test_padded_rows_duplicates_and_wide_ids(
    engine: Any, hopper: Any, case: Any, count: Count, monkeypatch: Any
) -> None:
    """More rows than the metadata counts, the last ones without a slot; an id beyond the pool; a slot named often; no rows at all."""
    backend = make_backend(engine, monkeypatch, case)
    forward = batch(engine, backend, "DECODE", [70, 7])
    slots = select(backend, seen(forward, "DECODE"))
    slots = torch.nn.functional.pad(slots, (0, 0, 0, 3), value=-1)
    slots = slots.long()
    slots[0, 70:100] = slots[0, 0]
    slots[1, 3] = PAGE * PAGES + 5
    q, out = run(backend, forward, "DECODE", slots)
    assert not out[2:].any()
    slots[1, 3] = -1
    assert torch.equal(out, exactly(backend, q, slots))
    args = (backend.token_to_kv_pool.get_key_buffer(0), 512, SCALE, layer(rope=case.row.rope_dim))
    # Stock's own code, for FP8 rows of GLM-5.3, divides by the number of rows that there are not.
    if case.packed or case.kpool > 1:
        empty = backend._forward_flashmla_kv(q[:0], *args, backend.forward_metadata, slots[:0])
        assert empty.shape == (0, 1, harness.HEADS, 512)
    assert (hopper().calls, count.seen) == ([], 1)


def test_a_token_is_written_before_it_is_read(
    engine: Any, case: Any, count: Count, monkeypatch: Any
) -> None:
    """Through the engine's forward, with the padding that a graph has: slot 0 takes it and is not read."""
    if not case.packed:
        pytest.skip("stock's writer of FP8 rows needs a GPU")
    backend = make_backend(engine, monkeypatch, case)
    pool = backend.token_to_kv_pool
    forward = batch(engine, backend, "DECODE", [70, 130])
    last = backend.req_to_token[[0, 1], [69, 129]].long()
    kept = pool.kv_buffer[0].clone()
    pool.kv_buffer[0][last] = 0x7F
    forward.out_cache_loc = torch.cat([last, torch.zeros(1, dtype=torch.int64)])
    exact = torch.cat([backend.exact[last], torch.full_like(backend.exact[:1], 9.0)])
    slots = select(backend, seen(forward, "DECODE"))
    slots = torch.nn.functional.pad(slots, (0, 0, 0, 1), value=-1)
    q, out = run(backend, forward, "DECODE", slots, written=(exact[..., :512], exact[..., 512:]))
    assert torch.equal(pool.kv_buffer[0], kept)
    assert torch.equal(out, exactly(backend, q, slots))


# --- Graphs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "each"), [("DECODE", 1), ("TARGET_VERIFY", 4)])
def test_graphs(
    engine: Any, hopper: Any, case: Any, count: Count, native_kernel: NativeKernel, monkeypatch: Any, name: str, each: int
) -> None:  # fmt: skip
    """Captured with empty tables, replayed with others and with padding; what is launched depends on shapes alone."""
    monkeypatch.setattr(harness, "DRAFT", 4)
    backend = make_backend(engine, monkeypatch, case)
    backend.speculative_num_draft_tokens = 4
    backend.init_cuda_graph_state(4, 16)
    mode = getattr(engine.Mode, name)
    calls: dict[int, set[Any]] = {}
    for replay in (False, True):
        for size in (4, 1, 2):
            lengths = torch.tensor([5, 70, 130, 1][:size])
            backend._apply_cuda_graph_metadata(
                size, torch.arange(size), lengths, lengths, mode, spec_info=None
            )
            forward = SimpleNamespace(forward_mode=mode, out_cache_loc=None)
            slots = torch.full((size * each, TOPK + case.kpool - 1), -1, dtype=torch.int32)
            if replay:
                slots[: size * each - 1, :60] = torch.arange(PAGE, PAGE + 60)
            q, out = run(backend, forward, name, slots)
            assert torch.equal(out, exactly(backend, q, slots))
            assert not out[-1].any(), "the last request is padding"
            calls.setdefault(size, set()).add(native_kernel.calls[-1])
    assert {size: len(found) for size, found in calls.items()} == {4: 1, 1: 1, 2: 1}
    assert hopper().calls == []


def test_nothing_waits_for_the_device(
    engine: Any, case: Any, count: Count, monkeypatch: Any
) -> None:
    """Between the engine and the kernel no value of a tensor is looked at, and nothing is copied."""
    backend = make_backend(engine, monkeypatch, case)
    forward = batch(engine, backend, "DECODE", LENGTHS)
    slots = select(backend, seen(forward, "DECODE"))
    cache = backend.token_to_kv_pool.get_key_buffer(0)
    q = torch.zeros(4, harness.HEADS, 512 + case.row.rope_dim, dtype=torch.bfloat16)
    given: dict[str, Any] = {}

    def shapes_only(q: torch.Tensor, pool: torch.Tensor, **of: Any) -> Any:
        given.update(q=q, pool=pool, **of)
        out = q.new_empty((*q.shape[:3], 512))
        return sparse_mla_decode.Decoded(out, out[..., 0].float())

    def looked(*of: Any, **more: Any) -> Any:
        raise AssertionError("a value was looked at")

    monkeypatch.setattr(native, "sparse_mla_decode", shapes_only)
    names = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")  # fmt: skip
    with monkeypatch.context() as watched:
        for name in names:
            watched.setattr(torch.Tensor, name, looked)
        args = (cache, 512, SCALE, layer(rope=case.row.rope_dim), backend.forward_metadata, slots)
        out = backend._forward_flashmla_kv(q, *args)
    assert out.shape == (4, 1, harness.HEADS, 512)
    places = [(q, given["q"]), (cache, given["pool"]), (slots, given["index"])]
    assert all(a.data_ptr() == b.data_ptr() for a, b in places)
    assert given["sm_scale"] == SCALE
    assert "latent_scale" not in given
    assert "sink" not in given


# --- Planted faults: each is seen -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["scale", "layer", "halves of q", "-1 as slot 0", "rows shifted"])
def test_a_fault_is_seen(
    engine: Any, case: Any, count: Count, native_kernel: NativeKernel, monkeypatch: Any, fault: str
) -> None:
    pool = make_pool(engine, case.row, kpool=case.kpool, layers=2)
    pool.kv_buffer[1].copy_(random_rows(PAGES * PAGE, case.row.width)[1].flip(0))
    backend = make_backend(engine, monkeypatch, case, pool=pool)
    forward = batch(engine, backend, "DECODE", LENGTHS)
    slots = select(backend, seen(forward, "DECODE"))

    def wrong(
        q: torch.Tensor, cache: torch.Tensor, *, sm_scale: float, index: torch.Tensor, **more: Any
    ) -> Any:
        if fault == "scale":
            sm_scale *= 1.5
        elif fault == "layer":
            cache = pool.kv_buffer[1].view(torch.uint8)
        elif fault == "halves of q":
            q = q.roll(q.shape[-1] // 2, -1)
        elif fault == "-1 as slot 0":
            index = index.clamp(min=0)
        else:
            index = index.roll(1, 0)
        return native_kernel(q, cache, sm_scale=sm_scale, index=index, **more)

    monkeypatch.setattr(native, "sparse_mla_decode", wrong)
    q, out = run(backend, forward, "DECODE", slots)
    assert not torch.equal(out, exactly(backend, q, slots))
    assert not close(
        out, by_scratch(case, backend, forward, "DECODE", slots, 8, monkeypatch).float()
    )


# --- Boot -----------------------------------------------------------------------------------------------------------


def test_scratch_is_the_default(
    engine: Any, hopper: Any, case: Any, count: Count, native_kernel: NativeKernel, monkeypatch: Any
) -> None:
    """Until a GPU has measured the other."""
    if not case.packed:
        pytest.skip("of features with the option")
    monkeypatch.delenv(DECODE[case.ours.ROWS.feature].name)
    backend = make_backend(engine, monkeypatch, case)
    forward = batch(engine, backend, "DECODE", LENGTHS)
    run(backend, forward, "DECODE", select(backend, seen(forward, "DECODE")))
    assert (len(hopper().calls), native_kernel.calls) == (1, [])


def test_the_kernel_is_proven_once(
    engine: Any, case: Any, count: Count, native_kernel: NativeKernel, monkeypatch: Any, caplog: Any
) -> None:
    """Before graphs are captured, for each number of heads, and said."""
    import sglang.srt.utils as utils

    monkeypatch.setattr(utils, "log_info_on_rank0", lambda logger, text: logger.warning(text))
    for heads in (8, 8, 64):  # a target, its draft, another model's
        make_backend(engine, monkeypatch, case, heads=heads)
    assert native_kernel.calls == [
        (1, 1, heads, native.PROBE) for heads in (8, 64) for _ in native.PROBE_SPLITS
    ]
    lines = [record.message for record in caplog.records if "where they lie" in record.message]
    name = case.ours.ROWS.feature
    assert lines == [
        f"{name}: decode reads {case.row.width}-byte rows where they lie, {heads} heads a rank"
        for heads in (8, 64)
    ]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raises", "does not run here .no binary for sm_90a., .*set|does not run here .no binary for sm_90a.; "),
        ("neighbour", "answers wrongly on this GPU .off by"),
        ("nan", "answers wrongly on this GPU .off by nan"),
    ],
)  # fmt: skip
def test_a_kernel_that_fails_ends_the_process(
    engine: Any, case: Any, count: Count, native_kernel: NativeKernel, monkeypatch: Any, fault: str, said: str
) -> None:  # fmt: skip
    def broken(q: torch.Tensor, pool: torch.Tensor, *, index: torch.Tensor, **of: Any) -> Any:
        if fault == "raises":
            raise RuntimeError("no binary for sm_90a\nmore lines")
        made = native_kernel(q, pool, index=index, **of)
        return made._replace(out=made.out.roll(1, -1) if fault == "neighbour" else made.out * torch.nan)  # fmt: skip

    monkeypatch.setattr(native, "sparse_mla_decode", broken)
    with pytest.raises(SystemExit, match=said) as error:
        make_backend(engine, monkeypatch, case)
    assert "\n" not in str(error.value)
    mend = "_DECODE=scratch" if case.packed else "switch the feature off"
    assert mend in str(error.value)


@pytest.mark.parametrize(
    "broken", ["parts", "cluster", "parts by the other", "cluster by the other"]
)
def test_every_way_is_proven_at_boot(
    engine: Any, case: Any, count: Count, native_kernel: NativeKernel, monkeypatch: Any, broken: str
) -> None:  # fmt: skip
    """Where more tokens take another kernel than one does, that one runs too; each joins by parts and by a cluster."""
    fault = {"parts": 3, "cluster": 2}[broken.split()[0]], "packed" if "other" in broken else None

    def kernel(q: Any, pool: Any, *, splits: int, impl: Any, **of: Any) -> Any:
        made = native_kernel(q, pool, splits=splits, impl=impl, **of)
        return made._replace(out=made.out + ((splits, impl) == fault))

    monkeypatch.setattr(native, "sparse_mla_decode", kernel)
    monkeypatch.setattr(native, "other_impl", lambda row, heads, device: "packed")
    with pytest.raises(SystemExit, match="answers wrongly"):
        make_backend(engine, monkeypatch, case)


@pytest.mark.parametrize("fault", ["scores", "heads", "rope"])
def test_wrong_scores_and_heads_are_seen_at_boot(
    engine: Any, case: Any, count: Count, native_kernel: NativeKernel, monkeypatch: Any, fault: str
) -> None:
    def broken(q: torch.Tensor, pool: torch.Tensor, **of: Any) -> Any:
        rope = torch.cat([q[..., :512], q[..., 512:].roll(1, -1)], dim=-1)
        q = {"scores": q * 0, "heads": q.roll(1, 2), "rope": rope}[fault]
        return native_kernel(q, pool, **of)

    if fault == "rope" and not case.row.rope_dim:
        pytest.skip("of rows with a rope part")

    monkeypatch.setattr(native, "sparse_mla_decode", broken)
    with pytest.raises(SystemExit, match="answers wrongly"):
        make_backend(engine, monkeypatch, case)


def test_a_row_read_beside_the_named_ones_is_seen_at_boot(
    engine: Any, case: Any, count: Count, native_kernel: NativeKernel, monkeypatch: Any
) -> None:
    monkeypatch.setattr(
        native, "sparse_mla_decode",
        lambda q, pool, *, index, **of: native_kernel(q, pool, index=index.clamp(min=0), **of),
    )  # fmt: skip
    with pytest.raises(SystemExit, match="answers wrongly"):
        make_backend(engine, monkeypatch, case)


# --- Memory ---------------------------------------------------------------------------------------------------------


def test_bytes_are_the_pool_and_no_scratch(
    engine: Any, case: Any, count: Count, monkeypatch: Any
) -> None:
    """Planned bytes are allocated bytes, with the option as without; decode and verification allocate no scratch, prefill does."""
    made: list[int] = []
    fresh = scratch.ScratchRows._scratch
    monkeypatch.setattr(
        scratch.ScratchRows, "_scratch",
        lambda self, rows, device: (made.append(rows), fresh(self, rows, device))[1],
    )  # fmt: skip
    backend = make_backend(engine, monkeypatch, case)
    pool = backend.token_to_kv_pool
    assert pool.get_kv_size_bytes() == PAGES * PAGE * rows.bytes_per_token(case.row.width, 1, 1)
    for mode, lengths in (("DECODE", LENGTHS), ("TARGET_VERIFY", [3, 64])):
        forward = batch(engine, backend, mode, lengths)
        run(backend, forward, mode, select(backend, seen(forward, mode)))
    assert made == []
    forward = batch(engine, backend, "EXTEND", [60], [0])
    run(backend, forward, "EXTEND", select(backend, seen(forward, "EXTEND")))
    assert made == ([60] if case.packed else [])


# --- Hooks over one function ----------------------------------------------------------------------------------------


def test_native_lies_around_the_feature_that_pads() -> None:
    """The order that the boot code installs in: the last one of a target is the outermost."""
    on = enabled(
        features(), {"NUMINOUS_KV4_MLA_DECODE_FP8": "1", "NUMINOUS_KV4_GLM_FLASH_FP8": "1"}
    )
    assert [feature.id for feature in on] == ["kv4.glm_flash_fp8", "kv4.mla_decode_fp8"]
    assert list(CASES["fp8_flash"][0]) == on


# --- The kernel itself ----------------------------------------------------------------------------------------------


@pytest.mark.tier("interpret")
@pytest.mark.parametrize("width", [352, 528])
def test_the_adapter_calls_the_kernel_as_it_is(width: int) -> None:
    """The public function with the engine's shapes, sparse and dense."""
    row = sparse_mla_decode.row_format_of(width)
    both, packed = random_rows(PAGES * PAGE, width)
    cache = packed.clone()
    cache[:PAGE] = 0x7F
    table = torch.full((2, 37), -1, dtype=torch.int64)
    table[0, ::2] = torch.arange(100, 119)
    q = both[:16].view(2, 8, -1)
    held = cache.view(torch.float8_e4m3fn) if row.stock else cache
    out = native.attend(q, held, table, SCALE)
    assert (out.shape, out.is_contiguous()) == ((2, 1, 8, 512), True)
    of = {"sm_scale": SCALE, "index": table[:, None]}
    want = sparse_mla_decode.reference(q[:, None], cache[:, 0], **of)["out"]
    assert close(out, want.float(), 0.005)
    assert not out[1].any()
    pages, lengths = torch.tensor([[4, 1, 9]], dtype=torch.int32), torch.tensor([70]).int()
    out = native.attend_pages(q[None], cache, pages, lengths, SCALE, 2)
    of = {"sm_scale": SCALE, "page_table": pages, "lengths": lengths}
    assert close(out, sparse_mla_decode.reference(q[None], cache[:, 0], **of)["out"].float(), 0.005)


def captured(run: Callable[[], torch.Tensor], gpu: torch.device) -> tuple[torch.Tensor, Any]:
    """The output of a captured call, and its replay; on a CPU, a call again into the same output."""
    out = run()
    if gpu.type == "cpu":
        return out, lambda: out.copy_(run())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return out, graph.replay


def check_decode(width: int, heads: int, sizes: list[tuple[int, int]], gpu: torch.device) -> None:
    """Rows and names as the engine gives them, captured once, replayed with other queries and tables."""
    row = sparse_mla_decode.row_format_of(width)
    cache = random_rows(PAGES * PAGE, width)[1].to(gpu).clone()
    cache[:PAGE] = 0x7F
    held = cache.view(torch.float8_e4m3fn) if row.stock else cache
    generator = torch.Generator().manual_seed(3)
    for count, names in sizes:
        table = torch.randint(PAGE, PAGES * PAGE, (count, names), generator=generator).int()
        table[:, 5::7] = -1
        table[count // 2, count:] = -1
        q = torch.randn(count, heads, 512 + row.rope_dim, generator=generator)
        q, table = q.to(gpu, torch.bfloat16), table.to(gpu)
        out, replay = captured(lambda q=q, table=table: native.attend(q, held, table, SCALE), gpu)  # type: ignore[misc]
        for shift in (0, 1):
            table.copy_(table.roll(shift, 1))
            q.copy_(q.roll(shift, 0))
            replay()
            of = {"sm_scale": SCALE, "index": table[:, None]}
            want = sparse_mla_decode.reference(q[:, None], cache[:, 0], **of)["out"]
            assert close(out, want.float(), 0.01)


def check_pages(heads: int, queries: int, width: int, gpu: torch.device) -> None:
    """Dense: captured over a table of so many pages, replayed with other lengths and pages."""
    cache = random_rows(PAGES * PAGE, KV4.width)[1].to(gpu).clone()
    cache[:PAGE] = 0x7F
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(3, queries, heads, 576, generator=generator).to(gpu, torch.bfloat16)
    pages = torch.randint(1, PAGES, (3, width), generator=generator, dtype=torch.int32).to(gpu)
    lengths = torch.tensor([5, 70, 64], dtype=torch.int32, device=gpu)
    splits = mla_dense_native.most_splits(3 * queries, heads, width, gpu)
    given = (q, cache, pages, lengths, SCALE, splits)
    out, replay = captured(lambda: native.attend_pages(*given), gpu)
    for other in ([5, 70, 64], [64 * width, 4, 8], [9, 9, 63 * width]):
        lengths.copy_(torch.tensor(other))
        pages.copy_(pages.roll(1, 1))
        replay()
        of = {"sm_scale": SCALE, "page_table": pages, "lengths": lengths}
        want = sparse_mla_decode.reference(q, cache[:, 0], **of)["out"]
        assert close(out, want.float(), 0.01)


def test_device_tests_on_the_stand_in(native_kernel: NativeKernel) -> None:
    """The device tests below, on the CPU: what they compute and how they compare is right."""
    for width in (352, 528):
        check_decode(width, 8, [(1, 64), (3, 67)], torch.device("cpu"))
    check_pages(16, 4, 2, torch.device("cpu"))
    assert len(native_kernel.calls) == 16


@pytest.mark.tier("device", archs=("sm90",))
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("width", [352, 288, 656, 528])
def test_native_decode_on_the_gpu(width: int, heads: int, gpu: torch.device) -> None:
    check_decode(width, heads, [(1, 2048), (7, 2051), (133, 2048)], gpu)


@pytest.mark.tier("device", archs=("sm90",))
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("queries", [1, 4])
def test_native_decode_of_pages_on_the_gpu(queries: int, heads: int, gpu: torch.device) -> None:
    check_pages(heads, queries, 32, gpu)


@pytest.mark.tier("device", archs=("sm90",))
@pytest.mark.parametrize("heads", [8, 128])
@pytest.mark.parametrize("width", [352, 288, 656, 528])
def test_the_proof_at_boot_on_the_gpu(width: int, heads: int, gpu: torch.device) -> None:
    pytest.importorskip("sglang", reason="the line at boot is logged by SGLang")
    owner: Any = SimpleNamespace(feature="kv4.mla_decode_fp8", refuse=pytest.fail)
    native.prove(owner, heads, width, gpu)


def test_hooked_function_takes_what_the_adapter_names(engine: Any) -> None:
    """Names and order of `_forward_flashmla_kv`'s arguments, which the engine passes by name."""
    stock = inspect.unwrap(engine.dsa.DeepseekSparseAttnBackend._forward_flashmla_kv)
    ours = list(inspect.signature(mla_decode_fp8.around_attention).parameters)
    assert ours == ["original", "backend", *list(inspect.signature(stock).parameters)[1:]]
