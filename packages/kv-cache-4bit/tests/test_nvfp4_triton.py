# SPDX-License-Identifier: Apache-2.0
"""`kv4.nvfp4_triton` in the engine's own classes: sizing, pool, torch_native backend and hooks are real.

The yardstick is stock itself: the same backend over stock's pool, which holds what the packed rows stand for. Outputs are equal bit for
bit. Of the Triton backend, which needs a GPU or the interpreter, the two calls are taken with a stand-in for the engine's kernels.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kv4_nvfp4_harness as shared
import pytest
import torch
from kv4_harness import Count
from kv4_nvfp4_harness import (
    DIM,
    FORMATS,
    HEADS,
    LAYERS,
    QUERY_HEADS,
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
    stock_pool,
    values,
)

from numinous_kv_cache_4bit.engine import nvfp4_triton as ours
from numinous_kv_cache_4bit.hooks.launch import UNCOVERED
from numinous_kv_cache_4bit.hooks.nvfp4_triton import (
    BACKEND_ARGUMENTS,
    BACKENDS,
    FEATURE,
    MORE_UNCOVERED,
    judge,
)
from numinous_kv_cache_4bit.options import (
    CPU_PLATFORM,
    NVFP4_KEYS,
    NVFP4_SCALES,
    NVFP4_TRITON,
)
from numinous_tooling.numerics import (
    decode_e4m3fn,
    encode_e4m3fn,
)
from numinous_tooling.patching.boot import fits
from numinous_tooling.patching.engine import find_engine
from numinous_tooling.patching.serve_command import FIELDS, ServeCommand

# Fixtures.
counted, formats, installed = shared.counted, shared.formats, shared.installed


# --- Engine ---------------------------------------------------------------------------------------------------------


def batch(engine: Any, table: torch.Tensor, mode: str, lengths: list[int], new: list[int]) -> Any:
    """Requests in scattered slots, the last `new` tokens of each are those of this forward."""
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1)) + 1
    loc = []
    for request, (length, count) in enumerate(zip(lengths, new, strict=True)):
        own, slots = slots[:length], slots[length:]
        table[request, :length] = own.int()
        loc.append(own[length - count :])
    return SimpleNamespace(
        forward_mode=getattr(engine.Mode, mode), seq_lens=torch.tensor(lengths),
        req_pool_indices=torch.arange(len(lengths)), out_cache_loc=torch.cat(loc), encoder_lens=None,
        extend_seq_lens=torch.tensor(new), extend_prefix_lens=torch.tensor(lengths) - torch.tensor(new),
    )  # fmt: skip


def outputs(engine: Any, pool: Any, case: tuple[str, list[int], list[int]], *, exact: bool, formats: tuple[str, str] = FORMATS[0]) -> list[torch.Tensor]:  # fmt: skip
    """Each layer's attention over a filled pool; `exact` writes and holds what the packed rows stand for."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    requests = engine.pools.ReqToTokenPool(
        size=4, max_context_len=64, device="cpu", enable_memory_saver=False
    )
    made = batch(engine, requests.req_to_token, *case)
    backend = TorchNativeAttnBackend(
        SimpleNamespace(device="cpu", req_to_token_pool=requests, token_to_kv_pool=pool)
    )
    tokens, found = len(made.out_cache_loc), []
    everywhere = torch.arange(1, SLOTS + 1)
    for number in range(LAYERS):
        q = torch.randn(tokens, QUERY_HEADS * DIM, generator=torch.Generator().manual_seed(number))
        k, v = values(50 + number, tokens)
        before = values(number, SLOTS)
        if exact:
            k, v = keys_for(k, *formats), stands_for(v, formats[1])
            pool.k_buffer[number][1:] = keys_for(before[0], *formats)
            pool.v_buffer[number][1:] = stands_for(before[1], formats[1])
            found.append(getattr(backend, f"forward_{case[0].lower()}")(q, k, v, layer(number), made))  # fmt: skip
        else:
            pool.set_kv_buffer(layer(number), everywhere, *before)
            found.append(backend.forward(q, k, v, layer(number), made))
    return found


CASES = [
    ("DECODE", [40, 1, 17], [1, 1, 1]),
    ("EXTEND", [30, 9, 1], [12, 9, 1]),  # with a cached prefix and without
]


@pytest.mark.parametrize("case", CASES)
def test_attention_equals_stock_over_the_same_values(
    case: Any, engine: Any, installed: Any, counted: Count, formats: tuple[str, str]
) -> None:
    got = outputs(engine, build(engine), case, exact=False)
    want = outputs(engine, stock_pool(engine), case, exact=True, formats=formats)
    for one, other in zip(got, want, strict=True):
        assert bool(other.isfinite().all())
        assert other.norm() > 1
        assert torch.equal(one, other)
    assert counted.seen == LAYERS, "one decoding a layer"


@pytest.mark.parametrize("other", FORMATS)
def test_each_format_is_another(other: tuple[str, str], engine: Any, installed: Any, formats: Any) -> None:  # fmt: skip
    """The comparison above sees an option that is not heeded."""
    got = outputs(engine, build(engine), CASES[0], exact=False)
    want = outputs(engine, stock_pool(engine), CASES[0], exact=True, formats=other)
    assert all(map(torch.equal, got, want)) == (formats == other)


@pytest.mark.parametrize(
    "fault", ["scales ignored", "k and v swapped", "layer off by one", "before the write", "short"]
)
def test_faults_are_seen(fault: str, engine: Any, installed: Any, monkeypatch: Any) -> None:
    """The comparison above fails where rows are read wrongly, late, or too few."""
    from numinous_kv_cache_4bit.engine import nvfp4_pool

    read = nvfp4_pool.read
    case = CASES[0]
    if fault == "scales ignored":
        one = 0x38  # E4M3
        monkeypatch.setattr(nvfp4_pool, "read", lambda b, *of: read((*b[:2], *(torch.full_like(x, one) for x in b[2:])), *of))  # fmt: skip
    elif fault == "k and v swapped":
        monkeypatch.setattr(nvfp4_pool, "read", lambda *of: read(*of)[::-1])
    elif fault == "layer off by one":
        of = nvfp4_pool.Nvfp4Pool._of
        monkeypatch.setattr(nvfp4_pool.Nvfp4Pool, "decoded", lambda pool, slots: read(of(pool, max(0, pool._batch[0] - 1)), slots, pool.dtype))  # fmt: skip
    elif fault == "before the write":
        written = nvfp4_pool.Nvfp4Pool.set_kv_buffer
        monkeypatch.setattr(nvfp4_pool.Nvfp4Pool, "set_kv_buffer", lambda pool, *of: None if pool._batch else written(pool, *of))  # fmt: skip
    else:
        monkeypatch.setattr(nvfp4_pool, "read", lambda b, slots, dtype: read(b, slots.clone().fill_(int(slots[0])), dtype))  # fmt: skip
    got = outputs(engine, build(engine), case, exact=False)
    want = outputs(engine, stock_pool(engine), case, exact=True)
    assert not all(map(torch.equal, got, want))


# --- The pool -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "width"), [("torch_native", 4), ("triton", 0)])
def test_bytes_are_counted_as_they_are_allocated(
    backend: str, width: int, engine: Any, installed: Any, monkeypatch: Any, formats: Any
) -> None:
    from sglang.srt import runtime_context

    monkeypatch.setattr(runtime_context, "attention_backends", lambda: (backend,) * 2)
    asked = configurator()
    sizing = engine.sizing.DefaultPoolConfigurator.__new__(engine.sizing.DefaultPoolConfigurator)
    ours.after_sizing(None, sizing, asked)
    each = ours.cell_size(HEADS, DIM, LAYERS, width, fp8_keys=formats[0] == "fp8")
    assert sizing._cell_size == each
    sixteenths = 16 + 9 if formats[0] == "fp8" else 9 + 9
    assert each == HEADS * (DIM * sixteenths // 16 * LAYERS + 2 * DIM * width)
    pool = build(engine)
    lists = pool.k_buffer, pool.v_buffer, pool.k_scale_buffer, pool.v_scale_buffer, pool.shadow
    allocated = sum(x.untyped_storage().nbytes() for buffers in lists for x in buffers)
    assert allocated == sum(pool.get_kv_size_bytes()) == each * (SLOTS + 1)


def test_bytes_of_a_model() -> None:
    """32 layers, 8 KV heads of 128: against FP8 and bf16 without a workspace for prefill (U12)."""
    assert ours.cell_size(8, 128, 32) == 36_864
    assert 2 * 8 * 128 * 32 / 36_864 == 16 / 9
    assert 2 * 2 * 8 * 128 * 32 / 36_864 == 32 / 9
    assert ours.cell_size(8, 128, 32, fp8_keys=True) == 51_200
    assert 2 * 8 * 128 * 32 / 51_200 == 1.28


def test_copies_carry_scales(engine: Any, installed: Any, formats: Any) -> None:
    """Moves (U04) and host copies (U10): slots stand for the same elsewhere."""
    pool = build(engine)
    k, v = values(3, 9)
    source, moved, loaded = torch.arange(1, 10), torch.arange(30, 39), torch.arange(60, 69)
    for number in range(LAYERS):
        pool.set_kv_buffer(layer(number), source, k * (number + 1), v)
    pool.cpu_offloading_chunk_size = 4
    pool.move_kv_cache(moved, source)
    pool.load_cpu_copy(pool.get_cpu_copy(source), loaded)
    for number in range(LAYERS):
        for slots in (source, moved, loaded):
            with pool.attending(number, None, None):
                found = pool.decoded(slots)
            assert torch.equal(found[0], keys_for(k * (number + 1), *formats))
            assert torch.equal(found[1], stands_for(v, formats[1]))


@pytest.mark.parametrize("keys", ["nvfp4", "fp8"])
def test_a_write_that_loses_bytes_ends_the_boot(keys: str, engine: Any, monkeypatch: Any) -> None:
    """As FP8 keys were on sm90: every second pair's low byte."""
    from numinous_kv_cache_4bit.engine import nvfp4_pool

    monkeypatch.setattr(nvfp4_pool, "_proven", set())
    write = nvfp4_pool.write
    nvfp4_pool.prove_write(2, 64, keys == "fp8", "amax", "cpu")

    def lossy(buffers: Any, *of: Any) -> None:
        write(buffers, *of)
        buffers[0][..., 2::4] = 0

    monkeypatch.setattr(nvfp4_pool, "write", lossy)
    nvfp4_pool.prove_write(2, 64, keys == "fp8", "amax", "cpu")  # proven before: not asked again
    with pytest.raises(SystemExit, match=r"the write kernel gives \d+ wrong bytes"):
        nvfp4_pool.prove_write(2, 64, keys == "fp8", "mse", "cpu")


def test_a_write_that_does_not_run_ends_the_boot_with_one_line(
    engine: Any, monkeypatch: Any
) -> None:
    from numinous_kv_cache_4bit.engine import nvfp4_pool

    def broken(*of: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nand a page of advice")

    monkeypatch.setattr(nvfp4_pool, "_proven", set())
    monkeypatch.setattr(nvfp4_pool, "write", broken)
    with pytest.raises(SystemExit) as end:
        nvfp4_pool.prove_write(2, 64, True, "amax", "cpu")
    assert str(end.value) == (
        "kv4.nvfp4_triton: the write kernel does not run on this GPU with this Triton: "
        "RuntimeError: CUDA error: an illegal memory access"
    )
    assert not nvfp4_pool._proven


def test_the_boot_proof_does_not_depend_on_torchs_defaults(engine: Any, monkeypatch: Any) -> None:
    from numinous_kv_cache_4bit.engine import nvfp4_pool

    monkeypatch.setattr(nvfp4_pool, "_proven", set())
    state = torch.get_rng_state()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.inference_mode():
            nvfp4_pool.prove_write(2, 64, True, "mse", "cpu")
    finally:
        torch.set_default_dtype(before)
    assert len(nvfp4_pool._proven) == 1
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_written(engine: Any, installed: Any) -> None:
    """No value of the caller changes (U18); a NaN stays in its block and an inf saturates (U16); slot 0 and strange ids are skipped."""
    pool = build(engine)
    k, v = (x.clone() for x in values(4, 5))
    k[0, 0, 3], v[0, 1, 20] = torch.nan, torch.inf
    given = k.clone(), v.clone()
    before = [x.clone() for x in pool._of(1)]
    for strange in (0, -1, SLOTS + 1, 2**40):
        pool.set_kv_buffer(layer(1), torch.full((5,), strange), k, v)
    assert all(map(torch.equal, before, pool._of(1)))
    pool.set_kv_buffer(layer(1), torch.tensor([7, 3, 5, 9, 2], dtype=torch.int32), k, v)
    assert torch.equal(k[1:], given[0][1:])
    assert torch.equal(v, given[1])
    with pool.attending(1, None, None):
        keys, found = pool.decoded(torch.tensor([7, 3]))
    assert bool(keys[0, 0, :16].isnan().all())
    assert torch.equal(keys[0, 0, 16:], stands_for(k[0, 0, 16:]))
    assert float(found[0, 1, 20]) == 6 * 448
    assert torch.equal(keys[1], stands_for(k[1]))


def test_what_is_written_of_fp8_keys(engine: Any, installed: Any, monkeypatch: Any) -> None:
    """A NaN is one NaN, values beyond 448 saturate; slot 0 and strange ids are skipped."""
    monkeypatch.setenv(NVFP4_KEYS.name, "fp8")
    pool = build(engine)
    k, v = (x.clone() for x in values(4, 2))
    k[0, 0, 3], k[0, 1, 20], k[1, 1, 2] = torch.nan, torch.inf, -1e4
    before = [x.clone() for x in pool._kept(1)]
    for strange in (0, -1, SLOTS + 1, 2**40):
        pool.set_kv_buffer(layer(1), torch.full((2,), strange), k, v)
    assert all(map(torch.equal, before, pool._kept(1)))
    pool.set_kv_buffer(layer(1), torch.tensor([7, 3]), k, v)
    with pool.attending(1, None, None):
        keys, _ = pool.decoded(torch.tensor([7, 3]))
    want = decode_e4m3fn(encode_e4m3fn(k.to(torch.bfloat16)))
    assert torch.equal(keys.nan_to_num(1e9), want.nan_to_num(1e9))
    assert (float(keys[0, 1, 20]), float(keys[1, 1, 2])) == (448, -448)
    assert int(keys.isnan().sum()) == 1


def test_options_are_words(engine: Any, installed: Any, monkeypatch: Any) -> None:
    from numinous_tooling.patching.errors import PatchError

    monkeypatch.setenv(NVFP4_KEYS.name, "fp16")
    with pytest.raises(PatchError, match="_KEYS='fp16' is none of nvfp4, fp8"):
        build(engine)
    assert FEATURE.options == (NVFP4_KEYS, NVFP4_SCALES)


def test_scales_of_one_are_none(engine: Any, installed: Any) -> None:
    """The engine gives every layer of an FP8 checkpoint without scales of its own a scale of 1."""
    pool, loc, new = build(engine), torch.tensor([3, 9]), values(4, 2)
    one, of = torch.tensor(1.0), layer(0)
    of.k_scale = of.v_scale = one
    of.k_scale_float = of.v_scale_float = 1.0
    pool.set_kv_buffer(of, loc, *new, one, one)
    with pool.attending(0, None, None):
        keys, _ = pool.decoded(loc)
    assert torch.equal(keys, stands_for(new[0]))
    of.v_scale_float = 0.5
    with pytest.raises(RuntimeError, match="scales of a checkpoint"):
        pool.set_kv_buffer(of, loc, *new, one, one)


def test_reads_that_nobody_decoded_fail(engine: Any, installed: Any) -> None:
    pool = build(engine)
    assert pool.get_key_buffer(0).device.type == "meta"
    assert pool.get_value_buffer(0).shape == (SLOTS + 1, HEADS, DIM)
    with pytest.raises(RuntimeError, match="outside of attention"):
        pool.decoded(torch.tensor([1]))
    with pool.attending(1, None, None), pytest.raises(RuntimeError, match="reads the cache of"):
        pool.get_key_buffer(0)
    with pytest.raises(RuntimeError, match="disaggregation"):
        pool.get_contiguous_buf_infos()
    with pytest.raises(RuntimeError, match="DFLASH"):  # U11
        pool.set_kv_buffer_prefix_valid(layer(0), None, None, None, None)
    with pytest.raises(RuntimeError, match="scales of a checkpoint"):  # U01
        pool.set_kv_buffer(layer(0), torch.tensor([1]), *values(4, 1), 0.5, 0.5)


def test_models_do_not_write_to_the_pool(engine: Any, installed: Any, monkeypatch: Any) -> None:
    """On a GPU the engine lets rope's kernel write to pools that it takes for bf16; copies of the name in models included."""
    from sglang.srt.models import utils

    pool = build(engine, kv_cache_dtype=torch.bfloat16)
    monkeypatch.setattr(utils, "_is_cuda", True)
    monkeypatch.setattr(utils, "get_token_to_kv_pool", lambda: pool)
    monkeypatch.setattr(utils, "is_cp_active", lambda batch: False)
    batch = SimpleNamespace(dcp_kv_mask=None)
    target = next(t for t in installed.targets if t.name.endswith("enable_fused_set_kv_buffer"))
    assert target.original(batch)  # stock would
    assert not utils.enable_fused_set_kv_buffer(batch)


# --- Triton backend -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 8, 40, 10_000])
def test_prefixes_in_turns_equal_stock(
    rows: int, engine: Any, installed: Any, formats: Any
) -> None:
    pool, plain = build(engine), stock_pool(engine)
    before = values(2, SLOTS)
    pool.set_kv_buffer(layer(2), torch.arange(1, SLOTS + 1), *before)
    plain.k_buffer[2][1:] = keys_for(before[0], *formats)
    plain.v_buffer[2][1:] = stands_for(before[1], formats[1])
    prefixes, new = [7, 0, 33, 5], [3, 4, 1, 2]
    kv = torch.tensor([0, *prefixes]).cumsum(0).int()
    # Behind the lists the engine's buffer may be longer, and not filled.
    ids = torch.cat([torch.randperm(SLOTS)[: int(kv[-1])] + 1, torch.full((9,), 2**40)])
    qo = torch.tensor([0, *new]).cumsum(0).int()
    k, v = values(9, sum(new))
    q = torch.randn(sum(new), QUERY_HEADS, DIM, generator=torch.Generator().manual_seed(3))
    rest = (qo, kv, ids, None, True, None, max(new), 1.0, 1.0, SCALE)
    got, want = torch.full_like(q, torch.nan), torch.empty_like(q)
    kernel = ours.PackedPrefix(pool, extend_kernel, rows)
    with pool.attending(2, None, None):
        empty = pool._unread
        kernel(q, k, v, got, empty, empty, *rest, page_size=1)
    extend_kernel(q, k, v, want, plain.k_buffer[2], plain.v_buffer[2], *rest, window_kv_offsets=None, page_size=1)  # fmt: skip
    assert torch.equal(got, want)
    got, want = torch.full_like(q[:4], torch.nan), torch.empty_like(q[:4])
    kv = torch.tensor([0, 4, 5, 20, 31, 77])  # of five requests, four are there
    rest = (kv, ids, "logits", "lse", "splits", 8, SCALE, 1.0, 1.0)
    with pool.attending(2, None, None):
        ours.PackedDecode(pool, decode_kernel)(q[:4], empty, empty, got, *rest, page_size=1)
    decode_kernel(q[:4], plain.k_buffer[2], plain.v_buffer[2], want, *rest, page_size=1, logit_cap=0.0, sinks=None)  # fmt: skip
    assert torch.equal(got, want)


def test_decode_on_a_gpu_reads_packed_rows(
    engine: Any, installed: Any, counted: Count, monkeypatch: Any, formats: Any
) -> None:
    """Every argument reaches its kernel, nothing is read back, and the engine's kernel is not called."""
    pool, calls = build(engine), []
    monkeypatch.setattr(
        ours, "decode_attention_nvfp4", lambda *of, **named: calls.append((of, named))
    )
    decode = ours.PackedDecode(pool, pytest.fail)
    given = ("indptr", "indices", "logits", "lse", "splits", 8, SCALE, 1.0, 1.0)
    q = OnGpu()
    with pool.attending(2, None, None):
        decode(q, None, None, "o", *given, logit_cap=3.0, sinks="sinks", page_size=1, enable_lean=True)  # fmt: skip
        with pytest.raises(RuntimeError, match="scores that a model changes"):
            decode(q, None, None, "o", *given, xai_temperature_len=8)
    ((of, named),) = calls
    assert of[0] is q
    assert all(one is other for one, other in zip(of[1:5], pool._of(2), strict=True))
    assert (of[3] is None) == (formats[0] == "fp8")
    assert of[5:] == ("indptr", "indices")
    assert named == {"sm_scale": SCALE, "logit_cap": 3.0, "sinks": "sinks", "out": "o"}
    assert counted.seen == 1


@pytest.mark.parametrize(
    ("lengths", "rows", "runs"),
    [
        ([3, 4, 5], 100, [(0, 3)]),
        ([3, 4, 5], 7, [(0, 2), (2, 3)]),
        ([30, 0, 5], 7, [(0, 1), (1, 3)]),
        ([0], 7, [(0, 1)]),
        ([5, 30, 5], 7, [(0, 1), (1, 2), (2, 3)]),
        ([], 7, []),
    ],
)
def test_turns(lengths: list[int], rows: int, runs: list[tuple[int, int]]) -> None:
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()] if lengths else [0]
    assert list(ours.turns(starts, rows)) == runs


# --- Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_mla_backend": True}, "has MLA"),
        ({"is_hybrid_swa": True}, "sliding windows are covered on a GPU only"),
        ({"mambaish_config": object()}, "linear attention"),  # U45
        ({"is_encoder_decoder": True}, "cross attention"),
        ({"head_dim": 40}, "multiples of 16, this model has 40"),
        ({"v_head_dim": 64}, "one width"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "leave --kv-cache-dtype out"),
        ({"kv_cache_dtype": torch.float16}, "leave --kv-cache-dtype out"),
        ({"is_draft_worker": True}, "drafts"),
    ],
)
def test_launches_that_end_at_boot(
    changes: dict[str, Any], said: str, engine: Any, installed: Any
) -> None:
    ours.before_pool_sizing(configurator())
    with pytest.raises(SystemExit, match=said) as stop:
        engine.sizing.create_memory_pool_configurator(configurator(**changes))
    assert "\n" not in str(stop.value)


def test_more_launches_that_end_at_boot(engine: Any, installed: Any, monkeypatch: Any) -> None:
    from sglang.srt import runtime_context

    scaled = torch.nn.Module()
    scaled.attn = torch.nn.Module()
    scaled.attn.v_scale_float = 0.5
    with pytest.raises(SystemExit, match="checkpoint scales"):
        ours.before_pool_sizing(configurator(model=scaled))
    with pytest.raises(SystemExit, match="builds a MHATokenToKVPool"):
        ours.after_pools(stock_pool(engine), configurator())
    with pytest.raises(SystemExit, match="another kind"):
        ours.around_pool(build, configurator(), max_total_num_tokens=8, quant_method=object())
    monkeypatch.setattr(runtime_context, "attention_backends", lambda: ("triton", "fa3"))
    with pytest.raises(SystemExit, match="fa3, triton are not covered"):
        build(engine)
    monkeypatch.setattr(runtime_context, "attention_backends", lambda: ("torch_native",) * 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    asked = {"kv_cache_dtype": torch.bfloat16, "device": "cuda", "head_dim": 128, "v_head_dim": 128}
    on_gpu = configurator(**asked)
    ours.before_pool_sizing(on_gpu)
    with pytest.raises(SystemExit, match="torch_native are not covered"):
        ours.after_sizing(None, SimpleNamespace(), on_gpu)
    with pytest.raises(SystemExit, match="heads of 64, 96"):
        ours.before_pool_sizing(configurator(**asked | {"head_dim": 80, "v_head_dim": 80}))
    with pytest.raises(SystemExit, match=r"torch\.float32; .* the model in bf16"):
        ours.before_pool_sizing(configurator(**asked | {"kv_cache_dtype": torch.float32}))
    sliding = asked | {"is_hybrid_swa": True, "swa_head_dim": 64, "swa_v_head_dim": 64}
    ours.before_pool_sizing(configurator(**sliding))
    for changes, said in (
        ({"swa_head_dim": 80}, "this model has 80 and 64"),
        ({"swa_v_head_dim": 128}, "this model has 64 and 128"),
        ({"hf_text_config": SimpleNamespace(num_kv_shared_layers=20)}, "20 layers of this model use another"),
        ({"hf_config": SimpleNamespace(architectures=["Step3p5ForCausalLM"])}, "this one is a Step3p5ForCausalLM"),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match=said):
            ours.before_pool_sizing(configurator(**sliding | changes))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    with pytest.raises(SystemExit, match=r"made for Hopper .* this is sm120"):
        ours.before_pool_sizing(on_gpu)
    ours.before_pool_sizing(configurator())  # the CPU platform on such a machine
    with pytest.raises(RuntimeError, match="another layer's cache"):
        ours.around_attention(build, None, torch.empty(1), None, None, layer(0), None)


DEFAULTS = {
    "kv_cache_dtype": "auto",
    "quantization_param_path": None,
    "speculative_algorithm": None,
    "dcp_size": 1,
    "pp_size": 1,
    "disaggregation_mode": "null",
    "cuda_graph_backend_prefill": None,
    "disable_cuda_graph": False,
    "disable_prefill_cuda_graph": False,
    "page_size": None,
}
DEFAULTS |= dict.fromkeys(BACKEND_ARGUMENTS) | dict.fromkeys(UNCOVERED | MORE_UNCOVERED, False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, None),
        ({"kv_cache_dtype": "bfloat16", "attention_backend": "triton", "tp_size": 2}, None),
        ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4 is another cache; leave"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3 is another cache; leave"),
        *(({name: "fa3"}, "fa3 is not covered; triton and torch_native are") for name in BACKEND_ARGUMENTS),
        ({"speculative_algorithm": "EAGLE"}, "speculative"),
        ({"quantization_param_path": "scales.json"}, "--quantization-param-path"),
        ({"dcp_size": 2}, "--dcp-size > 1"),
        ({"pp_size": 2}, "--pp-size > 1"),
        ({"disaggregation_mode": "prefill"}, "disaggregation"),  # U10
        *(({name: True}, "--" + name.replace("_", "-")) for name in UNCOVERED | MORE_UNCOVERED),
    ],
)  # fmt: skip
def test_judge(given: dict[str, Any], said: str | None) -> None:
    on_cpu = {"SGLANG_PLATFORM": CPU_PLATFORM}
    for config in (None, {"hidden_size": 576, "num_attention_heads": 9}):
        lines = list(judge(ServeCommand(given, DEFAULTS, on_cpu, model_config=config)))
        assert len(lines) == (said is not None), lines
        assert said is None or said in lines[0]
        assert not any("\n" in line for line in lines)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"kv_lora_rank": 512}, "see kv4.mla_dense"),
        ({"head_dim": 72}, "heads have 72"),
        ({"text_config": {"hidden_size": 400, "num_attention_heads": 10}}, "heads have 40"),
    ],
)
def test_judge_reads_the_model(config: dict[str, Any], said: str) -> None:
    on_cpu = {"SGLANG_PLATFORM": CPU_PLATFORM}
    (line,) = judge(ServeCommand({}, DEFAULTS, on_cpu, model_config=config))
    assert said in line


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, None),
        ({"cuda_graph_backend_prefill": None, "disable_prefill_cuda_graph": True}, None),
        ({"cuda_graph_backend_prefill": None, "disable_cuda_graph": True}, None),
        ({"cuda_graph_backend_prefill": "breakable"}, "add --cuda-graph-backend-prefill disabled"),
        ({"attention_backend": None}, "add --attention-backend triton"),
        ({"attention_backend": "torch_native"}, "torch_native is not covered; triton is"),
        ({"page_size": 16}, "--page-size 16"),
    ],
)
def test_judge_on_a_gpu(given: dict[str, Any], said: str | None) -> None:
    usual = {"attention_backend": "triton", "cuda_graph_backend_prefill": "disabled"}
    lines = list(judge(ServeCommand(usual | given, DEFAULTS)))
    assert len(lines) == (said is not None), lines
    assert said is None or said in lines[0]


def test_engine_that_is_installed() -> None:
    """Every pin fits, and the engine has the arguments that the judge reads."""
    pytest.importorskip("sglang", reason="reads the installed engine")
    tree = find_engine()
    assert fits(FEATURE, tree) == []
    fields = b"".join(tree.read(path) for path in tree.files(FIELDS) if path.endswith(".py"))
    assert [name for name in DEFAULTS if f"    {name}: A[".encode() not in fields] == []
    assert set(BACKENDS) == {"triton", "torch_native"}


# --- A served model -------------------------------------------------------------------------------------------------


def greedy(model: Path, prompt: list[int], new: int, formats: tuple[str, str] | None) -> list[int]:
    """Tokens of the model in transformers; with `formats` every key and value is read back from them."""
    import transformers

    class Cache(transformers.DynamicCache):
        def update(self, k: torch.Tensor, v: torch.Tensor, *of: Any, **named: Any) -> Any:
            if formats is not None:
                k, v = keys_for(k, *formats), stands_for(v, formats[1])
            return super().update(k, v, *of, **named)

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    cache, step, found = Cache(), torch.tensor([prompt]), []
    with torch.inference_mode():
        for _ in range(new):
            logits = loaded(input_ids=step, past_key_values=cache, use_cache=True).logits
            found.append(int(logits[0, -1].argmax()))
            step = torch.tensor([[found[-1]]])
    return found


@pytest.mark.engine
@pytest.mark.parametrize(("formats", "size"), [(FORMATS[0], 72), (FORMATS[3], 100)])
def test_served_tokens_are_those_of_a_quantised_cache(
    serve: Any, tiny_model: Path, formats: tuple[str, str], size: int
) -> None:
    """Cold, on a cached prefix, and in one batch: what transformers gives with the same rounding, and not what it gives without."""
    prompts = [[(7 * n + 3 * n * n) % 500 + 5 for n in range(start, start + 40)] for start in (1, 60)]  # fmt: skip
    want = [greedy(tiny_model, prompt, 16, formats) for prompt in prompts]
    assert [greedy(tiny_model, prompt, 16, None) for prompt in prompts] != want
    options = {NVFP4_KEYS.name: formats[0], NVFP4_SCALES.name: formats[1]}
    with serve(NUMINOUS_KV4_NVFP4_TRITON="1", **options) as running:
        assert running.generate(prompts[0], new_tokens=16) == want[:1]
        assert running.generate(*prompts, new_tokens=16) == want  # the first one from the cache
        assert running.totals(NVFP4_TRITON)["engaged"] > 0
        assert f"{NVFP4_TRITON}: 8192 tokens of {size} bytes" in running.server.log.read_text()
