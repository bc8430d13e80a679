# SPDX-License-Identifier: Apache-2.0
"""The benchmark protocol and its command on the CPU, on a toy op, with a fault planted for each promise."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the bench needs torch")
pytest.importorskip("rich", reason="the table needs rich")
pytest.importorskip("matplotlib", reason="the figures need matplotlib")

from numinous_tooling import evidence  # noqa: E402
from numinous_tooling.bench import __main__ as command  # noqa: E402
from numinous_tooling.bench import against, clocks, facts, protocol, roofs  # noqa: E402
from numinous_tooling.bench.plots import draw  # noqa: E402
from numinous_tooling.bench.protocol import BadUsage  # noqa: E402
from numinous_tooling.workbench import Implementation, Op, Traffic  # noqa: E402

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROOF = {
    "copy_bytes": 1,
    "matmul_n": 1,
    "copy_bytes_s": 1e9,
    "bf16_flop_s": 1e9,
    "launch_floor_us": 1.5,
    "node_floor_us": 0.5,
    "not_measured": {},
}


@dataclass(frozen=True)
class Case:
    """y = 2 x on a vector of n."""

    n: int


def double(case, inputs):
    return {"y": inputs["x"] * 2}


def wrong(case, inputs):
    y = inputs["x"] * 2
    y[-1] += 1
    return {"y": y}


def close(case, got, want):
    torch.testing.assert_close(got["y"], want["y"], rtol=1e-3, atol=1e-3)


def implementation(run, **options):
    return Implementation(run, **{"archs": ("cpu",), **options})


def peer(run, **options):
    return implementation(run, version=lambda: "9.9", **options)


def make_inputs(case, seed, device):
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(case.n, generator=generator).to(device)}


OP = Op(
    name="double",
    package="tooling",
    cases=(Case(8), Case(64)),
    make_inputs=make_inputs,
    reference=double,
    compare=close,
    traffic=lambda case: Traffic(8 * case.n, case.n, "bf16"),
    implementations={"ours": implementation(double)},
    peers={"stock": peer(double)},
)


BAD = dataclasses.replace(OP, name="bad", implementations={"ours": implementation(wrong)})


class ScriptedClock(clocks.CpuClock):
    """Real launches, invented times: `script(provider, how often it was asked before)` in microseconds."""

    def __init__(self, script=lambda provider, asked: 10.0):
        super().__init__()
        self.script, self.names, self.order = script, {}, []

    def prepare(self, call):
        launch = super().prepare(call)
        # `call` is a partial whose first argument is the implementation.
        self.names[id(launch)] = call.args[0] if hasattr(call, "args") else None
        return launch

    def sample(self, launch):
        launch.replay()
        name = self.names[id(launch)]
        self.order.append(name)
        return self.script(name, self.order.count(name) - 1)


def run(op, clock=None, **options):
    options = {"cases": protocol.select_cases(op), "samples": 5, "version": "0.1.0"} | options
    return protocol.bench_op(op, clock or clocks.CpuClock(), roof=ROOF, **options)


def changed(**fields):
    return dataclasses.replace(OP, **fields)


# --- Gate ---------------------------------------------------------------------------------------------------------------


def test_a_right_op_is_measured_for_every_case_and_provider() -> None:
    result = run(OP)
    assert [(row["case"], row["provider"], row["role"]) for row in result.measured] == [
        ("n8", "ours", "ours"),
        ("n8", "stock", "peer"),
        ("n64", "ours", "ours"),
        ("n64", "stock", "peer"),
    ]
    assert (result.red, result.not_run) == ([], [])
    first = result.measured[0]
    assert first["provider_version"] == "0.1.0"
    assert (first["bytes"], first["flops"], first["agrees"], first["l2"]) == (64, 8, True, "cold")
    assert "2 of 2 providers agree with the reference, seed 0" in first["gate"]


@pytest.mark.parametrize(
    "fault", ["wrong", "raises", "wrong once captured", "inexact", "no output", "empty"]
)
def test_a_faulty_own_implementation_leaves_no_figure(fault: str) -> None:
    calls = []

    def later_wrong(case, inputs):
        calls.append(case)
        return wrong(case, inputs) if len(calls) > 1 else double(case, inputs)

    def raises(case, inputs):
        raise RuntimeError("no such tile")

    def inexact(case, inputs):
        return {"y": inputs["x"] * 2 * (1 + 1e-6)}

    faulty = {
        "wrong": implementation(wrong),
        "raises": implementation(raises),
        "wrong once captured": implementation(later_wrong),
        "inexact": implementation(inexact, exact=True),
        "no output": implementation(lambda case, inputs: {}),
        "empty": implementation(lambda case, inputs: {}, exact=True),
    }[fault]
    result = run(changed(implementations={"ours": faulty, "good": implementation(double)}))
    assert result.measured == []
    assert result.red[0].startswith("double n8 ours: ")


def test_one_wrong_case_takes_the_figures_of_the_others_away() -> None:
    def wrong_when_large(case, inputs):
        return wrong(case, inputs) if case.n > 8 else double(case, inputs)

    result = run(changed(implementations={"ours": implementation(wrong_when_large)}))
    assert (len(result.red), result.measured) == (1, [])


def test_the_same_inexact_answer_passes_where_exactness_is_not_claimed() -> None:
    own = implementation(lambda case, inputs: {"y": inputs["x"] * 2 * (1 + 1e-6)})
    assert len(run(changed(implementations={"ours": own})).measured) == 4


def test_a_peer_that_differs_is_named_and_does_not_block() -> None:
    result = run(changed(peers={"stock": peer(wrong)}))
    by_name = {row["provider"]: row for row in result.measured}
    assert by_name["ours"]["agrees"]
    assert not by_name["stock"]["agrees"]
    assert "this one differs: Tensor-likes are not close!" in by_name["stock"]["gate"]
    for row in result.measured:
        elements = int(row["case"].removeprefix("n"))
        assert row["unequal"] == {"y": 1 / elements if row["provider"] == "stock" else 0.0}
    assert result.red == []


def test_a_peer_that_breaks_a_claim_of_exactness_blocks() -> None:
    result = run(changed(peers={"stock": peer(wrong, exact=True)}))
    assert result.measured == []
    assert "double n8 stock: y: 1 of 8 elements differ, first at (7,)" in result.red[0]


def test_what_cannot_run_says_why() -> None:
    def absent():
        raise ModuleNotFoundError("No module named 'fast'")

    calls = []

    def uncapturable(case, inputs):
        calls.append(case)
        if len(calls) % 3 == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return double(case, inputs)

    peers = {
        "elsewhere": peer(double, archs=("sm100",)),
        "absent": implementation(double, version=absent),
        "small": peer(double, refuses=lambda case: "n above 8" if case.n > 8 else None),
        "syncs": peer(uncapturable),
    }
    result = run(changed(peers=peers), cases=[Case(64)])
    assert {row["provider"]: row["reason"] for row in result.not_run} == {
        "elsewhere": "not for cpu; for sm100",
        "absent": "not installed: No module named 'fast'",
        "small": "n above 8",
        "syncs": "cannot be captured: RuntimeError: operation not permitted when stream is capturing",
    }
    assert [row["provider"] for row in result.measured] == ["ours"]


class DyingClock(ScriptedClock):
    """A device that fails every call once `dead`, as a GPU does after an illegal access."""

    dead = False

    def synchronize(self):
        if self.dead:
            raise RuntimeError("an illegal memory access was encountered\nSearch for …")


@pytest.mark.parametrize("at", [1, 2])  # in the gate; before the capture
@pytest.mark.parametrize("role", ["ours", "peer"])
def test_who_took_the_device_down_is_named(at: int, role: str) -> None:
    clock, calls = DyingClock(), []

    def crashing(case, inputs):
        calls.append(case)
        clock.dead = len(calls) >= at
        return double(case, inputs)

    own = implementation(crashing if role == "ours" else double)
    other = peer(crashing if role == "peer" else double)
    name = {"ours": "ours", "peer": "stock"}[role]
    said = f"^double n8 {name}: took the device down: RuntimeError: an illegal memory access was encountered$"
    with pytest.raises(protocol.DeviceLost, match=said):
        run(
            changed(implementations={"ours": own}, peers={"stock": other, "next": peer(double)}),
            clock,
        )


# --- Time ---------------------------------------------------------------------------------------------------------------


def test_providers_take_turns_forwards_and_backwards() -> None:
    a, b, c = implementation(double), peer(double), peer(double)
    clock = ScriptedClock()
    run(changed(implementations={"a": a}, peers={"b": b, "c": c}), clock, cases=[Case(8)])
    names = {id(a): "a", id(b): "b", id(c): "c"}
    order = "".join(names[id(item)] for item in clock.order)
    # Two windows of warm-up of five rounds (the invented times stand still at once), then five that count.
    assert order == "abccbaabccbaabc" * 3


def test_median_and_percentiles_are_those_of_the_counted_rounds() -> None:
    warm = 2 * protocol.WINDOW
    clock = ScriptedClock(lambda provider, asked: 100.0 if asked < warm else 1.0 + asked - warm)
    op = changed(peers={})
    (row,) = run(op, clock, cases=[Case(8)], samples=11).measured
    assert (row["n"], row["median_us"], row["p20_us"], row["p80_us"]) == (11, 6.0, 3.0, 9.0)
    assert row["settled"]


def test_times_that_never_stand_still_are_marked() -> None:
    clock = ScriptedClock(lambda provider, asked: 1.0 + asked)
    (row,) = run(changed(peers={}), clock, cases=[Case(8)]).measured
    assert not row["settled"]
    assert len(clock.order) == protocol.MAX_WINDOWS * protocol.WINDOW + 5


def test_inputs_written_in_place_are_restored_before_every_launch() -> None:
    seen = []

    def add_in_place(case, inputs):
        seen.append(float(inputs["x"][0]))
        return {"y": inputs["x"].mul_(2)}

    op = changed(implementations={"ours": implementation(add_in_place)}, peers={})
    clock = ScriptedClock()
    result = run(op, clock, cases=[Case(8)])
    assert len(result.measured) == 1
    start = float(make_inputs(Case(8), 0, "cpu")["x"][0])
    counted = seen[-len(clock.order) :]
    assert counted == [start] * len(clock.order)
    # Without the restoring the value doubles with each launch: the two warm calls before the capture show it.
    assert 2 * start in seen


def test_rotation_times_many_input_sets_and_divides() -> None:
    pointers = []

    def noting(case, inputs):
        pointers.append(inputs["x"].data_ptr())
        return double(case, inputs)

    op = changed(
        implementations={"ours": implementation(noting)},
        peers={},
        bench_options={"l2": "rotate"},
    )
    clock = ScriptedClock(lambda provider, asked: 30.0)
    clock.l2_bytes = 1000
    (row,) = run(op, clock, cases=[Case(64)]).measured
    sets = -(-3 * 1000 // (8 * 64))
    assert row["l2"] == f"rotate, {sets} sets of 512 bytes"
    assert len(set(pointers[1:])) == sets
    assert row["median_us"] == 30.0 / sets
    assert row["roof"]["launch_floor_us"] == ROOF["node_floor_us"]
    clock.l2_bytes = 1 << 20
    (row,) = run(op, clock, cases=[Case(64)]).measured
    assert row["l2"] == f"rotate, {protocol.MAX_SETS} sets of 512 bytes, within L2"


def test_copies_keep_strides_offsets_and_shared_storage() -> None:
    pool = torch.arange(40.0)
    padded = pool.as_strided((3, 2), (1, 4), 5)  # column-major with a padding row
    copies = protocol.copy_tensors({"pool": pool, "padded": padded, "scale": 2.0, "none": None})
    assert copies["padded"].stride() == (1, 4)
    assert copies["padded"].storage_offset() == 5
    assert torch.equal(copies["padded"], padded)
    copies["pool"][5] = -1
    assert copies["padded"][0, 0] == -1
    assert pool[5] == 5
    assert (copies["scale"], copies["none"]) == (2.0, None)


def test_the_digest_sees_one_bit_and_the_shape() -> None:
    zero = torch.zeros(4)
    digests = [zero, -zero, zero.reshape(2, 2), zero.half(), torch.zeros(0)]
    assert len({protocol.digest_of({"y": value}) for value in digests}) == len(digests)


@pytest.mark.parametrize(
    ("fields", "options", "said"),
    [
        ({"bench_options": {"l3": "x"}}, {}, "bench_options has l3; there are: l2"),
        ({"bench_options": {"l2": "warm"}}, {}, "l2 is warm, none of cold, rotate"),
        ({"peers": {"ours": peer(double)}}, {}, "ours is the name of ours and of a peer"),
        ({}, {"providers": ["nosuch*"]}, "no provider matches nosuch.*there are: ours, stock"),
        ({}, {"samples": 4}, "want at least 5"),
    ],
)
def test_bad_usage_is_one_line(fields, options, said) -> None:
    with pytest.raises(BadUsage, match=said):
        run(changed(**fields), **options)


def test_cases_are_chosen_by_glob() -> None:
    assert protocol.select_cases(OP, ["n6*"]) == [Case(64)]
    assert protocol.select_cases(changed(bench_cases=[Case(9)])) == [Case(9)]
    with pytest.raises(BadUsage, match="no case matches x; there are: n8, n64"):
        protocol.select_cases(OP, ["x"])
    empty = changed(cases=[Case(0), Case(8)])
    with pytest.raises(BadUsage, match="n0 moves no bytes; name what is timed in bench_cases"):
        protocol.select_cases(empty)
    assert protocol.select_cases(empty, ["n8"]) == [Case(8)]


# --- Alarm --------------------------------------------------------------------------------------------------------------


def figure(median: float, half_band: float = 0.01, **fields) -> dict:
    low, high = median * (1 - half_band), median * (1 + half_band)
    row = {"op": "double", "case": "n8", "provider": "ours", "provider_version": "0.1.0"}
    row |= {"role": "ours", "gpu": "NVIDIA H200", "l2": "cold"}
    return row | {"median_us": median, "p20_us": low, "p80_us": high} | fields


@pytest.mark.parametrize(
    ("new", "base", "word"),
    [
        (figure(10), figure(10), "holds"),
        (figure(5), figure(10), "holds"),
        (figure(10.2), figure(10), "holds"),  # bands apart, within 3 %
        (figure(10.2, 0.001), figure(10, 0.001), "holds"),
        (figure(10.5), figure(10), "slower"),
        (figure(10.5, 0.04), figure(10), "undecided"),  # bands touch
        (figure(10, 0.06), figure(10), "undecided"),  # too noisy to say that it holds
        (figure(10.5, 0.02), figure(10, 0.04), "undecided"),
        (figure(20, 0.06), figure(10, 0.06), "slower"),  # noisy, and clear
        (figure(5, 0.2), figure(10, 0.2), "holds"),  # noisy, and clear
        (figure(20, gpu="NVIDIA B200"), figure(10), "undecided"),
        (figure(20, l2="rotate, 9 sets"), figure(10), "undecided"),
        (figure(10), None, "undecided"),
    ],
)
def test_words_of_the_alarm(new, base, word) -> None:
    assert against.compare(new, base)["word"] == word


def test_one_slower_case_decides_and_nothing_compared_is_undecided() -> None:
    rows = [{"word": word} for word in ("holds", "undecided", "slower")]
    assert [against.exit_code(rows[:n]) for n in range(4)] == [2, 0, 2, 1]


# --- Command ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run the command on an op in an empty checkout; gives exit code, stdout and stderr."""
    (tmp_path / "evidence").mkdir()
    (tmp_path / "packages").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(facts, "source_state", lambda *_: {"commit": COMMIT, "dirty": False})
    monkeypatch.setattr(roofs, "measure_roofs", lambda clock, units: ROOF)
    utc = iter(f"2026-01-01T00:00:{second:02d}Z" for second in range(60))
    monkeypatch.setattr(facts.time, "strftime", lambda *_: next(utc))

    def call(*arguments: str, op: Op = OP, times: dict[str, float] | None = None):
        monkeypatch.setattr(command, "load_op", lambda name: {"bad": BAD}.get(name, op))
        everyone = {**op.implementations, **op.peers}
        by_run = {id(item): (times or {}).get(name, 10.0) for name, item in everyone.items()}
        monkeypatch.setattr(
            clocks, "CpuClock", lambda: ScriptedClock(lambda item, asked: by_run.get(id(item), 5.0))
        )
        code = command.main(["double", "--device", "cpu", "--samples", "5", *arguments])
        return code, *capsys.readouterr()

    return call


def records_of(folder: Path) -> list[dict]:
    path = folder / "evidence" / "tooling" / "double.jsonl"
    return evidence.load(path) if path.exists() else []


def test_a_run_is_recorded_and_shown_again(bench, tmp_path: Path) -> None:
    code, out, _ = bench("--evidence", times={"ours": 8.0, "stock": 12.0})
    assert code == 0
    records = records_of(tmp_path)
    assert [(r["case"], r["provider"], r["median_us"]) for r in records] == [
        ("n8", "ours", 8.0),
        ("n8", "stock", 12.0),
        ("n64", "ours", 8.0),
        ("n64", "stock", 12.0),
    ]
    assert records[0]["gpu"].startswith("cpu: ")
    assert records[0]["command"] == "numinous bench double --samples 5 --device cpu"
    assert (records[0]["commit"], records[0]["package"]) == (COMMIT, "tooling")
    assert "1.50 stock" in out
    assert "roofs of this run: copy" in out
    assert command.main(["--show", records[2]["id"]]) == 0


def test_without_the_flag_nothing_is_written(bench, tmp_path: Path) -> None:
    assert bench()[0] == 0
    assert list((tmp_path / "evidence").iterdir()) == []


def test_red_gate_prints_no_ratio_and_records_nothing(bench, tmp_path: Path) -> None:
    bad = changed(implementations={"ours": implementation(wrong)})
    code, out, _ = bench("--evidence", op=bad)
    assert code == 1
    assert "gate red, nothing is shown or recorded: double n8 ours: Tensor-likes" in out
    assert "µs" not in out
    assert records_of(tmp_path) == []
    code, out, _ = bench("--evidence", "--json", op=bad)
    assert (code, json.loads(out)["records"]) == (1, [])


def test_one_wrong_op_takes_the_figures_of_its_neighbours_away(bench, tmp_path: Path) -> None:
    code, out, _ = bench("bad", "--evidence", "--json")
    report = json.loads(out)
    assert (code, report["records"]) == (1, [])
    assert [line.split(":")[0] for line in report["red"]] == ["bad n8 ours", "bad n64 ours"]
    assert records_of(tmp_path) == []


def test_a_differing_peer_is_marked(bench) -> None:
    code, out, _ = bench(op=changed(peers={"stock": peer(wrong)}))
    assert code == 0
    assert "stock 9.9 (peer) *" in out
    assert "this one differs: Tensor-likes are not close! (2 cases: n8, n64)" in out
    assert "1.00 stock *" in out
    better = {"stock": peer(wrong), "slower": peer(double)}
    assert "2.00 slower" in bench(op=changed(peers=better), times={"slower": 20.0})[1]


def test_alarm_against_a_provider(bench) -> None:
    assert bench("--against", "stock", times={"ours": 10.0, "stock": 10.0})[0] == 0
    code, out, _ = bench("--against", "stock", times={"ours": 10.5, "stock": 10.0})
    assert code == 1
    assert "slower: n8 ours 10.50 µs against stock 10.00 µs: +5.0%" in out


def test_alarm_against_a_record(bench, tmp_path: Path) -> None:
    bench("--evidence", times={"ours": 10.0})
    wanted = records_of(tmp_path)[0]["id"]
    assert bench("--against", wanted, times={"ours": 10.1, "stock": 99.0})[0] == 0
    assert bench("--against", wanted, times={"ours": 10.4})[0] == 1
    bench("--evidence", "--case", "n8", times={"ours": 10.0})
    only_n8 = records_of(tmp_path)[-1]["id"]
    code, out, _ = bench("--against", only_n8, times={"ours": 10.0})
    assert code == 2
    assert "undecided: n64 ours 10.00 µs: the base has no figure of this case" in out
    code, _, err = bench("--against", "nosuch-0")
    assert code == 2
    assert "nosuch-0 is neither a provider of this run nor the id of a record" in err


def test_evidence_wants_a_commit(bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "source_state", lambda *_: {"commit": None, "dirty": None})
    code, _, err = bench("--evidence")
    assert code == 2
    assert "set NUMINOUS_COMMIT" in err
    assert records_of(tmp_path) == []
    assert bench()[0] == 0


@pytest.mark.parametrize("name", ["torch", "rich", "matplotlib"])
def test_what_is_not_installed_is_said_before_anything_is_timed(
    bench, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda asked: asked != name or None)
    code, out, err = bench("--plot", "a")
    assert (code, out) == (2, "")
    assert err.startswith(f"numinous bench: {name} is not installed; run: pip install")


def test_another_device_is_refused(bench) -> None:
    code, _, err = bench("--arch", "sm90")
    assert code == 2
    assert "this device is cpu, not sm90" in err


def test_nothing_timed_is_undecided(bench) -> None:
    code, _, err = bench(op=changed(implementations={"ours": Implementation(double)}, peers={}))
    assert code == 2
    assert "nothing was timed" in err


def test_figures_are_svg_and_the_same_each_time(bench, tmp_path: Path) -> None:
    code, out, _ = bench("--json", "--plot", "a")
    report = json.loads(out)
    assert code == 0
    assert report["figures"] == ["a/double-scaling.svg", "a/double-roofline.svg"]
    for path in draw(report["records"], tmp_path / "b"):
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()
        text = path.read_text()
        assert "ours 0.1.0" in text
        assert "copy" in text
        assert report["records"][0]["gpu"].split(",")[0] in text


def test_an_op_without_flops_has_no_roofline(bench) -> None:
    _, out, _ = bench("--json", "--plot", "a", op=changed(traffic=lambda case: Traffic(8 * case.n)))
    assert json.loads(out)["figures"] == ["a/double-scaling.svg"]


@pytest.mark.parametrize("module", ["numinous_tooling.bench", "numinous_tooling"])
def test_the_command_runs_with_the_path_alone(tmp_path: Path, module: str) -> None:
    """By its real clock, on an op named by its place, as on a host with nothing installed."""
    (tmp_path / "toy_op.py").write_text(TOY)
    source = Path(__file__).parents[1] / "src"
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{source}{os.pathsep}{tmp_path}"}
    words = ["bench"] if module == "numinous_tooling" else []
    done = subprocess.run(
        [sys.executable, "-m", module, *words, "toy_op:OP", "--device", "cpu", "--json"],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(done.stdout)["records"]
    assert record["median_us"] > 0
    assert record["command"] == "numinous bench toy_op:OP --device cpu"
    assert record["roof"]["copy_bytes_s"] > 1e8
    assert record["roof"]["not_measured"] == {"fp8": "the CPU has no FP8 units"}


TOY = """
from dataclasses import dataclass

import torch

from numinous_tooling.workbench import Implementation, Op, Traffic


@dataclass(frozen=True)
class Case:
    n: int


def double(case, inputs):
    return {"y": inputs["x"] * 2}


OP = Op(
    name="toy",
    package="tooling",
    cases=(Case(1024),),
    make_inputs=lambda case, seed, device: {"x": torch.ones(case.n, device=device)},
    reference=double,
    compare=lambda case, got, want: torch.testing.assert_close(got, want),
    traffic=lambda case: Traffic(8 * case.n),
    implementations={"ours": Implementation(double, archs=("cpu",))},
)
"""
