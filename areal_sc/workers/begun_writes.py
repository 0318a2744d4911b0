"""What a rank writes beside training, the states that it keeps, and what it loads.

begin    the engine copies its state       (the controller waits for this)
finish   it is on the disk; on a node of its own, it is brought back
keep     the engine copies its state to the memory of the node; that is all
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from areal_sc.engines.training.snapshot_index import INDEX_NAME, file_name
from areal_sc.errors import StaleCall
from areal_sc.nodes.spec import snapshot_name
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_owner import FolderPlace
from areal_sc.system.durable import partial_of
from areal_sc.system.waiting import cancel_all
from areal_sc.workers import rank_methods
from areal_sc.workers.base import Worker
from areal_sc.workers.operations import Kind, Operation, digest
from areal_sc.workers.rank import Rank
from areal_sc.workers.rank_methods import SnapshotPlace


class BegunWrites:
    """The writes of one rank; each begins and ends with calls of the controller."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._role = rank.spec.order.role
        self._run_folder = RunFolder(rank.spec.run.run_dir)
        self._run_place = FolderPlace(Path(rank.spec.run.run_dir))
        self._writes: dict[Operation, _Writing] = {}
        self._kept: list[Operation] = []

    @property
    def in_memory(self) -> tuple[int, ...]:
        """Versions of the present lineage whose states are in memory, as far as this life knows."""
        lineage = self._rank.operations.lineage
        return tuple(it.version for it in self._kept if it.lineage == lineage)

    async def close(self) -> None:
        """Nobody waits any more for what the engine writes; it goes on."""
        await cancel_all(write.task for write in self._writes.values())

    async def begin(self, write: rank_methods.Write) -> str:
        """The folder of what is written, as the script names it."""
        operation, engine = write.operation, self._rank.engine
        match operation.kind:
            case Kind.snapshot:
                place = self._run_folder.snapshot_path(operation.version)
                folder = partial_of(place) / snapshot_name(self._role)
                names = [file_name(self._rank.number)]
                names += [INDEX_NAME] if self._rank.number == 0 else []
                await self._begin(
                    write,
                    lambda: engine.begin_snapshot(folder),
                    lambda: self._rank.files.bring_back(folder, names),
                )
            case _:
                name = digest([operation.lineage, operation.version, operation.which])
                folder = self._run_folder.exports / self._role / name
                of_rank = None if self._rank.number == 0 else list[str]()

                def begin() -> Future[None]:
                    if write.adapter is None:
                        return engine.begin_save_hf(folder)
                    with_optimizer = write.with_optimizer
                    return engine.begin_save_adapter(
                        write.adapter, folder, with_optimizer=with_optimizer
                    )

                await self._begin(
                    write,
                    begin,
                    lambda: self._rank.files.bring_back(folder, of_rank),
                )
        return self._rank.files.script_path(folder)

    async def finish(self, change: rank_methods.Change) -> None:
        """Raises: CheckpointError: it could not be written. StaleCall: nothing such was begun."""
        write = self._writes.get(change.operation)
        if write is None:
            raise StaleCall(f"{change.operation}: {self._rank.spec.name} writes nothing such")
        # A call that is given up must not cancel the write, which other ranks take part in.
        await asyncio.shield(write.task)

    async def keep_state(self, args: rank_methods.KeepState) -> None:
        """Raises: CheckpointError: there is no room, say."""
        operation, engine = args.operation, self._rank.engine
        name, beside = _name(operation), f"{operation.lineage}-{args.beside}"

        async def keep() -> None:
            self._kept = [it for it in self._kept if _name(it) == beside]
            await self._rank.compute(lambda: engine.keep_state(self._memory, name, beside=beside))
            self._kept.append(operation)

        await self._rank.operations.join(operation, keep)

    async def drop_memory_snapshots(self, _: None) -> None:
        await Worker.compute(
            self._rank, self._rank.engine.forget_states
        )  # it need not wake for that
        await asyncio.to_thread(shutil.rmtree, self._memory, ignore_errors=True)
        self._kept.clear()

    async def load(self, args: rank_methods.Load) -> None:
        """The engine goes to the state of the operation's version, in its lineage.

        Raises: CheckpointError: it cannot be read.
        """
        operation, rank, engine = args.operation, self._rank, self._rank.engine
        folder = self._run_folder.snapshot_path(operation.version) / snapshot_name(self._role)

        async def load() -> None:
            match args.place:
                case SnapshotPlace.disk:
                    await rank.files.bring_snapshot(folder)
                    await rank.compute(lambda: engine.load_snapshot(folder))
                case SnapshotPlace.memory:
                    await rank.compute(lambda: engine.load_state(self._memory, _name(operation)))
                    self._kept = [operation]

        await rank.operations.join(
            operation, load, next_version=operation.version, begins_lineage=True
        )

    async def _begin(
        self,
        write: rank_methods.Write,
        begin: Callable[[], Future[None]],
        bring_back: Callable[[], Awaitable[None]],
    ) -> None:
        """Joins the write of the same call, or one that goes on; another one is written again.

        All ranks must do the same of the two. A repeat of a call comes to each of them while the
        write ends, so it joins; a start of the script may only find that the write goes on.

        Raises: RunFolderError: the run folder was moved or deleted.
        """
        self._run_place.check()
        operation = write.operation
        earlier = self._writes.get(operation)
        if earlier is not None and earlier.call != write.call:
            if earlier.written.done():
                await cancel_all([earlier.task])
                self._rank.operations.forget(operation)
            else:
                self._writes[operation] = earlier._replace(call=write.call)

        async def take() -> None:
            written = await self._rank.compute(begin)
            newest = operation.version - 1
            self._writes = {
                other: going_on
                for other, going_on in self._writes.items()
                if other.version >= newest or not going_on.task.done()
            }
            task = asyncio.create_task(_finished(written, bring_back))
            self._writes[operation] = _Writing(write.call, written, task)

        await self._rank.operations.join(operation, take)

    @property
    def _memory(self) -> Path:
        return self._rank.memory_folder(f"snapshots-{self._role}")


class _Writing(NamedTuple):
    """What is being written: by the engines of all ranks, and then brought back by each worker."""

    call: str
    written: Future[None]
    task: asyncio.Task[None]


async def _finished(written: Future[None], bring_back: Callable[[], Awaitable[None]]) -> None:
    await asyncio.wrap_future(written)
    await bring_back()


def _name(operation: Operation) -> str:
    """Name of a state in memory."""
    return f"{operation.lineage}-{operation.version}"
