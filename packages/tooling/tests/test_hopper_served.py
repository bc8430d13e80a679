# SPDX-License-Identifier: Apache-2.0
"""benchmarks/hopper_records/served.py: servers that stay up, commands between them; a stand-in answers for the engine."""

import importlib.util
import json
import shlex
import sys
from pathlib import Path

import psutil
import pytest

FAKE = Path(__file__).with_name("gate_fake_server.py")
FILE = Path(__file__).parents[1] / "benchmarks/hopper_records/served.py"

spec = importlib.util.spec_from_file_location("served", FILE)
served = importlib.util.module_from_spec(spec)
sys.modules["served"] = served
spec.loader.exec_module(served)

ASK = (
    "import json, sys, urllib.request as u; json.load(u.urlopen(sys.argv[1] + '/v1/models'));"
    "open(sys.argv[2], 'a').write(sys.argv[1] + chr(10))"
)


def run(tmp_path, servers, commands, *extra, fake=""):
    command = shlex.join([sys.executable, str(FAKE), "--notes", str(tmp_path), *fake.split()])
    arguments = ["--out", str(tmp_path / "out"), "--model", "m", "--server-command", command]
    arguments += [part for one in servers for part in ("--server", one)]
    return served.main([*arguments, *extra, *commands])


def ask(tmp_path, name):
    return f'{sys.executable} -c "{ASK}" {{{name}}} {tmp_path}/asked'


def pids(tmp_path):
    return [int(line) for line in (tmp_path / "pids").read_text().split()]


def gone(tmp_path):
    alive = [pid for pid in pids(tmp_path) if psutil.pid_exists(pid)]
    return not [p for p in alive if psutil.Process(p).status() != psutil.STATUS_ZOMBIE]


def test_all_commands_run_between_servers_that_stay(tmp_path):
    """Three servers start once, are asked in turn and are gone afterwards; the largest exit code is told."""
    commands = [
        ask(tmp_path, "a"),
        ask(tmp_path, "b"),
        ask(tmp_path, "c"),
        "exit 2",
        ask(tmp_path, "a"),
    ]
    assert run(tmp_path, ["a=", "b=attention.gqa_extend", "c= --name other"], commands) == 2
    asked = (tmp_path / "asked").read_text().split()
    assert len(asked) == 4
    assert asked[0] == asked[3]
    assert len(set(asked)) == 3
    assert len(pids(tmp_path)) == 3
    assert gone(tmp_path)


def test_a_server_gets_its_features_flags_and_state(tmp_path):
    options = served.argparse.Namespace(
        out=tmp_path, model=Path("m"), flags="--x 'a b'", server_command=None
    )
    asked = served.read_servers(
        ["plain=", "two=kv4.glm_dsa,attention.gqa_extend --kv-cache-dtype fp8_e4m3"]
    )
    plain, two = (served.server_of(name, one, options, 7) for name, one in asked.items())
    assert plain.command[-2:] == ["--x", "a b"]
    assert two.command[-4:] == ["--x", "a b", "--kv-cache-dtype", "fp8_e4m3"]
    assert plain.env["SGLANG_PLUGINS"] == "none"
    assert {key for key in two.env if key.startswith("NUMINOUS_")} == {
        "NUMINOUS_STATE_DIR", "NUMINOUS_KV4_GLM_DSA", "NUMINOUS_ATTENTION_GQA_EXTEND",
    }  # fmt: skip
    assert "SGLANG_PLUGINS" not in two.env or two.env["SGLANG_PLUGINS"] != "none"
    filled = served.fill("x {two} {two_state} {{y}}", {"plain": plain, "two": two})
    assert filled == f"x http://127.0.0.1:7 {tmp_path}/state-two {{y}}"


def test_a_server_that_ends_is_told_with_its_log(tmp_path, capsys):
    assert run(tmp_path, ["a=", "b="], ["true"], fake="--die-at-start") == served.SERVER_FAILED
    assert "server" in capsys.readouterr().err


def test_a_server_that_dies_under_a_command_ends_the_run(tmp_path, capsys):
    """The commands behind it would measure nothing."""
    body = shlex.quote(json.dumps({"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}))
    body = body.replace("{", "{{").replace("}", "}}")
    kill = f"curl -s -m 5 -d {body} {{a}}/generate; sleep 0.5; exit 0"
    after = f"touch {tmp_path}/after"
    assert run(tmp_path, ["a="], [kill, after], fake="--die-after 0") == served.SERVER_FAILED
    assert not (tmp_path / "after").exists()
    assert "ended" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("servers", "command"),
    [(["a=", "a="], "true"), (["a"], "true"), (["a b="], "true"), (["a="], "echo {b}"), (["a="], "echo {")],
)  # fmt: skip
def test_bad_usage_starts_nothing(tmp_path, servers, command):
    assert run(tmp_path, servers, [command]) == 2
    assert not (tmp_path / "pids").exists()
