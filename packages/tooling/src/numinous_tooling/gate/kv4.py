# SPDX-License-Identifier: Apache-2.0
"""``numinous gate kv4 --model MODEL``: does this model survive a 4-bit KV cache?

The accuracy gate with three arms: stock, stock with an FP8 cache, and ``kv4.nvfp4_triton``. FP8 is the yardstick, because people
serve with it: PASS says that the 4-bit cache moves the next-token distributions at most `MARGIN` times as far. Any option of
``numinous gate accuracy`` may be given besides.
"""

from __future__ import annotations

import argparse
from typing import Any

from numinous_tooling.gate.accuracy import command as accuracy

FEATURE = "kv4.nvfp4_triton"
YARDSTICK = "--kv-cache-dtype fp8_e4m3"
MARGIN = 16.0
"""Rounding to 1 bit of mantissa in place of 3 has 16 times the variance, and a small KL divergence is proportional to that."""
TOP_LOGPROBS = 1024  # of a list of 128 the rest is too much to be counted as one

run = accuracy.run


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the gate."""
    parser = commands.add_parser(
        "kv4",
        help="does this model survive a 4-bit KV cache? stock, FP8 and NVFP4 along the same tokens, on any Linux machine",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    accuracy.add_options(parser, features=FEATURE)
    parser.set_defaults(yardstick=YARDSTICK, margin=MARGIN, top_k=TOP_LOGPROBS)
