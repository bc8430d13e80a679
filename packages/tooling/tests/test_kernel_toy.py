# SPDX-License-Identifier: Apache-2.0
"""A toy kernel in all tiers, and implementations of it with planted faults that the same checks must refuse.

On a GPU: python3 -m pytest packages/tooling/tests/test_kernel_toy.py --tier device
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch", reason="kernel tests need torch")
triton = pytest.importorskip("triton", reason="kernel tests need triton")
import triton.language as tl  # noqa: E402

from numinous_tooling.testing.kernels import (  # noqa: E402
    KernelTests,
    check_graph,
    check_implementation,
)
from numinous_tooling.testing.tensors import (  # noqa: E402
    assert_outputs_bitwise,
    assert_within,
    error_bound,
)
from numinous_tooling.workbench import Implementation, Op, Traffic  # noqa: E402


@dataclass(frozen=True)
class Case:
    """y = 2 x + 1 on a vector of n."""

    n: int


CASES = (Case(0), Case(1), Case(255), Case(256), Case(257), Case(1000))


@triton.jit
def _affine_kernel(x, y, n, BLOCK: tl.constexpr, FAULT: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    keep = at < n
    value = tl.load(x + at, mask=keep, other=0.0) * 2.0 + 1.0  # [BLOCK]
    if FAULT == "wrong":
        value += tl.where(at == n - 1, 1.0, 0.0)
    if FAULT == "unwritten":
        keep = at < n - 1
    tl.store(y + at, value, mask=keep)


def affine(x, fault=""):
    y = torch.empty_like(x)
    if len(x):
        _affine_kernel[(triton.cdiv(len(x), 256),)](x, y, len(x), BLOCK=256, FAULT=fault)
    return y


def make_inputs(case, seed, device):
    generator = torch.Generator("cpu").manual_seed(seed)
    return {"x": torch.randn(case.n, generator=generator).to(device)}


def compare(case, got, want):
    assert_outputs_bitwise(got, want)


def run(case, inputs):
    return {"y": affine(inputs["x"])}


OP = Op(
    name="affine",
    package="tooling",
    cases=CASES,
    make_inputs=make_inputs,
    reference=lambda case, inputs: {"y": inputs["x"] * 2 + 1},
    oracle=lambda case, inputs: {"y": inputs["x"].double() * 2 + 1},
    compare=compare,
    traffic=lambda case: Traffic(bytes=8 * case.n, flops=2 * case.n, unit="fp32"),
    implementations={"triton": Implementation(run, interpret=True, exact=True)},
)


class TestAffine(KernelTests):
    """The three lines of a kernel's test file."""

    op = OP


# --- Planted faults ---------------------------------------------------------------------------------------------------


class Flaky:
    """Every second call is one unit in the last place off."""

    calls = 0

    def __call__(self, case, inputs):
        self.calls += 1
        y = affine(inputs["x"])
        return {"y": y if self.calls % 2 else torch.nextafter(y, y + 1)}


class Frozen:
    """Keeps the first inputs, as a launcher that caches by case would."""

    def __init__(self):
        self.kept = {}

    def __call__(self, case, inputs):
        return run(case, {"x": self.kept.setdefault(case, inputs["x"].clone())})


def loose(case, got, want):
    """Two roundings' worth, so that it cannot see a flaky unit in the last place."""
    exact = want["y"].double()
    assert_within("y", got["y"], exact, 2 * error_bound(want["y"], exact, torch.float32))


def planted(name, implementation):
    return dataclasses.replace(OP, compare=loose, implementations={name: implementation})


WRONG = planted("wrong", Implementation(lambda case, inputs: {"y": affine(inputs["x"], "wrong")}))
UNWRITTEN = planted(
    "unwritten", Implementation(lambda case, inputs: {"y": affine(inputs["x"], "unwritten")})
)


def refuses_wrong_and_unwritten(device):
    with pytest.raises(AssertionError, match=r"y: 1 of 257 .*worst at \(256,\)"):
        check_implementation(WRONG, "wrong", Case(257), device)
    with pytest.raises(AssertionError, match=r"y: 1 of 257 .*worst at \(256,\): got nan"):
        check_implementation(UNWRITTEN, "unwritten", Case(257), device)


@pytest.mark.tier("interpret")
def test_faults_are_seen_in_the_interpreter():
    refuses_wrong_and_unwritten(torch.device("cpu"))


@pytest.mark.tier("interpret")
def test_a_flaky_kernel_is_seen():
    flaky = planted("flaky", Implementation(Flaky()))
    check_implementation(flaky, "flaky", Case(257), torch.device("cpu"))
    with pytest.raises(AssertionError, match="run 2 differs from run 1: y: 257 of 257"):
        check_implementation(flaky, "flaky", Case(257), torch.device("cpu"), repeat=True)


@pytest.mark.tier("device")
def test_faults_are_seen_on_the_device(gpu):
    refuses_wrong_and_unwritten(gpu)
    flaky = planted("flaky", Implementation(Flaky()))
    with pytest.raises(AssertionError, match="run 2 differs from run 1"):
        check_implementation(flaky, "flaky", Case(257), gpu, repeat=True)


@pytest.mark.tier("device")
def test_faults_are_seen_in_a_graph(gpu):
    check_graph(planted("good", Implementation(run)), "good", Case(257), gpu)
    frozen = planted("frozen", Implementation(Frozen()))
    with pytest.raises(AssertionError, match="out of bounds"):
        check_graph(frozen, "frozen", Case(257), gpu)
    with pytest.raises(AssertionError, match="got nan"):
        check_graph(UNWRITTEN, "unwritten", Case(257), gpu)
