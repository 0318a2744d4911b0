"""Where the ranks of a model stand, and what they were asked for in the step that goes on.

    snapshot of version 5         calls at 5          version 6, and its snapshot
    -----------------------> 5 ----------------> 5 ------------------------------> 6
                                                   the step is complete

Ranks that are started again load a snapshot of their version and repeat the calls of the step that
goes on, in their order: the same batches, cut in the same way, so the same weights come out. Only
metadata is kept, and no longer than the step lasts.

`RankState` is pure: nothing in it waits. `MemorySnapshots` takes the snapshots in the nodes'
memory, one of each version. Each node has what its own ranks need to go on. So a snapshot counts
when all ranks have taken it, and is of use as long as all of them come back to the nodes that they
were on.

consumes     new versions, before anybody is told of them
waits for    the ranks to copy their state
unblocked by their replies, or their death
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from msgspec import structs

from areal_sc.errors import ArealError, StoreFull
from areal_sc.fleet.fleet import Fleet
from areal_sc.metadata import BatchMetadata
from areal_sc.transport.rpc.method import Method
from areal_sc.weights.published import ShardReference
from areal_sc.workers import rank_methods
from areal_sc.workers.operations import Kind, Operation
from areal_sc.workers.rank_methods import Change, RankCall, SnapshotPlace

logger = logging.getLogger(__name__)

WRITES: Final = frozenset((Kind.snapshot, Kind.export))

MAX_UNUSED: Final = 4
"""Computed fields that no update has read; those before them are not repeated."""


@dataclass(eq=False)
class Asked:
    """What the ranks were asked for, and are asked for again on the way back.

    Attributes:
        method: the call.
        shares: its arguments, of each model group.
        shards: what the head of each has sealed, as the caller got it.
    """

    method: Method[Any, Any]
    shares: Sequence[RankCall]
    shards: Sequence[ShardReference] = ()

    @property
    def operation(self) -> Operation | None:
        """None: nothing of the ranks' state is changed."""
        first = self.shares[0]
        return first.operation if isinstance(first, Change) else None

    @property
    def is_update(self) -> bool:
        return self.operation is not None and self.operation.kind is Kind.update


class StartingPoint(NamedTuple):
    """A state that ranks can begin from."""

    version: int
    place: SnapshotPlace


class RankState:
    """The state of the ranks of one model.

    Attributes:
        lineage, version: the policy that the ranks are at.
        calls: what they were asked for at this version, in order.
    """

    def __init__(self) -> None:
        self.begin(0, StartingPoint(0, SnapshotPlace.initial))

    def begin(self, lineage: int, source: StartingPoint) -> None:
        """A new lineage begins, from the initial model or a snapshot on the disk."""
        self.lineage, self.version = lineage, source.version
        self.calls: list[Asked] = []
        self._durable: StartingPoint | None = source
        self._in_memory: set[int] = set()
        self._moved: dict[str, ShardReference] = {}

    def take_over(
        self, lineage: int, version: int, in_memory: Sequence[int], *, is_initial: bool
    ) -> None:
        """The ranks are where an earlier start of the script has left them.

        What it asked of them is not known: the script asks for it again.
        """
        self.begin(lineage, StartingPoint(version, SnapshotPlace.initial))
        self._durable = self._durable if is_initial else None
        self._in_memory = {version} & set(in_memory)

    @property
    def sources(self) -> list[StartingPoint]:
        """The snapshots of this version, which the ranks can begin from; the best one first."""
        found = [StartingPoint(version, SnapshotPlace.memory) for version in self._in_memory]
        found += [self._durable] if self._durable is not None else []
        return [source for source in found if source.version == self.version]

    @property
    def kept_version(self) -> int:
        """The version whose snapshot in memory has to stay; -1: none has to."""
        return self.version if self.version in self._in_memory else -1

    @property
    def is_updating(self) -> bool:
        """Whether the ranks have begun to change the weights of this version."""
        return any(call.is_update for call in self.calls)

    def note(self, call: Asked) -> None:
        """The ranks have done this, or are about to. An update is noted once."""
        updates = [it for it in self.calls if it.is_update]
        if call.is_update and any(it.operation == call.operation for it in updates):
            return
        self.calls.append(call)
        shares = (share for it in self.calls if it.is_update for share in it.shares)
        batches = (batch for share in shares for batch in share.batches)
        read = {shard.shard_id for batch in batches for shard in batch.shards}
        unused = [
            it
            for it in self.calls
            if it.operation is None and not read & {shard.shard_id for shard in it.shards}
        ]
        if len(unused) > MAX_UNUSED:
            self.calls.remove(unused[0])

    def drop_step(self) -> None:
        """The rows of the step that goes on are gone: nothing of it is to be repeated."""
        self.calls = [it for it in self.calls if it.operation and it.operation.kind in WRITES]

    def drop(self, call: Asked) -> None:
        """The call is not to be repeated."""
        if call in self.calls:
            self.calls.remove(call)

    def advance(self, version: int) -> None:
        """The ranks have made a new version."""
        self.version = version
        self.calls.clear()
        self._in_memory &= {version}
        self._moved.clear()  # what was computed for an update is of no use any more

    def note_in_memory(self, version: int) -> None:
        """The snapshot in memory is whole: of this version, or the one that is being made."""
        self._in_memory.add(version)

    def drop_memory_snapshots(self) -> None:
        """There are none any more."""
        self._in_memory.clear()

    def note_durable(self, version: int) -> None:
        """The snapshot on the disk is whole; one of an earlier version is of no use any more."""
        if version == self.version:
            self._durable = StartingPoint(version, SnapshotPlace.disk)

    def note_unreadable(self, source: StartingPoint) -> None:
        """Nothing can begin from it."""
        if source.place is SnapshotPlace.memory:
            self._in_memory.discard(source.version)
        else:
            self._durable = None

    def move(self, shard_id: str, to: ShardReference) -> None:
        """What a shard held is in another one now, which a later life of a rank has sealed."""
        self._moved[shard_id] = to

    def current(self, batch: BatchMetadata) -> BatchMetadata:
        """The batch with the shards that hold its rows now."""
        if not any(shard.shard_id in self._moved for shard in batch.shards):
            return batch
        columns = tuple(
            structs.replace(
                part,
                shards=tuple(
                    structs.replace(shard, **self._moved[shard.shard_id]._asdict())
                    if shard.shard_id in self._moved
                    else shard
                    for shard in part.shards
                ),
            )
            for part in batch.columns
        )
        return structs.replace(batch, columns=columns)


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
