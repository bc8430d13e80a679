# SPDX-License-Identifier: Apache-2.0
"""The gate's side of a replay: speaks with the client process, and watches server and clock while doing so."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numinous_tooling.gate.client import RequestRecord
from numinous_tooling.gate.engaged import Counters
from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.gauges import GaugeSampler
from numinous_tooling.gate.progress import Progress
from numinous_tooling.gate.servers import AnyServer, OtherLoad

TICK_S = 0.5
# For an interpreter to start and to import.
CLIENT_START_S = 120.0
# How often a server is asked whether it is still there while requests break off.
RECHECK_S = 2.0


@dataclass
class Outcome:
    """What a replay brought back; `agreed` is what client and server settled before it (the `warm` event)."""

    records: list[RequestRecord]
    wall_s: float
    cpu_s: float
    lag_p99_s: float
    lag_max_s: float
    other_cores: float
    counters_before: Counters
    agreed: dict[str, Any] = field(default_factory=dict)
    gauges: dict[str, Any] = field(default_factory=dict)


class Conversation:
    """One replay by one client process."""

    def __init__(
        self,
        server: AnyServer,
        process: subprocess.Popen[str],
        progress: Progress,
        stall_timeout_s: float,
        counters: Callable[[], Counters],
    ) -> None:
        self._server = server
        self._process = process
        self._progress = progress
        self._stall_timeout_s = stall_timeout_s
        self._counters = counters
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def hold(self, job: dict[str, Any]) -> Outcome | None:
        """Run the job to its end; None if the client ended before that."""
        sampler = GaugeSampler(
            self._server.url, local=self._server.local, headers=self._server.headers
        )
        with contextlib.ExitStack() as until_the_end:
            outcome = self._hold(job, lambda: until_the_end.enter_context(sampler.sampling()))
        if outcome is not None:
            outcome.gauges = sampler.summary()
        return outcome

    def _hold(self, job: dict[str, Any], start_sampling: Callable[[], object]) -> Outcome | None:
        threading.Thread(target=self._read, daemon=True).start()
        self._progress.phase("warming up")
        self._say(json.dumps(job, separators=(",", ":")))
        records: list[RequestRecord] = []
        before: Counters = {}
        agreed: dict[str, Any] = {}
        load = OtherLoad(self._server, self._process.pid)
        chunks = -1
        moved_s = time.monotonic()
        checked_s = 0.0
        while True:
            self._server.check_alive()
            try:
                event = self._events.get(timeout=TICK_S)
            except queue.Empty:
                event = {"event": "silence"}
            if event is None:
                return None
            match event["event"]:
                case "progress":
                    # Without a request under way the silence is a tool's, not the server's.
                    if event["chunks"] != chunks or event["in_flight"] == 0:
                        chunks = event["chunks"]
                        moved_s = time.monotonic()
                    if agreed:
                        self._progress.requests(event["done"])
                case "warm":
                    before = self._counters()
                    agreed = {key: value for key, value in event.items() if key != "event"}
                    self._progress.phase("replaying")
                    start_sampling()
                    load = OtherLoad(self._server, self._process.pid)
                    self._say("go")
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
                    self._progress.requests(len(records))
                    lag = event["lag"]
                    return Outcome(
                        records,
                        event["wall_s"],
                        event["cpu_s"],
                        lag["p99_s"],
                        lag["max_s"],
                        load.cores(),
                        before,
                        agreed,
                    )
            # Until the client speaks it only starts, and the server has nothing to do.
            silent_s = time.monotonic() - moved_s
            if chunks < 0:
                if silent_s > CLIENT_START_S:
                    raise GateError(f"the client process said nothing for {CLIENT_START_S:g} s")
            elif silent_s > self._stall_timeout_s:
                raise self._server.failed(
                    f"made no progress for {self._stall_timeout_s:g} s with requests under way (--stall-timeout)"
                )

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the client is gone; the reader thread reports its end

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._events.put(json.loads(line))
        except ValueError:
            pass  # the pipe was closed under us, or the client was killed in the middle of a line
        self._events.put(None)


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
