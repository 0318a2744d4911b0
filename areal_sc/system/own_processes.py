"""Killable processes of the user's own code, as the worker sees them that lends and ends them.

worker: OwnProcesses ──► fork server ── fork ──► a process, kept apart by `own_code`
             ▲                                        │
             └── ready, by which layer; replies ──────┘

A request is a list: what is asked, the number of the call, and more. A reply names its call, and is
signed: see `replies`. No torch.

consumes     replies of the processes
waits for    a place; a process's start, with a limit; its reply, for which the caller has a limit
unblocked by the process, its end, or a caller that gives its process back
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import socket
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from areal_sc.errors import NeverWorks, WorkerLost, WorkerStartError
from areal_sc.log import tell_warning
from areal_sc.system.deaths import Deaths
from areal_sc.system.fork_server import Child, ForkServer
from areal_sc.system.process import num_killed_for_memory
from areal_sc.system.replies import ReplyReader

log = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 60.0

LOAD_TIMEOUT_S: Final = 120.0
"""Bound of importing the user's module, which is no part of a call's time."""

_MAX_STARTS: Final = 3
_EXIT_WAIT_S: Final = 2.0
_FORGED: Final = (
    "code that ran in it has written to its connection, which counts for nothing, and it is ended; "
    "let code that a model wrote run apart, by run_code"
)


class TooMuchCpu(TimeoutError):
    """A call has used more CPU seconds than it may."""


class OwnProcess:
    """A process of the user's code, and the calls that run in it.

    Args:
        name: as messages call it, `a reward process` say.

    Attributes:
        pid: of the process that computes, which the child may only wait for.
        ready: its first message, which may bring the `listener`.
        loaded: keys of what its owner had it import.
        listener: a socket of its network, on which somebody has to serve it; None: it has none.
        killed_before: processes of the machine killed for lack of memory before it was started.
        is_spent: who has it wants no further call to run in it.
        is_over: its connection has ended, or is given up.
        before_end: is awaited before its sockets are closed.
        ending: ends it; None: nobody wants that yet.
    """

    def __init__(self, child: Child, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.killed_before = num_killed_for_memory()
        self.child = child
        self.pid = child.pid
        self.ready: asyncio.Future[list[Any]] = self._loop.create_future()
        self.loaded: set[int] = set()
        self.listener: socket.socket | None = None
        self.is_spent = False
        self.is_over = False
        self.before_end: Callable[[], Awaitable[None]] | None = None
        self.ending: asyncio.Task[None] | None = None
        self._replies = ReplyReader()
        self._name = name
        self._numbers = itertools.count()
        self.answers: dict[int, asyncio.Future[list[Any]]] = {}
        self._unsent = bytearray()
        self._loop.add_reader(child.connection, self._receive)

    @property
    def is_forged(self) -> bool:
        """Whether code in it has written to its connection what is no reply to a call.

        What is one is true all the same, but whoever has it ends the process.
        """
        return self._replies.is_forged

    @property
    def is_usable(self) -> bool:
        """Whether a further call may run in it."""
        return not (self.is_spent or self.is_over or self.is_forged)

    @property
    def is_busy(self) -> bool:
        """Whether a call runs in it."""
        return any(not answer.done() for answer in self.answers.values())

    async def ask(
        self, kind: str, *arguments: Any, limit_s: float, cpu_limit_s: float = math.inf
    ) -> list[Any]:
        """What comes of a call, which goes on under its limits where its asker is cancelled.

        Raises:
            TimeoutError: it has taken longer than `limit_s`.
            TooMuchCpu: it has computed for longer than `cpu_limit_s`.
            ConnectionResetError: the process has ended.
        """
        loop, answer = self._loop, self.call(kind, *arguments)[1]
        watch: asyncio.TimerHandle | None = None

        def end(error: TimeoutError) -> None:
            self.is_spent = self.is_spent or not answer.done()
            self._fail(answer, error)

        def watch_cpu(end_cpu_s: float) -> None:
            nonlocal watch
            left_s = end_cpu_s - self.cpu_s()
            if left_s > 0:  # it computes no faster than that
                watch = loop.call_later(left_s, watch_cpu, end_cpu_s)
            else:
                loop.call_soon(end, TooMuchCpu())

        def stop(_: Any) -> None:
            last.cancel()
            if watch is not None:
                watch.cancel()

        # a turn later, so that a reply which is there by then counts: the loop may have stood still
        last = loop.call_later(limit_s, loop.call_soon, end, TimeoutError())
        if cpu_limit_s < math.inf:
            watch_cpu(self.cpu_s() + cpu_limit_s)
        answer.add_done_callback(stop)
        return await asyncio.shield(answer)

    def call(self, kind: str, *arguments: Any) -> tuple[int, asyncio.Future[list[Any]]]:
        """The number of a call, and its answer: a ConnectionResetError if the process ends."""
        number = next(self._numbers)
        answer: asyncio.Future[list[Any]] = self._loop.create_future()
        if self.is_over:
            self._fail(answer, ConnectionResetError())
        else:
            self.answers[number] = answer
            self.tell(kind, number, *arguments)
        return number, answer

    def tell(self, *message: Any) -> None:
        """Sends a message as soon as there is room for it; to one that has ended it is lost.

        It is a line of JSON. Half of a surrogate pair, which a model may sample, stays as it is.
        """
        if not self.is_over:
            line = json.dumps(message, ensure_ascii=False)
            self._send(line.encode(errors="surrogatepass") + b"\n")

    def give_up(self) -> None:
        """Nothing is read or written any more, before the number of its socket is another's."""
        self.is_over = True
        self._loop.remove_reader(self.child.connection)
        self._loop.remove_writer(self.child.connection)
        for answer in (self.ready, *self.answers.values()):
            self._fail(answer, ConnectionResetError())
        self.answers.clear()

    def cpu_s(self) -> float:
        """CPU seconds that it has used; 0 if it is gone."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return 0.0
        ticks = map(int, stat.rpartition(b")")[2].split()[11:13])
        return sum(ticks) / os.sysconf("SC_CLK_TCK")

    def _fail(self, answer: asyncio.Future[list[Any]], error: Exception) -> None:
        if not answer.done():
            answer.set_exception(error)
            answer.exception()  # maybe nobody waits for it any more

    def _send(self, message: bytes = b"") -> None:
        """Sends as much as there is room for; the rest when there is some again."""
        connection, has_waited = self.child.connection, bool(self._unsent)
        self._unsent += message
        try:
            del self._unsent[: connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # it has ended, which `_receive` notices
            self._unsent.clear()
        if self._unsent and not has_waited:
            self._loop.add_writer(connection, self._send)
        elif has_waited and not self._unsent:
            self._loop.remove_writer(connection)

    def _receive(self) -> None:
        try:
            if self.ready.done():
                received = self.child.connection.recv(1 << 16)
            else:
                received, fds, _, _ = socket.recv_fds(self.child.connection, 1 << 16, 1)
                for fd in fds:
                    self.listener = socket.socket(fileno=fd)
                    self.listener.set_inheritable(False)
            if not received:
                raise ConnectionResetError
            self._replies.feed(received)
        except BlockingIOError:
            return
        except OSError:
            self.give_up()
            return
        for message in self._replies:
            self._take(*message)

    def _take(self, kind: str, number: Any, *rest: Any) -> None:
        if kind == "warned":
            tell_warning(number, self._name)
        elif not self.ready.done():
            self.ready.set_result([kind, number, *rest])
            if kind == "ready":
                self._send(self._replies.new_key())
        elif number not in self.answers:  # code in it has sent an earlier one again
            self._replies.is_forged = True
        elif not (answer := self.answers.pop(number)).done():
            answer.set_result([kind, *rest])


class OwnProcesses:
    """A pool of processes of one role, which are lent, used again, replaced and ended.

    Args:
        source: forks them.
        role: what they compute, in one word; the target of the fork server gets it in the spec.
        num_processes: how many are lent at a time, with those that wait for their next use.
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
        num_processes: int,
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
        self._num_processes = num_processes
        self._places = asyncio.Semaphore(num_processes)
        self._num_lent = 0
        self._idle: list[tuple[Hashable, OwnProcess]] = []
        self._running: set[OwnProcess] = set()
        self._taking: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def lend(self, use: Hashable, start: Callable[[], Awaitable[OwnProcess]]) -> OwnProcess:
        """A process for one caller alone, until `take_back`; waits until there is a place for it.

        Args:
            use: one that was lent for the same goes on; one of another use ends if there would be
                too many.
            start: starts one, by `self.start`.
        Raises: WorkerLost: the pool was closed. Whatever `start` raises.
        """
        await self._places.acquire()
        self._num_lent += 1
        try:
            process = await self.idle_one(use)
            while process is None and 0 < len(self._idle) > self._num_processes - self._num_lent:
                await self.end(self._idle.pop(0)[1])
            return process or await start()
        except BaseException:
            self._free_place()
            raise

    async def take_back(self, use: Hashable, process: OwnProcess) -> None:
        """It waits for its next use, behind the calls that run in it; or is ended."""
        if process.is_usable and process.is_busy:  # whoever asked is gone
            taking = asyncio.create_task(self._take_back_later(use, process))
            self._taking.add(taking)
            taking.add_done_callback(self._taking.discard)
            return
        try:
            if process.is_usable and not self._is_closed:
                self._idle.append((use, process))
            else:
                await self.end(process)
        finally:
            self._free_place()

    async def idle_one(self, use: Hashable) -> OwnProcess | None:
        """Takes one out of those that wait to be lent for this use; None: there is none."""
        while entry := next((it for it in reversed(self._idle) if it[0] == use), None):
            self._idle.remove(entry)
            if entry[1].is_usable:
                return entry[1]
            await self.end(entry[1])  # it has ended meanwhile
        return None

    async def start(self, spec: Mapping[str, Any]) -> OwnProcess:
        """A new process, which is ready.

        Args:
            spec: what it gets beside what is the same for all; `network` and `read` of a
                `Narrowing` among it, and `port`, see `begin_apart`.
        Raises: NeverWorks: it cannot be as narrow as that says. WorkerError: several in a row
            did not start, the fork server is gone, or the pool was closed.
        """
        deaths = Deaths(_MAX_STARTS - 1)
        while not self._is_closed:
            try:
                return await self._start_one(spec)
            except WorkerStartError as error:
                pause_s = deaths.note_death()
                log.warning("%s_process_failed_starts=%d: %s", self._role, deaths.number, error)
                if pause_s is None and not self._is_closed:
                    raise
                await asyncio.sleep(pause_s or 0.0)
        raise WorkerLost(f"the {self._role} pool was closed")

    async def stacks(self, process: OwnProcess) -> str:
        """Where its threads are; "" if it does not say."""
        return "\n".join(await self._source.stacks(process.child, self.log_path))

    async def end(self, process: OwnProcess) -> None:
        """Ends it, and all that it has started; goes on where whoever waits is cancelled."""
        if process.ending is None:
            has_ended = process.is_over
            process.give_up()
            process.ending = asyncio.create_task(self._end(process, by_itself=has_ended))
        await asyncio.shield(process.ending)

    async def close(self) -> None:
        """Ends all, those too that are being started. Bounded."""
        self._is_closed = True
        for process in self._running:  # at once
            self._source.kill(process.child)
        await asyncio.gather(*map(self.end, list(self._running)))
        await asyncio.gather(*self._taking)

    async def _take_back_later(self, use: Hashable, process: OwnProcess) -> None:
        if process.answers:
            await asyncio.wait(process.answers.values())
        await self.take_back(use, process)

    def _free_place(self) -> None:
        self._num_lent -= 1
        self._places.release()

    async def _end(self, process: OwnProcess, *, by_itself: bool) -> None:
        pid, role, ended = process.child.pid, self._role, process.child.ended
        if process.is_forged:
            tell_warning(_FORGED, self._name)
        try:
            if process.before_end is not None:
                await process.before_end()
        finally:
            if by_itself:
                await asyncio.wait([ended], timeout=_EXIT_WAIT_S)
                if ended.done():
                    log.warning(
                        "%s_process pid=%d ended by itself: %s", role, pid, process.child.how
                    )
                else:
                    log.warning("%s_process pid=%d is killed: it closed its connection", role, pid)
            self._source.kill(process.child)
            self._running.discard(process)
            process.child.connection.close()
            if process.listener is not None:
                process.listener.close()
            await asyncio.wait([ended], timeout=_EXIT_WAIT_S)
            if not ended.done():
                log.error("%s_process pid=%d did not die of SIGKILL", role, pid)

    async def _start_one(self, spec: Mapping[str, Any]) -> OwnProcess:
        child = await self._source.spawn({**self._spec, **spec}, self.log_path)
        process = OwnProcess(child, self._name)
        self._running.add(process)
        if self._is_closed:  # meanwhile
            await self.end(process)
            raise WorkerLost(f"the {self._role} pool was closed")
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                kind, *told = await process.ready
        except BaseException as error:
            await self.end(process)
            if not isinstance(error, ConnectionError | TimeoutError):
                raise
            what = "ended at once" if isinstance(error, ConnectionError) else "was not ready"
            raise WorkerStartError(f"{self._name} {what}; see {self.log_path}") from error
        if kind == "unfit":
            await self.end(process)
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
