# SPDX-License-Identifier: Apache-2.0
"""Evidence records: complete or refused; tables follow the records; every record of the checkout is valid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from numinous_tooling import evidence

RECORD = dict.fromkeys(evidence.COMMON_FIELDS, "x") | {
    "op": "decode_burst",
    "gpu": "NVIDIA H200",
    "n": 3,
    "ms": 1.23456,
}


def test_append_load_and_table(tmp_path):
    path = tmp_path / "evidence" / "scheduler" / "a.jsonl"
    evidence.append(path, [RECORD, RECORD | {"provider": "stock", "ms": 1234.5, "n": None}])
    records = evidence.load(path)
    assert records[0]["id"].startswith("decode_burst-")
    assert records[0]["id"] != records[1]["id"]
    text = "a\n<!-- evidence: scheduler/a.jsonl columns=provider,ms,n -->\nold\n<!-- /evidence -->\nb\n"
    rendered = evidence.render(text, tmp_path / "evidence")
    assert "| x | 1.23 | 3 |" in rendered
    assert "| stock | 1234 |  |" in rendered
    assert evidence.render(rendered, tmp_path / "evidence") == rendered
    only = evidence.render(
        text.replace("ms,n -->", "ms where=provider=stock -->"), tmp_path / "evidence"
    )
    assert "1.23" not in only


@pytest.mark.parametrize("name", ["gpu", "commit", "command", "n"])
def test_incomplete_records_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=name):
        evidence.append(tmp_path / "a.jsonl", [{k: v for k, v in RECORD.items() if k != name}])
    assert not (tmp_path / "a.jsonl").exists()


def test_a_changed_number_breaks_its_id(tmp_path):
    path = tmp_path / "a.jsonl"
    evidence.append(path, [RECORD])
    path.write_text(path.read_text().replace("1.23456", "9.0"))
    with pytest.raises(ValueError, match=r"a\.jsonl:1: id .* does not belong"):
        evidence.load(path)


def test_stale_table_fails_the_check(tmp_path, capsys):
    (tmp_path / "packages").mkdir()
    evidence.append(tmp_path / "evidence" / "a.jsonl", [RECORD])
    readme = tmp_path / "README.md"
    readme.write_text("<!-- evidence: a.jsonl columns=ms -->\n<!-- /evidence -->\n")
    assert evidence.main(["--check", str(readme)]) == 1
    assert "+| 1.23 |" in capsys.readouterr().out
    assert evidence.main([str(readme)]) == 0
    assert evidence.main(["--check", str(readme)]) == 0


def test_every_record_and_every_table_of_this_checkout():
    root = Path(__file__).parents[3]
    for path in sorted((root / "evidence").rglob("*.jsonl")):
        assert evidence.load(path), path
        assert len({json.dumps(r) for r in evidence.load(path)}) == len(evidence.load(path)), (
            f"{path}: a line twice"
        )
    readmes = [*root.glob("*.md"), *root.glob("packages/*/README.md"), *root.glob("docs/*.md")]
    assert evidence.main(["--check", *map(str, readmes)]) == 0


def test_a_gate_verdict_becomes_one_record_per_arm(tmp_path):
    figures = {"requests": 8, "output_tok_s": 5.0, "cache_hit_rate": 0.5}
    figures |= {"tok_s_user": {"p50": 2.0}, "ttft_s": {"p50": 0.1}, "tpot_s": {"p50": 0.01}}
    arm = {
        "label": "stock",
        "versions": {"sglang": "0.5.20"},
        "figures": {"pooled": figures, "counters": {}},
    }
    verdict = {
        "machine": {"gpus": [], "cpu": "X", "cores": 2},
        "workload": {"sessions": 4, "turns": 2},
        "arms": {"A": arm, "B": arm | {"label": "patched"}},
        "model": "/models/m",
        "length_scale": 0.0625,
        "order": "ABBA",
        "verdict": "PASS",
        "comparisons": [],
        "command": "x",
        "started_utc": "2026-01-01T00:00:00Z",
    }
    facts = {"commit": "c", "dirty": False, "driver": "none", "cuda": None}
    records = evidence.from_verdict(verdict, package="tooling", version="0.1.0", **facts)
    evidence.append(tmp_path / "a.jsonl", records)
    first, second = evidence.load(tmp_path / "a.jsonl")
    assert (first["provider"], second["provider"]) == ("A stock", "B patched")
    assert first["gpu"] == "cpu: X, 2 cores"
    assert first["ttft_p50_ms"] == 100
