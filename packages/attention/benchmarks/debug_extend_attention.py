# SPDX-License-Identifier: Apache-2.0
"""First tiles of `extend_attention` (CUDA, D 512) against the reference, stage by stage: where a wrong run begins to be wrong.

    python packages/attention/benchmarks/debug_extend_attention.py [--prefix 128] [--chunk 16]

Compiles the kernel with NUMINOUS_DEBUG=1 (needs nvcc), runs one request of one KV head with 8 query heads, and prints for the first tile of 64 keys
K and the first half of V as they lie in shared memory, scores S, probabilities P, P as the second block took it, then the output and the lse, either that
they agree or the first coordinate that does not. P is relative to a whole power of two. Waits end after about a second in this build, so that a kernel that hangs
ends, too: what was not reached is NaN.
"""

from __future__ import annotations

import argparse
import math
import sys

import torch

from numinous_attention.kernels import extend_attention as kernels
from numinous_attention.kernels import extend_attention_cuda as cuda
from numinous_attention.workbench.extend_attention import Case, make_inputs

ROWS, KEYS, DIM, HALF, GROUP = 128, 64, 512, 256, 8  # of the areas that the kernel dumps into


def differing(name: str, got: torch.Tensor, want: torch.Tensor, relative: float) -> bool:
    """Print how many elements differ and where the first is; whether any does."""
    got, want = got.double(), want.double()
    bound = relative * want.abs().nan_to_num(posinf=0, neginf=0).amax().clamp(min=1e-30)
    wrong = ~((got - want).abs() <= bound) & ~(got == want)
    if not bool(wrong.any()):
        error = float((got - want).abs().nan_to_num().max())
        print(f"{name}: agrees, {tuple(got.shape)}, largest error {error:.3g}")
        return False
    where = tuple(int(i) for i in wrong.nonzero()[0])
    print(
        f"{name}: {int(wrong.sum())} of {wrong.numel()} differ, first at {where}: got {float(got[where])!r}, want {float(want[where])!r}"
    )
    for axis in range(wrong.dim()):
        others = [i for i in range(wrong.dim()) if i != axis]
        lines = wrong.any(dim=others).nonzero().flatten().tolist()
        print(
            f"  axis {axis}: {len(lines)} of {wrong.shape[axis]} affected, {lines[:24]}{' …' if len(lines) > 24 else ''}"
        )
    return True


def check(prefix: int, chunk: int, device: torch.device) -> bool:
    """Whether any stage differs. At least 64 prefix keys and 16 tokens, so that the first tile is whole."""
    case = Case(str(chunk), str(prefix), GROUP, 1, DIM)
    inputs = make_inputs(case, 0, device)
    sm_scale = 1 / math.sqrt(DIM)
    tables = [inputs[x] for x in ("qo_indptr", "kv_indptr", "kv_indices")]
    tensors = [inputs[x] for x in ("q", "k", "v", "k_pool", "v_pool")]
    call = kernels._checked(
        *tensors, *tables, sm_scale, True, None, None, None, None, False, 0.0, None, 1.0, 1.0, None, True
    )  # fmt: skip
    assert call.lse is not None
    areas = (KEYS * DIM, KEYS * HALF, ROWS * KEYS, ROWS * KEYS, ROWS * KEYS)
    dump = torch.full((sum(areas),), torch.nan, device=device)
    cuda.launch_call(call, dump)
    torch.cuda.synchronize()
    k, v, s, p, taken = dump.split(areas)
    ids = inputs["kv_indices"][:KEYS].long()
    keys, values = inputs["k_pool"][ids, 0].double(), inputs["v_pool"][ids, 0].double()
    scores = inputs["q"].double().reshape(-1, DIM)[:ROWS] @ keys.T  # rows are (token, head)
    powers = scores * sm_scale * math.log2(math.e)
    weights = torch.exp2(powers - powers.amax(dim=1, keepdim=True).ceil())
    want = kernels.reference(*tensors, *tables, sm_scale=sm_scale)
    print(f"{prefix} prefix keys, {chunk} tokens of {GROUP} heads")
    stages = (
        ("K [key, dimension]", k.view(KEYS, DIM), keys, 0.0),
        ("V, first half [key, dimension]", v.view(KEYS, HALF), values[:, :HALF], 0.0),
        ("S [row, key]", s.view(ROWS, KEYS), scores, 2.0**-14),
        ("P [row, key]", p.view(ROWS, KEYS), weights, 2.0**-12),
        ("P as the second block took it [row, key]", taken.view(ROWS, KEYS), weights, 2.0**-7),
        ("out, first half [token, head, dimension]", call.out[..., :HALF], want["out"][..., :HALF], 2.0**-6),
        ("out, second half [token, head, dimension]", call.out[..., HALF:], want["out"][..., HALF:], 2.0**-6),
        ("lse [token, head]", call.lse, want["lse"], 2.0**-12),
    )  # fmt: skip
    wrong = [differing(*stage) for stage in stages]  # all of them, not up to the first
    return any(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--prefix", type=int, nargs="*", default=[64, 128, 1000])
    parser.add_argument("--chunk", type=int, default=16, help="at least 16 tokens")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("debug_extend_attention: needs a GPU of sm90", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    wrong = [check(prefix, options.chunk, device) for prefix in options.prefix]
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main())
