# SPDX-License-Identifier: Apache-2.0
"""Upstream fixes on a toy engine: every verdict, every rule of a header, order, digests, page, doctor."""

from __future__ import annotations

import difflib
import json
import shutil
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from numinous_tooling import evidence
from numinous_tooling.doctor import bugs
from numinous_tooling.gate import provenance
from numinous_tooling.patching import check, disk
from numinous_tooling.patching.engine import DirectoryTree, find_engine
from numinous_tooling.patching.errors import PatchError
from numinous_tooling.patching.feature import Feature, Hook, Pin
from numinous_tooling.patching.serve_command import ServeCommand
from numinous_tooling.upstream import (
    features,
    fix_problems,
    hit,
    pins,
    read_fixes,
    records,
    run,
    table,
)
from numinous_tooling.upstream.__main__ import main as upstream_main
from numinous_tooling.upstream.headers import REQUIRED, Fix
from numinous_tooling.upstream.trees import copy_of

POOL = """\
LIMIT = 8


class Pool:
    def size(self):
        return LIMIT - 1

    def move(self, x):
        return x


def gate(x):
    if x is None:
        return x.shape
    return x


def other():
    return 1
"""
FIXED_SIZE = POOL.replace("return LIMIT - 1", "return LIMIT")
FIXED_GATE = POOL.replace("return x.shape", "return None")
TEST_SIZE = """\
from sglang.srt.pool import Pool, other

def test_size():
    assert Pool().size() == 8

def test_other():
    assert other() == 1
"""
TEST_GATE = """\
from sglang.srt.pool import gate

def test_gate():
    assert gate(None) is None
"""


def header(**changes: Any) -> dict[str, Any]:
    return {
        "project": "sglang",
        "version": "0.5.20",
        "title": "Count the last slot",
        "first_seen": "0.5.19",
        "where": ["srt/pool.py:6"],
        "functions": ["sglang.srt.pool:Pool.size"],
        "symptom": "One slot | is never used",
        "cause": "Off by one.",
        "trigger": "any",
        "hit": "Everybody",
        "origin": "found by reading for numinous",
        "forwarded": "no",
        "last_update": "2026-11-29",
        "evidence": "run",
        "newest": {"version": "0.5.23", "state": "still", "note": ""},
        **changes,
    }


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def patch(title: str, before: str, after: str, path: str = "sglang/srt/pool.py") -> str:
    diff = difflib.unified_diff(
        before.splitlines(True), after.splitlines(True), f"a/{path}", f"b/{path}"
    )
    return (
        f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: A <a@example.org>\n"
        f"Date: Sun, 29 Nov 2026 12:00:00 +0000\nSubject: [PATCH] {title}\n\nWhy.\n---\n"
        f"diff --git a/{path} b/{path}\n" + "".join(diff)
    )


def write_fix(
    root: Path,
    name: str,
    after: str = FIXED_SIZE,
    test: str | None = TEST_SIZE,
    text: str | None = None,
    **changes: Any,
) -> Path:
    facts = header(**changes)
    folder = root / "sglang" / name
    folder.mkdir(parents=True)
    lines = [f"{key} = {toml(value)}" for key, value in facts.items() if value is not None]
    (folder / "header.toml").write_text("\n".join(lines) + "\n")
    body = patch(facts["title"], POOL, after) if text is None else text
    (folder / "fix.patch").write_text(body)
    if test is not None:
        (folder / "test_repro.py").write_text(test)
    return folder


GATE = {"title": "Let None pass the gate", "functions": ["sglang.srt.pool:gate"]}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two fixes of one file; the order of the names is not that of the numbers."""
    root = tmp_path / "upstream-fixes"
    write_fix(root, "0001-pool-size")
    write_fix(root, "0002-gate-none", FIXED_GATE, TEST_GATE, **GATE)
    return root


@pytest.fixture
def engine(fake_engine: Path) -> Path:
    (fake_engine / "sglang/srt/pool.py").write_text(POOL)
    return fake_engine


# Verdicts ---------------------------------------------------------------------------------------------------------


def verdicts(root: Path, engine: Path, **more: Any) -> dict[str, Any]:
    report = run.run(read_fixes(root), {"sglang": engine}, **more)
    return {row["name"].partition("/")[2]: row for row in report["fixes"]} | {"": report}


def test_reproduced_alone_and_together(root, engine):
    found = verdicts(root, engine, together=True)
    assert found[""]["holds"], found
    assert found["0001-pool-size"]["released"] == {"test_size": "AssertionError"}
    assert found["0002-gate-none"]["released"] == {"test_gate": "AttributeError"}
    assert found[""]["counts"] == {"reproduced": 2}


FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "passes on released": (
        {"test": "def test_x():\n    pass\n"},
        "not reproduced",
        "all 1 tests pass",
    ),
    "import error": (
        {"test": "import sglang.srt.gone\n\ndef test_x():\n    pass\n"},
        "broken test",
        "gone",
    ),
    "import error in the body": (
        {"test": "def test_x():\n    import sglang.srt.gone\n"},
        "broken test",
        "ModuleNotFoundError",
    ),
    "fixture": ({"test": "def test_x(nothing):\n    pass\n"}, "broken test", "nothing"),
    "no test": ({"test": "X = 1\n"}, "broken test", "no test"),
    "skipped": (
        {"test": TEST_SIZE + "\n\nimport pytest\ndef test_s():\n    pytest.skip('no GPU')\n"},
        "broken test",
        "no GPU",
    ),
    "not fixed": (
        {"test": "def test_x():\n    assert 1 == 2\n"},
        "not fixed",
        "AssertionError",
    ),
    "does not apply": (
        {"text": patch("Count the last slot", FIXED_GATE, FIXED_SIZE)},
        "broken patch",
        "does not apply",
    ),
    "crash": ({"test": "import os\ndef test_x():\n    os.abort()\n"}, "broken test", "crash"),
    "hangs": (
        {"test": "import time\ndef test_x():\n    time.sleep(60)\n"},
        "broken test",
        "timeout",
    ),
    "other version": ({"version": "0.5.19"}, "not run", "this is 0.5.20"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_red(name, tmp_path, engine):
    changes, word, reason = FAULTS[name]
    write_fix(tmp_path / "fixes", "0001-x", **changes)
    found = verdicts(tmp_path / "fixes", engine, timeout_s=4 if name == "hangs" else 60)
    assert found["0001-x"]["verdict"] == word, found["0001-x"]
    assert reason in found["0001-x"]["reason"]
    assert not found[""]["holds"]


def test_a_crash_that_is_the_bug_is_named_by_the_header(tmp_path, engine):
    test = "import os\nfrom sglang.srt.pool import Pool\ndef test_x():\n    Pool().size() == 8 or os.abort()\n"
    write_fix(tmp_path / "fixes", "0001-x", test=test, fails_with=["crash"])
    assert verdicts(tmp_path / "fixes", engine)[""]["holds"]


def test_kernels_of_a_reproduction_run_on_the_device_that_is_named(tmp_path, engine):
    """On a GPU the bug shows, on the CPU not: what the child sees is what was asked for."""
    test = "import os\nfrom sglang.srt.pool import Pool\n"
    test += (
        "def test_x():\n    assert os.environ['UPSTREAM_DEVICE'] == 'cpu' or Pool().size() == 8\n"
    )
    write_fix(tmp_path / "fixes", "0001-x", test=test, device=True)
    assert list(fix_problems(tmp_path / "fixes")) == []
    assert verdicts(tmp_path / "fixes", engine)["0001-x"]["verdict"] == "not reproduced"
    found = verdicts(tmp_path / "fixes", engine, device="cuda")
    assert found["0001-x"]["verdict"] == "reproduced"
    assert found[""]["device"] == "cuda"


@pytest.mark.parametrize(
    ("gpus", "said"), [([], "this machine has no GPU"), (["x"], "no test of these has a kernel")]
)
def test_device_runs_are_refused_in_one_line(monkeypatch, capsys, gpus, said):
    monkeypatch.setattr(provenance, "gpu_names", lambda: gpus)
    assert upstream_main(["run", "--device", "cuda", "0001-mla-fp4-move-scales"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_found_by_reading_claims_no_reproduction(tmp_path, engine):
    write_fix(
        tmp_path / "fixes", "0001-x", test=None, evidence="derived", reproduction="by reading"
    )
    assert list(fix_problems(tmp_path / "fixes")) == []
    found = verdicts(tmp_path / "fixes", engine)
    assert found["0001-x"]["verdict"] == "by reading"
    assert found[""]["counts"] == {"by reading": 1}


def test_fixes_that_do_not_go_together(root, engine):
    both = FIXED_SIZE.replace("return x.shape", "return None")
    write_fix(root, "0003-again", both, title="Again")
    report = verdicts(root, engine)[""]
    assert not report["holds"]
    assert "in order: sglang/0003-again" in report["problems"][0]


def test_newest_release_still_fixed_and_ported(root, engine, tmp_path):
    newest = tmp_path / "newest"
    copy_of("sglang", engine, newest)
    (newest / "sglang-0.5.20.dist-info").rename(newest / "sglang-0.5.23.dist-info")
    pool = newest / "sglang/srt/pool.py"
    pool.unlink()  # a hard link
    moved = "# moved\n" * 9 + FIXED_GATE.replace("LIMIT - 1", "LIMIT - 1  # other text")
    pool.write_text(moved)
    ports = root / "sglang/0001-pool-size/ports"
    ports.mkdir()
    (ports / "0.5.23.patch").write_text(
        patch(
            "Count the last slot",
            moved,
            moved.replace("return LIMIT - 1  # other text", "return LIMIT"),
        )
    )
    found = verdicts(root, engine, newest={"sglang": newest})
    size, gate = (found[name]["newest"] for name in ("0001-pool-size", "0002-gate-none"))
    assert size["state"] == "still"
    assert size["port"] == "applies and passes"
    assert "does not apply" in size["patch"]
    assert gate["state"] == "fixed"
    assert gate["header"] == "header.toml says still"
    pool.write_text(moved.replace("class Pool", "class Other"))
    gone = verdicts(root, engine, newest={"sglang": newest})["0001-pool-size"]["newest"]
    assert (gone["state"], "Pool" in gone["reason"]) == ("undecided", True)
    assert found[""]["holds"], "the newest release is told for information"


def test_released_files_are_never_written(root, engine):
    before = (engine / "sglang/srt/pool.py").read_bytes()
    verdicts(root, engine)
    assert (engine / "sglang/srt/pool.py").read_bytes() == before
    assert not list(engine.rglob("__pycache__"))


# Headers ----------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    **{f"no {key}": ({key: None}, f"{key} is missing") for key in REQUIRED if key != "title"},
    "empty": ({"symptom": ""}, "symptom is empty"),
    "unknown key": ({"severity": "high"}, "unknown keys severity"),
    "type": ({"where": "srt/pool.py:6"}, "where is no list"),
    "place": ({"where": ["srt/pool.py"]}, "<line>"),
    "function": ({"functions": ["pool.size"]}, "is not of the form sglang.module:Qualified.name"),
    "word": ({"evidence": "sure"}, "'sure' is not among"),
    "state": (
        {"newest": {"version": "0.5.23", "state": "open", "note": ""}},
        "newest.state 'open'",
    ),
    "newest keys": ({"newest": {"version": "0.5.23", "state": "still"}}, "newest holds"),
    "project": ({"project": "fla"}, "the folder says sglang"),
    "date": ({"last_update": "today"}, "YYYY-MM-DD"),
    "derived with a test": ({"evidence": "derived"}, "go together"),
    "run without a test": ({"test": None}, "go together"),
    "title": ({"title": "Ends."}, "without a full stop"),
    "subject": ({"text": patch("Another", POOL, FIXED_SIZE)}, "its subject is 'Another'"),
    "outside": ({"text": patch("Count the last slot", POOL, POOL, "x.py")}, "touches x.py"),
    "no mail": ({"text": "diff --git a/sglang/x b/sglang/x\n"}, "git format-patch"),
    "doctor form": ({"doctor": {"says": "x", "flags": []}}, "doctor holds says"),
    "doctor test": (
        {"doctor": {"says": "x", "when": [{"flag": "tp_size", "over": 1}]}},
        "doctor.when",
    ),
    "doctor value": (
        {"doctor": {"says": "x", "when": [{"flag": "tp_size", "is": 1}]}},
        "is takes list",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_headers_are_found(name, tmp_path):
    changes, said = WRONG[name]
    write_fix(tmp_path / "fixes", "0001-x", **changes)
    lines = [line for _, line in fix_problems(tmp_path / "fixes")]
    assert any(said in line for line in lines), lines


def test_names_and_numbers_are_unique(root):
    assert list(fix_problems(root)) == []
    write_fix(root, "0002-pool-size")
    said = [line for _, line in fix_problems(root)]
    assert said == [
        "has the name of sglang/0001-pool-size",
        "has the number of sglang/0002-gate-none",
    ]
    other = Fix(root / "flashinfer/0001-pool-size", header(project="flashinfer"))
    assert other.id == "upstream.flashinfer_pool_size"
    (root / "sglang/0002-pool-size/notes.txt").write_text("x")
    assert any("a fix holds" in line for _, line in fix_problems(root))


# Features ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(root: Path, engine: Path) -> Path:
    assert pins.record(root, find_engine(engine)) == []
    return root


@pytest.fixture
def installed(recorded: Path, engine: Path, monkeypatch: pytest.MonkeyPatch) -> DirectoryTree:
    """The toy engine as the installed one, with the fixes as the installed features."""
    tree = DirectoryTree(engine / "sglang", "0.5.20", installed=True)
    for module in (check, disk):
        for name in ("find_engine", "installed_engine"):
            monkeypatch.setattr(module, name, lambda *_: tree)
        monkeypatch.setattr(module, "installed_features", lambda: list(features(recorded)))
    monkeypatch.setattr(check, "CORE", Feature("tooling.core", "Core.", (), {}))
    return tree


def test_word_and_single_names_apply_and_revert_bytewise(installed):
    pool = installed.root / "srt/pool.py"
    report, code = disk.apply_report(["upstream"])
    assert code == 0, report
    assert pool.read_text() == FIXED_SIZE.replace("return x.shape", "return None")
    assert "in place now: upstream.pool_size.0001, upstream.gate_none.0002" in report["done"]
    for names in (["upstream"], []):
        checked, _ = check.check_report(names, environ={})
        assert [row["fits"] for row in checked["features"]] == [True, True], checked
        assert not [line for line in checked["problems"] if "nobody asked" in line]
    assert len(check.status_report()[0]["on_disk"]) == 2
    assert disk.revert_report(["upstream.pool_size"])[1] == 0
    assert pool.read_text() == FIXED_GATE
    assert disk.revert_report([])[1] == 0
    assert pool.read_text() == POOL
    assert not (installed.root.parent / ".numinous").exists()


def test_a_changed_function_is_refused_by_its_pin(installed):
    pool = installed.root / "srt/pool.py"
    pool.write_text(POOL.replace("return LIMIT - 1", "return LIMIT - 1 + 0"))
    report, code = disk.apply_report(["upstream.pool_size"])
    assert code == 1
    assert "differs from every accepted text" in report["problems"][0]
    assert disk.apply_report(["upstream.gate_none"])[1] == 0


def test_pins_of_the_header_are_those_of_the_patch(root, engine):
    write_fix(root, "0003-again", POOL.replace("return 1", "return 2"), title="Again")
    write_fix(
        root,
        "0004-gone",
        title="Gone",
        functions=["sglang.srt.pool:gone"],
        text=patch("Gone", POOL, FIXED_GATE),
    )
    limit = patch("Limit", POOL, POOL.replace("LIMIT = 8", "LIMIT = 9"))
    write_fix(root, "0005-limit", title="Limit", functions=["sglang.srt.pool:LIMIT"], text=limit)
    lines = pins.record(root, find_engine(engine))
    assert not any("0005" in line for line in lines), "a constant can be named, and has no digest"
    assert any("lacks sglang.srt.pool:other, which the patch changes" in line for line in lines)
    assert any("no definition of gone" in line for line in lines)
    assert not (root / "sglang/pins.json").exists()


def test_stale_digests(recorded):
    assert pins.stale(recorded) == []
    shutil.rmtree(recorded / "sglang/0002-gate-none")
    write_fix(recorded, "0003-new", title="New")
    assert pins.stale(recorded) == [
        "sglang/0003-new: sglang/pins.json has no digests of sglang.srt.pool:Pool.size",
        "upstream.gate_none: sglang/pins.json holds digests that no header asks for",
    ]


def test_hooks_have_to_accept_the_fixes(recorded, engine, monkeypatch):
    tree = find_engine(engine)
    monkeypatch.setattr(pins, "CORE", Feature("tooling.core", "Core.", (), {}))
    write_fix(recorded, "0003-lower", POOL.replace("- 1", "- 2"), title="Lower")

    def hooked(name: str, **accepts: str) -> Feature:
        target = f"sglang.srt.pool:{name}"
        hook = Hook("moe.h.01", target, "before", "x:y", (Pin(target, accepts),))
        return Feature("moe.h", "A sentence.", (hook,), {})

    assert pins.conflicts([hooked("Pool.move"), hooked("other")], recorded, tree) == []
    shutil.rmtree(recorded / "sglang/0003-lower")
    (line,) = pins.conflicts([hooked("Pool.size")], recorded, tree)
    assert "has to accept 'stock 0.5.20 + upstream.pool_size': " in line
    digest = line.rpartition(" ")[2].strip("'")
    assert pins.conflicts([hooked("Pool.size", both=digest)], recorded, tree) == []


def test_a_damaged_header_names_the_file(root):
    (root / "sglang/0001-pool-size/header.toml").write_text("x = \n")
    with pytest.raises(PatchError, match=r"0001-pool-size/header\.toml"):
        features(root)


# Page -------------------------------------------------------------------------------------------------------------


def test_page_follows_the_headers(root):
    assert table.problems(root)
    table.write(root)
    assert table.problems(root) == []
    text = (root / "README.md").read_text()
    assert "One slot \\| is never used" in text
    assert "`numinous apply upstream.gate_none`" in text
    file = root / "sglang/0001-pool-size/header.toml"
    file.write_text(file.read_text().replace("Everybody", "Nobody"))
    assert len(table.problems(root)) == 1


def test_page_names_the_gpu_of_a_record(root):
    table.write(root)
    assert "run on NVIDIA Z9" not in (root / "README.md").read_text()
    report = {
        "released": {"sglang": "1.0"},
        "fixes": [
            {
                "name": "sglang/0001-pool-size",
                "tests": 3,
                "verdict": "reproduced",
                "reason": "2 of 3",
            },
            {"name": "sglang/0002-gate-none", "tests": 3, "verdict": "broken test", "reason": "no"},
        ],
    }
    facts = dict.fromkeys(evidence.COMMON_FIELDS, "-") | {"gpu": "NVIDIA Z9"}
    made = records.records_of(report, facts, "again")
    assert [record["case"] for record in made] == ["sglang/0001-pool-size"]
    evidence.append(root.parent / records.FILE, made)
    assert len(table.problems(root)) == 1, "the page is older than the record"
    table.write(root)
    text = (root / "README.md").read_text()
    assert text.count("run; run on NVIDIA Z9") == 1
    assert "1 of them run on a GPU too" in text


def test_records_of_a_run_on_the_cpu_are_refused(capsys):
    assert upstream_main(["run", "0001-mla-fp4-move-scales", "--evidence"]) == 2
    assert "--evidence is for runs with --device cuda" in capsys.readouterr().err


def test_a_fix_is_not_taken_for_the_file_of_evidence(capsys):
    fix = "0001-mla-fp4-move-scales"
    assert upstream_main(["run", "--device", "cuda", "--evidence", fix]) == 2
    assert f"--evidence {fix} is no .jsonl file" in capsys.readouterr().err


def test_the_version_in_records_is_the_package_s():
    project = tomllib.loads(
        (Path(__file__).parents[3] / "upstream-fixes" / "pyproject.toml").read_text()
    )["project"]
    assert project["version"] == records.VERSION


def test_packages_of_the_callers_path_are_found_behind_the_tree(tmp_path, engine, monkeypatch):
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "only_there.py").write_text("VALUE = 1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "given"))
    write_fix(
        tmp_path / "fixes", "0001-x", test="import only_there\n\n\ndef test_it():\n    pass\n"
    )
    (fix,) = read_fixes(tmp_path / "fixes")
    outcome = run.run_test(fix, engine, tmp_path / "scratch")
    assert [test.outcome for test in outcome.tests.values()] == ["passed"], outcome


# Doctor -----------------------------------------------------------------------------------------------------------

FP4 = {"flag": "kv_cache_dtype", "is": ["nvfp4", "fp4_mx_block16"]}
GEMMA = {"config": "architectures", "any": ["Gemma3ForCausalLM"]}
DEFAULTS = {
    "moe_runner_backend": "auto",
    "kv_cache_dtype": "auto",
    "attention_backend": None,
    "prefill_attention_backend": None,
    "speculative_algorithm": None,
    "speculative_eagle_topk": None,
    "tp_size": 1,
    "lora": False,
}


def serve(config: dict[str, Any] | None = None, env: Any = (), **given: Any) -> ServeCommand:
    return ServeCommand(given, DEFAULTS, dict(env), config)


def doctor_fix(*when: dict[str, Any], **more: Any) -> Fix:
    return Fix(
        Path("x/sglang/0001-a"), header(doctor={"says": "It breaks", "when": list(when)}, **more)
    )


CASES: list[tuple[list[dict[str, Any]], ServeCommand, str]] = [
    ([FP4], serve(kv_cache_dtype="nvfp4"), "hit"),
    ([FP4], serve(), "missed"),
    ([FP4, GEMMA], serve({"architectures": ["Gemma3ForCausalLM"]}, kv_cache_dtype="nvfp4"), "hit"),
    ([FP4, GEMMA], serve({"architectures": ["Llama"]}, kv_cache_dtype="nvfp4"), "missed"),
    ([FP4, GEMMA], serve(kv_cache_dtype="nvfp4"), "undecided"),
    ([FP4, GEMMA], serve(), "missed"),
    ([{"flag": "attention_backend", "is": ["triton"]}], serve(), "undecided"),
    ([{"flag": "attention_backend", "set": True}], serve(), "missed"),
    ([{"flag": "lora", "is": [True]}], serve(lora=True), "hit"),
    ([{"flag": "tp_size", "is": [True]}], serve(), "missed"),
    ([{"flag": "tp_size", "above": 1}], serve(tp_size=8), "hit"),
    ([{"flag": "tp_size", "above": 1}], serve(), "missed"),
    ([{"flag": "retired", "is": [1]}], serve(), "undecided"),
    ([{"env": "SGLANG_X", "is": ["1"]}], serve(env={"SGLANG_X": "1"}), "hit"),
    ([{"env": "SGLANG_X", "is": ["1"]}], serve(), "missed"),
    (
        [{"config": "num_experts", "above": 200}],
        serve({"text_config": {"num_experts": 256}}),
        "hit",
    ),
    ([{"config": "norm_topk_prob", "is": [False]}], serve({"norm_topk_prob": True}), "missed"),
    ([{"flag": "moe_runner_backend", "is": ["triton"]}], serve(), "undecided"),
    ([{"flag": "prefill_attention_backend", "is": ["fa3"]}], serve(attention_backend="fa3"), "hit"),
    ([{"flag": "prefill_attention_backend", "is": ["fa3"]}], serve(), "undecided"),
    ([{"flag": "speculative_algorithm", "is": ["EAGLE3"]}], serve(), "missed"),
    ([{"flag": "speculative_eagle_topk", "above": 1}], serve(), "missed"),
    (
        [{"flag": "speculative_eagle_topk", "above": 1}],
        serve(speculative_algorithm="EAGLE"),
        "undecided",
    ),
    ([{"flag": "moe_runner_backend", "is": ["triton", "auto"]}], serve(), "hit"),
    ([{"flag": "moe_runner_backend", "is": ["triton"]}], serve(moe_runner_backend="x"), "missed"),
    ([{"flag": "model_path", "ends": [".gguf"]}], serve(model_path="a/b.gguf"), "hit"),
    ([{"flag": "model_path", "ends": [".gguf"]}], serve(model_path="a/b"), "missed"),
    ([{"config": "q.method", "not": ["fp8"]}], serve({"q": {"method": "awq"}}), "hit"),
]


@pytest.mark.parametrize(("when", "command", "state"), CASES)
def test_conditions(when, command, state):
    assert hit.judge(doctor_fix(*when), command)[0] == state


def test_config_json_of_the_command():
    words = ["--model-path", "x", "--config", "server.yaml", "--config=a/config.json"]
    assert hit.split_config(words) == (words[:4], "a/config.json")


def section(monkeypatch, tmp_path, command: str, **more: Any) -> tuple[list[Any], list[Any]]:
    root = tmp_path / "doctor-fixes"
    if not root.exists():
        write_fix(root, "0001-fp4", doctor={"says": "Loses scales", "when": [FP4]})
        write_fix(
            root, "0002-gemma", title="B", doctor={"says": "Cannot load", "when": [FP4, GEMMA]}
        )
        write_fix(root, "0003-silent", title="C")
    monkeypatch.setattr(bugs, "fixes_root", lambda: root)

    def parsed(words: list[str], *_: Any) -> ServeCommand:
        given = dict(zip(words[::2], words[1::2], strict=True))
        return serve(**{key.strip("-").replace("-", "_"): value for key, value in given.items()})

    monkeypatch.setattr(bugs, "parse_command", parsed)
    tree = DirectoryTree(tmp_path / "no/sglang", more.pop("version", "0.5.20"))
    return bugs.bugs_section(tree, {}, command.split(), more.get("config"), {})


def test_doctor_names_what_a_command_meets(monkeypatch, tmp_path):
    found, rows = section(monkeypatch, tmp_path, "--kv-cache-dtype nvfp4")
    by_name = {one["what"]: one for one in found}
    assert by_name["upstream.fp4"]["level"] == "problem"
    assert by_name["upstream.fp4"]["detail"] == "Loses scales (--kv-cache-dtype nvfp4)"
    assert by_name["upstream.fp4"]["fix"] == "numinous apply upstream.fp4"
    assert by_name["upstream.gemma (perhaps)"]["level"] == "note"
    assert not [name for name in by_name if "silent" in name]
    assert [row["state"] for row in rows] == ["hit", "undecided", "undecided"]

    config = tmp_path / "config.json"
    config.write_text(json.dumps({"architectures": ["Gemma3ForCausalLM"]}))
    found, _ = section(monkeypatch, tmp_path, f"--kv-cache-dtype nvfp4 --config {config}")
    assert {one["what"] for one in found} == {"upstream.fp4", "upstream.gemma"}

    found, _ = section(monkeypatch, tmp_path, "--tp-size 2")
    assert [one["level"] for one in found] == ["note", "ok"]

    found, _ = section(monkeypatch, tmp_path, "--kv-cache-dtype nvfp4", version="0.5.10")
    assert "known of 0.5.20, and 0.5.10 is installed" in found[1]["detail"]


def test_doctor_without_a_command_or_with_a_wrong_config(monkeypatch, tmp_path):
    found, rows = section(monkeypatch, tmp_path, "")
    assert rows == []
    assert "3 known" in found[0]["detail"]
    found, _ = section(monkeypatch, tmp_path, "--tp-size 2", config=str(tmp_path / "none.json"))
    assert found[0]["level"] == "unknown"


# Helpers of the reproductions -------------------------------------------------------------------------------------


def test_shipped_functions_are_extracted_from_the_tree(engine, run_in: Callable[..., Any]):
    code = textwrap.dedent(
        f"""
        import sys
        sys.path.append({str(Path(__file__).parents[3] / "upstream-fixes")!r})
        import repro
        assert repro.tree() == __import__("pathlib").Path({str(engine / "sglang")!r})
        scope = repro.load_constants("srt/pool.py", ["LIMIT"])
        assert repro.load_function("srt/pool.py", "Pool.size", scope)(None) == 7
        assert repro.load_function("srt/pool.py", "Pool", dict(scope))().move(3) == 3
        for wrong in ("Pool.gone", "gone"):
            try:
                repro.load_function("srt/pool.py", wrong)
            except LookupError:
                continue
            raise SystemExit(wrong)
        """
    )
    run_in(engine, code)
