"""A rank without a model: what it trained on is all that it knows."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from simulation.store import Past, SnapshotKey, row_key
from simulation.weight_groups import SimulatedWeightGroup
from simulation.workers import SimulatedWorker

from areal_sc.controller.train.train_step import MODEL_FIELDS
from areal_sc.engines.base import RankPosition
from areal_sc.errors import CheckpointError, EngineFailed, StaleCall
from areal_sc.nodes.spec import TRAIN_ROLE, WorkerOrder
from areal_sc.transport.rpc.method import A, R, Served
from areal_sc.weights import methods
from areal_sc.weights.published import BucketLayout, WeightGroup
from areal_sc.workers import calls, rank_methods
from areal_sc.workers.operations import Operation, Operations
from areal_sc.workers.rank_methods import DESCRIBE_RANK, RankDescription, SnapshotPlace

if TYPE_CHECKING:
    from simulation.cluster import SimulatedCluster


WEIGHTS_BYTES = 1
Work = Callable[[A], Coroutine[Any, Any, R]]


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
        self._kept: list[Operation] = []  # snapshots in memory
        self._weight_group: SimulatedWeightGroup | None = None
        self._writes: dict[Operation, tuple[SnapshotKey, Past]] = {}

    def methods(self) -> list[Served]:
        return [
            *super().methods(),
            calls.SLEEP.served_by(self.sleep),
            rank_methods.CREATE_RENDEZVOUS.served_by(self.create_rendezvous),
            rank_methods.INITIALIZE_RANK.served_by(self.using(self.initialize)),
            DESCRIBE_RANK.served_by(self.describe),
            rank_methods.COMPUTE.served_by(self.using(self.compute_field)),
            rank_methods.TRY_LOSS.served_by(self.try_loss),
            rank_methods.UPDATE.served_by(self.using(self.update)),
            methods.SEAL_WEIGHTS.served_by(self.using(self.seal_weights)),
            methods.SAVE_WEIGHTS.served_by(self.using(self.save_weights)),
            methods.WEIGHT_LAYOUTS.served_by(self.weight_layouts),
            methods.OPEN_WEIGHT_GROUP.served_by(self.open_weight_group),
            methods.MEET_WEIGHT_GROUP.served_by(self.meet_weight_group),
            methods.BROADCAST_WEIGHTS.served_by(self.broadcast_weights),
            methods.CANCEL_BROADCAST.served_by(self.cancel_broadcast),
            rank_methods.BEGIN_WRITE.served_by(self.using(self.begin_write)),
            rank_methods.KEEP_STATE.served_by(self.using(self.keep_state)),
            rank_methods.DROP_MEMORY_SNAPSHOTS.served_by(self.drop_memory_snapshots),
            rank_methods.FINISH_WRITE.served_by(self.finish_write),
            rank_methods.LOAD_SNAPSHOT.served_by(self.using(self.load_snapshot)),
        ]

    def using(self, work: Work[A, R]) -> Work[A, R]:
        """The same method, which takes the card's memory; `sleep` waits for its end."""

        async def use(args: A) -> R:
            self.num_using += 1
            self.take_memory()
            try:
                return await work(args)
            finally:
                self.num_using -= 1

        return use

    async def sleep(self, _: None) -> None:
        while self.num_using:
            await self.spend(0.01)
        self.has_memory = False

    async def initialize(self, rank: rank_methods.InitializeRank) -> RankPosition:
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
            tuple(it.version for it in self._kept if it.lineage == operations.lineage),
        )

    async def create_rendezvous(self, _: None) -> str:
        return "sim://rendezvous"

    async def compute_field(self, args: rank_methods.Compute) -> calls.SealedShard:
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

    async def try_loss(self, _: rank_methods.TryLoss) -> tuple[str, ...]:
        return ()

    async def update(self, args: rank_methods.Update) -> dict[str, float]:
        async def update() -> dict[str, float]:
            for batch in args.batches:
                await self.read_shards(batch)
            with self.operations.changing(args.operation):
                for number, batch in enumerate(args.batches):
                    if self.is_head and self.order.role == TRAIN_ROLE:
                        self.cluster.note_trained(self.version, number, batch)
                    self.past.append((self.version, tuple(map(row_key, batch.rows))))
                await self.spend(self.cluster.behavior.training_s)
                return {"loss": 0.0}

        next_version = args.operation.version + 1 if args.advances else None
        return await self.operations.join(args.operation, update, next_version=next_version)

    async def begin_write(self, write: rank_methods.Write) -> str:
        async def take() -> None:
            await self.spend(self.cluster.behavior.sealing_s)
            key = self._snapshot_key(operation, is_in_memory=False)
            self._writes[operation] = key, list(self.past)

        operation = write.operation
        await self.operations.join(operation, take)
        return ""

    async def keep_state(self, args: rank_methods.KeepState) -> None:
        operation = args.operation

        async def keep() -> None:
            self.cluster.keep_in_memory(self, operation.lineage, args.beside)
            self._kept = [it for it in self._kept if it.version == args.beside]
            past = list(self.past)
            await self.cluster.write_snapshot(self)
            self.cluster.keep_snapshot(self._snapshot_key(operation, is_in_memory=True), past)
            self._kept.append(operation)

        await self.operations.join(operation, keep)

    async def drop_memory_snapshots(self, _: None) -> None:
        self.cluster.keep_in_memory(self, self.operations.lineage, -1)
        self._kept.clear()

    async def finish_write(self, change: rank_methods.Change) -> None:
        if change.operation not in self._writes:
            raise CheckpointError(f"{self.name} writes no {change.operation}")
        key, past = self._writes[change.operation]
        await self.cluster.write_snapshot(self)
        self.cluster.keep_snapshot(key, past)

    async def load_snapshot(self, args: rank_methods.Load) -> None:
        async def load() -> None:
            await self.spend(self.cluster.behavior.sealing_s)
            if args.place is SnapshotPlace.initial:
                assert not self.past, "the engine is not as it was built"
            else:
                is_in_memory = args.place is SnapshotPlace.memory
                key = self._snapshot_key(operation, is_in_memory=is_in_memory)
                self.past = self.cluster.read_snapshot(key)
                self._kept = [operation] if is_in_memory else []
            self.version = operation.version

        operation = args.operation
        await self.operations.join(
            operation, load, next_version=operation.version, begins_lineage=True
        )

    def _snapshot_key(self, operation: Operation, *, is_in_memory: bool) -> SnapshotKey:
        lineage, node = (operation.lineage, self.node) if is_in_memory else (-1, "")
        return SnapshotKey(node, lineage, operation.version, self.name)

    async def seal_weights(self, args: methods.SealWeights) -> calls.SealedShard:
        async def seal() -> calls.SealedShard:
            await self._make_version(args.version)
            return self.sealed(self.store.put(WEIGHTS_BYTES))

        return await self.operations.join(args.operation, seal, next_version=args.version)

    async def save_weights(self, args: methods.SaveWeights) -> methods.SavedWeights:
        async def save() -> methods.SavedWeights:
            await self._make_version(args.version)
            return methods.SavedWeights(f"version-{args.version}", self.store.last_sequence)

        return await self.operations.join(args.operation, save, next_version=args.version)

    async def weight_layouts(self, _: None) -> tuple[BucketLayout, ...]:
        return (BucketLayout(("w",), ("float32",), ((1,),)),)

    async def open_weight_group(self, wanted: methods.OpenWeightGroup) -> WeightGroup:
        if self._weight_group is not None:
            self._weight_group.close()
        timeout_s = self.config["weight_update"]["step_timeout_s"]
        self._weight_group = SimulatedWeightGroup(wanted.name, self, timeout_s)
        self.cluster.weight_groups[wanted.name] = self._weight_group
        return self._weight_group.describe(wanted.world_size)

    async def meet_weight_group(self, _: int) -> None:
        assert self._weight_group is not None
        await self._weight_group.meet(self)

    async def broadcast_weights(self, _: None) -> methods.SentWeights:
        if self.data_rank or not self.is_head:  # it only helps to gather them
            return methods.SentWeights(0, "")
        if self._weight_group is None:
            raise StaleCall("there is no weight group; open one first")
        group = self._weight_group
        try:
            await group.send()
        except EngineFailed as error:
            group.close()
            if self._weight_group is group:
                self._weight_group = None
            return methods.SentWeights(0, str(error))
        return methods.SentWeights(WEIGHTS_BYTES, "")

    async def cancel_broadcast(self, name: str) -> None:
        if self._weight_group is not None and self._weight_group.name == name:
            self._weight_group.is_cancelled = True

    async def _make_version(self, version: int) -> None:
        await self.spend(self.cluster.behavior.sealing_s)
        self.version = version
        self.cluster.sealed_versions.append((self.cluster.now_s, version))
