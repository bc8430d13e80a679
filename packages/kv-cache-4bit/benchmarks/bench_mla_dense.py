# SPDX-License-Identifier: Apache-2.0
"""``kv4.mla_dense`` in the served engine: tokens that fit, answers, speed, beside stock's bf16 and FP8 caches of dense MLA.

Servers in turn on one Hopper GPU, the pinned engine, a dummy of DeepSeek V3 with `--layers` layers (`make_dummy.py`): bf16 and FP8 of stock,
4 bit; with ``--flashmla`` FP8 and 4 bit once more on the backend whose kernel reads FP8 rows itself; with ``--native`` 4 bit decoded by
`sparse_mla_decode`.

    python packages/kv-cache-4bit/benchmarks/bench_mla_dense.py --flashmla --results arms-dense --evidence

What is measured, how arms are run apart and joined: `cache_arms`. A decode step of the feature moves more bytes than a bf16 cache does, so decode speed is recorded, not
judged. The layers matter: the shadow is one bf16 row for all of them, so a model of 61 layers gains 1.553 × over FP8, one of 16 1.358 ×.
A cached prefix below 8192 tokens is read through the shadow; ``--env SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD=1`` lets all of them
take the multi-head path instead. How 4 bit is judged against FP8: `cache_verdict`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import cache_arms
import make_dummy
from cache_verdict import BASE, Arm

from numinous_kv_cache_4bit.engine.mla_dense import cell_size
from numinous_kv_cache_4bit.engine.rows import bf16_width
from numinous_kv_cache_4bit.options import MLA_DENSE
from numinous_tooling.formats import KV4, STOCK_FP8_RAW
from numinous_tooling.patching.feature import flag_of


def arms_of(flashmla: bool = False, native: bool = False) -> tuple[Arm, ...]:
    """Servers, what is new first."""
    pair = (
        Arm("kv4", KV4.width, features=(MLA_DENSE,), peer="fp8"),
        Arm("fp8", STOCK_FP8_RAW.width),
    )
    more = tuple(
        replace(
            arm,
            name=f"{arm.name}-flashmla",
            flags=("--attention-backend", "flashmla"),
            peer=arm.peer and f"{arm.peer}-flashmla",
        )
        for arm in pair
    )
    # Its kernel reads page tables of 64 tokens.
    decode = replace(
        pair[0],
        name="kv4-native",
        flags=("--page-size", "64"),
        env={f"{flag_of(MLA_DENSE)}_DECODE": "native"},
        peer="kv4",
    )
    bf16 = Arm(BASE, bf16_width(KV4), "bfloat16")
    return (*pair, bf16, *(more if flashmla else ()), *((decode,) if native else ()))


def bytes_of(arm: Arm, layers: int) -> int:
    """Bytes of a token in an arm's cache."""
    return cell_size(layers, 0) if MLA_DENSE in arm.features else arm.row * layers


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cache_arms.parser(__doc__)
    parser.add_argument("--layers", type=int, default=16, help="of a dummy that is made now")
    parser.add_argument("--flashmla", action="store_true", help="two arms more")
    parser.add_argument(
        "--native", action="store_true", help="a further arm, decode by sparse_mla_decode"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    draft = "--speculative-algorithm" in options.server_flags
    dummy = make_dummy.model_config("deepseek-v3", False, draft, options.layers)
    layers = cache_arms.config_of(options.model, dummy)["num_hidden_layers"]
    bench = cache_arms.Bench(
        "mla_dense",
        f"DeepSeek V3 dummy, {layers} layers",
        arms_of(options.flashmla, options.native),
        lambda arm: bytes_of(arm, layers),
        lambda folder: make_dummy.write("deepseek-v3", folder, draft=draft, layers=options.layers),
    )
    return cache_arms.run(bench, options, argv)


if __name__ == "__main__":
    raise SystemExit(main())
