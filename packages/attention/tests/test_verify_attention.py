# SPDX-License-Identifier: Apache-2.0
"""Verify attention: all tiers of the op; splits and their join; planted faults; peers; what is refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from numinous_attention.kernels import extend_attention as extend_kernels
from numinous_attention.kernels import verify_attention as kernels
from numinous_attention.kernels.verify_attention import (
    MAX_SPLITS,
    choose_splits,
    rows_of,
    verify_attention,
)
from numinous_attention.workbench import extend_attention as extend
from numinous_attention.workbench import verify_attention as bench
from numinous_attention.workbench.verify_attention import OP, Case
from numinous_tooling.testing.kernels import KernelTests
from numinous_tooling.testing.tensors import big_pool, poisoned_allocations
from numinous_tooling.testing.tiers import selection
from numinous_tooling.workbench import Tensors, case_id

CPU = torch.device("cpu")


class TestVerifyAttention(KernelTests):
    op = OP


def run(case: Case, inputs: Tensors, module: Any = kernels) -> Tensors:
    """Outputs of a module's function, its fresh memory poisoned."""
    with poisoned_allocations("numinous_attention"):
        made = module.verify_attention(
            **inputs, **extend._options(case), with_lse=True, splits=case.splits or None
        )
    return extend._used(case, made._asdict())


# --- Splits ---------------------------------------------------------------------------------------------------------


def bits(made: Tensors) -> list[torch.Tensor]:
    return [made[name].contiguous().view(torch.uint8) for name in ("out", "lse")]


@pytest.mark.tier("interpret")
def test_one_split_is_extend_attention() -> None:
    """The same tile, no parts: the same bits."""
    for case in (Case("4_2", "40_3", heads=4, dim=32, sink=True), Case("7_4", "19_0", mask="tree", causal=False, dim=32)):  # fmt: skip
        inputs = OP.make_inputs(case, 0, CPU)
        one = run(dataclasses.replace(case, splits=1), inputs)
        other = extend.OP.implementations["triton"].run(case, inputs)
        assert all(map(torch.equal, bits(one), bits(other)))


def check_empty_splits(device: torch.device, tile: int) -> None:
    """A walk over one tile of keys and the chunk: whatever the splits, at most two have keys, and the rest leaves the bits alone."""
    case = Case("4", str(tile), dim=64)
    inputs = OP.make_inputs(case, 0, device)
    made = [
        run(dataclasses.replace(case, splits=n), inputs) for n in (2, 3, 7, 8, 9, 64, MAX_SPLITS)
    ]
    for other in made[1:]:
        assert all(map(torch.equal, bits(made[0]), bits(other)))
    OP.compare(case, made[0], OP.reference(case, inputs))


@pytest.mark.tier("interpret")
def test_empty_splits() -> None:
    check_empty_splits(CPU, 16)


@pytest.mark.tier("device")
def test_empty_splits_on_the_gpu(gpu: torch.device) -> None:
    check_empty_splits(gpu, 32)


@pytest.mark.tier("device")
@pytest.mark.parametrize("case", [bench.LARGE[0], bench.LARGE[2], bench.LARGE[5]], ids=case_id)
def test_splits_agree_on_the_gpu(case: Case, gpu: torch.device) -> None:
    """Every number of splits gives the same within rounding, each the same bits every time."""
    inputs = OP.make_inputs(case, 0, gpu)
    want = OP.reference(case, inputs)
    for splits in (1, 2, 3, 5, 8, 31, 64, MAX_SPLITS):
        case = dataclasses.replace(case, splits=splits)
        made = run(case, inputs)
        OP.compare(case, made, want)
        assert all(map(torch.equal, bits(made), bits(run(case, inputs))))


@pytest.mark.tier("interpret")
def test_nan_of_a_visible_key_is_handed_on() -> None:
    """It must not vanish with the part of its split."""
    case = Case("2", "60", dim=16, splits=3)
    inputs = OP.make_inputs(case, 0, CPU)
    inputs["k_pool"][inputs["kv_indices"][5]] = torch.nan
    made = run(case, inputs)
    assert bool(made["out"].isnan().all())
    assert bool(made["lse"].isnan().all())


def test_choose_splits() -> None:
    """132 multiprocessors with two programs each."""
    assert choose_splits(128, 513, 132) == 6  # 768 programs in 264 places, three times; 2 would do
    assert choose_splits(2000, 513, 132) == 1
    assert choose_splits(4, 513, 132) >= 64
    assert choose_splits(1, 10**6, 132) == MAX_SPLITS
    assert choose_splits(1, 1, 132) == choose_splits(1, 0, 132) == 1
    for blocks in (1, 3, 4, 32, 100, 128, 264, 300, 528):
        for tiles in (1, 2, 33, 513, 4097):
            splits = choose_splits(blocks, tiles, 132)
            assert 1 <= splits <= min(tiles, MAX_SPLITS)
            assert splits == 1 or blocks * splits <= 4 * 264


def test_rows() -> None:
    """A tile for all rows of a request, the largest where they are more."""
    for arch in ("sm90", "sm100", "sm120", "gfx950"):
        for dim in (64, 128, 256, 512):
            most = kernels.tiles_of(arch, dim, dim)[-1].rows
            for rows in (1, 8, 16, 17, 32, 33, 128):
                found = rows_of(arch, dim, 64, rows).rows
                assert found == most or found // 2 < max(rows, 16) <= found
            assert not any(tile.halves for tile in kernels.tiles_of(arch, dim, dim))
    assert rows_of("sm90", 64, 512, 32) == rows_of("sm90", 512, 512, 32)


@pytest.mark.parametrize(
    ("case", "keys"),
    [
        (Case("4_4", "300_20", dim=16), 160),
        (Case("4_4", "300_20", dim=16, window=40), 44),
        (Case("4_4", "0_0", dim=16), 0),
    ],
    ids=["full", "window", "empty"],
)
def test_plan_looks_at_shapes(case: Case, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a request on average, no more than its window shows; tensors are not read."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        kernels, "choose_splits", lambda blocks, tiles, _: asked.append((blocks, tiles)) or 1
    )
    given = {x: y.to("meta") for x, y in OP.make_inputs(case, 0, CPU).items()}
    call = kernels._checked(
        *(given[x] for x in ("q", "k", "v", "k_pool", "v_pool", "qo_indptr", "kv_indptr", "kv_indices")),
        1.0, True, None if case.window < 0 else case.window, None, None, None, False, 0.0, None, 1.0, 1.0, None, False,
    )  # fmt: skip
    monkeypatch.setattr(kernels, "_arch", lambda device: "sm90")
    tile, _ = kernels._plan(call, None)
    assert asked == [(2, -(-keys // tile.keys) + 1)]


# --- Planted faults -------------------------------------------------------------------------------------------------

TREE = Case("7_4", "39_0", mask="tree", causal=False, dim=32, splits=3)
HALF = Case("4_4_4", "0_5_70", heads=8, kv_heads=2, splits=3)
FAULTS: dict[str, tuple[Case, Any, str, str]] = {
    "parts of empty splits are read": (HALF, kernels, 'own != float("-inf")', "own == own"),
    "nothing to see anywhere": (Case("5", "39", mask="nothing", causal=False, mask_prefix=True, dim=16, splits=3), kernels, 'tl.where(top == float("-inf"), 0.0, top)', "0.0 * top"),
    "heads before splits": (HALF, kernels, "(token * splits + some) * heads + head", "(token * heads + head) * splits + some"),
    "the sink in every part": (Case("4", "40", sink=True, heads=4, dim=16, splits=3), kernels, "sinks=None", "sinks=call.sinks"),
    "the sink in the wrong base": (Case("4", "40", sink=True, heads=4, dim=16, splits=3), kernels, ".to(tl.float32) * 1.4426950408889634 - base", ".to(tl.float32) - base"),
    "parts joined by e": (HALF, kernels, "tl.exp2(own - base)[:, None]", "tl.exp(own - base)[:, None]"),
    "rows of no request": (Case("4_4", "9_20", dim=16, layout="padded", splits=2), kernels, "(token >= tl.load(qo_indptr_ptr + batch))", "(token < 0)"),
    "a mask's column off by one": (TREE, extend_kernels, "mask_row[:, None] + prefix + at[None, :]", "mask_row[:, None] + prefix + 1 + at[None, :]"),
    "a prefix mask's column off by one": (Case("9", "45", mask="span", causal=False, dim=32, mask_prefix=True, splits=3), extend_kernels, "mask_row[:, None] + at[None, :], mask=live", "mask_row[:, None] + 1 + at[None, :], mask=live"),
    "the chunk in every split": (TREE, extend_kernels, "tl.where(split == splits - 1, highest, 0)", "highest"),
    "a tile lost between splits": (HALF, extend_kernels, "lowest + (tiles * (split + 1) // splits)", "lowest + (tiles // splits * (split + 1))"),
    "splits before the window's first tile": (Case("4", "70", window=17, dim=16, splits=3), extend_kernels, "lowest += (tiles * split", "lowest = (tiles * split"),
    "window one short": (Case("4", "70", window=16, dim=16, splits=3), extend_kernels, "prefix + token[:, None] - at[None, :] <= window", "prefix + token[:, None] - at[None, :] < window"),
}  # fmt: skip
QUICK_FAULTS = (
    "parts of empty splits are read",
    "a mask's column off by one",
    "a tile lost between splits",
)


def faulty(path: Path, module: Any, old: str, new: str) -> Any:
    """`kernels`, with a fault in it or in the module that it takes device code from."""
    text = Path(module.__file__).read_text(encoding="utf-8")
    assert text.count(old) >= 1, f"the kernel has no {old!r}"
    sources = {module: text.replace(old, new)}
    made = None
    for source, name in ((extend_kernels, "faulty_extend"), (kernels, "faulty_verify")):
        code = sources.get(source, Path(source.__file__).read_text(encoding="utf-8"))
        if made is not None:
            code = code.replace(extend_kernels.__name__, made.__name__)
        file = path / f"{name}.py"
        file.write_text(code, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(f"numinous_attention.kernels.{name}", file)
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = made
        spec.loader.exec_module(made)
    return made


@pytest.mark.tier("interpret")
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_planted_faults_in_the_kernel(
    fault: str | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The comparison sees a fault in the device code, and nothing without it."""
    if fault is None:
        made = faulty(tmp_path, kernels, "MAX_SPLITS = 128", "MAX_SPLITS = 128")
        OP.compare(TREE, run(TREE, inputs := OP.make_inputs(TREE, 0, CPU), made), OP.reference(TREE, inputs))  # fmt: skip
        return
    if fault not in QUICK_FAULTS and not selection(request.config).full:
        pytest.skip("not in the quick selection: --full plants every fault")
    case, module, old, new = FAULTS[fault]
    made = faulty(tmp_path, module, old, new)
    inputs = OP.make_inputs(case, 0, CPU)
    with pytest.raises(AssertionError, match="elements out of bounds"):
        OP.compare(case, run(case, inputs, made), OP.reference(case, inputs))


# --- Addresses and sizes --------------------------------------------------------------------------------------------


def far_inputs(case: Case, device: torch.device) -> Tensors:
    """Pools that reach behind element 2^31, named there."""
    inputs = OP.make_inputs(case, 0, device)
    for name in ("k_pool", "v_pool"):
        near = inputs[name]
        pool = big_pool((near.shape[1], near.shape[2]), torch.float8_e4m3fn, device)
        pool[len(pool) - len(near) :] = near
        inputs[name], moved = pool, len(pool) - len(near)
    inputs["kv_indices"] = inputs["kv_indices"] + moved
    return inputs


@pytest.mark.tier("interpret")
def test_past_2_31_elements() -> None:
    case = Case("3", "40", heads=2, dim=16, pool="fp8", splits=3)
    inputs = far_inputs(case, CPU)
    OP.compare(case, run(case, inputs), OP.reference(case, inputs))


@pytest.mark.tier("device")
def test_past_2_31_elements_on_the_gpu(gpu: torch.device) -> None:
    """The same, and parts behind element 2^31."""
    case = Case("3", "40", heads=2, dim=16, pool="fp8", splits=3)
    inputs = far_inputs(case, gpu)
    OP.compare(case, run(case, inputs), OP.reference(case, inputs))
    many = Case("_".join(["4"] * 256), "_".join(["300"] * 256), 32, 4, 512, splits=MAX_SPLITS)
    inputs = OP.make_inputs(many, 0, gpu)
    OP.compare(many, run(many, inputs), OP.reference(many, inputs))


@pytest.mark.tier("interpret")
def test_room_of_a_captured_graph() -> None:
    """Ids and masks longer than the batch names, as the engine's buffers of graphs are: only what pointers name counts."""
    case = dataclasses.replace(TREE, splits=0)
    inputs = OP.make_inputs(case, 0, CPU)
    want = OP.reference(case, inputs)
    for name, fill in (("kv_indices", 2**31 - 1), ("mask", 1)):
        # Room enough for every split to be planned with keys that are none of the batch's.
        inputs[name] = torch.cat([inputs[name], inputs[name].new_full((600,), fill)])
    OP.compare(case, run(case, inputs), want)


# --- Peers ----------------------------------------------------------------------------------------------------------


@pytest.mark.tier("interpret")
@pytest.mark.filterwarnings("ignore")  # of the engine's kernels in the interpreter
def test_engine_as_peer(request: pytest.FixtureRequest) -> None:
    """The engine's own kernels in the interpreter: what they are given is the same attention."""
    if not selection(request.config).full:
        pytest.skip("not in the quick selection: --full imports the engine")
    pytest.importorskip("sglang")
    uniform = {"kind": "float32", "dim": 32, "heads": 4, "kv_heads": 2, "peers": True}
    for name, case in (
        ("sglang", Case("4_4", "33_7", mask="tree", causal=False, **uniform)),
        ("sglang-splitkv", Case("4_4", "128_97", **uniform)),
        ("sglang-decode", Case("1_1", "33_70", sink=True, **uniform)),
    ):
        peer = OP.peers[name]
        assert not peer.refuses(case)
        inputs = OP.make_inputs(case, 0, CPU)
        OP.compare(case, peer.run(case, inputs), OP.reference(case, inputs))


def test_what_peers_refuse() -> None:
    chain = Case("4_4", "128_97", peers=True)
    for change in ({"mask": "tree"}, {"window": 5}, {"sink": True}, {"cap": 3.0}, {"causal": False}, {"dim_v": 32}, {"chunks": "4_3"}, {"peers": False}):  # fmt: skip
        assert OP.peers["sglang-splitkv"].refuses(dataclasses.replace(chain, **change))
    assert OP.peers["sglang-splitkv"].refuses(chain) is None
    assert OP.peers["sglang-decode"].refuses(chain) == "it takes one token a request"
    assert {name for name, peer in OP.peers.items() if not peer.refuses(bench._bench_cases()[1])} == {"sglang", "sglang-splitkv", "sglang-decode", "flashinfer-fa2"}  # fmt: skip


# --- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"splits": 0}, ValueError, "splits is 1 … 128, got 0"),
        ({"splits": MAX_SPLITS + 1}, ValueError, "got 129"),
        ({"sm_scale": -1.0}, ValueError, "sm_scale is positive"),
        ({"q": torch.zeros(3, 2, 16).half()}, TypeError, "q: expected bfloat16 or float32"),
        ({"mask": torch.zeros(18, dtype=torch.uint8)}, ValueError, "give mask and mask_indptr together"),
    ],
)  # fmt: skip
def test_refusals(change: dict[str, Any], error: type[Exception], text: str) -> None:
    """Those of `extend_attention`, whose checks they are, and splits."""
    case = Case("3", "2", dim=16)
    given = {**OP.make_inputs(case, 0, CPU), "sm_scale": 1 / math.sqrt(16), **change}
    with pytest.raises(error, match=text) as raised:
        verify_attention(**given)
    assert "\n" not in str(raised.value)
