# SPDX-License-Identifier: Apache-2.0
"""One line of the report: how bad, what, the detail, and what to do."""

from __future__ import annotations

from typing import Literal, TypedDict

Level = Literal["ok", "note", "problem", "unknown"]


class Finding(TypedDict):
    """``unknown`` is for a question that was asked and could not be answered; ``note`` never fails a run."""

    level: Level
    what: str
    detail: str
    fix: str


def finding(level: Level, what: str, detail: str = "", fix: str = "") -> Finding:
    """Build a `Finding`; an ``ok`` one needs no fix, every ``problem`` has one."""
    return {"level": level, "what": what, "detail": detail, "fix": fix}


def shortened(items: list[str], limit: int = 8) -> str:
    """Items joined by commas, cut after `limit` with the number of those left out."""
    more = len(items) - limit
    return ", ".join(items[:limit]) + (f" and {more} more" if more > 0 else "")
