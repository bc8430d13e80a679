# SPDX-License-Identifier: Apache-2.0
"""What the engine benchmarks of KV caches share: servers in turn on one GPU, tokens that fit, answers, speed.

1. *Tokens*: what each server says it has room for, in the same share of the GPU's memory, beside the byte formula.
2. *Answers*: `--sequences` prompts of a kind are scored token by token: short and long, cold and behind a cached prefix, and greedily decoded. Random bytes; or,
   with ``--text`` and a trained model, windows of text. `BASE` answers twice, in batches of another size: that is the floor.
3. *Speed*, not with ``--text``: prefill of a long prompt; decode of many users at once behind prompts longer than the indexer's top-k.

`cache_verdict` judges; records are written before anything is said of it, the verdict in them. Exit 0: PASS; 1: FAIL; 2: undecided, or arms are missing.

An arm's figures (NAME.json, last), scores (NAME.npz) and server log (NAME.log) lie in the folder of ``--results`` as soon as it is done; the same command
takes up again what is there, ``--only kv4`` runs one arm, and once all are there they are judged together. Arms of one folder have the same
options and commit, or are refused; their records share a `set`. A server that fails does not keep the others from running. Without ``--results`` the folder
is a temporary one, kept unless all pass.

Nothing else may use the GPU meanwhile: the engine takes its share of what is free at the start, and pools are compared to 2 %.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from cache_verdict import BASE, Arm, Judged, Result, judge, overall

from numinous_kv_cache_4bit import __version__
from numinous_tooling import evidence
from numinous_tooling.bench import facts
from numinous_tooling.bench.clocks import CpuClock, CudaClock
from numinous_tooling.gate.accuracy.client import FLUSH_WAIT_S, EngineClient
from numinous_tooling.gate.accuracy.distance import Scores
from numinous_tooling.gate.errors import GateError, Interrupted, ServerFailed
from numinous_tooling.gate.provenance import source_state
from numinous_tooling.gate.servers import Interrupts, Server, free_port
from numinous_tooling.gate.verdict import EXIT_CODES
from numinous_tooling.patching.counters import read_totals
from numinous_tooling.patching.feature import flag_of

Tokens = list[int]
BYTES = 256  # ids below are the tokenizer's bytes
SHORT, LONG = (
    700,
    6000,
)  # in front of and behind the 2048 tokens up to which prefill is plain multi-head attention
ANSWER_LIMIT_S = 300.0
END_S = 3.0
NOT_MEASURED = (
    *("only", "results", "evidence", "start_timeout", "agree", "no_stock_fp8"),
    *("prefills", "flashmla", "native"),  # which arms there are; a set may grow
)
"""Options of which an arm's result does not depend."""
# Of `Scores`: as they are kept, which is as the engine gives them, and as they are reckoned with.
FIELDS = {
    "tokens": (np.int32, np.int64),
    "logprobs": (np.float32, np.float64),
    "top_ids": (np.int32, np.int64),
    "top_logprobs": (np.float32, np.float64),
    "cached": (np.int32, np.int64),
}


@dataclass(frozen=True)
class Bench:
    """One comparison.

    Args:
        op, case: of its records.
        arms: in the order in which they run: what is new first.
        bytes_of: bytes of a token in an arm's cache.
        make: writes the dummy into a new folder.
        agree: `cache_verdict`'s rule for arms without a peer.
        more: facts for all records, found when the arms are done.
    """

    op: str
    case: str
    arms: tuple[Arm, ...]
    bytes_of: Callable[[Arm], int]
    make: Callable[[Path], Any]
    agree: float | None = None
    more: Callable[[Path, Path, Interrupts], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Case:
    """Prompts that are answered in one way.

    Args:
        warm: so many tokens of each prompt are put into the cache before.
        start: tokens behind this one are scored.
        decode: instead, so many tokens are generated and scored.
    """

    prompts: list[Tokens]
    warm: int = 0
    start: int = 0
    decode: int = 0


# --- Prompts ----------------------------------------------------------------------------------------------------------


def prompt(seed: int, length: int) -> Tokens:
    """Random bytes."""
    rng = random.Random(seed)
    return [rng.randrange(BYTES) for _ in range(length)]


def random_cases(options: argparse.Namespace) -> dict[str, Case]:
    """Shorter and longer than the sparse path asks for; tails are scored behind what lies before them in the cache."""
    count, tail = options.sequences, options.tail
    short, long = (
        [prompt(10_000 * kind + n, length + tail) for n in range(count)]
        for kind, length in ((1, SHORT), (2, LONG))
    )
    users = [prompt(30_000 + n, options.context) for n in range(options.users)]
    return {
        "short, cold": Case([ids[:SHORT] for ids in short]),
        "short, prefix": Case(short, warm=SHORT, start=SHORT),
        "long, cold": Case([ids[:LONG] for ids in long], start=max(0, LONG - tail)),
        "long, prefix": Case(long, warm=LONG, start=LONG),
        "long, decode": Case(users, decode=options.tail_decode),
    }


def text_cases(options: argparse.Namespace, client: EngineClient) -> dict[str, Case]:
    """Windows of a text, spread over it; raises SystemExit where there are too few."""
    (ids,) = client.tokenize([options.text.read_text("utf-8").replace("\n\x1e\n", "\n")])
    count, length = options.sequences, options.length
    if len(ids) < count * length:
        raise SystemExit(f"{options.text}: {len(ids)} tokens, want {count * length}; give more text or less --sequences")  # fmt: skip
    begin = np.linspace(0, len(ids) - length, count).astype(int)
    windows = [ids[at : at + length] for at in begin]
    half = length // 2
    return {
        "cold": Case(windows),
        "prefix": Case(windows, warm=half, start=half),
        "decode": Case([window[:half] for window in windows], decode=options.tail_decode),
    }


# --- One server -------------------------------------------------------------------------------------------------------


def server_of(arm: Arm, options: argparse.Namespace, model: Path, folder: Path) -> Server:
    """One server, not started."""
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--port", str(port), "--random-seed", "7"]
    command += ["--context-length", str(options.context_length)]
    command += ["--mem-fraction-static", str(options.memory)]
    # No batch that is timed is larger, and each captured size costs seconds.
    command += ["--cuda-graph-max-bs-decode", str(options.users), *options.server_flags.split()]
    command += ["--kv-cache-dtype", arm.dtype, *arm.flags]
    env = {k: v for k, v in os.environ.items() if not k.startswith("NUMINOUS_")}
    env |= dict(pair.split("=", 1) for pair in options.env)
    env["NUMINOUS_STATE_DIR"] = str(folder / f"state-{arm.name}")
    env |= {flag_of(name): "1" for name in arm.features} or {"SGLANG_PLUGINS": "none"}
    return Server(arm.name, command, env | dict(arm.env), folder / f"{arm.name}.log", port)


@dataclass
class Engine:
    """A server that runs, as the benchmarks speak with it; what breaks off is `ServerFailed`, with the end of the log."""

    server: Server
    top: int = 1
    http: httpx.Client = field(init=False)
    client: EngineClient = field(init=False)
    accept_lengths: list[float] = field(default_factory=list)  # of a speculating server's answers

    def __post_init__(self) -> None:
        url = self.server.url
        self.http = httpx.Client(base_url=url, timeout=ANSWER_LIMIT_S, trust_env=False)
        self.client = EngineClient(url, self.server.name, ANSWER_LIMIT_S, self.top, self.failed)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.__exit__(None, None, None)
        self.http.close()

    def failed(self, how: str) -> GateError:
        """The error to raise: the end of the process tells more, and comes a moment after the end of its connections."""
        until = time.monotonic() + END_S
        while time.monotonic() < until:
            self.server.check_alive()
            time.sleep(0.1)
        return self.server.failed(how)

    def post(self, path: str, **request: Any) -> httpx.Response:
        """The answer to a request, which is one of success."""
        try:
            return self.http.post(path, **request).raise_for_status()
        except httpx.HTTPError as error:
            raise self.failed(f"broke off at {path} ({error!r})") from error

    def flush(self) -> None:
        """Empty the prefix cache, once the server is idle: a step may be in flight when an answer has come."""
        self.post("/flush_cache", params={"timeout": FLUSH_WAIT_S})

    def generate(self, prompts: Sequence[Tokens], new_tokens: int) -> int:
        """Greedy answers to all prompts at once; returns the fewest tokens of one that came from the cache."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = {"input_ids": list(prompts), "sampling_params": sampling}
        answers = self.post("/generate", json=body).json()
        lengths = {len(answer["output_ids"]) for answer in answers}
        if len(answers) != len(prompts) or lengths != {new_tokens}:
            raise self.failed(f"gave {lengths} of {new_tokens} tokens")
        said = [answer["meta_info"].get("spec_accept_length") for answer in answers]
        self.accept_lengths += [float(length) for length in said if length is not None]
        return min(int(answer["meta_info"]["cached_tokens"]) for answer in answers)

    def answer(self, case: Case, batch: int) -> list[Scores]:
        """The scores of a case, `batch` prompts at a time."""
        self.flush()
        found: list[Scores] = []
        for at in range(0, len(case.prompts), batch):
            prompts = case.prompts[at : at + batch]
            if case.warm:
                self.client.warm([ids[: case.warm] for ids in prompts])
            if case.decode:
                found += self.client.generate(prompts, case.decode)
            else:
                found += self.client.score(prompts, [case.start] * len(prompts))
        return found


def speed(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second; the first of each warms up."""
    prefill, decode, cached = [], [], []
    for repeat in range(options.repeats + 1):
        engine.flush()
        begin = time.perf_counter()
        engine.generate([prompt(1000 + repeat, options.prefill)], 1)
        prefill.append(options.prefill / (time.perf_counter() - begin))
    for repeat in range(options.repeats + 1):
        prompts = [prompt(5000 + 100 * repeat + n, options.context) for n in range(options.users)]
        engine.flush()  # room for these: a hybrid model keeps few states
        engine.generate(prompts, 1)  # into the cache
        engine.accept_lengths.clear()
        begin = time.perf_counter()
        cached.append(engine.generate(prompts, options.decode))
        decode.append(options.users * options.decode / (time.perf_counter() - begin))
    lengths = engine.accept_lengths  # of the last answers
    return {
        "prefill_tok_s": prefill[1:],
        "decode_tok_s": decode[1:],
        "decode_cached": (min(cached), options.context),
        **({"accept_length": statistics.mean(lengths)} if lengths else {}),
    }


def run_arm(
    arm: Arm, options: argparse.Namespace, model: Path, folder: Path, interrupts: Interrupts
) -> Result:
    """Start a server, measure, end it."""
    begin = time.monotonic()
    server = server_of(arm, options, model, folder)
    shutil.rmtree(server.env["NUMINOUS_STATE_DIR"], ignore_errors=True)  # of a run that broke off
    again: dict[str, list[Scores]] = {}
    with server.running(interrupts):
        ready_s = server.wait_ready(options.start_timeout, lambda elapsed: None)
        tokens = server.info().get("max_total_num_tokens")
        if not isinstance(tokens, int):
            raise server.failed("does not say how many tokens fit")
        with Engine(server, options.top) as engine:
            asked = text_cases(options, engine.client) if options.text else random_cases(options)
            cases = {name: engine.answer(case, options.batch) for name, case in asked.items()}
            if arm.name == BASE:
                half = max(1, options.batch // 2)
                again = {name: engine.answer(case, half) for name, case in asked.items()}
            fast = {} if options.text else speed(engine, options)
    figures = {
        "ready_s": ready_s,
        "tokens": tokens,
        "prompts": hashlib.sha256(
            json.dumps([case.prompts for case in asked.values()]).encode()
        ).hexdigest(),
        "counters": read_totals(folder / f"state-{arm.name}"),
        **fast,
    }
    lines = server.log.read_text(errors="replace").splitlines()
    print("".join(f"{line}\n" for line in lines if any(f in line for f in arm.features)), end="")
    speeds = [f"{n.split('_')[0]} {statistics.median(fast[n]):.0f} tok/s" for n in fast if n.endswith("tok_s")]  # fmt: skip
    print(
        f"{arm.name}: {time.monotonic() - begin:.0f} s, of which start {ready_s:.0f} s; "
        + ", ".join([f"{tokens} tokens fit", *speeds, f"counters {figures['counters']}"]),
        flush=True,
    )
    return Result(figures, cases, again)


# --- Arms of one set --------------------------------------------------------------------------------------------------


class Kept:
    """The folder of a set of arms.

    Args:
        key: what has to be the same for all arms of the set.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # In a checkout it would make the next arm's commit a dirty one, which is another set.
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")
        self.folder, self.key = folder, json.loads(json.dumps(key, default=str))
        self.id = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:12]

    def save(self, arm: Arm, result: Result) -> None:
        """Write scores, then figures: where these are the arm is complete."""
        arrays = {
            f"{kind}/{case}/{name}": np.stack([getattr(one, name) for one in scores]).astype(kept)
            for kind, cases in (("cases", result.cases), ("again", result.again))
            for case, scores in cases.items()
            for name, (kept, _) in FIELDS.items()
        }
        np.savez_compressed(self.folder / f"{arm.name}.npz", **arrays)
        whole = {"set": self.id, "run": self.key, "arm": asdict(arm), "figures": result.figures}
        new = self.folder / f"{arm.name}.json.new"
        new.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        new.replace(self.folder / f"{arm.name}.json")

    def load(self, arm: Arm) -> Result | None:
        """An arm's result, None where it has none; raises SystemExit where it is of another set."""
        path = self.folder / f"{arm.name}.json"
        if not path.exists():
            return None
        whole = json.loads(path.read_text("utf-8"))
        mine = self.key | {"arm": json.loads(json.dumps(asdict(arm)))}
        theirs = whole["run"] | {"arm": whole["arm"]}
        if other := sorted(k for k in mine | theirs if mine.get(k) != theirs.get(k)):
            raise SystemExit(f"{path} is of a run with other {', '.join(other)}; remove it, or name another folder")  # fmt: skip
        cases: dict[str, dict[str, list[Scores]]] = {"cases": {}, "again": {}}
        with np.load(path.with_suffix(".npz")) as arrays:
            for name in arrays.files:
                kind, case, last = name.split("/")
                if last == "tokens":
                    columns = [
                        arrays[f"{kind}/{case}/{each}"].astype(used)
                        for each, (_, used) in FIELDS.items()
                    ]
                    cases[kind][case] = [
                        Scores(*row[:-1], int(row[-1])) for row in zip(*columns, strict=True)
                    ]
        return Result(whole["figures"], cases["cases"], cases["again"])


def run(bench: Bench, options: argparse.Namespace, argv: Sequence[str] | None) -> int:
    """Run the arms that are asked for and not there yet; judge and record once all are; returns the exit code."""
    only = options.only.split(",") if options.only else [arm.name for arm in bench.arms]
    if unknown := set(only) - {arm.name for arm in bench.arms}:
        raise SystemExit(f"--only: no arm {', '.join(sorted(unknown))}; there are {', '.join(arm.name for arm in bench.arms)}")  # fmt: skip
    if options.only and not options.results:
        raise SystemExit("--only: name a folder with --results, where the arms meet")
    if bad := [pair for pair in options.env if "=" not in pair]:
        raise SystemExit(f"--env {bad[0]}: want NAME=VALUE")
    asked = {k: v for k, v in vars(options).items() if k not in NOT_MEASURED}
    key = {"op": bench.op, "case": bench.case, **asked, **source_state(Path(__file__).parent, os.environ)}  # fmt: skip
    folder = options.results or Path(tempfile.mkdtemp(prefix=f"{bench.op}-"))
    kept = Kept(folder, key)
    results = {arm.name: found for arm in bench.arms if (found := kept.load(arm))}
    print("".join(f"{name}: taken from {folder}\n" for name in results), end="")
    more: dict[str, Any] = {}
    failures: list[str] = []
    try:
        with Interrupts().installed() as interrupts:
            model = options.model or made(bench, folder)
            for arm in bench.arms:
                if arm.name not in only or arm.name in results:
                    continue
                try:
                    results[arm.name] = run_arm(arm, options, model, folder, interrupts)
                    kept.save(arm, results[arm.name])
                except GateError as failure:  # the other arms are worth their time
                    tail = failure.tail + "\n" if isinstance(failure, ServerFailed) else ""
                    print(f"{tail}{arm.name}: {failure}", flush=True)
                    failures.append(str(failure))
            if bench.more and len(results) == len(bench.arms):
                more = bench.more(model, folder, interrupts)
    except Interrupted as signalled:
        raise SystemExit(f"{signalled}; logs and finished arms: {folder}") from None
    except BaseException:
        print(f"logs and finished arms: {folder}", file=sys.stderr)
        raise
    if failures:
        raise SystemExit("\n".join([*failures, f"logs and finished arms: {folder}"]))
    if missing := [arm.name for arm in bench.arms if arm.name not in results]:
        print(f"set {kept.id}: not judged, {', '.join(missing)} missing; the same --results adds them")  # fmt: skip
        return 2
    sized = options.text is None and "--max-total-tokens" not in options.server_flags
    verdicts = judge(
        bench.arms, results, bench.bytes_of if sized else None, bench.agree, bool(options.text)
    )
    record(bench, kept, options, " ".join([Path(sys.argv[0]).name, *(argv or sys.argv[1:])]), results, verdicts, more)  # fmt: skip
    for name, judged in verdicts.items():
        lines = [*(f"RED: {line}" for line in judged.red), *map(str, judged.rows)]
        print("\n".join(f"{name}, {line}" for line in lines))
    word = overall([judged.word for judged in verdicts.values()])
    print(f"set {kept.id}: {word}; " + ", ".join(f"{n} {j.word}" for n, j in verdicts.items()))
    if options.results is None and word == "PASS":
        shutil.rmtree(folder)
    else:
        print(f"logs and scores: {folder}")
    return EXIT_CODES[word]


def config_of(model: Path | None, dummy: Mapping[str, Any]) -> dict[str, Any]:
    """What the language model of a checkpoint reads, or of the dummy that will be made."""
    config = dummy if model is None else json.loads((model / "config.json").read_text("utf-8"))
    return {**config, **config.get("text_config", {})}


def made(bench: Bench, folder: Path) -> Path:
    """The dummy in the folder of the arms; its config is written last."""
    model = folder / "model"
    if not (model / "config.json").exists():
        shutil.rmtree(model, ignore_errors=True)
        bench.make(model)
    return model


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that the benchmarks have in common."""
    parsed = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    add = parsed.add_argument
    add("--model", type=Path, help="a dummy made before; left out: made now")
    add("--results", type=Path, metavar="FOLDER", help="keeps arms and logs, and is taken up again")
    add("--only", metavar="ARM,ARM", help="run these arms alone, of those that --results lacks")
    add("--memory", type=float, default=0.3, help="--mem-fraction-static of all arms")
    add("--context-length", type=int, default=32768)
    add("--text", type=Path, help="answers about windows of this text alone, of a trained --model")
    add("--length", type=int, default=1024, help="tokens of such a window")
    add("--sequences", type=int, default=8, help="prompts of a kind")
    add("--tail", type=int, default=512, help="scored tokens of a long prompt, and behind a prefix")
    add("--tail-decode", type=int, default=32, help="decoded tokens that are scored")
    add("--batch", type=int, default=8, help="prompts that are scored in one request")
    add("--top", type=int, default=64, help="likeliest tokens that a position lists")
    add("--prefill", type=int, default=16384, help="tokens of a long prompt, timed")
    add("--users", type=int, default=32)
    # Not a whole number of pages, nor of the 256 tokens after which a hybrid model keeps its state: of a prompt that is one
    # the last token cannot come from the cache, nor then the state.
    add("--context", type=int, default=4160, help="tokens in front of an answer, timed")
    add("--decode", type=int, default=128, help="tokens of an answer, timed")
    add("--repeats", type=int, default=3)
    add("--server-flags", default="", help="of all arms, one string; write --server-flags='--x'")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="of all servers")
    add("--start-timeout", type=float, default=900.0)
    add("--evidence", type=Path, nargs="?", const=Path(), help="append records (to FILE)")
    return parsed


def record(
    bench: Bench,
    kept: Kept,
    options: argparse.Namespace,
    command: str,
    results: Mapping[str, Result],
    verdicts: Mapping[str, Judged],
    more: Mapping[str, Any],
) -> None:
    """Append a record for each arm where `--evidence` says so."""
    if options.evidence is None:
        return
    clock = CudaClock() if torch.cuda.is_available() else CpuClock()
    common = facts.run_facts(clock, os.environ)
    sampled = f"{options.sequences} sequences of a kind"
    case = f"prefill {options.prefill}, decode {options.users} x {options.decode} behind {options.context}"
    if options.text:
        case = f"{options.text.name}, windows of {options.length}"
    records = [
        {
            "package": "kv-cache-4bit",
            "version": __version__,
            **common,
            "op": bench.op,
            "case": f"{bench.case}; {case}; {sampled}",
            "provider": arm.name,
            "provider_version": __version__ if arm.features else common["engine"],
            "set": kept.id,
            "n": options.sequences if options.text else options.repeats,
            "pool_tokens": results[arm.name].figures["tokens"],
            **(
                {}
                if options.text
                else {
                    "pool_ratio": results[arm.name].figures["tokens"]
                    / results[BASE].figures["tokens"],
                    "peer": BASE,
                    "peer_version": common["engine"],
                }
            ),
            "bytes_per_token": bench.bytes_of(arm),
            **figures_of(results[arm.name]),
            "distance": verdicts[arm.name].distances,
            "rows": [str(row) for row in verdicts[arm.name].rows],
            "red": list(verdicts[arm.name].red),
            "verdict": verdicts[arm.name].word,
            **more,
            "gate": "tokens by the byte formula within 2 %, engaged, prefixes from the cache; flips, KL and loss by their intervals (cache_verdict)",
            "command": command,
        }
        for arm in bench.arms
    ]
    path = options.evidence
    if path == Path():
        path = evidence.find_evidence(Path(__file__).parent) / "kv-cache-4bit" / f"{bench.op}.jsonl"
    evidence.append(path, records)


def figures_of(result: Result) -> dict[str, Any]:
    """Speeds and counters as a record has them."""
    named = [name for name in ("prefill_tok_s", "decode_tok_s") if name in result.figures]
    return {
        **{name: statistics.median(result.figures[name]) for name in named},
        "repeats": {name: result.figures[name] for name in named},
        "cached_tokens": {
            case: min(one.cached for one in scores) for case, scores in result.cases.items()
        },
        "counters": result.figures["counters"],
        **{k: v for k, v in result.figures.items() if k == "accept_length"},
    }
