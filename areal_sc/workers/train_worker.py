"""One rank of the trained model, as a process: pulls rows, computes, seals what it made."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Awaitable, Callable, Container
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from areal_sc.algorithms.loss_trial import try_loss
from areal_sc.algorithms.named_loss import CROSS_ENTROPY, NamedLoss, loss_of
from areal_sc.engines.base import RankPosition, TrainEngine
from areal_sc.engines.handle_base import TrainHandle
from areal_sc.engines.training.snapshot_index import INDEX_NAME, file_name
from areal_sc.errors import StaleCall, WorkflowError
from areal_sc.nodes.spec import WorkerSpec, snapshot_name
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_owner import FolderPlace
from areal_sc.system.durable import partial_of
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.transport.rpc.method import Served
from areal_sc.transport.sockets.interface import host_of
from areal_sc.weights import ShardReference
from areal_sc.workers import calls
from areal_sc.workers.base import Worker
from areal_sc.workers.calls import MEMORY_SNAPSHOT, SnapshotPlace
from areal_sc.workers.descriptions import DESCRIBE_RANK, RankDescription
from areal_sc.workers.operations import Operation, Operations, digest
from areal_sc.workers.weight_broadcasts import WeightBroadcasts

_FOLDER_PREFIX = "policy-"


class TrainWorker(Worker):
    """Serves a `TrainEngine`; what each method does is said in `calls`."""

    handle: TrainHandle

    def __init__(self, spec: WorkerSpec, agent: int) -> None:
        super().__init__(spec, agent)
        self.engine: TrainEngine = self.handle.build()
        self.engine.shares_files = self.files.are_shared
        self.engine.node = self.node
        self.operations = Operations(spec.name)
        self._writes: dict[Operation, _Write] = {}
        self._position = RankPosition(0, is_head=True)
        self._world_size = 0  # until it has joined the others
        self._num_computed = self._num_computing = 0
        self._broadcasts: WeightBroadcasts | None = None
        self._rank = 0
        self._weights_root = Path(self.handle.config.weight_update.folder).absolute()
        self._run_place = FolderPlace(Path(spec.run.run_dir))
        folder = self.order.search_path
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
        self._ppo_loss = loss_of(self.handle.config.ppo)

    def methods(self) -> list[Served]:
        return [
            *super().methods(),
            calls.CREATE_RENDEZVOUS.served_by(self.create_rendezvous),
            calls.INITIALIZE_RANK.served_by(self.initialize),
            DESCRIBE_RANK.served_by(self.describe),
            calls.COMPUTE.served_by(self.compute_field),
            calls.PPO_UPDATE.served_by(self.ppo_update),
            calls.SFT_UPDATE.served_by(self.sft_update),
            calls.SEAL_WEIGHTS.served_by(self.seal_weights),
            calls.SAVE_WEIGHTS.served_by(self.save_weights),
            calls.OPEN_WEIGHT_GROUP.served_by(lambda group: self.broadcasts.open_group(group)),
            calls.MEET_WEIGHT_GROUP.served_by(lambda size: self.broadcasts.meet_group(size)),
            calls.WEIGHT_LAYOUTS.served_by(lambda _: self.broadcasts.layouts()),
            calls.BROADCAST_WEIGHTS.served_by(lambda _: self.broadcasts.broadcast()),
            calls.CANCEL_BROADCAST.served_by(lambda g: self.broadcasts.cancel_broadcast(g)),
            calls.BEGIN_SAVE_HF.served_by(self.begin_save_hf),
            calls.BEGIN_SNAPSHOT.served_by(self.begin_snapshot),
            calls.DROP_MEMORY_SNAPSHOTS.served_by(self.drop_memory_snapshots),
            calls.FINISH_WRITE.served_by(self.finish_write),
            calls.LOAD_SNAPSHOT.served_by(self.load_snapshot),
        ]

    @property
    def broadcasts(self) -> WeightBroadcasts:
        assert self._broadcasts, "the controller calls initialize first"
        return self._broadcasts

    async def close(self) -> None:
        await self.operations.close()
        for write in self._writes.values():
            await write.give_up()  # what the engine writes goes on; nobody waits for it
        if self._broadcasts:
            self._broadcasts.close()
        await self.compute(self.engine.close)

    async def create_rendezvous(self, _: None) -> str:
        return await self.compute(lambda: self.engine.create_rendezvous(host_of(self.address)))

    async def initialize(self, args: calls.InitializeRank) -> RankPosition:
        torch.set_num_threads(1)  # of this thread, which computes nothing; the engine has its own
        try_loss(self._ppo_loss)  # the call, unlike the start of a process, fails by its own name
        self.operations.lineage = args.lineage
        self._position = await self.compute(
            lambda: self.engine.initialize(args.rank, args.world_size, args.init_method)
        )
        self._rank = args.rank
        self._broadcasts = WeightBroadcasts(
            self.engine,
            self.handle.config.weight_update,
            self.compute,
            rank=args.rank,
            host=host_of(self.address),
            node=self.node,
        )
        self._world_size = args.world_size
        return self._position

    async def describe(self, _: None) -> RankDescription:
        operations = self.operations
        whole = [
            write.version
            for write, written in self._writes.items()
            if (write.lineage, write.name) == (operations.lineage, MEMORY_SNAPSHOT)
            and written.task.done()
            and written.task.exception() is None
        ]
        return RankDescription(
            operations.lineage,
            operations.version,
            self._position if self._world_size else None,
            self._world_size,
            operations.broken,
            operations.noted,
            self._num_computed,
            self._num_computing > 0,
            tuple(whole),
        )

    async def compute_field(self, args: calls.Compute) -> calls.SealedShard:
        self._num_computed += 1
        self._num_computing += 1
        try:
            return await self._compute_field(args)
        finally:
            self._num_computing -= 1

    async def _compute_field(self, args: calls.Compute) -> calls.SealedShard:
        rows = await self.plane.puller.pull(args.batch)

        def compute() -> str:
            values = self.engine.forward(rows, args.output)
            if not rows.num_rows or not self._position.is_head:
                return ""
            return self.plane.store.put({args.field: values}, rows.lengths)

        return self._sealed(await self.compute(compute))

    async def ppo_update(self, args: calls.PPOUpdate) -> dict[str, float]:
        async def update() -> dict[str, float]:
            rows = [await self.plane.puller.pull(batch) for batch in args.minibatches]
            min_version = args.minibatches[0].min_token_version
            return await self._update(args.operation, rows, self._ppo_loss, min_version)

        return await self.operations.join(args.operation, update)

    async def sft_update(self, args: calls.SFTUpdate) -> dict[str, float]:
        async def update() -> dict[str, float]:
            await self.files.bring_source(args.dataset)
            dataset = self.sources.prompts(args.dataset)
            items = [dataset[index] for index in args.indices]
            rows = PackedRows(
                {
                    "input_ids": _packed([item["input_ids"] for item in items], torch.int32),
                    "loss_mask": _packed([item["loss_mask"] for item in items], torch.bool),
                },
                tuple(len(item["input_ids"]) for item in items),
            )
            return await self._update(args.operation, [rows], CROSS_ENTROPY, None)

        next_version = args.operation.version + 1
        return await self.operations.join(args.operation, update, next_version=next_version)

    async def _update(
        self,
        operation: Operation,
        minibatches: list[PackedRows],
        loss: NamedLoss,
        min_token_version: int | None,
    ) -> dict[str, float]:
        with self.operations.changing(operation):
            return await self.compute(
                lambda: self.engine.update(
                    minibatches, loss, step=operation.version, min_token_version=min_token_version
                )
            )

    async def seal_weights(self, args: calls.SealWeights) -> calls.SealedShard:
        """Seals a copy of what this rank holds of the parameters."""

        def put() -> str:
            unfilled, values = self.engine.published_parts()
            lengths = {name: [len(part)] for name, part in unfilled.items()}
            try:
                return self.plane.store.put(unfilled, lengths, values=values)
            finally:
                for _ in values:  # other ranks may wait for this one's part in them
                    pass

        async def seal() -> calls.SealedShard:
            # in the engine's thread: the event loop must not wait for gigabytes
            return self._sealed(await self.compute(put))

        return await self.operations.join(args.operation, seal, next_version=args.version)

    async def save_weights(self, args: calls.SaveWeights) -> calls.SavedWeights:
        """Writes the weights to a folder of their policy below `weight_update.folder`."""
        lineage = args.operation.lineage
        # other runs may have the same `weight_update.folder`
        prefix = f"{_FOLDER_PREFIX}{digest([args.run])}-"
        folder = self._weights_root / f"{prefix}{lineage}-{args.version}"

        async def save() -> calls.SavedWeights:
            if self._rank == 0:
                oldest = [lineage, args.oldest]
                await asyncio.to_thread(_remove_before, self._weights_root, prefix, oldest)
            written = await self.compute(lambda: self.engine.begin_save_hf(folder, is_staged=False))
            await asyncio.wrap_future(written)
            return calls.SavedWeights(str(folder), self.plane.store.last_sequence)

        return await self.operations.join(args.operation, save, next_version=args.version)

    async def begin_save_hf(self, change: calls.Change) -> str:
        operation = change.operation
        name = digest([operation.lineage, operation.version, operation.name])
        folder = RunFolder(self.spec.run.run_dir).exports / self.spec.order.role / name
        names = None if self._rank == 0 else ()
        await self._begin_write(
            operation,
            lambda: self.engine.begin_save_hf(folder),
            lambda: self.files.bring_back(folder, names),
        )
        return self.files.script_path(folder)

    async def begin_snapshot(self, snapshot: calls.Snapshot) -> None:
        operation, is_local = snapshot.operation, snapshot.place is SnapshotPlace.memory
        if is_local:
            folder = self._memory_path(operation)
            # ranks of this node that came here earlier may have begun the new one
            kept = {_memory_name(operation.lineage, snapshot.kept), partial_of(folder).name}
            await asyncio.to_thread(_remove_but, folder.parent, kept)
        else:
            folder = partial_of(self._snapshot_path(operation)) / snapshot_name(
                self.spec.order.role
            )
        await self._begin_write(
            operation,
            lambda: self.engine.begin_snapshot(folder, is_local=is_local),
            lambda: self._bring_snapshot_back(snapshot.place, folder),
        )

    async def drop_memory_snapshots(self, _: None) -> None:
        await asyncio.to_thread(_remove_but, self._memory_snapshots, ())

    async def finish_write(self, change: calls.Change) -> None:
        """Raises: CheckpointError: it could not be written. StaleCall: nothing such was begun."""
        operation = change.operation
        write = self._writes.get(operation)
        if write is None:
            raise StaleCall(f"{operation}: {self.spec.name} writes nothing such")
        # A call that is given up must not cancel the write, which other ranks take part in.
        await asyncio.shield(write.task)

    async def load_snapshot(self, snapshot: calls.Snapshot) -> None:
        operation = snapshot.operation
        is_local = snapshot.place is SnapshotPlace.memory
        folder = self._snapshot_path(operation) / self._snapshot_name
        if is_local:
            folder = self._memory_path(operation)

        async def load() -> None:
            if snapshot.place is SnapshotPlace.disk:
                await self.files.bring_snapshot(folder)
            if snapshot.place is not SnapshotPlace.initial:
                await self.compute(lambda: self.engine.load_snapshot(folder, is_local=is_local))

        await self.operations.join(
            operation, load, next_version=operation.version, begins_lineage=True
        )

    async def _bring_snapshot_back(self, place: SnapshotPlace, folder: Path) -> None:
        names = [file_name(self._rank), *([INDEX_NAME] if self._rank == 0 else [])]
        if place is SnapshotPlace.disk:
            await self.files.bring_back(folder, names)

    async def _begin_write(
        self,
        operation: Operation,
        begin: Callable[[], Future[None]],
        bring_back: Callable[[], Awaitable[None]],
    ) -> None:
        """Joins a write of the same name that goes on; what is written already is written again.

        All ranks must do the same of the two: so the engine's part counts, which ends together.
        Raises: RunFolderError: the run folder was moved or deleted.
        """
        self._run_place.check()
        earlier = self._writes.get(operation)
        if earlier is not None and earlier.written.done():
            await earlier.give_up()
            self.operations.forget(operation)

        async def take() -> None:
            write = await self.compute(begin)
            newest = operation.version - 1
            self._writes = {
                other: going_on
                for other, going_on in self._writes.items()
                if other.version >= newest or not going_on.task.done()
            }
            task = asyncio.create_task(_written(write, bring_back))
            self._writes[operation] = _Write(write, task)

        await self.operations.join(operation, take)

    @property
    def _snapshot_name(self) -> str:
        return snapshot_name(self.spec.order.role)

    def _snapshot_path(self, operation: Operation) -> Path:
        return RunFolder(self.spec.run.run_dir).snapshot_path(operation.version)

    def _memory_path(self, operation: Operation) -> Path:
        name = _memory_name(operation.lineage, operation.version)
        return self._memory_snapshots / name

    @property
    def _memory_snapshots(self) -> Path:
        return self.memory_folder(f"snapshots-{self.spec.order.role}")

    def _sealed(self, shard_id: str) -> calls.SealedShard:
        shard = ShardReference(self.spec.name, self.address, shard_id)
        return calls.SealedShard(shard, self.plane.store.last_sequence)


class _Write(NamedTuple):
    """What is being written: by the engines of all ranks, and then brought back by each worker."""

    written: Future[None]
    task: asyncio.Task[None]

    async def give_up(self) -> None:
        """Nobody waits for it any more."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def _written(write: Future[None], bring_back: Callable[[], Awaitable[None]]) -> None:
    await asyncio.wrap_future(write)
    await bring_back()


def _packed(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
    """Raises: WorkflowError: a number would become another one."""
    packed = [torch.empty(0, dtype=dtype)]
    for given in map(torch.as_tensor, values):
        packed.append(given.to(dtype))
        if not torch.equal(packed[-1].to(given.dtype), given):
            raise WorkflowError(
                f"a row of the dataset has numbers that {dtype} cannot hold: "
                f"{given.tolist()!r:.80}; expected input_ids of integers, and loss_mask of bools, "
                "or of 0 and 1"
            )
    return torch.cat(packed)


def _memory_name(lineage: int, version: int) -> str:
    """Name of a snapshot in memory."""
    return f"{lineage}-{version}"


def _remove_but(root: Path, kept: Container[str]) -> None:
    """All folders of other names, also what is left of a snapshot that was not completed."""
    for folder in root.glob("*"):
        if folder.name not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_before(root: Path, prefix: str, oldest: list[int]) -> None:
    """Folders of the run's older policies; whoever reads one has been waited for."""
    for folder in root.glob(f"{prefix}*-*"):
        with suppress(ValueError):
            policy = [int(part) for part in folder.name.removeprefix(prefix).split("-")]
            if policy < oldest:
                shutil.rmtree(folder, ignore_errors=True)
