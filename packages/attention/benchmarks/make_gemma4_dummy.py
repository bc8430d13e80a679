# SPDX-License-Identifier: Apache-2.0
"""Write a dummy checkpoint with the attention of Gemma 4 31B and few layers: config, byte tokenizer, bf16 weights.

    python packages/attention/benchmarks/make_gemma4_dummy.py --out dummy-gemma4

*Kept*     heads: 32 queries, 16 KV heads of 256 in windows of 1024 tokens, 4 KV heads of 512 in full layers; the pattern of five windows and one full layer;
           scale 1; RoPE of both kinds; full layers compute their values with the weights of their keys.
*Changed*  12 layers, a hidden size of 2048 and a vocabulary of 32768 (2.8 GB); ``--tiny``: 6 layers of 64, 4 heads, windows of 64 (for tests).
           Names are those that the engine gives Gemma 4's fields once it read them (full layers' first, windows' as `swa_…`), so that it
           serves the text model alone; nobody else reads this config. No per-layer embeddings, no layers that share a cache, no experts.
*Weights*  random but not flat, as of ``packages/kv-cache-4bit/benchmarks/make_dummy.py``. Queries are normalised to scores of spread 3. Head and
           embeddings are not tied: a random model with tied ones repeats its input.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2] / "kv-cache-4bit" / "benchmarks"))

from make_dummy import BOS, EOS, Weight, linear, norm, tokenizer

Config = dict[str, Any]
SPREAD = 3.0  # of scores and of logits


def config_of(tiny: bool, layers: int | None) -> Config:
    """The whole config.json."""
    count = layers or (6 if tiny else 12)
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "dtype": "bfloat16",
        "num_hidden_layers": count,
        "layer_types": [
            "sliding_attention" if number % 6 < 5 else "full_attention" for number in range(count)
        ],
        "sliding_window": 64 if tiny else 1024,
        "num_attention_heads": 4 if tiny else 32,
        "num_key_value_heads": 1 if tiny else 4,
        "swa_num_key_value_heads": 2 if tiny else 16,
        "head_dim": 512,
        "v_head_dim": 512,
        "swa_head_dim": 256,
        "swa_v_head_dim": 256,
        "global_head_dim": 512,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "hidden_size": 64 if tiny else 2048,
        "intermediate_size": 128 if tiny else 8192,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "vocab_size": 512 if tiny else 32768,
        "vocab_size_per_layer_input": 512 if tiny else 32768,
        "max_position_embeddings": 4096 if tiny else 262144,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_k_eq_v": True,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }


def weights(c: Config) -> Iterator[list[Weight]]:
    """A list per file."""
    hidden, inner, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    for number, kind in enumerate(c["layer_types"]):
        at, prefix = f"model.layers.{number}", "swa_" if kind == "sliding_attention" else ""
        dim, groups = c[f"{prefix}head_dim"], c[f"{prefix}num_key_value_heads"]
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        yield [
            *(norm(f"{at}.{name}", hidden) for name in ("input_layernorm", "pre_feedforward_layernorm")),
            # Of what a layer adds to the residual stream.
            *(
                Weight(f"{at}.{name}.weight", (hidden,), fill=2 / math.sqrt(2 * c["num_hidden_layers"]))
                for name in ("post_attention_layernorm", "post_feedforward_layernorm")
            ),
            linear(f"{attention}.q_proj", heads * dim, hidden),
            linear(f"{attention}.k_proj", groups * dim, hidden),
            *([linear(f"{attention}.v_proj", groups * dim, hidden)] if prefix else []),
            linear(f"{attention}.o_proj", hidden, heads * dim),
            Weight(f"{attention}.q_norm.weight", (dim,), fill=SPREAD / math.sqrt(dim)),
            norm(f"{attention}.k_norm", dim),
            linear(f"{mlp}.gate_proj", inner, hidden),
            linear(f"{mlp}.up_proj", inner, hidden),
            linear(f"{mlp}.down_proj", hidden, inner),
            Weight(f"{at}.layer_scalar", (1,), fill=1.0),
        ]  # fmt: skip
    yield [
        Weight("model.embed_tokens.weight", (c["vocab_size"], hidden)),  # times sqrt(hidden) when read
        norm("model.norm", hidden),
        linear("lm_head", c["vocab_size"], hidden, gain=SPREAD),
    ]  # fmt: skip


def write(out: Path, *, tiny: bool = False, layers: int | None = None, seed: int = 0) -> int:
    """Write the checkpoint into a new or empty folder; returns the bytes of its weights."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise SystemExit(f"{out} is not empty; name a new folder")
    config = config_of(tiny, layers)
    files: dict[str, Config] = {"config.json": config}
    files["tokenizer.json"], files["tokenizer_config.json"] = tokenizer()
    index: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(weights(config)):
        name = f"model-{number:05}.safetensors"
        tensors = {weight.name: weight.make(seed) for weight in shard}
        save_file(tensors, out / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    files["model.safetensors.index.json"] = {"metadata": {"total_size": total}, "weight_map": index}
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{out}: {config['num_hidden_layers']} layers, {total / 1e9:.2f} GB")
    return total


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="new or empty folder")
    parser.add_argument("--tiny", action="store_true", help="a few MB, for tests")
    parser.add_argument("--layers", type=int, help="a multiple of 6")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.layers is not None and (options.layers < 6 or options.layers % 6):
        parser.error("--layers: five windows and a full layer, again and again")
    write(options.out, tiny=options.tiny, layers=options.layers, seed=options.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
