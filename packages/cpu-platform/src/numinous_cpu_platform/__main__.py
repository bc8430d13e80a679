# SPDX-License-Identifier: Apache-2.0
"""`python -m numinous_cpu_platform install | doctor | model`. Exit codes: 0 done or fine, 1 not, 2 bad usage."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from numinous_cpu_platform import __version__, doctor, install, model
from numinous_cpu_platform.runner import InstallError


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (InstallError, model.ModelError) as error:
        print(f"numinous_cpu_platform {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            f"numinous_cpu_platform {args.command}: stopped; run it again to go on", file=sys.stderr
        )
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m numinous_cpu_platform", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser(
        "install", help="install SGLang 0.5.20 and what it needs into this environment"
    )
    command.add_argument(
        "--torch",
        choices=install.TORCH_CHOICES,
        default="auto",
        help="which torch build: auto (CPU build where no GPU is), cpu, default, or skip (leave torch alone)",
    )
    command.add_argument(
        "--dry-run", action="store_true", help="say what would be done, do nothing"
    )
    command.set_defaults(run=_install)

    command = commands.add_parser("doctor", help="say what is there and what is missing")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=_doctor)

    command = commands.add_parser(
        "model", help="fetch the default model (SmolLM2-135M-Instruct) and print its folder"
    )
    command.add_argument(
        "--cache", metavar="DIR", help="cache folder (default: see NUMINOUS_CACHE)"
    )
    command.add_argument("--verify", action="store_true", help="hash every file again")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=_model)
    return parser


def _install(args: argparse.Namespace) -> int:
    install.install(args.torch, dry_run=args.dry_run)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    findings = doctor.examine()
    good = all(finding.ok for finding in findings if finding.required)
    if args.json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"ok": good, "findings": rows}, indent=2))
        return 0 if good else 1
    for finding in findings:
        mark = "ok" if finding.ok else ("missing" if finding.required else "later")
        print(f"{mark:<8} {finding.name:<12} {finding.text}")
    return 0 if good else 1


def _model(args: argparse.Namespace) -> int:
    folder = model.ensure_model(cache=args.cache, verify=args.verify)
    if args.json:
        marker = json.loads((model.default_path(args.cache) / model.MARKER).read_text("utf-8"))
        print(json.dumps({"path": str(folder), **marker}, indent=2))
    else:
        print(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
