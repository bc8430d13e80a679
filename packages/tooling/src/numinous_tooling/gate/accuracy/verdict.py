# SPDX-License-Identifier: Apache-2.0
"""From measurements to a verdict.

**Rows of distributions.** The distance of arm B is the mean over positions of KL(A || B), in nats. The floor is the
same figure for A against A measured again, with other batches. The limit is the margin times max(floor, `MIN_FLOOR`).
A *yardstick* (`Rule.yardstick`) takes the floor's place where a change is known to cost something: it is the distance of A
from a cache that people serve with, FP8 say. Two distances that went through the same lists are then compared, so both are
the lower bounds: divergences between the tokens that both list and the rest as one. A ratio to a small distance says nothing of its
size, so the loss on the text may rise by `YARDSTICK_LOSS` of A's at most, in cold and in chunked prefill and behind a cached prefix. The
last is what decides where a prefill reads its own keys as they were computed: cold prefill then reads no cache, chunked prefill one for its last chunk alone.
PASS: the upper end of the interval of B's upper estimate is within the limit. FAIL: the lower end of the interval of
its lower bound is beyond. INCONCLUSIVE: neither, or too few sequences for an interval. p99, largest value, flips of the
most likely token and the loss on the text are reported beside it and decide nothing: on a given text they follow from
the same distributions with more noise.

**Loss on GSM8K solutions.** The mean of B's loss minus A's, per token, must not exceed the margin times
max(|floor|, `MIN_LOSS_FLOOR`); a gain is never a failure.

**Exact match.** FAIL if McNemar's test finds B worse at 5 %. PASS only if it had the power to see a loss of
`exact_tolerance`; without that power it is INCONCLUSIVE, says which shift it could have seen, and leaves the overall
verdict to the loss on the solutions.

**Bit-exact mode.** A row passes if every token, log-probability and list of B is A's to the last bit. Where A differs
from itself the row is INCONCLUSIVE: nothing can be claimed in that setting.

**Overall**, the first that applies: FAIL if a feature never engaged or B's answers are no numbers; INCONCLUSIVE if the
measurement is in doubt (counters in stock, a feature of which nobody knows whether it ran, a cache hit where there may be none, or none where there must be one, a
planted fault that never happened); FAIL if a row fails; INCONCLUSIVE if a deciding row is; PASS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from numinous_tooling.gate.accuracy import gsm8k
from numinous_tooling.gate.accuracy.distance import (
    MIN_SEQUENCES,
    Estimate,
    Positions,
    Scores,
    Summary,
    compare,
    first_difference,
    summarise,
)
from numinous_tooling.gate.accuracy.measure import ROWS, Measurement, Plan
from numinous_tooling.gate.verdict import Word

MIN_FLOOR = 1e-5
MIN_LOSS_FLOOR = 1e-3
YARDSTICK_LOSS = 0.005
DEFAULT_MARGIN = 3.0
DEFAULT_EXACT_TOLERANCE = 0.02


@dataclass(frozen=True)
class Rule:
    """What decides: the margin over the floor, the loss of exact match to be seen, and whether bits must agree.

    Args:
        yardstick: the floor is another arm's distance from A.
    """

    margin: float = DEFAULT_MARGIN
    exact_tolerance: float = DEFAULT_EXACT_TOLERANCE
    bit_exact: bool = False
    seed: int = 0
    yardstick: bool = False


@dataclass(frozen=True)
class RowVerdict:
    """One row: its word, why, the figure that decided with its interval, the floor's, and the limit.

    Args:
        decides: whether the overall verdict depends on it.
        unit: of figure, floor and limit.
        distance, floor_distance: all figures of a row of distributions.
    """

    row: str
    label: str
    word: Word
    reason: str
    unit: str
    figure: float | None = None
    low: float | None = None
    high: float | None = None
    floor: float | None = None
    limit: float | None = None
    decides: bool = True
    distance: Summary | None = None
    floor_distance: Summary | None = None
    exact_match: gsm8k.ExactMatch | None = None


@dataclass(frozen=True)
class Verdict:
    """The outcome of a run; `positions` holds the distances per row of B and of the floor, for plots and records."""

    word: Word
    reasons: tuple[str, ...]
    rows: tuple[RowVerdict, ...]
    positions: Mapping[str, tuple[Positions, Positions]]


def judge(
    plan: Plan,
    base: Measurement,
    again: Measurement,
    test: Measurement,
    rule: Rule,
    *,
    vocabulary: int | None,
    failures: Sequence[str],
    doubts: Sequence[str],
) -> Verdict:
    """Judge arm B (`test`) against arm A (`base`, and `again` for the floor) by the rule above."""
    rows: list[RowVerdict] = []
    positions: dict[str, tuple[Positions, Positions]] = {}
    for row, label in ROWS.items():
        if row not in base.rows or row not in test.rows:
            continue
        three = base.rows[row], again.rows[row], test.rows[row]
        if rule.bit_exact:
            rows.append(_judge_bits(plan, row, label, *three))
            continue
        floor, distance = (compare(three[0], other, vocabulary) for other in three[1:])
        if not len(floor) or not len(distance):
            continue
        positions[row] = distance, floor
        summaries = summarise(distance, rule.seed), summarise(floor, rule.seed)
        rows.append(judge_distance(row, label, *summaries, rule.margin, yardstick=rule.yardstick))
        if rule.yardstick and row in ("cold", "hit", "chunked"):
            base_loss = -float(np.mean(np.concatenate([s.logprobs for s in base.rows[row]])))
            own, least = (summary.nll_delta for summary in summaries)
            rows.append(judge_text_loss(row, label, own, least, base_loss))
        if row == "gold":
            rows.append(judge_loss(summaries[0].nll_delta, summaries[1].nll_delta, rule.margin))
    if base.right and test.right and not rule.bit_exact:
        outcome = gsm8k.exact_match(base.right, test.right)
        floor_match = gsm8k.exact_match(base.right, again.right)
        rows.append(judge_exact_match(outcome, floor_match, rule.exact_tolerance))
    cache = _cache_doubts("C" if rule.yardstick else "A again", base, again, test)
    word, reasons = _overall(rows, [*failures], [*doubts, *cache])
    return Verdict(word, reasons, tuple(rows), positions)


def judge_distance(
    row: str,
    label: str,
    distance: Summary,
    floor: Summary,
    margin: float,
    *,
    yardstick: bool = False,
) -> RowVerdict:
    """Judge a row of distributions by its mean divergence; `yardstick`: see `Rule`."""
    least = floor.kl_low if yardstick else floor.kl_high
    own = distance.kl_low if yardstick else distance.kl_high
    limit = margin * max(least.value, MIN_FLOOR)
    low, high = distance.kl_low.low, own.high
    word, reason = _word(low, high, limit, "distance")
    return RowVerdict(
        row,
        label,
        word,
        reason,
        "nats",
        own.value,
        low,
        high,
        least.value,
        limit,
        distance=distance,
        floor_distance=floor,
    )


def judge_loss(delta: Estimate, floor: Estimate, margin: float) -> RowVerdict:
    """Judge by how much the loss per token on the printed solutions grew."""
    limit = margin * max(abs(floor.value), MIN_LOSS_FLOOR)
    return _loss_row("gold_loss", "loss on GSM8K solutions", delta, floor, limit)


def judge_text_loss(
    row: str, label: str, delta: Estimate, floor: Estimate, base_loss: float
) -> RowVerdict:
    """Judge by how much the loss per token on the text grew, as a share of A's loss."""
    limit = YARDSTICK_LOSS * base_loss
    return _loss_row(f"{row}_loss", f"loss, {label}", delta, floor, limit)


def _loss_row(row: str, label: str, delta: Estimate, floor: Estimate, limit: float) -> RowVerdict:
    word, reason = _word(delta.low, delta.high, limit, "loss")
    return RowVerdict(
        row,
        label,
        word,
        reason,
        "nats/token",
        delta.value,
        delta.low,
        delta.high,
        floor.value,
        limit,
    )


def judge_exact_match(
    outcome: gsm8k.ExactMatch, floor: gsm8k.ExactMatch, tolerance: float
) -> RowVerdict:
    """Judge the share of problems answered right; the figure is B's share minus A's."""
    shift = (outcome.test_right - outcome.base_right) / outcome.problems
    tested = (
        f"{outcome.base_right} and {outcome.test_right} of {outcome.problems} right, "
        f"{outcome.only_base} only by A, {outcome.only_test} only by B, McNemar p = {outcome.p_value:.3g}; "
        f"a shift of {outcome.detectable * 100:.1f} points would be seen at {gsm8k.POWER * 100:.0f} % power"
    )
    word: Word
    if outcome.p_value < gsm8k.ALPHA and shift < 0:
        word = "FAIL"
    elif outcome.detectable <= tolerance:
        word = "PASS"
    else:
        word = "INCONCLUSIVE"
    return RowVerdict(
        "exact_match",
        "GSM8K exact match",
        word,
        tested,
        "share",
        figure=shift,
        floor=(floor.test_right - floor.base_right) / floor.problems,
        limit=-tolerance,
        decides=word == "FAIL",
        exact_match=outcome,
    )


def _word(low: float | None, high: float | None, limit: float, what: str) -> tuple[Word, str]:
    if low is None or high is None:
        return "INCONCLUSIVE", f"fewer than {MIN_SEQUENCES} sequences"
    if high <= limit:
        return "PASS", f"{what} within the limit"
    if low > limit:
        return "FAIL", f"{what} beyond the limit"
    return "INCONCLUSIVE", "the interval holds the limit; more sequences decide"


def _judge_bits(
    plan: Plan,
    row: str,
    label: str,
    base: Sequence[Scores],
    again: Sequence[Scores],
    test: Sequence[Scores],
) -> RowVerdict:
    own, other = first_difference(base, again), first_difference(base, test)
    word: Word = "PASS"
    reason = f"{sum(len(scores.tokens) for scores in base)} positions agree in every bit"
    if own is not None:
        word = "INCONCLUSIVE"
        reason = f"stock differs from itself in {plan.name(row, own.sequence)}: {own}"
    elif other is not None:
        word = "FAIL"
        reason = f"first difference in {plan.name(row, other.sequence)}: {other}"
    return RowVerdict(row, label, word, reason, "bits")


def _cache_doubts(second: str, *measurements: Measurement) -> list[str]:
    doubts = []
    for name, measured in zip(("A", second, "B"), measurements, strict=True):
        cached = {
            row: sum(scores.cached for scores in measured.rows.get(row, ()))
            for row in ("cold", "chunked")
        }
        doubts += [
            f"{name}: {count} tokens came from the cache in {ROWS[row]}"
            for row, count in cached.items()
            if count
        ]
        if not all(scores.cached for scores in measured.rows.get("hit", ())):
            doubts.append(f"{name}: no cached prefix was found in {ROWS['hit']}")
    return doubts


def _overall(
    rows: Sequence[RowVerdict], failures: list[str], doubts: list[str]
) -> tuple[Word, tuple[str, ...]]:
    deciding = [row for row in rows if row.decides]
    failed = [f"{row.label}: {row.reason}" for row in deciding if row.word == "FAIL"]
    undecided = [f"{row.label}: {row.reason}" for row in deciding if row.word == "INCONCLUSIVE"]
    if not deciding:
        doubts = [*doubts, "no row was measured"]
    steps: tuple[tuple[Word, list[str]], ...] = (
        ("FAIL", failures),
        ("INCONCLUSIVE", doubts),
        ("FAIL", failed),
        ("INCONCLUSIVE", undecided),
    )
    for word, reasons in steps:
        if reasons:
            return word, tuple(reasons)
    return "PASS", ("every row is within its limit",)
