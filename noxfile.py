# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["nox>=2025.5.1"]
# ///
"""The only task runner: `nox -l` lists the sessions.

Every session is a thin call of pytest or `python -m …` in one shared virtual environment,
`.nox/numinous-<python version>`, so the same command runs without nox where the packages are installed. A session
installs what it needs when that has changed; delete `.nox` to start afresh.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nox
import nox.command
import nox.project

nox.needs_version = ">=2025.5.1"
nox.options.sessions = ["lint", "types", "test-cpu"]

ROOT = Path(__file__).resolve().parent
CACHE = ROOT / ".nox"
PYTHONS = ("3.12", "3.11")  # what the engine's wheels are built for

GROUPS = nox.project.load_toml(ROOT / "pyproject.toml")["dependency-groups"]
FOLDERS = {
    path.parent.name: path.parent
    for path in [
        *sorted(ROOT.glob("packages/*/pyproject.toml")),
        ROOT / "upstream-fixes/pyproject.toml",
    ]
}
PROJECTS = {
    folder: nox.project.load_toml(path / "pyproject.toml") for folder, path in FOLDERS.items()
}
TESTED = [folder for folder, path in FOLDERS.items() if (path / "tests").is_dir()]
TOPICS = [
    folder
    for folder, project in PROJECTS.items()
    if "numinous.features" in project["project"].get("entry-points", {})
]
# What the engine is installed with also bounds what the other sessions install: one environment, one set of versions.
PINS = ROOT / "packages/cpu-platform/src/numinous_cpu_platform/engine-requirements.txt"

# Project of upstream-fixes/ -> its distribution; `PROJECTS` of numinous_tooling.upstream.headers says the same.
UPSTREAM = {
    "sglang": "sglang",
    "flashinfer": "flashinfer-python",
    "deepgemm": "sgl-deep-gemm",
    "fla": "fla-core",
    "aiter": "amd-aiter",
}

CLEANUP_SECONDS = (
    60  # after Ctrl-C: servers are stopped, a report is closed; nox's own default is 0.3
)

# The environment is made by `_prepare`: nox itself has one environment per session.
task = functools.partial(nox.session, venv_backend="none")


def per_package(folders: Iterable[str]) -> Callable[..., Any]:
    """One session for each of these packages."""
    return nox.parametrize("package", [nox.param(folder, id=folder) for folder in folders])


@task
def gate(session: nox.Session) -> None:
    """The main job: serve stock and patched, replay recorded sessions, compare distributions; two verdicts.

    ``-- serving …``, ``accuracy``, ``cliff`` or ``compare`` runs one gate; other arguments go to both.
    """
    python = _prepare(session, extras=dict.fromkeys(PROJECTS, ("cli", "gate")), engine=True)
    gates, given = ["serving", "accuracy"], list(session.posargs)
    if given and not given[0].startswith("-"):
        gates = [given.pop(0)]
    # Both are run, whatever the first one says; nox reports every exit code but 0 as a failure.
    failed = []
    for name in gates:
        command = ["-m", "numinous_tooling.gate", name, *given]
        if not given and name == "accuracy":
            # On a CPU a prompt waits longer than the feature allows by default, and it would never engage.
            patient = "NUMINOUS_SCHEDULER_DECODE_BURST_MAX_WAIT_MS=60000"
            command += ["--features", "scheduler.decode_burst", "--env-b", patient]
        try:
            _run(session, python, *command)
        except nox.command.CommandFailed:
            failed.append(name)
    if failed:
        session.error(f"not PASS: {', '.join(failed)}")


@task(name="test-cpu")
@per_package(TESTED)
def test_cpu(session: nox.Session, package: str) -> None:
    """Run the tests of a package, on the CPU and with the real engine."""
    extras = ("bench", "cli", "compile", "gate", "kernels", "test")
    python = _prepare(session, extras=dict.fromkeys(PROJECTS, extras), engine=True)
    _run(session, python, "-m", "pytest", f"packages/{package}/tests", *session.posargs)


def _add_kernel_tests(word: str, archs: Sequence[str]) -> None:
    """Add the session ``test-<word>``; where that GPU is missing it says so, and the report counts it."""

    def kernel_tests(session: nox.Session, package: str) -> None:
        extras = ("compile", "kernels", "test")
        python = _prepare(session, extras=dict.fromkeys(PROJECTS, extras), engine=True)
        command = ["-m", "pytest", f"packages/{package}/tests"]
        command += ["--tier", "ref,interpret,compile,device", "--arch", ",".join(archs)]
        command += ["--report-json", f"reports/test-{word}-{package}.json"]
        _run(session, python, *command, *session.posargs)

    kernel_tests.__doc__ = f"Run a package's kernel tests, in all tiers, for {', '.join(archs)}."
    task(name=f"test-{word}")(per_package(TESTED)(kernel_tests))


for _word, _archs in {
    "sm90": ("sm90",),
    "sm100": ("sm100", "sm103"),  # one family
    "sm120": ("sm120",),
    "gfx950": ("gfx950",),
}.items():
    _add_kernel_tests(_word, _archs)


@task(name="bench-sm90")
def bench_sm90(session: nox.Session) -> None:
    """Time every op against its peers on a Hopper GPU, or those named; exit 2 on another device."""
    extras = ("bench", "kernels")
    python = _prepare(session, extras=dict.fromkeys(PROJECTS, extras))
    _run(session, python, "-m", "numinous_tooling.bench", "--arch", "sm90", *session.posargs)


@task
def lint(session: nox.Session) -> None:
    """Check format, style and the rules of the repository."""
    python = _prepare(session, "lint", extras={"tooling": ()})
    _run(session, python, "-m", "numinous_tooling.repo", "lint", *session.posargs)


@task
def types(session: nox.Session) -> None:
    """Check types: strict, except next to tensors and the engine."""
    python = _prepare(session, "types")
    _run(session, python, "-m", "mypy", *session.posargs)


@task(name="hooks-check")
def hooks_check(session: nox.Session) -> None:
    """Judge every feature against the pristine engine wheel; needs neither GPU nor torch."""
    python = _prepare(session, extras={"tooling": ("cli",), **dict.fromkeys(TOPICS, ())})
    wheel = _engine_wheel(session, python)
    _run(session, python, "-m", "numinous_tooling", "check", "--all", "--engine", str(wheel))


@task
def upstream(session: nox.Session) -> None:
    """Run every reproduction of upstream-fixes/ on the released and on the patched package, and judge pins that meet."""
    python, command = _upstream_run(session)
    _run(session, python, *command, *session.posargs)
    pins = ["-m", "numinous_tooling.upstream", "pins", "--conflicts"]
    _run(session, python, *pins, "--engine", str(_engine_wheel(session, python)))


@task(name="upstream-newest")
def upstream_newest(session: nox.Session) -> None:
    """As upstream, and tell what the newest SGLang of the index makes of every fix and its port; that judges nothing."""
    python, command = _upstream_run(session)
    if newest := _wheel(session, python, _distribution(GROUPS["engine"][0]), optional=True):
        command += ["--newest", f"sglang={newest}"]
    _run(session, python, *command, *session.posargs)


def _upstream_run(session: nox.Session) -> tuple[Path, list[str]]:
    python = _prepare(session, extras=dict.fromkeys(PROJECTS, ("cli", "test")), engine=True)
    command = ["-m", "numinous_tooling.upstream", "run", "--out", "reports/upstream.json"]
    for project, requirement in _upstream_requirements().items():
        command += ["--tree", f"{project}={_wheel(session, python, requirement)}"]
    return python, command


@task
def catalog(session: nox.Session) -> None:
    """Judge the rows of all kernels and the page made from them; `-- --write` writes docs/catalog.md."""
    python = _prepare(session, extras={"tooling": ()})
    _run(session, python, "-m", "numinous_tooling.catalog", *session.posargs)


@task
def build(session: nox.Session) -> None:
    """Build sdist and wheel of each package, or of those named, and import them in a clean environment."""
    python = _prepare_build(session)
    _run(session, python, "-m", "numinous_tooling.repo", "build", *session.posargs)


@task
@per_package(PROJECTS)
def release(session: nox.Session, package: str) -> None:
    """Check version, changelog and tag of a package, then build it; publishing stays manual."""
    python = _prepare_build(session)
    _run(session, python, "-m", "numinous_tooling.repo", "release-check", package)
    _run(session, python, "-m", "numinous_tooling.repo", "build", package)
    tag = f"{package}-v{PROJECTS[package]['project']['version']}"
    session.log(f"to publish: git tag {tag}, push it, and upload the files named above")


@task(name="new-package")
def new_package(session: nox.Session) -> None:
    """Start a package: nox -s new-package -- <folder>."""
    python = _prepare(session, extras={"tooling": ()})
    _run(session, python, "-m", "numinous_tooling.repo", "new-package", *session.posargs)


def _run(session: nox.Session, python: Path, *arguments: str) -> None:
    environment = {
        "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)]),
        "VIRTUAL_ENV": str(python.parent.parent),
        "PYTHONHOME": None,
    }
    session.chdir(ROOT)
    session.run(
        str(python),
        *arguments,
        env=environment,
        external=True,
        interrupt_timeout=CLEANUP_SECONDS,
        terminate_timeout=CLEANUP_SECONDS,
    )


def _prepare(
    session: nox.Session,
    *groups: str,
    extras: Mapping[str, Sequence[str]] | None = None,
    engine: bool = False,
) -> Path:
    """Bring the shared environment to what the session needs and return its interpreter.

    Args:
        session: whose name keeps the stamp.
        groups: dependency groups of the root pyproject.toml.
        extras: folder -> extras; these packages are installed editable. Extras that a package lacks are left out.
        engine: also install the engine with its torch.
    """
    with _locked():
        python = _interpreter(session)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        pip += ["--no-input", "--constraint", str(PINS)]
        editables = [argument for item in (extras or {}).items() for argument in _editable(*item)]
        requirements = [line for group in groups for line in GROUPS[group]]
        if editables:
            requirements += [line for line in GROUPS["editable"] if line not in requirements]
        steps = [(", ".join(requirements), [*pip, *requirements])]
        if editables:
            what = f"the packages {', '.join(extras or {})}"
            steps.append((what, [*pip, "--no-build-isolation", *editables]))
        if engine:
            steps.append(("the engine", [str(python), "-m", "numinous_cpu_platform", "install"]))

        stamp = python.parent.parent / "stamps" / session.name.partition("(")[0]
        digest = _digest(steps, [PINS, *(path / "pyproject.toml" for path in FOLDERS.values())])
        if stamp.exists() and stamp.read_text(encoding="ascii") == digest:
            return python
        for what, command in steps:
            _install(session, what, command)
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(digest, encoding="ascii")
        return python


def _prepare_build(session: nox.Session) -> Path:
    """As `_prepare`; kernel modules, which say what to compile ahead of time, import torch."""
    compiled = any(ROOT.glob("packages/*/src/*/csrc"))
    extras = dict.fromkeys(PROJECTS, ("compile", "kernels")) if compiled else {"tooling": ()}
    return _prepare(session, "build", extras=extras, engine=compiled)


def _editable(folder: str, extras: Sequence[str]) -> list[str]:
    offered = PROJECTS[folder]["project"].get("optional-dependencies", {})
    chosen = ",".join(extra for extra in extras if extra in offered)
    path = FOLDERS[folder]
    return ["--editable", f"{path}[{chosen}]" if chosen else str(path)]


def _digest(steps: object, files: Sequence[Path]) -> str:
    digest = hashlib.sha256(json.dumps(steps).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _install(session: nox.Session, what: str, command: Sequence[str]) -> None:
    session.log(f"getting {what}")
    try:
        session.run_install(*command, env={"PYTHONHOME": None}, external=True, log=False)
    except nox.command.CommandFailed:
        session.error(
            f"{what} could not be had, the reason is above; without a network let PIP_FIND_LINKS or "
            "PIP_INDEX_URL name a copy of the packages"
        )


def _interpreter(session: nox.Session) -> Path:
    """The shared environment's interpreter; made with virtualenv, which nox brings along, on first use."""
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    for version in (running,) if running in PYTHONS else PYTHONS:
        folder = CACHE / f"numinous-{version}"
        ready = folder / "stamps" / "ready"
        if not ready.exists():
            wanted = sys.executable if version == running else version
            command = [sys.executable, "-m", "virtualenv", "--quiet", "--clear", "--python", wanted]
            made = subprocess.run([*command, str(folder)], capture_output=True, text=True)
            if made.returncode != 0:
                continue
            ready.parent.mkdir()
            ready.touch()
        return folder / "bin" / "python"
    session.error(
        f"no environment with Python {' or '.join(PYTHONS)} could be made (nox runs on {running}): "
        + (made.stderr or made.stdout).strip().replace("\n", "; ")[-300:]
    )


def _engine_wheel(session: nox.Session, python: Path) -> Path:
    """The engine's wheel for the environment's interpreter, downloaded once."""
    (requirement,) = GROUPS["engine"]
    wheel = _wheel(session, python, requirement)
    assert wheel is not None
    return wheel


def _wheel(
    session: nox.Session, python: Path, requirement: str, optional: bool = False
) -> Path | None:
    """A wheel, to be read and not installed: one of a fixed version is downloaded once, else the newest is asked for.

    Args:
        session: to log and to stop.
        python: whose platform the wheel is for.
        requirement: ``name==version``, or a name.
        optional: give None where it cannot be had, for example without an index.
    """
    name, pinned, version = requirement.partition("==")
    folder = CACHE / "engine-wheel" / python.parent.parent.name
    stem = name.replace("-", "_")
    with _locked():
        found = sorted(folder.glob(f"{stem}-{version}-*.whl")) if pinned else []
        if not found:
            part = folder / "part"
            pip = [str(python), "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
            command = [*pip, "--no-input", "--no-deps", "--dest", str(part), requirement]
            if optional and subprocess.run(command, stdin=subprocess.DEVNULL).returncode:
                session.log(f"no wheel of {requirement} could be had; it is left out")
                return None
            if not optional:
                _install(
                    session, f"the wheel of {requirement} (to be read, not installed)", command
                )
            found = [path.replace(folder / path.name) for path in part.glob(f"{stem}-*.whl")]
    return found[0]


def _upstream_requirements() -> dict[str, str]:
    """Project -> requirement of the release that its fixes are against."""
    found = {}
    for path in sorted(ROOT.glob("upstream-fixes/*/*/header.toml")):
        header = nox.project.load_toml(path)
        if header["project"] == "pytorch":
            continue  # the installed one is judged; its wheel is larger than everything else together
        found[header["project"]] = f"{UPSTREAM[header['project']]}=={header['version']}"
    return found


def _distribution(requirement: str) -> str:
    return requirement.partition("==")[0]


@contextmanager
def _locked() -> Iterator[None]:
    """Two nox runs at once share the environment, but do not install into it at the same time."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    nox.main()
