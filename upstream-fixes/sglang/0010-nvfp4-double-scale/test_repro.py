# SPDX-License-Identifier: Apache-2.0
"""FlashInfer prefill over a cached NVFP4 prefix must apply the global scales once.

The backend methods, the pool, its workspace and the recipe are the shipped code. FlashInfer is a stand-in that does in
torch what the library documents: its wrappers multiply logits by k_scale and the output by v_scale, and
nvfp4_kv_dequantize returns value * block scale * global scale.
"""

import contextlib
import types

import kv_pools
import pytest
import repro
import torch

HEADS, DIM, PREFIX, CHUNK = 2, 64, 6, 3
K_SCALE, V_SCALE = 0.25, 4.0


class Attention:
    """One request; `keep` maps the rows of a KV view to the keys of the request."""

    def __init__(self, keep=None):
        self.keep = keep

    def forward_return_lse(
        self, q, k, v=None, *, causal, sm_scale, k_scale=None, v_scale=None, **_
    ):
        if v is None:
            k, v = (one.float()[self.keep] for one in k)
        logits = torch.einsum("qhd,khd->hqk", q, k) * sm_scale * (k_scale or 1.0)
        if causal:
            ahead = torch.ones(q.shape[0], k.shape[0]).triu(k.shape[0] - q.shape[0] + 1).bool()
            logits = logits.masked_fill(ahead, float("-inf"))
        out = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v) * (v_scale or 1.0)
        return out.contiguous(), logits.logsumexp(-1).transpose(0, 1)

    def forward(self, *arguments, **options):
        return self.forward_return_lse(*arguments, **options)[0]


def merge(one, lse_one, two, lse_two):
    weight = torch.softmax(torch.stack([lse_one, lse_two]), 0).unsqueeze(-1)
    return weight[0] * one + weight[1] * two, None


TABLE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def dequantize(packed, scales, global_scale, output_dtype):
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    blocks = scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, -1)
    return (TABLE[codes] * blocks * global_scale).to(output_dtype)


def setting(monkeypatch):
    """A pool with a cached prefix in slots 1..PREFIX of request 0, and the true K and V of prefix and chunk."""
    torch.manual_seed(0)
    monkeypatch.setattr(kv_pools.PLATFORM, "is_sm100", True)
    repro.stub("flashinfer", nvfp4_kv_dequantize=dequantize)
    method = kv_pools.recipes().NVFP4KVCacheMethod(num_layers=1, device="cpu")
    method.k_scales_gpu.fill_(K_SCALE)
    method.v_scales_gpu.fill_(V_SCALE)
    pool = kv_pools.mha_fp4(method, heads=HEADS, dim=DIM)
    slots = torch.arange(1, PREFIX + 1)
    true = []
    for data, blocks, scale in (
        (pool.k_buffer[0], pool.k_scale_buffer[0], K_SCALE),
        (pool.v_buffer[0], pool.v_scale_buffer[0], V_SCALE),
    ):
        codes = torch.randint(0, 16, (PREFIX, HEADS, DIM))
        sizes = torch.tensor([0.25, 0.5, 1.0])[torch.randint(0, 3, (PREFIX, HEADS, DIM // 16))]
        data[slots] = (codes[..., 1::2] << 4 | codes[..., 0::2]).to(torch.uint8)
        blocks.view(torch.float8_e4m3fn)[slots] = sizes.to(torch.float8_e4m3fn)
        chunk = torch.randint(-8, 9, (CHUNK, HEADS, DIM)) / 4.0  # exact in FP8
        true.append((TABLE[codes] * sizes.repeat_interleave(16, -1) * scale, chunk))
    return pool, true


def attend(monkeypatch, use_ragged):
    pool, ((k_old, k_new), (v_old, v_new)) = setting(monkeypatch)
    monkeypatch.setattr(type(pool), "set_kv_buffer", lambda *_, **__: None)
    scope = {
        "torch": torch,
        "_safe_merge_state": merge,
        "KVWriteLoc": kv_pools.memory_pool()["KVWriteLoc"],
        "AttentionType": types.SimpleNamespace(ENCODER_ONLY="encoder_only"),
        "nullcontext": contextlib.nullcontext,
    }
    path = "srt/layers/attention/flashinfer_backend.py"
    methods = {
        name: repro.load_function(path, f"FlashInferAttnBackend.{name}", scope)
        for name in ("forward_extend", "_kv_write_scales")
    }
    with contextlib.suppress(LookupError):
        methods["_kv_read_scales"] = repro.load_function(
            path, "FlashInferAttnBackend._kv_read_scales", scope
        )
    backend = type("Backend", (), {**methods, "_get_wrapper_idx": lambda *_: 0})()
    # The workspace starts with one dummy page; page size is 1.
    keep = torch.arange(1, 1 + PREFIX + (0 if use_ragged else CHUNK))
    vars(backend).update(
        forward_metadata=types.SimpleNamespace(
            prefill_wrappers=[Attention(keep)],
            use_ragged=use_ragged,
            extend_no_prefix=False,
            swa_out_cache_loc=None,
            multi_item_params=None,
        ),
        prefill_wrapper_ragged=Attention(),
        prefill_uses_dequant_workspace=True,
        decode_uses_dequant_workspace=False,
        token_to_kv_pool=pool,
        req_to_token_pool=types.SimpleNamespace(req_to_token=torch.arange(1, 16).view(1, -1)),
        cpu_req_pool_indices=torch.tensor([0]),
        dq_page_table=keep,
        page_size=1,
        kv_cache_quant_method=pool.quant_method,
        is_dllm_model=False,
    )
    layer = kv_pools.layer(
        scaling=DIM**-0.5,
        logit_cap=0.0,
        is_cross_attention=False,
        attn_type="decoder",
        sliding_window_size=-1,
        head_dim=DIM,
        k_scale_float=K_SCALE,
        v_scale_float=V_SCALE,
        k_scale=torch.tensor(K_SCALE),
        v_scale=torch.tensor(V_SCALE),
        **{f"tp_{which}_head_num": HEADS for which in "qkv"},
    )
    batch = types.SimpleNamespace(
        out_cache_loc=torch.arange(PREFIX + 1, PREFIX + CHUNK + 1),
        extend_prefix_lens_cpu=[PREFIX],
        extend_seq_lens_cpu=[CHUNK],
    )
    q = torch.randn(CHUNK, HEADS, DIM)
    found = backend.forward_extend(q, k_new, v_new, layer, batch)
    key, value = torch.cat([k_old, k_new]), torch.cat([v_old, v_new])
    wanted = Attention().forward(q, key, value, causal=True, sm_scale=DIM**-0.5)
    return found.view(CHUNK, HEADS, DIM), wanted


@pytest.mark.parametrize("use_ragged", [False, True], ids=["paged", "ragged"])
def test_prefix_attention_matches_the_reference(use_ragged, monkeypatch):
    found, wanted = attend(monkeypatch, use_ragged)
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
