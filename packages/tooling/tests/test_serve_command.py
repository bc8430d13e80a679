# SPDX-License-Identifier: Apache-2.0
"""The user's command line, read without the engine: against the real declarations of 0.5.20."""

from __future__ import annotations

import json

import pytest

from numinous_tooling.patching.engine import DirectoryTree
from numinous_tooling.patching.errors import PatchError
from numinous_tooling.patching.serve_command import parse_command, read_arguments

LAUNCH = ["python3", "-m", "sglang.launch_server"]


def test_declarations_are_read(pristine_engine):
    arguments = read_arguments(pristine_engine)
    assert len(arguments) > 400
    steps = arguments["num_continuous_decode_steps"]
    assert (steps.flags, steps.kind, steps.default) == (
        ("--num-continuous-decode-steps",),
        "int",
        1,
    )
    assert arguments["model_path"].flags == ("--model-path", "--model")
    assert "fcfs" in (arguments["schedule_policy"].choices or ())
    assert arguments["enable_metrics"].kind == "bool"


@pytest.mark.parametrize(
    "words",
    [
        [*LAUNCH, "--model", "m", "--tp", "2", "--enable-metrics"],
        ["sglang", "serve", "--model-path=m", "--tp-size=2", "--enable-metrics"],
        [
            "/opt/venv/bin/sglang",
            "serve",
            "--model-path",
            "m",
            "--tensor-parallel-size",
            "2",
            "--enable-metrics",
        ],
        ["sglang serve --model-path m --tp 2 --enable-metrics"],
        ["--model-path", "m", "--tp-size", "2", "--enable-metrics"],
    ],
)
def test_spellings_of_one_command(pristine_engine, words):
    command = parse_command(words, pristine_engine, {})
    assert command.problems == ()
    assert command.given == {"model_path": "m", "tp_size": 2, "enable_metrics": True}
    assert command.get("dp_size") == 1
    with pytest.raises(KeyError):
        command.get("no_such_argument")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--num-continuous-decode-stps", "4"], "did you mean --num-continuous-decode-steps?"),
        (["--schedule-policy", "fastest"], "is not one of"),
        (["--tp-size", "two"], "is not a number"),
        (["--tp-size"], "needs a value"),
        (["--enable-d"], "is ambiguous"),
        (["stray"], "where a flag was expected"),
        (["--config", "x.yaml"], "are not judged"),
        (["--trust-remote-code=false"], "takes no value"),
        (["--served-model-name", "--enable-metrics"], "needs a value"),
        (["--deepep-mode", "sideways"], "is not one of auto, normal, low_latency"),
        (["--no-enable-metrics"], "is not a flag of this engine"),
    ],
)
def test_problems_are_named(pristine_engine, words, text):
    (problem,) = parse_command([*LAUNCH, "--model-path", "m", *words], pristine_engine, {}).problems
    assert text in problem


def test_environment_words_and_model_config(pristine_engine, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    words = ["NUMINOUS_X=1", *LAUNCH, "--model-path", str(tmp_path), "--disable-cuda-graph"]
    command = parse_command(words, pristine_engine, {"HOME": "/x"})
    assert command.environ == {"HOME": "/x", "NUMINOUS_X": "1"}
    assert command.model_config == {"architectures": ["LlamaForCausalLM"]}
    assert command.given["disable_cuda_graph"] is True


@pytest.mark.parametrize("words", [["ls", "-l"], ["vllm", "serve", "m"], ["python", "train.py"]])
def test_other_commands_are_refused(pristine_engine, words):
    with pytest.raises(PatchError, match="is not a serve command"):
        parse_command(words, pristine_engine, {})


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["serve", "m", "--tp", "2"], {"model_path": "m", "tp_size": 2}),
        (["serve", "--model-type", "llm", "m"], {"model_path": "m"}),
        (["serve", "--model-type=llm", "--model", "m"], {"model_path": "m"}),
        (["serve", "m", "--no-dllm-fdfo"], {"model_path": "m", "dllm_fdfo": False}),
        (["serve", "m", "--dllm-fdfo"], {"model_path": "m", "dllm_fdfo": True}),
        (["serve", "m", "--watchdog-timeout", "-1"], {"model_path": "m", "watchdog_timeout": -1.0}),
        (["serve", "m", "--lora-paths", "a", "b"], {"model_path": "m", "lora_paths": ["a", "b"]}),
    ],
)
def test_forms_that_the_engine_takes(pristine_engine, words, given):
    command = parse_command(["sglang", *words], pristine_engine, {})
    assert command.problems == ()
    assert command.given == given


def test_env_in_front(pristine_engine):
    words = ["A=1", "/usr/bin/env", "-u", "B", "C=3", "python3", "-u", *LAUNCH[1:], "--model", "m"]
    command = parse_command(words, pristine_engine, {"B": "2"})
    assert command.environ == {"A": "1", "C": "3"}
    assert command.problems == ()
    cleared = parse_command(
        ["env", "-i", "C=3", "sglang", "serve", "m"], pristine_engine, {"B": ""}
    )
    assert cleared.environ == {"C": "3"}
    with pytest.raises(PatchError, match="env -S"):
        parse_command(["env", "-S", "sglang serve m"], pristine_engine, {})


@pytest.mark.parametrize("prefix", ["nohup", "docker run image", "taskset -c 0", "python wrap.py"])
def test_other_words_in_front_are_named(pristine_engine, prefix):
    (problem,) = parse_command([f"{prefix} sglang serve m"], pristine_engine, {}).problems
    assert f"before the serve command ({prefix}) may change it" in problem


def test_what_cannot_be_read_is_one_line(pristine_engine, fake_engine):
    with pytest.raises(PatchError, match="No closing quotation"):
        parse_command(["sglang serve 'm"], pristine_engine, {})
    other = DirectoryTree(fake_engine / "sglang", "0.5.10")
    with pytest.raises(PatchError, match=r"where 0\.5\.20 does"):
        read_arguments(other)
    choices = other.root / "srt/arg_groups/choices.py"
    choices.parent.mkdir()
    choices.write_text("def broken(:\n")
    with pytest.raises(PatchError, match=r"where 0\.5\.20 does"):
        read_arguments(other)
