# SPDX-License-Identifier: Apache-2.0
"""A package made from this repository's template: unanswered questions are its only fault."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from numinous_tooling.repo import __main__ as command
from numinous_tooling.repo.checkout import Checkout, RepoError, find_checkout
from numinous_tooling.repo.lint import FILL, lint
from numinous_tooling.repo.scaffold import new_package

RUFF = importlib.util.find_spec("ruff") is not None
SHARED = ("LICENSE", "noxfile.py", "pyproject.toml")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A checkout with this repository's settings and template, and no package yet."""
    here = find_checkout(Path(__file__).parent).root
    for file in SHARED:
        shutil.copy(here / file, tmp_path)
    shutil.copytree(here / "templates", tmp_path / "templates")
    (tmp_path / "packages").mkdir()
    return Checkout(tmp_path)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    tooling = find_checkout(Path(__file__).parent).root / "packages/tooling/src"
    sources = os.pathsep.join([str(tooling), *map(str, folder.glob("packages/*/src"))])
    environment = {**os.environ, "PYTHONPATH": sources, "MYPYPATH": str(tooling)}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


def answer_questions(package: Path) -> None:
    for path in [path for path in package.rglob("*") if path.is_file()]:
        text = path.read_text()
        path.write_text(re.sub(rf"{FILL} ([^\"\n]*)", r"answered: \1", text))


def test_new_package_lacks_answers_only(checkout: Checkout) -> None:
    package = new_package(checkout, "kv-cache-4bit")
    assert package == checkout.root / "packages/kv-cache-4bit"
    assert (package / "src/numinous_kv_cache_4bit/features.py").is_file()
    findings = lint(checkout, ruff=RUFF)
    assert {finding.rule for finding in findings} == {"fill"}
    files = {finding.file.removeprefix("packages/kv-cache-4bit/") for finding in findings}
    assert {"README.md", "CHANGELOG.md", "pyproject.toml"} < files
    answer_questions(package)
    assert lint(checkout, ruff=RUFF) == []
    assert not re.search(
        "template", "".join(checkout.text(f) for f in checkout.files if "packages" in f)
    )


def test_new_package_passes_its_tests(checkout: Checkout) -> None:
    new_package(checkout, "attention")
    done = run(checkout.root, "pytest", "packages/attention/tests", "-p", "no:cacheprovider")
    assert "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(not importlib.util.find_spec("mypy"), reason="mypy comes with nox -s types")
def test_new_package_passes_types(checkout: Checkout) -> None:
    new_package(checkout, "attention")
    done = run(checkout.root, "mypy", "packages/attention/src")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("Attention", "is no folder name"),
        ("../attention", "is no folder name"),
        ("attention-", "is no folder name"),
        ("cooking", "no word of feature ids belongs to cooking"),
    ],
)
def test_refused_names(checkout: Checkout, folder: str, reason: str) -> None:
    with pytest.raises(RepoError, match=reason):
        new_package(checkout, folder)
    assert list((checkout.root / "packages").iterdir()) == []


def test_existing_package_is_left_alone(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(checkout.root)
    assert command.main(["new-package", "attention"]) == 0
    assert "made packages/attention" in capsys.readouterr().out
    assert command.main(["new-package", "attention"]) == 2
    assert "packages/attention exists" in capsys.readouterr().err
