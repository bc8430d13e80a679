# SPDX-License-Identifier: Apache-2.0
"""``numinous gate serving``: serve stock and patched in turn, replay the same requests against both, judge.

Instead of starting servers it can use two that run already (``--url-a``, ``--url-b``), of any make.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numinous_tooling.gate import options as shared
from numinous_tooling.gate import workload_options as workloads
from numinous_tooling.gate.apis import bearer
from numinous_tooling.gate.arms import attached_arms, parse_features, parse_order
from numinous_tooling.gate.engaged import CountersReader
from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.floor import default_folder
from numinous_tooling.gate.measures import METRICS, Metric, judged_metrics, parse_slo
from numinous_tooling.gate.plan import ModelFacts, Workload
from numinous_tooling.gate.run import GateOptions, run_gate
from numinous_tooling.gate.servers import Interrupts, served_model
from numinous_tooling.gate.verdict import EXIT_CODES
from numinous_tooling.gate.workload import read_model
from numinous_tooling.gate.workload_traces import MooncakeSpec

DEFAULT_FEATURES = "scheduler.decode_burst"

# Worsening allowed; figures of the short runs on a CPU move by more than a tenth from run to run.
CPU_TOLERANCE = 0.30
GPU_TOLERANCE = 0.05

# Without it SGLang's OpenAI interface says nothing of cached tokens.
OPENAI_SERVER_FLAGS = ("--enable-cache-report",)

# Left out unless given; they say how a server is started.
OWN_SERVER_OPTIONS = (
    "flags_all",
    "flags_a",
    "flags_b",
    "arm_c_flags",
    "env_a",
    "env_b",
    "server_command",
    "port_base",
    "keep_logs",
)


# Of the machine's cores, by which the load of other programs may differ between arms.
UNEVEN_LOAD_SHARE = 0.1


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the gate."""
    serving = commands.add_parser(
        "serving",
        help="serve stock and patched in turn, replay recorded agent sessions, judge",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    # No default: attached servers have none, and what is left out must be told from what is asked for.
    shared.add_server_options(serving, features=None)
    workloads.add_options(serving)
    add = serving.add_argument
    add("--url-a", metavar="URL", help="server of arm A that runs already; nothing is started")
    add("--url-b", metavar="URL", help="server of arm B that runs already")
    add(
        "--api-key-env",
        metavar="NAME",
        help="variable whose value both attached servers get as bearer token; it is written nowhere",
    )
    add("--state-dir-b", metavar="DIR", help="NUMINOUS_STATE_DIR of the server at --url-b")
    add(
        "--api",
        choices=("sglang", "openai"),
        help="interface; left out: sglang (/generate) for own servers, openai for attached ones",
    )
    add(
        "--prompts",
        choices=("auto", "ids", "text", "chat"),
        help="how token counts are sent; left out: ids, and text where an OpenAI server takes no ids",
    )
    add(
        "--free-lengths",
        action="store_true",
        help="let answers end by themselves: no ignore_eos, no min_tokens, which OpenAI itself does not know",
    )
    add(
        "--no-flush",
        action="store_true",
        help="never flush attached servers; tokens are then fresh in every run",
    )
    add(
        "--dp-pin",
        action="store_true",
        help="pin each session to the data-parallel rank that its name picks",
    )
    add(
        "--resume",
        type=Path,
        metavar="OUT",
        help="go on with the aborted run in this folder, under the same options",
    )
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
    shared.add_clients_option(serving)
    add(
        "--max-client-lag",
        type=shared.not_negative,
        metavar="MS",
        help="limit of the client's p99 lag; left out: from TPOT",
    )
    add(
        "--max-uneven-load",
        type=float,
        metavar="CORES",
        help="by how much the load of other programs may differ between arms; left out: a tenth of the cores",
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

    write_html(result, gate.out)
    shared.show(options, result.document, terminal_text(result, gate.out))
    return EXIT_CODES[result.word]


def _gate_options(options: argparse.Namespace, arguments: Sequence[str]) -> GateOptions:
    attached = _attached(options)
    features = parse_features(options.features or ("none" if attached else DEFAULT_FEATURES))
    order = parse_order(options.order, with_c=bool(options.arm_c_flags))
    api, prompts = _interface(options, attached=attached)
    gpu = options.device != "cpu" if attached else shared.on_gpu(options.device, options.python_a)
    tolerance = GPU_TOLERANCE if gpu else CPU_TOLERANCE
    workload = workloads.from_options(options, gpu=gpu)
    trades = _declared_trades(features)
    if attached:
        arms = attached_arms(options.url_a, options.url_b, features, options.state_dir_b)
        model = _attached_model(options, needs_words=not workload.is_text)
    else:
        name = options.model or shared.default_model()
        arms = shared.arms_of(options, features, name, gpu=gpu, flags_c=options.arm_c_flags)
        if api == "openai":
            arms = {
                letter: replace(arm, flags=(*OPENAI_SERVER_FLAGS, *arm.flags))
                for letter, arm in arms.items()
            }
        model = read_model(name, shared.context_limit(arms))
    if prompts in ("text", "chat") and not workload.is_text and not model.words:
        raise GateError(
            f"--prompts {prompts}: {model.path} has no tokenizer.json with words that are one token each; use --prompts ids"
        )
    slo = None if options.slo is None else parse_slo(options.slo)
    return GateOptions(
        arms=arms,
        order=order,
        model=model,
        workload=workload,
        concurrency=workloads.concurrency(options, workload, gpu=gpu),
        clients=options.clients,
        tolerances=_tolerances(options.tolerance, tolerance, trades, judged_metrics(slo)),
        trades=trades,
        out=options.resume or shared.out_folder(options),
        server_template=shared.server_template(options),
        port_base=options.port_base,
        start_timeout_s=options.start_timeout,
        stall_timeout_s=options.stall_timeout,
        max_lag_s=None if options.max_client_lag is None else options.max_client_lag / 1e3,
        max_uneven_cores=_uneven_cores(options.max_uneven_load),
        keep_logs=options.keep_logs,
        command=shared.command_text(arguments),
        api=api,
        prompts=prompts,
        exact=not (options.free_lengths or workload.is_text),
        dp_pin=options.dp_pin,
        flush="never"
        if options.no_flush
        else "try"
        if api == "openai" and not attached
        else "must",
        resume=options.resume is not None,
        notes=tuple(_notes(options, workload, model, attached=attached)),
        slo=slo,
        price_usd_h=options.price,
        api_key_env=options.api_key_env,
        floor_dir=options.floor_dir or default_folder(),
    )


def _attached(options: argparse.Namespace) -> bool:
    """Return whether both arms are servers that run already; refuse options that do not go with that."""
    if (options.url_a is None) != (options.url_b is None):
        raise GateError("--url-a and --url-b go together: give both, or neither to start servers")
    attached = options.url_a is not None
    if attached:
        given = [name for name in OWN_SERVER_OPTIONS if getattr(options, name)]
        given += [
            name for name in ("python_a", "python_b") if getattr(options, name) != sys.executable
        ]
        why = "is for servers that the gate starts, not for --url-a and --url-b"
    else:
        given = [
            name for name in ("no_flush", "state_dir_b", "api_key_env") if getattr(options, name)
        ]
        why = "is for servers attached with --url-a and --url-b"
    if given:
        raise GateError(f"--{given[0].replace('_', '-')} {why}")
    if options.api_key_env is not None:
        key = os.environ.get(options.api_key_env, "")
        if not (key and key.isascii() and key.isprintable()):
            raise GateError(f"--api-key-env {options.api_key_env}: no variable that holds a key")
    if options.no_flush and options.resume is not None:
        raise GateError(
            "--resume: with --no-flush the server would find the broken slot's prompts in its cache; start anew"
        )
    if options.no_flush and options.url_a.rstrip("/") == options.url_b.rstrip("/"):
        raise GateError(
            "--no-flush: both arms are one server, so the second would find the first one's prompts in its cache"
        )
    if options.resume is not None and options.out is not None:
        raise GateError("--out and --resume name two folders; give one")
    return attached


def _interface(options: argparse.Namespace, *, attached: bool) -> tuple[str, str]:
    """Return the interface, and how prompts are sent through it."""
    text = options.workload == "agents-text"
    if text:
        for name in ("api", "prompts"):
            if getattr(options, name) not in (None, {"api": "openai", "prompts": "chat"}[name]):
                raise GateError(
                    f"--{name} {getattr(options, name)}: texts are replayed through chat of the OpenAI interface"
                )
        return "openai", "chat"
    api = options.api or ("openai" if attached else "sglang")
    if api == "openai":
        return api, options.prompts or "auto"
    if options.prompts not in (None, "ids"):
        raise GateError(f"--prompts {options.prompts} needs --api openai; /generate is sent ids")
    return api, "ids"


def _attached_model(options: argparse.Namespace, *, needs_words: bool) -> ModelFacts:
    """Return what is known of the attached servers' model: `--model`, or what server A serves."""
    headers = bearer(options.api_key_env)
    served = [served_model(url, headers) for url in (options.url_a, options.url_b)]
    limits = [limit for model in served if isinstance(limit := model.get("max_model_len"), int)]
    limit = min(limits, default=None)
    name = options.model or str(served[0].get("root") or served[0].get("id") or "")
    if not name:
        raise GateError(
            f"--url-a {options.url_a}: /v1/models names no model; start the server, correct the URL, or give --model"
        )
    if not needs_words and limit is not None:
        return ModelFacts(name, limit, ())
    return read_model(name, limit)


def _notes(
    options: argparse.Namespace, workload: Workload, model: ModelFacts, *, attached: bool
) -> list[str]:
    """Return what a reader of the verdict must know of how the run was set up."""
    notes = []
    if attached and options.state_dir_b is None:
        notes.append(
            "servers were attached: no feature counters were read, nothing shows what ran in B"
        )
    if options.no_flush:
        notes.append("caches were not flushed (--no-flush); the tokens of this run are its own")
    if options.free_lengths or workload.is_text:
        notes.append(
            "answers end by themselves: arms may differ in length, and short ones are no errors"
        )
    return notes + (workload.notes(model) if isinstance(workload, MooncakeSpec) else [])


def _uneven_cores(given: float | None) -> float:
    if given is None:
        return UNEVEN_LOAD_SHARE * len(os.sched_getaffinity(0))
    if not 0 <= given < math.inf:
        raise GateError(f"--max-uneven-load {given:g}: write a number of cores, 0 or more")
    return given


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
        if not 0 <= number < math.inf or not set(names) <= set(tolerances):
            raise GateError(
                f"--tolerance {value}: write F or METRIC=F with F >= 0 and METRIC of {', '.join(tolerances)}"
            )
        tolerances.update(dict.fromkeys(names, number))
    return tolerances
