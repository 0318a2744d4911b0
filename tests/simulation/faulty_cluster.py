"""A cluster whose network, nodes and disks fail."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from simulation.behavior import Behavior
from simulation.cluster import SimulatedCluster
from simulation.store import Past, SimulatedStore, SnapshotKey
from simulation.train_worker import SimulatedTrainWorker
from simulation.virtual_loop import VirtualTimeLoop
from simulation.workers import SimulatedWorker

from areal_sc.errors import CheckpointError, PeerSilent, ShardGone
from areal_sc.nodes.spec import NodeFacts, WorkerOrder

if TYPE_CHECKING:
    from simulation.network import Peer


class FaultyCluster(SimulatedCluster):
    """As `SimulatedCluster`, with a network that suffers and nodes that lose their memory.

    Attributes:
        lives: of all workers, in the order of their starts.
        lost_groups: whose rows went with a node's memory.
        num_lost_snapshots: parts of snapshots that did.
        snapshot_write_s: what the write of a part takes longer.
        fails_snapshots: writes of them fail.
        num_failed_snapshots: parts that were not written for that reason.
        data_cuts: node -> loop time until which nothing is read from it.
        asleep_until_s: all machines are suspended until then, and their clocks stand still.
        on_await: is told when a task of a worker or agent goes on.
    """

    def __init__(self, run_dir: Path, behavior: Behavior, seed: int = 0) -> None:
        super().__init__(run_dir, behavior, seed)
        self.lost_groups: set[int] = set()
        self.num_lost_snapshots = 0
        self.snapshot_write_s = 0.0
        self.fails_snapshots = False
        self.num_failed_snapshots = 0
        self.lives: list[SimulatedWorker] = []
        self.data_cuts: dict[str, float] = {}
        self.asleep_until_s = 0.0
        self.unreadable: set[SnapshotKey] = set()
        self.on_await: Callable[[Peer], None] = lambda peer: None
        self._trace = hashlib.sha256()
        self.config.heartbeat_interval_s = 2.0
        self.config.hung_after_s = 20.0
        self.config.startup_timeout_s = 30.0
        self.config.transport.call_timeout_s = 100.0
        self.config.transport.stalled_peer_timeout_s = 30.0

    async def reach(self, node_id: str, address: str) -> SimulatedStore:
        """An owner that is dead, stopped or cut off is waited for, and then given up."""
        give_up_s = self.now_s + self.config.transport.stalled_peer_timeout_s
        while self._is_silent(self.workers[node_id]):
            asleep_s = self.asleep_until_s - self.now_s
            if asleep_s > 0.0:  # so is whoever waits
                give_up_s += asleep_s
                await asyncio.sleep(asleep_s)
            if self.now_s >= give_up_s and self.workers[node_id].exit_status is not None:
                raise ShardGone(f"a shard is gone with its owner {node_id} at {address}")
            if self.now_s >= give_up_s:
                raise PeerSilent(f"{node_id} at {address} gives no sign of life")
            await asyncio.sleep(0.5)
        return self.owner(node_id, address)

    def _is_silent(self, worker: SimulatedWorker) -> bool:
        is_cut = self.data_cuts.get(worker.node, 0.0) > self.now_s
        return worker.exit_status is not None or worker.is_hung or is_cut

    def lose_machine(self, node: str) -> None:
        for worker in self.workers_on(node):
            self.lost_groups.update(worker.store.group_of.values())
        self.num_lost_snapshots += sum(key.node == node for key in self.snapshots)
        super().lose_machine(node)

    @property
    def now_s(self) -> float:
        """Also in a pause of the controllers."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        return loop.world_s

    def read_snapshot(self, key: SnapshotKey) -> Past:
        if key in self.unreadable:
            raise CheckpointError(f"{key}: its checksum is wrong, its content damaged")
        return super().read_snapshot(key)

    def keep_snapshot(self, key: SnapshotKey, past: Past) -> None:
        super().keep_snapshot(key, past)
        self.unreadable.discard(key)

    async def write_snapshot(self, rank: SimulatedTrainWorker) -> None:
        await super().write_snapshot(rank)
        await rank.spend(self.snapshot_write_s)
        if self.fails_snapshots:
            self.num_failed_snapshots += 1
            raise CheckpointError(f"{rank.name} cannot write its part: the disk is full")

    async def start(self, order: WorkerOrder, node: str) -> SimulatedWorker:
        worker = await super().start(order, node)
        self.lives.append(worker)
        worker.process.on_await = lambda: self.on_await(worker)
        return worker

    def start_agent(self, node: str) -> NodeFacts:
        facts = super().start_agent(node)
        agent = self.agents[node]
        agent.process.on_await = lambda: self.on_await(agent)
        return facts

    def damage_snapshots(self, number: int) -> bool:
        """Of a rank; tells whether it had any."""
        keys = [key for key in self.snapshots if key not in self.unreadable]
        if keys:
            self.unreadable.add(keys[-1 - number % len(keys)])
        return bool(keys)

    def trace(self, *event: object) -> None:
        self._trace.update(repr((self.now_s, *event)).encode())

    @property
    def trace_hash(self) -> str:
        """Of all messages and faults, with their times."""
        return self._trace.hexdigest()
