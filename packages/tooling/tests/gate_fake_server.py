# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the engine's HTTP server, run by the gate tests as an arm's server command.

Speaks `/health`, `/generate` (streamed), `/flush_cache`, `/server_info`, keeps a prefix cache, and misbehaves on
request. It logs the requests it got to `requests-<pid>.jsonl`, and its process ids to `pids`, in `--notes`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
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
    parser.add_argument("--hang-after", type=int)
    parser.add_argument("--error-at", type=int)
    parser.add_argument("--short-at", type=int)
    parser.add_argument("--break-at", type=int)
    parser.add_argument("--nonsense-at", type=int)
    parser.add_argument("--dirty-cache", action="store_true")
    parser.add_argument("--never-engage", action="store_true")
    parser.add_argument("--always-engage", action="store_true")
    parser.add_argument("--with-child", action="store_true")
    return parser.parse_known_args()[0]


class State:
    """Cache and counts of the server."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.lock = threading.Lock()
        self.cache: set[tuple[int, ...]] = set()
        self.served = 0
        self.engages = (
            FEATURE_FLAG in os.environ or options.always_engage
        ) and not options.never_engage

    def admit(self, ids: tuple[int, ...]) -> tuple[int, int]:
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
            if self.engages:
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
        if self.path == "/health":
            self._reply(503 if self.state.options.never_ready else 200, {})
        else:
            self._reply(200, {"version": "fake"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or "{}")
        if self.path.startswith("/flush_cache"):
            self.state.cache.clear()
            self._reply(200, {})
        else:
            self._generate(body)

    def _generate(self, body: dict) -> None:
        options = self.state.options
        ids = tuple(body["input_ids"])
        number, cached = self.state.admit(ids)
        line = json.dumps([body["input_ids"], body["sampling_params"]])
        with self.state.lock, (options.notes / f"requests-{os.getpid()}.jsonl").open("a") as log:
            log.write(line + "\n")
        if options.die_after is not None and number > options.die_after:
            print("fake server: giving up on purpose", flush=True)
            os._exit(7)
        if options.hang_after is not None and number > options.hang_after:
            time.sleep(3600)
        if number == options.error_at:
            self._reply(500, {"error": "planted"})
            return
        count = body["sampling_params"]["max_new_tokens"]
        if number == options.short_at:
            count = max(1, count // 2)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        time.sleep(TTFT_S * options.slow)
        for index in range(1, count + 1):
            if number == options.break_at and index == 2:
                self.close_connection = True
                return
            meta = {
                "completion_tokens": index,
                "cached_tokens": cached,
                "finish_reason": {"type": "length"} if index == count else None,
            }
            text = "{}" if number == options.nonsense_at else json.dumps({"meta_info": meta})
            self._chunk(f"data: {text}\n\n")
            time.sleep(TPOT_S * options.slow)
        self._chunk("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


def main() -> None:
    options = arguments()
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
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()
