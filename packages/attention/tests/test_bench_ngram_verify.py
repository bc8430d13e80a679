# SPDX-License-Identifier: Apache-2.0
"""The rules of `bench_ngram_verify`: what is compared, and what is no answer."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[1] / "benchmarks" / "bench_ngram_verify.py"


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_ngram_verify", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_ngram_verify"] = module
    spec.loader.exec_module(module)
    return module


def test_compared_are_answers_in_front_of_the_first_that_differs(bench: Any) -> None:
    stock = [bench.Answer((1, 2), 1), bench.Answer((3, 4), 2), bench.Answer((5, 6), 1)]
    assert bench.alike(stock, stock) == (3, 3)
    steps = [stock[0], bench.Answer((3, 4), 1), stock[2]]
    assert bench.alike(steps, stock) == (3, 2)
    turned = [stock[0], bench.Answer((3, 9), 2), stock[2]]
    assert bench.alike(turned, stock) == (1, 1)


def test_an_answer_that_is_cut_or_did_not_speculate_is_none(bench: Any) -> None:
    said = {"output_ids": [1, 2, 3], "meta_info": {"spec_verify_ct": 2}}
    assert bench.answers_of([said], 3) == [bench.Answer((1, 2, 3), 2)]
    with pytest.raises(ValueError, match="3 of 4 tokens"):
        bench.answers_of([said], 4)
    with pytest.raises(ValueError, match="in None steps"):
        bench.answers_of([{"output_ids": [1], "meta_info": {}}], 1)


def test_windows_are_spread_over_the_text(bench: Any) -> None:
    assert bench.windows("abcdefgh", 3, 2) == ["ab", "de", "gh"]
    assert bench.windows("abc", 1, 3) == ["abc"]
    with pytest.raises(ValueError, match="want 2 windows of 3"):
        bench.windows("abcde", 2, 3)


def test_bad_arguments_end_in_one_line(bench: Any, tmp_path: Path, capsys: Any) -> None:
    text = tmp_path / "text"
    text.write_text("short")
    for more in (["--text", str(text)], ["--text", str(tmp_path / "none")], ["--text", str(text), "--characters", "1", "--env", "A"]):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            bench.parse(["--model", "m", *more])
        assert ended.value.code == 2
        assert "error: --" in capsys.readouterr().err.splitlines()[-1]
