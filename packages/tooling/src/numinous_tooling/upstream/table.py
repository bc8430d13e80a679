# SPDX-License-Identifier: Apache-2.0
"""``upstream-fixes/README.md``: one row a fix, made from the headers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import records
from .headers import PORTS, PROJECTS, Fix, read_fixes

PAGE = "README.md"
COMMAND = "python -m numinous_tooling.upstream table --write"
DEVICE_COMMAND = "python -m numinous_tooling.upstream run --device cuda --evidence"
NOT_APPLIED = "patch to send, not applied"

_TOP = f"""\
# Upstream fixes

Bugs in released engines and kernel libraries, each with a patch against the release and, where the bug can be shown
without its GPU, a test that fails on the released package and passes on the patched one. This page is made from the
`header.toml` of each folder by `{COMMAND}`.

- `numinous apply upstream` puts every fix of the installed SGLang in place, `numinous apply upstream.<name>` one;
  `numinous revert` takes them out byte for byte. Fixes of other projects are *{NOT_APPLIED}*: the patch layer changes
  the engine only.
- `numinous doctor -- <serve command>` says which of them that command would meet.
- `nox -s upstream` runs every test on both packages.
- How a fix is sent: [Sending a fix upstream](../docs/upstream-fixes.md).

**Evidence**: *run* – the shipped Python was executed on a CPU; *emulated* – the shipped Triton kernel was executed by
Triton's interpreter; *derived* – found by reading or arithmetic, with no reproduction. **Newest** is the state in the
newest release that was looked at.
"""
_ON_GPU = f"""\
Where a GPU is named, the same test has run there too, with the kernel compiled
(`{DEVICE_COMMAND}`, records in `{records.FILE}`).
"""


def page(root: Path) -> str:
    """The whole page."""
    fixes, gpus = read_fixes(root), records.gpus_of(root)
    parts = [_TOP, *([_ON_GPU] if gpus else []), _summary(fixes, gpus)]
    for project, facts in PROJECTS.items():
        if rows := [fix for fix in fixes if fix.project == project]:
            parts.append(_section(facts.distribution, rows, gpus))
    return "\n".join(parts)


def _summary(fixes: Sequence[Fix], gpus: Mapping[str, Sequence[str]]) -> str:
    words = Counter(str(fix.header.get("evidence")) for fix in fixes)
    ports = sum(any((fix.path / PORTS).glob("*.patch")) for fix in fixes)
    said = ", ".join(f"{number} {word}" for word, number in sorted(words.items()))
    on_gpu = sum(fix.name in gpus for fix in fixes)
    on_gpus = f", {on_gpu} of them run on a GPU too" if on_gpu else ""
    return (
        f"{len(fixes)} fixes ({said}){on_gpus}; {ports} also as a patch against a newer release.\n"
    )


def _section(distribution: str, fixes: Sequence[Fix], gpus: Mapping[str, Sequence[str]]) -> str:
    versions = ", ".join(sorted({str(fix.header["version"]) for fix in fixes}))
    lines = [
        f"## {distribution} {versions}",
        "",
        "| fix | symptom | who is hit | evidence | newest | how to get it |",
        "|---|---|---|---|---|---|",
        *(_line(fix, gpus.get(fix.name, ())) for fix in fixes),
        "",
    ]
    return "\n".join(lines)


def _line(fix: Fix, gpus: Sequence[str]) -> str:
    header = fix.header
    newest = header["newest"]
    state = f"{newest['state']} in {newest['version']}"
    how = f"`numinous apply {fix.id}`" if fix.applied else NOT_APPLIED
    ports = sorted(path.stem for path in (fix.path / PORTS).glob("*.patch"))
    if ports:
        how += f"; patch for {', '.join(ports)}"
    cells = [
        f"[{fix.path.name}]({fix.name}/)",
        header["symptom"],
        header["hit"],
        "; ".join([header["evidence"], *(f"run on {gpu}" for gpu in gpus)]),
        state,
        how,
    ]
    return "| " + " | ".join(_cell(str(cell)) for cell in cells) + " |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def problems(root: Path) -> list[str]:
    """A line if the page is not what the headers say."""
    file = root / PAGE
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return [] if text == page(root) else [f"differs from the headers; run: {COMMAND}"]


def write(root: Path) -> None:
    """Write the page."""
    (root / PAGE).write_text(page(root), encoding="utf-8")
