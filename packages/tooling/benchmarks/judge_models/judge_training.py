# SPDX-License-Identifier: Apache-2.0
"""The training loop: phases, schedule, time box, evaluation.

`glm-dsa` learns in three phases: `dense` (language model only), `teach` (only the indexer, by its own loss) and
`sparse` (both, with attention over the indexer's choice). `kimi-linear` has `dense` alone. Each phase has a share of
the time; after `PROBE` steps of a phase its number of steps is fixed from their speed, so a run is repeated exactly by
giving these numbers. The learning rate depends on the step alone: linear warm-up, then cosine to a tenth.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from judge_configs import is_glm
from judge_corpus import Tokens, windows
from judge_kda import DeltaAttention, choose_kda
from judge_model import JudgeModel
from torch import Tensor

PROBE = 12


@dataclass(frozen=True)
class Recipe:
    """All choices of a run; lengths in tokens."""

    seed: int = 0
    length: int = 2048
    batch: int = 16
    learning_rate: float = 2e-3
    late_learning_rate: float = 3e-4
    warm_up: int = 100
    weight_decay: float = 0.1
    beta2: float = 0.95
    clip: float = 1.0
    bias_step: float = 1e-3
    most_epochs: float = 6.0
    eval_windows: int = 200


@dataclass(frozen=True)
class Phase:
    """`batch_share`: the part of the batch used; scores of all pairs of positions take room."""

    name: str
    share: float
    batch_share: float
    learning_rate: float
    warm_up: int


def phases(model: JudgeModel, recipe: Recipe) -> list[Phase]:
    """The phases of this model, in order; their shares sum to 1."""
    if not is_glm(model.config):
        return [Phase("dense", 1.0, 1.0, recipe.learning_rate, recipe.warm_up)]
    return [
        Phase("dense", 0.7, 1.0, recipe.learning_rate, recipe.warm_up),
        Phase("teach", 0.15, 0.25, recipe.learning_rate, recipe.warm_up // 5),
        Phase("sparse", 0.15, 0.25, recipe.late_learning_rate, recipe.warm_up // 5),
    ]


class Sampler:
    """Batches of windows [batch, length + 1]: every window once an epoch, in an order of its own each epoch."""

    def __init__(self, tokens: Tokens, length: int, seed: int) -> None:
        self.rows = windows(tokens.ids, length)
        self.source = np.random.default_rng(seed)
        self.order = self.source.permutation(len(self.rows))
        self.at = 0

    def next(self, batch: int) -> Tensor:
        """The next batch, int64 on the CPU."""
        chosen: list[int] = []
        while len(chosen) < batch:
            if self.at == len(self.order):
                self.order, self.at = self.source.permutation(len(self.rows)), 0
            taken = self.order[self.at : self.at + batch - len(chosen)]
            self.at += len(taken)
            chosen += taken.tolist()
        return torch.from_numpy(self.rows[chosen].astype(np.int64))


def schedule(step: int, steps: int, warm_up: int) -> float:
    """Factor of the learning rate at `step` of `steps`."""
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


def language_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean nats per token."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Trainer:
    """One model on one device.

    `seconds` is what is left for all phases together; `steps`, where given, is the number of steps of each phase and
    the clock plays no part.
    """

    def __init__(
        self,
        model: JudgeModel,
        tokens: Tokens,
        recipe: Recipe,
        device: torch.device,
    ) -> None:
        self.model, self.recipe, self.device = model.to(device), recipe, device
        self.sampler = Sampler(tokens, recipe.length, recipe.seed)
        self.kda_name = "none"
        layers = [module for module in model.modules() if isinstance(module, DeltaAttention)]
        if layers:
            shape = (recipe.batch, recipe.length, layers[0].heads, layers[0].width)
            with self._mixed():  # as in a step: compilers look at this state, too
                self.kda_name, kda = choose_kda(device, shape)
            for layer in layers:
                layer.kda = kda

    def train(self, seconds: float, steps: list[int] | None = None) -> list[dict[str, Any]]:
        """Run all phases; one record each."""
        plan = phases(self.model, self.recipe)
        if steps is not None and len(steps) != len(plan):
            names = ", ".join(phase.name for phase in plan)
            raise ValueError(f"--steps wants {len(plan)} numbers, one for each of: {names}")
        records = []
        for number, phase in enumerate(plan):
            fixed = None if steps is None else steps[number]
            records.append(self._phase(phase, phase.share * seconds, fixed))
        return records

    def _phase(self, phase: Phase, seconds: float, fixed: int | None) -> dict[str, Any]:
        recipe = self.recipe
        batch = max(1, int(recipe.batch * phase.batch_share))
        epoch = len(self.sampler.rows) / batch
        steps = fixed if fixed is not None else max(PROBE + 1, int(recipe.most_epochs * epoch))
        optimiser = self._optimiser(phase)
        losses: list[Tensor] = []
        recalls: list[Tensor] = []
        start = probed = time.perf_counter()
        step = 0
        while step < steps:
            for group in optimiser.param_groups:
                group["lr"] = phase.learning_rate * schedule(step, steps, phase.warm_up)
            loss, recall = self._step(phase, batch, optimiser)
            losses.append(loss)
            recalls += recall
            step += 1
            if fixed is None and step == PROBE // 2:
                probed = self._now()  # the first steps compile and allocate
            elif fixed is None and step == PROBE:
                now = self._now()
                left = seconds - (now - start)
                speed = (now - probed) / (PROBE - PROBE // 2)
                steps = min(steps, max(step + 1, step + int(left / speed)))
        elapsed = self._now() - start
        tail = torch.stack(losses[-max(1, steps // 20) :]).mean()
        record = {
            "phase": phase.name,
            "steps": steps,
            "batch": batch,
            "tokens": steps * batch * recipe.length,
            "seconds": round(elapsed, 3),
            "first_loss": float(losses[0]),
            "last_loss": float(tail),
        }
        if recalls:
            record["first_recall"], record["last_recall"] = float(recalls[0]), float(recalls[-1])
        return record

    def _mixed(self) -> torch.autocast:
        """Products in bf16 on a GPU."""
        kind = self.device.type
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda")

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _optimiser(self, phase: Phase) -> torch.optim.AdamW:
        """AdamW over what the phase moves; no decay on vectors and the embedding."""
        indexer = set(self.model.indexer_parameters())
        moved = []
        for name, parameter in self.model.named_parameters():
            in_indexer = parameter in indexer
            wanted = phase.name == "sparse" or (phase.name == "teach") == in_indexer
            parameter.requires_grad_(wanted)
            if wanted:
                moved.append((name, parameter))
        decayed = [p for name, p in moved if p.ndim >= 2 and "embed_tokens" not in name]
        others = [p for name, p in moved if p.ndim < 2 or "embed_tokens" in name]
        groups = [
            {"params": decayed, "weight_decay": self.recipe.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            groups,
            lr=phase.learning_rate,
            betas=(0.9, self.recipe.beta2),
            fused=self.device.type == "cuda",
        )

    def _step(
        self, phase: Phase, batch: int, optimiser: torch.optim.AdamW
    ) -> tuple[Tensor, list[Tensor]]:
        rows = self.sampler.next(batch).to(self.device, non_blocking=True)
        # In `teach` nothing but the indexer moves, so the routers' load is not counted either.
        self.model.train(phase.name != "teach")
        with self._mixed():
            logits = self.model(rows[:, :-1], mode=phase.name)
        lessons = self.model.lessons()
        taught = [lesson.loss for lesson in lessons]
        if phase.name == "teach":
            loss = torch.stack(taught).sum()
            shown = loss / len(taught)
        else:
            shown = language_loss(logits, rows[:, 1:])
            loss = shown + sum(taught)
        loss.backward()
        moved = [p for group in optimiser.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(moved, self.recipe.clip)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if phase.name != "teach":
            for router in self.model.routers():
                router.rebalance(self.recipe.bias_step)
        recall = [torch.stack([lesson.recall for lesson in lessons]).mean()] if lessons else []
        return shown.detach(), recall


@torch.no_grad()
def evaluate(
    model: JudgeModel, tokens: Tokens, length: int, most: int, device: torch.device, batch: int = 4
) -> dict[str, Any]:
    """Teacher-forced loss on the first `most` windows, as the engine serves: sparse where there is an indexer."""
    model.eval()
    rows = windows(tokens.ids, length)[:most]
    mode = "sparse" if is_glm(model.config) else "dense"
    nats, hits = 0.0, 0
    for start in range(0, len(rows), batch):
        part = torch.from_numpy(rows[start : start + batch].astype(np.int64)).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(part[:, :-1], mode=mode).float()
        targets = part[:, 1:]
        nats += float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
        hits += int((logits.argmax(-1) == targets).sum())
    scored = rows[:, 1:]
    count, size = scored.size, int(tokens.id_bytes[scored].sum())
    return {
        "tokens": count,
        "bytes": size,
        "nats_per_token": nats / count,
        "bits_per_byte": nats / math.log(2) / size,
        "top1": hits / count,
    }
