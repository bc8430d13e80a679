# SPDX-License-Identifier: Apache-2.0
"""The installer: its decisions with a package tool that only answers, then for real from a folder of tiny wheels."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from numinous_cpu_platform import install, standin
from numinous_cpu_platform.__main__ import main
from numinous_cpu_platform.install import CPU_INDEX, Step
from numinous_cpu_platform.runner import Found, InstallError, PipRunner, size_of

PACKAGE = Path(install.__file__).parent
TORCH, VISION = f"torch=={install.TORCH_VERSION}", f"torchvision=={install.TORCHVISION_VERSION}"
PLAIN = {TORCH: "2.13.0", VISION: "0.28.0"}  # what an index such as PyPI resolves to
CPU_CONFIGURED = {TORCH: "2.13.0+cpu", VISION: "0.28.0+cpu"}
CPU_ON_INDEX = {
    (f"{TORCH}+cpu", CPU_INDEX): "2.13.0+cpu",
    (f"{VISION}+cpu", CPU_INDEX): "0.28.0+cpu",
}


class FakeRunner:
    """Answers from a table, records every question, installs nothing."""

    name = "fake"

    def __init__(self, answers: dict) -> None:
        self.answers = answers
        self.asked: list[str | tuple[str, str]] = []
        self.installed: list[tuple[str, ...]] = []

    def resolve(
        self, requirement: str, *, index: str | None = None, deps: bool = False
    ) -> list[Found]:
        key = (requirement, index) if index else requirement
        self.asked.append(key)
        version = self.answers.get(key)
        return [Found(requirement.partition("=")[0], version)] if version else []

    def install(self, arguments: Sequence[str], *, index: str | None = None) -> None:
        self.installed.append(tuple(arguments))


# choice, gpu, installed, answers -> version, index, warned
TORCH_TABLE = {
    "there, CPU build": ("auto", False, "2.13.0+cpu", {}, "2.13.0+cpu", None, False),
    "there, another build": ("cpu", False, "2.13.0+cu130", {}, "2.13.0+cu130", None, False),
    "other version replaced": ("auto", False, "2.11.0", CPU_CONFIGURED, "2.13.0+cpu", None, False),
    "no GPU, configured CPU": ("auto", False, None, CPU_CONFIGURED, "2.13.0+cpu", None, False),
    "no GPU, CPU index": (
        "auto",
        False,
        None,
        PLAIN | CPU_ON_INDEX,
        "2.13.0+cpu",
        CPU_INDEX,
        False,
    ),
    "no GPU, no CPU build": ("auto", False, None, PLAIN, "2.13.0", None, True),
    "GPU takes the default": ("auto", True, None, PLAIN | CPU_ON_INDEX, "2.13.0", None, False),
    "CPU asked despite GPU": (
        "cpu",
        True,
        None,
        PLAIN | CPU_ON_INDEX,
        "2.13.0+cpu",
        CPU_INDEX,
        False,
    ),
    "default asked": ("default", False, None, PLAIN | CPU_ON_INDEX, "2.13.0", None, False),
}


@pytest.mark.parametrize("row", TORCH_TABLE.values(), ids=TORCH_TABLE.keys())
def test_where_torch_comes_from(row: tuple) -> None:
    choice, gpu, have, answers, version, index, warned = row
    step = install.plan_torch(choice, FakeRunner(answers), have, lambda: gpu)
    assert (step.version, step.index, step.warning is not None) == (version, index, warned)
    assert step.needed is (have is None or not have.startswith("2.13.0"))
    if step.needed:
        # The default build needs its GPU libraries; the CPU build's needs are in the lock file.
        assert ("--no-deps" in step.arguments) is version.endswith("+cpu")


def test_torch_there_asks_no_index() -> None:
    runner = FakeRunner(CPU_CONFIGURED)
    install.plan_torch("auto", runner, "2.13.0+cpu")
    assert runner.asked == []


def test_a_configured_cpu_build_spares_the_probe_of_the_cpu_index() -> None:
    runner = FakeRunner(CPU_CONFIGURED)
    step = install.plan_torch("auto", runner, None, lambda: False)
    install.plan_torchvision(step, runner, None)
    assert runner.asked == [TORCH, VISION]


def test_skip_leaves_torch_alone() -> None:
    runner = FakeRunner(PLAIN)
    step = install.plan_torch("skip", runner, None)
    assert not step.needed
    assert not install.plan_torchvision(step, runner, None).needed
    assert runner.asked == []


@pytest.mark.parametrize(("choice", "answers"), [("cpu", PLAIN), ("default", {}), ("auto", {})])
def test_a_torch_that_cannot_be_had_is_one_line(choice: str, answers: dict) -> None:
    with pytest.raises(InstallError) as caught:
        install.plan_torch(choice, FakeRunner(answers), None, lambda: False)
    assert "\n" not in str(caught.value)


CPU_CONFIGURED_STEP = Step("torch", "2.13.0+cpu", "", ("x",))
CPU_INDEX_STEP = Step("torch", "2.13.0+cpu", "", ("x",), index=CPU_INDEX)
CPU_THERE = Step("torch", "2.13.0+cpu", "")
DEFAULT_STEP = Step("torch", "2.13.0", "", ("x",))
STANDIN = standin.VERSION

# torch step, installed torchvision, does it import, answers -> version, needed, stand-in
VISION_TABLE = {
    "same index as torch": (CPU_INDEX_STEP, None, False, CPU_ON_INDEX, "0.28.0+cpu", True, False),
    "configured index": (
        CPU_CONFIGURED_STEP,
        None,
        False,
        CPU_CONFIGURED,
        "0.28.0+cpu",
        True,
        False,
    ),
    "only PyPI's build": (CPU_CONFIGURED_STEP, None, False, PLAIN, STANDIN, True, True),
    "torch there, CPU index": (
        CPU_THERE,
        None,
        False,
        PLAIN | CPU_ON_INDEX,
        "0.28.0+cpu",
        True,
        False,
    ),
    "torch there, nothing": (CPU_THERE, None, False, {}, STANDIN, True, True),
    "default torch": (DEFAULT_STEP, None, False, PLAIN, "0.28.0", True, False),
    "stand-in is kept": (CPU_THERE, STANDIN, True, CPU_ON_INDEX, STANDIN, False, False),
    "stand-in gives way": (DEFAULT_STEP, STANDIN, False, PLAIN, "0.28.0", True, False),
    "real one that fits": (CPU_THERE, "0.28.0+cpu", False, {}, "0.28.0+cpu", False, False),
    "real one that loads": (CPU_THERE, "0.27.1", True, {}, "0.27.1", False, False),
    "misfit replaced by real": (
        CPU_THERE,
        "0.28.0",
        False,
        CPU_ON_INDEX,
        "0.28.0+cpu",
        True,
        False,
    ),
}


@pytest.mark.parametrize("row", VISION_TABLE.values(), ids=VISION_TABLE.keys())
def test_which_torchvision_goes_with_it(row: tuple) -> None:
    torch, have, loads, answers, version, needed, stand_in = row
    step = install.plan_torchvision(torch, FakeRunner(answers), have, lambda: loads)
    assert (step.version, step.needed, step.standin) == (version, needed, stand_in)


def test_the_standin_never_replaces_a_real_torchvision() -> None:
    with pytest.raises(InstallError, match="pip uninstall torchvision"):
        install.plan_torchvision(CPU_THERE, FakeRunner({}), "0.28.0", lambda: False)


def test_engine_step_lists_what_is_missing_or_different() -> None:
    pins = install.read_pins()
    have = dict(pins) | {"openai": "3.0.0"}
    del have["sglang"]
    step = install.plan_engine("2.13.0+cpu", have.get)
    assert step.arguments == ("--no-deps", "sglang==0.5.20", f"openai=={pins['openai']}")
    assert f"openai 3.0.0 -> {pins['openai']}" in step.text
    assert not install.plan_engine("2.13.0+cpu", pins.get).needed


def test_a_gpu_build_of_torch_keeps_its_own_triton() -> None:
    assert "triton" in install.engine_pins("2.13.0+cpu")
    assert "triton" in install.engine_pins(None)
    assert "triton" not in install.engine_pins("2.13.0")


def test_the_lock_file_is_exact() -> None:
    lines = install.REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", line) for line in pins)
    assert len(install.read_pins()) == len(pins)
    # The engine's own pins, and what the interpreter tests need.
    wanted = {
        "sglang": "0.5.20",
        "transformers": "5.12.1",
        "tokenizers": "0.22.2",
        "openai": "2.6.1",
        "openai-harmony": "0.0.4",
        "xgrammar": "0.2.1",
        "compressed-tensors": "0.18.0",
        "apache-tvm-ffi": "0.1.11",
        "soundfile": "0.13.1",
        "triton": "3.6.0",
        "numpy": "2.3.5",
    }
    assert wanted.items() <= install.read_pins().items()


def test_size_of_a_file_address(tmp_path: Path) -> None:
    wheel = tmp_path / "with space.whl"
    wheel.write_bytes(b"12345")
    assert size_of(wheel.as_uri()) == 5
    assert size_of((tmp_path / "gone").as_uri()) is None
    assert size_of(None) is None


def test_bad_usage_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["install", "--torch", "gpu"])
    assert ended.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


# --- the real pip, offline ---------------------------------------------------------------------


def write_wheel(folder: Path, name: str, version: str) -> None:
    """A wheel that holds nothing but its metadata."""
    stem = name.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{stem}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stand-ins for everything that the installer may ask for, as an index of its own."""
    folder = tmp_path_factory.mktemp("wheels")
    for name, version in install.read_pins().items():
        write_wheel(folder, name, version)
    write_wheel(folder, "torch", "2.13.0+cpu")
    return folder


def offline(wheels: Path) -> dict[str, str]:
    """pip and uv see this folder and nothing else."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))
    }
    return kept | {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "UV_NO_CONFIG": "1",
        "UV_NO_INDEX": "1",
        "UV_FIND_LINKS": str(wheels),
    }


def test_pip_tells_version_and_size_before_a_download(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in offline(wheels).items():
        if name.startswith("PIP_"):
            monkeypatch.setenv(name, value)
    (found,) = PipRunner().resolve(TORCH)
    assert (found.version, found.local) == ("2.13.0+cpu", "cpu")
    (torch,) = wheels.glob("torch-*")
    assert size_of(found.url) == torch.stat().st_size
    assert PipRunner().resolve(VISION) == []


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_install_twice_into_a_fresh_environment(tool: str, wheels: Path, tmp_path: Path) -> None:
    if tool == "uv" and shutil.which("uv") is None:
        pytest.skip("uv is not on PATH: the installer's way without pip was not tested")
    options = ["--without-pip"] if tool == "uv" else []
    subprocess.run([sys.executable, "-m", "venv", *options, tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    # Only this package is lent to the fresh environment, not what is installed beside it.
    source = tmp_path / "source"
    source.mkdir()
    (source / PACKAGE.name).symlink_to(PACKAGE)
    environment = offline(wheels) | {
        "PYTHONPATH": str(source),
        "UV_CACHE_DIR": str(tmp_path / "uv-cache"),
    }

    def command(*arguments: str) -> tuple[int, str, float]:
        begin = time.monotonic()
        done = subprocess.run(
            [python, "-m", "numinous_cpu_platform", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            check=False,
        )
        return done.returncode, done.stdout, time.monotonic() - begin

    code, text, _ = command("doctor")
    assert code == 1, text
    assert "missing  engine" in text

    code, text, _ = command("install", "--torch", "cpu", "--dry-run")
    assert code == 0, text
    assert text.endswith("nothing was changed (--dry-run)\n")
    # uv does not tell where a file would come from.
    assert f"2.13.0+cpu from {wheels if tool == 'pip' else 'the configured index'}" in text

    code, text, installing = command("install", "--torch", "cpu")
    assert code == 0, text
    assert f"torchvision  {standin.VERSION}: no build for this torch" in text

    code, text, seconds = command("install", "--torch", "cpu")
    assert (code, text.splitlines()[-1]) == (0, "nothing to do"), text
    assert seconds < installing / 2, (seconds, installing)

    code, text, _ = command("doctor", "--json")
    report = json.loads(text)
    # The package itself is only on the path here, so its entry point is the one thing missing.
    missing = {row["name"] for row in report["findings"] if row["required"] and not row["ok"]}
    assert missing == {"platform"}, text

    # A stamp would not notice this; the installer reads what is there.
    shutil.rmtree(next((tmp_path / "venv").glob("lib/*/site-packages/orjson-*")))
    code, text, _ = command("install", "--torch", "cpu")
    assert code == 0, text
    assert "1 of 99 packages to install" in text


def test_a_failing_package_tool_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(FakeRunner):
        def install(self, arguments: Sequence[str], *, index: str | None = None) -> None:
            raise InstallError("pip install failed with exit code 1")

    monkeypatch.setattr(install, "find_runner", lambda: Failing(CPU_CONFIGURED))
    monkeypatch.setattr(install, "installed_version", lambda name: None)
    monkeypatch.setattr(install, "has_gpu", lambda: False)
    assert main(["install"]) == 1
    assert capsys.readouterr().err == (
        "numinous_cpu_platform install: pip install failed with exit code 1\n"
    )
