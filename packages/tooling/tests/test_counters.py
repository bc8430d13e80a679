# SPDX-License-Identifier: Apache-2.0
"""Counters: totals across processes, torn reads, bounds, cost."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

import pytest

from numinous_tooling.patching import counters
from numinous_tooling.patching.errors import PatchError


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMINOUS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(counters, "_table", counters.Table())


def test_counts_before_and_after_publish_are_one_number(tmp_path):
    mine = counters.counters("scheduler.x")
    mine.engaged(2)
    mine.refused("too long")
    counters.publish({"role": "scheduler", "run": "r1", "features": ["scheduler.x"]})
    mine.engaged()
    assert counters.read_totals(run="r1") == {"scheduler.x": {"engaged": 3, "refused:too long": 1}}
    assert counters.read_totals(run="other") == {}
    (process,) = counters.read_processes()
    assert process.alive
    assert process.role == "scheduler"
    assert process.pid == os.getpid()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def _child(number: int) -> None:
    counters.publish({"role": f"scheduler{number}", "run": "r", "features": []})
    for _ in range(1000):
        counters.counters("kv4.y").engaged()


def test_processes_are_summed_and_dead_ones_are_seen_as_dead():
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=_child, args=(n,)) for n in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert counters.read_totals() == {"kv4.y": {"engaged": 2000}}
    assert [p.alive for p in counters.read_processes()] == [False, False]
    assert counters.forget_dead(older_than_s=3600) == 0
    assert counters.forget_dead(older_than_s=-1) == 2
    assert list(counters.read_processes()) == []


def test_threads_lose_no_count():
    counters.publish({"role": "main", "run": "r", "features": []})
    threads = [
        threading.Thread(target=lambda: [counters.counters("a.b").engaged() for _ in range(5000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.read_totals()["a.b"]["engaged"] == 20000


def test_reasons_are_bounded():
    table = counters.Table()
    for number in range(200):
        table.add("a.b", f"refused:reason {number}")
    totals = table.totals()["a.b"]
    assert len(totals) == counters.MAX_REASONS + 1
    assert totals[counters.OTHER] == 200 - counters.MAX_REASONS


def test_reader_sees_whole_names_while_the_writer_adds(tmp_path):
    table = counters.Table(tmp_path / "t.counters")
    stop = threading.Event()

    def write() -> None:
        for number in range(900):
            table.add(f"feature.number_{number:04d}", "engaged")
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not stop.is_set():
        for name in counters._parse((tmp_path / "t.counters").read_bytes()):
            assert len(name) == len("feature.number_0000")
    writer.join()
    assert len(counters._parse((tmp_path / "t.counters").read_bytes())) == 900


def test_a_count_costs_little():
    counters.publish({"role": "main", "run": "r", "features": []})
    mine = counters.counters("a.b")
    mine.engaged()
    begin = time.perf_counter()
    for _ in range(100_000):
        mine.engaged()
    per_call_us = (time.perf_counter() - begin) / 100_000 * 1e6
    assert per_call_us < 10, (
        f"{per_call_us:.2f} us per count"
    )  # far above an idle core's time: the bound is for a busy box


def test_a_state_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "theirs"
    folder.mkdir()
    monkeypatch.setenv("NUMINOUS_STATE_DIR", str(folder))
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(PatchError, match="belongs to uid"):
        counters.make_state_dir()


def test_garbage_in_the_state_folder_is_skipped(tmp_path):
    counters.publish({"role": "main", "run": "r", "features": []})
    (tmp_path / "state" / "1-2.json").write_text("{ not json")
    (tmp_path / "state" / "1-3.json").write_text('{"pid": 1, "start": 3}')
    assert [p.role for p in counters.read_processes()] == ["main"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_counts_for_itself():
    counters.publish({"role": "main", "run": "r", "features": []})
    counters.counters("a.b").engaged()
    pid = os.fork()
    if pid == 0:
        counters.counters("a.b").engaged(10)
        os._exit(0 if counters.table().totals() == {"a.b": {"engaged": 10}} else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert counters.read_totals() == {"a.b": {"engaged": 1}}


def test_an_unusable_state_folder_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMINOUS_STATE_DIR", str(tmp_path / "file"))
    with pytest.raises(PatchError, match="set NUMINOUS_STATE_DIR"):
        counters.publish({"role": "main", "run": "r", "features": []})


def test_records_and_names_of_somebody_else(tmp_path):
    counters.publish({"role": "main", "run": "r", "features": []})
    for name, text in (("a", "[]"), ("b", "{}"), ("c", '{"pid": 1, "start": 2, "utc": 1.0}')):
        (tmp_path / "state" / f"{name}.json").write_text(text)
        (tmp_path / "state" / f"{name}.counters").write_bytes(b"\xff" * counters.SIZE)
    assert [p.role for p in counters.read_processes()] == ["main"]
    assert counters.forget_dead(older_than_s=-1) == 0
    counters._parse(b"\xff" * counters.SIZE)


def test_the_overflow_reason_may_be_the_first_name():
    table = counters.Table()
    table.add("a.b", counters.OTHER)
    for number in range(counters.MAX_REASONS + 5):
        table.add("a.b", f"refused:{number}")
    assert table.totals()["a.b"][counters.OTHER] == 6
