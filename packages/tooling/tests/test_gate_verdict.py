# SPDX-License-Identifier: Apache-2.0
"""The rule of the verdict, on made-up records: known effects, noise, and every reason for doubt."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

pytest.importorskip("httpx")
pytest.importorskip("scipy")

from numinous_tooling.gate.client import RequestRecord
from numinous_tooling.gate.measures import (
    METRICS,
    ArmRun,
    summarise,
    tpot_s,
)
from numinous_tooling.gate.verdict import (
    Comparison,
    compare,
    lag_limit_s,
)

TOLERANCES = {metric.name: 0.10 for metric in METRICS}
FEATURE = "scheduler.decode_burst"


def make_record(
    session: int, turn: int, ttft_s: float, step_s: float, repeat: int
) -> RequestRecord:
    tokens = 6
    return RequestRecord(
        session=f"s{session}",
        turn=turn,
        prompt_tokens=100,
        expected_tokens=tokens,
        request_digest=f"{repeat}/{session}/{turn}",
        sent_s=float(turn),
        e2e_s=ttft_s + step_s * (tokens - 1),
        got_tokens=tokens,
        cached_tokens=80 if turn else 0,
        chunks=tuple((ttft_s + step_s * i, i + 1) for i in range(tokens)),
    )


def make_runs(
    slow_b: float = 1.0,
    *,
    sessions: int = 8,
    repeats: int = 2,
    run_noise: float = 0.0,
    session_noise: float = 0.02,
    seed: int = 1,
) -> list[ArmRun]:
    """Return runs in which every time of arm B is `slow_b` times that of arm A, plus noise (log-normal sigmas)."""
    rng = random.Random(seed)
    runs = []
    for repeat in range(1, repeats + 1):
        for arm in "AB":
            factor = (slow_b if arm == "B" else 1.0) * rng.lognormvariate(0, run_noise)
            records = []
            for session in range(sessions):
                own = factor * rng.lognormvariate(0, session_noise)
                records += [
                    make_record(session, turn, 0.2 * own, 0.03 * own, repeat) for turn in range(3)
                ]
            counters = {FEATURE: {"engaged": 5}} if arm == "B" else {}
            runs.append(ArmRun(len(runs), arm, repeat, records, 10.0, 0.001, 0.002, 0.0, counters))
    return runs


def judge(runs: list[ArmRun], **changes: object) -> Comparison:
    settings: dict = {"features": [FEATURE], "tolerances": TOLERANCES} | changes
    return compare(runs, "A", "B", **settings)


def test_equal_arms_pass() -> None:
    assert judge(make_runs()).word == "PASS"


def test_slow_arm_fails_in_every_metric() -> None:
    comparison = judge(make_runs(1.5))
    assert comparison.word == "FAIL"
    assert {metric.word for metric in comparison.metrics} == {"FAIL"}
    changes = {metric.metric: metric.change for metric in comparison.metrics}
    assert changes["ttft"] == pytest.approx(0.5, abs=0.05)
    assert changes["tok_s_user"] == pytest.approx(-1 / 3, abs=0.05)


def test_fast_arm_passes_and_the_change_shows() -> None:
    comparison = judge(make_runs(0.8))
    assert comparison.word == "PASS"
    assert comparison.metrics[0].change == pytest.approx(0.25, abs=0.05)


def test_effect_at_the_tolerance_is_inconclusive() -> None:
    assert judge(make_runs(1.10)).word == "INCONCLUSIVE"


def test_noise_between_repeats_makes_inconclusive() -> None:
    comparison = judge(make_runs(run_noise=0.3))
    assert comparison.word == "INCONCLUSIVE"
    assert all(metric.noise is not None and metric.noise > 0.05 for metric in comparison.metrics)


def test_one_repeat_cannot_decide() -> None:
    for slow in (1.0, 3.0):
        comparison = judge(make_runs(slow, repeats=1))
        assert comparison.word == "INCONCLUSIVE"
        assert "no noise" in comparison.metrics[0].reason


def test_too_few_pairs_cannot_decide() -> None:
    assert "3 pairs" in judge(make_runs(3.0, sessions=3, repeats=1)).metrics[0].reason


def test_tolerance_is_per_metric() -> None:
    comparison = judge(make_runs(1.5), tolerances=TOLERANCES | {"ttft": 1.0})
    assert {m.metric: m.word for m in comparison.metrics}["ttft"] == "PASS"


def test_false_alarms_of_equal_arms_are_rare() -> None:
    words = [
        judge(make_runs(run_noise=0.03, session_noise=0.05, sessions=4, seed=seed)).word
        for seed in range(30)
    ]
    assert words.count("FAIL") == 0
    assert words.count("PASS") >= 10


def test_doubled_times_are_always_found() -> None:
    words = [
        judge(make_runs(2.0, run_noise=0.03, session_noise=0.05, sessions=4, seed=seed)).word
        for seed in range(30)
    ]
    assert set(words) == {"FAIL"}


def test_feature_that_never_ran_fails() -> None:
    runs = make_runs()
    runs[3].counters = {FEATURE: {"engaged": 0, "refused:dp": 4}}
    comparison = judge(runs)
    assert comparison.word == "FAIL"
    assert comparison.reasons == (f"B2: {FEATURE} never ran (refused:dp 4)",)
    assert judge(runs, features=[]).word == "PASS"


def with_record(run: ArmRun, **changes: object) -> None:
    run.records[0] = replace(run.records[0], **changes)


def test_bad_answers() -> None:
    runs = make_runs()
    with_record(runs[1], error="HTTP 500")
    assert judge(runs).word == "FAIL"
    with_record(runs[0], got_tokens=2)
    comparison = judge(runs)
    assert comparison.word == "INCONCLUSIVE"
    assert comparison.reasons[0] == "1 failed or short answers in arm A"


@pytest.mark.parametrize(
    ("run", "change", "reason"),
    [
        (0, {"counters": {FEATURE: {"engaged": 1}}}, "A1 is stock but shows counters"),
        (1, {"lag_p99_s": 0.02}, "B1: the client lagged, p99 20.0 ms over 10.0 ms"),
    ],
)
def test_doubts_about_a_run(run: int, change: dict, reason: str) -> None:
    runs = make_runs()
    for name, value in change.items():
        setattr(runs[run], name, value)
    comparison = judge(runs)
    assert comparison.word == "INCONCLUSIVE"
    assert comparison.reasons[0].startswith(reason)


def test_different_requests_are_doubtful() -> None:
    runs = make_runs()
    with_record(runs[3], request_digest="other")
    assert "sent different requests" in judge(runs).reasons[0]


def test_leftover_cache_is_doubtful_only_if_all_early_requests_hit() -> None:
    runs = make_runs()
    # All sessions send their first request at 0 s; one of them finds the prefix of another.
    with_record(runs[3], cached_tokens=10)
    assert judge(runs).word == "PASS"
    runs[3].records = [
        replace(record, cached_tokens=10) if record.turn == 0 else record
        for record in runs[3].records
    ]
    assert judge(runs).reasons == (
        "B2: the cache was not empty, the first requests found 10 tokens in it",
    )


def test_lag_limit_follows_the_token_time() -> None:
    run = make_runs(session_noise=0)[0]
    assert lag_limit_s(run) == pytest.approx(0.010)
    run.records = [make_record(0, 0, 1.0, 0.2, 1)]
    assert lag_limit_s(run) == pytest.approx(0.05)
    assert judge(make_runs(), max_lag_s=0.0001).word == "INCONCLUSIVE"


def test_chunks_of_several_tokens() -> None:
    record = replace(make_record(0, 0, 0.1, 0.1, 1), chunks=((0.1, 3), (0.5, 7)))
    assert tpot_s([record]) == pytest.approx(0.1)
    assert record.ttft_s == 0.1
    assert tpot_s([replace(record, chunks=((0.1, 3),))]) is None


def test_figures() -> None:
    figures = summarise(make_runs(session_noise=0), "B")
    pooled = figures["pooled"]
    assert pooled["requests"] == 48
    assert pooled["output_tok_s"] == pytest.approx(48 * 6 / 20)
    assert pooled["cache_hit_rate"] == pytest.approx(160 / 300)
    assert pooled["tok_s_user"]["p50"] == pytest.approx(6 / 0.35)
    assert pooled["ttft_s"]["p90"] == pytest.approx(0.2)
    assert len(figures["repeats"]) == 2
    assert figures["counters"] == {FEATURE: {"engaged": 10}}
    json.dumps(figures, allow_nan=False)
