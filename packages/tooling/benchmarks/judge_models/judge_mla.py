# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention, with or without rotary embedding, and the DSA indexer.

Training expands the latent row to keys and values per head, as the prefill of engines does. The indexer learns by
KL(attention summed over heads ‖ softmax of index scores); its inputs are detached, so its loss moves only itself.
Modes of a forward pass: `dense` (the indexer does not run), `teach` (dense, and the indexer's loss is computed) and
`sparse` (attention over the `index_topk` best keys of each query, and the indexer's loss over those).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from judge_configs import Config, is_glm
from judge_moe import RMSNorm
from torch import Tensor, nn

MODES = ("dense", "teach", "sparse")


@dataclass
class IndexerLesson:
    """What one layer's indexer heard in one forward pass."""

    loss: Tensor  # KL in nats, mean over queries
    recall: Tensor  # share of the attention mass on the keys that it would choose


def rotary_tables(config: Config, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [length, rope / 2], fp32."""
    width = config["qk_rope_head_dim"]
    base = config["rope_parameters"]["rope_theta"]
    inverse = 1.0 / base ** (torch.arange(0, width, 2, device=device).float() / width)
    angles = torch.outer(torch.arange(length, device=device).float(), inverse)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Rotate pairs of x [batch, time, heads, width]: neighbours, or halves; the result is laid out in halves.

    One layout for both is right, because only products of two rotated rows are ever used.
    """
    cos, sin = (table[: x.shape[1], None, :] for table in tables)
    wide = x.float()
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Indexer(nn.Module):
    """score[t, s] = Σ_h w[t, h] · relu(q[t, h] · k[s] / √width) / √heads; keys have one head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.width = config["index_n_heads"], config["index_head_dim"]
        self.rope, self.topk = config["qk_rope_head_dim"], config["index_topk"]
        self.interleaved = config["indexer_rope_interleave"]
        hidden = config["hidden_size"]
        self.wq_b = nn.Linear(config["q_lora_rank"], self.heads * self.width, bias=False)
        self.wk = nn.Linear(hidden, self.width, bias=False)
        self.k_norm = nn.LayerNorm(self.width, eps=1e-6)
        self.weights_proj = nn.Linear(hidden, self.heads, bias=False)

    def forward(self, x: Tensor, latent: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """x [B, T, hidden], query latent [B, T, q_lora_rank] → scores [B, T, T] fp32, -inf above the diagonal."""
        batch, time, _ = x.shape
        queries = self._rotated(self.wq_b(latent).view(batch, time, self.heads, self.width), tables)
        keys = self._rotated(self.k_norm(self.wk(x)).unsqueeze(2), tables)
        products = torch.einsum("bthd,bsd->bths", queries, keys.squeeze(2).to(queries.dtype))
        weights = self.weights_proj(x).float() * self.heads**-0.5
        with torch.autocast(x.device.type, enabled=False):
            activated = F.relu(products.float() * self.width**-0.5)
            scores = torch.matmul(weights.unsqueeze(-2), activated).squeeze(-2)
        return scores.masked_fill(~causal(time, x.device), float("-inf"))

    def _rotated(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        turned = rotate(x[..., : self.rope], tables, self.interleaved)
        return torch.cat([turned, x[..., self.rope :]], dim=-1)

    def choose(self, scores: Tensor) -> Tensor:
        """Boolean [B, T, T]: the `topk` best visible keys of each query, or all where there are fewer."""
        best = scores.detach().topk(min(self.topk, scores.shape[-1]), dim=-1).indices
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
        return chosen & causal(scores.shape[-1], scores.device)


def causal(time: int, device: torch.device) -> Tensor:
    """Boolean [time, time]: key s is visible to query t when s ≤ t."""
    return torch.ones(time, time, dtype=torch.bool, device=device).tril()


class LatentAttention(nn.Module):
    """MLA; the parameters have the names of the released checkpoints."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config["num_attention_heads"]
        self.nope, self.rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        self.value, self.latent = config["v_head_dim"], config["kv_lora_rank"]
        self.rotary = is_glm(config)
        hidden, rank = config["hidden_size"], config["q_lora_rank"]
        eps = config["rms_norm_eps"]
        query = self.heads * (self.nope + self.rope)
        if rank is None:
            self.q_proj = nn.Linear(hidden, query, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, rank, bias=False)
            self.q_a_layernorm = RMSNorm(rank, eps)
            self.q_b_proj = nn.Linear(rank, query, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.latent + self.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(self.latent, eps)
        self.kv_b_proj = nn.Linear(self.latent, self.heads * (self.nope + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, hidden, bias=False)
        self.indexer = Indexer(config) if is_glm(config) else None
        self.lesson: IndexerLesson | None = None

    def forward(
        self, x: Tensor, tables: tuple[Tensor, Tensor] | None = None, mode: str = "dense"
    ) -> Tensor:
        """x [B, T, hidden] → [B, T, hidden]; outside `dense`, `lesson` holds what the indexer heard."""
        batch, time, _ = x.shape
        latent = self.q_a_layernorm(self.q_a_proj(x)) if hasattr(self, "q_a_proj") else None
        queries = self.q_proj(x) if latent is None else self.q_b_proj(latent)
        queries = queries.view(batch, time, self.heads, -1)
        rows, key_rope = self.kv_a_proj_with_mqa(x).split([self.latent, self.rope], dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(rows)).view(batch, time, self.heads, -1)
        key_nope, values = expanded.split([self.nope, self.value], dim=-1)
        key_rope = key_rope.unsqueeze(2)
        if self.rotary:
            assert tables is not None
            turned = rotate(queries[..., self.nope :], tables, True)
            queries = torch.cat([queries[..., : self.nope], turned], dim=-1)
            key_rope = rotate(key_rope, tables, True)
        keys = torch.cat(
            [key_nope, key_rope.expand(-1, -1, self.heads, -1).to(key_nope.dtype)], dim=-1
        )
        q, k, v = (part.transpose(1, 2) for part in (queries, keys, values))
        chosen, self.lesson = None, None
        if self.indexer is not None and mode != "dense":
            assert latent is not None
            assert tables is not None
            scores = self.indexer(x.detach(), latent.detach(), tables)
            picked = self.indexer.choose(scores)
            chosen = picked if mode == "sparse" else None
            self.lesson = lesson(q, k, scores, picked, only_chosen=mode == "sparse")
        mixed = attend(q, k, v, chosen)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, time, -1))
        return out


def attend(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None = None) -> Tensor:
    """Causal attention of [B, heads, T, width]; `chosen` [B, T, T] narrows it.

    Values narrower than keys are padded, because fused kernels want one width.
    """
    width = v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - width))
    if chosen is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=chosen.unsqueeze(1))
    return out[..., :width]


def lesson(
    q: Tensor, k: Tensor, scores: Tensor, picked: Tensor, only_chosen: bool
) -> IndexerLesson:
    """The indexer's loss and recall against the attention of q and k [B, heads, T, width], summed over heads."""
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        logits = torch.matmul(q.float(), k.float().transpose(-1, -2)) * q.shape[-1] ** -0.5
        visible = causal(q.shape[2], q.device)
        logits.masked_fill_(~visible, float("-inf"))
        target = logits.softmax(-1).mean(1)
        recall = (target * picked).sum(-1).mean()
        if only_chosen:
            target = target * picked
            target = target / target.sum(-1, keepdim=True).clamp_min(1e-20)
    allowed = picked if only_chosen else visible.expand_as(picked)
    log_guess = scores.masked_fill(~allowed, float("-inf")).log_softmax(-1)
    log_guess = log_guess.masked_fill(~allowed, 0.0)
    divergence = (torch.special.xlogy(target, target) - target * log_guess).sum(-1)
    return IndexerLesson(divergence.mean(), recall)
