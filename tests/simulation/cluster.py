"""A `Scheduler` and a `Transport` for controllers that run in virtual time.

The cluster keeps its own books of what its workers were asked to do, for tests to compare with.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from simulation.agent import SimulatedAgent
from simulation.behavior import Behavior, Number
from simulation.connection import SimulatedConnection
from simulation.weight_groups import SimulatedWeightGroup
from simulation.workers import (
    RowKey,
    SimulatedRolloutWorker,
    SimulatedStore,
    SimulatedTrainWorker,
    SimulatedWorker,
    SnapshotKey,
)

from areal_sc.config.schema import SchedulerConfig, TransportConfig
from areal_sc.errors import ArealError, ShardGone, WorkerStartError
from areal_sc.metadata import BatchMetadata, RowMetadata
from areal_sc.schedulers.base import Node
from areal_sc.transport.bulk.session import OWNER_ABSENCE_S
from areal_sc.transport.rpc.method import A, Method, R
from areal_sc.workers.calls import RunGroup
from areal_sc.workers.spec import NodeFacts, WorkerOrder


@dataclass(frozen=True)
class GroupStart:
    """A worker was asked to run a group."""

    time_s: float
    worker: str
    worker_version: int
    group_id: int
    attempt: int
    admitted_version: int
    dataset_index: int
    num_running: int  # groups that ran then, on all workers


@dataclass
class TrainedStep:
    """What the ranks were given to train at one policy version, by number of the minibatch."""

    version: int
    time_s: float
    num_running_groups: int
    minibatches: dict[int, list[RowMetadata]] = field(default_factory=dict)
    min_token_versions: set[int | None] = field(default_factory=set)

    @property
    def rows(self) -> list[RowMetadata]:
        """Those of all minibatches."""
        return [row for rows in self.minibatches.values() for row in rows]


class SimulatedCluster:
    """Lends simulated nodes, and knows what becomes of their workers.

    Attributes:
        rollout_class, train_class: what it starts.
        num_nodes: that it lends.
        agents: by name of their node.
        workers: by name, e.g. `rollout/0`.
        attempt_of: shard id -> the attempt of its group that sealed it.
        starts: groups that workers were asked to run, in order.
        sealed_rows: (group id, attempt) -> the rows that a worker sealed.
        rejected_groups: whose rows a worker has all rejected.
        trained: what the ranks trained, in order.
        sealed_versions: (time, version) of each rank's publications.
        on_forgotten: is told the id and the group of every shard of rows that a sweep drops.
        snapshots: what ranks have written: the `past` of each.
        weight_groups: all there ever were, by name.
        on_end: is told of every life of a worker that ends.
    """

    def __init__(self, run_dir: Path, behavior: Behavior, seed: int = 0) -> None:
        self.run_dir = run_dir
        self.rollout_class: type[SimulatedWorker] = SimulatedRolloutWorker
        self.train_class: type[SimulatedWorker] = SimulatedTrainWorker
        self.config = SchedulerConfig(run_dir=str(run_dir), transport=TransportConfig())
        self.behavior = behavior
        self.rng = random.Random(seed)
        self.workers: dict[str, SimulatedWorker] = {}
        self.attempt_of: dict[str, int] = {}
        self.starts: list[GroupStart] = []
        self.sealed_rows: dict[tuple[int, int], tuple[RowMetadata, ...]] = {}
        self.trained: list[TrainedStep] = []
        self.rejected_groups: set[int] = set()
        self.sealed_versions: list[tuple[float, int]] = []
        self.on_forgotten: Callable[[str, int], None] = lambda shard_id, group_id: None
        self.on_end: Callable[[SimulatedWorker | SimulatedAgent], None] = lambda peer: None
        self.snapshots: dict[SnapshotKey, list[tuple[int, tuple[RowKey, ...]]]] = {}
        self.weight_groups: dict[str, SimulatedWeightGroup] = {}
        self.agents: dict[str, SimulatedAgent] = {}
        self.num_nodes = 1
        self._nodes: list[Node] = []
        self._ids = itertools.count()
        self._ports = itertools.count(1)
        self._one_renews = asyncio.Lock()
        self._starting: dict[str, WorkerOrder] = {}  # by the worker's name

    # ------------------------------------------------------------------ Scheduler

    async def nodes(self) -> list[Node]:
        if not self._nodes:
            for number in range(self.num_nodes):
                facts = self.start_agent(f"node-{number}")
                self._nodes.append(Node(facts, self.run_dir / "agent.log"))
        return self._nodes

    async def ended_nodes(self) -> dict[Node, str]:
        statuses = {node: self.agents[node.name].exit_status for node in self._nodes}
        return {node: how for node, how in statuses.items() if how is not None}

    async def renew(self, node: Node, incarnation: str) -> None:
        async with self._one_renews:
            if node.facts.incarnation == incarnation:
                self.agents[node.name].end("signal 9 (SIGKILL)")
                await self.spend(self.behavior.agent_start_s)
                node.facts = self.start_agent(node.name)

    def close(self) -> None:
        """Nothing is left to close."""

    def start_agent(self, node: str) -> NodeFacts:
        """The first one of a node, or one in place of it."""
        agent = self.agents[node] = SimulatedAgent(self, node, self.new_id())
        root = self.config.run_dir
        return NodeFacts(node, node, 0, root, agent.address, agent.incarnation)

    async def start(self, order: WorkerOrder, node: str) -> SimulatedWorker:
        """An agent starts a worker; an earlier life of it is killed, and its shards are adopted.

        Raises: WorkerStartError: a later start has killed it.
        """
        earlier = self.workers.get(order.name)
        if earlier is not None:
            earlier.end("signal 9 (SIGKILL)")
        self._starting[order.name] = order
        await self.spend(self.rng.random())
        if self._starting[order.name] is not order:
            raise WorkerStartError(f"worker {order.name} was killed before it served")
        kind = self.rollout_class if order.role == "rollout" else self.train_class
        worker = kind(self, order, node)
        if earlier is not None:
            worker.store.adopt(earlier.store)
        self.workers[order.name] = worker
        return worker

    # ------------------------------------------------------------------ for workers and tests

    def transport(self) -> SimulatedTransport:
        """What the controllers reach the workers by."""
        return SimulatedTransport(self)

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def rollout_workers(self) -> list[SimulatedRolloutWorker]:
        return [w for w in self.workers.values() if isinstance(w, SimulatedRolloutWorker)]

    @property
    def train_workers(self) -> list[SimulatedTrainWorker]:
        return [w for w in self.workers.values() if isinstance(w, SimulatedTrainWorker)]

    def workers_on(self, node: str) -> list[SimulatedWorker]:
        return [worker for worker in self.workers.values() if worker.node == node]

    def new_id(self) -> str:
        """Deterministic, of the length of real ids."""
        return f"{next(self._ids):012x}"

    def keep_in_memory(self, node: str, lineage: int, kept: int) -> None:
        """Of a node's snapshots of this lineage those of one version stay."""
        for key in list(self.snapshots):
            if key[:2] == (node, lineage) and key.version != kept:
                del self.snapshots[key]

    async def write_snapshot(self, rank: SimulatedTrainWorker) -> None:
        """A rank writes its part. Raises: CheckpointError: it could not be written."""
        await rank.spend(self.behavior.sealing_s)

    def new_port(self) -> int:
        return next(self._ports)

    def owner(self, node_id: str, address: str) -> SimulatedStore:
        worker = self.workers[node_id]
        if worker.exit_status is not None or worker.address != address:
            raise ShardGone(f"a shard is gone with its owner {node_id} at {address}")
        return worker.store

    async def reach(self, node_id: str, address: str) -> SimulatedStore:
        """The owner of a shard, by somebody who reads from it; a dead one is waited for."""
        give_up_s = self.now_s + (OWNER_ABSENCE_S if self.config.max_deaths else 0.0)
        while True:
            if self.workers[node_id].exit_status is None or self.now_s >= give_up_s:
                return self.owner(node_id, address)
            await asyncio.sleep(0.2)

    def draw(self, number: Number) -> float:
        return number(self.rng) if callable(number) else number

    async def spend(self, duration: Number) -> None:
        await asyncio.sleep(self.draw(duration))

    def note_start(self, worker: SimulatedRolloutWorker, group: RunGroup) -> None:
        self.starts.append(
            GroupStart(
                self.now_s,
                worker.name,
                worker.version,
                group.group_id,
                group.attempt,
                group.admitted_version,
                group.prompt.index,
                sum(len(worker.running) for worker in self.rollout_workers),
            )
        )

    def note_trained(self, version: int, minibatch: int, batch: BatchMetadata) -> None:
        if not self.trained or self.trained[-1].version != version:
            num_running = sum(len(worker.running) for worker in self.rollout_workers)
            self.trained.append(TrainedStep(version, self.now_s, num_running))
        self.trained[-1].minibatches.setdefault(minibatch, []).extend(batch.rows)
        self.trained[-1].min_token_versions.add(batch.min_token_version)


class SimulatedTransport:
    """Connections to the workers of one cluster."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster

    def connect(
        self, address: str, node_id: str, incarnation: str, *, keeps_trying: bool = False
    ) -> SimulatedConnection:
        agents = {agent.address: agent for agent in self._cluster.agents.values()}
        peer = agents.get(address) or self._cluster.workers[node_id]
        assert address == peer.address
        latency_s = self._cluster.behavior.latency_s
        connection = SimulatedConnection(peer, incarnation, latency_s, keeps_trying=keeps_trying)
        peer.connections.append(connection)
        return connection

    async def call_all(
        self,
        calls: Sequence[tuple[SimulatedConnection, A]],
        method: Method[A, R],
        *,
        timeout_s: float,
        stops_at_error: bool = False,
    ) -> list[R | ArealError]:
        running = [
            asyncio.create_task(connection.call(method, args, timeout_s=timeout_s))
            for connection, args in calls
        ]
        until = asyncio.FIRST_EXCEPTION if stops_at_error else asyncio.ALL_COMPLETED
        try:
            done, _ = await asyncio.wait(running, return_when=until) if running else (set(), None)
            failed = [call for call in running if call in done and call.exception()]
            if failed and stops_at_error:
                return [call.exception() if call is failed[0] else None for call in running]
            return [call.exception() or call.result() for call in running]
        finally:
            for call in running:
                call.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def close(self) -> None:
        """Nothing is left to close: connections are closed by their users."""
