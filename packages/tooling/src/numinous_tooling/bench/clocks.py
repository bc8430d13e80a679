# SPDX-License-Identifier: Apache-2.0
"""How a launch is made repeatable and how long it takes, on a GPU and, to test the path, on the CPU.

A GPU launch is a captured graph. Its time is the distance of two events around one replay, after a write of
256 MiB on the same stream: that leaves nothing of the inputs in L2, and keeps the device busy until the replay is
queued, so that the CPU's part is not in the time. Nothing is subtracted; the launch floor stands beside (`roofs`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

FLUSH_BYTES = 256 << 20
CPU_FLUSH_BYTES = 8 << 20


@dataclass
class Launch:
    """A repeatable call.

    Args:
        replay: does the work once more, on the same inputs and into the same outputs (on the CPU: into new ones).
        outputs: what the call returned; on a GPU their memory is rewritten by each replay.
    """

    replay: Callable[[], None]
    outputs: Any


class Clock(Protocol):
    """A device on which launches are prepared and timed."""

    device: torch.device
    arch: str
    """``sm90``, ``gfx950`` …, or ``cpu``."""
    l2_bytes: int

    def prepare(self, call: Callable[[], Any]) -> Launch:
        """Run `call` twice, so that it compiles, tunes and allocates, then make it repeatable."""

    def sample(self, launch: Launch) -> float:
        """Microseconds of one replay on a cold cache."""

    def synchronize(self) -> None:
        """Wait until everything queued has run."""

    def free_bytes(self) -> int:
        """Device memory that inputs may be copied into."""

    def release(self) -> None:
        """Give cached memory back after a case."""


class CudaClock:
    """The current CUDA or HIP device; torch names both ``cuda``."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("no GPU that torch can use")
        self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        self.arch = (
            properties.gcnArchName.partition(":")[0]
            if torch.version.hip
            else f"sm{properties.major}{properties.minor}"
        )
        self.l2_bytes = properties.L2_cache_size
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        self._stream = torch.cuda.Stream()

    def prepare(self, call: Callable[[], Any]) -> Launch:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                call()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                outputs = call()
        except Exception:
            # A capture that fails leaves the default generator waiting for its end, and the next randn would raise.
            generator = torch.cuda.default_generators[self.device.index]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        return Launch(graph.replay, outputs)

    def sample(self, launch: Launch) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.fill_(1)
        start.record()
        launch.replay()
        end.record()
        end.synchronize()
        return 1e3 * float(start.elapsed_time(end))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info()[0])

    def release(self) -> None:
        torch.cuda.empty_cache()


class CpuClock:
    """Wall clock, no graph. Its figures say nothing about a GPU; it exists so that the path can be tested."""

    device = torch.device("cpu")
    arch = "cpu"
    l2_bytes = 1 << 20

    def __init__(self) -> None:
        self._flush = torch.empty(CPU_FLUSH_BYTES, dtype=torch.uint8)

    def prepare(self, call: Callable[[], Any]) -> Launch:
        launch = Launch(lambda: setattr(launch, "outputs", call()), None)
        for _ in range(2):
            launch.replay()
        return launch

    def sample(self, launch: Launch) -> float:
        self._flush.fill_(1)
        start = time.perf_counter_ns()
        launch.replay()
        return (time.perf_counter_ns() - start) / 1e3

    def synchronize(self) -> None:
        pass

    def free_bytes(self) -> int:
        return 1 << 30

    def release(self) -> None:
        pass
