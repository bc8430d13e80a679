# SPDX-License-Identifier: Apache-2.0
"""``kv4.glm_flash_fp8`` in the served engine: tokens that fit, answers against stock's bf16 cache, and speed.

Three servers in turn on one Hopper GPU, the pinned engine, a dummy of the architecture (`make_dummy.py --arch glm-flash`): stock with a
bf16 cache, the feature, and stock with ``--kv-cache-dtype fp8_e4m3``, which has to fail for the reason that the feature is there for.

    python packages/kv-cache-4bit/benchmarks/bench_glm_flash_fp8.py --evidence

What is measured: `cache_arms`. The gate before any figure is recorded: the ratio of tokens is the formula's within 2 %; logprobs are
finite; the likeliest tokens agree with stock's as far as asked (a read of wrong slots agrees nowhere); the feature engaged, in the
other arm no trace of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import cache_arms
import httpx
from cache_arms import Arm

from numinous_kv_cache_4bit.engine.rows import bf16_width, bytes_per_token
from numinous_kv_cache_4bit.hooks.glm_flash_fp8 import FEATURE
from numinous_tooling.formats import STOCK_FP8_NO_ROPE
from numinous_tooling.gate.errors import ServerFailed
from numinous_tooling.gate.servers import Interrupts

LAYERS = INDEX_LAYERS = 2  # of the dummy: full-attention layers, each with an indexer of its own
STOCK_SAYS = "index_kpool > 1 appends tail tokens"
ARMS = (
    Arm("bf16", bf16_width(STOCK_FP8_NO_ROPE), "bfloat16"),
    Arm("fp8", STOCK_FP8_NO_ROPE.width, feature=FEATURE.id),
)
STOCK_FP8 = Arm("stock-fp8", STOCK_FP8_NO_ROPE.width)


def check(
    stock: dict[str, Any], ours: dict[str, Any], agree: float
) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Ratio of tokens, floor and comparison of answers; raises SystemExit where the gate is red."""
    bf16, fp8 = (bytes_per_token(arm.row, LAYERS, INDEX_LAYERS) for arm in ARMS)
    ratio = cache_arms.check_tokens(stock["tokens"], ours["tokens"], bf16, fp8)
    cache_arms.check_spread(stock)
    floor = cache_arms.compare(stock["scores"], stock["again"])
    found = cache_arms.compare(stock["scores"], ours["scores"])
    print(f"tokens from the cache: {ours['cached']}, stock {stock['cached']}")
    cache_arms.show("fp8", found, floor)
    for name in found:
        if found[name]["agree"] < agree * floor[name]["agree"]:
            raise SystemExit(f"red gate: {name}: likeliest tokens agree less than asked ({agree})")
    return ratio, floor, found


def stock_fails(options: argparse.Namespace, model: Path, folder: Path) -> bool:
    """Whether stock with an FP8 cache ends as the feature's declaration says."""
    server = cache_arms.server_of(STOCK_FP8, options, model, folder)
    try:
        with server.running(Interrupts()):
            server.wait_ready(options.start_timeout, lambda elapsed: None)
            with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as http:
                cache_arms.generate(http, cache_arms.prompt(1, cache_arms.LONG), 4)
    except (ServerFailed, httpx.HTTPError):
        pass
    return STOCK_SAYS in server.log.read_text()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cache_arms.parser(__doc__)
    parser.add_argument(
        "--agree",
        type=float,
        default=0.8,
        help="share of stock's own agreement that is asked of FP8",
    )
    parser.add_argument("--no-stock-fp8", action="store_true", help="do not show that stock fails")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    with tempfile.TemporaryDirectory(prefix="glm-flash-fp8-") as scratch:
        folder = Path(scratch)
        draft = "--speculative-algorithm" in options.server_flags
        model = options.model or cache_arms.make_dummy("glm-flash", folder / "model", draft)
        results = cache_arms.run_arms(ARMS, options, model, folder)
        fails = None if options.no_stock_fp8 else stock_fails(options, model, folder)
    ratio, floor, found = check(results["bf16"], results["fp8"], options.agree)
    if fails is not None:
        print(
            f"stock with --kv-cache-dtype fp8_e4m3: {'fails as described' if fails else 'DOES NOT FAIL as described'}"
        )
    gate = f"tokens by the byte formula within 2 %; likeliest tokens agree {options.agree} of stock's own; engaged"
    cache_arms.record(
        "glm_flash_fp8",
        f"GLM-5.3-Flash dummy, {LAYERS} full-attention layers",
        options,
        " ".join(["bench_glm_flash_fp8.py", *(argv or sys.argv[1:])]),
        results,
        {
            name: {
                "pool_ratio": ratio if name == "fp8" else 1.0,
                "agreement": found if name == "fp8" else floor,
                "stock_fp8_fails": fails,
                "gate": gate,
            }
            for name in results
        },
        stock=("bf16",),
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
