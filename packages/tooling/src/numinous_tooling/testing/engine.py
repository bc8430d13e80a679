# SPDX-License-Identifier: Apache-2.0
"""Pytest fixtures for hooks in the real engine on the CPU: a tiny random model, and a server around it.

In a package's ``tests/conftest.py``::

    from numinous_tooling.testing.engine import serve, tiny_model

Needs the extras ``[test]`` and ``[gate]``, an installed engine and numinous-cpu-platform; a test that asks for them
where they are missing is skipped with the reason.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from numinous_tooling.gate.errors import ServerFailed
from numinous_tooling.gate.servers import Interrupts, Server, free_port
from numinous_tooling.patching.counters import ProcessState, read_processes, read_totals

START_TIMEOUT_S = 300.0
FLAGS = (
    "--skip-tokenizer-init --dtype float32 --disable-cuda-graph --skip-server-warmup --decode-log-interval 1 "
    "--max-total-tokens 8192 --max-running-requests 16 --context-length 2048 --prefill-max-requests 1"
)
"""A small server, one request per prefill, and a log line for every decode batch."""


def save_tiny_llama(path: Path, **changes: Any) -> None:
    """Write a random two-layer Llama as a Hugging Face directory; `changes` replace fields of its config."""
    torch = pytest.importorskip(
        "torch", reason="engine tests need torch: python -m numinous_cpu_platform install"
    )
    transformers = pytest.importorskip("transformers", reason="engine tests need transformers")
    torch.manual_seed(7)
    shape = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    config = transformers.LlamaConfig(**(shape | changes))
    transformers.LlamaForCausalLM(config).to(torch.float32).save_pretrained(path)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama (vocabulary 512, 4 heads) as a Hugging Face directory; no tokenizer."""
    path: Path = tmp_path_factory.mktemp("tiny") / "model"
    save_tiny_llama(path)
    return path


def engine_server(
    name: str, model: Path, folder: Path, flags: Sequence[str], *module: str, **environ: str
) -> Server:
    """An engine on the CPU platform, not started yet; the test is skipped with the reason where it cannot be.

    Args:
        name: in messages.
        model: Hugging Face directory.
        folder: for its log and for the state of its processes.
        flags: of the server, besides model and port.
        module: what ``python -m`` runs, with its first arguments.
        environ: over the caller's, of which `NUMINOUS_*` and `SGLANG_*` are left out.
    """
    pytest.importorskip(
        "sglang", reason="engine tests need SGLang: python -m numinous_cpu_platform install"
    )
    pytest.importorskip("numinous_cpu_platform", reason="engine tests need numinous-cpu-platform")
    port = free_port()
    command = [sys.executable, "-m", *module, "--model-path", str(model), "--port", str(port)]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("NUMINOUS_", "SGLANG_"))}
    env |= {
        "SGLANG_PLATFORM": "numinous-cpu",
        "NUMINOUS_STATE_DIR": str(folder / "state"),
        "HF_HUB_OFFLINE": "1",
    }
    env |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} | environ
    return Server(name, [*command, *flags], env, folder / "server.log", port)


@dataclass
class Running:
    """A server under test."""

    server: Server
    state: Path

    def generate(
        self, *prompts: list[int], new_tokens: int, rid: list[str] | None = None
    ) -> list[list[int]]:
        """Send all prompts in one request (they reach the scheduler together); returns the tokens of each."""
        body: dict[str, Any] = {
            "input_ids": list(prompts),
            "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
        }
        if rid:
            body["rid"] = rid
        try:
            answer = httpx.post(
                f"{self.server.url}/generate", json=body, timeout=120, trust_env=False
            )
        except httpx.HTTPError as error:
            pytest.fail(f"{type(error).__name__}: {error}\n{self.server.tail()}")
        assert answer.status_code == 200, answer.text
        return [item["output_ids"] for item in answer.json()]

    def post(self, path: str, **body: Any) -> httpx.Response:
        """POST a JSON body to the server."""
        return httpx.post(f"{self.server.url}{path}", json=body, timeout=60, trust_env=False)

    def batches(self) -> str:
        """Every batch so far, ``P`` or ``D`` a letter, in the order in which the scheduler ran them.

        The scheduler answers a request before it logs the batch that ended it: `settle` first where the last one counts.
        """
        kinds = re.findall(r"(Prefill|Decode) batch, #", self.server.log.read_text())
        return "".join(kind[0] for kind in kinds)

    def settle(self) -> None:
        """Return when the scheduler is through with the batches whose answers are out, their log lines included.

        It takes requests between batches only, so whatever it answers next comes after them.
        """
        answer = httpx.get(f"{self.server.url}/server_info", timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text

    def totals(self, feature: str) -> dict[str, int]:
        """Counters of a feature, summed over the processes of this server."""
        return read_totals(self.state).get(feature, {})

    def processes(self) -> list[ProcessState]:
        """The engine processes in which numinous booted."""
        return list(read_processes(self.state))


@pytest.fixture(scope="session")
def serve(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Start the engine on the CPU platform with a decode log line per step; gone after the block."""

    @contextlib.contextmanager
    def running(*flags: str, wait: bool = True, **environ: str) -> Iterator[Running]:
        folder = tmp_path_factory.mktemp("server")
        server = engine_server(
            "under test",
            tiny_model,
            folder,
            [*FLAGS.split(), *flags],
            "sglang.launch_server",
            **environ,
        )
        # Killed at the end: an engine that is asked to end takes seconds to, one core busy, and a test has read all it wants.
        with server.running(Interrupts(), stop_grace_s=0):
            if wait:
                try:
                    server.wait_ready(START_TIMEOUT_S, lambda elapsed: None)
                except ServerFailed as failure:
                    pytest.fail(f"{failure}\n{server.tail()}")
            yield Running(server, folder / "state")

    return running
