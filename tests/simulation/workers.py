"""Workers without engines: rows are numbers of tokens, stores hold names of shards.

Generation, training and transfers are pauses of random length. Whoever reads a shard that was
swept fails, as with real workers, and so does whoever seals one that the store has no room for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from simulation.behavior import Number
from simulation.weight_groups import SimulatedWeightGroup

from areal_sc.config.store_room import trajectory_bytes
from areal_sc.controller.train import LOGPROB_FIELDS
from areal_sc.engines.base import RankPosition
from areal_sc.errors import CheckpointError, EngineFailed, ShardGone, StaleCall, StoreFull
from areal_sc.metadata import (
    TRAJECTORY_FIELDS,
    BatchMetadata,
    Columns,
    RowMetadata,
    Run,
    ShardMetadata,
)
from areal_sc.transport.plane_stats import PlaneStats
from areal_sc.transport.rpc.method import Served
from areal_sc.transport.shards.ids import make_shard_id, parse_shard_id
from areal_sc.weights import BucketLayout, ShardReference, WeightGroup, WeightsReference
from areal_sc.workers import calls
from areal_sc.workers.calls import SnapshotPlace
from areal_sc.workers.operations import Operation, Operations
from areal_sc.workers.spec import Beat, WorkerOrder
from areal_sc.workflows.rejection import Rejection, RejectionKind

if TYPE_CHECKING:
    from simulation.cluster import SimulatedCluster
    from simulation.connection import SimulatedConnection

RowKey = tuple[int, int, int, int]
"""Group, attempt, episode and length of a row."""


class SnapshotKey(NamedTuple):
    """A rank's part of a snapshot; on the disk it has no node and no lineage."""

    node: str
    lineage: int
    version: int
    rank: str


PROMPT_TOKENS = 4
WEIGHTS_BYTES = 1


class SimulatedStore:
    """Names and sizes of sealed shards, those of earlier lives of the worker among them.

    Attributes:
        sizes: shard id -> bytes.
        group_of: shard id -> the group whose rows the shard holds; weights have none.
    """

    def __init__(self, node_id: str, incarnation: str, max_bytes: int) -> None:
        self.node_id = node_id
        self.incarnation = incarnation
        self.max_bytes = max_bytes
        self.last_sequence = 0
        self.sizes: dict[str, int] = {}
        self.group_of: dict[str, int] = {}

    def adopt(self, earlier: SimulatedStore) -> None:
        """Takes over all that an earlier life has sealed."""
        self.sizes.update(earlier.sizes)
        self.group_of.update(earlier.group_of)

    def lose(self) -> None:
        """The memory that the shards lay in is gone."""
        self.sizes.clear()
        self.group_of.clear()

    @property
    def adopted_ids(self) -> tuple[str, ...]:
        return tuple(i for i in self.sizes if parse_shard_id(i)[0] != self.incarnation)

    def put(self, num_bytes: int, group_id: int | None = None) -> str:
        if sum(self.sizes.values()) + num_bytes > self.max_bytes:
            raise StoreFull(
                f"{self.node_id}: {num_bytes} bytes beside {sum(self.sizes.values())}, "
                f"the limit is {self.max_bytes}"
            )
        self.last_sequence += 1
        shard_id = make_shard_id(self.incarnation, self.last_sequence)
        self.sizes[shard_id] = num_bytes
        if group_id is not None:
            self.group_of[shard_id] = group_id
        return shard_id

    def require(self, shard_id: str) -> None:
        if shard_id not in self.sizes:
            raise ShardGone(f"shard {shard_id} on {self.node_id} is gone")

    def sweep(self, sweep: calls.Sweep) -> dict[str, int]:
        """Drops what the call names; returns the groups whose shards went, by their ids."""
        dropped: dict[str, int] = {}
        for shard_id in list(self.sizes):
            incarnation, n = parse_shard_id(shard_id)
            if incarnation != self.incarnation:
                kept = sweep.adopted_live
                is_dropped = kept is not None and shard_id not in kept
            else:
                is_old = n <= sweep.acknowledged and n not in sweep.live
                is_dropped = n in sweep.dead or is_old
            if is_dropped:
                del self.sizes[shard_id]
                if shard_id in self.group_of:
                    dropped[shard_id] = self.group_of.pop(shard_id)
        return dropped


class SimulatedWorker:
    """Base of both kinds: a store, and a life.

    Attributes:
        exit_status: how its process ended; None while it lives.
        is_hung: it lives, and does nothing, as when it is stopped.
        is_blocked: it beats, and its event loop does not turn.
        inbox: what it takes when it goes on.
    """

    def __init__(self, cluster: SimulatedCluster, order: WorkerOrder, node: str) -> None:
        self.cluster = cluster
        self.config = order.engine_config
        self.name = order.name
        self.incarnation = order.incarnation
        self.node = node
        self.address = f"sim://{self.name}:{order.port or cluster.new_port()}"
        self.store = SimulatedStore(self.name, order.incarnation, order.store_bytes)
        self.version = 0
        self.exit_status: str | None = None
        self.inbox: list[Callable[[], None]] = []
        self._woken = asyncio.Event()
        self._last_beat_s: float | None = None
        self._last_turn_s: float | None = None
        self.connections: list[SimulatedConnection] = []
        self.served = {served.method.name: served for served in self.methods()}

    def methods(self) -> list[Served]:
        """Those of its control socket, as the real worker has them."""
        return [
            calls.PING.served_by(self.ping),
            calls.SHUTDOWN.served_by(self.shutdown),
            calls.SWEEP.served_by(self.sweep),
            calls.ADOPTED_SHARDS.served_by(self.adopted_shards),
            calls.STATS.served_by(self.stats),
        ]

    @property
    def is_hung(self) -> bool:
        return self._last_beat_s is not None

    @is_hung.setter
    def is_hung(self, is_hung: bool) -> None:
        self._last_beat_s = self.cluster.now_s if is_hung else None
        self._note_wake_up()

    @property
    def is_blocked(self) -> bool:
        return self._last_turn_s is not None

    @is_blocked.setter
    def is_blocked(self, is_blocked: bool) -> None:
        self._last_turn_s = self.cluster.now_s if is_blocked else None
        self._note_wake_up()

    def _note_wake_up(self) -> None:
        """It takes what came while it was stopped, and goes on with what it did."""
        if not (self.is_hung or self.is_blocked):
            self._woken.set()
            inbox, self.inbox = self.inbox, []
            for take in inbox:
                take()
        else:
            self._woken.clear()

    async def spend(self, duration: Number) -> None:
        """The worker is at work for so long; while it is stopped it gets nowhere."""
        await self.cluster.spend(duration)
        while self.is_hung or self.is_blocked:
            await self._woken.wait()

    @property
    def beat(self) -> Beat:
        """What its agent last heard of it."""
        now_s = self.cluster.now_s
        beat_s = now_s if self._last_beat_s is None else self._last_beat_s
        turn_s = beat_s if self._last_turn_s is None else self._last_turn_s
        return Beat(self.name, self.incarnation, now_s - beat_s, now_s - turn_s)

    async def ping(self, _: None) -> None:
        return None

    async def shutdown(self, _: None) -> None:
        asyncio.get_running_loop().call_later(0.05, self.end, "exit code 0")

    async def sweep(self, sweep: calls.Sweep) -> int:
        for shard_id, group_id in self.store.sweep(sweep).items():
            self.cluster.on_forgotten(shard_id, group_id)
        return self.store.last_sequence

    async def adopted_shards(self, _: None) -> tuple[str, ...]:
        return self.store.adopted_ids

    async def stats(self, _: None) -> calls.WorkerStats:
        return calls.WorkerStats(PlaneStats(store_bytes=sum(self.store.sizes.values())))

    def end(self, exit_status: str, *, keeps_memory: bool = True) -> None:
        """The process ends: nothing that it still did is ever answered.

        Args:
            keeps_memory: its shards outlive it, and its next life adopts them.
        """
        if self.exit_status is None:
            self.exit_status = exit_status
            self.is_hung = True
            if not keeps_memory:
                self.store.lose()
            for connection in self.connections:
                connection.lose_peer()
            self.cluster.on_end(self)
            self.cluster.agents[self.node].note_end(self.name, self.incarnation, exit_status)

    async def read_shards(self, batch: BatchMetadata, duration: Number = 0.0) -> None:
        """Reads all rows of a batch from their owners; every shard must last until the end."""
        for _ in range(2):
            for shard in batch.shards:
                owner = await self.cluster.reach(shard.node_id, shard.node_addr)
                owner.require(shard.shard_id)
            await self.spend(duration)

    def sealed(self, shard_id: str) -> calls.SealedShard:
        shard = ShardReference(self.name, self.address, shard_id)
        return calls.SealedShard(shard, self.store.last_sequence)


class SimulatedRolloutWorker(SimulatedWorker):
    """Generates rows of random length in random time.

    Attributes:
        running: (group id, attempt) of the groups that run now -> set when it is given up.
        history: (time, policy version held from then on), ascending.
    """

    def __init__(self, cluster: SimulatedCluster, order: WorkerOrder, node: str) -> None:
        super().__init__(cluster, order, node)
        self.running: dict[tuple[int, int], asyncio.Event] = {}
        self.history: list[tuple[float, int]] = [(cluster.now_s, 0)]
        self.num_evaluations = 0
        self.is_updating = False
        self.is_awake = asyncio.Event()
        self.is_awake.set()

    def methods(self) -> list[Served]:
        return [
            *super().methods(),
            calls.INITIALIZE_ENGINE.served_by(self.initialize),
            calls.RUN_GROUP.served_by(self.run_group),
            calls.GIVE_UP_GROUP.served_by(self.give_up_group),
            calls.EPISODES.served_by(self.report),
            calls.RUN_EVALUATION.served_by(self.run_evaluation),
            calls.READ_TEXTS.served_by(self.read_texts),
            calls.UPDATE_WEIGHTS.served_by(self.update_weights),
            calls.WEIGHT_RANKS.served_by(self.weight_ranks),
            calls.JOIN_WEIGHT_GROUP.served_by(self.join_weight_group),
            calls.LEAVE_WEIGHT_GROUP.served_by(self.leave_weight_group),
            calls.PAUSE.served_by(self.fall_asleep),
            calls.RESUME.served_by(self.wake_up),
        ]

    async def initialize(self, _: None) -> None:
        await self.spend(self.cluster.behavior.publication_s)

    async def fall_asleep(self, _: None) -> None:
        self.is_awake.clear()

    async def wake_up(self, _: None) -> None:
        self.is_awake.set()

    async def run_group(self, group: calls.RunGroup) -> calls.GroupReply:
        behavior, rng = self.cluster.behavior, self.cluster.rng
        self.cluster.note_start(self, group)
        run = calls.GroupAttempt(group.group_id, group.attempt)
        key = (group.group_id, group.attempt)
        self.check_room()
        given_up = self.running[key] = asyncio.Event()
        try:
            began = self.cluster.now_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.cluster.draw(behavior.generation_s)):
                    await given_up.wait()
            await self.spend(0.0)
            if given_up.is_set():
                await self.spend(behavior.give_up_s)
                return calls.GroupReply(run)
            await self.is_awake.wait()
        finally:
            del self.running[key]
        kept = [n for n in range(group.group_size) if rng.random() >= behavior.episode_rejection]
        if rng.random() < behavior.group_rejection:
            kept = []
        num_rejected = group.group_size - len(kept)
        rejection = Rejection(RejectionKind.reward_error, "it raised")
        rejected = (calls.RejectedEpisodes(num_rejected, rejection),) if num_rejected else ()
        if not kept:
            self.cluster.rejected_groups.add(group.group_id)
            return calls.GroupReply(run, rejected=rejected)
        rows = tuple(
            self._row(group, began, episode)
            for episode in kept
            for _ in range(int(self.cluster.draw(behavior.episode_rows)))
        )
        accuracy = fmean(row.reward for row in rows)
        metrics = {"accuracy": (accuracy * len(kept), len(kept))}
        return calls.GroupReply(run, self._seal(group, rows), rejected, metrics)

    def check_room(self) -> None:
        """Whatever runs here may fill its rows, and one more group is about to begin."""
        config, num_groups = self.config, len(self.running) + len(self.store.group_of) + 1
        episode_tokens = config["max_episode_tokens"] or config["max_context_tokens"]
        group_bytes = trajectory_bytes(config["group_size"] * episode_tokens)
        if num_groups * group_bytes > self.store.max_bytes:
            raise StoreFull(f"{self.name} was given {num_groups} groups of {group_bytes} bytes")

    async def give_up_group(self, group: calls.GroupAttempt) -> None:
        run = self.running.get((group.group_id, group.attempt))
        if run is not None:
            run.set()

    async def report(self, _: None) -> calls.EpisodesReport:
        waiting = (calls.Waiting("generation", len(self.running), 1.0),)
        return calls.EpisodesReport(waiting if self.running else ())

    async def run_evaluation(self, _: calls.RunEvaluation) -> calls.EvaluationReply:
        self.num_evaluations += 1
        try:
            began = self.cluster.now_s
            await self.spend(self.cluster.behavior.evaluation_s)
        finally:
            self.num_evaluations -= 1
        versions = self._versions(began, 100)
        return calls.EvaluationReply(1.0, {"accuracy": 1.0}, (versions[0], versions[-1]))

    async def read_texts(self, wanted: calls.ReadTexts) -> tuple[calls.RowText, ...]:
        for shard in wanted.batch.shards:
            self.store.require(shard.shard_id)
        return tuple(calls.RowText("1+1=", "2", {}) for _ in wanted.batch.rows)

    async def update_weights(self, weights: WeightsReference) -> None:
        assert not self.is_updating, f"{self.name} was given weights while it pulls others"
        self.is_updating = True
        try:
            if not (weights.broadcast and await self._has_received(weights.broadcast.group)):
                await self._pull(weights)
        finally:
            self.is_updating = False
        self.version = weights.version
        self.history.append((self.cluster.now_s, self.version))

    async def _pull(self, weights: WeightsReference) -> None:
        for _ in range(2):
            for node_id, address, shard_id in weights.shards:
                (await self.cluster.reach(node_id, address)).require(shard_id)
            await self.spend(self.cluster.behavior.publication_s)

    async def _has_received(self, name: str) -> bool:
        """Whether the broadcast came; else this worker leaves the group, and pulls."""
        group = self.cluster.weight_groups[name]
        try:
            if not group.is_joined_by(self):
                raise EngineFailed(f"not a rank of weight group {name}")
            await group.receive(self)
        except EngineFailed:
            group.is_cancelled = True
            return False
        return True

    async def weight_ranks(self, name: str) -> calls.WeightRanks:
        is_member = bool(name) and self.cluster.weight_groups[name].is_joined_by(self)
        return calls.WeightRanks(1, is_cuda=False, devices=(), is_member=is_member)

    async def join_weight_group(self, join: calls.JoinWeightGroup) -> None:
        await self.cluster.weight_groups[join.group.name].meet(self)

    async def leave_weight_group(self, name: str) -> None:
        self.cluster.weight_groups[name].close()

    def _versions(self, began_s: float, num_tokens: int) -> list[int]:
        """The version that sampled each of the tokens, which come at a steady pace until now."""
        pace = (self.cluster.now_s - began_s) / num_tokens
        return [
            next(v for t, v in reversed(self.history) if t <= began_s + pace * (i + 1))
            for i in range(num_tokens)
        ]

    def _row(self, group: calls.RunGroup, began_s: float, episode: int) -> RowMetadata:
        num_tokens = int(self.cluster.draw(self.cluster.behavior.completion_tokens))
        # versions ascend: a few tokens tell where they change, and then stand for their share
        samples = self._versions(began_s, min(num_tokens, 50))
        counts = {v: samples.count(v) * num_tokens // len(samples) for v in samples}
        counts[samples[0]] += num_tokens - sum(counts.values())
        return RowMetadata(
            group_id=group.group_id,
            attempt=group.attempt,
            sequence_length=PROMPT_TOKENS + num_tokens,
            reward=float(self.cluster.rng.random() < 0.5),
            admitted_version=group.admitted_version,
            version_spans=tuple(sorted(counts.items())),
            episode=episode,
        )

    def _seal(self, group: calls.RunGroup, rows: tuple[RowMetadata, ...]) -> BatchMetadata:
        num_tokens = sum(row.sequence_length for row in rows)
        self.cluster.sealed_rows[group.group_id, group.attempt] = rows
        shard = ShardMetadata(
            node_id=self.name,
            node_addr=self.address,
            shard_id=self.store.put(trajectory_bytes(num_tokens), group.group_id),
            runs=(Run(0, 0, len(rows)),),
        )
        self.cluster.attempt_of[shard.shard_id] = group.attempt
        columns = Columns(dict(TRAJECTORY_FIELDS), (shard,))
        batch_id = f"g{group.group_id}.{group.attempt}"
        return BatchMetadata(batch_id, group.admitted_version, (columns,), rows)


def row_key(row: RowMetadata) -> RowKey:
    return row.group_id, row.attempt, row.episode, row.sequence_length


class SimulatedTrainWorker(SimulatedWorker):
    """One rank: checks that it can read what it is given, and notes it.

    Attributes:
        past: what made its weights: policy version and rows of each minibatch.
    """

    def __init__(self, cluster: SimulatedCluster, order: WorkerOrder, node: str) -> None:
        super().__init__(cluster, order, node)
        self.operations = Operations(self.name)
        self.data_rank, model_rank = divmod(order.index, self.config["parallel"]["model"])
        self.is_head = model_rank == 0
        self.past: list[tuple[int, tuple[RowKey, ...]]] = []
        self._weight_group: SimulatedWeightGroup | None = None
        self._writes: dict[Operation, tuple[SnapshotKey, list[tuple[int, tuple[RowKey, ...]]]]] = {}

    def methods(self) -> list[Served]:
        return [
            *super().methods(),
            calls.CREATE_RENDEZVOUS.served_by(self.create_rendezvous),
            calls.INITIALIZE_RANK.served_by(self.initialize),
            calls.COMPUTE_LOGPROBS.served_by(self.compute_logprobs),
            calls.PPO_UPDATE.served_by(self.ppo_update),
            calls.SEAL_WEIGHTS.served_by(self.seal_weights),
            calls.SAVE_WEIGHTS.served_by(self.save_weights),
            calls.WEIGHT_LAYOUTS.served_by(self.weight_layouts),
            calls.OPEN_WEIGHT_GROUP.served_by(self.open_weight_group),
            calls.MEET_WEIGHT_GROUP.served_by(self.meet_weight_group),
            calls.BROADCAST_WEIGHTS.served_by(self.broadcast_weights),
            calls.CANCEL_BROADCAST.served_by(self.cancel_broadcast),
            calls.BEGIN_SNAPSHOT.served_by(self.begin_snapshot),
            calls.FINISH_WRITE.served_by(self.finish_write),
            calls.LOAD_SNAPSHOT.served_by(self.load_snapshot),
        ]

    async def initialize(self, rank: calls.InitializeRank) -> RankPosition:
        await self.spend(self.cluster.behavior.publication_s)
        self.operations.lineage = rank.lineage
        return RankPosition(self.data_rank, self.is_head)

    async def create_rendezvous(self, _: None) -> str:
        return "sim://rendezvous"

    async def compute_logprobs(self, batch: BatchMetadata) -> calls.SealedShard:
        assert batch.fields in (LOGPROB_FIELDS, ())
        await self.read_shards(batch, self.cluster.behavior.training_s)
        is_sealed = bool(batch.rows) and self.is_head
        return self.sealed(self.store.put(4 * batch.num_tokens) if is_sealed else "")

    async def ppo_update(self, args: calls.PPOUpdate) -> dict[str, float]:
        async def update() -> dict[str, float]:
            for batch in args.minibatches:
                await self.read_shards(batch)
            with self.operations.changing(args.operation):
                for number, batch in enumerate(args.minibatches):
                    if self.is_head:
                        self.cluster.note_trained(self.version, number, batch)
                    self.past.append((self.version, tuple(map(row_key, batch.rows))))
                await self.spend(self.cluster.behavior.training_s)
                return {"loss": 0.0}

        return await self.operations.join(args.operation, update)

    async def begin_snapshot(self, snapshot: calls.Snapshot) -> None:
        async def take() -> None:
            await self.spend(self.cluster.behavior.sealing_s)
            if snapshot.place is SnapshotPlace.memory:
                self.cluster.keep_in_memory(self.node, operation.lineage, snapshot.kept)
            self._writes[operation] = self._snapshot_key(snapshot), list(self.past)

        operation = snapshot.operation
        await self.operations.join(operation, take)

    async def finish_write(self, change: calls.Change) -> None:
        if change.operation not in self._writes:
            raise CheckpointError(f"{self.name} writes no {change.operation}")
        key, past = self._writes[change.operation]
        await self.cluster.write_snapshot(self)
        self.cluster.snapshots[key] = past

    async def load_snapshot(self, snapshot: calls.Snapshot) -> None:
        async def load() -> None:
            await self.spend(self.cluster.behavior.sealing_s)
            if snapshot.place is SnapshotPlace.initial:
                assert not self.past, "the engine is not as it was built"
            else:
                key = self._snapshot_key(snapshot)
                if key not in self.cluster.snapshots:
                    raise CheckpointError(f"{self.name} has no snapshot {key}")
                self.past = list(self.cluster.snapshots[key])
            self.version = operation.version

        operation = snapshot.operation
        await self.operations.join(
            operation, load, next_version=operation.version, begins_lineage=True
        )

    def _snapshot_key(self, snapshot: calls.Snapshot) -> SnapshotKey:
        operation, is_on_node = snapshot.operation, snapshot.place is SnapshotPlace.memory
        lineage, node = (operation.lineage, self.node) if is_on_node else (-1, "")
        return SnapshotKey(node, lineage, operation.version, self.name)

    async def seal_weights(self, args: calls.SealWeights) -> calls.SealedShard:
        async def seal() -> calls.SealedShard:
            await self._make_version(args.version)
            return self.sealed(self.store.put(WEIGHTS_BYTES))

        return await self.operations.join(args.operation, seal, next_version=args.version)

    async def save_weights(self, args: calls.SaveWeights) -> calls.SavedWeights:
        async def save() -> calls.SavedWeights:
            await self._make_version(args.version)
            return calls.SavedWeights(f"version-{args.version}", self.store.last_sequence)

        return await self.operations.join(args.operation, save, next_version=args.version)

    async def weight_layouts(self, _: None) -> tuple[BucketLayout, ...]:
        return (BucketLayout(("w",), ("float32",), ((1,),)),)

    async def open_weight_group(self, wanted: calls.OpenWeightGroup) -> WeightGroup:
        if self._weight_group is not None:
            self._weight_group.close()
        timeout_s = self.config["weight_update"]["step_timeout_s"]
        self._weight_group = SimulatedWeightGroup(wanted.name, self, timeout_s)
        self.cluster.weight_groups[wanted.name] = self._weight_group
        return self._weight_group.describe(wanted.world_size)

    async def meet_weight_group(self, _: int) -> None:
        assert self._weight_group is not None
        await self._weight_group.meet(self)

    async def broadcast_weights(self, _: None) -> calls.SentWeights:
        if self.data_rank or not self.is_head:  # it only helps to gather them
            return calls.SentWeights(0, "")
        if self._weight_group is None:
            raise StaleCall("there is no weight group; open one first")
        try:
            await self._weight_group.send()
        except EngineFailed as error:
            self._weight_group.close()
            self._weight_group = None
            return calls.SentWeights(0, str(error))
        return calls.SentWeights(WEIGHTS_BYTES, "")

    async def cancel_broadcast(self, name: str) -> None:
        if self._weight_group is not None and self._weight_group.name == name:
            self._weight_group.is_cancelled = True

    def end(self, exit_status: str, *, keeps_memory: bool = True) -> None:
        super().end(exit_status, keeps_memory=keeps_memory)
        for _, task in self.operations._noted.values():
            task.cancel()

    async def _make_version(self, version: int) -> None:
        await self.spend(self.cluster.behavior.sealing_s)
        self.version = version
        self.cluster.sealed_versions.append((self.cluster.now_s, version))
