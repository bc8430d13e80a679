# SPDX-License-Identifier: Apache-2.0
"""Tests of tier ``interpret`` in a process of their own, one for each test module.

Triton decides between compiler and interpreter when a kernel is decorated, so ``TRITON_INTERPRET=1`` must stand in the
environment before the kernel's module is imported. In the session each such test is an `InterpretedItem`; the first
one of a module starts a child pytest on all of the module's, and each reports what the child said about it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from numinous_tooling.testing.tiers import selection

VARIABLE = "TRITON_INTERPRET"
TIMEOUT_S = 900.0
"""Limit of the interpreter process of one test module."""

_TAIL_LINES = 30


def interpreting() -> bool:
    """Whether this process was started for the interpreter, so that its tests run here."""
    return os.environ.get(VARIABLE) == "1"


@dataclass
class Result:
    """What the child says about one test: an outcome, its text, and captured output as (when, name, text)."""

    outcome: str = "started"
    text: str = ""
    sections: list[tuple[str, str, str]] = field(default_factory=list)


class InterpretedFailure(Exception):
    """A failure in the interpreter process, with its whole text."""


class InterpretedItem(pytest.Item):
    """Stands in the session for a test that runs in the interpreter process; uses no fixture here."""

    test: pytest.Item

    @classmethod
    def standing_for(cls, test: pytest.Item) -> InterpretedItem:
        """The stand-in of a collected test, with its node id."""
        parent = test.parent
        assert parent is not None  # only the session itself has none
        item: InterpretedItem = cls.from_parent(parent, name=test.name)
        item.test = test
        # The child judges an expected failure.
        item.own_markers.extend(mark for mark in test.own_markers if mark.name != "xfail")
        return item

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """The place of the test."""
        return self.test.reportinfo()

    def runtest(self) -> None:
        """Report what the child said, starting it if this is the first test of its module."""
        if importlib.util.find_spec("triton") is None:
            pytest.skip("triton is not installed")
        result = _results(self)[self.nodeid]
        for when, name, text in result.sections:
            self.add_report_section(when, name, text)
        if result.outcome == "skipped":
            pytest.skip(result.text)
        if result.outcome != "passed":
            raise InterpretedFailure(result.text)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The child's own text."""
        if isinstance(excinfo.value, InterpretedFailure):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)


_RESULTS = pytest.StashKey[dict[Path, dict[str, Result]]]()


def _results(item: InterpretedItem) -> dict[str, Result]:
    known = item.session.stash.setdefault(_RESULTS, {})
    if item.path not in known:
        nodes = [
            other.nodeid
            for other in item.session.items
            if isinstance(other, InterpretedItem) and other.path == item.path
        ]
        known[item.path] = _run(item.config, nodes)
    return known[item.path]


def _run(config: pytest.Config, nodes: Sequence[str]) -> dict[str, Result]:
    """Run the tests in a child; every one of them has a final result afterwards."""
    with tempfile.TemporaryDirectory(prefix="numinous-interpreter-") as scratch:
        stream, arguments = Path(scratch, "results.jsonl"), Path(scratch, "arguments")
        # By file: thousands of ids do not fit into a command line.
        arguments.write_text("".join(f"{config.rootpath / node}\n" for node in nodes))
        stream.touch()
        child = [sys.executable, "-m", "pytest", *_same_settings(config)]
        if config.pluginmanager.has_plugin("cacheprovider"):  # the option is that plugin's
            child += ["-o", f"cache_dir={scratch}/cache"]
        child += ["--interpreted-results", str(stream)]
        end, output = _wait([*child, f"@{arguments}"], config)
        results = _read(stream)
    tail = "\n".join(output.splitlines()[-_TAIL_LINES:])
    for node in nodes:
        result = results.setdefault(node, Result("absent"))
        if result.outcome in ("started", "absent"):
            place = "in" if result.outcome == "started" else "before"
            result.text = f"the interpreter process {end} {place} this test; it said last:\n{tail}"
            result.outcome = "failed"
    return results


def _same_settings(config: pytest.Config) -> list[str]:
    settings = ["--rootdir", str(config.rootpath)]
    if config.inipath:
        settings += ["-c", str(config.inipath)]
    for flag, values in (
        ("-p", config.option.plugins),
        ("-o", config.option.override_ini),
        ("-W", config.known_args_namespace.pythonwarnings),
    ):
        for value in values or ():
            settings += [flag, value]
    if selection(config).full:
        settings.append("--full")
    return [*settings, "-p", "numinous_tooling.testing.plugin"]


def _wait(command: Sequence[str], config: pytest.Config) -> tuple[str, str]:
    """How the child ended, and what it printed."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    environ[VARIABLE] = "1"
    environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    # The same on a machine with a GPU as on one without; and its tensors are small, threads only cost.
    environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=config.invocation_params.dir,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return f"was stopped after {TIMEOUT_S:.0f} s", (late.stdout or b"").decode(errors="replace")
    how = f"ended with exit code {done.returncode}"
    if done.returncode < 0:
        how = f"was killed by {signal.Signals(-done.returncode).name}"
    return how, done.stdout.decode(errors="replace")


def _read(stream: Path) -> dict[str, Result]:
    results: dict[str, Result] = {}
    for line in stream.read_text(encoding="utf-8").splitlines():
        said = json.loads(line)
        result = results.setdefault(said["node"], Result())
        # A failure in setup or teardown outweighs what the call said.
        if result.outcome != "failed" and said["outcome"] != "started":
            result.outcome, result.text = said["outcome"], said["text"]
        result.sections = [tuple(section) for section in said["sections"]] or result.sections
    return results


def patch_language_once() -> None:
    """In the child: a kernel puts its stand-ins into ``triton.language`` once, and not again at every function that it calls.

    Triton 3.6 looks through the whole language at each call of a device function and finds all stand-ins there: a third of
    the time of a kernel that calls many. Another Triton, which may keep them otherwise, is left alone.
    """
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        return
    patch = getattr(interpreter, "_patch_lang", None)
    if patch is None or not hasattr(interpreter, "_LangPatchScope"):
        return
    in_place: set[ModuleType] = set()

    def patch_once(function: Any) -> Any:
        seen = {x for x in function.__globals__.values() if x is language or x is language.core}
        if seen and seen <= in_place:
            return interpreter._LangPatchScope()
        outermost = not in_place
        scope = patch(function)
        in_place.update(seen)
        if outermost:  # the kernel; what a device function adds, Triton itself leaves in place
            restore = scope.restore

            def restore_all() -> None:
                in_place.clear()
                restore()

            scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_once


class ResultStream:
    """In the child: writes each result as soon as it is there, so that a crash loses no earlier one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note which test a crash belongs to."""
        self._write(nodeid, "started", "", [])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the call, and what else did not pass."""
        if report.when == "call" or not report.passed:
            sections = [
                (report.when, title.removeprefix("Captured ").partition(" ")[0], text)
                for title, text in report.sections
            ]
            self._write(report.nodeid, report.outcome, reason(report), sections)

    def _write(self, node: str, outcome: str, text: str, sections: list[Any]) -> None:
        line = {"node": node, "outcome": outcome, "text": text, "sections": sections}
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test was skipped, or the text of its failure."""
    if hasattr(report, "wasxfail"):
        return f"expected failure: {report.wasxfail}"
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return report.longreprtext
