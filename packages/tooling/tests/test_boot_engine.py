# SPDX-License-Identifier: Apache-2.0
"""Boot in the processes of the real engine: the failure rule, foreign plugins, and processes that load no plugins.

Two distributions are made for the tests and put on the path: a topic package whose feature needs the data-parallel
controller, and a foreign plugin that gets in the way of `scheduler.decode_burst`.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.engine

FLAG = "NUMINOUS_SCHEDULER_DECODE_BURST"
STEPS = ("--num-continuous-decode-steps", "4")

TOPIC = """
from numinous_tooling.patching import Feature, Hook, Pin
from numinous_tooling.patching.counters import counters
from numinous_tooling.patching.engine import find_engine
from numinous_tooling.patching.pins import digest_in

SEEN = {
    "dp_controller": "sglang.srt.managers.data_parallel_controller:DataParallelController.dispatching_with_trace",
    "detokenizer": "sglang.srt.managers.detokenizer_manager:DetokenizerManager.handle_batch_token_id_out",
    "scheduler": "sglang.srt.managers.scheduler:Scheduler.process_batch_result",
}


def around(original, *args, **kwargs):
    counters("parallel.seen").engaged()
    return original(*args, **kwargs)


def features():
    tree = find_engine()
    hooks = tuple(
        Hook(id=f"parallel.seen.{role}", target=target, kind="around", call="numinous_test_topic:around",
             pins=(Pin(target, {"now": digest_in(tree, target)}),), roles=(role,))
        for role, target in SEEN.items()
    )
    return (Feature(id="parallel.seen", sentence="Counts.", arch={}, patches=hooks),)
"""

FOREIGN = '''
import functools


def wrap():
    """Wraps with functools, as many a plugin does: inspect.getsource still shows stock."""
    from sglang.srt.managers.scheduler import Scheduler

    original = Scheduler._should_defer_prefill
    Scheduler._should_defer_prefill = functools.wraps(original)(lambda self: original(self))


def replace():
    """Uses the engine's registry, which applies it after numinous has booted."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.scheduler.Scheduler._should_defer_prefill"
    HookRegistry.register(target, lambda self: False, HookType.REPLACE)
'''


def distribution(folder: Path, name: str, module: str, source: str, group: str, entry: str) -> str:
    """An importable distribution with one entry point; returns its folder, for PYTHONPATH."""
    folder.mkdir(parents=True)
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    return str(folder)


def path_with(folder: str) -> str:
    return os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))


def log_of_failed_start(serve, *flags: str, **environ: str) -> str:
    """Start a server that must end by itself; its log."""
    with serve(*flags, wait=False, **environ) as running:
        popen = running.server._tree.popen
        deadline = time.monotonic() + 240
        while popen.poll() is None:
            assert time.monotonic() < deadline, running.server.tail()
            time.sleep(0.2)
        assert popen.returncode != 0
        log: str = running.server.log.read_text()
    return log


def test_refused_launches_end_in_one_line_before_anything_is_spawned(serve):
    log = log_of_failed_start(serve, *STEPS, "--dp-size", "2", **{FLAG: "1"})
    (line,) = re.findall(r"^numinous: .*$", log, re.MULTILINE)
    assert "scheduler.decode_burst: data parallelism" in line
    assert "scheduler:" not in log.replace("scheduler.", ""), "no scheduler was started"


def test_misspelt_flag_ends_the_start(serve):
    log = log_of_failed_start(serve, *STEPS, NUMINOUS_SCHEDULER_DECODE_BRUST="1")
    (line,) = re.findall(r"^numinous: .*$", log, re.MULTILINE)
    assert f"did you mean {FLAG}?" in line


@pytest.mark.parametrize(
    ("entry", "text"),
    [("wrap", "already wrapped by"), ("replace", "another plugin replaces")],
)
def test_foreign_plugin_on_the_same_function(serve, tmp_path, entry, text):
    # The name sorts before and after ours depends on the path: put first, it runs first.
    folder = distribution(
        tmp_path / "foreign",
        "aaa-foreign",
        "aaa_foreign",
        FOREIGN,
        "sglang.srt.plugins",
        f"aaa = aaa_foreign:{entry}",
    )
    log = log_of_failed_start(serve, *STEPS, PYTHONPATH=path_with(folder), **{FLAG: "1"})
    assert text in log
    assert re.search(r"^numinous: .*_should_defer_prefill", log, re.MULTILINE)


def test_not_strict_serves_stock_and_says_so(serve):
    environ = {FLAG: "1", "NUMINOUS_STRICT": "0"}
    with serve("--num-continuous-decode-steps", "1", **environ) as running:
        assert len(running.generate([5, 6, 7], new_tokens=3)[0]) == 3
        log = running.server.log.read_text()
        assert "WARNING: serving stock instead: scheduler.decode_burst: " in log
        assert "N >= 2" in log
        assert all(process.record["features"] == [] for process in running.processes())


def test_processes_that_load_no_plugins_are_covered(serve, tmp_path):
    """Two data-parallel replicas: main, controller, two schedulers, detokenizer; each proves what it needs."""
    folder = distribution(
        tmp_path / "topic", "numinous-test-topic", "numinous_test_topic", TOPIC, "numinous.features",
        "test = numinous_test_topic:features",
    )  # fmt: skip
    environ = {
        "NUMINOUS_PARALLEL_SEEN": "1",
        "PYTHONPATH": path_with(folder),
        "SGLANG_CPU_OMP_THREADS_BIND": f"0|{(os.cpu_count() or 1) - 1}",
    }
    with serve("--dp-size", "2", "--enable-metrics", **environ) as running:
        for number in range(4):
            assert len(running.generate([5, 6, 7 + number], new_tokens=4)[0]) == 4
        by_role: dict[str, list[dict[str, int]]] = {}
        for process in running.processes():
            by_role.setdefault(process.role, []).append(process.totals.get("parallel.seen", {}))
        assert sorted(by_role) == ["detokenizer", "dp_controller", "main", "scheduler"]
        assert len(by_role["scheduler"]) == 2
        assert by_role["dp_controller"][0]["engaged"] >= 4, (
            "every request went through the controller's hook"
        )
        assert all(counts["engaged"] > 0 for counts in by_role["scheduler"])
        metrics = httpx.get(f"{running.server.url}/metrics", trust_env=False, timeout=30).text
        assert (
            'numinous_feature_in_place{feature="parallel.seen",role="dp_controller"} 1.0' in metrics
        )
        assert 'numinous_feature_in_place{feature="parallel.seen",role="scheduler"} 2.0' in metrics
        assert 'numinous_feature_calls_total{feature="parallel.seen",outcome="engaged"}' in metrics
