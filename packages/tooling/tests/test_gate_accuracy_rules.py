# SPDX-License-Identifier: Apache-2.0
"""The rule of the accuracy gate, GSM8K's tests and the fixed sequences, without a server."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy")
pytest.importorskip("statsmodels")

from scipy import stats

from numinous_tooling.gate.accuracy import gsm8k
from numinous_tooling.gate.accuracy.distance import Estimate, Summary
from numinous_tooling.gate.accuracy.sequences import (
    BUILT_IN,
    Segment,
    build_sequences,
    load_texts,
    parse_transcripts,
)
from numinous_tooling.gate.accuracy.verdict import (
    MIN_FLOOR,
    judge_distance,
    judge_exact_match,
    judge_loss,
    judge_text_loss,
)
from numinous_tooling.gate.errors import GateError


def characters(texts):
    return [[ord(character) for character in text] for text in texts]


def distance(mean, low=None, high=None):
    estimate = Estimate(mean, low, high)
    zero = Estimate(0.0, 0.0, 0.0)
    return Summary(estimate, estimate, estimate, mean, zero, zero, 100, 10, exact=True)


@pytest.mark.parametrize(
    ("low", "high", "floor", "word"),
    [
        (0.0, 2.9e-5, 0.0, "PASS"),  # the least floor counts
        (3.1e-5, 4e-5, 0.0, "FAIL"),
        (2e-5, 4e-5, 0.0, "INCONCLUSIVE"),
        (2e-3, 2.9e-3, 1e-3, "PASS"),  # the measured floor counts
        (3.1e-3, 4e-3, 1e-3, "FAIL"),
        (None, None, 0.0, "INCONCLUSIVE"),
    ],
)
def test_a_row_is_judged_by_its_interval_against_the_floor(low, high, floor, word):
    judged = judge_distance("cold", "cold", distance(1e-4, low, high), distance(floor), margin=3.0)
    assert judged.word == word
    assert judged.limit == pytest.approx(3 * max(floor, MIN_FLOOR))


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (1e-3, 3.9e-3, "PASS"),
        (1e-3, 5e-3, "INCONCLUSIVE"),
        (4.1e-3, 6e-3, "FAIL"),
    ],
)
def test_a_yardstick_is_compared_by_lower_bounds(low, high, word):
    zero = Estimate(0.0, 0.0, 0.0)
    yard = Summary(Estimate(1e-3, None, None), Estimate(2e-3, None, None), zero, 2e-3, zero, zero, 100, 10, exact=False)  # fmt: skip
    wide = Estimate(1.0, 0.9, 1.1)
    own = Summary(Estimate(2e-3, low, high), wide, zero, 1.0, zero, zero, 100, 10, exact=False)
    judged = judge_distance("cold", "cold", own, yard, 4.0, yardstick=True)
    assert judged.word == word
    assert judged.limit == pytest.approx(4e-3)
    assert (judged.figure, judged.floor) == (2e-3, 1e-3)


def test_beside_a_yardstick_the_loss_on_the_text_has_a_limit():
    zero = Estimate(0.0, 0.0, 0.0)
    for low, high, word in ((-0.1, 0.014, "PASS"), (0.016, 0.02, "FAIL"), (0.01, 0.02, "INCONCLUSIVE")):  # fmt: skip
        judged = judge_text_loss("cold", "cold", Estimate(0.013, low, high), zero, base_loss=3.0)
        assert (judged.word, judged.row) == (word, "cold_loss")
        assert judged.limit == pytest.approx(0.015)


def test_a_loss_that_shrinks_never_fails():
    zero = Estimate(0.0, 0.0, 0.0)
    assert judge_loss(Estimate(-0.5, -0.6, -0.4), zero, 3.0).word == "PASS"
    assert judge_loss(Estimate(0.5, 0.4, 0.6), zero, 3.0).word == "FAIL"
    assert judge_loss(Estimate(0.5, -0.4, 0.6), zero, 3.0).word == "INCONCLUSIVE"


def outcome(only_base, only_test, both, neither):
    base = [True] * only_base + [False] * only_test + [True] * both + [False] * neither
    test = [False] * only_base + [True] * only_test + [True] * both + [False] * neither
    return gsm8k.exact_match(base, test)


def test_mcnemar_is_the_exact_binomial_test_of_the_discordant():
    found = outcome(9, 2, 40, 49)
    assert found.p_value == pytest.approx(stats.binomtest(2, 11, 0.5).pvalue)
    assert (found.base_right, found.test_right, found.problems) == (49, 42, 100)
    assert outcome(0, 0, 50, 50).p_value == 1


def test_exact_match_fails_when_worse_and_passes_only_with_power():
    same = outcome(0, 0, 50, 50)
    assert judge_exact_match(outcome(12, 1, 40, 47), same, 0.02).word == "FAIL"
    assert judge_exact_match(outcome(1, 12, 40, 47), same, 0.02).word == "INCONCLUSIVE"
    assert judge_exact_match(outcome(13, 13, 700, 593), same, 0.02).word == "PASS"
    few = judge_exact_match(outcome(0, 0, 8, 8), same, 0.02)
    assert few.word == "INCONCLUSIVE"
    assert not few.decides
    assert judge_exact_match(outcome(12, 1, 40, 47), same, 0.02).decides


def test_the_detectable_shift_is_the_normal_approximation():
    expected = (1.959964 + 0.841621) * math.sqrt(0.02 / 1319)
    assert gsm8k.detectable_shift(1319, 26) == pytest.approx(expected, rel=0.01)
    assert gsm8k.detectable_shift(16, 0) > 0.2  # none seen is not none there


def test_power_is_what_the_detectable_shift_says():
    """Simulated: with a shift of that size the test finds B worse about as often as promised."""
    generator = np.random.default_rng(3)
    count, share = 1000, 0.10
    shift = gsm8k.detectable_shift(count, int(count * share))
    found = 0
    for _ in range(200):
        only_base, only_test, _ = generator.multinomial(
            count, [(share + shift) / 2, (share - shift) / 2, 1 - share]
        )
        found += stats.binomtest(int(only_test), int(only_base + only_test), 0.5).pvalue < 0.05
    assert 0.70 <= found / 200 <= 0.90


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is 3 + 4 = 7.\n#### 7", "7"),
        ("#### $1,234 dollars", "1234"),
        ("#### -2.50", "-2.5"),
        ("the answer is 12.", "12"),
        ("first 5, then 6", "6"),
        ("#### 8\n\nQuestion: what about 9?", "8"),
        ("#### .5", "0.5"),
        ("so it is ...5", "5"),
        ("#### 1234567.5", "1234567.5"),
        ("no idea", None),
        ("####", None),
    ],
)
def test_the_number_of_an_answer(text, number):
    assert gsm8k.final_number(text) == number


def test_problems_are_read_and_bad_lines_named(tmp_path: Path):
    file = tmp_path / "problems.jsonl"
    file.write_text('{"question": "q", "answer": "2 * 3 = <<2*3=6>>6\\n#### 6"}\n' * 3)
    read = gsm8k.load(file, 2)
    assert (len(read.problems), read.total, read.standard) == (2, 3, False)
    assert read.problems[0].solution == "2 * 3 = 6\n#### 6"
    for bad in ("{}", "[1]", "not json", '{"question": "q", "answer": "none"}'):
        file.write_text('{"question": "q", "answer": "#### 6"}\n' + bad + "\n")
        with pytest.raises(GateError, match="line 2"):
            gsm8k.load(file, None)
    file.write_text("")
    with pytest.raises(GateError, match="no problem"):
        gsm8k.load(file, None)
    assert gsm8k.prefix().count("Question:") == 4


def test_the_packages_own_texts_fill_every_row():
    texts = load_texts({})
    assert set(texts) == set(BUILT_IN)
    found = build_sequences(texts, characters, per_kind=4, length=64, seed=0)
    assert [s.kind for s in found[:3]] == ["prose", "code", "agent"]
    assert len(found) == 12
    assert all(len(s) == 64 == len(s.protocol) for s in found)
    assert all(any(s.protocol) == (s.kind == "agent") for s in found)
    assert found == build_sequences(texts, characters, per_kind=4, length=64, seed=0)
    assert found != build_sequences(texts, characters, per_kind=4, length=64, seed=1)
    assert len({s.ids for s in found}) == 12


def test_the_protocol_mark_covers_exactly_calls_json_and_fences():
    messages = [
        {"role": "user", "content": "look {here}"},
        {
            "role": "assistant",
            "content": "I look.\n```bash\nls\n```",
            "tool_calls": [{"function": {"name": "run", "arguments": '{"command": "ls"}'}}],
        },
        {"role": "tool", "content": '{"files": ["a"]}'},
        {"role": "tool", "content": "{broken"},
        {"role": "assistant", "content": [{"type": "text", "text": "done"}]},
    ]
    (document,) = parse_transcripts(json.dumps({"messages": messages}), "here")
    marked = [segment.text for segment in document if segment.protocol]
    assert marked == [
        "```bash\nls\n```",
        '\n<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>',
        '{"files": ["a"]}',
    ]
    (sequence,) = build_sequences({"a": [document]}, characters, per_kind=1, length=10_000, seed=0)
    shown = "".join(chr(i) for i, p in zip(sequence.ids, sequence.protocol, strict=True) if p)
    assert shown == "".join(marked)
    assert "".join(map(chr, sequence.ids)) == "".join(segment.text for segment in document)


def test_texts_come_from_paths(tmp_path: Path):
    plain = tmp_path / "book.txt"
    plain.write_text("first\n\x1e\nsecond\n\x1e\n\n")
    packed = tmp_path / "agents.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"messages": [{"role": "user", "content": "hi"}]}\n'))
    texts = load_texts({"prose": plain, "agent": packed})
    assert [len(documents) for documents in texts.values()] == [2, 1]
    bad = tmp_path / "bad.jsonl"
    for content, message in (
        (b'{"no": 1}\n', "line 1: no transcript"),
        (b"[" * 100_000, "line 1: no transcript"),
        (b"\xff\xfe", "not UTF-8"),
        (b"", "no text"),
    ):
        bad.write_bytes(content)
        with pytest.raises(GateError, match=message):
            load_texts({"agent": bad})
    broken = tmp_path / "broken.txt.gz"
    broken.write_bytes(b"no gzip")
    with pytest.raises(GateError, match="broken"):
        load_texts({"prose": broken})


def test_a_message_nested_without_end_is_text(tmp_path: Path):
    path = tmp_path / "agent.jsonl"
    message = {"role": "tool", "content": "[" * 100_000}
    path.write_text(json.dumps({"messages": [message]}) + "\n")
    (document,) = load_texts({"agent": path})["agent"]
    assert not any(segment.protocol for segment in document)


def test_line_separators_inside_a_message_do_not_end_the_line(tmp_path: Path):
    path = tmp_path / "agent.jsonl"
    line = json.dumps({"messages": [{"role": "user", "content": "one\u2028two\x85three"}]})
    raw = line.replace("\\u2028", "\u2028").replace("\\u0085", "\x85")
    path.write_text(raw + "\n", encoding="utf-8")
    (document,) = load_texts({"agent": path})["agent"]
    assert document[1].text == "one\u2028two\x85three"


@pytest.mark.parametrize("spoil", [lambda _: b"plain", lambda data: data[:10] + b"\xff" * 40])
def test_a_broken_archive_is_one_line(tmp_path: Path, spoil):
    path = tmp_path / "book.txt.gz"
    path.write_bytes(spoil(gzip.compress(b"some text\n" * 50)))
    with pytest.raises(GateError, match=r"--text prose="):
        load_texts({"prose": path})


@pytest.mark.parametrize("discordant", [0, 1, 3])
def test_few_discordant_problems_promise_no_power_that_the_exact_test_lacks(discordant):
    count = 200
    shift = gsm8k.detectable_shift(count, discordant)
    generator = np.random.default_rng(4)
    lost = generator.binomial(
        count, shift, size=400
    )  # every discordant one is a loss: the best case
    found = sum(stats.binomtest(0, int(n), 0.5).pvalue < gsm8k.ALPHA for n in lost if n)
    assert found >= 0.75 * 400


def test_a_text_hardly_longer_than_a_window_gives_few_sequences():
    """Copies of one window are one sample, and would be bootstrapped as many."""
    texts = {"prose": [(Segment("a line of prose\n" * 40 + "its end", False),)]}
    assert len(build_sequences(texts, characters, per_kind=32, length=600, seed=0)) == 1
