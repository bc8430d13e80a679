# SPDX-License-Identifier: Apache-2.0
"""One probe of the cliff search: fill the contexts of so many users, then measure what each of them gets (`cliff`).

**Lag.** A client whose p99 lag is beyond its limit has lagged, and its clock is then believed only so far: an answer's seconds
have two stamps, sending and end, and each may be off by the greatest lag seen and one tick of the meter, which sees
a standstill only from its next wake-up on. The maximum and not p99: an answer has these two stamps only, and both may
fall into the worst moment. The probe says again what it would with every answer so much longer (the next turn was sent late,
so the server had a rest) and so much shorter (the end was stamped late). If it holds in the first case too, or
fails in the second too, lag did not make its word. A bad answer fails a probe at any speed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numinous_tooling.gate.arms import Arm
from numinous_tooling.gate.client import LAG_TICK_S, RequestRecord
from numinous_tooling.gate.conversation import Conversation, Outcome, client_failed
from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.measures import METRICS, ArmRun, percentiles, units
from numinous_tooling.gate.plan import MAX_PLANNED_TOKENS, ModelFacts, SessionPlan, Turn, draw
from numinous_tooling.gate.servers import Interrupts, Server, client_processes
from numinous_tooling.gate.verdict import lag_limit_s

NEW_TOKENS = 8
"""Tokens of a turn's prompt that are neither context nor answer."""
USER_TOKENS = 8
"""First tokens of a context, other for every user, so that no two share a prefix."""
FILL_FACTOR = 10.0
STAMPS_PER_ANSWER = 2
LEAST_ANSWER_S = 1e-6
"""Of an answer that may have been all lag: the resolution of a record's seconds."""


@dataclass(frozen=True)
class CliffOptions:
    """Everything that a search needs; the command line fills it in."""

    arms: Mapping[str, Arm]
    order: str
    model: ModelFacts
    contexts: tuple[int, ...]
    limit: float
    """Tokens per second per user."""
    max_concurrency: int
    clients: int
    """Client processes over which a probe's users are divided."""
    output: int
    probe_s: float
    resolution: float
    tolerance: float
    seed: int
    out: Path
    server_template: tuple[str, ...]
    port_base: int | None
    start_timeout_s: float
    stall_timeout_s: float
    max_lag_s: float | None
    pool: Mapping[str, Any]
    command: str

    @property
    def turns(self) -> int:
        """Return the measured turns of a user: what the limit gives in half of a probe."""
        return max(1, round(self.limit * self.probe_s / 2 / self.output))

    def highest(self, context: int) -> int:
        """Return the greatest concurrency that may be planned at a context."""
        return max(1, min(self.max_concurrency, MAX_PLANNED_TOKENS // context))


@dataclass(frozen=True)
class Probe:
    """One probe: what was asked for and what came back; rates in tokens per second per user, times in seconds."""

    context: int
    concurrency: int
    holds: bool
    rate_p10: float | None
    rate_p50: float | None
    cut: bool
    fill_s: float
    measured_s: float
    bad_answers: int
    error: str | None
    lag: str | None
    """How far the client lagged, where it lagged too far."""
    lag_max_s: float | None = None
    """The greatest lag of the worst client; None where the probe was cut and its clients with it."""
    rate_p10_least: float | None = None
    """Where `lag` is not None: `rate_p10` with every answer longer by what lag can have hidden."""
    rate_p10_most: float | None = None
    """Likewise, with every answer shorter by what lag can have added."""

    def in_doubt(self, limit: float) -> bool:
        """Return whether the client's lag could have made the word of this probe; `limit` in tokens per second."""
        if self.lag is None:
            return False
        if self.holds:
            return self.rate_p10_least is None or self.rate_p10_least < limit
        if self.bad_answers:
            return False
        return self.rate_p10_most is None or self.rate_p10_most >= limit


def user_rates(records: Sequence[RequestRecord], off_s: float = 0.0) -> dict[str, float | None]:
    """Return p10 and p50 of the users' tokens per second, with every answer `off_s` seconds longer than measured."""
    moved = [replace(record, e2e_s=max(LEAST_ANSWER_S, record.e2e_s + off_s)) for record in records]
    run = ArmRun(0, "", 1, moved, 0.0, 0.0, 0.0)
    return percentiles(list(units([run], METRICS[0]).values()), (10, 50))


def turn_prompts(context: int, turns: int, output: int) -> list[int]:
    """Return the prompt lengths of the filling prompt and of each measured turn; the last answer ends at `context`."""
    step = output + NEW_TOKENS
    first = context - output - turns * step
    if first < USER_TOKENS:
        raise GateError(
            f"--contexts {context}: {turns} x {output} tokens of answers need a context of at least "
            f"{USER_TOKENS + output + turns * step}; lower --probe-seconds, --limit or --output"
        )
    return [first + turn * step for turn in range(turns + 1)]


def plan_probe(
    options: CliffOptions, context: int, concurrency: int
) -> tuple[tuple[SessionPlan, ...], tuple[SessionPlan, ...]]:
    """Return the filling sessions and the measured ones, a session per user."""
    fill, *prompts = turn_prompts(context, options.turns, options.output)
    # What follows a user's own first tokens may be common to all: a cached prefix ends at the first difference.
    tail = draw(options.model, f"cliff/{options.seed}/{context}", context - USER_TOKENS)
    sessions = []
    for user in range(concurrency):
        own = draw(options.model, f"cliff/{options.seed}/{context}/{user}", USER_TOKENS)
        turns = tuple(Turn(prompt, options.output, 0.0, options.output) for prompt in prompts)
        sessions.append(SessionPlan(f"user-{user:05}", 0.0, own + tail, turns))
    filling = tuple(replace(plan, turns=(Turn(fill, 1, 0.0),)) for plan in sessions)
    return filling, tuple(sessions)


class _Muted:
    """The progress of one replay inside a probe: the probe itself is what is shown."""

    def begin(self, slot: str) -> None:
        """Show nothing."""

    def phase(self, text: str) -> None:
        """Show nothing."""

    def requests(self, done: int) -> None:
        """Show nothing."""

    def end(self, summary: str) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Show nothing."""


class Prober:
    """Makes probes on one running server."""

    def __init__(self, options: CliffOptions, server: Server, interrupts: Interrupts) -> None:
        self._options = options
        self._server = server
        self._interrupts = interrupts
        self._warm = False

    def probe(self, context: int, concurrency: int) -> Probe:
        """Measure one concurrency at one context."""
        filling, measured = plan_probe(self._options, context, concurrency)
        if not self._warm:
            # What compiles or allocates at the first batch of a kind is not the cliff.
            self._warm = True
            self.probe(context, concurrency)
        begin_s = time.monotonic()
        fill_limit_s = FILL_FACTOR * self._options.probe_s
        filled = self._replay(filling, flush="must", limit_s=fill_limit_s)
        fill_s = time.monotonic() - begin_s
        if filled is None:
            raise GateError(
                f"{self._server.name}: filling {concurrency} contexts of {context} tokens took more than "
                f"{fill_limit_s:g} s; lower --pool-bytes, --contexts or --max-concurrency, or raise --probe-seconds"
            )
        begin_s = time.monotonic()
        outcome = self._replay(measured, flush="never", limit_s=self._options.probe_s)
        return self._judge(
            context, concurrency, filled, outcome, fill_s, time.monotonic() - begin_s
        )

    def _judge(
        self,
        context: int,
        concurrency: int,
        filled: Outcome,
        outcome: Outcome | None,
        fill_s: float,
        measured_s: float,
    ) -> Probe:
        options = self._options
        records = [*filled.records, *(outcome.records if outcome else ())]
        bad = [record for record in records if record.error or record.short]
        rates: dict[str, float | None] = {}
        lag = lag_max_s = least = most = None
        if outcome is not None:
            measured_s = outcome.wall_s
            run = ArmRun(0, "", 1, outcome.records, measured_s, outcome.lag_p99_s, 0.0)
            rates = user_rates(outcome.records)
            lag_max_s = round(outcome.lag_max_s, 6)
            limit_s = lag_limit_s(run) if options.max_lag_s is None else options.max_lag_s
            if run.lag_p99_s > limit_s:
                lag = f"p99 {run.lag_p99_s * 1e3:.1f} ms over {limit_s * 1e3:.1f} ms"
                off_s = STAMPS_PER_ANSWER * (outcome.lag_max_s + LAG_TICK_S)
                least = user_rates(outcome.records, off_s)["p10"]
                most = user_rates(outcome.records, -off_s)["p10"]
        low = rates.get("p10")
        return Probe(
            context,
            concurrency,
            holds=low is not None and low >= options.limit and not bad,
            rate_p10=low,
            rate_p50=rates.get("p50"),
            cut=outcome is None,
            fill_s=round(fill_s, 3),
            measured_s=round(measured_s, 3),
            bad_answers=len(bad),
            error=next((r.error or "short answer" for r in bad), None),
            lag=lag,
            lag_max_s=lag_max_s,
            rate_p10_least=least,
            rate_p10_most=most,
        )

    def _replay(
        self, plans: tuple[SessionPlan, ...], *, flush: str, limit_s: float
    ) -> Outcome | None:
        """Replay sessions all at once; None where they were cut after `limit_s`."""
        options = self._options
        job = {
            "url": self._server.url,
            "api": "sglang",
            "model": options.model.path,
            "prompts": "ids",
            "is_text": False,
            "exact": True,
            "dp_size": None,
            "flush": flush,
            "word_ids": (),
            "words": (),
            "concurrency": len(plans),
            # Filling is warm-up enough, and warm-up requests would push filled contexts out of the cache.
            "warmup": [],
            "sessions": [plan.to_json() for plan in plans],
        }
        command = [sys.executable, "-m", "numinous_tooling.gate.client"]
        stderr_log = options.out / f"client-{self._server.name}.log"
        cut = threading.Event()
        clients = min(options.clients, len(plans))
        with client_processes(command, clients, self._interrupts, stderr_log) as processes:

            def stop() -> None:
                cut.set()
                for process in processes:
                    process.kill()

            timer = threading.Timer(limit_s, stop)

            def at_go() -> dict[str, dict[str, int]]:
                # The conversation reads the counters at the moment in which it lets the client go.
                timer.start()
                return {}

            try:
                outcome = Conversation(
                    self._server, processes, _Muted(), options.stall_timeout_s, at_go
                ).hold(job)
            finally:
                timer.cancel()
        if outcome is None and not cut.is_set():
            raise client_failed(self._server.name, stderr_log)
        if stderr_log.stat().st_size == 0:
            stderr_log.unlink()
        return outcome
