"""A small process that has imported what others need, and forks them on demand. No torch.

    owner: ForkServer ══ socket pair ══ fork server ── fork ──► child, child, …
           spawn, kill  ──►
                        ◄── process id, and the end of each child when it happens

Importing torch and transformers takes seconds, and a fork of a process that has them a fraction of
one. An agent forks workers this way, and a rollout worker its reward processes.

    consumes     requests of its owner: msgpack, one a message, file descriptors beside it
    waits for    a request, the end of a child, or the end of its owner
    unblocked by its owner, or its children

The server is single-threaded, since a fork copies only the forking thread: whatever lock another
thread held would stay locked in the child. For the same reason its owner forks it before it starts
threads itself. What a child may run is an allow-list of names; nobody can name code. Each child
leads a session of its own, and what is left of its process group is killed when it ends. It dies
with the server, and the server with its owner, however that ends.
"""

from __future__ import annotations

import ctypes
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
from typing import Any, NoReturn

from msgspec import msgpack

from areal_sc.errors import ArealError

log = logging.getLogger(__name__)

ENTRIES: Mapping[str, str] = {
    "worker": "areal_sc.workers.entry:run_worker",
    "reward": "areal_sc.workflows.reward_process:run_reward_process",
}
"""What a child may run: name -> module:function(spec: dict) -> exit code."""

PRELOAD = (
    "torch",
    "transformers",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.auto.modeling_auto",
    "areal_sc.workers.entry",
    "areal_sc.workers.train_worker",
    "areal_sc.workers.rollout_worker",
    "areal_sc.engines.fsdp.engine",
    "areal_sc.engines.local.engine",
)
"""What makes workers start fast, where there are no CUDA devices."""

MAX_MESSAGE_BYTES = 1 << 20
MAX_FDS_A_MESSAGE = 16
TERMINATE_GRACE_S = 3.0
"""Between SIGTERM and SIGKILL of the children when the server ends."""
KILL_GRACE_S = 5.0
"""A process that takes longer to die of SIGKILL hangs in the kernel."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def run_server(
    connection: socket.socket,
    parent_pid: int,
    entries: Mapping[str, str],
    preload: Sequence[str],
) -> NoReturn:
    """The process of a server, from the fork to its end.

    Args:
        connection: to the owner; a packet is a message.
        parent_pid: of the owner.
        entries, preload: as in `ForkServer`.
    """
    returncode = 1
    try:
        # not in its owner's process group: a signal to that is the owner's to answer
        os.setpgid(0, 0)
        _die_with(parent_pid)
        # numpy would start a thread of OpenBLAS when it is imported
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        for module_name in preload:
            importlib.import_module(module_name)
        # the preloaded objects live as long as the process: without them, a child's garbage
        # collections do not write to, and so copy, the pages that hold them
        gc.collect()
        gc.freeze()
        _Server(connection, entries).serve()
        returncode = 0
    except BaseException:  # the process's main: what ends it is in its log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(returncode)


class _Server:
    """Serves requests until the connection to the owner ends."""

    def __init__(self, connection: socket.socket, entries: Mapping[str, str]) -> None:
        self._connection = connection
        self._entries = entries
        self._children: set[int] = set()
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def serve(self) -> None:
        """Returns when all children are dead."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # a handler that does nothing, so that the wake-up pipe is written to
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        num_threads = len(os.listdir("/proc/self/task"))
        if num_threads > 1:
            log.warning(
                "threads=%d forking beside other threads can deadlock children", num_threads
            )
        ready = select.poll()
        for file in (self._connection, self._wakeup_read):
            ready.register(file, select.POLLIN)
        try:
            while True:
                readable = {fd for fd, _ in ready.poll()}
                if self._wakeup_read in readable:
                    self._reap()
                if self._connection.fileno() in readable and not self._answer_one():
                    return
        finally:
            self._end_children()

    def _answer_one(self) -> bool:
        """Reads one request and answers it; False when there will be none any more."""
        received, fds, _, _ = socket.recv_fds(
            self._connection, MAX_MESSAGE_BYTES, MAX_FDS_A_MESSAGE
        )
        if not received:
            return False
        request = msgpack.decode(received)
        if "kill" in request:
            self._kill(request["kill"], request["signal"])
            return True
        try:
            self._tell({"pid": self._spawn(request, fds)})
        except OSError as error:
            self._tell({"error": str(error)})
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _tell(self, message: dict[str, Any]) -> None:
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
            self._tell({"ended": ended.si_pid, "code": os.waitstatus_to_exitcode(status)})

    def _kill(self, pid: int, signum: int) -> None:
        """Signals the child's process group; nothing when it is no living child of this server."""
        if pid in self._children:
            try:
                os.killpg(pid, signum)
            except ProcessLookupError:
                os.kill(pid, signum)  # not yet a group leader: it was forked a moment ago

    def _spawn(self, request: dict[str, Any], fds: list[int]) -> int:
        name = request["entry"]
        if name not in self._entries:
            raise OSError(f"unknown entry {name!r}: expected one of {sorted(self._entries)}")
        # all of the request is read before the fork: a child must not fail into the server's loop
        spec = {**request["spec"], "fds": fds} if fds else request["spec"]
        parent_pid = os.getpid()
        output = os.open(
            request["log_path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
            if pid == 0:
                _run_child(self._entries[name], spec, output, parent_pid, self._close)
        finally:
            os.close(output)
        self._children.add(pid)
        return pid

    def _close(self) -> None:
        """In a child: the owner must see the end of the connection when the server dies."""
        self._connection.close()
        os.close(self._wakeup_read)
        os.close(self._wakeup_write)

    def _end_children(self) -> None:
        for signum, grace_s in (
            (signal.SIGTERM, TERMINATE_GRACE_S),
            (signal.SIGKILL, KILL_GRACE_S),
        ):
            for pid in self._children:
                self._kill(pid, signum)
            deadline = time.monotonic() + grace_s
            self._reap()
            while self._children and (left_s := deadline - time.monotonic()) > 0:
                select.select([self._wakeup_read], [], [], left_s)
                self._reap()
        if self._children:
            log.error("pids=%s did not die of SIGKILL", sorted(self._children))


# ---------------------------------------------------------------------- a child's process


def _run_child(
    target: str,
    spec: dict[str, Any],
    output: int,
    parent_pid: int,
    close_server: Callable[[], None],
) -> NoReturn:
    """Runs `target` and ends the process with what that returns; never comes back.

    Args:
        target: module:function(spec) -> exit code.
        output: file descriptor that takes the process's output.
        parent_pid: SIGKILL for this process when that one dies.
        close_server: closes what the parent serves with.
    """
    returncode = 1
    try:
        os.setsid()
        _die_with(parent_pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        close_server()
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
        module_name, _, function_name = target.partition(":")
        function = getattr(importlib.import_module(module_name), function_name)
        returncode = int(function(spec) or 0)
    except SystemExit as request_to_end:
        code = request_to_end.code
        returncode = code if isinstance(code, int) else int(code is not None)
    except ArealError as error:
        traceback.print_exc()
        returncode = error.exit_code
    except BaseException:  # the process's main: what ends it is in its log
        traceback.print_exc()
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(returncode)


def _die_with(parent_pid: int) -> None:
    """SIGKILL for this process when its parent dies, or at once if it already has."""
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the request was made
        os._exit(1)
