"""A training run whose workers, agents and connections fail, and what must hold all the same.

The books are kept by the simulation itself: rows as the workers sealed them, steps as the ranks
made them. The ledger is compared with them, and never asked what is true.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from simulation.behavior import Behavior
from simulation.cluster import SimulatedCluster
from simulation.faults import NO_DEATH, Fault, FaultInjector, FaultKind, draw_faults
from simulation.journal_watch import JournalWatch
from simulation.network import Network, NetworkTransport
from simulation.training_run import SLOWEST_MESSAGES_S, Settings, TrainingRun
from simulation.virtual_loop import IS_PAUSABLE, VirtualTimeLoop, run_virtual
from simulation.workers import (
    RowKey,
    SimulatedRolloutWorker,
    SimulatedStore,
    SimulatedTrainWorker,
    SimulatedWorker,
    row_key,
)

from areal_sc.config.schema import OverBound, WeightUpdateMethod
from areal_sc.controller import journal
from areal_sc.controller.group_deaths import DEATHS_TO_BLAME
from areal_sc.errors import (
    BatchLost,
    CheckpointError,
    PeerSilent,
    RunFolderError,
    ShardGone,
    StepsLost,
)
from areal_sc.metadata import BatchMetadata
from areal_sc.run_folder import RunFolder
from areal_sc.workers.spec import WorkerOrder

MAX_VIRTUAL_S = 3000.0
MAX_REST_S = 400.0
"""All steps are made by then, if nothing goes wrong any more."""
MAX_RECOVERY_S = 300.0
NOTICE_S = 30.0
"""After this time a death or a hang has been noticed, also over a slow network."""
MAX_TURNS = 150_000


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
    """

    def __init__(self, run_dir: Path, behavior: Behavior, seed: int = 0) -> None:
        super().__init__(run_dir, behavior, seed)
        self.network = Network(self)
        self.lost_groups: set[int] = set()
        self.num_lost_snapshots = 0
        self.snapshot_write_s = 0.0
        self.fails_snapshots = False
        self.num_failed_snapshots = 0
        self.lives: list[SimulatedWorker] = []
        self.data_cuts: dict[str, float] = {}
        self.on_end = self.network.end
        self._trace = hashlib.sha256()
        self.config.heartbeat_interval_s = 2.0
        self.config.hung_after_s = 20.0
        self.config.startup_timeout_s = 30.0
        self.config.transport.call_timeout_s = 100.0
        self.config.transport.stalled_peer_timeout_s = 30.0

    def transport(self) -> NetworkTransport:
        return NetworkTransport(self.network)

    async def reach(self, node_id: str, address: str) -> SimulatedStore:
        """An owner that is dead, stopped or cut off is waited for, and then given up."""
        give_up_s = self.now_s + self.config.transport.stalled_peer_timeout_s
        while self._is_silent(self.workers[node_id]):
            if self.now_s >= give_up_s and self.workers[node_id].exit_status is not None:
                raise ShardGone(f"a shard is gone with its owner {node_id} at {address}")
            if self.now_s >= give_up_s:
                raise PeerSilent(f"{node_id} at {address} gives no sign of life")
            await asyncio.sleep(0.5)
        return self.owner(node_id, address)

    def _is_silent(self, worker: SimulatedWorker) -> bool:
        is_cut = self.data_cuts.get(worker.node, 0.0) > self.now_s
        return worker.exit_status is not None or worker.is_hung or is_cut

    def lose_memory(self, node: str) -> None:
        """The shards of a node are gone, those included that a life would adopt."""
        for worker in self.workers_on(node):
            self.lost_groups.update(worker.store.group_of.values())
            worker.store.lose()
        for key in [key for key in self.snapshots if key.node == node]:
            self.num_lost_snapshots += 1
            del self.snapshots[key]

    @property
    def now_s(self) -> float:
        """Also in a pause of the controllers."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        return loop.world_s

    async def write_snapshot(self, rank: SimulatedTrainWorker) -> None:
        await super().write_snapshot(rank)
        await rank.spend(self.snapshot_write_s)
        if self.fails_snapshots:
            self.num_failed_snapshots += 1
            raise CheckpointError(f"{rank.name} cannot write its part: the disk is full")

    async def start(self, order: WorkerOrder, node: str) -> SimulatedWorker:
        worker = await super().start(order, node)
        self.lives.append(worker)
        return worker

    def trace(self, *event: object) -> None:
        self._trace.update(repr((self.now_s, *event)).encode())

    @property
    def trace_hash(self) -> str:
        """Of all messages and faults, with their times."""
        return self._trace.hexdigest()


ALL_KINDS = tuple(FaultKind)


@dataclass(frozen=True)
class Scenario:
    """All that one seed decides."""

    settings: Settings
    faults: list[Fault]
    duplication: float
    jitter_s: float
    snapshot_every: int
    segment_bytes: int


def draw_scenario(seed: int, kinds: tuple[FaultKind, ...] = ALL_KINDS) -> Scenario:
    """Small settings, and some faults."""
    rng = random.Random(seed)
    num_workers, batch_groups = rng.randint(1, 3), rng.randint(1, 3)
    num_ranks = rng.randint(1, 2)
    is_on_one_node = num_ranks == 1 or num_workers < 3
    memory_every = rng.choice((0, 1, 1, 2)) if is_on_one_node else 0
    least_store = -(-batch_groups // num_workers)
    generation_s, training_s = rng.choice((0.5, 2.0, 6.0)), rng.choice((0.5, 2.0, 4.0))
    behavior = Behavior(
        generation_s=lambda draw: generation_s * draw.choice((0.25, 0.5, 1.0, 2.0)),
        completion_tokens=lambda draw: draw.randint(1, 60),
        training_s=lambda draw: training_s * draw.choice((0.25, 0.5)),
        sealing_s=rng.choice((0.0, 0.25)),
        publication_s=rng.choice((0.0, 0.25, 1.0)),
        latency_s=rng.choice((0.0, 0.01, 0.25)),
        group_rejection=rng.choice((0.0, 0.0, 0.1, 0.3)),
        episode_rejection=rng.choice((0.0, 0.3)),
        evaluation_s=1.0,
        give_up_s=rng.choice((0.0, 0.5)),
    )
    settings = Settings(
        num_steps=rng.randint(4, 6),
        over_bound=rng.choice(list(OverBound)),
        max_staleness=rng.randint(0, 2),
        batch_groups=batch_groups,
        group_size=rng.randint(1, 2),
        num_rollout_workers=num_workers,
        num_ranks=num_ranks,
        num_minibatches=rng.randint(1, 2),
        max_concurrent_groups=rng.choice((2, 40)),
        store_groups=rng.choice((least_store, least_store + 1, 1000))
        if memory_every == 1
        else 1000,
        evaluate_every=rng.choice((0, 0, 2)),
        group_timeout_s=60.0,
        weight_update=rng.choice(list(WeightUpdateMethod)),
        weight_step_timeout_s=20.0,
        max_deaths=1000,
        memory_every=memory_every,
        keep_rows_steps=rng.choice((0, 2, 10)) if memory_every else 10,
        seed=rng.randrange(2**32),
        behavior=behavior,
    )
    horizon_s = 5.0 * settings.num_steps
    return Scenario(
        settings=settings,
        faults=draw_faults(rng, kinds, horizon_s),
        duplication=rng.choice((0.0, 0.2)),
        jitter_s=rng.choice((0.0, 0.5, 1.0)),
        snapshot_every=rng.choice((0, 1, 2)),
        segment_bytes=rng.choice((500, 4 << 20)),
    )


class FaultRun(TrainingRun):
    """A run of one scenario.

    Attributes:
        phase: what the loop is at.
        end: how it has ended.
        num_lost_batches: that were formed anew, since rows went with a node's memory.
    """

    cluster: FaultyCluster

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario.settings, FaultyCluster)
        self.phase = "start"
        self.broken_callbacks: list[str] = []
        self.end = "completed"
        self.num_lost_batches = 0
        self._has_let_go = False
        self.snapshot_every = scenario.snapshot_every
        self.segment_bytes = scenario.segment_bytes
        self._snapshot: asyncio.Task[None] | None = None
        network = self.cluster.network
        network.duplication, network.jitter_s = scenario.duplication, scenario.jitter_s
        self.journal = JournalWatch(self.disk, RunFolder(self.cluster.config.run_dir).ledger)
        network.on_call = self.journal.before_call
        self.faults = FaultInjector(
            self.cluster, network, self.disk, scenario.faults, lambda: self.state
        )

    @property
    def num_repeated_steps(self) -> int:
        """Steps that ranks made again after a death."""
        return len(self.cluster.trained) - len({step.version for step in self.cluster.trained})

    @property
    def state(self) -> str:
        """What the controllers are at."""
        recovering = [w for w in self.cluster.workers.values() if w.exit_status is not None]
        if recovering and self.phase not in ("start", "close"):
            return "in recovery"
        if self._evaluation is not None and not self._evaluation.done():
            return "evaluation"
        return self.phase

    async def play(self) -> FaultRun:
        asyncio.get_running_loop().set_exception_handler(self._note_broken_callback)
        IS_PAUSABLE.set(True)
        try:
            with patch.object(journal, "SEGMENT_BYTES", self.segment_bytes):
                await self._play()
        except StepsLost:
            # rows of a trained step went with their node: the run ends, to go on from a snapshot
            if not self._has_lost_rows_of_a_step:
                raise
            self.end = "ended by lost rows"
        except RunFolderError as error:
            if not self.disk.num_failures or "cannot write" not in str(error):
                raise
            self.end = "ended by their journal"
        else:
            assert not self.disk.num_failures, "the journal has failed, and nobody noticed"
        self._check_workers_ended()
        if self.disk.num_failures:
            self.journal.durable.account()
        else:
            self.journal.check_end(self.rollout.groups.ledger)
        assert not self.broken_callbacks, self.broken_callbacks
        return self

    def _check_workers_ended(self) -> None:
        """However the run has ended, unless a fault may have kept the news from them."""
        if not {kind for kind, _ in self.faults.struck} - NO_DEATH - {FaultKind.lose_node}:
            left = [worker.name for worker in self.cluster.lives if worker.exit_status is None]
            assert not left, f"workers outlive the run: {left}"

    @property
    def _has_lost_rows_of_a_step(self) -> bool:
        """Rows of a batch went with a node's memory, or a snapshot that covers them.

        They also go when the stores have no room for them and snapshots cannot be written.
        """
        cluster = self.cluster
        has_lost_rows = bool(cluster.lost_groups & self.trained_at.keys()) or self.num_lost_batches
        has_let_go = self._has_let_go and cluster.num_failed_snapshots > 0
        return bool(has_lost_rows) or cluster.num_lost_snapshots > 0 or has_let_go

    async def _play(self) -> None:
        async with self.started():
            self.faults.begin()
            while self.actor.version < self.settings.num_steps:
                try:
                    await self._unless_given_up(self.step())
                except BatchLost:
                    assert self.cluster.lost_groups & self.trained_at.keys()
                    self.num_lost_batches += 1
                    self.forget_batch()
            self.duration_s = self.cluster.now_s
            assert self.duration_s < self.faults.last_s + MAX_REST_S, "it has made no progress"
            self.phase = "end"
            await self.collect_evaluation()
            if self._snapshot is not None:
                await self._snapshot
            self.faults.is_over = True
            self.cluster.network.jitter_s = 0.0  # else somebody may still miss its heartbeats
            await self._until_recovered()
            if not {kind for kind, _ in self.faults.struck} - NO_DEATH:
                assert not self.actor.num_restarts + self.rollout.num_restarts, "for no reason"
            await self.check_end()
            self.phase = "close"

    def _note_broken_callback(self, _: Any, context: dict[str, Any]) -> None:
        self.broken_callbacks.append(repr(context))

    async def _unless_given_up(self, work: Coroutine[Any, Any, Any]) -> None:
        """As `ControlLoop.run`: a worker that is given up ends every call."""
        task = asyncio.create_task(work, name="the script")
        try:
            while not task.done():
                await asyncio.wait([task], timeout=5.0)
                for controller in (self.actor, self.rollout):
                    if controller.worker_lost is not None and not task.done():
                        raise controller.worker_lost
        finally:
            task.cancel()
            await asyncio.wait([task])
        task.result()

    async def _until_recovered(self) -> None:
        """Workers that died at the end come back, too."""
        async with asyncio.timeout(MAX_RECOVERY_S):
            if any(w.exit_status or w.is_hung for w in self.cluster.workers.values()):
                await asyncio.sleep(NOTICE_S)
            for controller in (self.actor, self.rollout):
                assert controller._recovery is not None
                for member in controller.fleet.members:
                    await controller._recovery.wait_until_ready(member)

    async def step(self, *, checks_business: bool = True) -> BatchMetadata:
        rollout, actor = self.rollout, self.actor
        self.phase = "waiting for a batch"
        batch = await rollout.prepare_batch_async(self.prompts, self.workflow)
        self.journal.check_batch(batch)
        self.batches.append(batch)
        self.check_batch(batch)
        await self._evaluate_when_due()
        self.phase = "recomputing log-probabilities"
        batch = await actor.compute_proximal_logprobs_async(batch)
        batch = actor.compute_advantages(batch)
        self.phase = "training"
        await actor.ppo_update_async(batch)
        self.phase = "publishing"
        await actor.publish_weights_async(rollout)
        if self.snapshot_every and self.actor.version % self.snapshot_every == 0:
            await self._begin_snapshot()
        return batch

    def before_forgotten(self, shard_id: str, group_id: int) -> None:
        super().before_forgotten(shard_id, group_id)
        self._has_let_go |= self.rollout.has_let_go_of_rows

    def before_announcement(self, version: int) -> None:
        self.journal.check_announced(version)

    async def _begin_snapshot(self) -> None:
        """One on the disk; written beside training, as `Checkpoints` does."""
        if self._snapshot is not None:
            await self._snapshot
        self.phase, step = "beginning a snapshot", self.actor.version
        try:
            finish = await self.actor._writes.snapshot()
        except CheckpointError:
            return  # a warning, and the run goes on without this one

        async def complete() -> None:
            with contextlib.suppress(CheckpointError):
                await finish()
                self.actor._ranks.note_durable(step)

        self._snapshot = asyncio.create_task(complete(), name=f"snapshot of step {step}")

    async def _check_stores_drain(self) -> None:
        """What is left are rows that a repeated step would read: no snapshot covers them."""
        await asyncio.sleep(SLOWEST_MESSAGES_S)
        covered = self._covered_steps()
        for worker in self.cluster.rollout_workers:
            left = {
                shard_id: group
                for shard_id, group in worker.store.group_of.items()
                if self.trained_at.get(group, -1) < covered
            }
            assert not left, f"{worker.name} still holds {left}, snapshots cover {covered}"

    def _covered_steps(self) -> int:
        """Rows of so many steps are not needed any more, whatever dies."""
        num_ranks = self.settings.num_ranks
        parts = Counter((key.lineage, key.version) for key in self.cluster.snapshots)
        whole = [key for key, num_parts in parts.items() if num_parts == num_ranks]
        durable = max((version for lineage, version in whole if lineage == -1), default=0)
        if self.actor.version - durable <= self.settings.keep_rows_steps:
            return durable
        return max((version for _, version in whole), default=0)

    async def check_end(self) -> None:
        await super().check_end()
        self.check_history()
        for group_id, reason in self.rejected.items():
            attempts = {s.attempt for s in self.cluster.starts if s.group_id == group_id}
            is_to_blame = reason == "worker_died" and len(attempts) > DEATHS_TO_BLAME
            has_cause = is_to_blame or group_id in self.cluster.rejected_groups
            assert has_cause or reason == "stale", (
                f"group {group_id} is rejected as {reason}, and no worker said so"
            )
        for worker in self.cluster.lives:
            if isinstance(worker, SimulatedRolloutWorker):
                versions = [version for _, version in worker.history]
                assert versions == sorted(versions), f"{worker.name} went back: {versions}"

    def check_history(self) -> None:
        """Every rank has made each step once, in order, of exactly the rows of its batch."""
        heads = [rank for rank in self.cluster.train_workers if rank.is_head]
        for rank in heads:
            versions = [version for version, _ in rank.past]
            assert versions == sorted(versions), f"{rank.name}: {versions}"
        for batch in self.batches:
            trained: Counter[RowKey] = Counter()
            for rank in heads:
                for version, rows in rank.past:
                    trained.update(rows if version == batch.global_step else ())
            expected = Counter(map(row_key, batch.rows))
            assert trained == expected, (
                f"step {batch.global_step}: too much: {trained - expected}, missing: "
                f"{expected - trained}"
            )


def play(seed: int, kinds: tuple[FaultKind, ...] = ALL_KINDS) -> FaultRun:
    """Plays a seed in virtual time; the run is the same each time."""
    run = FaultRun(draw_scenario(seed, kinds))
    return run_virtual(run.play(), max_virtual_s=MAX_VIRTUAL_S, max_turns=MAX_TURNS)
