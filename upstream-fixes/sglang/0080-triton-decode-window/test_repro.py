# SPDX-License-Identifier: Apache-2.0
"""The keys that the Triton backend hands to a sliding-window layer: those of q - k <= window, in every kind of forward."""

import dataclasses
import types

import pytest
import repro
import torch

FILE = "srt/layers/attention/triton_backend.py"
WINDOWS = [1, 3, 16]
DRAFTS = 2


def seen(query, window, written):
    """Positions among the first `written` that a query sees, by the rule of the extend kernel and of FlashInfer."""
    return [k for k in range(written) if k <= query and query - k <= window]


def lengths(window):
    return [0, 1, window - 1, window, window + 1, window + 2, 3 * window + 5]


class Reader:
    """Stands for the index translator: the id of a token is 1000 * request + position."""

    reads_are_translated = True
    is_translating = False
    window_kv_kind = None

    def fill_packed_read_stream(self, *, req_pool_indices, seq_lens, indptr, out, kv_start_idx=None, **_):  # fmt: skip
        starts = [0] * len(seq_lens) if kv_start_idx is None else kv_start_idx.tolist()
        for at, request, start, count in zip(
            indptr.tolist(), req_pool_indices.tolist(), starts, seq_lens.tolist(), strict=False
        ):
            out[at : at + count] = 1000 * request + start + torch.arange(count)
        return True

    def pack_read_stream(self, plan, **named):
        """Its name in newer releases."""
        return self.fill_packed_read_stream(**named)


class Mode:
    """A forward mode of one kind."""

    def __init__(self, kind):
        self.kind = kind

    def __getattr__(self, name):
        return lambda: name == f"is_{self.kind}"


def made_backend(window, requests):
    """The shipped backend with what its metadata reads, and CUDA-graph buffers for `requests`."""
    scope = {
        "__name__": __name__,  # a dataclass looks for its module
        "torch": torch,
        "dataclass": dataclasses.dataclass,
        "AttentionBackend": object,
        "BaseSWAKVPool": types.SimpleNamespace,
        "SWAKVPool": types.SimpleNamespace,
        "maybe_create_verify_mask": lambda **_: None,
    }
    repro.load_function(FILE, "ForwardMetadata", scope, decorators=["dataclass"])
    repro.load_function(FILE, "update_sliding_window_buffer", scope)
    backend = object.__new__(repro.load_function(FILE, "TritonAttnBackend", scope))
    ones = """
        num_head max_kv_splits v_head_dim lean_total_programs lean_block_m dcp_size
    """
    for name in ones.split():
        setattr(backend, name, 1)
    for name, value in {
        "use_sliding_window_kv_pool": False,
        "enable_deterministic": False,
        "skip_prefill": False,
        "is_draft_runner": False,
        "device": "cpu",
        "sliding_window_size": window,
        "max_context_len": 4 * window + 8,
        "num_draft_tokens": DRAFTS,
        "target_verify_num_tokens_per_req": DRAFTS,
        "swa_v_head_dim": None,
        "dllm_attention": None,
        "token_to_kv_pool": None,
        "kv_index_translator": Reader(),
        "get_num_kv_splits": lambda *_: None,
    }.items():
        setattr(backend, name, value)
    for name in ("kv_indptr", "window_kv_indptr", "qo_indptr", "mask_indptr"):
        setattr(backend, name, torch.zeros(requests + 1, dtype=torch.int32))
    backend.init_cuda_graph_state(requests, requests)
    return backend


def made_batch(kind, lens):
    """A batch whose lengths are, as the engine counts them, with the new token in decode and without it elsewhere."""
    lens = torch.tensor(lens)
    spec = types.SimpleNamespace(
        custom_mask=None, draft_token_num=DRAFTS, num_tokens_per_req=DRAFTS, kv_indptr=None
    )
    return types.SimpleNamespace(
        batch_size=len(lens),
        forward_mode=Mode(kind),
        req_pool_indices=torch.arange(len(lens)),
        seq_lens=lens,
        seq_lens_sum=int(lens.sum()),
        extend_prefix_lens=lens,
        extend_prefix_lens_cpu=lens.tolist(),
        extend_seq_lens=torch.ones_like(lens),
        extend_seq_lens_cpu=[1] * len(lens),
        spec_info=spec if kind == "target_verify" else None,
        encoder_lens=None,
        out_cache_loc=None,
        kv_loc_plan=None,
    )


def read_keys(metadata, requests):
    """Positions that each request reads, after the check that they are its own."""
    ends = metadata.window_kv_indptr.tolist()
    ids = metadata.window_kv_indices.tolist()
    rows = [ids[ends[i] : ends[i + 1]] for i in range(requests)]
    assert all(key // 1000 == i for i, row in enumerate(rows) for key in row)
    return [[key % 1000 for key in row] for row in rows]


def run_eager(kind, window, lens):
    backend = made_backend(window, len(lens))
    backend.init_forward_metadata(made_batch(kind, lens))
    return read_keys(backend.forward_metadata, len(lens))


def run_graph(kind, window, lens):
    """Captured with the fill value for lengths, replayed with the real ones."""
    backend = made_backend(window, len(lens))
    fill = [backend.get_cuda_graph_seq_len_fill_value()] * len(lens)
    backend.init_forward_metadata_out_graph(made_batch(kind, fill), in_capture=True)
    backend.init_forward_metadata_out_graph(made_batch(kind, lens))
    return read_keys(backend.forward_metadata, len(lens))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("run", [run_eager, run_graph], ids=["eager", "graph"])
def test_decode_reads_the_keys_of_the_window(run, window):
    lens = lengths(window)
    assert run("decode_or_idle", window, lens) == [seen(n - 1, window, n) for n in lens]


@pytest.mark.parametrize("window", WINDOWS)
def test_a_full_batch_of_long_sequences_fits_the_buffer_of_the_graph(window):
    lens = [3 * window + 5] * 4
    want = [seen(n - 1, window, n) for n in lens]
    assert run_graph("decode_or_idle", window, lens) == want


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    ("run", "kind"),
    [(run_eager, "extend"), (run_eager, "target_verify"), (run_graph, "target_verify")],
)
def test_new_tokens_see_the_prefix_that_they_saw(run, kind, window):
    """Their first query stands behind the prefix, which therefore gives it `window` keys."""
    lens = lengths(window)
    assert run(kind, window, lens) == [seen(n, window, n) for n in lens]


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("window", WINDOWS)
def test_the_pool_still_holds_them(window, page):
    """Before a decode step slots are freed up to the window of its query; none of them is read."""
    scope = {
        "ceil_align": lambda n, step: -(-n // step) * step,
        "ComponentType": types.SimpleNamespace(SWA="swa"),
    }
    free = repro.load_function("srt/mem_cache/common.py", "free_swa_out_of_window_slots", scope)
    last, freed = 5 * window + 12, []

    class Held(types.SimpleNamespace):
        def get_evicted_seqlen(self, _):
            return self.swa_evicted_seqlen

        def set_evicted_seqlen(self, _, value):
            self.swa_evicted_seqlen = value

    held = Held(
        holds_kv=True,
        cache_protected_len=0,
        swa_evicted_seqlen=0,
        swa_dead_lo=lambda _: 0,
        req_pool_idx=0,
    )
    allocator = types.SimpleNamespace(
        free_swa_segment=lambda slots, **_: freed.extend(slots.tolist())
    )
    for query in range(last):
        free(
            types.SimpleNamespace(kv=held),
            query,
            sliding_window_size=window,
            page_size=page,
            req_to_token_pool=types.SimpleNamespace(req_to_token=torch.arange(last)[None]),
            token_to_kv_pool_allocator=allocator,
        )
        assert not set(freed) & set(seen(query, window, query + 1))
    assert freed


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("laguna", "LagunaForCausalLM"),
        ("granite", "GraniteSWAForCausalLM"),
        ("granitemoe", "GraniteMoeSWAForCausalLM"),
    ],
)
def test_the_runner_has_the_number_of_the_layers(file, name):
    """Their layers are built with sliding_window - 1, the largest q - k."""
    scope = dict.fromkeys(["GraniteForCausalLM", "GraniteMoeForCausalLM"], object)
    scope |= {"nn": torch.nn, "torch": torch}
    model = repro.load_function(f"srt/models/{file}.py", name, scope)
    made = model.__new__(model)
    made.__dict__["config"] = types.SimpleNamespace(sliding_window=16)
    resolve = repro.load_function(
        "srt/model_executor/model_runner_components/load_model_utils.py",
        "resolve_sliding_window_size",
    )
    config = types.SimpleNamespace(
        is_hybrid_swa=True, sliding_window_size=16, attention_chunk_size=None
    )
    assert resolve(made, config) == 15
