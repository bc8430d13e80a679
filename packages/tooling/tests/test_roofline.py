# SPDX-License-Identifier: Apache-2.0
"""Byte and FLOP models against arithmetic done by hand, published parameter counts, and what must be monotone.

Pool sizes are compared with the engine in test_roofline_engine.py.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numinous_tooling.roofline import RooflineError, models, ops, page, phases, pools, report
from numinous_tooling.roofline.blocks import GroupedQuery, Index, Latent, Step
from numinous_tooling.roofline.gpus import GPUS, gpu
from numinous_tooling.roofline.weights import Precision, distinct_experts
from numinous_tooling.workbench import Op, Traffic

HERE = Path(__file__).parent
OTHERS = json.loads((HERE / "roofline_models.json").read_text())

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}


def _shipped_config(name: str) -> dict[str, Any]:
    return dict(json.loads((Path(models.__file__).parent / "configs" / f"{name}.json").read_text()))


def _setup(precision: str = "bf16", kv: str = "bf16", tp: int = 1) -> phases.Setup:
    return phases.Setup(Precision(precision, precision), pools.kv_dtype(kv), tp)


# --- by hand ------------------------------------------------------------------------------------------------------------


def test_tiny_llama_by_hand() -> None:
    model = models.build(TINY)
    # q 256x256, k and v 256x128, o 256x256; MLP 3 x 256 x 512; two norms of 256.
    layer = 65536 + 2 * 32768 + 65536 + 393216 + 512
    assert sum(model.parameters().values()) == 3 * layer + 2 * 1000 * 256 + 256
    assert model.active_parameters() == 3 * layer + 1000 * 256 + 256 + 256

    decode = phases.forward(model, Step(requests=5, new=1, cached=99), _setup())
    work = decode.layers[0][1]
    assert work.bytes == {
        "weights": 2 * layer,
        "KV read": 5 * 99 * 2 * 64 * 2 * 2,  # cached tokens, KV heads, width, K and V, bf16
        "KV write": 5 * 2 * 64 * 2 * 2,
    }
    # Products of five tokens; 100 keys each, 4 heads of 64 + 64.
    assert work.flops == {"bf16": 2 * 5 * (layer - 512) + 2 * 4 * 128 * 5 * 100}
    assert decode.ends.bytes["weights"] == 2 * 1000 * 256 + 2 * 256 + 5 * 256 * 2
    assert decode.ends.flops == {"bf16": 2 * 5 * 1000 * 256}

    h200 = gpu("h200")
    by_hand = 3 * sum(work.bytes.values()) / 4.25e12 + sum(decode.ends.bytes.values()) / 4.25e12
    assert decode.floor_seconds(h200) == pytest.approx(by_hand)
    assert decode.bound(h200) == "bytes"

    prefill = phases.forward(model, Step(requests=1, new=4096, cached=0), _setup())
    pairs = 4096 * 4097 // 2
    assert prefill.layers[0][1].flops == {"bf16": 2 * 4096 * (layer - 512) + 2 * 4 * 128 * pairs}
    # Logits of the last token only.
    assert prefill.ends.flops == {"bf16": 2 * 1000 * 256}


def test_tensor_parallel_rank_by_hand() -> None:
    """Four ranks, two KV heads: queries and MLP are quartered, keys and values halved, norms whole."""
    model = models.build(TINY)
    work = phases.forward(model, Step(5, 1, 99), _setup(tp=4)).layers[0][1]
    numbers = (65536 + 65536 + 393216) // 4 + 2 * 32768 // 2 + 512
    assert work.bytes["weights"] == 2 * numbers
    assert work.bytes["KV read"] == 5 * 99 * 1 * 64 * 2 * 2
    assert work.flops == {"bf16": 2 * 5 * (numbers - 512) + 2 * 1 * 128 * 5 * 100}


def test_expected_experts_by_hand() -> None:
    assert distinct_experts(8, 2, 1) == pytest.approx(2)
    # Two tokens: each expert is missed by both with (6/8)^2.
    assert distinct_experts(8, 2, 2) == pytest.approx(8 * (1 - 0.5625))
    config = {
        **OTHERS["qwen3-30b-a3b"],
        "num_hidden_layers": 1,
    }
    work = phases.forward(models.build(config), Step(2, 1, 0), _setup()).layers[0][1]
    experts = 128 * (1 - (120 / 128) ** 2) * 3 * 2048 * 768 * 2
    others = 2048 * (32 + 4 + 4 + 32) * 128 * 2 + 2048 * 128 * 2 + (2 * 2048 + 256) * 2
    assert work.bytes["weights"] == pytest.approx(experts + others, abs=1)


def test_sparse_mla_by_hand() -> None:
    """GLM-5.3, one indexing MoE layer on 8 ranks, 352-byte rows, 64 requests of 32,768 tokens."""
    model = models.read("glm-5.3")
    setup = phases.Setup(Precision("fp8", "fp8"), pools.kv_dtype("kv4"), 8)
    layers = phases.forward(model, Step(64, 1, 32768), setup).layers
    indexing, shared = (layers[i][1] for i in (6, 7))
    assert shared.bytes["KV read"] == 64 * 2048 * 352
    assert indexing.bytes["KV read"] == 64 * (2048 * 352 + 32768 * 132)
    assert indexing.bytes["KV write"] == 64 * (352 + 132)
    # 8 heads of a rank over 2048 rows of 576 + 512; weights beside.
    products = (
        2
        * 64
        * (
            6144 * (2048 + 576)
            + (2048 * 64 * 256 + 512 * 64 * (192 + 256) + 64 * 256 * 6144) // 8
            + (3 * 6144 * 2048 + 8 * 3 * 6144 * 2048) // 8
        )
    )
    assert shared.flops["fp8"] == products + 2 * 8 * (576 + 512) * 64 * 2048
    assert shared.flops["bf16"] == 2 * 64 * 6144 * 256  # the router


def test_expanded_form_of_mla_is_taken_where_it_is_cheaper() -> None:
    mla = Latent(heads=128, q_rank=1536, kv_rank=512, rope=64, nope=128, v=128)
    kv = pools.kv_dtype("bf16")
    prefill = mla.work(Step(1, 4096, 0), kv, 1).flops["bf16"]
    assert prefill == 2 * 128 * (128 + 64 + 128) * 4096 * 4097 // 2
    decode = mla.work(Step(1, 1, 4096), kv, 1).flops["bf16"]
    assert decode == 2 * 128 * (576 + 512) * 4097
    # A sparse layer may expand only what it sees whole.
    sparse = dataclasses.replace(mla, index=Index(64, 128, 2048, 1536))
    assert sparse.work(Step(1, 2048, 0), kv, 1).flops["bf16"] == 2 * 128 * 320 * 2048 * 2049 // 2
    assert sparse.work(Step(1, 2049, 0), kv, 1).flops["bf16"] > 2 * 128 * 320 * 2049 * 2050 // 2


def test_states_by_hand() -> None:
    """Kimi K3 on 8 ranks: 12 heads of 128 x 128 in fp32 and three rows of q, k, v in bf16, in each of 69 layers."""
    assert pools.state_bytes(models.read("kimi-k3"), 8) == 69 * (
        12 * 128 * 128 * 4 + 3 * 3 * 12 * 128 * 2
    )
    layer = phases.forward(models.read("kimi-k3"), Step(7, 1, 1000), _setup(tp=8)).layers[0][1]
    assert layer.bytes["state"] == 2 * 7 * (12 * 128 * 128 * 4 + 3 * 3 * 12 * 128 * 2)
    assert "KV read" not in layer.bytes


def test_compressed_attention_by_hand() -> None:
    """DeepSeek V4 Pro, a layer of each ratio at 100,001 cached tokens: 584-byte rows, 132-byte index keys."""
    layers = phases.forward(
        models.read("deepseek-v4-pro"), Step(3, 1, 100_001), _setup(kv="fp8")
    ).layers
    wide, four = layers[0][1], layers[2][1]
    assert wide.bytes["KV read"] == 3 * (127 + 100_001 // 128) * 584
    assert four.bytes["KV read"] == 3 * ((127 + 1024) * 584 + 25_000 * 132)
    assert wide.bytes["KV write"] == 3 * 584
    assert wide.bytes["state"] == 2 * 3 * 2 * 512 * 4
    assert four.bytes["state"] == 2 * 3 * (2 * 2 * 512 * 4 + 2 * 2 * 128 * 4)


@pytest.mark.parametrize(("new", "cached"), [(1, 0), (1, 7), (5, 0), (6, 3), (9, 40)])
@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("limit", [None, 1, 3, 1000])
def test_pairs_are_counted_one_by_one(
    new: int, cached: int, stride: int, limit: int | None
) -> None:
    seen = [(cached + j) // stride for j in range(1, new + 1)]
    counted = sum(n if limit is None else min(n, limit) for n in seen)
    assert Step(2, new, cached).pairs(stride, limit) == 2 * counted


# --- published figures --------------------------------------------------------------------------------------------------

# Model, total and active parameters in 10^9 as published by its makers, and how near the active count can be: makers
# round it, and differ on whether embeddings count.
PUBLISHED = [
    ("deepseek-v3", 671, 37, 0.02),
    ("llama-3.1-8b", 8.03, None, 0),
    ("qwen3-30b-a3b", 30.5, 3.3, 0.1),
    ("kimi-linear-48b-a3b", 49.1, 3, 0.1),
    ("nemotron-3-nano-30b-a3b", 31.6, 3.2, 0.02),
    ("glm-5.3", 744, 40, 0.02),
    ("gemma-4-31b", 30.7, None, 0),
    ("gemma-4-26b-a4b", 25.2, 3.8, 0.02),
]


@pytest.mark.parametrize(("name", "total", "active", "near"), PUBLISHED)
def test_published_parameters(name: str, total: float, active: float | None, near: float) -> None:
    model = models.build(OTHERS[name], name) if name in OTHERS else models.read(name)
    assert sum(model.parameters().values()) / 1e9 == pytest.approx(total, rel=0.01)
    if active is not None:
        assert model.active_parameters() / 1e9 == pytest.approx(active, rel=near)


@pytest.mark.parametrize(
    ("name", "total", "active"), [("deepseek-v4-pro", 1600, 49), ("kimi-k3", 2800, 104)]
)
def test_published_parameters_of_models_rounded_to_two_digits(
    name: str, total: float, active: float
) -> None:
    model = models.read(name)
    assert sum(model.parameters().values()) / 1e9 == pytest.approx(total, rel=0.02)
    assert model.active_parameters() / 1e9 == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize(
    ("name", "layer", "published"),
    [
        # Bytes in the index of the bf16 checkpoint of GLM-5.2, same shapes: routers' corrections are fp32.
        ("glm-5.3", 6, (1_506_659_919_872 - 76 * 256 * 2) // 2),
        ("glm-5.3-flash", 43, None),
    ],
)
def test_published_checkpoint_with_its_draft_layer(
    name: str, layer: int, published: int | None
) -> None:
    """A draft layer is one more sparse MoE layer with three norms and a projection of two hidden states to one."""
    model = models.read(name)
    draft = sum(weight.parameters for weight in model.layers[layer].weights(model.hidden))
    total = sum(model.parameters().values()) + draft + (2 * model.hidden + 3) * model.hidden
    if published is None:
        assert total / 1e9 == pytest.approx(321, rel=0.002)  # with a vision tower
    else:
        assert total == published


def test_row_ratios_of_the_design() -> None:
    """GLM-5.3: 47,700 bytes per token with raw FP8 rows, 30,228 with 352-byte rows: 1.578 times the tokens."""
    model = models.read("glm-5.3")
    raw, ours = (pools.token_bytes(model, pools.kv_dtype(kv), 8) for kv in ("fp8-raw", "kv4"))
    assert (raw, ours) == (78 * 576 + 21 * 132, 78 * 352 + 21 * 132) == (47_700, 30_228)


def test_every_shipped_config_says_where_it_is_from() -> None:
    assert models.shipped() == [
        "deepseek-v4-pro",
        "gemma-4-26b-a4b",
        "gemma-4-31b",
        "glm-5.3",
        "glm-5.3-flash",
        "kimi-k3",
    ]
    for name in models.shipped():
        source = _shipped_config(name)["_source"]
        assert source
        assert set(source) <= {"reported", "derived"}
        assert models.read(name).checkpoint is not None
    assert all(row.word == "reported" and row.source for row in GPUS.values())


# --- what must be monotone ----------------------------------------------------------------------------------------------

NAMES = st.sampled_from([*models.shipped(), *OTHERS])


def _model(name: str) -> models.Model:
    return models.build(OTHERS[name], name) if name in OTHERS else models.read(name)


def _kv(name: str) -> str:
    return "fp8" if name.startswith("deepseek-v4") else "bf16"


@settings(max_examples=40, deadline=None)
@given(
    NAMES, st.integers(1, 300), st.integers(0, 300_000), st.integers(1, 5), st.sampled_from([1, 2])
)
def test_more_work_is_never_cheaper(
    name: str, batch: int, context: int, more: int, tp: int
) -> None:
    model, setup = _model(name), _setup(kv=_kv(name), tp=tp)
    h200 = gpu("h200")

    def cost(step: Step) -> tuple[int, int, float]:
        done = phases.forward(model, step, setup)
        return (
            sum(done.work.bytes.values()),
            sum(done.work.flops.values()),
            done.floor_seconds(h200),
        )

    here = cost(Step(batch, 1, context))
    for step in (Step(batch + more, 1, context), Step(batch, 1 + more, context)):
        assert all(a < b for a, b in zip(here, cost(step), strict=True))
    # Beyond a window or a top-k nothing grows, but nothing shrinks either.
    assert all(
        a <= b for a, b in zip(here, cost(Step(batch, 1, context + 128 * more)), strict=True)
    )


@settings(max_examples=40, deadline=None)
@given(NAMES, st.integers(50 << 30, 200 << 30), st.integers(0, 50 << 30))
def test_more_memory_never_holds_less(name: str, budget: int, more: int) -> None:
    model, kv = _model(name), pools.kv_dtype(_kv(name))
    # With slots left to the engine, room for one more state takes tokens away: seen for Kimi K3, 449 MB a state.
    slots = 10 if pools.state_bytes(model, 1) else None
    options = pools.PoolOptions(max_running_requests=16, state_slots=slots)
    less, bigger = (pools.size(model, kv, size, 1, options) for size in (budget, budget + more))
    assert less.tokens <= bigger.tokens
    assert less.tokens * less.bytes_per_token + less.fixed_bytes <= budget


@pytest.mark.parametrize("name", [*models.shipped(), *OTHERS])
def test_ranks_and_narrow_weights_never_need_more(name: str) -> None:
    model = _model(name)
    sizes = {
        asked: sum(model.weight_bytes(model.precision(asked)).values())
        for asked in ("nvfp4", "fp8", "bf16")
    }
    assert sizes["nvfp4"] <= sizes["fp8"] < sizes["bf16"]
    one, two = (sum(model.weight_bytes(Precision(), tp).values()) for tp in (1, 2))
    assert one / 2 <= two < one
    assert one == 2 * sum(model.parameters().values()) + sum(
        2 * w.parameters for w in model.weights() if w.stored == "fp32"
    )


# --- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"architectures": ["FalconForCausalLM"]},
            "architecture FalconForCausalLM is not modelled",
        ),
        ({"architectures": None}, "architecture (none named) is not modelled"),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers must be a whole number"),
        ({"num_key_value_heads": 0.5}, "num_key_value_heads must be a whole number"),
        ({"layer_types": ["sliding_attention"] * 3}, "modelled for Gemma 4 only"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(RooflineError) as caught:
        models.build({**TINY, **change})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("glm-5.3", {"index_topk": None}, "lacks index_topk"),
        ("glm-5.3", {"kv_lora_rank": None}, "lacks kv_lora_rank"),
        ("deepseek-v4-pro", {"compress_ratios": [4]}, "compress_ratios must list 61 layers"),
        ("deepseek-v4-pro", {"compress_ratios": [2] * 61}, "compression 2 is not modelled"),
        (
            "kimi-k3",
            {"linear_attn_config": {"num_heads": 1}},
            "linear_attn_config: config.json lacks head_dim",
        ),
        ("gemma-4-31b", {"num_kv_shared_layers": 2}, "num_kv_shared_layers is not modelled"),
    ],
)
def test_a_missing_dimension_is_not_guessed(name: str, change: dict[str, Any], says: str) -> None:
    config = _shipped_config(name)
    target = config.get("text_config", config)
    target.update(change)
    with pytest.raises(RooflineError, match=says):
        models.build(config, name)


@pytest.mark.parametrize(
    ("name", "kv", "says"),
    [
        ("gemma-4-31b", "nvfp4", "no nvfp4 pool for models with sliding windows"),
        ("glm-5.3", "nvfp4", "no nvfp4 row is defined for sparse MLA"),
        ("kimi-k3", "nvfp4", "no nvfp4 pool for MLA beside linear attention"),
        ("deepseek-v4-pro", "kv4", "no kv4 row of DeepSeek V4 is defined"),
        ("gemma-4-31b", "kv4", "no kv4 pool for models with sliding windows"),
    ],
)
def test_a_pool_that_nobody_has_is_refused(name: str, kv: str, says: str) -> None:
    with pytest.raises(RooflineError, match=says):
        pools.size(models.read(name), pools.kv_dtype(kv), 40 << 30, 1, pools.PoolOptions())


def test_a_budget_without_a_page_is_refused() -> None:
    model = models.read("glm-5.3")
    one_page = 64 * pools.token_bytes(model, pools.kv_dtype("kv4"), 1)
    pool = pools.size(model, pools.kv_dtype("kv4"), one_page, 1, pools.PoolOptions())
    assert pool.tokens == 64
    with pytest.raises(pools.DoesNotFit):
        pools.size(model, pools.kv_dtype("kv4"), one_page - 1, 1, pools.PoolOptions())


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(RooflineError, match="4 query heads do not divide over tp 3"):
        phases.forward(models.build(TINY), Step(1, 1, 0), _setup(tp=3))
    with pytest.raises(RooflineError, match="at least one request"):
        Step(0, 1, 0)
    with pytest.raises(RooflineError, match="no GPU a100 in the table; there are h200"):
        gpu("a100")


# --- reports ------------------------------------------------------------------------------------------------------------


def test_a_model_that_does_not_fit_has_no_ceiling() -> None:
    found = report.roofline_report(models.read("kimi-k3"), report.Question(tp=8), [gpu("h200")])
    (entry,) = found["gpus"]
    assert entry["phases"] == {}
    assert "do not fit" in entry["reason"]


def test_decode_takes_what_the_pool_holds() -> None:
    question = report.Question(tp=1, batch=64, context=32768)
    (entry,) = report.roofline_report(models.read("gemma-4-31b"), question, [gpu("h200")])["gpus"]
    held = entry["pool"]["tokens"] // 32768
    assert 0 < held < 64
    assert entry["phases"]["decode"]["requests"] == held


def test_fp8_rows_follow_the_gpu() -> None:
    glm, gemma = models.read("glm-5.3"), models.read("gemma-4-31b")
    assert report.rows_for(glm, "fp8", gpu("h200")).name == "fp8"
    assert report.rows_for(glm, "fp8", gpu("b200")).name == "fp8-raw"
    assert report.rows_for(gemma, "fp8", gpu("b200")).name == "fp8"
    assert report.rows_for(models.read("deepseek-v4-pro"), None, None).name == "fp8"


def test_a_four_bit_format_without_a_unit_is_computed_in_fp8() -> None:
    assert gpu("h200").rate("mxfp4") == gpu("h200").fp8
    assert gpu("mi355x").rate("mxfp4") == gpu("mi355x").fp4
    assert gpu("mi355x").rate("nvfp4") == gpu("mi355x").fp8


def test_bytes_of_layers_add_up() -> None:
    found = report.bytes_report(models.read("glm-5.3-flash"), report.Question(tp=8))
    for phase in found["phases"].values():
        assert phase["bytes"] == phase["ends"]["bytes"] + sum(
            entry["layers"] * entry["bytes"] for entry in phase["layers"]
        )
        assert sum(entry["layers"] for entry in phase["layers"]) == 45
    assert sum(found["weights_bytes_by_component"].values()) == found["weights_bytes"]


@dataclasses.dataclass(frozen=True)
class Copy:
    n: int


def _op(traffic: Traffic) -> Op:
    def unused(*_: Any) -> Any:
        raise AssertionError("a roofline computes nothing")

    return Op(
        name="copy",
        package="tooling",
        cases=(Copy(10), Copy(20)),
        make_inputs=unused,
        reference=unused,
        compare=unused,
        traffic=lambda case: dataclasses.replace(traffic, bytes=traffic.bytes * case.n),
        implementations={},
    )


def test_floor_of_an_op_by_hand() -> None:
    found = ops.report(_op(Traffic(bytes=4250, flops=795_000_000, unit="bf16")), [gpu("h200")])
    small, large = found["cases"]
    # 42,500 bytes at 4.25 TB/s are 0.01 us, 795 MFLOP at 795 TFLOP/s are 1 us.
    assert small["gpus"]["h200"] == {"floor_us": pytest.approx(1.0), "bound": "FLOPs"}
    assert small["intensity"] == pytest.approx(795_000_000 / 42_500)
    assert large["case"] == "n20"
    vector = ops.report(_op(Traffic(bytes=4250, flops=10**12, unit="fp32")), [gpu("h200")])
    assert vector["cases"][0]["gpus"]["h200"] == {"floor_us": pytest.approx(0.01), "bound": "bytes"}
    assert not vector["cases"][0]["flops_counted"]
    with pytest.raises(RooflineError, match="case n10: traffic gives 0 bytes"):
        ops.report(_op(Traffic(bytes=0)), [gpu("h200")])


def test_page_is_fresh() -> None:
    written = HERE.parents[2] / "docs" / "rooflines.md"
    assert written.read_text(encoding="utf-8") == page.render(), f"stale; run: {page.COMMAND}"


def test_planted_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is one byte wider changes the page and the figures above."""
    monkeypatch.setattr(
        GroupedQuery, "row", lambda self, kv, tp: 1 + 2 * self.kv_heads * self.head_dim
    )
    with pytest.raises(AssertionError):
        test_page_is_fresh()
    with pytest.raises(AssertionError):
        test_tiny_llama_by_hand()
