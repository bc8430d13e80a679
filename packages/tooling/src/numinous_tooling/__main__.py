# SPDX-License-Identifier: Apache-2.0
"""``python -m numinous_tooling`` is the command ``numinous``."""

from .cli import main

main()
