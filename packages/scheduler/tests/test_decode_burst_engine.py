# SPDX-License-Identifier: Apache-2.0
"""`scheduler.decode_burst` in the real engine on the CPU: the recorded order of batches, caps, aborts, retractions.

Every prefill takes one request (``--prefill-max-requests 1``), so requests that wait together show the order plainly:
stock runs ``PPPP``, a burst of three ``PDDDPDDDPDDDP``. Letters come from the scheduler's own log.
"""

from __future__ import annotations

import os
import re
import threading
import time

import pytest

from numinous_scheduler.hooks.decode_burst import FEATURE

pytestmark = pytest.mark.engine

FLAG = FEATURE.flag
STEPS = ("--num-continuous-decode-steps", "3")
PATIENT = {FLAG: "1", f"{FLAG}_MAX_WAIT_MS": "60000"}  # a busy test machine must not end a burst


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that share no prefix with those of another seed."""
    return [2 + (seed * 7919 + position * 31) % 500 for position in range(length)]


PROMPTS = [prompt(seed, 160) for seed in range(1, 5)]


def together(running, new_tokens: int = 12) -> tuple[str, list[list[int]]]:
    """Four requests at once beside a request that decodes already; the batches from the first of the four on."""
    anchor = threading.Thread(
        target=running.generate, args=(prompt(99, 32),), kwargs={"new_tokens": 60}
    )
    start = len(running.batches())
    anchor.start()
    while (
        len(running.batches()) < start + 6
    ):  # its prefill and a few steps: its own budget is used up
        time.sleep(0.005)
    begin = len(running.batches())
    tokens = running.generate(*PROMPTS, new_tokens=new_tokens)
    anchor.join()
    running.settle()
    order = running.batches()[begin:]
    return order[order.index("P") :], tokens


def gaps(order: str) -> list[int]:
    """Decode batches between consecutive prefills."""
    return [len(run) for run in re.findall(r"P(D*)(?=P)", order)]


@pytest.fixture(scope="module")
def stock_tokens() -> dict[str, list[list[int]]]:
    return {}


def test_flag_off_is_stock_order(serve, stock_tokens):
    with serve(*STEPS) as running:
        order, stock_tokens["four"] = together(running)
        assert gaps(order)[1:] == [0, 0], f"stock prefills whatever waits: {order}"
        assert running.processes() == [], "no flag, no trace of numinous in any process"
        assert not re.search(r"numinous( \d|:)", running.server.log.read_text()), (
            "nor a line in the log"
        )


def test_burst_order_chunks_and_early_exit(serve, stock_tokens):
    with serve(
        *STEPS, "--disable-overlap-schedule", "--chunked-prefill-size", "64", **PATIENT
    ) as running:
        # 160 tokens are three chunks of one prompt; they stay together, and the last one arms the burst.
        order, tokens = together(running)
        assert re.match(r"(PPPDDD){3}PPP", order), order
        assert tokens == stock_tokens["four"], "the order of work must not change the answers"
        # Two tokens each: one from the prefill, one from a decode step. Nothing is left then: no waiting, no idling.
        begin = len(running.batches())
        running.generate(*[prompt(seed, 40) for seed in range(11, 15)], new_tokens=2)
        running.settle()
        assert running.batches()[begin:] == "PDPDPDPD"
        totals = running.totals(FEATURE.id)
        assert totals["engaged"] >= 9
        assert totals["refused:nothing_to_decode"] >= 3
        roles = {process.role: process.record["features"] for process in running.processes()}
        assert roles == {"main": [], "scheduler": ["scheduler.decode_burst"], "detokenizer": []}
        assert (
            len(
                re.findall(
                    r"numinous .* scheduler: scheduler.decode_burst in place",
                    running.server.log.read_text(),
                )
            )
            == 1
        )


def test_overlap_schedule_and_queue_cap(serve, stock_tokens):
    with serve(*STEPS, **PATIENT, **{f"{FLAG}_MAX_QUEUE": "1"}) as running:
        order, tokens = together(running)
        # After the first prefill three wait, then two: more than one, so stock order. From then on a burst holds.
        assert gaps(order)[1:] == [0, 3] or gaps(order) == [0, 0, 3], order
        assert tokens == stock_tokens["four"]
        assert running.totals(FEATURE.id)["refused:queue_cap"] >= 1


def test_wait_cap_aborts_and_retractions_lose_nothing(serve, stock_tokens):
    cap_s = 0.4
    environ = {FLAG: "1", f"{FLAG}_MAX_WAIT_MS": str(1000 * cap_s), "SGLANG_TEST_RETRACT": "1"}
    with serve("--num-continuous-decode-steps", "100000", **environ) as running:
        anchor = threading.Thread(
            target=running.generate, args=(prompt(99, 32),), kwargs={"new_tokens": 1500}
        )
        anchor.start()
        time.sleep(1.0)
        # With a budget that never ends, only the cap lets the next request in: not before it, and not only once the
        # request that decodes is through. How soon after it depends on what else the test machine does.
        for seed in (21, 22):
            begin = time.monotonic()
            assert len(running.generate(prompt(seed, 32), new_tokens=1)[0]) == 1
            assert time.monotonic() - begin > cap_s * 0.9
            assert anchor.is_alive(), "the next request waited for the end of the one that decodes"
        # Abort two requests while they are held; the third is served, and both callers get an answer.
        answers: dict[str, int] = {}

        def ask(name: str) -> None:
            body = {"input_ids": prompt(hash(name) % 97, 32), "rid": name}
            body["sampling_params"] = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
            answers[name] = running.post("/generate", **body).status_code

        callers = [threading.Thread(target=ask, args=(name,)) for name in ("one", "two", "three")]
        for caller in callers:
            caller.start()
        time.sleep(cap_s / 4)
        for name in ("one", "two"):
            assert running.post("/abort_request", rid=name).status_code == 200
        for caller in callers:
            caller.join(timeout=60)
        assert answers["three"] == 200
        assert set(answers) == {"one", "two", "three"}
        anchor.join()
        _, tokens = together(running)
        assert tokens == stock_tokens["four"], "retracted requests are resumed, not lost"
        assert "etract" in running.server.log.read_text(), "the test must have retracted something"
        assert running.totals(FEATURE.id)["refused:wait_cap"] >= 2
        assert running.post("/flush_cache").status_code == 200, (
            "nothing leaked: the pool can be flushed"
        )


def test_stock_neighbour_holds_blindly(serve):
    """The third arm: ``--prefill-decode-interval 3`` gives the same order under load."""
    with serve("--prefill-decode-interval", "3", "--disable-overlap-schedule") as running:
        order, _ = together(running)
        assert re.match(r"(PDDD){3}P", order), order


def test_tensor_parallel_ranks_agree(serve):
    """Two ranks, a cap so short that it fires all the time: a disagreement would hang the collectives."""
    bind = {
        "SGLANG_CPU_OMP_THREADS_BIND": f"0|{(os.cpu_count() or 1) - 1}"
    }  # ranks of one memory node
    environ = {FLAG: "1", f"{FLAG}_MAX_WAIT_MS": "3"} | bind
    with serve("--num-continuous-decode-steps", "6", "--tp-size", "2", **environ) as running:
        threads = [
            threading.Thread(
                target=running.generate,
                args=(prompt(30 + n, 40 + n),),
                kwargs={"new_tokens": 8 + n},
            )
            for n in range(12)
        ]
        for number, thread in enumerate(threads):
            thread.start()
            time.sleep(0.004 * (number % 5))
        for thread in threads:
            thread.join(timeout=90)
        assert not any(thread.is_alive() for thread in threads), "a rank waits for the other"
        per_rank = [
            p.totals.get("scheduler.decode_burst", {})
            for p in running.processes()
            if p.role == "scheduler"
        ]
        assert len(per_rank) == 2
        assert per_rank[0] == per_rank[1], "both ranks took the same decisions"
        assert per_rank[0].get("refused:wait_cap", 0) > 0
