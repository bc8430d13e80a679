# SPDX-License-Identifier: Apache-2.0
"""The benchmark on the GPU present: captured launches, both cache modes, roofs, in-place inputs, the alarm.

On a GPU: python3 -m pytest packages/tooling/tests/test_bench_device.py
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import pytest
import torch

from numinous_tooling.bench import __main__ as command
from numinous_tooling.bench import protocol
from numinous_tooling.bench.clocks import CudaClock
from numinous_tooling.bench.roofs import NODES, measure_roofs
from numinous_tooling.workbench import Implementation, Op, Traffic

pytestmark = pytest.mark.tier("device")

ROOF = {"copy_bytes_s": 1e12, "launch_floor_us": 2.0, "node_floor_us": 1.0, "not_measured": {}}
MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """acc += x on n fp32 elements, acc in place."""

    n: int


def make_inputs(case, seed, device):
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(case.n, generator=generator, device=device)
    return {"x": x, "acc": torch.zeros_like(x)}


def in_place(case, inputs):
    return {"acc": inputs["acc"].add_(inputs["x"])}


def twice_the_work(case, inputs):
    (inputs["acc"] + inputs["x"]).mul_(2)
    return in_place(case, inputs)


def synchronises(case, inputs):
    torch.cuda.synchronize()
    return in_place(case, inputs)


def reference(case, inputs):
    return {"acc": inputs["acc"] + inputs["x"]}


def peer(run):
    return Implementation(run, version=lambda: torch.__version__)


OP = Op(
    name="accumulate",
    package="tooling",
    cases=(Case(16 * MIB),),
    make_inputs=make_inputs,
    reference=reference,
    compare=lambda case, got, want: torch.testing.assert_close(got, want, rtol=0, atol=0),
    traffic=lambda case: Traffic(12 * case.n, case.n, "fp32"),
    implementations={"ours": Implementation(in_place, exact=True)},
    peers={"twice": peer(twice_the_work), "syncs": peer(synchronises)},
)


def run(op, **options):
    options = {"cases": op.cases, "version": "0.1.0", "roof": ROOF, "samples": 30} | options
    return protocol.bench_op(op, CudaClock(), **options)


@pytest.fixture(scope="module")
def roof():
    return measure_roofs(CudaClock(), ["fp32"])


def test_roofs_are_those_of_a_datacentre_gpu(roof) -> None:
    print(json.dumps(roof))
    assert 0.5e12 < roof["copy_bytes_s"] < 20e12
    assert 50e12 < roof["bf16_flop_s"] < 5e15
    assert 0.1 < roof["node_floor_us"] < roof["launch_floor_us"] < 20
    if "fp8" not in roof["not_measured"]:
        assert roof["fp8_flop_s"] > 1.2 * roof["bf16_flop_s"]
    assert roof["fp32_flop_s"] < roof["bf16_flop_s"]


@pytest.mark.parametrize("l2", ["cold", "rotate"])
def test_times_follow_the_work_and_stay_below_the_roof(roof, l2: str) -> None:
    result = run(dataclasses.replace(OP, bench_options={"l2": l2}), roof=roof)
    assert result.red == []
    rows = {row["provider"]: row for row in result.measured}
    print(json.dumps(rows))
    assert rows.keys() == {"ours", "twice"}
    ours, twice = rows["ours"], rows["twice"]
    # 3 transfers of 64 MiB against 3 + 3 + 2, the last two partly in L2.
    assert 1.4 < twice["median_us"] / ours["median_us"] < 3.5
    assert 0.5 < ours["bytes"] / ours["median_us"] / 1e-6 / roof["copy_bytes_s"] < 1.1
    assert ours["p80_us"] / ours["p20_us"] < 1.2
    assert ours["settled"]


def test_a_peer_that_synchronises_is_named() -> None:
    op = dataclasses.replace(OP, cases=(Case(MIB),))
    (row,) = run(op).not_run
    assert row["provider"] == "syncs"
    assert row["reason"].startswith("cannot be captured: ")
    torch.randn(4, device="cuda")  # the failed capture does not spoil what comes after it


def test_cold_and_warm_l2_differ() -> None:
    """Without the flush a small op would run from L2: 8 MiB cold against the same replayed at once."""
    clock = CudaClock()
    inputs = make_inputs(Case(MIB), 0, clock.device)
    launch = clock.prepare(lambda: in_place(None, inputs))
    cold = sorted(clock.sample(launch) for _ in range(20))[10]
    many = clock.prepare(lambda: [in_place(None, inputs) for _ in range(NODES)])
    warm = sorted(clock.sample(many) for _ in range(20))[10] / NODES
    assert warm < 0.8 * cold, (warm, cold)


def test_outputs_of_a_graph_do_not_share_memory() -> None:
    clock = CudaClock()
    x = torch.randn(MIB, device=clock.device)
    launch = clock.prepare(lambda: [x * 2 for _ in range(4)])
    assert len({tensor.data_ptr() for tensor in launch.outputs}) == 4
    x.fill_(3.0)
    launch.replay()
    clock.synchronize()
    assert all(bool((tensor == 6).all()) for tensor in launch.outputs)


def test_a_planted_fault_on_the_device_leaves_no_figure() -> None:
    def wrong(case, inputs):
        made = in_place(case, inputs)
        made["acc"][-1] += 1
        return made

    result = run(dataclasses.replace(OP, implementations={"ours": Implementation(wrong)}))
    assert result.measured == []
    assert "ours" in result.red[0]


def test_the_alarm_by_the_command(monkeypatch, capsys) -> None:
    slow = {"slow": Implementation(twice_the_work)}
    op = dataclasses.replace(OP, implementations=slow, peers={"stock": peer(in_place)})
    monkeypatch.setattr(command, "load_op", lambda name: op)
    assert command.main(["x:OP", "--json", "--against", "stock"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["against"][0]["word"] == "slower"
    record = report["records"][0]
    assert record["gpu"]
    assert record["driver"]
    assert record["sm_count"] > 10
