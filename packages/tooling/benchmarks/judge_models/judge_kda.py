# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention: a delta rule whose state forgets by channel.

Per head, with state S [K, V], decay g ≤ 0 (log, per channel), key k of norm 1 and write strength β:
    S ← exp(g) S;  S ← S + k (β (v - kᵀ S))ᵀ;  o = qᵀ S / √K
`recurrent_kda` is that, step by step: the reference. `chunk_kda` does a chunk of C steps by matrix products: with G
the running sum of g inside a chunk, A[i, j] = β_i Σ_d k_id k_jd exp(G_id - G_jd) for j < i, the writes of a chunk are
(I + A)⁻¹ (β v - β (k exp G) S). Every exponent taken is ≤ 0, so no decay is too strong for fp32. Both compute in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from judge_configs import Config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Kda = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Inside = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
CHUNK = 32
SAMPLE = (1, 200, 2, 128)


def l2norm(x: Tensor) -> Tensor:
    """x / √(Σ x² + 1e-6), fp32: the kernels' form, which has no kink at zero."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def recurrent_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """q, k, g [B, T, H, K], v [B, T, H, V], beta [B, T, H] → [B, T, H, V] in fp32; q and k are normalised here."""
    q, k = l2norm(q) * q.shape[-1] ** -0.5, l2norm(k)
    v, g, beta = v.float(), g.float(), beta.float()
    state = v.new_zeros(*k.shape[:1], k.shape[2], k.shape[3], v.shape[3])
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, :, None].exp()
        seen = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        write = beta[:, t, :, None] * (v[:, t] - seen)
        state = state + k[:, t, :, :, None] * write[:, :, None, :]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(out, 1)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk: int = CHUNK,
    inside: Inside | None = None,
) -> Tensor:
    """As `recurrent_kda`, `chunk` steps at a time. The part inside chunks is recomputed in the backward pass."""
    time = q.shape[1]
    q, k = l2norm(q) * q.shape[-1] ** -0.5, l2norm(k)
    q, k, v, g = (_chunked(x.float(), chunk) for x in (q, k, v, g))
    beta = _chunked(beta.float().unsqueeze(-1), chunk)
    with torch.autocast(q.device.type, enabled=False):
        total = g.cumsum(-2)
        if torch.is_grad_enabled():
            parts = checkpoint(inside or within_chunks, q, k, v, total, beta, use_reentrant=False)
        else:
            # Never compiled: the second compilation would fall into the time that evaluation has.
            parts = within_chunks(q, k, v, total, beta)
        out = _across(q, k, total, *parts)
    return out.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :time]


def _chunked(x: Tensor, chunk: int) -> Tensor:
    """[B, T, H, D] → [B, H, T / chunk, chunk, D]; steps that pad write nothing: their keys and β are 0."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % chunk))
    # Dense whatever came in, so that a compiled inside meets one layout only.
    return x.unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4).contiguous()


def within_chunks(
    q: Tensor, k: Tensor, v: Tensor, total: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Writes without the state, what the state takes from them, and query-key products, each within its chunk."""
    size = q.shape[-2]
    steps = torch.arange(size, device=q.device)
    visible = steps[:, None] >= steps[None, :]
    gap = total.unsqueeze(-2) - total.unsqueeze(-3)
    decay = gap.masked_fill(~visible[..., None], float("-inf")).exp()
    decayed = decay * k.unsqueeze(-3)
    # Sums of products, not einsum: a compiler then never writes these [C, C, K] tensors to memory.
    products = (q.unsqueeze(-2) * decayed).sum(-1)
    coupling = ((k * beta).unsqueeze(-2) * decayed).sum(-1).tril(-1)
    right = torch.cat([v * beta, k * beta * total.exp()], dim=-1)
    system = coupling + torch.eye(size, device=q.device)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, from_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    return own, from_state, products


def _across(
    q: Tensor, k: Tensor, total: Tensor, own: Tensor, from_state: Tensor, products: Tensor
) -> Tensor:
    """Carry the state over the chunks: [B, H, N, C, V]."""
    last = total[..., -1:, :]
    queries, keys, forget = q * total.exp(), k * (last - total).exp(), last.exp().transpose(-1, -2)
    state = own.new_zeros(*own.shape[:2], k.shape[-1], own.shape[-1])
    out = []
    for n in range(own.shape[2]):
        writes = own[:, :, n] - from_state[:, :, n] @ state
        out.append(queries[:, :, n] @ state + products[:, :, n] @ writes)
        state = forget[:, :, n] * state + keys[:, :, n].transpose(-1, -2) @ writes
    return torch.stack(out, 2)


def choose_kda(
    device: torch.device, shape: tuple[int, ...] = SAMPLE, tolerance: float = 2e-2
) -> tuple[str, Kda]:
    """The fastest form that runs on this device and agrees with `chunk_kda` there, and its name with what was passed over.

    `shape` [B, T, H, K] is that of the training: what is compiled for the comparison is then what training runs, and
    a compiler that fails at it fails here, where the plain form takes its place.
    On CUDA in this order: flash-linear-attention where it is installed, `chunk_kda` with its inside compiled,
    `chunk_kda` as it is. On the CPU always the last.
    """
    if device.type != "cuda":
        return "torch", chunk_kda
    passed = []
    for name, build in (("flash-linear-attention", _fla_kda), ("torch, compiled", _compiled_kda)):
        try:
            candidate = build()
            error = relative_error(candidate, chunk_kda, sample_inputs(device, shape))
        except ImportError:
            passed.append(f"{name} is not installed")
        except Exception as failure:
            # Whatever a kernel or a compiler of some version raises here, the plain form still trains the model.
            passed.append(f"{name} failed: {type(failure).__name__}")
        else:
            if error <= tolerance:
                return "; ".join([name, *passed]), candidate
            passed.append(f"{name} is off by {error:.3g}")
    return "; ".join(["torch", *passed]), chunk_kda


def _fla_kda() -> Kda:
    from fla.ops.kda import chunk_kda as kernel

    def fused(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        out: Tensor = kernel(q, k, v, g.float(), beta.float(), use_qk_l2norm_in_kernel=True)[0]
        return out

    return fused


def _compiled_kda() -> Kda:
    return functools.partial(chunk_kda, inside=torch.compile(within_chunks))


def sample_inputs(device: torch.device, shape: tuple[int, ...] = SAMPLE) -> tuple[Tensor, ...]:
    """q, k, v, g [B, T, H, K] and beta, with decays from none to strong."""
    source = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(shape, generator=source) for _ in range(4))
    beta = torch.rand(shape[:3], generator=source)
    return tuple(x.to(device) for x in (q, k, v, -F.softplus(4 * g - 2), beta))


def relative_error(one: Kda, other: Kda, inputs: tuple[Tensor, ...]) -> float:
    """The largest of ‖a - b‖ / ‖b‖ over the output and the gradients of all inputs."""
    results = []
    for function in (one, other):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves).float()
        out.square().mean().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    pairs = zip(*results, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


class GatedNorm(nn.Module):
    """RMSNorm per head, times the sigmoid of a gate; fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.float() * x * gate.float().sigmoid()


class ShortConv(nn.Module):
    """Causal convolution per channel, then SiLU; weight [channels, 1, taps]."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, channels] → the same."""
        channels, _, taps = self.weight.shape
        padded = F.pad(x.transpose(1, 2), (taps - 1, 0))
        return F.silu(F.conv1d(padded, self.weight, groups=channels)).transpose(1, 2)


class DeltaAttention(nn.Module):
    """A KDA layer; the parameters have the names of the released checkpoint."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, linear = config["hidden_size"], config["linear_attn_config"]
        self.heads, self.width = linear["num_heads"], linear["head_dim"]
        inner, taps = self.heads * self.width, linear["short_conv_kernel_size"]
        for name in "qkv":
            setattr(self, f"{name}_proj", nn.Linear(hidden, inner, bias=False))
            setattr(self, f"{name}_conv1d", ShortConv(inner, taps))
        self.f_a_proj = nn.Linear(hidden, self.width, bias=False)
        self.f_b_proj = nn.Linear(self.width, inner, bias=False)
        self.g_a_proj = nn.Linear(hidden, self.width, bias=False)
        self.g_b_proj = nn.Linear(self.width, inner, bias=False)
        self.b_proj = nn.Linear(hidden, self.heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(1, 1, self.heads, 1))
        self.dt_bias = nn.Parameter(torch.empty(inner))
        self.o_norm = GatedNorm(self.width, config["rms_norm_eps"])
        self.o_proj = nn.Linear(inner, hidden, bias=False)
        self.kda: Kda = chunk_kda

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, hidden] → [B, T, hidden]."""
        q, k, v = (
            self._split(getattr(self, f"{name}_conv1d")(getattr(self, f"{name}_proj")(x)))
            for name in "qkv"
        )
        raw = self.f_b_proj(self.f_a_proj(x)).float() + self.dt_bias.float()
        decay = -self.A_log.float().exp() * F.softplus(self._split(raw))
        beta = self.b_proj(x).float().sigmoid()
        gate = self._split(self.g_b_proj(self.g_a_proj(x)))
        mixed = self.o_norm(self.kda(q, k, v, decay, beta), gate)
        out: Tensor = self.o_proj(mixed.flatten(-2).to(x.dtype))
        return out

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.width))
