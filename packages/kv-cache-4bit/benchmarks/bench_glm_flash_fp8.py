# SPDX-License-Identifier: Apache-2.0
"""``kv4.glm_flash_fp8`` in the served engine: tokens that fit, answers against stock's bf16 cache, and speed.

Three servers in turn on one Hopper GPU, the pinned engine, a dummy of the architecture (`make_dummy.py --arch glm-flash`): stock with a
bf16 cache, the feature, and stock with ``--kv-cache-dtype fp8_e4m3``, which has to fail for the reason that the feature is there for.

    python packages/kv-cache-4bit/benchmarks/bench_glm_flash_fp8.py --evidence

1. *Tokens*: what each server says it has room for, in the same share of the GPU's memory, beside the byte formula.
2. *Answers*: prompts are scored token by token (logprob, and which token was the likeliest) in the order short, long, long again
   with its prefix cached, short again with its prefix cached. Stock against itself gives the floor.
3. *Speed*: prefill of a long prompt; decode of many users at once behind prompts longer than the indexer's top-k.

The gate before any figure is recorded: the ratio of tokens is the formula's within 2 %; logprobs are finite; the likeliest tokens agree
with stock's as far as asked (a read of wrong slots agrees nowhere); the feature engaged, in the other arm no trace of it.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from numinous_kv_cache_4bit import __version__
from numinous_kv_cache_4bit.engine.rows import bf16_width, bytes_per_token
from numinous_kv_cache_4bit.hooks.glm_flash_fp8 import FEATURE
from numinous_tooling import evidence
from numinous_tooling.bench import facts
from numinous_tooling.bench.clocks import CudaClock
from numinous_tooling.formats import STOCK_FP8_NO_ROPE
from numinous_tooling.gate.errors import ServerFailed
from numinous_tooling.gate.servers import Interrupts, Server, free_port
from numinous_tooling.patching.counters import read_totals

LAYERS = INDEX_LAYERS = 2  # of the dummy: full-attention layers, each with an indexer of its own
BYTES = 256  # ids below are the tokenizer's bytes
SHORT, LONG = (
    700,
    6000,
)  # in front of and behind the 2048 tokens up to which prefill is plain multi-head attention
STOCK_SAYS = "index_kpool > 1 appends tail tokens"
Scores = list[tuple[float, int]]  # per prompt token: its logprob, and the likeliest token there


def make_dummy(folder: Path, draft: bool) -> Path:
    """The dummy checkpoint of the module beside this one."""
    path = Path(__file__).with_name("make_dummy.py")
    spec = importlib.util.spec_from_file_location("make_dummy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_dummy"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    module.write("glm-flash", folder, draft=draft)
    return folder


def prompt(seed: int, length: int) -> list[int]:
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


def check(
    stock: dict[str, Any], ours: dict[str, Any], agree: float
) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Ratio of tokens, floor and comparison of answers; raises SystemExit where the gate is red."""
    bf16, fp8 = (
        bytes_per_token(row, LAYERS, INDEX_LAYERS)
        for row in (bf16_width(STOCK_FP8_NO_ROPE), STOCK_FP8_NO_ROPE.width)
    )
    ratio = ours["tokens"] / stock["tokens"]
    print(
        f"tokens: {ours['tokens']} against {stock['tokens']}, {ratio:.4f} x; bytes per token {fp8} against {bf16}, {bf16 / fp8:.4f} x"
    )
    if abs(ratio / (bf16 / fp8) - 1) > 0.02:
        raise SystemExit("red gate: the pools do not differ as their bytes do")
    if len({likeliest for _, likeliest in stock["scores"]["long, cold"]}) < 10:
        raise SystemExit(
            "red gate: stock's answers hardly depend on the prompt; agreement would mean nothing"
        )
    floor, found = (
        compare(stock["scores"], stock["again"]),
        compare(stock["scores"], ours["scores"]),
    )
    print(f"tokens from the cache: {ours['cached']}, stock {stock['cached']}")
    for name in found:
        print(
            f"{name}: likeliest token {found[name]['agree']:.3f} (stock with itself {floor[name]['agree']:.3f}), "
            f"logprob difference {found[name]['difference']:.4f} ({floor[name]['difference']:.4f})"
        )
        if found[name]["agree"] < agree * floor[name]["agree"]:
            raise SystemExit(f"red gate: {name}: likeliest tokens agree less than asked ({agree})")
    return ratio, floor, found


def server_of(name: str, options: argparse.Namespace, model: Path, folder: Path) -> Server:
    """One server, not started; arms are `bf16`, `fp8` and `stock-fp8`."""
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += [
        "--port",
        str(port),
        "--random-seed",
        "7",
        "--context-length",
        str(options.context_length),
    ]
    command += ["--mem-fraction-static", str(options.memory), *options.server_flags.split()]
    command += ["--kv-cache-dtype", "bfloat16" if name == "bf16" else "fp8_e4m3"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("NUMINOUS_")}
    env["NUMINOUS_STATE_DIR"] = str(folder / f"state-{name}")
    env |= {FEATURE.flag: "1"} if name == "fp8" else {"SGLANG_PLUGINS": "none"}
    return Server(name, command, env, folder / f"{name}.log", port)


def run_arm(name: str, options: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    """Start a server, measure, end it."""
    server = server_of(name, options, model, folder)
    with server.running(Interrupts()):
        ready_s = server.wait_ready(options.start_timeout, lambda elapsed: None)
        tokens = server.info().get("max_total_num_tokens")
        if not isinstance(tokens, int):
            raise SystemExit("red gate: the server does not say how many tokens fit")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        with httpx.Client(base_url=server.url, timeout=900, limits=limits, trust_env=False) as http:
            result = measure(http, options) | {"tokens": tokens}
    result["counters"] = read_totals(folder / f"state-{name}").get(FEATURE.id, {})
    if (name == "fp8") != bool(result["counters"].get("engaged")):
        raise SystemExit(f"red gate: arm {name} shows counters {result['counters']}")
    if name == "fp8":
        print("\n".join(line for line in server.log.read_text().splitlines() if FEATURE.id in line))
    print(
        f"{name}: ready {ready_s:.0f} s, {tokens} tokens fit, prefill {statistics.median(result['prefill_tok_s']):.0f} tok/s, "
        f"decode {statistics.median(result['decode_tok_s']):.0f} tok/s, counters {result['counters']}",
        flush=True,
    )
    return result


def stock_fails(options: argparse.Namespace, model: Path, folder: Path) -> bool:
    """Whether stock with an FP8 cache ends as the feature's declaration says."""
    server = server_of("stock-fp8", options, model, folder)
    try:
        with server.running(Interrupts()):
            server.wait_ready(options.start_timeout, lambda elapsed: None)
            with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as http:
                generate(http, prompt(1, LONG), 4)
    except (ServerFailed, httpx.HTTPError):
        pass
    return STOCK_SAYS in server.log.read_text()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a dummy made before; left out: made now")
    parser.add_argument(
        "--memory", type=float, default=0.3, help="--mem-fraction-static of all arms"
    )
    parser.add_argument("--context-length", type=int, default=32768)
    parser.add_argument("--prefill", type=int, default=16384, help="tokens of a long prompt")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--context", type=int, default=4096, help="tokens in front of an answer")
    parser.add_argument("--decode", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--agree",
        type=float,
        default=0.8,
        help="share of stock's own agreement that is asked of FP8",
    )
    parser.add_argument("--no-stock-fp8", action="store_true", help="do not show that stock fails")
    parser.add_argument("--server-flags", default="", help="further flags of all arms, one string")
    parser.add_argument("--start-timeout", type=float, default=900.0)
    parser.add_argument(
        "--evidence", type=Path, nargs="?", const=Path(), help="append records (to FILE)"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    with tempfile.TemporaryDirectory(prefix="glm-flash-fp8-") as scratch:
        folder = Path(scratch)
        draft = "--speculative-algorithm" in options.server_flags
        model = options.model or make_dummy(folder / "model", draft)
        try:
            results = {name: run_arm(name, options, model, folder) for name in ("bf16", "fp8")}
        except ServerFailed as failure:
            raise SystemExit(f"{failure.tail}\n{failure}") from None
        fails = None if options.no_stock_fp8 else stock_fails(options, model, folder)
    ratio, floor, found = check(results["bf16"], results["fp8"], options.agree)
    if fails is not None:
        print(
            f"stock with --kv-cache-dtype fp8_e4m3: {'fails as described' if fails else 'DOES NOT FAIL as described'}"
        )
    if options.evidence is None:
        return 0

    common = facts.run_facts(CudaClock(), os.environ)
    records = [
        {
            "package": "kv-cache-4bit",
            "version": __version__,
            **common,
            "op": "glm_flash_fp8",
            "case": f"GLM-5.3-Flash dummy, {LAYERS} full-attention layers; prefill {options.prefill}, "
            f"decode {options.users} x {options.decode} behind {options.context}",
            "provider": name,
            "provider_version": __version__ if name == "fp8" else common["engine"],
            "n": options.repeats,
            "pool_tokens": result["tokens"],
            "pool_ratio": ratio if name == "fp8" else 1.0,
            "prefill_tok_s": statistics.median(result["prefill_tok_s"]),
            "decode_tok_s": statistics.median(result["decode_tok_s"]),
            "repeats": {k: result[k] for k in ("prefill_tok_s", "decode_tok_s")},
            "agreement": found if name == "fp8" else floor,
            "cached_tokens": result["cached"],
            "stock_fp8_fails": fails,
            "counters": result["counters"],
            "gate": f"tokens by the byte formula within 2 %; likeliest tokens agree {options.agree} of stock's own; engaged",
            "command": " ".join(["bench_glm_flash_fp8.py", *(argv or sys.argv[1:])]),
        }
        for name, result in results.items()
    ]
    path = options.evidence
    if path == Path():
        path = (
            evidence.find_evidence(Path(__file__).parent) / "kv-cache-4bit" / "glm_flash_fp8.jsonl"
        )
    evidence.append(path, records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
