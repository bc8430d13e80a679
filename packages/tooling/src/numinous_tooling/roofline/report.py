# SPDX-License-Identifier: Apache-2.0
"""What `numinous bytes` and `numinous roofline` say of a model, as data."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from . import RooflineError
from .blocks import GroupedQuery, Latent, Step
from .gpus import Gpu
from .models import Model
from .phases import Pass, Setup, forward, seconds
from .pools import (
    KV_DTYPES,
    DoesNotFit,
    KvRows,
    Pool,
    PoolOptions,
    check_pooled,
    is_compressed,
    is_sparse,
    kv_dtype,
    size,
    state_bytes,
    token_bytes,
)

MEMORY_FRACTION = 0.9  # of a GPU's memory for weights and pools where no budget is given
DEFAULT_PROMPT = 8192
DEFAULT_CONTEXT = 32768
DEFAULT_BATCH = 64


@dataclass(frozen=True)
class Question:
    """Options of both commands; None is the model's default.

    Args:
        weights: "checkpoint" or a name in `weights.PRECISIONS`.
        kv: name in `pools.KV_DTYPES`; None is FP8 for DeepSeek V4, which has nothing else, and bf16 otherwise.
        tp: tensor-parallel ranks.
        memory_bytes: of the pools of one rank; None is 90 % of the GPU's memory less the weights.
        prompt: new tokens of a prefill, with nothing cached.
        context: tokens that each request has cached in a decode step.
        batch: requests of a decode step.
        pools: engine options.
    """

    weights: str = "checkpoint"
    kv: str | None = None
    tp: int = 1
    memory_bytes: int | None = None
    prompt: int = DEFAULT_PROMPT
    context: int = DEFAULT_CONTEXT
    batch: int = DEFAULT_BATCH
    pools: PoolOptions = field(default_factory=PoolOptions)


def rows_for(model: Model, asked: str | None, gpu: Gpu | None) -> KvRows:
    """The KV dtype asked for; ``fp8`` means the rows that the engine uses on that GPU."""
    if asked is None:
        asked = "fp8" if is_compressed(model) else "bf16"
    if asked == "fp8" and gpu is not None and gpu.raw_fp8_rows and is_sparse(model):
        asked = "fp8-raw"
    return kv_dtype(asked)


def bytes_report(model: Model, question: Question) -> dict[str, Any]:
    """Memory of a model on one rank: weights, cached bytes per token and request, pool for a budget, bytes of a pass."""
    setup = _setup(model, question, None)
    report = _model(model, question, setup)
    report["kv"] = _kv(model, setup)
    if question.memory_bytes is not None:
        pool = size(model, setup.kv, question.memory_bytes, setup.tp, question.pools)
        report["pool"] = asdict(pool)
    report["phases"] = {
        name: _work(forward(model, step, setup))
        for name, step in _steps(question, question.batch).items()
    }
    return report


def roofline_report(model: Model, question: Question, gpus: list[Gpu]) -> dict[str, Any]:
    """A model on GPUs: the pool that is left beside the weights, and tokens per second of each phase at most.

    A decode batch is cut to the requests that the pool holds. Where weights or a pool do not fit there are no phases,
    and ``reason`` says why.
    """
    report = _model(model, question, _setup(model, question, None))
    report["gpus"] = [_on_gpu(model, question, gpu) for gpu in gpus]
    return report


def _on_gpu(model: Model, question: Question, gpu: Gpu) -> dict[str, Any]:
    setup = _setup(model, question, gpu)
    weights = sum(model.weight_bytes(setup.precision, setup.tp).values())
    entry: dict[str, Any] = {
        "gpu": gpu.name,
        "gpu_title": gpu.title,
        "rates": gpu.word,
        "rates_source": gpu.source,
        "weights_bytes": weights,
        "kv": _kv(model, setup),
        "pool": None,
        "requests_that_fit": 0,
        "reason": None,
        "phases": {},
    }
    usable = int(gpu.memory_bytes * MEMORY_FRACTION)
    budget = usable - weights if question.memory_bytes is None else question.memory_bytes
    if budget <= 0 or weights + budget > gpu.memory_bytes:
        asked = "" if question.memory_bytes is None else f" and pools of {budget / 1e9:.1f} GB"
        entry["reason"] = (
            f"weights of {weights / 1e9:.1f} GB per rank{asked} do not fit in {usable / 1e9:.1f} GB"
        )
        return entry
    try:
        pool = size(model, setup.kv, budget, setup.tp, question.pools)
    except DoesNotFit as error:
        entry["reason"] = str(error)
        return entry
    entry["pool"], held = asdict(pool), _requests(pool, question.context)
    entry["requests_that_fit"] = held
    for name, step in _steps(question, held).items():
        entry["phases"][name] = _floors(forward(model, step, setup), gpu)
    return entry


def _setup(model: Model, question: Question, gpu: Gpu | None) -> Setup:
    if question.tp < 1:
        raise RooflineError(f"tp is at least 1, got {question.tp}")
    if question.memory_bytes is not None and question.memory_bytes <= 0:
        raise RooflineError(f"memory must be positive, got {question.memory_bytes} bytes")
    kv = rows_for(model, question.kv, gpu)
    check_pooled(model, kv)
    return Setup(model.precision(question.weights), kv, question.tp)


def _steps(question: Question, held: int) -> dict[str, Step]:
    """The passes that are judged; `held` requests at most decode, and none where the pool holds none."""
    steps = {"prefill": Step(requests=1, new=question.prompt, cached=0)}
    if held:
        steps["decode"] = Step(min(question.batch, held), new=1, cached=question.context)
    return steps


def _model(model: Model, question: Question, setup: Setup) -> dict[str, Any]:
    parameters = model.parameters()
    return {
        "model": model.name,
        "architecture": model.architecture,
        "word": "derived",
        "source": model.source,
        "layers": _layers(model),
        "parameters": sum(parameters.values()),
        "active_parameters": model.active_parameters(),
        "parameters_by_component": parameters,
        "weights": str(setup.precision),
        "tp": setup.tp,
        "weights_bytes": sum(model.weight_bytes(setup.precision, setup.tp).values()),
        "weights_bytes_by_component": model.weight_bytes(setup.precision, setup.tp),
        "prompt": question.prompt,
        "context": question.context,
        "batch": question.batch,
    }


def _layers(model: Model) -> dict[str, int]:
    """Layers by type of attention."""
    return dict(
        Counter(layer.attention.title if layer.attention else "MLP only" for layer in model.layers)
    )


def _kv(model: Model, setup: Setup) -> dict[str, Any]:
    """Cached bytes by type of attention: one layer of that type, and all."""
    per_layer: dict[str, dict[str, Any]] = {}
    for layer in model.layers:
        block = layer.attention
        if block is None or block.title in per_layer:
            continue
        entry: dict[str, Any] = {"layers": 0}
        if isinstance(block, GroupedQuery):
            entry["row_bytes"] = block.row(setup.kv, setup.tp)
            entry["window"] = block.window
        elif isinstance(block, Latent):
            entry["row_bytes"] = block.row(setup.kv)
            entry["index_row_bytes"] = (
                block.index.row if block.index and block.index.computes else 0
            )
        elif hasattr(block, "state_bytes"):
            entry["state_bytes"] = block.state_bytes(setup.tp)
        else:
            entry["row_bytes"] = setup.kv.compressed_row(block.head_dim, block.rope)
            entry["tokens_per_row"] = block.ratio or None
            entry["index_row_bytes"] = block.index.row if block.index else 0
            entry["window"] = block.window
        per_layer[block.title] = entry
    for title, count in _layers(model).items():
        if title in per_layer:
            per_layer[title]["layers"] = count
    return {
        "dtype": setup.kv.name,
        "note": KV_DTYPES[setup.kv.name].note,
        "bytes_per_token": token_bytes(model, setup.kv, setup.tp),
        "state_bytes_per_request": state_bytes(model, setup.tp),
        "per_layer": per_layer,
    }


def _requests(pool: Pool, context: int) -> int:
    """Requests of `context` tokens that the pool holds at once, each with a state where there are states."""
    held = pool.tokens // context if context else pool.tokens
    return held if pool.state_slots is None else min(held, pool.state_slots)


def _work(done: Pass) -> dict[str, Any]:
    """Bytes by kind and operations by unit, of all and of each kind of layer."""
    kinds: dict[str, dict[str, Any]] = {}
    for layer, work in done.layers:
        key = f"{layer.title} {sum(work.bytes.values())} {sorted(work.flops.items())}"
        entry = kinds.setdefault(key, {"layer": layer.title, "layers": 0, **_amounts(work)})
        entry["layers"] += 1
    return {
        "requests": done.step.requests,
        "tokens": done.step.tokens,
        **_amounts(done.work),
        "layers": list(kinds.values()),
        "ends": _amounts(done.ends),
    }


def _amounts(work: Any) -> dict[str, Any]:
    return {
        "bytes": sum(work.bytes.values()),
        "bytes_by_kind": {kind: amount for kind, amount in work.bytes.items() if amount},
        "flops": sum(work.flops.values()),
        "flops_by_unit": {unit: amount for unit, amount in work.flops.items() if amount},
    }


def _floors(done: Pass, gpu: Gpu) -> dict[str, Any]:
    floor = done.floor_seconds(gpu)
    bytes_, flops = seconds(done.work, gpu)
    return {
        **_work(done),
        "byte_ms": bytes_ * 1e3,
        "flop_ms": flops * 1e3,
        "floor_ms": floor * 1e3,
        "bound": done.bound(gpu),
        "tokens_per_second": done.step.tokens / floor,
        "tokens_per_second_per_user": done.step.new / floor,
    }
