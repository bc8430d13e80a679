# SPDX-License-Identifier: Apache-2.0
"""The workload: recording, scaling, gaps, choice of sessions, tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from itertools import pairwise
from pathlib import Path

import pytest

from numinous_tooling.gate import workload
from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.plan import ModelFacts, build_warmup, digest
from numinous_tooling.gate.workload import (
    Call,
    Recording,
    WorkloadSpec,
    build_workload,
    choose_sessions,
    load_recording,
    parse_recording,
    plan_turns,
    read_model,
    tool_gap_s,
)

SPEC = WorkloadSpec(sessions=4, turns=4, length_scale=1 / 16, speedup=16.0, seed=0)
MODEL = ModelFacts("model", 8192, tuple(range(1000, 3000)))


def test_recording_is_the_one_named() -> None:
    recordings = load_recording()
    assert len(recordings) == 500
    assert sum(len(recording.calls) for recording in recordings) == 20_163


def test_changed_recording_is_refused() -> None:
    data = (
        resources.files("numinous_tooling.gate").joinpath("data", workload.RECORDING).read_bytes()
    )
    with pytest.raises(GateError, match="was changed"):
        parse_recording(data[:-2] + b"\n")


def test_same_seed_same_requests() -> None:
    assert digest(build_workload(SPEC, MODEL, 1)) == digest(build_workload(SPEC, MODEL, 1))


def test_repeats_share_lengths_and_no_tokens() -> None:
    first, second = build_workload(SPEC, MODEL, 1), build_workload(SPEC, MODEL, 2)
    assert [(p.name, p.start_s, p.turns) for p in first] == [
        (p.name, p.start_s, p.turns) for p in second
    ]
    for one, two in zip(first, second, strict=True):
        equal = sum(a == b for a, b in zip(one.token_ids, two.token_ids, strict=True))
        assert equal < 0.02 * len(one.token_ids)
        assert one.token_ids[0] != two.token_ids[0]


def test_seed_changes_sessions() -> None:
    names = [{p.name for p in build_workload(replace(SPEC, seed=s), MODEL, 1)} for s in range(3)]
    assert names[0] != names[1] != names[2]


@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 16, 1 / 100])
def test_token_counts_are_exact(scale: float) -> None:
    model = replace(MODEL, context_tokens=131_072)
    plans = build_workload(replace(SPEC, length_scale=scale, turns=10), model, 1)
    recorded = {recording.name: recording for recording in load_recording()}
    for plan in plans:
        assert len(plan.token_ids) == plan.turns[-1].prompt_tokens
        for turn, call in zip(plan.turns, recorded[plan.name].calls, strict=False):
            assert turn.max_new_tokens == max(1, round(call.completion * scale))
            assert turn.prompt_tokens >= round(call.prompt * scale)


def test_drift_from_the_recording_is_below_a_percent() -> None:
    planned = recorded = 0
    for recording in load_recording():
        turns = plan_turns(recording, len(recording.calls), 1.0, 1.0)
        planned += sum(turn.prompt_tokens for turn in turns)
        recorded += sum(call.prompt for call in recording.calls)
    assert abs(planned / recorded - 1) < 0.01


def test_prompts_grow_past_the_planned_answer() -> None:
    for recording in load_recording()[:100]:
        turns = plan_turns(recording, len(recording.calls), 1 / 16, 16.0)
        for call, (before, after) in zip(recording.calls, pairwise(turns), strict=False):
            visible = max(0, call.completion - call.reasoning) / 16
            grown = after.prompt_tokens - before.prompt_tokens
            assert grown >= 1 + min(before.max_new_tokens, round(visible))


def test_shrinking_prompt_is_planned_as_growth() -> None:
    calls = (Call(1000, 100, 0, 0), Call(900, 10, 0, 5), Call(2000, 10, 0, 9))
    turns = plan_turns(Recording("x", calls), 3, 1.0, 1.0)
    assert [turn.prompt_tokens for turn in turns] == [1000, 1101, 2000]


def test_sessions_share_the_system_message_only() -> None:
    plans = build_workload(replace(SPEC, length_scale=1.0), replace(MODEL, context_tokens=65536), 1)
    shared = workload.SHARED_PREFIX_TOKENS
    assert len({plan.token_ids[:shared] for plan in plans}) == 1
    assert len({plan.token_ids[shared : shared + 8] for plan in plans}) == len(plans)


@pytest.mark.parametrize(
    ("interval_s", "completion", "gap_s"),
    [
        (4.0, 150, 1.5),  # 1.5 s latency and 1 s of generation are the model's
        (2.0, 300, 0.0),  # faster than the model is taken to be
        (600.0, 0, workload.MAX_GAP_S),
        (0.0, 0, 0.0),
    ],
)
def test_tool_gap(interval_s: float, completion: int, gap_s: float) -> None:
    assert tool_gap_s(interval_s, completion) == gap_s


def test_gaps_are_divided_by_the_speedup() -> None:
    calls = (Call(1000, 150, 0, 0), Call(2000, 10, 0, 10))
    turns = plan_turns(Recording("x", calls), 2, 1.0, 3.0)
    assert turns[0].gap_s == 0
    assert turns[1].gap_s == pytest.approx(7.5 / 3)


def test_sessions_fit_the_context() -> None:
    spec = replace(SPEC, length_scale=1.0, sessions=20)
    for plan in build_workload(spec, MODEL, 1):
        assert all(t.prompt_tokens + t.max_new_tokens < MODEL.context_tokens for t in plan.turns)


def test_too_small_context_is_one_clear_line() -> None:
    with pytest.raises(GateError, match=r"lower --sessions, --turns or --length-scale"):
        choose_sessions(load_recording(), replace(SPEC, length_scale=1.0), 256)


def test_warmup_has_tokens_of_its_own() -> None:
    plans = build_workload(SPEC, MODEL, 1)
    warmup = build_warmup(MODEL, plans, 2)
    assert [len(w.token_ids) for w in warmup] == [p.turns[0].prompt_tokens for p in plans[:2]]
    assert all(w.token_ids[:4] != p.token_ids[:4] for w in warmup for p in plans)


def write_model(folder: Path, vocab: object, **config: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    return str(folder)


def letters(number: int) -> str:
    return "".join(chr(97 + int(digit)) for digit in f"{number:04d}")


@pytest.mark.parametrize("mark", ["Ġ", "▁", ""])
def test_only_plain_words_are_drawn(tmp_path: Path, mark: str) -> None:
    vocab = {"<|im_end|>": 0, "<0x0A>": 1, "!": 2}
    vocab |= {mark + letters(number): 10 + number for number in range(300)}
    path = write_model(tmp_path, vocab, max_position_embeddings=2048, vocab_size=400)
    model = read_model(path)
    assert model.word_ids == tuple(range(10, 310))
    assert model.context_tokens == 2048
    assert read_model(path, context_limit=512).context_tokens == 512


def test_unigram_vocabulary(tmp_path: Path) -> None:
    vocab = [["<unk>", 0.0], *([letters(number), -1.0] for number in range(300))]
    path = write_model(
        tmp_path, vocab, text_config={"max_position_embeddings": 99, "vocab_size": 1}
    )
    model = read_model(path)
    assert model.word_ids == tuple(range(1, 301))
    assert model.context_tokens == 99


def test_without_words_the_middle_of_the_vocabulary_is_used(tmp_path: Path) -> None:
    path = write_model(tmp_path, {}, max_position_embeddings=2048, vocab_size=4000)
    assert read_model(path).word_ids == tuple(range(1000, 3000))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab_size": 4000}, "names no max_position_embeddings"),
        ({"max_position_embeddings": "many"}, "names no max_position_embeddings"),
        ({"vocab_size": 40, "max_position_embeddings": 9}, "no usable tokenizer.json"),
    ],
)
def test_unusable_models_are_named(tmp_path: Path, config: dict, message: str) -> None:
    with pytest.raises(GateError, match=message):
        read_model(write_model(tmp_path, {}, **config))
    for broken in ("[", "[]", "\ud800"):
        (tmp_path / "config.json").write_text(broken, errors="surrogatepass")
        with pytest.raises(GateError, match=r"config\.json (is no JSON|holds no JSON object)"):
            read_model(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(GateError, match=r"no config\.json"):
        read_model(str(tmp_path))
