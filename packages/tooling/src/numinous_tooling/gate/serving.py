# SPDX-License-Identifier: Apache-2.0
"""``numinous gate serving``: serve stock and patched in turn, replay the same requests against both, judge."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numinous_tooling.gate import options as shared
from numinous_tooling.gate.arms import parse_features, parse_order
from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.floor import default_folder
from numinous_tooling.gate.measures import METRICS, Metric, judged_metrics, parse_slo
from numinous_tooling.gate.run import CountersReader, GateOptions, run_gate
from numinous_tooling.gate.servers import Interrupts
from numinous_tooling.gate.verdict import EXIT_CODES
from numinous_tooling.gate.workload import WorkloadSpec, read_model

# Sessions, turns, length scale, worsening allowed. The CPU's are what four server starts and replays on two cores
# take in a few minutes; figures of so small a run move by more than a tenth from run to run.
CPU_DEFAULTS = (4, 4, 1 / 16, 0.30)
GPU_DEFAULTS = (32, 12, 1.0, 0.05)


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the gate."""
    serving = commands.add_parser(
        "serving",
        help="serve stock and patched in turn, replay recorded agent sessions, judge",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    shared.add_server_options(serving, features="scheduler.decode_burst")
    add = serving.add_argument
    add("--sessions", type=shared.positive, help="recorded sessions; left out: 4 on CPU, 32 on GPU")
    add("--turns", type=shared.positive, help="calls per session; left out: 4 on CPU, 12 on GPU")
    add(
        "--length-scale",
        type=shared.ratio,
        help="factor on all token counts; left out: 1/16 on CPU, 1 on GPU",
    )
    add("--speedup", type=shared.ratio, help="divides tool gaps; left out: 1 / length scale")
    add("--concurrency", type=shared.positive, help="sessions at the same time; left out: all")
    add(
        "--order",
        default="ABBA",
        help="arms in order: A stock, B patched, C stock with --arm-c-flags",
    )
    add("--arm-c-flags", default="", metavar="FLAGS", help="server flags of arm C; turns arm C on")
    add(
        "--tolerance",
        action="append",
        default=[],
        metavar="[METRIC=]F",
        help=f"worsening allowed, for all or one of {', '.join(m.name for m in METRICS)}; left out: 0.3 on CPU, 0.05 on GPU",
    )
    add(
        "--max-client-lag",
        type=float,
        metavar="MS",
        help="limit of the client's p99 lag; left out: from TPOT",
    )
    add(
        "--slo",
        metavar="LIMITS",
        help="judge goodput too: ttft=F,tpot=F,e2e=F in seconds, any of them",
    )
    add(
        "--price",
        type=shared.ratio,
        metavar="USD_PER_HOUR",
        help="of the server, for the cost per million tokens",
    )
    add(
        "--floor-dir",
        type=Path,
        metavar="DIR",
        help=f"noise floors of A/A runs; left out: {default_folder()}",
    )


def run(
    options: argparse.Namespace,
    arguments: Sequence[str],
    interrupts: Interrupts,
    counters_reader: CountersReader,
) -> int:
    """Run the gate and print its verdict; returns the exit code."""
    gate = _gate_options(options, arguments)
    result = run_gate(gate, interrupts, counters_reader)

    from numinous_tooling.gate.report import (
        terminal_text,
        write_html,
    )  # matplotlib takes a second to import

    write_html(result, gate.out / "report.html")
    if options.json:
        print(json.dumps(result.document, indent=1))
    else:
        print(terminal_text(result, gate.out))
    return EXIT_CODES[result.word]


def _gate_options(options: argparse.Namespace, arguments: Sequence[str]) -> GateOptions:
    features = parse_features(options.features)
    order = parse_order(options.order, with_c=bool(options.arm_c_flags))
    gpu = shared.on_gpu(options.device, options.python_a)
    model = options.model or shared.default_model()
    sessions, turns, scale, tolerance = GPU_DEFAULTS if gpu else CPU_DEFAULTS
    scale = options.length_scale or scale
    sessions = options.sessions or sessions
    spec = WorkloadSpec(
        sessions=sessions,
        turns=options.turns or turns,
        length_scale=scale,
        speedup=options.speedup or 1 / scale,
        seed=options.seed,
    )
    trades = _declared_trades(features)
    arms = shared.arms_of(options, features, model, gpu=gpu, flags_c=options.arm_c_flags)
    slo = None if options.slo is None else parse_slo(options.slo)
    return GateOptions(
        arms=arms,
        order=order,
        model=read_model(model, shared.context_limit(arms)),
        workload=spec,
        concurrency=options.concurrency or sessions,
        tolerances=_tolerances(options.tolerance, tolerance, trades, judged_metrics(slo)),
        trades=trades,
        out=shared.out_folder(options),
        server_template=shared.server_template(options),
        port_base=options.port_base,
        start_timeout_s=options.start_timeout,
        stall_timeout_s=options.stall_timeout,
        max_lag_s=None if options.max_client_lag is None else options.max_client_lag / 1e3,
        keep_logs=options.keep_logs,
        command=shared.command_text(arguments),
        slo=slo,
        price_usd_h=options.price,
        floor_dir=options.floor_dir or default_folder(),
    )


def _declared_trades(features: Sequence[str]) -> dict[str, float]:
    """Return the worsening per metric that the features accept by design, as their declarations say."""
    if not features:
        return {}
    from numinous_tooling.patching.discover import installed_features

    chosen = [feature for feature in installed_features() if feature.id in features]
    return {
        name: max(feature.trades.get(name, 0.0) for feature in chosen)
        for feature in chosen
        for name in feature.trades
    }


def _tolerances(
    values: Sequence[str],
    default: float,
    trades: Mapping[str, float],
    metrics: Sequence[Metric] = METRICS,
) -> dict[str, float]:
    """Parse `--tolerance 0.1` (all metrics) and `--tolerance ttft=0.5` (one); later ones win.

    Where none is given, a trade that a feature declares widens the default of its metric.
    """
    tolerances = {m.name: max(default, trades.get(m.name, 0.0)) for m in metrics}
    for value in values:
        name, equals, text = value.rpartition("=")
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        names = [name] if equals else list(tolerances)
        if number < 0 or not set(names) <= set(tolerances):
            raise GateError(
                f"--tolerance {value}: write F or METRIC=F with F >= 0 and METRIC of {', '.join(tolerances)}"
            )
        tolerances.update(dict.fromkeys(names, number))
    return tolerances
