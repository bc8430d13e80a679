# SPDX-License-Identifier: Apache-2.0
"""The state of an aborted run: what is kept, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("httpx")
pytest.importorskip("scipy")

from numinous_tooling.gate.client import RequestRecord
from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.measures import ArmRun
from numinous_tooling.gate.resume import (
    RECORDS_FILE,
    STATE_FILE,
    RunState,
    check_same,
    load_state,
    normal,
    write_records,
)

SETTINGS = {"order": "ABBA", "arms": {"A": {"flags": ("--x",)}}, "requests": {1: "abc"}}


def make_run(index: int) -> ArmRun:
    records = [
        RequestRecord("s", turn, 9, 2, "d", 0.5, 1.5, 2, 3, ((0.1, 1), (0.2, 2)), None, 9, "stop")
        for turn in range(2)
    ]
    counters = {"word.name": {"engaged": 3}}
    return ArmRun(
        index, "AB"[index], 1, records, 2.0, 0.01, 0.02, 0.5, counters, {"queue": {"max": 1.0}}, 0.1
    )


@pytest.fixture
def aborted(tmp_path: Path) -> Path:
    """A folder whose run broke off in its second slot."""
    state = RunState(normal(SETTINGS), "gate --x", 7, [{"run": "A1"}], [make_run(0)])
    state.save(tmp_path)
    with (tmp_path / RECORDS_FILE).open("w") as file:
        for index in range(2):
            write_records(file, make_run(index))
        file.write('{"run":1,"arm":"B","sess')
    return tmp_path


def test_line_that_was_being_written_may_look_like_a_whole_one(aborted: Path) -> None:
    with (aborted / RECORDS_FILE).open("a") as file:
        file.write('ion":"a","error":"HTTP 500: {}')
    assert load_state(aborted).runs == [make_run(0)]


@pytest.mark.parametrize("settings", [None, [], "x"])
def test_state_without_settings_is_damaged(aborted: Path, settings: object) -> None:
    document = json.loads((aborted / STATE_FILE).read_text())
    (aborted / STATE_FILE).write_text(json.dumps(document | {"settings": settings}))
    with pytest.raises(GateError, match="is damaged"):
        load_state(aborted)


def test_kept_records_are_replaced_as_a_whole(aborted: Path) -> None:
    state = load_state(aborted)
    state.save_records(aborted)
    assert load_state(aborted).runs == [make_run(0)]
    assert len((aborted / RECORDS_FILE).read_text().splitlines()) == 2
    assert not (aborted / (RECORDS_FILE + ".new")).exists()


def test_finished_slots_come_back_whole(aborted: Path) -> None:
    state = load_state(aborted)
    assert state.runs == [make_run(0)]
    assert state.slots == [{"run": "A1"}]
    assert (state.repeat_base, state.command) == (7, "gate --x")
    check_same(state, SETTINGS, aborted)


@pytest.mark.parametrize(
    "changed",
    [
        {**SETTINGS, "order": "ABAB"},
        {**SETTINGS, "arms": {"A": {"flags": ("--y",)}}},
        {**SETTINGS, "requests": {1: "abd"}},
        {**SETTINGS, "new": 1},
        {"order": "ABBA"},
    ],
)
def test_other_settings_are_refused_with_the_command_that_fits(
    aborted: Path, changed: dict
) -> None:
    with pytest.raises(
        GateError, match=r"was .* and is now .*resume with the options of: gate --x"
    ):
        check_same(load_state(aborted), changed, aborted)


def test_complete_run_is_refused(aborted: Path) -> None:
    load_state(aborted).save(aborted, complete=True)
    with pytest.raises(GateError, match="the run is complete"):
        load_state(aborted)


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GateError, match="only a run that has begun can be resumed"):
        load_state(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', "null"])
def test_damaged_state_is_refused(aborted: Path, text: str) -> None:
    (aborted / STATE_FILE).write_text(text)
    with pytest.raises(GateError, match="is damaged"):
        load_state(aborted)


def test_state_of_another_version_is_refused(aborted: Path) -> None:
    document = json.loads((aborted / STATE_FILE).read_text())
    (aborted / STATE_FILE).write_text(json.dumps(document | {"schema": 99}))
    with pytest.raises(GateError, match="has schema 99"):
        load_state(aborted)
