# SPDX-License-Identifier: Apache-2.0
"""What is true of the package without starting an engine: when the plugin is active, and that the README tells the truth."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import numinous_cpu_platform
from numinous_cpu_platform import activate, install, serve_defaults

PACKAGE = Path(__file__).parents[1]
HEADINGS = [
    "What is in this room",
    "Status table",
    "Try it in one minute (CPU)",
    "Wire it into SGLang 0.5.20",
    "Numbers and their records",
    "What we refuse",
]


@pytest.mark.parametrize("chosen", [None, "cuda", "numinous"])
def test_the_plugin_is_silent_unless_asked_by_name(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    if chosen:
        monkeypatch.setenv("SGLANG_PLATFORM", chosen)
    assert activate() is None


def test_the_plugin_names_an_existing_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", numinous_cpu_platform.PLATFORM)
    module, _, name = (activate() or "").partition(":")
    source = Path(numinous_cpu_platform.__file__).parents[1] / (module.replace(".", "/") + ".py")
    assert f"class {name}(" in source.read_text(encoding="utf-8")


def test_the_hub_is_off_for_folders_only(tmp_path: Path) -> None:
    assert serve_defaults()[0]["HF_HUB_OFFLINE"] == "1"
    assert serve_defaults(tmp_path)[0]["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in serve_defaults("org/model")[0]


def test_the_readme_has_the_headings_and_the_flags() -> None:
    text = (PACKAGE / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS
    environment, flags = serve_defaults()
    for word in [*flags, *(f"{name}={value}" for name, value in environment.items())]:
        assert word in text, f"README.md does not show {word}"
    assert f"the {len(install.read_pins())} packages" in text


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changelog = (PACKAGE / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)$", changelog, re.MULTILINE)
    assert newest is not None
    assert project["version"] == numinous_cpu_platform.__version__ == newest[1]
