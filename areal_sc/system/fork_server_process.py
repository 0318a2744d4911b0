"""The process of a fork server: it imports what others need, and forks them on demand. No torch.

    consumes     requests of its owner: msgpack, one a packet, file descriptors beside it
    waits for    a request, the end of a child, or the end of its owner
    unblocked by its owner, its children, or the clock when its owner is silent for too long

It is single-threaded, and forked before its owner has threads: a lock that another thread holds
during a fork stays locked in the child.

Nothing that a child has started outlives it, daemons and sessions of their own included. Each child
is the parent of all that its descendants leave, and this process of what an ended child leaves: so
whoever becomes a child here without having been forked here is killed.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final, NoReturn

from msgspec import msgpack

from areal_sc.errors import ArealError
from areal_sc.system.durable import own_file
from areal_sc.system.own_addresses import keep_from_proxies
from areal_sc.system.process import (
    children_of,
    die_with,
    leave_signals_to_script,
    name_process,
    outlive_parent,
)
from areal_sc.system.sandbox.kernel import become_subreaper
from areal_sc.system.stacks import STACKS_SIGNAL

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 1 << 20
KILL_GRACE_S: Final = 5.0
"""A process that takes longer to die of SIGKILL hangs in the kernel."""


class ForkServerProcess:
    """Serves requests until the connection to the owner ends."""

    def __init__(self, connection: socket.socket, target: str) -> None:
        self._connection = connection
        self._target = target
        self._silence_limit_s: float | None = None
        self._children: set[int] = set()
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def serve(self) -> None:
        """Returns when all children are dead."""
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # of a child that does not take it yet
        signal.signal(signal.SIGCHLD, lambda *_: None)  # any, so that the wake-up pipe is written
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        if len(os.listdir("/proc/self/task")) > 1:
            log.warning("the fork server has other threads: its children can deadlock")
        # The connection tells of the owner's end. Killed with it, this process would leave what
        # its children have started.
        outlive_parent()
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
            case ["stacks", pid] if pid in self._children:
                os.kill(pid, STACKS_SIGNAL)
            case ["go on", limit_s]:
                self._silence_limit_s = limit_s
            case ["spawn", spec, log_path]:
                os.set_inheritable(fds[0], False)  # by what the child executes
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

    def _reap(self) -> bool:
        """Buries the dead, and kills what they leave; whether this process has children then."""
        with suppress(BlockingIOError):
            while os.read(self._wakeup_read, 4096):
                pass
        has_ended = False
        try:
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                has_ended = True
                self._bury(ended.si_pid)
        except ChildProcessError:
            return False
        if has_ended:
            self._kill_orphans()
        return True

    def _bury(self, pid: int) -> None:
        if pid in self._children:
            # its number is its group's until it is reaped
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if pid in self._children:
            self._children.discard(pid)
            self._tell("ended", pid, os.waitstatus_to_exitcode(status))

    def _kill_orphans(self) -> None:
        """Their own children become this process's when they end, so their turn comes then."""
        for pid in set(children_of(os.getpid())) - self._children:
            with suppress(ProcessLookupError, PermissionError):  # it may be another user by now
                os.kill(pid, signal.SIGKILL)

    def _kill(self, pid: int) -> None:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(pid, signal.SIGKILL)  # not yet a group leader: it was forked a moment ago

    def _spawn(self, spec: dict[str, Any], log_path: str) -> int:
        server_pid = os.getpid()
        output = own_file(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
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
        leave_signals_to_script()
        os.setsid()
        die_with(server_pid)
        become_subreaper()
        signal.set_wakeup_fd(-1)
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
        faulthandler.register(STACKS_SIGNAL, sys.stderr)
        logging.getLogger().handlers.clear()
        return int(resolve_name(self._target)(spec) or 0)

    def _end_children(self) -> None:
        for pid in self._children:
            self._kill(pid)
        self._kill_orphans()
        deadline = time.monotonic() + KILL_GRACE_S
        while (has_children := self._reap()) and (left_s := deadline - time.monotonic()) > 0:
            select.select([self._wakeup_read], [], [], left_s)
        if has_children:
            log.error("pids=%s did not die of SIGKILL", children_of(os.getpid()))


def run_fork_server(server: ForkServerProcess, preload: Sequence[str], owner_pid: int) -> NoReturn:
    """The main function of the process, a fork of its owner; never comes back.

    Args:
        preload: as in `ForkServer`.
    """

    def run() -> int:
        leave_signals_to_script()
        # not in its owner's process group: a signal to that is the owner's to answer
        os.setpgid(0, 0)
        die_with(owner_pid)
        become_subreaper()
        with suppress(OSError):  # it has no standard error
            os.dup2(2, 1)  # nobody may read what imports print
        name_process("forks")
        # numpy would start a thread of OpenBLAS when it is imported
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        keep_from_proxies()  # workers, and all that they start
        gc.disable()  # imports make hardly any garbage, and take a quarter less time so
        for name in preload:
            found = resolve_name(name)
            if callable(found):
                found()
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
        try:  # handlers and streams may be the user's by now
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(returncode)
