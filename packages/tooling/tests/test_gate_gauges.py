# SPDX-License-Identifier: Apache-2.0
"""Gauges: what is read from each source, what a summary says, and that a strange server disturbs nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("httpx")

from numinous_tooling.gate import gauges
from numinous_tooling.gate.gauges import (
    GaugeSampler,
    gpu_memory_mib,
    parse_get_load,
    parse_loads,
    parse_metrics,
)

SGLANG = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0",model_name="a b"} 3.0
sglang:num_running_reqs{dp_rank="1",model_name="a b"} 4.0
sglang:num_running_reqs_other 99.0
sglang:num_queue_reqs{dp_rank="0"} 1.0
sglang:token_usage{dp_rank="0"} 0.25
sglang:token_usage{dp_rank="1"} 5e-1
sglang:num_retracted_requests_total{dp_rank="0"} 7.0
"""
VLLM = """\
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.125
vllm:num_preemptions_total{engine="0"} 1.0
"""


def test_metrics_of_both_engines() -> None:
    sglang = {"running": 7.0, "queue": 1.0, "token_usage": 0.5, "retractions": 7.0}
    assert parse_metrics(SGLANG) == sglang
    vllm = {"running": 2.0, "queue": 0.0, "token_usage": 0.125, "retractions": 1.0}
    assert parse_metrics(VLLM) == vllm
    assert parse_metrics("<html>no metrics</html>\nsomething 1.0\n") == {}


def test_load_routes() -> None:
    loads = [
        {"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.2},
        {"num_running_reqs": 1, "num_waiting_reqs": 0, "token_usage": 0.4},
    ]
    assert parse_loads({"loads": loads}) == {"running": 4, "queue": 1, "token_usage": 0.4}
    old = [{"num_reqs": 5, "num_waiting_reqs": 2}, {"num_reqs": 1, "num_waiting_reqs": 0}]
    assert parse_get_load(old) == {"running": 4, "queue": 2}


def test_gpu_memory_is_that_of_all_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '1000\\n24\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpu_memory_mib() == 1024
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_memory_mib() is None
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert gpu_memory_mib() is None


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Serve pages by path; returns URL and the list of paths that were asked for."""
    monkeypatch.setattr(gauges, "SAMPLE_EVERY_S", 0.01)
    monkeypatch.setattr(gauges, "gpu_memory_mib", lambda: 10.0)
    servers = []

    def start(page: Callable[[str, int], tuple[int, str]]) -> tuple[str, list[str]]:
        asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                status, text = page(self.path, len(asked))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def sample(url: str, asked: list[str], requests: int, *, local: bool = True) -> dict:
    """Sample until so many requests were made; return the summary."""
    sampler = GaugeSampler(url, local=local)
    enough = threading.Event()
    with sampler.sampling():
        for _ in range(3000):
            if len(asked) >= requests or enough.wait(0.01):
                break
    return sampler.summary()


def test_summary_has_maximum_mean_and_difference(serve: Callable) -> None:
    def page(path: str, number: int) -> tuple[int, str]:
        # The first request finds the source and is the base of what is cumulative; it is no sample of load.
        running = {1: 100, 2: 2}.get(number, 4)
        return 200, (
            f"sglang:num_running_reqs {running}\nsglang:num_retracted_requests_total {10 + number}\n"
        )

    url, asked = serve(page)
    summary = sample(url, asked, 6)
    assert set(asked) == {"/metrics"}
    assert summary["source"] == "/metrics"
    assert summary["running"]["max"] == 4
    assert 2 < summary["running"]["mean"] < 4
    assert summary["retractions"] == len(asked) - 1
    assert summary["samples"] == len(asked) - 2
    assert summary["gpu_memory_mib"] == {"max": 10.0, "mean": 10.0}
    assert "queue" not in summary


def test_source_is_kept_once_it_is_found(serve: Callable) -> None:
    url, asked = serve(lambda path, _: (404, "") if "get_load" not in path else (200, "[]"))
    summary = sample(url, asked, 6)
    assert asked[:3] == ["/metrics", "/v1/loads?include=core", "/get_load"]
    assert set(asked[3:]) == {"/get_load"}
    assert summary["running"] == {"max": 0.0, "mean": 0.0}


def test_server_without_gauges_is_soon_left_alone(serve: Callable) -> None:
    url, asked = serve(lambda *_: (200, "hello"))
    sampler = GaugeSampler(url)
    with sampler.sampling():
        for _ in range(3000):
            if len(sampler._samples) >= 12:  # memory is sampled all the same
                break
            time.sleep(0.01)
    assert len(asked) == 3 * gauges.SEARCH_ROUNDS
    summary = sampler.summary()
    assert summary["source"] is None
    assert {"running", "queue"}.isdisjoint(summary)


def test_strange_and_missing_answers_are_missing_samples(serve: Callable) -> None:
    loads = '{"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 0, "token_usage": 0}]}'

    def page(path: str, number: int) -> tuple[int, str]:
        if path == "/metrics":
            return 404, ""
        return [(200, loads), (200, "{broken"), (500, "no"), (200, '{"loads": 3}')][number % 4]

    url, asked = serve(page)
    summary = sample(url, asked, 20, local=False)
    assert summary["source"] == "/v1/loads?include=core"
    assert summary["running"] == {"max": 1.0, "mean": 1.0}
    assert summary["samples"] < len(asked) - 3
    # GPUs of another host are not this host's.
    assert "gpu_memory_mib" not in summary


def test_server_that_is_gone_disturbs_nothing() -> None:
    sampler = GaugeSampler("http://127.0.0.1:9")
    with sampler.sampling():
        pass
    assert sampler.summary()["source"] is None
