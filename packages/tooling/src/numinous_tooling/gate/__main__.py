# SPDX-License-Identifier: Apache-2.0
"""Command line of the gates: `python -m numinous_tooling.gate serving | accuracy | kv4 | cliff | compare | record [options]`.

Exit codes: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, bad usage, or no verdict (a server died, the run was interrupted).
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from numinous_tooling.gate import cliff, compare, kv4, record, serving
from numinous_tooling.gate.accuracy import command as accuracy
from numinous_tooling.gate.engaged import CountersReader, read_counters
from numinous_tooling.gate.errors import GateError, Interrupted, ServerFailed
from numinous_tooling.gate.options import bind_flag_values
from numinous_tooling.gate.servers import Interrupts

COMMANDS = {
    "serving": serving,
    "accuracy": accuracy,
    "kv4": kv4,
    "cliff": cliff,
    "compare": compare,
    "record": record,
}


def main(argv: Sequence[str] | None = None, counters_reader: CountersReader = read_counters) -> int:
    """Run the gate; every error that a user can mend ends in one line on stderr and exit code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser().parse_args(bind_flag_values(arguments))
    except SystemExit as stop:  # argparse printed its message; callers of main() want a code
        return int(stop.code or 0)
    # Paths and what servers say may hold what the terminal cannot show.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    interrupts = Interrupts()
    try:
        with interrupts.installed():
            code: int = COMMANDS[options.command].run(
                options, arguments, interrupts, counters_reader
            )
            return code
    except ServerFailed as error:
        lines = [error.tail] if error.tail else []
        print(*lines, f"gate: {error}", "INCONCLUSIVE: no verdict", sep="\n", file=sys.stderr)
    except GateError as error:
        print(f"gate: {error}", file=sys.stderr)
    except OSError as error:  # a full disk, a folder without rights
        print(f"gate: {error}", file=sys.stderr)
    except Interrupted as error:
        print(f"gate: {error}; no server is left running", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="numinous gate", description="Decide by measurement whether a feature may stay on."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS.values():
        command.add_parser(commands)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
