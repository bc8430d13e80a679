# SPDX-License-Identifier: Apache-2.0
"""What the device can do, measured in the same run and by the same clock as the ops."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch

from numinous_tooling.bench.clocks import Clock

COPY_BYTES = 1 << 30
MATMUL = 8192
CPU_COPY_BYTES = 16 << 20
CPU_MATMUL = 256
NODES = 64
SAMPLES = 9


def measure_roofs(clock: Clock, units: Iterable[str] = ()) -> dict[str, Any]:
    """Medians of `SAMPLES`, after a warm-up that also settles the clocks.

    Args:
        clock: of the device.
        units: of the ops' FLOPs; bf16 and fp8 are always measured, fp32 only if it is among them.

    Returns:
        ``copy_bytes_s``: read plus written bytes per second of an elementwise kernel over ``copy_bytes``, as kernels
        are what it is compared with (a captured ``copy_`` goes to the copy engine, which is slower);
        ``<unit>_flop_s`` of a ``matmul_n``³ product of random data; ``launch_floor_us``: a graph of one one-element
        kernel, timed as an op is; ``node_floor_us``: each of `NODES` such kernels in one graph; ``not_measured``:
        unit -> reason.
    """
    gpu = clock.device.type == "cuda"
    size, n = (COPY_BYTES, MATMUL) if gpu else (CPU_COPY_BYTES, CPU_MATMUL)
    source = torch.empty(size // 4, device=clock.device).normal_()
    target = torch.empty_like(source)
    roof: dict[str, Any] = {"copy_bytes": size, "matmul_n": n, "not_measured": {}}
    for unit in ("bf16", "fp8", *sorted(set(units) - {"bf16", "fp8"})):
        if unit == "fp8" and not gpu:
            roof["not_measured"][unit] = "the CPU has no FP8 units"
            continue
        try:
            roof[f"{unit}_flop_s"] = 2e6 * n**3 / _median(clock, _matmul(unit, n, clock.device))
        except (RuntimeError, ValueError) as error:
            roof["not_measured"][unit] = str(error).partition("\n")[0]
    # After the products, so that the clocks have settled.
    roof["copy_bytes_s"] = 2e6 * size / _median(clock, lambda: torch.add(source, 1.0, out=target))
    one = torch.zeros(1, device=clock.device)
    roof["launch_floor_us"] = _median(clock, lambda: one.add_(1))
    roof["node_floor_us"] = _median(clock, lambda: [one.add_(1) for _ in range(NODES)]) / NODES
    return roof


def _median(clock: Clock, call: Callable[[], Any]) -> float:
    launch = clock.prepare(call)
    for _ in range(3):
        clock.sample(launch)
    return statistics.median(clock.sample(launch) for _ in range(SAMPLES))


def _matmul(unit: str, n: int, device: torch.device) -> Callable[[], Any]:
    dtypes = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32}
    if unit not in dtypes:
        raise ValueError(f"no product is known for {unit}; there are {', '.join(dtypes)}")
    # Random data: a product of zeros draws less power and runs at higher clocks.
    left, right = (torch.randn(n, n, device=device).to(dtypes[unit]) for _ in range(2))
    if unit == "fp8":
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(
            left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        )
    return lambda: left @ right
