# SPDX-License-Identifier: Apache-2.0
"""`python -m numinous_tooling.repo`. Exit codes: 0 holds, 1 does not hold, 2 could not be decided or bad usage."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from numinous_tooling.repo.build import build
from numinous_tooling.repo.checkout import RepoError, find_checkout
from numinous_tooling.repo.lint import FILL, lint
from numinous_tooling.repo.release import obstacles, tag_of
from numinous_tooling.repo.scaffold import new_package


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command on the checkout around the current folder; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except RepoError as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 1 if options.command == "build" else 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m numinous_tooling.repo", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("lint", help="judge the tree by its rules")
    command.add_argument("--no-ruff", action="store_true", help="leave ruff out")
    command.set_defaults(run=_lint)
    command = commands.add_parser("release-check", help="say what stands against a release")
    command.add_argument("folder", help="folder of packages/")
    command.set_defaults(run=_release_check)
    command = commands.add_parser(
        "build", help="build packages and load them in a clean environment"
    )
    command.add_argument("folders", nargs="*", help="folders of packages/; left out: all")
    command.set_defaults(run=_build)
    command = commands.add_parser("new-package", help="start packages/<folder> from the template")
    command.add_argument("folder")
    command.set_defaults(run=_new_package)
    return parser


def _lint(options: argparse.Namespace) -> int:
    findings = lint(find_checkout(), ruff=not options.no_ruff)
    for finding in findings:
        print(finding)
    print(f"lint: {len(findings)} findings", file=sys.stderr)
    return 1 if findings else 0


def _release_check(options: argparse.Namespace) -> int:
    checkout = find_checkout()
    found = list(obstacles(checkout, options.folder))
    for line in found:
        print(f"release-check: {options.folder}: {line}", file=sys.stderr)
    if not found:
        print(f"{options.folder} may be released as {tag_of(checkout.package(options.folder))}")
    return 1 if found else 0


def _build(options: argparse.Namespace) -> int:
    checkout = find_checkout()
    for path in build(checkout, options.folders):
        print(path.relative_to(checkout.root))
    return 0


def _new_package(options: argparse.Namespace) -> int:
    checkout = find_checkout()
    made = new_package(checkout, options.folder).relative_to(checkout.root)
    print(f"made {made}; answer each line that says {FILL} (nox -s lint lists them)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
