# SPDX-License-Identifier: Apache-2.0
"""The diagnostics in the real engine on the CPU, each against a fault that a topic package of the test plants."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from numinous_tooling.diag import access_locator, stall_tracer
from numinous_tooling.diag.command import diag
from numinous_tooling.diag.features import ACCESS_LOCATOR, STALL_TRACER
from numinous_tooling.diag.records import read

pytestmark = pytest.mark.engine

PLANTED = '''
"""Faults in the forward pass and in the pool, chosen by the environment."""
import os
import time

from numinous_tooling.patching import Feature, Hook, Pin
from numinous_tooling.patching.engine import find_engine
from numinous_tooling.patching.pins import digest_in

FORWARD = "sglang.srt.model_executor.model_runner:ModelRunner.forward"
WRITE = "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.set_kv_buffer"
FAULTS = os.environ.get("PLANTED_FAULTS", "").split()
decodes = 0


def nap(seconds):
    time.sleep(seconds)


def compile_kernel():
    """Compiles for a GPU, which needs none."""
    import planted_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    begin, size = time.monotonic(), 32
    while time.monotonic() - begin < 1.0:  # a machine may be faster than the limit of the test
        size *= 2
        signature = {"pointer": "*fp32", "SIZE": "constexpr"}
        source = ASTSource(planted_kernel.planted_kernel, signature, {"SIZE": size})
        compile(source, target=GPUTarget("cuda", 90, 32))


def before_forward(runner, batch, *args, **kwargs):
    global decodes
    decodes += batch.forward_mode.is_decode()
    if "stalls" in FAULTS and batch.forward_mode.is_decode() and decodes == 4:
        nap(1.2)
    if "stalls" in FAULTS and batch.forward_mode.is_decode() and decodes == 8:
        compile_kernel()
    if "location" in FAULTS and decodes == 16:
        batch.out_cache_loc[-1] = 1_000_000


def before_write(pool, layer, loc_info, *args, **kwargs):
    if "write" in FAULTS and decodes == 12 and layer.layer_id == 1:
        loc_info.loc[-1] = -3  # torch takes it from the end: no error, somebody else's keys


def hook(number, target, call):
    return Hook(id=f"parallel.planted.{number}", target=target, kind="before", call="planted_topic:" + call,
                pins=(Pin(target, {"now": digest_in(find_engine(), target)}),))


def features():
    patches = (hook(1, FORWARD, "before_forward"), hook(2, WRITE, "before_write"))
    return (Feature(id="parallel.planted", sentence="Faults.", arch={}, patches=patches),)
'''

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def planted_kernel(pointer, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    tl.store(pointer + offsets, tl.exp(tl.load(pointer + offsets)) + 1.0)
"""


@pytest.fixture
def planted(tmp_path) -> Callable[[str], dict[str, str]]:
    """The environment of a server with a fault: a distribution on the path whose feature is on."""

    def environ(faults: str) -> dict[str, str]:
        folder = tmp_path / "planted"
        info = folder / "numinous_planted-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / "planted_topic.py").write_text(PLANTED)
        (folder / "planted_kernel.py").write_text(KERNEL)
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: numinous-planted\nVersion: 1.0\n"
        )
        entry = "[numinous.features]\nplanted = planted_topic:features\n"
        (info / "entry_points.txt").write_text(entry)
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        return {
            "PYTHONPATH": path,
            "PLANTED_FAULTS": faults,
            "NUMINOUS_PARALLEL_PLANTED": "1",
            "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        }

    return environ


def until(condition: Callable[[], object], running, seconds: float = 60) -> None:
    """Wait for what another process writes; the log of the server is shown where it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, running.server.tail()
        time.sleep(0.05)


POST = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1] + "/generate", sys.argv[2].encode(), {"Content-Type": "application/json"})
urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).read()
"""


def test_planted_stalls_idle_time_and_a_fatal_location(serve, planted, capsys):
    both = {
        STALL_TRACER.flag: "1",
        f"{STALL_TRACER.flag}_LIMIT_MS": "400",
        ACCESS_LOCATOR.flag: "1",
    }
    # Sleeps up to a second at a time while idle: longer than the limit.
    with serve(
        "--disable-overlap-schedule", "--sleep-on-idle", **both, **planted("stalls location")
    ) as running:
        running.generate([5, 6, 7], new_tokens=3)
        stalls = lambda: read(running.state, stall_tracer.KIND)
        before = len(stalls())
        time.sleep(2.5)
        assert len(stalls()) == before, "an idle server does not stall"
        running.generate([8, 9, 10], [11, 12, 13], new_tokens=12)
        until(lambda: len([r for r in stalls() if r["ms"] > 1000]) >= 2, running)
        nap, compiled = [record for record in stalls() if record["ms"] > 1000][:2]
        assert (nap["phase"], nap["mode"], nap["jit"]) == ("run_batch", "DECODE", [])
        assert nap["requests"] == 2
        assert nap["innermost"].startswith("planted_topic:nap:")
        assert nap["frame"].startswith("sglang.srt.managers.tp_worker:")
        assert nap["cpu_ms"] < nap["ms"] / 2, "it slept"
        assert compiled["phase"] == "run_batch"
        assert "Triton: planted_kernel" in compiled["jit"]
        log = running.server.log.read_text()
        assert re.search(
            r"numinous: stall: iteration \d+ took \d+ ms.*mostly in run_batch \(DECODE of 2 requests\); sglang",
            log,
        )
        assert re.search(r"numinous: stall: .*JIT Triton: planted_kernel", log)
        assert running.totals(STALL_TRACER.id)["engaged"] >= 14
        assert all(record["mode"] for record in stalls()), "no stall without a batch"
        state = str(running.state)

        body = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
        prompt, ids = [[8, 9, 10], [11, 12, 13]], ["first", "second"]
        request = subprocess.Popen(
            [sys.executable, "-c", POST, running.server.url, json.dumps({"input_ids": prompt, "rid": ids, "sampling_params": body})]
        )  # fmt: skip
        try:
            until(lambda: read(running.state, access_locator.KIND), running)
        finally:
            request.kill()
            request.wait()
        until(lambda: "Scheduler hit an exception" in running.server.log.read_text(), running)
    assert diag(["stalls", "--state-dir", state]) == 1
    shown = capsys.readouterr().out
    assert "JIT Triton: planted_kernel" in shown
    assert "planted_topic:nap:" in shown

    (record,) = read(Path(state), access_locator.KIND)
    assert (record["operation"], record["layer"]) == ("out_cache_loc", None)
    assert (record["value"], record["bound"], record["mode"]) == (1_000_000, 8193, "DECODE")
    assert record["request"] == "second", "the last row of the batch"
    assert record["requests"] == ["first", "second"]
    assert diag(["access", "--state-dir", state]) == 1
    assert "out_cache_loc[1] = 1000000, legal are 0 to 8192" in capsys.readouterr().out


def test_overlap_schedule_silent_write_and_bytes(serve, planted, tiny_model, capsys):
    both = {
        STALL_TRACER.flag: "1",
        f"{STALL_TRACER.flag}_LIMIT_MS": "400",
        ACCESS_LOCATOR.flag: "1",
    }
    with serve("--max-total-tokens", "262144", **both, **planted("stalls write")) as running:
        running.generate([8, 9, 10], new_tokens=10, rid=["clean"])
        stalls = lambda: [r for r in read(running.state, stall_tracer.KIND) if r["ms"] > 1000]
        until(lambda: len(stalls()) >= 2, running)
        assert [record["phase"] for record in stalls()[:2]] == ["run_batch"] * 2
        assert "Triton: planted_kernel" in stalls()[1]["jit"]

        assert read(running.state, access_locator.KIND) == [], "nothing planted yet"
        assert diag(["access", "--state-dir", str(running.state)]) == 0
        assert "every checked index was in range" in capsys.readouterr().out
        tokens = running.generate([8, 9, 10], [11, 12, 13], new_tokens=6, rid=["third", "fourth"])
        assert [len(answer) for answer in tokens] == [6, 6], "no error: the engine did not notice"
        until(lambda: read(running.state, access_locator.KIND), running)
        (record,) = read(running.state, access_locator.KIND)
        assert (record["operation"], record["layer"], record["value"]) == ("kv_write", 1, -3)
        assert record["request"] in ("third", "fourth")
        assert running.totals(ACCESS_LOCATOR.id)["engaged"] >= 15
        assert "numinous: index out of range: kv_write[" in running.server.log.read_text()

        config, log = str(tiny_model), str(running.server.log)
        for source in (["--log", log], ["--url", running.server.url]):
            # What the host's memory does meanwhile is not the weights of a toy: judged apart from them.
            code = diag(["bytes", "--config", config, *source, "--json"])
            report = json.loads(capsys.readouterr().out)
            rows = {row["name"]: row for row in report["rows"]}
            assert rows["KV bytes per token"]["predicted"] == 512
            assert rows["KV pool, GiB"]["predicted"] == pytest.approx(0.125, rel=1e-4)
            assert rows["KV pool, GiB"]["holds"]
            assert rows["tokens of the pool"]["measured"] == 262144
            assert "KV rows fp32" in report["notes"][0]
            assert code == (0 if rows["weights, GiB"]["holds"] else 1)
        half = ["--kv-dtype", "bf16", "--json"]
        assert diag(["bytes", "--config", config, "--url", running.server.url, *half]) == 1
        rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
        assert rows["KV bytes per token"]["holds"] is False
