# SPDX-License-Identifier: Apache-2.0
"""`kv4.nvfp4_triton` and models with linear attention: the engine's own pools, sizing, attention wrapper, moves and host copies.

The wrapper hands over to a real `TorchNativeAttnBackend` for full attention and to a stand-in for linear attention. Served models run whole.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
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
    values,
)

from numinous_kv_cache_4bit.engine import nvfp4_triton as ours
from numinous_kv_cache_4bit.options import (
    HYBRID_ARCHITECTURES,
    NVFP4_KEYS,
    NVFP4_SCALES,
    NVFP4_TRITON,
)

# Fixtures.
counted, formats, installed = shared.counted, shared.formats, shared.installed
LINEAR, FULL, LAYERS = [0, 1, 2, 4, 5, 6], [3, 7], 8
STATES = 6  # slots


def hybrid_configurator(architecture: str = "Qwen3_5ForCausalLM", **changes: Any) -> Any:
    changes = {
        "mambaish_config": SimpleNamespace(full_attention_layer_ids=FULL),
        "hf_config": SimpleNamespace(architectures=[architecture]),
    } | changes
    made = configurator(**changes)
    made.layer_info.num_effective_layers = made.layer_info.end_layer = LAYERS
    return made


def states() -> Any:
    """The engine's pool of states, of two heads 4 x 4, with something in it."""
    from sglang.srt.configs.mamba_utils import (
        Mamba2CacheParams,
        Mamba2StateDType,
        Mamba2StateShape,
    )
    from sglang.srt.mem_cache.memory_pool import MambaPool

    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=8, n_groups=1, num_heads=2, head_dim=4, state_size=4, conv_kernel=4,
    )  # fmt: skip
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    made = MambaPool(
        size=STATES, spec_state_size=STATES, device="cpu", mamba_layer_ids=LINEAR,
        cache_params=Mamba2CacheParams(shape=shape, layers=LINEAR, dtype=dtype),
    )  # fmt: skip
    for buffer in (*made.mamba_cache.conv, made.mamba_cache.temporal):
        buffer.normal_(generator=torch.Generator().manual_seed(2))
    return made


def make(engine: Any, **changes: Any) -> Any:
    """The pool as the hooked builder makes it."""
    return engine.configurator.KVCacheConfigurator._build_hybrid_linear_kv_pool(
        hybrid_configurator(**changes),
        max_total_num_tokens=SLOTS,
        req_to_token_pool=SimpleNamespace(mamba_pool=states()),
        mha_pool_class=engine.pools.MHATokenToKVPool,
    )


@pytest.fixture
def pool(engine: Any, installed: Any, formats: Any) -> Any:
    return make(engine)


def stock_pool(engine: Any) -> Any:
    return engine.pools.HybridLinearKVPool(
        size=SLOTS, dtype=torch.float32, page_size=1, head_num=HEADS, head_dim=DIM,
        full_attention_layer_ids=FULL, device="cpu", mamba_pool=states(),
    )  # fmt: skip


def fill(pool: Any, loc: torch.Tensor) -> None:
    for number in FULL:
        pool.set_kv_buffer(layer(number), loc, *values(number, len(loc)))


def held(pool: Any, number: int, slots: torch.Tensor) -> Any:
    with pool.attending(number, None, None):
        return pool.decoded(slots)


# --- Bytes ----------------------------------------------------------------------------------------------------------


def test_bytes_are_counted_as_they_are_allocated(engine: Any, pool: Any, formats: Any, monkeypatch: Any) -> None:  # fmt: skip
    """Sizing's bytes of a token are those of the layers of full attention; with a shadow for torch_native, with none for Triton."""
    from sglang.srt import runtime_context

    for backend, shadow in (("torch_native", 2 * 4 * HEADS * DIM), ("triton", 0)):
        monkeypatch.setattr(runtime_context, "attention_backends", lambda name=backend: (name,) * 2)
        sizing = engine.sizing.DefaultPoolConfigurator.__new__(
            engine.sizing.DefaultPoolConfigurator
        )
        ours.after_sizing(None, sizing, hybrid_configurator())
        sixteenths = 16 + 9 if formats[0] == "fp8" else 9 + 9
        token = HEADS * DIM * sixteenths // 16 * len(FULL) + shadow
        assert sizing._cell_size == token
        sizing._zero_kv_max_tokens = 0
        for spare, more in ((-1, -1), (0, 0), (token, 1)):
            sizes = sizing.calculate_pool_sizes(SLOTS * token + spare, 1)
            assert sizes.max_total_num_tokens == SLOTS + more
        inner = make(engine).full_kv_pool
        lists = inner.k_buffer, inner.v_buffer, inner.k_scale_buffer, inner.v_scale_buffer, inner.shadow  # fmt: skip
        allocated = sum(x.untyped_storage().nbytes() for buffers in lists for x in buffers)
        assert allocated == token * (SLOTS + 1)
    assert sum(pool.get_kv_size_bytes()) == sum(pool.full_kv_pool.get_kv_size_bytes())


def test_layers_of_another_rank_are_not_counted(engine: Any, installed: Any) -> None:
    made = hybrid_configurator()
    made.layer_info.start_layer, made.layer_info.end_layer = 4, LAYERS
    assert ours._shape(made) == (HEADS, DIM, 1)
    assert ours._full_layers(made) == [7]


def test_the_states_are_stocks(engine: Any, pool: Any) -> None:
    assert isinstance(pool, engine.pools.HybridLinearKVPool)
    assert type(pool.mamba_pool) is engine.pools.MambaPool
    assert pool.full_attention_layer_id_mapping == {3: 0, 7: 1}
    assert pool.get_v_head_dim() == DIM  # what the Triton backend asks
    assert pool.size == pool.full_kv_pool.size == SLOTS


# --- Attention ------------------------------------------------------------------------------------------------------


class Linear:
    """In place of the engine's Gated DeltaNet backend."""

    needs_cpu_seq_lens = False

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def forward_extend(self, **named: Any) -> Any:
        self.calls.append(named)
        return named["mixed_qkv"] + 1

    forward_decode = forward_extend


CASES = [
    ("DECODE", [40, 1, 17], [1, 1, 1]),
    ("EXTEND", [30, 9, 1], [12, 9, 1]),  # with a cached prefix and without
]


def outputs(engine: Any, pool: Any, case: Any, formats: tuple[str, str] | None) -> list[torch.Tensor]:  # fmt: skip
    """All layers through the engine's wrapper; with `formats` the plain pool holds what packed rows stand for."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    mode, lengths, new = case
    requests = engine.pools.ReqToTokenPool(
        size=4, max_context_len=64, device="cpu", enable_memory_saver=False
    )
    slots, loc = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1)) + 1, []
    for request, (length, count) in enumerate(zip(lengths, new, strict=True)):
        own, slots = slots[:length], slots[length:]
        requests.req_to_token[request, :length] = own.int()
        loc.append(own[length - count :])
    batch = SimpleNamespace(
        forward_mode=getattr(engine.Mode, mode), seq_lens=torch.tensor(lengths),
        req_pool_indices=torch.arange(len(lengths)), out_cache_loc=torch.cat(loc), encoder_lens=None,
        extend_seq_lens=torch.tensor(new), extend_prefix_lens=torch.tensor(lengths) - torch.tensor(new),
    )  # fmt: skip
    runner = SimpleNamespace(device="cpu", req_to_token_pool=requests, token_to_kv_pool=pool)
    full, linear = TorchNativeAttnBackend(runner), Linear()
    full.kv_index_translator = None
    backend = HybridLinearAttnBackend(full, linear, FULL)
    found, everywhere = [], torch.arange(1, SLOTS + 1)
    for number in range(LAYERS):
        if number in LINEAR:
            x = torch.full((2, 3), float(number))
            linear_layer = SimpleNamespace(layer_id=number)
            found.append(backend.forward(layer=linear_layer, forward_batch=batch, mixed_qkv=x, a="a", b="b"))  # fmt: skip
            assert linear.calls[-1]["a"] == "a"
            continue
        q = torch.randn(sum(new), QUERY_HEADS * DIM, generator=torch.Generator().manual_seed(number))  # fmt: skip
        before, (k, v) = values(number, SLOTS), values(50 + number, sum(new))
        if formats:
            before, (k, v) = ((keys_for(x, *formats), stands_for(y, formats[1])) for x, y in (before, (k, v)))  # fmt: skip
        pool.set_kv_buffer(layer(number), everywhere, *before)
        if formats:  # past our hook, which wants a pool of ours
            stock = getattr(backend, f"forward_{mode.lower()}")
            found.append(stock(layer(number), batch, True, q, k, v))
        else:
            found.append(backend.forward(q, k, v, layer(number), batch))
    return found


@pytest.mark.parametrize("case", CASES)
def test_attention_equals_stock_over_the_same_values(
    case: Any, engine: Any, pool: Any, counted: Count, formats: Any
) -> None:
    got = outputs(engine, pool, case, None)
    want = outputs(engine, stock_pool(engine), case, formats)
    assert len(got) == len(want) == LAYERS
    for one, other in zip(got, want, strict=True):
        assert bool(other.isfinite().all())
        assert torch.equal(one, other)
    assert counted.seen == len(FULL), "linear layers are not counted"


@pytest.mark.parametrize("fault", ["layers shifted", "no hook", "shadow of another layer"])
def test_faults_are_seen(
    fault: str, engine: Any, pool: Any, installed: Any, formats: Any, monkeypatch: Any
) -> None:
    from numinous_kv_cache_4bit.engine import nvfp4_pool

    if fault == "layers shifted":
        monkeypatch.setattr(
            nvfp4_pool.Nvfp4HybridPool,
            "_transfer_full_attention_id",
            lambda self, number: {3: 0, 7: 0}[number],
        )
        fill(pool, torch.arange(1, SLOTS + 1))
        k, _ = held(pool, 3, torch.arange(1, SLOTS + 1))
        assert not torch.equal(k, keys_for(values(3, SLOTS)[0], *formats))
        return
    if fault == "no hook":
        from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

        target = next(t for t in installed.targets if t.name.endswith("HybridLinearAttnBackend.forward"))  # fmt: skip
        monkeypatch.setattr(HybridLinearAttnBackend, "forward", target.original)
    else:
        monkeypatch.setattr(
            nvfp4_pool.Nvfp4HybridPool,
            "attending",
            lambda self, number, *of: self.full_kv_pool.attending(0, *of),
        )
    with pytest.raises((RuntimeError, NotImplementedError), match=r"reads the cache of layer|meta"):
        outputs(engine, pool, CASES[0], None)


@pytest.mark.parametrize("rows", [8, 10_000])
@pytest.mark.parametrize("number", FULL)
def test_kernels_of_the_triton_backend(
    number: int, rows: int, engine: Any, installed: Any, formats: Any, monkeypatch: Any
) -> None:
    from sglang.srt import runtime_context

    monkeypatch.setattr(runtime_context, "attention_backends", lambda: ("triton",) * 2)
    pool = make(engine)
    fill(pool, torch.arange(1, SLOTS + 1))
    plain = [torch.full((SLOTS + 1, HEADS, DIM), torch.nan) for _ in range(2)]
    k, v = values(number, SLOTS)
    plain[0][1:], plain[1][1:] = keys_for(k, *formats), stands_for(v, formats[1])
    kv, qo = torch.tensor([0, 7, 7, 19]), torch.tensor([0, 3, 7, 8])
    ids = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(9))[:30] + 1
    q = torch.randn(8, QUERY_HEADS, DIM, generator=torch.Generator().manual_seed(3))
    new, rest = values(90, 8), (None, True, None, 4, 1.0, 1.0, SCALE)
    got, want = torch.full_like(q, torch.nan), torch.empty_like(q)
    ends = torch.tensor([0, 7, 8, 19])
    more = ("logits", "lse", "splits", 8, SCALE, 1.0, 1.0)
    one, other = torch.full_like(q[:3], torch.nan), torch.empty_like(q[:3])
    with pool.attending(number, None, None):
        buffers = pool.get_key_buffer(number), pool.get_value_buffer(number)
        assert {x.device.type for x in buffers} == {"meta"}
        ours.PackedPrefix(pool, extend_kernel, rows)(q, *new, got, *buffers, qo, kv, ids, *rest, page_size=1)  # fmt: skip
        ours.PackedDecode(pool, decode_kernel)(q[:3], *buffers, one, ends, ids, *more, page_size=1)
    extend_kernel(q, *new, want, *plain, qo, kv, ids, *rest, window_kv_offsets=None, page_size=1)
    decode_kernel(q[:3], *plain, other, ends, ids, *more, page_size=1, logit_cap=0.0, sinks=None)
    assert bool(want.isfinite().all())
    assert torch.equal(got, want)
    assert torch.equal(one, other)


def test_decode_on_a_gpu_reads_the_rows_of_the_layer(pool: Any, monkeypatch: Any) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(ours, "decode_attention_nvfp4", lambda *of, **named: calls.append(of))
    decode = ours.PackedDecode(pool, pytest.fail)
    given = ("indptr", "indices", "logits", "lse", "splits", 8, SCALE, 1.0, 1.0)
    for at, number in enumerate(FULL):
        with pool.attending(number, None, None):
            decode(OnGpu(), None, None, "o", *given, page_size=1)
        assert all(one is other for one, other in zip(calls[-1][1:5], pool.full_kv_pool._of(at), strict=True))  # fmt: skip


# --- Slots ----------------------------------------------------------------------------------------------------------


def test_copies_carry_scales_and_states(engine: Any, pool: Any, formats: Any) -> None:
    """A move, and a retracted request's way to the host and back to other slots: the engine's own code."""
    source = torch.arange(40, 49)
    moved, loaded = source - 10, source - 20
    fill(pool, source)
    pool.full_kv_pool.cpu_offloading_chunk_size = 4
    pool.move_kv_cache(moved, source)
    copy = pool.get_cpu_copy(source, mamba_indices=torch.tensor([2]))
    pool.load_cpu_copy(copy, loaded, mamba_indices=torch.tensor([5]))
    for number in FULL:
        k, v = values(number, len(source))
        for slots in (source, moved, loaded):
            keys, found = held(pool, number, slots)
            assert torch.equal(keys, keys_for(k, *formats))
            assert torch.equal(found, stands_for(v, formats[1]))
    cache = pool.mamba_pool.mamba_cache
    for buffer in (*cache.conv, cache.temporal):  # [layers, slots, ...]
        assert torch.equal(buffer[:, 5], buffer[:, 2])
        assert not torch.equal(buffer[:, 4], buffer[:, 2])


def test_a_copy_without_scales_is_seen(engine: Any, pool: Any, formats: Any) -> None:
    source = torch.arange(40, 49)
    fill(pool, source)
    copy, _ = pool.get_cpu_copy(source)
    copy[1][0][-1].zero_()  # scales of values in the second layer
    pool.load_cpu_copy((copy, None), source - 20)
    _, v = held(pool, FULL[1], source - 20)
    assert not torch.equal(v, stands_for(values(FULL[1], 9)[1], formats[1]))


# --- Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", HYBRID_ARCHITECTURES)
def test_models_that_are_covered(architecture: str, engine: Any, installed: Any) -> None:
    ours.before_pool_sizing(hybrid_configurator(architecture))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "NemotronHForCausalLM"}, "this one is a NemotronHForCausalLM"),
        # Its indexer has a pool of its own (QSA).
        ({"architecture": "Qwen4ExpForConditionalGeneration"}, "this one is a Qwen4Exp"),
        ({"architecture": "KimiLinearForCausalLM", "use_mla_backend": True}, "has MLA"),
        ({"is_draft_worker": True}, "drafts"),
        ({"head_dim": 40}, "multiples of 16"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "leave --kv-cache-dtype out"),
    ],
)
def test_launches_that_end_at_boot(changes: Any, said: str, engine: Any, installed: Any) -> None:
    with pytest.raises(SystemExit, match=said) as stop:
        engine.sizing.create_memory_pool_configurator(hybrid_configurator(**changes))
    assert "\n" not in str(stop.value)


def test_what_hybrid_pools_refuse(engine: Any, pool: Any, monkeypatch: Any) -> None:
    with pytest.raises(RuntimeError, match="disaggregation"):
        pool.get_contiguous_buf_infos()
    with pytest.raises(RuntimeError, match="scales of a checkpoint"):
        pool.set_kv_buffer(layer(3), torch.tensor([1]), *values(1, 1), 0.5, 0.5)
    with pytest.raises(RuntimeError, match="dcp"):
        pool.set_kv_buffer(layer(3), torch.tensor([1]), *values(1, 1), dcp_kv_mask=torch.ones(1))
    with pytest.raises(ValueError, match="not in full attention layers"):
        pool.set_kv_buffer(layer(4), torch.tensor([1]), *values(1, 1))
    with pytest.raises(RuntimeError, match="draft's block"):
        pool.full_kv_pool.set_kv_buffer_prefix_valid()
    with pytest.raises(RuntimeError, match="outside of attention"):
        pool.decoded(torch.tensor([1]))
    with pytest.raises(SystemExit, match="another kind"):
        ours.around_hybrid_pool(
            build,
            hybrid_configurator(post_capture_kv_active=True),
            max_total_num_tokens=8,
            req_to_token_pool=None,
        )
    with pytest.raises(SystemExit, match="builds a HybridLinearKVPool"):
        ours.after_pools(stock_pool(engine), hybrid_configurator())
    lines: list[str] = []
    monkeypatch.setattr(
        "sglang.srt.utils.log_info_on_rank0", lambda logger, line: lines.append(line)
    )
    ours.after_pools(pool, hybrid_configurator())
    assert f"{SLOTS} tokens of" in lines[0]
    assert "in 2 layers" in lines[0]


# --- A served model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny dummy of Qwen 3.5: layers 1 and 3 of four are full attention."""
    path = Path(__file__).parents[1] / "benchmarks" / "make_dummy.py"
    spec = importlib.util.spec_from_file_location("make_dummy_for_hybrids", path)
    assert spec is not None
    assert spec.loader is not None
    dummy = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = dummy
    spec.loader.exec_module(dummy)
    out = tmp_path_factory.mktemp("hybrid") / "model"
    dummy.write("qwen35", out, tiny=True)
    return out


def greedy(
    model: Path, chunks: list[list[int]], new: int, formats: tuple[str, str] | None, own: bool
) -> list[int]:
    """Tokens of the model in transformers; with `formats` keys and values are read back from them.

    Args:
        chunks: the prompt as the engine's prefill takes it.
        own: whether a chunk's own are read back as well (torch_native), or as they were computed (Triton).
    """
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    class Cache(transformers.DynamicCache):
        def update(self, k: torch.Tensor, v: torch.Tensor, *of: Any, **named: Any) -> Any:
            if formats is None:
                return super().update(k, v, *of, **named)
            # transformers has heads before tokens; blocks of 16 lie within a head either way.
            kept = super().update(keys_for(k, *formats), stands_for(v, formats[1]), *of, **named)
            tokens = k.shape[-2]
            if own or tokens == 1:
                return kept
            return tuple(
                torch.cat([x[..., :-tokens, :], y], -2) for x, y in zip(kept, (k, v), strict=True)
            )

    cache, found = Cache(config=loaded.config), []
    with torch.inference_mode():
        for chunk in chunks:
            logits = loaded(torch.tensor([chunk]), past_key_values=cache, use_cache=True).logits
        for _ in range(new):
            found.append(int(logits[0, -1].argmax()))
            logits = loaded(torch.tensor([found[-1:]]), past_key_values=cache, use_cache=True).logits  # fmt: skip
    return found


FLAGS = (
    "--skip-tokenizer-init --dtype float32 --disable-cuda-graph --skip-server-warmup --decode-log-interval 1 "
    "--max-total-tokens 2048 --max-running-requests 4 --max-mamba-cache-size 24 --context-length 512 "
    "--prefill-max-requests 1 --chunked-prefill-size 16 --disable-overlap-schedule"
)
NEW = 4


@pytest.mark.engine
@pytest.mark.parametrize(
    ("backend", "formats"),
    [("torch_native", FORMATS[0]), ("triton", FORMATS[1])],
)
def test_served_tokens_are_those_of_a_quantised_cache(
    backend: str, formats: tuple[str, str], hybrid_model: Path, tmp_path: Path
) -> None:
    """In chunks, behind a prefix that the radix cache of states holds, and in one batch: what transformers gives with the same rounding."""
    from numinous_tooling.gate.servers import Interrupts
    from numinous_tooling.testing.engine import START_TIMEOUT_S, Running, engine_server

    prompts = [[(7 * n + 3 * n * n) % 250 + 3 for n in range(at, at + 40)] for at in (1, 60)]
    chunks = [[prompt[:16], prompt[16:32], prompt[32:]] for prompt in prompts]
    native = backend == "torch_native"
    want = [greedy(hybrid_model, each, NEW, formats, native) for each in chunks]
    plain = [greedy(hybrid_model, each, NEW, None, native) for each in chunks]
    assert all(one != other for one, other in zip(want, plain, strict=True))
    prefix = greedy(hybrid_model, chunks[0][:2], 1, formats, native)
    environ = {
        NVFP4_KEYS.name: formats[0],
        NVFP4_SCALES.name: formats[1],
        "NUMINOUS_KV4_NVFP4_TRITON": "1",
        "TRITON_INTERPRET": "1",
        "SGLANG_MAMBA_CONV_DTYPE": "float32",
        # Torch_native reads all it wrote, so a retracted request's second prefill finds what its first found.
        "SGLANG_TEST_RETRACT": str(int(native)),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    flags = [*FLAGS.split(), "--attention-backend", backend]
    server = engine_server("hybrid", hybrid_model, tmp_path, flags, "gdn_server", **environ)
    with server.running(Interrupts(), stop_grace_s=0):
        server.wait_ready(START_TIMEOUT_S, lambda elapsed: None)
        running = Running(server, tmp_path / "state")
        assert running.generate(prompts[0][:32], new_tokens=1) == [prefix]
        assert running.generate(*prompts, new_tokens=NEW) == want
        assert running.totals(NVFP4_TRITON)["engaged"] > 0
    log = server.log.read_text()
    assert f"{NVFP4_TRITON}: 2048 tokens of 288 bytes in 2 layers" in log
    assert bool(re.search(r"Testing retraction\. #retracted_reqs: [1-9]", log)) == native
    assert "#cached-token: 32" in log, "the first prompt's first two chunks are in the cache"
