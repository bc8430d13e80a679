# SPDX-License-Identifier: Apache-2.0
"""What the features of this room ask of a launch in the same words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from numinous_tooling.patching.serve_command import ServeCommand

CACHES = ("auto", "bf16", "bfloat16", "fp8_e4m3")
"""Values of --kv-cache-dtype that the kernels of this room and stock's read alike."""


def text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model's text part over those of the whole."""
    text = config.get("text_config")
    return {**config, **(text if isinstance(text, dict) else {})}


def uncovered(command: ServeCommand, flags: Mapping[str, str]) -> Iterator[str]:
    """A line for each boolean argument of the engine that is on and stands in `flags`, which say why it is not covered."""
    for name, what in flags.items():
        if command.get(name):
            yield f"--{name.replace('_', '-')} is not covered: {what}"


def graph_kind(command: ServeCommand, phase: str) -> Any:
    """The kind of CUDA graph of a phase; `--cuda-graph-config` has precedence over the flag, and holds what was resolved in the engine's process."""
    config = command.get("cuda_graph_config")
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError:
            config = None  # the engine refuses it
    named = config.get(phase) if isinstance(config, Mapping) else None
    kind = named.get("backend") if isinstance(named, Mapping) else None
    return kind or command.get(f"cuda_graph_backend_{phase}")
