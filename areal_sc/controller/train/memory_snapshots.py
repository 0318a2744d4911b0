"""Snapshots of the ranks in their nodes' memory, every few steps, beside training.

Each node has what its own ranks need to go on. So a snapshot counts when all ranks have written it,
and is of use as long as all of them come back to the nodes that they were on.

consumes     new versions
waits for    the ranks: to copy their state, which updates wait for, and to write it, which nobody
             waits for
unblocked by their replies, or their death
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from areal_sc.controller.train.train_history import TrainHistory
from areal_sc.errors import ArealError, StoreFull, WorkerLost
from areal_sc.fleet.fleet import Fleet
from areal_sc.workers import rank_methods
from areal_sc.workers.operations import Kind, Operation

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class MemorySnapshots:
    """Writes one snapshot at a time.

    Args:
        every_steps: versions from one to the next; 0: none are written.
        on_change: is called when one is begun, and when it has ended.
        on_failure: gets what the ranks could not do, some of which may hang.

    Attributes:
        may_begin: the ranks have their state where they can read it.
    """

    fleet: Fleet
    history: TrainHistory
    every_steps: int
    on_change: Callable[[], None]
    on_failure: Callable[[ArealError], Awaitable[object]]

    def __post_init__(self) -> None:
        self.may_begin = True
        self._has_failed = False
        self._has_yielded = False
        self._one_yields = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None
        self._is_taken = asyncio.Event()
        self._is_taken.set()

    @property
    def is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    @property
    def is_due_soon(self) -> bool:
        """Whether the ranks are making a version that one is due of."""
        every, history = self.every_steps, self.history
        return every > 0 and (history.version + 1) % every == 0 and history.is_updating

    def begin_when_due(self) -> None:
        """Begins one of a version that has just been made.

        None is begun while the ranks write something else: that comes first, and they would stand
        still until its end.
        """
        every, version = self.every_steps, self.history.version
        is_due = every > 0 and version % every == 0 and self.may_begin
        if is_due and not (self.is_writing or self.history.is_writing):
            self._is_taken.clear()
            self._writing = asyncio.create_task(self._write(version), name="memory snapshot")

    async def yield_memory(self, error: StoreFull) -> bool:
        """What cannot be spared has no room: snapshots in memory go, and none is written any more.

        Returns: whether they have gone, now or before; False: none was ever written.
        """
        async with self._one_yields:
            if self.every_steps:
                await self._give_up(error)
        return self._has_yielded

    async def _give_up(self, error: StoreFull) -> None:
        self._has_yielded = True
        setting, self.every_steps = f"checkpoint.memory_every_steps={self.every_steps}", 0
        await self.close()
        await self.fleet.call_all(rank_methods.DROP_MEMORY_SNAPSHOTS, None)
        self.history.drop_memory_snapshots()
        logger.warning(
            "snapshots in memory (%s) are given up, because weights and rows need their room: %s. "
            "The run goes on; train workers that die begin from the newest snapshot on the disk. "
            "More shared memory, or checkpoint.memory_every_steps=0, avoids this",
            setting,
            error,
        )
        self.on_change()

    async def wait_until_taken(self) -> None:
        """Returns when the ranks may change their state."""
        await self._is_taken.wait()

    async def close(self) -> None:
        """Ends the one that is being written."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write(self, version: int) -> None:
        operation = Operation(self.history.lineage, version, Kind.memory_snapshot)
        kept = self.history.make_room_in_memory()
        try:
            await self.fleet.call_all(rank_methods.BEGIN_WRITE, rank_methods.Write(operation, kept))
            self._is_taken.set()
            await self.fleet.call_all(rank_methods.FINISH_WRITE, rank_methods.Change(operation))
        except WorkerLost as error:
            logger.info("version=%d has no snapshot in memory: %s", version, error)
        except ArealError as error:
            if self._has_failed:
                logger.info("version=%d has no snapshot in memory: %s", version, error)
            else:
                logger.warning(
                    "version %d has no snapshot in memory: %s. The run goes on; train workers that "
                    "die begin from an older one until one can be written again",
                    *(version, error),
                )
            self._has_failed = True
            await self.on_failure(error)
        else:
            self._has_failed = False
            if operation.lineage == self.history.lineage:
                self.history.note_in_memory(version)
                asyncio.get_running_loop().call_soon(self._begin_late, version)
        finally:
            self._is_taken.set()
        asyncio.get_running_loop().call_soon(self.on_change)

    def _begin_late(self, written: int) -> None:
        """Begins the snapshot of a version that was made while the last one was written, if one is
        due and the ranks have not begun to change the weights."""
        if written < self.history.version and not self.history.is_updating:
            self.begin_when_due()
