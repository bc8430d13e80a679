# SPDX-License-Identifier: Apache-2.0
"""Which ops there are, and the `Op` behind a name.

A package lists its kernels in ``numinous_<package>/catalog.py`` as ``KERNELS``: rows with a field ``op``, the op's
name, and a field ``declared``, ``"module:OP"``. Catalogues are found through the entry-point group
``numinous.catalog`` (value: the module's name), and beside it as ``numinous_*/catalog.py`` in the folders of
``sys.path``, so that a checkout with nothing installed works. A catalogue loads without torch; an op may not.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from numinous_tooling.workbench import Op

GROUP = "numinous.catalog"


class NoSuchOp(LookupError):
    """A name without an op, or an op that cannot be loaded: one line that says what there is."""


def catalogues() -> list[ModuleType]:
    """Every ``catalog`` module, sorted by name, each once.

    Raises:
        NoSuchOp: one cannot be loaded. A broken catalogue is never skipped: its kernels would go unjudged in silence.
    """
    names = {entry.value.partition(":")[0] for entry in entry_points(group=GROUP)}
    for folder in sys.path:
        names |= {
            f"{path.parent.name}.catalog" for path in Path(folder).glob("numinous_*/catalog.py")
        }
    return [_module(name) for name in sorted(names)]


def declared_ops() -> dict[str, str]:
    """Op name -> ``"module:OP"`` of every catalogue row, sorted by name.

    Raises:
        NoSuchOp: a catalogue cannot be loaded, or two rows give one name different ops.
    """
    found: dict[str, str] = {}
    for module in catalogues():
        for row in getattr(module, "KERNELS", ()):
            if found.setdefault(row.op, row.declared) != row.declared:
                raise NoSuchOp(f"op {row.op} is declared twice: {found[row.op]} and {row.declared}")
    return dict(sorted(found.items()))


def load_op(name: str) -> Op:
    """The op of a catalogue name or of ``"module:OP"``.

    Raises:
        NoSuchOp: nothing has that name, its module cannot be imported, or it is no `Op`.
    """
    where = name if ":" in name else declared_ops().get(name)
    if where is None:
        known = ", ".join(declared_ops()) or "none"
        raise NoSuchOp(f"no op {name} in any catalogue; there are: {known}; or name it module:OP")
    module, _, attribute = where.partition(":")
    op = getattr(_module(module), attribute, None)
    if not isinstance(op, Op):
        raise NoSuchOp(f"{where} is no numinous_tooling.workbench.Op but {type(op).__name__}")
    return op


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise NoSuchOp(f"{name} cannot be imported ({reason})") from error
