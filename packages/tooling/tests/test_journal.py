# SPDX-License-Identifier: Apache-2.0
"""Edits and series on disk, as transactions on a small engine tree.

Covered: what apply, revert and set make of the files; every refusal, with nothing written; a process killed, or a
system call that fails, in front of every single step of four transactions; an engine that was
reinstalled or upgraded under the journal.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from numinous_tooling.patching import journal as journal_module
from numinous_tooling.patching import proof as proof_module
from numinous_tooling.patching.engine import DirectoryTree, WheelTree, find_engine
from numinous_tooling.patching.errors import PatchError
from numinous_tooling.patching.feature import Edit, Feature, Hook, Pin, Series
from numinous_tooling.patching.journal import AppliedItem, DiskState, Item, Report, Status, Steps
from numinous_tooling.patching.pins import digest_in, judge_pin, source_digest
from numinous_tooling.patching.series import render_series
from numinous_tooling.testing.forked import child, exit_status

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not on PATH")

FILES = {
    "__init__.py": b"",
    "srt/__init__.py": b"",
    "srt/a.py": b"import os\n\n\ndef f():\n    return 1\n\n\ndef g():\n    return 2\n",
    "srt/b.py": b"x = 1\r\ny = 2\r\nz = 3",
    "srt/c.py": b"c = 1\nd = 2\n",
    "srt/gone.py": b"gone = 1\n",
}
PYC = ("srt/__pycache__/a.cpython-311.pyc", "srt/__pycache__/a.cpython-312.opt-1.pyc")
MTIME_NS = 1_600_000_000_123_456_789

F_PIN = Pin("sglang.srt.a:f", {"stock 0.5.20": source_digest(FILES["srt/a.py"], "f")})
A1 = Edit("scheduler.one.01", "srt/a.py", "    return 1", "    return 10\n", "before", (F_PIN,))
A2 = Edit("scheduler.one.02", "srt/b.py", "y = 2", "y = 20", "after")
B1 = Edit("scheduler.two.01", "srt/a.py", "    return 2", "    return 20\n", "replace")
B2 = Edit("scheduler.two.02", "srt/c.py", "c = 1", "e = 3")

PATCH = """\
Subject: [PATCH] Change, add and delete a file

---
diff --git a/sglang/srt/c.py b/sglang/srt/c.py
--- a/sglang/srt/c.py
+++ b/sglang/srt/c.py
@@ -1,2 +1,2 @@
 c = 1
-d = 2
+d = 20
diff --git a/sglang/srt/gone.py b/sglang/srt/gone.py
deleted file mode 100644
--- a/sglang/srt/gone.py
+++ /dev/null
@@ -1 +0,0 @@
-gone = 1
diff --git a/sglang/srt/new/deep/n.py b/sglang/srt/new/deep/n.py
new file mode 100644
--- /dev/null
+++ b/sglang/srt/new/deep/n.py
@@ -0,0 +1 @@
+n = 1
"""


def feature(feature_id: str, *patches: Edit | Series | Hook) -> Feature:
    return Feature(feature_id, "A sentence.", patches, {"sm90": "run"})


ONE = feature("scheduler.one", A1, A2)
TWO = feature("scheduler.two", B1, B2)


@pytest.fixture
def tree(tmp_path: Path) -> DirectoryTree:
    return build(tmp_path / "site-packages")


@pytest.fixture
def three(tmp_path: Path) -> Feature:
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "0001.patch").write_text(PATCH)
    return feature("upstream.three", Series("upstream.three.01", str(tmp_path / "patches")))


def build(site: Path) -> DirectoryTree:
    root = site / "sglang"
    for path, content in {**FILES, **dict.fromkeys(PYC, b"stale")}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
        os.utime(root / path, ns=(MTIME_NS, MTIME_NS))
    (root / "srt/b.py").chmod(0o640)
    return DirectoryTree(root, "0.5.20", installed=True)


Snapshot = dict[str, tuple[int, bytes | None, int]]


def snapshot(tree: DirectoryTree) -> Snapshot:
    """Everything beside and below the engine: mode, content, mtime. Bytecode is no content of the engine."""
    found: Snapshot = {}
    for path in sorted(tree.root.parent.rglob("*")):
        status = path.lstat()
        name = str(path.relative_to(tree.root.parent))
        if path.is_dir():
            found[name] = (status.st_mode, None, 0)
        elif path.suffix != ".pyc":
            found[name] = (status.st_mode, path.read_bytes(), status.st_mtime_ns)
    return found


def contents(tree: DirectoryTree) -> dict[str, bytes]:
    return {path: tree.read(path) for path in tree.files() if not path.endswith(".pyc")}


def items(*features: Feature) -> list[Item]:
    return [
        (f.id, patch) for f in features for patch in f.patches if isinstance(patch, Edit | Series)
    ]


def applied_bytes(features: list[Feature], folder: Path) -> dict[str, bytes]:
    """What an undisturbed run makes of a fresh engine."""
    fresh = build(folder)
    DiskState(fresh).set(items(*features))
    return contents(fresh)


def refusal(call: Callable[[], Report]) -> str:
    with pytest.raises(PatchError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What the commands do


def test_apply_and_revert(tree: DirectoryTree) -> None:
    before = snapshot(tree)
    disk = DiskState(tree)
    report = disk.apply([ONE])
    assert report.written == ("srt/a.py", "srt/b.py")
    assert (
        disk.applied()
        == list(report.items)
        == [
            AppliedItem("scheduler.one", "scheduler.one.01", "edit"),
            AppliedItem("scheduler.one", "scheduler.one.02", "edit"),
        ]
    )
    assert b"return 10\n    # numinous: scheduler.one.01 end\n    return 1\n" in tree.read(
        "srt/a.py"
    )
    assert tree.read("srt/b.py").endswith(b"y = 20\r\n# numinous: scheduler.one.02 end\r\nz = 3")
    assert stat.S_IMODE((tree.root / "srt/b.py").stat().st_mode) == 0o640
    status = disk.status()
    assert status.in_place
    assert status.files == {"srt/a.py": "committed", "srt/b.py": "committed"}
    assert status.version == "0.5.20"
    assert disk.revert().written == ("srt/a.py", "srt/b.py")
    assert snapshot(tree) == before
    assert disk.status() == Status()
    assert disk.applied() == []


def test_second_apply_and_second_revert_write_nothing(tree: DirectoryTree) -> None:
    disk = DiskState(tree)
    disk.apply([ONE])

    def identities() -> dict[str, tuple[int, int]]:
        files = [
            path for path in tree.root.parent.rglob("*") if path.is_file() and path.name != "lock"
        ]
        return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}

    before = identities()
    assert disk.apply([ONE]).written == ()
    assert disk.set(items(ONE)).written == ()
    assert identities() == before
    disk.revert()
    before = identities()
    assert disk.revert() == Report(())
    assert identities() == before


def test_one_feature_leaves_while_another_stays(tree: DirectoryTree, tmp_path: Path) -> None:
    disk = DiskState(tree)
    disk.apply([ONE])
    disk.apply([TWO], known=[ONE])
    both = contents(tree)
    assert both == applied_bytes([ONE, TWO], tmp_path / "both")
    report = disk.revert(["scheduler.one"], known=[ONE, TWO])
    assert report.written == ("srt/a.py", "srt/b.py")
    assert contents(tree) == applied_bytes([TWO], tmp_path / "two")
    assert [item.feature_id for item in disk.applied()] == ["scheduler.two"] * 2
    assert (tree.root / "srt/b.py").stat().st_mtime_ns == MTIME_NS
    disk.revert(["scheduler.two"])
    assert contents(tree) == FILES
    assert not (tree.root.parent / ".numinous").exists()


def test_result_does_not_depend_on_history(tree: DirectoryTree, tmp_path: Path) -> None:
    disk = DiskState(tree)
    disk.apply([TWO], known=[ONE, TWO])
    disk.apply([ONE], known=[ONE, TWO])
    assert contents(tree) == applied_bytes([ONE, TWO], tmp_path / "both")


def test_changed_declaration_is_brought_up_to_date(tree: DirectoryTree) -> None:
    disk = DiskState(tree)
    disk.apply([ONE])
    newer = feature("scheduler.one", Edit(A1.id, A1.file, A1.anchor, "    return 11\n", "before"))
    assert disk.apply([newer]).written == ("srt/a.py", "srt/b.py")
    assert b"return 11" in tree.read("srt/a.py")
    assert tree.read("srt/b.py") == FILES["srt/b.py"]


@needs_git
def test_series_adds_changes_and_deletes(tree: DirectoryTree, three: Feature) -> None:
    before = snapshot(tree)
    disk = DiskState(tree)
    report = disk.apply([three, TWO])
    assert report.written == ("srt/a.py", "srt/c.py", "srt/gone.py", "srt/new/deep/n.py")
    assert tree.read("srt/new/deep/n.py") == b"n = 1\n"
    assert b"d = 20" in tree.read("srt/c.py")
    assert b"e = 3" in tree.read("srt/c.py")
    assert not (tree.root / "srt/gone.py").exists()
    assert disk.status().in_place
    # As if the new module had been imported.
    (tree.root / "srt/new/deep/__pycache__").mkdir()
    (tree.root / "srt/new/deep/__pycache__/n.cpython-311.pyc").write_bytes(b"")
    disk.revert()
    assert snapshot(tree) == before


@needs_git
def test_folder_with_somebody_elses_file_stays(tree: DirectoryTree, three: Feature) -> None:
    disk = DiskState(tree)
    disk.apply([three])
    (tree.root / "srt/new/theirs.txt").write_text("x")
    disk.revert()
    assert contents(tree) == {**FILES, "srt/new/theirs.txt": b"x"}
    assert not (tree.root / "srt/new/deep").exists()


def test_stale_bytecode_is_removed(
    tree: DirectoryTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = DiskState(tree)
    other = tree.root / "srt/__pycache__/ab.cpython-311.pyc"
    other.write_bytes(b"")
    monkeypatch.setattr("sys.pycache_prefix", str(tmp_path / "cache"))
    prefixed = Path(str(tmp_path / "cache") + str(tree.root / "srt"), "a.cpython-311.pyc")
    prefixed.parent.mkdir(parents=True)
    commands: list[Callable[[], Report]] = [lambda: disk.apply([ONE]), disk.revert]
    for command in commands:
        for path in (*(tree.root / pyc for pyc in PYC), prefixed):
            path.write_bytes(b"stale")
        command()
        assert not any((tree.root / pyc).exists() for pyc in PYC)
        assert not prefixed.exists()
    assert other.exists()


def test_hard_link_to_a_cache_is_not_written_through(tree: DirectoryTree, tmp_path: Path) -> None:
    cache = tmp_path / "cache.py"
    os.link(tree.root / "srt/a.py", cache)
    disk = DiskState(tree)
    disk.apply([ONE])
    assert cache.read_bytes() == FILES["srt/a.py"]
    disk.revert()
    assert cache.read_bytes() == FILES["srt/a.py"]
    assert cache.stat().st_mtime_ns == MTIME_NS


def test_owner_is_kept(tree: DirectoryTree) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(tree.root / "srt/a.py", 12345, 54321)
    disk = DiskState(tree)
    commands: list[Callable[[], Report]] = [lambda: disk.apply([ONE]), disk.revert]
    for command in commands:
        command()
        status = (tree.root / "srt/a.py").stat()
        assert (status.st_uid, status.st_gid) == (12345, 54321)


def test_pins_are_judged_on_the_pristine_file(tree: DirectoryTree) -> None:
    disk = DiskState(tree)
    disk.apply([ONE])
    pinned = Edit("scheduler.two.01", "srt/a.py", "    return 2", "    pass", "before", (F_PIN,))
    disk.apply([feature("scheduler.two", pinned)], known=[ONE])
    assert len(disk.applied()) == 3


def test_real_engine(engine_copy: Path) -> None:
    tree = find_engine(engine_copy)
    assert isinstance(tree, DirectoryTree)
    before = snapshot(tree)
    target = "sglang.srt.managers.schedule_policy:SchedulePolicy.calc_priority"
    pin = Pin(target, {"stock 0.5.20": digest_in(tree, target)})
    anchor = "        if self.policy == CacheAgnosticPolicy.FCFS:"
    real = feature(
        "scheduler.real",
        Edit(
            "scheduler.real.01",
            "srt/managers/schedule_policy.py",
            anchor,
            "        pass",
            "before",
            (pin,),
        ),
    )
    disk = DiskState(tree)
    assert disk.apply([real]).written == ("srt/managers/schedule_policy.py",)
    assert judge_pin(tree, pin) is not None
    assert judge_pin(disk.pristine(), pin) is None
    assert disk.apply([real]).written == ()
    disk.revert()
    assert snapshot(tree) == before


# Refusals


REFUSED: dict[str, tuple[Feature, str]] = {
    "anchor": (
        feature("scheduler.x", A1, Edit("scheduler.x.02", "srt/b.py", "w = 0", "v = 1")),
        "scheduler.x.02",
    ),
    "syntax": (
        feature("scheduler.x", A1, Edit("scheduler.x.02", "srt/b.py", "y = 2", "v =")),
        "does not compile",
    ),
    "no file": (
        feature("scheduler.x", A1, Edit("scheduler.x.02", "srt/n.py", "y = 2", "v = 1")),
        "has no srt/n.py",
    ),
    "pin": (
        feature(
            "scheduler.x",
            Edit(
                "x.1",
                "srt/a.py",
                "    return 1",
                "    0",
                "before",
                (Pin(F_PIN.target, {"s": "0"}),),
            ),
        ),
        "x.1: sglang.srt.a:f differs",
    ),
    "path": (
        feature("scheduler.x", Edit("x.1", "../other.py", "y = 2", "v = 1")),
        "no path inside",
    ),
    "absolute path": (
        feature("scheduler.x", Edit("x.1", "/etc/x.py", "y = 2", "v = 1")),
        "no path inside",
    ),
    "version": (
        Feature("scheduler.x", "S.", (A1,), {}, engine=("sglang", ("0.5.19",))),
        "fits sglang 0.5.19, and this is",
    ),
    "engine": (Feature("scheduler.x", "S.", (A1,), {}, engine=("vllm", ("0.5.20",))), "fits vllm"),
    "no file change": (feature("scheduler.x"), "changes no file"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("applied", [False, True])
def test_refused_feature_writes_nothing(name: str, applied: bool, tree: DirectoryTree) -> None:
    disk = DiskState(tree)
    if applied:
        disk.apply([TWO])
    before = snapshot(tree)
    before.pop(".numinous/lock", None)
    asked, expected = REFUSED[name]
    assert expected in refusal(lambda: disk.apply([asked], known=[TWO]))
    after = snapshot(tree)
    after.pop(".numinous/lock", None)
    assert after == before


def test_patch_asked_for_twice(tree: DirectoryTree) -> None:
    assert "twice" in refusal(lambda: DiskState(tree).set(items(ONE, ONE)))


def test_refusals_name_their_owners(tree: DirectoryTree) -> None:
    thief = feature("scheduler.thief", A1)
    both = "scheduler.one and scheduler.thief both declare the patch scheduler.one.01"
    assert both in refusal(lambda: DiskState(tree).apply([ONE, thief]))
    outside = feature("scheduler.out", Edit("scheduler.out.01", "../x.py", "x", "y"))
    assert refusal(lambda: DiskState(tree).apply([outside])).startswith("scheduler.out.01: ")


def test_revert_of_what_is_not_applied(tree: DirectoryTree) -> None:
    disk = DiskState(tree)
    assert "scheduler.one is not applied" in refusal(lambda: disk.revert(["scheduler.one"]))
    assert not (tree.root.parent / ".numinous").exists()
    disk.apply([ONE, TWO])
    assert "no installed package declares it" in refusal(lambda: disk.revert(["scheduler.one"]))
    assert len(disk.applied()) == 4


def test_wheel_and_editable_engine(tree: DirectoryTree, tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="is a wheel"):
        DiskState(WheelTree(tmp_path / "x.whl", "0.5.20"))
    editable = DirectoryTree(tree.root, "0.5.20", installed=True, editable=True)
    before = snapshot(tree)
    assert "editable" in refusal(lambda: DiskState(editable).apply([ONE]))
    assert snapshot(tree) == before
    assert DiskState(editable).revert() == Report(())


@pytest.mark.parametrize("link", ["srt/a.py", "srt", "."])
def test_symbolic_links_are_refused(link: str, tree: DirectoryTree, tmp_path: Path) -> None:
    place = tree.root / link
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in refusal(lambda: DiskState(tree).apply([ONE]))
    assert not (tree.root.parent / ".numinous").exists()
    assert (tree.root / "srt/a.py").read_bytes() == FILES["srt/a.py"]


def test_read_only_file(tree: DirectoryTree) -> None:
    (tree.root / "srt/b.py").chmod(0o444)
    before = snapshot(tree)
    assert "srt/b.py is read-only" in refusal(lambda: DiskState(tree).apply([ONE]))
    assert snapshot(tree) == before


def test_read_only_folder_by_permission(
    tree: DirectoryTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    monkeypatch.setattr(
        "os.access", lambda path, mode: Path(path) != tree.root / "srt" and access(path, mode)
    )
    before = snapshot(tree)
    assert "sglang/srt is read-only for this user" in refusal(lambda: DiskState(tree).apply([ONE]))
    assert snapshot(tree) == before


class Failing(Steps):
    """Raises at calls that a predicate chooses."""

    def __init__(self, code: int, choose: Callable[[int, str, Path], bool]) -> None:
        self.code, self.choose, self.count = code, choose, 0

    def before(self, call: str, path: Path) -> None:
        self.count += 1
        if self.choose(self.count, call, path):
            raise OSError(self.code, os.strerror(self.code), str(path))


@pytest.mark.parametrize("where", [".numinous", "sglang/srt"])
def test_read_only_file_system(where: str, tree: DirectoryTree) -> None:
    steps = Failing(
        errno.EROFS, lambda _, call, path: call in ("mkdir", "open") and where in str(path)
    )
    before = snapshot(tree)
    line = refusal(lambda: DiskState(tree, steps).apply([ONE]))
    assert "Read-only file system" in line
    assert where in line
    assert snapshot(tree) == before


def test_disk_full_while_blobs_are_written(tree: DirectoryTree) -> None:
    steps = Failing(
        errno.ENOSPC, lambda _, call, path: call == "write" and path.parent.name == "blobs"
    )
    before = snapshot(tree)
    line = refusal(lambda: DiskState(tree, steps).apply([ONE]))
    assert "No space left on device; nothing was changed" in line
    assert snapshot(tree) == before


def test_program_that_writes_at_the_same_time_is_noticed(tree: DirectoryTree) -> None:
    class Meddling(Steps):
        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            if target.name == "b.py":
                target.write_bytes(b"theirs = 1\n")

    line = refusal(lambda: DiskState(tree, Meddling()).apply([ONE]))
    assert "another program" in line
    assert "putting the files back failed too" in line
    assert tree.read("srt/b.py") == b"theirs = 1\n"
    (tree.root / "srt/b.py").write_bytes(FILES["srt/b.py"])
    DiskState(tree).revert()
    assert contents(tree) == FILES


def test_interrupt_puts_everything_back(tree: DirectoryTree) -> None:
    class Interrupted(Steps):
        def before(self, call: str, path: Path) -> None:
            if (
                call == "rename"
                and path.name == "b.py"
                and (tree.root / "srt/b.py").read_bytes() == FILES["srt/b.py"]
            ):
                raise KeyboardInterrupt

    before = snapshot(tree)
    with pytest.raises(KeyboardInterrupt):
        DiskState(tree, Interrupted()).apply([ONE])
    assert snapshot(tree) == before


# Somebody else's files


def test_foreign_file_stops_every_command(tree: DirectoryTree) -> None:
    disk = DiskState(tree)
    disk.apply([ONE])
    theirs = tree.read("srt/a.py") + b"debug = 1\n"
    (tree.root / "srt/a.py").write_bytes(theirs)
    before = snapshot(tree)
    for call in (
        lambda: disk.apply([TWO], [ONE]),
        disk.revert,
        lambda: disk.revert(["scheduler.one"]),
    ):
        line = refusal(call)
        assert f"{tree.root}/srt/a.py was changed by somebody else" in line
        copy = next(word.rstrip(");") for word in line.split() if "/blobs/" in word)
        assert Path(copy).read_bytes() == FILES["srt/a.py"]
    assert disk.status().files["srt/a.py"] == "foreign"
    assert not disk.status().in_place
    assert {k: v for k, v in snapshot(tree).items() if "lock" not in k} == {
        k: v for k, v in before.items() if "lock" not in k
    }
    report = disk.revert(forget=True)
    assert report.forgotten == ("srt/a.py",)
    assert report.written == ("srt/b.py",)
    assert contents(tree) == {**FILES, "srt/a.py": theirs}
    assert not (tree.root.parent / ".numinous").exists()
    assert "no journal knows" in refusal(lambda: disk.apply([ONE]))


def test_reinstalled_engine_of_the_same_version(tree: DirectoryTree, tmp_path: Path) -> None:
    disk = DiskState(tree)
    disk.apply([ONE])
    shutil.rmtree(tree.root)
    build(tree.root.parent)
    assert set(disk.status().files.values()) == {"pristine"}
    assert not disk.status().in_place
    assert disk.apply([ONE]).written == ("srt/a.py", "srt/b.py")
    assert contents(tree) == applied_bytes([ONE], tmp_path / "one")
    shutil.rmtree(tree.root)
    build(tree.root.parent)
    before = {k: v for k, v in snapshot(tree).items() if not k.startswith(".numinous")}
    assert disk.revert().written == ()
    assert snapshot(tree) == before


@needs_git
def test_upgraded_engine(tree: DirectoryTree, three: Feature) -> None:
    DiskState(tree).apply([ONE, three])
    upgrade = {path: content + b"\nnew = 1\n" for path, content in FILES.items()}
    for path, content in upgrade.items():
        (tree.root / path).write_bytes(content)
    disk = DiskState(DirectoryTree(tree.root, "0.5.21", installed=True))
    later = Feature("scheduler.one", "S.", (A2,), {}, engine=("sglang", ("0.5.21",)))
    assert "sglang is 0.5.21 and was 0.5.20" in refusal(lambda: disk.apply([later], [ONE, three]))
    report = disk.revert()
    assert report.forgotten == ("srt/a.py", "srt/b.py", "srt/c.py", "srt/gone.py")
    assert report.written == ("srt/new/deep/n.py",)
    assert contents(tree) == upgrade
    assert not (tree.root.parent / ".numinous").exists()
    assert not (tree.root / "srt/new").exists()
    disk.apply([later])


def test_damaged_journal_and_blob(tree: DirectoryTree) -> None:
    disk = DiskState(tree)
    disk.apply([ONE])
    journal = tree.root.parent / ".numinous/journal.json"
    text = journal.read_text()
    for bad, expected in {
        "{": "is damaged",
        "[]": "is damaged",
        text.replace('"mode"', '"m"'): "is damaged",
        text.replace('"scheduler.one"', "7"): "is damaged",
        text.replace('"format": 1', '"format": 2'): "has format 2",
    }.items():
        journal.write_text(bad)
        assert expected in refusal(disk.revert)
    journal.write_text(text)
    for blob in (tree.root.parent / ".numinous/blobs").iterdir():
        blob.write_bytes(b"")
    assert "missing or damaged" in refusal(disk.revert)


# Proof


def test_unproven_names_what_is_not_in_place(tree: DirectoryTree) -> None:
    disk = DiskState(tree)
    hook = feature("scheduler.memory")
    assert disk.unproven([hook]) == {}
    assert "not in place (scheduler.one.01, scheduler.one.02)" in disk.unproven([ONE])[ONE.id]
    disk.apply([ONE, TWO])
    assert disk.unproven([ONE, TWO, hook]) == {}
    assert disk.out_of_date([ONE, TWO]) == []
    (tree.root / "srt/c.py").write_bytes(b"theirs = 1\n")
    assert list(disk.unproven([ONE, TWO])) == [TWO.id]
    assert "numinous revert --forget" in disk.unproven([TWO])[TWO.id]
    upgraded = DirectoryTree(tree.root, "0.5.21", installed=True)
    assert "made to sglang 0.5.20" in DiskState(upgraded).unproven([ONE])[ONE.id]
    (tree.root.parent / ".numinous/journal.json").write_text("{")
    assert "is damaged" in disk.unproven([ONE])[ONE.id]


def test_changed_declaration_is_out_of_date(tree: DirectoryTree, three: Feature) -> None:
    disk = DiskState(tree)
    disk.apply([ONE, three])
    assert disk.unproven([ONE, three]) == {}
    newer = feature(ONE.id, replace(A1, insert="    return 11\n"), A2)
    line = "scheduler.one.01 on disk is an older text; run: numinous apply scheduler.one"
    assert disk.out_of_date([newer, three]) == [line]
    assert disk.unproven([newer, three]) == {ONE.id: line}
    assert "no longer declared" in disk.unproven([feature(ONE.id, A1)])[ONE.id]
    patch = next(Path(three.patches[0].directory).iterdir())
    patch.write_text(patch.read_text() + "\n")
    assert list(disk.unproven([ONE, three])) == [three.id]
    disk.apply([newer, three])
    assert disk.unproven([newer, three]) == {}


def test_journal_without_digests_is_brought_up_to_date(tree: DirectoryTree) -> None:
    disk = DiskState(tree)
    disk.apply([ONE])
    journal = tree.root.parent / ".numinous/journal.json"
    data = json.loads(journal.read_text())
    for item in data["committed"]["items"]:
        del item["digest"]
    journal.write_text(json.dumps(data))
    assert "older numinous-tooling" in disk.unproven([ONE])[ONE.id]
    assert disk.apply([ONE]).written == ()
    assert disk.unproven([ONE]) == {}


# Death and failure at every step


class Dying(Steps):
    """Kills its own process in front of the n-th system call."""

    def __init__(self, n: int) -> None:
        self.left = n

    def before(self, call: str, path: Path) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that the kernel has, so nothing waits for the disk; and git, which is not on
    trial here, is asked once per series: in these tests a series always comes first and sees pristine files."""
    monkeypatch.setattr("os.fsync", lambda fd: None)
    rendered: dict[str, dict[str, bytes | None]] = {}

    def render_once(read: Callable[[str], bytes], series: Series) -> dict[str, bytes | None]:
        if series.id not in rendered:
            rendered[series.id] = render_series(read, series)
        return rendered[series.id]

    monkeypatch.setattr(proof_module, "render_series", render_once)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: these tests write some hundred thousand files."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path / "many"
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="numinous-test-") as folder:
        yield Path(folder)


@pytest.fixture
def scenarios(three: Feature) -> dict[str, tuple[list[Feature], list[Feature]]]:
    return {
        "apply": ([], [ONE]),
        "revert": ([ONE, three], []),
        "change": ([ONE], [three, TWO]),
        "change back": ([three, TWO], [ONE]),
    }


def fresh(site: Path, start: list[Feature]) -> DirectoryTree:
    shutil.rmtree(site, ignore_errors=True)
    tree = build(site)
    DiskState(tree).set(items(*start))
    for pyc in PYC:
        (tree.root / pyc).write_bytes(b"stale")
    return tree


def killed_at(step: int, tree: DirectoryTree, goal: list[Feature]) -> bool:
    """Run `set` in a process that dies in front of a step; False if it came to its end before."""
    code = exit_status(child(lambda: DiskState(tree, Dying(step)).set(items(*goal))))
    assert code in (0, -signal.SIGKILL)
    return code != 0


def pristine_snapshot(tmp_path: Path) -> Snapshot:
    return snapshot(build(tmp_path / "never"))


Scenarios = Mapping[str, tuple[list[Feature], list[Feature]]]


@needs_git
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["apply", "revert", "change", "change back"])
def test_kill_at_every_step(name: str, scenarios: Scenarios, site: Path, tmp_path: Path) -> None:
    start, goal = scenarios[name]
    pristine = pristine_snapshot(tmp_path)
    wanted = applied_bytes(goal, tmp_path / "wanted")
    deaths = 0
    for step in range(1, 1000):
        tree = fresh(site / "one", start)
        if not killed_at(step, tree, goal):
            break
        deaths += 1
        # Once with the command given again, and once, on a copy, with everything taken out.
        copy = DirectoryTree(site / "two" / "sglang", "0.5.20")
        shutil.rmtree(copy.root.parent, ignore_errors=True)
        shutil.copytree(site / "one", copy.root.parent)
        DiskState(tree).set(items(*goal))
        assert contents(tree) == wanted, step
        assert not any((tree.root / pyc).exists() for pyc in PYC), step
        assert DiskState(tree).status().in_place, step
        assert not DiskState(tree).status().pending, step
        left = {path.name for path in (site / "one" / ".numinous").rglob("*")} if goal else set()
        assert not any(name.endswith(".tmp") for name in left), step
        DiskState(copy).revert()
        assert snapshot(copy) == pristine, step
    else:
        pytest.fail("the command never came to its end")
    assert deaths > 40
    print(f"{name}: {deaths} steps, killed in front of each")


@needs_git
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["apply", "revert", "change", "change back"])
@pytest.mark.parametrize("lasting", [False, True])
def test_failure_at_every_step(
    name: str, lasting: bool, scenarios: Scenarios, site: Path, tmp_path: Path
) -> None:
    """One call that fails, or a disk that is full from some call on."""
    start, goal = scenarios[name]
    pristine = pristine_snapshot(tmp_path)
    wanted, stock = (
        applied_bytes(goal, tmp_path / "wanted"),
        applied_bytes(start, tmp_path / "start"),
    )

    def choose(step: int) -> Callable[[int, str, Path], bool]:
        if lasting:
            return lambda count, call, _: count >= step and call in ("open", "write", "mkdir")
        return lambda count, call, _: count == step

    for step in range(1, 1000):
        tree = fresh(site / "one", start)
        steps = Failing(errno.ENOSPC, choose(step))
        try:
            DiskState(tree, steps).set(items(*goal))
        except PatchError as error:
            line = str(error)
            assert "No space left" in line
            assert "\n" not in line
            if "nothing was changed" in line:
                assert contents(tree) == stock, step
                assert DiskState(tree).status().in_place
        else:
            assert contents(tree) == wanted, step
            if steps.count < step:
                break
        DiskState(tree).revert()
        assert snapshot(tree) == pristine, step
    else:
        pytest.fail("the command never came to its end")
    assert step > 40


@needs_git
@pytest.mark.usefixtures("quick")
def test_file_changed_after_a_kill_is_not_touched(scenarios: Scenarios, site: Path) -> None:
    start, goal = scenarios["change"]
    tree = fresh(site / "one", start)
    step = 0
    while not DiskState(tree).status().pending:
        step += 1
        assert step < 1000
        tree = fresh(site / "one", start)
        assert killed_at(step, tree, goal)
    (tree.root / "srt/a.py").write_bytes(b"theirs = 1\n")
    status = DiskState(tree).status()
    assert status.pending
    assert status.files["srt/a.py"] == "foreign"
    before = snapshot(tree)
    for call in (DiskState(tree).revert, lambda: DiskState(tree).set(items(*goal))):
        assert "srt/a.py was changed by somebody else" in refusal(call)
    assert {k: v[1] for k, v in snapshot(tree).items() if "lock" not in k} == {
        k: v[1] for k, v in before.items() if "lock" not in k
    }
    assert DiskState(tree).revert(forget=True).recovered
    assert contents(tree) == {**FILES, "srt/a.py": b"theirs = 1\n"}


def test_steps_are_the_only_way_to_the_disk() -> None:
    """A change that bypassed `Steps` would not be covered by the tests above."""
    source = Path(journal_module.__file__).read_text()
    head, _, rest = source.partition("class Steps:")
    outside = head + rest.partition("\n\n\n")[2]
    for call in (
        "write_bytes(",
        "write_text(",
        ".touch(",
        "os.write(",
        "os.replace(",
        "os.rename(",
        "os.utime(",
    ):
        assert call not in outside, call
    for call in (".unlink(", ".mkdir(", ".rmdir("):
        assert outside.count(call) == outside.count("self._steps" + call), call
