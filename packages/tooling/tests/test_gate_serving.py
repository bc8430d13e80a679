# SPDX-License-Identifier: Apache-2.0
"""Whole gate runs against a fake server: verdicts, dying and hanging servers, bad answers, signals.

Planted slow-downs are large and tolerances wide, so that a loaded machine cannot change a verdict; the statistics
themselves are tested in test_gate_verdict.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

pytest.importorskip("httpx")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from numinous_tooling.gate.__main__ import main

FAKE = Path(__file__).with_name("gate_fake_server.py")
FEATURE = "scheduler.decode_burst"


def fake_counters(state_dir: Path) -> dict[str, dict[str, int]]:
    """Read what the fake server wrote for its feature."""
    file = state_dir / "totals.json"
    return json.loads(file.read_text()) if file.exists() else {}


@dataclass
class Bench:
    """A folder with a model that has only a config, and the arguments of a short run."""

    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def notes(self) -> Path:
        return self.folder / "notes"

    def arguments(self, *extra: str) -> list[str]:
        command = f"{{python}} {FAKE} --port {{port}} --notes {self.notes}"
        return [
            "serving",
            *(
                "--server-command",
                command,
                "--model",
                str(self.folder / "model"),
                "--device",
                "cpu",
            ),
            *("--sessions", "2", "--turns", "2", "--length-scale", "1/64", "--speedup", "500"),
            *("--max-client-lag", "60000", "--out", str(self.out)),
            *extra,
        ]

    def run(self, *extra: str) -> int:
        return main(self.arguments(*extra), counters_reader=fake_counters)

    def verdict(self) -> dict:
        return json.loads((self.out / "verdict.json").read_text())

    def server_pids(self) -> list[int]:
        return [int(line) for line in (self.notes / "pids").read_text().split()]


def running(pids: list[int]) -> list[int]:
    """Return those of `pids` that still run (zombies do not)."""
    alive = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.append(pid)
        except psutil.NoSuchProcess:
            pass
    return alive


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("NUMINOUS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    config = {"max_position_embeddings": 4096, "vocab_size": 4000}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "notes").mkdir()
    bench = Bench(tmp_path)
    yield bench
    if (bench.notes / "pids").exists():
        assert running(bench.server_pids()) == [], "the gate left servers behind"


def test_equal_arms_pass(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("--tolerance", "20") == 0
    verdict = bench.verdict()
    assert verdict["verdict"] == "PASS"
    assert verdict["length_scale"] == 1 / 64
    assert [run["run"] for run in verdict["runs"]] == ["A1", "B1", "B2", "A2"]
    for arm in "AB":
        pooled = verdict["arms"][arm]["figures"]["pooled"]
        assert (pooled["requests"], pooled["errors"], pooled["short_answers"]) == (8, 0, 0)
        # The second turn of a session repeats the first one's prompt.
        assert pooled["cache_hit_rate"] > 0.2
    assert verdict["arms"]["B"]["figures"]["counters"][FEATURE]["engaged"] == 8
    assert verdict["arms"]["A"]["figures"]["counters"] == {}

    records = [json.loads(line) for line in (bench.out / "records.jsonl").read_text().splitlines()]
    assert len(records) == 16
    assert all(record["got_tokens"] == record["expected_tokens"] for record in records)
    page = (bench.out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "http://" not in page.replace("http://127.0.0.1", "")

    # Arms of a repeat got the same requests, repeats did not.
    a1, b1, b2, a2 = (
        sorted((bench.notes / f"requests-{pid}.jsonl").read_text().splitlines())
        for pid in bench.server_pids()
    )
    assert a1 == b1
    assert a2 == b2
    warmups = set(a1) & set(a2)
    assert all(json.loads(line)[1]["max_new_tokens"] == 4 for line in warmups)
    assert len(set(a1) - warmups) == 4

    captured = capsys.readouterr()
    assert "PASS at length scale 1/64" in captured.out
    assert "[4/4] A2 stock: requests 4/4" in captured.err


def test_stock_arm_has_no_feature_and_patched_arm_no_whitelist(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMINOUS_SCHEDULER_DECODE_BURST", "1")
    monkeypatch.setenv("SGLANG_PLUGINS", "somebody-else")
    bench.run("--order", "BA")
    stock = json.loads((bench.notes / "environment.json").read_text())
    assert stock["SGLANG_PLUGINS"] == "numinous-none"
    assert [name for name in stock if name.startswith("NUMINOUS_")] == ["NUMINOUS_STATE_DIR"]
    bench.run("--order", "AB", "--env-b", "NUMINOUS_STRICT=0")
    patched = json.loads((bench.notes / "environment.json").read_text())
    assert "SGLANG_PLUGINS" not in patched
    assert patched["NUMINOUS_SCHEDULER_DECODE_BURST"] == "1"
    assert patched["NUMINOUS_STRICT"] == "0"


def test_planted_slow_down_fails(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("--flags-b", "--slow 40", "--tolerance", "0.5") == 1
    verdict = bench.verdict()
    assert verdict["verdict"] == "FAIL"
    words = {m["metric"]: m["word"] for m in verdict["comparisons"][0]["metrics"]}
    assert words["tpot"] == "FAIL"
    assert "worse than the tolerance" in capsys.readouterr().out


def test_one_repeat_is_inconclusive(bench: Bench) -> None:
    assert bench.run("--order", "AB") == 2
    assert bench.verdict()["verdict"] == "INCONCLUSIVE"


def test_third_arm_is_compared_too(bench: Bench) -> None:
    assert bench.run("--order", "ABCAB", "--arm-c-flags", "--slow 20", "--tolerance", "20") == 0
    comparisons = {c["test"] + c["base"]: c for c in bench.verdict()["comparisons"]}
    assert set(comparisons) == {"BA", "CA", "BC"}
    # C's own slow-down is C's, and does not touch the verdict of B.
    tpot = {m["metric"]: m for m in comparisons["CA"]["metrics"]}["tpot"]
    assert tpot["change"] > 1


def test_feature_that_never_ran_fails(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("--order", "AB", "--flags-b", "--never-engage") == 1
    assert f"B1: {FEATURE} never ran" in capsys.readouterr().out


def test_counters_in_a_stock_arm_are_inconclusive(bench: Bench) -> None:
    assert bench.run("--order", "AB", "--flags-a", "--always-engage") == 2
    assert "A1 is stock but shows counters" in bench.verdict()["reasons"][0]


def test_stock_against_stock_needs_no_counters(bench: Bench) -> None:
    assert bench.run("--tolerance", "20", "--features", "none") == 0


def test_lagging_client_is_inconclusive(bench: Bench) -> None:
    assert bench.run("--order", "AB", "--max-client-lag", "0.000001") == 2
    assert "the client lagged" in bench.verdict()["reasons"][0]


def test_cache_that_is_not_empty_is_inconclusive(bench: Bench) -> None:
    assert bench.run("--order", "AB", "--flags-b", "--dirty-cache") == 2
    assert "B1: the cache was not empty" in bench.verdict()["reasons"][0]


# Requests 1 to 4 are the warm-up (2 requests, twice), 5 to 8 the measured ones.
@pytest.mark.parametrize(
    ("fault", "error", "short"),
    [
        ("--error-at 6", "HTTP 500", 0),
        ("--break-at 5", "", 0),
        ("--nonsense-at 5", "not an answer of /generate", 0),
        ("--short-at 5", None, 1),
    ],
)
def test_bad_answers_are_counted_and_fail(
    bench: Bench, fault: str, error: str | None, short: int
) -> None:
    assert bench.run("--order", "AB", "--flags-b", fault) == 1
    verdict = bench.verdict()
    pooled = verdict["arms"]["B"]["figures"]["pooled"]
    assert pooled["requests"] == 4
    assert pooled["short_answers"] == short
    assert pooled["errors"] == (1 if error is not None else 0)
    assert "arm B has 1 failed or short answers, arm A 0" in verdict["reasons"][0]
    if error is not None:
        records = (bench.out / "records.jsonl").read_text().splitlines()
        assert any(error in (json.loads(line)["error"] or "") for line in records)


def test_bad_answers_of_stock_are_inconclusive(bench: Bench) -> None:
    assert bench.run("--order", "AB", "--flags-a", "--error-at 6") == 2
    assert bench.verdict()["reasons"] == ["1 failed or short answers in arm A"]


def test_server_that_dies_at_start(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("--flags-b", "--die-at-start") == 2
    error = capsys.readouterr().err
    assert "server B1 ended with exit code 3" in error
    assert "line 59" in error
    assert "line 20\n" in error
    assert "line 19\n" not in error  # 40 lines, no more
    assert bench.verdict()["verdict"] == "INCONCLUSIVE"
    assert bench.verdict()["server_log_tail"][-1] == "line 59"
    # What arm A measured before is not lost.
    assert len((bench.out / "records.jsonl").read_text().splitlines()) == 4


def test_server_that_is_never_ready(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("--flags-all", "--never-ready --with-child", "--start-timeout", "1") == 2
    assert "was not ready after 1 s (--start-timeout)" in capsys.readouterr().err


def test_server_that_dies_in_the_middle(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("--flags-b", "--die-after 5 --with-child") == 2
    error = capsys.readouterr().err
    assert "server B1 ended with exit code 7" in error
    assert "giving up on purpose" in error


@pytest.mark.parametrize("after", [0, 5], ids=["warm-up", "replay"])
def test_server_that_hangs(bench: Bench, capsys: pytest.CaptureFixture[str], after: int) -> None:
    assert bench.run("--flags-b", f"--hang-after {after}", "--stall-timeout", "2") == 2
    assert "server B1 made no progress for 2 s" in capsys.readouterr().err


def test_command_that_does_not_exist(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("--server-command", "/no/such/program {port}") == 2
    assert "cannot start /no/such/program" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("--order", "ABC"), "unknown arm C; arm C needs --arm-c-flags"),
        (("--order", "AA"), "must contain A and B"),
        (("--features", "burst"), "no feature id"),
        (("--model", "/nowhere/at/all"), "could not be fetched"),
        (("--sessions", "500", "--turns", "100"), "recorded sessions have 100 turns"),
        (("--tolerance", "speed=1"), "write F or METRIC=F"),
        (("--env-b", "NAME"), "write NAME=VALUE"),
        (("--python-b", "/no/python"), "is not a Python interpreter"),
    ],
)
def test_usage_errors_are_one_line(
    bench: Bench,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    extra: tuple[str, str],
    message: str,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert bench.run(*extra) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_json_output_is_the_verdict_file(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run("--order", "AB", "--json")
    assert json.loads(capsys.readouterr().out) == bench.verdict()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
@pytest.mark.parametrize("when", ["starting", "replaying"])
def test_signal_leaves_nothing_behind(bench: Bench, number: signal.Signals, when: str) -> None:
    faults = "--with-child --never-ready" if when == "starting" else "--with-child --hang-after 4"
    command = [sys.executable, "-m", "numinous_tooling.gate"]
    command += bench.arguments("--flags-all", faults, "--features", "none")
    gate = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert gate.stderr is not None
    with gate.stderr as stderr:
        for line in stderr:
            if when in line:
                break
        deadline = time.monotonic() + 30
        while not (bench.notes / "pids").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        tree = [child.pid for child in psutil.Process(gate.pid).children(recursive=True)]
        assert set(bench.server_pids()) <= set(tree)
        start = time.monotonic()
        gate.send_signal(number)
        while running(tree) and time.monotonic() < start + 10:
            time.sleep(0.01)
        assert running(tree) == []
        rest = stderr.read()
    assert gate.wait(timeout=30) == 2
    assert f"interrupted by {number.name}; no server is left running" in rest
    assert bench.verdict()["reasons"] == [f"interrupted by {number.name}"]
