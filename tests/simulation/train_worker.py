"""A rank without a model: what it trained on is all that it knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.store import Past, SnapshotKey, row_key
from simulation.weight_groups import SimulatedWeightGroup
from simulation.workers import SimulatedWorker

from areal_sc.controller.train.train_controller import MODEL_FIELDS
from areal_sc.engines.base import RankPosition
from areal_sc.errors import CheckpointError, EngineFailed, StaleCall
from areal_sc.nodes.spec import WorkerOrder
from areal_sc.transport.rpc.method import Served
from areal_sc.weights import BucketLayout, WeightGroup
from areal_sc.workers import calls
from areal_sc.workers.calls import SnapshotPlace
from areal_sc.workers.descriptions import DESCRIBE_RANK, RankDescription
from areal_sc.workers.operations import Operation, Operations

if TYPE_CHECKING:
    from simulation.cluster import SimulatedCluster

WEIGHTS_BYTES = 1


class SimulatedTrainWorker(SimulatedWorker):
    """One rank: checks that it can read what it is given, and notes it.

    Attributes:
        past: what made its weights: policy version and rows of each minibatch.
    """

    def __init__(self, cluster: SimulatedCluster, order: WorkerOrder, node: str) -> None:
        super().__init__(cluster, order, node)
        self.operations = Operations(self.name)
        self.data_rank, model_rank = divmod(order.index, self.config["parallel"]["tensor"])
        self.is_head = model_rank == 0
        self.past: Past = []
        self._world_size = 0  # until it has joined the others
        self._num_computed = self._num_computing = 0
        self._written: list[Operation] = []  # snapshots in memory that are whole
        self._weight_group: SimulatedWeightGroup | None = None
        self._writes: dict[Operation, tuple[SnapshotKey, Past]] = {}

    def methods(self) -> list[Served]:
        return [
            *super().methods(),
            calls.CREATE_RENDEZVOUS.served_by(self.create_rendezvous),
            calls.INITIALIZE_RANK.served_by(self.initialize),
            DESCRIBE_RANK.served_by(self.describe),
            calls.COMPUTE.served_by(self.compute_field),
            calls.PPO_UPDATE.served_by(self.ppo_update),
            calls.SEAL_WEIGHTS.served_by(self.seal_weights),
            calls.SAVE_WEIGHTS.served_by(self.save_weights),
            calls.WEIGHT_LAYOUTS.served_by(self.weight_layouts),
            calls.OPEN_WEIGHT_GROUP.served_by(self.open_weight_group),
            calls.MEET_WEIGHT_GROUP.served_by(self.meet_weight_group),
            calls.BROADCAST_WEIGHTS.served_by(self.broadcast_weights),
            calls.CANCEL_BROADCAST.served_by(self.cancel_broadcast),
            calls.BEGIN_SNAPSHOT.served_by(self.begin_snapshot),
            calls.DROP_MEMORY_SNAPSHOTS.served_by(self.drop_memory_snapshots),
            calls.FINISH_WRITE.served_by(self.finish_write),
            calls.LOAD_SNAPSHOT.served_by(self.load_snapshot),
        ]

    async def initialize(self, rank: calls.InitializeRank) -> RankPosition:
        await self.spend(self.cluster.behavior.publication_s)
        self.operations.lineage = rank.lineage
        self._world_size = rank.world_size
        return self.position

    @property
    def position(self) -> RankPosition:
        return RankPosition(self.data_rank, self.is_head)

    async def describe(self, _: None) -> RankDescription:
        operations = self.operations
        return RankDescription(
            operations.lineage,
            operations.version,
            self.position if self._world_size else None,
            self._world_size,
            operations.broken,
            operations.noted,
            self._num_computed,
            self._num_computing > 0,
            tuple(write.version for write in self._written if write.lineage == operations.lineage),
        )

    async def create_rendezvous(self, _: None) -> str:
        return "sim://rendezvous"

    async def compute_field(self, args: calls.Compute) -> calls.SealedShard:
        batch = args.batch
        assert batch.fields in (MODEL_FIELDS, ())
        self._num_computed += 1
        self._num_computing += 1
        try:
            await self.read_shards(batch, self.cluster.behavior.training_s)
        finally:
            self._num_computing -= 1
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

    async def drop_memory_snapshots(self, _: None) -> None:
        self.cluster.keep_in_memory(self.node, self.operations.lineage, -1)

    async def finish_write(self, change: calls.Change) -> None:
        if change.operation not in self._writes:
            raise CheckpointError(f"{self.name} writes no {change.operation}")
        key, past = self._writes[change.operation]
        await self.cluster.write_snapshot(self)
        self.cluster.keep_snapshot(key, past)
        if change.operation.name == calls.MEMORY_SNAPSHOT:
            self._written.append(change.operation)

    async def load_snapshot(self, snapshot: calls.Snapshot) -> None:
        async def load() -> None:
            await self.spend(self.cluster.behavior.sealing_s)
            if snapshot.place is SnapshotPlace.initial:
                assert not self.past, "the engine is not as it was built"
            else:
                self.past = self.cluster.read_snapshot(self._snapshot_key(snapshot))
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

    async def _make_version(self, version: int) -> None:
        await self.spend(self.cluster.behavior.sealing_s)
        self.version = version
        self.cluster.sealed_versions.append((self.cluster.now_s, version))
