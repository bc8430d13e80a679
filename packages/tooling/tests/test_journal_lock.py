# SPDX-License-Identifier: Apache-2.0
"""Two commands that change one engine at the same time: one waits or gives up, and nothing interleaves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from numinous_tooling.patching.engine import DirectoryTree
from numinous_tooling.patching.errors import PatchError
from numinous_tooling.patching.feature import Edit, Feature
from numinous_tooling.patching.journal import DiskState, Steps
from numinous_tooling.testing.forked import child, exit_status

FILES = {"srt/a.py": b"a = 1\n", "srt/b.py": b"b = 1\n", "srt/c.py": b"c = 1\n"}


def feature(name: str, *files: str) -> Feature:
    edits = tuple(Edit(f"{name}.{f}", f"srt/{f}.py", f"{f} = 1", f"{f} = 2") for f in files)
    return Feature(name, "A sentence.", edits, {})


ONE = feature("scheduler.one", "a", "b")
TWO = feature("scheduler.two", "b", "c")


@pytest.fixture
def tree(tmp_path: Path) -> DirectoryTree:
    root = tmp_path / "site-packages" / "sglang"
    for path, content in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return DirectoryTree(root, "0.5.20", installed=True)


def snapshot(tree: DirectoryTree) -> dict[str, bytes]:
    return {path: tree.read(path) for path in tree.files()}


def refusal(command: Callable[[], object]) -> str:
    with pytest.raises(PatchError) as caught:
        command()
    return str(caught.value)


def test_second_command_gives_up_and_names_the_first(tree: DirectoryTree) -> None:
    disk = DiskState(tree, wait_s=0.2)
    disk.apply([TWO])
    started, go_on = os.pipe(), os.pipe()

    def hold() -> None:
        with DiskState(tree)._locked():
            os.write(started[1], b"x")
            os.read(go_on[0], 1)

    pid = child(hold)
    try:
        os.read(started[0], 1)
        line = refusal(lambda: disk.apply([ONE], [TWO]))
    finally:
        os.write(go_on[1], b"x")
        status = exit_status(pid)
        for fd in (*started, *go_on):
            os.close(fd)
    assert status == 0
    assert f"another numinous command (pid {pid})" in line
    disk.apply([ONE], [TWO])


def test_lock_that_was_removed_while_it_was_opened_counts_for_nothing(tree: DirectoryTree) -> None:
    """The command before us takes the folder away at its end, with the lock that we are about to hold."""

    class Overtaken(Steps):
        first = True

        def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
            fd = super().open(path, flags, mode)
            if self.first and path.name == "lock":
                self.first = False
                path.unlink()
                path.parent.rmdir()
            return fd

    with DiskState(tree, Overtaken())._locked():
        assert (tree.root.parent / ".numinous/lock").read_text() == str(os.getpid())
    assert not (tree.root.parent / ".numinous").exists()


class Slow(Steps):
    """Leaves other processes time to come in between."""

    def before(self, call: str, path: Path) -> None:
        time.sleep(0.001)


def test_two_commands_do_not_interleave(tree: DirectoryTree) -> None:
    before = snapshot(tree)
    for _ in range(3):
        pids = [
            child(lambda: DiskState(tree, Slow()).apply([ONE], [ONE, TWO])),
            child(lambda: DiskState(tree, Slow()).apply([TWO], [ONE, TWO])),
        ]
        assert [exit_status(pid) for pid in pids] == [0, 0]
        assert len(DiskState(tree).applied()) == 4
        pids = [child(lambda: DiskState(tree, Slow()).revert()) for _ in range(3)]
        assert [exit_status(pid) for pid in pids] == [0, 0, 0]
        assert snapshot(tree) == before
