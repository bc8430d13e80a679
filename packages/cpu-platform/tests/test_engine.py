# SPDX-License-Identifier: Apache-2.0
"""The real, unmodified engine on the CPU, compared with Hugging Face transformers in fp32.

One HTTP server for the whole file (default model, prefill in chunks of 128 tokens), then three `sglang.Engine` runs:
the default model on torch_native, and two tiny random models whose stock Triton kernels run in the interpreter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent
CLOSE = 1e-3  # log-probabilities, natural logarithm, fp32 on both sides
CHAT = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 16,
}
STORY = (
    "A river begins as rain on the hills. The water runs over stones and roots, joins other small streams, and grows "
    "until a boat can float on it. People build mills, bridges and harbours along the banks; they fish, trade and argue "
    "about who may use the water. In spring the river carries sand and mud down to the plain, and leaves them where it "
    "slows. After many years the plain is fertile and the river has moved its bed a mile to the east. "
)
QUESTIONS = [
    "The three primary colours are",
    "Water boils at a temperature of",
    "To sort a list in Python, call",
    "The opposite of early is",
]


@pytest.fixture(scope="module")
def encode(smollm2):
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids


@pytest.fixture(scope="module")
def prompts(encode) -> dict:
    story = encode(STORY)
    return {
        "long": encode(STORY * 3),
        "prefix": story,
        "first": story + encode("Question: where does the river begin? Answer:"),
        "second": story + encode("Question: what does the river carry in spring? Answer:"),
        "questions": [encode(text) for text in QUESTIONS],
    }


@pytest.fixture(scope="module")
def reference(smollm2, prompts, run_script) -> dict:
    """What transformers answers to the prompts, by the same names."""
    cases = [(prompts["long"], 12), (prompts["second"], 8)]
    cases += [(ids, 8) for ids in prompts["questions"]]
    request = {
        "model": str(smollm2),
        "greedy": [{"ids": ids, "new": new} for ids, new in cases],
        "score": [prompts["first"]],
    }
    (answer,) = run_script("hf_reference.py", [request], env=dict(os.environ))
    long, second, *questions = answer["greedy"]
    return {
        "long": long,
        "second": second,
        "questions": questions,
        "first_score": answer["score"][0],
    }


def chosen(answer: dict) -> list[float]:
    """Log-probabilities of the tokens that the engine generated."""
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def test_chunked_prefill_gives_the_tokens_of_an_unchunked_reference(
    reference, prompts, server
) -> None:
    server.forget()
    read_from = server.log.stat().st_size
    answer = server.generate(prompts["long"], 12, return_logprob=True)
    assert answer["output_ids"] == reference["long"]["ids"]
    assert chosen(answer) == pytest.approx(reference["long"]["logprobs"], abs=CLOSE)
    assert answer["meta_info"]["cached_tokens"] == 0
    with server.log.open("rb") as log:
        log.seek(read_from)
        sizes = [
            int(size) for size in re.findall(rb"Prefill batch.*?#new-token: (\d+)", log.read())
        ]
    assert len(prompts["long"]) > 2 * 128
    assert sizes == [128, 128, len(prompts["long"]) - 256]


def test_a_shared_prefix_is_cached_and_changes_nothing(reference, prompts, server) -> None:
    server.forget()
    cold = server.generate(prompts["second"], 8, return_logprob=True)
    server.forget()
    server.generate(prompts["first"], 1)
    warm = server.generate(prompts["second"], 8, return_logprob=True)
    assert cold["meta_info"]["cached_tokens"] == 0
    pairs = zip(prompts["first"], prompts["second"], strict=False)
    shared = next(at for at, (first, second) in enumerate(pairs) if first != second)
    assert shared >= len(prompts["prefix"])
    assert warm["meta_info"]["cached_tokens"] == shared
    assert warm["output_ids"] == cold["output_ids"] == reference["second"]["ids"]
    assert chosen(warm) == pytest.approx(chosen(cold), abs=CLOSE)


def test_four_requests_at_once_answer_like_one_by_one(reference, prompts, server) -> None:
    read_from = server.log.stat().st_size
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda ids: server.generate(ids, 8), prompts["questions"]))
    assert [a["output_ids"] for a in answers] == [r["ids"] for r in reference["questions"]]
    with server.log.open("rb") as log:
        log.seek(read_from)
        running = re.findall(rb"Decode batch, #running-req: (\d+)", log.read())
    assert max(int(count) for count in running) > 1, "the requests were never in one batch"


def test_logprobs_of_generated_and_of_forced_tokens(reference, prompts, server) -> None:
    ids = prompts["first"]
    answer = server.generate(ids, 1, return_logprob=True, logprob_start_len=0)
    forced = answer["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in forced] == ids
    assert forced[0][0] is None  # nothing predicts the first token
    assert [entry[0] for entry in forced[1:]] == pytest.approx(reference["first_score"], abs=CLOSE)
    answer = server.generate(prompts["questions"][0], 8, return_logprob=True)
    assert chosen(answer) == pytest.approx(reference["questions"][0]["logprobs"], abs=CLOSE)


def test_openai_endpoints(server) -> None:
    (entry,) = server.json("/v1/models")["data"]
    assert (entry["id"], entry["max_model_len"]) == ("smollm2", 8192)

    answer = server.json("/v1/chat/completions", {**CHAT, "logprobs": True})
    choice = answer["choices"][0]
    assert "Paris" in choice["message"]["content"]
    assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"]

    request = {"model": "smollm2", "prompt": QUESTIONS[0], "max_tokens": 8, "temperature": 0}
    answer = server.json("/v1/completions", request)
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["finish_reason"] == "length"

    request = {"model": "smollm2", "input": "Say hello.", "max_output_tokens": 4}
    assert server.json("/v1/responses", request)["status"] in {"completed", "incomplete"}


def test_chat_streams_the_same_text(server) -> None:
    whole = server.json("/v1/chat/completions", CHAT)["choices"][0]["message"]["content"]
    with server.request("/v1/chat/completions", {**CHAT, "stream": True}) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        events = [line[6:].strip() for line in answer if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    pieces = [
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    ]
    assert sum(bool(piece) for piece in pieces) > 2
    assert "".join(pieces) == whole


def test_engine_api_without_a_server(smollm2, prompts, reference, run_script, engine_environment):
    answer = run_script(
        "engine_run.py",
        {"model": str(smollm2), "prompts": prompts["questions"], "new": 8, "options": {}},
        env=engine_environment(smollm2),
    )
    assert answer["backend"] == "torch_native"
    assert answer["ids"] == [entry["ids"] for entry in reference["questions"]]
    for found, expected in zip(answer["logprobs"], reference["questions"], strict=True):
        assert found == pytest.approx(expected["logprobs"], abs=CLOSE)


@pytest.fixture(scope="module")
def tiny(run_script, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Two tiny random models, prompts for them, and what transformers answers."""
    folder, new = tmp_path_factory.mktemp("tiny"), 5
    subprocess.run(
        [sys.executable, str(HERE / "make_tiny.py"), str(folder)], check=True, capture_output=True
    )
    prompts = [[5, 9, 77, 130, 200, 31, 8, 90, 4, 61, 17, 18, 19], [7, 8, 9, 10, 11]]
    greedy = [{"ids": ids, "new": new} for ids in prompts]
    requests = [
        {"model": str(folder / kind), "greedy": greedy, "score": []} for kind in ("llama", "mla")
    ]
    llama, mla = run_script("hf_reference.py", requests, env=dict(os.environ))
    expected = {"llama": llama["greedy"], "mla": mla["greedy"]}
    return {"folder": folder, "prompts": prompts, "new": new, "expected": expected}


@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_stock_triton_kernels_in_the_interpreter(
    kind: str, tiny, run_script, engine_environment
) -> None:
    folder, expected = tiny["folder"] / kind, tiny["expected"][kind]
    answer = run_script(
        "engine_run.py",
        {
            "model": str(folder),
            "prompts": tiny["prompts"],
            "new": tiny["new"],
            "options": {"attention_backend": "triton", "max_total_tokens": 1024},
        },
        env=engine_environment(folder, TRITON_INTERPRET="1"),
    )
    assert answer["backend"] == "triton"
    assert answer["ids"] == [entry["ids"] for entry in expected]
    for found, entry in zip(answer["logprobs"], expected, strict=True):
        assert found == pytest.approx(entry["logprobs"], abs=CLOSE)


MLA_REFUSAL = """
import sglang.srt.runtime_context as context
from numinous_cpu_platform.engine.cpu import NuminousCpuPlatform
context.attention_backends = lambda: ("triton", "triton")
print(NuminousCpuPlatform().get_mla_kv_pool_cls().__name__)
context.attention_backends = lambda: ("torch_native", "torch_native")
try:
    NuminousCpuPlatform().get_mla_kv_pool_cls()
except NotImplementedError as error:
    print(error)
"""


def test_an_mla_model_on_torch_native_is_refused_in_one_line(engine_environment) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MLA_REFUSAL],
        check=True,
        capture_output=True,
        text=True,
        env=engine_environment(None),
    )
    pool, refusal = done.stdout.splitlines()[-2:]
    assert pool == "MLATokenToKVPool"
    assert "TRITON_INTERPRET=1" in refusal
    assert "--attention-backend triton" in refusal
