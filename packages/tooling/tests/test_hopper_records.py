# SPDX-License-Identifier: Apache-2.0
"""The runner of benchmarks/hopper_records: lanes, limits, reasons; and that the list itself is runnable."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
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
    assert "behind: not run: bad did not succeed" in out
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
        (
            job("a", "true", after="b") + job("b", "true", after="a"),
            "which does not stand before it",
        ),
        (job("a", "true", color="red"), "unknown key color"),
        (job("a", "true", lane="x", quiet=True), "a quiet job has no lane"),
        (
            job("a", "true", quiet=True) + job("b", "true", after="a"),
            "which is quiet and runs later",
        ),
        (job("../a", "true"), "no name of a folder of its own"),
        (job("records", "true"), "no name of a folder of its own"),
        (job("a", "echo ${HOME}x{}"), "{} is no placeholder"),
        (job("a", "echo {x.y}"), "{x.y} is no placeholder"),
        (job("a", "echo {x"), "braces are written twice"),
        (job("a", "true", limit="9"), "limit = '9'"),
        (job("a", "true", accept=0), "accept = 0"),
        ('[[job]]\nname = "a"', "without command, limit"),
        ("job = 3", "no [[job]]"),
        ("[[job", "jobs.toml: Expected"),
    ],
)
def test_a_bad_list_is_refused(tmp_path, capsys, text, says):
    with pytest.raises(SystemExit):
        run(tmp_path, text)
    assert says in capsys.readouterr().err


def test_the_shells_own_braces(tmp_path):
    assert run(tmp_path, job("a", "x=5; echo ${{x}} > {all}/five")) == 0
    assert (tmp_path / "out/five").read_text() == "5\n"


def test_what_follows_waits_for_another_lane(tmp_path):
    text = job("model", "sleep 0.5; touch {all}/model", lane="models")
    text += job("gate", "test -e {all}/model", lane="gates", after="model")
    assert run(tmp_path, text) == 0


def test_one_job_after_another_that_had_run(tmp_path, capsys):
    text = job("model", "true") + job("gate", "true", after="model")
    assert run(tmp_path, text, "--only", "gate") == 2
    assert "model has not run and is not among the chosen" in capsys.readouterr().out
    assert run(tmp_path, text, "--only", "model") == 0
    assert run(tmp_path, text, "--only", "gate") == 0


@pytest.mark.parametrize("half", ["", '{"command": "true", "co', "[]", "{}"])
def test_half_a_result_is_none(tmp_path, half):
    (tmp_path / "out/a").mkdir(parents=True)
    (tmp_path / "out/a/job.json").write_text(half)
    assert run(tmp_path, job("a", "touch {all}/ran")) == 0
    assert (tmp_path / "out/ran").exists()
    assert result(tmp_path, "a")["code"] == 0


def test_a_lane_that_breaks_says_so_and_stops_no_other(tmp_path, capsys):
    """The folder of a job is a file; what waits for it does not wait for ever."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/a").write_text("")
    text = job("a", "true", lane="x") + job("b", "true", lane="y", after="a")
    assert run(tmp_path, text + job("c", "true", quiet=True)) == 2
    out = capsys.readouterr().out
    assert "a: not run: FileExistsError" in out
    assert "b: not run: a did not succeed" in out
    assert "c: exit 0" in out


def test_inputs_are_paths_of_the_caller(tmp_path, capsys, monkeypatch):
    """Commands run in the checkout."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prose.txt").write_text("once\n")
    assert run(tmp_path, job("a", "cp {prose} {all}/copy"), "--input", "prose=prose.txt") == 0
    assert (tmp_path / "out/copy").read_text() == "once\n"
    for wrong in ("out=x", "prose=two words"):
        with pytest.raises(SystemExit):
            run(tmp_path, job("a", "cp {prose} {all}/copy"), "--input", wrong)
    errors = capsys.readouterr().err
    assert "--input out: the runner's own name" in errors
    assert "two words': a shell would not take this path as it is" in errors


def script(tmp_path, *lines):
    path = tmp_path / "script.sh"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_children_that_do_not_listen_are_killed(tmp_path, monkeypatch):
    """The shell has ended; what it left ignores SIGTERM."""
    monkeypatch.setattr(make_records, "KILL_AFTER_S", 0.5)
    path = script(tmp_path, "trap '' TERM", "touch deaf", "sleep 2", "touch left", "sleep 60")
    here = f"cd {tmp_path}; sh {path} & cd {tmp_path}; while [ ! -e deaf ]; do sleep 0.05; done"
    assert run(tmp_path, job("leaves", here)) == 0
    time.sleep(2.2)
    assert not (tmp_path / "left").exists()


def test_a_gate_has_time_to_end_its_servers(tmp_path):
    """The shell around it ends at SIGTERM at once, and what it runs needs a moment."""
    ending = "trap 'sleep 0.7; touch ended; exit 0' TERM"
    path = script(tmp_path, ending, "while :; do sleep 0.05; done")
    assert (
        run(tmp_path, job("gate", f"cd {tmp_path}; sh {path}; code=$?; exit $code", limit=2)) == 1
    )
    assert (tmp_path / "ended").exists()


@pytest.fixture
def runner(tmp_path):
    """Start the runner as a process of its own."""
    started = []

    def start(text):
        jobs = tmp_path / "jobs.toml"
        jobs.write_text(text)
        command = [sys.executable, FOLDER / "make_records.py", "--jobs", jobs, "--out", tmp_path / "out"]  # fmt: skip
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))  # fmt: skip
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        process.stdout.close()


def appears(path):
    ends = time.monotonic() + 20
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < ends, path
        time.sleep(0.02)
    return int(path.read_text())


def gone(process):
    ends = time.monotonic() + 20
    while time.monotonic() < ends:
        try:
            os.kill(process, 0)
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


LASTING = job("a", "echo $$ > {all}/pid; sleep 60; true", lane="x")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_jobs_and_starts_no_more(tmp_path, runner, number):
    more = job("b", "touch {all}/b", lane="x") + job("c", "touch {all}/c", quiet=True)
    process = runner(LASTING + more)
    job_process = appears(tmp_path / "out/pid")
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 2, out
    assert gone(job_process)
    assert out.count("cut by a signal") == 3
    assert not {"b", "c"} & {path.name for path in (tmp_path / "out").iterdir()}
    # It is no result: the same command takes it up again.
    assert not (tmp_path / "out/a/job.json").exists()


def test_there_is_one_runner_and_jobs_of_a_killed_one_count_as_it(tmp_path, runner, capsys):
    process = runner(LASTING)
    job_process = appears(tmp_path / "out/pid")
    for kill in (False, True):
        if kill:
            process.kill()
            process.wait()
        with pytest.raises(SystemExit):
            run(tmp_path, job("b", "true"))
        assert (
            "another runner is at work, or jobs of one that was killed" in capsys.readouterr().err
        )
    os.killpg(job_process, signal.SIGKILL)
    assert gone(job_process)
    ends = time.monotonic() + 20
    while time.monotonic() < ends:
        with contextlib.suppress(SystemExit):
            assert run(tmp_path, job("b", "true")) == 0
            return
        time.sleep(0.05)
    pytest.fail("the lock is still held")


def test_unknown_names_and_inputs_are_refused(tmp_path, capsys):
    for wrong in (["--only", "b"], ["--input", "nothing"]):
        with pytest.raises(SystemExit):
            run(tmp_path, job("a", "true"), *wrong)
    assert "no job b" in capsys.readouterr().err


def test_the_list_names_scripts_and_options_that_exist():
    """Every script, module and test file is there, and every option stands somewhere in the sources."""
    jobs = make_records.read_jobs(FOLDER / "jobs.toml")
    assert len(jobs) > 10
    for one in jobs:
        # A gate that broke leaves no record, and its own exit codes are those of a verdict.
        if "gate record" in one.command:
            recorded = one.command.count("|| exit 3; exit $code")
            assert recorded == one.command.count("gate record"), one.name
            assert 3 not in one.accept
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
