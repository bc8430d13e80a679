# SPDX-License-Identifier: Apache-2.0
"""`numinous diag bytes` on logs of the engine's own format, on answers of ``/server_info``, and on nonsense.

The logs are made of the format strings of SGLang 0.5.20 with figures of an 8 B Llama on one H200, worked out here by
hand: 32 layers of 8 KV heads of 128 in bf16 are 131,072 bytes a token.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from numinous_tooling.diag.command import diag
from numinous_tooling.diag.memory import DiagError, from_log, from_server_info, parse_gpu_processes
from numinous_tooling.roofline import models
from numinous_tooling.roofline.pools import state_bytes

GIB = 1 << 30
CELL = 131_072
WEIGHTS_GIB = 14.958  # 8,030,261,248 parameters in bf16
BEGIN, LOADED, FRACTION = 138.67, 123.70, 0.88
BUDGET = LOADED - BEGIN * (1 - FRACTION)  # GiB
TOKENS = int(BUDGET * GIB / CELL)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def config(tmp_path) -> str:
    path = tmp_path / "llama" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(LLAMA))
    return str(path)


def start_log(
    tokens: int = TOKENS,
    weights: float = WEIGHTS_GIB + 0.012,
    cell: int = CELL,
    dtype: str = "bfloat16",
    arguments: str = "",
    kv_line: str = "KV Cache is allocated. dtype: torch.{dtype}, #tokens: {tokens}, K size: {half:.2f} GB, V size: {half:.2f} GB",
    left: float = 13.9,
) -> str:
    half = (tokens + 1) * cell / 2 / GIB
    return f"""\
[2026-11-29 10:00:00] server_args={{'model_path': 'm', 'tp_size': 1, 'page_size': 1, 'mem_fraction_static': {FRACTION}, 'dtype': 'auto', 'max_total_tokens': None{arguments}}}
[2026-11-29 10:00:09] Load weight begin. avail mem={BEGIN:.2f} GB
[2026-11-29 10:00:21] Load weight end. elapsed=11.60 s, type=LlamaForCausalLM, avail mem={LOADED:.2f} GB, mem usage={weights:.2f} GB.
[2026-11-29 10:00:22] {kv_line.format(dtype=dtype, tokens=tokens, half=half, both=2 * half)}
[2026-11-29 10:00:22] Memory pool end. avail mem=16.40 GB
[2026-11-29 10:00:40] Capture target decode CUDA graph end. elapsed=12.00 s, mem usage=1.10 GB, avail mem=15.20 GB.
[2026-11-29 10:00:50] Capture target prefill CUDA graph end. elapsed=9.00 s, mem usage=1.25 GB, avail mem=13.90 GB.
[2026-11-29 10:00:51] max_total_num_tokens={tokens}, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=4096, context_len=131072, available_gpu_mem={left:.2f} GB
"""


def judged(
    capsys, config: str, log: str, tmp_path: Path, *more: str
) -> tuple[int, dict[str, dict]]:
    path = tmp_path / "server.log"
    path.write_text(log)
    code = diag(["bytes", "--config", config, "--log", str(path), "--json", *more])
    shown = capsys.readouterr()
    assert shown.err == ""
    return code, {row["name"]: row for row in json.loads(shown.out)["rows"]}


def test_a_start_that_agrees(capsys, config, tmp_path):
    code, rows = judged(capsys, config, start_log(), tmp_path)
    assert code == 0
    assert rows["weights, GiB"]["predicted"] == pytest.approx(WEIGHTS_GIB, abs=0.001)
    assert rows["KV bytes per token"]["predicted"] == CELL
    assert rows["KV bytes per token"]["measured"] == pytest.approx(CELL, rel=1e-3)
    assert rows["tokens of the pool"]["predicted"] == pytest.approx(TOKENS, abs=2)
    assert rows["CUDA graphs, GiB"]["measured"] == pytest.approx(2.35)
    used = BEGIN - 13.9
    assert rows["used since the load began, GiB"]["measured"] == pytest.approx(used)
    named = WEIGHTS_GIB + 0.012 + (TOKENS + 1) * CELL / GIB + 2.35
    assert rows["unexplained, GiB"]["measured"] == pytest.approx(used - named, abs=0.02)
    assert all(rows[name]["holds"] for name in rows if rows[name]["predicted"] is not None)


@pytest.mark.parametrize(
    ("fault", "row"),
    [
        ({"weights": 2 * WEIGHTS_GIB}, "weights, GiB"),
        ({"cell": 2 * CELL}, "KV bytes per token"),
        ({"cell": CELL // 2, "dtype": "bfloat16"}, "KV pool, GiB"),
        ({"tokens": TOKENS * 8 // 10}, "tokens of the pool"),
    ],
)
def test_a_start_that_does_not(capsys, config, tmp_path, fault, row):
    code, rows = judged(capsys, config, start_log(**fault), tmp_path)
    assert code == 1
    assert rows[row]["holds"] is False


def test_fp8_rows_a_cap_and_a_pool_sized_after_the_graphs(capsys, config, tmp_path):
    line = "Post-capture KV sizing: KV cache allocated. dtype: torch.{dtype}, #tokens: {tokens}, KV size: {both:.2f} GB, avail mem=9.00 GB"
    log = start_log(tokens=100_000, cell=CELL // 2, dtype="float8_e4m3fn", kv_line=line)
    log = log.replace("'max_total_tokens': None", "'max_total_tokens': 100000")
    code, rows = judged(capsys, config, log, tmp_path)
    assert code == 0
    assert rows["KV bytes per token"]["predicted"] == CELL // 2
    assert rows["tokens of the pool"]["predicted"] == rows["tokens of the pool"]["measured"] == 1e5


def test_of_several_ranks_the_first_is_read():
    one = start_log()
    stamped = one.replace("10:00:21] Load", "10:00:21 TP0] Load")
    other = "[2026-11-29 10:00:20 TP1] Load weight end. elapsed=1 s, type=x, avail mem=1.00 GB, mem usage=99.00 GB.\n"
    assert from_log(other + stamped).weights == from_log(one).weights
    draft = "[2026-11-29 10:00:21] Draft KV Cache is allocated. dtype: torch.bfloat16, #tokens: 5, K size: 9.00 GB, V size: 9.00 GB\n"
    assert from_log(draft + one).kv == from_log(one).kv


def test_request_states(capsys, tmp_path):
    name, slots = "kimi-k3", 40
    per_slot = state_bytes(models.read(name), 8)
    assert per_slot > 0
    size = (slots + 1) * per_slot / GIB
    line = (
        f"[2026-11-29 10:00:22] Mamba Cache is allocated. max_mamba_cache_size: {slots}, "
        f"conv_state size: {size / 10:.2f}GB, ssm_state size: {size * 9 / 10:.2f}GB \n"
    )
    code, rows = judged(
        capsys, name, start_log().replace("'tp_size': 1", "'tp_size': 8") + line, tmp_path
    )
    assert rows["request states, GiB"]["holds"] is True
    assert code == 1, "these are not the weights of Kimi K3"


def info(**changed: object) -> dict[str, object]:
    usage = {
        "weight": round(WEIGHTS_GIB, 3),
        "kvcache": round((TOKENS + 1) * CELL / GIB, 3),
        "startup_available": 13.9,
        "token_capacity": TOKENS,
        "token_capacity_swa": None,
        "graph": {"decode": 1.1, "prefill": 1.25},
    }
    arguments = {"tp_size": 1, "page_size": 1, "dtype": "auto", "kv_cache_dtype": "auto"}
    return arguments | {
        "mem_fraction_static": FRACTION,
        "max_total_num_tokens": TOKENS,
        "internal_states": [{"memory_usage": usage | changed}],
    }


class Answer(BaseHTTPRequestHandler):
    """Answers every GET with what the test put here."""

    status, body = 200, b"{}"

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch):
    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join(60)
    server.server_close()


def test_a_running_server(capsys, config, url, monkeypatch, tmp_path):
    monkeypatch.setattr(Answer, "body", json.dumps(info()).encode())
    assert diag(["bytes", "--config", config, "--url", url]) == 0
    shown = capsys.readouterr().out
    assert "byte model against /server_info" in shown
    assert "KV rows bf16 (assumed; say --kv-dtype)" in shown
    monkeypatch.setattr(Answer, "body", json.dumps(info(kvcache=50.0)).encode())
    assert diag(["bytes", "--config", config, "--url", url]) == 1
    assert "does not hold" in capsys.readouterr().out
    # Both: the log's finer facts, the server's where the log has none.
    code, rows = judged(capsys, config, start_log(), tmp_path, "--url", url)
    assert code == 0
    assert rows["used since the load began, GiB"]["measured"] == pytest.approx(BEGIN - 13.9)


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (404, b"", "answers 404; is it an SGLang server?"),
        (200, b"<html>", "is a server running there?"),
        (200, b"[1]", "answers no JSON object"),
        (200, b"{}", "names no memory_usage"),
        (200, b'{"internal_states": [{"memory_usage": {"weight": "x"}}]}', "names no memory_usage"),
    ],
)
def test_nonsense_of_a_server_is_one_line(capsys, config, url, monkeypatch, status, body, text):
    monkeypatch.setattr(Answer, "status", status)
    monkeypatch.setattr(Answer, "body", body)
    assert diag(["bytes", "--config", config, "--url", url]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "give --url of a running server, --log of its start, or both"),
        (["--url", "localhost:30000"], "want http://host:port"),
        (["--url", "http://127.0.0.1:9"], "is a server running there?"),
        (["--log", "/nowhere.log"], "No such file"),
        (["--log", "{config}"], "no line `Load weight end`"),
        (["--log", "{log}", "--tp", "0"], "--tp 0: want a whole number from 1 on"),
        (["--log", "{log}", "--page-size", "-1"], "--page-size -1"),
        (["--log", "{log}", "--tp", "many"], "invalid int value: 'many'"),
        (["--log", "{log}", "--tolerance", "100"], "--tolerance 100.0: want percent"),
        (["--log", "{log}", "--kv-dtype", "int3"], "no KV dtype int3"),
        (["--log", "{log}", "--weights", "int3"], "no weight format int3"),
        (["--log", "{log}", "--nvidia-smi"], "there is no nvidia-smi here"),
    ],
)
def test_bad_use_is_one_line(capsys, config, tmp_path, monkeypatch, words, text):
    monkeypatch.setenv("PATH", str(tmp_path))
    log = tmp_path / "server.log"
    log.write_text(start_log())
    words = [word.format(config=config, log=log) for word in words]
    assert diag(["bytes", "--config", config, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


def test_an_unknown_pool_is_refused():
    assert from_log(start_log(dtype="uint8")).kv_type == "uint8"
    with pytest.raises(DiagError, match="names no memory_usage"):
        from_server_info({"internal_states": []})


def test_processes_on_gpus(capsys, config, tmp_path, monkeypatch):
    text = "GPU-1, 100, 131072\nGPU-1, 101, [N/A]\n\n"
    assert parse_gpu_processes(text) == [{"gpu": "GPU-1", "pid": 100, "mib": 131072}]
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{text}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    log = tmp_path / "server.log"
    log.write_text(start_log())
    assert diag(["bytes", "--config", config, "--log", str(log), "--nvidia-smi"]) == 0
    assert "process 100 holds 131,072 MiB" in capsys.readouterr().out
