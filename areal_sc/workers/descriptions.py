"""What workers tell of themselves to a controller that takes them over. No torch."""

from __future__ import annotations

from types import NoneType
from typing import Final

from msgspec import Struct

from areal_sc.engines.base import RankPosition
from areal_sc.transport.rpc.method import Method
from areal_sc.workers.calls import GroupAttempt, HeldShard
from areal_sc.workers.operations import Operation

NO_POLICY: Final = (-1, -1)
"""The policy of a rollout worker that has given its weights up; no other has this name."""


class RankDescription(Struct, frozen=True, array_like=True):
    """Where a rank stands.

    Attributes:
        position: None: it has not joined the others yet.
        world_size: of the ranks that it has joined.
        broken: why its weights are between two versions; "" if they are not.
        operations: those that it has done, or was asked for, at its version and the one before.
        num_computed: times that it was asked to compute a field of rows.
        is_computing: some of these calls go on.
        in_memory: versions of this lineage whose snapshots in memory are whole.
    """

    lineage: int
    version: int
    position: RankPosition | None = None
    world_size: int = 0
    broken: str = ""
    operations: tuple[Operation, ...] = ()
    num_computed: int = 0
    is_computing: bool = False
    in_memory: tuple[int, ...] = ()


class EndedRun(Struct, frozen=True, array_like=True):
    """A run whose reply the worker keeps, and the shards of its rows."""

    run: GroupAttempt
    shards: tuple[str, ...]


class RolloutDescription(Struct, frozen=True, array_like=True):
    """What a rollout worker holds and does.

    Attributes:
        policy: lineage and version of its weights; None: those that its engine was built with.
        going: runs of groups that go on.
        ended: those whose replies are kept.
        shards: all that are in its store.
    """

    policy: tuple[int, int] | None
    going: tuple[GroupAttempt, ...]
    ended: tuple[EndedRun, ...]
    shards: tuple[HeldShard, ...]


DESCRIBE_RANK = Method("describe_rank", NoneType, RankDescription)
DESCRIBE_ROLLOUT = Method("describe_rollout", tuple[int, ...], RolloutDescription)
"""The argument is that of `calls.ADOPTED_SHARDS`."""
