# SPDX-License-Identifier: Apache-2.0
"""The rule of `scheduler.decode_burst` on stand-in schedulers: every branch, both caps, rank agreement."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numinous_scheduler.engine import decode_burst as module
from numinous_scheduler.engine.decode_burst import DecodeBurst, EndBurst
from numinous_scheduler.hooks.decode_burst import FEATURE, judge
from numinous_tooling.patching import counters
from numinous_tooling.patching.serve_command import ServeCommand

DEFAULTS = {
    "num_continuous_decode_steps": 8,
    "prefill_decode_interval": None,
    "enable_prefill_delayer": False,
    "dp_size": 1,
    "pp_size": 1,
    "disaggregation_mode": "null",
    "speculative_algorithm": None,
    "dllm_algorithm": None,
    "language_only": False,
    "nnodes": 1,
    "enable_pdmux": False,
    "enable_hisparse": False,
    "min_free_slots_delay": None,
    "enable_priority_scheduling": False,
    "disable_priority_preemption": False,
    "is_embedding": False,
}


def request(age_s: float = 0.0, finished: bool = False) -> SimpleNamespace:
    entry = SimpleNamespace(wait_queue_entry_time=time.perf_counter() - age_s)
    return SimpleNamespace(time_stats=entry, finished=lambda: finished)


def batch(kind: str, *requests: SimpleNamespace, prefill_only: bool = False) -> SimpleNamespace:
    mode = SimpleNamespace(is_extend=lambda: kind == "extend")
    return SimpleNamespace(
        forward_mode=mode,
        reqs=list(requests),
        is_empty=lambda: not requests,
        is_prefill_only=prefill_only,
    )


def scheduler(waiting=(), running=(), last=None, chunked=None) -> SimpleNamespace:
    return SimpleNamespace(
        waiting_queue=list(waiting),
        running_batch=batch("decode", *running),
        last_batch=last,
        chunked_req=chunked,
    )


@pytest.fixture(autouse=True)
def own_counters(monkeypatch):
    monkeypatch.setattr(counters, "_table", counters.Table())


def burst(steps=3, wait_s=10.0, queue=4) -> DecodeBurst:
    return DecodeBurst(steps, wait_s, queue, counters.counters(FEATURE.id))


def counted() -> dict[str, int]:
    return counters.table().totals().get(FEATURE.id, {})


def test_a_prefill_is_followed_by_at_most_n_held_steps():
    rule = burst(steps=3)
    busy = scheduler(waiting=[request()], running=[request()])
    assert not rule.holds_prefill(busy), "nothing was prefilled yet"
    rule.ran(busy, batch("extend", request()))
    held = 0
    while rule.holds_prefill(busy):
        held += 1
        rule.ran(busy, batch("decode", request()))
    assert held == 3
    assert counted() == {"engaged": 3}


def test_decode_steps_without_waiting_requests_use_the_budget_too():
    rule = burst(steps=3)
    idle = scheduler(running=[request()])
    rule.ran(idle, batch("extend", request()))
    assert not rule.holds_prefill(idle)
    rule.ran(idle, batch("decode", request()))
    rule.ran(idle, batch("decode", request()))
    busy = scheduler(waiting=[request()], running=[request()])
    assert rule.holds_prefill(busy)
    rule.ran(busy, batch("decode", request()))
    assert not rule.holds_prefill(busy)


def test_ends_early_when_nothing_is_left_to_decode():
    rule = burst()
    done = scheduler(waiting=[request()], running=[request(finished=True)])
    rule.ran(done, batch("extend", request()))
    assert not rule.holds_prefill(done)
    assert counted() == {"refused:nothing_to_decode": 1}
    rule.ran(done, batch("extend", request()))
    rule.ran(done, None)
    assert rule.remaining == 0, "an idle step ends the burst"


def test_the_prefill_that_just_ran_counts_as_decodable():
    rule = burst()
    last = batch("extend", request())
    first = scheduler(waiting=[request()], running=[], last=last)
    rule.ran(first, last)
    assert rule.holds_prefill(first)
    embedding = scheduler(
        waiting=[request()], running=[], last=batch("extend", request(), prefill_only=True)
    )
    rule.ran(embedding, last)
    assert not rule.holds_prefill(embedding)


def test_chunks_of_one_prompt_stay_together():
    rule = burst()
    between = scheduler(waiting=[request()], running=[request()], chunked=object())
    rule.ran(between, batch("extend", request()))
    assert not rule.holds_prefill(between)
    assert rule.remaining == 0, "armed by the last chunk only"
    assert counted() == {"refused:chunked_prefill": 1}
    between.chunked_req = None
    rule.ran(between, batch("extend", request()))
    assert rule.holds_prefill(between)


def test_queue_cap():
    rule = burst(queue=4)
    full = scheduler(waiting=[request() for _ in range(5)], running=[request()])
    rule.ran(full, batch("extend", request()))
    assert not rule.holds_prefill(full)
    assert counted() == {"refused:queue_cap": 1}


def test_wait_cap_is_judged_by_the_pulling_rank_and_obeyed_by_all(monkeypatch):
    ranks = [scheduler(waiting=[request(age_s=0.2)], running=[request()]) for _ in range(2)]
    for rank in ranks:
        rank.numinous_decode_burst = burst(wait_s=0.1)
        rank.numinous_decode_burst.ran(rank, batch("extend", request()))
    monkeypatch.setattr(module, "_scheduler", ranks[0])
    broadcast = module.after_pull_raw_reqs(["a"], receiver=None)
    assert broadcast == ["a", EndBurst()]
    for rank in ranks:
        monkeypatch.setattr(module, "_scheduler", rank)
        assert module.after_pull_raw_reqs(None, receiver=None) is None, (
            "only the pulling rank looks at a clock"
        )
        assert module.after_recv_requests(list(broadcast), None, local_reqs=[]) == ["a"]
        assert not rank.numinous_decode_burst.holds_prefill(rank)


def test_no_end_without_reason(monkeypatch):
    young = scheduler(waiting=[request()], running=[request()])
    young.numinous_decode_burst = burst(wait_s=10)
    young.numinous_decode_burst.ran(young, batch("extend", request()))
    monkeypatch.setattr(module, "_scheduler", young)
    assert module.after_pull_raw_reqs([], None) is None
    assert module.after_recv_requests(["a"], None) is None
    assert module.after_recv_requests([], None) is None
    monkeypatch.setattr(module, "_scheduler", None)
    assert module.after_pull_raw_reqs([], None) is None, "before the scheduler exists"


@given(
    st.lists(st.sampled_from(["extend", "decode", "none", "arrive", "chunk", "end"]), max_size=60),
    st.integers(2, 9),
    st.integers(0, 5),
)
def test_never_holds_longer_than_the_budget_and_all_ranks_agree(events, steps, queue):
    """Two ranks see the same events at different clocks: same answers; and no held run is longer than the budget."""
    ranks = [DecodeBurst(steps, 10.0, queue, counters.counters(FEATURE.id)) for _ in range(2)]
    waiting, run, chunked = [request()], 0, None
    for event in events:
        if event == "arrive":
            waiting.append(request(age_s=len(waiting)))
        if event == "chunk":
            chunked = None if chunked else object()
        state = scheduler(waiting, running=[request()], chunked=chunked)
        answers = {rank.holds_prefill(state) for rank in ranks}
        assert len(answers) == 1
        (held,) = answers
        run = run + 1 if held else 0
        assert run <= steps
        assert not (held and len(waiting) > queue)
        for rank in ranks:
            if held:
                rank.ran(state, batch("decode", request()))
            elif event in ("extend", "decode"):
                rank.ran(state, batch(event, request()))
            elif event == "none":
                rank.ran(state, None)
            elif event == "end":
                rank.end_by_wait()


def lines(**given) -> list[str]:
    return list(judge(ServeCommand(given, DEFAULTS)))


def test_judge_accepts_the_plain_case():
    assert lines() == []
    assert lines(disaggregation_mode=None) == []
    assert lines(enable_priority_scheduling=True, disable_priority_preemption=True) == []


@pytest.mark.parametrize(
    "given",
    [
        {"num_continuous_decode_steps": 1},
        {"prefill_decode_interval": 4},
        {"enable_prefill_delayer": True},
        {"dp_size": 2},
        {"pp_size": 2},
        {"disaggregation_mode": "prefill"},
        {"speculative_algorithm": "EAGLE"},
        {"dllm_algorithm": "x"},
        {"language_only": True},
        {"nnodes": 2},
        {"enable_pdmux": True},
        {"enable_hisparse": True},
        {"min_free_slots_delay": 4},
        {"enable_priority_scheduling": True},
        {"is_embedding": True},
    ],
    ids=lambda given: next(iter(given)),
)
def test_judge_refuses_in_one_line(given):
    (line,) = lines(**given)
    assert "\n" not in line
