# SPDX-License-Identifier: Apache-2.0
"""`kv4.mla_dense` in the engine's own classes: sizing, pool, FlashAttention and FlashMLA backends and hooks are real, kernels are stand-ins.

The yardstick is stock itself: the same backend over stock's bf16 pool, which holds what the 4-bit rows stand for. Outputs are equal bit for
bit. The stand-ins of the attention kernels refuse what is not bf16 and what is scaled; ours are replaced by their references.
"""

from __future__ import annotations

import functools
import math
import sys
import types
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv4_harness import DRAFT, Count, close, hooks_of

from numinous_kv_cache_4bit.engine import mla_dense as ours
from numinous_kv_cache_4bit.engine import mla_dense_native, native
from numinous_kv_cache_4bit.engine import rows as kept
from numinous_kv_cache_4bit.hooks.mla_dense import FEATURE
from numinous_kv_cache_4bit.kernels import kv4_expand, kv4_gather, kv4_write
from numinous_kv_cache_4bit.kernels.sparse_mla_decode import MAX_SPLITS
from numinous_kv_cache_4bit.options import DECODE, MLA_DENSE
from numinous_tooling.formats import KV4

HEADS, SLOTS, LAYERS = 3, 320, 2
SCALE = 0.04
CONTEXT = 128


# --- Stand-ins ------------------------------------------------------------------------------------------------------


def attend(q: torch.Tensor, keys: torch.Tensor, lengths: list[int], scale: float) -> torch.Tensor:
    """fp32 [rows, heads, 512]: query row n over the first lengths[n] keys [tokens, 576]."""
    seen = keys[: max(lengths)].float()
    hidden = torch.arange(len(seen)) >= torch.tensor(lengths)[:, None]
    scores = (q.float() @ seen.T * scale).masked_fill(hidden[:, None], -torch.inf)
    return torch.softmax(scores, dim=-1) @ seen[:, :512]


class FlashAttention(types.ModuleType):
    """``sgl_kernel.flash_attn``: absorbed MLA over a paged bf16 cache; `calls` counts."""

    def __init__(self) -> None:
        super().__init__("sgl_kernel.flash_attn")
        self.calls = 0

    def flash_attn_varlen_func(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("multi-head attention is not part of these tests")

    def get_scheduler_metadata(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not for MLA")

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        qv: torch.Tensor,
        page_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        k_descale: Any,
        v_descale: Any,
        **others: Any,
    ) -> torch.Tensor:
        self.calls += 1
        assert {x.dtype for x in (q, qv, k_cache, v_cache)} == {torch.bfloat16}
        assert (k_descale, v_descale, causal) == (None, None, True)
        assert page_table.dtype == cache_seqlens.dtype == torch.int32
        page = k_cache.shape[1]
        keys = torch.cat([v_cache, k_cache], dim=-1).view(-1, 576)
        out = []
        for request, length in enumerate(cache_seqlens.tolist()):
            slots = page_table[request, : -(-length // page)].long()[:, None] * page
            slots = (slots + torch.arange(page)).flatten()
            begin, end = cu_seqlens_q[request : request + 2].tolist()
            queries = torch.cat([qv[begin:end], q[begin:end]], dim=-1)
            lengths = [length - (end - begin) + n + 1 for n in range(end - begin)]
            out.append(attend(queries, keys[slots], lengths, softmax_scale))
        return torch.cat(out).to(torch.bfloat16)


class FlashMLA(types.ModuleType):
    """``sgl_kernel.flash_mla``, dense; the last page is read whole, as the kernel does: what it holds must be finite."""

    def __init__(self) -> None:
        super().__init__("sgl_kernel.flash_mla")
        self.calls = 0

    def get_mla_metadata(self, *args: Any, is_fp8_kvcache: bool, **kwargs: Any) -> Any:
        assert not is_fp8_kvcache
        return torch.zeros(8, 8, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)

    def flash_mla_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        self.calls += 1
        assert q.dtype == k_cache.dtype == torch.bfloat16
        assert causal
        assert not {"descale_q", "descale_k"} & set(others)
        assert k_cache.shape[1:] == (64, 1, 576)
        out = []
        for request, length in enumerate(cache_seqlens.tolist()):
            blocks = block_table[request, : -(-length // 64)].long()
            keys = k_cache[blocks].view(-1, 576)
            assert bool(keys.isfinite().all())
            width = q.shape[1]
            lengths = [length - width + n + 1 for n in range(width)]
            out.append(attend(q[request], keys, lengths, softmax_scale))
        return torch.stack(out).to(torch.bfloat16), None


# --- Engine ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernels(engine: Any) -> Iterator[Any]:
    """`sgl_kernel` as far as two backends look, and the backends, imported over it."""
    package: Any = types.ModuleType("sgl_kernel")
    package.__path__ = []
    package.merge_state_v2 = None
    package.flash_attn, package.flash_mla = FlashAttention(), FlashMLA()
    saved = {name: sys.modules.get(name) for name in ("sgl_kernel", "sgl_kernel.flash_attn", "sgl_kernel.flash_mla")}  # fmt: skip
    sys.modules["sgl_kernel"] = package
    sys.modules["sgl_kernel.flash_attn"] = package.flash_attn
    sys.modules["sgl_kernel.flash_mla"] = package.flash_mla
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.configs.model_config import AttentionArch
        from sglang.srt.layers.attention import (
            flashattention_backend,
            flashinfer_mla_backend,
            flashmla_backend,
        )
        from sglang.srt.mem_cache import kv_cache_dtype
    yield SimpleNamespace(
        package=package,
        fa=flashattention_backend,
        flashmla=flashmla_backend,
        flashinfer=flashinfer_mla_backend,
        dtype=kv_cache_dtype,
        MLA=AttentionArch.MLA,
    )
    for module in (flashattention_backend, flashmla_backend):
        sys.modules.pop(module.__name__, None)  # others import it over what they have
    for name, module in saved.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module


@pytest.fixture(scope="module")
def installed(kernels: Any) -> Iterator[Any]:
    yield from hooks_of(FEATURE)


@pytest.fixture(autouse=True)
def replaced(request: Any, monkeypatch: Any) -> Count | None:
    """Our kernels as their references; a Hopper GPU as far as the feature looks; the counter."""
    if "installed" not in request.fixturenames:
        return None
    from numinous_kv_cache_4bit.engine import mla_dense_pool

    def write(pool: torch.Tensor, loc: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> None:  # fmt: skip
        kv4_write.reference(pool[:, 0], loc, latent[:, 0], rope[:, 0])

    def gather(pool: torch.Tensor, index: torch.Tensor, *, to: Any) -> torch.Tensor:
        return kv4_gather.reference(pool[:, 0], index, to=to)["out"].view(torch.bfloat16)

    def expand(pool: torch.Tensor, *of: torch.Tensor, extra: int) -> None:
        *call, out = of
        kv4_expand.reference(pool[:, 0], *call, out[:, 0], extra=extra)

    monkeypatch.setattr(kept, "kv4_write", write)
    monkeypatch.setattr(kept, "kv4_gather", gather)
    monkeypatch.setattr(mla_dense_pool, "kv4_expand", expand)
    monkeypatch.setattr(kept, "_arch", lambda: "sm90")
    monkeypatch.setattr(ours.ROWS, "_described", False)
    count = Count()
    monkeypatch.setattr(ours.ROWS, "count", count)
    return count


class Config(SimpleNamespace):
    def get_text_config(self) -> Any:
        return self


def configurator(engine: Any, *, draft: bool = False, layers: int = LAYERS, **changes: Any) -> Any:
    """What sizing and builders read of the engine's `KVCacheConfigurator`."""
    made = SimpleNamespace(
        model_config=SimpleNamespace(
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            context_len=CONTEXT,
            num_attention_heads=HEADS,
            hf_config=Config(architectures=["DeepseekV3ForCausalLM"]),
            linear_attn_registry_result=None,
        ),
        layer_info=SimpleNamespace(num_effective_layers=layers, start_layer=0, end_layer=layers),
        spec_algorithm=SimpleNamespace(
            is_eagle=lambda: False, is_standalone=lambda: False, is_dflash_family=lambda: False
        ),
        spec_aux_config=SimpleNamespace(eagle_draft_num_layers=None),
        kv_cache_dtype=torch.bfloat16,
        kv_cache_dtype_str="auto",
        server_args=SimpleNamespace(enable_hisparse=False),
        use_mla_backend=True,
        is_draft_worker=draft,
        is_hybrid_swa=False,
        pool_page_size=1,
        device="cpu",
        mambaish_config=None,
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def build(engine: Any, size: int = SLOTS, page: int = 1, **of: Any) -> Any:
    """The pool, as the engine's hooked builder makes it."""
    cls = engine.configurator.KVCacheConfigurator
    asked = configurator(engine, pool_page_size=page, **of)
    return cls._build_mla_kv_pool(asked, max_total_num_tokens=size)


def stock_pool(engine: Any, size: int = SLOTS, page: int = 1) -> Any:
    return engine.pools.MLATokenToKVPool(
        size=size, page_size=page, dtype=torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False,
    )  # fmt: skip


@functools.cache
def values(seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent [tokens, 1, 512] and rope [tokens, 1, 64] of new tokens; not to be written to."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(tokens, 1, 576, generator=generator).to(torch.bfloat16)
    return both[..., :512], both[..., 512:]


def decoded(latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """What rows of these stand for, bf16 [..., 576]."""
    return torch.cat(KV4.unpack(KV4.pack(latent, rope)), dim=-1)


def layer(number: int = 0) -> Any:
    """What is read of a `RadixAttention` of absorbed MLA."""
    return SimpleNamespace(
        layer_id=number, tp_q_head_num=HEADS, tp_k_head_num=1, tp_v_head_num=1, head_dim=576,
        v_head_dim=512, scaling=SCALE, is_cross_attention=False, logit_cap=0.0, attn_type=None,
        sliding_window_size=-1, k_scale=None, v_scale=None,
    )  # fmt: skip


@functools.cache
def filling(number: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a layer, uint8 [slots, 1, 352], and what they stand for, bf16 [slots, 1, 576]."""
    rows = KV4.pack(*values(100 + number, slots))
    return rows, torch.cat(KV4.unpack(rows), dim=-1)


def fill(pool: Any, *, exact: bool) -> None:
    """The same tokens in all slots but 0 of every layer: quantised, or what that stands for."""
    for number, buffer in enumerate(pool.kv_buffer):
        buffer[1:] = filling(number, len(buffer) - 1)[exact]


def make_backend(kernels: Any, engine: Any, name: str, pool: Any, monkeypatch: Any) -> Any:
    """The engine's own backend over a pool, told what the hooked function tells it of the cache's dtype."""
    told, dtype = kernels.dtype.configure_kv_cache_dtype(**DTYPE)
    requests = engine.pools.ReqToTokenPool(
        size=8, max_context_len=CONTEXT, device="cpu", enable_memory_saver=False
    )
    model = SimpleNamespace(
        is_encoder_decoder=False, context_len=CONTEXT, is_local_attention_model=False, head_dim=576,
        attention_arch=kernels.MLA, hf_text_config=SimpleNamespace(num_attention_heads=HEADS),
        get_num_kv_heads=lambda tp: 1, num_attention_heads=HEADS, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    )  # fmt: skip
    runner = SimpleNamespace(
        sliding_window_size=None, model_config=model, device="cpu", req_to_token_pool=requests,
        token_to_kv_pool=pool, kv_cache_dtype=dtype, kv_cache_dtype_str=told, dtype=torch.bfloat16,
        page_size=pool.page_size, kv_index_translator=SimpleNamespace(is_translating=False),
        ps=SimpleNamespace(attn_cp_size=1, tp_size=1), is_draft_worker=False,
    )  # fmt: skip
    if name == "fa3":
        monkeypatch.setattr(kernels.fa, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr(
            kernels.fa, "flash_attn_with_kvcache", _without_version(kernels.package.flash_attn)
        )
        return kernels.fa.FlashAttentionBackend(runner)

    def parent(backend: Any, *args: Any, **kwargs: Any) -> None:
        """FlashInfer's part, which needs a GPU; what its child reads of it."""
        backend.req_to_token_pool, backend.token_to_kv_pool = requests, pool
        backend.kv_index_translator = runner.kv_index_translator
        backend.max_context_len, backend.device, backend.page_size = CONTEXT, "cpu", 64
        backend.skip_prefill = False

    monkeypatch.setattr(kernels.flashinfer.FlashInferMLAAttnBackend, "__init__", parent)
    monkeypatch.setattr(kernels.flashmla, "create_flashmla_kv_indices_triton", BlockTable())
    for function in ("flash_mla_with_kvcache", "get_mla_metadata"):
        monkeypatch.setattr(kernels.flashmla, function, getattr(kernels.package.flash_mla, function))  # fmt: skip
    return kernels.flashmla.FlashMLABackend(runner)


def _without_version(flash: FlashAttention) -> Any:
    return lambda *args, ver, **kwargs: flash.flash_attn_with_kvcache(*args, **kwargs)


class BlockTable:
    """`create_flashmla_kv_indices_triton`, for any grid."""

    def __getitem__(self, grid: Any) -> Any:
        def launch(table: Any, requests: Any, lengths: Any, start: Any, out: Any, *strides: int) -> None:  # fmt: skip
            for row, (request, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):  # fmt: skip
                blocks = -(-length // 64)
                out[row, :blocks] = table[request, : blocks * 64 : 64] // 64

        return launch


DTYPE: dict[str, Any] = {
    "server_args_kv_cache_dtype": "fp8_e4m3",
    "model_dtype": torch.bfloat16,
    "is_draft_worker": False,
    "is_dflash": False,
    "speculative_draft_attention_backend": None,
}


def model_named(name: str, **scales: float) -> Any:
    module: Any = type(name, (torch.nn.Module,), {})()
    module.attn = torch.nn.Module()
    module.attn.k_scale_float = scales.get("k", 1.0)
    return module


DTYPE["model"] = model_named("DeepseekV3ForCausalLM")


def batch(engine: Any, backend: Any, mode: str, lengths: list[int], new: list[int]) -> Any:
    """Requests in scattered slots (whole pages where there are pages), the last `new` tokens of each are those of this forward.

    Draft tokens and verifications lie behind `seq_lens`, as in the engine.
    """
    page, table = backend.page_size, backend.req_to_token_pool.req_to_token
    pages = torch.randperm(SLOTS // page - 1, generator=torch.Generator().manual_seed(1)) + 1
    extra = DRAFT if mode == "TARGET_VERIFY" else 0
    used, loc = 0, []
    for request, (length, count) in enumerate(zip(lengths, new, strict=True)):
        total = length + extra
        own = pages[used : used + -(-total // page)]
        used += len(own)
        slots = (own[:, None] * page + torch.arange(page)).flatten()[:total]
        table[request, :total] = slots.int()
        loc.append(slots[total - count :])
    return SimpleNamespace(
        batch_size=len(lengths), forward_mode=getattr(engine.Mode, mode),
        seq_lens=torch.tensor(lengths), seq_lens_cpu=torch.tensor(lengths),
        seq_lens_sum=sum(lengths), req_pool_indices=torch.arange(len(lengths)),
        extend_seq_lens_cpu=new, extend_seq_lens=torch.tensor(new),
        extend_prefix_lens_cpu=[a - b for a, b in zip(lengths, new, strict=True)],
        out_cache_loc=torch.cat(loc), attn_cp_metadata=None, encoder_lens=None,
        attn_attend_prefix_cache=None, global_num_tokens_cpu=None, attn_dcp_metadata=None,
        spec_info=SimpleNamespace(ragged_verify_layout=None) if extra else None,
    )  # fmt: skip


def forward(backend: Any, made: Any, number: int) -> torch.Tensor:
    """One layer of a forward: write the batch's tokens, attend; through the method that the model calls."""
    tokens = len(made.out_cache_loc)
    latent, rope = values(7 + number, tokens)
    q = torch.randn(tokens, HEADS, 576, generator=torch.Generator().manual_seed(2))
    q = q.to(torch.bfloat16)
    if type(backend).__name__ == "FlashAttentionBackend":
        parts = {"q_rope": q[..., 512:].contiguous(), "k_rope": rope}
        given = (q[..., :512].contiguous(), latent, latent)
    else:
        parts, given = {}, (q, torch.cat([latent, rope], dim=-1), latent)
    out: torch.Tensor = backend.forward(*given, layer(number), made, **parts)
    return out


CASES = [
    ("DECODE", [40, 1, 65], [1, 1, 1]),
    ("TARGET_VERIFY", [30, 5], [DRAFT, DRAFT]),
    ("EXTEND", [50, 9], [20, 9]),  # absorbed, with a cached prefix and without
    ("DECODE", [1], [1]),
]


def both(
    kernels: Any,
    engine: Any,
    monkeypatch: Any,
    name: str,
    case: tuple[str, list[int], list[int]],
    page: int = 1,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Outputs of each layer: the feature's, and stock's over what the rows stand for."""
    found = []
    page = 64 if name == "flashmla" else page
    for exact in (False, True):
        pool = stock_pool(engine, page=page) if exact else build(engine, page=page)
        fill(pool, exact=exact)
        backend = make_backend(kernels, engine, name, pool, monkeypatch)
        made = batch(engine, backend, *case)
        if exact:  # stock writes through a kernel for GPUs
            pool._write_mla_kv_buffer = lambda dst, loc, *parts: dst.__setitem__(loc, decoded(*parts))  # fmt: skip
            pool.set_kv_buffer = lambda layer, loc, k, v, pool=pool: pool._write_mla_kv_buffer(
                pool.kv_buffer[layer.layer_id], loc, k[..., :512], k[..., 512:]
            )
            pool.attending, pool.native = _nothing, False
        backend.init_forward_metadata(made)
        found.append([forward(backend, made, number) for number in range(LAYERS)])
    return list(zip(*found, strict=True))


class _nothing:  # a context
    def __init__(self, *of: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *of: Any) -> None: ...


def backends_of(case: tuple[str, list[int], list[int]]) -> tuple[str, ...]:
    # FlashMLA's backend hands a plain extend to FlashInfer, which needs a GPU.
    return ("fa3",) if case[0] == "EXTEND" else ("fa3", "flashmla")


PAIRS = [(name, case) for case in CASES for name in backends_of(case)]


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_attention(
    name: str, case: Any, kernels: Any, installed: Any, engine: Any, replaced: Count, monkeypatch: Any
) -> None:  # fmt: skip
    """Every backend, phase and layer gives what stock gives on a bf16 cache, bit for bit."""
    for got, want in both(kernels, engine, monkeypatch, name, case):
        assert bool(want.isfinite().all())
        assert want.norm() > 1
        assert torch.equal(got, want)
    assert replaced.seen == LAYERS, "one decoding a layer"


@pytest.mark.parametrize("fault", ["stale layer", "before the write", "no draft rows", "short"])
@pytest.mark.parametrize("name", ["fa3", "flashmla"])
def test_faults_are_seen(
    fault: str, name: str, kernels: Any, installed: Any, engine: Any, monkeypatch: Any
) -> None:
    """The comparison above fails where live rows are not decoded, late, or too few."""
    from numinous_kv_cache_4bit.engine.mla_dense_pool import DensePool

    original = DensePool._expand
    case = CASES[0]
    if fault == "stale layer":

        def faulty(pool: Any, packed: Any, *of: Any) -> None:
            original(pool, pool.kv_buffer[0], *of)
    elif fault == "before the write":
        attending = DensePool.attending

        def early(pool: Any, *of: Any) -> Any:
            original(pool, pool.kv_buffer[0], *of)
            return attending(pool, *of)

        monkeypatch.setattr(DensePool, "attending", early)

        def faulty(pool: Any, *of: Any) -> None: ...
    elif fault == "no draft rows":
        case = CASES[1]
        monkeypatch.setattr(ours, "_extra", lambda forward_batch: 0)
        faulty = original
    else:

        def faulty(pool: Any, packed: Any, table: Any, made: Any, extra: int) -> None:
            original(pool, packed, table, made, extra - 1)

    monkeypatch.setattr(DensePool, "_expand", faulty)
    pairs = both(kernels, engine, monkeypatch, name, case)
    assert not all(torch.equal(got, want) for got, want in pairs)


def test_lengths_are_read_where_they_are_used(
    kernels: Any, installed: Any, engine: Any, monkeypatch: Any
) -> None:
    """A captured graph replays with other contents of the same tensors: nothing of them is kept on the host."""
    pool = build(engine)
    fill(pool, exact=False)
    backend = make_backend(kernels, engine, "fa3", pool, monkeypatch)
    made = batch(engine, backend, *CASES[0])
    backend.init_forward_metadata(made)
    forward(backend, made, 0)
    table = backend.req_to_token_pool.req_to_token
    table[4, :9] = torch.arange(200, 209)
    made.seq_lens[0], made.req_pool_indices[0] = 9, 4
    pool.shadow[200:209] = 0
    forward(backend, made, 0)
    assert torch.equal(pool.shadow[200:209], filling(0, SLOTS)[1][199:208])


def test_nobody_reads_without_a_batch(installed: Any, engine: Any) -> None:
    """U06 and its like: outside of attention there is a shape, and no memory that could be taken for rows."""
    pool = build(engine)
    fill(pool, exact=False)
    key, value = pool.get_kv_buffer(0)
    assert (key.shape, key.dtype) == ((SLOTS + 1, 1, 576), torch.bfloat16)
    assert (value.shape, value.dtype) == ((SLOTS + 1, 1, 512), torch.bfloat16)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        (key + 0).cpu()
    made = SimpleNamespace(req_pool_indices=torch.tensor([0]), seq_lens=torch.tensor([3]))
    with pool.attending(torch.tensor([[5, 6, 7]]), made, 0):
        assert pool.get_value_buffer(1).shape == (SLOTS + 1, 1, 512)
        want = filling(1, SLOTS)[1]
        assert torch.equal(pool.get_value_buffer(1)[5:8], want[4:7, :, :512])
        assert torch.equal(pool.get_key_buffer(1)[5:8], want[4:7])
    assert pool.get_key_buffer(1).device.type == "meta"


# --- Native decode --------------------------------------------------------------------------------------------------


@pytest.fixture
def native_pages(installed: Any, native_kernel: Any, monkeypatch: Any) -> Any:
    """The option says native; the kernel is its reference."""
    monkeypatch.setenv(DECODE[MLA_DENSE].name, "native")
    monkeypatch.setattr(native, "_proven", set())
    monkeypatch.setattr(native, "PROBE", 64)
    return native_kernel


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_native(
    name: str, case: Any, kernels: Any, native_pages: Any, engine: Any, replaced: Count, monkeypatch: Any
) -> None:  # fmt: skip
    """Few new tokens: stock's page tables, no shadow, no attention of stock's; what stock gives but for bf16. Prefill: as before."""
    stock = kernels.package.flash_attn if name == "fa3" else kernels.package.flash_mla
    before = stock.calls
    pairs = both(kernels, engine, monkeypatch, name, case, page=64)
    extend = case[0] == "EXTEND"
    for got, want in pairs:
        assert torch.equal(got, want) if extend else close(got, want.float(), 0.005)
    assert stock.calls - before == LAYERS * (2 if extend else 1), "stock's own half of the pairs"
    queries = DRAFT if case[0] == "TARGET_VERIFY" else 1
    calls = [(len(case[1]), queries, HEADS)] * (0 if extend else LAYERS)
    assert [call[:3] for call in native_pages.calls[len(native.PROBE_SPLITS) :]] == calls
    assert (replaced.seen, replaced.reasons) == (LAYERS, [])


@pytest.mark.parametrize("fault", ["scale", "layer", "halves of q", "lengths", "tables"])
@pytest.mark.parametrize(("name", "case"), [("fa3", CASES[0]), ("flashmla", CASES[1])])
def test_native_faults_are_seen(
    fault: str, name: str, case: Any, kernels: Any, native_pages: Any, engine: Any, monkeypatch: Any
) -> None:  # fmt: skip
    def wrong(q: Any, pool: Any, *, sm_scale: float, **of: Any) -> Any:
        if "lengths" in of:  # not the proof at boot
            sm_scale *= 1.5 if fault == "scale" else 1
            pool = filling(2, len(pool))[0] if fault == "layer" else pool
            q = q.roll(288, -1) if fault == "halves of q" else q
            of["lengths"] = of["lengths"] - int(fault == "lengths")
            of["page_table"] = of["page_table"].roll(int(fault == "tables"), 0)
        return native_pages(q, pool, sm_scale=sm_scale, **of)

    monkeypatch.setattr(native, "sparse_mla_decode", wrong)
    pairs = both(kernels, engine, monkeypatch, name, case, page=64)
    assert not all(close(got, want.float(), 0.02) for got, want in pairs)


def test_native_reads_tables_where_they_are(
    kernels: Any, native_pages: Any, engine: Any, monkeypatch: Any
) -> None:
    """A captured graph replays with other contents of stock's buffers, which are handed on as they are, FlashMLA's in their whole width."""
    pool = build(engine, page=64)
    backend = make_backend(kernels, engine, "fa3", pool, monkeypatch)
    made = batch(engine, backend, *CASES[0])
    backend.init_forward_metadata(made)
    metadata = backend.forward_metadata
    both_backends = SimpleNamespace(_select_backend=lambda mode: backend)  # prefill's and decode's
    for asked in (backend, both_backends):
        table, lengths, queries = mla_dense_native._tables(ours.ROWS, asked, made, 3)
        assert (table is metadata.page_table, lengths is metadata.cache_seqlens_int32) == (True, True)  # fmt: skip
        assert (queries, lengths.tolist(), table.shape) == (1, [40, 1, 65], (3, 2))
    backend = make_backend(kernels, engine, "flashmla", pool, monkeypatch)
    buffer = torch.arange(20, dtype=torch.int32).view(4, 5)
    backend.forward_metadata = SimpleNamespace(block_kv_indices=buffer[:3, :1], seq_lens_k=None)
    table, lengths, _ = mla_dense_native._tables(ours.ROWS, backend, made, 3)
    assert torch.equal(table, buffer[:3])
    assert (table.data_ptr(), lengths.tolist()) == (buffer.data_ptr(), [40, 1, 65])


def test_native_takes_what_is_made_for_it(
    kernels: Any, native_pages: Any, engine: Any, replaced: Count, monkeypatch: Any
) -> None:
    pool = build(engine, page=64)
    backend = make_backend(kernels, engine, "fa3", pool, monkeypatch)
    made = batch(engine, backend, *CASES[1])
    backend.init_forward_metadata(made)
    for tokens in (5, 18):  # not the same number for each of two requests; nine for each
        assert mla_dense_native._tables(ours.ROWS, backend, made, tokens) is None
    assert mla_dense_native._tables(ours.ROWS, backend, made, 4) is None, "metadata of three"
    assert replaced.reasons == ["queries"] * 3
    with pytest.raises(SystemExit, match="page tables of fa3 and flashmla, this is a Simple"):
        mla_dense_native._tables(ours.ROWS, SimpleNamespace(forward_metadata=None), made, 6)
    with pytest.raises(SystemExit, match="pages of 64 tokens, these have 1: add --page-size 64, or set NUMINOUS_KV4_MLA_DENSE_DECODE=scratch"):  # fmt: skip
        build(engine)


def test_native_bytes(native_pages: Any, engine: Any) -> None:
    """The shadow stays, for prefill, and is counted; partial outputs are bounded whatever the context is."""
    pool, cpu = build(engine, page=64), torch.device("cpu")
    assert pool.get_kv_size_bytes() == (SLOTS + 64) * ours.cell_size(LAYERS, 0)
    for tokens in (1, 3, 64, 400, 4096):
        for heads in (8, 16, 128):
            splits = mla_dense_native.most_splits(tokens, heads, 3200, cpu) or MAX_SPLITS
            parts = splits * tokens * heads * mla_dense_native.PART
            assert splits == 1 or parts <= mla_dense_native.PARTS
    assert mla_dense_native.most_splits(64, 128, 1, cpu) == 1
    # A bound, no wish: 128 lists fill 132 multiprocessors, 16 of 128 heads a quarter of them.
    assert mla_dense_native.most_splits(128, 16, 64, cpu) == 1
    assert mla_dense_native.most_splits(16, 128, 512, cpu) == 4


# --- A cached prefix in front of multi-head attention ----------------------------------------------------------------


def test_prefix(installed: Any, engine: Any, monkeypatch: Any) -> None:
    """The model's own functions: keys are bf16 (stock casts them to E4M3 under this flag), latent and rope come from the rows."""
    pool = build(engine)
    fill(pool, exact=False)
    context = engine.context.ForwardContext(attn_backend=SimpleNamespace(token_to_kv_pool=pool))
    mixin = engine.mha.DeepseekMHAForwardMixin
    attention = SimpleNamespace(
        attn_mha=layer(1), num_local_heads=HEADS, qk_nope_head_dim=128, qk_rope_head_dim=64,
        qk_head_dim=192, current_attention_backend="fa3", kv_cache_dtype="fp8_e4m3",
    )  # fmt: skip
    monkeypatch.setattr(engine.mha, "_is_cuda", True)
    slots = torch.tensor([9, 200, 4, 4])
    with engine.context.forward_context(context):
        latent, rope = mixin._get_mla_kv_buffer(attention, slots, torch.bfloat16, None)
        assert (latent.shape, rope.shape) == ((4, 512), (4, 1, 64))
        assert latent.is_contiguous()
        want = filling(1, SLOTS)[1][slots - 1]
        assert torch.equal(torch.cat([latent, rope[:, 0]], dim=-1), want[:, 0])
        # New tokens, as the multi-head path writes them.
        new = values(3, 2)
        made = SimpleNamespace(out_cache_loc=torch.tensor([9, 0]))
        mixin._set_mla_kv_buffer(attention, None, new[0][:, 0], new[1], made)
        latent, _ = mixin._get_mla_kv_buffer(attention, torch.tensor([9, 0]), torch.bfloat16, None)
        assert torch.equal(latent[0], decoded(*new)[0, 0, :512])
        assert not latent[1].any(), "slot 0 takes padding and stays zero"
        key = mixin._concat_and_cast_mha_k(
            attention, torch.zeros(2, HEADS, 128, dtype=torch.bfloat16), new[1], None
        )
    assert key.dtype == torch.bfloat16
    assert pool.dtype == torch.bfloat16, "what the path for powers of two of heads casts to"


# --- Bytes ----------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_allocation(installed: Any, engine: Any) -> None:
    """U05, U45: what sizing divides by is what a token's slots take, the shadow and a draft among them."""
    sizing = engine.sizing.DefaultPoolConfigurator
    for layers in (1, LAYERS, 61):
        asked = configurator(engine, layers=layers)
        pool = build(engine, size=63, layers=layers)
        assert sizing(asked)._cell_size == 352 * layers + 1152
        assert pool.get_kv_size_bytes() == 64 * sizing(asked)._cell_size
        assert sizing(asked).calculate_pool_sizes(10**9, 1).max_total_num_tokens == (
            10**9 // (352 * layers + 1152)
        )
    asked.spec_algorithm.is_eagle = lambda: True
    asked.spec_aux_config.eagle_draft_num_layers = 1
    draft = build(engine, size=63, layers=1, draft=True)
    assert draft.shadow is pool.shadow
    total = pool.get_kv_size_bytes() + draft.get_kv_size_bytes()
    assert total == 64 * sizing(asked)._cell_size
    assert sizing(configurator(engine, layers=61))._cell_size == 22_624


def test_draft_and_target_take_turns(installed: Any, engine: Any) -> None:
    """They share a shadow, not what is in it."""
    target, draft = build(engine), build(engine, layers=1, draft=True)
    fill(target, exact=False)
    latent, rope = values(55, 3)
    draft.set_mla_kv_buffer(layer(), torch.tensor([5, 6, 7]), latent, rope)
    made = SimpleNamespace(req_pool_indices=torch.tensor([0]), seq_lens=torch.tensor([3]))
    for pool, want in (
        (target, filling(0, SLOTS)[1][4:7]),
        (draft, decoded(latent, rope)),
        (target, filling(0, SLOTS)[1][4:7]),
    ):
        with pool.attending(torch.tensor([[5, 6, 7]]), made, 0):
            assert torch.equal(pool.get_key_buffer(0)[5:8], want)


def test_draft_of_another_size(installed: Any, engine: Any) -> None:
    target = build(engine, size=50)
    with pytest.raises(SystemExit, match="no target's pool has the 40 slots of the draft's"):
        build(engine, size=40, draft=True)
    del target


def test_line_at_boot(installed: Any, engine: Any, monkeypatch: Any) -> None:
    """Tokens, and how many rows of stock's would fit, by the byte model; no other pool may stand here."""
    lines: list[str] = []
    monkeypatch.setattr(
        "sglang.srt.utils.log_info_on_rank0", lambda logger, line: lines.append(line)
    )
    asked = configurator(engine, layers=61)
    ours.after_pools(build(engine, size=1000, layers=61), asked)
    (line,) = lines
    assert "1000 tokens in 352-byte rows, 22624 bytes per token" in line
    assert f"{1000 * 22624 // 35136} stock's FP8 rows (35136 bytes, 1.553 x)" in line
    assert f"{1000 * 22624 // 70272} bf16 rows (70272 bytes, 3.106 x)" in line
    with pytest.raises(SystemExit, match="builds a MLATokenToKVPool"):
        ours.after_pools(stock_pool(engine), asked)


def test_table_is_not_written_before_the_last_layer_has_read_it(
    installed: Any, engine: Any, monkeypatch: Any
) -> None:
    """The scheduler's fence: the whole forward, whatever event a graph's runner has published."""
    from sglang.srt.environ import envs

    monkeypatch.delenv("SGLANG_FORCE_COARSE_WAR_BARRIER", raising=False)
    assert not envs.SGLANG_FORCE_COARSE_WAR_BARRIER.get()
    build(engine)
    assert envs.SGLANG_FORCE_COARSE_WAR_BARRIER.get()


# --- Bugs of stock's FP4 pools ---------------------------------------------------------------------------------------


def rows_of(pool: Any, slots: list[int]) -> list[torch.Tensor]:
    return [buffer[slots].clone() for buffer in pool.kv_buffer]


def test_moved_rows_keep_their_scales(installed: Any, engine: Any) -> None:
    """U04: `move_kv_cache`."""
    pool = build(engine)
    fill(pool, exact=False)
    before = rows_of(pool, [9, 20])
    pool.move_kv_cache(torch.tensor([3, 4]), torch.tensor([9, 20]))
    for number, rows in enumerate(rows_of(pool, [3, 4])):
        assert torch.equal(rows, before[number])
        latent, _ = pool.get_mla_kv_buffer(layer(number), torch.tensor([3]))
        assert torch.equal(latent[0], filling(number, SLOTS)[1][8, :, :512])


@pytest.mark.parametrize("chunk", [8192, 2])
def test_retracted_rows_come_back_elsewhere(installed: Any, engine: Any, chunk: int) -> None:
    """U10: copies to the host and back hold whole rows; so do the buffers that are registered for transfers."""
    pool = build(engine)
    fill(pool, exact=False)
    pool.cpu_offloading_chunk_size = chunk
    held = rows_of(pool, [5, 6, 7])
    # Both wait for the device by the platform, which has none here.
    copy = pool.get_cpu_copy(torch.tensor([5, 6, 7]))
    pool.load_cpu_copy(copy, torch.tensor([30, 31, 32]))
    assert all(map(torch.equal, rows_of(pool, [30, 31, 32]), held))
    pointers, lengths, items = pool.get_contiguous_buf_infos()
    assert pointers == [buffer.data_ptr() for buffer in pool.kv_buffer]
    assert lengths == [(SLOTS + 1) * 352] * LAYERS
    assert items == [352] * LAYERS


def test_padding_leaves_slot_0(installed: Any, engine: Any) -> None:
    """U09: by either way of writing, also with ids that are none of the pool's."""
    pool = build(engine)
    latent, rope = values(1, 4)
    loc = torch.tensor([0, 3, -1, SLOTS + 1])
    pool._write_mla_kv_buffer(pool.kv_buffer[0], loc, latent, rope)
    pool.set_kv_buffer(layer(1), torch.tensor([0, 3, 0, 0]), torch.cat([latent, rope], -1), latent)
    for buffer in pool.kv_buffer:
        assert torch.equal(buffer[3, 0], KV4.pack(latent, rope)[1, 0])
        assert not buffer[:3].any()
        assert not buffer[4:].any()


# --- Boot -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLMNextN", "KimiK25ForConditionalGeneration"],
)  # fmt: skip
def test_engine_is_told_bf16(kernels: Any, installed: Any, name: str) -> None:
    asked = DTYPE | {"model": model_named(name)}
    assert kernels.dtype.configure_kv_cache_dtype(**asked) == ("auto", torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": model_named("LlamaForCausalLM")}, "this model is LlamaForCausalLM; unset NUMINOUS_KV4_MLA_DENSE"),
        ({"model": model_named("DeepseekV32ForCausalLM")}, "this model is DeepseekV32ForCausalLM"),
        ({"server_args_kv_cache_dtype": "auto"}, "is torch.bfloat16: add --kv-cache-dtype fp8_e4m3"),
        ({"server_args_kv_cache_dtype": "mxfp8"}, "add --kv-cache-dtype fp8_e4m3"),
        ({"is_draft_worker": True, "speculative_draft_kv_cache_dtype": "bf16"}, "add --kv-cache-dtype fp8_e4m3"),
        ({"model_dtype": torch.float16}, "the model runs in torch.float16"),
        ({"model": model_named("DeepseekV3ForCausalLM", k=0.5)}, "the checkpoint scales its FP8 cache"),
    ],
)  # fmt: skip
def test_refused_launches(kernels: Any, installed: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SystemExit, match=said) as error:
        kernels.dtype.configure_kv_cache_dtype(**DTYPE | changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("arch", ["sm100", "sm120", "sm80", "a machine without a GPU"])
def test_refused_gpus(kernels: Any, installed: Any, arch: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(kept, "_arch", lambda: arch)
    with pytest.raises(SystemExit, match=f"made for Hopper \\(sm90\\), this is {arch}"):
        kernels.dtype.configure_kv_cache_dtype(**DTYPE)


def test_refused_geometry(installed: Any, engine: Any) -> None:
    """U07: a rope-free model has other rows."""
    model = SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=0)
    with pytest.raises(SystemExit, match="this model has 512 and 0"):
        build(engine, model_config=model)


def test_scale_of_the_test() -> None:
    """Scores have spread: one row too few or too many moves an output by more than bf16 rounds."""
    latent, rope = values(0, 50)
    keys = torch.cat([latent, rope], dim=-1)[:, 0].float()
    q = torch.randn(576, generator=torch.Generator().manual_seed(2))
    assert 0.5 < float((keys @ q * SCALE).std()) < 2
    assert math.isclose(SCALE, 1 / math.sqrt(576), rel_tol=0.05)


# --- Device ---------------------------------------------------------------------------------------------------------


@pytest.mark.tier("device", archs=("sm90",))
def test_pool_on_the_gpu(engine: Any, gpu: torch.device) -> None:
    """Our kernels under the pool, captured once, replayed with other requests and lengths in the same tensors."""
    from numinous_kv_cache_4bit.engine.mla_dense_pool import DensePool

    DensePool.rows = ours.ROWS
    pool = DensePool(
        SLOTS, page_size=1, dtype=torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64,
        layer_num=LAYERS, device=str(gpu), enable_memory_saver=False, draft=False,
    )  # fmt: skip
    want = [filling(number, SLOTS)[1].to(gpu) for number in range(LAYERS)]
    loc = torch.arange(1, SLOTS + 1, device=gpu)
    for number in range(LAYERS):
        latent, rope = (part.to(gpu) for part in values(100 + number, SLOTS))
        pool.set_mla_kv_buffer(layer(number), loc, latent, rope)
        read, rope = pool.get_mla_kv_buffer(layer(number), loc, torch.bfloat16)
        assert torch.equal(torch.cat([read, rope], dim=-1), want[number])
    table = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(0)) + 1
    table = table.view(4, -1).int().to(gpu)
    made = SimpleNamespace(
        req_pool_indices=torch.tensor([0, 2], device=gpu), seq_lens=torch.tensor([3, 1], device=gpu)
    )

    def both_layers() -> list[torch.Tensor]:
        found = []
        for number in range(LAYERS):
            with pool.attending(table, made, 2):
                found.append(pool.get_key_buffer(number).clone())
        return found

    both_layers()  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both_layers()
    for requests, lengths in (([0, 2], [3, 1]), ([3, 1], [50, 78]), ([1, 1], [0, 9])):
        made.req_pool_indices.copy_(torch.tensor(requests))
        made.seq_lens.copy_(torch.tensor(lengths))
        pool.shadow.fill_(7.0)
        graph.replay()
        live = torch.cat([table[r, : n + 2] for r, n in zip(requests, lengths, strict=True)]).long()
        for number, got in enumerate(captured):
            assert torch.equal(got[live], want[number][live - 1])
            others = torch.ones(len(got), dtype=torch.bool, device=gpu)
            others[live] = False
            assert bool((got[others] == 7.0).all())
