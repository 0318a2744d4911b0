"""One rank of the trained model, as a process: pulls rows, computes, seals what it made."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from areal_sc.algorithms.named_loss import CROSS_ENTROPY, loss_of
from areal_sc.durable import partial_of
from areal_sc.engines.base import RankPlace, TrainEngine
from areal_sc.engines.handle_base import TrainHandle
from areal_sc.errors import StaleCall
from areal_sc.metadata import BatchMetadata
from areal_sc.run_folder import RunFolder
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.transport.rpc.method import Served
from areal_sc.transport.sockets.interface import host_of
from areal_sc.weights import ShardReference
from areal_sc.workers import calls
from areal_sc.workers.base import Worker
from areal_sc.workers.operations import Operation, Operations, digest
from areal_sc.workers.spec import TRAIN_ROLE, WorkerSpec
from areal_sc.workers.weight_publication import WeightPublication

logger = logging.getLogger(__name__)


class TrainWorker(Worker):
    """Serves a `TrainEngine`.

    Calls that change state or write name their operation, which runs once; see `Operations`.
    """

    handle: TrainHandle

    def __init__(self, spec: WorkerSpec, agent: int) -> None:
        super().__init__(spec, agent)
        self.engine: TrainEngine = self.handle.build()
        self.operations = Operations(spec.name)
        self._writes: dict[Operation, Future[None]] = {}
        self._place = RankPlace(0, is_head=True)
        self._publication: WeightPublication | None = None
        self._ppo_loss = loss_of(self.handle.config.ppo)
        self._ppo_loss.load()  # a name that is wrong is noticed at the start

    def methods(self) -> list[Served]:
        return [
            *super().methods(),
            calls.CREATE_RENDEZVOUS.served_by(self.create_rendezvous),
            calls.INITIALIZE_RANK.served_by(self.initialize),
            calls.COMPUTE_LOGPROBS.served_by(self.compute_logprobs),
            calls.PPO_UPDATE.served_by(self.ppo_update),
            calls.SFT_UPDATE.served_by(self.sft_update),
            calls.SEAL_WEIGHTS.served_by(self.seal_weights),
            calls.SAVE_WEIGHTS.served_by(self.save_weights),
            calls.OPEN_WEIGHT_GROUP.served_by(lambda group: self.publication.open_group(group)),
            calls.MEET_WEIGHT_GROUP.served_by(lambda size: self.publication.meet_group(size)),
            calls.WEIGHT_LAYOUTS.served_by(lambda _: self.publication.layouts()),
            calls.BROADCAST_WEIGHTS.served_by(lambda _: self.publication.broadcast()),
            calls.CANCEL_BROADCAST.served_by(lambda g: self.publication.cancel_broadcast(g)),
            calls.BEGIN_SAVE_HF.served_by(self.begin_save_hf),
            calls.BEGIN_SNAPSHOT.served_by(self.begin_snapshot),
            calls.FINISH_WRITE.served_by(self.finish_write),
            calls.LOAD_SNAPSHOT.served_by(self.load_snapshot),
        ]

    @property
    def publication(self) -> WeightPublication:
        assert self._publication, "the controller calls initialize first"
        return self._publication

    async def close(self) -> None:
        await self.operations.close()
        if self._publication:
            self._publication.close()
        await self.compute(self.engine.close)

    async def create_rendezvous(self, _: None) -> str:
        """Rank 0 hosts the ranks' meeting point on a port of the system's choice."""
        return await self.compute(lambda: self.engine.create_rendezvous(host_of(self.address)))

    async def initialize(self, args: calls.InitializeRank) -> RankPlace:
        """Joins the other ranks and builds the model; returns this rank's place among them."""
        torch.set_num_threads(self.handle.config.num_threads)
        self.operations.lineage = args.lineage
        self._place = await self.compute(
            lambda: self.engine.initialize(args.rank, args.world_size, args.init_method)
        )
        self._publication = WeightPublication(
            self.engine,
            self.plane.store,
            self.handle.config.weight_update,
            self.compute,
            rank=args.rank,
            world_size=args.world_size,
            host=host_of(self.address),
            node=self.node,
        )
        return self._place

    async def compute_logprobs(self, batch: BatchMetadata) -> calls.SealedShard:
        """Seals `proximal_logprobs` of the batch's rows, on the head of a model group."""
        rows = await self.plane.puller.pull(batch)

        def compute() -> str:
            logprobs = self.engine.forward(rows, "logprobs")
            if not rows.num_rows or not self._place.is_head:
                return ""
            return self.plane.store.put({"proximal_logprobs": logprobs}, rows.lengths)

        return self._sealed(await self.compute(compute))

    async def ppo_update(self, args: calls.PPOUpdate) -> dict[str, float]:
        """One optimizer update per minibatch."""

        async def pull() -> list[PackedRows]:
            return [await self.plane.puller.pull(batch) for batch in args.minibatches]

        async def update(minibatches: list[PackedRows]) -> dict[str, float]:
            return await self.compute(
                lambda: self.engine.update(
                    minibatches,
                    self._ppo_loss,
                    step=self.operations.version,
                    min_token_version=args.minibatches[0].min_token_version,
                )
            )

        return dict(await self.operations.join(args.operation, pull, update))

    async def sft_update(self, args: calls.SFTUpdate) -> dict[str, float]:
        """One optimizer update on rows of a dataset; makes the next policy version."""
        operation = args.operation

        async def read() -> PackedRows:
            dataset = self.sources.prompts(args.dataset)
            items = [dataset[index] for index in args.indices]
            return PackedRows(
                {
                    "input_ids": _packed([item["input_ids"] for item in items], torch.int32),
                    "loss_mask": _packed([item["loss_mask"] for item in items], torch.bool),
                },
                tuple(len(item["input_ids"]) for item in items),
            )

        async def update(rows: PackedRows) -> dict[str, float]:
            step = operation.version
            return await self.compute(lambda: self.engine.update([rows], CROSS_ENTROPY, step=step))

        next_version = operation.version + 1
        return dict(await self.operations.join(operation, read, update, next_version=next_version))

    async def seal_weights(self, args: calls.SealWeights) -> calls.SealedShard:
        """Seals this rank's share of the parameters."""

        async def seal() -> calls.SealedShard:
            return self._sealed(await self.publication.seal())

        sealed: calls.SealedShard = await self.operations.join(
            args.operation, seal, next_version=args.version
        )
        return sealed

    async def save_weights(self, args: calls.SaveWeights) -> calls.SavedWeights:
        """Writes the weights to `weight_update.folder`."""

        async def save() -> calls.SavedWeights:
            folder = await self.publication.save(args.version, args.oldest)
            return calls.SavedWeights(folder, self.plane.store.last_sequence)

        saved: calls.SavedWeights = await self.operations.join(
            args.operation, save, next_version=args.version
        )
        return saved

    async def begin_save_hf(self, change: calls.Change) -> str:
        """Takes the weights for a Hugging Face folder below the run folder; returns its path."""
        operation = change.operation
        name = digest([operation.lineage, operation.version, operation.name])
        folder = RunFolder(self.spec.run.run_dir).exports / self.spec.order.role / name
        await self._begin_write(operation, lambda: self.engine.begin_save_hf(folder))
        return str(folder)

    async def begin_snapshot(self, change: calls.Change) -> None:
        """Takes this rank's part of a snapshot that the controller completes."""
        operation = change.operation
        folder = partial_of(self._snapshot_path(operation)) / self._snapshot_name
        await self._begin_write(operation, lambda: self.engine.begin_snapshot(folder))

    async def finish_write(self, change: calls.Change) -> None:
        """Replies when what the operation took is on the disk. The engine trains meanwhile.

        Raises: CheckpointError: it could not be written. StaleCall: nothing such was begun.
        """
        operation = change.operation
        write = self._writes.get(operation)
        if write is None:
            raise StaleCall(f"{operation}: {self.spec.name} writes nothing such")
        # A call that is given up must not cancel the write, which other ranks take part in.
        await asyncio.shield(asyncio.wrap_future(write))

    async def load_snapshot(self, change: calls.Change) -> None:
        """Goes back to the snapshot of the operation's version, in the operation's lineage."""
        operation = change.operation
        folder = self._snapshot_path(operation) / self._snapshot_name

        async def load() -> None:
            await self.compute(lambda: self.engine.load_snapshot(folder))

        await self.operations.join(
            operation, load, next_version=operation.version, begins_lineage=True
        )

    async def _begin_write(self, operation: Operation, begin: Callable[[], Future[None]]) -> None:
        """Joins a write of the same name that goes on; what is written already is written again."""
        earlier = self._writes.get(operation)
        if earlier is not None and earlier.done():
            self.operations.forget(operation)

        async def take() -> None:
            write = await self.compute(begin)
            newest = operation.version - 1
            self._writes = {
                other: going_on
                for other, going_on in self._writes.items()
                if other.version >= newest or not going_on.done()
            }
            self._writes[operation] = write

        await self.operations.join(operation, take)

    @property
    def _snapshot_name(self) -> str:
        """Within the folder of a step, which holds the models of all roles."""
        return "engine" if self.spec.order.role == TRAIN_ROLE else f"engine-{self.spec.order.role}"

    def _snapshot_path(self, operation: Operation) -> Path:
        return RunFolder(self.spec.run.run_dir).snapshot_path(operation.version)

    def _sealed(self, shard_id: str) -> calls.SealedShard:
        shard = ShardReference(self.spec.name, self.address, shard_id)
        return calls.SealedShard(shard, self.plane.store.last_sequence)


def _packed(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat(
        [torch.as_tensor(row, dtype=dtype) for row in values] or [torch.empty(0, dtype=dtype)]
    )
