# SPDX-License-Identifier: Apache-2.0
"""Does a model find again what stands far back in its context, once KV rows are packed? By depth, on a CPU or on served engines.

    python packages/kv-cache-4bit/benchmarks/bench_needle.py --text eval-prose.txt --model DIR/glm-dsa          # CPU, emulated
    python …/bench_needle.py --text FILE --url-a http://A:30000 --url-b http://B:30000                           # two servers that run
    python …/bench_needle.py --text FILE --serve MODEL --features kv4.glm_dsa \
        --flags-all '--dsa-topk-backend flashinfer' --flags-a '--kv-cache-dtype fp8_e4m3' --flags-b '--kv-cache-dtype fp8_e4m3'

A passage is planted in text at several depths (0: at its beginning) and begins again at the end: its first `--cue` tokens are
given, the others have to be found. `--passage random` plants random tokens, that is a key and its value; `text` plants a
piece of other text, for models too small to copy what they never saw. Two figures, each with a 95 % interval by passage:

*gain*    nats per token that the planting saves, against the same prompt with plain text in the passage's place;
*recall*  share of the tokens found before the first miss, greedily.

Of a server, gain is scored behind a cached prefix, so that rows come from the pool, and recall is decoded. The emulation
(`emulated_rows`) reads every row from the pool.

A depth passes if B keeps `--keep` of A's gain: the lower end of the interval of gain B - keep × gain A is not below 0. Where
A's own gain is not above 0 there is nothing to keep: INCONCLUSIVE. Exit 0: all pass; 1: one fails; 2: undecided or not asked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from emulated_rows import ARMS, FAULTS, Rows, named
from judge_corpus import encode, read_documents, sha256
from judge_saved import WEIGHTS, load
from tokenizers import Tokenizer

from numinous_kv_cache_4bit import __version__
from numinous_tooling import evidence
from numinous_tooling.bench import facts
from numinous_tooling.bench.clocks import CpuClock, CudaClock
from numinous_tooling.gate.accuracy.client import EngineClient
from numinous_tooling.gate.accuracy.distance import Estimate, mean_by_sequence
from numinous_tooling.gate.arms import (
    ArmOptions,
    attached_arms,
    build_arms,
    parse_features,
    server_command,
    server_environment,
)
from numinous_tooling.gate.errors import GateError, Interrupted, ServerFailed
from numinous_tooling.gate.options import SERVER_TEMPLATE
from numinous_tooling.gate.servers import Interrupts, Server, free_port
from numinous_tooling.patching.counters import read_totals

Tokens = list[int]
# (text, passage, cue) → nats of each token behind the cue, and the share of them found before the first miss.
Ask = Callable[[Tokens, Tokens, int], tuple[list[float], float]]
CHARACTERS = 12  # of text taken for each token wanted; more than tokens have


@dataclass(frozen=True)
class Prompts:
    """For each passage: the text without it, the texts with it by depth, and the passage."""

    plain: list[Tokens]
    planted: dict[float, list[Tokens]]
    passages: list[Tokens]


@dataclass(frozen=True)
class Answers:
    """Of one arm, per passage: mean nats per token, plain and by depth, and the share found by depth."""

    plain: list[float]
    planted: dict[float, list[float]]
    recall: dict[float, list[float]]


@dataclass(frozen=True)
class Depth:
    """What A and B gave at one depth."""

    depth: float
    gain_a: Estimate
    gain_b: Estimate
    kept: Estimate  # gain B - keep × gain A
    recall_a: Estimate
    recall_b: Estimate
    verdict: str


def make_prompts(
    ids: Sequence[int], count: int, length: int, width: int, depths: Sequence[float], kind: str
) -> Prompts:
    """Prompts of `length` tokens in front of the passage's second time; raises ValueError where the text is too short."""
    need = length + width
    if len(ids) < count * need:
        raise ValueError(f"{len(ids)} tokens of text, want {count * need}; give more text or less --passages")  # fmt: skip
    rng = np.random.default_rng(0)
    pieces = [list(map(int, ids[i * need : (i + 1) * need])) for i in range(count)]
    known = np.unique(np.asarray(ids))  # no special tokens, but for the end of a text
    if kind == "random":
        passages = [rng.choice(known[1:], width).tolist() for _ in pieces]
    else:
        # The end of another piece of text.
        passages = [pieces[i - 1][-width:] for i in range(count)]
    plain = [piece[:length] for piece in pieces]
    planted = {
        depth: [
            text[: int(depth * (length - width))]
            + passage
            + text[int(depth * (length - width)) + width :]
            for text, passage in zip(plain, passages, strict=True)
        ]
        for depth in depths
    }
    return Prompts(plain, planted, passages)


def answers(ask: Ask, prompts: Prompts, cue: int, say: str) -> Answers:
    """Ask one arm everything."""
    plain: list[float] = []
    planted: dict[float, list[float]] = {depth: [] for depth in prompts.planted}
    recall: dict[float, list[float]] = {depth: [] for depth in prompts.planted}
    for i, passage in enumerate(prompts.passages):
        plain.append(float(np.mean(ask(prompts.plain[i], passage, cue)[0])))
        for depth, texts in prompts.planted.items():
            losses, found = ask(texts[i], passage, cue)
            planted[depth].append(float(np.mean(losses)))
            recall[depth].append(found)
        print(f"{say}: passage {i + 1} of {len(prompts.passages)}", file=sys.stderr)
    return Answers(plain, planted, recall)


def leading(found: Sequence[bool]) -> float:
    """Share before the first False."""
    return [*found, False].index(False) / len(found)


def of_rows(rows: Rows) -> Ask:
    """The emulation: teacher-forced, which is greedy up to the first miss."""

    def ask(text: Tokens, passage: Tokens, cue: int) -> tuple[list[float], float]:
        logits = rows.logits(torch.tensor(text + passage))[len(text) + cue - 1 : -1]
        want = torch.tensor(passage[cue:])
        losses = -logits.log_softmax(-1).gather(1, want[:, None])[:, 0]
        return losses.tolist(), leading((logits.argmax(-1) == want).tolist())

    return ask


def of_server(client: EngineClient) -> Ask:
    """A served engine: the text from its prefix cache, then scored, and decoded."""

    def ask(text: Tokens, passage: Tokens, cue: int) -> tuple[list[float], float]:
        client.warm([text])
        (scored,) = client.score([text + passage], [len(text) + cue - 1])
        (said,) = client.generate([text + passage[:cue]], len(passage) - cue)
        found = [bool(a == b) for a, b in zip(said.tokens, passage[cue:], strict=True)]
        return (-scored.logprobs).tolist(), leading(found)

    return ask


def compare(a: Answers, b: Answers, keep: float) -> list[Depth]:
    """Figures and verdict of each depth."""
    out = []
    for depth in a.planted:
        gains = [np.array(arm.plain) - np.array(arm.planted[depth]) for arm in (a, b)]
        gain_a, gain_b, kept = (
            mean(values) for values in (*gains, gains[1] - keep * gains[0])
        )  # fmt: skip
        if None in (gain_a.low, kept.low) or not (gain_a.low or 0.0) > 0:
            verdict = "INCONCLUSIVE"
        elif (kept.high or 0.0) < 0:
            verdict = "FAIL"
        else:
            verdict = "PASS" if (kept.low or 0.0) >= 0 else "INCONCLUSIVE"
        recalls = mean(np.array(a.recall[depth])), mean(np.array(b.recall[depth]))
        out.append(Depth(depth, gain_a, gain_b, kept, *recalls, verdict))
    return out


def mean(values: Any) -> Estimate:
    """Mean over passages, each one of its own in the bootstrap."""
    return mean_by_sequence(values, np.arange(len(values)), 0)


def show(name_a: str, name_b: str, found: Sequence[Depth]) -> None:
    print(f"A {name_a}, B {name_b}; gain in nats per token")
    for one in found:
        print(
            f"depth {one.depth:4.2f}: gain A {one.gain_a:.3f}, B {one.gain_b:.3f}; "
            f"recall A {one.recall_a:.3f}, B {one.recall_b:.3f}  {one.verdict}"
        )


def emulated(options: argparse.Namespace) -> dict[str, Answers]:
    """Every named arm on the CPU; the first is A."""
    arms = named([name for name in options.arms.split(",") if name])
    if any(arm.above != "none" or arm.sorted for arm in arms):
        raise ValueError("arms that are calibrated are not for this script")
    model = load(options.model)
    tokenizer = Tokenizer.from_str((options.model / "tokenizer.json").read_text("utf-8"))
    ids = encode(tokenizer, read_documents(options.text)).ids.tolist()
    prompts = prompts_of(options, ids)
    found = {}
    for arm in arms:
        arm = replace(arm, fault=options.plant) if arm.name.startswith("kv4") else arm
        found[arm.name] = answers(of_rows(Rows(model, arm)), prompts, options.cue, arm.name)
    return found


def prompts_of(options: argparse.Namespace, ids: Sequence[int]) -> Prompts:
    depths = [float(part) for part in options.depths.split(",")]
    if not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"--depths {options.depths}: each is 0 to 1")
    if not 0 < options.cue < options.width < options.length:
        raise ValueError("want 0 < --cue < --width < --length")
    return make_prompts(
        ids, options.passages, options.length, options.width, depths, options.passage
    )


def served(options: argparse.Namespace) -> dict[str, Answers]:
    """Arms A and B of a served engine, one after the other."""
    features = parse_features(options.features)
    if options.serve:
        env = dict(pair.partition("=")[::2] for pair in options.env)
        words = (
            shlex.split(text) for text in (options.flags_all, options.flags_a, options.flags_b)
        )
        arms = build_arms(ArmOptions(features, sys.executable, sys.executable, env, env, *words_of(words), (), {}, ()))  # fmt: skip
    else:
        arms = attached_arms(options.url_a, options.url_b, (), None)
    prompts: Prompts | None = None
    found = {}
    with folder_of(options) as folder:
        for letter in "AB":
            with opened(arms[letter], options, folder) as client:
                if prompts is None:
                    prompts = prompts_of(options, tokens_of(client, options))
                said = answers(of_server(client), prompts, options.cue, letter)
            found[f"{letter} {arms[letter].label}"] = said
            (folder / f"needle-{letter}.json").write_text(json.dumps(asdict(said)) + "\n")
    return found


@contextlib.contextmanager
def folder_of(options: argparse.Namespace) -> Iterator[Path]:
    """Where servers log and finished arms lie: a folder that was named, or one that is left where the run breaks off."""
    folder = options.logs or Path(tempfile.mkdtemp(prefix="needle-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException:
        if any(folder.iterdir()):
            print(f"bench_needle: logs and answers so far: {folder}", file=sys.stderr)
        raise
    if options.logs is None:
        shutil.rmtree(folder)


def words_of(parts: Iterator[list[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(part) for part in parts)


def tokens_of(client: EngineClient, options: argparse.Namespace) -> Tokens:
    """As much of the text as the prompts need, in the server's tokens."""
    want = options.passages * (options.length + options.width) * CHARACTERS
    text = "\n".join(read_documents(options.text))[:want]
    return client.tokenize([text])[0]


@contextlib.contextmanager
def opened(arm: Any, options: argparse.Namespace, folder: Path) -> Iterator[EngineClient]:
    """A client of the arm's server, which is started where it has no URL; a feature that never engaged is an error."""
    if arm.url is not None:
        with EngineClient(arm.url, arm.letter, options.answer_limit, 1) as client:
            yield client
        return
    port, state = free_port(), folder / f"state-{arm.letter}"
    command = server_command(arm, shlex.split(SERVER_TEMPLATE), options.serve, port)
    environment = server_environment(arm, os.environ, str(state))
    log = folder / f"needle-{arm.letter}.log"
    server = Server(arm.letter, command, environment, log, port)
    with Interrupts().installed() as interrupts, server.running(interrupts):
        server.wait_ready(options.start_timeout, lambda elapsed: None)
        with EngineClient(server.url, arm.letter, options.answer_limit, 1, server.failed) as client:
            yield client
    counted: Mapping[str, Mapping[str, int]] = read_totals(state)
    for feature in arm.features:
        if not counted.get(feature, {}).get("engaged"):
            raise GateError(f"{feature} never engaged in arm {arm.letter}; counters {counted}")


def records(
    name_a: str,
    name_b: str,
    found: Sequence[Depth],
    options: argparse.Namespace,
    common: Any,
    command: str,
) -> list[dict[str, Any]]:
    """Evidence: one record per depth."""
    if options.model:
        what = {
            "shown": "emulated: torch on a CPU, rows through the format in every layer",
            "model_sha256": sha256(options.model / WEIGHTS),
        }
    else:
        what = {"shown": "run: served", "served": options.serve or [options.url_a, options.url_b]}
    return [
        {
            "package": "kv-cache-4bit",
            "version": __version__,
            **common,
            "op": "needle",
            "case": f"{'glm-dsa, ' if options.model else ''}{options.passage} passages of {options.width}, cue {options.cue}, in {options.length} tokens of {options.text.name}, depth {one.depth:g}",
            "provider": name_b,
            "provider_version": __version__,
            "against": name_a,
            **what,
            "n": options.passages,
            "depth": one.depth,
            **{
                key: [getattr(one, key).value, getattr(one, key).low, getattr(one, key).high]
                for key in ("gain_a", "gain_b", "kept", "recall_a", "recall_b")
            },
            "text_sha256": sha256(options.text),
            "verdict": one.verdict,
            "gate": f"B keeps {options.keep:g} of A's gain, by its interval",
            "command": command,
        }
        for one in found
    ]  # fmt: skip


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--text", type=Path, required=True)
    add("--model", type=Path, help="a glm-dsa judge model, emulated on the CPU")
    add("--arms", default="bf16,fp8,kv4", help=f"of the emulation, the first is A: {', '.join(ARMS)}")  # fmt: skip
    add("--plant", choices=FAULTS, help="damage the 4-bit rows of the emulation; has to FAIL")
    add("--threads", type=int, default=1, help="of torch, in the emulation")
    add("--url-a", help="a server that runs: arm A")
    add("--url-b", help="the same for arm B")
    add("--serve", metavar="MODEL", help="start a server for each arm instead")
    add("--features", default="none", help="feature ids of arm B, comma separated, with --serve")
    add("--flags-all", default="", help="server flags of both arms, in one string")
    add("--flags-a", default="")
    add("--flags-b", default="")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="environment of both arms")
    add(
        "--logs",
        type=Path,
        help="folder that keeps the servers' logs, and answers as soon as an arm is done",
    )
    add("--start-timeout", type=float, default=900.0, metavar="S")
    add("--answer-limit", type=float, default=300.0, metavar="S")
    add("--passages", type=int, default=16)
    add("--passage", choices=("text", "random"), default="text")
    add("--width", type=int, default=64, help="tokens of a passage")
    add("--cue", type=int, default=16, help="of these, given the second time")
    add("--length", type=int, default=1024, help="tokens in front of the second time")
    add("--depths", default="0.1,0.5,0.9")
    add("--keep", type=float, default=0.9)
    add("--evidence", type=Path, nargs="?", const=Path(), help="append records (to FILE)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    torch.set_num_threads(options.threads)
    common = facts.run_facts(CpuClock() if options.model or not torch.cuda.is_available() else CudaClock(), os.environ)  # fmt: skip
    try:
        ways = [bool(options.model), bool(options.serve), bool(options.url_a and options.url_b)]
        if sum(ways) != 1:
            raise ValueError("give one of --model, --serve, or --url-a with --url-b")
        if options.features != "none" and not options.serve:
            raise ValueError("--features is for servers that this script starts, with --serve")
        found = emulated(options) if options.model else served(options)
    except (GateError, Interrupted, OSError, ValueError) as error:
        if isinstance(error, ServerFailed):
            print(error.tail, file=sys.stderr)
        print(f"bench_needle: {error}", file=sys.stderr)
        return 2
    (name_a, a), *others = found.items()
    made, verdicts = [], set()
    command = " ".join(["bench_needle.py", *(argv or sys.argv[1:])])
    for name_b, b in others:
        depths = compare(a, b, options.keep)
        show(name_a, name_b, depths)
        verdicts |= {one.verdict for one in depths}
        made += records(name_a, name_b, depths, options, common, command)
    if options.evidence is not None:
        path = options.evidence
        if path == Path():
            path = evidence.find_evidence(Path(__file__).parent) / "kv-cache-4bit" / "needle.jsonl"
        evidence.append(path, made)
    return 1 if "FAIL" in verdicts else 2 if "INCONCLUSIVE" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
