"""Agents, scripts and programs of ranks are forks of one process that has imported what they need.

Each would import it anew, which takes a core two to five seconds: about as long as all the rest of
a small run. A fork has the arguments, environment, descriptors, folder, limits and session of a
process that is executed, also for who looks at it in /proc; not its parent, umask, ignored signals
and hash seed. What has an environment that could change what is imported is executed, and all that
the process does not fork.

    pytest: `start_script`, `fork_agents` ── a connection a fork ──► `main`, a process of pytest's
    script: `fork_agents`                 ◄── process id, and how it ended
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import IO, Any, Final, NoReturn

ADDRESS: Final = "AREAL_SC_TEST_AGENT_FORKS"
"""Variable of scripts: where they ask for agents. `forked_agent` is on their path then."""

ROOM: Final = "AREAL_SC_TEST_ROOM"
"""Variable of the process, for what is shown of a fork's."""

AFTER_IMPORTS: Final = {
    *(ADDRESS, ROOM, "AREAL_SC_SCRIPT", "AREAL_SC_TEST_RUN", "PYTEST_CURRENT_TEST", "PYTHONPATH"),
    *("TOKENIZERS_PARALLELISM", "MEGATRON_ON_CPU", "PATH", "COLUMNS", "DIE_AT", "SLURM_CONF"),
    *("_", "PWD", "OLDPWD", "SHLVL"),
    *("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "RAY_CLIENT_MODE", "TORCHINDUCTOR_CACHE_DIR"),
}
"""Variables in which a fork may differ from the process: nothing reads them while it imports."""

ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}
"""Variable of the process, as of agents."""

MODULE: Final = "areal_sc.nodes.agent"
MAX_BYTES: Final = 1 << 16
ASKS_WITHIN_S: Final = 10.0
ENDED: Final = b"ended "
TINY_YAML: Final = Path(__file__).with_name("scripts") / "tiny_run.yaml"
TINY_PATHS: Final = ("run_dir=/a/run", "actor.path=/a/model", "task.gate=/a/gate")
LIMITS: Final = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


class Fork:
    """What `subprocess.Popen` is for a process that was executed, as far as it is used here.

    Args:
        address: where `main` listens.
        command: of an agent, or `python FILE ARGUMENT ...`.
        descriptors: its standard input, output and errors.

    Raises: RuntimeError, OSError: a process like this is not forked.
    """

    stdin: IO[bytes] | None = None
    stdout: IO[bytes] | None = None

    def __init__(
        self,
        address: str,
        command: Sequence[str],
        folder: str,
        env: Mapping[str, str],
        descriptors: Sequence[int],
    ) -> None:
        self.returncode: int | None = None
        self._one_looks = threading.Lock()
        self._asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asked.connect(address)
        limits = [(number, resource.getrlimit(number)) for number in LIMITS]
        request = json.dumps([list(command), dict(env), folder, limits]).encode()
        socket.send_fds(self._asked, [request], descriptors)
        told = b""
        with suppress(OSError):  # the process is gone
            told = self._asked.recv(MAX_BYTES)
        self.pid = int(told) if told.isdigit() else 0
        if not self.pid:
            self._asked.close()
            raise RuntimeError

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        self._asked.close()  # who gives it up does not ask how it ended

    def _look(self, timeout_s: float | None) -> int | None:
        with self._one_looks:
            if self.returncode is None:
                ready = select.poll()
                ready.register(self._asked, select.POLLIN)
                if ready.poll(timeout_s and timeout_s * 1000):
                    self.returncode = int(self._asked.recv(MAX_BYTES).removeprefix(ENDED))
                    self._asked.close()
            return self.returncode


def fork_with_pipes(
    address: str, command: Sequence[str], log: IO[bytes], env: Mapping[str, str]
) -> Fork:
    """Its input and output are pipes, as `StartedAgent` has them."""
    stdin, write = os.pipe()
    read, stdout = os.pipe()
    to_it, of_it = open(write, "wb"), open(read, "rb")  # noqa: SIM115
    try:
        with open(stdin), open(stdout):  # its own, which are closed here
            fork = Fork(address, command, os.getcwd(), env, [stdin, stdout, log.fileno()])
    except (RuntimeError, OSError):
        to_it.close()
        of_it.close()
        raise
    fork.stdin, fork.stdout = to_it, of_it
    return fork


def start_script(
    command: Sequence[str], folder: Path, env: dict[str, str], output: IO[bytes]
) -> Fork | subprocess.Popen[bytes]:
    """Starts `python FILE ARGUMENT ...` in a session of its own, with one thread, without input."""
    env = ONE_THREAD | env
    with suppress(RuntimeError, OSError), open(os.devnull) as nothing:
        descriptors = [nothing.fileno(), output.fileno(), output.fileno()]
        return Fork(address_of_forks(), command, str(folder), env, descriptors)
    return subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def start_with_pipes(*words: object) -> Fork | subprocess.Popen[bytes]:
    """Starts `python FILE ARGUMENT ...` with one thread; its input and output are pipes."""
    command = [sys.executable, *map(str, words)]
    with suppress(RuntimeError, OSError), open(2, "wb", closefd=False) as errors:
        return fork_with_pipes(address_of_forks(), command, errors, ONE_THREAD | os.environ)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def end_with_pipes(process: Fork | subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


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
                return fork_with_pipes(address(), command, log, env)
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
            env=ONE_THREAD | AROUND | {ROOM: " " * MAX_BYTES},
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


def main(number: int) -> list[str]:
    """Serves as long as pytest lives; comes back in each fork, where its program would begin.

    Args:
        number: of the descriptor of a socket that listens.

    Returns: the fork's command.
    """
    around = dict(os.environ)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # else there would be threads when it forks
    gc.disable()  # imports make hardly any garbage, and take a quarter less time so
    may_fork = not count_cuda_devices()
    for name in PRELOAD if may_fork else ():
        if callable(found := resolve_name(name)):
            found()
    for name in areal_sc.__all__ if may_fork else ():
        getattr(areal_sc, name)
    if may_fork:
        warm_up()
    set_by_imports = dict(os.environ.items() - around.items())
    gc.collect()
    gc.freeze()
    gc.enable()
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
            is_alike = changed <= AFTER_IMPORTS | set_by_imports.keys()
            if may_fork and is_alike and not is_customized(env.get("PYTHONPATH", "")):
                if (pid := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    become(command, set_by_imports | env, folder, limits, fds)
                    asker.send(str(os.getpid()).encode())
                    for connection in (listener, asker, *askers.values()):
                        connection.close()
                    for fd in (wakeup, woken, *fds):
                        os.close(fd)
                    return command
                askers[pid] = asker
            else:
                with asker, suppress(OSError):  # it may have ended
                    asker.send(b"0")
            for fd in fds:
                os.close(fd)
    os._exit(0)


def warm_up() -> None:
    """Does once what takes each script much of its time, and gives all of them the same.

    The first configuration fills tables of its schema and of its grammar.
    """
    loader.config_text(loader.compose_config(TINY_YAML, TINY_PATHS, areal_sc.GRPOConfig))


def is_customized(path: str) -> bool:
    """Whether a folder of the path has a `sitecustomize`, which Python runs and a fork does not.

    What `forked_agent` has is done by `run_script`.
    """
    own = Path(__file__).with_name("forked_agent")
    folders = {Path(it) for it in path.split(os.pathsep) if it} - {own}
    return any((folder / "sitecustomize.py").exists() for folder in folders)


def ended_children() -> Iterator[tuple[int, int]]:
    """Process id and exit code of each."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def become(
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
    sys.orig_argv[:] = command
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


def run_agent(*arguments: str) -> None:
    """What `python -m` does."""
    sys.argv[1:] = arguments
    del sys.modules[MODULE]  # it becomes the main one
    runpy._run_module_as_main(MODULE)


def run_script(path: str, *arguments: str) -> None:
    """What `python FILE ARGUMENT ...` does."""
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    if ADDRESS in os.environ:
        fork_agents(sys.modules["areal_sc.schedulers.agent_process"], lambda: os.environ[ADDRESS])
    sys.path.insert(0, str(Path(path).parent))
    sys.argv[:] = [path, *arguments]
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = path
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)


def end_after(run: Callable[..., None], arguments: Sequence[str]) -> NoReturn:
    """Ends the process as Python does, without a second for modules that are taken apart."""
    code: Any = 0
    try:
        run(*arguments)
    except SystemExit as end:
        code = end.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
    except Exception:
        code = 1
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0 if code is None else code if isinstance(code, int) else 1)


if __name__ == "__main__":
    import areal_sc
    from areal_sc.config.loading import loader
    from areal_sc.nodes.agent import PRELOAD
    from areal_sc.schedulers.agent_process import AGENT
    from areal_sc.sizing.machine import count_cuda_devices

    words = main(int(sys.argv[1]))
    if tuple(words[: len(AGENT)]) == AGENT:
        end_after(run_agent, words[len(AGENT) :])
    end_after(run_script, words[1:])
