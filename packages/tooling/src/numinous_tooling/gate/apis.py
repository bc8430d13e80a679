# SPDX-License-Identifier: Apache-2.0
"""The HTTP interfaces through which the measuring client speaks to a server.

`NativeGenerateClient` is SGLang's `/generate`; `OpenAiClient` is `/v1/completions` and `/v1/chat/completions` of any
server. Both stream, and both take one `Request` and yield `Chunk`s, so the client above them measures one way.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

CONNECT_TIMEOUT_S = 15.0
# The server refuses a flush while it finishes what it has; it may wait this long for that.
FLUSH_WAIT_S = 30.0

# Answers that say "this route or this field is not mine", not "the server is in trouble".
NOT_THERE = (404, 405)
NOT_TAKEN = (400, 404, 405, 415, 422)

# Of one event; a server that never ends its line would fill the memory.
MAX_LINE_BYTES = 16 << 20
# Without usage chunks are counted; a token may come in several (the parts of a tool call).
CHUNKS_PER_TOKEN = 4
MORE_CHUNKS = 64
_MALFORMED = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
)


@dataclass(frozen=True)
class Request:
    """One greedy request: ids, or text, or chat messages, whichever is not empty.

    `exact` asks for exactly `max_new_tokens` tokens (`ignore_eos`, which OpenAI itself does not know); `keep_text`
    keeps the answer's text, which only the check of its form needs.
    """

    max_new_tokens: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    exact: bool = True
    dp_rank: int | None = None
    keep_text: bool = False


@dataclass(frozen=True)
class Chunk:
    """One streamed piece.

    `tokens` generated so far; `cached_tokens` and `prompt_tokens` of the prompt where the server says so; `finished`
    when the answer is complete; `bare` when it carries counts only. `tool_arguments` are (call, part of JSON) pairs.
    """

    tokens: int
    cached_tokens: int | None
    finished: bool
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    bare: bool = False
    text: str = ""
    tool_arguments: tuple[tuple[int, str], ...] = ()


class RequestFailed(Exception):
    """The server answered with an error, or broke off; `status` is the HTTP status where there was one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class CannotFlush(RequestFailed):
    """The server has no route that empties its prefix cache."""


class ServingClient(Protocol):
    """What the client needs of an interface."""

    def body(self, request: Request) -> bytes:
        """Return the request as it is sent."""

    def digest_text(self, request: Request) -> bytes:
        """Return what must be equal between arms: the body without the name of the model."""

    def stream(self, request: Request) -> AsyncIterator[Chunk]:
        """Send one request and yield its chunks; raise `RequestFailed` unless the answer ends properly."""

    async def flush_cache(self) -> None:
        """Empty the server's prefix cache; raise `CannotFlush` where there is no way to."""


def bearer(api_key_env: str | None) -> dict[str, str]:
    """Return the header that carries the key in this environment variable; none for no variable."""
    return {} if api_key_env is None else {"authorization": f"Bearer {os.environ[api_key_env]}"}


def has_tls(url: str) -> bool:
    """Return what httpx is told to verify; without TLS nothing: a client reads all certificates first, for 0.1 s."""
    return not url.startswith("http:")


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


async def _events(
    http: httpx.AsyncClient, path: str, body: bytes, headers: Mapping[str, str]
) -> AsyncIterator[str]:
    """Post a body and yield the payload of each server-sent event, `[DONE]` excluded."""
    headers = {"content-type": "application/json", **headers}
    try:
        async with http.stream("POST", path, content=body, headers=headers) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")[:200]
                raise RequestFailed(f"HTTP {response.status_code}: {text}", response.status_code)
            async for line in _lines(response):
                if not line.startswith("data:"):
                    continue
                payload = line[5:].strip()
                if payload == "[DONE]":
                    break
                yield payload
    except httpx.HTTPError as error:
        raise RequestFailed(f"{type(error).__name__}: {error}") from error


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Yield lines as newlines end them; `aiter_lines` ends them at U+2028 and others too, which JSON holds as they are."""
    rest = b""
    async for piece in response.aiter_bytes():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
        if len(rest) > MAX_LINE_BYTES:
            raise RequestFailed(f"an event of more than {MAX_LINE_BYTES} bytes")
    yield rest.decode(errors="replace")


def _count(value: Any) -> int:
    """Return a number of tokens."""
    number = int(value)
    if number < 0:
        raise ValueError(number)
    return number


def _count_or_none(value: Any) -> int | None:
    return None if value is None else _count(value)


def _check_length(tokens: int, request: Request, *, counted: bool) -> None:
    """Refuse more tokens than were asked for: they would look like speed, and might never end.

    `counted` is whether the server counted them; chunks are taken for tokens otherwise.
    """
    asked = request.max_new_tokens
    limit = asked if counted else CHUNKS_PER_TOKEN * asked + MORE_CHUNKS
    if tokens > limit:
        raise RequestFailed(
            f"{tokens} {'tokens' if counted else 'chunks'} came, at most {asked} tokens were asked for"
        )


async def _post_flush(http: httpx.AsyncClient, path: str) -> int:
    """Ask for a flush; return the status, 200 or one of `NOT_THERE`."""
    route = path.split("?")[0]
    try:
        response = await http.post(path, timeout=FLUSH_WAIT_S + CONNECT_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise RequestFailed(f"{route}: {type(error).__name__}: {error}") from error
    if response.status_code != 200 and response.status_code not in NOT_THERE:
        raise RequestFailed(f"{route}: HTTP {response.status_code}: {response.text[:200]}")
    return response.status_code


class NativeGenerateClient:
    """SGLang's own `/generate`: takes token ids, so the prompt length is exact; reports cached tokens per request."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    def body(self, request: Request) -> bytes:
        """Return the request as it is sent."""
        message: dict[str, Any] = {
            "input_ids": request.token_ids,
            "sampling_params": {
                "temperature": 0,
                "ignore_eos": request.exact,
                "max_new_tokens": request.max_new_tokens,
            },
            "stream": True,
        }
        if request.dp_rank is not None:
            message["routed_dp_rank"] = request.dp_rank
        return _compact(message)

    def digest_text(self, request: Request) -> bytes:
        """Return the body: it names no model."""
        return self.body(request)

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        """Send one request and yield its chunks; raise `RequestFailed` unless the answer ends properly."""
        finished = False
        async for payload in _events(self._http, "/generate", self.body(request), {}):
            chunk = self._parse(payload)
            _check_length(chunk.tokens, request, counted=True)
            finished = finished or chunk.finished
            yield chunk
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
            kind = reason.get("type") if isinstance(reason, dict) else reason
            if kind == "abort":
                raise RequestFailed(f"aborted: {reason.get('message', '')}"[:200])
            return Chunk(
                _count(meta["completion_tokens"]),
                _count_or_none(meta.get("cached_tokens")),
                reason is not None,
                prompt_tokens=_count_or_none(meta.get("prompt_tokens")),
                finish_reason=kind,
            )
        except _MALFORMED as error:
            raise RequestFailed(f"not an answer of /generate: {payload[:120]!r}") from error

    async def flush_cache(self) -> None:
        """Empty the server's prefix cache."""
        status = await _post_flush(self._http, f"/flush_cache?timeout={FLUSH_WAIT_S:g}")
        if status != 200:
            raise CannotFlush("the server has no /flush_cache")


class OpenAiClient:
    """`/v1/completions` for ids and text, `/v1/chat/completions` for messages, of any server.

    Tokens are counted by the server's usage, which is asked for with every chunk (`continuous_usage_stats`, known to
    SGLang and vLLM); a server without it is counted by chunks until the usage at the end. `negotiate` finds out what
    the server takes.
    """

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model
        self.usage_per_chunk = True

    def _message(self, request: Request) -> dict[str, Any]:
        message: dict[str, Any]
        if request.messages:
            message = {"messages": list(request.messages)}
            if request.tools:
                message["tools"] = list(request.tools)
        else:
            message = {"prompt": request.text or request.token_ids}
        message |= {
            "max_tokens": request.max_new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.usage_per_chunk:
            message["stream_options"]["continuous_usage_stats"] = True
        if request.exact:
            message |= {"ignore_eos": True, "min_tokens": request.max_new_tokens}
        return message

    def body(self, request: Request) -> bytes:
        """Return the request as it is sent."""
        return _compact({"model": self._model, **self._message(request)})

    def digest_text(self, request: Request) -> bytes:
        """Return the body without the model's name, by which two servers may call the same model differently."""
        return _compact([self._message(request), request.dp_rank])

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        """Send one request and yield its chunks; raise `RequestFailed` unless the answer ends properly."""
        path = "/v1/chat/completions" if request.messages else "/v1/completions"
        # Read by SGLang and by vLLM.
        headers = {} if request.dp_rank is None else {"x-data-parallel-rank": str(request.dp_rank)}
        finished = False
        tokens = 0
        async for payload in _events(self._http, path, self.body(request), headers):
            chunk = self._parse(payload, path, tokens)
            _check_length(chunk.tokens, request, counted=chunk.prompt_tokens is not None)
            tokens = chunk.tokens
            finished = finished or chunk.finished
            yield chunk
        if not finished:
            raise RequestFailed("the stream ended before the answer was complete")

    @staticmethod
    def _parse(payload: str, path: str, tokens: int) -> Chunk:
        try:
            message = json.loads(payload)
            if message.get("error"):
                raise RequestFailed(str(message["error"])[:200])
            usage = message.get("usage")
            choices = message.get("choices") or []
            if not choices and usage is None:
                raise KeyError("choices")
            choice = choices[0] if choices else {}
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            calls = delta.get("tool_calls") or []
            arguments = tuple(
                (int(call.get("index") or 0), (call.get("function") or {}).get("arguments") or "")
                for call in calls
            )
            if not all(isinstance(part, str) for part in (text, *(part for _, part in arguments))):
                raise TypeError("text")
            reason = choice.get("finish_reason")
            if reason in ("abort", "error"):
                raise RequestFailed(f"the server ended the answer: {reason}")
            cached = prompt_tokens = None
            if usage is not None:
                tokens = _count(usage["completion_tokens"])
                prompt_tokens = _count(usage["prompt_tokens"])
                cached = _count_or_none(
                    (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
                )
            elif text or calls or delta.get("reasoning_content") or delta.get("reasoning"):
                tokens += 1
            return Chunk(
                tokens,
                cached,
                reason is not None,
                prompt_tokens,
                reason,
                bare=not choices,
                text=text,
                tool_arguments=arguments,
            )
        except _MALFORMED as error:
            raise RequestFailed(f"not an answer of {path}: {payload[:120]!r}") from error

    async def flush_cache(self) -> None:
        """Empty the server's prefix cache, by SGLang's route or by vLLM's."""
        for path in (f"/flush_cache?timeout={FLUSH_WAIT_S:g}", "/reset_prefix_cache"):
            if await _post_flush(self._http, path) == 200:
                return
        raise CannotFlush("the server has neither /flush_cache nor /reset_prefix_cache")

    async def negotiate(self, candidates: list[Request]) -> Request:
        """Return the first candidate that the server takes, settling whether usage may be asked with every chunk."""
        refusal: RequestFailed | None = None
        for request in candidates:
            for self.usage_per_chunk in (True, False):
                try:
                    async for _ in self.stream(request):
                        pass
                    return request
                except RequestFailed as failure:
                    if failure.status not in NOT_TAKEN:
                        raise
                    refusal = failure
        assert refusal is not None
        raise refusal
