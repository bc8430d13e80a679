# SPDX-License-Identifier: Apache-2.0
"""The torchvision stand-in: a reproducible, correct wheel that imports without torch and refuses when called."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from numinous_cpu_platform import standin

USE = """
import importlib.metadata, torchvision, torchvision.io, torchvision.transforms.v2.functional
from torchvision.io import ImageReadMode, decode_jpeg, decode_image
from torchvision.transforms import InterpolationMode, functional
from torchvision.transforms.v2 import InterpolationMode as Again
assert importlib.metadata.version("torchvision") == torchvision.__version__, torchvision.__version__
assert InterpolationMode.BILINEAR is Again.BILINEAR and ImageReadMode.RGB.value == 3
for refusing in (decode_jpeg, decode_image, functional.resize, torchvision.ops, torchvision.transforms.v2.Resize):
    try:
        refusing("picture")
    except ImportError as error:
        assert "text-only stand-in" in str(error) and "\\n" not in str(error), error
    else:
        raise SystemExit(f"{refusing} did not refuse")
print(torchvision.__version__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.build_wheel(tmp_path_factory.mktemp("wheel"))


def test_built_twice_it_is_byte_identical(wheel: Path, tmp_path: Path) -> None:
    again = standin.build_wheel(tmp_path)
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()


def test_record_lists_every_file_with_its_hash_and_size(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    (record,) = (name for name in content if name.endswith(".dist-info/RECORD"))
    rows = list(csv.reader(io.StringIO(content[record].decode())))
    assert [row[0] for row in rows] == list(content)
    for name, digest, size in rows:
        if name == record:
            assert (digest, size) == ("", "")
            continue
        raw = hashlib.sha256(content[name]).digest()
        assert digest == "sha256=" + base64.urlsafe_b64encode(raw).decode().rstrip("=")
        assert int(size) == len(content[name])


def test_it_installs_offline_and_refuses_when_called(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    subprocess.run([*pip, *install], check=True)
    done = subprocess.run([python, "-I", "-c", USE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == standin.VERSION


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.28.0+numinous.standin", True), ("0.28.0", False), ("0.28.0+cpu", False)],
)
def test_it_is_told_from_the_real_one_by_its_version(version: str, expected: bool) -> None:
    assert standin.is_standin(version) is expected
