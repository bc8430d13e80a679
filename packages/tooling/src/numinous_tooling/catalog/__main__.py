# SPDX-License-Identifier: Apache-2.0
"""``python -m numinous_tooling.catalog [--check | --write]``: judge the catalogues of the checkout around the current folder.

Exit codes: 0 every row holds and the page is fresh (or was written), 1 not, 2 no checkout or bad usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from numinous_tooling.catalog import page
from numinous_tooling.repo.checkout import RepoError, find_checkout


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m numinous_tooling.catalog",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true", help="judge rows and page (the default)")
    choice.add_argument("--write", action="store_true", help=f"write {page.PAGE} if all rows hold")
    options = parser.parse_args(argv)
    try:
        checkout = find_checkout()
        page.use_sources(checkout)
        faults = page.write(checkout) if options.write else page.check(checkout)
    except RepoError as error:
        print(f"catalog: {error}", file=sys.stderr)
        return 2
    for fault in faults:
        print(fault)
    print(f"catalog: {len(faults)} findings", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
