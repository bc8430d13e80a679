# SPDX-License-Identifier: Apache-2.0
"""Kernels and the engine's Triton peers between forbidden pages (`fenced.py`): nothing is read or written out of bounds."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from numinous_attention.workbench import verify_attention as bench
from numinous_attention.workbench.verify_attention import OP, Case
from numinous_tooling.testing.tiers import selection

HERE = Path(__file__).parent
SPLIT = "Case('4_2_0', '37_20_5', heads=4, kv_heads=2, dim=32, splits=3, sink=True), Case('3_7', '40_9', 6, 2, 96, 64, pool='fp8', ids='int64', layout='sliced', holes=True, splits=4)"
TREE = "Case('7_4', '39_0', mask='tree', causal=False, dim=32)"
WIDE = "32, 16, 256, window=30, peers=True"  # of peers, whose int32 ids wrap at rows of so many elements
ROWS = "4, 2, 256, window=30"  # ours: where a row starts decides, not how many heads it has
U = "kind='float32', dim=32, heads=4, kv_heads=2, peers=True"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *words], cwd=HERE, capture_output=True, text=True, timeout=500, check=False
    )  # fmt: skip


def assert_right(made: subprocess.CompletedProcess[str]) -> None:
    assert made.stdout.endswith("right\n"), (made.returncode, made.stdout, made.stderr[-2000:])


@pytest.mark.tier("interpret")
@pytest.mark.parametrize("at_end", [True, False])
def test_the_fence_is_noticed(at_end: bool) -> None:
    """The bytes between are there; at a byte behind, or before, the process ends with the signal."""
    reads = [f"ctypes.string_at(t.data_ptr() + {at}, 1); print({at}, flush=True)" for at in ((0, 7, 8) if at_end else (7, 0, -1))]  # fmt: skip
    made = run(
        "-c", "\n".join(["import ctypes, fenced", f"t = fenced.fenced(8, {at_end})", *reads])
    )
    assert made.returncode == -signal.SIGSEGV, made.stderr
    assert made.stdout.split() == (["0", "7"] if at_end else ["7", "0"])


@pytest.mark.tier("interpret")
@pytest.mark.parametrize(
    ("op", "cases"),
    [
        ("verify_attention", f"({SPLIT}, {TREE})"),
        ("extend_attention", f"(Case('9_0_17', '0_5_33', 6, 2), {TREE})"),
        ("verify_attention", f"(Far(Case('4', '40', {ROWS})),)"),
        ("extend_attention", f"(Far(Case('4', '40', {ROWS})),)"),
    ],
)
def test_ours(op: str, cases: str) -> None:
    assert_right(run("fenced.py", op, "triton", cases))


@pytest.mark.tier("interpret")
def test_peers(request: pytest.FixtureRequest) -> None:
    """What stock's kernels are given; what they do not take: int32 ids past 2^31 elements, and splits that stay empty."""
    if not selection(request.config).full:
        pytest.skip("not in the quick selection: --full imports the engine")
    pytest.importorskip("sglang")
    for name, cases in (
        ("sglang", f"(Case('4_4', '33_7', mask='tree', causal=False, {U}), Case('4_3', '33_7', window=9, {U}))"),
        ("sglang", f"(Far(Case('4', '40', {WIDE}, kind='float32', ids='int64')),)"),
        ("sglang-splitkv", f"(Case('4_4', '128_97', {U}), Case('3_3', '128_200', {U}))"),
        ("sglang-decode", f"(Case('1_1', '33_70', sink=True, {U}),)"),
    ):  # fmt: skip
        assert_right(run("fenced.py", "verify_attention", name, cases))
    wrapped = run("fenced.py", "verify_attention", "sglang", f"(Far(Case('4', '40', {WIDE}, kind='float32')),)")  # fmt: skip
    assert wrapped.returncode == -signal.SIGSEGV
    unwritten = run("fenced.py", "verify_attention", "sglang-splitkv", f"(Case('4_4', '128_96', {U}),)")  # fmt: skip
    assert "got nan" in unwritten.stderr


def test_what_stock_is_not_given() -> None:
    """The two refusals that `test_peers` shows the reasons of, and that no benchmark case loses the engine's kernel by them."""
    wide = Case("4", "524288", 32, 16, 256, peers=True)
    for name in ("sglang", "sglang-splitkv"):
        assert "int32 ids wrap" in str(OP.peers[name].refuses(wide))
        assert OP.peers[name].refuses(Case("4", "524288", 32, 16, 256, peers=True, ids="int64")) is None  # fmt: skip
        assert OP.peers[name].refuses(Case("4", "524281", 32, 16, 256, peers=True)) is None
    for prefixes, taken in (("128_97", True), ("128_96", False), ("260_260", False), ("0_128", False), ("16384_1024", True)):  # fmt: skip
        said = OP.peers["sglang-splitkv"].refuses(Case("4_4", prefixes, peers=True))
        assert (said is None) == taken, prefixes
    for case in bench._bench_cases():
        assert OP.peers["sglang"].refuses(case) is None
