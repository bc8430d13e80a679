# SPDX-License-Identifier: Apache-2.0
"""Script: write the tiny random models `llama` and `mla` below a folder. `python make_tiny.py FOLDER`.

The weights are drawn wide enough (std 0.2) that neighbouring logits are far apart: greedy tokens then compare safely.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig

COMMON = {
    "vocab_size": 256,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def llama() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        **COMMON,
    )


def mla() -> DeepseekV3Config:
    """DeepSeek V3's attention at its real row width (512 latent + 64 rotary), dense feed-forward layers only."""
    return DeepseekV3Config(
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=96,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        first_k_dense_replace=COMMON["num_hidden_layers"],
        # The engine's rotary factory for CPUs serves this model with a scaled embedding only.
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        **COMMON,
    )


def write(config: LlamaConfig | DeepseekV3Config, out: Path) -> None:
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(out)


def main() -> None:
    folder = Path(sys.argv[1])
    write(llama(), folder / "llama")
    write(mla(), folder / "mla")
    # The engine's model class reads this key without a default.
    path = folder / "mla" / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), "moe_layer_freq": 1}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
