# SPDX-License-Identifier: Apache-2.0
"""Many short turns, three arms: stock, stock with ``--prefill-decode-interval``, and ``scheduler.decode_burst``.

Closed loop: each of `--users` users sends `--turns` turns; a turn adds `--new-tokens` random token ids to the user's
context and asks for `--output` tokens, greedy, end-of-text ignored; then the user thinks for an exponential time of
mean `--think` seconds. All arms see the same ids and thinking times (seeded per repeat). Every arm runs in a server
of its own, in turn; odd repeats run the arms in reverse order.

    python packages/scheduler/benchmarks/bench_decode_burst.py --dummy small --users 32 --evidence

Per request: TTFT (ms), TPOT (ms per output token after the first), tok/s per user (1000 / TPOT), longest pause
between two tokens (ms). The gate before any figure is recorded: no errors, every answer complete, and the burst arm
engaged while the others show no trace of numinous.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from numinous_scheduler import __version__
from numinous_scheduler.hooks.decode_burst import FEATURE
from numinous_tooling import evidence
from numinous_tooling.gate import provenance
from numinous_tooling.gate.apis import NativeGenerateClient, Request
from numinous_tooling.gate.client import Tally, send
from numinous_tooling.gate.errors import ServerFailed
from numinous_tooling.gate.servers import Interrupts, Server, free_port
from numinous_tooling.patching.counters import read_totals

DUMMIES = {
    # hidden, layers, heads, kv heads, intermediate, vocabulary
    "tiny": (64, 2, 4, 2, 128, 512),
    "small": (
        1024,
        24,
        16,
        8,
        4096,
        32000,
    ),  # 0.45 B parameters: kernels are short, scheduling dominates
}
ARMS = ("stock", "interval", "burst")


def dummy_model(name: str, folder: Path) -> Path:
    """A directory with nothing but config.json, for ``--load-format dummy``."""
    hidden, layers, heads, kv_heads, intermediate, vocabulary = DUMMIES[name]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def arm_of(name: str, options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Server flags and environment of an arm. All arms carry the flag that stock does not read."""
    flags = ["--num-continuous-decode-steps", str(options.steps)]
    if name == "interval":
        flags += ["--prefill-decode-interval", str(options.steps)]
    environ = {"SGLANG_PLUGINS": "none"} if name != "burst" else {FEATURE.flag: "1"}
    if name == "burst":
        environ |= {
            f"{FEATURE.flag}_MAX_WAIT_MS": str(options.max_wait_ms),
            f"{FEATURE.flag}_MAX_QUEUE": str(options.max_queue),
        }
    return flags, environ


async def user(
    client: NativeGenerateClient,
    number: int,
    seed: int,
    options: argparse.Namespace,
    vocabulary: int,
    tally: Tally,
) -> list[dict[str, Any]]:
    """One user's turns."""
    rng = random.Random(seed * 1000 + number)
    context = [rng.randrange(10, vocabulary) for _ in range(options.first_tokens)]
    records = []
    await asyncio.sleep(rng.random() * options.think)
    for _ in range(options.turns):
        context += [rng.randrange(10, vocabulary) for _ in range(options.new_tokens)]
        request = Request(options.output, token_ids=tuple(context))
        records.append((await send(client, request, tally, 0.0))[0])
        await asyncio.sleep(rng.expovariate(1 / options.think) if options.think else 0)
    return records


async def replay(
    url: str, seed: int, options: argparse.Namespace, vocabulary: int
) -> tuple[list[dict[str, Any]], float]:
    """Warm up, flush, then all users at once; returns the records and the wall time in seconds."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as http:
        client, tally = NativeGenerateClient(http), Tally()
        warm = argparse.Namespace(**{**vars(options), "turns": 1, "think": 0.0})
        await asyncio.gather(
            *(user(client, n, -1, warm, vocabulary, tally) for n in range(options.users))
        )
        await client.flush_cache()
        begin = time.perf_counter()
        users = await asyncio.gather(
            *(user(client, n, seed, options, vocabulary, tally) for n in range(options.users))
        )
        return [record for records in users for record in records], time.perf_counter() - begin


def figures(records: list[dict[str, Any]], wall_s: float, output: int) -> dict[str, float]:
    """The measures of one repeat, milliseconds and tokens per second."""
    ttft, tpot, pause = [], [], []
    for record in records:
        if record["error"] or record["got_tokens"] != output:
            raise SystemExit(
                f"red gate: a request failed or was cut short: {record['error'] or record['got_tokens']}"
            )
        times = [at for at, _ in record["chunks"]]
        ttft.append(1000 * times[0])
        tpot.append(1000 * (times[-1] - times[0]) / max(1, output - 1))
        pause.append(1000 * max((b - a for a, b in itertools.pairwise(times)), default=0.0))
    speed = sorted(1000 / value for value in tpot if value)
    deciles = statistics.quantiles(speed, n=10, method="inclusive")
    return {
        "output_tok_s": len(records) * output / wall_s,
        "user_tok_s_p10": deciles[0],
        "user_tok_s_p50": statistics.median(speed),
        "user_tok_s_p90": deciles[8],
        "ttft_p50_ms": statistics.median(ttft),
        "ttft_p90_ms": statistics.quantiles(ttft, n=10, method="inclusive")[8],
        "ttft_max_ms": max(ttft),
        "tpot_p50_ms": statistics.median(tpot),
        "pause_p90_ms": statistics.quantiles(pause, n=10, method="inclusive")[8],
    }


def run_arm(
    name: str, repeat: int, options: argparse.Namespace, model: Path, folder: Path
) -> dict[str, Any]:
    """One server, one replay."""
    flags, environ = arm_of(name, options)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    port = free_port()
    state = folder / f"state-{name}-{repeat}"
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(model),
        "--port",
        str(port),
    ]
    command += ["--skip-tokenizer-init", *flags, *options.server_flags.split()]
    if not (model / "model.safetensors").exists():
        command += ["--load-format", "dummy"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("NUMINOUS_")}
    env |= {"NUMINOUS_STATE_DIR": str(state), **environ}
    server = Server(name, command, env, folder / f"server-{name}-{repeat}.log", port)
    with Interrupts().installed() as interrupts, server.running(interrupts):
        ready_s = server.wait_ready(options.start_timeout, lambda elapsed: None)
        records, wall_s = asyncio.run(replay(server.url, repeat, options, vocabulary))
    counted = read_totals(state).get(FEATURE.id, {})
    if (name == "burst") != bool(counted.get("engaged")):
        raise SystemExit(f"red gate: arm {name} shows counters {counted}")
    result = figures(records, wall_s, options.output) | {
        "requests": len(records),
        "counters": counted,
    }
    print(
        f"{name} repeat {repeat}: ready {ready_s:.0f} s, replay {wall_s:.1f} s, {json.dumps(result)}",
        flush=True,
    )
    return result


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="a Hugging Face directory")
    source.add_argument("--dummy", choices=DUMMIES, help="random weights of this shape")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--first-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--think", type=float, default=0.2, help="mean thinking time, seconds")
    parser.add_argument("--steps", type=int, default=16, help="N of all arms")
    parser.add_argument("--max-wait-ms", type=float, default=1000.0)
    parser.add_argument("--max-queue", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--server-flags", default="", help="further flags of every arm, one string")
    parser.add_argument("--start-timeout", type=float, default=600.0)
    parser.add_argument("--evidence", type=Path, help="append the records to this .jsonl file")
    options = parser.parse_args(argv)
    if unknown := set(options.arms.split(",")) - set(ARMS):
        parser.error(f"unknown arms {sorted(unknown)}; want some of {ARMS}")
    return options


def driver() -> str:
    """NVIDIA driver version, or "none"."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return (
            subprocess.run(query, capture_output=True, text=True, check=True)
            .stdout.splitlines()[0]
            .strip()
        )
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "none"


def records_of(
    results: dict[str, list[dict[str, Any]]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One evidence record per arm: the mean over repeats of each measure, and the repeats themselves."""
    machine = provenance.machine()
    versions = provenance.versions_of(sys.executable) or {}
    git = provenance.source_state(Path(__file__).parent, os.environ)
    import torch

    case = (
        f"{options.dummy or options.model.name} U{options.users} T{options.turns} first{options.first_tokens} "
        f"new{options.new_tokens} out{options.output} think{options.think:g} N{options.steps}"
    )
    records = []
    for name, repeats in results.items():
        measures = {
            key: statistics.mean(r[key] for r in repeats)
            for key in repeats[0]
            if key not in ("counters", "requests")
        }
        records.append(
            {
                "package": "scheduler",
                "version": __version__,
                "commit": git["commit"],
                "dirty": git["dirty"],
                "op": "decode_burst",
                "case": case,
                "provider": name,
                "provider_version": __version__ if name == "burst" else versions.get("sglang"),
                "gpu": machine["gpus"][0]
                if machine["gpus"]
                else f"cpu: {machine['cpu']}, {machine['cores']} cores",
                "driver": driver(),
                "cuda": torch.version.cuda,
                "torch": torch.__version__,
                "triton": versions.get("triton"),
                "engine": f"sglang {versions.get('sglang')}",
                "n": sum(r["requests"] for r in repeats),
                **measures,
                "repeats": repeats,
                "gate": "no errors, all answers complete, burst engaged, other arms without numinous",
                "command": " ".join(["bench_decode_burst.py", *sys.argv[1:]]),
                "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
        )
    return records


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    arms = options.arms.split(",")
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    with tempfile.TemporaryDirectory(prefix="decode-burst-") as scratch:
        folder = Path(scratch)
        model = options.model or dummy_model(options.dummy, folder / "model")
        try:
            for repeat in range(options.repeats):
                for name in arms if repeat % 2 == 0 else reversed(arms):
                    results[name].append(run_arm(name, repeat, options, model, folder))
        except ServerFailed as failure:
            raise SystemExit(f"{failure.tail}\n{failure}") from None
        records = records_of(results, options)
    if options.evidence:
        evidence.append(options.evidence, records)
    for record in records:
        shown = {key: round(value, 1) for key, value in record.items() if isinstance(value, float)}
        print(f"{record['provider']:>9}: {json.dumps(shown)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
