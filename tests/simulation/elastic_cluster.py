"""A cluster of which a run asks for nodes, and to which it gives them back."""

from __future__ import annotations

import asyncio
from pathlib import Path

from simulation.behavior import Behavior
from simulation.cluster import SimulatedCluster

from areal_sc.config.placement import Purpose
from areal_sc.errors import ConfigError
from areal_sc.nodes.spec import NodeFacts
from areal_sc.run.run_status import Wait
from areal_sc.schedulers.base import Node


class ElasticCluster(SimulatedCluster):
    """A node for training, and others for one rollout worker each.

    Attributes:
        num_first: nodes for rollout workers that the run begins with; all but one are on their way.
        most_nodes: for rollout workers, together.
        asked: all that were on their way, by name; an event that is set lets one come.
        given_back: names of nodes, in order.
    """

    num_first = 1
    most_nodes = 8

    def __init__(self, run_dir: Path, behavior: Behavior, seed: int = 0) -> None:
        super().__init__(run_dir, behavior, seed)
        self.asked: dict[str, asyncio.Event] = {}
        self.given_back: list[str] = []
        self._now: list[Node] = []

    async def nodes(self) -> list[Node]:
        if not self._now:
            purposes = {"trainer": Purpose.train, "generator": Purpose.rollout}
            for name, purpose in purposes.items():
                facts = self.start_agent(name)
                node = Node(facts, self.run_dir / "agent.log", purpose=purpose, max_workers=1)
                self._now.append(node)
            for _ in range(self.num_first - 1):
                self._expect()
        return list(self._now)

    async def ended_nodes(self) -> dict[Node, str]:
        statuses = {node: self.agents[node.name].exit_status for node in self._now if node.is_there}
        return {node: how for node, how in statuses.items() if how is not None}

    async def renew(self, node: Node, incarnation: str) -> None:
        if node.is_there:
            await super().renew(node, incarnation)
            return
        await self.asked[node.name].wait()
        await self.spend(self.behavior.agent_start_s)
        node.facts, node.coming = self.start_agent(node.name), None

    async def ask_node(self) -> Node:
        await asyncio.sleep(0.1)
        if sum(node.purpose is Purpose.rollout for node in self._now) >= self.most_nodes:
            raise ConfigError(f"there are only {self.most_nodes} nodes")
        return self._expect()

    async def give_back(self, node: Node) -> None:
        self._now.remove(node)
        self.given_back.append(node.name)
        if node.is_there:
            lives = [it.name for it in self.workers_on(node.name) if it.exit_status is None]
            assert not lives, "somebody works there"
            self.agents[node.name].end("exit code 0")

    def _expect(self) -> Node:
        name = f"asked-{len(self.asked)}"
        self.asked[name] = asyncio.Event()
        facts = NodeFacts(name, name, 0, "", "", "")
        wait = Wait("a node", "the cluster", self.now_s)
        path = self.run_dir / "agent.log"
        node = Node(facts, path, purpose=Purpose.rollout, coming=wait, max_workers=1)
        self._now.append(node)
        return node
