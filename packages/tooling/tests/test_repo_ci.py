# SPDX-License-Identifier: Apache-2.0
"""The check of a clean clone and its budget table speak of the same parts and of at most 45 minutes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from numinous_tooling.repo import __main__ as repo_main
from numinous_tooling.repo.checkout import find_checkout

ROOT = find_checkout(Path(__file__).parent).root
TODAY, FINISHED = 38, 45  # minutes


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


def test_no_test_is_left_out() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    chosen = re.findall(r"pytest -m (\w+|\"[\w ]+\")", script)
    assert sorted(chosen) == ['"not engine"', "engine"]


# Stands in for both runs of pytest: tells its process id, waits, says its closing line, exits as it is told.
STUB = """\
#!/usr/bin/env -S python3 -u
import os, sys, time

name = "engine" if sys.argv[-1] == "engine" else "others"
with open(f"{name}.pid", "w") as file:
    file.write(str(os.getpid()))
try:
    time.sleep(float(os.environ[f"{name}_s"]))
except KeyboardInterrupt:
    print(f"{name} interrupted")
    sys.exit(2)
print(f"== {name} closing ==")
sys.exit(int(os.environ.get(f"{name}_exit", "0")))
"""


def run_tail(folder: Path, **environment: str) -> subprocess.Popen[str]:
    """The end of the script, which runs gates and tests in two processes, with stubs in place of the gates and of Python."""
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    part = re.search(r"^part\(\) \{.*?^\}$", script, re.MULTILINE | re.DOTALL)
    assert part is not None
    tail = script[script.index("# Tests that start the engine, and") :]
    gates = 'short_gate() { sleep 0.2; return "${gate_exit:-0}"; }\nshort_accuracy() { :; }'
    (folder / "tail.sh").write_text(
        f"set -euo pipefail\nshared=stub\n{part.group()}\n{gates}\n{tail}", encoding="utf-8"
    )
    (folder / "stub").write_text(STUB, encoding="utf-8")
    (folder / "stub").chmod(0o755)
    return subprocess.Popen(
        ["bash", "tail.sh"],
        cwd=folder,
        env={**os.environ, "engine_s": "0", "others_s": "0", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell that was started without it cannot trap it: under nohup, or as a job in the background of a script.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize(
    ("engine", "others", "code", "last"),
    [
        ("0", "0", 0, "others"),
        ("0", "3", 3, "others"),
        ("1", "0", 1, "engine"),
        ("1", "3", 3, "others"),
        ("5", "0", 5, "engine"),
    ],
)
def test_exit_code_and_last_line(
    tmp_path: Path, engine: str, others: str, code: int, last: str
) -> None:
    process = run_tail(tmp_path, engine_exit=engine, others_exit=others, others_s="0.3")
    said, _ = process.communicate()
    assert process.returncode == code, said
    # The closing line of a run that failed, where one did.
    assert said.splitlines()[-1] == f"== {last} closing ==", said
    assert said.index("engine closing") < said.index("others closing")


@pytest.mark.parametrize(
    "whole_group", [True, False], ids=["ctrl-c", "only the script is terminated"]
)
def test_interrupt_leaves_nothing_running(tmp_path: Path, whole_group: bool) -> None:
    # Where only the script is told, it hears it once the run in the foreground is over.
    process = run_tail(tmp_path, engine_s="60" if whole_group else "3", others_s="60")
    pids = [tmp_path / "engine.pid", tmp_path / "others.pid"]
    while not all(file.exists() and file.read_text("utf-8") for file in pids):
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.2)  # until the stubs wait
    if whole_group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.terminate()
    said, _ = process.communicate(timeout=30)
    assert process.returncode == (130 if whole_group else 143), said
    for file in pids:
        assert not Path("/proc", file.read_text("utf-8")).exists(), f"{file.stem} still runs"


def test_a_gate_that_fails_ends_the_check_and_what_runs_beside_it(tmp_path: Path) -> None:
    process = run_tail(tmp_path, gate_exit="4", others_s="60")
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 4, said
    assert said.splitlines()[-1].endswith("exit 4"), said
    assert not (tmp_path / "engine.pid").exists(), said
    assert not Path("/proc", (tmp_path / "others.pid").read_text("utf-8")).exists(), said


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
