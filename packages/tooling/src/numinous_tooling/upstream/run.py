# SPDX-License-Identifier: Apache-2.0
"""Run every reproduction on the released and on the patched package, each time in a process of its own.

A fix is *reproduced* if at least one test fails on the released package for the reason that the bug is, and every
test passes on the patched one. An ``ImportError``, a fixture that cannot be made or a skipped test proves nothing,
and makes the result red.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numinous_tooling.patching.errors import PatchError

from . import trees
from .headers import PORTS, Fix

REPRODUCED, BY_READING = "reproduced", "by reading"
NOT_REPRODUCED, NOT_FIXED = "not reproduced", "not fixed"
BROKEN_PATCH, BROKEN_TEST, NOT_RUN = "broken patch", "broken test", "not run"
GREEN = (REPRODUCED, BY_READING)

SUSPECT = {
    "CollectionError",
    "FileNotFoundError",
    "ImportError",
    "LookupError",
    "ModuleNotFoundError",
    "NameError",
    "SyntaxError",
    "crash",
    "timeout",
}
"""Ways to fail that are seldom the bug; a header that means one of them names it in ``fails_with``."""

TIMEOUT_S = 120
CPU = "cpu"
_KIND = re.compile(r"([A-Za-z_][\w.]*)(?::|$)")


@dataclass(frozen=True)
class Test:
    """Result of one test function."""

    outcome: str  # passed, failed, error, skipped
    kind: str = ""  # last name of the exception
    message: str = ""


@dataclass(frozen=True)
class Outcome:
    """Result of one pytest process; `died` says how it ended where it could not report."""

    tests: Mapping[str, Test]
    died: str = ""
    message: str = ""
    seconds: float = 0.0

    def failed(self) -> dict[str, str]:
        """test -> kind of failure."""
        found = {name: test.kind for name, test in self.tests.items() if test.outcome == "failed"}
        return {**found, "(process)": self.died} if self.died else found

    def unusable(self, allowed: Iterable[str]) -> str:
        """Why it proves nothing, or an empty text."""
        for name, test in self.tests.items():
            if test.outcome in ("error", "skipped"):
                return f"{name}: {test.outcome}: {test.message}"
        for name, kind in self.failed().items():
            if kind in SUSPECT and kind not in allowed:
                message = self.tests[name].message if name in self.tests else self.message
                return f"{name}: {kind}: {message}"
        if not self.tests and not self.died:
            return "no test was collected"
        return ""


def run_test(
    fix: Fix,
    tree: Path,
    scratch: Path,
    timeout_s: float = TIMEOUT_S,
    python: str = sys.executable,
    device: str = CPU,
) -> Outcome:
    """One pytest process on one tree.

    Args:
        fix: with a test.
        tree: folder that holds the package; first on the import path of the process.
        scratch: an empty folder of its own.
        timeout_s: after which the process group is killed.
        python: interpreter that has what the package needs.
        device: where its kernels run.
    """
    assert fix.test is not None
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "pytest.ini").write_text("[pytest]\n", encoding="ascii")
    report = scratch / "report.xml"
    command = [python, "-m", "pytest", str(fix.test), "-c", str(scratch / "pytest.ini")]
    command += [f"--rootdir={scratch}", "--import-mode=importlib", "--noconftest", "-q"]
    command += ["-p", "no:cacheprovider", "--tb=short", f"--junitxml={report}"]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("NUMINOUS_", "PYTEST_", "SGLANG_", "PYTHON", "TRITON_"))
    }
    # Behind the tree: where packages lie on that path only, the engine's own needs are found nowhere else.
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(tree), str(fix.path.parents[1]), *given]),
        "UPSTREAM_TREE": str(tree),
        "UPSTREAM_DEVICE": device,
        # Plugins of the environment must not decide; two processes on two cores must not fight for them.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OMP_NUM_THREADS": "1",
    }
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=scratch,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    died = ""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        died = "timeout"
    lines = [line for line in output.splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    if not died and (process.returncode not in (0, 1, 2, 5) or not report.is_file()):
        died = "crash"
        last = f"exit {process.returncode}: {last}"
    return Outcome(
        _tests(report) if report.is_file() else {}, died, last, round(time.monotonic() - start, 1)
    )


def verdict(fix: Fix, released: Outcome, patched: Outcome) -> tuple[str, str]:
    """One of the words above, and the reason in one line."""
    allowed = fix.header.get("fails_with", ())
    if line := released.unusable(allowed):
        return BROKEN_TEST, f"on the released package: {line}"
    failed = released.failed()
    if not failed:
        return NOT_REPRODUCED, f"all {len(released.tests)} tests pass on the released package"
    if bad := patched.failed():
        name, kind = next(iter(bad.items()))
        said = patched.tests[name].message if name in patched.tests else patched.message
        return NOT_FIXED, f"on the patched package: {name}: {kind}: {said}"
    if line := patched.unusable(()):
        return BROKEN_TEST, f"on the patched package: {line}"
    if not released.died and released.tests.keys() != patched.tests.keys():
        return BROKEN_TEST, "the two packages do not run the same tests"
    kinds = ", ".join(sorted(set(failed.values())))
    return REPRODUCED, f"{len(failed)} of {len(patched.tests)} fail on the released one ({kinds})"


def run(
    fixes: Sequence[Fix],
    given: Mapping[str, Path],
    newest: Mapping[str, Path] | None = None,
    jobs: int = 2,
    timeout_s: float = TIMEOUT_S,
    together: bool = False,
    device: str = CPU,
    say: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Judge fixes; returns the report.

    Args:
        fixes: in order.
        given: project -> wheel or folder of the released package; else what is installed.
        newest: project -> wheel or folder of its newest release, for information.
        jobs: processes at a time.
        timeout_s: of one process.
        together: also run every test on the tree with all fixes of the project in place.
        device: where the kernels of the tests run.
        say: is given each row when it is there.

    Returns:
        ``released`` and ``newest`` (project -> version), ``device``, ``fixes`` (rows), ``together`` (project -> problem or None:
        all fixes of a project in order), ``problems`` (lines), ``counts`` (verdict -> number), ``holds``.
    """
    with tempfile.TemporaryDirectory(prefix="numinous-upstream-") as temporary:
        scratch = Path(temporary).resolve()
        projects = list(dict.fromkeys(fix.project for fix in fixes))
        bases = {project: _base(project, given.get(project), scratch) for project in projects}
        news = {
            project: _base(project, path, scratch / "newest")
            for project, path in (newest or {}).items()
            if project in projects
        }
        whole = {
            project: _whole([fix for fix in fixes if fix.project == project], base, scratch)
            for project, base in bases.items()
        }

        def judge(fix: Fix) -> dict[str, Any]:
            place = scratch / fix.name
            row = _row(fix, bases[fix.project], place, timeout_s, device)
            tree, _ = whole[fix.project]
            if together and tree and fix.test and row["verdict"] == REPRODUCED:
                outcome = run_test(fix, tree, place / "together", timeout_s, device=device)
                if bad := outcome.failed():
                    row |= {"verdict": NOT_FIXED, "reason": f"with all fixes in place: {bad}"}
            if fix.project in news:
                known = row.get("released", {})
                row["newest"] = _newest_row(fix, news[fix.project], known, place, timeout_s, device)
            say(row)
            return row

        with ThreadPoolExecutor(jobs) as pool:
            rows = list(pool.map(judge, fixes))
    problems = [line for _, line in whole.values() if line]
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
    return {
        "released": {project: base.version for project, base in bases.items()},
        "newest": {project: base.version for project, base in news.items()},
        "device": device,
        "fixes": rows,
        "problems": problems,
        "counts": counts,
        "holds": not problems and all(row["verdict"] in GREEN for row in rows),
    }


@dataclass(frozen=True)
class _Base:
    """A released package that may be missing."""

    tree: Path | None
    version: str = ""
    problem: str = ""


def _base(project: str, given: Path | None, scratch: Path) -> _Base:
    scratch.mkdir(exist_ok=True)
    try:
        source, version = trees.released(project, given, scratch)
        return _Base(trees.copy_of(project, source, scratch / f"tree-{project}"), version)
    except PatchError as error:
        return _Base(None, problem=str(error))


def _whole(fixes: Sequence[Fix], base: _Base, scratch: Path) -> tuple[Path | None, str]:
    """The tree with all fixes of a project in order, and what is wrong with them together."""
    if base.tree is None:
        return None, ""
    try:
        return trees.patched(fixes, base.tree, scratch / f"whole-{fixes[0].project}"), ""
    except PatchError as error:
        return None, f"in order: {error}"


def _row(fix: Fix, base: _Base, place: Path, timeout_s: float, device: str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": fix.id,
        "name": fix.name,
        "evidence": fix.header["evidence"],
        "verdict": NOT_RUN,
        "reason": base.problem,
        "seconds": 0.0,
    }
    if base.tree is None:
        return row
    if base.version != fix.header["version"]:
        reason = f"is against {fix.header['version']} and this is {base.version}"
        return {**row, "reason": reason}
    released = None
    if fix.test:
        released = run_test(fix, base.tree, place / "released", timeout_s, device=device)
    try:
        tree = trees.patched([fix], base.tree, place / "tree")
    except PatchError as error:
        return {**row, "verdict": BROKEN_PATCH, "reason": str(error)}
    if released is None:
        return {**row, "verdict": BY_READING, "reason": "the patch applies; no reproduction"}
    patched = run_test(fix, tree, place / "patched", timeout_s, device=device)
    word, reason = verdict(fix, released, patched)
    return {
        **row,
        "verdict": word,
        "reason": reason,
        "seconds": round(released.seconds + patched.seconds, 1),
        "released": released.failed(),
        "tests": len(patched.tests),
    }


def _newest_row(
    fix: Fix, base: _Base, known: Mapping[str, str], place: Path, timeout_s: float, device: str
) -> dict[str, Any]:
    """State in the newest release; whether the patch applies there; the port.

    Still: a test fails in the way in which it fails on the released package (`known`). Fixed: all of those pass. A test
    that fails in another way may have lost what it calls, and leaves it undecided.
    """
    if base.tree is None:
        return {"state": "undecided", "reason": base.problem}
    row: dict[str, Any] = {"state": "undecided", "reason": "no reproduction", "patch": "applies"}
    if fix.test:
        outcome = run_test(fix, base.tree, place / "newest", timeout_s, device=device)
        failed = outcome.failed()
        if same := [name for name, kind in known.items() if failed.get(name) == kind]:
            row |= {"state": "still", "reason": f"{len(same)} of {len(known)} fail as before"}
        elif known and all(
            name in outcome.tests and outcome.tests[name].outcome == "passed" for name in known
        ):
            row |= {"state": "fixed", "reason": "they pass"}
        else:
            others = [f"{name}: {kind}" for name, kind in failed.items()]
            row["reason"] = outcome.unusable(()) or ", ".join(others) or outcome.message
    port = fix.path / PORTS / f"{base.version}.patch"
    for name, patch in (("patch", fix.patch), ("port", port)):
        if not patch.is_file():
            continue
        tree = trees.copy_of(fix.project, base.tree, place / f"newest-{name}")
        try:
            trees.apply(fix, patch, tree)
        except PatchError as error:
            row[name] = f"does not apply: {error}"
            continue
        row[name] = "applies"
        if name == "port" and fix.test:
            outcome = run_test(fix, tree, place / "port", timeout_s, device=device)
            bad = outcome.unusable(()) or ", ".join(outcome.failed())
            row[name] = f"applies, and fails: {bad}" if bad else "applies and passes"
    said = fix.header["newest"]
    # "changed": another text with the same bug.
    fits = {"still": ("still", "changed"), "fixed": ("fixed",), "undecided": (said["state"],)}
    if said["version"] == base.version and said["state"] not in fits[row["state"]]:
        row["header"] = f"header.toml says {said['state']}"
    return row


def _tests(report: Path) -> dict[str, Test]:
    try:
        root = ElementTree.parse(report).getroot()
    except ElementTree.ParseError:
        return {}
    found = {}
    for case in root.iter("testcase"):
        name = case.get("name") or "?"
        test = Test("passed")
        for word, outcome in (("error", "error"), ("failure", "failed"), ("skipped", "skipped")):
            node = case.find(word)
            if node is not None:
                message = " ".join((node.get("message") or "").split())
                detail = (node.text or "").strip().splitlines()
                if outcome == "error" and detail:
                    message += ": " + detail[-1].strip()
                test = Test(outcome, _kind(message), message[:300])
                break
        found[name] = test
    return found


def _kind(message: str) -> str:
    if message.startswith("assert "):
        return "AssertionError"
    match = _KIND.match(message)
    return match[1].rpartition(".")[2] if match else "AssertionError"
