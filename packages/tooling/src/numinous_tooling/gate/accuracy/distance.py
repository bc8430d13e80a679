# SPDX-License-Identifier: Apache-2.0
"""Distances between two arms' next-token distributions: arrays in, figures with intervals out; no I/O.

**What the API gives.** At each position the `k` largest log-probabilities with their token ids, and the
log-probability of the token that follows in the text. With `k` equal to the vocabulary the KL divergence is exact.
Else both distributions are coarsened to the tokens that both arms list, and the rest: merging outcomes never raises a
KL divergence, so `kl_low` is a **lower bound** of the full one. The rest is one bucket, or two where a list has tokens
that the other has not. Such tokens are no likelier there than the least listed one, and share what that list leaves:
that bounds their bucket's mass in that arm, and the divergence is taken at the mass within the bound at which it is
least. `kl_high` adds the rest's mass in the base arm times the largest change of a log-probability seen at that
position, the rest's own among them: an upper bound *if* no token that an arm leaves unlisted changed by more than that.
A FAIL is decided by the lower bound, a PASS by the upper.

**Rounding.** The engine's probabilities are fp32: the mass of the rest is 1 minus a sum and wrong by about 1e-7. It is
taken as at least `REST_FLOOR`. Under a logarithm that is not enough: where one arm has much mass in the rest and the
other none, the error of the little decides. The lower bound therefore takes the test arm's rest greater by
`MASS_ERROR`, which costs it no more than that in nats where the arms agree. Negative divergences are set to 0.

**Intervals** are bootstrapped by sequence, because positions of one sequence share their context and are not
independent. With few sequences such an interval is too narrow; it is never computed from fewer than `MIN_SEQUENCES`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 1999
MIN_SEQUENCES = 4
REST_FLOOR = 1e-9
MASS_ERROR = 5e-7

# Arrays of float64, int64 and bool.
Floats = Any
Ints = Any
Bools = Any
Interval = tuple[float, float]


@dataclass(frozen=True)
class Scores:
    """What an arm said about `n` positions of one sequence.

    Args:
        tokens: `[n]`, the token that follows at each position.
        logprobs: `[n]`, its log-probability in nats.
        top_ids: `[n, k]`, the most likely tokens, most likely first.
        top_logprobs: `[n, k]`, their log-probabilities.
        cached: prompt tokens that came from the prefix cache.
    """

    tokens: Ints
    logprobs: Floats
    top_ids: Ints
    top_logprobs: Floats
    cached: int = 0

    def head(self, count: int) -> Scores:
        """Return the first `count` positions."""
        return Scores(
            self.tokens[:count],
            self.logprobs[:count],
            self.top_ids[:count],
            self.top_logprobs[:count],
            self.cached,
        )

    def where(self, mask: Bools) -> Scores:
        """Return the positions of a mask."""
        return Scores(
            self.tokens[mask],
            self.logprobs[mask],
            self.top_ids[mask],
            self.top_logprobs[mask],
            self.cached,
        )


@dataclass(frozen=True)
class Positions:
    """Distances per position, positions of all sequences in one array each.

    Args:
        kl_low: lower bound of KL(base || test) in nats.
        kl_high: its upper estimate.
        flips: whether the most likely token differs.
        nll_delta: loss of the test arm minus that of the base arm on the token that follows, nats.
        sequence: which sequence a position belongs to.
        exact: whether the vocabulary was complete, so that both bounds are the divergence itself.
    """

    kl_low: Floats
    kl_high: Floats
    flips: Bools
    nll_delta: Floats
    sequence: Ints
    exact: bool

    def __len__(self) -> int:
        return len(self.kl_low)

    @property
    def sequences(self) -> int:
        """Return how many sequences have positions."""
        return len(np.unique(self.sequence))


@dataclass(frozen=True)
class Estimate:
    """A figure with its bootstrap interval; no interval where there are too few sequences."""

    value: float
    low: float | None
    high: float | None

    def __format__(self, form: str) -> str:
        """``value [low, high]``, each number in this format."""
        value = format(self.value, form)
        if self.low is None or self.high is None:
            return value
        return f"{value} [{self.low:{form}}, {self.high:{form}}]"


@dataclass(frozen=True)
class Summary:
    """Distances of one row: divergences and losses in nats, flips as a share of positions."""

    kl_low: Estimate
    kl_high: Estimate
    kl_p99: Estimate
    kl_max: float
    flips: Estimate
    nll_delta: Estimate
    positions: int
    sequences: int
    exact: bool


def kl_bounds(
    base_ids: Ints, base: Floats, test_ids: Ints, test: Floats, vocabulary: int | None
) -> Interval:
    """Return lower bound and upper estimate of KL(base || test) at one position, in nats.

    Args:
        base_ids: `[k]` token ids of the base arm, `base` their log-probabilities; likewise for the test arm.
        vocabulary: number of tokens, where it is known; lists of that length are complete.
    """
    _, in_base, in_test = np.intersect1d(
        base_ids, test_ids, assume_unique=True, return_indices=True
    )
    p_log, q_log = base[in_base], test[in_test]
    if vocabulary is not None and len(in_base) == vocabulary:
        # Sums of fp32 probabilities are not exactly 1, which would leave a term of first order.
        p_log = p_log - np.log(np.exp(p_log).sum())
        q_log = q_log - np.log(np.exp(q_log).sum())
        exact = max(0.0, float(np.sum(np.exp(p_log) * (p_log - q_log))))
        return exact, exact
    rest_p = max(REST_FLOOR, 1.0 - float(np.exp(p_log).sum()))
    rest_q = max(REST_FLOOR, 1.0 - float(np.exp(q_log).sum()))
    change = p_log - q_log
    rest_change = float(np.log(rest_p / rest_q))
    listed = float(np.sum(np.exp(p_log) * change))
    only_base, only_test = np.delete(base, in_base), np.delete(test, in_test)
    rest = max(
        _less(rest_p, rest_q),
        _rest_low(rest_p, rest_q, only_base, test[-1], only_test, known_in_base=True),
        _rest_low(rest_p, rest_q, only_test, base[-1], only_base, known_in_base=False),
    )
    low = max(0.0, listed + rest)
    # A token that only one arm lists has changed at least down to the other's least likely listed one.
    dropped = only_base - test.min(initial=0.0)
    gained = only_test - base.min(initial=0.0)
    changes = np.concatenate([np.abs(change), [abs(rest_change)], dropped, gained])
    largest = float(changes.max())
    return low, max(low, listed + rest_p * largest)


def _rest_low(
    rest_p: float,
    rest_q: float,
    only: Floats,
    least: float,
    other_only: Floats,
    *,
    known_in_base: bool,
) -> float:
    """Return a lower bound of what the rest adds, from tokens that one arm alone lists, in nats.

    Args:
        rest_p, rest_q: mass of the rest in the base and in the test arm.
        only: log-probabilities of those tokens in the arm that lists them.
        least: the other arm's least likely listed log-probability; none of them lies above it there.
        other_only: what the other arm alone lists; none of them is among those.
    """
    whole, other_whole = (rest_p, rest_q) if known_in_base else (rest_q, rest_p)
    known = min(float(np.exp(only).sum()), whole)
    if known <= REST_FLOOR:
        return _less(rest_p, rest_q)
    # The divergence of the two buckets is convex in the unknown mass, and least where their shares are alike.
    unknown = min(
        len(only) * float(np.exp(least)),
        max(0.0, other_whole - float(np.exp(other_only).sum())) + MASS_ERROR,
        known * other_whole / whole,
    )
    inside, outside = max(unknown, REST_FLOOR), max(other_whole - unknown, REST_FLOOR)
    known_outside = max(whole - known, REST_FLOOR)
    if known_in_base:
        return _less(known, inside) + _less(known_outside, outside)
    return _less(inside, known) + _less(outside, known_outside)


def _less(p: float, q: float) -> float:
    """Return what a bucket of masses `p` and `q` adds to a divergence, rounded down."""
    return p * float(np.log(p / (q + MASS_ERROR)))


def compare(
    base: Sequence[Scores], test: Sequence[Scores], vocabulary: int | None = None
) -> Positions:
    """Return the distances of all positions of paired sequences.

    Where the arms' tokens part, as they may in generated text, the sequence ends with the position at which they do:
    there both still saw the same tokens.
    """
    low: list[float] = []
    high: list[float] = []
    flips: list[bool] = []
    delta: list[float] = []
    sequence: list[int] = []
    complete = True
    for index, pair in enumerate(zip(base, test, strict=True)):
        count = common_positions(*pair)
        one, two = (scores.head(count) for scores in pair)
        complete &= vocabulary is not None and one.top_ids.shape[1] == vocabulary
        for at in range(count):
            bounds = kl_bounds(
                one.top_ids[at],
                one.top_logprobs[at],
                two.top_ids[at],
                two.top_logprobs[at],
                vocabulary,
            )
            low.append(bounds[0])
            high.append(bounds[1])
            flips.append(bool(one.top_ids[at, 0] != two.top_ids[at, 0]))
            # Where the arms chose different tokens there is no one token to compare the loss of.
            same = one.tokens[at] == two.tokens[at]
            delta.append(float(one.logprobs[at] - two.logprobs[at]) if same else 0.0)
            sequence.append(index)
    return Positions(
        np.asarray(low, np.float64),
        np.asarray(high, np.float64),
        np.asarray(flips, np.bool_),
        np.asarray(delta, np.float64),
        np.asarray(sequence, np.int64),
        complete and bool(low),
    )


def common_positions(base: Scores, test: Scores) -> int:
    """Return how many positions were reached over the same tokens, the one at which they part included."""
    shorter = min(len(base.tokens), len(test.tokens))
    parted = np.flatnonzero(base.tokens[:shorter] != test.tokens[:shorter])
    return int(parted[0]) + 1 if len(parted) else shorter


def summarise(positions: Positions, seed: int) -> Summary:
    """Return the figures of a row, each with its interval."""

    def mean(values: Floats | Bools) -> Estimate:
        return mean_by_sequence(values.astype(np.float64), positions.sequence, seed)

    return Summary(
        kl_low=mean(positions.kl_low),
        kl_high=mean(positions.kl_high),
        kl_p99=_percentile_by_sequence(positions.kl_high, positions.sequence, 99, seed),
        kl_max=float(positions.kl_high.max()),
        flips=mean(positions.flips),
        nll_delta=mean(positions.nll_delta),
        positions=len(positions),
        sequences=positions.sequences,
        exact=positions.exact,
    )


def mean_by_sequence(values: Floats, sequence: Ints, seed: int) -> Estimate:
    """Return the mean over positions, with the interval from resampled sequences (BCa)."""
    groups, index = np.unique(sequence, return_inverse=True)
    sums = np.bincount(index, weights=values)
    counts = np.bincount(index).astype(np.float64)
    value = float(values.mean())
    if len(groups) < MIN_SEQUENCES:
        return Estimate(value, None, None)
    means = sums / counts
    spread = float(means.min()), float(means.max())
    if spread[1] - spread[0] <= 1e-12 * max(1.0, abs(spread[1])):  # BCa is undefined without spread
        return Estimate(value, *spread)

    interval = _quotient_interval(sums, counts, seed)
    return Estimate(value, *(interval or spread))


def ratio_by_sequence(ours: Floats, theirs: Floats, seed: int) -> Estimate:
    """Return the sum of one figure over the sum of another, a value of each per sequence, with the interval from resampled
    sequences, the same ones for both (BCa); none where `theirs` sums to 0 in total or in too many resamples."""
    value = float(ours.sum() / theirs.sum()) if theirs.sum() else math.nan
    if len(ours) < MIN_SEQUENCES or not theirs.sum():
        return Estimate(value, None, None)
    if np.array_equal(ours, theirs) or not ours.any():  # BCa is undefined without spread
        return Estimate(value, value, value)
    return Estimate(value, *(_quotient_interval(ours, theirs, seed) or (None, None)))


def _quotient_interval(one: Floats, two: Floats, seed: int) -> Interval | None:
    """Return the interval of sum(one) / sum(two) over resampled pairs; None where it is not finite."""

    def quotient(a: Floats, b: Floats, axis: int = -1) -> Floats:
        result: Floats = a.sum(axis=axis) / b.sum(axis=axis)
        return result

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # degenerate resamples; their interval is not finite
        interval = stats.bootstrap(
            (one, two),
            quotient,
            paired=True,
            n_resamples=RESAMPLES,
            confidence_level=CONFIDENCE,
            method="BCa",
            rng=np.random.default_rng(seed),
        ).confidence_interval
    low, high = float(interval.low), float(interval.high)
    return (low, high) if math.isfinite(low + high) else None


def _percentile_by_sequence(values: Floats, sequence: Ints, point: float, seed: int) -> Estimate:
    """Return a percentile over positions, with the percentile interval from resampled sequences."""
    value = float(np.percentile(values, point))
    groups, index = np.unique(sequence, return_inverse=True)
    if len(groups) < MIN_SEQUENCES:
        return Estimate(value, None, None)
    generator = np.random.default_rng(seed)
    order = np.argsort(values)
    ranked, owner = values[order], index[order]
    drawn = []
    for chosen in generator.integers(len(groups), size=(RESAMPLES // 4, len(groups))):
        # How often a value is in the resample: as often as its sequence.
        passed = np.cumsum(np.bincount(chosen, minlength=len(groups))[owner])
        drawn.append(ranked[np.searchsorted(passed, point / 100 * passed[-1])])
    tail = 50 * (1 - CONFIDENCE)
    low, high = (float(np.percentile(drawn, at)) for at in (tail, 100 - tail))
    return Estimate(value, low, high)


@dataclass(frozen=True)
class Difference:
    """The first place at which two arms are not bit-identical."""

    sequence: int
    position: int
    base: str
    test: str

    def __str__(self) -> str:
        return (
            f"sequence {self.sequence}, position {self.position}: {self.base} against {self.test}"
        )


def first_difference(base: Sequence[Scores], test: Sequence[Scores]) -> Difference | None:
    """Return the first position whose token, log-probability or list differs in any bit; None where all agree."""
    for index, (one, two) in enumerate(zip(base, test, strict=True)):
        for at in range(max(len(one.tokens), len(two.tokens))):
            texts = _described(one, at), _described(two, at)
            if at < min(len(one.tokens), len(two.tokens)):
                same = (
                    one.tokens[at] == two.tokens[at]
                    and one.logprobs[at] == two.logprobs[at]
                    and np.array_equal(one.top_ids[at], two.top_ids[at])
                    and np.array_equal(one.top_logprobs[at], two.top_logprobs[at])
                )
                if same:
                    continue
            if texts[0] == texts[1]:
                rank = _first_rank(one, two, at)
                texts = _listed(one, at, rank), _listed(two, at, rank)
            return Difference(index, at, *texts)
    return None


def _first_rank(one: Scores, two: Scores, at: int) -> int:
    differs = (one.top_ids[at] != two.top_ids[at]) | (one.top_logprobs[at] != two.top_logprobs[at])
    return int(np.flatnonzero(differs)[0])


def _described(scores: Scores, at: int) -> str:
    if at >= len(scores.tokens):
        return "no token"
    return f"token {scores.tokens[at]} at {float(scores.logprobs[at])!r}"


def _listed(scores: Scores, at: int, rank: int) -> str:
    return (
        f"rank {rank} token {scores.top_ids[at, rank]} at {float(scores.top_logprobs[at, rank])!r}"
    )
