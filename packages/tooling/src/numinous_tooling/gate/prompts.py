# SPDX-License-Identifier: Apache-2.0
"""From a planned turn to a request of one interface, with token counts kept where the interface takes text.

A plan counts tokens. As ids a prompt has exactly these. As text it has one token a word (`ModelFacts.words`) plus what
the server adds: a beginning-of-text token, or the chat template. That addition is *measured* on the server before the
replay, by probes of known word counts and the usage that the server reports, and taken off the words. What is left is
the drift: the server's count against the plan's, reported per run, and no verdict is given above `MAX_DRIFT`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from typing import Any

from numinous_tooling.gate.apis import OpenAiClient, Request, RequestFailed

MAX_DRIFT = 0.01
PROBE_WORDS = 16


@dataclass(frozen=True)
class Overhead:
    """Tokens that the server adds: to the first prompt, and to each further pair of answer and question.

    `system` is whether the chat template takes a system message.
    """

    first: int = 0
    pair: int = 0
    system: bool = True


@dataclass(frozen=True)
class Form:
    """How turns are sent: prompts as `ids`, `text` or `chat`; `words` by id for the last two."""

    prompts: str
    words: Mapping[int, str]
    exact: bool
    dp_size: int | None
    overhead: Overhead = Overhead()


def dp_rank(session: str, dp_size: int | None) -> int | None:
    """Return the data-parallel rank that a session is pinned to, the same in every arm; None without pinning."""
    if dp_size is None:
        return None
    return int.from_bytes(hashlib.sha256(session.encode()).digest()[:8], "big") % dp_size


def build_request(plan: Mapping[str, Any], index: int, form: Form) -> Request:
    """Return the request of turn `index` of a session plan (as JSON carries it)."""
    turn = plan["turns"][index]
    rank = dp_rank(plan["name"], form.dp_size)
    new_tokens = turn["max_new_tokens"]
    if plan["messages"]:
        return Request(
            new_tokens,
            messages=tuple(plan["messages"][: turn["messages"]]),
            tools=tuple(plan["tools"]),
            exact=form.exact,
            dp_rank=rank,
            keep_text=turn["answer_format"] is not None,
        )
    if form.prompts == "chat":
        messages = chat_messages(plan, index, form)
        return Request(new_tokens, messages=messages, exact=form.exact, dp_rank=rank)
    if form.prompts == "text":
        count = max(1, turn["prompt_tokens"] - form.overhead.first)
        text = " ".join(form.words[token] for token in plan["token_ids"][:count])
        return Request(new_tokens, text=text, exact=form.exact, dp_rank=rank)
    ids = tuple(plan["token_ids"][: turn["prompt_tokens"]])
    return Request(new_tokens, token_ids=ids, exact=form.exact, dp_rank=rank)


def chat_messages(plan: Mapping[str, Any], index: int, form: Form) -> tuple[dict[str, str], ...]:
    """Return the messages of turn `index`: system (the shared prefix), user, then answer and user for each turn.

    A message has at least one word; where that makes a prompt longer than planned, later turns take it off again.
    """
    overhead = form.overhead
    # Words left out for the template are not missed at the end of the stream, but a plan with many tiny turns may want more.
    stream = cycle(plan["token_ids"])

    def text(count: int) -> str:
        return " ".join(form.words[token] for token in islice(stream, count))

    turns = plan["turns"]
    room = turns[0]["prompt_tokens"] - overhead.first
    messages: list[dict[str, str]] = []
    system = max(1, min(plan["shared_tokens"], room - 1)) if overhead.system else 0
    if system:
        messages.append({"role": "system", "content": text(system)})
    user = max(1, room - system)
    messages.append({"role": "user", "content": text(user)})
    total = overhead.first + system + user
    for before, turn in pairwise(turns[: index + 1]):
        room = turn["prompt_tokens"] - total - overhead.pair
        answer = max(1, min(before["answer_tokens"], room - 1))
        user = max(1, room - answer)
        messages.append({"role": "assistant", "content": text(answer)})
        messages.append({"role": "user", "content": text(user)})
        total += overhead.pair + answer + user
    return tuple(messages)


def probe_text(words: Sequence[str], count: int) -> str:
    """Return `count` words."""
    return " ".join(islice(cycle(words), count))


async def measure_overhead(
    client: OpenAiClient, prompts: str, words: Sequence[str], exact: bool
) -> Overhead:
    """Ask the server how many tokens it adds to prompts of known word counts; raise `RequestFailed` if it won't say."""
    text = probe_text(words, PROBE_WORDS)

    async def added(messages: Sequence[str]) -> int:
        """Return the server's prompt tokens minus the words sent."""
        if prompts == "chat":
            chat = tuple({"role": role, "content": text} for role in messages)
            request = Request(1, messages=chat, exact=exact)
        else:
            request = Request(1, text=text, exact=exact)
        counted: int | None = None
        async for chunk in client.stream(request):
            counted = chunk.prompt_tokens if chunk.prompt_tokens is not None else counted
        if counted is None:
            raise RequestFailed(
                "the server reports no usage, so prompt tokens through text cannot be counted; use --prompts ids"
            )
        return counted - PROBE_WORDS * len(messages)

    if prompts != "chat":
        return Overhead(first=await added(("user",)))
    try:
        first, system = await added(("system", "user")), True
    except RequestFailed as failure:
        if failure.status is None:
            raise
        first, system = await added(("user",)), False  # some templates refuse a system message
    roles = ("system", "user") if system else ("user",)
    pair = await added((*roles, "assistant", "user")) - first
    return Overhead(first, pair, system)


def drift(counts: Sequence[tuple[int, int]]) -> float | None:
    """Return how far (planned, counted by the server) prompt tokens lie apart, relative to the plan; None for none."""
    planned = sum(plan for plan, _ in counts)
    return sum(abs(server - plan) for plan, server in counts) / planned if planned else None
