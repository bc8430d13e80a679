# SPDX-License-Identifier: Apache-2.0
"""``numinous gate accuracy``: force stock and patched along the same tokens, and judge how far they are apart."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from numinous_tooling.engine.planted import FAULTS, counter_name
from numinous_tooling.gate import folder, provenance
from numinous_tooling.gate import options as shared
from numinous_tooling.gate.accuracy import gsm8k
from numinous_tooling.gate.accuracy.client import EngineClient, NotANumber
from numinous_tooling.gate.accuracy.measure import (
    ROWS,
    Counters,
    Measurement,
    Plan,
    Size,
    make_plan,
    measure,
    protocol_of,
    unshaken,
    vocabulary_of,
)
from numinous_tooling.gate.accuracy.records import FILES, write_records
from numinous_tooling.gate.accuracy.sequences import MIN_TOKENS, Document, load_texts
from numinous_tooling.gate.accuracy.verdict import (
    DEFAULT_EXACT_TOLERANCE,
    DEFAULT_MARGIN,
    Rule,
    Verdict,
    judge,
)
from numinous_tooling.gate.arms import Arm, parse_features, server_command, server_environment
from numinous_tooling.gate.engaged import (
    CountersReader,
    GraphBatches,
    Proof,
    counted_between,
    graph_batches,
    log_size,
    proof_of,
)
from numinous_tooling.gate.errors import GateError, ServerFailed
from numinous_tooling.gate.servers import Interrupts, Server, free_port
from numinous_tooling.gate.verdict import EXIT_CODES

CPU_SIZE = Size(per_kind=4, length=64, decode_tokens=12, concurrency=4, answer_tokens=96)
GPU_SIZE = Size(per_kind=32, length=512, decode_tokens=128, concurrency=4, answer_tokens=320)
# Tokens per prefill chunk. A batch of whole sequences fits into one, so that only *chunked* is chunked.
CPU_CHUNK, GPU_CHUNK = 256, 2048
# Larger vocabularies are asked for their most likely tokens only: whole ones would be gigabytes of JSON.
FULL_VOCABULARY = 4096
TOP_LOGPROBS = 128
LAUNCH_MODULE = "sglang.launch_server"
# How long a server that broke off may take to be seen as ended.
DEATH_WAIT_S = 2.0
YARDSTICK = "C, the yardstick"


@dataclass(frozen=True)
class AccuracyOptions:
    """Everything that a run needs; the command line fills it in.

    Args:
        arms: A and B; empty where `urls` names running servers.
        plant: fault of arm B's server, or None.
        top_logprobs: length of the lists, or None for the default.
        yardstick: server flags of arm C, whose distance from A stands in place of the floor; None for the floor.
    """

    arms: Mapping[str, Arm]
    urls: Mapping[str, str]
    templates: Mapping[str, tuple[str, ...]]
    model: str | None
    features: tuple[str, ...]
    plant: str | None
    texts: Mapping[str, Sequence[Document]]
    problems: gsm8k.Problems | None
    size: Size
    top_logprobs: int | None
    rule: Rule
    out: Path
    port_base: int | None
    start_timeout_s: float
    stall_timeout_s: float
    command: str
    yardstick: str | None = None


@dataclass
class AccuracyResult:
    """What came out, and the content of verdict.json."""

    verdict: Verdict
    document: dict[str, Any]


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the gate."""
    accuracy = commands.add_parser(
        "accuracy",
        help="force stock and patched along the same tokens, judge the distance of their distributions",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_options(accuracy, features="none")


def add_options(parser: argparse.ArgumentParser, features: str) -> None:
    """Add the options of the command; `features` is the default of ``--features``."""
    shared.add_server_options(parser, features=features)
    add = parser.add_argument
    add(
        "--text",
        action="append",
        default=[],
        metavar="KIND=FILE",
        help="text to score: plain, or .jsonl(.gz) of transcripts with messages; left out: the package's own",
    )
    add(
        "--sequences",
        type=shared.positive,
        help="sequences of each kind; left out: 4 on CPU, 32 on GPU",
    )
    add(
        "--tokens",
        type=shared.positive,
        help="tokens of a sequence; left out: 64 on CPU, 512 on GPU",
    )
    add(
        "--decode-tokens",
        type=shared.positive,
        help="generated tokens of a sequence; left out: 12 on CPU, 128 on GPU",
    )
    add(
        "--concurrency",
        type=shared.positive,
        help="sequences per request; left out: 4; the floor is measured with half as many (2 for 1)",
    )
    add(
        "--chunk",
        type=shared.positive,
        help="tokens per prefill chunk of all arms; left out: 256 on CPU, 2048 on GPU",
    )
    add(
        "--top-k",
        type=shared.positive,
        help=f"tokens listed per position; left out: all of a vocabulary up to {FULL_VOCABULARY}, else {TOP_LOGPROBS}",
    )
    add("--gsm8k", type=Path, metavar="FILE", help="JSON lines of question and answer")
    add("--gsm8k-count", type=shared.positive, metavar="N", help="only the first N problems")
    add(
        "--gsm8k-tokens",
        type=shared.positive,
        metavar="N",
        help="tokens an answer may take; left out: 96 on CPU, 320 on GPU",
    )
    add(
        "--margin",
        type=shared.ratio,
        default=DEFAULT_MARGIN,
        help="how many times max(floor, 1e-5 nats) B may be away",
    )
    add(
        "--exact-tolerance",
        type=shared.ratio,
        default=DEFAULT_EXACT_TOLERANCE,
        metavar="F",
        help="loss of exact match, a share, that a PASS of that row must have been able to see",
    )
    add(
        "--bit-exact",
        action="store_true",
        help="demand that every token and log-probability agrees in every bit",
    )
    add(
        "--yardstick",
        metavar="FLAGS",
        help="server flags of a third arm, stock: how far it is from A takes the place of the floor, such as "
        "'--kv-cache-dtype fp8_e4m3'; give a --margin that fits",
    )
    add("--plant", choices=tuple(FAULTS), help="plant a numeric fault in B's server; must FAIL")
    add("--url-a", metavar="URL", help="judge running servers instead of starting any: arm A")
    add("--url-b", metavar="URL", help="the same for arm B")


def run(
    options: argparse.Namespace,
    arguments: Sequence[str],
    interrupts: Interrupts,
    counters_reader: CountersReader,
) -> int:
    """Run the gate and print its verdict; returns the exit code."""
    gate = _accuracy_options(options, arguments)
    result = run_accuracy(gate, interrupts, counters_reader)

    from numinous_tooling.gate.accuracy.report import (
        terminal_text,
        write_html,
    )  # matplotlib takes a second to import

    write_html(result, gate.out)
    shared.show(options, result.document, terminal_text(result, gate.out))
    return EXIT_CODES[result.verdict.word]


def _accuracy_options(options: argparse.Namespace, arguments: Sequence[str]) -> AccuracyOptions:
    features = parse_features(options.features)
    urls = _urls(options, features)
    if options.gsm8k is None and (options.gsm8k_count or options.gsm8k_tokens):
        raise GateError("--gsm8k-count and --gsm8k-tokens need --gsm8k FILE")
    if options.bit_exact and options.concurrency is not None and options.concurrency > 1:
        raise GateError("--bit-exact sends one sequence at a time; leave --concurrency out")
    if options.tokens is not None and options.tokens < MIN_TOKENS:
        raise GateError(f"--tokens {options.tokens}: a sequence has at least {MIN_TOKENS} tokens")
    if options.decode_tokens == 1:
        raise GateError("--decode-tokens 1: the first token comes from the prefill; want 2 or more")
    if options.yardstick is not None and (options.bit_exact or not options.yardstick.strip()):
        raise GateError("--yardstick names server flags, and has no meaning with --bit-exact")
    if options.seed < 0:
        raise GateError(f"--seed {options.seed}: want a whole number from 0 on")
    texts = load_texts(_text_paths(options.text))
    problems = gsm8k.load(options.gsm8k, options.gsm8k_count) if options.gsm8k else None
    gpu = not urls and shared.on_gpu(options.device, options.python_a)
    size = GPU_SIZE if gpu else CPU_SIZE
    size = Size(
        per_kind=options.sequences or size.per_kind,
        length=options.tokens or size.length,
        decode_tokens=options.decode_tokens or size.decode_tokens,
        concurrency=1 if options.bit_exact else options.concurrency or size.concurrency,
        answer_tokens=options.gsm8k_tokens or size.answer_tokens,
    )
    arms: Mapping[str, Arm] = {}
    templates: dict[str, tuple[str, ...]] = {}
    model = options.model
    if not urls:
        model = options.model or shared.default_model()
        chunk = options.chunk or (GPU_CHUNK if gpu else CPU_CHUNK)
        # In front of the user's own flags: the engine takes the last.
        options.flags_all = f"--chunked-prefill-size={chunk} {options.flags_all}"
        arms = shared.arms_of(options, features, model, gpu=gpu, flags_c=options.yardstick or "")
        template = shared.server_template(options)
        templates = {"A": template, "B": _planted(template, options.plant), "C": template}
    return AccuracyOptions(
        arms=arms,
        urls=urls,
        templates=templates,
        model=model,
        features=features,
        plant=options.plant,
        texts=texts,
        problems=problems,
        size=size,
        top_logprobs=options.top_k,
        rule=Rule(
            options.margin,
            options.exact_tolerance,
            options.bit_exact,
            options.seed,
            yardstick=options.yardstick is not None,
        ),
        out=shared.out_folder(options),
        port_base=options.port_base,
        start_timeout_s=options.start_timeout,
        stall_timeout_s=options.stall_timeout,
        command=shared.command_text(arguments),
        yardstick=options.yardstick,
    )


def _urls(options: argparse.Namespace, features: Sequence[str]) -> dict[str, str]:
    if not (options.url_a or options.url_b):
        return {}
    if not (options.url_a and options.url_b):
        raise GateError("--url-a and --url-b go together")
    refused = {
        "--features": bool(features),
        "--plant": bool(options.plant),
        "--server-command": bool(options.server_command),
        "--chunk": bool(options.chunk),
        "--yardstick": options.yardstick is not None,
        "--flags-a, --flags-b, --flags-all": bool(
            options.flags_a or options.flags_b or options.flags_all
        ),
    }
    for name, given in refused.items():
        if given:
            raise GateError(
                f"{name} is for servers that the gate starts; leave it out with --url-a"
            )
    return {"A": options.url_a.rstrip("/"), "B": options.url_b.rstrip("/")}


def _text_paths(values: Sequence[str]) -> dict[str, Path]:
    paths = {}
    for value in values:
        kind, equals, path = value.partition("=")
        if not (kind and equals and path):
            raise GateError(f"--text {value}: write KIND=FILE, such as prose=book.txt")
        if kind in paths:
            raise GateError(f"--text {value}: kind {kind} is given twice")
        paths[kind] = Path(path)
    return paths


def _planted(template: tuple[str, ...], fault: str | None) -> tuple[str, ...]:
    """Return the server command that plants a fault: `launch_server` replaced by the planting module."""
    if fault is None:
        return template
    if LAUNCH_MODULE not in template:
        raise GateError(f"--plant needs a server command that holds the word {LAUNCH_MODULE}")
    at = template.index(LAUNCH_MODULE)
    return (*template[:at], "numinous_tooling.engine.planted", fault, *template[at + 1 :])


def run_accuracy(
    options: AccuracyOptions, interrupts: Interrupts, counters_reader: CountersReader
) -> AccuracyResult:
    """Measure A twice and B once, judge, and leave the records in `options.out` whatever happens."""
    with folder.locked(options.out):
        run = _Run(options, interrupts, counters_reader)
        with folder.reason_left(options.out, run.write_unfinished):
            folder.clear(options.out, ("verdict.json", "report.html", *FILES))
            return run.execute()


@dataclass
class _Session:
    """An arm's server while it runs."""

    client: EngineClient
    counters: Callable[[], Counters]


@dataclass
class _ArmFacts:
    """What is kept of an arm's server."""

    command: list[str] = field(default_factory=list)
    counters: dict[str, dict[str, int]] = field(default_factory=dict)
    counters_at_start: dict[str, dict[str, int]] = field(default_factory=dict)
    graph_batches: GraphBatches = field(default_factory=lambda: graph_batches(None, 0))
    version: str | None = None
    ready_s: float | None = None


def size_of_floor(concurrency: int) -> int:
    """Sequences in a request where the floor is measured."""
    return concurrency // 2 if concurrency > 1 else 2


class _Run:
    """The state of one run."""

    def __init__(
        self, options: AccuracyOptions, interrupts: Interrupts, counters_reader: CountersReader
    ) -> None:
        self.options = options
        self.interrupts = interrupts
        self.read_counters = counters_reader
        self.started = provenance.Started()
        self.facts: dict[str, _ArmFacts] = {}
        self.vocabulary: int | None = None
        self.plan: Plan | None = None
        self.alone: list[str] = []

    def execute(self) -> AccuracyResult:
        """Measure and judge."""
        size = self.options.size
        failures: list[str] = []
        with self._session("A") as session:
            plan = self.plan = make_plan(
                session.client,
                self.options.texts,
                self.options.problems,
                size,
                self.options.rule.seed,
            )
            base = self._measure("A", session, plan, again=False)
            if self.options.yardstick is None:
                again = self._measure("A again", session, plan, again=True)
                if not self.options.rule.bit_exact:
                    self._shake(session, plan, base, again)
        if self.options.yardstick is not None:
            with self._session("C") as session:
                again = self._measure(YARDSTICK, session, plan, again=False)
        with self._session("B") as session:
            try:
                test = self._measure("B", session, plan, again=False)
            except NotANumber as error:
                failures.append(str(error))
                test = Measurement()
        proof = self._proof()
        failures += proof.failures
        verdict = judge(
            plan,
            base,
            again,
            test,
            self.options.rule,
            vocabulary=self.vocabulary,
            failures=failures,
            doubts=[*proof.doubts, *self._doubts()],
        )
        document = self._document(verdict, plan, base, again, test)
        document["notes"] += proof.notes
        self._write_records(verdict, plan, base, again, test)
        self._write(document)
        return AccuracyResult(verdict, document)

    def _measure(self, name: str, session: _Session, plan: Plan, *, again: bool) -> Measurement:
        concurrency = self.options.size.concurrency
        bit_exact = self.options.rule.bit_exact
        if again and not bit_exact:
            concurrency = size_of_floor(concurrency)
        return measure(
            session.client,
            plan,
            concurrency=concurrency,
            # A claim of equal bits is about the same batches; the floor of distances is about others.
            reverse=again and not bit_exact,
            counters=session.counters,
            on_phase=lambda text: _say(name, text),
        )

    def _shake(self, session: _Session, plan: Plan, base: Measurement, again: Measurement) -> None:
        """Measure those rows of `again` one sequence at a time that other batches did not change by a bit."""
        still = unshaken(base, again)
        concurrency = self.options.size.concurrency
        if not still or 1 in (concurrency, size_of_floor(concurrency)):
            return
        alone = measure(
            session.client,
            plan,
            concurrency=1,
            reverse=True,
            counters=session.counters,
            on_phase=lambda text: _say("A again, alone", text),
            only=still,
        )
        again.rows.update(alone.rows)
        again.engaged.update(alone.engaged)
        if "cold" in alone.rows and "protocol" in again.rows:
            again.rows["protocol"] = protocol_of(plan, again)
        self.alone = still

    @contextlib.contextmanager
    def _session(self, letter: str) -> Iterator[_Session]:
        facts = self.facts[letter] = _ArmFacts()
        if self.options.urls:
            url = self.options.urls[letter]
            with self._client(url, letter, None) as client:
                yield self._opened(client, facts, lambda: {})
            return
        with self._server(letter, facts) as server, self._server_client(server) as client:
            state = Path(server.env["NUMINOUS_STATE_DIR"])
            yield self._opened(client, facts, lambda: self.read_counters(state))

    def _opened(
        self, client: EngineClient, facts: _ArmFacts, counters: Callable[[], Counters]
    ) -> _Session:
        info = client.server_info()
        facts.version = str(info["version"]) if "version" in info else None
        self.vocabulary = vocabulary_of(self.options.model or client.model_path())
        client.top_logprobs, client.vocabulary = self._top_logprobs(), self.vocabulary
        return _Session(client, counters)

    def _top_logprobs(self) -> int:
        whole = self.vocabulary
        if self.options.top_logprobs is not None:
            return min(self.options.top_logprobs, whole or self.options.top_logprobs)
        return whole if whole is not None and whole <= FULL_VOCABULARY else TOP_LOGPROBS

    def _client(
        self, url: str, name: str, failed: Callable[[str], GateError] | None
    ) -> EngineClient:
        return EngineClient(url, name, self.options.stall_timeout_s, TOP_LOGPROBS, failed)

    def _server_client(self, server: Server) -> EngineClient:
        def failed(how: str) -> GateError:
            deadline = time.monotonic() + DEATH_WAIT_S
            while time.monotonic() < deadline:
                try:
                    server.check_alive()
                except ServerFailed as death:
                    return death
                if "broke off" not in how:
                    break
                time.sleep(0.1)
            return server.failed(how)

        return self._client(server.url, server.name, failed)

    @contextlib.contextmanager
    def _server(self, letter: str, facts: _ArmFacts) -> Iterator[Server]:
        options = self.options
        arm = options.arms[letter]
        state = options.out / f"state-{letter}"
        shutil.rmtree(state, ignore_errors=True)  # of a run that was killed
        state.mkdir()
        index = "ABC".index(letter)
        port = free_port() if options.port_base is None else options.port_base + index
        assert options.model is not None
        server = Server(
            letter,
            server_command(arm, options.templates[letter], options.model, port),
            server_environment(arm, os.environ, str(state.resolve())),
            options.out / f"server-{letter}.log",
            port,
        )
        facts.command = server.command
        with server.running(self.interrupts):
            fault = f", fault {options.plant}" if options.plant and letter == "B" else ""
            _say(letter, f"starting {arm.label}{fault}")
            facts.ready_s = server.wait_ready(options.start_timeout_s, lambda elapsed: None)
            facts.counters_at_start = self.read_counters(state)
            log_from = log_size(server.log)
            yield server
        # Read after the end, so that counts which a process writes last are in.
        facts.counters = counted_between(facts.counters_at_start, self.read_counters(state))
        facts.graph_batches = graph_batches(server.log, log_from)
        shutil.rmtree(state, ignore_errors=True)

    def _proof(self) -> Proof:
        b = self.facts["B"]
        return proof_of(
            "B", self.options.features, b.counters, b.counters_at_start, b.graph_batches
        )

    def _doubts(self) -> list[str]:
        doubts = []
        for letter in sorted(set(self.facts) - {"B"}):
            facts = self.facts[letter]
            if counted := facts.counters | facts.counters_at_start:
                doubts.append(
                    f"{letter} is stock but shows counters of {', '.join(sorted(counted))}"
                )
        plant = self.options.plant
        if plant:
            # From the server's start on: a fault in a captured graph is counted at its capture alone, and a planted
            # server is nothing but the fault.
            b, name = self.facts["B"], counter_name(plant)
            happened = sum(
                counts.get(name, {}).get("engaged", 0)
                for counts in (b.counters_at_start, b.counters)
            )
            if happened <= 0:
                doubts.append(f"the planted fault {plant} never happened in B")
        return doubts

    def _document(
        self, verdict: Verdict, plan: Plan, base: Measurement, again: Measurement, test: Measurement
    ) -> dict[str, Any]:
        document = self._head(verdict.word, verdict.reasons)
        document["rows"] = [asdict(row) for row in verdict.rows]
        document["not_measured"] = {ROWS[row]: reason for row, reason in plan.missing.items()}
        document["notes"] = list(plan.notes)
        if self.alone:
            rows = ", ".join(ROWS[row] for row in self.alone)
            document["notes"].append(
                f"floor of {rows}: of single sequences, since other batches did not change a bit there"
            )
        document["engaged"] = {
            "A": base.engaged,
            "A again" if self.options.yardstick is None else YARDSTICK: again.engaged,
            "B": test.engaged,
        }
        problems = self.options.problems
        if problems is not None:
            document["gsm8k"] = {
                "problems": len(plan.problems),
                "in_file": problems.total,
                "published_test_split": problems.standard,
            }
        return document

    def _head(self, word: str, reasons: Sequence[str]) -> dict[str, Any]:
        """Return what every verdict.json holds: `schema` changes when a field changes its meaning."""
        options = self.options
        size = options.size
        whole = self.vocabulary is not None and self._top_logprobs() == self.vocabulary
        pythons = {letter: arm.python for letter, arm in options.arms.items()}
        versions = {python: provenance.versions_of(python) for python in set(pythons.values())}
        return {
            "schema": 1,
            "gate": "accuracy",
            "verdict": word,
            "reasons": list(reasons),
            "features": list(options.features),
            "plant": options.plant,
            "model": options.model,
            "urls": dict(options.urls),
            "method": {
                "distribution": "full vocabulary" if whole else "top k and rest",
                "listed_tokens": self._top_logprobs(),
                "vocabulary": self.vocabulary,
                "bit_exact": options.rule.bit_exact,
                "margin": options.rule.margin,
                "yardstick": options.yardstick,
                "exact_tolerance": options.rule.exact_tolerance,
                "seed": options.rule.seed,
            },
            "workload": {
                "kinds": sorted(options.texts),
                "sequences": len(self.plan.sequences) if self.plan else None,
                "tokens": size.length,
                "decode_tokens": size.decode_tokens,
                "concurrency": size.concurrency,
                "long_tokens": [len(s) for s in self.plan.long_sequences] if self.plan else None,
            },
            "arms": {
                letter: {
                    "label": options.arms[letter].label if options.arms else options.urls[letter],
                    "command": facts.command,
                    "env": dict(options.arms[letter].env) if options.arms else {},
                    "versions": versions.get(pythons.get(letter, "")),
                    "server_version": facts.version,
                    "ready_s": facts.ready_s,
                    "counters": facts.counters,
                    "counters_at_start": facts.counters_at_start,
                    "graph_batches": facts.graph_batches,
                }
                for letter, facts in self.facts.items()
            },
            **self.started.facts(options.command),
        }

    def write_unfinished(self, reason: str, tail: str | None) -> None:
        """Leave a verdict.json that says why there is no verdict."""
        document = self._head("INCONCLUSIVE", (reason,))
        if tail is not None:
            document["server_log_tail"] = tail.splitlines()
        self._write(document)

    def _write(self, document: dict[str, Any]) -> None:
        (self.options.out / "verdict.json").write_text(json.dumps(document, indent=1) + "\n")

    def _write_records(
        self, verdict: Verdict, plan: Plan, base: Measurement, again: Measurement, test: Measurement
    ) -> None:
        write_records(self.options.out, verdict, plan, base, again, test)


def _say(name: str, text: str) -> None:
    print(f"accuracy: {name}: {text}", file=sys.stderr, flush=True)
