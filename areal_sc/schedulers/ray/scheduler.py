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
import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Final

from msgspec import json

from areal_sc.config.ray_settings import RayConfig
from areal_sc.config.schema import SchedulerConfig
from areal_sc.errors import ConfigError, SchedulerSilent
from areal_sc.schedulers.agents_elsewhere import AgentsElsewhere, AgentStart, StartCommand
from areal_sc.schedulers.ray.cluster import ANSWER_LIMIT_S, RayCluster

_DIGEST_CHARS: Final = 12

logger = logging.getLogger(__name__)


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
