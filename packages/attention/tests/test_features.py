# SPDX-License-Identifier: Apache-2.0
"""What the package declares: its entry point names `features`, and each id carries the room's word."""

from __future__ import annotations

import tomllib
from pathlib import Path

from numinous_attention.features import features
from numinous_tooling.patching.feature import WORDS


def test_entry_point_names_features() -> None:
    path = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["numinous.features"] == {
        "attention": f"{features.__module__}:{features.__name__}"
    }


def test_ids_carry_the_word_of_the_room() -> None:
    assert {WORDS[feature.word] for feature in features()} <= {"attention"}
