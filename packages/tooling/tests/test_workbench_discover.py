# SPDX-License-Identifier: Apache-2.0
"""Ops are found by catalogue name or as module:OP; a broken catalogue and a doubtful name are errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from numinous_tooling.workbench import Op
from numinous_tooling.workbench.discover import NoSuchOp, catalogues, declared_ops, load_op

KERNELS = """
from numinous_tooling.workbench import Op, Traffic

OP = Op("toy", "tooling", (), dict, dict, dict, lambda case: Traffic(0), {})
"""
CATALOG = """
from typing import NamedTuple


class Row(NamedTuple):
    op: str
    declared: str


KERNELS = (Row("toy", "numinous_toyroom.kernels:OP"),)
"""


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "numinous_toyroom"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "kernels.py").write_text(KERNELS)
    (folder / "catalog.py").write_text(CATALOG)
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in set(sys.modules) - before:
        if name.startswith("numinous_toyroom"):
            del sys.modules[name]


def test_found_on_the_path_and_loaded_by_either_name(room: Path) -> None:
    assert declared_ops()["toy"] == "numinous_toyroom.kernels:OP"
    assert isinstance(load_op("toy"), Op)
    assert load_op("numinous_toyroom.kernels:OP") is load_op("toy")


def test_a_catalogue_is_listed_once_and_does_not_load_its_kernels(room: Path) -> None:
    names = [module.__name__ for module in catalogues()]
    assert names.count("numinous_toyroom.catalog") == 1
    declared_ops()
    assert "numinous_toyroom.kernels" not in sys.modules


def test_an_unknown_name_lists_the_known(room: Path) -> None:
    with pytest.raises(NoSuchOp, match=r"no op nosuch in any catalogue; there are: .*toy"):
        load_op("nosuch")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("numinous_toyroom.nosuch:OP", "cannot be imported"),
        ("numinous_toyroom.kernels:NOSUCH", "is no numinous_tooling.workbench.Op but NoneType"),
        ("numinous_toyroom.kernels:Traffic", "but type"),
    ],
)
def test_a_wrong_place_is_named(room: Path, name: str, said: str) -> None:
    with pytest.raises(NoSuchOp, match=said):
        load_op(name)


def test_a_broken_catalogue_is_an_error(room: Path) -> None:
    (room / "catalog.py").write_text("import nosuch_module\n")
    with pytest.raises(NoSuchOp, match=r"numinous_toyroom\.catalog cannot be imported"):
        declared_ops()


def test_two_ops_of_one_name_are_an_error(room: Path) -> None:
    more = CATALOG + 'KERNELS += (Row("toy", "numinous_toyroom.kernels:OTHER"),)\n'
    (room / "catalog.py").write_text(more)
    with pytest.raises(NoSuchOp, match="op toy is declared twice"):
        declared_ops()
