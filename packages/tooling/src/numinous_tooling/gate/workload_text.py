# SPDX-License-Identifier: Apache-2.0
"""Workload `agents-text`: recorded agent sessions with their messages, replayed through the chat API.

A trace is JSON lines (gzipped or not): `session`, `messages` as the chat API takes them, and `tools` where the agent
had any. Assistant messages may carry the recorded call's numbers: `prompt_tokens`, `completion_tokens`,
`reasoning_tokens` and `t`, seconds since the session's first call. Every assistant message is one turn, whose prompt
is all messages before it: recorded answers stay in the context, whatever the server answered. Texts are read from
where the user has them and are never part of this repository.

The repeat is written in a line before the first message, so that no repeat finds the cache of another; lengths cannot
be scaled, and how many tokens a prompt has only the server's tokenizer knows: `CHARS_PER_TOKEN` errs towards more.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numinous_tooling.gate.answers import answer_format
from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.plan import (
    CONTEXT_MARGIN_TOKENS,
    ModelFacts,
    SessionPlan,
    Turn,
    file_digest,
    mark_messages,
)
from numinous_tooling.gate.workload import START_SPREAD_S, tool_gap_s
from numinous_tooling.gate.workload_traces import read_lines

CHARS_PER_TOKEN = 3.0
# What an answer without a recorded count may take, against its own estimate.
OUTPUT_ROOM = 2.0

_CHAT_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")


@dataclass(frozen=True)
class TextSession:
    """One session of the trace: what the chat API takes, and the recorded messages with their numbers."""

    name: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    recorded: tuple[Mapping[str, Any], ...]


def read_sessions(trace: Path) -> tuple[TextSession, ...]:
    """Read all sessions of a trace; name the line that is not one."""
    sessions = []
    for number, row in read_lines(trace):
        messages = row.get("messages")
        if not (
            isinstance(messages, list)
            and messages
            and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
            and isinstance(messages[0].get("content"), str)
            and isinstance(row.get("tools") or [], list)
            and messages[0]["role"] != "assistant"
        ):
            raise GateError(
                f"--trace {trace} line {number} has no chat: messages with role and content, the first not an answer, and a list of tools"
            )
        chat = tuple({key: m[key] for key in _CHAT_KEYS if key in m} for m in messages)
        name = str(row.get("session", f"line-{number}"))
        session = TextSession(name, chat, tuple(row.get("tools") or ()), tuple(messages))
        try:
            name.encode()
            plan_turns(session, len(messages), 1.0)
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise GateError(
                f"--trace {trace} line {number}: session, t, completion_tokens or tool_calls are not as "
                f"recorded calls have them ({error})"
            ) from error
        sessions.append(session)
    if len({session.name for session in sessions}) < len(sessions):
        raise GateError(f"--trace {trace}: two sessions have the same name")
    return tuple(sessions)


def estimate_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return about how many tokens messages have, rather more than fewer."""
    chars = sum(
        len(str(message.get("content") or "")) + len(str(message.get("tool_calls") or ""))
        for message in messages
    )
    return math.ceil(chars / CHARS_PER_TOKEN)


def plan_turns(session: TextSession, limit: int, speedup: float) -> tuple[Turn, ...]:
    """Return up to `limit` turns, one for each recorded answer."""
    turns: list[Turn] = []
    before: Mapping[str, Any] | None = None
    for index, answer in enumerate(session.recorded):
        if answer["role"] != "assistant":
            continue
        if len(turns) == limit:
            break
        estimate = math.ceil(OUTPUT_ROOM * estimate_tokens([answer]))
        gap_s = 0.0
        if before is not None and "t" in before and "t" in answer:
            interval_s = float(answer["t"]) - float(before["t"])
            gap_s = tool_gap_s(interval_s, int(before.get("completion_tokens") or 0)) / speedup
        arguments = [
            str((call.get("function") or {}).get("arguments") or "")
            for call in answer.get("tool_calls") or ()
        ]
        turns.append(
            Turn(
                estimate_tokens(session.messages[:index]),
                max(1, int(answer.get("completion_tokens") or estimate)),
                gap_s,
                messages=index,
                answer_format=answer_format(str(answer.get("content") or ""), arguments),
            )
        )
        before = answer
    return tuple(turns)


@dataclass(frozen=True)
class TextSpec:
    """`sessions` sessions of a trace, the first `turns` answers of each."""

    trace: Path
    sessions: int
    turns: int
    speedup: float
    seed: int

    kind = "agents-text"
    is_text = True
    length_scale = 1.0

    def build(self, model: ModelFacts, repeat: int) -> tuple[SessionPlan, ...]:
        """Return the sessions of one repeat, chosen by seed among those that are long enough and fit the context."""
        limit = model.context_tokens - CONTEXT_MARGIN_TOKENS
        everything = read_sessions(self.trace)
        fitting = []
        for session in everything:
            turns = plan_turns(session, self.turns, self.speedup)
            if len(turns) == self.turns and all(
                turn.prompt_tokens + turn.max_new_tokens <= limit for turn in turns
            ):
                fitting.append((session, turns))
        if len(fitting) < self.sessions:
            raise GateError(
                f"only {len(fitting)} of {len(everything)} sessions of --trace {self.trace} have {self.turns} turns and "
                f"fit {model.context_tokens} tokens of context, {self.sessions} wanted; lower --sessions or --turns"
            )
        plans = []
        for session, turns in random.Random(f"sessions/{self.seed}").sample(fitting, self.sessions):
            start = random.Random(f"start/{self.seed}/{session.name}").uniform(0, START_SPREAD_S)
            plans.append(
                SessionPlan(
                    session.name,
                    start / self.speedup,
                    (),
                    turns,
                    messages=mark_messages(
                        session.messages[: turns[-1].messages], f"{self.seed}/{repeat}"
                    ),
                    tools=session.tools,
                )
            )
        return tuple(plans)

    def describe(self) -> dict[str, Any]:
        """Return the settings for verdict.json."""
        return {
            "trace": self.trace.name,
            "trace_sha256": file_digest(self.trace),
            "speedup": self.speedup,
        }
