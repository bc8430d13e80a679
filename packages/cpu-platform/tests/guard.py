# SPDX-License-Identifier: Apache-2.0
"""Script: run the rest of the command line, and leave nothing of it behind. Start it in a session of its own.

On SIGTERM, and when its parent dies however that happens, the whole process group is killed. The engine's own watch on
its parent begins only after its imports, so a server that is killed while it starts would leave processes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    return subprocess.call(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
