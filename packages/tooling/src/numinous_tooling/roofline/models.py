# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face ``config.json`` as blocks.

Nothing is guessed: an architecture that is not modelled, a field that is missing and an option of the checkpoint that
changes shapes and is not modelled are each a `RooflineError`. The field ``_source`` of a shipped config says where its
numbers are from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from . import RooflineError
from .blocks import (
    Compressed,
    DeltaRule,
    Experts,
    GroupedQuery,
    Index,
    Latent,
    Layer,
    Mlp,
    StateSpace,
    hyper_connections,
)
from .weights import COMPONENTS, PRECISIONS, Precision, Weight, norm

_SHIPPED = files(__package__).joinpath("configs")


@dataclass(frozen=True)
class Model:
    """A language model as layers.

    Args:
        name: of the shipped config, or the file's folder.
        architecture: as the config says.
        hidden, vocabulary: widths.
        layers: in order.
        tied: the LM head is the embedding.
        context_length: of the checkpoint, 0 where it does not say.
        checkpoint: how its weights are stored, None where the config does not say in a way that is understood.
        extra: weights outside layers, embedding and head.
        source: of the numbers.
    """

    name: str
    architecture: str
    hidden: int
    vocabulary: int
    layers: tuple[Layer, ...]
    tied: bool
    context_length: int
    checkpoint: Precision | None
    extra: tuple[Weight, ...] = ()
    source: str = "the config.json given"

    @property
    def ends(self) -> tuple[Weight, ...]:
        """Embedding, head, last norm and what else is outside the layers. A tied head is a second use, not a second weight."""
        table = Weight(
            "embedding", "embedding", self.vocabulary, self.hidden, stored="bf16", product=False
        )
        last = norm("last norm", self.hidden)
        return (table, last, *self.extra) if self.tied else (table, self.head, last, *self.extra)

    @property
    def head(self) -> Weight:
        """The LM head as a product, tied or not."""
        return Weight("LM head", "LM head", self.hidden, self.vocabulary, stored="bf16")

    def weights(self) -> list[Weight]:
        """Every weight, layer by layer, then the ends."""
        return [w for layer in self.layers for w in layer.weights(self.hidden)] + list(self.ends)

    def parameters(self) -> dict[str, int]:
        """Numbers by component; components without any are left out."""
        return self._sums(lambda weight: weight.parameters)

    def active_parameters(self) -> int:
        """Numbers that one token meets; the embedding counted as its one row, a tied head as the product it is."""
        looked_up = sum(w.parameters for w in self.ends if w.component == "embedding")
        active = sum(w.active for w in self.weights()) - looked_up + self.hidden
        return active + (self.head.parameters if self.tied else 0)

    def weight_bytes(self, precision: Precision, tp: int = 1) -> dict[str, int]:
        """Bytes on one rank by component."""
        return self._sums(lambda weight: weight.bytes(precision, tp))

    def _sums(self, size: Callable[[Weight], int]) -> dict[str, int]:
        sums = dict.fromkeys(COMPONENTS, 0)
        for weight in self.weights():
            sums[weight.component] += size(weight)
        return {component: total for component, total in sums.items() if total}

    def precision(self, asked: str) -> Precision:
        """What ``--weights`` means for this model; ``checkpoint`` is how it is published."""
        if asked == "checkpoint":
            if self.checkpoint is None:
                raise RooflineError(
                    f"{self.name}: its quantization_config is not understood; say --weights {'|'.join(PRECISIONS)}"
                )
            return self.checkpoint
        if asked not in PRECISIONS:
            raise RooflineError(
                f"no weight format {asked}; there are checkpoint, {', '.join(PRECISIONS)}"
            )
        return PRECISIONS[asked]


def shipped() -> list[str]:
    """Names of the configs that come with the package, sorted."""
    return sorted(
        entry.name.removesuffix(".json")
        for entry in _SHIPPED.iterdir()
        if entry.name.endswith(".json")
    )


def read(where: str) -> Model:
    """The model of a shipped name, of a config.json or of a folder that holds one.

    Raises:
        RooflineError: nothing is there, it is no JSON object, or its model cannot be built.
    """
    path = Path(where)
    if where in shipped():
        name, text = where, _SHIPPED.joinpath(f"{where}.json").read_text(encoding="utf-8")
    else:
        if path.is_dir():
            path = path / "config.json"
        try:
            name, text = path.resolve().parent.name, path.read_text(encoding="utf-8")
        except OSError as error:
            raise RooflineError(
                f"{where} is neither a config.json that can be read ({error.strerror}) nor one of "
                f"{', '.join(shipped())}"
            ) from error
        if path.name != "config.json":
            name = path.stem
    try:
        config = json.loads(text)
    except ValueError as error:
        raise RooflineError(f"{where} is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise RooflineError(f"{where} holds no JSON object")
    return build(config, name)


def build(config: Mapping[str, Any], name: str = "model") -> Model:
    """The model of a config that has been read.

    Raises:
        RooflineError: its architecture is not modelled, or a field is missing or out of range.
    """
    architectures = config.get("architectures") or ["(none named)"]
    make = ARCHITECTURES.get(architectures[0])
    if make is None:
        raise RooflineError(
            f"{name}: architecture {architectures[0]} is not modelled; there are {', '.join(ARCHITECTURES)}"
        )
    text = config.get("text_config") or {}
    model = make(
        _Fields({**config, **text, "architectures": architectures}, f"{name} ({architectures[0]})")
    )
    source = config.get("_source") or {}
    return Model(
        name=name,
        architecture=architectures[0],
        checkpoint=_checkpoint({**config, **text}),
        source="; ".join(f"{word}: {text}" for word, text in source.items()) or Model.source,
        **model,
    )


class _Fields:
    """A config with the text part on top; complains about what is missing."""

    def __init__(self, config: Mapping[str, Any], what: str) -> None:
        self.config, self.what = config, what

    def __getitem__(self, name: str) -> Any:
        value = self.config.get(name)
        if value is None:
            raise RooflineError(f"{self.what}: config.json lacks {name}")
        return value

    def size(self, name: str, *others: str, least: int = 1) -> int:
        """A whole number of at least `least`, under any of these names."""
        found = next((n for n in (name, *others) if self.config.get(n) is not None), name)
        value = self[found]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise RooflineError(
                f"{self.what}: {found} must be a whole number from {least} on, got {value!r}"
            )
        return value

    def get(self, name: str, default: Any = None) -> Any:
        value = self.config.get(name)
        return default if value is None else value

    def each_layer(self, name: str) -> list[Any]:
        """A list with an entry per layer; longer ones carry the draft layers behind."""
        value, layers = self[name], self.size("num_hidden_layers")
        if not isinstance(value, list) or len(value) < layers:
            raise RooflineError(f"{self.what}: {name} must list {layers} layers")
        return value[:layers]

    def refuse(self, message: str) -> RooflineError:
        return RooflineError(f"{self.what}: {message}")


def _frame(f: _Fields, layers: list[Layer], extra: tuple[Weight, ...] = ()) -> dict[str, Any]:
    return {
        "hidden": f.size("hidden_size"),
        "vocabulary": f.size("vocab_size"),
        "layers": tuple(layers),
        "tied": bool(f.get("tie_word_embeddings", False)),
        "context_length": int(f.get("max_position_embeddings", 0)),
        "extra": extra,
    }


def _checkpoint(config: Mapping[str, Any]) -> Precision | None:
    """How the published weights are stored; None where that is not understood."""
    quantization = config.get("quantization_config")
    if not quantization:
        return Precision()
    method = quantization.get("quant_method")
    if method == "fp8" and quantization.get("weight_block_size", [128, 128]) == [128, 128]:
        return PRECISIONS["mxfp4" if config.get("expert_dtype") == "fp4" else "fp8"]
    if method == "compressed-tensors" and quantization.get("format") == "mxfp4-pack-quantized":
        return Precision(linear="bf16", expert="mxfp4")
    return None


# --- dense and MoE models with grouped-query attention ------------------------------------------------------------------


def _grouped(f: _Fields, *, qk_norm: bool, bias: bool) -> dict[str, Any]:
    if f.get("use_sliding_window") or "sliding_attention" in f.get("layer_types", ()):
        raise f.refuse("sliding windows are modelled for Gemma 4 only")
    heads = f.size("num_attention_heads")
    head_dim = f.get("head_dim") or f.size("hidden_size") // heads
    attention = GroupedQuery(
        heads=heads,
        kv_heads=f.size("num_key_value_heads") if f.get("num_key_value_heads") else heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        qk_norm=qk_norm,
        bias=bool(f.get("attention_bias", bias)),
    )
    mlp: Mlp | Experts = Mlp(f.size("intermediate_size")) if not _is_moe(f) else _experts(f)
    return _frame(f, [Layer(attention, (mlp,))] * f.size("num_hidden_layers"))


def _is_moe(f: _Fields) -> bool:
    return any(f.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _experts(f: _Fields, **options: Any) -> Experts:
    if f.get("decoder_sparse_step", 1) != 1 or f.get("mlp_only_layers"):
        raise f.refuse("experts in some layers only are modelled through first_k_dense_replace")
    return Experts(
        count=f.size("n_routed_experts", "num_experts", "num_local_experts"),
        used=f.size("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
        inner=f.size("moe_intermediate_size", "intermediate_size"),
        **{"router_bias": False, **options},
    )


def _gemma4(f: _Fields) -> dict[str, Any]:
    for name in ("num_kv_shared_layers", "hidden_size_per_layer_input", "use_double_wide_mlp"):
        if f.get(name):
            raise f.refuse(f"{name} is not modelled")
    kinds = f.each_layer("layer_types")
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise f.refuse(f"layer type {sorted(unknown)[0]} is not modelled")
    same = bool(f.get("attention_k_eq_v", False))
    local, wide = f.size("head_dim"), f.get("global_head_dim") or f.size("head_dim")
    heads = f.size("num_attention_heads")
    attention = {
        "sliding_attention": GroupedQuery(
            heads=heads,
            kv_heads=f.size("num_key_value_heads"),
            head_dim=local,
            v_head_dim=local,
            window=f.size("sliding_window"),
            qk_norm=True,
        ),
        "full_attention": GroupedQuery(
            heads=heads,
            kv_heads=f.size("num_global_key_value_heads", "num_key_value_heads"),
            head_dim=wide,
            v_head_dim=wide,
            separate_v=not same,
            qk_norm=True,
        ),
    }
    mlps: tuple[Mlp | Experts, ...] = (Mlp(f.size("intermediate_size")),)
    norms = 4
    extra: tuple[Weight, ...] = (norm("layer scalar", 1),)
    if f.get("enable_moe_block"):
        mlps = (*mlps, _experts(f))
        # Three norms around the experts; the router scales its input per channel and its output per expert.
        norms = 7
        extra += (norm("router scales", f.size("hidden_size") + f.size("num_experts")),)
    return _frame(f, [Layer(attention[kind], mlps, norms=norms, extra=extra) for kind in kinds])


# --- multi-head latent attention ----------------------------------------------------------------------------------------


def _deepseek(f: _Fields, *, sparse: bool) -> dict[str, Any]:
    layers = []
    sparse = sparse or f.get("index_topk") is not None
    for number, has_experts in enumerate(_moe_layers(f)):
        attention = _latent(f, index=_index(f, number) if sparse else None)
        layers.append(Layer(attention, (_shared_experts(f) if has_experts else _dense(f),)))
    return _frame(f, layers)


def _moe_layers(f: _Fields) -> list[bool]:
    layers = f.size("num_hidden_layers")
    if kinds := f.get("mlp_layer_types"):
        return [kind == "sparse" for kind in kinds[:layers]]
    first, every = int(f.get("first_k_dense_replace", 0)), int(f.get("moe_layer_freq", 1))
    return [_is_moe(f) and i >= first and i % every == 0 for i in range(layers)]


def _dense(f: _Fields) -> Mlp:
    return Mlp(f.size("intermediate_size"))


def _shared_experts(f: _Fields, **options: Any) -> Experts:
    shared = int(f.get("n_shared_experts", f.get("num_shared_experts", 0)))
    return _experts(f, **{"shared": shared, "router_bias": True, **options})


def _latent(f: _Fields, index: Index | None, gated: bool = False) -> Latent:
    return Latent(
        heads=f.size("num_attention_heads"),
        q_rank=f.get("q_lora_rank"),
        kv_rank=f.size("kv_lora_rank"),
        rope=f.size("qk_rope_head_dim", least=0),
        nope=f.size("qk_nope_head_dim"),
        v=f.size("v_head_dim"),
        gated=gated,
        index=index,
    )


def _index(f: _Fields, layer: int) -> Index:
    pool = int(f.get("index_kpool", 1))
    return Index(
        heads=f.size("index_n_heads"),
        dim=f.size("index_head_dim"),
        topk=f.size("index_topk"),
        query_rank=f.size("q_lora_rank"),
        pool=pool,
        computes=not _skips_index(f, layer),
        pool_gate=pool > 1 and bool(f.get("index_kpool_compress", False)),
    )


def _skips_index(f: _Fields, layer: int) -> bool:
    """Whether a layer reuses the top-k before it; the rule of srt/configs/model_config.py dsa_layer_skips_topk."""
    if kinds := f.get("indexer_types"):
        return bool(layer < len(kinds) and kinds[layer] == "shared")
    if pattern := f.get("index_topk_pattern"):
        return bool(layer < len(pattern) and pattern[layer] == "S")
    every = f.size("index_topk_freq") if f.get("index_topk_freq") is not None else 1
    offset = f.size("index_skip_topk_offset") if f.get("index_skip_topk_offset") is not None else 2
    return max(layer - offset + 1, 0) % every != 0


# --- hybrids of linear attention and MLA --------------------------------------------------------------------------------


def _glm5_next(f: _Fields) -> dict[str, Any]:
    linear = _Fields(f["linear_attn_config"], f"{f.what}, linear_attn_config")
    delta = _delta(linear)
    kda = set(linear["kda_layers"])
    extra: tuple[Weight, ...] = ()
    if f.get("mhc"):
        extra = hyper_connections(f.size("hidden_size"), f.size("hc_mult"))
    layers = [
        Layer(
            delta if number in kda else _latent(f, index=_index(f, number)),
            (_shared_experts(f) if has_experts else _dense(f),),
            extra=extra,
        )
        for number, has_experts in enumerate(_moe_layers(f))
    ]
    return _frame(f, layers)


def _kimi_linear(f: _Fields) -> dict[str, Any]:
    linear = _Fields(f["linear_attn_config"], f"{f.what}, linear_attn_config")
    delta = _delta(linear)
    kda = set(linear["kda_layers"])  # counted from 1
    hidden = f.size("hidden_size")
    latent = _latent(f, index=None, gated=bool(f.get("mla_use_output_gate", False)))
    block = f.get("attn_res_block_size")
    residual: tuple[Weight, ...] = ()
    if block:
        # A norm and a score vector before attention and before the MLP (kimi_k3.py KimiK3DecoderLayer).
        residual = (norm("attention residual", 4 * hidden),)
    experts = None
    if _is_moe(f):
        experts = _shared_experts(f, latent=f.get("routed_expert_hidden_size"))
    layers = [
        Layer(
            delta if number + 1 in kda else latent,
            (experts if experts and has_experts else _dense(f),),
            extra=residual,
        )
        for number, has_experts in enumerate(_moe_layers(f))
    ]
    return _frame(f, layers, (norm("output residual", 2 * hidden),) if block else ())


def _delta(linear: _Fields) -> DeltaRule:
    return DeltaRule(
        heads=linear.size("num_heads"),
        dim=linear.size("head_dim"),
        conv=linear.size("short_conv_kernel_size"),
        full_gate=bool(linear.get("use_full_rank_gate", False)),
    )


# --- DeepSeek V4 --------------------------------------------------------------------------------------------------------


def _deepseek_v4(f: _Fields) -> dict[str, Any]:
    hidden, mult = f.size("hidden_size"), f.size("hc_mult")
    layers = []
    for ratio in f.each_layer("compress_ratios"):
        if ratio not in (0, 4, 128):
            raise f.refuse(f"compression {ratio} is not modelled; there are 0, 4 and 128")
        index = None
        if ratio == 4:
            index = Index(
                heads=f.size("index_n_heads"),
                dim=f.size("index_head_dim"),
                topk=f.size("index_topk"),
                query_rank=f.size("q_lora_rank"),
                pool=ratio,
            )
        attention = Compressed(
            heads=f.size("num_attention_heads"),
            head_dim=f.size("head_dim"),
            rope=f.size("qk_rope_head_dim"),
            q_rank=f.size("q_lora_rank"),
            o_rank=f.size("o_lora_rank"),
            o_groups=f.size("o_groups"),
            window=f.size("sliding_window"),
            ratio=ratio,
            index=index,
        )
        layers.append(
            Layer(
                attention,
                (_shared_experts(f),),
                extra=hyper_connections(hidden, mult),
            )
        )
    head = Weight(
        "hyper-connections", "head mix", mult * hidden, mult, stored="fp32", split=1
    )  # make_hc_head_params
    return _frame(f, layers, (head,))


# --- Mamba 2 ------------------------------------------------------------------------------------------------------------


def _nemotron_h(f: _Fields) -> dict[str, Any]:
    pattern = f["hybrid_override_pattern"]
    if unknown := set(pattern) - set("M*-E"):
        raise f.refuse(
            f"layer kind {sorted(unknown)[0]} of hybrid_override_pattern is not modelled"
        )
    heads = f.size("num_attention_heads")
    head_dim = f.size("head_dim", "attention_head_dim")
    attention = GroupedQuery(heads, f.size("num_key_value_heads"), head_dim, head_dim)
    mamba = StateSpace(
        heads=f.size("mamba_num_heads"),
        head_dim=f.size("mamba_head_dim"),
        state=f.size("ssm_state_size"),
        groups=f.size("n_groups"),
        conv=f.size("conv_kernel"),
        conv_bias=bool(f.get("use_conv_bias", True)),
    )
    made = {"M": Layer(mamba, (), norms=1), "*": Layer(attention, (), norms=1)}
    if "-" in pattern:
        made["-"] = Layer(None, (Mlp(f.size("intermediate_size"), gated=False),), norms=1)
    if "E" in pattern:
        experts = _shared_experts(
            f, gated=False, shared_inner=f.get("moe_shared_expert_intermediate_size")
        )
        made["E"] = Layer(None, (experts,), norms=1)
    return _frame(f, [made[kind] for kind in pattern])


_dense_gqa = partial(_grouped, qk_norm=False, bias=False)
_qwen3 = partial(_grouped, qk_norm=True, bias=False)

ARCHITECTURES: Mapping[str, Callable[[_Fields], dict[str, Any]]] = {
    "LlamaForCausalLM": _dense_gqa,
    "MistralForCausalLM": _dense_gqa,
    "Qwen2ForCausalLM": partial(_grouped, qk_norm=False, bias=True),
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3,
    "Gemma4ForCausalLM": _gemma4,
    "Gemma4ForConditionalGeneration": _gemma4,
    "DeepseekV2ForCausalLM": partial(_deepseek, sparse=False),
    "DeepseekV3ForCausalLM": partial(_deepseek, sparse=False),
    "DeepseekV32ForCausalLM": partial(_deepseek, sparse=True),
    "GlmMoeDsaForCausalLM": partial(_deepseek, sparse=True),
    "Glm5NextForConditionalGeneration": _glm5_next,
    "KimiK3ForConditionalGeneration": _kimi_linear,
    "KimiK3LinearForCausalLM": _kimi_linear,
    "KimiLinearForCausalLM": _kimi_linear,
    "DeepseekV4ForCausalLM": _deepseek_v4,
    "NemotronHForCausalLM": _nemotron_h,
}
"""Architectures that are modelled."""
