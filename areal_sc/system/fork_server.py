"""A small process that has imported what others need, and forks them on demand. No torch.

    owner: ForkServer ══ socket pair ══ fork server ── fork ──► child, child, …
           spawn, kill, stacks, go on ──►
                              ◄── process id, and the end of each child when it happens

Importing torch takes seconds, and a fork of a process that has it a fraction of one. An agent forks
workers this way, and a rollout worker its reward processes.

    consumes     replies of the server, and its news of the ends of children
    waits for    a reply, with a limit
    unblocked by the server, or its end

A child dies with the server, and the server with its owner, however that ends; with a child dies
all that it has started. This is the owner's
side; `fork_server_process` is the server's.
"""

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
from areal_sc.system.fork_server_process import (
    KILL_GRACE_S,
    MAX_MESSAGE_BYTES,
    ForkServerProcess,
    run_fork_server,
)
from areal_sc.system.process import exit_text
from areal_sc.system.stacks import written_stacks


@dataclass(eq=False)
class Child:
    """A process that the server has forked.

    Attributes:
        ended: its exit code, as `subprocess` gives it, once it has ended.
        connection: to the process, not blocking; who has asked for the process closes it.
    """

    pid: int
    ended: asyncio.Future[int]
    connection: socket.socket

    @property
    def how(self) -> str:
        """`exit code 1` or `signal 9 (SIGKILL)`."""
        return exit_text(self.ended.result()) if self.ended.done() else "unknown exit status"


class ForkServer:
    """A fork server of this process's own, which must not have threads yet. Used from one loop.

    Args:
        target: what every child runs: `module:function`, from its spec to its exit code.
        preload: modules that the server imports before it forks, and functions that it calls
            then, as `module:function`. Requests wait meanwhile.

    Attributes:
        pid: of the server.
        is_gone: set when the server has ended; its children have ended with it.
    """

    def __init__(self, target: str, preload: Sequence[str] = ()) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        owner_pid = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._connection.close()
            run_fork_server(ForkServerProcess(theirs, target), preload, owner_pid)
        theirs.close()
        self.is_gone = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._one_request = asyncio.Lock()
        # with the connection to the child that is asked for
        self._replies = collections.deque[tuple[asyncio.Future[Child], socket.socket]]()
        self._ends: dict[int, asyncio.Future[int]] = {}  # of each child, by process id
        self._has_forked = False

    async def spawn(
        self,
        spec: Mapping[str, Any],
        log_path: Path | str,
        *,
        kind: socket.SocketKind = socket.SOCK_STREAM,
        timeout_s: float = 60.0,
    ) -> Child:
        """Forks a process that runs the target with `spec`.

        Args:
            spec: msgpack-able; the target gets its end of the connection as `spec["fd"]`.
            log_path: file that the process's output is appended to.
            kind: of the connection.
        Raises: WorkerStartError: the server refused, or did not answer. WorkerLost: it is gone.
        """
        mine, theirs = socket.socketpair(socket.AF_UNIX, kind)
        mine.setblocking(False)
        reply: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        try:
            with theirs:
                async with asyncio.timeout(timeout_s), self._one_request:
                    self._send(["spawn", spec, str(log_path)], [theirs.fileno()])
                    self._replies.append((reply, mine))
                    return await asyncio.shield(reply)
        except BaseException as error:
            mine.close()
            reply.add_done_callback(self._end_unwanted)
            if not isinstance(error, TimeoutError):
                raise
            raise WorkerStartError(f"no process was forked within {timeout_s:g} s") from None

    def kill(self, child: Child) -> None:
        """Kills the child, and all that it has started; nothing happens when it has ended."""
        if not child.ended.done():
            with suppress(WorkerLost):
                self._send(["kill", child.pid])

    async def stacks(self, child: Child, log_path: Path | str) -> list[str]:
        """Where the child's threads are, as it writes it to its log; see `written_stacks`."""
        with suppress(WorkerLost, WorkerStartError):
            return await written_stacks(log_path, lambda: self._send(["stacks", child.pid]))
        return []

    def go_on(self, limit_s: float) -> None:
        """Says that the owner is well.

        The server and its children end if it does not say so again within the limit, for example
        because it is stopped.
        """
        with suppress(WorkerLost, WorkerStartError):  # it has enough to read
            self._send(["go on", limit_s])

    async def wait_until_gone(self) -> None:
        """Returns when the server has ended, whoever ended it."""
        self._attach()
        await self.is_gone.wait()

    async def close(self) -> None:
        """Ends the server and all its children, by force if need be."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)  # the server ends when it has read all
        self._attach()
        if not (self._has_forked or self._replies or self.is_gone.is_set()):
            os.kill(self.pid, signal.SIGKILL)  # there is nobody to end; it may still import
        try:
            async with asyncio.timeout(2 * KILL_GRACE_S):
                await self.is_gone.wait()
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)  # and with it its children
            await self.is_gone.wait()

    def _attach(self) -> None:
        """Begins to listen to the server, on the event loop that runs now."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._connection, self._on_readable)

    def _send(self, request: list[Any], fds: Sequence[int] = ()) -> None:
        self._attach()
        message = msgpack.encode(request)
        try:
            if self.is_gone.is_set():
                raise BrokenPipeError
            socket.send_fds(self._connection, [message], list(fds))
        except BrokenPipeError as error:
            raise WorkerLost("the fork server is gone") from error
        except OSError as error:
            raise WorkerStartError(
                f"a request of {len(message)} bytes for the fork server: {error}"
            ) from error

    def _on_readable(self) -> None:
        try:
            while received := self._connection.recv(MAX_MESSAGE_BYTES):
                self._on_message(*msgpack.decode(received))
        except BlockingIOError:
            return
        except ConnectionResetError:
            pass
        self._on_gone()

    def _on_message(self, kind: str, *rest: Any) -> None:
        assert self._loop is not None
        if kind == "ended":
            pid, code = rest
            self._ends.pop(pid).set_result(code)
            return
        (reply, connection), (value,) = self._replies.popleft(), rest
        if kind == "started":
            self._has_forked = True  # what an ended child has left may still have to be killed
            self._ends[value] = self._loop.create_future()
            # its end may be read before the reply is taken
            reply.set_result(Child(value, self._ends[value], connection))
        else:
            reply.set_exception(WorkerStartError(f"no process was forked: {value}"))

    def _end_unwanted(self, reply: asyncio.Future[Child]) -> None:
        """Kills a forked process: whoever asked for it is gone, and would never end it."""
        if reply.exception() is None:
            with suppress(WorkerLost):
                self._send(["kill", reply.result().pid])

    def _on_gone(self) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self._connection)
        self._connection.close()
        os.waitpid(self.pid, 0)  # it has closed its end, so it is at its last instructions
        self.is_gone.set()
        for reply, _ in self._replies:
            reply.set_exception(WorkerLost("the fork server is gone"))
        for ended in self._ends.values():
            ended.set_result(-signal.SIGKILL)
        self._ends.clear()
