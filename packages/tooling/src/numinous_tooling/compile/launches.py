# SPDX-License-Identifier: Apache-2.0
"""What a launcher really passes: the specialisations that an op's implementations launch, caught without a GPU.

A budget of machine code says something only about the specialisation that runs. So the implementation is run on a
case with tensors of the CPU that call themselves those of the GPU, the launch is caught before the driver is asked,
and Triton's own binder says what it would have compiled. Sizes, strides, alignment, constants and options are then
compared with the declared `TritonBinary`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from numinous_tooling.compile import CompileError, jit
from numinous_tooling.workbench import Op, TritonBinary, case_id

LARGEST_BYTES = 64 << 20
"""Of a case, as its byte model says: larger ones would only take memory and time; they launch no other code."""

_GPU = torch.device("cuda", 0)


@dataclass(frozen=True)
class Launch:
    """One launch: who made it, of what function, and argument by argument what Triton compiles it for."""

    origin: str
    function: Any
    facts: Mapping[str, str]


# An op is compared once for each binary; kept with the op itself, so that its id stays its own.
_kept: dict[tuple[int, str], tuple[Op, list[Launch]]] = {}


class _OnGpu(TorchFunctionMode):  # type: ignore[misc]
    """CPU tensors that say they are on the GPU; what is made on the GPU is made on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__" and getattr(func, "__self__", None) is torch.Tensor.device:
            return _GPU
        if name == "__get__" and getattr(func, "__self__", None) is torch.Tensor.is_cuda:
            return True
        here = [torch.device("cpu") if _is_gpu(value) else value for value in args]
        named = {
            key: torch.device("cpu") if _is_gpu(value) else value
            for key, value in (kwargs or {}).items()
        }
        return func(*here, **named)


def _is_gpu(value: Any) -> bool:
    if isinstance(value, torch.device):
        return bool(value.type == "cuda")
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


def launches(op: Op, arch: str) -> list[Launch]:
    """Every launch of the op's Triton implementations on one architecture, for all small enough cases.

    Args:
        op: implementations that run in the interpreter are those whose launches can be caught.
        arch: key of `jit.TARGETS`.

    Returns:
        In the order of implementations and cases; equal ones stand in it once.
    """
    if (id(op), arch) in _kept:
        return _kept[id(op), arch][1]
    found: dict[tuple[Any, ...], Launch] = {}
    for name, implementation in op.implementations.items():
        if not implementation.interpret or arch not in implementation.archs:
            continue
        for case in dict.fromkeys((*op.cases, *(op.bench_cases or ()))):
            if op.traffic(case).bytes > LARGEST_BYTES or implementation.refuses(case):
                continue
            inputs = op.make_inputs(case, 0, torch.device("cpu"))
            with _caught(arch) as calls:
                implementation.run(case, inputs)
            for function, args, kwargs in calls:
                facts = _facts_of_call(function, args, kwargs, arch)
                key = (function, *facts.items())
                found.setdefault(key, Launch(f"{name} of {case_id(case)}", function, facts))
    _kept[id(op), arch] = (op, list(found.values()))
    return _kept[id(op), arch][1]


def differences(op: Op, binary: TritonBinary, arch: str) -> list[str]:
    """How a declared binary differs from the nearest launch of its kernel, one line each; empty if one equals it.

    Raises:
        CompileError: no case launches the kernel at all.
    """
    wanted = declared(binary, arch)
    function = jit.function_of(binary)
    own = [launch for launch in launches(op, arch) if launch.function is function]
    if not own:
        raise CompileError(f"{binary.name}: no case of {op.name} launches {binary.kernel}")

    def unlike(launch: Launch) -> list[str]:
        return [
            f"{name}: declared {wanted.get(name, '-')}, launched {launch.facts.get(name, '-')}"
            for name in dict.fromkeys((*wanted, *launch.facts))
            if wanted.get(name) != launch.facts.get(name)
        ]

    nearest = min(own, key=lambda launch: len(unlike(launch)))
    lines = unlike(nearest)
    return [f"nearest launch: {nearest.origin}", *lines] if lines else []


def declared(binary: TritonBinary, arch: str) -> dict[str, str]:
    """A binary argument by argument, in the words of `Launch.facts`."""
    source = jit.source_of(binary, arch)
    backend = _backend(arch)
    options = backend.parse_options({**jit.options_for(binary, arch), "debug": False})
    return _facts(source.fn, source.signature, source.constants, source.attrs, options)


@contextlib.contextmanager
def _caught(arch: str) -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    from triton.runtime.jit import JITFunction

    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def catch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        calls.append((self, args, kwargs))

    backend, chip, _ = jit.TARGETS[arch]
    hip = "7.0" if backend == "hip" else None
    capability = divmod(chip, 10) if isinstance(chip, int) else (9, 5)
    with (
        mock.patch.object(JITFunction, "run", catch),
        mock.patch.object(torch.version, "hip", hip),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        _OnGpu(),
    ):
        yield calls


def _backend(arch: str) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    return make_backend(GPUTarget(*jit.TARGETS[arch]))


def _facts_of_call(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], arch: str
) -> dict[str, str]:
    from triton.runtime.jit import create_function_from_signature

    backend = _backend(arch)
    given = {**kwargs, "debug": False}
    binder = create_function_from_signature(function.signature, function.params, backend)
    bound, specialisation, rest = binder(*args, **given)
    options, signature, constants, attributes = function._pack_args(
        backend, given, bound, specialisation, rest
    )
    return _facts(function, signature, constants, attributes, options)


def _facts(
    function: Any,
    signature: Mapping[str, str],
    constants: Mapping[tuple[int, ...], Any],
    attributes: Mapping[tuple[int, ...], Any],
    options: Any,
) -> dict[str, str]:
    facts = {}
    for index, name in enumerate(function.arg_names):
        if signature[name] == "constexpr":
            facts[name] = f"constant {constants[(index,)]!r}"
        else:
            marks = sorted(f"{key} {value}" for key, value in attributes.get((index,), ()))
            facts[name] = " ".join([signature[name], *marks])
    for name in ("num_warps", "num_stages", "num_ctas", "maxnreg", "waves_per_eu"):
        if hasattr(options, name):
            facts[name] = str(getattr(options, name))
    return facts
