# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the engine's HTTP server with a language model of 128 tokens, run by the accuracy tests in a thread or as an arm's command.

Its next-token distribution is a function of the last two tokens; `--shift` disturbs it as a wrong kernel would,
`--jitter` adds what depends on the size of the batch, as stock kernels have it, `--alone` what a request has that is alone. Tokens are characters. It keeps a
prefix cache and misbehaves on request; `--when-cached` restricts the shift to requests that found a prefix, `--wobble-from` makes answers depend on the time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 128
TABLE = np.random.default_rng(1).normal(0, 2.0, (VOCABULARY, VOCABULARY))
NOISE = np.random.default_rng(2).normal(0, 1.0, (VOCABULARY, VOCABULARY))


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--chunked-prefill-size", type=int, default=-1)
    parser.add_argument("--shift", type=float, default=0.0)
    parser.add_argument("--alone", type=float, default=0.0)
    parser.add_argument("--jitter", type=float, default=0.0)
    parser.add_argument("--when-cached", action="store_true")
    parser.add_argument("--no-cache", action="store_true")
    parser.add_argument("--dirty-cache", action="store_true")
    parser.add_argument("--wobble-from", type=int)
    parser.add_argument("--last-id-is-0", action="store_true")
    parser.add_argument("--unnormalised", type=float, default=0.0)
    parser.add_argument("--stop-after", type=int)
    # What is counted before it answers, as in CUDA graphs that are captured at the start; then nothing is.
    parser.add_argument("--captured", type=int)
    parser.add_argument("--graph-log", choices=("True", "False"), help="of each decode batch")
    parser.add_argument("--list", choices=("short", "unsorted", "double"))
    for fault in ("die", "hang", "nonsense", "nan", "error", "wrong-tokens"):
        parser.add_argument(f"--{fault}-at", type=int)
    return parser.parse_known_args(given)[0]


class Model:
    """Scores and generates; one request at a time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.lock = threading.Lock()
        self.cache: set[tuple[int, ...]] = set()
        self.served = 0
        self.released = threading.Event()

    def cached(self, ids: list[int], limit: int) -> int:
        if self.options.dirty_cache:
            return 1
        if self.options.no_cache:
            return 0
        found = 0
        while found < limit and tuple(ids[: found + 1]) in self.cache:
            found += 1
        return found

    def remember(self, ids: list[int]) -> None:
        self.cache.update(tuple(ids[:end]) for end in range(1, len(ids) + 1))

    def logprobs(self, ids: list[int], batch: int, cached: int) -> np.ndarray:
        logits = TABLE[ids[-1]] + 0.5 * TABLE[ids[-2] if len(ids) > 1 else 0]
        shift = self.options.shift if cached or not self.options.when_cached else 0.0
        logits = logits + shift * NOISE[ids[-1]] + self.options.jitter * batch * NOISE[ids[-1] - 1]
        if batch == 1:
            logits = logits + self.options.alone * NOISE[ids[-1]]
        wobble = self.options.wobble_from
        if wobble is not None and self.served >= wobble:
            logits = logits + 1e-6 * self.served * NOISE[ids[-1]]
        logits = logits - logits.max()
        logits = logits + self.options.unnormalised
        norm = np.exp(logits - self.options.unnormalised).sum()
        return (logits - np.log(norm)).astype(np.float32)

    def answer(self, ids: list[int], start: int, new: int, top: int, batch: int) -> dict[str, Any]:
        cached = self.cached(ids, len(ids) - 1 if start < 0 else start)
        meta: dict[str, Any] = {"cached_tokens": cached}
        if start >= 0:
            rows = [self.logprobs(ids[:at], batch, cached) for at in range(start + 1, len(ids))]
            meta["input_token_logprobs"] = [
                [None, ids[start], None],
                *self.chosen(rows, ids[start + 1 :]),
            ]
            meta["input_top_logprobs"] = [None, *[self.listed(row, top) for row in rows]]
        text: list[int] = []
        rows = []
        for _ in range(min(new, self.options.stop_after or new)):
            rows.append(self.logprobs(ids + text, batch, cached))
            text.append(int(rows[-1].argmax()))
        meta["output_token_logprobs"] = self.chosen(rows, text)
        meta["output_top_logprobs"] = [self.listed(row, top) for row in rows]
        self.remember(ids + text)
        return {"text": "".join(map(chr, text)), "output_ids": text, "meta_info": meta}

    @staticmethod
    def chosen(rows: list[np.ndarray], tokens: list[int]) -> list[list[Any]]:
        return [[float(row[t]), t, None] for row, t in zip(rows, tokens, strict=True)]

    def listed(self, row: np.ndarray, top: int) -> list[list[Any]]:
        found = [[float(row[t]), int(t), None] for t in np.argsort(-row, kind="stable")[:top]]
        if self.options.list == "short":
            return found[:-1]
        if self.options.list == "unsorted":
            return found[::-1]
        return [*found[:-1], found[0]] if self.options.list == "double" else found


class Handler(BaseHTTPRequestHandler):
    """The five endpoints that the gate uses."""

    model: Model

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/server_info":
            size = self.model.options.chunked_prefill_size
            self.reply({"version": "fake", "chunked_prefill_size": size})
        elif self.path == "/model_info":
            self.reply({"model_path": "nowhere"})
        else:
            self.reply({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path.startswith("/flush_cache"):
            self.model.cache.clear()
            self.reply({})
        elif self.path == "/tokenize":
            texts = json.loads(body)["prompt"]
            tokens = [[ord(character) % VOCABULARY for character in text] for text in texts]
            self.reply({"tokens": tokens, "max_model_len": 4096})
        else:
            with self.model.lock:
                self.generate(json.loads(body))

    def generate(self, body: dict[str, Any]) -> None:
        options = self.model.options
        self.model.served += 1
        now = self.model.served
        if now == options.die_at:
            os._exit(3)
        if now == options.hang_at:
            self.model.released.wait(120)
        if now == options.error_at:
            self.reply({"error": "no memory left"}, 500)
            return
        if now == options.nonsense_at:
            self.reply([{"surprise": True}] * len(body["input_ids"]))
            return
        prompts = body["input_ids"]
        count = len(prompts)
        starts = body.get("logprob_start_len") or [-1] * count
        answers = [
            self.model.answer(
                ids,
                start,
                body["sampling_params"]["max_new_tokens"],
                body.get("top_logprobs_num", 1),
                count,
            )
            for ids, start in zip(prompts, starts, strict=True)
        ]
        entries = answers[0]["meta_info"].get("input_token_logprobs", [])
        if options.nan_at is not None and now >= options.nan_at and entries:
            entries[1][0] = None
        if options.last_id_is_0:
            for item in answers:
                for entry in item["meta_info"].get("input_token_logprobs", []):
                    entry[1] = 0 if entry[1] == VOCABULARY - 1 else entry[1]
        if now == options.wrong_tokens_at and entries:
            entries[1][1] += 1
        if self.model.options.graph_log:
            print(f"Decode batch, #running-req: 1, cuda graph: {self.model.options.graph_log}, x")
        self.reply(answers)

    def reply(self, answer: Any, status: int = 200) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextlib.contextmanager
def serving(flags: str = "") -> Iterator[str]:
    """Serve in a thread of this process for the length of a block; gives the address."""
    model = Model(arguments(flags.split()))
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"model": model}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        model.released.set()
        server.shutdown()
        server.server_close()


def main() -> None:
    options = arguments()
    Handler.model = Model(options)
    state = os.environ.get("NUMINOUS_STATE_DIR")
    if state and options.captured:
        planted = "numinous_tooling.engine.planted" in sys.argv
        name = "plant.head" if planted else "scheduler.decode_burst"
        Path(state, "totals.json").write_text(json.dumps({name: {"engaged": options.captured}}))
    elif state and os.environ.get("NUMINOUS_SCHEDULER_DECODE_BURST"):
        threading.Thread(target=count, args=(Path(state),), daemon=True).start()
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


def count(state: Path) -> None:
    """Write what a feature that engages with each request would have counted."""
    while True:
        temporary = state / "totals.tmp"
        temporary.write_text(
            json.dumps({"scheduler.decode_burst": {"engaged": Handler.model.served}})
        )
        temporary.replace(state / "totals.json")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
