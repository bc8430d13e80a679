# SPDX-License-Identifier: Apache-2.0
"""The gate's side of a replay: speaks with the client processes, and watches server and clock while doing so."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numinous_tooling.gate.client import RequestRecord, divide
from numinous_tooling.gate.engaged import Counters, log_size
from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.gauges import GaugeSampler
from numinous_tooling.gate.progress import Progress
from numinous_tooling.gate.servers import AnyServer, OtherLoad

TICK_S = 0.5
# For an interpreter to start and to import; a client that works speaks several times a second.
CLIENT_SILENT_S = 120.0
# From the word to begin until the beginning, so that all clients have read it by then.
START_LEAD_S = 0.1
# How often a server is asked whether it is still there while requests break off.
RECHECK_S = 2.0


@dataclass
class Outcome:
    """What a replay brought back; `agreed` is what clients and server settled before it (the `warm` event).

    `cpu_share` and the lags are those of the client that was worst off.
    """

    records: list[RequestRecord]
    wall_s: float
    cpu_share: float
    lag_p99_s: float
    lag_max_s: float
    other_cores: float
    counters_before: Counters
    log_from: int
    """Bytes of the server's log before the replay."""
    agreed: dict[str, Any] = field(default_factory=dict)
    gauges: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Client:
    """What is known of one client process: its last `progress`, when it spoke, and its `end`."""

    process: subprocess.Popen[str]
    heard_s: float
    tally: Mapping[str, int] = field(
        default_factory=lambda: {"chunks": 0, "done": 0, "in_flight": 0}
    )
    spoke: bool = False
    warm: bool = False
    end: Mapping[str, Any] | None = None


class Conversation:
    """One replay by one client process or several, each with its part of the job (`client.divide`)."""

    def __init__(
        self,
        server: AnyServer,
        processes: Sequence[subprocess.Popen[str]],
        progress: Progress,
        stall_timeout_s: float,
        counters: Callable[[], Counters],
    ) -> None:
        self._server = server
        self._clients = [_Client(process, time.monotonic()) for process in processes]
        self._progress = progress
        self._stall_timeout_s = stall_timeout_s
        self._counters = counters
        self._events: queue.Queue[tuple[_Client, dict[str, Any] | None]] = queue.Queue()

    def hold(self, job: dict[str, Any]) -> Outcome | None:
        """Run the job to its end; None if a client ended before that."""
        sampler = GaugeSampler(
            self._server.url, local=self._server.local, headers=self._server.headers
        )
        with contextlib.ExitStack() as until_the_end:
            outcome = self._hold(job, lambda: until_the_end.enter_context(sampler.sampling()))
        if outcome is not None:
            outcome.gauges = sampler.summary()
        return outcome

    def _hold(self, job: dict[str, Any], start_sampling: Callable[[], object]) -> Outcome | None:
        clients = self._clients
        for client in clients:
            threading.Thread(target=self._read, args=(client,), daemon=True).start()
        self._progress.phase("warming up")
        for client, part in zip(clients, divide(job, len(clients)), strict=True):
            _say(client, part)
        records: list[RequestRecord] = []
        before: Counters = {}
        agreed: dict[str, Any] = {}
        started = False
        log_from = 0
        load = self._other_load()
        chunks = -1
        moved_s = time.monotonic()
        checked_s = 0.0
        while True:
            self._server.check_alive()
            try:
                client, event = self._events.get(timeout=TICK_S)
            except queue.Empty:
                event = {"event": "silence"}
            else:
                client.heard_s = time.monotonic()
                if event is None:
                    if client.end is None:
                        return None
                    continue
            match event["event"]:
                case "progress":
                    client.tally, client.spoke = event, True
                    # Without a request under way the silence is a tool's, not the server's.
                    if self._sum("chunks") != chunks or self._sum("in_flight") == 0:
                        chunks = self._sum("chunks")
                        moved_s = time.monotonic()
                    if started:
                        self._progress.requests(self._sum("done"))
                case "warm":
                    client.warm = True
                    agreed = agreed or event["agreed"]
                    if all(known.warm for known in clients):
                        started = True
                        before = self._counters()
                        log_from = log_size(self._server.log)
                        self._progress.phase("replaying")
                        start_sampling()
                        load = self._other_load()
                        go = {"agreed": agreed, "start_s": time.perf_counter() + START_LEAD_S}
                        for known in clients:
                            _say(known, go)
                case "record":
                    moved_s = time.monotonic()
                    records.append(record_of(event))
                    if records[-1].error and moved_s - checked_s > RECHECK_S:
                        checked_s = moved_s
                        self._server.check_answers()
                case "fatal":
                    self._server.check_answers()
                    raise self._server.failed(f"did not serve ({event['message']})")
                case "end":
                    client.end = event
                    # Its last tally may be older than its last answer.
                    client.tally = {**client.tally, "in_flight": 0}
                    ends = [known.end for known in clients if known.end is not None]
                    if len(ends) == len(clients):
                        self._progress.requests(len(records))
                        return Outcome(
                            records,
                            wall_s=max(end["wall_s"] for end in ends),
                            cpu_share=max(end["cpu_s"] / end["wall_s"] for end in ends),
                            lag_p99_s=max(end["lag"]["p99_s"] for end in ends),
                            lag_max_s=max(end["lag"]["max_s"] for end in ends),
                            other_cores=load.cores(),
                            counters_before=before,
                            log_from=log_from,
                            agreed=agreed,
                        )
            now_s = time.monotonic()
            # Until a client speaks it only starts, and the server has nothing to do.
            if any(known.spoke for known in clients) and now_s - moved_s > self._stall_timeout_s:
                raise self._server.failed(
                    f"made no progress for {self._stall_timeout_s:g} s with requests under way (--stall-timeout)"
                )
            if any(now_s - known.heard_s > CLIENT_SILENT_S for known in clients if not known.end):
                raise GateError(f"a client process said nothing for {CLIENT_SILENT_S:g} s")

    def _sum(self, name: str) -> int:
        return sum(client.tally[name] for client in self._clients)

    def _other_load(self) -> OtherLoad:
        return OtherLoad(self._server, [client.process.pid for client in self._clients])

    def _read(self, client: _Client) -> None:
        assert client.process.stdout is not None
        try:
            for line in client.process.stdout:
                self._events.put((client, json.loads(line)))
        except ValueError:
            pass  # the pipe was closed under us, or the client was killed in the middle of a line
        self._events.put((client, None))


def _say(client: _Client, message: Mapping[str, Any]) -> None:
    assert client.process.stdin is not None
    try:
        client.process.stdin.write(json.dumps(message, separators=(",", ":")) + "\n")
        client.process.stdin.flush()
    except BrokenPipeError:
        pass  # the client is gone; its reader thread reports the end


def record_of(fields: dict[str, Any]) -> RequestRecord:
    """Return the record of a JSON object; keys that are not the record's are left out."""
    known = {name: fields[name] for name in RequestRecord.__dataclass_fields__ if name in fields}
    known["chunks"] = tuple((seconds, tokens) for seconds, tokens in known["chunks"])
    return RequestRecord(**known)


def client_failed(name: str, stderr_log: Path) -> GateError:
    """Return the error to raise for a client process that ended before its job; `name` is the run's."""
    detail = stderr_log.read_text(errors="replace").strip().splitlines()
    return GateError(
        f"the client process of {name} ended early ({detail[-1] if detail else 'no message'}); see {stderr_log}"
    )
