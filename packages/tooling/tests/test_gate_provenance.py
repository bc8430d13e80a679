# SPDX-License-Identifier: Apache-2.0
"""What a report says about where it came from."""

from __future__ import annotations

import subprocess
import sys
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


def test_versions_say_what_torch_was_built_for(tmp_path: Path) -> None:
    """From the distribution's files alone: importing torch would take seconds."""
    (tmp_path / "torch").mkdir()
    info = tmp_path / "torch-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    texts = {
        "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n": "13.0",
        "cuda: Optional[str] = None\nhip: Optional[str] = '7.1'\n": "hip 7.1",
        "cuda = None\nhip = None\n": None,
    }
    for text, built in texts.items():
        (tmp_path / "torch" / "version.py").write_text(text)
        provenance.versions_of.cache_clear()
        versions = provenance.versions_of(str(python))
        assert versions is not None
        assert (versions["torch"], versions.get("cuda")) == ("9.9", built)


def test_machine_names_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "driver_version", lambda: "580.1")
    assert provenance.machine()["driver"] == "580.1"
