# SPDX-License-Identifier: Apache-2.0
"""Building a package and loading its wheel where nothing else is installed; hand-made wheels carry the faults."""

from __future__ import annotations

import importlib.util
import io
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from numinous_tooling.compile import NotAvailable, cuda
from numinous_tooling.repo import __main__ as command
from numinous_tooling.repo.build import (
    build,
    load_in_clean_environment,
    sdist_problems,
    wheel_problems,
)
from numinous_tooling.repo.checkout import Checkout, Package, RepoError

INIT = '__version__ = "1.0"\n'
FEATURES = "def features():\n    return ()\n"
ENTRY = '[project.entry-points."numinous.features"]\ntopic = "numinous_topic.features:features"\n'

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "numinous-{folder}"
version = "1.0"
requires-python = ">=3.11"
dependencies = [{dependencies}]

{rest}
[tool.hatch.build.targets.wheel]
packages = ["src/numinous_{folder}"]
"""


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def pyproject(folder: str, dependencies: str = "", rest: str = "") -> str:
    return PYPROJECT.format(folder=folder, dependencies=dependencies, rest=rest)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    base, topic = "packages/base", "packages/topic"
    files = {
        "noxfile.py": "",
        f"{base}/pyproject.toml": pyproject("base"),
        f"{base}/LICENSE": "licence",
        f"{base}/src/numinous_base/__init__.py": INIT,
        f"{topic}/pyproject.toml": pyproject("topic", '"numinous-base>=1,<2"', ENTRY),
        f"{topic}/LICENSE": "licence",
        f"{topic}/src/numinous_topic/__init__.py": "import numinous_base\n" + INIT,
        f"{topic}/src/numinous_topic/features.py": FEATURES,
        f"{topic}/src/numinous_topic/data/table.json": "{}",
        f"{topic}/tests/test_x.py": "",
    }
    write(tmp_path, files)
    return Checkout(tmp_path)


@pytest.mark.skipif(not importlib.util.find_spec("build"), reason="build comes with nox -s build")
def test_build_brings_siblings_and_loads(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(checkout.root)
    assert command.main(["build", "topic"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "numinous-topic features: none yet",
        "dist/numinous_topic-1.0.tar.gz",
        "dist/numinous_topic-1.0-py3-none-any.whl",
        "dist/numinous_base-1.0.tar.gz",
        "dist/numinous_base-1.0-py3-none-any.whl",
    ]
    # A cache that slipped into the source is named.
    write(checkout.root, {"packages/base/.cache/x": ""})
    assert command.main(["build", "base"]) == 1
    assert capsys.readouterr().err == (
        "build: base: the sdist holds .cache/x, which is not in the repository\n"
    )


OPS = """
from numinous_tooling.workbench import Op, SourceBinary

OP = Op("toy", "topic", (), None, None, None, None, {}, binaries=(SourceBinary("toy", "csrc/toy.cu", ["toy"], ["sm90"]),))
"""
CATALOG = """
from types import SimpleNamespace

KERNELS = (SimpleNamespace(op="toy", declared="numinous_topic.ops:OP"),)
"""


@pytest.mark.skipif(not importlib.util.find_spec("build"), reason="build comes with nox -s build")
def test_machine_code_is_built_into_the_wheel(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        cuda.find_nvcc()
    except NotAvailable as reason:
        pytest.skip(str(reason))
    monkeypatch.chdir(checkout.root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(checkout.root / "cache"))
    topic = "packages/topic/src/numinous_topic"
    write(
        checkout.root,
        {
            f"{topic}/csrc/toy.cu": 'extern "C" __global__ void toy() {}\n',
            f"{topic}/ops.py": OPS,
            f"{topic}/catalog.py": CATALOG,
            ".gitignore": "binaries/\n",
        },
    )
    assert command.main(["build", "topic"]) == 1
    assert "the wheel lacks the machine code of csrc/" in capsys.readouterr().err
    artifacts = '[tool.hatch.build]\nartifacts = ["src/numinous_topic/binaries/**"]\n'
    path = checkout.root / "packages/topic/pyproject.toml"
    path.write_text(pyproject("topic", '"numinous-base>=1,<2"', ENTRY + artifacts))
    fresh = Checkout(checkout.root)
    sdist, made = build(fresh, ["topic"])[:2]
    assert "numinous_topic/binaries/sm90/toy.cubin" in zipfile.ZipFile(made).namelist()
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("binaries/sm90/manifest.json") for name in archive.getnames())
    (checkout.root / topic / "csrc/toy.cu").write_text("absent;\n")
    assert command.main(["build", "topic"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("build: topic: no machine code for the wheel: aot: toy for sm_90a: ")
    assert said.count("\n") == 1


def wheel(
    package: Package, files: Mapping[str, str], requires: str = "", entry_points: str = ""
) -> Path:
    """A wheel made by hand, in dist/."""
    dist = package.path.parent / "dist"
    dist.mkdir(exist_ok=True)
    stem = f"{package.name.replace('-', '_')}-{package.version}"
    metadata = (
        f"Metadata-Version: 2.4\nName: {package.name}\nVersion: {package.version}\n{requires}"
    )
    info = {
        "METADATA": metadata,
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": entry_points,
        "licenses/LICENSE": "licence",
    }
    members = {**files, **{f"{stem}.dist-info/{name}": text for name, text in info.items()}}
    record = "".join(f"{name},,\n" for name in [*members, f"{stem}.dist-info/RECORD"])
    path = dist / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**members, f"{stem}.dist-info/RECORD": record}.items():
            archive.writestr(name, text)
    return path


GOOD = {
    "numinous_topic/__init__.py": INIT,
    "numinous_topic/features.py": FEATURES,
    "numinous_topic/data/table.json": "{}",
}


def test_wheel_contents(checkout: Checkout) -> None:
    package = checkout.package("topic")
    assert list(wheel_problems(checkout, package, wheel(package, GOOD))) == []
    bad = {
        "numinous_topic/__init__.py": INIT,
        "numinous_topic/features.py": FEATURES,
        "numinous_topic/tests/test_x.py": "",
        "tests/test_y.py": "",
    }
    path = wheel(package, bad)
    assert list(wheel_problems(checkout, package, path)) == [
        "the wheel holds the test numinous_topic/tests/test_x.py",
        "the wheel holds tests/test_y.py, outside numinous_topic",
        "the wheel lacks numinous_topic/data/table.json",
    ]
    with zipfile.ZipFile(path, "w") as archive:
        for name in GOOD:
            archive.writestr(name, "")
    assert list(wheel_problems(checkout, package, path)) == ["the wheel lacks the licence"]


def test_wheel_carries_the_fixes_that_lie_beside_its_source(checkout: Checkout) -> None:
    place = "upstream-fixes"
    files = {
        f"{place}/pyproject.toml": pyproject("upstream-fixes"),
        f"{place}/src/numinous_upstream_fixes/__init__.py": INIT,
        f"{place}/sglang/0001-a/header.toml": "",
        f"{place}/sglang/0001-a/fix.patch": "",
        f"{place}/sglang/0001-a/test_repro.py": "",
    }
    write(checkout.root, files)
    checkout = Checkout(checkout.root)
    package = checkout.package("upstream-fixes")
    inside = "numinous_upstream_fixes/fixes/sglang/0001-a"
    good = {"numinous_upstream_fixes/__init__.py": INIT, f"{inside}/header.toml": ""}
    path = wheel(package, good)
    assert list(wheel_problems(checkout, package, path)) == [
        "the wheel lacks sglang/0001-a/fix.patch; name its folder in pyproject.toml"
    ]
    path = wheel(package, {**good, f"{inside}/fix.patch": ""})
    assert list(wheel_problems(checkout, package, path)) == []


def test_sdist_contents(checkout: Checkout, tmp_path: Path) -> None:
    path = tmp_path / "x.tar.gz"
    names = ("LICENSE", "PKG-INFO", "tests/test_x.py", ".mypy_cache/a.db")
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"numinous_topic-1.0/{name}"), io.BytesIO())
    assert list(sdist_problems(checkout, checkout.package("topic"), path)) == [
        "the sdist holds .mypy_cache/a.db, which is not in the repository"
    ]


SCRIPT = "[console_scripts]\ntopic-tool = numinous_topic.tool:main\n"
TOOL = "numinous_topic/tool.py"
HELP = "def main():\n    print('usage: topic-tool')\n"
EXTRA = "import sys\nsys.exit(\"topic-tool: rich is not installed; run: pip install 'numinous-topic[cli]'\")\n"


@pytest.mark.parametrize("tool", [HELP, EXTRA], ids=["help", "names its extra"])
def test_command_that_helps(checkout: Checkout, tool: str) -> None:
    (checkout.root / "packages/topic/pyproject.toml").write_text(
        pyproject("topic", rest='[project.scripts]\ntopic-tool = "numinous_topic.tool:main"\n')
    )
    package = checkout.package("topic")
    path = wheel(package, {**GOOD, TOOL: tool}, entry_points=SCRIPT)
    load_in_clean_environment(package, path.parent)


def test_command_that_does_not_help(checkout: Checkout) -> None:
    (checkout.root / "packages/topic/pyproject.toml").write_text(
        pyproject("topic", rest='[project.scripts]\ntopic-tool = "numinous_topic.tool:main"\n')
    )
    package = checkout.package("topic")
    path = wheel(package, {**GOOD, TOOL: "import torch\n"}, entry_points=SCRIPT)
    with pytest.raises(
        RepoError,
        match=r"`topic-tool --help` exits 1 .*ModuleNotFoundError: No module named 'torch'",
    ):
        load_in_clean_environment(package, path.parent)


@pytest.mark.parametrize(
    ("files", "requires", "said"),
    [
        ({"numinous_topic/__init__.py": "import torch\n" + INIT}, "", "No module named 'torch'"),
        (
            {"numinous_topic/features.py": "import torch\n" + FEATURES},
            "",
            "No module named 'torch'",
        ),
        (
            {"numinous_topic/__init__.py": '__version__ = "0.9"\n'},
            "",
            "__version__ 0.9, metadata 1.0",
        ),
        ({}, "Requires-Dist: numpy\n", "cannot be installed from dist/ alone: .*numpy"),
    ],
    ids=["package needs torch", "feature needs torch", "version differs", "needs an index"],
)
def test_wheel_that_does_not_load_alone(
    checkout: Checkout, files: Mapping[str, str], requires: str, said: str
) -> None:
    package = checkout.package("topic")
    entry = "[numinous.features]\ntopic = numinous_topic.features:features\n"
    path = wheel(package, {**GOOD, **files}, requires, entry)
    with pytest.raises(RepoError, match=said):
        load_in_clean_environment(package, path.parent)
