"""Snapshots of the ranks in their nodes' memory, one of each version.

Each node has what its own ranks need to go on. So a snapshot counts when all ranks have taken it,
and is of use as long as all of them come back to the nodes that they were on.

consumes     new versions, before anybody is told of them
waits for    the ranks to copy their state
unblocked by their replies, or their death
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from areal_sc.controller.train.rank_state import RankState
from areal_sc.errors import ArealError, StoreFull
from areal_sc.fleet.fleet import Fleet
from areal_sc.workers import rank_methods
from areal_sc.workers.operations import Kind, Operation

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class MemorySnapshots:
    """Takes the snapshots.

    Attributes:
        are_on: they are taken.
    """

    fleet: Fleet
    state: RankState
    are_on: bool

    def __post_init__(self) -> None:
        self._has_failed = False
        self._has_yielded = False
        self._one_yields = asyncio.Lock()

    async def take(self, version: int) -> None:
        """Takes the snapshot of a version that the ranks have just made. A repeat joins it.

        Raises: CheckpointError: a rank cannot write its part.
        """
        if not self.are_on:
            return
        operation = Operation(self.state.lineage, version, Kind.memory_snapshot)
        wanted = rank_methods.KeepState(operation, self.state.kept_version)
        await self.fleet.call_all(rank_methods.KEEP_STATE, wanted)
        if self.are_on:
            self.state.note_in_memory(version)
            self._has_failed = False

    def tell_failure(self, version: int, error: ArealError) -> None:
        """The version has no snapshot; it is a warning once."""
        logger.log(
            logging.INFO if self._has_failed else logging.WARNING,
            "version %d has no snapshot in memory: %s. The run goes on; if train workers die "
            "before the next one, it goes back to the newest snapshot on the disk",
            version,
            error,
        )
        self._has_failed = True

    async def yield_memory(self, error: StoreFull) -> bool:
        """What cannot be spared has no room: snapshots in memory go, and none is taken any more.

        Returns: whether they have gone, now or before; False: none was ever taken.
        """
        async with self._one_yields:
            if self.are_on:
                await self._give_up(error)
        return self._has_yielded

    async def _give_up(self, error: StoreFull) -> None:
        self._has_yielded, self.are_on = True, False
        self.state.drop_memory_snapshots()
        await self.fleet.call_all(rank_methods.DROP_MEMORY_SNAPSHOTS, None)
        logger.warning(
            "snapshots in memory (checkpoint.memory_snapshots) are given up, because weights and "
            "rows need their room: %s. The run goes on; when train workers die, it goes back to "
            "the newest snapshot on the disk. More shared memory, or "
            "checkpoint.memory_snapshots=false, avoids this",
            error,
        )
