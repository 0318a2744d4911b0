"""One rank of the trained model, as a process: pulls rows, computes, seals what it made."""

from __future__ import annotations

from functools import partial

from areal_sc.nodes.spec import WorkerSpec
from areal_sc.transport.rpc.method import Served
from areal_sc.transport.sockets.interface import host_of
from areal_sc.weights.rank_weights import RankWeights
from areal_sc.workers import calls, rank_methods, rank_updates
from areal_sc.workers.base import Worker
from areal_sc.workers.begun_writes import BegunWrites
from areal_sc.workers.rank import Rank
from areal_sc.workers.rank_methods import DESCRIBE_RANK, RankDescription


class TrainWorker(Rank):
    """Serves a `TrainEngine`; its methods are those of `rank_methods` and `weights.methods`."""

    def __init__(self, spec: WorkerSpec, agent: int) -> None:
        super().__init__(spec, agent)
        self._writes = BegunWrites(self)
        self._weights = RankWeights(self)

    def methods(self) -> list[Served]:
        return [
            *super().methods(),
            calls.SLEEP.served_by(self.sleep),
            rank_methods.CREATE_RENDEZVOUS.served_by(self.create_rendezvous),
            rank_methods.INITIALIZE_RANK.served_by(self.using(self.join_ranks)),
            DESCRIBE_RANK.served_by(self.describe),
            rank_methods.COMPUTE.served_by(self.using(partial(rank_updates.compute_field, self))),
            rank_methods.SCORE.served_by(self.using(partial(rank_updates.score, self))),
            rank_methods.SCORE_BATCH.served_by(self.using(partial(rank_updates.score_batch, self))),
            rank_methods.TRY_LOSS.served_by(partial(rank_updates.try_registered_loss, self)),
            rank_methods.UPDATE.served_by(self.using(partial(rank_updates.update, self))),
            rank_methods.FILL_ADAPTER.served_by(
                self.using(partial(rank_updates.fill_adapter, self))
            ),
            *self._weights.served(),
            rank_methods.BEGIN_WRITE.served_by(self.using(self._writes.begin)),
            rank_methods.KEEP_STATE.served_by(self.using(self._writes.keep_state)),
            rank_methods.DROP_MEMORY_SNAPSHOTS.served_by(self._writes.drop_memory_snapshots),
            rank_methods.FINISH_WRITE.served_by(self._writes.finish),
            rank_methods.LOAD_SNAPSHOT.served_by(self.using(self._writes.load)),
        ]

    async def close(self) -> None:
        await self.operations.close()
        await self._writes.close()
        self._weights.close()
        await Worker.compute(self, self.engine.close)  # it need not wake for that

    async def create_rendezvous(self, _: None) -> str:
        return await self.compute(lambda: self.engine.create_rendezvous(host_of(self.address)))

    async def describe(self, _: None) -> RankDescription:
        operations = self.operations
        return RankDescription(
            operations.lineage,
            operations.version,
            self.position if self.world_size else None,
            self.world_size,
            operations.broken,
            operations.noted,
            self.num_computed,
            self.num_computing > 0,
            self._writes.in_memory,
        )
