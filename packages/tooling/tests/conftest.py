# SPDX-License-Identifier: Apache-2.0
"""A small stand-in for the engine package, and a way to run code against it in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from numinous_tooling.patching.engine import DirectoryTree, find_engine
from numinous_tooling.patching.errors import PatchError
from numinous_tooling.testing.engine import serve, tiny_model

__all__ = ["serve", "tiny_model"]

THINGS = '''
"""Every kind of thing a hook may meet."""
import functools

LIMIT = 8


def plain(x, y=1):
    """Adds."""
    return x + y


@functools.lru_cache(maxsize=4)
def cached(x):
    return object()


def logged(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@logged
def decorated(x):
    return x * 2


async def later(x):
    return x + 10


TABLE = {"plain": plain}
ROWS = [plain]


def with_default(x, function=plain):
    return function(x)


class Base:
    def inherited(self, x):
        return ("base", x)


class Box(Base):
    size = 3

    def method(self, x):
        return x + self.size

    @classmethod
    def build(cls, x):
        return (cls.__name__, x)

    @staticmethod
    def pure(x):
        return -x

    @property
    def width(self):
        return self.size * 2

    def uses_super(self, x):
        return super().inherited(x)
'''

USER = """
from sglang.srt.things import plain, plain as renamed


def call(x):
    return plain(x) + renamed(x)
"""


@pytest.fixture
def fake_engine(tmp_path: Path) -> Path:
    """A site-packages folder with a package ``sglang`` 0.5.20 of two small modules."""
    site = tmp_path / "site"
    srt = site / "sglang" / "srt"
    srt.mkdir(parents=True)
    for folder in (site / "sglang", srt):
        (folder / "__init__.py").write_text("")
    (srt / "things.py").write_text(THINGS)
    (srt / "user.py").write_text(USER)
    info = site / "sglang-0.5.20.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.20\n")
    (info / "RECORD").write_text("")
    return site


@pytest.fixture
def run_in(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python code in its own process that sees the given site folder before anything else."""

    def run(
        site: Path, code: str, *, expect: int | None = 0, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("NUMINOUS_", "SGLANG_"))}
        source = Path(__file__).parents[1] / "src"
        # The folder of this process's own packages may hold a real engine: the stand-in goes first.
        clean["PYTHONPATH"] = os.pathsep.join([str(site), str(source)])
        clean["NUMINOUS_STATE_DIR"] = str(tmp_path / "state")
        clean.update(environ)
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
            env=clean,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if expect is not None:
            assert done.returncode == expect, (
                f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
            )
        return done

    return run


@pytest.fixture(scope="session")
def pristine_engine() -> DirectoryTree:
    """SGLang 0.5.20 as released: the installed one, or the unpacked wheel named by NUMINOUS_TEST_ENGINE."""
    try:
        tree = find_engine(os.environ.get("NUMINOUS_TEST_ENGINE"))
    except PatchError as error:
        pytest.skip(f"no engine to judge: {error}")
    if not isinstance(tree, DirectoryTree) or tree.version != "0.5.20":
        pytest.skip(f"want SGLang 0.5.20 as a directory, found {tree.version} at {tree.where}")
    return tree


@pytest.fixture
def engine_copy(pristine_engine: DirectoryTree, tmp_path: Path) -> Path:
    """A writable copy of the parts of the engine that features pin, as an unpacked wheel."""
    site = tmp_path / "copy"
    for part in (
        "srt/managers",
        "srt/entrypoints",
        "srt/arg_groups",
        "srt/utils",
        "srt/server_args.py",
        "srt/models/llama.py",
    ):
        source, target = pristine_engine.root / part, site / "sglang" / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    for folder in ("sglang", "sglang/srt"):
        (site / folder / "__init__.py").touch()
    info = site / "sglang-0.5.20.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.20\n")
    return site
