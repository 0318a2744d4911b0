"""A small process that has imported what others need, and forks them on demand. No torch.

    owner: ForkServer ══ socket pair ══ fork server ── fork ──► child, child, …
           spawn, kill, go on ──►
                              ◄── process id, and the end of each child when it happens

Importing torch takes seconds, and a fork of a process that has it a fraction of one. An agent forks
workers this way, and a rollout worker its reward processes.

    consumes     requests of its owner: msgpack, one a packet, file descriptors beside it
    waits for    a request, the end of a child, or the end of its owner
    unblocked by its owner, its children, or the clock when its owner is silent for too long

The server is single-threaded, and forked before its owner has threads: a lock that another thread
holds during a fork stays locked in the child. Each child leads a session of its own, and what is
left of its process group is killed when it ends. It dies with the server, and the server with its
owner, however that ends.
"""

from __future__ import annotations

import asyncio
import collections
import faulthandler
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from msgspec import msgpack

from areal_sc.errors import ArealError, WorkerLost, WorkerStartError
from areal_sc.process import die_with, exit_text, name_process

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 1 << 20
KILL_GRACE_S: Final = 5.0
"""A process that takes longer to die of SIGKILL hangs in the kernel."""


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
        preload: modules that the server imports before it forks. Requests wait meanwhile.

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
            _run_server(_Server(theirs, target), preload, owner_pid)
        theirs.close()
        self.is_gone = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._one_request = asyncio.Lock()
        self._replies: collections.deque[asyncio.Future[int]] = collections.deque()
        self._ends: dict[int, asyncio.Future[int]] = {}  # of each child, by process id

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
        reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        try:
            with theirs:
                async with asyncio.timeout(timeout_s), self._one_request:
                    self._send(["spawn", spec, str(log_path)], [theirs.fileno()])
                    self._replies.append(reply)
                    pid = await asyncio.shield(reply)
            return Child(pid, self._ends[pid], mine)
        except BaseException as error:
            mine.close()
            reply.add_done_callback(self._end_unwanted)
            if not isinstance(error, TimeoutError):
                raise
            raise WorkerStartError(f"no process was forked within {timeout_s:g} s") from None

    def kill(self, child: Child) -> None:
        """Kills the child's process group; nothing happens when the child has ended."""
        if not child.ended.done():
            with suppress(WorkerLost):
                self._send(["kill", child.pid])

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
        reply, (value,) = self._replies.popleft(), rest
        if kind == "started":
            self._ends[value] = self._loop.create_future()
            reply.set_result(value)
        else:
            reply.set_exception(WorkerStartError(f"no process was forked: {value}"))

    def _end_unwanted(self, reply: asyncio.Future[int]) -> None:
        """Who asked for a process is gone, and would never end it."""
        if reply.exception() is None:
            with suppress(WorkerLost):
                self._send(["kill", reply.result()])

    def _on_gone(self) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self._connection)
        self._connection.close()
        os.waitpid(self.pid, 0)  # it has closed its end, so it is at its last instructions
        self.is_gone.set()
        for reply in self._replies:
            reply.set_exception(WorkerLost("the fork server is gone"))
        for ended in self._ends.values():
            ended.set_result(-signal.SIGKILL)
        self._ends.clear()


# ---------------------------------------------------------------------- the server's process


class _Server:
    """Serves requests until the connection to the owner ends."""

    def __init__(self, connection: socket.socket, target: str) -> None:
        self._connection = connection
        self._target = target
        self._silence_limit_s: float | None = None
        self._children: set[int] = set()
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def serve(self) -> None:
        """Returns when all children are dead."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # any, so that the wake-up pipe is written
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        if len(os.listdir("/proc/self/task")) > 1:
            log.warning("the fork server has other threads: its children can deadlock")
        try:
            self._serve_requests()
        finally:
            self._end_children()

    def _serve_requests(self) -> None:
        ready = select.poll()
        for file in (self._connection, self._wakeup_read):
            ready.register(file, select.POLLIN)
        num_silent = 0  # waits: a pause of the whole machine is not taken for silence
        while num_silent < 4:
            limit_s = self._silence_limit_s
            readable = {fd for fd, _ in ready.poll(limit_s and limit_s * 1000 / 4)}
            if self._wakeup_read in readable:
                self._reap()
            if self._connection.fileno() in readable:
                num_silent = 0
                if not self._answer_one():
                    return
            elif not readable:
                num_silent += 1
        log.error("its owner was silent for %g s; the fork server ends", limit_s)
        os.kill(os.getppid(), signal.SIGCONT)  # if it was stopped: it has to clean up

    def _answer_one(self) -> bool:
        """Reads one request and answers it; False when there will be none any more."""
        received, fds, _, _ = socket.recv_fds(self._connection, MAX_MESSAGE_BYTES, 1)
        if not received:
            return False
        match msgpack.decode(received):
            case ["kill", pid] if pid in self._children:
                self._kill(pid)
            case ["go on", limit_s]:
                self._silence_limit_s = limit_s
            case ["spawn", spec, log_path]:
                try:
                    self._tell("started", self._spawn({**spec, "fd": fds[0]}, log_path))
                except OSError as error:
                    self._tell("failed", str(error))
                finally:
                    os.close(fds[0])
        return True

    def _tell(self, *message: Any) -> None:
        with suppress(ConnectionError):  # the owner is gone: the next read says so
            self._connection.send(msgpack.encode(message))

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._wakeup_read, 4096):
                pass
        while self._children:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            # its number is its group's until it is reaped
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            self._children.discard(ended.si_pid)
            self._tell("ended", ended.si_pid, os.waitstatus_to_exitcode(status))

    def _kill(self, pid: int) -> None:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(pid, signal.SIGKILL)  # not yet a group leader: it was forked a moment ago

    def _spawn(self, spec: dict[str, Any], log_path: str) -> int:
        server_pid = os.getpid()
        output = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
            if pid == 0:
                name_process("/".join(Path(log_path).stem.rsplit("-", 1)))  # rollout-0.log
                _end_with(lambda: self._run_child(spec, output, server_pid))
        finally:
            os.close(output)
        self._children.add(pid)
        return pid

    def _run_child(self, spec: dict[str, Any], output: int, server_pid: int) -> int:
        """The process of a child; returns its exit code."""
        os.setsid()
        die_with(server_pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._connection.close()  # the owner must see its end when the server dies
        os.close(self._wakeup_read)
        os.close(self._wakeup_write)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(null)
        # whatever stood in their place here, the child writes to its own log, line by line
        sys.stdout, sys.stderr = (
            open(fd, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
            for fd in (1, 2)
        )
        faulthandler.enable(sys.stderr)
        logging.getLogger().handlers.clear()
        module_name, _, function_name = self._target.partition(":")
        return int(getattr(importlib.import_module(module_name), function_name)(spec) or 0)

    def _end_children(self) -> None:
        for pid in self._children:
            self._kill(pid)
        deadline = time.monotonic() + KILL_GRACE_S
        while self._children and (left_s := deadline - time.monotonic()) > 0:
            select.select([self._wakeup_read], [], [], left_s)
            self._reap()
        if self._children:
            log.error("pids=%s did not die of SIGKILL", sorted(self._children))


def _run_server(server: _Server, preload: Sequence[str], owner_pid: int) -> NoReturn:
    def run() -> int:
        # not in its owner's process group: a signal to that is the owner's to answer
        os.setpgid(0, 0)
        die_with(owner_pid)
        name_process("forks")
        # numpy would start a thread of OpenBLAS when it is imported
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        gc.disable()  # imports make hardly any garbage, and take a quarter less time so
        for module_name in preload:
            importlib.import_module(module_name)
        # else a child's garbage collections write to, and so copy, the pages of all that is there
        gc.freeze()
        gc.enable()
        server.serve()
        return 0

    _end_with(run)


def _end_with(main: Callable[[], int]) -> NoReturn:
    """Ends this process, a fork, with the exit code that `main` returns; never comes back."""
    returncode = 1
    try:
        returncode = main()
    except SystemExit as end:
        returncode = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # the process's main: what ends it is in its log
        traceback.print_exc()
        returncode = error.exit_code if isinstance(error, ArealError) else 1
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(returncode)
