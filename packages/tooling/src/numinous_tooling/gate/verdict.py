# SPDX-License-Identifier: Apache-2.0
"""From records to a verdict.

**Units.** One value per metric, session and repeat: output tokens per second of waiting (tool gaps excluded), mean
time to first token, time per output token after the first. Arms are paired by session and repeat, and compared by the
logarithm of their ratio, in which a doubling and a halving weigh the same.

**Interval.** 95 % bootstrap interval (BCa) of the mean over pairs, widened on both sides by the *noise seen*: the
largest mean difference between two repeats of the same arm, A against A and the tested arm against itself. The sessions
of one run share one server, so the bootstrap alone does not see what changes from run to run; the widening does, and
makes the rule a careful one. Without a second repeat there is no noise figure and no metric can pass or fail.

**Per metric.** PASS: the whole interval is at or above the largest worsening allowed (the tolerance). FAIL: the whole
interval is below it. INCONCLUSIVE: anything else, or fewer than `MIN_PAIRS` pairs.

**Overall**, for each comparison (B against A is the verdict of the run), the first line that applies:

1. FAIL if a feature was to run in the tested arm and did not in every repeat, or if the tested arm has more failed or
   short answers than the base arm.
2. INCONCLUSIVE if the measurement itself is in doubt: a failed or short answer in the base arm, feature counters in a
   stock arm, different requests, a cache that was not empty at the start, a client that lagged or was busy, prompts
   longer or shorter than planned.
3. FAIL if a metric fails; INCONCLUSIVE if one is inconclusive; PASS otherwise.

PASS therefore says "not worse than the tolerance", and the printed changes say whether it is better.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal

import numpy as np
from scipy import stats

from numinous_tooling.gate.client import RequestRecord

Word = Literal["PASS", "FAIL", "INCONCLUSIVE"]
EXIT_CODES: Mapping[Word, int] = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 2}

CONFIDENCE = 0.95
RESAMPLES = 9999
MIN_PAIRS = 4
# The client's p99 lag may be this share of the median time per output token, or this many seconds.
LAG_SHARE = 0.25
LAG_FLOOR_S = 0.010

Unit = tuple[str, int]  # session, repeat


@dataclass
class ArmRun:
    """One server run: all of its records, and what was observed around it. Times in seconds."""

    index: int
    arm: str
    repeat: int
    records: list[RequestRecord]
    wall_s: float
    lag_p99_s: float
    lag_max_s: float
    other_cores: float = 0.0
    """CPU cores that other programs kept busy during the replay."""
    counters: dict[str, dict[str, int]] = field(default_factory=dict)
    """Per feature: `engaged` and `refused:<reason>` counts, warm-up excluded."""
    gauges: dict[str, Any] = field(default_factory=dict)
    """What the server said of itself meanwhile (`GaugeSampler.summary`)."""
    client_cpu_share: float = 0.0
    """CPU seconds of the measuring client per second of the replay."""
    drift: float | None = None
    """The server's prompt tokens against the planned ones, relative; None where it reports none."""
    doubts: list[str] = field(default_factory=list)
    """What made this run doubtful while it ran, one line each."""

    @property
    def name(self) -> str:
        """Return for example `A2`: the second run of arm A."""
        return f"{self.arm}{self.repeat}"

    @property
    def bad_answers(self) -> int:
        """Return the number of failed and of short answers."""
        return sum(1 for record in self.records if record.error or record.short)


@dataclass(frozen=True)
class Metric:
    """A judged quantity: how to get it from the records of one session in one repeat."""

    name: str
    label: str
    unit: str
    higher_is_better: bool
    value: Callable[[Sequence[RequestRecord]], float | None]


@dataclass(frozen=True)
class MetricVerdict:
    """One metric of one comparison; changes are relative (0.1 = 10 % more than the base arm)."""

    metric: str
    label: str
    word: Word
    change: float | None
    low: float | None
    high: float | None
    noise: float | None
    tolerance: float
    pairs: int
    reason: str


@dataclass(frozen=True)
class Comparison:
    """One arm against another; the run's verdict is that of B against A."""

    base: str
    test: str
    word: Word
    reasons: tuple[str, ...]
    metrics: tuple[MetricVerdict, ...]


def tokens_per_s(records: Sequence[RequestRecord]) -> float | None:
    """Return output tokens per second of waiting for them."""
    waited_s = sum(record.e2e_s for record in records)
    tokens = sum(record.got_tokens for record in records)
    return tokens / waited_s if tokens and waited_s > 0 else None


def mean_ttft_s(records: Sequence[RequestRecord]) -> float | None:
    """Return the mean time to first token in seconds."""
    times = [record.ttft_s for record in records if record.ttft_s is not None]
    return fmean(times) if times else None


def tpot_s(records: Sequence[RequestRecord]) -> float | None:
    """Return seconds per output token after the first chunk, over all answers of more than one chunk."""
    spans = [
        (r.chunks[-1][0] - r.chunks[0][0], r.chunks[-1][1] - r.chunks[0][1])
        for r in records
        if len(r.chunks) > 1
    ]
    tokens = sum(count for _, count in spans)
    seconds = sum(span for span, _ in spans)
    return seconds / tokens if tokens and seconds > 0 else None


METRICS: tuple[Metric, ...] = (
    Metric("tok_s_user", "output tok/s per user", "tok/s", True, tokens_per_s),
    Metric("ttft", "time to first token", "s", False, mean_ttft_s),
    Metric("tpot", "time per output token", "s", False, tpot_s),
)


def units(runs: Sequence[ArmRun], metric: Metric) -> dict[Unit, float]:
    """Return the metric per session and repeat; sessions without a value are left out."""
    values: dict[Unit, float] = {}
    for run in runs:
        by_session: dict[str, list[RequestRecord]] = {}
        for record in run.records:
            by_session.setdefault(record.session, []).append(record)
        for session, records in by_session.items():
            value = metric.value(records)
            if value is not None:
                values[session, run.repeat] = value
    return values


def log_ratios(base: Mapping[Unit, float], test: Mapping[Unit, float]) -> list[float]:
    """Return log(test / base) of each unit that both have."""
    return [math.log(test[unit] / base[unit]) for unit in sorted(base.keys() & test.keys())]


def same_arm_difference(values: Mapping[Unit, float]) -> float | None:
    """Return the largest mean log ratio, as a magnitude, between neighbouring repeats of one arm; None for one."""
    repeats = sorted({repeat for _, repeat in values})
    largest: float | None = None
    for first, second in pairwise(repeats):
        ratios = [
            math.log(values[session, second] / values[session, first])
            for session, repeat in values
            if repeat == first and (session, second) in values
        ]
        if ratios:
            largest = max(largest or 0.0, abs(fmean(ratios)))
    return largest


def bootstrap_interval(ratios: Sequence[float], seed: int) -> tuple[float, float]:
    """Return the bootstrap interval of the mean."""
    sample = np.asarray(ratios)
    spread = float(sample.min()), float(sample.max())
    if np.ptp(sample) < 1e-12:  # BCa is undefined without spread
        return spread
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        result = stats.bootstrap(
            (sample,),
            np.mean,
            n_resamples=RESAMPLES,
            confidence_level=CONFIDENCE,
            method="BCa",
            rng=np.random.default_rng(seed),
        )
    interval = float(result.confidence_interval.low), float(result.confidence_interval.high)
    # Undefined too where all but one pair agree; the sample's own range is then the careful answer.
    return interval if all(map(math.isfinite, interval)) else spread


def judge_metric(
    metric: Metric, base: Sequence[ArmRun], test: Sequence[ArmRun], tolerance: float, seed: int
) -> MetricVerdict:
    """Judge one metric by the rule in the module docstring; `tolerance` is the relative worsening allowed."""
    base_values, test_values = units(base, metric), units(test, metric)
    ratios = log_ratios(base_values, test_values)
    own = same_arm_difference(base_values), same_arm_difference(test_values)
    noise = None if own[0] is None else max(own[0], own[1] or 0.0)

    def answer(
        word: Word, reason: str, interval: tuple[float, float] | None = None
    ) -> MetricVerdict:
        return MetricVerdict(
            metric=metric.name,
            label=metric.label,
            word=word,
            change=math.expm1(fmean(ratios)) if ratios else None,
            low=math.expm1(interval[0]) if interval else None,
            high=math.expm1(interval[1]) if interval else None,
            noise=None if noise is None else math.expm1(noise),
            tolerance=tolerance,
            pairs=len(ratios),
            reason=reason,
        )

    if len(ratios) < MIN_PAIRS:
        return answer("INCONCLUSIVE", f"{len(ratios)} pairs, at least {MIN_PAIRS} needed")
    low, high = bootstrap_interval(ratios, seed)
    if noise is None:
        return answer(
            "INCONCLUSIVE",
            "one repeat of arm A shows no noise; use an order such as ABBA",
            (low, high),
        )
    low, high = low - noise, high + noise
    # Seen so that a positive number is an improvement.
    if metric.higher_is_better:
        worst, best, limit = low, high, math.log1p(-min(tolerance, 1 - 1e-9))
    else:
        worst, best, limit = -high, -low, -math.log1p(tolerance)
    if worst >= limit:
        return answer("PASS", "not worse than the tolerance", (low, high))
    if best < limit:
        return answer("FAIL", "worse than the tolerance", (low, high))
    return answer(
        "INCONCLUSIVE",
        "the interval holds the tolerance; more sessions, turns or repeats decide",
        (low, high),
    )


def lag_limit_s(run: ArmRun) -> float:
    """Return the client lag (p99, seconds) that a run may show."""
    times = [value for record in run.records if (value := tpot_s([record])) is not None]
    return max(LAG_FLOOR_S, LAG_SHARE * float(np.median(times)) if times else 0.0)


def cache_leftover(run: ArmRun) -> int:
    """Return how many cached tokens the very first prompt found; anything above 0 was there before the run.

    The server may take up requests that were sent together in another order, and the later ones find the shared
    prefix of the first; so the least of those that were sent before the first token came is the one that counts.
    """
    if not run.records:
        return 0
    first = min(run.records, key=lambda record: record.sent_s)
    until_s = first.sent_s + (first.e2e_s if first.ttft_s is None else first.ttft_s)
    return min(record.cached_tokens or 0 for record in run.records if record.sent_s <= until_s)


def never_engaged(runs: Sequence[ArmRun], features: Sequence[str]) -> list[str]:
    """Return one line per run and feature that was to run and did not."""
    lines = []
    for run in runs:
        for feature in features:
            counts = run.counters.get(feature, {})
            if counts.get("engaged", 0) <= 0:
                refused = ", ".join(
                    f"{key} {count}" for key, count in sorted(counts.items()) if key != "engaged"
                )
                lines.append(f"{run.name}: {feature} never ran ({refused or 'no counters'})")
    return lines


def doubts(runs: Sequence[ArmRun], max_lag_s: float | None) -> list[str]:
    """Return what makes the measurement itself doubtful, one line each."""
    lines = []
    requests: dict[tuple[int, str, int], tuple[str, str]] = {}
    for run in runs:
        if run.arm != "B" and run.counters:
            lines.append(
                f"{run.name} is stock but shows counters of {', '.join(sorted(run.counters))}"
            )
        leftover = cache_leftover(run)
        if leftover:
            lines.append(
                f"{run.name}: the cache was not empty, the first requests found {leftover} tokens in it"
            )
        limit_s = lag_limit_s(run) if max_lag_s is None else max_lag_s
        if run.lag_p99_s > limit_s:
            lines.append(
                f"{run.name}: the client lagged, p99 {run.lag_p99_s * 1e3:.1f} ms over {limit_s * 1e3:.1f} ms"
            )
        lines += [f"{run.name}: {doubt}" for doubt in run.doubts]
        for record in run.records:
            key = run.repeat, record.session, record.turn
            other, name = requests.setdefault(key, (record.request_digest, run.name))
            if other != record.request_digest:
                lines.append(
                    f"{run.name} and {name} sent different requests ({record.session} turn {record.turn})"
                )
    return lines


def compare(
    runs: Sequence[ArmRun],
    base_arm: str,
    test_arm: str,
    *,
    features: Sequence[str],
    tolerances: Mapping[str, float],
    seed: int,
    max_lag_s: float | None = None,
) -> Comparison:
    """Judge one arm against another by the rule in the module docstring.

    `features` must have run in the tested arm; `tolerances` gives the worsening allowed per metric name; `max_lag_s`
    replaces the limit that follows from the time per output token.
    """
    base = [run for run in runs if run.arm == base_arm]
    test = [run for run in runs if run.arm == test_arm]
    metrics = tuple(
        judge_metric(metric, base, test, tolerances[metric.name], seed) for metric in METRICS
    )

    failures = never_engaged(test, features)
    bad_base, bad_test = (sum(run.bad_answers for run in arm) for arm in (base, test))
    if bad_test > bad_base:
        failures.append(
            f"arm {test_arm} has {bad_test} failed or short answers, arm {base_arm} {bad_base}"
        )
    doubtful = doubts([*base, *test], max_lag_s)
    if bad_base:
        doubtful.insert(0, f"{bad_base} failed or short answers in arm {base_arm}")
    failed = [f"{m.label}: {m.reason}" for m in metrics if m.word == "FAIL"]
    open_questions = [f"{m.label}: {m.reason}" for m in metrics if m.word == "INCONCLUSIVE"]

    steps: tuple[tuple[Word, list[str]], ...] = (
        ("FAIL", failures),
        ("INCONCLUSIVE", doubtful),
        ("FAIL", failed),
        ("INCONCLUSIVE", open_questions),
    )
    for word, reasons in steps:
        if reasons:
            return Comparison(base_arm, test_arm, word, tuple(reasons), metrics)
    return Comparison(
        base_arm, test_arm, "PASS", ("no metric is worse than its tolerance",), metrics
    )


def percentiles(values: Sequence[float], points: Sequence[int]) -> dict[str, float | None]:
    """Return named percentiles, None each where there are no values."""
    if not values:
        return {f"p{point}": None for point in points}
    return {f"p{point}": float(np.percentile(np.asarray(values), point)) for point in points}


def summarise_run(runs: Sequence[ArmRun]) -> dict[str, Any]:
    """Return the printed figures of one run, or of several pooled."""
    records = [record for run in runs for record in run.records]
    wall_s = sum(run.wall_s for run in runs)
    output = sum(record.got_tokens for record in records)
    prompt = sum(record.prompt_tokens for record in records)
    cached = sum(record.cached_tokens or 0 for record in records)
    per_user = list(units(runs, METRICS[0]).values())
    return {
        "requests": len(records),
        "output_tok_s": output / wall_s if wall_s else None,
        "total_tok_s": (output + prompt) / wall_s if wall_s else None,
        "tok_s_user": percentiles(per_user, (10, 50, 90)),
        "ttft_s": percentiles([r.ttft_s for r in records if r.ttft_s is not None], (50, 90)),
        "tpot_s": percentiles([v for r in records if (v := tpot_s([r])) is not None], (50, 90)),
        "e2e_s": percentiles([r.e2e_s for r in records if r.error is None], (50, 90)),
        "cache_hit_rate": cached / prompt if prompt else None,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "errors": sum(1 for r in records if r.error),
        "short_answers": sum(1 for r in records if r.short),
    }


def summarise(runs: Sequence[ArmRun], arm: str) -> dict[str, Any]:
    """Return an arm's pooled figures, the same for each repeat (the spread), and its counters summed."""
    own = [run for run in runs if run.arm == arm]
    counters: dict[str, dict[str, int]] = {}
    for run in own:
        for feature, counts in run.counters.items():
            total = counters.setdefault(feature, {})
            for key, count in counts.items():
                total[key] = total.get(key, 0) + count
    return {
        "pooled": summarise_run(own),
        "repeats": [summarise_run([run]) for run in own],
        "counters": counters,
    }
