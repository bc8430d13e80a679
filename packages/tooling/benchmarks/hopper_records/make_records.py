# SPDX-License-Identifier: Apache-2.0
"""Make the records of the engine on one Hopper GPU: a list of commands, run in lanes, with limits and logs.

    python packages/tooling/benchmarks/hopper_records/make_records.py --list
    python packages/tooling/benchmarks/hopper_records/make_records.py --out hopper --input prose=eval-prose.txt --input smollm2=/models/smollm2 …

`jobs.toml` beside it says what runs: a command with `{python}`, `{root}` (the checkout), `{out}` (the job's folder),
`{all}` (the folder of --out) and inputs; the shell's own braces are written twice. Jobs of a lane follow one another,
lanes run beside each other; a job with `quiet = true` is a timing and runs alone, when every lane is empty. `after`
names a job that has to end with 0 before; it is waited for. A job whose input is missing, whose `after` did not
succeed, or whose limit no longer fits into `--seconds` is not run, and the reason is printed. A finished job is not run
again in the same --out; `--again NAME` repeats it. Ctrl-C, SIGTERM or SIGHUP ends the jobs too; these run anew next time.
Of one --out there is one runner; what a killed one (SIGKILL) left running counts as it.

Each job leaves `log.txt` and `job.json` (command, exit code, seconds) in its folder; the records it makes are what its
command writes, by convention below `{all}/records`. A job with `gate = "accuracy"` (or another gate) is a run of it: `--out` and
its record are added here. Exit 0: all that were chosen ended as `accept` says (0 where it is
left out); 1: one did not; 2: one was not run or was cut by a signal.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import string
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
KILL_AFTER_S = 30.0  # a gate gives its servers up to 25 s to end
LOOK_S = 0.1
OWN = ("python", "root", "out", "all")
# Folders of --out that are no job's.
TAKEN = ("records", "models", "floors", "trees", "lock")
KINDS = {"name": str, "command": str, "limit": (int, float), "lane": str, "quiet": bool, "after": str, "accept": list, "env": dict, "gate": str}  # fmt: skip
# Behind the command of a gate. Its exit code is the verdict's, so a run that left no record needs one of its own.
RECORDED = (
    " --out {out}/gate; code=$?; {python} -m numinous_tooling gate record {out}/gate"
    " --evidence {all}/records/gate-KIND.jsonl || exit 3; exit $code"
)


@dataclass(frozen=True)
class Job:
    """One command of the list.

    Args:
        name: also of its folder.
        command: with placeholders; a shell runs it.
        limit: seconds until it is killed.
        lane: jobs of one lane follow one another.
        quiet: it runs alone.
        after: a job that has to succeed first.
        accept: exit codes that are a result (a gate's FAIL is one).
        env: further environment.
    """

    name: str
    command: str
    limit: float
    lane: str = ""
    quiet: bool = False
    after: str = ""
    accept: tuple[int, ...] = (0,)
    env: tuple[tuple[str, str], ...] = ()


def read_jobs(path: Path) -> list[Job]:
    """The jobs of a file, in its order; ValueError says what is wrong with one."""
    tables = tomllib.loads(path.read_text()).get("job")
    if not isinstance(tables, list) or not tables:
        raise ValueError("no [[job]]")
    jobs: dict[str, Job] = {}
    for table in tables:
        job = _read_job(table)
        if job.name in jobs:
            raise ValueError(f"job {job.name} is there twice")
        if job.after and job.after not in jobs:
            raise ValueError(f"job {job.name}: after {job.after}, which does not stand before it")
        if job.quiet and job.lane:
            raise ValueError(f"job {job.name}: a quiet job has no lane")
        if job.after and jobs[job.after].quiet and not job.quiet:
            raise ValueError(f"job {job.name}: after {job.after}, which is quiet and runs later")
        jobs[job.name] = job
    return list(jobs.values())


def _read_job(table: dict[str, Any]) -> Job:
    name = table.get("name")
    if strange := set(table) - set(KINDS):
        raise ValueError(f"job {name}: unknown key {', '.join(sorted(strange))}")
    if lacking := {"name", "command", "limit"} - set(table):
        raise ValueError(f"job {name}: without {', '.join(sorted(lacking))}")
    for key, value in table.items():
        if not isinstance(value, KINDS[key]) or (key == "limit" and not 0 < value < float("inf")):
            raise ValueError(f"job {name}: {key} = {value!r}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", table["name"]) or name in TAKEN:
        raise ValueError(f"job {name!r}: no name of a folder of its own")
    if not all(isinstance(code, int) for code in table.get("accept", ())):
        raise ValueError(f"job {name}: accept = {table['accept']!r}")
    if not all(isinstance(value, str) for value in table.get("env", {}).values()):
        raise ValueError(f"job {name}: env = {table['env']!r}")
    try:
        placeholders(table["command"])
    except ValueError as error:
        raise ValueError(f"job {name}: {error}; the shell's own braces are written twice") from None
    table = dict(table)
    kind = table.pop("gate", None)
    if kind is not None:
        table["command"] += RECORDED.replace("KIND", kind)
    accept = tuple(table.get("accept", (0,) if kind is None else (0, 1, 2)))
    return Job(**{**table, "accept": accept, "env": tuple(table.get("env", {}).items())})


def placeholders(command: str) -> set[str]:
    """Names in braces; ValueError at braces that hold anything else."""
    parts = [part for part in string.Formatter().parse(command) if part[1] is not None]
    for _, name, form, conversion in parts:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name or "") or form or conversion:
            raise ValueError(f"{{{name}}} is no placeholder")
    return {str(name) for _, name, _, _ in parts}


class Runner:
    """Runs jobs and keeps their results.

    Args:
        out: folder of all.
        inputs: name → path.
        seconds: after these no job is started that could not end in time.
        chosen: jobs that are going to be run.
        lock: what every job holds open, so that jobs outliving a runner keep the next one out.
    """

    def __init__(
        self, out: Path, inputs: dict[str, str], seconds: float, chosen: Sequence[Job], lock: int
    ) -> None:
        self.out, self.inputs, self.lock = out, inputs, lock
        self.ends = time.monotonic() + seconds
        self.printing = threading.Lock()
        self.results: dict[str, dict[str, Any]] = {}
        self.ended = {job.name: threading.Event() for job in chosen}
        self.stopped = False

    def run(self, job: Job) -> None:
        """Run it, unless it has run or cannot; the result is in its folder and printed."""
        try:
            self._run(job)
        except Exception as error:  # other lanes may wait for it
            self._keep(job, {"not_run": repr(error)}, f"not run: {error!r}")

    def _run(self, job: Job) -> None:
        folder = self.out / job.name
        if (kept := self._kept(job.name)) is not None:
            self._keep(job, kept, f"had run, {_ending(kept['code'])}")
            return
        refusal, command = self._prepared(job, folder)
        if refusal:
            self._keep(job, {"not_run": refusal}, f"not run: {refusal}")
            return
        folder.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        code = self._call(job, command, folder / "log.txt")
        if self.stopped:
            self._keep(job, {"not_run": "cut by a signal"}, "cut by a signal")
            return
        result = {"command": command, "code": code, "seconds": round(time.monotonic() - begin, 1)}
        half = folder / "job.json.half"
        half.write_text(json.dumps(result, indent=1) + "\n")
        half.replace(folder / "job.json")
        self._keep(job, result, f"{_ending(code)}, {result['seconds']} s")

    def _kept(self, name: str) -> dict[str, Any] | None:
        """What a job left; None where it has not ended, and where the file is no result."""
        with contextlib.suppress(OSError, ValueError):
            kept = json.loads((self.out / name / "job.json").read_text())
            if isinstance(kept, dict) and "code" in kept:
                return kept
        return None

    def good(self, job: Job) -> bool:
        return self.results.get(job.name, {}).get("code") in job.accept

    def _prepared(self, job: Job, folder: Path) -> tuple[str, str]:
        """(why it cannot run, its command)."""
        values = {
            "python": shlex.quote(sys.executable),
            "root": str(ROOT),
            "out": str(folder),
            "all": str(self.out),
            **self.inputs,
        }
        names = placeholders(job.command)
        if missing := sorted(names - set(values)):
            return f"--input {missing[0]}=PATH is missing", ""
        command = job.command.format(**values)
        gone = [f"{k}={v}" for k, v in self.inputs.items() if k in names and not Path(v).exists()]
        if gone:
            return f"no such file: {', '.join(gone)}", ""
        if job.after and (why := self._lacks(job.after)):
            return why, ""
        if self.stopped:
            return "cut by a signal", ""
        if time.monotonic() + job.limit > self.ends:
            return f"its limit of {job.limit:g} s does not fit into the time that is left", ""
        return "", " ".join(command.split())

    def _lacks(self, name: str) -> str:
        """Wait for a job of another lane; why what follows it cannot run, or nothing."""
        if name in self.ended:
            while not self.ended[name].wait(LOOK_S):
                if self.stopped:
                    break
            result = self.results.get(name, {})
        elif (kept := self._kept(name)) is not None:
            result = kept
        else:
            return f"{name} has not run and is not among the chosen"
        return "" if result.get("code") == 0 else f"{name} did not succeed"

    def _call(self, job: Job, command: str, log: Path) -> int | None:
        """The exit code, or None where the limit or a signal to the runner ended it."""
        ends = time.monotonic() + job.limit
        with log.open("ab") as sink:
            process = subprocess.Popen(
                command,
                shell=True,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **dict(job.env)},
                start_new_session=True,
                pass_fds=(self.lock,),
            )
            try:
                while time.monotonic() < ends and not self.stopped:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        return process.wait(LOOK_S)
                return None
            finally:
                self._end(process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End what is left of its process group: the shell ends at once, a gate has servers of its own to end."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            ends = time.monotonic() + KILL_AFTER_S
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
                while time.monotonic() < ends:
                    process.poll()  # a zombie is in its group
                    os.killpg(process.pid, 0)
                    time.sleep(LOOK_S / 2)
                continue
            return

    def _keep(self, job: Job, result: dict[str, Any], text: str) -> None:
        with self.printing:
            self.results[job.name] = result
            self.ended[job.name].set()
            print(f"{time.strftime('%H:%M:%S')} {job.name}: {text}", flush=True)


def _ending(code: int | None) -> str:
    return "killed at its limit" if code is None else f"exit {code}"


@contextlib.contextmanager
def one_runner(out: Path) -> Iterator[int]:
    """The open lock of a folder; BlockingIOError where another holds it."""
    with (out / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file.fileno()


@contextlib.contextmanager
def signals_stop(runner: Runner) -> Iterator[None]:
    """Jobs are sessions of their own, so that no signal to the runner reaches them."""

    def stop(number: int, frame: object) -> None:
        runner.stopped = True

    before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_all(runner: Runner, jobs: list[Job]) -> None:
    """Lanes beside each other, then quiet jobs one by one."""
    lanes: dict[str, list[Job]] = {}
    for job in jobs:
        if not job.quiet:
            lanes.setdefault(job.lane or job.name, []).append(job)

    def drain(lane: list[Job]) -> None:
        for job in lane:
            runner.run(job)

    threads = [threading.Thread(target=drain, args=(lane,)) for lane in lanes.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for job in jobs:
        if job.quiet:
            runner.run(job)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--jobs", type=Path, default=HERE / "jobs.toml")
    add("--out", type=Path, help="folder of logs and records; taken up again")
    add("--input", action="append", default=[], metavar="NAME=PATH")
    add("--only", default="", metavar="NAME,NAME", help="these jobs; left out: all")
    add("--skip", default="", metavar="NAME,NAME")
    add("--again", default="", metavar="NAME,NAME", help="run these although they have run")
    add(
        "--seconds",
        type=float,
        default=float("inf"),
        help="start nothing that could not end within",
    )
    add("--list", action="store_true", help="print the jobs and end")
    options = parser.parse_args(argv)
    try:
        jobs = read_jobs(options.jobs)
    except (OSError, ValueError) as error:
        parser.error(f"{options.jobs}: {error}")
    if options.list:
        for job in jobs:
            where = "alone" if job.quiet else f"lane {job.lane or job.name}"
            print(f"{job.name:24} {where:16} {job.limit:5.0f} s  {' '.join(job.command.split())}")
        return 0
    if options.out is None:
        parser.error("--out FOLDER is missing")
    if bad := [text for text in options.input if not text.partition("=")[2]]:
        parser.error(f"--input {bad[0]}: want NAME=PATH")
    inputs = {name: str(Path(path).expanduser().resolve()) for name, path in (text.split("=", 1) for text in options.input)}  # fmt: skip
    if own := sorted(set(OWN) & set(inputs)):
        parser.error(f"--input {own[0]}: the runner's own name")
    out = options.out.resolve()
    # Commands hold paths within quotes of their own.
    for path in (str(out), *inputs.values()):
        if shlex.quote(path) != path:
            parser.error(f"{path!r}: a shell would not take this path as it is; use a link")
    named = {key: set(filter(None, getattr(options, key).split(","))) for key in ("only", "skip", "again")}  # fmt: skip
    known = {job.name for job in jobs}
    if strange := set().union(*named.values()) - known:
        parser.error(f"no job {', '.join(sorted(strange))}; --list prints them")
    chosen = [job for job in jobs if (not named["only"] or job.name in named["only"]) and job.name not in named["skip"]]  # fmt: skip
    (out / "records").mkdir(parents=True, exist_ok=True)
    try:
        with one_runner(out) as lock:
            for name in named["again"]:
                (out / name / "job.json").unlink(missing_ok=True)
            runner = Runner(out, inputs, options.seconds, chosen, lock)
            with signals_stop(runner):
                run_all(runner, chosen)
    except BlockingIOError:
        parser.error(
            f"{out}: another runner is at work, or jobs of one that was killed are (fuser -v {out}/lock)"
        )
    if any("not_run" in runner.results.get(job.name, {"not_run": ""}) for job in chosen):
        return 2
    return 0 if all(runner.good(job) for job in chosen) else 1


if __name__ == "__main__":
    raise SystemExit(main())
