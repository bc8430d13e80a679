# SPDX-License-Identifier: Apache-2.0
"""Sweeps of launch parameters: each provider launches what its name says, and gives the bits of the reference."""

from __future__ import annotations

import re
from typing import Any

import pytest

from numinous_kv_cache_4bit.kernels import kv4_expand as expand_kernel
from numinous_kv_cache_4bit.kernels import kv4_gather as gather_kernel
from numinous_kv_cache_4bit.kernels import kv4_write as write_kernel
from numinous_kv_cache_4bit.kernels import nvfp4_write as nvfp4_kernel
from numinous_kv_cache_4bit.workbench import kv4_expand, kv4_gather, kv4_write, nvfp4_write
from numinous_tooling.workbench import Op

SWEEPS: dict[str, tuple[Op, Any, str, Any]] = {
    "write": (kv4_write.SWEEP, write_kernel, "_kv4_write_kernel", kv4_write.Case(3)),
    "gather": (kv4_gather.SWEEP, gather_kernel, "_kv4_gather_kernel", kv4_gather.Case(1, 19)),
    "expand": (kv4_expand.SWEEP, expand_kernel, "_kv4_expand_kernel", kv4_expand.Case(3, 35)),
    "nvfp4": (nvfp4_write.SWEEP, nvfp4_kernel, "_nvfp4_write_kernel", nvfp4_write.Case(3)),
}
CONSTANTS = {"rows": "ROWS", "turns": "TURNS", "unit": "UNIT", "group": "GROUP", "blocks": "TILE", "warps": "num_warps"}  # fmt: skip
NAMED = [
    (sweep, name)
    for sweep, (op, *_) in SWEEPS.items()
    for name in op.implementations
    if name != "triton"
][::3]
"""Every third: a sweep makes all of its names by one expression, and the interpreter takes a second for each."""


class _Launches:
    """A jitted kernel that notes the constants of its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.seen = kernel, list[dict[str, Any]]()

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.seen.append(constants)
            self.kernel[grid](*arguments, **constants)

        return launch


@pytest.mark.tier("interpret")
@pytest.mark.parametrize(("sweep", "name"), NAMED)
def test_a_sweep_launches_what_it_names(
    sweep: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, module, kernel, case = SWEEPS[sweep]
    launches = _Launches(getattr(module, kernel))
    monkeypatch.setattr(module, kernel, launches)
    got = op.implementations[name].run(case, op.make_inputs(case, 1, "cpu"))
    op.compare(case, got, op.reference(case, op.make_inputs(case, 1, "cpu")))
    (seen,) = launches.seen
    said = {word: int(number) for word, number in re.findall(r"([a-z]+)(\d+)", name)}
    said.pop("programs", None)  # a CPU has three, see `kv4_expand`
    assert {word: seen[CONSTANTS[word]] for word in said} == said
