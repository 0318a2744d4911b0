"""The owner's side of `fork_server`. No torch."""

from __future__ import annotations

import asyncio
import collections
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import msgpack

from areal_sc.errors import WorkerLost, WorkerStartError
from areal_sc.workers.fork_server import (
    ENTRIES,
    KILL_GRACE_S,
    MAX_MESSAGE_BYTES,
    TERMINATE_GRACE_S,
    run_server,
)


@dataclass(eq=False)
class Child:
    """A process that the server has forked.

    Attributes:
        ended: its exit code, as `subprocess` gives it, once it has ended.
    """

    pid: int
    ended: asyncio.Future[int]

    @property
    def how(self) -> str:
        """`exit code 1` or `signal 9 (SIGKILL)`."""
        return exit_text(self.ended.result()) if self.ended.done() else "unknown exit status"


class ForkServer:
    """A fork server of this process's own, which must not have threads yet. Used from one loop.

    Args:
        entries: what children may run.
        preload: modules that the server imports before it forks. Requests wait meanwhile.

    Attributes:
        pid: of the server.
        is_gone: set when the server has ended; its children have ended with it.
    """

    def __init__(self, entries: Mapping[str, str] = ENTRIES, preload: Sequence[str] = ()) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        parent_pid = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._connection.close()
            run_server(theirs, parent_pid, entries, preload)
        theirs.close()
        self.is_gone = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._one_request = asyncio.Lock()
        self._replies: collections.deque[asyncio.Future[Child]] = collections.deque()
        self._children: dict[int, Child] = {}

    async def spawn(
        self,
        entry: str,
        spec: Mapping[str, Any],
        log_path: Path | str,
        *,
        fds: Sequence[int] = (),
        timeout_s: float = 60.0,
    ) -> Child:
        """Forks a process that runs the named entry with `spec`.

        Args:
            entry: a name of the server's allow-list.
            spec: msgpack-able; where `fds` are given it gets their numbers as `spec["fds"]`.
            log_path: file that the process's output is appended to.
            fds: file descriptors that the process gets copies of.
        Raises: WorkerStartError: the server refused, or did not answer. WorkerLost: it is gone.
        """
        request = {"entry": entry, "spec": dict(spec), "log_path": str(log_path)}
        try:
            async with asyncio.timeout(timeout_s), self._one_request:
                self._send(request, fds)
                reply: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
                self._replies.append(reply)
                return await reply
        except TimeoutError:
            raise WorkerStartError(
                f"the fork server did not start {entry!r} within {timeout_s:g} s"
            ) from None

    def kill(self, child: Child, signum: int = signal.SIGKILL) -> None:
        """Signals the child's process group; nothing happens when the child has ended."""
        if not child.ended.done():
            with suppress(WorkerLost):
                self._send({"kill": child.pid, "signal": int(signum)}, ())

    async def close(self) -> None:
        """Ends the server and all its children, by force if need be."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)  # the server ends when it has read all
        self._attach()
        try:
            async with asyncio.timeout(TERMINATE_GRACE_S + 2 * KILL_GRACE_S):
                await self.is_gone.wait()
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)  # and with it its children
            await self.is_gone.wait()

    def _attach(self) -> None:
        """Begins to listen to the server, on the event loop that runs now."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._connection, self._on_readable)

    def _send(self, request: dict[str, Any], fds: Sequence[int]) -> None:
        self._attach()
        if self.is_gone.is_set():
            raise WorkerLost("the fork server is gone")
        message = msgpack.encode(request)
        try:
            socket.send_fds(self._connection, [message], list(fds))
        except BlockingIOError as error:
            raise WorkerStartError("the fork server takes no more requests") from error
        except BrokenPipeError as error:
            raise WorkerLost("the fork server is gone") from error
        except OSError as error:
            raise WorkerStartError(
                f"a request of {len(message)} bytes for the fork server: {error}"
            ) from error

    def _on_readable(self) -> None:
        try:
            while received := self._connection.recv(MAX_MESSAGE_BYTES):
                self._on_message(msgpack.decode(received))
        except BlockingIOError:
            return
        except ConnectionResetError:
            pass
        self._on_gone()

    def _on_message(self, message: dict[str, Any]) -> None:
        assert self._loop is not None
        if "ended" in message:
            self._children.pop(message["ended"]).ended.set_result(message["code"])
            return
        reply = self._replies.popleft()
        if "pid" in message:
            child = Child(message["pid"], self._loop.create_future())
            self._children[child.pid] = child
            if reply.cancelled():  # nobody would ever end it
                self.kill(child)
            else:
                reply.set_result(child)
        elif not reply.cancelled():
            reply.set_exception(
                WorkerStartError(f"the fork server could not start it: {message['error']}")
            )

    def _on_gone(self) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self._connection)
        self._connection.close()
        os.waitpid(self.pid, 0)  # it has closed its end, so it is at its last instructions
        self.is_gone.set()
        for reply in self._replies:
            if not reply.done():
                reply.set_exception(WorkerLost("the fork server is gone"))
        for child in self._children.values():
            child.ended.set_result(-signal.SIGKILL)
        self._children.clear()


def exit_text(code: int) -> str:
    """`exit code 1` or `signal 9 (SIGKILL)`, from an exit code as `subprocess` gives it."""
    return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"
