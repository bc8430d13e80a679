# SPDX-License-Identifier: Apache-2.0
"""Expand a Llama-architecture GGUF file into a Hugging Face directory, without torch or transformers.

*What*     config.json, generation_config.json, model.safetensors (bfloat16), tokenizer.json, tokenizer_config.json
           and chat_template.jinja. The weights keep the rounding of the GGUF's quantization.
*Why own*  the bytes depend on the GGUF alone, not on a transformers release, so every file has one fixed sha256.
*Memory*   a few thousand rows at a time, never the whole model.
*Needs*    `numpy` and `gguf` (both are engine packages); imported only when a conversion runs.
*Refuses*  other architectures, other tokenizer kinds and tensors without a Llama name: `ConvertError`, one line.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

# GGUF tensor name inside "blk.<n>." -> Hugging Face name inside "model.layers.<n>.".
LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
CONTROL_TOKEN = 3  # GGUF's token type of special tokens
ROWS_AT_A_TIME = 4096


class ConvertError(RuntimeError):
    """The GGUF cannot be converted; the message is one line for the user."""


def convert(source: Path, out: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Write the Hugging Face directory `out` (created) for the GGUF file `source`.

    `progress(done, total)` is called with parameter counts. Raises `ConvertError` for what is not supported or not
    readable, `OSError` when the disk does not take the files.
    """
    gguf = load_gguf()
    try:
        reader = gguf.GGUFReader(source)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError) as error:
        raise ConvertError(f"{source}: not a readable GGUF file ({error})") from None

    try:
        config = model_config(fields, tied="output.weight" not in {t.name for t in reader.tensors})
        tokenizer, tokenizer_config = tokenizer_files(fields)
    except KeyError as error:
        raise ConvertError(f"{source}: the GGUF lacks the field {error}") from None

    out.mkdir(parents=True, exist_ok=True)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", special)
    _write_json(out / "tokenizer_config.json", tokenizer_config)
    # One token or merge per line would triple the file; the tokenizer is data, not text to read.
    (out / "tokenizer.json").write_text(
        json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")), encoding="utf-8"
    )
    if template := fields.get("tokenizer.chat_template"):
        (out / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_weights(reader.tensors, config, out / "model.safetensors", progress)


def load_gguf() -> Any:
    """The `gguf` module; raises `ConvertError` where the engine packages are not installed."""
    try:
        import gguf
    except ImportError as error:
        raise ConvertError(
            f"converting a GGUF needs the engine packages ({error.name} is missing): "
            "run `python -m numinous_cpu_platform install`"
        ) from None
    return gguf


def model_config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """`config.json` of a Llama model from GGUF fields; raises `ConvertError` or `KeyError` (a missing field)."""
    architecture = fields["general.architecture"]
    if architecture != "llama":
        raise ConvertError(f"GGUF architecture {architecture!r} is not supported, only 'llama' is")
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "dtype": "bfloat16",
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": fields.get(
            "llama.rope.dimension_count", fields["llama.embedding_length"] // heads
        ),
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "initializer_range": 0.02,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "pretraining_tp": 1,
        # GGUF stores float32; its shortest decimal form is the number the model was trained with.
        "rms_norm_eps": _shortest_float32(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": {
            "rope_theta": fields["llama.rope.freq_base"],
            "rope_type": "default",
        },
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


def tokenizer_files(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of tokenizer.json and tokenizer_config.json of a byte-level BPE tokenizer."""
    kind, splitter = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre")
    if (kind, splitter) != ("gpt2", "smollm"):
        raise ConvertError(
            f"GGUF tokenizer {kind!r} with splitter {splitter!r} is not supported, only 'gpt2' with 'smollm' is"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    added = [
        {
            "id": number,
            "content": tokens[number],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, token_type in enumerate(fields["tokenizer.ggml.token_type"])
        if token_type == CONTROL_TOKEN
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        # llama.cpp's splitter "smollm": single digits first, then the GPT-2 words.
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in fields["tokenizer.ggml.merges"]],
        },
    }
    tokenizer_config = {
        "add_prefix_space": False,
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for name, key in (("pad_token", "padding_token_id"), ("unk_token", "unknown_token_id")):
        if (number := fields.get(f"tokenizer.ggml.{key}")) is not None:
            tokenizer_config[name] = tokens[number]
    return tokenizer, tokenizer_config


def write_weights(
    tensors: list[Any],
    config: dict[str, Any],
    out: Path,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the GGUF reader's `tensors` as one bfloat16 safetensors file with Hugging Face names."""
    from gguf.quants import dequantize

    named = sorted((hugging_face_name(tensor.name), tensor) for tensor in tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = total = 0
    for name, tensor in named:
        end = offset + 2 * int(tensor.n_elements)
        # GGUF counts dimensions from the fastest one, torch from the slowest.
        shape = [int(size) for size in reversed(tensor.shape)]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset, total = end, total + int(tensor.n_elements)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data 8-byte aligned

    done = 0
    with out.open("wb") as sink:
        sink.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in named:
            heads = None
            if name.endswith("q_proj.weight"):
                heads = config["num_attention_heads"]
            elif name.endswith("k_proj.weight"):
                heads = config["num_key_value_heads"]
            # Rows are independent, except that the rows of q and k are put in another order.
            step = len(tensor.data) if heads else ROWS_AT_A_TIME
            for start in range(0, len(tensor.data), step):
                values = dequantize(tensor.data[start : start + step], tensor.tensor_type)
                if heads:
                    values = half_split_rows(values, heads)
                sink.write(to_bfloat16(values).tobytes())
            done += int(tensor.n_elements)
            if progress:
                progress(done, total)


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; raises `ConvertError` for unknown names."""
    if name in OUTER_TENSORS:
        return OUTER_TENSORS[name]
    block, _, rest = name.partition(".")
    layer, _, inner = rest.partition(".")
    if block == "blk" and layer.isdigit() and inner in LAYER_TENSORS:
        return f"model.layers.{layer}.{LAYER_TENSORS[inner]}"
    raise ConvertError(f"GGUF tensor {name!r} has no place in a Llama model")


def half_split_rows(weight, heads: int):
    """Undo llama.cpp's row order of q and k: rotary pairs interleaved -> first and second half of each head."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def to_bfloat16(values):
    """Round a float32 array to bfloat16, ties to even; returns the 16-bit patterns as little-endian `uint16`."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _shortest_float32(value: float) -> float:
    import numpy as np

    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
