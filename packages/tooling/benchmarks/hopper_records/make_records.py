# SPDX-License-Identifier: Apache-2.0
"""Make the records of the engine on one Hopper GPU: a list of commands, run in lanes, with limits and logs.

    python packages/tooling/benchmarks/hopper_records/make_records.py --list
    python packages/tooling/benchmarks/hopper_records/make_records.py --out hopper --input prose=eval-prose.txt --input smollm2=/models/smollm2 …

`jobs.toml` beside it says what runs: a command with `{python}`, `{root}` (the checkout), `{out}` (the job's folder),
`{all}` (the folder of --out) and inputs. Jobs of a lane follow one another, lanes run beside each other; a job with
`quiet = true` is a timing and runs alone, when every lane is empty. `after` names a job that has to end with 0 before.
A job whose input is missing, whose `after` did not succeed, or whose limit no longer fits into `--seconds` is not run,
and the reason is printed. A finished job is not run again in the same --out; `--again NAME` repeats it.

Each job leaves `log.txt` and `job.json` (command, exit code, seconds) in its folder; the records it makes are what its
command writes, by convention below `{all}/records`. Exit 0: all that were chosen ended as `accept` says (0 where it is
left out); 1: one did not; 2: one was not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
KILL_AFTER_S = 15.0  # a server that is asked to end writes its state first


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
    jobs: list[Job] = []
    for table in tomllib.loads(path.read_text())["job"]:
        strange = set(table) - set(Job.__dataclass_fields__)
        if strange:
            raise ValueError(f"job {table.get('name')}: unknown key {', '.join(sorted(strange))}")
        env = tuple(table.pop("env", {}).items())
        job = Job(**{**table, "accept": tuple(table.get("accept", (0,))), "env": env})
        if job.name in {other.name for other in jobs}:
            raise ValueError(f"job {job.name} is there twice")
        if job.after and job.after not in {other.name for other in jobs}:
            raise ValueError(f"job {job.name}: after {job.after}, which does not stand before it")
        if job.quiet and job.lane:
            raise ValueError(f"job {job.name}: a quiet job has no lane")
        jobs.append(job)
    return jobs


class Runner:
    """Runs jobs and keeps their results.

    Args:
        out: folder of all.
        inputs: name → path.
        seconds: after these no job is started that could not end in time.
    """

    def __init__(self, out: Path, inputs: dict[str, str], seconds: float) -> None:
        self.out, self.inputs = out, inputs
        self.ends = time.monotonic() + seconds
        self.lock = threading.Lock()
        self.results: dict[str, dict[str, Any]] = {}

    def run(self, job: Job) -> None:
        """Run it, unless it has run or cannot; the result is in its folder and printed."""
        folder = self.out / job.name
        kept = folder / "job.json"
        if kept.exists():
            self._keep(job, json.loads(kept.read_text()), "had run")
            return
        refusal, command = self._prepared(job, folder)
        if refusal:
            self._keep(job, {"not_run": refusal}, f"not run: {refusal}")
            return
        folder.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        code = self._call(job, command, folder / "log.txt")
        result = {"command": command, "code": code, "seconds": round(time.monotonic() - begin, 1)}
        kept.write_text(json.dumps(result, indent=1) + "\n")
        what = "killed at its limit" if code is None else f"exit {code}"
        self._keep(job, result, f"{what}, {result['seconds']} s")

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
        try:
            command = job.command.format(**values)
        except KeyError as error:
            return f"--input {error.args[0]}=PATH is missing", ""
        gone = [f"{k}={v}" for k, v in self.inputs.items() if f"{{{k}}}" in job.command and not Path(v).exists()]  # fmt: skip
        if gone:
            return f"no such file: {', '.join(gone)}", ""
        if job.after and self.results.get(job.after, {}).get("code") != 0:
            return f"{job.after} did not succeed", ""
        if time.monotonic() + job.limit > self.ends:
            return f"its limit of {job.limit:g} s does not fit into the time that is left", ""
        return "", " ".join(command.split())

    def _call(self, job: Job, command: str, log: Path) -> int | None:
        """The exit code, or None where the limit ended it."""
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
            )
            try:
                return process.wait(job.limit)
            except subprocess.TimeoutExpired:
                return None
            finally:
                self._end(process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End what is left of its process group: servers of a command that was killed, too."""
        for number, patience in ((signal.SIGTERM, KILL_AFTER_S), (signal.SIGKILL, KILL_AFTER_S)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            if process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience)
            else:
                break

    def _keep(self, job: Job, result: dict[str, Any], text: str) -> None:
        with self.lock:
            self.results[job.name] = result
            print(f"{time.strftime('%H:%M:%S')} {job.name}: {text}", flush=True)


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
    jobs = read_jobs(options.jobs)
    if options.list:
        for job in jobs:
            where = "alone" if job.quiet else f"lane {job.lane or job.name}"
            print(f"{job.name:24} {where:16} {job.limit:5.0f} s  {' '.join(job.command.split())}")
        return 0
    if options.out is None:
        parser.error("--out FOLDER is missing")
    if bad := [text for text in options.input if not text.partition("=")[2]]:
        parser.error(f"--input {bad[0]}: want NAME=PATH")
    named = {key: set(filter(None, getattr(options, key).split(","))) for key in ("only", "skip", "again")}  # fmt: skip
    known = {job.name for job in jobs}
    if strange := set().union(*named.values()) - known:
        parser.error(f"no job {', '.join(sorted(strange))}; --list prints them")
    chosen = [job for job in jobs if (not named["only"] or job.name in named["only"]) and job.name not in named["skip"]]  # fmt: skip
    out = options.out.resolve()
    (out / "records").mkdir(parents=True, exist_ok=True)
    for name in named["again"]:
        (out / name / "job.json").unlink(missing_ok=True)
    runner = Runner(out, dict(text.split("=", 1) for text in options.input), options.seconds)
    run_all(runner, chosen)
    if any("not_run" in runner.results[job.name] for job in chosen):
        return 2
    return 0 if all(runner.good(job) for job in chosen) else 1


if __name__ == "__main__":
    raise SystemExit(main())
