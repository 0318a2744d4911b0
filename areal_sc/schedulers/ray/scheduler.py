"""RayScheduler: the nodes of a Ray cluster, for teams without SLURM.

    script ── lines of JSON ──► bridge, a process beside it ── Ray ──► AgentActor ──► agent
       ▲                                                                                │
       └──────────────── the agent joins, and all else goes past Ray ───────────────────┘

Each node is a bundle of one placement group. Ray moves the bundle of a node that is lost, as soon
as another node has room for it. What the run has in the cluster is deleted when it ends; where the
script is killed, agents and workers live on, and if nobody comes back, `Keeper` deletes the rest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import logging
import math
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from msgspec import json

from areal_sc.config.schema import SchedulerConfig
from areal_sc.config.slurm_settings import RayConfig
from areal_sc.errors import ConfigError, SchedulerSilent
from areal_sc.log import log_tail
from areal_sc.schedulers.agent_process import agent_environment, start_beside, wait_or_kill
from areal_sc.schedulers.agents_elsewhere import AgentsElsewhere, AgentStart, StartCommand

_DIGEST_CHARS: Final = 12
CONNECT_LIMIT_S: Final = 55.0
"""A cluster that is there has answered by then, also on a machine that is busy."""
ANSWER_LIMIT_S: Final = 20.0
_END_LIMIT_S: Final = 5.0
_PAUSES_S: Final = (1.0, 30.0)
"""Before a further process is started in place of one that has ended: at first, and at most."""
_LOST: Final = "the connection to the Ray cluster is lost"


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentEnd:
    """How an agent ended.

    Attributes:
        how: in words that follow "ended with".
        tail: last lines of its log, where this machine does not see that.
    """

    how: str
    tail: str = ""


class RayCluster:
    """A connection to the cluster, as long as the script has the run.

    A process beside the script asks Ray in its place (`bridge`): Ray ends the process of a driver
    whose cluster is gone, and takes its signals; what comes from the cluster is unpickled. So none
    of that is done in the script. Where that process ends, it is started again, until the
    scheduler is closed.

    consumes     questions of the scheduler; what the process tells of agents
    waits for    an answer, within the limit of each question
    unblocked by the process, or its end

    Args:
        config: `scheduler.ray`.
        prefix: what the names of all that the run has in the cluster begin with.
        log_path: for the process that asks Ray.

    Attributes:
        hosts: IP addresses of the cluster's nodes.
        ends: of agents, by the name of their start.
    Raises: ConfigError: Ray is not installed, or the cluster does not take this script.
    """

    def __init__(self, config: RayConfig, prefix: str, log_path: Path) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "scheduler.type: ray needs the package ray, which is not installed: "
                "pip install 'areal-sc[ray]'"
            )
        self.hosts: list[str] = []
        self.ends: dict[str, AgentEnd] = {}
        self._address = config.address
        self._log_path = log_path
        self._first_line = json.encode({"settings": asdict(config), "prefix": prefix}) + b"\n"
        self._watched: set[str] = set()
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Any]] = {}
        self._one_writes = threading.Lock()
        self._closed = threading.Event()
        self._connected: Future[None] = Future()  # for the first time
        self._is_connected = False
        self._process = self._start_process()
        self._thread = threading.Thread(target=self._keep_up, name="ray", daemon=True)
        self._thread.start()
        try:
            self._connected.result(CONNECT_LIMIT_S)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise self._refusal(f"no answer within {CONNECT_LIMIT_S:g} s") from None
            raise

    def ask(self, what: str, limit_s: float = ANSWER_LIMIT_S, **arguments: Any) -> Any:
        """What the method of that name of `Bridge` returns.

        Raises: SchedulerSilent: the cluster does not answer now, or cannot do that.
        """
        number, answer = next(self._numbers), Future[Any]()
        self._asked[number] = answer
        try:
            self._write({"what": what, "arguments": arguments, "number": number})
            return answer.result(limit_s)
        except TimeoutError:
            raise SchedulerSilent(f"Ray does not answer: {what} took {limit_s:g} s") from None
        finally:
            del self._asked[number]

    def start(self, name: str, **arguments: Any) -> None:
        """An agent is started; `ends` tells of it, also when it does not come up."""
        self._watched.add(name)
        try:
            self._write({"what": "start", "arguments": {"name": name, **arguments}})
        except SchedulerSilent as error:
            self.ends[name] = AgentEnd(f"the failure of its start: {error}")

    def watch(self, name: str) -> None:
        """`ends` tells of an agent of an earlier start of the script, when it has ended."""
        self._watched.add(name)
        with suppress(SchedulerSilent):  # else the next process is told
            self._write({"what": "watch", "arguments": {"name": name}})

    def close(self) -> None:
        """Nobody asks any more."""
        self._closed.set()
        with self._one_writes, suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        wait_or_kill(self._process, _END_LIMIT_S)
        self._thread.join(_END_LIMIT_S)

    def _start_process(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "areal_sc.schedulers.ray.bridge"]
        env = os.environ | agent_environment(os.environ)
        process = start_beside(command, self._log_path, env, subprocess.PIPE)
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(self._first_line)
            process.stdin.flush()
        return process

    def _keep_up(self) -> None:
        pause_s, longest_s = _PAUSES_S
        while True:
            self._is_connected = False
            with self._process.stdout as output:  # type: ignore[union-attr]  # it is a pipe
                for line in output:
                    if line.startswith(b"{"):  # a `sitecustomize`, say, may print others
                        self._take(json.decode(line))
            self._process.wait()
            for answer in list(self._asked.values()):
                answer.set_exception(SchedulerSilent(_LOST))
            if not self._connected.done():
                tail = "\n".join(log_tail(self._log_path))
                self._connected.set_exception(self._refusal(f"Ray has ended:\n{tail}"))
            pause_s = _PAUSES_S[0] if self._is_connected else min(2 * pause_s, longest_s)
            if self._connected.exception() is not None or self._closed.wait(pause_s):
                return
            logger.warning("%s; it is made again (%s)", _LOST, self._log_path)
            with self._one_writes:
                if self._closed.is_set():
                    return
                self._process = self._start_process()

    def _take(self, told: dict[str, Any]) -> None:
        match told:
            case {"hosts": hosts}:
                self.hosts, self._is_connected = hosts, True
                if not self._connected.done():
                    self._connected.set_result(None)
                    return
                logger.warning("the connection to the Ray cluster is there again")
                for name in self._watched - self.ends.keys():
                    self.watch(name)
            case {"refused": why}:
                if not self._connected.done():
                    self._connected.set_exception(self._refusal(why))
                logger.warning("the Ray cluster: %s", why)
            case {"ended": name, "how": how, "tail": tail}:
                self.ends[name] = AgentEnd(how, tail)
            case {"number": number, **rest} if answer := self._asked.get(number):
                if "failure" in rest:
                    answer.set_exception(SchedulerSilent(f"Ray: {rest['failure']}"))
                else:
                    answer.set_result(rest["value"])

    def _write(self, question: dict[str, Any]) -> None:
        """Raises: SchedulerSilent: nobody reads it."""
        with self._one_writes:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.encode(question) + b"\n")
                self._process.stdin.flush()
            except (OSError, ValueError) as error:  # the second: it is closed
                raise SchedulerSilent(_LOST) from error

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(f"scheduler.ray.address={self._address}: {why}")


class RayAgent:
    """An agent of an actor."""

    def __init__(self, start: AgentStart, cluster: RayCluster) -> None:
        self.start = start
        self._cluster = cluster

    def how_it_ended(self) -> str | None:
        end = self._cluster.ends.get(self.start.name)
        if end is None:
            return None
        if end.tail and not self.start.log_path.exists():
            with suppress(OSError):
                self.start.log_path.write_text(end.tail)
        return end.how

    def end(self, grace_s: float, pid: int) -> bool:
        try:
            limit_s = grace_s + ANSWER_LIMIT_S
            return bool(self._cluster.ask("end", limit_s, name=self.start.name, grace_s=grace_s))
        except SchedulerSilent as error:
            logger.warning("%s cannot be ended now: %s", self.start.name, error)
            return False


class RayScheduler(AgentsElsewhere[RayAgent]):
    """Lends nodes of the cluster that `config.ray` names."""

    may_queue = True

    def reach(self, undo: ExitStack) -> tuple[int, Sequence[str]]:
        settings = self.config.ray
        for name, number in settings.resources.items():
            if not 0 < number < math.inf:
                raise ConfigError(
                    f"scheduler.ray.resources.{name}: expected a number above 0, got {number}"
                )
        prefix = f"areal_sc-{self.keys.run_id}-"
        what: dict[str, Any] = {"nodes": settings.nodes, "resources": settings.resources}
        # other settings are those of another group: its places would not be what is wanted
        self._place = {"group": f"{prefix}{_digest(what)}", **what}
        self._cluster = RayCluster(settings, prefix, self.folder.log_path("ray"))
        undo.callback(self._give_back)
        told = self._cluster.ask("count", **self._place)
        if told["lack"]:
            raise ConfigError(f"scheduler.ray: {told['lack']}")
        return told["count"], self._cluster.hosts

    def idle_machine(self) -> str | None:
        names = [agent.start.name for agent in self.agents]
        used = [agent.start.machine for agent in self.agents]
        try:
            there = self._cluster.ask("place", **self._place, kept=names)
        except SchedulerSilent as error:
            logger.warning("no node is had of the Ray cluster now: %s", error)
            return None
        return next((machine for machine in there if machine not in used), None)

    def start_agent(self, start: AgentStart, command: StartCommand, invitation: bytes) -> RayAgent:
        self._cluster.start(
            start.name,
            group=self._place["group"],
            machine=start.machine,
            invitation=invitation.decode().strip(),
            arguments=command.arguments,
            variables=command.variables,
            log_path=str(start.log_path),
            node_folder=self.config.node_folder,
        )
        return RayAgent(start, self._cluster)

    def found_agent(self, start: AgentStart) -> RayAgent | None:
        self._cluster.watch(start.name)
        return RayAgent(start, self._cluster)

    @property
    def config_of_agents(self) -> SchedulerConfig:
        """Their own settings, which others can read on their nodes: what may be secret is hashed.

        The cluster is the same one under another address.
        """
        settings = self.config.ray
        hashed = {"sha256": _digest(settings.runtime_env)} if settings.runtime_env else {}
        ray = replace(settings, address=RayConfig().address, runtime_env=hashed)
        return replace(super().config_of_agents, ray=ray)

    def _give_back(self) -> None:
        if not self.term.is_over:  # else it is another script's
            try:
                self._cluster.ask("release")
            except SchedulerSilent as error:
                logger.warning("the Ray cluster gets its nodes back later: %s", error)
        self._cluster.close()


def _digest(what: Any) -> str:
    return hashlib.sha256(json.encode(what, order="sorted")).hexdigest()[:_DIGEST_CHARS]
