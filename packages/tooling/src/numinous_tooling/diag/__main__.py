# SPDX-License-Identifier: Apache-2.0
"""``python -m numinous_tooling.diag``: the same as ``numinous diag``, with the standard library only."""

import sys

from .command import diag

if __name__ == "__main__":
    sys.exit(diag(sys.argv[1:]))
