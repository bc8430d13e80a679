# SPDX-License-Identifier: Apache-2.0
"""Whether a package may be released: one version everywhere, a free tag, a clean tree."""

from __future__ import annotations

from collections.abc import Iterator

from numinous_tooling.repo.checkout import Checkout, Package


def tag_of(package: Package) -> str:
    """The tag of the version in pyproject.toml."""
    return f"{package.folder}-v{package.version}"


def obstacles(checkout: Checkout, folder: str) -> Iterator[str]:
    """What stands against a release, one line each."""
    package = checkout.package(folder)
    version = package.version
    if package.init_version() != version:
        yield f"__version__ is {package.init_version()}, pyproject.toml says {version}"
    entry = package.changelog_entry()
    if entry is None:
        yield f"CHANGELOG.md has no entry `## {version}`"
    elif entry[0] != version:
        yield f"the top entry of CHANGELOG.md is {entry[0]}, pyproject.toml says {version}"
    elif "unreleased" in entry[1].lower():
        yield f"CHANGELOG.md line {entry[2]} still says unreleased; write the date"
    if checkout.git("tag", "--list", tag_of(package)).strip():
        yield f"the tag {tag_of(package)} is used; raise the version"
    if changed := checkout.git("status", "--porcelain").splitlines():
        yield f"the tree is not clean ({len(changed)} files, first {changed[0][3:]}); commit them"
