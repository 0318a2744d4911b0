"""Ranks that an earlier start of the script has left: whether they can go on, and from where.

They can if all of them live, and are where the journal says that the run is: at its newest
version, or at the next one, which they have sealed and which was not announced. What the earlier
start had asked of them is done, or goes on; the script asks for the same again, and joins it. The
ranks compute together, so a call that has reached only some of them would keep these waiting for
ever: then they are started anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from areal_sc.engines.base import RankPosition
from areal_sc.errors import ArealError, WaitTimeout
from areal_sc.fleet.fleet import Fleet
from areal_sc.workers.descriptions import DESCRIBE_RANK, RankDescription
from areal_sc.workers.operations import Kind, Operation

logger = logging.getLogger(__name__)

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
