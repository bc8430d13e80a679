# SPDX-License-Identifier: Apache-2.0
"""The store of A/A noise floors: one per setting, never that of another, and what a gate run does with it."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from numinous_tooling.gate import floor
from numinous_tooling.gate.__main__ import main
from numinous_tooling.gate.arms import Arm
from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.measures import METRICS, ArmRun
from numinous_tooling.gate.simulate import Load, Server, gate_run
from numinous_tooling.gate.verdict import Noise, compare
from numinous_tooling.gate.workload_traces import MooncakeSpec

FAKE = Path(__file__).with_name("gate_fake_server.py")
NEEDED = ("--num-continuous-decode-steps", "8")


def arm(*flags: str, letter: str = "A", features: tuple[str, ...] = (), **env: str) -> Arm:
    return Arm(letter, letter, "python", env, flags, features)


def setting(stock: Arm, features: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "model": "/models/m",
        "command": ("{python}", "-m", "server"),
        "versions": {"sglang": "0.5.20"},
        "workload": {"sessions": 4, "turns": 2, "seed": 0, "concurrency": 4},
        "machine": {"cpu": "X", "cores": 2, "gpus": ["G"], "system": "left out"},
        "driver": "1.0",
    }
    return floor.setting_of(stock, features, **(known | changes))


def test_seed_and_flags_of_features_are_no_part_of_a_setting() -> None:
    plain = setting(arm("--x", "1"))
    assert plain == setting(
        arm("--x", "1"), workload={"seed": 9, "sessions": 4, "turns": 2, "concurrency": 4}
    )
    assert plain == setting(arm(*NEEDED, "--x", "1"), ("scheduler.decode_burst",))
    # Given by hand they are the setting's own.
    assert plain != setting(arm(*NEEDED, "--x", "1"))
    assert "seed" not in plain["workload"]


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "/models/other"},
        {"versions": {"sglang": "0.5.21"}},
        {"workload": {"sessions": 5, "turns": 2, "concurrency": 4}},
        {"machine": {"cpu": "X", "cores": 2, "gpus": ["H"]}},
        {"driver": "2.0"},
        {"command": ("vllm", "serve")},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_floor_of_another_setting_is_not_used(tmp_path: Path, changes: dict[str, Any]) -> None:
    stored = floor.load(tmp_path, setting(arm("--x")))
    stored.add("2026-01-01T00:00:00Z", "out", {"tpot": Noise(0.01, 3)})
    assert floor.load(tmp_path, setting(arm("--x"))).noise() == {"tpot": Noise(0.01, 3)}
    assert floor.load(tmp_path, setting(arm("--x"), **changes)).noise() == {}
    for other in (arm("--y"), arm("--x", SGLANG_X="1")):
        assert floor.load(tmp_path, setting(other)).described()["used"] is False


def test_a_trace_is_told_by_its_content(tmp_path: Path) -> None:
    """Two recordings of one name are two settings."""
    described = []
    for rows in ("1", "2"):
        (tmp_path / rows).mkdir()
        trace = tmp_path / rows / "trace.jsonl"
        trace.write_text(rows)
        described.append(
            MooncakeSpec(trace=trace, requests=1, length_scale=1.0, speedup=1.0, seed=0).describe()
        )
    first, second = (setting(arm(), workload=workload) for workload in described)
    assert described[0]["trace"] == described[1]["trace"]
    assert first != second


def test_runs_are_pooled_by_their_degrees_of_freedom(tmp_path: Path) -> None:
    here = setting(arm())
    stored = floor.load(tmp_path, here)
    stored.add("2026-01-01T00:00:00Z", "first", {"tpot": Noise(0.01, 3), "ttft": Noise(0.1, 3)})
    floor.load(tmp_path, here).add("2026-01-02T00:00:00Z", "second", {"tpot": Noise(0.03, 7)})
    again = floor.load(tmp_path, here)
    pooled = again.noise()["tpot"]
    assert (pooled.sd, pooled.df) == (pytest.approx(((3 * 0.01**2 + 7 * 0.03**2) / 10) ** 0.5), 10)
    assert again.noise()["ttft"] == Noise(pytest.approx(0.1), 3)
    assert [run["source"] for run in again.described()["aa_runs"]] == ["first", "second"]
    document = json.loads(again.file.read_text())
    assert document["setting"]["model"] == "/models/m"
    assert list(tmp_path.iterdir()) == [again.file]


@pytest.mark.parametrize(
    "fault",
    ["nonsense", "bytes", "list", "schema", "setting", "df", "nan", "huge", "source", "metrics"],
)
def test_file_that_is_not_this_floor_is_refused(tmp_path: Path, fault: str) -> None:
    here = setting(arm())
    stored = floor.load(tmp_path, here)
    stored.add("2026-01-01T00:00:00Z", "out", {"tpot": Noise(0.01, 3)})
    document = json.loads(stored.file.read_text())
    noise = document["runs"][0]["metrics"]["tpot"]
    match fault:
        case "schema":
            document["schema"] = 0
        case "setting":
            document["setting"]["model"] = "/models/other"
        case "df":
            noise["df"] = 0
        case "nan":
            noise["sd"] = float("nan")
        case "huge":
            noise["sd"] = 1e300
        case "source":
            del document["runs"][0]["source"]
        case "metrics":
            document["runs"][0]["metrics"] = {"tpot": []}
    damaged = {"nonsense": b"{", "bytes": b"\xff", "list": b"[]"}
    stored.file.write_bytes(damaged.get(fault, json.dumps(document).encode()))
    with pytest.raises(GateError, match=r"is no noise floor of this setting; remove it"):
        floor.load(tmp_path, here)


def test_two_runs_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    first, second = (floor.load(tmp_path, setting(arm())) for _ in range(2))
    first.add("2026-01-01T00:00:00Z", "first", {"tpot": Noise(0.01, 3)})
    second.add("2026-01-01T00:00:01Z", "second", {"tpot": Noise(0.01, 3)})
    stored = floor.load(tmp_path, setting(arm()))
    assert [run["source"] for run in stored.runs] == ["first", "second"]
    assert stored.noise()["tpot"].df == 6
    assert [file.name for file in tmp_path.iterdir()] == [stored.file.name]


def test_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    stored = floor.Floor(tmp_path / "file" / "floors", setting(arm()))
    with pytest.raises(GateError, match="--floor-dir"):
        stored.add("2026-01-01T00:00:00Z", "out", {})


def test_default_folder_follows_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMINOUS_CACHE", "/somewhere")
    assert floor.default_folder() == Path("/somewhere/gate-floors")
    monkeypatch.delenv("NUMINOUS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert floor.default_folder() == Path("/xdg/numinous/gate-floors")


def test_only_equal_arms_are_a_floor() -> None:
    stock = arm("--x", SGLANG_PLUGINS="numinous-none")
    again = arm("--x", letter="B")
    assert floor.is_same_against_same({"A": stock, "B": again})
    for other in (
        arm("--y", letter="B"),
        arm("--x", letter="B", SGLANG_X="1"),
        arm("--x", letter="B", features=("scheduler.decode_burst",)),
        replace(again, python="other"),
    ):
        assert not floor.is_same_against_same({"A": stock, "B": other})


def virtual_runs(order: str = "ABBA", **server: float) -> list[ArmRun]:
    servers = {"A": Server(**server), "B": Server(**server)}
    return gate_run(order, servers, 1.0, Load(), random.Random(1))


def test_doubtful_runs_are_no_floor() -> None:
    noise = floor.noise_of_run(virtual_runs(), METRICS, None)
    assert {name: n.df for name, n in noise.items()} == {"tok_s_user": 3, "ttft": 3, "tpot": 3}
    assert floor.noise_of_run(virtual_runs("AB"), METRICS, None) == {}
    lagged = virtual_runs()
    lagged[2].lag_p99_s = 1.0
    assert floor.noise_of_run(lagged, METRICS, None) == {}
    failed = virtual_runs()
    failed[0].records[0] = replace(failed[0].records[0], error="HTTP 500")
    assert floor.noise_of_run(failed, METRICS, None) == {}


def test_stored_noise_is_what_a_later_run_is_judged_by(tmp_path: Path) -> None:
    here = setting(arm())
    noisy = floor.noise_of_run(virtual_runs(start_sd=0.2), METRICS, None)
    floor.load(tmp_path, here).add("2026-01-01T00:00:00Z", "aa", noisy)
    quiet = virtual_runs(start_sd=0.001)
    tolerances = dict.fromkeys((metric.name for metric in METRICS), 0.2)
    alone = compare(quiet, "A", "B", features=(), tolerances=tolerances)
    floored = compare(
        quiet,
        "A",
        "B",
        features=(),
        tolerances=tolerances,
        floor=floor.load(tmp_path, here).noise(),
    )
    assert (alone.word, floored.word) == ("PASS", "INCONCLUSIVE")


def gate(tmp_path: Path, out: str, *extra: str) -> tuple[int, dict[str, Any]]:
    command = f"{{python}} {FAKE} --port {{port}} --notes {tmp_path / 'notes'}"
    code = main(
        [
            "serving",
            *("--server-command", command, "--model", str(tmp_path / "model"), "--device", "cpu"),
            *("--sessions", "2", "--turns", "2", "--length-scale", "1/64", "--speedup", "500"),
            *(
                "--max-client-lag",
                "60000",
                "--max-uneven-load",
                "99",
                "--tolerance",
                "1e6",
                "--out",
                str(tmp_path / out),
            ),
            *("--floor-dir", str(tmp_path / "floors"), "--python-a", sys.executable),
            *extra,
        ],
        counters_reader=lambda _folder: {"scheduler.decode_burst": {"engaged": 1}},
    )
    return code, json.loads((tmp_path / out / "verdict.json").read_text())


def test_gate_stores_a_floor_and_uses_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "model").mkdir()
    config = {"max_position_embeddings": 4096, "vocab_size": 4000}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))

    code, first = gate(tmp_path, "aa", "--features", "none", "--slo", "ttft=100", "--price", "2")
    assert code == 0, capsys.readouterr().out
    assert first["noise_floor"]["stored"]
    assert not first["noise_floor"]["used"]
    goodput = first["comparisons"][0]["metrics"][-1]
    assert (goodput["metric"], goodput["change"]) == ("goodput", 0.0)
    pooled = first["arms"]["A"]["figures"]["pooled"]
    assert pooled["goodput"]["request_share"] == 1.0
    assert pooled["usd_per_m_output"] > 0
    assert first["comparisons"][0]["metrics"][0]["floor"] is None

    # Of the same setting, with another seed; one repeat decides nothing, but the floor is found.
    code, second = gate(tmp_path, "ab", "--order", "AB", "--seed", "4", "--features", "none")
    assert second["noise_floor"]["used"]
    assert second["noise_floor"]["aa_runs"][0]["source"] == str(tmp_path / "aa")
    assert set(second["noise_floor"]["metrics"]) == {"tok_s_user", "ttft", "tpot"}
    assert not second["noise_floor"]["stored"]
    _, third = gate(tmp_path, "other", "--order", "AB", "--turns", "3", "--features", "none")
    assert not third["noise_floor"]["used"]
    assert len(list((tmp_path / "floors").iterdir())) == 1


def test_floor_that_cannot_be_stored_leaves_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "model").mkdir()
    config = {"max_position_embeddings": 4096, "vocab_size": 4000}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))

    def add(*_: object) -> None:
        raise GateError("the noise floor cannot be stored in planted")

    monkeypatch.setattr(floor.Floor, "add", add)
    code, document = gate(tmp_path, "aa", "--features", "none")
    assert (code, document["verdict"]) == (0, "PASS"), capsys.readouterr().out
    assert not document["noise_floor"]["stored"]
    assert "the noise floor cannot be stored in planted" in document["notes"]
