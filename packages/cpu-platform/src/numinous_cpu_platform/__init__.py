# SPDX-License-Identifier: Apache-2.0
"""Run an unmodified SGLang 0.5.20 on a plain CPU: the platform plugin, its installer and a small real model."""

from __future__ import annotations

import os

__version__ = "0.1.0"

PLATFORM = "numinous-cpu"


def activate() -> str | None:
    """Entry point `sglang.srt.platforms`: the platform's class path, or None unless it was asked for by name.

    The engine also calls this while it looks for platforms on its own (no `SGLANG_PLATFORM` set); answering None
    there keeps a GPU host on its GPU even where this package is installed.
    """
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM:
        return None
    return "numinous_cpu_platform.engine.cpu:NuminousCpuPlatform"


def serve_defaults(model: str | os.PathLike[str] | None = None) -> tuple[dict[str, str], list[str]]:
    """Environment and server flags with which the engine fits a small CPU machine (2 cores, 4 GB free).

    Put the flags in front of the user's own: the engine's argument parser lets the last one win. `model` is what goes to
    `--model-path` (None: the default model); for a directory the model hub is switched off.
    """
    environment = {
        "SGLANG_PLATFORM": PLATFORM,
        "TOKENIZERS_PARALLELISM": "false",
        # Threads that spin while they wait starve engine, tokenizer and client on the same few cores.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    if model is None or os.path.isdir(model):
        environment["HF_HUB_OFFLINE"] = "1"
    flags = [
        # Slower in bfloat16 on a CPU without native support for it, and less exact everywhere.
        "--dtype=float32",
        "--cuda-graph-backend-decode=disabled",
        "--cuda-graph-backend-prefill=disabled",
        # 0.7 GB of KV cache for the default model; without a limit the engine takes most of the memory.
        "--max-total-tokens=16384",
        "--max-running-requests=16",
        # A long prompt holds up running streams by one chunk, seconds on two cores.
        "--chunked-prefill-size=1024",
        # Without it the scheduler polls, and takes a whole core from its client while it has nothing to do.
        "--sleep-on-idle",
        # A forward pass through interpreted Triton kernels can be slower than the engine's 300 s.
        "--watchdog-timeout=1200",
    ]
    return environment, flags
