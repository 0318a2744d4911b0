"""A `Scheduler` and a `Transport` for controllers that run in virtual time.

The cluster keeps its own books of what its workers were asked to do, for tests to compare with.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from pathlib import Path

from simulation.agent import SimulatedAgent
from simulation.behavior import Behavior, Number
from simulation.cards import SmallCards
from simulation.network import Network, NetworkConnection
from simulation.process import PROCESS, Process
from simulation.store import Past, SimulatedStore, SnapshotKey
from simulation.train_worker import SimulatedTrainWorker
from simulation.weight_groups import SimulatedWeightGroup
from simulation.workers import SimulatedRolloutWorker, SimulatedWorker

from areal_sc.config.schema import SchedulerConfig, TransportConfig
from areal_sc.errors import ArealError, CheckpointError, ShardGone, WorkerStartError
from areal_sc.metadata import BatchMetadata, RowMetadata
from areal_sc.nodes.spec import ROLLOUT_ROLE, NodeFacts, WorkerOrder
from areal_sc.run.run_owner import RunTerm
from areal_sc.run.status_board import StatusBoard
from areal_sc.schedulers.base import Node
from areal_sc.transport.bulk.session import OWNER_ABSENCE_S
from areal_sc.transport.rpc.method import A, Method, R
from areal_sc.transport.security.keys import RunKeys
from areal_sc.transport.security.passes import Passes
from areal_sc.workers.calls import RunGroup


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
    incarnation: str  # of the worker


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
        losses: of machines, by name of their node; another one was lent in place of each.
        room_bytes: what workers that start from now on find for the stores of their node; 0: they
            do not say.
        workers: by name, e.g. `rollout/0`.
        shards_of: (group id, attempt) -> the newest shards with its rows.
        sealed_episodes: (group id, number) of each that has ended; not of one that was rejected,
            once the reply of its group alone tells of it.
        played_again: those of them that were played once more.
        num_taken_over: episodes that a later attempt did not play.
        addresses: of all lives of workers, by incarnation.
        starts: groups that workers were asked to run, in order.
        sealed_rows: (group id, attempt) -> the rows that a worker sealed.
        rejected_groups: whose rows a worker has all rejected.
        trained: what the ranks trained, in order.
        sealed_versions: (time, version) of each rank's publications.
        on_left: is told of every worker that is asked to end.
        on_forgotten: is told the id and the group of every shard of rows that a sweep drops.
        snapshots: what ranks have written: the `past` of each.
        weight_groups: all there ever were, by name.
        terms: of processes that have begun one.
        network: between the controllers and the nodes.
        cards: with room for the ranks of a machine, or for its rollout workers; None: any room.
        overfull: when both were there, or more bytes than the cards have.
    """

    def __init__(self, run_dir: Path, behavior: Behavior, seed: int = 0) -> None:
        self.run_dir = run_dir
        self.rollout_class: type[SimulatedWorker] = SimulatedRolloutWorker
        self.train_class: type[SimulatedWorker] = SimulatedTrainWorker
        self.config = SchedulerConfig(run_dir=str(run_dir), transport=TransportConfig())
        self.behavior = behavior
        self.rng = random.Random(seed)
        self.workers: dict[str, SimulatedWorker] = {}
        self.shards_of: dict[tuple[int, int], frozenset[str]] = {}
        self.sealed_episodes = set[tuple[int, int]]()
        self.played_again = list[tuple[int, int]]()
        self.num_taken_over = 0
        self.addresses: dict[str, str] = {}
        self.starts: list[GroupStart] = []
        self.sealed_rows: dict[tuple[int, int], tuple[RowMetadata, ...]] = {}
        self.trained: list[TrainedStep] = []
        self.rejected_groups: set[int] = set()
        self.sealed_versions: list[tuple[float, int]] = []
        self.on_forgotten: Callable[[str, int], None] = lambda shard_id, group_id: None
        self.on_left: Callable[[SimulatedWorker], None] = lambda worker: None
        self.snapshots: dict[SnapshotKey, Past] = {}
        self.weight_groups: dict[str, SimulatedWeightGroup] = {}
        self.agents: dict[str, SimulatedAgent] = {}
        self.losses = Counter[str]()
        self.network = Network(self)
        self.cards: SmallCards | None = None
        self.overfull: list[str] = []
        self.num_nodes = 1
        self.room_bytes = 0
        self.terms: dict[Process | None, RunTerm] = {}
        self._nodes: dict[Process | None, list[Node]] = {}
        self._ids = itertools.count()
        self._ports = itertools.count(1)
        self._one_renews = asyncio.Lock()
        self.status = StatusBoard()
        self.passes = Passes(RunKeys.create())
        self.starting: dict[str, tuple[WorkerOrder, str]] = {}  # and its node, by its name

    # ------------------------------------------------------------------ Scheduler

    async def nodes(self) -> list[Node]:
        """Each process has nodes of its own; a later start of the script finds what lives there."""
        nodes = self._nodes.setdefault(PROCESS.get(), [])
        if not nodes:
            for number in range(self.num_nodes):
                agent = self.agents.get(f"node-{number}")
                lives = agent is not None and agent.exit_status is None
                found = agent.found if agent and lives else []
                facts = agent.facts if agent and lives else self.start_agent(f"node-{number}")
                nodes.append(Node(facts, self.run_dir / "agent.log", found))
        return nodes

    async def ended_nodes(self) -> dict[Node, str]:
        nodes = self._nodes.get(PROCESS.get(), [])
        statuses = {node: self.agents[node.name].exit_status for node in nodes}
        return {node: how for node, how in statuses.items() if how is not None}

    async def renew(self, node: Node, incarnation: str) -> None:
        renewal = self._renew(node.name, incarnation, self.term)
        task = asyncio.get_running_loop().create_task(renewal, context=Context())
        task.add_done_callback(lambda task: task.exception())  # whoever asked may be gone
        node.facts, node.found = await asyncio.shield(task), []

    async def _renew(self, name: str, incarnation: str, term: RunTerm | None) -> NodeFacts:
        async with self._one_renews:
            if self.agents[name].incarnation == incarnation:
                _check(term)
                self.agents[name].end("signal 9 (SIGKILL)")
                await self.spend(self.behavior.agent_start_s)
                _check(term)  # else its successor, which began meanwhile, has ended it
                return self.start_agent(name)
            return self.agents[name].facts

    def close(self) -> None:
        """Nothing is left to close."""

    def give_back(self) -> None:
        """As when a script ends: nothing is left on the nodes."""
        for agent in self.agents.values():
            agent.end("exit code 0")
        for worker in self.workers.values():
            worker.store.lose()
        for key in [key for key in self.snapshots if key.node]:
            del self.snapshots[key]

    def start_agent(self, node: str) -> NodeFacts:
        """The first one of a node, or one in place of it."""
        agent = self.agents[node] = SimulatedAgent(self, node, self.new_id())
        self.network.join(agent)
        return agent.facts

    async def start(self, order: WorkerOrder, node: str) -> SimulatedWorker:
        """An agent starts a worker; an earlier life of it is killed, and its shards are adopted.

        Raises: WorkerStartError: a later start has killed it.
        """
        earlier = self.workers.get(order.name)
        if earlier is not None:
            earlier.end("signal 9 (SIGKILL)")
        self.starting[order.name] = order, node
        await self.spend(self.rng.random())
        if self.starting.get(order.name) != (order, node):
            raise WorkerStartError(f"worker {order.name} was killed before it served")
        del self.starting[order.name]
        kind = self.rollout_class if order.role == "rollout" else self.train_class
        worker = kind(self, order, node)
        if earlier is not None:
            worker.store.adopt(earlier.store)
        self.workers[order.name] = worker
        self.addresses[worker.incarnation] = worker.address
        self.network.join(worker)
        return worker

    # ------------------------------------------------------------------ for workers and tests

    def transport(self) -> SimulatedTransport:
        """What the controllers reach the workers by."""
        return SimulatedTransport(self, self.term.number if self.term else 0)

    def check_cards(self) -> None:
        """Some worker takes memory of its card."""
        if self.cards is None:
            return
        machines: dict[str, list[SimulatedWorker]] = {}
        for worker in self.lives:
            machines.setdefault(self.machine(worker.node), []).append(worker)
        for machine, workers in machines.items():
            excess_bytes = self.cards.excess(workers)
            users = [worker.incarnation for worker in workers if worker.has_memory]
            sides = {worker.role == ROLLOUT_ROLE for worker in workers if worker.has_memory}
            if excess_bytes > 0 or len(sides) > 1:
                self.overfull.append(f"{self.now_s:.2f} s, {machine}: {users}, {excess_bytes} more")

    @property
    def term(self) -> RunTerm | None:
        """Of the process that asks."""
        return self.terms.get(PROCESS.get())

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def rollout_workers(self) -> list[SimulatedRolloutWorker]:
        return [w for w in self.workers.values() if isinstance(w, SimulatedRolloutWorker)]

    @property
    def train_workers(self) -> list[SimulatedTrainWorker]:
        return [
            worker
            for worker in self.workers.values()
            if isinstance(worker, SimulatedTrainWorker) and worker.role == "train"
        ]

    def machine(self, node: str) -> str:
        """The host that is lent as this node now."""
        return f"{node}.{self.losses[node]}"

    def lose_machine(self, node: str) -> None:
        """All memory of a node is gone; its next machine has another address."""
        self.losses[node] += 1
        for worker in self.workers_on(node):
            worker.store.lose()
        for key in [key for key in self.snapshots if key.node == node]:
            del self.snapshots[key]
        self.agents[node].end("power loss")

    def workers_on(self, node: str) -> list[SimulatedWorker]:
        return [worker for worker in self.workers.values() if worker.node == node]

    def new_id(self) -> str:
        """Deterministic, of the length of real ids."""
        return f"{next(self._ids):012x}"

    def keep_in_memory(self, rank: SimulatedTrainWorker, lineage: int, kept: int) -> None:
        """Of a rank's snapshots in the memory of its node that of one version stays."""
        for key in list(self.snapshots):
            is_own = (key.node, key.rank) == (rank.node, rank.name)
            if is_own and (key.lineage, key.version) != (lineage, kept):
                del self.snapshots[key]

    def read_snapshot(self, key: SnapshotKey) -> Past:
        """A rank's part. Raises: CheckpointError: it is not there, or cannot be read."""
        if key not in self.snapshots:
            raise CheckpointError(f"there is no snapshot {key}")
        return list(self.snapshots[key])

    def keep_snapshot(self, key: SnapshotKey, past: Past) -> None:
        """A rank has written its part."""
        self.snapshots[key] = past

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

    def reply_delay_s(self, method: str) -> float:
        """What the reply to a call takes longer than other messages."""
        behavior = self.behavior
        delays = {"run_group": behavior.reply_delay_s, "sweep": behavior.sweep_delay_s}
        return self.draw(delays.get(method, 0.0))

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
                worker.incarnation,
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

    def __init__(self, cluster: SimulatedCluster, term: int = 0) -> None:
        self._cluster = cluster
        self._term = term
        self.num_bytes = 0

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def connect(
        self,
        address: str,
        node_id: str,
        incarnation: str,
        *,
        keeps_trying: bool = False,
        server_key: str = "",
    ) -> NetworkConnection:
        return NetworkConnection(
            *(self._cluster.network, address, node_id, incarnation, keeps_trying, self._count),
            term=self._term,
        )

    async def call_all(
        self,
        calls: Sequence[tuple[NetworkConnection, A]],
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


def _check(term: RunTerm | None) -> None:
    if term is not None:
        term.check()
