"""Processes that take part in a benchmark, one side each, driven by calls over a pipe.

    benchmark ── (method, arguments) ──► role
              ◄── (value, error text) ──

A role ends when its pipe does, so none outlives a benchmark that is killed; what it prints goes to
its log. Standard library only: roles also run under the peers' environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

CALL_TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 15.0
_LOG_TAIL_BYTES = 4_000
_PIPE_FD = "PLANES_PIPE_FD"


class RoleFailed(Exception):
    """A role raised, ended, or did not answer in time."""


class Role:
    """A process that answers calls, in a session of its own, so that Ctrl-C is left to its owner.

    Args:
        name: for messages.
        script: Python file that ends in `serve(...)`.
        arguments: its command line.
        python: interpreter; this one by default.
    """

    def __init__(
        self, name: str, script: Path, arguments: Sequence[str] = (), python: Path | None = None
    ) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 closed in close()
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.getenv("PYTHONPATH")]))
        self._pipe, theirs = Pipe()
        self._process = subprocess.Popen(
            [str(python or sys.executable), str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": "1",
                _PIPE_FD: str(theirs.fileno()),
            },
        )
        theirs.close()

    def call(self, method: str, *, timeout_s: float = CALL_TIMEOUT_S, **args: Any) -> Any:
        """The method's value.

        Raises: RoleFailed: it raised, the process ended, or `timeout_s` passed.
        """
        self.begin(method, **args)
        return self.finish(timeout_s=timeout_s)

    def begin(self, method: str, **args: Any) -> None:
        """Sends a call whose value `finish` gives, so that several roles can work at once."""
        try:
            self._pipe.send((method, args))
        except BrokenPipeError:
            raise RoleFailed(f"{self.name} has ended; its log:\n{self._log_tail()}") from None

    def finish(self, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Value of the call that was begun; raises as `call` does."""
        if not self._pipe.poll(timeout_s):
            raise RoleFailed(
                f"{self.name} gave no answer within {timeout_s:g} s; its log:\n{self._log_tail()}"
            )
        try:
            value, error = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise RoleFailed(f"{self.name} has ended; its log:\n{self._log_tail()}") from None
        if error is not None:
            raise RoleFailed(f"{self.name} failed:\n{error}")
        return value

    def cpu_s(self) -> float:
        """CPU seconds so far, user and system, all threads."""
        return float(self.call("cpu_s"))

    def close(self) -> None:
        """Lets the process end by itself for a bounded time, then ends it."""
        self._pipe.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Role:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _log_tail(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(size - _LOG_TAIL_BYTES, 0))
        return self._log.read().decode(errors="replace")


Handlers = Mapping[str, Callable[..., Any]]


def serve(handlers: Handlers) -> None:
    """Answers calls until the pipe ends."""
    pipe = _open_pipe()
    with contextlib.suppress(EOFError):
        while True:
            call = pipe.recv()
            try:
                answer = _call(handlers, *call), None
            except Exception:  # the boundary of the role: whatever is raised goes to its caller
                answer = None, traceback.format_exc()
            pipe.send(answer)


async def serve_async(handlers: Handlers | object) -> None:
    """The same beside a running event loop; handlers may be coroutine functions.

    Args:
        handlers: or an object, whose methods they are.
    """
    pipe = _open_pipe()
    with contextlib.suppress(EOFError):
        while True:
            call = await asyncio.to_thread(pipe.recv)
            try:
                value = _call(handlers, *call)
                answer = (await value if inspect.isawaitable(value) else value), None
            except Exception:  # as above
                answer = None, traceback.format_exc()
            pipe.send(answer)


def _open_pipe() -> Connection:
    fd = int(os.environ.pop(_PIPE_FD))
    os.set_inheritable(fd, False)
    return Connection(fd)


def _call(handlers: Handlers | object, method: str, args: Mapping[str, Any]) -> Any:
    if method in _COMMON:
        return _COMMON[method](**args)
    if isinstance(handlers, Mapping):
        return handlers[method](**args)
    return getattr(handlers, method)(**args)


def process_cpu_s() -> float:
    """CPU seconds of this process, user and system, all threads."""
    return time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def tcp_bytes() -> list[int]:
    """[sent, received] payload bytes of this process's open TCP connections, as the kernel counts.

    Both directions of all of them: ZMQ's framing, acknowledgements and credits are in it, TCP/IP
    headers are not.
    """
    sent = received = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.proto != socket.IPPROTO_TCP:
                    continue
                state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
        except OSError:
            continue  # it has just been closed
        # offsets of tcpi_bytes_received and tcpi_bytes_sent in the kernel's struct tcp_info
        received += struct.unpack_from("Q", state, 128)[0]
        sent += struct.unpack_from("Q", state, 200)[0]
    return [sent, received]


_COMMON: Handlers = {
    "cpu_s": process_cpu_s,
    "resident_bytes": resident_bytes,
    "tcp_bytes": tcp_bytes,
}
