# SPDX-License-Identifier: Apache-2.0
"""The failure rule of boot, on the stand-in engine: whatever goes wrong, one line and no silent stock."""

from __future__ import annotations

from pathlib import Path

import pytest

TOPIC = """
import os
from numinous_tooling.patching import Feature, Hook, Pin, Registration
from numinous_tooling.patching.engine import find_engine
from numinous_tooling.patching.pins import digest_in

M = "sglang.srt.things:"
CASE = os.environ.get("CASE", "")


def run():
    if CASE == "run":
        raise ValueError("from run")


def verify():
    if CASE == "verify":
        raise ValueError("from verify")
    return "it is not there" if CASE == "absent" else None


def judge(command):
    if CASE == "judge":
        raise KeyError("no_such_argument")
    return ["no"] if command.given.get("bad") else []


def around(original, x, y=1):
    return original(x, y) * 100


def other(original, self, x):
    return original(self, x) * 100


def hook(name, call):
    target = M + name
    return Hook(id="moe." + call, target=target, kind="around", call="topic:" + call, roles=("main",),
                pins=(Pin(target, {"now": digest_in(find_engine(), target)}),))


def features():
    if CASE == "features":
        raise RuntimeError("from features")
    registration = Registration(id="moe.t.00", run="topic:run", verify="topic:verify", roles=("main",))
    yield Feature(id="moe.t", sentence="", arch={}, judge="topic:judge", patches=(registration, hook("plain", "around")))
    yield Feature(id="moe.u", sentence="", arch={}, patches=(hook("Box.method", "other"),))
"""

BOOT = """
import os, sys
from numinous_tooling.patching import Feature, boot
from numinous_tooling.patching.serve_command import ServeCommand
boot.CORE = Feature(id="tooling.core", sentence="", arch={}, patches=())  # its targets are the real engine's
boot.plugin()
import sglang.srt.things as t
"""


@pytest.fixture
def site(fake_engine: Path) -> Path:
    """The stand-in engine with a topic package beside it."""
    (fake_engine / "topic.py").write_text(TOPIC)
    info = fake_engine / "numinous_topic-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: numinous-topic\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[numinous.features]\ntopic = topic:features\n")
    return fake_engine


def test_in_place(site, run_in):
    done = run_in(
        site, BOOT + "assert t.plain(1) == 200 and t.Box().method(1) == 4", NUMINOUS_MOE_T="1"
    )
    assert "main: moe.t in place" in done.stderr


def test_no_flag_no_trace(site, run_in):
    code = BOOT + "assert t.plain(1) == 2 and boot._boot is None and 'topic' not in sys.modules"
    assert run_in(site, code).stderr == ""


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("run", "ValueError: from run"),
        ("verify", "ValueError: from verify"),
        ("absent", "it is not there"),
        ("features", "cannot be loaded (RuntimeError: from features)"),
    ],
)
def test_any_exception_ends_the_process_in_one_line(site, run_in, case, text):
    done = run_in(site, BOOT, expect=1, NUMINOUS_MOE_T="1", CASE=case)
    (line,) = done.stderr.splitlines()
    assert line.startswith("numinous: ")
    assert text in line
    assert "moe.t" in line or case == "features", "it names the feature"
    done = run_in(
        site, BOOT + "assert t.plain(1) == 2", NUMINOUS_MOE_T="1", CASE=case, NUMINOUS_STRICT="0"
    )
    assert "WARNING: serving stock instead" in done.stderr


def test_a_refused_launch_can_be_corrected_in_the_same_process(site, run_in):
    run_in(
        site,
        BOOT
        + """
try:
    boot.judge_launch(ServeCommand({"bad": True}))
except SystemExit as error:
    assert "moe.t: no" in str(error)
else:
    raise AssertionError("not refused")
assert boot.DROPPED not in os.environ, "children of the next attempt must not be told to serve stock"
boot.judge_launch(ServeCommand({}))
assert t.plain(1) == 200
""",
        NUMINOUS_MOE_T="1",
    )


def test_a_failing_judge_and_ray_refuse(site, run_in):
    done = run_in(
        site,
        BOOT + "boot.judge_launch(ServeCommand({}))",
        expect=1,
        NUMINOUS_MOE_T="1",
        CASE="judge",
    )
    assert "its judge failed (KeyError" in done.stderr
    done = run_in(
        site,
        BOOT + "boot.judge_launch(ServeCommand({'use_ray': True}))",
        expect=1,
        NUMINOUS_MOE_U="1",
    )
    assert "moe.u: --use-ray" in done.stderr


def test_not_strict_drops_only_what_was_refused(site, run_in):
    done = run_in(
        site,
        BOOT
        + """
boot.judge_launch(ServeCommand({"bad": True}))
assert t.plain(1) == 2, "refused"
assert t.Box().method(1) == 400, "kept"
assert os.environ[boot.DROPPED] == "moe.t"
""",
        NUMINOUS_MOE_T="1",
        NUMINOUS_MOE_U="1",
        NUMINOUS_STRICT="0",
    )
    assert "main: moe.u in place" in done.stderr


def test_a_child_never_serves_stock_among_patched_ones(site, run_in):
    code = BOOT.replace("boot.plugin()", "boot.boot_process('scheduler')")
    done = run_in(
        site, code, expect=0, NUMINOUS_MOE_T="1", NUMINOUS_STRICT="0", NUMINOUS_DROPPED="moe.t"
    )
    assert done.stderr == ""
    done = run_in(site, code, expect=1, NUMINOUS_MOE_T="maybe", NUMINOUS_STRICT="0")
    assert "is neither on" in done.stderr


def test_the_main_process_ignores_what_its_parent_dropped(site, run_in):
    run_in(site, BOOT + "assert t.plain(1) == 200", NUMINOUS_MOE_T="1", NUMINOUS_DROPPED="moe.t")


def test_an_unusable_state_folder_ends_the_start(site, run_in, tmp_path):
    (tmp_path / "file").write_text("")
    done = run_in(
        site, BOOT, expect=1, NUMINOUS_MOE_T="1", NUMINOUS_STATE_DIR=str(tmp_path / "file")
    )
    (line,) = done.stderr.splitlines()
    assert "set NUMINOUS_STATE_DIR" in line


def test_schedulers_that_never_booted_are_noticed(site, run_in):
    code = BOOT + "boot.prove_children([os.getpid()]); boot.prove_children([1])"
    done = run_in(site, code, expect=1, NUMINOUS_MOE_T="1")
    assert "engine process 1 never booted numinous" in done.stderr
