"""Where the ranks of a model stand, and the calls that brought them there since a snapshot.

    snapshot of version 4        calls at 4        calls at 5       begun at 6
    ----------------------> 4 ------------> 5 ------------> 6 ------------> (not published)
                                publication     publication

Ranks that are started again load a snapshot and repeat the calls since, in their order: the same
batches, cut in the same way, so the same weights come out. Only metadata is kept, and no longer
than a repeat may need it.

Pure state: nothing here waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from msgspec import structs

from areal_sc.metadata import BatchMetadata
from areal_sc.transport.rpc.method import Method
from areal_sc.weights import ShardReference
from areal_sc.workers.operations import Kind, Operation
from areal_sc.workers.rank_methods import Change, RankCall, SnapshotPlace

WRITES: Final = frozenset((Kind.snapshot, Kind.memory_snapshot, Kind.export))

MAX_UNUSED: Final = 4
"""Computed fields that no update has read; those before them are not repeated."""

MAX_UNCOVERED: Final = 64
"""Versions whose calls are kept although the snapshots that would cover them fail."""


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

    @property
    def is_write(self) -> bool:
        """Whether ranks write beside training; the call goes when that has ended."""
        return self.operation is not None and self.operation.kind in WRITES


class StartingPoint(NamedTuple):
    """A state that ranks can begin from."""

    version: int
    place: SnapshotPlace


class TrainHistory:
    """The history of one model in this lineage.

    Args:
        has_memory_snapshots: versions are covered by snapshots in the memory of the node.
        max_steps: calls since a snapshot on the disk are kept for at most so many versions.

    Attributes:
        lineage, version: the policy that the ranks are at.
        reads_rows: since a snapshot on the disk, updates have read rows of batches.
        has_memory_snapshots: as given.
    """

    def __init__(self, *, has_memory_snapshots: bool, max_steps: int) -> None:
        self.has_memory_snapshots = has_memory_snapshots
        self._max_steps = max_steps
        self.begin(0, StartingPoint(0, SnapshotPlace.initial))

    def begin(self, lineage: int, source: StartingPoint) -> None:
        """A new lineage begins, from the initial model or a snapshot on the disk."""
        self.lineage = lineage
        self.version = version = source.version
        self._durable = source
        self._is_durable = True
        self.reads_rows = False
        self._first = version  # whose calls are known, as are those of all later ones
        self._in_memory: list[int] = []
        self._writes: set[Asked] = set()
        self._calls: dict[int, list[Asked]] = {}
        self._unused: deque[tuple[int, Asked]] = deque()
        self._moved: dict[str, ShardReference] = {}

    def take_over(
        self, lineage: int, version: int, in_memory: Sequence[int], *, is_initial: bool
    ) -> None:
        """The ranks are where an earlier start of the script has left them.

        What it asked of them is not known. So they can begin from this version again only if it has
        a snapshot in memory, or is the initial model; else from the next one that is taken.
        """
        place = SnapshotPlace.initial if is_initial else SnapshotPlace.disk
        self.begin(lineage, StartingPoint(version, place))
        self._is_durable = is_initial
        self._in_memory = [earlier for earlier in in_memory if earlier == version]

    @property
    def rows_from(self) -> int:
        """The rows of this step and later ones may be asked for again."""
        durable = self._durable.version
        if self.version - durable <= self._max_steps:
            return durable
        if not self.has_memory_snapshots:
            return self.version
        newest = self._in_memory[-1] if self._in_memory else durable
        return newest if self.version - newest <= MAX_UNCOVERED else self.version

    @property
    def sources(self) -> list[StartingPoint]:
        """What the ranks can begin from, newest first."""
        found = [StartingPoint(version, SnapshotPlace.memory) for version in self._in_memory]
        found += [self._durable] if self._is_durable else []
        known = [source for source in found if source.version >= self._first]
        return sorted(known, reverse=True, key=lambda source: source.version)

    def calls_at(self, version: int) -> list[Asked]:
        """What was asked for at a version, in order."""
        return list(self._calls.get(version, []))

    @property
    def is_updating(self) -> bool:
        """Whether the ranks have begun to change the weights of this version."""
        return any(call.is_update for call in self._calls.get(self.version, ()))

    @property
    def is_writing(self) -> bool:
        """Whether the ranks write something that is not a snapshot in memory."""
        return bool(self._writes)

    def note(self, call: Asked) -> None:
        """The ranks have done this, or are about to. An update is noted once."""
        if (operation := call.operation) is not None and call.is_update:
            at = self.calls_at(operation.version)
            if any(it.is_update and it.operation == operation for it in at):
                return
        self._calls.setdefault(self.version, []).append(call)
        if call.is_write:
            self._writes.add(call)
        elif call.is_update:
            batches = [batch for share in call.shares for batch in share.batches]
            self.reads_rows = self.reads_rows or bool(batches)
            read = {shard.shard_id for batch in batches for shard in batch.shards}
            self._unused = deque(
                (version, computed)
                for version, computed in self._unused
                if not read & {shard.shard_id for shard in computed.shards}
            )
        else:
            self._unused.append((self.version, call))
            if len(self._unused) > MAX_UNUSED:
                self.drop(*self._unused.popleft())

    def drop_step(self) -> None:
        """The rows of the step that goes on are gone: nothing of it is to be repeated."""
        for call in self.calls_at(self.version):
            if not call.is_write:
                self.drop(self.version, call)

    def drop(self, version: int, call: Asked) -> None:
        """The call is not to be repeated."""
        if call in (at := self._calls.get(version, [])):
            at.remove(call)
        self._writes.discard(call)

    def advance(self, version: int) -> None:
        """The ranks have made a new version."""
        self.version = version
        self._moved.clear()  # what was computed for an update is of no use any more
        self._forget()

    def make_room_in_memory(self) -> int:
        """Before a snapshot is written there; returns the only version that stays, or -1."""
        del self._in_memory[:-1]
        return self._in_memory[-1] if self._in_memory else -1

    def drop_memory_snapshots(self) -> None:
        """There are none any more, and none will be written."""
        self.has_memory_snapshots = False
        self._in_memory.clear()

    def note_in_memory(self, version: int) -> None:
        """The snapshot in memory is whole."""
        self._in_memory.append(version)
        self._forget()

    def note_durable(self, version: int) -> None:
        """The snapshot on the disk is whole."""
        if self._durable.version < version <= self.version:
            self._durable, self._is_durable = StartingPoint(version, SnapshotPlace.disk), True
            self._forget()

    def note_unreadable(self, source: StartingPoint) -> None:
        """Nothing can begin from it."""
        if source.place is SnapshotPlace.memory:
            self._in_memory.remove(source.version)
        else:
            self._first = max(self._first, source.version + 1)

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

    def _forget(self) -> None:
        # what reads no rows can be repeated from any snapshot
        first = self.rows_from if self.reads_rows else self._durable.version
        self._first = max(self._first, min([first, *self._in_memory[-1:]]))
        for version in [version for version in self._calls if version < self._first]:
            del self._calls[version]
        self._unused = deque(pair for pair in self._unused if pair[0] >= self._first)
