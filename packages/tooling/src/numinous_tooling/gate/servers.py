# SPDX-License-Identifier: Apache-2.0
"""Server and client processes of a gate run: start, watch, and end so that nothing survives; and attached servers.

Every process is started in a session of its own, so a terminal's Ctrl-C reaches only the gate, which then ends the
others in its own order. What belongs to a server is found in three ways, because engine children may leave their
parent's group or outlive it: by descent (noted while the server runs), by session id, and by process group.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType
from urllib.parse import urlsplit

import httpx
import psutil

from numinous_tooling.gate.apis import bearer, has_tls
from numinous_tooling.gate.errors import GateError, Interrupted, ServerFailed

LOG_TAIL_LINES = 40
POLL_S = 0.25
OBSERVE_S = 0.5
HEALTH_TIMEOUT_S = 30.0
STOP_GRACE_S = 15.0
KILL_WAIT_S = 10.0
# A server that runs already answers soon, or not at all.
ATTACH_TIMEOUT_S = 15.0
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


class Interrupts:
    """Turns SIGINT, SIGTERM and SIGHUP into `Interrupted`, except inside `deferred()` blocks.

    A process that was started but not yet noted, or half stopped, would survive an exception at that moment; such
    steps run deferred, and the exception is raised when the last block ends.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.pending: signal.Signals | None = None
        self._depth = 0
        self._raised = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[Interrupts]:
        """Handle the signals for the length of a block (main thread only)."""
        before = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold signals back until the block ends."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        self._raise_if_due()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.pending = signal.Signals(number)
        self._raise_if_due()

    def _raise_if_due(self) -> None:
        # Raised once: a second Ctrl-C must not break the clean-up that the first one began.
        if self.pending is not None and self._depth == 0 and not self._raised:
            self._raised = True
            raise Interrupted(self.pending.name)


class ProcessTree:
    """A child process in its own session, with everything that it starts."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self._seen: dict[int, psutil.Process] = {}
        self.popen: subprocess.Popen[str] | None = None

    def start(
        self, command: list[str], env: dict[str, str], *, stderr: int, stdout: int, stdin: int
    ) -> subprocess.Popen[str]:
        """Start the command; its first process leads a new session and group."""
        with self._interrupts.deferred():
            try:
                self.popen = subprocess.Popen(
                    command,
                    env=env,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    text=True,
                    start_new_session=True,
                )
            except OSError as error:
                raise GateError(f"cannot start {command[0]}: {error.strerror}") from error
        return self.popen

    def observe(self) -> None:
        """Note all present members, so that they are known even after their parents are gone."""
        if self.popen is None or self._number_is_taken():
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            leader = self._seen.setdefault(self.popen.pid, psutil.Process(self.popen.pid))
            for child in leader.children(recursive=True):
                self._seen.setdefault(child.pid, child)
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
                if os.getsid(pid) == self.popen.pid:
                    self._seen.setdefault(pid, psutil.Process(pid))

    def _number_is_taken(self) -> bool:
        """Whether the leader was collected and its number, which group and session bear too, is a stranger's by now."""
        assert self.popen is not None
        return self.popen.poll() is not None and psutil.pid_exists(self.popen.pid)

    def alive(self) -> list[psutil.Process]:
        """Return the members that still run (a zombie does not run, it only waits to be collected)."""
        if self.popen is not None:
            self.popen.poll()
        members = []
        for process in self._seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    members.append(process)
        return members

    def stop(self, grace_s: float) -> None:
        """End the tree: politely for up to `grace_s`, then by SIGKILL; a pending interrupt ends the politeness."""
        if self.popen is None:
            return
        with self._interrupts.deferred():
            self.observe()
            if grace_s > 0 and self.popen.poll() is None:
                self.popen.terminate()
                deadline = time.monotonic() + grace_s
                while (
                    time.monotonic() < deadline
                    and self._interrupts.pending is None
                    and self.alive()
                ):
                    time.sleep(0.05)
            try:
                self._kill()
            finally:
                for pipe in (self.popen.stdin, self.popen.stdout):
                    if pipe is not None:
                        with contextlib.suppress(OSError):
                            pipe.close()

    def _kill(self) -> None:
        assert self.popen is not None
        deadline = time.monotonic() + KILL_WAIT_S
        while True:
            # Again in each round: a member may have forked between the listing and the kill.
            self.observe()
            if not self._number_is_taken():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.popen.pid, signal.SIGKILL)
            members = self.alive()
            if not members:
                break
            for process in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if time.monotonic() > deadline:
                pids = ", ".join(str(process.pid) for process in members)
                raise GateError(
                    f"processes {pids} do not end after SIGKILL; look at them with ps, state D is I/O"
                )
            time.sleep(0.02)
        self.popen.wait()


class Server:
    """One server of an arm: started by `with`, always gone after it."""

    local = True
    """Whether its processes and GPUs are this host's."""
    headers: Mapping[str, str] = MappingProxyType({})
    """Of every request."""

    def __init__(
        self, name: str, command: list[str], env: dict[str, str], log: Path, port: int
    ) -> None:
        self.name = name
        self.command = command
        self.env = env
        self.log = log
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._tree: ProcessTree | None = None
        self._observed_s = 0.0

    @contextlib.contextmanager
    def running(
        self, interrupts: Interrupts, stop_grace_s: float = STOP_GRACE_S
    ) -> Iterator[Server]:
        """Run the server for the length of a block; after it the server has `stop_grace_s` to end by itself."""
        self._check_port()
        tree = self._tree = ProcessTree(interrupts)
        grace_s = 0.0
        try:
            with self.log.open("w") as log:
                tree.start(
                    self.command,
                    self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=log.fileno(),
                    stderr=subprocess.STDOUT,
                )
            yield self
            grace_s = stop_grace_s
        finally:
            # After a failure there is nothing to be polite about, and task runners kill us soon after a Ctrl-C.
            tree.stop(grace_s)

    def _check_port(self) -> None:
        """Refuse a port on which another server, such as one that a killed gate left, would answer in ours' place."""
        with socket.socket() as probe:
            probe.settimeout(HEALTH_TIMEOUT_S)
            if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                raise GateError(
                    f"port {self._port} is in use; end what listens there, or choose another --port-base"
                )

    def check_alive(self) -> None:
        """Raise `ServerFailed` if the server's first process ended; note its children otherwise."""
        assert self._tree is not None
        assert self._tree.popen is not None
        code = self._tree.popen.poll()
        if code is not None:
            how = (
                f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"ended with exit code {code}"
            )
            raise self.failed(how)
        # Reads all of /proc, so not with every event of the client.
        if time.monotonic() - self._observed_s >= OBSERVE_S:
            self._observed_s = time.monotonic()
            self._tree.observe()

    def check_answers(self) -> None:
        """Called when a request broke off: the end of a process tells more, and `check_alive` sees it."""
        self.check_alive()

    def cpu_s(self) -> float | None:
        """Return the CPU seconds used so far by the members that run."""
        assert self._tree is not None
        used = 0.0
        for process in self._tree.alive():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                used += times.user + times.system
        return used

    def failed(self, how: str) -> ServerFailed:
        """Return the error to raise: what happened, where the log is, and its tail."""
        return ServerFailed(f"server {self.name} {how}; see the end of {self.log}", self.tail())

    def tail(self) -> str:
        """Return the last `LOG_TAIL_LINES` lines of the log."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def wait_ready(self, timeout_s: float, on_wait: Callable[[float], None]) -> float:
        """Poll `/health` until it answers 200; return the seconds it took. `on_wait` gets the seconds so far."""
        start = time.monotonic()
        with httpx.Client(
            base_url=self.url, trust_env=False, verify=has_tls(self.url), timeout=HEALTH_TIMEOUT_S
        ) as http:
            while True:
                elapsed = time.monotonic() - start
                self.check_alive()
                if elapsed > timeout_s:
                    raise self.failed(f"was not ready after {timeout_s:g} s (--start-timeout)")
                on_wait(elapsed)
                with contextlib.suppress(httpx.HTTPError):
                    if http.get("/health").status_code == 200:
                        return time.monotonic() - start
                time.sleep(POLL_S)

    def info(self) -> dict[str, object]:
        """Return what the server says of itself (`/server_info`), or nothing where it does not say."""
        return ask(self.url, "/server_info")


class AttachedServer:
    """A server that somebody else started: neither started nor stopped, watched through its health alone."""

    def __init__(self, name: str, url: str, api_key_env: str | None = None) -> None:
        self.name = name
        self.headers = bearer(api_key_env)
        self.url = url.rstrip("/")
        self.command: list[str] = []
        self.log: Path | None = None
        self.local = urlsplit(url).hostname in LOCAL_NAMES

    @contextlib.contextmanager
    def running(self, interrupts: Interrupts) -> Iterator[AttachedServer]:
        """Use the server for the length of a block."""
        del interrupts
        yield self

    def check_alive(self) -> None:
        """Do nothing: there is no process to look at, and a request a tick would load the server."""

    def check_answers(self) -> None:
        """Raise `ServerFailed` where nothing listens any more; called when a request broke off."""
        try:
            httpx.get(
                f"{self.url}/v1/models",
                headers=self.headers,
                trust_env=False,
                verify=has_tls(self.url),
                timeout=HEALTH_TIMEOUT_S,
            )
        except httpx.TransportError as error:
            if not isinstance(error, httpx.ReadTimeout):
                raise self.failed(f"went away ({type(error).__name__})") from error

    def cpu_s(self) -> float | None:
        """Return None: its processes are not known."""
        return None

    def failed(self, how: str) -> ServerFailed:
        """Return the error to raise."""
        return ServerFailed(f"server {self.name} at {self.url} {how}", "")

    def wait_ready(self, timeout_s: float, on_wait: Callable[[float], None]) -> float:
        """Ask `/health`, or `/v1/models` where there is none, until 200; return the seconds it took.

        A server that is to run already gets `ATTACH_TIMEOUT_S` at most.
        """
        start = time.monotonic()
        timeout_s = min(timeout_s, ATTACH_TIMEOUT_S)
        reason = "no answer"
        with httpx.Client(
            base_url=self.url,
            headers=self.headers,
            trust_env=False,
            verify=has_tls(self.url),
            timeout=timeout_s,
        ) as http:
            while True:
                on_wait(time.monotonic() - start)
                try:
                    for path in ("/health", "/v1/models"):
                        status = http.get(path).status_code
                        if status == 200:
                            return time.monotonic() - start
                        reason = f"{path}: HTTP {status}"
                        if status != 404:
                            break
                except httpx.HTTPError as error:
                    reason = f"{type(error).__name__}: {error}"
                if time.monotonic() - start > timeout_s:
                    raise GateError(
                        f"server {self.name} at {self.url} is not ready ({reason}); start it, or correct its --url"
                    )
                time.sleep(POLL_S)

    def info(self) -> dict[str, object]:
        """Return what the server says of itself: SGLang's `/server_info`, vLLM's `/version`, or nothing."""
        return ask(self.url, "/server_info", self.headers) or ask(
            self.url, "/version", self.headers
        )


AnyServer = Server | AttachedServer


def ask(url: str, path: str, headers: Mapping[str, str] | None = None) -> dict[str, object]:
    """Return the JSON object that a server answers on a path, or nothing where it answers anything else."""
    with contextlib.suppress(httpx.HTTPError, ValueError):
        response = httpx.get(
            f"{url}{path}",
            headers=headers,
            trust_env=False,
            verify=has_tls(url),
            timeout=HEALTH_TIMEOUT_S,
        )
        if response.status_code == 200:
            answer = response.json()
            return answer if isinstance(answer, dict) else {}
    return {}


def served_model(url: str, headers: Mapping[str, str] | None = None) -> dict[str, object]:
    """Return the first model that `/v1/models` names; nothing where it names none."""
    models = ask(url.rstrip("/"), "/v1/models", headers).get("data")
    first = models[0] if isinstance(models, list) and models else None
    return first if isinstance(first, dict) else {}


class OtherLoad:
    """How many CPU cores programs outside the run keep busy; such load is the usual cause of noise on CPU.

    An attached server's own load cannot be told from that of others, so none is reported beside it.
    """

    def __init__(self, server: AnyServer, client_pids: Sequence[int]) -> None:
        self._server = server
        self._pids = (*client_pids, os.getpid())
        self._start_s = time.monotonic()
        self._before_s = self._others_s()

    def cores(self) -> float:
        """Return the mean number of cores since construction."""
        return max(0.0, self._others_s() - self._before_s) / (time.monotonic() - self._start_s)

    def _others_s(self) -> float:
        whole = psutil.cpu_times()
        busy = sum(whole) - whole.idle - getattr(whole, "iowait", 0.0)
        # The kernel counts guest time in user time as well.
        busy -= getattr(whole, "guest", 0.0) + getattr(whole, "guest_nice", 0.0)
        own = self._server.cpu_s()
        if own is None:
            return 0.0
        for pid in self._pids:
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                own += times.user + times.system
        return float(busy - own)


@contextlib.contextmanager
def client_processes(
    command: list[str], count: int, interrupts: Interrupts, stderr_log: Path
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run `count` measuring processes with their pipes for the length of a block; none is left after it."""
    # The stack ends each of them, also where an interrupt or a stubborn one breaks off the end of another.
    with contextlib.ExitStack() as trees:
        processes = []
        stderr_log.write_text("")
        # Appending, so that what one says does not overwrite another's.
        with stderr_log.open("a") as log:
            for _ in range(count):
                tree = ProcessTree(interrupts)
                trees.callback(tree.stop, 0)
                processes.append(
                    tree.start(
                        command,
                        dict(os.environ),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log.fileno(),
                    )
                )
        yield processes


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free at this moment.

    Below the ports that systems give to outgoing connections: one of those would not stay free while a server loads.
    """
    while True:
        port = 10_000 + secrets.randbelow(22_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
