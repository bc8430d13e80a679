# SPDX-License-Identifier: Apache-2.0
"""The protocol: judge every provider, and only then time them, side by side.

1. *Gate*: each provider answers on inputs of its own, then the reference does; `Op.compare` judges, bit for bit where
   `Implementation.exact` is claimed. An own implementation that differs or fails, or a peer that breaks a claim of
   exactness, makes the gate red: nothing of the op is timed any more and no figure leaves this module.
2. *Launches*: each provider is captured over the same input sets; the captured answer is judged again.
3. *Time*: rounds over all providers, forwards and backwards in turn, until the medians stand still, then `samples`
   rounds that count. Inputs that some provider writes into are restored before each launch, outside its time.

``bench_options["l2"]`` chooses the cache: ``"cold"`` (default) times a graph of one call, ``"rotate"`` a graph of many
calls over input sets that together exceed L2, divided by their number. Outputs of one graph do not share memory.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from numinous_tooling.bench.clocks import Clock, Launch
from numinous_tooling.bench.errors import BadUsage, DeviceLost
from numinous_tooling.testing.tensors import assert_outputs_bitwise, differing_elements
from numinous_tooling.workbench import Implementation, Op, Tensors, case_id

_T = TypeVar("_T")

SEED = 0
MAX_SETS = 128
MAX_WINDOWS = 8
WINDOW = 5
STILL = 0.01
OPTIONS = {"l2": ("cold", "rotate")}


@dataclass(frozen=True)
class Provider:
    """An implementation that takes part. `version` is that of the package which it is from."""

    name: str
    role: str
    version: str
    implementation: Implementation


@dataclass
class Result:
    """What came of one op. `measured` is empty while `red` is not."""

    measured: list[dict[str, Any]] = field(default_factory=list)
    red: list[str] = field(default_factory=list)
    not_run: list[dict[str, str]] = field(default_factory=list)


@dataclass
class _Judged:
    """A case after its gate."""

    base: Tensors
    want: Tensors
    written: list[str]
    # provider -> first difference, digest of outputs, share of each output that has other bits than the reference
    verdicts: dict[str, tuple[str | None, str, dict[str, float]]]


def select_cases(op: Op, globs: Sequence[str] = ()) -> list[Any]:
    """The op's benchmark cases whose ids match a glob; raises BadUsage where none does, or one moves no bytes."""
    cases = op.cases if op.bench_cases is None else op.bench_cases
    chosen = [
        case
        for case in cases
        if not globs or any(fnmatch.fnmatchcase(case_id(case), glob) for glob in globs)
    ]
    if not chosen:
        known = ", ".join(map(case_id, cases))
        raise BadUsage(f"{op.name}: no case matches {' '.join(globs)}; there are: {known}")
    if idle := [case_id(case) for case in chosen if op.traffic(case).bytes <= 0]:
        raise BadUsage(
            f"{op.name}: {', '.join(idle)} moves no bytes; name what is timed in bench_cases"
        )
    return chosen


def select_providers(
    op: Op, arch: str, version: str, globs: Sequence[str] = ()
) -> tuple[list[Provider], dict[str, str]]:
    """Providers that can run on `arch`, ours first, and name -> reason of those that cannot.

    Args:
        op: whose implementations and peers they are.
        arch: of the device.
        version: of the op's own package.
        globs: names to take; none: all.

    Raises:
        BadUsage: no name matches, or a name is both ours and a peer's.
    """
    if both := set(op.implementations) & set(op.peers):
        raise BadUsage(f"{op.name}: {', '.join(sorted(both))} is the name of ours and of a peer")
    chosen, absent = [], {}
    everyone = [("ours", *item) for item in op.implementations.items()]
    everyone += [("peer", *item) for item in op.peers.items()]
    taken = [
        item
        for item in everyone
        if not globs or any(fnmatch.fnmatchcase(item[1], glob) for glob in globs)
    ]
    if not taken:
        known = ", ".join(item[1] for item in everyone)
        raise BadUsage(f"{op.name}: no provider matches {' '.join(globs)}; there are: {known}")
    for role, name, implementation in taken:
        if arch not in implementation.archs:
            absent[name] = f"not for {arch}; for {', '.join(implementation.archs)}"
            continue
        try:
            of = implementation.version() if implementation.version else version
        except ImportError as error:
            absent[name] = f"not installed: {error}"
            continue
        chosen.append(Provider(name, role, of, implementation))
    return chosen, absent


def bench_op(
    op: Op,
    clock: Clock,
    *,
    version: str,
    roof: Mapping[str, Any],
    cases: Sequence[Any],
    samples: int,
    providers: Sequence[str] = (),
    progress: Callable[[str], None] = lambda case: None,
) -> Result:
    """Judge and time an op.

    Args:
        op: the declaration.
        clock: of the device.
        version: of the op's package.
        roof: of `roofs.measure_roofs`, from the same run.
        cases: to time, see `select_cases`.
        samples: counted rounds, at least 5.
        providers: names to take; none: all.
        progress: called with the id of each case when it is done.

    Returns:
        Measured rows: the fields of an evidence record that depend on case and provider.

    Raises:
        BadUsage: options that do not exist, or names that match nothing.
        DeviceLost: a provider left the device unusable; names it.
    """
    l2 = _option(op, "l2")
    if samples < 5:
        raise BadUsage(f"{samples} samples; percentiles want at least 5")
    chosen, absent = select_providers(op, clock.arch, version, providers)
    result = Result()
    for case in cases:
        name = case_id(case)
        result.not_run += [
            {"op": op.name, "case": name, "provider": provider, "reason": reason}
            for provider, reason in absent.items()
        ]
        _bench_case(op, clock, case, chosen, l2, samples, roof, result)
        clock.release()
        progress(name)
    if result.red:
        result.measured.clear()
    return result


def _option(op: Op, name: str) -> str:
    if unknown := set(op.bench_options) - set(OPTIONS):
        known = ", ".join(OPTIONS)
        raise BadUsage(f"{op.name}: bench_options has {', '.join(unknown)}; there are: {known}")
    value = str(op.bench_options.get(name, OPTIONS[name][0]))
    if value not in OPTIONS[name]:
        raise BadUsage(f"{op.name}: {name} is {value}, none of {', '.join(OPTIONS[name])}")
    return value


def _bench_case(
    op: Op,
    clock: Clock,
    case: Any,
    chosen: Sequence[Provider],
    l2: str,
    samples: int,
    roof: Mapping[str, Any],
    result: Result,
) -> None:
    name, traffic = case_id(case), op.traffic(case)

    def refuse(provider: Provider, said: str) -> None:
        if provider.role == "ours":
            result.red.append(f"{op.name} {name} {provider.name}: {said}")
        else:
            row = {"op": op.name, "case": name, "provider": provider.name, "reason": said}
            result.not_run.append(row)

    taking = []
    for provider in chosen:
        if said := provider.implementation.refuses(case):
            row = {"op": op.name, "case": name, "provider": provider.name, "reason": said}
            result.not_run.append(row)
        else:
            taking.append(provider)
    judged = _judge(op, clock, case, taking, refuse)
    for provider in taking:
        said = judged.verdicts.get(provider.name, (None,))[0]
        if said and (provider.role == "ours" or provider.implementation.exact):
            result.red.append(f"{op.name} {name} {provider.name}: {said}")
    if result.red:
        return

    taking = [provider for provider in taking if provider.name in judged.verdicts]
    count = 1 if l2 == "cold" else _set_count(clock, judged.base, traffic.bytes)
    sets = [copy_tensors(judged.base) for _ in range(count)]

    def restore() -> None:
        for inputs in sets:
            for written in judged.written:
                inputs[written].copy_(judged.base[written])

    launches: list[tuple[Provider, Launch]] = []
    for provider in taking:
        call = functools.partial(_call_each, provider.implementation, case, sets)
        try:
            launch = clock.prepare(call)
            restore()
            launch.replay()
            clock.synchronize()
        except Exception as error:
            # What ended the capture, not that it ended.
            cause: BaseException = error
            while cause.__context__ is not None:
                cause = cause.__context__
            _demand_alive(op, clock, case, provider, cause)
            refuse(provider, f"cannot be captured: {_line(cause)}")
            continue
        said = _difference(op, case, provider, launch.outputs[0], judged.want)
        if said and judged.verdicts[provider.name][0] is None:
            refuse(provider, f"the captured launch differs: {said}")
        else:
            launches.append((provider, launch))
    if result.red or not launches:
        return

    times, settled = _time(clock, launches, restore if judged.written else None, samples)
    agreeing = sum(said is None for said, *_ in judged.verdicts.values())
    for provider, _ in launches:
        difference, digest, unequal = judged.verdicts[provider.name]
        values = [value / count for value in times[provider.name]]
        p20, *_, p80 = statistics.quantiles(values, n=5, method="inclusive")
        result.measured.append(
            {
                "op": op.name,
                "case": name,
                "provider": provider.name,
                "provider_version": provider.version,
                "role": provider.role,
                "agrees": difference is None,
                "unequal": unequal,
                "n": samples,
                "median_us": statistics.median(values),
                "p20_us": p20,
                "p80_us": p80,
                "bytes": traffic.bytes,
                "flops": traffic.flops,
                "flop_unit": traffic.unit,
                "l2": _l2_text(clock, l2, count, traffic.bytes),
                "settled": settled,
                "roof": _roof_of(roof, l2),
                "gate": f"{agreeing} of {len(judged.verdicts)} providers agree with the reference, seed {SEED}; this "
                + ("one agrees" if difference is None else f"one differs: {difference}")
                + f"; outputs sha256 {digest}",
            }
        )


def _judge(
    op: Op,
    clock: Clock,
    case: Any,
    taking: Sequence[Provider],
    refuse: Callable[[Provider, str], None],
) -> _Judged:
    base = op.make_inputs(case, SEED, clock.device)
    answers: list[tuple[Provider, Tensors]] = []
    written: set[str] = set()
    for provider in taking:
        inputs = copy_tensors(base)
        try:
            got = provider.implementation.run(case, inputs)
            clock.synchronize()
        except Exception as error:
            _demand_alive(op, clock, case, provider, error)
            refuse(provider, f"fails: {_line(error)}")
            continue
        answers.append((provider, got))
        written |= {name for name, value in base.items() if _written(value, inputs[name])}
    want = op.reference(case, copy_tensors(base))
    verdicts = {
        provider.name: (
            _difference(op, case, provider, got, want),
            digest_of(got),
            _unequal(got, want),
        )
        for provider, got in answers
    }
    return _Judged(base, want, sorted(written), verdicts)


def _demand_alive(
    op: Op, clock: Clock, case: Any, provider: Provider, error: BaseException
) -> None:
    """After an error of a provider: does the device still answer? A GPU that met an illegal access fails every later call."""
    try:
        clock.synchronize()
    except Exception:
        raise DeviceLost(
            f"{op.name} {case_id(case)} {provider.name}: took the device down: {_line(error)}"
        ) from error


def _call_each(implementation: Implementation, case: Any, sets: Sequence[Tensors]) -> list[Tensors]:
    return [implementation.run(case, inputs) for inputs in sets]


def _difference(op: Op, case: Any, provider: Provider, got: Tensors, want: Tensors) -> str | None:
    """The first line of what is wrong with an answer; None if nothing is."""
    try:
        if provider.implementation.exact:
            assert_outputs_bitwise(got, want, any_nan=True)
        op.compare(case, got, want)
    except Exception as error:  # an answer without an output is a KeyError of the comparison
        return _line(error)
    return None


def _unequal(got: Tensors, want: Tensors) -> dict[str, float]:
    """Share of the elements of each output, of those that both have in one form, whose bits are not the reference's."""
    found = {}
    for name, value in want.items():
        other = got.get(name)
        if not (isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)):
            continue
        if (value.dtype, value.shape) == (other.dtype, other.shape) and value.numel():
            count = int(differing_elements(other, value, any_nan=True).sum())
            found[name] = count / value.numel()
    return found


def _time(
    clock: Clock,
    launches: Sequence[tuple[Provider, Launch]],
    restore: Callable[[], None] | None,
    samples: int,
) -> tuple[dict[str, list[float]], bool]:
    """Provider -> microseconds of each counted round, and whether the warm-up came to rest."""

    def rounds(count: int) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {provider.name: [] for provider, _ in launches}
        for provider, launch in alternating(launches, count):
            if restore:
                restore()
            times[provider.name].append(clock.sample(launch))
        return times

    before, settled = 0.0, False
    for _ in range(MAX_WINDOWS):
        now = sum(map(statistics.median, rounds(WINDOW).values()))
        settled = abs(now - before) <= STILL * now
        if settled:
            break
        before = now
    return rounds(samples), settled


def alternating(items: Sequence[_T], rounds: int) -> Iterator[_T]:
    """A B C, C B A, A B C …: each item once a round."""
    for number in range(rounds):
        yield from reversed(items) if number % 2 else items


def copy_tensors(tensors: Tensors) -> Tensors:
    """Inputs in memory of their own; strides, offsets and views of one storage stay as they are."""
    copies: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in copies:
            copies[storage.data_ptr()] = storage.clone()
        made = torch.empty(0, dtype=value.dtype, device=value.device)
        return made.set_(
            copies[storage.data_ptr()], value.storage_offset(), value.size(), value.stride()
        )

    return {name: copied(value) for name, value in tensors.items()}


def digest_of(tensors: Tensors) -> str:
    """First 12 hex digits of SHA-256 over names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        if isinstance(value, torch.Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(_bytes(value).cpu().numpy().data)
        else:
            digest.update(f"{name} {value!r}\n".encode())
    return digest.hexdigest()[:12]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _written(before: Any, after: Any) -> bool:
    """Whether a call wrote into an input: what it holds differs in a bit."""
    return isinstance(before, torch.Tensor) and not torch.equal(_bytes(before), _bytes(after))


def _set_count(clock: Clock, base: Tensors, touched: int) -> int:
    """Input sets whose touched bytes are three times L2, within a quarter of the free memory; at least 2."""
    stored = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for value in base.values()
        if isinstance(value, torch.Tensor)
    }
    wanted = -(-3 * clock.l2_bytes // max(touched, 1))
    fitting = clock.free_bytes() // 4 // max(sum(stored.values()) + touched, 1)
    return int(max(2, min(wanted, fitting, MAX_SETS)))


def _l2_text(clock: Clock, l2: str, count: int, touched: int) -> str:
    if l2 == "cold":
        return "cold"
    within = ", within L2" if count * touched <= clock.l2_bytes else ""
    return f"rotate, {count} sets of {touched} bytes{within}"


def _roof_of(roof: Mapping[str, Any], l2: str) -> dict[str, Any]:
    """The run's roofs with the launch floor of this cache mode."""
    floor = roof["node_floor_us" if l2 == "rotate" else "launch_floor_us"]
    return {**{k: v for k, v in roof.items() if k != "node_floor_us"}, "launch_floor_us": floor}


def _line(error: BaseException) -> str:
    """The first line of an error, with its type where it has no text of its own."""
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, AssertionError) and text else f"{type(error).__name__}: {text}"
