"""The other side of `fork_server`: starting a server, and asking it for processes. No torch.

All methods block, bounded by `timeout_s`; an event loop runs them in a thread
(`asyncio.to_thread`). One client may be used from several threads.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack

from areal_sc.errors import WorkerLost, WorkerStartError
from areal_sc.workers.fork_server import ENTRIES, MAX_MESSAGE_BYTES, serve_connection

_EXIT_POLL_S = 0.01


class ForkServerClient:
    """A connection to one fork server.

    Args:
        connection: connected stream socket; the client owns it.
        log_path: the server's own log, named in errors.
        timeout_s: bound of every request.
        process: the server, where this process started it and has to reap it.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        log_path: Path | None = None,
        timeout_s: float = 60.0,
        process: subprocess.Popen[bytes] | None = None,
        forked_pid: int | None = None,
    ) -> None:
        self._connection = connection
        self._connection.setblocking(False)
        self._log_path = log_path
        self._timeout_s = timeout_s
        self._process = process
        self._forked_pid = forked_pid
        self._unpacker = msgpack.Unpacker(max_buffer_size=MAX_MESSAGE_BYTES, strict_map_key=False)
        self._request_ids = itertools.count()
        self._lock = threading.Lock()
        self._returncodes: dict[int, int] = {}
        self._reported: set[int] = set()

    def wait_ready(self, timeout_s: float) -> int:
        """Waits until the server has preloaded its modules; returns its pid.

        Raises: WorkerStartError: it is not ready in time, or has ended.
        """
        try:
            return int(self._request({"op": "ping"}, timeout_s)["pid"])
        except WorkerLost as error:
            raise WorkerStartError(f"the fork server did not start: {error}") from error

    def spawn(
        self,
        entry: str,
        spec: Mapping[str, Any],
        log_path: Path | str,
        *,
        fds: Sequence[int] = (),
        die_with_server: bool = True,
        timeout_s: float | None = None,
    ) -> int:
        """Forks a process that runs the named entry with `spec`; returns its pid.

        Args:
            entry: a name of the server's allow-list.
            spec: msgpack-able; where `fds` are given it gets their numbers as `spec["fds"]`.
            log_path: file that the process's output is appended to.
            fds: file descriptors that the process gets copies of.
            die_with_server: SIGKILL for the process when the server dies.
        Raises: WorkerStartError: the server refused or could not. WorkerLost: it is gone.
        """
        request = {
            "op": "spawn",
            "entry": entry,
            "spec": dict(spec),
            "log_path": str(log_path),
            "num_fds": len(fds),
            "die_with_server": die_with_server,
        }
        pid = int(self._request(request, timeout_s, fds)["pid"])
        with self._lock:
            # the number may have belonged to a process that ended before
            self._returncodes.pop(pid, None)
            self._reported.discard(pid)
        return pid

    def poll(self) -> dict[int, int]:
        """Exit codes, as `subprocess` gives them, of processes that ended since the last call."""
        self._refresh()
        with self._lock:
            ended = {
                pid: code for pid, code in self._returncodes.items() if pid not in self._reported
            }
            self._reported.update(ended)
        return ended

    def wait(self, pid: int, timeout_s: float) -> int | None:
        """Exit code of one process, or None when it still runs after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while pid not in self._returncodes:
            self._refresh()
            if pid not in self._returncodes:
                if time.monotonic() >= deadline:
                    return None
                time.sleep(_EXIT_POLL_S)
        return self._returncodes[pid]

    def kill(self, pid: int, signum: int = signal.SIGKILL) -> bool:
        """Signals a child's process group; False when the child has ended."""
        return bool(self._request({"op": "kill", "pid": pid, "signal": int(signum)})["sent"])

    def close(self) -> None:
        """Leaves the server; without any client it ends after its orphan timeout."""
        with self._lock:
            self._connection.close()

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Ends the server and all its children, by force if need be, and leaves it."""
        deadline = time.monotonic() + timeout_s
        if self._process is not None:
            self._process.terminate()  # a request would wait for the end of the preload
        else:
            with contextlib.suppress(WorkerLost, WorkerStartError):
                self._request({"op": "shutdown"}, timeout_s)
        with self._lock, contextlib.suppress(OSError):
            # the end of the connection is the end of the server
            while not self._is_closed and self._wait(selectors.EVENT_READ, deadline):
                if not self._connection.recv(1 << 16):
                    break
        self.close()
        if self._process is not None:
            try:
                self._process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._forked_pid is not None:
            _reap(self._forked_pid, deadline)
            self._forked_pid = None

    @property
    def _is_closed(self) -> bool:
        return self._connection.fileno() < 0

    def _refresh(self) -> None:
        returncodes = self._request({"op": "poll"})["returncodes"]
        with self._lock:
            self._returncodes.update(returncodes)

    def _request(
        self, request: dict[str, Any], timeout_s: float | None = None, fds: Sequence[int] = ()
    ) -> dict[str, Any]:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        with self._lock:
            if self._is_closed:
                raise WorkerLost(f"the connection to the fork server was closed{self._see_log()}")
            request_id = next(self._request_ids)
            try:
                self._send(msgpack.packb({"id": request_id, **request}), fds, deadline)
                while True:
                    for reply in self._unpacker:
                        # replies to requests that were given up on are skipped
                        if reply["id"] == request_id:
                            return self._checked(reply)
                    if not self._wait(selectors.EVENT_READ, deadline):
                        raise TimeoutError
                    received = self._connection.recv(1 << 16)
                    if not received:
                        raise ConnectionResetError("it closed the connection")
                    self._unpacker.feed(received)
            except TimeoutError as error:
                raise WorkerStartError(
                    f"the fork server did not answer {request['op']!r} within {limit_s:g} s"
                    f"{self._see_log()}"
                ) from error
            except OSError as error:
                raise WorkerLost(f"the fork server is gone: {error}{self._see_log()}") from error

    def _checked(self, reply: dict[str, Any]) -> dict[str, Any]:
        if "error" in reply:
            raise WorkerStartError(f"the fork server could not start it: {reply['error']}")
        return reply

    def _send(self, message: bytes, fds: Sequence[int], deadline: float) -> None:
        while message:
            if not self._wait(selectors.EVENT_WRITE, deadline):
                raise TimeoutError
            try:
                sent = socket.send_fds(self._connection, [message], list(fds))
            except BlockingIOError:
                continue
            message, fds = message[sent:], ()

    def _wait(self, event: int, deadline: float) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, event)
            return bool(selector.select(max(0.0, deadline - time.monotonic())))

    def _see_log(self) -> str:
        return f"; see {self._log_path}" if self._log_path else ""


def random_address() -> str:
    """A name for a new server's socket in Linux's abstract namespace.

    No file stands for it, so none is left when its processes are killed.
    """
    return f"\0areal-sc-{os.getuid()}-{secrets.token_hex(16)}"


def start_fork_server(
    address: str,
    preload: Sequence[str],
    orphan_timeout_s: float,
    log_path: Path,
    env: Mapping[str, str] | None = None,
    *,
    entries: Mapping[str, str] = ENTRIES,
    leftovers_of: tuple[Path, Path] | None = None,
    timeout_s: float = 60.0,
) -> ForkServerClient:
    """Starts a server in a session of its own and returns at once, while it still preloads.

    Requests sent meanwhile wait in the socket; `wait_ready` waits for the preload to end.

    Args:
        address: of the server's Unix socket, as `random_address` gives it; the server refuses
            processes of other users.
        preload: modules that the server imports before it forks.
        orphan_timeout_s: so long the server and its children live without a client.
        log_path: the server's log, appended to.
        env: its environment; None passes on that of this process.
        entries: what children may run.
        leftovers_of: run folder, and root of its shared memory; at its end the server deletes what
            a killed run left there.
    """
    environment = _with_package(os.environ if env is None else env)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening,
        log_path.open("ab") as output,
    ):
        listening.bind(address)
        listening.listen(64)
        process = subprocess.Popen(
            [
                # -P: the working directory must not shadow installed modules
                *(sys.executable, "-P", "-m", "areal_sc.workers.fork_server"),
                *("--listen-fd", str(listening.fileno())),
                *("--orphan-timeout", str(orphan_timeout_s)),
                *("--preload", *preload),
                *("--entry", *(f"{name}={target}" for name, target in entries.items())),
                *(("--leftovers-of", *map(str, leftovers_of)) if leftovers_of else ()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=[listening.fileno()],
            start_new_session=True,
        )
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(address)
    return ForkServerClient(connection, log_path=log_path, timeout_s=timeout_s, process=process)


def connect_fork_server(address: str) -> ForkServerClient | None:
    """A client of the server that another process left running; None: none is there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(address)
    except ConnectionRefusedError:
        connection.close()
        return None
    return ForkServerClient(connection)


def fork_server_child(entries: Mapping[str, str] = ENTRIES) -> ForkServerClient:
    """Forks this process into a server for its own use, e.g. for reward processes.

    To be called before any thread is started. The server and its children end with this process,
    however it ends: they see the end of the connection.
    """
    mine, theirs = socket.socketpair()
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        mine.close()
        serve_connection(theirs, parent_pid, entries)
    theirs.close()
    return ForkServerClient(mine, forked_pid=pid)


def _with_package(env: Mapping[str, str]) -> dict[str, str]:
    """The environment in which this very package is importable, also when it is not installed."""
    root = str(Path(__file__).resolve().parents[2])
    environment = dict(env)
    if root not in sysconfig.get_paths().values():
        paths = [root, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


def _reap(pid: int, deadline: float) -> None:
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        time.sleep(_EXIT_POLL_S)
