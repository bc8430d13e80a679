# SPDX-License-Identifier: Apache-2.0
"""Files made by compilers, kept below $XDG_CACHE_HOME/numinous (default ~/.cache/numinous) by the hash of their inputs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def folder() -> Path:
    """Where compiled files are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "numinous" / "compile"


def key(inputs: Any) -> str:
    """SHA-256 of JSON data that decides the result of a compilation."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def kept(key: str, make: Callable[[Path], None]) -> Path:
    """The folder of `key`; where there is none, `make(empty folder)` fills it once, also with several processes.

    What `make` raises passes through and leaves nothing behind. Its file ``seconds`` says how long `make` took.
    """
    base = folder()
    base.mkdir(parents=True, exist_ok=True)
    done = base / key
    if done.is_dir():
        return done
    with (base / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.is_dir():
            scratch = Path(tempfile.mkdtemp(prefix=f"{key[:16]}-", dir=base))
            try:
                start = time.perf_counter()
                make(scratch)
                (scratch / "seconds").write_text(f"{time.perf_counter() - start:.3f}")
                scratch.rename(done)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    (base / f"{key}.lock").unlink(missing_ok=True)
    return done


def seconds(*folders: Path) -> float:
    """How long it took to make them."""
    return sum(float((folder / "seconds").read_text()) for folder in folders)
