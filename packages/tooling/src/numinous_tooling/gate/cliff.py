# SPDX-License-Identifier: Apache-2.0
"""``numinous gate cliff``: how many users with how much context until each gets too few tokens per second, per arm.

**Probe.** One concurrency at one context length, with an empty cache: every user's context is filled first (one prompt
each, all prompts at once; not measured), then all users go on together in a closed loop of turns without tool gaps. A
turn's prompt is the one before, the answer in it, and `NEW_TOKENS` more, so a server that still has the context
prefills only those; one that had to evict it, or to queue the user, starts over, and that is the cliff. A user's figure
is output tokens over seconds waited for them, prefill and queue included. The probe **holds** if nine of ten users
get at least the limit (their 10th percentile) and no answer failed or was short.

**Length.** A user gets as many tokens as the limit gives in half of `--probe-seconds`. So a server at the limit needs
half of that time; at the whole of it the probe is cut, its slowest user being below half of the limit, and does not
hold. Filling comes on top and may take `FILL_FACTOR` times as long; the pool decides how much there is to fill, which
is why it can be capped (below).

**Pool.** `--pool-bytes` gives both arms the same bytes for cached rows and computes from each arm's own row bytes
(`roofline`) how many tokens they hold, handed to the server as `--max-total-tokens`: an arm with smaller rows gets more
tokens, as it would with all of the memory. `--pool-tokens` gives both the same tokens, `--mem-fraction` the
engine's own `--mem-fraction-static`. Without any the server takes what it likes. What it reports stands in cliff.json.

**Search** over concurrency, for each context from the shortest on: `cliff_search`. One server per letter of the order
runs all probes of that letter; the first probe warms it up and is made twice. The cliff of an arm at a context is a
bracket: it holds at `holds`, and at `fails` it does not. Repeats of an arm (`--order ABBA`) widen its bracket to the
least and greatest seen.

**Verdict**, B against A, the first line that applies: FAIL if a feature was to run in B and did not (`engaged.proof_of`). INCONCLUSIVE if nobody knows, if
a client lagged in a probe whose word that lag could have made (`cliff_probe`; at other probes lag is told, not judged), or
if an answer differed from what was asked for at a single user. FAIL if B's cliff is lower at a
context by more than the tolerance: `B.fails <= A.holds x (1 - tolerance)`. PASS if at every context B holds what A
held, less the tolerance: `B.holds >= A.holds x (1 - tolerance)`; where A still held at `--max-concurrency`, that is all
it says. INCONCLUSIVE otherwise.

What it cannot show: each letter of the order is one server start, and with one per arm nothing tells a better server
from a lucky start. All users have the same context and no tool gaps; real sessions differ and pause. A user's tokens
come from planned prompts, so answers are prefilled again in the next turn (`plan`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from numinous_tooling import roofline
from numinous_tooling.gate import folder, provenance
from numinous_tooling.gate import options as shared
from numinous_tooling.gate.arms import (
    Arm,
    flag_value,
    parse_features,
    parse_order,
    server_command,
    server_environment,
)
from numinous_tooling.gate.cliff_probe import NEW_TOKENS, CliffOptions, Probe, Prober, turn_prompts
from numinous_tooling.gate.cliff_search import Bracket, search
from numinous_tooling.gate.engaged import (
    CountersReader,
    GraphBatches,
    counted_between,
    graph_batches,
    log_size,
)
from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.measures import ArmRun
from numinous_tooling.gate.progress import Progress, open_progress
from numinous_tooling.gate.servers import Interrupts, Server, free_port
from numinous_tooling.gate.verdict import EXIT_CODES, Word, proof_of_runs
from numinous_tooling.gate.workload import read_model

SCHEMA = 1
# Contexts and tokens per answer.
CPU_DEFAULTS = ((128, 256, 512), 8)
GPU_DEFAULTS = ((4096, 16384, 65536), 64)
# The engine's names of row formats; others are named with --kv-dtype-a and --kv-dtype-b.
KV_DTYPE_OF_FLAG = {
    "auto": "bf16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "fp4_e2m1": "nvfp4",
}
TP_FLAGS = ("--tp", "--tp-size", "--tensor-parallel-size")


@dataclass
class Search:
    """One server's search: its brackets per context, all its probes, and its pool."""

    name: str
    arm: str
    brackets: dict[int, Bracket] = field(default_factory=dict)
    probes: list[Probe] = field(default_factory=list)
    pool_tokens: object = None
    counters: dict[str, dict[str, int]] = field(default_factory=dict)
    counters_at_start: dict[str, dict[str, int]] = field(default_factory=dict)
    """Until the server was ready; CUDA graphs are captured before that."""
    graph_batches: GraphBatches = field(default_factory=lambda: graph_batches(None, 0))


def search_contexts(
    options: CliffOptions,
    found: Search,
    probe: Callable[[int, int], Probe],
    say: Callable[[str], None],
) -> None:
    """Search every context; the guess for the next is the last cliff, scaled by the contexts."""
    guess = 1.0
    before: int | None = None
    for context in options.contexts:
        if before is not None:
            guess = guess * before / context

        def ask(concurrency: int, context: int = context) -> bool:
            answer = probe(context, concurrency)
            found.probes.append(answer)
            rate = "cut" if answer.rate_p10 is None else f"{answer.rate_p10:.1f} tok/s"
            say(f"context {context}, {concurrency} users: {rate}")
            return answer.holds

        bracket = search(ask, max(1, round(guess)), options.highest(context), options.resolution)
        found.brackets[context] = bracket
        guess, before = float(bracket.holds or 1), context


@dataclass(frozen=True)
class Cliff:
    """The bracket of an arm at a context over all its servers; None: not even 1 holds, or nothing was seen to fail."""

    holds: int | None
    fails: int | None
    disputed: tuple[int, ...]
    inversions: tuple[int, ...]


def frontier(searches: Sequence[Search], arm: str) -> dict[int, Cliff]:
    """Return an arm's cliff per context: where repeats differ, the least that held and the greatest that failed."""
    own = [found for found in searches if found.arm == arm]
    cliffs = {}
    for context in own[0].brackets if own else ():
        brackets = [found.brackets[context] for found in own]
        holds = [bracket.holds for bracket in brackets]
        fails = [bracket.fails for bracket in brackets]
        cliffs[context] = Cliff(
            None if None in holds else min(n for n in holds if n is not None),
            None if None in fails else max(n for n in fails if n is not None),
            tuple(sorted({n for bracket in brackets for n in bracket.disputed})),
            tuple(sorted({n for bracket in brackets for n in bracket.inversions})),
        )
    return cliffs


def judge(
    searches: Sequence[Search], features: Sequence[str], tolerance: float, limit: float
) -> tuple[Word, tuple[str, ...]]:
    """Return the verdict of B against A by the rule in the module docstring, and its reasons.

    Args:
        searches: all servers' searches.
        features: what was to run in arm B.
        tolerance: how much lower B's cliff may be, relative.
        limit: tokens per second per user, by which the probes were judged.
    """
    runs = [
        ArmRun(
            i,
            found.arm,
            int(found.name[1:]),
            [],
            0.0,
            0.0,
            0.0,
            counters=found.counters,
            counters_at_start=found.counters_at_start,
            graph_batches=found.graph_batches,
        )
        for i, found in enumerate(searches)
    ]
    proof = proof_of_runs([run for run in runs if run.arm == "B"], features)
    if proof.failures:
        return "FAIL", proof.failures
    doubtful = [*proof.doubts]
    doubtful += [
        f"{found.name}: the client lagged at {p.concurrency} users of {p.context} tokens, {p.lag}{_reach(p, limit)}"
        for found in searches
        for p in found.probes
        if p.in_doubt(limit)
    ]
    doubtful += [
        f"{found.name}: a single user of {p.context} tokens got a bad answer ({p.error})"
        for found in searches
        for p in found.probes
        if p.concurrency == 1 and p.error
    ]
    doubtful += [
        f"{run.name} is stock but shows counters of {', '.join(sorted(counted))}"
        for run in runs
        if run.arm == "A" and (counted := run.counters | run.counters_at_start)
    ]
    if doubtful:
        return "INCONCLUSIVE", tuple(doubtful)
    a, b = frontier(searches, "A"), frontier(searches, "B")
    lower, unclear = [], []
    for context, stock in a.items():
        needed = (stock.holds or 0) * (1 - tolerance)
        ours = b[context]
        if ours.fails is not None and ours.fails <= needed:
            lower.append(f"context {context}: B fails at {ours.fails}, A holds at {stock.holds}")
        elif (ours.holds or 0) < needed or stock.holds is None:
            unclear.append(
                f"context {context}: B holds at {ours.holds or 0}, A at {stock.holds or 0}; "
                "a finer --resolution or repeats (--order ABBA) decide"
                if stock.holds
                else f"context {context}: not even one user of stock reaches the limit; lower --limit"
            )
    if lower:
        return "FAIL", tuple(lower)
    if unclear:
        return "INCONCLUSIVE", tuple(unclear)
    open_ended = [str(context) for context, stock in a.items() if stock.fails is None]
    notes = [f"no cliff of A was reached at context {', '.join(open_ended)}"] if open_ended else []
    if lagged := sum(1 for found in searches for p in found.probes if p.lag):
        notes.append(f"the client lagged in probes whose word it cannot have made: {lagged}")
    return "PASS", (
        "B holds at every context what A holds, less the tolerance",
        *notes,
        *proof.notes,
    )


def _reach(probe: Probe, limit: float) -> str:
    """Return what a doubtful probe's users would get without the lag, in words."""
    rate = probe.rate_p10_least if probe.holds else probe.rate_p10_most
    if rate is None:
        return ""
    return f"; it {'holds' if probe.holds else 'fails'}, but lag can have made {probe.rate_p10:.4g} tok/s of {rate:.4g}, limit {limit:g}"


class CliffRun:
    """All searches of an order, and their file."""

    def __init__(
        self, options: CliffOptions, interrupts: Interrupts, counters_reader: CountersReader
    ) -> None:
        self.options = options
        self.interrupts = interrupts
        self.read_counters = counters_reader
        self.searches: list[Search] = []
        self.started = provenance.Started()
        self.progress: Progress = open_progress(len(options.order), 1)

    def execute(self) -> dict[str, Any]:
        """Search with each server of the order; return the content of cliff.json, which is written whatever happens."""
        options = self.options
        with folder.locked(options.out), folder.reason_left(options.out, self._write_unfinished):
            folder.clear(options.out, ("cliff.json", "report.html"))
            try:
                seen: dict[str, int] = {}
                for index, letter in enumerate(options.order):
                    seen[letter] = seen.get(letter, 0) + 1
                    self._search(index, options.arms[letter], f"{letter}{seen[letter]}")
            finally:
                self.progress.close()
            return self._write(
                *judge(self.searches, options.arms["B"].features, options.tolerance, options.limit)
            )

    def _write_unfinished(self, reason: str, tail: str | None) -> None:
        self._write("INCONCLUSIVE", (reason,))

    def _write(self, word: Word, reasons: Sequence[str]) -> dict[str, Any]:
        document = self._document(word, reasons)
        (self.options.out / "cliff.json").write_text(json.dumps(document, indent=1) + "\n")
        return document

    def _search(self, index: int, arm: Arm, name: str) -> None:
        options = self.options
        found = Search(name, arm.letter)
        self.searches.append(found)
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
            server.wait_ready(
                options.start_timeout_s,
                lambda elapsed: self.progress.phase(f"server starting ({elapsed:.0f} s)"),
            )
            if options.arms["B"].features:
                found.counters_at_start = self.read_counters(state_dir)
            log_from = log_size(server.log)
            found.pool_tokens = server.info().get("max_total_num_tokens")
            prober = Prober(options, server, self.interrupts)
            search_contexts(options, found, prober.probe, self.progress.phase)
        if options.arms["B"].features:
            found.counters = counted_between(found.counters_at_start, self.read_counters(state_dir))
        found.graph_batches = graph_batches(server.log, log_from)
        shutil.rmtree(state_dir, ignore_errors=True)
        cliffs = ", ".join(f"{c}: {b.holds or 0}" for c, b in found.brackets.items())
        self.progress.end(f"{len(found.probes)} probes; users that hold, by context: {cliffs}")

    def _document(self, word: Word, reasons: Sequence[str]) -> dict[str, Any]:
        """Return cliff.json: `schema` changes when a field changes its meaning."""
        options = self.options
        done = [found for found in self.searches if len(found.brackets) == len(options.contexts)]
        return {
            "schema": SCHEMA,
            "verdict": word,
            "reasons": list(reasons),
            "limit_tok_s_user": options.limit,
            "contexts": list(options.contexts),
            "max_concurrency": options.max_concurrency,
            "clients": options.clients,
            "resolution": options.resolution,
            "tolerance": options.tolerance,
            "order": options.order,
            "features": list(options.arms["B"].features),
            "model": options.model.path,
            "probe": {
                "seconds": options.probe_s,
                "turns": options.turns,
                "output": options.output,
                "new_tokens": NEW_TOKENS,
            },
            "pool": dict(options.pool),
            "arms": {
                letter: {
                    "label": arm.label,
                    "env": dict(arm.env),
                    "flags": list(arm.flags),
                    "versions": provenance.versions_of(arm.python),
                    "frontier": {
                        str(context): asdict(cliff)
                        for context, cliff in frontier(done, letter).items()
                    },
                }
                for letter, arm in options.arms.items()
            },
            "searches": [
                {
                    "run": found.name,
                    "arm": found.arm,
                    "pool_tokens": found.pool_tokens,
                    "counters": found.counters,
                    "counters_at_start": found.counters_at_start,
                    "graph_batches": found.graph_batches,
                    "probes": [asdict(probe) for probe in found.probes],
                    "brackets": {
                        str(context): {
                            "holds": bracket.holds,
                            "fails": bracket.fails,
                            "disputed": list(bracket.disputed),
                            "inversions": list(bracket.inversions),
                        }
                        for context, bracket in found.brackets.items()
                    },
                }
                for found in self.searches
            ],
            "seed": options.seed,
            **self.started.facts(options.command),
        }


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the gate."""
    cliff = commands.add_parser(
        "cliff",
        help="find how many users with how much context keep a given speed, on both arms",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    shared.add_server_options(cliff, features="none")
    add = cliff.add_argument
    add(
        "--limit",
        type=shared.ratio,
        required=True,
        metavar="TOK_S",
        help="output tokens per second that nine of ten users must get",
    )
    add(
        "--contexts",
        type=_contexts,
        metavar="N,N",
        help="tokens per user; left out: 128,256,512 on CPU, 4096,16384,65536 on GPU",
    )
    add("--max-concurrency", type=shared.positive, default=256, help="users at most")
    add("--output", type=shared.positive, help="tokens per answer; left out: 8 on CPU, 64 on GPU")
    add("--probe-seconds", type=shared.ratio, default=20.0, metavar="S", help="a probe at most")
    add(
        "--resolution",
        type=_share,
        default=0.1,
        help="how far apart the ends of a bracket may stay, relative; 0: neighbours",
    )
    add("--tolerance", type=_share, default=0.1, help="how much lower B's cliff may be, relative")
    add("--order", default="AB", help="one server and one search per letter")
    pool = cliff.add_mutually_exclusive_group()
    pool.add_argument(
        "--pool-bytes",
        type=shared.byte_count,
        metavar="BYTES",
        help="cached rows of one rank; with a unit or without: 20GiB",
    )
    pool.add_argument("--pool-tokens", type=shared.positive, metavar="N", help="--max-total-tokens")
    pool.add_argument("--mem-fraction", type=_share, metavar="F", help="--mem-fraction-static")
    for letter in "ab":
        add(
            f"--kv-dtype-{letter}",
            metavar="DTYPE",
            help=f"row format of arm {letter.upper()} for --pool-bytes; left out: from --kv-cache-dtype",
        )
    shared.add_clients_option(cliff)
    add(
        "--max-client-lag",
        type=shared.not_negative,
        metavar="MS",
        help="p99 lag beyond which a client's clock is believed only so far; left out: from TPOT",
    )


def run(
    options: argparse.Namespace,
    arguments: Sequence[str],
    interrupts: Interrupts,
    counters_reader: CountersReader,
) -> int:
    """Search and print; returns the exit code."""
    chosen = _cliff_options(options, arguments)
    document = CliffRun(chosen, interrupts, counters_reader).execute()

    from numinous_tooling.gate.cliff_report import terminal_text, write_html

    write_html(document, chosen.out)
    shared.show(options, document, terminal_text(document, chosen.out))
    word: Word = document["verdict"]
    return EXIT_CODES[word]


def _contexts(text: str) -> tuple[int, ...]:
    values = [shared.positive(part.strip()) for part in text.split(",")]
    if values != sorted(set(values)):
        raise argparse.ArgumentTypeError(f"{text!r}: write each context once, in rising order")
    return tuple(values)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to below 1")
    return value


def _cliff_options(options: argparse.Namespace, arguments: Sequence[str]) -> CliffOptions:
    features = parse_features(options.features)
    order = parse_order(options.order, with_c=False)
    gpu = shared.on_gpu(options.device, options.python_a)
    contexts, output = GPU_DEFAULTS if gpu else CPU_DEFAULTS
    name = options.model or shared.default_model()
    arms = shared.arms_of(options, features, name, gpu=gpu)
    arms, pool = _with_pool(options, arms, name)
    model = read_model(name, shared.context_limit(arms))
    contexts = options.contexts or contexts
    if contexts[-1] > model.context_tokens:
        raise GateError(
            f"--contexts {contexts[-1]}: one request may have {model.context_tokens} tokens (model, flags, pool)"
        )
    chosen = CliffOptions(
        arms=arms,
        order=order,
        model=model,
        contexts=contexts,
        limit=options.limit,
        max_concurrency=options.max_concurrency,
        clients=options.clients,
        output=options.output or output,
        probe_s=options.probe_seconds,
        resolution=options.resolution,
        tolerance=options.tolerance,
        seed=options.seed,
        out=shared.out_folder(options),
        server_template=shared.server_template(options),
        port_base=options.port_base,
        start_timeout_s=options.start_timeout,
        stall_timeout_s=options.stall_timeout,
        max_lag_s=None if options.max_client_lag is None else options.max_client_lag / 1e3,
        pool=pool,
        command=shared.command_text(arguments),
    )
    for context in contexts:
        turn_prompts(context, chosen.turns, chosen.output)
    return chosen


def _with_pool(
    options: argparse.Namespace, arms: Mapping[str, Arm], model: str
) -> tuple[dict[str, Arm], dict[str, Any]]:
    """Return the arms with the flags that cap their pools, and what cliff.json says of the caps."""
    if options.pool_bytes is None and (options.kv_dtype_a or options.kv_dtype_b):
        raise GateError(
            "--kv-dtype-a and --kv-dtype-b say how --pool-bytes become tokens; give it too"
        )
    flags: dict[str, tuple[str, ...]] = {}
    pool: dict[str, Any]
    if options.pool_bytes is not None:
        pool = {"bytes": options.pool_bytes, "arms": {}}
        for letter, arm in arms.items():
            given = getattr(options, f"kv_dtype_{letter.lower()}")
            dtype, tokens = pool_tokens(model, arm, options.pool_bytes, given)
            pool["arms"][letter] = {"kv_dtype": dtype, "max_total_tokens": tokens}
            flags[letter] = ("--max-total-tokens", str(tokens))
    elif options.pool_tokens is not None:
        pool = {"max_total_tokens": options.pool_tokens}
        flags = dict.fromkeys(arms, ("--max-total-tokens", str(options.pool_tokens)))
    elif options.mem_fraction is not None:
        pool = {"mem_fraction_static": options.mem_fraction}
        flags = dict.fromkeys(arms, ("--mem-fraction-static", str(options.mem_fraction)))
    else:
        pool = {"capped": False}
    capped = {
        letter: replace(arm, flags=(*arm.flags, *flags.get(letter, ())))
        for letter, arm in arms.items()
    }
    return capped, pool


def pool_tokens(model: str, arm: Arm, budget: int, kv_dtype: str | None) -> tuple[str, int]:
    """Return the row format of an arm and how many tokens of it `budget` bytes of one rank hold."""
    from numinous_tooling.roofline import models, pools

    flag = flag_value(arm.flags, "--kv-cache-dtype") or "auto"
    dtype = kv_dtype or KV_DTYPE_OF_FLAG.get(flag)
    if dtype is None:
        raise GateError(
            f"--pool-bytes: the rows of --kv-cache-dtype {flag} are not known; name them with "
            f"--kv-dtype-{arm.letter.lower()} ({', '.join(pools.KV_DTYPES)})"
        )
    ranks = next((v for name in TP_FLAGS if (v := flag_value(arm.flags, name))), "1")
    page = flag_value(arm.flags, "--page-size")
    try:
        pool = pools.size(
            models.read(model),
            pools.kv_dtype(dtype),
            budget,
            int(ranks),
            pools.PoolOptions(page_size=int(page) if page else None),
        )
    except (roofline.RooflineError, ValueError) as error:
        raise GateError(f"--pool-bytes: {error}; or use --pool-tokens") from error
    return dtype, pool.tokens
