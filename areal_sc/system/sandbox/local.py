"""A sandbox of this machine: programs are forked from a warm server, each kept by a layer.

consumes     calls of `run`
waits for    a free place, then for the keeper's answer, with a limit
unblocked by keepers, places that come free, the clock, or the server's end
"""

from __future__ import annotations

import asyncio
import json
import logging
import marshal
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

from areal_sc.errors import SandboxError
from areal_sc.system.sandbox.isolation import BIND_NOW, CHECK, LAYERS, way_out
from areal_sc.system.sandbox.program import (
    CLOCK_FACTOR,
    LENGTH,
    End,
    Ended,
    Limits,
    Program,
    packed,
)
from areal_sc.system.sandbox.trees import remove

log = logging.getLogger(__name__)

_START_TIMEOUT_S: Final = 60.0
_BESIDE_PROGRAM_S: Final = 60.0
"""What a keeper may take beside its program's time: to begin it, and to end all that it left."""

_END_S: Final = 10.0
_POLL_S: Final = 0.01
_MAX_TRIES: Final = 2
_BOOT: Final = (
    "import sys; sys.path.insert(0, sys.argv.pop()); "
    "from areal_sc.system.sandbox.warm_server import main; del sys.path[0]; main()"
)


class LocalSandbox:
    """Runs programs in processes of this machine; a `Sandbox`. Used from one event loop.

    Its server starts with the first program: executed, so this process may have threads and torch.

    Args:
        num_processes: programs at a time, > 0.
        isolation: a name of `LAYERS`, or `auto`: the first of them that works.
        environment: all variables that a program has, beside HOME, TMPDIR and, so that Python
            writes integers of any length, PYTHONINTMAXSTRDIGITS.
        read: files and folders that a program may read, beside Python's and the system's.
    """

    def __init__(
        self,
        num_processes: int,
        isolation: str = "auto",
        *,
        environment: Mapping[str, str] | None = None,
        read: Sequence[str] = (),
    ) -> None:
        if num_processes < 1 or isolation not in ("auto", *LAYERS):
            raise ValueError(
                f"expected num_processes >= 1 and isolation of auto, {', '.join(LAYERS)}; got "
                f"{num_processes}, {isolation!r}"
            )
        self._layers = list(LAYERS) if isolation == "auto" else [isolation]
        self._environment = dict(environment or {})
        self._read = list(read)
        self._places = asyncio.Semaphore(num_processes)
        self._one_start = asyncio.Lock()
        self._server: _WarmServer | None = None
        self._is_closed = False

    async def layer(self) -> str:
        """The layer that it uses, which is tried now. Raises: SandboxError: none works."""
        return (await self._started()).layer

    async def run(self, program: Program, limits: Limits) -> Ended:
        """Runs it; see `Sandbox.run`.

        A program whose server or keeper is killed, for lack of memory say, is run once more.

        Raises:
            SandboxError: no layer works, or the program could not be begun, twice.
            ValueError: both or neither of source and command are given, or a path leaves its
                folder.
        """
        request = _request(program, limits)
        async with self._places:
            for tries_left in reversed(range(_MAX_TRIES)):
                server = await self._started()
                try:
                    async with asyncio.timeout(CLOCK_FACTOR * limits.time_s + _BESIDE_PROGRAM_S):
                        return await server.run(request)
                except (OSError, TimeoutError) as error:
                    if not tries_left:
                        raise SandboxError(f"a program could not be run: {error!r}") from error
                    log.warning("sandbox: a program is run again: %r", error)
                    if isinstance(error, TimeoutError):
                        await server.close()
        raise AssertionError

    async def close(self) -> None:
        """Ends all programs; their callers get SandboxError. Bounded."""
        self._is_closed = True
        if self._server is not None:
            await self._server.close()

    async def _started(self) -> _WarmServer:
        async with self._one_start:
            if self._is_closed:
                raise SandboxError("the sandbox was closed")
            if self._server is not None and self._server.has_ended:
                await self._server.close()
                self._server = None
            if self._server is None:
                self._server = await self._start()
                self._layers = [self._server.layer]
            return self._server

    async def _start(self) -> _WarmServer:
        reasons = {}
        for layer in self._layers:
            try:
                server = _WarmServer(layer, self._environment, self._read)
            except OSError as error:
                raise SandboxError(f"the sandbox's server could not be started: {error}") from error
            try:
                async with asyncio.timeout(_START_TIMEOUT_S):
                    await server.begin()
                    fault = await _fault_of(server)
            except (OSError, TimeoutError, SandboxError) as error:
                fault = str(error) or f"it did not start in {_START_TIMEOUT_S:g} s"
            if not fault:
                log.info("sandbox=%s", layer)
                return server
            await server.close()
            reasons[layer] = fault
        raise SandboxError(way_out(reasons))


async def _fault_of(server: _WarmServer) -> str:
    """What the layer does not keep; empty: it works."""
    with tempfile.NamedTemporaryFile(prefix="areal-sandbox-check-") as secret:
        os.chmod(secret.name, 0o644)
        program = Program(source=CHECK.format(secret=secret.name))
        ended = await server.run(_request(program, Limits()))
    said = ended.stdout.decode(errors="replace").strip()
    if ended.exit_code == 0 and said:
        return "" if said == "works" else said
    why = ended.stderr.decode(errors="replace").strip() or "nothing"
    return f"a program ended with {ended.exit_code} and said {why}"


class _WarmServer:
    """The warm process, as its owner sees it."""

    def __init__(self, layer: str, environment: Mapping[str, str], read: Sequence[str]) -> None:
        self.layer = layer
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        self._folder = ""
        package = str(Path(__file__).parents[3])
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-I", "-B", "-X", "utf8", "-c", _BOOT),
                        *(str(theirs.fileno()), layer, json.dumps(list(read)), package),
                    ],
                    stdin=subprocess.DEVNULL,
                    env={**environment, BIND_NOW: "1"},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except OSError:
            self._connection.close()
            raise

    @property
    def has_ended(self) -> bool:
        """Whether its end of the connection is closed, which is so before any of its keepers'."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    async def begin(self) -> None:
        """Returns when it serves. Raises: OSError: it does not."""
        told = await asyncio.get_running_loop().sock_recv(self._connection, 1 << 16)
        if not told:
            raise ConnectionError("the sandbox's server ended at once")
        word = json.loads(told)
        if why := word.get("failed"):
            raise OSError(why)
        self._folder = word["folder"]

    async def run(self, request: bytes) -> Ended:
        """Raises: OSError: server or keeper ended. SandboxError: the program was not begun."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            with theirs:
                socket.send_fds(self._connection, [b"x"], [theirs.fileno()])
            await loop.sock_sendall(ours, request)
            (length,) = LENGTH.unpack(await _received(ours, LENGTH.size))
            answer = marshal.loads(await _received(ours, length))
        if why := answer.get("failed"):
            raise SandboxError(f"a program could not be begun: {why}")
        return Ended(**{**answer, "end": End(answer["end"])})

    async def close(self) -> None:
        """Ends it and all its programs, also where no thread can be started."""
        self._connection.close()
        try:
            async with asyncio.timeout(_END_S):
                await self._wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._wait()
        with suppress(RuntimeError):  # there is no thread: the folder is left
            await asyncio.to_thread(self._remove_left)

    def _remove_left(self) -> None:
        if self._folder and os.path.exists(self._folder):  # the server was killed
            remove(self._folder)

    async def _wait(self) -> None:
        while self._process.poll() is None:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)


async def _received(connection: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        missing = length - len(received)
        part = await asyncio.get_running_loop().sock_recv(connection, min(missing, 1 << 20))
        if not part:
            raise ConnectionError("the process that keeps the program ended")
        received += part
    return bytes(received)


def _request(program: Program, limits: Limits) -> bytes:
    if bool(program.source) == bool(program.command):
        raise ValueError("a program: expected source or command, got both or neither")
    for path in program.files:
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or not path:
            raise ValueError(f"a program's file {path!r}: expected a path inside its folder")
    request = {
        "source": str(program.source),  # subclasses, as numpy has them, would go as raw bytes
        "command": tuple(map(str, program.command)),
        "stdin": bytes(program.stdin),
        "files": {str(path): bytes(content) for path, content in program.files.items()},
    }
    most = {name: int(value) for name, value in vars(limits).items() if name != "time_s"}
    return packed({**request, "limits": {**most, "time_s": float(limits.time_s)}})
