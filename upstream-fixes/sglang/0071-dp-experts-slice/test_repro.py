# SPDX-License-Identifier: Apache-2.0
"""Under DP attention the captured experts of a rank must be those of its own tokens, whatever graph ran."""

import builtins
import contextlib
import dataclasses
import types
from unittest.mock import MagicMock

import repro
import torch

MODEL_RUNNER = "srt/model_executor/model_runner.py"
RUNNERS = "srt/model_executor/runner"
RANKS, RANK = 4, 2


class Rest(dict):
    """Globals of a shipped function: what the test does not set is a mock that is asked for nothing."""

    def __missing__(self, name):
        if hasattr(builtins, name):
            return getattr(builtins, name)
        return MagicMock(name=name)


class GraphRunner:
    """A graph runner that has only what load_batch sets; other attributes are mocks."""

    def __init__(self, kind, cls, **attributes):
        namespace = Rest(torch=torch, BreakableCudaGraphBackend=type("Breakable", (), {}))
        self.load = repro.load_function(f"{RUNNERS}/{kind}.py", f"{cls}.load_batch", namespace)
        self.__dict__.update(attributes)
        self._pad_to_bucket = lambda size, buckets: next(one for one in buckets if one >= size)

    def __getattr__(self, name):
        if name in ("bs", "graph_num_tokens"):
            raise AttributeError(name)
        return MagicMock(name=name)

    def can_run_graph(self, batch):
        return True

    def execute(self, batch, **rest):
        self.load(self, batch)


class Experts:
    """The shipped slice out of a buffer whose row says what it is: rank * 1000 + token."""

    def __init__(self, rows_per_rank):
        rows = torch.arange(RANKS)[:, None] * 1000 + torch.arange(rows_per_rank)
        self.topk_size = 1
        self.device_cache = types.SimpleNamespace(buffer=rows.reshape(-1, 1, 1))
        namespace = Rest(
            get_attention_dp_rank=lambda: RANK,
            dp_slot_in=lambda counts: RANK,
            is_dp_attention_enabled=lambda: True,
            _is_scattered_a2a_backend=lambda: False,
        )
        repro.load_function("srt/layers/dp_attention.py", "get_dp_local_slice_cpu", namespace)
        self.local_slice = repro.load_function(
            "srt/state_capturer/routed_experts.py",
            "RoutedExpertsCapturer._get_local_slice",
            namespace,
        )

    def on_forward_end(self, forward_batch, can_run_graph, cuda_graph_batch, no_copy_to_cpu):
        return self.local_slice(self, forward_batch, can_run_graph, cuda_graph_batch).flatten()


def prefill_batch(tokens):
    batch = MagicMock(
        input_ids=torch.zeros(tokens, dtype=torch.long), batch_size=1, token_indices_to_pool=None
    )
    batch.global_num_tokens_cpu = [tokens] * RANKS
    batch.forward_mode.is_cuda_graph.return_value = False
    batch.forward_mode.is_split_prefill.return_value = False
    return batch


def decode_batch(requests, width):
    batch = MagicMock(input_ids=torch.zeros(requests * width), batch_size=requests)
    batch.global_num_tokens_cpu = [requests * width] * RANKS
    return batch


class Model:
    """A model runner as far as forward and _forward_raw are concerned."""

    def __init__(self, width=1):
        namespace = Rest(
            __name__=__name__,
            contextlib=contextlib,
            dataclass=dataclasses.dataclass,
            EagerRunner=type("EagerRunner", (), {}),
        )
        repro.load_function(MODEL_RUNNER, "ModelRunnerOutput", namespace, decorators=("dataclass",))
        namespace["get_global_experts_capturer"] = lambda: self.experts
        namespace["get_global_indexer_capturer"] = lambda: None
        forward, raw = (
            repro.load_function(MODEL_RUNNER, f"ModelRunner.{name}", namespace)
            for name in ("forward", "_forward_raw")
        )
        decode = GraphRunner(
            "decode_cuda_graph_runner",
            "DecodeCudaGraphRunner",
            ragged_verify_mode=False,
            require_mlp_tp_gather=True,
            captured_req_width=width,
            capture_bs=[4, 8],
            _max_dp_batch_size=lambda batch: batch.batch_size,
        )
        prefill = GraphRunner(
            "prefill_cuda_graph_runner",
            "PrefillCudaGraphRunner",
            enable_cp_bcg_capture=False,
            _is_full_backend=False,
            capture_num_tokens=[16, 32],
        )
        runner = MagicMock(
            is_draft_worker=False,
            enable_elastic_ep=False,
            hisparse_coordinator=None,
            msprobe_debugger=None,
            eplb_manager=None,
            device="cuda",
            forward_pass_id=0,
            decode_cuda_graph_runner=decode,
            prefill_cuda_graph_runner=prefill,
        )
        runner._forward_raw = lambda *args, **kwargs: raw(runner, *args, **kwargs)
        self.forward = lambda batch: forward(runner, batch).routed_experts_output

    def run(self, batch, rows_per_rank):
        self.experts = Experts(rows_per_rank)
        return self.forward(batch).tolist()


def rows(tokens):
    return [RANK * 1000 + token for token in range(tokens)]


def test_prefill_graph_before_any_decode():
    assert Model().run(prefill_batch(10), rows_per_rank=16) == rows(10)


def test_prefill_graph_after_a_decode():
    model = Model()
    assert model.run(decode_batch(3, 1), rows_per_rank=4) == rows(3)
    assert model.run(prefill_batch(20), rows_per_rank=32) == rows(20)


def test_decode_graph_with_three_tokens_per_request():
    assert Model(width=3).run(decode_batch(3, 3), rows_per_rank=12) == rows(9)
