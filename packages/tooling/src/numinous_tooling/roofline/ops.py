# SPDX-License-Identifier: Apache-2.0
"""The floor of one kernel: its own byte and FLOP model (`Op.traffic`) against each GPU."""

from __future__ import annotations

from typing import Any

from numinous_tooling.workbench import Op, case_id

from . import RooflineError
from .gpus import UNITS, Gpu


def report(op: Op, gpus: list[Gpu]) -> dict[str, Any]:
    """Bytes, FLOPs, FLOPs per byte and floor time of each bench case.

    Returns:
        ``op``, ``package``, ``word`` and ``cases``: id, bytes, flops, unit, intensity, and by GPU the floor in
        microseconds and what bounds it. A unit without a matrix rate (fp32) is held against bytes only, and says so.
    """
    cases = []
    for case in op.cases if op.bench_cases is None else op.bench_cases:
        traffic = op.traffic(case)
        if traffic.bytes <= 0 or traffic.flops < 0:
            raise RooflineError(
                f"op {op.name}, case {case_id(case)}: traffic gives {traffic.bytes} bytes and {traffic.flops} FLOPs; "
                "what has no floor stays out of bench_cases"
            )
        floors = {}
        for gpu in gpus:
            bytes_ = traffic.bytes / gpu.bytes_per_second
            flops = traffic.flops / gpu.rate(traffic.unit) if traffic.unit in UNITS else 0.0
            floors[gpu.name] = {
                "floor_us": max(bytes_, flops) * 1e6,
                "bound": "bytes" if bytes_ >= flops else "FLOPs",
            }
        cases.append(
            {
                "case": case_id(case),
                "bytes": traffic.bytes,
                "flops": traffic.flops,
                "unit": traffic.unit,
                "flops_counted": traffic.unit in UNITS,
                "intensity": traffic.flops / traffic.bytes,
                "gpus": floors,
            }
        )
    return {"op": op.name, "package": op.package, "word": "derived", "cases": cases}
