# SPDX-License-Identifier: Apache-2.0
"""`python -m numinous_tooling.compile`: machine code and budgets of kernels.

check: compile and compare with the budgets; record: write the budgets; diff: print what changed against them, better
or worse; aot: build the binaries that the wheel of a package ships. Without --full at most two binaries of an op and
architecture. Exit codes: 0 holds, 1 does not hold, 2 a compiler is missing or bad usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from numinous_tooling.compile import CompileError, NotAvailable, aot, gate
from numinous_tooling.compile.report import Report, report
from numinous_tooling.workbench import ARCHS, Op
from numinous_tooling.workbench.discover import NoSuchOp, catalogues, declared_ops, load_op


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        if options.command == "aot":
            return _aot(options.names)
        ops = [op for name in options.names or declared_ops() for op in find_ops(name)]
        return _each(options, ops)
    except NotAvailable as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 2
    except (NoSuchOp, ValueError) as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 2
    except CompileError as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 1


def find_ops(name: str) -> list[Op]:
    """The op of a name or of ``module:OP`` (which needs no catalogue), or all ops of a folder of packages/."""
    if ":" in name:
        return [load_op(name)]
    module = f"numinous_{name.replace('-', '_')}.catalog"
    for catalogue in catalogues():
        if catalogue.__name__ == module:
            return [load_op(row.declared) for row in catalogue.KERNELS]
    return [load_op(name)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m numinous_tooling.compile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("check", "record", "diff", "aot"))
    parser.add_argument(
        "names", nargs="*", help="ops, module:OP, or folders of packages/; left out: every op"
    )
    parser.add_argument(
        "--arch", action="append", choices=ARCHS, help="may be repeated; left out: all"
    )
    parser.add_argument("--full", action="store_true", help="every declared binary")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


def _each(options: argparse.Namespace, ops: Sequence[Op]) -> int:
    rows: list[dict[str, Any]] = []
    made: list[Report] = []
    for op in ops:
        recorded: dict[tuple[str, str], Report] = {}
        for arch in options.arch or ARCHS:
            for binary in gate.selected(op, arch, options.full):
                row: dict[str, Any] = {"op": op.name, "binary": binary.name, "arch": arch}
                try:
                    if options.command == "check":
                        result = gate.check(op, binary, arch)
                    else:
                        result = report(op, binary, arch)
                except NotAvailable as error:
                    row |= {"status": "not run", "text": [str(error)]}
                except (AssertionError, CompileError) as error:
                    row |= {"status": "failed", "text": str(error).splitlines()}
                else:
                    made.append(result)
                    recorded[binary.name, arch] = result
                    changes = [*gate.diff(op, binary, arch, result)]
                    row |= {"status": "passed", "text": changes, **_facts(result)}
                rows.append(row)
                if not options.json:
                    print(_line(row, options.command))
        if options.command == "record":
            gate.record(op, recorded)
    if options.json:
        print(json.dumps({"command": options.command, "rows": rows}, indent=1))
    if made:
        print(gate.time_of(made), file=sys.stderr)
    if not rows:
        print(f"{options.command}: nothing is declared for these architectures", file=sys.stderr)
    found = {row["status"] for row in rows}
    return 1 if "failed" in found else 2 if "not run" in found else 0


def _facts(result: Report) -> dict[str, Any]:
    entries = {entry: dataclasses.asdict(values) for entry, values in result.entries.items()}
    return {"target": result.target, "compiler": result.compiler, "entries": entries}


def _line(row: dict[str, Any], command: str) -> str:
    head = f"{row['op']} {row['binary']} {row['arch']}: {row['status']}"
    if row["status"] != "passed":
        return f"{head}: " + "\n".join(row["text"])
    if command == "diff":
        return f"{head[: -len('passed')]}" + ("; ".join(row["text"]) or "as recorded")
    entries = row["entries"].values()
    return (
        f"{head} ({row['target']}): {len(entries)} kernel{'s' * (len(entries) > 1)}, at most "
        f"{max(x['registers'] for x in entries)} registers, {max(x['spills'] for x in entries)} B spills, "
        f"{max(x['static_shared'] + (x['dynamic_shared'] or 0) for x in entries)} B shared"
    )


def _aot(names: Sequence[str]) -> int:
    if not names:
        print("aot: name the folders of packages/ to build", file=sys.stderr)
        return 2
    for name in names:
        ops = find_ops(name)
        for path in aot.build(ops[0].package if ops else name, ops):
            print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
