# SPDX-License-Identifier: Apache-2.0
"""`attention.gemma_glue` in the real engine on the CPU: a Gemma 3 in bf16, log-probabilities against transformers.

Only prefill is looked at, by the kernels of this room in the interpreter: stock's own decode has products of bf16 there, which the interpreter does wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attention_serving import save_gemma

from numinous_attention.options import GEMMA_GLUE

pytestmark = pytest.mark.engine

WINDOW, LAYERS, CLOSE = 16, 4, 0.02
PROMPT = [(7 * n + 3 * n * n) % 500 + 5 for n in range(40)]


def expected(path: Path, rope: float | None = None) -> list[float]:
    """Log-probabilities of the prompt's tokens but the first, in transformers; `rope` is another base of the rotation."""
    import torch
    import transformers

    changes: dict[str, Any] = {}
    if rope is not None:
        config = transformers.AutoConfig.from_pretrained(path)
        for kind in config.rope_parameters.values():
            kind["rope_theta"] = rope
        changes["config"] = config
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **changes)
    with torch.inference_mode():
        logits = model.float().eval()(input_ids=torch.tensor([PROMPT])).logits[0, :-1]
    made: list[float] = logits.log_softmax(-1)[range(len(PROMPT) - 1), PROMPT[1:]].tolist()
    return made


def test_prefill_in_the_engine(serve: Any, tmp_path: Path) -> None:
    """A prompt in chunks of 24 tokens, whose second one reads the first from the cache; no layer is stock's."""
    model = save_gemma(tmp_path / "model", WINDOW, LAYERS)
    want, other = expected(model), expected(model, rope=100.0)
    assert max(abs(x - y) for x, y in zip(want, other, strict=True)) > 5 * CLOSE
    flags = ("--attention-backend", "triton", "--dtype", "bfloat16", "--chunked-prefill-size", "24", "--model-path", str(model))  # fmt: skip
    switches = dict.fromkeys(("NUMINOUS_ATTENTION_GEMMA_GLUE", "NUMINOUS_ATTENTION_GQA_EXTEND", "TRITON_INTERPRET"), "1")  # fmt: skip
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
        running.settle()
        assert found == pytest.approx(want, abs=CLOSE)
        prefills, decodes = (running.batches().count(kind) for kind in "PD")
        assert prefills >= 2, "two chunks"
        assert running.totals(GEMMA_GLUE) == {"engaged": LAYERS * (prefills + decodes)}
