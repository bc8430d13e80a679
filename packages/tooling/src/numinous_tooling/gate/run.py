# SPDX-License-Identifier: Apache-2.0
"""The order of things in a gate run: plan, then for each letter of the order one server and one replay, then judge."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from numinous_tooling.gate import floor, folder, prompts, provenance
from numinous_tooling.gate.arms import Arm, server_command, server_environment
from numinous_tooling.gate.client import RequestRecord
from numinous_tooling.gate.conversation import Conversation, Outcome, client_failed
from numinous_tooling.gate.engaged import (
    Counters,
    CountersReader,
    counted_between,
    graph_batches,
    read_counters,
)
from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.measures import ArmRun, Slo, judged_metrics, summarise
from numinous_tooling.gate.plan import (
    ModelFacts,
    SessionPlan,
    Workload,
    build_warmup,
    check_duration,
    digest,
)
from numinous_tooling.gate.progress import Progress, open_progress
from numinous_tooling.gate.resume import (
    RECORDS_FILE,
    RunState,
    check_same,
    check_whole,
    load_state,
    normal,
    write_records,
)
from numinous_tooling.gate.servers import (
    AnyServer,
    AttachedServer,
    Interrupts,
    Server,
    client_processes,
    free_port,
    served_model,
)
from numinous_tooling.gate.verdict import CONFIDENCE, Comparison, Word, compare, proof_of_runs

WARMUP_REQUESTS = 4
LOG_HEAD_LINES = LOG_FOOT_LINES = 300
# A client process that computes for this share of the time measures itself.
MAX_CLIENT_CPU_SHARE = 0.9


@dataclass(frozen=True)
class GateOptions:
    """Everything that a run needs; the command line fills it in.

    `api` is `sglang` (`/generate`) or `openai`, `prompts` how prompts are sent (`ids`, `text`, `chat`, or `auto`: ids
    where the server takes them, else text). `clients` is over how many processes a replay is divided. `exact` asks for answers of exactly the planned length. `flush` is `must`,
    `try` (a server that was started for the slot is empty anyway) or `never`. `dp_pin` pins sessions to ranks.
    """

    arms: Mapping[str, Arm]
    order: str
    model: ModelFacts
    workload: Workload
    concurrency: int
    clients: int
    tolerances: Mapping[str, float]
    trades: Mapping[str, float]
    out: Path
    server_template: tuple[str, ...]
    port_base: int | None
    start_timeout_s: float
    stall_timeout_s: float
    max_lag_s: float | None
    max_uneven_cores: float
    keep_logs: bool
    command: str
    api: str = "sglang"
    prompts: str = "ids"
    exact: bool = True
    dp_pin: bool = False
    flush: str = "must"
    resume: bool = False
    api_key_env: str | None = None
    """Variable that holds the key of attached servers."""
    notes: tuple[str, ...] = ()
    """Lines for the reader of the verdict."""
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


def run_gate(
    options: GateOptions, interrupts: Interrupts, counters_reader: CountersReader = read_counters
) -> GateResult:
    """Run all arms in order and judge them; files are in `options.out` whatever happens after the first server."""
    if options.resume and not options.out.is_dir():
        raise GateError(f"--resume {options.out}: no such folder")
    with folder.locked(options.out):
        run = _Run(options, interrupts, counters_reader)
        try:
            with folder.reason_left(options.out, run.write_unfinished):
                folder.clear(options.out, ("verdict.json", "report.html"))
                return run.execute()
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
        self.started = provenance.Started()
        before = load_state(options.out) if options.resume else None
        # Servers that are never flushed must not know this run's tokens from a run before it.
        base = time.time_ns() if options.flush == "never" else 0
        if before is not None:
            base = before.repeat_base
        repeats = range(1, max(options.order.count(letter) for letter in set(options.order)) + 1)
        self.plans: dict[int, tuple[SessionPlan, ...]] = {
            repeat: options.workload.build(options.model, base + repeat) for repeat in repeats
        }
        check_duration(self.plans[1])
        self.digests = {repeat: digest(plans) for repeat, plans in self.plans.items()}
        # No more clients than there is to divide (`client.divide`).
        self.clients = min(options.clients, options.concurrency, len(self.plans[1]))
        self.requests_per_slot = sum(len(plan.turns) for plan in self.plans[1])
        started = {arm.python for arm in options.arms.values() if arm.url is None}
        self.versions = {python: self._versions(python) for python in sorted(started)}
        settings = self._settings()
        if before is not None:
            check_same(before, settings, options.out)
            check_whole(before, self.requests_per_slot, options.out)
        self.state = before or RunState(normal(settings), options.command, base, [], [])
        self.runs = self.state.runs
        self.slots = self.state.slots
        self.progress: Progress = open_progress(len(options.order), self.requests_per_slot)
        self.floor = self._load_floor()

    @staticmethod
    def _versions(python: str) -> dict[str, str]:
        versions = provenance.versions_of(python)
        if versions is None:
            raise GateError(
                f"{python} is not a Python interpreter that runs; see --python-a, --python-b"
            )
        return versions

    def _settings(self) -> dict[str, Any]:
        """Return what must be equal in a run that resumes this one."""
        options = self.options
        return {
            "order": options.order,
            "arms": {letter: asdict(arm) for letter, arm in options.arms.items()},
            "server_command": options.server_template,
            "versions": self.versions,
            "model": options.model.path,
            "machine": floor.machine_of(provenance.machine()),
            "workload": {"kind": options.workload.kind, **options.workload.describe()},
            "requests": self.digests,
            "concurrency": options.concurrency,
            "clients": self.clients,
            "tolerances": dict(options.tolerances),
            "max_lag_s": options.max_lag_s,
            "max_uneven_cores": options.max_uneven_cores,
            "slo": None if options.slo is None else str(options.slo),
            "api": options.api,
            "prompts": options.prompts,
            "exact": options.exact,
            "dp_pin": options.dp_pin,
            "flush": options.flush,
        }

    def _load_floor(self) -> floor.Floor | None:
        """Return the noise floor of arm A's setting; None for servers whose setting is not known."""
        options, arm = self.options, self.options.arms["A"]
        if any(known.url is not None for known in options.arms.values()):
            return None
        how = ("concurrency", "api", "prompts", "exact", "dp_pin", "flush")
        spec = options.workload
        setting = floor.setting_of(
            arm,
            options.arms["B"].features,
            model=options.model.path,
            command=options.server_template,
            versions=self.versions[arm.python],
            workload={
                "kind": spec.kind,
                "sessions": spec.sessions,
                "turns": max(len(plan.turns) for plan in self.plans[1]),
                "length_scale": spec.length_scale,
                **spec.describe(),
                **{name: getattr(options, name) for name in how},
                "clients": self.clients,
            },
            machine=provenance.machine(),
            driver=provenance.driver_version(),
        )
        return floor.load(options.floor_dir, setting)

    def execute(self) -> GateResult:
        """Run the slots that are not finished yet, then judge."""
        options = self.options
        seen: dict[str, int] = {}
        self.state.save_records(options.out)
        self.state.save(options.out)
        with (options.out / RECORDS_FILE).open("a") as records:
            for index, letter in enumerate(options.order):
                seen[letter] = seen.get(letter, 0) + 1
                if index < len(self.runs):
                    self.progress.begin(f"{letter}{seen[letter]}")
                    self.progress.end("kept from the run that was aborted")
                    continue
                self._run_slot(index, options.arms[letter], seen[letter], records)
                self.state.save(options.out)
        self.progress.close()
        result = self._judge()
        self.state.save(options.out, complete=True)
        return result

    def _server(self, index: int, arm: Arm, name: str, state_dir: Path) -> AnyServer:
        options = self.options
        if arm.url is not None:
            return AttachedServer(name, arm.url, options.api_key_env)
        port = free_port() if options.port_base is None else options.port_base + index
        return Server(
            name,
            server_command(arm, options.server_template, options.model.path, port),
            server_environment(arm, os.environ, str(state_dir.resolve())),
            options.out / f"server-{name}.log",
            port,
        )

    def _run_slot(self, index: int, arm: Arm, repeat: int, records: TextIO) -> None:
        options = self.options
        name = f"{arm.letter}{repeat}"
        self.progress.begin(f"{name} {arm.label}")
        own_state_dir = options.out / f"state-{name}"
        state_dir = own_state_dir if arm.state_dir is None else Path(arm.state_dir)
        if arm.url is None:
            own_state_dir.mkdir(exist_ok=True)
        server = self._server(index, arm, name, state_dir)
        waiting = "server starting" if arm.url is None else "asking the server"
        with server.running(self.interrupts):
            start_s = server.wait_ready(
                options.start_timeout_s,
                lambda elapsed: self.progress.phase(f"{waiting} ({elapsed:.0f} s)"),
            )
            at_start = self._counters(state_dir)
            info = server.info()
            outcome = self._replay(server, name, repeat, state_dir, self._dp_size(server, info))
            if arm.url is None:
                self.progress.phase("server stopping")
        # Read after the end of an own server, so that counts which a process writes last are in.
        counters = counted_between(outcome.counters_before, self._counters(state_dir))
        shutil.rmtree(own_state_dir, ignore_errors=True)
        drift = prompts.drift(
            [
                (record.prompt_tokens, record.server_prompt_tokens)
                for record in outcome.records
                if record.server_prompt_tokens is not None
            ]
        )
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
            gauges=outcome.gauges,
            client_cpu_share=outcome.cpu_share,
            drift=None if options.workload.is_text else drift,
            counters_at_start=at_start,
            graph_batches=graph_batches(server.log, outcome.log_from),
        )
        run.doubts = _doubts_of(run)
        self.runs.append(run)
        write_records(records, run)
        self.slots.append(
            {
                "run": name,
                "command": server.command,
                "url": arm.url,
                "server_version": info.get("version"),
                "log": server.log.name if server.log else "-",
                "ready_s": round(start_s, 2),
                "wall_s": round(run.wall_s, 3),
                "client_lag_p99_s": round(run.lag_p99_s, 6),
                "client_lag_max_s": round(run.lag_max_s, 6),
                "client_cpu_share": round(run.client_cpu_share, 4),
                "workload_sha256": self.digests[repeat],
                "prompts": outcome.agreed["prompts"],
                "prompt_overhead": outcome.agreed["overhead"],
                "prompt_drift": run.drift,
                "cache_flushed": outcome.agreed["flushed"],
                "valid_answers": answer_validity(run.records),
                "gauges": run.gauges,
                "other_cores": round(run.other_cores, 2),
                "bad_answers": run.bad_answers,
                "counters": counters,
                "counters_at_start": at_start,
                "graph_batches": run.graph_batches,
            }
        )
        if server.log and not options.keep_logs and not run.bad_answers:
            _shorten(server.log)
        tokens = sum(record.got_tokens for record in run.records)
        self.progress.end(
            f"ready in {start_s:.0f} s, {len(run.records)} requests in {run.wall_s:.1f} s, "
            f"{tokens / run.wall_s:.1f} output tok/s, {run.bad_answers} bad answers"
        )

    def _dp_size(self, server: AnyServer, info: Mapping[str, object]) -> int | None:
        """Return over how many ranks sessions are pinned; None without --dp-pin."""
        if not self.options.dp_pin:
            return None
        size = info.get("dp_size")
        if not isinstance(size, int) or size < 2:
            raise GateError(
                f"--dp-pin: server {server.name} reports dp_size {size} at /server_info, at least 2 is needed"
            )
        return size

    def _replay(
        self, server: AnyServer, name: str, repeat: int, state_dir: Path, dp_size: int | None
    ) -> Outcome:
        options = self.options
        plans = self.plans[repeat]
        model = options.model
        as_text = options.prompts != "ids" and not options.workload.is_text
        warmup = build_warmup(model, plans, min(WARMUP_REQUESTS, options.concurrency))
        job = {
            "url": server.url,
            "api": options.api,
            "api_key_env": options.api_key_env,
            "model": served_model(server.url, server.headers).get("id", model.path)
            if options.api == "openai"
            else model.path,
            "prompts": options.prompts,
            "is_text": options.workload.is_text,
            "exact": options.exact,
            "dp_size": dp_size,
            "flush": options.flush,
            "word_ids": model.word_ids if as_text else model.word_ids[: prompts.PROBE_WORDS],
            "words": model.words if as_text else (),
            "concurrency": options.concurrency,
            "warmup": [plan.to_json() for plan in warmup],
            "sessions": [plan.to_json() for plan in plans],
        }
        command = [sys.executable, "-m", "numinous_tooling.gate.client"]
        stderr_log = options.out / f"client-{name}.log"
        with client_processes(command, self.clients, self.interrupts, stderr_log) as processes:
            outcome = Conversation(
                server,
                processes,
                self.progress,
                options.stall_timeout_s,
                lambda: self._counters(state_dir),
            ).hold(job)
            if outcome is None:
                raise client_failed(name, stderr_log)
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
                max_uneven_cores=options.max_uneven_cores,
                metrics=metrics,
                # The floor is that of arm A's setting; arm C has another.
                floor=self.floor.noise() if self.floor and (base, test) == ("A", "B") else None,
            )

        metrics = judged_metrics(options.slo)
        main = against("B", "A")
        comparisons = [main]
        if "C" in options.order:
            comparisons += [against("C", "A"), against("B", "C")]
        document = self._document(main.word, main.reasons, comparisons)
        if self.floor is not None and floor.is_same_against_same(options.arms):
            noise = floor.noise_of_run(
                self.runs, metrics, options.max_lag_s, options.max_uneven_cores
            )
            if noise:
                try:
                    self.floor.add(self.started.utc, str(options.out.resolve()), noise)
                    document["noise_floor"]["stored"] = True
                except GateError as error:  # the verdict stands without it
                    document["notes"].append(str(error))
        self._write(document)
        return GateResult(main.word, main.reasons, self.runs, comparisons, document)

    def _arm_versions(self, letter: str) -> dict[str, Any]:
        """Return the versions of an arm's interpreter, or what its attached servers said."""
        arm = self.options.arms[letter]
        if arm.url is None:
            return dict(self.versions[arm.python])
        said = [slot["server_version"] for slot in self.slots if slot["url"] == arm.url]
        return {"server": said[0] if said else None}

    def _notes(self) -> list[str]:
        """Return what the reader must know of how this run was measured."""
        notes = []
        at_a, at_b = (
            fmean(i for i, arm in enumerate(self.options.order) if arm == letter) for letter in "AB"
        )
        if at_a != at_b:
            notes.append(
                f"in the order {self.options.order} one arm runs later than the other, so what drifts with time "
                "counts as a change; ABBA is balanced"
            )
        # /generate always says how many tokens there are.
        uncounted = [
            run.name
            for run in self.runs
            if self.options.api == "openai" and run.drift is None and not _usage_seen(run)
        ]
        if uncounted:
            notes.append(
                f"{', '.join(uncounted)}: the server reports no usage, tokens are counted by chunks"
            )
        notes += [
            f"{slot['run']}: the server has no route to flush its cache; it was new"
            for slot in self.slots
            if not slot["cache_flushed"] and self.options.flush != "never"
        ]
        tested = [run for run in self.runs if run.arm == "B"]
        return [*notes, *proof_of_runs(tested, self.options.arms["B"].features).notes]

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
                "kind": spec.kind,
                "sessions": len(self.plans[1]),
                "turns": max(len(plan.turns) for plan in self.plans[1]),
                "requests_per_run": self.requests_per_slot,
                "concurrency": options.concurrency,
                "clients": self.clients,
                **spec.describe(),
                "seed": spec.seed,
                "repeat_base": self.state.repeat_base,
                "names": [plan.name for plan in self.plans[1]],
            },
            "api": options.api,
            "prompts": options.prompts,
            "exact_lengths": options.exact,
            "dp_pin": options.dp_pin,
            "notes": [*options.notes, *self._notes()],
            "confidence": CONFIDENCE,
            "tolerances": dict(options.tolerances),
            "noise_floor": self.floor and {**self.floor.described(), "stored": False},
            "slo": None if options.slo is None else str(options.slo),
            "price_usd_h": options.price_usd_h,
            "declared_trades": dict(options.trades),
            "arms": {
                letter: {
                    "label": arm.label,
                    "python": arm.python,
                    "env": dict(arm.env),
                    "flags": list(arm.flags),
                    "url": arm.url,
                    "versions": self._arm_versions(letter),
                    "valid_answers": answer_validity(
                        record for r in self.runs if r.arm == letter for record in r.records
                    ),
                    "figures": summarise(self.runs, letter, options.slo, options.price_usd_h)
                    if any(r.arm == letter for r in self.runs)
                    else None,
                }
                for letter, arm in options.arms.items()
                if letter in used
            },
            "comparisons": [asdict(comparison) for comparison in comparisons],
            "runs": self.slots,
            **self.started.facts(options.command),
        }


def answer_validity(records: Iterable[RequestRecord]) -> dict[str, Any] | None:
    """Return how many answers had to be machine-readable and how many were; None where none had to."""
    judged = [record for record in records if record.answer_format is not None]
    if not judged:
        return None
    valid = sum(1 for record in judged if record.answer_valid)
    return {"expected": len(judged), "valid": valid, "share": valid / len(judged)}


def _usage_seen(run: ArmRun) -> bool:
    return any(record.server_prompt_tokens is not None for record in run.records)


def _doubts_of(run: ArmRun) -> list[str]:
    """Return what makes this run doubtful by itself."""
    doubts = []
    if run.client_cpu_share > MAX_CLIENT_CPU_SHARE:
        doubts.append(
            f"a client process computed for {run.client_cpu_share:.0%} of the time, so it measures itself; "
            "more --clients, fewer sessions, or a faster machine for the gate"
        )
    if run.drift is not None and run.drift > prompts.MAX_DRIFT:
        doubts.append(
            f"prompts drift by {run.drift:.1%} from their planned token counts, at most {prompts.MAX_DRIFT:.0%} "
            "is judged"
        )
    return doubts


def _shorten(log: Path) -> None:
    """Keep beginning and end of a server log: start-up with all arguments, and the last requests."""
    lines = log.read_text(errors="replace").splitlines(keepends=True)
    left_out = len(lines) - LOG_HEAD_LINES - LOG_FOOT_LINES
    if left_out > 0:
        middle = f"[… {left_out} lines left out, --keep-logs keeps them …]\n"
        log.write_text("".join([*lines[:LOG_HEAD_LINES], middle, *lines[-LOG_FOOT_LINES:]]))
