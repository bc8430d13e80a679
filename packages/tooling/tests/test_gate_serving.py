# SPDX-License-Identifier: Apache-2.0
"""Whole gate runs against a fake server: verdicts, dying and hanging servers, bad answers, signals.

Planted slow-downs are large and tolerances wide, so that a loaded machine cannot change a verdict; the statistics
themselves are tested in test_gate_verdict.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest

pytest.importorskip("httpx")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

import httpx

from numinous_tooling.gate import folder, gauges, report, run, verdict
from numinous_tooling.gate.__main__ import main
from numinous_tooling.gate.client import RequestRecord
from numinous_tooling.gate.servers import free_port

FAKE = Path(__file__).with_name("gate_fake_server.py")
FEATURE = "scheduler.decode_burst"
# On a busy machine two runs of one arm may differ by several times; a planted fault is then found with four.
FOUR_EACH = "ABBAABBA"


def fake_counters(state_dir: Path) -> dict[str, dict[str, int]]:
    """Read what the fake server wrote for its feature."""
    file = state_dir / "totals.json"
    return json.loads(file.read_text()) if file.exists() else {}


@dataclass
class Bench:
    """A folder with a model that has config and vocabulary only, and the arguments of a short run."""

    folder: Path
    attached: list[subprocess.Popen[bytes]] = field(default_factory=list)

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
            *("--max-client-lag", "60000", "--max-uneven-load", "99", "--out", str(self.out)),
            *extra,
        ]

    def run(self, *extra: str) -> int:
        return main(self.arguments(*extra), counters_reader=fake_counters)

    def attach(self, *flags: str) -> str:
        """Start a server that the gate does not know as its own; return its URL."""
        port = free_port()
        command = [sys.executable, str(FAKE), "--port", str(port), "--notes", str(self.notes)]
        self.attached.append(subprocess.Popen([*command, *flags]))
        return f"http://127.0.0.1:{port}"

    def run_attached(self, flags_a: str, flags_b: str, *extra: str) -> int:
        """Run the gate on two servers that run already."""
        urls = ("--url-a", self.attach(*shlex.split(flags_a)))
        urls += ("--url-b", self.attach(*shlex.split(flags_b)))
        return main(
            [
                *("serving", *urls, "--model", str(self.folder / "model")),
                *(
                    "--max-client-lag",
                    "60000",
                    "--max-uneven-load",
                    "99",
                    "--out",
                    str(self.out),
                    "--order",
                    "AB",
                ),
                *extra,
            ],
            counters_reader=fake_counters,
        )

    def records(self) -> list[dict]:
        return [json.loads(line) for line in (self.out / "records.jsonl").read_text().splitlines()]

    def requests(self) -> list[list]:
        """Return what each server got, in the order of their start; prompt, settings and rank of each request."""
        pids = [process.pid for process in self.attached] or self.server_pids()
        return [
            [json.loads(line) for line in file.read_text().splitlines()]
            for pid in pids
            if (file := self.notes / f"requests-{pid}.jsonl").exists()
        ]

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
def real_report() -> None:
    """Asked for by a test that looks at report.html."""


@pytest.fixture
def bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Bench]:
    # Drawing is most of a short run's time; what is drawn is looked at where a test asks for it.
    if "real_report" not in request.fixturenames:
        monkeypatch.setattr(
            report, "write_html", lambda _result, out: (out / "report.html").write_text("not drawn")
        )
    monkeypatch.setenv("NUMINOUS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    config = {"max_position_embeddings": 4096, "vocab_size": 4000}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    words = ["".join(chr(97 + int(digit)) for digit in f"{number:03}") for number in range(300)]
    vocabulary = {word: index for index, word in enumerate(words)}
    vocabulary |= {f"Ġ{word}": 300 + index for index, word in enumerate(words)}
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    (tmp_path / "notes").mkdir()
    bench = Bench(tmp_path)
    yield bench
    for process in bench.attached:
        process.kill()
        process.wait()
    if (bench.notes / "pids").exists():
        assert running(bench.server_pids()) == [], "the gate left servers behind"


def test_equal_arms_pass(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("--tolerance", "1e6") == 0
    verdict = bench.verdict()
    assert verdict["verdict"] == "PASS"
    assert verdict["length_scale"] == 1 / 64
    assert verdict["notes"] == []  # the order is balanced
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
    assert bench.run("--flags-b", "--slow 40", "--tolerance", "0.5", "--order", FOUR_EACH) == 1
    verdict = bench.verdict()
    assert verdict["verdict"] == "FAIL"
    words = {m["metric"]: m["word"] for m in verdict["comparisons"][0]["metrics"]}
    assert words["tpot"] == "FAIL"
    assert "worse than the tolerance" in capsys.readouterr().out


def test_one_repeat_is_inconclusive(bench: Bench) -> None:
    assert bench.run("--order", "AB") == 2
    assert bench.verdict()["verdict"] == "INCONCLUSIVE"
    assert "in the order AB one arm runs later than the other" in bench.verdict()["notes"][0]


@pytest.mark.usefixtures("real_report")
def test_third_arm_is_compared_too(bench: Bench) -> None:
    assert bench.run("--order", "ABCAB", "--arm-c-flags", "--slow 20", "--tolerance", "1e6") == 0
    comparisons = {c["test"] + c["base"]: c for c in bench.verdict()["comparisons"]}
    assert set(comparisons) == {"BA", "CA", "BC"}
    # C's own slow-down is C's, and does not touch the verdict of B.
    tpot = {m["metric"]: m for m in comparisons["CA"]["metrics"]}["tpot"]
    assert tpot["change"] > 1
    page = (bench.out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert 'download="records.jsonl.gz"' in page
    assert "http://" not in page.replace("http://127.0.0.1", "")


def test_feature_that_never_ran_fails(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("--order", "AB", "--flags-b", "--never-engage") == 1
    assert f"B1: {FEATURE} never ran" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("log", "code", "line"),
    [
        ("--graph-log True", 2, "ran in CUDA graphs alone: it engaged 9 times while they were"),
        ("--graph-log False", 1, "never ran (engaged 9 at the start, no batch came from a CUDA"),
        ("", 2, "engaged 9 times before the measurement alone, and no log shows whether"),
    ],
    ids=["graphs", "eager", "no log"],
)
def test_what_a_captured_feature_is_worth(bench: Bench, log: str, code: int, line: str) -> None:
    assert bench.run("--flags-b", f"--captured 9 {log}", "--order", "AB") == code
    verdict = bench.verdict()
    # Where it ran, only repeats are missing.
    ran = log.endswith("True")
    lines = verdict["notes"] if ran else verdict["reasons"]
    assert any(f"B1: {FEATURE} {line}" in text for text in lines)
    assert ran != any(FEATURE in reason for reason in verdict["reasons"])
    figures = verdict["arms"]["B"]["figures"]
    assert (figures["counters"], figures["counters_at_start"]) == ({}, {FEATURE: {"engaged": 9}})


def test_counters_in_a_stock_arm_are_inconclusive(bench: Bench) -> None:
    assert bench.run("--order", "AB", "--flags-a", "--always-engage") == 2
    assert "A1 is stock but shows counters" in bench.verdict()["reasons"][0]


def test_stock_against_stock_needs_no_counters(bench: Bench) -> None:
    assert bench.run("--tolerance", "1e6", "--features", "none") == 0


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
    assert "arm B has 1 failed or short answers of 4, arm A 0 of 4" in verdict["reasons"][0]
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


@pytest.mark.parametrize(("after", "clients"), [(0, 2), (5, 1), (5, 2)])
def test_server_that_hangs(
    bench: Bench, capsys: pytest.CaptureFixture[str], after: int, clients: int
) -> None:
    hang = ("--flags-b", f"--hang-after {after}", "--stall-timeout", "4")
    assert bench.run(*hang, "--clients", str(clients)) == 2
    assert "server B1 made no progress for 4 s" in capsys.readouterr().err


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
    command += bench.arguments("--flags-all", faults, "--features", "none", "--clients", "2")
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
        # The server's two, and the clients, which both have to end.
        assert len(tree) == (2 if when == "starting" else 4)
        start = time.monotonic()
        gate.send_signal(number)
        while running(tree) and time.monotonic() < start + 10:
            time.sleep(0.01)
        assert running(tree) == []
        rest = stderr.read()
    assert gate.wait(timeout=30) == 2
    assert f"interrupted by {number.name}; no server is left running" in rest
    assert bench.verdict()["reasons"] == [f"interrupted by {number.name}"]


def small(*extra: str) -> tuple[str, ...]:
    """Return the options of a short closed loop."""
    return (
        *("--workload", "closed", "--input", "12", "--output", "3"),
        *("--requests", "4", "--concurrency", "2", *extra),
    )


def test_own_servers_through_the_openai_interface(bench: Bench) -> None:
    assert bench.run("--api", "openai", "--tolerance", "1e6") == 0
    verdict = bench.verdict()
    assert {run["prompts"] for run in verdict["runs"]} == {"ids"}
    assert all("--enable-cache-report" in run["command"] for run in verdict["runs"])
    pooled = verdict["arms"]["B"]["figures"]["pooled"]
    assert (pooled["errors"], pooled["short_answers"]) == (0, 0)
    assert pooled["cache_hit_rate"] > 0.2
    a1, b1, b2, _ = (sorted(map(json.dumps, requests)) for requests in bench.requests())
    assert a1 == b1
    assert a1 != b2
    assert all(
        record["server_prompt_tokens"] == record["prompt_tokens"] for record in bench.records()
    )


@pytest.mark.parametrize(
    ("prompts", "flags"),
    [
        ("text", "--refuse-ids"),
        ("chat", "--template 2"),
        ("chat", "--template 2 --no-system"),
        ("chat", "--no-usage"),
    ],
)
def test_counts_survive_text_and_templates(bench: Bench, prompts: str, flags: str) -> None:
    code = bench.run_attached(
        flags,
        flags,
        *("--prompts", "auto" if prompts == "text" else prompts, "--tolerance", "1e6"),
        *("--sessions", "2", "--turns", "3", "--length-scale", "1/16", "--speedup", "900"),
    )
    assert code == 2  # one repeat; what matters is below
    if flags == "--no-usage":
        assert "the server reports no usage" in bench.verdict()["reasons"][0]
        return
    verdict = bench.verdict()
    assert not any("drift" in reason for reason in verdict["reasons"])
    assert {run["prompts"] for run in verdict["runs"]} == {prompts}
    assert all(run["prompt_drift"] == 0 for run in verdict["runs"])
    for record in bench.records():
        assert record["server_prompt_tokens"] == record["prompt_tokens"]
    assert verdict["arms"]["B"]["figures"]["pooled"]["cache_hit_rate"] > 0.2
    if prompts == "chat":
        longest = max((r[0] for r in bench.requests()[0]), key=len)
        roles = [] if "--no-system" in flags else ["system"]
        assert [m["role"] for m in longest] == [*roles, "user", *["assistant", "user"] * 2]


def test_drifting_prompts_are_refused(bench: Bench) -> None:
    flags = "--refuse-ids --token-factor 1.1"
    assert bench.run_attached(flags, flags, *small("--input", "200")) == 2
    assert "prompts drift by" in bench.verdict()["reasons"][0]


def test_attached_servers_are_compared_and_left_alone(bench: Bench) -> None:
    assert (
        bench.run_attached(
            "--name one --no-health",
            "--name two --flush vllm",
            *small("--order", "ABBA", "--tolerance", "1e6"),
        )
        == 0
    )
    verdict = bench.verdict()
    assert verdict["features"] == []
    assert "no feature counters were read" in verdict["notes"][0]
    assert all(run["cache_flushed"] for run in verdict["runs"])
    assert verdict["arms"]["A"]["versions"] == {"server": "fake"}
    assert all(process.poll() is None for process in bench.attached)
    # In no order: which of the two was up first is the machine's business.
    models = [{r[1]["model"] for r in requests} for requests in bench.requests()]
    assert sorted(map(sorted, models)) == [["one"], ["two"]]


def test_attached_slow_server_fails(bench: Bench) -> None:
    options = small("--order", FOUR_EACH, "--tolerance", "1")
    assert bench.run_attached("", "--slow 40", *options) == 1


def test_attached_feature_is_seen_in_its_state_folder(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = bench.folder / "state-of-b"
    state.mkdir()
    monkeypatch.setenv("NUMINOUS_STATE_DIR", str(state))
    options = small("--features", FEATURE, "--tolerance", "1e6", "--order", "ABBA")
    assert bench.run_attached("", "--always-engage", *options, "--state-dir-b", str(state)) == 0
    counters = bench.verdict()["arms"]["B"]["figures"]["counters"]
    # Warm-up requests are not counted: the client's probe, then two requests twice, in each of two runs.
    assert counters[FEATURE]["engaged"] == 8
    assert state.exists()


def test_attached_server_that_is_not_there(bench: Bench) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    alive = bench.attach()
    arguments = [
        "serving",
        "--url-a",
        alive,
        "--url-b",
        dead,
        "--model",
        str(bench.folder / "model"),
    ]
    assert (
        main(
            [*arguments, "--order", "AB", *small(), "--out", str(bench.out), "--start-timeout", "1"]
        )
        == 2
    )
    assert f"server B1 at {dead} is not ready" in bench.verdict()["reasons"][0]


@pytest.mark.parametrize("api", ["openai", "sglang"])
def test_attached_server_that_dies_in_the_middle(bench: Bench, api: str) -> None:
    # Fewer than the requests of warm-up and replay together.
    assert bench.run_attached("", "--die-after 6", *small("--api", api)) == 2
    assert "went away" in bench.verdict()["reasons"][0]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("--break-at 7", ""),
        ("--nonsense-at 7", "not an answer of /v1/completions"),
        ("--error-at 7", "HTTP 500"),
    ],
)
def test_bad_answers_of_an_openai_server_are_counted(bench: Bench, fault: str, error: str) -> None:
    assert bench.run_attached("", fault, *small()) == 1
    assert bench.verdict()["reasons"][0] == "arm B has 1 failed or short answers of 4, arm A 0 of 4"
    assert [r for r in bench.records() if r["error"] and error in r["error"]]


def test_attached_server_that_hangs(bench: Bench) -> None:
    assert bench.run_attached("", "--hang-after 6", *small("--stall-timeout", "4")) == 2
    assert "made no progress for 4 s" in bench.verdict()["reasons"][0]


def test_attached_server_without_flush_is_refused_or_gets_fresh_tokens(bench: Bench) -> None:
    none = "--flush none"
    assert bench.run_attached(none, none, *small()) == 2
    assert "give --no-flush" in bench.verdict()["reasons"][0]
    urls = [f"http://127.0.0.1:{process.args[3]}" for process in bench.attached]
    arguments = [
        "serving",
        "--url-a",
        urls[0],
        "--url-b",
        urls[1],
        "--model",
        str(bench.folder / "model"),
    ]
    arguments += [
        "--max-client-lag",
        "60000",
        "--max-uneven-load",
        "99",
        "--no-flush",
        "--tolerance",
        "1e6",
        "--out",
        str(bench.out),
        *small(),
    ]
    assert main(arguments) == 0
    verdict = bench.verdict()
    assert any("--no-flush" in note for note in verdict["notes"])
    assert not any(run["cache_flushed"] for run in verdict["runs"])
    assert verdict["workload"]["repeat_base"] > 0
    # The same server for both arms would lend B the prompts of A.
    arguments[4] = urls[0]
    assert main(arguments) == 2
    assert bench.verdict() == verdict


def write_sessions(folder: Path) -> Path:
    """Write a trace of three sessions, one whose recorded answers are JSON, one with a tool call, one with prose."""
    call = {"function": {"name": "run", "arguments": '{"x": 1}'}}
    answers: list[dict] = [
        {"content": '{"a": 1}'},
        {"content": None, "tool_calls": [call]},
        {"content": "just words"},
    ]
    lines = []
    for index, answer in enumerate(answers):
        messages: list[dict] = [{"role": "system", "content": "be brief"}]
        for turn in range(2):
            messages.append({"role": "user", "content": f"question {turn}"})
            numbers = {"completion_tokens": 6, "reasoning_tokens": 0, "t": turn * 2}
            messages.append({"role": "assistant", **answer, **numbers})
        lines.append(json.dumps({"session": f"s{index}", "messages": messages}))
    file = folder / "sessions.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_text_sessions_count_answers_that_programs_can_read(bench: Bench) -> None:
    options = ("--workload", "agents-text", "--trace", str(write_sessions(bench.folder)))
    options += ("--sessions", "3", "--turns", "2", "--speedup", "900", "--tolerance", "1e6")
    # The fake server would trip over content that is null, so its template test stays with the other two.
    assert bench.run_attached("--answer '{\"b\": 2}'", "--answer '{\"b\": 2'", *options) == 2
    verdict = bench.verdict()
    assert verdict["exact_lengths"] is False
    # Two sessions of two turns had to be readable; the JSON ones are in A, none are in B.
    assert verdict["arms"]["A"]["valid_answers"] == {"expected": 4, "valid": 2, "share": 0.5}
    assert verdict["arms"]["B"]["valid_answers"] == {"expected": 4, "valid": 0, "share": 0.0}
    assert verdict["arms"]["A"]["figures"]["pooled"]["short_answers"] == 0
    first = [r[0][0]["content"] for r in bench.requests()[0] if "warmup" not in str(r[0])]
    assert all(content in ("[0/1]\nbe brief", "word " * 15 + "word") for content in first)
    assert all("ignore_eos" not in r[1] for r in bench.requests()[0])


def test_sessions_are_pinned_to_ranks(bench: Bench) -> None:
    options = small("--dp-pin", "--tolerance", "1e6", "--requests", "8")
    assert bench.run_attached("--dp-size 4", "--dp-size 4", *options) == 2  # one repeat
    a, b = ([(r[2], r[0]) for r in requests if r[2]] for requests in bench.requests())
    assert sorted(a) == sorted(b)
    assert 1 < len({rank for rank, _ in a}) <= 4


def test_pinning_needs_ranks(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("--order", "AB", "--dp-pin") == 2
    assert "--dp-pin: server A1 reports dp_size 1" in capsys.readouterr().err


def test_gauges_are_read_while_a_server_works(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gauges, "SAMPLE_EVERY_S", 0.01)
    assert (
        bench.run_attached("--metrics --slow 50", "--loads --slow 50", *small()) == 2
    )  # one repeat
    a, b = (run["gauges"] for run in bench.verdict()["runs"])
    assert a["source"] == "/metrics"
    assert a["queue"] == {"max": 4.0, "mean": 4.0}
    assert a["token_usage"]["max"] == 0.5
    assert a["running"]["max"] >= 1
    assert a["retractions"] == 4.0  # the fake server counts its requests there
    assert b["source"] == "/v1/loads?include=core"
    assert b["queue"]["max"] == 4.0


@pytest.mark.parametrize(
    "extra",
    [
        ("--length-scale", "1e400"),
        ("--length-scale", "1e999999999"),
        ("--length-scale", "inf"),
        ("--start-timeout", "nan"),
        ("--stall-timeout", "0"),
        ("--max-client-lag", "nan"),
        ("--port-base", "65536"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(
    bench: Bench, capsys: pytest.CaptureFixture[str], extra: tuple[str, str]
) -> None:
    assert bench.run(*extra) == 2
    assert f"argument {extra[0]}: '{extra[1]}' is no" in capsys.readouterr().err.splitlines()[-1]


def test_folder_of_a_run_that_goes_on_is_refused(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    with folder.locked(bench.out):
        assert bench.run("--order", "AB") == 2
        assert "is in use by another run" in capsys.readouterr().err
        assert list(bench.out.iterdir()) == []
    assert bench.run("--order", "AB", "--features", "none") == 2
    assert bench.verdict()["reasons"][0].startswith("output tok/s per user")


def test_no_verdict_of_an_earlier_run_stays_beside_new_records(bench: Bench) -> None:
    bench.out.mkdir()
    (bench.out / "verdict.json").write_text('{"verdict": "PASS"}')
    (bench.out / "report.html").write_text("PASS")
    # What a full disk or a folder without rights looks like.
    (bench.out / "server-A1.log").mkdir()
    assert bench.run("--order", "AB") == 2
    assert bench.verdict()["verdict"] == "INCONCLUSIVE"
    assert "server-A1.log: Is a directory" in bench.verdict()["reasons"][0]
    assert not (bench.out / "report.html").exists()


def test_port_on_which_another_server_answers_is_refused(bench: Bench) -> None:
    url = bench.attach()
    with httpx.Client() as http:
        for _ in range(600):
            with contextlib.suppress(httpx.TransportError):
                if http.get(f"{url}/health").status_code == 200:
                    break
            time.sleep(0.1)
    assert bench.run("--port-base", url.rsplit(":", 1)[1]) == 2
    assert "is in use" in bench.verdict()["reasons"][0]
    assert bench.server_pids() == [bench.attached[0].pid]


def test_clients_divide_a_replay_and_change_no_request(bench: Bench) -> None:
    loop = ("--workload", "closed", "--input", "12", "--output", "3", "--requests", "9")
    arguments = bench.arguments(*loop, "--concurrency", "5", "--order", "AB", "--tolerance", "1e6")
    at = arguments.index("--sessions")
    del arguments[at : at + 8]  # the recorded sessions' options
    floors = set()
    for clients in ("1", "3"):
        assert main([*arguments, "--clients", clients], counters_reader=fake_counters) == 2
        assert bench.verdict()["workload"]["clients"] == int(clients)
        floors.add(bench.verdict()["noise_floor"]["file"])
        records = [record for record in bench.records() if record["arm"] == "A"]
        assert len({record["session"] for record in records}) == 9
        # The places of all clients together are those of the loop.
        spans = [(r["sent_s"], r["sent_s"] + r["e2e_s"]) for r in records]
        most = max(sum(begin <= other[0] < end for begin, end in spans) for other in spans)
        assert 1 < most <= 5
    # The noise is that of so many clients.
    assert len(floors) == 2
    one, *others = (sorted(map(json.dumps, requests)) for requests in bench.requests())
    assert all(other == one for other in others)


def test_aborted_run_goes_on(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--flags-b", f"--die-after-file {bench.folder / 'die'}", "--tolerance", "1e6")
    flags += ("--clients", "1")
    (bench.folder / "die").write_text("5")
    assert bench.run(*flags) == 2
    kept = bench.records()
    assert len(kept) == 4
    (bench.folder / "die").unlink()
    arguments = bench.arguments(*flags)
    arguments[arguments.index("--out")] = "--resume"
    # A slot whose records are not all there is no finished slot.
    whole = (bench.out / "records.jsonl").read_text()
    (bench.out / "records.jsonl").write_text("".join(whole.splitlines(keepends=True)[1:]))
    assert main(arguments, counters_reader=fake_counters) == 2
    assert "records.jsonl has 3 of 4 records of A1" in capsys.readouterr().err
    (bench.out / "records.jsonl").write_text(whole)
    other = [*arguments, "--concurrency", "1"]
    assert main(other, counters_reader=fake_counters) == 2
    assert (
        "concurrency was 2 and is now 1; resume with the options of: python -m"
        in capsys.readouterr().err
    )
    assert main([*arguments, "--clients", "2"], counters_reader=fake_counters) == 2
    assert "clients was 1 and is now 2" in capsys.readouterr().err
    assert main(arguments, counters_reader=fake_counters) == 0
    verdict = bench.verdict()
    assert [run["run"] for run in verdict["runs"]] == ["A1", "B1", "B2", "A2"]
    assert bench.records()[:4] == kept
    assert len(bench.records()) == 16
    assert len(bench.server_pids()) == 5
    assert main(arguments, counters_reader=fake_counters) == 2
    assert "the run is complete" in capsys.readouterr().err


def test_drift_of_a_run_makes_it_doubtful() -> None:
    record = RequestRecord("s", 0, 1000, 1, "d", 0.0, 1.0, 1, server_prompt_tokens=1011)
    near = verdict.ArmRun(0, "A", 1, [record], 1.0, 0.0, 0.0, drift=0.0099)
    far = replace(near, drift=0.0111)
    assert run._doubts_of(near) == []
    far.doubts = run._doubts_of(far)
    assert verdict.doubts([near, far], None) == [
        "A1: prompts drift by 1.1% from their planned token counts, at most 1% is judged"
    ]


def test_key_of_attached_servers_is_sent_and_written_nowhere(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "sk-planted-key"
    monkeypatch.setenv("GATE_TEST_KEY", key)
    extra = ("--api-key-env", "GATE_TEST_KEY", *small())
    assert bench.run_attached(f"--api-key {key}", f"--api-key {key}", *extra) == 2  # one repeat
    assert len(bench.records()) > 0
    assert not any(record["error"] for record in bench.records())
    # A server that repeats what it refuses.
    assert bench.run_attached("--api-key other", "--api-key other", *extra) == 2
    assert "wrong key: Bearer ***" in bench.verdict()["reasons"][0]
    captured = capsys.readouterr()
    said = captured.out + captured.err
    said += "".join(f.read_text(errors="replace") for f in bench.out.rglob("*") if f.is_file())
    assert key not in said


def test_password_in_a_url_is_refused(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    urls = ("--url-a", "http://me:hunter2@x:1", "--url-b", "http://x:1")
    assert main(["serving", *urls, "--out", str(bench.out)]) == 2
    error = capsys.readouterr().err
    assert "see --api-key-env" in error
    assert "hunter2" not in error
    assert not bench.out.exists()


def test_busy_client_is_inconclusive(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MAX_CLIENT_CPU_SHARE", 1e-9)
    assert bench.run("--order", "AB") == 2
    assert "A1: a client process computed for" in bench.verdict()["reasons"][0]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("--url-a", "http://x:1"), "--url-a and --url-b go together"),
        (("--no-flush",), "--no-flush is for servers attached"),
        (("--api-key-env", "HOME"), "--api-key-env is for servers attached"),
        (("--max-uneven-load", "-1"), "write a number of cores"),
        (("--max-uneven-load", "nan"), "write a number of cores"),
        (("--rate", "1"), "--rate is for workload open, not for agents"),
        (("--workload", "open", "--input", "9"), "--sessions is for workload agents"),
        (("--workload", "mooncake"), "is for workload"),
        (("--prompts", "chat"), "--prompts chat needs --api openai"),
        (("--resume", "/no/such/run"), "--out and --resume name two folders"),
        (("--tolerance", "nan"), "write F or METRIC=F"),
        (("--tolerance", "ttft=inf"), "write F or METRIC=F"),
        (("--env-b", "HF_TOKEN=x"), "looks like a secret"),
        (("--out", "/dev/null"), "/dev/null cannot be used as a folder"),
        (("--out", "/dev/null/x"), "/dev/null/x cannot be used as a folder"),
        (("--speedup", "1e-9"), "hours between requests"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    bench: Bench, capsys: pytest.CaptureFixture[str], extra: tuple[str, ...], message: str
) -> None:
    assert bench.run(*extra) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("--url-b", "not a url"), "write http://HOST:PORT"),
        (("--url-b", "http://[::1"), "write http://HOST:PORT"),
        (("--url-b", "http://x:99999"), "write http://HOST:PORT"),
        (("--url-b", "http://x:y"), "write http://HOST:PORT"),
        (("--url-b", "http://x:1/v1/"), "write what comes before /v1"),
        (("--url-b", "http://x:1/?a=b"), "write what comes before /v1"),
        (("--api-key-env", "NO_SUCH_KEY"), "no variable that holds a key"),
        (("--no-flush", "--url-b", "http://x:1", "--resume", "x"), "start anew"),
        (("--flags-b", "--x"), "--flags-b is for servers that the gate starts"),
        (("--features", FEATURE), "name it with --state-dir-b"),
        (("--workload", "agents-text", "--trace", "/no/trace", "--api", "sglang"), "through chat"),
        (("--workload", "agents-text", "--trace", "/no/trace"), "No such file"),
        (("--workload", "agents-text"), "needs --trace FILE"),
        (("--workload", "open"), "needs --rate R"),
        (("--workload", "closed", "--input", "5000"), "do not fit 4096 tokens"),
    ],
)
def test_options_that_do_not_go_with_attached_servers(
    bench: Bench, capsys: pytest.CaptureFixture[str], extra: tuple[str, ...], message: str
) -> None:
    arguments = ["serving", "--url-a", "http://127.0.0.1:9", "--url-b", "http://127.0.0.1:9"]
    arguments += ["--model", str(bench.folder / "model"), "--out", str(bench.out), *extra]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
