# SPDX-License-Identifier: Apache-2.0
"""Which launches the features of this room refuse alike, one line each; loads without torch and without the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from numinous_tooling.formats import RowFormat
from numinous_tooling.patching.serve_command import ServeCommand

MOST_HEADS = 128  # of a rank: FlashMLA has kernels for 64 and 128, and stock pads up to them

UNCOVERED = {
    "enable_hierarchical_cache": "host copies of its rows are untested",
    "enable_unified_cache_external_linker": "host copies of its rows are untested",
    "enable_lmcache": "host copies of its rows are untested",
    "enable_hisparse": "it keeps rows elsewhere",
    "enable_unified_memory": "its pools have another layout",
    "enable_dsa_cache_layer_split": "it keeps layers on other ranks",
    "enable_two_batch_overlap": "untested",
    "enable_dp_attention": "untested",
    "enable_prefill_cp": "untested",
    "enable_pdmux": "untested",
    "speculative_adaptive": "its drafts change their steps while graphs of other steps are captured (untested)",
    "enable_deterministic_inference": "FlashMLA's split of a row depends on the batch",
}
"""Boolean arguments of the engine that exclude the features, and why."""


def judge_rows(
    command: ServeCommand,
    row: RowFormat,
    architectures: tuple[str, ...],
    prefill: tuple[str, ...] = ("flashmla_kv",),
) -> Iterator[str]:
    """Why this launch cannot keep such rows, one line each.

    Args:
        row: of the feature.
        architectures: that it is made for, the first one to be named; drafts among them.
        prefill: what `--dsa-prefill-backend` may be, none for models without; decode is `flashmla_kv`.
    """
    if (dtype := command.get("kv_cache_dtype")) != "fp8_e4m3":
        yield f"the KV cache would be {dtype}: add --kv-cache-dtype fp8_e4m3"
    for name, may_be in (
        ("dsa_prefill_backend", prefill),
        ("dsa_decode_backend", ("flashmla_kv",)),
    ):
        value = command.get(name)
        if prefill and value is not None and value not in may_be:
            flag = "--" + name.replace("_", "-")
            yield f"{flag} {value} does not read {row.width}-byte rows; leave the flag out"
    if command.get("dtype") not in ("auto", "bfloat16"):
        yield f"--dtype {command.get('dtype')}: FlashMLA takes bf16 queries; leave the flag out"
    if command.get("speculative_algorithm") not in (None, "EAGLE", "NEXTN"):
        yield f"--speculative-algorithm {command.get('speculative_algorithm')} is not covered; EAGLE and NEXTN are"
    if (topk := command.get("speculative_eagle_topk") or 1) > 1:
        yield f"--speculative-eagle-topk {topk} is not covered: trees are untested, and stock's index keys do not follow tokens that they move"
    if command.get("speculative_draft_kv_cache_dtype") not in (None, "auto", "fp8_e4m3"):
        yield "the draft's KV cache has to be FP8 too; leave --speculative-draft-kv-cache-dtype out"
    if command.get("dcp_size") > 1:
        yield "decode context parallelism (--dcp-size > 1) is not covered: these rows have no owner rule"
    for name, what in UNCOVERED.items():
        if command.get(name):
            yield f"--{name.replace('_', '-')} is not covered: {what}"
    if command.get("pp_size") > 1:
        yield "pipeline parallelism (--pp-size > 1) is not covered (untested)"
    if command.get("disaggregation_mode") not in (None, "null"):
        yield f"prefill/decode disaggregation is not covered: transfer of {row.width}-byte rows is untested"
    if command.model_config is not None:
        yield from _judge_model(command.model_config, command.get("tp_size"), architectures)


def text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's config with the values of its language model in place of the outer ones."""
    text = config.get("text_config")
    return {**config, **(text if isinstance(text, dict) else {})}


def prefill_graphs(command: ServeCommand) -> Any:
    """The backend of prefill's CUDA graphs that `--cuda-graph-config` names, which has precedence over the flags; None where it names none.

    JSON on a command line, a dictionary with the resolved backend in the engine's process.
    """
    config = command.get("cuda_graph_config")
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError:
            return None  # the engine refuses it
    prefill = config.get("prefill") if isinstance(config, Mapping) else None
    return prefill.get("backend") if isinstance(prefill, Mapping) else None


def _judge_model(
    config: Mapping[str, Any], tp_size: int, architectures: tuple[str, ...]
) -> Iterator[str]:
    names = config.get("architectures") or [None]
    if names[0] not in architectures:
        yield f"made for {architectures[0]}, this model is {names[0]}; unset its flag"
        return
    heads = text_of(config).get("num_attention_heads", 64)
    if heads // tp_size > MOST_HEADS:
        yield f"{heads // tp_size} query heads per rank; FlashMLA takes up to {MOST_HEADS}: raise --tp-size"
