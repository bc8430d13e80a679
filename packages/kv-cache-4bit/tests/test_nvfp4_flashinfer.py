# SPDX-License-Identifier: Apache-2.0
"""`kv4.nvfp4_flashinfer`: the engine's FlashInfer and TRT-LLM backends, its pool and its recipe on a CPU, FlashInfer by stand-ins (`flashinfer_double`).

Scales are never 1. What is wrong in stock is shown in `test_nvfp4_flashinfer_stock`, by the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import kv4_flashinfer_double as double
import pytest
import torch
from kv4_flashinfer_double import (
    DIM,
    EXACT,
    HEADS,
    LAYERS,
    PAGE,
    SCALE,
    SCALES,
    SLOTS,
    TOKENS,
    Server,
    captured,
    feature,
    layer,
    off,
    padded,
    pool_of,
    prefills,
    trtllm,
)
from kv4_nvfp4_harness import configurator

from numinous_kv_cache_4bit.engine import nvfp4_flashinfer as ours
from numinous_tooling.numerics import dequantize_nvfp4

platform = double.platform  # fixture


@pytest.fixture(scope="module")
def installed(engine: Any) -> Iterator[None]:
    with feature():
        yield


# --- Prefill ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(LAYERS))
def test_prefill_scales_once(number: int, engine: Any, installed: Any, platform: Any) -> None:
    assert max(prefills(Server(engine), number)) < EXACT
    assert platform.count.seen == 2


def test_paged_prefill_reads_the_chunk_from_the_cache(
    engine: Any, installed: Any, platform: Any
) -> None:
    """Models with images, and piecewise graphs: not as computed, but as the cache has it."""
    server = Server(engine)
    server.backend.use_paged = True
    server.extend([0, 1], [0, 0], [40, 7], 1, 1)
    got, _ = server.extend([0, 1], [40, 7], [5, 9], 1, 2)
    q, _, _ = server.tensors(14, 2)
    want = [
        double.attention(q[own], *server.kept(1, server.table[row, :n].long()), SCALE, True)[0]
        for row, n, own in ((0, 45, slice(5)), (1, 16, slice(5, 14)))
    ]
    assert off((got, torch.cat(want))) < EXACT


def test_requests_may_share_a_prefix(engine: Any, installed: Any, platform: Any) -> None:
    server = Server(engine, shared=380)
    server.extend([0], [0], [380])
    assert off(server.extend([0, 1, 2], [380] * 3, [10] * 3)) < EXACT


def test_sm100_reads_with_the_scale_that_it_wrote_with(
    engine: Any, installed: Any, platform: Any
) -> None:
    """Stock's recipe multiplies a checkpoint's scales by 6 there; the layer still has the others."""
    from sglang.srt.runtime_context import override_platform

    with override_platform(is_sm100=True, is_sm120=False):
        server = Server(engine)
        attention = SimpleNamespace(layers=[SimpleNamespace(attn=layer(n, SCALES[n])) for n in range(LAYERS)])  # fmt: skip
        server.pool.quant_method.load_scales_from_model(attention)
        six = tuple((6 * k, 6 * v) for k, v in SCALES)
        assert server.pool.quant_method.get_bmm_scales(1) == pytest.approx(six[1])
        server.scales = six
        plain = layer(0, SCALES[0])
        batch = server.batch(server.Mode.EXTEND, [0], [0], [30])
        server.backend.init_forward_metadata(batch)
        q, k, v = server.tensors(30, 4)
        server.backend.forward_extend(q.flatten(1), k, v, plain, batch)
        stood = server.kept(0, server.table[0, :30].long())
        assert max(off((a, b.float())) for a, b in zip(stood, (k, v), strict=True)) < 0.2
        batch = server.batch(server.Mode.DECODE, [0], [30], [1])
        server.backend.init_forward_metadata(batch)
        q, k, v = server.tensors(1, 5)
        got = server.backend.forward_decode(q.flatten(1), k, v, plain, batch)
        want = double.attention(q, *server.kept(0, server.table[0, :31].long()), SCALE, False)[0]
        assert off((got.view_as(want).float(), want)) < EXACT


# --- Pool, sizing, write ------------------------------------------------------------------------------------------------


def test_what_is_counted_is_allocated(engine: Any, installed: Any, platform: Any) -> None:
    row = HEADS * DIM
    pool = pool_of(engine)
    assert (pool.dq_k_buffer, pool.dq_v_buffer) == (None, None)
    made = configurator(kv_cache_dtype=torch.float4_e2m1fn_x2, kv_cache_dtype_str="nvfp4", head_dim=DIM, v_head_dim=DIM)  # fmt: skip
    made.layer_info.num_effective_layers = LAYERS
    sizing = SimpleNamespace()
    ours.after_sizing(None, sizing, made)
    assert sizing._cell_size == 2 * row * LAYERS * 9 // 16
    assert sizing._cell_size * (SLOTS + PAGE) == sum(pool.get_kv_size_bytes())


def test_padding_is_not_written(engine: Any, installed: Any, platform: Any) -> None:
    assert not any(int(x.count_nonzero()) for x in padded(engine))


def test_moves_carry_scales(engine: Any, installed: Any, platform: Any) -> None:
    server = Server(engine)
    server.extend([0], [0], [40])
    tokens = server.table[0, :3].long()
    want = server.kept(0, tokens)
    server.pool.use_native_move_kv_cache = True
    server.pool.move_kv_cache(torch.tensor([500, 501, 502]), tokens)
    got = server.kept(0, torch.tensor([500, 501, 502]))
    assert all(map(torch.equal, got, want))


def test_layers_of_a_model_with_linear_attention(
    engine: Any, installed: Any, platform: Any
) -> None:
    """Stock's pool of them gives the inner pool numbers of its own; scales go by the model's."""
    pool = engine.pools.HybridLinearKVPool.__new__(engine.pools.HybridLinearKVPool)
    pool.full_kv_pool, pool.use_mla = pool_of(engine), False
    pool.full_attention_layer_id_mapping = {2: 1}
    pool.layer_transfer_counter = None
    loc, new = torch.tensor([20, 21]), torch.randn(2, 2, HEADS, DIM).bfloat16()
    pool.set_kv_buffer(layer(2, SCALES[2]), loc, *new, None, None)
    k, v, *blocks = pool.get_raw_kv_buffer(2)
    assert k is pool.full_kv_pool.k_buffer[1]
    for kept, scale, x in zip(zip((k, v), blocks, strict=True), SCALES[2], new, strict=True):
        stood = dequantize_nvfp4(*(each[loc].view(torch.uint8) for each in kept)) * scale
        assert off((stood, x.float())) < 0.2


# --- Decode -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(LAYERS))
def test_decode_reads_packed_rows(number: int, engine: Any, installed: Any, platform: Any) -> None:
    server = Server(engine)
    server.extend([0, 1], [0, 0], [299, 7], number)
    platform.count.seen = 0
    assert off(server.decode([0, 1, 2], [300, 8, 1], number)) < EXACT
    assert platform.count.seen == 1


def test_captured_decode(engine: Any, installed: Any, platform: Any) -> None:
    assert off(captured(Server(engine))) < EXACT


# --- Decode of stock's TRT-LLM backend --------------------------------------------------------------------------------


def test_xqa_reads_what_is_written(engine: Any, installed: Any, platform: Any) -> None:
    assert off(trtllm(Server(engine, decode="trtllm_mha"))) < EXACT


# --- Proof at boot ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("scales twice", "FlashInfer's prefill reads an NVFP4 cache wrongly"),
        ("keys split", "FlashInfer's decode reads an NVFP4 cache wrongly"),
        ("no kernel", "FlashInfer's prefill does not run on this GPU: RuntimeError: no image"),
        ("a byte", "the write kernel gives 1 wrong bytes"),
        ("another FlashInfer", "made for FlashInfer 0.6.18, this is 0.6.19"),
    ],
)
def test_a_wrong_kernel_ends_the_boot(fault: str, said: str, engine: Any, installed: Any, platform: Any, monkeypatch: Any) -> None:  # fmt: skip
    run, store = double.Prefill.run, ours.store

    def twice(self: Any, q: Any, cache: Any, *, k_scale: float, v_scale: float, **named: Any) -> Any:  # fmt: skip
        return run(self, q, cache, k_scale=k_scale**2, v_scale=v_scale**2, **named)

    def missing(*of: Any, **named: Any) -> Any:
        raise RuntimeError("no image for this device\nmore")

    def changed(buffers: Any, *of: Any) -> None:
        store(buffers, *of)
        buffers[0][7, 0, 3] ^= 1

    def split(self: Any, *of: Any, **named: Any) -> None:
        double.Decode.plan_as_told(self, *of, **named | {"disable_split_kv": False})

    if fault == "scales twice":
        monkeypatch.setattr(double.Prefill, "run", twice)
    elif fault == "no kernel":
        monkeypatch.setattr(double.Prefill, "run", missing)
    elif fault == "a byte":
        monkeypatch.setattr(ours, "store", changed)
    elif fault == "keys split":
        monkeypatch.setattr(double.Decode, "plan_as_told", double.Decode.begin_forward, raising=False)  # fmt: skip
        monkeypatch.setattr(double.Decode, "begin_forward", split)
    else:
        platform.flashinfer.__version__ = "0.6.19"
    with pytest.raises(SystemExit, match=said) as ended:
        Server(engine)
    assert "\n" not in str(ended.value)


def test_xqa_is_proven_at_boot(engine: Any, installed: Any, platform: Any) -> None:
    from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend

    server = Server(engine, decode="trtllm_mha")
    made = TRTLLMHAAttnBackend.__new__(TRTLLMHAAttnBackend)
    vars(made).update(
        page_size=PAGE, decode_seq_len_splits=1, max_context_len=TOKENS, workspace_buffer=torch.zeros(1), q_data_type=torch.bfloat16,
        _multi_ctas_kv_counter_buffer=None, indices_updater_decode=server.backend.indices_updater_decode,
    )  # fmt: skip
    runner = SimpleNamespace(decode_attention_backend_str="trtllm_mha")
    ours.after_trtllm_backend(None, made, runner)
    platform.flashinfer.decode.trtllm_batch_decode_with_kv_cache = double.trtllm_gen
    with pytest.raises(SystemExit, match="XQA does not run on this GPU: RuntimeError: Failed to init"):  # fmt: skip
        ours.after_trtllm_backend(None, made, runner)


def test_other_layers_end_with_a_line(engine: Any, installed: Any, platform: Any) -> None:
    server = Server(engine)
    q, k, v = server.tensors(1, 1)
    batch = server.batch(server.Mode.DECODE, [0], [4], [1])
    server.backend.init_forward_metadata(batch)
    with pytest.raises(RuntimeError, match="another layer's cache"):
        server.backend.forward_decode(q.flatten(1), None, None, layer(0, SCALES[0]), batch)
    batch = server.batch(server.Mode.EXTEND, [0], [0], [1])
    server.backend.init_forward_metadata(batch)
    server.backend.prefill_wrappers_paged[0].is_cuda_graph_enabled = True
    with pytest.raises(RuntimeError, match="captured prefill"):
        server.backend.forward_extend(q.flatten(1), k, v, layer(0, SCALES[0]), batch)
