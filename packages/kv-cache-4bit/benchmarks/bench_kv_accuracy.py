# SPDX-License-Identifier: Apache-2.0
"""How far do packed KV rows move a trained model of the GLM-5 architecture, and what moves it less? On a CPU, emulated.

    python packages/kv-cache-4bit/benchmarks/bench_kv_accuracy.py --model DIR/glm-dsa --text eval-prose.txt [--evidence]

DIR/glm-dsa is what `packages/tooling/benchmarks/judge_models/train.py` wrote. Windows of the text are forced through the
model once per arm; at each position the arm's distribution of the next token is compared with that of bf16 rows. What is
emulated, what is not, and what the arms are: `emulated_rows`.

Figures: KL(bf16 ‖ arm) in nats, its mean and 99th percentile; share of positions whose likeliest token differs; change of the
loss in percent; relative root-mean-square error of latents and of attention outputs (the latter with what earlier layers
did); share of DSA's choices that stay. Intervals are 95 %, bootstrapped by window.

A 4-bit arm passes with KL at most 16 × that of stock's FP8 rows, flips at most 4 × and a loss at most 0.5 % higher: squared and
plain, the ratio of 9 % noise to 2.6 %, with room for a quarter more. PASS needs the upper end of each interval below its
limit, FAIL the lower end of one above. Exit 0: all pass; 1: one fails; 2: undecided, or nothing could be measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from emulated_rows import ARMS, BASE, FAULTS, FP8, LATENT_DIM, Arm, Rows, Trace, named
from judge_corpus import encode, read_documents, sha256, windows
from judge_saved import WEIGHTS, load
from tokenizers import Tokenizer
from torch import Tensor

from numinous_kv_cache_4bit import __version__
from numinous_tooling import evidence
from numinous_tooling.bench import facts
from numinous_tooling.bench.clocks import CpuClock
from numinous_tooling.gate.accuracy.distance import (
    Estimate,
    Positions,
    Summary,
    ratio_by_sequence,
    summarise,
)

KL_LIMIT, FLIPS_LIMIT, LOSS_LIMIT = 16.0, 4.0, 0.5  # × FP8's, × FP8's, percent
SEED = 0


@dataclass
class Seen:
    """What one arm did, window after window.

    Args:
        kl, flips, loss: per window, one value per position.
        latents, outputs, kept: per window, one value per layer.
    """

    kl: list[Tensor] = field(default_factory=list)
    flips: list[Tensor] = field(default_factory=list)
    loss: list[Tensor] = field(default_factory=list)
    latents: list[list[float]] = field(default_factory=list)
    outputs: list[list[float]] = field(default_factory=list)
    kept: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """Figures of one arm; `verdict` is empty for arms that are not judged."""

    arm: Arm
    summary: Summary
    kl_times_fp8: Estimate
    flips_times_fp8: Estimate
    loss_percent: Estimate
    bytes_per_row: float
    latents: list[float]
    outputs: list[float]
    kept: list[float]
    verdict: str


def evaluate(
    model: Any, arms: Sequence[Arm], rows: Tensor, calibration: Tensor, path: str, chunk: int
) -> dict[str, Seen]:
    """Force windows [n, length + 1] through every arm; `BASE` is among them, whether named or not.

    Args:
        calibration: tokens of no window, from which arms with a scale or order of their own choose it.
    """
    seen = Trace()
    Rows(model, BASE).logits(calibration, trace=seen)
    codecs = {arm.name: Rows(model, arm, seen) for arm in arms}
    found = {name: Seen() for name in codecs}
    base = Rows(model, BASE)
    for number, row in enumerate(rows):
        started = time.perf_counter()
        tokens, targets = row[:-1], row[1:, None]
        reference = Trace()
        logs = base.logits(tokens, path, chunk, reference).log_softmax(-1)
        for name, codec in codecs.items():
            if codec.arm == BASE:
                theirs, trace = logs, reference
            else:
                trace = Trace()
                theirs = codec.logits(tokens, path, chunk, trace).log_softmax(-1)
            into = found[name]
            into.kl.append((logs.exp() * (logs - theirs)).sum(-1).double())
            into.flips.append(logs.argmax(-1) != theirs.argmax(-1))
            into.loss.append(-theirs.gather(1, targets)[:, 0].double())
            into.latents.append(trace.latents)
            into.outputs.append([
                float((one - two).norm() / two.norm())
                for one, two in zip(trace.outputs, reference.outputs, strict=True)
            ])  # fmt: skip
            into.kept.append([
                kept(one, two) for one, two in zip(trace.picked, reference.picked, strict=True)
            ])  # fmt: skip
        print(f"window {number + 1} of {len(rows)}: {time.perf_counter() - started:.0f} s", file=sys.stderr)  # fmt: skip
    return found


def kept(one: Tensor, two: Tensor) -> float:
    """Share of the keys in `two` that are in `one`, over the queries that had to choose; 1 where none had."""
    chose = two.sum(-1) < torch.arange(1, len(two) + 1)
    if not chose.any():
        return 1.0
    return float((one & two)[chose].sum() / two[chose].sum())


def results(found: dict[str, Seen], arms: Sequence[Arm], layers: int, length: int) -> list[Result]:
    """Figures and verdicts, in the order of `arms`; bf16 and FP8 rows have to be among them."""
    base, fp8 = found[BASE.name], found[FP8.name]
    base_loss = float(torch.cat(base.loss).mean())
    out = []
    for arm in arms:
        seen = found[arm.name]
        positions = positions_of(seen, base)
        summary = summarise(positions, SEED)
        kl = times(seen.kl, fp8.kl)
        flips = times(seen.flips, fp8.flips)
        delta = summary.nll_delta
        loss = Estimate(*(
            None if x is None else 100 * x / base_loss for x in (delta.value, delta.low, delta.high)
        ))  # type: ignore[arg-type]  # fmt: skip
        four_bit = arm.row is not None and arm.row is not FP8.row
        verdict = judge((kl, KL_LIMIT), (flips, FLIPS_LIMIT), (loss, LOSS_LIMIT)) if four_bit else ""  # fmt: skip
        means = (np.mean(part, 0).tolist() for part in (seen.latents, seen.outputs, seen.kept))
        out.append(Result(arm, summary, kl, flips, loss, arm.bytes_per_row(layers, length), *means, verdict))  # fmt: skip
    return out


def positions_of(seen: Seen, base: Seen) -> Positions:
    """All positions of an arm, for `distance.summarise`."""
    kl = torch.cat(seen.kl).clamp(min=0).numpy()
    delta = (torch.cat(seen.loss) - torch.cat(base.loss)).numpy()
    window = np.repeat(np.arange(len(seen.kl)), [len(one) for one in seen.kl])
    return Positions(kl, kl, torch.cat(seen.flips).numpy(), delta, window, exact=True)


def times(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Estimate:
    """The sum of one over the sum of the other, with its interval from resampled windows, the same ones for both."""
    sums = (np.array([float(part.sum()) for part in parts]) for parts in (ours, theirs))
    return ratio_by_sequence(*sums, SEED)


def judge(*limits: tuple[Estimate, float]) -> str:
    """PASS, FAIL or INCONCLUSIVE of figures that may be at most so large."""
    if any(figure.low is not None and figure.low > most for figure, most in limits):
        return "FAIL"
    if all(figure.high is not None and figure.high <= most for figure, most in limits):
        return "PASS"
    return "INCONCLUSIVE"


def line(result: Result) -> str:
    summary = result.summary
    return (
        f"{result.arm.name:24s} {result.bytes_per_row:6.1f} B  KL {summary.kl_low.value:.3e} (p99 {summary.kl_p99.value:.2e}), "
        f"{result.kl_times_fp8:.3g} x FP8's  flips {100 * summary.flips.value:.2f} %, {result.flips_times_fp8:.3g} x  "
        f"loss {result.loss_percent:.3g} %  latents {100 * float(np.mean(result.latents)):.2f} %  "
        f"outputs {100 * float(np.mean(result.outputs)):.2f} %  choices kept {100 * float(np.mean(result.kept)):.2f} %  {result.verdict}"
    )


def records(
    found: Sequence[Result], options: argparse.Namespace, common: dict[str, Any], command: str
) -> list[dict[str, Any]]:
    """Evidence of one run: a record per arm."""
    case = f"glm-dsa, {options.text.name}, windows of {options.length}, path {options.path}"
    if options.path == "chunks":
        case += f" of {options.chunk}"
    return [
        {
            "package": "kv-cache-4bit",
            "version": __version__,
            **common,
            "op": "kv_accuracy",
            "case": case,
            "provider": result.arm.name,
            "provider_version": __version__,
            "shown": "emulated: torch on a CPU, rows through the format in every layer",
            "n": result.summary.positions,
            "windows": result.summary.sequences,
            "bytes_per_row": round(result.bytes_per_row, 1),
            "rope": "bf16" if result.arm.row is None else result.arm.row.field("rope").encoding,
            **figures("kl", result.summary.kl_low),
            **figures("kl_p99", result.summary.kl_p99),
            **figures("flips_percent", result.summary.flips, 100),
            **figures("loss_change_percent", result.loss_percent),
            **figures("kl_times_fp8", result.kl_times_fp8),
            **figures("flips_times_fp8", result.flips_times_fp8),
            **{
                f"{name}_percent": 100 * float(np.mean(values))
                for name, values in (("latent_error", result.latents), ("output_error", result.outputs), ("choices_kept", result.kept))
            },
            "by_layer": {"latent_error": result.latents, "output_error": result.outputs, "choices_kept": result.kept},
            "verdict": result.verdict,
            "arm": {
                key: value.width if key == "row" and value is not None else value
                for key, value in vars(result.arm).items()
            },
            "model_sha256": sha256(options.model / WEIGHTS),
            "text_sha256": sha256(options.text),
            "gate": f"KL at most {KL_LIMIT:g} x FP8's, flips at most {FLIPS_LIMIT:g} x, loss at most {LOSS_LIMIT} % higher, each by its interval",
            "command": command,
        }
        for result in found
    ]  # fmt: skip


def figures(name: str, estimate: Estimate, factor: float = 1.0) -> dict[str, Any]:
    """A value and, where there is one, its interval. NaN, which JSON has not, becomes None."""
    value = factor * estimate.value if math.isfinite(estimate.value) else None
    if estimate.low is None or estimate.high is None:
        return {name: value, f"{name}_interval": None}
    return {name: value, f"{name}_interval": [factor * estimate.low, factor * estimate.high]}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory that train.py wrote")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=20480, help="positions that are scored")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--arms", default=",".join(ARMS), help="names, separated by commas")
    parser.add_argument("--path", choices=("pool", "chunks"), default="pool")
    parser.add_argument("--chunk", type=int, default=512, help="prefill chunk of --path chunks")
    parser.add_argument("--plant", choices=FAULTS, help="damage all 4-bit rows; has to FAIL")
    parser.add_argument("--threads", type=int, default=1, help="of torch; more pay on idle cores")
    parser.add_argument(
        "--evidence", type=Path, nargs="?", const=Path(), help="append records (to FILE)"
    )
    return parser.parse_args(argv)


def measured(options: argparse.Namespace) -> list[Result]:
    """Load, evaluate, judge; ValueError in one line where that cannot be done."""
    arms = named([name for name in options.arms.split(",") if name])
    arms = [BASE, FP8, *(arm for arm in arms if arm not in (BASE, FP8))]
    arms = [dataclasses.replace(arm, fault=options.plant) if arm.row else arm for arm in arms]
    if min(options.tokens, options.length, options.chunk) < 1:
        raise ValueError("--tokens, --length and --chunk are at least 1")
    model = load(options.model)
    config = model.config
    if config["model_type"] != "glm_moe_dsa" or config["kv_lora_rank"] != LATENT_DIM:
        raise ValueError(f"{options.model}: rows are those of glm-dsa with {LATENT_DIM} latent values")  # fmt: skip
    tokenizer = Tokenizer.from_str((options.model / "tokenizer.json").read_text("utf-8"))
    rows = windows(encode(tokenizer, read_documents(options.text)).ids, options.length)
    count = -(-options.tokens // options.length)
    if len(rows) < count + 1:
        raise ValueError(f"{options.text}: {len(rows)} windows of {options.length}, want {count} and one to calibrate on")  # fmt: skip
    # Spread over the text: neighbours are of one document.
    chosen = np.linspace(0, len(rows) - 2, count).astype(int)
    tokens = torch.from_numpy(rows.astype(np.int64))
    found = evaluate(model, arms, tokens[chosen], tokens[-1, :-1], options.path, options.chunk)
    return results(found, arms, config["num_hidden_layers"], options.length)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    torch.set_num_threads(options.threads)
    return run("bench_kv_accuracy", "kv_accuracy.jsonl", options, argv, measured, line, records)


def run(
    program: str,
    file: str,
    options: argparse.Namespace,
    argv: list[str] | None,
    measured: Callable[[argparse.Namespace], list[Any]],
    line: Callable[[Any], str],
    records: Callable[..., list[dict[str, Any]]],
) -> int:
    """Measure the arms, print a line of each, append their records where `--evidence` asks for it; the exit code of their verdicts."""
    common = facts.run_facts(CpuClock(), os.environ)  # now: the checkout may change meanwhile
    try:
        found = measured(options)
    except (OSError, ValueError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    print("\n".join(map(line, found)))
    if options.evidence is not None:
        path = options.evidence
        if path == Path():
            path = evidence.find_evidence(Path(__file__).parent) / "kv-cache-4bit" / file
        command = " ".join([f"{program}.py", *(argv or sys.argv[1:])])
        evidence.append(path, records(found, options, common, command))
    verdicts = {result.verdict for result in found}
    return 1 if "FAIL" in verdicts else 2 if "INCONCLUSIVE" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
