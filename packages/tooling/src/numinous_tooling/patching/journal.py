# SPDX-License-Identifier: Apache-2.0
"""Make a set of edits and series true on disk, or nothing of it, whatever happens in between.

Beside the engine package lies, while anything is applied, the folder ``.numinous``::

    journal.json   what is applied, which files it changed, and how they were before
    blobs/<sha>    every content that the journal speaks of: pristine, committed, target
    lock           flock of the one command that may write

A transaction writes the blobs, then the journal as *pending*, then the files, verifies them, and then writes the
journal as *committed*. A command that finds a pending journal was preceded by one that died, and puts every file
back to the committed state first. Contents are always computed from the pristine files, so that any feature can be
taken out while others stay.

A file whose content is none of pristine, committed and target belongs to somebody else and is never overwritten. With
the engine version that the journal names, such a file stops every command. With another version the engine was
upgraded, and `DiskState.revert` forgets the file: its new content is the new pristine. ``forget=True`` does the same
for the same version (a rebuilt engine).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from .edits import MARKER
from .engine import DirectoryTree, EngineTree
from .errors import PatchError
from .feature import Edit, Feature, Series
from .pins import forget_parsed, judge_pin
from .proof import declaration_digest, out_of_date, rendered, unproven

STATE = ".numinous"
FORMAT = 1
Item = tuple[str, Edit | Series]

_CHUNK = 1 << 20
_NEW_FILE_MODE = 0o644


@dataclass(frozen=True)
class AppliedItem:
    """One patch on disk."""

    feature_id: str
    patch_id: str
    kind: str  # "edit" or "series"
    digest: str = field(default="", compare=False)  # of the declaration; empty in older journals


@dataclass(frozen=True)
class Report:
    """What one command did.

    Args:
        items: what is applied now.
        written: paths that it changed, created or deleted, relative to the engine package.
        recovered: True if it first had to undo a command that died.
        forgotten: files that were no longer ours, see the module's rule.
    """

    items: tuple[AppliedItem, ...]
    written: tuple[str, ...] = ()
    recovered: bool = False
    forgotten: tuple[str, ...] = ()


@dataclass(frozen=True)
class Status:
    """What the journal says and what the disk says.

    Args:
        items: what is applied, or will be again once a pending transaction is undone.
        files: path -> ``committed``, ``pristine`` (the change is gone, as after a reinstallation), ``pending`` (of a
            command that died) or ``foreign`` (somebody else's content).
        pending: a command died in the middle, or is running now.
        version: the engine version that the items were applied to; None if nothing is applied.
    """

    items: tuple[AppliedItem, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    pending: bool = False
    version: str | None = None

    @property
    def in_place(self) -> bool:
        """True if every file holds exactly what the items ask for."""
        return not self.pending and all(state == "committed" for state in self.files.values())


class Steps:
    """Every change to the disk. Tests stop or fail it before any single call by overriding `before`."""

    def before(self, call: str, path: Path) -> None:
        """Called in front of each system call."""

    def mkdir(self, path: Path) -> None:
        self.before("mkdir", path)
        path.mkdir(exist_ok=True)

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        self.before("open", path)
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)

    def write(self, fd: int, path: Path, data: bytes) -> None:
        left = memoryview(data)
        while left:
            self.before("write", path)
            try:
                left = left[os.write(fd, left[:_CHUNK]) :]
            except OSError as error:
                error.filename = str(path)
                raise

    def set_stat(
        self, fd: int, path: Path, mode: int, mtime_ns: int | None, owner: os.stat_result
    ) -> None:
        self.before("set_stat", path)
        if (owner.st_uid, owner.st_gid) != (os.geteuid(), os.getegid()):
            with contextlib.suppress(PermissionError):  # only root may give files away
                os.fchown(fd, owner.st_uid, owner.st_gid)
        os.fchmod(fd, mode)  # after fchown, which may clear bits
        if mtime_ns is not None:
            os.utime(fd, ns=(time.time_ns(), mtime_ns))

    def fsync(self, fd: int, path: Path) -> None:
        self.before("fsync", path)
        os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        self.before("rename", target)
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        self.before("unlink", path)
        path.unlink(missing_ok=True)

    def rmdir(self, path: Path) -> None:
        self.before("rmdir", path)
        path.rmdir()

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.fsync(fd, path)
        finally:
            os.close(fd)


@dataclass(frozen=True)
class _Pristine:
    """A file before anything was applied; sha None: it did not exist."""

    sha: str | None
    mode: int
    mtime_ns: int


@dataclass(frozen=True)
class _State:
    """A set of items and the contents it asks for, only of files that differ from pristine."""

    items: tuple[AppliedItem, ...] = ()
    files: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class _Journal:
    version: str
    pristine: Mapping[str, _Pristine] = field(default_factory=dict)
    committed: _State = field(default_factory=_State)
    target: _State | None = None  # set while a transaction is pending
    folders: tuple[str, ...] = ()  # made by us, to be removed when empty

    def wanted(self, state: _State, path: str) -> str | None:
        """Sha of a file in a state."""
        return state.files.get(path, self.pristine[path].sha)

    def ours(self, path: str) -> set[str | None]:
        """Every content that the file may have without anybody else having touched it."""
        states = [self.committed, *([self.target] if self.target else [])]
        return {self.pristine[path].sha, *(self.wanted(state, path) for state in states)}

    def narrowed(self, state: _State) -> _Journal:
        """Committed to `state`, without the files that it does not change."""
        pristine = {path: self.pristine[path] for path in state.files}
        folders = tuple(
            folder for folder in self.folders if any(_below(path, folder) for path in state.files)
        )
        return replace(self, pristine=pristine, committed=state, target=None, folders=folders)

    def without(self, paths: Iterable[str]) -> _Journal:
        """Ignorant of some files."""
        gone = set(paths)

        def cut(state: _State) -> _State:
            return replace(
                state, files={path: sha for path, sha in state.files.items() if path not in gone}
            )

        pristine = {path: was for path, was in self.pristine.items() if path not in gone}
        target = cut(self.target) if self.target else None
        return replace(self, pristine=pristine, committed=cut(self.committed), target=target)

    def blobs(self) -> set[str]:
        """Names of the blobs that it needs."""
        states = [self.committed, *([self.target] if self.target else [])]
        shas = [was.sha for was in self.pristine.values()] + [
            sha for state in states for sha in state.files.values()
        ]
        return {sha for sha in shas if sha is not None}


class _PristineTree:
    """The engine as it was before anything was applied."""

    def __init__(
        self, tree: DirectoryTree, journal: _Journal, blob: Callable[[str], bytes]
    ) -> None:
        self.version = tree.version
        self.where = tree.where
        self._tree = tree
        self._journal = journal
        self._blob = blob

    def read(self, path: str) -> bytes:
        was = self._journal.pristine.get(path)
        if was is None:
            content = self._tree.read(path)
            if path.endswith(".py") and MARKER.encode() in content:
                raise PatchError(
                    f"{self.where}/{path} holds an edit that no journal knows; reinstall the engine"
                )
            return content
        if was.sha is None:
            raise FileNotFoundError(path)
        return self._blob(was.sha)

    def files(self, prefix: str = "") -> Iterator[str]:
        return self._tree.files(prefix)


class DiskState:
    """The edits and series on one installed engine.

    Args:
        tree: the engine; only a directory can be changed.
        steps: the layer through which every change goes.
        wait_s: how long to wait for another command that holds the lock.

    Raises:
        PatchError: the engine is a wheel file.
    """

    def __init__(self, tree: EngineTree, steps: Steps | None = None, wait_s: float = 10.0) -> None:
        if not isinstance(tree, DirectoryTree):
            raise PatchError(
                f"{tree.where} is a wheel, which can only be read; install it, or unpack it and name that"
            )
        self._tree = tree
        self._root = tree.root
        self._folder = tree.root.parent / STATE
        self._journal_file = self._folder / "journal.json"
        self._blobs = self._folder / "blobs"
        self._steps = steps or Steps()
        self._wait_s = wait_s

    def applied(self) -> list[AppliedItem]:
        """Items that the journal names. Reads only."""
        journal = self._load()
        return list(journal.committed.items) if journal else []

    def pristine(self) -> EngineTree:
        """The engine as it was before anything was applied. Reads only."""
        journal = self._load() or _Journal(self._tree.version)
        return _PristineTree(self._tree, journal, self._blob)

    def status(self) -> Status:
        """Compare the disk with the journal. Reads only and takes no lock."""
        journal = self._load()
        if journal is None:
            return Status()

        def state_of(path: str) -> str:
            sha = self._sha(path)
            if sha == journal.wanted(journal.committed, path):
                return "committed"
            if sha == journal.pristine[path].sha:
                return "pristine"
            return "pending" if sha in journal.ours(path) else "foreign"

        files = {path: state_of(path) for path in sorted(journal.pristine)}
        return Status(journal.committed.items, files, journal.target is not None, journal.version)

    def out_of_date(self, features: Sequence[Feature]) -> list[str]:
        """Lines on patches that are on disk in another form than `features` declare now. Reads only."""
        found = out_of_date(self.applied(), features)
        return [line for lines in found.values() for line in lines]

    def unproven(self, features: Sequence[Feature]) -> dict[str, str]:
        """Feature id -> why it is not on disk exactly as declared, as one line; empty if all are. Reads only.

        Features that change no file are not judged.
        """
        return unproven(self, self._tree.version, features)

    def apply(self, features: Sequence[Feature], known: Sequence[Feature] = ()) -> Report:
        """Add features to what is applied; one that is applied already is brought up to date.

        The result does not depend on the order in which features were applied: they are rendered in the order of
        `known`, then of `features`.

        Args:
            features: what to add.
            known: declarations of everything that may be applied already.

        Raises:
            PatchError: one does not fit, or see `set`. Nothing is changed.
        """
        for feature in features:
            self._judge_engine(feature)
            if not feature.on_disk:
                raise PatchError(
                    f"{feature.id} changes no file; switch it on with {feature.flag}=1"
                )
        wanted = frozenset(feature.id for feature in features)
        return self._change(lambda applied: _items(applied | wanted, [*known, *features]))

    def revert(
        self,
        feature_ids: Sequence[str] | None = None,
        known: Sequence[Feature] = (),
        forget: bool = False,
    ) -> Report:
        """Take features out; all of them restores the engine byte for byte and leaves no trace.

        Args:
            feature_ids: which; None for all.
            known: declarations of everything that stays.
            forget: give up files that somebody else has changed instead of refusing.

        Raises:
            PatchError: a feature is not applied, or see `set`. Nothing is changed.
        """
        if feature_ids is None:
            return self._change(lambda applied: [], forget=forget, all_out=True)
        gone = frozenset(feature_ids)

        def remaining(applied: frozenset[str]) -> list[Item]:
            if gone - applied:
                raise PatchError(
                    f"{', '.join(sorted(gone - applied))} is not applied; see numinous status"
                )
            return _items(applied - gone, known)

        return self._change(remaining)

    def set(self, items: Sequence[Item]) -> Report:
        """Make exactly these items true, rendered in this order from the pristine files.

        Raises:
            PatchError: a pin, anchor or patch does not fit; a result does not compile; the engine cannot be
                written, is editable, was upgraded since, or a file was changed by somebody else. Nothing is
                changed, or it has been put back.
        """
        return self._change(lambda applied: items, all_out=not items)

    # One command

    def _change(
        self,
        choose: Callable[[frozenset[str]], Sequence[Item]],
        forget: bool = False,
        all_out: bool = False,
    ) -> Report:
        if all_out and not self._folder.is_dir():
            return Report(())
        if not all_out and self._tree.editable:
            raise PatchError(
                f"{self._root} is an editable installation; edit your checkout, or install a wheel"
            )
        try:
            with self._locked():
                journal, recovered, forgotten = self._settled(all_out, forget)
                items = choose(frozenset(item.feature_id for item in journal.committed.items))
                report = self._transact(journal, items)
        except OSError as error:
            raise PatchError(
                f"{error.filename or self._root}: {error.strerror}; mend that and run this again"
            ) from None
        return replace(report, recovered=recovered, forgotten=forgotten)

    def _settled(self, all_out: bool, forget: bool) -> tuple[_Journal, bool, tuple[str, ...]]:
        """The journal after everything is undone that a dead command left, and what had to be given up."""
        journal = self._load()
        if journal is None:
            self._collect(None)
            return _Journal(self._tree.version), False, ()
        upgraded = journal.version != self._tree.version
        if upgraded and not all_out:
            raise PatchError(
                f"sglang is {self._tree.version} and was {journal.version} when {self._folder} was written; "
                "run numinous revert, which forgets what the upgrade replaced"
            )
        foreign = self._foreign(journal)
        if foreign and not (all_out and (upgraded or forget)):
            raise self._refused_foreign(journal, foreign[0])
        journal = journal.without(foreign)
        recovered = journal.target is not None
        if recovered:
            journal = self._settle(journal, journal.committed)
        self._collect(journal)
        return journal, recovered, foreign

    def _transact(self, journal: _Journal, items: Sequence[Item]) -> Report:
        target, contents, pristine = self._render(journal, items)
        pristine = {**journal.pristine, **pristine}
        folders = {*journal.folders, *self._missing_folders(target)}
        pending = replace(journal, pristine=pristine, target=target, folders=tuple(sorted(folders)))
        written = tuple(
            sorted(path for path in pristine if self._sha(path) != pending.wanted(target, path))
        )
        digests = [[item.digest for item in s.items] for s in (target, journal.committed)]
        if not written and target == journal.committed and digests[0] == digests[1]:
            return Report(target.items)
        self._judge_writable(written)
        try:
            self._store(contents)
            self._save(pending)
            self._settle(pending, target)
        except BaseException as error:
            unchanged = self._undone(journal, error)
            if isinstance(error, OSError):
                end = (
                    "nothing was changed"
                    if unchanged
                    else "the change is made but may not survive a power cut"
                )
                raise PatchError(
                    f"{error.filename or self._root}: {error.strerror}; {end}"
                ) from None
            raise
        return Report(target.items, written)

    def _undone(self, before: _Journal, error: BaseException) -> bool:
        """Put back what a failed transaction has done; False if it had been committed already."""
        try:
            journal = self._load()
            if journal is not None and journal.target is not None:
                foreign = self._foreign(journal)
                if foreign:
                    raise self._refused_foreign(journal, foreign[0])
                journal = self._settle(journal, journal.committed)
            self._collect(journal)
        except (OSError, PatchError) as second:
            raise PatchError(
                f"{error or type(error).__name__}; putting the files back failed too ({second}); "
                "mend that and run numinous revert"
            ) from None
        return before.committed == (journal.committed if journal else _State())

    def _settle(self, journal: _Journal, state: _State) -> _Journal:
        """Write every file of the journal as `state` has it, verify, and commit to that."""
        paths = sorted(journal.pristine)
        wrong = [path for path in paths if self._sha(path) != journal.wanted(state, path)]
        for folder in sorted(journal.folders):
            if any(_below(path, folder) for path in wrong):
                self._steps.mkdir(self._root / folder)
        # All contents lie on the disk before the first name changes: a full disk is found out here.
        for path in wrong:
            sha = journal.wanted(state, path)
            if sha is not None:
                self._stage(
                    path, self._blob(sha), journal.pristine[path], sha == journal.pristine[path].sha
                )
        for path in wrong:
            if journal.wanted(state, path) is None:
                self._steps.unlink(self._root / path)
            else:
                self._steps.rename(self._staged(path), self._root / path)
        for path in paths:
            self._discard(self._staged(path))
            # The command that died may have got this far or not; stale bytecode must not survive either way.
            self._drop_bytecode(path)
        for parent in sorted({(self._root / path).parent for path in wrong}):
            self._steps.sync_directory(parent)
        self._remove_folders(journal, state)
        for path in paths:
            if self._sha(path) != journal.wanted(state, path):
                raise PatchError(
                    f"{self._root / path} does not hold what was written to it; is another program at work?"
                )
        committed = journal.narrowed(state)
        self._save(committed)
        # It is done; what cannot be removed now, the next command collects.
        with contextlib.suppress(OSError):
            self._collect(committed)
        return committed

    # Rendering

    def _render(
        self, journal: _Journal, items: Sequence[Item]
    ) -> tuple[_State, dict[str, bytes], dict[str, _Pristine]]:
        """Target state, its blobs, and the pristine state of files that no item has touched so far."""
        view = _PristineTree(self._tree, journal, self._blob)

        def read(path: str) -> bytes:
            self._judge_path(path)
            return view.read(path)

        owners: dict[str, str] = {}
        for owner, patch in items:
            first = owners.setdefault(patch.id, owner)
            if first != owner:
                raise PatchError(f"{first} and {owner} both declare the patch {patch.id}")
        if len(owners) != len(items):
            raise PatchError(f"the same patch is asked for twice: {', '.join(owners)}")
        for _, patch in items:
            for pin in patch.pins:
                line = judge_pin(view, pin)
                if line is not None:
                    raise PatchError(f"{patch.id}: {line}")
        contents = rendered(read, (patch for _, patch in items), view.where)
        forget_parsed()

        blobs: dict[str, bytes] = {}
        files: dict[str, str | None] = {}
        pristine: dict[str, _Pristine] = {}
        for path, content in contents.items():
            try:
                was: bytes | None = view.read(path)
            except (FileNotFoundError, NotADirectoryError):
                was = None
            if content == was:
                continue
            files[path] = None if content is None else _digest(content)
            for known in (content, was):
                if known is not None:
                    blobs[_digest(known)] = known
            if path not in journal.pristine:
                pristine[path] = self._pristine(path, was)
        applied = tuple(
            AppliedItem(feature_id, patch.id, _kind(patch), declaration_digest(patch))
            for feature_id, patch in items
        )
        return _State(applied, files), blobs, pristine

    def _pristine(self, path: str, content: bytes | None) -> _Pristine:
        if content is None:
            return _Pristine(None, _NEW_FILE_MODE, 0)
        found = (self._root / path).stat()
        return _Pristine(_digest(content), stat.S_IMODE(found.st_mode), found.st_mtime_ns)

    def _missing_folders(self, target: _State) -> list[str]:
        parents = {
            str(parent)
            for path, sha in target.files.items()
            if sha
            for parent in PurePosixPath(path).parents
        }
        return [parent for parent in parents if not (self._root / parent).is_dir()]

    # Refusals

    def _judge_engine(self, feature: Feature) -> None:
        name, versions = feature.engine
        if name != self._root.name or self._tree.version not in versions:
            raise PatchError(
                f"{feature.id} fits {name} {' or '.join(versions)}, and this is {self._root.name} {self._tree.version}"
            )

    def _judge_path(self, path: str) -> None:
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts:
            raise PatchError(f"{path!r} is no path inside of the engine package")
        for end in range(len(parts) + 1):
            place = self._root.joinpath(*parts[:end])
            if place.is_symlink():
                raise PatchError(
                    f"{place} is a symbolic link; reinstall the engine with copies (uv: --link-mode=copy)"
                )

    def _judge_writable(self, paths: Sequence[str]) -> None:
        """What can be known without writing; root, for whom permissions say nothing, finds out when staging."""
        for path in paths:
            place = self._root / path
            # The bits, and not only access(): root may write to everything, and was told not to.
            if place.exists() and not (place.stat().st_mode & 0o222 and os.access(place, os.W_OK)):
                raise PatchError(f"{place} is read-only; nothing was changed")
            folder = place.parent
            while not folder.is_dir():
                folder = folder.parent
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PatchError(f"{folder} is read-only for this user; nothing was changed")

    def _foreign(self, journal: _Journal) -> tuple[str, ...]:
        return tuple(
            sorted(path for path in journal.pristine if self._sha(path) not in journal.ours(path))
        )

    def _refused_foreign(self, journal: _Journal, path: str) -> PatchError:
        sha = journal.pristine[path].sha
        kept = f"its pristine copy is {self._blobs / sha}" if sha else "it did not exist before"
        return PatchError(
            f"{self._root / path} was changed by somebody else since numinous changed it ({kept}); put that back "
            "or reinstall the engine and run this again, or give the file up with numinous revert --forget"
        )

    # The folder beside the engine

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fd = self._acquire()
        try:
            yield
        finally:
            try:
                if not self._journal_file.exists():
                    self._remove_state()
            finally:
                os.close(fd)

    def _acquire(self) -> int:
        lock = self._folder / "lock"
        deadline = time.monotonic() + self._wait_s
        while True:
            if not self._folder.is_dir():
                self._steps.mkdir(self._folder)
                self._steps.sync_directory(self._folder.parent)
            try:
                fd = self._steps.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
            except FileNotFoundError:
                continue  # the command before us has just removed the folder
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(fd), lock.stat()):
                        os.truncate(fd, 0)
                        self._steps.write(fd, lock, str(os.getpid()).encode())
                        return fd
            except BlockingIOError:
                if time.monotonic() > deadline:
                    holder = os.pread(fd, 20, 0).decode() or "unknown"
                    os.close(fd)
                    raise PatchError(
                        f"another numinous command (pid {holder}) holds {lock}; wait for it or end it, then run this again"
                    ) from None
                time.sleep(0.05)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _load(self) -> _Journal | None:
        try:
            content = self._journal_file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PatchError(f"{self._journal_file}: {error.strerror}; mend that") from None
        try:
            data = json.loads(content)
            if data["format"] != FORMAT:
                raise PatchError(
                    f"{self._journal_file} has format {data['format']} and this numinous-tooling reads {FORMAT}; "
                    "use the version that wrote it"
                )

            def state(part: Any) -> _State:
                items = tuple(AppliedItem(**item) for item in part["items"])
                if not all(isinstance(word, str) for item in items for word in vars(item).values()):
                    raise ValueError
                if not all(sha is None or isinstance(sha, str) for sha in part["files"].values()):
                    raise ValueError
                return _State(items, part["files"])

            return _Journal(
                data["version"],
                {path: _Pristine(**was) for path, was in data["pristine"].items()},
                state(data["committed"]),
                state(data["target"]) if data["target"] else None,
                tuple(data["folders"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise PatchError(
                f"{self._journal_file} is damaged; reinstall the engine and delete {self._folder}"
            ) from None

    def _save(self, journal: _Journal) -> None:
        """Replace the journal; one that has nothing to say is removed, which is the commit of a full revert."""
        if journal.target is None and not journal.committed.items and not journal.pristine:
            self._steps.unlink(self._journal_file)
        else:
            data = {"format": FORMAT, **asdict(journal)}
            text = json.dumps(data, indent=1, sort_keys=True) + "\n"
            self._write(self._journal_file, text.encode())
        self._steps.sync_directory(self._folder)

    def _store(self, contents: Mapping[str, bytes]) -> None:
        """Blobs, on the disk before the journal names them."""
        if not self._blobs.is_dir():
            self._steps.mkdir(self._blobs)
        for sha, content in contents.items():
            if not (self._blobs / sha).exists():
                self._write(self._blobs / sha, content)
        for folder in (self._blobs, self._folder):
            self._steps.sync_directory(folder)

    def _blob(self, sha: str) -> bytes:
        try:
            content = (self._blobs / sha).read_bytes()
        except FileNotFoundError:
            content = b""
        if _digest(content) != sha:
            raise PatchError(
                f"{self._blobs / sha} is missing or damaged; reinstall the engine, then numinous revert"
            )
        return content

    def _collect(self, journal: _Journal | None) -> None:
        """Remove what a dead or finished command has left in the folder."""
        needed = journal.blobs() if journal else set()
        if self._blobs.is_dir():
            for path in sorted(self._blobs.iterdir()):
                if path.name not in needed:
                    self._steps.unlink(path)
        self._discard(_temporary(self._journal_file))

    def _remove_state(self) -> None:
        self._collect(None)
        if self._blobs.is_dir():
            self._steps.rmdir(self._blobs)
        self._steps.unlink(self._folder / "lock")
        # A command that waits may have made a new lock by now; then the folder is its to remove.
        with contextlib.suppress(OSError):
            self._steps.rmdir(self._folder)

    # Files

    def _write(self, path: Path, data: bytes) -> None:
        """A file of our own: complete under its name, or not there."""
        temporary = _temporary(path)
        fd = self._steps.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            self._steps.write(fd, path, data)
            self._steps.fsync(fd, path)
        finally:
            os.close(fd)
        self._steps.rename(temporary, path)

    def _stage(self, path: str, data: bytes, was: _Pristine, is_pristine: bool) -> None:
        """The new content beside the file. A new inode: the old one may be linked to a package cache."""
        place = self._root / path
        temporary = self._staged(path)
        owner = place.stat() if place.exists() else place.parent.stat()
        fd = self._steps.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            self._steps.write(fd, temporary, data)
            self._steps.set_stat(
                fd, temporary, was.mode, was.mtime_ns if is_pristine else None, owner
            )
            self._steps.fsync(fd, temporary)
        finally:
            os.close(fd)

    def _staged(self, path: str) -> Path:
        place = self._root / path
        return place.with_name(f".{place.name}.numinous")

    def _discard(self, path: Path) -> None:
        if path.exists():
            self._steps.unlink(path)

    def _drop_bytecode(self, path: str) -> None:
        """Python trusts bytecode by the second and size of its source, and both may be those of another content."""
        if not path.endswith(".py"):
            return
        place = self._root / path
        folders = {place.parent / "__pycache__"}
        if sys.pycache_prefix is not None:
            folders.add(Path(importlib.util.cache_from_source(str(place))).parent)
        for folder in sorted(folders):
            for cached in sorted(folder.glob(f"{place.stem}.*.pyc")):
                self._steps.unlink(cached)

    def _remove_folders(self, journal: _Journal, state: _State) -> None:
        """Folders that we made for new files, once there is nothing in them any more."""
        for folder in sorted(journal.folders, reverse=True):
            place = self._root / folder
            if (
                any(_below(path, folder) and sha for path, sha in state.files.items())
                or not place.is_dir()
            ):
                continue
            for empty in (place / "__pycache__", place):
                if empty.is_dir() and not any(empty.iterdir()):
                    self._steps.rmdir(empty)

    def _sha(self, path: str) -> str | None:
        try:
            return _digest((self._root / path).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except IsADirectoryError:
            return "a directory"  # equal to no digest: somebody else's


def _items(feature_ids: frozenset[str], known: Sequence[Feature]) -> list[Item]:
    """The patches on disk of some features, in the order of `known`."""
    features = {feature.id: feature for feature in known}
    missing = feature_ids - features.keys()
    if missing:
        raise PatchError(
            f"{', '.join(sorted(missing))} is applied and no installed package declares it; "
            "install that package again, or revert everything"
        )
    return [
        (feature.id, patch)
        for feature in features.values()
        if feature.id in feature_ids
        for patch in feature.patches
        if isinstance(patch, Edit | Series)
    ]


def _kind(patch: Edit | Series) -> str:
    return "edit" if isinstance(patch, Edit) else "series"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _below(path: str, folder: str) -> bool:
    return path.startswith(folder + "/")


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")
