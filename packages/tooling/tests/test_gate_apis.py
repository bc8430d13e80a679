# SPDX-License-Identifier: Apache-2.0
"""The interfaces of the measuring client, against scripted answers: counting, ends, refusals, templates."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

pytest.importorskip("httpx")

import httpx

from numinous_tooling.gate import apis
from numinous_tooling.gate.answers import answer_format
from numinous_tooling.gate.apis import (
    CannotFlush,
    NativeGenerateClient,
    OpenAiClient,
    Request,
    RequestFailed,
)
from numinous_tooling.gate.client import Tally, agree, empty_cache, send
from numinous_tooling.gate.plan import SessionPlan, Turn
from numinous_tooling.gate.prompts import (
    Form,
    Overhead,
    build_request,
    chat_messages,
    dp_rank,
    drift,
    measure_overhead,
)

IDS = Request(4, token_ids=(1, 2, 3))
CHAT = Request(4, messages=({"role": "user", "content": "a b"},), keep_text=True)


def events(*payloads: object, done: bool = True) -> bytes:
    """Return a stream of server-sent events."""
    lines = [p if isinstance(p, str) else json.dumps(p) for p in payloads]
    return "".join(f"data: {line}\n\n" for line in [*lines, *["[DONE]"] * done]).encode()


def text_event(text: str, finish: str | None = None, **extra: object) -> dict:
    return {"choices": [{"text": text, "finish_reason": finish}], **extra}


def usage(completion: int, prompt: int = 3, cached: int | None = None) -> dict:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion, **details}}


def talk(handler: Callable, use: Callable, api: str = "openai"):  # type: ignore[no-untyped-def]
    """Run `use(client)` with a client whose server is `handler`."""

    async def run() -> object:
        transport = httpx.MockTransport(handler)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            client = OpenAiClient(http, "m") if api == "openai" else NativeGenerateClient(http)
            return await use(client)

    return asyncio.run(run())


def result_of(body: bytes, request: Request = IDS, api: str = "openai", status: int = 200) -> tuple:
    """Return what `send` makes of one answer."""
    return talk(
        lambda _: httpx.Response(status, content=body),
        lambda client: send(client, request, Tally(), 0.0),
        api,
    )


def test_usage_counts_tokens_where_there_is_one() -> None:
    # Two chunks of several tokens; one of none, whose text was not complete.
    body = events(
        text_event("ab", **usage(3, cached=2)),
        text_event("", **usage(3)),
        text_event("c", "length", **usage(4)),
    )
    fields, text, _ = result_of(body)
    assert [tokens for _, tokens in fields["chunks"]] == [3, 4]
    assert (fields["got_tokens"], fields["cached_tokens"], fields["error"]) == (4, 2, None)
    assert (fields["server_prompt_tokens"], fields["finish_reason"]) == (3, "length")
    assert text == ""  # not asked for


def test_chunks_are_counted_until_usage_comes() -> None:
    body = events(text_event("a"), text_event("b", "length"), {"choices": [], **usage(5)})
    fields, *_ = result_of(body, replace(IDS, max_new_tokens=5))
    # The last piece held the rest; the counts after it do not make a later token.
    assert [tokens for _, tokens in fields["chunks"]] == [1, 5]
    body = events(
        text_event("a"), text_event("b"), text_event("c", "length"), {"choices": [], **usage(2)}
    )
    fields, *_ = result_of(body)
    assert fields["got_tokens"] == 2
    assert [tokens for _, tokens in fields["chunks"]] == [1, 2, 2]


def test_lines_end_at_newlines_alone() -> None:
    # Unescaped, as SGLang writes them; str.splitlines would end a line at each.
    piece = "a\u2028b\u2029c\x85d"
    event = json.dumps(text_event(piece, "stop"), ensure_ascii=False)
    fields, text, _ = result_of(
        f"data: {event}\r\n\r\ndata: [DONE]\n\n".encode(), replace(IDS, keep_text=True)
    )
    assert (fields["error"], text) == (None, piece)


def test_half_a_character_is_no_error() -> None:
    fields, *_ = result_of(events(text_event("X", "stop")).replace(b"X", b"\xe2\x82"))
    assert (fields["error"], fields["got_tokens"]) == (None, 1)


def test_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apis, "MAX_LINE_BYTES", 100)
    fields, *_ = result_of(b"data: " + b"x" * 200)
    assert fields["error"] == "an event of more than 100 bytes"


@pytest.mark.parametrize(
    "event",
    [
        text_event("a", "stop", **usage(float("inf"))),  # type: ignore[arg-type]
        text_event("a", "stop", **usage(-1)),
        text_event("a", "stop", **usage(1, cached="many")),  # type: ignore[arg-type]
        text_event("a", "stop", usage={"completion_tokens": None, "prompt_tokens": 1}),
        text_event("a", "stop", usage=[]) | {"usage": "x"},
        text_event(["a"], "stop"),  # type: ignore[arg-type]
        {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": {"a": 1}}}]}}]},
        {"choices": {"0": 1}},
        "[" * 100_000,
        "{}",
    ],
)
def test_answers_that_are_none_are_failures_of_their_request(event: object) -> None:
    fields, *_ = result_of(events(event), replace(IDS, keep_text=True))
    assert fields["error"].startswith("not an answer of /v1/completions")


@pytest.mark.parametrize(
    "meta",
    [
        {"completion_tokens": float("inf")},
        {"completion_tokens": -1},
        {"completion_tokens": 1, "cached_tokens": "x"},
        {"completion_tokens": 1, "prompt_tokens": -1},
        [],
    ],
)
def test_native_counts_are_numbers(meta: object) -> None:
    fields, *_ = result_of(events({"meta_info": meta}), api="sglang")
    assert fields["error"].startswith("not an answer of /generate")


def test_more_tokens_than_asked_for_are_no_speed() -> None:
    body = events(text_event("a", **usage(4)), text_event("b", "length", **usage(5)))
    fields, *_ = result_of(body)
    assert fields["error"] == "5 tokens came, at most 4 tokens were asked for"
    body = events({"meta_info": {"completion_tokens": 5, "finish_reason": {"type": "length"}}})
    assert "5 tokens came" in result_of(body, api="sglang")[0]["error"]
    # Chunks are only about as many.
    whole = [text_event("a")] * (apis.CHUNKS_PER_TOKEN * 4 + apis.MORE_CHUNKS)
    assert result_of(events(*whole, text_event("", "stop")))[0]["error"] is None
    assert "chunks came" in result_of(events(*whole, text_event("a", "stop")))[0]["error"]


def test_counts_that_go_backwards_leave_the_last() -> None:
    body = events(text_event("a", **usage(3)), text_event("b", "length", **usage(2)))
    fields, *_ = result_of(body)
    assert (fields["got_tokens"], fields["error"]) == (2, None)


def test_chunks_without_tokens_are_no_progress() -> None:
    tally = Tally()
    body = events(*[text_event("", **usage(1))] * 9, text_event("", "length", **usage(2)))
    talk(lambda _: httpx.Response(200, content=body), lambda c: send(c, IDS, tally, 0.0))
    assert (tally.chunks, tally.done) == (2, 1)


def test_without_usage_chunks_are_all_there_is() -> None:
    fields, *_ = result_of(events(text_event("a"), text_event("b", "stop")))
    assert (fields["got_tokens"], fields["server_prompt_tokens"]) == (2, None)
    assert fields["finish_reason"] == "stop"


def test_chat_keeps_text_and_joins_tool_calls() -> None:
    def delta(finish: str | None = None, **content: object) -> dict:
        return {"choices": [{"delta": content, "finish_reason": finish}]}

    body = events(
        delta(role="assistant", content=""),
        delta(content="so "),
        delta(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": '{"a"'}}]),
        delta(tool_calls=[{"index": 1, "function": {"arguments": "{}"}}]),
        delta("tool_calls", tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}]),
    )
    fields, text, calls = result_of(body, CHAT)
    assert (text, calls) == ("so ", ['{"a": 1}', "{}"])
    assert fields["got_tokens"] == 4  # the role is no token


@pytest.mark.parametrize("api", ["openai", "sglang"])
@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (events(done=True), 200, "ended before the answer was complete"),
        (b"", 200, "ended before the answer was complete"),
        (b"<html>welcome</html>", 200, "ended before the answer was complete"),
        (events("{}"), 200, "not an answer of /"),
        (events("[1, 2]"), 200, "not an answer of /"),
        (events('"text"'), 200, "not an answer of /"),
        (events("{broken"), 200, "not an answer of /"),
        (events({"error": {"message": "no memory"}}), 200, "no memory"),
        (b"busy", 503, "HTTP 503: busy"),
    ],
)
def test_answers_that_are_none_are_errors(api: str, body: bytes, status: int, error: str) -> None:
    fields, *_ = result_of(body, api=api, status=status)
    assert error in fields["error"]
    assert fields["got_tokens"] == 0


@pytest.mark.parametrize("api", ["openai", "sglang"])
def test_half_a_stream_is_an_error_and_keeps_what_came(api: str) -> None:
    half = (
        text_event("a", **usage(1))
        if api == "openai"
        else {"meta_info": {"completion_tokens": 1, "finish_reason": None}}
    )
    fields, *_ = result_of(events(half, done=False), api=api)
    assert fields["error"] == "the stream ended before the answer was complete"
    assert fields["got_tokens"] == 1


def test_aborted_answers_are_errors() -> None:
    native = {
        "meta_info": {"completion_tokens": 1, "finish_reason": {"type": "abort", "message": "x"}}
    }
    assert result_of(events(native), api="sglang")[0]["error"] == "aborted: x"
    assert "abort" in result_of(events(text_event("a", "abort")))[0]["error"]


def test_server_that_is_not_there_is_an_error() -> None:
    def refuse(request: object) -> object:
        raise httpx.ConnectError("refused")

    fields, *_ = talk(refuse, lambda client: send(client, IDS, Tally(), 0.0))
    assert fields["error"] == "ConnectError: refused"


def test_exact_lengths_are_asked_for_only_where_wanted() -> None:
    client = OpenAiClient(None, "m")
    exact, free = (json.loads(client.body(replace(IDS, exact=value))) for value in (True, False))
    assert (exact["ignore_eos"], exact["min_tokens"], exact["max_tokens"]) == (True, 4, 4)
    assert {"ignore_eos", "min_tokens"}.isdisjoint(free)
    assert exact["prompt"] == [1, 2, 3]
    assert exact["stream_options"]["include_usage"] is True
    native = json.loads(NativeGenerateClient(None).body(replace(IDS, dp_rank=2)))
    assert (native["routed_dp_rank"], native["sampling_params"]["ignore_eos"]) == (2, True)


def test_request_digest_ignores_only_the_name_of_the_model() -> None:
    one, two = OpenAiClient(None, "one"), OpenAiClient(None, "two")
    assert one.body(IDS) != two.body(IDS)
    assert one.digest_text(IDS) == two.digest_text(IDS)
    others = [replace(IDS, token_ids=(9,)), replace(IDS, max_new_tokens=5), replace(IDS, dp_rank=1)]
    assert len({one.digest_text(request) for request in [IDS, *others]}) == 4


def test_rank_travels_in_the_header() -> None:
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("x-data-parallel-rank"))
        return httpx.Response(200, content=events(text_event("a", "length")))

    for request in (IDS, replace(IDS, dp_rank=3)):
        talk(answer, lambda client, request=request: send(client, request, Tally(), 0.0))
    assert seen == [None, "3"]


@pytest.mark.parametrize(
    ("routes", "flushed"),
    [({"/flush_cache": 200}, True), ({"/reset_prefix_cache": 200}, True), ({}, False)],
)
def test_cache_is_flushed_by_the_route_that_exists(routes: dict[str, int], flushed: bool) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(routes.get(request.url.path, 404))

    assert talk(answer, lambda client: empty_cache(client, "try")) is flushed
    assert talk(answer, lambda client: empty_cache(client, "never")) is False
    if not flushed:
        with pytest.raises(RequestFailed, match="give --no-flush"):
            talk(answer, lambda client: empty_cache(client, "must"))
        with pytest.raises(CannotFlush):
            talk(answer, lambda client: client.flush_cache(), "sglang")


def test_refused_flush_is_an_error_not_a_missing_route() -> None:
    with pytest.raises(RequestFailed, match="/flush_cache: HTTP 400: busy"):
        talk(lambda _: httpx.Response(400, text="busy"), lambda client: empty_cache(client, "try"))


# --- what is agreed with a server -------------------------------------------------------------


class Scripted:
    """A server that counts words, adds its template, and refuses what it is told to refuse."""

    def __init__(self, refuses: Iterable[str] = (), first: int = 7, each: int = 3) -> None:
        self.refuses = set(refuses)
        self.first, self.each = first, each
        self.sent: list[dict] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.sent.append(body)
        prompt = body.get("prompt", "")
        used = {
            "ids": isinstance(prompt, list),
            "continuous": "continuous_usage_stats" in body["stream_options"],
            "exact": "ignore_eos" in body,
            "system": any(m["role"] == "system" for m in body.get("messages", ())),
        }
        if any(used.get(what) for what in self.refuses):
            return httpx.Response(400, text="planted refusal")
        if "messages" in body:
            count = self.first + sum(
                self.each + len(message["content"].split()) for message in body["messages"]
            )
        else:
            count = len(prompt) if isinstance(prompt, list) else 1 + len(prompt.split())
        counts = {} if "usage" in self.refuses else usage(1, count)
        return httpx.Response(200, content=events(text_event("x", "length", **counts)))


def job(**changes: object) -> dict:
    words = [f"w{index}" for index in range(50)]
    return {
        "prompts": "auto",
        "exact": True,
        "dp_size": None,
        "is_text": False,
        "word_ids": list(range(50)),
        "words": words,
        **changes,
    }


@pytest.mark.parametrize(
    ("refuses", "prompts", "per_chunk"),
    [
        ((), "ids", True),
        (("continuous",), "ids", False),
        (("ids",), "text", True),
        (("ids", "continuous"), "text", False),
    ],
)
def test_what_the_server_takes_is_found_out(
    refuses: tuple[str, ...], prompts: str, per_chunk: bool
) -> None:
    async def use(client: OpenAiClient) -> tuple[Form, bool]:
        return await agree(client, job()), client.usage_per_chunk

    form, usage_per_chunk = talk(Scripted(refuses), use)
    assert (form.prompts, usage_per_chunk) == (prompts, per_chunk)
    assert form.overhead.first == (1 if prompts == "text" else 0)


def test_server_that_takes_nothing_says_why() -> None:
    with pytest.raises(RequestFailed, match=r"HTTP 400: planted refusal; .*: give --free-lengths$"):
        talk(Scripted(["exact"]), lambda client: agree(client, job()))
    with pytest.raises(RequestFailed, match=r"HTTP 400: planted refusal$"):
        talk(Scripted(["ids", "exact"]), lambda client: agree(client, job(prompts="ids")))
    form = talk(Scripted(["exact"]), lambda client: agree(client, job(exact=False)))
    assert form.prompts == "ids"


def test_trouble_is_not_taken_for_a_refusal() -> None:
    server = Scripted()
    asked = []

    def broken(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(500, text="out of memory")

    with pytest.raises(RequestFailed, match="HTTP 500"):
        talk(broken, lambda client: agree(client, job()))
    assert len(asked) == 1
    assert server.sent == []


@pytest.mark.parametrize(
    ("refuses", "overhead"),
    [((), Overhead(13, 6, True)), (("system",), Overhead(10, 6, False))],
)
def test_template_is_measured(refuses: tuple[str, ...], overhead: Overhead) -> None:
    words = job()["words"]
    measured = talk(
        Scripted(refuses), lambda client: measure_overhead(client, "chat", words, exact=True)
    )
    assert measured == overhead


def test_template_cannot_be_measured_without_usage() -> None:
    with pytest.raises(RequestFailed, match="reports no usage"):
        talk(Scripted(["usage"]), lambda c: measure_overhead(c, "chat", ["w"], exact=True))


# --- prompts ----------------------------------------------------------------------------------

PLAN = SessionPlan(
    "s",
    0.0,
    tuple(index % 50 for index in range(400)),
    (Turn(100, 9, 0, answer_tokens=20), Turn(180, 9, 0, answer_tokens=500), Turn(400, 9, 0)),
    shared_tokens=30,
).to_json()
WORDS = dict(enumerate(job()["words"]))


def chat_form(overhead: Overhead) -> Form:
    return Form("chat", WORDS, True, None, overhead)


@pytest.mark.parametrize("overhead", [Overhead(13, 6, True), Overhead(10, 6, False), Overhead()])
def test_chat_prompts_have_exactly_the_planned_tokens(overhead: Overhead) -> None:
    before: tuple = ()
    for index, planned in enumerate((100, 180, 400)):
        messages = chat_messages(PLAN, index, chat_form(overhead))
        words = sum(len(message["content"].split()) for message in messages)
        assert words + overhead.first + index * overhead.pair == planned
        assert messages[: len(before)] == before  # the prefix of a session never changes
        before = messages
    roles = ["system"] * overhead.system + ["user"] + ["assistant", "user"] * 2
    assert [message["role"] for message in before] == roles
    answers = [len(m["content"].split()) for m in before if m["role"] == "assistant"]
    assert answers == [
        20,
        220 - overhead.pair - 1,
    ]  # the second planned answer was longer than the growth
    if overhead.system:
        assert len(before[0]["content"].split()) == 30


def test_too_short_prompts_show_as_drift() -> None:
    tight = Overhead(200, 100, True)
    counts = []
    for index, planned in enumerate((100, 180, 400)):
        words = sum(len(m["content"].split()) for m in chat_messages(PLAN, index, chat_form(tight)))
        counts.append((planned, words + tight.first + index * tight.pair))
    assert drift(counts) == pytest.approx((102 + 124 + 6) / 680)
    assert drift([(100, 101)]) == pytest.approx(0.01)
    assert drift([]) is None


def test_prompts_as_ids_and_as_text() -> None:
    ids = build_request(PLAN, 1, Form("ids", {}, True, None))
    assert ids.token_ids == tuple(PLAN["token_ids"][:180])
    text = build_request(PLAN, 1, Form("text", WORDS, False, None, Overhead(first=2)))
    assert len(text.text.split()) == 178
    assert text.text.startswith("w0 w1 ")
    assert (text.exact, text.max_new_tokens) == (False, 9)


def test_sessions_are_spread_over_ranks_by_name_alone() -> None:
    ranks = [dp_rank(f"session-{index}", 4) for index in range(200)]
    assert ranks == [dp_rank(f"session-{index}", 4) for index in range(200)]
    assert all(ranks.count(rank) > 25 for rank in range(4))
    assert dp_rank("session-1", None) is None
    pinned = build_request(PLAN, 0, Form("ids", {}, True, 4))
    assert pinned.dp_rank == dp_rank("s", 4)


# --- answers that programs read ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        ('{"a": 1}', [], "json"),
        ("  [1, 2]\n", [], "json"),
        ('```json\n{"a": 1}\n```', [], "json"),
        ('{"a": 1', [], None),
        ("3", [], None),  # a bare number is prose
        ("", ["{}"], "tool_call"),
        ("", ['{"a": 1}', '{"a"'], None),
        ('<tool_call>{"name": "f"}</tool_call>', [], "tool_call"),
        ("<tool_call>f(x)</tool_call>", [], None),
        ("THOUGHT: look\n\n```bash\nls -l\n```", [], "bash_block"),
        ("```bash\nls\n```\nor\n```bash\npwd\n```", [], None),
        ("```bash\n\n```", [], None),
        ("```bash\nls", [], None),
        ("look at the files", [], None),
    ],
)
def test_form_of_an_answer(text: str, arguments: list[str], expected: str | None) -> None:
    assert answer_format(text, arguments) == expected


def test_client_ends_with_the_gate_even_if_the_server_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        job = {
            "url": f"http://127.0.0.1:{server.getsockname()[1]}",
            "api": "sglang",
            "lead": True,
            "prompts": "ids",
            "words": (),
            "exact": True,
            "dp_size": None,
            "warmup": [
                SessionPlan("warmup", 0.0, (1, 2), (Turn(2, 1, 0.0),)).to_json(),
            ],
        }
        command = [sys.executable, "-m", "numinous_tooling.gate.client"]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as client:
            try:
                assert client.stdin
                assert client.stdout
                client.stdin.write(json.dumps(job) + "\n")
                client.stdin.flush()
                while json.loads(client.stdout.readline())["in_flight"] < 2:
                    pass
                client.stdout.close()  # what a SIGKILL of the gate does
                assert client.wait(timeout=60) != 0
            finally:
                client.kill()


def test_only_an_address_without_tls_goes_unverified() -> None:
    for url, wanted in (("http://a:1", False), ("https://a", True), ("HTTPS://a", True)):
        assert apis.has_tls(url) is wanted
