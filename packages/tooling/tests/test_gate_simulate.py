# SPDX-License-Identifier: Apache-2.0
"""Error rates of the verdict on a scripted server in virtual time: thousands of gate runs, none of them waited for."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

pytest.importorskip("httpx")
pytest.importorskip("scipy")
pytest.importorskip("rich")

from scipy.stats import binomtest

from numinous_tooling.gate import simulate, verdict
from numinous_tooling.gate.measures import METRICS, Slo, judged_metrics, summarise_run
from numinous_tooling.gate.simulate import (
    CASES,
    TWO,
    Case,
    Expectation,
    Load,
    Server,
    gate_run,
    run_case,
    serve,
)
from numinous_tooling.gate.verdict import Effect, Noise, compare

SEED = 20
STILL = Server(start_sd=0, session_sd=0, request_sd=0)


def case_of(name: str, order: str) -> Case:
    return next(case for case in CASES if (case.name, case.order) == (name, order))


def test_false_alarms_of_a_thousand_equal_runs_are_nominal() -> None:
    outcome = run_case(case_of("A/A, no worsening allowed", TWO), 1000, SEED)
    assert outcome.broken == []
    # The trial has a point only if the truth sits at the limit: a rule that never fails would pass it as well.
    assert outcome.counts["FAIL"] >= 10
    assert outcome.counts["better"] >= 10


@pytest.mark.parametrize(
    ("case", "trials"),
    [(case, 60 if case.order == "AB" else 120) for case in CASES],
    ids=[f"{case.name} {case.order}" for case in CASES],
)
def test_every_case_keeps_its_expectations(case: Case, trials: int) -> None:
    outcome = run_case(case, trials, SEED)
    assert outcome.broken == [], outcome.counts


def test_one_metric_is_rejected_at_the_nominal_rate() -> None:
    """The interval of one metric leaves out the truth in 5 % of runs: not in more, and not in fewer."""
    trials = 1000
    load = Load(sessions=4, turns=1)
    rejected = 0
    for trial in range(trials):
        runs = gate_run(TWO, {"A": Server(), "B": Server()}, 1.0, load, random.Random(trial))
        metric = compare(
            runs, "A", "B", features=(), tolerances={"tpot": 0.1}, metrics=METRICS[2:]
        ).metrics[0]
        assert metric.low is not None
        assert metric.high is not None
        rejected += not metric.low <= 0 <= metric.high
    assert binomtest(rejected, trials, 0.05).pvalue > 0.001


def test_a_verdict_that_takes_sessions_for_runs_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted fault: the noise of a run is taken for that of its sessions, as a bootstrap over sessions would."""
    honest = verdict.measure

    def careless(*arguments: object) -> Effect:
        effect = honest(*arguments)
        noise = tuple(Noise(n.sd / 2, 30) for n in effect.noise)
        return replace(effect, noise=noise)

    monkeypatch.setattr(verdict, "measure", careless)
    outcome = run_case(case_of("A/A, no worsening allowed", TWO), 150, SEED)
    assert Expectation("FAIL", "at most", 0.05) in outcome.broken


def test_drift_needs_a_balanced_order() -> None:
    """With drift, ABAB sees B later than A each time and measures a change that is none; ABBA does not.

    Neither raises a false alarm: runs of one arm drift as well, and that scatter is what a change is judged by.
    """
    drifting = Server(start_sd=0.001, session_sd=0.001, request_sd=0.001, drift=0.02)
    changes = {}
    for order in ("ABBA", "ABAB"):
        case = Case("", order, (), server=drifting, tolerance=0.0)
        comparisons = [simulate.judge(case, random.Random(trial)) for trial in range(40)]
        changes[order] = fmean(c.metrics[2].change or 0.0 for c in comparisons)
        assert sum(c.word == "FAIL" for c in comparisons) <= 2
    assert abs(changes["ABBA"]) < 0.002
    assert changes["ABAB"] == pytest.approx(0.02, abs=0.005)


def test_expectations_are_binomial_tests() -> None:
    few = Expectation("FAIL", "at most", 0.05)
    assert few.holds(50, 1000)
    assert few.holds(70, 1000)
    assert not few.holds(80, 1000)
    many = Expectation("FAIL", "at least", 0.9)
    assert many.holds(880, 1000)
    assert not many.holds(860, 1000)
    always = Expectation("INCONCLUSIVE", "at least", 1.0)
    assert always.holds(60, 60)
    assert not always.holds(59, 60)


def test_virtual_server_answers_everything_and_repeats() -> None:
    load = Load()
    first, wall_s = serve(load, Server(), 1.0, random.Random(1))
    assert (first, wall_s) == serve(load, Server(), 1.0, random.Random(1))
    assert len(first) == load.sessions * load.turns
    assert not any(record.short or record.error for record in first)
    assert first != serve(load, Server(), 1.0, random.Random(2))[0]


def test_virtual_server_queues_and_crowds() -> None:
    one, _ = serve(Load(sessions=1), STILL, 1.0, random.Random(0))
    many, _ = serve(Load(sessions=24, gap_s=0.01), STILL, 1.0, random.Random(0))
    # Alone: 2,000 tokens of prefill and a step, then 39 steps of 20 ms.
    assert one[0].ttft_s == pytest.approx(2000 * STILL.prefill_s + STILL.step_s)
    assert one[0].e2e_s == pytest.approx(one[0].ttft_s + 39 * STILL.step_s)
    # 24 together: prompts wait for each other, and every step is slower.
    assert max(r.ttft_s for r in many if r.ttft_s) > 10 * one[0].ttft_s
    tpot = METRICS[2].value
    assert (tpot(many) or 0) > 1.1 * (tpot(one) or 0)


def test_planted_slow_down_shows_as_planted() -> None:
    runs = gate_run("AB", {"A": STILL, "B": STILL}, 1.1, Load(), random.Random(0))
    comparison = compare(
        runs, "A", "B", features=(), tolerances=dict.fromkeys(("tok_s_user", "ttft", "tpot"), 0.1)
    )
    changes = {metric.metric: metric.change for metric in comparison.metrics}
    assert changes["tpot"] == pytest.approx(0.1, abs=0.01)
    assert changes["tok_s_user"] == pytest.approx(1 / 1.1 - 1, abs=0.01)


def test_stalls_of_the_server_are_the_stalls_counted() -> None:
    draw = random.Random(3)
    runs = gate_run("A", {"A": replace(STILL, stall_rate=0.05, stall_s=10.0)}, 1.0, Load(), draw)
    counted = summarise_run(runs)["stalls"]
    slow_chunks = sum(
        after[0] - before[0] > 10.0
        for record in runs[0].records
        for before, after in zip(record.chunks, record.chunks[1:], strict=False)
    )
    assert counted["count"] == slow_chunks > 0
    assert counted["longest_s"] == pytest.approx(10.2, abs=0.1)


def test_goodput_is_judged_on_the_same_path() -> None:
    load = Load(sessions=32, turns=4)
    metrics = judged_metrics(Slo(tpot=0.0355))
    tolerances = {metric.name: 0.5 for metric in metrics}
    words = []
    for slow in (1.0, 2.0):
        runs = gate_run(TWO, {"A": Server(), "B": Server()}, slow, load, random.Random(5))
        judged = compare(runs, "A", "B", features=(), tolerances=tolerances, metrics=metrics)
        goodput = judged.metrics[-1]
        words.append(goodput.word)
        assert goodput.change is not None
    assert words == ["PASS", "FAIL"]
    assert fmean(map(Slo(tpot=0.0355).holds, runs[0].records)) > 0.9


def test_command_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    holds = Case("fine", "AB", (Expectation("FAIL", "at most", 0.5),))
    monkeypatch.setattr(simulate, "CASES", (holds,))
    file = tmp_path / "trials.json"
    assert simulate.main(["--trials", "12", "--methods", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert document["cases"][0]["trials"] == 12
    assert document["cases"][0]["counts"]["INCONCLUSIVE"] == 12
    assert document["cases"][0]["server"]["start_sd"] == 0.01
    methods = {row["method"] for row in document["methods"]}
    assert methods == set(simulate.METHODS)
    assert "12 gate runs judged" in capsys.readouterr().out

    broken = replace(holds, expectations=(Expectation("FAIL", "at least", 0.9),))
    monkeypatch.setattr(simulate, "CASES", (broken,))
    assert simulate.main(["--trials", "12"]) == 1
    assert "NO" in capsys.readouterr().out


def test_folder_for_the_trials_is_looked_for_before_they_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        simulate.main(["--trials", "1000000", "--json", str(tmp_path / "none" / "t.json")])
    assert stop.value.code == 2
    assert "no such folder" in capsys.readouterr().err
