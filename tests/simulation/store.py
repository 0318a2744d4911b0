"""What simulated workers hold: names and sizes of shards, and keys of rows and snapshots."""

from __future__ import annotations

from typing import NamedTuple

from areal_sc.errors import ShardGone, StoreFull
from areal_sc.metadata import RowMetadata
from areal_sc.transport.shards.ids import make_shard_id, parse_shard_id
from areal_sc.workers import calls

RowKey = tuple[int, int, int, int]
"""Group, attempt, episode and length of a row."""


Past = list[tuple[int, tuple[RowKey, ...]]]
"""What made some weights: policy version and rows of each minibatch."""


def row_key(row: RowMetadata) -> RowKey:
    return row.group_id, row.attempt, row.episode, row.sequence_length


class SnapshotKey(NamedTuple):
    """A rank's part of a snapshot; on the disk it has no node and no lineage."""

    node: str
    lineage: int
    version: int
    rank: str


class SimulatedStore:
    """Names and sizes of sealed shards, those of earlier lives of the worker among them.

    Attributes:
        sizes: shard id -> bytes.
        group_of: shard id -> the group whose rows the shard holds; weights have none.
        episodes: shard id -> the finished episode that the shard is of.
        copies: weights that others have sealed, and what each of them is a copy of.
    """

    def __init__(self, node_id: str, incarnation: str, max_bytes: int) -> None:
        self.node_id = node_id
        self.incarnation = incarnation
        self.max_bytes = max_bytes
        self.last_sequence = 0
        self.sizes: dict[str, int] = {}
        self.group_of: dict[str, int] = {}
        self.episodes: dict[str, calls.FinishedEpisode] = {}
        self.copies: dict[str, tuple[int, int]] = {}

    def adopt(self, earlier: SimulatedStore) -> None:
        """Takes over all that an earlier life has sealed."""
        self.sizes.update(earlier.sizes)
        self.group_of.update(earlier.group_of)
        self.episodes.update(earlier.episodes)
        self.copies.update(earlier.copies)

    def lose(self) -> None:
        """The memory that the shards lay in is gone."""
        self.sizes.clear()
        self.group_of.clear()
        self.episodes.clear()
        self.copies.clear()

    @property
    def held(self) -> tuple[calls.HeldShard, ...]:
        return tuple(calls.HeldShard(i, self.episodes.get(i)) for i in self.sizes)

    @property
    def adopted(self) -> tuple[calls.HeldShard, ...]:
        own = self.incarnation
        return tuple(it for it in self.held if parse_shard_id(it.shard_id)[0] != own)

    def put(self, num_bytes: int, episode: calls.FinishedEpisode | None = None) -> str:
        if 0 < self.max_bytes < sum(self.sizes.values()) + num_bytes:
            raise StoreFull(
                f"{self.node_id}: {num_bytes} bytes beside {sum(self.sizes.values())}, "
                f"the limit is {self.max_bytes}"
            )
        self.last_sequence += 1
        shard_id = make_shard_id(self.incarnation, self.last_sequence)
        self.sizes[shard_id] = num_bytes
        if episode is not None:
            self.group_of[shard_id] = episode.run.group_id
            self.episodes[shard_id] = episode
        return shard_id

    def put_copy(self, policy: tuple[int, int]) -> str:
        shard_id = self.put(0)
        self.copies[shard_id] = policy
        return shard_id

    def remove(self, shard_id: str) -> None:
        self.sizes.pop(shard_id, None)
        self.copies.pop(shard_id, None)
        self.episodes.pop(shard_id, None)

    def drop(self, shard_id: str) -> None:
        """Forgets rows that no reply tells of."""
        self.remove(shard_id)
        self.group_of.pop(shard_id, None)

    def require(self, shard_id: str) -> None:
        if shard_id not in self.sizes:
            raise ShardGone(f"shard {shard_id} on {self.node_id} is gone")

    def sweep(self, sweep: calls.Sweep) -> dict[str, int]:
        """Drops what the call names; returns the groups whose shards went, by their ids."""
        dropped: dict[str, int] = {}
        for shard_id in list(self.sizes):
            incarnation, n = parse_shard_id(shard_id)
            if incarnation != self.incarnation:
                kept = sweep.adopted_live
                is_dropped = kept is not None and shard_id not in kept
            else:
                is_old = n <= sweep.acknowledged and shard_id not in self.copies
                is_old = is_old and n not in sweep.live
                is_dropped = n in sweep.dead or is_old
            if is_dropped:
                self.remove(shard_id)
                if shard_id in self.group_of:
                    dropped[shard_id] = self.group_of.pop(shard_id)
        return dropped
