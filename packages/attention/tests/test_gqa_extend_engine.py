# SPDX-License-Identifier: Apache-2.0
"""`attention.gqa_extend`, and `attention.split_verify` beside it, in the real engine on the CPU: its Triton backend in the interpreter, log-probabilities against transformers.

The model is a Gemma 3, of which every second layer has a window of 16 tokens. Only prefill is looked at, which is what the feature changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attention_serving import save_gemma

from numinous_attention.options import GQA_EXTEND, SPLIT_VERIFY

pytestmark = pytest.mark.engine

WINDOW, LAYERS, CLOSE = 16, 4, 1e-3
PROMPT = [(7 * n + 3 * n * n) % 500 + 5 for n in range(40)]


@pytest.fixture(scope="module")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first and the third layer have a window."""
    return save_gemma(tmp_path_factory.mktemp("gemma") / "model", WINDOW, LAYERS)


def expected(path: Path, **changes: Any) -> list[float]:
    """Log-probabilities of the prompt's tokens but the first, in transformers."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **changes)
    with torch.inference_mode():
        logits = model.eval()(input_ids=torch.tensor([PROMPT])).logits[0, :-1]
    made: list[float] = logits.log_softmax(-1)[range(len(PROMPT) - 1), PROMPT[1:]].tolist()
    return made


def test_prefill_in_the_engine(serve: Any, tiny_gemma: Path) -> None:
    """A prompt in chunks of 24 tokens, whose second one reads the first from the cache; no call is stock's."""
    want = expected(tiny_gemma)
    other = expected(tiny_gemma, sliding_window=WINDOW - 1)
    assert max(abs(x - y) for x, y in zip(want, other, strict=True)) > 3 * CLOSE
    flags = ("--attention-backend", "triton", "--chunked-prefill-size", "24", "--model-path", str(tiny_gemma))  # fmt: skip
    with serve(*flags, NUMINOUS_ATTENTION_GQA_EXTEND="1", TRITON_INTERPRET="1") as running:
        answer = running.post(
            "/generate",
            input_ids=PROMPT,
            sampling_params={"max_new_tokens": 1, "temperature": 0},
            return_logprob=True,
            logprob_start_len=0,
        )
        assert answer.status_code == 200, answer.text
        found = [entry[0] for entry in answer.json()["meta_info"]["input_token_logprobs"][1:]]
        assert found == pytest.approx(want, abs=CLOSE)
        running.settle()
        prefills = running.batches().count("P")
        assert prefills >= 2, "two chunks"
        assert running.totals(GQA_EXTEND) == {"engaged": LAYERS * prefills}


def test_short_chunks_in_the_engine(serve: Any, tiny_gemma: Path) -> None:
    """Chunks of 24 and 16 tokens: the long one is gqa_extend's, the short one, over a prefix, split_verify's; no call is stock's."""
    want = expected(tiny_gemma)
    flags = ("--attention-backend", "triton", "--chunked-prefill-size", "24", "--model-path", str(tiny_gemma))  # fmt: skip
    switches = dict.fromkeys(("NUMINOUS_ATTENTION_SPLIT_VERIFY", "NUMINOUS_ATTENTION_GQA_EXTEND", "TRITON_INTERPRET"), "1")  # fmt: skip
    with serve(*flags, **switches) as running:
        answer = running.post(
            "/generate",
            input_ids=PROMPT,
            sampling_params={"max_new_tokens": 1, "temperature": 0},
            return_logprob=True,
            logprob_start_len=0,
        )
        assert answer.status_code == 200, answer.text
        found = [entry[0] for entry in answer.json()["meta_info"]["input_token_logprobs"][1:]]
        assert found == pytest.approx(want, abs=CLOSE)
        running.settle()
        short = (
            running.batches().count("P") - 1
        )  # the prompt's second chunk, and what the engine warms up with
        assert short >= 1
        assert running.totals(SPLIT_VERIFY) == {
            "engaged": LAYERS * short,
            "refused:long_chunk": LAYERS,
        }
        assert running.totals(GQA_EXTEND) == {"engaged": LAYERS}
