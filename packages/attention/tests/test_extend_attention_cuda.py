# SPDX-License-Identifier: Apache-2.0
"""The CUDA source of `extend_attention` on a model of a cluster of two blocks; planted faults; its addresses; what is refused; far rows on the GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from numinous_attention.kernels import extend_attention as kernels
from numinous_attention.kernels import extend_attention_cuda as cuda
from numinous_attention.workbench import extend_attention as bench
from numinous_attention.workbench.extend_attention import D512, OP, Case
from numinous_tooling.testing.tensors import big_pool
from numinous_tooling.testing.tiers import selection
from numinous_tooling.workbench import Tensors, case_id

CPU = torch.device("cpu")
SOURCES = Path(kernels.__file__).parents[1] / "csrc/extend_attention"
MODEL = Path(__file__).with_name("cluster_model.h")
BLOCK_MODEL = Path(__file__).parents[2] / "kv-cache-4bit/tests/sm90_model.h"
HARNESS = """
#include "kernel.cu"
static numinous::Params params;
static void once() { extend(params); }
extern "C" const char* run_model(const numinous::Params* p, unsigned blocks, unsigned heads, unsigned threads, unsigned shared) {
  params = *p;
  gridDim = {blocks, heads, 1};
  for (unsigned y = 0; y < heads; ++y)
    for (unsigned x = 0; x < blocks; x += 2) {
      model::block_index = {x, y, 0};
      if (const char* fault = model::run_cluster(once, threads, shared)) return fault;
    }
  return nullptr;
}
using namespace numinous;
extern "C" void be_eager(int eager) { model::eager = eager != 0; }
extern "C" void be_slow(int first, int second) { model::slowness[0] = first, model::slowness[1] = second; }
extern "C" unsigned plan_bytes() { return Plan::kBytes; }
extern "C" unsigned params_bytes() { return sizeof(Params); }
extern "C" unsigned element_at(int row, int chunk) { return swizzled(row, chunk); }
extern "C" float power(float n) { return power_of_two(n); }
"""


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`compiled(*changes)`: library of kernel.cu with `run_model`, some of its text replaced."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile kernel.cu with")
    folder = tmp_path_factory.mktemp("model")

    @functools.cache
    def build(*changes: tuple[str, str]) -> Any:
        here = folder / str(len(list(folder.iterdir())))
        shutil.copytree(SOURCES, here)
        for old, new in changes:
            found = [path for path in here.iterdir() if old in path.read_text(encoding="utf-8")]
            assert len(found) == 1, f"{old!r} is in {len(found)} files"
            text = found[0].read_text(encoding="utf-8")
            found[0].write_text(text.replace(old, new), encoding="utf-8")
        (here / "harness.cpp").write_text(HARNESS, encoding="utf-8")
        library = here / "model.so"
        command = [compiler, "-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-DNUMINOUS_DIM=512"]
        command += [f'-DNUMINOUS_MODEL="{MODEL}"', f'-DNUMINOUS_BLOCK_MODEL="{BLOCK_MODEL}"']
        done = subprocess.run(
            [*command, "-o", str(library), str(here / "harness.cpp")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[:2000]
        made = ctypes.CDLL(str(library))
        made.run_model.restype = ctypes.c_char_p
        return made

    return build


def run_call(library: Any, call: Any, debug: torch.Tensor | None = None) -> None:
    """What `launch_call` does, on the model."""
    assert not cuda.unfit(call)
    params = cuda.params_of(call, debug)
    sizes = (*cuda.grid_of(call), cuda.THREADS, cuda.SHARED)
    fault = library.run_model(ctypes.byref(params), *sizes)
    assert fault is None, fault.decode()


SCHEDULES = ((0, 0), (0, 12), (12, 0))  # turns of all threads that products of a block take


def run_model(library: Any, case: Case, inputs: Tensors, slow: tuple[int, int] = (0, 0)) -> Tensors:
    """Outputs; their memory starts as NaN where it is not given."""
    library.be_slow(*slow)
    options = bench._options(case)
    call = kernels._checked(
        *(inputs[x] for x in ("q", "k", "v", "k_pool", "v_pool")),
        *(inputs[x] for x in ("qo_indptr", "kv_indptr", "kv_indices")),
        options["sm_scale"], options["causal"], options["window"], None, None, None, False, case.cap,
        inputs.get("sinks"), 1.0, 1.0, inputs.get("out"), True,
    )  # fmt: skip
    assert call.lse is not None
    if "out" not in inputs:
        call.out.fill_(torch.nan)
    call.lse.fill_(torch.nan)
    if len(call.qo_indptr) > 1 and call.q.shape[0]:
        run_call(library, call)
    return bench._used(case, {"out": call.out, "lse": call.lse})


def check_schedules(library: Any, case: Case, inputs: Tensors, want: Tensors) -> None:
    """The blocks alike, and each slower than the other."""
    for slow in SCHEDULES:
        OP.compare(case, run_model(library, case, inputs, slow), want)


@pytest.mark.parametrize("case", D512, ids=case_id)
def test_source_on_the_model(
    compiled: Callable[..., Any], case: Case, request: pytest.FixtureRequest
) -> None:
    """All but what only hardware decides: proxies, the registers' handover, the meaning of instructions. Products, copies and messages are done
    as late as they may be; under --full as early as they may be, too."""
    library, inputs = compiled(), OP.make_inputs(case, 0, CPU)
    want = OP.reference(case, inputs)
    for eager in (0, 1) if selection(request.config).full else (0,):
        library.be_eager(eager)
        OP.compare(case, run_model(library, case, inputs), want)
    library.be_eager(0)


def steep(case: Case, device: torch.device) -> Tensors:
    """Inputs whose largest scores rise by many powers of two from tile to tile, fall for some rows, and are far apart between the blocks."""
    inputs = OP.make_inputs(case, 0, device)
    inputs["q"] = inputs["q"] * 8
    ids = inputs["kv_indices"]
    for place, factor in ((3, 4), (70, 8), (130, 12), (300, 16)):
        if place < len(ids):
            inputs["k_pool"][ids[place].long()] *= factor
    return inputs


STEEP = Case("9", "330", heads=2, dim=512)


def test_steep_scores_on_the_model(compiled: Callable[..., Any]) -> None:
    """Exponents that rise, in either block, rescale the output, the sums and what comes from the peer."""
    inputs = steep(STEEP, CPU)
    check_schedules(compiled(), STEEP, inputs, OP.reference(STEEP, inputs))


LONG = next(case for case in D512 if case.prefixes == "700")
RAGGED = next(case for case in D512 if case.heads == 6)
HOLES = next(case for case in D512 if case.layout == "padded")
FAULTS: dict[str, tuple[Case, str, str]] = {
    "rows swizzled by another row": (LONG, "((chunk ^ (row % 8)) * 16)", "((chunk ^ (row / 2 % 8)) * 16)"),
    "steps of Q mixed up": (LONG, "uint32_t(k / 4) * panel + uint32_t(k % 4 * 32)", "uint32_t(k / 4) * panel + uint32_t(k % 2 * 32)"),
    "steps of V mixed up": (LONG, "return uint32_t(k * 2048)", "return uint32_t(k * 1024)"),
    "the wrong half of V": (LONG, "fill(from + rank * kHalf", "fill(from + (1 - rank) * kHalf"),
    "the second stage of V like the first": (LONG, "stage < stages; ++stage, from += kStageDims)", "stage < stages; ++stage, from += stages == kVStages ? 0 : kStageDims)"),
    "a stage is not awaited": (LONG, "barrier_wait(base + Plan::kFull + 8 * ring.stage, ring.turn);\n    fence", "fence"),
    "a stage is filled while it is read": (LONG, "    barrier_wait(base + Plan::kEmpty + 8 * ring.stage, ring.turn ^ 1);\n", ""),
    "a stage is given back with products under way": (LONG, "wgmma_wait_but<1>();\n        give_back(before);", "give_back(before);"),
    "a stage is never given back": (LONG, "if (threadIdx.x % 32 == 0) barrier_arrive(base + Plan::kEmpty", "if (threadIdx.x == 0) barrier_arrive(base + Plan::kEmpty"),
    "scores are read while they are under way": (LONG, "        wgmma_wait_but<1>();  // scores are done\n", ""),
    "a message is not awaited": (LONG, "    wait_for_there(base + arrived, message & 1);\n", ""),
    "a message is overwritten": (LONG, "    if (pair > 0) wait_for_there(base + taken, (pair - 1) & 1);\n", ""),
    "the output is rescaled while products are under way": (STEEP, "    if constexpr (with_theirs) finish();\n    rise(now);", "    rise(now);\n    if constexpr (with_theirs) finish();"),
    "values of the peer's tile behind its own": (LONG, "their_tile = -1 - rank;", "their_tile = 1 - rank;"),
    "the peer's sums are left out": (LONG, "sum[r] + load_shared(base + sums + 4 * fragment_row(thread, 2 * r))", "sum[r]"),
    "the peer's exponent is not taken": (STEEP, "now[r] = fmaxf(most[r], exponent[r]);", "now[r] = most[r];"),
    "probabilities of the peer are not brought down": (STEEP, "by[i % 2]);", "0x3f803f80u);"),
    "rows of the peer's probabilities mixed up": (STEEP, "by[i % 2]);", "by[i / 2 % 2]);"),
    "the output is not rescaled": (STEEP, "o[stage][i] *= alpha[i % 4 / 2];", "o[stage][i] *= 1.0f;"),
    "sums are not rescaled": (STEEP, "sum[r] *= alpha[r];", ""),
    "ids that are none count": (HOLES, "own.low[i] < 0 ? -kInf : 0.0f", "0.0f"),
    "ids that are none are the first slot": (HOLES, "low[i] = -1;\n", "low[i] = 0;\n"),
    "upper halves of ids count": (D512[4], "(p.wide_ids ? 2 : 1)", "1"),
    "the diagonal one late": (LONG, "p.causal && of < limit ? of : limit - 1", "p.causal && of < limit ? of + 1 : limit - 1"),
    "the window one late": (D512[10], ": of + shift - p.window;", ": of + shift - p.window + 1;"),
    "prefix window a tile late": (D512[12], "first_key(w.prefix + w.first - p.window)", "first_key(w.prefix + w.first - p.window + kKeys)"),
    "masks only at the diagonal": (D512[12], "if (lowest(w.last) > start || ", "if ("),
    "the wrong head of a group": (RAGGED, "w.kv_head * p.group + at % p.group", "w.kv_head + at % p.group"),
    "tiles of a request mixed up": (RAGGED, "first_token * group / kRows + request", "first_token * group / kRows"),
    "the sink in the wrong base": (RAGGED, "sink * kLog2E - off", "sink - off"),
    "an odd last tile is left out": (RAGGED, "const auto own_tiles = [&]() { return (w.tiles + 1 - rank) / 2; };", "const auto own_tiles = [&]() { return w.tiles / 2; };"),
}  # fmt: skip
QUICK_FAULTS = (
    "rows swizzled by another row",
    "the wrong half of V",
    "a stage is filled while it is read",
    "a message is overwritten",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_on_the_model(
    compiled: Callable[..., Any], fault: str, request: pytest.FixtureRequest
) -> None:
    """What the model has to see: wrong addresses, masks, exponents, barriers, messages."""
    if fault not in QUICK_FAULTS and not selection(request.config).full:
        pytest.skip("not in the quick selection: --full compiles and runs it")
    case, old, new = FAULTS[fault]
    inputs = steep(case, CPU) if case is STEEP else OP.make_inputs(case, 0, CPU)
    want = OP.reference(case, inputs)
    with pytest.raises(AssertionError, match=r"out|lse|threads wait|nobody waits|under way|counts"):
        check_schedules(compiled((old, new)), case, inputs, want)


def test_debug_script_on_the_model(
    compiled: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: Any, request: pytest.FixtureRequest
) -> None:  # fmt: skip
    """Every stage that the debug script prints agrees; with steps of Q mixed up, S is the first that does not."""
    if not selection(request.config).full:
        pytest.skip("not in the quick selection: --full compiles and runs it")
    path = Path(__file__).parents[1] / "benchmarks/debug_extend_attention.py"
    spec = importlib.util.spec_from_file_location("debug_extend_attention", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    define = ("constexpr int kRows = 128;", "#define NUMINOUS_DEBUG 1\nconstexpr int kRows = 128;")
    _, *fault = FAULTS["steps of Q mixed up"]
    for faults in ((), (tuple(fault),)):
        library = compiled(define, *faults)
        library.be_slow(0, 0)
        monkeypatch.setattr(
            cuda, "launch_call", lambda call, dump, to=library: run_call(to, call, dump)
        )
        assert script.check(128, 16, CPU) == bool(faults)
        printed = capsys.readouterr().out
        assert printed.count("agrees") == (2 if faults else 8), printed
        assert "V, first half [key, dimension]: agrees" in printed


# --- Addresses and numbers ------------------------------------------------------------------------------------------


def test_layout(compiled: Callable[..., Any]) -> None:
    """Shared memory and arguments as the launcher gives them; every chunk of a panel stored once, without bank conflicts."""
    library = compiled()
    library.power.restype = ctypes.c_float
    assert library.plan_bytes() == cuda.SHARED <= 232448
    assert library.params_bytes() == ctypes.sizeof(cuda.Params)
    seen = [library.element_at(row, chunk) for row in range(64) for chunk in range(8)]
    assert sorted(seen) == list(range(0, 64 * 128, 16))
    for first in range(0, len(seen), 8):  # eight threads store together
        assert len({at // 16 % 8 for at in seen[first : first + 8]}) == 8
    for n in (0, -1, -126):
        assert library.power(ctypes.c_float(n)) == 2.0**n
    for n in (-127, -1e30, -float("inf")):
        assert library.power(ctypes.c_float(n)) == 0.0


def far_inputs(ids: str, device: torch.device) -> tuple[Case, Tensors]:
    """Slots behind element 2^31 of the pools, strides of 2^30 elements in q, k and v."""
    case = Case("3", "70", heads=4, dim=512, ids=ids)
    inputs = OP.make_inputs(case, 0, device)
    for name in ("k_pool", "v_pool"):
        pool, near = big_pool((1, 512), torch.bfloat16, device), inputs[name]
        pool[len(pool) - len(near) :] = near
        inputs[name], moved = pool, len(pool) - len(near)
    inputs["kv_indices"] = inputs["kv_indices"] + moved
    for name in ("q", "k", "v"):
        near = inputs[name]
        whole = big_pool((16,), torch.bfloat16, device, elements=2**31 + 8192).flatten()
        far = whole.as_strided(near.shape, (2**30 + 16, 512, 1))
        far[:] = near
        inputs[name] = far
    return case, inputs


@pytest.mark.parametrize("ids", ["int32", "int64"])
def test_past_2_31_elements_on_the_model(compiled: Callable[..., Any], ids: str) -> None:
    case, inputs = far_inputs(ids, CPU)
    OP.compare(case, run_model(compiled(), case, inputs), OP.reference(case, inputs))


def test_sinks_in_bf16_on_the_model(compiled: Callable[..., Any]) -> None:
    """The bits of the same numbers in fp32."""
    case = Case("5", "5", heads=4, sink=True, dim=512)
    inputs = OP.make_inputs(case, 0, CPU)
    inputs["sinks"] = inputs["sinks"].bfloat16()
    one = run_model(compiled(), case, inputs)["out"]
    inputs["sinks"] = inputs["sinks"].float()
    other = run_model(compiled(), case, inputs)["out"]
    assert torch.equal(one.view(torch.int16), other.view(torch.int16))


def test_pointers_beyond_their_lists_on_the_model(compiled: Callable[..., Any]) -> None:
    """Rows and ids end where their tensors do; rows that belong to no request are left alone."""
    case = Case("6_5", "9_20", dim=512, layout="padded")
    inputs = OP.make_inputs(case, 1, CPU)  # 5 and 6 rows behind 20 and 9 ids
    inputs |= {x: inputs[x].nan_to_num() for x in ("q", "k", "v")}
    inputs["qo_indptr"][:] = torch.tensor([2, 8, 99])
    inputs["kv_indptr"][:] = torch.tensor([3, 15, 1000])
    call = _checked(case, inputs)
    compiled().be_slow(0, 0)
    run_call(compiled(), call)
    ends = {"qo_indptr": [2, 8, len(call.out)], "kv_indptr": [3, 15, 29]}
    tables = {name: torch.tensor(values) for name, values in ends.items()}
    want = kernels.reference(**{**inputs, **tables}, **bench._options(case))
    assert bool((call.out[:2] == 7.0).all())
    torch.testing.assert_close(call.out[2:].double(), want["out"][2:], rtol=0.02, atol=0.02)


MORE = (
    Case("30", "5", heads=5, dim=512),
    Case("40_0_0_3", "0_9_0_70", heads=7, dim=512),  # requests without a chunk between, one of them with a prefix
    Case("17", "64", heads=16, dim=512),
    Case("9_1", "65_0", heads=32, dim=512),
    Case("3", "10", heads=128, dim=512),
    Case("2_2", "10_1", heads=130, dim=512),  # a token's heads in two tiles
    Case("130", "3", heads=4, kv_heads=4, dim=512),
    Case("66", "130", heads=2, dim=512, window=0, causal=False),
    Case("70", "70", heads=2, dim=512, window=1, causal=False),
    *(Case("10", "200", heads=2, dim=512, window=w, cap=2.0, sink=True, holes=True) for w in (63, 64, 65)),
    Case("200", "0", heads=3, dim=512, window=100000),
    Case("65", "63", heads=2, dim=512, causal=False, layout="sliced"),
)  # fmt: skip
"""Group sizes, empty requests, windows at the borders of tiles, which `D512` has not."""


@pytest.mark.parametrize("case", MORE, ids=case_id)
def test_more_shapes_on_the_model(compiled: Callable[..., Any], case: Case) -> None:
    inputs = OP.make_inputs(case, 0, CPU)
    OP.compare(case, run_model(compiled(), case, inputs), OP.reference(case, inputs))


POISONS: dict[str, tuple[str, tuple[int, ...], float]] = {
    "NaN in a row of q": ("q", (2, 1, 7), torch.nan),
    "NaN in a key of the chunk": ("k", (5, 0, 7), torch.nan),
    "NaN in a key of the prefix": ("k_pool", (100, 1, 7), torch.nan),
    "a sink of inf": ("sinks", (1,), torch.inf),
    "a sink of -inf": ("sinks", (1,), -torch.inf),
    "a sink of NaN": ("sinks", (1,), torch.nan),
    "an id of the slots' number": ("kv_indices", (3,), 156),
    "an id of 2^31": ("kv_indices", (3,), 2**31),
    "an id of 2^32": ("kv_indices", (3,), 2**32),
    "the least id": ("kv_indices", (3,), -(2**63)),
}


@pytest.mark.parametrize("window", [-1, 42])
@pytest.mark.parametrize("poison", POISONS)
def test_poison_on_the_model(compiled: Callable[..., Any], poison: str, window: int) -> None:
    """It is in the rows that see it and in no other."""
    case = Case("9_4", "140_3", heads=4, kv_heads=2, dim=512, sink=True, ids="int64", window=window)
    inputs = OP.make_inputs(case, 0, CPU)
    assert len(inputs["k_pool"]) < 2**16
    name, at, value = POISONS[poison]
    if name == "k_pool":
        at = (int(inputs["kv_indices"][at[0]]), *at[1:])
    if value == 156:
        value = len(inputs["k_pool"])
    inputs[name][at] = value
    compiled().be_slow(0, 0)
    got, want = run_model(compiled(), case, inputs), OP.reference(case, inputs)
    for output in ("out", "lse"):
        torch.testing.assert_close(
            got[output].double(), want[output], rtol=0.03, atol=0.03, equal_nan=True
        )


def test_strided_out_on_the_model(compiled: Callable[..., Any]) -> None:
    """Nothing beside it is written."""
    case = Case("9_4", "70_3", heads=4, kv_heads=2, dim=512)
    inputs = OP.make_inputs(case, 0, CPU)
    whole = torch.full((13, 9, 520), 7.0, dtype=torch.bfloat16)
    out = whole[:, ::2, 8:][:, :4]
    OP.compare(
        case, run_model(compiled(), case, {**inputs, "out": out}), OP.reference(case, inputs)
    )
    out.fill_(7.0)
    assert bool((whole == 7.0).all())


# --- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "float32"}, "takes q and pools in bfloat16"),
        ({"pool": "fp8"}, "takes q and pools in bfloat16"),
        ({"dim": 256}, "takes head dim 512, got 256 and 256"),
        ({"dim_v": 256}, "takes head dim 512, got 512 and 256"),
        ({"mask": "tree"}, "takes no mask"),
    ],
)
def test_calls_that_are_not_for_cuda(change: dict[str, Any], text: str) -> None:
    case = Case(**{"chunks": "2", "prefixes": "3", "dim": 512, **change})
    assert text in cuda.unfit(_checked(case, OP.make_inputs(case, 0, CPU)))
    assert bool(bench._cuda_refuses(case))


def _checked(case: Case, inputs: Tensors, **how: Any) -> Any:
    options = {**bench._options(case), **how}
    tensors = [inputs[x] for x in ("q", "k", "v", "k_pool", "v_pool")]
    tables = [inputs[x] for x in ("qo_indptr", "kv_indptr", "kv_indices")]
    masks = [inputs.get(x) for x in ("mask", "mask_indptr", "mask_offsets")]
    return kernels._checked(
        *tensors, *tables, options["sm_scale"], options["causal"], options["window"], *masks, case.mask_prefix, case.cap,
        inputs.get("sinks"), options["k_scale"], options["v_scale"], inputs.get("out"), True,
    )  # fmt: skip


def test_strides_and_scales_that_are_not_for_cuda() -> None:
    case = Case("2", "3", dim=512)
    inputs = OP.make_inputs(case, 0, CPU)
    assert not cuda.unfit(_checked(case, inputs))
    for scale in ("k_scale", "v_scale"):
        assert "no scales" in cuda.unfit(_checked(case, inputs, **{scale: 0.5}))
    inputs["out"] = torch.empty_like(inputs["q"])
    for name in ("q", "k", "v", "k_pool", "v_pool", "out"):
        rows, heads, dim = inputs[name].shape
        odd = torch.zeros(rows, heads, dim + 4, dtype=torch.bfloat16)
        for one in (odd[..., :dim], odd.flatten()[4:][: rows * heads * dim].view(rows, heads, dim)):
            reason = cuda.unfit(_checked(case, {**inputs, name: one}))
            assert f"needs heads of {name} at multiples of 16 bytes" in reason


def test_more_than_a_grid_or_an_id_can_name() -> None:
    case = Case("1", "0", heads=1, dim=512)
    inputs = OP.make_inputs(case, 0, CPU)
    one = inputs["k_pool"][:1]
    for slots, heads, taken in ((2**31 - 1, 1, True), (2**31, 1, False), (1, 2**16, False)):
        many = {x: one.expand(slots, heads, -1) for x in ("k_pool", "v_pool")}
        many |= {x: one.expand(1, heads, -1) for x in ("q", "k", "v")}
        reason = cuda.unfit(_checked(case, {**inputs, **many}))
        assert reason == ("" if taken else "takes fewer than 2^31 slots and 2^16 KV heads")


def test_whom_a_call_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `impl` Triton where CUDA C++ refuses; nobody where there is nothing to do."""
    case = Case("2", "3", dim=512)
    inputs, reached = OP.make_inputs(case, 0, CPU), []
    monkeypatch.setattr(kernels, "_launch", lambda call: reached.append("triton"))
    monkeypatch.setattr(cuda, "launch_call", lambda call: reached.append("cuda"))
    for reason, impl, want in (
        ("", None, ["cuda"]),
        ("", "cuda", ["cuda"]),
        ("", "triton", ["triton"]),
        ("needs heads of q at multiples of 16 bytes", None, ["triton"]),
    ):
        monkeypatch.setattr(cuda, "not_taken", lambda call, reason=reason: reason)
        reached.clear()
        kernels.extend_attention(**inputs, **bench._options(case), impl=impl)
        assert reached == want
        nothing = OP.make_inputs(Case("", "", dim=512), 0, CPU)
        kernels.extend_attention(**nothing, **bench._options(case), impl=impl)
        assert reached == want


def test_a_launch_is_on_the_device_of_q_and_its_current_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("300_2", "3_9", heads=6, kv_heads=2, dim=512)
    call = _checked(case, OP.make_inputs(case, 0, CPU))
    current, launched = ["cuda:0"], []

    @contextlib.contextmanager
    def device(of: torch.device) -> Any:
        before, current[0] = current[0], str(of)
        yield
        current[0] = before

    def kernel(grid: Any, block: int, args: Any, **options: Any) -> None:
        launched.append((grid, block, options))

    def load(package: str, binary: Any, *, entry: str) -> Any:
        assert current == ["cpu"]  # where q is
        return kernel

    class Stream:
        def __init__(self) -> None:
            self.cuda_stream = {"cuda:0": 5, "cpu": 7}[current[0]]

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(cuda.launch, "load", load)
    cuda.launch_call(call)
    # 906 rows of 128 are 7 whole tiles; one more for each request.
    assert launched == [((2 * (7 + 2), 2), cuda.THREADS, {"shared": cuda.SHARED, "stream": 7})]
    assert current == ["cuda:0"]


def test_cuda_is_asked_for() -> None:
    """On the CPU "cuda" is refused in one line, None and "triton" are not; an unknown word is an error."""
    case = Case("", "", dim=512)
    inputs = OP.make_inputs(case, 0, CPU)
    with pytest.raises(NotImplementedError, match="needs tensors on an NVIDIA GPU") as raised:
        kernels.extend_attention(**inputs, **bench._options(case), impl="cuda")
    assert "\n" not in str(raised.value)
    for impl in (None, "triton"):
        kernels.extend_attention(**inputs, **bench._options(case), impl=impl)
    with pytest.raises(ValueError, match="impl is 'cuda', 'triton' or None"):
        kernels.extend_attention(**inputs, **bench._options(case), impl="hip")


def test_choice_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call that it takes; never on another GPU."""
    case = Case("2", "3", dim=512)
    call = _checked(case, OP.make_inputs(case, 0, CPU))

    class Elsewhere:
        device = torch.device("cuda")

        def __getattr__(self, name: str) -> Any:
            return getattr(call.q, name)

    there = call._replace(q=Elsewhere())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda, "_missing", lambda device: "")
    assert cuda.not_taken(there) == ""
    monkeypatch.setattr(cuda, "_missing", lambda device: "no machine code")
    assert cuda.not_taken(there) == "no machine code"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert "compute capability 9.0, this is 10.0" in cuda.not_taken(there)


def test_without_machine_code_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("no machine code for this GPU")

    monkeypatch.setattr(cuda.launch, "load", load)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    cuda._missing.cache_clear()
    try:
        for _ in range(2):
            assert cuda._missing(torch.device("cuda", 0)) == "no machine code for this GPU"
    finally:
        cuda._missing.cache_clear()
    assert [record.message for record in caplog.records] == ["extend_attention: Triton in place of CUDA C++: no machine code for this GPU"]  # fmt: skip


# --- On the GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.tier("device", archs=("sm90",))
def test_steep_scores_on_the_gpu(gpu: torch.device) -> None:
    """Exponents that rise; the same bits every time."""
    inputs = steep(STEEP, gpu)
    first, again = (bench._run_cuda(STEEP, inputs) for _ in range(2))
    OP.compare(STEEP, first, OP.reference(STEEP, inputs))
    assert torch.equal(first["out"], again["out"])
    assert torch.equal(first["lse"], again["lse"])


@pytest.mark.tier("device", archs=("sm90",))
@pytest.mark.parametrize("case", MORE, ids=case_id)
def test_more_shapes_on_the_gpu(case: Case, gpu: torch.device) -> None:
    inputs = OP.make_inputs(case, 0, gpu)
    OP.compare(case, bench._run_cuda(case, inputs), OP.reference(case, inputs))


@pytest.mark.tier("device", archs=("sm90",))
def test_the_first_call_may_be_captured(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine code is loaded inside the capture."""
    inputs = OP.make_inputs(STEEP, 0, gpu)
    want = OP.reference(STEEP, inputs)
    monkeypatch.setattr(cuda.launch, "_state", cuda.launch._State())
    cuda._missing.cache_clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = kernels.extend_attention(**inputs, **bench._options(STEEP), with_lse=True)
    assert cuda.not_taken(_checked(STEEP, inputs)) == ""
    graph.replay()
    assert made.lse is not None
    OP.compare(STEEP, {"out": made.out, "lse": made.lse}, want)


@pytest.mark.tier("device", archs=("sm90",))
@pytest.mark.parametrize("ids", ["int32", "int64"])
def test_past_2_31_elements_on_the_gpu(ids: str, gpu: torch.device) -> None:
    case, inputs = far_inputs(ids, gpu)
    OP.compare(case, bench._run_cuda(case, inputs), OP.reference(case, inputs))


@pytest.mark.tier("device", archs=("sm90",))
def test_without_lse_and_by_triton(gpu: torch.device) -> None:
    """No lse where none is asked for; both versions give the same within rounding, on the shapes that are measured but shorter."""
    for case in (
        Case("1024", "0", 32, 4, 512),
        Case("300", "2500", 32, 4, 512),
        Case("700", "900", 32, 4, 512, window=300),
    ):
        inputs = OP.make_inputs(case, 0, gpu)
        options = bench._options(case)
        made = kernels.extend_attention(**inputs, **options, impl="cuda")
        assert made.lse is None
        other = kernels.extend_attention(**inputs, **options, impl="triton").out
        torch.testing.assert_close(made.out.float(), other.float(), rtol=0.02, atol=0.02)
