# SPDX-License-Identifier: Apache-2.0
"""Command line of the gate: `python -m numinous_tooling.gate serving [options]`.

Exit codes: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, bad usage, or no verdict (a server died, the run was interrupted).
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import ModuleType

from numinous_tooling.gate import provenance
from numinous_tooling.gate.arms import (
    ArmOptions,
    build_arms,
    flag_value,
    parse_features,
    parse_order,
)
from numinous_tooling.gate.errors import GateError, Interrupted, ServerFailed
from numinous_tooling.gate.run import CountersReader, GateOptions, read_counters, run_gate
from numinous_tooling.gate.servers import Interrupts
from numinous_tooling.gate.verdict import EXIT_CODES, METRICS
from numinous_tooling.gate.workload import WorkloadSpec, read_model

SERVER_TEMPLATE = (
    "{python} -m sglang.launch_server --model-path {model} --host 127.0.0.1 --port {port}"
)

# Sessions, turns, length scale, worsening allowed. The CPU's are what four server starts and replays on two cores
# take in a few minutes; figures of so small a run move by more than a tenth from run to run.
CPU_DEFAULTS = (4, 4, 1 / 16, 0.30)
GPU_DEFAULTS = (32, 12, 1.0, 0.05)

# Server flags that bound the length of one request, in tokens.
CONTEXT_FLAGS = ("--context-length", "--max-total-tokens")
FLAG_OPTIONS = ("--flags-all", "--flags-a", "--flags-b", "--arm-c-flags")


def main(argv: Sequence[str] | None = None, counters_reader: CountersReader = read_counters) -> int:
    """Run the gate; every error that a user can mend ends in one line on stderr and exit code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser().parse_args(_bind_flag_values(arguments))
    except SystemExit as stop:  # argparse printed its message; callers of main() want a code
        return int(stop.code or 0)
    interrupts = Interrupts()
    try:
        with interrupts.installed():
            return _serving(options, arguments, interrupts, counters_reader)
    except ServerFailed as error:
        print(f"{error.tail}\ngate: {error}\nINCONCLUSIVE: no verdict", file=sys.stderr)
    except GateError as error:
        print(f"gate: {error}", file=sys.stderr)
    except Interrupted as error:
        print(f"gate: {error}; no server is left running", file=sys.stderr)
    return 2


def _serving(
    options: argparse.Namespace,
    arguments: Sequence[str],
    interrupts: Interrupts,
    counters_reader: CountersReader,
) -> int:
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
    on_gpu = _on_gpu(options.device, options.python_a)
    model = options.model or _default_model()
    device_env: dict[str, str] = {}
    device_flags: list[str] = []
    if options.server_command is None and not on_gpu:
        device_env, device_flags = _cpu_platform().serve_defaults(model)
    sessions, turns, scale, tolerance = GPU_DEFAULTS if on_gpu else CPU_DEFAULTS
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
    arms = build_arms(
        ArmOptions(
            features=features,
            python_a=options.python_a,
            python_b=options.python_b,
            env_a=_pairs("--env-a", options.env_a),
            env_b=_pairs("--env-b", options.env_b),
            flags_all=_words("--flags-all", options.flags_all),
            flags_a=_words("--flags-a", options.flags_a),
            flags_b=_words("--flags-b", options.flags_b),
            flags_c=_words("--arm-c-flags", options.arm_c_flags),
            device_env=device_env,
            device_flags=tuple(device_flags),
        )
    )
    limits = [
        int(value)
        for arm in arms.values()
        for name in CONTEXT_FLAGS
        if (value := flag_value(arm.flags, name) or "").isdecimal()
    ]
    out = options.out or Path("reports/gate") / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return GateOptions(
        arms=arms,
        order=order,
        model=read_model(model, min(limits, default=None)),
        workload=spec,
        concurrency=options.concurrency or sessions,
        tolerances=_tolerances(options.tolerance, tolerance, trades),
        trades=trades,
        out=out,
        server_template=_words("--server-command", options.server_command or SERVER_TEMPLATE),
        port_base=options.port_base,
        start_timeout_s=options.start_timeout,
        stall_timeout_s=options.stall_timeout,
        max_lag_s=None if options.max_client_lag is None else options.max_client_lag / 1e3,
        keep_logs=options.keep_logs,
        command="python -m numinous_tooling.gate " + shlex.join(arguments),
    )


def _on_gpu(device: str, python: str) -> bool:
    if device != "auto":
        return device == "gpu"
    return bool(provenance.gpu_names()) and provenance.torch_sees_gpu(python)


def _cpu_platform(module: str = "numinous_cpu_platform") -> ModuleType:
    """Import numinous-cpu-platform, which only runs without a GPU or without --model need."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise GateError(
            "no GPU in use or no --model given, and numinous-cpu-platform is not installed; "
            "pip install numinous-cpu-platform, or give --model and --device gpu"
        ) from error


def _default_model() -> str:
    """Return the folder of the small CPU model, fetched first where it is missing."""
    library = _cpu_platform("numinous_cpu_platform.model")
    try:
        return str(library.ensure_model(None))
    except library.ModelError as error:
        raise GateError(str(error)) from error


def _pairs(option: str, values: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not (name and equals):
            raise GateError(f"{option} {value}: write NAME=VALUE")
        pairs[name] = text
    return pairs


def _words(option: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise GateError(f"{option} {text!r}: {error}") from error


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
    values: Sequence[str], default: float, trades: Mapping[str, float]
) -> dict[str, float]:
    """Parse `--tolerance 0.1` (all metrics) and `--tolerance ttft=0.5` (one); later ones win.

    Where none is given, a trade that a feature declares widens the default of its metric.
    """
    tolerances = {m.name: max(default, trades.get(m.name, 0.0)) for m in METRICS}
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


def _bind_flag_values(arguments: Sequence[str]) -> list[str]:
    """Join `--flags-b --some-flag` to `--flags-b=--some-flag`: argparse takes a value with dashes for an option."""
    bound: list[str] = []
    for argument in arguments:
        if bound and bound[-1] in FLAG_OPTIONS:
            bound[-1] = f"{bound[-1]}={argument}"
        else:
            bound.append(argument)
    return bound


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _ratio(text: str) -> float:
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no positive number or fraction, such as 0.25 or 1/16"
        )
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="numinous gate", description="Decide by measurement whether a feature may stay on."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser(
        "serving",
        help="serve stock and patched in turn, replay recorded agent sessions, judge",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = serving.add_argument
    add(
        "--features",
        default="scheduler.decode_burst",
        help="feature ids of arm B, comma separated, or none",
    )
    add("--model", help="Hugging Face directory or id; left out: the small CPU model")
    add("--device", choices=("auto", "cpu", "gpu"), default="auto", help="what the servers run on")
    add("--sessions", type=_positive, help="recorded sessions; left out: 4 on CPU, 32 on GPU")
    add("--turns", type=_positive, help="calls per session; left out: 4 on CPU, 12 on GPU")
    add(
        "--length-scale",
        type=_ratio,
        help="factor on all token counts; left out: 1/16 on CPU, 1 on GPU",
    )
    add("--speedup", type=_ratio, help="divides tool gaps; left out: 1 / length scale")
    add("--concurrency", type=_positive, help="sessions at the same time; left out: all")
    add("--seed", type=int, default=0, help="chooses sessions and tokens")
    add(
        "--order",
        default="ABBA",
        help="arms in order: A stock, B patched, C stock with --arm-c-flags",
    )
    add("--flags-all", default="", metavar="FLAGS", help="server flags of all arms, in one string")
    add("--flags-a", default="", metavar="FLAGS", help="server flags of arm A")
    add("--flags-b", default="", metavar="FLAGS", help="server flags of arm B")
    add("--arm-c-flags", default="", metavar="FLAGS", help="server flags of arm C; turns arm C on")
    add(
        "--env-a",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment of arms A and C",
    )
    add("--env-b", action="append", default=[], metavar="NAME=VALUE", help="environment of arm B")
    add("--python-a", default=sys.executable, metavar="PYTHON", help="interpreter of arms A and C")
    add("--python-b", default=sys.executable, metavar="PYTHON", help="interpreter of arm B")
    add(
        "--server-command",
        metavar="COMMAND",
        help="instead of launch_server: a command with {python} {model} {port}",
    )
    add(
        "--tolerance",
        action="append",
        default=[],
        metavar="[METRIC=]F",
        help=f"worsening allowed, for all or one of {', '.join(m.name for m in METRICS)}; left out: 0.3 on CPU, 0.05 on GPU",
    )
    add("--out", type=Path, help="folder for the report; left out: reports/gate/<utc>")
    add("--json", action="store_true", help="print verdict.json instead of the table")
    add(
        "--port-base",
        type=_positive,
        help="first port, one more for each server; left out: free ports",
    )
    add(
        "--start-timeout",
        type=float,
        default=900.0,
        metavar="S",
        help="seconds a server may take to start",
    )
    add(
        "--stall-timeout",
        type=float,
        default=180.0,
        metavar="S",
        help="seconds without a token that count as a hang",
    )
    add(
        "--max-client-lag",
        type=float,
        metavar="MS",
        help="limit of the client's p99 lag; left out: from TPOT",
    )
    add(
        "--keep-logs",
        action="store_true",
        help="keep server logs whole, not only beginning and end",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
