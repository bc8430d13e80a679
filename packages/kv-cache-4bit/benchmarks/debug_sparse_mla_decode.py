# SPDX-License-Identifier: Apache-2.0
"""First tile of `sparse_mla_decode` (CUDA) against the reference, stage by stage: where a wrong run begins to be wrong.

    python packages/kv-cache-4bit/benchmarks/debug_sparse_mla_decode.py [--width 352] [--heads 64] [--topk 64] [--mma | --packed]

On Hopper, `--mma` takes the source that is made for sm120, `--packed` version 5 (4-bit rows).

Compiles the kernel with NUMINOUS_DEBUG=1 (needs nvcc), runs one query whose list is one tile, and prints for the decoded rows K, the scores S,
the probabilities P, the output and the lse either that they agree or the first coordinate that does not. A tile of 4-bit rows holds
values × 2^-12; S is q · K of what the tile holds, P is relative to the largest score so far.
"""

from __future__ import annotations

import argparse
import sys

import torch

from numinous_kv_cache_4bit.kernels import sparse_mla_decode as kernels
from numinous_kv_cache_4bit.workbench.sparse_mla_decode import SM_SCALE, Case, make_inputs

ROWS, WIDTH, HEADS = 64, 576, 64  # of the areas that a kernel dumps into


def differing(name: str, got: torch.Tensor, want: torch.Tensor, relative: float) -> bool:
    """Print how many elements differ and where the first is; whether any does."""
    got, want = got.double(), want.double()
    bound = relative * want.abs().amax().clamp(min=1e-30)
    wrong = ~((got - want).abs() <= bound) & ~(got == want)
    if not bool(wrong.any()):
        print(
            f"{name}: agrees, {tuple(got.shape)}, largest error {float((got - want).abs().nan_to_num().max()):.3g}"
        )
        return False
    where = tuple(int(i) for i in wrong.nonzero()[0])
    print(
        f"{name}: {int(wrong.sum())} of {wrong.numel()} differ, first at {where}: got {float(got[where])!r}, want {float(want[where])!r}"
    )
    for axis in range(wrong.dim()):
        others = [i for i in range(wrong.dim()) if i != axis]
        lines = wrong.any(dim=others).nonzero().flatten().tolist() if others else []
        print(
            f"  axis {axis}: {len(lines)} of {wrong.shape[axis]} affected, {lines[:24]}{' …' if len(lines) > 24 else ''}"
        )
    return True


def check(
    width: int, heads: int, topk: int, device: torch.device, products: kernels.Products = "wgmma"
) -> bool:
    """Whether any stage differs."""
    case = Case(1, heads, topk, width, splits=1)
    inputs = make_inputs(case, 0, device)
    q, pool, index = inputs["q"], inputs["pool"][:, 0], inputs["index"][0, 0]
    call = kernels._checked(q, inputs["pool"], SM_SCALE, inputs["index"], None, None, None, 1.0, 1)
    dump = torch.full((ROWS * WIDTH + 2 * HEADS * ROWS,), torch.nan, device=device)
    kernels._launch_cuda(call, dump)
    torch.cuda.synchronize()
    row = kernels.row_format_of(width)
    latent, rope = kernels._decoded(row, pool[index.long()])
    held = kernels.HELD if not row.stock else 1.0
    plain = torch.cat([latent, rope], dim=1)
    scores = q[0, 0].double() @ plain.T
    step = ROWS // 2 if products == "mma" else ROWS  # rows whose largest score is taken at a time
    tops = [scores[:, : (at // step + 1) * step].amax(dim=1) for at in range(topk)]
    weights = (SM_SCALE * (scores - torch.stack(tops, dim=1))).exp()
    k, s, p = dump.split([ROWS * WIDTH, HEADS * ROWS, HEADS * ROWS])
    plan = kernels.schedule(heads, products)
    shown = min(heads, plan.heads)
    want = kernels.reference(q, pool, sm_scale=SM_SCALE, index=inputs["index"])
    print(f"width {width}, {heads} heads, {topk} rows: {plan.entry}")
    exact = 0.0 if not row.stock else 2.0**-8
    stages = (
        ("K [row, dimension]", k.view(ROWS, WIDTH)[:topk, : plain.shape[1]], plain * held, exact),
        ("S [head, row]", s.view(HEADS, ROWS)[:shown, :topk], scores[:shown] * held, 2.0**-7),
        ("P [head, row]", p.view(HEADS, ROWS)[:shown, :topk], weights[:shown], 2.0**-7),
        ("out [head, dimension]", call.out[0, 0], want["out"][0, 0], 2.0**-6),
        ("lse [head]", call.lse[0, 0], want["lse"][0, 0], 2.0**-9),
    )
    wrong = [differing(*stage) for stage in stages]  # all of them, not up to the first
    return any(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--width", type=int, nargs="*", default=[352, 288, 656, 528])
    parser.add_argument("--heads", type=int, nargs="*", default=[64, 32, 16])
    parser.add_argument("--topk", type=int, default=ROWS, help="1 … 64 rows")
    parser.add_argument("--mma", action="store_true", help="kernel_mma.cu on Hopper, too")
    parser.add_argument("--packed", action="store_true", help="kernel_packed.cu on Hopper")
    options = parser.parse_args()
    if options.mma:
        kernels.MADE_FOR[9, 0] = "mma"
    if options.packed:
        kernels.MADE_FOR[9, 0] = "packed"
        options.width = [w for w in options.width if not kernels.row_format_of(w).stock]
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() not in kernels.MADE_FOR:
        print(
            "debug_sparse_mla_decode: needs a GPU of sm90, sm100, sm103 or sm120", file=sys.stderr
        )
        return 2
    device, products = torch.device("cuda"), kernels.MADE_FOR[torch.cuda.get_device_capability()]
    wrong = [
        check(w, h, options.topk, device, products) for w in options.width for h in options.heads
    ]
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main())
