# SPDX-License-Identifier: Apache-2.0
"""What does an NVFP4 KV cache cost an MHA or GQA model, and which remedy pays? On a CPU, emulated in transformers.

    python packages/kv-cache-4bit/benchmarks/bench_nvfp4_accuracy.py --model MODEL --text FILE [--evidence]

Windows of the text are forced through the model once per arm, every key and value being read back from the arm's format, those of the
query's own token too (as the engine's torch_native backend does); at each position the distribution of the next token is compared with
that of a bf16 cache. `numinous gate kv4` asks the same of the engine itself; this script is for arms that no engine has.

Arms: ``fp8`` (E4M3, no scale: stock's), ``nvfp4`` (E2M1, an E4M3 scale per 16: `kv4.nvfp4_triton`), and NVFP4 with one thing changed:
``-mse`` scales of least squared error among 13; ``-global`` an fp32 scale above, per layer and side, from a window that is not scored;
``-centred`` keys
less their mean over that window, per layer, head and channel, which attention does not see; ``-turned`` each head rotated by a Hadamard matrix before, and back after; ``-sinks`` the first 4 tokens in bf16; ``-ends`` first and last layer
in FP8; ``-k8`` keys in FP8; ``-v8`` values in FP8.

Limits, intervals and exit codes are those of bench_kv_accuracy.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from bench_kv_accuracy import (
    FLIPS_LIMIT,
    KL_LIMIT,
    LOSS_LIMIT,
    SEED,
    Seen,
    figures,
    judge,
    positions_of,
    run,
    times,
)
from torch import Tensor

from numinous_kv_cache_4bit import __version__
from numinous_tooling.gate.accuracy.distance import Estimate, Summary, summarise
from numinous_tooling.numerics import (
    decode_e4m3fn,
    dequantize_nvfp4,
    encode_e4m3fn,
    nvfp4_global_scale,
    quantize_nvfp4,
)

SINKS = 4


@dataclass(frozen=True)
class Arm:
    """How keys and values are kept.

    Args:
        k, v: ``bf16``, ``fp8`` or ``nvfp4``.
        scales: of NVFP4 blocks, ``amax`` or ``mse``.
        above: whether there is a calibrated scale above them.
        centred: whether keys are kept less a calibrated mean.
        turned: whether heads are rotated.
        sinks: tokens at the start that stay in bf16.
        ends: whether the first and the last layer are in FP8.
    """

    k: str = "nvfp4"
    v: str = "nvfp4"
    scales: str = "amax"
    above: bool = False
    centred: bool = False
    turned: bool = False
    sinks: int = 0
    ends: bool = False


ARMS = {
    "bf16": Arm("bf16", "bf16"),
    "fp8": Arm("fp8", "fp8"),
    "nvfp4": Arm(),
    "nvfp4-mse": Arm(scales="mse"),
    "nvfp4-global": Arm(above=True),
    "nvfp4-centred": Arm(centred=True),
    "nvfp4-turned": Arm(turned=True),
    "nvfp4-sinks": Arm(sinks=SINKS),
    "nvfp4-ends": Arm(ends=True),
    "nvfp4-k8": Arm(k="fp8"),
    "nvfp4-v8": Arm(v="fp8"),
}
BITS = {"bf16": 16.0, "fp8": 8.0, "nvfp4": 4.5}


def bits(arm: Arm, layers: int) -> float:
    """Bits of a value on average, sinks aside: they are few in a long context."""
    plain = (BITS[arm.k] + BITS[arm.v]) / 2
    return (2 * BITS["fp8"] + (layers - 2) * plain) / layers if arm.ends else plain


def hadamard(size: int) -> Tensor:
    """[n, n], orthonormal and symmetric; n is a power of two."""
    if size & (size - 1):
        raise ValueError(f"heads of {size} values cannot be turned: no power of two")
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


class Cache(transformers.DynamicCache):
    """A cache whose readers get what an arm keeps of keys and values, [batch, heads, tokens, D].

    Args:
        arm: the arm.
        layers: of the model.
        above: scale above the blocks by layer and side; filled in by a cache that `calibrates`.
        means: of keys and values by layer and side, [1, heads, 1, D]; likewise.
        calibrates: keeps bf16, and notes scales and means.
    """

    def __init__(
        self,
        arm: Arm,
        layers: int,
        above: dict[tuple[int, str], Tensor],
        means: dict[tuple[int, str], Tensor],
        calibrates: bool = False,
    ) -> None:
        super().__init__()
        self.arm, self.count, self.above, self.means = arm, layers, above, means
        self.calibrates = calibrates

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *of: Any, **named: Any
    ) -> Any:
        kept = [
            self._kept(x.to(torch.bfloat16).float(), side, layer_idx)
            for x, side in ((key_states, "k"), (value_states, "v"))
        ]
        return super().update(*kept, layer_idx, *of, **named)

    def _kept(self, x: Tensor, side: str, layer: int) -> Tensor:
        if self.calibrates:
            self.above[layer, side] = nvfp4_global_scale(x)
            self.means[layer, side] = x.mean(-2, keepdim=True).to(torch.bfloat16).float()
            return x
        what = getattr(self.arm, side)
        if self.arm.ends and layer in (0, self.count - 1):
            what = "fp8"
        if what == "bf16":
            return x
        if what == "fp8":
            return decode_e4m3fn(encode_e4m3fn(x))
        centre = self.means[layer, side] if self.arm.centred and side == "k" else 0.0
        turn = hadamard(x.shape[-1]) if self.arm.turned else None
        turned = (x - centre if turn is None else x @ turn).to(torch.bfloat16).float()
        above = self.above[layer, side] if self.arm.above else None
        scales: Any = self.arm.scales
        out = dequantize_nvfp4(
            *quantize_nvfp4(turned, global_scale=above, scale_choice=scales), global_scale=above
        )
        if turn is not None:
            out = out @ turn
        out = out + centre
        if self.arm.sinks:
            out[..., : self.arm.sinks, :] = x[..., : self.arm.sinks, :]
        return out


@dataclass(frozen=True)
class Result:
    """Figures of one arm; `verdict` is empty for bf16 and FP8."""

    name: str
    bits: float
    summary: Summary
    kl_times_fp8: Estimate
    flips_times_fp8: Estimate
    loss_percent: Estimate
    verdict: str


def evaluate(model: Any, names: list[str], windows: Tensor, calibration: Tensor) -> list[Result]:
    """Force windows [n, length + 1] through every arm; bf16 and FP8 come first, whether named or not."""
    layers = model.config.num_hidden_layers
    calibrated: tuple[dict[tuple[int, str], Tensor], ...] = ({}, {})
    names = list(dict.fromkeys(["bf16", "fp8", *names]))
    found = {name: Seen() for name in names}
    with torch.inference_mode():
        model(calibration[None], past_key_values=Cache(Arm(), layers, *calibrated, calibrates=True))
        for number, window in enumerate(windows):
            started = time.perf_counter()
            base = torch.empty(0)
            for name in names:
                cache = Cache(ARMS[name], layers, *calibrated)
                out = model(window[None, :-1], past_key_values=cache).logits[0].log_softmax(-1)
                base = out if name == "bf16" else base
                into = found[name]
                into.kl.append((base.exp() * (base - out)).sum(-1).double())
                into.flips.append(base.argmax(-1) != out.argmax(-1))
                into.loss.append(-out.gather(1, window[1:, None])[:, 0].double())
            print(f"window {number + 1} of {len(windows)}: {time.perf_counter() - started:.0f} s", file=sys.stderr)  # fmt: skip
    return [result(name, found, layers) for name in names]


def result(name: str, found: dict[str, Seen], layers: int) -> Result:
    """Figures and verdict of an arm."""
    seen, base, fp8 = found[name], found["bf16"], found["fp8"]
    summary = summarise(positions_of(seen, base), SEED)
    kl, flips = times(seen.kl, fp8.kl), times(seen.flips, fp8.flips)
    base_loss = float(torch.cat(base.loss).mean())
    delta = summary.nll_delta
    low, high = (None if x is None else 100 * x / base_loss for x in (delta.low, delta.high))
    loss = Estimate(100 * delta.value / base_loss, low, high)
    judged = name not in ("bf16", "fp8")
    verdict = judge((kl, KL_LIMIT), (flips, FLIPS_LIMIT), (loss, LOSS_LIMIT)) if judged else ""
    return Result(name, bits(ARMS[name], layers), summary, kl, flips, loss, verdict)


def line(found: Result) -> str:
    return (
        f"{found.name:14s} {found.bits:5.2f} bits  KL {found.summary.kl_low.value:.3e}, {found.kl_times_fp8:.3g} x FP8's  "
        f"flips {100 * found.summary.flips.value:.2f} %, {found.flips_times_fp8:.3g} x  loss {found.loss_percent:.3g} %  {found.verdict}"
    )


def records(
    found: list[Result], options: argparse.Namespace, common: dict[str, Any], command: str
) -> list[dict[str, Any]]:
    """Evidence of one run: a record per arm."""
    return [
        {
            "package": "kv-cache-4bit",
            "version": __version__,
            **common,
            "op": "nvfp4_accuracy",
            "case": f"{options.model.name}, {options.text.name}, windows of {options.length}",
            "provider": one.name,
            "provider_version": __version__,
            "shown": "emulated: transformers on a CPU, keys and values through the format in every layer",
            "n": one.summary.positions,
            "windows": one.summary.sequences,
            "bits_per_value": round(one.bits, 3),
            **figures("kl", one.summary.kl_low),
            **figures("kl_p99", one.summary.kl_p99),
            **figures("flips_percent", one.summary.flips, 100),
            **figures("loss_change_percent", one.loss_percent),
            **figures("kl_times_fp8", one.kl_times_fp8),
            **figures("flips_times_fp8", one.flips_times_fp8),
            "verdict": one.verdict,
            "arm": vars(ARMS[one.name]),
            "gate": f"KL at most {KL_LIMIT:g} x FP8's, flips at most {FLIPS_LIMIT:g} x, loss at most {LOSS_LIMIT} % higher, each by its interval",
            "command": command,
        }
        for one in found
    ]  # fmt: skip


def measured(options: argparse.Namespace) -> list[Result]:
    """Load, evaluate, judge; ValueError in one line where that cannot be done."""
    names = [name for name in options.arms.split(",") if name]
    if strange := [name for name in names if name not in ARMS]:
        raise ValueError(f"no arm {', '.join(strange)}; there are {', '.join(ARMS)}")
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    ids = torch.tensor(tokenizer(options.text.read_text("utf-8"), verbose=False)["input_ids"])
    rows = ids[: len(ids) // (options.length + 1) * (options.length + 1)].view(-1, options.length + 1)  # fmt: skip
    if len(rows) < options.windows + 1:
        raise ValueError(f"{options.text}: {len(rows)} windows of {options.length}, want {options.windows} and one to calibrate on")  # fmt: skip
    chosen = np.linspace(0, len(rows) - 2, options.windows).astype(int)
    return evaluate(model.eval(), names, rows[chosen], rows[-1, :-1])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=16, help="that are scored")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--arms", default=",".join(ARMS), help="names, separated by commas")
    parser.add_argument("--evidence", type=Path, nargs="?", const=Path(), help="append records (to FILE)")  # fmt: skip
    options = parser.parse_args(argv)
    return run(
        "bench_nvfp4_accuracy", "nvfp4_accuracy.jsonl", options, argv, measured, line, records
    )


if __name__ == "__main__":
    sys.exit(main())
