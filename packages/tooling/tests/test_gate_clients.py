# SPDX-License-Identifier: Apache-2.0
"""A replay over several client processes: what each gets, what is made of their reports, and how one that fails ends it."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from types import MappingProxyType
from typing import Any

import psutil
import pytest

pytest.importorskip("httpx")
pytest.importorskip("scipy")

from numinous_tooling.gate import conversation
from numinous_tooling.gate.client import divide
from numinous_tooling.gate.conversation import Conversation, Outcome
from numinous_tooling.gate.errors import GateError, Interrupted, ServerFailed
from numinous_tooling.gate.options import default_clients
from numinous_tooling.gate.servers import Interrupts, ProcessTree, client_processes

JOB: dict[str, Any] = {
    "warmup": ["w"],
    "concurrency": 5,
    "sessions": [{"name": f"s{index}", "start_s": float(index)} for index in range(7)],
}

# A client that says what its part of the job tells it to, in the place of the real one.
SCRIPTED = """
    import json, sys, time
    job = json.loads(sys.stdin.readline())
    say = lambda **event: print(json.dumps(event), flush=True)
    tally = {"event": "progress", "chunks": 0, "done": 0, "in_flight": 1}
    script = job["scripts"][0 if job["lead"] else 1]
    say(**tally)
    say(event="warm", agreed={"prompts": "ids"} if job["lead"] else {})
    go = json.loads(sys.stdin.readline())
    if script == "die":
        sys.exit("scripted end")
    if script == "hang":
        time.sleep(600)
    while script == "idle":
        say(**{**tally, "in_flight": 0})
        time.sleep(0.02)
    while script == "stall":
        say(**tally)
        time.sleep(0.02)
    time.sleep(max(0.0, go["start_s"] - time.perf_counter()))
    for session in job["sessions"]:
        say(event="record", session=session["name"], turn=0, prompt_tokens=1, expected_tokens=1, sent_s=go["start_s"],
            request_digest=go["agreed"]["prompts"], e2e_s=1.0, chunks=[[0.5, 1]], got_tokens=1)
    say(event="end", **script)
"""


class QuietServer:
    """A server that is well and says nothing."""

    url = "http://127.0.0.1:1"
    local = False
    headers: Mapping[str, str] = MappingProxyType({})
    log = None

    def check_alive(self) -> None: ...

    def check_answers(self) -> None: ...

    def cpu_s(self) -> float | None:
        return None

    def failed(self, how: str) -> ServerFailed:
        return ServerFailed(f"server {how}", "")


class Shown:
    """Keeps how many requests were said to be done."""

    def __init__(self) -> None:
        self.done: list[int] = []

    def phase(self, text: str) -> None: ...

    def requests(self, done: int) -> None:
        self.done.append(done)


def end(wall_s: float, cpu_s: float, p99_s: float, max_s: float) -> dict[str, Any]:
    return {"wall_s": wall_s, "cpu_s": cpu_s, "lag": {"p99_s": p99_s, "max_s": max_s}}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    # Earlier tests of the session may have started helpers that live as long as it does, such as pools of a library.
    before = psutil.Process().children()
    yield tmp_path / "client.log"
    children = [child for child in psutil.Process().children() if child not in before]
    left = [child for child in children if child.status() != "zombie"]
    assert left == [], "clients were left behind"


def hold(log: Path, first: Any, second: Any, stall_s: float = 60.0) -> tuple[Outcome | None, Shown]:
    """Hold a conversation with two scripted clients."""
    shown = Shown()
    command = [sys.executable, "-c", textwrap.dedent(SCRIPTED)]
    with client_processes(command, 2, Interrupts(), log) as processes:
        talk = Conversation(QuietServer(), processes, shown, stall_s, dict)  # type: ignore[arg-type]
        return talk.hold({**JOB, "scripts": [first, second]}), shown


@pytest.mark.parametrize("clients", [1, 2, 3, 5, 9])
def test_what_is_divided_is_all_there_and_nothing_twice(clients: int) -> None:
    jobs = divide(JOB, clients)
    assert len(jobs) == min(clients, 5)
    sessions = [session for job in jobs for session in job["sessions"]]
    assert sorted(s["name"] for s in sessions) == [s["name"] for s in JOB["sessions"]]
    # Starts are those of the whole.
    assert all(session in JOB["sessions"] for session in sessions)
    assert sum(job["concurrency"] for job in jobs) == 5
    assert all(job["concurrency"] >= 1 for job in jobs)
    sizes = [len(job["sessions"]) for job in jobs]
    assert max(sizes) - min(sizes) <= 1
    assert [job["lead"] for job in jobs] == [True] + [False] * (len(jobs) - 1)
    assert [job["warmup"] for job in jobs] == [["w"]] + [[]] * (len(jobs) - 1)


def test_no_client_without_sessions() -> None:
    assert len(divide({**JOB, "sessions": JOB["sessions"][:2]}, 4)) == 2


def test_clients_by_cores() -> None:
    found = [default_clients(cores) for cores in (1, 2, 4, 8, 10, 15, 16, 20, 128)]
    assert found == [1, 1, 1, 2, 2, 3, 4, 4, 4]


def test_reports_are_merged_by_the_worst(log: Path) -> None:
    outcome, shown = hold(log, end(10.0, 2.0, 0.004, 0.03), end(8.0, 6.0, 0.009, 0.02))
    assert outcome is not None
    assert sorted(record.session for record in outcome.records) == [f"s{i}" for i in range(7)]
    # All were told the same start, and what the leader agreed.
    assert len({record.sent_s for record in outcome.records}) == 1
    assert {record.request_digest for record in outcome.records} == {"ids"}
    assert (outcome.wall_s, outcome.cpu_share) == (10.0, 0.75)
    assert (outcome.lag_p99_s, outcome.lag_max_s) == (0.009, 0.03)
    assert outcome.agreed == {"prompts": "ids"}
    assert shown.done[-1] == 7


@pytest.mark.parametrize("which", [0, 1])
def test_one_client_that_ends_early_ends_the_replay(log: Path, which: int) -> None:
    scripts = ["idle", "idle"]
    scripts[which] = "die"
    outcome, _ = hold(log, *scripts)
    assert outcome is None
    assert "scripted end" in log.read_text()


def test_requests_of_one_client_that_hang_are_a_stall(log: Path) -> None:
    with pytest.raises(ServerFailed, match="made no progress for 1 s"):
        hold(log, "stall", end(1.0, 0.1, 0.0, 0.0), stall_s=1.0)


def test_client_that_falls_silent_is_no_endless_run(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one goes on saying that it waits for a tool, which is no standstill of the server."""
    monkeypatch.setattr(conversation, "CLIENT_SILENT_S", 3.0)
    quiet = textwrap.dedent(SCRIPTED).replace('"in_flight": 1', '"in_flight": 0')
    command = [sys.executable, "-c", quiet]
    with client_processes(command, 2, Interrupts(), log) as processes:
        talk = Conversation(QuietServer(), processes, Shown(), 2.0, dict)  # type: ignore[arg-type]
        with pytest.raises(GateError, match="a client process said nothing for 3 s"):
            talk.hold({**JOB, "scripts": ["idle", "hang"]})


def test_interrupt_while_one_is_ended_spares_none(log: Path) -> None:
    interrupts = Interrupts()
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    pids: list[int] = []

    def interrupted() -> None:
        with client_processes(command, 3, interrupts, log) as processes:
            pids.extend(process.pid for process in processes)
            # Raised at the end of the first tree that is stopped.
            interrupts.pending = Interrupts.SIGNALS[0]

    with pytest.raises(Interrupted):
        interrupted()
    assert len(pids) == 3
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_clients_share_a_log_without_overwriting_it(log: Path) -> None:
    # In one write: sys.exit's text and its newline are two, and another client's may come between.
    command = [sys.executable, "-c", "import os; os.write(2, b'x' * 50 + b'\\n')"]
    with client_processes(command, 3, Interrupts(), log) as processes:
        deadline = time.monotonic() + 60
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert log.read_text().split() == ["x" * 50] * 3


def test_job_of_a_client_is_plain_json() -> None:
    assert json.loads(json.dumps(divide(JOB, 2))) == divide(JOB, 2)


def test_a_stranger_with_the_number_of_a_collected_leader_is_left_alone() -> None:
    tree = ProcessTree(Interrupts())
    tree.start([sys.executable, "-c", ""], {}, stderr=DEVNULL, stdout=DEVNULL, stdin=DEVNULL)
    assert tree.popen is not None
    tree.popen.wait()
    with Popen([sys.executable, "-c", "input()"], stdin=PIPE, start_new_session=True) as stranger:
        tree.popen.pid = stranger.pid  # as if the system had given it out again
        tree.stop(grace_s=0)
        assert stranger.poll() is None
        stranger.communicate(b"\n")
    assert stranger.returncode == 0
