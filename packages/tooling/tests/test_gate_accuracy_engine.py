# SPDX-License-Identifier: Apache-2.0
"""The accuracy gate on the real engine: stock agrees with itself to the bit, and every planted fault fails.

The model is random and tiny; its weights are large enough for its attention to matter. Servers are started once each
and judged with `--url-a`, `--url-b`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("httpx")
pytest.importorskip("scipy")
pytest.importorskip("statsmodels")
pytest.importorskip("matplotlib")

from numinous_tooling.engine.planted import FAULTS, counter_name
from numinous_tooling.gate.__main__ import main
from numinous_tooling.gate.servers import Interrupts
from numinous_tooling.patching.counters import read_totals
from numinous_tooling.testing.engine import START_TIMEOUT_S, engine_server, save_tiny_llama

pytestmark = pytest.mark.engine

FLAGS = (
    "--dtype float32 --disable-cuda-graph --skip-server-warmup --max-total-tokens 4096 --max-running-requests 8 "
    "--context-length 1024 --chunked-prefill-size 64 --sleep-on-idle"
)
SIZE = ["--sequences", "4", "--tokens", "32", "--decode-tokens", "4"]
IN_PAIRS = ["--concurrency", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama over bytes, with its tokeniser."""
    transformers = pytest.importorskip("transformers", reason="engine tests need transformers")
    tokenizers = pytest.importorskip("tokenizers", reason="engine tests need tokenizers")
    folder = tmp_path_factory.mktemp("bytes") / "model"
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate([*alphabet, "<end>"])}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>").save_pretrained(
        folder
    )
    save_tiny_llama(
        folder,
        vocab_size=len(vocabulary),
        initializer_range=0.15,
        eos_token_id=vocabulary["<end>"],
    )
    return folder


@contextlib.contextmanager
def serving(model: Path, folder: Path, *module: str) -> Iterator[str]:
    """Run the engine for the length of a block; gives its address."""
    server = engine_server(module[-1], model, folder, FLAGS.split(), *module)
    with server.running(Interrupts(), stop_grace_s=0):
        server.wait_ready(START_TIMEOUT_S, lambda elapsed: None)
        yield server.url


@pytest.fixture(scope="module")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(model, tmp_path_factory.mktemp("stock"), "sglang.launch_server") as url:
        yield url


def judge(url_a: str, url_b: str, model: Path, out: Path, *extra: str) -> tuple[int, dict]:
    arguments = ["accuracy", "--url-a", url_a, "--url-b", url_b, "--model", str(model)]
    code = main([*arguments, "--out", str(out), *SIZE, *extra])
    return code, json.loads((out / "verdict.json").read_text())


def test_stock_agrees_with_itself(stock: str, model: Path, tmp_path: Path):
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' * 4)
    # The four worked examples are longer than the context in bytes, and the row says so.
    arguments = [*IN_PAIRS, "--gsm8k", str(problems)]
    code, document = judge(stock, stock, model, tmp_path / "a", *arguments)
    assert code == 0
    assert document["method"]["distribution"] == "full vocabulary"
    assert {row["row"] for row in document["rows"]} == {
        "cold",
        "hit",
        "chunked",
        "decode",
        "protocol",
    }
    assert "do not fit into 1024 tokens" in document["not_measured"]["GSM8K solutions"]
    code, document = judge(stock, stock, model, tmp_path / "b", "--bit-exact")
    assert code == 0, document["reasons"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails(fault: str, stock: str, model: Path, tmp_path: Path):
    with serving(model, tmp_path, "numinous_tooling.engine.planted", fault) as url:
        code, document = judge(stock, url, model, tmp_path / "out", *IN_PAIRS)
    assert code == 1
    words = {row["row"]: row["word"] for row in document["rows"]}
    assert set(words.values()) == {"FAIL"}, words
    counts = read_totals(tmp_path / "state")
    assert counts[counter_name(fault)]["engaged"] > 0


def test_a_zero_head_between_the_segments_of_a_graph(monkeypatch: pytest.MonkeyPatch):
    """MLA's prefill under a graph with breaks goes past `RadixAttention.forward`."""
    import torch
    from sglang.srt.layers import radix_attention

    from numinous_tooling.engine import planted

    def attention(query, key, value, output, save_kv_cache, layer_id):
        output.fill_(1)

    layer = SimpleNamespace(tp_q_head_num=2)
    context = SimpleNamespace(attention_layers=[layer, layer])
    monkeypatch.setattr(radix_attention, "_unified_attention_with_output_impl", attention)
    monkeypatch.setattr(radix_attention, "get_tc_piecewise_forward_context", lambda: context)
    # so that what is planted ends with the test
    stock = radix_attention.RadixAttention.forward
    monkeypatch.setattr(radix_attention.RadixAttention, "forward", stock)
    planted.FAULTS["head"]()
    outputs = []
    for layer_id in (1, 0, 1):
        outputs.append(torch.zeros(3, 2 * 4))
        radix_attention._unified_attention_with_output_impl(
            None, None, None, outputs[-1], True, layer_id
        )
    zeros = [int((output == 0).sum()) for output in outputs]
    assert zeros == [12, 0, 12]
    assert (outputs[0].view(3, 2, 4)[:, 0] == 0).all()
