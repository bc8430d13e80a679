# SPDX-License-Identifier: Apache-2.0
"""Finished runs become evidence: what is taken, what is null, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from numinous_tooling import evidence
from numinous_tooling.gate.__main__ import main

COMMIT = "0123456789abcdef0123456789abcdef01234567"
VERSIONS = {
    "sglang": "0.5.20",
    "torch": "2.13.0",
    "triton": "3.6.0",
    "cuda": "13.0",
    "numinous-tooling": "0.1.0",
    "numinous-scheduler": "0.2.0",
}
COUNTERS = {"scheduler.decode_burst": {"engaged": 7}}


def common(**more: Any) -> dict[str, Any]:
    return {
        "verdict": "FAIL",
        "reasons": ["time to first token: worse", "and more"],
        "features": ["scheduler.decode_burst"],
        "model": "/models/small",
        "machine": {"cpu": "X", "cores": 2, "gpus": ["NVIDIA H200"] * 2, "driver": "580.1"},
        "git": {"commit": COMMIT, "dirty": True},
        "command": "python -m numinous_tooling.gate --x",
        "started_utc": "2026-01-01T00:00:00Z",
        **more,
    }


def arm(letter: str, **more: Any) -> dict[str, Any]:
    label = {"A": "stock", "B": "patched", "C": "stock --y"}[letter]
    return {"label": label, "versions": dict(VERSIONS), **more}


def serving() -> dict[str, Any]:
    def figures(tok_s: float) -> dict[str, Any]:
        pooled = {"requests": 8, "output_tok_s": tok_s, "tok_s_user": {"p50": tok_s / 2}}
        pooled |= {"ttft_s": {"p50": 0.1}, "tpot_s": {"p50": None}, "cache_hit_rate": 0.5}
        pooled |= {"errors": 1, "short_answers": 2}
        return {"pooled": pooled, "counters": COUNTERS, "counters_at_start": {}}

    metric = {"metric": "ttft", "word": "FAIL", "change": 0.2, "low": 0.1, "high": 0.3}
    metric |= {"noise": 0.02, "tolerance": 0.05, "label": "left out"}
    return common(
        schema=2,
        order="ABBA",
        length_scale=0.5,
        workload={"kind": "closed", "sessions": 4, "turns": 2, "concurrency": 3, "clients": 2},
        arms={letter: arm(letter, figures=figures(5.0 + ord(letter))) for letter in "ABC"},
        comparisons=[
            {"base": base, "test": test, "word": "FAIL", "metrics": [metric]}
            for base, test in ("AB", "AC", "CB")
        ],
        runs=[{"client_lag_p99_s": lag} for lag in (0.001, 0.004)],
    )


def accuracy() -> dict[str, Any]:
    row = {"row": "cold", "unit": "nats", "word": "PASS", "figure": 1e-6, "low": 0.0, "high": 2e-6}
    return common(
        schema=1,
        gate="accuracy",
        plant="head",
        method={"distribution": "full vocabulary"},
        workload={"sequences": 16, "tokens": 64, "decode_tokens": 12},
        arms={
            letter: arm(letter, counters=COUNTERS, counters_at_start={"plant.head": {"engaged": 1}})
            for letter in "AB"
        },
        rows=[{**row, "floor": 0.0, "limit": 3e-5, "reason": "left out"}],
    )


def cliff() -> dict[str, Any]:
    frontier = {"4096": {"holds": 8, "fails": 9, "disputed": [], "inversions": []}}
    return common(
        schema=1,
        contexts=[4096],
        limit_tok_s_user=20.0,
        order="AB",
        pool={"bytes": 1},
        arms={letter: arm(letter, frontier=frontier) for letter in "AB"},
        searches=[
            {"arm": letter, "probes": [{}] * 3, "counters": COUNTERS if letter == "B" else {}}
            for letter in "AB"
        ],
    )


KINDS = {"serving": serving, "accuracy": accuracy, "cliff": cliff}


@pytest.fixture
def record(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Write documents into run folders and record them; exit code, stderr, and the records of FILE."""

    def run(*documents: dict[str, Any], name: str = "run") -> tuple[int, str, list[dict]]:
        folders = []
        for index, document in enumerate(documents):
            folder = tmp_path / f"{name}{index}"
            folder.mkdir(exist_ok=True)
            file = "cliff.json" if "limit_tok_s_user" in document else "verdict.json"
            (folder / file).write_text(json.dumps(document))
            folders.append(str(folder))
        file = tmp_path / "out.jsonl"
        code = main(["record", *folders, "--evidence", str(file)])
        found = evidence.load(file) if file.exists() else []
        return code, capsys.readouterr().err, found

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_becomes_one_record_that_holds(record, kind: str) -> None:
    code, _, (made,) = record(KINDS[kind]())
    assert code == 0
    assert (made["op"], made["package"], made["version"]) == (f"gate_{kind}", "tooling", "0.1.0")
    assert (made["gpu"], made["driver"], made["cuda"]) == ("NVIDIA H200", "580.1", "13.0")
    assert (made["torch"], made["triton"], made["engine"]) == ("2.13.0", "3.6.0", "sglang 0.5.20")
    assert (made["commit"], made["dirty"]) == (COMMIT, True)
    assert made["packages"] == {"numinous-tooling": "0.1.0", "numinous-scheduler": "0.2.0"}
    assert made["gate"] == "FAIL: time to first token: worse; and more"
    assert made["case"].startswith("small ")
    assert made["counters"] == COUNTERS
    assert made["provider"].endswith("against A stock")


def test_figures_of_each_kind(record) -> None:
    _, _, (load, tokens, users) = record(serving(), accuracy(), cliff())
    assert (load["n"], load["a_output_tok_s"], load["b_output_tok_s"]) == (24, 70.0, 71.0)
    assert (load["c_ttft_p50_ms"], load["b_tpot_p50_ms"], load["b_bad_answers"]) == (100.0, None, 3)
    assert list(load["changes"]) == ["B against A", "C against A", "B against C"]
    assert load["changes"]["B against A"]["ttft"]["high"] == 0.3
    assert (load["clients"], load["client_lag_p99_ms"]) == (2, 4.0)
    assert (tokens["n"], tokens["rows"][0]["limit"], tokens["plant"]) == (16, 3e-5, "head")
    assert tokens["provider"] == "B patched, planted head against A stock"
    assert (users["n"], users["a_frontier"]["4096"]["holds"]) == (6, 8)


def test_options_of_the_features_that_an_arm_had(record) -> None:
    document = accuracy()
    document["features"] = ["kv4.nvfp4_triton"]
    document["arms"]["B"]["env"] = {
        "NUMINOUS_KV4_NVFP4_TRITON": "1",
        "NUMINOUS_KV4_NVFP4_TRITON_SCALES": "mse",
        "NUMINOUS_KV4_NVFP4_TRITON_KEYS": "fp8",
        "NUMINOUS_KV4_OTHER_KEYS": "no",
        "HOME": "no",
    }
    _, _, (made,) = record(document)
    assert made["options"] == "KEYS=fp8 SCALES=mse"
    _, _, (*_, other) = record(accuracy() | {"utc": "2026", "command": "another"})
    assert "options" not in other


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_run_did_not_write_down_is_null(record, kind: str) -> None:
    document = KINDS[kind]()
    del document["machine"]["driver"]
    del document["arms"]["B"]["versions"]["cuda"]
    document["git"] = None
    code, _, (made,) = record(document)
    assert code == 0
    names = ("driver", "cuda", "commit", "dirty")
    assert [made[name] for name in names] == [None] * 4


def without_gpu(document: dict[str, Any]) -> None:
    document["machine"]["gpus"] = []


def without_engine(document: dict[str, Any]) -> None:
    document["arms"]["B"]["versions"] = None


def without_measurement(document: dict[str, Any]) -> None:
    for name in ("comparisons", "rows"):
        document.pop(name, None)
    for known in document["arms"].values():
        known["frontier"] = {}


def of_another_schema(document: dict[str, Any]) -> None:
    document["schema"] = 99


def without_a_field(document: dict[str, Any]) -> None:
    del document["features"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (without_gpu, "names no GPU"),
        (without_engine, "names no engine version of arm B"),
        (without_measurement, "ended without a measurement"),
        (of_another_schema, "has schema 99"),
        (without_a_field, "lacks what a verdict holds (KeyError('features'))"),
    ],
)
def test_what_is_no_evidence_is_refused_in_one_line(record, kind: str, fault, said: str) -> None:
    document = KINDS[kind]()
    fault(document)
    # Beside one that is right: nothing of a refused call is written.
    code, error, records = record(serving() | {"command": "another"}, document)
    assert (code, records) == (2, [])
    assert said in error
    assert error.count("\n") == 1


def test_a_run_is_recorded_once(record) -> None:
    assert record(serving())[0] == 0
    code, error, records = record(serving())
    assert (code, len(records)) == (2, 1)
    assert f"is recorded already, {records[0]['id']} in" in error
    assert record(accuracy(), accuracy(), name="twice")[0] == 2
    # Another run of the same options is another run.
    code, _, records = record(serving() | {"started_utc": "2026-01-02T00:00:00Z"})
    assert (code, len(records)) == (0, 2)


def test_records_lie_in_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "verdict.json").write_text(json.dumps(serving()))
    monkeypatch.chdir(run)
    assert main(["record", "."]) == 2
    assert "give --evidence FILE" in capsys.readouterr().err
    for folder in ("evidence", "packages"):
        (tmp_path / folder).mkdir()
    assert main(["record", "."]) == 0
    assert len(evidence.load(tmp_path / "evidence" / "gate" / "serving.jsonl")) == 1
