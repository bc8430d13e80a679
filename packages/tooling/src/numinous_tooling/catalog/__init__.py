# SPDX-License-Identifier: Apache-2.0
"""Which kernels there are, and on which architecture each is proven how.

A package lists its kernels in ``numinous_<package>/catalog.py`` as ``KERNELS``, a tuple of `Kernel`; the module loads
without torch. `numinous catalog` shows the rows of the installed packages, `numinous_tooling.catalog.page` judges those
of a checkout and writes ``docs/catalog.md``; ``python -m numinous_tooling.catalog`` is that command.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from numinous_tooling.patching.errors import PatchError
from numinous_tooling.patching.feature import EVIDENCE_WORDS, flag_of
from numinous_tooling.workbench import ARCHS, Op
from numinous_tooling.workbench.discover import NoSuchOp, catalogues


@dataclass(frozen=True)
class Kernel:
    """One op, and what is claimed of it.

    Args:
        op: name of the op; also the stem of its evidence and budget files.
        package: folder below ``packages/``.
        declared: ``"module:OP"`` of the `numinous_tooling.workbench.Op`.
        sentence: what it computes, in one sentence.
        arch: architecture -> the strongest of `EVIDENCE_WORDS` that holds there; one that is not named is not claimed.
        evidence: ids of records in ``evidence/<package>/<op>.jsonl``; each word ``run`` needs one of its own that our
            implementation made on such a GPU, with outputs that passed the comparison.
        feature: id of the feature that switches it on; None while no feature does.
        peers: names in `Op.peers`: what a user would run instead.

    Raises:
        ValueError: a word or an architecture that there is not.
    """

    op: str
    package: str
    declared: str
    sentence: str
    arch: Mapping[str, str]
    evidence: tuple[str, ...] = ()
    feature: str | None = None
    peers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for arch, word in self.arch.items():
            if arch not in ARCHS:
                raise ValueError(f"kernel {self.op}: {arch!r} is not among {', '.join(ARCHS)}")
            if word not in EVIDENCE_WORDS:
                raise ValueError(
                    f"kernel {self.op}: {word!r} is not among {', '.join(EVIDENCE_WORDS)}"
                )

    @property
    def flag(self) -> str | None:
        """The environment variable that switches it on."""
        return None if self.feature is None else flag_of(self.feature)


def catalog_report(arch: str | None = None, op: str | None = None) -> tuple[dict[str, Any], int]:
    """The rows of every catalogue that can be found, as data, and the exit code 0.

    Args:
        arch: leave the other architectures out.
        op: a name, or a pattern with ``*`` and ``?``.

    Raises:
        PatchError: a catalogue is broken, or there is no such architecture or op.
    """
    if arch is not None and arch not in ARCHS:
        raise PatchError(f"no kernel is made for {arch}; there are {', '.join(ARCHS)}")
    try:
        kernels = [kernel for module in catalogues() for kernel in module.KERNELS]
    except (NoSuchOp, AttributeError) as error:
        raise PatchError(f"a catalogue is broken: {error}") from error
    kernels.sort(key=lambda kernel: (kernel.op, kernel.package))
    chosen = [kernel for kernel in kernels if op is None or fnmatch.fnmatchcase(kernel.op, op)]
    if op is not None and not chosen:
        known = ", ".join(kernel.op for kernel in kernels) or "none"
        raise PatchError(f"no op {op} in any catalogue; there are: {known}")
    archs = ARCHS if arch is None else (arch,)
    report = {
        "archs": list(archs),
        "kernels": [
            {
                "op": kernel.op,
                "package": kernel.package,
                "declared": kernel.declared,
                "sentence": kernel.sentence,
                "arch": {name: kernel.arch.get(name) for name in archs},
                "feature": kernel.feature,
                "flag": kernel.flag,
                "peers": list(kernel.peers),
                "evidence": list(kernel.evidence),
            }
            for kernel in chosen
        ],
    }
    return report, 0


def op_problems(kernel: Kernel, op: Op) -> Iterator[str]:
    """What a row says and its op does not bear out, one line each; an op loads only where torch is."""
    if (kernel.op, kernel.package) != (op.name, op.package):
        yield f"{kernel.declared} is {op.name} of {op.package}"
    for peer in kernel.peers:
        if peer not in op.peers:
            yield f"no peer {peer} is declared; there are: {', '.join(op.peers) or 'none'}"
    own = op.implementations.values()
    for arch, word in kernel.arch.items():
        if word == "emulated" and not any(x.interpret for x in own):
            yield f"{arch} emulated: no implementation runs in the interpreter"
        if word == "compiled" and not any(arch in x.archs for x in op.binaries):
            yield f"{arch} compiled: no binary is declared for it"
        if word == "run" and not any(arch in x.archs for x in own):
            yield f"{arch} run: no implementation is declared for it"
