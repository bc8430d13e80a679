# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: one run at a time, and no verdict of an earlier run beside the records of this one."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from numinous_tooling.gate.errors import GateError, Interrupted, ServerFailed


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a folder for the length of a block; the end of the process ends it, however it comes.

    Args:
        folder: is made where it does not exist.
        wait: for another process to let it go; else that is an error.

    Raises:
        GateError: the folder cannot be made, or another process holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Locks on the folder itself leave no file behind; children do not inherit the descriptor.
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise GateError(f"{folder} cannot be used as a folder ({error.strerror})") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise GateError(
                f"{folder} is in use by another run; wait, or give another --out"
            ) from error
        except OSError:
            pass  # some network file systems have no locks on folders
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def reason_left(folder: Path, write: Callable[[str, str | None], None]) -> Iterator[None]:
    """Let a run that ends early in the block leave its reason: `write(reason, tail of the server's log)`, then raise.

    An `OSError` of the block (a full disk, missing rights) becomes a `GateError`.
    """
    try:
        yield
    except GateError as error:
        write(str(error), error.tail if isinstance(error, ServerFailed) else None)
        raise
    except Interrupted as error:
        write(str(error), None)
        raise
    except OSError as error:
        reason = f"{error.filename or folder}: {error.strerror or error}"
        with contextlib.suppress(OSError):
            write(reason, None)
        raise GateError(reason) from error


def clear(folder: Path, names: Sequence[str]) -> None:
    """Remove what an earlier run into the same folder said."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
