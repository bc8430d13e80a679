# SPDX-License-Identifier: Apache-2.0
"""The ways in which a gate run ends without a verdict."""

from __future__ import annotations


class GateError(Exception):
    """The run cannot go on; the message is one line that says what, where and what to do."""


class ServerFailed(GateError):
    """A server died, never became ready or stopped answering; `tail` is the end of its log."""

    def __init__(self, message: str, tail: str) -> None:
        super().__init__(message)
        self.tail = tail


class Interrupted(BaseException):
    """A signal asked the run to end (a BaseException, so that no `except Exception` swallows it)."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(f"interrupted by {signal_name}")
