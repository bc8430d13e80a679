# SPDX-License-Identifier: Apache-2.0
"""The progress displays: plain lines without a terminal, a bar on one."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("rich")

from numinous_tooling.gate.progress import PlainProgress, RichProgress, open_progress


def use(progress: PlainProgress | RichProgress) -> None:
    progress.begin("A1 stock")
    progress.phase("server starting (0 s)")
    progress.phase("server starting (1 s)")
    progress.requests(1)
    progress.requests(2)
    progress.end("done [bold]")
    progress.close()
    progress.close()


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    use(PlainProgress(4, 2))
    # Neither a second of waiting nor a single request is worth a line.
    assert capsys.readouterr().err.splitlines() == [
        "[1/4] A1 stock: server starting (0 s)",
        "[1/4] A1 stock: requests 2/2",
        "[1/4] A1 stock: done [bold]",
    ]


def test_bar(capsys: pytest.CaptureFixture[str]) -> None:
    use(RichProgress(4, 2))
    assert "[1/4] A1 stock: done [bold]" in capsys.readouterr().err


def test_display_follows_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_progress(1, 1), PlainProgress)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = open_progress(1, 1)
    progress.close()
    assert isinstance(progress, RichProgress)
