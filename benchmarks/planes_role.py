"""Processes that take part in a benchmark, one side each, driven by calls over pipes.

    benchmark ── {"call": name, "args": {...}} ──► role        one JSON line each
              ◄─ {"value": ...} | {"error": text} ──

A role ends when its standard input does, so none outlives a benchmark that is killed. Answers come
through a pipe of their own; what a role prints goes to its log. Standard library only: roles also
run under the peers' environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

CALL_TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 15.0
_LOG_TAIL_BYTES = 4_000
_ANSWERS_FD = "PLANES_ANSWERS_FD"


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
        self._unread = b""
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.getenv("PYTHONPATH")]))
        self._answers, answers = os.pipe()
        self._process = subprocess.Popen(
            [str(python or sys.executable), str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[answers],
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": "1",
                _ANSWERS_FD: str(answers),
            },
        )
        os.close(answers)

    def call(self, method: str, *, timeout_s: float = CALL_TIMEOUT_S, **args: Any) -> Any:
        """The method's value.

        Raises: RoleFailed: it raised, the process ended, or `timeout_s` passed.
        """
        self.begin(method, **args)
        return self.finish(timeout_s=timeout_s)

    def begin(self, method: str, **args: Any) -> None:
        """Sends a call whose value `finish` gives, so that several roles can work at once."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"call": method, "args": args}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RoleFailed(f"{self.name} has ended; its log:\n{self._log_tail()}") from None

    def finish(self, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Value of the call that was begun; raises as `call` does."""
        answer = json.loads(self._read_line(time.monotonic() + timeout_s, timeout_s))
        if "error" in answer:
            raise RoleFailed(f"{self.name} failed:\n{answer['error']}")
        return answer["value"]

    def cpu_s(self) -> float:
        """CPU seconds so far, user and system, all threads."""
        return float(self.call("cpu_s"))

    def close(self) -> None:
        """Lets the process end by itself for a bounded time, then ends it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._answers)
        self._log.close()

    def __enter__(self) -> Role:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_line(self, deadline: float, timeout_s: float) -> bytes:
        while b"\n" not in self._unread:
            readable, _, _ = select.select(
                [self._answers], [], [], max(deadline - time.monotonic(), 0.0)
            )
            if not readable:
                raise RoleFailed(
                    f"{self.name} gave no answer within {timeout_s:g} s; its log:\n"
                    f"{self._log_tail()}"
                )
            received = os.read(self._answers, 1 << 16)
            if not received:
                raise RoleFailed(f"{self.name} has ended; its log:\n{self._log_tail()}")
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _log_tail(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(size - _LOG_TAIL_BYTES, 0))
        return self._log.read().decode(errors="replace")


Handlers = Mapping[str, Callable[..., Any]]


def serve(handlers: Handlers) -> None:
    """Answers calls until standard input ends."""
    answers = _open_answers()
    for line in sys.stdin.buffer:
        answers.write(_answer(handlers, line))
        answers.flush()


async def serve_async(handlers: Handlers) -> None:
    """The same beside a running event loop; handlers may be coroutine functions."""
    answers = _open_answers()
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        answers.write(await _answer_async(handlers, line))
        answers.flush()


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


def _open_answers() -> BinaryIO:
    fd = int(os.environ.pop(_ANSWERS_FD))
    os.set_inheritable(fd, False)
    return os.fdopen(fd, "wb")


def _answer(handlers: Handlers, line: bytes) -> bytes:
    try:
        return _line(value=_call(handlers, line))
    except Exception:  # the boundary of the role: whatever a method raises goes to its caller
        return _line(error=traceback.format_exc())


async def _answer_async(handlers: Handlers, line: bytes) -> bytes:
    try:
        value = _call(handlers, line)
        return _line(value=await value if inspect.isawaitable(value) else value)
    except Exception:  # the boundary of the role: whatever a method raises goes to its caller
        return _line(error=traceback.format_exc())


def _line(**answer: Any) -> bytes:
    return json.dumps(answer).encode() + b"\n"


def _call(handlers: Handlers, line: bytes) -> Any:
    request = json.loads(line)
    method = {**_COMMON, **handlers}[request["call"]]
    return method(**request["args"])
