# SPDX-License-Identifier: Apache-2.0
"""Flags and options: what is on, and every way to get it wrong."""

from __future__ import annotations

import pytest

from numinous_tooling.patching import Feature, Option, PatchError, flags

WAIT = Option("NUMINOUS_SCHEDULER_A_WAIT_MS", "float", 5.0, "Wait.", minimum=0)
PATH = Option("NUMINOUS_SCHEDULER_A_PATH", "str", "old", "Path.", choices=("old", "new"))
A = Feature(id="scheduler.a", sentence="", arch={}, patches=(), options=(WAIT, PATH))
B = Feature(id="scheduler.b", sentence="", arch={}, patches=(), requires=("scheduler.a",))
C = Feature(id="kv4.c", sentence="", arch={}, patches=(), conflicts=("scheduler.a",))
ALL = [A, B, C]


def on(**environ: str) -> list[str]:
    return [feature.id for feature in flags.enabled(ALL, environ)]


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_on(text):
    assert on(NUMINOUS_SCHEDULER_A=text) == ["scheduler.a"]


@pytest.mark.parametrize("text", ["0", "false", "No", "off", "", "  "])
def test_off(text):
    assert on(NUMINOUS_SCHEDULER_A=text) == []


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"NUMINOUS_SCHEDULER_A": "2"}, "neither on"),
        ({"NUMINOUS_SCHEDULER_AA": "1"}, "did you mean NUMINOUS_SCHEDULER_A?"),
        ({"NUMINOUS_QQQ": "1"}, "no installed feature or option"),
        ({"NUMINOUS_SCHEDULER_B": "1"}, "requires scheduler.a"),
        ({"NUMINOUS_KV4_C": "1", "NUMINOUS_SCHEDULER_A": "1"}, "exclude each other"),
        ({"NUMINOUS_SCHEDULER_A": "1", WAIT.name: "soon"}, "is not a number"),
        ({"NUMINOUS_SCHEDULER_A": "1", WAIT.name: "-1"}, "out of range"),
        ({"NUMINOUS_SCHEDULER_A": "1", WAIT.name: "nan"}, "out of range"),
        ({"NUMINOUS_SCHEDULER_A": "1", WAIT.name: "inf"}, "out of range"),
        ({"NUMINOUS_SCHEDULER_A": "1", PATH.name: "newest"}, "'newest' is none of old, new"),
    ],
)
def test_refused_in_one_line(environ, text):
    with pytest.raises(PatchError) as caught:
        flags.enabled(ALL, environ)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options():
    assert flags.option_value(WAIT, {}) == 5.0
    assert flags.option_value(WAIT, {WAIT.name: "7.5"}) == 7.5
    assert [flags.option_value(PATH, {PATH.name: text}) for text in ("", "new")] == ["old", "new"]
    assert on(NUMINOUS_SCHEDULER_A="0", NUMINOUS_SCHEDULER_A_WAIT_MS="3") == []


def test_a_stock_process_pays_one_scan():
    assert not flags.any_set({"PATH": "x", "NUMINOUS_STATE_DIR": "/x", "NUMINOUS_STRICT": "1"})
    assert flags.any_set({"NUMINOUS_SCHEDULER_A": "0"})


def test_feature_declarations_are_checked():
    with pytest.raises(ValueError, match="want <word>"):
        Feature(id="nonsense.x", sentence="", arch={}, patches=())
    with pytest.raises(ValueError, match="evidence words"):
        Feature(id="scheduler.x", sentence="", arch={"sm90": "probably"}, patches=())
    assert A.flag == "NUMINOUS_SCHEDULER_A"
