# SPDX-License-Identifier: Apache-2.0
"""Build sdist and wheel of packages, look into them, and load the wheel where nothing else is installed.

A package with ``csrc/`` is compiled first: its wheel ships machine code, so that a user needs no compiler.

The clean environment has neither pip nor torch nor an engine: what a wheel needs besides other numinous wheels of the
same build is an error here, because hooks have to load in a bare engine image.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from numinous_tooling.repo.checkout import OUTSIDE, Checkout, Package, RepoError
from numinous_tooling.upstream.series import PINS

# Runs in the clean environment: load the package and everything that its entry points name.
LOAD = """
import importlib, importlib.metadata as metadata, importlib.util, sys
module, name = sys.argv[1:]
version = importlib.import_module(module).__version__
assert version == metadata.version(name), f"__version__ {version}, metadata {metadata.version(name)}"
for entry in metadata.distribution(name).entry_points:
    if entry.group not in ("console_scripts", "pytest11"):  # the latter is loaded by pytest, where that is
        loaded = entry.load()
        if entry.group == "numinous.features":
            print(name, "features:", ", ".join(feature.id for feature in loaded()) or "none yet")
assert importlib.util.find_spec("torch") is None, "torch is installed: this environment is not clean"
"""


def build(checkout: Checkout, folders: Sequence[str] = ()) -> list[Path]:
    """Build and check the packages of `folders` (all by default) with the numinous packages that they need.

    Returns:
        The sdists and wheels in dist/. Raises RepoError with one line when something does not hold.
    """
    if importlib.util.find_spec("build") is None or importlib.util.find_spec("hatchling") is None:
        raise RepoError(
            f"build and hatchling are not installed next to {sys.executable}; run `nox -s build`, "
            "or `pip install --group build`"
        )
    wanted = [checkout.package(folder) for folder in folders] or [*checkout.packages.values()]
    dist = checkout.root / "dist"
    built = []
    for package in _with_siblings(checkout, wanted):
        _compile(checkout, package)
        built += _build_one(package, dist)
    for package in wanted:
        sdist, wheel = (path for path in built if path.name.startswith(_file_prefix(package)))
        problems = [
            *wheel_problems(checkout, package, wheel),
            *sdist_problems(checkout, package, sdist),
        ]
        if problems:
            raise RepoError(f"{package.folder}: {'; '.join(problems)}")
        load_in_clean_environment(package, dist)
    return built


def _file_prefix(package: Package) -> str:
    return f"{package.name.replace('-', '_')}-{package.version}"


def _with_siblings(checkout: Checkout, packages: Iterable[Package]) -> list[Package]:
    by_name = {package.name: package for package in checkout.packages.values()}
    closed: dict[str, Package] = {}
    queue = list(packages)
    while queue:
        package = queue.pop(0)
        if package.name not in closed:
            closed[package.name] = package
            queue += [by_name[name] for name in package.siblings if name in by_name]
    return list(closed.values())


def _compile(checkout: Checkout, package: Package) -> None:
    """Make binaries/ of a package that has csrc/."""
    if not (package.source / "csrc").is_dir():
        return
    # Of the tree that is built, installed or not.
    sources = [str(other.path / "src") for other in checkout.packages.values()]
    sources.append(str(Path(__file__).parents[2]))
    command = [sys.executable, "-m", "numinous_tooling.compile", "aot", package.folder]
    _succeed(command, f"{package.folder}: no machine code for the wheel", path=sources)


def _build_one(package: Package, dist: Path) -> list[Path]:
    """The sdist, and the wheel that is built from it."""
    dist.mkdir(exist_ok=True)
    for old in dist.glob(f"{package.name.replace('-', '_')}-*"):
        old.unlink()
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist)]
    _succeed([*command, str(package.path)], f"{package.folder} cannot be built")
    return sorted(dist.glob(f"{_file_prefix(package)}*"), key=lambda path: path.suffix == ".whl")


def wheel_problems(checkout: Checkout, package: Package, wheel: Path) -> Iterator[str]:
    """What is missing from a wheel, and what it should not hold."""
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in sorted(names):
        parts = PurePosixPath(name).parts
        if parts[0] != package.module and not parts[0].endswith(".dist-info"):
            yield f"the wheel holds {name}, outside {package.module}"
        elif "tests" in parts:
            yield f"the wheel holds the test {name}"
    source = f"{package.place}/src/"
    for file in checkout.files:
        if file.startswith(source) and file.removeprefix(source) not in names:
            yield f"the wheel lacks {file.removeprefix(source)}"
    if package.folder == OUTSIDE:
        yield from _fixes_left_out(checkout, package, names)
    binaries = f"{package.module}/binaries/"
    if (package.source / "csrc").is_dir() and not any(name.startswith(binaries) for name in names):
        yield (
            f"the wheel lacks the machine code of csrc/; say [tool.hatch.build] artifacts = "
            f'["src/{binaries}**"] in pyproject.toml'
        )
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        yield "the wheel lacks the licence"


def _fixes_left_out(checkout: Checkout, package: Package, names: set[str]) -> Iterator[str]:
    """Folders of fixes lie beside src/ in the checkout and inside of the import package in the wheel."""
    for file in checkout.files:
        name = file.removeprefix(f"{package.place}/")
        data = name != file and name.endswith(("/header.toml", "/fix.patch", PINS))
        if data and f"{package.module}/fixes/{name}" not in names:
            yield f"the wheel lacks {name}; name its folder in pyproject.toml"


def sdist_problems(checkout: Checkout, package: Package, sdist: Path) -> Iterator[str]:
    """Files in the sdist that are not in the repository: caches and leftovers."""
    folder = f"{package.place}/"
    ours = {file.removeprefix(folder) for file in checkout.files if file.startswith(folder)}
    with tarfile.open(sdist) as archive:
        names = [member.name.partition("/")[2] for member in archive if member.isfile()]
    for name in sorted(set(names) - ours - {"PKG-INFO", ".gitignore"}):
        if name.startswith(f"src/{package.module}/binaries/"):
            continue
        yield f"the sdist holds {name}, which is not in the repository"


def load_in_clean_environment(package: Package, dist: Path) -> None:
    """Install a wheel without an index, load it and everything it registers, and ask its commands for help."""
    with tempfile.TemporaryDirectory(prefix="numinous-clean-") as scratch:
        python = Path(scratch) / "bin" / "python"
        # Without pip: ours installs into it, and an interpreter without ensurepip can make it.
        _succeed([sys.executable, "-m", "venv", "--without-pip", scratch], "no environment")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        wheel = f"{package.name}=={package.version}"
        _succeed(
            [*pip, "--no-index", "--find-links", str(dist), wheel],
            f"{wheel} cannot be installed from {dist.name}/ alone",
        )
        _succeed(
            [str(python), "-I", "-c", LOAD, package.module, package.name],
            f"{wheel} does not load without torch",
            show=True,
        )
        for script in package.pyproject["project"].get("scripts", {}):
            _ask_for_help(package, python.with_name(script))


def _ask_for_help(package: Package, script: Path) -> None:
    done = _run([str(script), "--help"])
    lines = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode != 0 and not (len(lines) == 1 and f"{package.name}[" in lines[0]):
        said = lines[-1] if lines else "nothing"
        raise RepoError(
            f"{package.folder}: `{script.name} --help` exits {done.returncode} without its extra and says: {said}; "
            f"want help, or one line that names {package.name}[<extra>]"
        )


def _succeed(
    command: Sequence[str], otherwise: str, show: bool = False, path: Sequence[str] = ()
) -> None:
    done = _run(command, path)
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise RepoError(f"{otherwise}: {lines[-1].strip() if lines else f'exit {done.returncode}'}")
    if show and done.stdout:
        print(done.stdout, end="")


def _run(command: Sequence[str], path: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    # A PYTHONPATH of the caller would let the clean environment see more than the wheel.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(path)
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
