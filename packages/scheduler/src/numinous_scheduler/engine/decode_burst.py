# SPDX-License-Identifier: Apache-2.0
"""``scheduler.decode_burst``: after a prefill, up to N decode batches before the next prefill.

*Rule*    A prefill batch arms a budget of N (``--num-continuous-decode-steps``). Each decode batch takes one. While
          the budget lasts and requests wait, prefill is held back, unless
          - more than MAX_QUEUE requests wait, or the oldest has waited MAX_WAIT_MS (``queue_cap``, ``wait_cap``);
          - nothing is left to decode (``nothing_to_decode``): the next prefill starts at once;
          - a prompt is between two of its chunks (``chunked_prefill``): chunks of one prompt stay together, as in
            stock, so that a half-filled prompt does not sit on cache memory; its last chunk arms the budget.
*Ranks*   Tensor-parallel ranks run one program: if one rank prefills while another decodes, they enter different
          collectives and hang. Every input of the rule is the same on all ranks (batches run, queue, chunked
          request, finished flags) except time. So only the rank that pulls requests from the tokenizer looks at a
          clock; its verdict rides the broadcast that carries the requests, as stock does for request time-outs.
*Cost*    a few attribute reads per scheduler step; O(queue) only while a burst holds requests, and the queue is then
          at most MAX_QUEUE long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numinous_scheduler.options import FEATURE_ID, MAX_QUEUE, MAX_WAIT
from numinous_tooling.patching.counters import FeatureCounters, counters
from numinous_tooling.patching.flags import option_value


@dataclass(frozen=True)
class EndBurst:
    """Travels with the broadcast requests: the pulling rank saw a request wait too long."""


@dataclass
class DecodeBurst:
    """State of the rule in one scheduler process.

    Args:
        steps: decode batches after a prefill.
        max_wait_s: longest wait of a queued request before a burst ends, seconds.
        max_queue: longest queue before a burst ends.
        count: engaged / refused counters.
    """

    steps: int
    max_wait_s: float
    max_queue: int
    count: FeatureCounters
    remaining: int = 0

    def holds_prefill(self, scheduler: Any) -> bool:
        """Whether waiting requests stay queued in this step; called after the last prefill was merged."""
        waiting = len(scheduler.waiting_queue)
        if not self.remaining or not waiting or scheduler.chunked_req is not None:
            return False
        if not _can_decode(scheduler):
            self._end("nothing_to_decode")
        elif waiting > self.max_queue:
            self._end("queue_cap")
        else:
            self.count.engaged()
            return True
        return False

    def ran(self, scheduler: Any, batch: Any) -> None:
        """Note the batch that the scheduler chose for this step (None: it idles)."""
        if batch is None:
            self.remaining = 0
        elif batch.forward_mode.is_extend():
            if scheduler.chunked_req is not None:  # more chunks of this prompt follow
                self.remaining = 0
                self.count.refused("chunked_prefill")
            else:
                self.remaining = self.steps
        elif self.remaining:
            self.remaining -= 1

    def waited_too_long(self, scheduler: Any) -> bool:
        """On the pulling rank only: whether a held request has reached the cap."""
        if not self.remaining or not scheduler.waiting_queue:
            return False
        oldest = min(req.time_stats.wait_queue_entry_time for req in scheduler.waiting_queue)
        return time.perf_counter() - oldest > self.max_wait_s

    def end_by_wait(self) -> None:
        """On every rank: the pulling rank said so."""
        if self.remaining:
            self._end("wait_cap")

    def _end(self, reason: str) -> None:
        self.remaining = 0
        self.count.refused(reason)


def _can_decode(scheduler: Any) -> bool:
    """Whether a decode batch would not be empty. Stock filters finished requests by the same flag."""
    running, last = scheduler.running_batch, scheduler.last_batch
    if running.is_empty() and last is not None and last.forward_mode.is_extend():
        running = last  # stock makes the last prefill the running batch when there was none
    return not running.is_prefill_only and any(not req.finished() for req in running.reqs)


# A process runs one scheduler; the request receiver that it owns does not know it.
_scheduler: Any = None


def after_init_chunked_prefill(result: None, scheduler: Any) -> None:
    """Create the rule once the scheduler knows its configuration."""
    global _scheduler
    from sglang.srt.runtime_context import get_schedule

    scheduler.numinous_decode_burst = DecodeBurst(
        steps=get_schedule().num_continuous_decode_steps,
        max_wait_s=option_value(MAX_WAIT) / 1000,
        max_queue=option_value(MAX_QUEUE),
        count=counters(FEATURE_ID),
    )
    _scheduler = scheduler


def around_should_defer_prefill(original: Callable[[Any], bool], scheduler: Any) -> bool:
    """Hold prefill back while a burst runs; otherwise stock decides."""
    return scheduler.numinous_decode_burst.holds_prefill(scheduler) or original(scheduler)


def after_arm_prefill_decode_interval(result: None, scheduler: Any, batch: Any) -> None:
    """Stock calls this with the batch of the step."""
    scheduler.numinous_decode_burst.ran(scheduler, batch)


def after_pull_raw_reqs(pulled: list[Any] | None, receiver: Any) -> list[Any] | None:
    """Add `EndBurst` to what the pulling rank is about to broadcast. Other ranks pull None."""
    if (
        pulled is not None
        and _scheduler is not None
        and _scheduler.numinous_decode_burst.waited_too_long(_scheduler)
    ):
        return [*pulled, EndBurst()]
    return None  # unchanged


def after_recv_requests(
    received: list[Any], receiver: Any, *args: Any, **kwargs: Any
) -> list[Any] | None:
    """Take `EndBurst` out of what every rank received, and obey it."""
    if not any(isinstance(item, EndBurst) for item in received or ()):
        return None  # unchanged
    _scheduler.numinous_decode_burst.end_by_wait()
    return [item for item in received if not isinstance(item, EndBurst)]
