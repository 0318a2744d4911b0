"""Agents in processes of their own, which can be killed: alone, or many beside each other in one.

    consumes     calls of `run`
    waits for    a process's start; then the agent's answer, the end of its process, or its limit
    unblocked by the process, the kernel (end of file), or the event loop's clock

An agent without a parameter `session` finds the model by environment variables, so it is alone in
its process. The next episode goes on in it, because imports take seconds. An awaited agent with a
`session` runs beside the others of its worker; where one of them ends their process, nobody knows
which. Each is told so, and may be run again alone.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from areal_sc.agents.agent import NamedAgent, as_json, reference_for
from areal_sc.agents.command import AgentCommand
from areal_sc.agents.process import AGENT, pack
from areal_sc.agents.server import AgentServer
from areal_sc.config.agent_settings import AgentNetwork, AgentsConfig
from areal_sc.errors import AgentError, ConfigError, NeverWorks, WorkflowError
from areal_sc.rejection import RejectionKind
from areal_sc.rewards.base import Narrowing
from areal_sc.rewards.functions import name_of, place_of_definition
from areal_sc.sources.reference import written_reference
from areal_sc.sources.values import UnfitValue, to_wire
from areal_sc.system.fork_server import ForkServer
from areal_sc.system.own_processes import OwnProcess, OwnProcesses
from areal_sc.workflows.base import AgentReturn, AgentSession

LOAD_TIMEOUT_S: Final = 120.0
"""Bound of importing the agent's module, which is no part of an episode's time."""

CANCEL_GRACE_S: Final = 5.0
"""An awaited agent that has not ended so long after it was cancelled has its process killed."""

_LOAD: Final = 0
"""The number of the first request to a process."""
_SHOWN_CHARS: Final = 300


class _AgentProcess:
    """A process that has loaded an agent, with the calls that run in it."""

    def __init__(self, process: OwnProcess) -> None:
        self.process = process
        self.ending: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[list[Any]]] = {}
        self._numbers = itertools.count(_LOAD + 1)
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())
        self._writing = asyncio.create_task(self._write())

    @property
    def is_usable(self) -> bool:
        return not (self.ending or self._reading.done() or self.process.is_forged)

    def call(self, row: Any, session: dict[str, str]) -> tuple[int, asyncio.Future[list[Any]]]:
        """Its number, and its answer, which is a ConnectionError if the process ends."""
        number = next(self._numbers)
        answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(asyncio.Future.exception)  # maybe nobody waits for it any more
        if self._reading.done():
            answer.set_exception(ConnectionResetError())
        else:
            self._answers[number] = answer
            self.tell("call", number, row, session)
        return number, answer

    def tell(self, *message: Any) -> None:
        self._outbox.put_nowait(pack(list(message)))

    async def stop(self) -> None:
        """Nothing is read or written any more; what runs has ended."""
        self._reading.cancel()
        self._writing.cancel()
        await asyncio.wait([self._reading, self._writing])

    async def _read(self) -> None:
        try:
            while True:
                kind, number, *rest = await self.process.reply()
                if answer := self._answers.pop(number, None):
                    answer.set_result([kind, *rest])
                else:
                    self.process.note_unasked()
        except OSError:
            pass  # it has ended
        finally:
            for answer in self._answers.values():
                answer.set_exception(ConnectionResetError())
            self._answers.clear()

    async def _write(self) -> None:
        try:
            while True:
                await self.process.send(await self._outbox.get())
        except OSError:
            pass  # whoever reads notices


@dataclass(eq=False)
class _Crew:
    """The processes of one agent.

    Attributes:
        reference: to the agent.
        python: the interpreter that runs it, "": this one.
        is_awaited: as its process says.
        runs_beside: others in one process; None: it was not loaded yet.
        idle: processes that wait for an episode to be alone there.
        shared: the process that the others share.
    """

    agent: Any
    reference: dict[str, Any]
    python: str
    is_awaited: bool = False
    runs_beside: bool | None = None
    idle: list[_AgentProcess] = field(default_factory=list)
    shared: _AgentProcess | None = None
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    def wire_of(self, row: Mapping[str, Any]) -> Any:
        """Raises: WorkflowError: the agent would get another row."""
        if self.python:
            return json.loads(as_json(row, f"agent {name_of(self.agent)}"))
        try:
            return to_wire(dict(row))
        except UnfitValue as error:
            raise WorkflowError(error.located(f"agent {name_of(self.agent)}: row")) from None

    def end_of(self, kind: str, told: Any, output: str) -> AgentReturn:
        """Raises: AgentError: the agent failed."""
        if kind == "failed":
            raise self.failed(told, output)
        return AgentReturn(told, output)

    def failed(self, told: Mapping[str, str], output: str = "") -> AgentError:
        message = f"agent {name_of(self.agent)}: {told['message']}"
        if output:
            message += f"; at last it wrote: {output[-_SHOWN_CHARS:]}"
        where = {name: it for name, it in told.items() if name != "message"}
        return AgentError(message, **{"place": self._place, **where})

    def never_works(self, told: Mapping[str, str]) -> NeverWorks:
        """It failed while it was imported."""
        what, place = told["message"], told.get("place", "")
        where = "" if place in what else f" at {place}"
        return NeverWorks(f"agent {name_of(self.agent)} cannot be imported: {what}{where}")

    def error(
        self, what: str, kind: RejectionKind, frames: str = "", place: str = ""
    ) -> AgentError:
        message = f"agent {name_of(self.agent)}: {what}"
        return AgentError(message, kind=kind, place=place or self._place, frames=frames)

    @property
    def _place(self) -> str:
        is_known = not isinstance(self.agent, NamedAgent | AgentCommand)
        return place_of_definition(self.agent) if is_known else ""


class AgentPool:
    """Runs the agents of a worker.

    Args:
        processes: forks their processes.
        server: of their sessions.
        config: how they run; of `max_turns` it knows nothing.
        log_path, sources, isolation, hides: as of `OwnProcesses`.
    """

    def __init__(
        self,
        processes: ForkServer,
        server: AgentServer,
        config: AgentsConfig,
        *,
        log_path: Path,
        sources: Path,
        isolation: str,
        hides: Sequence[Path | str],
    ) -> None:
        self.config = config
        self._server = server
        self._sources = sources
        self._own = OwnProcesses(
            processes,
            role=AGENT,
            log_path=log_path,
            sources=sources,
            isolation=isolation,
            hides=hides,
        )
        self._places = asyncio.Semaphore(config.num_processes)
        self._num_taken = 0
        self._crews: dict[int, _Crew] = {}
        self._endings: set[asyncio.Task[None]] = set()

    async def run(
        self, agent: Any, row: Mapping[str, Any], session: AgentSession, *, is_alone: bool = False
    ) -> AgentReturn:
        """Runs an agent on a row, until it returns.

        Args:
            agent: an `AgentFunction`, a `NamedAgent`, or an `AgentCommand`.
            is_alone: no other episode is in its process.
        Raises:
            AgentError: it raised, returned no finite number, passed `agents.episode_timeout_s`, or
                its process ended while it ran.
            NeverWorks: its module cannot be imported.
            WorkflowError: the agent, or the row, cannot be given to another process.
            WorkerError: no process can be had; says nothing about the agent.
            ConfigError: no process can be as the settings say.
        """
        crew = self._crew_of(agent)
        call = crew.wire_of(row), {"base_url": session.base_url, "api_key": session.api_key}
        if crew.runs_beside is None:
            async with crew.starting, self._place():
                if crew.runs_beside is None:
                    crew.idle.append(await self._start_in_place(crew))
        if crew.runs_beside and not is_alone:
            return await self._run_beside(crew, *call)
        async with self._place():
            return await self._run_alone(crew, *call)

    async def close(self) -> None:
        """Kills all processes; whatever still runs ends with an AgentError. Bounded."""
        self._own.kill_all()
        for crew in list(self._crews.values()):
            for process in (*crew.idle, *filter(None, [crew.shared])):
                await self._end(process)
        await asyncio.gather(*self._endings)

    def _crew_of(self, agent: Any) -> _Crew:
        if id(agent) not in self._crews:
            self._crews[id(agent)] = _Crew(agent, *self._reference_of(agent))
        return self._crews[id(agent)]

    def _reference_of(self, agent: Any) -> tuple[dict[str, Any], str]:
        """How the agent is named, and for which interpreter, "": this one."""
        python = "" if isinstance(agent, AgentCommand) else self.config.python
        if python:
            return reference_for(agent, python).to_wire(), python
        if isinstance(agent, NamedAgent):
            return agent.reference().to_wire(), ""
        return written_reference(agent, self._sources), ""

    async def _start(self, crew: _Crew) -> _AgentProcess:
        """A process that has loaded the agent.

        Raises: AgentError, NeverWorks, WorkerError, ConfigError: as `run`.
        """
        spec = {**Narrowing()._asdict(), "python": crew.python}
        if self.config.network == AgentNetwork.session:
            spec["port"] = self._server.port
        try:
            process = await self._own.start(spec)
        except NeverWorks as error:
            raise ConfigError(f"agents.network={self.config.network}: {error}") from error
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                load = pack(["load", _LOAD, crew.reference])
                kind, *rest = await process.ask(_LOAD, load)
            if kind == "failed":
                raise crew.never_works(rest[0])
        except TimeoutError:
            stacks = await self._own.stacks(process)
            await self._own.kill(process)
            what = f"its module was not imported in {LOAD_TIMEOUT_S:g} s"
            raise crew.error(what, RejectionKind.agent_timeout, frames=stacks) from None
        except BaseException as error:
            await self._own.kill(process)
            if not isinstance(error, OSError):
                raise
            what = f"its process ended while its module was imported ({process.child.how})"
            log = self._own.log_path
            raise crew.error(f"{what}; see {log}", RejectionKind.agent_died) from error
        has_session, crew.is_awaited = rest
        crew.runs_beside = has_session and crew.is_awaited
        started = _AgentProcess(process)
        try:
            if process.listener is not None:
                await self._server.serve_on(process.listener)
        except BaseException:
            await self._end(started)
            raise
        return started

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """One of the places in which agents run alone."""
        async with self._places:
            self._num_taken += 1
            try:
                yield
            finally:
                self._num_taken -= 1

    async def _start_in_place(self, crew: _Crew) -> _AgentProcess:
        """Starts a process; another agent's, which waits, ends if there would be too many."""
        while True:
            waiting = [one for one in self._crews.values() if one.idle]
            num_processes = self._num_taken + sum(len(one.idle) for one in waiting)
            if num_processes <= self.config.num_processes or not waiting:
                return await self._start(crew)
            await self._end(waiting[0].idle.pop(0))

    async def _run_alone(self, crew: _Crew, row: Any, session: dict[str, str]) -> AgentReturn:
        process = crew.idle.pop() if crew.idle else await self._start_in_place(crew)
        if not process.is_usable:  # it has ended between two episodes
            await self._end(process)
            process = await self._start_in_place(crew)
        is_sound = False
        try:
            number, answer = process.call(row, session)
            await self._server.clock.wait(answer, self.config.episode_timeout_s)
            if not answer.done():
                raise await self._late(crew, process, number, answer)
            if answer.exception():
                raise await self._died(crew, process)
            kind, told, output, has_left = answer.result()
            is_used_once = crew.runs_beside or isinstance(crew.agent, AgentCommand)
            is_sound = not (is_used_once or has_left or process.process.is_forged)
            return crew.end_of(kind, told, output)
        finally:
            if is_sound:
                crew.idle.append(process)
            else:
                await self._end(process)

    async def _run_beside(self, crew: _Crew, row: Any, session: dict[str, str]) -> AgentReturn:
        async with crew.starting:
            if crew.shared is None or not crew.shared.is_usable:
                if crew.shared is not None:
                    await self._end(crew.shared)
                crew.shared = crew.idle.pop() if crew.idle else await self._start(crew)
            process = crew.shared
        number, answer = process.call(row, session)
        try:
            await self._server.clock.wait(answer, self.config.episode_timeout_s)
            if not answer.done():
                error = await self._late(crew, process, number, answer)
                if not answer.done():  # the others lose their process, and are told so
                    await self._end(process)
                raise error
        except asyncio.CancelledError:
            self._begin(self._cancel(process, number, answer))
            raise
        if answer.exception():
            raise await self._died(crew, process)
        if process.process.is_forged:  # the others are told that they lose it
            await self._end(process)
        kind, told, output, _ = answer.result()
        return crew.end_of(kind, told, output)

    async def _cancel(
        self, process: _AgentProcess, number: int, answer: asyncio.Future[list[Any]]
    ) -> None:
        """Ends a call that nobody waits for, and its process if it goes on."""
        process.tell("cancel", number)
        await asyncio.wait([answer], timeout=CANCEL_GRACE_S)
        if not answer.done():
            await self._end(process)

    async def _late(
        self, crew: _Crew, process: _AgentProcess, number: int, answer: asyncio.Future[list[Any]]
    ) -> AgentError:
        """What to say of a call that takes too long, which is cancelled."""
        place, frames = "", ""
        if crew.is_awaited:
            process.tell("cancel", number)
            await asyncio.wait([answer], timeout=CANCEL_GRACE_S)
        if answer.done() and not answer.exception():
            match answer.result():
                case ["failed", {"place": place, "frames": frames}, _, _]:
                    pass
        else:
            frames = await self._own.stacks(process.process)
        what = (
            f"took longer than {self.config.episode_timeout_s:g} s; make it faster, or raise "
            "agents.episode_timeout_s"
        )
        return crew.error(what, RejectionKind.agent_timeout, frames, place)

    async def _died(self, crew: _Crew, process: _AgentProcess) -> AgentError:
        """What to say of a call whose process has ended while it ran."""
        await self._end(process, has_ended=True)
        what = f"its process ended while it ran ({process.process.child.how})"
        return crew.error(f"{what}; see {self._own.log_path}", RejectionKind.agent_died)

    async def _end(self, process: _AgentProcess, *, has_ended: bool = False) -> None:
        """Returns when it has ended; goes on where whoever waits for it is cancelled.

        Args:
            has_ended: its connection says so.
        """
        if process.ending is None:
            process.ending = self._begin(self._end_now(process, has_ended=has_ended))
        await asyncio.shield(process.ending)

    async def _end_now(self, process: _AgentProcess, *, has_ended: bool) -> None:
        await process.stop()  # before its socket is closed, whose number another may get
        try:
            if process.process.listener is not None:
                await self._server.leave(process.process.listener)
        finally:
            await (self._own.bury if has_ended else self._own.kill)(process.process)

    def _begin(self, ending: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(ending)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task
