# SPDX-License-Identifier: Apache-2.0
"""The measuring client: replays a workload, or its part of one, against one server, in a process of its own.

`python -m numinous_tooling.gate.client` reads one job (a JSON line) from stdin and writes JSON lines to stdout:
`progress` while it works, `warm` when it can begin, then, after a JSON line `go` on stdin, one `record` per request and
`end` with its own event-loop lag and CPU time. `fatal` ends the run early. A process of its own so that neither progress
bar nor bookkeeping disturbs the clock, and so that its lag can be told from the server's.

A replay may be divided over several clients (`divide`): where 64 streams deliver in the same millisecond, one process
needs 10 ms and more to read them, and the last of them looks late. The first client *leads*: it alone agrees with the
server how prompts are sent (its `warm` says it), sends the warm-up and flushes the cache. `go` tells all clients what was
agreed, and the instant at which they begin.

Times are seconds since that instant, by the monotonic clock that all processes of a host share. A request's first token is
its first chunk that carries tokens; a chunk may carry several.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import httpx

from numinous_tooling.gate import answers, prompts
from numinous_tooling.gate.apis import (
    CONNECT_TIMEOUT_S,
    NOT_TAKEN,
    CannotFlush,
    NativeGenerateClient,
    OpenAiClient,
    Request,
    RequestFailed,
    ServingClient,
    bearer,
    has_tls,
)

Emit = Callable[[dict[str, Any]], None]

KEEP_ALIVE_S = 4.0
# A shorter one cannot be told from ordinary text.
MIN_SECRET_CHARS = 8
LAG_TICK_S = 0.01
PROGRESS_TICK_S = 0.25


@dataclass(frozen=True)
class RequestRecord:
    """What happened to one request; `chunks` holds [seconds since `sent_s`, tokens so far] of every chunk.

    `expected_tokens` is the least of a whole answer: all that were asked for, or 1 where the model may end by itself.
    `prompt_tokens` is the plan's count, `server_prompt_tokens` the server's. `answer_format` is the machine-readable
    form that the recorded answer had, `answer_valid` whether this answer has it.
    """

    session: str
    turn: int
    prompt_tokens: int
    expected_tokens: int
    request_digest: str
    sent_s: float
    e2e_s: float
    got_tokens: int = 0
    cached_tokens: int | None = None
    chunks: tuple[tuple[float, int], ...] = ()
    error: str | None = None
    server_prompt_tokens: int | None = None
    finish_reason: str | None = None
    answer_format: str | None = None
    answer_valid: bool | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token."""
        return self.chunks[0][0] if self.chunks else None

    @property
    def short(self) -> bool:
        """Whether the server ended the answer early without an error."""
        return self.error is None and self.got_tokens < self.expected_tokens


@dataclass
class Tally:
    """Counts for the progress events; the parent takes a standstill of `chunks` for a hanging server."""

    chunks: int = 0
    done: int = 0
    in_flight: int = 0


@dataclass
class LagMeter:
    """How much later than asked for the event loop wakes up: the client's own share of every time it reports."""

    samples_s: list[float] = field(default_factory=list)

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            start = time.perf_counter()
            await asyncio.sleep(LAG_TICK_S)
            self.samples_s.append(max(0.0, time.perf_counter() - start - LAG_TICK_S))

    def summary(self) -> dict[str, float]:
        """Return p99 and maximum in seconds."""
        ordered = sorted(self.samples_s) or [0.0]
        return {"p99_s": ordered[int(0.99 * (len(ordered) - 1))], "max_s": ordered[-1]}


async def send(
    client: ServingClient, request: Request, tally: Tally, origin_s: float
) -> tuple[dict[str, Any], str, list[str]]:
    """Send one request; return the measured fields of its record, and the answer's text and tool arguments.

    Text and arguments are empty unless the request keeps them.
    """
    digest = hashlib.sha256(client.digest_text(request)).hexdigest()[:16]
    chunks: list[tuple[float, int]] = []
    tokens = 0
    cached: int | None = None
    counted: int | None = None
    reason: str | None = None
    error: str | None = None
    text: list[str] = []
    calls: dict[int, str] = {}
    tally.in_flight += 1
    sent = time.perf_counter()
    try:
        async for chunk in client.stream(request):
            if chunk.tokens > (chunks[-1][1] if chunks else 0):
                now = round(time.perf_counter() - sent, 6)
                # Counts that come after the last piece of text say when nothing, only how many.
                if chunk.bare and chunks:
                    now = chunks.pop()[0]
                chunks.append((now, chunk.tokens))
                # Chunks without tokens are no progress: a server could send them for ever.
                tally.chunks += 1
            tokens = chunk.tokens
            cached = chunk.cached_tokens if chunk.cached_tokens is not None else cached
            counted = chunk.prompt_tokens if chunk.prompt_tokens is not None else counted
            reason = chunk.finish_reason or reason
            if request.keep_text:
                text.append(chunk.text)
                for call, part in chunk.tool_arguments:
                    calls[call] = calls.get(call, "") + part
    except RequestFailed as failure:
        error = str(failure)
    finally:
        tally.in_flight -= 1
        tally.done += 1
    # A count by chunks may have run ahead of the server's own, which came last.
    exact = tuple((second, min(count, tokens)) for second, count in chunks)
    fields = {
        "request_digest": digest,
        "sent_s": round(sent - origin_s, 6),
        "e2e_s": round(time.perf_counter() - sent, 6),
        "got_tokens": exact[-1][1] if exact else 0,
        "cached_tokens": cached,
        "chunks": exact,
        "error": error,
        "server_prompt_tokens": counted,
        "finish_reason": reason,
    }
    return fields, "".join(text), [calls[call] for call in sorted(calls)]


async def agree(client: ServingClient, job: dict[str, Any]) -> prompts.Form:
    """Settle with the server how prompts are sent; measure what it adds to text."""
    words = words_of(job)
    form = prompts.Form(job["prompts"], words, job["exact"], job["dp_size"])
    if not isinstance(client, OpenAiClient):
        return form
    text = prompts.probe_text(job["words"] or ["word"], prompts.PROBE_WORDS)
    by_form = {
        "ids": Request(
            1, token_ids=tuple(job["word_ids"][: prompts.PROBE_WORDS]), exact=form.exact
        ),
        "text": Request(1, text=text, exact=form.exact),
        "chat": Request(1, messages=({"role": "user", "content": text},), exact=form.exact),
    }
    wanted = [form.prompts]
    if form.prompts == "auto":
        wanted = ["ids", "text"] if words else ["ids"]
    asked = [by_form[name] for name in wanted]
    try:
        taken = await client.negotiate(asked)
    except RequestFailed as refusal:
        if not form.exact or refusal.status not in NOT_TAKEN:
            raise
        try:  # strict servers know OpenAI's own fields only
            await client.negotiate([replace(request, exact=False) for request in asked])
        except RequestFailed:
            raise refusal from None
        raise RequestFailed(
            f"{refusal}; it takes requests without ignore_eos and min_tokens: give --free-lengths"
        ) from refusal
    form = replace(form, prompts=next(name for name in wanted if by_form[name] == taken))
    if form.prompts == "ids" or job["is_text"]:
        return form
    overhead = await prompts.measure_overhead(client, form.prompts, job["words"], form.exact)
    return replace(form, overhead=overhead)


async def warm_up(
    client: ServingClient, sessions: list[dict[str, Any]], form: prompts.Form, tally: Tally
) -> float | None:
    """Run the warm-up requests together, twice (the second time from the cache); return their drift."""
    counts = []
    for _ in range(2):
        requests = [prompts.build_request(session, 0, form) for session in sessions]
        results = await asyncio.gather(
            *(send(client, request, tally, time.perf_counter()) for request in requests)
        )
        for session, (fields, _, _) in zip(sessions, results, strict=True):
            if fields["error"]:
                raise RequestFailed(f"warm-up request: {fields['error']}")
            if fields["server_prompt_tokens"] is not None and not session["messages"]:
                counts.append(
                    (session["turns"][0]["prompt_tokens"], fields["server_prompt_tokens"])
                )
    drift = prompts.drift(counts)
    if drift is not None and drift > prompts.MAX_DRIFT:
        raise RequestFailed(
            f"prompts drift by {drift:.1%} from their planned token counts, at most {prompts.MAX_DRIFT:.0%} is "
            f"judged; use --prompts ids, or a larger --length-scale or --input"
        )
    return drift


async def empty_cache(client: ServingClient, flush: str) -> bool:
    """Flush as the job says (`must`, `try`, `never`); return whether the cache was emptied."""
    if flush == "never":
        return False
    try:
        await client.flush_cache()
    except CannotFlush as failure:
        if flush == "try":
            return False
        raise RequestFailed(f"{failure}; give --no-flush to go on with what it holds") from failure
    return True


def divide(job: Mapping[str, Any], clients: int) -> list[dict[str, Any]]:
    """Return the jobs of so many clients, or of fewer where there is less to divide.

    Sessions go round, each with its own start; so do the places of a closed loop, whose sum stays. Only the tail of a
    closed loop differs from one client's: a place that is free takes the next session of its own client.
    """
    count = max(1, min(clients, job["concurrency"], len(job["sessions"])))
    return [
        {
            **job,
            "lead": index == 0,
            "warmup": job["warmup"] if index == 0 else [],
            "sessions": job["sessions"][index::count],
            "concurrency": len(range(index, job["concurrency"], count)),
        }
        for index in range(count)
    ]


def words_of(job: Mapping[str, Any]) -> dict[int, str]:
    """Return the text of each token id that a job names."""
    return dict(zip(job["word_ids"], job["words"], strict=True)) if job["words"] else {}


async def replay(
    client: ServingClient,
    job: dict[str, Any],
    form: prompts.Form,
    tally: Tally,
    emit: Emit,
    origin: float,
) -> None:
    """Replay the sessions of a job; within a session every request waits for the last answer and the tool gap."""
    slots = asyncio.Semaphore(job["concurrency"])

    async def session(plan: dict[str, Any]) -> None:
        await asyncio.sleep(origin + plan["start_s"] - time.perf_counter())
        async with slots:
            for index, turn in enumerate(plan["turns"]):
                await asyncio.sleep(turn["gap_s"])
                request = prompts.build_request(plan, index, form)
                fields, text, calls = await send(client, request, tally, origin)
                record = RequestRecord(
                    session=plan["name"],
                    turn=index,
                    # The plan only estimates the tokens of a text.
                    prompt_tokens=(plan["messages"] and fields["server_prompt_tokens"])
                    or turn["prompt_tokens"],
                    expected_tokens=turn["max_new_tokens"] if job["exact"] else 1,
                    answer_format=turn["answer_format"],
                    answer_valid=None
                    if turn["answer_format"] is None
                    else fields["error"] is None
                    and answers.answer_format(text, calls) == turn["answer_format"],
                    **fields,
                )
                emit({"event": "record", **asdict(record)})

    await asyncio.gather(*(session(plan) for plan in job["sessions"]))


async def run_job(job: dict[str, Any], emit: Emit, wait_for_go: Callable[[], str]) -> None:
    """Prepare (the leader for all), wait for `go`, replay, report the lag."""
    tally = Tally()

    async def report_progress() -> None:
        while True:
            emit({"event": "progress", **asdict(tally)})
            await asyncio.sleep(PROGRESS_TICK_S)

    # Idle connections are left before the servers do that: uvicorn closes them after 5 s, and a request sent at that
    # very moment would fail.
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S
    )
    # No read timeout: a long prefill is silent for minutes; the parent judges standstill for all requests together.
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    progress = asyncio.create_task(report_progress())
    job_task = asyncio.current_task()
    assert job_task is not None
    # It ends by itself only where nobody reads any more: the gate was killed, and a hanging server would keep us.
    progress.add_done_callback(lambda ended: None if ended.cancelled() else job_task.cancel())
    try:
        async with httpx.AsyncClient(
            base_url=job["url"],
            limits=limits,
            timeout=timeout,
            trust_env=False,
            verify=has_tls(job["url"]),
            headers=bearer(job.get("api_key_env")),
        ) as http:
            client: ServingClient = (
                OpenAiClient(http, job["model"])
                if job["api"] == "openai"
                else NativeGenerateClient(http)
            )
            # Probes and flush count as work too, or a hanging one would look like a tool gap.
            tally.in_flight += 1
            agreed: dict[str, Any] = {}
            if job["lead"]:
                form = await agree(client, job)
                agreed = {
                    "prompts": form.prompts,
                    "overhead": asdict(form.overhead),
                    "warmup_drift": await warm_up(client, job["warmup"], form, tally),
                    "flushed": await empty_cache(client, job["flush"]),
                }
            else:
                # What is imported and set up at a first request is no lag of the measurement.
                with contextlib.suppress(httpx.HTTPError):
                    await http.get("/health")
            tally.in_flight -= 1
            emit({"event": "warm", "agreed": agreed})
            line = await asyncio.to_thread(wait_for_go)
            if not line:  # the gate is gone
                return
            go = json.loads(line)
            form = prompts.Form(
                go["agreed"]["prompts"],
                words_of(job),
                job["exact"],
                job["dp_size"],
                prompts.Overhead(**go["agreed"]["overhead"]),
            )
            start = go["start_s"]
            await asyncio.sleep(start - time.perf_counter())
            tally.done = 0
            meter = LagMeter()
            lag = asyncio.create_task(meter.run())
            start_cpu = time.process_time()
            await replay(client, job, form, tally, emit, start)
            wall_s = time.perf_counter() - start
            cpu_s = time.process_time() - start_cpu
            lag.cancel()
            emit({"event": "end", "wall_s": wall_s, "cpu_s": cpu_s, "lag": meter.summary()})
    except RequestFailed as failure:
        emit({"event": "fatal", "message": str(failure)})
    finally:
        progress.cancel()


def main() -> int:
    """Entry point of the client process."""

    job = json.loads(sys.stdin.readline())
    secret = os.environ[job["api_key_env"]] if job.get("api_key_env") else ""

    def emit(event: dict[str, Any]) -> None:
        line = json.dumps(event, separators=(",", ":"))
        # A server may repeat the key that it refuses; what is said here lands in files.
        if len(secret) >= MIN_SECRET_CHARS:
            line = line.replace(secret, "***")
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    asyncio.run(run_job(job, emit, sys.stdin.readline))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
