# SPDX-License-Identifier: Apache-2.0
"""The verdict on trial: a scripted server in virtual time, whose truth is known, judged a thousand times.

`python -m numinous_tooling.gate.simulate --trials 1000` runs whole gate runs (all slots of an order, all requests of all
sessions) without waiting and hands their records to the same `verdict.compare` that judges real runs. Each row of its table is
a case with an expectation, tested with a binomial test at 0.1 %: exit code 0 if all hold, 1 if not. `--methods` adds a
table of the candidates among which `verdict` chose its interval.

**The server.** Prompts wait in one queue and are prefilled one after the other; then the request decodes together with
all others, in chunks, each the slower the more there are. Sessions are closed loops, begun one after the other: the next prompt
follows the last answer and a tool gap. On top of that, noise: log-normal factors per server start, per session of a run and per request,
a drift from slot to slot, and stalls of single chunks. A planted slow-down multiplies all service times of arm B; as
requests queue, what a user sees need not be exactly as much.

What it cannot show: real noise may have other shapes. The trials say that the verdict's error rates are as stated if a
server's starts scatter log-normally and independently; a busy neighbour that comes for one slot is not in the model.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

import numpy as np
from scipy.special import stdtrit
from scipy.stats import binomtest

from numinous_tooling.gate import provenance
from numinous_tooling.gate.client import RequestRecord
from numinous_tooling.gate.measures import METRICS, ArmRun, by_repeat, units
from numinous_tooling.gate.options import positive
from numinous_tooling.gate.verdict import ALPHA, FAMILY_ALPHA, Comparison, Noise, compare

EXPECTATION_ALPHA = 0.001
RESAMPLES = 400
# Of tables where the output is no terminal.
WIDTH = 150


@dataclass(frozen=True)
class Load:
    """Closed-loop sessions; tokens, and seconds of tool time between an answer and the next prompt."""

    sessions: int = 8
    turns: int = 3
    first_prompt: int = 2000
    later_prompt: int = 400
    """New tokens of the later prompts; the rest is served from the cache."""
    output: int = 40
    chunk: int = 10
    gap_s: float = 1.0


@dataclass(frozen=True)
class Server:
    """Service times in seconds, and standard deviations of log-normal factors on them."""

    prefill_s: float = 0.00005
    step_s: float = 0.02
    crowd: float = 0.02
    """By how much of itself a step grows with each further request in the batch."""
    start_sd: float = 0.01
    session_sd: float = 0.02
    request_sd: float = 0.05
    drift: float = 0.0
    """Growth of all times from one slot to the next (a logarithm)."""
    stall_rate: float = 0.0
    """Chance of a stall per chunk."""
    stall_s: float = 2.0


def serve(
    load: Load, server: Server, factor: float, draw: random.Random
) -> tuple[list[RequestRecord], float]:
    """Play one replay in virtual time; return its records and how long it took.

    `factor` multiplies all service times: what this server start, this slot and this arm make of them.
    """
    own = [factor * draw.lognormvariate(0.0, server.session_sd) for _ in range(load.sessions)]
    turn = [0] * load.sessions
    sent = [0.0] * load.sessions
    pace = [0.0] * load.sessions
    chunks: list[list[tuple[float, int]]] = [[] for _ in range(load.sessions)]
    records: list[RequestRecord] = []
    prefill_free_s = 0.0
    running = 0
    now_s = 0.0
    # (time, order of creation, session, what happens)
    events: list[tuple[float, int, int, str]] = [
        (session * load.gap_s / load.sessions, session, session, "send")
        for session in range(load.sessions)
    ]
    heapq.heapify(events)
    created = load.sessions
    while events:
        now_s, _, session, what = heapq.heappop(events)
        if what == "send":
            sent[session] = now_s
            chunks[session] = []
            pace[session] = own[session] * draw.lognormvariate(0.0, server.request_sd)
            fresh = load.later_prompt if turn[session] else load.first_prompt
            prefill_free_s = max(now_s, prefill_free_s) + fresh * server.prefill_s * pace[session]
            # The step that gives the first token.
            due_s, what = prefill_free_s + server.step_s * pace[session], "token"
        else:
            if what == "token":
                running += 1
            before = chunks[session][-1][1] if chunks[session] else 0
            got = min(load.output, before + (load.chunk if before else 1))
            chunks[session].append((now_s - sent[session], got))
            if got == load.output:
                running -= 1
                records.append(
                    _record(load, session, turn[session], sent[session], chunks[session])
                )
                turn[session] += 1
                if turn[session] == load.turns:
                    continue
                due_s, what = now_s + load.gap_s, "send"
            else:
                steps = min(load.chunk, load.output - got)
                due_s = now_s + steps * server.step_s * pace[session] * (
                    1 + server.crowd * (running - 1)
                )
                if server.stall_rate and draw.random() < server.stall_rate:
                    due_s += server.stall_s
                what = "chunk"
        heapq.heappush(events, (due_s, created, session, what))
        created += 1
    return records, now_s


def _record(
    load: Load, session: int, turn: int, sent_s: float, chunks: list[tuple[float, int]]
) -> RequestRecord:
    prompt = load.first_prompt + turn * load.later_prompt
    return RequestRecord(
        session=f"s{session}",
        turn=turn,
        prompt_tokens=prompt,
        expected_tokens=load.output,
        request_digest=f"{session}/{turn}",
        sent_s=sent_s,
        e2e_s=chunks[-1][0],
        got_tokens=chunks[-1][1],
        cached_tokens=prompt - load.later_prompt if turn else 0,
        chunks=tuple(chunks),
    )


def gate_run(
    order: str, arms: Mapping[str, Server], slow_b: float, load: Load, draw: random.Random
) -> list[ArmRun]:
    """Return the runs of one gate run, in virtual time."""
    seen: dict[str, int] = {}
    runs = []
    for index, arm in enumerate(order):
        seen[arm] = seen.get(arm, 0) + 1
        server = arms[arm]
        factor = draw.lognormvariate(server.drift * index, server.start_sd)
        records, wall_s = serve(load, server, factor * (slow_b if arm == "B" else 1.0), draw)
        runs.append(ArmRun(index, arm, seen[arm], records, wall_s, 0.0, 0.0))
    return runs


@dataclass(frozen=True)
class Expectation:
    """A bound on the rate of an outcome: `FAIL`, `PASS`, `INCONCLUSIVE`, or `better` (a claimed improvement)."""

    outcome: str
    bound: Literal["at most", "at least"]
    rate: float

    def __str__(self) -> str:
        sign = "≤" if self.bound == "at most" else "≥"
        return f"{self.outcome} {sign} {self.rate * 100:g}"

    def holds(self, count: int, trials: int) -> bool:
        """Return whether the count is compatible with the bound."""
        side: Literal["greater", "less"] = "greater" if self.bound == "at most" else "less"
        return bool(binomtest(count, trials, self.rate, side).pvalue >= EXPECTATION_ALPHA)


@dataclass(frozen=True)
class Case:
    """A truth, how it is measured, and what the verdicts should then be."""

    name: str
    order: str
    expectations: tuple[Expectation, ...]
    server: Server = Server()
    server_b: Server | None = None
    slow_b: float = 1.0
    tolerance: float = 0.05
    floor_sd: float | None = None
    """Scatter in a stored floor of 3 degrees of freedom; None: no floor."""
    load: Load = Load()


def _nominal() -> tuple[Expectation, ...]:
    return (
        Expectation("FAIL", "at most", FAMILY_ALPHA),
        Expectation("better", "at most", FAMILY_ALPHA),
    )


TWO, THREE, FOUR = "ABBA", "ABBAAB", "ABBAABBA"
QUIET = Server()
# Tolerance 0 puts the truth of an A/A run exactly on the limit, where the error rate is at its nominal value.
CASES: tuple[Case, ...] = (
    Case("A/A, no worsening allowed", TWO, _nominal(), tolerance=0.0),
    Case("A/A, no worsening allowed", FOUR, _nominal(), tolerance=0.0),
    Case(
        "A/A, with drift",
        TWO,
        _nominal(),
        server=replace(QUIET, drift=0.01),
        tolerance=0.0,
    ),
    Case(
        "A/A, with stalls",
        TWO,
        _nominal(),
        server=replace(QUIET, stall_rate=0.01),
        tolerance=0.0,
    ),
    Case(
        "A/A, twice the start noise, stored floor of half",
        TWO,
        _nominal(),
        server=replace(QUIET, start_sd=0.02),
        tolerance=0.0,
        floor_sd=0.01,
    ),
    Case(
        "A/A, twice the start noise, one repeat",
        "AB",
        (Expectation("INCONCLUSIVE", "at least", 1.0),),
        server=replace(QUIET, start_sd=0.02),
        tolerance=0.0,
    ),
    Case(
        "A/A, twice the start noise, one repeat, stored floor",
        "AB",
        (Expectation("INCONCLUSIVE", "at least", 1.0),),
        server=replace(QUIET, start_sd=0.02),
        tolerance=0.0,
        floor_sd=0.001,
    ),
    Case("A/A", THREE, (*_nominal(), Expectation("PASS", "at least", 0.55))),
    Case("A/A", FOUR, (*_nominal(), Expectation("PASS", "at least", 0.80))),
    Case("B 10 % slower", TWO, (Expectation("FAIL", "at least", 0.30), Expectation("PASS", "at most", ALPHA)), slow_b=1.1),
    Case("B 10 % slower", THREE, (Expectation("FAIL", "at least", 0.70), Expectation("PASS", "at most", ALPHA)), slow_b=1.1),
    Case("B 10 % slower", FOUR, (Expectation("FAIL", "at least", 0.90), Expectation("PASS", "at most", ALPHA)), slow_b=1.1),
    Case("B twice as slow, noisy", TWO, (Expectation("FAIL", "at least", 0.95),), server=replace(QUIET, start_sd=0.03), slow_b=2.0),
    Case("B 10 % faster", THREE, (Expectation("FAIL", "at most", 0.001), Expectation("better", "at least", 0.95)), slow_b=1 / 1.1),
)  # fmt: skip


def judge(case: Case, draw: random.Random) -> Comparison:
    """Play and judge one gate run of a case."""
    arms = {"A": case.server, "B": case.server_b or case.server}
    floor = None if case.floor_sd is None else {m.name: Noise(case.floor_sd, 3) for m in METRICS}
    return compare(
        gate_run(case.order, arms, case.slow_b, case.load, draw),
        "A",
        "B",
        features=(),
        tolerances=dict.fromkeys((m.name for m in METRICS), case.tolerance),
        floor=floor,
    )


@dataclass(frozen=True)
class Outcome:
    """The verdicts of all trials of one case."""

    case: Case
    trials: int
    counts: Mapping[str, int]

    def rate(self, outcome: str) -> float:
        """Return the share of trials with an outcome."""
        return self.counts[outcome] / self.trials

    @property
    def broken(self) -> list[Expectation]:
        """Return the expectations that the counts contradict."""
        return [
            e for e in self.case.expectations if not e.holds(self.counts[e.outcome], self.trials)
        ]


def run_case(case: Case, trials: int, seed: int) -> Outcome:
    """Judge a case `trials` times; the same seed gives the same counts."""
    counts = {"PASS": 0, "FAIL": 0, "INCONCLUSIVE": 0, "better": 0}
    for trial in range(trials):
        comparison = judge(case, random.Random(f"{seed}/{case.name}/{case.order}/{trial}"))
        counts[comparison.word] += 1
        counts["better"] += bool(comparison.improved)
    return Outcome(case, trials, counts)


# --- the candidates for the interval ------------------------------------------------------------------------------


Interval = Callable[[np.ndarray, np.ndarray, np.random.Generator], tuple[float, float]]
"""From log values [R, S] of both arms (repeats, sessions) to a 95 % interval of the change."""


def _around(centre: float, half: float) -> tuple[float, float]:
    return centre - half, centre + half


def _pooled(a: np.ndarray, b: np.ndarray, _draw: np.random.Generator) -> tuple[float, float]:
    repeats = len(a)
    ya, yb = a.mean(1), b.mean(1)
    sd = math.sqrt((ya.var(ddof=1) + yb.var(ddof=1)) / 2)
    half = float(stdtrit(2 * (repeats - 1), 1 - ALPHA)) * sd * math.sqrt(2 / repeats)
    return _around(float(yb.mean() - ya.mean()), half)


def _paired(a: np.ndarray, b: np.ndarray, _draw: np.random.Generator) -> tuple[float, float]:
    slots = [float(value) for value in (b - a).mean(1)]
    half = float(stdtrit(len(slots) - 1, 1 - ALPHA)) * stdev(slots) / math.sqrt(len(slots))
    return _around(fmean(slots), half)


def _quantiles(means: np.ndarray) -> tuple[float, float]:
    return float(np.quantile(means, ALPHA)), float(np.quantile(means, 1 - ALPHA))


def _sessions(a: np.ndarray, b: np.ndarray, draw: np.random.Generator) -> tuple[float, float]:
    pairs = (b - a).ravel()
    return _quantiles(pairs[draw.integers(0, len(pairs), (RESAMPLES, len(pairs)))].mean(1))


def _clusters(a: np.ndarray, b: np.ndarray, draw: np.random.Generator) -> tuple[float, float]:
    pairs = b - a
    repeats, sessions = pairs.shape
    chosen = draw.integers(0, repeats, (RESAMPLES, repeats, 1))
    inside = draw.integers(0, sessions, (RESAMPLES, repeats, sessions))
    return _quantiles(pairs[chosen, inside].mean((1, 2)))


def _widened(a: np.ndarray, b: np.ndarray, draw: np.random.Generator) -> tuple[float, float]:
    low, high = _sessions(a, b, draw)
    noise = max(float(np.abs(np.diff(arm.mean(1))).max()) for arm in (a, b))
    return low - noise, high + noise


METHODS: Mapping[str, Interval] = {
    "runs, pooled scatter, t (the gate's)": _pooled,
    "slot differences, t": _paired,
    "bootstrap of sessions": _sessions,
    "bootstrap of repeats and sessions": _clusters,
    "bootstrap of sessions, widened by the largest A/A difference": _widened,
}


REGIMES: Mapping[str, Server] = {
    "starts and sessions": QUIET,
    "starts alone": Server(start_sd=0.02, session_sd=0.001, request_sd=0.001),
}
"""What scatters: an interval has to keep its rate in either case."""


def compare_methods(trials: int, seed: int) -> list[dict[str, Any]]:
    """Return, per noise, repeats and method, how often "no change" is rejected: without one, and with 10 %."""
    rows = []
    metric = METRICS[0]
    for (noise, server), order in itertools.product(REGIMES.items(), (TWO, THREE, FOUR)):
        rates: dict[str, list[int]] = {name: [0, 0] for name in METHODS}
        for trial in range(trials):
            for column, slow in enumerate((1.0, 1.1)):
                draw = random.Random(f"{seed}/methods/{noise}/{order}/{trial}/{slow}")
                runs = gate_run(order, {"A": server, "B": server}, slow, Load(), draw)
                a, b = (
                    np.log([list(sessions.values()) for _, sessions in sorted(values.items())])
                    for arm in "AB"
                    for values in [by_repeat(units([r for r in runs if r.arm == arm], metric))]
                )
                numbers = np.random.default_rng(draw.getrandbits(32))
                for name, interval in METHODS.items():
                    low, high = interval(a, b, numbers)
                    rates[name][column] += not low <= 0 <= high
        rows += [
            {
                "noise": noise,
                "method": name,
                "repeats": len(order) // 2,
                "false_alarms": alarms / trials,
                "finds_10_percent": found / trials,
            }
            for name, (alarms, found) in rates.items()
        ]
    return rows


# --- command ------------------------------------------------------------------------------------------------------


def document_of(
    outcomes: Sequence[Outcome], methods: list[dict[str, Any]], seed: int, seconds: float
) -> dict[str, Any]:
    """Return the trials as JSON: what was played, what came out, with what code."""
    return {
        "schema": 1,
        "seed": seed,
        "cases": [
            {
                **asdict(outcome.case),
                "trials": outcome.trials,
                "counts": dict(outcome.counts),
                "holds": not outcome.broken,
            }
            for outcome in outcomes
        ],
        "methods": methods,
        "seconds": round(seconds, 1),
        "machine": provenance.machine(),
        "git": provenance.source_state(Path(__file__).parent, os.environ),
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _print(outcomes: Sequence[Outcome], methods: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    words = ("PASS", "FAIL", "INCONCLUSIVE", "better")
    table = Table(title=f"verdicts of {outcomes[0].trials} gate runs each, in virtual time, %")
    for head in ("truth", "order", "allowed", "PASS", "FAIL", "INCONCL.", "better", "expected", "holds"):  # fmt: skip
        table.add_column(head)
    for outcome in outcomes:
        case = outcome.case
        table.add_row(
            case.name,
            case.order,
            f"{case.tolerance * 100:g}",
            *(f"{outcome.rate(word) * 100:.1f}" for word in words),
            ", ".join(map(str, case.expectations)),
            "NO" if outcome.broken else "yes",
        )
    console.print(table)
    if methods:
        table = Table(title="95 % intervals that leave out 0, tok/s per user")
        for head in ("noise", "repeats", "interval", "no change", "10 % slower"):
            table.add_column(head)
        for row in methods:
            table.add_row(
                row["noise"],
                str(row["repeats"]),
                row["method"],
                f"{row['false_alarms']:.1%}",
                f"{row['finds_10_percent']:.1%}",
            )
        console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases; 0 if every expectation holds, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m numinous_tooling.gate.simulate",
        description="Try the gate's verdict on a scripted server in virtual time.",
    )
    parser.add_argument("--trials", type=positive, default=1000, help="gate runs per case (1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--methods", action="store_true", help="compare candidates for the interval"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write trials and counts there")
    options = parser.parse_args(arguments)
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: no such folder")
    start_s = time.monotonic()
    outcomes = [run_case(case, options.trials, options.seed) for case in CASES]
    methods = compare_methods(options.trials, options.seed) if options.methods else []
    seconds = time.monotonic() - start_s
    _print(outcomes, methods)
    if options.json:
        document = document_of(outcomes, methods, options.seed, seconds)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    gate_runs = options.trials * len(outcomes)
    sys.stdout.write(f"{gate_runs} gate runs judged in {seconds:.1f} s\n")
    return int(any(outcome.broken for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
