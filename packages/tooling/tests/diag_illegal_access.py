# SPDX-License-Identifier: Apache-2.0
"""A process that dies of an illegal access on its GPU, and what `diag.access_locator` still says of it.

Run by the device test of `test_diag_access.py`. Prints, in this order: the error of the device, and the record.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
import triton
import triton.language as tl

from numinous_tooling.diag import access_locator


@triton.jit
def scatter_kernel(pool, loc, SIZE: tl.constexpr):
    """Stores at ``pool[loc[i]]`` without a look at the bounds, as a KV write does."""
    rows = tl.arange(0, SIZE)
    tl.store(pool + tl.load(loc + rows), 1.0)


def main() -> int:
    """Two forward passes inside a CUDA graph; the second one scatters to an address that no allocation has."""
    device = torch.device("cuda", 0)
    slots, rows = 1024, 8
    pool = SimpleNamespace(size=slots, page_size=0, device=device)
    memory = torch.zeros(slots, device=device)
    loc = torch.arange(rows, device=device)

    def layer_work() -> None:
        access_locator.before_kv_write(pool, SimpleNamespace(layer_id=5), loc)
        scatter_kernel[(1,)](memory, loc, rows)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer_work()  # warm-up: allocates, compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer_work()
    locator = access_locator._locator
    assert locator is not None
    for step, last in enumerate((7, 1 << 44), 1):
        names = [f"request-{step}-{row}" for row in range(rows)]
        mode = SimpleNamespace(name="DECODE")
        locator.begin(
            SimpleNamespace(
                forward_mode=mode, rids=names, batch_size=rows, extend_seq_lens_cpu=None
            )
        )
        loc[-1].fill_(last)
        graph.replay()
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print("device:", str(error).splitlines()[0])
    locator.report()
    sys.stdout.write(locator.file.path.read_text())
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
