# SPDX-License-Identifier: Apache-2.0
"""The models that gates judge on: sizes, agreement with Hugging Face, training, checkpoints, planted faults.

Real widths are used where a forward pass is all there is; training uses `tiny` versions of the same configs.
"""

from __future__ import annotations

import http.server
import importlib
import json
import math
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the judge models are torch modules")
pytest.importorskip("tokenizers", reason="the judge models bring a tokenizer")
pytest.importorskip("safetensors", reason="the judge models are safetensors files")

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "judge_models"))

import check_engine  # noqa: E402
import judge_configs  # noqa: E402
import judge_corpus  # noqa: E402
import judge_kda  # noqa: E402
import judge_mla  # noqa: E402
import judge_moe  # noqa: E402
import judge_saved  # noqa: E402
import judge_training  # noqa: E402
import record as record_script  # noqa: E402
import train as train_script  # noqa: E402
import train_both  # noqa: E402
from judge_configs import GLM_DSA, KIMI_LINEAR, MODELS  # noqa: E402
from judge_model import JudgeModel, from_checkpoint, initialise, to_checkpoint  # noqa: E402

from numinous_tooling import evidence  # noqa: E402

# Logits of the training module and of Hugging Face, fp32 on the CPU.
TOLERANCE = 1e-3
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # The same bits need the same order of sums.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny(name: str, **changes: Any) -> judge_configs.Config:
    """The config with every width cut, so that a training step takes milliseconds."""
    small = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
    }
    if name == "glm-dsa":
        own = {
            "num_hidden_layers": 2,
            "q_lora_rank": 24,
            "index_n_heads": 4,
            "index_head_dim": 16,
            "index_topk": 8,
            "indexer_types": ["full"] * 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
        }
    else:
        linear = {**KIMI_LINEAR["linear_attn_config"], "num_heads": 2, "head_dim": 16}
        linear |= {"kda_layers": [1, 2], "full_attn_layers": [3]}
        own = {
            "num_hidden_layers": 3,
            "linear_attn_config": linear,
            "num_experts": 8,
            "num_experts_per_token": 2,
        }
    return {**MODELS[name], **small, **own, **changes}


def build(config: judge_configs.Config, seed: int = 0) -> JudgeModel:
    model = JudgeModel(config)
    initialise(model, seed)
    return model.eval()


def corpus(vocabulary: int, size: int = 6000, seed: int = 0) -> judge_corpus.Tokens:
    """Tokens that can be predicted: words of a few ids, drawn with a strong preference."""
    source = np.random.default_rng(seed)
    words = [source.integers(2, vocabulary, source.integers(2, 6)) for _ in range(40)]
    chosen = source.geometric(0.15, size) % len(words)
    ids = np.concatenate([words[i] for i in chosen])[:size].astype(np.int32)
    return judge_corpus.Tokens(ids, np.ones(vocabulary, dtype=np.int32))


RECIPE = judge_training.Recipe(
    length=24, batch=8, warm_up=5, learning_rate=1e-2, late_learning_rate=1e-3
)


def trained(
    name: str, steps: list[int], recipe: judge_training.Recipe = RECIPE, **changes: Any
) -> tuple[JudgeModel, list[dict[str, Any]]]:
    config = tiny(name, **changes)
    model = build(config, recipe.seed)
    tokens = corpus(config["vocab_size"])
    records = judge_training.Trainer(model, tokens, recipe, CPU).train(0.0, steps)
    return model.eval(), records


STEPS = {"glm-dsa": [6, 2, 2], "kimi-linear": [6]}


def saved(model: JudgeModel, folder: Path) -> JudgeModel:
    judge_saved.save(model, None, folder)
    return judge_saved.load(folder)


def skip_without_reference(config: judge_configs.Config, sparse: bool = False) -> None:
    if why := judge_saved.why_no_reference(config, sparse):
        pytest.skip(why)


def with_indexer_as_installed(config: judge_configs.Config) -> judge_configs.Config:
    """The config, with the indexer's rotary pairs as the installed class has them."""
    if config["model_type"] == "glm_moe_dsa" and judge_saved.why_no_reference(config, sparse=True):
        return {**config, "indexer_rope_interleave": not config["indexer_rope_interleave"]}
    return config


def some_tokens(config: judge_configs.Config, length: int, batch: int = 2) -> torch.Tensor:
    source = torch.Generator().manual_seed(3)
    return torch.randint(0, config["vocab_size"], (batch, length), generator=source)


class TestConfigs:
    @pytest.mark.parametrize("name", MODELS)
    def test_fits_and_the_count_is_that_of_the_module(self, name: str) -> None:
        config = MODELS[name]
        with torch.device("meta"):
            model = JudgeModel(config)
        real = sum(tensor.numel() for tensor in model.state_dict().values())
        assert judge_configs.parameter_count(config) == real <= judge_configs.MAX_PARAMETERS
        assert 2 * real <= 60e6, "bytes in bf16"

    @pytest.mark.parametrize("name", MODELS)
    def test_the_count_of_a_config_of_other_widths(self, name: str) -> None:
        config = tiny(name)
        real = sum(tensor.numel() for tensor in JudgeModel(config).state_dict().values())
        assert judge_configs.parameter_count(config) == real

    @pytest.mark.parametrize("name", MODELS)
    def test_active_parameters_are_what_a_token_multiplies(self, name: str) -> None:
        config = MODELS[name]
        experts, chosen, _ = judge_configs.routing(config)
        sparse = config["num_hidden_layers"] - config["first_k_dense_replace"]
        idle = (experts - chosen) * sparse * 3 * config["hidden_size"] * 128
        active = judge_configs.active_matrix_parameters(config)
        embedding = config["vocab_size"] * config["hidden_size"]
        indexer = config["num_hidden_layers"] * 565504 if name == "glm-dsa" else 0
        norms = (2 * config["num_hidden_layers"] + 1) * config["hidden_size"]
        assert active == judge_configs.parameter_count(config) - idle - embedding - indexer - norms

    def test_widths_that_kernels_demand(self) -> None:
        for config in MODELS.values():
            assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (512, 64)
            assert config["topk_method"] == "noaux_tc"
        assert GLM_DSA["index_head_dim"] == 128
        assert GLM_DSA["index_n_heads"] in (32, 64)
        assert GLM_DSA["index_topk"] % 128 == 0
        assert 64 % GLM_DSA["num_attention_heads"] == 0, "backends pad heads up to 64"
        linear = KIMI_LINEAR["linear_attn_config"]
        assert (linear["head_dim"], linear["short_conv_kernel_size"]) == (128, 4)
        layers = linear["kda_layers"] + linear["full_attn_layers"]
        assert sorted(layers) == list(range(1, KIMI_LINEAR["num_hidden_layers"] + 1))

    def test_latents_are_normalised_alike_by_engine_and_hugging_face(self) -> None:
        # Hugging Face has 1e-6 for them in code.
        assert all(config["rms_norm_eps"] == 1e-6 for config in MODELS.values())


class TestAgainstHuggingFace:
    @pytest.mark.parametrize("name", MODELS)
    def test_real_widths(self, name: str, tmp_path: Path) -> None:
        config = MODELS[name]
        skip_without_reference(config)
        model = saved(build(config), tmp_path)
        tokens = some_tokens(config, 48, 1)
        assert tokens.shape[1] <= config.get("index_topk", 48)
        other = judge_saved.reference(tmp_path)
        assert judge_saved.largest_difference(model, other, tokens) < TOLERANCE

    @pytest.mark.parametrize("name", MODELS)
    def test_a_trained_directory_reproduces_its_logits(self, name: str, tmp_path: Path) -> None:
        skip_without_reference(MODELS[name])
        model, _ = trained(name, STEPS[name], index_topk=16)
        again = saved(model, tmp_path)
        tokens = some_tokens(model.config, 16)
        other = judge_saved.reference(tmp_path)
        assert judge_saved.largest_difference(again, other, tokens) < TOLERANCE
        before = to_checkpoint(model)
        assert all(torch.equal(before[key], value) for key, value in to_checkpoint(again).items())

    def test_beyond_index_topk_the_same_keys_are_chosen(self, tmp_path: Path) -> None:
        config = with_indexer_as_installed(tiny("glm-dsa"))
        skip_without_reference(config, sparse=True)
        model, _ = trained("glm-dsa", [6, 6, 2], **config)
        model = saved(model, tmp_path)
        tokens = some_tokens(config, 40)
        other = judge_saved.reference(tmp_path)
        assert judge_saved.largest_difference(model, other, tokens, "sparse") < TOLERANCE
        # The comparison sees the choice: without it, or with the pairs turned otherwise, it fails.
        assert judge_saved.largest_difference(model, other, tokens, "dense") > TOLERANCE
        for module in model.modules():
            if isinstance(module, judge_mla.Indexer):
                module.interleaved = not module.interleaved
        assert judge_saved.largest_difference(model, other, tokens, "sparse") > TOLERANCE

    def test_without_the_indexer_it_is_deepseek_v3(self, tmp_path: Path) -> None:
        config = tiny("glm-dsa", index_topk=64)
        skip_without_reference({**config, "model_type": "deepseek_v3"})
        model = saved(build(config), tmp_path / "glm")
        judge_saved.write_dense(tmp_path / "glm", tmp_path / "dense")
        other = judge_saved.reference(tmp_path / "dense")
        tokens = some_tokens(config, 32)
        assert judge_saved.largest_difference(model, other, tokens, "sparse") < TOLERANCE
        judge_saved.save(build(tiny("kimi-linear")), None, tmp_path / "kimi")
        with pytest.raises(ValueError, match="no indexer"):
            judge_saved.write_dense(tmp_path / "kimi", tmp_path / "dense")

    def test_fp8_blocks_hold_the_weights_within_their_rounding(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file

        config = tiny("glm-dsa", hidden_size=160, intermediate_size=200)
        saved(build(config), tmp_path / "glm")
        judge_saved.write_fp8(tmp_path / "glm", tmp_path / "fp8")
        before = load_file(tmp_path / "glm" / judge_saved.WEIGHTS)
        after = load_file(tmp_path / "fp8" / judge_saved.WEIGHTS)
        packed = {name for name, tensor in after.items() if tensor.dtype == torch.float8_e4m3fn}
        assert {name.rsplit(".", 2)[1] for name in packed} >= {"q_a_proj", "o_proj", "down_proj"}
        kept = ("norm", "embed_tokens", "lm_head", "mlp.gate.", "weights_proj")
        assert not [name for name in packed if any(word in name for word in kept)]
        for name in packed:
            scales = after[name.removesuffix("weight") + "weight_scale_inv"]
            spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            rows, columns = before[name].shape
            spread = spread[:rows, :columns]
            got, want = after[name].float() * spread, before[name].float()
            # Half a unit in the last of four significant bits, or half the smallest step.
            assert ((got - want).abs() <= torch.maximum(want.abs() / 16, spread * 2**-10)).all()
        assert {name for name in after if not name.endswith("scale_inv")} == set(before)
        judge_saved.save(build(tiny("kimi-linear")), None, tmp_path / "kimi")
        with pytest.raises(ValueError, match="not released in FP8"):
            judge_saved.write_fp8(tmp_path / "kimi", tmp_path / "fp8")
        with pytest.raises(ValueError, match="quantised already"):
            judge_saved.write_fp8(tmp_path / "fp8", tmp_path / "again")
        weights = (tmp_path / "glm" / judge_saved.WEIGHTS).read_bytes()
        with pytest.raises(ValueError, match="would be lost"):
            judge_saved.write_fp8(tmp_path / "glm", tmp_path / "fp8/../glm")
        assert (tmp_path / "glm" / judge_saved.WEIGHTS).read_bytes() == weights
        with pytest.raises(ValueError, match="no finite number"):
            judge_saved.block_fp8(torch.tensor([[1.0, float("nan")]]))

    def test_records_of_a_training_and_of_a_check_are_evidence(self, tmp_path: Path) -> None:
        written = {
            "model": "glm-dsa",
            "parameters": 28_211_040,
            "versions": {"torch": "2.11.0"},
            "phases": [{"tokens": 5}, {"tokens": 7}],
            "seconds": {"all": 150.0},
            "eval": {"prose": {"nats_per_token": 3.5, "bits_per_byte": 1.36, "top1": 0.3}},
            "files": {"model.safetensors": {"sha256": "ab" * 32}},
            **dict.fromkeys(("recipe", "corpus", "kda", "repeat"), "x"),
        }
        facts = dict.fromkeys(evidence.COMMON_FIELDS, "-") | {"gpu": "NVIDIA Z9", "engine": "e 1"}
        check = {"holds": False, "weights": "ab" * 32, "positions": 9, "mean_difference": 0.5}
        made = [
            record_script.training(written, facts),
            record_script.engine_check(written, check, facts),
            record_script.engine_check(written, check, facts, ["0079-kimi-gate-norm-eps"]),
        ]
        evidence.append(tmp_path / "out.jsonl", made)
        assert (made[0]["n"], made[0]["torch"], made[0]["prose_nats_per_token"]) == (
            12,
            "2.11.0",
            3.5,
        )
        assert (made[1]["n"], made[1]["holds"], made[1]["engine"]) == (9, False, "e 1")
        assert record_script.main(["--model", str(tmp_path)]) == 2
        with pytest.raises(ValueError, match="of weights cdcdcdcdcdcd, the model has abab"):
            record_script.engine_check(written, {**check, "weights": "cd" * 32}, facts)
        (tmp_path / "record.json").write_text(json.dumps({**written, "device": "cpu"}))
        again = ["--model", str(tmp_path), "--evidence", str(tmp_path / "again.jsonl")]
        assert [record_script.main(again), record_script.main(again)] == [0, 0]
        assert len(evidence.load(tmp_path / "again.jsonl")) == 1

    def test_a_release_that_turns_the_indexer_otherwise_is_named(self) -> None:
        config = with_indexer_as_installed(GLM_DSA)
        skip_without_reference(config)
        assert judge_saved.why_no_reference(config, sparse=True) is None
        turned = {**config, "indexer_rope_interleave": not config["indexer_rope_interleave"]}
        assert "against this config" in str(judge_saved.why_no_reference(turned, sparse=True))

    def test_a_weight_without_a_place_is_refused(self, tmp_path: Path) -> None:
        config = tiny("glm-dsa")
        skip_without_reference(config)
        judge_saved.save(build(config), None, tmp_path)
        stranger = {**to_checkpoint(build(config)), "model.stranger.weight": torch.ones(2)}
        judge_saved.save_file(stranger, tmp_path / judge_saved.WEIGHTS, metadata={"format": "pt"})
        with pytest.raises(ValueError, match="stranger"):
            judge_saved.reference(tmp_path)


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch, JudgeModel], None]]] = {}


def fault(name: str) -> Callable[[Any], Any]:
    """Register a fault planted in the training module of `name`."""

    def register(plant: Any) -> Any:
        FAULTS[plant.__name__] = (name, plant)
        return plant

    return register


@fault("glm-dsa")
def rope_in_halves(patch: pytest.MonkeyPatch, model: JudgeModel) -> None:
    right = judge_mla.rotate
    patch.setattr(judge_mla, "rotate", lambda x, tables, interleaved: right(x, tables, False))


@fault("glm-dsa")
def rope_of_another_base(patch: pytest.MonkeyPatch, model: JudgeModel) -> None:
    parameters = {**model.config["rope_parameters"], "rope_theta": 9000.0}
    patch.setitem(model.config, "rope_parameters", parameters)


@fault("glm-dsa")
def no_latent_norm(patch: pytest.MonkeyPatch, model: JudgeModel) -> None:
    for block in model.model.layers:
        block.self_attn.kv_a_layernorm = torch.nn.Identity()


@fault("glm-dsa")
def norm_of_another_eps(patch: pytest.MonkeyPatch, model: JudgeModel) -> None:
    model.model.layers[0].input_layernorm.eps = 1e-2


@fault("glm-dsa")
def bias_weighs_experts(patch: pytest.MonkeyPatch, model: JudgeModel) -> None:
    for router in model.routers():
        router.e_score_correction_bias += torch.linspace(-1, 1, len(router.load))


@fault("kimi-linear")
def no_forgetting(patch: pytest.MonkeyPatch, model: JudgeModel) -> None:
    with torch.no_grad():
        for block in model.model.layers[:2]:
            block.self_attn.A_log.fill_(-30)


@fault("kimi-linear")
def convolution_sees_the_next_token(patch: pytest.MonkeyPatch, model: JudgeModel) -> None:
    def forward(self: judge_kda.ShortConv, x: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(x.transpose(1, 2), (2, 1))
        out = torch.nn.functional.conv1d(padded, self.weight, groups=len(self.weight))
        return torch.nn.functional.silu(out).transpose(1, 2)

    patch.setattr(judge_kda.ShortConv, "forward", forward)


@pytest.mark.parametrize("planted", FAULTS)
def test_a_planted_fault_breaks_the_agreement(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, plant = FAULTS[planted]
    config = tiny(name, index_topk=64)
    skip_without_reference(config)
    model = saved(build(config), tmp_path)
    other = judge_saved.reference(tmp_path)
    tokens = some_tokens(config, 32)
    assert judge_saved.largest_difference(model, other, tokens) < TOLERANCE
    plant(monkeypatch, model)
    assert judge_saved.largest_difference(model, other, tokens) > TOLERANCE


class TestKda:
    @pytest.mark.parametrize("time", [1, 31, 64, 90])
    def test_chunks_do_what_steps_do(self, time: int) -> None:
        inputs = judge_kda.sample_inputs(CPU, (1, time, 2, 16))
        error = judge_kda.relative_error(judge_kda.chunk_kda, judge_kda.recurrent_kda, inputs)
        assert error < 1e-4

    def test_decays_too_strong_for_quotients(self) -> None:
        # exp of a chunk's sum of these overflows fp32; the form with differences does not.
        q, k, v, g, beta = judge_kda.sample_inputs(CPU, (1, 70, 2, 16))
        inputs = (q, k, v, 40 * g, beta)
        out = judge_kda.chunk_kda(*inputs)
        assert torch.isfinite(out).all()
        torch.testing.assert_close(out, judge_kda.recurrent_kda(*inputs), rtol=1e-4, atol=1e-5)

    def test_one_step_more_of_decay_is_seen(self) -> None:
        q, k, v, g, beta = judge_kda.sample_inputs(CPU, (1, 40, 2, 16))
        late = (q, k, v, torch.roll(g, 1, dims=1), beta)
        shifted = judge_kda.chunk_kda(*late)
        right = judge_kda.recurrent_kda(q, k, v, g, beta)
        assert float((shifted - right).norm() / right.norm()) > 1e-2

    def test_a_compiled_inside_meets_one_layout_and_only_where_there_is_a_gradient(self) -> None:
        seen = []

        def inside(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
            seen.append([(part.shape, part.stride()) for part in parts])
            return judge_kda.within_chunks(*parts)

        inputs = judge_kda.sample_inputs(CPU, (2, 64, 2, 16))
        turned = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs)
        assert turned[0].stride() != inputs[0].stride()
        for some in (inputs, turned):
            out = judge_kda.chunk_kda(*(x.requires_grad_() for x in some), inside=inside)
        assert len(seen) == 2
        assert seen[0] == seen[1]
        with torch.no_grad():
            again = judge_kda.chunk_kda(*inputs, inside=inside)
        assert len(seen) == 2
        torch.testing.assert_close(again, out.detach())

    def test_the_cpu_takes_the_plain_form(self) -> None:
        assert judge_kda.choose_kda(CPU) == ("torch", judge_kda.chunk_kda)

    @pytest.mark.parametrize("error", [ImportError("no"), RuntimeError("no kernel")])
    def test_a_kernel_that_does_not_run_is_passed_over_and_named(
        self, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        def broken() -> judge_kda.Kda:
            raise error

        monkeypatch.setattr(judge_kda, "_fla_kda", broken)
        monkeypatch.setattr(judge_kda, "_compiled_kda", lambda: judge_kda.recurrent_kda)
        small_inputs = judge_kda.sample_inputs(CPU, (1, 20, 2, 16))
        monkeypatch.setattr(judge_kda, "sample_inputs", lambda device, shape: small_inputs)
        name, chosen = judge_kda.choose_kda(torch.device("cuda"))
        assert chosen is judge_kda.recurrent_kda
        assert name.startswith("torch, compiled; flash-linear-attention ")

    def test_a_kernel_that_is_wrong_is_passed_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        small_inputs = judge_kda.sample_inputs(CPU, (1, 20, 2, 16))
        wrong = lambda q, k, v, g, beta: 1.1 * judge_kda.chunk_kda(q, k, v, g, beta)
        monkeypatch.setattr(judge_kda, "sample_inputs", lambda device, shape: small_inputs)
        monkeypatch.setattr(judge_kda, "_fla_kda", lambda: wrong)
        monkeypatch.setattr(judge_kda, "_compiled_kda", lambda: wrong)
        name, chosen = judge_kda.choose_kda(torch.device("cuda"))
        assert chosen is judge_kda.chunk_kda
        assert name.count("is off by") == 2


class TestMoe:
    def test_grouped_is_the_loop(self) -> None:
        torch.manual_seed(0)
        experts = judge_moe.Experts(8, 32, 16)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, 0, 0.2)
            parameter.data = parameter.data.bfloat16().float()
        x = torch.randn(40, 32).bfloat16().float().requires_grad_()
        chosen = torch.stack([torch.randperm(7)[:2] for _ in range(40)])  # expert 7 gets none
        weights = torch.rand(40, 2)
        results = []
        for form in (experts.loop, experts.grouped):
            out = form(x, chosen, weights)
            leaves = [x, *experts.parameters()]
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        for one, other in zip(*results, strict=True):
            assert float((one - other).detach().norm() / one.detach().norm()) < 0.02, (
                "bf16 against fp32"
            )

    def test_the_bias_chooses_and_does_not_weigh(self) -> None:
        router = judge_moe.Router(8, 4, 2, 2.5)
        torch.nn.init.normal_(router.weight)
        router.eval()
        router.e_score_correction_bias += torch.tensor([0.0, 5.0, 0.0, 5.0])
        x = torch.randn(10, 8)
        experts, weights = router(x)
        assert set(experts.flatten().tolist()) == {1, 3}
        scores = torch.nn.functional.linear(x, router.weight).sigmoid().gather(1, experts)
        torch.testing.assert_close(weights, 2.5 * scores / scores.sum(-1, keepdim=True))

    def test_balancing_reaches_idle_experts(self) -> None:
        torch.manual_seed(0)
        router = judge_moe.Router(8, 8, 2, 1.0).train()
        torch.nn.init.normal_(router.weight)
        x = torch.randn(500, 8) + 1.0
        spread = []
        for _ in range(200):
            router(x)
            spread.append(float(router.load.max() / router.load.mean()))
            router.rebalance(5e-3)
            assert not router.load.any()
        assert spread[-1] < 1.3 < spread[0]


class TestTraining:
    @pytest.mark.parametrize("name", MODELS)
    def test_the_loss_falls(self, name: str) -> None:
        _, records = trained(name, {"glm-dsa": [60, 2, 2], "kimi-linear": [60]}[name])
        first, last = records[0]["first_loss"], records[0]["last_loss"]
        assert abs(first - math.log(300)) < 1.0
        assert last < first - 1.5
        assert records[0]["tokens"] == 60 * 8 * 24

    def test_the_indexer_learns_where_attention_goes(self) -> None:
        model, records = trained("glm-dsa", [60, 60, 2], index_topk=6)
        teach = records[1]
        assert teach["last_loss"] < 0.8 * teach["first_loss"]
        assert teach["last_recall"] > teach["first_recall"] + 0.05
        # It was the indexer that learned: an untrained one on the same attention recalls less.
        tokens = some_tokens(model.config, 24)
        model(tokens, mode="teach")
        learned = float(torch.stack([lesson.recall for lesson in model.lessons()]).mean())
        initialise_indexers(model)
        model(tokens, mode="teach")
        fresh = float(torch.stack([lesson.recall for lesson in model.lessons()]).mean())
        assert learned > fresh + 0.03

    def test_only_the_indexer_moves_while_it_is_taught(self) -> None:
        config = tiny("glm-dsa")
        model = build(config)
        trainer = judge_training.Trainer(model, corpus(config["vocab_size"]), RECIPE, CPU)
        plan = {phase.name: phase for phase in judge_training.phases(model, RECIPE)}
        for name, moves_indexer in (("dense", False), ("teach", True)):
            before = {key: value.clone() for key, value in model.state_dict().items()}
            trainer._phase(plan[name], 0.0, 3)
            after = model.state_dict()
            moved = {key for key in before if not torch.equal(before[key], after[key])}
            assert moved
            assert all((".indexer." in key) == moves_indexer for key in moved), name

    @pytest.mark.parametrize(
        ("name", "mode"),
        [
            ("glm-dsa", "dense"),
            ("glm-dsa", "teach"),
            ("glm-dsa", "sparse"),
            ("kimi-linear", "dense"),
        ],
    )
    def test_mixed_precision_is_near_fp32(self, name: str, mode: str) -> None:
        """What a GPU does, on the CPU: bf16 products, grouped experts, fp32 residual stream and losses."""
        config = tiny(name, moe_intermediate_size=32, index_topk=16)
        model = build(config)
        rows = some_tokens(config, 25)
        results = []
        for mixed in (False, True):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                logits = model(rows[:, :-1], mode=mode)
            taught = [lesson.loss for lesson in model.lessons()]
            assert len(taught) == (0 if mode == "dense" else 2)
            loss = judge_training.language_loss(logits, rows[:, 1:]) + sum(taught)
            loss.backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            results.append((loss.detach(), torch.cat([g.flatten() for g in gradients])))
        (exact, wide), (near, narrow) = results
        assert float((near - exact).abs()) < 0.02
        assert float(torch.nn.functional.cosine_similarity(wide, narrow, dim=0)) > 0.98

    @pytest.mark.parametrize("name", MODELS)
    def test_same_seed_same_bits_other_seed_other_bits(self, name: str) -> None:
        runs = [
            to_checkpoint(trained(name, STEPS[name], replace(RECIPE, seed=seed))[0])
            for seed in (0, 0, 1)
        ]
        same = [torch.equal(runs[0][key], runs[1][key]) for key in runs[0]]
        assert all(same)
        head = "lm_head.weight"
        assert not torch.equal(runs[0][head], runs[2][head])

    def test_a_time_box_fixes_steps_that_repeat_the_run(self) -> None:
        recipe = replace(RECIPE, warm_up=judge_training.PROBE)
        config = tiny("kimi-linear")
        tokens = corpus(config["vocab_size"])
        boxed, again = build(config), build(config)
        records = judge_training.Trainer(boxed, tokens, recipe, CPU).train(1.0)
        steps = records[0]["steps"]
        assert steps > judge_training.PROBE
        judge_training.Trainer(again, tokens, recipe, CPU).train(0.0, [steps])
        state = again.state_dict()
        assert all(torch.equal(value, state[key]) for key, value in boxed.state_dict().items())

    @pytest.mark.parametrize("name", MODELS)
    def test_the_speed_is_probed_in_the_warm_up(self, name: str) -> None:
        # Later steps know the number of steps, which is fixed only then.
        plan = judge_training.phases(build(tiny(name)), judge_training.Recipe())
        assert all(phase.warm_up >= judge_training.PROBE for phase in plan)
        assert sum(phase.share for phase in plan) == pytest.approx(1.0)

    def test_every_window_once_an_epoch(self) -> None:
        tokens = corpus(300, 1000)
        sampler = judge_training.Sampler(tokens, 24, 0)
        count = len(sampler.rows)
        epochs = [sampler.next(count)[:, 0].tolist() for _ in range(2)]
        firsts = sampler.rows[:, 0].tolist()
        assert [sorted(epoch) for epoch in epochs] == [sorted(firsts)] * 2
        assert epochs[0] != epochs[1]

    def test_evaluation_counts_bytes_and_nats(self) -> None:
        config = tiny("kimi-linear")
        model = build(config)
        with torch.no_grad():
            model.lm_head.weight.zero_()  # every token equally likely
        tokens = replace(corpus(300, 200), id_bytes=np.full(300, 3, dtype=np.int32))
        figures = judge_training.evaluate(model, tokens, 24, 5, CPU)
        assert figures["tokens"] == 5 * 24
        assert figures["nats_per_token"] == pytest.approx(math.log(300), rel=1e-5)
        assert figures["bits_per_byte"] == pytest.approx(math.log2(300) / 3, rel=1e-5)


def initialise_indexers(model: JudgeModel) -> None:
    fresh = build(model.config, 5).state_dict()
    state = model.state_dict()
    for key, value in fresh.items():
        if ".indexer." in key:
            state[key].copy_(value)


class TestCorpus:
    TEXT = "The quick brown fox — naïve, 数 — jumps over def f(x): return x.\n" * 3

    def test_round_trip_and_bytes(self) -> None:
        tokenizer = judge_corpus.train_tokenizer([self.TEXT], 270, step=1)
        tokens = judge_corpus.encode(tokenizer, [self.TEXT, "fox"])
        assert tokenizer.decode(tokens.ids.tolist()) == self.TEXT + "fox"
        assert tokens.id_bytes[tokens.ids].sum() == len((self.TEXT + "fox").encode())
        assert (tokens.ids == judge_configs.END_OF_TEXT).sum() == 2

    def test_the_last_row_of_a_model_has_no_token(self) -> None:
        tokenizer = judge_corpus.train_tokenizer([self.TEXT], 270, step=1)
        assert max(tokenizer.get_vocab().values()) == 268

    def test_the_same_vocabulary_every_time(self) -> None:
        made = {judge_corpus.train_tokenizer([self.TEXT], 280, step=1).to_str() for _ in range(3)}
        assert len(made) == 1

    def test_too_little_text(self) -> None:
        with pytest.raises(ValueError, match="give more text"):
            judge_corpus.train_tokenizer([self.TEXT], 5000, step=1)
        with pytest.raises(ValueError, match="no window"):
            judge_corpus.windows(np.arange(10, dtype=np.int32), 10)


class TestCommands:
    @pytest.fixture
    def text(self, tmp_path: Path) -> Path:
        path = tmp_path / "text.txt"
        documents = [f"{TestCorpus.TEXT} chapter {i}\n" * 4 for i in range(40)]
        path.write_text(judge_corpus.SEPARATOR.join(documents), encoding="utf-8")
        return path

    @pytest.fixture
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in MODELS:
            monkeypatch.setitem(MODELS, name, tiny(name))

    def arguments(self, text: Path, out: Path, *more: str) -> list[str]:
        shared = ["--text", str(text), "--eval", f"prose={text}", "--out", str(out)]
        return [*shared, "--device", "cpu", "--batch", "2", "--length", "16", *more]

    @pytest.mark.usefixtures("small")
    @pytest.mark.parametrize("name", MODELS)
    def test_train_writes_a_directory_and_its_record(
        self, name: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "out"
        steps = ",".join(map(str, STEPS[name]))
        more = ["--model", name, "--steps", steps, "--eval-windows", "3"]
        assert train_script.main(self.arguments(text, out, *more)) == 0
        assert capsys.readouterr().out.splitlines()[-1] == str(out / "record.json")
        record = json.loads((out / "record.json").read_text())
        assert record["repeat"] == f"--steps {steps}"
        assert record["eval"]["prose"]["tokens"] == 3 * 16
        assert record["corpus"]["sha256"]["train"] == judge_corpus.sha256(text)
        for file, facts in record["files"].items():
            assert judge_corpus.sha256(out / file) == facts["sha256"], file
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= record["files"].keys()
        # What was evaluated is what was saved.
        model = judge_saved.load(out)
        tokenizer = judge_corpus.Tokenizer.from_file(str(out / "tokenizer.json"))
        tokens = judge_corpus.encode(tokenizer, judge_corpus.read_documents(text))
        again = judge_training.evaluate(model, tokens, 16, 3, CPU)
        assert again["nats_per_token"] == pytest.approx(record["eval"]["prose"]["nats_per_token"])

    @pytest.mark.usefixtures("small")
    @pytest.mark.parametrize(
        ("more", "said"),
        [
            (["--model", "glm-dsa", "--steps", "3"], "wants 3 numbers"),
            (["--model", "kimi-linear", "--seconds", "0.1"], "give more"),
            (["--model", "glm-dsa", "--steps", "1,1,1", "--text", "nowhere.txt"], "nowhere.txt"),
        ],
    )
    def test_train_refuses_in_one_line(
        self,
        more: list[str],
        said: str,
        text: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert train_script.main(self.arguments(text, tmp_path / "out", *more)) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert said in lines[0]

    def test_both_refuses_what_belongs_to_one(self, tmp_path: Path) -> None:
        assert train_both.main(["--out", str(tmp_path), "--steps", "3"]) == 2

    def test_both_runs_each_and_keeps_the_worst_exit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commands: list[list[str]] = []

        class Done:
            returncode = 0

        def run(command: list[str], check: bool) -> Done:
            commands.append(command)
            done = Done()
            done.returncode = len(commands) - 1
            return done

        monkeypatch.setattr(train_both.subprocess, "run", run)
        assert train_both.main(["--out", str(tmp_path), "--text", "t"]) == 1
        assert [command[3] for command in commands] == list(MODELS)
        assert all(command[-2:] == ["--text", "t"] for command in commands)


class FakeEngine(http.server.BaseHTTPRequestHandler):
    """Answers `/generate` with the log-probabilities of a model, to which `wrong` may do something."""

    model: JudgeModel
    wrong: Callable[[dict[str, Any]], Any]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        row, count = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        scored = check_engine.reference(self.model, [*row, 0], "cpu")
        pairs = zip(scored, row[1:], strict=False)
        forced = [[float(line[token]), token, None] for line, token in pairs]
        said, full = [], list(row)
        for _ in range(count):
            token = int(check_engine.reference(self.model, [*full, 0], "cpu")[-1].argmax())
            said.append([0.0, token, None])
            full.append(token)
        meta = {"input_token_logprobs": [[None, row[0], None], *forced]}
        answer = {"meta_info": {**meta, "output_token_logprobs": said}}
        data = json.dumps(type(self).wrong(answer)).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        """Silent."""


def worse_prefill(answer: dict[str, Any]) -> dict[str, Any]:
    for entry in answer["meta_info"]["input_token_logprobs"][1:]:
        entry[0] -= 0.1
    return answer


def worse_decode(answer: dict[str, Any]) -> dict[str, Any]:
    for entry in answer["meta_info"]["output_token_logprobs"]:
        entry[1] = (entry[1] + 1) % 300
    return answer


def half_an_answer(answer: dict[str, Any]) -> dict[str, Any]:
    del answer["meta_info"]["input_token_logprobs"][2:]
    return answer


class TestCheckEngine:
    @pytest.mark.parametrize(
        ("wrong", "code"),
        [
            (lambda answer: answer, 0),
            (worse_prefill, 1),
            (worse_decode, 1),
            (half_an_answer, 2),
            (lambda answer: [], 2),
            (lambda answer: {}, 2),
        ],
        ids=["right", "prefill", "decode", "half", "list", "empty"],
    )
    def test_verdict(
        self, wrong: Any, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = tiny("glm-dsa")
        tokenizer = judge_corpus.train_tokenizer([TestCorpus.TEXT], 300, step=1)
        text = tmp_path / "text.txt"
        text.write_text(TestCorpus.TEXT, encoding="utf-8")
        folder = tmp_path / "model"
        judge_saved.save(build(config), tokenizer, folder)
        handler = type(
            "Handler", (FakeEngine,), {"model": judge_saved.load(folder), "wrong": wrong}
        )
        server = http.server.HTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            arguments = ["--model", str(folder), "--text", str(text), "--url", url]
            arguments += ["--device", "cpu", "--windows", "2", "--length", "12", "--answer", "3"]
            assert check_engine.main(arguments) == code
            if code < 2:
                # The stand-in computes what the module does, so bf16 is all that is left, and it is something.
                report = json.loads(capsys.readouterr().out)
                assert 0 < report["rounding_difference"] < 0.05
                assert report["weights"] == judge_corpus.sha256(folder / judge_saved.WEIGHTS)
        finally:
            server.shutdown()
            server.server_close()

    @pytest.mark.engine
    def test_the_real_engine_agrees(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Stock Triton attention and stock MoE on the CPU platform; what they leave out is the indexer."""
        for module in ("sglang", "numinous_cpu_platform", "triton"):
            pytest.importorskip(module, reason="python -m numinous_cpu_platform install")
        # Real widths, fewer of everything else.
        fewer = ("vocab_size", "num_hidden_layers", "indexer_types", "n_routed_experts")
        small = tiny("glm-dsa")
        config = {**GLM_DSA, **{key: small[key] for key in fewer}, "index_n_heads": 2}
        model, _ = trained("glm-dsa", [12, 1, 1], **{**config, "index_topk": 64})
        tokenizer = judge_corpus.train_tokenizer([TestCorpus.TEXT], 300, step=1)
        text = tmp_path / "text.txt"
        text.write_text(TestCorpus.TEXT, encoding="utf-8")
        judge_saved.save(model, tokenizer, tmp_path / "model")
        environment, flags = importlib.import_module("numinous_cpu_platform").serve_defaults()
        for name, value in {**environment, "TRITON_INTERPRET": "1"}.items():
            monkeypatch.setenv(name, value)
        own = [
            "--model",
            str(tmp_path / "model"),
            "--text",
            str(text),
            "--dense",
            "--device",
            "cpu",
        ]
        own += ["--windows", "1", "--length", "12", "--answer", "2"]
        own += ["--mean-limit", "1e-4", "--loss-limit", "1e-4", "--gap-limit", "1e-4"]
        code = check_engine.main([*own, "--", *flags, "--attention-backend", "triton"])
        told = capsys.readouterr()
        log = tmp_path / "model-server.log"
        assert code == 0, told.out + told.err + log.read_text(errors="replace")[-2000:]
        assert json.loads(told.out)["positions"] == 11

    def test_dense_is_refused_beyond_the_indexer(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tokenizer = judge_corpus.train_tokenizer([TestCorpus.TEXT], 300, step=1)
        judge_saved.save(build(tiny("glm-dsa")), tokenizer, tmp_path / "model")
        text = tmp_path / "text.txt"
        text.write_text(TestCorpus.TEXT, encoding="utf-8")
        own = ["--model", str(tmp_path / "model"), "--text", str(text), "--dense"]
        assert check_engine.main([*own, "--length", "8", "--answer", "1"]) == 2
        assert "index_topk 8" in capsys.readouterr().err

    def test_nobody_there(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(check_engine.NotAsked, match="gave no answer"):
            check_engine.ask("http://127.0.0.1:9", [1], 1, 1.0)


def test_a_checkpoint_that_does_not_fit_is_refused() -> None:
    tensors = to_checkpoint(build(tiny("glm-dsa")))
    tensors.pop("model.norm.weight")
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight"):
        from_checkpoint(tiny("glm-dsa"), tensors)
