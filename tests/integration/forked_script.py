"""A user's script, and its first agent, as forks of a server that has imported what workers need.

    test ══ multiprocessing's fork server ── fork ──► script ── fork ──► its first agent

Some hundred tests run a script. Each of its agents imports torch and transformers for its workers,
which takes seconds of a core. Here script and first agent begin with the imports done. All else is
as after `exec`: sessions, files, variables, paths, arguments, exit codes. Only what `/proc` shows
of their arguments and variables is the server's: a test of that takes `is_forked=False`.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from areal_sc.nodes.agent import PRELOAD

MARK = "AREAL_SC_TEST_RUN"
"""The variable that all processes of a run have in their environment."""
NO_MARK = "0" * 36
_MAX_BYTES = 1 << 20
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["areal_sc.nodes.agent", *(name for name in PRELOAD if ":" not in name)]
)


class ForkedScript:
    """Has of `subprocess.Popen` what a test uses.

    Args:
        command: script and arguments.
        mark: of `NO_MARK`'s length, for `MARK`.
    """

    def __init__(
        self, command: Sequence[str], cwd: Path, env: Mapping[str, str], output: Path, mark: str
    ) -> None:
        _start_server()
        arguments = (command, str(cwd), dict(env), str(output), mark, interpreter_path())
        self._process = _context.Process(target=_run_script, args=arguments)
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("the script", timeout_s)
        return self._process.exitcode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)


@cache
def _start_server() -> None:
    """The number of threads is read when torch is loaded, the mark's place is made by `exec`."""
    threads = {"OMP_NUM_THREADS": "1", MARK: NO_MARK}
    before = dict(os.environ)
    os.environ.update(threads)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


@cache
def interpreter_path() -> list[str]:
    """`sys.path` of an interpreter, without a script's folder and PYTHONPATH."""
    command = [sys.executable, "-I", "-c", "import json, sys; print(json.dumps(sys.path))"]
    found: list[str] = json.loads(subprocess.check_output(command))
    return found


def _run_script(
    command: Sequence[str],
    cwd: str,
    env: Mapping[str, str],
    output: str,
    mark: str,
    path: Sequence[str],
) -> None:
    script, log = command[0], os.open(output, os.O_WRONLY | os.O_APPEND)
    _begin_anew(os.open(os.devnull, os.O_RDONLY), log, log, env)
    os.chdir(cwd)
    show_mark(mark)
    SpareAgent.prepare(path)
    sys.argv[:] = command
    sys.orig_argv[:] = [sys.executable, *command]
    sys.path[:] = [str(Path(script).parent), *_added_path(env), *path]
    _end_with(lambda: runpy.run_path(script, run_name="__main__"))


def _begin_anew(stdin: int, stdout: int, stderr: int, env: Mapping[str, str]) -> None:
    """Has these files alone, these variables, and a session of its own."""
    os.setsid()
    for place, fd in enumerate((stdin, stdout, stderr)):
        os.dup2(fd, place)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.clear()
    os.environ.update(env)


def _added_path(env: Mapping[str, str]) -> list[str]:
    return [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _end_with(main: Callable[[], Any]) -> None:
    """Runs it, and ends this process as the interpreter does after a script."""
    code: Any = 0
    try:
        main()
    except SystemExit as ending:
        code = ending.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def show_mark(mark: str) -> None:
    """Other processes read of this one's variables those that it was started with: writes there."""
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47])
    initial = Path("/proc/self/environ").read_bytes()
    place = start + initial.index(f"{MARK}={NO_MARK}".encode()) + len(MARK) + 1
    ctypes.memmove(place, mark.encode(), len(mark))


class SpareAgent:
    """A child of the script that waits to become its first agent; it ends with the script."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._connection = connection

    @classmethod
    def prepare(cls, path: Sequence[str]) -> None:
        """Forks it, and has `Popen` use it. The process must not have threads yet."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            mine.close()
            cls._wait(theirs, path)
        theirs.close()
        ForkingPopen.spare = cls(pid, mine)
        subprocess.Popen = ForkingPopen  # type: ignore[misc]

    @staticmethod
    def _wait(connection: socket.socket, path: Sequence[str]) -> None:
        """Runs the agent's main when the script asks for it."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the script
        message, fds, _, _ = socket.recv_fds(connection, _MAX_BYTES, 3)
        if not message:
            os._exit(0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        arguments, env = json.loads(message)
        _begin_anew(*fds, env)
        sys.modules["__main__"] = types.ModuleType("__main__")
        sys.path[:] = [*_added_path(env), *path]
        from areal_sc.nodes import agent
        from areal_sc.schedulers.agent_process import AGENT

        sys.argv[:] = ["agent", *arguments]
        sys.orig_argv[:] = [*AGENT, *arguments]
        _end_with(lambda: sys.exit(agent.main()))

    def become(self, arguments: Sequence[str], env: Mapping[str, str], fds: Sequence[int]) -> bool:
        """Whether it is the agent now."""
        try:
            with self._connection:
                message = json.dumps([arguments, dict(env)]).encode()
                socket.send_fds(self._connection, [message], fds)
        except OSError:
            return False
        return True


class ForkingPopen(subprocess.Popen[Any]):
    """The first agent is the spare process; all else is started as ever."""

    spare: SpareAgent | None = None

    def _execute_child(self, args: Any, executable: Any, *rest: Any) -> None:
        from areal_sc.schedulers.agent_process import AGENT

        env = rest[4]
        stdin, to_stdin, from_stdout, stdout, from_stderr, stderr = rest[8:14]
        spare = ForkingPopen.spare
        if spare is not None and isinstance(args, list | tuple) and (*args[: len(AGENT)],) == AGENT:
            ForkingPopen.spare = None
            if spare.become(args[len(AGENT) :], env, (stdin, stdout, stderr)):
                self.pid = spare.pid
                self._child_created = True
                self._close_pipe_fds(  # type: ignore[attr-defined]
                    stdin, to_stdin, from_stdout, stdout, from_stderr, stderr
                )
                return
        super()._execute_child(args, executable, *rest)  # type: ignore[misc]
