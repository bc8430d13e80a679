# SPDX-License-Identifier: Apache-2.0
"""The two models as `config.json`: widths that kernels demand are those of the real models, the rest is small.

`glm-dsa` has the attention of GLM-5 on one of eight ranks: 8 heads of 192 + 64 (values 256) over a latent row of
512 + 64, an indexer of 32 heads of 128, top 512, so that a context of 2,048 is sparse on three rows of four.
`kimi-linear` has the layers of Kimi-Linear: three of KDA (heads of 128, convolution of 4), then one of MLA without
rotary embedding (8 heads of 128 + 64, values 128, latent row 512 + 64). Both route by sigmoid scores with a
correction bias (noaux_tc), and have one shared expert.

`rms_norm_eps` is 1e-6 on purpose: Hugging Face normalises latents with 1e-6 whatever the field says, SGLang with the
field. At any other value the two disagree. (The norm behind KDA has 1e-5 in SGLang 0.5.20 whatever the field says: upstream fix 0079.)
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

VOCABULARY = 8192
END_OF_TEXT, PADDING = 0, 1
MAX_PARAMETERS = 30_000_000

_SHARED: Config = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "moe_intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": END_OF_TEXT,
    "pad_token_id": PADDING,
    "dtype": "bfloat16",
    "use_cache": True,
}

GLM_DSA: Config = {
    **_SHARED,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 4,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rope_interleave": True,
    "max_position_embeddings": 4096,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "indexer_types": ["full"] * 4,
    "indexer_rope_interleave": True,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
}

KIMI_LINEAR: Config = {
    **_SHARED,
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "num_hidden_layers": 8,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "mla_use_nope": True,
    # Hugging Face reads the first name, SGLang the second.
    "model_max_length": 4096,
    "max_position_embeddings": 4096,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3, 5, 6, 7],  # counted from 1, as the released checkpoint counts
        "full_attn_layers": [4, 8],
        "num_heads": 4,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
    "num_experts": 16,
    "num_experts_per_token": 4,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "use_grouped_topk": True,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
}

MODELS: dict[str, Config] = {"glm-dsa": GLM_DSA, "kimi-linear": KIMI_LINEAR}


def is_glm(config: Config) -> bool:
    """Whether this is the model with an indexer; the other one has KDA layers."""
    return bool(config["model_type"] == "glm_moe_dsa")


def is_kda(config: Config, layer: int) -> bool:
    """Whether layer `layer`, counted from 0, is a KDA layer."""
    return not is_glm(config) and layer + 1 in config["linear_attn_config"]["kda_layers"]


def routing(config: Config) -> tuple[int, int, int]:
    """(routed experts, experts of a token, shared experts): the two families name them differently."""
    if is_glm(config):
        return (
            config["n_routed_experts"],
            config["num_experts_per_tok"],
            config["n_shared_experts"],
        )
    return config["num_experts"], config["num_experts_per_token"], config["num_shared_experts"]


def parameter_count(config: Config) -> int:
    """Numbers in the checkpoint, correction biases of routers included."""
    return sum(_parts(config).values())


def active_matrix_parameters(config: Config) -> int:
    """Matrix entries that one token multiplies: without embedding, with the experts that it is routed to."""
    experts, chosen, _ = routing(config)
    parts = _parts(config)
    routed = parts["routed experts"] * chosen // experts
    return sum(
        parts[part] for part in ("attention", "dense", "shared experts", "routers", "head")
    ) + int(routed)


def _parts(config: Config) -> dict[str, int]:
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    experts, _, shared = routing(config)
    sparse = layers - config["first_k_dense_replace"]
    expert = 3 * hidden * config["moe_intermediate_size"]
    attention = [_kda(config) if is_kda(config, layer) else _mla(config) for layer in range(layers)]
    return {
        "embedding": config["vocab_size"] * hidden,
        "head": config["vocab_size"] * hidden,
        "norms": (2 * layers + 1) * hidden,
        "attention": sum(attention),
        "indexer": layers * _indexer(config) if is_glm(config) else 0,
        "dense": config["first_k_dense_replace"] * 3 * hidden * config["intermediate_size"],
        "routed experts": sparse * experts * expert,
        "shared experts": sparse * shared * expert,
        "routers": sparse * experts * (hidden + 1),
    }


def _mla(config: Config) -> int:
    hidden, heads, latent = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["kv_lora_rank"],
    )
    nope, rope, value = (
        config["qk_nope_head_dim"],
        config["qk_rope_head_dim"],
        config["v_head_dim"],
    )
    rank = config["q_lora_rank"]
    query = heads * (nope + rope)
    queries = hidden * query if rank is None else hidden * rank + rank + rank * query
    return (
        queries
        + hidden * (latent + rope)
        + latent
        + latent * heads * (nope + value)
        + heads * value * hidden
    )


def _indexer(config: Config) -> int:
    hidden, heads, width = config["hidden_size"], config["index_n_heads"], config["index_head_dim"]
    return config["q_lora_rank"] * heads * width + hidden * width + 2 * width + hidden * heads


def _kda(config: Config) -> int:
    hidden, linear = config["hidden_size"], config["linear_attn_config"]
    heads, width = linear["num_heads"], linear["head_dim"]
    inner = heads * width
    gates = 2 * (hidden * width + width * inner) + hidden * heads
    return (
        4 * hidden * inner
        + gates
        + 3 * inner * linear["short_conv_kernel_size"]
        + inner
        + heads
        + width
    )
