# SPDX-License-Identifier: Apache-2.0
"""Pytest plugin: kernel tests in four tiers, ``--tier``, ``--arch``, and a report that counts what was not run.

A test belongs to a tier by its marker; one without runs as ever, unless ``--tier`` asks for tiers only::

    @pytest.mark.tier("ref")                      # on the CPU
    @pytest.mark.tier("interpret")                # on the CPU, in a process with TRITON_INTERPRET=1
    @pytest.mark.tier("compile")                  # takes the argument `arch`, runs once for each
    @pytest.mark.tier("device", archs=("sm90",))  # on the GPU present; takes the fixture `gpu` if it wants to

`numinous_tooling.testing.kernels.KernelTests` makes such tests from an `Op`. A test that is not run is a skip with its
reason; with ``NUMINOUS_REQUIRE_DEVICE=1`` a device test that lacks its GPU fails instead.

The module imports pytest and the standard library only: it loads in every pytest session of an environment that has
numinous-tooling.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from numinous_tooling.testing.interpreter import (
    InterpretedItem,
    ResultStream,
    interpreting,
    patch_language_once,
)
from numinous_tooling.testing.report import TierReport
from numinous_tooling.testing.tiers import (
    REQUIRE_DEVICE,
    SELECTION,
    Selection,
    find_device,
    require_device,
    selection,
    tier_of,
    wrong_arch,
)
from numinous_tooling.workbench import ARCHS, TIERS

if TYPE_CHECKING:
    import torch

# The interpreter computes in numpy, which warns where a GPU gives inf or NaN, and (triton 3.6.0 under numpy 2.3) at a
# loop with a run-time bound.
NUMPY_WARNINGS = pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow|underflow|divide by zero) encountered in:RuntimeWarning",
    "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("numinous", "kernel test tiers")
    group.addoption(
        "--tier",
        action="append",
        default=[],
        metavar="TIER",
        help=f"run tests of these tiers only: {', '.join(TIERS)}; repeat, or join by commas (default: every test)",
    )
    group.addoption(
        "--arch",
        action="append",
        default=[],
        metavar="ARCH",
        help=f"compile for, and accept as device: {', '.join(ARCHS)}; repeat, or join by commas (default: all)",
    )
    group.addoption(
        "--full", action="store_true", help="compile all binaries, not the quick ones only"
    )
    group.addoption(
        "--report-json",
        metavar="PATH",
        help="write passed, failed and not run (by reason) per tier and architecture",
    )
    # From the session to the interpreter process that it starts.
    group.addoption("--interpreted-results", metavar="PATH", help=argparse.SUPPRESS)


def pytest_configure(config: pytest.Config) -> None:
    """Read the options and register the report."""
    config.addinivalue_line(
        "markers", "tier(name, archs=None): tier of a kernel test: ref, interpret, compile, device"
    )
    tiers, archs = _named(config, "tier", TIERS), _named(config, "arch", ARCHS)
    config.stash[SELECTION] = Selection(
        tiers=tiers or TIERS,
        archs=archs or ARCHS,
        tiers_named=bool(tiers),
        archs_named=bool(archs),
        full=config.getoption("full"),
    )
    if interpreting():
        patch_language_once()
    if stream := config.getoption("interpreted_results"):
        config.pluginmanager.register(ResultStream(Path(stream)), "numinous-results")
    else:
        config.pluginmanager.register(TierReport(config), TierReport.NAME)


def _named(config: pytest.Config, option: str, known: tuple[str, ...]) -> tuple[str, ...]:
    named = {name.strip() for text in config.getoption(option) for name in text.split(",")}
    if unknown := sorted(named - set(known)):
        raise pytest.UsageError(
            f"--{option}: {', '.join(map(repr, unknown))} is none of {', '.join(known)}"
        )
    return tuple(name for name in known if name in named)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every compile test its architectures."""
    marker = metafunc.definition.get_closest_marker("tier")
    if marker is None or marker.args != ("compile",):
        return
    if "arch" not in metafunc.fixturenames:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: a test of tier compile takes the argument `arch`"
        )
    metafunc.parametrize("arch", selection(metafunc.config).archs)


@pytest.hookimpl(
    trylast=True
)  # after -k and -m, so that the interpreter process runs what they leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not asked for, and put stand-ins where a test runs in the interpreter process."""
    wanted = selection(config)
    report = config.pluginmanager.get_plugin(TierReport.NAME)
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        tier = tier_of(item)
        if tier not in wanted.tiers if tier else wanted.tiers_named:
            dropped.append(item)
            continue
        if tier == "interpret":
            if interpreting():
                item.add_marker(NUMPY_WARNINGS)
            else:
                item = InterpretedItem.standing_for(item)
        kept.append(item)
        if report and tier:
            report.expect(item.nodeid, tier, _column(item, tier, wanted))
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def _column(item: pytest.Item, tier: str, wanted: Selection) -> str:
    """Where in the report a test is counted: the architecture, or cpu."""
    if tier == "compile":
        return str(getattr(item, "callspec").params["arch"])  # noqa: B009 - not of every Item
    if tier == "device":
        present = find_device().arch
        if present and (present in wanted.archs or not wanted.archs_named):
            return present
        return "+".join(wanted.archs) if wanted.archs_named else "none"
    return "cpu"


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what cannot run here, with the reason; fail instead where a device is demanded."""
    tier = tier_of(item)
    if tier == "compile" and interpreting():
        pytest.skip("TRITON_INTERPRET=1 is set, which puts the interpreter in the compiler's place")
    if tier != "device":
        return
    if missing := _missing_device(selection(item.config)):
        if require_device():
            pytest.fail(
                f"device tier not run: {missing}; {REQUIRE_DEVICE} demands it", pytrace=False
            )
        pytest.skip(missing)
    marker = item.get_closest_marker("tier")
    if marker and (reason := wrong_arch(marker.kwargs.get("archs"))):
        pytest.skip(reason)


def _missing_device(wanted: Selection) -> str:
    device = find_device()
    if device.arch is None:
        return device.missing
    if wanted.archs_named and device.arch not in wanted.archs:
        return f"--arch asks for {' or '.join(wanted.archs)}, the GPU is {device.arch}"
    if interpreting():
        return "TRITON_INTERPRET=1 is set"
    return ""


@pytest.fixture
def gpu() -> torch.device:
    """The device of a test of tier device."""
    import torch

    return torch.device("cuda", torch.cuda.current_device())


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say which tiers run, where they were named."""
    wanted = selection(config)
    if not (wanted.tiers_named or wanted.archs_named):
        return []
    return [f"tiers: {', '.join(wanted.tiers)}; architectures: {', '.join(wanted.archs)}"]
