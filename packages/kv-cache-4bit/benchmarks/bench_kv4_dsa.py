# SPDX-License-Identifier: Apache-2.0
"""``kv4.glm_dsa`` and ``kv4.glm_flash`` in the served engine: tokens that fit, answers, speed, beside stock's bf16 and FP8 caches.

Servers in turn on one Hopper GPU, the pinned engine, a dummy of the architecture (`make_dummy.py`):

| --arch | bf16 | fp8 | kv4 | further arms of --prefills | of --native |
|---|---|---|---|---|---|
| glm-dsa | stock | stock | 352-byte rows | FP8 and 4 bit with each `--dsa-prefill-backend` | FP8 and 4 bit decoded by `sparse_mla_decode` |
| glm-flash | stock | `kv4.glm_flash_fp8` | 288-byte rows | – | the same |

    python packages/kv-cache-4bit/benchmarks/bench_kv4_dsa.py --arch glm-dsa --results arms-dsa --evidence
    python packages/kv-cache-4bit/benchmarks/bench_kv4_dsa.py --arch glm-flash --results arms-flash --evidence
    python packages/kv-cache-4bit/benchmarks/bench_kv4_dsa.py --arch glm-dsa --model DIR/glm-dsa --text eval-prose.txt --sequences 32 --top 128 \
        --server-flags '--dsa-topk-backend flashinfer --max-total-tokens 40000' --results arms-judge --evidence

The last compares answers alone, on the trained model of `packages/tooling/benchmarks/judge_models`. What is measured, how arms are run apart and joined:
`cache_arms`. How 4 bit is judged against FP8: `cache_verdict`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import cache_arms
import make_dummy
from cache_verdict import BASE, Arm

from numinous_kv_cache_4bit.engine.rows import bf16_width, bytes_per_token
from numinous_kv_cache_4bit.options import DSA_PREFILLS, GLM_DSA, GLM_FLASH, GLM_FLASH_FP8
from numinous_tooling.formats import KV4, KV4_NO_ROPE, STOCK_FP8, STOCK_FP8_NO_ROPE
from numinous_tooling.patching.feature import flag_of

MODELS = {"glm-dsa": "GLM-5.3 dummy", "glm-flash": "GLM-5.3-Flash dummy"}


def arms_of(arch: str, prefills: bool = False, native: bool = False) -> tuple[Arm, ...]:
    """Servers of this model, what is new first."""
    if arch == "glm-flash":
        kv4 = Arm("kv4", KV4_NO_ROPE.width, features=(GLM_FLASH,), peer="fp8")
        fp8 = Arm("fp8", STOCK_FP8_NO_ROPE.width, features=(GLM_FLASH_FP8,))
    else:
        kv4 = Arm("kv4", KV4.width, features=(GLM_DSA,), peer="fp8")
        fp8 = Arm("fp8", STOCK_FP8.width)
    arms = [kv4, fp8, Arm(BASE, bf16_width(KV4_NO_ROPE if arch == "glm-flash" else KV4), "bfloat16")]  # fmt: skip
    if prefills and arch == "glm-dsa":
        arms += [
            replace(
                arm,
                name=f"{arm.name}-{backend}",
                flags=("--dsa-prefill-backend", backend, "--dsa-decode-backend", "flashmla_kv"),
                peer=arm.peer and f"{arm.peer}-{backend}",
            )
            for backend in DSA_PREFILLS[1:]
            for arm in (kv4, fp8)
        ]
    if native:
        arms += [
            replace(
                kv4,
                name="kv4-native",
                env={f"{flag_of(kv4.features[0])}_DECODE": "native"},
                peer="kv4",
            ),
            replace(
                fp8, name="fp8-native", features=(*fp8.features, "kv4.mla_decode_fp8"), peer="fp8"
            ),
        ]
    return tuple(arms)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cache_arms.parser(__doc__)
    parser.add_argument("--arch", choices=tuple(MODELS), required=True)
    parser.add_argument(
        "--prefills", action="store_true", help="further arms, one for each sparse prefill backend"
    )
    parser.add_argument(
        "--native", action="store_true", help="further arms, decode by sparse_mla_decode"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    draft = "--speculative-algorithm" in options.server_flags
    config = cache_arms.config_of(
        options.model, make_dummy.model_config(options.arch, tiny=False, draft=draft)
    )
    layers = make_dummy.attention_layers(config)
    name = f"judge model {options.arch}" if options.text else MODELS[options.arch]
    bench = cache_arms.Bench(
        "kv4_dsa",
        f"{name}, {layers[0]} full-attention layers",
        arms_of(options.arch, options.prefills, options.native),
        lambda arm: bytes_per_token(arm.row, *layers),
        lambda folder: make_dummy.write(options.arch, folder, draft=draft),
    )
    return cache_arms.run(bench, options, argv)


if __name__ == "__main__":
    raise SystemExit(main())
