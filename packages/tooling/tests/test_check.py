# SPDX-License-Identifier: Apache-2.0
"""`numinous check / features / status` as a user calls them, against the real engine and copies of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FLAG = "NUMINOUS_SCHEDULER_DECODE_BURST"
FEATURE = "scheduler.decode_burst"


@pytest.fixture(autouse=True)
def needs_a_feature():
    pytest.importorskip(
        "numinous_scheduler", reason="the check needs an installed feature: numinous-scheduler"
    )


def numinous(*words: str, tmp_path: Path, expect: int, **environ: str) -> dict:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("NUMINOUS_", "SGLANG_"))}
    clean.update(NUMINOUS_STATE_DIR=str(tmp_path / "state"), **environ)
    done = subprocess.run(
        [sys.executable, "-m", "numinous_tooling", *words],
        env=clean,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout) if "--json" in words else {"text": done.stdout + done.stderr}


def test_pristine_engine_holds(pristine_engine, tmp_path):
    report = numinous(
        "check", "--json", "--engine", str(pristine_engine.root), tmp_path=tmp_path, expect=0
    )
    assert report["engine"]["version"] == "0.5.20"
    assert {"id": FEATURE, "on": False, "fits": True, "reasons": []} in report["features"]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (
            "srt/managers/scheduler.py",
            "if self._prefill_decode_interval_remaining == 0:",
            "if self._prefill_decode_interval_remaining <= 0:",
        ),
        (
            "srt/managers/scheduler_components/request_receiver.py",
            "recv_reqs = self._pull_raw_reqs()",
            "recv_reqs = self._pull_raw_reqs() or []",
        ),
    ],
)
def test_one_changed_token_names_the_feature(engine_copy, tmp_path, file, old, new):
    target = engine_copy / "sglang" / file
    source = target.read_text()
    assert source.count(old) == 1
    assert numinous(
        "check", FEATURE, "--json", "--engine", str(engine_copy), tmp_path=tmp_path, expect=0
    )
    target.write_text(source.replace(old, new))
    report = numinous("check", "--json", "--engine", str(engine_copy), tmp_path=tmp_path, expect=1)
    (row,) = [row for row in report["features"] if row["id"] == FEATURE]
    assert not row["fits"]
    assert "differs from every accepted text" in row["reasons"][0]


def test_a_comment_or_another_function_may_change(engine_copy, tmp_path):
    target = engine_copy / "sglang/srt/managers/scheduler.py"
    source = target.read_text()
    line = "        self._prefill_decode_interval_remaining -= 1\n"
    assert source.count(line) == 1
    target.write_text(
        source.replace(line, line.rstrip() + "  # one less\n\n") + "\n\ndef more():\n    return 1\n"
    )
    engine = ("--engine", str(engine_copy))
    numinous("check", FEATURE, "--json", *engine, tmp_path=tmp_path, expect=0)


def test_other_version_and_missing_engine(engine_copy, tmp_path):
    info = engine_copy / "sglang-0.5.20.dist-info/METADATA"
    info.write_text(info.read_text().replace("0.5.20", "0.5.21"))
    report = numinous("check", "--json", "--engine", str(engine_copy), tmp_path=tmp_path, expect=1)
    assert "found 0.5.21" in report["features"][0]["reasons"][0]
    report = numinous(
        "check", "--json", "--engine", str(tmp_path / "void"), tmp_path=tmp_path, expect=2
    )
    assert "no SGLang at" in report["problems"][0]


def test_the_users_command_is_judged(pristine_engine, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "num_attention_heads": 9,
                "max_position_embeddings": 8192,
            }
        )
    )
    engine = ("--engine", str(pristine_engine.root))
    serve = ("--", "python", "-m", "sglang.launch_server", "--model-path", str(model))
    good = (*serve, "--num-continuous-decode-steps", "8")
    report = numinous("check", "--json", *engine, *good, tmp_path=tmp_path, expect=0, **{FLAG: "1"})
    assert report["command"]["features"] == [FEATURE]
    report = numinous(
        "check", "--json", *engine, *serve, tmp_path=tmp_path, expect=1, **{FLAG: "1"}
    )
    assert "N >= 2" in report["command"]["refusals"][FEATURE][0]
    report = numinous(
        "check", "--json", *engine, *good, "--dp", "2", tmp_path=tmp_path, expect=1, **{FLAG: "1"}
    )
    assert "data parallelism" in report["command"]["refusals"][FEATURE][0]
    # The flag may stand in front of the command, as it would in a shell.
    words = (
        "check",
        "--json",
        *engine,
        "--",
        f"{FLAG}=1",
        *good[1:],
        "--tp",
        "2",
        "--context-length",
        "9999",
    )
    report = numinous(*words, tmp_path=tmp_path, expect=1)
    assert "does not divide the model's 9 attention heads" in " ".join(
        report["command"]["problems"]
    )
    assert "longer than the model's 8192" in " ".join(report["command"]["problems"])
    (model / "config.json").write_text(json.dumps({"architectures": ["UnheardOfForCausalLM"]}))
    report = numinous("check", "--json", *engine, *good, tmp_path=tmp_path, expect=1)
    assert "no model class UnheardOf" in report["command"]["problems"][0]


def test_misspelt_flag_and_hidden_plugin(pristine_engine, tmp_path):
    engine = ("--engine", str(pristine_engine.root))
    report = numinous(
        "check", "--json", *engine, tmp_path=tmp_path, expect=1, NUMINOUS_SCHEDULER_DECODE_BRUST="1"
    )
    assert f"did you mean {FLAG}?" in report["problems"][0]
    report = numinous(
        "check",
        "--json",
        *engine,
        tmp_path=tmp_path,
        expect=1,
        SGLANG_PLUGINS="other",
        **{FLAG: "1"},
    )
    assert "leaves out 'numinous'" in report["problems"][0]
    report = numinous("check", "scheduler.unknown", "--json", *engine, tmp_path=tmp_path, expect=2)
    assert "no installed feature scheduler.unknown" in report["problems"][0]


def test_human_output(pristine_engine, tmp_path):
    engine = ("--engine", str(pristine_engine.root))
    assert FEATURE in numinous("features", *engine, tmp_path=tmp_path, expect=0)["text"]
    text = numinous("check", *engine, tmp_path=tmp_path, expect=0)["text"]
    assert f"{FEATURE}: off, fits" in text
    assert text.rstrip().endswith("holds")
    assert "servers: none" in numinous("status", *engine, tmp_path=tmp_path, expect=0)["text"]
    rows = numinous("features", "--json", *engine, tmp_path=tmp_path, expect=0)["features"]
    assert [row["flag"] for row in rows if row["id"] == FEATURE] == [FLAG]


def test_bad_usage_exits_2(tmp_path):
    assert "No such command" in numinous("chek", tmp_path=tmp_path, expect=2)["text"]
    assert "name the features" in numinous("apply", tmp_path=tmp_path, expect=2)["text"]
    assert "switch it on with" in numinous("apply", FEATURE, tmp_path=tmp_path, expect=2)["text"]
