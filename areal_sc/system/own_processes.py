"""Processes of the user's own code, as the worker sees them that starts and ends them. No torch.

worker: OwnProcesses ──► fork server ── fork ──► a process, kept apart by `own_code`
             ▲                                        │
             └── ready, by which layer; replies ──────┘

A reply names its call, and is signed: see `replies`.

consumes     messages of the processes
waits for    a process's start, with a limit; its next message, for which the caller has one
unblocked by the process, or its end
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from areal_sc.errors import NeverWorks, WorkerStartError
from areal_sc.log import tell_warning
from areal_sc.system.deaths import Deaths
from areal_sc.system.fork_server import Child, ForkServer
from areal_sc.system.process import num_killed_for_memory
from areal_sc.system.replies import ReplyReader

log = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 60.0
_MAX_STARTS: Final = 3
_EXIT_WAIT_S: Final = 2.0
_FORGED: Final = (
    "code that ran in it has written to its connection, which counts for nothing, and it is ended; "
    "let code that a model wrote run apart, by run_code"
)


class OwnProcess:
    """A process of the user's code.

    Args:
        name: as messages call it, `a reward process` say.

    Attributes:
        pid: of the process that computes, which the child may only wait for.
        loaded: keys of what its owner had it import.
        listener: a socket of its network, on which somebody has to serve it; None: it has none.
        killed_before: processes of the machine killed for lack of memory before it was started.
    """

    def __init__(self, child: Child, name: str) -> None:
        self.killed_before = num_killed_for_memory()
        self.child = child
        self.pid = child.pid
        self.loaded: set[int] = set()
        self.listener: socket.socket | None = None
        self._replies = ReplyReader()
        self._name = name

    @property
    def is_forged(self) -> bool:
        """Whether code in it has written to its connection what is no reply to a call.

        What is one is true all the same, but whoever has it ends the process.
        """
        return self._replies.is_forged

    def note_unasked(self) -> None:
        """A message has come that no call waits for: code has sent an earlier one again."""
        self._replies.is_forged = True

    async def send(self, message: bytes) -> None:
        """Raises: ConnectionError: it has ended."""
        await asyncio.get_running_loop().sock_sendall(self.child.connection, message)

    async def ask(self, number: int, request: bytes) -> list[Any]:
        """What it says to a request of this number. Raises: ConnectionError: it has ended."""
        await self.send(request)
        while True:
            kind, of, *rest = await self.reply()
            if of == number:
                return [kind, *rest]
            self.note_unasked()

    async def ready(self) -> list[Any]:
        """Its first message, which may bring the `listener`; it gets its key then.

        Raises: ConnectionError: it has ended.
        """
        loop, connection = asyncio.get_running_loop(), self.child.connection
        has_come = asyncio.Event()
        loop.add_reader(connection, has_come.set)
        try:
            await has_come.wait()
        finally:
            loop.remove_reader(connection)
        received, fds, _, _ = socket.recv_fds(connection, 1 << 16, 1)
        if not received:
            raise ConnectionResetError
        if fds:
            self.listener = socket.socket(fileno=fds[0])
            self.listener.set_inheritable(False)
        self._replies.feed(received)
        first = await self.reply()
        if first[0] == "ready":
            await self.send(self._replies.new_key())
        return first

    async def reply(self) -> list[Any]:
        """Its next message. Raises: ConnectionError: it has ended."""
        while True:
            for message in self._replies:
                if message[0] != "warned":
                    return message
                tell_warning(message[1], self._name)
            received = await asyncio.get_running_loop().sock_recv(self.child.connection, 1 << 16)
            if not received:
                raise ConnectionResetError
            self._replies.feed(received)

    def cpu_s(self) -> float:
        """CPU seconds that it has used; 0 if it is gone."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return 0.0
        ticks = map(int, stat.rpartition(b")")[2].split()[11:13])
        return sum(ticks) / os.sysconf("SC_CLK_TCK")


class OwnProcesses:
    """Starts and ends processes of one role.

    Args:
        source: forks them.
        role: what they compute, in one word; the target of the fork server gets it in the spec.
        log_path: file that their own output is appended to.
        sources: that folder of the run, which they may read.
        isolation: `rollout.sandbox.isolation`.
        hides: folders that they cannot reach, `sources` aside.

    Attributes:
        isolation: what keeps them apart, "": nothing does; None: there was none yet.
    """

    def __init__(
        self,
        source: ForkServer,
        *,
        role: str,
        log_path: Path | str,
        sources: Path,
        isolation: str = "none",
        hides: Sequence[Path | str] = (),
    ) -> None:
        self.log_path = log_path
        self.isolation: str | None = None
        self._source = source
        self._role = role
        self._name = f"{'an' if role[0] in 'aeiou' else 'a'} {role} process"
        self._spec: dict[str, Any] = {
            "role": role,
            "sources": str(sources),
            "isolation": isolation,
            "hides": [str(path) for path in hides],
            "is_tried": False,
        }
        self._running: set[OwnProcess] = set()
        self._is_closed = False

    async def start(self, spec: Mapping[str, Any]) -> OwnProcess:
        """A new process, which is ready.

        Args:
            spec: what it gets beside what is the same for all; `network` and `read` of a
                `Narrowing` among it, and `port` as of `begin_apart`.
        Raises: NeverWorks: it cannot be as narrow as that says. WorkerError: several in a row
            did not start, or the fork server is gone.
        """
        deaths = Deaths(_MAX_STARTS - 1)
        while True:
            try:
                return await self._start_one(spec)
            except WorkerStartError as error:
                pause_s = deaths.note(is_final=self._is_closed)
                log.warning("%s_process_failed_starts=%d: %s", self._role, deaths.number, error)
                if pause_s is None:
                    raise
                await asyncio.sleep(pause_s)

    async def stacks(self, process: OwnProcess) -> str:
        """Where its threads are; "" if it does not say."""
        return "\n".join(await self._source.stacks(process.child, self.log_path))

    async def kill(self, process: OwnProcess) -> None:
        """Ends it, and all that it has started."""
        if process.is_forged:
            tell_warning(_FORGED, self._name)
        self._source.kill(process.child)
        self._running.discard(process)
        process.child.connection.close()
        if process.listener is not None:
            process.listener.close()
        await asyncio.wait([process.child.ended], timeout=_EXIT_WAIT_S)
        if not process.child.ended.done():
            log.error("%s_process pid=%d did not die of SIGKILL", self._role, process.child.pid)

    async def bury(self, process: OwnProcess) -> None:
        """Notes the end of a process whose connection has ended, and kills it if it goes on."""
        await asyncio.wait([process.child.ended], timeout=_EXIT_WAIT_S)
        pid, role = process.child.pid, self._role
        if process.child.ended.done():
            log.warning("%s_process pid=%d ended by itself: %s", role, pid, process.child.how)
        else:
            log.warning("%s_process pid=%d is killed: it closed its connection", role, pid)
        await self.kill(process)

    def kill_all(self) -> None:
        """Each ends, those too that are being started; `kill` or `bury` still have to follow."""
        self._is_closed = True
        for process in self._running:
            self._source.kill(process.child)

    async def _start_one(self, spec: Mapping[str, Any]) -> OwnProcess:
        child = await self._source.spawn({**self._spec, **spec}, self.log_path)
        process = OwnProcess(child, self._name)
        self._running.add(process)
        if self._is_closed:  # meanwhile
            self._source.kill(child)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                kind, *told = await process.ready()
        except BaseException as error:
            await self.kill(process)
            if not isinstance(error, ConnectionError | TimeoutError):
                raise
            what = "ended at once" if isinstance(error, ConnectionError) else "was not ready"
            raise WorkerStartError(f"{self._name} {what}; see {self.log_path}") from error
        if kind == "unfit":
            await self.kill(process)
            raise NeverWorks(f"{self._name} cannot be kept as it has to be: {told[0]}")
        process.pid, layer, why_not = told
        self._tell_isolation(layer, why_not)
        return process

    def _tell_isolation(self, layer: str, why_not: str) -> None:
        """Once: what keeps them apart, or that nothing does."""
        if self.isolation is not None:
            return
        self.isolation, wanted = layer, self._spec["isolation"]
        self._spec |= {"isolation": layer or "none", "is_tried": True}
        if layer or wanted == "none":
            log.info("%s_isolation=%s", self._role, layer or "none")
            return
        text = (
            f"{self._role}s are not kept apart: they can read the run's keys and snapshots, and "
            f"reach all processes of this user ({why_not}); set rollout.sandbox.isolation=none to "
            "accept that"
        )
        tell_warning(text, self._name)
