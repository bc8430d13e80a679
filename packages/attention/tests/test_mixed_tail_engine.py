# SPDX-License-Identifier: Apache-2.0
"""`attention.mixed_tail` in the real engine on the CPU: its Triton backend in the interpreter, tokens against transformers.

The model is a Gemma 3, of which every second layer has a window that nobody outgrows: stock's own decodes, between the mixed batches, cut it one key short.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from attention_serving import save_gemma

from numinous_attention.options import MIXED_TAIL

pytestmark = pytest.mark.engine

LAYERS, WINDOW = 2, 64
FIRST = [(11 * n + 5 * n * n) % 500 + 5 for n in range(6)]
SECOND = [(7 * n + 3 * n * n) % 500 + 5 for n in range(40)]


def greedy(path: Path, prompt: list[int], new: int) -> list[int]:
    """What transformers generates."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(new):
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_tokens_of_mixed_batches(serve: Any, tmp_path: Path) -> None:
    """A prompt in chunks of 16 beside a request that decodes; each of its chunks carries that request's token."""
    model = save_gemma(tmp_path / "model", WINDOW, LAYERS)
    flags = (
        "--attention-backend", "triton", "--enable-mixed-chunk", "--chunked-prefill-size", "16", "--model-path", str(model)
    )  # fmt: skip
    answers: dict[str, list[int]] = {}
    with serve(*flags, NUMINOUS_ATTENTION_MIXED_TAIL="1", TRITON_INTERPRET="1") as running:

        def ask(name: str, prompt: list[int], new: int) -> None:
            answer = running.post(
                "/generate",
                input_ids=prompt,
                sampling_params={"max_new_tokens": new, "temperature": 0, "ignore_eos": True},
            )
            assert answer.status_code == 200, answer.text
            answers[name] = answer.json()["output_ids"]

        first = threading.Thread(target=ask, args=("first", FIRST, 30))
        first.start()
        while running.batches().count("D") < 2:
            assert first.is_alive(), "it ended before anybody could join it"
            time.sleep(0.05)
        ask("second", SECOND, 4)
        first.join()
        running.settle()
        chunks = running.batches().count("P") - 1
        counted = running.totals(MIXED_TAIL)
    assert chunks >= 2
    assert set(counted) == {"engaged"}
    assert counted["engaged"] % LAYERS == 0
    assert 2 <= counted["engaged"] // LAYERS <= chunks
    assert answers == {"first": greedy(model, FIRST, 30), "second": greedy(model, SECOND, 4)}
