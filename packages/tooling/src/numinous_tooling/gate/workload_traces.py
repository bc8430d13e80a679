# SPDX-License-Identifier: Apache-2.0
"""Workload `mooncake`: requests of a Mooncake-format trace, open loop by its timestamps.

A line of the trace has `timestamp` (ms), `input_length` and `output_length` (tokens) and `hash_ids`, one per block of
512 prompt tokens; equal ids mean equal tokens up to there. The tokens of a block are drawn from its id (and seed and
repeat), so the replay has the prefix structure of the recording. A *length scale* scales blocks and lengths alike;
times are divided by a *speedup*. Requests are the first of the trace that fit the model's context: the number left
out is in the report.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.plan import (
    CONTEXT_MARGIN_TOKENS,
    ModelFacts,
    SessionPlan,
    Turn,
    check_planned,
    draw,
    file_digest,
)

BLOCK_TOKENS = 512


def read_lines(trace: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and object of each line of a JSON-lines file, gzipped where its name ends in .gz."""
    try:
        with (gzip.open if trace.suffix == ".gz" else open)(trace, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise GateError(f"--trace {trace} line {number}: not a JSON object")
                yield number, row
    except OSError as error:
        raise GateError(f"--trace {trace}: {error.strerror or error}") from error
    except (ValueError, EOFError, RecursionError, zlib.error) as error:
        raise GateError(f"--trace {trace} is not JSON lines ({error})") from error


@dataclass(frozen=True)
class TraceRequest:
    """One line of the trace: seconds since its first line, token counts, ids of its prompt's blocks."""

    at_s: float
    prompt: int
    completion: int
    blocks: tuple[int, ...]


def read_trace(trace: Path) -> tuple[TraceRequest, ...]:
    """Read a trace in Mooncake format, ordered by time."""
    requests = []
    for number, row in read_lines(trace):
        try:
            request = TraceRequest(
                float(row["timestamp"]) / 1e3,
                int(row["input_length"]),
                int(row["output_length"]),
                tuple(int(block) for block in row["hash_ids"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise GateError(
                f"--trace {trace} line {number} is not in Mooncake format "
                "(timestamp, input_length, output_length, hash_ids)"
            ) from error
        if not math.isfinite(request.at_s):
            raise GateError(f"--trace {trace} line {number}: timestamp is no finite number")
        if request.prompt < 1 or request.completion < 1:
            raise GateError(f"--trace {trace} line {number}: lengths must be at least 1")
        requests.append(request)
    return tuple(sorted(requests, key=lambda request: request.at_s))


@dataclass(frozen=True)
class MooncakeSpec:
    """The first `requests` requests of a trace that fit the context."""

    trace: Path
    requests: int
    length_scale: float
    speedup: float
    seed: int

    kind = "mooncake"
    is_text = False

    @property
    def sessions(self) -> int:
        """How many sessions there are: one per request."""
        return self.requests

    def build(self, model: ModelFacts, repeat: int) -> tuple[SessionPlan, ...]:
        """Return one session of one turn per request."""
        chosen, _ = self._choose(model)
        check_planned(sum(self._scaled(request.prompt) for request in chosen))
        block_tokens = max(1, round(BLOCK_TOKENS * self.length_scale))
        seed = f"{self.seed}/{repeat}"
        drawn: dict[int, tuple[int, ...]] = {}
        plans = []
        for index, request in enumerate(chosen):
            prompt = self._scaled(request.prompt)
            ids: list[int] = []
            for block in request.blocks[: math.ceil(prompt / block_tokens)]:
                if block not in drawn:
                    drawn[block] = draw(model, f"block/{seed}/{block}", block_tokens)
                ids += drawn[block]
            # Scaled blocks may be a token short of the scaled length, and a trace may hash whole blocks only.
            ids += draw(model, f"rest/{seed}/{index}", max(0, prompt - len(ids)))
            turn = Turn(prompt, self._scaled(request.completion), 0.0)
            start_s = (request.at_s - chosen[0].at_s) / self.speedup
            plans.append(SessionPlan(f"request-{index:05}", start_s, tuple(ids[:prompt]), (turn,)))
        return tuple(plans)

    def describe(self) -> dict[str, Any]:
        """Return the settings for verdict.json."""
        return {
            "trace": self.trace.name,
            "trace_sha256": file_digest(self.trace),
            "speedup": self.speedup,
            "block_tokens": max(1, round(BLOCK_TOKENS * self.length_scale)),
        }

    def notes(self, model: ModelFacts) -> list[str]:
        """Return what a reader must know of the choice."""
        _, skipped = self._choose(model)
        if not skipped:
            return []
        return [f"{skipped} requests of {self.trace.name} that do not fit the context are left out"]

    def _scaled(self, tokens: int) -> int:
        return max(1, round(tokens * self.length_scale))

    def _choose(self, model: ModelFacts) -> tuple[list[TraceRequest], int]:
        """Return the requests, and how many were skipped before the last of them."""
        limit = model.context_tokens - CONTEXT_MARGIN_TOKENS
        chosen: list[TraceRequest] = []
        skipped = 0
        for request in read_trace(self.trace):
            if len(chosen) == self.requests:
                break
            if self._scaled(request.prompt) + self._scaled(request.completion) <= limit:
                chosen.append(request)
            else:
                skipped += 1
        if len(chosen) < self.requests:
            raise GateError(
                f"only {len(chosen)} requests of --trace {self.trace} fit {model.context_tokens} tokens of context "
                f"at length scale {self.length_scale:g}, {self.requests} wanted; lower --requests or --length-scale"
            )
        return chosen, skipped
