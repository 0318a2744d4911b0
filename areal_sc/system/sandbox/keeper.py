"""The process that keeps one program: starts it, limits it, and tells what came of it.

    consumes     one request, then the program's output
    waits for    the program's end, or the first of its limits
    unblocked by the program, the clock, or the end of who asked, who then wants no answer

The program never holds the connection to who asked, so no word of the answer is its own.
Standard library alone.
"""

from __future__ import annotations

import marshal
import os
import select
import socket
import time
from contextlib import suppress
from typing import Any, Final

from areal_sc.system.sandbox import kernel
from areal_sc.system.sandbox.layers import ProgramLayer
from areal_sc.system.sandbox.program import CLOCK_FACTOR, LENGTH, packed
from areal_sc.system.sandbox.start_program import BEGUN, start_program
from areal_sc.system.sandbox.trees import use_of

LOOK_S: Final = 0.05
"""Between two looks at what a program uses, where the kernel does not hold the limit itself."""

_BESIDE_PROGRAM: Final = 4
"""Most processes among those of a layer that are not the program's own."""

_START_LIMIT_S: Final = 20.0
_BLOCK_BYTES: Final = 4096
_CHUNK: Final = 1 << 16


def keep(connection: socket.socket, layer: ProgramLayer) -> None:
    """Runs the program that is asked for, and answers, unless the connection ends before."""
    try:
        answer = _Keeping(connection, layer, _request(connection)).run()
    except OSError as error:
        answer = packed({"failed": str(error)})
    if answer:
        with suppress(OSError):
            connection.sendall(answer)


def _request(connection: socket.socket) -> dict[str, Any]:
    prefix = connection.recv(LENGTH.size, socket.MSG_WAITALL)
    length = LENGTH.unpack(prefix)[0] if len(prefix) == LENGTH.size else 0
    body = connection.recv(length, socket.MSG_WAITALL) if length else b""
    if not body or len(body) < length:
        raise ConnectionError("who asked is gone")
    request: dict[str, Any] = marshal.loads(body)
    return request


def _given_bytes(request: dict[str, Any]) -> int:
    """Most bytes of the disk that its files and its source take, with the folders above them."""
    num_blocks = len(request["source"].encode(errors="replace")) // _BLOCK_BYTES + 1
    for path, content in request["files"].items():
        num_blocks += len(content) // _BLOCK_BYTES + 1 + path.count("/")
    return num_blocks * _BLOCK_BYTES


class _Keeping:
    def __init__(
        self, connection: socket.socket, layer: ProgramLayer, request: dict[str, Any]
    ) -> None:
        self._connection = connection
        self._layer = layer
        self._request = request
        self._limits: dict[str, Any] = request["limits"]
        self._room_bytes = self._limits["file_bytes"] + _given_bytes(request)
        self._output: dict[int, bytearray] = {}
        self._end = "exited"
        self._is_over = False
        self._is_wanted = True
        # each process has the warm server's, too; later a layer may hide this one from `/proc`
        self._own_bytes = use_of([os.getpid()]).resident_bytes

    def run(self) -> bytes:
        """The answer; empty: nobody waits for it any more."""
        layer = self._layer
        try:
            layer.begin(self._room_bytes)
            stdin = kernel.sealed_file(self._request.pop("stdin"))  # judges have it in a file, too
            stdout, theirs_out = os.pipe()
            stderr, theirs_err = os.pipe()
            starting, theirs_start = os.pipe()
            for fd in (theirs_out, theirs_err):
                os.fchmod(fd, 0o666)  # another user opens /dev/stdout
            self._output = {stdout: bytearray(), stderr: bytearray()}

            def become() -> None:
                ends = (stdin, theirs_out, theirs_err)
                start_program(layer, self._request, ends, theirs_start)

            pid = layer.start(become)
            for fd in (theirs_out, theirs_err, theirs_start):
                os.close(fd)
            self._await_start(starting)
            begun_s = time.monotonic()
            self._watch(pid, begun_s)
            seconds = time.monotonic() - begun_s
            code = layer.exit_code(os.waitpid(pid, 0)[1]) if self._has_ended(pid) else -9
        finally:
            layer.end()
        self._drain()
        if not self._is_wanted:
            return b""
        out, err = map(bytes, self._output.values())
        end = self._named_end(code, err)
        told = {"end": end, "exit_code": code, "seconds": seconds}
        return packed({**told, "stdout": out, "stderr": err})

    def _await_start(self, starting: int) -> None:
        """Returns when the program begins. Raises: OSError: it could not be started."""
        ready = select.poll()
        ready.register(starting, select.POLLIN)
        told = b""
        while ready.poll(_START_LIMIT_S * 1000):
            if not (part := os.read(starting, _CHUNK)):
                break
            told += part
        else:
            raise OSError(f"the program had not begun after {_START_LIMIT_S:g} s")
        os.close(starting)
        if told != BEGUN:
            why = told.removeprefix(BEGUN).decode(errors="replace")
            raise OSError(why or "its process ended before the program began")

    def _watch(self, pid: int, begun_s: float) -> None:
        ended = os.pidfd_open(pid)
        for fd in self._output:
            os.set_blocking(fd, False)
        ready = select.poll()
        for fd in (*self._output, self._connection.fileno(), ended):
            ready.register(fd, select.POLLIN)
        over_s = begun_s + CLOCK_FACTOR * self._limits["time_s"]
        look_s = begun_s + LOOK_S
        self._ready = ready
        while not self._is_over:
            left_s = min(over_s, look_s) - time.monotonic()
            found = [fd for fd, _ in ready.poll(max(0.0, left_s * 1000))]
            if self._connection.fileno() in found:
                self._is_wanted = False
                return
            for fd in self._output:
                if fd in found:
                    self._read(fd)
            if ended in found:
                return
            now_s = time.monotonic()
            if now_s >= over_s:
                self._stop("timeout")
            elif now_s >= look_s:
                self._look()
                look_s = time.monotonic() + LOOK_S

    def _stop(self, end: str) -> None:
        if not self._is_over:
            self._end, self._is_over = end, True

    def _read(self, fd: int) -> bool:
        """Takes what there is of the output; False: there is no more of it now, or ever."""
        left: int = self._limits["output_bytes"] - sum(map(len, self._output.values()))
        try:
            part = os.read(fd, min(_CHUNK, left + 1))
        except BlockingIOError:
            return False
        self._output[fd] += part[:left]
        if len(part) > left:
            self._stop("output")
        elif not part:
            self._ready.unregister(fd)
        return bool(part) and len(part) <= left

    def _drain(self) -> None:
        """What was printed and not read before the end."""
        for fd in self._output:
            with suppress(KeyError):
                while self._read(fd):
                    pass

    def _look(self) -> None:
        use, limits = use_of(self._layer.pids()), self._limits
        if use.num_threads > limits["num_processes"] + _BESIDE_PROGRAM:
            self._stop("crashed")
        elif use.cpu_s > limits["time_s"]:
            self._stop("timeout")
        elif use.resident_bytes - use.num_processes * self._own_bytes > limits["memory_bytes"]:
            self._stop("memory")
        elif self._layer.has_written_more(self._room_bytes):
            self._stop("files")

    def _has_ended(self, pid: int) -> bool:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _named_end(self, code: int, stderr: bytes) -> str:
        if self._end != "exited":
            return self._end
        if code < 0:
            return {-24: "timeout", -25: "files"}.get(code, "crashed")  # SIGXCPU, SIGXFSZ
        last = stderr.rstrip().rpartition(b"\n")[2]
        if code == 0:
            return "exited"
        if last.startswith(b"MemoryError"):
            return "memory"
        full = (b"OSError: [Errno 27]", b"OSError: [Errno 28]")
        return "files" if last.startswith(full) else "exited"
