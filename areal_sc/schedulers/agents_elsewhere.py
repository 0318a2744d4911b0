"""Base of schedulers of your own, whose agents run on other machines and join the script.

    start_agent ──► a command runs on a machine ──► its agent joins ──► Node
       ▲                                                                 │
       └── renew: the agent is killed, if its machine answers, and refused from then on

    found_agent ──► an agent that a killed script has left, with its workers ──► Node

A subclass says how an agent is started, and on which machine: `examples/ssh_scheduler.py`, and
`ray.scheduler`. Files of the script are brought to machines that do not see its run folder.

The name of a start says on which machine it is, and agents note it in their files: so the next
start of a killed script knows where they are. Those that live go on, unless their settings differ;
of the others' machines it gets new ones.

consumes     agents that join; `renew`, by controllers
waits for    an agent, `startup_timeout_s` at most; and, without a limit, for a machine in place of
             one that is lost
unblocked by that agent, or the end of its command; looks at the machines; `close`
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shlex
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final, Generic, Protocol, TypeVar

from msgspec import json

from areal_sc.config.schema import SchedulerConfig
from areal_sc.errors import ArealError, ConfigError, WorkerStartError
from areal_sc.ids import random_id
from areal_sc.log import log_tail
from areal_sc.nodes.joining import START_VARIABLE
from areal_sc.nodes.spec import Joining, LivingWorker, NodeFacts
from areal_sc.run.agent_files import delete_files_of_dead_agents, end_agents, living_agents
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.agent_calls import FoundAgent, end_found, find_agents
from areal_sc.schedulers.agent_process import AGENT, agent_environment
from areal_sc.schedulers.base import Node
from areal_sc.schedulers.open_run import OpenRun, settings_of_agents
from areal_sc.transport.sockets.interface import Interface

_CLOSED: Final = "no agent is started: the scheduler is closed"
_LOOK_S: Final = 0.1
_MARK: Final = "#"
"""Between a machine and the number of a start, in the name of that."""
MACHINE_LOOK_S: Final = 5.0
"""Between two looks for a machine."""
END_FACTOR: Final = 2
"""An agent may take as long as its workers, and once more."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentStart:
    """One start of an agent.

    Attributes:
        name: no other start of the run has it.
        machine: where it is, in the subclass's words.
        log_path: for its output.
    """

    name: str
    machine: str
    log_path: Path


@dataclass(frozen=True)
class StartCommand:
    """What a machine runs, for as long as the agent lives.

    Attributes:
        arguments: of the Python interpreter.
        variables: of the environment, beside what the machine has.
    """

    arguments: list[str]
    variables: dict[str, str]

    @property
    def shell_text(self) -> str:
        """A line for a shell of a machine whose interpreter is where this script's is."""
        variables = (f"{name}={value}" for name, value in self.variables.items())
        return f"exec {shlex.join(['env', *variables, AGENT[0], *self.arguments])}"


class AgentElsewhere(Protocol):
    """An agent on another machine."""

    start: AgentStart

    def how_it_ended(self) -> str | None:
        """In words that follow "ended with"; None: nobody says that it has ended."""

    def end(self, grace_s: float, pid: int) -> bool:
        """SIGTERM, and SIGKILL if it has not ended by then; returns when it has.

        Args:
            grace_s: 0: it is killed at once.
            pid: of the agent on its machine; 0: it has not joined.
        Returns: whether it has; False: its machine does not answer.
        """


A = TypeVar("A", bound=AgentElsewhere)


class AgentsElsewhere(OpenRun, ABC, Generic[A]):
    """Lends the machines on which a subclass starts agents.

    Args:
        config, folder: see `make_scheduler`; `config.settings` is the subclass's own.

    Attributes:
        config: see `Scheduler`.
        folder: of the run.
        agents: those that were started, and neither replaced nor given up.
        may_queue: machines may be on their way when a run begins, which has no limit; else a run
            that gets too few at once is refused.
    Raises: RunFolderError: another process runs in the folder, or agents of a script that was
        killed do on their machines, or it cannot be used. ConfigError: see `reach`; or there is no
        way to the hosts. WorkerStartError: there are too few machines.
    """

    may_queue: ClassVar[bool] = False

    def __init__(self, config: SchedulerConfig, folder: RunFolder | None = None) -> None:
        self.agents: list[A] = []
        self._nodes: dict[Node, A] = {}
        self._workers: dict[str, list[LivingWorker]] = {}  # by the agent's start
        self._numbers = itertools.count()
        self._one_waits = threading.Lock()  # controllers may have event loops of their own
        self._one_starts = threading.Lock()  # an agent, and none after the close
        self._one_renews: dict[Node, threading.Lock] = {}
        self._closed = threading.Event()
        with self._opened(config, folder) as (folder, undo):
            num_nodes, hosts = self.reach(undo)
            self._num_nodes = num_nodes
            end_agents(folder.path, config.shutdown_timeout_s, but_of_jobs=True)
            found = self._find(num_nodes)
            delete_files_of_dead_agents(folder.path)
            interface = Interface.towards(config.transport.bind, hosts)
            self._joins = self._open_joins(interface, folder, undo)
            undo.callback(self._end)
            self._take_over(found)
            while len(self.agents) < num_nodes and self._start(None) is not None:
                pass
            if len(self.agents) < num_nodes and not found and not self.may_queue:
                raise WorkerStartError(f"there are fewer machines than the {num_nodes} wanted")

    @abstractmethod
    def reach(self, undo: ExitStack) -> tuple[int, Sequence[str]]:
        """Makes the connections that the other methods need; `folder` and `keys` are there.

        Args:
            undo: what is to be undone when all agents have ended.
        Returns: how many machines are lent; and hosts of some, by name or address. Agents reach the
            script at the address from which that reaches the hosts, unless `transport.bind` names
            another.
        Raises: ConfigError: these machines are not to be had.
        """

    @abstractmethod
    def idle_machine(self) -> str | None:
        """One that answers, and on which none of the `agents` is; None: there is none now.

        It is known by that name until an agent of it is lost with the machine.
        """

    @abstractmethod
    def start_agent(self, start: AgentStart, command: StartCommand, invitation: bytes) -> A:
        """Has a machine run a command, which runs as long as the agent does.

        Args:
            invitation: what the command reads first from its standard input, which stays open as
                long as the script lives. Nobody else may see it: where others can, an agent makes a
                key for which it is sealed (`STARTER_VARIABLE`).
        """

    @abstractmethod
    def found_agent(self, start: AgentStart) -> A | None:
        """One that an earlier start of the script has started; None: its machine is not known."""

    async def nodes(self) -> Sequence[Node]:
        return await asyncio.to_thread(self._wait_for_nodes)

    async def ended_nodes(self) -> dict[Node, str]:
        ends = {node: agent.how_it_ended() for node, agent in self._nodes.items()}
        return {node: how for node, how in ends.items() if how is not None}

    async def renew(self, node: Node, incarnation: str) -> None:
        await asyncio.to_thread(self._replace, node, incarnation)

    def _wait_for_nodes(self) -> list[Node]:
        with self._one_waits:
            if not self._nodes:
                while len(self.agents) < self._num_nodes:
                    self._start_in_place_of(None)
                facts = [(self._wait_for_facts(agent), agent) for agent in self.agents]
                nodes = {
                    Node(its, agent.start.log_path, self._workers.pop(agent.start.name, [])): agent
                    for its, agent in facts
                }
                self._one_renews = {node: threading.Lock() for node in nodes}
                self._nodes = nodes
            return list(self._nodes)

    def _replace(self, node: Node, incarnation: str) -> None:
        with self._one_renews[node]:
            if node.facts.incarnation != incarnation:
                return
            past = self._nodes[node]
            self._joins.refuse(incarnation)  # where it lives on, cut off, it ends when it is back
            agent = self._start_in_place_of(past)
            try:
                facts = self._wait_for_facts(agent)
            except ArealError:
                agent.end(0.0, self._pid_of(agent))
                self.agents.remove(agent)
                raise
            self.agents.remove(past)
            node.facts, node.found, node.log_path = facts, [], agent.start.log_path
            self._nodes[node] = agent

    def _start_in_place_of(self, past: A | None) -> A:
        """Waits for a machine.

        Args:
            past: None: an agent of an earlier start, which does not live any more.
        Raises: WorkerStartError: the scheduler is closed meanwhile.
        """
        is_told = False
        while True:
            has_ended = past is not None and past.end(0.0, self._pid_of(past))
            with self._one_starts:
                if self._closed.is_set():
                    raise WorkerStartError(_CLOSED)
                agent = self._start(past.start.machine if past and has_ended else None)
            if agent is not None:
                return agent
            if not is_told:
                name = past.start.name if past else f"agent {len(self.agents) + 1}"
                logger.warning("%s: no other machine stands by; it is waited for one", name)
                is_told = True
            self._closed.wait(MACHINE_LOOK_S)

    def _find(self, num_nodes: int) -> list[tuple[A, FoundAgent]]:
        """Agents of an earlier start that go on; others that answer have ended.

        Raises: RunFolderError: one of those has not. StaleTerm.
        """
        wanted = settings_of_agents(self.config_of_agents)
        found: list[tuple[A, FoundAgent]] = []
        others: list[FoundAgent] = []
        for it in find_agents(self.folder, self.keys):
            agent = self._agent_of(it.joining.job)
            told = it.described
            is_alike = settings_of_agents(told.config, told.calls_format) == wanted
            if agent is not None and is_alike and len(found) < num_nodes:
                found.append((agent, it))
            else:
                others.append(it)
        limit_s = END_FACTOR * self.config.shutdown_timeout_s
        end_found(others, self.keys, self.folder, limit_s)
        return found

    def _take_over(self, found: Sequence[tuple[A, FoundAgent]]) -> None:
        """These agents are the run's; those that do not answer are killed, where that can be."""
        adopted = self._joins.open([it for _, it in found])
        for agent, it in found:
            if it not in adopted:
                continue
            self.agents.append(agent)
            self._workers[agent.start.name] = workers = it.described.workers
            logger.info("%s goes on, with workers=%d", agent.start.name, len(workers))
        names = [agent.start.name for agent in self.agents]
        for file in living_agents(self.folder.path):
            silent = None if file.job in names else self._agent_of(file.job)
            if silent is not None:
                logger.warning("%s does not answer; it is replaced", file.job)
                silent.end(0.0, file.pid)

    def _agent_of(self, name: str) -> A | None:
        """The agent of an earlier start by its name; None: another scheduler has started it."""
        start = self._start_of(name)
        return None if start is None else self.found_agent(start)

    def _start_of(self, name: str) -> AgentStart | None:
        """None: it is the name of no start."""
        machine, mark, number = name.rpartition(_MARK)
        path = self.folder.log_path(f"agent/{machine}-{number}")
        return AgentStart(name, machine, path) if mark else None

    @property
    def config_of_agents(self) -> SchedulerConfig:
        """The settings that agents are started with; those of others end when the script begins."""
        return replace(self.config, run_dir=str(self.folder.path), settings={})

    def _start(self, machine: str | None) -> A | None:
        """Args: machine: None: any one."""
        machine = machine or self.idle_machine()
        if machine is None:
            return None
        start = self._start_of(f"{machine}{_MARK}{self.term.number}.{next(self._numbers)}")
        assert start is not None
        config = json.encode(self.config_of_agents).decode()
        command = StartCommand(
            [*AGENT[1:], self.keys.run_id, config, self._joins.address],
            {START_VARIABLE: start.name, **agent_environment(os.environ)},
        )
        invitation = f"{self._joins.invite(random_id(), 1)}\n".encode()
        agent = self.start_agent(start, command, invitation)
        self.agents.append(agent)
        return agent

    def _wait_for_facts(self, agent: A) -> NodeFacts:
        """What the agent tells when it serves. Blocks, but not for ever.

        Raises: WorkerStartError: it did not come up. ConfigError: its machine cannot be used.
        """
        limit_s = self.config.startup_timeout_s
        give_up_s = time.monotonic() + limit_s
        while (joining := self._joined(agent)) is None:
            how = agent.how_it_ended()
            if how is not None or time.monotonic() > give_up_s:
                limit = f"did not join within scheduler.startup_timeout_s={limit_s:g}"
                what = f"{agent.start.name} {f'ended with {how}' if how else limit}"
                log = agent.start.log_path
                raise WorkerStartError.with_log(what, log, log_tail(log))
            if self._closed.wait(_LOOK_S):
                raise WorkerStartError(_CLOSED)
        if isinstance(joining.facts, str):
            raise ConfigError(f"{agent.start.name}: {joining.facts}")
        return joining.facts

    def _joined(self, agent: A) -> Joining | None:
        return next(iter(self._joins.joined(agent.start.name).values()), None)

    def _pid_of(self, agent: A) -> int:
        joining = self._joined(agent)
        return joining.pid if joining else 0

    def _end(self) -> None:
        """All that can be reached; the others end when they hear nobody for long."""
        limit_s = self.config.shutdown_timeout_s
        self._closed.set()
        if self.term.is_over:
            return
        with self._one_starts:
            ends = [  # no pool of threads: there is none any more when the interpreter ends
                threading.Thread(target=agent.end, args=(limit_s, self._pid_of(agent)))
                for agent in self.agents
            ]
        for end in ends:
            end.start()
        for end in ends:
            end.join()
        self.folder.join_path.unlink(missing_ok=True)
