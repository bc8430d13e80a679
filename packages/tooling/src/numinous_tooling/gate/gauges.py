# SPDX-License-Identifier: Apache-2.0
"""What a server says of itself while it is measured: running and waiting requests, pool use, retractions, GPU memory.

One small request every `SAMPLE_EVERY_S`, from a thread of the gate's own process, to the first of these that answers:
`/metrics` (SGLang with --enable-metrics, vLLM), SGLang's `/v1/loads`, which reads a snapshot and wakes no scheduler, and
its older `/get_load`. `/server_info` is never asked: it goes through the scheduler. A server without any of them has
no gauges, which is no error.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from numinous_tooling.gate.apis import has_tls

SAMPLE_EVERY_S = 2.0
REQUEST_TIMEOUT_S = 2.0
MEMORY_TIMEOUT_S = 5.0
# A busy server may miss the first; one that has no gauges is then left alone.
SEARCH_ROUNDS = 3

# Gauge -> names of metrics; several ranks are added up, except where the greatest one is the figure.
METRIC_NAMES: Mapping[str, tuple[str, ...]] = {
    "running": ("sglang:num_running_reqs", "vllm:num_requests_running"),
    "queue": ("sglang:num_queue_reqs", "vllm:num_requests_waiting"),
    "token_usage": ("sglang:token_usage", "vllm:kv_cache_usage_perc"),
    "retractions": ("sglang:num_retracted_requests_total", "vllm:num_preemptions_total"),
}
GREATEST = ("token_usage",)
# Counted since the server started; the run's share is the difference.
CUMULATIVE = ("retractions",)

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})? ([-+.\deEinfNa]+)")

Sample = dict[str, float]


def parse_metrics(text: str) -> Sample:
    """Return the gauges in a Prometheus page."""
    values: dict[str, list[float]] = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found:
            with contextlib.suppress(ValueError):
                values.setdefault(found.group(1), []).append(float(found.group(2)))
    sample = {}
    for gauge, names in METRIC_NAMES.items():
        for name in names:
            if name in values:
                sample[gauge] = max(values[name]) if gauge in GREATEST else sum(values[name])
    return sample


def parse_loads(answer: Any) -> Sample:
    """Return the gauges in an answer of `/v1/loads`."""
    loads = answer["loads"]
    return {
        "running": sum(float(load["num_running_reqs"]) for load in loads),
        "queue": sum(float(load["num_waiting_reqs"]) for load in loads),
        "token_usage": max(float(load["token_usage"]) for load in loads),
    }


def parse_get_load(answer: Any) -> Sample:
    """Return the gauges in an answer of `/get_load`, which knows no pool size."""
    waiting = sum(float(load["num_waiting_reqs"]) for load in answer)
    everything = sum(float(load["num_reqs"]) for load in answer)
    return {"running": everything - waiting, "queue": waiting}


def gpu_memory_mib() -> float | None:
    """Return the memory in use on all NVIDIA GPUs of this host together; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        result = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
            timeout=MEMORY_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
        return sum(float(line) for line in result.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


class GaugeSampler:
    """Samples one server in a thread for the length of a block; `summary` says what it saw."""

    def __init__(
        self, url: str, *, local: bool = True, headers: Mapping[str, str] | None = None
    ) -> None:
        self._url = url
        self._headers = headers
        self._local = local
        self._stop = threading.Event()
        self._samples: list[Sample] = []
        self._ends: list[Sample] = []
        self._source: str | None = None
        self._rounds = 0

    @contextlib.contextmanager
    def sampling(self) -> Iterator[GaugeSampler]:
        """Sample until the block ends."""
        with httpx.Client(
            base_url=self._url,
            headers=self._headers,
            trust_env=False,
            verify=has_tls(self._url),
            timeout=REQUEST_TIMEOUT_S,
        ) as http:
            # The first and the last are taken while nothing runs: they bound what is cumulative, and are no load.
            self._ends.append(self._ask(http))
            thread = threading.Thread(target=self._sample, args=(http,), daemon=True)
            thread.start()
            try:
                yield self
            finally:
                self._stop.set()
                thread.join(REQUEST_TIMEOUT_S * 4 + MEMORY_TIMEOUT_S)

    def _sample(self, http: httpx.Client) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            sample = self._ask(http)
            memory = gpu_memory_mib() if self._local else None
            if memory is not None:
                sample["gpu_memory_mib"] = memory
            if sample:
                self._samples.append(sample)
        self._ends.append(self._ask(http))

    def _ask(self, http: httpx.Client) -> Sample:
        """Return one sample from the source that answers; looks for it `SEARCH_ROUNDS` times at most."""
        if self._source is not None:
            return self._get(http, self._source)
        if self._rounds < SEARCH_ROUNDS:
            self._rounds += 1
            for path in ("/metrics", "/v1/loads?include=core", "/get_load"):
                sample = self._get(http, path)
                if sample:
                    self._source = path
                    return sample
        return {}

    def _get(self, http: httpx.Client, path: str) -> Sample:
        # Late, broken or strange answers are samples that are missing, not errors of the run.
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
            response = http.get(path)
            if response.status_code == 200:
                if path == "/metrics":
                    return parse_metrics(response.text)
                if path == "/get_load":
                    return parse_get_load(response.json())
                return parse_loads(response.json())
        return {}

    def summary(self) -> dict[str, Any]:
        """Return source, number of samples, and per gauge maximum and mean (cumulative ones: the difference)."""
        summary: dict[str, Any] = {"source": self._source, "samples": len(self._samples)}
        for gauge in (*METRIC_NAMES, "gpu_memory_mib"):
            if gauge in CUMULATIVE:
                counts = [sample[gauge] for sample in self._ends if gauge in sample]
                if len(counts) == 2:
                    summary[gauge] = counts[1] - counts[0]
                continue
            values = [sample[gauge] for sample in self._samples if gauge in sample]
            if values:
                summary[gauge] = {"max": max(values), "mean": round(sum(values) / len(values), 4)}
        return summary
