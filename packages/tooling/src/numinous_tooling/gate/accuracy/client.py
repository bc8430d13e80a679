# SPDX-License-Identifier: Apache-2.0
"""The engine's HTTP interface as the accuracy gate uses it: tokenise, flush, score forced tokens, generate greedily.

Scoring: `/generate` with `logprob_start_len` answers, for each prompt token behind that start, its log-probability and
the list of the most likely tokens in its place. The engine looks up no cached prefix beyond the start, so a start of 0
computes everything anew and a start in the middle of a cached prefix reads the cache. Generated tokens come with the
same two figures, computed by decode steps. Log-probabilities are those of the plain distribution: greedy requests have
no temperature and no filter.

Several sequences travel in one request and reach the scheduler together, which makes batches as alike as can be from
run to run. Every wait has the limit given; anything but the expected answer is one line.

*A known fault of the engine*: up to 0.5.20 it gives the last id of the vocabulary in a prompt the name 0 (a clipping
meant for image tokens). The log-probability and the list beside it are those of the token that was sent, so the name
alone is mended; where the vocabulary is unknown such an answer is refused as one about other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import httpx
import numpy as np

from numinous_tooling.gate.accuracy.distance import Scores
from numinous_tooling.gate.apis import has_tls
from numinous_tooling.gate.errors import GateError

FLUSH_WAIT_S = 30.0
# By how much listed probabilities may pass 1: more than rounding of log-probabilities to bf16 costs.
MASS_SLACK = 0.01


class NotANumber(GateError):
    """A model answered what is no distribution: logits that overflow, or probabilities that do not sum to 1."""


class EngineClient:
    """Speaks with one server.

    Args:
        url: where it listens.
        name: what errors call it.
        timeout_s: seconds that one request may take.
        top_logprobs: length of the lists of most likely tokens.
        vocabulary: number of tokens, where it is known; set once the server has said what it serves.
        failed: turns the reason of a failure into the error to raise, for a server that the gate started.
    """

    def __init__(
        self,
        url: str,
        name: str,
        timeout_s: float,
        top_logprobs: int,
        failed: Callable[[str], GateError] | None = None,
    ) -> None:
        self.name = name
        self.top_logprobs = top_logprobs
        self.vocabulary: int | None = None
        self._timeout_s = timeout_s
        self._failed = failed or (lambda how: GateError(f"server {name} at {url} {how}"))
        self._http = httpx.Client(
            base_url=url, timeout=timeout_s, trust_env=False, verify=has_tls(url)
        )

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _value: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def server_info(self) -> dict[str, Any]:
        """Return what the server says of itself."""
        answer = self._json(self._send("GET", "/server_info"))
        return answer if isinstance(answer, dict) else {}

    def model_path(self) -> str:
        """Return the path of the model that is served."""
        answer = self._json(self._send("GET", "/model_info"))
        return str(answer["model_path"]) if isinstance(answer, dict) else ""

    def context_tokens(self) -> int | None:
        """Return how many tokens the server takes in one request; None where it does not say."""
        answer = self._json(self._send("POST", "/tokenize", json={"prompt": ["a"]}))
        limits = [
            value
            for value in (
                answer.get("max_model_len") if isinstance(answer, dict) else None,
                self.server_info().get("max_total_num_tokens"),
            )
            if isinstance(value, int) and value > 0
        ]
        return min(limits, default=None)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without the ones that a tokeniser adds at the ends."""
        if not texts:
            return []
        body = {"prompt": list(texts), "add_special_tokens": False}
        answer = self._json(self._send("POST", "/tokenize", json=body))
        try:
            return [[int(token) for token in tokens] for tokens in answer["tokens"]]
        except (KeyError, TypeError, ValueError) as error:
            raise self._nonsense("/tokenize", answer) from error

    def flush_cache(self) -> None:
        """Empty the prefix cache, waiting until the server is idle."""
        self._send("POST", "/flush_cache", params={"timeout": FLUSH_WAIT_S})

    def warm(self, prompts: Sequence[Sequence[int]]) -> None:
        """Put prompts into the prefix cache."""
        self._generate(prompts, {"max_new_tokens": 1})

    def score(self, prompts: Sequence[Sequence[int]], starts: Sequence[int]) -> list[Scores]:
        """Return, for each prompt, the scores of its tokens `start + 1` to the last, in one batch."""
        items = self._generate(
            prompts, {"max_new_tokens": 1}, logprob_start_len=[int(start) for start in starts]
        )
        # The first entry belongs to the token at `start` itself, and the engine gives it no value.
        return [
            self._scores(item, "input", prompt[start + 1 :], skip=1)
            for item, prompt, start in zip(items, prompts, starts, strict=True)
        ]

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Scores]:
        """Return the scores of `new_tokens` greedy tokens after each prompt, in one batch."""
        items = self._generate(prompts, {"max_new_tokens": new_tokens}, logprob_start_len=None)
        scored = [self._scores(item, "output", None, skip=0) for item in items]
        for scores in scored:
            if len(scores.tokens) != new_tokens:
                raise self._failed(
                    f"generated {len(scores.tokens)} of {new_tokens} tokens, without an end of text to stop at"
                )
        return scored

    def answers(self, prompts: Sequence[Sequence[int]], new_tokens: int, stop: str) -> list[str]:
        """Return the greedy text after each prompt, up to `stop`, in one batch."""
        sampling = {"max_new_tokens": new_tokens, "stop": [stop], "ignore_eos": False}
        items = self._generate(prompts, sampling)
        try:
            return [str(item["text"]) for item in items]
        except KeyError as error:
            raise self._nonsense("/generate", items) from error

    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: dict[str, Any], **logprobs: Any
    ) -> list[dict[str, Any]]:
        body: dict[str, Any] = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {"temperature": 0, "ignore_eos": True, **sampling},
        }
        if logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": self.top_logprobs}
            body |= {key: value for key, value in logprobs.items() if value is not None}
        answer = self._json(self._send("POST", "/generate", json=body))
        if (
            not isinstance(answer, list)
            or len(answer) != len(prompts)
            or not all(isinstance(item, dict) for item in answer)
        ):
            raise self._nonsense("/generate", answer)
        return answer

    def _scores(
        self, item: dict[str, Any], side: str, expected: Sequence[int] | None, skip: int
    ) -> Scores:
        """Turn one answer into arrays; `expected` are the tokens that it must be about."""
        try:
            meta = item["meta_info"]
            chosen = meta[f"{side}_token_logprobs"][skip:]
            listed = meta[f"{side}_top_logprobs"][skip : skip + len(chosen)]
            tokens = [entry[1] for entry in chosen]
            scores = Scores(
                np.asarray(tokens if expected is None else self._named(tokens, expected), np.int64),
                np.asarray([entry[0] for entry in chosen], np.float64),
                np.asarray([[entry[1] for entry in row] for row in listed], np.int64),
                np.asarray([[entry[0] for entry in row] for row in listed], np.float64),
                int(meta.get("cached_tokens") or 0),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self._nonsense("/generate", item) from error
        sound = (
            scores.top_ids.ndim == 2
            and len(scores.tokens) == len(scores.top_ids) > 0
            and (expected is None or scores.tokens.tolist() == list(expected))
            and scores.top_ids.shape[1] == self.top_logprobs
            # Each token once, most likely first: the distances rely on both.
            and bool(np.diff(np.sort(scores.top_ids), axis=1).all())
            and not (np.diff(scores.top_logprobs) > 0).any()
        )
        if not sound:
            raise self._nonsense("/generate", item)
        if not (np.isfinite(scores.logprobs).all() and np.isfinite(scores.top_logprobs).all()):
            raise NotANumber(
                f"server {self.name} answered a log-probability that is no finite number"
            )
        mass = np.exp(scores.top_logprobs).sum(axis=1)
        whole = self.top_logprobs == self.vocabulary
        wrong = mass[(mass > 1 + MASS_SLACK) | (whole & (mass < 1 - MASS_SLACK))]
        if len(wrong):
            raise NotANumber(
                f"server {self.name} answered probabilities that sum to {wrong[0]:.4g}"
            )
        return scores

    def _named(self, answered: list[int], sent: Sequence[int]) -> list[int]:
        """Return the answered tokens, with the name of the vocabulary's last one mended (see above)."""
        if self.vocabulary is None or len(answered) != len(sent):
            return answered
        last = self.vocabulary - 1
        return [
            token if name == 0 and token >= last else name
            for name, token in zip(answered, sent, strict=True)
        ]

    def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **request)
        except httpx.TimeoutException as error:
            raise self._failed(
                f"gave no answer to {path} within {self._timeout_s:g} s (--stall-timeout)"
            ) from error
        except httpx.HTTPError as error:
            raise self._failed(
                f"broke off at {path} ({str(error) or type(error).__name__})"
            ) from error
        if response.status_code != 200:
            text = " ".join(response.text.split())[:200]
            raise self._failed(f"answered {response.status_code} to {path}: {text}")
        return response

    def _json(self, response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError as error:
            raise self._nonsense(response.request.url.path, response.text) from error

    def _nonsense(self, path: str, answer: object) -> GateError:
        shown = " ".join(str(answer).split())[:120]
        return self._failed(f"answered nonsense to {path}: {shown}")
