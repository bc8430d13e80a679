# SPDX-License-Identifier: Apache-2.0
"""What EAGLE3 captures of Gemma 3 must be the hidden states between the layers, residual included."""

import types

import pytest
import repro
import torch

LAYERS, TOKENS, WIDTH = 4, 3, 8
MODEL = "srt/models/gemma3_causal.py"


def normalise(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def norm(x, residual=None):
    """Gemma3RMSNorm with weight 0; with a residual it works in place, as its CUDA kernel does."""
    if residual is None:
        return normalise(x)
    residual.add_(x)
    x.copy_(normalise(residual))
    return x, residual


def model_of(namespace):
    layer_forward = repro.load_function(MODEL, "Gemma3DecoderLayer.forward", namespace)
    generator = torch.Generator().manual_seed(0)
    layers = []
    for _ in range(LAYERS):
        attention, mlp = torch.randn(2, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
        layer = types.SimpleNamespace(
            input_layernorm=norm,
            post_attention_layernorm=norm,
            pre_feedforward_layernorm=norm,
            post_feedforward_layernorm=norm,
            mlp=lambda x, weight=mlp: x @ weight,
        )

        def attend(*, hidden_states, weight=attention, **rest):
            return hidden_states @ weight

        attend.is_sliding = False
        layer.self_attn = attend
        layers.append(lambda layer=layer, **kwargs: layer_forward(layer, **kwargs))
        layers[-1].parts = (attention, mlp)
    return types.SimpleNamespace(
        layers=layers,
        rotary_emb=lambda *args: None,
        rotary_emb_local=lambda *args: None,
        norm=norm,
    )


def reference(layers, hidden):
    """Hidden state in front of every layer and after the last, by the plain formula."""
    states = [hidden]
    for layer in layers:
        attention, mlp = layer.parts
        hidden = hidden + normalise(normalise(hidden) @ attention)
        hidden = hidden + normalise(normalise(hidden) @ mlp)
        states.append(hidden)
    return states


@pytest.mark.parametrize("cpu_kernels", [False, True])
@pytest.mark.parametrize("captured", [[0, 1, 2, 3, 4], [2], [4]])
def test_captured_states_are_those_between_the_layers(cpu_kernels, captured):
    namespace = {
        "torch": torch,
        "einops": types.SimpleNamespace(rearrange=lambda x, pattern: x.unsqueeze(0)),
        "_is_cpu": cpu_kernels,
        "_is_cpu_amx_available": cpu_kernels,
    }
    model = model_of(namespace)
    model.layers_to_capture = captured
    forward = repro.load_function(MODEL, "Gemma3TextModel.forward", namespace)
    generator = torch.Generator().manual_seed(1)
    embedded = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    expected = reference(model.layers, embedded.clone())
    out, states = forward(
        model, None, torch.arange(TOKENS), forward_batch=None, input_embeds=embedded.clone()
    )
    torch.testing.assert_close(out, normalise(expected[-1]))
    assert len(states) == len(captured)
    for index, state in zip(captured, states, strict=True):
        assert torch.allclose(state, expected[index]), f"captured {index}"
