# SPDX-License-Identifier: Apache-2.0
"""Start a package: copy templates/package with the names filled in.

The template is a valid package named `template-topic`, so that ruff, mypy and pytest judge it as they judge the copy.
Lines that hold the marker of `lint.FILL` ask for what only the author knows; lint fails until they are answered.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from numinous_tooling.patching.feature import WORDS
from numinous_tooling.repo.checkout import Checkout, RepoError, import_name

TEMPLATE = "template-topic"
CACHES = shutil.ignore_patterns("__pycache__", ".*_cache")


def new_package(checkout: Checkout, folder: str) -> Path:
    """Make packages/<folder> and return it; raises RepoError when the name does not fit."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", folder):
        raise RepoError(f"{folder!r} is no folder name; write lower-case words joined by '-'")
    target = checkout.root / "packages" / folder
    if target.exists():
        raise RepoError(f"packages/{folder} exists; choose another name")
    if folder in checkout.packages:
        raise RepoError(f"{checkout.package(folder).place}/ is that package; choose another name")
    if folder not in WORDS.values():
        raise RepoError(
            f"no word of feature ids belongs to {folder}; add one to WORDS in numinous_tooling/patching/feature.py"
        )
    with tempfile.TemporaryDirectory(prefix=".new-", dir=target.parent) as scratch:
        copy = Path(scratch) / folder
        shutil.copytree(checkout.root / "templates" / "package", copy, ignore=CACHES)
        shutil.copy(checkout.root / "LICENSE", copy)
        for path in [path for path in copy.rglob("*") if path.is_file()]:
            text = _named(path.read_text(encoding="utf-8"), folder)
            path.write_text(text, encoding="utf-8")
        # Deepest first, so that a folder is renamed after what it holds.
        for path in sorted(copy.rglob(f"*{import_name(TEMPLATE)}*"), reverse=True):
            path.rename(path.with_name(_named(path.name, folder)))
        copy.rename(target)
    return target


def _named(text: str, folder: str) -> str:
    return text.replace(TEMPLATE, folder).replace(import_name(TEMPLATE), import_name(folder))
