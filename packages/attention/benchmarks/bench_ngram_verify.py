# SPDX-License-Identifier: Apache-2.0
"""``attention.split_verify`` in a server that speculates with NGRAM: accepted drafts and answers beside stock's.

Three servers in turn, fresh each, one model, the Triton backend: stock, the feature, stock again (what chance alone changes). Each gets the same windows of a text,
one behind another, greedily: drafts come from a trie of all that was asked and answered, so requests that overlapped would make it depend on their order. Then all
windows once more at once, for the speed.

    python packages/attention/benchmarks/bench_ngram_verify.py --model gemma-3-270m --text eval-code.txt --evidence

Sums run in another order, so an answer may turn at a near tie, and the trie with it: compared are steps of verification of the answers in front of the first that
differs, which have to be the same number each, and the mean accept length of all. Exit 0: they are equal, and the feature engaged; 1: not; 2: the first answer differs
already, so nothing was compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from numinous_attention import __version__
from numinous_tooling import evidence
from numinous_tooling.bench import facts
from numinous_tooling.bench.clocks import CpuClock, CudaClock
from numinous_tooling.gate.errors import Interrupted, ServerFailed
from numinous_tooling.gate.servers import Interrupts, Server, free_port
from numinous_tooling.patching.counters import read_totals
from numinous_tooling.patching.feature import flag_of

FEATURE = "attention.split_verify"
ARMS = ("stock", "split", "stock-again")
ANSWER_LIMIT_S = 300.0


@dataclass(frozen=True)
class Answer:
    """Tokens of a greedy answer, and how many steps of verification they took."""

    tokens: tuple[int, ...]
    steps: int


def windows(text: str, count: int, characters: int) -> list[str]:
    """Windows of a text, spread over it; ValueError where it is too short."""
    if count < 1 or len(text) < count * characters:
        raise ValueError(f"{len(text)} characters, want {count} windows of {characters}")
    step = (len(text) - characters) // max(1, count - 1)
    return [text[n * step : n * step + characters] for n in range(count)]


def answers_of(said: list[dict[str, Any]], tokens: int) -> list[Answer]:
    """What `/generate` said; ValueError where an answer is cut or tells no steps."""
    found = []
    for one in said:
        ids, steps = tuple(one["output_ids"]), one["meta_info"].get("spec_verify_ct")
        if len(ids) != tokens or not steps:
            raise ValueError(f"{len(ids)} of {tokens} tokens, in {steps} steps of verification")
        found.append(Answer(ids, int(steps)))
    return found


def alike(ours: list[Answer], stock: list[Answer]) -> tuple[int, int]:
    """(answers in front of the first that differs, those of them that took as many steps)."""
    same = 0
    for one, other in zip(ours, stock, strict=True):
        if one.tokens != other.tokens:
            break
        same += 1
    return same, sum(a.steps == b.steps for a, b in zip(ours[:same], stock[:same], strict=True))


def run_arm(
    name: str, options: argparse.Namespace, folder: Path, interrupts: Interrupts
) -> dict[str, Any]:
    """One server: its answers one by one, their speed at once, its counters."""
    port, state = free_port(), folder / f"state-{name}"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(options.model)]
    command += ["--port", str(port), "--random-seed", "7", "--attention-backend", "triton"]
    command += ["--speculative-algorithm", "NGRAM"]
    command += ["--speculative-num-draft-tokens", str(options.drafts)]
    command += options.server_flags.split()
    env = {k: v for k, v in os.environ.items() if not k.startswith("NUMINOUS_")}
    env |= dict(pair.split("=", 1) for pair in options.env)
    env |= {flag_of(FEATURE): "1"} if name == "split" else {"SGLANG_PLUGINS": "none"}
    env["NUMINOUS_STATE_DIR"] = str(state)
    server = Server(name, command, env, folder / f"{name}.log", port)
    prompts = windows(options.text.read_text("utf-8"), options.sequences, options.characters)
    sampling = {"temperature": 0, "max_new_tokens": options.tokens, "ignore_eos": True}
    with server.running(interrupts):
        server.wait_ready(options.start_timeout, lambda elapsed: None)
        with httpx.Client(base_url=server.url, timeout=ANSWER_LIMIT_S, trust_env=False) as http:

            def ask(text: str | list[str]) -> Any:
                body = {"text": text, "sampling_params": sampling}
                try:
                    return http.post("/generate", json=body).raise_for_status().json()
                except httpx.HTTPError as error:
                    server.check_alive()
                    raise server.failed(f"broke off ({error!r})") from error

            answers = answers_of([ask(prompt) for prompt in prompts], options.tokens)
            begin = time.perf_counter()
            answers_of(ask(prompts), options.tokens)
            seconds = time.perf_counter() - begin
    return {
        "answers": answers,
        "accept_length": statistics.mean(options.tokens / answer.steps for answer in answers),
        "output_tok_s": len(prompts) * options.tokens / seconds,
        "counters": read_totals(state),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a Hugging Face directory, real weights")
    add("--text", type=Path, required=True, help="what repeats itself, such as code")
    add("--sequences", type=int, default=16, help="windows of it")
    add("--characters", type=int, default=6000, help="of a window")
    add("--tokens", type=int, default=128, help="of an answer")
    add("--drafts", type=int, default=8, help="--speculative-num-draft-tokens")
    add("--server-flags", default="", help="of all servers, one word")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="of all servers")
    add("--start-timeout", type=float, default=600.0)
    add("--results", type=Path, metavar="FOLDER", help="logs; left out: a temporary folder")
    add("--evidence", type=Path, nargs="?", const=Path(), help="append records (to FILE)")
    options = parser.parse_args(argv)
    if bad := [pair for pair in options.env if "=" not in pair]:
        parser.error(f"--env {bad[0]}: want NAME=VALUE")
    try:
        windows(options.text.read_text("utf-8"), options.sequences, options.characters)
    except (OSError, ValueError) as error:
        parser.error(f"--text {options.text}: {error}")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    folder = options.results or Path(tempfile.mkdtemp(prefix="ngram-verify-"))
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    try:
        with Interrupts().installed() as interrupts:
            for name in ARMS:
                results[name] = run_arm(name, options, folder, interrupts)
                shown = {k: v for k, v in results[name].items() if k != "answers"}
                print(f"{name}: {shown}", flush=True)
    except (ServerFailed, Interrupted, ValueError) as failure:
        tail = failure.tail + "\n" if isinstance(failure, ServerFailed) else ""
        raise SystemExit(f"{tail}{failure}; logs: {folder}") from None
    compared = {name: alike(results[name]["answers"], results["stock"]["answers"]) for name in ARMS}
    engaged = results["split"]["counters"].get(FEATURE, {}).get("engaged", 0)
    same, equal = compared["split"]
    code = 1 if not engaged or equal != same else 0 if same else 2
    for name, (alike_answers, steps) in compared.items():
        print(f"{name}: {alike_answers} of {options.sequences} answers are stock's, {steps} in as many steps")  # fmt: skip
    print(f"engaged {engaged}; {('equal', 'NOT EQUAL', 'not compared')[code]}; logs: {folder}")
    if options.evidence is not None:
        common = facts.run_facts(CudaClock() if torch.cuda.is_available() else CpuClock(), os.environ)  # fmt: skip
        path = options.evidence
        if path == Path():
            path = evidence.find_evidence(Path(__file__).parent) / "attention" / "ngram_verify.jsonl"  # fmt: skip
        evidence.append(
            path,
            [
                {
                    "package": "attention",
                    "version": __version__,
                    **common,
                    "op": "ngram_verify",
                    "case": f"{options.model.name}, {options.text.name}: {options.sequences} x {options.characters} characters, {options.tokens} tokens, {options.drafts} drafts",
                    "provider": name,
                    "provider_version": __version__ if name == "split" else common["engine"],
                    "n": options.sequences,
                    "accept_length": result["accept_length"],
                    "output_tok_s": result["output_tok_s"],
                    "equal_answers": compared[name][0],
                    "equal_steps": compared[name][1],
                    "counters": result["counters"],
                    "verdict": ("PASS", "FAIL", "INCONCLUSIVE")[code],
                    "gate": "answers in front of the first that differs took as many steps of verification as stock's; engaged",
                    "command": " ".join([Path(sys.argv[0]).name, *(argv or sys.argv[1:])]),
                }
                for name, result in results.items()
            ],
        )
    return code


if __name__ == "__main__":
    raise SystemExit(main())
