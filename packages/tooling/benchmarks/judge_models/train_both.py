# SPDX-License-Identifier: Apache-2.0
"""Train both models one after the other and print the paths of their records.

    python packages/tooling/benchmarks/judge_models/train_both.py --text train.txt.xz \
        --eval prose=eval-prose.txt --eval code=eval-code.txt --out DIR

Models go to DIR/glm-dsa and DIR/kimi-linear; every other option is handed to `train.py`. `--steps` differs between
the models and is refused here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from judge_configs import MODELS


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train both models; see train.py.")
    parser.add_argument("--out", type=Path, required=True)
    options, others = parser.parse_known_args(argv)
    if refused := [word for word in others if word.split("=")[0] in ("--steps", "--model")]:
        print(f"train_both: {refused[0]} belongs to one model; run train.py", file=sys.stderr)
        return 2
    worst, script = 0, Path(__file__).with_name("train.py")
    for model in MODELS:
        command = [sys.executable, str(script), "--model", model, "--out", str(options.out / model)]
        worst = max(worst, abs(subprocess.run([*command, *others], check=False).returncode))
    return worst


if __name__ == "__main__":
    sys.exit(main())
