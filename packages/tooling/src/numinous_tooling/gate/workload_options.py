# SPDX-License-Identifier: Apache-2.0
"""The options that choose a workload, and what they mean; an option of another workload is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

from numinous_tooling.gate import options as shared
from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.plan import Workload
from numinous_tooling.gate.workload import WorkloadSpec
from numinous_tooling.gate.workload_loops import LoopSpec
from numinous_tooling.gate.workload_text import TextSpec
from numinous_tooling.gate.workload_traces import MooncakeSpec

# Sessions, turns, length scale. The CPU's are what four server starts and replays on two cores take in a few minutes.
CPU_DEFAULTS = (4, 4, 1 / 16)
GPU_DEFAULTS = (32, 12, 1.0)
# Input, output, requests, concurrency of loops; requests of a trace.
CPU_LOOP = (128, 16, 16, 4)
GPU_LOOP = (1024, 256, 256, 32)
CPU_TRACE_REQUESTS = 16
GPU_TRACE_REQUESTS = 256

WORKLOADS = ("agents", "agents-text", "mooncake", "closed", "open")

# Which workloads an option is for.
_MEANT_FOR = {
    "sessions": ("agents", "agents-text"),
    "turns": ("agents", "agents-text"),
    "length_scale": ("agents", "mooncake"),
    "speedup": ("agents", "agents-text", "mooncake"),
    "trace": ("agents-text", "mooncake"),
    "requests": ("mooncake", "closed", "open"),
    "input": ("closed", "open"),
    "output": ("closed", "open"),
    "rate": ("open",),
    "concurrency": ("agents", "agents-text", "closed"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of all workloads."""
    add = parser.add_argument
    add("--workload", choices=WORKLOADS, default="agents", help="what is replayed")
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="agents-text: sessions with messages; mooncake: a trace; JSON lines, .gz or not",
    )
    add("--sessions", type=shared.positive, help="recorded sessions; left out: 4 on CPU, 32 on GPU")
    add("--turns", type=shared.positive, help="calls per session; left out: 4 on CPU, 12 on GPU")
    add(
        "--length-scale",
        type=shared.ratio,
        help="factor on all token counts; left out: 1/16 on CPU, 1 on GPU",
    )
    add("--speedup", type=shared.ratio, help="divides recorded times; left out: 1 / length scale")
    add("--requests", type=shared.positive, help="requests; left out: 16 on CPU, 256 on GPU")
    add("--input", type=shared.positive, metavar="N", help="prompt tokens of closed and open")
    add("--output", type=shared.positive, metavar="N", help="new tokens of closed and open")
    add("--rate", type=shared.ratio, help="open: requests per second, Poisson")
    add("--concurrency", type=shared.positive, help="sessions or requests at the same time")


def from_options(options: argparse.Namespace, *, gpu: bool) -> Workload:
    """Return the workload that the options describe."""
    kind = options.workload
    for name, kinds in _MEANT_FOR.items():
        if getattr(options, name) is not None and kind not in kinds:
            raise GateError(
                f"--{name.replace('_', '-')} is for workload {', '.join(kinds)}, not for {kind}"
            )
    if kind in _MEANT_FOR["trace"] and options.trace is None:
        raise GateError(f"--workload {kind} needs --trace FILE")
    sessions, turns, scale = GPU_DEFAULTS if gpu else CPU_DEFAULTS
    length, output, requests, _ = GPU_LOOP if gpu else CPU_LOOP
    if kind == "agents":
        scale = options.length_scale or scale
        return WorkloadSpec(
            sessions=options.sessions or sessions,
            turns=options.turns or turns,
            length_scale=scale,
            speedup=options.speedup or 1 / scale,
            seed=options.seed,
        )
    if kind == "agents-text":
        return TextSpec(
            trace=options.trace,
            sessions=options.sessions or sessions,
            turns=options.turns or turns,
            speedup=options.speedup or 1.0,
            seed=options.seed,
        )
    if kind == "mooncake":
        scale = options.length_scale or scale
        return MooncakeSpec(
            trace=options.trace,
            requests=options.requests or (GPU_TRACE_REQUESTS if gpu else CPU_TRACE_REQUESTS),
            length_scale=scale,
            speedup=options.speedup or 1 / scale,
            seed=options.seed,
        )
    if kind == "open" and options.rate is None:
        raise GateError("--workload open needs --rate R, in requests per second")
    return LoopSpec(
        input=options.input or length,
        output=options.output or output,
        requests=options.requests or requests,
        rate=options.rate,
        seed=options.seed,
    )


def concurrency(options: argparse.Namespace, workload: Workload, *, gpu: bool) -> int:
    """Return how many sessions may run at a time: as asked for; open loops are bounded by nothing but their size."""
    if options.concurrency:
        asked: int = options.concurrency
        return asked
    if workload.kind == "closed":
        return (GPU_LOOP if gpu else CPU_LOOP)[3]
    return workload.sessions
