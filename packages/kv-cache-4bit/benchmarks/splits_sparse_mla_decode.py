# SPDX-License-Identifier: Apache-2.0
"""How a list is best split on this GPU: `sparse_mla_decode` with every number of splits and every cluster of them, in one run.

    python splits_sparse_mla_decode.py --heads 64 --batch 1 8 32 64 --products wgmma packed

A line each: splits of a list, blocks of a cluster, blocks of the launch and how many of them run at once; median and the 20 and 80 % of times in µs,
L2 cold, in turns with one another; a star is what `split_last_turn` chooses. Every output is compared with the reference first. It prints
and records nothing: a choice goes to START_TILES, PART_TILES and JOIN_TILES, and its proof is the benchmark. Exit 1: an output is wrong; 2: no
Hopper GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import torch

from numinous_kv_cache_4bit.kernels import sparse_mla_decode as kernels
from numinous_kv_cache_4bit.workbench.sparse_mla_decode import OP, SM_SCALE, Case
from numinous_tooling.bench.clocks import Clock, CudaClock

SPLITS = (1, 2, 3, 4, 6, 8, 12, 15, 16, 24, 32)


def layouts(tokens: int, tiles: int, places: dict[int, int]) -> list[kernels.Split]:
    """All splits of all lists into SPLITS, with every cluster that divides them."""
    return [
        kernels.Split(tokens if n == 1 else 0, n, cluster)
        for n in SPLITS
        if n <= tiles
        for cluster in places
        if n % cluster == 0
    ]


def measure(
    clock: Clock, case: Case, device: torch.device, samples: int, products: kernels.Products
) -> bool:
    """Prints a case's table; whether all outputs were right."""
    inputs = OP.make_inputs(case, 0, device)
    want = OP.reference(case, inputs)
    plan = kernels.schedule(case.heads, products)
    row = kernels.row_format_of(case.width)
    places = kernels._places(plan, row, inputs["q"].device)
    groups, tiles = -(-case.heads // plan.heads), -(-case.topk // kernels.TILE)
    chosen = kernels.split_last_turn(case.requests, groups, tiles, places)
    print(
        f"{products}: {case.requests} requests of {case.heads} heads, {case.topk} rows of {case.width} bytes"
    )
    launches: list[tuple[kernels.Split, Any]] = []
    right = True
    for split in layouts(case.requests, tiles, places):

        def call(split: kernels.Split = split) -> kernels.Decoded:
            checked = kernels._checked(
                inputs["q"], inputs["pool"], SM_SCALE, inputs["index"], None, None, None, 1.0, None
            )
            kernels._launch_cuda(checked, split=split, products=products)
            return kernels.Decoded(checked.out, checked.lse)

        try:
            OP.compare(case, call()._asdict(), want)
        except AssertionError as error:
            print(f"  {split}: {str(error).splitlines()[0]}")
            right = False
            continue
        launches.append((split, clock.prepare(call)))
    times: dict[kernels.Split, list[float]] = {split: [] for split, _ in launches}
    for turn in range(samples + 3):
        for split, launch in launches:
            took = clock.sample(launch)
            if turn >= 3:
                times[split].append(took)
    for split, took in times.items():
        low, *_, high = statistics.quantiles(took, n=5, method="inclusive")
        blocks, room = case.requests * groups * split.splits, places[split.cluster]
        print(
            f"{'*' if split == chosen else ' '} splits {split.splits:2} cluster {split.cluster:2} blocks {blocks:4} of {room:3}: "
            f"{statistics.median(took):7.2f} ({low:.2f} … {high:.2f})"
        )
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--heads", type=int, nargs="+", default=[64, 16])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--width", type=int, default=352)
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--products", nargs="+", choices=("wgmma", "packed"), default=["wgmma", "packed"], help="packed: 4-bit rows")  # fmt: skip
    parser.add_argument("--samples", type=int, default=60)
    given = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("clusters are Hopper's, and there is no such GPU")
        return 2
    clock, device = CudaClock(), torch.device("cuda")
    right = [
        measure(clock, Case(batch, heads, given.topk, given.width), device, given.samples, products)
        for heads in given.heads
        for batch in given.batch
        for products in given.products
        if products == "wgmma" or not kernels.row_format_of(given.width).stock
    ]
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
