# SPDX-License-Identifier: Apache-2.0
"""CUDA C++ and HIP C++ sources of a package: where they are and what identifies them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

CSRC = "csrc"
"""Folder of a package that holds its sources; headers are found from there and from beside the file."""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"\n]+)"', re.MULTILINE)


def included(module: Path, source: str) -> Iterator[Path]:
    """The source and every header of the package that it includes with quotes, each once, by reading the text.

    Args:
        module: folder of the import package.
        source: path below it.

    A name that is not found below the package is a system header and left out, whatever #if it stands in.
    """
    todo, seen = [(module / source).resolve()], set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        yield path
        for name in _INCLUDE.findall(path.read_text(encoding="utf-8", errors="replace")):
            for near in (path.parent / name, module.resolve() / CSRC / name):
                if near.is_file():
                    todo.append(near.resolve())
                    break


def digest(module: Path, source: str, defines: Mapping[str, str]) -> str:
    """SHA-256 of the source, the headers of the package that it includes, and the preprocessor symbols.

    The compiler is not part of it: the digest says whether a shipped binary was made from the sources beside it.
    """
    files = sorted(included(module, source))
    total = hashlib.sha256(repr(sorted(defines.items())).encode())
    for path in files:
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()
