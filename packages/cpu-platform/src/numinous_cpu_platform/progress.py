# SPDX-License-Identifier: Apache-2.0
"""A progress line on stderr that also reads well in a log file."""

from __future__ import annotations

import sys
import time
from typing import TextIO

BAR_CELLS = 24
LOG_SECONDS = 10  # without a terminal: at most one line in this time


class Progress:
    """`with Progress("download", total=93e6, unit="MB", scale=1e6) as bar: bar.update(done)`.

    A terminal gets one line that is redrawn; anything else gets a plain line now and then and one at the end.
    """

    def __init__(
        self, title: str, total: float, *, unit: str, scale: float, stream: TextIO | None = None
    ) -> None:
        self.title, self.total, self.unit, self.scale = title, total, unit, scale
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self.done = 0.0
        self.begin = self.shown = time.monotonic()

    def __enter__(self) -> Progress:
        if self.live:
            self._draw()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.done = self.total
            self._draw(seconds=time.monotonic() - self.begin)
        if self.live:
            self.stream.write("\n")
            self.stream.flush()

    def update(self, done: float) -> None:
        """Show that `done` of the total (same unit as `total`) is finished; never goes backwards."""
        self.done = max(self.done, min(done, self.total))
        now = time.monotonic()
        if now - self.shown >= (0.1 if self.live else LOG_SECONDS):
            self.shown = now
            self._draw()

    def _draw(self, seconds: float | None = None) -> None:
        share = self.done / self.total if self.total else 1.0
        amount = f"{self.done / self.scale:.0f}/{self.total / self.scale:.0f} {self.unit}"
        took = "" if seconds is None else f" in {seconds:.1f} s"
        if self.live:
            filled = round(share * BAR_CELLS)
            bar = "#" * filled + "." * (BAR_CELLS - filled)
            self.stream.write(f"\r\x1b[K{self.title} [{bar}] {amount}{took}")
        else:
            self.stream.write(f"{self.title}: {amount} ({share:.0%}){took}\n")
        self.stream.flush()
