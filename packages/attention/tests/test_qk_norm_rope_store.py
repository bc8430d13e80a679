# SPDX-License-Identifier: Apache-2.0
"""Norm, rotation and cache write in one kernel: all tiers of the op, then what is particular to it."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from numinous_attention.kernels import qk_norm_rope_store as kernels
from numinous_attention.kernels.qk_norm_rope_store import qk_norm_rope_store, reference, traffic
from numinous_attention.workbench import qk_norm_rope_store as workbench
from numinous_attention.workbench.qk_norm_rope_store import OP, Case
from numinous_tooling.testing.kernels import KernelTests
from numinous_tooling.testing.tensors import assert_bitwise_equal, big_pool, guarded_pool

CPU = torch.device("cpu")


class TestQkNormRopeStore(KernelTests):
    op = OP


# --- Specification --------------------------------------------------------------------------------------------------


def test_reference_is_what_the_engine_does() -> None:
    """Its classes of norm and its rotation, in torch; both models, and Gemma 4's rotation of part of a head."""
    layernorm = pytest.importorskip("sglang.srt.layers.layernorm", reason="compares with SGLang")
    case = Case(9, 4, 2, 64, "gemma3")
    for model in ("gemma3", "gemma4"):
        case = Case(9, 4, 2, 64, model, rotary=8 if model == "gemma4" else 0)  # type: ignore[arg-type]
        inputs = OP.make_inputs(case, 0, CPU)
        made = OP.reference(case, inputs)
        norm = layernorm.Gemma3RMSNorm(64) if model == "gemma3" else layernorm.Gemma4RMSNorm(64)
        cos, sin = inputs["table"][inputs["positions"]][:, None].chunk(2, dim=-1)
        for name in "qk":
            norm.weight.data.copy_(inputs[f"{name}_weight"].float())
            one, two = norm.forward_native(inputs[name]).float().chunk(2, dim=-1)
            want = torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)
            workbench.compare(case, {name: made[name]}, {name: want.to(torch.bfloat16)})
        if model == "gemma4":
            plain = layernorm.Gemma4RMSNorm(64, with_scale=False)
            want = plain.forward_native(inputs["v"])
            workbench.compare(case, {"v": made["v"]}, {"v": want})


def test_bytes() -> None:
    """Gemma 4's layers without a window, 64 tokens: 32 + 4 heads of 512."""
    model = traffic(64, 32, 4, 512, fp8=False, norm_v=True, write_back=False, mapped=False)
    assert model.bytes == 64 * (512 * (32 * 4 + 4 * 8) + 2048 + 16) + 2048
    kept = traffic(64, 32, 4, 512, fp8=True, norm_v=True, write_back=True, mapped=True)
    assert kept.bytes == 64 * (512 * (32 * 4 + 4 * 10) + 2048 + 24) + 2048
    assert traffic(3, 2, 0, 64, fp8=False, norm_v=True, write_back=True, mapped=False).bytes == 3 * (64 * 8 + 256 + 8) + 128  # fmt: skip


# --- Addresses ------------------------------------------------------------------------------------------------------


def call_of(case: Case, device: torch.device = CPU, **changes: Any) -> dict[str, Any]:
    inputs = OP.make_inputs(case, 0, device)
    return {**inputs, **case.how, **changes}


def _beyond_2_31(device: torch.device) -> None:
    """The last row of large pools, by way of a map; ids that would wrap to it in 32 bits are not written."""
    case = Case(4, 2, 1, 64)
    call = call_of(case, device)
    for name in ("k_pool", "v_pool"):
        call[name] = big_pool((1, 64), torch.bfloat16, device)
    last = len(call["k_pool"]) - 1
    call["slot_map"] = torch.tensor([0, last, last + 1, -(2**40), 2**32 + last], device=device)
    call["slots"] = torch.tensor([1, 2, 3, 4], device=device)
    for pool in ("k_pool", "v_pool"):
        call[pool][[0, 1, last - 1, last]] = 1.0
    names = {n: call[n] for n in ("k", "v")}
    spec = {**call, "k_pool": call["k_pool"][:2].clone(), "v_pool": call["v_pool"][:2].clone()}
    spec |= {"slots": torch.tensor([1, -1, -1, -1], device=device), "slot_map": None}
    want = reference(**spec)
    qk_norm_rope_store(**call)
    for name in names:
        pool = call[f"{name}_pool"]
        workbench.compare(case, {name: pool[last]}, {name: want[f"{name}_pool"][1]})
        assert bool((pool[[0, 1, last - 1]] == 1).all())


@pytest.mark.tier("interpret")
def test_pool_beyond_2_31_interpreted() -> None:
    _beyond_2_31(CPU)


@pytest.mark.tier("device")
def test_pool_beyond_2_31(gpu: torch.device) -> None:
    _beyond_2_31(gpu)


def _guards(device: torch.device) -> None:
    """Nothing is written beside the pools and beside the heads of a token."""
    case = Case(7, 3, 2, 34, edges=True, pool="bytes")
    call = call_of(case, device)
    whole = {n: call[n].untyped_storage() for n in "qkv"}
    assert len({x.data_ptr() for x in whole.values()}) == 1, "parts of one row"
    pools = {n: call[n].contiguous() for n in ("k_pool", "v_pool")}
    with guarded_pool(pools["k_pool"]) as k_pool, guarded_pool(pools["v_pool"]) as v_pool:
        made = {**call, "k_pool": k_pool, "v_pool": v_pool}
        want = reference(**made)
        qk_norm_rope_store(**made)
        workbench.compare(case, {n: made[n] for n in want}, want)


@pytest.mark.tier("interpret")
def test_guards_interpreted() -> None:
    _guards(CPU)


@pytest.mark.tier("device")
def test_guards(gpu: torch.device) -> None:
    _guards(gpu)


# --- Why a map: the engine's own fusion takes none ------------------------------------------------------------------


@pytest.mark.tier("interpret")
def test_slots_of_the_full_pool_do_harm() -> None:
    """The fused write of SGLang 0.5.20 gets `out_cache_loc` for every layer, though a window's layer has a pool and slots of its own. Without the
    map this kernel does the same: keys land in rows of other tokens, or nowhere; the comparison sees it."""
    case = Case(6, 2, 1, 32, window=True)
    want = OP.reference(case, OP.make_inputs(case, 0, CPU))
    call = call_of(case, slot_map=None)
    qk_norm_rope_store(**call)
    with pytest.raises(AssertionError, match="k_pool"):
        workbench.compare(case, workbench._outputs(call), want)


@pytest.mark.tier("interpret")
def test_padded_tokens_leave_the_cache_alone() -> None:
    """Tokens behind a batch, whose slots a captured graph has as -1: the pools keep what they had, -0 and NaN too."""
    case = Case(5, 2, 1, 32)
    call = call_of(case)
    call["slots"].fill_(-1)
    call["k_pool"][0], call["v_pool"][1] = torch.nan, -0.0
    before = {name: call[name].clone() for name in ("k_pool", "v_pool")}
    qk_norm_rope_store(**call)
    for name, pool in before.items():
        assert_bitwise_equal(name, call[name], pool)


def _no_slot(device: torch.device) -> None:
    """A map of no slot: norm and rotation alone, as in a graph whose backend writes."""
    case = Case(5, 3, 2, 64)
    call = call_of(case, device)
    want = reference(**call)
    call |= {"slots": call["positions"], "slot_map": call["positions"][:0]}
    before = {name: call[name].clone() for name in ("k_pool", "v_pool")}
    qk_norm_rope_store(**call)
    workbench.compare(case, {n: call[n] for n in "qkv"}, {n: want[n] for n in "qkv"})
    for name, pool in before.items():
        assert_bitwise_equal(name, call[name], pool)


@pytest.mark.tier("interpret")
def test_a_map_of_no_slot_interpreted() -> None:
    _no_slot(CPU)


@pytest.mark.tier("device")
def test_a_map_of_no_slot(gpu: torch.device) -> None:
    _no_slot(gpu)


# --- Planted faults -------------------------------------------------------------------------------------------------

FAULTS = {
    "no rounding between norm and rotation": ("one = decode_bf16(encode_bf16(one * rstd * weight_one, NATIVE))", "one = one * rstd * weight_one"),
    "a rotation the other way": ("encode_bf16(one * cos - two * sin, NATIVE)", "encode_bf16(one * cos + two * sin, NATIVE)"),
    "the weights of the first half for both": ("_load_half(weight_ptr + D // 2 + column, half)", "_load_half(weight_ptr + column, half)"),
    "the mean of half a head": ("D * 1.0)", "D * 0.5)"),
    "v is rotated": ("one_bits = encode_bf16(one * rstd, NATIVE)", "one_bits = encode_bf16(one * rstd * cos, NATIVE)"),
    "k's scale for v": ("_to_pool(there, one_bits, v_scale", "_to_pool(there, one_bits, k_scale"),
    "no rounding before FP8": ("value = decode_bf16(encode_bf16(tl.div_rn(decode_bf16(bits), scale), NATIVE))", "value = decode_bf16(bits)"),
    "positions unchecked": ("live = placed & (slot >= 0)", "live = slot >= 0"),
    "rows unchecked": ("live = live & (slot >= 0) & (slot < pool_rows)", "live = live & (slot >= 0)"),
    "a map unused": ("slot = tl.load(map_ptr + slot, mask=live, other=-1).to(tl.int64)", "slot = slot"),
}  # fmt: skip


def faulty(fault: str, folder: Path) -> ModuleType:
    old, new = FAULTS[fault]
    text = Path(kernels.__file__).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times"
    path = folder / "faulty_store.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("faulty_store", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.tier("interpret")
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults(fault: str, tmp_path: Path) -> None:
    """The comparison of the op sees each, in memory that outlives what it writes beside the pool."""
    case = Case(9, 5, 2, 64, pool="bytes", window=True, edges=True)
    want = OP.reference(case, OP.make_inputs(case, 1, CPU))
    inputs = OP.make_inputs(case, 1, CPU)
    for name in ("k_pool", "v_pool"):  # a row behind the pool, for a write that is not held back
        wide = torch.zeros(len(inputs[name]) + 2, 2, 64, dtype=torch.uint8)
        wide[:-2] = inputs[name]
        inputs[name] = wide[:-2]
    behind = inputs["k_pool"].untyped_storage()
    module = faulty(fault, tmp_path)
    arguments = [inputs[name] for name in workbench.NAMES]
    module.qk_norm_rope_store(*arguments, slot_map=inputs["slot_map"], **case.how)
    if fault == "rows unchecked":
        tail = torch.empty(0, dtype=torch.uint8).set_(behind)[-2 * 128 :]
        assert bool(tail.any()), "the row behind the pool"
        return
    with pytest.raises(AssertionError, match=r"out of bounds|elements differ"):
        workbench.compare(case, workbench._outputs(inputs), want)


# --- Refusals -------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, r"q: expected \[tokens, heads, dim\]", {"q": torch.zeros(4, 128)}),
    (ValueError, "heads of an even width", {"q": torch.zeros(4, 4, 33)}),
    (TypeError, "q: expected torch.bfloat16, got torch.float16", {"q": torch.zeros(4, 4, 32, dtype=torch.float16)}),
    (ValueError, r"k: expected \[4, 2, 32\]", {"k": torch.zeros(3, 2, 32, dtype=torch.bfloat16)}),
    (ValueError, "there is no k_pool", {"k_pool": None}),
    (ValueError, "there is no k, v", {"k": None, "v": None}),
    (ValueError, r"v: expected \[4, 2, 32\]", {"v": torch.zeros(4, 1, 32, dtype=torch.bfloat16)}),
    (TypeError, "q_weight: expected torch.bfloat16", {"q_weight": torch.zeros(32)}),
    (TypeError, "table: expected torch.float32", {"table": torch.zeros(9, 32, dtype=torch.bfloat16)}),
    (ValueError, r"table: expected \[9, 32\]", {"table": torch.zeros(9, 16)}),
    (TypeError, "positions: expected torch.int32 or torch.int64", {"positions": torch.zeros(4)}),
    (ValueError, "slots: expected contiguous", {"slots": torch.zeros(8, dtype=torch.int64)[::2]}),
    (TypeError, "slot_map: expected torch.int32 or torch.int64", {"slot_map": torch.zeros(4)}),
    (ValueError, r"slot_map: expected \[4\]", {"slot_map": torch.zeros(2, 2, dtype=torch.int64)}),
    (TypeError, "k_pool: expected torch.bfloat16 or torch.float8_e4m3fn or torch.uint8", {"k_pool": torch.zeros(17, 2, 32)}),
    (TypeError, "both pools are of one type", {"v_pool": torch.zeros(17, 2, 32, dtype=torch.uint8)}),
    (ValueError, "v_pool: expected", {"v_pool": torch.zeros(16, 2, 32, dtype=torch.bfloat16)}),
    (ValueError, "heads must lie side by side", {"q": torch.zeros(4, 4, 64, dtype=torch.bfloat16)[..., ::2]}),
    (ValueError, "heads must lie side by side", {"q": torch.zeros(4, 8, 32, dtype=torch.bfloat16)[:, ::2]}),
    (ValueError, "may not overlap", {"q": torch.zeros(1, 4, 32, dtype=torch.bfloat16).expand(4, 4, 32)}),
    (ValueError, "k_scale: expected a positive number", {"k_scale": 0.5}),
    (ValueError, "v_scale: expected a positive number", {"v_scale": math.inf}),
    (ValueError, "on cpu, got", {"positions": torch.zeros(4, dtype=torch.int64, device="meta")}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "text", "changes"), REFUSED)
def test_refusals(error: type[Exception], text: str, changes: dict[str, Any]) -> None:
    call = call_of(Case(4, 4, 2, 32), **changes)
    with pytest.raises(error, match=text):
        qk_norm_rope_store(**call)


def test_the_cpu_needs_the_interpreter() -> None:
    with pytest.raises(ValueError, match="tensors on a GPU are needed"):
        qk_norm_rope_store(**call_of(Case(4, 4, 2, 32)))
