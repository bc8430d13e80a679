# SPDX-License-Identifier: Apache-2.0
"""Serve the engine with one numeric fault planted, to show that the accuracy gate sees it.

`python -m numinous_tooling.engine.planted FAULT [flags of sglang.launch_server]` is `launch_server` with a wrapper
around one function of the attention path. Only a server started by this module can have a fault: the wrapper is put in
place when a process runs this file as its main module, which the engine's spawned children do as well (the name is
then `__mp_main__`, and `sys.argv` is the parent's). Each fault touches one layer, the first that calls:

- ``kv-scale``: values (MHA) or latents (MLA) are written into the cache times 2, as if a scale were wrong;
- ``head``: the output of the first attention head of this rank is zero;
- ``page``: rows are written one page too far, as if a page table were off by one; rows that would leave the pool stay.

Where a backend reads the newest tokens from its inputs instead of from the cache, the cache faults show only once
older tokens are read back: in cache hits, later chunks and decode steps. Every changed call is counted as
``plant.<fault>`` (a replayed CUDA graph counts once, at capture), so that a run whose fault never happened proves
nothing.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from numinous_tooling.patching import counters

WRITERS = ("set_kv_buffer", "set_mla_kv_buffer")
MAIN_NAMES = ("__main__", "__mp_main__")


class _OneLayer:
    """Lets a fault happen in the first layer that calls, and not again in what that call calls."""

    def __init__(self, fault: str) -> None:
        self._counters = counters.counters(counter_name(fault))
        self._layer: int | None = None
        self._inside = False

    def run(self, layer: int, change: Callable[[], Any], plain: Callable[[], Any]) -> Any:
        """Call `change` in the chosen layer, `plain` in the others."""
        if self._layer is None:
            self._layer = layer
        if self._inside or layer != self._layer:
            return plain()
        self._inside = True
        try:
            result = change()
        finally:
            self._inside = False
        self._counters.engaged()
        return result


def counter_name(fault: str) -> str:
    """Return the name under which a fault counts its calls: `kv-scale` -> `plant.kv_scale`."""
    return "plant." + fault.replace("-", "_")


def _doubled(pool: Any, values: dict[str, Any]) -> None:
    if "cache_k_nope" in values:
        values["cache_k_nope"] = values["cache_k_nope"] * 2
    elif hasattr(pool, "kv_lora_rank"):
        rows = values["cache_k"].clone()
        rows[..., : pool.kv_lora_rank] *= 2
        values["cache_k"] = rows
    else:
        values["cache_v"] = values["cache_v"] * 2


def _one_page_further(pool: Any, values: dict[str, Any]) -> None:
    import torch

    name = "loc_info" if "loc_info" in values else "loc"
    slots = values[name]
    # A composite pool hands its parts a record; the slots are its field `loc`.
    if not isinstance(slots, torch.Tensor):
        slots = slots.loc
    moved = slots + pool.page_size
    values[name] = torch.where(moved < pool.size + pool.page_size, moved, slots)


def _writers() -> Iterator[tuple[type, str]]:
    """Yield every method that writes rows into a pool of one kind (composite pools delegate to these)."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    pending: list[type] = [MHATokenToKVPool, MLATokenToKVPool]
    while pending:
        pool = pending.pop()
        pending.extend(pool.__subclasses__())
        yield from ((pool, name) for name in WRITERS if name in vars(pool))


def _plant_in_writes(fault: str, change: Callable[[Any, dict[str, Any]], None]) -> None:
    one_layer = _OneLayer(fault)
    for pool_class, name in _writers():
        _wrap_writer(pool_class, name, one_layer, change)


def _wrap_writer(
    pool_class: type,
    name: str,
    one_layer: _OneLayer,
    change: Callable[[Any, dict[str, Any]], None],
) -> None:
    stock = vars(pool_class)[name]
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def numinous_planted_write(self: Any, *args: Any, **kwargs: Any) -> Any:
        def changed() -> Any:
            bound = signature.bind(self, *args, **kwargs)
            change(self, bound.arguments)
            return stock(*bound.args, **bound.kwargs)

        layer = kwargs["layer"] if "layer" in kwargs else args[0]
        layer_id = kwargs["layer_id_override"] if layer is None else layer.layer_id
        return one_layer.run(layer_id, changed, lambda: stock(self, *args, **kwargs))

    setattr(pool_class, name, numinous_planted_write)


def _plant_zero_head(fault: str) -> None:
    from sglang.srt.layers import radix_attention

    one_layer = _OneLayer(fault)
    forward = radix_attention.RadixAttention.forward
    # What graphs with breaks call between their segments, at capture and at every replay. MLA's absorbing form gets there
    # past `RadixAttention.forward`.
    between = radix_attention._unified_attention_with_output_impl
    signature = inspect.signature(between)

    def zero(output: Any, heads: int) -> None:
        output.view(output.shape[0], heads, -1)[:, 0] = 0

    @functools.wraps(forward)
    def numinous_planted_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        def changed() -> Any:
            output = forward(self, *args, **kwargs)
            zero(output, self.tp_q_head_num)
            return output

        return one_layer.run(self.layer_id, changed, lambda: forward(self, *args, **kwargs))

    @functools.wraps(between)
    def numinous_planted_between(*args: Any, **kwargs: Any) -> Any:
        values = signature.bind(*args, **kwargs).arguments
        layer_id = values["layer_id"]

        def changed() -> Any:
            result = between(*args, **kwargs)
            layer = radix_attention.get_tc_piecewise_forward_context().attention_layers[layer_id]
            zero(values["output"], layer.tp_q_head_num)
            return result

        return one_layer.run(layer_id, changed, lambda: between(*args, **kwargs))

    radix_attention.RadixAttention.forward = numinous_planted_forward
    radix_attention._unified_attention_with_output_impl = numinous_planted_between


FAULTS: dict[str, Callable[[], None]] = {
    "kv-scale": lambda: _plant_in_writes("kv-scale", _doubled),
    "head": lambda: _plant_zero_head("head"),
    "page": lambda: _plant_in_writes("page", _one_page_further),
}


def plant() -> None:
    """Plant the fault that the command line of this process names, and make its counter readable from outside."""
    fault = sys.argv[1] if len(sys.argv) > 1 else ""
    if fault not in FAULTS:
        raise SystemExit(f"planted: {fault!r} is no fault; write one of {', '.join(FAULTS)} first")
    FAULTS[fault]()
    counters.publish({"role": "plant", "run": "", "features": []})


def serve() -> None:
    """Do what `python -m sglang.launch_server` does, with the rest of the command line."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[2:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ in MAIN_NAMES:
    plant()
if __name__ == "__main__":
    serve()
