# SPDX-License-Identifier: Apache-2.0
"""The rules of the tree: ruff, the import rules of `imports`, and the checks below. Each finding is one line.

`root-files` and `layout` (nothing lies where it does not belong) · `file-names` (no drawer modules) · `spdx` ·
`length` · `syntax` · `workplace` (no paths of somebody's machine) · `fill` (no unanswered question of the template) ·
`headings`, `changelog`, `license` (what each package has) · `evidence` (named records exist, each record is complete) ·
`evidence-table` (tables in documents are those of the records) · `catalog` (rows of kernels hold, their page is fresh) ·
`upstream` (headers, patches and digests of fixes hold, their page is fresh).
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from numinous_tooling import evidence
from numinous_tooling.repo.checkout import OUTSIDE, Checkout, Package, RepoError, import_name
from numinous_tooling.repo.imports import check_imports
from numinous_tooling.upstream import fix_problems, pins, table
from numinous_tooling.upstream.headers import PROJECTS
from numinous_tooling.upstream.series import PINS

SPDX = "# SPDX-License-Identifier: Apache-2.0"
MAX_LINES = 900
COUNTED = (".py", ".cu", ".cuh", ".cpp", ".h", ".hip")
TEXT = (".md", ".py", ".toml", ".txt", ".json", ".jsonl", ".yml", ".yaml", ".sh", "")
DRAWERS = {"utils", "util", "misc", "helpers", "common"}
HEADINGS = (
    "What is in this room",
    "Status table",
    "Try it in one minute (CPU)",
    "Wire it into SGLang 0.5.20",
    "Numbers and their records",
    "What we refuse",
)
ROOT_FILES = {
    "pyproject.toml",
    "conftest.py",
    "noxfile.py",
    "README.md",
    "LICENSE",
    "NOTICE",
    ".gitignore",
}
ROOT_FOLDERS = {
    ".ci",
    "packages",
    "templates",
    "upstream-fixes",
    "negative-results",
    "recipes",
    "evidence",
    "docs",
}
PACKAGE_FILES = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"}
PACKAGE_FOLDERS = {"src", "tests", "benchmarks"}
TEMPLATES = "templates/"
# In two parts, so that this file does not contain it.
FILL = "FILL" + ":"

_WORKPLACE = re.compile(r"(?<![\w.~-])/(?:work|home|Users)/\w+")
_SCRATCH = re.compile(r"(?<![\w.~-])/(?:tmp)/\w+")
# Runs of the gates lie together, whichever room's features they judged.
GATES = "gate"
OF_GATES = "tooling"
_RECORD = re.compile(r"(?<![\w/-])evidence/(?P<file>\w[\w./-]*\w)(?:#(?P<id>[\w.:-]*\w))?")


@dataclass(frozen=True, order=True)
class Finding:
    """A rule that does not hold at a place."""

    file: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.text}"


def lint(checkout: Checkout, ruff: bool = True) -> list[Finding]:
    """Every finding, sorted by place; raises RepoError when ruff is wanted and missing."""
    findings = list(check_ruff(checkout.root)) if ruff else []
    for check in CHECKS:
        findings += check(checkout)
    return sorted(set(findings))


def check_ruff(root: Path) -> Iterator[Finding]:
    """Run `ruff check` and `ruff format --check`."""
    if importlib.util.find_spec("ruff") is None:
        raise RepoError(
            f"ruff is not installed next to {sys.executable}; run `nox -s lint`, or `pip install --group lint`, "
            "or leave it out with --no-ruff"
        )
    for arguments in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *arguments, "--output-format", "concise", "."]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise RepoError(f"ruff {arguments[0]}: {done.stderr.strip() or done.stdout.strip()}")
        for line in done.stdout.splitlines():
            if found := re.match(r"(.+?):(\d+):\d+: ([\w-]+):? (.*)", line):
                advice = "run `ruff format`" if found[3] == "unformatted" else found[4]
                yield Finding(found[1], int(found[2]), found[3], advice)


def check_places(checkout: Checkout) -> Iterator[Finding]:
    """Only the files of the tree plan at the root and in a package; drawers have no name."""
    for file in checkout.files:
        parts = PurePosixPath(file).parts
        if parts[0] not in (ROOT_FOLDERS if len(parts) > 1 else ROOT_FILES):
            yield Finding(file, 1, "root-files", f"{parts[0]} has no place at the root")
        if parts[0] == "packages":
            yield from _check_layout(file, parts)
        elif parts[0] == OUTSIDE and len(parts) > 1:
            yield from _check_outside(file, parts)
        stem = PurePosixPath(file).stem
        drawer = stem if file.endswith(".py") else ""
        for name in {drawer, *parts[:-1]} & DRAWERS:
            yield Finding(file, 1, "file-names", f"{name} says nothing; name it after what it does")


def _check_layout(file: str, parts: tuple[str, ...]) -> Iterator[Finding]:
    if len(parts) < 3:
        yield Finding(file, 1, "layout", "packages/ holds one folder a package")
        return
    if parts[2] not in (PACKAGE_FOLDERS if len(parts) > 3 else PACKAGE_FILES):
        allowed = ", ".join(sorted(PACKAGE_FILES | PACKAGE_FOLDERS))
        yield Finding(
            file, 1, "layout", f"{parts[2]} has no place in a package; it holds {allowed}"
        )
    yield from _check_src(file, parts[1], parts[2:])


def _check_src(file: str, folder: str, parts: tuple[str, ...]) -> Iterator[Finding]:
    module = import_name(folder)
    if parts[0] == "src" and parts[1:2] != (module,):
        # A package `numinous` would hide every other distribution of that name.
        yield Finding(file, 1, "layout", f"src/ holds the import package {module} and nothing else")


def _check_outside(file: str, parts: tuple[str, ...]) -> Iterator[Finding]:
    """Folders of fixes are judged by check_upstream."""
    if len(parts) == 2 and not (parts[1] in PACKAGE_FILES or file.endswith(".py")):
        yield Finding(file, 1, "layout", f"{parts[1]} has no place in {OUTSIDE}/")
    elif len(parts) > 2 and parts[1] not in ("src", *PROJECTS):
        projects = ", ".join(PROJECTS)
        said = f"{parts[1]} is no project; {OUTSIDE}/ holds folders of {projects}"
        yield Finding(file, 1, "layout", said)
    else:
        yield from _check_src(file, OUTSIDE, parts[1:])


def check_python(checkout: Checkout) -> Iterator[Finding]:
    """Licence line, syntax, imports and named evidence of every Python file."""
    for file in checkout.files:
        if not file.endswith(".py"):
            continue
        text = checkout.text(file)
        if text.partition("\n")[0].rstrip() != SPDX:
            yield Finding(file, 1, "spdx", f"the first line is not `{SPDX}`")
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            yield Finding(file, error.lineno or 1, "syntax", error.msg)
            continue
        package = checkout.package_of(file)
        source = f"{package.place}/src/{package.module}/" if package else ""
        if package and file.startswith(source):
            for line, rule, said in check_imports(package, file, tree):
                yield Finding(file, line, rule, said)
            if file != f"{source}catalog.py":  # names records by id; see check_catalog
                yield from _check_declared_evidence(checkout, file, tree)


def _check_declared_evidence(checkout: Checkout, file: str, tree: ast.Module) -> Iterator[Finding]:
    """`evidence=("scheduler/decode_burst.jsonl",)` of a declaration."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.keyword) or node.arg != "evidence":
            continue
        for value in ast.walk(node.value):
            name = value.value if isinstance(value, ast.Constant) else None
            if isinstance(name, str) and (said := _missing_record(checkout, name, None)):
                yield Finding(file, node.value.lineno, "evidence", said)


def check_text(checkout: Checkout) -> Iterator[Finding]:
    """Length, paths of a machine, questions of the template, and records named in documents."""
    for file in checkout.files:
        suffix = PurePosixPath(file).suffix
        if suffix not in (*TEXT, *COUNTED):
            continue
        document = suffix == ".md"
        lines = checkout.text(file).splitlines()
        if suffix in COUNTED and len(lines) > MAX_LINES:
            said = f"{len(lines)} lines; a module has at most {MAX_LINES}, divide it"
            yield Finding(file, MAX_LINES + 1, "length", said)
        for number, line in enumerate(lines, 1):
            found = _WORKPLACE.search(line) or (document and _SCRATCH.search(line))
            if found:
                said = f"{found[0]} exists on somebody's machine only; write a relative path or <folder>"
                yield Finding(file, number, "workplace", said)
            if file.startswith(TEMPLATES):
                continue
            if FILL in line:
                said = f"the template asks: {line.partition(FILL)[2].strip()}"
                yield Finding(file, number, "fill", said)
            if document:
                for record in _RECORD.finditer(line):
                    if missing := _missing_record(checkout, record["file"], record["id"]):
                        yield Finding(file, number, "evidence", missing)


def _missing_record(checkout: Checkout, name: str, record: str | None) -> str | None:
    path = checkout.root / "evidence" / name
    if not path.exists():
        return f"evidence/{name} does not exist"
    if record is None:
        return None
    ids = set()
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            ids.add(json.loads(line).get("id"))
        except ValueError:
            return f"evidence/{name} has a line that is no JSON object"
    return None if record in ids else f"evidence/{name} has no record with the id {record}"


def check_evidence(checkout: Checkout) -> Iterator[Finding]:
    """Every record is complete and lies under its package; every generated table is fresh."""
    for file in checkout.files:
        parts = PurePosixPath(file).parts
        if parts[0] == "evidence":
            folders = (*checkout.packages, GATES)
            if len(parts) != 3 or parts[1] not in folders or not file.endswith(".jsonl"):
                said = (
                    f"evidence/ holds <folder of packages/, or {GATES}>/<op>.jsonl and nothing else"
                )
                yield Finding(file, 1, "evidence", said)
                continue
            yield from _check_records(checkout, file, OF_GATES if parts[1] == GATES else parts[1])
        elif file.endswith(".md") and not file.startswith(TEMPLATES):
            text = checkout.text(file)
            try:
                fresh = evidence.render(text, checkout.root / "evidence")
            except (OSError, ValueError, KeyError) as error:
                yield Finding(file, 1, "evidence-table", str(error))
                continue
            if fresh != text:
                pairs = zip(text.splitlines(), fresh.splitlines(), strict=False)
                line = next((n for n, (a, b) in enumerate(pairs, 1) if a != b), 1)
                said = f"differs from the records; run: python -m numinous_tooling.evidence {file}"
                yield Finding(file, line, "evidence-table", said)


def _check_records(checkout: Checkout, file: str, folder: str) -> Iterator[Finding]:
    seen: dict[str, int] = {}
    for number, line in enumerate(checkout.text(file).splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            yield Finding(file, number, "evidence", f"no JSON: {error}")
            continue
        problems = evidence.problems_of(record)
        if not problems and record["package"] != folder:
            problems = [f"a record of package {record['package']}"]
        if not problems and (first := seen.setdefault(record["id"], number)) != number:
            problems = [f"repeats line {first}"]
        for said in problems:
            yield Finding(file, number, "evidence", said)


def check_packages(checkout: Checkout) -> Iterator[Finding]:
    """What every package has: six headings, a changelog and a version that agree, the licence."""
    for package in checkout.packages.values():
        if package.folder != OUTSIDE:  # its README is a generated table, see check_upstream
            yield from _check_headings(checkout, package)
        yield from _check_version(package)
        own, ours = package.path / "LICENSE", checkout.root / "LICENSE"
        if not own.exists() or own.read_bytes() != ours.read_bytes():
            file = f"{package.place}/LICENSE"
            yield Finding(file, 1, "license", "is no copy of LICENSE; wheels take it from here")


def _check_headings(checkout: Checkout, package: Package) -> Iterator[Finding]:
    file = f"{package.place}/README.md"
    if not (checkout.root / file).exists():
        yield Finding(file, 1, "headings", "does not exist")
        return
    found: list[tuple[int, str]] = []
    fenced = False
    for number, line in enumerate(checkout.text(file).splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if line.startswith("## ") and not fenced:
            found.append((number, line[3:].strip()))
    for (number, heading), wanted in zip(found, HEADINGS, strict=False):
        if heading != wanted:
            said = f"found `## {heading}` where `## {wanted}` belongs"
            yield Finding(file, number, "headings", said)
            return
    if len(found) < len(HEADINGS):
        yield Finding(file, 1, "headings", f"`## {HEADINGS[len(found)]}` is missing")
    elif len(found) > len(HEADINGS):
        number, heading = found[len(HEADINGS)]
        yield Finding(file, number, "headings", f"`## {heading}` is one heading too many")


def _check_version(package: Package) -> Iterator[Finding]:
    file = f"{package.place}/CHANGELOG.md"
    entry = package.changelog_entry()
    if entry is None:
        yield Finding(file, 1, "changelog", f"has no entry `## {package.version}`")
    elif entry[0] != package.version:
        said = f"the top entry is {entry[0]}, pyproject.toml says {package.version}"
        yield Finding(file, entry[2], "changelog", said)
    if package.init_version() != package.version:
        init = f"{package.place}/src/{package.module}/__init__.py"
        said = f"__version__ is {package.init_version()}, pyproject.toml says {package.version}"
        yield Finding(init, 1, "changelog", said)


def check_catalog(checkout: Checkout) -> Iterator[Finding]:
    """The rows of every ``catalog.py``, judged where the checkout's own packages can be imported, and their page."""
    page = (checkout.root / "docs/catalog.md").is_file()
    if not page and not any(
        (p.source / "catalog.py").is_file() for p in checkout.packages.values()
    ):
        return
    tooling = str(Path(evidence.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-B", "-m", "numinous_tooling.catalog", "--check"],
        cwd=checkout.root,
        env={**os.environ, "PYTHONPATH": tooling},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise RepoError(f"catalog: {done.stderr.strip()}")
    found = re.findall(r"^(.+?):(\d+): (catalog): (.*)$", done.stdout, re.MULTILINE)
    if len(found) != len(done.stdout.splitlines()) or bool(found) != bool(done.returncode):
        raise RepoError(f"catalog: {done.stdout.strip() or done.stderr.strip()}")
    for file, line, rule, text in found:
        yield Finding(file, int(line), rule, text)


def check_upstream(checkout: Checkout) -> Iterator[Finding]:
    """Headers, patches and recorded digests of the upstream fixes, and the page made from them."""
    root = checkout.root / OUTSIDE
    if not (root / "pyproject.toml").is_file():
        return
    found = [(file, line) for file, line in fix_problems(root)]
    if not found:
        found = [(PINS, line) for line in pins.stale(root)]
        found += [(table.PAGE, line) for line in table.problems(root)]
    for file, line in found:
        yield Finding(f"{OUTSIDE}/{file}", 1, "upstream", line)


CHECKS: tuple[Callable[[Checkout], Iterator[Finding]], ...] = (
    check_places,
    check_python,
    check_text,
    check_evidence,
    check_packages,
    check_catalog,
    check_upstream,
)
