# SPDX-License-Identifier: Apache-2.0
"""The rule of the verdict, on made-up records: known effects, noise, and every reason for doubt."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from statistics import fmean, variance

import pytest

pytest.importorskip("httpx")
pytest.importorskip("scipy")

from numinous_tooling.gate.client import RequestRecord
from numinous_tooling.gate.measures import (
    METRICS,
    ArmRun,
    judged_metrics,
    parse_slo,
    summarise,
    tpot_s,
)
from numinous_tooling.gate.verdict import (
    ALPHA,
    MAX_FURTHER,
    Comparison,
    Effect,
    Noise,
    compare,
    holm,
    lag_limit_s,
    same_arm_noise,
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


def test_wild_intervals_are_printed_as_such_and_judged_as_they_are() -> None:
    pytest.importorskip("matplotlib")
    from numinous_tooling.gate.report import comparison_rows

    comparison = judge(make_runs(run_noise=3.0))
    ends = [metric.high for metric in comparison.metrics if metric.high is not None]
    assert max(ends) > 1e3
    cells = [row[2] for row in comparison_rows(comparison)]
    assert any(cell.endswith("… over +10000 %") for cell in cells)
    assert max(map(len, cells)) < 30


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


def test_arm_with_more_runs_may_have_more_bad_answers() -> None:
    runs = [run for run in make_runs() if run.name != "A2"]
    for run in runs:
        with_record(run, error="HTTP 500")
    comparison = judge(runs)
    assert comparison.word == "INCONCLUSIVE"
    assert comparison.reasons[0] == "1 failed or short answers in arm A"
    runs[-1].records[1] = replace(runs[-1].records[1], error="HTTP 500")
    comparison = judge(runs)
    assert comparison.word == "FAIL"
    assert comparison.reasons == ("arm B has 3 failed or short answers of 48, arm A 1 of 24",)


def test_times_below_the_resolution_of_the_clock_are_no_values() -> None:
    runs = make_runs()
    for run in runs:
        run.records = [
            replace(record, e2e_s=0.0, chunks=tuple((0.0, n) for _, n in record.chunks))
            for record in run.records
        ]
    assert {m.reason for m in judge(runs).metrics} == {"0 pairs, at least 4 needed"}


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


def test_load_of_other_programs_must_be_even() -> None:
    """Of both arms alike it is noise, of one arm alone it is a difference that B did not make."""
    runs = make_runs()
    for run in runs:
        run.other_cores = 1.5
    assert judge(runs, max_uneven_cores=0.2).word == "PASS"
    for run in runs:
        run.other_cores = 1.5 if run.arm == "B" else 1.1
    assert judge(runs, max_uneven_cores=0.5).word == "PASS"
    comparison = judge(runs, max_uneven_cores=0.2)
    assert comparison.word == "INCONCLUSIVE"
    assert comparison.reasons == (
        "other programs kept 1.5 cores busy during arm B and 1.1 during arm A; repeat on a quiet machine",
    )


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


def test_interval_is_students_over_runs() -> None:
    """Worked by hand: run means (log) A 0, 0.02; B 0.10, 0.14; pooled sd sqrt((0.0002 + 0.0008) / 2), 2 df."""
    effect = Effect(0.11, 2, 16, (Noise(math.sqrt(0.0005), 2),))
    assert effect.half_width() == pytest.approx(4.302653 * math.sqrt(0.0005))
    # t = (0.11 - 0.05) / sqrt(0.0005) = 2.683 on 2 degrees of freedom, one-sided.
    assert effect.p_above(0.05) == pytest.approx(0.0577, abs=2e-4)
    assert effect.p_below(0.05) == pytest.approx(1 - 0.0577, abs=2e-4)


def test_sessions_do_not_stand_in_for_runs() -> None:
    """What one server start does to all of its sessions is the noise of one run, however many sessions there are."""
    few, many = (
        judge(make_runs(run_noise=0.05, session_noise=0.001, sessions=sessions)).metrics[0]
        for sessions in (4, 64)
    )
    assert few.noise == pytest.approx(many.noise, rel=0.1)
    assert (few.repeats, few.pairs, many.pairs) == (2, 8, 128)


def test_only_sessions_of_both_arms_count() -> None:
    runs = make_runs(session_noise=0)
    runs[0].records = [replace(r, session="only in A") for r in runs[0].records[:3]] + runs[
        0
    ].records
    runs[1].records = [r for r in runs[1].records if r.session != "s7"]
    metric = judge(runs).metrics[0]
    assert metric.pairs == 15
    assert metric.change == pytest.approx(0)


def test_holm_is_that_of_statsmodels() -> None:
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    rng = random.Random(4)
    for _ in range(5):
        p_values = [rng.random() ** 3 for _ in range(rng.randint(1, 6))]
        expected = multitest.multipletests(p_values, method="holm")[1]
        assert holm(p_values) == pytest.approx(list(expected))
    assert holm([0.02, 0.02, 0.02]) == pytest.approx([0.06] * 3)


def test_several_metrics_need_more_than_one_would() -> None:
    """One metric alone is worse at 5 %, but among three that is no alarm; three of them at 1.6 % are."""
    runs = make_runs(1.0, run_noise=0.01, session_noise=0.02, seed=3)
    alone = judge(runs, metrics=METRICS[:1], tolerances=dict.fromkeys(TOLERANCES, 0.0)).metrics[0]
    among = judge(runs, tolerances=dict.fromkeys(TOLERANCES, 0.0)).metrics[0]
    assert alone.p_fail is not None
    assert among.p_fail is not None
    assert alone.p_fail < among.p_fail <= 3 * alone.p_fail


def test_better_is_said_only_where_it_is_shown() -> None:
    fast = judge(make_runs(0.8))
    assert set(fast.improved) == {metric.label for metric in METRICS}
    assert "time per output token is better" in fast.reasons
    assert judge(make_runs()).improved == ()
    doubtful = make_runs(0.8)
    doubtful[1].lag_p99_s = 0.02
    assert judge(doubtful).improved == ()


def test_floor_widens_and_never_narrows() -> None:
    runs = make_runs(0.9)
    without = judge(runs).metrics[0]
    for sd in (1e-6, 0.5):
        floor = {metric.name: Noise(sd, 3) for metric in METRICS}
        metric = judge(runs, floor=floor).metrics[0]
        assert (without.low, without.high, metric.low, metric.high) != (None,) * 4
        assert (metric.high or 0) - (metric.low or 0) >= (without.high or 0) - (without.low or 0)
        assert metric.floor == pytest.approx(math.expm1(sd))
    # The last, large floor takes a verdict away that the run alone would have given.
    assert (without.word, metric.word, metric.better) == ("PASS", "INCONCLUSIVE", False)
    assert judge(make_runs(3.0, repeats=1), floor=floor).word == "INCONCLUSIVE"


def test_further_repeats_are_an_estimate_with_a_cap() -> None:
    sure = judge(make_runs(1.0)).metrics[0]
    assert sure.further_repeats is None
    assert judge(make_runs(repeats=1)).metrics[0].further_repeats == 1
    at_limit = judge(make_runs(1.10, session_noise=0.002, run_noise=0.03, seed=7)).metrics[0]
    assert at_limit.word == "INCONCLUSIVE"
    assert (
        at_limit.further_repeats is None
        or f"about {at_limit.further_repeats} further" in at_limit.reason
    )
    # Change 0.05 from the limit, noise 0.03: needs (t.975 + t.8) x 0.03 x sqrt(2 / R) <= 0.05.
    effect = Effect(0.05, 2, 16, (Noise(0.03, 2),))
    total = effect.repeats_to_decide(0.0, ALPHA)
    assert total == 7
    assert Effect(0.0001, 2, 16, (Noise(0.03, 2),)).repeats_to_decide(0.0, ALPHA) is None
    assert effect.repeats + MAX_FURTHER == 22
    # A wide floor asks for more.
    floored = Effect(0.05, 2, 16, (Noise(0.03, 2), Noise(0.05, 3)))
    assert (floored.repeats_to_decide(0.0, ALPHA) or 99) > 7


def test_further_repeats_hold_what_they_promise() -> None:
    """Where the truth is as seen, so many repeats decide in about four of five runs."""
    noise, distance, repeats = 0.03, 0.05, 7
    rng = random.Random(8)
    decided = 0
    trials = 2000
    for _ in range(trials):
        arms = [[rng.gauss(mean, noise) for _ in range(repeats)] for mean in (0.0, distance)]
        sd = math.sqrt(fmean(map(variance, arms)))
        change = fmean(arms[1]) - fmean(arms[0])
        effect = Effect(change, repeats, 99, (Noise(sd, 2 * (repeats - 1)),))
        decided += effect.p_above(0.0) <= ALPHA
    assert 0.75 < decided / trials < 0.90


def test_goodput_is_judged_in_points() -> None:
    metrics = judged_metrics(parse_slo("ttft=0.3"))
    tolerances = TOLERANCES | {"goodput": 0.05}
    runs = make_runs(session_noise=0.01, sessions=32)
    for run in runs:
        # In arm B half of the answers, in arm A one of 96 is late.
        late = 48 if run.arm == "B" else 1
        run.records[:late] = [
            replace(r, chunks=((9.0, 1), (9.1, r.got_tokens)), e2e_s=9.1)
            for r in run.records[:late]
        ]
    goodput = judge(runs, metrics=metrics, tolerances=tolerances).metrics[-1]
    assert goodput.change == pytest.approx(-47 / 96)
    assert goodput.word == "FAIL"
    # Equal shares in all runs show no scatter; 96 requests can still not show five points of 100.
    same = make_runs(session_noise=0.01, sessions=32)
    goodput = judge(same, metrics=metrics, tolerances=tolerances).metrics[-1]
    assert (goodput.change, goodput.scale) == (0.0, "share")
    assert goodput.noise == pytest.approx(math.sqrt((97 / 98) * (1 / 98) / 96))
    assert goodput.low == pytest.approx(-4.302653 * (goodput.noise or 0))


def test_no_answer_within_limits_is_no_error() -> None:
    metrics = judged_metrics(parse_slo("ttft=0.001"))
    goodput = judge(make_runs(), metrics=metrics, tolerances=TOLERANCES | {"goodput": 0.3}).metrics[
        -1
    ]
    assert goodput.change == 0.0
    assert goodput.word == "PASS"


def test_noise_of_equal_arms_is_over_all_runs() -> None:
    runs = make_runs(run_noise=0.1, session_noise=0.0, repeats=3)
    noise = same_arm_noise(METRICS[2], runs)
    values = [math.log(tpot_s(run.records) or 1) for run in runs]
    assert noise is not None
    assert (noise.sd, noise.df) == (pytest.approx(math.sqrt(variance(values))), 5)
    assert same_arm_noise(METRICS[2], []) is None
