# SPDX-License-Identifier: Apache-2.0
"""``numinous gate kv4 --model MODEL``: does this model survive a 4-bit KV cache?

The accuracy gate with three arms: stock, stock with an FP8 cache, and ``kv4.nvfp4_triton``. FP8 is the yardstick, because people
serve with it: PASS says that the 4-bit cache moves the next-token distributions at most `MARGIN` times as far. Where it fails, ``--scales mse`` and
``--keys fp8`` are what the feature has against it. Any option of ``numinous gate accuracy`` may be given besides. On a GPU all three run on the attention backend that the feature is made for; ``--device cpu``
asks the same question beside one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from numinous_tooling.gate import options as shared
from numinous_tooling.gate.accuracy import command as accuracy
from numinous_tooling.gate.arms import flag_name
from numinous_tooling.gate.engaged import CountersReader
from numinous_tooling.gate.servers import Interrupts

FEATURE = "kv4.nvfp4_triton"
YARDSTICK = "--kv-cache-dtype fp8_e4m3"
MARGIN = 16.0
"""Rounding to 1 bit of mantissa in place of 3 has 16 times the variance, and a small KL divergence is proportional to that."""
TOP_LOGPROBS = 1024  # of a list of 128 the rest is too much to be counted as one

GPU_FLAGS = "--attention-backend triton --cuda-graph-backend-prefill disabled"


def run(
    options: argparse.Namespace,
    arguments: Sequence[str],
    interrupts: Interrupts,
    counters_reader: CountersReader,
) -> int:
    """Run the gate and print its verdict; returns the exit code."""
    chosen = {"KEYS": options.keys, "SCALES": options.scales}
    options.env_b += [
        f"{flag_name(FEATURE)}_{name}={word}" for name, word in chosen.items() if word
    ]
    if not options.url_a and shared.on_gpu(options.device, options.python_a):
        options.flags_all = f"{GPU_FLAGS} {options.flags_all}"
    return accuracy.run(options, arguments, interrupts, counters_reader)


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the gate."""
    parser = commands.add_parser(
        "kv4",
        help="does this model survive a 4-bit KV cache? stock, FP8 and NVFP4 along the same tokens, on any Linux machine",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    accuracy.add_options(parser, features=FEATURE)
    parser.add_argument(
        "--keys",
        choices=("nvfp4", "fp8"),
        help="what the 4-bit cache keeps keys in; fp8: 6.25 bits a value, not 4.5",
    )
    parser.add_argument(
        "--scales",
        choices=("amax", "mse"),
        help="how its block scales are chosen; mse: by a search at the write, no more bytes",
    )
    parser.set_defaults(yardstick=YARDSTICK, margin=MARGIN, top_k=TOP_LOGPROBS)
