# SPDX-License-Identifier: Apache-2.0
"""What is asked of one server, row by row: each row is a way in which the engine comes to a next-token distribution.

- **cold**: every token computed in one prefill, nothing cached;
- **hit**: the second half of each sequence scored on top of its first half, which is read from the prefix cache;
- **chunked**: sequences longer than the server's prefill chunk, nothing cached;
- **decode**: positions computed by decode steps, after a first one from the prefill. The engine cannot be forced along
  tokens there (a logit processor that forces them also changes the log-probabilities that are returned, and features
  may refuse to run beside it), so both arms generate greedily and are compared up to and including the position at
  which their tokens part;
- **protocol**: the tool-call and JSON tokens of *cold*;
- **gold**: the printed GSM8K solutions, scored on top of a cached few-shot prompt.

The same plan is measured again on the stock server with the sequences in reverse order and another number of them at
a time: the distance between the two is the floor, row by row. A row in which that changed not one bit was not shaken
(the engine took the same kernels), so it is measured once more, one sequence at a time (`unshaken`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from numinous_tooling.gate.accuracy import gsm8k
from numinous_tooling.gate.accuracy.client import EngineClient
from numinous_tooling.gate.accuracy.distance import MIN_SEQUENCES, Scores
from numinous_tooling.gate.accuracy.sequences import (
    MIN_TOKENS,
    Document,
    TokenSequence,
    build_sequences,
)
from numinous_tooling.gate.errors import GateError

Counters = Mapping[str, Mapping[str, int]]
Item = TypeVar("Item")

ROWS: Mapping[str, str] = {
    "cold": "cold prefill",
    "hit": "prefix-cache hit",
    "chunked": "chunked prefill",
    "decode": "decode steps",
    "protocol": "tool-call / JSON tokens",
    "gold": "GSM8K solutions",
}
# Sequences longer than the chunk by half: the last chunk is then not a whole one.
CHUNKS_PER_SEQUENCE = 1.5
# Batches that decode together: more than one prefill takes, so that some requests wait while others decode, as in
# serving. A single sequence at a time stays single.
DECODE_BATCHES = 4
# Of English and of code, with the tokenisers of today's models.
USUAL_CHARACTERS_PER_TOKEN = 4
# Rows of distributions that are asked for as they are; the protocol row is taken from the first.
REPEATED = ("cold", "hit", "chunked", "decode", "gold")


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    per_kind: int
    length: int
    decode_tokens: int
    concurrency: int
    answer_tokens: int


@dataclass(frozen=True)
class Plan:
    """Everything that is sent, as token ids; the same for all arms.

    Args:
        missing: rows that cannot be measured, with the reason.
        notes: what weakens the figures, one line each.
        problems: prompts of the GSM8K problems, after `prefix`.
        solutions: tokens of their printed solutions.
        answers: the numbers that answer them.
    """

    size: Size
    sequences: tuple[TokenSequence, ...]
    long_sequences: tuple[TokenSequence, ...]
    missing: Mapping[str, str]
    prefix: tuple[int, ...] = ()
    problems: tuple[tuple[int, ...], ...] = ()
    solutions: tuple[tuple[int, ...], ...] = ()
    answers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def name(self, row: str, index: int) -> str:
        """Return the name of a row's sequence."""
        if row == "gold":
            return f"problem-{index}"
        return (self.long_sequences if row == "chunked" else self.sequences)[index].name


@dataclass
class Measurement:
    """What one server said: scores per row in the plan's order, and what each row made its features do."""

    rows: dict[str, list[Scores]] = field(default_factory=dict)
    right: list[bool] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    engaged: dict[str, dict[str, int]] = field(default_factory=dict)


def make_plan(
    client: EngineClient,
    texts: Mapping[str, Sequence[Document]],
    problems: gsm8k.Problems | None,
    size: Size,
    seed: int,
) -> Plan:
    """Tokenise everything with the server's tokeniser, and fit it to the server's context and prefill chunk."""
    known = client.context_tokens()
    context = known or size.length * 2
    length = min(size.length, context - 2)
    sequences = build_sequences(
        texts, client.tokenize, per_kind=size.per_kind, length=length, seed=seed
    )
    if not sequences:
        raise GateError(
            f"no text gives a window of {MIN_TOKENS} tokens; give a longer one with --text"
        )
    if known is not None and length // 2 + size.decode_tokens > known - 2:
        raise GateError(
            f"--decode-tokens {size.decode_tokens} after {length // 2} do not fit into {known} tokens of context"
        )
    missing: dict[str, str] = {}
    long = _long_sequences(client, texts, context, seed, missing)
    if not any(any(sequence.protocol) for sequence in sequences):
        missing["protocol"] = "no tool call and no JSON in the texts; give --text agent=FILE.jsonl"
    prefix: list[int] = []
    asked: list[list[int]] = []
    solutions: list[list[int]] = []
    chosen: tuple[gsm8k.Problem, ...] = ()
    if problems is None:
        missing["gold"] = "no --gsm8k"
    else:
        (prefix,) = client.tokenize([gsm8k.prefix()])
        chosen = problems.problems
        asked = client.tokenize([gsm8k.prompt(problem) for problem in chosen])
        solutions = client.tokenize([" " + problem.solution for problem in chosen])
        room = context - len(prefix) - max(map(len, asked)) - 2
        if room < max(size.answer_tokens, *map(len, solutions)):
            missing["gold"] = f"the few-shot prompts do not fit into {context} tokens of context"
            chosen, asked, solutions = (), [], []
    return Plan(
        size=size,
        sequences=tuple(sequences),
        long_sequences=tuple(long),
        missing=missing,
        prefix=tuple(prefix),
        problems=tuple(map(tuple, asked)),
        solutions=tuple(map(tuple, solutions)),
        answers=tuple(problem.answer for problem in chosen),
        notes=tuple(_overlaps(texts, size)),
    )


def _overlaps(texts: Mapping[str, Sequence[Document]], size: Size) -> Iterator[str]:
    """Yield the kinds whose text is too short for windows of their own."""
    for kind, documents in texts.items():
        characters = sum(len(segment.text) for document in documents for segment in document)
        if characters < USUAL_CHARACTERS_PER_TOKEN * size.length * size.per_kind:
            yield (
                f"{kind}: {characters} characters are too few for {size.per_kind} windows of {size.length} tokens; "
                "they overlap, so that intervals are too narrow: give --text"
            )


def _long_sequences(
    client: EngineClient,
    texts: Mapping[str, Sequence[Document]],
    context: int,
    seed: int,
    missing: dict[str, str],
) -> list[TokenSequence]:
    chunk = client.server_info().get("chunked_prefill_size")
    if not isinstance(chunk, int) or chunk <= 0:
        missing["chunked"] = "the server does not prefill in chunks (--chunked-prefill-size)"
        return []
    if context - 2 <= chunk:
        missing["chunked"] = f"a chunk of {chunk} tokens leaves nothing of a context of {context}"
        return []
    per_kind = -(-MIN_SEQUENCES // len(texts)) + 1
    length = min(int(chunk * CHUNKS_PER_SEQUENCE), context - 2)
    found = build_sequences(texts, client.tokenize, per_kind=per_kind, length=length, seed=seed)
    long = [sequence for sequence in found if len(sequence) > chunk][:MIN_SEQUENCES]
    if len(long) < MIN_SEQUENCES:
        missing["chunked"] = (
            f"the texts hold {len(long)} of {MIN_SEQUENCES} windows longer than a chunk of {chunk} tokens; "
            "give --text, or a smaller --chunk"
        )
        return []
    return long


def measure(
    client: EngineClient,
    plan: Plan,
    *,
    concurrency: int,
    reverse: bool,
    counters: Callable[[], Counters],
    on_phase: Callable[[str], None],
    only: Sequence[str] | None = None,
) -> Measurement:
    """Ask one server for all rows of a plan.

    Args:
        concurrency: sequences per request; `DECODE_BATCHES` times as many in decode steps.
        reverse: whether they go in reverse order.
        counters: reads the feature counters of the server.
        on_phase: is told what comes next.
        only: of `REPEATED`; None: all rows of the plan.
    """
    result = Measurement()
    half = [len(sequence) // 2 for sequence in plan.sequences]
    ids = [sequence.ids for sequence in plan.sequences]

    def row(
        name: str, count: int, ask: Callable[[list[int]], list[Item]], at_a_time: int = concurrency
    ) -> list[Item]:
        on_phase(ROWS.get(name, name))
        before = counters()
        client.flush_cache()
        answers: dict[int, Item] = {}
        order = list(range(count))
        if reverse:
            order.reverse()
        for start in range(0, count, at_a_time):
            batch = order[start : start + at_a_time]
            answers.update(zip(batch, ask(batch), strict=True))
        result.engaged[name] = _engaged(before, counters())
        return [answers[index] for index in range(count)]

    def hit(batch: list[int]) -> list[Scores]:
        client.warm([ids[i][: half[i]] for i in batch])
        return client.score([ids[i] for i in batch], [half[i] for i in batch])

    long = [sequence.ids for sequence in plan.long_sequences]

    def cold(batch: list[int]) -> list[Scores]:
        return client.score([ids[i] for i in batch], [0] * len(batch))

    def chunked(batch: list[int]) -> list[Scores]:
        return client.score([long[i] for i in batch], [0] * len(batch))

    def decode(batch: list[int]) -> list[Scores]:
        return client.generate([ids[i][: half[i]] for i in batch], plan.size.decode_tokens)

    prompts = [plan.prefix + problem for problem in plan.problems]

    def gold(batch: list[int]) -> list[Scores]:
        return client.score(
            [prompts[i] + plan.solutions[i] for i in batch], [len(prompts[i]) - 1 for i in batch]
        )

    asked = {
        "cold": (cold, len(ids)),
        "hit": (hit, len(ids)),
        "chunked": (chunked, len(long)),
        "decode": (decode, len(ids)),
        "gold": (gold, len(prompts)),
    }
    for name, (ask, count) in asked.items():
        if count and (only is None or name in only):
            many = DECODE_BATCHES if name == "decode" and concurrency > 1 else 1
            result.rows[name] = row(name, count, ask, concurrency * many)
    if only is not None:
        return result
    if "protocol" not in plan.missing:
        result.rows["protocol"] = protocol_of(plan, result)
    if plan.problems:
        result.texts = row(
            "GSM8K answers",
            len(prompts),
            lambda batch: client.answers(
                [prompts[i] for i in batch], plan.size.answer_tokens, gsm8k.STOP
            ),
        )
        result.right = [
            gsm8k.final_number(text) == answer
            for text, answer in zip(result.texts, plan.answers, strict=True)
        ]
    return result


def protocol_of(plan: Plan, result: Measurement) -> list[Scores]:
    """Tool-call and JSON tokens of *cold*; the first token of a sequence is not scored."""
    return [
        scores.where(np.asarray(sequence.protocol[1:], np.bool_))
        for scores, sequence in zip(result.rows["cold"], plan.sequences, strict=True)
    ]


def unshaken(base: Measurement, again: Measurement) -> list[str]:
    """Rows of `REPEATED` that came out bit for bit the same both times."""
    return [
        name
        for name in REPEATED
        if base.rows.get(name)
        and all(
            np.array_equal(one.logprobs, other.logprobs)
            and np.array_equal(one.top_logprobs, other.top_logprobs)
            and np.array_equal(one.top_ids, other.top_ids)
            for one, other in zip(base.rows[name], again.rows[name], strict=True)
        )
    ]


def _engaged(before: Counters, after: Counters) -> dict[str, int]:
    """Return how often each feature engaged between two readings."""
    counts = {
        feature: values.get("engaged", 0) - before.get(feature, {}).get("engaged", 0)
        for feature, values in after.items()
    }
    return {feature: count for feature, count in counts.items() if count}


def vocabulary_of(model: str) -> int | None:
    """Return the vocabulary size that a local model's config.json names; None where it is not at hand."""
    try:
        config = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    size = (config.get("text_config") or config).get("vocab_size") or config.get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None
