# SPDX-License-Identifier: Apache-2.0
"""What a report says about where it came from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from numinous_tooling.gate import provenance
from numinous_tooling.gate.errors import GateError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_source_state(tmp_path: Path) -> None:
    module = tmp_path / "packages" / "tooling" / "bench"
    module.mkdir(parents=True)
    assert provenance.source_state(module, {}) == {"commit": None, "dirty": None}
    said = provenance.source_state(module, {"NUMINOUS_COMMIT": COMMIT})
    assert said == {"commit": COMMIT, "dirty": False}
    said = provenance.source_state(module, {"NUMINOUS_COMMIT": COMMIT + "-dirty"})
    assert said == {"commit": COMMIT, "dirty": True}
    with pytest.raises(ValueError, match="want 40 hex digits"):
        provenance.source_state(module, {"NUMINOUS_COMMIT": "main"})

    def git(*words: str) -> str:
        names = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        return subprocess.run(
            ["git", *names, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "--quiet")
    (module / "a.py").write_text("")
    git("add", ".")
    git("commit", "--quiet", "-m", "x")
    commit = git("rev-parse", "HEAD")
    # Records that were just written do not make it dirty.
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence" / "a.jsonl").write_text("")
    assert provenance.source_state(module, {}) == {"commit": commit, "dirty": False}
    (module / "a.py").write_text("x = 1\n")
    assert provenance.source_state(module, {}) == {"commit": commit, "dirty": True}
    # A copy's repository may have been left behind: what is said counts.
    environ = {"NUMINOUS_COMMIT": COMMIT}
    assert provenance.source_state(module, environ) == {"commit": COMMIT, "dirty": False}


def test_every_verdict_names_the_commit_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own checkout is what a folder left behind on another host would be."""
    monkeypatch.setenv("NUMINOUS_COMMIT", COMMIT + "-dirty")
    started = provenance.Started()
    monkeypatch.delenv("NUMINOUS_COMMIT")  # what counts is the beginning
    assert started.facts("gate --x")["git"] == {"commit": COMMIT, "dirty": True}


def test_no_run_begins_under_a_commit_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMINOUS_COMMIT", "main")
    with pytest.raises(GateError, match="NUMINOUS_COMMIT is 'main'; want 40 hex digits"):
        provenance.Started()
