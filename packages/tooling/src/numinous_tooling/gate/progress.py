# SPDX-License-Identifier: Apache-2.0
"""Progress of a gate run on stderr: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from typing import Protocol

PLAIN_EVERY_S = 10.0


class Progress(Protocol):
    """What the run reports: one slot per arm run, in it phases and requests."""

    def begin(self, slot: str) -> None:
        """Start the next slot."""

    def phase(self, text: str) -> None:
        """Say what the slot does, besides requests."""

    def requests(self, done: int) -> None:
        """Say how many requests of this slot are done."""

    def end(self, summary: str) -> None:
        """Finish the slot with one line."""

    def close(self) -> None:
        """End the display; safe to call twice."""


class PlainProgress:
    """One line per event, and at most one every `PLAIN_EVERY_S` seconds while something lasts."""

    def __init__(self, slots: int, requests_per_slot: int) -> None:
        self._slots = slots
        self._total = requests_per_slot
        self._index = 0
        self._slot = ""
        self._last_s = 0.0
        self._last_phase = ""

    def begin(self, slot: str) -> None:
        self._index += 1
        self._slot = slot
        self._last_phase = ""

    def phase(self, text: str) -> None:
        # "server starting (12 s)" is the same phase as "server starting (3 s)".
        name = text.split(" (")[0]
        self._say(text, now=name != self._last_phase)
        self._last_phase = name

    def requests(self, done: int) -> None:
        self._say(f"requests {done}/{self._total}", now=done == self._total)

    def end(self, summary: str) -> None:
        self._say(summary, now=True)

    def close(self) -> None:
        pass

    def _say(self, text: str, *, now: bool) -> None:
        if now or time.monotonic() - self._last_s >= PLAIN_EVERY_S:
            self._last_s = time.monotonic()
            print(
                f"[{self._index}/{self._slots}] {self._slot}: {text}", file=sys.stderr, flush=True
            )


class RichProgress:
    """A bar over all requests of the run, with slot and phase beside it."""

    def __init__(self, slots: int, requests_per_slot: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )
        from rich.progress import Progress as Bar

        self._bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("requests"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._slots = slots
        self._total = requests_per_slot
        self._index = 0
        self._slot = ""
        self._task = self._bar.add_task("", total=slots * requests_per_slot)
        self._bar.start()

    def begin(self, slot: str) -> None:
        self._index += 1
        self._slot = slot
        self.phase("")

    def phase(self, text: str) -> None:
        self._bar.update(
            self._task, description=f"[{self._index}/{self._slots}] {self._slot}: {text}"
        )

    def requests(self, done: int) -> None:
        self._bar.update(self._task, completed=(self._index - 1) * self._total + done)

    def end(self, summary: str) -> None:
        self._bar.console.print(
            f"[{self._index}/{self._slots}] {self._slot}: {summary}", markup=False, highlight=False
        )

    def close(self) -> None:
        self._bar.stop()


def open_progress(slots: int, requests_per_slot: int) -> Progress:
    """Return the display that fits stderr."""
    if sys.stderr.isatty():
        try:
            return RichProgress(slots, requests_per_slot)
        except ImportError:
            pass
    return PlainProgress(slots, requests_per_slot)
