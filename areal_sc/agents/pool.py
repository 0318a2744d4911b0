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
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from areal_sc.agents.agent import NamedAgent, as_json, reference_for
from areal_sc.agents.command import AgentCommand
from areal_sc.agents.process import AGENT
from areal_sc.agents.server import AgentServer
from areal_sc.config.agent_settings import AgentNetwork, AgentsConfig
from areal_sc.errors import AgentError, ConfigError, NeverWorks, WorkflowError
from areal_sc.rejection import RejectionKind
from areal_sc.rewards.base import Narrowing, name_of, place_of_definition
from areal_sc.sources.reference import written_reference
from areal_sc.sources.values import UnfitValue, to_wire
from areal_sc.system.fork_server import ForkServer
from areal_sc.system.own_processes import LOAD_TIMEOUT_S, OwnProcess, OwnProcesses
from areal_sc.workflows.base import AgentReturn, AgentSession

CANCEL_GRACE_S: Final = 5.0
"""An awaited agent that has not ended so long after it was cancelled has its process killed."""

_SHOWN_CHARS: Final = 300


@dataclass(eq=False)
class _Crew:
    """The processes of one agent.

    Attributes:
        reference: to the agent.
        python: the interpreter that runs it, "": this one.
        is_awaited: as its process says.
        runs_beside: others in one process; None: it was not loaded yet.
        shared: the process that the others share.
    """

    agent: Any
    reference: dict[str, Any]
    python: str
    is_awaited: bool = False
    runs_beside: bool | None = None
    shared: OwnProcess | None = None
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
        log_path, sources, isolation, hides: see `OwnProcesses`.
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
            num_processes=config.num_processes,
            log_path=log_path,
            sources=sources,
            isolation=isolation,
            hides=hides,
        )
        self._crews: dict[int, _Crew] = {}
        self._cancels: set[asyncio.Task[None]] = set()

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
            async with crew.starting:
                if crew.runs_beside is None:
                    process = await self._own.lend(crew, partial(self._start, crew))
                    await self._own.take_back(crew, process)  # it has told
        if crew.runs_beside and not is_alone:
            return await self._run_beside(crew, *call)
        return await self._run_alone(crew, *call)

    async def close(self) -> None:
        """Kills all processes; whatever still runs ends with an AgentError. Bounded."""
        await self._own.close()
        await asyncio.gather(*self._cancels)

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

    async def _start(self, crew: _Crew) -> OwnProcess:
        """A process that has loaded the agent.

        Raises: AgentError, NeverWorks, WorkerError, ConfigError: see `run`.
        """
        spec = {**Narrowing()._asdict(), "python": crew.python}
        if self.config.network == AgentNetwork.session:
            spec["port"] = self._server.port
        try:
            process = await self._own.start(spec)
        except NeverWorks as error:
            raise ConfigError(f"agents.network={self.config.network}: {error}") from error
        try:
            if process.listener is not None:
                process.before_end = partial(self._server.leave, process.listener)
                await self._server.serve_on(process.listener)
            await self._load(crew, process)
        except BaseException:
            await self._own.end(process)
            raise
        return process

    async def _load(self, crew: _Crew, process: OwnProcess) -> None:
        try:
            kind, *rest = await process.ask("load", crew.reference, limit_s=LOAD_TIMEOUT_S)
        except TimeoutError:
            stacks = await self._own.stacks(process)
            what = f"its module was not imported in {LOAD_TIMEOUT_S:g} s"
            raise crew.error(what, RejectionKind.agent_timeout, frames=stacks) from None
        except ConnectionError:
            raise await self._died(crew, process, "while its module was imported") from None
        if kind == "failed":
            raise crew.never_works(rest[0])
        has_session, crew.is_awaited = rest
        crew.runs_beside = has_session and crew.is_awaited

    async def _run_alone(self, crew: _Crew, row: Any, session: dict[str, str]) -> AgentReturn:
        process = await self._own.lend(crew, partial(self._start, crew))
        process.is_spent = True
        try:
            number, answer = process.call("call", row, session)
            await self._server.clock.wait(answer, self.config.episode_timeout_s)
            if not answer.done():
                raise await self._late(crew, process, number, answer)
            if answer.exception():
                raise await self._died(crew, process)
            kind, told, output, has_left = answer.result()
            is_used_once = crew.runs_beside or isinstance(crew.agent, AgentCommand)
            process.is_spent = bool(is_used_once or has_left)
            return crew.end_of(kind, told, output)
        finally:
            await self._own.take_back(crew, process)

    async def _run_beside(self, crew: _Crew, row: Any, session: dict[str, str]) -> AgentReturn:
        async with crew.starting:
            if crew.shared is None or not crew.shared.is_usable:
                if crew.shared is not None:
                    await self._own.end(crew.shared)
                crew.shared = await self._own.idle_one(crew) or await self._start(crew)
            process = crew.shared
        number, answer = process.call("call", row, session)
        try:
            await self._server.clock.wait(answer, self.config.episode_timeout_s)
            if not answer.done():
                error = await self._late(crew, process, number, answer)
                if not answer.done():  # the others lose their process, and are told so
                    await self._own.end(process)
                raise error
        except asyncio.CancelledError:
            cancel = asyncio.create_task(self._cancel(process, number, answer))
            self._cancels.add(cancel)
            cancel.add_done_callback(self._cancels.discard)
            raise
        if answer.exception():
            raise await self._died(crew, process)
        if process.is_forged:  # the others are told that they lose it
            await self._own.end(process)
        kind, told, output, _ = answer.result()
        return crew.end_of(kind, told, output)

    async def _cancel(
        self, process: OwnProcess, number: int, answer: asyncio.Future[list[Any]]
    ) -> None:
        """Ends a call that nobody waits for, and its process if it goes on."""
        process.tell("cancel", number)
        await asyncio.wait([answer], timeout=CANCEL_GRACE_S)
        if not answer.done():
            await self._own.end(process)

    async def _late(
        self, crew: _Crew, process: OwnProcess, number: int, answer: asyncio.Future[list[Any]]
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
            frames = await self._own.stacks(process)
        what = (
            f"took longer than {self.config.episode_timeout_s:g} s; make it faster, or raise "
            "agents.episode_timeout_s"
        )
        return crew.error(what, RejectionKind.agent_timeout, frames, place)

    async def _died(
        self, crew: _Crew, process: OwnProcess, when: str = "while it ran"
    ) -> AgentError:
        """What to say where a process has ended."""
        await self._own.end(process)
        what = f"its process ended {when} ({process.child.how})"
        return crew.error(f"{what}; see {self._own.log_path}", RejectionKind.agent_died)
