# SPDX-License-Identifier: Apache-2.0
"""``python -m numinous_tooling.roofline TARGET``: the same as ``numinous roofline``, with the standard library only."""

import sys

from .command import roofline

if __name__ == "__main__":
    sys.exit(roofline(sys.argv[1:]))
