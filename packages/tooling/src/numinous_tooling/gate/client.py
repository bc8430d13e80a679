# SPDX-License-Identifier: Apache-2.0
"""The measuring client: replays a workload against one server, in a process of its own.

`python -m numinous_tooling.gate.client` reads one job (a JSON line) from stdin and writes JSON lines to stdout:
`progress` while it works, `warm` when warm-up is over and the cache is flushed, then, after a line `go` on stdin,
one `record` per request and `end` with its own event-loop lag. `fatal` ends the run early. A process of its own so
that neither progress bar nor bookkeeping disturbs the clock, and so that its lag can be told from the server's.

Times are seconds of the client's monotonic clock since `go`. A request's first token is its first chunk that carries
tokens; a chunk may carry several.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

Emit = Callable[[dict[str, Any]], None]

LAG_TICK_S = 0.01
PROGRESS_TICK_S = 0.25
CONNECT_TIMEOUT_S = 15.0
# The server refuses a flush while it finishes what it has; it may wait this long for that.
FLUSH_WAIT_S = 30.0


@dataclass(frozen=True)
class RequestRecord:
    """What happened to one request; `chunks` holds [seconds since `sent_s`, tokens so far] of every chunk."""

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

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token."""
        return self.chunks[0][0] if self.chunks else None

    @property
    def short(self) -> bool:
        """Whether the server ended the answer early without an error."""
        return self.error is None and self.got_tokens < self.expected_tokens


@dataclass(frozen=True)
class Chunk:
    """One streamed piece: tokens generated so far, prompt tokens served from cache, whether the answer is complete."""

    tokens: int
    cached_tokens: int | None
    finished: bool


class RequestFailed(Exception):
    """The server answered with an error, or broke off."""


class NativeGenerateClient:
    """SGLang's own `/generate`: takes token ids, so the prompt length is exact; reports cached tokens per request."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    @staticmethod
    def body(token_ids: list[int], max_new_tokens: int) -> bytes:
        """Return the request: greedy, of exactly `max_new_tokens` tokens."""
        request = {
            "input_ids": token_ids,
            "sampling_params": {
                "temperature": 0,
                "ignore_eos": True,
                "max_new_tokens": max_new_tokens,
            },
            "stream": True,
        }
        return json.dumps(request, separators=(",", ":")).encode()

    async def stream(self, body: bytes) -> AsyncIterator[Chunk]:
        """Send one request and yield its chunks; raise `RequestFailed` unless the answer ends properly."""
        headers = {"content-type": "application/json"}
        finished = False
        try:
            async with self._http.stream(
                "POST", "/generate", content=body, headers=headers
            ) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")[:200]
                    raise RequestFailed(f"HTTP {response.status_code}: {text}")
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    payload = line[5:].strip()
                    if payload == "[DONE]":
                        break
                    chunk = self._parse(payload)
                    finished = finished or chunk.finished
                    yield chunk
        except httpx.HTTPError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        if not finished:
            raise RequestFailed("the stream ended before the answer was complete")

    @staticmethod
    def _parse(payload: str) -> Chunk:
        try:
            message = json.loads(payload)
            if "error" in message:
                raise RequestFailed(str(message["error"])[:200])
            meta = message["meta_info"]
            reason = meta.get("finish_reason")
            if isinstance(reason, dict) and reason.get("type") == "abort":
                raise RequestFailed(f"aborted: {reason.get('message', '')}"[:200])
            return Chunk(
                int(meta["completion_tokens"]), meta.get("cached_tokens"), reason is not None
            )
        except (ValueError, KeyError, TypeError) as error:
            raise RequestFailed(f"not an answer of /generate: {payload[:120]!r}") from error

    async def flush_cache(self) -> None:
        """Empty the server's prefix cache."""
        url = f"/flush_cache?timeout={FLUSH_WAIT_S:g}"
        try:
            response = await self._http.post(url, timeout=FLUSH_WAIT_S + CONNECT_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise RequestFailed(f"/flush_cache: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise RequestFailed(f"/flush_cache: HTTP {response.status_code}: {response.text[:200]}")


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
    client: NativeGenerateClient,
    token_ids: list[int],
    max_new_tokens: int,
    tally: Tally,
    origin_s: float,
) -> dict[str, Any]:
    """Send one request; return the measured fields of its record."""
    body = client.body(token_ids, max_new_tokens)
    chunks: list[tuple[float, int]] = []
    cached: int | None = None
    error: str | None = None
    tally.in_flight += 1
    sent = time.perf_counter()
    try:
        async for chunk in client.stream(body):
            if chunk.tokens > (chunks[-1][1] if chunks else 0):
                chunks.append((round(time.perf_counter() - sent, 6), chunk.tokens))
            if chunk.cached_tokens is not None:
                cached = chunk.cached_tokens
            tally.chunks += 1
    except RequestFailed as failure:
        error = str(failure)
    finally:
        tally.in_flight -= 1
        tally.done += 1
    return {
        "request_digest": hashlib.sha256(body).hexdigest()[:16],
        "sent_s": round(sent - origin_s, 6),
        "e2e_s": round(time.perf_counter() - sent, 6),
        "got_tokens": chunks[-1][1] if chunks else 0,
        "cached_tokens": cached,
        "chunks": tuple(chunks),
        "error": error,
    }


async def warm_up(
    client: NativeGenerateClient, requests: list[dict[str, Any]], tally: Tally
) -> None:
    """Run the warm-up requests together, twice (the second time from the cache), then empty the cache."""
    for _ in range(2):
        results = await asyncio.gather(
            *(
                send(client, r["token_ids"], r["max_new_tokens"], tally, time.perf_counter())
                for r in requests
            )
        )
        for result in results:
            if result["error"]:
                raise RequestFailed(f"warm-up request: {result['error']}")
    await client.flush_cache()


async def replay(
    client: NativeGenerateClient, job: dict[str, Any], tally: Tally, emit: Emit
) -> None:
    """Replay the sessions of a job; within a session every request waits for the last answer and the tool gap."""
    origin = time.perf_counter()
    slots = asyncio.Semaphore(job["concurrency"])

    async def session(plan: dict[str, Any]) -> None:
        await asyncio.sleep(plan["start_s"])
        async with slots:
            for index, turn in enumerate(plan["turns"]):
                await asyncio.sleep(turn["gap_s"])
                prompt = plan["token_ids"][: turn["prompt_tokens"]]
                result = await send(client, prompt, turn["max_new_tokens"], tally, origin)
                record = RequestRecord(
                    session=plan["name"],
                    turn=index,
                    prompt_tokens=turn["prompt_tokens"],
                    expected_tokens=turn["max_new_tokens"],
                    **result,
                )
                emit({"event": "record", **asdict(record)})

    await asyncio.gather(*(session(plan) for plan in job["sessions"]))


async def run_job(job: dict[str, Any], emit: Emit, wait_for_go: Callable[[], str]) -> None:
    """Warm up, wait for `go`, replay, report the lag."""
    tally = Tally()

    async def report_progress() -> None:
        while True:
            emit({"event": "progress", **asdict(tally)})
            await asyncio.sleep(PROGRESS_TICK_S)

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    # No read timeout: a long prefill is silent for minutes; the parent judges standstill for all requests together.
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    progress = asyncio.create_task(report_progress())
    try:
        async with httpx.AsyncClient(
            base_url=job["url"], limits=limits, timeout=timeout, trust_env=False
        ) as http:
            client = NativeGenerateClient(http)
            tally.in_flight += (
                1  # the flush counts as work too, or a hanging flush would look like a tool gap
            )
            await warm_up(client, job["warmup"], tally)
            tally.in_flight -= 1
            emit({"event": "warm"})
            if (await asyncio.to_thread(wait_for_go)).strip() != "go":
                return
            tally.done = 0
            meter = LagMeter()
            lag = asyncio.create_task(meter.run())
            start = time.perf_counter()
            await replay(client, job, tally, emit)
            wall_s = time.perf_counter() - start
            lag.cancel()
            emit({"event": "end", "wall_s": wall_s, "lag": meter.summary()})
    except RequestFailed as failure:
        emit({"event": "fatal", "message": str(failure)})
    finally:
        progress.cancel()


def main() -> int:
    """Entry point of the client process."""

    def emit(event: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(event, separators=(",", ":")) + "\n")
        sys.stdout.flush()

    job = json.loads(sys.stdin.readline())
    asyncio.run(run_job(job, emit, sys.stdin.readline))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
