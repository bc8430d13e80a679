# SPDX-License-Identifier: Apache-2.0
"""One small face for pip and uv, so that the installer and the model download need not know which is there.

pip of the running interpreter is used where it exists; a virtual environment made by uv has none, and then `uv` from
PATH acts on the same interpreter. Both keep the user's own configuration (indexes, find-links, proxies).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PROBE_SECONDS = 10  # an index that does not answer within this is treated as not there


class InstallError(RuntimeError):
    """A package step failed; the message is one line: what, where, what to do."""


@dataclass(frozen=True)
class Found:
    """What a requirement resolves to: exact version, and the file's address where the tool tells it."""

    name: str
    version: str
    url: str | None = None

    @property
    def local(self) -> str:
        """The local version label: "cpu" for 2.13.0+cpu, "" for 2.13.0."""
        return self.version.partition("+")[2]


class Runner(Protocol):
    """What the installer asks of a package tool."""

    name: str

    def resolve(
        self, requirement: str, *, index: str | None = None, deps: bool = False
    ) -> list[Found]:
        """The files that installing `requirement` would take; empty when it cannot be had. Downloads no package."""

    def install(self, arguments: Sequence[str], *, index: str | None = None) -> None:
        """Install into the running interpreter's environment; raises `InstallError`."""

    def download(
        self, requirement: str, folder: Path, *, watch: Callable[[], None] | None = None
    ) -> None:
        """Put the requirement's wheel, or its unpacked files, below `folder`; raises `InstallError`."""


class PipRunner:
    """`python -m pip` of the running interpreter."""

    name = "pip"

    def __init__(self) -> None:
        self.command = [sys.executable, "-m", "pip", "--disable-pip-version-check"]

    def resolve(
        self, requirement: str, *, index: str | None = None, deps: bool = False
    ) -> list[Found]:
        # The report goes to a file: pip also prints warnings to stdout.
        with tempfile.TemporaryDirectory(prefix="numinous-pip-") as scratch:
            report = Path(scratch, "report.json")
            command = [*self.command, "install", "--dry-run", "--ignore-installed", "--quiet"]
            command += ["--only-binary=:all:", "--report", str(report)]
            if not deps:
                command.append("--no-deps")
            if index:
                command += ["--index-url", index, "--retries", "0", "--timeout", str(PROBE_SECONDS)]
            done = subprocess.run([*command, requirement], capture_output=True, check=False)
            if done.returncode or not report.is_file():
                return []
            items = json.loads(report.read_text(encoding="utf-8"))["install"]
        return [
            Found(
                item["metadata"]["name"],
                item["metadata"]["version"],
                item.get("download_info", {}).get("url"),
            )
            for item in items
        ]

    def install(self, arguments: Sequence[str], *, index: str | None = None) -> None:
        command = [*self.command, "install", "--only-binary=:all:", *arguments]
        _run(command + (["--index-url", index] if index else []), "pip install")

    def download(
        self, requirement: str, folder: Path, *, watch: Callable[[], None] | None = None
    ) -> None:
        command = [*self.command, "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        _run_watched([*command, "--dest", str(folder), requirement], folder, watch, "pip download")


class UvRunner:
    """`uv pip --python <running interpreter>`."""

    name = "uv"

    def __init__(self, uv: str) -> None:
        self.command = [uv, "pip", "install", "--python", sys.executable]

    def resolve(
        self, requirement: str, *, index: str | None = None, deps: bool = False
    ) -> list[Found]:
        command = [*self.command, "--dry-run", "--reinstall", "--only-binary=:all:"]
        if not deps:
            command.append("--no-deps")
        environment = dict(os.environ)
        if index:
            command += ["--index-url", index]
            environment |= {"UV_HTTP_TIMEOUT": str(PROBE_SECONDS), "UV_HTTP_RETRIES": "0"}
        done = subprocess.run(
            [*command, requirement], capture_output=True, text=True, check=False, env=environment
        )
        if done.returncode:
            return []
        return [
            Found(*line) for line in re.findall(r"^ [+~] (\S+?)==(\S+)", done.stderr, re.MULTILINE)
        ]

    def install(self, arguments: Sequence[str], *, index: str | None = None) -> None:
        command = [*self.command, "--only-binary=:all:", *arguments]
        _run(command + (["--index-url", index] if index else []), "uv pip install")

    def download(
        self, requirement: str, folder: Path, *, watch: Callable[[], None] | None = None
    ) -> None:
        command = [*self.command, "--no-deps", "--only-binary=:all:", "--quiet"]
        target = ["--target", str(folder / "unpacked")]
        _run_watched([*command, *target, requirement], folder, watch, "uv pip install --target")


def find_runner() -> Runner:
    """pip of this interpreter, else uv from PATH; raises `InstallError` when neither is there."""
    if importlib.util.find_spec("pip") is not None:
        return PipRunner()
    if uv := shutil.which("uv"):
        return UvRunner(uv)
    raise InstallError(
        f"no pip in {sys.prefix} and no uv on PATH: run `{sys.executable} -m ensurepip`, or install uv"
    )


def size_of(url: str | None) -> int | None:
    """Bytes of the file at `url` (stat for file://, HTTP HEAD else); None when it cannot be told."""
    if url is None:
        return None
    parts = urllib.parse.urlsplit(url)
    try:
        if parts.scheme == "file":
            return os.stat(urllib.request.url2pathname(parts.path)).st_size
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=PROBE_SECONDS) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, ValueError, TypeError):
        return None


def size_text(total: int | None) -> str:
    """`187 MB`, or `size unknown`."""
    return "size unknown" if total is None else f"{total / 1e6:,.0f} MB"


def _run(command: list[str], what: str) -> None:
    """Run with the tool's own output (and its progress bar) shown."""
    code = subprocess.run(command, check=False).returncode
    if code:
        raise InstallError(
            f"{what} failed with exit code {code} in {sys.prefix}: its last lines above say why; "
            "run the same command again once that is mended"
        )


def _run_watched(
    command: list[str], folder: Path, watch: Callable[[], None] | None, what: str
) -> None:
    """Run quietly with every temporary file below `folder`, calling `watch` several times a second."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process,
    ):
        try:
            while process.poll() is None:
                if watch:
                    watch()
                try:
                    process.wait(0.2)
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:
            process.terminate()
            raise
        if process.returncode:
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
            reason = next((line for line in reversed(lines) if "ERROR" in line.upper()), None)
            raise InstallError(
                f"{what} failed ({(reason or (lines or ['no message'])[-1]).strip()}): "
                "check the network and the package index"
            )
