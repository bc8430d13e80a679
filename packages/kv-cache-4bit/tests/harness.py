# SPDX-License-Identifier: Apache-2.0
"""What the tests of features share: the engine's own classes on the CPU, with the two functions of FlashMLA as stand-ins.

Pools, backend and hooks are real. The stand-ins refuse what the kernel refuses, and compute what it computes: softmax over the named
rows, dequantised. A test module imports this one as ``kv4_harness``; `engine` and `hopper` are fixtures.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from numinous_kv_cache_4bit.engine import flashmla, native, rows, scratch
from numinous_kv_cache_4bit.kernels import kv4_compact, kv4_gather, kv4_write, sparse_mla_decode
from numinous_tooling.formats import LATENT_DIM, RowFormat, row_format
from numinous_tooling.patching.feature import Feature

HEADS, PAGE = 8, 64  # stock pads heads to 64
TOPK = 128
DRAFT = 3  # tokens of a verification
PAGES = 10
SCALE = 0.04


def attention(
    q: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: float
) -> torch.Tensor:
    """What FlashMLA computes: per row, softmax over the slots that are not -1; zeros where there is none.

    Args:
        q: [rows, heads, 512 or 576]; computed in fp64 if it is, else in fp32.
        cache: rows of any format, [..., width], any 1-byte type.
        slots: [rows, width].

    Returns:
        fp32 or fp64 [rows, heads, 512].
    """
    row = row_format(cache.shape[-1])
    rows = cache.view(torch.uint8).reshape(-1, row.width)
    heads = int(
        q.abs().amax(dim=(0, 2)).count_nonzero()
    )  # without those of padding, which come last
    work = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros((*q.shape[:2], LATENT_DIM), dtype=work, device=q.device)
    for at, named in enumerate(slots.long()):
        latent, rope = (x.to(work) for x in row.unpack(rows[named[named != -1]]))
        if len(latent):
            keys = torch.cat([latent, rope], dim=-1)
            weights = torch.softmax(q[at, :heads].to(work) @ keys.T * scale, dim=-1)
            out[at, :heads] = weights @ latent
    return out


class FlashMLA(types.ModuleType):
    """Stand-in for ``sgl_kernel.flash_mla`` of sglang-kernel 0.4.7.

    `calls` lists (rows, heads, width of the table) of each attention, `caches` the cache that it was given; `sparse_calls` lists those
    of the bf16 prefill as (rows, heads, width of the table, keys).
    """

    def __init__(self) -> None:
        super().__init__("sgl_kernel.flash_mla")
        self.calls: list[tuple[int, int, int]] = []
        self.caches: list[torch.Tensor] = []
        self.sparse_calls: list[tuple[int, int, int, int]] = []

    def get_mla_metadata(
        self,
        cache_seqlens: torch.Tensor,
        num_q_tokens_per_head_k: int,
        num_heads_k: int,
        num_heads_q: int,
        is_fp8_kvcache: bool,
        topk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert cache_seqlens.dtype == torch.int32
        assert cache_seqlens.is_contiguous()
        assert len(cache_seqlens) > 0, "batch size must be positive"
        assert (num_heads_k, is_fp8_kvcache) == (1, True)
        assert num_q_tokens_per_head_k == num_heads_q
        schedule = torch.zeros(132 // (num_heads_q // 64), 8, dtype=torch.int32)
        schedule[0, 0] = topk
        return schedule, torch.arange(len(cache_seqlens) + 1, dtype=torch.int32)

    def flash_mla_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        head_dim_v: int,
        tile_scheduler_metadata: torch.Tensor,
        num_splits: torch.Tensor,
        softmax_scale: float,
        indices: torch.Tensor,
        is_fp8_kvcache: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, one, heads, dim = q.shape
        assert (one, head_dim_v, q.dtype) == (1, 512, torch.bfloat16)
        assert heads in (64, 128), f"Unsupported h_q: {heads}"
        assert q.stride(-1) == 1
        assert is_fp8_kvcache
        width = {512: 528, 576: 656}[dim]
        assert k_cache.shape[1:] == (PAGE, 1, width)
        assert k_cache.stride(1) == width
        assert k_cache.dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8)
        assert indices.dtype == torch.int32
        assert indices.shape[:2] == (rows, 1)
        assert indices.shape[2] % 64 == 0, "topk mod B_TOPK must be 0"
        assert indices.stride(-1) == 1
        assert tile_scheduler_metadata.shape == (132 // (heads // 64), 8)
        assert num_splits.shape == (rows + 1,)
        assert num_splits.tolist() == list(range(rows + 1)), "the schedule of other rows"
        assert int(tile_scheduler_metadata[0, 0]) == indices.shape[2], "made for another width"
        assert int(indices.max()) < len(k_cache) * PAGE, "a slot beyond the cache"
        self.calls.append((rows, heads, indices.shape[2]))
        self.caches.append(k_cache)
        out = attention(q[:, 0], k_cache, indices[:, 0], softmax_scale)
        return out.to(torch.bfloat16)[:, None], torch.zeros(rows, heads, 1)

    def flash_mla_sparse_fwd(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        sm_scale: float,
        d_v: int,
        attn_sink: torch.Tensor | None = None,
        topk_length: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        rows, heads, dim = q.shape
        assert q.dtype == kv.dtype == torch.bfloat16, "kv must have dtype kBFloat16"
        assert heads % 64 == 0
        assert (kv.shape[1:], d_v, attn_sink) == ((1, dim), 512, None)
        assert indices.dtype == torch.int32
        assert indices.shape[:2] == (rows, 1)
        assert indices.shape[2] % 64 == 0
        self.sparse_calls.append((rows, heads, indices.shape[2], len(kv)))
        out = torch.zeros(rows, heads, 512)
        for at, named in enumerate(indices[:, 0].long()):
            named = named[: None if topk_length is None else int(topk_length[at])]
            keys = kv[named[named >= 0], 0].float()
            if len(keys):
                weights = torch.softmax(q[at].float() @ keys.T * sm_scale, dim=-1)
                out[at] = weights @ keys[:, :512]
        return out.to(torch.bfloat16), None, None


class NativeKernel:
    """`sparse_mla_decode` by its reference, in bf16 as the kernel returns it; refuses what the public function refuses.

    `calls` lists (requests, queries, heads, entries of a table) of each call, `pools` the rows that it was given.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int, int]] = []
        self.pools: list[torch.Tensor] = []

    def __call__(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        *,
        sm_scale: float,
        index: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        splits: int | None = None,
        impl: sparse_mla_decode.Impl | None = None,
    ) -> sparse_mla_decode.Decoded:
        sparse_mla_decode._checked(
            q, pool, sm_scale, index, page_table, lengths, None, 1.0, splits
        )  # fmt: skip
        table = page_table if index is None else index
        assert table is not None
        self.calls.append((*q.shape[:3], table.shape[-1]))
        self.pools.append(pool)
        of = {"index": index, "page_table": page_table, "lengths": lengths}
        made = sparse_mla_decode.reference(q, pool.flatten(0, -2), sm_scale=sm_scale, **of)
        return sparse_mla_decode.Decoded(made["out"].to(torch.bfloat16), made["lse"].float())


@pytest.fixture
def native_kernel(monkeypatch: Any) -> NativeKernel:
    """In the kernel's place where adapters call it."""
    kernel = NativeKernel()
    monkeypatch.setattr(native, "sparse_mla_decode", kernel)
    return kernel


@pytest.fixture(scope="module")
def engine() -> Any:
    """Modules of the engine."""
    pytest.importorskip(
        "sglang", reason="engine tests need SGLang: python -m numinous_cpu_platform install"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine's own, at import on a CPU
        from sglang.srt.layers.attention import dsa_backend, hybrid_linear_attn_backend
        from sglang.srt.mem_cache import kv_cache_configurator, memory_pool
        from sglang.srt.model_executor import forward_context, pool_configurator
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mha
        from sglang.srt.runtime_context import get_context

    override = get_context().override_server_args(
        attention_backend="dsa",
        chunked_prefill_size=-1,
        device="cpu",
        dp_size=1,
        dsa_decode_backend="flashmla_kv",
        dsa_prefill_backend="flashmla_kv",
        enable_deterministic_inference=False,
        enable_prefill_cp=False,
        kv_cache_dtype="fp8_e4m3",
        pp_size=1,
        speculative_algorithm=None,
        speculative_num_draft_tokens=DRAFT,
        tp_size=1,
    )
    override.install()
    return SimpleNamespace(
        configurator=kv_cache_configurator,
        dsa=dsa_backend,
        hybrid=hybrid_linear_attn_backend,
        pools=memory_pool,
        context=forward_context,
        sizing=pool_configurator,
        mha=forward_mha,
        Mode=ForwardMode,
    )


@pytest.fixture
def hopper(engine: Any, monkeypatch: Any) -> Callable[[], FlashMLA]:
    """A Hopper GPU with FlashMLA, as far as the engine looks; attribute-free: call it for the module."""
    flash = FlashMLA()
    package = types.ModuleType("sgl_kernel")
    package.flash_mla = flash  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sgl_kernel", package)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_mla", flash)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(flashmla, "kernel_version", lambda: flashmla.KERNEL_VERSION)
    return lambda: flash


def hooks_of(feature: Feature) -> Iterator[Any]:
    """The hooks of a feature in place, proven by the installer, and gone afterwards; the body of a fixture."""
    from numinous_tooling.patching.engine import installed_engine
    from numinous_tooling.patching.hooks import install

    installation = install([feature], "scheduler", installed_engine())
    try:
        yield installation
    finally:
        installation.undo()


class Count:
    """Counters that can be read back."""

    def __init__(self) -> None:
        self.seen = 0
        self.reasons: list[str] = []

    def engaged(self, n: int = 1) -> None:
        self.seen += n

    def refused(self, reason: str) -> None:
        self.reasons.append(reason)


@functools.cache
def random_rows(count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent and rope bf16 [count, 1, 512 + rope] and their rows uint8 [count, 1, width]; shared, not to be written to."""
    row = row_format(width)
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(count, 1, LATENT_DIM + row.rope_dim, generator=generator).to(torch.bfloat16)
    return both, row.pack(both[..., :LATENT_DIM], both[..., LATENT_DIM:])


@pytest.fixture
def reference_kernels(monkeypatch: Any) -> None:
    """The kernels of 4-bit rows by their references, where adapters call them; rows of a scratch are NaN until they are written."""

    def write(
        pool: torch.Tensor, loc: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor | None
    ) -> None:
        rope = None if rope is None or not rope.numel() else rope[:, 0]
        kv4_write.reference(pool[:, 0], loc, latent[:, 0], rope)

    def gather(
        pool: torch.Tensor,
        index: torch.Tensor,
        *,
        to: Any,
        out: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        count: torch.Tensor | None = None,
    ) -> torch.Tensor:
        made = kv4_gather.reference(pool[:, 0], index, to=to, count=count)
        if positions is not None:
            positions.copy_(made["positions"])
        if out is None:
            return made["out"].view(torch.bfloat16) if to == "bf16" else made["out"]
        assert out.is_contiguous()
        assert len(out) == index.numel()
        out[: len(made["out"])] = made["out"]
        return out

    def compact(table: torch.Tensor, slots: int) -> kv4_compact.Compacted:
        return kv4_compact.Compacted(**kv4_compact.reference(table, slots))

    fresh = scratch.ScratchRows._scratch
    monkeypatch.setattr(scratch.ScratchRows, "_scratch", lambda *args: fresh(*args).fill_(0x7F))
    monkeypatch.setattr(rows, "kv4_write", write)
    monkeypatch.setattr(rows, "kv4_gather", gather)
    monkeypatch.setattr(scratch, "kv4_gather", gather)
    monkeypatch.setattr(scratch, "kv4_compact", compact)


def make_pool(engine: Any, row: RowFormat, *, kpool: int = 1, layers: int = 1, **of: Any) -> Any:
    """The engine's pool of DSA models with rows of this format."""
    return engine.pools.DSATokenToKVPool(
        **{
            "size": PAGE * (PAGES - 1),
            "page_size": PAGE,
            "kv_lora_rank": LATENT_DIM,
            "dtype": torch.float8_e4m3fn,
            "qk_rope_head_dim": row.rope_dim,
            "layer_num": layers,
            "device": "cpu",
            "index_head_dim": 128,
            "enable_memory_saver": False,
            "kv_cache_dim": row.width,
            "index_kpool": kpool,
            "index_kpool_compress": kpool > 1,
            "max_running_requests": 8,
        }
        | of
    )


def make_backend(
    engine: Any,
    monkeypatch: Any,
    *,
    row: RowFormat,
    architecture: str,
    heads: int = HEADS,
    topk: int = TOPK,
    kpool: int = 1,
    pool: Any = None,
    **of: Any,
) -> Any:
    """The engine's backend over the engine's pool: random rows, NaN in the first page. `of` goes to the model runner."""
    pool = make_pool(engine, row, kpool=kpool) if pool is None else pool
    both, rows = random_rows(PAGES * PAGE, row.width)
    if pool.kv_cache_dim == row.width:
        pool.kv_buffer[0].copy_(rows)
        pool.kv_buffer[0][:PAGE] = 0x7F  # NaN codes and scales
    requests = engine.pools.ReqToTokenPool(
        size=8, max_context_len=256, device="cpu", enable_memory_saver=False
    )
    config = SimpleNamespace(
        architectures=[architecture],
        index_topk=topk,
        index_kpool=kpool,
        index_head_dim=128,
        kv_lora_rank=LATENT_DIM,
    )
    runner = SimpleNamespace(
        device="cpu",
        page_size=PAGE,
        model_config=SimpleNamespace(
            hf_config=config,
            context_len=256,
            num_attention_heads=heads,
            qk_nope_head_dim=256,
            kv_lora_rank=LATENT_DIM,
            qk_rope_head_dim=row.rope_dim,
        ),
        token_to_kv_pool=pool,
        req_to_token_pool=requests,
        hisparse_coordinator=None,
        kv_cache_dtype=torch.float8_e4m3fn,
        max_running_requests=8,
        is_draft_worker=False,
        **of,
    )
    cls = engine.dsa.DeepseekSparseAttnBackend
    # Plans of the indexer, which attention does not read; their kernels need a GPU, as do this expansion and this concatenation.
    for name in ("_init_kpool_metadata", "_init_kpool_metadata_capture"):
        monkeypatch.setattr(cls, name, lambda self, metadata, *args, **kwargs: metadata)
    for name in ("_update_kpool_metadata_replay", "_build_topk_v2_plan", "_refresh_topk_v2_plan"):
        monkeypatch.setattr(cls, name, lambda *args, **kwargs: None)
    monkeypatch.setattr(engine.dsa, "seqlens_expand_triton", expand)
    monkeypatch.setattr(
        engine.dsa, "concat_mla_absorb_q_general", lambda *parts: torch.cat(parts, dim=-1)
    )
    backend = cls(runner)
    backend.exact = both
    return backend


def expand(qo_lens: torch.Tensor, kv_lens: torch.Tensor, total: int, longest: int) -> torch.Tensor:
    """`seqlens_expand_triton`: lengths that each query token of a request sees."""
    parts = [
        torch.arange(kv - qo + 1, kv + 1)
        for qo, kv in zip(qo_lens.tolist(), kv_lens.tolist(), strict=True)
    ]
    return torch.cat(parts).to(torch.int32)


def layer(heads: int = HEADS, rope: int = 0) -> Any:
    """What the backend reads of a `RadixAttention` of absorbed MLA."""
    return SimpleNamespace(
        layer_id=0,
        tp_q_head_num=heads,
        head_dim=LATENT_DIM + rope,
        v_head_dim=LATENT_DIM,
        scaling=SCALE,
        is_cross_attention=False,
        logit_cap=0.0,
    )


def batch(
    engine: Any, backend: Any, mode: str, lengths: list[int], prefixes: list[int] = ()
) -> Any:  # type: ignore[assignment]
    """A batch whose requests hold consecutive slots from page 1 on, in shuffled order."""
    generator = torch.Generator().manual_seed(1)
    slots = torch.randperm((PAGES - 1) * PAGE, generator=generator) + PAGE
    table = backend.req_to_token
    extra = DRAFT if mode == "TARGET_VERIFY" else 0
    used = 0
    for request, length in enumerate(lengths):
        table[request, : length + extra] = slots[used : used + length + extra].to(torch.int32)
        used += length + extra
    extend = [length - prefix for length, prefix in zip(lengths, prefixes, strict=False)]
    forward = SimpleNamespace(
        batch_size=len(lengths),
        forward_mode=getattr(engine.Mode, mode),
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths),
        seq_lens_sum=sum(lengths),
        req_pool_indices=torch.arange(len(lengths)),
        extend_seq_lens_cpu=extend or None,
        extend_seq_lens=torch.tensor(extend) if extend else None,
        extend_prefix_lens_cpu=list(prefixes) or None,
        extend_num_tokens=sum(extend),
        global_num_tokens_cpu=None,
        attn_cp_metadata=None,
        spec_info=None,
        out_cache_loc=None,
        get_max_chunk_capacity=lambda: 0,  # no multi-head prefill
    )
    backend.init_forward_metadata(forward)
    return forward


def seen(forward: Any, mode: str) -> list[tuple[int, int]]:
    """(request, length that it sees) of every query row."""
    lengths = forward.seq_lens.tolist()
    if mode == "DECODE":
        return list(enumerate(lengths))
    if mode == "TARGET_VERIFY":
        return [(r, length + n + 1) for r, length in enumerate(lengths) for n in range(DRAFT)]
    return [
        (r, length - extend + n + 1)
        for r, (length, extend) in enumerate(zip(lengths, forward.extend_seq_lens_cpu, strict=True))
        for n in range(extend)
    ]


def select(backend: Any, rows: list[tuple[int, int]]) -> torch.Tensor:
    """Slots as the indexer names them: whole groups (all, or the last where they do not fit), a k-pool's tail, then -1."""
    topk, kpool = backend.dsa_index_topk, backend.dsa_index_kpool
    table = torch.full((len(rows), topk + kpool - 1), -1, dtype=torch.int32)
    for at, (request, length) in enumerate(rows):
        groups = torch.arange(length // kpool * kpool).view(-1, kpool)
        if groups.numel() > topk:
            groups = groups.flip(0)[: topk // kpool]
        positions = torch.cat([groups.flatten(), torch.arange(length // kpool * kpool, length)])
        table[at, : len(positions)] = backend.req_to_token[request, positions]
    return table


def expected(
    backend: Any, q: torch.Tensor, slots: torch.Tensor, scale: float = SCALE
) -> torch.Tensor:
    """Attention over latent and rope before they were quantised, row by row."""
    out = torch.zeros((*q.shape[:2], LATENT_DIM))
    both = backend.exact[:, 0].float()
    for row in range(len(q)):
        keys = both[[slot for slot in slots[row].tolist() if slot >= 0]]
        if len(keys):
            weights = torch.softmax(q[row].float() @ keys.T * scale, dim=-1)
            out[row] = weights @ keys[:, :LATENT_DIM]
    return out


def run(
    backend: Any,
    forward: Any,
    mode: str,
    slots: torch.Tensor,
    heads: int = HEADS,
    written: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The engine's own forward of this mode; returns queries [rows, heads, 512 + rope] and output [rows, heads, 512].

    Args:
        written: latent [T, 1, 512] and rope [T, 1, rope] of the batch's tokens, to be written at its `out_cache_loc`.
    """
    generator = torch.Generator().manual_seed(2)
    rope = backend.exact.shape[-1] - LATENT_DIM
    q = torch.randn(len(slots), heads, LATENT_DIM + rope, generator=generator).to(torch.bfloat16)
    forward_of = backend.forward_decode if mode == "DECODE" else backend.forward_extend
    k, k_rope = written or (None, None)
    out = forward_of(
        q[..., :LATENT_DIM].contiguous(),
        k,
        k,
        layer(heads, rope),
        forward,
        q_rope=q[..., LATENT_DIM:].contiguous(),
        k_rope=k_rope,
        topk_indices=slots,
    )
    return q, out.reshape(len(slots), heads, LATENT_DIM)


def close(got: torch.Tensor, want: torch.Tensor, within: float = 0.04) -> bool:
    """Relative norm of the difference; the default is what E4M3 with a scale per 128 values may add. False for NaN."""
    return bool((got.float() - want).norm() < within * want.norm())


def flashmla_alone(
    width: int, topk: int, kpool: int, heads: int
) -> tuple[Callable[..., torch.Tensor], Any]:
    """The engine's `_forward_flashmla_kv`, and a backend that has what it and its schedule read, nothing else; FlashMLA is the real one.

    Args:
        width: bytes of a row of the pool.
        topk, kpool: of the indexer.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("sgl_kernel.flash_mla", reason="FlashMLA is part of sglang-kernel")
        pytest.importorskip("sglang", reason="its calls are SGLang's")
        from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend as Backend
    schedule = inspect.unwrap(Backend._compute_flashmla_metadata)
    backend = SimpleNamespace(
        dsa_index_topk=topk,
        dsa_index_kpool=kpool,
        flashmla_kv_num_q_heads=64 if heads <= 64 else 128,
        real_page_size=PAGE,
        kv_cache_dim=width,
        dsa_kv_cache_store_fp8=True,
    )

    def planned(cache_seqlens: torch.Tensor, seq_len_q: int) -> Any:
        return flashmla.around_schedule(schedule, backend, cache_seqlens, seq_len_q)

    backend._compute_flashmla_metadata = planned
    return inspect.unwrap(Backend._forward_flashmla_kv), backend
