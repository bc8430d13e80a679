# SPDX-License-Identifier: Apache-2.0
"""What `doctor` reads: version specifiers and markers (against packaging where installed), and GPU tools."""

from __future__ import annotations

import itertools

import pytest

from numinous_tooling.doctor import machine, requirements

VERSIONS = (
    "0.4.7",
    "0.14.1",
    "0.15rc1",
    "0.15",
    "1.0",
    "1.0.post1",
    "1.0.dev3",
    "1.0a2",
    "2.13.0",
    "2.13.0+cu130",
    "4.0.0b18",
    "4.0.0b19",
    "4",
    "1!0.1",
)
SPECIFIERS = (
    "==2.13.0",
    "==2.13.0+cu130",
    "!=2.13",
    "<0.15,>=0.14.1",
    ">=4.0.0b18",
    ">1.0",
    "<1.0",
    "<=1.0",
    "~=0.14.0",
    "==0.14.*",
    "!=4.*",
    ">0.9,<2",
    "==1.0.post1",
    "",
)


def test_specifiers_agree_with_packaging() -> None:
    packaging = pytest.importorskip("packaging.specifiers", reason="packaging is not installed")
    for version, specifier in itertools.product(VERSIONS, SPECIFIERS):
        wanted = packaging.SpecifierSet(specifier).contains(version, prereleases=True)
        assert requirements.satisfies(version, specifier) == wanted, (version, specifier)


@pytest.mark.parametrize(
    ("version", "specifiers", "wanted"),
    [
        ("2.13.0+cpu", "==2.13.0", True),
        ("0.14.1", "<0.15,>=0.14.1", True),
        ("4.0.0b17", ">=4.0.0b18", False),
        ("1.0", "===1.0", None),
        ("not a version", "==1", None),
        ("1.0", "@ https://example.org/x.whl", None),
        ("3.0", "===1.0,<2", False),
    ],
)
def test_specifiers(version: str, specifiers: str, wanted: bool | None) -> None:
    assert requirements.satisfies(version, specifiers) is wanted


LINUX = {"python_version": "3.11", "sys_platform": "linux", "platform_machine": "x86_64"}


@pytest.mark.parametrize(
    ("marker", "wanted"),
    [
        ("", True),
        ('python_version < "3.11"', False),
        ('python_version >= "3.9"', True),
        ('"3.9" < python_version', True),
        (
            'sys_platform == "linux" and (platform_machine == "aarch64" or platform_machine == "arm64")',
            False,
        ),
        (
            'sys_platform != "linux" or (sys_platform == "linux" and platform_machine != "arm64")',
            True,
        ),
        ('platform_machine not in "aarch64 arm64"', True),
        ('extra == "test"', False),
        ('moon == "full"', None),
        ('moon == "full" and sys_platform == "darwin"', False),
        ('moon == "full" or sys_platform == "linux"', True),
        ('platform_version >= "5"', None),
        ("python_version ~= '3.9'", None),
        ("print('x')", None),
    ],
)
def test_markers(marker: str, wanted: bool | None) -> None:
    assert requirements.marker_holds(marker, environment=LINUX) is wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "NVIDIA H200, 9.0, 580.159.03, 143771 MiB\n" * 2,
            [("NVIDIA H200", "sm90", "580.159.03", 143771)] * 2,
        ),
        (
            "NVIDIA RTX PRO 6000 Blackwell Server Edition, 12.0, 580.95.05, 97887 MiB",
            [("NVIDIA RTX PRO 6000 Blackwell Server Edition", "sm120", "580.95.05", 97887)],
        ),
        (
            "NVIDIA B300 SXM6 AC, 10.3, 580.95.05, 275040 MiB",
            [("NVIDIA B300 SXM6 AC", "sm103", "580.95.05", 275040)],
        ),
        ("NVIDIA GB10, 12.1, 580.95.05, [N/A]", [("NVIDIA GB10", "sm121", "580.95.05", None)]),
        ("NVIDIA H200, [N/A], [N/A], [N/A]", [("NVIDIA H200", "sm90", None, None)]),
        ("", []),
    ],
)
def test_nvidia_smi(text: str, wanted: list[tuple[object, ...]]) -> None:
    found = machine.parse_nvidia_smi(text)
    assert [(gpu.name, gpu.arch, gpu.driver, gpu.memory_mib) for gpu in found] == wanted


def test_nvidia_smi_that_prints_a_message_is_not_a_gpu() -> None:
    with pytest.raises(ValueError, match="has failed"):
        machine.parse_nvidia_smi(
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
        )
