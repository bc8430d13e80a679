# SPDX-License-Identifier: Apache-2.0
"""What a GGUF file costs in the served engine: perplexity of the released loader, of the patched one, of Hugging Face.

    python packages/tooling/benchmarks/gguf_served/gguf_served.py --gguf MODEL.gguf --text eval-prose.txt \
        --fix 0061-gguf-llama-rope-layout --evidence

Three readings of the same windows of tokens, each token's log-probability given the tokens before it:

1. *reference*: Hugging Face transformers, which dequantises the file, in fp32 on `--device`;
2. *released*: a server of the installed engine;
3. *patched*: a server of a copy of it in which `upstream-fixes/sglang/<fix>/fix.patch` is applied.

With `--base FIX`, which may stand several times, *released* and *patched* both have those fixes too: where one bug hides another.

A released server that does not start is a reading too: its last error line. The patch holds where the mean loss of
*patched* is within `--limit` nats of the reference's (the engine computes products of packed weights with activations
of 8 bits, so the two are not equal) and *released* is further away or does not start. Exit 0: the patch holds; 1: it
does not; 2: could not be asked.

The engine has no GGUF kernels for CPUs, but it needs none for a file in F16. With the CPU platform of this repository:

    python packages/tooling/benchmarks/gguf_served/gguf_as_f16.py MODEL.gguf F16.gguf
    SGLANG_PLATFORM=numinous-cpu python …/gguf_served.py --gguf F16.gguf --text eval-prose.txt --fix … --device cpu \
        --windows 4 --length 256 --server-flags "--dtype float32 --disable-cuda-graph --max-total-tokens 4096"
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import httpx
import torch

from numinous_tooling import evidence
from numinous_tooling.bench import facts
from numinous_tooling.bench.clocks import CpuClock, CudaClock
from numinous_tooling.gate.errors import GateError, ServerFailed
from numinous_tooling.gate.servers import Interrupts, Server, free_port
from numinous_tooling.patching.errors import PatchError
from numinous_tooling.repo.checkout import RepoError, find_checkout
from numinous_tooling.upstream.headers import FOLDER, Fix, read_fixes
from numinous_tooling.upstream.records import VERSION
from numinous_tooling.upstream.trees import patched, released


class NotFinite(Exception):
    """The engine computed NaN or infinity, which is a reading, too."""


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        report = measure(options)
    except (GateError, PatchError, RepoError, OSError, RuntimeError, ValueError) as error:
        print(f"gguf_served: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report, indent=2))
    if options.evidence is not None:
        path = options.evidence
        if path == Path():
            path = (
                evidence.find_evidence(Path(__file__).parent)
                / "upstream-fixes"
                / "gguf_served.jsonl"
            )
        evidence.append(path, [record(options, report, argv or sys.argv[1:])])
    return 0 if report["holds"] else 1


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description="Perplexity of a GGUF file, released and patched.")
    out.add_argument("--gguf", type=Path, required=True)
    out.add_argument("--text", type=Path, required=True, help="plain text to score")
    out.add_argument("--fix", required=True, help="folder name below upstream-fixes/sglang")
    out.add_argument("--base", action="append", default=[], help="a fix that both servers have")
    out.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of the reference and of the record")  # fmt: skip
    out.add_argument("--windows", type=int, default=16)
    out.add_argument("--length", type=int, default=512, help="tokens of a window")
    out.add_argument("--limit", type=float, default=0.05, help="nats of mean loss")
    out.add_argument("--server-flags", default="", help="further server flags, in one string")
    out.add_argument("--start-timeout", type=float, default=600.0, help="seconds until it answers")
    out.add_argument("--evidence", type=Path, nargs="?", const=Path(), help="append a record (to FILE)")  # fmt: skip
    return out


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Mean losses in nats and perplexities of the three readings; `holds` judges the patch."""
    base = [fix_of(name) for name in options.base]
    both = [*base, fix_of(options.fix)]
    if len({fix.name for fix in both}) < len(both):
        raise ValueError("the same fix stands twice in --base and --fix")
    rows = token_windows(options)
    report: dict[str, Any] = {"reference": perplexity(reference(options, rows))}
    with tempfile.TemporaryDirectory(prefix="gguf-") as scratch:
        folder = Path(scratch)
        tree, _ = released("sglang", None, folder)
        trees = {
            "released": patched(base, tree, folder / "base") if base else tree,
            "patched": patched(both, tree, folder / "patched"),
        }
        for name, path in trees.items():
            try:
                report[name] = perplexity(engine(name, path, options, rows, folder))
            except ServerFailed as failure:
                report[name] = {"error": last_error(failure.tail) or str(failure)}
            except NotFinite as found:
                report[name] = {"error": str(found)}
    away = {
        name: abs(report[name].get("loss", math.inf) - report["reference"]["loss"])
        for name in ("released", "patched")
    }
    report["holds"] = away["patched"] <= options.limit < away["released"]
    return report


def fix_of(name: str) -> Fix:
    """The fix of a folder name or a part of it.

    Raises:
        ValueError: it names none or several, or one of another project.
    """
    fixes = read_fixes(find_checkout().root / FOLDER, [name])
    if len(fixes) != 1:
        raise ValueError(f"{name} names {len(fixes)} fixes; want one")
    if fixes[0].project != "sglang":
        raise ValueError(f"{name} patches {fixes[0].project}; want a fix of sglang")
    return fixes[0]


def token_windows(options: argparse.Namespace) -> list[list[int]]:
    """The first windows of the text, in the tokens that the file itself defines, each after its begin token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.gguf.parent, gguf_file=options.gguf.name)
    begin = [tokenizer.bos_token_id] if wants_begin(options.gguf) else []
    text = options.text.read_text("utf-8")[: options.windows * options.length * 12]
    ids = tokenizer(text, add_special_tokens=False).input_ids
    body = options.length - len(begin)
    rows = [begin + ids[at : at + body] for at in range(0, len(ids) - body + 1, body)]
    if len(rows) < options.windows:
        raise ValueError(f"{options.text}: holds {len(rows)} windows; want {options.windows}")
    return rows[: options.windows]


def wants_begin(path: Path) -> bool:
    """Whether the file asks for a begin token; models that were trained with one say nonsense without it."""
    field = gguf.GGUFReader(path).fields.get("tokenizer.ggml.add_bos_token")
    return field is not None and bool(field.contents())


@torch.no_grad()
def reference(options: argparse.Namespace, rows: list[list[int]]) -> list[float]:
    """Log-probabilities of row[1:] of every window, by Hugging Face on dequantised weights in fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        options.gguf.parent, gguf_file=options.gguf.name, dtype=torch.float32
    )
    model = model.to(options.device).eval()
    out: list[float] = []
    for row in rows:
        tokens = torch.tensor([row], device=options.device)
        scores = model(tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        out += scores.gather(1, tokens[0, 1:, None])[:, 0].tolist()
    return out


def engine(
    name: str, tree: Path, options: argparse.Namespace, rows: list[list[int]], folder: Path
) -> list[float]:
    """The same of a server that imports the engine from `tree`."""
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(options.gguf)]
    command += ["--skip-tokenizer-init", "--port", str(port), *options.server_flags.split()]
    before = os.environ.get("PYTHONPATH")
    env = {k: v for k, v in os.environ.items() if not k.startswith("NUMINOUS_")}
    env |= {"PYTHONPATH": os.pathsep.join([str(tree), *([before] if before else [])])}
    env |= {"SGLANG_PLUGINS": "none"}
    server = Server(name, command, env, folder / f"{name}.log", port)
    out: list[float] = []
    with Interrupts().installed() as interrupts, server.running(interrupts):
        server.wait_ready(options.start_timeout, lambda elapsed: None)
        with httpx.Client(base_url=server.url, timeout=300, trust_env=False) as http:
            for row in rows:
                body = {
                    "input_ids": row,
                    "sampling_params": {"temperature": 0, "max_new_tokens": 1},
                    "return_logprob": True,
                    "logprob_start_len": 0,
                }
                try:
                    answer = http.post("/generate", json=body).raise_for_status().json()
                except httpx.HTTPError as error:
                    raise GateError(f"server {name} gave no answer: {error}") from error
                entries = answer["meta_info"]["input_token_logprobs"]
                if [entry[1] for entry in entries] != row:
                    raise GateError(f"server {name} gave log-probabilities of other tokens")
                if any(entry[0] is None for entry in entries[1:]):
                    raise NotFinite(f"server {name} gave log-probabilities that are no numbers")
                out += [float(entry[0]) for entry in entries[1:]]
    return out


def perplexity(scores: list[float]) -> dict[str, Any]:
    """Mean loss in nats per token, and its exponential."""
    loss = -statistics.fmean(scores)
    return {"loss": round(loss, 5), "perplexity": round(math.exp(loss), 3), "tokens": len(scores)}


def last_error(tail: str) -> str:
    """The last line of a log that names an exception."""
    found = [line.strip() for line in tail.splitlines() if re.match(r"\s*\w*(Error|Exception)\b.*", line)]  # fmt: skip
    return found[-1] if found else ""


def record(
    options: argparse.Namespace, report: dict[str, Any], command: list[str]
) -> dict[str, Any]:
    """One evidence record of a run."""
    clock = CpuClock() if options.device == "cpu" else CudaClock()
    common = facts.run_facts(clock, os.environ)
    return {
        "package": "upstream-fixes",
        "version": VERSION,
        **common,
        "op": "gguf_served",
        "case": f"{options.gguf.name}, {options.windows} windows of {options.length} tokens of {options.text.name}",
        "provider": " on ".join([options.fix, *reversed(options.base)]),
        "provider_version": common["engine"],
        "n": report["reference"]["tokens"],
        **{name: report[name] for name in ("reference", "released", "patched")},
        "holds": report["holds"],
        "gate": f"patched within {options.limit:g} nats of the reference, released not",
        "command": " ".join(["gguf_served.py", *command]),
    }


if __name__ == "__main__":
    sys.exit(main())
