# SPDX-License-Identifier: Apache-2.0
"""Servers that stay up on one GPU, and commands that measure between them: two gates of one stock server need three starts, not eight.

    python packages/tooling/benchmarks/hopper_records/served.py --out FOLDER --model DIR --flags '--attention-backend triton' \
        --server stock= --server glue=attention.gemma_glue -- \
        'numinous gate serving --url-a {stock} --url-b {glue} --state-dir-b {glue_state} --features attention.gemma_glue'

Each ``--server NAME=FEATURE,FEATURE`` (none: stock) is started with the same flags and its own, which may follow a space (``'fp8= --kv-cache-dtype fp8_e4m3'``); all
start at once, so ``--flags`` has to cap the pools: a server sizes its own by what is free. Commands are run by a shell one behind the other when all servers answer, `{NAME}` being a server's URL and `{NAME_state}` its
NUMINOUS_STATE_DIR; the shell's own braces are written twice. A server that is not asked launches no kernel, but its scheduler spins: have a core for each beside the client's.

Exit: the largest exit code of the commands, which all run; 4: a server did not start or ended; 2: bad usage.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import string
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from numinous_tooling.gate.errors import GateError, Interrupted, ServerFailed
from numinous_tooling.gate.servers import Interrupts, Server, free_port
from numinous_tooling.patching.feature import flag_of

SERVER_FAILED = 4


@dataclass(frozen=True)
class Asked:
    """One ``--server``."""

    features: list[str]
    flags: list[str]


def server_of(name: str, asked: Asked, options: argparse.Namespace, port: int) -> Server:
    """One server, not started."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(options.model)]
    if options.server_command:
        command = shlex.split(options.server_command)
    command += ["--port", str(port), *shlex.split(options.flags), *asked.flags]
    env = {key: value for key, value in os.environ.items() if not key.startswith("NUMINOUS_")}
    env["NUMINOUS_STATE_DIR"] = str(options.out / f"state-{name}")
    env |= {flag_of(feature): "1" for feature in asked.features} or {"SGLANG_PLUGINS": "none"}
    return Server(name, command, env, options.out / f"{name}.log", port)


def read_servers(written: list[str]) -> dict[str, Asked]:
    """NAME=FEATURE,FEATURE FLAGS of each; ValueError says what is wrong."""
    servers: dict[str, Asked] = {}
    for one in written:
        name, equals, rest = one.partition("=")
        features, _, flags = rest.partition(" ")
        if not equals or not name.isidentifier() or name in servers:
            raise ValueError(f"--server {one}: want NAME=FEATURE,FEATURE, each name once")
        servers[name] = Asked([f for f in features.split(",") if f], shlex.split(flags))
    return servers


def fill(command: str, servers: dict[str, Server]) -> str:
    """A command with its placeholders; ValueError names one that is none."""
    values = {name: server.url for name, server in servers.items()}
    values |= {f"{n}_state": s.env["NUMINOUS_STATE_DIR"] for n, s in servers.items()}
    for _, name, _, _ in string.Formatter().parse(command):
        if name is not None and name not in values:
            raise ValueError(f"{{{name}}}: no server of that name")
    return command.format(**values)


def run(options: argparse.Namespace) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    servers: dict[str, Server] = {}
    for name, asked in read_servers(options.server).items():
        taken = {server.url.rpartition(":")[2] for server in servers.values()}
        while str(port := free_port()) in taken:
            pass
        servers[name] = server_of(name, asked, options, port)
        Path(servers[name].env["NUMINOUS_STATE_DIR"]).mkdir(exist_ok=True)
    commands = [fill(command, servers) for command in options.commands]
    worst = 0
    with Interrupts().installed() as interrupts, contextlib.ExitStack() as stack:
        for server in servers.values():
            stack.enter_context(server.running(interrupts))
        for name, server in servers.items():
            ready = server.wait_ready(options.start_timeout, lambda elapsed: None)
            print(f"{name}: ready {ready:.0f} s after the one before, {server.url}", flush=True)
        for command in commands:
            print(f"$ {command}", flush=True)
            code = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL).returncode
            print(f"exit {code}", flush=True)
            worst = max(worst, code)
            for server in servers.values():
                server.check_alive()
    return worst


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="logs and state of the servers")
    add("--model", type=Path, required=True)
    add("--flags", default="", help="of all servers, one string; write --flags='--x'")
    add("--server", action="append", required=True, metavar="NAME=FEATURE,FEATURE")
    add("--server-command", help="in place of sglang.launch_server with --model-path")
    add("--start-timeout", type=float, default=400.0)
    add("commands", nargs="+", metavar="COMMAND")
    options = parser.parse_args(argv)
    try:
        return run(options)
    except ServerFailed as failure:
        print(f"{failure.tail}\nserved.py: {failure}", file=sys.stderr)
        return SERVER_FAILED
    except Interrupted as signalled:
        print(f"served.py: {signalled}", file=sys.stderr)
        return SERVER_FAILED
    except (ValueError, GateError) as error:
        print(f"served.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
