# SPDX-License-Identifier: Apache-2.0
"""The gate of `bench_mla_dense.py`, without a GPU."""

from __future__ import annotations

import importlib
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
LAYERS = 16


@pytest.fixture(scope="module")
def bench() -> Iterator[types.ModuleType]:
    for name in ("httpx", "safetensors"):
        pytest.importorskip(name, reason=f"the benchmark needs {name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("bench_mla_dense")


def results(bench: Any, changed: dict[str, int], tokens: float = 1.0) -> dict[str, Any]:
    """Arms whose likeliest tokens differ from bf16's in so many of 100 places."""
    found = {}
    for arm in bench.arms_of(True):
        flips = changed.get(arm.name.partition("-")[0], 0)
        scores = {"long, cold": [(-1.0, n if n >= flips else -1) for n in range(100)]}
        size = int(10**9 / bench.bytes_of(arm, LAYERS) * (tokens if arm.feature else 1))
        found[arm.name] = {"tokens": size, "scores": scores, "again": scores, "cached": {}}
    return found


def test_gate(bench: Any) -> None:
    arms = bench.arms_of(True)
    assert [arm.name for arm in arms] == ["bf16", "fp8", "kv4", "fp8-flashmla", "kv4-flashmla"]
    found = bench.check(arms, LAYERS, results(bench, {"fp8": 3, "kv4": 12}), 4.0)
    assert found["kv4"]["pool_ratio"] == pytest.approx(16 * 1152 / (16 * 352 + 1152), rel=1e-3)
    assert found["kv4"]["bytes_per_token"] == 6784
    for flawed, said in (
        (results(bench, {"fp8": 3, "kv4": 14}), "red gate: kv4, long, cold: 0.140 of the likeliest"),
        (results(bench, {}, tokens=0.9), "the pools do not differ as their bytes do"),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match=said):
            bench.check(arms, LAYERS, flawed, 4.0)


def test_dummy_has_the_layers(bench: Any, tmp_path: Path) -> None:
    bench.make_dummy.write("deepseek-v3", tmp_path / "a", tiny=True, layers=3)
    config = json.loads((tmp_path / "a/config.json").read_text())
    names = json.loads((tmp_path / "a/model.safetensors.index.json").read_text())["weight_map"]
    assert config["num_hidden_layers"] == 3
    assert {name.split(".")[2] for name in names if ".layers." in name} == {"0", "1", "2"}
