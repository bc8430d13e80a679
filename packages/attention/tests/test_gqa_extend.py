# SPDX-License-Identifier: Apache-2.0
"""`attention.gqa_extend` and `attention.split_verify` without a served engine: what the dispatcher takes and how, what it leaves to stock, what ends at boot.

Calls are in the engine's terms. What comes out is compared with the kernel's specification, with the engine's own kernel in the interpreter
(`--full`), and on a GPU with both.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from numinous_attention.engine import gqa_extend as ours
from numinous_attention.engine import split_verify as split
from numinous_attention.engine.gqa_extend import GqaExtend
from numinous_attention.hooks import split_verify as split_hook
from numinous_attention.hooks.gqa_extend import (
    FEATURE,
    TRITON_BY_DEFAULT,
    UNCOVERED,
    judge,
)
from numinous_attention.options import LAYERS, MAX_DRAFTS, MIN_CHUNK, SPLIT_VERIFY
from numinous_attention.workbench import extend_attention as bench
from numinous_attention.workbench.extend_attention import OP, Case
from numinous_tooling.patching.boot import fits
from numinous_tooling.patching.engine import find_engine
from numinous_tooling.patching.serve_command import FIELDS, ServeCommand
from numinous_tooling.testing.tiers import selection
from numinous_tooling.workbench import Tensors, case_id

CPU = torch.device("cpu")
EXTEND = "sglang.kernels.ops.attention.extend_attention"


class Count:
    """Counters that can be read back."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def engaged(self, n: int = 1) -> None:
        self.seen += ["engaged"] * n

    def refused(self, reason: str, n: int = 1) -> None:
        self.seen += [reason] * n


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Count:
    count = Count()
    monkeypatch.setattr(ours, "count", count)
    return count


def never(*given: Any, **named: Any) -> None:
    pytest.fail("stock was called")


def dispatcher(stock: Callable[..., None] = never, module: Any = ours, **how: Any) -> Any:
    return module.GqaExtend(stock, **{"layers": "all", "min_chunk": 1, **how})


def engine_call(case: Case, inputs: Tensors) -> tuple[list[Any], dict[str, Any]]:
    """The call as `TritonAttnBackend.forward_extend` makes it; o starts as NaN, or as the case has it."""
    options = bench._options(case)
    q = inputs["q"]
    o = inputs.get("out")
    if o is None:
        o = torch.full((*q.shape[:2], case.value_dim), torch.nan, dtype=q.dtype, device=q.device)
    # Tables may be longer than the batch, ids than the tables say; a mask comes with is_causal, an indptr without a mask.
    kv_indptr = torch.cat([inputs["kv_indptr"], inputs["kv_indptr"][:1]])
    ids = torch.cat([inputs["kv_indices"], inputs["kv_indices"].new_full((9,), 2**31 - 1)])
    given = [
        q, inputs["k"], inputs["v"], o.clone(), inputs["k_pool"], inputs["v_pool"], inputs["qo_indptr"], kv_indptr, ids,
        inputs.get("mask"), case.causal or bool(case.mask), inputs.get("mask_indptr", inputs["qo_indptr"]),
        max(case.lengths[0]), options["k_scale"], options["v_scale"], options["sm_scale"],
    ]  # fmt: skip
    named = {
        "logit_cap": case.cap, "sliding_window_size": case.window, "sinks": inputs.get("sinks"),
        "window_kv_offsets": inputs.get("mask_offsets"), "xai_temperature_len": -1, "page_size": 16, "score_mod": None,
        "aux_tensors": None, "extend_seq_lens_cpu": case.lengths[0],
    }  # fmt: skip
    if case.mask_prefix:
        named["skip_prefix_custom_mask"] = False
    return given, named


def judged(case: Case, inputs: Tensors, o: torch.Tensor) -> None:
    """Compare with the kernel's specification."""
    want = OP.reference(case, inputs)
    OP.compare(case, {"out": o, "lse": want["lse"]}, want)


# --- What is taken --------------------------------------------------------------------------------------------------

TAKEN = (
    Case("9_0_17", "0_5_33", heads=6, kv_heads=2, dim=32, layout="padded"),
    Case("20_3", "18_0", dim=96, dim_v=64, ids="int64", layout="sliced"),
    Case("5", "20", heads=3, dim=32, dim_v=16, pool="fp8", kind="float32"),
    Case("4", "7", heads=4, dim=16, causal=False, cap=3.0, sink=True),
    Case("20", "9", window=7, dim=16, kind="float32"),
    Case("7_4", "19_0", mask="tree", causal=False, dim=32, kind="float32"),
    Case("18", "5", mask="span", causal=False, dim=16, lost=3, mask_prefix=True, window=12),
    Case("3", "4", heads=4, kv_heads=1, dim=512),
)


@pytest.mark.tier("interpret")
@pytest.mark.parametrize("case", TAKEN, ids=case_id)
def test_what_is_taken(case: Case, counted: Count) -> None:
    inputs = OP.make_inputs(case, 0, CPU)
    given, named = engine_call(case, inputs)
    dispatcher()(*given, **named)
    assert counted.seen == ["engaged"]
    judged(case, inputs, given[3])


@pytest.mark.tier("interpret")
def test_the_engines_ways_to_say_none(counted: Count) -> None:
    """A window of 0 or -1, a cap of -1, an sm_scale of None or 0, offsets without a window: what they leave out is left out."""
    case = Case("7", "19", mask="tree", causal=False, dim=32, kind="float32")
    inputs = OP.make_inputs(case, 0, CPU)
    given, named = engine_call(case, inputs)
    for window, cap, scale in ((0, -1.0, None), (-1, 0.0, 0.0)):
        changed = {"sliding_window_size": window, "logit_cap": cap, "window_kv_offsets": torch.tensor([5])}  # fmt: skip
        given[3].fill_(torch.nan)
        dispatcher()(*given[:-1], scale, **named | changed)
        judged(case, inputs, given[3])
    assert counted.seen == ["engaged"] * 2


FAULTS = {
    "a window of 0 hides all but the token": (Case("9", "4", window=0, dim=16), "sliding_window_size > 0", "sliding_window_size >= 0"),
    "causality beside a mask": (TAKEN[6], "causal=is_causal and custom_mask is None", "causal=is_causal"),
    "the prefix of a mask": (TAKEN[6], "and not skip_prefix_custom_mask", "and skip_prefix_custom_mask"),
    "columns of a lost prefix": (TAKEN[6], "mask_offsets=offsets", "mask_offsets=None"),
    "scales swapped": (TAKEN[2], "k_scale=k_scale", "k_scale=v_scale"),
    "the scale of the values' dim": (TAKEN[2], "q_extend.shape[-1] ** -0.5", "v_extend.shape[-1] ** -0.5"),
    "no sinks": (TAKEN[3], "sinks=sinks", "sinks=None"),
    "no cap": (TAKEN[3], "logit_cap=max(logit_cap, 0.0)", "logit_cap=0.0"),
    "no window": (TAKEN[4], "window=window", "window=None"),
}  # fmt: skip


@pytest.mark.tier("interpret")
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults(fault: str, tmp_path: Path) -> None:
    """The comparison sees a fault in what the dispatcher hands on."""
    case, old, new = FAULTS[fault]
    text = Path(ours.__file__).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times"
    path = tmp_path / "faulty.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("numinous_attention.engine.faulty", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    inputs = OP.make_inputs(case, 0, CPU)
    given, named = engine_call(case, inputs)
    if "dim" in fault:
        given[-1] = None
    dispatcher(module=module)(*given, **named)
    if not case.window:
        case = dataclasses.replace(case, window=-1)  # what the engine means
    with pytest.raises(AssertionError, match="elements out of bounds"):
        judged(case, inputs, given[3])


@pytest.mark.tier("interpret")
@pytest.mark.filterwarnings("ignore")  # of the engine's kernel in the interpreter
def test_stock_in_the_interpreter(request: pytest.FixtureRequest, counted: Count) -> None:
    """The engine's own function on the very same call, in fp32: bf16 products are wrong in the interpreter."""
    if not selection(request.config).full:
        pytest.skip("not in the quick selection: --full imports the engine")
    stock = pytest.importorskip(EXTEND, reason="compares with the engine").extend_attention_fwd
    for case in TAKEN:
        case = dataclasses.replace(case, kind="float32", pool="own")
        inputs = OP.make_inputs(case, 0, CPU)
        inputs |= {x: inputs[x].nan_to_num() for x in ("q", "k", "v")}
        made = []
        for function in (dispatcher(), stock):
            given, named = engine_call(case, inputs)
            function(*given, **named)
            made.append(given[3])
        torch.testing.assert_close(*made, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert counted.seen == ["engaged"] * len(TAKEN)


# --- On a GPU -------------------------------------------------------------------------------------------------------

# Of Triton, where it compiles the engine's kernel with a mask of bytes.
STOCKS_MASKS = "ignore:tl.where with a non-boolean condition is deprecated:UserWarning"

ON_GPU = (
    *(case for case in bench.LARGE if not case.holes),
    Case("300_17", "700_90", 16, 4, 512, pool="fp8"),
    Case("1000", "0", 8, 4, 256, window=100, pool="fp8"),
)


@pytest.mark.tier("device")
@pytest.mark.filterwarnings(STOCKS_MASKS)
@pytest.mark.parametrize("case", ON_GPU, ids=case_id)
def test_on_the_gpu(case: Case, gpu: torch.device, counted: Count) -> None:
    """Against the specification, and against the engine's function as far as its own roundings and its cut of masks let it be."""
    stock = pytest.importorskip(EXTEND, reason="compares with the engine").extend_attention_fwd
    if case.mask and not case.lost:
        case = dataclasses.replace(case, window=-1)
    inputs = OP.make_inputs(case, 0, gpu)
    given, named = engine_call(case, inputs)
    dispatcher()(*given, **named)
    assert counted.seen == ["engaged"]
    judged(case, inputs, given[3])
    if case.mask == "span":
        return
    ours_made = given[3].float()
    given, named = engine_call(case, inputs)
    stock(*given, **named)
    # Queries and probabilities in FP8 have four significant bits.
    loose = 0.15 if case.pool == "fp8" else 0.02
    torch.testing.assert_close(ours_made, given[3].float(), rtol=loose, atol=loose)


@pytest.mark.tier("device")
@pytest.mark.parametrize(
    "case",
    [
        Case("4_9_2", "90_300_7", 8, 1, 512),
        Case("4_4_4", "90_300_7", 8, 2, 256, mask="tree", causal=False),
    ],
    ids=case_id,
)
def test_captured_on_the_gpu(case: Case, gpu: torch.device, counted: Count) -> None:
    """A graph of the call is replayed with the lengths, ids and values of another batch; it counts at its capture."""
    inputs, others = (OP.make_inputs(case, seed, gpu) for seed in (0, 1))
    given, named = engine_call(case, inputs)
    call = dispatcher()
    call(*given, **named)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(*given, **named)
    for tensor, other in zip(given, engine_call(case, others)[0], strict=True):
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    judged(case, others, given[3])
    assert counted.seen == ["engaged"] * 2


# --- What is stock's ------------------------------------------------------------------------------------------------


def small_call(**change: Any) -> tuple[list[Any], dict[str, Any]]:
    """A call of three tokens that is covered, with some arguments replaced."""
    case = Case("3", "2", dim=16)
    given, named = engine_call(case, OP.make_inputs(case, 0, CPU))
    names = list(inspect.signature(GqaExtend.attend).parameters)[1:]
    for name, value in change.items():
        at = names.index(name)
        if callable(value):
            value = value(given[at])
        if at < len(given):
            given[at] = value
        else:
            named[name] = value
    return given, named


def to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.to(dtype)


def every_second(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x], dim=-1)[..., ::2]


FP8, HALF = torch.float8_e4m3fn, torch.float16
MASK = torch.ones(15, dtype=torch.uint8)
LEFT: dict[str, list[dict[str, Any]]] = {
    "score_mod": [{"score_mod": object()}, {"aux_tensors": [MASK]}],
    "xai_temperature": [{"xai_temperature_len": 8}],
    "part_of_an_attention": [{"lse_extend": MASK}, {"skip_prefix": True}, {"skip_extend": True}, {"identity_kv_indices": True}],
    "dtype": [{"q_extend": to(HALF)}, {"k_extend": to(FP8)}, {"v_extend": to(HALF)}, {"o_extend": to(torch.float32)}],
    "cache_dtype": [{"k_buffer": to(HALF), "v_buffer": to(HALF)}, {"k_buffer": to(FP8)}, {"k_buffer": to(torch.float8_e5m2), "v_buffer": to(torch.float8_e5m2)}],
    "head_dim": [dict.fromkeys(("q_extend", "k_extend", "k_buffer"), lambda x: x.repeat(1, 1, 36)), dict.fromkeys(("v_extend", "o_extend", "v_buffer"), lambda x: x[..., :8])],
    "shape": [dict.fromkeys(("k_extend", "v_extend"), lambda x: x[:0]), {"k_extend": lambda x: torch.cat([x, x])}, {"v_buffer": lambda x: x[1:]}, {"k_buffer": lambda x: x.repeat(1, 2, 1)}, {"q_extend": lambda x: x[:, :1].repeat(1, 3, 1), "o_extend": lambda x: x[:, :1].repeat(1, 3, 1), **dict.fromkeys(("k_extend", "v_extend", "k_buffer", "v_buffer"), lambda x: x.repeat(1, 2, 1))}],
    "strides": [{"q_extend": every_second}, {"v_buffer": every_second}],
    "no_ids": [{"kv_indices": None}],
    "scale": [{"k_scale": 0.0}, {"v_scale": float("inf")}, {"k_scale": torch.tensor(1.0)}],
    "sinks_dtype": [{"sinks": torch.zeros(2, dtype=HALF)}],
    "mask_dtype": [{"custom_mask": MASK.int()}],
    "no_mask_offsets": [{"custom_mask": MASK, "sliding_window_size": 4}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        pytest.param(reason, change, id=f"{reason}-{number}")
        for reason, changes in LEFT.items()
        for number, change in enumerate(changes)
    ],
)
def test_what_is_left_to_stock(
    reason: str, change: dict[str, Any], counted: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock gets the very arguments, once; the kernel gets nothing."""
    monkeypatch.setattr(ours, "extend_attention", never)
    given, named = small_call(**change)
    calls: list[Any] = []
    dispatcher(lambda *of, **by: calls.append((of, by)))(*given, **named)
    assert counted.seen == [reason]
    ((of, by),) = calls
    assert all(one is other for one, other in zip(of, given, strict=True))
    assert by == named


@pytest.mark.parametrize(
    ("how", "window", "taken"),
    [
        ({}, 4, "engaged"),
        ({"layers": "windowed"}, 4, "engaged"),
        ({"layers": "windowed"}, 0, "layer_choice"),
        ({"layers": "windowed"}, -1, "layer_choice"),
        ({"layers": "full"}, 4, "layer_choice"),
        ({"layers": "full"}, -1, "engaged"),
        ({"min_chunk": 3}, 4, "engaged"),
        ({"min_chunk": 4}, 4, "short_chunk"),
    ],
)
def test_options(
    how: dict[str, Any], window: int, taken: str, counted: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(ours, "extend_attention", lambda *of, **by: calls.append("engaged"))
    given, named = small_call(sliding_window_size=window)
    dispatcher(lambda *of, **by: calls.append(taken), **how)(*given, **named)
    assert counted.seen == calls == [taken]


def test_errors_of_the_kernel_are_not_hidden(counted: Count, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """A fault of ours must not pass for a call that is not covered."""

    def broken(*given: Any, **named: Any) -> None:
        raise ValueError("of ours")

    monkeypatch.setattr(ours, "extend_attention", broken)
    given, named = small_call()
    with pytest.raises(ValueError, match="of ours"):
        dispatcher()(*given, **named)
    assert counted.seen == []


# --- Boot -----------------------------------------------------------------------------------------------------------


def backend_of(**change: Any) -> tuple[Any, Any]:
    """What is read of a Triton backend and of its model runner."""
    model = SimpleNamespace(
        head_dim=512, v_head_dim=512, swa_head_dim=256, swa_v_head_dim=256, is_encoder_decoder=False
    )
    runner = SimpleNamespace(
        model_config=model, is_draft_worker=False, dtype=torch.bfloat16, kv_cache_dtype=torch.bfloat16,
    )  # fmt: skip
    backend = SimpleNamespace(
        device="cpu", enable_deterministic=False, dcp_size=1, use_mla=False, extend_attention_fwd=never,
    )  # fmt: skip
    for name, value in change.items():
        owner = next(x for x in (model, runner, backend) if hasattr(x, name))
        setattr(owner, name, value)
    return backend, runner


def test_backend_calls_the_dispatcher(counted: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden: list[
        Any
    ] = []  # from torch.compile; the function itself imports its compiler for seconds
    monkeypatch.setattr(torch.compiler, "disable", lambda call: hidden.append(call) or call)
    monkeypatch.setattr(ours, "extend_attention", lambda *of, **by: None)
    monkeypatch.setenv(LAYERS.name, "full")
    monkeypatch.setenv(MIN_CHUNK.name, "3")
    backend, runner = backend_of()
    stock: list[str] = []
    backend.extend_attention_fwd = lambda *of, **by: stock.append("called")
    ours.after_backend(None, backend, runner, skip_prefill=True)
    assert hidden == [backend.extend_attention_fwd]
    for change in ({}, {"sliding_window_size": 9}, {"max_len_extend": 2}):
        given, named = small_call(**change)
        backend.extend_attention_fwd(*given, **named)
    assert counted.seen == ["engaged", "layer_choice", "short_chunk"]
    assert stock == ["called"] * 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": "xpu"}, "a device of type xpu"),
        ({"enable_deterministic": True}, "deterministic inference"),
        ({"dcp_size": 2}, "decode context parallelism"),
        ({"use_mla": True}, "has MLA"),
        ({"is_encoder_decoder": True}, "cross attention"),
        ({"dtype": torch.float16}, "runs in torch.float16"),
        ({"kv_cache_dtype": torch.float8_e5m2}, "cache is torch.float8_e5m2"),
        ({"head_dim": 72}, "no tile for heads of 72"),
        ({"swa_v_head_dim": 1024}, "no tile for heads of 1024"),
    ],
)
def test_backends_that_end_at_boot(change: dict[str, Any], said: str) -> None:
    for fine in ({}, {"kv_cache_dtype": torch.float8_e4m3fn}, {"head_dim": 192, "v_head_dim": 128}):
        ours.judge_backend(*backend_of(**fine))
    with pytest.raises(SystemExit, match=said) as stop:
        ours.judge_backend(*backend_of(**change))
    assert "\n" not in str(stop.value)


def test_drafts_are_judged_call_by_call() -> None:
    ours.judge_backend(*backend_of(is_draft_worker=True, head_dim=72))


def test_gpus_that_end_at_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(capability=(9, 0), name="gfx950:sramecc+")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found.capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=found.name))  # fmt: skip
    given = backend_of(device="cuda")
    for capability in ours.CAPABILITIES:
        found.capability = capability
        ours.judge_backend(*given)
    for capability in ((8, 0), (8, 9), (11, 0), (12, 1)):
        found.capability = capability
        with pytest.raises(SystemExit, match=f"this is sm{capability[0]}{capability[1]}"):
            ours.judge_backend(*given)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    ours.judge_backend(*given)
    found.name = "gfx942:sramecc+"
    with pytest.raises(SystemExit, match="this is gfx942"):
        ours.judge_backend(*given)


DEFAULTS = {
    "attention_backend": None,
    "prefill_attention_backend": None,
    "kv_cache_dtype": "auto",
    "dtype": "auto",
    "dcp_size": 1,
    **dict.fromkeys(UNCOVERED, False),
}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, None),
        ({"attention_backend": "fa3", "prefill_attention_backend": "triton"}, None),
        ({"kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"}, None),
        ({"attention_backend": None}, "add --attention-backend triton"),
        ({"attention_backend": "fa3"}, "backend fa3 of prefill"),
        ({"prefill_attention_backend": "trtllm_mha"}, "backend trtllm_mha of prefill"),
        *(({name: True}, "--" + name.replace("_", "-")) for name in UNCOVERED),
        ({"dcp_size": 2}, "--dcp-size > 1"),
        ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2"),
        ({"dtype": "half"}, "--dtype half"),
    ],
)
def test_judge(given: dict[str, Any], said: str | None) -> None:
    lines = list(judge(ServeCommand({"attention_backend": "triton", **given}, DEFAULTS)))
    assert len(lines) == (said is not None), lines
    assert said is None or said in lines[0]
    assert not any("\n" in line for line in lines)


def test_judge_reads_the_model() -> None:
    def lines(config: dict[str, Any], **given: Any) -> list[str]:
        return list(judge(ServeCommand(given, DEFAULTS, model_config=config)))

    for name in TRITON_BY_DEFAULT:
        assert lines({"architectures": [name]}) == []
        (line,) = lines({"architectures": [name]}, attention_backend="trtllm_mha")  # as on a B200
        assert "trtllm_mha" in line
    (line,) = lines({"architectures": ["LlamaForCausalLM"]})
    assert "add --attention-backend triton" in line
    (line,) = lines({"text_config": {"kv_lora_rank": 512}}, attention_backend="triton")
    assert "has MLA" in line


# --- attention.split_verify: the same dispatcher, another kernel and another choice ---------------------------------


@pytest.fixture
def split_counted(monkeypatch: pytest.MonkeyPatch) -> Count:
    count = Count()
    monkeypatch.setattr(split, "count", count)
    return count


VERIFIED = (
    Case("4_4_4", "0_5_70", heads=8, kv_heads=2, dim=32, kind="float32"),
    Case("7_4", "39_0", mask="tree", causal=False, dim=32, kind="float32"),
    Case("5_5", "60_9", mask="tree", causal=False, dim=16, lost=3, window=20, kind="float32"),
    Case("1_16", "40_33", heads=4, dim=16, window=17, cap=3.0, sink=True, kind="float32"),
    Case("3", "50", heads=3, dim=32, dim_v=16, pool="fp8", layout="padded"),
)


@pytest.mark.tier("interpret")
@pytest.mark.parametrize("case", VERIFIED, ids=case_id)
def test_what_is_split(
    case: Case, counted: Count, split_counted: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The specification's answers by `verify_attention`, in more than one split; only that feature counts."""
    monkeypatch.setattr(ours, "extend_attention", never)
    inputs = OP.make_inputs(case, 0, CPU)
    given, named = engine_call(case, inputs)
    split.SplitVerify(never)(*given, **named)
    assert (split_counted.seen, counted.seen) == (["engaged"], [])
    judged(case, inputs, given[3])


@pytest.mark.parametrize(
    ("longest", "takes"), [(1, "split"), (MAX_DRAFTS, "split"), (MAX_DRAFTS + 1, "gqa")]
)
def test_both_features(
    longest: int, takes: str, counted: Count, split_counted: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short chunks are split_verify's, whatever gqa_extend's options; the rest is gqa_extend's, and stock's what neither covers."""
    calls: list[str] = []
    monkeypatch.setattr(torch.compiler, "disable", lambda call: call)
    monkeypatch.setattr(ours, "extend_attention", lambda *of, **by: calls.append("gqa"))
    monkeypatch.setattr(split, "verify_attention", lambda *of, **by: calls.append("split"))
    backend, runner = backend_of()
    backend.extend_attention_fwd = lambda *of, **by: calls.append("stock")
    for after in (ours.after_backend, split.after_backend):  # features run in this order
        after(None, backend, runner)
    given, named = small_call(max_len_extend=longest)
    backend.extend_attention_fwd(*given, **named)
    backend.extend_attention_fwd(*given, **{**named, "score_mod": object()})
    assert calls == [takes, "stock"]
    if takes == "split":
        assert split_counted.seen == ["engaged", "score_mod"]
        assert counted.seen == ["score_mod"]
    else:
        assert split_counted.seen == ["long_chunk"] * 2
        assert counted.seen == ["engaged", "score_mod"]
    assert split_hook.FEATURE.order > FEATURE.order


def test_split_verify_at_boot() -> None:
    """One line in its own name."""
    with pytest.raises(SystemExit, match=rf"^{SPLIT_VERIFY}: .* has MLA; unset NUMINOUS_ATTENTION_SPLIT_VERIFY$"):  # fmt: skip
        split.after_backend(None, *backend_of(use_mla=True))
    with pytest.raises(SystemExit, match=rf"^{SPLIT_VERIFY}: there is no kernel for .* xpu"):
        split.after_backend(None, *backend_of(device="xpu"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, None),
        ({"speculative_attention_mode": "decode"}, None),
        ({"decode_attention_backend": "fa3"}, None),
        ({"speculative_attention_mode": "decode", "decode_attention_backend": "fa3"}, "verified by attention backend fa3"),
        ({"attention_backend": "fa3"}, "backend fa3 of prefill"),
        ({"dcp_size": 2}, "--dcp-size > 1"),
    ],
)  # fmt: skip
def test_judge_of_split_verify(given: dict[str, Any], said: str | None) -> None:
    defaults = DEFAULTS | {"speculative_attention_mode": "prefill", "decode_attention_backend": None}  # fmt: skip
    lines = list(split_hook.judge(ServeCommand({"attention_backend": "triton", **given}, defaults)))
    assert len(lines) == (said is not None), lines
    assert said is None or said in lines[0]


# --- The engine that is installed -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tree() -> Any:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("reads the installed engine, there is none")
    return find_engine()


def test_engine_that_is_installed(tree: Any) -> None:
    """Every pin fits, and the engine has the arguments that the judge reads."""
    for feature in (FEATURE, split_hook.FEATURE):
        assert fits(feature, tree) == []
    fields = b"".join(tree.read(path) for path in tree.files(FIELDS) if path.endswith(".py"))
    read = [*DEFAULTS, "speculative_attention_mode", "decode_attention_backend"]
    assert [name for name in read if f"    {name}: A[".encode() not in fields] == []


def test_signature_is_stocks(tree: Any) -> None:
    """Names, order and defaults, without an import of the engine."""
    source = ast.parse(tree.read("kernels/ops/attention/extend_attention.py"))
    stock = next(
        x
        for x in source.body
        if isinstance(x, ast.FunctionDef) and x.name == "extend_attention_fwd"
    )
    mine = list(inspect.signature(GqaExtend.attend).parameters.values())[1:]
    assert [x.arg for x in stock.args.args] == [x.name for x in mine]
    assert not stock.args.kwonlyargs
    defaults = [ast.literal_eval(x) for x in stock.args.defaults]
    assert defaults == [x.default for x in mine if x.default is not inspect.Parameter.empty]
