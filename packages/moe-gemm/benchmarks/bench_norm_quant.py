# SPDX-License-Identifier: Apache-2.0
"""``moe.norm_quant`` in the served engine: same tokens as stock, proven engaged, and what it does for speed.

Two servers in turn, stock and with the feature, on a model of DeepSeek-V3's shape with fewer layers and experts, FP8 in blocks of
128, dummy weights (``--load-format dummy``). Needs a Hopper or Blackwell GPU and the pinned engine.

    python packages/moe-gemm/benchmarks/bench_norm_quant.py --evidence

1. *Same tokens*: greedy answers to prompts of several lengths, one request at a time, with the logprob of every token;
   tokens have to be equal, and every logprob of a prompt for which stock repeats its own. Stock against itself first:
   where its tokens differ, or do not depend on the prompt, nothing follows.
2. *Speed*: prefill of long prompts one by one; decode of many short prompts at once.

The gate before any figure is recorded: all answers complete, equal tokens, the feature engaged, the other arm without a trace of it.
"""

from __future__ import annotations

import argparse
import json
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
import torch

from numinous_moe_gemm import __version__
from numinous_moe_gemm.hooks.norm_quant import FEATURE
from numinous_tooling import evidence
from numinous_tooling.bench import facts
from numinous_tooling.bench.clocks import CudaClock
from numinous_tooling.gate.errors import ServerFailed
from numinous_tooling.gate.servers import Interrupts, Server, free_port
from numinous_tooling.patching.counters import read_totals

VOCABULARY = 32000
LENGTHS = (1, 7, 64, 200, 700, 2500)
ARMS = ("stock", "norm_quant")
LOGS = Path("reports/norm_quant")  # of the servers; they stay
Answer = dict[str, list[Any]]  # "tokens", "logprobs"


def dummy_model(folder: Path, layers: int) -> Path:
    """DeepSeek-V3's hidden sizes and heads; `layers` layers, the first one dense, 16 experts."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": layers,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 8,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "num_nextn_predict_layers": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, VOCABULARY) for _ in range(length)]


def ask(http: httpx.Client, ids: list[int], new_tokens: int, logprobs: bool = False) -> Any:
    """One greedy answer; raises SystemExit if it is not complete."""
    request = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        "return_logprob": logprobs,
    }
    answer = http.post("/generate", json=request).raise_for_status().json()
    if len(answer["output_ids"]) != new_tokens:
        raise SystemExit(f"red gate: {len(answer['output_ids'])} of {new_tokens} tokens")
    return answer


def greedy(http: httpx.Client) -> list[Answer]:
    """Tokens and logprobs of the prompts that are compared."""
    answers = []
    for seed, length in enumerate(LENGTHS):
        answer = ask(http, prompt(seed, length), 24, logprobs=True)
        logprobs = [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]
        answers.append({"tokens": answer["output_ids"], "logprobs": logprobs})
    return answers


def check_answers(stock: list[Answer], again: list[Answer], ours: list[Answer]) -> list[bool]:
    """Whether the logprobs are equal, by prompt; raises SystemExit where the feature, or stock itself, is red.

    Args:
        stock: of the first server.
        again: of the same server a second time.
        ours: of the server with the feature.
    """
    if not all(math.isfinite(value) for answer in stock for value in answer["logprobs"]):
        raise SystemExit(
            "red gate: stock's logprobs are not finite; equal tokens would mean nothing"
        )
    if len({tuple(answer["tokens"]) for answer in stock}) == 1:
        raise SystemExit(
            "red gate: stock answers every prompt alike; equal tokens would mean nothing"
        )
    equal = []
    for length, want, repeated, got in zip(LENGTHS, stock, again, ours, strict=True):
        if want["tokens"] != repeated["tokens"]:
            raise SystemExit("red gate: stock does not repeat its own tokens")
        if want["tokens"] != got["tokens"]:
            raise SystemExit(
                f"red gate: prompt of {length}: {got['tokens']}, stock {want['tokens']}"
            )
        equal.append(want["logprobs"] == got["logprobs"])
        if want["logprobs"] == repeated["logprobs"] and not equal[-1]:
            raise SystemExit(
                f"red gate: prompt of {length}: logprobs differ from stock's, which repeats its own"
            )
    return equal


def measure(http: httpx.Client, options: argparse.Namespace) -> dict[str, Any]:
    """Answers and speed of one server."""
    answers = greedy(http)
    prefill = []
    for repeat in range(options.repeats + 1):
        begin = time.perf_counter()
        ask(http, prompt(1000 + repeat, options.prefill), 1)
        prefill.append(options.prefill / (time.perf_counter() - begin))

    decode = []
    for repeat in range(options.repeats + 1):
        prompts = [prompt(5000 + 100 * repeat + n, 32) for n in range(options.users)]
        with ThreadPoolExecutor(options.users) as users:
            begin = time.perf_counter()
            # Its results, so that what goes wrong in a thread is raised here.
            list(users.map(lambda ids: ask(http, ids, options.decode), prompts))
            decode.append(options.users * options.decode / (time.perf_counter() - begin))
    # The first of each warms up.
    return {"answers": answers, "prefill_tok_s": prefill[1:], "decode_tok_s": decode[1:]}


def run_arm(name: str, options: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    """One server."""
    port = free_port()
    state = folder / f"state-{name}"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--load-format", "dummy", "--skip-tokenizer-init", "--port", str(port)]
    command += ["--disable-radix-cache", "--random-seed", "7", *options.server_flags.split()]
    env = {k: v for k, v in os.environ.items() if not k.startswith("NUMINOUS_")}
    env |= {"NUMINOUS_STATE_DIR": str(state), "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}
    if name == "norm_quant":
        env |= {FEATURE.flag: "1"}
        if options.verify:
            env |= {f"{FEATURE.flag}_VERIFY": "1"}
    else:
        env |= {"SGLANG_PLUGINS": "none"}
    LOGS.mkdir(parents=True, exist_ok=True)
    server = Server(name, command, env, LOGS / f"{name}.log", port)
    with Interrupts().installed() as interrupts, server.running(interrupts):
        ready_s = server.wait_ready(options.start_timeout, lambda elapsed: None)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        with httpx.Client(base_url=server.url, timeout=600, limits=limits, trust_env=False) as http:
            result = measure(http, options)
            if name == "stock":  # what differs from run to run of the same server proves nothing
                result["again"] = greedy(http)
    result["counters"] = read_totals(state).get(FEATURE.id, {})
    if (name == "norm_quant") != bool(result["counters"].get("engaged")):
        raise SystemExit(f"red gate: arm {name} shows counters {result['counters']}")
    print(
        f"{name}: ready {ready_s:.0f} s, prefill {statistics.median(result['prefill_tok_s']):.0f} tok/s, "
        f"decode {statistics.median(result['decode_tok_s']):.0f} tok/s, counters {result['counters']}",
        flush=True,
    )
    return result


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of a long prompt")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--decode", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--verify", action="store_true", help="check every pair inside the server; no figures"
    )
    parser.add_argument("--server-flags", default="", help="further flags of both arms, one string")
    parser.add_argument("--start-timeout", type=float, default=600.0)
    parser.add_argument(
        "--evidence", type=Path, nargs="?", const=Path(), help="append records (to FILE)"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU, and the feature serves on no other device")
    results = {}
    with tempfile.TemporaryDirectory(prefix="norm-quant-") as scratch:
        folder = Path(scratch)
        model = dummy_model(folder / "model", options.layers)
        try:
            for name in ("norm_quant",) if options.verify else ARMS:
                results[name] = run_arm(name, options, model, folder)
        except ServerFailed as failure:
            raise SystemExit(f"{failure.tail}\n{failure}") from None
    if options.verify:
        print("every pair equals stock's quantisation")
        return 0
    stock, ours = (results[name] for name in ARMS)
    equal_logprobs = check_answers(stock["answers"], stock["again"], ours["answers"])
    print(f"tokens equal for all {len(LENGTHS)} prompts, logprobs for {sum(equal_logprobs)}")

    common = _facts()
    records = [
        {
            "package": "moe-gemm",
            "version": __version__,
            **common,
            "op": "norm_quant",
            "case": f"DeepSeek-V3 shape, {options.layers} layers, 16 experts, dummy FP8; prefill {options.prefill}, "
            f"decode {options.users} x {options.decode}",
            "provider": name,
            "provider_version": __version__ if name == "norm_quant" else common["engine"],
            "n": options.repeats,
            "prefill_tok_s": statistics.median(result["prefill_tok_s"]),
            "decode_tok_s": statistics.median(result["decode_tok_s"]),
            "repeats": {k: result[k] for k in ("prefill_tok_s", "decode_tok_s")},
            "counters": result["counters"],
            "equal_tokens": True,
            "equal_logprobs": f"{sum(equal_logprobs)} of {len(LENGTHS)} prompts",
            "gate": "greedy tokens equal to stock's for prompts of "
            + ", ".join(map(str, LENGTHS))
            + "; engaged",
            "command": " ".join(["bench_norm_quant.py", *(argv or sys.argv[1:])]),
        }
        for name, result in results.items()
    ]
    if options.evidence is not None:
        path = options.evidence
        if path == Path():
            path = evidence.find_evidence(Path(__file__).parent) / "moe-gemm" / "norm_quant.jsonl"
        evidence.append(path, records)
    return 0


def _facts() -> dict[str, Any]:
    return facts.run_facts(CudaClock(), os.environ)


if __name__ == "__main__":
    raise SystemExit(main())
