"""Agents of this machine are forks of one process that has imported what their workers need.

Each agent's fork server would import it anew, which takes a core four seconds: about as long as
all the rest of a small run. A fork has the arguments, environment, descriptors, folder, limits and
session of an agent that is executed, also for who looks at it in /proc; not its parent, umask,
ignored signals and hash seed. Agents whose environment could change what is imported are executed,
and each that the process does not fork.

    pytest, script: `fork_agents` ── a connection an agent ──► `main`, one process of pytest's
                                  ◄── process id, and how it ended
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import logging
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, Any, Final

ADDRESS: Final = "AREAL_SC_TEST_AGENT_FORKS"
"""Variable of scripts: where they ask for agents. `forked_agent` is on their path then."""

ROOM: Final = "AREAL_SC_TEST_ROOM"
"""Variable of the process, for what is shown of an agent's."""

AFTER_IMPORTS: Final = {
    *(ADDRESS, ROOM, "AREAL_SC_SCRIPT", "AREAL_SC_TEST_RUN", "PYTEST_CURRENT_TEST", "PYTHONPATH"),
    *("TOKENIZERS_PARALLELISM", "MEGATRON_ON_CPU", "PATH", "COLUMNS", "DIE_AT"),
    *("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "RAY_CLIENT_MODE", "TORCHINDUCTOR_CACHE_DIR"),
}
"""Variables in which an agent may differ from the process: nothing reads them while it imports."""

MODULE: Final = "areal_sc.nodes.agent"
MAX_BYTES: Final = 1 << 16
ASKS_WITHIN_S: Final = 10.0
ENDED: Final = b"ended "
LIMITS: Final = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


class ForkedAgent:
    """What `subprocess.Popen` is for an agent that was executed, as far as `StartedAgent` uses it.

    Raises: RuntimeError: an agent like this is not forked.
    """

    def __init__(
        self, address: str, command: Sequence[str], log: IO[bytes], env: Mapping[str, str]
    ) -> None:
        self.returncode: int | None = None
        self._one_looks = threading.Lock()
        self._asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asked.connect(address)
        limits = [(number, resource.getrlimit(number)) for number in LIMITS]
        request = json.dumps([list(command), dict(env), os.getcwd(), limits]).encode()
        stdin, write = os.pipe()
        read, stdout = os.pipe()
        self.stdin, self.stdout = open(write, "wb"), open(read, "rb")  # noqa: SIM115
        with open(stdin), open(stdout):  # theirs, which are closed here
            socket.send_fds(self._asked, [request], [stdin, stdout, log.fileno()])
        told = b""
        with suppress(OSError):  # the process is gone
            told = self._asked.recv(MAX_BYTES)
        self.pid = int(told) if told.isdigit() else 0
        if not self.pid:
            self.stdin.close()
            self.stdout.close()
            self._asked.close()
            raise RuntimeError

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(MODULE, timeout or 0.0)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        self._asked.close()  # who gives the agent up does not ask how it ended

    def _look(self, timeout_s: float | None) -> int | None:
        with self._one_looks:
            if self.returncode is None:
                ready = select.poll()
                ready.register(self._asked, select.POLLIN)
                if ready.poll(timeout_s and timeout_s * 1000):
                    self.returncode = int(self._asked.recv(MAX_BYTES).removeprefix(ENDED))
                    self._asked.close()
            return self.returncode


def fork_agents(agent_process: Any, address: Any) -> None:
    """Has the module `areal_sc.schedulers.agent_process` fork agents.

    Args:
        address: called for where `main` listens.
    """
    execute = agent_process.start_beside

    def start_beside(
        command: Sequence[str], log_path: Path, env: Mapping[str, str], stdout: int | None = None
    ) -> Any:
        if tuple(command[:-2]) == agent_process.AGENT:
            with (
                suppress(RuntimeError, OSError),
                open(log_path, "ab", opener=agent_process.own_file) as log,
            ):
                return ForkedAgent(address(), command, log, env)
        return execute(command, log_path, env, stdout)

    agent_process.start_beside = start_beside


AROUND: dict[str, str] = {}
"""Environment of the process: that of all tests, before one of them has changed it."""


@cache
def address_of_forks() -> str:
    """Where the process of this one listens, which begins to import when it is first wanted."""
    folder = tempfile.TemporaryDirectory(prefix="agent-forks-")
    address = f"{folder.name}/socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(listener.fileno()), " " * MAX_BYTES],
            stdin=subprocess.PIPE,
            env={"OMP_NUM_THREADS": "1", **AROUND, ROOM: " " * MAX_BYTES},
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    for at_the_end in (folder.cleanup, process.wait, process.terminate):  # the last one first
        atexit.register(at_the_end)
    return address


def environment_of_scripts() -> dict[str, str]:
    """The environment with which a script forks its agents."""
    paths = [str(Path(__file__).with_name("forked_agent")), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        ADDRESS: address_of_forks(),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


def main(number: int) -> None:
    """Serves as long as pytest lives; comes back in each agent, where `python -m` would begin.

    Args:
        number: of the descriptor of a socket that listens.
    """
    around = dict(os.environ)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # else there would be threads when it forks
    may_fork = not count_cuda_devices()
    for name in PRELOAD if may_fork else ():
        if callable(found := resolve_name(name)):
            found()
    set_by_imports = dict(os.environ.items() - around.items())
    gc.collect()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1
    wakeup, woken = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    askers: dict[int, socket.socket] = {}
    listener = socket.socket(fileno=number)
    ready = select.poll()
    for fd in (0, wakeup, number):
        ready.register(fd, select.POLLIN)
    while 0 not in (readable := {fd for fd, _ in ready.poll()}):
        if wakeup in readable:
            os.read(wakeup, MAX_BYTES)
            for pid, code in ended_children():
                with askers.pop(pid) as asker, suppress(OSError):  # it may have ended
                    asker.send(ENDED + str(code).encode())
        if number in readable:
            asker, _ = listener.accept()
            asker.settimeout(ASKS_WITHIN_S)
            fds: list[int] = []
            try:
                request, fds, _, _ = socket.recv_fds(asker, MAX_BYTES, 3)
                command, env, folder, limits = json.loads(request)
            except (OSError, ValueError):  # it was killed or stopped, or asks for too much
                command, env, folder, limits = [], {}, "", []  # nothing is forked for it
            changed = {name for name, _ in env.items() ^ around.items()}
            if may_fork and changed <= AFTER_IMPORTS | set_by_imports.keys():
                if (pid := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    become_agent(command, set_by_imports | env, folder, limits, fds)
                    asker.send(str(os.getpid()).encode())
                    for connection in (listener, asker, *askers.values()):
                        connection.close()
                    for fd in (wakeup, woken, *fds):
                        os.close(fd)
                    return
                askers[pid] = asker
            else:
                with asker, suppress(OSError):  # it may have ended
                    asker.send(b"0")
            for fd in fds:
                os.close(fd)
    os._exit(0)


def ended_children() -> Iterator[tuple[int, int]]:
    """Process id and exit code of each."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def become_agent(
    command: list[str],
    env: dict[str, str],
    folder: str,
    limits: list[tuple[int, tuple[int, int]]],
    fds: list[int],
) -> None:
    """Makes a fork what a new process of this command would be."""
    os.setsid()
    for place, fd in enumerate(fds):
        os.dup2(fd, place)
    for number, limit in limits:
        resource.setrlimit(number, limit)
    os.chdir(folder)
    paths = [os.environ.get("PYTHONPATH", ""), env.get("PYTHONPATH", "")]
    before, now = (list(filter(None, path.split(os.pathsep))) for path in paths)
    sys.path[:] = now + [path for path in sys.path if path not in before]
    sys.argv[1:] = command[len(AGENT) :]
    sys.modules["torch"].seed()
    sys.modules["numpy"].random.seed()
    os.environ.clear()  # the C library's copies are on its heap from now on
    os.environ.update(env)
    first_argument, end_of_arguments, first_variable, end_of_variables = map(
        int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]
    )
    for texts, start, end in (
        (command, first_argument, end_of_arguments),
        ([f"{name}={value}" for name, value in env.items()], first_variable, end_of_variables),
    ):
        shown = b"".join(text.encode() + b"\0" for text in texts)
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, shown, min(len(shown), end - start))


if __name__ == "__main__":
    from areal_sc.nodes.agent import PRELOAD
    from areal_sc.schedulers.agent_process import AGENT
    from areal_sc.sizing.machine import count_cuda_devices

    main(int(sys.argv[1]))
    del sys.modules[MODULE]  # it becomes the main one
    try:
        runpy._run_module_as_main(MODULE)
    except SystemExit as end:
        logging.shutdown()
        os._exit(end.code if isinstance(end.code, int) else end.code is not None)
