# SPDX-License-Identifier: Apache-2.0
"""Names and defaults of `scheduler.decode_burst`, which its declaration and its adapter share."""

from __future__ import annotations

from numinous_tooling.patching import Option

FEATURE_ID = "scheduler.decode_burst"

MAX_WAIT = Option(
    name="NUMINOUS_SCHEDULER_DECODE_BURST_MAX_WAIT_MS",
    kind="float",
    default=1000.0,
    minimum=0.0,
    doc="A burst ends once the oldest waiting request has waited this long (milliseconds).",
)
MAX_QUEUE = Option(
    name="NUMINOUS_SCHEDULER_DECODE_BURST_MAX_QUEUE",
    kind="int",
    default=64,
    minimum=0,
    doc="A burst ends once more than this many requests wait.",
)
