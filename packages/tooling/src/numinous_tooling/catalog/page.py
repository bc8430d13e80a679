# SPDX-License-Identifier: Apache-2.0
"""The catalogues of a checkout: what holds of their rows, and the page ``docs/catalog.md`` made from them.

Rows and features are loaded from the checkout's own sources, whatever is installed, so this belongs into a process of
its own (`python -m numinous_tooling.catalog`).
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from numinous_tooling import evidence
from numinous_tooling.catalog import Kernel
from numinous_tooling.doctor.machine import named_gpu
from numinous_tooling.repo.checkout import Checkout, Package
from numinous_tooling.workbench import ARCHS
from numinous_tooling.workbench.discover import GROUP

COMMAND = "python -m numinous_tooling.catalog --write"
PAGE = "docs/catalog.md"
FEATURES = "numinous.features"


@dataclass(frozen=True, order=True)
class Fault:
    """A row that claims too much, or a page that is stale."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: catalog: {self.text}"


def use_sources(checkout: Checkout) -> None:
    """Let the checkout's packages be imported from their sources, before any that is installed."""
    sys.path[:0] = [str(package.source.parent) for package in checkout.packages.values()]


def load(checkout: Checkout) -> tuple[list[Kernel], list[Fault]]:
    """Every row, sorted by package and op, and what is wrong with the catalogues themselves."""
    kernels: list[Kernel] = []
    faults = []
    for package in _with_catalogue(checkout):
        try:
            rows = importlib.import_module(f"{package.module}.catalog").KERNELS
        except Exception as error:
            said = f"cannot be loaded ({type(error).__name__}: {error})".replace("\n", " ")
            faults.append(Fault(_catalogue(package), 1, said))
            continue
        if f"{package.module}.catalog" not in _entry_points(package, GROUP):
            said = f"no entry point {GROUP} in pyproject.toml names {package.module}.catalog"
            faults.append(Fault(_catalogue(package), 1, said))
        for row in rows:
            if not isinstance(row, Kernel):
                said = f"KERNELS holds a {type(row).__name__}, want numinous_tooling.catalog.Kernel"
                faults.append(Fault(_catalogue(package), 1, said))
            elif row.package != package.folder:
                said = f"{row.op} is said to be of package {row.package}"
                faults.append(Fault(_catalogue(package), _line(package, row.op), said))
            else:
                kernels.append(row)
    return sorted(kernels, key=lambda row: (row.package, row.op)), faults


def check(checkout: Checkout) -> list[Fault]:
    """Everything that does not hold, sorted by place; the page is compared only when all rows hold."""
    kernels, faults = load(checkout)
    faults += _row_faults(checkout, kernels)
    page = checkout.root / PAGE
    if not faults:
        have = page.read_text(encoding="utf-8") if page.is_file() else ""
        if have != (want := render(kernels)):
            pairs = zip(have.splitlines(), want.splitlines(), strict=False)
            line = next((n for n, (a, b) in enumerate(pairs, 1) if a != b), 1)
            faults.append(Fault(PAGE, line, f"is stale; run: {COMMAND}"))
    return sorted(set(faults))


def write(checkout: Checkout) -> list[Fault]:
    """Write the page if every row holds; returns what does not."""
    kernels, faults = load(checkout)
    faults += _row_faults(checkout, kernels)
    if not faults:
        page = checkout.root / PAGE
        page.parent.mkdir(exist_ok=True)
        page.write_text(render(kernels), encoding="utf-8")
    return sorted(set(faults))


def _row_faults(checkout: Checkout, kernels: Iterable[Kernel]) -> Iterator[Fault]:
    features, problems = _features(checkout)
    first: dict[str, Kernel] = {}
    for kernel in kernels:
        package = checkout.packages[kernel.package]
        file, line = _catalogue(package), _line(package, kernel.op)
        for said in (
            *_of_declaration(kernel, package),
            *_of_feature(kernel, features, problems),
            *_of_evidence(kernel, checkout.root),
            *_of_budgets(kernel, package),
        ):
            yield Fault(file, line, f"{kernel.op}: {said}")
        if (other := first.setdefault(kernel.op, kernel)) is not kernel:
            yield Fault(file, line, f"{kernel.op}: another row of {other.package} has that op")


def _of_declaration(kernel: Kernel, package: Package) -> Iterator[str]:
    module, _, attribute = kernel.declared.partition(":")
    path = package.source.parent.joinpath(*module.split("."))
    exists = path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
    if not attribute or module.partition(".")[0] != package.module or not exists:
        yield f"declared {kernel.declared} is no <module of {package.module}>:<attribute>"


def _of_feature(kernel: Kernel, features: set[str], problems: list[str]) -> Iterator[str]:
    if kernel.feature is not None and kernel.feature not in features:
        known = "; ".join([", ".join(sorted(features)) or "none", *problems])
        yield f"no package declares the feature {kernel.feature}; there are: {known}"


def _of_evidence(kernel: Kernel, root: Path) -> Iterator[str]:
    name = f"evidence/{kernel.package}/{kernel.op}.jsonl"
    try:
        found = evidence.load(root / name) if (root / name).is_file() else []
    except ValueError:
        yield f"{name} has a record that may not be quoted"
        return
    records = {record["id"]: record for record in found}
    for missing in (x for x in kernel.evidence if x not in records):
        yield f"{name} has no record {missing}"
    named = [records[x] for x in kernel.evidence if x in records]
    proven = {
        named_gpu(record["gpu"]).arch
        for record in named
        if record["op"] == kernel.op and record.get("role") == "ours" and record.get("agrees")
    }
    for arch, word in kernel.arch.items():
        if word == "run" and arch not in proven:
            yield (
                f"{arch} run: evidence names no record of ours in {name} from such a GPU whose "
                "outputs agree"
            )


def _of_budgets(kernel: Kernel, package: Package) -> Iterator[str]:
    for arch, word in kernel.arch.items():
        if word != "compiled":
            continue
        path = package.source / "configs" / arch / f"{kernel.op}.json"
        try:
            binaries = json.loads(path.read_text(encoding="utf-8"))["binaries"]
        except (OSError, ValueError, KeyError, TypeError):
            binaries = {}
        if not binaries:
            yield (
                f"{arch} compiled: no budget in configs/{arch}/{kernel.op}.json; record it: "
                f"python -m numinous_tooling.compile record {kernel.op} --arch {arch}"
            )


def _features(checkout: Checkout) -> tuple[set[str], list[str]]:
    """Ids that the checkout's packages declare, and one line for each package whose features cannot be loaded."""
    found, problems = set(), []
    for package in checkout.packages.values():
        for entry in _entry_points(package, FEATURES):
            module, _, function = entry.partition(":")
            try:
                declared = getattr(importlib.import_module(module), function)()
                found |= {feature.id for feature in declared}
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".replace("\n", " ")
                problems.append(f"{entry} cannot be loaded ({reason})")
    return found, problems


def _entry_points(package: Package, group: str) -> list[str]:
    return list(package.pyproject["project"].get("entry-points", {}).get(group, {}).values())


def _with_catalogue(checkout: Checkout) -> list[Package]:
    return [p for p in checkout.packages.values() if (p.source / "catalog.py").is_file()]


def _catalogue(package: Package) -> str:
    return f"packages/{package.folder}/src/{package.module}/catalog.py"


def _line(package: Package, op: str) -> int:
    lines = (package.source / "catalog.py").read_text(encoding="utf-8").splitlines()
    return next((number for number, line in enumerate(lines, 1) if f'"{op}"' in line), 1)


def render(kernels: Iterable[Kernel]) -> str:
    """The page as Markdown."""
    lines = [
        "# Catalogue of kernels",
        "",
        f"Generated by `{COMMAND}` from the `catalog.py` of each package; do not edit. The words: *run* (executed on that "
        "GPU, the record is named), *compiled* (machine code within a recorded budget), *emulated* (Triton interpreter "
        "against the reference), *derived* (arithmetic), *reported* (by others); `-`: nothing is claimed. A record is a line of "
        "`evidence/<package>/<op>.jsonl`. `numinous catalog` shows the same of what is installed.",
        "",
    ]
    heads = ["op", "package", "what it does", *ARCHS, "flag", "peers", "records"]
    rows = [heads, ["---"] * len(heads), *map(_cells, kernels)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def _cells(kernel: Kernel) -> list[str]:
    module = kernel.declared.partition(":")[0].replace(".", "/")
    return [
        f"[{kernel.op}](../packages/{kernel.package}/src/{module}.py)",
        f"[{kernel.package}](../packages/{kernel.package}/README.md)",
        kernel.sentence.replace("|", "\\|"),
        *(kernel.arch.get(arch, "-") for arch in ARCHS),
        f"`{kernel.flag}`" if kernel.flag else "-",
        ", ".join(kernel.peers) or "-",
        ", ".join(f"`{name}`" for name in kernel.evidence) or "-",
    ]
