# SPDX-License-Identifier: Apache-2.0
"""Feed-forward layers: RMSNorm, gated MLP, and experts routed by sigmoid scores with a correction bias (noaux_tc).

The bias only chooses experts, it does not weigh them, and no gradient reaches it: `Router.rebalance` moves it by a
fixed step towards experts with less than the mean load. Experts run as a grouped GEMM (`torch._grouped_mm`, bf16) or
as a loop; tests hold the two together.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from judge_configs import Config, routing
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) · weight; the mean in fp32."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(
            x.dtype
        )


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Router(nn.Module):
    """Chooses `chosen` of `experts` per token; weights sum to `scaling`."""

    e_score_correction_bias: Tensor
    load: Tensor

    def __init__(self, hidden: int, experts: int, chosen: int, scaling: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)
        self.chosen, self.scaling = chosen, scaling

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, hidden] → experts [N, chosen], weights [N, chosen] fp32."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        experts = torch.topk(scores + self.e_score_correction_bias, self.chosen, dim=-1).indices
        weights = scores.gather(1, experts)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scaling
        if self.training:
            self.load += tokens_per_expert(experts, len(self.load))
        return experts, weights

    @torch.no_grad()
    def rebalance(self, step: float) -> None:
        """Move the bias by `step` against the load since the last call, and forget that load."""
        self.e_score_correction_bias += step * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


def tokens_per_expert(experts: Tensor, number: int) -> Tensor:
    """How many rows of `experts` name each expert, fp32 [number]; without waiting for the GPU."""
    flat = experts.flatten()
    return torch.zeros(number, device=flat.device).scatter_add_(
        0, flat, torch.ones_like(flat, dtype=torch.float32)
    )


class _Permute(torch.autograd.Function):
    """Rows in another order. The backward of plain indexing would add with atomics, in any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradients[0][inverse], None, None


class Experts(nn.Module):
    """Routed experts, weights stacked as Hugging Face holds them: [E, 2·inner, hidden] and [E, hidden, inner]."""

    def __init__(self, number: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(number, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(number, hidden, inner))

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            return self.grouped(x, experts, weights)
        return self.loop(x, experts, weights)

    def loop(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """One expert after the other, in the dtype of `x`."""
        out = torch.zeros_like(x)
        for expert in range(len(self.gate_up_proj)):
            rows, place = torch.where(experts == expert)
            if len(rows):
                gate, up = F.linear(x[rows], self.gate_up_proj[expert]).chunk(2, dim=-1)
                part = F.linear(F.silu(gate) * up, self.down_proj[expert])
                out = out.index_add(0, rows, (part * weights[rows, place, None]).to(out.dtype))
        return out

    def grouped(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Rows sorted by expert, two grouped GEMMs in bf16, rows put back."""
        tokens, chosen = experts.shape
        order = torch.argsort(experts.flatten(), stable=True)
        inverse = torch.argsort(order)
        ends = tokens_per_expert(experts, len(self.gate_up_proj)).cumsum(0).to(torch.int32)
        rows = x.bfloat16().unsqueeze(1).expand(-1, chosen, -1).reshape(tokens * chosen, -1)
        rows = _Permute.apply(rows, order, inverse)
        up_weights = self.gate_up_proj.bfloat16().transpose(-2, -1)
        gate, up = torch._grouped_mm(rows, up_weights, offs=ends).chunk(2, dim=-1)
        down_weights = self.down_proj.bfloat16().transpose(-2, -1)
        parts = torch._grouped_mm(F.silu(gate) * up, down_weights, offs=ends)
        parts = _Permute.apply(parts, inverse, order).view(tokens, chosen, -1)
        return (parts * weights.unsqueeze(-1)).sum(1).to(x.dtype)


class MoE(nn.Module):
    """Routed experts plus shared experts."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
        number, chosen, shared = routing(config)
        self.gate = Router(hidden, number, chosen, config["routed_scaling_factor"])
        self.experts = Experts(number, hidden, inner)
        self.shared_experts = MLP(hidden, shared * inner)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        experts, weights = self.gate(flat)
        routed: Tensor = self.experts(flat, experts, weights)
        out: Tensor = routed.view(x.shape) + self.shared_experts(x)
        return out
