# SPDX-License-Identifier: Apache-2.0
"""``kv4.glm_dsa`` and ``kv4.glm_flash`` in the served engine: tokens that fit, answers, speed, beside stock's bf16 and FP8 caches.

Servers in turn on one Hopper GPU, the pinned engine, a dummy of the architecture (`make_dummy.py`):

| --arch | bf16 | fp8 | kv4 | further arms of --prefills |
|---|---|---|---|---|
| glm-dsa | stock | stock | 352-byte rows | FP8 and 4 bit with each `--dsa-prefill-backend` |
| glm-flash | stock | `kv4.glm_flash_fp8` | 288-byte rows | – |

    python packages/kv-cache-4bit/benchmarks/bench_kv4_dsa.py --arch glm-dsa --prefills --evidence
    python packages/kv-cache-4bit/benchmarks/bench_kv4_dsa.py --arch glm-flash --evidence

What is measured: `cache_arms`. The gate before any figure is recorded: the ratios of tokens are the formula's within 2 %; logprobs are
finite; in every case, cold and with a cached prefix apart, 4 bit changes at most `--flips` times as many of bf16's likeliest tokens
as FP8 does, and one in a hundred on top; features engaged, in stock's arms no trace of them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import cache_arms
from cache_arms import Arm

from numinous_kv_cache_4bit.engine.rows import bf16_width, bytes_per_token
from numinous_kv_cache_4bit.options import DSA_PREFILLS, GLM_DSA, GLM_FLASH, GLM_FLASH_FP8
from numinous_tooling.formats import KV4, KV4_NO_ROPE, STOCK_FP8, STOCK_FP8_NO_ROPE

MODELS = {
    "glm-dsa": ("GLM-5.3 dummy", 9, 3),
    "glm-flash": ("GLM-5.3-Flash dummy", 2, 2),
}
"""--arch -> name, full-attention layers, those with an indexer of their own."""

SPARE = 0.01
"""Share of positions that may flip beside `--flips` times FP8's: a floor under counts of a few."""


def arms_of(arch: str, prefills: bool) -> tuple[Arm, ...]:
    """Servers of this model; bf16 first, then FP8 and 4 bit."""
    if arch == "glm-flash":
        return (
            Arm("bf16", bf16_width(KV4_NO_ROPE), "bfloat16"),
            Arm("fp8", STOCK_FP8_NO_ROPE.width, feature=GLM_FLASH_FP8),
            Arm("kv4", KV4_NO_ROPE.width, feature=GLM_FLASH),
        )
    bf16 = Arm("bf16", bf16_width(KV4), "bfloat16")
    both = (Arm("fp8", STOCK_FP8.width), Arm("kv4", KV4.width, feature=GLM_DSA))
    more = tuple(
        replace(
            arm,
            name=f"{arm.name}-{backend}",
            flags=("--dsa-prefill-backend", backend, "--dsa-decode-backend", "flashmla_kv"),
        )
        for backend in DSA_PREFILLS[1:]
        for arm in both
    )
    return (bf16, *both, *(more if prefills else ()))


def fp8_of(name: str) -> str:
    """The arm with FP8 rows that an arm with 4-bit rows is compared with."""
    return name.replace("kv4", "fp8", 1)


def check(
    arch: str, arms: tuple[Arm, ...], results: dict[str, dict[str, Any]], flips: float
) -> dict[str, dict[str, Any]]:
    """Per arm: ratio of tokens and comparison of answers with bf16's; raises SystemExit where the gate is red."""
    _, layers, index_layers = MODELS[arch]
    first = results["bf16"]
    cache_arms.check_spread(first)
    floor = cache_arms.compare(first["scores"], first["again"])
    found: dict[str, dict[str, Any]] = {}
    for arm in arms:
        result = results[arm.name]
        each = bytes_per_token(arm.row, layers, index_layers)
        bf16 = bytes_per_token(arms[0].row, layers, index_layers)
        ratio = cache_arms.check_tokens(first["tokens"], result["tokens"], bf16, each)
        answers = (
            floor if arm.name == "bf16" else cache_arms.compare(first["scores"], result["scores"])
        )
        cache_arms.show(arm.name, answers, floor)
        found[arm.name] = {"pool_ratio": ratio, "agreement": answers}
    for name in (arm.name for arm in arms if arm.name.startswith("kv4")):
        for case, values in found[name]["agreement"].items():
            fp8 = 1 - found[fp8_of(name)]["agreement"][case]["agree"]
            if 1 - values["agree"] > flips * fp8 + SPARE:
                raise SystemExit(
                    f"red gate: {name}, {case}: {1 - values['agree']:.3f} of the likeliest tokens differ from bf16's, "
                    f"of FP8's {fp8:.3f}; at most {flips} times as many were asked for"
                )
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cache_arms.parser(__doc__)
    parser.add_argument("--arch", choices=tuple(MODELS), required=True)
    parser.add_argument(
        "--prefills", action="store_true", help="further arms, one for each sparse prefill backend"
    )
    parser.add_argument(
        "--flips",
        type=float,
        default=4.0,
        help="likeliest tokens that may change, as a multiple of FP8's",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    arms = arms_of(options.arch, options.prefills)
    with tempfile.TemporaryDirectory(prefix="kv4-dsa-") as scratch:
        folder = Path(scratch)
        draft = "--speculative-algorithm" in options.server_flags
        model = options.model or cache_arms.make_dummy(options.arch, folder / "model", draft)
        results = cache_arms.run_arms(arms, options, model, folder)
    found = check(options.arch, arms, results, options.flips)
    gate = f"tokens by the byte formula within 2 %; likeliest tokens flip at most {options.flips} x FP8's + {SPARE}; engaged"
    name, layers, _ = MODELS[options.arch]
    cache_arms.record(
        "kv4_dsa",
        f"{name}, {layers} full-attention layers",
        options,
        " ".join(["bench_kv4_dsa.py", *(argv or sys.argv[1:])]),
        results,
        {arm: {**values, "gate": gate} for arm, values in found.items()},
        stock=[arm.name for arm in arms if arm.feature is None],
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
