"""A small process that has imported what others need, and forks them on demand. No torch.

    owner: ForkServer ══ socket pair ══ fork server ── fork ──► child, child, …
           spawn, kill, go on ──►
                              ◄── process id, and the end of each child when it happens

Importing torch takes seconds, and a fork of a process that has it a fraction of one. An agent forks
workers this way, and a rollout worker its reward processes.

    consumes     requests of its owner: msgpack, one a packet, file descriptors beside it
    waits for    a request, the end of a child, or the end of its owner
    unblocked by its owner, its children, or the clock when its owner is silent for too long

The server is single-threaded, since a fork copies only the forking thread: whatever lock another
thread held would stay locked in the child. For the same reason its owner forks it before it starts
threads itself. Each child leads a session of its own, and what is left of its process group is
killed when it ends. It dies with the server, and the server with its owner, however that ends.
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
from areal_sc.workers.process import die_with, exit_text, name_process

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 1 << 20
MAX_FDS: Final = 16
TERMINATE_GRACE_S: Final = 3.0
"""Between SIGTERM and SIGKILL of the children when the server ends."""
KILL_GRACE_S: Final = 5.0
"""A process that takes longer to die of SIGKILL hangs in the kernel."""


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
        target: what every child runs: `module:function`, imported in the child. It takes the
            child's spec and returns its exit code.
        preload: modules that the server imports before it forks. Requests wait meanwhile.
        silence_limit_s: the server and its children end when their owner has not said `go_on` for
            so long, for example because it is stopped; None: they never do.

    Attributes:
        pid: of the server.
        is_gone: set when the server has ended; its children have ended with it.
    """

    def __init__(
        self,
        target: str,
        preload: Sequence[str] = (),
        *,
        silence_limit_s: float | None = None,
    ) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        owner_pid = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._connection.close()
            _run_server(_Server(theirs, target, silence_limit_s), preload, owner_pid)
        theirs.close()
        self.is_gone = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._one_request = asyncio.Lock()
        self._replies: collections.deque[asyncio.Future[Child]] = collections.deque()
        self._children: dict[int, Child] = {}

    async def spawn(
        self,
        spec: Mapping[str, Any],
        log_path: Path | str,
        *,
        fds: Sequence[int] = (),
        timeout_s: float = 60.0,
    ) -> Child:
        """Forks a process that runs the target with `spec`.

        Args:
            spec: msgpack-able; where `fds` are given it gets their numbers as `spec["fds"]`.
            log_path: file that the process's output is appended to.
            fds: file descriptors that the process gets copies of.
        Raises: WorkerStartError: the server refused, or did not answer. WorkerLost: it is gone.
        """
        try:
            async with asyncio.timeout(timeout_s), self._one_request:
                self._send(["spawn", spec, str(log_path)], fds)
                reply: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
                self._replies.append(reply)
                return await reply
        except TimeoutError:
            raise WorkerStartError(
                f"the fork server did not start a process within {timeout_s:g} s"
            ) from None

    def kill(self, child: Child, signum: int = signal.SIGKILL) -> None:
        """Signals the child's process group; nothing happens when the child has ended."""
        if not child.ended.done():
            with suppress(WorkerLost):
                self._send(["kill", child.pid, int(signum)])

    def go_on(self) -> None:
        """Says that the owner is well; needed several times within `silence_limit_s`."""
        with suppress(WorkerLost, WorkerStartError):  # it has enough to read
            self._send(["go on"])

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
            self._children.pop(pid).ended.set_result(code)
            return
        reply, (value,) = self._replies.popleft(), rest
        if kind == "started":
            child = self._children[value] = Child(value, self._loop.create_future())
            if reply.cancelled():  # nobody would ever end it
                self.kill(child)
            else:
                reply.set_result(child)
        elif not reply.cancelled():
            reply.set_exception(
                WorkerStartError(f"the fork server could not start a process: {value}")
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


# ---------------------------------------------------------------------- the server's process


class _Server:
    """Serves requests until the connection to the owner ends."""

    def __init__(self, connection: socket.socket, target: str, limit_s: float | None) -> None:
        self._connection = connection
        self._target = target
        self._silence_limit_s = limit_s
        self._children: set[int] = set()
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def serve(self) -> None:
        """Returns when all children are dead."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # a handler that does nothing, so that the wake-up pipe is written to
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
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
        limit_s = self._silence_limit_s
        # in parts, so that a pause of the whole machine is not taken for silence
        poll_ms, num_silent = limit_s and limit_s * 1000 / 4, 0
        while num_silent < 4:
            readable = {fd for fd, _ in ready.poll(poll_ms)}
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
        received, fds, _, _ = socket.recv_fds(self._connection, MAX_MESSAGE_BYTES, MAX_FDS)
        if not received:
            return False
        match msgpack.decode(received):
            case ["kill", pid, signum]:
                self._kill(pid, signum)
            case ["spawn", spec, log_path]:
                try:
                    self._tell("started", self._spawn(spec, log_path, fds))
                except OSError as error:
                    self._tell("failed", str(error))
                finally:
                    for fd in fds:
                        os.close(fd)
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

    def _kill(self, pid: int, signum: int) -> None:
        """Signals the child's process group; nothing when it is no living child of this server."""
        if pid in self._children:
            try:
                os.killpg(pid, signum)
            except ProcessLookupError:
                os.kill(pid, signum)  # not yet a group leader: it was forked a moment ago

    def _spawn(self, spec: dict[str, Any], log_path: str, fds: list[int]) -> int:
        # all of the request is read before the fork: a child must not fail into the server's loop
        spec = {**spec, "fds": fds} if fds else spec
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
        graces = {signal.SIGTERM: TERMINATE_GRACE_S, signal.SIGKILL: KILL_GRACE_S}
        for signum, grace_s in graces.items():
            for pid in self._children:
                self._kill(pid, signum)
            deadline = time.monotonic() + grace_s
            while self._children and (left_s := deadline - time.monotonic()) > 0:
                select.select([self._wakeup_read], [], [], left_s)
                self._reap()
        if self._children:
            log.error("pids=%s did not die of SIGKILL", sorted(self._children))


def _run_server(server: _Server, preload: Sequence[str], owner_pid: int) -> NoReturn:
    """The process of a server, from the fork to its end."""

    def run() -> int:
        # not in its owner's process group: a signal to that is the owner's to answer
        os.setpgid(0, 0)
        die_with(owner_pid)
        name_process("forks")
        # numpy would start a thread of OpenBLAS when it is imported
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        gc.disable()  # imports make hardly any garbage, and are a tenth faster so
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
