# SPDX-License-Identifier: Apache-2.0
"""``kv4.mla_dense`` in the served engine: tokens that fit, answers, speed, beside stock's bf16 and FP8 caches of dense MLA.

Servers in turn on one Hopper GPU, the pinned engine, a dummy of DeepSeek V3 with `--layers` layers (`make_dummy.py`): bf16 and FP8 of stock,
4 bit; with ``--flashmla`` FP8 and 4 bit once more on the backend whose kernel reads FP8 rows itself.

    python packages/kv-cache-4bit/benchmarks/bench_mla_dense.py --flashmla --evidence

What is measured: `cache_arms`. A decode step of the feature moves more bytes than a bf16 cache does, so decode speed is recorded, not
judged. The layers matter: the shadow is one bf16 row for all of them, so a model of 61 layers gains 1.553 × over FP8, one of 16 1.358 ×.
A cached prefix below 8192 tokens is read through the shadow; ``SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD=1`` in the environment lets all of them
take the multi-head path instead.

The gate before any figure is recorded: the ratios of tokens are the formula's within 2 %; logprobs are finite; in every case, cold and with a
cached prefix apart, 4 bit changes at most `--flips` times as many of bf16's likeliest tokens as FP8 does, and one in a hundred
on top; the feature engaged, in stock's arms no trace of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cache_arms
import make_dummy
from cache_arms import Arm

from numinous_kv_cache_4bit.engine.mla_dense import cell_size
from numinous_kv_cache_4bit.engine.rows import bf16_width
from numinous_kv_cache_4bit.options import MLA_DENSE
from numinous_tooling.formats import KV4, STOCK_FP8_RAW

SPARE = 0.01
"""Share of positions that may flip beside `--flips` times FP8's: a floor under counts of a few."""


def arms_of(flashmla: bool) -> tuple[Arm, ...]:
    """Servers; bf16 first, then pairs of FP8 and 4 bit."""
    pair = (Arm("fp8", STOCK_FP8_RAW.width), Arm("kv4", KV4.width, feature=MLA_DENSE))
    more = tuple(
        replace(arm, name=f"{arm.name}-flashmla", flags=("--attention-backend", "flashmla"))
        for arm in pair
    )
    return (Arm("bf16", bf16_width(KV4), "bfloat16"), *pair, *(more if flashmla else ()))


def bytes_of(arm: Arm, layers: int) -> int:
    """Bytes of a token in an arm's cache."""
    return cell_size(layers, 0) if arm.feature else arm.row * layers


def check(
    arms: Sequence[Arm], layers: int, results: Mapping[str, dict[str, Any]], flips: float
) -> dict[str, dict[str, Any]]:
    """Per arm: ratio of tokens and comparison of answers with bf16's; raises SystemExit where the gate is red."""
    first = results["bf16"]
    cache_arms.check_spread(first)
    floor = cache_arms.compare(first["scores"], first["again"])
    found: dict[str, dict[str, Any]] = {}
    for arm in arms:
        result = results[arm.name]
        ratio = cache_arms.check_tokens(
            first["tokens"], result["tokens"], bytes_of(arms[0], layers), bytes_of(arm, layers)
        )
        answers = floor if arm is arms[0] else cache_arms.compare(first["scores"], result["scores"])
        cache_arms.show(arm.name, answers, floor)
        found[arm.name] = {
            "pool_ratio": ratio,
            "bytes_per_token": bytes_of(arm, layers),
            "agreement": answers,
        }
        if not arm.feature:
            continue
        peer = found[arm.name.replace("kv4", "fp8", 1)]["agreement"]
        for case, values in answers.items():
            flipped, of_fp8 = 1 - values["agree"], 1 - peer[case]["agree"]
            if flipped > flips * of_fp8 + SPARE:
                raise SystemExit(
                    f"red gate: {arm.name}, {case}: {flipped:.3f} of the likeliest tokens differ from bf16's, of FP8's "
                    f"{of_fp8:.3f}; at most {flips} times as many were asked for"
                )
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cache_arms.parser(__doc__)
    parser.add_argument("--layers", type=int, default=16, help="of the dummy")
    parser.add_argument("--flashmla", action="store_true", help="two arms more")
    parser.add_argument("--flips", type=float, default=4.0, help="as a multiple of FP8's")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    arms = arms_of(options.flashmla)
    with tempfile.TemporaryDirectory(prefix="mla-dense-") as scratch:
        folder = Path(scratch)
        draft = "--speculative-algorithm" in options.server_flags
        if (model := options.model) is None:
            model = folder / "model"
            make_dummy.write("deepseek-v3", model, draft=draft, layers=options.layers)
        results = cache_arms.run_arms(arms, options, model, folder)
    found = check(arms, options.layers, results, options.flips)
    gate = f"tokens by the byte formula within 2 %; likeliest tokens flip at most {options.flips} x FP8's + {SPARE}; engaged"
    cache_arms.record(
        "mla_dense",
        f"DeepSeek V3 dummy, {options.layers} layers",
        options,
        " ".join(["bench_mla_dense.py", *(argv or sys.argv[1:])]),
        results,
        {arm: {**values, "gate": gate} for arm, values in found.items()},
        stock=[arm.name for arm in arms if arm.feature is None],
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
