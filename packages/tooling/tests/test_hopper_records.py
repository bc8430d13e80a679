# SPDX-License-Identifier: Apache-2.0
"""The runner of benchmarks/hopper_records: lanes, limits, reasons; and that the list itself is runnable."""

import importlib.util
import json
import re
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "packages/tooling/benchmarks/hopper_records"

spec = importlib.util.spec_from_file_location("make_records", FOLDER / "make_records.py")
make_records = importlib.util.module_from_spec(spec)
sys.modules["make_records"] = make_records
spec.loader.exec_module(make_records)


def run(tmp_path, text, *arguments):
    jobs = tmp_path / "jobs.toml"
    jobs.write_text(text)
    return make_records.main(["--jobs", str(jobs), "--out", str(tmp_path / "out"), *arguments])


def result(tmp_path, name):
    return json.loads((tmp_path / "out" / name / "job.json").read_text())


def job(name, command, **more):
    lines = ["[[job]]", f'name = "{name}"', f"command = '''{command}'''"]
    more = {"limit": 30, **more}
    lines += [f"{key} = {json.dumps(value)}" for key, value in more.items()]
    return "\n".join(lines) + "\n"


def test_lanes_run_beside_each_other_and_quiet_jobs_alone(tmp_path):
    """Two lanes meet (each waits for the other's file); the quiet job finds both ended."""
    meet = "touch {{all}}/{mine}; for i in $(seq 200); do [ -e {{all}}/{other} ] && exit 0; sleep 0.05; done; exit 3"
    text = job("one", meet.format(mine="a", other="b"), lane="x")
    text += job("two", meet.format(mine="b", other="a"), lane="y")
    text += job("slow", "sleep 0.3; touch {all}/slow", lane="x")
    text += job("timing", "test -e {all}/slow", quiet=True)
    assert run(tmp_path, text) == 0
    assert result(tmp_path, "timing")["code"] == 0


def test_a_job_at_its_limit_is_killed_with_its_children(tmp_path):
    text = job("long", "(sleep 1; touch {all}/left) & sleep 60", limit=0.3)
    begin = time.monotonic()
    assert run(tmp_path, text) == 1
    assert time.monotonic() - begin < 20
    assert result(tmp_path, "long")["code"] is None
    time.sleep(1.2)
    assert not (tmp_path / "out/left").exists()


def test_what_cannot_run_says_why(tmp_path, capsys):
    text = job("input", "cat {model}") + job("gone", "cat {text}")
    text += (
        job("bad", "false") + job("behind", "true", after="bad") + job("late", "true", limit=1e9)
    )
    assert run(tmp_path, text, "--input", "text=/nowhere", "--seconds", "100") == 2
    out = capsys.readouterr().out
    assert "input: not run: --input model=PATH is missing" in out
    assert "gone: not run: no such file: text=/nowhere" in out
    assert "behind: not run: bad did not succeed" in out or "behind: not run" in out
    assert "late: not run: its limit of 1e+09 s does not fit" in out
    assert not (tmp_path / "out/late").exists()


def test_jobs_are_taken_up_again(tmp_path):
    text = job("count", "echo x >> {all}/counted") + job("verdict", "exit 2", accept=[0, 2])
    assert run(tmp_path, text) == 0
    assert run(tmp_path, text) == 0
    assert (tmp_path / "out/counted").read_text() == "x\n"
    assert run(tmp_path, text, "--again", "count") == 0
    assert (tmp_path / "out/counted").read_text() == "x\nx\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (job("a", "true") + job("a", "true"), "is there twice"),
        (job("a", "true", after="b"), "which does not stand before it"),
        (job("a", "true", color="red"), "unknown key color"),
        (job("a", "true", lane="x", quiet=True), "a quiet job has no lane"),
    ],
)
def test_a_bad_list_is_refused(tmp_path, text, says):
    with pytest.raises(ValueError, match=says):
        run(tmp_path, text)


def test_unknown_names_and_inputs_are_refused(tmp_path, capsys):
    for wrong in (["--only", "b"], ["--input", "nothing"]):
        with pytest.raises(SystemExit):
            run(tmp_path, job("a", "true"), *wrong)
    assert "no job b" in capsys.readouterr().err


def test_the_list_names_scripts_and_options_that_exist():
    """Every script, module and test file is there, and every option stands somewhere in the sources."""
    jobs = make_records.read_jobs(FOLDER / "jobs.toml")
    assert len(jobs) > 10
    sources = "".join(
        path.read_text()
        for folder in ("src", "benchmarks")
        for path in ROOT.glob(f"packages/*/{folder}/**/*.py")
    )
    for one in jobs:
        for call in re.split(r"&&|;", re.sub(r"'[^']*'", "TEXT", one.command)):
            words = call.split()
            if not words or words[0] != "{python}" or "-c" in words:
                continue
            if words[1] == "-m":
                assert importlib.util.find_spec(words[2]), (one.name, words[2])
            else:
                assert (ROOT / words[1]).exists(), (one.name, words[1])
            if words[2] == "pytest":
                assert all((ROOT / word).exists() for word in words if word.endswith(".py")), one
                continue
            for word in words:
                if word.startswith("--"):
                    stem = word.split("=")[0]
                    # An option of both arms is declared by its letter.
                    known = {stem, re.sub("-[ab]$", "-{letter}", stem)}
                    assert any(f'"{name}"' in sources for name in known), (one.name, word)
