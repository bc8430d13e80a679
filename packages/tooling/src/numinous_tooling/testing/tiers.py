# SPDX-License-Identifier: Apache-2.0
"""What a session of kernel tests was asked for, and which GPU it has."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import pytest

from numinous_tooling.patching.flags import parse_bool
from numinous_tooling.workbench import TIERS

REQUIRE_DEVICE = "NUMINOUS_REQUIRE_DEVICE"


@dataclass(frozen=True)
class Selection:
    """What the command line asks for.

    Args:
        tiers: to run; all by default.
        archs: to compile for, and of which the GPU must be one; all by default.
        tiers_named: ``--tier`` was given, so tests without a tier are left out.
        archs_named: ``--arch`` was given, so a GPU of another architecture does not count.
        full: compile every binary, not the quick ones only.
    """

    tiers: tuple[str, ...]
    archs: tuple[str, ...]
    tiers_named: bool
    archs_named: bool
    full: bool


@dataclass(frozen=True)
class Device:
    """The GPU of this process.

    Args:
        arch: ``"sm90"`` and so on; None where there is none.
        name: as the driver calls it.
        missing: why there is none.
    """

    arch: str | None
    name: str = ""
    missing: str = ""


SELECTION = pytest.StashKey[Selection]()


def selection(config: pytest.Config) -> Selection:
    """What the command line of this session asks for."""
    return config.stash[SELECTION]


@cache
def find_device() -> Device:
    """The first GPU that torch can use."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return Device(None, missing="torch is not installed")
    if not torch.cuda.is_available():
        return Device(None, missing="torch sees no GPU")
    properties = torch.cuda.get_device_properties(0)
    if torch.version.hip:
        arch = str(properties.gcnArchName).partition(":")[0]
    else:
        arch = f"sm{properties.major}{properties.minor}"
    return Device(arch, properties.name)


def require_device() -> bool:
    """Whether a device test that lacks its GPU fails."""
    return parse_bool(REQUIRE_DEVICE, os.environ.get(REQUIRE_DEVICE, ""))


def tier_of(item: pytest.Item) -> str | None:
    """The tier of a test, None for one without; raises UsageError for an unknown tier."""
    marker = item.get_closest_marker("tier")
    if marker is None:
        return None
    if len(marker.args) != 1 or marker.args[0] not in TIERS:
        raise pytest.UsageError(f"{item.nodeid}: tier{marker.args} is none of {', '.join(TIERS)}")
    return str(marker.args[0])


def wrong_arch(archs: Iterable[str] | None) -> str:
    """Why something made for these architectures does not run on the GPU present; empty where it does."""
    present = find_device().arch
    if archs is None or present in (allowed := tuple(archs)):
        return ""
    return f"made for {', '.join(allowed)}, the GPU is {present}"
