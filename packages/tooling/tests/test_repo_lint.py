# SPDX-License-Identifier: Apache-2.0
"""Every rule of the tree, with a fault planted for it in a small checkout that is otherwise clean."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from numinous_tooling import evidence
from numinous_tooling.repo import __main__ as command
from numinous_tooling.repo import lint as rules
from numinous_tooling.repo.checkout import Checkout, RepoError, find_checkout, import_name
from numinous_tooling.repo.lint import FILL, HEADINGS, SPDX, Finding, lint
from numinous_tooling.upstream import table

README = "# a package\n\n" + "".join(f"## {heading}\n\ntext\n\n" for heading in HEADINGS)
MODULE = SPDX + "\n"
# In parts, so that this file keeps the rules that it tests.
WORK, HOME, SCRATCH = ("/" + name + "/x" for name in ("work", "home", "tmp"))
RECORD = dict.fromkeys(evidence.COMMON_FIELDS, "x") | {"package": "scheduler", "op": "burst"}


def record(**fields: object) -> str:
    """A line of evidence; its id is right unless it is given."""
    made = RECORD | fields
    return json.dumps(made | {"id": fields.get("id", evidence.record_id(made))}) + "\n"


R1, R2 = record(n=1), record(n=2)
TABLE = "<!-- evidence: scheduler/burst.jsonl columns=n -->\n| n |\n| --- |\n| 1 |\n| {} |\n<!-- /evidence -->\n"


def write(root: Path, file: str, text: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def add_package(root: Path, folder: str, dependencies: str = '"numinous-tooling>=0.1"') -> None:
    base = f"packages/{folder}"
    project = f'[project]\nname = "numinous-{folder}"\nversion = "0.1.0"\n'
    write(root, f"{base}/pyproject.toml", f"{project}dependencies = [{dependencies}]\n")
    write(root, f"{base}/README.md", README)
    write(root, f"{base}/CHANGELOG.md", "# Changelog\n\n## 0.1.0 (2026-01-01)\n\n- first\n")
    write(root, f"{base}/LICENSE", "licence\n")
    init = f'{MODULE}"""A package."""\n\n__version__ = "0.1.0"\n'
    write(root, f"{base}/src/{import_name(folder)}/__init__.py", init)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "noxfile.py", MODULE)
    write(tmp_path, "LICENSE", "licence\n")
    write(tmp_path, ".ci/run", "#!/bin/sh\n")
    write(tmp_path, "evidence/scheduler/burst.jsonl", R1 + R2)
    write(tmp_path, "evidence/gate/serving.jsonl", record(package="tooling", op="gate_serving"))
    add_package(tmp_path, "tooling", dependencies="")
    add_package(tmp_path, "scheduler")
    add_package(tmp_path, "attention", dependencies="")
    return tmp_path


def findings(root: Path) -> list[Finding]:
    return lint(Checkout(root), ruff=False)


def test_clean_checkout_has_no_findings(root: Path) -> None:
    assert findings(root) == []


@dataclass(frozen=True)
class Fault:
    """Text that is appended to a file (made if need be), and the finding that must follow, alone."""

    rule: str
    file: str
    text: str
    line: int
    name: str


SCHEDULER = "packages/scheduler/src/numinous_scheduler"
TOOLING = "packages/tooling/src/numinous_tooling"

FAULTS = [
    # Where files lie.
    Fault("root-files", "handoff.md", "text\n", 1, "file at the root"),
    Fault("root-files", "scripts/run.sh", "text\n", 1, "folder at the root"),
    Fault("layout", "packages/scheduler/notes.md", "text\n", 1, "file in a package"),
    Fault("layout", "packages/scheduler/scripts/a.sh", "text\n", 1, "folder in a package"),
    Fault("layout", "packages/notes.md", "text\n", 1, "file beside packages"),
    Fault("layout", "packages/scheduler/src/numinous/__init__.py", MODULE, 1, "namespace"),
    Fault("layout", "packages/scheduler/src/numinous_attention/x.py", MODULE, 1, "other's name"),
    Fault("layout", "upstream-fixes/notes.md", "text\n", 1, "file beside the fixes"),
    Fault("layout", "upstream-fixes/vllm/0001-a/header.toml", "", 1, "fixes of no project"),
    Fault("layout", "upstream-fixes/src/numinous/x.py", MODULE, 1, "namespace of the fixes"),
    Fault("file-names", f"{SCHEDULER}/utils.py", MODULE, 1, "drawer module"),
    Fault("file-names", f"{SCHEDULER}/helpers/x.py", MODULE, 1, "drawer folder"),
    Fault("file-names", "packages/scheduler/tests/common.py", MODULE, 1, "drawer in tests"),
    # Every Python file.
    Fault(
        "spdx", "packages/scheduler/tests/test_x.py", '"""Tests."""\n' + MODULE, 1, "second line"
    ),
    Fault("spdx", f"{SCHEDULER}/x.py", "", 1, "empty module"),
    Fault("syntax", f"{SCHEDULER}/x.py", MODULE + "def f(:\n", 2, "no Python"),
    Fault("length", f"{SCHEDULER}/x.py", MODULE + "\n" * 900, 901, "901 lines"),
    Fault("length", f"{SCHEDULER}/csrc/x.cuh", "//\n" * 901, 901, "901 lines of CUDA"),
    # Imports.
    Fault("arrow", f"{SCHEDULER}/kernels/x.py", MODULE + "from ..engine import y\n", 2, "relative"),
    Fault("arrow", f"{SCHEDULER}/engine/x.py", MODULE + "from .. import hooks\n", 2, "package"),
    Fault(
        "arrow", f"{SCHEDULER}/engine/__init__.py", MODULE + "from ..hooks import x\n", 2, "init"
    ),
    Fault(
        "arrow",
        f"{SCHEDULER}/formats.py",
        MODULE + "def f():\n    import numinous_scheduler.kernels.x\n",
        3,
        "in a function",
    ),
    Fault("engine-import", f"{SCHEDULER}/hooks/x.py", MODULE + "import sglang.srt\n", 2, "hook"),
    Fault("engine-import", f"{TOOLING}/patching/x.py", MODULE + "import sglang\n", 2, "tooling"),
    Fault(
        "engine-import",
        f"{SCHEDULER}/kernels/x.py",
        MODULE + "if TYPE_CHECKING:\n    from sglang import srt\n",
        3,
        "for types",
    ),
    Fault("torch-free", f"{SCHEDULER}/hooks/x.py", MODULE + "import torch.nn\n", 2, "hook"),
    Fault(
        "torch-free", f"{SCHEDULER}/features.py", MODULE + "from .kernels import x\n", 2, "kernel"
    ),
    Fault(
        "torch-free",
        f"{SCHEDULER}/hooks/x.py",
        MODULE + "if TYPE_CHECKING:\n    pass\nelse:\n    import torch\n",
        5,
        "else of TYPE_CHECKING",
    ),
    Fault(
        "torch-free",
        f"{SCHEDULER}/hooks/x.py",
        MODULE
        + "class A:\n    try:\n        import torch\n    except ImportError:\n        pass\n",
        4,
        "in a class body",
    ),
    Fault("stdlib-only", f"{TOOLING}/doctor/x.py", MODULE + "from rich import print\n", 2, "extra"),
    Fault("stdlib-only", f"{TOOLING}/repo/x.py", MODULE + "from ..gate import run\n", 2, "gate"),
    Fault("stdlib-only", f"{TOOLING}/__init__.py", "import torch\n", 5, "package"),
    Fault("siblings", f"{SCHEDULER}/x.py", MODULE + "import numinous_attention\n", 2, "topic"),
    Fault(
        "siblings",
        f"{TOOLING}/gate/x.py",
        MODULE + "import numinous_scheduler\n",
        2,
        "from tooling",
    ),
    Fault(
        "siblings",
        "packages/attention/src/numinous_attention/x.py",
        MODULE + "import numinous_tooling\n",
        2,
        "undeclared tooling",
    ),
    # Text.
    Fault("workplace", "docs/a.md", f"see `{WORK}`\n", 1, "in a document"),
    Fault("workplace", f"{SCHEDULER}/x.py", f'{MODULE}PATH = "{HOME}"\n', 2, "in code"),
    Fault("workplace", ".ci/run", f"cd {WORK}\n", 2, "in a script"),
    Fault("workplace", "docs/a.md", f"text\n\n    cd {SCRATCH}\n", 3, "scratch in a document"),
    Fault("fill", "packages/scheduler/README.md", f"{FILL} what is it\n", 27, "document"),
    Fault("fill", f"{SCHEDULER}/x.py", f"{MODULE}# {FILL} what\n", 2, "code"),
    Fault("evidence", "docs/a.md", "see evidence/scheduler/no.jsonl\n", 1, "no file"),
    Fault("evidence", "README.md", "[r3](evidence/scheduler/burst.jsonl#r3)\n", 1, "no record"),
    Fault(
        "evidence",
        f"{SCHEDULER}/hooks/x.py",
        MODULE + 'F = Feature(\n    id="a",\n    evidence=("scheduler/no.jsonl",),\n)\n',
        4,
        "declared",
    ),
    Fault("evidence", "evidence/nosuch/a.jsonl", R1, 1, "folder of no package"),
    Fault("evidence", "evidence/gate/serving.jsonl", R1, 2, "no gate's"),
    Fault("evidence", "evidence/scheduler/notes.md", "text\n", 1, "no record file"),
    Fault("evidence", "evidence/a.jsonl", R1, 1, "under no package"),
    Fault("evidence", "evidence/scheduler/b.jsonl", record(package="tooling"), 1, "other's"),
    Fault("evidence", "evidence/scheduler/burst.jsonl", R1, 3, "twice"),
    Fault("evidence", "evidence/scheduler/burst.jsonl", "{\n", 3, "no JSON"),
    Fault("evidence", "evidence/scheduler/burst.jsonl", "[]\n", 3, "no object"),
    Fault("evidence", "evidence/scheduler/burst.jsonl", record(n=3, id="x-1"), 3, "wrong id"),
    Fault("evidence", "evidence/scheduler/burst.jsonl", record(speedup=2), 3, "ratio alone"),
    Fault("evidence-table", "docs/a.md", TABLE.format(3), 5, "stale"),
    Fault("evidence-table", "docs/a.md", TABLE.format(2)[:-9], 1, "not closed"),
    Fault("evidence-table", "docs/a.md", TABLE.replace("columns", "cols"), 1, "unknown option"),
    # Packages.
    Fault("headings", "packages/scheduler/README.md", "## More\n", 27, "one too many"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.rule}: {fault.name}")
def test_planted_fault_is_found_alone(root: Path, fault: Fault) -> None:
    path = root / fault.file
    write(root, fault.file, (path.read_text() if path.exists() else "") + fault.text)
    assert [(f.file, f.line, f.rule) for f in findings(root)] == [
        (fault.file, fault.line, fault.rule)
    ]


def test_upstream_fixes_are_a_package_with_headers(root: Path) -> None:
    base = "upstream-fixes"
    project = '[project]\nname = "numinous-upstream-fixes"\nversion = "0.1.0"\n'
    write(root, f"{base}/pyproject.toml", f'{project}dependencies = ["numinous-tooling>=0.1"]\n')
    write(root, f"{base}/CHANGELOG.md", "# Changelog\n\n## 0.1.0\n")
    write(root, f"{base}/LICENSE", "licence\n")
    source = f"{base}/src/numinous_upstream_fixes"
    write(root, f"{source}/__init__.py", f'{MODULE}"""Fixes."""\n\n__version__ = "0.1.0"\n')
    (stale,) = findings(root)
    assert str(stale).startswith(f"{base}/README.md:1: upstream: differs from the headers")
    table.write(root / base)
    assert findings(root) == []
    write(root, f"{base}/sglang/0001-a/header.toml", 'project = "fla"\n')
    write(root, f"{source}/x.py", MODULE + "import sglang\n")
    found = [str(one) for one in findings(root)]
    assert f"{source}/x.py:2: engine-import: " in found[-1]
    header = f"{base}/sglang/0001-a/header.toml:1: upstream: "
    assert f"{header}symptom is missing" in found
    assert f"{base}/sglang/0001-a/fix.patch:1: upstream: does not exist" in found


def test_finding_is_one_line_with_its_place() -> None:
    assert str(Finding("a/b.py", 3, "arrow", "text")) == "a/b.py:3: arrow: text"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (f"{SCHEDULER}/engine/x.py", "import sglang, torch\nfrom ..kernels import y\n"),
        (f"{SCHEDULER}/hooks/x.py", "def f():\n    import torch\n    from ..engine import y\n"),
        (f"{SCHEDULER}/hooks/x.py", "if TYPE_CHECKING:\n    import torch\n"),
        (f"{SCHEDULER}/features.py", "from .hooks import x\nimport numinous_tooling.patching\n"),
        (f"{SCHEDULER}/kernels/x.py", "import torch, triton\nfrom ..formats import y\n"),
        (f"{TOOLING}/cli.py", "import typer\n"),
        (f"{TOOLING}/__main__.py", "from .cli import main\n"),
        (f"{TOOLING}/patching/x.py", "import os, tomllib\ndef f():\n    import rich\n"),
        ("packages/scheduler/tests/test_x.py", "import sglang, numinous_attention\n"),
    ],
)
def test_allowed_imports(root: Path, file: str, text: str) -> None:
    write(root, file, MODULE + text)
    assert findings(root) == []


@pytest.mark.parametrize(
    "text",
    [
        f"records: evidence/scheduler/burst.jsonl, evidence/scheduler/burst.jsonl#{json.loads(R2)['id']}.\n",
        "records lie in evidence/<package>/<operation>.jsonl\n",
        TABLE.format(2),
        f"https://example.org{WORK} and some{SCRATCH}\n",
    ],
)
def test_allowed_text(root: Path, text: str) -> None:
    write(root, "docs/a.md", text)
    assert findings(root) == []


def test_heading_out_of_order(root: Path) -> None:
    wrong = README.replace(HEADINGS[1], "X").replace(HEADINGS[2], HEADINGS[1])
    write(root, "packages/scheduler/README.md", wrong)
    (found,) = findings(root)
    assert (found.line, found.rule) == (7, "headings")
    assert f"## {HEADINGS[1]}" in found.text


def test_missing_heading_and_heading_in_a_code_block(root: Path) -> None:
    last = f"## {HEADINGS[-1]}\n"
    write(root, "packages/scheduler/README.md", README.replace(last, f"```\n{last}```\n"))
    (found,) = findings(root)
    assert found.rule == "headings"
    assert found.text == f"`## {HEADINGS[-1]}` is missing"


@pytest.mark.parametrize("file", ["README.md", "CHANGELOG.md", "LICENSE"])
def test_missing_file_of_a_package(root: Path, file: str) -> None:
    (root / "packages/scheduler" / file).unlink()
    (found,) = findings(root)
    assert found.file == f"packages/scheduler/{file}"


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("packages/scheduler/CHANGELOG.md", "## 0.1.0", "## 0.2.0\n\n## 0.1.0"),
        ("packages/scheduler/CHANGELOG.md", "## 0.1.0", "## soon"),
        (f"{SCHEDULER}/__init__.py", "0.1.0", "0.0.9"),
        (f"{SCHEDULER}/__init__.py", "__version__", "VERSION"),
    ],
)
def test_versions_that_differ(root: Path, file: str, old: str, new: str) -> None:
    write(root, file, (root / file).read_text().replace(old, new))
    (found,) = findings(root)
    assert (found.file, found.rule) == (file, "changelog")


def test_changed_licence_of_a_package(root: Path) -> None:
    write(root, "packages/scheduler/LICENSE", "another licence\n")
    assert [found.rule for found in findings(root)] == ["license"]


def test_git_decides_what_belongs_to_the_tree(root: Path) -> None:
    write(root, ".gitignore", "ignored/\n")
    write(root, "ignored/x.py", "")
    write(root, "stray.md", "")
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    assert [found.file for found in findings(root)] == ["stray.md"]
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    (root / "stray.md").unlink()
    assert findings(root) == []


def test_broken_pyproject_is_one_line(root: Path) -> None:
    write(root, "packages/scheduler/pyproject.toml", "[project]\n")
    with pytest.raises(RepoError, match=r"packages/scheduler/pyproject.toml: KeyError\('name'\)"):
        findings(root)


@pytest.mark.skipif(not importlib.util.find_spec("ruff"), reason="ruff comes with nox -s lint")
def test_ruff_findings_are_findings(root: Path) -> None:
    write(root, "packages/scheduler/tests/test_x.py", MODULE + "import os\nx = [1,2]\n")
    found = {(f.file, f.line, f.rule) for f in lint(Checkout(root))}
    file = "packages/scheduler/tests/test_x.py"
    assert {(file, 2, "F401"), (file, 3, "unformatted")} <= found


def test_missing_ruff_says_what_to_run(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rules.importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(root / "packages")
    assert command.main(["lint"]) == 2
    assert "run `nox -s lint`" in capsys.readouterr().err
    assert command.main(["lint", "--no-ruff"]) == 0
    write(root, "stray.md", "")
    assert command.main(["lint", "--no-ruff"]) == 1
    assert capsys.readouterr().out == "stray.md:1: root-files: stray.md has no place at the root\n"


def test_outside_a_checkout(tmp_path: Path) -> None:
    with pytest.raises(RepoError, match="is not inside a checkout"):
        find_checkout(tmp_path)
