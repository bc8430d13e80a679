# SPDX-License-Identifier: Apache-2.0
"""Caches of compiled kernels: where they are, how large, and which part no installed version made.

From 0.5.20 on the engine points Triton, Inductor, the CUDA driver and FlashInfer below ``SGLANG_CACHE_DIR`` unless
their own variables are set (srt/environ.py, `third_party_cache_defaults`). The older places are *legacy*: this engine
no longer reads them, other programs may.

**Stale**, by kind of cache:

- *folders by version* (FlashInfer's kernels ``<version>/<architectures>``, the engine's FlashInfer autotuner): a folder
  named after a version other than the installed flashinfer-python, and, for the kernels, a folder named after
  architectures alone (``90a``, ``80_90``), the layout before 0.4. Local parts (``+cu130``) do not count.
- *by age* (Triton, Inductor, DeepGEMM): a file last written before the distribution that makes it was installed
  (Triton for Triton; the younger of torch and Triton for Inductor; sgl-deep-gemm for DeepGEMM). The time of
  installation is the newest among ``INSTALLER``, ``RECORD`` and ``METADATA`` of the distribution.
  Reinstalling the same version makes good files stale too; deleting those costs one compilation.
- *not decided*: keyed by hashes that only the maker can compute, or the maker is not installed.

A stale file is never wrong, since all of these caches key by version or content: it only takes room.
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import Distribution
from pathlib import Path

from .findings import Finding, finding
from .installation import Packages
from .requirements import normalised, parse_version

FILE_LIMIT = 200_000
"""Files looked at over all caches; sizes past it are lower bounds and are reported as such."""


@dataclass(frozen=True)
class Place:
    """A folder and how to judge what lies in it.

    Args:
        name: what compiles into it.
        path: the folder.
        makers: distributions that make its entries; empty if staleness cannot be decided from outside.
        by_version: entries are folders named after the maker's version.
        legacy: this engine no longer uses it.
    """

    name: str
    path: Path
    makers: tuple[str, ...] = ()
    by_version: bool = False
    legacy: bool = False


@dataclass
class Cache:
    """What was found in a place."""

    name: str
    path: str
    legacy: bool
    files: int = 0
    bytes: int = 0
    newest: str | None = None
    stale_files: int = 0
    stale_bytes: int = 0
    stale_folders: list[str] = field(default_factory=list)
    rule: str = "not decided"
    complete: bool = True


def places(environ: Mapping[str, str]) -> list[Place]:
    """Every cache folder of the engine under these variables, each path once."""
    home = Path(environ.get("HOME") or Path.home())

    def at(variable: str, default: Path) -> Path:
        value = environ.get(variable)
        return Path(re.sub(r"^~(?=/|$)", lambda _: str(home), value)) if value else default

    base = at("SGLANG_CACHE_DIR", home / ".cache/sglang")
    inductor_makers = ("torch", "triton")
    temporary = Path(environ.get("TMPDIR") or "/tmp")
    everything = [
        Place("triton", at("TRITON_CACHE_DIR", base / "triton"), ("triton",)),
        Place("inductor", at("TORCHINDUCTOR_CACHE_DIR", base / "inductor"), inductor_makers),
        Place(
            "flashinfer kernels",
            at("FLASHINFER_WORKSPACE_BASE", base) / ".cache/flashinfer",
            ("flashinfer-python",),
            by_version=True,
        ),
        Place(
            "flashinfer autotuner",
            base / "flashinfer/autotune",
            ("flashinfer-python",),
            by_version=True,
        ),
        Place("deep_gemm", at("SGLANG_DG_CACHE_DIR", base / "deep_gemm"), ("sgl-deep-gemm",)),
        Place("cute_aot", at("SGLANG_CUTE_AOT_CACHE_DIR", base / "cute_aot")),
        Place("jit", at("SGLANG_JIT_CACHE_DIR", home / ".cache/sglang/jit")),
        Place("cuda driver", at("CUDA_CACHE_PATH", base / "nv")),
        Place("rust_extensions", base / "rust_extensions"),
        Place("triton", home / ".triton", ("triton",), legacy=True),
        Place(
            "flashinfer kernels",
            home / ".cache/flashinfer",
            ("flashinfer-python",),
            by_version=True,
            legacy=True,
        ),
        Place("deep_gemm", home / ".cache/deep_gemm", ("sgl-deep-gemm",), legacy=True),
        Place(
            "inductor", temporary / f"torchinductor_{_user(environ)}", inductor_makers, legacy=True
        ),
    ]
    first: dict[Path, Place] = {}
    for place in everything:
        first.setdefault(place.path.absolute(), place)
    return list(first.values())


def examine(place: Place, packages: Packages, limit: int = FILE_LIMIT) -> Cache:
    """Size and judge one folder, looking at no more than `limit` files."""
    cache = Cache(place.name, str(place.path), place.legacy)
    judge: Callable[[str, float], bool] = lambda top, written: False
    made = [packages.found[name] for name in place.makers if name in packages.found]
    if place.by_version and made:
        versions = {_public(distribution.version) for distribution in made}
        cache.rule = f"folder of another version than {', '.join(sorted(versions))}"

        def judge(top: str, written: float) -> bool:
            old_layout = re.fullmatch(r"\d{2,3}[a-z]?(_\d{2,3}[a-z]?)*", top) is not None
            return old_layout or (
                "." in top and parse_version(top) is not None and _public(top) not in versions
            )

    elif place.makers and len(made) == len(place.makers):
        times = [time for distribution in made if (time := installation_time(distribution))]
        if len(times) == len(made):
            youngest = max(times)
            cache.rule = (
                f"written before {', '.join(place.makers)} was installed ({_utc(youngest)})"
            )

            def judge(top: str, written: float) -> bool:
                return written < youngest

    newest = 0.0
    stale_folders = set()
    pending = [(str(place.path), "")]
    while pending:
        folder, top = pending.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:  # removed or closed to us meanwhile
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                pending.append((entry.path, top or entry.name))
                continue
            if cache.files >= limit:
                cache.complete = False
                pending.clear()
                break
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            cache.files += 1
            cache.bytes += status.st_size
            newest = max(newest, status.st_mtime)
            if judge(top, status.st_mtime):
                cache.stale_files += 1
                cache.stale_bytes += status.st_size
                if place.by_version:
                    stale_folders.add(top)
    cache.newest = _utc(newest) if cache.files else None
    cache.stale_folders = sorted(stale_folders)
    return cache


def caches_section(
    packages: Packages, environ: Mapping[str, str], limit: int = FILE_LIMIT
) -> tuple[list[Finding], list[dict[str, object]]]:
    """Findings on every cache folder that exists, and their numbers."""
    findings = []
    caches = []
    for place in places(environ):
        if not place.path.is_dir():
            continue
        cache = examine(place, packages, limit)
        limit -= cache.files
        caches.append(cache)
        if cache.files or not cache.complete:
            findings.append(_finding(cache))
    if not findings:
        findings.append(finding("ok", "compile caches", "none yet"))
    return findings, [asdict(cache) for cache in caches]


def installation_time(distribution: Distribution) -> float | None:
    """When a distribution was installed, from its own files; None if it has none on disk."""
    stem = f"{normalised(distribution.metadata['Name']).replace('-', '_')}-{distribution.version}"
    folder = Path(str(distribution.locate_file(f"{stem}.dist-info")))
    times = []
    for entry in ("INSTALLER", "RECORD", "METADATA"):
        try:
            times.append((folder / entry).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)


def _finding(cache: Cache) -> Finding:
    what = f"{'legacy ' if cache.legacy else ''}{cache.name} cache"
    count = (
        f"{cache.files} files"
        if cache.complete
        else f"more than {cache.files} files, counting stopped"
    )
    detail = f"{_size(cache.bytes)} in {count}, newest {cache.newest}, {cache.path}"
    if cache.legacy:
        detail += "; this engine no longer uses it"
        return finding("note", what, detail, "delete it if no other program needs it")
    if cache.stale_files:
        where = f" ({', '.join(cache.stale_folders)})" if cache.stale_folders else ""
        detail += (
            f"; {_size(cache.stale_bytes)} in {cache.stale_files} files stale{where}: {cache.rule}"
        )
        return finding(
            "note", what, detail, "delete the stale part to free room; it is rebuilt if needed"
        )
    return finding("ok", what, detail)


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _public(version: str) -> str:
    return version.partition("+")[0]


def _user(environ: Mapping[str, str]) -> str:
    named = next(
        (environ[name] for name in ("LOGNAME", "USER", "LNAME", "USERNAME") if environ.get(name)),
        None,
    )
    try:
        user = named or getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    return re.sub(r'[\\/:*?"<>|]', "_", user)
