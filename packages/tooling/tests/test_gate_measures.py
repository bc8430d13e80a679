# SPDX-License-Identifier: Apache-2.0
"""Figures from records written by hand, each with its value worked out in the test."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("httpx")
pytest.importorskip("scipy")

from numinous_tooling.gate.client import RequestRecord
from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.measures import (
    ArmRun,
    Slo,
    Window,
    judged_metrics,
    parse_slo,
    stalls,
    steady_window,
    summarise,
    summarise_run,
    tpot_s,
)


def record(
    session: str = "s",
    turn: int = 0,
    *,
    sent_s: float = 0.0,
    ttft_s: float = 0.5,
    gaps_s: tuple[float, ...] = (0.1, 0.1, 0.1),
    **changes: object,
) -> RequestRecord:
    """Return an answer of one token per chunk."""
    times = [ttft_s]
    for gap in gaps_s:
        times.append(times[-1] + gap)
    whole = RequestRecord(
        session=session,
        turn=turn,
        prompt_tokens=100,
        expected_tokens=len(times),
        request_digest="d",
        sent_s=sent_s,
        e2e_s=times[-1],
        got_tokens=len(times),
        cached_tokens=50,
        chunks=tuple((time, index + 1) for index, time in enumerate(times)),
    )
    return replace(whole, **changes)


def run_of(records: list[RequestRecord], wall_s: float = 10.0, arm: str = "A") -> ArmRun:
    return ArmRun(0, arm, 1, records, wall_s, 0.001, 0.002)


def test_a_stall_is_far_beyond_the_median_gap_and_a_second() -> None:
    smooth = record(gaps_s=(0.01,) * 30)
    assert stalls([smooth]) == {"count": 0, "longest_s": None, "limit_s": 1.0}
    # 0.9 s is 90 times the median, but below a second.
    assert stalls([smooth, record(gaps_s=(0.9,))])["count"] == 0
    found = stalls([smooth, record(gaps_s=(0.01, 1.5, 4.0))])
    assert (found["count"], found["longest_s"]) == (2, pytest.approx(4.0))
    # On a slow server the median rules: 20 x 0.2 s.
    slow = record(gaps_s=(0.2,) * 9 + (3.9,))
    assert stalls([slow]) == {"count": 0, "longest_s": None, "limit_s": pytest.approx(4.0)}
    assert stalls([record(gaps_s=(0.2,) * 9 + (4.1,))])["count"] == 1
    # The wait for the first chunk is no stall, and one chunk has no gap.
    assert stalls([record(ttft_s=60.0, gaps_s=())]) == {
        "count": 0,
        "longest_s": None,
        "limit_s": None,
    }


def test_goodput_takes_only_whole_answers_within_all_limits() -> None:
    slo = parse_slo("ttft=1, tpot=0.2")
    assert slo == Slo(ttft=1, tpot=0.2)
    assert str(slo) == "ttft=1,tpot=0.2"
    within = record()
    answers = [
        within,
        record(ttft_s=1.5),
        record(gaps_s=(0.3, 0.3)),
        replace(within, error="HTTP 500"),
        replace(within, expected_tokens=9),
        replace(within, chunks=(), got_tokens=0, expected_tokens=0),
        record(gaps_s=()),  # one chunk: no TPOT to break the limit
    ]
    assert [slo.holds(answer) for answer in answers] == [True, *[False] * 5, True]
    figures = summarise_run([run_of(answers)], slo)
    assert figures["goodput"] == {
        "slo": "ttft=1,tpot=0.2",
        "request_share": pytest.approx(2 / 7),
        "output_tok_s": pytest.approx((4 + 1) / 10),
    }
    assert (figures["requests"], figures["errors"], figures["short_answers"]) == (7, 1, 1)
    metric = judged_metrics(slo)[-1]
    assert (metric.name, metric.scale) == ("goodput", "share")
    assert metric.value(answers[:2]) == 0.5
    assert [m.name for m in judged_metrics(None)] == ["tok_s_user", "ttft", "tpot"]


def test_limits_count_to_the_last_digit() -> None:
    assert Slo(e2e=0.8).holds(record(e2e_s=0.8))
    assert not Slo(e2e=0.8).holds(record(e2e_s=0.800001))


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=x", "ttft=0", "p99=1", "ttft=1,ttft=2", "tpot=inf"]
)
def test_limits_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(GateError, match=r"--slo .*ttft=F,tpot=F,e2e=F"):
        parse_slo(text)


def test_cost_follows_price_time_and_tokens() -> None:
    # 4 tokens in 10 s at 3.6 USD/h: 0.01 USD for 4 tokens.
    figures = summarise_run([run_of([record()])], price_usd_h=3.6)
    assert figures["usd_per_m_output"] == pytest.approx(2500.0)
    assert summarise_run([run_of([record()])])["usd_per_m_output"] is None
    silent = record(got_tokens=0, chunks=(), error="dead")
    assert summarise_run([run_of([silent])], price_usd_h=3.6)["usd_per_m_output"] is None


def test_hit_rate_is_over_the_requests_that_tell_it() -> None:
    told, untold = record(), record(cached_tokens=None)
    assert summarise_run([run_of([told, untold])])["cache_hit_rate"] == 0.5
    assert summarise_run([run_of([untold])])["cache_hit_rate"] is None


def test_failed_answers_stay_in_the_counts() -> None:
    broken = record(error="broke off", expected_tokens=9)
    figures = summarise_run([run_of([record(), broken])])
    assert (figures["requests"], figures["errors"]) == (2, 1)
    assert figures["output_tok_s"] == pytest.approx(0.8)
    # e2e of a broken answer is no time of an answer.
    assert figures["e2e_s"]["p99"] == pytest.approx(0.8)


def test_time_per_token_needs_two_chunks() -> None:
    assert tpot_s([record(gaps_s=(0.1, 0.3))]) == pytest.approx(0.2)
    assert tpot_s([record(gaps_s=())]) is None


def second(session: str, turn: int, sent_s: float) -> RequestRecord:
    """Return an answer of ten tokens in one second."""
    return record(session, turn, sent_s=sent_s, ttft_s=0.1, gaps_s=(0.1,) * 9)


def test_steady_window_leaves_out_ramp_and_tail() -> None:
    # s1 from 0 to 9 s, s2 from 2 to 7 s, s3 from 3 to 6 s: level 2, first reached at 2 s; two answers ended at 2 s.
    records = [second("s1", turn, turn) for turn in range(9)]
    records += [second("s2", turn, 2.0 + turn) for turn in range(5)]
    records += [second("s3", turn, 3.0 + turn) for turn in range(3)]
    run = run_of(records, wall_s=9.0)
    window = steady_window(run)
    assert window == Window(pytest.approx(2.0), pytest.approx(7.0))
    steady = summarise_run([run])["steady"]
    # Inside: 5 + 5 + 3 answers, 13 x 10 tokens in 5 s; over all 170 tokens in 9 s.
    assert steady["requests"] == 13
    assert steady["output_tok_s"] == pytest.approx(130 / 5)
    assert summarise_run([run])["output_tok_s"] == pytest.approx(170 / 9)


def test_steady_window_waits_for_first_answers() -> None:
    # Four sessions at once; their first answers end at 1, 4, 4 and 4 s: the level of 2 answers is reached at 4 s.
    records = [second("s0", 0, 0.0)]
    records += [replace(second(f"s{i}", 0, 0.0), e2e_s=4.0) for i in (1, 2, 3)]
    records += [second(f"s{i}", 1, 5.0) for i in range(4)]
    assert steady_window(run_of(records, 6.0)) == Window(pytest.approx(4.0), pytest.approx(6.0))


def test_runs_without_a_steady_window_say_why() -> None:
    assert steady_window(run_of([])) == "no requests"
    burst = run_of([second(f"s{i}", 0, 0.0) for i in range(4)], 1.0)
    assert "for 0 of 1 s only" in str(steady_window(burst))
    assert "A1: at least 2 sessions" in summarise_run([burst])["steady"]["reason"]
    late = run_of([second("s", 0, 0.0), record("s", 1, sent_s=1.0, gaps_s=(9.0,), e2e_s=30.0)], 4.0)
    assert isinstance(steady_window(late), Window)


def test_arm_figures_are_plain_json() -> None:
    runs = [run_of([record()]), replace(run_of([record()]), repeat=2), run_of([], arm="B")]
    figures = summarise(runs, "A", Slo(ttft=1), 2.0)
    assert len(figures["repeats"]) == 2
    json.dumps(figures, allow_nan=False)
    json.dumps(summarise(runs, "B", Slo(ttft=1), 2.0), allow_nan=False)
    # An arm of a run that was aborted before its first slot.
    assert summarise(runs, "C", Slo(ttft=1), 2.0)["pooled"]["requests"] == 0
