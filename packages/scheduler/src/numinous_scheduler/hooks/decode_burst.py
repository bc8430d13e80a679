# SPDX-License-Identifier: Apache-2.0
"""Declaration of ``scheduler.decode_burst``: make ``--num-continuous-decode-steps`` do what it says.

*Seam*      `Scheduler._should_defer_prefill` and `Scheduler._arm_prefill_decode_interval` in
            ``srt/managers/scheduler.py``, where stock decides between prefill and decode.
*Why*       SGLang 0.5.20 declares ``--num-continuous-decode-steps`` and never reads it: whenever a request waits and
            fits, it is prefilled first, and every running user stalls for the length of that prefill.
*Flag*      ``NUMINOUS_SCHEDULER_DECODE_BURST=1`` with ``--num-continuous-decode-steps N``, N >= 2.
*Neighbour* ``--prefill-decode-interval N`` of stock holds prefill back for N rounds, blind to the queue and also when
            nothing is left to decode. The two exclude each other here; benchmarks run it as the third arm.
*Undo*      leave the flag unset.
"""

from __future__ import annotations

from collections.abc import Iterator

from numinous_scheduler.options import FEATURE_ID, MAX_QUEUE, MAX_WAIT
from numinous_tooling.patching import Feature, Hook, stock_pin
from numinous_tooling.patching.serve_command import ServeCommand

SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver:SchedulerRequestReceiver"
OURS = "numinous_scheduler.engine.decode_burst"

FEATURE = Feature(
    id=FEATURE_ID,
    sentence="After a prefill, up to N decode batches run before the next prefill, with a cap on queue and waiting time.",
    arch={"cpu": "run", "sm90": "run"},
    patches=(
        Hook(
            id="scheduler.decode_burst.01",
            target=f"{SCHEDULER}.init_chunked_prefill",
            kind="after",
            call=f"{OURS}:after_init_chunked_prefill",
            pins=(stock_pin(f"{SCHEDULER}.init_chunked_prefill", "a2f6ac31675fda32"),),
        ),
        Hook(
            id="scheduler.decode_burst.02",
            target=f"{SCHEDULER}._should_defer_prefill",
            kind="around",
            call=f"{OURS}:around_should_defer_prefill",
            pins=(
                stock_pin(f"{SCHEDULER}._should_defer_prefill", "951a5eb44dff9589"),
                # Calls the hooked method after the merge of the last prefill and before the choice of the batch.
                stock_pin(f"{SCHEDULER}.get_next_batch_to_run", "827b20976de0526c"),
            ),
        ),
        Hook(
            id="scheduler.decode_burst.03",
            target=f"{SCHEDULER}._arm_prefill_decode_interval",
            kind="after",
            call=f"{OURS}:after_arm_prefill_decode_interval",
            pins=(stock_pin(f"{SCHEDULER}._arm_prefill_decode_interval", "8b8c62ba929cecac"),),
        ),
        Hook(
            id="scheduler.decode_burst.04",
            target=f"{RECEIVER}._pull_raw_reqs",
            kind="after",
            call=f"{OURS}:after_pull_raw_reqs",
            pins=(
                stock_pin(f"{RECEIVER}._pull_raw_reqs", "a5a83ca1a1b433fb"),
                stock_pin(f"{RECEIVER}._broadcast_reqs_across_ranks", "519b017aa05f7b6b"),
            ),
        ),
        Hook(
            id="scheduler.decode_burst.05",
            target=f"{RECEIVER}.recv_requests",
            kind="after",
            call=f"{OURS}:after_recv_requests",
            pins=(
                stock_pin(f"{RECEIVER}.recv_requests", "3e2568740d4b939b"),
                stock_pin(f"{SCHEDULER}.ingest_requests", "143a2b680bdcf53e"),
            ),
        ),
    ),
    options=(MAX_WAIT, MAX_QUEUE),
    judge="numinous_scheduler.hooks.decode_burst:judge",
    # Speed of the users who decode, paid by the one who waits: up to N steps, and never beyond the cap.
    trades={"ttft": 1.0},
    upstream="none",
    evidence=("scheduler/decode_burst.jsonl",),
)


def judge(command: ServeCommand) -> Iterator[str]:
    """Why this launch cannot use the feature, one line each."""
    if command.get("num_continuous_decode_steps") < 2:
        yield "needs --num-continuous-decode-steps N with N >= 2 (the length of a burst)"
    if command.get("prefill_decode_interval"):
        yield "--prefill-decode-interval already holds prefill back; use one of the two"
    if command.get("enable_prefill_delayer"):
        yield "--enable-prefill-delayer already holds prefill back; use one of the two"
    if command.get("dp_size") > 1:
        yield "data parallelism (--dp-size > 1) is not covered yet: its ranks would have to agree on every burst"
    if command.get("nnodes") > 1:
        yield "several nodes (--nnodes > 1) are not covered: the caps are read from each node's own environment"
    if command.get("pp_size") > 1:
        yield "pipeline parallelism (--pp-size > 1) is not covered: each microbatch has its own running batch"
    if command.get("disaggregation_mode") not in (None, "null"):
        yield "prefill/decode disaggregation runs other scheduler loops; there is nothing to hold back"
    if command.get("speculative_algorithm"):
        yield "speculative decoding is not covered yet (untested)"
    if command.get("enable_pdmux"):
        yield "--enable-pdmux runs a scheduler loop of its own; there is nothing to hold back"
    if command.get("enable_hisparse"):
        yield "--enable-hisparse builds decode batches elsewhere; not covered"
    if command.get("min_free_slots_delay"):
        yield "--min-free-slots-delay already holds prefill back; use one of the two"
    if command.get("enable_priority_scheduling") and not command.get("disable_priority_preemption"):
        yield "priority preemption would wait for the burst; add --disable-priority-preemption"
    if command.get("is_embedding"):
        yield "an embedding server never decodes"
    if command.get("dllm_algorithm"):
        yield "diffusion language models have no separate decode batches"
    if command.get("language_only"):
        yield "--language-only hands requests to an encoder server before they are queued; not covered"
