# SPDX-License-Identifier: Apache-2.0
"""What the tiers did: one line each in the terminal, and counts per tier and architecture as JSON."""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from numinous_tooling.testing.interpreter import reason
from numinous_tooling.testing.tiers import find_device, require_device, selection
from numinous_tooling.workbench import TIERS

SCHEMA = 1
NOT_REACHED = "the session ended before it"


@dataclass
class Entry:
    """One test of a tier: where it is counted, and what became of it."""

    tier: str
    arch: str
    outcome: str = "not_run"
    reason: str = NOT_REACHED


class TierReport:
    """Collects the outcomes of a session."""

    NAME = "numinous-tiers"

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.entries: dict[str, Entry] = {}
        self.others: Counter[str] = Counter()
        self.has_kernels = False
        self.uncollected: dict[str, str] = {}

    def expect(self, node: str, tier: str, arch: str) -> None:
        """Register a collected test."""
        self.entries[node] = Entry(tier, arch)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note, before anything is deselected, whether there are tests of any tier."""
        self.has_kernels = any(item.get_closest_marker("tier") for item in items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note the modules that skip themselves: nobody knows which tiers they have."""
        if report.skipped:
            self.uncollected[report.nodeid] = reason(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note an outcome; a failure in any phase counts, unless pytest-rerunfailures runs the test again."""
        if report.outcome == "rerun":  # type: ignore[comparison-overlap]
            return
        outcome = "not_run" if report.skipped else report.outcome
        entry = self.entries.get(report.nodeid)
        if entry is None:
            if report.when == "call" or not report.passed:
                self.others[outcome] += 1
        elif (report.when == "call" or not report.passed) and entry.outcome != "failed":
            entry.outcome = outcome
            entry.reason = reason(report) if outcome == "not_run" else ""

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the JSON report. Tiers of a package without kernels are no error.

        Where a device is demanded a module that skips itself is one, for it may hold device tests.
        """
        wanted = selection(self.config)
        if (
            session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
            and wanted.tiers_named
            and not self.has_kernels
        ):
            session.exitstatus = pytest.ExitCode.OK
        if (
            session.exitstatus == pytest.ExitCode.OK
            and wanted.tiers_named
            and "device" in wanted.tiers
            and self.uncollected
            and require_device()
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if path := self.config.getoption("report_json"):
            target = Path(self.config.invocation_params.dir, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.as_json(int(session.exitstatus)), indent=2)
            target.write_text(text + "\n", encoding="utf-8")

    def counts(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Tier → architecture → passed, failed, and not run by reason."""
        table: dict[str, dict[str, dict[str, Any]]] = {tier: {} for tier in TIERS}
        for entry in self.entries.values():
            cell = table[entry.tier].setdefault(
                entry.arch, {"passed": 0, "failed": 0, "not_run": {}}
            )
            if entry.outcome == "not_run":
                reasons = cell["not_run"]
                reasons[entry.reason] = reasons.get(entry.reason, 0) + 1
            else:
                cell[entry.outcome] += 1
        return table

    def as_json(self, exit_status: int) -> dict[str, Any]:
        """The whole report; its schema is the keys written here."""
        wanted = selection(self.config)
        device = find_device() if self._tests_of("device") else None
        return {
            "schema": SCHEMA,
            "utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": [str(argument) for argument in self.config.invocation_params.args],
            "exit": exit_status,
            "selected": {
                "tiers": wanted.tiers,
                "archs": wanted.archs if wanted.archs_named else None,
                "full": wanted.full,
            },
            "device": device and vars(device),
            "versions": {"python": platform.python_version(), **_versions()},
            "tiers": self.counts(),
            "without_tier": dict(self.others),
            "not_collected": self.uncollected,
            "tests": [
                {"test": node, **{k: v for k, v in vars(entry).items() if v}}
                for node, entry in self.entries.items()
            ],
        }

    def _tests_of(self, tier: str) -> int:
        return sum(entry.tier == tier for entry in self.entries.values())

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line for each tier, where the session has kernel tests or was asked for tiers."""
        if not (self.entries or self.config.getoption("tier")):
            return
        terminalreporter.section("kernel tiers")
        for tier, row in self.counts().items():
            terminalreporter.write_line(self._line(tier, row))
        for module, why in self.uncollected.items():
            terminalreporter.write_line(f"not collected: {module}: {why.splitlines()[0]}")

    def _line(self, tier: str, row: dict[str, dict[str, Any]]) -> str:
        if not row:
            selected = tier in selection(self.config).tiers
            why = "no such tests here" if selected else "not selected by --tier"
            return f"{tier} tier not run: {why}"
        reasons: Counter[str] = Counter()
        parts = []
        for arch, cell in row.items():
            reasons.update(cell["not_run"])
            done = [f"{cell[what]} {what}" for what in ("passed", "failed") if cell[what]]
            if done:
                parts.append(f"{arch} {', '.join(done)}")
        missing = "; ".join(f"{text.splitlines()[0]} ({n})" for text, n in reasons.items())
        if not parts:
            return f"{tier} tier not run: {missing}"
        return f"{tier} tier: {'; '.join(parts)}" + (f"; not run: {missing}" if missing else "")


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "triton", "numpy"):
        module = sys.modules.get(name)
        if module is not None:
            found[name] = str(getattr(module, "__version__", metadata.version(name)))
    return found
