# SPDX-License-Identifier: Apache-2.0
"""What the commands of the gate share: the options that say which servers run, and what they mean."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

from numinous_tooling.gate import provenance
from numinous_tooling.gate.arms import Arm, ArmOptions, build_arms, flag_value
from numinous_tooling.gate.errors import GateError

SERVER_TEMPLATE = (
    "{python} -m sglang.launch_server --model-path {model} --host 127.0.0.1 --port {port}"
)

# Server flags that bound the length of one request, in tokens.
CONTEXT_FLAGS = ("--context-length", "--max-total-tokens")
MAX_DEFAULT_CLIENTS = 4
# Of what a number on the command line may be.
LARGEST = 1e12
BYTE_UNITS = {
    "": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
_BYTES = re.compile(rf"(\d+(?:\.\d*)?(?:e\d{{1,3}})?) ?({'|'.join(BYTE_UNITS)})")
# Names of variables whose values are meant for nobody's eyes.
_SECRET = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY|PRIVATE_KEY)$",
    re.IGNORECASE,
)
FLAG_OPTIONS = ("--flags-all", "--flags-a", "--flags-b", "--arm-c-flags", "--yardstick")


def add_server_options(parser: argparse.ArgumentParser, *, features: str | None) -> None:
    """Add the options that decide which servers are started, and how; `features` is the default of ``--features``."""
    add = parser.add_argument
    add(
        "--features",
        default=features,
        help="feature ids of arm B, comma separated, or none",
    )
    add("--model", help="Hugging Face directory or id; left out: the small CPU model")
    add("--device", choices=("auto", "cpu", "gpu"), default="auto", help="what the servers run on")
    add("--flags-all", default="", metavar="FLAGS", help="server flags of all arms, in one string")
    add("--flags-a", default="", metavar="FLAGS", help="server flags of arm A")
    add("--flags-b", default="", metavar="FLAGS", help="server flags of arm B")
    add(
        "--env-a",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment of arms A and C; it stands in the reports, so no secrets",
    )
    add("--env-b", action="append", default=[], metavar="NAME=VALUE", help="environment of arm B")
    add("--python-a", default=sys.executable, metavar="PYTHON", help="interpreter of arms A and C")
    add("--python-b", default=sys.executable, metavar="PYTHON", help="interpreter of arm B")
    add(
        "--server-command",
        metavar="COMMAND",
        help="instead of launch_server: a command with {python} {model} {port}",
    )
    add("--out", type=Path, help="folder for the report; left out: reports/gate/<utc>")
    add("--json", action="store_true", help="print verdict.json instead of the table")
    add(
        "--port-base",
        type=port,
        help="first port, one more for each server; left out: free ports",
    )
    add(
        "--start-timeout",
        type=ratio,
        default=900.0,
        metavar="S",
        help="seconds a server may take to start",
    )
    add(
        "--stall-timeout",
        type=ratio,
        default=180.0,
        metavar="S",
        help="seconds without a token that count as a hang",
    )
    add(
        "--keep-logs",
        action="store_true",
        help="keep server logs whole, not only beginning and end",
    )
    add("--seed", type=int, default=0, help="chooses sessions and tokens")


def add_clients_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that says over how many client processes a replay is divided."""
    parser.add_argument(
        "--clients",
        type=positive,
        default=default_clients(len(os.sched_getaffinity(0))),
        metavar="N",
        help="client processes that share the requests of a replay; left out: by the cores of this host",
    )


def default_clients(cores: int) -> int:
    """Return how many client processes a host has room for beside the server: a quarter of its cores, 1 to 4."""
    return min(MAX_DEFAULT_CLIENTS, max(1, cores // 4))


def on_gpu(device: str, python: str) -> bool:
    """Return whether servers run on a GPU: as ``--device`` says, or for `auto` where torch of `python` sees one."""
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


def default_model() -> str:
    """Return the folder of the small CPU model, fetched first where it is missing."""
    library = _cpu_platform("numinous_cpu_platform.model")
    try:
        return str(library.ensure_model(None))
    except library.ModelError as error:
        raise GateError(str(error)) from error


def arms_of(
    options: argparse.Namespace,
    features: tuple[str, ...],
    model: str,
    *,
    gpu: bool,
    flags_c: str = "",
) -> dict[str, Arm]:
    """Return the arms that the options of `add_server_options` describe."""
    device_env: dict[str, str] = {}
    device_flags: list[str] = []
    if options.server_command is None and not gpu:
        device_env, device_flags = _cpu_platform().serve_defaults(model)
    return build_arms(
        ArmOptions(
            features=features,
            python_a=options.python_a,
            python_b=options.python_b,
            env_a=_pairs("--env-a", options.env_a),
            env_b=_pairs("--env-b", options.env_b),
            flags_all=words("--flags-all", options.flags_all),
            flags_a=words("--flags-a", options.flags_a),
            flags_b=words("--flags-b", options.flags_b),
            flags_c=words("--arm-c-flags", flags_c),
            device_env=device_env,
            device_flags=tuple(device_flags),
        )
    )


def context_limit(arms: dict[str, Arm]) -> int | None:
    """Return the least number of tokens that the server flags of any arm allow one request; None for no limit."""
    limits = [
        int(value)
        for arm in arms.values()
        for name in CONTEXT_FLAGS
        if (value := flag_value(arm.flags, name) or "").isdecimal()
    ]
    return min(limits, default=None)


def out_folder(options: argparse.Namespace) -> Path:
    """Return the folder of a run's files: as given, or a new one named by the time."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    out: Path = options.out or Path("reports/gate") / stamp
    return out


def server_template(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the words of the server command, placeholders not yet filled."""
    return words("--server-command", options.server_command or SERVER_TEMPLATE)


def show(options: argparse.Namespace, document: Mapping[str, Any], text: str) -> None:
    """Print a finished run: its document with ``--json``, else the text."""
    print(json.dumps(document, indent=1) if options.json else text)


def command_text(arguments: Sequence[str]) -> str:
    """Return the command line that repeats a run."""
    return "python -m numinous_tooling.gate " + shlex.join(arguments)


def _pairs(option: str, values: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not (name and equals):
            raise GateError(f"{option} {value}: write NAME=VALUE")
        if _SECRET.search(name):
            raise GateError(
                f"{option} {name}: looks like a secret, and reports show what is given here; "
                "export it instead, servers inherit the environment"
            )
        pairs[name] = text
    return pairs


def words(option: str, text: str) -> tuple[str, ...]:
    """Split an option's text as a shell would."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise GateError(f"{option} {text!r}: {error}") from error


def bind_flag_values(arguments: Sequence[str]) -> list[str]:
    """Join `--flags-b --some-flag` to `--flags-b=--some-flag`: argparse takes a value with dashes for an option."""
    bound: list[str] = []
    for argument in arguments:
        if bound and bound[-1] in FLAG_OPTIONS:
            bound[-1] = f"{bound[-1]}={argument}"
        else:
            bound.append(argument)
    return bound


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def ratio(text: str) -> float:
    """Parse a positive number or fraction; far beyond `LARGEST` or its inverse nothing can be meant."""
    try:
        # A fraction alone would first compute all digits of 1e999999999.
        value = float(Fraction(text)) if "/" in text else float(text)
    except (ValueError, ZeroDivisionError, OverflowError):
        value = 0.0
    if not 1 / LARGEST <= value <= LARGEST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no positive number or fraction, such as 0.25 or 1/16"
        )
    return value


def not_negative(text: str) -> float:
    """Parse a finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return value


def byte_count(text: str) -> int:
    """Parse a number of bytes, also with a unit: `20GiB`, `1.5e9`."""
    found = _BYTES.fullmatch(text)
    number = float(found[1]) * BYTE_UNITS[found[2] or ""] if found else math.nan
    if not 1 <= number < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of bytes, such as 1.5e9 or 20GiB ({', '.join(filter(None, BYTE_UNITS))})"
        )
    return int(number)


def port(text: str) -> int:
    """Parse a TCP port."""
    number = positive(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port")
    return number
