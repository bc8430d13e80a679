# SPDX-License-Identifier: Apache-2.0
"""Write a dummy checkpoint of a real architecture with few layers: config, byte tokenizer, bf16 weights.

    python packages/kv-cache-4bit/benchmarks/make_dummy.py --arch glm-flash --out dummy-flash

| --arch | architecture | layers | attention that is kept as it is |
|---|---|---|---|
| glm-flash | Glm5NextForConditionalGeneration | 8, of which 2 are full attention | 64 heads, latent 512, no rope, k-pool indexer 4 → 2048 |
| glm-dsa | GlmMoeDsaForCausalLM | 9, of which 3 index | 64 heads, latent 512 + rope 64, indexer top-k 2048 |
| deepseek-v3 | DeepseekV3ForCausalLM | 6 | 64 heads, latent 512 + rope 64, dense |
| qwen35 | Qwen3_5ForCausalLM | 8, of which 2 are full attention | 24 query and 4 KV heads of 256 with gates; Gated DeltaNet, 16 and 48 heads of 128 |

1.4 to 2.4 GB; ``--tiny`` cuts hidden size, heads and experts too (a few MB; of these the CPU engine runs deepseek-v3 and, with what `tests/gdn_server.py`
stands in for, qwen35; the kernels of the sparse ones need a GPU). ``--draft`` adds the NextN layer (not of qwen35), for ``--speculative-algorithm EAGLE``; ``--layers`` takes another number
of layers.

*Weights* are random but not flat, so that logits, attention and the indexer's choice depend on the prompt: matrices are normal with
a spread of 1 / sqrt(inputs) times a gain, norms are 1, what writes to the residual stream is divided by sqrt(2 × layers). The engine's
own ``--load-format dummy`` draws everything from ±0.001: activations vanish and every prompt has one answer.
A vision tower of one layer stands in the config of glm-flash; it gets no weights and is switched off (`language_model_only`).
"""

from __future__ import annotations

import argparse
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ARCHS = ("glm-flash", "glm-dsa", "deepseek-v3", "qwen35")
BOS, EOS = 256, 257  # behind the 256 bytes

Config = dict[str, Any]


@dataclass(frozen=True)
class Weight:
    """One tensor of the checkpoint.

    Args:
        name: in the file.
        shape: rows are outputs.
        gain: spread of the output where inputs have spread 1; the fan-in is the last dimension.
        fill: instead of normal values: one number, or (low, high) for even ones.
    """

    name: str
    shape: tuple[int, ...]
    gain: float = 1.0
    fill: float | tuple[float, float] | None = None

    def make(self, seed: int) -> torch.Tensor:
        """Its values in bf16; they depend on the seed and the name, not on the order of writing."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {self.name}".encode()))
        values = torch.empty(self.shape)
        if self.fill is None:
            values.normal_(0.0, self.gain / math.sqrt(self.shape[-1]), generator=generator)
        elif isinstance(self.fill, tuple):
            values.uniform_(*self.fill, generator=generator)
        else:
            values.fill_(self.fill)
        return values.to(torch.bfloat16)


def norm(name: str, size: int, fill: float = 1.0) -> Weight:
    return Weight(f"{name}.weight", (size,), fill=fill)


def linear(name: str, outputs: int, inputs: int, gain: float = 1.0) -> Weight:
    return Weight(f"{name}.weight", (outputs, inputs), gain)


# --- Architectures --------------------------------------------------------------------------------------------------


def text_config(arch: str, tiny: bool, draft: bool) -> Config:
    """Fields that the language model reads."""
    if arch == "qwen35":
        if draft:
            raise SystemExit("qwen35 is made without a draft; leave --draft out")
        return _qwen35(tiny)
    config: Config = {
        "hidden_size": 128 if tiny else 2048,
        "intermediate_size": 256 if tiny else 4096,
        "moe_intermediate_size": 64 if tiny else 512,
        "num_attention_heads": 4 if tiny else 64,
        "num_key_value_heads": 4 if tiny else 64,
        "n_routed_experts": 4 if tiny else 16,
        "num_experts_per_tok": 2 if tiny else 4,
        "q_lora_rank": 64 if tiny else 1024,
        "vocab_size": 512 if tiny else 32768,
        "kv_lora_rank": 512,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": int(draft),
        "max_position_embeddings": 4096 if tiny else 262144,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    index = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32}
    if arch == "glm-flash":
        return (
            config
            | index
            | {
                "model_type": "glm5_next_text",
                "num_hidden_layers": 4 if tiny else 8,
                "qk_nope_head_dim": 256,
                "qk_rope_head_dim": 0,
                "v_head_dim": 256,
                "index_kpool": 4,
                "index_kpool_compress": True,
                "index_kpool_always_select_tail": True,
                "linear_num_heads": 4 if tiny else 64,
                "linear_head_dim": 128,
                "linear_conv_kernel_dim": 4,
                "rope_parameters": {"rope_theta": 800000.0, "rope_type": "default"},
                "mhc": False,
            }
        )
    config |= {"qk_rope_head_dim": 64, "rope_theta": 10000.0}
    if arch == "glm-dsa":
        return (
            config
            | index
            | {
                "architectures": ["GlmMoeDsaForCausalLM"],
                "model_type": "glm_moe_dsa",
                "num_hidden_layers": 3 if tiny else 9,
                "qk_nope_head_dim": 192,
                "v_head_dim": 256,
                "index_topk_freq": 4,
                "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            }
        )
    return config | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2 if tiny else 6,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "rope_scaling": {
            "type": "yarn",
            "factor": 8,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }


def _qwen35(tiny: bool) -> Config:
    """Dense Qwen 3.5; tiny: every second layer is full attention, so that there are two in four."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 128 if tiny else 2048,
        "intermediate_size": 256 if tiny else 4096,
        "num_hidden_layers": 4 if tiny else 8,
        "full_attention_interval": 2 if tiny else 4,
        "num_attention_heads": 4 if tiny else 24,
        "num_key_value_heads": 2 if tiny else 4,
        "head_dim": 64 if tiny else 256,
        "attn_output_gate": True,
        "linear_num_key_heads": 2 if tiny else 16,
        "linear_num_value_heads": 4 if tiny else 48,
        "linear_key_head_dim": 32 if tiny else 128,
        "linear_value_head_dim": 32 if tiny else 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "vocab_size": 512 if tiny else 32768,
        "max_position_embeddings": 4096 if tiny else 262144,
        "rope_parameters": {
            "rope_theta": 10000000.0,
            "rope_type": "default",
            "partial_rotary_factor": 0.25,
        },
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }


def model_config(arch: str, tiny: bool, draft: bool, layers: int | None = None) -> Config:
    """The whole config.json."""
    text = text_config(arch, tiny, draft)
    if layers is not None:
        text["num_hidden_layers"] = layers
    if arch != "glm-flash":
        return text
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "language_model_only": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "text_config": text,
        "vision_config": {
            "model_type": "glm_ocr_vision",
            "depth": 1,
            "hidden_size": 64,
            "num_heads": 1,
            "intermediate_size": 128,
            "out_hidden_size": text["hidden_size"],
            "swiglu_limit": 7.0,
        },
    }


def is_linear(c: Config, layer: int) -> bool:
    """Linear attention: in glm-flash and qwen35 all but every fourth layer; a draft layer has none."""
    every = 4 if "linear_num_heads" in c else c.get("full_attention_interval", 1)
    return (layer + 1) % every != 0 and layer < c["num_hidden_layers"]


def has_indexer(c: Config, layer: int) -> bool:
    """Layers between share the choice of the one before; a draft layer has weights of its own."""
    if "index_topk" not in c:
        return False
    return max(layer - 1, 0) % c.get("index_topk_freq", 1) == 0 or layer == c["num_hidden_layers"]


def attention_layers(c: Config) -> tuple[int, int]:
    """Full-attention layers of a text config, a draft's not among them, and how many of these have an indexer of their own."""
    layers = [n for n in range(c["num_hidden_layers"]) if not is_linear(c, n)]
    kinds = c.get("indexer_types")
    return len(layers), sum(kinds[n] == "full" if kinds else has_indexer(c, n) for n in layers)


def weights(c: Config) -> Iterator[list[Weight]]:
    """Weights of a text config, a list per file."""
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    qwen = c["model_type"] == "qwen3_5_text"
    one = 0.0 if qwen else 1.0  # Qwen's norms add 1 to their weights
    for number in range(layers + c.get("num_nextn_predict_layers", 0)):
        at = f"model.layers.{number}"
        made = [
            norm(f"{at}.input_layernorm", hidden, one),
            norm(f"{at}.post_attention_layernorm", hidden, one),
        ]
        if qwen:
            made += _gated_delta(at, c) if is_linear(c, number) else _gqa(at, c)
        elif is_linear(c, number):
            made += _delta(f"{at}.self_attn", c)
        else:
            made += _mla(f"{at}.self_attn", c)
        if not is_linear(c, number) and has_indexer(c, number):
            made += _indexer(f"{at}.self_attn.indexer", c)
        dense = number < c.get("first_k_dense_replace", layers)
        made += _mlp(f"{at}.mlp", c, c["intermediate_size"]) if dense else _moe(f"{at}.mlp", c)
        if number >= layers:
            made += [
                norm(f"{at}.{name}", hidden) for name in ("enorm", "hnorm", "shared_head.norm")
            ]
            made.append(linear(f"{at}.eh_proj", hidden, 2 * hidden))
        yield made
    yield [
        Weight("model.embed_tokens.weight", (c["vocab_size"], hidden), gain=math.sqrt(hidden)),
        norm("model.norm", hidden, one),
        linear("lm_head", c["vocab_size"], hidden, gain=3.0),
    ]


def _residual(c: Config) -> float:
    return 1 / math.sqrt(2 * c["num_hidden_layers"])


def _mla(at: str, c: Config) -> list[Weight]:
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    return [
        linear(f"{at}.q_a_proj", rank, hidden),
        norm(f"{at}.q_a_layernorm", rank),
        linear(f"{at}.q_b_proj", heads * (nope + rope), rank, gain=3.0),  # scores of spread 3
        linear(f"{at}.kv_a_proj_with_mqa", c["kv_lora_rank"] + rope, hidden),
        norm(f"{at}.kv_a_layernorm", c["kv_lora_rank"]),
        linear(f"{at}.kv_b_proj", heads * (nope + value), c["kv_lora_rank"]),
        linear(f"{at}.o_proj", hidden, heads * value, gain=2 * _residual(c)),
    ]


def _indexer(at: str, c: Config) -> list[Weight]:
    heads, dim, hidden = c["index_n_heads"], c["index_head_dim"], c["hidden_size"]
    made = [
        linear(f"{at}.wq_b", heads * dim, c["q_lora_rank"]),
        linear(f"{at}.wk", dim, hidden),
        norm(f"{at}.k_norm", dim),
        Weight(f"{at}.k_norm.bias", (dim,), fill=0.0),
        linear(f"{at}.weights_proj", heads, hidden),
    ]
    if pool := c.get("index_kpool"):
        made += [
            Weight(f"{at}.index_kpool_compress_ape", (pool, dim), fill=(-0.1, 0.1)),
            Weight(f"{at}.index_kpool_compress_gate", (dim, hidden)),
        ]
    return made


def _delta(at: str, c: Config) -> list[Weight]:
    """Kimi delta attention."""
    hidden, heads, dim = c["hidden_size"], c["linear_num_heads"], c["linear_head_dim"]
    width = heads * dim
    return [
        *(linear(f"{at}.{name}_proj", width, hidden) for name in "qkv"),
        *(
            Weight(f"{at}.{n}_conv1d.weight", (width, 1, c["linear_conv_kernel_dim"]))
            for n in "qkv"
        ),
        linear(f"{at}.b_proj", heads, hidden),
        *(linear(f"{at}.{name}_a_proj", dim, hidden) for name in "fg"),
        *(linear(f"{at}.{name}_b_proj", width, dim) for name in "fg"),
        Weight(f"{at}.A_log", (heads,), fill=(-1.0, 1.0)),
        Weight(
            f"{at}.dt_bias", (width,), fill=(-4.0, -1.0)
        ),  # a memory of tens to hundreds of tokens
        norm(f"{at}.o_norm", dim),
        linear(f"{at}.o_proj", hidden, width, gain=2 * _residual(c)),
    ]


def _gqa(at: str, c: Config) -> list[Weight]:
    """Attention with grouped queries, norms of heads and a gate beside each query; scores of spread 3."""
    hidden, dim = c["hidden_size"], c["head_dim"]
    heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
    return [
        linear(f"{at}.self_attn.q_proj", 2 * heads * dim, hidden),
        linear(f"{at}.self_attn.k_proj", kv * dim, hidden),
        linear(f"{at}.self_attn.v_proj", kv * dim, hidden),
        norm(f"{at}.self_attn.q_norm", dim, 2.0),
        norm(f"{at}.self_attn.k_norm", dim, 0.0),
        linear(f"{at}.self_attn.o_proj", hidden, heads * dim, gain=4 * _residual(c)),
    ]


def _gated_delta(at: str, c: Config) -> list[Weight]:
    """Gated DeltaNet."""
    hidden, heads, dim = c["hidden_size"], c["linear_num_value_heads"], c["linear_value_head_dim"]
    keys, width = c["linear_num_key_heads"] * c["linear_key_head_dim"], heads * dim
    at = f"{at}.linear_attn"
    return [
        linear(f"{at}.in_proj_qkv", 2 * keys + width, hidden),
        linear(f"{at}.in_proj_z", width, hidden),
        linear(f"{at}.in_proj_b", heads, hidden),
        linear(f"{at}.in_proj_a", heads, hidden),
        Weight(f"{at}.conv1d.weight", (2 * keys + width, 1, c["linear_conv_kernel_dim"])),
        Weight(f"{at}.A_log", (heads,), fill=(-1.0, 1.0)),
        Weight(f"{at}.dt_bias", (heads,), fill=(-4.0, -1.0)),
        norm(f"{at}.norm", dim),
        linear(f"{at}.out_proj", hidden, width, gain=2 * _residual(c)),
    ]


def _mlp(at: str, c: Config, inner: int) -> list[Weight]:
    hidden = c["hidden_size"]
    return [
        linear(f"{at}.gate_proj", inner, hidden),
        linear(f"{at}.up_proj", inner, hidden),
        linear(f"{at}.down_proj", hidden, inner, gain=2 * _residual(c)),
    ]


def _moe(at: str, c: Config) -> list[Weight]:
    experts, inner = c["n_routed_experts"], c["moe_intermediate_size"]
    made = [
        linear(f"{at}.gate", experts, c["hidden_size"]),
        Weight(f"{at}.gate.e_score_correction_bias", (experts,), fill=0.0),
        *_mlp(f"{at}.shared_experts", c, inner),
    ]
    for number in range(experts):
        made += _mlp(f"{at}.experts.{number}", c, inner)
    return made


# --- Files ----------------------------------------------------------------------------------------------------------


def tokenizer() -> tuple[Config, Config]:
    """tokenizer.json and tokenizer_config.json: one token for each byte, in the byte alphabet of GPT-2."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + n) for n, byte in enumerate(others)}
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    added = [
        {"id": number, "content": text, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for number, text in ((BOS, "<bos>"), (EOS, "<eos>"))
    ]
    model = {
        "type": "BPE",
        "vocab": {letters[byte]: byte for byte in range(256)},
        "merges": [],
        "fuse_unk": False,
        "byte_fallback": False,
    }
    whole = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": level,
        "decoder": level,
        "model": model,
    }
    return whole, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
    }


def write(
    arch: str,
    out: Path,
    *,
    tiny: bool = False,
    draft: bool = False,
    seed: int = 0,
    layers: int | None = None,
) -> int:
    """Write the checkpoint into a new or empty folder; returns the bytes of its weights."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise SystemExit(f"{out} is not empty; name a new folder")
    config = model_config(arch, tiny, draft, layers)
    files = {"config.json": config}
    files["tokenizer.json"], files["tokenizer_config.json"] = tokenizer()
    index, total = {}, 0
    shards = list(weights(config.get("text_config", config)))
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        tensors = {weight.name: weight.make(seed) for weight in shard}
        save_file(tensors, out / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        print(
            f"\r{arch}: {number + 1}/{len(shards)} files, {total / 1e9:.2f} GB", end="", flush=True
        )
    print()
    files["model.safetensors.index.json"] = {"metadata": {"total_size": total}, "weight_map": index}
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return total


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", choices=ARCHS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="new or empty folder")
    parser.add_argument("--tiny", action="store_true", help="a few MB, for tests")
    parser.add_argument("--draft", action="store_true", help="with the NextN layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, help="instead of the table's number")
    options = parser.parse_args(argv)
    named = {name: getattr(options, name) for name in ("tiny", "draft", "seed", "layers")}
    write(options.arch, options.out, **named)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
