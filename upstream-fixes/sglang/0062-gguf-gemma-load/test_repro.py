# SPDX-License-Identifier: Apache-2.0
"""Gemma 2 and Gemma 3 GGUF files must reach the model with its own names and with the checkpoint's norms."""

import contextlib
import copy
import types

import gguf
import numpy as np
import pytest
import repro
import torch

repro.bare_packages("sglang", "sglang.srt", "sglang.srt.model_loader")

HIDDEN, FFN, VOCAB, HEAD_DIM = 32, 64, 64, 16
NORMS = {
    "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
    "blk.0.post_attention_norm.weight": "model.layers.0.post_attention_layernorm.weight",
    "blk.0.ffn_norm.weight": "model.layers.0.pre_feedforward_layernorm.weight",
    "blk.0.post_ffw_norm.weight": "model.layers.0.post_feedforward_layernorm.weight",
    "output_norm.weight": "model.norm.weight",
}
HEAD_NORMS = {
    "blk.0.attn_q_norm.weight": "model.layers.0.self_attn.q_norm.weight",
    "blk.0.attn_k_norm.weight": "model.layers.0.self_attn.k_norm.weight",
}
EMBEDDING = "model.embed_tokens.weight"


def write(path, architecture):
    """A file as the converter makes it, and the checkpoint's norms and (rounded) embedding."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    expected = {}
    for stored, name in {**NORMS, **(HEAD_NORMS if architecture == "gemma3" else {})}.items():
        weight = rng.integers(-8, 8, HEAD_DIM if name in HEAD_NORMS.values() else HIDDEN) / 8
        expected[name] = torch.from_numpy(weight.astype(np.float32))
        writer.add_tensor(stored, (weight + 1).astype(np.float32))
    q8 = gguf.GGMLQuantizationType.Q8_0
    raw = gguf.quantize(rng.standard_normal((VOCAB, HIDDEN), dtype=np.float32), q8)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=q8)
    expected[EMBEDDING] = torch.from_numpy(gguf.dequantize(raw, q8))
    down = gguf.quantize(rng.standard_normal((HIDDEN, FFN), dtype=np.float32), q8)
    writer.add_tensor("blk.0.ffn_down.weight", down, raw_dtype=q8)
    expected["model.layers.0.mlp.down_proj.qweight"] = torch.from_numpy(down.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


class BaseModelLoader:
    def __init__(self, load_config):
        self.load_config = load_config


class Names:
    """The model of transformers on the meta device: the loader asks it for its parameter names."""

    def __init__(self, config):
        config._attn_implementation = "sdpa"  # as from_config of transformers does
        self.names = [*NORMS.values(), EMBEDDING, "model.layers.0.mlp.down_proj.weight"]
        if config.model_type == "gemma3_text":
            self.names += HEAD_NORMS.values()

    def state_dict(self):
        return dict.fromkeys(self.names)


class Recorder(torch.nn.Module):
    """In place of the served model: keeps what the loader hands over."""

    def load_weights(self, weights):
        self.given = dict(weights)


def load(path, model_type):
    config = types.SimpleNamespace(
        model_type=model_type,
        num_hidden_layers=1,
        update=lambda values: None,
        _attn_implementation=None,
    )
    namespace = {"torch": torch, "AutoModelForCausalLM": types.SimpleNamespace(from_config=Names)}
    for name in ("get_gguf_extra_tensor_names", "gguf_quant_weights_iterator"):
        repro.load_function("srt/model_loader/weight_utils.py", name, namespace)
    namespace |= {
        "os": __import__("os"),
        "copy": copy,
        "BaseModelLoader": BaseModelLoader,
        "_get_quantization_config": lambda *args: None,
        "_initialize_model": lambda *args: Recorder(),
        "set_default_torch_dtype": lambda dtype: contextlib.nullcontext(),
    }
    cls = repro.load_function("srt/model_loader/loader.py", "GGUFModelLoader", namespace)
    loader = cls(types.SimpleNamespace(model_loader_extra_config=None, load_format="gguf"))
    model = loader.load_model(
        model_config=types.SimpleNamespace(
            model_path=str(path), hf_config=config, dtype=torch.float32
        ),
        device_config=types.SimpleNamespace(device="cpu"),
    )
    assert config._attn_implementation is None, "Gemma3ForCausalLM, which has no sdpa, would refuse"
    return model.given


@pytest.mark.parametrize(
    ("architecture", "model_type"), [("gemma2", "gemma2"), ("gemma3", "gemma3_text")]
)
def test_norms_and_embedding_are_those_of_the_checkpoint(tmp_path, architecture, model_type):
    path = tmp_path / "model.gguf"
    expected = write(path, architecture)
    given = load(path, model_type)
    for name, weight in expected.items():
        assert name in given, name
        assert torch.equal(given[name], weight), name
    assert set(given) - set(expected) == {"model.layers.0.mlp.down_proj.qweight_type"}
