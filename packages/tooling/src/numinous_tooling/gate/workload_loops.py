# SPDX-License-Identifier: Apache-2.0
"""Workloads `closed` and `open`: requests of one size, sent by a fixed number of users or at a fixed rate.

Prompts share nothing, so no request finds another's prefix in the cache. An open loop has Poisson arrivals: the gaps
between starts are exponential, seeded, and the same in all repeats and arms.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from numinous_tooling.gate.errors import GateError
from numinous_tooling.gate.plan import (
    CONTEXT_MARGIN_TOKENS,
    ModelFacts,
    SessionPlan,
    Turn,
    check_planned,
    draw,
)


@dataclass(frozen=True)
class LoopSpec:
    """`requests` requests of `input` prompt and `output` new tokens; `rate` per second, or None for a closed loop."""

    input: int
    output: int
    requests: int
    rate: float | None
    seed: int

    length_scale = 1.0
    is_text = False

    @property
    def kind(self) -> str:
        """Name on the command line."""
        return "closed" if self.rate is None else "open"

    @property
    def sessions(self) -> int:
        """How many sessions there are: one per request."""
        return self.requests

    def build(self, model: ModelFacts, repeat: int) -> tuple[SessionPlan, ...]:
        """Return one session of one turn per request."""
        if self.input + self.output > model.context_tokens - CONTEXT_MARGIN_TOKENS:
            raise GateError(
                f"--input {self.input} and --output {self.output} do not fit {model.context_tokens} tokens of context "
                f"less {CONTEXT_MARGIN_TOKENS}"
            )
        check_planned(self.input * self.requests)
        arrivals = random.Random(f"arrivals/{self.seed}")
        turn = Turn(self.input, self.output, 0.0)
        plans: list[SessionPlan] = []
        start_s = 0.0
        for index in range(self.requests):
            ids = draw(model, f"request/{self.seed}/{repeat}/{index}", self.input)
            plans.append(SessionPlan(f"request-{index:05}", start_s, ids, (turn,)))
            if self.rate is not None:
                start_s += arrivals.expovariate(self.rate)
        return tuple(plans)

    def describe(self) -> dict[str, Any]:
        """Return the settings for verdict.json."""
        return {"input": self.input, "output": self.output, "rate": self.rate}
