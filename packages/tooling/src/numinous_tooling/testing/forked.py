# SPDX-License-Identifier: Apache-2.0
"""Forked processes for tests of what happens between two commands, or when one dies."""

from __future__ import annotations

import os
from collections.abc import Callable


def child(body: Callable[[], object]) -> int:
    """Run in a forked process, which says by its exit status whether `body` returned."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return pid


def exit_status(pid: int) -> int:
    """Wait for a child; negative: the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
