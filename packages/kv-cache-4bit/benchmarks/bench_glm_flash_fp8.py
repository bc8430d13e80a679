# SPDX-License-Identifier: Apache-2.0
"""``kv4.glm_flash_fp8`` in the served engine: tokens that fit, answers against stock's bf16 cache, and speed.

Three servers in turn on one Hopper GPU, the pinned engine, a dummy of the architecture (`make_dummy.py --arch glm-flash`): the feature, stock with a
bf16 cache, and stock with ``--kv-cache-dtype fp8_e4m3``, which has to fail for the reason that the feature is there for.

    python packages/kv-cache-4bit/benchmarks/bench_glm_flash_fp8.py --results arms-flash-fp8 --evidence

What is measured, how arms are run apart and joined: `cache_arms`. What is judged is the rule *Agree* of `cache_verdict`: a read of wrong slots agrees nowhere.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import cache_arms
import make_dummy
from cache_verdict import BASE, Arm

from numinous_kv_cache_4bit.engine.rows import bf16_width, bytes_per_token
from numinous_kv_cache_4bit.hooks.glm_flash_fp8 import FEATURE
from numinous_tooling.formats import STOCK_FP8_NO_ROPE
from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.servers import Interrupts

STOCK_SAYS = "index_kpool > 1 appends tail tokens"
ARMS = (
    Arm("fp8", STOCK_FP8_NO_ROPE.width, features=(FEATURE.id,)),
    Arm(BASE, bf16_width(STOCK_FP8_NO_ROPE), "bfloat16"),
)
STOCK_FP8 = Arm("stock-fp8", STOCK_FP8_NO_ROPE.width)


def stock_fails(
    options: argparse.Namespace, model: Path, folder: Path, interrupts: Interrupts
) -> dict[str, Any]:
    """Whether stock with an FP8 cache ends as the feature's declaration says."""
    server = cache_arms.server_of(STOCK_FP8, options, model, folder)
    try:
        with server.running(interrupts):
            server.wait_ready(options.start_timeout, lambda elapsed: None)
            with cache_arms.Engine(server) as engine:
                engine.generate([cache_arms.prompt(1, cache_arms.LONG)], 4)
    except GateError:
        pass
    fails = STOCK_SAYS in server.log.read_text(errors="replace")
    print(
        f"stock with --kv-cache-dtype fp8_e4m3: {'fails as described' if fails else 'DOES NOT FAIL as described'}"
    )
    return {"stock_fp8_fails": fails}


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
    draft = "--speculative-algorithm" in options.server_flags
    config = cache_arms.config_of(options.model, make_dummy.model_config("glm-flash", False, draft))
    layers = make_dummy.attention_layers(config)
    bench = cache_arms.Bench(
        "glm_flash_fp8",
        f"GLM-5.3-Flash dummy, {layers[0]} full-attention layers",
        ARMS,
        lambda arm: bytes_per_token(arm.row, *layers),
        lambda folder: make_dummy.write("glm-flash", folder, draft=draft),
        agree=options.agree,
        more=None if options.no_stock_fp8 else lambda *where: stock_fails(options, *where),
    )
    return cache_arms.run(bench, options, argv)


if __name__ == "__main__":
    raise SystemExit(main())
