# SPDX-License-Identifier: Apache-2.0
"""Judge and time the candidate schedules of rmsnorm_quant in one command.

    python3 packages/moe-gemm/benchmarks/try_rmsnorm_quant.py [arguments of numinous bench]

1. Bits: the device tests of each candidate in a process of its own, all at once, so that one that hangs or writes where it may not
   takes no other with it. What fails or takes longer than `SECONDS` is named and not timed.
2. Time: the others, the launcher's own choice, the engine's two kernels and its norm alone, where targets were missed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests" / "test_rmsnorm_quant.py"
CANDIDATES = ("prompt", "split", "ring", "ring_wide")
SECONDS = 75
OTHERS = ("cuda", "sglang", "sglang-norm-alone")
OP = "numinous_moe_gemm.workbench.rmsnorm_quant:TRIAL"


def judged(commands: Mapping[str, Sequence[str]], seconds: float) -> list[str]:
    """The names whose command ended with 0 in time; the end of what the others said is printed."""
    ends = time.monotonic() + seconds
    # Without the variable a test that found no GPU would pass.
    environment = {**os.environ, "NUMINOUS_REQUIRE_DEVICE": "1"}
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "env": environment,
    }
    running = {name: subprocess.Popen(command, **pipes) for name, command in commands.items()}  # type: ignore[call-overload]
    passed = []
    for name, process in running.items():
        try:
            said, _ = process.communicate(timeout=max(0.1, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            said = f"{process.communicate()[0]}\nno end after {seconds:.0f} s"
        if process.returncode == 0:
            passed.append(name)
        print(f"--- {name}: {'right' if process.returncode == 0 else 'NOT right'}")
        print("\n".join(said.strip().splitlines()[-3 if process.returncode == 0 else -40 :]))
    return passed


def main(arguments: Sequence[str]) -> int:
    """Exit code of the bench."""
    pytest = [sys.executable, "-m", "pytest", str(TESTS), "-q", "--tb=line", "--tier", "device", "--arch", "sm90", "-k"]  # fmt: skip
    passed = judged(
        {name: [*pytest, f"bits_of_candidates and by_{name}]"] for name in CANDIDATES}, SECONDS
    )
    providers = [word for name in (*OTHERS, *passed) for word in ("--provider", name)]
    bench = [sys.executable, "-m", "numinous_tooling.bench", OP, "--samples", "20", *providers]
    return subprocess.run([*bench, *arguments], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
