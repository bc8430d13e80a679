# SPDX-License-Identifier: Apache-2.0
"""What `kv4.nvfp4_flashinfer` is for: stock's NVFP4 cache on FlashInfer, shown wrong on stock; and faults of ours that these tests see.

The engine and the stand-ins are those of `test_nvfp4_flashinfer`, where the same functions pass with the feature in place.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import kv4_flashinfer_double as double
import pytest
import torch
from kv4_flashinfer_double import (
    DIM,
    EXACT,
    FP8_WORKSPACE,
    HEADS,
    LAYERS,
    PAGE,
    SLOTS,
    Server,
    captured,
    feature,
    off,
    padded,
    pool_of,
    prefills,
    trtllm,
)

from numinous_kv_cache_4bit.engine import nvfp4_flashinfer as ours
from numinous_tooling.numerics import dequantize_nvfp4

platform = double.platform  # fixture


@pytest.mark.parametrize("paged", [False, True], ids=["ragged", "paged"])
def test_stock_scales_prefixes_twice(paged: bool, engine: Any, platform: Any) -> None:
    server = Server(engine, decode="trtllm_mha")
    server.backend.use_paged = paged
    cold, *warm = prefills(server, 0)
    # Where all is read from the workspace, the chunk itself is scaled though it never was divided.
    assert cold > FP8_WORKSPACE if paged else cold < EXACT
    assert min(warm) > FP8_WORKSPACE  # U01
    ones = Server(engine, decode="trtllm_mha", scales=((1.0, 1.0),) * LAYERS)
    ones.backend.use_paged = paged
    assert max(prefills(ones, 0)) < FP8_WORKSPACE


def test_stock_overruns_its_workspace_where_requests_share_a_prefix(engine: Any, platform: Any) -> None:  # fmt: skip
    """Three requests of 390 tokens have 410 slots of 512 together, and 1170 rows of a workspace of 528."""
    server = Server(engine, decode="trtllm_mha", shared=380)
    server.extend([0], [0], [380])
    with pytest.raises(RuntimeError, match="expanded size"):
        server.extend([0, 1, 2], [380] * 3, [10] * 3)


def test_stock_keeps_a_workspace(engine: Any, platform: Any) -> None:
    """A row of FP8 keys and values for each slot, beside packed ones."""
    pool, row = pool_of(engine), HEADS * DIM
    packed = 2 * row * LAYERS * 9 // 16
    assert pool.dq_k_buffer.nbytes == pool.dq_v_buffer.nbytes == (SLOTS + PAGE) * row
    assert sum(pool.get_kv_size_bytes()) == (packed + 2 * row) * (SLOTS + PAGE)


def test_stock_writes_padding(engine: Any, platform: Any) -> None:
    assert any(int(x.count_nonzero()) for x in padded(engine))


def test_stock_has_no_decode_by_flashinfer(engine: Any, platform: Any) -> None:
    with pytest.raises(ValueError, match="does not support decode with flashinfer"):
        Server(engine)


def test_stock_hands_trtllm_gen_scales_that_it_does_not_read(engine: Any, platform: Any) -> None:
    """On sm100, whatever the width of heads: a descriptor that cannot be made, or scales of other tokens and heads."""
    platform.flashinfer.decode.trtllm_batch_decode_with_kv_cache = double.trtllm_gen
    server = Server(engine, decode="trtllm_mha")
    with pytest.raises(RuntimeError, match="TMA descriptor"):
        trtllm(server)
    generator = torch.Generator().manual_seed(1)
    heads, wide = 2, 256
    x = torch.randn(2 * PAGE, heads, wide, generator=generator).bfloat16()
    packed, blocks = double.kv_quantize(x, torch.tensor(1.9))
    from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend

    views = [
        TRTLLMHAAttnBackend._reshape_paged_kv_cache(
            SimpleNamespace(page_size=PAGE), *both, SimpleNamespace(tp_k_head_num=heads, tp_v_head_num=heads), width
        )
        for both, width in (((packed, packed), wide // 2), ((blocks.view(torch.float8_e4m3fn),) * 2, wide // 16))
    ]  # fmt: skip
    q = torch.randn(1, heads, wide, generator=generator).bfloat16()
    named = {"block_tables": torch.tensor([[0, 1]]), "seq_lens": torch.tensor([2 * PAGE]), "bmm1_scale": 1.9 / 16, "bmm2_scale": 1.9, "window_left": -1}  # fmt: skip
    right, wrong = (read(q, *views, **named).float() for read in (double.xqa, double.trtllm_gen))
    stood = dequantize_nvfp4(packed, blocks) * 1.9
    assert off((right, double.attention(q, stood, stood, 1 / 16, False)[0])) < EXACT
    assert off((wrong, right)) > 0.2


@pytest.mark.parametrize(
    ("fault", "step"),
    [
        ("around_decode_plan", lambda original, *of, **named: original(*of, **named)),
        ("clear_spare_blocks", lambda wrapper: None),
    ],
    ids=["keys split", "spare blocks"],
)
def test_faults_of_captured_decode_are_seen(fault: str, step: Any, engine: Any, platform: Any, monkeypatch: Any) -> None:  # fmt: skip
    with monkeypatch.context() as patch:
        if fault == "around_decode_plan":
            patch.setattr(ours, fault, step)
        with feature():
            server = Server(engine)
            if fault == "around_decode_plan":
                assert off(captured(server)) > 0.5
                return
            patch.setattr(ours, fault, step)
            with pytest.raises(AssertionError, match="illegal memory access"):
                captured(server)
