# SPDX-License-Identifier: Apache-2.0
"""What stands against a release, one obstacle at a time, in a small git repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from numinous_tooling.repo import __main__ as command
from numinous_tooling.repo.checkout import Checkout, RepoError
from numinous_tooling.repo.release import obstacles

INIT = "src/numinous_scheduler/__init__.py"


def git(root: Path, *arguments: str) -> None:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "packages/scheduler"
    (folder / INIT).parent.mkdir(parents=True)
    (folder / INIT).write_text('__version__ = "1.2.0"\n')
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "numinous-scheduler"\nversion = "1.2.0"\n'
    )
    (folder / "CHANGELOG.md").write_text(
        "# Changelog\n\n## 1.2.0 (2026-11-30)\n\n- new\n\n## 1.1.0\n"
    )
    (tmp_path / "noxfile.py").write_text("")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    return folder


def commit(package: Path, file: str, text: str) -> list[str]:
    (package / file).write_text(text)
    git(package, "commit", "-am", "next")
    return list(obstacles(Checkout(package.parents[1]), "scheduler"))


def test_nothing_in_the_way(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    git(package, "tag", "tooling-v1.2.0")  # another package's
    git(package, "tag", "scheduler-v1.1.0")
    monkeypatch.chdir(package)
    assert command.main(["release-check", "scheduler"]) == 0
    assert capsys.readouterr().out == "scheduler may be released as scheduler-v1.2.0\n"


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        (INIT, '__version__ = "1.1.0"\n', "__version__ is 1.1.0, pyproject.toml says 1.2.0"),
        (INIT, "", "__version__ is None"),
        ("CHANGELOG.md", "## 1.3.0\n", "the top entry of CHANGELOG.md is 1.3.0"),
        ("CHANGELOG.md", "# Changelog\n", "CHANGELOG.md has no entry `## 1.2.0`"),
        ("CHANGELOG.md", "## [1.2.0] Unreleased\n", "CHANGELOG.md line 1 still says unreleased"),
    ],
)
def test_versions_that_differ(package: Path, file: str, text: str, said: str) -> None:
    (line,) = commit(package, file, text)
    assert line.startswith(said)


def test_used_tag_and_changed_tree(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    git(package, "tag", "scheduler-v1.2.0")
    (package / "new.py").write_text("")
    monkeypatch.chdir(package)
    assert command.main(["release-check", "scheduler"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "release-check: scheduler: the tag scheduler-v1.2.0 is used; raise the version",
        "release-check: scheduler: the tree is not clean (1 files, first packages/scheduler/new.py); commit them",
    ]


def test_unknown_package_and_no_repository(package: Path, tmp_path: Path) -> None:
    with pytest.raises(RepoError, match="there is no packages/kitchen; there are scheduler"):
        list(obstacles(Checkout(tmp_path), "kitchen"))
    (tmp_path / ".git").rename(tmp_path / "git")
    with pytest.raises(RepoError, match="not a git repository"):
        list(obstacles(Checkout(tmp_path), "scheduler"))
