# SPDX-License-Identifier: Apache-2.0
"""Train one of the two small models that gates judge on, in less than three minutes of one H200.

    python packages/tooling/benchmarks/judge_models/train.py --model glm-dsa --text train.txt.xz \
        --eval prose=eval-prose.txt --eval code=eval-code.txt --out DIR

Writes a Hugging Face directory and `record.json` in it: recipe, seed, steps, tokens, losses, sha256, versions.
`--steps` with the numbers of a record repeats its run without a clock (same bits on the CPU).

What to expect, *derived* and not measured; one H200 has 989 TFLOP/s in dense bf16 and 4.8 TB/s (vendor's figures):

`glm-dsa`, phase dense, windows of 2,048: 15.6 M matrix parameters a token × 6 = 94 MFLOP; causal attention of
4 layers × 8 heads × (256 + 256) × 1,024 keys × 2 × 3 = 101 MFLOP; together 0.19 GFLOP a token. At 30 % of the peak
1.5 M tokens/s. Without fusion a token moves about 110 kB a layer forward and twice that backward, and 260 kB in the
head: 1.6 MB, at 60 % of the bandwidth 1.8 M tokens/s. One after the other: 0.8 M tokens/s, 40 ms a step of 32,768
tokens, against some 1,000 launches (about 8 ms). Its 0.7 of 140 s would be 80 M tokens; six epochs of a corpus of
9 M tokens, 54 M, stop it before, after 65 s. The other two phases take 0.15 of the time each; with 2,048 × 2,048 scores
of 32 indexer heads in fp32 they move about 40 GB a step of 8,192 tokens: 15 ms of traffic, near 20 ms a step with the rest.

`kimi-linear`: 14.4 M × 6 = 87 MFLOP, MLA 2 layers × 8 × 384 × 1,024 × 2 × 3 = 38 MFLOP, KDA 11 MFLOP in fp32: 0.14
GFLOP. What limits it is memory: decays of a chunk, [32, 32, 128] in fp32 for each of 4 heads, are 64 kB a token and
layer, written and read about 9 times forward, as often again recomputed, and twice that backward: 14 MB a token, 0.2 M
tokens/s, 30 M tokens in 150 s. Compiled (or with flash-linear-attention) these are not written: then about 64 chunks × 7
launches × 6 layers × 3 (50 ms a step of 32,768) bound it near 0.5 M tokens/s, and six epochs end it after 110 s.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()

import torch  # noqa: E402 - the import is part of the time box
from judge_configs import MODELS, parameter_count  # noqa: E402
from judge_corpus import encode, read_documents, sha256, train_tokenizer  # noqa: E402
from judge_model import JudgeModel, initialise, round_to_bf16  # noqa: E402
from judge_saved import save  # noqa: E402
from judge_training import Recipe, Trainer, evaluate  # noqa: E402

# Evaluation and writing after the last step, seconds; an H200 that also did other work took 29 for the model with KDA.
RESERVE_S = 30.0
LIBRARIES = (
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "tokenizers",
    "transformers",
    "flash-linear-attention",
)


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    options = parser().parse_args(arguments)
    try:
        record = train(options, arguments)
    except (OSError, ValueError) as error:
        print(f"train: {error}", file=sys.stderr)
        return 2
    path = options.out / "record.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for name, figures in record["eval"].items():
        print(
            f"train: {name}: {figures['nats_per_token']:.3f} nats/token, {figures['bits_per_byte']:.3f} bits/byte"
        )
    print(path)
    return 0


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        description="Train one of the two small models that gates judge on."
    )
    out.add_argument("--model", choices=sorted(MODELS), required=True)
    out.add_argument("--text", type=Path, required=True, help="training text, .xz or plain")
    out.add_argument("--eval", type=named_path, action="append", default=[], metavar="NAME=FILE")
    out.add_argument("--out", type=Path, required=True, help="directory to write")
    out.add_argument("--seconds", type=float, default=170.0, help="time box of the whole command")
    out.add_argument("--steps", type=numbers, help="steps of each phase, divided by commas; no clock then")  # fmt: skip
    out.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    out.add_argument("--seed", type=int, default=Recipe.seed)
    out.add_argument("--batch", type=int, default=Recipe.batch, help="windows a step")
    out.add_argument("--length", type=int, default=Recipe.length, help="tokens of a window")
    out.add_argument("--eval-windows", type=int, default=Recipe.eval_windows)
    return out


def named_path(text: str) -> tuple[str, Path]:
    name, divider, path = text.partition("=")
    if not (name and divider and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE")
    return name, Path(path)


def numbers(text: str) -> list[int]:
    try:
        out = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers divided by commas") from error
    if min(out) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: each phase needs a step")
    return out


def train(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """The whole run; returns the record."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device; give --device cpu --steps N,… for a slow trial")
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    config = MODELS[options.model]
    recipe = replace(
        Recipe(),
        seed=options.seed,
        batch=options.batch,
        length=options.length,
        eval_windows=options.eval_windows,
    )
    evals = dict(options.eval)
    documents = read_documents(options.text)
    tokenizer = train_tokenizer(documents, config["vocab_size"])
    tokens = encode(tokenizer, documents)
    held_out = {name: encode(tokenizer, read_documents(path)) for name, path in evals.items()}
    prepared = time.perf_counter() - STARTED

    torch.manual_seed(recipe.seed)
    model = JudgeModel(config)
    initialise(model, recipe.seed)
    trainer = Trainer(model, tokens, recipe, device)
    left = options.seconds - (time.perf_counter() - STARTED) - RESERVE_S
    if options.steps is None and left <= 0:
        raise ValueError(
            f"--seconds {options.seconds:g} were over before the first step: kernels were chosen and compiled. They are "
            "cached, so run it again; or give more"
        )
    done = trainer.train(left, options.steps)

    round_to_bf16(model)
    losses = {
        name: evaluate(model, part, recipe.length, recipe.eval_windows, device)
        for name, part in held_out.items()
    }
    files = save(model, tokenizer, options.out)
    return {
        "schema": 1,
        "model": options.model,
        "architecture": config["architectures"][0],
        "parameters": parameter_count(config),
        "recipe": asdict(recipe),
        "corpus": {
            "tokens": len(tokens.ids),
            "sha256": {
                "train": sha256(options.text),
                **{name: sha256(path) for name, path in evals.items()},
            },
        },
        "phases": done,
        "repeat": "--steps " + ",".join(str(phase["steps"]) for phase in done),
        "kda": trainer.kda_name,
        "eval": losses,
        "files": files,
        "seconds": {
            "prepare": round(prepared, 3),
            "all": round(time.perf_counter() - STARTED, 3),
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": {"python": platform.python_version(), **versions()},
        "arguments": arguments,
    }


def versions() -> dict[str, str | None]:
    """Of what the run depends on; None where it is not installed."""
    out: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = None
    return out


if __name__ == "__main__":
    sys.exit(main())
