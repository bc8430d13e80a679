# SPDX-License-Identifier: Apache-2.0
"""A stand-in for ``sglang.launch_server`` under the arms of an engine benchmark: the accuracy gate's, over bytes, with a pool and with features.

``FAKE_ENGINE`` names a folder: `arms.json` there says what an arm does (`shift`: how far its answers are off, `die_at`, `hang_at` and `term_at`: the
request with which it dies, hangs, or hangs once it sent SIGTERM to the benchmark; `prints`: said and ended with at the start), and each start leaves
its arm, pid and arguments in a line of `starts`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tooling" / "tests"))

import gate_fake_engine as gate

from numinous_tooling.patching.counters import counters, publish

gate.TABLE = np.random.default_rng(1).normal(0, 2.0, (256, 256))
gate.NOISE = np.random.default_rng(2).normal(0, 1.0, (256, 256))


class Handler(gate.Handler):
    tokens: int
    term_at: int | None

    def do_GET(self) -> None:
        if self.path == "/server_info":
            self.reply({"max_total_num_tokens": self.tokens})
        else:
            super().do_GET()

    def generate(self, body: dict[str, Any]) -> None:
        if self.model.served + 1 == self.term_at:
            os.kill(os.getppid(), signal.SIGTERM)
            self.model.released.wait(600)
        super().generate(body)


def install(folder: Path, arms: dict[str, dict[str, Any]], environ: Any) -> None:
    """Make the servers that are started from here on ours.

    Args:
        environ: has `setenv` (`pytest.MonkeyPatch`).
    """
    package = folder / "package" / "sglang"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport fake_engine\nfake_engine.main()\n"
    )
    (folder / "arms.json").write_text(json.dumps(arms))
    environ.setenv("FAKE_ENGINE", str(folder))
    environ.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), *sys.path]))


def starts(folder: Path) -> list[dict[str, Any]]:
    """Every start so far."""
    path = folder / "starts"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    folder = Path(os.environ["FAKE_ENGINE"])
    arm = Path(os.environ["NUMINOUS_STATE_DIR"]).name.removeprefix("state-")
    with (folder / "starts").open("a") as file:
        flags = {k: v for k, v in os.environ.items() if k.startswith(("NUMINOUS_", "SGLANG_"))}
        file.write(json.dumps({"arm": arm, "pid": os.getpid(), "argv": sys.argv[1:], "env": flags}) + "\n")  # fmt: skip
    what = json.loads((folder / "arms.json").read_text())[arm]
    if "prints" in what:
        sys.exit(what["prints"])
    print(f"the log of {arm}", flush=True)
    for feature in what.get("features", ()):
        counters(feature).engaged()
    if what.get("features"):
        publish({"role": "scheduler", "run": arm, "features": what["features"]})
    options = gate.arguments(sys.argv[1:])
    for name in ("shift", "jitter", "die_at", "hang_at", "no_cache"):
        setattr(options, name, what.get(name, getattr(options, name)))
    Handler.model = gate.Model(options)
    Handler.tokens, Handler.term_at = what.get("tokens", 1000), what.get("term_at")
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
