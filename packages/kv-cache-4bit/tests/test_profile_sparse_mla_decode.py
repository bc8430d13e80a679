# SPDX-License-Identifier: Apache-2.0
"""The profile script: what it reads from ncu's CSV. The CSV is written by hand in ncu's format; no GPU has been profiled here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from numinous_kv_cache_4bit.workbench.sparse_mla_decode import OP, Case
from numinous_tooling import evidence
from numinous_tooling.bench import facts
from numinous_tooling.bench.clocks import CpuClock

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",'
    '"Section Name","Metric Name","Metric Unit","Metric Value"\n'
)


def row(launch: int, kernel: str, metric: str, unit: str, value: str) -> str:
    where = f'"{launch}","77","python3.11","127.0.0.1","{kernel}","1","7","(512, 1, 1)","(128, 1, 1)","0","9.0"'
    return f'{where},"Command line profiler metrics","{metric}","{unit}","{value}"\n'


STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
CSV = (
    "==PROF== Connected to process 77 (/usr/bin/python3.11)\n",
    '==PROF== Profiling "wide" - 0: 0%....50%....100% - 9 passes\n',
    HEAD,
    row(0, "wide(numinous::Params)", "gpu__time_duration.sum", "ns", "60,000"),
    row(0, "wide(numinous::Params)", "dram__bytes_read.sum", "byte", "46,137,344"),
    row(0, "wide(numinous::Params)", "dram__bytes_write.sum", "byte", "0"),
    row(0, "wide(numinous::Params)", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "%", "71.5"),
    row(0, "wide(numinous::Params)", "lts__t_bytes.sum", "byte", "n/a"),
    row(0, "wide(numinous::Params)", STALL.format("gmma"), "inst", "1.25"),
    row(0, "wide(numinous::Params)", STALL.format("long_scoreboard"), "inst", "3.75"),
    row(1, "combine(numinous::Params)", "gpu__time_duration.sum", "ns", "4,000"),
    row(2, "wide(numinous::Params)", "gpu__time_duration.sum", "ns", "64,000"),
    row(2, "wide(numinous::Params)", STALL.format("long_scoreboard"), "inst", "4.25"),
    "==PROF== Disconnected from process 77\n",
)  # fmt: skip


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks/profile_sparse_mla_decode.py"
    spec = importlib.util.spec_from_file_location("profile_sparse_mla_decode", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_csv(script: ModuleType) -> None:
    """Means over a kernel's launches, throughput from bytes and time, stalls largest first, nothing for what was not measured."""
    found = script.parse_csv(CSV)
    assert list(found) == ["wide", "combine"]
    wide = script.summary(found["wide"])
    assert wide["time_us"] == 62.0
    assert wide["tensor_cycles_percent"] == 71.5
    assert wide["dram_bytes_s"] == pytest.approx(46_137_344 / 62e-6)
    assert list(wide["stalls"].items()) == [("long_scoreboard", 4.0), ("gmma", 1.25)]
    assert "l2_bytes" not in wide
    assert "l2_bytes_s" not in wide
    assert script.summary(found["combine"]) == {"time_us": 4.0, "stalls": {}}


def test_laps(script: ModuleType) -> None:
    """Means over the blocks that wrote, by warpgroup."""
    debug = torch.full((3, 4, 16), torch.nan)
    debug[:2] = 0.0
    debug[:2, 2, 0], debug[0, 2, 3], debug[:2, :, 15] = 5.0, 8.0, 16.0
    lines = script.laps_lines(debug)
    assert lines[2] == "producer 0: empty 5, issue 4; all 0 of 16 tiles"
    assert lines[0].startswith("consumer 0:")


def test_records(script: ModuleType, tmp_path: Path) -> None:
    """A record per kernel that evidence takes and loads again."""
    common = facts.run_facts(CpuClock(), {})
    made = script.records(script.parse_csv(CSV), Case(64, 64, 2048), common, "profile")
    evidence.append(tmp_path / "profile.jsonl", made)
    read = evidence.load(tmp_path / "profile.jsonl")
    assert [(one["provider"], one["n"]) for one in read] == [("wide", 2), ("combine", 1)]
    assert read[0]["case"] == "requests64-heads64-topk2048"
    assert "long_scoreboard 4.00" in script.line(read[0])


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (CSV[:2], "no line begins with"),
        (CSV[:3], "no launch was profiled"),
        ((HEAD, row(0, "wide", "gpu__time_duration.sum", "usecond", "60")), "--print-units base"),
        (('"ID","Kernel Name","gpu__time_duration.sum"\n',), "--page raw is not read"),
    ],
)
def test_refused_csv(
    script: ModuleType, lines: Any, text: str, tmp_path: Path, capsys: Any
) -> None:
    with pytest.raises(ValueError, match=text):
        script.parse_csv(lines)
    (tmp_path / "case.csv").write_text("".join(lines))
    assert script.main(["--summary", str(tmp_path / "case.csv")]) == 2
    assert text in capsys.readouterr().err


def test_command_line(script: ModuleType, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """Names for ncu without a doubt in them; without a GPU nothing runs and nothing is recorded."""
    assert script.main(["--metrics"]) == 0
    names = capsys.readouterr().out.strip().split(",")
    assert len(names) == len(set(names)) > 30
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main(["--heads", "16"]) == 2
    (tmp_path / "case.csv").write_text("".join(CSV))
    arguments = ["--batch", "8", "--summary", str(tmp_path / "case.csv")]
    assert script.main(arguments) == 0
    assert "wide, 2 launches: time_us 62" in capsys.readouterr().out
    assert script.main([*arguments, "--evidence", str(tmp_path / "made.jsonl")]) == 2
    assert not (tmp_path / "made.jsonl").exists()


def test_loop(script: ModuleType, monkeypatch: Any) -> None:
    """The case that flags name is what runs, that often."""
    ran: list[Case] = []

    class Seen:
        @staticmethod
        def run(case: Case, inputs: Any) -> None:
            assert inputs["q"].shape == (2, 3, 8, 576)
            ran.append(case)

    monkeypatch.setitem(OP.implementations, "cuda", Seen)
    script.loop(Case(2, 8, 70, 656, 3), 4, torch.device("cpu"))
    assert ran == [Case(2, 8, 70, 656, 3)] * 4
