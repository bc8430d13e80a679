# SPDX-License-Identifier: Apache-2.0
"""Extend attention: all tiers of the op; skipped tiles leave the bits alone; planted faults; peers; what is refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from numinous_attention.kernels import extend_attention as kernels
from numinous_attention.kernels.extend_attention import extend_attention
from numinous_attention.workbench import extend_attention as bench
from numinous_attention.workbench.extend_attention import OP, Case
from numinous_tooling.compile.launches import launches
from numinous_tooling.testing.kernels import KernelTests
from numinous_tooling.testing.tensors import big_pool
from numinous_tooling.testing.tiers import selection
from numinous_tooling.workbench import Tensors, case_id

CPU = torch.device("cpu")


class TestExtendAttention(KernelTests):
    op = OP


# --- Skipped tiles --------------------------------------------------------------------------------------------------

SKIPPING = (
    Case("37", "0", window=16, dim=16, heads=1),
    Case("3_18", "50_35", window=20, dim=16, heads=1),
    Case("20", "20", window=17, causal=False, dim=16, heads=1, pool="fp8"),
    Case("25", "3", dim=16, heads=2, cap=5.0),  # only tiles behind the diagonal
)


def launched(case: Case, inputs: Tensors, module: Any = kernels, **how: Any) -> Tensors:
    """Outputs of the kernel, launched with what only tests choose; memory starts as NaN."""
    call = module._checked(
        *(inputs[x] for x in ("q", "k", "v", "k_pool", "v_pool")),
        *(inputs[x] for x in ("qo_indptr", "kv_indptr", "kv_indices")),
        *_checked_options(case, inputs),
    )
    call.out.fill_(torch.nan)
    call.lse.fill_(torch.nan)
    module._launch(call, **how)
    return {"out": call.out, "lse": call.lse}


def _checked_options(case: Case, inputs: Tensors) -> tuple[Any, ...]:
    options = bench._options(case)
    tables = [inputs.get(x) for x in ("mask", "mask_indptr", "mask_offsets")]
    first = (options["sm_scale"], options["causal"], options["window"], *tables)
    scales = (options["k_scale"], options["v_scale"])
    return (*first, case.mask_prefix, case.cap, inputs.get("sinks"), *scales, None, True)


@pytest.mark.tier("interpret")
@pytest.mark.parametrize("case", SKIPPING, ids=case_id)
def test_skipped_tiles(case: Case) -> None:
    """The same bits as of loops over every tile."""
    inputs = OP.make_inputs(case, 0, CPU)
    skipped, whole = launched(case, inputs), launched(case, inputs, skip=False)
    for name in ("out", "lse"):
        assert torch.equal(skipped[name].view(torch.uint8), whole[name].view(torch.uint8))
    OP.compare(case, skipped, OP.reference(case, inputs))


@pytest.mark.tier("device")
@pytest.mark.parametrize("case", [*SKIPPING, bench.LARGE[1]], ids=case_id)
def test_skipped_tiles_on_the_gpu(case: Case, gpu: torch.device) -> None:
    """The same bits as of loops over every tile."""
    inputs = OP.make_inputs(case, 0, gpu)
    skipped, whole = launched(case, inputs), launched(case, inputs, skip=False)
    for name in ("out", "lse"):
        assert torch.equal(skipped[name].view(torch.uint8), whole[name].view(torch.uint8))


# --- Planted faults -------------------------------------------------------------------------------------------------

RAGGED = Case("9_0_17", "0_5_33", heads=6, kv_heads=2, dim=16)
FAULTS: dict[str, tuple[Case, str, str]] = {
    "prefix window a tile late": (Case("2", "40", window=31, dim=16), "tl.maximum(prefix + first - window, 0) // KEYS", "tl.maximum(prefix + first - window + KEYS, 0) // KEYS"),
    "chunk window a tile late": (Case("40", "0", window=16, dim=16, heads=1), "tl.maximum(first - window, 0) // KEYS", "tl.maximum(first - window + KEYS, 0) // KEYS"),
    "window one short": (Case("2", "40", window=32, dim=16), "prefix + token[:, None] - at[None, :] <= window", "prefix + token[:, None] - at[None, :] < window"),
    "a tile too few": (Case("20", "0", dim=16), "highest = last + 1", "highest = last // KEYS * KEYS"),
    "the wrong head of a group": (RAGGED, "kv_head * GROUP + row % GROUP", "kv_head + row % GROUP"),
    "tiles of a request mixed up": (RAGGED, "* GROUP // ROWS + middle", "* GROUP // ROWS"),
    "ids that are none count": (Case("3", "20", holes=True, dim=16), "seen = valid[None, :]\n        if WINDOW:\n            seen = seen & (prefix", "seen = inside[None, :]\n        if WINDOW:\n            seen = seen & (prefix"),
    "the chunk is scaled, too": (Case("5", "5", pool="fp8", dim=16), "valid, seen, chunk_factor", "valid, seen, prefix_factor"),
    "v_scale at the end": (Case("5", "5", pool="fp8", dim=16), "    share = tl.where(none, 0.0, 1.0 /", "    share = tl.where(none, 0.0, v_scale /"),
    "the sink in the wrong base": (Case("5", "5", sink=True, dim=16), "sink.to(tl.float32) * 1.4426950408889634", "sink.to(tl.float32)"),
    "columns of a lost prefix": (Case("5", "5", mask="tree", causal=False, lost=3, dim=16), "(lost + prefix + chunk) + lost", "(prefix + chunk) + lost"),
    "the second part of V": (Case("5", "5", dim=16, dim_v=48), "acc1 * shrink[:, None]", "acc1"),
}  # fmt: skip
QUICK_FAULTS = (
    "prefix window a tile late",
    "tiles of a request mixed up",
    "ids that are none count",
)


@pytest.mark.tier("interpret")
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_in_the_kernel(
    fault: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The comparison sees a fault in the device code, and nothing without it."""
    if fault not in QUICK_FAULTS and not selection(request.config).full:
        pytest.skip("not in the quick selection: --full plants every fault")
    case, old, new = FAULTS[fault]
    text = Path(kernels.__file__).read_text(encoding="utf-8")
    assert old in text, f"the kernel has no {old!r}"
    path = tmp_path / "faulty.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("numinous_attention.kernels.faulty", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    inputs = OP.make_inputs(case, 0, CPU)
    with pytest.raises(AssertionError, match="elements out of bounds"):
        OP.compare(case, launched(case, inputs, module), OP.reference(case, inputs))


# --- Addresses and sizes --------------------------------------------------------------------------------------------


def far_inputs(device: torch.device) -> tuple[Case, Tensors]:
    """A case whose pools, q and k reach behind element 2^31."""
    case = Case("3", "5", heads=2, dim=16, pool="fp8")
    inputs = OP.make_inputs(case, 0, device)
    for name in ("k_pool", "v_pool"):
        pool = big_pool((1, 16), torch.float8_e4m3fn, device)
        near = inputs[name]
        pool[len(pool) - len(near) :] = near
        inputs[name], moved = pool, len(pool) - len(near)
    inputs["kv_indices"] = inputs["kv_indices"] + moved
    for name in ("q", "k"):
        near = inputs[name]
        whole = big_pool((16,), torch.bfloat16, device, elements=2**31 + 4096).flatten()
        far = whole.as_strided(near.shape, (2**30 + 16, 16, 1))
        far[:] = near
        inputs[name] = far
    return case, inputs


@pytest.mark.tier("interpret")
def test_past_2_31_elements() -> None:
    """Rows behind element 2^31 of the pools, strides of 2^30 elements in q and k."""
    case, inputs = far_inputs(CPU)
    OP.compare(case, OP.implementations["triton"].run(case, inputs), OP.reference(case, inputs))


@pytest.mark.tier("device")
def test_past_2_31_elements_on_the_gpu(gpu: torch.device) -> None:
    """The same, and 131,072 rows at once."""
    case, inputs = far_inputs(gpu)
    OP.compare(case, OP.implementations["triton"].run(case, inputs), OP.reference(case, inputs))
    many = Case("_".join(["1"] * 1024), "_".join(["40"] * 1024), 128, 8, 128, window=30)
    inputs = OP.make_inputs(many, 0, gpu)
    OP.compare(many, OP.implementations["triton"].run(many, inputs), OP.reference(many, inputs))


@pytest.mark.tier("interpret")
def test_sinks_in_bf16() -> None:
    """As the engine holds them for its Triton backend: the bits of the same numbers in fp32."""
    case = Case("5", "5", heads=4, sink=True, dim=16)
    inputs = OP.make_inputs(case, 0, CPU)
    inputs["sinks"] = inputs["sinks"].bfloat16()
    one = extend_attention(**inputs, **bench._options(case)).out
    inputs["sinks"] = inputs["sinks"].float()
    other = extend_attention(**inputs, **bench._options(case)).out
    assert torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.tier("interpret")
def test_pointers_beyond_their_lists() -> None:
    """Rows and ids end where their tensors do; rows that belong to no request are left alone; a captured grid takes other lengths."""
    case = Case("6_5", "9_20", dim=16, layout="padded")
    inputs = OP.make_inputs(case, 1, CPU)  # 5 and 6 rows behind 20 and 9 ids
    assert inputs["qo_indptr"].tolist() == [0, 5, 11]
    inputs["q"] = inputs["q"].nan_to_num()
    inputs |= {x: inputs[x].nan_to_num() for x in ("k", "v")}
    inputs["qo_indptr"][:] = torch.tensor([2, 8, 99])
    inputs["kv_indptr"][:] = torch.tensor([3, 15, 1000])
    out = extend_attention(**inputs, **bench._options(case)).out
    ends = {"qo_indptr": torch.tensor([2, 8, len(out)]), "kv_indptr": torch.tensor([3, 15, 29])}
    untouched = torch.full_like(out, 7.0)
    want = kernels.reference(**{**inputs, **ends, "out": untouched}, **bench._options(case))
    assert bool((out[:2] == 7.0).all())
    torch.testing.assert_close(out.double(), want["out"], rtol=0.02, atol=0.02)


def test_parts() -> None:
    """Head dims of models, and those that are no sum of two."""
    found = {dim: kernels.parts(dim) for dim in (16, 64, 80, 96, 128, 192, 256, 288, 512)}
    assert all(sum(found[dim]) == dim for dim in found)
    assert found[512] == (256, 256)
    assert found[192] == (128, 64)
    for dim in (0, 8, 24, 72, 112, 513, 576, 1024):
        with pytest.raises(ValueError, match=f"head dim {dim} is neither"):
            kernels.parts(dim)


def test_tiles() -> None:
    """128 rows and half of V on Hopper, too, but beside a mask or with an uneven V, which shared memory does not hold."""
    for arch, less in kernels.LESS.items():
        assert kernels.tile_of(arch, 512, 512) == kernels.Tile(128, 32, 8, 2, halves=True)
        assert kernels.tile_of(arch, 512, 256).rows == 128
        for dims in ((512, 512, True), (288, 288, False), (512, 384, False)):
            assert kernels.tile_of(arch, *dims) == less


@pytest.mark.tier("compile")
def test_fp32_takes_the_smallest_tile(arch: str) -> None:
    """Operands of fp32 products lie in registers: with the tiles of bf16 D 256 takes 279,040 bytes of shared memory."""
    found = [x.facts for x in launches(OP, arch) if x.facts["q_ptr"].startswith("*fp32")]
    assert found
    assert {(x["ROWS"], x["KEYS"], x["num_warps"]) for x in found} == {("constant 16", "constant 16", "4")}  # fmt: skip


def test_visible_pairs() -> None:
    """Against counting."""
    for chunk, prefix in ((0, 5), (1, 0), (7, 3), (9, 40)):
        for causal in (False, True):
            for window in (None, 0, 4, 100):
                here = prefix + torch.arange(chunk)[:, None]
                at = torch.arange(prefix + chunk)
                seen = torch.ones(chunk, prefix + chunk, dtype=torch.bool)
                seen &= (at <= here) if causal else True
                seen &= (at >= here - window) if window is not None else True
                keys = int(seen[:, :prefix].any(0).sum())
                want = (int(seen.sum()), keys)
                assert kernels.visible_pairs(chunk, prefix, causal, window) == want


# --- Peers ----------------------------------------------------------------------------------------------------------


@pytest.mark.tier("interpret")
@pytest.mark.filterwarnings("ignore")  # of the engine's kernel in the interpreter
def test_engine_as_peer(request: pytest.FixtureRequest) -> None:
    """The engine's own kernel in the interpreter: what it is given is the same attention."""
    if not selection(request.config).full:
        pytest.skip("not in the quick selection: --full imports the engine")
    pytest.importorskip("sglang")
    for case in (
        Case("9_0_17", "0_5_33", heads=6, kv_heads=2, kind="float32"),
        Case("40", "0", window=16, dim=16, kind="float32"),
        Case("7_4", "19_0", mask="tree", causal=False, dim=32, kind="float32", cap=3.0),
        Case("18", "5", mask="span", causal=False, dim=32, lost=3, mask_prefix=True, window=12, kind="float32"),
    ):  # fmt: skip
        inputs = OP.make_inputs(case, 0, CPU)
        OP.compare(case, OP.peers["sglang"].run(case, inputs), OP.reference(case, inputs))
    # With is_causal=True, as Gemma 4's image spans reach it, it cuts a mask at the end of a tile of queries.
    case = Case("150", "0", mask="span", causal=False, dim=16, heads=1, kind="float32")
    inputs = OP.make_inputs(case, 0, CPU)
    cut = OP.peers["sglang"].run(dataclasses.replace(case, causal=True), inputs)
    with pytest.raises(AssertionError, match=r"first at \(50, 0, 0\)"):
        OP.compare(case, cut, OP.reference(case, inputs))


class _Wrapper:
    """FlashInfer's wrappers, attention by the reference on what they are given."""

    def __init__(self, memory: torch.Tensor, layout: str, backend: str) -> None:
        assert (layout, backend) == ("NHD", "fa2")

    def plan(self, *given: Any, **options: Any) -> None:
        self.given, self.options = given, options

    def run(self, q: Any, keys: Any, values: Any = None, return_lse: bool = False) -> Any:
        assert return_lse
        rows, both, *rest = self.given
        if values is None:
            pools, ids = [x[:, 0] for x in keys], rest[0]
            assert rest[-1] == 1  # tokens of a page
        else:
            pools, ids = [keys, values], torch.arange(len(keys))
        window = self.options["window_left"]
        made = _by_reference(
            q, pools, rows, both, ids, self.options["sm_scale"], self.options["causal"], window
        )
        return made["out"], made["lse"] / math.log(2)


def _by_reference(
    q: Any, pools: Any, rows: Any, both: Any, ids: Any, sm_scale: float, causal: bool, window: int
) -> Tensors:
    """Attention of chunks over lists of slots that end with the chunks' own."""
    mask = []
    for request in range(len(rows) - 1):
        chunk, keys = (int(x[request + 1] - x[request]) for x in (rows, both))
        here, at = keys - chunk + torch.arange(chunk)[:, None], torch.arange(keys)
        seen = (at <= here) | (not causal)
        if window >= 0:
            seen &= at >= here - window
        mask.append(torch.cat([seen, torch.zeros(chunk, chunk, dtype=torch.bool)], dim=1).flatten())
    sizes = torch.tensor([0, *map(len, mask)]).cumsum(0)
    kv_heads = pools[0].shape[1]
    own = [q.new_zeros(len(q), kv_heads, x.shape[2]) for x in pools]
    return kernels.reference(
        q, *own, *pools, rows, both, ids, sm_scale=sm_scale, causal=False,
        mask=torch.cat(mask), mask_indptr=sizes, mask_prefix=True,
    )  # fmt: skip


def _flash_attn_with_kvcache(**given: Any) -> Any:
    lengths, table = given["cache_seqlens"], given["page_table"]
    ids = torch.cat([row[:n] for row, n in zip(table, lengths.tolist(), strict=True)])
    assert given["k_cache"].shape[1] == 1
    left, right = given["window_size"]
    assert right == (0 if given["causal"] else -1)
    made = _by_reference(
        given["q"], [given["k_cache"][:, 0], given["v_cache"][:, 0]], given["cu_seqlens_q"],
        torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), ids, given["softmax_scale"], given["causal"], left,
    )  # fmt: skip
    assert given["max_seqlen_q"] == int(given["cu_seqlens_q"].diff().max())
    return made["out"], made["lse"].transpose(0, 1)


@pytest.mark.tier("ref")
@pytest.mark.parametrize(
    "case",
    [
        Case("5_9", "0_0", heads=4, kv_heads=2, dim=16, peers=True),
        Case("5_9", "7_20", heads=2, dim=16, dim_v=32, window=6, peers=True),
    ],
    ids=case_id,
)
def test_peers(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What libraries are given is the same attention: they are replaced by the reference on just that."""
    flashinfer = ModuleType("flashinfer")
    for name in ("BatchPrefillWithRaggedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        setattr(flashinfer, name, _Wrapper)
    attention = ModuleType("sglang.kernels.ops.attention.flash_attention")
    attention.flash_attn_with_kvcache = _flash_attn_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    for name in ("sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.attention"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, attention.__name__, attention)
    inputs = OP.make_inputs(case, 0, CPU)
    want = OP.reference(case, inputs)
    for name in ("flashinfer-fa2", "fa3"):
        assert not OP.peers[name].refuses(case)
        OP.compare(case, OP.peers[name].run(case, inputs), want)
    assert (
        OP.peers["fa3"].refuses(Case("5", "0", dim=512, peers=True)) == "FA3 ends at head dim 256"
    )
    bench._flashinfer_plan.cache_clear()


# --- What is refused ------------------------------------------------------------------------------------------------


def call_of(**change: Any) -> dict[str, Any]:
    """A call of three tokens, two heads over one, with some arguments replaced."""
    zeros = {x: torch.zeros(3, 1, 16).bfloat16() for x in ("k", "v", "k_pool", "v_pool")}
    pointers = {x: torch.tensor([0, 3], dtype=torch.int32) for x in ("qo_indptr", "kv_indptr")}
    ids = torch.arange(3, dtype=torch.int32)
    q = torch.zeros(3, 2, 16).bfloat16()
    return {"q": q, **zeros, **pointers, "kv_indices": ids, "sm_scale": 1.0, **change}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"q": torch.zeros(3, 2, 16).half()}, TypeError, "q: expected bfloat16 or float32"),
        ({"q": torch.zeros(3, 2).bfloat16()}, ValueError, "expected .tokens, heads, dim"),
        ({"k": torch.zeros(3, 1, 16)}, TypeError, "k: expected torch.bfloat16"),
        ({"k": torch.zeros(4, 1, 16).bfloat16()}, ValueError, "k: expected .3, 1, 16."),
        ({"v": torch.zeros(3, 3, 16).bfloat16()}, ValueError, "2 heads are no multiple of 3"),
        ({"v": torch.zeros(3, 1, 24).bfloat16()}, ValueError, "head dim 24 is neither"),
        ({"k_pool": torch.zeros(3, 1, 16)}, TypeError, "k_pool: expected torch.bfloat16 or torch.float8"),
        ({"k_pool": torch.zeros(3, 1, 16).to(torch.float8_e4m3fn)}, TypeError, "v_pool: expected torch.float8"),
        ({"v_pool": torch.zeros(9, 1, 16).bfloat16()}, ValueError, "v_pool: expected .3, 1, 16."),
        ({"k": torch.zeros(3, 1, 32).bfloat16()[..., ::2]}, ValueError, "k: values of a head must lie"),
        ({"out": torch.zeros(3, 2, 16)}, TypeError, "out: expected torch.bfloat16"),
        ({"qo_indptr": torch.zeros(0, dtype=torch.int32)}, ValueError, "qo_indptr: expected"),
        ({"kv_indptr": torch.zeros(1, dtype=torch.int32)}, ValueError, "kv_indptr: expected at least 2"),
        ({"kv_indices": torch.zeros(3)}, TypeError, "kv_indices: expected int32 or int64"),
        ({"mask": torch.zeros(18, dtype=torch.uint8)}, ValueError, "give mask and mask_indptr together"),
        ({"mask_offsets": torch.zeros(1, dtype=torch.int32)}, ValueError, "mask_offsets only with them"),
        ({"mask": torch.zeros(18), "mask_indptr": torch.zeros(2, dtype=torch.int32)}, TypeError, "mask: expected uint8"),
        ({"sinks": torch.zeros(2).half()}, TypeError, "sinks: expected float32 or bfloat16"),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks: expected"),
        ({"sm_scale": 0.0}, ValueError, "sm_scale is positive"),
        ({"v_scale": math.inf}, ValueError, "v_scale is positive"),
        ({"logit_cap": -1.0}, ValueError, "logit_cap is positive"),
        ({"window": -1}, ValueError, "window is at least 0"),
    ],
)  # fmt: skip
def test_refusals(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as raised:
        extend_attention(**call_of(**change))
    assert "\n" not in str(raised.value)
