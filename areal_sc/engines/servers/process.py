"""A server process: started in a session of its own, awaited, and ended with all its children.

Its HTTP process leads the session, the schedulers compute. Whether a scheduler still does anything
can be seen in /proc when it does not answer.

    consumes     nothing; its requests go over HTTP
    waits for    readiness, bounded by `start_timeout_s`; its end, bounded by `stop_timeout_s`
    unblocked by its health, the process's exit, or the clock

It cannot outlive this process: the kernel kills it with the thread that started it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from subprocess import PIPE, STDOUT

from areal_sc.engines.servers import launcher
from areal_sc.engines.servers.client import ServerClient
from areal_sc.engines.servers.handle import LOOPBACK, ServerInstance, ServersHandle
from areal_sc.errors import ConfigError, PeerLost, RpcTimeout, ServerBusy, WorkerStartError
from areal_sc.sizing.model_folder import check_model_folder
from areal_sc.system.own_addresses import keep_from_proxies
from areal_sc.transport.shards.memory_folder import SHARED_MEMORY

logger = logging.getLogger(__name__)

LOG_TAIL_LINES = 30
_READY_POLL_S = 0.25
_HEALTH_TIMEOUT_S = 30.0
_PROC = Path("/proc")
_MAPPED_PATH = re.compile(r" (/\S+)$", re.MULTILINE)
"""Path at the end of a line in a process's memory map."""
_STOPPED_STATES = ("T", "t")  # by a signal, by a debugger
_ENDED_STATES = ("Z", "X")


class ServerProcess:
    """One running server.

    Attributes:
        pid: of its HTTP process, which leads its session.
        schedulers: process ids of those that compute; known once it is ready.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        handle: ServersHandle,
        instance: ServerInstance,
        log_path: Path,
        log_begin: int,
    ) -> None:
        self.url = f"http://{LOOPBACK}:{instance.port}"
        self.api_key = instance.api_key
        self.pid = process.pid
        self.schedulers: list[int] = []
        self._handle = handle
        self._port = instance.port
        self._log_path = log_path
        self._log_begin = log_begin  # bytes of earlier lives in it
        self._process = process
        self._left_files: set[Path] = set()

    @classmethod
    async def start(
        cls, handle: ServersHandle, instance: ServerInstance, log_path: Path
    ) -> ServerProcess:
        """Must be called in a thread that lives as long as the server shall.

        Raises: ModelError, ConfigError: the folder or an argument cannot be.
        """
        check_model_folder(handle.config.path)
        start = {
            "parent_pid": os.getpid(),
            "module": handle.module,
            "arguments": handle.arguments(instance),
        }
        log_path.parent.mkdir(exist_ok=True)  # not a run folder that was moved away
        # Its owner's alone: servers print their arguments, the key among them.
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        log_begin = os.fstat(log).st_size
        try:
            process = await asyncio.create_subprocess_exec(
                handle.program.python or sys.executable,
                str(Path(launcher.__file__)),
                stdin=PIPE,
                stdout=log,
                stderr=STDOUT,
                start_new_session=True,
                env=server_environment(handle, instance),
            )
        except OSError as error:
            raise ConfigError(f"{handle.section}.python cannot be run: {error}") from error
        finally:
            os.close(log)
        assert process.stdin
        process.stdin.write(json.dumps(start).encode())
        process.stdin.close()
        server = cls(process, handle, instance, log_path, log_begin)
        logger.info("server=%s pid=%d log=%s", server.url, server.pid, log_path)
        return server

    async def wait_ready(self, client: ServerClient, timeout_s: float) -> None:
        """Returns when the server generates.

        Raises: ConfigError, WorkerStartError: it ended, or cannot listen, or was not ready in time;
            with the end of its log.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._process.returncode is None:
            if loop.time() >= deadline:
                raise self._start_error(f"was not ready within start_timeout_s={timeout_s:g}")
            try:
                await client.check_health(timeout_s=_HEALTH_TIMEOUT_S)
            except (PeerLost, RpcTimeout, ServerBusy) as error:  # not listening, or still loading
                if self._has_lost_port():  # it may never end by itself
                    raise self._start_error("cannot listen there") from error
                await asyncio.sleep(_READY_POLL_S)
            else:
                self.schedulers = find_by_title(self.pid, self._handle.scheduler_title)
                self._left_files = mapped_files(self.pid, self._handle.session_files)
                return
        code = self._process.returncode
        raise self._start_error(f"ended with exit code {code} before it was ready")

    async def wait(self) -> int:
        """The exit code of the HTTP process."""
        return await self._process.wait()

    async def stop(self) -> None:
        """Asks it to end, and kills what is left after `stop_timeout_s`."""
        if self._process.returncode is None:
            self._process.send_signal(launcher.END_SIGNAL)
            try:
                async with asyncio.timeout(self._handle.servers.stop_timeout_s):
                    await self._process.wait()
            except TimeoutError:
                logger.info("server=%s killed: it did not end by itself", self.url)
        await self.kill()

    async def kill(self) -> None:
        """Kills the whole session, reaps its leader, and deletes its files in shared memory."""
        left = self._left_files | mapped_files(self.pid, self._handle.session_files)
        kill_session(self.pid)
        await self._process.wait()
        for path in left:
            path.unlink(missing_ok=True)

    def _log_tail(self) -> list[str]:
        with self._log_path.open("rb") as log:
            log.seek(self._log_begin)
            last = deque((line.decode(errors="replace") for line in log), LOG_TAIL_LINES)
        # without its key, which is among its arguments
        return [line.rstrip("\n").replace(self.api_key, "***") for line in last]

    def _has_lost_port(self) -> bool:
        """Whether the log says that another process had the port when this one wanted to listen."""
        told = rf"bind on address \(.*\b{self._port}\b.*\): address already in use"
        return any(re.search(told, line) for line in self._log_tail())

    def _start_error(self, what: str) -> WorkerStartError | ConfigError:
        tail = self._log_tail()
        section, python = self._handle.section, self._handle.program.python or sys.executable
        if self._process.returncode == launcher.NOT_INSTALLED:
            return ConfigError(
                f"{self._handle.name} is not installed for {section}.python={python!r}: "
                "install it there, or name the interpreter of the environment that has it"
            )
        return WorkerStartError(
            f"the {self._handle.name} server at {self.url} {what}; its log "
            f"{self._log_path} ends with:\n" + "\n".join(tail),
            log_path=str(self._log_path),
            log_tail=tail,
        )


def server_environment(handle: ServersHandle, instance: ServerInstance) -> dict[str, str]:
    """This process's environment, with what the server needs and what the user added."""
    environment = os.environ | handle.environment(instance)
    if not instance.is_cuda:
        environment.setdefault("OMP_NUM_THREADS", "1")
    environment |= handle.servers.environment
    # some servers ask themselves for a first answer
    keep_from_proxies(LOOPBACK, environment=environment)
    return environment


def free_port() -> int:
    """A port that nothing listens on at this moment."""
    with socket.create_server((LOOPBACK, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class ProcessState:
    """One look at one process.

    Attributes:
        session: process id of the session's leader.
        cpu_ticks: user and system time that it has used.
    """

    session: int
    cpu_ticks: int
    is_stopped: bool


def read_process(pid: int) -> ProcessState | None:
    """The process's state now, or None when there is none, or only what its parent must reap."""
    # the name stands in parentheses and may hold anything
    fields = _read(pid, "stat").rpartition(")")[2].split()
    if not fields or fields[0] in _ENDED_STATES:
        return None
    return ProcessState(
        session=int(fields[3]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        is_stopped=fields[0] in _STOPPED_STATES,
    )


def session_members(session: int) -> list[int]:
    """Process ids of a session; those that ended and are not reaped are left out."""
    pids = [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
    states = {pid: read_process(pid) for pid in pids}
    return [pid for pid, state in states.items() if state and state.session == session]


def find_by_title(session: int, part: str) -> list[int]:
    """Members of a session whose command line has this in it."""
    return [pid for pid in session_members(session) if part in _read(pid, "cmdline")]


def mapped_files(session: int, pattern: str) -> set[Path]:
    """Files in shared memory that members of a session map, with names like `pattern`."""
    maps = (_read(pid, "maps") for pid in session_members(session))
    mapped = {Path(name) for text in maps for name in _MAPPED_PATH.findall(text)}
    shared = (path for path in mapped if path.parent == SHARED_MEMORY)
    return {path for path in shared if fnmatch(path.name, pattern)}


def kill_session(session: int) -> None:
    """Kills all members of a session; nothing when there is none left.

    The leader first: it would take the end of the others for an accident.
    """
    for pid in sorted(session_members(session), key=lambda pid: pid != session):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _read(pid: int, name: str) -> str:
    """What /proc tells of a process; nothing when it has ended, or is hidden as another user's."""
    try:
        return (_PROC / str(pid) / name).read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
