"""What a rank writes beside training, and the snapshots that it loads.

begin    the engine copies its state       (the controller waits for this)
finish   it is on the disk, or in memory; on a node of its own, it is brought back
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Container
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from areal_sc.engines.base import SavesState, able
from areal_sc.engines.training.snapshot_index import INDEX_NAME, file_name
from areal_sc.errors import StaleCall
from areal_sc.nodes.spec import snapshot_name
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_owner import FolderPlace
from areal_sc.system.durable import partial_of
from areal_sc.system.waiting import cancel_all
from areal_sc.workers import rank_methods
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

    @property
    def in_memory(self) -> tuple[int, ...]:
        """Versions of the present lineage whose snapshots in memory are whole."""
        return tuple(
            operation.version
            for operation, write in self._writes.items()
            if operation.lineage == self._rank.operations.lineage
            and operation.kind is Kind.memory_snapshot
            and write.task.done()
            and write.task.exception() is None
        )

    async def close(self) -> None:
        """Nobody waits any more for what the engine writes; it goes on."""
        await cancel_all(write.task for write in self._writes.values())

    async def begin(self, write: rank_methods.Write) -> str:
        """The folder of what is written, as the script names it; "" in memory."""
        operation, engine = write.operation, able(self._rank.engine, SavesState)
        match operation.kind:
            case Kind.memory_snapshot:
                folder = self._memory_path(operation)
                # ranks of this node that came here earlier may have begun the new one
                kept = {_memory_name(operation.lineage, write.kept), partial_of(folder).name}
                await asyncio.to_thread(_remove_but, folder.parent, kept)
                await self._begin(operation, lambda: engine.begin_snapshot(folder, is_local=True))
                return ""
            case Kind.snapshot:
                place = self._run_folder.snapshot_path(operation.version)
                folder = partial_of(place) / snapshot_name(self._role)
                names = [file_name(self._rank.number)]
                names += [INDEX_NAME] if self._rank.number == 0 else []
                await self._begin(
                    operation,
                    lambda: engine.begin_snapshot(folder),
                    lambda: self._rank.files.bring_back(folder, names),
                )
            case _:
                name = digest([operation.lineage, operation.version, operation.which])
                folder = self._run_folder.exports / self._role / name
                of_rank = None if self._rank.number == 0 else list[str]()
                await self._begin(
                    operation,
                    lambda: engine.begin_save_hf(folder),
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

    async def drop_memory_snapshots(self, _: None) -> None:
        await asyncio.to_thread(_remove_but, self._memory_snapshots, ())

    async def load(self, args: rank_methods.Load) -> None:
        """The engine goes to the state of the operation's version, in its lineage.

        Raises: CheckpointError: it cannot be read.
        """
        operation, rank = args.operation, self._rank
        is_local = args.place is SnapshotPlace.memory
        folder = self._run_folder.snapshot_path(operation.version) / snapshot_name(self._role)
        if is_local:
            folder = self._memory_path(operation)

        async def load() -> None:
            if args.place is SnapshotPlace.disk:
                await rank.files.bring_snapshot(folder)
            if args.place is not SnapshotPlace.initial:
                engine = able(rank.engine, SavesState)
                await rank.compute(lambda: engine.load_snapshot(folder, is_local=is_local))

        await rank.operations.join(
            operation, load, next_version=operation.version, begins_lineage=True
        )

    async def _begin(
        self,
        operation: Operation,
        begin: Callable[[], Future[None]],
        bring_back: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Joins a write of the same name that goes on; what is written already is written again.

        All ranks must do the same of the two: so the engine's part counts, which ends together.
        Raises: RunFolderError: the run folder was moved or deleted.
        """
        self._run_place.check()
        earlier = self._writes.get(operation)
        if earlier is not None and earlier.written.done():
            await cancel_all([earlier.task])
            self._rank.operations.forget(operation)

        async def take() -> None:
            written = await self._rank.compute(begin)
            newest = operation.version - 1
            self._writes = {
                other: going_on
                for other, going_on in self._writes.items()
                if other.version >= newest or not going_on.task.done()
            }
            task = asyncio.create_task(_finished(written, bring_back))
            self._writes[operation] = _Writing(written, task)

        await self._rank.operations.join(operation, take)

    def _memory_path(self, operation: Operation) -> Path:
        return self._memory_snapshots / _memory_name(operation.lineage, operation.version)

    @property
    def _memory_snapshots(self) -> Path:
        return self._rank.memory_folder(f"snapshots-{self._role}")


class _Writing(NamedTuple):
    """What is being written: by the engines of all ranks, and then brought back by each worker."""

    written: Future[None]
    task: asyncio.Task[None]


async def _finished(
    written: Future[None], bring_back: Callable[[], Awaitable[None]] | None
) -> None:
    await asyncio.wrap_future(written)
    if bring_back is not None:
        await bring_back()


def _memory_name(lineage: int, version: int) -> str:
    """Name of a snapshot in memory."""
    return f"{lineage}-{version}"


def _remove_but(root: Path, kept: Container[str]) -> None:
    """Removes folders of other names, also what is left of a snapshot that was not completed."""
    for folder in root.glob("*"):
        if folder.name not in kept:
            shutil.rmtree(folder, ignore_errors=True)
