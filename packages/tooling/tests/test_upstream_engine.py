# SPDX-License-Identifier: Apache-2.0
"""The fixes of upstream-fixes/ on a copy of the released engine: each alone, all in order, and out again byte for byte."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from numinous_tooling.patching import boot, disk
from numinous_tooling.patching.discover import installed_features
from numinous_tooling.patching.engine import DirectoryTree, find_engine
from numinous_tooling.patching.feature import Feature
from numinous_tooling.patching.journal import DiskState
from numinous_tooling.upstream import features, pins
from numinous_tooling.upstream.trees import copy_of

ROOT = Path(__file__).parents[3] / "upstream-fixes"
FIXES = features(ROOT)


@pytest.fixture(scope="module")
def engine(
    pristine_engine: DirectoryTree, tmp_path_factory: pytest.TempPathFactory
) -> DirectoryTree:
    """A copy of the whole engine; its files are hard links, which the patch layer replaces and never writes into."""
    site = tmp_path_factory.mktemp("engine")
    copy_of("sglang", pristine_engine.root.parent, site)
    return DirectoryTree(site / "sglang", pristine_engine.version, installed=True)


@pytest.fixture
def untouched(engine: DirectoryTree) -> Iterator[None]:
    """Whatever the test does, afterwards every byte is as before."""
    before = contents(engine)
    yield
    DiskState(engine).revert()
    assert contents(engine) == before
    assert not (engine.root.parent / ".numinous").exists()


def contents(engine: DirectoryTree) -> dict[str, str]:
    return {path: hashlib.sha256(engine.read(path)).hexdigest() for path in engine.files()}


def test_each_alone_and_all_in_order(engine, untouched):
    state = DiskState(engine)
    before = contents(engine)
    for feature in FIXES:
        assert boot.fits(feature, engine) == []
        written = state.apply([feature]).written
        assert written
        assert all(
            hashlib.sha256(engine.read(path)).hexdigest() != before.get(path) for path in written
        )
        state.revert([feature.id])
        assert all(
            hashlib.sha256(engine.read(path)).hexdigest() == before[path]
            for path in written
            if path in before
        ), feature.id
    assert contents(engine) == before
    state.apply(FIXES)
    assert [item.feature_id for item in state.applied()] == [feature.id for feature in FIXES]
    # One from the middle out and in again: what is on disk does not depend on the way there.
    together = contents(engine)
    middle = FIXES[len(FIXES) // 2]
    state.revert([middle.id], FIXES)
    state.apply([middle], FIXES)
    assert contents(engine) == together


def test_the_command_knows_the_word(engine, untouched, monkeypatch):
    monkeypatch.setattr(disk, "installed_features", lambda: list(FIXES))
    monkeypatch.setattr(disk, "installed_engine", lambda: engine)
    report, code = disk.apply_report(["upstream"])
    assert code == 0, report
    assert report["done"][-1].count("upstream.") == len(FIXES)
    assert disk.revert_report([])[1] == 0


def test_every_other_feature_fits_with_all_fixes_in_place(engine, untouched):
    others = [one for one in installed_features() if not one.id.startswith("upstream.")]
    if not others:
        pytest.skip("no feature is installed")
    assert pins.conflicts(others, ROOT, engine) == []
    DiskState(engine).apply(FIXES)
    judged = find_engine(engine.root)
    hooked: list[Feature] = [one for one in others if not one.on_disk]
    assert {one.id: boot.fits(one, judged) for one in hooked} == {one.id: [] for one in hooked}
