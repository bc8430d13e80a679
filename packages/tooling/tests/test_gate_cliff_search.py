# SPDX-License-Identifier: Apache-2.0
"""The search for the cliff on made-up curves: every monotone one is found, noise and inversions are reported."""

from __future__ import annotations

import math
import random

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from numinous_tooling.gate.cliff_search import Bracket, search


@st.composite
def curves(draw: st.DrawFn) -> tuple[int, int, int]:
    highest = draw(st.integers(1, 5000))
    return highest, draw(st.integers(0, highest)), draw(st.integers(1, 6000))


@settings(deadline=None)
@given(curves())
def test_every_monotone_cliff_is_found(curve: tuple[int, int, int]) -> None:
    highest, cliff, start = curve
    probes = []

    def probe(concurrency: int) -> bool:
        assert 1 <= concurrency <= highest
        probes.append(concurrency)
        return concurrency <= cliff

    found = search(probe, start, highest)
    assert found.holds == (cliff or None)
    assert found.fails == (cliff + 1 if cliff < highest else None)
    assert (found.disputed, found.inversions) == ((), ())
    # Galloping and bisection, and each end of the bracket once more.
    assert len(probes) <= 2 * math.log2(highest + 1) + 5
    assert max(probes.count(n) for n in set(probes)) <= 2


@settings(deadline=None)
@given(curves(), st.floats(0.01, 0.5))
def test_resolution_bounds_the_bracket(curve: tuple[int, int, int], resolution: float) -> None:
    highest, cliff, start = curve
    found = search(lambda n: n <= cliff, start, highest, resolution)
    low, high = found.holds or 0, found.fails
    assert low <= cliff
    if high is None:
        assert low == highest == cliff
    else:
        assert cliff < high
        assert high - low <= max(1.0, resolution * low)


@settings(deadline=None)
@given(curves(), st.integers(0, 2**32))
def test_one_wrong_answer_per_concurrency_changes_nothing(
    curve: tuple[int, int, int], seed: int
) -> None:
    """A probe that errs once at an end of the bracket is outvoted; the disagreement is reported."""
    highest, cliff, start = curve
    lies = {random.Random(seed).choice([max(1, cliff), min(highest, cliff + 1)])}
    lied = []

    def probe(concurrency: int) -> bool:
        truth = concurrency <= cliff
        if concurrency in lies:
            lies.remove(concurrency)
            lied.append(concurrency)
            return not truth
        return truth

    found = search(probe, start, highest)
    assert found.holds == (cliff or None)
    assert found.disputed == tuple(lied)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**32))
def test_search_ends_whatever_the_answers(highest: int, start: int, seed: int) -> None:
    draw = random.Random(seed)
    count = 0

    def probe(concurrency: int) -> bool:
        nonlocal count
        count += 1
        return draw.random() < 0.5

    found = search(probe, start, highest)
    assert count <= 3 * highest
    assert all(len(answers) <= 3 for answers in found.answers.values())
    for end in (found.holds, found.fails):
        if end is not None:
            assert len(found.answers[end]) >= 2


def test_curve_that_recovers_is_reported_where_it_was_seen() -> None:
    # From above: 32 fails, 16 fails, 8 holds, 12 fails, 10 holds ... and 11 fails: one cliff as far as probes go.
    found = search(lambda n: n <= 10, 32, 64)
    assert (found.holds, found.inversions) == (10, ())
    # 24 holds again: the first probe says so, the bracket is above it, and 16 would be seen only if probed.
    found = search(lambda n: n <= 10 or 20 <= n <= 24, 24, 64)
    assert (found.holds, found.fails) == (24, 25)
    both = Bracket({4: [True], 8: [False, False], 16: [True, True], 32: [False, False]})
    assert (both.holds, both.fails, both.inversions) == (16, 32, (8,))


def test_majority_and_ties() -> None:
    bracket = Bracket({4: [True], 5: [False, True], 6: [True, False], 7: [False, True, True]})
    assert [bracket.verdict(n) for n in (4, 5, 6, 7)] == [True, False, True, True]
    assert bracket.disputed == (5, 6, 7)


def test_nothing_holds_and_everything_holds() -> None:
    none = search(lambda n: False, 16, 64)
    assert (none.holds, none.fails) == (None, 1)
    every = search(lambda n: True, 16, 50)
    assert (every.holds, every.fails) == (50, None)
