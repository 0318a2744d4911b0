"""Which ranks compute which share of a minibatch, and whose reply counts for it.

workers       0    1    2    3
data rank     0    0    1    1       two model groups of two ranks
head          x         x
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec import structs

from areal_sc.engines.base import RankPosition
from areal_sc.errors import ConfigError
from areal_sc.fleet.fleet import Fleet
from areal_sc.metadata import BatchMetadata, Columns, ShardMetadata, runs_of
from areal_sc.weights.published import ShardReference
from areal_sc.workers import rank_methods

T = TypeVar("T")


@dataclass(frozen=True)
class RankLayout:
    """The model groups of the ranks of one model.

    Attributes:
        data_ranks: of each worker.
        heads: worker that replies for each share, by data rank.
    """

    data_ranks: tuple[int, ...]
    heads: tuple[int, ...]

    @classmethod
    def of(cls, places: Sequence[RankPosition]) -> RankLayout:
        """The layout of ranks that were asked where they stand."""
        data_ranks = tuple(place.data_rank for place in places)
        heads = {place.data_rank: worker for worker, place in enumerate(places) if place.is_head}
        num_heads = sum(place.is_head for place in places)
        are_whole = sorted(set(data_ranks)) == sorted(heads) == list(range(num_heads))
        assert are_whole, f"model groups of data ranks 0, 1, … with one head each: {places}"
        return cls(data_ranks, tuple(heads[data_rank] for data_rank in range(num_heads)))

    @property
    def num_shares(self) -> int:
        """Number of model groups; each computes one share of the rows."""
        return len(self.heads)

    def split(self, batch: BatchMetadata, num_minibatches: int) -> list[list[list[int]]]:
        """Row numbers of each share of each minibatch: [share][minibatch][row], ascending.

        Minibatches are cut first, between episodes, so what one update trains on does not depend on
        the ranks.
        """
        shares: list[list[list[int]]] = [[] for _ in self.heads]
        for rows in batch.partition(num_minibatches, "episodes"):
            parts = batch.take(rows).partition(self.num_shares)
            for share, part in zip(shares, parts, strict=True):
                share.append([rows[row] for row in part])
        return shares

    def spread(self, shares: Sequence[T]) -> list[T]:
        """Each worker's share."""
        return [shares[data_rank] for data_rank in self.data_ranks]

    def of_heads(self, replies: Sequence[T]) -> list[T]:
        """The reply for each share."""
        return [replies[head] for head in self.heads]


def with_sealed_fields(
    batch: BatchMetadata,
    types: dict[str, str],
    share_rows: Sequence[Sequence[int]],
    sealed: Sequence[ShardReference],
) -> BatchMetadata:
    """The batch with fields that the ranks have computed share by share.

    Args:
        types: of the fields, by name.
        share_rows: rows of each share, in the order in which its head has sealed them.
        sealed: the shard of each share; of one without rows, none is read.
    """
    shards = []
    for rows, shard in zip(share_rows, sealed, strict=True):
        if rows:
            runs = runs_of((row, place) for place, row in enumerate(rows))
            shards.append(ShardMetadata(*shard, runs))
    columns = (Columns(types, tuple(shards), is_computed=True),)
    return batch.union(structs.replace(batch, columns=columns))


async def meet(fleet: Fleet, lineage: int) -> RankLayout:
    """New ranks join each other, and build their engines."""
    world_size = len(fleet.members)
    init_method = ""
    if world_size > 1:  # one rank alone opens no port for it
        rank_0 = fleet.members[0]
        init_method = await fleet.call(rank_0, rank_methods.CREATE_RENDEZVOUS, None)
    places = await fleet.call_each(
        rank_methods.INITIALIZE_RANK,
        [
            rank_methods.InitializeRank(rank, world_size, init_method, lineage)
            for rank in range(world_size)
        ],
    )
    return RankLayout.of(places)


async def try_loss(fleet: Fleet, loss: int) -> None:
    """Every rank tries the loss of this number on the same rows.

    Raises: ConfigError: it is none, or its metrics depend on the rank.
    """
    tried = await fleet.call_all(rank_methods.TRY_LOSS, rank_methods.TryLoss(loss))
    for rank, names in enumerate(tried):
        if names != tried[0]:
            raise ConfigError(
                f"actor.ppo.loss: on the same rows it gives the metrics {', '.join(tried[0])} on "
                f"rank 0, and {', '.join(names)} on rank {rank}: a mean over ranks would be one "
                "over some of them"
            )
