# SPDX-License-Identifier: Apache-2.0
"""What the engine benchmarks of KV caches share: servers in turn on one GPU, tokens that fit, answers, speed.

1. *Tokens*: what each server says it has room for, in the same share of the GPU's memory, beside the byte formula.
2. *Answers*: prompts are scored token by token (logprob, and which token was the likeliest) in the order short, long, long again
   with its prefix cached, short again with its prefix cached. The first arm against itself gives the floor.
3. *Speed*: prefill of a long prompt; decode of many users at once behind prompts longer than the indexer's top-k.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from numinous_kv_cache_4bit import __version__
from numinous_tooling import evidence
from numinous_tooling.bench import facts
from numinous_tooling.bench.clocks import CudaClock
from numinous_tooling.gate.errors import ServerFailed
from numinous_tooling.gate.servers import Interrupts, Server, free_port
from numinous_tooling.patching.counters import read_totals
from numinous_tooling.patching.feature import flag_of

BYTES = 256  # ids below are the tokenizer's bytes
SHORT, LONG = (
    700,
    6000,
)  # in front of and behind the 2048 tokens up to which prefill is plain multi-head attention
Scores = list[tuple[float, int]]  # per prompt token: its logprob, and the likeliest token there


@dataclass(frozen=True)
class Arm:
    """One server.

    Args:
        name: of the arm.
        row: bytes of a row of its cache.
        dtype: `--kv-cache-dtype`.
        feature: id of the one feature that is on; None for stock.
        flags: further flags.
    """

    name: str
    row: int
    dtype: str = "fp8_e4m3"
    feature: str | None = None
    flags: tuple[str, ...] = ()


def make_dummy(arch: str, folder: Path, draft: bool) -> Path:
    """The dummy checkpoint of the module beside this one."""
    path = Path(__file__).with_name("make_dummy.py")
    spec = importlib.util.spec_from_file_location("make_dummy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_dummy"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    module.write(arch, folder, draft=draft)
    return folder


def prompt(seed: int, length: int) -> list[int]:
    """Random bytes."""
    rng = random.Random(seed)
    return [rng.randrange(BYTES) for _ in range(length)]


def generate(http: httpx.Client, ids: list[int], new_tokens: int, **more: Any) -> dict[str, Any]:
    """One greedy answer; raises SystemExit if it is not complete."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, **more}
    answer: dict[str, Any] = http.post("/generate", json=body).raise_for_status().json()
    if len(answer["output_ids"]) != new_tokens:
        raise SystemExit(f"red gate: {len(answer['output_ids'])} of {new_tokens} tokens")
    return answer


def score(http: httpx.Client, ids: list[int], begin: int) -> tuple[Scores, int]:
    """Logprobs of a prompt's tokens behind `begin` with the likeliest ones, and how many tokens came from the cache."""
    more = {"return_logprob": True, "logprob_start_len": begin, "top_logprobs_num": 1}
    info = generate(http, ids, 1, **more)["meta_info"]
    # The first has nothing in front of it in this slice.
    given, likeliest = info["input_token_logprobs"][1:], info["input_top_logprobs"][1:]
    found = [(one[0], top[0][1]) for one, top in zip(given, likeliest, strict=True)]
    return found, info["cached_tokens"]


def scores(http: httpx.Client) -> tuple[dict[str, Scores], dict[str, int]]:
    """Cold and with a cached prefix, shorter and longer than the sparse path asks for; and the tokens from the cache."""
    found, cached = {}, {}
    for name, seed, length in (("short", 1, SHORT), ("long", 2, LONG)):
        http.post("/flush_cache").raise_for_status()
        ids = prompt(seed, length)
        found[f"{name}, cold"], _ = score(http, ids, 0)
        # The same again with a tail: what lies before it can come from the cache.
        found[f"{name}, prefix"], cached[name] = score(http, ids + prompt(seed + 10, 64), length)
    return found, cached


def measure(http: httpx.Client, options: argparse.Namespace) -> dict[str, Any]:
    """Answers and speed of one server."""
    (first, cached), (again, _) = scores(http), scores(http)
    prefill, decode = [], []
    for repeat in range(options.repeats + 1):
        http.post("/flush_cache").raise_for_status()
        begin = time.perf_counter()
        generate(http, prompt(1000 + repeat, options.prefill), 1)
        prefill.append(options.prefill / (time.perf_counter() - begin))
    for repeat in range(options.repeats + 1):
        prompts = [prompt(5000 + 100 * repeat + n, options.context) for n in range(options.users)]
        with ThreadPoolExecutor(options.users) as users:
            list(users.map(lambda ids: generate(http, ids, 1), prompts))  # into the cache
            begin = time.perf_counter()
            list(users.map(lambda ids: generate(http, ids, options.decode), prompts))
            decode.append(options.users * options.decode / (time.perf_counter() - begin))
    # The first of each warms up.
    return {
        "scores": first,
        "again": again,
        "cached": cached,
        "prefill_tok_s": prefill[1:],
        "decode_tok_s": decode[1:],
    }


def compare(a: dict[str, Scores], b: dict[str, Scores]) -> dict[str, dict[str, float]]:
    """Per case: share of positions with the same likeliest token, and mean absolute difference of logprobs."""
    found = {}
    for name in a:
        pairs = list(zip(a[name], b[name], strict=True))
        if not all(math.isfinite(x[0]) and math.isfinite(y[0]) for x, y in pairs):
            raise SystemExit(f"red gate: {name}: logprobs are not finite")
        found[name] = {
            "agree": statistics.mean(x[1] == y[1] for x, y in pairs),
            "difference": statistics.mean(abs(x[0] - y[0]) for x, y in pairs),
        }
    return found


def check_tokens(first: int, other: int, first_bytes: int, other_bytes: int) -> float:
    """How many times the tokens of the first arm fit; raises SystemExit unless it is the ratio of bytes per token within 2 %."""
    ratio = other / first
    print(
        f"tokens: {other} against {first}, {ratio:.4f} x; bytes per token {other_bytes} against {first_bytes}, "
        f"{first_bytes / other_bytes:.4f} x"
    )
    if abs(ratio / (first_bytes / other_bytes) - 1) > 0.02:
        raise SystemExit("red gate: the pools do not differ as their bytes do")
    return ratio


def check_spread(first: dict[str, Any]) -> None:
    """Raise SystemExit where the first arm's answers say nothing."""
    if len({likeliest for _, likeliest in first["scores"]["long, cold"]}) < 10:
        raise SystemExit(
            "red gate: stock's answers hardly depend on the prompt; agreement would mean nothing"
        )


def show(name: str, found: dict[str, dict[str, float]], floor: dict[str, dict[str, float]]) -> None:
    """Print how one arm's answers compare with the first arm's."""
    for case, values in found.items():
        print(
            f"{name}, {case}: likeliest token {values['agree']:.3f} (stock with itself {floor[case]['agree']:.3f}), "
            f"logprob difference {values['difference']:.4f} ({floor[case]['difference']:.4f})"
        )


def server_of(arm: Arm, options: argparse.Namespace, model: Path, folder: Path) -> Server:
    """One server, not started."""
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--port", str(port), "--random-seed", "7"]
    command += ["--context-length", str(options.context_length)]
    command += ["--mem-fraction-static", str(options.memory), *options.server_flags.split()]
    command += ["--kv-cache-dtype", arm.dtype, *arm.flags]
    env = {k: v for k, v in os.environ.items() if not k.startswith("NUMINOUS_")}
    env["NUMINOUS_STATE_DIR"] = str(folder / f"state-{arm.name}")
    env |= {flag_of(arm.feature): "1"} if arm.feature else {"SGLANG_PLUGINS": "none"}
    return Server(arm.name, command, env, folder / f"{arm.name}.log", port)


def run_arm(arm: Arm, options: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    """Start a server, measure, end it."""
    server = server_of(arm, options, model, folder)
    with server.running(Interrupts()):
        ready_s = server.wait_ready(options.start_timeout, lambda elapsed: None)
        tokens = server.info().get("max_total_num_tokens")
        if not isinstance(tokens, int):
            raise SystemExit("red gate: the server does not say how many tokens fit")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        with httpx.Client(base_url=server.url, timeout=900, limits=limits, trust_env=False) as http:
            result = measure(http, options) | {"tokens": tokens}
    totals = read_totals(folder / f"state-{arm.name}")
    result["counters"] = totals.get(arm.feature or "", {})
    if not (result["counters"].get("engaged") if arm.feature else not totals):
        raise SystemExit(f"red gate: arm {arm.name} shows counters {totals}")
    if arm.feature:
        lines = server.log.read_text().splitlines()
        print("\n".join(line for line in lines if arm.feature in line))
    print(
        f"{arm.name}: ready {ready_s:.0f} s, {tokens} tokens fit, prefill {statistics.median(result['prefill_tok_s']):.0f} tok/s, "
        f"decode {statistics.median(result['decode_tok_s']):.0f} tok/s, counters {result['counters']}",
        flush=True,
    )
    return result


def run_arms(
    arms: Sequence[Arm], options: argparse.Namespace, model: Path, folder: Path
) -> dict[str, dict[str, Any]]:
    """Every arm in turn; raises SystemExit with the end of a server's log where one fails."""
    try:
        return {arm.name: run_arm(arm, options, model, folder) for arm in arms}
    except ServerFailed as failure:
        raise SystemExit(f"{failure.tail}\n{failure}") from None


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that the benchmarks have in common."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--model", type=Path, help="a dummy made before; left out: made now")
    made.add_argument("--memory", type=float, default=0.3, help="--mem-fraction-static of all arms")
    made.add_argument("--context-length", type=int, default=32768)
    made.add_argument("--prefill", type=int, default=16384, help="tokens of a long prompt")
    made.add_argument("--users", type=int, default=32)
    made.add_argument("--context", type=int, default=4096, help="tokens in front of an answer")
    made.add_argument("--decode", type=int, default=128, help="tokens of an answer")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--server-flags", default="", help="further flags of all arms, one string")
    made.add_argument("--start-timeout", type=float, default=900.0)
    made.add_argument(
        "--evidence", type=Path, nargs="?", const=Path(), help="append records (to FILE)"
    )
    return made


def record(
    op: str,
    case: str,
    options: argparse.Namespace,
    command: str,
    results: Mapping[str, dict[str, Any]],
    more: Mapping[str, dict[str, Any]],
    stock: Sequence[str],
) -> None:
    """Append a record for each arm where `--evidence` says so.

    Args:
        more: per arm, what the benchmark itself found.
        stock: names of the arms without a feature.
    """
    if options.evidence is None:
        return
    common = facts.run_facts(CudaClock(), os.environ)
    records = [
        {
            "package": "kv-cache-4bit",
            "version": __version__,
            **common,
            "op": op,
            "case": f"{case}; prefill {options.prefill}, decode {options.users} x {options.decode} behind {options.context}",
            "provider": name,
            "provider_version": common["engine"] if name in stock else __version__,
            "n": options.repeats,
            "pool_tokens": result["tokens"],
            "prefill_tok_s": statistics.median(result["prefill_tok_s"]),
            "decode_tok_s": statistics.median(result["decode_tok_s"]),
            "repeats": {k: result[k] for k in ("prefill_tok_s", "decode_tok_s")},
            "cached_tokens": result["cached"],
            "counters": result["counters"],
            **more[name],
            "command": command,
        }
        for name, result in results.items()
    ]
    path = options.evidence
    if path == Path():
        path = evidence.find_evidence(Path(__file__).parent) / "kv-cache-4bit" / f"{op}.jsonl"
    evidence.append(path, records)
