# SPDX-License-Identifier: Apache-2.0
"""From records to a verdict.

**Units.** One value per metric, session and repeat: output tokens per second of waiting (tool gaps excluded), mean
time to first token, time per output token after the first; with limits (`--slo`) the share of requests within them.
Arms are paired by session and repeat: only sessions with a value in both count. Times and rates are compared by the
logarithm of their ratio, in which a doubling and a halving weigh the same, shares by their difference.

**Model.** All sessions of one run share a server, and what a server start does to one of them it does to all. So the
run is the statistical unit, not the session: `y[arm, repeat]` is the mean of the log values over the sessions of one
run. Its variance has a part from the server start and a part from the sessions; both are in the scatter of `y` over
the repeats of one arm, and only there. The change is the mean over repeats of `y[B] - y[A]`, its standard error
`s sqrt(2 / R)` with `s` the scatter within arms, pooled over both (`2 (R - 1)` degrees of freedom), and the interval is
Student's. Why this one of the candidates (`python -m numinous_tooling.gate.simulate --methods` repeats the
comparison): a bootstrap over sessions takes runs for independent sessions, and a bootstrap over repeats has too few of
them, so both give too many false alarms, and widening the former by the largest difference of two repeats of one arm
gives too many where server starts are all the noise, and ever fewer decisions the more repeats there are; the t
interval over the differences of the slots is exact but has half the degrees of freedom, and at two repeats twelve
standard errors decide little. The pooled interval is exact where
repeats differ only by their server start, and errs on the careful side where repeats differ together (drift, other
lengths per repeat), because that enters the scatter and not the change. What it needs: an order in which drift hits
both arms alike (A B B A), and arms whose scatter is about the same (where one scatters more, false alarms are a little
above 5 % at two repeats).

**Noise floor.** Where an A/A run of the same setting is stored (`floor`), its scatter is a lower bound: a metric
passes, fails or counts as better only if it does so by the noise of this run *and* by the floor's, each with its own
degrees of freedom; the interval shown is the wider one. A floor never makes a run decide that could not by itself.
The scatter of shares has a lower bound of its own: that of drawing so many requests at the share seen.

**Per metric.** PASS: the whole 95 % interval is at or above the largest worsening allowed (the tolerance; a share's is
absolute: 0.05 is five points). FAIL: the whole interval is below it, and so is the change at an error rate of 5 % over
*all* metrics of the comparison together (one-sided p values, Holm). *Better*: likewise above no change. INCONCLUSIVE:
anything else, fewer than `MIN_PAIRS` pairs, or one repeat, which shows no noise; with the number of further repeats
that would decide with 80 % chance if change and noise stayed as seen (an estimate from few runs, at most
`MAX_FURTHER`). PASS needs no correction for several metrics: a run fails if any metric does, so their risks add up, but
it passes only if every one does.

**Overall**, for each comparison (B against A is the verdict of the run), the first line that applies:

1. FAIL if a feature was to run in the tested arm and did not in every repeat (`engaged.proof_of`), or if the tested arm has more failed or
   short answers than the base arm, relative to its requests. This is a rule, not a test: where answers break by chance
   in either arm, it fails up to half of the runs, and the cause has to be found first.
2. INCONCLUSIVE if the measurement itself is in doubt: a failed or short answer in the base arm, feature counters in a
   stock arm, a feature of which nobody knows whether it ran, different requests, a cache that was not empty at the start, a client that lagged or was busy, prompts
   longer or shorter than planned, other programs that kept more of the machine busy during one arm than during the other.
3. FAIL if a metric fails; INCONCLUSIVE if one is inconclusive; PASS otherwise.

PASS therefore says "not worse than the tolerance"; that B is better is said only of the metrics in `improved`.
So where no metric's true change is beyond its tolerance, at most 5 % of runs fail by their metrics, and far fewer where the changes are
well inside; where any is beyond, at most 2.5 % of runs pass; where none is an improvement, at most 5 % claim one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Literal

import numpy as np
from scipy.special import stdtr, stdtrit

from numinous_tooling.gate.engaged import Proof, proof_of
from numinous_tooling.gate.measures import (
    METRICS,
    ArmRun,
    Metric,
    by_repeat,
    tpot_s,
    units,
)

Word = Literal["PASS", "FAIL", "INCONCLUSIVE"]
EXIT_CODES: Mapping[Word, int] = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 2}

FAMILY_ALPHA = 0.05
"""Error rate of FAIL, and of "better", over all metrics of a comparison."""
ALPHA = FAMILY_ALPHA / 2
"""Error rate of one metric on one side of its interval."""
CONFIDENCE = 1 - FAMILY_ALPHA
POWER = 0.80
MIN_PAIRS = 4
MAX_FURTHER = 20
# The client's p99 lag may be this share of the median time per output token, or this many seconds: docs/methodology.md
# says why.
LAG_SHARE = 0.25
LAG_FLOOR_S = 0.010


@dataclass(frozen=True)
class Noise:
    """Scatter of one run's mean, on the scale of the comparison (log or share), with its degrees of freedom."""

    sd: float
    df: int


@dataclass(frozen=True)
class Effect:
    """One metric of two arms, measured: the change on the scale of the comparison, and what it is worth."""

    change: float | None
    repeats: int
    pairs: int
    noise: tuple[Noise, ...]
    """That of this run and, where there is one, the floor's; empty with one repeat."""

    def half_width(self) -> float:
        """Return half of the 95 % interval, by the least favourable noise."""
        return max(self._error(n) * float(stdtrit(n.df, 1 - ALPHA)) for n in self.noise)

    def p_above(self, limit: float) -> float:
        """Return the one-sided p value of "the true change is at most `limit`", by the least favourable noise."""
        return max(self._p(n, limit) for n in self.noise)

    def p_below(self, limit: float) -> float:
        """Return the one-sided p value of "the true change is at least `limit`", by the least favourable noise."""
        return Effect(-(self.change or 0.0), self.repeats, self.pairs, self.noise).p_above(-limit)

    def repeats_to_decide(self, limit: float, alpha: float) -> int | None:
        """Return how many repeats in all would tell the change seen from `limit`; None: too many.

        `alpha` is the error rate of the decision, one-sided.
        """
        distance = abs((self.change or 0.0) - limit)
        for repeats in range(max(2, self.repeats + 1), self.repeats + MAX_FURTHER + 1):
            df = 2 * (repeats - 1)
            if all(
                distance
                >= noise.sd
                * math.sqrt(2 / repeats)
                * sum(
                    float(stdtrit(df if i == 0 else noise.df, level))
                    for level in (1 - alpha, POWER)
                )
                for i, noise in enumerate(self.noise)
            ):
                return repeats
        return None

    def _error(self, noise: Noise) -> float:
        return noise.sd * math.sqrt(2 / self.repeats)

    def _p(self, noise: Noise, limit: float) -> float:
        distance, error = (self.change or 0.0) - limit, self._error(noise)
        if error == 0:
            return 0.5 if distance == 0 else float(distance < 0)
        return float(stdtr(noise.df, -distance / error))


@dataclass(frozen=True)
class MetricVerdict:
    """One metric of one comparison.

    Changes, interval, noise and tolerance are relative (0.1 = 10 % more than the base arm), of a `share` metric
    absolute (0.1 = ten points more). `noise` is the scatter of one run, `floor` that of the stored A/A run.
    p values: `p_fail` and `p_better` adjusted for all metrics (Holm), `p_pass` by itself.
    """

    metric: str
    label: str
    scale: str
    higher_is_better: bool
    word: Word
    change: float | None
    low: float | None
    high: float | None
    noise: float | None
    floor: float | None
    tolerance: float
    repeats: int
    pairs: int
    p_fail: float | None
    p_pass: float | None
    p_better: float | None
    better: bool
    further_repeats: int | None
    reason: str


@dataclass(frozen=True)
class Comparison:
    """One arm against another; the run's verdict is that of B against A."""

    base: str
    test: str
    word: Word
    reasons: tuple[str, ...]
    metrics: tuple[MetricVerdict, ...]
    improved: tuple[str, ...]
    """Labels of the metrics of which "better" may be said."""


def run_means(
    metric: Metric, base: Sequence[ArmRun], test: Sequence[ArmRun]
) -> tuple[dict[int, tuple[float, float]], int]:
    """Return, per repeat, the mean over paired sessions of both arms on the scale of comparison; and the pairs in all."""
    transform = math.log if metric.scale == "ratio" else float
    ours, theirs = (by_repeat(units(runs, metric)) for runs in (base, test))
    means: dict[int, tuple[float, float]] = {}
    pairs = 0
    for repeat in sorted(ours.keys() & theirs.keys()):
        sessions = sorted(ours[repeat].keys() & theirs[repeat].keys())
        if sessions:
            pairs += len(sessions)
            means[repeat] = (
                fmean(transform(ours[repeat][s]) for s in sessions),
                fmean(transform(theirs[repeat][s]) for s in sessions),
            )
    return means, pairs


def share_sd(share: float, requests: float) -> float:
    """Return the least scatter of a share of so many requests: two added answers, one within, keep it above 0."""
    smoothed = (share * requests + 1) / (requests + 2)
    return math.sqrt(smoothed * (1 - smoothed) / requests)


def measure(
    metric: Metric, base: Sequence[ArmRun], test: Sequence[ArmRun], floor: Noise | None
) -> Effect:
    """Return the change from `base` to `test` with the noise to judge it by."""
    means, pairs = run_means(metric, base, test)
    if not means:
        return Effect(None, 0, 0, ())
    ours, theirs = zip(*means.values(), strict=True)
    change = fmean(theirs) - fmean(ours)
    if len(means) < 2:
        return Effect(change, 1, pairs, ())
    noise = [Noise(math.sqrt((variance(ours) + variance(theirs)) / 2), 2 * (len(means) - 1))]
    if floor is not None:
        noise.append(floor)
    if metric.scale == "share":
        requests = fmean(len(run.records) for run in (*base, *test))
        least = share_sd(fmean((*ours, *theirs)), requests)
        noise = [Noise(max(n.sd, least), n.df) for n in noise]
    return Effect(change, len(means), pairs, tuple(noise))


def same_arm_noise(metric: Metric, runs: Sequence[ArmRun]) -> Noise | None:
    """Return the scatter of runs that all serve the same (an A/A run); None for fewer than two."""
    ours = [run for run in runs if run.arm == "A"]
    theirs = [run for run in runs if run.arm == "B"]
    means, _ = run_means(metric, ours, theirs)
    values = [value for both in means.values() for value in both]
    return Noise(math.sqrt(variance(values)), len(values) - 1) if len(values) > 1 else None


def oriented(metric: Metric, effect: Effect, tolerance: float) -> tuple[Effect, float]:
    """Return effect and limit seen so that a positive number is an improvement."""
    if metric.scale == "share":
        limit = -tolerance
    elif metric.higher_is_better:
        limit = math.log1p(-min(tolerance, 1 - 1e-9))
    else:
        limit = -math.log1p(tolerance)
    if metric.higher_is_better or effect.change is None:
        return effect, limit
    return Effect(-effect.change, effect.repeats, effect.pairs, effect.noise), limit


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted by Holm's step-down: the chance of one false alarm among all keeps the nominal rate.

    statsmodels' `multipletests` gives the same (a test compares them), but collects garbage at every call, which
    would make a thousand trials take minutes.
    """
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def judge_metrics(
    metrics: Sequence[Metric],
    base: Sequence[ArmRun],
    test: Sequence[ArmRun],
    tolerances: Mapping[str, float],
    floor: Mapping[str, Noise],
) -> tuple[MetricVerdict, ...]:
    """Judge all metrics of a comparison by the rule in the module docstring."""
    effects = [measure(metric, base, test, floor.get(metric.name)) for metric in metrics]
    seen = [
        oriented(metric, effect, tolerances[metric.name])
        for metric, effect in zip(metrics, effects, strict=True)
    ]
    # A metric that cannot be tested keeps its place in the family, with a p value that rejects nothing.
    testable = [bool(effect.noise) and effect.pairs >= MIN_PAIRS for effect, _ in seen]
    p_fail = holm(
        [e.p_below(limit) if ok else 1.0 for (e, limit), ok in zip(seen, testable, strict=True)]
    )
    p_better = holm(
        [e.p_above(0.0) if ok else 1.0 for (e, _), ok in zip(seen, testable, strict=True)]
    )
    return tuple(
        _verdict(metric, effect, good, limit, tolerances[metric.name], (fail, better), len(seen))
        for metric, effect, (good, limit), fail, better in zip(
            metrics, effects, seen, p_fail, p_better, strict=True
        )
    )


def _verdict(
    metric: Metric,
    effect: Effect,
    good: Effect,
    limit: float,
    tolerance: float,
    p_adjusted: tuple[float, float],
    family: int,
) -> MetricVerdict:
    back = math.expm1 if metric.scale == "ratio" else float
    tested = bool(effect.noise) and effect.pairs >= MIN_PAIRS
    p_fail, p_better = p_adjusted
    p_pass = good.p_above(limit) if tested else None
    below = tested and good.p_below(limit) <= ALPHA
    further: int | None = None
    word: Word = "INCONCLUSIVE"
    if effect.pairs < MIN_PAIRS:
        reason = f"{effect.pairs} pairs, at least {MIN_PAIRS} needed"
    elif p_pass is None:
        reason = "one repeat shows no noise; use an order such as ABBA"
        further = 1
    elif p_pass <= ALPHA:
        word, reason = "PASS", "not worse than the tolerance"
    elif below and p_fail <= FAMILY_ALPHA:
        word, reason = "FAIL", "worse than the tolerance"
    else:
        fails = (good.change or 0.0) < limit
        total = good.repeats_to_decide(limit, FAMILY_ALPHA / family if fails else ALPHA)
        further = None if total is None else total - effect.repeats
        seen = "worse than the tolerance, but not by the error rate of all metrics together"
        reason = f"{seen if below else 'the interval holds the tolerance'}; " + (
            f"more than {MAX_FURTHER} further repeats would be needed"
            if further is None
            else f"about {further} further repeat{'s' * (further > 1)} would decide"
        )
    half = effect.half_width() if effect.noise else None
    change = effect.change
    interval = None if half is None or change is None else (change - half, change + half)
    return MetricVerdict(
        metric=metric.name,
        label=metric.label,
        scale=metric.scale,
        higher_is_better=metric.higher_is_better,
        word=word,
        change=None if change is None else back(change),
        low=back(interval[0]) if interval else None,
        high=back(interval[1]) if interval else None,
        noise=back(effect.noise[0].sd) if effect.noise else None,
        floor=back(effect.noise[1].sd) if len(effect.noise) > 1 else None,
        tolerance=tolerance,
        repeats=effect.repeats,
        pairs=effect.pairs,
        p_fail=p_fail if tested else None,
        p_pass=p_pass,
        p_better=p_better if tested else None,
        better=tested and good.p_above(0.0) <= ALPHA and p_better <= FAMILY_ALPHA,
        further_repeats=further,
        reason=reason,
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


def proof_of_runs(runs: Sequence[ArmRun], features: Sequence[str]) -> Proof:
    """Return what is known of the features that were to run in each of the runs."""
    proof = Proof()
    for run in runs:
        proof += proof_of(
            run.name, features, run.counters, run.counters_at_start, run.graph_batches
        )
    return proof


def uneven_load(runs: Sequence[ArmRun], max_uneven_cores: float) -> list[str]:
    """Return a line if other programs kept more cores busy during one arm's runs than during another's."""
    by_arm: dict[str, list[float]] = {}
    for run in runs:
        by_arm.setdefault(run.arm, []).append(run.other_cores)
    means = sorted((fmean(cores), arm) for arm, cores in by_arm.items())
    if not means or means[-1][0] - means[0][0] <= max_uneven_cores:
        return []
    (least, quiet), (most, busy) = means[0], means[-1]
    return [
        f"other programs kept {most:.1f} cores busy during arm {busy} and {least:.1f} during arm {quiet}; "
        "repeat on a quiet machine"
    ]


def doubts(
    runs: Sequence[ArmRun], max_lag_s: float | None, max_uneven_cores: float = math.inf
) -> list[str]:
    """Return what makes the measurement itself doubtful, one line each."""
    lines = uneven_load(runs, max_uneven_cores)
    requests: dict[tuple[int, str, int], tuple[str, str]] = {}
    for run in runs:
        counted = run.counters | run.counters_at_start
        if run.arm != "B" and counted:
            lines.append(f"{run.name} is stock but shows counters of {', '.join(sorted(counted))}")
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
    max_lag_s: float | None = None,
    max_uneven_cores: float = math.inf,
    metrics: Sequence[Metric] = METRICS,
    floor: Mapping[str, Noise] | None = None,
) -> Comparison:
    """Judge one arm against another by the rule in the module docstring.

    Args:
        runs: all runs; those of other arms are left out.
        base_arm: the letter to compare with.
        test_arm: the letter to judge.
        features: must have run in the tested arm.
        tolerances: the worsening allowed, per metric name.
        max_lag_s: replaces the limit of the client's lag that follows from the time per output token.
        max_uneven_cores: by how many cores the load of other programs may differ between the arms.
        metrics: what is judged.
        floor: noise of the stored A/A run, per metric name.
    """
    base = [run for run in runs if run.arm == base_arm]
    test = [run for run in runs if run.arm == test_arm]
    judged = judge_metrics(metrics, base, test, tolerances, floor or {})

    proof = proof_of_runs(test, features)
    failures = list(proof.failures)
    bad_base, bad_test = (sum(run.bad_answers for run in arm) for arm in (base, test))
    sent_base, sent_test = (sum(len(run.records) for run in arm) for arm in (base, test))
    # Of as many requests each: an order may give one arm more runs than the other.
    if bad_test * sent_base > bad_base * sent_test:
        failures.append(
            f"arm {test_arm} has {bad_test} failed or short answers of {sent_test}, "
            f"arm {base_arm} {bad_base} of {sent_base}"
        )
    doubtful = [*proof.doubts, *doubts([*base, *test], max_lag_s, max_uneven_cores)]
    if bad_base:
        doubtful.insert(0, f"{bad_base} failed or short answers in arm {base_arm}")
    failed = [f"{m.label}: {m.reason}" for m in judged if m.word == "FAIL"]
    open_questions = [f"{m.label}: {m.reason}" for m in judged if m.word == "INCONCLUSIVE"]
    better = tuple(m.label for m in judged if m.better)

    steps: tuple[tuple[Word, list[str]], ...] = (
        ("FAIL", failures),
        ("INCONCLUSIVE", doubtful),
        ("FAIL", failed),
        ("INCONCLUSIVE", open_questions),
        (
            "PASS",
            ["no metric is worse than its tolerance", *(f"{label} is better" for label in better)],
        ),
    )
    word, reasons = next((word, reasons) for word, reasons in steps if reasons)
    # Nothing is claimed of a run that is in doubt.
    improved = () if failures or doubtful else better
    return Comparison(base_arm, test_arm, word, tuple(reasons), judged, improved)
