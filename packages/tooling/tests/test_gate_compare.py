# SPDX-License-Identifier: Apache-2.0
"""`numinous gate compare`: two runs that agree, that differ, that are none; and the pages that reports are made of."""

from __future__ import annotations

import base64
import copy
import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("scipy")
pytest.importorskip("statsmodels")
pytest.importorskip("matplotlib")

from numinous_tooling.gate import page
from numinous_tooling.gate.__main__ import main


def serving(change: float = 0.1, half: float = 0.05, **more: Any) -> dict[str, Any]:
    metric = {
        "metric": "ttft",
        "label": "time to first token",
        "scale": "ratio",
        "word": "PASS",
        "change": change,
        "low": (1 + change) / (1 + half) - 1,
        "high": (1 + change) * (1 + half) - 1,
    }
    return {
        "schema": 2,
        "verdict": "PASS",
        "reasons": ["no metric is worse than its tolerance"],
        "features": ["scheduler.decode_burst"],
        "model": "/models/small",
        "order": "ABBA",
        "workload": {"kind": "agents", "seed": 0},
        "arms": {"A": {"label": "stock", "flags": ["--x"], "figures": {"pooled": change}}},
        "comparisons": [{"base": "A", "test": "B", "metrics": [metric]}],
        "machine": {"gpus": ["NVIDIA H200"]},
        "elapsed_s": change,
        **more,
    }


def accuracy(figure: float = 1e-4, half: float = 1e-5, **more: Any) -> dict[str, Any]:
    row = {"row": "cold", "label": "cold prefill", "unit": "nats", "word": "PASS", "figure": figure}
    decides = {
        "row": "exact_match",
        "label": "exact match",
        "unit": "points",
        "word": "INCONCLUSIVE",
    }
    rows = [
        {**row, "low": figure - half, "high": figure + half},
        {**decides, "figure": 0.0, "low": None, "high": None},
    ]
    return {
        "schema": 1,
        "gate": "accuracy",
        "verdict": "PASS",
        "reasons": [],
        "rows": rows,
        "arms": {},
        **more,
    }


@pytest.fixture
def compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Write two documents, compare them; exit code, stdout, stderr."""

    def run(*documents: Any, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
        folders = []
        for index, document in enumerate(documents):
            folder = tmp_path / f"run{index}"
            folder.mkdir(exist_ok=True)
            text = document if isinstance(document, str) else json.dumps(document)
            (folder / "verdict.json").write_text(text)
            folders.append(str(folder))
        code = main(["compare", *folders, *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.parametrize("kind", [serving, accuracy])
def test_a_run_agrees_with_itself(compare, kind):
    code, out, _ = compare(kind(), kind())
    assert code == 0
    assert "settings that differ" not in out
    assert out.endswith("RUN1 PASS, RUN2 PASS; the runs agree: yes\n")


def test_figures_further_apart_than_their_intervals_differ(compare):
    """Two intervals of 5 % allow about 7 %: not half of it each, not the sum of both."""
    assert compare(serving(0.10), serving(0.17))[0] == 0
    code, out, _ = compare(serving(0.10), serving(0.19))
    assert code == 1
    assert re.search(r"B against A: time to first token +\+10.0 % .* \+19.0 % .* NO\n", out)
    assert compare(accuracy(1e-4), accuracy(1.13e-4))[0] == 0
    assert compare(accuracy(1e-4), accuracy(1.2e-4))[0] == 1


def test_another_verdict_differs_even_with_equal_figures(compare):
    code, out, _ = compare(serving(), serving(verdict="FAIL"))
    assert (code, "RUN1 PASS, RUN2 FAIL; the runs agree: no" in out) == (1, True)


def test_settings_that_differ_are_listed_and_no_others(compare):
    other = serving(elapsed_s=99, machine={"gpus": ["NVIDIA H100"]})
    other["workload"]["seed"] = 7
    other["arms"]["A"]["flags"] = []
    code, out, _ = compare(serving(), other, options=("--json",))
    assert code == 0
    assert json.loads(out)["settings"] == {
        "workload.seed": ["0", "7"],
        "arms.A.flags": ['["--x"]', "[]"],
        "machine.gpus": ['["NVIDIA H200"]', '["NVIDIA H100"]'],
    }


def test_a_figure_that_only_one_run_judged_is_shown(compare):
    other = copy.deepcopy(serving())
    other["comparisons"][0]["metrics"].append(
        {**other["comparisons"][0]["metrics"][0], "label": "stalls", "scale": "share"}
    )
    code, out, _ = compare(serving(), other)
    assert code == 0
    assert re.search(r"stalls +not judged", out)


def test_an_interval_without_a_lower_end_agrees_with_everything(compare):
    wide = serving(9.0)
    wide["comparisons"][0]["metrics"][0] |= {"low": -1.0, "high": 1e20}
    assert compare(serving(0.1), wide)[0] == 0


def test_runs_without_a_common_interval_do_not_agree(compare):
    one_repeat = serving()
    one_repeat["comparisons"][0]["metrics"][0] |= {"low": None, "high": None}
    code, out, error = compare(one_repeat, serving())
    assert code == 2
    assert "time to first token" in out
    assert "the runs agree" not in out
    assert "nothing was compared: no figure has an interval in both runs" in error


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (serving(), accuracy(), "is a run of the serving gate"),
        (serving(), "{", "is no JSON"),
        (serving(), "[]", "is no verdict of a gate"),
        (serving(schema=1), serving(), "has schema 1, this version reads 2"),
        (serving(comparisons=[], reasons=["server died"]), serving(), "without a measurement (server died)"),
        (serving(gate="cliff"), serving(), "runs of the cliff gate are not compared"),
        (serving(gate=["x"]), serving(), "are not compared"),
        (serving(comparisons=[], reasons=None), serving(), "without a measurement ()"),
        (serving(comparisons=[{}]), serving(), "lacks what a verdict holds (KeyError('metrics'))"),
        (serving(comparisons="x"), serving(), "lacks what a verdict holds (TypeError"),
        (serving(arms=None), serving(), "lacks what a verdict holds (AttributeError"),
        (accuracy(rows=[{"label": "x"}]), accuracy(), "lacks what a verdict holds (KeyError('unit'))"),
        (serving(), "[" * 100_000, "is no JSON"),
    ],
)  # fmt: skip
def test_what_is_no_pair_of_runs_is_refused_in_one_line(compare, first, second, said):
    code, out, error = compare(first, second)
    assert (code, out) == (2, "")
    (line,) = error.splitlines()
    assert said in line


def test_a_folder_that_does_not_exist(capsys):
    assert main(["compare", "/nowhere", "/nowhere"]) == 2
    assert "/nowhere cannot be read" in capsys.readouterr().err


def test_a_page_holds_its_records_and_escapes_what_it_shows(tmp_path, monkeypatch):
    records = tmp_path / "records.jsonl"
    records.write_text('{"a": 1}\n' * 1000)
    parts = [page.bullets(["a < b"]), page.table(["x", "y"], [["<i>", "FAIL"]])]
    page.write(tmp_path / "r.html", "Gate", "FAIL", [*parts, page.downloads([records])])
    text = (tmp_path / "r.html").read_text()
    assert "a &lt; b" in text
    assert "&lt;i&gt;" in text
    assert '<td class="n FAIL">FAIL</td>' in text
    packed = re.search(
        r'download="records.jsonl.gz" href="data:application/gzip;base64,([^"]+)"', text
    )
    assert packed
    assert gzip.decompress(base64.b64decode(packed[1])) == records.read_bytes()
    monkeypatch.setattr(page, "LARGEST_DOWNLOAD", 10)
    assert "too large for this page" in page.downloads([records, tmp_path / "absent"])
    assert page.downloads([tmp_path / "absent"]) == ""
    # A path of bytes that are no UTF-8, or a server's half of a surrogate pair.
    page.write(tmp_path / "r.html", "Gate", "FAIL", [page.bullets(["\udcff"])])
    assert "\\udcff" in (tmp_path / "r.html").read_text()


def test_ends_of_an_interval_that_say_nothing_are_no_figures(compare):
    assert page.percent(None) == "-"
    assert page.percent(0.1234) == "+12.3 %"
    assert page.percent(0.1234, sign=False) == "12.3 %"
    assert page.percent(-1.0) == "-100.0 %"
    # A slow-down by a factor of twenty is a figure.
    assert page.percent(19.0) == "+1900.0 %"
    assert page.percent(134148.402) == page.percent(math.inf) == "over +10000 %"
    code, out, _ = compare(serving(0.1, 134148.4), serving(0.1, 134148.4))
    assert "-100.0 % … over +10000 %" in out
    # What is printed decides nothing.
    assert code == 0
