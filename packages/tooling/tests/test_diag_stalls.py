# SPDX-License-Identifier: Apache-2.0
"""The rule of `diag.stall_tracer` on a clock of the test: what counts, where it was, what compiled, what it costs."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from numinous_tooling.diag import frames, stall_tracer
from numinous_tooling.diag.command import diag
from numinous_tooling.diag.features import STALL_TRACER, judge_stall_tracer
from numinous_tooling.diag.records import RecordFile, read
from numinous_tooling.diag.stall_tracer import StallTracer, Watchdog, cause_of, line_of
from numinous_tooling.patching import counters, hooks
from numinous_tooling.patching.serve_command import ServeCommand

MS = 1_000_000
LIMIT = 100 * MS
DECODE = SimpleNamespace(name="DECODE", is_extend=lambda: False)
EXTEND = SimpleNamespace(name="EXTEND", is_extend=lambda: True)


class Clock:
    """Nanoseconds that pass only when the test says so."""

    def __init__(self) -> None:
        self.now = 1_000_000 * MS

    def __call__(self) -> int:
        return self.now

    def take(self, milliseconds: float) -> None:
        self.now += int(milliseconds * MS)


def batch(requests: int = 3, tokens: int = 0, mode: SimpleNamespace = DECODE) -> SimpleNamespace:
    return SimpleNamespace(forward_mode=mode, reqs=[None] * requests, extend_num_tokens=tokens)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tracer(clock, monkeypatch, tmp_path) -> StallTracer:
    """A tracer that the hooks use, with counters and state folder of its own."""
    monkeypatch.setenv("NUMINOUS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(counters, "_table", counters.Table())
    made = StallTracer(LIMIT, counters.counters(STALL_TRACER.id), clock, lambda: clock.now // 10)
    monkeypatch.setattr(stall_tracer, "_tracer", made)
    made.next_iteration()
    return made


def turn(clock, overlap=False, **took: float) -> None:
    """One turn of an event loop; `took` says how many milliseconds each call takes. No ``run_batch``: it idles."""

    def call(name: str, *arguments: object) -> None:
        around = getattr(stall_tracer, f"around_{name}")
        around(lambda *a: clock.take(took.get(name, 1)), *arguments)

    stall_tracer.before_ingest_requests(None)
    call("recv_requests")
    call("process_input_requests")
    clock.take(took.get("between", 0))
    call("get_next_batch_to_run")
    if "run_batch" in took:
        call("run_batch", None, batch())
        if overlap:
            call("launch_batch_sample_if_needed")
        call("process_batch_result", None, batch(), None)
    else:
        call("on_idle")


def found(tracer) -> list[dict]:
    stall_tracer.before_ingest_requests(None)
    return [stall_tracer.record_of(stall, [], set(), tracer) for stall in tracer.stalls]


def test_fast_iterations_are_no_stalls(tracer, clock):
    for _ in range(50):
        turn(clock, run_batch=90)
    assert found(tracer) == []
    assert counters.table().totals()[STALL_TRACER.id] == {"engaged": 50}


@pytest.mark.parametrize(
    "phase",
    [
        "run_batch",
        "process_batch_result",
        "get_next_batch_to_run",
        "process_input_requests",
        "launch_batch_sample_if_needed",
        "between",
    ],
)
def test_a_slow_phase_is_named(tracer, clock, phase):
    turn(clock, run_batch=5)
    turn(clock, overlap=True, **({"run_batch": 5} | {phase: 250}))
    turn(clock, run_batch=5)
    (record,) = found(tracer)
    assert record["phase"] == phase
    assert record["phases_ms"][phase] == 250
    assert record["iteration"] == 3
    assert 250 < record["ms"] < 265
    assert record["cpu_ms"] == pytest.approx(record["ms"] / 10, rel=0.01)
    assert (record["mode"], record["requests"], record["ended"]) == ("DECODE", 3, True)


def test_a_decode_batch_has_no_tokens_of_a_prefill(tracer, clock):
    stall_tracer.around_run_batch(lambda *a: clock.take(500), None, batch(tokens=9))
    assert found(tracer)[0]["tokens"] == 0


def test_an_idle_server_does_not_stall(tracer, clock):
    for _ in range(5):
        turn(clock, on_idle=5000)
    # A rank that waits in the broadcast for one that sleeps in its own on_idle.
    for _ in range(5):
        turn(clock, recv_requests=5000)
    assert found(tracer) == []
    assert STALL_TRACER.id not in counters.table().totals()


def test_waiting_for_requests_beside_running_ones_is_a_stall(tracer, clock):
    turn(clock, run_batch=5)
    turn(clock, run_batch=5, recv_requests=500)
    (record,) = found(tracer)
    assert record["phase"] == "recv_requests"


def test_work_after_idle_counts_without_the_wait(tracer, clock):
    turn(clock)
    turn(clock, recv_requests=5000, run_batch=120)
    (record,) = found(tracer)
    assert record["phase"] == "run_batch"
    assert 120 < record["ms"] < 130


def test_a_phase_inside_another_keeps_its_own_time(tracer, clock):
    def outer(*_arguments: object) -> None:
        clock.take(10)
        stall_tracer.around_process_batch_result(lambda *a: clock.take(200), None, batch(), None)
        clock.take(20)

    stall_tracer.around_run_batch(outer, None, batch())
    (record,) = found(tracer)
    assert record["phases_ms"]["run_batch"] == 30
    assert record["phases_ms"]["process_batch_result"] == 200


def test_an_exception_leaves_the_phase(tracer):
    def fails(*_arguments: object) -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        stall_tracer.around_run_batch(fails, None, batch())
    assert tracer.phase == stall_tracer.BETWEEN


def test_hooks_before_the_first_turn_are_stock(monkeypatch):
    monkeypatch.setattr(stall_tracer, "_tracer", None)
    assert stall_tracer.around_run_batch(lambda scheduler, b: "stock", None, batch()) == "stock"


def test_the_garbage_collector_is_named(tracer, clock):
    turn(clock, run_batch=5)
    stall_tracer.before_ingest_requests(None)
    gc.callbacks.append(lambda phase, info: clock.take(300) if phase == "stop" else None)
    gc.callbacks.append(tracer.collector)
    try:
        gc.collect()
    finally:
        del gc.callbacks[-2:]
    tracer.holds(batch())
    (record,) = found(tracer)
    assert record["collector_ms"] == 300
    assert "garbage collection, 300 ms" in line_of(record)


# Frames ----------------------------------------------------------------------------------------------------------


def run_as(module: str, function: str, local: dict[str, object], inner):
    """Call `inner` from a function of a module of that name which has these local variables."""
    body = "".join(f"    {name} = _local[{name!r}]\n" for name in local)
    space = {"__name__": module, "_local": local, "_inner": inner}
    exec(f"def {function}():\n{body}    return _inner()\n", space)
    return space[function]()


def look_from(*calls: tuple[str, str, dict[str, object]]) -> frames.Sight:
    """What is seen of a thread whose innermost frames are `calls`, outermost first."""
    if not calls:
        return frames.look(sys._getframe(), skip=__name__)
    (module, function, local), *rest = calls
    return run_as(module, function, local, lambda: look_from(*rest))


def test_engine_frame_and_innermost_frame():
    seen = look_from(
        ("sglang.srt.managers.scheduler", "run_batch", {}),
        ("numinous_tooling.patching.hooks", "numinous_forward", {}),
        ("sglang.srt.layers.attention", "forward", {}),
        ("torch.nn.modules", "call", {}),
        ("numinous_tooling.patching.hooks", "numinous_call", {}),
    )
    assert seen.engine == "sglang.srt.layers.attention:forward:2"
    assert seen.innermost == "torch.nn.modules:call:2"
    assert seen.jit == ()


KERNEL = SimpleNamespace(name="_fwd_kernel", base_fn=SimpleNamespace(__name__="_tuned_kernel"))


@pytest.mark.parametrize(
    ("module", "local", "text"),
    [
        ("triton.compiler.compiler", {"src": KERNEL}, "Triton: _fwd_kernel"),
        ("triton.compiler.code_generator", {}, "Triton"),
        ("triton.runtime.autotuner", {"self": KERNEL}, "Triton autotuning: _tuned_kernel"),
        ("torch._dynamo.convert_frame", {"code": look_from.__code__}, "torch.compile: look_from"),
        ("torch._inductor.graph", {}, "TorchInductor"),
        ("torch.utils.cpp_extension", {"name": "ops"}, "C++ extension: ops"),
        ("tvm_ffi.cpp.extension", {"name": "store"}, "tvm-ffi: store"),
        ("flashinfer.jit.core", {"self": SimpleNamespace(name="batch_decode")}, "FlashInfer: batch_decode"),
        ("sglang.srt.layers.deep_gemm_wrapper.compile_utils", {}, "DeepGEMM"),
        ("cutlass.base_dsl.compiler", {}, "CuTe DSL"),
        ("tilelang.engine.lower", {}, "TileLang"),
    ],
)  # fmt: skip
def test_a_compiler_on_the_stack_is_named(module, local, text):
    seen = look_from(("sglang.srt.x", "forward", {}), (module, "compile", local))
    assert seen.jit == (text,)


def test_a_compiler_within_another_and_its_unnamed_frames():
    seen = look_from(
        ("torch._dynamo.convert_frame", "_compile", {"code": look_from.__code__}),
        ("torch._dynamo.convert_frame", "transform", {}),
        ("triton.compiler.compiler", "compile", {"src": KERNEL}),
        ("triton.compiler.code_generator", "visit", {"src": None}),
    )
    assert seen.jit == ("torch.compile: look_from", "Triton: _fwd_kernel")


@pytest.mark.parametrize(
    "module", ["triton.runtime.jit", "torch._dynamo.eval_frame", "flashinfer.decode", "triton.compiler_tools"]
)  # fmt: skip
def test_what_only_launches_is_no_compiler(module):
    assert look_from((module, "run", {"self": KERNEL})).jit == ()


def test_compilers_are_found_among_processes(tmp_path):
    def process(pid: int, name: str, *children: int) -> None:
        folder = tmp_path / str(pid) / "task" / str(pid)
        folder.mkdir(parents=True)
        (tmp_path / str(pid) / "comm").write_text(name + "\n")
        (folder / "children").write_text(" ".join(map(str, children)))

    process(10, "python", 11, 12)
    process(11, "sh", 13)
    process(13, "nvcc", 14, 99)  # 99 ended meanwhile
    process(14, "cicc")
    process(12, "python")
    process(15, "ptxas")  # of somebody else
    assert frames.compiler_processes(10, tmp_path) == ("cicc", "nvcc")
    assert frames.compiler_processes(12, tmp_path) == ()


# The thread ------------------------------------------------------------------------------------------------------


@pytest.fixture
def watchdog(tracer) -> Watchdog:
    return Watchdog(tracer, RecordFile(stall_tracer.KIND), {"tp_rank": 1})


def stuck(tracer, clock, watchdog, rounds: int, step_ms: float) -> None:
    """A scheduler thread that sits in a function of the engine while the watchdog makes its rounds."""
    inside, leave = threading.Event(), threading.Event()

    def forward(*_arguments: object) -> None:
        inside.set()
        assert leave.wait(60)

    def schedule() -> None:
        tracer.thread = threading.get_ident()
        stall_tracer.around_run_batch(
            lambda *a: run_as("sglang.srt.layers.moe", "forward", {}, forward),
            None,
            batch(tokens=7, mode=EXTEND),
        )
        stall_tracer.before_ingest_requests(None)

    thread = threading.Thread(target=schedule)
    thread.start()
    assert inside.wait(60)
    for _ in range(rounds):
        clock.take(step_ms)
        assert watchdog.round() > 0
    leave.set()
    thread.join(60)


def test_the_thread_names_the_frame_and_writes_the_record(
    tracer, clock, watchdog, caplog, tmp_path
):
    stuck(tracer, clock, watchdog, rounds=8, step_ms=30)
    assert caplog.messages == [], "it has not ended yet, and not reached ten times the limit"
    watchdog.round()
    (record,) = read(tmp_path / "state", stall_tracer.KIND)
    assert record["frame"] == "sglang.srt.layers.moe:forward:2"
    assert record["innermost"].startswith("threading:")
    assert record["samples"] == 7, "the first of the eight came before half the limit"
    assert (record["phase"], record["tokens"], record["tp_rank"]) == ("run_batch", 7, 1)
    (line,) = caplog.messages
    assert line.startswith(
        "numinous: stall: iteration 1 took 240 ms, 24 ms of it on the CPU; mostly in run_batch"
    )
    assert "EXTEND of 3 requests, 7 tokens" in line
    assert "sglang.srt.layers.moe:forward:2" in line
    watchdog.flush()
    assert len(read(tmp_path / "state", stall_tracer.KIND)) == 1


def test_a_hang_is_reported_while_it_lasts(tracer, clock, watchdog, caplog, tmp_path):
    stuck(tracer, clock, watchdog, rounds=8, step_ms=300)
    (record,) = read(tmp_path / "state", stall_tracer.KIND)
    assert record["ended"] is False
    assert record["cpu_ms"] is None
    assert "and still runs; mostly in run_batch" in caplog.text
    watchdog.round()
    assert [r["ended"] for r in read(tmp_path / "state", stall_tracer.KIND)] == [False, True]


def test_frames_of_one_stall_are_not_those_of_the_next(tracer, clock, watchdog, tmp_path):
    stuck(tracer, clock, watchdog, rounds=8, step_ms=30)
    turn(clock, run_batch=500)  # so short for the thread that it never looks
    stall_tracer.before_ingest_requests(None)
    watchdog.round()
    first, second = read(tmp_path / "state", stall_tracer.KIND)
    assert first["samples"] == 7
    assert (second["samples"], second["frame"]) == (0, None)
    assert "no frame" in cause_of(second)


def test_each_stall_has_its_own_frames(tracer, clock, watchdog, tmp_path):
    stuck(tracer, clock, watchdog, rounds=8, step_ms=30)
    stuck(tracer, clock, watchdog, rounds=5, step_ms=30)
    watchdog.round()
    samples = [record["samples"] for record in read(tmp_path / "state", stall_tracer.KIND)]
    assert samples == [7, 4]


def test_a_frame_seen_too_late_is_dropped(tracer, clock, watchdog, monkeypatch):
    def slow_look(frame, skip):
        stall_tracer.before_ingest_requests(None)  # the iteration ends meanwhile
        return frames.look(frame, skip)

    monkeypatch.setattr(stall_tracer, "look", slow_look)
    clock.take(200)
    assert watchdog.round() == 0
    assert watchdog.sights == []


def test_the_thread_sleeps_until_half_the_limit(tracer, clock, watchdog):
    stall_tracer.before_ingest_requests(None)
    clock.take(10)
    assert watchdog.round() == pytest.approx(0.040)
    clock.take(45)
    assert watchdog.round() <= stall_tracer.LONGEST_PAUSE_S
    assert len(watchdog.sights) == 1


def test_records_are_bounded(tracer, clock, watchdog, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr("numinous_tooling.diag.records.MAX_RECORDS", 3)
    monkeypatch.setattr(stall_tracer, "MAX_RECORDS", 3)
    for _ in range(6):
        turn(clock, run_batch=500)
    watchdog.flush()
    assert len(read(tmp_path / "state", stall_tracer.KIND)) == 3
    assert [text for text in caplog.messages if "no more are" in text] == [
        "numinous: 3 stalls recorded, no more are"
    ]
    assert counters.table().totals()[STALL_TRACER.id]["refused:record_limit"] == 2


def test_a_full_disk_ends_the_records_but_not_the_log(
    tracer, clock, watchdog, monkeypatch, caplog, tmp_path
):
    watchdog.file.path = tmp_path / "gone" / "records"
    for _ in range(4):  # the first turn only begins
        turn(clock, run_batch=500)
    watchdog.flush()
    assert len([text for text in caplog.messages if "numinous: stall:" in text]) == 3
    assert len([text for text in caplog.messages if "stalls are only logged" in text]) == 1
    assert counters.table().totals()[STALL_TRACER.id]["refused:record_error"] == 3


def test_stalls_that_nobody_writes_do_not_pile_up(tracer, clock, monkeypatch):
    for _ in range(stall_tracer.MAX_WAITING + 5):
        turn(clock, run_batch=500)
    assert len(tracer.stalls) == stall_tracer.MAX_WAITING


# Cost ------------------------------------------------------------------------------------------------------------

SHORTEST_ITERATION_NS = 5 * MS
"""A decode step of a model of a few billion parameters on a fast GPU; of longer ones the tracer takes less."""


@pytest.fixture
def real_tracer(monkeypatch) -> StallTracer:
    monkeypatch.setattr(counters, "_table", counters.Table())
    made = StallTracer(500 * MS, counters.counters(STALL_TRACER.id))
    monkeypatch.setattr(stall_tracer, "_tracer", made)
    return made


def nothing(*_arguments: object) -> None:
    """An engine function without work."""


def hooked(around) -> object:
    """An engine function as the patch layer leaves it."""
    return hooks._dispatch(hooks._around(nothing, around))


BEGIN = hooks._dispatch(hooks._before(nothing, stall_tracer.before_ingest_requests))
PHASES = [
    (hooked(stall_tracer.around_recv_requests), ()),
    (hooked(stall_tracer.around_process_input_requests), ()),
    (hooked(stall_tracer.around_get_next_batch_to_run), ()),
    (hooked(stall_tracer.around_run_batch), (None, batch())),
    (hooked(stall_tracer.around_process_batch_result), (None, batch(), None)),
    (hooked(stall_tracer.around_launch_batch_sample_if_needed), ()),
]


def one_turn(through_hooks: bool) -> None:
    """The calls of an iteration with the overlap schedule; none of them does anything itself."""
    if through_hooks:
        BEGIN(None)
    for function, arguments in PHASES:
        (function if through_hooks else nothing)(*arguments)


def test_cost_in_operations(real_tracer):
    """Clock reads and Python calls of one iteration, counted."""
    reads = 0

    def clock() -> int:
        nonlocal reads
        reads += 1
        return time.monotonic_ns()

    real_tracer.clock = clock
    calls = 0

    def profile(frame, event, _argument) -> None:
        nonlocal calls
        module = frame.f_globals.get("__name__", "")
        calls += event == "call" and module.startswith("numinous_tooling.")

    sys.setprofile(profile)
    try:
        one_turn(through_hooks=True)
    finally:
        sys.setprofile(None)
    assert reads <= 13, "two a phase and one an iteration"
    assert calls <= 45


CALL_NS = 50
"""CPU time of an empty Python call on a machine with nothing else to do; where it takes longer, so does the engine."""


def test_cost_in_cpu_time_is_below_one_percent(real_tracer):
    """CPU time of this thread, the best of many rounds, against a call that is timed beside it."""

    def cpu_ns(work, rounds: int) -> float:
        begin = time.thread_time_ns()
        for _ in range(rounds):
            work()
        return (time.thread_time_ns() - begin) / rounds

    traced, stock, call = [], [], []
    for _ in range(40):
        traced.append(cpu_ns(lambda: one_turn(through_hooks=True), 100))
        stock.append(cpu_ns(lambda: one_turn(through_hooks=False), 100))
        call.append(cpu_ns(lambda: None, 1000))
    slower = max(1.0, min(call) / CALL_NS)
    assert min(traced) - min(stock) < SHORTEST_ITERATION_NS / 100 * slower


# Command ---------------------------------------------------------------------------------------------------------


def published(*features: str) -> None:
    counters.publish({"role": "scheduler", "run": "r", "features": list(features)})


def test_command_prints_a_table_and_json(tracer, clock, watchdog, tmp_path, capsys):
    published(STALL_TRACER.id)
    stuck(tracer, clock, watchdog, rounds=8, step_ms=30)
    watchdog.round()
    folder = str(tmp_path / "state")
    assert diag(["stalls", "--state-dir", folder]) == 1
    shown = capsys.readouterr().out
    assert "1 iterations with a batch" in shown
    assert "240" in shown
    assert "sglang.srt.layers.moe:forward:2" in shown
    assert diag(["stalls", "--state-dir", folder, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["stalls"][0]["phase"] == "run_batch"
    assert report["processes"][0]["alive"] is True


def test_command_without_stalls(tracer, tmp_path, capsys):
    published(STALL_TRACER.id)
    assert diag(["stalls", "--state-dir", str(tmp_path / "state")]) == 0
    assert "no stalls" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["stalls", "--state-dir", "/nowhere"], "no state folder /nowhere; start the server with NUMINOUS_DIAG_STALL_TRACER=1"),
        (["access", "--state-dir", "/nowhere"], "start the server with NUMINOUS_DIAG_ACCESS_LOCATOR=1"),
        (["stalls", "--limit", "3"], "unrecognized arguments: --limit 3"),
        (["stalls", "--state-dir"], "expected one argument"),
        (["stall"], "invalid choice: 'stall'"),
        (["bytes"], "the following arguments are required: --config"),
    ],
)  # fmt: skip
def test_bad_use_is_one_line(words, text, capsys):
    assert diag(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


def test_a_folder_without_the_feature_is_undecided(tracer, tmp_path, capsys):
    published("scheduler.decode_burst")
    assert diag(["stalls", "--state-dir", str(tmp_path / "state")]) == 2
    assert "ran with diag.stall_tracer" in capsys.readouterr().err


def test_without_a_command_help_is_shown(capsys):
    assert diag([]) == 2
    assert "stalls" in capsys.readouterr().out


def test_old_records_go_with_their_process(tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    stem = "4-5"  # no such process started then
    (folder / f"{stem}.json").write_text(
        json.dumps(
            {"pid": 4, "start": 5, "utc": 1.0, "role": "scheduler", "run": "r", "features": []}
        )
    )
    (folder / f"{stem}.counters").write_bytes(b"")
    (folder / f"{stem}.stalls.jsonl").write_text("")
    assert counters.forget_dead(folder) == 1
    assert list(folder.iterdir()) == []


DEFAULTS = {"pp_size": 1, "disaggregation_mode": "null", "enable_pdmux": False}


@pytest.mark.parametrize(
    "given", [{"pp_size": 2}, {"disaggregation_mode": "decode"}, {"enable_pdmux": True}]
)
def test_judge_refuses_in_one_line(given):
    assert list(judge_stall_tracer(ServeCommand({}, DEFAULTS))) == []
    (line,) = judge_stall_tracer(ServeCommand(given, DEFAULTS))
    assert "\n" not in line
