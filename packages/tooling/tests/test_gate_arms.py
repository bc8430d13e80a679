# SPDX-License-Identifier: Apache-2.0
"""Arms: environment, flags and commands of the servers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from numinous_tooling.gate import serving as gate_serving
from numinous_tooling.gate.arms import (
    ArmOptions,
    build_arms,
    flag_name,
    flag_value,
    parse_features,
    parse_order,
    server_command,
    server_environment,
)
from numinous_tooling.gate.errors import GateError

OPTIONS = ArmOptions(
    features=("scheduler.decode_burst",),
    python_a="py-a",
    python_b="py-b",
    env_a={},
    env_b={"EXTRA": "1"},
    flags_all=("--all",),
    flags_a=(),
    flags_b=("--only-b",),
    flags_c=(),
    device_env={"SGLANG_PLATFORM": "numinous-cpu"},
    device_flags=("--dtype", "float32"),
)


def test_feature_is_the_only_difference() -> None:
    arms = build_arms(replace(OPTIONS, env_b={}, flags_b=()))
    assert arms["A"].flags == arms["B"].flags
    assert "--num-continuous-decode-steps" in arms["A"].flags
    different = set(arms["A"].env.items()) ^ set(arms["B"].env.items())
    assert different == {
        ("SGLANG_PLUGINS", "numinous-none"),
        ("NUMINOUS_SCHEDULER_DECODE_BURST", "1"),
    }


def test_options_reach_their_arm() -> None:
    arms = build_arms(replace(OPTIONS, flags_c=("--prefill-decode-interval", "16")))
    assert arms["B"].flags[-2:] == ("--all", "--only-b")
    assert arms["B"].env["EXTRA"] == "1"
    assert (arms["A"].python, arms["B"].python, arms["C"].python) == ("py-a", "py-b", "py-a")
    assert arms["C"].flags[-2:] == ("--prefill-decode-interval", "16")
    assert arms["C"].env == arms["A"].env
    assert arms["C"].features == ()
    assert "C" not in build_arms(OPTIONS)


def test_a_third_arm_overrides_the_flags_of_all() -> None:
    """A yardstick names another backend than `--flags-all` does; the engine takes the last."""
    chosen = replace(
        OPTIONS, flags_all=("--attention-backend", "triton"), flags_c=("--attention-backend", "fa3")
    )
    backends = {
        letter: flag_value(arm.flags, "--attention-backend")
        for letter, arm in build_arms(chosen).items()
    }
    assert backends == {"A": "triton", "B": "triton", "C": "fa3"}


def test_caller_settings_do_not_leak() -> None:
    caller = {"PATH": "/bin", "NUMINOUS_KV4_X": "1", "SGLANG_PLUGINS": "other", "SGLANG_USE_X": "1"}
    arms = build_arms(OPTIONS)
    patched = server_environment(arms["B"], caller, "/state")
    assert "NUMINOUS_KV4_X" not in patched
    assert "SGLANG_PLUGINS" not in patched
    assert (patched["PATH"], patched["SGLANG_USE_X"]) == ("/bin", "1")
    assert patched["NUMINOUS_STATE_DIR"] == "/state"
    assert server_environment(arms["A"], caller, "/state")["SGLANG_PLUGINS"] == "numinous-none"


def test_server_command() -> None:
    arm = replace(build_arms(OPTIONS)["A"], flags=("--x",))
    template = ("{python}", "-m", "server", "--at={port}", "{model}")
    command = server_command(arm, template, "/models/{odd}", 7)
    assert command == ["py-a", "-m", "server", "--at=7", "/models/{odd}", "--x"]


def test_flag_value_takes_the_last() -> None:
    flags = ["--context-length", "8192", "--x", "--context-length=4096"]
    assert flag_value(flags, "--context-length") == "4096"
    assert flag_value(flags, "--y") is None


def test_features() -> None:
    assert parse_features("a.b, c.d_e") == ("a.b", "c.d_e")
    assert parse_features("none") == ()
    assert flag_name("scheduler.decode_burst") == "NUMINOUS_SCHEDULER_DECODE_BURST"
    for wrong in ("", "burst", "a.b,none", "a.b.c", "a b.c"):
        with pytest.raises(GateError, match="--features"):
            parse_features(wrong)


def test_order() -> None:
    assert parse_order("abba", with_c=False) == "ABBA"
    assert parse_order("ABCCBA", with_c=True) == "ABCCBA"
    for wrong, with_c in (
        ("ABCA", False),
        ("AAA", False),
        ("", False),
        ("ABBA", True),
        ("AXB", True),
    ):
        with pytest.raises(GateError, match="--order"):
            parse_order(wrong, with_c=with_c)


def test_a_declared_trade_widens_only_its_metric_and_yields_to_the_user() -> None:
    pytest.importorskip("numinous_scheduler", reason="needs a feature that declares a trade")
    trades = gate_serving._declared_trades(["scheduler.decode_burst"])
    assert trades == {"ttft": 1.0}
    assert gate_serving._declared_trades([]) == {}
    assert gate_serving._tolerances([], 0.05, trades) == {
        "tok_s_user": 0.05,
        "ttft": 1.0,
        "tpot": 0.05,
    }
    assert gate_serving._tolerances(["ttft=0.2"], 0.05, trades)["ttft"] == 0.2
