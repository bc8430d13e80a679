# SPDX-License-Identifier: Apache-2.0
"""Script: greedy tokens and log-probabilities of a model directory by Hugging Face transformers, in fp32.

stdin: a list of {"model": DIR, "greedy": [{"ids": [...], "new": N}, ...], "score": [[...], ...]}
stdout, last line: a list of {"greedy": [{"ids": [...], "logprobs": [...]}, ...], "score": [[...], ...]}

`score` holds, for each list, the log-probability of every token but the first. A process of its own keeps torch's
threads and the library's warnings out of the test process.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    print(json.dumps([answer(request) for request in json.load(sys.stdin)]))


def answer(request: dict) -> dict:
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32).eval()
    with torch.inference_mode():
        return {
            "greedy": [greedy(model, case["ids"], case["new"]) for case in request["greedy"]],
            "score": [score(model, ids) for ids in request["score"]],
        }


def greedy(model, ids: list[int], new: int) -> dict:
    """`new` tokens by argmax; an end token does not stop it (the engine is asked to ignore it too)."""
    past, step = None, torch.tensor([ids])
    tokens, logprobs = [], []
    for _ in range(new):
        out = model(input_ids=step, past_key_values=past, use_cache=True)
        past = out.past_key_values
        values = out.logits[0, -1].log_softmax(-1)
        best = int(values.argmax())
        tokens.append(best)
        logprobs.append(float(values[best]))
        step = torch.tensor([[best]])
    return {"ids": tokens, "logprobs": logprobs}


def score(model, ids: list[int]) -> list[float]:
    values = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return values.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


if __name__ == "__main__":
    main()
