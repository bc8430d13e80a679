# SPDX-License-Identifier: Apache-2.0
"""The workloads besides the recorded agents: traces, texts, loops. Every one seeded, equal in both arms."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("httpx")

from numinous_tooling.gate import plan
from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.plan import ModelFacts, Workload, build_warmup, digest
from numinous_tooling.gate.workload_loops import LoopSpec
from numinous_tooling.gate.workload_text import TextSpec, plan_turns, read_sessions
from numinous_tooling.gate.workload_traces import MooncakeSpec, read_trace

MODEL = ModelFacts("model", 8192, tuple(range(1000, 3000)))
CLOSED = LoopSpec(input=40, output=7, requests=50, rate=None, seed=0)


def write_lines(file: Path, rows: list[dict]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    return file


def trace_rows() -> list[dict]:
    return [
        {"timestamp": 4000, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]},
        {"timestamp": 0, "input_length": 1500, "output_length": 100, "hash_ids": [0, 1, 3]},
        {"timestamp": 1000, "input_length": 90_000, "output_length": 1, "hash_ids": [9] * 176},
        {"timestamp": 2000, "input_length": 600, "output_length": 20, "hash_ids": [4, 5]},
    ]


@pytest.fixture(params=["trace.jsonl", "trace.jsonl.gz"])
def trace(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return write_lines(tmp_path / request.param, trace_rows())


def mooncake(trace: Path, **changes: object) -> MooncakeSpec:
    return replace(MooncakeSpec(trace, 3, 1.0, 10.0, 0), **changes)


def sessions_file(tmp_path: Path) -> Path:
    def answer(text: str | None, t: int, **extra: object) -> dict:
        numbers = {"prompt_tokens": 9, "completion_tokens": 60, "reasoning_tokens": 10, "t": t}
        return {"role": "assistant", "content": text, **numbers, **extra}

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    rows = [
        {
            "session": f"s{index}",
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "messages": [
                {"role": "system", "content": "x" * 30},
                {"role": "user", "content": "y" * 60},
                answer("```bash\nls\n```", 0),
                {"role": "tool", "tool_call_id": "1", "content": "z" * 90, "t": 1},
                answer(None, 12, tool_calls=[call]),
                {"role": "user", "content": "more"},
                answer("done", 20),
            ],
        }
        for index in range(4)
    ]
    return write_lines(tmp_path / "sessions.jsonl.gz", rows)


def texts(tmp_path: Path, **changes: object) -> TextSpec:
    return replace(TextSpec(sessions_file(tmp_path), 3, 3, 2.0, 0), **changes)


@pytest.fixture(params=["closed", "open", "mooncake", "agents-text"])
def workload(request: pytest.FixtureRequest, tmp_path: Path) -> Workload:
    if request.param == "mooncake":
        return mooncake(write_lines(tmp_path / "t.jsonl", trace_rows()))
    if request.param == "agents-text":
        return texts(tmp_path)
    return replace(CLOSED, rate=None if request.param == "closed" else 4.0)


def test_same_seed_and_repeat_give_the_same_requests(workload: Workload) -> None:
    assert digest(workload.build(MODEL, 1)) == digest(workload.build(MODEL, 1))
    json.dumps(workload.describe())
    assert len(workload.build(MODEL, 1)) == workload.sessions
    json.dumps([workload.kind, workload.seed, workload.length_scale])


def test_repeats_have_the_same_shape_and_no_common_prefix(workload: Workload) -> None:
    one, two = workload.build(MODEL, 1), workload.build(MODEL, 2)
    assert [(p.name, p.start_s, p.turns) for p in one] == [
        (p.name, p.start_s, p.turns) for p in two
    ]
    for a, b in zip(one, two, strict=True):
        if workload.is_text:
            assert a.messages[0] != b.messages[0]
            assert a.messages[1:] == b.messages[1:]
        else:
            assert a.token_ids[0] != b.token_ids[0] or a.token_ids[1] != b.token_ids[1]
            assert a.token_ids[:9] != b.token_ids[:9]


def test_another_seed_gives_other_requests(workload: Workload) -> None:
    other = replace(workload, seed=1)  # type: ignore[type-var]
    assert digest(other.build(MODEL, 1)) != digest(workload.build(MODEL, 1))


def test_warmup_shares_no_prefix_with_the_sessions(workload: Workload) -> None:
    plans = workload.build(MODEL, 1)
    warmup = build_warmup(MODEL, plans, 2)
    assert len(warmup) == 2
    for warm, session in zip(warmup, plans, strict=False):
        assert len(warm.turns) == 1
        assert warm.turns[0].prompt_tokens == session.turns[0].prompt_tokens
        if workload.is_text:
            assert warm.messages[0] != session.messages[0]
            assert len(warm.messages) == session.turns[0].messages
        else:
            assert warm.token_ids[:9] != session.token_ids[:9]


# --- loops ------------------------------------------------------------------------------------


def test_closed_loop_starts_at_once_with_exact_sizes() -> None:
    plans = CLOSED.build(MODEL, 1)
    assert {p.start_s for p in plans} == {0.0}
    assert {(len(p.token_ids), p.turns[0].max_new_tokens) for p in plans} == {(40, 7)}
    assert len({p.token_ids[:6] for p in plans}) == 50


def test_open_loop_has_poisson_arrivals_of_its_rate() -> None:
    plans = replace(CLOSED, rate=5.0, requests=4000).build(MODEL, 1)
    starts = [p.start_s for p in plans]
    gaps = [b - a for a, b in pairwise(starts)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 5, rel=0.05)
    # Exponential gaps spread as wide as their mean.
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread == pytest.approx(mean, rel=0.1)
    assert starts[0] == 0


# --- Mooncake traces --------------------------------------------------------------------------


def test_trace_is_read_in_order_of_time(trace: Path) -> None:
    requests = read_trace(trace)
    assert [request.at_s for request in requests] == [0, 1, 2, 4]
    assert requests[0].blocks == (0, 1, 3)


def test_equal_blocks_share_a_prefix_and_others_do_not(trace: Path) -> None:
    first, second, third = (p.token_ids for p in mooncake(trace).build(MODEL, 1))
    # The request of 90,000 tokens does not fit; the three others come in order of time.
    assert [len(ids) for ids in (first, second, third)] == [1500, 600, 1100]
    assert first[:1024] == third[:1024]
    assert first[1024:1034] != third[1024:1034]
    assert first[:10] != second[:10]
    assert mooncake(trace).notes(MODEL) == [
        f"1 requests of {trace.name} that do not fit the context are left out"
    ]


def test_times_and_lengths_are_scaled(trace: Path) -> None:
    plans = mooncake(trace, length_scale=1 / 64, speedup=4.0).build(MODEL, 1)
    assert [p.start_s for p in plans] == [0, 0.25, 0.5]
    assert [p.turns[0].prompt_tokens for p in plans] == [23, 1406, 9]
    assert [p.turns[0].max_new_tokens for p in plans] == [2, 1, 1]
    # A block is 8 tokens now.
    four = mooncake(trace, length_scale=1 / 64, requests=4).build(MODEL, 1)
    assert four[0].token_ids[:16] == four[3].token_ids[:16]
    assert four[0].token_ids[16:] != four[3].token_ids[16:23]
    assert mooncake(trace, length_scale=1 / 64).describe()["block_tokens"] == 8


def test_prompt_longer_than_its_blocks_gets_tokens_of_its_own(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1]}
    file = write_lines(tmp_path / "t.jsonl", [row, row | {"timestamp": 5}])
    one, two = (p.token_ids for p in mooncake(file, requests=2).build(MODEL, 1))
    assert len(one) == len(two) == 1030
    assert one[:1024] == two[:1024]
    assert one[1024:] != two[1024:]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"timestamp": 0}\n', r"line 1 is not in Mooncake format"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}\n', "at least 1"),
        ("[]\n", "line 1: not a JSON object"),
        ("timestamp,input\n", "is not JSON lines"),
        ("", "only 0 requests"),
        (
            '{"timestamp": 0, "input_length": 1e999, "output_length": 1, "hash_ids": []}\n',
            "line 1 is not in Mooncake format",
        ),
        (
            '{"timestamp": NaN, "input_length": 9, "output_length": 1, "hash_ids": []}\n',
            "no finite number",
        ),
        ("[" * 100_000, "is not JSON lines"),
    ],
)
def test_strange_traces_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(GateError, match=message):
        mooncake(tmp_path / "t.jsonl").build(MODEL, 1)
    with pytest.raises(GateError, match="No such file"):
        mooncake(tmp_path / "missing.jsonl").build(MODEL, 1)
    whole = gzip.compress(b'{"timestamp": 0}\n' * 9)
    for damaged in (b"no gzip at all", whole[:20], whole[:11] + b"\xff" * 20):
        (tmp_path / "t.jsonl.gz").write_bytes(damaged)
        with pytest.raises(GateError, match="--trace"):
            mooncake(tmp_path / "t.jsonl.gz").build(MODEL, 1)


def test_plan_that_would_fill_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MAX_PLANNED_TOKENS", 1000)
    with pytest.raises(GateError, match="2,000 prompt tokens a repeat, at most 1,000"):
        CLOSED.build(MODEL, 1)
    with pytest.raises(GateError, match="prompt tokens a repeat, at most 1,000"):
        replace(CLOSED, requests=10**12).build(MODEL, 1)


def test_plan_that_would_wait_for_days_is_refused() -> None:
    open_loop = replace(CLOSED, rate=1e-6)
    with pytest.raises(GateError, match="hours between requests, at most 24 are planned"):
        plan.check_duration(open_loop.build(MODEL, 1))
    plan.check_duration(CLOSED.build(MODEL, 1))


# --- texts ------------------------------------------------------------------------------------


def test_every_answer_is_a_turn_on_all_messages_before_it(tmp_path: Path) -> None:
    (session, *_) = read_sessions(sessions_file(tmp_path))
    turns = plan_turns(session, 9, 2.0)
    assert [turn.messages for turn in turns] == [2, 4, 6]
    assert [turn.max_new_tokens for turn in turns] == [60, 60, 60]
    assert [turn.answer_format for turn in turns] == ["bash_block", "tool_call", None]
    # 12 s less 1.5 s latency and 60 tokens at 150 a second, at twice the speed.
    assert [turn.gap_s for turn in turns] == [0, pytest.approx(5.05), pytest.approx(3.05)]
    assert turns[0].prompt_tokens == 30
    assert [turn.messages for turn in plan_turns(session, 1, 2.0)] == [2]


def test_messages_are_sent_as_recorded_without_the_numbers(tmp_path: Path) -> None:
    for session in texts(tmp_path).build(MODEL, 1):
        assert session.messages[0]["content"] == "[0/1]\n" + "x" * 30
        assert session.messages[2] == {"role": "assistant", "content": "```bash\nls\n```"}
        assert session.messages[3]["tool_call_id"] == "1"
        assert session.messages[4]["tool_calls"][0]["id"] == "1"
        assert session.tools[0]["function"]["name"] == "f"
        assert len(session.messages) == 6  # the last answer is the server's to give


def test_sessions_that_do_not_fit_are_not_chosen(tmp_path: Path) -> None:
    with pytest.raises(GateError, match="only 0 of 4 sessions"):
        texts(tmp_path).build(replace(MODEL, context_tokens=100), 1)
    with pytest.raises(GateError, match="have 4 turns"):
        texts(tmp_path, turns=4).build(MODEL, 1)
    assert len(texts(tmp_path, sessions=4).build(MODEL, 1)) == 4


def chat(**answer: object) -> list[dict]:
    """Return two questions, each with an answer that has these fields."""
    pair = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "a", "t": 0, **answer},
    ]
    return [*pair, *pair]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"session": "a"}, "line 1 has no chat"),
        ({"session": "a", "messages": []}, "line 1 has no chat"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "line 1 has no chat"),
        ({"messages": [{"role": "user", "content": [1]}]}, "line 1 has no chat"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": 5}, "line 1 has no chat"),
        ({"messages": chat(t="soon")}, "line 1: session, t, completion_tokens"),
        ({"messages": chat(completion_tokens="many")}, "line 1: session, t, completion_tokens"),
        ({"messages": chat(tool_calls=["x"])}, "line 1: session, t, completion_tokens"),
        ({"messages": chat(), "session": "\ud800"}, "line 1: session, t, completion_tokens"),
    ],
)
def test_strange_sessions_are_named(tmp_path: Path, row: dict, message: str) -> None:
    file = write_lines(tmp_path / "s.jsonl", [row])
    with pytest.raises(GateError, match=message):
        read_sessions(file)


def test_two_sessions_of_one_name_are_refused(tmp_path: Path) -> None:
    row = {"session": "a", "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(GateError, match="same name"):
        read_sessions(write_lines(tmp_path / "s.jsonl", [row, row]))
