# SPDX-License-Identifier: Apache-2.0
"""Divergences, their bounds and intervals, against scipy and against arrays with known answers."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("scipy")
pytest.importorskip("statsmodels")

from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats
from scipy.special import log_softmax

from numinous_tooling.gate.accuracy.distance import (
    MIN_SEQUENCES,
    Estimate,
    Scores,
    compare,
    first_difference,
    kl_bounds,
    mean_by_sequence,
    ratio_by_sequence,
    summarise,
)

VOCABULARY = 40
LOGITS = arrays(np.float64, VOCABULARY, elements=st.floats(-8, 8, width=32))
# What fp32 probabilities and REST_FLOOR may cost; far below the least limit of the gate, 1e-5.
ROUNDING = 1e-6


def listed(logits, k=VOCABULARY):
    """The k most likely tokens with their fp32 log-probabilities, as an engine answers them."""
    logprobs = log_softmax(logits).astype(np.float32).astype(np.float64)
    ids = np.argsort(-logprobs, kind="stable")[:k]
    return ids, logprobs[ids]


def scores(rows, tokens=None, k=VOCABULARY, cached=0):
    pairs = [listed(row, k) for row in rows]
    tokens = np.zeros(len(rows), np.int64) if tokens is None else np.asarray(tokens)
    logprobs = np.asarray([log_softmax(row)[t] for row, t in zip(rows, tokens, strict=True)])
    return Scores(
        tokens,
        logprobs,
        np.stack([ids for ids, _ in pairs]),
        np.stack([values for _, values in pairs]),
        cached,
    )


@given(LOGITS, LOGITS)
def test_full_vocabulary_is_scipys_entropy(a, b):
    expected = stats.entropy(np.exp(log_softmax(a)), np.exp(log_softmax(b)))
    low, high = kl_bounds(*listed(a), *listed(b), VOCABULARY)
    assert low == high == pytest.approx(expected, rel=1e-4, abs=ROUNDING)


@given(LOGITS, LOGITS, st.integers(1, VOCABULARY - 1))
@example(np.zeros(VOCABULARY), np.where(np.arange(VOCABULARY) < 2, 0.0, -7.9609375), 2)
@settings(max_examples=300)
def test_top_k_bounds_from_below_and_never_negative(a, b, k):
    full = stats.entropy(np.exp(log_softmax(a)), np.exp(log_softmax(b)))
    low, high = kl_bounds(*listed(a, k), *listed(b, k), VOCABULARY)
    assert 0 <= low <= full + ROUNDING
    assert high >= low


@given(LOGITS, st.integers(1, VOCABULARY))
def test_equal_distributions_have_no_distance(a, k):
    low, high = kl_bounds(*listed(a, k), *listed(a, k), VOCABULARY)
    assert low == 0
    assert high <= ROUNDING


def test_upper_estimate_holds_where_unlisted_tokens_change_no_more_than_listed_ones():
    generator = np.random.default_rng(11)
    met = 0
    for _ in range(400):
        a = generator.normal(0, 2, VOCABULARY)
        b = a + generator.normal(0, 0.3, VOCABULARY)
        one, two = listed(a, 8), listed(b, 8)
        change = np.abs(log_softmax(a) - log_softmax(b))
        both = np.intersect1d(one[0], two[0])
        if change.max() > change[both].max():
            continue  # the assumption of the estimate
        met += 1
        full = stats.entropy(np.exp(log_softmax(a)), np.exp(log_softmax(b)))
        assert kl_bounds(*one, *two, VOCABULARY)[1] >= full - ROUNDING
    assert met >= 20


def test_positions_after_the_tokens_part_are_left_out():
    rows = np.random.default_rng(0).normal(size=(5, VOCABULARY))
    base, test = scores(rows, [3, 4, 5, 6, 7]), scores(rows, [3, 4, 9, 6, 7])
    positions = compare([base], [test], VOCABULARY)
    assert len(positions) == 3
    assert positions.exact
    assert positions.nll_delta[2] == 0  # different tokens have no common loss
    assert len(compare([base], [scores(rows[:4], [3, 4, 5, 6])], VOCABULARY)) == 4


def test_flips_and_losses():
    rows = np.zeros((2, VOCABULARY))
    rows[:, 1] = 2.0
    worse = rows.copy()
    worse[1, 2] = 5.0
    positions = compare([scores(rows, [1, 1])], [scores(worse, [1, 1])], VOCABULARY)
    assert positions.flips.tolist() == [False, True]
    expected = log_softmax(rows[1])[1] - log_softmax(worse[1])[1]
    assert positions.nll_delta.tolist() == pytest.approx([0, expected])
    assert positions.nll_delta[1] > 0


def test_the_interval_covers_the_mean_of_dependent_positions():
    """Positions of a sequence share most of their noise: resampling positions would be far too sure of itself."""
    generator = np.random.default_rng(5)
    sequences, length, trials, hits = 20, 30, 60, 0
    sequence = np.repeat(np.arange(sequences), length)
    for _ in range(trials):
        shared = generator.normal(size=sequences)[sequence]
        values = 1.0 + shared + 0.1 * generator.normal(size=len(sequence))
        estimate = mean_by_sequence(values, sequence, seed=1)
        hits += estimate.low <= 1.0 <= estimate.high
    assert hits / trials >= 0.85


def test_too_few_sequences_have_no_interval():
    count = MIN_SEQUENCES - 1
    rows = np.random.default_rng(0).normal(size=(4, VOCABULARY))
    summary = summarise(compare([scores(rows)] * count, [scores(rows + 1)] * count, None), seed=0)
    assert summary.kl_low.low is None
    assert summary.kl_p99.high is None
    assert not summary.exact


def test_ratios_and_their_text():
    generator = np.random.default_rng(0)
    theirs = generator.lognormal(0, 1, 12)
    ours = 9 * theirs + 0.01 * generator.random(12)
    found = ratio_by_sequence(ours, theirs, 0)
    # The sequences differ by far more than the ratio does.
    assert 8.99 < found.low <= found.value <= found.high < 9.1
    assert f"{found:.1f}" == "9.0 [9.0, 9.0]"
    few = ratio_by_sequence(ours[:3], theirs[:3], 0)
    assert few.low is None
    assert f"{few:.2g}" == "9"
    assert ratio_by_sequence(0 * ours, theirs, 0) == Estimate(0.0, 0.0, 0.0)
    assert ratio_by_sequence(ours, 0 * theirs, 0).high is None


def test_the_first_different_bit_is_named():
    rows = np.random.default_rng(0).normal(size=(4, VOCABULARY))
    base = [scores(rows, [1, 2, 3, 4]) for _ in range(3)]
    assert first_difference(base, base) is None
    same = scores(rows, [1, 2, 3, 4])
    changed = Scores(same.tokens, same.logprobs, same.top_ids, same.top_logprobs.copy())
    changed.top_logprobs[2, 5] = np.nextafter(changed.top_logprobs[2, 5], 0)
    found = first_difference(base, [same, changed, same])
    assert (found.sequence, found.position) == (1, 2)
    assert found.base.startswith("rank 5 token")
    assert found.base != found.test
    other = first_difference(base, [same, same, scores(rows, [1, 2, 3, 9])])
    assert (other.sequence, other.position) == (2, 3)
    assert other.base.startswith("token 4 at")
    assert other.test.startswith("token 9 at")
    short = first_difference(base, [same, same, same.head(2)])
    assert (short.position, short.test) == (2, "no token")


def test_the_lower_bound_is_one_on_every_kind_of_lists():
    """Sharp and flat, near and far, lists that share all, some or no tokens: seeded, for rare combinations."""
    generator = np.random.default_rng(0)
    worst = 0.0
    for _ in range(3000):
        sharpness = generator.choice([0.1, 1.0, 4.0, 8.0])
        a = generator.normal(0, sharpness, VOCABULARY).clip(-8, 8)
        near = a + generator.normal(0, generator.choice([0.01, 0.3, 3.0]), VOCABULARY)
        far = generator.normal(0, sharpness, VOCABULARY)
        b = (near if generator.random() < 0.5 else far).clip(-8, 8)
        k = int(generator.integers(1, VOCABULARY))
        full = stats.entropy(np.exp(log_softmax(a)), np.exp(log_softmax(b)))
        worst = max(worst, kl_bounds(*listed(a, k), *listed(b, k), VOCABULARY)[0] - full)
    assert worst <= ROUNDING


def test_the_mass_of_unlisted_tokens_is_no_rounding_error():
    """The test arm lists all its mass; what fp32 leaves of 1 must not be taken for a probability."""
    a = np.zeros(VOCABULARY)
    b = np.where(np.arange(VOCABULARY) < 8, 0.0, -16.0)
    full = stats.entropy(np.exp(log_softmax(a)), np.exp(log_softmax(b)))
    ids = np.arange(8)
    p = log_softmax(a)[:8]
    for error in (0.0, 3e-8, -3e-8):
        q = log_softmax(b)[:8] + error
        assert kl_bounds(ids, p, ids, q, None)[0] <= full + ROUNDING


def test_lists_without_a_common_token_are_far_apart():
    a, b = np.full(VOCABULARY, -6.0), np.full(VOCABULARY, -6.0)
    a[:4], b[10:14] = 4.0, 4.0
    full = stats.entropy(np.exp(log_softmax(a)), np.exp(log_softmax(b)))
    low, _ = kl_bounds(*listed(a, 4), *listed(b, 4), VOCABULARY)
    assert 0.7 * full < low <= full + ROUNDING
