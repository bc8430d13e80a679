# SPDX-License-Identifier: Apache-2.0
"""What a workload is to the rest of the gate: sessions of turns, each with a start time and gaps.

Every kind of workload (`workload.py` and `workload_*.py`) ends in `SessionPlan`s; client, digest and verdict know
nothing else. A session carries either one stream of token ids, of which every prompt is a prefix, or messages with
text. All randomness is seeded, and the seed includes the repeat, never the arm.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from numinous_tooling.gate.errors import GateError

# Enough to pass through prefill and a few decode steps.
WARMUP_NEW_TOKENS = 4
# Kept free below the model's context: the engine reserves a few positions of its own.
CONTEXT_MARGIN_TOKENS = 16
# All prompts of one repeat together; the plan is held in memory and sent to the client process as one job.
MAX_PLANNED_TOKENS = 50_000_000
# Starts and gaps of a replay: a gate that waits longer was given the wrong unit.
MAX_WAITING_S = 24 * 3600.0


@dataclass(frozen=True)
class Turn:
    """One planned request, sent `gap_s` seconds after the session's last answer.

    Its prompt is the first `prompt_tokens` ids of the session, or its first `messages` messages. Of the ids, the
    `answer_tokens` that follow the prompt stand for its answer in the next prompt. `prompt_tokens` of text is an
    estimate. `answer_format` is the machine-readable form that the recorded answer had (`answers.py`).
    """

    prompt_tokens: int
    max_new_tokens: int
    gap_s: float
    answer_tokens: int = 0
    messages: int = 0
    answer_format: str | None = None


@dataclass(frozen=True)
class SessionPlan:
    """One planned session, started `start_s` seconds after the replay began.

    `token_ids` is its whole id stream, of which the first `shared_tokens` are common to all sessions of the repeat;
    a text session has `messages` (and `tools`) as the chat API takes them instead.
    """

    name: str
    start_s: float
    token_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    shared_tokens: int = 0
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON carries it; `dataclasses.asdict` would copy every id, of which there are millions."""
        return {**vars(self), "turns": [vars(turn) for turn in self.turns]}


@dataclass(frozen=True)
class ModelFacts:
    """What a workload must know of a model.

    `path` is its name for the server, `word_ids` are harmless token ids, `words` the text of each: a word that is
    one token with a space before it and without one. No `words`: the vocabulary has no such words, ids only.
    """

    path: str
    context_tokens: int
    word_ids: tuple[int, ...]
    words: tuple[str, ...] = ()


class Workload(Protocol):
    """A kind of workload with its settings; decides the requests together with model and repeat."""

    @property
    def kind(self) -> str:
        """Name on the command line."""

    @property
    def sessions(self) -> int:
        """How many sessions there are."""

    @property
    def seed(self) -> int:
        """Chooses sessions and tokens."""

    @property
    def length_scale(self) -> float:
        """Factor on all recorded token counts."""

    @property
    def is_text(self) -> bool:
        """Whether sessions are messages with text, not token counts."""

    def build(self, model: ModelFacts, repeat: int) -> tuple[SessionPlan, ...]:
        """Return the sessions of one repeat: shapes and times are the same in all repeats, tokens are not."""

    def describe(self) -> dict[str, Any]:
        """Return the settings for verdict.json."""


def draw(model: ModelFacts, seed: str, count: int) -> tuple[int, ...]:
    """Return `count` word ids, chosen by `seed`."""
    return tuple(random.Random(seed).choices(model.word_ids, k=count))


def build_warmup(
    model: ModelFacts, plans: Sequence[SessionPlan], count: int
) -> tuple[SessionPlan, ...]:
    """Return `count` one-turn sessions with the first prompt lengths of `plans` and tokens of their own."""
    warmup = []
    for index, plan in enumerate(plans[:count]):
        turn = replace(
            plan.turns[0],
            max_new_tokens=WARMUP_NEW_TOKENS,
            gap_s=0.0,
            answer_tokens=0,
            answer_format=None,
        )
        name = f"warmup/{index}"
        ids = () if plan.messages else draw(model, name, turn.prompt_tokens)
        messages = mark_messages(plan.messages[: turn.messages], name)
        warmup.append(SessionPlan(name, 0.0, ids, (turn,), messages=messages, tools=plan.tools))
    return tuple(warmup)


def mark_messages(
    messages: Sequence[Mapping[str, Any]], mark: str
) -> tuple[Mapping[str, Any], ...]:
    """Return the messages with a line before everything else, so that they share no prefix with unmarked ones."""
    if not messages:
        return ()
    first = {**messages[0], "content": f"[{mark}]\n{messages[0]['content']}"}
    return (first, *messages[1:])


def check_size(plans: Sequence[SessionPlan]) -> None:
    """Refuse a plan that would not fit in memory."""
    check_planned(sum(len(plan.token_ids) for plan in plans))


def check_planned(total: int) -> None:
    """Refuse so many prompt tokens."""
    if total > MAX_PLANNED_TOKENS:
        raise GateError(
            f"the workload has {total:,} prompt tokens a repeat, at most {MAX_PLANNED_TOKENS:,} are planned; "
            "lower --requests, --sessions or --length-scale"
        )


def check_duration(plans: Sequence[SessionPlan]) -> None:
    """Refuse a plan that does nothing but wait for longer than any gate is meant to run."""
    longest_s = max(plan.start_s + sum(turn.gap_s for turn in plan.turns) for plan in plans)
    if longest_s > MAX_WAITING_S:
        raise GateError(
            f"the workload waits {longest_s / 3600:,.0f} hours between requests, at most "
            f"{MAX_WAITING_S / 3600:g} are planned; raise --speedup or --rate"
        )


def digest(plans: tuple[SessionPlan, ...]) -> str:
    """Return the sha256 of a workload, so that a report can show that arms got the same one."""
    text = json.dumps([plan.to_json() for plan in plans], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the sha256 of a recording, which its name alone would not tell from another."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
