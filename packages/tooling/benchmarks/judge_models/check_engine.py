# SPDX-License-Identifier: Apache-2.0
"""Does the engine say what the training module says? Serves a saved model and compares log-probabilities.

    python packages/tooling/benchmarks/judge_models/check_engine.py --model DIR --text eval-prose.txt \
        [--device cuda] [--url http://host:port] [-- --attention-backend …]

Two questions. *Prefill*: windows of the text are forced through `/generate`, and each token's log-probability is
compared with the training module's in fp32, which tests hold to the Hugging Face class. *Decode*: greedy answers are
scored by the training module; an engine that differs only by rounding chooses tokens that it, too, ranks first or
close to it. `rounding_difference` is what bf16 does to the training module itself. The default length reaches past
`index_topk`, so that DSA selects. What follows `--` goes to the server.

`--dense` serves `glm-dsa` without its indexer, as `DeepseekV3ForCausalLM`, for hosts where no DSA backend runs: all of
the model but the indexer is checked, on contexts that it would not shorten. On a CPU, with the platform of this
repository:

    SGLANG_PLATFORM=numinous-cpu TRITON_INTERPRET=1 python …/check_engine.py --model DIR/glm-dsa --text eval-prose.txt \
        --dense --device cpu --windows 2 --length 32 --answer 4 -- --dtype float32 --attention-backend triton \
        --cuda-graph-backend-decode=disabled --cuda-graph-backend-prefill=disabled --max-total-tokens 4096

Exit 0: within the limits; 1: not; 2: could not be asked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from judge_configs import is_glm
from judge_corpus import encode, read_documents, sha256, windows
from judge_model import JudgeModel
from judge_saved import WEIGHTS, load, write_dense
from tokenizers import Tokenizer
from torch import Tensor

from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.servers import Interrupts, Server, free_port


class NotAsked(Exception):
    """The engine gave no answer to judge; the message is one line."""


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    at = arguments.index("--") if "--" in arguments else len(arguments)
    own, server = arguments[:at], arguments[at + 1 :]
    options = parser().parse_args(own)
    try:
        tokenizer = Tokenizer.from_str((options.model / "tokenizer.json").read_text("utf-8"))
        tokens = encode(tokenizer, read_documents(options.text))
        rows = windows(tokens.ids, options.length)[: options.windows, :-1].tolist()
        with contextlib.ExitStack() as stack:
            if options.url is not None:
                url = options.url
            else:
                folder = options.model
                if options.dense:
                    folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "dense"
                    _refuse_long(options)
                    write_dense(options.model, folder)
                url = stack.enter_context(serve(options, folder, server))
            report = compare(options, url, rows)
    except (NotAsked, GateError, OSError, ValueError) as error:
        print(f"check_engine: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report, indent=2))
    return 0 if report["holds"] else 1


def _refuse_long(options: argparse.Namespace) -> None:
    config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    most = config.get("index_topk", 0)
    if most < options.length + options.answer:
        raise ValueError(f"--dense is another model beyond index_topk {most}; give less --length")


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description="Compare an engine with the training module.")
    out.add_argument("--model", type=Path, required=True, help="directory that train.py wrote")
    out.add_argument("--text", type=Path, required=True)
    out.add_argument("--url", help="a server that runs already; else one is started and ended")
    out.add_argument("--dense", action="store_true", help="serve glm-dsa without its indexer")
    out.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of the reference")
    out.add_argument("--windows", type=int, default=8)
    out.add_argument("--length", type=int, default=1536, help="tokens of a window")
    out.add_argument("--answer", type=int, default=64, help="greedy tokens after each window")
    out.add_argument("--start-timeout", type=float, default=600.0, help="seconds until it answers")
    out.add_argument("--answer-limit", type=float, default=300.0, help="seconds for one request")
    out.add_argument("--mean-limit", type=float, default=0.03, help="mean |Δ log p|, nats")
    out.add_argument("--loss-limit", type=float, default=0.01, help="|Δ mean loss|, nats")
    out.add_argument("--gap-limit", type=float, default=0.03, help="mean nats behind the reference's best token")  # fmt: skip
    return out


def compare(options: argparse.Namespace, url: str, rows: list[list[int]]) -> dict[str, Any]:
    """The report; `holds` says whether all limits do."""
    model = load(options.model).to(options.device)
    off: list[float] = []
    rounding: list[float] = []
    losses: list[tuple[float, float]] = []
    gaps: list[float] = []
    for row in rows:
        answer = ask(url, row, options.answer, options.answer_limit)
        theirs = forced(answer, row)
        ours = reference(model, row, options.device)
        mine = ours.gather(1, torch.tensor(row[1:], device=ours.device)[:, None])[:, 0].tolist()
        off += [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
        # What bf16 does to the module itself: an engine that is right is not far from it.
        with torch.autocast(options.device, torch.bfloat16):
            rounded = reference(model, row, options.device)
        picked = rounded.gather(1, torch.tensor(row[1:], device=ours.device)[:, None])[:, 0]
        rounding += [abs(a - b) for a, b in zip(mine, picked.tolist(), strict=True)]
        losses.append((-statistics.fmean(mine), -statistics.fmean(theirs)))
        said = generated(answer, options.answer)
        after = reference(model, row + said, options.device)[len(row) - 1 :]
        picked = after.gather(1, torch.tensor(said, device=after.device)[:, None])[:, 0]
        gaps += (after.max(-1).values - picked).tolist()
    ours_loss, theirs_loss = (statistics.fmean(side) for side in zip(*losses, strict=True))
    figures = {
        "mean_difference": statistics.fmean(off),
        "largest_difference": max(off),
        "rounding_difference": statistics.fmean(rounding),
        "loss_reference": ours_loss,
        "loss_engine": theirs_loss,
        "decode_gap": statistics.fmean(gaps),
        "decode_agrees": sum(gap == 0 for gap in gaps) / len(gaps),
    }
    holds = (
        figures["mean_difference"] <= options.mean_limit
        and abs(ours_loss - theirs_loss) <= options.loss_limit
        and figures["decode_gap"] <= options.gap_limit
    )
    counts = {"positions": len(off), "decoded": len(gaps)}
    weights = {"weights": sha256(options.model / WEIGHTS)}
    return {"holds": holds, **weights, **counts, **{k: round(v, 6) for k, v in figures.items()}}


@torch.no_grad()
def reference(model: JudgeModel, row: list[int], device: str) -> Tensor:
    """Log-probabilities [len(row) - 1, vocabulary] of every next token, fp32."""
    mode = "sparse" if is_glm(model.config) else "dense"
    logits = model(torch.tensor([row], device=device), mode=mode)[0, :-1]
    return logits.float().log_softmax(-1)


def ask(url: str, row: list[int], answer: int, limit: float) -> dict[str, Any]:
    """One greedy request with log-probabilities of the whole prompt."""
    body = {
        "input_ids": row,
        "sampling_params": {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    request = urllib.request.Request(
        f"{url}/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=limit) as reply:
            out = json.load(reply)
    except urllib.error.HTTPError as error:
        raise NotAsked(f"{url}/generate said {error.code}: {error.read()[:300]!r}") from error
    except (TimeoutError, urllib.error.URLError, json.JSONDecodeError) as error:
        raise NotAsked(f"{url}/generate gave no answer: {error}") from error
    if not isinstance(out, dict) or not isinstance(out.get("meta_info"), dict):
        raise NotAsked(f"{url}/generate answered without meta_info: {str(out)[:200]}")
    return out


def forced(answer: dict[str, Any], row: list[int]) -> list[float]:
    """Log-probabilities of row[1:], of an answer's `input_token_logprobs` [[log p, token, text], …]."""
    entries = answer["meta_info"].get("input_token_logprobs") or []
    said = [entry[1] for entry in entries]
    if said != row:
        raise NotAsked(f"want log-probabilities of the tokens sent, {row}, got those of {said}")  # fmt: skip
    return [float(entry[0]) for entry in entries[1:]]


def generated(answer: dict[str, Any], want: int) -> list[int]:
    """The tokens of an answer."""
    entries = answer["meta_info"].get("output_token_logprobs") or []
    if len(entries) != want:
        raise NotAsked(f"want an answer of {want} tokens, got {len(entries)}")
    return [int(entry[1]) for entry in entries]


@contextlib.contextmanager
def serve(options: argparse.Namespace, folder: Path, more: list[str]) -> Iterator[str]:
    """An engine of our own on a free port, ended afterwards with all its processes; its log lies beside the model."""
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder)]
    command += ["--port", str(port), "--host", "127.0.0.1", *more]
    log = options.model.with_name(options.model.name + "-server.log")
    server = Server(options.model.name, command, dict(os.environ), log, port)
    with Interrupts().installed() as interrupts, server.running(interrupts):
        server.wait_ready(options.start_timeout, lambda elapsed: None)
        yield server.url


if __name__ == "__main__":
    sys.exit(main())
