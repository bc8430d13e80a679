# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the engine's HTTP server, run by the gate tests as an arm's server command.

Speaks `/health`, `/generate` and the OpenAI routes (streamed), `/flush_cache`, `/server_info`, keeps a prefix cache, and
misbehaves on request. A word of text is one token; chat adds `--template` tokens to the first message and to each
message. It logs the requests it got to `requests-<pid>.jsonl`, and its process ids to `pids`, in `--notes`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FEATURE_FLAG = "NUMINOUS_SCHEDULER_DECODE_BURST"
TTFT_S = 0.004
TPOT_S = 0.002


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--slow", type=float, default=1.0)
    parser.add_argument("--die-at-start", action="store_true")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--die-after", type=int)
    parser.add_argument(
        "--die-after-file", type=Path, help="die after as many as it says, if it exists"
    )
    parser.add_argument("--hang-after", type=int)
    parser.add_argument("--error-at", type=int)
    parser.add_argument("--short-at", type=int)
    parser.add_argument("--break-at", type=int)
    parser.add_argument("--nonsense-at", type=int)
    parser.add_argument("--dirty-cache", action="store_true")
    parser.add_argument("--never-engage", action="store_true")
    parser.add_argument("--always-engage", action="store_true")
    # What is counted before it answers, as in CUDA graphs that are captured at the start; then nothing is.
    parser.add_argument("--captured", type=int)
    parser.add_argument("--graph-log", choices=("True", "False"), help="of each answer's batch")
    parser.add_argument("--with-child", action="store_true")
    # Tokens are 400 times slower while more requests than this are under way.
    parser.add_argument("--cliff-at", type=int)
    parser.add_argument("--no-health", action="store_true")
    parser.add_argument("--flush", choices=("sglang", "vllm", "none"), default="sglang")
    parser.add_argument("--refuse-ids", action="store_true")
    parser.add_argument("--strict", action="store_true", help="refuse what OpenAI itself lacks")
    parser.add_argument("--no-usage", action="store_true")
    parser.add_argument("--no-system", action="store_true", help="refuse system messages")
    parser.add_argument("--template", type=int, default=5)
    parser.add_argument("--token-factor", type=float, default=1.0, help="tokens per word")
    parser.add_argument("--answer", default="", help="text of every chat answer")
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--loads", action="store_true")
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--name", default="fake-model")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--api-key", help="of every POST")
    return parser.parse_known_args()[0]


class State:
    """Cache and counts of the server."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.lock = threading.Lock()
        self.cache: set[tuple[object, ...]] = set()
        self.served = 0
        self.running = 0
        self.engages = (
            FEATURE_FLAG in os.environ or options.always_engage
        ) and not options.never_engage

    def admit(self, ids: tuple[object, ...]) -> tuple[int, int]:
        """Return the number of this request, counted from 1, and its cached tokens."""
        with self.lock:
            cached = 0
            for old in self.cache:
                length = 0
                for mine, theirs in zip(ids, old, strict=False):
                    if mine != theirs:
                        break
                    length += 1
                cached = max(cached, min(length, len(ids) - 1))
            if self.options.dirty_cache:
                cached = max(cached, 1)
            self.cache.add(ids)
            self.served += 1
            if self.options.graph_log:
                print(f"Decode batch, cuda graph: {self.options.graph_log}, x", flush=True)
            if self.engages and self.options.captured is None:
                counters = {"scheduler.decode_burst": {"engaged": self.served, "refused:queue": 1}}
                Path(os.environ["NUMINOUS_STATE_DIR"], "totals.json").write_text(
                    json.dumps(counters)
                )
            return self.served, cached


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, *args: object) -> None:
        pass

    def _reply(self, code: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        options = self.state.options
        pages: dict[str, object] = {
            "/server_info": {"version": "fake", "dp_size": options.dp_size},
            "/v1/models": {"data": [{"id": options.name, "max_model_len": options.context}]},
        }
        if not options.no_health:
            pages["/health"] = {}
        load = {"num_running_reqs": self.state.running, "num_waiting_reqs": 2, "token_usage": 0.5}
        if options.loads:
            pages["/v1/loads?include=core"] = {"loads": [load, load]}
        if options.metrics and self.path == "/metrics":
            text = (
                "# HELP sglang:num_running_reqs x\n"
                f'sglang:num_running_reqs{{dp="0"}} {self.state.running}\n'
                f'sglang:num_queue_reqs{{dp="0"}} 3.0\nsglang:num_queue_reqs{{dp="1"}} 1.0\n'
                f'sglang:token_usage{{dp="0"}} 0.25\nsglang:token_usage{{dp="1"}} 0.5\n'
                f"sglang:num_retracted_requests_total {self.state.served}\n"
            ).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
        elif self.path == "/health" and options.never_ready:
            self._reply(503, {})
        elif self.path in pages:
            self._reply(200, pages[self.path])
        else:
            self._reply(404, {})

    def do_POST(self) -> None:
        key = self.state.options.api_key
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or "{}")
        given = self.headers.get("authorization", "")
        if key is not None and given != f"Bearer {key}":
            self._reply(401, {"error": f"wrong key: {given}"})
            return
        flush = {"sglang": "/flush_cache", "vllm": "/reset_prefix_cache"}.get(
            self.state.options.flush
        )
        if self.path.split("?")[0] in ("/flush_cache", "/reset_prefix_cache"):
            if self.path.split("?")[0] == flush:
                self.state.cache.clear()
            self._reply(200 if self.path.split("?")[0] == flush else 404, {})
        elif self.path == "/generate":
            self._log([body["input_ids"], body["sampling_params"], body.get("routed_dp_rank")])
            self._answer(
                tuple(body["input_ids"]), body["sampling_params"]["max_new_tokens"], self._native
            )
        elif self.path in ("/v1/completions", "/v1/chat/completions"):
            self._openai(body)
        else:
            self._reply(404, {})

    def _log(self, value: object) -> None:
        options = self.state.options
        with self.state.lock, (options.notes / f"requests-{os.getpid()}.jsonl").open("a") as log:
            log.write(json.dumps(value) + "\n")

    def _openai(self, body: dict) -> None:
        options = self.state.options
        prompt = body.get("prompt") or body["messages"]
        refused = (
            (isinstance(prompt, list) and isinstance(prompt[0], int) and options.refuse_ids)
            or (options.strict and ("ignore_eos" in body or len(body["stream_options"]) > 1))
            or (options.no_system and "messages" in body and prompt[0]["role"] == "system")
        )
        if refused:
            self._reply(400, {"error": {"message": "planted refusal"}})
            return
        rank = self.headers.get("x-data-parallel-rank")
        self._log([prompt, {key: body[key] for key in body if key != "prompt"}, rank])
        tokens: list[object]
        if "messages" in body:
            tokens = ["<s>"] * options.template
            for message in prompt:
                tokens += [f"<{message['role']}>"] * options.template
                tokens += (message["content"] or "").split()
        else:
            tokens = prompt.split() if isinstance(prompt, str) else prompt
        tokens += ["<more>"] * round((options.token_factor - 1) * len(tokens))
        chat = "messages" in body
        words = options.answer.split(" ") if chat and options.answer else []
        count = body["max_tokens"]
        if words and not body.get("ignore_eos"):
            count = min(count, len(words))

        def render(index: int, count: int, cached: int) -> str:
            text = " " * (index > 1) + words[index - 1] if index <= len(words) else " x"
            choice = {"delta": {"content": text}} if chat else {"text": text}
            choice["finish_reason"] = "length" if index == count else None
            usage = {
                "prompt_tokens": len(tokens),
                "completion_tokens": index,
                "prompt_tokens_details": {"cached_tokens": cached},
            }
            event: dict = {"choices": [choice]}
            if body["stream_options"].get("continuous_usage_stats") and not options.no_usage:
                event["usage"] = usage
            text = json.dumps(event)
            if index == count and not options.no_usage:
                text += "\n\ndata: " + json.dumps({"choices": [], "usage": usage})
            return text

        self._answer(tuple(tokens), count, render)

    @staticmethod
    def _native(index: int, count: int, cached: int) -> str:
        meta = {
            "completion_tokens": index,
            "cached_tokens": cached,
            "finish_reason": {"type": "length"} if index == count else None,
        }
        return json.dumps({"meta_info": meta})

    def _answer(
        self, ids: tuple[object, ...], count: int, render: Callable[[int, int, int], str]
    ) -> None:
        options = self.state.options
        number, cached = self.state.admit(ids)
        if options.die_after is not None and number > options.die_after:
            print("fake server: giving up on purpose", flush=True)
            os._exit(7)
        if options.hang_after is not None and number > options.hang_after:
            time.sleep(3600)
        if number == options.error_at:
            self._reply(500, {"error": "planted"})
            return
        if number == options.short_at:
            count = max(1, count // 2)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        with self.state.lock:
            self.state.running += 1
        try:
            time.sleep(TTFT_S * options.slow)
            for index in range(1, count + 1):
                if number == options.break_at and index == 2:
                    self.close_connection = True
                    return
                text = "{}" if number == options.nonsense_at else render(index, count, cached)
                self._chunk(f"data: {text}\n\n")
                crowded = options.cliff_at is not None and self.state.running > options.cliff_at
                time.sleep(TPOT_S * options.slow * (400 if crowded else 1))
        finally:
            with self.state.lock:
                self.state.running -= 1
        self._chunk("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


def main() -> None:
    options = arguments()
    if options.die_after_file and options.die_after_file.exists():
        options.die_after = int(options.die_after_file.read_text())
    pids = [os.getpid()]
    if options.with_child:
        # Leaves session and group, as the most stubborn engine child could.
        pids.append(
            subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
            ).pid
        )
    with (options.notes / "pids").open("a") as log:
        log.writelines(f"{pid}\n" for pid in pids)
    (options.notes / "environment.json").write_text(json.dumps(dict(os.environ)))
    if options.die_at_start:
        print("\n".join(f"line {number}" for number in range(60)))
        raise SystemExit(3)
    Handler.state = State(options)
    if Handler.state.engages and options.captured is not None:
        counters = {"scheduler.decode_burst": {"engaged": options.captured}}
        Path(os.environ["NUMINOUS_STATE_DIR"], "totals.json").write_text(json.dumps(counters))
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()
