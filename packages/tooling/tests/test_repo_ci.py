# SPDX-License-Identifier: Apache-2.0
"""The check of a clean clone and its budget table speak of the same parts and of at most 45 minutes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from numinous_tooling.repo import __main__ as repo_main
from numinous_tooling.repo.checkout import find_checkout

ROOT = find_checkout(Path(__file__).parent).root
TODAY, FINISHED = 43, 45  # minutes


def budget() -> dict[str, float]:
    text = (ROOT / "docs/ci-budget.md").read_text(encoding="utf-8")
    return {
        name: float(minutes)
        for name, minutes in re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", text, re.MULTILINE)
    }


def test_sum_of_the_budget() -> None:
    text = (ROOT / "docs/ci-budget.md").read_text(encoding="utf-8")
    assert f"take {FINISHED} minutes" in text.replace("\n", " ")
    assert sum(budget().values()) <= TODAY <= FINISHED


def test_parts_are_those_of_the_script() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    # A part may stand in both branches of a condition.
    parts = dict.fromkeys(re.findall(r"^ *part ([\w-]+) ", script, re.MULTILINE))
    assert [*parts, "test-cpu"] == list(budget())
    assert script.rstrip().endswith('cat "$others"\nexit "$code"'), (
        "pytest's closing line must be the last one printed"
    )


def test_no_test_is_left_out() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    chosen = re.findall(r"pytest -m (\w+|\"[\w ]+\")", script)
    assert sorted(chosen) == ['"not engine"', "engine"]


def test_script_is_valid_bash() -> None:
    subprocess.run(["bash", "-n", ".ci/run"], cwd=ROOT, check=True)


def test_the_sessions_name_commands_that_exist() -> None:
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    named = set(re.findall(r'"numinous_tooling\.repo", "([\w-]+)"', noxfile))
    assert named == {"lint", "release-check", "build", "new-package"}
    for command in named:
        with pytest.raises(SystemExit) as done:
            repo_main.main([command, "--help"])
        assert done.value.code == 0, command
