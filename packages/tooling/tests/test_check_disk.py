# SPDX-License-Identifier: Apache-2.0
"""Reports on edits and launches with features of the test's own, on a small stand-in for the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from numinous_tooling.patching import check, disk
from numinous_tooling.patching.engine import DirectoryTree
from numinous_tooling.patching.errors import PatchError
from numinous_tooling.patching.feature import Edit, Feature
from numinous_tooling.patching.journal import DiskState
from numinous_tooling.patching.serve_command import ServeCommand

EDIT = Edit("moe.e.01", "srt/things.py", "LIMIT = 8", "MORE = 9")
FEATURE = Feature("moe.e", "A sentence.", (EDIT,), {"sm90": "run"})
FLAG = {"NUMINOUS_MOE_E": "1"}


@pytest.fixture
def tree(fake_engine, monkeypatch) -> DirectoryTree:
    tree = DirectoryTree(fake_engine / "sglang", "0.5.20", installed=True)
    for name in ("find_engine", "installed_engine"):
        monkeypatch.setattr(check, name, lambda *_: tree)
        monkeypatch.setattr(disk, name, lambda *_: tree)
    monkeypatch.setattr(check, "fits", lambda *_: [])  # the stand-in has no functions to pin
    declare(monkeypatch, FEATURE)
    return tree


def declare(monkeypatch, *features: Feature) -> None:
    for module in (check, disk):
        monkeypatch.setattr(module, "installed_features", lambda: list(features))


def reasons(names=("moe.e",), environ=None) -> tuple[list[str], int]:
    report, code = check.check_report(names, environ=environ or {})
    found = [*report["problems"], *(r for row in report["features"] for r in row["reasons"])]
    return [line for line in found if "entry point" not in line], code


def test_anchor_that_matches_nowhere_is_found(tree, monkeypatch):
    assert reasons() == ([], 0)
    declare(monkeypatch, replace(FEATURE, patches=(replace(EDIT, anchor="LIMIT = 7"),)))
    (line,), code = reasons()
    assert code == 1
    assert "the anchor matches nowhere" in line
    declare(monkeypatch, replace(FEATURE, patches=(replace(EDIT, file="srt/no.py"),)))
    assert "has no srt/no.py" in reasons()[0][0]


def test_patch_on_top_of_a_required_feature(tree, monkeypatch):
    upper = Edit("moe.f.01", "srt/things.py", "MORE = 9", "EVEN = 10")
    needs = Feature("moe.f", "A sentence.", (upper,), {}, requires=("moe.e",))
    declare(monkeypatch, FEATURE, needs)
    assert reasons(["moe.f"]) == ([], 0)


def test_older_text_on_disk_does_not_hold(tree, monkeypatch):
    assert disk.apply_report(["moe.e"])[1] == 0
    assert reasons(environ=FLAG)[0] == []
    declare(monkeypatch, replace(FEATURE, patches=(replace(EDIT, insert="MORE = 10"),)))
    line = "moe.e.01 on disk is an older text; run: numinous apply moe.e"
    assert reasons(environ=FLAG) == ([line], 1)
    assert disk.apply_report(["moe.e"])[1] == 0
    assert reasons(environ=FLAG)[0] == []


def test_foreign_file_lost_and_damaged_journal(tree):
    DiskState(tree).apply([FEATURE])
    file, journal = tree.root / "srt/things.py", tree.root.parent / ".numinous/journal.json"
    edited = file.read_text()
    file.write_text(edited + "theirs = 1\n")
    line = "srt/things.py was changed by somebody else after numinous edited it; run: numinous revert --forget"
    assert check.status_report()[0]["problems"] == [line]
    file.write_text(edited)
    text = journal.read_text()
    journal.write_text(text[:40])
    report, code = check.check_report(["moe.e"], environ={})
    assert "is damaged" in " ".join(report["problems"])
    assert code == 2
    assert "is damaged" in check.status_report()[0]["problems"][0]
    journal.unlink()
    (line,) = check.status_report()[0]["problems"]
    assert "srt/things.py holds an edit that no journal knows; reinstall" in line


def test_broken_package_is_undecided(tree, monkeypatch):
    def broken():
        raise PatchError("it cannot be loaded")

    monkeypatch.setattr(check, "installed_features", broken)
    monkeypatch.setattr(disk, "installed_features", broken)
    assert check.features_report()[1] == 2
    report, code = check.check_report(environ={})
    assert (report["problems"], code) == (["it cannot be loaded"], 2)
    assert disk.apply_report(["moe.e"])[1] == 2


def test_forget_goes_with_everything(tree):
    report, code = disk.revert_report(["moe.e"], forget=True)
    assert (report["problems"], code) == (["--forget goes with a revert of everything"], 2)


def test_engine_with_other_declarations_is_undecided(tree):
    report, code = check.check_report(["moe.e"], command=["sglang", "serve", "m"], environ={})
    assert code == 2
    assert "where 0.5.20 does" in report["problems"][0]


@pytest.mark.parametrize(
    ("config", "given", "text"),
    [
        ({"text_config": [1]}, {}, "text_config is not an object"),
        ({"architectures": "X"}, {}, "architectures is not a list"),
        ({"architectures": [["X"]]}, {}, "architectures is not a list"),
        ({"num_attention_heads": "8"}, {"tp_size": 2}, "num_attention_heads is not a whole"),
        ({"num_attention_heads": 8}, {"dp_size": 0, "enable_dp_attention": True}, "at least 1"),
        ({"num_attention_heads": 8}, {"tp_size": 0}, "--tp-size 0 must be at least 1"),
    ],
)
def test_odd_model_and_sizes(tree, config, given, text):
    serve = ServeCommand({"model_path": "m", **given}, model_config={"architectures": [], **config})
    found = check._judge_command(serve, [], tree)["problems"]
    assert any(text in line for line in found), found


def test_package_beside_another_distribution(fake_engine, tmp_path, run_in):
    code = "from numinous_tooling.patching.engine import installed_engine; print(installed_engine().root)"
    assert run_in(fake_engine, code).stdout.strip() == str(fake_engine / "sglang")
    shadow = tmp_path / "shadow"
    (fake_engine / "sglang").rename(tmp_path / "sglang")
    shadow.mkdir()
    (tmp_path / "sglang").rename(shadow / "sglang")
    done = run_in(f"{fake_engine}{os.pathsep}{shadow}", code, expect=1)
    assert f"sglang is imported from {shadow / 'sglang'}" in done.stderr
    assert "fix PYTHONPATH" in done.stderr


def cli(*words: str, expect: int, code: str = "", **environ: str) -> subprocess.CompletedProcess:
    start = ["-c", code] if code else ["-m", "numinous_tooling", *words]
    done = subprocess.run(
        [sys.executable, *start],
        env={**os.environ, **environ},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == expect, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    return done


def test_command_line(tmp_path: Path):
    pytest.importorskip("typer")
    assert b"numinous-tooling " in cli("--version", expect=0).stdout
    assert b"--forget goes" in cli("revert", "--forget", "moe.e", expect=2).stderr
    assert cli("--help", expect=0, PYTHONIOENCODING="ascii").stdout.isascii()
    place = tmp_path / "é"
    for words in (("check", "--json"), ("check",), ("features",)):
        done = cli(
            *words,
            "--engine",
            str(place),
            expect=2 if "check" in words else 0,
            LC_ALL="C",
            PYTHONIOENCODING="ascii",
        )
        if "--json" in words:
            assert json.loads(done.stdout)["problems"]
    missing = "import sys; sys.modules['typer'] = None; import numinous_tooling.cli"
    assert b"pip install 'numinous-tooling[cli]'" in cli(expect=2, code=missing).stderr
