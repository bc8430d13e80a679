# SPDX-License-Identifier: Apache-2.0
"""``diag.access_locator``: the first index outside its array, by operation, layer and request, without synchronising.

*Checked* before each forward pass: ``input_ids`` (not of multimodal models, whose placeholders lie beyond the
          vocabulary), ``positions``, ``out_cache_loc``, ``req_pool_indices``, ``seq_lens``, and the entries of
          ``req_to_token`` that the batch will read: what every page table is made from. In each layer: the locations of
          a KV write. In the first attention layer: ``kv_indices`` or ``page_table`` of the backend's metadata, where it
          has them by these names (Triton; FlashAttention, TRT-LLM).
*How*     each check is a fixed sequence of device operations that keeps the smallest offending row and puts it into
          `first`, unless something is there already. Nothing depends on a value on the host, so nothing waits for the
          device and a CUDA graph may capture it; the step number is a device tensor that the host advances outside
          of graphs. "First" is the order of the stream.
*After an illegal access* the CUDA context is gone and no device memory can be read any more, nor can anything be copied.
          What survives is memory of the host that the device had written before: kernels of one stream run in order, and
          what a finished kernel stored into page-locked host memory is there. So the last operation of each check
          stores `first` into a page-locked host buffer that the device addresses directly (no copy, which could still be
          queued when the fault comes, and which no graph would need to record). A thread of the host looks at the buffer
          `POLL_S` apart, and once more when the event loop raises; both read host memory only. A process that is
          killed within that time leaves nothing.
*Not seen* an index that is in range and wrong, and accesses that no check stands before.
*Cost*    a dozen small kernels per check: for finding a fault, not for production.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from numinous_tooling.diag.features import ACCESS_LOCATOR
from numinous_tooling.diag.records import RecordFile
from numinous_tooling.patching.counters import FeatureCounters, counters

KIND = "accesses"
POLL_S = 0.02
KEPT_STEPS = 64  # the device is at most a few steps behind the host
NO_LAYER = -1

OPERATIONS = (
    "input_ids",
    "positions",
    "out_cache_loc",
    "req_pool_indices",
    "seq_lens",
    "req_to_token",
    "kv_write",
    "kv_indices",
    "page_table",
)
OF_TOKENS = frozenset(("input_ids", "positions", "out_cache_loc", "kv_write"))
OF_REQUESTS = frozenset(("req_pool_indices", "seq_lens", "req_to_token", "page_table"))

FIELDS = ("step", "row", "value", "operation", "layer", "bound", "columns")
"""Numbers of `first`: step of the forward pass (0: nothing found), flat row, value, `OPERATIONS` index, layer, first
illegal value, columns of a row."""

logger = logging.getLogger(__name__)


class PinnedView:
    """Page-locked host memory as the device sees it: under unified addressing both have one pointer."""

    def __init__(self, host: Any) -> None:
        self.host = host  # keeps it alive
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": "<i8",
            "data": (host.data_ptr(), False),
            "version": 3,
        }


class Checks:
    """Range checks on one device.

    Args:
        device: a torch device; on "cuda" what is found goes to page-locked host memory.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self.torch = torch
        self.device = torch.device(device)
        size = len(FIELDS)
        with torch.inference_mode(False):  # else they could be written in inference mode only
            self.first = torch.zeros(size, dtype=torch.int64, device=self.device)  # [FIELDS]
            self.step = torch.zeros((), dtype=torch.int64, device=self.device)
            self.host = self.mirror = self.first
            if self.device.type == "cuda":
                self.host = torch.zeros(size, dtype=torch.int64, pin_memory=True)
                self.mirror = torch.as_tensor(PinnedView(self.host), device=self.device)
        self._constants: dict[tuple[int, ...], Any] = {}

    def next_step(self) -> None:
        """The next forward pass begins; before the first one nothing counts (captures run on made-up indices)."""
        self.step.add_(1)

    def check(
        self, operation: str, values: Any, bound: int, layer: int = NO_LAYER, mask: Any = None
    ) -> None:
        """Note the first of `values` outside [0, bound), if it is the first of all.

        Args:
            operation: one of `OPERATIONS`.
            values: indices, any integer type, [rows] or [rows, columns].
            bound: first illegal value.
            layer: of the model.
            mask: where True values count, of the shape of `values`; None: everywhere.
        """
        torch = self.torch
        rows = values.numel()
        if not rows:
            return
        columns = values.shape[1] if values.dim() == 2 else 1
        flat = values.reshape(-1)
        bad = (flat < 0) | (flat >= bound)
        if mask is not None:
            bad = bad & mask.reshape(-1)
        row = torch.where(bad, torch.arange(rows, device=self.device), rows).amin()
        value = flat.take(row.clamp(max=rows - 1)).to(torch.int64)
        constant = self._constant(OPERATIONS.index(operation), layer, bound, columns)
        found = torch.cat((torch.stack((self.step, row, value)), constant))
        news = (row < rows) & (self.first[0] == 0)
        self.first.copy_(torch.where(news, found, self.first))
        if self.mirror is not self.first:
            torch.add(self.first, 0, out=self.mirror)

    def _constant(self, *numbers: int) -> Any:
        """Numbers as a device tensor, filled on the device: a copy from the host would synchronise."""
        if numbers not in self._constants:
            full = [
                self.torch.full((1,), number, dtype=self.torch.int64, device=self.device)
                for number in numbers
            ]
            self._constants[numbers] = self.torch.cat(full)
        return self._constants[numbers]

    def read(self) -> dict[str, int] | None:
        """What was found, from host memory; None as long as there is nothing, or while it is being written."""
        numbers = self.host.tolist()
        if not numbers[0] or numbers != self.host.tolist():
            return None
        return dict(zip(FIELDS, numbers, strict=True))


@dataclass(frozen=True)
class Step:
    """What the host knows of a forward pass.

    Args:
        mode: of the batch.
        requests: their ids.
        ends: number of tokens up to and with each request.
    """

    mode: str
    requests: tuple[str, ...]
    ends: tuple[int, ...]

    def request_of(self, found: dict[str, int]) -> str | None:
        """The request that a row belongs to; None where the operation's rows do not say."""
        operation, row = OPERATIONS[found["operation"]], found["row"] // found["columns"]
        if operation in OF_TOKENS:
            row = bisect_right(self.ends, row)
        elif operation not in OF_REQUESTS:
            return None
        return self.requests[row] if row < len(self.requests) else None


class AccessLocator:
    """Checks and their report in one scheduler process."""

    def __init__(self, device: Any, file: RecordFile, count: FeatureCounters) -> None:
        self.checks = Checks(device)
        self.file, self.count = file, count
        self.steps: OrderedDict[int, Step] = OrderedDict()
        self.first_layer: int | None = None
        self.reported = False
        self._number = 0
        self._lock = threading.Lock()

    def begin(self, batch: Any) -> None:
        """A forward pass of this `ForwardBatch` begins."""
        self._number += 1
        lengths = batch.extend_seq_lens_cpu or [1] * batch.batch_size
        self.steps[self._number] = Step(
            batch.forward_mode.name, tuple(batch.rids or ()), tuple(accumulate(lengths))
        )
        if len(self.steps) > KEPT_STEPS:
            self.steps.popitem(last=False)
        self.checks.next_step()
        self.count.engaged()

    def watch(self) -> None:
        """Look at host memory until something is found; in a thread."""
        while not self.reported:
            time.sleep(POLL_S)
            self.report()

    def report(self) -> None:
        """Write and log what was found, once."""
        with self._lock:
            found = None if self.reported else self.checks.read()
            if found is None:
                return
            self.reported = True
            step = self.steps.get(found["step"])
            record = {
                "utc": time.time(),
                "pid": os.getpid(),
                "step": found["step"],
                "operation": OPERATIONS[found["operation"]],
                "layer": None if found["layer"] == NO_LAYER else found["layer"],
                "row": found["row"] // found["columns"],
                "column": found["row"] % found["columns"] if found["columns"] > 1 else None,
                "value": found["value"],
                "bound": found["bound"],
                "mode": step.mode if step else None,
                "request": step.request_of(found) if step else None,
                "requests": list(step.requests) if step else [],
            }
            logger.error("numinous: %s", line_of(record))
            try:
                self.file.append(record)
            except OSError as error:  # the line above is then all there is
                logger.error("numinous: %s: %s", self.file.path, error.strerror)


def line_of(record: dict[str, Any]) -> str:
    """One line for the log."""
    place = f"{record['operation']}[{record['row']}"
    place += "]" if record["column"] is None else f", {record['column']}]"
    layer = "" if record["layer"] is None else f" in layer {record['layer']}"
    whose = ", ".join(record["requests"]) or "unknown"
    if record["request"] is not None:
        whose = f"{record['request']} (of a batch of {len(record['requests'])})"
    return (
        f"index out of range: {place} = {record['value']}{layer}, legal are 0 to {record['bound'] - 1}; "
        f"forward pass {record['step']}, {record['mode'] or 'unknown mode'}, request {whose}"
    )


# Hooks. A process runs one scheduler on one device. -----------------------------------------------------------------

_locator: AccessLocator | None = None


def _at(device: Any) -> AccessLocator:
    """Made at the first check, which is a warm-up and not yet a capture."""
    global _locator
    if _locator is None:
        _locator = AccessLocator(device, RecordFile(KIND), counters(ACCESS_LOCATOR.id))
        threading.Thread(target=_locator.watch, name="numinous-accesses", daemon=True).start()
    return _locator


def around_run_event_loop(original: Callable[..., Any], scheduler: Any) -> Any:
    """Whatever ends the loop, say first what was found."""
    try:
        return original(scheduler)
    finally:
        if _locator is not None:
            _locator.report()


def before_forward(runner: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Indices of a forward pass; this code runs eagerly, also where the pass itself is a graph."""
    locator = _at(runner.device)
    locator.begin(batch)
    check = locator.checks.check
    table = runner.req_to_token_pool.req_to_token  # [requests, positions]
    pool = runner.token_to_kv_pool
    slots = pool.size + pool.page_size
    if batch.input_ids is not None and not runner.is_multimodal:
        check("input_ids", batch.input_ids, runner.model_config.vocab_size)
    if batch.positions is not None:
        check("positions", batch.positions, table.shape[1])
    if batch.out_cache_loc is not None:
        check("out_cache_loc", batch.out_cache_loc, slots)
    check("req_pool_indices", batch.req_pool_indices, table.shape[0])
    check("seq_lens", batch.seq_lens, table.shape[1] + 1)
    if batch.batch_size:
        _check_table(locator.checks, batch, table, slots)


def _check_table(checks: Checks, batch: Any, table: Any, slots: int) -> None:
    """The entries of `req_to_token` that the batch reads."""
    torch = checks.torch
    lengths = batch.seq_lens_cpu
    width = table.shape[1] if lengths is None else min(int(lengths.max()), table.shape[1])
    # An index that is itself out of range was noted above; it must not become an access here.
    rows = batch.req_pool_indices.clamp(0, table.shape[0] - 1)
    read = table[:, :width].index_select(0, rows)
    columns = torch.arange(width, device=checks.device)
    checks.check("req_to_token", read, slots, mask=columns < batch.seq_lens[:, None])


def before_kv_write(pool: Any, layer: Any, loc_info: Any, *args: Any, **kwargs: Any) -> None:
    """Locations of a KV write: a tensor, or one wrapped with those of sub-pools."""
    number = layer.layer_id if layer is not None else kwargs.get("layer_id_override")
    loc = getattr(loc_info, "loc", loc_info)
    span = getattr(pool, "_write_loc_dcp_span", 1)  # of decode context parallelism
    _at(pool.device).checks.check(
        "kv_write",
        loc,
        (pool.size + pool.page_size) * span,
        NO_LAYER if number is None else number,
    )


def before_attention(
    backend: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any
) -> None:
    """What a backend made of `req_to_token`; it is the same for all layers, so the first one is enough."""
    metadata = backend.forward_metadata
    pool = getattr(backend, "token_to_kv_pool", None)
    if metadata is None or pool is None:
        return
    locator = _at(q.device)
    if locator.first_layer is None:
        locator.first_layer = layer.layer_id
    if layer.layer_id == locator.first_layer:
        check_metadata(locator.checks, metadata, pool, layer.layer_id)


def check_metadata(checks: Checks, metadata: Any, pool: Any, layer: int) -> None:
    """``kv_indices`` up to the end of ``kv_indptr``; ``page_table`` up to each request's length."""
    torch = checks.torch
    slots = pool.size + pool.page_size
    indices, starts = (getattr(metadata, name, None) for name in ("kv_indices", "kv_indptr"))
    if indices is not None and starts is not None:
        valid = torch.arange(indices.numel(), device=checks.device) < starts[-1]
        checks.check("kv_indices", indices, slots, layer, mask=valid)
    pages, lengths = (
        getattr(metadata, name, None) for name in ("page_table", "cache_seqlens_int32")
    )
    if pages is not None and lengths is not None and pages.shape[:1] == lengths.shape:
        size = pool.page_size
        columns = torch.arange(pages.shape[1], device=checks.device) * size
        checks.check("page_table", pages, slots // size, layer, mask=columns < lengths[:, None])
