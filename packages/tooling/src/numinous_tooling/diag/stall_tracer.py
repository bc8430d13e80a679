# SPDX-License-Identifier: Apache-2.0
"""``diag.stall_tracer``: which iterations of the scheduler took longer than the limit, and why.

*Iteration* from one `Scheduler.ingest_requests` to the next. Its time is what it worked: time in `on_idle`, and time in
          `recv_requests` after an iteration that ran nothing (a rank that waits for a sleeping one), do not count. So an
          idle server has no stalls.
*Phases*  the calls that the event loops are made of, each with its own time; ``between`` is the rest. With the overlap
          schedule the time that the GPU needs for a batch is seen in `process_batch_result`, which waits for it.
*Frames*  a thread of its own sleeps until the iteration that runs has reached half the limit; only then does it look
          at the scheduler's frames, a few times per limit. It cannot look while the scheduler holds the interpreter
          lock inside C code (a garbage collection, for instance); time in the collector is therefore measured apart.
*Cost*    in the scheduler two clock reads a phase, about 20 an iteration, and no synchronisation with a device; in the
          thread two wake-ups per limit. A test bounds both. Records are written by the thread.
*Hangs*   an iteration that has lasted ten times the limit is reported while it still runs.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from numinous_tooling.diag.features import LIMIT, STALL_TRACER
from numinous_tooling.diag.frames import Sight, compiler_processes, look
from numinous_tooling.diag.records import MAX_RECORDS, RecordFile
from numinous_tooling.patching.counters import FeatureCounters, counters
from numinous_tooling.patching.flags import option_value

KIND = "stalls"
BETWEEN = "between"
IDLE = "on_idle"
RECEIVE = "recv_requests"
HANG = 10  # times the limit
LOOK_FROM = 0.5  # of the limit: what was compiled in the first half of a stall would else be gone
FIRST_PAUSE = 1 / 8  # of the limit, between the first looks; each further pause is longer
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 1.0
MAX_SIGHTS = 1000
MAX_WAITING = 1000  # stalls that the thread has not written yet; the oldest go first

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Iteration:
    """One turn of the event loop, in nanoseconds of the monotonic clock.

    Args:
        number: counted from 1.
        started: when.
        after_idle: the iteration before it ran no batch.
        phases: time in each phase so far, the current one not included.
        cpu_started: CPU time of the scheduler thread at the start.
        collector: time in the garbage collector.
        mode, requests, tokens: of the batch that ran or whose result was processed last; tokens of a prefill.
    """

    number: int
    started: int
    after_idle: bool
    cpu_started: int
    phases: dict[str, int] = field(default_factory=dict)
    collector: int = 0
    mode: Any = None
    requests: int = 0
    tokens: int = 0
    ran: bool = False

    def worked(self, phase: str, since: int, now: int) -> int:
        """Time that counts, if the current `phase` began at `since`."""
        idle = self.phases.get(IDLE, 0) + (now - since if phase == IDLE else 0)
        if self.after_idle:
            idle += self.phases.get(RECEIVE, 0) + (now - since if phase == RECEIVE else 0)
        return now - self.started - idle


@dataclass
class Stall:
    """An iteration beyond the limit, handed from the scheduler to the thread that writes."""

    iteration: Iteration
    worked: int
    cpu: int | None
    ended: bool


class StallTracer:
    """Times the iterations of one scheduler thread.

    Args:
        limit_ns: an iteration that worked longer is a stall.
        count: engaged counts iterations that ran a batch.
        clock, cpu_clock: nanoseconds; replaced in tests.
    """

    def __init__(
        self,
        limit_ns: int,
        count: FeatureCounters,
        clock: Callable[[], int] = time.monotonic_ns,
        cpu_clock: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self.limit = limit_ns
        self.count = count
        self.clock, self.cpu_clock = clock, cpu_clock
        self.thread = threading.get_ident()
        self.stalls: deque[Stall] = deque(maxlen=MAX_WAITING)
        self.phase, self.since = BETWEEN, clock()
        self.iteration = Iteration(0, self.since, True, cpu_clock())
        self._collecting = 0

    def next_iteration(self) -> None:
        """The scheduler begins a new turn: judge the one that ends."""
        now, cpu = self.clock(), self.cpu_clock()
        ended = self.iteration
        ended.phases[self.phase] = ended.phases.get(self.phase, 0) + now - self.since
        self.since = now
        worked = ended.worked(self.phase, now, now)
        if ended.ran:
            self.count.engaged()
        if worked > self.limit and ended.number:
            self.stalls.append(Stall(ended, worked, cpu - ended.cpu_started, True))
        self.iteration = Iteration(ended.number + 1, now, not ended.ran, cpu)

    def enter(self, phase: str) -> str:
        """The scheduler goes into a phase; returns the one it comes from, to be entered again afterwards."""
        now = self.clock()
        before, phases = self.phase, self.iteration.phases
        phases[before] = phases.get(before, 0) + now - self.since
        self.since, self.phase = now, phase
        return before

    def holds(self, batch: Any) -> None:
        """Note the batch of this iteration: what it launches, then what it waits for."""
        iteration = self.iteration
        iteration.mode, iteration.requests = batch.forward_mode, len(batch.reqs)
        iteration.tokens = batch.extend_num_tokens or 0
        iteration.ran = True

    def collector(self, phase: str, info: dict[str, int]) -> None:
        """Callback of the garbage collector; it holds the interpreter lock in whichever thread it runs."""
        if phase == "start":
            self._collecting = self.clock()
        elif self._collecting:
            self.iteration.collector += self.clock() - self._collecting
            self._collecting = 0

    def lasts(self) -> int:
        """Nanoseconds that the iteration which runs has worked so far; read by the other thread."""
        iteration, phase, since = self.iteration, self.phase, self.since
        return iteration.worked(phase, since, self.clock())


class Watchdog:
    """The thread beside a tracer: looks at frames beyond the limit, writes records and log lines.

    Args:
        tracer: of the scheduler thread.
        file: of the records.
        ranks: added to each record.
    """

    def __init__(self, tracer: StallTracer, file: RecordFile, ranks: dict[str, int]) -> None:
        self.tracer, self.file, self.ranks = tracer, file, ranks
        self.sights: list[Sight] = []
        self.seen_iteration = -1
        self.processes: set[str] = set()
        self._unwritten = False
        self._hung = -1
        self._lock = threading.Lock()  # `flush` at exit may meet a round

    def start(self) -> None:
        """Run beside the scheduler until the process ends."""
        thread = threading.Thread(target=self._run, name="numinous-stalls", daemon=True)
        thread.start()
        atexit.register(self.flush)

    def _run(self) -> None:
        try:
            while True:
                time.sleep(self.round())
        except Exception:  # the server goes on; it only loses its tracer
            logger.exception("numinous: the stall tracer ended, no more stalls are recorded")

    def round(self) -> float:
        """One look; returns the seconds to sleep until the next one."""
        with self._lock:
            tracer = self.tracer
            self._write_ended()
            iteration = tracer.iteration
            lasts = tracer.lasts()
            if lasts < LOOK_FROM * tracer.limit:
                return max((LOOK_FROM * tracer.limit - lasts) / 1e9, SHORTEST_PAUSE_S / 5)
            frame = sys._current_frames().get(tracer.thread)
            sight = None if frame is None else look(frame, skip=__name__)
            del frame
            processes = compiler_processes()
            if tracer.iteration is not iteration:
                return 0.0  # it ended meanwhile: the frame is of the next one
            if iteration.number != self.seen_iteration:
                self.seen_iteration, self.sights, self.processes = iteration.number, [], set()
            if sight is not None and len(self.sights) < MAX_SIGHTS:
                self.sights.append(sight)
            self.processes.update(processes)
            if lasts > HANG * tracer.limit and self._hung != iteration.number:
                self._hung = iteration.number
                self._write(Stall(iteration, lasts, None, False))
            pause = FIRST_PAUSE * tracer.limit / 1e9 * 1.2 ** min(len(self.sights), 50)
            return min(max(pause, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)

    def flush(self) -> None:
        """Write what has ended; called once more when the process ends."""
        with self._lock:
            self._write_ended()

    def _write_ended(self) -> None:
        while self.tracer.stalls:
            self._write(self.tracer.stalls.popleft())

    def _write(self, stall: Stall) -> None:
        seen = stall.iteration.number == self.seen_iteration
        record = record_of(
            stall, self.sights if seen else [], self.processes if seen else set(), self.tracer
        )
        record |= self.ranks
        try:
            kept = self.file.append(record)
        except OSError as error:  # a full disk ends the records, not the log
            kept = True
            self.tracer.count.refused("record_error")
            if not self._unwritten:
                self._unwritten = True
                logger.warning(
                    "numinous: %s: %s; stalls are only logged", self.file.path, error.strerror
                )
        if kept:
            logger.warning("numinous: %s", line_of(record))
        else:
            self.tracer.count.refused("record_limit")
            if self.file.written == MAX_RECORDS:
                self.file.written += 1
                logger.warning("numinous: %d stalls recorded, no more are", MAX_RECORDS)


def record_of(
    stall: Stall, sights: list[Sight], processes: set[str], tracer: StallTracer
) -> dict[str, Any]:
    """A stall as it is written; times in milliseconds."""
    iteration = stall.iteration
    phases = dict(iteration.phases)
    if not stall.ended:
        phases[tracer.phase] = phases.get(tracer.phase, 0) + tracer.clock() - tracer.since
    counted = {
        name: spent
        for name, spent in phases.items()
        if name != IDLE and not (name == RECEIVE and iteration.after_idle)
    }
    frames = Counter(sight.engine or sight.innermost for sight in sights)
    inner = Counter(sight.innermost for sight in sights)
    jit = list(dict.fromkeys(text for sight in sights for text in sight.jit))
    if processes:
        jit.append("processes: " + ", ".join(sorted(processes)))
    return {
        "utc": time.time(),
        "pid": os.getpid(),
        "iteration": iteration.number,
        "ms": round(stall.worked / 1e6, 3),
        "ended": stall.ended,
        "phase": max(counted, key=lambda name: counted[name]) if counted else BETWEEN,
        "phases_ms": {name: round(spent / 1e6, 3) for name, spent in phases.items()},
        "cpu_ms": None if stall.cpu is None else round(stall.cpu / 1e6, 3),
        "collector_ms": round(iteration.collector / 1e6, 3),
        "mode": getattr(iteration.mode, "name", None),
        "requests": iteration.requests,
        # A decode batch still carries the number of its last prefill.
        "tokens": iteration.tokens if iteration.mode and iteration.mode.is_extend() else 0,
        "samples": len(sights),
        "frame": frames.most_common(1)[0][0] if frames else None,
        "innermost": inner.most_common(1)[0][0] if inner else None,
        "jit": jit,
    }


def cause_of(record: dict[str, Any]) -> str:
    """Why, in a few words: what was compiled, else the collector, else the frame."""
    if record["jit"]:
        return "JIT " + "; ".join(record["jit"])
    if record["collector_ms"] > record["ms"] / 2:
        return f"garbage collection, {record['collector_ms']:.0f} ms"
    if record["frame"] is None:
        return "no frame: it ended, or held the interpreter lock, before one was read"
    inner = "" if record["innermost"] == record["frame"] else f", in {record['innermost']}"
    return f"{record['frame']}{inner}"


def line_of(record: dict[str, Any]) -> str:
    """One line for the log."""
    cpu = "" if record["cpu_ms"] is None else f", {record['cpu_ms']:.0f} ms of it on the CPU"
    what = "no batch"
    if record["mode"]:
        tokens = f", {record['tokens']} tokens" if record["tokens"] else ""
        what = f"{record['mode']} of {record['requests']} requests{tokens}"
    end = "" if record["ended"] else " and still runs"
    return (
        f"stall: iteration {record['iteration']} took {record['ms']:.0f} ms{end}{cpu}; "
        f"mostly in {record['phase']} ({what}); {cause_of(record)}"
    )


# Hooks. A process runs one scheduler, in one thread. ---------------------------------------------------------------

_tracer: StallTracer | None = None


def before_ingest_requests(scheduler: Any) -> None:
    """Every turn of an event loop begins with this call."""
    global _tracer
    if _tracer is None:
        _tracer = _start(scheduler)
    _tracer.next_iteration()


def _start(scheduler: Any) -> StallTracer:
    tracer = StallTracer(int(option_value(LIMIT) * 1e6), counters(STALL_TRACER.id))
    ps = scheduler.ps
    ranks = {name: value for name in ("tp_rank", "dp_rank") if (value := getattr(ps, name, None))}
    gc.callbacks.append(tracer.collector)
    Watchdog(tracer, RecordFile(KIND), ranks).start()
    return tracer


def _phase(name: str) -> Callable[..., Any]:
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tracer = _tracer
        if tracer is None:  # warm-up before the first turn
            return original(*args, **kwargs)
        before = tracer.enter(name)
        try:
            return original(*args, **kwargs)
        finally:
            tracer.enter(before)

    return around


around_recv_requests = _phase(RECEIVE)
around_process_input_requests = _phase("process_input_requests")
around_get_next_batch_to_run = _phase("get_next_batch_to_run")
around_launch_batch_sample_if_needed = _phase("launch_batch_sample_if_needed")
around_on_idle = _phase(IDLE)
_around_run_batch = _phase("run_batch")
_around_process_batch_result = _phase("process_batch_result")


def around_run_batch(
    original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """A phase that also says what runs."""
    if _tracer is not None:
        _tracer.holds(batch)
    return _around_run_batch(original, scheduler, batch, *args, **kwargs)


def around_process_batch_result(
    original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """A phase that also says whose result it waits for."""
    if _tracer is not None:
        _tracer.holds(batch)
    return _around_process_batch_result(original, scheduler, batch, *args, **kwargs)
