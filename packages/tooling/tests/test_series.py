# SPDX-License-Identifier: Apache-2.0
"""Patch series, made by the real git and rendered from bytes.

Covered: order, all or nothing, new / deleted / renamed / binary files, CRLF, isolation from the user's git, and
each refusal. The patches come from a scratch repository, as a maintainer would make them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from numinous_tooling.patching.errors import PatchError
from numinous_tooling.patching.feature import Series
from numinous_tooling.patching.series import patch_files, patch_header, render_series

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not on PATH")

FILES = {
    "srt/a.py": b"import os\n\n\ndef f():\n    return 1\n\n\ndef g():\n    return 2\n",
    "srt/crlf.py": b"x = 1\r\ny = 2\r\nz = 3\r\n",
    "srt/no_newline.py": b"x = 1\ny = 2",
    "srt/old.py": b"".join(b"line%d = %d\n" % (i, i) for i in range(20)),
    "srt/data.bin": bytes(range(256)),
    "srt/configs/m.json": b'{\n  "a": 1\n}\n',
}


def read(path: str) -> bytes:
    try:
        return FILES[path]
    except KeyError:
        raise FileNotFoundError(path) from None


class Repo:
    """A scratch repository whose commits become the series."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.package = root / "sglang"
        self.environment = {**os.environ, "HOME": str(root), "GIT_CONFIG_NOSYSTEM": "1"}
        for path, content in FILES.items():
            (self.package / path).parent.mkdir(parents=True, exist_ok=True)
            (self.package / path).write_bytes(content)
        self.git("init", "-q")
        self.git("config", "core.autocrlf", "false")
        self.commit("base")

    def git(self, *words: str) -> bytes:
        who = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
        command = ["git", *who, *words]
        return subprocess.run(
            command, cwd=self.root, env=self.environment, check=True, capture_output=True
        ).stdout

    def commit(self, message: str) -> None:
        self.git("add", "-A", "-f")
        self.git("commit", "-q", "--allow-empty", "-m", message)

    def sub(self, path: str, old: bytes, new: bytes) -> None:
        file = self.package / path
        assert old in file.read_bytes()
        file.write_bytes(file.read_bytes().replace(old, new, 1))

    def series(self, folder: Path, *options: str) -> Series:
        folder.mkdir()
        self.git("format-patch", "-q", "-o", str(folder), *options, "--root", "HEAD")
        (folder / "0001-base.patch").unlink()
        return Series("upstream.x.01", str(folder))


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    root = tmp_path / "repo"
    root.mkdir()
    return Repo(root)


def refusal(series: Series, source: Callable[[str], bytes] = read) -> str:
    with pytest.raises(PatchError) as caught:
        render_series(source, series)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("upstream.x.01: ")
    return line


def test_patches_apply_in_order(repo: Repo, tmp_path: Path) -> None:
    repo.sub("srt/a.py", b"return 1", b"return 10")
    repo.commit("one")
    repo.sub("srt/a.py", b"return 10", b"return 100")
    repo.sub("srt/configs/m.json", b"1", b"2")
    repo.commit("two")
    result = render_series(read, repo.series(tmp_path / "s"))
    assert result == {
        "srt/a.py": FILES["srt/a.py"].replace(b"return 1", b"return 100"),
        "srt/configs/m.json": b'{\n  "a": 2\n}\n',
    }


def test_new_deleted_renamed_and_binary(repo: Repo, tmp_path: Path) -> None:
    (repo.package / "srt/new").mkdir()
    (repo.package / "srt/new/n.py").write_bytes(b"n = 1\n")
    (repo.package / "srt/configs/m.json").unlink()
    (repo.package / "srt/old.py").rename(repo.package / "srt/renamed.py")
    repo.sub("srt/renamed.py", b"line3 = 3", b"line3 = 4")
    (repo.package / "srt/data.bin").write_bytes(bytes(range(255, -1, -1)))
    repo.commit("all kinds")
    series = repo.series(tmp_path / "s", "--binary")
    text = b"".join(file.read_bytes() for file in patch_files(series))
    assert b"rename from" in text
    assert b"GIT binary patch" in text
    assert render_series(read, series) == {
        "srt/new/n.py": b"n = 1\n",
        "srt/configs/m.json": None,
        "srt/old.py": None,
        "srt/renamed.py": FILES["srt/old.py"].replace(b"line3 = 3", b"line3 = 4"),
        "srt/data.bin": bytes(range(255, -1, -1)),
    }


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("srt/crlf.py", b"y = 2\r\n", b"y = 2\r\nw = 4\r\n"),
        ("srt/crlf.py", b"y = 2\r\n", b"y = 2\n"),
        ("srt/no_newline.py", b"y = 2", b"y = 3"),
        ("srt/no_newline.py", b"y = 2", b"y = 2\n"),
        ("srt/a.py", b"import os\n", b"import os   \n"),
    ],
)
def test_bytes_of_lines_survive(
    repo: Repo, tmp_path: Path, path: str, old: bytes, new: bytes
) -> None:
    repo.sub(path, old, new)
    repo.commit("bytes")
    assert render_series(read, repo.series(tmp_path / "s")) == {path: FILES[path].replace(old, new)}


def test_line_ends_of_the_context_count(repo: Repo, tmp_path: Path) -> None:
    repo.sub("srt/crlf.py", b"y = 2", b"y = 3")
    repo.commit("crlf")
    series = repo.series(tmp_path / "s")
    assert "does not apply" in refusal(series, lambda path: read(path).replace(b"\r\n", b"\n"))


def test_user_configuration_and_enclosing_repository_do_not_matter(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo.sub("srt/a.py", b"return 1", b"return 10")
    repo.sub("srt/crlf.py", b"y = 2", b"y = 3")
    repo.commit("one")
    series = repo.series(tmp_path / "s")
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(
        "[core]\n autocrlf = true\n[apply]\n whitespace = error\n ignoreWhitespace = change\n"
    )
    temporary = repo.root / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    monkeypatch.setenv("GIT_DIR", str(repo.root / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(repo.root))
    monkeypatch.setenv("GIT_INDEX_FILE", str(repo.root / ".git" / "index"))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    result = render_series(read, series)
    assert result == {
        "srt/a.py": FILES["srt/a.py"].replace(b"return 1", b"return 10"),
        "srt/crlf.py": FILES["srt/crlf.py"].replace(b"y = 2", b"y = 3"),
    }
    assert list(temporary.iterdir()) == []


def test_context_must_match_without_fuzz(repo: Repo, tmp_path: Path) -> None:
    repo.sub("srt/a.py", b"return 2", b"return 20")
    repo.commit("one")
    series = repo.series(tmp_path / "s")
    line = refusal(series, lambda path: read(path).replace(b"def g", b"def h"))
    assert "0002-one.patch does not apply: patch failed: sglang/srt/a.py" in line


def test_second_patch_that_fails_fails_all(repo: Repo, tmp_path: Path) -> None:
    repo.sub("srt/a.py", b"return 1", b"return 10")
    repo.commit("one")
    repo.sub("srt/crlf.py", b"z = 3", b"z = 4")
    repo.commit("two")
    series = repo.series(tmp_path / "s")
    assert "0003-two.patch" in refusal(series, lambda path: read(path).replace(b"z = 3", b"z = 5"))


def test_missing_and_existing_files(repo: Repo, tmp_path: Path) -> None:
    (repo.package / "srt/n.py").write_bytes(b"n = 1\n")
    repo.sub("srt/a.py", b"return 1", b"return 10")
    repo.commit("one")
    series = repo.series(tmp_path / "s")
    assert "already exists" in refusal(
        series, lambda path: b"n = 2\n" if path == "srt/n.py" else read(path)
    )

    def without_a(path: str) -> bytes:
        if path == "srt/a.py":
            raise FileNotFoundError(path)
        return read(path)

    assert "srt/a.py: No such file" in refusal(series, without_a)


def test_result_must_compile(repo: Repo, tmp_path: Path) -> None:
    repo.sub("srt/a.py", b"return 1", b"return (")
    repo.commit("broken")
    assert "srt/a.py: the result does not compile" in refusal(repo.series(tmp_path / "s"))


def test_mode_changes_links_and_programs_are_refused(repo: Repo, tmp_path: Path) -> None:
    (repo.package / "srt/a.py").chmod(0o755)
    repo.commit("mode")
    assert "file's mode" in refusal(repo.series(tmp_path / "mode"))
    repo.git("reset", "-q", "--hard", "HEAD~1")
    (repo.package / "srt/link.py").symlink_to("a.py")
    repo.commit("link")
    assert "link or a submodule" in refusal(repo.series(tmp_path / "link"))
    repo.git("reset", "-q", "--hard", "HEAD~1")
    (repo.package / "srt/run.py").write_text("x = 1\n")
    (repo.package / "srt/run.py").chmod(0o755)
    repo.commit("program")
    assert "executable" in refusal(repo.series(tmp_path / "program"))


def test_message_and_removed_dashes_are_not_paths(repo: Repo, tmp_path: Path) -> None:
    (repo.package / "srt/a.py").write_bytes(b'x = """\n-- /etc/passwd\n"""\n')
    repo.commit("dashes")
    repo.sub("srt/a.py", b"-- /etc/passwd\n", b"++ /etc/group\n")
    repo.commit("title\n\nnew mode for users\n--- not a path\n")
    result = render_series(read, repo.series(tmp_path / "s"))
    assert result == {"srt/a.py": b'x = """\n++ /etc/group\n"""\n'}


BODY = "@@ -0,0 +1 @@\n+x = 1\n"
OUTSIDE = {
    "beside the package": "diff --git a/torch/x.py b/torch/x.py\nnew file mode 100644\n--- /dev/null\n+++ b/torch/x.py\n",
    "dots": "diff --git a/sglang/../x.py b/sglang/../x.py\nnew file mode 100644\n--- /dev/null\n+++ b/sglang/../x.py\n",
    "absolute": "--- /dev/null\n+++ /tmp/x.py\n",
    "no prefix": "diff --git sglang/x.py sglang/x.py\nnew file mode 100644\n--- /dev/null\n+++ sglang/x.py\n",
    "package itself": "diff --git a/sglang b/sglang\nnew file mode 100644\n--- /dev/null\n+++ b/sglang\n",
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_path_outside_of_the_package_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "1.patch").write_text(OUTSIDE[name] + BODY)
    assert "which is not of the form a/sglang/<path>" in refusal(
        Series("upstream.x.01", str(tmp_path))
    )


def test_path_that_only_git_sees_is_refused(tmp_path: Path) -> None:
    good = "diff --git a/sglang/x.py b/sglang/x.py\nnew file mode 100644\n--- /dev/null\n+++ b/sglang/x.py\n"
    (tmp_path / "1.patch").write_text(good + BODY + "--- /dev/null\n+++ sglang/y.py\n" + BODY)
    assert "no plain file below sglang/" in refusal(Series("upstream.x.01", str(tmp_path)))


def test_patches_that_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "1.patch").write_text("just words\n")
    assert "holds no diff" in refusal(Series("upstream.x.01", str(tmp_path)))
    (tmp_path / "1.patch").write_text("diff --git a/sglang/a b.py b/sglang/a b.py\n")
    assert "names with blanks" in refusal(Series("upstream.x.01", str(tmp_path)))


def test_series_file_gives_the_order(tmp_path: Path) -> None:
    for name in ("a.patch", "b.patch"):
        (tmp_path / name).write_text("")
    series = Series("upstream.x.01", str(tmp_path))
    assert [file.name for file in patch_files(series)] == ["a.patch", "b.patch"]
    (tmp_path / "series").write_text("# order\n\nb.patch\na.patch\n")
    assert [file.name for file in patch_files(series)] == ["b.patch", "a.patch"]
    (tmp_path / "series").write_text("c.patch\n")
    assert "c.patch is listed" in refusal(series)


def test_folder_is_found_in_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_topic_pkg"
    (package / "patches").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "catalog.py").write_text("raise SystemExit\n")
    (package / "patches" / "1.patch").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        for directory in ("some_topic_pkg:patches", "some_topic_pkg.catalog:patches"):
            assert patch_files(Series("s", directory)) == [package / "patches" / "1.patch"]
        assert "no folder" in refusal(Series("upstream.x.01", "some_topic_pkg:nothing"))
    finally:
        sys.modules.pop("some_topic_pkg", None)
    assert "no module" in refusal(Series("upstream.x.01", "some_missing_pkg:patches"))
    assert "no module" in refusal(Series("upstream.x.01", "some_missing_pkg.deeper:patches"))
    assert "neither absolute nor" in refusal(Series("upstream.x.01", "patches"))
    (package / "empty").mkdir()
    assert "holds no *.patch" in refusal(Series("upstream.x.01", str(package / "empty")))


def test_git_that_is_missing_is_one_line(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo.sub("srt/a.py", b"return 1", b"return 10")
    repo.commit("one")
    series = repo.series(tmp_path / "s")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert "git is not on PATH" in refusal(series)


def test_dep3_fields_are_read_from_the_header() -> None:
    patch = b"""\
From 0123456789012345678901234567890123456789 Mon Sep 17 00:00:00 2001
From: A <a@b.c>
Subject: [PATCH] Fix the count
 of tokens

Free text: not a field.

Description: The count is
 off by one.
Bug: https://example.org/1
Bug-Debian: https://example.org/2
Forwarded: no
Applied-Upstream: abc, v1
Last-Update: 2026-01-02
---
 sglang/srt/a.py | 2 +-

Origin: too late
diff --git a/sglang/srt/a.py b/sglang/srt/a.py
"""
    assert patch_header(patch) == {
        "from": "A <a@b.c>",
        "subject": "[PATCH] Fix the count of tokens",
        "description": "The count is off by one.",
        "bug": "https://example.org/1",
        "bug_debian": "https://example.org/2",
        "forwarded": "no",
        "applied_upstream": "abc, v1",
        "last_update": "2026-01-02",
    }
