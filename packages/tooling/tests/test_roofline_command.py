# SPDX-License-Identifier: Apache-2.0
"""``numinous roofline`` and ``numinous bytes`` as a user calls them: text, JSON, exit codes, one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from numinous_tooling.roofline import command
from numinous_tooling.roofline.gpus import GPUS

pytest.importorskip("typer", reason="the command line needs the extra [cli]")

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder / "config.json"


def _numinous(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "numinous_tooling", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_roofline_of_a_config_as_json(config: Path) -> None:
    done = _numinous("roofline", str(config), "--gpu", "h200", "--gpu", "mi355x", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["model"] == "tiny-llama"
    assert found["word"] == "derived"
    assert [entry["gpu"] for entry in found["gpus"]] == ["h200", "mi355x"]
    assert found["gpus"][0]["phases"]["decode"]["tokens_per_second"] > 0


def test_bytes_of_a_folder_as_text(config: Path) -> None:
    done = _numinous("bytes", str(config.parent), "--memory-gb", "1", "--page-size", "16")
    assert done.returncode == 0, done.stderr
    assert "KV rows bf16 (stock): 1,536 bytes per token" in done.stdout
    assert f"pool: {10**9 // 1536 // 16 * 16:,} tokens in pages of 16" in done.stdout


def test_help_is_that_of_the_command() -> None:
    done = _numinous("roofline", "--help")
    assert done.returncode == 0
    assert "--kv-dtype" in done.stdout
    assert "deepseek-v4-pro" in done.stdout


def test_roofline_of_a_shipped_model_shows_every_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.roofline(["glm-5.3-flash", "--tp", "8", "--kv-dtype", "kv4"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in GPUS)
    assert "derived" in text


def test_memory_asked_for_beyond_the_gpu_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.roofline(["gemma-4-31b", "--gpu", "h100", "--memory-gb", "60"]) == 0
    assert "pools of 60.0 GB do not fit" in capsys.readouterr().out


def test_roofline_of_an_op(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "roofline_toy_op.py").write_text(
        "import dataclasses\n"
        "from numinous_tooling.workbench import Op, Traffic\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Case:\n"
        "    m: int\n"
        "OP = Op(name='toy', package='tooling', cases=(Case(4),), make_inputs=None, reference=None, compare=None,\n"
        "        traffic=lambda case: Traffic(bytes=case.m * 10**6, flops=0), implementations={})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert command.roofline(["roofline_toy_op:OP", "--gpu", "b200"]) == 0
    text = capsys.readouterr().out
    assert "toy of tooling" in text
    assert "0.50 bytes" in text  # 4 MB at 8 TB/s


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing"], "nothing is no model"),
        (["missing.json"], "missing.json is neither a config.json that can be read"),
        (["glm-5.3", "--gpu", "a100"], "no GPU a100 in the table"),
        (["glm-5.3", "--kv-dtype", "int3"], "no KV dtype int3; there are bf16"),
        (["glm-5.3", "--weights", "int3"], "no weight format int3; there are checkpoint"),
        (["glm-5.3", "--tp", "0"], "tp is at least 1"),
        (["glm-5.3", "--tp", "3", "--gpu", "mi355x"], "64 query heads do not divide over tp 3"),
        (["glm-5.3", "--memory-gb", "-1"], "memory must be positive"),
        (["gemma-4-31b", "--batch", "0", "--tp", "8"], "at least one request"),
    ],
)
def test_errors_are_one_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.roofline(words) == 2
    shown = capsys.readouterr()
    assert says in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_broken_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, says in (
        ("{", "is not JSON"),
        ("[1]", "holds no JSON object"),
        ("{}", "(none named)"),
    ):
        (tmp_path / "config.json").write_text(text)
        assert command.bytes_([str(tmp_path)]) == 2
        assert says in capsys.readouterr().err
