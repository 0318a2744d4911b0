"""How the ranks of a model meet: which of them computes which share, and whose reply counts for it.

workers       0    1    2    3
data rank     0    0    1    1       two model groups of two ranks
head          x         x

An earlier start of the script may have left ranks. They can go on if all of them live, and are
where the journal says that the run is: at its newest version, or at the next one, which they have
sealed and which was not announced. What the earlier start had asked of them is done, or goes on;
the script asks for the same again, and joins it. The ranks compute together, so a call that has
reached only some of them would keep these waiting for ever: then they are started anew.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from msgspec import structs

from areal_sc.engines.base import RankPosition
from areal_sc.errors import ArealError, ConfigError, WaitTimeout
from areal_sc.fleet.fleet import Fleet
from areal_sc.metadata import BatchMetadata, Columns, ShardMetadata, runs_of
from areal_sc.weights.published import ShardReference
from areal_sc.workers import rank_methods
from areal_sc.workers.operations import Kind, Operation
from areal_sc.workers.rank_methods import DESCRIBE_RANK, RankDescription

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class RankLayout:
    """The model groups of the ranks of one model.

    Attributes:
        data_ranks: of each worker.
        heads: worker that replies for each share, by data rank.
        min_saved_tokens: see `RankPosition`.
    """

    data_ranks: tuple[int, ...]
    heads: tuple[int, ...]
    min_saved_tokens: float = math.inf

    @classmethod
    def of(cls, places: Sequence[RankPosition]) -> RankLayout:
        """The layout of ranks that were asked where they stand."""
        data_ranks = tuple(place.data_rank for place in places)
        heads = {place.data_rank: worker for worker, place in enumerate(places) if place.is_head}
        num_heads = sum(place.is_head for place in places)
        are_whole = sorted(set(data_ranks)) == sorted(heads) == list(range(num_heads))
        assert are_whole, f"model groups of data ranks 0, 1, … with one head each: {places}"
        by_data_rank = tuple(heads[data_rank] for data_rank in range(num_heads))
        return cls(data_ranks, by_data_rank, places[0].min_saved_tokens)

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
            parts = batch.take(rows).partition(
                self.num_shares, min_saved_tokens=self.min_saved_tokens
            )
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


ASK_AGAIN_S: Final = 0.05
"""Between two questions to ranks that still compute a field."""

_ALONE: Final = frozenset((Kind.publish, Kind.export, Kind.memory_snapshot))
"""Operations that each rank does by itself, or that may fail on one of them alone."""


class FoundRanks(NamedTuple):
    """Where the ranks are.

    Attributes:
        has_begun_step: they have trained, or train, the step after `version`.
        in_memory: versions of which all ranks have a snapshot in memory.
    """

    lineage: int
    version: int
    positions: list[RankPosition]
    has_begun_step: bool
    in_memory: list[int]


async def find_ranks(fleet: Fleet, lineage: int, version: int) -> FoundRanks | None:
    """The ranks as they are; None: they cannot go on, which is logged with the reason.

    Args:
        lineage, version: the newest policy that was announced.
    """
    if not any(member.is_adopted for member in fleet.members):
        return None
    dead = [member.name for member in fleet.members if not member.is_adopted]
    try:
        cause = f"{', '.join(dead)} did not live any more" if dead else ""
        ranks = [] if dead else await _idle_ranks(fleet)
        cause = cause or misfit(ranks, lineage, version)
    except ArealError as error:
        cause = str(error)
    if cause:
        logger.warning("the ranks of before are started anew: %s", cause)
        return None
    versions = (set(rank.in_memory) for rank in ranks)
    return FoundRanks(
        lineage,
        version,
        [rank.position for rank in ranks if rank.position is not None],
        has_begun_step=any(_has_begun(rank, lineage, version) for rank in ranks),
        in_memory=sorted(set.intersection(*versions)),
    )


def misfit(ranks: Sequence[RankDescription], lineage: int, version: int) -> str:
    """Why ranks cannot go on from a policy; "" if they can."""
    for number, rank in enumerate(ranks):
        if rank.position is None or rank.world_size != len(ranks):
            return f"rank {number} had not joined the others"
        if rank.broken:
            return rank.broken
        if rank.lineage != lineage or rank.version not in (version, version + 1):
            return (
                f"rank {number} is at lineage {rank.lineage}, version {rank.version}, and the "
                f"journal at lineage {lineage}, version {version}"
            )
    common = [_together(rank, lineage, version) for rank in ranks]
    if any(calls != common[0] for calls in common):
        return "a call has reached some of them, and others not"
    return ""


async def _idle_ranks(fleet: Fleet) -> list[RankDescription]:
    """What the ranks say, once they compute nothing for a caller that is gone.

    Other calls name operations, which are made in their order.
    """
    limit_s = fleet.config.transport.call_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            while True:
                ranks = await fleet.call_all(DESCRIBE_RANK, None)
                if not any(rank.is_computing for rank in ranks):
                    return ranks
                await asyncio.sleep(ASK_AGAIN_S)
    except TimeoutError:
        raise WaitTimeout(
            f"they still compute what nobody waits for, after {limit_s:g} s"
        ) from None


def _together(
    rank: RankDescription, lineage: int, version: int
) -> tuple[int, frozenset[Operation]]:
    """What this rank was asked for that all ranks do together."""
    asked = frozenset(
        operation
        for operation in rank.operations
        if (operation.lineage, operation.version) == (lineage, version)
        and operation.kind not in _ALONE
    )
    return rank.num_computed, asked


def _has_begun(rank: RankDescription, lineage: int, version: int) -> bool:
    return rank.version > version or any(
        (operation.lineage, operation.version) == (lineage, version)
        and operation.kind is Kind.update
        for operation in rank.operations
    )
