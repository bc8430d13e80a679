# SPDX-License-Identifier: Apache-2.0
"""The order of things in a gate run: plan, then for each letter of the order one server and one replay, then judge."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from numinous_tooling.gate import floor, provenance
from numinous_tooling.gate.arms import Arm, server_command, server_environment
from numinous_tooling.gate.client import RequestRecord
from numinous_tooling.gate.errors import GateError, Interrupted, ServerFailed
from numinous_tooling.gate.measures import ArmRun, Slo, judged_metrics, summarise
from numinous_tooling.gate.progress import Progress, open_progress
from numinous_tooling.gate.servers import ClientProcess, Interrupts, OtherLoad, Server, free_port
from numinous_tooling.gate.verdict import CONFIDENCE, Comparison, Word, compare
from numinous_tooling.gate.workload import (
    ModelFacts,
    SessionPlan,
    WorkloadSpec,
    build_warmup,
    build_workload,
    digest,
)

Counters = dict[str, dict[str, int]]
CountersReader = Callable[[Path], Counters]

WARMUP_REQUESTS = 4
TICK_S = 0.5
LOG_HEAD_LINES = LOG_FOOT_LINES = 300


@dataclass(frozen=True)
class GateOptions:
    """Everything that a run needs; the command line fills it in."""

    arms: Mapping[str, Arm]
    order: str
    model: ModelFacts
    workload: WorkloadSpec
    concurrency: int
    tolerances: Mapping[str, float]
    trades: Mapping[str, float]
    out: Path
    server_template: tuple[str, ...]
    port_base: int | None
    start_timeout_s: float
    stall_timeout_s: float
    max_lag_s: float | None
    keep_logs: bool
    command: str
    slo: Slo | None = None
    price_usd_h: float | None = None
    floor_dir: Path = field(default_factory=floor.default_folder)


@dataclass
class GateResult:
    """What came out: the verdict of B against A, the reasons, and all that the report shows."""

    word: Word
    reasons: tuple[str, ...]
    runs: list[ArmRun]
    comparisons: list[Comparison]
    document: dict[str, Any]
    """The content of verdict.json."""


def read_counters(state_dir: Path) -> Counters:
    """Read the feature counters that the processes of a server left in `state_dir`."""
    from numinous_tooling.patching import counters

    totals: Counters = counters.read_totals(state_dir)
    return totals


def run_gate(
    options: GateOptions, interrupts: Interrupts, counters_reader: CountersReader = read_counters
) -> GateResult:
    """Run all arms in order and judge them; files are in `options.out` whatever happens after the first server."""
    options.out.mkdir(parents=True, exist_ok=True)
    run = _Run(options, interrupts, counters_reader)
    try:
        return run.execute()
    except GateError as error:
        tail = error.tail if isinstance(error, ServerFailed) else None
        run.write_unfinished(str(error), tail)
        raise
    except Interrupted as error:
        run.write_unfinished(str(error), None)
        raise
    finally:
        run.progress.close()


class _Run:
    """The state of one gate run."""

    def __init__(
        self, options: GateOptions, interrupts: Interrupts, counters_reader: CountersReader
    ) -> None:
        self.options = options
        self.interrupts = interrupts
        self.read_counters = counters_reader
        self.started_utc = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.started_s = time.monotonic()
        self.runs: list[ArmRun] = []
        self.slots: list[dict[str, Any]] = []
        repeats = range(1, max(options.order.count(letter) for letter in set(options.order)) + 1)
        self.plans: dict[int, tuple[SessionPlan, ...]] = {
            repeat: build_workload(options.workload, options.model, repeat) for repeat in repeats
        }
        self.requests_per_slot = sum(len(plan.turns) for plan in self.plans[1])
        self.progress: Progress = open_progress(len(options.order), self.requests_per_slot)
        pythons = {arm.python for arm in options.arms.values()}
        self.versions = {python: self._versions(python) for python in sorted(pythons)}
        self.floor = floor.load(options.floor_dir, self._setting())

    @staticmethod
    def _versions(python: str) -> dict[str, str]:
        versions = provenance.versions_of(python)
        if versions is None:
            raise GateError(
                f"{python} is not a Python interpreter that runs; see --python-a, --python-b"
            )
        return versions

    def _setting(self) -> dict[str, Any]:
        options, arm = self.options, self.options.arms["A"]
        return floor.setting_of(
            arm,
            options.arms["B"].features,
            model=options.model.path,
            command=options.server_template,
            versions=self.versions[arm.python],
            workload={**asdict(options.workload), "concurrency": options.concurrency},
            machine=provenance.machine(),
            driver=provenance.driver_version(),
        )

    def execute(self) -> GateResult:
        """Run the slots, then judge."""
        options = self.options
        seen: dict[str, int] = {}
        records_file = options.out / "records.jsonl"
        with records_file.open("w") as records:
            for index, letter in enumerate(options.order):
                seen[letter] = seen.get(letter, 0) + 1
                self._run_slot(index, options.arms[letter], seen[letter], records)
        self.progress.close()
        return self._judge()

    def _run_slot(self, index: int, arm: Arm, repeat: int, records: TextIO) -> None:
        options = self.options
        name = f"{arm.letter}{repeat}"
        self.progress.begin(f"{name} {arm.label}")
        state_dir = options.out / f"state-{name}"
        state_dir.mkdir(exist_ok=True)
        port = free_port() if options.port_base is None else options.port_base + index
        server = Server(
            name,
            server_command(arm, options.server_template, options.model.path, port),
            server_environment(arm, os.environ, str(state_dir.resolve())),
            options.out / f"server-{name}.log",
            port,
        )
        with server.running(self.interrupts):
            start_s = server.wait_ready(
                options.start_timeout_s,
                lambda elapsed: self.progress.phase(f"server starting ({elapsed:.0f} s)"),
            )
            info = server.info()
            outcome = self._replay(server, name, repeat, state_dir)
            self.progress.phase("server stopping")
        # Read after the end, so that counts which a process writes last are in.
        counters = _difference(self._counters(state_dir), outcome.counters_before)
        shutil.rmtree(state_dir, ignore_errors=True)
        run = ArmRun(
            index,
            arm.letter,
            repeat,
            outcome.records,
            outcome.wall_s,
            outcome.lag_p99_s,
            outcome.lag_max_s,
            outcome.other_cores,
            counters,
        )
        self.runs.append(run)
        for record in run.records:
            line = {"run": index, "arm": arm.letter, "repeat": repeat, **asdict(record)}
            records.write(json.dumps(line, separators=(",", ":")) + "\n")
        records.flush()
        self.slots.append(
            {
                "run": name,
                "command": server.command,
                "server_version": info.get("version"),
                "log": server.log.name,
                "ready_s": round(start_s, 2),
                "wall_s": round(run.wall_s, 3),
                "client_lag_p99_s": round(run.lag_p99_s, 6),
                "client_lag_max_s": round(run.lag_max_s, 6),
                "workload_sha256": digest(self.plans[repeat]),
                "other_cores": round(run.other_cores, 2),
                "bad_answers": run.bad_answers,
                "counters": counters,
            }
        )
        if not options.keep_logs and not run.bad_answers:
            _shorten(server.log)
        tokens = sum(record.got_tokens for record in run.records)
        self.progress.end(
            f"ready in {start_s:.0f} s, {len(run.records)} requests in {run.wall_s:.1f} s, "
            f"{tokens / run.wall_s:.1f} output tok/s, {run.bad_answers} bad answers"
        )

    def _replay(self, server: Server, name: str, repeat: int, state_dir: Path) -> _Outcome:
        options = self.options
        plans = self.plans[repeat]
        job = {
            "url": server.url,
            "concurrency": options.concurrency,
            "warmup": build_warmup(options.model, plans, min(WARMUP_REQUESTS, options.concurrency)),
            "sessions": [asdict(plan) for plan in plans],
        }
        command = [sys.executable, "-m", "numinous_tooling.gate.client"]
        stderr_log = options.out / f"client-{name}.log"
        with ClientProcess(command, self.interrupts, stderr_log) as process:
            outcome = _Conversation(
                server,
                process,
                self.progress,
                options.stall_timeout_s,
                lambda: self._counters(state_dir),
            ).hold(job)
            if outcome is None:
                detail = stderr_log.read_text(errors="replace").strip().splitlines()
                raise GateError(
                    f"the client process of {name} ended early ({detail[-1] if detail else 'no message'}); "
                    f"see {stderr_log}"
                )
        if stderr_log.stat().st_size == 0:
            stderr_log.unlink()
        return outcome

    def _counters(self, state_dir: Path) -> Counters:
        return (
            self.read_counters(state_dir)
            if any(arm.features for arm in self.options.arms.values())
            else {}
        )

    def _judge(self) -> GateResult:
        options = self.options

        def against(test: str, base: str) -> Comparison:
            return compare(
                self.runs,
                base,
                test,
                features=options.arms[test].features,
                tolerances=options.tolerances,
                max_lag_s=options.max_lag_s,
                metrics=metrics,
                # The floor is that of arm A's setting; arm C has another.
                floor=self.floor.noise() if (base, test) == ("A", "B") else None,
            )

        metrics = judged_metrics(options.slo)
        main = against("B", "A")
        comparisons = [main]
        if "C" in options.order:
            comparisons += [against("C", "A"), against("B", "C")]
        document = self._document(main.word, main.reasons, comparisons)
        if floor.is_same_against_same(options.arms):
            noise = floor.noise_of_run(self.runs, metrics, options.max_lag_s)
            if noise:
                self.floor.add(self.started_utc, str(options.out.resolve()), noise)
            document["noise_floor"]["stored"] = bool(noise)
        self._write(document)
        return GateResult(main.word, main.reasons, self.runs, comparisons, document)

    def write_unfinished(self, reason: str, tail: str | None) -> None:
        """Leave a verdict.json that says why there is no verdict."""
        document = self._document("INCONCLUSIVE", (reason,), [])
        if tail is not None:
            document["server_log_tail"] = tail.splitlines()
        self._write(document)

    def _write(self, document: dict[str, Any]) -> None:
        (self.options.out / "verdict.json").write_text(json.dumps(document, indent=1) + "\n")

    def _document(
        self, word: Word, reasons: Sequence[str], comparisons: list[Comparison]
    ) -> dict[str, Any]:
        """Return verdict.json: `schema` changes when a field changes its meaning."""
        options = self.options
        spec = options.workload
        used = [letter for letter in options.arms if letter in options.order]
        return {
            "schema": 2,
            "verdict": word,
            "reasons": list(reasons),
            "length_scale": spec.length_scale,
            "features": list(options.arms["B"].features),
            "model": options.model.path,
            "order": options.order,
            "workload": {
                "sessions": spec.sessions,
                "turns": spec.turns,
                "requests_per_run": self.requests_per_slot,
                "concurrency": options.concurrency,
                "speedup": spec.speedup,
                "seed": spec.seed,
                "names": [plan.name for plan in self.plans[1]],
            },
            "confidence": CONFIDENCE,
            "tolerances": dict(options.tolerances),
            "noise_floor": {**self.floor.described(), "stored": False},
            "slo": None if options.slo is None else str(options.slo),
            "price_usd_h": options.price_usd_h,
            "declared_trades": dict(options.trades),
            "arms": {
                letter: {
                    "label": arm.label,
                    "python": arm.python,
                    "env": dict(arm.env),
                    "flags": list(arm.flags),
                    "versions": self.versions[arm.python],
                    "figures": summarise(self.runs, letter, options.slo, options.price_usd_h)
                    if any(r.arm == letter for r in self.runs)
                    else None,
                }
                for letter, arm in options.arms.items()
                if letter in used
            },
            "comparisons": [asdict(comparison) for comparison in comparisons],
            "runs": self.slots,
            "machine": provenance.machine(),
            "git": provenance.git_state(Path(__file__).parent),
            "command": options.command,
            "started_utc": self.started_utc,
            "elapsed_s": round(time.monotonic() - self.started_s, 1),
        }


@dataclass
class _Outcome:
    """What a replay brought back."""

    records: list[RequestRecord]
    wall_s: float
    lag_p99_s: float
    lag_max_s: float
    other_cores: float
    counters_before: Counters


class _Conversation:
    """Speaks with the client process, and watches the server while doing so."""

    def __init__(
        self,
        server: Server,
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

    def hold(self, job: dict[str, Any]) -> _Outcome | None:
        """Run the job to its end; None if the client ended before that."""
        threading.Thread(target=self._read, daemon=True).start()
        self._progress.phase("warming up")
        self._say(json.dumps(job, separators=(",", ":")))
        records: list[RequestRecord] = []
        before: Counters = {}
        measuring = False
        load = OtherLoad(self._server, self._process.pid)
        chunks = -1
        moved_s = time.monotonic()
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
                    if measuring:
                        self._progress.requests(event["done"])
                case "warm":
                    before = self._counters()
                    measuring = True
                    self._progress.phase("replaying")
                    load = OtherLoad(self._server, self._process.pid)
                    self._say("go")
                case "record":
                    moved_s = time.monotonic()
                    records.append(_record(event))
                case "fatal":
                    raise self._server.failed(f"did not serve ({event['message']})")
                case "end":
                    self._progress.requests(len(records))
                    lag = event["lag"]
                    return _Outcome(
                        records, event["wall_s"], lag["p99_s"], lag["max_s"], load.cores(), before
                    )
            if time.monotonic() - moved_s > self._stall_timeout_s:
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


def _record(event: dict[str, Any]) -> RequestRecord:
    fields = {key: value for key, value in event.items() if key != "event"}
    fields["chunks"] = tuple((seconds, tokens) for seconds, tokens in fields["chunks"])
    return RequestRecord(**fields)


def _difference(after: Counters, before: Counters) -> Counters:
    """Return what was counted between two readings; features with nothing are left out."""
    result: Counters = {}
    for feature, counts in after.items():
        rest = {key: count - before.get(feature, {}).get(key, 0) for key, count in counts.items()}
        rest = {key: count for key, count in rest.items() if count}
        if rest:
            result[feature] = rest
    return result


def _shorten(log: Path) -> None:
    """Keep beginning and end of a server log: start-up with all arguments, and the last requests."""
    lines = log.read_text(errors="replace").splitlines(keepends=True)
    left_out = len(lines) - LOG_HEAD_LINES - LOG_FOOT_LINES
    if left_out > 0:
        middle = f"[… {left_out} lines left out, --keep-logs keeps them …]\n"
        log.write_text("".join([*lines[:LOG_HEAD_LINES], middle, *lines[-LOG_FOOT_LINES:]]))
