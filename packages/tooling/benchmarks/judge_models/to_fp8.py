# SPDX-License-Identifier: Apache-2.0
"""Write a trained `glm-dsa` once more with its linears in FP8 blocks of 128 × 128, as the real model is released.

python packages/tooling/benchmarks/judge_models/to_fp8.py --model judge/glm-dsa --out judge/glm-dsa-fp8
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from judge_saved import write_fp8
from safetensors import SafetensorError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write glm-dsa in FP8 blocks.")
    parser.add_argument("--model", type=Path, required=True, help="directory that train.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        write_fp8(options.model, options.out)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        print(f"to_fp8: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
