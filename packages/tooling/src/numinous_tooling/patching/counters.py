# SPDX-License-Identifier: Apache-2.0
"""Engaged / refused(reason) counters per feature: cheap in a decode step, readable from outside the process.

*Layout*  one file per process, ``<state dir>/<pid>-<start ticks>.counters``, 64 KiB, memory-mapped:
          8 bytes little-endian length L · L bytes of names, one ``feature<TAB>counter`` per line · … ·
          from 32 KiB on one int64 per name, in the same order. Names are only appended, and L is written last, so a
          reader in another process never sees a torn name. Values are aligned 8-byte stores.
*Cost*    one lock and one store; a test bounds it.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import PatchError

SIZE = 64 * 1024
VALUES = 32 * 1024
MAX_NAMES = (SIZE - VALUES) // 8
MAX_REASONS = 64  # per feature; a reason is a category, never a value
OTHER = "refused:other"

_LENGTH = struct.Struct("<Q")


def state_dir() -> Path:
    """``NUMINOUS_STATE_DIR``, or a private folder of this user below the temporary folder."""
    chosen = os.environ.get("NUMINOUS_STATE_DIR")
    return Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"numinous-{os.getuid()}"


def make_state_dir() -> Path:
    """Create `state_dir` with mode 0700; raises PatchError if it belongs to somebody else or cannot be made."""
    path = state_dir()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.stat().st_uid
    except OSError as error:
        raise PatchError(
            f"state folder {path}: {error.strerror}; set NUMINOUS_STATE_DIR"
        ) from error
    if owner != os.getuid():
        raise PatchError(
            f"state folder {path} belongs to uid {owner}; set NUMINOUS_STATE_DIR to one of your own"
        )
    return path


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot, or 0 if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


def process_stem() -> str:
    """File stem of this process: pid and start time, so that a reused pid is not mistaken for it."""
    return f"{os.getpid()}-{process_start(os.getpid())}"


class Table:
    """Named int64 counters of one process, in memory or in a mapped file."""

    def __init__(self, path: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._index: dict[tuple[str, str], int] = {}
        self._reasons: dict[str, int] = defaultdict(int)
        self._names = b""
        if path is None:
            self._buffer: mmap.mmap | bytearray = bytearray(SIZE)
        else:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.ftruncate(descriptor, SIZE)
                self._buffer = mmap.mmap(descriptor, SIZE)
            finally:
                os.close(descriptor)
        self._values = memoryview(self._buffer)[VALUES:].cast("q")

    def add(self, feature: str, counter: str, n: int = 1) -> None:
        """Add `n` to a counter, creating it at first use."""
        with self._lock:
            index = self._index.get((feature, counter))
            if index is None:
                index = self._create(feature, counter)
            self._values[index] += n

    def _create(self, feature: str, counter: str) -> int:
        if counter.startswith("refused:") and counter != OTHER:
            self._reasons[feature] += 1
            if self._reasons[feature] > MAX_REASONS:
                known = self._index.get((feature, OTHER))
                return self._create(feature, OTHER) if known is None else known
        line = f"{feature}\t{counter}\n".encode()
        index = len(self._index)
        end = _LENGTH.size + len(self._names) + len(line)
        if index >= MAX_NAMES or end > VALUES:
            raise RuntimeError(f"counter table full at {feature} {counter}")
        self._buffer[end - len(line) : end] = line
        self._names += line
        self._buffer[: _LENGTH.size] = _LENGTH.pack(len(self._names))
        self._index[feature, counter] = index
        return index

    def totals(self) -> dict[str, dict[str, int]]:
        """feature -> counter -> value."""
        return _parse(bytes(self._buffer))


def _parse(content: bytes) -> dict[str, dict[str, int]]:
    totals: dict[str, dict[str, int]] = {}
    if len(content) != SIZE:
        return totals
    (length,) = _LENGTH.unpack_from(content)
    block = content[_LENGTH.size : min(_LENGTH.size + length, VALUES)]
    names = block.decode(errors="replace").splitlines()[:MAX_NAMES]
    values = struct.unpack_from(f"<{len(names)}q", content, VALUES)
    for name, value in zip(names, values, strict=True):
        feature, _, counter = name.partition("\t")
        totals.setdefault(feature, {})[counter] = value
    return totals


class FeatureCounters:
    """What a hook holds: counts for one feature, in whichever table the process has at that moment."""

    __slots__ = ("_feature",)

    def __init__(self, feature: str) -> None:
        self._feature = feature

    def engaged(self, n: int = 1) -> None:
        """The feature did its work `n` times."""
        _table.add(self._feature, "engaged", n)

    def refused(self, reason: str, n: int = 1) -> None:
        """The feature stood aside; `reason` is a short category (at most 64 distinct ones per feature)."""
        _table.add(self._feature, "refused:" + reason, n)


_table = Table()


def _count_apart() -> None:
    """A forked child counts for itself: the mapped file is its parent's, and shares no lock with it."""
    global _table
    _table = Table()


os.register_at_fork(after_in_child=_count_apart)


def counters(feature_id: str) -> FeatureCounters:
    """The counters of a feature in this process."""
    return FeatureCounters(feature_id)


def table() -> Table:
    """The table of this process."""
    return _table


def publish(record: dict[str, Any]) -> Path:
    """Make this process visible: map its counters to a file and write its record beside it.

    Args:
        record: role, run id, engine version, features in place; pid, start and time are added.

    Returns:
        Path of the record, ``<state dir>/<pid>-<start>.json``.
    """
    folder = make_state_dir()
    path = folder / f"{process_stem()}.json"
    try:
        _publish(path, record)
    except OSError as error:
        raise PatchError(
            f"state folder {folder}: {error.strerror}; set NUMINOUS_STATE_DIR"
        ) from error
    return path


def _publish(path: Path, record: dict[str, Any]) -> None:
    global _table
    counters_path = path.with_suffix(".counters")
    counters_path.unlink(missing_ok=True)
    mapped = Table(counters_path)
    for feature, values in _table.totals().items():
        for counter, value in values.items():
            mapped.add(feature, counter, value)
    _table = mapped
    start = process_start(os.getpid())
    content = {"pid": os.getpid(), "start": start, "utc": time.time(), **record}
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


@dataclass(frozen=True)
class ProcessState:
    """One engine process as seen from outside."""

    pid: int
    alive: bool
    role: str
    run: str
    record: dict[str, Any]
    totals: dict[str, dict[str, int]] = field(default_factory=dict)


def read_processes(folder: Path | None = None) -> Iterator[ProcessState]:
    """Every process that published itself below `folder` (default: `state_dir`), dead ones included."""
    folder = state_dir() if folder is None else folder
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text())
            content = path.with_suffix(".counters").read_bytes()
        except (OSError, ValueError):
            continue  # being written or removed right now
        if not _is_record(record):
            continue  # not ours
        start = process_start(record["pid"])
        yield ProcessState(
            pid=record["pid"],
            alive=start == record["start"] != 0,
            role=record["role"],
            run=record["run"],
            record=record,
            totals=_parse(content),
        )


def _is_record(record: object) -> bool:
    kinds = {"pid": int, "start": int, "utc": float, "role": str, "run": str, "features": list}
    return isinstance(record, dict) and all(isinstance(record.get(k), v) for k, v in kinds.items())


def summed(processes: Iterable[ProcessState]) -> dict[str, dict[str, int]]:
    """feature -> counter -> sum over these processes."""
    totals: dict[str, dict[str, int]] = {}
    for process in processes:
        for feature, values in process.totals.items():
            mine = totals.setdefault(feature, {})
            for counter, value in values.items():
                mine[counter] = mine.get(counter, 0) + value
    return totals


def read_totals(folder: Path | None = None, run: str | None = None) -> dict[str, dict[str, int]]:
    """feature -> counter -> sum over processes (all in the folder, or those of one run)."""
    return summed(p for p in read_processes(folder) if run is None or p.run == run)


def forget_dead(folder: Path | None = None, older_than_s: float = 24 * 3600) -> int:
    """Remove files of processes that ended more than `older_than_s` seconds ago; returns how many."""
    folder = state_dir() if folder is None else folder
    removed = 0
    for process in list(read_processes(folder)):
        if not process.alive and time.time() - process.record["utc"] > older_than_s:
            stem = f"{process.pid}-{process.record['start']}"
            for path in folder.glob(f"{stem}.*"):  # .json, .counters, records of diagnostics
                path.unlink(missing_ok=True)
            removed += 1
    return removed
