# SPDX-License-Identifier: Apache-2.0
"""Hugging Face directories of the models: writing (bf16, dense, FP8), reading back, and comparing with the Hugging Face classes.

A directory holds `config.json`, `generation_config.json`, `model.safetensors` (bf16), `tokenizer.json`,
`tokenizer_config.json`. Which release of transformers can check what: the class of `kimi_linear` came after the
release that SGLang 0.5.20 pins; and that pinned release turns the indexer's rotary pairs by halves whatever
`indexer_rope_interleave` says, which only shows where a context is longer than `index_topk`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from judge_configs import END_OF_TEXT, PADDING, Config, is_glm
from judge_corpus import SPECIAL, sha256
from judge_model import JudgeModel, from_checkpoint, to_checkpoint
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

WEIGHTS = "model.safetensors"
FP8_BLOCK = 128


def save(model: JudgeModel, tokenizer: Tokenizer | None, folder: Path) -> dict[str, dict[str, Any]]:
    """Write the directory; returns {file: {"bytes", "sha256"}}."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    save_file(to_checkpoint(model), folder / WEIGHTS, metadata={"format": "pt"})
    _write(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(folder / "generation_config.json", {"do_sample": False, **ids})
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
        special = {"bos_token": SPECIAL[END_OF_TEXT], "eos_token": SPECIAL[END_OF_TEXT]}
        _write(
            folder / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": config["max_position_embeddings"],
                "pad_token": SPECIAL[PADDING],
                "clean_up_tokenization_spaces": False,
                **special,
            },
        )
    files = sorted(path for path in folder.iterdir() if path.name != "record.json")
    return {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files}


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_dense(folder: Path, out: Path) -> None:
    """Write `glm-dsa` of `folder` to `out` as `DeepseekV3ForCausalLM`: the same model without its indexer.

    For engines that have no DSA. On contexts of at most `index_topk` tokens the two are the same function. The
    scaling of 1 leaves rotary angles as they are; SGLang's rotary embedding for CPUs asks for one.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not is_glm(config):
        raise ValueError(f"{folder}: {config['model_type']} has no indexer to leave out")
    dense = {key: value for key, value in config.items() if not key.startswith("index")}
    dense |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    length = config["max_position_embeddings"]
    dense["rope_parameters"] = {
        **config["rope_parameters"],
        "rope_type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": length,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    out.mkdir(parents=True, exist_ok=True)
    _write(out / "config.json", dense)
    tensors = load_file(folder / WEIGHTS)
    kept = {name: tensor for name, tensor in tensors.items() if ".indexer." not in name}
    save_file(kept, out / WEIGHTS, metadata={"format": "pt"})
    for path in (*folder.glob("tokenizer*.json"), folder / "generation_config.json"):
        shutil.copy(path, out)


def write_fp8(folder: Path, out: Path) -> None:
    """Write `glm-dsa` of `folder` to `out` with linears in FP8, as GLM-5-FP8 and DeepSeek-V3 are released.

    E4M3 codes with one fp32 scale (amax / 448) for a block of 128 × 128, activations quantised by the engine. Embedding,
    head, norms, routers and the indexer's head weights stay as they are. For features that need a block-FP8 linear.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not is_glm(config):
        raise ValueError(f"{folder}: {config['model_type']} is not released in FP8 blocks")
    if "quantization_config" in config:
        raise ValueError(f"{folder}: is quantised already")
    if out.resolve() == folder.resolve():
        raise ValueError(f"{out}: is the model itself, which would be lost; name another folder")
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    }
    tensors = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        if _is_fp8(name, tensor):
            codes, scales = block_fp8(tensor)
            tensors |= {name: codes, name.removesuffix("weight") + "weight_scale_inv": scales}
        else:
            tensors[name] = tensor
    out.mkdir(parents=True, exist_ok=True)
    _write(out / "config.json", config)
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    for path in (*folder.glob("tokenizer*.json"), folder / "generation_config.json"):
        shutil.copy(path, out)


def _is_fp8(name: str, tensor: Tensor) -> bool:
    kept = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "weights_proj.weight")
    return name.endswith(".weight") and tensor.dim() == 2 and not name.endswith(kept)


def block_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes [rows, columns] and fp32 scales [⌈rows / 128⌉, ⌈columns / 128⌉]; code × scale is the weight."""
    if not weight.isfinite().all():
        raise ValueError("a weight that is no finite number has no scale")
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(
        weight.float(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK)
    )
    blocks = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    largest = blocks.abs().amax((1, 3))
    scales = torch.where(largest > 0, largest / torch.finfo(torch.float8_e4m3fn).max, 1.0)
    codes = (blocks / scales[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return codes.to(torch.float8_e4m3fn).contiguous(), scales.contiguous()


def load(folder: Path) -> JudgeModel:
    """The training module with the saved weights, fp32, on the CPU."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return from_checkpoint(config, load_file(folder / WEIGHTS))


def why_no_reference(config: Config, sparse: bool = False) -> str | None:
    """Why the installed transformers cannot check this model (`sparse`: beyond `index_topk`), or None."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    kind = config["model_type"]
    if importlib.util.find_spec(f"transformers.models.{kind}") is None:
        version = importlib.import_module("transformers").__version__
        return f"transformers {version} has no {kind}"
    if sparse and config["indexer_rope_interleave"] != _reference_interleaves():
        version = importlib.import_module("transformers").__version__
        said = "in halves" if config["indexer_rope_interleave"] else "interleaved"
        return f"transformers {version} rotates the indexer's pairs {said}, against this config"
    return None


def _reference_interleaves() -> bool:
    """Whether the installed class turns neighbours in the indexer: the other form needs a function of its own."""
    modeling = importlib.import_module("transformers.models.glm_moe_dsa.modeling_glm_moe_dsa")
    return not hasattr(modeling, "apply_rotary_pos_emb")


def reference(folder: Path) -> Any:
    """The Hugging Face model of a saved directory, fp32, plain attention; raises where a weight has no place."""
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: found for key, found in info.items() if found}
    if wrong:
        raise ValueError(f"{folder}: Hugging Face does not take these weights as they are: {wrong}")
    return model.eval()


@torch.no_grad()
def largest_difference(model: JudgeModel, other: Any, tokens: Tensor, mode: str = "dense") -> float:
    """Largest |Δ logit| between the training module and a Hugging Face model on tokens [B, T]."""
    theirs = other(tokens, use_cache=False).logits
    return float((model.eval()(tokens, mode=mode) - theirs).abs().max())
