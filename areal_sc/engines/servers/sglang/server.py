"""A server process: started in a session of its own, awaited, and ended with all its children.

    consumes     nothing; its requests go over HTTP
    waits for    readiness, bounded by `start_timeout_s`; its end, bounded by `stop_timeout_s`
    unblocked by `/health`, the process's exit, or the clock

It cannot outlive this process: the kernel kills it with the thread that started it, and SGLang's
own processes with it.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import socket
import sys
from collections import deque
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

from areal_sc.config.model_folder import check_model_folder
from areal_sc.config.schema import RolloutConfig, SGLangConfig
from areal_sc.engines.servers.sglang import launcher
from areal_sc.engines.servers.sglang.arguments import (
    ServerPlace,
    server_arguments,
    server_environment,
)
from areal_sc.engines.servers.sglang.client import SGLangClient
from areal_sc.engines.servers.sglang.processes import find_schedulers, kill_session, shared_files
from areal_sc.errors import ConfigError, PeerLost, RpcTimeout, ServerBusy, WorkerStartError

logger = logging.getLogger(__name__)

LOG_TAIL_LINES = 30
_READY_POLL_S = 0.25
_HEALTH_TIMEOUT_S = 30.0
_PORT_IN_USE = "address already in use"
_ASK_VERSION = "from importlib.metadata import version; print(version('sglang'))"
_ASK_VERSION_TIMEOUT_S = 60.0


class SGLangServer:
    """One running server.

    Attributes:
        url: that it serves.
        api_key: that its clients must show.
        log_path: what it prints, appended.
        pid: of its HTTP process, which leads its session.
        schedulers: process ids of those that compute; known once it is ready.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        *,
        host: str,
        place: ServerPlace,
        log_path: Path,
        stop_timeout_s: float,
    ) -> None:
        self.url = f"http://{reachable_host(host)}:{place.port}"
        self.api_key = place.api_key
        self.log_path = log_path
        self.pid = process.pid
        self.schedulers: list[int] = []
        self._process = process
        self._shared_files: set[Path] = set()
        self._stop_timeout_s = stop_timeout_s

    @classmethod
    async def start(
        cls, config: RolloutConfig, sglang: SGLangConfig, place: ServerPlace, log_path: Path
    ) -> SGLangServer:
        """Starts the process; `wait_ready` tells when it serves.

        Must be called in a thread that lives as long as the server shall.
        Raises: ModelError, ConfigError: the folder, the port or an argument cannot be.
        """
        check_model_folder(config.path)
        check_port(sglang.host, place.port)
        arguments = server_arguments(config, sglang, place)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        # Its owner's alone: SGLang prints its arguments, the key among them.
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            process = await asyncio.create_subprocess_exec(
                sglang.python or sys.executable,
                str(Path(launcher.__file__)),
                stdin=PIPE,
                stdout=log,
                stderr=STDOUT,
                start_new_session=True,
                env=server_environment(sglang, place),
            )
        finally:
            os.close(log)
        server = cls(
            process,
            host=sglang.host,
            place=place,
            log_path=log_path,
            stop_timeout_s=sglang.stop_timeout_s,
        )
        assert process.stdin
        process.stdin.write(
            json.dumps({"parent_pid": os.getpid(), "arguments": arguments}).encode()
        )
        process.stdin.close()
        logger.info("server=%s pid=%d log=%s", server.url, server.pid, log_path)
        return server

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    async def wait_ready(self, client: SGLangClient, timeout_s: float) -> None:
        """Returns when the server generates.

        Raises: ConfigError, WorkerStartError: it ended, or was not ready in time; with the end of
            its log.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self.exit_code is None:
            if loop.time() >= deadline:
                raise self._start_error(f"was not ready within {timeout_s:g} s")
            try:
                await client.check_health(timeout_s=_HEALTH_TIMEOUT_S)
            except (PeerLost, RpcTimeout, ServerBusy):  # not listening yet, or still loading
                await asyncio.sleep(_READY_POLL_S)
            else:
                self.schedulers = find_schedulers(self.pid)
                self._shared_files = shared_files(self.pid)
                return
        raise self._start_error(f"ended with exit code {self.exit_code} before it was ready")

    async def wait(self) -> int:
        """The exit code, once the HTTP process has ended."""
        return await self._process.wait()

    async def stop(self) -> None:
        """Asks it to end, and kills what is left of its session after `stop_timeout_s`."""
        if self.exit_code is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(self._stop_timeout_s):
                    await self._process.wait()
            except TimeoutError:
                logger.info("server=%s killed: it did not end by itself", self.url)
        await self.kill()

    async def kill(self) -> None:
        """Kills the whole session, and deletes what is left of it in shared memory.

        Returns when its leader is reaped.
        """
        left = self._shared_files | shared_files(self.pid)
        kill_session(self.pid)
        await self._process.wait()
        for path in left:
            path.unlink(missing_ok=True)

    def log_tail(self) -> list[str]:
        """The last lines that it printed, without its key, which is among its arguments."""
        with self.log_path.open(errors="replace") as log:
            last = deque(log, LOG_TAIL_LINES)
        return [line.rstrip("\n").replace(self.api_key, "***") for line in last]

    def _start_error(self, what: str) -> WorkerStartError | ConfigError:
        tail = self.log_tail()
        if any(_PORT_IN_USE in line.lower() for line in tail):
            return ConfigError(_port_message(self.url.removeprefix("http://")))
        return WorkerStartError(
            f"the SGLang server at {self.url} {what}; its log {self.log_path} ends with:\n"
            + "\n".join(tail),
            log_path=str(self.log_path),
            log_tail=tail,
        )


async def installed_version(python: str) -> str:
    """The version of SGLang that an interpreter has.

    Raises: ConfigError: it has none, or is no interpreter.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            python, "-c", _ASK_VERSION, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
        )
    except OSError as error:
        raise ConfigError(f"sglang.python: {python!r} cannot be run: {error}") from error
    try:
        async with asyncio.timeout(_ASK_VERSION_TIMEOUT_S):
            output, errors = await process.communicate()
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise ConfigError(
            f"sglang.python: {python!r} did not tell SGLang's version within "
            f"{_ASK_VERSION_TIMEOUT_S:g} s"
        ) from error
    if process.returncode != 0:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise ConfigError(
            f"SGLang is not installed for sglang.python={python!r} ({' '.join(last)}): install it "
            "there, or name the interpreter of the environment that has it"
        )
    return output.decode().strip()


def free_port(host: str) -> int:
    """A port that nothing listens on at this moment."""
    with _bound_socket(host, 0) as probe:
        port: int = probe.getsockname()[1]
        return port


def check_port(host: str, port: int) -> None:
    """Raises ConfigError: something listens there, or the interface is not this machine's."""
    try:
        _bound_socket(host, port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(_port_message(f"{host}:{port}")) from error
        raise ConfigError(f"sglang.host: cannot listen on {host}: {error}") from error


def reachable_host(host: str) -> str:
    """Where this process reaches a server that listens on `host`."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _bound_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = socket.socket(family)
    try:
        # as the server itself does, so that a restart finds its port free at once
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
    except OSError:
        probe.close()
        raise
    return probe


def _port_message(address: str) -> str:
    return (
        f"sglang.ports: {address} is in use by another process; choose another port, or leave "
        "sglang.ports empty for free ones"
    )
