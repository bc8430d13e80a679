# SPDX-License-Identifier: Apache-2.0
"""Tests of an `Op` in all tiers, for all of its cases. A test file of a kernel is::

    from numinous_moe_gemm.kernels.rmsnorm_quant import OP
    from numinous_tooling.testing.kernels import KernelTests


    class TestRmsnormQuant(KernelTests):
        op = OP

Further tests stand beside it, or in the class. The checks themselves are functions, for tests written by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from numinous_tooling.testing.tensors import (
    assert_deterministic,
    assert_outputs_bitwise,
    capture_and_replay,
    coordinate,
    poison_byte,
    poisoned_allocations,
)
from numinous_tooling.testing.tiers import selection, tier_of, wrong_arch
from numinous_tooling.workbench import Implementation, Op, Tensors, TritonBinary, case_id

SEED, OTHER_SEED = 0, 1


def check_reference(op: Op, case: Any) -> None:
    """Tier ``ref``: inputs and reference repeat bit for bit; the reference agrees with the oracle.

    How it must agree says `Op.compare_oracle`; without one, `torch.testing.assert_close` at the tolerances of the
    reference's dtype. Without an oracle the outputs must be finite, wherever all inputs are.
    """

    def fresh(seed: int = SEED) -> Tensors:
        return op.make_inputs(case, seed, torch.device("cpu"))

    assert_outputs_bitwise(fresh(), fresh())
    want = assert_deterministic(lambda: op.reference(case, fresh()))
    if op.oracle is None:
        if all(_finite(value) for value in fresh().values()):
            lost = [name for name, value in want.items() if not _finite(value)]
            assert not lost, f"the reference is not finite in {', '.join(lost)} on finite inputs"
        return
    exact = op.oracle(case, fresh())
    if op.compare_oracle is not None:
        op.compare_oracle(case, {name: want[name] for name in exact if name in want}, exact)
        return
    if unknown := exact.keys() - want.keys():
        raise AssertionError(f"the oracle gives {sorted(unknown)}, which the reference does not")
    for name, value in exact.items():
        torch.testing.assert_close(
            want[name], value.to(want[name].dtype), msg=lambda text, name=name: f"{name}: {text}"
        )


def _finite(value: Any) -> bool:
    return not _is_floating(value) or bool(_readable(value).isfinite().all())


def _is_nan(value: torch.Tensor) -> bool:
    return _is_floating(value) and bool(_readable(value).isnan().all())


def _is_floating(value: Any) -> bool:
    # Two E2M1 codes in a byte: neither NaN nor infinity, and no arithmetic in torch.
    return (
        isinstance(value, torch.Tensor)
        and value.dtype.is_floating_point
        and value.dtype != torch.float4_e2m1fn_x2
    )


def _readable(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.element_size() == 1 else value


def check_planted_faults(op: Op, case: Any) -> int:
    """`Op.compare` takes the reference's outputs, and refuses them with any one element spoilt.

    Spoilt are the first, the middle and the last element of each output, once by the poison of unwritten memory and
    once by a changed value: every element of every output is compared.

    Returns:
        The number of faults; 0 where every output is empty.
    """

    def outputs() -> Tensors:
        return op.reference(case, op.make_inputs(case, SEED, torch.device("cpu")))

    op.compare(case, outputs(), outputs())
    want, seen = outputs(), 0
    for name, fault, spoilt in _spoilt(outputs()):
        try:
            op.compare(case, spoilt, want)
        except AssertionError:
            seen += 1
            continue
        raise AssertionError(f"compare does not see {fault} of output {name}")
    return seen


def _spoilt(outputs: Tensors) -> Iterator[tuple[str, str, Tensors]]:
    for name, value in outputs.items():
        if not isinstance(value, torch.Tensor) or not value.numel():
            continue
        for position in sorted({0, value.numel() // 2, value.numel() - 1}):
            for fault, change in (("poison", _poisoned), ("a changed value", _changed)):
                copy = value.clone()
                where = coordinate(position, value.shape)
                before = copy[where].reshape(1)
                if change is _poisoned and _is_nan(before):
                    continue
                after = change(before)
                if not torch.equal(after.view(torch.uint8), before.view(torch.uint8)):
                    copy[where] = after[0]
                    yield name, f"{fault} in element {position}", {**outputs, name: copy}


def _poisoned(element: torch.Tensor) -> torch.Tensor:
    changed = element.clone()
    changed.view(torch.uint8).fill_(poison_byte(element.dtype))
    return changed


def _changed(element: torch.Tensor) -> torch.Tensor:
    # The highest bit but one of the last byte: the largest exponent bit of a floating type.
    changed = element.clone()
    high = changed.view(torch.uint8)
    high[-1] ^= 0x01 if element.dtype == torch.bool else 0x40
    return changed


def check_implementation(
    op: Op, name: str, case: Any, device: torch.device, *, repeat: bool = False
) -> None:
    """Compare an implementation with the reference, computed after it, where its fresh allocations are poisoned.

    Args:
        repeat: run twice on fresh inputs, which must agree bit for bit.
    """
    implementation = op.implementations[name]

    def run() -> Tensors:
        with poisoned_allocations(_package(implementation)):
            return implementation.run(case, op.make_inputs(case, SEED, device))

    got = assert_deterministic(run) if repeat else run()
    _judge(op, implementation, case, got, op.make_inputs(case, SEED, device))


def check_graph(op: Op, name: str, case: Any, device: torch.device) -> None:
    """Capture an implementation in a CUDA graph and replay it, on the captured inputs and on changed ones."""
    implementation = op.implementations[name]

    def run(inputs: Tensors) -> Tensors:
        with poisoned_allocations(_package(implementation)):
            return implementation.run(case, inputs)

    seeds = (OTHER_SEED, SEED, OTHER_SEED)
    replayed = capture_and_replay(
        run,
        op.make_inputs(case, SEED, device),
        [op.make_inputs(case, seed, device) for seed in seeds],
    )
    for seed, got in zip(seeds, replayed, strict=True):
        _judge(op, implementation, case, got, op.make_inputs(case, seed, device))
    assert_outputs_bitwise(replayed[0], replayed[2])


def _package(implementation: Implementation) -> str:
    return str(getattr(implementation.run, "__module__", "")).partition(".")[0]


def _judge(
    op: Op, implementation: Implementation, case: Any, got: Tensors, inputs: Tensors
) -> None:
    want = op.reference(case, inputs)
    op.compare(case, got, want)
    if implementation.exact:
        assert_outputs_bitwise(got, want, any_nan=True)


class KernelTests:
    """Base class of an op's tests; see the module."""

    op: ClassVar[Op]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each test the op's cases, implementations and binaries."""
        for argument, values in (
            ("case", self._cases),
            ("implementation", self._implementations),
            ("binary", self._binaries),
            ("triton_binary", self._triton_binaries),
        ):
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, values(metafunc))

    def _cases(self, metafunc: pytest.Metafunc) -> list[Any]:
        ids = [case_id(case) for case in self.op.cases]
        if twice := sorted({name for name in ids if ids.count(name) > 1}):
            raise pytest.UsageError(f"{self.op.name}: two cases are called {', '.join(twice)}")
        return [pytest.param(case, id=name) for case, name in zip(self.op.cases, ids, strict=True)]

    def _implementations(self, metafunc: pytest.Metafunc) -> list[Any]:
        interpret = tier_of(metafunc.definition) == "interpret"
        names = [
            name
            for name, implementation in self.op.implementations.items()
            if implementation.interpret or not interpret
        ]
        return names or [_none("no implementation runs in the interpreter")]

    def _binaries(self, metafunc: pytest.Metafunc) -> list[Any]:
        found = [pytest.param(binary, id=binary.name) for binary in self.op.binaries]
        return found or [_none("the op declares no binary")]

    def _triton_binaries(self, metafunc: pytest.Metafunc) -> list[Any]:
        found = [binary for binary in self.op.binaries if isinstance(binary, TritonBinary)]
        return [pytest.param(binary, id=binary.name) for binary in found] or [
            _none("the op declares no Triton binary")
        ]

    def _skip_unless_taken(self, tier: str, case: Any, implementation: str | None = None) -> None:
        if reason := self.op.not_run(tier, case):
            pytest.skip(reason)
        if implementation and (reason := self.op.implementations[implementation].refuses(case)):
            pytest.skip(f"{implementation} refuses: {reason}")

    @pytest.mark.tier("ref")
    def test_reference(self, case: Any) -> None:
        """The reference repeats, and agrees with the oracle."""
        self._skip_unless_taken("ref", case)
        check_reference(self.op, case)

    @pytest.mark.tier("ref")
    def test_planted_faults(self, case: Any) -> None:
        """The comparison sees a single spoilt element."""
        self._skip_unless_taken("ref", case)
        if not check_planted_faults(self.op, case):
            pytest.skip("no output holds an element to spoil")

    @pytest.mark.tier("interpret")
    def test_interpreted(self, implementation: str, case: Any) -> None:
        """An implementation in the Triton interpreter."""
        self._skip_unless_taken("interpret", case, implementation)
        check_implementation(self.op, implementation, case, torch.device("cpu"))

    @pytest.mark.tier("compile")
    def test_compiled(self, request: pytest.FixtureRequest, binary: Any, arch: str) -> None:
        """Machine code within its budget."""
        from numinous_tooling.compile import gate

        if arch not in binary.archs:
            pytest.skip(f"{binary.name} is not made for {arch}")
        if not binary.quick and not selection(request.config).full:
            pytest.skip("not in the quick selection: --full compiles it")
        try:
            gate.check(self.op, binary, arch)
        except gate.NotAvailable as missing:
            pytest.skip(str(missing))
        except AssertionError as violations:
            # The text says everything; a traceback through the gate for each architecture would bury it.
            raise pytest.fail.Exception(str(violations), pytrace=False) from None

    @pytest.mark.tier("compile")
    def test_launched(self, triton_binary: Any, arch: str) -> None:
        """The declared specialisation of a Triton kernel is one that the launcher makes."""
        from numinous_tooling.compile.launches import differences

        if arch not in triton_binary.archs:
            pytest.skip(f"{triton_binary.name} is not made for {arch}")
        if lines := differences(self.op, triton_binary, arch):
            raise pytest.fail.Exception("\n".join(lines), pytrace=False)

    @pytest.mark.tier("device")
    def test_device(self, implementation: str, case: Any, gpu: torch.device) -> None:
        """An implementation on the GPU, twice."""
        self._skip_unless_runs(implementation, case)
        check_implementation(self.op, implementation, case, gpu, repeat=True)

    @pytest.mark.tier("device")
    def test_device_graph(self, implementation: str, case: Any, gpu: torch.device) -> None:
        """An implementation captured in a CUDA graph and replayed on changed inputs."""
        self._skip_unless_runs(implementation, case)
        check_graph(self.op, implementation, case, gpu)

    def _skip_unless_runs(self, implementation: str, case: Any) -> None:
        if reason := wrong_arch(self.op.implementations[implementation].archs):
            pytest.skip(f"{implementation} is {reason}")
        self._skip_unless_taken("device", case, implementation)


def _none(reason: str) -> Any:
    return pytest.param(None, id="none", marks=pytest.mark.skip(reason=reason))
