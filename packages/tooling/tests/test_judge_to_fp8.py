# SPDX-License-Identifier: Apache-2.0
"""`to_fp8.py` on folders that hold no model; what it writes of one is in test_judge_models.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from numinous_tooling.repo.checkout import find_checkout

for module in ("torch", "safetensors", "tokenizers"):
    pytest.importorskip(module, reason=f"pip install {module}")

SCRIPTS = find_checkout(Path(__file__).parent).root / "packages/tooling/benchmarks/judge_models"
sys.path.insert(0, str(SCRIPTS))

import judge_saved  # noqa: E402
import to_fp8  # noqa: E402


def test_to_fp8_says_what_is_wrong_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "glm_moe_dsa", "index_topk": 1}
    for name, text, said in (
        ("gone", None, "config.json"),
        ("empty", "{}", "model_type"),
        ("damaged", json.dumps(config), "SafetensorError"),
    ):
        if text is not None:
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text(text, encoding="utf-8")
            (tmp_path / name / judge_saved.WEIGHTS).write_bytes(b"no tensors here")
        code = to_fp8.main(["--model", str(tmp_path / name), "--out", str(tmp_path / "out")])
        error = capsys.readouterr().err
        assert code == 2
        assert said in error
        assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
