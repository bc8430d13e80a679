# SPDX-License-Identifier: Apache-2.0
"""`kv4.nvfp4_triton` and models with sliding windows: the engine's own pools of two kinds of layers, its sizing, moves and host copies.

The two calls of the Triton backend are taken with stand-ins for the engine's kernels, over plain buffers that hold what packed rows stand for.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import kv4_nvfp4_harness as shared
import pytest
import torch
from kv4_harness import Count
from kv4_nvfp4_harness import (
    DIM,
    HEADS,
    SCALE,
    SLOTS,
    OnGpu,
    build,
    configurator,
    decode_kernel,
    extend_kernel,
    keys_for,
    layer,
    stands_for,
)

from numinous_kv_cache_4bit.engine import nvfp4_triton as ours

# Fixtures.
counted, formats, installed = shared.counted, shared.formats, shared.installed
SLIDING, FULL = [0, 2, 3], [1, 4]
SLIDING_SLOTS, SLIDING_HEADS, SLIDING_DIM = 50, 3, 64


def sliding_configurator(**changes: Any) -> Any:
    """Of a model like Gemma 4: sliding layers have heads of their own."""
    changes = {
        "is_hybrid_swa": True, "is_hybrid_swa_compress": True, "swa_attention_layer_ids": SLIDING,
        "full_attention_layer_ids": FULL, "swa_head_dim": SLIDING_DIM, "swa_v_head_dim": SLIDING_DIM,
        "hf_text_config": SimpleNamespace(swa_num_key_value_heads=SLIDING_HEADS),
    } | changes  # fmt: skip
    made = configurator(**changes)
    made.layer_info.num_effective_layers = len(SLIDING + FULL)
    return made


@pytest.fixture
def sliding_pool(engine: Any, installed: Any, monkeypatch: Any, formats: Any) -> Any:
    """The pool as the hooked builder makes it, with slots of the full pool that have some in the other one."""
    from sglang.srt import runtime_context

    monkeypatch.setattr(runtime_context, "attention_backends", lambda: ("triton",) * 2)
    pool = engine.configurator.KVCacheConfigurator._build_hybrid_swa_kv_pool(
        sliding_configurator(),
        full_max_total_num_tokens=SLOTS,
        swa_max_total_num_tokens=SLIDING_SLOTS,
        mha_pool_class=engine.pools.MHATokenToKVPool,
    )
    pool.register_mapping(mapping())
    return pool


def mapping() -> torch.Tensor:
    """Where the last slots of the full pool lie in the other one; -1 behind them, as the engine has it."""
    found = torch.zeros(SLOTS + 2, dtype=torch.int64)
    own = torch.randperm(SLIDING_SLOTS, generator=torch.Generator().manual_seed(4)) + 1
    found[SLOTS + 1 - SLIDING_SLOTS : SLOTS + 1] = own
    found[-1] = -1
    return found


def new_of(number: int, seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer."""
    shape = (SLIDING_HEADS, SLIDING_DIM) if number in SLIDING else (HEADS, DIM)
    generator = torch.Generator().manual_seed(seed + number)
    return tuple(torch.randn(2, tokens, *shape, generator=generator))


def fill(engine: Any, pool: Any, loc: torch.Tensor, seed: int = 7) -> None:
    for number in (*SLIDING, *FULL):
        where = engine.pools.KVWriteLoc(loc, mapping()[loc])
        pool.set_kv_buffer(layer(number), where, *new_of(number, seed, len(loc)))


def test_sliding_bytes_are_counted_as_they_are_allocated(
    engine: Any, sliding_pool: Any, formats: Any
) -> None:
    sizing = engine.sizing.HybridSWAPoolConfigurator.__new__(
        engine.sizing.HybridSWAPoolConfigurator
    )
    sizing._full_layers_num, sizing._swa_layers_num = len(FULL), len(SLIDING)
    sizing._swa_full_tokens_ratio, sizing._draft_cell_size = 0.5, 0
    sizing._draft_full_layers_num = sizing._draft_swa_layers_num = 0
    sizing._draft_swa_full_layers_num = 0
    ours.after_sliding_sizing(None, sizing, sliding_configurator())
    sixteenths = 16 + 9 if formats[0] == "fp8" else 9 + 9
    full = HEADS * DIM * sixteenths // 16
    sliding = SLIDING_HEADS * SLIDING_DIM * sixteenths // 16
    assert (sizing._full_per_token, sizing._swa_per_token) == (full, sliding)
    assert sizing._cell_size == full * len(FULL) + 0.5 * sliding * len(SLIDING)
    allocated = 0
    for pool in (sliding_pool.full_kv_pool, sliding_pool.swa_kv_pool):
        lists = pool.k_buffer, pool.v_buffer, pool.k_scale_buffer, pool.v_scale_buffer, pool.shadow
        allocated += sum(x.untyped_storage().nbytes() for buffers in lists for x in buffers)
    assert allocated == sum(sliding_pool.get_kv_size_bytes())
    assert allocated == full * len(FULL) * (SLOTS + 1) + sliding * len(SLIDING) * (SLIDING_SLOTS + 1)  # fmt: skip


def attend(pool: Any, number: int, rows: int, kernel: Any, decode: Any, buffers: Any = None) -> list[torch.Tensor]:  # fmt: skip
    """A layer's extend and decode through two kernels, over ids of the layer's pool."""
    sliding = number in SLIDING
    prefixes, new = [7, 0, 12, 5], [3, 4, 1, 2]
    kv = torch.tensor([0, *prefixes]).cumsum(0).int()
    qo = torch.tensor([0, *new]).cumsum(0).int()
    ids = SLOTS - torch.randperm(SLIDING_SLOTS, generator=torch.Generator().manual_seed(9))[: int(kv[-1])]  # fmt: skip
    ids = mapping()[ids] if sliding else ids
    k, v = new_of(number, 90, sum(new))
    heads = 2 * k.shape[1]
    q = torch.randn(sum(new), heads, k.shape[2], generator=torch.Generator().manual_seed(3))
    offsets = torch.tensor([3, 0, 9, 1]) if sliding else None
    extended, decoded = torch.full_like(q, torch.nan), torch.full_like(q[:4], torch.nan)
    rest = (None, True, None, max(new), 1.0, 1.0, SCALE)
    buffers = buffers or (pool.get_key_buffer(number), pool.get_value_buffer(number))
    kernel(q, k, v, extended, *buffers, qo, kv, ids, *rest, window_kv_offsets=offsets, page_size=1)
    rest = (kv, ids, "logits", "lse", "splits", 8, SCALE, 1.0, 1.0)
    kv[2:] += 1  # no empty list
    decode(q[:4], *buffers, decoded, *rest, page_size=1, logit_cap=0.0, sinks=None)
    return [extended, decoded]


def offsets_kernel(*of: Any, window_kv_offsets: Any, **named: Any) -> None:
    """`extend_kernel`, which also moves what it gives by each request's offset."""
    extend_kernel(*of, window_kv_offsets=None, **named)
    out, starts = of[3], of[6].tolist()
    for request in range(len(starts) - 1):
        if window_kv_offsets is not None:
            out[starts[request] : starts[request + 1]] += window_kv_offsets[request]


def exact_buffers(engine: Any, number: int, formats: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What the pool of a layer holds after `fill`, as plain buffers."""
    loc = torch.arange(1, SLOTS + 1)
    k, v = new_of(number, 7, SLOTS)
    slots = mapping()[loc] if number in SLIDING else loc
    keep = slots > 0
    found = []
    for x in (keys_for(k, *formats), stands_for(v, formats[1])):
        buffer = torch.full((len(slots) + 1, *x.shape[1:]), torch.nan)
        buffer[slots[keep]] = x[keep]
        found.append(buffer)
    return found[0], found[1]


@pytest.mark.parametrize("rows", [8, 10_000])
@pytest.mark.parametrize("number", [0, 1, 3, 4])
def test_sliding_and_full_layers_equal_plain_buffers(
    number: int, rows: int, engine: Any, sliding_pool: Any, formats: Any, counted: Count
) -> None:
    fill(engine, sliding_pool, torch.arange(1, SLOTS + 1))
    with sliding_pool.attending(number, None, None):
        got = attend(
            sliding_pool, number, rows,
            ours.PackedPrefix(sliding_pool, offsets_kernel, rows), ours.PackedDecode(sliding_pool, decode_kernel),
        )  # fmt: skip
    want = attend(sliding_pool, number, rows, offsets_kernel, decode_kernel, exact_buffers(engine, number, formats))  # fmt: skip
    assert all(bool(x.isfinite().all()) for x in want)
    assert all(map(torch.equal, got, want))
    assert counted.seen > 0
    with pytest.raises(RuntimeError, match="outside of attention"):
        sliding_pool.decoded(torch.tensor([1]))


@pytest.mark.parametrize("fault", ["ids of the full pool", "another layer"])
def test_sliding_faults_are_seen(
    fault: str, engine: Any, sliding_pool: Any, formats: Any, monkeypatch: Any
) -> None:
    if fault == "another layer":
        sliding_pool.layers_mapping[2] = (2, True)
    else:
        from numinous_kv_cache_4bit.engine import nvfp4_pool

        unwrap = nvfp4_pool.unwrap_write_loc
        monkeypatch.setattr(nvfp4_pool, "unwrap_write_loc", lambda given: [unwrap(given)[0]] * 3)
    fill(engine, sliding_pool, torch.arange(1, SLOTS + 1))
    with sliding_pool.attending(2, None, None):
        got = attend(
            sliding_pool, 2, 99,
            ours.PackedPrefix(sliding_pool, offsets_kernel), ours.PackedDecode(sliding_pool, decode_kernel),
        )  # fmt: skip
    want = attend(sliding_pool, 2, 99, offsets_kernel, decode_kernel, exact_buffers(engine, 2, formats))  # fmt: skip
    assert not all(map(torch.equal, got, want))


def test_sliding_decode_on_a_gpu_reads_the_pool_of_the_layer(
    sliding_pool: Any, monkeypatch: Any
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(ours, "decode_attention_nvfp4", lambda *of, **named: calls.append(of))
    decode = ours.PackedDecode(sliding_pool, pytest.fail)
    given = ("indptr", "indices", "logits", "lse", "splits", 8, SCALE, 1.0, 1.0)
    for number, pool, at in ((2, sliding_pool.swa_kv_pool, 1), (4, sliding_pool.full_kv_pool, 1)):
        with sliding_pool.attending(number, None, None):
            decode(OnGpu(), None, None, "o", *given, page_size=1)
        assert all(one is other for one, other in zip(calls[-1][1:5], pool._of(at), strict=True))


def test_sliding_copies_carry_scales(engine: Any, sliding_pool: Any, formats: Any) -> None:
    """Moves and host copies of slots of both pools, by the engine's own code."""
    source = torch.arange(SLOTS - 8, SLOTS + 1)
    moved, loaded = source - 10, source - 20
    fill(engine, sliding_pool, source)
    sliding_pool.full_kv_pool.cpu_offloading_chunk_size = 4
    sliding_pool.swa_kv_pool.cpu_offloading_chunk_size = 4
    sliding_pool.move_kv_cache(moved, source)
    sliding_pool.load_cpu_copy(sliding_pool.get_cpu_copy(source), loaded)
    for number in (*SLIDING, *FULL):
        k, v = new_of(number, 7, len(source))
        for slots in (source, moved, loaded):
            with sliding_pool.attending(number, None, None):
                keys, found = sliding_pool.decoded(mapping()[slots] if number in SLIDING else slots)
            assert torch.equal(keys, keys_for(k, *formats))
            assert torch.equal(found, stands_for(v, formats[1]))


def test_what_sliding_pools_refuse(engine: Any, sliding_pool: Any, monkeypatch: Any) -> None:
    with pytest.raises(RuntimeError, match="without its ids"):
        sliding_pool.set_kv_buffer(layer(0), torch.tensor([1]), *new_of(0, 1, 1))
    with pytest.raises(RuntimeError, match="disaggregation"):
        sliding_pool.get_contiguous_buf_infos()
    with pytest.raises(RuntimeError, match="scales of a checkpoint"):
        sliding_pool.set_kv_buffer(layer(1), torch.tensor([1]), *new_of(1, 1, 1), 0.5, 0.5)
    assert sliding_pool.get_key_buffer(0).device.type == "meta"
    sizes = {"full_max_total_num_tokens": 8, "swa_max_total_num_tokens": 8}
    for name in ("post_capture_kv_active", "is_hybrid_swa_mtp_draft"):
        with pytest.raises(SystemExit, match="another kind"):
            ours.around_sliding_pool(build, sliding_configurator(**{name: True}), **sizes)
    lines: list[str] = []
    monkeypatch.setattr(
        "sglang.srt.utils.log_info_on_rank0", lambda logger, line: lines.append(line)
    )
    ours.after_pools(sliding_pool, sliding_configurator())
    assert f"{SLOTS} tokens of" in lines[0]
    assert f"{SLIDING_SLOTS} tokens of" in lines[0]
    assert "in 3 sliding layers" in lines[0]
