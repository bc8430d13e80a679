# SPDX-License-Identifier: Apache-2.0
"""Whole accuracy runs against a fake engine: verdicts, floors, faults, servers that die, hang or answer nonsense."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy")
pytest.importorskip("statsmodels")
pytest.importorskip("matplotlib")

from numinous_tooling.gate import kv4
from numinous_tooling.gate.__main__ import COMMANDS, _parser, main
from numinous_tooling.gate.accuracy import command, report
from numinous_tooling.gate.record import record_of_run
from numinous_tooling.gate.servers import free_port

FAKE = Path(__file__).with_name("gate_fake_engine.py")
_spec = importlib.util.spec_from_file_location("gate_fake_engine", FAKE)
_fake = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fake)
serving = _fake.serving
FEATURE = "scheduler.decode_burst"


def fake_counters(state_dir: Path) -> dict[str, dict[str, int]]:
    """Read what the fake engine wrote for its feature."""
    file = state_dir / "totals.json"
    return json.loads(file.read_text()) if file.exists() else {}


@dataclass
class Bench:
    """A folder with a model that has only a config, and the arguments of a short run."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def model(self) -> str:
        model = self.folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text('{"vocab_size": 128}')
        return str(model)

    def main(self, *extra: str, a: str = "", b: str = "") -> int:
        """Judge two fake engines in threads, each with its flags."""
        chunk = " --chunked-prefill-size 40"
        with serving(a + chunk) as url_a, serving(b + chunk) as url_b:
            return main(["accuracy", "--url-a", url_a, "--url-b", url_b, *self.size(), *extra])

    def start(self, *extra: str, b: str = "") -> int:
        """Judge two fake engines that the gate starts as its arms."""
        server = f"{{python}} {FAKE} --port {{port}}"
        arguments = ["accuracy", "--server-command", server, "--device", "gpu", "--chunk", "40"]
        return main([*arguments, f"--flags-b={b}", *self.size(), *extra], fake_counters)

    def size(self) -> list[str]:
        arguments = ["--model", self.model(), "--out", str(self.out), "--sequences", "4"]
        arguments += ["--tokens", "24", "--decode-tokens", "4", "--stall-timeout", "30"]
        return arguments

    @property
    def document(self) -> dict:
        return json.loads((self.out / "verdict.json").read_text())

    def words(self) -> dict[str, str]:
        return {row["row"]: row["word"] for row in self.document["rows"]}

    def problems(self, count: int) -> str:
        """Write problems of the test's own."""
        lines = [
            {
                "question": f"Ann has {n} pears and buys {n + 2} more. How many are that?",
                "answer": f"She has {n} + {n + 2} = <<{n}+{n + 2}={2 * n + 2}>>{2 * n + 2}.\n#### {2 * n + 2}",
            }
            for n in range(count)
        ]
        path = self.folder / "problems.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)


@pytest.fixture
def bench_with_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(tmp_path, capsys)


@pytest.fixture
def bench(bench_with_page: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Without the HTML page, whose plots take longer than the rest of a run."""
    monkeypatch.setattr(report, "write_html", lambda result, path: None)
    return bench_with_page


def test_stock_against_stock_passes_and_leaves_all_files(bench_with_page: Bench):
    bench = bench_with_page
    assert bench.main("--gsm8k", bench.problems(8), "--gsm8k-count", "6") == 0
    document = bench.document
    assert document["verdict"] == "PASS"
    assert document["method"]["distribution"] == "full vocabulary"
    words = bench.words()
    assert (
        words.pop("exact_match") == "INCONCLUSIVE"
    )  # six problems have no power, and do not decide
    assert set(words) == {"cold", "hit", "chunked", "decode", "protocol", "gold", "gold_loss"}
    assert set(words.values()) == {"PASS"}
    assert document["gsm8k"] == {"problems": 6, "in_file": 8, "published_test_split": False}
    with np.load(bench.out / "positions.npz") as arrays:
        assert len(arrays["cold.B.kl_low"]) == 12 * 23
        assert len(arrays["decode.floor.kl_high"]) == 12 * 4
    sequences = (bench.out / "sequences.jsonl").read_text().splitlines()
    assert len(sequences) == 12 + 4
    assert len((bench.out / "gsm8k.jsonl").read_text().splitlines()) == 6
    page = (bench.out / "report.html").read_text()
    assert "PASS" in page
    assert "data:image/png" in page
    printed = bench.capsys.readouterr().out
    assert "points would be seen at 80 % power" in printed
    assert not list(bench.out.glob("state-*"))


def test_a_floor_that_no_batch_shook_is_of_single_sequences(bench: Bench, monkeypatch):
    """Batches of 4 and 2 give the same bits; B differs by less than a request that is alone."""
    gsm8k = ("--gsm8k", bench.problems(6))
    assert bench.main(*gsm8k, a="--alone 0.02", b="--shift 0.02 --alone 0.02") == 0
    note = next(note for note in bench.document["notes"] if note.startswith("floor of"))
    assert "cold prefill, prefix-cache hit" in note
    assert bench.document["engaged"]["A again"].keys() >= {"cold", "hit", "decode"}
    shaken = {row["row"]: row["floor"] for row in bench.document["rows"] if row["unit"] == "nats"}
    assert shaken.keys() == {"cold", "hit", "chunked", "decode", "protocol", "gold"}
    assert min(shaken.values()) > 0
    # Without that the same pair fails, and a fault beyond it fails with it.
    monkeypatch.setattr(command, "unshaken", lambda base, again: [])
    assert bench.main(a="--alone 0.02", b="--shift 0.02 --alone 0.02") == 1
    monkeypatch.undo()
    assert bench.main(a="--alone 0.02", b="--shift 0.5 --alone 0.02") == 1


def test_a_floor_that_moved_is_not_measured_again(bench: Bench):
    assert bench.main(a="--jitter 0.001", b="--jitter 0.001") == 0
    assert not any(note.startswith("floor of") for note in bench.document["notes"])


def test_a_shifted_distribution_fails_every_row(bench: Bench):
    assert bench.main("--gsm8k", bench.problems(6), b="--shift 0.5") == 1
    words = bench.words()
    assert words.pop("exact_match") == "INCONCLUSIVE"
    words.pop("gold_loss")  # noise in the logits may help on a given text
    assert set(words.values()) == {"FAIL"}


def test_a_fault_in_the_cache_shows_where_the_cache_is_read(bench: Bench):
    assert bench.main(b="--shift 0.5 --when-cached") == 1
    words = bench.words()
    assert words["hit"] == "FAIL"
    assert words["cold"] == words["chunked"] == words["protocol"] == "PASS"


def test_the_limit_follows_the_floor(bench: Bench):
    """What stock does to itself from batch to batch is no fault of B; the same without that floor is one."""
    assert bench.main(a="--jitter 0.03", b="--jitter 0.03 --shift 0.02") == 0
    floors = {row["row"]: row["floor"] for row in bench.document["rows"]}
    assert min(floors.values()) > 1e-4
    assert bench.main(b="--shift 0.02") == 1


def test_a_yardstick_takes_the_place_of_the_floor(bench_with_page: Bench):
    """B is as far from A as another stock arm, which would fail by the floor; four times that is too far for this margin."""
    bench = bench_with_page
    yardstick = ("--yardstick", "--shift 0.05", "--margin", "2")
    assert bench.start(*yardstick, b="--shift 0.05") == 0
    document = bench.document
    assert document["method"]["yardstick"] == "--shift 0.05"
    assert set(document["arms"]) == {"A", "B", "C"}
    assert document["arms"]["C"]["command"][-1] == "0.05"
    rows = {row["row"]: row for row in document["rows"]}
    assert min(row["floor"] for row in rows.values() if row["unit"] == "nats") > 1e-4
    for name in ("cold_loss", "hit_loss", "chunked_loss"):
        assert rows[name]["figure"] == rows[name]["floor"]
        assert 0.005 < rows[name]["limit"] < 0.05, "half a percent of a loss of a few nats"
    printed = bench.capsys.readouterr().out
    assert "yardstick's flips" in printed
    assert "Yardstick: stock with --shift 0.05 against A. PASS says" in printed
    assert "at most 2 times as far" in (bench.out / "report.html").read_text()
    document["arms"]["B"]["versions"] = {"sglang": "0.5.20"}
    document["machine"]["gpus"] = []
    kept = record_of_run("accuracy", document, bench.out)
    assert kept["gpu"].startswith("cpu: ")
    assert kept["yardstick"] == "--shift 0.05"
    assert kept["cold_b_kl"] == kept["cold_yardstick_kl"] == kept["rows"][0]["floor"]
    assert kept["hit_b_flips_percent"] == kept["hit_yardstick_flips_percent"] > 0


def test_a_yardstick_can_be_missed(bench: Bench):
    assert bench.start("--yardstick", "--shift 0.05", "--margin", "2", b="--shift 0.2") == 1
    assert "cold prefill: distance beyond the limit" in bench.document["reasons"]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_question_of_a_4_bit_cache_is_a_preset(device: str, monkeypatch: pytest.MonkeyPatch):
    options = _parser().parse_args(["kv4", "--model", "m"])
    assert (options.features, options.yardstick) == (kv4.FEATURE, kv4.YARDSTICK)
    assert (options.margin, options.top_k) == (16.0, 1024)
    assert (options.keys, options.scales, options.env_b) == (None, None, [])
    options.device, options.flags_all = device, "--tp-size 2"
    asked = []
    monkeypatch.setattr(command, "run", lambda options, *of: asked.append(options.flags_all) or 7)
    assert COMMANDS["kv4"].run(options, [], None, None) == 7
    gpu = f"{kv4.GPU_FLAGS} " if device == "gpu" else ""
    assert asked == [f"{gpu}--tp-size 2"]
    assert options.env_b == []
    options = _parser().parse_args(["kv4", "--keys", "fp8", "--scales", "mse", "--env-b", "A=1"])
    COMMANDS["kv4"].run(options, [], None, None)
    keys, scales = (f"NUMINOUS_KV4_NVFP4_TRITON_{word}" for word in ("KEYS=fp8", "SCALES=mse"))
    assert options.env_b == ["A=1", keys, scales]
    assert _parser().parse_args(["kv4"]).env_b == []
    again = _parser().parse_args(["accuracy"])
    assert (again.features, again.yardstick, again.margin, again.top_k) == ("none", None, 3.0, None)


def test_top_k_bounds_are_stated_and_decide(bench: Bench):
    assert bench.main("--top-k", "16") == 0
    assert bench.document["method"]["distribution"] == "top k and rest"
    assert "16 most likely tokens" in bench.capsys.readouterr().out
    assert bench.main("--top-k", "16", b="--shift 0.5") == 1
    cold = next(row for row in bench.document["rows"] if row["row"] == "cold")
    assert cold["distance"]["kl_low"]["value"] < cold["distance"]["kl_high"]["value"]


def test_texts_too_short_for_their_windows_are_noted(bench: Bench):
    text = bench.folder / "short.txt"
    text.write_text("A few words, and no more than these.\n")
    assert bench.main("--text", f"prose={text}") == 2, "one sequence is no sample"
    assert "37 characters are too few for 4 windows of 24 tokens" in bench.document["notes"][0]
    assert "no tool call" in bench.document["not_measured"]["tool-call / JSON tokens"]


def test_bit_exact_mode_names_the_first_difference(bench: Bench):
    assert bench.main("--bit-exact") == 0
    assert set(bench.words().values()) == {"PASS"}
    assert bench.main("--bit-exact", b="--shift 1e-6") == 1
    assert "first difference in prose-0: sequence 0, position " in bench.capsys.readouterr().out


def test_bit_exact_mode_claims_nothing_where_stock_is_not(bench: Bench):
    # Cold, hit (two each), chunked and decode take 52 requests; the repeat begins after them.
    assert bench.main("--bit-exact", a="--wobble-from 53") == 2
    assert "stock differs from itself in" in bench.capsys.readouterr().out


def test_a_feature_that_never_engaged_cannot_pass(bench: Bench):
    assert bench.start("--features", "scheduler.other_thing") == 1
    assert bench.document["reasons"] == ["B: scheduler.other_thing never ran (no counters)"]


@pytest.mark.parametrize(
    ("log", "word", "line"),
    [
        (
            "--graph-log True",
            "PASS",
            "ran in CUDA graphs alone: it engaged 9 times while they were",
        ),
        ("--graph-log False", "FAIL", "never ran (engaged 9 at the start, no batch came from a"),
        ("", "INCONCLUSIVE", "engaged 9 times before the measurement alone, and no log shows"),
    ],
    ids=["graphs", "eager", "no log"],
)
def test_what_a_captured_feature_is_worth(bench: Bench, log: str, word: str, line: str):
    bench.start("--features", FEATURE, b=f"--captured 9 {log}")
    document = bench.document
    assert document["verdict"] == word
    lines = document["notes"] if word == "PASS" else document["reasons"]
    assert any(f"B: {FEATURE} {line}" in text for text in lines)


def test_a_fault_in_a_captured_graph_has_happened(bench: Bench):
    """It is counted at the capture, before the first request, and then never again."""
    server = ("--server-command", f"{{python}} {FAKE} sglang.launch_server --port {{port}}")
    assert bench.start(*server, "--plant", "head", b="--captured 9 --shift 0.5") == 1
    assert "cold prefill: distance beyond the limit" in bench.document["reasons"]
    assert bench.start(*server, "--plant", "head", b="--shift 0.5") == 2
    assert bench.document["reasons"] == ["the planted fault head never happened in B"]


def test_an_engaged_feature_is_counted_row_by_row(bench: Bench):
    assert bench.start("--features", FEATURE) == 0
    assert bench.document["arms"]["B"]["counters"][FEATURE]["engaged"] > 0
    assert bench.document["arms"]["A"]["counters"] == {}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--no-cache", "no cached prefix was found"),
        ("--dirty-cache", "tokens came from the cache in cold prefill"),
    ],
)
def test_a_cache_that_does_not_do_its_part_is_a_doubt(bench: Bench, flags: str, reason: str):
    assert bench.main(b=flags) == 2
    assert any(reason in line for line in bench.document["reasons"])


@pytest.mark.parametrize(
    ("flags", "extra", "message"),
    [
        ("--hang-at 3", ("--stall-timeout", "1"), "gave no answer to /generate within 1 s"),
        ("--nonsense-at 3", (), "answered nonsense to /generate"),
        ("--wrong-tokens-at 1", (), "answered nonsense to /generate"),
        ("--error-at 3", (), "answered 500 to /generate"),
        ("--stop-after 1", (), "generated 1 of 4 tokens"),
        ("--list short", (), "answered nonsense to /generate"),
        ("--list unsorted", (), "answered nonsense to /generate"),
        ("--list double", (), "answered nonsense to /generate"),
    ],
)
def test_a_server_that_fails_leaves_one_line_and_no_verdict(
    bench: Bench, flags: str, extra: tuple[str, ...], message: str
):
    assert bench.main(*extra, b=flags) == 2
    lines = bench.capsys.readouterr().err.splitlines()
    assert len([line for line in lines if message in line]) == 1
    assert bench.document["verdict"] == "INCONCLUSIVE"
    assert message in bench.document["reasons"][0]


def test_logits_that_are_no_numbers_fail(bench_with_page: Bench):
    bench = bench_with_page
    assert bench.main("--gsm8k", bench.problems(4), b="--nan-at 1") == 1
    assert bench.document["rows"] == []
    assert "no finite number" in bench.document["reasons"][0]


@pytest.mark.parametrize("shift", ["3", "-3"])
def test_probabilities_that_do_not_sum_to_one_fail(bench: Bench, shift: str):
    assert bench.main(b=f"--unnormalised {shift}") == 1
    assert "answered probabilities that sum to" in bench.document["reasons"][0]


def test_the_last_token_of_the_vocabulary_may_be_called_0(bench: Bench):
    text = bench.folder / "last.txt"
    text.write_text("\n".join(f"line {n} with the last \x7f token" for n in range(60)))
    arguments = ("--text", f"prose={text}")
    assert bench.main(*arguments, a="--last-id-is-0", b="--last-id-is-0") == 0
    assert bench.main(*arguments, b="--last-id-is-0 --shift 0.5") == 1  # values still count


def test_a_text_without_a_window_is_refused(bench: Bench):
    text = bench.folder / "short.txt"
    text.write_text("too short\n")
    assert bench.main("--text", f"prose={text}", "--bit-exact") == 2
    assert "no text gives a window of 16 tokens" in bench.capsys.readouterr().err


def test_counters_of_a_killed_run_in_the_same_folder_are_gone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    left = bench.out / "state-A" / "totals.json"
    left.parent.mkdir(parents=True)
    left.write_text("{}")
    met = []

    def reader(state_dir: Path) -> dict[str, dict[str, int]]:
        met.append((state_dir / left.name).exists())
        return {}

    monkeypatch.setattr(sys.modules[__name__], "fake_counters", reader)
    assert bench.start() == 0
    assert met
    assert not any(met)


def test_a_server_that_a_killed_run_left_behind_is_not_measured(bench: Bench):
    with serving() as url:
        port = url.rpartition(":")[2]
        assert bench.start("--port-base", port) == 2
    assert f"port {port} is in use" in bench.capsys.readouterr().err


def test_an_earlier_run_in_the_same_folder_is_no_part_of_this_one(bench: Bench):
    assert bench.main("--gsm8k", bench.problems(4)) == 0
    assert (bench.out / "gsm8k.jsonl").is_file()
    assert bench.main(b="--error-at 1") == 2
    assert sorted(path.name for path in bench.out.iterdir()) == ["verdict.json"]


def test_a_server_that_dies_leaves_one_line_and_its_log(bench: Bench):
    assert bench.start(b="--die-at 3") == 2
    error = bench.capsys.readouterr().err
    assert "gate: server B ended with exit code 3" in error
    assert error.rstrip().endswith("INCONCLUSIVE: no verdict")
    assert bench.document["verdict"] == "INCONCLUSIVE"


def test_servers_that_are_not_there(bench: Bench):
    gone = f"http://127.0.0.1:{free_port()}"
    assert main(["accuracy", "--url-a", gone, "--url-b", gone, *bench.size()]) == 2
    assert f"server A at {gone} broke off" in bench.capsys.readouterr().err


def test_a_row_that_cannot_be_measured_says_why(bench: Bench):
    with serving() as url:
        arguments = ["accuracy", "--url-a", url, "--url-b", url, *bench.size()]
        assert main(arguments) == 0
    assert "--chunked-prefill-size" in bench.document["not_measured"]["chunked prefill"]
    assert "not measured: chunked prefill" in bench.capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "prose"], "write KIND=FILE"),
        (["--text", "prose=no-such-file.txt"], "No such file"),
        (["--gsm8k", "no-such-file.jsonl"], "No such file"),
        (["--gsm8k-count", "3"], "need --gsm8k FILE"),
        (["--url-a", "http://localhost:1"], "go together"),
        (
            ["--url-a", "http://a", "--url-b", "http://b", "--plant", "head"],
            "--plant is for servers",
        ),
        (
            ["--plant", "head", "--server-command", "x {port}", "--model", "m"],
            "sglang.launch_server",
        ),
        (["--bit-exact", "--concurrency", "2"], "one sequence at a time"),
        (["--decode-tokens", "1"], "the first token comes from the prefill"),
        (["--tokens", "3"], "a sequence has at least 16 tokens"),
        (["--seed=-1"], "want a whole number from 0 on"),
        (["--yardstick", "--some flag", "--bit-exact"], "has no meaning with --bit-exact"),
        (["--yardstick", " "], "--yardstick names server flags"),
        (
            ["--url-a", "http://a", "--url-b", "http://b", "--yardstick", "--some flag"],
            "--yardstick is for servers",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(bench: Bench, arguments, message):
    assert main(["accuracy", "--device", "gpu", "--out", str(bench.out), *arguments]) == 2
    error = bench.capsys.readouterr().err.strip()
    assert error.startswith("gate: ")
    assert message in error
    assert "\n" not in error
    assert not bench.out.exists()


def test_a_fault_is_planted_by_another_main_module_in_b_only():
    template = ("{python}", "-m", "sglang.launch_server", "--port", "{port}")
    planted = (*template[:2], "numinous_tooling.engine.planted", "head", *template[3:])
    assert command._planted(template, "head") == planted
    assert command._planted(template, None) == template


def test_an_unknown_fault_is_one_line():
    line = [sys.executable, "-m", "numinous_tooling.engine.planted", "--port", "1"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "planted: '--port' is no fault; write one of kv-scale, head, page first"
    ]
