# SPDX-License-Identifier: Apache-2.0
"""The two models in torch, and their tensors under the names that Hugging Face and SGLang load.

Parameters are named as in the released checkpoints, so only stacked experts are taken apart on the way out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from judge_configs import Config, is_glm, is_kda
from judge_kda import DeltaAttention, ShortConv
from judge_mla import Indexer, IndexerLesson, LatentAttention, rotary_tables
from judge_moe import MLP, Experts, MoE, RMSNorm, Router
from torch import Tensor, nn

# Kept in fp32 on disk: experts are chosen, and decays are taken, from small differences of these.
FP32 = ("e_score_correction_bias", "A_log", "dt_bias")


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn = (
            DeltaAttention(config) if is_kda(config, layer) else LatentAttention(config)
        )
        sparse = layer >= config["first_k_dense_replace"]
        feed = MoE(config) if sparse else MLP(hidden, config["intermediate_size"])
        self.feed_name = "block_sparse_moe" if sparse and not is_glm(config) else "mlp"
        setattr(self, self.feed_name, feed)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None, mode: str) -> Tensor:
        normed = self.input_layernorm(x)
        if isinstance(self.self_attn, LatentAttention):
            x = x + self.self_attn(normed, tables, mode)
        else:
            x = x + self.self_attn(normed)
        out: Tensor = x + getattr(self, self.feed_name)(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, blocks, final norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Block(config, i) for i in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])


class JudgeModel(nn.Module):
    """Tokens [B, T] → logits [B, T, vocabulary]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)

    def forward(self, tokens: Tensor, mode: str = "dense") -> Tensor:
        """`mode` is one of `judge_mla.MODES`; models without an indexer know `dense` only."""
        x = self.model.embed_tokens(tokens)
        tables = None
        if is_glm(self.config):
            tables = rotary_tables(self.config, tokens.shape[1], tokens.device)
        for block in self.model.layers:
            x = block(x, tables, mode)
        out: Tensor = self.lm_head(self.model.norm(x))
        return out

    def lessons(self) -> list[IndexerLesson]:
        """What the indexers heard in the last forward pass, one per layer."""
        heard = [module.lesson for module in self.modules() if isinstance(module, LatentAttention)]
        return [lesson for lesson in heard if lesson is not None]

    def routers(self) -> list[Router]:
        """The routers, in layer order."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def indexer_parameters(self) -> list[nn.Parameter]:
        """What the indexer's loss moves."""
        found = (module for module in self.modules() if isinstance(module, Indexer))
        return [parameter for module in found for parameter in module.parameters()]


@torch.no_grad()
def initialise(model: JudgeModel, seed: int) -> None:
    """Matrices normal with deviation 1/√(inputs), outputs into the residual stream less by 1/√(2 layers).

    Seeded on the CPU, so that every device starts from the same numbers. Norms keep 1, biases 0. KDA's decays start
    as in its release: exp(A_log) uniform in 1…16, softplus(dt_bias) log-uniform in 1e-3…0.1.
    """
    source = torch.Generator().manual_seed(seed)

    def normal(parameter: nn.Parameter, deviation: float) -> None:
        drawn = torch.empty(parameter.shape).normal_(0, deviation, generator=source)
        parameter.copy_(drawn)

    damp = (2 * model.config["num_hidden_layers"]) ** -0.5
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            into_residual = name.endswith(("o_proj", "down_proj"))
            normal(module.weight, module.in_features**-0.5 * (damp if into_residual else 1.0))
        elif isinstance(module, Router):
            normal(module.weight, module.weight.shape[1] ** -0.5)
        elif isinstance(module, Experts):
            normal(module.gate_up_proj, module.gate_up_proj.shape[2] ** -0.5)
            normal(module.down_proj, module.down_proj.shape[2] ** -0.5 * damp)
        elif isinstance(module, ShortConv):
            normal(module.weight, module.weight.shape[2] ** -0.5)
        elif isinstance(module, DeltaAttention):
            rate = torch.rand(module.A_log.shape, generator=source) * 15 + 1
            step = (torch.rand(module.dt_bias.shape, generator=source) * 4.6 - 6.9).exp()
            module.A_log.copy_(rate.log())
            module.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
    normal(model.model.embed_tokens.weight, 0.3)
    normal(model.lm_head.weight, 0.02)


def to_checkpoint(model: JudgeModel, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Tensors of the checkpoint on the CPU, experts apart, in `dtype` (what `FP32` names stays fp32)."""
    gate, up, down = (
        ("gate_proj", "up_proj", "down_proj") if is_glm(model.config) else ("w1", "w3", "w2")
    )
    out = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach().cpu()
        kept = torch.float32 if name.endswith(FP32) else dtype
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix(".gate_up_proj")
            for expert, both in enumerate(tensor):
                for word, half in zip((gate, up), both.chunk(2), strict=True):
                    out[f"{stem}.{expert}.{word}.weight"] = half.to(kept)
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix(".down_proj")
            for expert, one in enumerate(tensor):
                out[f"{stem}.{expert}.{down}.weight"] = one.to(kept)
        else:
            out[name] = tensor.to(kept)
    return {name: tensor.contiguous().clone() for name, tensor in out.items()}


def from_checkpoint(config: Config, tensors: Mapping[str, Tensor]) -> JudgeModel:
    """The model in fp32 with these tensors; raises RuntimeError when names or shapes do not fit."""
    words = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}
    state: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", name):
            stem, expert, word = found.groups()
            experts.setdefault(stem, {}).setdefault(int(expert), {})[words[word]] = tensor.float()
        else:
            state[name] = tensor.float()
    for stem, parts in experts.items():
        ordered = [parts[i] for i in sorted(parts)]
        state[f"{stem}.gate_up_proj"] = torch.stack([torch.cat([p[0], p[1]]) for p in ordered])
        state[f"{stem}.down_proj"] = torch.stack([part[2] for part in ordered])
    model = JudgeModel(config)
    model.load_state_dict(state)
    return model.eval()


@torch.no_grad()
def round_to_bf16(model: JudgeModel) -> None:
    """Make the weights what the checkpoint can hold, so that what is evaluated is what is saved."""
    for name, tensor in model.state_dict().items():
        if not name.endswith(FP32):
            tensor.copy_(tensor.bfloat16())
